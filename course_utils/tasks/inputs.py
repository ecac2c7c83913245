"""Inputs for the checks: small numbers that a person can add up in the head."""

from __future__ import annotations

import torch
from torch import nn


def whole_numbers(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """A float32 tensor of whole numbers from -9 to 9, different on every rank.

    The same shape and rank always give the same numbers.
    """
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    return torch.randint(-9, 10, shape, generator=generator).float()


def linear(
    inputs: int,
    outputs: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    divided_by: int = 1,
) -> nn.Linear:
    """A linear layer of `whole_numbers`, the same in every process.

    Divided by 8 they leave a tanh its slope.
    """
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(whole_numbers((outputs, inputs), seed) / divided_by)
        layer.bias.copy_(whole_numbers((outputs,), seed) / divided_by)
    return layer
