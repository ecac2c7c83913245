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
from pathlib import Path

import psutil
import pytest
from faults import RANKS, rows
from ranks_support import (
    GONE_SECONDS,
    LINUX,
    POSIX,
    eventually,
    kept,
    marked_processes,
    own_descriptors,
    ranks,  # noqa: F401 - a fixture
    watch,  # noqa: F401 - a fixture
    within,
)
from test_fault_matrix import OnRanks, look_at
from thorough import thorough_after

from course_utils import ROOT
from course_utils.ranks import Ranks, RanksError
from course_utils.ranks.output import MARK_BYTES, output_mark
from course_utils.ranks.processes import SpawnedRank

pytestmark = pytest.mark.skipif(not POSIX, reason="needs Unix signals")


@pytest.fixture(scope="module", autouse=True)
def spawn():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKS_START_METHOD", "spawn")
        yield


@pytest.fixture(scope="module")
def four(spawn, watch):  # noqa: F811
    with Ranks(4, output="grouped", quiet=True, timeout=30) as four:
        yield four


MISTAKES = (
    "an exception",
    "an endless loop",
    "different collectives",
    "a collective that one rank leaves out",
    "a flood of output",
    "a crash in C",
    # The others run with --all.
    "sys.exit()",
    "kill -9, with a child that would live on",
    "an endless computation in C",
    "Ctrl-C while it computes",
    "a request that nobody waits for",
    "standard output is closed",
    "a process is killed from outside, between two cells",
)
TABLE = {row.mistake: row for row in rows() if row.place == RANKS}


@pytest.mark.parametrize("name", thorough_after(6, MISTAKES))
def test_a_mistake_is_named_and_survived(four, watch, tmp_path, name):  # noqa: F811
    look_at(OnRanks(four, tmp_path), TABLE[name], watch)


# -------------------------------------------------------------------------- every day
def test_each_rank_is_a_python_of_its_own(ranks, watch):  # noqa: F811
    pids = ranks.run(os.getpid)
    assert len(set(pids)) == 4
    for pid in pids:
        process = psutil.Process(pid)
        assert process.ppid() == os.getpid()
        assert os.getpgid(pid) == pid  # Ctrl-C in the kernel's group spares it
        connections = process.net_connections(kind="inet")
        listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1"}
    assert not watch.exposed, watch.exposed


@pytest.mark.thorough
def test_restarted_ranks_import_what_the_notebook_can_import(
    ranks,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    (tmp_path / "learners_module.py").write_text("value = 42\n")
    (tmp_path / "queue.py").write_text("hides = 'Python has a module of this name'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ranks.restart()
    kept(ranks, 0, 1, 2, 3)
    ranks.run_cell("import learners_module, os; v = learners_module.value")
    assert ranks.pull("v", rank=3) == 42
    ranks.run_cell("import sys; path = os.environ['PYTHONPATH'].split(os.pathsep)")
    assert str(tmp_path) not in ranks.pull("path", rank=0)  # not for their children


def test_status_where_memory_is_not_told(ranks, monkeypatch):  # noqa: F811
    before = ranks.status()[0]
    assert before.backend == "gloo" and "kept" in before.variables

    def denied(process):  # as on macOS
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)
    assert 1e7 < before.memory < ranks.status()[0].memory < 2e9


def test_all_output_is_there_when_the_cell_ends(ranks, capsys):  # noqa: F811
    # It comes another way than the answer, and must not be late once.
    for number in range(50):
        ranks.run_cell(f"import os\nos.write(1, b'from C {number}\\n');", only=[0, 1])
        lines = [f"[rank {rank}] from C {number}\n" for rank in (0, 1)]
        assert capsys.readouterr().out == "".join(lines)
    # What looks like its mark is output, too.
    for words in (b"a\0b", b"\0\0ranks ", b"\0\0", output_mark(0)[: MARK_BYTES - 1]):
        ranks.run_cell(f"import os\nos.write(1, {words!r});", only=[0])
        assert capsys.readouterr().out == f"[rank 0] {words.decode()}\n"


# ------------------------------------------------------------------- start, close, end
def test_close_leaves_nothing_and_strangers_are_turned_away(watch, monkeypatch):  # noqa: F811
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
                assert rank.has_called_back() is False
                stranger.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
                turned_away.append(words)
        wait_started(rank)

    wait_started = SpawnedRank.wait_started
    monkeypatch.setattr(SpawnedRank, "wait_started", strangers_first)
    with Ranks(1, output="grouped", quiet=True) as one:
        assert len(turned_away) == 2
        one.run_cell(
            "import multiprocessing, subprocess, tempfile\n"
            "lock = multiprocessing.get_context('spawn').Lock()\n"
            "folder = tempfile.mkdtemp()\n"
            "away = subprocess.Popen(['sleep', '1001'], start_new_session=True)"
        )
        # Its pipe closes a moment before the system knows its words and environment.
        assert eventually(lambda: "sleep 1001" in marked_processes().values())
        assert Path(one.pull("folder", rank=0)).is_dir()
    eventually(lambda: set(marked_processes()) <= processes, GONE_SECONDS)
    eventually(lambda: own_descriptors() <= descriptors, GONE_SECONDS)
    assert set(watch.folder.iterdir()) == files


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
    (tmp_path / "torch.py").write_text("raise ImportError('torch is half installed')\n")
    # The folder of the course comes first: a module of torch's name beside it.
    monkeypatch.setattr("course_utils.ranks.processes.PACKAGE_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    says = "rank 0 could not be started: ImportError: torch is half installed. Run"
    with within(2), pytest.raises(RanksError, match=says):
        Ranks(2, quiet=True)
    watch.assert_no_strays()


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
        said = {"x": []}
        with Ranks(2, quiet=True, output="grouped") as ranks:
            for name, cell in cells.items():
                try:
                    ranks.run_cell(cell, timeout=0.5 if name in "loop C" else 10)
                except RanksError as error:
                    said[name] = str(error)
                if name != "C":
                    said["x"] += ranks.pull("x")
            ranks.run_cell(cells["sum"])
        json.dump(said, sys.stdout)
        """,
        PYTHONPATH=str(tmp_path),
    )
    out, err = kernel.communicate(timeout=60)
    assert kernel.returncode == 0, err
    said = json.loads(out)
    assert said.pop("x") == [False] * 10  # all have kept it
    assert "Rank 0 was waiting in barrier, line 2 of the" in said.pop("raised")
    assert "all_reduce(float32[2], SUM)" in said.pop("differ")
    assert "Rank 1 was still running: line 2 of the cell: while" in said.pop("loop")
    assert "Rank 1 was still running.\n" in said["C"]
    assert "Rank 1 was started afresh, without variables" in said.pop("C")
    assert said == {}
    watch.assert_no_strays()
