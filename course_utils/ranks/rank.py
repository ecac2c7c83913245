"""The life of one rank: keep variables, run what is sent, answer, never hang.

Two threads. The *main* thread runs the learner's code and nothing else. The *control*
thread reads requests; it stays reachable while the main thread is blocked in C++, and
does what must be done then: say where the main thread is, close the connections to
the other ranks (a blocked collective then fails and the variables survive), interrupt.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import errno
import faulthandler
import gc
import mmap
import multiprocessing
import os
import queue
import random
import re
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Client, Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from course_utils.ranks.agreement import Agreement, stand_in_front
from course_utils.ranks.loopback import bind_stores_to_loopback, end_init_together
from course_utils.ranks.output import output_mark
from course_utils.ranks.report import (
    in_threads,
    remember_source,
    tell_of_thread,
    without_inner_frames,
)

# How gloo, NCCL and the store say that another process is gone. ("Pair is not
# connected" says gloo of a rank that means itself.)
PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|likely)|closed by (remote )?peer|"
    r"broken pipe|socket (timeout|closed)|remote process exit|"
    r"failed to (recv|send)|(recv|send)value failed|end of file|"
    r"(?<!pair is )not connected",
    re.IGNORECASE,
)
LOST_SECONDS = 0.3  # after a sever, gloo's own error comes within milliseconds
GUARD_SECONDS = 0.5  # for the guard of spawned ranks to end a rank with all it started

# From 2.14 on torch looks for a backend in the metadata of all installed packages: 9 of
# the 12 ms in which a group starts. The zygote does it once, for all ranks to come.
if hasattr(dist.Backend, "_ensure_backend_registered"):
    dist.Backend._ensure_backend_registered("gloo")


class Rank:
    """One rank process. :meth:`serve` returns never.

    Args:
        rank, world_size: who this process is.
        channel: where requests come from and replies go.
        dump: file descriptor for a stack dump in an emergency.
        board: shared memory for :mod:`course_utils.ranks.agreement`.
        meeting_file: descriptor of a file in memory that all ranks share, or None.
        spawned: a guard watches over this process, and its output is to be marked.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        channel: Connection,
        dump: int,
        board: Any,
        meeting_file: int | None = None,
        spawned: bool = False,
    ) -> None:
        self.rank, self.world_size, self.channel = rank, world_size, channel
        self.meeting_file, self.spawned = meeting_file, spawned
        self.pid = os.getpid()
        self.requests: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.cancelled = 0  # id of a request that need not begin any more
        self.running = False  # only then may an interrupt reach the main thread
        self.sending = threading.Lock()
        self.main_thread = threading.main_thread().ident
        self.agreement = Agreement(board, rank, world_size)
        self.severed_at: float | None = None
        self.abandoned: list[Any] = []  # groups that gloo can't end; see wait_gone
        stand_in_front()  # the zygote has done so, a spawned process has not
        self.agreement.begin(self.wait_gone)
        bind_stores_to_loopback()
        end_init_together()
        # These write from a signal handler: they need neither the GIL nor luck.
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGUSR1, file=dump, all_threads=False)
        faulthandler.enable(file=dump, all_threads=False)
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main  # classes defined in a cell can be pickled
        self.variables = main.__dict__
        self.ready = dict(torch=torch, dist=dist, rank=rank, world_size=world_size)
        self.variables.update(self.ready)
        self.given = set(self.variables)
        own_random_numbers()
        # Who ends this process finds its semaphores by their names.
        multiprocessing.current_process()._config["semprefix"] = f"/mp-rank-{self.pid}"
        torch.set_num_threads(1)

    # ---------------------------------------------------------------- the two threads
    def serve(self) -> None:
        """Answer requests until the kernel is gone."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        threading.excepthook = self._thread_failed
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        while True:
            request = self.requests.get()
            started = time.monotonic()
            try:
                try:
                    self.running = True
                    if request["id"] == self.cancelled:
                        raise KeyboardInterrupt
                    reply = self._run(request)
                except BaseException as error:
                    reply = self._failure(error)
                    # While this error holds what its frames have not given up.
                    reply["requests"] = self.agreement.requests.take()
                finally:
                    self.running = False
            except KeyboardInterrupt as error:  # it came a moment too late
                self.running = False
                reply = self._failure(error)
            if os.getpid() != self.pid:
                os._exit(0)  # the learner called os.fork(); only the parent answers
            reply["seconds"] = time.monotonic() - started
            if request["op"] in ("cell", "call"):
                self._end_cell(reply)
            for name in ("stdout", "stderr"):  # the learner may have replaced them
                with contextlib.suppress(Exception):
                    getattr(sys, name).flush()
            if self.spawned:
                with contextlib.suppress(OSError):  # the learner may have closed it
                    os.write(1, output_mark(request["id"]))
                    reply["mark"] = request["id"]
            self._send(request["id"], reply)

    def _listen(self) -> None:
        while True:
            try:
                request = self.channel.recv()
            except (EOFError, OSError):
                if self.spawned:
                    time.sleep(GUARD_SECONDS)
                with contextlib.suppress(Exception):
                    os.killpg(0, signal.SIGKILL)  # with what this rank has started
                os._exit(0)
            op = request["op"]
            if op == "where":
                reply = {"frames": self.where(), "begun": self.agreement.begun}
                self._send(request["id"], {"status": "ok", **reply})
            elif op == "sever":
                self.sever()
            elif op == "interrupt":
                self.interrupt(request["id"])
            else:
                self.requests.put(request)

    def _send(self, request_id: int, reply: dict[str, Any]) -> None:
        with self.sending:
            self.channel.send({"id": request_id, **reply})

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        if self.running and os.getpid() == self.pid:
            raise KeyboardInterrupt

    # -------------------------------------------------- what the control thread does
    def where(self) -> list[tuple[str, int, str]]:
        """(file, line, function) of the main thread's frames, innermost first."""
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        main = frames_of(frames.pop(self.main_thread, None))
        return in_threads(main, map(frames_of, frames.values()))

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        """Print what ended a thread of the learner's, unless another rank has."""
        error = args.exc_value
        if not isinstance(error, RuntimeError) or not is_peer_gone(error):
            tell_of_thread(args)

    def interrupt(self, request_id: int) -> None:
        """Raise KeyboardInterrupt in the main thread, now or as soon as it begins."""
        self.cancelled = request_id
        if hasattr(signal, "pthread_kill"):  # also ends a time.sleep()
            signal.pthread_kill(self.main_thread, signal.SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)

    def sever(self) -> None:
        """Close the connections to the other ranks, so that blocked calls fail.

        gloo reports "Connection closed by peer" to whoever waits. Only sockets that
        are connected to this machine are touched, never one that listens (gloo would
        abort the process).
        """
        self.severed_at = time.monotonic()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
            if abort is not None:
                with contextlib.suppress(Exception):
                    abort()
        folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
        channel = self.channel.fileno()
        try:
            descriptors = [int(name) for name in os.listdir(folder)]
        except OSError:  # no such list on Windows
            return
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if descriptor == channel or not stat.S_ISSOCK(
                    os.fstat(descriptor).st_mode
                ):
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and connection.type == socket.SOCK_STREAM:
                        host = connection.getpeername()[0]  # fails where it listens
                        if host.startswith(("127.", "::1", "::ffff:127.")):
                            connection.shutdown(socket.SHUT_RDWR)

    def wait_gone(self) -> bool:
        """Is a wait hopeless, because the connections have been closed for a while?

        Then gloo has missed that they closed, and its thread waits on: the group has
        to be left as it is, because ending it would wait for that thread.
        """
        hopeless = (
            self.severed_at is not None
            and time.monotonic() - self.severed_at > LOST_SECONDS
        )
        if hopeless and dist.is_initialized():
            self.abandoned.append(list(dist.distributed_c10d._world.pg_map))
        return hopeless

    # ----------------------------------------------------- what the main thread does
    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, f"do_{request['op']}")(request)

    def do_hello(self, request: dict[str, Any]) -> dict[str, Any]:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return {"status": "ok", "gpus": gpus, "nccl": dist.is_nccl_available()}

    def do_group(self, request: dict[str, Any]) -> dict[str, Any]:
        """Leave the old process group; with ``init``, join a new one."""
        self._leave_group()
        self.severed_at = None
        self.agreement.start_generation(request["generation"])
        os.environ.update(request["environment"])
        dist.set_debug_level_from_env()  # torch read it when it was imported
        if not request["init"]:
            return {"status": "ok"}
        where: dict[str, Any] = {}
        if self.meeting_file is not None:
            # Through a file in memory the ranks find each other without a listening
            # socket and without the name look-ups that a TCPStore makes.
            file = dist.FileStore(f"/proc/self/fd/{self.meeting_file}", self.world_size)
            where["store"] = dist.PrefixStore(str(request["generation"]), file)
        elif request["meeting_file"] is not None:
            where["store"] = dist.FileStore(request["meeting_file"], self.world_size)
        else:
            where["init_method"] = "tcp://127.0.0.1:" + os.environ["MASTER_PORT"]
        if request["backend"] == "nccl":
            torch.cuda.set_device(self.rank)
        dist.init_process_group(
            request["backend"],
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=request["group_timeout"]),
            **where,
        )
        return {"status": "ok"}

    def _leave_group(self) -> None:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        # The number in the next group's name, by which ranks find each other. Where
        # init_process_group has failed it has counted, on this rank alone.
        dist.distributed_c10d._world.group_count = 0

    def do_cell(self, request: dict[str, Any]) -> dict[str, Any]:
        source, name = request["source"], request["name"]
        self.agreement.start_cell()
        self.variables.update(self.ready)  # a cell before may have used the names
        remember_source(name, source)
        tree = ast.parse(source, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        value = None
        exec(compile(tree, name, "exec"), self.variables)
        if last is not None:
            value = eval(compile(last, name, "eval"), self.variables)
        shown = None
        if value is not None:
            if not request["silent"]:
                shown = repr(value)
            if not any(self.agreement.requests.kept()):
                self.variables["_"] = value  # which keeps no request for the learner
        return {"status": "ok", "value": shown}

    def do_call(self, request: dict[str, Any]) -> dict[str, Any]:
        self.agreement.start_cell()
        function, args, kwargs = cloudpickle.loads(request["payload"])
        result = function(*args, **kwargs)
        try:
            payload = cloudpickle.dumps(result)
        except Exception as error:
            raise TypeError(
                f"the result of {getattr(function, '__name__', 'the function')} is a "
                f"{type(result).__name__}, which can't be sent to the notebook "
                f"({error}). Return tensors, numbers, text, lists or dictionaries."
            ) from None
        return {"status": "ok", "payload": payload}

    def _end_cell(self, reply: dict[str, Any]) -> None:
        """Add what the driver wants to know of a cell that is over.

        "in_group": whether this rank is in a group; "facts": what it has done there
        (None: not known); "requests": for which calls nobody has waited.
        """
        requests = self.agreement.requests
        if any(requests.kept()):
            gc.collect()  # they may be in a circle that nobody refers to
        reply.setdefault("requests", requests.take())
        try:
            reply["facts"] = self.agreement.facts()
            reply["in_group"] = dist.is_initialized()
        except Exception:  # the learner has replaced functions of torch.distributed
            reply.update(in_group=False, facts=None)

    def do_push(self, request: dict[str, Any]) -> dict[str, Any]:
        self.variables.update(cloudpickle.loads(request["payload"]))
        return {"status": "ok"}

    def do_pull(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request["name"]
        if name not in self.variables:
            raise NameError(f"there is no variable {name!r} on this rank")
        try:
            payload = cloudpickle.dumps(self.variables[name])
        except Exception as error:
            kind = type(self.variables[name]).__name__
            raise TypeError(
                f"{name!r} is a {kind}, which can't be sent to the notebook ({error})"
            ) from None
        return {"status": "ok", "payload": payload}

    def do_status(self, request: dict[str, Any]) -> dict[str, Any]:
        names = sorted(
            name
            for name, value in self.variables.items()
            if name not in self.given
            and not name.startswith("_")
            and not isinstance(value, types.ModuleType)
        )
        backend = dist.get_backend() if dist.is_initialized() else None
        return {"status": "ok", "variables": names, "backend": backend}

    # ------------------------------------------------------------------------- failures
    def _failure(self, error: BaseException) -> dict[str, Any]:
        """What went wrong, in pieces that pickle; the driver writes the text."""
        message = without_inner_frames(message_of(error))
        frames = []
        for frame, line in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            frames.append((code.co_filename, line, code.co_name))
        if isinstance(error, SyntaxError) and error.filename:
            frames.append((error.filename, error.lineno or 0, "<module>"))
        cause = error.__cause__ or (
            None if error.__suppress_context__ else error.__context__
        )
        if isinstance(error, SystemExit):  # its code says it all
            cause = None
        return {
            "status": "error",
            "error": type(error).__name__,
            "message": message[:4000],
            "frames": frames,
            "peer": is_peer_gone(error),
            "cause": None
            if cause is None
            else f"{type(cause).__name__}: {message_of(cause)}"[:500],
        }


def frames_of(frame: types.FrameType | None) -> list[tuple[str, int, str]]:
    """(file, line, function) of a frame and of those that called it."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found


def is_peer_gone(error: BaseException) -> bool:
    """Does it say that another rank has closed the connection?"""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return False
    network = isinstance(error, (RuntimeError, ConnectionError))
    return network and bool(PEER_GONE.search(message_of(error)))


def message_of(error: BaseException) -> str:
    """Its text; the learner's exception classes may fail at that too."""
    try:
        return str(error)
    except BaseException:
        return "(its message could not be read)"


def own_random_numbers() -> None:
    """In a fork: draw other numbers than the other forks of the same process."""
    seed_here(int.from_bytes(os.urandom(4), "little"))


def seed_here(seed: int) -> None:
    """Make Python's, NumPy's and torch's random numbers those of this seed.

    NumPy and torch only where they were imported; `seed` is below 2**32.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # torch.manual_seed() is for all devices, and takes 4 ms where there are none.
        has_gpus = torch.accelerator.is_available()
        (torch if has_gpus else torch.default_generator).manual_seed(seed)


def use_output(descriptor: int) -> None:
    """Send everything this process prints, from C++ too, into ``descriptor``."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    options = dict(
        buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.stdout = open(1, "w", **options)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", **options)  # noqa: SIM115


def main() -> None:
    """A rank as a fresh Python process (where fork is not safe)."""
    port, rank, world_size = map(int, sys.argv[1:4])
    folder = sys.argv[4]
    key = bytes.fromhex(os.environ.pop("RANKS_KEY"))
    use_output(1)
    channel = Client(("127.0.0.1", port))
    channel.send_bytes(key)
    channel.send(os.getpid())
    sys.path[:] = channel.recv()
    with open(os.path.join(folder, "board"), "r+b") as file:
        board = mmap.mmap(file.fileno(), 0)
    with open(os.path.join(folder, f"dump-{rank}-{port}"), "wb") as dump:
        Rank(rank, world_size, channel, dump.fileno(), board, spawned=True).serve()
