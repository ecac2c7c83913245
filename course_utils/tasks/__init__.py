"""What learners build: the tasks of each lesson, in ``lesson_NN.py``.

``task.py`` has the words in which a task is written down. What checks have in common to
look at is in the other files: small inputs, virtual GPUs, messages, requests, memory,
and what FSDP gathers and sends (``sharding.py``).
"""

from __future__ import annotations

import importlib
import importlib.util

from course_utils.lessons import LESSONS


def tasks_of(number: str) -> tuple:
    """The tasks of a lesson ("00"), in the order of its notebook."""
    name = f"{__name__}.lesson_{number}"
    if importlib.util.find_spec(name) is None:
        return ()
    return importlib.import_module(name).TASKS


def all_tasks() -> tuple:
    """The tasks of the whole course."""
    return tuple(task for lesson in LESSONS for task in tasks_of(lesson.number))
