"""Lesson 02, model parallel: the tasks of its exercise."""

import operator
import random
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import nn

from course_utils.questions.lesson_02 import PREDICT_MICRO_BATCHES
from course_utils.tasks.devices import at_the_same_time, copies, on_gpus
from course_utils.tasks.task import AtMost, Miss, Task

# ---------------------------------------------------------------------- models to split


def row_of_layers(number, *, mixed=False):
    """That many layers, from 6 numbers a row to 4; always the same ones.

    `mixed`: one has a BatchNorm, and from four layers on one is without parameters.
    """
    torch.manual_seed(number)
    tanhs = int(mixed and number > 3)
    widths = [6, *range(8, 7 + number - tanhs), 4]
    layers = [nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(widths)]
    if mixed:
        # BatchNorm takes away the mean, so a bias before it would have no gradient.
        layers[1][0] = nn.Linear(*widths[1:3], bias=False)
        layers[1].insert(1, nn.BatchNorm1d(widths[2]))
    return nn.Sequential(*layers[:2], *[nn.Tanh()] * tanhs, *layers[2:])


def a_batch(rows):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def gradients(parameters):
    """How many parameters have none; and all gradients in one row of numbers."""
    found = [p.grad for p in parameters if p is not None and p.grad is not None]
    flat = [gradient.cpu().flatten() for gradient in found]
    return len(parameters) - len(found), torch.cat(flat) if flat else None


def recomputes():
    """Does a backward run this forward again, as activation checkpointing does?"""
    return torch._C._current_autograd_node() is not None


def too_many(pieces, micro_batches):
    """How many micro-batches there are beyond those asked for."""
    return max(0, len(pieces) - micro_batches)


def too_large(pieces, rows, micro_batches):
    """By how many rows the largest micro-batch exceeds an even cut, rounded up."""
    return max(0, *pieces, -(rows // -micro_batches)) + rows // -micro_batches


NO_GRADIENT = "parameters without a gradient"
FEWER_PIECES = (
    "There are fewer pieces than `micro_batches` says. `chunk(4)` cuts 9 rows into 3 + "
    "3 + 3: a fourth piece would be empty. Loop over the pieces themselves."
)
ON_THE_CPU = (
    "The tensor is on a GPU, but the layer is on the CPU. Move each part to its GPU in "
    '`__init__`: `part.to("cuda:0")`.'
)
FROM_THE_CPU = (
    "A tensor is still on the CPU, and the layer that it met is on a GPU. The batch "
    "comes from the CPU: move it before the first part. (`x.to(device)` leaves `x` "
    "where it is and returns a new tensor.)"
)
ON_ANOTHER_GPU = (
    "A tensor met a layer on another GPU. Move it before each part: `x = "
    "x.to(device)`. (`x.to(device)` alone leaves `x` where it is.) "
)
OTHER_WIDTH = (
    "A layer got rows of another width than it takes. Each layer must run once, in its "
    "order, on whole rows: cut a batch along its rows."
)

# --------------------------------------------------------------------- split_over_three


@on_gpus(3)
def observe_split(answer, gpus, layers, rows):
    """Make the model and train it for one step; tell where everything was."""
    given = row_of_layers(layers, mixed=True)
    ran_on = {}  # nothing else tells where a layer without parameters is
    for k, layer in enumerate(given):
        layer.register_forward_hook(
            lambda module, args, output, k=k: ran_on.update({k: str(output.device)})
        )
    before = [(int(n.split(".")[0]), p.clone()) for n, p in given.named_parameters()]
    model = answer(given)
    if not isinstance(model, nn.Module):
        return None if model is None else {"it is an nn.Module": False}
    held = list(model.parameters())
    found = [
        next((p for p in held if p.shape == b.shape and torch.equal(p.cpu(), b)), None)
        for _, b in before
    ]
    on = {
        k: None if p is None else str(p.device)
        for (k, _), p in zip(before, found, strict=True)
    }
    own = sum(x.nbytes for x in (*held, *model.buffers()) if x.is_cuda)
    brought = sum(c.bytes for c in gpus.transfers if c.destination != "cpu")
    gpus.clear()
    output = model(a_batch(rows))
    is_tensor = isinstance(output, torch.Tensor)
    seen = {"it is an nn.Module": True, "the output is one tensor": is_tensor}
    if not is_tensor:
        return None if output is None else seen
    sent = copies(gpus)
    if output.requires_grad:
        output.square().mean().backward()
    places = [on.get(k) or ran_on.get(k) for k in range(layers)]
    missing, row = gradients(found)
    return seen | {
        "layers that are in no part": places.count(None),
        "layers that model.parameters() does not find": list(on.values()).count(None),
        "layers on the CPU when the model is made": places.count("cpu"),
        "GPUs that have a layer": len(set(places)),
        "layers in the order of the GPUs": places == sorted(places, key=str),
        "bytes of other layers that a GPU was given": max(0, brought - own),
        "copies": sent,
        "output": output,
        NO_GRADIENT: missing,
        "gradients": row,
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
            "[2 * third :]",
            "[2 * third : 3 * third]",
            "Some layers are left out. The last part takes all that are left.",
        ),
        Miss(
            "len(layers) // 3",
            "-(-len(layers) // 3)",
            "Not every GPU has a layer. Of 4 layers, 2 + 2 leave none: round down.",
        ),
        Miss(
            "third =",
            "layers.eval(); third =",
            "The model is in eval mode. Leave it in training mode, as it came.",
        ),
    ),
    because={
        "does not find": "`model.parameters()` does not find all layers, so no "
        "optimizer would train them. A plain list hides modules from PyTorch: keep the "
        "parts as attributes (`self.first = ...`) or in an nn.ModuleList.",
        "when the model is made": "Some layers are still on the CPU when the model is "
        'made. Move them once, in `__init__`: `module.to("cuda:0")`.',
        "GPUs that have": "Not every GPU has a layer. There are at least three layers.",
        "in the order": "Neighbours stay together: the first layers on cuda:0, the "
        "next ones on cuda:1, the last ones on cuda:2.",
        "other layers": "A GPU was given layers that are not its own: the whole model "
        "first, or a copy of it. Think of a model that no GPU has room for: cut first, "
        "then move each part straight to its GPU.",
        "copies": "There should be three copies: of the input to cuda:0, then at each "
        "cut from GPU to GPU, not over the CPU. The output stays on cuda:2. (Did "
        "layers move in `forward`? They move once, in `__init__`.)",
        NO_GRADIENT: "Some parameters got no gradient. `.to()` keeps the graph; "
        "`.detach()`, `.data` and `torch.no_grad()` cut it.",
        "second": "The first batch was right, the next one was not. `forward` must "
        "compute anew for each batch, and leave the model as it was.",
    },
    errors={
        "other tensors on cpu": ON_THE_CPU,
        "mat2 is on cpu": ON_THE_CPU,  # what PyTorch says of a layer without a bias
        "mat1 is on cpu": FROM_THE_CPU,
        "input is on cpu": FROM_THE_CPU,
        "on the same device": f"{ON_ANOTHER_GPU}Or is a layer in two parts? Then it is "
        "on the GPU to which it was moved last.",
        "shapes cannot be multiplied": OTHER_WIDTH,
        "StopIteration": "Did you ask a layer for its parameters? Some have none, such "
        "as nn.Tanh(): they cannot tell their GPU. Remember where you cut.",
    },
    otherwise="`ThreeGPUs(layers)` is a module that gives what `layers(x)` gives on "
    "the CPU: every layer once, in its order.",
    hints=(
        "Two things must move: in `__init__` the layers, in `forward` the activations. "
        "How many copies are needed for three GPUs?",
        "Cut the row in two places: `layers[:a]`, `layers[a:b]` and `layers[b:]` are "
        "modules, too. Move each to its GPU. In `forward`, move x to a GPU before the "
        "part that is there.",
        "The shape of it:\n"
        "  third = len(layers) // 3\n"
        '  self.first = layers[:third].to("cuda:0")\n'
        "  self.second = layers[third : 2 * third].to(...)\n"
        "  self.last = ...\n"
        "and in forward:\n"
        '  x = self.first(x.to("cuda:0"))\n'
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
        stage.to(device).register_forward_pre_hook(
            lambda module, args, pieces=pieces: (
                None if recomputes() else pieces.append(len(args[0]))
            )
        )
    batch = a_batch(rows).to(devices[0])
    gpus.clear()
    lists = list(stages), list(devices)
    output = answer(*lists, batch, micro_batches)
    if not isinstance(output, torch.Tensor):
        return None if output is None else {"the output is one tensor": False}
    together = all(at_the_same_time(gpus, *pair) for pair in pairwise(devices))
    # A number that Python reads (`.item()`) is no detour. It only makes Python wait.
    detour = any(
        "cpu" in (copy.source, copy.destination) and copy.kind != "item"
        for copy in gpus.transfers
        if copy.phase == "forward"
    )
    if output.requires_grad:
        output.square().mean().backward()
    missing, row = gradients(list(layers.parameters()))
    return {
        "the output is one tensor": True,
        "stages that got the whole batch at once": [
            k for k, pieces in enumerate(seen) if pieces == [rows]
        ],
        "rows that each stage got": list(map(sum, seen)),
        "micro-batches too many": [too_many(p, micro_batches) for p in seen],
        "rows too many": [too_large(p, rows, micro_batches) for p in seen],
        NO_GRADIENT: missing,
        "GPU of the output": str(output.device),
        "output": output,
        "gradients": row,
        "GPU of each stage": [str(next(s.parameters()).device) for s in stages],
        "a tensor went over the CPU": detour,
        "neighbours compute at the same time": together,
        "the lists are as before": lists == (stages, devices),
    }


IN_PIECES = "batch.chunk(micro_batches)"

MICRO_BATCHES = Task(
    id="02.micro_batches",
    title="In micro-batches",
    stars=2,
    where="here",
    cases=tuple(
        ([f"cuda:{k}" for k in gpus], rows, number)
        for gpus, rows, number in (
            *(("01", 8, 4), ("012", 12, 3), ("012", 7, 3), ("012", 11, 4)),
            # One stage. Then fewer pieces than asked for: 3 + 3 + 3.
            *(("01", 5, 1), ("1", 3, 3), ("012", 9, 4), ("120", 12, 6)),
        )
    ),
    observe=observe_pipeline,
    misses=(
        Miss(
            IN_PIECES,
            "[batch]",
            "Cut the batch along its rows first: `batch.chunk(micro_batches)`.",
        ),
        Miss(
            IN_PIECES,
            "batch.split(micro_batches)",
            "`micro_batches` became the size of a micro-batch, not their number. "
            "`batch.split(n)` wants the size, `batch.chunk(n)` the number.",
        ),
        Miss(
            IN_PIECES,
            "batch.split(len(batch) // micro_batches)",
            "There are more micro-batches than asked for. Round their rows up: 7 rows "
            "in 3 are 3 + 3 + 1. `batch.chunk(micro_batches)` rounds up.",
        ),
        Miss(
            IN_PIECES,
            "batch[: len(batch) // micro_batches * micro_batches].chunk(micro_batches)",
            "Some rows were never computed: those that are left over by the division.",
        ),
    ),
    because={
        "at once": "A later stage got the whole batch at once. Put nothing together "
        "between two stages: `torch.cat` comes last.",
        "each stage got": "Each stage must compute each row once. Were some "
        "micro-batches still under way when the loop ended?",
        "micro-batches too many": "There are more micro-batches than asked for. Cut "
        "once, before the first stage.",
        "rows too many": "One micro-batch got more rows than it may, such as all that "
        "the division leaves over. `chunk(micro_batches)` cuts evenly.",
        NO_GRADIENT: "Some parameters got no gradient. Is the output what the last "
        "stage returned? Did you use `.detach()` or `no_grad()`?",
        "GPU of the output": "The output should stay on the GPU of the last stage.",
        "each stage": "The result is right, but a stage has moved to the data. Each "
        "stage stays on its GPU: what travels are the activations.",
        "over the CPU": "A tensor went over the CPU: Python waits for it and hands out "
        "no other work. `x.to(device)` goes from GPU to GPU.",
        "same time": "The result is right, but some stage never computed while the "
        "stage before it did: there nothing was won. Send one micro-batch through all "
        "stages, then the next one. And Python must not wait in the loop: "
        "`synchronize()`, `.item()` and `print` of a tensor do. (With threads it is "
        "chance who comes first. None are needed.)",
        "lists": "The result is right, but `stages` or `devices` is not the list that "
        "it was, and the next batch needs it. `pop` takes away: loop over the list.",
    },
    errors={
        "on the same device": f"{ON_ANOTHER_GPU}Stage k wants its input on "
        "`devices[k]`, which need not be cuda:k.",
        "shapes cannot be multiplied": OTHER_WIDTH,
        "tuple index out of range": FEWER_PIECES,
        "second time": "Was `backward()` called already? Only the forward is asked "
        "for. The caller computes a loss from the outputs of all rows.",
    },
    otherwise="Return one tensor with a row for each row of the batch, in their order: "
    "`torch.cat(outputs)`.",
    hints=(
        "It is the loop over the stages that you know, once for each micro-batch. What "
        "must happen with the outputs?",
        "`batch.chunk(n)` cuts along the rows, `torch.cat` puts together again. A GPU "
        "computes while Python goes on: send one micro-batch through all stages, then "
        "the next one, and the GPUs work at the same time by themselves.",
        "Two loops:\n"
        "  outputs = []\n"
        "  for x in batch.chunk(...):\n"
        "      for stage, device in zip(stages, devices):\n"
        "          x = ...\n"
        "      outputs.append(x)\n"
        "  return torch.cat(...)",
    ),
)

# ------------------------------------------------------------------------------- bubble


def observe_shares(answer, stages, micro_batches):
    """Each share by itself, so that it can be said which one is wrong."""
    given = answer(stages, micro_batches)
    pair = given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None if pair is None else {"there are two numbers": False}
    shares = {"share of the whole time": pair[0], "share of the ideal time": pair[1]}
    return {"there are two numbers": True} | shares


BOTH = "waits / (micro_batches + waits), waits / micro_batches"

BUBBLE = Task(
    id="02.bubble",
    title="The bubble, twice",
    stars=1,
    where="here",
    cases=((3, 11), (4, 16), (8, 64), (1, 5), (4, 1), (2, 1), (16, 3), (64, 512)),
    observe=observe_shares,
    instead="Each of the two is one division.",
    misses=(
        Miss(
            "(micro_batches + waits)",
            "micro_batches",
            "Both are shares of the ideal time. The waiting belongs to the whole time.",
        ),
        Miss(
            BOTH,
            "waits / micro_batches, waits / (micro_batches + waits)",
            "The two changed places. The share of the longer time is smaller.",
        ),
        Miss(
            "stages - 1",
            "stages",
            "A stage is not idle for K micro-batches, but for K - 1: when the last "
            "stage begins, K - 1 micro-batches have been started before it.",
        ),
        Miss(
            BOTH,
            "micro_batches / (micro_batches + waits), 1",
            "That is the share of the time in which a stage works. When does it wait?",
        ),
        Miss(
            "waits / (micro_batches + waits)",
            "waits / micro_batches + waits",
            "Parentheses are missing: `/` comes before `+`.",
        ),
        Miss(
            "waits / (",
            "stages - 1 / (",
            "Parentheses are missing: `/` comes before `-`.",
        ),
        Miss(
            "waits / ",
            "100 * waits / ",
            "These are percentages. Return shares: 0.25, not 25.",
        ),
        Miss("/ ", "// ", "`//` drops everything after the point. Use `/`."),
    ),
    because={
        "two numbers": "Return both shares: `return of_total, of_ideal`.",
        "of the whole": "The share of the whole time is wrong. A stage works M units "
        "and waits K - 1: how long is the whole? (Return all digits.)",
        "of the ideal": "The share of the whole time is right. The ideal time is what "
        "a stage works: M micro-batches.",
    },
    errors={
        "ZeroDivisionError": "There may be one stage, and one micro-batch. There is "
        "always something to divide by: the time in which a stage works.",
    },
    hints=(
        "Take the time of one micro-batch in one stage as the unit. How many units "
        "does a stage work? How many does it wait?",
        "A stage works for M units. It waits for K - 1: the first one at the end, the "
        "last one at the beginning, the others some of both. Together that is the "
        "whole time.",
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
    seen, modes, left = [], [], []  # left: bytes of activations as each one begins

    def begin(module, args):
        if not recomputes():
            seen.append(len(args[0]))
            modes.append(module.training)
            left.append(gpus.memory()["cuda:0"].now_by_kind["activations"])

    model.register_forward_pre_hook(begin)
    loss = answer(model, a_batch(rows), torch.arange(rows) * 7 % 4, micro_batches)
    missing, row = gradients(parameters)
    if loss is None:
        return None
    return {
        "the whole batch at once": seen == [rows],
        "rows that went through the model": sum(seen),
        "micro-batches too many": too_many(seen, micro_batches),
        "rows too many": too_large(seen, rows, micro_batches),
        "the parameters are the same": all(map(torch.equal, parameters, before)),
        NO_GRADIENT: missing,
        # Gradients added up by hand look like activations, until the third.
        "activations pile up": any(a < b for a, b in pairwise(left[2:])),
        "gradients": row,
        "loss": loss,
        "the loss is a Python number": type(loss) in (int, float),
        "all in training mode": all(modes),
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
            "It is right where all micro-batches have the same number of rows. Here "
            "the last one is smaller: each must count by its rows.",
        ),
        Miss(
            WEIGHT,
            " / len(images)",
            "The gradients are too small. `cross_entropy` has divided by the rows of "
            "the micro-batch already. Multiply by them first.",
        ),
        Miss(
            WEIGHT,
            " * len(part)",
            "These are the gradients of a sum over the rows. The loss is their mean.",
        ),
        Miss(
            "output =",
            "model.zero_grad(); output =",
            "Only the gradient of the last micro-batch is left. What is set to zero?",
        ),
    ),
    because={
        "at once": "Now the whole batch goes through at once. Keep the micro-batches: "
        "their activations are freed one after the other.",
        "micro-batches too many": "There are more micro-batches than asked for. Round "
        "their rows up: 10 rows in 4 are 3 + 3 + 3 + 1.",
        "parameters are": "The parameters have changed. The optimizer's step comes "
        "later: this function leaves gradients only.",
        NO_GRADIENT: "There are no gradients: every micro-batch needs its "
        "`backward()`, and the gradients must still be there at the end.",
        "pile up": "With each micro-batch more activations are in memory. Call "
        "`backward()` inside the loop: it frees them, without `retain_graph=True`.",
        "Python number": "The gradients are right, but a Python number is wanted: "
        "`total.item()`. A tensor may hold on to its graph, and so to activations.",
        "loss": "The gradients are right. But the loss that is returned is not the "
        "mean over all rows. Is it divided once more at the end?",
        "training": "The model was in eval mode: that is for tests. In a training step "
        "layers such as dropout must do their work.",
    },
    errors={
        "nll_loss": "A loss needs its two tensors on the same GPU. The model's output "
        "is where its last stage is: `target = target.to(output.device)`.",
        "on the same device": "Two tensors that met are on different devices. Leave "
        "the model where it is: it moves its input from stage to stage.",
        "tuple index out of range": FEWER_PIECES,
        "second time": "A graph was used twice: each micro-batch has a loss of its "
        "own.",
    },
    otherwise="Compare with the whole batch: one forward, one loss, one backward. The "
    "gradients must be the same.",
    hints=(
        "Run the check, and read the error first: which two tensors meet, and where "
        "are they? Then compare the gradients with those of the whole batch.",
        "`cross_entropy` is the mean over the rows of the micro-batch, and "
        "`backward()` adds to `.grad`. What must each micro-batch be multiplied with, "
        "so that all of them together are the mean over the batch?",
        "Inside the loop:\n"
        "  loss = F.cross_entropy(output, target.to(...))\n"
        "  loss = loss * len(part) / ...\n"
        "  loss.backward()\n"
        "  total += loss.detach()\n"
        "What is left to divide at the end?",
    ),
)

# ------------------------------------------------------------------------------ balance


def observe_cut(answer, seconds, nbytes, devices, capacity, best):
    """Any cut is right whose slowest stage takes at most 5 % longer than the best."""
    given = answer(seconds, nbytes, devices, capacity)
    row = given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given
    if not isinstance(row, list | tuple):
        return None if row is None else {"it is a list": False}
    try:
        sizes = list(map(operator.index, row))
    except TypeError:
        return {"it is a list": True, "of whole numbers": False}
    parts = [
        slice(end - n, end) for end, n in zip(accumulate(sizes), sizes, strict=True)
    ]
    slowest = max((sum(seconds[part]) for part in parts), default=0)
    return {
        "it is a list": True,
        "of whole numbers": True,
        "how many numbers": len(sizes),
        "devices without a layer": sum(size < 1 for size in sizes),
        "layers on all devices": sum(sizes),
        "bytes too many": max([0, *(sum(nbytes[part]) - capacity for part in parts)]),
        "seconds of the slowest stage": AtMost(max(slowest, 1.05 * best)),
    }


# The 18 layers of the lesson's ResNet-50, for 16 images of 64 × 64: how many 0.1 ms
# each takes on its virtual GPU, and its parameters, gradients and activations in MiB.
RESNET = (
    [38, 75, 71, 71, 119, 70, 70, 70, 119, 70, 70, 70, 70, 70, 118, 70, 70, 8],
    [11, 17, 13, 13, 14, 8, 8, 8, 17, 12, 12, 12, 12, 12, 49, 36, 36, 16],
)
# Where trying all cuts takes long, and too long.
DRAW = random.Random(5)
LONG = [DRAW.choices(range(1, 31), k=24) for _ in ("seconds", "bytes")]
LONGER = [DRAW.choices(range(1, 99), k=60) for _ in ("seconds", "bytes")]
NO_CUT = (
    "Did it find no cut? There is one. A stage may hold exactly `capacity` bytes, and "
    "the last stage ends with the last layer."
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
        (*RESNET, 2, 190, 773),
        (*RESNET, 4, 100, 399),
        ([2, 2, 2], [3, 3, 3], 3, 3, 2),
        ([4, 2], [1, 1], 1, 2, 6),
        # Here the least sum of squares or cubes, or the stages that are nearest to
        # their average, are not the least slowest stage.
        ([4, 3, 1, 2, 1, 5, 2], [1] * 7, 4, 100, 6),
        ([2, 6, 1, 1, 3, 3, 5], [1] * 7, 4, 100, 7),
        ([2, 5, 7, 2, 5, 2], [1] * 6, 4, 100, 7),
        ([0.31, 0.12, 0.27, 0.44, 0.05, 0.38, 0.22, 0.17], [1] * 8, 3, 100, 0.77),
        (*LONG, 5, 110, 95),
        (*LONGER, 8, 450, 478),
        (*LONGER, 8, 10_000, 388),  # a cap that cuts nothing short
    ),
    observe=observe_cut,
    misses=(
        Miss("<= capacity", "< capacity", NO_CUT),
        Miss(
            "<= capacity",
            "< math.inf",
            "A stage does not fit: its layers hold more bytes than `capacity`. Only "
            "cuts that fit count, however fast they are.",
        ),
        Miss(
            "list(best(0, devices)[1])",
            "[(len(seconds) + k) // devices for k in range(devices)]",
            "Each device has as many layers as the others, but layers differ. A "
            "pipeline is as fast as its slowest stage: what counts are the seconds.",
        ),
        Miss(
            "max(slowest, sum(seconds[start:stop]))",
            "slowest + sum(seconds[start:stop]) ** 2",
            "It fits, but another cut is more than 5 % faster. Only the slowest stage "
            "counts, not how even the others are.",
        ),
    ),
    because={
        "whole": "Nothing can be counted or indexed with a float: return whole "
        "numbers. `//` makes one, `/` a float.",
        "bytes": "A stage does not fit: its layers hold more bytes than `capacity`.",
        "slowest": "It fits, but another cut is more than 5 % faster. To fill one "
        "stage after the other up to the average goes wrong where a layer is large, "
        "and so does moving one border at a time. Try all cuts of the part that is "
        "left, or try limits for the slowest stage.",
    },
    errors={
        "'NoneType' object": NO_CUT,  # a search that looks at what it has not found
        "min() ": NO_CUT,
        "running: ": "Is there a loop that never ends? Or does it try all cuts? Of 60 "
        "layers there are too many. A recursion must keep its results "
        "(`@functools.cache`): the same part of the row comes up again and again.",
    },
    otherwise="Return a list with one number for each device: how many layers it gets, "
    "1 or more. Together they are all layers. (Or are these the places where you cut?)",
    hints=(
        "What decides how fast a pipeline is: the sum of its stages, the average, or "
        "one of them?",
        "Two ways lead there. One: the best cut of a row is the best first stage with "
        "the best cut of what is left (a recursion; keep results with "
        "functools.cache). Two: choose a limit, fill stage after stage up to it, and "
        "look for the smallest limit that is enough.",
        "The recursion:\n"
        "  @functools.cache\n"
        "  def best(start, devices):  # (slowest stage, sizes) from layer `start`\n"
        "      if devices == 1: everything that is left, if it fits\n"
        "      otherwise: for each first stage that fits,\n"
        "          max(its seconds, the best of the rest)\n"
        "      and of these the least\n"
        "Where nothing fits, let it be math.inf.",
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
