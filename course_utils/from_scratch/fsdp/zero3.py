"""Rung 4, ZeRO stage 3: each rank keeps one n-th of parameters, gradients and state."""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from .checkpoints import StateDicts
from .flat_parameter import broadcast, parameters_by_unit
from .refusals import (
    Sharded,
    refuse_if_absent,
    refuse_if_hidden,
    refuse_own_parameters,
    refuse_unlike_units,
)
from .units import ShardedFlatParameter, Unit
from .zero1 import clip_grad_norm_
from .zero2 import GradientReducer


class FSDP(Sharded, StateDicts, nn.Module):
    """Shards parameters, gradients and optimizer state: each rank keeps one n-th.

    A unit's parameters are gathered before its forward and freed after it, gathered
    again before its backward and freed after it; then its gradients are
    reduce-scattered. `parameters()` are the shards: flat, and of the module's dtype.

        model = FSDP(module, units=[*module.layers], prefetch=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    Args:
        module: overwritten with the parameters and buffers of rank 0. Its parameters
            have values only while their unit runs, nan otherwise. Its units return
            tensors, or tuples, lists and dicts of them; in other objects they would
            not be found. None returns a parameter of its own, or a view of one.
        units: submodules that are units. What is in none is the root unit, the module
            itself; that stays gathered from the beginning of forward to the end.
        reshard_after_forward: whether units are freed after their forward. By default
            all but the root are, which backward needs first. False saves the second
            gathering, and costs the memory.
        prefetch: so many units may be gathered ahead of the one that runs. Their order
            is that of the last forward.
        max_reduces: see `GradientReducer`.
        param_dtype, reduce_dtype: see `ShardedFlatParameter`. With
            `param_dtype=torch.bfloat16` the units' floating-point inputs are converted.

    Raises:
        ValueError: a unit is no submodule; parameters of one unit have several dtypes;
            units share a parameter; `prefetch` is negative; the ranks give other
            modules, units or settings.

    A gradient of gradients (create_graph=True) is not possible: between the two passes
    the parameters are freed.

    Cost of a step for S bytes of parameters: two all-gathers and a reduce-scatter of
    each unit, so each rank sends 3(n-1)/n·S, half more than with DDP. With
    `reshard_after_forward=False` it is one all-gather, and as much as with DDP.

    Its `zero_grad()`, or the optimizer's, must be called: that of the module inside
    does not see the shards, and their gradients would add up.
    """

    # Which hook runs when, in a step (prefetch comes on top, in `_gather`):
    #
    #   _begin           before a unit's forward: gather
    #   _end             after it: free, and watch for the backward
    #   _enter_backward  the gradient of an output of the unit is known: gather again
    #   _collect         (of the reducer) a parameter has its gradient: keep it flat
    #   _left            the gradients of the inputs of one call of the unit are known
    #   _end_backward    when backward() is over: free what is left
    #
    # In the backward a unit is freed, and its gradients are sent, when both are there:
    # the last of its parameters' gradients, and those of the inputs of all its calls.
    # Either may come last.
    #
    # To gather ahead, the order must be known. `begun` and `ended` note in which order
    # the units' forwards begin and end; `expected` has the units that are still to be
    # gathered in this pass: in the forward as they began in the last one, in the
    # backward as they ended in this one, from the last to the first.
    #
    # With activation checkpointing, forwards run inside backward(), once more. These
    # gather, if needed, but note nothing, and free nothing: the backward will.

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] = (),
        *,
        reshard_after_forward: bool | None = None,
        prefetch: int = 1,
        max_reduces: int | None = 1,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}: so many units, 0 or more")
        self.module = module
        self.reshard_after_forward = reshard_after_forward
        self.prefetch, self.param_dtype = prefetch, param_dtype
        self.units = []
        groups = parameters_by_unit(module, units)
        refuse_unlike_units(
            module,
            groups,
            reshard_after_forward=reshard_after_forward,
            prefetch=prefetch,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
        )
        for name, named in groups.items():
            flats = []
            for suffix, trained in (("", True), (".frozen", False)):
                alike = {n: p for n, p in named.items() if p.requires_grad is trained}
                if alike:
                    flat = ShardedFlatParameter(
                        (name or "root") + suffix, alike, param_dtype, reduce_dtype
                    )
                    flats.append(flat)
            self.units.append(Unit(name, module.get_submodule(name), flats))
        broadcast(module.buffers())
        self.flats = [flat for unit in self.units for flat in unit.flats]
        trained = [flat for flat in self.flats if flat.shard.requires_grad]
        unit_of = {id(flat): unit for unit in self.units for flat in unit.flats}
        self.reducer = GradientReducer(
            trained, max_reduces, lambda flat: self._free_if_done(unit_of[id(flat)])
        )
        self.begun = self.ended = [unit for unit in self.units if unit.flats]
        self.expected: list[Unit] = []
        self.in_backward = False
        self._watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        return self.module(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The shards, for the optimizer."""
        return (shard for _, shard in self.named_parameters(recurse=recurse))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, by the names of their units."""
        dot = "." if prefix else ""
        return ((prefix + dot + flat.name, flat.shard) for flat in self.flats)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """`clip_grad_norm_` of the shards. Call it between backward() and step()."""
        return clip_grad_norm_(self.parameters(), max_norm)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let whole gradients add up on each rank, for the next backward() to send.

        It saves reduce-scatters and costs whole gradients. Without it gradients of many
        batches add up, too, in the shards.
        """
        return self.reducer.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those of `no_sync` as well."""
        super().zero_grad(set_to_none)
        self.reducer.reset()

    def _watch(self) -> None:
        for unit in self.units:
            begin, end = partial(self._begin, unit), partial(self._end, unit)
            unit.module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(end)
        flat_of = {id(p): flat for flat in self.flats for p in flat.parameters}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            owner = self.module.get_submodule(name.rpartition(".")[0])
            check = partial(refuse_if_absent, flat_of[id(p)], name)
            owner.register_forward_pre_hook(check)

    def _begin(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward of a unit."""
        recomputed = is_recomputed()
        if unit.name == "" and not recomputed:
            if self.in_backward:  # of a backward() that failed
                self.in_backward = False
                self.reducer.reset()
            for each in self.units:
                each.free()
                each.calls = 0
            self.expected, self.begun, self.ended = self.begun, [], []
        self._gather(unit)
        inputs = []

        def enter(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.to(self.param_dtype or value.dtype)
                if value.requires_grad and not recomputed:
                    # Its gradient is that by this unit alone, and known when it ends.
                    value = value.view_as(value)
                    inputs.append(value)
            return value

        args, kwargs = tree_map(enter, (args, kwargs))
        if not recomputed:
            self.begun.append(unit)
            if inputs and torch.is_grad_enabled():
                unit.calls += 1
                register_multi_grad_hook(inputs, partial(self._left, unit))
        return args, kwargs

    def _end(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward of a unit."""
        if is_recomputed():
            return
        self.ended.append(unit)
        leaves = tree_leaves(output)
        refuse_own_parameters(unit, leaves)
        reshard = self.reshard_after_forward
        if not torch.is_grad_enabled():
            reshard = True
        else:
            enter = partial(self._enter_backward, unit)
            for value in leaves:
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(enter)
                    # A view that is changed in place later gets a new history, without
                    # this hook. The history of what it is a view of stays part of it.
                    base = value._base
                    if base is not None and base.grad_fn is not None:
                        base.register_hook(enter)
            refuse_if_hidden(unit, leaves)
        if reshard or (reshard is None and unit.name):
            unit.free()
        if unit.name == "":
            for each in self.units:
                if each not in self.begun:  # gathered in vain
                    each.free()

    def _enter_backward(self, unit: Unit, gradient: Tensor) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
            self.expected = self.ended[::-1]
        self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        unit.gather()
        if unit in self.expected:
            self.expected = self.expected[self.expected.index(unit) + 1 :]
        for following in self.expected[: self.prefetch]:
            following.start_gather()

    def _left(self, unit: Unit, gradients: Any) -> None:
        """Backward knows the gradients of the inputs of a call."""
        unit.calls -= 1
        self._free_if_done(unit)

    def _free_if_done(self, unit: Unit) -> None:
        trained = [flat for flat in unit.flats if flat.shard.requires_grad]
        if unit.calls <= 0 and not any(flat.missing for flat in trained):
            unit.free()
            for flat in trained:
                self.reducer.reduce(flat)

    def _end_backward(self) -> None:
        self.in_backward = False
        for unit in self.units:
            unit.free()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "the parameters are sharded, and can be moved or converted no more: use "
            ".to(), .half() and the like on the module, before FSDP(module), or leave "
            "it out if all is where it should be"
        )

    def requires_grad_(self, requires_grad: bool = True) -> "FSDP":
        raise RuntimeError(
            "the parameters are sharded, and what is trained is decided: freeze or "
            "unfreeze parameters of the module before FSDP(module)"
        )


def is_recomputed() -> bool:
    """Is this forward called by backward(), for activation checkpointing?"""
    return torch._C._current_graph_task_id() != -1
