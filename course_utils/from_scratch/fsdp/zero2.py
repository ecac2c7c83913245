"""Rung 2, ZeRO stage 2: each rank keeps one n-th of the gradients, too."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import Optimizer

from .flat_parameter import FlatParameter
from .pieces import ReduceScatter
from .zero1 import ShardedOptimizer


class ShardedGradients(ShardedOptimizer):
    """A `ShardedOptimizer` whose gradients are sharded, too.

    When backward() has all gradients of a unit, they are reduce-scattered, and only
    this rank's part is kept. Parameters have no `.grad` afterwards. So call `zero_grad`
    of this: that of the module finds nothing, and the shards' gradients would add up.

    Args:
        units: submodules whose gradients travel together; all others form one more
            unit. Small units let go of their gradients early.
        max_reduces: see `GradientReducer`.

    Cost of a step for S bytes: a reduce-scatter and an all-gather of S, so each rank
    sends 2(n-1)/n·S, as with DDP. Memory: whole gradients of one unit, and those of
    the units that are under way.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        units: Iterable[nn.Module] = (),
        max_reduces: int | None = 1,
        **defaults: Any,
    ) -> None:
        super().__init__(module, optimizer_class, units=units, **defaults)
        self.reducer = GradientReducer(self.flats, max_reduces)

    def _prepare_gradients(self) -> None:
        pass

    def _average_gradients(self) -> None:
        self.reducer.end()  # backward() has done it, if it did not fail

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()
        self.reducer.reset()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let whole gradients add up on each rank, for the next backward() to send."""
        return self.reducer.no_sync()


class GradientReducer:
    """Reduce-scatters the gradients of each flat parameter, during backward().

    Args:
        flats: the flat parameters. After backward() their shards have `.grad`, the mean
            over the ranks; it is added to what is there.
        max_reduces: so many reduce-scatters may be under way. Each keeps the whole
            gradients of its unit, and with gloo as much again for what it receives.
            None: no bound, all wait until the end, and the memory is that of the whole
            model. 0: backward() waits for each.
        ready: called with a flat parameter when its gradients are there. By default
            `reduce`.
    """

    def __init__(
        self,
        flats: list[FlatParameter],
        max_reduces: int | None = 1,
        ready: Callable[[FlatParameter], None] | None = None,
    ) -> None:
        self.max_reduces = math.inf if max_reduces is None else max_reduces
        self.flats, self.ready, self.sync = flats, ready or self.reduce, True
        self.under_way: deque[tuple[FlatParameter, ReduceScatter]] = deque()
        self.in_backward = False
        for flat in flats:
            for place, parameter in enumerate(flat.parameters):
                hook = partial(self._collect, flat, place)
                parameter.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def _collect(self, flat: FlatParameter, place: int, parameter: Tensor) -> None:
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self._finish)
        if flat.gradient is None:
            flat.gradient = torch.zeros_like(flat.full, dtype=flat.reduce_dtype)
        part = flat.part(flat.gradient, place)
        part.add_(parameter.grad, alpha=1 / dist.get_world_size())
        parameter.grad = None
        flat.missing -= 1
        if flat.missing == 0:
            self.ready(flat)

    def reduce(self, flat: FlatParameter) -> None:
        """Send the gradients off, if they are to be sent and there are any."""
        flat.missing = len(flat.parameters)
        if self.sync and flat.gradient is not None:
            while len(self.under_way) > max(self.max_reduces - 1, 0):
                self._receive()
            self.under_way.append((flat, ReduceScatter(flat.gradient)))
            flat.gradient = None
            if self.max_reduces == 0:
                self._receive()

    def _receive(self) -> None:
        flat, reduction = self.under_way.popleft()
        mean = reduction.wait().to(flat.shard.dtype)
        flat.shard.grad = mean if flat.shard.grad is None else flat.shard.grad + mean

    def _finish(self) -> None:
        """At the end of backward(): units of which some parameters were not used."""
        for flat in self.flats:
            self.reduce(flat)
        while self.under_way:
            self._receive()
        self.in_backward = False

    def end(self) -> None:
        """Receive what was sent since a backward() that failed, which never ended."""
        if self.in_backward:
            self._finish()

    def reset(self) -> None:
        """Drop whole gradients: of no_sync(), or left by a backward() that failed."""
        self.in_backward = False
        while self.under_way:
            self.under_way.popleft()[1].wait()
        for flat in self.flats:
            flat.missing, flat.gradient = len(flat.parameters), None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let whole gradients add up on each rank, for the next backward() to send."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before
