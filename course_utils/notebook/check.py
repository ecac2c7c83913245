"""Check the learner's code, give hints, show solutions.

In a notebook::

    from course_utils import check, hint, solution

    check("00.average", average)     # runs it on real ranks and says what it found
    hint("00.average")               # a nudge; again: the idea; again: the code's shape
    solution("00.average")           # after an honest attempt

The tasks of a lesson are in ``tasks/lesson_NN.py``, in the words of ``tasks/task.py``.
``beside.py`` runs the answer and our solution, and compares what is observed. It packs
them by ``answer.py`` and ``ours.py``, and has ``processes.py`` for them, with
``on_rank.py`` on each rank. ``judge.py`` says what came of it: with the words of the
near miss that shows the same, of the task, or of ``diagnosis.py``.

The answer runs in processes of its own: an endless loop, a deadlock or a crash in it
cannot harm the notebook. What is right is worked out here, out of its reach.

Every right way is right: for a number, ``3``, ``3.0`` and ``tensor(3)`` will do; for a
list, a tuple, or a tensor or array of one dimension. A tensor's shape and dtype count.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from course_utils.notebook.lessons import lesson_of
from course_utils.notebook.outcome import Outcome, colours_are_shown, wrap
from course_utils.questions import AnswerError, NumberTask
from course_utils.tasks import all_tasks, tasks_of
from course_utils.tasks.task import Task

__all__ = ["Outcome", "check", "find_task", "hint", "run_check", "solution"]

# Hints that this kernel has shown. A new kernel begins again at the first one.
_hints_shown: dict[str, int] = {}


def check(task_id: str, answer: Any = ...) -> None:
    """Run the check of a task, print what it found, and note it in the progress.

    Args:
        task_id: for example "00.average".
        answer: the learner's function or class itself; or the number that is asked for.

    Raises:
        ValueError: there is no such task.
    """
    from course_utils.notebook.progress import record_attempt

    outcome = run_check(task_id, answer)
    record_attempt(task_id, outcome.status)
    print(outcome.text(coloured=colours_are_shown()))


def run_check(task_id: str, answer: Any) -> Outcome:
    """Like :func:`check`, but prints and records nothing.

    It takes half a second for a right answer on 1, 2, 3 and 4 ranks.

    Raises:
        ValueError: there is no such task.
    """
    task = find_task(task_id)
    if isinstance(task, NumberTask):
        return _check_number(task, answer)
    from course_utils.notebook.judge import run_task  # here: it imports torch

    return run_task(task, answer)


def _check_number(task: NumberTask, answer: Any) -> Outcome:
    """Judge a number as the form of ``quiz`` does."""
    hint = f'A hint: hint("{task.id}")'
    if answer is None or answer is ...:
        return Outcome(task, "not attempted", (f'Answer quiz("{task.id}").', hint))
    try:
        number = task.read(answer.item() if hasattr(answer, "item") else answer)
    except AnswerError as error:
        return Outcome(task, "wrong", (str(error), hint))
    feedback = task.grade(number)
    if feedback.right:
        return Outcome(task, "passed", (feedback.text,))
    return Outcome(task, "wrong", (feedback.text, hint))


def hint(task_id: str) -> None:
    """Print the next hint of a task; each call tells a little more.

    Raises:
        ValueError: there is no such task.
    """
    from course_utils.notebook.progress import record_hint

    task = find_task(task_id)
    number = _hints_shown.get(task_id, 0) + 1
    if number > len(task.hints):
        print(
            "There are no more hints. After an answer of your own, see the "
            f'solution: solution("{task_id}")'
        )
        return
    _hints_shown[task_id] = number
    record_hint(task_id, number)
    print(f"Hint {number} of {len(task.hints)} for {task_id}")
    print(wrap(task.hints[number - 1]))


def solution(task_id: str, force: bool = False) -> None:
    """Print our code for a task, and why it is so.

    Args:
        task_id: for example "00.average".
        force: show it also before a check that found more than "not attempted".

    Raises:
        ValueError: there is no such task.
    """
    from course_utils.notebook.exercises import reference
    from course_utils.notebook.progress import attempts, record_solution

    find_task(task_id)
    if not force and not attempts().get(task_id, {}).get("tries"):
        print(
            "Try it first: you learn most from a mistake of your own.\n"
            f'A hint: hint("{task_id}")\n'
            f'The solution all the same: solution("{task_id}", force=True)'
        )
        return
    try:
        ours = reference(task_id)
    except (OSError, LookupError) as error:
        print(f"The solution of {task_id} cannot be shown: {error}")
        return
    record_solution(task_id)
    code = "\n".join(f"    {line}".rstrip() for line in ours.code.splitlines())
    # Text has no bold face and no formulas. In code, "**" is a power.
    parts = re.split(r"(`[^`]*`)", ours.why)
    why = "".join(p if p[:1] == "`" else re.sub(r"\*\*|\$", "", p) for p in parts)
    print(f"Our solution of {task_id}\n\n{code}\n\nWhy\n{wrap(why)}")


def find_task(task_id: str) -> Task | NumberTask:
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
        for known in (task.id for task in all_tasks()):
            if known.endswith(f".{task_id}"):
                meant = f"Did you mean {known!r}?"
                raise ValueError(f"There is no task {task_id!r}. {meant}")
    tasks = {task.id: task for task in tasks_of(lesson_of(task_id).number)}
    if task_id in tasks:
        return tasks[task_id]
    similar = difflib.get_close_matches(task_id, tasks, n=1)
    meant = f" Did you mean {similar[0]!r}?" if similar else ""
    names = f"Tasks of this lesson: {', '.join(tasks)}."
    raise ValueError(f"There is no task {task_id!r}.{meant} {names}")
