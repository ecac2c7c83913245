"""Fully sharded data parallel, in rungs. Each trains as DDP does, with less memory.

    0  shard, unshard      cut a tensor into equal parts, one for each rank, and back
       reduce_scatter      each rank gets its part of the sum over the ranks
    1  ShardedOptimizer    ZeRO-1: optimizer state for one's own part of the parameters
    2  ShardedGradients    ZeRO-2: gradients of one's own part, too
    3  Unit                parameters, too; whole only while the unit runs
    4  FSDP                ZeRO-3: units that are gathered and freed in time
    5  checkpoints         whole ones for any number of ranks, sharded ones for the same

    model = FSDP(module, units=[*module.layers])
    optimizer = torch.optim.AdamW(model.parameters())        # after, over the shards
    for inputs, labels in batches_of_this_rank:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

A *unit* is a module whose parameters travel together: one behind another in one flat
tensor, with zeros behind them so that n ranks get equal parts. Every rank makes the
same calls, uses the same units in the same order, and gives batches of the same size.

The optimizer sees flat tensors. It must treat each element by itself, as SGD, Adam and
AdamW do; Muon, LAMB or Adafactor look at whole matrices, and would do something else.
An unused parameter counts as a gradient of zeros: with ZeRO-1 always, later if its unit
has others that are used. (With DDP it has no gradient, and the optimizer skips it.)

Bytes a rank keeps, for P parameters in fp32, n ranks and Adam (K = 8 bytes of state):

    DDP 4P + 4P + 8P      ZeRO-1 4P + 4P + 8P/n      ZeRO-2 4P + 4P/n + 8P/n
    FSDP 4P/n + 4P/n + 8P/n, and whole units for as long as they are needed

Bytes a rank sends in a step, for S bytes of parameters: (n-1)/n of 2S with DDP and
ZeRO-2; of 3S with ZeRO-1, which all-reduces gradients here, and with FSDP, which
gathers parameters twice.

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, arXiv 1910.02054; Y. Zhao et al., "PyTorch FSDP: Experiences
on Scaling Fully Sharded Data Parallel", VLDB 16 (2023), arXiv 2304.11277.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map


# ---------------------------------------------------------------- rung 0: the pieces
def padded(flat: Tensor, world_size: int) -> Tensor:
    """A copy with zeros behind it, so that `world_size` divides its length."""
    return F.pad(flat, (0, -flat.numel() % world_size))


@torch.no_grad()
def shard(
    tensor: Tensor, rank: int | None = None, world_size: int | None = None
) -> Tensor:
    """A copy of the part of `tensor` that a rank owns. Nothing is sent.

    Args:
        tensor: of any shape, the same on every rank. It is flattened and padded.
        rank, world_size: whose part; by default this rank's.

    Returns:
        ceil(tensor.numel() / world_size) elements, 1-D.
    """
    rank = dist.get_rank() if rank is None else rank
    n = dist.get_world_size() if world_size is None else world_size
    if not 0 <= rank < n:
        raise ValueError(f"rank is {rank}; of {n} ranks the last is rank {n - 1}")
    return padded(tensor.reshape(-1), n).view(n, -1)[rank].clone()


def all_gather(shard: Tensor) -> Tensor:
    """The shards of all ranks one behind another, (k,) -> (n·k,). Every rank calls.

    Cost for a result of S bytes: each rank sends (n-1)/n·S.
    """
    return AllGather(shard, shard.new_empty(dist.get_world_size() * len(shard))).wait()


def unshard(shard: Tensor, shape: Sequence[int]) -> Tensor:
    """The whole tensor again: gather, cut the padding off. Every rank calls."""
    return all_gather(shard)[: math.prod(shape)].view(tuple(shape))


def reduce_scatter(flat: Tensor) -> Tensor:
    """This rank's part of the sum over the ranks, (n·k,) -> (k,). Every rank calls.

    One rank alone gets `flat` itself.

    Cost for S bytes: each rank sends (n-1)/n·S. Memory while it runs: `flat` and the
    result; with gloo also (n-1)/n·S for what arrives.

    Raises:
        ValueError: the ranks cannot share `flat` equally.
    """
    n = dist.get_world_size()
    if flat.dim() != 1 or flat.numel() % n:
        raise ValueError(
            f"flat has the shape {tuple(flat.shape)}; {n} ranks can share a tensor of "
            f"one dimension whose length is a multiple of {n}. Flatten it, and use "
            f"padded(flat, {n})"
        )
    return ReduceScatter(flat).wait()


class AllGather:
    """A gathering on its way into `flat`, which is whole after `wait()`.

    NCCL does it in place. gloo gathers into a copy of the whole tensor, and copies it
    once more: so with gloo each rank sends its part to each other rank directly.
    """

    @torch.no_grad()
    def __init__(self, shard: Tensor, flat: Tensor) -> None:
        self.shard, self.flat = shard, flat
        if dist.get_backend() == "gloo":
            chunks = flat.view(dist.get_world_size(), -1)
            chunks[dist.get_rank()] = shard
            self.requests = _to_each(lambda rank: shard, lambda rank: chunks[rank])
        else:
            # Newer versions of torch have another name for it.
            native = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            self.requests = [native(flat, shard, async_op=True)]

    def wait(self) -> Tensor:
        """`flat`."""
        for request in self.requests:
            request.wait()
        return self.flat


class ReduceScatter:
    """A reduce-scatter of `flat` on its way. Until `wait()`, nobody may write to it.

    NCCL can do it. gloo cannot: there `dist.reduce_scatter_single` is an all-reduce of
    a copy, of which each rank takes its part. That sends twice the bytes, so with gloo
    each rank sends each part to its owner directly. The owner adds them up in the order
    of the ranks, and the sum is the same in every run.
    """

    @torch.no_grad()
    def __init__(self, flat: Tensor) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        chunks = flat.view(n, -1)
        if dist.get_backend() == "gloo":
            self.parts = [
                chunk if number == rank else torch.empty_like(chunk)
                for number, chunk in enumerate(chunks)
            ]
            self.requests = _to_each(chunks.__getitem__, self.parts.__getitem__)
        else:
            self.parts = [torch.empty_like(chunks[0])]
            native = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            self.requests = [native(self.parts[0], flat, async_op=True)]
        self.flat = flat

    @torch.no_grad()
    def wait(self) -> Tensor:
        """This rank's part of the sum; of one rank, `flat` itself. It is let go of."""
        for request in self.requests:
            request.wait()
        total, *others = self.parts
        for number, part in enumerate(others):
            # The first sum is a new tensor: a part of `flat` would keep all of it.
            total = total + part if number == 0 else total.add_(part)
        del self.flat, self.parts, self.requests
        return total


def _to_each(
    sent: Callable[[int], Tensor], received: Callable[[int], Tensor]
) -> list[dist.Work]:
    """Begin to exchange a message with each other rank, the next one first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    requests = []
    for distance in range(1, n):
        after, before = (rank + distance) % n, (rank - distance) % n
        requests.append(dist.irecv(received(before), before))
        requests.append(dist.isend(sent(after), after))
    return requests


# ------------------------------------------------------------------- rung 1: ZeRO-1
class FlatParameter:
    """Parameters of a unit, one behind another in one tensor.

    They stay what they are, and the module works as before; but their values lie in
    `full` from now on. An optimizer gets `shard`, this rank's part of it.

    Attributes:
        name: that of the unit.
        names, parameters: those of the module.
        full: all values, (n·k,). Those of rank 0, on every rank.
        shard: this rank's part, (k,): a view of `full`.
        gradient: all gradients, (n·k,), or None.

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
            if hasattr(parameter, "_sharded_as"):
                raise ValueError(
                    f"{name!r} is sharded already, as {parameter._sharded_as!r}. A "
                    "module can be sharded once: make a new one"
                )
            parameter._sharded_as = name
        _watch_optimizers()
        sizes = [parameter.numel() for parameter in self.parameters]
        self.starts = [0, *accumulate(sizes)]
        flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        dist.broadcast(flat, 0)
        self.full = padded(flat, dist.get_world_size())
        self.point_to(self.full)
        trained = self.parameters[0].requires_grad
        self.shard = nn.Parameter(self.own(self.full), requires_grad=trained)
        self.gradient: Tensor | None = None
        self.reduce_dtype = self.shard.dtype

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

    def point_to(self, flat: Tensor) -> None:
        """Let the parameters' values lie in `flat`."""
        for parameter, part in zip(self.parameters, self.parts(flat), strict=True):
            parameter.data = part


class ShardedOptimizer:
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
        optimizer: that of torch. A learning-rate schedule needs it.

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
                if parameter.grad is None:
                    part.zero_()
                elif parameter.grad.data_ptr() != part.data_ptr():
                    part.copy_(parameter.grad)  # as after module.zero_grad()
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

    def optimizer_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """`optimizer_state_dict` of the optimizer: see rung 5."""
        return optimizer_state_dict(self.flats, self.optimizer, rank0_only=rank0_only)

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """`load_optimizer_state_dict` of the optimizer: see rung 5."""
        load_optimizer_state_dict(self.flats, self.optimizer, state)


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


# ------------------------------------------------------------------- rung 2: ZeRO-2
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
        pass  # backward() has done it

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
            flat.missing = len(flat.parameters)
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


# ------------------------------------------- rung 3: parameters that come and go
class ShardedFlatParameter(FlatParameter):
    """A flat parameter of which only the shard stays. `full` comes and goes.

    Its storage is emptied and filled again, but remains the same storage: what autograd
    has saved of the parameters are views of it, and sees the values come back.

    Args:
        param_dtype: that of `full`, to compute in; by default the parameters'.
        reduce_dtype: that of gradients on their way to their owner; by default
            `param_dtype`.
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
        self.full = torch.empty_like(self.full, dtype=param_dtype)
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

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to fetch the other parts, unless all is here or under way."""
        if self.gathered or self.gathering is not None:
            return
        self.full.untyped_storage().resize_(self.bytes)
        self.gathering = AllGather(self.shard.to(self.full.dtype), self.full)

    def gather(self) -> None:
        """Let all be here when this returns."""
        self.start_gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.gathered = None, True
            self._set(self.whole)

    def free(self) -> None:
        """Give the memory back."""
        if self.gathering is not None:
            self.gather()
        if self.gathered:
            self._set(self.absent)
            self.full.untyped_storage().resize_(0)
            self.gathered = False

    def _set(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value


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


# ------------------------------------------------------------------- rung 4: ZeRO-3
class FSDP(nn.Module):
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
            units share a parameter.

    A gradient of gradients (create_graph=True) is not possible: between the two passes
    the parameters are freed.

    Cost of a step for S bytes of parameters: two all-gathers and a reduce-scatter of
    each unit, so each rank sends 3(n-1)/n·S, half more than with DDP. With
    `reshard_after_forward=False` it is one all-gather, and as much as with DDP.
    """

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
        self.module = module
        self.reshard_after_forward = reshard_after_forward
        self.prefetch, self.param_dtype = prefetch, param_dtype
        self.units = []
        for name, named in parameters_by_unit(module, units).items():
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
        # As they ran in the last forward: begun in this order, and ended in that.
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
            check = partial(self._refuse_if_absent, flat_of[id(p)], name)
            owner.register_forward_pre_hook(check)

    def _begin(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward of a unit."""
        recomputed = torch._C._current_graph_task_id() != -1  # in backward()
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
        if torch._C._current_graph_task_id() != -1:
            return
        self.ended.append(unit)
        leaves = tree_leaves(output)
        self._refuse_own_parameters(unit, leaves)
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
            self._refuse_if_hidden(unit, leaves)
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

    @staticmethod
    def _refuse_own_parameters(unit: Unit, leaves: list[Any]) -> None:
        tensors = [value for value in leaves if isinstance(value, Tensor)]
        for flat in unit.flats:
            if any(torch._C._is_alias_of(value, flat.full) for value in tensors):
                raise RuntimeError(
                    f"unit {unit.name or 'root'!r} returns one of its own parameters, "
                    "or a view of one. Their memory is freed when the unit is done, "
                    "and that tensor would be lost: return a copy, made with .clone()"
                )

    @staticmethod
    def _refuse_if_hidden(unit: Unit, leaves: list[Any]) -> None:
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

    @staticmethod
    def _refuse_if_absent(flat: ShardedFlatParameter, name: str, *call: Any) -> None:
        if not flat.gathered:
            raise RuntimeError(
                f"the module of {name!r} is called while the parameters of its unit "
                f"({flat.name}) are sharded. They are gathered when the unit is "
                "called: call the FSDP model, or give that module as a unit"
            )

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

    # ------------------------------------------------------------ rung 5: checkpoints
    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Copies of all tensors, as in the plain module. Every rank calls it.

        Args:
            rank0_only: the other ranks get {}, and need memory for one unit only.

        Cost: an all-gather of each unit.
        """
        keep = not rank0_only or dist.get_rank() == 0
        values = {}
        for flat in self.flats:
            parts = flat.parts(all_gather(flat.shard))
            if keep:
                for parameter, part in zip(flat.parameters, parts, strict=True):
                    values[id(parameter)] = part.clone()
        state = self._tensors() if keep else {}
        return {
            name: values[id(value)] if id(value) in values else value.clone()
            for name, value in state.items()
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
            "state",
            {n: v.shape for n, v in state.items() if isinstance(v, Tensor)},
            {n: v.shape for n, v in mine.items()},
        )
        for flat in self.flats:
            values = [state[name].reshape(-1) for name in flat.names]
            flat.shard.copy_(shard(torch.cat(values)))
        for name, value in mine.items():
            if not isinstance(value, nn.Parameter):
                value.copy_(state[name])

    def sharded_state_dict(self) -> dict[str, Any]:
        """What this rank keeps, for the same rank of as many. Nothing is sent."""
        shards = {flat.name: flat.shard.detach() for flat in self.flats}
        mine = self._tensors()
        buffers = {n: v for n, v in mine.items() if not isinstance(v, nn.Parameter)}
        rank, n = dist.get_rank(), dist.get_world_size()
        return {"rank": rank, "world_size": n, "shards": shards, "buffers": buffers}

    @torch.no_grad()
    def load_sharded_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `sharded_state_dict` gave this rank.

        Raises:
            ValueError: it is another rank's, or that of another number of ranks, or the
                units are others.
        """
        mine = self.sharded_state_dict()
        saved, here = ((s["rank"], s["world_size"]) for s in (state, mine))
        if saved != here:
            raise ValueError(
                "this sharded state was saved by rank {} of {}, and is loaded by rank "
                "{} of {}. Only the same rank of as many can use it; state_dict() "
                "saves one for any number of ranks".format(*saved, *here)
            )
        for kind in ("shards", "buffers"):
            shapes = [{n: v.shape for n, v in s[kind].items()} for s in (state, mine)]
            _compare(kind, *shapes)
            for name, value in mine[kind].items():
                value.copy_(state[kind][name])

    def optimizer_state_dict(
        self, optimizer: Optimizer, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """`optimizer_state_dict` of the shards' optimizer."""
        return optimizer_state_dict(self.flats, optimizer, rank0_only=rank0_only)

    def load_optimizer_state_dict(
        self, optimizer: Optimizer, state: dict[str, Any]
    ) -> None:
        """`load_optimizer_state_dict` of the shards' optimizer."""
        load_optimizer_state_dict(self.flats, optimizer, state)


def optimizer_state_dict(
    flats: Iterable[FlatParameter], optimizer: Optimizer, *, rank0_only: bool = False
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
    keep = not rank0_only or dist.get_rank() == 0
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
            if keep:
                for name, part in zip(flat.names, values, strict=True):
                    part = part.clone() if isinstance(part, Tensor) else part
                    state.setdefault(name, {})[key] = part
    groups = [
        {**group, "params": [n for p in group["params"] for n in names[id(p)]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups} if keep else {}


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


# ------------------------------------------------------------------------ what it takes
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
        value = tensor.detach().contiguous()
        dist.broadcast(value, 0)
        tensor.copy_(value)


def _compare(what: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys())
    shapes = [
        f"{name} is {tuple(given[name])} and not {tuple(expected[name])}"
        for name in expected
        if name in given and given[name] != expected[name]
    ]
    if missing or unknown or shapes:
        raise ValueError(
            f"the {what} to load does not fit. Missing: {missing}; unknown: {unknown}; "
            f"other shapes: {shapes}. It must come from the same module, and a sharded "
            "one from the same units"
        )


@cache
def _watch_optimizers() -> None:
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
