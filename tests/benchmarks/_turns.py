"""Two things that all ranks do, in turns, timed on the ranks themselves."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Turns:
    """What `in_turns` measured, a value for each turn; the peer has one more.

    Attributes:
        seconds, peer_seconds: of the slowest rank.
        cpu, peer_cpu: seconds of computing, of all ranks and their threads together.
    """

    seconds: list[float]
    peer_seconds: list[float]
    cpu: list[float]
    peer_cpu: list[float]


def in_turns(
    work: Callable[[], object],
    peer: Callable[[], object],
    rounds: int,
    *,
    warm_up: int = 2,
) -> Turns:
    """Peer, work, peer, work, ..., peer. Every rank calls it; all return the same."""
    for _ in range(warm_up):
        peer(), work()
    order = [peer, *[work, peer] * rounds]
    spent = torch.zeros(len(order), 2, dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        for turn, one in enumerate(order):
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            one()
            spent[turn, 0] = time.perf_counter() - start
            spent[turn, 1] = time.process_time() - cpu
    finally:
        gc.enable()
    slowest, together = spent[:, 0].clone(), spent[:, 1].clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(together)
    return Turns(
        slowest[1::2].tolist(),
        slowest[::2].tolist(),
        together[1::2].tolist(),
        together[::2].tolist(),
    )
