"""Answers to the tasks of a lesson, kept as tests: odd wrong ones, and all right ones.

A module ``test_lesson_NN_answers.py`` makes one :class:`Answers`, fills it, and runs
it::

    ANSWERS = Answers()

    @ANSWERS.wrong("00.average", "wrong", "That is the sum over the ranks.")
    def forgot_to_divide(tensor): ...

    @ANSWERS.right("00.average")
    def divide_first(tensor): ...

    ANSWERS.edited(
        "00.average",
        right=[("total / n", "total.div(n)")],
        wrong=[("its dtype is float64", "tensor.clone()", "tensor.double()")],
    )

    test_wrong, test_right = ANSWERS.tests()

The shortest way to write down an answer that differs from ours in a line or two is to
say which piece of our solution is replaced, and by what.

A run without ``--all`` tries the first answers of each task, one right and one wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import pytest

from course_utils.notebook import ours
from course_utils.notebook.check import find_task, run_check
from course_utils.tasks.task import Miss

# Answers to each task that are tried also without --all. More wrong ones are the near
# misses of tests/test_tasks.py; our own right one stands in the solved notebooks.
FIRST_WRONG = FIRST_RIGHT = 1


class Edited:
    """Our solution with pieces of it replaced: ``Edited(old, new, old, new, ...)``."""

    def __init__(self, *pieces: str) -> None:
        self.misses = [
            Miss(old, new, "")
            for old, new in zip(pieces[::2], pieces[1::2], strict=True)
        ]
        self.__name__ = pieces[-1]

    def made_for(self, task_id: str) -> Any:
        """The answer, as a learner would hand it in."""
        return cloudpickle.loads(ours.packed(find_task(task_id), *self.misses))


class Answers:
    """What learners may hand in, and what they must be told."""

    def __init__(self) -> None:
        self._wrong: list[tuple[str, Any, tuple[str, str]]] = []
        self._right: list[tuple[str, Any]] = []

    def wrong(self, task_id: str, status: str, says: str) -> Callable[[Any], Any]:
        """Decorate an answer that must be rejected with this status and words."""

        def add(answer: Any) -> Any:
            self._wrong.append((task_id, answer, (status, says)))
            return answer

        return add

    def right(self, task_id: str) -> Callable[[Any], Any]:
        """Decorate an answer that must be accepted."""

        def add(answer: Any) -> Any:
            self._right.append((task_id, answer))
            return answer

        return add

    def edited(
        self, task_id: str, right: Iterable[tuple] = (), **wrong: Iterable[tuple]
    ) -> None:
        """Add answers that are our solution with pieces of it replaced.

        Args:
            task_id: of the task.
            right: what must be accepted, each as ``(old, new, old, new, ...)``.
            wrong: by status, such as ``too_slow=[...]``, what must be rejected, each as
                ``(says, old, new, old, new, ...)``.
        """
        for pieces in right:
            self.right(task_id)(Edited(*pieces))
        for status, answers in wrong.items():
            for says, *pieces in answers:
                self.wrong(task_id, status.replace("_", " "), says)(Edited(*pieces))

    def tests(self) -> tuple[Callable, Callable]:
        """Two test functions: one for the wrong answers, one for the right ones."""

        @pytest.mark.parametrize(
            ("task_id", "answer", "told"), _marked(self._wrong, FIRST_WRONG), ids=_name
        )
        def test_wrong(task_id, answer, told):
            status, says = told
            outcome = run_check(task_id, _made(task_id, answer))
            assert outcome.status == status, str(outcome)
            assert says in " ".join(str(outcome).split()), str(outcome)

        @pytest.mark.parametrize(
            ("task_id", "answer"), _marked(self._right, FIRST_RIGHT), ids=_name
        )
        def test_right(task_id, answer):
            outcome = run_check(task_id, _made(task_id, answer))
            assert outcome.passed, str(outcome)

        return test_wrong, test_right


def _marked(answers: list[tuple], first: int) -> list[Any]:
    """The first of each task as they are, all others as thorough."""
    seen, cases = Counter(), []
    for task_id, *rest in answers:
        seen[task_id] += 1
        marks = () if seen[task_id] <= first else pytest.mark.thorough
        cases.append(pytest.param(task_id, *rest, marks=marks))
    return cases


def _made(task_id: str, answer: Any) -> Any:
    return answer.made_for(task_id) if isinstance(answer, Edited) else answer


def _name(value: Any) -> str:
    """Part of a test's name: what distinguishes an answer is its own name."""
    if isinstance(value, tuple):
        value, _ = value
    return getattr(value, "__name__", None) or str(value)[:16]
