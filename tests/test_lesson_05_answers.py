"""Lesson 05: typical wrong answers, and different right ones."""

import itertools
import random

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset

from tests.answers import Answers

ANSWERS = Answers()


# ------------------------------------------------------------------- 05.local_batch

ROWS = "global_batch // world_size + int(takes_one_more)"


@ANSWERS.wrong("05.local_batch", "wrong", "converts a NumPy number")
def a_number_of_numpys(global_batch, world_size, rank):
    return numpy.int64(global_batch // world_size)


COMPARED = "global_batch // world_size + rank < global_batch"
ANSWERS.edited(
    "05.local_batch",
    right=[
        (ROWS, "(global_batch + rank) // world_size"),  # the last ranks take one more
        (ROWS, "len(range(rank, global_batch, world_size))"),
    ],
    wrong=[("wants one number of type int", ROWS, COMPARED)],
)


# --------------------------------------------------------------------- 05.partition

ORDER = "torch.randperm(n_items, generator=generator)"
DEAL = "[order[rank::world_size] for rank in range(world_size)]"


def order_of(n_items, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n_items, generator=generator).tolist()


def shuffled_and_dealt(n_items, world_size, seed):
    order = list(range(n_items))
    random.Random(seed).shuffle(order)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "The `hash` of a text is no seed")
def seeded_by_a_hash(n_items, world_size, seed):
    return shuffled_and_dealt(n_items, world_size, hash(f"seed {seed}"))


ROLLED = (
    *("(seed)", "(1)", ".tolist()", ".roll(seed)"),
    *(DEAL, "order.tensor_split(world_size)"),
)
ANSWERS.edited(
    "05.partition",
    wrong=[
        ("a share is a stretch of the items", ORDER, "torch.arange(n_items)"),
        ("it gave different shares", ORDER, "torch.randperm(n_items)"),
        ("The ranks have computed different", "(seed)", "(seed + dist.get_rank())"),
        ("Another seed gave the same shares", "(seed)", "(seed % 2)"),
        ("or nearly so", *ROLLED),
        ("one list of whole numbers", DEAL, f"({DEAL[1:-1]})"),  # a generator
        ("one list of whole numbers", ".tolist()", ".double().tolist()"),
        ("Cut all shares from *one* order", ".tolist()", ".add(1).tolist()"),
        ("some lists are empty", DEAL, DEAL.replace("ze)]", "ze) if rank < n_items]")),
    ],
)


@ANSWERS.right("05.partition")
def seeded_by_a_text(n_items, world_size, seed):
    return shuffled_and_dealt(n_items, world_size, f"seed {seed}")  # that is no hash()


@ANSWERS.right("05.partition")
def in_stretches(n_items, world_size, seed):
    order = order_of(n_items, seed)
    borders = [rank * n_items // world_size for rank in range(world_size + 1)]
    return tuple(order[a:b] for a, b in itertools.pairwise(borders))


@ANSWERS.right("05.partition")
def with_numpy(n_items, world_size, seed):
    order = numpy.random.default_rng(seed).permutation(n_items)
    return numpy.array_split(order, world_size)


@ANSWERS.right("05.partition")
def by_random_split(n_items, world_size, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(range(rank, n_items, world_size)) for rank in range(world_size)]
    return torch.utils.data.random_split(range(n_items), lengths, generator)


@ANSWERS.right("05.partition")
def drawn_by_rank_0(n_items, world_size, seed):
    order = torch.zeros(n_items, dtype=torch.int64)
    if dist.get_rank() == 0:
        order = torch.tensor(order_of(n_items, seed))
    dist.broadcast(order, 0)
    return [order[rank::world_size].tolist() for rank in range(world_size)]


# ------------------------------------------------------------- 05.average_gradients

REDUCE = "dist.all_reduce(parameter.grad)"
DIVIDE = "parameter.grad /= dist.get_world_size()"
BOTH = f"{REDUCE}\n            {DIVIDE}"


def lines(*them):
    """Instead of `BOTH`."""
    return "\n            ".join(them)


def with_zeros(model):
    """The trained parameters, after zeros have come where a gradient is missing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return parameters


def futures_of(model):
    """A future of each mean."""
    n = dist.get_world_size()
    for parameter in with_zeros(model):
        gradient = parameter.grad
        future = dist.all_reduce(gradient, async_op=True).get_future()
        yield future.then(lambda _, gradient=gradient: gradient.div_(n))


EACH = "for parameter in model.parameters():"
UNDER_WAY = f"work = {REDUCE[:-1]}, async_op=True)"
BUFFERS = f"for buffer in model.buffers(): dist.all_reduce(buffer)\n    {EACH}"

EARLY = lines(UNDER_WAY, DIVIDE, "work.wait()")
ANSWERS.edited(
    "05.average_gradients",
    wrong=[
        ("a division before the `wait()`", BOTH, EARLY),
        ("A frozen parameter has", "if parameter.requires_grad:", "if True:"),
        ("something else has changed", EACH, BUFFERS),
        ("its requires_grad", DIVIDE, f"{DIVIDE}; parameter.requires_grad_(False)"),
    ],
)


@ANSWERS.wrong("05.average_gradients", "crashed", "or a loop over a set?")
def in_another_order_on_odd_ranks(model):
    parameters = with_zeros(model)
    for parameter in parameters[::-1] if dist.get_rank() % 2 else parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "crashed", "Flatten each gradient first")
def not_flattened(model):
    flat = torch.cat([p.grad for p in with_zeros(model)])
    dist.all_reduce(flat)


@ANSWERS.wrong("05.average_gradients", "wrong", "divided once too often?")
def tied_divided_twice(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


REDUCED = "dist.reduce(parameter.grad, 0)", "dist.broadcast(parameter.grad, 0)"
POLLED_FUTURE = lines(
    f"future = {REDUCE[:-1]}, async_op=True).get_future()",
    "while not future.done(): pass",
    "parameter.grad = future.value()[0] / dist.get_world_size()",
)
GATHERED = lines(
    "there = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]",
    "dist.all_gather(there, parameter.grad)",
    "parameter.grad = torch.stack(there).mean(dim=0)",
)
ANSWERS.edited(
    "05.average_gradients",
    right=[
        (BOTH, "dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)"),
        (BOTH, lines(REDUCED[0], DIVIDE, REDUCED[1])),
        (BOTH, lines(UNDER_WAY, "while not work.is_completed(): pass", DIVIDE)),
        (BOTH, POLLED_FUTURE),
        (BOTH, GATHERED),
    ],
)


@ANSWERS.right("05.average_gradients")
def flat(model):
    parameters = with_zeros(model)
    buffer = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    parts = buffer.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


@ANSWERS.right("05.average_gradients")
def waits_for_all_futures(model):
    torch.futures.wait_all(list(futures_of(model)))


@ANSWERS.right("05.average_gradients")
def takes_the_values(model):
    parameters = with_zeros(model)
    works = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
    futures = torch.futures.collect_all([work.get_future() for work in works])
    for parameter, future in zip(parameters, futures.wait(), strict=True):
        parameter.grad = future.value()[0] / dist.get_world_size()


@ANSWERS.right("05.average_gradients")
def coalesced(model):
    gradients = [parameter.grad for parameter in with_zeros(model)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for gradient in gradients:
            dist.all_reduce(gradient)
    manager.wait()
    torch._foreach_div_(gradients, dist.get_world_size())


@ANSWERS.right("05.average_gradients")
@torch.inference_mode()
def in_inference_mode(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        missing = parameter.grad is None
        mean = torch.zeros_like(parameter) if missing else parameter.grad + 0
        mean /= dist.get_world_size()
        dist.all_reduce(mean)
        parameter.grad = mean


@ANSWERS.right("05.average_gradients")
def unused_stay_none(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in parameters]).int()
    dist.all_reduce(used)
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# ----------------------------------------------------------------------- 05.sampler

REPEAT = "order = order * math.ceil(total / self.n_items)"
DOUBLE = "while len(order) < total:\n            order = order + order"
MINE = "order[self.rank : total : self.world_size]"
RETURN = f"return iter({MINE})"


KEPT = "self.kept = getattr(self, 'kept', {}); return {}"
KEPT_SINCE_5 = f"""self.kept = {MINE} if self.epoch else getattr(self, 'kept', {MINE})
        return iter(self.kept)"""
AS_GENERATOR = """for i in range(len(self)):
            yield order[(self.rank + i * self.world_size) % self.n_items]"""
AS_TENSOR = """places = torch.arange(len(self)) * self.world_size + self.rank
        return iter(torch.tensor(order)[places % self.n_items])"""
ITER = KEPT.format(f"iter({MINE})", "self.kept")
LIST = KEPT.format(MINE, "iter(self.kept)")
ANSWERS.edited(
    "05.sampler",
    right=[(REPEAT, DOUBLE), (RETURN, AS_GENERATOR), (RETURN, AS_TENSOR)],
    too_slow=[("make a list longer", ".tolist()", "", REPEAT, DOUBLE)],
    crashed=[
        ("must `return` an iterator", f"iter({MINE})", MINE),
        ("a range has neither", "list(range(self.n_items))", "range(10)"),
        ("`/` makes a float", "rounded(", "float("),
    ],
    wrong=[
        ("must make a new iterator at each call", RETURN, ITER),
        ("Draw the order anew in each", RETURN, LIST),  # computed once
        ("Epoch 0 was right at first", RETURN, KEPT_SINCE_5),
        ("torch.manual_seed and", "torch.Generator().manual", "torch.manual"),
        ("np.random.seed do", RETURN, f"import numpy as n; n.random.seed(0); {RETURN}"),
    ],
)

# ---------------------------------------------------------------------- 05.accuracy

COUNT = "right[:own].sum()"
SUM = "dist.all_reduce(count)"

SUMMED_LATE = COUNT, "right[:own].int()", "count.item()", "count.sum().item()"
ANSWERS.edited(
    "05.accuracy",
    wrong=[
        ("call its wait()", SUM, "dist.all_reduce(count, async_op=True)"),
        ("", COUNT, f"{COUNT}.half()"),
    ],
    crashed=[("with tensors of the same size", *SUMMED_LATE)],
)


@ANSWERS.right("05.accuracy")
def gathered_and_put_in_order(right, n_items):
    there = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(there, right)
    return torch.stack(there, dim=1).flatten()[:n_items].double().mean().item()


# --------------------------------------------------------------- 05.spot_the_loader

LOADER = "DataLoader(dataset, batch_size=global_batch // size, sampler=sampler)"
INDICES = "torch.utils.data.BatchSampler(sampler, global_batch // size, False)"

IN_ORDER = "Sampler(dataset)", "Sampler(dataset, shuffle=False)"
ANSWERS.edited(
    "05.spot_the_loader",
    wrong=[
        ("Each rank needs batches of", "global_batch // size", "global_batch"),
        ("gives each rank a share of it", "sampler=sampler", "shuffle=True"),
        ("Epochs have the same order", "sampler.set_epoch(epoch)", "pass"),
        ("then read the batches with `list(loader)`", "list(loader)", "loader"),
        ("items, not indices", LOADER, INDICES),
        ("(`append`, not `extend`.)", "append", "extend"),
        ("Shuffle the whole data set", *IN_ORDER),
    ],
)


@ANSWERS.wrong("05.spot_the_loader", "wrong", "the same items in every epoch")
def shares_stay(dataset, global_batch, n_epochs):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = Subset(dataset, order_of(len(dataset), 0)[rank::world_size])
    loader = DataLoader(mine, global_batch // world_size, shuffle=True)
    return [list(loader) for _ in range(n_epochs)]


@ANSWERS.right("05.spot_the_loader")
def a_sampler_for_each_epoch(dataset, global_batch, n_epochs):
    epochs = []
    for epoch in range(n_epochs):
        sampler = DistributedSampler(dataset, shuffle=True, seed=100 + epoch)
        share = int(global_batch / dist.get_world_size())
        loader = DataLoader(dataset, share, shuffle=False, sampler=sampler)
        epochs.append([batch for batch in loader])  # noqa: C416
    return epochs


test_wrong, test_right = ANSWERS.tests()
