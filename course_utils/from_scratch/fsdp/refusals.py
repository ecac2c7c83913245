"""Misuse that would end in wrong numbers, or in a crash: an error says it instead."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..refusals import NotCopied, described, refuse_unlike


def refuse_own_parameters(unit: Any, leaves: list[Any]) -> None:
    """Raise RuntimeError if a unit returns memory that is freed after it."""
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    for flat in unit.flats:
        if any(torch._C._is_alias_of(value, flat.full) for value in tensors):
            raise RuntimeError(
                f"unit {unit.name or 'root'!r} returns one of its own parameters, "
                "or a view of one. Their memory is freed when the unit is done, "
                "and that tensor would be lost: return a copy, made with .clone()"
            )


def refuse_if_hidden(unit: Any, leaves: list[Any]) -> None:
    """Raise TypeError if no tensor is found in what a unit returns."""
    found = any(isinstance(v, Tensor) and v.requires_grad for v in leaves)
    plain = (Tensor, str, bytes, bool, int, float, complex, type(None))
    others = [type(v).__name__ for v in leaves if not isinstance(v, plain)]
    if others and not found:
        raise TypeError(
            f"unit {unit.name or 'root'!r} returns a {others[0]}. Its parameters "
            "must be gathered again when backward() comes to a tensor that it "
            "returns, and none is found in there: return tensors, or tuples, lists "
            "or dicts of them"
        )


def refuse_if_absent(flat: Any, name: str, *call: Any) -> None:
    """Raise RuntimeError if a module is called while its parameters are not here."""
    if not flat.gathered:
        raise RuntimeError(
            f"the module of {name!r} is called while the parameters of its unit "
            f"({flat.name}) are sharded. They are gathered when the unit is "
            "called: call the FSDP model, or give that module as a unit"
        )


def refuse_unlike_units(
    module: nn.Module, units: dict[str, dict[str, nn.Parameter]], **settings: Any
) -> None:
    """Raise ValueError unless all ranks shard the same module in the same way."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = {f"unit {name or 'root'!r}": f"{[*named]}" for name, named in units.items()}
    others = {name: str(value) for name, value in settings.items()}
    refuse_unlike({**described(tensors), **names, **others})


class Sharded(NotCopied):
    """A base: what works by flat tensors and hooks is neither copied nor pickled."""

    instead = (
        "Copy a module before it is sharded. To save it, or to fill another one, take "
        "its state_dict(), and optimizer_state_dict() of this package"
    )


# By which name a parameter was sharded. A copy, whose values are its own, is not in it.
sharded_as = WeakTensorKeyDictionary()


@cache
def watch_optimizers() -> None:
    """From now on, an optimizer over parameters that were sharded cannot step."""
    register_optimizer_step_pre_hook(_refuse_whole_parameters)


def _refuse_whole_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = (p for group in optimizer.param_groups for p in group["params"])
    for parameter in held:
        if name := sharded_as.get(parameter):
            kind = type(optimizer).__name__
            raise RuntimeError(
                f"this {kind} holds {name!r} as it was before it was sharded: its "
                "values lie in a flat tensor now, its gradient goes to a shard, and "
                f"step() would change nothing. Make the {kind} after sharding, over "
                f"the shards: {kind}(model.parameters(), ...)"
            )
