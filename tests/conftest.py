"""For all tests: what they answer and solve does not become the learner's progress."""

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if "COURSE_STATE" not in os.environ:
        state = tempfile.mkdtemp(prefix="course-state-")
        os.environ["COURSE_STATE"] = state
        config.add_cleanup(lambda: os.environ.pop("COURSE_STATE", None))
        config.add_cleanup(lambda: shutil.rmtree(state, ignore_errors=True))
