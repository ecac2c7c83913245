"""Rung 1, ZeRO stage 1: each rank keeps the optimizer's state for one n-th."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .flat_parameter import FlatParameter, broadcast, parameters_by_unit
from .pieces import AllGather
from .refusals import Sharded, refuse_unlike_units


class ShardedOptimizer(Sharded):
    """An optimizer with state for one n-th of the parameters on each rank.

        optimizer = ShardedOptimizer(module, torch.optim.AdamW, lr=1e-3)

    `step()` averages the gradients, updates the part of the parameters that this rank
    owns, and gathers the other parts from their owners. Between two steps parameters
    and gradients are whole on every rank, and the module is used as ever.

    Args:
        module: overwritten with the parameters and buffers of rank 0.
        optimizer_class: one of torch.optim that treats each element by itself.
        units: submodules with a flat parameter of their own; () for one in all.
        **defaults: arguments of the class.

    Attributes:
        flats: the flat parameters. Frozen ones are in none.
        shards: their parts that this rank updates.
        optimizer: that of torch. A learning-rate schedule needs it, and so does a
            checkpoint: `optimizer_state_dict(flats, optimizer)` of rung 5.

    Raises:
        ValueError: parameters of one unit have several dtypes; the ranks give other
            modules or units.

    Cost of a step for S bytes: an all-reduce and an all-gather of S, so each rank sends
    3(n-1)/n·S. That is half more than with DDP; rung 2 gets it back.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        units: Iterable[nn.Module] = (),
        **defaults: Any,
    ) -> None:
        groups = parameters_by_unit(module, units)
        refuse_unlike_units(module, groups)
        self.flats = [
            FlatParameter(name, trained)
            for name, named in groups.items()
            if (trained := {n: p for n, p in named.items() if p.requires_grad})
        ]
        frozen = [p for p in module.parameters() if not p.requires_grad]
        broadcast([*frozen, *module.buffers()])
        self.shards = [flat.shard for flat in self.flats]
        self.optimizer = optimizer_class(self.shards, **defaults)
        self._prepare_gradients()

    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Average the gradients, update, gather. Every rank calls it.

        Args:
            max_norm: cut the norm of all gradients together to this.

        Returns:
            The norm before that; None without `max_norm`.
        """
        self._average_gradients()
        norm = None if max_norm is None else clip_grad_norm_(self.shards, max_norm)
        self.optimizer.step()
        for flat in self.flats:
            AllGather(flat.shard, flat.full).wait()
        return norm

    @torch.no_grad()
    def _average_gradients(self) -> None:
        for flat in self.flats:
            parts = flat.parts(flat.gradient)
            for parameter, part in zip(flat.parameters, parts, strict=True):
                grad = parameter.grad
                if grad is None:
                    part.zero_()
                elif grad.is_sparse or grad.data_ptr() != part.data_ptr():
                    part.copy_(grad.to_dense())  # as after module.zero_grad()
                parameter.grad = part
            flat.gradient /= dist.get_world_size()
            dist.all_reduce(flat.gradient)
            flat.shard.grad = flat.own(flat.gradient)

    def _prepare_gradients(self) -> None:
        # backward() adds to a gradient that is there: none has to be copied later.
        for flat in self.flats:
            flat.gradient = torch.zeros_like(flat.full)
            parts = flat.parts(flat.gradient)
            for parameter, part in zip(flat.parameters, parts, strict=True):
                parameter.grad = part

    def zero_grad(self) -> None:
        """Set the gradients to zero. They are parts of flat tensors, which stay."""
        for flat in self.flats:
            flat.gradient.zero_()


def clip_grad_norm_(shards: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients down if their norm, over all ranks, exceeds `max_norm`.

    The one in torch.nn.utils sees a rank's own part alone: each rank would scale its
    part by a factor of its own. Every rank calls; cost: an all-reduce of one number.

    Returns:
        The norm before.
    """
    shards = list(shards)
    grads = [shard.grad for shard in shards if shard.grad is not None]
    # In float32 at least: of a sum in bfloat16 only 8 bits would be right.
    own = [
        torch.linalg.vector_norm(
            grad, dtype=torch.promote_types(grad.dtype, torch.float32)
        ).square()
        for grad in grads
    ]
    total = torch.stack(own or [torch.zeros((), device=shards[0].device)]).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
