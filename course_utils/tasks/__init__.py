"""What learners build: the tasks of each lesson, in ``lesson_NN.py``.

``task.py`` has the words in which a task is written down. What checks have in common to
look at is in the other files: small inputs, virtual GPUs, messages, requests, memory,
and what FSDP gathers and sends (``sharding.py``).
"""

from __future__ import annotations

import importlib
import pkgutil


def tasks_of(number: str) -> tuple:
    """The tasks of a lesson ("00"), in the order of its notebook."""
    if f"lesson_{number}" not in _lessons():
        return ()
    return importlib.import_module(f"{__name__}.lesson_{number}").TASKS


def all_tasks() -> tuple:
    """The tasks of the whole course."""
    numbers = (name.removeprefix("lesson_") for name in _lessons())
    return tuple(task for number in numbers for task in tasks_of(number))


def _lessons() -> list[str]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [name for name in names if name.startswith("lesson_")]
