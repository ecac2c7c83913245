"""Tasks for tests, with a solution of their own in place of a notebook's."""

import textwrap
from typing import Any

import pytest

from course_utils.notebook import ours
from course_utils.notebook.exercises import Reference
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.task import Task

TOTAL = """\
import torch
import torch.distributed as dist

def total(tensor):
    result = tensor.clone()
    dist.all_reduce(result)
    return result
"""
SOLVED: dict[str, Reference] = {}
of_the_notebook = ours.solved


def solved(task_id: str) -> Reference:
    """The solution of a test's task, or that in the notebook."""
    return SOLVED.get(task_id) or of_the_notebook(task_id)


@pytest.fixture(autouse=True)
def own_solutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import this fixture where tasks of these are checked."""
    monkeypatch.setattr(ours, "solved", solved)


def own_task(name: str, solution: str, task_id: str = "", **fields: Any) -> Task:
    """A task ``99.NAME``, whose right answer is the function NAME of `solution`.

    With the same name again it is ``99.NAME1``, and so on, if no id is given.
    """
    number = sum(known.startswith(f"99.{name}") for known in SOLVED)
    task_id = task_id or f"99.{name}{number or ''}"
    SOLVED[task_id] = Reference(name, textwrap.dedent(solution))
    settings = {"title": name, "stars": 1, "hints": ("a", "b", "c")}
    return Task(id=task_id, **settings | fields)


def total_task(solution: str = TOTAL, **fields: Any) -> Task:
    """On two ranks: the sum of a tensor over the ranks; or what `solution` says."""
    settings = {
        "ranks": (2,),
        "cases": ((2,),),
        "inputs": lambda shape, rank, world_size: (whole_numbers(shape, rank),),
    }
    return own_task("total", solution, **settings | fields)


def here(solution: str, *cases: tuple, **fields: Any) -> Task:
    """A task for a plain function, which is called `answer` in `solution`."""
    return own_task("answer", solution, where="here", cases=cases, **fields)
