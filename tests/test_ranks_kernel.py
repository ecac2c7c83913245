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
    GROUP_STAYS,
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
        assert reply.text == "".join(
            f"[rank {r}] => tensor([{n}., {n}.])\n" for r in range(n)
        )

    def interrupt_inside(self, cell: str, folder, n: int = 4) -> tuple[Reply, float]:
        """Press stop when all ranks are inside; the reply and how long it took."""
        for file in folder.iterdir():
            file.unlink()
        started = self.send(f"%%ranks\nopen(f'{folder}/{{rank}}', 'w').close()\n{cell}")
        eventually(lambda: len(list(folder.iterdir())) == n)
        pressed = time.monotonic()
        self.interrupt()
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


@pytest.fixture
def fresh(watch):  # noqa: F811
    """A notebook of its own, with two ranks."""
    with Notebook() as kernel:
        kernel.load(2)
        yield kernel
    watch.assert_nothing_left_but_kernels()


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
    "cell, says, seconds, lost",
    thorough_after(3, [
        ("dist.recv(torch.ones(1), rank ^ 1)", "stuck in recv, line 3", 1, False),
        ("if rank: dist.barrier()\nelse: input_ = open(0).read(); time = 1; "
         "__import__('time').sleep(1000)", "stuck in barrier, line 3", 1, False),
        ("while True: pass", "still running: line 3", 1, False),
        ("import time\ntime.sleep(1000)", "still running: line 4", 1, False),
        ("sum(range(10**15))", "still running: line 3", 2.7, True),
        ("while True: print('more')", "still running: ", 1.5, False),
        ("while True: torch.ones(500, 500) @ torch.ones(500, 500)",
         "still running: ", 1, False),
    ]),
    ids=["recv", "collective", "loop", "sleep", "loop in C", "printing", "tensors"],
)  # fmt: skip
def test_stop_ends_the_cell_on_all_ranks(kernel, tmp_path, cell, says, seconds, lost):
    reply, taken = kernel.interrupt_inside(cell, tmp_path)
    assert taken < LOAD * seconds
    assert not reply.ok
    text = plain(reply.text)
    assert "RanksError: Interrupted by you.\nRank" in text
    assert says in text
    assert "Traceback" not in text and "driver.py" not in text
    fresh_ones = "without variables" in text
    assert fresh_ones == lost
    if not lost:
        assert text.rstrip().endswith(KEPT)
        assert kernel.value("ranks.pull('kept')") == [0, 11, 22, 33]
    assert kernel.value("ranks._lock.locked()") is False


@pytest.mark.thorough
def test_stop_twice_is_no_worse_than_once(kernel, tmp_path):
    started = kernel.send(f"%%ranks\nopen(f'{tmp_path}/{{rank}}', 'w').close()\n"
                          "sum(range(10**15))")  # fmt: skip
    eventually(lambda: len(list(tmp_path.iterdir())) == 4)
    for _ in range(4):  # an impatient learner, while the ranks are being ended
        kernel.interrupt()
        time.sleep(0.3)
    text = plain(kernel.receive(started).text)
    assert "Interrupted by you." in text
    assert "Ranks 0 to 3 were started afresh, without variables." in text


def test_stop_between_cells_does_no_harm(kernel):
    kernel.interrupt()
    assert kernel.value("ranks.pull('kept')") == [0, 11, 22, 33]


def test_stop_in_a_plain_cell_does_no_harm(kernel, tmp_path):
    inside = tmp_path / "inside"
    started = kernel.send(
        f"import time\nopen({str(inside)!r}, 'w').close()\ntime.sleep(1000)"
    )
    eventually(inside.exists)
    kernel.interrupt()
    assert "KeyboardInterrupt" in kernel.receive(started).text
    assert kernel.value("ranks.pull('kept')") == [0, 11, 22, 33]


def test_stop_in_run(kernel, tmp_path):
    kernel.run_well(
        "def stay(folder):\n"
        "    import os, time\n"
        "    open(f\"{folder}/{os.environ['RANK']}\", 'w').close()\n"
        "    time.sleep(1000)"
    )
    started = kernel.send(f"ranks.run(stay, {str(tmp_path)!r})")
    eventually(lambda: len(list(tmp_path.iterdir())) == 4)
    kernel.interrupt()
    with within(1):
        text = plain(kernel.receive(started).text)
    assert "RanksError: Interrupted by you.\n" in text
    assert "still running: line 4 of the cell: time.sleep(1000)" in text


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


def test_a_failing_function_of_the_notebook_shows_its_line(kernel):
    kernel.run_well("def half(x):\n    return x / 0\n\nclass Box:\n    value = 5")
    text = plain(kernel.run("ranks.run(half, 3)").text)
    assert text.strip() == (
        "RanksError: Ranks 0 to 3 raised ZeroDivisionError: division by zero\n"
        "  line 2 of the cell, in half: return x / 0\n" + GROUP_STAYS
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


def test_a_cell_that_is_not_python_is_a_syntax_error(kernel):
    reply = kernel.run("%%ranks\nx = 1\ny = = 2")
    assert not reply.ok
    text = plain(reply.text)
    assert text.strip() == (
        "RanksError: SyntaxError: invalid syntax, line 3 of the cell\n"
        "    y = = 2\n        ^\nNothing ran."
    )


def test_wrong_options_of_the_magic_are_explained(kernel):
    text = plain(kernel.run("%%ranks --onyl 2\n1").text)
    assert "%%ranks: unrecognized arguments: --onyl 2" in text
    assert "usage: %%ranks [-n N] [--only R,R] [--timeout SECONDS]" in text


def test_options_of_the_magic(kernel):
    assert kernel.run_well("%%ranks --only 0,2\nrank").text == (
        "[rank 0] => 0\n[rank 2] => 2\n"
    )
    reply = kernel.run_well("%%ranks --expect-error KeyError\n{}['x']")
    assert reply.text.startswith("As expected: Ranks 0 to 3 raised KeyError: 'x'\n")
    assert not kernel.run("%%ranks --expect-error KeyError\n1").ok
    with within(1.5):
        reply = kernel.run("%%ranks --timeout 0.5\nimport time; time.sleep(1000)")
    assert "Not finished after 0.5 s, the limit for this cell." in reply.text


def test_output_streams_into_the_notebook(kernel, tmp_path):
    # The cell ends only when the test has seen what it printed first.
    go_on = tmp_path / "go on"
    kernel.run_well("ranks.output = 'stream'")
    started = kernel.send(
        "%%ranks --only 1 --timeout 20\n"
        "import os, time\nprint('first')\n"
        f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
        "print('second')"
    )
    channel = kernel._client.iopub_channel
    seen = ""
    while "first" not in seen:
        message = channel.get_msg(timeout=20)
        if message["msg_type"] == "stream":
            seen += message["content"]["text"]
    go_on.touch()
    assert seen == "[rank 1] first\n"
    assert kernel.receive(started).text == "[rank 1] second\n"
    kernel.run_well("ranks.output = 'grouped'")


def test_a_progress_bar_is_one_line_in_the_notebook(kernel):
    kernel.run_well("ranks.output = 'stream'")
    reply = kernel.run_well(
        "%%ranks --only 0\n"
        "import time\nfrom tqdm import tqdm\n"
        "for _ in tqdm(range(20)): time.sleep(0.05)"
    )
    kernel.run_well("ranks.output = 'grouped'")
    text = reply.text.replace("\n\r", "\r")  # the parts of a stream, joined by lines
    assert text.count("\n") <= 2
    assert "100%|" in text.rpartition("\r")[2]


# -------------------------------------------------------------------- restart and death
@pytest.mark.parametrize(
    "now", thorough_after(1, [False, True]), ids=["restart", "restart at once"]
)
def test_a_restarted_kernel_leaves_no_ranks(fresh, now):
    old = fresh.family()
    assert len(old) == 3
    fresh.restart(now)
    assert running_after(GONE_SECONDS, old) == []
    fresh.load(2)
    fresh.works(2)


@pytest.mark.parametrize(
    "cell",
    thorough_after(
        1,
        [
            "import time; time.sleep(1000)",
            "dist.recv(torch.ones(1), 1 - rank)",
            "sum(range(10**15))",
            "import subprocess; subprocess.run(['setsid', 'sleep', '1000'])",
            "while True: print('x' * 1000)",
        ],
    ),
    ids=["sleep", "recv", "loop in C", "a child in a session of its own", "printing"],
)
def test_a_killed_kernel_leaves_nothing(watch, tmp_path, cell):  # noqa: F811
    with Notebook() as kernel:
        kernel.load(2)
        kernel.send(f"%%ranks\nopen(f'{tmp_path}/{{rank}}', 'w').close()\n{cell}")
        eventually(lambda: len(list(tmp_path.iterdir())) == 2)
        if "sleep'" in cell:
            eventually(
                lambda: sum("sleep 1000" == t for t in marked_processes().values()) == 2
            )
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


# ----------------------------------------------------------------------- two notebooks
@pytest.mark.thorough
def test_two_notebooks_at_once(kernel, fresh, tmp_path):
    cell = (
        "%%ranks\nfor _ in range(200):\n    x = torch.ones(2)\n"
        "    dist.all_reduce(x)\nx"
    )
    sent = [(notebook, notebook.send(cell)) for notebook in (kernel, fresh)]
    for (notebook, message), n in zip(sent, (4, 2), strict=True):
        assert notebook.receive(message).text == "".join(
            f"[rank {r}] => tensor([{n}., {n}.])\n" for r in range(n)
        )
    # What happens in one does not reach the other.
    waiting = fresh.send(
        f"%%ranks --timeout 20\nimport os, time\n"
        f"while not os.path.exists('{tmp_path}/go on'): time.sleep(0.01)\nrank"
    )
    kernel.run("%%ranks\nif rank == 1: 1 / 0\ndist.barrier()")
    folder = tmp_path / "inside"
    folder.mkdir()
    kernel.interrupt_inside("while True: pass", folder)
    kernel.run("%%ranks\nimport os; os._exit(1)")
    kernel.run_well("ranks.restart()")
    (tmp_path / "go on").touch()
    assert fresh.receive(waiting).text == "[rank 0] => 0\n[rank 1] => 1\n"


# ----------------------------------------------------------------------- the first cell
def test_the_magic_alone_makes_four_ranks(watch):  # noqa: F811
    with Notebook() as kernel:
        kernel.run_well("%load_ext course_utils")
        assert kernel.value("__import__('gc').isenabled()") is True
        reply = kernel.run_well(WORKS)
        lines = [line for line in reply.text.splitlines() if line]
        assert lines[0].startswith("Ranks are real processes. ")
        assert lines[1:] == [f"[rank {r}] => tensor([4., 4.])" for r in range(4)]
        assert kernel.value("'torch' in __import__('sys').modules") is False
        kernel.works()
        kernel.run_well(
            "from course_utils import Ranks\nRanks.latest().close()\nRanks.latest()"
        )
        lines = kernel.run_well("%%ranks -n 2\nrank").text.splitlines()
        assert list(filter(None, lines)) == [
            "All ranks were closed. 2 new ones start, without variables.",
            "[rank 0] => 0",
            "[rank 1] => 1",
        ]
    watch.assert_nothing_left_but_kernels()


def test_a_file_that_hides_a_package_is_named(fresh, tmp_path):
    fresh.run_well(f"import os; os.chdir({str(tmp_path)!r})")
    for inside, name in (("numpy/__init__.py", "numpy"), ("torch.py", "torch")):
        file = tmp_path / inside
        file.parent.mkdir(exist_ok=True)
        file.write_text("notes = 'of a learner'\n")
        text = fresh.run("%reload_ext course_utils").text
        assert text.endswith(
            f": {file} takes the place of the package {name}. "
            "Rename it, then restart the kernel."
        )
        file.rename(tmp_path / "mine.py")
        fresh.run_well("%reload_ext course_utils")


@pytest.mark.thorough
def test_parallel_work_in_the_kernel_comes_first(fresh):
    fresh.run_well(
        "import torch\ntorch.set_num_threads(2)\n"
        "torch.ones(600, 600) @ torch.ones(600, 600); torch.ones(3_000_000).exp().sum()"
    )
    fresh.run_well("ranks = Ranks(2, output='grouped', quiet=True)")
    assert fresh.value(
        "ranks.run(lambda: float(torch.ones(2_000_000).add(1).sum()))"
    ) == [4e6, 4e6]
