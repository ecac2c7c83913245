"""What the host waits for, and what it does not wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from programs.basis import (
    GPU,
    MIB,
    Seen,
    program,
    waits,
)


@program
def waiting_for_values() -> Seen:
    x = torch.arange(8.0, device=GPU)
    mask = x > 3
    calls: dict[str, Callable[[], object]] = {
        "item": lambda: x[0].item(),
        "float": lambda: float(x[0]),
        "bool": lambda: bool(mask[0]),
        "list": x.tolist,
        "cpu": x.cpu,
        "text": lambda: str(x),
        "nonzero": mask.nonzero,
        "mask": lambda: x[mask],
        "where": lambda: torch.where(mask),
        "unique": x.unique,
        "equal": lambda: torch.equal(x, x),
        "allclose": lambda: torch.allclose(x, x),
        "bincount": lambda: x.long().bincount(),
        "synchronize": torch.cuda.synchronize,
    }
    return {name: waits(call) for name, call in calls.items()}


@program
def running_ahead() -> Seen:
    x, index = torch.ones(8, 8, device=GPU), torch.arange(3, device=GPU)
    mask, layer = x > 0, nn.Linear(8, 8).to(GPU)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x).sum().backward()
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: x + 1,
        "matmul": lambda: x @ x,
        "sum": x.sum,
        "zeros": lambda: torch.zeros(8, device=GPU),
        "fill": lambda: x.fill_(1.0),
        "element": lambda: x[0, 0].fill_(1.0),
        "index": lambda: x[index],
        "masked_fill": lambda: x.masked_fill(mask, 1.0),
        "where": lambda: torch.where(mask, x, x),
        "sort": x.sort,
        "topk": lambda: x.topk(2),
        "clone": x.clone,
        "backward": lambda: layer(x).sum().backward(),
        "step": optimizer.step,
        "clip": lambda: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
        "shape": lambda: x[x.shape[0] - 1],
        "event": lambda: torch.cuda.Event().record(),
        "query": lambda: torch.cuda.current_stream().query(),
    }
    return {name: waits(call) for name, call in calls.items()}


@program
def waiting_for_copies() -> Seen:
    size = 2 * MIB
    there = torch.zeros(size, device=GPU)
    pageable, pinned = torch.zeros(size), torch.zeros(size).pin_memory()
    index, at = torch.zeros(2, dtype=torch.long), torch.zeros(2, device=GPU)
    calls: dict[str, Callable[[], object]] = {
        "pinned, non_blocking": lambda: there.copy_(pinned, non_blocking=True),
        "pinned": lambda: there.copy_(pinned),
        "pageable, non_blocking": lambda: there.copy_(pageable, non_blocking=True),
        "pageable": lambda: there.copy_(pageable),
        "to, pinned": lambda: pinned.to(GPU, non_blocking=True),
        "to pinned, non_blocking": lambda: pinned.copy_(there, non_blocking=True),
        "to pinned": lambda: pinned.copy_(there),
        "to pageable": lambda: pageable.copy_(there),
        "to the cpu, non_blocking": lambda: there.to("cpu", non_blocking=True),
        "on the gpu": lambda: there.copy_(there + 1),
        "from a list": lambda: torch.tensor([1.0, 2.0], device=GPU),
        "an index from the cpu": lambda: at[index],
        "a number from the cpu": lambda: at + torch.tensor(1.0),
        "fill from a number": lambda: at.fill_(torch.tensor(1.0)),
    }
    return {name: waits(call) for name, call in calls.items()}
