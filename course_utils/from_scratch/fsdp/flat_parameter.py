"""What all rungs share: the parameters of a unit, in one flat tensor."""

from collections.abc import Iterable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..tensors import in_memory, write
from .pieces import padded
from .refusals import Sharded, sharded_as, watch_optimizers


class FlatParameter(Sharded):
    """Parameters of a unit, one behind another in one tensor.

    They stay what they are, and the module works as before; but their values lie in
    `full` from now on. An optimizer gets `shard`, this rank's part of it.

    Attributes:
        name: that of the unit.
        names, parameters: those of the module.
        starts: where in `full` each of them begins; and where the last one ends.
        full: all values, (n·k,). Those of rank 0, on every rank.
        shard: this rank's part, (k,): a view of `full`. (From rung 3 on a copy.)
        gradient: all gradients, (n·k,), or None.
        reduce_dtype: that of `gradient`. From rung 3 on it may differ from the shard's.
        missing: how many parameters have no gradient yet, in this backward(). From rung
            2 on, where GradientReducer counts them.

    Raises:
        ValueError: the parameters are of several dtypes.
    """

    def __init__(self, name: str, named: dict[str, nn.Parameter]) -> None:
        self.name, self.names, self.parameters = name, list(named), [*named.values()]
        kinds = {str(p.dtype): name for name, p in named.items()}
        if len(kinds) > 1:
            found = ", ".join(f"{kind} ({name})" for kind, name in kinds.items())
            raise ValueError(
                f"unit {name!r} has parameters of several dtypes: {found}. They share "
                "one flat tensor: give them one dtype, or make a unit of the module "
                "that differs"
            )
        for name, parameter in named.items():
            if before := sharded_as.get(parameter):
                raise ValueError(
                    f"{name!r} is sharded already, as {before!r}. A module can be "
                    "sharded once: make a new one"
                )
            sharded_as[parameter] = name
        watch_optimizers()
        sizes = [parameter.numel() for parameter in self.parameters]
        self.starts = [0, *accumulate(sizes)]
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.full = padded(flat, dist.get_world_size())
        dist.broadcast(self.full, 0)
        self.point_to(self.parts(self.full))
        trained = self.parameters[0].requires_grad
        self.shard = nn.Parameter(self.own(self.full), requires_grad=trained)
        self.gradient: Tensor | None = None
        self.reduce_dtype = self.shard.dtype
        self.missing = len(self.parameters)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """What `flat` holds for each parameter: views, each of its shape."""
        return [self.part(flat, place) for place in range(len(self.parameters))]

    def part(self, flat: Tensor, place: int) -> Tensor:
        """What `flat` holds for one of the parameters."""
        parameter, start = self.parameters[place], self.starts[place]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def own(self, flat: Tensor) -> Tensor:
        """What `flat` holds for this rank: a view of the shard's shape."""
        return flat.view(dist.get_world_size(), -1)[dist.get_rank()]

    def point_to(self, values: list[Tensor]) -> None:
        """Let these be the parameters' values."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value


def parameters_by_unit(
    module: nn.Module, units: Iterable[nn.Module]
) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters that each unit has for itself: {unit: {name: parameter}}.

    The module is a unit, too, the root, with the name "". A parameter belongs to the
    innermost unit around it. Units are in the order in which the module names them.

    Raises:
        ValueError: a unit is no submodule, or two units share a parameter.
    """
    units = [*units]
    wanted = {id(unit): number for number, unit in enumerate(units)}
    unit_at = {"": ""}  # every path to a unit -> its name
    name_of = {id(module): ""}
    for path, sub in module.named_modules(remove_duplicate=False):
        if id(sub) in wanted:
            unit_at[path] = name_of.setdefault(id(sub), path)
    for number, unit in enumerate(units):
        if id(unit) not in name_of:
            raise ValueError(
                f"units[{number}], a {type(unit).__name__}, is no submodule of the "
                f"{type(module).__name__}: its units must be among its modules()"
            )
    found: dict[str, dict[str, nn.Parameter]] = {n: {} for n in unit_at.values()}
    places: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = name
        while path not in unit_at:
            path = path.rpartition(".")[0]
        unit = unit_at[path]
        first_unit, first_name = places.setdefault(id(parameter), (unit, name))
        if first_unit != unit:
            raise ValueError(
                f"{first_name} of unit {first_unit or 'root'!r} and {name} of unit "
                f"{unit or 'root'!r} are one parameter, and one of the two would be "
                "without it. Make one unit of both: a module that contains them, or "
                "the root, which has all that no unit has"
            )
        if first_name == name:
            found[unit][name] = parameter
    return found


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrite each with that of rank 0. Every rank calls; a message for each."""
    for tensor in tensors:
        value = in_memory(tensor.detach())
        dist.broadcast(value, 0)
        write(tensor, value)
