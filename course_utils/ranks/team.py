"""The processes of one ``Ranks``, and what they share."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

import psutil

from course_utils.ranks.processes import (
    ForkedRank,
    RankProcess,
    SharedFolder,
    SpawnedRank,
    ZygoteProcess,
    interrupts_held,
    start_method,
)

BOARD_BYTES = 1 << 14  # a rank's part of the memory in which calls are compared


class Team:
    """The processes of one ``Ranks``, with what they share."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.owner = os.getpid()
        self.processes: dict[int, RankProcess] = {}
        self.zygote: ZygoteProcess | None = None
        self.shared: list[int] = []  # files in memory: the board, the meeting file
        self.folder: SharedFolder | None = None  # the same for spawned ranks
        self.port = contextlib.ExitStack()  # holds MASTER_PORT
        self.forks = start_method() == "fork"

    def start(self, which: Any) -> None:
        """Start these ranks and wait until they listen."""
        if self.forks and (self.zygote is None or not self.zygote.usable()):
            if self.zygote is not None:  # somebody killed it, and with it all ranks
                self.zygote.release()
                which = range(self.n)
            self.zygote = ZygoteProcess.acquire()
        if self.forks and not self.shared:
            board = os.memfd_create("ranks-board")
            os.ftruncate(board, self.n * BOARD_BYTES)
            self.shared = [board, os.memfd_create("ranks-meeting")]
        started = []
        with interrupts_held(raise_after=True):  # or one is made that nobody knows
            if not self.forks and self.folder is None:
                self.folder = SharedFolder(self.n * BOARD_BYTES)
            for rank in which:
                if self.forks:
                    process = ForkedRank(
                        self.zygote, rank, self.n, self._environment(rank), self.shared
                    )
                else:
                    process = SpawnedRank(
                        rank, self.n, self._environment(rank), self.folder
                    )
                self.processes[rank] = process
                started.append(process)
        for process in started:
            process.wait_started()

    def _environment(self, rank: int) -> dict[str, str]:
        environment = dict(os.environ)
        loopback = loopback_interface()
        environment.update(
            # Whatever a cluster or container has set: all ranks are on this machine.
            GLOO_SOCKET_IFNAME=loopback,
            NCCL_SOCKET_IFNAME=loopback,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        )
        return environment

    def meeting_file(self, generation: int) -> str | None:
        """Where spawned ranks find each other; None: they have another way."""
        return self.folder.meeting_file(generation) if self.folder else None

    def new_port(self) -> int:
        """For ``MASTER_PORT``: a learner's ``init_process_group`` may take it later."""
        self.port.close()
        return hold_port(self.port)

    def close(self) -> None:
        """End everything; safe to call in a forked child of the kernel (no effect)."""
        if os.getpid() != self.owner:
            return
        for process in self.processes.values():
            with contextlib.suppress(AttributeError, OSError):
                process.kill()
        self.processes.clear()
        for descriptor in self.shared:
            os.close(descriptor)
        self.shared = []
        self.port.close()
        if self.zygote is not None:
            self.zygote.release()
            self.zygote = None
        if self.folder is not None:
            self.folder.close()
            self.folder = None


def loopback_interface() -> str:
    """The name of the network interface that only this machine can reach."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"


def hold_port(until: contextlib.ExitStack) -> int:
    """A TCP port on loopback that nobody else gets until this stack is closed.

    On Linux a bound socket that does not listen holds it: a server may listen beside
    that if it has SO_REUSEADDR, as PyTorch's has. Elsewhere the port is only free now.
    """
    holder = until.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    if sys.platform != "linux":
        holder.close()
    return port
