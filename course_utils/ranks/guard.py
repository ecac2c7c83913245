"""Ends spawned ranks when their kernel is gone, however it went.

A rank sees by itself that the kernel's end of its connection is closed, unless it is
in C code that holds Python's lock. So each ``Ranks`` whose ranks are not forked has
this small process beside it. It reads process numbers, one a line, until the kernel
is gone; then it ends these processes and removes their folder. It is run as a script,
with that folder as its argument.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import sys
import time

import psutil

GONE_SECONDS = 2.0


def kill_family(process: psutil.Process) -> None:
    """End a process, what it has started, and what those have started."""
    family = [process]
    with contextlib.suppress(psutil.Error):
        family += process.children(recursive=True)
    if hasattr(os, "killpg"):  # those whose parent has ended before
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    remove_semaphores(process.pid)


def remove_semaphores(rank: int) -> None:
    """Remove the semaphores with a name that a rank, now ended, has made (on Linux).

    Python has a process that would do it. It was killed with all else of the rank.
    """
    for file in glob.glob(f"/dev/shm/sem.mp-rank-{rank}-*"):
        with contextlib.suppress(OSError):
            os.unlink(file)


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has asked yet how it ended: its new parent may take its time."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def main() -> None:
    """Wait for the end of the kernel, then tidy up after it."""
    ranks = []
    for line in sys.stdin:
        with contextlib.suppress(psutil.Error):
            ranks.append(psutil.Process(int(line)))
    ranks = [process for process in ranks if process.is_running()]
    for process in ranks:
        kill_family(process)
    deadline = time.monotonic() + GONE_SECONDS
    while not all(map(has_ended, ranks)) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
