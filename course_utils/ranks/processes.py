"""Starting rank processes, and ending them: the kernel's side.

Linux: forks of a zygote, which all ``Ranks`` of one kernel share. Elsewhere fork is
not safe once torch is loaded: each rank is a fresh Python process. Either way the
driver gets :class:`RankProcess` objects with one and the same interface.
"""

from __future__ import annotations

import contextlib
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
from multiprocessing.connection import Connection, Listener, Pipe
from pathlib import Path
from typing import Any

from course_utils.ranks.report import RanksError

PACKAGE_FOLDER = str(Path(__file__).resolve().parent.parent.parent)
# torch asks for the name of 127.0.0.1 when a TCPStore connects; where no name server
# answers, that must not take the resolver's usual 5 seconds.
QUICK_NAMES = "timeout:1 attempts:1"
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


def temporary_folder() -> str:
    """A folder for what ranks put into TMPDIR: a killed rank does not tidy up."""
    return tempfile.mkdtemp(prefix="ranks-")


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

    def stack_dump(self) -> str:
        """Where it is, as the signal handler of faulthandler tells it."""
        return ""

    def exit_status(self, wait: float = 0.0) -> int | None:
        """How it ended: exit code, or -signal; None while it runs or if unknown."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL to the rank and to what it has started; close its channel."""
        if self.pid is not None:
            with contextlib.suppress(
                ProcessLookupError, PermissionError, AttributeError
            ):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        self.channel.close()


# ------------------------------------------------------------------------ fork (Linux)
class Zygote:
    """The kernel's handle on the helper process; all ``Ranks`` share one.

    ``acquire()`` starts it or counts one more user; after the last ``release()`` it
    ends.
    """

    _current: Zygote | None = None
    _guard = threading.Lock()

    def __init__(self) -> None:
        self.users = 0
        self.ready = False  # has imported torch
        self.owner = os.getpid()
        self.forked: dict[str, int] = {}
        self.ended: dict[int, int] = {}
        self.failure: str | None = None
        self.lock = threading.RLock()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        environment["OMP_NUM_THREADS"] = "1"  # ranks share the cores among them
        environment.setdefault("RES_OPTIONS", QUICK_NAMES)
        self.folder = environment["TMPDIR"] = temporary_folder()
        environment["PYTHONPATH"] = os.pathsep.join(
            [PACKAGE_FOLDER, *filter(None, [environment.get("PYTHONPATH")])]
        )
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "course_utils.ranks.zygote",
                    str(theirs.fileno()),
                    self.folder,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Jupyter interrupts a whole process group
                env=environment,
            )

    @classmethod
    def prepare(cls) -> None:
        """Start importing torch now, for the first ``Ranks`` to come."""
        with cls._guard:
            if cls._current is None or not cls._current.usable():
                cls._current = cls()

    @classmethod
    def acquire(cls) -> Zygote:
        """The zygote of this process, started if there is none."""
        cls.prepare()
        with cls._guard:
            cls._current.users += 1
            return cls._current

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def release(self) -> None:
        """One user less; the last one ends it."""
        self.users -= 1
        if self.users <= 0:
            self.close()

    def close(self) -> None:
        """End it with all its ranks."""
        with Zygote._guard:
            if Zygote._current is self:
                Zygote._current = None
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
            shutil.rmtree(self.folder, ignore_errors=True)

    def fork(self, request: dict[str, Any], files: list[int]) -> None:
        """Ask for one rank; ``request["token"]`` names it in :attr:`forked`."""
        try:
            socket.send_fds(self.socket, [pickle.dumps(request)], files)
        except OSError as error:
            raise self._gone() from error

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


class ForkedRank(RankProcess):
    """A rank that the zygote has forked."""

    def __init__(
        self,
        zygote: Zygote,
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
            "path": [PACKAGE_FOLDER, *(p for p in sys.path if p != PACKAGE_FOLDER)],
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
        try:
            return os.read(self.output, 1 << 16)
        except (BlockingIOError, OSError):
            return b""

    def stack_dump(self) -> str:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.05)
        return self.last_dump()

    def last_dump(self) -> str:
        """What faulthandler has written; also on a fatal signal."""
        try:
            return os.read(self.dump, 1 << 16).decode(errors="replace")
        except (BlockingIOError, OSError):
            return ""

    def exit_status(self, wait: float = 0.0) -> int | None:
        deadline = time.monotonic() + wait
        while True:
            self.zygote.pump()
            status = self.zygote.ended.get(self.pid)
            if status is not None or time.monotonic() >= deadline:
                return status
            time.sleep(0.005)

    def kill(self) -> None:
        super().kill()
        if not self.closed:
            self.closed = True
            os.close(self.output)
            os.close(self.dump)


# ------------------------------------------------------------------- spawn (elsewhere)
class SpawnedRank(RankProcess):
    """A rank that is a fresh Python process, with a connection over loopback."""

    def __init__(self, rank: int, world_size: int, environment: dict[str, str]) -> None:
        self.rank = rank
        key = secrets.token_bytes(32)
        environment = dict(environment, RANKS_KEY=key.hex(), OMP_NUM_THREADS="1")
        environment["PYTHONPATH"] = os.pathsep.join([PACKAGE_FOLDER, *sys.path])
        environment["PYTHONUNBUFFERED"] = "1"
        self.folder = environment["TMPDIR"] = temporary_folder()
        self.listener = Listener(("127.0.0.1", 0), authkey=key)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "course_utils.ranks.rank"),
                *map(str, (self.listener.address[1], rank, world_size)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        self.pid = self.process.pid
        # A pipe can't be waited on everywhere; a Connection can. A thread copies.
        self.output, feed = Pipe(duplex=False)
        threading.Thread(target=self._copy, args=(feed,), daemon=True).start()

    def _copy(self, feed: Connection) -> None:
        with contextlib.suppress(OSError, ValueError), feed:
            while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
                feed.send_bytes(chunk)

    def wait_started(self) -> None:
        """Wait until it has imported torch and calls back."""
        accepted: list[Any] = []

        def accept() -> None:
            with contextlib.suppress(Exception):
                accepted.append(self.listener.accept())

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        deadline = time.monotonic() + START_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.05)
            if self.process.poll() is not None:
                break
        self.listener.close()
        if not accepted:
            time.sleep(0.1)
            words = self.read_output().decode(errors="replace").strip()
            self.process.kill()
            last = words.splitlines()[-1] if words else "it does not answer"
            raise RanksError(f"rank {self.rank} could not be started: {last}")
        self.channel = accepted[0]
        self.channel.recv()

    def read_output(self) -> bytes:
        try:
            return self.output.recv_bytes() if self.output.poll() else b""
        except (EOFError, OSError):
            return b""

    def exit_status(self, wait: float = 0.0) -> int | None:
        try:
            return self.process.wait(wait) if wait else self.process.poll()
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        super().kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        self.process.stdout.close()
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)
