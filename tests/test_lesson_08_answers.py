"""Lesson 08: right answers as people write them, and wrong ones no near miss covers."""

import pickle
import threading

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from course_utils.notebook.check import find_task
from course_utils.notebook.ours import solved
from course_utils.tasks.memory import alive, new_bytes
from course_utils.theory import costs
from tests.answers import Answers

ANSWERS = Answers()

# ------------------------------------------------------------------- 08.zero_table


@ANSWERS.right("08.zero_table")
def right_table(psi, n, k):
    return [
        (4 + k) * psi,
        (4 + k / n) * psi,
        (2 + (2 + k) / n) * psi,
        (4 + k) / n * psi,
    ]


@ANSWERS.right("08.zero_table")
def by_stages(psi, n, k):
    parts = torch.tensor([k, 2, 2], dtype=torch.float64) * psi
    divided = [[1, 1, 1], [n, 1, 1], [n, n, 1], [n, n, n]]
    return (parts / torch.tensor(divided)).sum(1)


@ANSWERS.right("08.zero_table")
def part_by_part(parameters, world_size, optimizer_bytes):
    whole, table = [optimizer_bytes, 2, 2], []
    for stage in range(4):
        parts = [x / world_size if i < stage else x for i, x in enumerate(whole)]
        table.append(parameters * sum(parts))
    return tuple(table)


@ANSWERS.right("08.zero_table")
def saved_by_stage(parameters, world_size, optimizer_bytes):
    saved = np.cumsum([0, optimizer_bytes, 2, 2]) * (1 - 1 / world_size)
    return parameters * (4 + optimizer_bytes - saved)


def test_the_predicted_peak_is_that_of_the_formula():
    memory = costs.fsdp_memory([250_000_000] * 32, 8, prefetch=1)
    in_bfloat16 = memory.parameter_peak / 2
    assert in_bfloat16 == find_task("08.predict_peak").answer * 1_000_000


# -------------------------------------------------------------------- 08.flat_shard


@ANSWERS.right("08.flat_shard")
class Shard:
    """What others below are made from, by changing one thing."""

    def __init__(self, tensors):
        self.shapes = [tensor.shape for tensor in tensors]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        flat = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
        self.shard = flat.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def gathered(self):
        shards = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, self.shard)
        return torch.cat(shards)

    def unshard(self):
        flat, tensors = self.gathered(), []
        for shape in self.shapes:
            part, flat = flat[: shape.numel()], flat[shape.numel() :]
            tensors.append(part.reshape(shape))
        return tensors


@ANSWERS.right("08.flat_shard")
class WithSizesAndTemplates(Shard):
    """Whole numbers, and tensors without memory: no copy of anything."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.sizes = torch.tensor([tensor.numel() for tensor in tensors])
        self.ends = np.cumsum([tensor.numel() for tensor in tensors])
        self.templates = [tensor.to("meta") for tensor in tensors]


@ANSWERS.right("08.flat_shard")
class ViewsOnOneRank(Shard):
    """Nothing to gather there: views of the shard are the tensors."""

    def gathered(self):
        return super().gathered() if dist.get_world_size() > 1 else self.shard


@ANSWERS.right("08.flat_shard")
class InAnotherWay:
    """Copies into zeros, and gathers into one tensor by sending to everybody."""

    def __init__(self, tensors):
        n, rank = dist.get_world_size(), dist.get_rank()
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        numbers = [x for tensor in tensors for x in tensor.flatten().tolist()]
        size = (len(numbers) + n - 1) // n
        mine = numbers[rank * size : (rank + 1) * size]
        self.shard = torch.zeros(size)
        self.shard[: len(mine)] = torch.tensor(mine)

    def unshard(self):
        n, rank = dist.get_world_size(), dist.get_rank()
        rows = torch.zeros(n, len(self.shard))
        rows[rank] = self.shard
        dist.all_reduce(rows)
        whole, start, tensors = rows.flatten(), 0, []
        for shape in self.shapes:
            stop = start + torch.Size(shape).numel()
            tensors.append(whole[start:stop].clone().reshape(shape))
            start = stop
        return tuple(tensors)


@ANSWERS.right("08.flat_shard")
class IntoOneTensor(Shard):
    def gathered(self):
        whole = self.shard.new_empty(dist.get_world_size() * self.shard.numel())
        dist.all_gather_into_tensor(whole, self.shard)
        return whole


@ANSWERS.right("08.flat_shard")
class ByBroadcasts(Shard):
    def gathered(self):
        pieces = [self.shard.clone() for _ in range(dist.get_world_size())]
        for owner, piece in enumerate(pieces):
            dist.broadcast(piece, owner)
        return torch.hstack(pieces)


@ANSWERS.wrong("08.flat_shard", "wrong", "of the given tensors, keep the shapes only")
class KeepsTheNumbersInTheClass(Shard):
    def __init__(self, tensors):
        super().__init__(tensors)
        type(self).kept = [tensor.tolist() for tensor in tensors]


@ANSWERS.wrong("08.flat_shard", "wrong", "What unshard() has gathered stays")
class KeepsTheWholeInNumPy(Shard):
    def gathered(self):
        self.whole = super().gathered().numpy().copy()
        return torch.tensor(self.whole)


# ---------------------------------------------------------------- 08.reduce_scatter


def rows_of(gradient):
    """The n pieces that belong to this rank, one of each rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    rows = [torch.empty_like(pieces[0]) for _ in range(n)]
    rows[rank] = pieces[rank].clone()
    others = [other for other in range(n) if other != rank]
    requests = [dist.isend(pieces[other], other) for other in others]
    requests += [dist.irecv(rows[other], other) for other in others]
    for request in requests:
        request.wait()
    return rows


@ANSWERS.right("08.reduce_scatter")
def direct(gradient):
    rows = rows_of(gradient)
    return sum(rows) / len(rows)


@ANSWERS.right("08.reduce_scatter")
def by_all_to_all(gradient):
    rows = torch.empty_like(gradient)
    dist.all_to_all_single(rows, gradient.clone())
    return rows.view(dist.get_world_size(), -1).mean(dim=0)


@ANSWERS.wrong("08.reduce_scatter", "wrong", "Name the source:")
def from_anybody(gradient):
    """With two calls in a row, a piece of the second may be added in the first."""
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    total, piece = pieces[rank].clone(), torch.empty_like(pieces[rank])
    others = [other for other in range(n) if other != rank]
    requests = [dist.isend(pieces[other], other) for other in others]
    for _ in others:
        dist.recv(piece)
        total += piece
    for request in requests:
        request.wait()
    return total / n


@ANSWERS.right("08.reduce_scatter")
def from_anybody_and_a_barrier(gradient):
    part = from_anybody(gradient)
    dist.barrier()
    return part


@ANSWERS.right("08.reduce_scatter")
def sent_by_threads(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = gradient.chunk(n)
    total = pieces[rank].clone()
    for step in range(1, n):
        piece, to = torch.empty_like(total), (rank + step) % n
        thread = threading.Thread(target=dist.send, args=(pieces[to], to))
        thread.start()
        dist.recv(piece, (rank - step) % n)
        thread.join()
        total += piece
    return total / n


@ANSWERS.right("08.reduce_scatter")
def one_reduce_for_each(gradient):
    n = dist.get_world_size()
    pieces = [piece / n for piece in gradient.chunk(n)]
    for owner, piece in enumerate(pieces):
        dist.reduce(piece, owner)
    return pieces[dist.get_rank()]


@ANSWERS.right("08.reduce_scatter")
def in_a_ring(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = list((gradient / n).chunk(n))
    for step in range(n - 1):
        incoming = torch.empty_like(pieces[0])
        request = dist.isend(pieces[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(incoming)  # no source: in a ring there is only one
        request.wait()
        pieces[(rank - step - 2) % n] += incoming
    return pieces[rank].clone()


@ANSWERS.right("08.reduce_scatter")
def one_scatter_of_each(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    total = 0
    for source in range(n):
        piece = gradient.new_empty(len(gradient) // n)
        dist.scatter(piece, list(gradient.chunk(n)) if rank == source else None, source)
        total = total + piece / n
    return total


@ANSWERS.right("08.reduce_scatter")
def in_a_batch(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    table, calls = gradient.reshape(n, -1), []
    mine = table.clone()
    for other in set(range(n)) - {rank}:
        calls.append(dist.P2POp(dist.isend, table[other], other))
        calls.append(dist.P2POp(dist.irecv, mine[other], other))
    for request in dist.batch_isend_irecv(calls) if calls else []:
        request.wait()
    return torch.einsum("ns->s", mine).div(n)


@ANSWERS.wrong("08.reduce_scatter", "wrong", "a view of a larger tensor")
def a_view_of_the_gradients_copy(gradient):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = list(gradient.clone().chunk(n))
    pieces[rank] += sum(rows_of(gradient)) - pieces[rank]
    return pieces[rank].div_(n)


@ANSWERS.wrong("08.reduce_scatter", "wrong", "but too much was sent. An all-reduce")
def all_reduced(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    n = dist.get_world_size()
    return total.chunk(n)[dist.get_rank()] / n


@ANSWERS.wrong("08.reduce_scatter", "wrong", "by the store or by")
def through_the_store(gradient):
    store, n = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    key = f"gradient of {len(gradient)}"
    store.set(f"{key} {dist.get_rank()}", pickle.dumps(gradient))
    total = sum(pickle.loads(store.get(f"{key} {other}")) for other in range(n))
    return total.chunk(n)[dist.get_rank()] / n


# ---------------------------------------------------------------------- 08.one_unit


# As given in the notebook.
exec("\n".join(solved("08.one_unit").before), given := {"__name__": "__main__"})
Unit = given["Unit"]


@ANSWERS.right("08.one_unit")
class GathersTwice(Unit):
    """What others below are made from, by changing one thing."""

    def forward(self, *args):
        self.gather()
        output = self.module(*args)
        self.free()
        output.register_hook(self.before_backward)
        return output

    def before_backward(self, grad):
        self.gather()

    def after_backward(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.members])
        flat = F.pad(flat, (0, len(self.whole) - len(flat)))
        part = self.reduce(flat)
        self.shard.grad = part if self.shard.grad is None else self.shard.grad + part
        self.clean()

    def reduce(self, flat):
        return direct(flat)

    def clean(self):
        for p in self.members:
            p.grad = None
        self.free()


@ANSWERS.right("08.one_unit")
class Recomputes(GathersTwice):
    """The second gather is that of the forward that is made again in the backward."""

    def forward(self, *args):
        def whole(*args):
            self.gather()
            return self.module(*args)

        output = torch.utils.checkpoint.checkpoint(whole, *args, use_reentrant=False)
        self.free()
        return output


@ANSWERS.right("08.one_unit")
class WithHooksOnTheModule(GathersTwice):
    """Forward hooks, and a pre-hook for the backward, where others call methods."""

    def __init__(self, module):
        super().__init__(module)
        module.register_forward_pre_hook(lambda module, args: self.gather())
        module.register_forward_hook(lambda module, args, output: self.free())
        module.register_full_backward_pre_hook(lambda module, grads: self.gather())

    def forward(self, *args):
        return self.module(*args)

    def reduce(self, flat):
        return by_all_to_all(flat)


@ANSWERS.right("08.one_unit")
class FillsZeros(GathersTwice):
    """Gives each gradient back when it is copied, and adds in place."""

    def after_backward(self):
        flat, start = torch.zeros(self.whole.shape), 0
        for p in self.members:
            flat[start : start + p.numel()] = p.grad.ravel()
            start += p.numel()
        self.clean()
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += in_a_ring(flat)


@ANSWERS.right("08.one_unit")
class AHookOnTheGraph(GathersTwice):
    def forward(self, *args):
        try:
            self.gather()
            output = self.module(*args)
            output.grad_fn.register_prehook(lambda grads: self.gather())
            return output
        finally:
            self.free()


@ANSWERS.wrong("08.one_unit", "wrong", "is the shard's gradient a view of it")
class KeepsAViewOfTheGradient(GathersTwice):
    def reduce(self, flat):
        mine = flat.clone().chunk(dist.get_world_size())[dist.get_rank()]
        return mine.copy_(direct(flat))


@ANSWERS.wrong("08.one_unit", "wrong", "autograd keeps until the backward")
class ComputesWithCopies(GathersTwice):
    def forward(self, *args):
        self.gather()
        copies = {name: p.clone() for name, p in self.module.named_parameters()}
        output = torch.func.functional_call(self.module, copies, args)
        self.free()
        output.register_hook(self.before_backward)
        return output


# ------------------------------------------------------------ 08.spot_the_optimizer


def train(model, batches, lr, units=None, **options):
    """The script with its first lines repaired; each unit gets the options."""
    for layer in units or [layer for layer in model if list(layer.parameters())]:
        fully_shard(layer, **options)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def whole_on_rank_0(model):
    """The others have one whole tensor at a time."""
    state = {}
    for name, p in model.named_parameters():
        tensor = p.full_tensor()
        if dist.get_rank() == 0:
            state[name] = tensor
    return state if dist.get_rank() == 0 else None


@ANSWERS.right("08.spot_the_optimizer")
def layers_first(model, batches, lr):
    train(model, batches, lr)
    return whole_on_rank_0(model)


@ANSWERS.right("08.spot_the_optimizer")
def every_layer(model, batches, lr):
    train(model, batches, lr, units=list(model))
    state = whole_on_rank_0(model)
    return {k: v.clone() for k, v in state.items()} if dist.get_rank() == 0 else None


@ANSWERS.right("08.spot_the_optimizer")
def last_layer_stays(model, batches, lr):
    """Its backward comes next, so it need not be freed."""
    fully_shard(model[-1], reshard_after_forward=False)
    train(model, batches, lr, units=model[:-1])
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = state_dict.get_model_state_dict(model, options=options)
    return whole or None  # {} on other ranks


@ANSWERS.right("08.spot_the_optimizer")
def redistributed(model, batches, lr):
    train(
        model, batches, lr, units=[m for m in model[::-1] if not isinstance(m, nn.Tanh)]
    )
    result = {} if dist.get_rank() == 0 else None
    for name, p in model.state_dict().items():
        replica = p.redistribute(placements=[Replicate()]).to_local()
        if result is not None:
            result[name] = replica.clone()
    return result


@ANSWERS.right("08.spot_the_optimizer")
def returns_early(model, batches, lr):
    train(model, batches, lr)
    if dist.get_rank():
        for p in model.parameters():
            p.full_tensor()
        return None
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "An empty dictionary, which")
def an_empty_dictionary_elsewhere(model, batches, lr):
    return last_layer_stays(model, batches, lr) or {}


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "is there a MixedPrecisionPolicy?")
def in_bfloat16(model, batches, lr):
    train(model, batches, lr, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    return whole_on_rank_0(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "and a root stays whole")
def never_freed_between(model, batches, lr):
    train(model, batches, lr, reshard_after_forward=False)
    return whole_on_rank_0(model)


@ANSWERS.wrong("08.spot_the_optimizer", "wrong", "keeps one whole tensor after the")
def whole_on_all_ranks_and_thrown_away(model, batches, lr):
    train(model, batches, lr)
    state = {name: p.full_tensor() for name, p in model.named_parameters()}
    return state if dist.get_rank() == 0 else None


# ----------------------------------------------------------------- 08.spot_the_pile


def each(units, grad):
    """Each unit and its whole gradient, in the order of the backward."""
    for unit in reversed(units):
        unit.gather()
        grad, gradient = unit.backward(grad)
        unit.free()
        yield unit, gradient


@ANSWERS.right("08.spot_the_pile")
def divided_in_place(units, grad):
    before = None
    for unit, gradient in each(units, grad):
        gradient /= dist.get_world_size()
        if before:
            before[0].grad = before[1].wait()
        before = unit, unit.reduce_scatter(gradient)
    before[0].grad = before[1].wait()


@ANSWERS.right("08.spot_the_pile")
def quotient_awaited_at_once(units, grad):
    for unit, gradient in each(units, grad):
        unit.grad = unit.reduce_scatter(gradient / dist.get_world_size()).wait()


@ANSWERS.right("08.spot_the_pile")
def at_once(units, grad):
    for unit, gradient in each(units, grad):
        unit.grad = unit.reduce_scatter(gradient).wait() / dist.get_world_size()


@ANSWERS.right("08.spot_the_pile")
def one_on_its_way(units, grad):
    n, before = dist.get_world_size(), None
    units[-1].gather()
    for number in range(len(units) - 1, -1, -1):
        unit = units[number]
        if number > 0:
            units[number - 1].gather()  # ahead
        grad, gradient = unit.backward(grad)
        unit.free()
        if before:
            before[0].grad = before[1].wait() / n
        before = unit, unit.reduce_scatter(gradient)
    before[0].grad = before[1].wait() / n


@ANSWERS.right("08.spot_the_pile")
def the_mean_in_a_second_loop(units, grad):
    for unit, gradient in each(units, grad):
        unit.grad = unit.reduce_scatter(gradient).wait()
    for unit in units:
        unit.grad /= dist.get_world_size()


@ANSWERS.right("08.spot_the_pile")
def one_after_the_other(units, grad):
    *others, unit = units
    unit.gather()
    below, gradient = unit.backward(grad)
    unit.free()
    request = unit.reduce_scatter(gradient)
    del gradient
    unit.grad = torch.mul(request.wait(), 1 / dist.get_world_size())
    if others:
        one_after_the_other(others, below)


@ANSWERS.wrong("08.spot_the_pile", "wrong", "keep no gradient yourself")
def keeps_gradients(units, grad):
    kept = list(each(units, grad))
    for unit, gradient in kept:
        unit.grad = unit.reduce_scatter(gradient).wait() / dist.get_world_size()


test_wrong, test_right = ANSWERS.tests()


def test_what_goes_during_a_case_does_not_hide_what_is_new():
    old = torch.zeros(4)
    before = alive()
    del old
    new, sizes = torch.zeros(4), torch.ones(4, dtype=torch.int64)
    assert new_bytes(before) == new.nbytes == 16 < sizes.nbytes
