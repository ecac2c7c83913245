"""How long a learner waits for a check, over all tasks.

Right answers: each lesson's solved exercise runs in a kernel of its own, cell by cell,
as a learner would run it. Its check cells run again and again, and each is timed from
outside: from sending the cell until the kernel is idle.

Wrong answers: each near miss of each task is handed in twice. At the first one of a
task, what our solution and its near misses show is not remembered yet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import cloudpickle

from course_utils.notebook import beside, judge, ours
from course_utils.notebook.lessons import LESSONS
from course_utils.tasks import all_tasks
from course_utils.tasks.task import Miss, Task
from tests.benchmarks._harness import Row, to_itself
from tests.benchmarks._kernel import Kernel, code_cells

ROUNDS = 5
MEDIAN_GOAL, P95_GOAL, FIRST_WRONG_GOAL = 1.0, 2.0, 3.0


def rows(quick: bool = False) -> Iterator[Row]:
    """Four rows, about 10 seconds of work for each task."""
    first: list[float] = []
    rounds: dict[str, list[float]] = {}
    lessons = [lesson for lesson in LESSONS if lesson.tasks]
    for lesson in lessons[:1] if quick else lessons:
        with Kernel() as kernel:
            paid, timed = time_checks(
                kernel, code_cells(lesson.solution), 1 if quick else ROUNDS
            )
        first.append(paid)
        rounds |= timed
    yield from summary(first, rounds)
    yield from wrong_answers(all_tasks()[:2] if quick else all_tasks())


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
    if ": passed" not in reply.text:
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


def wrong_answers(tasks: Sequence[object]) -> Iterator[Row]:
    """How long a wrong answer waits: the first of its task, and a later one."""
    first, later = [], []
    for task in tasks:
        for miss in task.misses if isinstance(task, Task) else ():
            beside.seen_before.clear()
            first.append(seconds_of(task, miss))
            later.append(seconds_of(task, miss))
    for name, taken, goal in (
        ("first wrong answer of a task", first, FIRST_WRONG_GOAL),
        ("later wrong answer", later, P95_GOAL),
    ):
        halves = [statistics.median(taken[::2]), statistics.median(taken[1::2])]
        yield Row(
            row=f"{name}, p95",
            ratio=statistics.quantiles(taken, n=20)[-1],
            unit="s",
            aa=to_itself(halves),
            goal=goal,
            samples=len(taken),
            note="each near miss of each task; aa is the median over every second one",
            detail={"median": statistics.median(taken), "max": max(taken)},
        )


def seconds_of(task: Task, miss: Miss) -> float:
    """The seconds of a check that finds this near miss."""
    answer = cloudpickle.loads(ours.packed(task, miss))
    start = time.perf_counter()
    outcome = judge.run_task(task, answer)
    if outcome.passed:
        raise RuntimeError(f"{task.id}: {miss.new!r} passed")
    return time.perf_counter() - start
