"""Lesson 02: odd wrong answers, and different right ones."""

import itertools
import math
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch.pipeline import ModelParallel
from course_utils.notebook import ours
from course_utils.notebook.check import find_task, run_check
from course_utils.tasks.task import Miss
from course_utils.theory import costs
from course_utils.virtual_gpus import virtual_gpus
from tests.answers import Answers

ANSWERS = Answers()
SPLIT, MICRO, STEP = "02.split_over_three", "02.micro_batches", "02.spot_the_gradient"
BUBBLE, BALANCE, PREDICT = "02.bubble", "02.balance", "02.predict_micro_batches"

# -------------------------------------------------- our solutions, a piece replaced


def ours_of(task_id, *replaced):
    miss = Miss(*replaced, says="") if replaced else None
    return cloudpickle.loads(ours.packed(find_task(task_id), miss))


CHECKPOINT = "torch.utils.checkpoint.checkpoint({}, use_reentrant=False)"
SUM = "nn.CrossEntropyLoss(reduction='sum')(output, target.to(1))"
LAST = 'self.last(x.to("cuda:2"))'
PIECES = "batch.chunk(micro_batches)"
STAGE = "stage(x.to(device))"
TO_DATA = "stage.to(devices[0])(x.to(devices[0])).to(device)"
BACKWARD = "loss.backward()\n        total += loss.detach()"
RETAIN = "loss.backward(retain_graph=True)\n        total = total + loss"
CUT = "list(best(0, devices)[1])"

for task_id, old, new in (
    (SPLIT, "len(layers) // 3", "1"),
    (SPLIT, "layers[", "__import__('copy').deepcopy(layers)["),
    (SPLIT, '.to("cuda:0")', ".to(device=torch.device('cuda', 0))"),
    (MICRO, "append(x)\n    return torch.cat", "extend(x)\n    return torch.stack"),
    (MICRO, "return", "torch.cat(outputs).sum().item(); return"),  # all is handed out
    (MICRO, STAGE, CHECKPOINT.format("stage, x.to(device)")),
    (MICRO, "chunk(", "tensor_split("),  # 9 rows in 4 are 3 + 2 + 2 + 2
    (BUBBLE, "waits / (micro_batches + waits)", "1 - 1 / (1 + waits / micro_batches)"),
    (BUBBLE, "stages - 1", "__import__('fractions').Fraction(stages - 1)"),
    (STEP, "* len(part) /", "* part.size(0) * 1.0 /"),
    (STEP, "model(part)", CHECKPOINT.format("model, part")),
    (STEP, "loss * len(part)", SUM),
    (STEP, "chunk(", "tensor_split("),
    (BALANCE, CUT, "torch.tensor(best(0, devices)[1])"),
    (BALANCE, "range(start + 1, len(seconds) + 1)", "range(len(seconds), start, -1)"),
    (BALANCE, "list(", "__import__('numpy').array("),
):
    ANSWERS.right(task_id)(ours_of(task_id, old, new))

for task_id, old, new, says in (
    (SPLIT, "len(layers)", "len(layers.cuda())", "layers that are not its own"),
    (SPLIT, "self.second =", "vars(self)['second'] =", "A plain list hides modules"),
    (SPLIT, "x.to(", "x.cpu().to(", "from GPU to GPU, not over the CPU"),
    (SPLIT, "second(x.to", "second(x.detach().to", "Some parameters got no gradient"),
    (SPLIT, "return self", "return x, self", "the output is one tensor: no"),
    (SPLIT, LAST, f"vars(self).setdefault('y', {LAST})", "the next one was not"),
    (MICRO, STAGE, TO_DATA, "a stage has moved to the data"),
    (MICRO, "x.to", "x.cpu().to", "a tensor went over the CPU"),
    (MICRO, "cat(", "stack(", "`torch.cat(outputs)`"),
    (MICRO, "outputs.append(x)", "outputs.append(x); print(x)", "must not wait"),
    (MICRO, "(outputs)", "(outputs + [stages.pop()][:0])", "`pop` takes away"),
    (BUBBLE, ", waits / micro_batches", "", "Return both shares"),
    (STEP, "total.item()", "total", "a Python number is wanted"),
    (STEP, "total.item()", "total.item() / micro_batches", "divided once more"),
    (STEP, BACKWARD, RETAIN, "more activations are in memory"),
    (STEP, "model(part)", "model.eval()(part)", "The model was in eval mode"),
    (STEP, "return", "model.zero_grad(); return", "There are no gradients"),
    (BALANCE, "list(", "dict.fromkeys(", "Return a list with one number"),
    (BALANCE, CUT, f"[float(n) for n in {CUT}]", "indexed with a float"),
):
    ANSWERS.wrong(task_id, "wrong", says)(ours_of(task_id, old, new))

for task_id, old, new, says in (
    (SPLIT, 'x.to("cuda:0")', "x", "The batch comes from the CPU: move it"),
    (SPLIT, 'x.to("cuda:1")', "x", "A tensor met a layer on another GPU."),
    (MICRO, "in batch.", "in batch.T.", "Each layer must run once, in its order"),
    (MICRO, PIECES, f"({PIECES}[i] for i in range(micro_batches))", "fewer pieces"),
    (STEP, "output.device", '"cuda:0"', "A loss needs its two tensors on the same GPU"),
    (BALANCE, "[(math.inf, ())]", "[]", "Did it find no cut?"),
):
    ANSWERS.wrong(task_id, "crashed", says)(ours_of(task_id, old, new))

ANSWERS.wrong(BALANCE, "too slow", "A recursion must keep its results")(
    ours_of(BALANCE, "@functools.cache", "")
)

# --------------------------------------------------------------------- split_over_three

NAMES = ["cuda:0", "cuda:1", "cuda:2"]


class Parts(nn.Module):
    """Three parts on three GPUs, cut wherever `cut` says."""

    def cut(self, n):
        return n // 3, 2 * n // 3

    def __init__(self, layers):
        super().__init__()
        a, b = self.cut(len(layers))
        self.parts = nn.ModuleList([layers[:a], layers[a:b], layers[b:]])
        for part, name in zip(self.parts, NAMES, strict=True):
            part.to(name)

    def forward(self, x):
        for part, name in zip(self.parts, NAMES, strict=True):
            x = part(x.to(name))
        return x


ANSWERS.right(SPLIT)(Parts)


@ANSWERS.right(SPLIT)
class OneWithoutParametersInTheMiddle(Parts):
    def cut(self, n):
        return (2, 3) if n > 3 else (1, 2)


@ANSWERS.right(SPLIT)
class MovedByHooks(nn.Module):
    """The parts are a Sequential; each takes its input to its GPU by itself."""

    def __init__(self, layers):
        super().__init__()
        self.net = nn.Sequential(layers[:1], layers[1:2], layers[2:])
        for part, name in zip(self.net, NAMES, strict=True):
            part.to(name).register_forward_pre_hook(
                lambda module, args, name=name: args[0].to(name)
            )

    def forward(self, x):
        return self.net(x)


@ANSWERS.right(SPLIT)
class LayerByLayer(nn.Module):
    """One layer each, and the rest on the last one; moved by `.cuda(number)`."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        for k, layer in enumerate(layers):
            layer.cuda(min(k, 2))

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = layer(x.cuda(min(k, 2)))
        return x


class Move(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def forward(self, x):
        return x.to(self.device, non_blocking=True)


@ANSWERS.right(SPLIT)
def one_sequential_with_moves(layers):
    found = []
    for k, numbers in enumerate(np.array_split(range(len(layers)), 3)):
        found += [Move(k), *(layers[int(i)].to(k) for i in numbers)]
    return nn.Sequential(*found)


@ANSWERS.wrong(SPLIT, "wrong", "nothing in `course_utils`")
def from_the_reference(layers):
    return ModelParallel([layers[:1], layers[1:2], layers[2:]], NAMES)


# ------------------------------------------------------------------------ micro_batches

OF_THE_NOTEBOOK = virtual_gpus(2, force=True)  # not switched on


def through(stages, devices, x):
    for stage, device in zip(stages, devices, strict=True):
        x = stage(x.to(device))
    return x


@ANSWERS.right(MICRO)
def first_stage_first(stages, devices, batch, micro_batches):
    parts = list(batch.split(math.ceil(len(batch) / micro_batches)))
    for tick in range(len(parts) + len(stages) - 1):
        for k in range(len(stages)):
            if 0 <= tick - k < len(parts):
                parts[tick - k] = stages[k](parts[tick - k].to(devices[k]))
    return torch.cat(parts)


@ANSWERS.right(MICRO)
def with_generators(stages, devices, batch, micro_batches):
    """Each stage asks the one before it for the next micro-batch."""

    def outputs_of(stage, device, inputs):
        for x in inputs:
            yield stage(x.to(device))

    parts = iter(batch.chunk(micro_batches))
    for stage, device in zip(stages, devices, strict=True):
        parts = outputs_of(stage, device, parts)
    return torch.cat(list(parts))


@ANSWERS.wrong(MICRO, "wrong", "A later stage got the whole batch at once")
def only_the_first_stage_in_parts(stages, devices, batch, micro_batches):
    x = torch.cat([stages[0](part) for part in batch.chunk(micro_batches)])
    return through(stages[1:], devices[1:], x)


@ANSWERS.wrong(MICRO, "crashed", "It uses `OF_THE_NOTEBOOK`, the notebook's virtual")
def with_labels(stages, devices, batch, micro_batches):
    with OF_THE_NOTEBOOK.label("all"):
        return through(stages, devices, batch)


# ------------------------------------------------------------------------------- bubble


@ANSWERS.right(BUBBLE)
def from_the_whole_length(stages, micro_batches):
    length = micro_batches + stages - 1
    return [1 - micro_batches / length, length / micro_batches - 1]


@ANSWERS.right(BUBBLE)
def in_a_tensor(stages, micro_batches):
    times = torch.tensor([micro_batches + stages - 1, micro_batches])
    return (stages - 1) / times


# -------------------------------------------------------------------- spot_the_gradient


@ANSWERS.right(STEP)
def added_up_by_hand(model, images, labels, micro_batches):
    """As `backward()`, but the sum of the gradients is in a list of its own."""
    parameters, sums, total = list(model.parameters()), None, 0.0
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        loss = F.cross_entropy(model(part), target.to("cuda:1"), reduction="sum")
        gradients = torch.autograd.grad(loss / len(images), parameters)
        if sums is None:
            sums = gradients
        else:
            sums = [a + b for a, b in zip(sums, gradients, strict=True)]
        total += loss.item()
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient
    return total / len(images)


@ANSWERS.right(STEP)
def gradients_divided_at_the_end(model, images, labels, micro_batches):
    total, n = 0.0, micro_batches
    parts, targets = images.tensor_split(n), labels.tensor_split(n)
    for part, target in zip(parts, targets, strict=True):
        loss = F.cross_entropy(model(part).cpu(), target, reduction="sum")
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        parameter.grad /= len(images)
    return total / len(images)


@ANSWERS.right(STEP)
def by_log_softmax(model, images, labels, micro_batches):
    model.zero_grad()
    losses = []
    for rows in torch.arange(len(images)).chunk(micro_batches):
        of_all = F.log_softmax(model(images[rows]), dim=1)
        picked = of_all[torch.arange(len(rows)), labels[rows].to(of_all.device)]
        (-picked.sum() / len(images)).backward()
        losses += (-picked).tolist()
    return sum(losses) / len(losses)


# ------------------------------------------------------------------------------ balance


@ANSWERS.right(BALANCE)
def by_a_limit(seconds, nbytes, devices, capacity):
    """Fill up to a limit; search for the least that is enough."""

    def cut(limit):
        sizes, time, held = [], math.inf, 0
        for k, (one, size) in enumerate(zip(seconds, nbytes, strict=True)):
            needed = devices - len(sizes)  # stages that still need a layer
            full = time + one > limit or held + size > capacity
            if full or len(seconds) - k <= needed:
                sizes, time, held = [*sizes, 0], 0, 0
            sizes[-1] += 1
            time, held = time + one, held + size
        return sizes if len(sizes) == devices else None

    ends = itertools.combinations(range(len(seconds) + 1), 2)
    limits = sorted({sum(seconds[a:b]) for a, b in ends})
    limits = [limit for limit in limits if limit >= max(seconds)]
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(limits[middle]) else (middle + 1, high)
    return cut(limits[low])


def good_cuts(seconds, nbytes, devices, capacity):
    """All cuts that fit, with the time of their slowest stage."""
    for places in itertools.combinations(range(1, len(seconds)), devices - 1):
        parts = list(itertools.pairwise([0, *places, len(seconds)]))
        if all(sum(nbytes[a:b]) <= capacity for a, b in parts):
            yield max(sum(seconds[a:b]) for a, b in parts), [b - a for a, b in parts]


@ANSWERS.right(BALANCE)
def within_five_percent(seconds, nbytes, devices, capacity):
    """Not the best cut, but the last one that is still good enough."""
    if math.comb(len(seconds) - 1, devices - 1) > 5000:
        return by_a_limit(seconds, nbytes, devices, capacity)
    cuts = list(good_cuts(seconds, nbytes, devices, capacity))
    return [sizes for time, sizes in cuts if time <= 1.05 * min(cuts)[0]][-1]


@ANSWERS.right(BALANCE)
def in_a_table(seconds, nbytes, devices, capacity):
    """The best cuts of the first layers: for one device, for two, and so on."""
    table = {0: (0, ())}
    for _ in range(devices):
        table, before = {}, table
        for start, (time, sizes) in before.items():
            for end in range(start + 1, len(seconds) + 1):
                if sum(nbytes[start:end]) > capacity:
                    break
                new = max(time, sum(seconds[start:end])), (*sizes, end - start)
                table[end] = min(table.get(end, new), new)
    return table[len(seconds)][1]


# ---------------------------------------------------------------- predict_micro_batches

for value in (27, 27.0, torch.tensor(27), "27", Fraction(27)):
    ANSWERS.right(PREDICT)(value)
ANSWERS.wrong(PREDICT, "wrong", "Asked for is a tenth of the whole time")(30)
ANSWERS.wrong(PREDICT, "wrong", "3 of 29 parts")(26)

test_wrong, test_right = ANSWERS.tests()


def test_a_check_has_gpus_of_its_own():
    """Those of the notebook, which may be on, are not touched."""
    with virtual_gpus(1, force=True) as gpus:
        kept = torch.ones(3, device="cuda:0")
        before = gpus.memory().now
        assert run_check(SPLIT, Parts).passed
        assert run_check(MICRO, ours_of(MICRO)).passed
        assert run_check(STEP, ours_of(STEP)).passed
        assert gpus.memory().now == before
        assert not gpus.transfers
        assert str(kept.device) == "cuda:0"


@pytest.mark.parametrize("case", find_task(BALANCE).cases, ids=str)
def test_the_best_cut_is_the_best_of_all(case):
    *given, best = case
    seconds, _, devices, _ = given
    if math.comb(len(seconds) - 1, devices - 1) < 20_000:
        assert min(good_cuts(*given))[0] == best
    sizes = ours_of(BALANCE)(*given)
    ends = itertools.accumulate(sizes)
    parts = [sum(seconds[end - n : end]) for end, n in zip(ends, sizes, strict=True)]
    assert max(parts) == best


def test_the_examples_in_the_stubs_are_right():
    assert ours_of(BUBBLE)(2, 3) == (0.25, 1 / 3)
    assert ours_of(BALANCE)([1, 1, 1, 3], [1] * 4, 2, 4) == [3, 1]


def test_the_predicted_number_is_the_least_that_is_enough():
    shares = {m: costs.bubble_of_total(4, m) for m in range(1, 100)}
    least = min(m for m, share in shares.items() if share <= 0.1)
    assert find_task(PREDICT).answer == least
