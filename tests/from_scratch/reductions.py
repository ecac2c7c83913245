"""Numbers for ranks to reduce, and what must come of them."""

import functools

import torch
from torch.distributed import ReduceOp

OPS = {
    op.name: op
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
}


def numbers(seed, shape, dtype=torch.float32):
    """Small whole numbers, 1 to 3, that depend on the seed; or true and false."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(1, 4, shape, generator=generator)
    if dtype == torch.bool:
        return tensor > 1
    if dtype.is_complex:
        return torch.complex(tensor.double(), tensor.double() - 3).to(dtype)
    return tensor.to(dtype)


def reduced(op, tensors):
    """What a reduction must give, from the numbers of all ranks."""
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        total = sum(tensors[1:], tensors[0])
        return total / len(tensors) if op == ReduceOp.AVG else total
    both = {
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }[op]
    return functools.reduce(both, tensors)
