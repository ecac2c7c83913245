"""Lesson 02: odd wrong answers, and different right ones."""

import itertools
import math

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from course_utils.notebook import ours
from course_utils.notebook.check import find_task, run_check
from course_utils.theory import costs
from course_utils.virtual_gpus import virtual_gpus
from tests.answers import Answers, Edited

ANSWERS = Answers()
SPLIT, MICRO, STEP = "02.split_over_three", "02.micro_batches", "02.spot_the_gradient"
BUBBLE, BALANCE, PREDICT = "02.bubble", "02.balance", "02.predict_micro_batches"

# -------------------------------------------------- our solutions, pieces replaced

CHECKPOINT = "torch.utils.checkpoint.checkpoint({}, use_reentrant=False)"
LAST = 'self.last(x.to("cuda:2"))'
STAGE = "stage(x.to(device))"
TO_DATA = "stage.to(devices[0])(x.to(devices[0])).to(device)"
BACKWARD = "loss.backward()\n        total += loss.detach()"
RETAIN = "loss.backward(retain_graph=True)\n        total = total + loss"
ROWS = "(batch[i] for i in torch.arange(len(batch)).to(batch.device).chunk({}))"
CUT = "list(best(0, devices)[1])"

for task_id, *pieces in (
    (SPLIT, "len(layers) // 3", "1"),
    (SPLIT, "layers[", "__import__('copy').deepcopy(layers)["),
    (MICRO, "append(x)\n    return torch.cat", "extend(x)\n    return torch.stack"),
    (MICRO, "return", "torch.cat(outputs).sum().item(); return"),  # all is handed out
    (MICRO, STAGE, CHECKPOINT.format("stage, x.to(device)")),
    (MICRO, "chunk(", "tensor_split("),  # 9 rows in 4 are 3 + 2 + 2 + 2
    (MICRO, "batch.chunk(micro_batches)", ROWS.format("micro_batches")),
    (STEP, "model(part)", CHECKPOINT.format("model, part")),
    (STEP, "chunk(", "tensor_split("),
    (STEP, "return total.item()", "return __import__('numpy').float64(total.item())"),
    (BALANCE, CUT, "torch.tensor(best(0, devices)[1])"),
):
    ANSWERS.right(task_id)(Edited(*pieces))

for task_id, old, new, says, *status in (
    (SPLIT, "len(layers)", "len(layers.cuda())", "layers that are not its"),
    (SPLIT, "self.second =", "vars(self)['second'] =", "A plain list hides"),
    (SPLIT, "x.to(", "x.cpu().to(", "from GPU to GPU at each cut, not over"),
    (SPLIT, "second(x.to", "second(x.detach().to", "got no gradient"),
    (SPLIT, "return self", "return x, self", "That is a tuple, and not"),
    (SPLIT, LAST, f"vars(self).setdefault('y', {LAST})", "The next batch"),
    (SPLIT, 'x.to("cuda:1")', "x", "another one that is on another device", "crashed"),
    (MICRO, "batch.chunk(micro_batches)", "[batch]", "Cut it along its rows first"),
    (MICRO, STAGE, TO_DATA, "A stage has moved to the data"),
    (MICRO, "x.to", "x.cpu().to", "a tensor went over the CPU"),
    (MICRO, "cat(", "stack(", "`torch.cat(outputs)`"),
    (MICRO, "append(x)", "append(x); print(x)", "Python must not wait"),
    (MICRO, "chunk(micro_batches)", "chunk(2)", "One micro-batch has too many rows"),
    (MICRO, "x = stage(", "x = stage.eval()(", "without `pop` or `eval`"),
    (MICRO, "(outputs)", "(outputs + [stages.pop()][:0])", "without `pop`"),
    (BUBBLE, ", waits / micro_batches", "", "Return both shares"),
    (STEP, "total.item()", "total", "a Python number is wanted"),
    (STEP, "item()", "item() / micro_batches", "divided once more"),
    (STEP, BACKWARD, RETAIN, "more activations are in memory"),
    (STEP, "return", "model.zero_grad(); return", "There are no gradients"),
    (STEP, "model(part)", "model.eval()(part)", "leave `step()` and"),
    (STEP, "return", "torch.optim.SGD(model.parameters()).step(); return", "`step()`"),
    (STEP, "output.device", '"cuda:0"', "two tensors on the same GPU", "crashed"),
    (BALANCE, CUT, f"[[n] for n in {CUT}]", "a list, and not what was asked for"),
    (BALANCE, CUT, f"[{CUT}, seconds.sort()][0]", "`sort`"),
    (BALANCE, CUT, f"[float(n) for n in {CUT}]", "one whole number"),
    (BALANCE, "[(math.inf, ())]", "[]", "Did it find no cut?", "crashed"),
    (BALANCE, "@functools.cache", "", "A recursion must keep its results", "too slow"),
):
    ANSWERS.wrong(task_id, *(status or ["wrong"]), says)(Edited(old, new))

HALF = "layers = layers.half(); third =", "x.to(", "x.half().to("
ANSWERS.wrong(SPLIT, "wrong", "float16")(Edited("third =", *HALF))

# --------------------------------------------------------------------- split_over_three

NAMES = ["cuda:0", "cuda:1", "cuda:2"]


@ANSWERS.right(SPLIT)
class Parts(nn.Module):
    def __init__(self, layers):
        super().__init__()
        a, b = len(layers) // 3, 2 * len(layers) // 3
        self.parts = nn.ModuleList([layers[:a], layers[a:b], layers[b:]])
        for part, name in zip(self.parts, NAMES, strict=True):
            part.to(name)

    def forward(self, x):
        for part, name in zip(self.parts, NAMES, strict=True):
            x = part(x.to(name))
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


# ------------------------------------------------------------------------ micro_batches


@ANSWERS.right(MICRO)
def first_stage_first(stages, devices, batch, micro_batches):
    parts = list(batch.split(math.ceil(len(batch) / micro_batches)))
    for tick in range(len(parts) + len(stages) - 1):
        for k in range(len(stages)):
            if 0 <= tick - k < len(parts):
                parts[tick - k] = stages[k](parts[tick - k].to(devices[k]))
    return torch.cat(parts)


@ANSWERS.wrong(MICRO, "wrong", "A stage got the whole batch at once")
def only_the_first_stage_in_parts(stages, devices, batch, micro_batches):
    x = torch.cat([stages[0](part) for part in batch.chunk(micro_batches)])
    for stage, device in zip(stages[1:], devices[1:], strict=True):
        x = stage(x.to(device))
    return x


OF_THE_NOTEBOOK = virtual_gpus(2, force=True)  # not switched on


@ANSWERS.wrong(MICRO, "crashed", "It uses `OF_THE_NOTEBOOK`, the notebook's virtual")
def with_labels(stages, devices, batch, micro_batches):
    with OF_THE_NOTEBOOK.label("all"):
        return batch


# ------------------------------------------------------------------------------- bubble


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


# ------------------------------------------------------------------------------ balance


@ANSWERS.right(BALANCE)
def by_a_limit(seconds, nbytes, devices, capacity, limits=40):
    """Fill up to a limit; halve the range of limits that may be the least."""
    low, high, best = max(seconds), sum(seconds), [len(seconds)]
    for _ in range(limits):
        limit = (low + high) / 2
        sizes, time, held = [], math.inf, 0
        for k, (one, size) in enumerate(zip(seconds, nbytes, strict=True)):
            needed = devices - len(sizes)  # stages that still need a layer
            full = time + one > limit or held + size > capacity
            if full or len(seconds) - k <= needed:
                sizes, time, held = [*sizes, 0], 0, 0
            sizes[-1] += 1
            time, held = time + one, held + size
        fits = len(sizes) <= devices
        low, high, best = (low, limit, sizes) if fits else (limit, high, best)
    return best


@ANSWERS.wrong(BALANCE, "wrong", "as fine as the seconds are")
def by_a_coarse_limit(seconds, nbytes, devices, capacity):
    return by_a_limit(seconds, nbytes, devices, capacity, limits=5)


@ANSWERS.right(BALANCE)
def within_five_percent(seconds, nbytes, devices, capacity):
    return by_a_limit(seconds, nbytes, devices, capacity, limits=8)


test_wrong, test_right = ANSWERS.tests()


def ours_of(task_id):
    return cloudpickle.loads(ours.packed(find_task(task_id)))


def test_a_check_has_gpus_of_its_own():
    """Those of the notebook, which may be on, are not touched."""
    with virtual_gpus(1, force=True) as gpus:
        kept = torch.ones(3, device="cuda:0")
        before = gpus.memory().now
        assert run_check(SPLIT, Parts).passed
        assert gpus.memory().now == before
        assert not gpus.transfers
        assert str(kept.device) == "cuda:0"


def test_the_best_time_of_each_case_is_that_of_our_solution():
    for *given, best in find_task(BALANCE).cases:
        sizes = ours_of(BALANCE)(*given)
        ends = itertools.accumulate(sizes)
        parts = [given[0][b - n : b] for b, n in zip(ends, sizes, strict=True)]
        assert max(map(sum, parts)) == pytest.approx(best)


def test_the_predicted_number_is_the_least_that_is_enough():
    shares = {m: costs.bubble_of_total(4, m) for m in range(1, 100)}
    least = min(m for m, share in shares.items() if share <= 0.1)
    assert find_task(PREDICT).answer == least
