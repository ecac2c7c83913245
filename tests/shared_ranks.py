"""Ranks that all tests of a folder share, and tests whose body runs on them.

In the folder's `conftest.py`::

    from shared_ranks import by_value, started

In a test::

    @on_ranks(2, 3)
    def test_the_sum():
        ...  # runs on each of 2 ranks, then on each of 3

An assertion that fails on a rank ends the test with the rank's own message.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from ranks_support import settle
from thorough import thorough_after

from course_utils.ranks import Ranks


class Started(dict[int, Ranks]):
    """1, 2, ... ranks by their number; they start when a test asks for them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self.stack = stack

    def __missing__(self, n: int) -> Ranks:
        ranks = Ranks(n, output="grouped", quiet=True, timeout=60)
        self[n] = self.stack.enter_context(ranks)
        return self[n]


@pytest.fixture(scope="package")
def started() -> Iterator[Started]:
    with contextlib.ExitStack() as stack:
        found = Started(stack)
        # Each rank would import for a second at its first optimizer, if the helper
        # process had not done it for all that are forked later.
        settle(found[1])
        yield found


@pytest.fixture(scope="module", autouse=True)
def by_value(request: pytest.FixtureRequest) -> None:
    """The ranks get what a test defines as it is, and need not import its file."""
    cloudpickle.register_pickle_by_value(request.module)


def on_ranks(*numbers: Any) -> Callable[[Callable[[], None]], Callable]:
    """A test: what is below runs on so many ranks, and then on so many."""

    def as_test(body: Callable[[], None]) -> Callable:
        @pytest.mark.parametrize("n", numbers)
        def test(started: Started, n: int) -> None:
            started[n].run(body)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return as_test


# 3 ranks must pad, take turns and count in a circle: 2 and 4 can hide a mistake.
SEVERAL = thorough_after(1, [3, 4, 1, 2])
several = on_ranks(*SEVERAL)
