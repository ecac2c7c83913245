"""Inputs for the checks: small numbers that a person can add up in the head."""

from __future__ import annotations

import torch


def whole_numbers(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """A float32 tensor of whole numbers from -9 to 9, different on every rank.

    The same shape and rank always give the same numbers.
    """
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    return torch.randint(-9, 10, shape, generator=generator).float()
