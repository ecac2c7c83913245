"""Rung 5: checkpoints, of the model and of its optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .flat_parameter import FlatParameter
from .pieces import all_gather, shard


class StateDicts:
    """What FSDP has for checkpoints: its own state, and its optimizer's.

    Attributes:
        module: the module that is sharded.
        flats: its flat parameters.
    """

    module: nn.Module
    flats: list[FlatParameter]

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all tensors, as in the plain module. Every rank calls it.

        Cost: an all-gather of each unit.
        """
        values = {}
        for flat in self.flats:
            parts = flat.parts(all_gather(flat.shard))
            for parameter, part in zip(flat.parameters, parts, strict=True):
                values[id(parameter)] = part.clone()
        return {
            name: values[id(value)] if id(value) in values else value.clone()
            for name, value in self._tensors().items()
        }

    def _tensors(self) -> dict[str, Tensor]:
        """Those of the module's state_dict(): all of it but extra state."""
        state = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if torch.is_tensor(value)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` of this or of the plain module gave.

        Every rank gives it, and takes its part; `torch.load(..., mmap=True)` reads no
        more of a file than is used. Nothing is sent. The number of ranks is free.

        Raises:
            ValueError: names or shapes are others.
        """
        mine = self._tensors()
        _compare(
            {n: v.shape for n, v in state.items() if isinstance(v, Tensor)},
            {n: v.shape for n, v in mine.items()},
        )
        for flat in self.flats:
            values = [state[name].reshape(-1) for name in flat.names]
            flat.shard.copy_(shard(torch.cat(values)))
        for name, value in mine.items():
            if not isinstance(value, nn.Parameter):
                value.copy_(state[name])

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer_state_dict` of the shards' optimizer."""
        return optimizer_state_dict(self.flats, optimizer)

    def load_optimizer_state_dict(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> None:
        """`load_optimizer_state_dict` of the shards' optimizer."""
        load_optimizer_state_dict(self.flats, optimizer, state)


def optimizer_state_dict(
    flats: Iterable[FlatParameter], optimizer: Optimizer
) -> dict[str, Any]:
    """The state of the shards' optimizer, whole. Every rank calls it.

    Returns:
        "state": for each name of a parameter what the optimizer keeps for it, in the
        parameter's shape; "param_groups": the settings.

    Raises:
        ValueError: the optimizer has a parameter that is no shard of these.

    Cost: for each flat parameter an all-gather of each tensor of the state.
    """
    flats = [*flats]
    state: dict[str, dict[str, Any]] = {}
    names = {id(flat.shard): flat.names for flat in flats}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in names:
            raise ValueError(
                f"this {type(optimizer).__name__} has a parameter of the shape "
                f"{tuple(parameter.shape)} that is no shard of this model. Give it an "
                "optimizer of its own"
            )
    for flat in flats:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.shard.shape:
                values = flat.parts(all_gather(value))
            else:
                values = [value] * len(flat.names)
            for name, part in zip(flat.names, values, strict=True):
                part = part.clone() if isinstance(part, Tensor) else part
                state.setdefault(name, {})[key] = part
    groups = [
        {**group, "params": [n for p in group["params"] for n in names[id(p)]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def load_optimizer_state_dict(
    flats: Iterable[FlatParameter], optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Load what `optimizer_state_dict` gave, with any number of ranks and any units.

    Every rank gives it, and takes its part. Nothing is sent.

    Raises:
        ValueError: it has parameters of other names or shapes; or those of a unit
            differ in what they have, or in a number that they would share.
    """
    flats = [*flats]
    unknown = state["state"].keys() - {name for flat in flats for name in flat.names}
    if unknown:
        raise ValueError(
            f"the optimizer's state to load has {sorted(unknown)}, which this model "
            "does not train. It must come from the same module"
        )
    for flat in flats:
        entries = [state["state"].get(name, {}) for name in flat.names]
        keys = {frozenset(entry) for entry in entries}
        if len(keys) > 1:
            raise ValueError(
                f"the parameters of unit {flat.name!r} have different kinds of state: "
                f"{sorted(map(sorted, keys))}. They share one flat tensor, so they "
                "need the same"
            )
        own = {
            key: _shared(flat, key, [entry[key] for entry in entries])
            for key in entries[0]
        }
        if own:
            optimizer.state[flat.shard] = own
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})


# What optimizers of torch keep once for a parameter, not once for each element of it.
_NUMBERS = ("step", "mu_product", "eta", "mu")


def _shared(flat: FlatParameter, key: str, values: list[Any]) -> Any:
    """From what the parameters of a unit have for `key`, what their shard has."""
    shapes = [getattr(value, "shape", ()) for value in values]
    if key not in _NUMBERS and shapes == [p.shape for p in flat.parameters]:
        whole = torch.cat([value.reshape(-1) for value in values])
        return shard(whole).to(flat.shard.device)
    first = values[0]
    if any(shapes) or any(value != first for value in values):
        found = ", ".join(
            f"{name}: {f'of shape {tuple(shape)}' if shape else value}"
            for name, shape, value in zip(flat.names, shapes, values, strict=True)
        )
        raise ValueError(
            f"{key!r} of unit {flat.name!r} does not fit ({found}). The unit has one "
            "flat tensor: expected values in the shapes of its parameters, or one "
            "number for all of them"
        )
    return first.clone() if isinstance(first, Tensor) else first


def _compare(given: dict[str, Any], expected: dict[str, Any]) -> None:
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys())
    shapes = [
        f"{name} is {tuple(given[name])} and not {tuple(expected[name])}"
        for name in expected
        if name in given and given[name] != expected[name]
    ]
    if missing or unknown or shapes:
        raise ValueError(
            f"the state to load does not fit. Missing: {missing}; unknown: {unknown}; "
            f"other shapes: {shapes}. It must come from the same module"
        )
