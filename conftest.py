"""For every run of pytest here, also for a plain ``pytest --nbval notebooks``."""

import contextlib
import os
import secrets
import socket
import tempfile

import pytest
from jupyter_client.connect import LocalPortCache
from nbval.kernel import RunningKernel

collect_ignore = ["course_utils/setup/room.ipynb"]  # the test of the doctor runs it

# Read by pytest-timeout, which only the test command installs.
os.environ.setdefault("PYTEST_TIMEOUT", "300")


@pytest.hookimpl(tryfirst=True)  # tests/conftest.py then moves the temporary folder
def pytest_configure(config: pytest.Config) -> None:
    if config.option.nbval_sanitize_with is None:
        config.option.nbval_sanitize_with = str(config.rootpath / "tests" / "nbval.cfg")
    RunningKernel.stop = end_kernel
    KernelPorts.instance()
    # What notebooks and tests answer and solve does not become the learner's progress.
    state = tempfile.TemporaryDirectory("", "course-state-", ignore_cleanup_errors=True)
    config.add_cleanup(state.cleanup)
    patch = pytest.MonkeyPatch()
    patch.setenv("COURSE_STATE", state.name)
    config.add_cleanup(patch.undo)


class KernelPorts(LocalPortCache):
    """Ports for kernels that the system gives to nobody who asks for any free one.

    jupyter_client asks for one, closes it, and the kernel opens it a second later.
    Ranks ask for many ports. Now and then one of them got it meanwhile, and the kernel
    died.
    """

    def find_available_port(self, ip: str) -> int:
        while True:
            # "Any" begins at 32768 on Linux, at 49152 on macOS and Windows.
            port = 20_000 + secrets.randbelow(12_000)
            if port in self.currently_used_ports:
                continue
            with contextlib.suppress(OSError), socket.create_server((ip, port)):
                self.currently_used_ports.add(port)
                return port


def end_kernel(kernel: RunningKernel) -> None:
    """Ask a notebook's kernel to end, as JupyterLab does; nbval itself kills it.

    What a kernel has made and is killed with stays, such as multiprocessing's
    semaphores in /dev/shm.
    """
    kernel.kc.stop_channels()
    kernel.km.shutdown_kernel(now=False)
