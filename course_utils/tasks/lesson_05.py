"""Lesson 05, distributed SGD by hand: the tasks of its exercise."""

import itertools
import operator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from course_utils.measure.state import random_state, state_of
from course_utils.measure.under_way import REDUCING, Log
from course_utils.questions.lesson_05 import PREDICT_RATE
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.send_recv import told_by_all
from course_utils.tasks.task import OUT_OF_STEP, Miss, Task

# ------------------------------------------------------------------------- local_batch

TYPE = "its type"
TOGETHER = "rows of all ranks together"
MORE = "rows that one rank has more than another"


def observe_batches(answer, global_batch, world_size):
    sizes = [answer(global_batch, world_size, rank) for rank in range(world_size)]
    if None in sizes:
        return None
    strange = [size for size in sizes if type(size) is not int]
    if strange:
        return {TYPE: type(strange[0]).__name__}
    return {TYPE: "int", TOGETHER: sum(sizes), MORE: max(sizes) - min(sizes)}


ONE_MORE = "int(takes_one_more)"

LOCAL_BATCH = Task(
    id="05.local_batch",
    title="A whole number for each rank",
    stars=1,
    where="here",
    observe=observe_batches,
    cases=((128, 4), (10, 4), (128, 3), (64, 1), (32, 5), (100, 8), (7, 7), (23, 6)),
    misses=(
        Miss(
            f" + {ONE_MORE}",
            "",
            "Every rank gets global_batch // world_size rows, or as many by rounding. "
            "The remainder is lost: some ranks must take one row more.",
        ),
        Miss(
            ONE_MORE,
            "(global_batch % world_size > 0)",
            "Too many, as if every rank rounded up. Only some ranks take one row more: "
            "decide by `rank` which ones.",
        ),
        Miss(
            "rank <",
            "rank <=",
            "One rank too many takes one more. Ranks count from 0, so write `<`, not "
            "`<=`.",
        ),
    ),
    because={
        TYPE: "A DataLoader wants one number of type int: no list, and no float. `//` "
        "makes an int of ints, `/` a float. `int(...)` converts a NumPy number.",
        MORE: "The sum is right, but one rank has several rows more than another, and "
        "all ranks wait for the slowest. Give no rank more than one row extra.",
    },
    otherwise="The batches of all ranks together must be the global batch, and no rank "
    "may have more than one row more than another.",
    hints=(
        "128 rows on 3 ranks: 42 for each, and 2 are left over. Who takes them?",
        "`//` gives what every rank gets, `%` gives how many are left over. That many "
        "ranks take one row more.",
        "The shape:\n"
        "  rows = ...      # what every rank gets\n"
        "  if ...:         # is this one of the ranks that take one more?\n"
        "      rows += 1\n"
        "  return rows",
    ),
)

# --------------------------------------------------------------------------- partition

LISTS = "a list of whole numbers for each rank"
LOST = "items that are in no share"
TOO_MANY = "items too many"
LONGER = "how much longer one share is than another"
MIXED = "the items are mixed"
SAME_AGAIN = "the same with the same seed"
OTHER_SEED = "other shares with another seed"
SAME_EVERYWHERE = "the same on every rank"

original_hash = hash


def hash_of_this_rank(value):
    """With torchrun, a text has another hash on each rank. Here, ranks are forks."""
    is_text = isinstance(value, str)
    return original_hash((value, f"rank {dist.get_rank()}") if is_text else value)


def observe_shares(answer, n_items, parts, seed):
    seeds = seed, seed, seed + 1, seed + 2
    with mock.patch("builtins.hash", hash_of_this_rank):
        given = [answer(n_items, parts, seed) for seed in seeds]
    shares, again, *others = map(as_lists, given)
    everywhere = told_by_all(shares) or ()
    if given[0] is None:
        return None
    is_list = isinstance(given[0], list | tuple) and shares is not None
    if not is_list or len(shares) != parts:
        return {LISTS: False}
    items = [item for share in shares for item in share]
    found = set(items) & set(range(n_items))
    lengths = [len(share) for share in shares]
    seen = {
        LISTS: True,
        LOST: n_items - len(found),
        TOO_MANY: len(items) - len(found),
        LONGER: max(max(lengths) - min(lengths), 1),
    }
    if n_items > 100 and parts > 1:  # with fewer, chance may do it
        seen |= {
            MIXED: not any(map(is_regular, shares)),
            SAME_AGAIN: again == shares,
            OTHER_SEED: not any(have_much_in_common(shares, o) for o in others),
        }
    return seen | {SAME_EVERYWHERE: all(there == shares for there in everywhere)}


def as_lists(rows):
    """The rows as lists of Python's whole numbers; None if they are something else."""
    try:
        return [[operator.index(row[i]) for i in range(len(row))] for row in rows]
    except TypeError:
        return None


def is_regular(share):
    """Are these the items of a stretch, or every n-th item?"""
    items = sorted(share)
    return len({b - a for a, b in zip(items, items[1:], strict=False)}) <= 1


def have_much_in_common(shares, others):
    """Are three quarters of a share together with another seed, too?"""
    pairs = itertools.product(map(set, shares), map(set, others))
    return any(len(share & other) > 0.75 * len(share) for share, other in pairs)


PARTITION = Task(
    id="05.partition",
    title="A share for each rank",
    stars=2,
    observe=observe_shares,
    cases=((101, None), (40, None), (7, None), (3, None), (1, None), (101, 7)),
    inputs=lambda case, rank, world_size: (case[0], case[1] or world_size, 17),
    instead="Shuffle the numbers 0 to n_items - 1, then deal them out.",
    because={
        LISTS: "Return one list of whole numbers (int) for each rank: share r is for "
        "rank r. A share may also be a tensor or an array. Where there are more ranks "
        "than items, some lists are empty.",
        LOST: "Some items are in no share, and nobody would ever train on them. Cut "
        "all shares from *one* order that has each of the items 0 to n_items - 1 once: "
        "torch.randperm draws one. If each share has n_items // world_size items, "
        "those left over belong to no rank.",
        TOO_MANY: "An item is there twice, or there is no such item. Items are 0 to "
        "n_items - 1, and no two shares overlap.",
        LONGER: "Each item is there once, but the lengths differ by more than 1, and "
        "all ranks wait for the longest list. (`torch.chunk` rounds up.)",
        MIXED: "Each item is there once, but a share is a stretch of the items or "
        "every n-th one. Shuffle all items before you deal them out.",
        SAME_AGAIN: "Called twice with the same seed, it gave different shares. Draw "
        "the order from a generator that begins with `seed`.",
        OTHER_SEED: "Another seed gave the same shares or nearly so, perhaps to other "
        "ranks. The seed must decide which items are in a share together.",
        SAME_EVERYWHERE: "The ranks have computed different shares, so some items go "
        "to two ranks and others to none. Use a generator that begins with `seed` on "
        "every rank. (The `hash` of a text is no seed: it differs between ranks.)",
    },
    hints=(
        "Begin with one order of all items, the same on every rank. Then deal it out.",
        "torch.randperm draws an order; with a seeded `generator` it is the same on "
        "every rank. The slice [rank::n] takes every n-th item.",
        "The shape:\n"
        "  generator = ...            # begins with the seed\n"
        "  order = ...                # all items, in the order that it draws\n"
        "  return [... for rank in range(world_size)]   # a part of the order each",
    ),
)

# ------------------------------------------------------------------- average_gradients

PLAIN = "a network"
TIED = "a network with a weight in two layers"
FROZEN = "a network with a frozen layer"
ONLY_FIRST = "a network with a layer that only rank 0 uses"
UNUSED = "a network with a layer that no rank uses"


class SmallNet(nn.Module):
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

    def forward(self, x, through_middle):
        x = self.first(x)
        if through_middle:
            x = self.middle(x)
        return self.last(x) * self.scale


WAITED = "asynchronous calls are waited for"
FROZEN_HAS = "a frozen parameter has a gradient"
NONE_MISSING = "each trained parameter has a gradient"
REST = "the rest of the model is as before"


def observe_gradients(answer, kind):
    network, rank = SmallNet(kind), dist.get_rank()
    uses_middle = kind != UNUSED and (kind != ONLY_FIRST or rank == 0)
    network(whole_numbers((2, 4), 10 + rank), uses_middle).sum().backward()
    trained = [p for p in network.parameters() if p.requires_grad]
    frozen = [p for p in network.parameters() if not p.requires_grad]
    before = state_of(network)
    with Log(*REDUCING) as log:
        answer(network)
    if kind == UNUSED:  # None is as good as zeros there
        for parameter in network.middle.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return {
        WAITED: log.missing() == 0,
        FROZEN_HAS: any(p.grad is not None for p in frozen),
        NONE_MISSING: all(p.grad is not None for p in trained),
        **{f"gradient of {n}": p.grad for n, p in network.named_parameters()},
        REST: state_of(network) == before,
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
    cases=((PLAIN,), (TIED,), (FROZEN,), (ONLY_FIRST,), (UNUSED,)),
    forbids=("torch.nn.parallel.DistributedDataParallel",),
    instead="`dist.all_reduce` adds up a tensor over the ranks.",
    misses=(
        Miss(
            DIVIDE,
            "pass",
            "That is the sum over the ranks. If you divided, the result is lost: "
            "`g = g / n` makes a new tensor, and a division before the `wait()` of an "
            "asynchronous call is overwritten.",
        ),
        Miss(
            BOTH,
            "pass",
            "The gradients are still each rank's own. Did you average something else, "
            "or forget to write the result into `parameter.grad`?",
        ),
        Miss(
            "dist.all_reduce(parameter.grad)",
            "dist.all_reduce(parameter.grad.clone())",
            "That is each rank's own gradient, divided by the world size. Did you "
            "reduce a copy, and forget to write it into `parameter.grad`?",
        ),
        Miss(
            BODY,
            "count = torch.tensor(0.0 if parameter.grad is None else 1.0)\n"
            "            dist.all_reduce(count)\n"
            f"            {BODY.replace('dist.get_world_size()', 'count')}",
            "A missing gradient counts as zeros: divide by the world size, not by the "
            "number of ranks that have one.",
        ),
        Miss(
            "if parameter.grad is None:",
            "if True:",
            "All gradients are zeros. Put zeros only where a gradient is None.",
        ),
    ),
    because={
        WAITED: "With async_op=True, the call returns before the result is there. Wait "
        "for it, `work.wait()`, before you use the gradient or return. "
        "(`get_future()` and `then()` do not wait.)",
        FROZEN_HAS: "A frozen parameter has a gradient now, and an optimizer with "
        "weight decay or momentum may move it. Skip parameters with "
        "requires_grad=False.",
        NONE_MISSING: "On a rank whose rows did not pass the layer, the gradient is "
        "still None, and its model would drift away from the others. Every rank needs "
        "the mean.",
        REST: "The gradients are right, but something else has changed: a parameter, "
        "its requires_grad, a buffer, or the mode (train, eval). Leave it as it is.",
    },
    errors={
        "zero-dimensional tensor": "One parameter has no dimensions, and torch.cat "
        "cannot join it. Flatten each gradient first: `reshape(-1)`.",
        "None": "A gradient may be None: that of a frozen parameter, or of a layer "
        "that this rank's rows did not pass. Skip frozen parameters, and put zeros "
        "where another gradient is missing.",
        OUT_OF_STEP: "All ranks must make the same calls in the same order, whichever "
        "gradients they have. Let a missing gradient count as zeros. Is there an `if` "
        "on the rank around a collective, or a loop over a set?",
    },
    otherwise="Every rank must end with the sum over the ranks, divided by the world "
    "size, in `parameter.grad`. A rank without a gradient counts as zeros.",
    hints=(
        "A mean is a sum and a division. The gradients are the `.grad` of "
        "`model.parameters()`, which come in the same order on every rank.",
        "Every rank must make the same calls, whatever its own gradients are. Put "
        "zeros where a trained parameter has none. Skip a parameter only if all ranks "
        "skip it.",
        "The shape:\n"
        "  for parameter in model.parameters():\n"
        "      if ...:          # frozen: the same answer on all ranks\n"
        "          continue\n"
        "      if ...:          # no gradient on this rank\n"
        "          ...\n"
        "      ...              # the sum over the ranks, then the division",
    ),
)

# ----------------------------------------------------------------------------- sampler

ONCE_MORE = "epoch 0, once more"
LENGTH = "len(sampler)"
UNTOUCHED = "random numbers elsewhere are untouched"


def observe_sampler(answer, n_items, world_size, rank, shuffle, seed, drop_last):
    torch.manual_seed(99)
    before = random_state()
    sampler = answer(n_items, world_size, rank, shuffle, seed, drop_last)
    seen = {"epoch 0": items_of(sampler)}
    next(iter(sampler), None)  # a loop that is left after one item
    seen[ONCE_MORE] = items_of(sampler)
    for epoch in (1, 5, 0):
        sampler.set_epoch(epoch)
        seen[f"after set_epoch({epoch})"] = items_of(sampler)
    seen[LENGTH] = len(sampler)
    return seen | {UNTOUCHED: random_state() == before}


def items_of(sampler):
    return [operator.index(item) for item in sampler]


LISTS_ONLY = (
    "`+` and `*` make a list longer, but they calculate with the numbers of a tensor, "
    "and a range has neither. Make a list first: `.tolist()`, or `list(range(n))`."
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
        (10, 4, 0, False, 0, False),
        (10, 4, 3, False, 0, False),
        (12, 4, 1, False, 0, False),
        (12, 4, 1, False, 0, True),
        (10, 4, 3, False, 0, True),
        (23, 5, 4, True, 0, False),
        (23, 5, 1, True, 7, True),
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
            "Those are neighbours in the order: a stretch for each rank. Begin at "
            "`rank`, then take every world_size-th item.",
        ),
        Miss(
            REPEAT,
            "order = order + order[: max(0, total - self.n_items)]",
            "You repeated the order once, which is not enough here: 3 items on 8 ranks "
            "need more. Repeat it as often as it takes.",
        ),
        Miss(
            REPEAT,
            "pass",
            "The ranks get different numbers of items: one would make a step more than "
            "the others, and wait for ever. Pad the order, or cut it with drop_last.",
        ),
        Miss(
            REPEAT,
            "order = order + order[: self.world_size - self.n_items % "
            "self.world_size]\n        total = len(order)",
            "Too many items. world_size divides n_items here, so nothing is missing; "
            "but world_size - n_items % world_size is world_size, not 0.",
        ),
        Miss(
            "math.floor if self.drop_last else math.ceil",
            "math.floor",
            "Items are lost. Without drop_last nothing is cut: each rank gets "
            "ceil(n_items / world_size) items, and the first ones are repeated.",
        ),
        Miss(
            "self.seed + self.epoch",
            "self.seed + self.epoch + self.rank",
            "The rank is in the seed, so each rank draws another order. All ranks must "
            "draw the same one, and each takes its own part of it.",
        ),
        Miss(
            f"iter({SLICE})",
            f"iter([{SLICE}[i] for i in torch.randperm(len(self), "
            "generator=torch.Generator().manual_seed(self.seed + self.epoch))])",
            "Shuffle all items first, then take this rank's part of them. Do not "
            "shuffle that part once more.",
        ),
    ),
    because={
        ONCE_MORE: "The same epoch, once more, gave other items. `__iter__` must make "
        "a new iterator at each call, and the order may depend on seed and epoch only.",
        "set_epoch": "Epoch 0 was right at first, but after set_epoch the items are "
        "not. Draw the order anew in each `__iter__`, with a generator that begins "
        "with seed + epoch.",
        LENGTH: "The items are right, but `len(sampler)` is not. It is how many items "
        "this rank gets.",
        UNTOUCHED: "The items are right, but the random numbers of the whole program "
        "have changed, those of dropout for example: torch.manual_seed and "
        "np.random.seed do that. Use a `torch.Generator` of your own.",
    },
    errors={
        "non-iterator": "A DataLoader iterates over the sampler. `__iter__` must "
        "`return` an iterator, such as `iter(items)`, or be a generator.",
        "'range'": LISTS_ONLY,
        "'Tensor' and 'list'": LISTS_ONLY,
        "must match the size of tensor": LISTS_ONLY,
        "running": f"Is there a loop that never ends? {LISTS_ONLY}",
        "'float' object cannot be interpreted": "`/` makes a float where a whole "
        "number is needed. `//` and math.ceil make an int.",
    },
    otherwise="First the order of all items: with shuffle, that of torch.randperm, "
    "whose generator begins with seed + epoch. Then pad it with its beginning to a "
    "multiple of world_size, or cut it with drop_last. Then take every world_size-th "
    "item, beginning at rank.",
    hints=(
        "How many items do all ranks get together, with drop_last and without? Write "
        "`__len__` first.",
        "A list times a number repeats it: 3 items on 8 ranks need more than two of "
        "them. One slice with start, stop and step cuts it off and deals it out.",
        "The shape of __iter__:\n"
        "  order = ...       # a list of all items, in the order of this epoch\n"
        "  total = ...       # items of all ranks together: len(self) is one rank's\n"
        "  ...               # repeat the order while it is shorter than that\n"
        "  return iter(...)  # this rank's places of it, up to total",
    ),
)

# ---------------------------------------------------------------------------- accuracy


def shard(n_items, rank, world_size):
    """What a rank has after an epoch with DistributedSampler(shuffle=False).

    Of the items that are repeated, 0 is right, and 1 is so for some n_items only. So
    each of the near misses below comes out as another number.
    """
    right = [item % 6 == 0 or item % 7 == n_items % 2 for item in range(n_items)]
    sampler = DistributedSampler(range(n_items), world_size, rank, shuffle=False)
    return torch.tensor([right[index] for index in sampler]), n_items


OWN = "own = len(range(rank, n_items, world_size))"
SUM = "dist.all_reduce(count)"

ACCURACY = Task(
    id="05.accuracy",
    title="Accuracy over all ranks",
    stars=2,
    cases=(12, 9, 11, 10, 7, 23, 9007, 3, 1),
    inputs=shard,
    misses=(
        Miss(
            "count = right[:own].sum()",
            "parts = [torch.empty_like(right) for _ in range(world_size)]\n"
            "    dist.all_gather(parts, right)\n"
            "    count = torch.cat(parts)[:n_items].sum() / world_size",
            "You joined the answers of all ranks, one rank after the other, and cut "
            "off the end. But several ranks have a repeated item at the end of their "
            "own: item i of rank r is item r + i × "
            "world_size of the test set.",
        ),
        Miss(
            OWN,
            "own = len(right); n_items = own * world_size",
            "Some items are counted twice: the sampler has repeated the first ones. "
            "Item i of rank r is item r + i × world_size of the test set. Where that "
            "is n_items or more, it is a repeated one.",
        ),
        Miss(
            OWN,
            "own = len(right)",
            "You divide by n_items, but you count the right answers of repeated items, "
            "too: accuracy can come out above 1.",
        ),
        Miss(
            OWN,
            "own = n_items // world_size",
            "Items are left out. Where world_size does not divide n_items, some ranks "
            "have one item more of their own than n_items // world_size.",
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
            "That is the mean of the ranks' accuracies, in which the items of a rank "
            "with few items count more. Add up the counts, then divide once.",
        ),
        Miss(
            SUM,
            "count, n_items = right[:own].float().mean(), 1",
            "That is the accuracy of this rank's items alone. The others' are missing.",
        ),
    ),
    errors={
        "mean(): ": "The mean of a bool tensor has no type. Take the sum.",
        OUT_OF_STEP: "Every rank must make the same calls, with tensors of the same "
        "size. Ranks have different numbers of items of their own, some perhaps none: "
        "add up counts. Is there an `if` on the rank around a collective?",
    },
    otherwise="Count the right answers among the items that are not repeated, add up "
    "the counts of all ranks, and divide once by n_items. Count in int64: float16 "
    "rounds, uint8 overflows, and bool has only two values.",
    hints=(
        "Which of this rank's items are there twice? Work it out for 10 items on 4 "
        "ranks: the lesson lists them.",
        "Rank r has the items r, r + n, r + 2n, ... Those below n_items are its own: "
        "there are len(range(r, n_items, n)) of them, and they come first.",
        "The shape:\n"
        "  own = ...         # how many of this rank's items are its own\n"
        "  count = ...       # right answers among these\n"
        "  ...               # over all ranks\n"
        "  return ...        # one division",
    ),
)

# --------------------------------------------------------------------- spot_the_loader

FIRST_ITEM = 1000  # so that no item is its own index
AS_BATCHES = "a list of batches for each epoch"
ROWS = "rows in the batches of each epoch"
ONCE = "each item once in each epoch"
OTHER_ORDER = "another order in each epoch"
OTHER_ITEMS = "other items in each epoch"


def observe_loader(answer, n_items, global_batch, n_epochs):
    items = list(range(FIRST_ITEM, FIRST_ITEM + n_items))
    epochs = answer(torch.tensor(items), global_batch, n_epochs)
    try:
        mine = [as_lists(epoch) for epoch in epochs]
    except TypeError:
        mine = [None]
    everywhere = told_by_all(mine) or ()
    if epochs is None:
        return None
    if any(None in their for their in everywhere):
        return {AS_BATCHES: False}
    rows = [[len(batch) for batch in epoch] for epoch in mine]
    shares = [sum(epoch, []) for epoch in mine]
    together = [
        sorted(item for epoch in their for batch in epoch for item in batch)
        for their in zip(*everywhere, strict=False)
    ]
    alone = dist.get_world_size() == 1
    return {
        AS_BATCHES: True,
        ROWS: rows,
        ONCE: all(epoch == items for epoch in together),
        MIXED: alone or not any(map(is_regular, shares)),
        OTHER_ORDER: all_differ(shares),
        OTHER_ITEMS: alone or all_differ(map(sorted, shares)),
    }


def all_differ(lists):
    found = [tuple(items) for items in lists]
    return len(set(found)) == len(found)


SPOT_THE_LOADER = Task(
    id="05.spot_the_loader",
    title="Spot the bugs in a loader",
    stars=2,
    observe=observe_loader,
    cases=((96, 24, 3), (48, 12, 2)),
    misses=(
        Miss(
            "sampler=sampler",
            "sampler=sampler, shuffle=True",
            "The sampler decides the order already, so the DataLoader must not "
            "shuffle. Let the sampler do it: its own shuffle is True by default.",
        ),
    ),
    because={
        AS_BATCHES: "Return a list with one entry for each epoch, and that entry a "
        "list of batches. (`append`, not `extend`.)",
        ROWS: "Each rank needs batches of global_batch // world_size rows, in one list "
        "for each epoch, and together all ranks go through the data set once. The "
        "sampler gives each rank a share of it: pass it to the DataLoader.",
        ONCE: "Together, the ranks must go through each item of the dataset once in "
        "each epoch. They must all shuffle alike, from the same seed. A batch holds "
        "items, not indices.",
        MIXED: "A rank gets a stretch of the data set, or every n-th item of it. "
        "Shuffle the whole data set before it is dealt out.",
        OTHER_ORDER: "Epochs have the same order. In each epoch, first call "
        "`sampler.set_epoch(epoch)`, then read the batches with `list(loader)`.",
        OTHER_ITEMS: "The order changes, but a rank gets the same items in every "
        "epoch. All items must be dealt out anew: the sampler does that, once it knows "
        "the epoch.",
    },
    errors={
        "batch_size should be a positive integer": "A batch has a whole number of "
        "rows. `/` makes a float even where nothing is left over. `//` makes an int.",
        "attribute 'set_epoch'": "The sampler has `set_epoch`, the DataLoader none.",
    },
    otherwise="Each rank gets batches of global_batch // world_size items, other ones "
    "in every epoch.",
    hints=(
        "For the bug that raises no error, print two epochs of one rank, one below "
        "the other.",
        "Which type does a batch size need? Who decides the order, the sampler or the "
        "loader? And what tells the sampler that a new epoch begins?",
        "Three places:\n"
        "  batch_size=...            # a float now\n"
        "  sampler=..., shuffle=...  # only one of them can decide the order\n"
        "  for ... in ...:\n"
        "      ...                   # what must the sampler be told?",
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
