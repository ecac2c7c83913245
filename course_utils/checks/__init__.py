"""Check the learner's code, give hints, show solutions.

In a notebook::

    from course_utils import check, hint, solution

    check("00.average", average)     # runs it on real ranks and says what it found
    hint("00.average")               # a nudge; again: the idea; again: the code's shape
    solution("00.average")           # after an honest attempt

The tasks of a lesson are in ``lesson_NN.py``, in the words of ``task.py``. A task says
where its code runs, with which inputs, what must come out, and which mistakes are
typical. The rest is the same for all:

* ``runner.py`` runs the answer and finds the words for what came of it,
* ``on_rank.py`` is the part of it that runs on the ranks,
* ``learner_code.py`` reads the answer's source and packs it for the ranks,
* ``devices.py`` gives it virtual GPUs, where a task is about devices,
* ``compare.py`` compares results and shows them short.

The answer runs in processes of its own: an endless loop, a deadlock or a crash in it
cannot harm the notebook. What is right is worked out here, out of its reach. The text
and the explanation of a solution come from ``solutions/NN_*.ipynb``.

Every right way is right: where a task wants a number, ``3``, ``3.0``, ``tensor(3)``, a
number of NumPy's and a Fraction will do (unless it says that a Python number is wanted,
or wants an index or a count, which no float is); for a list, a tuple, or a tensor or
array of one dimension. Where it wants a tensor, shape and dtype must be as the task
says; values may differ by the task's tolerance. What an answer may call is the same
everywhere: ``task.RULE``.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import Any

from course_utils.checks.task import RULE, Outcome, Task, wrap
from course_utils.lessons import LESSONS, lesson_of

__all__ = [
    *("all_tasks", "check", "find_task", "hint", "run_check", "solution", "tasks_of"),
    *("Outcome", "Task"),
]

# Hints that this kernel has shown. A new kernel begins again at the first one.
_hints_shown: dict[str, int] = {}


def check(task_id: str, answer: Any = ...) -> None:
    """Run the check of a task, print what it found, and note it in the progress.

    Args:
        task_id: for example "00.average".
        answer: the learner's function or class itself, or the value of ``answer``.

    Raises:
        ValueError: there is no such task.
    """
    from course_utils.progress import record_attempt

    outcome = run_check(task_id, answer)
    record_attempt(task_id, outcome.status)
    print(outcome)


def run_check(task_id: str, answer: Any) -> Outcome:
    """Like :func:`check`, but prints and records nothing.

    Cost: about half a second for a right answer on 1, 2, 3 and 4 ranks; a deadlock is
    named after two to three.

    Raises:
        ValueError: there is no such task.
    """
    task = find_task(task_id)
    from course_utils.checks.runner import run_task  # here, because it imports torch

    return run_task(task, answer)


def hint(task_id: str) -> None:
    """Print the next hint of a task; each call tells a little more.

    Raises:
        ValueError: there is no such task.
    """
    from course_utils.progress import record_hint

    task = find_task(task_id)
    number = _hints_shown.get(task_id, 0) + 1
    if number > len(task.hints):
        print(
            "There are no more hints. After a check of your own code, see the "
            f'solution: solution("{task_id}")'
        )
        return
    _hints_shown[task_id] = number
    record_hint(task_id, number)
    print(f"Hint {number} of {len(task.hints)} for {task_id}")
    print(wrap(task.hints[number - 1]))
    if number == 1 and task.where != "value":
        print(wrap(RULE))


def solution(task_id: str, force: bool = False) -> None:
    """Print our code for a task, and why it is so.

    It is shown after an honest attempt, that is, after a check that found anything
    but "not attempted".

    Args:
        task_id: for example "00.average".
        force: show it in any case.

    Raises:
        ValueError: there is no such task.
    """
    from course_utils.exercises import reference
    from course_utils.progress import attempts, record_solution

    find_task(task_id)
    if not force and not attempts().get(task_id, {}).get("tries"):
        print(
            f"Try it first: you learn most from a mistake of your own. "
            f'A hint: hint("{task_id}")\n'
            f'To see the solution all the same: solution("{task_id}", force=True)'
        )
        return
    try:
        ours = reference(task_id)
    except (OSError, LookupError) as error:
        print(f"The solution of {task_id} cannot be shown: {error}")
        return
    record_solution(task_id)
    code = "\n".join(f"    {line}".rstrip() for line in ours.code.splitlines())
    print(f"Our solution of {task_id}\n\n{code}\n\nWhy\n{wrap(ours.why)}")


def find_task(task_id: str) -> Task:
    """The task of that id.

    Raises:
        TypeError: the id is not text, as in ``check(average)``.
        ValueError: there is none; the message names similar ones.
    """
    if not isinstance(task_id, str):
        name = getattr(task_id, "__name__", "my_function")
        raise TypeError(
            "A task is named by its id in quotes, as in "
            f'check("00.average", {name}) or hint("00.average"), not by {task_id!r}.'
        )
    if "." not in task_id:
        for task in all_tasks():
            if task.id.endswith(f".{task_id}"):
                raise ValueError(
                    f"There is no task {task_id!r}. Did you mean {task.id!r}?"
                )
    tasks = {task.id: task for task in tasks_of(lesson_of(task_id).number)}
    if task_id in tasks:
        return tasks[task_id]
    similar = difflib.get_close_matches(task_id, tasks, n=1)
    meant = f" Did you mean {similar[0]!r}?" if similar else ""
    names = ", ".join(tasks) or "none yet"
    raise ValueError(
        f"There is no task {task_id!r}.{meant} Tasks of this lesson: {names}."
    )


def tasks_of(number: str) -> tuple[Task, ...]:
    """The tasks of a lesson ("00"), in the order of its notebook."""
    name = f"course_utils.checks.lesson_{number}"
    if importlib.util.find_spec(name) is None:
        return ()
    return importlib.import_module(name).TASKS


def all_tasks() -> tuple[Task, ...]:
    """The tasks of the whole course."""
    return tuple(task for lesson in LESSONS for task in tasks_of(lesson.number))
