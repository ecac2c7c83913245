"""What a message can be made of, and what a reduction does with it.

A backend sends memory, not values. Two tensors can be equal and lie differently in
memory, as `x` and `x.t().contiguous().t()` do. So what is sent is a contiguous copy,
where the tensor is not contiguous itself, and what arrives is written back.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp


def in_memory(tensor: Tensor) -> Tensor:
    """Its values, contiguous: the tensor itself if it is so already, else a copy."""
    refuse_unsendable(tensor)
    # x.conj() is x with a note to conjugate it, which a backend does not read.
    return tensor.resolve_conj().resolve_neg().contiguous()


def write(tensor: Tensor, values: Tensor) -> None:
    """Overwrite `tensor` with values of its shape. They may lie in its own memory."""
    # A dimension of size 1 can have any stride. Without these dimensions, the same
    # memory is seen to be the same, and copy_ has nothing to complain about.
    tensor, values = tensor.squeeze(), values.squeeze()
    if tensor.is_set_to(values):
        return
    tensor.copy_(values.clone() if torch._C._is_alias_of(tensor, values) else values)


def refuse_unsendable(
    tensor: Tensor, name: str = "the tensor", *, written: bool = False
) -> None:
    """Raise unless `tensor` is dense and has values; if `written`, each in one place.

    Raises:
        TypeError: it is sparse, nested or of another special layout.
        ValueError: it has no values yet; or elements share memory, as those of
            `torch.ones(1).expand(4)` do.
    """
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    if kind != "strided":
        raise TypeError(
            f"{name} is {kind}, and only dense tensors can be sent here: take its "
            "to_dense(), or make the embedding that it comes from with sparse=False."
        )
    if tensor.is_meta:
        raise ValueError(
            f"{name} is on meta, where tensors have no values: give it memory first, "
            "by module.to_empty(device=...) or torch.empty_like(tensor, device=...)."
        )
    if written and _overlaps(tensor):
        raise ValueError(
            f"{name} has elements that share memory, as after expand(): shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}. Each must have "
            "its own to be written to: use .clone()."
        )


def _overlaps(tensor: Tensor) -> bool:
    reach = 0  # from the first to the last element along the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def combine_of(op: ReduceOp, tensor: Tensor) -> Callable[..., Tensor]:
    """The function of two tensors that `op` stands for. For AVG, divide at the end."""
    functions = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }
    if op not in functions:
        raise ValueError(f"op is {op}: expected SUM, PRODUCT, MIN, MAX or AVG.")
    if op == ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"AVG needs a dtype with fractions, not {tensor.dtype}: use SUM and divide."
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and tensor.is_complex():
        raise ValueError(f"{op} needs numbers that have an order, not {tensor.dtype}.")
    return functions[op]
