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

from course_utils.from_scratch import sgd
from tests.answers import Answers

ANSWERS = Answers()

# ------------------------------------------------------------------ 05.predict_rate

for number, says in (
    (1.6, "You multiplied by the number of GPUs."),
    (0.3, "You used the batch of one node."),
    (0.0375, "You used the batch of one GPU."),
    (153.6, "You multiplied by the whole batch."),
    (9.6, "You multiplied by the batch of one GPU."),
    (0.1 * 6**0.5, "That is a square-root rule."),
    (0.1 / 6, "The other way round"),
    (0.1, "That is the rate of the recipe."),
    (1536, "that is not the learning rate yet"),
    (0.8, "How many GPUs are there"),
    (5, "How many times 256 is it?"),
    ("0.6", "That is text; a number was expected."),
):
    ANSWERS.wrong("05.predict_rate", "wrong", says)(number)
ANSWERS.wrong("05.predict_rate", "not attempted", "Set the answer")(...)
for number in (0.6, 0.1 * 2 * 8 * 96 / 256, torch.tensor(0.6)):
    ANSWERS.right("05.predict_rate")(number)

# ------------------------------------------------------------------- 05.local_batch


@ANSWERS.wrong("05.local_batch", "not attempted", "still raises NotImplementedError")
def batch_stub(global_batch, world_size, rank):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong(
    "05.local_batch", "crashed", "`/` makes a float", did="`global_batch / world_size`"
)
def as_it_is_copied(global_batch, world_size, rank):
    return global_batch / float(world_size)


@ANSWERS.wrong(
    "05.local_batch",
    "wrong",
    "the rest of the division is lost",
    did="`//` and no more",
)
def rounded_down(global_batch, world_size, rank):
    return global_batch // world_size


@ANSWERS.wrong("05.local_batch", "wrong", "You rounded up on every rank")
def rounded_up(global_batch, world_size, rank):
    return math.ceil(global_batch / world_size)


@ANSWERS.wrong("05.local_batch", "wrong", "the rest of the division is lost")
def rounded(global_batch, world_size, rank):
    return round(global_batch / world_size)  # here 2.5, so down


@ANSWERS.wrong("05.local_batch", "wrong", "so it is `<`, not `<=`")
def one_rank_too_many(global_batch, world_size, rank):
    return global_batch // world_size + (rank <= global_batch % world_size)


@ANSWERS.wrong("05.local_batch", "wrong", "so it is `<`, not `<=`")
def one_rank_too_many_if_any(global_batch, world_size, rank):
    rest = global_batch % world_size
    return global_batch // world_size + (rest > 0 and rank <= rest)


@ANSWERS.wrong("05.local_batch", "wrong", "also where nothing is left over")
def compares_with_the_quotient(global_batch, world_size, rank):
    return global_batch // world_size + (rank < global_batch // world_size)


@ANSWERS.wrong("05.local_batch", "wrong", "several rows more than another")
def rest_to_the_last(global_batch, world_size, rank):
    rows = global_batch // world_size
    return rows + (global_batch % world_size) * (rank == world_size - 1)


@ANSWERS.wrong("05.local_batch", "wrong", "the whole global batch")
def whole_batch(global_batch, world_size, rank):
    return global_batch


@ANSWERS.wrong("05.local_batch", "wrong", "Make it one with int(...)")
def a_number_of_numpys(global_batch, world_size, rank):
    return numpy.int64(global_batch // world_size)


@ANSWERS.wrong("05.local_batch", "wrong", "Make it one with int(...)")
def a_tensor(global_batch, world_size, rank):
    return torch.tensor(global_batch // world_size)


@ANSWERS.wrong("05.local_batch", "wrong", "`a + (b < c)` needs its parentheses")
def without_parentheses(global_batch, world_size, rank):
    return global_batch // world_size + rank < global_batch % world_size


@ANSWERS.wrong("05.local_batch", "wrong", "It returned text.")
def text(global_batch, world_size, rank):
    return str(global_batch // world_size)


@ANSWERS.wrong("05.local_batch", "wrong", "not a list of all")
def of_all_ranks(global_batch, world_size, rank):
    return [len(range(r, global_batch, world_size)) for r in range(world_size)]


@ANSWERS.wrong("05.local_batch", "wrong", "did you forget `return`?")
def forgot_to_return(global_batch, world_size, rank):
    global_batch // world_size + (rank < global_batch % world_size)


@ANSWERS.wrong("05.local_batch", "crashed", "There are no ranks in this task")
def asks_the_group(global_batch, world_size, rank):
    return len(range(dist.get_rank(), global_batch, dist.get_world_size()))


@ANSWERS.wrong("05.local_batch", "wrong", "Your code calls rank_batch_size")
def ours_again(global_batch, world_size, rank):
    return sgd.rank_batch_size(global_batch, world_size, rank)


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


@ANSWERS.wrong("05.partition", "not attempted", "still raises NotImplementedError")
def partition_stub(n_items, world_size, seed):
    raise NotImplementedError("Write your code here.")


def order_of(n_items, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n_items, generator=generator).tolist()


@ANSWERS.wrong(
    "05.partition",
    "wrong",
    "The ranks have computed different shares",
    did="put the rank into the seed",
)
def seeded_by_the_rank(n_items, world_size, seed):
    order = order_of(n_items, seed + dist.get_rank())
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "The `hash` of a text differs, too.")
def seeded_by_a_hash(n_items, world_size, seed):
    order = list(range(n_items))
    random.Random(hash(f"seed {seed}")).shuffle(order)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "The `hash` of a text differs, too.")
def sorted_by_hashes_with_a_text(n_items, world_size, seed):
    order = sorted(range(n_items), key=lambda item: hash((seed, str(item))))
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "it gave different shares")
def not_seeded(n_items, world_size, seed):
    order = list(range(n_items))
    random.shuffle(order)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "did you forget `return`?")
def shares_not_returned(n_items, world_size, seed):
    order_of(n_items, seed)


@ANSWERS.wrong("05.partition", "wrong", "It must be a list of lists")
def a_dict(n_items, world_size, seed):
    order = order_of(n_items, seed)
    return {rank: order[rank::world_size] for rank in range(world_size)}


@ANSWERS.wrong("05.partition", "wrong", "some make the same shares")
def even_or_odd(n_items, world_size, seed):
    order = order_of(n_items, seed % 2)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "some make the same shares")
def dealt_to_other_ranks(n_items, world_size, seed):
    order = order_of(n_items, 1234)
    shares = [order[rank::world_size] for rank in range(world_size)]
    return [shares[(rank + seed) % world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "not a few at a time")
def shuffled_a_few_at_a_time(n_items, world_size, seed):
    order, numbers = list(range(n_items)), random.Random(seed)
    for first in range(0, n_items, world_size):
        block = order[first : first + world_size]
        numbers.shuffle(block)
        order[first : first + world_size] = block
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


@ANSWERS.wrong("05.partition", "wrong", "some make the same shares")
def always_1234(n_items, world_size, seed):
    order = order_of(n_items, 1234)
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "some make the same shares, or nearly the same")
def rotated_by_the_seed(n_items, world_size, seed):
    order = order_of(n_items, 1234)
    order = order[seed % n_items :] + order[: seed % n_items]
    borders = [rank * n_items // world_size for rank in range(world_size + 1)]
    return [order[a:b] for a, b in itertools.pairwise(borders)]


@ANSWERS.wrong("05.partition", "wrong", "those of the rest belong to no rank")
def as_in_the_tutorial(n_items, world_size, seed):
    indices = list(range(n_items))
    random.Random(seed).shuffle(indices)
    shares = []
    for _ in range(world_size):
        part_len = int(1 / world_size * n_items)
        shares.append(indices[:part_len])
        indices = indices[part_len:]
    return shares


@ANSWERS.wrong("05.partition", "wrong", "the lengths differ by more than 1")
def chunks(n_items, world_size, seed):
    order = torch.tensor(order_of(n_items, seed))
    shares = list(order.chunk(world_size))
    return shares + [[]] * (world_size - len(shares))


@ANSWERS.wrong("05.partition", "wrong", "one list for each rank")
def too_few_lists(n_items, world_size, seed):
    return torch.tensor(order_of(n_items, seed)).chunk(world_size)


@ANSWERS.wrong("05.partition", "wrong", "the lengths differ by more than 1")
def last_takes_the_rest(n_items, world_size, seed):
    order, each = order_of(n_items, seed), n_items // world_size
    shares = [order[rank * each : (rank + 1) * each] for rank in range(world_size - 1)]
    return [*shares, order[(world_size - 1) * each :]]


@ANSWERS.wrong("05.partition", "wrong", "An item is in it twice.")
def padded_shares(n_items, world_size, seed):
    order = order_of(n_items, seed)
    order += order[: -n_items % world_size]
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "No two shares may overlap")
def without_a_step(n_items, world_size, seed):
    order = order_of(n_items, seed)
    return [order[rank:] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "Items are lost: they are in no share")
def always_every_second(n_items, world_size, seed):
    order = order_of(n_items, seed)
    return [order[rank::2] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "must be cut from *one* order")
def another_order_for_each_share(n_items, world_size, seed):
    return [order_of(n_items, seed + r)[r::world_size] for r in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "which has each item once")
def drawn_with_replacement(n_items, world_size, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(n_items, (n_items,), generator=generator).tolist()
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "Shuffle all items before you deal them out.")
def dealt_out_only(n_items, world_size, seed):
    return [list(range(n_items))[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "Shuffle all items before you deal them out.")
def shuffled_in_each_share(n_items, world_size, seed):
    shares = numpy.array_split(numpy.arange(n_items), world_size)
    for share in shares:
        numpy.random.default_rng(seed).shuffle(share)
    return shares


@ANSWERS.wrong("05.partition", "wrong", "Items count from 0")
def from_one(n_items, world_size, seed):
    order = [item + 1 for item in order_of(n_items, seed)]
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "It must be a list of lists")
def one_list(n_items, world_size, seed):
    return order_of(n_items, seed)


@ANSWERS.wrong("05.partition", "wrong", "whole number of type int")
def floats(n_items, world_size, seed):
    shares = numpy.array_split(order_of(n_items, seed), world_size)
    return [share.astype(float) for share in shares]


@ANSWERS.wrong("05.partition", "wrong", "whole number of type int")
def texts(n_items, world_size, seed):
    order = list(map(str, order_of(n_items, seed)))
    return [order[rank::world_size] for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "It must be a list of lists")
def sets(n_items, world_size, seed):
    order = order_of(n_items, seed)
    return [set(order[rank::world_size]) for rank in range(world_size)]


@ANSWERS.wrong("05.partition", "wrong", "It must be a list of lists")
def a_generator(n_items, world_size, seed):
    order = order_of(n_items, seed)
    return (order[rank::world_size] for rank in range(world_size))


@ANSWERS.wrong("05.partition", "wrong", "some make the same shares")
def few_items_in_one_order(n_items, world_size, seed):
    order = order_of(n_items, seed if n_items >= 50 else 0)
    return [order[rank::world_size] for rank in range(world_size)]


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


@ANSWERS.wrong("05.average_gradients", "not attempted", "NotImplementedError")
def average_stub(model):
    raise NotImplementedError("Write your code here.")


def with_zeros(model):
    """The trained parameters, after zeros have come where a gradient is missing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return parameters


@ANSWERS.wrong(
    "05.average_gradients",
    "wrong",
    "That is the sum over the ranks.",
    did="forgot to divide",
)
def sum_only(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad)


@ANSWERS.wrong("05.average_gradients", "wrong", "All gradients are zeros")
def zeros_where_there_is_one(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "did the result reach")
def divided_into_a_new_tensor(model):
    for parameter in with_zeros(model):
        gradient = parameter.grad
        dist.all_reduce(gradient)
        gradient = gradient / dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "`work.wait()`")
def never_waits(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad, async_op=True)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "`work.wait()`")
def waits_for_the_last_only(model):
    for parameter in with_zeros(model):
        parameter.grad /= dist.get_world_size()
        work = dist.all_reduce(parameter.grad, async_op=True)
    work.wait()


def futures_of(model):
    """A future of each mean."""
    n = dist.get_world_size()
    for parameter in with_zeros(model):
        gradient = parameter.grad
        future = dist.all_reduce(gradient, async_op=True).get_future()
        yield future.then(lambda _, gradient=gradient: gradient.div_(n))


@ANSWERS.wrong("05.average_gradients", "wrong", "`then()` do not wait")
def returns_with_futures_under_way(model):
    list(futures_of(model))


@ANSWERS.wrong("05.average_gradients", "wrong", "`then()` do not wait")
def waits_for_the_last_future_only(model):
    list(futures_of(model))[-1].wait()


@ANSWERS.wrong("05.average_gradients", "wrong", "`get_future()` and")
def throws_futures_away(model):
    for parameter in with_zeros(model):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad, async_op=True).get_future()


@ANSWERS.wrong("05.average_gradients", "wrong", "`then()` do not wait")
def waits_for_the_sum_only(model):
    n = dist.get_world_size()
    for parameter in with_zeros(model):
        gradient = parameter.grad
        future = dist.all_reduce(gradient, async_op=True).get_future()
        future.then(lambda _, gradient=gradient: gradient.div_(n))
        future.wait()


@ANSWERS.wrong("05.average_gradients", "wrong", "returns before the result is there")
def broadcast_not_awaited(model):
    for parameter in with_zeros(model):
        dist.reduce(parameter.grad, 0)
        parameter.grad /= dist.get_world_size()
        dist.broadcast(parameter.grad, 0, async_op=True)


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


@ANSWERS.wrong("05.average_gradients", "wrong", "It is divided twice.")
def divided_twice(model):
    for parameter in with_zeros(model):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "It is divided twice.")
def average_divided_again(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "You reduced the parameters.")
def parameters_averaged(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)  # and the division is forgotten, too


@ANSWERS.wrong("05.average_gradients", "wrong", "The gradients are still each rank's")
def parameters_averaged_exactly(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "the parameters have changed")
def parameters_summed_too(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        parameter.data -= 0.1 * parameter.grad


@ANSWERS.wrong("05.average_gradients", "wrong", "but a buffer has changed")
def buffers_summed_too(model):
    one_by_one(model)
    for buffer in model.buffers():
        dist.all_reduce(buffer)


@ANSWERS.wrong("05.average_gradients", "crashed", "an `if` on the rank", stuck="`if`")
def reduced_on_rank_0_only(model):
    for parameter in with_zeros(model):
        if dist.get_rank() == 0:
            dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "crashed", "Or a loop over a set?")
def in_another_order_on_odd_ranks(model):
    parameters = with_zeros(model)
    for parameter in parameters[::-1] if dist.get_rank() % 2 else parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "The gradients are still each rank's")
def as_it_is_downloaded(model):
    for parameter in model.parameters():
        if type(parameter) is torch.Tensor:
            dist.all_reduce(parameter.grad.data)
            parameter.grad.data /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "The gradients are still each rank's")
def reduces_a_copy(model):
    for parameter in with_zeros(model):
        gradient = parameter.grad / dist.get_world_size()
        dist.all_reduce(gradient)


@ANSWERS.wrong("05.average_gradients", "wrong", "Each rank has its own gradient")
def divides_its_own(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad.clone())
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "crashed", "A gradient may be None")
def as_in_the_tutorial_average(model):
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
        parameter.grad.data /= size


@ANSWERS.wrong("05.average_gradients", "stuck", "All ranks must make the same calls")
def skips_if_one_is_none(model):
    if all(p.grad is not None for p in model.parameters() if p.requires_grad):
        one_by_one(model)


@ANSWERS.wrong(
    "05.average_gradients",
    "crashed",
    "All ranks must make the same calls",
    did="skipped a missing gradient",
)
def skips_what_is_none(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "A frozen parameter has got a gradient")
def zeros_for_the_frozen(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "the gradient is still None")
def none_stays_none(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            mean = torch.zeros_like(parameter) if gradient is None else gradient.clone()
            dist.all_reduce(mean)
            if gradient is not None:
                parameter.grad = mean / dist.get_world_size()


@ANSWERS.wrong(
    "05.average_gradients",
    "wrong",
    "divide by the world size, not by the",
    did="divided by the ranks that have a gradient",
)
def by_those_that_have_one(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            count = torch.tensor(float(parameter.grad is not None))
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(count)
            dist.all_reduce(parameter.grad)
            parameter.grad /= count.clamp(min=1)


@ANSWERS.wrong("05.average_gradients", "wrong", "A weight in two layers is one")
def tied_divided_twice(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


@ANSWERS.wrong("05.average_gradients", "wrong", "Only rank 0 has the mean.")
def reduced_to_rank_0(model):
    for parameter in with_zeros(model):
        dist.reduce(parameter.grad, 0)
        if dist.get_rank() == 0:
            parameter.grad /= dist.get_world_size()


@ANSWERS.wrong(
    "05.average_gradients", "wrong", "Every rank has the gradients of rank 0"
)
def broadcast_from_0(model):
    for parameter in with_zeros(model):
        dist.broadcast(parameter.grad, 0)


@ANSWERS.wrong("05.average_gradients", "wrong", "The world size is not always 4")
def four_ranks(model):
    for parameter in with_zeros(model):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 4


@ANSWERS.wrong("05.average_gradients", "crashed", "Flatten each gradient first")
def not_flattened(model):
    flat = torch.cat([p.grad for p in with_zeros(model)])
    dist.all_reduce(flat)


@ANSWERS.wrong("05.average_gradients", "wrong", "Your code calls average_gradients")
def average_of_ours(model):
    sgd.average_gradients(model)


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


ANSWERS.wrong("05.sampler", "wrong", "the class itself, not an object of it")(
    Given(10, 4, 0, True, 0, False)
)


@ANSWERS.wrong("05.sampler", "not attempted", "NotImplementedError")
class SamplerStub(Given):
    def __len__(self):
        raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("05.sampler", "wrong", "You gave each rank a stretch of the order.")
class Stretches(Given):
    def __iter__(self):
        first = self.rank * len(self)
        return iter(self.padded()[first : first + len(self)])


@ANSWERS.wrong("05.sampler", "wrong", "The ranks get different numbers of items.")
class WithoutPadding(Given):
    def __len__(self):
        return len(range(self.rank, self.n_items, self.world_size))

    def __iter__(self):
        return iter(self.order()[self.rank :: self.world_size])


@ANSWERS.wrong("05.sampler", "wrong", "The ranks get different numbers of items.")
class WithoutPaddingButLen(Given):
    def __iter__(self):
        return iter(self.order()[self.rank :: self.world_size])


@ANSWERS.wrong("05.sampler", "wrong", "You padded with the last item.")
class PaddedWithTheLast(Given):
    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        return (order + order[-1:] * total)[:total]


@ANSWERS.wrong("05.sampler", "wrong", "You padded with item 0.")
class PaddedWithZero(Given):
    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        return (order + [0] * total)[:total]


@ANSWERS.wrong("05.sampler", "wrong", "0, then 1, ... in the example")
class PaddedWithTheFirst(Given):
    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        return (order + order[:1] * total)[:total]


@ANSWERS.wrong("05.sampler", "wrong", "so nothing is missing; but world_size - n_items")
class PadsWhereItDivides(Given):
    def __iter__(self):
        order = self.order()
        if self.drop_last:
            order = order[: len(self) * self.world_size]
        else:
            order += order[: self.world_size - len(order) % self.world_size]
        return iter(order[self.rank :: self.world_size])


@ANSWERS.wrong("05.sampler", "crashed", "`list(range(n))`")
class OfARange(Given):
    def order(self):
        return range(self.n_items)


@ANSWERS.wrong("05.sampler", "too slow", "`.tolist()` makes a list of a tensor")
class DoublesATensor(Given):
    def order(self):
        return torch.tensor(super().order())


@ANSWERS.wrong("05.sampler", "wrong", "You padded with the end of the order.")
class PaddedWithTheEnd(Given):
    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        return (order + order[len(order) - total :])[:total]


@ANSWERS.wrong("05.sampler", "wrong", "You repeated the order once.")
class PaddedOnce(Given):
    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        if len(order) < total:
            order = order + order[: total - len(order)]
        return order[:total]


@ANSWERS.wrong("05.sampler", "wrong", "`order[:-0]` is empty")
class CutsNothingOff(Given):
    def padded(self):
        if self.drop_last:
            return self.order()[: -(self.n_items % self.world_size)]
        return super().padded()


@ANSWERS.wrong("05.sampler", "wrong", "You left out the first items")
class CutInFront(Given):
    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        while len(order) < total:
            order = order + order
        return order[-total:] if self.drop_last else order[:total]


@ANSWERS.wrong("05.sampler", "wrong", "`len(sampler)` is how many items this rank gets")
class DropsWhereItDivides(Given):
    def __len__(self):
        if self.drop_last:
            return math.ceil((self.n_items - self.world_size) / self.world_size)
        return super().__len__()


@ANSWERS.wrong("05.sampler", "wrong", "Shuffle all items first")
class ShufflesItsShare(Given):
    def __iter__(self):
        order = list(range(self.n_items)) * self.world_size
        mine = order[: len(self) * self.world_size][self.rank :: self.world_size]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(mine)
        return iter(mine)


@ANSWERS.wrong("05.sampler", "wrong", "Another generator, such as random.Random")
class PythonsShuffle(Given):
    def order(self):
        order = list(range(self.n_items))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        return order


@ANSWERS.wrong("05.sampler", "wrong", "An iterator goes through them once")
class OneIterator(Given):
    def __init__(self, *settings):
        super().__init__(*settings)
        self.items = super().__iter__()

    def __iter__(self):
        return self.items


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


@ANSWERS.wrong("05.sampler", "wrong", "neither 2.0 nor '2'")
class Floats(Given):
    def __iter__(self):
        return iter([float(item) for item in Given.__iter__(self)])


@ANSWERS.wrong("05.sampler", "wrong", "neither 2.0 nor '2'")
class Texts(Given):
    def __iter__(self):
        return iter([str(item) for item in Given.__iter__(self)])


@ANSWERS.wrong("05.sampler", "wrong", "changed the random numbers of the whole program")
class SeedsNumPy(Given):
    def __iter__(self):
        numpy.random.seed(self.seed)
        return super().__iter__()


@ANSWERS.wrong("05.sampler", "wrong", "changed the random numbers of the whole program")
class SeedsWhenItIsMade(Given):
    def __init__(self, *settings):
        super().__init__(*settings)
        torch.manual_seed(self.seed)


@ANSWERS.wrong("05.sampler", "wrong", "With drop_last the order is cut")
class NeverDrops(Given):
    def __len__(self):
        return math.ceil(self.n_items / self.world_size)


@ANSWERS.wrong("05.sampler", "wrong", "Items are lost. Without drop_last nothing")
class AlwaysDrops(Given):
    def __len__(self):
        return self.n_items // self.world_size


@ANSWERS.wrong("05.sampler", "wrong", "Every epoch has the same order")
class EpochForgotten(Given):
    def order(self):
        order = order_of(self.n_items, self.seed)
        return order if self.shuffle else sorted(order)


@ANSWERS.wrong(
    "05.sampler",
    "wrong",
    "The rank is in the seed",
    did="the rank in the seed of the sampler",
)
class RankInTheSeed(Given):
    def order(self):
        if not self.shuffle:
            return list(range(self.n_items))
        return order_of(self.n_items, self.seed + self.epoch + self.rank)


@ANSWERS.wrong("05.sampler", "wrong", "The same epoch, once more, gave other items.")
class NotSeeded(Given):
    def order(self):
        if not self.shuffle:
            return list(range(self.n_items))
        self.seed += 1
        return order_of(self.n_items, self.seed - 1 + self.epoch)


@ANSWERS.wrong("05.sampler", "wrong", "changed the random numbers of the whole program")
class SeedsTheProgram(Given):
    def order(self):
        if not self.shuffle:
            return list(range(self.n_items))
        torch.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.n_items).tolist()


class RepeatsTheOrder(Given):
    """Of a tensor, `*` does something else than of a list."""

    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        return (order * math.ceil(total / self.n_items))[:total]


ANSWERS.right("05.sampler")(RepeatsTheOrder)


@ANSWERS.wrong("05.sampler", "wrong", "calculate with its numbers")
class MultipliesATensor(RepeatsTheOrder):
    def order(self):
        order = super().order()
        return torch.tensor(order) if self.shuffle else order


@ANSWERS.wrong("05.sampler", "wrong", "the last one is n_items - 1")
class OneItemMore(RepeatsTheOrder):
    def order(self):
        return list(range(self.n_items + 1))


@ANSWERS.wrong("05.sampler", "crashed", "of a tensor it adds up the numbers")
class AddsPartOfATensor(Given):
    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        if self.shuffle:
            order = torch.tensor(order)
            return (order + order[: total - self.n_items]).tolist()
        return super().padded()


@ANSWERS.wrong("05.sampler", "wrong", "too many follow")
class RepeatsAndNeverCuts(Given):
    def padded(self):
        order, total = self.order(), len(self) * self.world_size
        return order * math.ceil(total / self.n_items)


@ANSWERS.wrong("05.sampler", "wrong", "Begin at `rank`.")
class RankForgotten(Given):
    def __iter__(self):
        return iter(self.padded()[:: self.world_size])


@ANSWERS.wrong("05.sampler", "wrong", "though shuffle is False")
class AlwaysShuffles(Given):
    def order(self):
        return order_of(self.n_items, self.seed + self.epoch)


@ANSWERS.wrong("05.sampler", "wrong", "Epoch 0 is right, epoch 1 is not.")
class EpochSubtracted(Given):
    def order(self):
        if not self.shuffle:
            return list(range(self.n_items))
        return order_of(self.n_items, self.seed - self.epoch)


@ANSWERS.wrong("05.sampler", "wrong", "With shuffle=True the order is drawn")
class NeverShuffles(Given):
    def order(self):
        return list(range(self.n_items))


@ANSWERS.wrong("05.sampler", "wrong", "`len(sampler)` is how many items this rank gets")
class LengthOfAll(Given):
    def __len__(self):
        return self.n_items

    def __iter__(self):
        length = Given.__len__(self)
        order = list(itertools.islice(itertools.cycle(self.order()), length * 9))
        total = length * self.world_size
        return iter(order[:total][self.rank :: self.world_size])


@ANSWERS.wrong("05.sampler", "crashed", "`__iter__` must `return` an iterator")
class ReturnsAList(Given):
    def __iter__(self):
        return self.padded()[self.rank :: self.world_size]


@ANSWERS.wrong("05.sampler", "crashed", "`__len__` must `return` a whole number")
class LengthIsAFloat(Given):
    def __len__(self):
        return self.n_items / self.world_size


@ANSWERS.wrong("05.sampler", "crashed", "`__len__` must `return` a whole number")
class LengthNotReturned(Given):
    def __len__(self):
        self.n_items // self.world_size


@ANSWERS.wrong("05.sampler", "crashed", "range takes no other")
class RangeOfAFloat(Given):
    def __iter__(self):
        items = self.padded()
        each = len(items) / self.world_size
        return iter([items[self.rank + i * self.world_size] for i in range(each)])


@ANSWERS.wrong("05.sampler", "crashed", "`__iter__` must `return` an iterator")
class ReturnsNothing(Given):
    def __iter__(self):
        self.padded()


@ANSWERS.wrong("05.sampler", "wrong", "It would work: but it is what you build here")
class TorchsOwn(Given):
    def __iter__(self):
        return iter(DistributedSampler(range(self.n_items), self.world_size, self.rank))


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


@ANSWERS.wrong("05.accuracy", "not attempted", "still raises NotImplementedError")
def accuracy_stub(right, n_items):
    raise NotImplementedError("Write your code here.")


def own_items(right, n_items):
    return right[: len(range(dist.get_rank(), n_items, dist.get_world_size()))]


@ANSWERS.wrong("05.accuracy", "wrong", "Some items are counted twice")
def repeats_counted(right, n_items):
    counts = torch.tensor([right.sum(), len(right)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


@ANSWERS.wrong("05.accuracy", "wrong", "Some items are counted twice")
def mean_of_padded_means(right, n_items):
    mean = right.float().mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@ANSWERS.wrong("05.accuracy", "wrong", "accuracy can come out above 1")
def repeats_over_n_items(right, n_items):
    count = right.sum()
    dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "as if the model got all of them right")
def repeats_taken_for_right(right, n_items):
    counts = torch.tensor([right.sum(), len(right)])
    dist.all_reduce(counts)
    return (counts[0].item() - (counts[1].item() - n_items)) / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "Items are left out.")
def as_if_it_divided(right, n_items):
    mine = right[: n_items // dist.get_world_size()]
    counts = torch.tensor([mine.sum(), len(mine)])
    dist.all_reduce(counts)
    return counts[0].item() / max(counts[1].item(), 1)


@ANSWERS.wrong("05.accuracy", "wrong", "Items are left out.")
def as_if_it_divided_over_n_items(right, n_items):
    count = right[: n_items // dist.get_world_size()].sum()
    dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "You put the items of all ranks one after")
def gathered_one_after_another(right, n_items):
    there = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(there, right)
    return torch.cat(there)[:n_items].double().mean().item()


@ANSWERS.wrong("05.accuracy", "wrong", "ReduceOp.AVG divides by the number of ranks.")
def mean_of_the_counts(right, n_items):
    count = own_items(right, n_items).sum().double()
    dist.all_reduce(count, op=dist.ReduceOp.AVG)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "True + True is True")
def added_up_as_bools(right, n_items):
    mine = own_items(right, n_items)
    dist.all_reduce(mine)
    return mine.sum().item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "what you divide by is counted with them")
def own_over_all(right, n_items):
    counts = torch.tensor([own_items(right, n_items).sum(), len(right)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


@ANSWERS.wrong(
    "05.accuracy",
    "wrong",
    "That is the mean of the ranks' accuracies.",
    did="a mean of accuracies, without the repeated items",
)
def mean_of_the_means(right, n_items):
    mean = own_items(right, n_items).float().mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@ANSWERS.wrong("05.accuracy", "wrong", "A rank without items of its own")
def weighted_means(right, n_items):
    mine = own_items(right, n_items)
    total = mine.float().mean() * len(mine)
    dist.all_reduce(total)
    return total.item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "That is the accuracy of this rank's items")
def of_this_rank(right, n_items):
    return right.float().mean().item()


@ANSWERS.wrong("05.accuracy", "wrong", "That is how many are right.")
def the_count(right, n_items):
    count = own_items(right, n_items).sum()
    dist.all_reduce(count)
    return count.item()


@ANSWERS.wrong("05.accuracy", "wrong", "Only rank 0 has the right value.")
def on_rank_0(right, n_items):
    count = own_items(right, n_items).sum()
    dist.reduce(count, 0)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "not a percentage")
def in_percent(right, n_items):
    return 100 * counts_added_up(right, n_items)


@ANSWERS.wrong("05.accuracy", "wrong", "You left out the last item of every rank.")
def without_the_last(right, n_items):
    count = right[:-1].sum()
    dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "You left out the last item of every rank.")
def without_the_last_twice(right, n_items):
    counts = torch.tensor([right[:-1].sum(), len(right[:-1])])
    dist.all_reduce(counts)
    return counts[0].item() / max(counts[1].item(), 1)


@ANSWERS.wrong("05.accuracy", "wrong", "did you divide with `//`?")
def rounded_to_zero(right, n_items):
    count = own_items(right, n_items).sum()
    dist.all_reduce(count)
    return count.item() // n_items


@ANSWERS.wrong("05.accuracy", "wrong", "Is no right answer counted?")
def counts_nothing(right, n_items):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = right[: len(range(n_items, rank, world_size))].sum()
    dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "Add up the counts of all ranks first.")
def never_reduced(right, n_items):
    return own_items(right, n_items).sum().item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "")
def counted_in_uint8(right, n_items):
    count = own_items(right, n_items).sum().to(torch.uint8)
    dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "wrong", "")
def counted_in_float16(right, n_items):
    count = own_items(right, n_items).sum().half()
    dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "crashed", "tensors of the same size: add up counts")
def reduces_its_own_items(right, n_items):
    mine = own_items(right, n_items).int()
    dist.all_reduce(mine)
    return mine.sum().item() / n_items


@ANSWERS.wrong("05.accuracy", "crashed", "needs one tensor for each rank")
def gathers_into_one(right, n_items):
    there = [torch.empty_like(right)]
    dist.all_gather(there, right)
    return torch.cat(there)[:n_items].double().mean().item()


@ANSWERS.wrong("05.accuracy", "stuck", "an `if` on the rank around a collective?")
def reduced_by_rank_0_only(right, n_items):
    count = own_items(right, n_items).sum()
    if dist.get_rank() == 0:
        dist.all_reduce(count)
    return count.item() / n_items


@ANSWERS.wrong("05.accuracy", "crashed", "The mean of True and False has no type.")
def mean_of_bools(right, n_items):
    return right.mean().item()


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


@ANSWERS.wrong("05.spot_the_loader", "not attempted", "Repair the code")
def batches_of_epochs(dataset, global_batch, n_epochs):
    size = dist.get_world_size()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, batch_size=global_batch / float(size), sampler=sampler, shuffle=True
    )
    epochs = []
    for _ in range(n_epochs):
        epochs.append(list(loader))
    return epochs


def epochs_of(loader, sampler, n_epochs, set_epoch=True):
    epochs = []
    for epoch in range(n_epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        epochs.append(list(loader))
    return epochs


@ANSWERS.wrong("05.spot_the_loader", "crashed", "`//` makes an int.")
def still_a_float(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    share = global_batch / dist.get_world_size()
    loader = DataLoader(dataset, share, sampler=sampler)
    return epochs_of(loader, sampler, n_epochs)


@ANSWERS.wrong("05.spot_the_loader", "crashed", "Let the sampler do it")
def both_shuffle(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    share = global_batch // dist.get_world_size()
    loader = DataLoader(dataset, share, sampler=sampler, shuffle=True)
    return epochs_of(loader, sampler, n_epochs)


@ANSWERS.wrong("05.spot_the_loader", "wrong", "did you forget `return`?")
def epochs_not_returned(dataset, global_batch, n_epochs):
    epochs_repaired(dataset, global_batch, n_epochs)


@ANSWERS.wrong("05.spot_the_loader", "wrong", "`extend` in the place of `append`")
def one_flat_list(dataset, global_batch, n_epochs):
    epochs = epochs_repaired(dataset, global_batch, n_epochs)
    return [batch for epoch in epochs for batch in epoch]


@ANSWERS.wrong("05.spot_the_loader", "wrong", "the same items in every epoch")
def shuffled_share(dataset, global_batch, n_epochs):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = Subset(dataset, order_of(len(dataset), seed=5)[rank::world_size])
    loader = DataLoader(mine, global_batch // world_size, shuffle=True)
    return [list(loader) for _ in range(n_epochs)]


@ANSWERS.wrong(
    "05.spot_the_loader",
    "wrong",
    "epochs have the same order",
    did="left out `set_epoch`",
)
def no_set_epoch(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    return epochs_of(loader, sampler, n_epochs, set_epoch=False)


@ANSWERS.wrong("05.spot_the_loader", "wrong", "Do it in each epoch.")
def one_list_for_all(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    return [list(loader)] * n_epochs


@ANSWERS.wrong("05.spot_the_loader", "wrong", "or an iterator, which is read when")
def an_iterator_for_each_epoch(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    epochs = []
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        epochs.append(iter(loader))
    return epochs


@ANSWERS.wrong("05.spot_the_loader", "wrong", "they are a DataLoader or an iterator")
def a_loader_for_each_epoch(dataset, global_batch, n_epochs):
    sampler, epochs = DistributedSampler(dataset), []
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        size = global_batch // dist.get_world_size()
        epochs.append(DataLoader(dataset, size, sampler=sampler))
    return epochs


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


@ANSWERS.wrong("05.spot_the_loader", "crashed", "the DataLoader has none")
def set_epoch_of_the_loader(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    return epochs_of(loader, loader, n_epochs)


@ANSWERS.wrong("05.spot_the_loader", "wrong", "it must be told before each one")
def set_epoch_too_late(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    epochs = []
    for epoch in range(n_epochs):
        epochs.append(list(loader))
        sampler.set_epoch(epoch)
    return epochs


@ANSWERS.wrong("05.spot_the_loader", "wrong", "Each rank has batches of global_batch")
def batch_not_divided(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch, sampler=sampler)
    return epochs_of(loader, sampler, n_epochs)


@ANSWERS.wrong("05.spot_the_loader", "wrong", "goes through the whole data set")
def no_sampler(dataset, global_batch, n_epochs):
    share = global_batch // dist.get_world_size()
    loader = DataLoader(dataset, share, shuffle=True)
    return [list(loader) for _ in range(n_epochs)]


@ANSWERS.wrong("05.spot_the_loader", "wrong", "all must shuffle alike")
def seeded_by_rank(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset, seed=dist.get_rank())
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    return epochs_of(loader, sampler, n_epochs)


@ANSWERS.wrong("05.spot_the_loader", "wrong", "It has 0 items; 4 were expected.")
def epochs_of_nothing(dataset, global_batch, n_epochs):
    return [[] for _ in range(n_epochs)]


@ANSWERS.wrong("05.spot_the_loader", "wrong", "`list(loader)` reads the batches.")
def loaders_for_batches(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    epochs = []
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        epochs.append(loader)
    return epochs


@ANSWERS.wrong("05.spot_the_loader", "wrong", "Somebody must shuffle")
def nobody_shuffles(dataset, global_batch, n_epochs):
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, global_batch // dist.get_world_size(), sampler=sampler)
    return epochs_of(loader, sampler, n_epochs)


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
