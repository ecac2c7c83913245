"""Misuse that would end in wrong numbers, or in a crash: an error says it instead."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


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


@cache
def watch_optimizers() -> None:
    """From now on, an optimizer over parameters that were sharded cannot step."""
    register_optimizer_step_pre_hook(_refuse_whole_parameters)


def _refuse_whole_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = (p for group in optimizer.param_groups for p in group["params"])
    for parameter in held:
        if hasattr(parameter, "_sharded_as"):
            kind = type(optimizer).__name__
            raise RuntimeError(
                f"this {kind} holds {parameter._sharded_as!r} as it was before it was "
                "sharded: its values lie in a flat tensor now, its gradient goes to a "
                f"shard, and step() would change nothing. Make the {kind} after "
                f"sharding, over the shards: {kind}(model.parameters(), ...)"
            )
