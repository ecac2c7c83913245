"""Lesson 02, model parallel: the tasks of its exercise."""

import operator
import random
from itertools import accumulate, groupby, pairwise

import torch
from torch import nn

from course_utils.questions.lesson_02 import PREDICT_MICRO_BATCHES
from course_utils.tasks.compare import are_same
from course_utils.tasks.devices import at_the_same_time, copies, on_gpus
from course_utils.tasks.task import AtMost, Miss, Task

# ---------------------------------------------------------------------- models to split


def row_of_layers(number):
    """That many layers, from 6 numbers a row to 4; always the same ones."""
    torch.manual_seed(number)
    pairs = pairwise([6, *range(8, 7 + number), 4])
    return nn.Sequential(*(nn.Sequential(nn.Linear(*p), nn.Tanh()) for p in pairs))


def a_batch(rows):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def gradients(parameters):
    """How many parameters have none; and all gradients in one row of numbers."""
    found = [p.grad.cpu().flatten() for p in parameters if p.grad is not None]
    return len(parameters) - len(found), torch.cat([torch.empty(0), *found])


def note(module, what, notes):
    """Note `what` of its input, but not in a forward that a backward runs again."""

    def hook(module, args):
        if torch._C._current_autograd_node() is None:
            notes.append(what(args[0]))

    module.register_forward_pre_hook(hook)


def cut_into(rows_of_pieces, rows, micro_batches):
    """The micro-batches of a stage: no more and no larger than asked for."""
    even = -(rows // -micro_batches)
    return {
        "micro-batches": AtMost(max(micro_batches, len(rows_of_pieces))),
        "rows of the largest": AtMost(max([even, *rows_of_pieces])),
    }


NO_GRADIENT = "parameters without a gradient"
CUT_OFF = (
    "Some parameters got no gradient. `.to()` keeps the graph; `.detach()`, `.data` "
    "and `torch.no_grad()` cut it."
)
TOO_MANY = (
    "There are more micro-batches than asked for. Make `micro_batches`, and round "
    "their rows up: 7 rows in 3 are 3 + 3 + 1. `chunk(micro_batches)` rounds up."
)
ANOTHER_DEVICE = (
    "A tensor met another one that is on another device. Move each part to its GPU "
    "once, and its input before each part: `x = x.to(device)`. (`x.to(device)` alone "
    "leaves `x` where it is.)"
)
FEWER_PIECES = {
    "index out of range": "There may be fewer pieces than `micro_batches` says: "
    "`chunk(4)` cuts 9 rows into 3 + 3 + 3. Loop over the pieces themselves."
}

# --------------------------------------------------------------------- split_over_three


@on_gpus(3)
def observe_split(answer, gpus, layers, rows):
    """Make the model and train it for one step; tell where everything was."""
    given, ran_on = row_of_layers(layers - 1), {}
    given[1].append(nn.BatchNorm1d(given[1][0].out_features))
    given.insert(2, nn.Tanh())  # a layer without parameters
    numbers = sum(p.numel() for p in given.parameters())
    for k, layer in enumerate(given):
        layer.register_forward_hook(
            lambda module, args, output, k=k: ran_on.update({k: str(output.device)})
        )
    model = answer(given)
    if not isinstance(model, nn.Module):
        return model
    held = list(model.parameters())
    on_cpu = sum(not p.is_cuda for p in held)
    own = sum(x.nbytes for x in (*held, *model.buffers()) if x.is_cuda)
    brought = sum(c.bytes for c in gpus.transfers if c.destination != "cpu")
    gpus.clear()
    output = model(a_batch(rows))
    if not isinstance(output, torch.Tensor):
        return output
    sent = copies(gpus)
    if output.requires_grad:
        output.square().mean().backward()
    missing, row = gradients(held)
    places = [gpu for gpu, _ in groupby(ran_on[k] for k in sorted(ran_on))]
    not_found = numbers - sum(p.numel() for p in held)
    return {
        "layers that did not run": layers - len(ran_on),
        "numbers that model.parameters() does not find": max(0, not_found),
        "parameters on the CPU when the model is made": on_cpu,
        "GPUs, in order": places,
        "bytes of other layers that a GPU was given": max(0, brought - own),
        "GPU of the output": str(output.device),
        "copies": sent,
        "output": output,
        NO_GRADIENT: missing,
        "length of the gradient": row.norm(),  # parts may be registered in any order
        "output for a second batch": model(a_batch(rows + 1)),
    }


SPLIT_OVER_THREE = Task(
    id="02.split_over_three",
    title="Split over three GPUs",
    stars=2,
    where="here",
    cases=((3, 4), (4, 5), (7, 2)),
    observe=observe_split,
    misses=(
        Miss(
            "third =",
            "layers.eval(); third =",
            "The model is in eval mode. Leave it in training mode, as it came.",
        ),
    ),
    because={
        "did not run": "Some layers are left out. Run all, in their order: the last "
        "part takes whatever a division leaves over.",
        "does not find": "`model.parameters()` does not find all layers, so no "
        "optimizer would train them. A plain list hides modules from PyTorch: use "
        "attributes (`self.first = ...`) or an nn.ModuleList.",
        "when the model is made": "Some layers are still on the CPU when the model is "
        'made. Move them once, in `__init__`: `module.to("cuda:0")`.',
        "in order": "Keep neighbours together: the first layers on cuda:0, the "
        "next ones on cuda:1, the last ones on cuda:2. Each GPU needs a layer: 2 + 2 "
        "of 4 layers leave none for cuda:2.",
        "other layers": "A GPU was given layers that are not its own. Cut first, then "
        "move each part straight to its GPU.",
        "GPU of the output": "The output should stay on cuda:2, with the last part.",
        "copies": "There should be three copies: the input to cuda:0, then one from "
        "GPU to GPU at each cut, not over the CPU. Layers move once, in `__init__`.",
        NO_GRADIENT: CUT_OFF,
        "second": "The next batch came out wrong. `forward` must change nothing.",
    },
    errors={
        "on the same device": ANOTHER_DEVICE,
        "to unpack": "There may be more than three layers: cut them into three parts.",
        "StopIteration": "Some layers have no parameters, such as nn.Tanh(), so they "
        "cannot say which GPU they are on. Remember where you cut.",
    },
    otherwise="`ThreeGPUs(layers)` is a module that gives what `layers(x)` gives on "
    "the CPU: every layer once, in its order.",
    hints=(
        "Two things move: the layers in `__init__`, and the activations in "
        "`forward`. How many copies do three GPUs need?",
        "Cut the row in two places, and move each part, such as `layers[:a]`, to its "
        "GPU. In `forward`, move x to a GPU before the part that is there.",
        "The shape of it:\n"
        "  third = len(layers) // 3\n"
        "  self.second = layers[third : 2 * third].to(...)\n"
        "and in forward:\n"
        "  x = self.second(x.to(...))",
    ),
)

# ------------------------------------------------------------------------ micro_batches


@on_gpus(3)
def observe_pipeline(answer, gpus, devices, rows, micro_batches):
    """Run the pipeline, and write down which stage got how many rows."""
    layers = row_of_layers(2 * len(devices))
    stages = [layers[2 * k : 2 * k + 2] for k in range(len(devices))]
    seen = [[] for _ in stages]
    for pieces, stage, device in zip(seen, stages, devices, strict=True):
        note(stage.to(device), len, pieces)
    batch = a_batch(rows).to(devices[0])
    gpus.clear()
    lists = list(stages), list(devices)
    output = answer(*lists, batch, micro_batches)
    if not isinstance(output, torch.Tensor):
        return output
    together = all(at_the_same_time(gpus, *pair) for pair in pairwise(devices))
    # A number that Python reads (`.item()`) is no detour. It only makes Python wait.
    detour = any(c.destination == "cpu" and c.kind != "item" for c in gpus.transfers)
    if output.requires_grad:
        output.square().mean().backward()
    missing, row = gradients(list(layers.parameters()))
    return {
        "stages that got the whole batch at once": seen.count([rows]),
        "rows that each stage got": list(map(sum, seen)),
        **cut_into(max(seen, key=len), rows, micro_batches),
        NO_GRADIENT: missing,
        "GPU of the output": str(output.device),
        "output": output,
        "gradients": row,
        "GPU of each stage": [str(next(s.parameters()).device) for s in stages],
        "a tensor went over the CPU": detour,
        "neighbours compute at the same time": together,
        "lists and modes are as before": lists == (stages, devices)
        and all(stage.training for stage in stages),
    }


MICRO_BATCHES = Task(
    id="02.micro_batches",
    title="In micro-batches",
    stars=2,
    where="here",
    cases=(
        *(("01", 12, 4), ("012", 7, 3), ("012", 11, 4), ("01", 5, 1), ("1", 3, 3)),
        *(("012", 9, 4), ("120", 12, 6)),  # 9 in 4: fewer pieces than asked for
    ),
    inputs=lambda case, *_: ([f"cuda:{k}" for k in case[0]], *case[1:]),
    observe=observe_pipeline,
    misses=(
        Miss(
            "batch.chunk(micro_batches)",
            "batch.split(micro_batches)",
            "`split(n)` wants the size of the pieces, `chunk(n)` their number.",
        ),
    ),
    because={
        "at once": "A stage got the whole batch at once. Cut it along its rows first: "
        "`batch.chunk(micro_batches)`. `torch.cat` comes last.",
        "each stage got": "Each stage must compute each row once, also those that a "
        "division leaves over.",
        "micro-batches": TOO_MANY,
        "the largest": "One micro-batch has too many rows, such as all that the "
        "division leaves over. `chunk(micro_batches)` cuts evenly.",
        NO_GRADIENT: CUT_OFF,
        "GPU of the output": "The output should stay on the GPU of the last stage.",
        "each stage": "A stage has moved to the data. Leave it on its GPU.",
        "over the CPU": "A tensor went over the CPU, and Python waits for it. "
        "`x.to(device)` goes from GPU to GPU.",
        "same time": "The result is right, but some stage never computed while the "
        "stage before it did. Send one micro-batch through all stages, then the next "
        "one. Python must not wait in the loop, as it does for `.item()` and `print`. "
        "(Leave out threads: with them the order is chance.)",
        "lists": "The result is right, but `stages`, `devices` or a stage's mode has "
        "changed: loop over the lists, without `pop` or `eval`.",
    },
    errors={
        "on the same device": f"{ANOTHER_DEVICE} Stage k is on `devices[k]`.",
        **FEWER_PIECES,
    },
    otherwise="Return one tensor with a row for each row of the batch, in their order: "
    "`torch.cat(outputs)`.",
    hints=(
        "Run the loop over the stages once for each micro-batch. What happens to the "
        "outputs?",
        "`batch.chunk(n)` cuts along the rows, and `torch.cat` joins the outputs. A "
        "GPU computes while Python goes on: send one micro-batch through all stages, "
        "then the next one.",
        "Two loops:\n"
        "  for x in batch.chunk(...):\n"
        "      for stage, device in zip(stages, devices):\n"
        "          x = ...\n"
        "      outputs.append(x)\n"
        "  return torch.cat(...)",
    ),
)

# ------------------------------------------------------------------------------- bubble

BUBBLE = Task(
    id="02.bubble",
    title="The bubble, twice",
    stars=1,
    where="here",
    cases=((3, 11), (4, 16), (8, 64), (1, 5), (4, 1), (2, 1), (16, 3), (64, 512)),
    misses=(
        Miss(
            "(micro_batches + waits)",
            "(micro_batches + stages)",
            "The second share is right, but not the first. A stage waits K - 1 units: "
            "the whole time is M + K - 1.",
        ),
        Miss(
            "(micro_batches + waits)",
            "micro_batches",
            "Both are shares of the ideal time. The waiting belongs to the whole time.",
        ),
        Miss(
            "stages - 1",
            "stages",
            "A stage waits for each of the *other* stages: that is K - 1.",
        ),
        Miss(
            "waits / (micro_batches + waits)",
            "waits / micro_batches + waits",
            "Parentheses are missing: `/` comes before `+`.",
        ),
        Miss(
            "waits / (micro_batches + waits), waits / micro_batches",
            "100 * waits / (micro_batches + waits), 100 * waits / micro_batches",
            "These look like percentages. Return shares: 0.25, not 25.",
        ),
        Miss("/ ", "// ", "`//` drops everything after the point. Use `/`."),
    ),
    otherwise="Return both shares, `return of_total, of_ideal`, with all digits. A "
    "stage works M units and waits K - 1. The whole time is both, the ideal time is "
    "the work alone.",
    hints=(
        "Take the time of one micro-batch in one stage as the unit. How many units "
        "does a stage work? How many does it wait?",
        "A stage works for M units and waits for K - 1, at the beginning, at the end "
        "or some of both. Together that is the whole time.",
        "Two lines:\n  waits = stages - 1\n  return waits / (... + waits), waits / ...",
    ),
)

# -------------------------------------------------------------------- spot_the_gradient


@on_gpus(2)
def observe_step(answer, gpus, rows, micro_batches):
    """Run the step; look at what goes through the model, and what it leaves."""
    layers = row_of_layers(4)
    model = nn.Sequential(layers[:2].to("cuda:0"), layers[2:].to("cuda:1"))
    for part, gpu in zip(model, ("cuda:0", "cuda:1"), strict=True):
        part.register_forward_pre_hook(lambda module, args, gpu=gpu: args[0].to(gpu))
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    seen, left = [], []  # left: bytes of activations as each micro-batch begins
    note(model, len, seen)
    note(model, lambda _: gpus.memory()["cuda:0"].now_by_kind["activations"], left)
    loss = answer(model, a_batch(rows), torch.arange(rows) * 7 % 4, micro_batches)
    missing, row = gradients(parameters)
    if loss is None:
        return None
    return {
        "the whole batch at once": seen == [rows],
        "rows that went through the model": sum(seen),
        **cut_into(seen, rows, micro_batches),
        NO_GRADIENT: missing,
        # Gradients added up by hand look like activations, until the third.
        "activations pile up": any(a < b for a, b in pairwise(left[2:])),
        "gradients": row,
        "loss": loss,
        "the loss is a Python number": isinstance(loss, int | float),
        "the model is as it came": model.training and are_same(parameters, before),
    }


WEIGHT = " * len(part) / len(images)"

SPOT_THE_GRADIENT = Task(
    id="02.spot_the_gradient",
    title="Spot the gradient",
    stars=2,
    where="here",
    cases=((8, 4), (10, 4), (7, 2), (9, 4), (5, 1), (6, 6)),
    observe=observe_step,
    misses=(
        Miss(
            WEIGHT,
            "",
            "The gradients are `micro_batches` times too large: each `backward()` adds "
            "the gradient of a mean. The loss that is returned hides it.",
        ),
        Miss(
            WEIGHT,
            " / micro_batches",
            "The last micro-batch is smaller here: each must count by its rows.",
        ),
        Miss(
            WEIGHT,
            " / len(images)",
            "`cross_entropy` has already divided by the rows: multiply by them first.",
        ),
        Miss(
            "output =",
            "model.zero_grad(); output =",
            "Only the gradient of the last micro-batch is left. What is set to zero?",
        ),
    ),
    because={
        "at once": "The whole batch goes through at once. Keep the micro-batches.",
        "micro-batches": TOO_MANY,
        NO_GRADIENT: "There are no gradients. Every micro-batch needs its "
        "`backward()`, and the gradients must still be there at the end.",
        "pile up": "With each micro-batch more activations are in memory. Call "
        "`backward()` inside the loop: it frees them, without `retain_graph=True`.",
        "Python number": "The gradients are right, but a Python number is wanted: "
        "`total.item()`. A tensor may hold on to its graph, and so to activations.",
        "as it came": "Gradients and loss are right, but weights or training mode have "
        "changed: leave `step()` and `eval()` to the caller.",
        "loss": "The gradients are right, but the loss is not the mean over all rows. "
        "Is it divided once more at the end?",
    },
    errors={
        "nll_loss": "A loss needs its two tensors on the same GPU. The model's output "
        "is where its last stage is: `target = target.to(output.device)`.",
        **FEWER_PIECES,
    },
    otherwise="Compare with the whole batch: one forward, one loss, one backward. The "
    "gradients must be the same.",
    hints=(
        "Which two tensors meet, and where are they? Then compare the gradients.",
        "`cross_entropy` is the mean over the micro-batch, and `backward()` adds to "
        "`.grad`. What must each loss be multiplied by, so that all of them together "
        "are the mean over the batch?",
        "Inside the loop:\n"
        "  loss = loss * len(part) / ...\n"
        "  loss.backward()\n"
        "  total += loss.detach()\n"
        "What is left to divide at the end?",
    ),
)

# ------------------------------------------------------------------------------ balance


def observe_cut(answer, seconds, nbytes, devices, capacity, best):
    """Any cut is right whose slowest stage takes at most 5 % longer than the best."""
    before = list(seconds), list(nbytes)
    given = answer(seconds, nbytes, devices, capacity)
    seconds, nbytes = before  # a changed list is another mistake
    try:
        sizes = list(map(operator.index, given))
    except TypeError:
        return given
    ends = accumulate(sizes)
    parts = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
    slowest = max((sum(seconds[part]) for part in parts), default=0)
    return {
        "how many numbers": len(sizes),
        "devices without a layer": sum(size < 1 for size in sizes),
        "layers on all devices": sum(sizes),
        "bytes too many": max([0, *(sum(nbytes[part]) - capacity for part in parts)]),
        "seconds of the slowest stage": AtMost(max(slowest, 1.05 * best)),
    }


# Of so many layers nobody can try all cuts.
DRAW = random.Random(5)
LONG = [DRAW.choices(range(1, 99), k=60) for _ in ("seconds", "bytes")]
MICROSECONDS = [one / 1e6 for one in LONG[0]]
NO_CUT = (
    "Did it find no cut? Where a part cannot be cut, count it as `math.inf` seconds: "
    "then it is never the least. And a stage may hold exactly `capacity` bytes."
)

BALANCE = Task(
    id="02.balance",
    title="Balance under a cap",
    stars=3,
    where="here",
    cases=(
        # First time alone, then memory alone, then both.
        ([1, 1, 1, 3, 3, 3], [9, 1, 1, 1, 1, 1], 2, 100, 6),
        ([1, 1, 1, 1, 1, 10], [1] * 6, 3, 100, 10),
        ([6, 1, 1, 1, 1, 1, 6, 6], [1] * 8, 3, 100, 9),
        ([1] * 6, [1, 1, 1, 4, 4, 4], 2, 8, 4),
        ([2, 2, 2], [3, 3, 3], 3, 3, 2),
        ([4, 2], [1, 1], 1, 2, 6),
        # Here the least sum of squares is not the least slowest stage.
        ([4, 3, 1, 2, 1, 5, 2], [1] * 7, 4, 100, 6),
        ([2, 6, 1, 1, 3, 3, 5], [1] * 7, 4, 100, 7),
        # Where a search for a limit is not to stop early.
        ([37, 5, 25, 18, 13, 3, 42, 56], [1] * 8, 4, 100, 56),
        (MICROSECONDS, LONG[1], 8, 10_000, 410e-6),  # a cap that cuts nothing short
        (*LONG, 8, 450, 470),
    ),
    observe=observe_cut,
    misses=(
        Miss("<= capacity", "< capacity", NO_CUT),
        Miss(
            "list(best(0, devices)[1])",
            "[(len(seconds) + k) // devices for k in range(devices)]",
            "Layers differ: count their seconds, not how many they are.",
        ),
    ),
    because={
        "bytes": "A stage does not fit: its layers hold more bytes than `capacity`.",
        "slowest": "Another cut that fits is more than 5 % faster. Only the slowest "
        "stage counts. Compare all first stages, each with the best cut of what is "
        "left. Or try limits for the "
        "slowest stage, as fine as the seconds are, and not the average alone.",
    },
    errors={
        "'NoneType' object": NO_CUT,  # a search that looks at what it has not found
        "min() ": NO_CUT,
        "running: ": "Does it try all cuts? Of 60 layers there are too many. A "
        "recursion must keep its results: `@functools.cache`. Or is there an "
        "endless loop?",
    },
    otherwise="Return a list with one whole number for each device: how many layers it "
    "gets, 1 or more. Together they are all layers.",
    hints=(
        "What decides how fast a pipeline is: the sum of its stages, their average, "
        "or one of them?",
        "The best cut of a row is a first stage with the best cut of what is left: a "
        "recursion. Or choose a limit, fill stage after stage up to it, and look for "
        "the smallest limit that is enough.",
        "The recursion:\n"
        "  @functools.cache\n"
        "  def best(start, devices):  # (slowest stage, sizes) from layer `start`\n"
        "      if devices == 1: all that is left; math.inf if it does not fit\n"
        "      otherwise: for each first stage that fits,\n"
        "          max(its seconds, the best of the rest)\n"
        "      and of these the least",
    ),
    seconds=2.0,
)

TASKS = (
    SPLIT_OVER_THREE,
    MICRO_BATCHES,
    BUBBLE,
    SPOT_THE_GRADIENT,
    BALANCE,
    PREDICT_MICRO_BATCHES,
)
