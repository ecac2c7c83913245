"""Ranks in a notebook: the first cell, the next cell, mistakes, memory.

Everything is measured from outside, with real kernels: from sending a cell until the
kernel is idle again, as a learner waits for it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil

from tests.benchmarks._harness import Row, compare, median_row, to_itself
from tests.benchmarks._kernel import Kernel, memory_of

N = 4  # ranks
FRESH_ROUNDS, WARM_ROUNDS = 3, 60

LOAD = "%load_ext course_utils"
FIRST = "%%ranks\nx = torch.ones(3)\ndist.all_reduce(x)\nx"
COLLECTIVE = "%%ranks\nx = torch.ones(3)\ndist.all_reduce(x)"
NOTHING = "%%ranks\npass"
EMPTY = "pass"
MARK = "%%ranks\nmark = 100 + rank"
MARKS = "ranks.run(lambda: vars(__import__('__main__')).get('mark'))"
CAUSE = "getattr(__import__('sys').last_value, 'cause', None)"

# The helper that forks ranks imports more as soon as it has been idle for 2 seconds.
IDLE_SECONDS = 2.5


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows, about 45 seconds of work on two cores."""
    yield fresh_row(1 if quick else FRESH_ROUNDS)
    with Kernel() as kernel:
        prepare(kernel)
        settle(kernel)
        yield from warm_rows(kernel, 1 if quick else WARM_ROUNDS)
        yield memory_row(kernel)
        yield from fault_rows(kernel, FAULTS[:1] if quick else FAULTS)


# ---------------------------------------------------------------------- the first cell
def import_torch() -> float:
    """Seconds that a fresh Python needs to import torch, start and end included."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def first_collective(kernel: Kernel) -> float:
    """Seconds from the first cell of a notebook to the end of its first collective.

    Raises:
        RuntimeError: a cell failed, or a rank has no or a wrong result.
    """
    started = time.perf_counter()
    kernel.run_well(LOAD)
    reply = kernel.run_well(FIRST)
    seconds = time.perf_counter() - started
    for rank in range(N):
        if f"[rank {rank}] => tensor([{N}., {N}., {N}.])" not in reply.text:
            raise RuntimeError(f"no sum of {N} ones from rank {rank}:\n{reply.text}")
    return seconds


def fresh_row(rounds: int) -> Row:
    """A fresh kernel's first collective over a fresh process that imports torch."""
    starts = []

    def measure() -> float:
        with Kernel() as kernel:
            starts.append(kernel.start_seconds)
            return first_collective(kernel)

    import_torch()  # files that come from disk the first time are nobody's cost
    found = compare(measure, import_torch, rounds)
    start = statistics.median(starts)
    return found.row(
        f"fresh kernel to first collective, {N} ranks / import torch",
        1.3,
        "a kernel that is ready runs %load_ext course_utils and a %%ranks cell; the "
        "start of the kernel itself is kernel_start_seconds",
        detail={
            "kernel_start_seconds": start,
            "ratio_with_kernel_start": (found.measured + start) / found.peer,
        },
    )


# ----------------------------------------------------------------------- the next cells
def prepare(kernel: Kernel) -> None:
    """Make the ranks, named ``ranks`` in the kernel, and leave a mark on each."""
    first_collective(kernel)
    kernel.run_well("from course_utils import Ranks\nranks = Ranks.latest()")
    kernel.run_well(MARK)


def settle(kernel: Kernel) -> None:
    """Wait until nothing below the kernel computes in the background any more."""

    def used() -> float:
        family = psutil.Process(kernel.pid).children(recursive=True)
        times = [process.cpu_times() for process in family]
        return sum(t.user + t.system for t in times)

    time.sleep(IDLE_SECONDS)
    before, now = -1.0, used()
    while now - before > 0.02:
        time.sleep(0.3)
        before, now = now, used()


def warm_rows(kernel: Kernel, rounds: int) -> Iterator[Row]:
    """Cells on ranks that are there already, over an empty cell of the same kernel."""

    def timed(cell: str) -> Callable[[], float]:
        return lambda: kernel.run_well(cell).seconds

    for row, cell, goal, note in (
        ("warm collective cell", COLLECTIVE, 2.0, "an all_reduce of 3 floats"),
        ("warm collective cell that shows a value", FIRST, None, "one line a rank"),
        ("warm cell without a collective", NOTHING, None, "what Ranks itself costs"),
    ):
        found = compare(timed(cell), timed(EMPTY), rounds)
        yield found.row(f"{row}, {N} ranks / an empty cell", goal, note)


def memory_row(kernel: Kernel) -> Row:
    """What one rank adds to the memory in use (shared pages by their share)."""

    def mebibytes(pid: int) -> float:
        return memory_of(pid) / 2**20

    pids = kernel.value("[status.pid for status in ranks.status()]")
    readings = [statistics.median(map(mebibytes, pids)) for _ in range(2)]
    helper = psutil.Process(pids[0]).ppid()
    detail = {} if helper == kernel.pid else {"helper": mebibytes(helper)}
    return Row(
        row=f"memory a rank, {N} ranks",
        ratio=readings[0],
        unit="MiB",
        aa=to_itself(readings),
        goal=None,
        samples=len(pids),
        note="PSS (USS outside Linux), the median of the ranks after a few cells; "
        "helper is the process that the ranks are forked from",
        detail=detail,
    )


# ----------------------------------------------------------------------------- mistakes
@dataclass(frozen=True)
class Fault:
    """A mistake, and how long a learner waits until the ranks can be used again.

    Attributes:
        row: its name in the output.
        code: the cell; every rank but rank 1 waits in a collective.
        cause: the ``RanksError.cause`` that must come of it.
        note: what is measured.
        options: of ``%%ranks``.
        goal: seconds, or None.
        wait: seconds that have to pass by design, and are taken off.
        interrupt: press the stop button that many seconds after sending the cell, and
            measure from there.
        returned: measure until the cell returns, not until the next one has run.
        lost: ranks that nothing but SIGKILL can free. The others must keep variables.
        rounds: how often it is caused.
    """

    row: str
    code: str
    cause: str
    note: str
    options: str = ""
    goal: float | None = 1.0
    wait: float = 0.0
    interrupt: float | None = None
    returned: bool = False
    lost: frozenset[int] = field(default_factory=frozenset)
    rounds: int = 3


WAIT_FOR_RANK_1 = "dist.all_reduce(torch.ones(3))"
LOOP = f"if rank == 1:\n    while True:\n        pass\n{WAIT_FOR_RANK_1}"
# sum() over an endless iterator never looks whether a signal came.
LOOP_IN_C = (
    f"import itertools\nif rank == 1:\n    sum(itertools.repeat(0))\n{WAIT_FOR_RANK_1}"
)
SKIP = f"if rank != 1:\n    {WAIT_FOR_RANK_1}"
RANK_1 = frozenset({1})
FAULTS = (
    Fault(
        "a rank raises: cell returns",
        f"if rank == 1:\n    raise ValueError('on purpose')\n{WAIT_FOR_RANK_1}",
        "raised",
        "the others wait in an all_reduce; usable_seconds is until the next "
        "collective is done",
        returned=True,
        rounds=5,
    ),
    Fault(
        "timeout, a rank loops in Python: usable again",
        LOOP,
        "timeout",
        "beyond --timeout 1, until the next collective is done",
        options="--timeout 1",
        wait=1.0,
    ),
    Fault(
        "timeout, a rank skips the collective: usable again",
        SKIP,
        "timeout",
        "beyond --timeout 1, until the next collective is done",
        options="--timeout 1",
        wait=1.0,
    ),
    Fault(
        "timeout, a rank loops in C: usable again",
        LOOP_IN_C,
        "timeout",
        "beyond --timeout 1, until the next collective is done; only SIGKILL ends "
        "such a loop, so rank 1 starts afresh",
        options="--timeout 1",
        wait=1.0,
        lost=RANK_1,
        rounds=2,
    ),
    Fault(
        "deadlock, a rank skips the collective: noticed and usable again",
        SKIP,
        "timeout",
        "from the start of the cell (its limit is 60 s), until the next collective is "
        "done",
        goal=None,
        rounds=2,
    ),
    Fault(
        "interrupt, a rank skips the collective: usable again",
        SKIP,
        "interrupt",
        "from the interrupt until the next collective is done",
        interrupt=0.4,
    ),
    Fault(
        "interrupt, a rank loops in Python: usable again",
        LOOP,
        "interrupt",
        "from the interrupt until the next collective is done",
        interrupt=0.4,
    ),
    Fault(
        "a rank is killed with SIGKILL: usable again",
        "import os, signal\n"
        f"if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n{WAIT_FOR_RANK_1}",
        "died",
        "from the start of the cell in which it dies until the next collective, with "
        "rank 1 started afresh, is done",
        lost=RANK_1,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """One run of a fault: seconds to the end of its cell and of the next; state."""

    returned: float
    usable: float
    kept: bool


def cause_fault(kernel: Kernel, fault: Fault) -> Outcome:
    """Cause it once, run a collective, and see which ranks still have their mark.

    Raises:
        RuntimeError: the fault had another effect than it should, or the next
            collective failed.
    """
    since = time.perf_counter()
    cell = kernel.send(f"%%ranks {fault.options}\n{fault.code}")
    if fault.interrupt is not None:
        time.sleep(fault.interrupt)
        since = time.perf_counter()
        kernel.interrupt()
    reply = kernel.receive(cell)
    returned = time.perf_counter() - since
    kernel.run_well(COLLECTIVE)
    usable = time.perf_counter() - since
    cause = None if reply.ok else kernel.value(CAUSE)
    if cause != fault.cause:
        raise RuntimeError(
            f"{fault.row}: expected the cause {fault.cause!r}, got {cause!r}\n"
            f"{reply.text}"
        )
    marks = kernel.value(MARKS)
    kept = all(marks[rank] == 100 + rank for rank in set(range(N)) - fault.lost)
    kernel.run_well(MARK)
    return Outcome(returned - fault.wait, usable - fault.wait, kept)


def fault_rows(kernel: Kernel, faults: tuple[Fault, ...]) -> Iterator[Row]:
    """Cause all faults in turn, round after round; then one row each."""
    outcomes: dict[str, list[Outcome]] = {fault.row: [] for fault in faults}
    for round_ in range(max(fault.rounds for fault in faults)):
        for fault in faults:
            if round_ < fault.rounds:
                outcomes[fault.row].append(cause_fault(kernel, fault))
    for fault in faults:
        found = outcomes[fault.row]
        values = [o.returned if fault.returned else o.usable for o in found]
        detail: dict[str, float] = {"low": min(values), "high": max(values)}
        if fault.returned:
            detail["usable_seconds"] = statistics.median(o.usable for o in found)
        yield median_row(
            f"{fault.row}, {N} ranks",
            values,
            "s",
            fault.goal,
            fault.note,
            conditions={"state_kept": all(o.kept for o in found)},
            detail=detail,
        )
