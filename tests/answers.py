"""Wrong and right answers to the tasks of a lesson, kept as tests of its checks.

A module ``test_lesson_NN_answers.py`` makes one :class:`Answers`, fills it by its
decorators, and runs it::

    ANSWERS = Answers()

    @ANSWERS.wrong("00.average", "wrong", "That is the sum over the ranks.")
    def forgot_to_divide(tensor): ...

    @ANSWERS.right("00.average")
    def divide_first(tensor): ...

A run without ``--all`` tries the first answers of each task, right and wrong, and those
that the guide quotes.

The instructor guide quotes what a check says to frequent mistakes. The answer that
makes such a mistake names it, in the guide's words: ``did="returned the sum"``.

    test_wrong, test_right = ANSWERS.tests()
"""

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from course_utils.environment import ROOT
from course_utils.notebook.check import run_check

# Answers to each task that are tried also without --all.
FIRST_WRONG, FIRST_RIGHT = 3, 2


class Answers:
    """What learners may hand in, and what they must be told."""

    def __init__(self) -> None:
        self._wrong: list[tuple[str, Any, str, dict[str, str]]] = []
        self._did: dict[tuple[str, int], str] = {}
        self._right: list[tuple[str, Any]] = []

    def wrong(
        self, task_id: str, status: str, says: str, did: str = "", **otherwise: str
    ) -> Callable[[Any], Any]:
        """Decorate an answer that must be rejected with this status and words.

        With `did`, it must be rejected with the words of that row of the guide, too.

        Where it is chance how it fails, `otherwise` has the words for other statuses,
        such as `wrong="Wait for every request"`.
        """

        def add(answer: Any) -> Any:
            words = {status: says, **otherwise}
            self._wrong.append((task_id, answer, status, words))
            if did:
                self._did[task_id, id(answer)] = did
            return answer

        return add

    def right(self, task_id: str) -> Callable[[Any], Any]:
        """Decorate an answer that must be accepted."""

        def add(answer: Any) -> Any:
            self._right.append((task_id, answer))
            return answer

        return add

    def counts(self) -> tuple[Counter, Counter]:
        """How many wrong, and how many right answers there are for each task."""
        wrong = Counter(task_id for task_id, *_ in self._wrong)
        return wrong, Counter(task_id for task_id, _ in self._right)

    def in_guide(self) -> list[str]:
        """What the wrong answers did that the instructor guide tells of."""
        return list(self._did.values())

    def _marked(self, answers: list[tuple], first: int) -> list[Any]:
        """The first of each task and those in the guide; all others as thorough."""
        seen, cases = Counter(), []
        for task_id, answer, *rest in answers:
            seen[task_id] += 1
            always = seen[task_id] <= first or (task_id, id(answer)) in self._did
            marks = () if always else pytest.mark.thorough
            cases.append(pytest.param(task_id, answer, *rest, marks=marks))
        return cases

    def tests(self) -> tuple[Callable, Callable]:
        """Two test functions: one for the wrong answers, one for the right ones."""

        @pytest.mark.parametrize(
            ("task_id", "answer", "status", "words"),
            self._marked(self._wrong, FIRST_WRONG),
            ids=_name,
        )
        def test_wrong(task_id, answer, status, words):
            outcome = run_check(task_id, answer)
            text = " ".join(str(outcome).split())
            assert outcome.status in words, str(outcome)
            assert words[outcome.status] in text, str(outcome)
            did = self._did.get((task_id, id(answer)))
            for quoted in said_in_guide(task_id, did) if did else []:
                assert quoted in text, str(outcome)

        @pytest.mark.parametrize(
            ("task_id", "answer"), self._marked(self._right, FIRST_RIGHT), ids=_name
        )
        def test_right(task_id, answer):
            outcome = run_check(task_id, answer)
            assert outcome.passed, str(outcome)

        return test_wrong, test_right


@functools.cache
def said_in_guide(task_id: str, did: str) -> list[str]:
    """What the guide quotes beside "They did", in the part of this task's lesson."""
    guide = (ROOT / "notebooks" / "instructor_guide.md").read_text()
    part = guide.partition(f"\n### [{task_id[:2]} ·")[2].partition("\n### ")[0]
    row = next(line for line in part.split("\n") if line.startswith(f"| {did} | "))
    return re.findall(r'"([^"]+)"', row.split(" | ")[1])


def _name(value: Any) -> str | None:
    """Part of a test's name: only the answer's own name says anything."""
    if isinstance(value, dict):
        value = next(iter(value.values()))
    return getattr(value, "__name__", None) or str(value)[:16]
