"""Lesson 05, distributed SGD by hand: the tasks of its exercise."""

import builtins
import contextlib
import math
import operator
import pickle
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from course_utils.checks.compare import difference
from course_utils.checks.inputs import linear, whole_numbers
from course_utils.checks.mistakes import out_of_step, right_but, says
from course_utils.checks.task import ANYTHING, Mistake, Such, Task
from course_utils.checks.under_way import NO_VALUE_YET, REDUCING, Log


def is_false(key):
    """Is this line of the report, and none before it, not as it should be?"""

    def test(attempt):
        for name, value in attempt.got.items():
            if value is False:
                return name == key
        return False

    return test


def on_all_ranks(value):
    """The value of every rank. All ranks call it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ----------------------------------------------------------------------- predict_rate

PREDICT_RATE = Task(
    id="05.predict_rate",
    title="Predict the learning rate",
    stars=1,
    where="value",
    expect=lambda: 0.1 * 2 * 8 * 96 / 256,
    mistakes=(
        Mistake(
            like=lambda: 0.1 * 2 * 8,
            says="You multiplied by the number of GPUs. That would be right if each "
            "of them had the 256 images of the recipe. Compare the batches of a step.",
        ),
        Mistake(
            like=lambda: 0.1 * 8 * 96 / 256,
            says="You used the batch of one node. A step uses the images of both.",
        ),
        Mistake(
            like=lambda: 0.1 * 96 / 256,
            says="You used the batch of one GPU. A step uses the images of all GPUs.",
        ),
        Mistake(
            like=lambda: 0.1 * math.sqrt(2 * 8 * 96 / 256),
            says="That is a square-root rule. The task asks for the linear one.",
        ),
        Mistake(
            like=lambda: 0.1 * 256 / (2 * 8 * 96),
            says="The other way round: a larger batch makes fewer steps in an epoch, "
            "and the rule makes each of them longer.",
        ),
        Mistake(
            like=lambda: 0.1,
            says="That is the rate of the recipe. The batch of a step is another one "
            "here.",
        ),
        Mistake(
            like=lambda: 0.1 * 2 * 8 * 96,
            says="You multiplied by the whole batch. The rule multiplies by how many "
            "times the recipe's batch it is.",
        ),
        Mistake(
            like=lambda: 0.1 * 96,
            says="You multiplied by the batch of one GPU. The rule multiplies by how "
            "many times the recipe's batch the batch of all GPUs is.",
        ),
        Mistake(
            when=lambda attempt: attempt.got in (6, 1536),
            says="You are on the way: that is not the learning rate yet.",
        ),
        Mistake(
            when=lambda attempt: attempt.got in (0.4, 0.8, 1.2, 2.4, 3.2),
            says="How many GPUs are there, and how many images does each of them get?",
        ),
    ),
    otherwise="Work out the batch of one step on all GPUs. How many times 256 is it?",
    hints=(
        "How many images does one step use, over all GPUs of both nodes?",
        "The linear rule: k times the batch, k times the learning rate. The batch is "
        "(number of GPUs) × (images on each); k is that divided by 256.",
        "For 4 GPUs with 128 images each it goes like this:\n"
        "  batch   4 * 128      = 512\n"
        "  k       512 / 256    = 2\n"
        "  rate    0.1 * 2      = 0.2",
    ),
)

# ------------------------------------------------------------------------- local_batch


def try_batches(answer, global_batch, world_size):
    """Hand each rank's size to a DataLoader, and count the rows that it gives."""
    rows = []
    for rank in range(world_size):
        size = answer(global_batch, world_size, rank)
        if size is None:  # a DataLoader would make no batches
            rows.append(None)
        elif type(size) in (int, float):
            loader = DataLoader(range(global_batch), batch_size=size)
            rows.append(len(next(iter(loader))))
        else:
            rows.append(f"of type {type(size).__name__}")
    return {"rows of each rank": rows}


def is_of_type(attempt, *names):
    """Did a rank get its number of rows in one of these types?"""
    return any(f"of type {n}" in attempt.got["rows of each rank"] for n in names)


def batches(global_batch, world_size, sizes=None):
    """What the check expects; with `sizes`, what a mistake makes."""
    if sizes is not None:
        return {"rows of each rank": sizes}
    least = global_batch // world_size
    most = least + (global_batch % world_size > 0)
    each = f"{least} or {most}" if most > least else f"{least}"
    return {
        "rows of each rank": Such(
            f"{world_size} whole numbers, each {each}, together {global_batch}",
            lambda rows: (
                len(rows) == world_size
                and sum(rows) == global_batch
                and set(rows) <= {least, most}
            ),
        )
    }


LOCAL_BATCH = Task(
    id="05.local_batch",
    title="A whole number for each rank",
    stars=1,
    run=try_batches,
    cases=(
        (128, 4),
        (10, 4),  # here the mistakes below differ
        (128, 3),
        (64, 1),
        (32, 5),
        (100, 8),
        (7, 7),
        (1000, 16),
        (23, 6),
    ),
    expect=batches,
    instead="`//` and `%` are enough.",
    mistakes=(
        Mistake(
            when=lambda attempt: (
                "batch_size should be a positive integer value" in attempt.message
                and "batch_size=0" in attempt.message
            ),
            says="One rank gets no rows at all. There are at least as many rows as "
            "ranks, so each rank gets at least one.",
        ),
        Mistake(
            when=says("batch_size should be a positive integer value"),
            says="The check hands your number to a DataLoader, which wants a whole "
            "number of Python's type int. `/` makes a float, also where the division "
            "has no rest; `//` makes an int.",
        ),
        Mistake(
            when=lambda attempt: is_of_type(attempt, "list", "tuple"),
            says="It must be one number, that of this rank: not a list of all.",
        ),
        Mistake(
            when=lambda attempt: is_of_type(attempt, "str"),
            says="It returned text. A DataLoader wants a whole number.",
        ),
        Mistake(
            when=lambda attempt: is_of_type(attempt, "bool"),
            says="It returned True or False, not a number of rows. In `a + b < c` the "
            "sum comes before the comparison: `a + (b < c)` needs its parentheses.",
        ),
        Mistake(
            when=lambda attempt: any(
                isinstance(rows, str) for rows in attempt.got["rows of each rank"]
            ),
            says="A DataLoader refuses numbers of this type, whole or not: it wants "
            "Python's own int. Make it one with int(...).",
        ),
        Mistake(
            like=lambda g, n: batches(g, n, [g // n] * n),
            says="Every rank gets global_batch // world_size rows, and the rest of the "
            "division is lost. Some ranks must take one row more.",
        ),
        Mistake(
            like=lambda g, n: batches(g, n, [-(-g // n)] * n),
            says="You rounded up on every rank: together that is more than the global "
            "batch. Only some ranks take one row more.",
        ),
        Mistake(
            like=lambda g, n: batches(g, n, [g // n + 1] * n),
            says="Every rank takes one row more, also where nothing is left over. Only "
            "as many ranks do so as rows are left over: global_batch % world_size.",
        ),
        Mistake(
            like=lambda g, n: batches(g, n, [g // n + (r <= g % n) for r in range(n)]),
            says="One rank too many takes one more: the first is rank 0, so it is `<`, "
            "not `<=`.",
        ),
        Mistake(
            like=lambda g, n: batches(g, n, [g] * n),
            says="Each rank would work on the whole global batch.",
        ),
        Mistake(
            when=lambda attempt: (
                sum(attempt.got["rows of each rank"]) == attempt.args[0]
            ),
            says="The sum is right, but one rank has several rows more than another, "
            "and all ranks wait for the slowest. Give no rank more than one row extra.",
        ),
        Mistake(
            when=lambda attempt: None in attempt.got["rows of each rank"],
            says="It returned None: did you forget `return`?",
        ),
    ),
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


def as_lists(shares):
    """Shares as lists of whole numbers; in words what it is, if it is no such thing."""
    if shares is None:
        return None
    if not is_sequence(shares):
        return f"a {type(shares).__name__}, where a list was expected"
    for share in shares:
        if not is_sequence(share):
            return f"a list of type {type(share).__name__}, not of lists"
    try:
        return [[operator.index(item) for item in share] for share in shares]
    except TypeError:
        return NOT_WHOLE


NOT_WHOLE = "items that are not of type int"


def is_sequence(value):
    """Can one ask for its length, and for its first item? Also a tensor, a Subset."""
    if isinstance(value, (str, dict)) or getattr(value, "shape", None) == ():
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
    if isinstance(value, (tuple, frozenset)):
        return any(map(has_text, value))
    return isinstance(value, (str, bytes))


def try_partition(answer, n_items, parts, seed):
    """Call it with several seeds, and compare with what other ranks got."""
    with other_hashes():
        return partition_report(answer, n_items, parts, seed)


def partition_report(answer, n_items, parts, seed):
    shares = as_lists(answer(n_items, parts, seed))
    report = {"the shares": shares}
    if isinstance(shares, list) and n_items >= 40 and parts > 1:
        again = as_lists(answer(n_items, parts, seed))
        # More than two, for an answer that has only a few different orders.
        others = [as_lists(answer(n_items, parts, seed + i)) for i in (1, 2, 12)]
        report["the items are mixed"] = are_mixed(shares, n_items)
        report["the same with the same seed"] = again == shares
        seeds = [shares, *others]
        report["other shares with another seed"] = all_differ(seeds) and (
            n_items < 1000 or all(have_little_in_common(shares, o) for o in others)
        )
    everywhere = on_all_ranks(shares)
    same = [other == everywhere[0] for other in everywhere]
    return report | {"the same on every rank": all(same)}


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


def partitioned(rank, inputs):
    n_items, parts, _ = inputs[rank]
    report = {"the shares": fair_shares(n_items, parts)}
    if n_items >= 40 and parts > 1:
        report["the items are mixed"] = True
        report["the same with the same seed"] = True
        report["other shares with another seed"] = True
    return report | {"the same on every rank": True}


def fair_shares(n_items, parts):
    def test(shares):
        sizes = [len(share) for share in shares]
        items = sorted(item for share in shares for item in share)
        return (
            len(shares) == parts
            and items == list(range(n_items))
            and max(sizes) - min(sizes) <= 1
        )

    lists = f"{parts} list{'s' * (parts > 1)}"
    items = f"each of the items 0 to {n_items - 1}" if n_items > 1 else "item 0"
    lengths = ", and lengths that differ by at most 1" if parts > 1 else ""
    return Such(f"{lists} with {items} once in all{lengths}", test)


def sizes_in(attempt):
    return [len(share) for share in attempt.got["the shares"]]


def items_in(attempt):
    return [item for share in attempt.got["the shares"] for item in share]


PARTITION = Task(
    id="05.partition",
    title="A share for each rank",
    stars=2,
    where="ranks",
    run=try_partition,
    cases=((101, None), (40, None), (7, None), (3, None), (1, None), (1000, 7)),
    inputs=lambda case, rank, world_size: (case[0], case[1] or world_size, 17),
    expect=partitioned,
    instead="Shuffle the numbers 0 to n_items - 1, then deal them out.",
    mistakes=(
        Mistake(
            when=lambda attempt: attempt.got["the shares"] is None,
            says="It returned None: did you forget `return`?",
        ),
        Mistake(
            when=lambda attempt: attempt.got["the shares"] == NOT_WHOLE,
            says="A rank takes `dataset[item]` of each of its items. So an item must "
            "be a whole number of type int: floats and texts are none. (NumPy's and "
            "torch's whole numbers are fine.)",
        ),
        Mistake(
            when=lambda attempt: isinstance(attempt.got["the shares"], str),
            says="It must be a list of lists: share r is for rank r. (Tuples, and "
            "tensors or arrays with one dimension, are fine.)",
        ),
        Mistake(
            when=lambda attempt: len(sizes_in(attempt)) != attempt.args[1],
            says="There must be one list for each rank, also where it is empty because "
            "there are more ranks than items.",
        ),
        Mistake(
            when=lambda attempt: max(items_in(attempt)) >= attempt.args[0],
            says="Items count from 0: the last one is n_items - 1.",
        ),
        Mistake(
            when=lambda attempt: (
                len(set(items_in(attempt))) < len(items_in(attempt))
                and len(set(items_in(attempt))) < attempt.args[0]
            ),
            says="Some items are in it twice, and others are missing. All shares must "
            "be cut from *one* order, which has each item once (torch.randperm draws "
            "such a one), and no two shares may overlap.",
        ),
        Mistake(
            when=lambda attempt: len(set(items_in(attempt))) < len(items_in(attempt)),
            says="An item is in it twice. No two shares may overlap, and nothing is "
            "repeated: where n_items cannot be divided, some are one item shorter.",
        ),
        Mistake(
            when=lambda attempt: len(items_in(attempt)) < attempt.args[0],
            says="Items are lost: they are in no share, and nobody would ever train on "
            "them. If each share has n_items // world_size items, those of the rest "
            "belong to no rank.",
        ),
        Mistake(
            when=lambda attempt: max(sizes_in(attempt)) - min(sizes_in(attempt)) > 1,
            says="Each item is there once, but the lengths differ by more than 1, and "
            "all ranks wait for the one with the longest list. (`torch.chunk` rounds "
            "up, and the last chunk gets what is left.)",
        ),
        Mistake(
            when=is_false("the items are mixed"),
            says="Each item is there once. But a share is a stretch of the items, or "
            "every n-th one, or nearly so. If the data set is sorted by class, a rank "
            "may see some classes only. Shuffle all items before you deal them out. "
            "All at once, not a few at a time.",
        ),
        Mistake(
            when=is_false("the same with the same seed"),
            says="Called twice with the same seed, it gave different shares. Draw the "
            "order from a generator that begins with `seed`.",
        ),
        Mistake(
            when=is_false("other shares with another seed"),
            says="Among four seeds, some make the same shares, or nearly the same, "
            "perhaps dealt to other ranks. Each seed must make an order of its own, "
            "which decides the items that are in a share together.",
        ),
        Mistake(
            when=is_false("the same on every rank"),
            says="The ranks have computed different shares, so some items go to two "
            "ranks and others to none. The ranks' own random numbers differ: take "
            "them from a generator that begins with `seed`, the same on every rank. "
            "(The `hash` of a text differs, too.)",
        ),
    ),
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
UNTOUCHED = "tensors under way are left alone"
SAME_PARAMETERS = "the parameters are as before"
SAME_BUFFERS = "the buffers are as before"
SAME_FLAGS = "requires_grad is as before"


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def flags(network):
    return [p.requires_grad for p in network.parameters()]


def try_average(answer, kind):
    network = after_backward(kind, dist.get_rank())
    parameters, buffers = (
        dict(network.named_parameters()),
        dict(network.named_buffers()),
    )
    before = copies(parameters), copies(buffers)
    trained = flags(network)
    with Log(*REDUCING) as log:
        answer(network)
    gradients = {f"gradient of {n}": p.grad for n, p in network.named_parameters()}
    return {
        WAITED: log.missing() == 0,
        UNTOUCHED: not any(sent.changed for sent in log.sent),
        **gradients,
        SAME_PARAMETERS: all(
            torch.equal(before[0][n], p) for n, p in parameters.items()
        ),
        SAME_BUFFERS: all(torch.equal(before[1][n], b) for n, b in buffers.items()),
        SAME_FLAGS: flags(network) == trained,
    }


def mean(gradients):
    return sum_of(gradients) / len(gradients)


def sum_of(gradients):
    """The sum, where a rank without a gradient counts as zeros."""
    return sum(g for g in gradients if g is not None)


def mean_of_those_with(gradients):
    return sum_of(gradients) / len([g for g in gradients if g is not None])


def averaged(rank, inputs, how=mean):
    """What the check expects on every rank; a mistake makes something else."""
    (kind,) = inputs[rank]
    networks = [after_backward(kind, r) for r in range(len(inputs))]
    report = {WAITED: True, UNTOUCHED: True}
    for names in zip(*(n.named_parameters() for n in networks), strict=True):
        name, parameter = names[0]
        gradients = [p.grad for _, p in names]
        if not parameter.requires_grad:
            value = None
        elif all(g is None for g in gradients):
            value = Such("None or zeros", is_none_or_zeros)
        else:
            value = how(gradients)
        report[f"gradient of {name}"] = value
    return report | {SAME_PARAMETERS: True, SAME_BUFFERS: True, SAME_FLAGS: True}


def is_none_or_zeros(value):
    return value is None or not torch.any(value)


def share_of(gradient, n):
    return None if gradient is None else gradient / n


def apart_from_parameters(attempt, how):
    """Are the gradients what a rule makes, whatever became of the parameters?"""
    inputs = [attempt.args] * attempt.world_size
    want = averaged(attempt.rank, inputs, how)
    got = attempt.got | {SAME_PARAMETERS: True, SAME_BUFFERS: True}
    return difference(got, want, 1e-5) is None


def has_none(attempt):
    """Is there no gradient where the other ranks have one?"""
    return any(
        attempt.got[name] is None and isinstance(want, torch.Tensor)
        for name, want in attempt.expected.items()
    )


def moves_the_frozen(attempt):
    return any(
        attempt.got[name] is not None and want is None
        for name, want in attempt.expected.items()
    )


ORDER = (
    "A rank that has no gradient for a parameter leaves a collective out, and the "
    "others wait for it, or add up what does not belong together. All ranks must make "
    "the same calls: let a missing gradient count as zeros."
)
SAME_CALLS = (
    "The ranks have not made the same calls in the same order. Every rank has all "
    "gradients here, so they are not the reason. Is there an `if` on the rank around a "
    "collective? Or a loop over a set? Its order may differ between ranks."
)

AVERAGE_GRADIENTS = Task(
    id="05.average_gradients",
    title="Average the gradients",
    stars=2,
    where="ranks",
    run=try_average,
    cases=(
        (PLAIN,),
        (TIED,),
        (FROZEN,),
        (ONLY_FIRST,),
        (NOT_FIRST,),
        (UNUSED,),
        (ALL_FROZEN_BUT_ONE,),
    ),
    expect=averaged,
    forbids=("torch.nn.parallel.DistributedDataParallel",),
    instead="`dist.all_reduce` adds up a tensor over the ranks.",
    mistakes=(
        Mistake(
            when=lambda attempt: (
                out_of_step(attempt) and attempt.args[0] in (ONLY_FIRST, NOT_FIRST)
            ),
            says=ORDER,
        ),
        Mistake(
            when=lambda attempt: out_of_step(attempt) and attempt.args[0] == PLAIN,
            says=SAME_CALLS,
        ),
        Mistake(
            when=out_of_step,
            says="All ranks must make the same calls in the same order, whichever "
            "gradients there are.",
        ),
        Mistake(
            when=says("NoneType", "must be Tensor, not None"),
            says="A gradient may be None: that of a frozen parameter, and that of a "
            "layer which this rank's rows did not pass. Leave frozen ones alone "
            "(`requires_grad` is False), and put zeros where a gradient is missing.",
        ),
        Mistake(
            when=says("zero-dimensional tensor"),
            says="One parameter has no dimensions, and torch.cat cannot join it. "
            "Flatten each gradient first: `reshape(-1)`.",
        ),
        Mistake(
            when=says(NO_VALUE_YET),
            says="A future's `value()` does not wait: it fails while the result is not "
            "there yet. `wait()` waits, and returns the value.",
        ),
        Mistake(
            when=is_false(WAITED),
            says="With async_op=True, the call returns before the result is there. "
            "Wait for it, `work.wait()`, before you use the gradient or return. "
            "(`get_future()` and `then()` do not wait: each begins something to wait "
            "for.)",
        ),
        Mistake(
            when=is_false(UNTOUCHED),
            says="A gradient was changed between its collective and the `wait()`. "
            "Until wait() has returned nobody may touch it: the change is lost, or is "
            "added up as well. Divide before the call, or after the wait().",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got[SAME_PARAMETERS] is False
                and attempt.world_size > 1
                and apart_from_parameters(attempt, lambda g: g[attempt.rank])
            ),
            says="You reduced the parameters. The gradients, `parameter.grad`, must be "
            "averaged; the parameters are the same on every rank already.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got[SAME_PARAMETERS] is False
                and apart_from_parameters(attempt, mean)
            ),
            says="The gradients are right, but the parameters have changed. Leave them "
            "to the optimizer.",
        ),
        Mistake(
            when=right_but(SAME_BUFFERS),
            says="The gradients are right, but a buffer has changed. Only gradients "
            "are averaged here: leave the buffers as they are.",
        ),
        Mistake(
            when=is_false(SAME_FLAGS),
            says="The gradients are right, but `requires_grad` of a parameter has "
            "changed: what was frozen would be trained from now on. Leave it as it is.",
        ),
        Mistake(
            when=moves_the_frozen,
            says="A frozen parameter has got a gradient, and an optimizer with weight "
            "decay or momentum may move it now. Leave parameters alone that have "
            "requires_grad=False.",
        ),
        Mistake(
            when=has_none,
            says="On a rank whose rows did not pass the layer, the gradient is still "
            "None. Its optimizer would leave the layer as it is, while the other "
            "ranks change theirs: the models drift apart. Every rank needs the mean.",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(rank, inputs, lambda g: g[rank]),
            says="The gradients are still each rank's own. Did you average something "
            "else (a copy, or the parameters), or forget to write the result into "
            "`parameter.grad`?",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(
                rank, inputs, lambda g: share_of(g[rank], len(inputs))
            ),
            says="Each rank has its own gradient, divided by the world size: those of "
            "the other ranks are missing. Did you reduce a copy, and forget to write "
            "the result into `parameter.grad`?",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(rank, inputs, sum_of),
            says="That is the sum over the ranks. all_reduce adds up; the division by "
            "the world size is yours. If you divided: did the result reach "
            "`parameter.grad`? (`g = g / n` makes a new tensor.)",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(rank, inputs, lambda g: sum_of(g) * 0),
            says="All gradients are zeros, and each rank's own are lost. Put zeros "
            "only where a gradient is None.",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(
                rank, inputs, lambda g: mean(g) / len(inputs)
            ),
            says="It is divided twice. Divide before the all_reduce or after it, not "
            "both. (With ReduceOp.AVG the division is made for you.)",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(rank, inputs, mean_of_those_with),
            says="A missing gradient counts as zeros: divide by the world size, not by "
            "the number of ranks that have one. One process with all rows would have "
            "got nothing from those rows, either.",
        ),
        Mistake(
            when=lambda attempt: attempt.right == (0,) and attempt.world_size > 1,
            says="Only rank 0 has the mean. All ranks make a step, so all need it: "
            "`all_reduce`, or a `broadcast` after the `reduce`.",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(rank, inputs, lambda g: g[0]),
            says="Every rank has the gradients of rank 0. The others' must count, too.",
        ),
        Mistake(
            when=lambda attempt: attempt.args[0] == TIED and not attempt.error,
            says="Without a tied weight it was right. A weight in two layers is one "
            "parameter with one gradient, which already has the sum of both uses: "
            "work on it once. `model.parameters()` names it once.",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(rank, inputs, lambda g: sum_of(g) / 4),
            says="The world size is not always 4: ask for it.",
        ),
        Mistake(
            like=lambda rank, inputs: averaged(rank, inputs, lambda g: sum_of(g) / 2),
            says="The world size is not always 2: ask for it.",
        ),
    ),
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


def as_items(indices):
    """A list of whole numbers; in words what it is, if it holds something else."""
    items = list(indices)
    try:
        return [operator.index(item) for item in items]
    except TypeError:
        return NOT_WHOLE


def try_sampler(answer, n_items, world_size, rank, shuffle, seed, drop_last):
    torch.manual_seed(99)
    before = random_states()
    sampler = answer(n_items, world_size, rank, shuffle, seed, drop_last)
    report = {"len(sampler)": len(sampler)}
    report["epoch 0"] = as_items(sampler)
    report["epoch 0 once more"] = as_items(sampler)
    next(iter(sampler), None)  # a loop that is left after one item
    report[LEFT_EARLY] = as_items(sampler)
    for epoch in (1, 5):
        sampler.set_epoch(epoch)
        report[f"epoch {epoch}"] = as_items(sampler)
    sampler.set_epoch(0)
    report[BACK_AT_0] = as_items(sampler)
    return report | {UNTOUCHED_NUMBERS: random_states() == before}


LEFT_EARLY = "epoch 0 after a loop that was left early"
BACK_AT_0 = "epoch 0 after epoch 5"
UNTOUCHED_NUMBERS = "random numbers elsewhere are untouched"


def random_states():
    """Of torch, NumPy and Python, to be compared."""
    torchs = torch.get_rng_state().numpy().tobytes()
    return torchs, pickle.dumps((np.random.get_state(), random.getstate()))


def order_of(n_items, shuffle, seed):
    if not shuffle:
        return list(range(n_items))
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n_items, generator=generator).tolist()


def not_shuffled(n_items, shuffle, seed):
    return list(range(n_items))


def padded(order, total):
    """Repeat the order until there are enough, or cut it."""
    return (order * math.ceil(total / len(order)))[:total] if order else order


def sampled(
    n_items,
    world_size,
    rank,
    shuffle,
    seed,
    drop_last,
    *,
    round_down=None,
    share=lambda order, rank, world_size: order[rank::world_size],
    pad=padded,
    order=order_of,
    seed_of=lambda seed, epoch, rank: seed + epoch,
):
    """What the check expects; a mistake has one part of it different."""
    round_down = drop_last if round_down is None else round_down
    each = n_items // world_size if round_down else math.ceil(n_items / world_size)

    def epoch(number):
        items = order(n_items, shuffle, seed_of(seed, number, rank))
        return share(pad(items, each * world_size), rank, world_size)

    return {
        "len(sampler)": each,
        "epoch 0": epoch(0),
        "epoch 0 once more": epoch(0),
        LEFT_EARLY: epoch(0),
        "epoch 1": epoch(1),
        "epoch 5": epoch(5),
        BACK_AT_0: epoch(0),
        UNTOUCHED_NUMBERS: True,
    }


def contiguous(order, rank, world_size):
    each = len(order) // world_size
    return order[rank * each : (rank + 1) * each]


def with_the_last(order, total):
    return (order + order[-1:] * total)[:total]


def with_the_end(order, total):
    return (order + order[len(order) - total :])[:total]


def padded_once(order, total):
    return order + order[: max(total - len(order), 0)]


def cut_in_front(order, total):
    return padded(order[max(len(order) - total, 0) :], total)


def with_zeros(order, total):
    return (order + [0] * total)[:total]


def is_like(**parts):
    """Are all epochs as if these parts of the sampler were different?

    Compared are the items alone, whatever `len(sampler)` says. Not if they are right.
    """

    def items(report):
        return [report[key] for key in ("epoch 0", "epoch 1", "epoch 5")]

    def test(attempt):
        got = items(attempt.got)
        like = items(sampled(*attempt.args, **parts))
        return got == like and got != items(attempt.expected)

    return test


def shuffles_its_own(attempt):
    """Are a rank's items the same in every epoch, in another order?"""
    epochs = [attempt.got[key] for key in ("epoch 0", "epoch 1", "epoch 5")]
    return (
        attempt.args[3]
        and len({tuple(items) for items in epochs}) > 1
        and len({tuple(sorted(items)) for items in epochs}) == 1
    )


def without_padding(order, total):
    return order


SAMPLER = Task(
    id="05.sampler",
    title="A sampler of your own",
    stars=3,
    run=try_sampler,
    cases=(
        (10, 4, 0, False, 0, False),
        (10, 4, 2, False, 0, False),
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
    expect=sampled,
    forbids=("torch.utils.data.distributed.DistributedSampler",),
    instead="torch.randperm draws an order, and slices such as [1::4] deal it out.",
    mistakes=(
        Mistake(
            when=lambda attempt: (
                "__len__" in attempt.message or "has no len()" in attempt.message
            ),
            says="`len(sampler)` must work: a DataLoader asks how many items there "
            "are.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["epoch 0"] == NOT_WHOLE,
            says="A DataLoader takes `dataset[i]` of each item. So an item must be a "
            "whole number of type int: a list takes neither 2.0 nor '2'.",
        ),
        Mistake(
            when=lambda attempt: (
                right_but("epoch 0")(attempt) and is_like(share=contiguous)(attempt)
            ),
            says="You gave each rank a stretch of the order. DistributedSampler deals "
            "the items out like cards: rank r gets the items at r, r + world_size, "
            "r + 2 × world_size, ...",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[1] > 2 * attempt.args[0]
                and is_like(pad=padded_once)(attempt)
            ),
            says="You repeated the order once. 3 items on 8 ranks need it more than "
            "once: repeat it until it is long enough.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[5]
                and attempt.args[0] % attempt.args[1] == 0
                and is_like(pad=lambda order, total: [])(attempt)
            ),
            says="No items at all, where world_size divides n_items. Did you cut the "
            "order with `[:-rest]`? `order[:-0]` is empty: where nothing is left over, "
            "cut nothing. `order[:total]` has no such case.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0] % attempt.args[1] == 0
                and is_like(pad=lambda o, _: o + o[: attempt.args[1]])(attempt)
            ),
            says="One item too many. world_size divides n_items here, so nothing is "
            "missing; but world_size - n_items % world_size is world_size then, not "
            "0.",
        ),
        Mistake(
            when=is_like(pad=with_the_last),
            says="You padded with the last item. DistributedSampler repeats the order "
            "from its beginning: 0, 1, ... in the example.",
        ),
        Mistake(
            when=is_like(pad=with_the_end),
            says="You padded with the end of the order. DistributedSampler repeats it "
            "from its beginning: 0, 1, ... in the example.",
        ),
        Mistake(
            when=lambda attempt: attempt.args[5] and is_like(pad=cut_in_front)(attempt),
            says="You left out the first items of the order. With drop_last its end is "
            "cut off.",
        ),
        Mistake(
            when=is_like(pad=with_zeros),
            says="You padded with item 0. DistributedSampler repeats the order from "
            "its beginning: 0, then 1, ... in the example, and other items with a "
            "shuffled order.",
        ),
        Mistake(
            when=is_like(pad=without_padding),
            says="The ranks get different numbers of items. All of them need as many, "
            "or one would make a step more than the others, and wait for ever. Pad "
            "the order, or cut it with drop_last.",
        ),
        Mistake(
            when=lambda attempt: attempt.args[5] and is_like(round_down=False)(attempt),
            says="With drop_last the order is cut, not padded: each rank gets "
            "n_items // world_size items.",
        ),
        Mistake(
            when=lambda attempt: (
                not attempt.args[5] and is_like(round_down=True)(attempt)
            ),
            says="Items are lost. Without drop_last nothing is cut: each rank gets "
            "ceil(n_items / world_size) items, and the first ones are repeated.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[3] and is_like(order=not_shuffled)(attempt)
            ),
            says="The items come in their own order. With shuffle=True the order is "
            "drawn by torch.randperm.",
        ),
        Mistake(
            when=is_like(order=lambda n_items, _, seed: order_of(n_items, True, seed)),
            says="The order is shuffled, though shuffle is False. It must be that of "
            "the data set then: 0, 1, 2, ...",
        ),
        Mistake(
            when=is_like(share=lambda order, rank, world_size: order[::world_size]),
            says="These are the items of rank 0. Begin at `rank`.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[3] and attempt.got["epoch 0"] == attempt.got["epoch 1"]
            ),
            says="Every epoch has the same order: begin the generator with seed + "
            "epoch.",
        ),
        Mistake(
            when=shuffles_its_own,
            says="This rank gets the same items in every epoch, in another order. "
            "Shuffle all items first, then take this rank's part of them.",
        ),
        Mistake(
            when=is_like(seed_of=lambda seed, epoch, rank: seed + epoch + rank),
            says="The rank is in the seed, so each rank draws another order, and items "
            "go to several ranks or to none. All ranks draw the same order, and each "
            "takes its own part of it.",
        ),
        Mistake(
            when=is_like(seed_of=lambda seed, epoch, rank: epoch),
            says="`seed` is not used: begin the generator with seed + epoch.",
        ),
        Mistake(
            when=lambda attempt: attempt.args[3] and right_but("epoch 1")(attempt),
            says="Epoch 0 is right, epoch 1 is not. Its order must be drawn by a "
            "generator that begins with seed + epoch.",
        ),
        Mistake(
            when=lambda attempt: (
                right_but("epoch 0 once more")(attempt)
                and attempt.got["epoch 0 once more"] == []
            ),
            says="The second time it gave no items at all. An iterator goes through "
            "them once: `__iter__` must make a new one at each call.",
        ),
        Mistake(
            when=right_but("epoch 0 once more"),
            says="The same epoch, once more, gave other items. The order may depend "
            "on seed and epoch only.",
        ),
        Mistake(
            when=right_but(LEFT_EARLY),
            says="A loop was left after its first item, and the next one did not begin "
            "anew. `__iter__` must make a new iterator at each call.",
        ),
        Mistake(
            when=right_but(BACK_AT_0),
            says="After set_epoch(5), set_epoch(0) gave other items than before. The "
            "order may depend on seed and epoch only. Is an old order kept?",
        ),
        Mistake(
            when=right_but("len(sampler)"),
            says="The items are not the question yet: `len(sampler)` is how many items "
            "this rank gets, ceil(n_items / world_size), or n_items // world_size with "
            "drop_last.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got[UNTOUCHED_NUMBERS] is False
                and not right_but("epoch 0")(attempt)
                and not right_but("epoch 1")(attempt)
            ),
            says="The items are right. But a seed, such as torch.manual_seed, has "
            "changed the random numbers of the whole program, dropout's for example: "
            "they would begin anew with it. Take a `torch.Generator` of your own.",
        ),
        Mistake(
            when=lambda attempt: (
                "non-iterator" in attempt.message or "not iterable" in attempt.message
            ),
            says="A DataLoader iterates over the sampler. `__iter__` must `return` an "
            "iterator, such as `iter(items)`, or be a generator.",
        ),
        Mistake(
            when=says("'range' and ", "and 'range'"),
            says="A range cannot be added to anything. Make a list of it: "
            "`list(range(n))`.",
        ),
        Mistake(
            when=says("must match the size of tensor", "'Tensor' and 'list'"),
            says="`+` joins two lists, but of a tensor it adds up the numbers. "
            "`.tolist()` makes a list of it.",
        ),
        Mistake(
            when=lambda attempt: attempt.error == "running",
            says="Is there a loop that never ends? If it repeats the order: "
            "`order + order` makes a list longer, but of a tensor it adds up the "
            "numbers. `.tolist()` makes a list of a tensor.",
        ),
        Mistake(
            when=says("cannot be interpreted as an integer"),
            says="`__len__` must `return` a whole number of type int, and range takes "
            "no other: `//` and math.ceil make one, `/` does not.",
        ),
        Mistake(
            when=lambda attempt: max(attempt.got["epoch 0"]) >= attempt.args[0],
            says="There are items of n_items or more: the last one is n_items - 1. Is "
            "the order a tensor? Then `order * 2` and `order + order` calculate with "
            "its numbers. They repeat a list: `.tolist()` makes one.",
        ),
        Mistake(
            when=lambda attempt: (
                right_but("epoch 0")(attempt)
                and attempt.got["epoch 0"][: len(attempt.expected["epoch 0"])]
                == attempt.expected["epoch 0"]
            ),
            says="The first items are right, but too many follow. Cut the order to "
            "len(self) * world_size items, then deal it out.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["epoch 0"] != attempt.expected["epoch 0"]
                and sorted(attempt.got["epoch 0"])
                == sorted(attempt.expected["epoch 0"])
            ),
            says="The items are right, their order is not.",
        ),
        Mistake(
            when=lambda attempt: attempt.args[3] and right_but("epoch 0")(attempt),
            says="Without shuffling it was right. With it, the order must be that of "
            "torch.randperm(n_items, generator=...), whose generator begins with "
            "seed + epoch. Another generator, such as random.Random, draws another "
            "order.",
        ),
    ),
    otherwise="First the order of all items, then padding or cutting to a multiple of "
    "world_size, then every world_size-th item, beginning at rank.",
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

    Of the items that are repeated, 0 is right, and 1 is so for some n_items only.
    The numbers are such that none of the mistakes below is taken for another one.
    """
    return [item % 6 == 0 or item % 7 == n_items % 2 for item in range(n_items)]


def shard(n_items, rank, world_size):
    """What a rank has after an epoch with DistributedSampler(shuffle=False)."""
    sampler = DistributedSampler(range(n_items), world_size, rank, shuffle=False)
    right = answered(n_items)
    return torch.tensor([right[index] for index in sampler]), n_items


def trimmed(inputs):
    """Each rank's shard without the repeated items."""
    _, n_items = inputs[0]
    return [
        right[: len(range(rank, n_items, len(inputs)))]
        for rank, (right, _) in enumerate(inputs)
    ]


def accuracy(rank, inputs):
    return sum(answered(inputs[0][1])) / inputs[0][1]


def sum_of_all(inputs):
    """How many are right on all ranks, with the repeated items."""
    return sum(int(right.sum()) for right, _ in inputs)


def rows_of_all(inputs):
    return sum(len(right) for right, _ in inputs)


def rounded_down(inputs):
    """Each rank's shard, as long as if world_size divided n_items."""
    return [right[: n_items // len(inputs)] for right, n_items in inputs]


def added_as_bools(rank, inputs):
    """The sum after an all-reduce of True and False; None where sizes differ."""
    shards = trimmed(inputs)
    if len({len(right) for right in shards}) > 1:
        return None
    return int(torch.stack(shards).any(dim=0).sum()) / inputs[0][1]


def first_of_all(rank, inputs):
    """Of the ranks' shards one after another, cut at n_items."""
    n_items = inputs[0][1]
    return torch.cat([right for right, _ in inputs])[:n_items].float().mean().item()


def counted_twice(rank, inputs):
    return torch.cat([right for right, _ in inputs]).float().mean().item()


def mean_of_means(rank, inputs):
    means = [right.float().mean() for right in trimmed(inputs)]
    return (sum(means) / len(means)).item()


LAST_LEFT_OUT = (
    "You left out the last item of every rank. It is a repeated one on some ranks "
    "only, and on none where world_size divides n_items. Work out how many items are "
    "this rank's own."
)

LEFT_OUT = (
    "Items are left out. Where world_size does not divide n_items, some ranks have one "
    "item more of their own than n_items // world_size."
)

ACCURACY = Task(
    id="05.accuracy",
    title="Accuracy over all ranks",
    stars=2,
    where="ranks",
    cases=(12, 10, 7, 23, 9007, 3, 1),  # float16 cannot count the 2575 right ones
    inputs=lambda n_items, rank, world_size: shard(n_items, rank, world_size),
    expect=accuracy,
    mistakes=(
        Mistake(
            like=counted_twice,
            says="Some items are counted twice: the sampler has repeated the first "
            "ones, so that all ranks have as many. Item i of rank r is item "
            "r + i × world_size of the test set; where that is n_items or more, it is "
            "a repeated one.",
        ),
        Mistake(
            like=first_of_all,
            says="You put the items of all ranks one after another and cut at n_items. "
            "But that is not the order of the test set: the repeated ones are the last "
            "of *each* rank. Item i of rank r is item r + i × world_size.",
        ),
        Mistake(
            like=lambda rank, inputs: sum_of_all(inputs) / inputs[0][1],
            says="You divide by n_items, but among the right answers are those of "
            "repeated items: accuracy can come out above 1 like this.",
        ),
        Mistake(
            like=lambda rank, inputs: (
                sum(int(right.sum()) for right in trimmed(inputs)) / rows_of_all(inputs)
            ),
            says="The right answers are counted without the repeated items, but what "
            "you divide by is counted with them.",
        ),
        Mistake(
            like=lambda rank, inputs: (
                (sum_of_all(inputs) - rows_of_all(inputs) + inputs[0][1]) / inputs[0][1]
            ),
            says="You subtract one for each repeated item, as if the model got all of "
            "them right. Leave them out before you count.",
        ),
        Mistake(
            like=lambda rank, inputs: (
                sum(int(right.sum()) for right in rounded_down(inputs))
                / max(sum(len(right) for right in rounded_down(inputs)), 1)
            ),
            says=LEFT_OUT,
        ),
        Mistake(
            like=lambda rank, inputs: (
                sum(int(right.sum()) for right in rounded_down(inputs)) / inputs[0][1]
            ),
            says=LEFT_OUT,
        ),
        Mistake(
            when=lambda attempt: (
                isinstance(attempt.got, float) and math.isnan(attempt.got)
            ),
            says="A rank without items of its own has divided 0 by 0. Add up the "
            "counts of all ranks first, then divide once.",
        ),
        Mistake(
            like=lambda rank, inputs: (
                sum(int(right[:-1].sum()) for right, _ in inputs) / inputs[0][1]
            ),
            says=LAST_LEFT_OUT,
        ),
        Mistake(
            like=lambda rank, inputs: (
                sum(int(right[:-1].sum()) for right, _ in inputs)
                / max(sum(len(right[:-1]) for right, _ in inputs), 1)
            ),
            says=LAST_LEFT_OUT,
        ),
        Mistake(
            when=lambda attempt: float(attempt.got) == 0 < attempt.expected,
            says="It is 0. Is no right answer counted? Or did you divide with `//`? "
            "It cuts off what comes after the point, `/` does not.",
        ),
        Mistake(
            like=lambda rank, inputs: int(trimmed(inputs)[rank].sum()) / inputs[0][1],
            says="These are the right answers of this rank, divided by the items of "
            "all ranks. Add up the counts of all ranks first. (With async_op=True the "
            "sum is there only after wait().)",
        ),
        Mistake(
            like=mean_of_means,
            says="That is the mean of the ranks' accuracies. A rank with fewer items "
            "counts as much as one with more, so each of its items counts for more. "
            "Add up the counts, then divide once.",
        ),
        Mistake(
            like=lambda rank, inputs: inputs[rank][0].float().mean().item(),
            says="That is the accuracy of this rank's items alone. The others' are "
            "missing.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(answered(inputs[0][1])),
            says="That is how many are right. Divide it by the number of items.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(
                float(right.float().mean()) for right, _ in inputs
            ),
            says="That is the sum of the ranks' accuracies. Add up the counts, then "
            "divide once.",
        ),
        Mistake(
            like=lambda rank, inputs: sum_of_all(inputs) / len(inputs),
            says="You divided the number of right answers by the number of ranks. "
            "Divide it by the number of items.",
        ),
        Mistake(
            like=lambda rank, inputs: accuracy(rank, inputs) / len(inputs),
            says="You divided by the number of ranks as well. Add the counts up, and "
            "divide by n_items only. (ReduceOp.AVG divides by the number of ranks.)",
        ),
        Mistake(
            like=added_as_bools,
            says="Items got lost in the all-reduce: of a bool tensor, True + True is "
            "True. Count first, `sum()`, then add up the counts.",
        ),
        Mistake(
            when=lambda attempt: attempt.right == (0,) and attempt.world_size > 1,
            says="Only rank 0 has the right value. Every rank must return it: "
            "`all_reduce`, not `reduce`.",
        ),
        Mistake(
            when=lambda attempt: (
                isinstance(attempt.got, (int, float))
                and math.isclose(attempt.got, 100 * attempt.expected, rel_tol=1e-5)
            ),
            says="A share between 0 and 1, please, not a percentage.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[1] % attempt.world_size > 0
                and (
                    out_of_step(attempt)
                    or "gather" in attempt.message
                    or "same size" in attempt.message
                )
            ),
            says="The ranks' own items are not equally many, so tensors of them have "
            "different sizes, and some ranks may have none at all. All ranks must make "
            "the same calls with tensors of the same size: add up counts.",
        ),
        Mistake(
            when=says("invalid output tensor list"),
            says="The list for all_gather needs one tensor for each rank, as large as "
            "the one that is sent.",
        ),
        Mistake(
            when=out_of_step,
            says="Every rank must make the same calls, in the same order. Is there an "
            "`if` on the rank around a collective?",
        ),
        Mistake(
            when=says("mean(): could not infer output dtype"),
            says="The mean of True and False has no type. Take the sum.",
        ),
        Mistake(
            when=says("mean(): input dtype should be"),
            says="The mean of True and False has no type. Take the sum.",
        ),
    ),
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


def as_batches(epochs):
    """The items in each batch of each epoch; None if it is something else."""
    try:
        return [[list(map(int, batch)) for batch in epoch] for epoch in epochs]
    except (TypeError, ValueError):  # something else than batches of numbers
        return None


FIRST_ITEM = 1000  # so that no item is its own index
OF_THE_DATASET = "all are items of the dataset"
OWN_LISTS = "each epoch is a list of its own, or the like"


def try_loader(answer, n_items, global_batch, n_epochs):
    items = range(FIRST_ITEM, FIRST_ITEM + n_items)
    epochs = answer(torch.tensor(items), global_batch, n_epochs)
    mine = as_batches(epochs)
    everywhere = on_all_ranks(mine)
    if None in everywhere:
        strange = None if epochs is None else "not batches in a list for each epoch"
        return {"rows in the batches of each epoch": strange}
    rows = [[len(batch) for batch in epoch] for epoch in mine]
    report = {"rows in the batches of each epoch": rows}
    orders = [
        [item for their in everywhere for batch in their[epoch] for item in batch]
        for epoch in range(min(map(len, everywhere)))
    ]
    report[OF_THE_DATASET] = all(item in items for order in orders for item in order)
    report["each item once in each epoch"] = all(
        sorted(order) == list(items) for order in orders
    )
    if dist.get_world_size() > 1:
        shares = [[item for batch in epoch for item in batch] for epoch in mine]
        report["a rank gets mixed items"] = not any(map(is_regular, shares))
        report["another order in each epoch"] = all_different(shares)
        report["other items in each epoch"] = all_different(map(sorted, shares))
    else:
        report["the order is mixed"] = not any(map(is_in_order, orders))
        report["another order in each epoch"] = all_different(orders)
    report[OWN_LISTS] = not isinstance(epochs, (list, tuple)) or are_own(epochs)
    return report


def are_own(epochs):
    """Has each epoch its own batches, and not something that reads them later?"""
    held = all(hasattr(epoch, "__getitem__") for epoch in epochs)
    return held and len(set(map(id, epochs))) == len(epochs)


def all_different(lists):
    found = [tuple(items) for items in lists]
    return len(set(found)) == len(found)


def is_in_order(order):
    return order == sorted(order)


def loaded(rank, inputs):
    n_items, global_batch, n_epochs = inputs[rank]
    n = len(inputs)
    rows = [[global_batch // n] * (n_items // global_batch)] * n_epochs
    report = {
        "rows in the batches of each epoch": rows,
        OF_THE_DATASET: True,
        "each item once in each epoch": True,
    }
    # For the words only: one object may well give another order each time.
    lists = {OWN_LISTS: ANYTHING}
    if n > 1:
        report |= {
            "a rank gets mixed items": True,
            "another order in each epoch": True,
            "other items in each epoch": True,
        }
        return report | lists
    report |= {"the order is mixed": True, "another order in each epoch": True}
    return report | lists


def rows_are(attempt, rows):
    got = attempt.got["rows in the batches of each epoch"]
    return bool(got and got[0]) and got[0][0] == rows


SPOT_THE_LOADER = Task(
    id="05.spot_the_loader",
    title="Spot the bugs of a loader",
    stars=2,
    where="ranks",
    run=try_loader,
    cases=((96, 24, 3), (48, 12, 2)),
    inputs=lambda case, rank, world_size: case,
    expect=loaded,
    mistakes=(
        Mistake(
            when=says("batch_size should be a positive integer value"),
            says="A batch has a whole number of rows, and `/` makes a float, also "
            "where the division has no rest. `//` makes an int.",
        ),
        Mistake(
            when=says("sampler option is mutually exclusive with shuffle"),
            says="The sampler decides the order already, so the DataLoader must not "
            "shuffle. Let the sampler do it: its own shuffle is True by default.",
        ),
        Mistake(
            when=says("'DataLoader' object has no attribute 'set_epoch'"),
            says="The sampler has `set_epoch`, the DataLoader has none.",
        ),
        Mistake(
            when=says("integer division or modulo by zero"),
            says="The world size is not 0. Which two numbers do you divide?",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["rows in the batches of each epoch"] is None
            ),
            says="It returned None: did you forget `return`?",
        ),
        Mistake(
            when=lambda attempt: isinstance(
                attempt.got["rows in the batches of each epoch"], str
            ),
            says="It must be a list with one entry for each epoch, and that entry a "
            "list of batches. (`extend` in the place of `append` puts all batches "
            "into one list.)",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.world_size > 1 and rows_are(attempt, attempt.args[1])
            ),
            says="Each rank has batches of global_batch rows, so that a step of all "
            "ranks has more. Divide by the number of ranks.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["rows in the batches of each epoch"]) != attempt.args[2]
            ),
            says="The list must have one entry for each epoch.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.world_size > 1
                and len(attempt.got["rows in the batches of each epoch"][0])
                == attempt.world_size
                * len(attempt.expected["rows in the batches of each epoch"][0])
            ),
            says="Every rank goes through the whole data set. The sampler gives each "
            "rank a share of it.",
        ),
        Mistake(
            when=is_false(OF_THE_DATASET),
            says="These are not the dataset's items, which are numbers from 1,000 on "
            "here. A sampler gives only their indices: take `dataset[i]` of each, as a "
            "DataLoader does.",
        ),
        Mistake(
            when=right_but("each item once in each epoch"),
            says="Some items come twice in an epoch, others not at all. If there are "
            "several ranks, all must shuffle alike: DistributedSampler wants the same "
            "seed everywhere.",
        ),
        Mistake(
            when=is_false("a rank gets mixed items"),
            says="A rank always gets a stretch of the data set, or every n-th item of "
            "it. The whole data set should be shuffled before it is dealt out.",
        ),
        Mistake(
            when=is_false("other items in each epoch"),
            says="The order changes, but a rank gets the same items in every epoch. "
            "All items should be dealt out anew: that is the sampler's work, once it "
            "knows the epoch.",
        ),
        Mistake(
            when=lambda attempt: (
                not attempt.got["another order in each epoch"]
                and not attempt.got[OWN_LISTS]
            ),
            says="Epochs have no lists of their own: several are one and the same, or "
            "they are a DataLoader or an iterator, which is read when the last epoch "
            "has been set. `list(loader)` reads the batches. Do it in each epoch.",
        ),
        Mistake(
            when=is_false("another order in each epoch"),
            says="No error any more, but epochs have the same order. A sampler does "
            "not notice that a new epoch begins: it must be told before each one, by "
            "`sampler.set_epoch(epoch)`.",
        ),
        Mistake(
            when=is_false("the order is mixed"),
            says="The items come in the order of the data set. Somebody must shuffle.",
        ),
    ),
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
