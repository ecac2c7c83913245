"""Ranks that all tests of the instruments share."""

import pytest
from shared_ranks import Started, by_value, started  # noqa: F401

from course_utils.ranks import Ranks


@pytest.fixture
def four(started: Started) -> Ranks:  # noqa: F811
    return started[4]
