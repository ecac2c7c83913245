"""Lessons: the memory at the peak of each, which ``doctor`` states.

A lesson runs from its first cell to its last in a kernel of its own. Memory is that of
the kernel and of all that it has started: what several processes share counts once
(the proportional set size, on Linux).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil

from course_utils.notebook.lessons import LESSONS, Lesson
from tests.benchmarks._harness import Row
from tests.benchmarks._kernel import ROOT, Kernel, code_cells, memory_of

SAMPLE_SECONDS = 0.05


class Peak(threading.Thread):
    """Looks at the memory of a process and of its descendants, until it is told."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.nbytes, self.processes = 0, 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(SAMPLE_SECONDS):
            held = []
            for process in [self.root, *self.root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it has just ended
                    held.append(memory_of(process.pid))
            if sum(held) > self.nbytes:
                self.nbytes, self.processes = sum(held), len(held)

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.done.set()
        self.join()


def rows(quick: bool = False) -> Iterator[Row]:
    """A row for each notebook of each lesson, about six minutes in all."""
    for lesson in LESSONS[: 1 if quick else None]:
        yield row_of(lesson, "", code_cells(lesson.notebook)[: 1 if quick else None])
        if lesson.in_depth.exists():
            yield row_of(lesson, ", in depth", code_cells(lesson.in_depth))


def row_of(lesson: Lesson, which: str, cells: list[str]) -> Row:
    """Run these cells; the goal is what ``doctor`` says of the lesson."""
    with Kernel() as kernel:
        kernel.run_well(f"import os; os.chdir({str(ROOT / 'notebooks')!r})")
        with Peak(kernel.pid) as peak:
            for cell in cells:
                kernel.run(cell)  # some fail on purpose
    return Row(
        f"memory at the peak of lesson {lesson.number}{which}",
        round(peak.nbytes / 1e9, 1),
        "GB",
        None,
        lesson.memory,
        1,
        detail={"cells": len(cells), "processes": peak.processes},
    )
