"""What programs share: their table, errors, memory, a GPU that is busy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

GPU = "cuda"
MIB = 2**20 // 4  # elements of float32

Seen = dict[str, Any]
PROGRAMS: dict[str, Callable[[], Seen]] = {}


def program(function: Callable[[], Seen]) -> Callable[[], Seen]:
    """One of the programs, by its name."""
    PROGRAMS[function.__name__] = function
    return function


def on_gpu(*size: int) -> torch.Tensor:
    """Numbers that are the same on every GPU."""
    return torch.randn(size).to(GPU)


def error_of(call: Callable[[], object]) -> list[str]:
    """The class of its error, and the first line of what that says."""
    try:
        call()
    except Exception as error:
        return what_it_says(error)
    return ["no error"]


def what_it_says(error: Exception) -> list[str]:
    return [type(error).__name__, str(error).partition("\n")[0]]


class Meter:
    """Calls say how many bytes are on the GPU now, and were at most since the last."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self.before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def __call__(self) -> list[int]:
        now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return [now - self.before, peak - self.before]


def busy() -> None:
    """Give the GPU a tenth of a second of work; to a virtual one, of its model."""
    try:
        torch.cuda._sleep(200_000_000)
    except RuntimeError:  # not on virtual GPUs
        x = torch.zeros(256, 256, device=GPU)
        x @ x


def waits(call: Callable[[], object]) -> bool:
    """Does the host wait in this call until the GPU has done what it had to do?"""
    call()  # memory and kernels are there afterwards: to get them may wait, too
    torch.cuda.synchronize()
    busy()
    end = torch.cuda.Event()
    end.record()
    kept = call()
    waited = end.query()
    torch.cuda.synchronize()
    del kept
    return waited


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor
) -> Seen:
    """Losses of three steps, and the parameters and the state after them."""
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        out = model(*inputs)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = next(iter(optimizer.state.values()), {})
    return {
        "losses": losses,
        "parameters": [p.detach() for p in model.parameters()],
        "gradients": {str(p.grad.device) for p in model.parameters()},
        "state": {name: str(getattr(x, "device", x)) for name, x in state.items()},
    }


def small_model() -> nn.Module:
    """Two layers on the GPU."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(GPU)
