"""How long a learner waits for a check of a right answer, over all tasks.

Each lesson's solved exercise runs in a kernel of its own, cell by cell, as a learner
would run it. Its check cells run again and again, and each is timed from outside: from
sending the cell until the kernel is idle.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from course_utils.lessons import LESSONS
from tests.benchmarks._harness import Row, to_itself
from tests.benchmarks._kernel import Kernel, code_cells

ROUNDS = 5
MEDIAN_GOAL, P95_GOAL = 1.0, 2.0


def rows() -> Iterator[Row]:
    """Two rows, about 5 seconds of work for each task."""
    first: list[float] = []
    rounds: dict[str, list[float]] = {}
    for lesson in (lesson for lesson in LESSONS if lesson.tasks):
        with Kernel() as kernel:
            paid, timed = time_checks(kernel, code_cells(lesson.solution), ROUNDS)
        first.append(paid)
        rounds |= timed
    yield from summary(first, rounds)


def time_checks(
    kernel: Kernel, cells: Sequence[str], rounds: int
) -> tuple[float, dict[str, list[float]]]:
    """Run the cells; time each check cell ``rounds`` times.

    Returns:
        The seconds of the very first check, which also starts what all checks share
        (it imports torch, twice), and those of the others by the cell's source.

    Raises:
        RuntimeError: a cell failed, or a check found a reference answer not right.
    """
    first, timed = 0.0, {}
    for cell in cells:
        if not cell.startswith("check("):
            kernel.run_well(cell)
            continue
        if not first:
            first = check(kernel, cell)
        timed[cell] = [check(kernel, cell) for _ in range(rounds)]
    return first, timed


def check(kernel: Kernel, cell: str) -> float:
    """The seconds of one check cell, which must find the answer right."""
    reply = kernel.run_well(cell)
    if ": passed\n" not in reply.text:
        raise RuntimeError(f"{cell} did not pass:\n{reply.text}")
    return reply.seconds


def summary(first: Sequence[float], timed: dict[str, list[float]]) -> Iterator[Row]:
    """The median and the 95th percentile over all runs of all check cells."""
    every = [seconds for runs in timed.values() for seconds in runs]
    passes = [statistics.median(runs) for runs in zip(*timed.values(), strict=True)]
    slowest = max(timed, key=lambda cell: statistics.median(timed[cell]))
    detail = {
        "tasks": len(timed),
        "first_check_seconds": statistics.median(first),
        "slowest": slowest,
        "slowest_seconds": statistics.median(timed[slowest]),
    }
    for name, ratio, goal in (
        ("median", statistics.median(every), MEDIAN_GOAL),
        ("p95", statistics.quantiles(every, n=20)[-1], P95_GOAL),
    ):
        yield Row(
            row=f"any check cell, right answer, {name}",
            ratio=ratio,
            unit="s",
            aa=to_itself(passes),
            goal=goal,
            samples=len(every),
            note="after the first check of a kernel, which imports torch; aa is the "
            "median over the tasks, round over round",
            detail=detail,
        )
