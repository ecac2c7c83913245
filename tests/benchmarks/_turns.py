"""Two things that all ranks do, in turns, timed on the ranks themselves."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from course_utils.from_scratch import ddp, fsdp


def in_turns(
    work: Callable[[], object],
    peer: Callable[[], object],
    rounds: int,
    *,
    warm_up: int = 2,
) -> dict[str, tuple[list[float], list[float]]]:
    """Peer, work, peer, work, ..., peer. Every rank calls it; all return the same.

    Returns:
        The seconds of the work, and those of the peer, which has one turn more:
        "time" is that of the slowest rank, "CPU time" that of all ranks and their
        threads together.
    """
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
    return {
        "time": (slowest[1::2].tolist(), slowest[::2].tolist()),
        "CPU time": (together[1::2].tolist(), together[::2].tolist()),
    }


def transformer(layers: int, width: int, activation: str = "relu") -> nn.Sequential:
    """A small encoder with two classes of output, always with the same weights.

    Parameters can be compared after some steps if the activation is smooth. Where relu
    gets zero but for rounding, the order of additions decides whether it is on.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, activation=activation, batch_first=True
    )
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Linear(width, 2))


def wrapped(kind: str, bare: nn.Sequential, **options: Any) -> nn.Module:
    """A `transformer` in a wrapper; the options are those of the wrapper.

    Args:
        kind: "own DDP", "torch DDP", "own FSDP" or "FSDP2"; else it stays as it is.
    """
    if kind == "own DDP":
        return ddp.DDP(bare, **options)
    if kind == "torch DDP":
        return DistributedDataParallel(bare, **options)
    if kind == "own FSDP":
        return fsdp.FSDP(bare, bare[0].layers, **options)
    if kind == "FSDP2":
        # It warns of outputs that are views: nothing here changes them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        for unit in bare[0].layers:
            fully_shard(unit, **options)
        return fully_shard(bare, **options)
    return bare


def stepper(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, ...],
    after_backward: Callable[[], object] = lambda: None,
) -> Callable[[], None]:
    """What does one step, each rank with batches of this shape of its own."""
    batches = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        inputs = torch.randn(shape, generator=batches)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        after_backward()
        optimizer.step()

    return step


def largest_difference(
    one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]
) -> float:
    """Between the values of both, over all ranks."""
    pairs = zip(one, other, strict=True)
    apart = torch.stack([(a - b).abs().max().double() for a, b in pairs]).max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return apart.item()


def agreement(apart: float, n: int) -> dict[str, Any]:
    """Sums of two numbers are the same in any order; of more, nearly."""
    if n == 2:
        return {"parameters_equal": apart == 0.0}
    return {"parameters_within_1e-5": apart <= 1e-5}
