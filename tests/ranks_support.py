"""What the tests of the ranks share: time bounds, and a watch over what is left."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_utils.ranks import Ranks, RanksError
from course_utils.ranks.processes import ZygoteProcess, start_method
from course_utils.ranks.zygote import LATER_IMPORTS, join_pages

# Whatever a test starts inherits this, also what leaves its session and its parent.
MARK = "RANKS_TEST_MARK"
os.environ.setdefault(MARK, uuid.uuid4().hex)

# The bounds are those of a quiet machine: more tests at once make it a busy one.
LOAD = 5.0 if "PYTEST_XDIST_WORKER" in os.environ else 2.0
GONE_SECONDS = 1.0 * LOAD  # after closing, nothing is left
POSIX = sys.platform in ("linux", "darwin")
LINUX = sys.platform == "linux"

SAME = "x = torch.full((3,), float(rank)); dist.all_reduce(x); total = float(x[0])"

# The last line of what a cell that failed says.
KEPT = "(All ranks keep their variables. The next cell gets a new process group.)"
GROUP_STAYS = "(All ranks keep their variables and their process group.)"


def eventually(true: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait until ``true()`` holds; its value, or a failed test after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = true()
        if value or time.monotonic() > deadline:
            assert value, f"not so after {seconds:g} s"
            return value
        time.sleep(0.02)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block must end within this time (with an allowance for a busy machine)."""
    started = time.monotonic()
    yield
    taken = time.monotonic() - started
    assert taken < seconds * LOAD, f"took {taken:.2f} s instead of {seconds:g} s"


class Screen:
    """Standard output that makes a file as soon as a text has been shown."""

    def __init__(self, text: str, file: Path) -> None:
        self.text, self.file, self.all = text, file, ""

    def write(self, part: str) -> None:
        self.all += part
        if self.text in self.all:
            self.file.touch()

    def flush(self) -> None:
        pass


def failure_of(ranks: Ranks, cell: Any, *args: Any, **options: Any) -> RanksError:
    """The error that a cell (text) or function ends with on the ranks."""
    with pytest.raises(RanksError) as caught:
        if isinstance(cell, str):
            ranks.run_cell(cell, **options)
        else:
            ranks.run(cell, *args, **options)
    return caught.value


def kept(ranks: Ranks, *fresh: int) -> None:
    """The ranks that still have their variable ``kept`` are all but these."""
    have = ranks.run(lambda: "kept" in vars(sys.modules["__main__"]))
    assert [rank for rank in range(ranks.n) if not have[rank]] == list(fresh)


def works(ranks: Ranks) -> None:
    """A collective over all ranks gives the right sum on each."""
    ranks.run_cell(SAME)
    assert ranks.pull("total") == [sum(range(ranks.n))] * ranks.n


# ----------------------------------------------------------------------- what is left
def marked_processes() -> dict[int, str]:
    """pid -> command line of all processes that come from these tests."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == os.environ[MARK]:
                found[process.pid] = " ".join(process.cmdline())[:200]
    return found


def own_descriptors() -> set[str]:
    """What this process has open: pipes, sockets, files in memory."""
    found = set()
    for name in os.listdir("/proc/self/fd") if LINUX else []:
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("pipe:", "socket:", "/memfd:")):
                found.add(target)
    return found


class Watch:
    """Sees what the tests leave behind, and what listens beyond this machine.

    Args:
        folder: becomes the folder for temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = set(marked_processes())
        self.descriptors = own_descriptors()
        self.memory = self._shared_memory()
        self.exposed: list[str] = []
        self.known = listening_beyond_loopback()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._look_for_listeners, daemon=True)
        self.thread.start()

    def _shared_memory(self) -> set[str]:
        """Names in /dev/shm. Of the semaphores of multiprocessing only those of ranks:
        any other is left to a process of Python's, which may come late."""
        names = os.listdir("/dev/shm") if LINUX else []
        return {n for n in names if not re.match(r"sem\.mp-(?!rank-)", n)}

    def _look_for_listeners(self) -> None:
        while not self.stopped.wait(0.3):
            if new := listening_beyond_loopback() - self.known:
                self.known |= new  # others use this machine, too
                own = {os.getpid(): "the tests", **marked_processes()}
                self.exposed += [
                    f"{own[pid]} listens at {address} port {port}"
                    for pid, address, port in new
                    if pid in own
                ]

    def strays(self) -> dict[int, str]:
        """Processes of these tests that belong to no open ``Ranks``."""
        expected = set(self.before)
        for ranks in Ranks.live:
            expected |= {process.pid for process in ranks.team.processes.values()}
            if ranks.team.zygote is not None:
                expected.add(ranks.team.zygote.process.pid)
            if ranks.team.folder is not None:
                expected.add(ranks.team.folder.guard.pid)
        return {p: text for p, text in marked_processes().items() if p not in expected}

    def assert_no_strays(self) -> None:
        """Two seconds at most, and only the open ``Ranks`` are there."""
        self._assert_soon_empty(self.strays)

    def assert_nothing_left(self) -> None:
        """Two seconds after closing: no process, file, socket or memory."""
        self._assert_soon_empty(self._left)

    def assert_nothing_left_but_kernels(self) -> None:
        """The same while another kernel of the tests is open, with its own ranks."""
        self._assert_soon_empty(self._orphans)

    def _assert_soon_empty(self, find: Callable[[], Any]) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while (left := find()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, left
        assert not self.exposed, self.exposed

    def _orphans(self) -> dict[int, str]:
        own = {process.pid for process in psutil.Process().children(recursive=True)}
        return {pid: text for pid, text in self.strays().items() if pid not in own}

    def _left(self) -> list[str]:
        return [
            *self.strays().values(),
            *map(str, self.folder.iterdir()),
            *sorted(own_descriptors() - self.descriptors),
            *sorted(self._shared_memory_left()),
        ]

    def _shared_memory_left(self) -> set[str]:
        left = self._shared_memory() - self.memory
        return left - shared_memory_of_others() if left else left

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()


def shared_memory_of_others() -> set[str]:
    """Names in /dev/shm that a process uses which does not come from these tests."""
    own = {os.getpid(), *marked_processes()}
    found = set()
    for process in psutil.process_iter():
        if process.pid not in own:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= set(re.findall(r"/dev/shm/(\S+)", maps))
    return found


def listening_beyond_loopback() -> set[tuple[int | None, str, int]]:
    """Process, address and port of TCP sockets that listen not only on loopback."""
    found = set()
    for socket in psutil.net_connections("tcp") if LINUX else []:
        if socket.status == psutil.CONN_LISTEN:
            address = ipaddress.ip_address(socket.laddr.ip)
            inner = getattr(address, "ipv4_mapped", None) or address
            if str(inner) not in ("127.0.0.1", "::1"):
                found.add((socket.pid, str(inner), socket.laddr.port))
    return found


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """For a whole module: at its end nothing may be left."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", str(folder))
        watch = Watch(folder)
        yield watch
        try:
            watch.assert_nothing_left()
        finally:
            watch.stop()


@pytest.fixture(scope="module")
def helper() -> Iterator[None]:
    """One helper process for all launches of a module: each would import torch."""
    if start_method() != "fork":
        yield
        return
    zygote = ZygoteProcess.acquire()
    yield
    zygote.release()


def settle(ranks: Ranks) -> None:
    """Have the helper process do now what it does when it is idle for a moment.

    It can't start a rank meanwhile, and a rank that was started before has to import
    that by itself; neither is what the time bounds are about.
    """
    if (zygote := ranks.team.zygote) is not None:
        for module in LATER_IMPORTS:
            zygote.import_first(module)
        zygote.call_first(join_pages)
    ranks.restart()


@pytest.fixture(scope="module")
def four(watch: Watch) -> Iterator[Ranks]:
    """Four ranks that all tests of a module share: each leaves them usable."""
    with Ranks(4, output="grouped", quiet=True, timeout=30) as ranks:
        settle(ranks)
        yield ranks


@pytest.fixture
def ranks(four: Ranks, watch: Watch) -> Iterator[Ranks]:
    """These four with a variable; after a test the next cell works at once."""
    four.run_cell("kept = rank * 11")
    yield four
    with within(1):
        works(four)
    watch.assert_no_strays()
