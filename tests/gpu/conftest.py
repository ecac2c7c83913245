"""For all tests here: where they run, what they leave, what goes to the record."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Before anybody imports torch: see tests/conftest.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
REPORT = "COURSE_GPU_REPORT"  # names the file for what was found

import torch  # noqa: E402

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FOUND] = {}
    if "COURSE_STATE" not in os.environ:
        state = tempfile.TemporaryDirectory("", "course-state-")
        config.add_cleanup(state.cleanup)
        os.environ["COURSE_STATE"] = state.name
        config.add_cleanup(lambda: os.environ.pop("COURSE_STATE", None))
    if REPORT in os.environ:
        config.pluginmanager.register(Report(config), "gpu report")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # programs collect garbage often: what is imported by now is none


FOUND = pytest.StashKey[dict[str, Any]]()


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Differences for the report: program -> observation -> what both have seen."""
    return request.config.stash.setdefault(FOUND, {})


@pytest.fixture
def gpu() -> torch.device:
    """The first real GPU; without one the test is skipped."""
    if not GPUS:
        pytest.skip("there is no GPU here")
    return torch.device("cuda", 0)


@pytest.fixture
def gpus() -> int:
    """How many real GPUs; with less than two the test is skipped."""
    if GPUS < 2:
        pytest.skip(f"it needs two GPUs, and there are {GPUS} here")
    return GPUS


@pytest.fixture(
    scope="module",
    params=["nccl", "gloo, GPU", pytest.param("gloo", marks=pytest.mark.thorough)],
)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend and a type of device. The last runs everywhere: nothing rots."""
    backend, _, gpu = request.param.partition(", ")
    device = "cuda" if backend == "nccl" or gpu else "cpu"
    if device == "cuda" and not GPUS:
        pytest.skip("there is no GPU here")
    return backend, device


class Report:
    """Writes how the tests ended, and what was found, into the file that is named.

    It does so after each test: the run may be ended from outside.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.outcomes: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[report.nodeid] = getattr(crash, "message", "")[:1000]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        found = {
            "last": nodeid,
            "tests": dict(self.outcomes),
            "failed": self.failed,
            "differences": self.config.stash[FOUND],
        }
        Path(os.environ[REPORT]).write_text(json.dumps(found, indent=1) + "\n")
