"""Tests whose body runs on ranks.

    @on_ranks(2, 3)
    def test_the_sum():
        ...  # runs on each of 2 ranks, then on each of 3

An assertion that fails on a rank ends the test with the rank's own message.
"""

from collections.abc import Callable
from typing import Any

import pytest
from thorough import thorough_after

from course_utils.ranks import Ranks


def on_ranks(*numbers: Any) -> Callable[[Callable[[], None]], Callable]:
    """A test: what is below runs on so many ranks, and then on so many."""

    def as_test(body: Callable[[], None]) -> Callable:
        @pytest.mark.parametrize("n", numbers)
        def test(started: dict[int, Ranks], n: int) -> None:
            started[n].run(body)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return as_test


SEVERAL = thorough_after(2, [3, 4, 1, 2])
several = on_ranks(*SEVERAL)
