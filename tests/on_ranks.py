"""Tests whose body runs on ranks that all tests of a module share.

    started = shared_ranks(4, timeout=60)

    @on_ranks(2, 3)
    def test_the_sum():
        ...  # runs on each of 2 ranks, then on each of 3

An assertion that fails on a rank ends the test with the rank's own message.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ranks_support import ranks_up_to

from course_utils.ranks import Ranks


def shared_ranks(most: int, timeout: float, *, optimizers: bool = False) -> Any:
    """The fixture `started`: 1, 2, ... `most` ranks by their number."""

    @pytest.fixture(scope="module")
    def started() -> Iterator[dict[int, Ranks]]:
        with ranks_up_to(most, timeout, optimizers=optimizers) as ranks:
            yield ranks

    return started


def on_ranks(*numbers: Any) -> Callable[[Callable[[], None]], Callable]:
    """A test: what is below runs on so many ranks, and then on so many."""

    def as_test(body: Callable[[], None]) -> Callable:
        @pytest.mark.parametrize("n", numbers)
        def test(started: dict[int, Ranks], n: int) -> None:
            started[n].run(body)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return as_test
