"""Ranks as fresh processes, as on macOS and Windows: the same holds as for forks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ranks_support import (
    GONE_SECONDS,
    KEPT,
    LINUX,
    LOAD,
    POSIX,
    eventually,
    failure_of,
    marked_processes,
    own_descriptors,
    watch,  # noqa: F401 - a fixture
    within,
    works,
)

from course_utils.ranks import Ranks, RanksError, team
from course_utils.ranks import round as rounds
from course_utils.ranks.output import HEAD_LINES, MARK_BYTES, output_mark
from course_utils.ranks.processes import SpawnedRank, start_method

pytestmark = pytest.mark.skipif(not POSIX, reason="needs Unix signals")

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 6.0  # each rank imports torch for itself
LADDER_SECONDS = 2.7  # at most, to end what does not end by itself


@pytest.fixture(scope="module", autouse=True)
def spawn():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKS_START_METHOD", "spawn")
        yield


@pytest.fixture(scope="module")
def two(spawn, watch):  # noqa: F811
    with Ranks(2, output="grouped", quiet=True, timeout=30) as ranks:
        yield ranks


@pytest.fixture
def ranks(two, watch):  # noqa: F811
    """Two ranks with a variable; after the test the next cell works at once."""
    two.run_cell("kept = rank * 11")
    yield two
    with within(1):
        works(two)
    watch.assert_no_strays()


@pytest.fixture
def shown(ranks, capsys):
    """A function: run a cell, return what it printed."""

    def show(source: str, **options) -> str:
        capsys.readouterr()
        ranks.run_cell(textwrap.dedent(source).strip(), **options)
        return capsys.readouterr().out

    return show


def kept(ranks, *fresh):
    """The ranks that still have their variable are all but these."""
    have = ranks.run(lambda: "kept" in sys.modules["__main__"].__dict__)
    assert [rank for rank in range(ranks.n) if not have[rank]] == list(fresh)


# -------------------------------------------------------------------------- every day
def test_each_rank_is_a_python_of_its_own(ranks):
    pids = ranks.run(os.getpid)
    assert pids == [ranks.team.processes[rank].pid for rank in range(2)]
    for pid in pids:
        process = psutil.Process(pid)
        assert process.ppid() == os.getpid()
        assert "from course_utils.ranks.rank import main" in process.cmdline()[2]
        assert os.getpgid(pid) == pid  # Ctrl-C in the kernel's group spares it
    assert ranks.team.zygote is None


def test_functions_classes_and_arguments(ranks):
    notebook = {"__name__": "__main__"}
    exec(
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "def move(point, *, by):\n"
        "    import torch.distributed as dist\n"
        "    return Point(point.x + by * dist.get_rank())\n",
        notebook,
    )
    points = ranks.run(notebook["move"], notebook["Point"](5), by=2)
    assert [point.x for point in points] == [5, 7]
    assert all(isinstance(point, notebook["Point"]) for point in points)
    assert ranks.run(lambda: int(os.environ["RANK"]), only=[1]) == [1]


@pytest.mark.thorough
def test_restarted_ranks_import_what_the_notebook_can_import(
    ranks, tmp_path, monkeypatch
):
    (tmp_path / "learners_module.py").write_text("value = 42\n")
    (tmp_path / "queue.py").write_text("hides = 'Python has a module of this name'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = ranks.run(os.getpid)
    with within(START_SECONDS):
        ranks.restart()
    assert set(ranks.run(os.getpid)).isdisjoint(before)
    kept(ranks, 0, 1)
    ranks.run_cell("import learners_module, os; v = learners_module.value")
    assert ranks.pull("v") == [42, 42]
    ranks.run_cell("import sys; path = os.environ['PYTHONPATH'].split(os.pathsep)")
    assert str(tmp_path) not in ranks.pull("path", rank=0)  # not for their children


def test_cells_variables_and_values(shown, ranks):
    assert shown("class Box:\n    r = rank\nbox = Box()\nprint('hello')\nbox.r") == (
        "[rank 0] hello\n[rank 0] => 0\n[rank 1] hello\n[rank 1] => 1\n"
    )
    assert [box.r for box in ranks.pull("box")] == [0, 1]
    ranks.push(values=[1], name="all")
    ranks.run_cell("values.append(rank)", only=[1])
    assert ranks.pull("values") == [[1], [1, 1]]
    assert shown("rank", only=[1]) == "[rank 1] => 1\n"
    with pytest.raises(RanksError, match="there is no variable 'nothing' on this rank"):
        ranks.pull("nothing")


def test_status(ranks, monkeypatch):
    zero, one = ranks.status()
    assert (zero.rank, one.rank) == (0, 1)
    assert zero.backend == one.backend == "gloo"
    assert "kept" in one.variables
    assert 1e7 < zero.memory < 1e9

    def denied(process):  # as on macOS
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)
    assert zero.memory < ranks.status()[0].memory < 2e9


def test_random_numbers_differ(ranks):
    def draw():
        import random

        import torch

        return float(torch.rand(1)), random.random()

    for a, b in zip(*ranks.run(draw), strict=True):
        assert a != b


def test_an_argument_that_cannot_travel_is_named(ranks):
    with pytest.raises(TypeError, match=r"argument 2 \(a lock\) can't be sent"):
        ranks.run(print, 1, threading.Lock())


# ----------------------------------------------------------------------------- output
def test_a_hundred_thousand_lines(shown):
    with within(5):
        out = shown("for i in range(100_000): print('line', i)")
    lines = out.splitlines()
    assert len(lines) == 2 * (HEAD_LINES + 101)
    for rank in (0, 1):
        first = rank * (HEAD_LINES + 101)
        assert lines[first] == f"[rank {rank}] line 0"
        assert lines[first + HEAD_LINES].endswith("... 98,900 lines left out ...")
        assert lines[first + HEAD_LINES + 100] == f"[rank {rank}] line 99999"


def test_output_is_there_when_the_cell_ends(shown):
    # It comes another way than the answer, and must not be late once.
    for number in range(50):
        assert shown(f"import os\nos.write(1, b'from C {number}\\n');") == (
            f"[rank 0] from C {number}\n[rank 1] from C {number}\n"
        )


def test_output_like_a_mark_is_output(shown):
    odd = [b"a\0b\n", b"\0\0ranks \n", b"\0\0", output_mark(0)[: MARK_BYTES - 1]]
    for words in odd:
        out = shown(f"import os\nos.write(1, {words!r});", only=[0])
        assert out == f"[rank 0] {words.decode().rstrip(chr(10))}\n"


def test_a_streamed_line_comes_before_the_cell_ends(ranks, monkeypatch, tmp_path):
    seen = tmp_path / "seen"
    text: list[str] = []

    class Screen:
        def write(self, part):
            text.append(part)
            if "[rank 0] first\n" in "".join(text):
                seen.touch()

        def flush(self):
            pass

    monkeypatch.setattr(ranks, "output", "stream")
    monkeypatch.setattr(sys, "stdout", Screen())
    ranks.run_cell(
        "import os, time\nprint('first')\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)\n"
        "print('second')",
        only=[0],
        timeout=20,
    )
    assert "".join(text) == "[rank 0] first\n[rank 0] second\n"


def test_standard_output_is_closed(ranks, capsys):
    ranks.run_cell("import os\nsaved = os.dup(1)\nos.close(1)", only=[1])
    with within(0.5):
        ranks.run_cell("if rank == 0: print('still here')")
    assert capsys.readouterr().out == "[rank 0] still here\n"
    ranks.run_cell("os.dup2(saved, 1); os.close(saved)", only=[1])


def test_a_rank_that_prints_faster_than_it_is_read_is_left_in_time(monkeypatch):
    class Endless:
        read_output = staticmethod(lambda: b"more\n" * 1000)
        output_is_complete = staticmethod(lambda mark: False)

    class Late(Endless):
        read_output = staticmethod(bytes)

    monkeypatch.setattr(rounds, "OUTPUT_SECONDS", 0.1)
    processes = SimpleNamespace(processes={0: Endless(), 1: Late()})
    round_ = rounds.Round(processes, 1, [0, 1], None)
    with within(0.3):
        assert round_._drain(0, 0) is True
        assert round_._drain(1, 1) is False


# ----------------------------------------------------------------------------- faults
def test_one_rank_raises_while_the_other_waits(ranks):
    with within(1):
        error = failure_of(ranks, "if rank == 1: 1 / 0\ndist.all_reduce(torch.ones(3))")
    assert str(error) == (
        "Rank 1 raised ZeroDivisionError: division by zero\n"
        "  line 1 of the cell: if rank == 1: 1 / 0\n"
        "Rank 0 was waiting in all_reduce, line 2 of the cell: "
        "dist.all_reduce(torch.ones(3))\n" + KEPT
    )
    assert error.cause == "raised" and error.root.rank == 1
    kept(ranks)


def test_different_collectives_are_found_before_data_is_mixed_up(ranks):
    with within(1):
        error = failure_of(ranks, "dist.all_reduce(torch.ones(2 + rank))")
    assert error.cause == "mismatch"
    assert "all_reduce(float32[3], SUM)" in str(error)
    kept(ranks)


def test_a_deadlock_is_named(ranks):
    with within(2.5):
        error = failure_of(ranks, "if rank:\n    dist.barrier()")
    assert str(error) == (
        "Deadlock: nothing moves, and nothing will.\n"
        "Rank 1 was stuck in barrier, line 2 of the cell: dist.barrier()\n"
        "Rank 0 finished the cell.\n"
        "Every rank of a group must call its collectives; "
        "a recv needs its send.\n" + KEPT
    )
    kept(ranks)


def test_an_endless_loop_ends_with_its_variables(ranks):
    with within(1.5):
        error = failure_of(
            ranks, "if rank:\n    while True: pass\ndist.barrier()", timeout=0.5
        )
    assert str(error).startswith(
        "Not finished after 0.5 s, the limit for this cell.\n"
        "Rank 0 was stuck in barrier, line 3 of the cell: dist.barrier()\n"
        "Rank 1 was still running: line 2 of the cell: while True: pass\n"
    )
    assert str(error).endswith(KEPT)
    kept(ranks)


def test_sys_exit_is_an_exception(ranks):
    with within(1):
        error = failure_of(ranks, "import sys\nif rank: sys.exit(2)\ndist.barrier()")
    assert str(error).startswith("Rank 1 raised SystemExit: 2\n")
    kept(ranks)


@pytest.mark.thorough
def test_an_endless_loop_in_c_ends_with_its_rank(ranks):
    with within(0.5 + LADDER_SECONDS + START_SECONDS):
        error = failure_of(
            ranks, "if rank: sum(range(10**15))\ndist.barrier()", timeout=0.5
        )
    assert (
        "Rank 1 was still running: line 1 of the cell: if rank: sum(range(10**15))"
    ) in str(error)
    kept(ranks, 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how, text",
    [
        ("os._exit(3)", "exit code 3"),
        ("ctypes.string_at(0)", "SIGSEGV"),
    ],
)
def test_a_rank_dies_with_what_it_has_started(ranks, capsys, how, text):
    before = time.monotonic()
    error = failure_of(
        ranks,
        "import ctypes, os, signal, subprocess\n"
        "if rank == 1:\n"
        "    child = subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL)\n"
        "    print('last words', end='', flush=True)\n"
        f"    {how}\n"
        "dist.all_reduce(torch.ones(2))",
    )
    assert error.root.seconds < LOAD
    assert time.monotonic() - before < LOAD * START_SECONDS
    assert (error.root.rank, error.root.kind, error.root.error) == (1, "died", text)
    assert str(error).startswith(f"Rank 1 died ({text})")
    if text == "SIGSEGV":
        assert f"line 5 of the cell: {how}.\n" in str(error)
    assert "Rank 0 was waiting in all_reduce, line 6 of the cell: " in str(error)
    assert "[rank 1] last words\n" in capsys.readouterr().out
    kept(ranks, 1)


@pytest.mark.thorough
def test_a_rank_is_killed_between_two_cells(ranks):
    victim = psutil.Process(ranks.team.processes[1].pid)
    victim.kill()
    eventually(lambda: not victim.is_running() or victim.status() == "zombie")
    error = failure_of(ranks, "dist.barrier()")
    assert str(error).startswith("Rank 1 died (SIGKILL).\n")
    kept(ranks, 1)


# ------------------------------------------------------------------- start, close, end
def listening(process: psutil.Process) -> set[str]:
    """The addresses at which a process waits for connections."""
    connections = process.net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def test_nothing_listens_beyond_loopback(ranks, watch):  # noqa: F811
    works(ranks)
    for status in ranks.status():
        assert listening(psutil.Process(status.pid)) <= {"127.0.0.1"}
    assert listening(psutil.Process()) == set()
    assert not watch.exposed, watch.exposed


def test_close_leaves_nothing_and_strangers_are_turned_away(
    watch,  # noqa: F811
    monkeypatch,
):
    processes, files = set(marked_processes()), set(watch.folder.iterdir())
    descriptors = own_descriptors()
    turned_away = []

    def strangers_first(rank):
        address = rank.listener.getsockname()
        for words in (b"", b"\0\0\0\x20" + b"guess" * 20):
            with socket.create_connection(address) as stranger:
                stranger.sendall(words)
                if not words:  # and says nothing
                    stranger.shutdown(socket.SHUT_WR)
                assert rank._has_called_back() is False
                stranger.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
                turned_away.append(words)
        wait_started(rank)

    wait_started = SpawnedRank.wait_started
    monkeypatch.setattr(SpawnedRank, "wait_started", strangers_first)
    with Ranks(1, output="grouped", quiet=True) as ranks:
        assert len(turned_away) == 2
        ranks.run_cell(
            "import subprocess, tempfile\n"
            "dist.all_reduce(torch.ones(1))\n"
            "folder = tempfile.mkdtemp()\n"
            "away = subprocess.Popen(['sleep', '1001'], start_new_session=True)"
        )
        # Its pipe closes a moment before the system knows its words and environment.
        assert eventually(lambda: "sleep 1001" in marked_processes().values())
        assert Path(ranks.pull("folder", rank=0)).is_dir()
        assert set(watch.folder.iterdir()) > files
    closed = time.monotonic()
    eventually(lambda: set(marked_processes()) <= processes, GONE_SECONDS)
    eventually(lambda: own_descriptors() <= descriptors, GONE_SECONDS)
    assert set(watch.folder.iterdir()) == files
    assert time.monotonic() - closed < GONE_SECONDS
    ranks.close()
    with pytest.raises(RanksError, match="these ranks are closed"):
        ranks.status()


def test_an_interrupt_while_ranks_are_made_leaves_nothing(watch):  # noqa: F811
    processes, files = set(marked_processes()), set(watch.folder.iterdir())

    def interrupt():
        eventually(lambda: len(set(marked_processes()) - processes) == 3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Ranks(2, quiet=True)
    thread.join()
    eventually(lambda: set(marked_processes()) <= processes, GONE_SECONDS)
    assert set(watch.folder.iterdir()) == files


def test_ranks_that_cannot_start_say_why(watch, tmp_path, monkeypatch):  # noqa: F811
    files = set(watch.folder.iterdir())
    (tmp_path / "torch.py").write_text("raise ImportError('torch is half installed')\n")
    # The folder of the course comes first: a module of torch's name beside it.
    monkeypatch.setattr("course_utils.ranks.processes.PACKAGE_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with within(2), pytest.raises(RanksError) as caught:
        Ranks(2, quiet=True)
    assert str(caught.value) == (
        "rank 0 could not be started: ImportError: torch is half installed. "
        "Run `python3 -m course_utils doctor` in a terminal to see what is wrong."
    )
    watch.assert_no_strays()
    assert set(watch.folder.iterdir()) == files


def run_kernel(code: str, **environment: str) -> subprocess.Popen:
    """A process that is the kernel, with ranks of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_kernel_leaves_nothing(watch, tmp_path):  # noqa: F811
    files = set(watch.folder.iterdir())
    kernel = run_kernel(
        f"""
        from course_utils.ranks import Ranks
        Ranks(2, quiet=True).run_cell('''
        import subprocess
        away = subprocess.Popen(["sleep", "1002"], start_new_session=True)
        open(f"{tmp_path}/{{rank}}", "w").close()
        if rank:
            dist.barrier()
        sum(range(10**15))  # in C: this rank sees nothing of the kernel's end
        ''')
        """
    )
    with kernel:
        eventually(lambda: len(list(tmp_path.iterdir())) == 2, 30)
        family = psutil.Process(kernel.pid).children(recursive=True)
        assert len(family) == 2 + 2 + 1  # ranks, what they have started, the guard
        kernel.kill()
    watch.assert_no_strays()
    assert set(watch.folder.iterdir()) == files


# ------------------------------------------------------------------- other systems
def test_only_linux_forks(monkeypatch):
    monkeypatch.delenv("RANKS_START_METHOD")
    for system, method in (("linux", "fork"), ("darwin", "spawn"), ("win32", "spawn")):
        monkeypatch.setattr(sys, "platform", system)
        assert start_method() == method


def test_the_name_of_the_loopback_interface(monkeypatch):
    assert team.loopback_interface() in psutil.net_if_addrs()
    Address = namedtuple("Address", "address")
    windows = {
        "Ethernet": [Address("192.168.0.7")],
        "Loopback Pseudo-Interface 1": [Address("::1"), Address("127.0.0.1")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: windows)
    assert team.loopback_interface() == "Loopback Pseudo-Interface 1"


def test_nccl_is_taken_only_where_it_is(monkeypatch):
    windows = {rank: {"gpus": 2, "nccl": False} for rank in range(2)}
    hello = SimpleNamespace(failed=False, cause="raised", replies=windows)
    ranks = Ranks.__new__(Ranks)
    ranks.n = 2
    monkeypatch.setattr(Ranks, "_round", lambda *_: hello)
    ranks._asked_backend = "auto"
    assert ranks._choose_backend(quiet=True) == "gloo"
    ranks._asked_backend = "nccl"
    with pytest.raises(RanksError, match="'nccl' is not part of this PyTorch"):
        ranks._choose_backend(quiet=True)


def test_half_a_record_is_no_mismatch(monkeypatch):
    # On other processors than Intel's, memory may show its key before the rest.
    from course_utils.ranks import agreement

    board = bytearray(2 * team.BOARD_BYTES)
    mine, peer = (agreement.Agreement(board, rank, 2) for rank in (0, 1))
    members = (0, 1)
    assert peer._exchange(("call", 1), "the same", "it()", members) == []
    whole = bytes(board)
    start = whole.index(b"it()") - 8  # the fingerprint before the text
    board[start : start + 8] = bytes(8)

    def meanwhile(seconds):
        board[:] = whole

    monkeypatch.setattr(agreement.time, "sleep", meanwhile)
    assert mine._exchange(("call", 1), "the same", "it()", members) == []
    board[:] = whole
    found = mine._exchange(("call", 1), "something else", "other()", members)
    assert found == [(1, "it()")]


# What Windows does not have. The modules that look for it at import come first.
WITHOUT_UNIX = """
import faulthandler, multiprocessing.connection, multiprocessing.util, os, random
import signal, socket, subprocess, sys, tempfile, psutil

def end(process):
    if getattr(process, "returncode", None) is None:
        try:
            os.kill(process.pid, 9)
        except OSError:
            pass

psutil.Process.kill = subprocess.Popen.kill = end
for module, names in {
    os: "fork forkpty killpg getpgid setpgid setsid memfd_create pidfd_open wait",
    signal: "SIGKILL SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGHUP pthread_kill "
        "pthread_sigmask setitimer",
    socket: "send_fds recv_fds",
    faulthandler: "register unregister",
}.items():
    for name in names.split():
        delattr(module, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
listdir = os.listdir

def no_descriptors(path="."):
    if path in ("/proc/self/fd", "/dev/fd"):
        raise FileNotFoundError(path)
    return listdir(path)

os.listdir = no_descriptors
"""


@pytest.mark.thorough
@pytest.mark.skipif(not LINUX, reason="leaves out what Linux has, not other systems")
def test_ranks_without_what_only_unix_has(watch, tmp_path):  # noqa: F811
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_UNIX)
    kernel = run_kernel(
        """
        import json, os, sys
        from course_utils.ranks import Ranks, RanksError
        cells = {
            "lacks": "import os, signal; x = hasattr(os, 'killpg')",
            "sum": "y = torch.ones(2); dist.all_reduce(y); assert y[0] == 2",
            "raised": "if rank == 1: 1 / 0\\ndist.barrier()",
            "differ": "dist.all_reduce(torch.ones(2 + rank))",
            "loop": "if rank:\\n    while True: pass\\ndist.barrier()",
            "C": "if rank:\\n    sum(range(10**15))",
        }
        said = {"kernel": hasattr(os, "killpg")}
        with Ranks(2, quiet=True, output="grouped") as ranks:
            for name, cell in cells.items():
                try:
                    ranks.run_cell(cell, timeout=0.5 if name in "loop C" else 10)
                except RanksError as error:
                    said[name] = str(error)
                if name != "C":
                    said[name + " x"] = ranks.pull("x")
            ranks.run_cell(cells["sum"])
        json.dump(said, sys.stdout)
        """,
        PYTHONPATH=str(tmp_path),
    )
    out, err = kernel.communicate(timeout=60)
    assert kernel.returncode == 0, err
    said = json.loads(out)
    assert said.pop("kernel") is False
    for name in ("lacks", "sum", "raised", "differ", "loop"):
        assert said.pop(f"{name} x") == [False, False], name  # all have kept it
    assert said.pop("raised") == (
        "Rank 1 raised ZeroDivisionError: division by zero\n"
        "  line 1 of the cell: if rank == 1: 1 / 0\n"
        "Rank 0 was waiting in barrier, line 2 of the cell: dist.barrier()\n" + KEPT
    )
    differ = said.pop("differ")  # the rank that comes later says so
    assert "raised CollectiveMismatch: rank " in differ
    assert "all_reduce(float32[2], SUM)" in differ
    assert "all_reduce(float32[3], SUM)" in differ
    assert "Rank 1 was still running: line 2 of the cell: while" in said.pop("loop")
    assert "Rank 1 was still running.\n" in said["C"]
    assert "Rank 1 was started afresh, without variables" in said.pop("C")
    assert said == {}
    watch.assert_no_strays()


@pytest.mark.skipif(not LINUX, reason="their names are in /dev/shm on Linux only")
def test_semaphores_with_a_name_are_made(two):
    """That they go with their ranks is looked at after the last test."""
    two.run_cell(
        "import multiprocessing\nlock = multiprocessing.get_context('spawn').Lock()"
    )
    assert any("sem.mp-rank-" in name for name in os.listdir("/dev/shm"))
