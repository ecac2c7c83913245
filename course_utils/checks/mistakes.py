"""Tests for the ``when`` of a mistake: what did the attempt get wrong, or say?

A report is a dict of results with names, such as {"sum": ..., "bytes sent": ...}. Its
parts are in order: what comes first explains what comes later.
"""

from __future__ import annotations

from collections.abc import Callable

from course_utils.checks.task import Attempt
from course_utils.notebook.compare import difference

Test = Callable[[Attempt], bool]


def says(*texts: str) -> Test:
    """Does the error say one of these?"""
    return lambda attempt: any(text in attempt.message for text in texts)


def out_of_step(attempt: Attempt) -> bool:
    """Did the ranks not all call the same collectives, or did one wait for nobody?"""
    return attempt.error in ("waiting", "CollectiveMismatch")


def is_wrong(part: str) -> Test:
    """Is this part of the report wrong, whatever the others are?"""
    return lambda attempt: (
        difference(attempt.got[part], attempt.expected[part], 1e-5) is not None
    )


def first_wrong(attempt: Attempt) -> str:
    """The first part of the report that is not as it should be; "" if there is none."""
    return next((part for part in attempt.expected if is_wrong(part)(attempt)), "")


def wrong_in(beginning: str) -> Test:
    """Is the first wrong part one whose name begins like this?"""
    return lambda attempt: first_wrong(attempt).startswith(beginning)


def is_rounded(attempt: Attempt) -> bool:
    """Is it right but for the digits behind the point? One number, or several."""
    want, got = attempt.expected, attempt.got
    if not isinstance(want, (list, tuple)):
        want, got = [want], [got]
    rounded = ([round(number, digits) for number in want] for digits in range(13))
    return any(list(got) == some != list(want) for some in rounded)


def right_but(part: str) -> Test:
    """Are all parts of the report before this one right, and this one wrong?"""
    return lambda attempt: first_wrong(attempt) == part
