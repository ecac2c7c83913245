"""Ranks in a real Jupyter kernel: interrupts, restarts, ``kill -9``, two at once."""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest
from jupyter_core.utils import ensure_event_loop
from ranks_support import (
    GONE_SECONDS,
    KEPT,
    LINUX,
    LOAD,
    eventually,
    marked_processes,
    watch,  # noqa: F401 - a fixture
    within,
)
from thorough import thorough_after

from tests.benchmarks._kernel import Kernel, Reply

pytestmark = pytest.mark.skipif(not LINUX, reason="needs Unix signals and /proc")

WORKS = "%%ranks\nx = torch.ones(2)\ndist.all_reduce(x)\nx"


class Notebook(Kernel):
    """A kernel with the extension loaded and, mostly, with four ranks."""

    def load(self, n: int = 4) -> None:
        self.run_well("%load_ext course_utils")
        self.run_well("from course_utils import Ranks, RanksError")
        self.run_well(f"ranks = Ranks({n}, output='grouped', quiet=True)")

    def works(self, n: int = 4) -> None:
        """The next cell works: a collective over all ranks."""
        with within(1):
            reply = self.run_well(WORKS)
        lines = [f"[rank {r}] => tensor([{n}., {n}.])\n" for r in range(n)]
        assert reply.text == "".join(lines)

    def interrupt_inside(
        self, cell: str, folder, n: int = 4, times: int = 1
    ) -> tuple[Reply, float]:
        """Press stop when all ranks are inside; the reply and how long it took."""
        touch = f"open('{folder}/' + __import__('os').environ['RANK'], 'w').close()"
        started = self.send(cell.replace("TOUCH", touch))
        eventually(lambda: len(list(folder.iterdir())) == n)
        pressed = time.monotonic()
        for _ in range(times):
            self.interrupt()
            time.sleep(0.3 if times > 1 else 0)
        reply = self.receive(started)
        return reply, time.monotonic() - pressed

    def restart(self, now: bool) -> None:
        """What the restart button does."""
        self._client.stop_channels()
        self._manager.restart_kernel(now=now)
        self.pid = self._manager.provisioner.pid
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def family(self) -> list[psutil.Process]:
        """All that the kernel has started."""
        return psutil.Process(self.pid).children(recursive=True)


@pytest.fixture(scope="module", autouse=True)
def _event_loop():
    """Made before the watch looks: jupyter_client keeps it, with its two sockets."""
    ensure_event_loop()


@pytest.fixture(scope="module")
def shared(watch):  # noqa: F811
    with Notebook() as kernel:
        kernel.load()
        yield kernel


@pytest.fixture
def kernel(shared):
    """A notebook whose ranks have a variable; the next cell works afterwards."""
    shared.run_well("%%ranks\nkept = rank * 11")
    yield shared
    shared.works()


def running_after(seconds: float, family: list[psutil.Process]) -> list[psutil.Process]:
    """Who of them still runs. One that has ended may wait for init to notice it."""
    _, left = psutil.wait_procs(family, seconds)
    return [one for one in left if not is_zombie(one)]


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def plain(text: str) -> str:
    """Without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# --------------------------------------------------------------------------- interrupts
@pytest.mark.parametrize(
    "cell, says, seconds",
    thorough_after(
        2,
        [
            ("dist.recv(torch.ones(1), rank ^ 1)", "stuck in recv, line 3", 1),
            ("import time\ntime.sleep(1000)", "still running: line 4", 1),
            ("while True: print('more')", "still running: ", 1.5),
            (
                "while True: torch.ones(500, 500) @ torch.ones(500, 500)",
                "still running: ",
                1,
            ),
        ],
    ),
    ids=["recv", "sleep", "printing", "tensors"],
)
def test_stop_ends_the_cell_on_all_ranks(kernel, tmp_path, cell, says, seconds):
    reply, taken = kernel.interrupt_inside(f"%%ranks\nTOUCH\n{cell}", tmp_path)
    assert taken < LOAD * seconds
    text = plain(reply.text)
    assert "RanksError: Interrupted by you.\nRank" in text and says in text
    assert "Traceback" not in text and "driver.py" not in text
    assert text.rstrip().endswith(KEPT)
    assert kernel.value("ranks.pull('kept')") == [0, 11, 22, 33]


@pytest.mark.thorough
def test_an_impatient_learner_who_stops_a_loop_in_c(kernel, tmp_path):
    cell = "%%ranks\nTOUCH\nsum(range(10**15))"
    text = plain(kernel.interrupt_inside(cell, tmp_path, times=4)[0].text)
    assert "Interrupted by you." in text
    assert "Ranks 0 to 3 were started afresh, without variables." in text


def test_stop_elsewhere_does_no_harm(kernel, tmp_path):
    kernel.interrupt()
    cell = f"import time\nopen('{tmp_path}/0', 'w').close()\ntime.sleep(1000)"
    reply, _ = kernel.interrupt_inside(cell, tmp_path, n=1)
    assert "KeyboardInterrupt" in reply.text
    assert kernel.value("ranks.pull('kept')") == [0, 11, 22, 33]


# ---------------------------------------------------------------- what a notebook shows
def test_a_failure_is_shown_without_the_way_it_took(kernel):
    reply = kernel.run("%%ranks\nx = 1\nif rank == 2:\n    x / 0\ndist.barrier()")
    assert not reply.ok
    assert plain(reply.text).strip() == (
        "RanksError: Rank 2 raised ZeroDivisionError: division by zero\n"
        "  line 4 of the cell: x / 0\n"
        "Ranks 0, 1 and 3 were waiting in barrier, line 5 of the cell: dist.barrier()\n"
        + KEPT
    )


def test_functions_and_classes_of_the_notebook(kernel):
    kernel.run_well(
        "import torch.distributed as dist\n"
        "factor = 3\n"
        "class Box:\n"
        "    def __init__(self, value): self.value = value\n"
        "def scale(box):\n"
        "    return Box(box.value * factor + dist.get_rank())\n"
        "boxes = ranks.run(scale, Box(10))"
    )
    assert kernel.value("[box.value for box in boxes]") == [30, 31, 32, 33]
    assert kernel.value("all(isinstance(box, Box) for box in boxes)") is True


# -------------------------------------------------------------------- restart and death
ENDS = [  # how it is restarted, and what the ranks do when it is killed
    (False, "dist.recv(torch.ones(1), 1 - rank)"),
    (True, "sum(range(10**15))"),
    (True, "import subprocess; subprocess.run(['setsid', 'sleep', '1000'])"),
    (False, "while True: print('x' * 1000)"),
]


@pytest.mark.parametrize(
    "now, cell",
    thorough_after(1, ENDS),
    ids=["recv", "loop in C", "a child in a session of its own", "printing"],
)
def test_a_restarted_and_a_killed_kernel_leave_nothing(watch, tmp_path, now, cell):  # noqa: F811
    with Notebook() as kernel:
        kernel.load(2)
        family = kernel.family()
        assert len(family) == 3
        kernel.restart(now)
        assert running_after(GONE_SECONDS, family) == []
        kernel.load(2)
        kernel.works(2)
        kernel.send(f"%%ranks\nopen(f'{tmp_path}/{{rank}}', 'w').close()\n{cell}")
        eventually(lambda: len(list(tmp_path.iterdir())) == 2)
        if "sleep'" in cell:
            eventually(lambda: [*marked_processes().values()].count("sleep 1000") == 2)
        family = kernel.family()
        assert len(family) >= 3
        os.kill(kernel.pid, signal.SIGKILL)
        assert running_after(GONE_SECONDS, family) == []
    watch.assert_nothing_left_but_kernels()


@pytest.mark.thorough
def test_a_killed_kernel_whose_helper_still_imports(watch):  # noqa: F811
    with Notebook() as kernel:
        kernel.send("%load_ext course_utils")  # starts the import of torch
        family = eventually(lambda: kernel.family())
        os.kill(kernel.pid, signal.SIGKILL)
        # It looks when the import is done, and that takes long on a busy machine.
        assert running_after(60, family) == []
    watch.assert_nothing_left_but_kernels()


# ----------------------------------------------------------------------- the first cell
def test_the_magic_alone_makes_four_ranks(watch):  # noqa: F811
    with Notebook() as kernel:
        kernel.run_well("%load_ext course_utils")
        assert kernel.value("__import__('gc').isenabled()") is True
        lines = [line for line in kernel.run_well(WORKS).text.splitlines() if line]
        assert lines[0].startswith("Ranks are real processes. ")
        assert lines[1:] == [f"[rank {r}] => tensor([4., 4.])" for r in range(4)]
        assert kernel.value("'torch' in __import__('sys').modules") is False
        kernel.run_well(
            "from course_utils import Ranks\nRanks.latest().close()\nRanks.latest()"
        )
        text = kernel.run_well("%%ranks -n 2\nrank").text
        assert text.replace("\n\n", "\n") == (
            "All ranks were closed. 2 new ones start, without variables.\n"
            "[rank 0] => 0\n[rank 1] => 1\n"
        )
    watch.assert_nothing_left_but_kernels()


def test_a_file_that_hides_a_package_is_named(kernel, tmp_path):
    kernel.run_well(f"import os; before = os.getcwd(); os.chdir({str(tmp_path)!r})")
    for inside, name in (("numpy/__init__.py", "numpy"), ("torch.py", "torch")):
        file = tmp_path / inside
        file.parent.mkdir(exist_ok=True)
        file.write_text("notes = 'of a learner'\n")
        text = kernel.run("%reload_ext course_utils").text
        assert text.endswith(
            f": {file} takes the place of the package {name}. "
            "Rename it, then restart the kernel."
        )
        file.rename(tmp_path / "mine.py")
        kernel.run_well("%reload_ext course_utils")
    kernel.run_well("os.chdir(before)")
