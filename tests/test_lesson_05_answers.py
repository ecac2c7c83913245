"""Lesson 05: typical wrong answers, and different right ones."""

import itertools
import math
import random
import time

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    Subset,
)

from tests.answers import Answers

ANSWERS = Answers()


# ------------------------------------------------------------------ 05.predict_rate

for number in (0.6, 0.1 * 2 * 8 * 96 / 256, torch.tensor(0.6)):
    ANSWERS.right("05.predict_rate")(number)


# ------------------------------------------------------------------- 05.local_batch


@ANSWERS.wrong("05.local_batch", "wrong", "make it one with int(...)")
def a_number_of_numpys(global_batch, world_size, rank):
    return numpy.int64(global_batch // world_size)


@ANSWERS.wrong("05.local_batch", "crashed", "There are no ranks in this task")
def asks_the_group(global_batch, world_size, rank):
    return len(range(dist.get_rank(), global_batch, dist.get_world_size()))


@ANSWERS.right("05.local_batch")
def first_ranks_take_one_more(global_batch, world_size, rank):
    return global_batch // world_size + (rank < global_batch % world_size)


@ANSWERS.right("05.local_batch")
def last_ranks_take_one_more(global_batch, world_size, rank):
    return (global_batch + rank) // world_size


@ANSWERS.right("05.local_batch")
def count_the_strides(global_batch, world_size, rank):
    return len(range(rank, global_batch, world_size))


@ANSWERS.right("05.local_batch")
def between_two_borders(global_batch, world_size, rank):
    def border(r):
        return int(r * global_batch / world_size)

    return border(rank + 1) - border(rank)


# --------------------------------------------------------------------- 05.partition


def order_of(n_items, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n_items, generator=generator).tolist()


@ANSWERS.wrong("05.partition", "wrong", "The `hash` of a text differs, too.")
def seeded_by_a_hash(n_items, world_size, seed):
    order = list(range(n_items))
    random.Random(hash(f"seed {seed}")).shuffle(order)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "some make the same shares")
def even_or_odd(n_items, world_size, seed):
    order = order_of(n_items, seed % 2)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "not a few at a time")
def stretches_of_small_blocks(n_items, world_size, seed):
    order, numbers = list(range(n_items)), random.Random(seed)
    for first in range(0, n_items, 9):
        block = order[first : first + 9]
        numbers.shuffle(block)
        order[first : first + 9] = block
    borders = [rank * n_items // world_size for rank in range(world_size + 1)]
    return [order[a:b] for a, b in itertools.pairwise(borders)]


@ANSWERS.wrong("05.partition", "wrong", "some make the same shares, or nearly the same")
def rotated_by_the_seed(n_items, world_size, seed):
    order = order_of(n_items, 1234)
    order = order[seed % n_items :] + order[: seed % n_items]
    borders = [rank * n_items // world_size for rank in range(world_size + 1)]
    return [order[a:b] for a, b in itertools.pairwise(borders)]


@ANSWERS.wrong("05.partition", "wrong", "It must be a list of lists")
def a_generator(n_items, world_size, seed):
    order = order_of(n_items, seed)
    return (order[rank::world_size] for rank in range(world_size))


@ANSWERS.right("05.partition")
def seeded_by_a_text(n_items, world_size, seed):
    order = list(range(n_items))
    random.Random(f"seed {seed}").shuffle(order)  # that is no hash()
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.right("05.partition")
def seeded_by_the_hash_of_numbers(n_items, world_size, seed):
    order = list(range(n_items))
    random.Random(hash((n_items, seed))).shuffle(order)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.right("05.partition")
def sorted_shares(n_items, world_size, seed):
    order = order_of(n_items, seed)
    return [sorted(order[rank::world_size]) for rank in range(world_size)]


@ANSWERS.right("05.partition")
def like_cards(n_items, world_size, seed):
    order = order_of(n_items, seed)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.right("05.partition")
def in_stretches(n_items, world_size, seed):
    order = list(range(n_items))
    random.Random(seed).shuffle(order)
    borders = [rank * n_items // world_size for rank in range(world_size + 1)]
    return tuple(order[a:b] for a, b in itertools.pairwise(borders))


@ANSWERS.right("05.partition")
def with_numpy(n_items, world_size, seed):
    order = numpy.random.default_rng(seed).permutation(n_items)
    return numpy.array_split(order, world_size)


@ANSWERS.right("05.partition")
def with_tensor_split(n_items, world_size, seed):
    torch.manual_seed(seed)
    return torch.randperm(n_items).tensor_split(world_size)


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


@ANSWERS.wrong("05.average_gradients", "wrong", "`then()` do not wait")
def waits_for_the_last_future_only(model):
    list(futures_of(model))[-1].wait()


@ANSWERS.wrong("05.average_gradients", "wrong", "between its collective and the")
def divided_under_way(model):
    for parameter in with_zeros(model):
        work = dist.all_reduce(parameter.grad, async_op=True)
        parameter.grad /= dist.get_world_size()
        work.wait()


@ANSWERS.wrong("05.average_gradients", "crashed", "`value()` does not wait")
def value_without_waiting(model):
    for parameter in with_zeros(model):
        future = dist.all_reduce(parameter.grad, async_op=True).get_future()
        parameter.grad = future.value()[0] / dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "would be trained from now on")
def thaws(model):
    one_by_one(model)
    model.requires_grad_(True)


@ANSWERS.wrong("05.average_gradients", "wrong", "but a buffer has changed")
def buffers_summed_too(model):
    one_by_one(model)
    for buffer in model.buffers():
        dist.all_reduce(buffer)


@ANSWERS.wrong("05.average_gradients", "crashed", "Or a loop over a set?")
def in_another_order_on_odd_ranks(model):
    parameters = with_zeros(model)
    for parameter in parameters[::-1] if dist.get_rank() % 2 else parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "A frozen parameter has got a gradient")
def zeros_for_the_frozen(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "A weight in two layers is one")
def tied_divided_twice(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "crashed", "Flatten each gradient first")
def not_flattened(model):
    flat = torch.cat([p.grad for p in with_zeros(model)])
    dist.all_reduce(flat)


@ANSWERS.right("05.average_gradients")
def one_by_one(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.right("05.average_gradients")
def divided_first_and_assigned(model):
    for parameter in with_zeros(model):
        mean = parameter.grad / dist.get_world_size()
        dist.all_reduce(mean)
        parameter.grad = mean


@ANSWERS.right("05.average_gradients")
def with_avg(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


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
def flat_by_torch(model):
    gradients = [p.grad for p in with_zeros(model)]
    buffer = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    means = torch._utils._unflatten_dense_tensors(buffer, gradients)
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean)


@ANSWERS.right("05.average_gradients")
def gathered(model):
    for parameter in with_zeros(model):
        there = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(there, parameter.grad)
        parameter.grad = torch.stack(there).mean(dim=0)


@ANSWERS.right("05.average_gradients")
def reduced_and_broadcast(model):
    for parameter in with_zeros(model):
        dist.reduce(parameter.grad, 0)
        parameter.grad /= dist.get_world_size()
        dist.broadcast(parameter.grad, 0)


@ANSWERS.right("05.average_gradients")
def all_at_the_same_time(model):
    parameters = with_zeros(model)
    works = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
    for work, parameter in zip(works, parameters, strict=True):
        work.wait()
        parameter.grad.div_(dist.get_world_size())


@ANSWERS.right("05.average_gradients")
def waits_for_all_futures(model):
    torch.futures.wait_all(list(futures_of(model)))


@ANSWERS.right("05.average_gradients")
def waits_for_each_future(model):
    for future in list(futures_of(model)):
        future.wait()
        assert future.done()


@ANSWERS.right("05.average_gradients")
def takes_the_values(model):
    parameters = with_zeros(model)
    works = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
    futures = torch.futures.collect_all([work.get_future() for work in works])
    for parameter, future in zip(parameters, futures.wait(), strict=True):
        parameter.grad = future.value()[0] / dist.get_world_size()


@ANSWERS.right("05.average_gradients")
def asks_until_it_is_there(model):
    for parameter in with_zeros(model):
        future = dist.all_reduce(parameter.grad, async_op=True).get_future()
        while not future.done():
            pass
        parameter.grad = future.value()[0] / dist.get_world_size()


@ANSWERS.right("05.average_gradients")
def asks_the_work(model):
    for parameter in with_zeros(model):
        work = dist.all_reduce(parameter.grad, async_op=True)
        while not work.is_completed():
            pass
        parameter.grad /= dist.get_world_size()


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


class Given:
    """What the learner is given."""

    def __init__(self, n_items, world_size, rank, shuffle, seed, drop_last):
        self.n_items, self.world_size, self.rank = n_items, world_size, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        if self.drop_last:
            return self.n_items // self.world_size
        return math.ceil(self.n_items / self.world_size)

    def order(self):
        if not self.shuffle:
            return list(range(self.n_items))
        return order_of(self.n_items, self.seed + self.epoch)

    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        while len(order) < total:
            order = order + order
        return order[:total]

    def __iter__(self):
        return iter(self.padded()[self.rank :: self.world_size])


@ANSWERS.wrong("05.sampler", "too slow", "`.tolist()` makes a list of a tensor")
class DoublesATensor(Given):
    def order(self):
        return torch.tensor(super().order())


@ANSWERS.wrong("05.sampler", "wrong", "the next one did not begin anew")
class GoesOnAfterABreak(Given):
    """Its own iterator, which begins anew only at the end."""

    at = 0

    def __iter__(self):
        return self

    def __next__(self):
        items = self.padded()[self.rank :: self.world_size]
        if self.at == len(items):
            self.at = 0
            raise StopIteration
        self.at += 1
        return items[self.at - 1]


@ANSWERS.wrong("05.sampler", "wrong", "Is an old order kept?")
class KeepsAnOrder(Given):
    kept = None

    def order(self):
        if self.kept is None or self.epoch > 0:
            self.kept = super().order()
        return self.kept


@ANSWERS.wrong("05.sampler", "wrong", "changed the random numbers of the whole program")
class SeedsNumPy(Given):
    def __iter__(self):
        numpy.random.seed(self.seed)
        return super().__iter__()


class RepeatsTheOrder(Given):
    """Of a tensor, `*` does something else than of a list."""

    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        return (order * math.ceil(total / self.n_items))[:total]


ANSWERS.right("05.sampler")(RepeatsTheOrder)


@ANSWERS.wrong("05.sampler", "crashed", "`__iter__` must `return` an iterator")
class ReturnsAList(Given):
    def __iter__(self):
        return self.padded()[self.rank :: self.world_size]


@ANSWERS.right("05.sampler")
class ByDoubling(Given):
    pass


@ANSWERS.right("05.sampler")
class Yields(Given):
    """Says item by item which one it is."""

    def __iter__(self):
        order = self.order()
        for i in range(len(self)):
            yield order[(self.rank + i * self.world_size) % self.n_items]


@ANSWERS.right("05.sampler")
class OfTensors(Given):
    def __iter__(self):
        order = torch.tensor(self.order())
        places = torch.arange(len(self)) * self.world_size + self.rank
        return iter(order[places % self.n_items])


@ANSWERS.right("05.sampler")
class LikeTorch(Sampler):
    def __init__(self, n_items, world_size, rank, shuffle, seed, drop_last):
        self.items, self.shuffle, self.seed, self.epoch = n_items, shuffle, seed, 0
        rest = n_items % world_size
        self.total = n_items - rest
        if rest and not drop_last:
            self.total += world_size
        self.world_size, self.rank = world_size, rank

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.total // self.world_size

    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        indices = list(range(self.items))
        if self.shuffle:
            indices = torch.randperm(self.items, generator=generator).tolist()
        missing = self.total - len(indices)
        if missing > 0:
            indices += (indices * math.ceil(missing / len(indices)))[:missing]
        return iter(indices[self.rank : self.total : self.world_size])


# ---------------------------------------------------------------------- 05.accuracy


@ANSWERS.wrong("05.accuracy", "wrong", "call its wait()")
def does_not_wait_for_the_counts(right, n_items):
    own = len(range(dist.get_rank(), n_items, dist.get_world_size()))
    count = right[:own].sum()
    dist.all_reduce(count, async_op=True)
    time.sleep(0.02)
    return count.item() / n_items


def own_items(right, n_items):
    return right[: len(range(dist.get_rank(), n_items, dist.get_world_size()))]


@ANSWERS.wrong("05.accuracy", "wrong", "")
def counted_in_float16(right, n_items):
    count = own_items(right, n_items).sum().half()
    dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "crashed", "with tensors of the same size")
def reduces_its_own_items(right, n_items):
    mine = own_items(right, n_items).int()
    dist.all_reduce(mine)
    return mine.sum().item() / n_items


@ANSWERS.right("05.accuracy")
def counts_added_up(right, n_items):
    count = own_items(right, n_items).sum()
    dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.right("05.accuracy")
def by_place(right, n_items):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    totals = torch.zeros(2, dtype=torch.float64)
    for i, one in enumerate(right):
        if rank + i * world_size < n_items:
            totals += torch.tensor([float(one), 1.0])
    dist.all_reduce(totals)
    return totals[0] / totals[1]


@ANSWERS.right("05.accuracy")
def gathered_and_put_in_order(right, n_items):
    there = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(there, right)
    return torch.stack(there, dim=1).flatten()[:n_items].double().mean().item()


@ANSWERS.right("05.accuracy")
def as_objects(right, n_items):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own_items(right, n_items).tolist())
    return sum(map(sum, everywhere)) / sum(map(len, everywhere))


# --------------------------------------------------------------- 05.spot_the_loader


def epochs_of(loader, sampler, n_epochs, set_epoch=True):
    epochs = []
    for epoch in range(n_epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        epochs.append(list(loader))
    return epochs


@ANSWERS.wrong("05.spot_the_loader", "wrong", "Do it in each epoch.")
def one_list_for_all(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    return [list(loader)] * n_epochs


@ANSWERS.right("05.spot_the_loader")
def an_object_that_counts_epochs(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    numbers = iter(range(n_epochs))

    class Epochs:
        def __iter__(self):
            sampler.set_epoch(next(numbers))
            return iter(loader)

    return [Epochs()] * n_epochs


@ANSWERS.wrong(
    "05.spot_the_loader", "wrong", "a stretch of the data set, or every n-th"
)
def shuffled_in_each_rank(dataset, global_batch, n_epochs):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = Subset(dataset, range(rank, len(dataset), world_size))
    loader = DataLoader(mine, global_batch // world_size, shuffle=True)
    return [list(loader) for _ in range(n_epochs)]


@ANSWERS.wrong("05.spot_the_loader", "wrong", "A sampler gives only their indices")
def batches_of_indices(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    share = global_batch // dist.get_world_size()
    loader = BatchSampler(sampler, share, drop_last=False)
    return epochs_of(loader, sampler, n_epochs)


@ANSWERS.right("05.spot_the_loader")
def epochs_repaired(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    return epochs_of(loader, sampler, n_epochs)


@ANSWERS.right("05.spot_the_loader")
def a_sampler_for_each_epoch(dataset, global_batch, n_epochs):
    epochs = []
    for epoch in range(n_epochs):
        sampler = DistributedSampler(dataset, shuffle=True, seed=100 + epoch)
        share = int(global_batch / dist.get_world_size())
        loader = DataLoader(dataset, share, shuffle=False, sampler=sampler)
        epochs.append([batch for batch in loader])  # noqa: C416
    return epochs


@ANSWERS.right("05.spot_the_loader")
def by_hand(dataset, global_batch, n_epochs):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [
        [
            dataset[batch[rank::world_size]].tolist()
            for batch in torch.tensor(order_of(len(dataset), epoch)).split(global_batch)
        ]
        for epoch in range(n_epochs)
    ]


test_wrong, test_right = ANSWERS.tests()
