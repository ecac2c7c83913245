"""Lesson 05, distributed SGD by hand: the tasks of its exercise."""

import builtins
import contextlib
import operator
import pickle
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from course_utils.measure.under_way import NO_VALUE_YET, REDUCING, Log
from course_utils.questions.lesson_05 import PREDICT_RATE
from course_utils.tasks.compare import are_same
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.task import OUT_OF_STEP, Miss, Task

# ------------------------------------------------------------------------- local_batch

TYPE = "its type"
TOGETHER = "rows of all ranks together"
MORE = "rows that one rank has more than another"


def observe_batches(answer, global_batch, world_size):
    sizes = [answer(global_batch, world_size, rank) for rank in range(world_size)]
    strange = [size for size in sizes if type(size) is not int]
    if None in sizes:
        return None
    if strange:
        return {TYPE: type(strange[0]).__name__}
    # Hand them over, as one would: a DataLoader refuses 0.
    rows = [
        len(next(iter(DataLoader(range(global_batch), batch_size=size))))
        for size in sizes
    ]
    return {TYPE: "int", TOGETHER: sum(rows), MORE: max(rows) - min(rows)}


MORE_ROWS = "int(takes_one_more)"

LOCAL_BATCH = Task(
    id="05.local_batch",
    title="A whole number for each rank",
    stars=1,
    where="here",
    observe=observe_batches,
    cases=((128, 4), (10, 4), (128, 3), (64, 1), (32, 5), (100, 8), (7, 7), (23, 6)),
    misses=(
        Miss(
            f" + {MORE_ROWS}",
            "",
            "Every rank gets global_batch // world_size rows, and the rest of the "
            "division is lost. Some ranks must take one row more.",
        ),
        Miss(
            MORE_ROWS,
            "(global_batch % world_size > 0)",
            "You rounded up on every rank: together that is more than the global "
            "batch. Only some ranks take one row more.",
        ),
        Miss(
            MORE_ROWS,
            "1",
            "Every rank takes one row more, also where nothing is left over. Only as "
            "many ranks do so as rows are left over: global_batch % world_size.",
        ),
        Miss(
            "rank <",
            "rank <=",
            "One rank too many takes one more: the first is rank 0, so it is `<`, not "
            "`<=`.",
        ),
        Miss(
            f"// world_size + {MORE_ROWS}",
            "",
            "Each rank would work on the whole global batch.",
        ),
        Miss(
            MORE_ROWS,
            "(global_batch % world_size) * (rank == world_size - 1)",
            "The sum is right, but one rank has several rows more than another, and "
            "all ranks wait for the slowest. Give no rank more than one row extra.",
        ),
        Miss(
            "global_batch // world_size + int(takes_one_more)",
            "global_batch / world_size",
            "It is a float, and a DataLoader refuses it. `/` makes a float, also where "
            "the division has no rest; `//` makes an int.",
        ),
        Miss(
            "return global_batch",
            "return takes_one_more < global_batch",
            "It returned True or False, not a number of rows. In `a + b < c` the sum "
            "comes before the comparison: `a + (b < c)` needs its parentheses.",
        ),
    ),
    because={
        TYPE: "A DataLoader wants one whole number of Python's own type int, that of "
        "this rank: no list of all. Of a number of NumPy's, make it one with int(...).",
        MORE: "No rank may have more than one row more than another: all ranks wait "
        "for the slowest.",
    },
    errors={
        "batch_size=0": "One rank gets no rows at all. There are at least as many rows "
        "as ranks, so each rank gets at least one.",
    },
    otherwise="The batches of all ranks together must be the global batch, and no rank "
    "may have more than one row more than another.",
    hints=(
        "128 rows on 3 ranks: 42 for each, and 2 are left over. Who takes them?",
        "`//` gives what every rank gets, `%` gives how many are left over. As many "
        "ranks take one row more. A rank can find out by itself whether it is one of "
        "them.",
        "Two parts:\n"
        "  rows = global_batch // world_size\n"
        "  extra = 1 if rank < ... else 0   # how many ranks take one more?\n"
        "  return rows + extra",
    ),
)

# --------------------------------------------------------------------------- partition

LISTS = "it is a list with one list for each rank"
WHOLE = "each item is a whole number"
LAST = "each item is one of 0 to n_items - 1"
LOST = "items that are in no share"
TWICE = "items that are there twice"
LONGER = "how much longer one share is than another"
MIXED = "the items are mixed"
SAME_AGAIN = "the same with the same seed"
OTHER_SEED = "other shares with another seed"
SAME_EVERYWHERE = "the same on every rank"


def observe_shares(answer, n_items, parts, seed):
    """Call it with several seeds, and compare with what other ranks got."""
    with other_hashes():
        shares = as_lists(answer(n_items, parts, seed))
        is_list = isinstance(shares, list) and len(shares) == parts
        seen = {LISTS: is_list}
        if is_list:
            items = [item for share in shares for item in share]
            seen[WHOLE] = whole = all(type(item) is int for item in items)
            if whole:
                lengths = list(map(len, shares))
                seen |= {
                    LAST: all(0 <= item < n_items for item in items),
                    LOST: len(set(range(n_items)) - set(items)),
                    TWICE: len(items) - len(set(items)),
                    LONGER: max(max(lengths) - min(lengths), 1),
                }
        if n_items >= 40 and parts > 1 and seen.get(TWICE) == 0 == seen[LOST]:
            again = as_lists(answer(n_items, parts, seed))
            # More than two, for an answer that has only a few different orders.
            others = [as_lists(answer(n_items, parts, seed + i)) for i in (1, 2, 12)]
            seen |= {
                MIXED: are_mixed(shares, n_items),
                SAME_AGAIN: again == shares,
                OTHER_SEED: all_differ([shares, *others])
                and (
                    n_items < 1000
                    or all(have_little_in_common(shares, o) for o in others)
                ),
            }
    everywhere = on_all_ranks(shares)
    if shares is None:
        return None
    return seen | {SAME_EVERYWHERE: all(o == everywhere[0] for o in everywhere)}


def as_lists(shares):
    """Shares as lists, and NumPy's and torch's whole numbers as Python's."""
    if not is_sequence(shares) or not all(map(is_sequence, shares)):
        return shares if shares is None else type(shares).__name__
    return [[as_item(item) for item in share] for share in shares]


def as_item(item):
    """It as a whole number, if it can be an index; else in words."""
    try:
        return operator.index(item)
    except TypeError:
        return repr(item)


def is_sequence(value):
    """Can one ask for its length, and for its first item? Also a tensor, a Subset."""
    if isinstance(value, str | dict) or getattr(value, "shape", None) == ():
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


@contextlib.contextmanager
def other_hashes():
    """Let the hash of a text be another one on each rank, as with torchrun.

    Here the ranks are forks of one process, and have the same hashes.
    """
    rank, original = dist.get_rank(), builtins.hash

    def of_this_rank(value):
        return original((value, f"on {rank}") if has_text(value) else value)

    builtins.hash = of_this_rank
    try:
        yield
    finally:
        builtins.hash = original


def has_text(value):
    """Is it a text, or a tuple with one in it?"""
    if isinstance(value, tuple | frozenset):
        return any(map(has_text, value))
    return isinstance(value, str | bytes)


def on_all_ranks(value):
    """The value of every rank. All ranks call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_regular(share):
    """Are these the items of a stretch, or every n-th item?"""
    items = sorted(share)
    return len({b - a for a, b in zip(items, items[1:], strict=False)}) <= 1


def are_mixed(shares, n_items):
    """Does a share look drawn from all items? More is asked of 1,000 than of few."""
    if any(map(is_regular, shares)):
        return False
    if n_items < 1000:
        return True
    ordered = [sorted(share) for share in shares]
    steps = [b - a for items in ordered for a, b in zip(items, items[1:], strict=False)]
    # One item of each n neighbours never leaves a gap of 2 n; chance does, often.
    return max(steps) >= 2 * len(shares) and all(
        items[-1] - items[0] >= n_items / 2 for items in ordered
    )


def all_differ(seeds):
    """Does each seed make other shares: not the same ones, dealt to other ranks?"""
    made = {frozenset(frozenset(share) for share in shares) for shares in seeds}
    return len(made) == len(seeds)


def have_little_in_common(shares, others):
    """Is less than half of each share together in a share of the others?"""
    return all(
        len(set(share) & set(other)) < len(share) / 2
        for share in shares
        for other in others
    )


PARTITION = Task(
    id="05.partition",
    title="A share for each rank",
    stars=2,
    observe=observe_shares,
    cases=((101, None), (40, None), (7, None), (3, None), (1, None), (1000, 7)),
    inputs=lambda case, rank, world_size: (case[0], case[1] or world_size, 17),
    instead="Shuffle the numbers 0 to n_items - 1, then deal them out.",
    misses=(
        Miss(
            "order[rank::world_size]",
            "order[rank * (n_items // world_size) : (rank + 1) * (n_items // "
            "world_size)]",
            "Items are lost: they are in no share, and nobody would ever train on "
            "them. If each share has n_items // world_size items, those of the rest "
            "belong to no rank.",
        ),
        Miss(
            "for rank in range(world_size)",
            "for rank in range(min(n_items, world_size))",
            "There must be one list for each rank, also where it is empty because "
            "there are more ranks than items.",
        ),
        Miss(
            "torch.randperm(n_items, generator=generator)",
            "torch.randint(n_items, (n_items,), generator=generator)",
            "Some items are in it twice, and others are missing. All shares must be "
            "cut from *one* order, which has each item once (torch.randperm draws such "
            "a one), and no two shares may overlap.",
        ),
        Miss(
            "[order[rank::world_size] for rank in range(world_size)]",
            "[list(c) for c in torch.tensor(order).chunk(world_size)]",
            "Each item is there once, but the lengths differ by more than 1, and all "
            "ranks wait for the one with the longest list. (`torch.chunk` rounds up, "
            "and the last chunk gets what is left.)",
        ),
    ),
    because={
        LISTS: "It must be a list of lists: share r is for rank r. (Tuples, and "
        "tensors or arrays with one dimension, are fine.)",
        WHOLE: "A rank takes `dataset[item]` of each of its items. So an item must be "
        "a whole number of type int: floats and texts are none. (NumPy's and torch's "
        "whole numbers are fine.)",
        LAST: "Items count from 0: the last one is n_items - 1.",
        LOST: "Some items are in no share, and nobody would ever train on them. Cut "
        "all shares from *one* order, which has each item once.",
        TWICE: "An item is in it twice. No two shares may overlap, and nothing is "
        "repeated: where n_items cannot be divided, some are one item shorter.",
        LONGER: "Each item is there once, but the lengths differ by more than 1, and "
        "all ranks wait for the one with the longest list.",
        MIXED: "Each item is there once. But a share is a stretch of the items, or "
        "every n-th one, or nearly so. Shuffle all items before you deal them out. All "
        "at once, not a few at a time.",
        SAME_AGAIN: "Called twice with the same seed, it gave different shares. Draw "
        "the order from a generator that begins with `seed`.",
        OTHER_SEED: "Among four seeds, some make the same shares, or nearly the same, "
        "perhaps dealt to other ranks. Each seed must make an order of its own, which "
        "decides the items that are in a share together.",
        SAME_EVERYWHERE: "The ranks have computed different shares, so some items go "
        "to two ranks and others to none. Take random numbers from a generator that "
        "begins with `seed`, the same on every rank. (The `hash` of a text differs, "
        "too.)",
    },
    hints=(
        "First one order of all items, the same on every rank. Then deal it out.",
        "torch.randperm draws an order, and its argument `generator` makes it the same "
        "on every rank. The slice [rank::n] of a list takes every n-th item, and no "
        "item is lost or taken twice.",
        "Three steps:\n"
        "  generator = torch.Generator()\n"
        "  generator.manual_seed(...)\n"
        "  order = torch.randperm(..., generator=generator).tolist()\n"
        "  return [order[rank::...] for rank in range(...)]",
    ),
)

# ------------------------------------------------------------------- average_gradients

PLAIN = "a network"
TIED = "a network with a weight in two layers"
FROZEN = "a network with a frozen layer"
UNUSED = "a network with a layer that no rank uses"
ONLY_FIRST = "a network with a layer that only rank 0 uses"
NOT_FIRST = "a network with a layer that rank 0 does not use"
ALL_FROZEN_BUT_ONE = "a network with one trained parameter"
NETWORKS = (PLAIN, TIED, FROZEN, ONLY_FIRST, NOT_FIRST, UNUSED, ALL_FROZEN_BUT_ONE)


class Net(nn.Module):
    """Four linear steps, so that gradients are whole numbers on every rank."""

    def __init__(self, kind):
        super().__init__()
        self.first = linear(4, 4, seed=1)
        self.middle = linear(4, 4, seed=2)
        self.last = linear(4, 2, seed=3)
        self.scale = nn.Parameter(torch.tensor(2.0))  # no dimensions
        self.register_buffer("steps", torch.tensor(7))
        if kind == TIED:
            self.middle.weight = self.first.weight
        if kind == FROZEN:
            self.first.requires_grad_(False)
        if kind == ALL_FROZEN_BUT_ONE:
            self.requires_grad_(False)
            self.last.bias.requires_grad_(True)

    def forward(self, x, through_middle):
        x = self.first(x)
        if through_middle:
            x = self.middle(x)
        return self.last(x) * self.scale


def after_backward(kind, rank):
    """A network, the same on every rank, with the gradients of this rank's rows."""
    uses_middle = {UNUSED: False, ONLY_FIRST: rank == 0, NOT_FIRST: rank > 0}
    network = Net(kind)
    rows = whole_numbers((2, 4), 10 + rank)
    network(rows, uses_middle.get(kind, True)).sum().backward()
    return network


WAITED = "asynchronous calls are waited for"
NO_FROZEN = "no frozen parameter has a gradient"
TWICE_USED = " (in two layers)"
NONE_MISSING = "each trained parameter has a gradient"
UNTOUCHED = "tensors under way are left alone"
SAME_PARAMETERS = "the parameters are as before"
SAME_BUFFERS = "the buffers are as before"
SAME_FLAGS = "requires_grad is as before"


def flags(network):
    return [p.requires_grad for p in network.parameters()]


def observe_gradients(answer, kind):
    network = after_backward(kind, dist.get_rank())
    parameters, buffers = list(network.parameters()), list(network.buffers())
    before = [p.detach().clone() for p in parameters], [b.clone() for b in buffers]
    trained = flags(network)
    with Log(*REDUCING) as log:
        answer(network)
    unused_here = kind == NOT_FIRST and dist.get_world_size() == 1
    if kind == UNUSED or unused_here:  # None is as good as zeros there
        for parameter in network.middle.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    tied = TWICE_USED if kind == TIED else ""
    has_one = [p.grad is not None for p in parameters]
    return {
        WAITED: log.missing() == 0,
        UNTOUCHED: not any(sent.changed for sent in log.sent),
        NO_FROZEN: not any(h and not t for h, t in zip(has_one, trained, strict=True)),
        NONE_MISSING: all(h or not t for h, t in zip(has_one, trained, strict=True)),
        **{
            f"gradient of {n}{tied if n == 'first.weight' else ''}": p.grad
            for n, p in network.named_parameters()
        },
        SAME_PARAMETERS: are_same(parameters, before[0]),
        SAME_BUFFERS: are_same(buffers, before[1]),
        SAME_FLAGS: flags(network) == trained,
    }


DIVIDE = "parameter.grad /= dist.get_world_size()"
BOTH = f"dist.all_reduce(parameter.grad)\n            {DIVIDE}"
BODY = f"""if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            {BOTH}"""

AVERAGE_GRADIENTS = Task(
    id="05.average_gradients",
    title="Average the gradients",
    stars=2,
    observe=observe_gradients,
    cases=tuple((kind,) for kind in NETWORKS),
    forbids=("torch.nn.parallel.DistributedDataParallel",),
    instead="`dist.all_reduce` adds up a tensor over the ranks.",
    misses=(
        Miss(
            DIVIDE,
            "pass",
            "That is the sum over the ranks. all_reduce adds up; the division by the "
            "world size is yours. If you divided: did the result reach "
            "`parameter.grad`? (`g = g / n` makes a new tensor.)",
        ),
        Miss(
            DIVIDE,
            "parameter.grad /= 4",
            "The world size is not always 4: ask for it.",
        ),
        Miss(
            BOTH,
            "dist.all_reduce(parameter.data)",
            "You reduced the parameters. The gradients, `parameter.grad`, must be "
            "averaged; the parameters are the same on every rank already.",
        ),
        Miss(
            BOTH,
            "pass",
            "The gradients are still each rank's own. Did you average something else "
            "(a copy), or forget to write the result into `parameter.grad`?",
        ),
        Miss(
            "dist.all_reduce(parameter.grad)",
            "dist.all_reduce(parameter.grad.clone())",
            "Each rank has its own gradient, divided by the world size: those of the "
            "other ranks are missing. Did you reduce a copy, and forget to write the "
            "result into `parameter.grad`?",
        ),
        Miss(
            DIVIDE,
            f"{DIVIDE}\n            {DIVIDE}",
            "It is divided twice. Divide before the all_reduce or after it, not both. "
            "(With ReduceOp.AVG the division is made for you.)",
        ),
        Miss(
            BODY,
            "count = torch.tensor(0.0 if parameter.grad is None else 1.0)\n"
            "            dist.all_reduce(count)\n"
            f"            {BODY.replace('dist.get_world_size()', 'count')}",
            "A missing gradient counts as zeros: divide by the world size, not by the "
            "number of ranks that have one. One process with all rows would have got "
            "nothing from those rows, either.",
        ),
        Miss(
            "if parameter.grad is None:",
            "if True:",
            "All gradients are zeros, and each rank's own are lost. Put zeros only "
            "where a gradient is None.",
        ),
    ),
    because={
        WAITED: "With async_op=True, the call returns before the result is there. Wait "
        "for it, `work.wait()`, before you use the gradient or return. "
        "(`get_future()` and `then()` do not wait: each begins something to wait for.)",
        UNTOUCHED: "A gradient was changed between its collective and the `wait()`. "
        "Until wait() has returned nobody may touch it: the change is lost, or is "
        "added up as well. Divide before the call, or after the wait().",
        NO_FROZEN: "A frozen parameter has got a gradient, and an optimizer with "
        "weight decay or momentum may move it now. Leave parameters alone that have "
        "requires_grad=False.",
        NONE_MISSING: "On a rank whose rows did not pass the layer, the gradient is "
        "still None. Its optimizer would leave the layer as it is, while the other "
        "ranks change theirs: the models drift apart. Every rank needs the mean.",
        TWICE_USED: "Without a tied weight it was right. A weight in two layers is one "
        "parameter with one gradient, which already has the sum of both uses: work on "
        "it once. `model.parameters()` names it once.",
        SAME_PARAMETERS: "The gradients are right, but the parameters have changed. "
        "Leave them to the optimizer.",
        SAME_BUFFERS: "The gradients are right, but a buffer has changed. Only "
        "gradients are averaged here: leave the buffers as they are.",
        SAME_FLAGS: "The gradients are right, but `requires_grad` of a parameter has "
        "changed: what was frozen would be trained from now on. Leave it as it is.",
    },
    errors={
        NO_VALUE_YET: "A future's `value()` does not wait: it fails while the result "
        "is not there yet. `wait()` waits, and returns the value.",
        "zero-dimensional tensor": "One parameter has no dimensions, and torch.cat "
        "cannot join it. Flatten each gradient first: `reshape(-1)`.",
        "None": "A gradient may be None: that of a frozen parameter, and that of a "
        "layer which this rank's rows did not pass. Leave frozen ones alone "
        "(`requires_grad` is False), and put zeros where a gradient is missing.",
        OUT_OF_STEP: "All ranks must make the same calls in the same order, whichever "
        "gradients there are: let a missing gradient count as zeros. Is there an `if` "
        "on the rank around a collective? Or a loop over a set? Its order may differ "
        "between ranks.",
    },
    otherwise="Every rank must end with the sum over the ranks, divided by the world "
    "size; a rank without a gradient counts as zeros. It is written into "
    "`parameter.grad`.",
    hints=(
        "A mean is a sum and a division. The tensors are the `.grad` of "
        "`model.parameters()`, which are in the same order on every rank.",
        "Every rank must make the same calls, whatever its own gradients are. So put "
        "zeros where a trained parameter has no gradient, and skip a parameter only "
        "if all ranks skip it.",
        "One all_reduce for each parameter is enough:\n"
        "  for parameter in model.parameters():\n"
        "      if not parameter.requires_grad:\n"
        "          continue\n"
        "      if parameter.grad is None:\n"
        "          parameter.grad = ...\n"
        "      dist.all_reduce(...)\n"
        "      parameter.grad /= ...",
    ),
)

# ----------------------------------------------------------------------------- sampler

LENGTH = "len(sampler)"
LEFT_EARLY = "epoch 0 after a loop that was left early"
BACK_AT_0 = "epoch 0 after epoch 5"
UNTOUCHED_NUMBERS = "random numbers elsewhere are untouched"


def observe_sampler(answer, n_items, world_size, rank, shuffle, seed, drop_last):
    torch.manual_seed(99)
    before = random_states()
    sampler = answer(n_items, world_size, rank, shuffle, seed, drop_last)
    seen = {"epoch 0": as_items(sampler), "epoch 0 once more": as_items(sampler)}
    next(iter(sampler), None)  # a loop that is left after one item
    seen[LEFT_EARLY] = as_items(sampler)
    for epoch in (1, 5):
        sampler.set_epoch(epoch)
        seen[f"epoch {epoch}"] = as_items(sampler)
    sampler.set_epoch(0)
    seen |= {BACK_AT_0: as_items(sampler), LENGTH: len(sampler)}
    return seen | {UNTOUCHED_NUMBERS: random_states() == before}


def as_items(indices):
    return [as_item(item) for item in indices]


def random_states():
    """Of torch, NumPy and Python, to be compared."""
    torchs = torch.get_rng_state().numpy().tobytes()
    return torchs, pickle.dumps((np.random.get_state(), random.getstate()))


ITERATOR = (
    "A DataLoader iterates over the sampler. `__iter__` must `return` an iterator, "
    "such as `iter(items)`, or be a generator."
)
JOINED = (
    "`+` joins two lists, but of a tensor it adds up the numbers. `.tolist()` makes a "
    "list of it."
)
SLICE = "order[self.rank : total : self.world_size]"
REPEAT = "order = order * math.ceil(total / self.n_items)"

SAMPLER = Task(
    id="05.sampler",
    title="A sampler of your own",
    stars=3,
    where="here",
    observe=observe_sampler,
    # n_items, world_size, rank, shuffle, seed, drop_last
    cases=(
        (10, 4, 2, False, 0, False),
        (10, 4, 0, False, 0, False),
        (10, 4, 3, False, 0, False),
        (12, 4, 1, False, 0, False),
        (12, 4, 1, False, 0, True),
        (10, 4, 3, False, 0, True),
        (10, 1, 0, False, 0, False),
        (23, 5, 4, True, 0, False),
        (23, 5, 1, True, 7, True),
        (100, 3, 2, True, 42, False),
        (24, 4, 0, True, 3, True),
        (3, 8, 6, False, 0, False),
        (3, 8, 7, True, 1, False),
        (3, 8, 1, False, 0, True),
    ),
    forbids=("torch.utils.data.distributed.DistributedSampler",),
    instead="torch.randperm draws an order, and slices such as [1::4] deal it out.",
    misses=(
        Miss(
            SLICE,
            "order[self.rank * len(self) : (self.rank + 1) * len(self)]",
            "Those are neighbours in the order: one stretch for each rank. "
            "DistributedSampler deals out one by one: begin at rank, then every "
            "world_size-th item.",
        ),
        Miss(
            REPEAT,
            "order = order + [order[-1]] * total",
            "You padded with the last item. DistributedSampler repeats the order from "
            "its beginning: 0, 1, ... in the example.",
        ),
        Miss(
            REPEAT,
            "order = order + order[: max(0, total - self.n_items)]",
            "The order was repeated once, and that is not enough here: 3 items on 8 "
            "ranks need it more than twice. Repeat it as often as it takes.",
        ),
        Miss(
            REPEAT,
            "pass",
            "The ranks get different numbers of items. All of them need as many, or "
            "one would make a step more than the others, and wait for ever. Pad the "
            "order, or cut it with drop_last.",
        ),
        Miss(
            REPEAT,
            "order = order + order[: self.world_size - self.n_items % "
            "self.world_size]\n        total = len(order)",
            "One item too many. world_size divides n_items here, so nothing is "
            "missing; but world_size - n_items % world_size is world_size then, not 0.",
        ),
        Miss(
            "math.floor if self.drop_last else math.ceil",
            "math.ceil",
            "With drop_last the order is cut, not padded: each rank gets n_items // "
            "world_size items.",
        ),
        Miss(
            "math.floor if self.drop_last else math.ceil",
            "math.floor",
            "Items are lost. Without drop_last nothing is cut: each rank gets "
            "ceil(n_items / world_size) items, and the first ones are repeated.",
        ),
        Miss(
            "if self.shuffle",
            "if False",
            "The items come in their own order. With shuffle=True the order is drawn "
            "by torch.randperm.",
        ),
        Miss(
            "self.rank : total",
            "0 : total",
            "These are the items of rank 0. Begin at `rank`.",
        ),
        Miss(
            "self.seed + self.epoch",
            "self.seed",
            "Every epoch has the same order: begin the generator with seed + epoch.",
        ),
        Miss(
            "self.seed + self.epoch",
            "self.seed + self.epoch + self.rank",
            "The rank is in the seed, so each rank draws another order, and items go "
            "to several ranks or to none. All ranks draw the same order, and each "
            "takes its own part of it.",
        ),
        Miss(
            f"iter({SLICE})",
            f"iter([{SLICE}[i] for i in torch.randperm(len(self), "
            "generator=torch.Generator().manual_seed(self.seed + self.epoch))])",
            "Shuffle all items first, then take this rank's part of them. Else a rank "
            "gets the same items in every epoch, in another order.",
        ),
    ),
    because={
        "once more": "The same epoch, once more, gave other items. `__iter__` must "
        "make a new iterator at each call, and the order may depend on seed and epoch "
        "only.",
        LEFT_EARLY: "A loop was left after its first item, and the next one did not "
        "begin anew. `__iter__` must make a new iterator at each call.",
        BACK_AT_0: "After set_epoch(5), set_epoch(0) gave other items than before. The "
        "order may depend on seed and epoch only. Is an old order kept?",
        LENGTH: "The items are right, `len(sampler)` is not: it is how many items this "
        "rank gets, ceil(n_items / world_size), or n_items // world_size with "
        "drop_last.",
        UNTOUCHED_NUMBERS: "The items are right. But a seed, such as "
        "torch.manual_seed, has changed the random numbers of the whole program, "
        "dropout's for example: they would begin anew with it. Take a "
        "`torch.Generator` of your own.",
        "epoch 1": "Epoch 0 is right, epoch 1 is not. Its order must be drawn by a "
        "generator that begins with seed + epoch.",
    },
    errors={
        "non-iterator": ITERATOR,
        "not iterable": ITERATOR,
        "range": "A range cannot be added to anything. Make a list of it: "
        "`list(range(n))`.",
        "must match the size of tensor": JOINED,
        "'Tensor' and 'list'": JOINED,
        "running": "Is there a loop that never ends? If it repeats the order: `order + "
        "order` makes a list longer, but of a tensor it adds up the numbers. "
        "`.tolist()` makes a list of a tensor.",
        "cannot be interpreted as an integer": "`__len__` must `return` a whole number "
        "of type int, and range takes no other: `//` and math.ceil make one, `/` does "
        "not.",
        "process group": "There are no ranks in this task: `rank` and `world_size` are "
        "arguments.",
    },
    otherwise="First the order of all items (with shuffling that of torch.randperm, "
    "whose generator begins with seed + epoch), as a list and not a tensor; then "
    "padding or cutting to a multiple of world_size; then every world_size-th item, "
    "beginning at rank.",
    hints=(
        "Three steps: an order of all items, a length that world_size divides, and "
        "every world_size-th item. Each step is a line or two.",
        "Too short? Add the beginning of the order, as often as it takes: 3 items on 8 "
        "ranks need it more than once. With drop_last, cut it to a multiple of "
        "world_size. The order must not depend on the rank.",
        "In __iter__:\n"
        "  order = ...       # a list: list(range(n)), or randperm(...).tolist()\n"
        "  total = len(self) * self.world_size\n"
        "  while len(order) < total:\n"
        "      order = order + order\n"
        "  order = order[:total]\n"
        "  return iter(order[self.rank :: ...])",
    ),
)

# ---------------------------------------------------------------------------- accuracy


def answered(n_items):
    """Which of the items the model gets right: not the same share on every rank.

    Of the items that are repeated, 0 is right, and 1 is so for some n_items only. So
    each of the near misses below comes out as another number.
    """
    return [item % 6 == 0 or item % 7 == n_items % 2 for item in range(n_items)]


def shard(n_items, rank, world_size):
    """What a rank has after an epoch with DistributedSampler(shuffle=False)."""
    sampler = DistributedSampler(range(n_items), world_size, rank, shuffle=False)
    right = answered(n_items)
    return torch.tensor([right[index] for index in sampler]), n_items


OWN = "own = len(range(rank, n_items, world_size))"
CUT = "count = right[:own].sum()"
SHARE = "count.item() / n_items"
SUM = "dist.all_reduce(count)"

ACCURACY = Task(
    id="05.accuracy",
    title="Accuracy over all ranks",
    stars=2,
    cases=(
        12,
        9,
        11,
        10,
        7,
        23,
        9007,
        3,
        1,
    ),  # float16 cannot count the 2575 right ones
    inputs=shard,
    misses=(
        Miss(
            CUT,
            "parts = [torch.empty_like(right) for _ in range(world_size)]\n"
            "    dist.all_gather(parts, right)\n"
            "    count = torch.cat(parts)[:n_items].sum() / world_size",
            "You put the items of all ranks one after another and cut at n_items. But "
            "that is not the order of the test set: the repeated ones are the last of "
            "*each* rank. Item i of rank r is item r + i × world_size.",
        ),
        Miss(
            SUM,
            "both = right[:own].clone(); dist.all_reduce(both); count = both.sum()",
            "Items got lost in the all-reduce: of a bool tensor, True + True is True. "
            "Count first, `sum()`, then add up the counts.",
        ),
        Miss(
            f"{SHARE}",
            "count.item() / (len(right) * world_size)",
            "The right answers are counted without the repeated items, but what you "
            "divide by is counted with them.",
        ),
        Miss(
            OWN,
            "own = len(right); n_items = own * world_size",
            "Some items are counted twice: the sampler has repeated the first ones, so "
            "that all ranks have as many. Item i of rank r is item r + i × world_size "
            "of the test set; where that is n_items or more, it is a repeated one.",
        ),
        Miss(
            OWN,
            "own = len(right)",
            "You divide by n_items, but among the right answers are those of repeated "
            "items: accuracy can come out above 1 like this.",
        ),
        Miss(
            OWN,
            "own = n_items // world_size",
            "Items are left out. Where world_size does not divide n_items, some ranks "
            "have one item more of their own than n_items // world_size.",
        ),
        Miss(
            OWN,
            "own = len(right) - 1",
            "You left out the last item of every rank. It is a repeated one on some "
            "ranks only, and on none where world_size divides n_items. Work out how "
            "many items are this rank's own.",
        ),
        Miss(
            SUM,
            "pass",
            "These are the right answers of this rank, divided by the items of all "
            "ranks. Add up the counts of all ranks first.",
        ),
        Miss(
            SUM,
            "count = right[:own].float().mean(); dist.all_reduce(count); "
            "n_items = world_size",
            "That is the mean of the ranks' accuracies. A rank with fewer items counts "
            "as much as one with more, so each of its items counts for more. Add up "
            "the counts, then divide once.",
        ),
        Miss(
            SUM,
            "count, n_items = right[:own].float().mean(), 1",
            "That is the accuracy of this rank's items alone. The others' are missing.",
        ),
        Miss(
            " / n_items",
            "",
            "That is how many are right. Divide it by the number of items.",
        ),
        Miss(
            " / n_items",
            " / world_size",
            "You divided the number of right answers by the number of ranks. Divide it "
            "by the number of items.",
        ),
        Miss(
            " / n_items",
            " // n_items",
            "It is 0. Is no right answer counted? Or did you divide with `//`? It cuts "
            "off what comes after the point, `/` does not.",
        ),
    ),
    errors={
        "mean(): ": "The mean of True and False has no type. Take the sum.",
        OUT_OF_STEP: "Every rank must make the same calls, with tensors of the same "
        "size. But the ranks' own items are not equally many, and some ranks may have "
        "none: add up counts. Is there an `if` on the rank around a collective?",
    },
    otherwise="Count the right answers among the items that are not repeated, add the "
    "counts of all ranks up, and divide once by n_items.",
    hints=(
        "Which of this rank's items are there twice? Work it out for 10 items on 4 "
        "ranks: the lesson has the table.",
        "Rank r has the items r, r + n, r + 2n, ... Those below n_items are its own: "
        "there are len(range(r, n_items, n)) of them, and they come first. Count the "
        "right ones among them, add up, and divide by n_items.",
        "Four lines:\n"
        "  mine = len(range(..., n_items, ...))    # how many are this rank's own\n"
        "  total = right[:mine].sum()\n"
        "  dist.all_reduce(...)\n"
        "  return total.item() / ...",
    ),
)

# --------------------------------------------------------------------- spot_the_loader

FIRST_ITEM = 1000  # so that no item is its own index
ROWS = "rows in the batches of each epoch"
AS_BATCHES = "a list of batches for each epoch"
OF_THE_DATASET = "all are items of the dataset"
ONCE = "each item once in each epoch"
MIXED_ITEMS = "a rank gets mixed items"
OTHER_ITEMS = "other items in each epoch"
OWN_LISTS = "epochs that are the same have lists of their own"
OTHER_ORDER = "another order in each epoch"
MIXED_ORDER = "the order is mixed"


def observe_loader(answer, n_items, global_batch, n_epochs):
    items = range(FIRST_ITEM, FIRST_ITEM + n_items)
    epochs = answer(torch.tensor(items), global_batch, n_epochs)
    mine = as_batches(epochs)
    everywhere = on_all_ranks(mine)
    if None in everywhere:
        return None if epochs is None else {AS_BATCHES: False}
    orders = [
        [item for their in everywhere for batch in their[epoch] for item in batch]
        for epoch in range(min(map(len, everywhere)))
    ]
    shares = [[item for batch in epoch for item in batch] for epoch in mine]
    alone = dist.get_world_size() == 1
    differ = all_different(shares)
    return {
        AS_BATCHES: True,
        ROWS: [[len(batch) for batch in epoch] for epoch in mine],
        OF_THE_DATASET: all(item in items for order in orders for item in order),
        ONCE: all(sorted(order) == list(items) for order in orders),
        MIXED_ITEMS: alone or not any(map(is_regular, shares)),
        MIXED_ORDER: not alone or not any(order == sorted(order) for order in orders),
        OWN_LISTS: differ or are_own(epochs),
        OTHER_ORDER: differ,
        OTHER_ITEMS: alone or all_different(map(sorted, shares)),
    }


def as_batches(epochs):
    """The items in each batch of each epoch; None if it is something else."""
    try:
        return [[list(map(int, batch)) for batch in epoch] for epoch in epochs]
    except (TypeError, ValueError):  # something else than batches of numbers
        return None


def are_own(epochs):
    """Has each epoch its own batches, and not something that reads them later?"""
    held = all(hasattr(epoch, "__getitem__") for epoch in epochs)
    return held and len(set(map(id, epochs))) == len(epochs)


def all_different(lists):
    found = [tuple(items) for items in lists]
    return len(set(found)) == len(found)


FLOAT_BATCH = (
    "A batch has a whole number of rows, and `/` makes a float, also where the "
    "division has no rest. `//` makes an int."
)
SAME_LISTS = (
    "Epochs have no lists of their own: several are one and the same, or they are a "
    "DataLoader or an iterator, which is read when the last epoch has been set. "
    "`list(loader)` reads the batches. Do it in each epoch."
)

SPOT_THE_LOADER = Task(
    id="05.spot_the_loader",
    title="Spot the bugs of a loader",
    stars=2,
    observe=observe_loader,
    cases=((96, 24, 3), (48, 12, 2)),
    misses=(
        Miss(
            "global_batch // size",
            "global_batch",
            "Each rank has batches of global_batch rows, so that a step of all ranks "
            "has more. Divide by the number of ranks.",
        ),
        Miss(
            "sampler=sampler",
            "shuffle=True",
            "Some items come twice in an epoch, others not at all, or every rank goes "
            "through the whole data set. The sampler gives each rank a share of it, "
            "and all ranks must shuffle alike.",
        ),
        Miss(
            "global_batch // size",
            "global_batch / size",
            FLOAT_BATCH,
        ),
        Miss(
            "sampler=sampler",
            "sampler=sampler, shuffle=True",
            "The sampler decides the order already, so the DataLoader must not "
            "shuffle. Let the sampler do it: its own shuffle is True by default.",
        ),
        Miss(
            "sampler.set_epoch",
            "loader.set_epoch",
            "The sampler has `set_epoch`, the DataLoader has none.",
        ),
    ),
    because={
        AS_BATCHES: "It must be a list with one entry for each epoch, and that entry a "
        "list of batches. (`extend` in the place of `append` puts all batches into one "
        "list.)",
        ROWS: "Each rank needs batches of global_batch // world_size rows, in one list "
        "for each epoch, and together all ranks go through the data set once.",
        OF_THE_DATASET: "These are not the dataset's items, which are numbers from "
        "1,000 on here. A sampler gives only their indices: take `dataset[i]` of each, "
        "as a DataLoader does.",
        ONCE: "Some items come twice in an epoch, others not at all. If there are "
        "several ranks, all must shuffle alike: DistributedSampler wants the same seed "
        "everywhere.",
        MIXED_ITEMS: "A rank always gets a stretch of the data set, or every n-th item "
        "of it. The whole data set should be shuffled before it is dealt out.",
        MIXED_ORDER: "The items come in the order of the data set. Somebody must "
        "shuffle.",
        OWN_LISTS: SAME_LISTS,
        OTHER_ORDER: "Epochs have the same order. A sampler does not notice that a new "
        "epoch begins: it must be told before each one, by "
        "`sampler.set_epoch(epoch)`.",
        OTHER_ITEMS: "The order changes, but a rank gets the same items in every "
        "epoch. All items should be dealt out anew: that is the sampler's work, once "
        "it knows the epoch.",
    },
    errors={
        "batch_size should be a positive integer": FLOAT_BATCH,
        "integer division or modulo by zero": "The world size is not 0. Which two "
        "numbers do you divide?",
    },
    otherwise="Each rank gets batches of global_batch // world_size items, other ones "
    "in every epoch.",
    hints=(
        "Run it: two of the bugs raise an error, one after the other. Read what the "
        "DataLoader says. The third one says nothing.",
        "`/` makes a float. A sampler and shuffle=True both want to decide the order. "
        "And for the third: print two epochs, one below the other.",
        "Three places:\n"
        "  batch_size=global_batch // ...\n"
        "  shuffle=True                   # whose job is it?\n"
        "  for epoch in range(n_epochs):\n"
        "      sampler.set_...(...)",
    ),
)

TASKS = (
    PREDICT_RATE,
    LOCAL_BATCH,
    PARTITION,
    AVERAGE_GRADIENTS,
    SAMPLER,
    ACCURACY,
    SPOT_THE_LOADER,
)
