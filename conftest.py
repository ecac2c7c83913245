"""For every run of pytest here, also for a plain ``pytest --nbval notebooks``."""

import os
import tempfile

import pytest
from nbval.kernel import RunningKernel

collect_ignore = ["course_utils/setup/room.ipynb"]  # the test of the doctor runs it

# Read by pytest-timeout, which only the test command installs.
os.environ.setdefault("PYTEST_TIMEOUT", "300")


@pytest.hookimpl(tryfirst=True)  # tests/conftest.py then moves the temporary folder
def pytest_configure(config: pytest.Config) -> None:
    if config.option.nbval_sanitize_with is None:
        config.option.nbval_sanitize_with = str(config.rootpath / "tests" / "nbval.cfg")
    RunningKernel.stop = end_kernel
    # What notebooks and tests answer and solve does not become the learner's progress.
    state = tempfile.TemporaryDirectory("", "course-state-", ignore_cleanup_errors=True)
    config.add_cleanup(state.cleanup)
    patch = pytest.MonkeyPatch()
    patch.setenv("COURSE_STATE", state.name)
    config.add_cleanup(patch.undo)


def end_kernel(kernel: RunningKernel) -> None:
    """Ask a notebook's kernel to end, as JupyterLab does; nbval itself kills it.

    What a kernel has made and is killed with stays, such as multiprocessing's
    semaphores in /dev/shm.
    """
    kernel.kc.stop_channels()
    kernel.km.shutdown_kernel(now=False)
