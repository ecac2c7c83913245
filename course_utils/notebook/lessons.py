"""The map of the course: its lessons, in order, and where their notebooks are.

Everything that needs a lesson's number, title or files asks here. Standard library
only, so that the command line works before anything is installed.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import course_utils


@dataclass(frozen=True)
class Lesson:
    """One lesson of the course.

    Attributes:
        slug: The name of its notebooks, without ".ipynb". It begins with the number.
        title: Its name for a reader.
        memory: GB at its peak, with its ranks and scripts, also of its notebook in
            depth: tests/benchmarks/memory.py measures it, on Linux.
    """

    slug: str
    title: str
    memory: float

    @property
    def number(self) -> str:
        """Two digits, such as "08". Ids of tasks and questions begin with it."""
        return self.slug.partition("_")[0]

    @property
    def notebook(self) -> Path:
        """The lesson itself."""
        return course_utils.ROOT / "notebooks" / f"{self.slug}.ipynb"

    @property
    def in_depth(self) -> Path:
        """What goes beyond the lesson, if there is such a notebook."""
        return course_utils.ROOT / "notebooks" / f"{self.slug}_in_depth.ipynb"

    @property
    def exercise(self) -> Path:
        """The tasks to solve."""
        return course_utils.ROOT / "exercises" / f"ex_{self.slug}.ipynb"

    @property
    def solution(self) -> Path:
        """The tasks solved: the file that the exercise is made from."""
        return course_utils.ROOT / "solutions" / f"{self.slug}.ipynb"

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Ids of its tasks, in the order of its notebook; () without one.

        A cell that belongs to a task carries the task's id as a tag. The solution is
        read, not the exercise: the exercise is the learner's to change.
        """
        try:
            cells = json.loads(self.solution.read_text(encoding="utf-8"))["cells"]
        except (OSError, ValueError, KeyError):
            return ()
        tags = [tag for cell in cells for tag in cell["metadata"].get("tags", ())]
        ids = (tag for tag in tags if tag.startswith(f"{self.number}."))
        return tuple(dict.fromkeys(ids))


LESSONS: tuple[Lesson, ...] = (
    Lesson("00_start_here", "Start here", 1.5),
    Lesson("01_gpus_nodes_and_ranks", "GPUs, nodes and ranks", 1.2),
    Lesson("02_model_parallel", "Model parallel", 2.0),
    Lesson("03_data_parallel_primitives", "Data-parallel primitives", 1.4),
    Lesson("04_processes_and_collectives", "Processes and collectives", 2.3),
    Lesson("05_distributed_sgd", "Distributed SGD by hand", 1.9),
    Lesson("06_ddp", "DDP", 2.6),
    Lesson("07_ring_all_reduce", "Ring all-reduce", 1.8),
    Lesson("08_fsdp", "FSDP", 2.4),
    Lesson("09_tensor_parallel", "Tensor parallel", 2.3),
    Lesson("10_pipeline_schedules", "Pipeline schedules", 2.0),
    Lesson("11_meshes", "Meshes", 1.9),
    Lesson("12_the_clinic", "The clinic", 1.8),
)


def lesson_of(name: str) -> Lesson:
    """The lesson that a number ("03") or an id of a task or question belongs to.

    Raises:
        ValueError: there is no such lesson.
    """
    number = name.partition(".")[0]
    for lesson in LESSONS:
        if lesson.number == number:
            return lesson
    numbers = ", ".join(lesson.number for lesson in LESSONS)
    raise ValueError(f"There is no lesson {number!r}. The lessons are {numbers}.")
