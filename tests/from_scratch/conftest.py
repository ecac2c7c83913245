"""Ranks that all tests of the references share."""

import cloudpickle
import pytest
from shared_ranks import SEVERAL, Started, by_value, started  # noqa: F401

from course_utils.ranks import Ranks

from . import fsdp_jobs, reductions

for module in (fsdp_jobs, reductions):  # see `by_value`
    cloudpickle.register_pickle_by_value(module)


@pytest.fixture(params=SEVERAL)
def ranks(request: pytest.FixtureRequest, started: Started) -> Ranks:  # noqa: F811
    return started[request.param]
