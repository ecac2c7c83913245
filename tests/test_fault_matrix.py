"""The fault matrix: every mistake of ``faults.py``, made for real where it can happen.

Each row must end in bounded time, show the learner the text that the table names, and
leave everything else as it was: the next cell works, what was saved is there, nothing
runs on, and nothing listens beyond this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import linecache
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import CHECK, GPUS, PASSED, RANKS, WORKER, Row, rows
from own_tasks import solved, total_task
from ranks_support import (
    LINUX,
    Watch,
    eventually,
    four,  # noqa: F401 - a fixture
    watch,  # noqa: F401 - a fixture
    works,
)

from course_utils import ROOT, launch, virtual_gpus
from course_utils.notebook import check as checks
from course_utils.notebook import ours, processes
from course_utils.notebook.progress import attempts, record_attempt
from course_utils.ranks import Ranks
from course_utils.virtual_gpus import gpus as switched

pytestmark = pytest.mark.skipif(not LINUX, reason="needs /proc and Unix signals")


# ------------------------------------------------------------- what the learner sees
def seen_of(action: Callable[[], object]) -> tuple[str, float]:
    """What ``action`` shows on the screen, its error included; the seconds."""
    started, screen = time.monotonic(), io.StringIO()
    with (
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(screen),
        warnings.catch_warnings(),  # pytest's keep them from the screen
    ):
        warnings.showwarning = show_warning
        try:
            action()
        except (AssertionError, pytest.skip.Exception):
            raise  # this file's own, not the learner's
        except BaseException as error:
            screen.write(shown(error))
    return screen.getvalue(), time.monotonic() - started


def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """As Python does it."""
    text = warnings.formatwarning(message, category, filename, lineno, line)
    sys.stderr.write(text)


def shown(error: BaseException) -> str:
    """The last lines that IPython shows of an error."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error))
    return f"{type(error).__name__}: {error}".removesuffix(": ")


_cells = itertools.count(1)


def run_code(source: str, names: dict[str, Any]) -> None:
    """Run it as the cell of a notebook: messages can show its lines."""
    name = f"<ipython-input-{next(_cells)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), names)


@contextlib.contextmanager
def ctrl_c(ready: Callable[[], object], again: bool = False) -> Iterator[None]:
    """What the stop button does: SIGINT to this process, a moment after ``ready()``.

    With ``again`` it is pressed until it helps: Python ignores an exception in code
    that runs because an object is freed, and a KeyboardInterrupt may come just there.
    """
    over = threading.Event()

    def press() -> None:
        while not over.is_set() and not ready():
            time.sleep(0.02)
        pressed = False
        while not over.wait(3 if pressed else 0.3) and (again or not pressed):
            os.kill(os.getpid(), signal.SIGINT)
            pressed = True

    button = threading.Thread(target=press)
    button.start()
    try:
        yield
    finally:
        over.set()
        button.join()


# ------------------------------------------------------------------------ the places
class Place:
    """Where mistakes are made."""

    def cause(self, row: Row) -> tuple[str, float]:
        """Make it; what is seen, and the seconds."""
        if callable(row.cause):
            return seen_of(lambda: row.cause(self))
        return seen_of(lambda: self.make(row))

    def after(self, row: Row) -> None:
        """What must hold then."""


class OnRanks(Place):
    """Cells on four ranks, which live through all rows."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder

    def cause(self, row: Row) -> tuple[str, float]:
        self.ranks.run_cell("kept = rank * 11\nx = torch.full((3,), float(rank))")
        return super().cause(row)

    def make(self, row: Row) -> None:
        self.ranks.run_cell(row.cause, timeout=row.seen.limit)

    def after(self, row: Row) -> None:
        """The very next cell works, and variables are where the message said."""
        works(self.ranks)
        kept = self.ranks.run(lambda: "kept" in sys.modules["__main__"].__dict__)
        assert tuple(rank for rank in range(4) if not kept[rank]) == row.seen.fresh
        if row.seen.restart:
            self.ranks.restart()
            works(self.ranks)
            self.ranks.run_cell("import tempfile; tempfile.TemporaryFile().close()")

    def interrupted(self, code: str) -> None:
        inside = Path(tempfile.mkdtemp(dir=self.folder))
        cell = f"import time\nopen(f'{inside}/{{rank}}', 'w').close()\n{code}"
        with ctrl_c(lambda: len(list(inside.iterdir())) == 4):
            self.ranks.run_cell(cell)

    def at_once(self, code: str) -> None:
        inside = Path(tempfile.mkdtemp(dir=self.folder)) / "inside"
        cell = f"open({str(inside)!r}, 'w').close()\n{code}"
        other = threading.Thread(target=self.ranks.run_cell, args=(cell,))
        other.start()
        try:
            eventually(inside.exists)
            self.ranks.run_cell("x = 1")
        finally:
            other.join()

    def killed(self) -> None:
        """As a system without memory would do."""
        process = self.ranks.team.processes[1]
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: process.exit_status() is not None)
        self.ranks.run_cell("x = 1")

    def cells(self, *codes: str) -> None:
        """Cells one after the other, and what is seen of all of them."""
        for code in codes:
            print(seen_of(lambda code=code: self.ranks.run_cell(code))[0])


TOTAL = total_task(task_id="99.total")

FUNCTION = "def total(given):\n    rank, x = dist.get_rank(), given.clone()\n"


class InACheck(Place):
    """A function that one task checks on two ranks."""

    checks, torch = checks, torch

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task = TOTAL
        record_attempt("00.average", "passed")

    def cause(self, row: Row) -> tuple[str, float]:
        self.task = dataclasses.replace(TOTAL, seconds=row.seen.limit)
        return super().cause(row)

    def make(self, row: Row) -> None:
        self.check(self.function(row.cause))

    def after(self, row: Row) -> None:
        """A right answer passes, and the progress of before is there."""
        self.task = TOTAL
        text, _ = seen_of(lambda: self.check(self.function("dist.all_reduce(x)")))
        assert text.startswith(PASSED), text
        assert attempts()["00.average"]["passed"]
        assert attempts()[TOTAL.id]["passed"]

    def check(self, answer: Any) -> None:
        """``check("99.total", answer)``, as if a lesson had this task."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours, "solved", solved)
            patch.setattr(checks, "find_task", lambda task_id: self.task)
            checks.check(self.task.id, answer)

    def function(self, code: str, **names: Any) -> Callable:
        """What the learner has written in a cell of the notebook."""
        names |= {"torch": torch, "dist": dist, "__name__": "__main__"}
        run_code(f"{FUNCTION}{textwrap.indent(code, '    ')}\n    return x\n", names)
        return names["total"]

    def check_on_gpus(self, code: str) -> None:
        """In a task of lesson 03, whose code runs on virtual GPUs."""
        names = {"torch": torch, "__name__": "__main__"}
        run_code(f"def scatter(*given):\n    return {code}\n", names)
        checks.check("03.scatter", names["scatter"])

    def interrupted(self, code: str) -> None:
        inside = Path(tempfile.mkdtemp(dir=self.folder)) / "inside"
        touch = f"import time\nopen({str(inside)!r}, 'w').close()\n"
        with ctrl_c(inside.exists):
            self.check(self.function(touch + code))

    async def asynchronous(self, x: torch.Tensor) -> torch.Tensor:
        return x


SCRIPT = """\
import os, sys, torch, torch.distributed as dist
rank, x = int(os.environ["RANK"]), torch.ones(2)
dist.init_process_group("gloo")
"""


class InAWorker(Place):
    """Scripts that ``launch`` runs on two ranks: the watch sees what they leave."""

    launch = staticmethod(launch)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, row: Row) -> None:
        script = Path(tempfile.mkdtemp(dir=self.folder)) / "script.py"
        script.write_text(f"{SCRIPT}{row.cause}\n")
        launch(script, nproc=2, timeout=row.seen.limit)


class OnGpus(Place):
    """Two virtual GPUs in the notebook's own process."""

    def __init__(self) -> None:
        self.to = torch.Tensor.to

    def cause(self, row: Row) -> tuple[str, float]:
        with virtual_gpus(2, memory="2 GiB", force=True) as gpus:
            self.names = {"torch": torch, "virtual_gpus": virtual_gpus, "gpus": gpus}
            found = super().cause(row)
            self.names.clear()
            gc.collect()
            # Nothing is left on the GPUs, and they work.
            assert [device.now for device in gpus.memory()] == [0, 0]
            assert (torch.ones(2, device="cuda:1") + 1).tolist() == [2, 2]
        return found

    def make(self, row: Row) -> None:
        run_code(row.cause, self.names)

    def after(self, row: Row) -> None:
        """PyTorch is as it was."""
        assert switched.active is None
        assert torch.Tensor.to is self.to
        assert torch._C._len_torch_dispatch_stack() == 0

    def interrupted(self, code: str) -> None:
        with ctrl_c(lambda: True, again=True):
            run_code(code, self.names)


# --------------------------------------------------------------------------- the rows
@pytest.fixture(scope="module", autouse=True)
def own_progress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the checks record does not go to the progress of other tests."""
    progress = sys.modules["course_utils.notebook.progress"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_STATE", str(tmp_path_factory.mktemp("state")))
        patch.setattr(progress, "_pending", [])
        patch.setattr(progress, "_warned", set())
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_lost_nothing_left() -> Iterator[None]:
    """No file comes to where the code of the rows runs, and none goes."""

    def files() -> set[str]:
        found = {*os.listdir(ROOT), *os.listdir()}  # caches of others come and go
        return {name for name in found if not name.startswith((".", "__pycache__"))}

    before = files()
    yield
    assert files() == before


@pytest.fixture(scope="module")
def place_of(four, watch, tmp_path_factory) -> Iterator[Callable]:  # noqa: F811
    """A place by its name; each is made when its first row comes."""
    folder = tmp_path_factory.mktemp("faults")
    make = {
        RANKS: lambda: OnRanks(four, folder),
        CHECK: lambda: InACheck(folder),
        WORKER: lambda: InAWorker(folder),
        GPUS: OnGpus,
    }
    yield functools.cache(lambda name: make[name]())
    processes.close_all()  # the helper process that checks keep for the next one


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row.always else pytest.mark.thorough)
        for row in rows()
    ],
    ids=str,
)
def test_a_mistake_is_named_and_survived(row, place_of, watch):  # noqa: F811
    look_at(place_of(row.place), row, watch)


def look_at(place: Any, row: Row, watch: Watch) -> None:  # noqa: F811
    """Make the mistake there, and look at what is seen and what is left."""
    text, seconds = place.cause(row)
    for part in row.seen.shows:
        assert one_line(part) in one_line(text), text
    if not row.seen.shows:
        assert "Error" not in text
    assert seconds < row.seen.within
    place.after(row)
    watch.assert_no_strays()


def one_line(text: str) -> str:
    return " ".join(text.split())
