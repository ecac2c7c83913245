"""Lesson 12, the clinic: the tasks of its exercise."""

import contextlib
import io
import itertools
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils.questions.lesson_12 import PREDICT_LOSS
from course_utils.tasks.compare import difference, plain
from course_utils.tasks.inputs import linear, whole_numbers
from course_utils.tasks.send_recv import told_by_all
from course_utils.tasks.task import OPTIMIZER_IMPORTS, OUT_OF_STEP, Miss, Task


def flat(module):
    """All parameters of a module in one tensor."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def batches_of(rank, count):
    """Some batches (x, y) of this rank."""
    numbers = [whole_numbers((2, 4), 10 * rank + i) / 8 for i in range(2 * count)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


# ---------------------------------------------------------------------- uneven_batches

STEPS, PARAMETERS = "the number of steps", "the parameters of the model"


def observe_epoch(answer, model, batches):
    steps = answer(model, batches)
    return {PARAMETERS: flat(model), STEPS: steps}


DIVIDED = "            parameter.grad /= dist.get_world_size()\n"
FEWEST = (
    "Every rank makes as many steps as the rank with the fewest batches has. Let the "
    "ranks agree on that number before the first step."
)

UNEVEN_BATCHES = Task(
    id="12.uneven_batches",
    title="The epoch that does not end",
    stars=2,
    imports=OPTIMIZER_IMPORTS,
    cases=((4, 3, 5), (2,), (3, 0, 2, 1)),
    inputs=lambda counts, rank, n: (
        linear(4, 4, seed=1, divided_by=8),
        batches_of(rank, counts[rank % len(counts)]),
    ),
    observe=observe_epoch,
    misses=(
        Miss(
            f"            dist.all_reduce(parameter.grad)\n{DIVIDED}",
            "            pass\n",
            "It ends now, because the ranks no longer talk: each of them trains a "
            "model of its own. The gradients must still be averaged in every step.",
        ),
        Miss(
            DIVIDED,
            "",
            "The steps are too long: the gradients are the sum over the ranks, not "
            "their mean.",
        ),
        Miss(
            "return steps",
            "return len(batches)",
            "The training is right. Return the steps that were made, not the number "
            "of batches that this rank has.",
        ),
    ),
    because={
        PARAMETERS: "The parameters are not those of SGD with averaged gradients on "
        f"the first batches of each rank. {FEWEST}",
        STEPS: FEWEST,
    },
    errors={
        "CollectiveMismatch: ": "The ranks call collectives that do not fit. Each rank "
        "must make the same calls, in the same order, whatever its number of batches.",
        OUT_OF_STEP: "A rank still waits in an all-reduce, and another one has no "
        f"batch left. {FEWEST}",
    },
    hints=(
        "Which rank waits in the all-reduce, and what has the other one done?",
        "The ranks must agree on a number of steps before they begin. "
        "`dist.all_reduce` can find a minimum.",
        "  fewest = torch.tensor(...)\n"
        "  dist.all_reduce(fewest, op=...)\n"
        "  for x, y in batches[:...]:",
    ),
)

# -------------------------------------------------------------------------- save_hangs

WRITES, COMPLETE = "calls of torch.save", "the file is complete on return"
CONTENT = "the file"
LATE = 0.15  # seconds that a write takes here, if there is another rank


@contextlib.contextmanager
def common_folder():
    """The same new folder on all ranks. Nobody waits for a rank that is stuck."""
    with tempfile.TemporaryDirectory() as own:
        names = told_by_all(own)
        yield Path(names[0] if names else own)
        told_by_all(None)


def observe_save(answer, shards):
    save, sleep, writes = torch.save, time.sleep, []

    def slow_save(what, where, *args, **kwargs):
        if not isinstance(where, io.BytesIO):  # that is how all_gather_object packs
            writes.append(1)
            sleep(LATE if dist.get_world_size() > 1 else 0)
        return save(what, where, *args, **kwargs)

    with common_folder() as folder:
        # A rank that only sleeps, and does not wait for rank 0, must not be lucky.
        no_sleep = mock.patch("time.sleep", lambda seconds: None)
        with mock.patch("torch.save", slow_save), no_sleep:
            answer(shards, str(folder / "whole.pt"))
        try:
            found = torch.load(folder / "whole.pt")
        except Exception:  # it is not there, or only half of it
            found = None
    if isinstance(found, dict):
        found = dict(sorted(found.items()))
    return {WRITES: len(writes), COMPLETE: found is not None, CONTENT: found}


SAVE_HANGS = Task(
    id="12.save_hangs",
    title="The checkpoint that never comes",
    stars=1,
    seconds=8.0,
    cases=(("weight", "bias"), ("bias",), ("weight", "bias", "scale")),
    inputs=lambda names, rank, n: (
        {
            name: whole_numbers((2, 3) if name == "weight" else (3,), 10 * rank + i)
            for i, name in enumerate(names)
        },
    ),
    observe=observe_save,
    because={
        WRITES: "Only rank 0 calls torch.save, and once: where all ranks write the "
        "file at the same time, a reader may find a mixture.",
        COMPLETE: "A rank returned before the file was complete, and could not read "
        "it. All ranks must wait until rank 0 has written.",
    },
    errors={
        OUT_OF_STEP: "A rank waits in a call that others do not answer: a collective "
        "needs all ranks, and a recv needs its send. Does one stand behind an `if` on "
        "the rank? All ranks gather; only the writing belongs to rank 0.",
    },
    otherwise="The file must hold a dict from each name to the whole tensor: the "
    "pieces of all ranks, joined along dimension 0 in the order of the ranks.",
    hints=(
        "Which calls in there need all ranks?",
        "Take all_gather out of the `if`, and leave torch.save in it. Then one thing "
        "is missing: the others must not go on before the file is there.",
        "  for name, shard in shards.items():\n"
        "      ...                        # on all ranks\n"
        "  if dist.get_rank() == 0:\n"
        "      ...                        # write\n"
        "  ...                            # wait for it, on all ranks",
    ),
)

# ------------------------------------------------------------------------- three_seeds

KIND = "a pair for each epoch"
ON_ONE = "each item is on one rank in each epoch"
SAME_ORDER = "two epochs have the same order"
SHARED_NOISE = "two ranks draw the same noise"
OLD_NOISE = "a rank draws the same noise twice"
AGAIN = "the same when called again"
SEEDED = "another seed gives something else"


def as_plain(drawn):
    """[(items, noise), ...] in lists; None if it is something else."""
    try:
        return [([*map(int, items)], noise.tolist()) for items, noise in drawn]
    except (AttributeError, TypeError, ValueError):
        return None


def observe_draws(answer, n_items, epochs, seed):
    seeds = seed, seed, seed + 12
    drawn, again, other = (as_plain(answer(n_items, epochs, s)) for s in seeds)
    there, others = told_by_all(drawn) or [None], told_by_all(other) or [None]
    for one in (*there, *others):
        if one is None or len(one) != epochs or any(len(i) != len(x) for i, x in one):
            return {KIND: False}
    # Of all ranks: a few items of one rank may be the same by chance.
    orders = [[d[epoch][0] for d in there] for epoch in range(epochs)]
    noise = [[tuple(x) for _, x in d] for d in there]
    pairs = itertools.combinations(noise, 2)
    return {
        KIND: True,
        ON_ONE: all(sorted(sum(one, [])) == list(range(n_items)) for one in orders),
        SAME_ORDER: any(one == two for one, two in itertools.combinations(orders, 2)),
        SHARED_NOISE: any(set(one) & set(two) for one, two in pairs),
        OLD_NOISE: any(len(set(one)) < epochs for one in noise),
        AGAIN: again == drawn,
        SEEDED: orders[0] != [d[0][0] for d in others] and other[0][1] != drawn[0][1],
    }


THREE_SEEDS = Task(
    id="12.three_seeds",
    title="Three seeds",
    stars=2,
    cases=((24, 3), (48, 2), (12, 4)),
    inputs=lambda case, rank, n: (*case, 7),
    observe=observe_draws,
    because={
        KIND: "Return a pair for each epoch: a list of whole numbers, and a tensor "
        "with as many numbers.",
        ON_ONE: "Some items are on two ranks and others on none. The order must be the "
        "same on all ranks, shuffled with the same seed. Then each rank takes another "
        "part of it.",
        SAME_ORDER: "Two epochs have the same order: shuffle anew in each. A "
        "DistributedSampler with shuffle=True does that if it is told the number of "
        "the epoch before it is asked for its items.",
        SHARED_NOISE: "Two ranks draw the same noise. What a rank draws for itself "
        "needs a seed that no other rank has, in any epoch.",
        OLD_NOISE: "The noise is the same in every epoch. Seed once, before the loop, "
        "and go on drawing.",
        AGAIN: "Two calls with the same arguments draw different things. The noise "
        "needs a seed, too, or no run can be repeated.",
        SEEDED: "Another seed gives the same. Order and noise must both depend on it.",
    },
    hints=(
        "What must all ranks draw alike, and what must each draw for itself?",
        "The order: the same seed on all ranks, and another epoch each time. The "
        "noise: a seed that depends on the rank.",
        "  torch.manual_seed(...)                 # differs between ranks\n"
        "  sampler = DistributedSampler(..., seed=...)   # the same on all\n"
        "  for epoch in range(epochs):\n"
        "      sampler....(epoch)",
    ),
)

# ---------------------------------------------------------------------------- new_head

MOVED = "the body has moved"
HEAD, BODY = "the parameters of the new head", "the parameters of the body"


def observe_tuning(answer, body, old_head, new_head, batches):
    before = flat(body)
    model = answer(body, old_head, new_head, batches)
    if not isinstance(model, nn.Sequential):
        return model
    moved = not torch.equal(flat(body), before)
    return {MOVED: moved, HEAD: flat(model[1]), BODY: flat(model[0])}


OPTIMIZER = "    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)\n"
REPLACED = "    model[1] = new_head\n    ddp = DDP(model)\n"

NEW_HEAD = Task(
    id="12.new_head",
    title="The layer that does not learn",
    stars=1,
    seconds=10.0,
    imports=OPTIMIZER_IMPORTS,
    cases=(3, 1, 2),
    inputs=lambda count, rank, n: (
        linear(4, 4, seed=1, divided_by=8),
        linear(4, 4, seed=2, divided_by=8),
        linear(4, 4, seed=30 + rank, divided_by=8),
        batches_of(rank, count),
    ),
    observe=observe_tuning,
    misses=(
        Miss(
            REPLACED + OPTIMIZER,
            OPTIMIZER.replace("ddp", "model") + REPLACED,
            "The new head has not moved: the optimizer does not hold its parameters. "
            "Make the optimizer when all layers are in place.",
        ),
        Miss(
            "ddp = DDP(model)",
            "ddp = model",
            "Without DDP the heads of the ranks stay different, and nobody averages "
            "the gradients.",
        ),
        Miss(
            "F.mse_loss(ddp(x), y)",
            "F.mse_loss(model(x), y)",
            "The gradients were not averaged. Call the DDP wrapper, `ddp(x)`, and not "
            "the model inside it.",
        ),
        Miss(
            "        optimizer.zero_grad()\n",
            "",
            "The gradients of all steps add up. Set them to zero before each backward.",
        ),
    ),
    because={
        MOVED: "The body has not moved. Does the optimizer hold its parameters, and is "
        "`step()` called after each backward?",
        HEAD: "The new head is not what training makes of rank 0's new head. Does the "
        "optimizer hold its parameters, and does DDP know it?",
    },
    otherwise="Return nn.Sequential(body, new_head), without DDP around it. Both parts "
    "must be trained, with averaged gradients.",
    errors={
        "Expected to have finished reduction": "DDP was made before the head was "
        "replaced, and still waits for gradients of the old one. Replace first, then "
        "wrap.",
    },
    hints=(
        "Which parameters does the optimizer hold, and since when?",
        "An optimizer keeps the parameters that were there when it was made. The same "
        "holds for DDP.",
        "  model[1] = ...\n  ddp = ...\n  optimizer = ...     # last",
    ),
)

# ----------------------------------------------------------------------- mean_of_means

LOSS, GRADIENTS = "the loss", "the gradients"


def tokens_of(counts, rank, n):
    """A model, and this rank's tokens: some real ones, then padding."""
    real, most = counts[rank % len(counts)], max(counts)
    targets = torch.full((most + 1,), -100)
    targets[:real] = (torch.arange(real) + rank) % 5
    inputs = whole_numbers((most + 1, 4), 40 + rank) / 4
    return linear(4, 5, seed=4, divided_by=8), inputs, targets


def observe_gradients(answer, model, inputs, targets):
    loss = answer(model, inputs, targets)
    if loss is None:
        return None
    grads = [
        torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()
    ]
    return {LOSS: float(loss), GRADIENTS: torch.cat([g.flatten() for g in grads])}


MEAN = "F.cross_entropy(model(inputs), targets)"
SUM = 'F.cross_entropy(model(inputs), targets, reduction="sum")'

MEAN_OF_MEANS = Task(
    id="12.mean_of_means",
    title="The loss that depends on the split",
    stars=2,
    cases=((1, 3, 2, 4), (4, 0, 2), (2,)),
    inputs=tokens_of,
    observe=observe_gradients,
    misses=(
        Miss(
            "    dist.all_reduce(tokens)\n",
            "    tokens = tokens * dist.get_world_size()\n",
            "That is a mean of means: each rank divides by its own number of tokens, "
            "so a token on a rank with few of them counts more. Divide the sum by the "
            "tokens of all ranks.",
        ),
        Miss(
            "(targets != -100).sum()",
            "torch.tensor(targets.numel())",
            "Padding was counted, too. Only targets other than -100 are real tokens.",
        ),
        Miss(
            "        dist.all_reduce(parameter.grad)\n",
            "        dist.all_reduce(parameter.grad)\n"
            "        parameter.grad /= dist.get_world_size()\n",
            "The loss is right. The gradients are divided once too often: the parts "
            "of the ranks add up to the whole.",
        ),
        Miss(
            f"{SUM} / tokens",
            f"{MEAN} * (targets != -100).sum() / tokens",
            "A rank with nothing but padding has a mean of 0/0, which is nan, and nan "
            'times 0 is nan. Use `reduction="sum"`: that is 0 there.',
        ),
        Miss(
            "    dist.all_reduce(loss)\n",
            "",
            "The gradients are right. The loss is this rank's part of it: add up all.",
        ),
    ),
    because={
        LOSS: "The loss is not the mean over the real tokens of all ranks: the sum of "
        "all losses, divided by the number of all real tokens.",
        GRADIENTS: "The loss is right, but the gradients are not those of this loss. "
        "Call backward on the sum, divided by the tokens of all ranks, and add up the "
        "gradients. Divide neither by the number of ranks nor by a rank's own tokens: "
        "that is a mean of means.",
    },
    hints=(
        "Two ranks with 1 and 3 tokens: how much does each token weigh in the result?",
        'Count the real tokens of all ranks first. `reduction="sum"` gives a sum of '
        "losses. Divided by that count, the parts of all ranks add up to the mean.",
        "  tokens = ...              # of this rank, then of all\n"
        '  loss = F.cross_entropy(..., reduction="sum") / ...\n'
        "  ...                       # add up gradients and losses, and do not divide",
    ),
)

# ----------------------------------------------------------------------- cannot_resume

PARTS = ("model", "optimizer", "scheduler")
PREFIX = "a name begins with `module.`"
NAMES = "the names of the model's parameters and buffers"
RETURNED = "is what its state_dict() returned"


def observe_checkpoint(answer, steps_before):
    """What a checkpoint has in it three steps later, and what it should have."""
    layers = {"embed": linear(4, 4, 1, divided_by=8), "submodule": nn.BatchNorm1d(4)}
    model = nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    ddp = DDP(model)
    state, at_once = None, {}
    batches = batches_of(0, steps_before + 3)  # so all ranks have the same state
    for step, (x, y) in enumerate(batches):
        if step == steps_before:
            parts = dict(zip(PARTS, (model, optimizer, scheduler), strict=True))
            right = {name: plain(dict(p.state_dict())) for name, p in parts.items()}
            state = answer(ddp, optimizer, scheduler)
            at_once = parts_in(state)
        optimizer.zero_grad()
        F.mse_loss(ddp(x), y).backward()
        optimizer.step()
        scheduler.step()
    if not isinstance(state, dict):
        return state
    later = parts_in(state)

    def are_right(found):
        return {n: difference(found[n], right[n], 1e-6) is None for n in PARTS}

    return {
        **{f"{name!r} is there": name in state for name in PARTS},
        **{f"{n!r} is a state_dict": isinstance(state.get(n), dict) for n in PARTS},
        PREFIX: any(name.startswith("module.") for name in later["model"]),
        NAMES: list(later["model"]),
        **{f"{n!r} {RETURNED}": yes for n, yes in are_right(at_once).items()},
        **{
            f"{n!r} is as it was, three steps later": yes
            for n, yes in are_right(later).items()
        },
    }


def parts_in(state):
    """What a checkpoint has of each part; an empty dict where that is no state_dict."""
    found = state if isinstance(state, dict) else {}
    is_dict = {n: isinstance(found.get(n), dict) for n in PARTS}
    return {n: plain(dict(found[n])) if is_dict[n] else {} for n in PARTS}


CANNOT_RESUME = Task(
    id="12.cannot_resume",
    title="The checkpoint that cannot be resumed",
    stars=2,
    seconds=10.0,
    imports=OPTIMIZER_IMPORTS,
    cases=(3, 1, 2),
    inputs=lambda steps_before, rank, n: (steps_before,),
    observe=observe_checkpoint,
    because={
        "'optimizer' is there": "The optimizer's state is missing: Adam would begin "
        "anew, with empty moments, and the loss would jump.",
        "'scheduler' is there": "The scheduler's state is missing: the learning rate "
        "would begin anew.",
        "is there": "A part is missing, and a resumed job would begin anew there.",
        "is a state_dict": "Store what `state_dict()` returns, not the object itself.",
        PREFIX: "The names begin with `module.`, because DDP keeps the model in an "
        "attribute of that name. Ask the model inside for its state.",
        NAMES: "These are not the names of the model inside DDP. Its own state_dict() "
        "has them all, those of the buffers too.",
        RETURNED: "That is not what state_dict() returns. Keep all of it, as it is.",
        "as it was": "The checkpoint changes while training goes on: a state_dict "
        "holds the tensors themselves. Return a copy of all of it.",
    },
    otherwise='Return a dict with three state_dicts: "model", "optimizer" and '
    '"scheduler".',
    hints=(
        "What is the first key of `ddp.state_dict()`? And what else has a state?",
        "Three state_dicts: of the model inside DDP, of the optimizer, of the "
        "scheduler. And training goes on: whose tensors are in them?",
        '  state = {"model": ddp....state_dict(), "optimizer": ..., ...}\n'
        "  return copy....(state)",
    ),
)

TASKS = (
    PREDICT_LOSS,
    UNEVEN_BATCHES,
    SAVE_HANGS,
    THREE_SEEDS,
    NEW_HEAD,
    MEAN_OF_MEANS,
    CANNOT_RESUME,
)
