"""One helper process that has imported torch, and forks ranks on request.

It stays single-threaded and never touches CUDA, so a fork of it is always safe. It
ends, with every rank and whatever the ranks have started, as soon as the kernel is
gone: the kernel's end of the socket closes, or its process handle says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import psutil

from course_utils.ranks.guard import remove_semaphores

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REQUEST_BYTES = 1 << 20
HUGE, COLLAPSE = 1 << 21, 25  # a big page, and madvise's MADV_COLLAPSE (Linux 6.1)
FIRST_IMPORTS = (
    "cloudpickle",
    "numpy.random",  # to have other random numbers, each rank would import it
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.serialization",  # the first tensor to be pickled would import it
    "course_utils.ranks.rank",
)
# The first optimizer of a process imports this, about 1.5 s. The zygote does it once,
# when nobody asks for a rank for a moment; ranks that are forked later have it.
LATER_IMPORTS = ("torch._dynamo",)
IDLE_SECONDS = 0.5


def prctl(option: int, value: int) -> None:
    """Call prctl(2); does nothing where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def join_pages() -> None:
    """Put this process's memory into pages of 2 MiB; does nothing where it can't.

    A fork copies the table of pages, and its end tears it down again: with pages of
    4 KiB that is most of what a rank costs. A page is split where a rank writes.
    """
    with contextlib.suppress(OSError, AttributeError, ValueError):
        madvise = ctypes.CDLL(None).madvise
        with open("/proc/self/maps") as maps:
            regions = [line.split() for line in maps]
        for span, access, *_, in_file in (r for r in regions if len(r) in (5, 6)):
            if access != "rw-p" or in_file not in ("0", "[heap]"):
                continue
            start, end = (int(address, 16) for address in span.split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if end > start:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), COLLAPSE)


def import_all(names: Iterable[str]) -> None:
    """Import these modules, for forks to come. Raises what an import raises."""
    gc.disable()  # a fifth of the time of `import torch`
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in names:
                importlib.import_module(name)
    finally:
        gc.collect()
        gc.freeze()  # a collection in a fork would copy all pages with objects
        gc.enable()


def call_pickled(call: bytes) -> None:
    """Call a function that comes with its arguments."""
    function, *args = pickle.loads(call)
    function(*args)


class Zygote:
    """The loop of the helper process.

    Args:
        kernel: socket to the kernel (``SOCK_SEQPACKET``: one message a packet).
        folder: for temporary files of all ranks; removed at the end.
    """

    def __init__(self, kernel: socket.socket, folder: str) -> None:
        self.kernel = kernel
        self.folder = folder
        # Not looked up: while it is away, Python would take the system's folder, where
        # nobody tidies up.
        tempfile.tempdir = folder
        self.ranks: set[int] = set()
        self.later = list(LATER_IMPORTS)
        self.wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(self.wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.kernel_process = None
        with contextlib.suppress(OSError, AttributeError):
            self.kernel_process = os.pidfd_open(os.getppid())

    def serve(self) -> None:
        """Fork ranks and report those that end, until the kernel is gone."""
        self._send({"ready": os.getpid()})
        watched = [self.kernel, self.wake_read]
        if self.kernel_process is not None:
            watched.append(self.kernel_process)
        while True:
            idle = IDLE_SECONDS if self.later else None
            readable, _, _ = select.select(watched, [], [], idle)
            if not readable:
                self._call(import_all, [self.later.pop(0)])
                if not self.later:
                    self._call(join_pages)
            if self.kernel_process in readable:
                self.end()
            if self.wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
            self._report_ended()
            if self.kernel in readable:
                try:
                    data, files, _, _ = socket.recv_fds(self.kernel, REQUEST_BYTES, 8)
                except OSError:
                    data, files = b"", []
                if not data:
                    self.end()
                request = pickle.loads(data)
                if "call" in request:
                    self._call(call_pickled, request["call"])
                else:
                    self._fork(request, files)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.kernel.sendall(pickle.dumps(message))
        except OSError:
            self.end()

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        """It may take seconds: report at once which ranks end meanwhile."""
        nothing = signal.signal(signal.SIGCHLD, lambda *_: self._report_ended())
        try:
            self._report_ended()
            with contextlib.suppress(Exception):  # a rank then does it itself
                function(*args)
        finally:
            signal.signal(signal.SIGCHLD, nothing)

    def _report_ended(self) -> None:
        ended = {}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                ended[pid] = status
        if not ended:
            return
        were_ranks = self.ranks & ended.keys()
        self.ranks.difference_update(ended)
        # What they have started is ours now. After an orphan that is so again.
        for child in psutil.Process().children():
            if child.pid not in self.ranks:
                kill(child.pid)
        for pid in sorted(were_ranks):
            remove_semaphores(pid)
            self._send({"ended": pid, "status": ended[pid]})

    def _fork(self, request: dict[str, Any], files: list[int]) -> None:
        with contextlib.suppress(OSError):  # a rank may have removed it
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            try:
                self._become_rank(request, files)
            finally:
                os._exit(1)
        self.ranks.add(pid)
        for descriptor in files:
            os.close(descriptor)
        self._send({"forked": request["token"], "pid": pid})

    def _become_rank(self, request: dict[str, Any], files: list[int]) -> None:
        zygote = os.getppid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.kernel.close()
        os.close(self.wake_read)
        if self.kernel_process is not None:
            os.close(self.kernel_process)
        channel, output, dump, board, meeting_file = files
        os.environ.clear()
        os.environ.update(request["environment"], TMPDIR=self.folder)
        if request["folder"] is not None:
            with contextlib.suppress(OSError):
                os.chdir(request["folder"])
        sys.path[:] = request["path"]

        from course_utils.ranks import rank as rank_module

        rank_module.use_output(output)
        os.close(output)
        rank_module.Rank(
            request["rank"],
            request["world_size"],
            Connection(channel),
            dump,
            mmap.mmap(board, 0),
            meeting_file,
        ).serve()

    def end(self) -> None:
        """Kill the ranks and all that they started, then this process."""
        for _ in range(20):  # a killed parent may have had one more child
            family = psutil.Process().children(recursive=True)
            if not family:
                break
            for child in family:
                kill(child.pid)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, 0):
                    pass
        for rank in self.ranks:
            remove_semaphores(rank)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)


def kill(pid: int) -> None:
    """SIGKILL; fine if it is gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Import torch once, freeze what it made, and wait for requests."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel = socket.socket(fileno=int(sys.argv[1]))
    try:
        import_all(FIRST_IMPORTS)
        from course_utils.ranks.agreement import stand_in_front

        stand_in_front()
    except BaseException as error:
        kernel.sendall(pickle.dumps({"failed": f"{type(error).__name__}: {error}"}))
        return
    Zygote(kernel, sys.argv[2]).serve()
