"""Ranks that all tests of this folder share."""

import contextlib
from collections.abc import Iterator

import cloudpickle
import pytest
from ranks_support import settle

from course_utils.ranks import Ranks

from . import fsdp_jobs, reductions
from .on_ranks import SEVERAL

# The ranks get what is defined in the tests as it is, and need not import the files.
for module in (fsdp_jobs, reductions):
    cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="module", autouse=True)
def by_value(request: pytest.FixtureRequest) -> None:
    cloudpickle.register_pickle_by_value(request.module)


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
        found[1].restart()
        yield found


@pytest.fixture(params=SEVERAL)
def ranks(request: pytest.FixtureRequest, started: Started) -> Ranks:
    return started[request.param]
