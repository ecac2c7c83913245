"""Tests and cases that run only with ``--all``, or where their file is named.

``@pytest.mark.thorough`` marks a test, ``thorough_after`` the cases of one. What is
marked shows once more, in another way, what an unmarked test shows: a save that is
killed in a fourth place, the ninth wrong answer to a task, a rank that hangs in yet
another call.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def thorough_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of ``parametrize``: the first `count` run always, the others do not."""
    always, others = (cases := list(cases))[:count], cases[count:]
    rows = (case if isinstance(case, tuple) else (case,) for case in others)
    return always + [pytest.param(*row, marks=pytest.mark.thorough) for row in rows]
