"""Rung 3: parameters that come and go."""

import math

import torch
from torch import nn

from .flat_parameter import FlatParameter
from .pieces import AllGather


class ShardedFlatParameter(FlatParameter):
    """A flat parameter of which only the shard stays. `full` comes and goes.

    Its storage is emptied and filled again, but remains the same storage: what autograd
    has saved of the parameters are views of it, and sees the values come back.

    Args:
        param_dtype: that of `full`, to compute in; by default the parameters'.
        reduce_dtype: that of gradients on their way to their owner; by default
            `param_dtype`.

    Attributes:
        shard: this rank's part, in memory of its own, and of the parameters' dtype.
        whole: for each parameter the view of `full` that is its value.
        absent: for each parameter what it has instead while `full` is empty.
        bytes: those of `full` when it is filled.
        gathering: the all-gather that is under way, or None.
        gathered: whether `full` is filled.
    """

    def __init__(
        self,
        name: str,
        named: dict[str, nn.Parameter],
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name, named)
        trained = self.shard.requires_grad
        self.shard = nn.Parameter(self.shard.detach().clone(), requires_grad=trained)
        sent, self.full = self.full, torch.empty_like(self.full, dtype=param_dtype)
        self.reduce_dtype = reduce_dtype or self.full.dtype
        self.whole = self.parts(self.full)
        # What stands for a parameter that is not here has its shape, but no memory. To
        # read from an empty storage would end the process.
        nothing = _NOTHING.to(self.full)
        self.absent = [nothing.expand(p.shape) for p in self.parameters]
        self.bytes = self.full.numel() * self.full.element_size()
        self.gathering: AllGather | None = None
        self.gathered = True
        self.free()
        # Its memory goes now: gloo's threads keep the tensor for some milliseconds.
        sent.untyped_storage().resize_(0)

    @torch.no_grad()
    def start_gather(self) -> None:
        """Start to fetch the other parts, unless they are here or already coming."""
        if self.gathered or self.gathering is not None:
            return
        self.full.untyped_storage().resize_(self.bytes)
        self.gathering = AllGather(self.shard.to(self.full.dtype), self.full)

    def gather(self) -> None:
        """Fetch the other parts, and wait until they are here."""
        self.start_gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.gathered = None, True
            self.point_to(self.whole)

    def free(self) -> None:
        """Take the memory of the whole weights away."""
        if self.gathering is not None:
            self.gather()
        if self.gathered:
            self.point_to(self.absent)
            self.full.untyped_storage().resize_(0)
            self.gathered = False


_NOTHING = torch.tensor(math.nan)


class Unit:
    """A module of which all parameters are gathered together, and freed together.

    Attributes:
        name: that of the module in the model; "" is the model itself.
        module: the module. Parameters of units inside it are not among its own.
        flats: the trained parameters, and the frozen ones; either may be missing.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: list[ShardedFlatParameter]
    ) -> None:
        self.name, self.module, self.flats = name, module, flats
        self.calls = 0  # of which backward has not come to the inputs

    def start_gather(self) -> None:
        """Begin to fetch the parameters."""
        for flat in self.flats:
            flat.start_gather()

    def gather(self) -> None:
        """Let the parameters be here when this returns."""
        self.start_gather()
        for flat in self.flats:
            flat.gather()

    def free(self) -> None:
        """Give their memory back."""
        for flat in self.flats:
            flat.free()
