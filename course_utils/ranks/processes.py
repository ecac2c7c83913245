"""Starting rank processes, and ending them: the kernel's side.

Linux: forks of a zygote, which all ``Ranks`` of one kernel share. Elsewhere fork is
not safe once torch is loaded: each rank is a fresh Python process. Either way the
driver gets :class:`RankProcess` objects with one and the same interface.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil

from course_utils.ranks import guard
from course_utils.ranks.guard import kill_family
from course_utils.ranks.output import MARK, MARK_BYTES
from course_utils.ranks.report import RanksError
from course_utils.ranks.zygote import import_all

PACKAGE_FOLDER = str(Path(__file__).resolve().parent.parent.parent)
# torch asks for the name of 127.0.0.1 when a TCPStore connects; where no name server
# answers, that must not take the resolver's usual 5 seconds.
QUICK_NAMES = "timeout:1 attempts:1"
BYTES_A_SECOND = 1e8  # of messages that a slow machine sends
START_SECONDS = 120.0  # importing torch from a cold disk takes its time


def start_method() -> str:
    """``"fork"`` (from a zygote) on Linux, else ``"spawn"``.

    The environment variable ``RANKS_START_METHOD`` overrides it.
    """
    chosen = os.environ.get("RANKS_START_METHOD", "")
    if chosen not in ("", "fork", "spawn"):
        raise ValueError(
            f"RANKS_START_METHOD is {chosen!r}; it must be 'fork' or 'spawn'"
        )
    return chosen or ("fork" if sys.platform == "linux" else "spawn")


def current_folder() -> str | None:
    """Where this process works; None if somebody has removed that folder."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def seconds_of_work(pids: Mapping[int, int]) -> dict[int, float]:
    """Rank -> what its process has done so far, in seconds of CPU time.

    Ranks whose process has ended are left out. On Linux gloo's own thread counts by the
    bytes that it has sent: where it has lost a message, it computes for ever.
    """
    done = {}
    for rank, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            done[rank] = times.user + times.system
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                if sent := process.io_counters().write_chars:
                    done[rank] += sent / BYTES_A_SECOND - gloo_seconds(pid)
    return done


def gloo_seconds(pid: int) -> float:
    """CPU time of the thread of a process that carries gloo's messages (on Linux)."""
    seconds = 0.0
    for thread in psutil.Process(pid).threads():
        # One that has ended meanwhile is no trouble: psutil leaves it out, too.
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/task/{thread.id}/comm").read_text()
            if name.startswith("gloo"):
                seconds += thread.user_time + thread.system_time
    return seconds


def seconds_without_core(pids: Mapping[int, int]) -> dict[int, float]:
    """Rank -> how long its threads were ready to run so far, and got no core.

    Only Linux tells (/proc/pid/task/tid/schedstat): 0.0 elsewhere.
    """
    waited = dict.fromkeys(pids, 0.0)
    for rank, pid in pids.items():
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                waited[rank] += int(file.read_text().split()[1]) * 1e-9
    return waited


@contextlib.contextmanager
def interrupts_held(raise_after: bool = False) -> Iterator[None]:
    """What is inside must not be broken off by Ctrl-C; it takes a few seconds at most.

    Args:
        raise_after: let one that came interrupt at the end; else forget it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came.is_set() and raise_after:  # rather than what went wrong inside
            signal.raise_signal(signal.SIGINT)  # may be held by another one, outside


def temporary_folder() -> str:
    """A folder for what ranks put into TMPDIR: a killed rank does not tidy up."""
    return tempfile.mkdtemp(prefix="ranks-")


def remove_folder(folder: str, seconds: float = 1.0) -> None:
    """Remove it; a killed rank may put something there until it has really ended."""
    deadline = time.monotonic() + seconds
    while os.path.exists(folder):
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def environment_of_ranks(environment: dict[str, str], folder: str) -> dict[str, str]:
    """The same environment, as ranks need it; temporary files go to ``folder``."""
    paths = [PACKAGE_FOLDER, *filter(None, [environment.get("PYTHONPATH")])]
    return {
        "RES_OPTIONS": QUICK_NAMES,
        **environment,
        "OMP_NUM_THREADS": "1",  # ranks share the cores among them
        "TMPDIR": folder,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def path_of_ranks() -> list[str]:
    """``sys.path`` of the ranks: they import what this process can import."""
    return [PACKAGE_FOLDER, *(p for p in sys.path if p != PACKAGE_FOLDER)]


def python_of(module: str) -> list[str]:
    """The command for ``main()`` of a module beside this one, without its arguments.

    ``-m`` would look into the working folder first, for all that Python and torch
    import: a learner's ``random.py`` there would take the place of Python's.
    """
    code = (
        "import sys; sys.path = [path for path in sys.path if path]; "
        f"from course_utils.ranks.{module} import main; main()"
    )
    return [sys.executable, "-c", code]


class RankProcess:
    """A running rank: where to talk to it and how to end it.

    Attributes:
        rank: its number.
        pid: its process, which is also its process group.
        channel: requests and replies (pickled dictionaries).
        output: something to wait on; :meth:`read_output` gives what it has printed.
    """

    rank: int
    pid: int | None = None  # not yet known
    channel: Connection
    output: Any

    def read_output(self) -> bytes:
        """What the rank has printed since the last call; ``b""`` if nothing."""
        raise NotImplementedError

    def output_is_complete(self, mark: float) -> bool:
        """Has all arrived that it printed before this mark (infinity: its end)?"""
        return True  # once it has answered, all is in its pipe

    def ask_for_dump(self) -> None:
        """Have the signal handler of faulthandler write down where it is."""
        if hasattr(signal, "SIGUSR1"):
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGUSR1)

    def wait_for_dump(self, deadline: float) -> str:
        """What it wrote when asked; "" if nothing has come by then (monotonic)."""
        dump = ""
        while True:
            more = self.last_dump()
            dump += more
            # It comes line by line.
            if (dump and not more) or time.monotonic() > deadline:
                return dump
            time.sleep(0.02)

    def last_dump(self) -> str:
        """What faulthandler has written; also on a fatal signal."""
        raise NotImplementedError

    def exit_status(self, wait: float = 0.0) -> int | None:
        """How it ended: exit code, or -signal; None while it runs or if unknown."""
        raise NotImplementedError

    def helper_ended(self) -> bool:
        """Has the process ended that would say how this rank ended?"""
        return False

    def kill(self) -> None:
        """End the rank and what it has started; close its channel."""
        raise NotImplementedError


# ------------------------------------------------------------------------ fork (Linux)
class ZygoteProcess:
    """The kernel's handle on the helper process; all ``Ranks`` share one.

    ``acquire()`` starts it or counts one more user; after the last ``release()`` it
    ends.
    """

    current: ZygoteProcess | None = None
    _guard = threading.Lock()

    def __init__(self) -> None:
        self.users = 0
        self.ready = False  # has imported torch
        self.owner = os.getpid()
        self.imported: set[str] = set()
        self.forked: dict[str, int] = {}
        self.ended: dict[int, int] = {}
        self.failure: str | None = None
        self.lock = threading.RLock()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.folder = temporary_folder()
        with theirs:
            self.process = subprocess.Popen(
                [*python_of("zygote"), str(theirs.fileno()), self.folder],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Jupyter interrupts a whole process group
                env=environment_of_ranks(dict(os.environ), self.folder),
            )

    @classmethod
    def prepare(cls) -> None:
        """Start importing torch now, for the first ``Ranks`` to come."""
        with cls._guard:
            if cls.current is None or not cls.current.usable():
                cls.current = cls()

    @classmethod
    def acquire(cls) -> ZygoteProcess:
        """The zygote of this process, started if there is none."""
        cls.prepare()
        with cls._guard:
            cls.current.users += 1
            return cls.current

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def release(self) -> None:
        """One user less; the last one ends it."""
        self.users -= 1
        if self.users <= 0:
            self.close()

    def close(self) -> None:
        """End it with all its ranks."""
        with ZygoteProcess._guard:
            if ZygoteProcess.current is self:
                ZygoteProcess.current = None
        self.pump()
        self.socket.close()
        if self.owner == os.getpid():
            if not self.ready:  # it does not listen yet, and has nothing to tidy up
                self.process.kill()
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(3)
            remove_folder(self.folder)

    def fork(self, request: dict[str, Any], files: list[int]) -> None:
        """Ask for one rank; ``request["token"]`` names it in :attr:`forked`."""
        try:
            socket.send_fds(self.socket, [pickle.dumps(request)], files)
        except OSError as error:
            raise self._gone() from error

    def import_first(self, module: str) -> None:
        """Import this module before the next fork: the ranks then need not.

        Only what is safe to fork: it starts no thread and touches no GPU.
        """
        if module not in self.imported:
            self.imported.add(module)
            self.call_first(import_all, [module])

    def call_first(self, function: Callable[..., Any], *args: Any) -> None:
        """Call this before the next fork: the ranks have what it remembers.

        Args:
            function: of a module that was imported with :meth:`import_first`.
            args: plain data.
        """
        with contextlib.suppress(OSError):  # the next fork tells what is wrong
            call = pickle.dumps((function, *args))
            self.socket.sendall(pickle.dumps({"call": call}))

    def pump(self) -> None:
        """Read what it has to say, without waiting."""
        with self.lock:
            while True:
                try:
                    data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
                except (BlockingIOError, OSError):
                    return
                if not data:
                    if self.failure is None:
                        self.failure = "it ended"
                    return
                message = pickle.loads(data)
                if "ready" in message:
                    self.ready = True
                elif "forked" in message:
                    self.forked[message["forked"]] = message["pid"]
                    self.ended.pop(message["pid"], None)  # of an earlier rank
                elif "ended" in message:
                    self.ended[message["ended"]] = os.waitstatus_to_exitcode(
                        message["status"]
                    )
                elif "failed" in message:
                    self.failure = message["failed"]

    def wait_forked(self, token: str) -> int:
        """The pid of the rank that was asked for under this token."""
        deadline = time.monotonic() + START_SECONDS
        while token not in self.forked:
            self.pump()
            if token in self.forked:
                break
            if self.failure or not self.usable() or time.monotonic() > deadline:
                raise self._gone()
            select.select([self.socket], [], [], 0.05)
        return self.forked.pop(token)

    def _gone(self) -> RanksError:
        self.pump()
        why = self.failure or "it does not answer"
        return RanksError(
            f"the helper process that starts ranks failed: {why}. "
            "Run `python3 -m course_utils doctor` in a terminal to see what is wrong."
        )


def read_without_waiting(pipe: int) -> bytes:
    """What is in a pipe that does not block; ``b""`` if nothing, or if it is closed."""
    try:
        return os.read(pipe, 1 << 16)
    except OSError:
        return b""


class ForkedRank(RankProcess):
    """A rank that the zygote has forked."""

    def __init__(
        self,
        zygote: ZygoteProcess,
        rank: int,
        world_size: int,
        environment: dict[str, str],
        shared: list[int],
    ) -> None:
        self.zygote, self.rank = zygote, rank
        self.channel, their_channel = Pipe(duplex=True)
        self.output, their_output = os.pipe()
        self.dump, their_dump = os.pipe()
        os.set_blocking(self.output, False)
        os.set_blocking(self.dump, False)
        self.token = secrets.token_hex(8)
        request = {
            "token": self.token,
            "rank": rank,
            "world_size": world_size,
            "environment": environment,
            "folder": current_folder(),
            "path": path_of_ranks(),
        }
        files = [their_channel.fileno(), their_output, their_dump, *shared]
        try:
            zygote.fork(request, files)
        finally:
            their_channel.close()
            os.close(their_output)
            os.close(their_dump)
        self.closed = False

    def wait_started(self) -> None:
        self.pid = self.zygote.wait_forked(self.token)

    def read_output(self) -> bytes:
        return read_without_waiting(self.output)

    def last_dump(self) -> str:
        return read_without_waiting(self.dump).decode(errors="replace")

    def exit_status(self, wait: float = 0.0) -> int | None:
        deadline = time.monotonic() + wait
        while True:
            self.zygote.pump()
            status = self.zygote.ended.get(self.pid)
            if status is not None or self.helper_ended():
                return status
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.005)

    def helper_ended(self) -> bool:
        return self.zygote.failure is not None

    def kill(self) -> None:
        if self.pid is not None:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)
        self.channel.close()
        if not self.closed:
            self.closed = True
            os.close(self.output)
            os.close(self.dump)


# ------------------------------------------------------------------- spawn (elsewhere)
class SharedFolder:
    """What the spawned ranks of one ``Ranks`` share: files, and a guard.

    Args:
        board_bytes: size of the board of :mod:`course_utils.ranks.agreement`.
    """

    def __init__(self, board_bytes: int) -> None:
        self.path = temporary_folder()
        with open(os.path.join(self.path, "board"), "wb") as board:
            board.truncate(board_bytes)
        self.guard = subprocess.Popen(
            [sys.executable, guard.__file__, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **apart(),
        )

    def watch_over(self, pid: int) -> None:
        """Have the guard end this process when the kernel is gone."""
        with contextlib.suppress(OSError):  # the guard itself was ended
            self.guard.stdin.write(b"%d\n" % pid)
            self.guard.stdin.flush()

    def meeting_file(self, generation: int) -> str | None:
        """A new file in which ranks find each other; None where torch can't open it.

        On Windows torch takes the name as 8-bit text.
        """
        path = os.path.join(self.path, f"meeting-{generation}")
        return path if path.isascii() or sys.platform != "win32" else None

    def close(self) -> None:
        """End the guard, which removes the folder; make sure of that."""
        with contextlib.suppress(OSError):
            self.guard.stdin.close()
        try:
            self.guard.wait(3)
        except subprocess.TimeoutExpired:
            self.guard.kill()
            self.guard.wait(3)
        remove_folder(self.path)


class SpawnedRank(RankProcess):
    """A rank that is a fresh Python process, with a connection over loopback."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        environment: dict[str, str],
        shared: SharedFolder,
    ) -> None:
        self.rank = rank
        self.key = secrets.token_bytes(32)
        environment = environment_of_ranks(environment, shared.path)
        environment["RANKS_KEY"] = self.key.hex()
        self.channel, nobody = Pipe()  # until the rank calls back
        nobody.close()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.05)
        port = self.listener.getsockname()[1]
        self.process = subprocess.Popen(
            [
                *python_of("rank"),
                *map(str, (port, rank, world_size)),
                shared.path,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            **apart(),
        )
        self.pid = self.process.pid
        shared.watch_over(self.pid)
        self.handle = psutil.Process(self.pid)
        self.dump_path = os.path.join(shared.path, f"dump-{rank}-{port}")
        self.dump_read = 0
        # A pipe can't be waited on everywhere; a Connection can. A thread copies.
        self.output, feed = Pipe(duplex=False)
        self.held, self.marked, self.ended = b"", 0, False
        threading.Thread(target=self._copy, args=(feed,), daemon=True).start()

    def _copy(self, feed: Connection) -> None:
        with contextlib.suppress(OSError, ValueError), feed, self.process.stdout as out:
            while chunk := os.read(out.fileno(), 1 << 16):
                feed.send_bytes(chunk)

    def wait_started(self) -> None:
        """Wait until it has imported torch and calls back."""
        deadline = time.monotonic() + START_SECONDS
        while not self.has_called_back():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RanksError(
                    f"rank {self.rank} could not be started: {self._last_words()}. "
                    "Run `python3 -m course_utils doctor` in a terminal to see what "
                    "is wrong."
                )
        self.listener.close()

    def has_called_back(self) -> bool:
        """Is it connected, and is it really this rank? Waits a moment."""
        try:
            connected, _ = self.listener.accept()
        except TimeoutError:
            return False
        channel = Connection(connected.detach())
        try:
            known = channel.poll(1.0) and hmac.compare_digest(
                channel.recv_bytes(len(self.key)), self.key
            )
        except (EOFError, OSError):
            known = False
        if not known:  # somebody else of this machine
            channel.close()
            return False
        self.channel.close()
        self.channel = channel
        self.pid = channel.recv()  # on Windows a venv's Python starts another one
        channel.send(path_of_ranks())
        return True

    def _last_words(self) -> str:
        deadline = time.monotonic() + 1.0
        words = b""
        while not self.ended and time.monotonic() < deadline:
            words += self.read_output()
            time.sleep(0.01)
        lines = words.decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no answer")

    def read_output(self) -> bytes:
        try:
            data = self.output.recv_bytes() if self.output.poll() else b""
        except (EOFError, OSError):
            self.ended = True
            data, self.held = self.held, b""
            return data
        if not data:
            return b""
        data = self.held + data
        after = 0
        for mark in MARK.finditer(data):
            self.marked, after = int(mark[1]), mark.end()
        half_a_mark = data.find(b"\0", max(after, len(data) - MARK_BYTES + 1))
        end = half_a_mark if half_a_mark >= 0 else len(data)
        self.held = data[end:]
        return MARK.sub(b"", data[:end])

    def output_is_complete(self, mark: float) -> bool:
        return self.ended or self.marked >= mark

    def last_dump(self) -> str:
        try:
            with open(self.dump_path, "rb") as file:
                file.seek(self.dump_read)
                data = file.read()
        except OSError:  # it never came so far
            return ""
        self.dump_read += len(data)
        return data.decode(errors="replace")

    def exit_status(self, wait: float = 0.0) -> int | None:
        try:
            status = self.process.wait(wait) if wait else self.process.poll()
        except subprocess.TimeoutExpired:
            return None
        if status is not None and not self.ended:
            kill_family(self.handle)  # its children may hold its output open
        return status

    def kill(self) -> None:
        kill_family(self.handle)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        self.listener.close()
        self.channel.close()
        self.output.close()


def apart() -> dict[str, Any]:
    """Options of ``Popen``: Ctrl-C and Jupyter interrupt a whole process group."""
    if sys.platform == "win32":
        own_group, no_window = (
            subprocess.CREATE_NEW_PROCESS_GROUP,
            subprocess.CREATE_NO_WINDOW,
        )
        return {"creationflags": own_group | no_window}
    return {"start_new_session": True}
