"""What every file here refuses in words: ranks that differ, sparse gradients, copies.

Without a word, these would end in wrong numbers, or in a crash.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .tensors import refuse_unsendable


# ------------------------------------------------------------ what all ranks must share
def refuse_unlike(mine: Mapping[str, str], group: ProcessGroup | None = None) -> None:
    """Raise ValueError, on every rank, unless all give the same words in one order.

    A message has no names in it. Where a rank packs other tensors into a flat one than
    the others do, values end in the wrong places, or gloo ends the process.

    Args:
        mine: for each name what this rank has, such as {"weight": "float32 [3, 4]"}.

    Cost: an all-gather of these words.
    """
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, dict(mine), group)
    first = everyones[0]
    for rank, theirs in enumerate(everyones):
        for name in {**first, **theirs}:
            here, there = first.get(name, "missing"), theirs.get(name, "missing")
            if here != there:
                raise ValueError(
                    f"{name} is {here} on rank 0, but {there} on rank {rank}. All "
                    "ranks must build the same model, and make the same calls."
                )
        for here, there in zip(first, theirs, strict=True):
            if here != there:
                raise ValueError(
                    f"The order differs: where rank 0 has {here}, rank {rank} has "
                    f"{there}. All ranks must build the model in the same order."
                )


def described(named: Mapping[str, Tensor], *, strides: bool = False) -> dict[str, str]:
    """What ranks must share of tensors that they exchange, for `refuse_unlike`.

    Args:
        strides: whether they must lie in the same order in memory, too.

    Raises:
        TypeError, ValueError: a tensor cannot be sent: see `refuse_unsendable`.
    """
    words = {}
    for name, tensor in named.items():
        refuse_unsendable(tensor, name)
        words[name] = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
        if tensor.requires_grad:
            words[name] += " (requires_grad)"
        if strides and not tensor.is_contiguous():  # of size 1 they say nothing
            words[name] += f", with the strides {list(tensor.squeeze().stride())}"
    return words


def refuse_unlike_models(
    module: nn.Module, what: str, named: Mapping[str, Tensor], *, strides: bool = False
) -> None:
    """`refuse_unlike` of some tensors of a module, once; and again when they change.

    All ranks are to change them together, as when they freeze a layer.

    Args:
        what: a name for these tensors: a module may have several sets of them.
    """
    words = list(described(named, strides=strides).items())
    agreed = _agreed.setdefault(module, {})
    if agreed.get(what) != words:
        refuse_unlike(dict(words))
        agreed[what] = words


_agreed: WeakKeyDictionary[nn.Module, dict[str, list]] = WeakKeyDictionary()


# --------------------------------------------------------------------- sparse gradients
def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients that are there, by name, if a mean can take their places.

    Raises:
        TypeError, ValueError: one is sparse, or shares memory: see `refuse_unsendable`.
    """
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            refuse_unsendable_gradient(name, parameter)
            found[f"The gradient of {name}"] = parameter.grad
    return found


def refuse_sparse_gradients(module: nn.Module) -> None:
    """From now on, a backward() that comes to a sparse gradient raises TypeError."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            refuse = partial(refuse_unsendable_gradient, name)
            parameter.register_post_accumulate_grad_hook(refuse)


def refuse_unsendable_gradient(name: str, parameter: Tensor) -> None:
    """`refuse_unsendable` of a parameter's gradient, which is there."""
    refuse_unsendable(parameter.grad, f"The gradient of {name}", written=True)


# ------------------------------------------------------------------------------- copies
class NotCopied:
    """A base for what works by hooks, which copies do not take along.

    So copy, deepcopy, pickle, torch.save and the like raise TypeError.
    """

    instead = (
        "Copy or save the module inside, and wrap it again: copy.deepcopy(model.module)"
        " or model.module.state_dict()"
    )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a copy of this {type(self).__name__} would average nothing: its hooks "
            f"stay with the parameters of this one. {self.instead}"
        )
