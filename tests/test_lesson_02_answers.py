"""Lesson 02: typical wrong answers, and different right ones."""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils import costs
from course_utils.checks import lesson_02 as lesson
from course_utils.from_scratch.pipeline import GPipe, ModelParallel, ticks
from course_utils.notebook.check import find_task, run_check
from course_utils.virtual_gpus import virtual_gpus
from tests.answers import Answers

ANSWERS = Answers()

# ------------------------------------------------------------- 02.split_over_three

SPLIT = "02.split_over_three"
NAMES = ["cuda:0", "cuda:1", "cuda:2"]


@ANSWERS.wrong(SPLIT, "not attempted", "Write your code in the cell above")
class Stub(nn.Module):
    def __init__(self, layers):
        super().__init__()
        raise NotImplementedError("Write your code here.")

    def forward(self, x):
        raise NotImplementedError("Write your code here.")


class Thirds(nn.Module):
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


ANSWERS.right(SPLIT)(Thirds)


@ANSWERS.wrong(SPLIT, "not attempted", "It still raises NotImplementedError")
class OnlyHalfDone(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        raise NotImplementedError("Write your code here.")


@ANSWERS.wrong(
    SPLIT,
    "crashed",
    "The batch comes from the CPU: move it before the first part.",
    did="forgot the input",
)
class ForgotTheInput(Thirds):
    def forward(self, x):
        first, second, last = self.parts
        return last(second(first(x).to("cuda:1")).to("cuda:2"))


@ANSWERS.wrong(SPLIT, "crashed", "A tensor met a layer on another GPU.")
class ForgotACopy(Thirds):
    def forward(self, x):
        first, second, last = self.parts
        return last(second(first(x.to("cuda:0"))).to("cuda:2"))


@ANSWERS.wrong(SPLIT, "crashed", "The tensor is on a GPU, but the layer is on the CPU.")
class ForgotAPart(Thirds):
    forgotten = 0

    def __init__(self, layers):
        super().__init__(layers)
        self.parts[self.forgotten].cpu()


# There PyTorch names the weight instead of the input.
@ANSWERS.wrong(SPLIT, "crashed", "The tensor is on a GPU, but the layer is on the CPU.")
class ForgotThePartWithoutABias(ForgotAPart):
    forgotten = 1


@ANSWERS.wrong(SPLIT, "crashed", "Or is a layer in two parts?")
class InTwoParts(Thirds):
    def __init__(self, layers):
        super().__init__(layers)
        self.parts[1] = layers[1:].to("cuda:1")


@ANSWERS.wrong(SPLIT, "crashed", "A layer got rows of another width than it takes.")
class LeavesOutAPart(Thirds):
    def forward(self, x):
        first, second, last = self.parts
        return last(first(x.to("cuda:0")).to("cuda:2"))


@ANSWERS.wrong(
    SPLIT,
    "wrong",
    "A plain list hides modules from PyTorch",
    did="kept the parts in a Python list",
)
class InAPlainList(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.parts = [layers[0], layers[1], layers[2:]]
        for part, name in zip(self.parts, NAMES, strict=True):
            part.to(name)

    forward = Thirds.forward


@ANSWERS.wrong(SPLIT, "wrong", "Not every GPU has a layer.")
class TwoAreEnough(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first, self.last = layers[:2].to("cuda:0"), layers[2:].to("cuda:2")

    def forward(self, x):
        return self.last(self.first(x.to("cuda:0")).to("cuda:2"))


@ANSWERS.wrong(SPLIT, "wrong", "Some layers are still on the CPU when")
class ForgotToMoveALayer(Thirds):
    def __init__(self, layers):
        super().__init__(layers)
        self.parts[2].cpu()

    def forward(self, x):
        first, second, last = self.parts
        return last(second(first(x.to("cuda:0")).to("cuda:1")).cpu())


@ANSWERS.wrong(SPLIT, "crashed", "returns a new tensor: `x = x.to(device)`.")
class MovesWithoutAssignment(Thirds):
    def forward(self, x):
        x = x.to("cuda:0")
        for part, name in zip(self.parts, NAMES, strict=True):
            x.to(name)
            x = part(x)
        return x


@ANSWERS.wrong(SPLIT, "wrong", "The layers are on the wrong GPUs.")
class TheLastOnesFirst(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.parts = nn.ModuleList([layers[:1], layers[1:2], layers[2:]])
        for part, name in zip(self.parts, NAMES[::-1], strict=True):
            part.to(name)

    def forward(self, x):
        for part, name in zip(self.parts, NAMES[::-1], strict=True):
            x = part(x.to(name))
        return x


@ANSWERS.wrong(SPLIT, "wrong", "and in training mode, as it came")
class InEvalMode(Thirds):
    def __init__(self, layers):
        super().__init__(layers)
        self.eval()


@ANSWERS.wrong(SPLIT, "wrong", "Neighbours should stay together")
class InTurns(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        for k, layer in enumerate(layers):
            layer.to(f"cuda:{k % 3}")

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = layer(x.to(f"cuda:{k % 3}"))
        return x


@ANSWERS.wrong(SPLIT, "wrong", "The output should stay where it was computed")
class BackToTheFirst(Thirds):
    def forward(self, x):
        return super().forward(x).to("cuda:0")


# Two mistakes at once: the copies are named first.
@ANSWERS.wrong(SPLIT, "wrong", "The activations take a detour over the CPU.")
class OverTheCPU(Thirds):
    def forward(self, x):
        for part, name in zip(self.parts, NAMES, strict=True):
            x = part(x.cpu().to(name))
        return x


@ANSWERS.wrong(SPLIT, "crashed", "The output has no graph")
class WithoutAGraph(Thirds):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@ANSWERS.wrong(SPLIT, "wrong", "Some parameters got no gradient.")
class Detached(Thirds):
    def forward(self, x):
        first, second, last = self.parts
        x = second(first(x.to("cuda:0")).detach().to("cuda:1"))
        return last(x.to("cuda:2"))


class MovedInForward(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.parts = nn.ModuleList([layers[:1], layers[1:2], layers[2:]])

    def forward(self, x):
        for part, name in zip(self.parts, NAMES, strict=True):
            x = part.to(name)(x.to(name))
        return x


ANSWERS.wrong(SPLIT, "wrong", "do it once, in `__init__`")(MovedInForward)


@ANSWERS.wrong(SPLIT, "wrong", "A GPU was given layers that are not its own")
class AllOnTheFirstGPUFirst(Thirds):
    def __init__(self, layers):
        super().__init__(layers.to("cuda:0"))


@ANSWERS.wrong(SPLIT, "wrong", "A GPU was given layers that are not its own")
class WithACopyOnEach(Thirds):
    def __init__(self, layers):
        self.__dict__["copies"] = [copy.deepcopy(layers).to(name) for name in NAMES]
        super().__init__(layers)


@ANSWERS.wrong(SPLIT, "wrong", "The output should stay where it was computed")
class BackToTheCPU(Thirds):
    def forward(self, x):
        return super().forward(x).cpu()


@ANSWERS.wrong(SPLIT, "wrong", "There may be more than three")
class OnlyThreeLayers(Thirds):
    def __init__(self, layers):
        super().__init__(layers[:3])


@ANSWERS.wrong(SPLIT, "crashed", "`super().__init__()` comes first")
class ForgotSuper(nn.Module):
    def __init__(self, layers):
        self.first = layers.to("cuda:0")


@ANSWERS.wrong(SPLIT, "crashed", "The class must be an nn.Module")
class NoModule:
    def __init__(self, layers):
        self.layers = layers


@ANSWERS.wrong(SPLIT, "crashed", "Is there one part too many?")
class FourParts(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        for k, layer in enumerate(layers):
            layer.to(f"cuda:{k + 1}")

    forward = InTurns.forward


@ANSWERS.wrong(SPLIT, "crashed", "Was the batch cut? Here the model is cut")
class DataParallel(nn.Module):
    """A model on each GPU, and a part of the batch for each."""

    def __init__(self, layers):
        super().__init__()
        self.models = nn.ModuleList(copy.deepcopy(layers).to(name) for name in NAMES)

    def forward(self, x):
        parts = zip(self.models, x.chunk(3), NAMES, strict=False)
        return torch.cat([m(part.to(name)).to(NAMES[2]) for m, part, name in parts])


@ANSWERS.wrong(SPLIT, "wrong", "Did layers move to them in `forward`?")
class LayersComeToTheData(Thirds):
    def forward(self, x):
        x = x.to(NAMES[2])
        for part in self.parts:
            x = part.to(NAMES[2])(x)
        return x


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


@ANSWERS.wrong(SPLIT, "crashed", "Some layers have none, such as nn.Tanh()")
class AsksEachLayer(LayerByLayer):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).device))
        return x


@ANSWERS.wrong(SPLIT, "wrong", "Not every GPU has a layer.")
class RoundedUp(Thirds):
    def __init__(self, layers):
        super().__init__(layers)
        a = math.ceil(len(layers) / 3)
        self.parts = nn.ModuleList([layers[:a], layers[a : 2 * a], layers[2 * a :]])
        for part, name in zip(self.parts, NAMES, strict=True):
            part.to(name)


@ANSWERS.wrong(SPLIT, "wrong", "The first batch was right, the next one was not.")
class UsesEachPartOnce(Thirds):
    def __init__(self, layers):
        super().__init__(layers)
        self.left = list(zip(self.parts, NAMES, strict=True))

    def forward(self, x):
        while self.left:
            part, name = self.left.pop(0)
            x = part(x.to(name))
        return x


@ANSWERS.wrong(SPLIT, "wrong", "The first batch was right, the next one was not.")
class KeepsTheFirstOutput(Thirds):
    output = None

    def forward(self, x):
        if self.output is None:
            self.output = super().forward(x)
        return self.output


@ANSWERS.wrong(SPLIT, "wrong", "The output must be one tensor.")
class ATuple(Thirds):
    def forward(self, x):
        return (super().forward(x),)


@ANSWERS.wrong(SPLIT, "crashed", "it returned None: did you forget `return`?")
def makes_no_model(layers):
    Thirds(layers)


@ANSWERS.right(SPLIT)
class OneInTheMiddle(Thirds):
    """The layer in the middle may be one without parameters."""

    def __init__(self, layers):
        nn.Module.__init__(self)
        a = 2 if len(layers) > 3 else 1
        self.parts = nn.ModuleList([layers[:a], layers[a : a + 1], layers[a + 1 :]])
        for part, name in zip(self.parts, NAMES, strict=True):
            part.to(name)


@ANSWERS.wrong(SPLIT, "wrong", "nothing in `course_utils`")
class ASubclassOfTheReference(ModelParallel):
    def __init__(self, layers):
        stages = [layers[:1], layers[1:2], layers[2:]]
        super().__init__(stages, [torch.device("cuda", k) for k in range(3)])


@ANSWERS.wrong(SPLIT, "wrong", "Some layers are in no part: they are left out.")
class LeavesOutTheRest(Thirds):
    def __init__(self, layers):
        nn.Module.__init__(self)
        n = len(layers) // 3
        self.parts = nn.ModuleList([layers[k * n : (k + 1) * n] for k in range(3)])
        for part, name in zip(self.parts, NAMES, strict=True):
            part.to(name)


@ANSWERS.wrong(SPLIT, "wrong", "nothing in `course_utils`")
def from_the_reference(layers):
    stages = [layers[:1], layers[1:2], layers[2:]]
    return ModelParallel(stages, [torch.device("cuda", k) for k in range(3)])


@ANSWERS.right(SPLIT)
class MovedByKeyword(Thirds):
    def __init__(self, layers):
        nn.Module.__init__(self)
        self.parts = nn.ModuleList([layers[:1], layers[1:2], layers[2:]])
        for k, part in enumerate(self.parts):
            part.to(device=torch.device("cuda", k))


@ANSWERS.right(SPLIT)
class OfCopies(Thirds):
    def __init__(self, layers):
        super().__init__(copy.deepcopy(layers))


# ------------------------------------------------------------------ 02.micro_batches

MICRO = "02.micro_batches"
OF_THE_NOTEBOOK = virtual_gpus(2, force=True)  # not switched on


@ANSWERS.wrong(MICRO, "not attempted", "It still raises NotImplementedError")
def stub(stages, devices, batch, micro_batches):
    raise NotImplementedError("Write your code here.")


def through(stages, devices, x):
    for stage, device in zip(stages, devices, strict=True):
        x = stage(x.to(device))
    return x


@ANSWERS.wrong(MICRO, "wrong", "`stages` or `devices` is not the list that it was")
def pops_the_first_stage(stages, devices, batch, micro_batches):
    first, outputs = stages.pop(0), []
    for part in batch.chunk(micro_batches):
        outputs.append(through(stages, devices[1:], first(part)))
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "wrong", "`stages` or `devices` is not the list that it was")
def pops_the_first_device(stages, devices, batch, micro_batches):
    outputs, _ = [], devices.pop(0)
    for part in batch.chunk(micro_batches):
        outputs.append(through(stages[1:], devices, stages[0](part)))
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "wrong", "The whole batch went through at once.")
def not_cut(stages, devices, batch, micro_batches):
    return through(stages, devices, batch)


@ANSWERS.wrong(
    MICRO,
    "wrong",
    "became the size of a micro-batch, not their number",
    did="took `split` for `chunk`",
)
def split_for_chunk(stages, devices, batch, micro_batches):
    parts = batch.split(micro_batches)
    return torch.cat([through(stages, devices, part) for part in parts])


@ANSWERS.wrong(MICRO, "wrong", "There are more micro-batches than asked for.")
def rounded_down(stages, devices, batch, micro_batches):
    parts = batch.split(len(batch) // micro_batches)
    return torch.cat([through(stages, devices, part) for part in parts])


@ANSWERS.wrong(MICRO, "wrong", "Some rows were never computed.")
def dropped_the_rest(stages, devices, batch, micro_batches):
    rows = len(batch) // micro_batches
    parts = [batch[k * rows : (k + 1) * rows] for k in range(micro_batches)]
    return torch.cat([through(stages, devices, part) for part in parts])


@ANSWERS.wrong(MICRO, "wrong", "Some micro-batches did not reach the last stage.")
def forgot_the_last(stages, devices, batch, micro_batches):
    """The loop of PyTorch's tutorial, without its last lines."""
    if len(stages) > 2:
        return in_order(stages, devices, batch, micro_batches)
    outputs, before = [], None
    for part in batch.chunk(micro_batches):
        if before is not None:
            outputs.append(stages[1](before))
        before = stages[0](part).to(devices[1])
    return torch.cat(outputs)


@ANSWERS.wrong(
    MICRO,
    "wrong",
    "some stage never computed while the stage before it",
    did="all micro-batches through stage 1, then stage 2",
)
def stage_by_stage(stages, devices, batch, micro_batches):
    parts = batch.chunk(micro_batches)
    for stage, device in zip(stages, devices, strict=True):
        parts = [stage(part.to(device)) for part in parts]
    return torch.cat(parts)


@ANSWERS.wrong(MICRO, "wrong", "went over the CPU")
def over_the_cpu(stages, devices, batch, micro_batches):
    outputs = []
    for x in batch.chunk(micro_batches):
        for stage, device in zip(stages, devices, strict=True):
            x = stage(x.cpu().to(device))
        outputs.append(x)
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "wrong", "some stage never computed while the stage before it")
def waits_for_each(stages, devices, batch, micro_batches):
    outputs = []
    for x in batch.chunk(micro_batches):
        for stage, device in zip(stages, devices, strict=True):
            x = stage(x.to(device))
            torch.cuda.synchronize(device)
        outputs.append(x)
    return torch.cat(outputs)


def looks_at(look):
    """The two loops, but with a look at what each stage returns."""

    def in_micro_batches(stages, devices, batch, micro_batches):
        outputs = []
        for x in batch.chunk(micro_batches):
            for stage, device in zip(stages, devices, strict=True):
                x = stage(x.to(device))
                look(x)
            outputs.append(x)
        return torch.cat(outputs)

    return in_micro_batches


for look in (print, lambda x: x.sum().item(), lambda x: f"{x.mean()}"):
    ANSWERS.wrong(MICRO, "wrong", "`.item()` and `print` of a tensor do.")(
        looks_at(look)
    )


@ANSWERS.wrong(MICRO, "crashed", "It uses `OF_THE_NOTEBOOK`, the notebook's virtual")
def with_labels(stages, devices, batch, micro_batches):
    outputs = []
    for i, x in enumerate(batch.chunk(micro_batches)):
        with OF_THE_NOTEBOOK.label(str(i)):
            outputs.append(through(stages, devices, x))
    return torch.cat(outputs)


@ANSWERS.right(MICRO)
def a_number_at_the_end(stages, devices, batch, micro_batches):
    """It waits once, when all work has been handed out."""
    output = in_order(stages, devices, batch, micro_batches)
    assert output.isfinite().all().item()
    return output


@ANSWERS.wrong(MICRO, "crashed", "returns a new tensor: `x = x.to(device)`.")
def moves_without_assignment(stages, devices, batch, micro_batches):
    outputs = []
    for x in batch.chunk(micro_batches):
        for stage, device in zip(stages, devices, strict=True):
            x.to(device)
            x = stage(x)
        outputs.append(x)
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "crashed", "which need not be cuda:k")
def numbers_of_its_own(stages, devices, batch, micro_batches):
    names = [f"cuda:{k}" for k in range(len(stages))]
    return in_order(stages, names, batch, micro_batches)


@ANSWERS.wrong(MICRO, "wrong", "One micro-batch got more rows than it may")
def the_rest_to_the_last(stages, devices, batch, micro_batches):
    rows = len(batch) // micro_batches
    sizes = [rows] * (micro_batches - 1)
    parts = batch.split([*sizes, len(batch) - sum(sizes)])
    return torch.cat([through(stages, devices, part) for part in parts])


@ANSWERS.wrong(MICRO, "wrong", "some stage never computed while the stage before it")
def the_third_stage_waits(stages, devices, batch, micro_batches):
    first = [through(stages[:2], devices[:2], x) for x in batch.chunk(micro_batches)]
    return torch.cat([through(stages[2:], devices[2:], x) for x in first])


@ANSWERS.wrong(MICRO, "wrong", "The output should stay on the GPU of the last stage")
def back_to_the_first_gpu(stages, devices, batch, micro_batches):
    return in_order(stages, devices, batch, micro_batches).to(devices[0])


@ANSWERS.wrong(MICRO, "wrong", "put the micro-batches together again with")
def only_the_last(stages, devices, batch, micro_batches):
    return [through(stages, devices, part) for part in batch.chunk(micro_batches)][-1]


@ANSWERS.wrong(MICRO, "wrong", "Return one tensor")
def a_list(stages, devices, batch, micro_batches):
    return [through(stages, devices, part) for part in batch.chunk(micro_batches)]


@ANSWERS.wrong(
    MICRO, "wrong", "A call of a function with `yield` runs none of its lines"
)
def a_generator(stages, devices, batch, micro_batches):
    for part in batch.chunk(micro_batches):
        yield through(stages, devices, part)


@ANSWERS.wrong(MICRO, "crashed", "There are fewer pieces than `micro_batches` says.")
def by_number(stages, devices, batch, micro_batches):
    parts = batch.chunk(micro_batches)
    outputs = [through(stages, devices, parts[i]) for i in range(micro_batches)]
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "crashed", "list index out of range")
def two_stages_or_three(stages, devices, batch, micro_batches):
    outputs = []
    for part in batch.chunk(micro_batches):
        x = stages[0](part)
        x = stages[1](x.to(devices[1]))
        if len(stages) == 3:
            x = stages[2](x.to(devices[2]))
        outputs.append(x)
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "wrong", "put the micro-batches together again with")
def stacked(stages, devices, batch, micro_batches):
    parts = batch.chunk(micro_batches)
    return torch.stack([through(stages, devices, part) for part in parts])


@ANSWERS.wrong(MICRO, "wrong", "in another order than in the batch")
def reversed_order(stages, devices, batch, micro_batches):
    parts = batch.chunk(micro_batches)
    return torch.cat([through(stages, devices, part) for part in parts][::-1])


@ANSWERS.wrong(MICRO, "wrong", "The output should stay on the GPU of the last stage.")
def back_to_the_cpu(stages, devices, batch, micro_batches):
    return in_order(stages, devices, batch, micro_batches).cpu()


@ANSWERS.wrong(MICRO, "crashed", "A micro-batch met a stage on another GPU.")
def never_moved(stages, devices, batch, micro_batches):
    outputs = []
    for x in batch.chunk(micro_batches):
        for stage in stages:
            x = stage(x)
        outputs.append(x)
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "crashed", "The output has no graph")
def into_an_empty_tensor(stages, devices, batch, micro_batches):
    with torch.no_grad():
        return in_order(stages, devices, batch, micro_batches)


@ANSWERS.wrong(MICRO, "crashed", "Is it what the last stage returned?")
def keeps_the_inputs(stages, devices, batch, micro_batches):
    outputs = []
    for x in batch.chunk(micro_batches):
        outputs.append(x)
        through(stages, devices, x)
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "crashed", "each micro-batch goes through all stages")
def one_stage_for_each(stages, devices, batch, micro_batches):
    """As if each GPU had the whole model."""
    outputs = []
    for i, x in enumerate(batch.chunk(micro_batches)):
        k = i % len(stages)
        outputs.append(stages[k](x.to(devices[k])).to(devices[-1]))
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "crashed", "The batch is cut along its rows")
def cuts_the_features(stages, devices, batch, micro_batches):
    parts = batch.chunk(micro_batches, dim=1)
    return torch.cat([through(stages, devices, part) for part in parts], dim=1)


@ANSWERS.wrong(MICRO, "crashed", "Was `backward()` called already?")
def with_a_backward(stages, devices, batch, micro_batches):
    outputs = [through(stages, devices, x) for x in batch.chunk(micro_batches)]
    for output in outputs:
        output.square().mean().backward()
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "wrong", "a stage has moved to the data")
def stages_come_to_the_data(stages, devices, batch, micro_batches):
    outputs = []
    for x in batch.chunk(micro_batches):
        for stage in stages:
            x = stage.to(x.device)(x)
        outputs.append(x.to(devices[-1]))
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "wrong", "did you forget `return`?")
def forgot_to_return(stages, devices, batch, micro_batches):
    in_order(stages, devices, batch, micro_batches)


def in_order(stages, devices, batch, micro_batches):
    parts = batch.chunk(micro_batches)
    return torch.cat([through(stages, devices, part) for part in parts])


ANSWERS.right(MICRO)(in_order)


@ANSWERS.wrong(MICRO, "wrong", "nothing in `course_utils`")
def tick_by_tick(stages, devices, batch, micro_batches):
    parts = list(batch.tensor_split(micro_batches))
    for tick in ticks(len(stages), len(parts)):
        for k, i in tick:
            parts[i] = stages[k](parts[i].to(devices[k]))
    return torch.cat(parts)


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


@ANSWERS.right(MICRO)
def with_checkpoints(stages, devices, batch, micro_batches):
    """As the GPipe of the paper: inside a stage, activations are computed again."""
    outputs = []
    for x in batch.chunk(micro_batches):
        for stage, device in zip(stages, devices, strict=True):
            x = checkpoint(stage, x.to(device), use_reentrant=False)
        outputs.append(x)
    return torch.cat(outputs)


@ANSWERS.wrong(MICRO, "wrong", "a later one got the whole batch at once")
def only_the_first_stage_in_parts(stages, devices, batch, micro_batches):
    x = torch.cat([stages[0](part) for part in batch.chunk(micro_batches)])
    return through(stages[1:], devices[1:], x)


@ANSWERS.wrong(MICRO, "wrong", "a later one got other pieces")
def other_parts_for_the_last_stage(stages, devices, batch, micro_batches):
    x = torch.cat(
        [through(stages[:-1], devices[:-1], x) for x in batch.chunk(micro_batches)]
    )
    last = [x.to(devices[-1]) for x in x.split(1)]
    return torch.cat([stages[-1](part) for part in last])


@ANSWERS.wrong(MICRO, "wrong", "nothing in `course_utils`")
def with_the_reference(stages, devices, batch, micro_batches):
    return GPipe(stages, devices, micro_batches)(batch)


# ------------------------------------------------------------------------- 02.bubble

BUBBLE = "02.bubble"


@ANSWERS.wrong(BUBBLE, "not attempted", "It still raises NotImplementedError")
def bubble_stub(stages, micro_batches):
    raise NotImplementedError("Write your code here.")


for formula, says in (
    (lambda k, m: ((k - 1) / m, (k - 1) / (m + k - 1)), "changed places"),
    (lambda k, m: ((k - 1) / (m + k), (k - 1) / m), "The ideal share is"),
    (lambda k, m: ((k - 1) / m, (k - 1) / m), "shares of the ideal"),
    (
        lambda k, m: ((k - 1) / (m + k - 1), (k - 1) / (m + k - 1)),
        "Both are shares of the whole time.",
    ),
    (lambda k, m: (m / (m + k - 1), 1), "in which a stage works. Asked for"),
    (
        lambda k, m: ((m - 1) / (m + k - 1), (m - 1) / k),
        "Stages and micro-batches changed places.",
    ),
    (
        lambda k, m: (100 * (k - 1) / (m + k - 1), 100 * (k - 1) / m),
        "These are percentages.",
    ),
    (lambda k, m: ((k - 1) // (m + k - 1), (k - 1) // m), "`//` drops"),
    (
        lambda k, m: ((k - 1) / (k * (m + k - 1)), (k - 1) / (k * m)),
        "Each stage waits for K - 1",
    ),
    (lambda k, m: (k - 1) / (m + k - 1), "Return both"),
    (lambda k, m: ((k - 1) / (m + k - 1), m), "of the whole time is ri"),
    (lambda k, m: (0.5, (k - 1) / m), "of the ideal time is right"),
    (lambda k, m: (1 - k / m, 1 - k / (m + k)), "Draw it for 3 stages and 2"),
    (lambda k, m: (1 - 1 / k, k - 1), "That is so with a single micro-batch."),
    (
        lambda k, m: (2 * (k - 1) / (m + 2 * (k - 1)), 2 * (k - 1) / m),
        "The waiting is counted twice.",
    ),
    (
        lambda k, m: ((k - 1) / (2 * m + k - 1), (k - 1) / (2 * m)),
        "The work is counted twice.",
    ),
    (
        lambda k, m: ((k - 1) / (m + k - 1), m / (k - 1)),
        "The share of the whole time is right",
    ),
):
    ANSWERS.wrong(BUBBLE, "wrong", says)(
        functools.update_wrapper(functools.partial(formula), formula)
    )


@ANSWERS.wrong(
    BUBBLE, "wrong", "not idle for K micro-batches", did="K instead of K − 1"
)
def k_instead_of_k_minus_1(stages, micro_batches):
    return stages / (micro_batches + stages), stages / micro_batches


@ANSWERS.wrong(BUBBLE, "wrong", "Your code calls bubble_of_total, line")
def from_the_course(stages, micro_batches):
    return (
        costs.bubble_of_total(stages, micro_batches),
        costs.bubble_of_ideal(stages, micro_batches),
    )


@ANSWERS.wrong(BUBBLE, "wrong", "That is a dictionary; a tuple was expected.")
def with_names(stages, micro_batches):
    return dict(zip("ab", two_divisions(stages, micro_batches), strict=True))


@ANSWERS.wrong(BUBBLE, "crashed", "There may be one stage, and one micro-batch.")
def divides_by_the_others(stages, micro_batches):
    return 1 / (1 + micro_batches / (stages - 1)), (stages - 1) / micro_batches


@ANSWERS.wrong(BUBBLE, "wrong", "They are rounded.")
def rounded_shares(stages, micro_batches):
    return tuple(round(share, 4) for share in two_divisions(stages, micro_batches))


@ANSWERS.right(BUBBLE)
def two_divisions(stages, micro_batches):
    waits = stages - 1
    return waits / (micro_batches + waits), waits / micro_batches


@ANSWERS.wrong(BUBBLE, "wrong", "Parentheses are missing")
def without_parentheses(stages, micro_batches):
    return stages - 1 / (micro_batches + stages - 1), stages - 1 / micro_batches


@ANSWERS.wrong(BUBBLE, "wrong", "Parentheses are missing")
def without_those_of_the_whole_time(stages, micro_batches):
    waits = stages - 1
    return waits / micro_batches + waits, waits / micro_batches


@ANSWERS.right(BUBBLE)
def from_the_whole_length(stages, micro_batches):
    length = micro_batches + stages - 1
    return [1 - micro_batches / length, length / micro_batches - 1]


@ANSWERS.wrong(BUBBLE, "wrong", "nothing in `course_utils`")
def from_a_schedule(stages, micro_batches):
    length = len(list(ticks(stages, micro_batches)))
    return [1 - micro_batches / length, length / micro_batches - 1]


# ------------------------------------------------------------- 02.spot_the_gradient

STEP = "02.spot_the_gradient"


@ANSWERS.wrong(STEP, "crashed", "A loss needs its two tensors on the same GPU.")
def as_given_but_for_a_name(model, images, labels, micro_batches):
    loss_so_far = 0.0
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        loss = F.cross_entropy(model(part), target.to("cuda:0"))
        loss.backward()
        loss_so_far += loss.item()
    return loss_so_far / micro_batches


@ANSWERS.wrong(STEP, "crashed", "`output.device` says where. (`x.to(device)` leaves")
def labels_moved_without_assignment(model, images, labels, micro_batches):
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        output = model(part)
        target.to(output.device)
        loss = F.cross_entropy(output, target) * len(part) / len(images)
        loss.backward()
    return loss.item()


@ANSWERS.wrong(STEP, "crashed", "Two tensors that met are on different devices.")
def total_on_the_first_gpu(model, images, labels, micro_batches):
    total = torch.zeros((), device="cuda:0")
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        output = model(part)
        loss = F.cross_entropy(output, target.to(output.device))
        loss = loss * len(part) / len(images)
        loss.backward()
        total += loss.detach()
    return total


@ANSWERS.wrong(STEP, "crashed", "Leave the model where it is")
def moves_the_model(model, images, labels, micro_batches):
    model.to("cuda:0")
    return weighted_by_rows(model, images, labels, micro_batches)


@ANSWERS.wrong(STEP, "wrong", "It returned None: did you forget `return`?")
def step_without_return(model, images, labels, micro_batches):
    weighted_by_rows(model, images, labels, micro_batches)


@ANSWERS.wrong(STEP, "wrong", "The parameters have changed. The optimizer's step")
def a_step_for_each(model, images, labels, micro_batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def right(rows, of, n):
        return rows / of

    for part, target in zip(
        images.chunk(micro_batches), labels.chunk(micro_batches), strict=True
    ):
        loss = step(model, part, target, 1, right)
        optimizer.step()
    return loss


def step(model, images, labels, micro_batches, share, after=lambda total, n: total):
    """A step in which each micro-batch counts `share(rows, of all, micro-batches)`."""
    total = 0.0
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        output = model(part)
        loss = F.cross_entropy(output, target.to(output.device))
        loss = loss * share(len(part), len(images), micro_batches)
        loss.backward()
        total += loss.item()
    return after(total, micro_batches)


@ANSWERS.wrong(STEP, "wrong", "With each micro-batch more activations are in memory")
def one_loss_of_all(model, images, labels, micro_batches):
    output = torch.cat([model(part) for part in images.chunk(micro_batches)])
    loss = F.cross_entropy(output, labels.to(output.device))
    loss.backward()
    return loss.item()


@ANSWERS.wrong(STEP, "wrong", "With each micro-batch more activations are in memory")
def one_backward_at_the_end(model, images, labels, micro_batches):
    total = 0.0
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        output = model(part)
        loss = F.cross_entropy(output, target.to(output.device), reduction="sum")
        total = total + loss / len(images)
    total.backward()
    return total.item()


@ANSWERS.wrong(STEP, "wrong", "without `retain_graph=True`")
def keeps_every_graph(model, images, labels, micro_batches):
    total = 0.0
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        output = model(part)
        loss = F.cross_entropy(output, target.to(output.device), reduction="sum")
        loss = loss / len(images)
        loss.backward(retain_graph=True)
        total = total + loss
    return total.item()


def by_size(model, images, labels, size):
    total = 0.0
    for part, target in zip(images.split(size), labels.split(size), strict=True):
        output = model(part)
        loss = F.cross_entropy(output, target.to(output.device), reduction="sum")
        loss = loss / len(images)
        loss.backward()
        total += loss.item()
    return total


@ANSWERS.wrong(STEP, "wrong", "There are more micro-batches than asked for.")
def row_by_row(model, images, labels, micro_batches):
    return by_size(model, images, labels, 1)


@ANSWERS.wrong(STEP, "wrong", "There are more micro-batches than asked for.")
def step_rounded_down(model, images, labels, micro_batches):
    return by_size(model, images, labels, len(images) // micro_batches)


@ANSWERS.wrong(STEP, "crashed", "There are fewer pieces than `micro_batches` says.")
def step_by_number(model, images, labels, micro_batches):
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    total = 0.0
    for i in range(micro_batches):
        output = model(parts[i])
        loss = F.cross_entropy(output, targets[i].to(output.device))
        loss = loss * len(parts[i]) / len(images)
        loss.backward()
        total += loss.item()
    return total


@ANSWERS.wrong(STEP, "wrong", "The model was in eval mode: that is for tests.")
def in_eval_mode(model, images, labels, micro_batches):
    return weighted_by_rows(model.eval(), images, labels, micro_batches)


@ANSWERS.wrong(STEP, "wrong", "this function leaves gradients only")
def with_the_optimizer(model, images, labels, micro_batches):
    loss = weighted_by_rows(model, images, labels, micro_batches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


@ANSWERS.wrong(STEP, "wrong", "Only the gradient of the last micro-batch is left")
def cleared_in_the_loop(model, images, labels, micro_batches):
    total = 0.0
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        model.zero_grad()
        output = model(part)
        loss = F.cross_entropy(output, target.to(output.device))
        loss = loss * len(part) / len(images)
        loss.backward()
        total += loss.item()
    return total


@ANSWERS.wrong(STEP, "wrong", "`micro_batches` times too large")
def only_the_device(model, images, labels, micro_batches):
    one = lambda rows, of, n: 1  # noqa: E731
    return step(model, images, labels, micro_batches, one, lambda total, n: total / n)


@ANSWERS.wrong(
    STEP,
    "wrong",
    "the mean of their means is not the mean of all rows",
    did="divided by the number of micro-batches",
)
def mean_of_means(model, images, labels, micro_batches):
    return step(model, images, labels, micro_batches, lambda rows, of, n: 1 / n)


@ANSWERS.wrong(STEP, "wrong", "is it divided once more at the end?")
def loss_divided_once_more(model, images, labels, micro_batches):
    def right(rows, of, n):
        return rows / of

    return step(model, images, labels, micro_batches, right, lambda t, n: t / n)


@ANSWERS.wrong(STEP, "wrong", "The gradients are right. But the loss that is returned")
def loss_multiplied(model, images, labels, micro_batches):
    def right(rows, of, n):
        return rows / of

    return step(model, images, labels, micro_batches, right, lambda t, n: t * n)


@ANSWERS.wrong(STEP, "wrong", "`cross_entropy` has divided by these rows already.")
def divided_by_all_rows(model, images, labels, micro_batches):
    return step(model, images, labels, micro_batches, lambda rows, of, n: 1 / of)


@ANSWERS.wrong(STEP, "wrong", "The gradients are divided twice.")
def divided_twice(model, images, labels, micro_batches):
    return step(model, images, labels, micro_batches, lambda r, of, n: r / of / n)


@ANSWERS.wrong(STEP, "wrong", "must be divided by the rows of the whole batch.")
def rows_over_micro_batches(model, images, labels, micro_batches):
    return step(model, images, labels, micro_batches, lambda rows, of, n: rows / n)


@ANSWERS.wrong(STEP, "wrong", "These are the gradients of a sum over the rows.")
def a_sum(model, images, labels, micro_batches):
    return step(
        model, images, labels, micro_batches, lambda r, of, n: r, lambda t, n: t / 8
    )


@ANSWERS.wrong(STEP, "wrong", "Now the whole batch goes through at once.")
def no_micro_batches(model, images, labels, micro_batches):
    return step(model, images, labels, 1, lambda rows, of, n: 1)


@ANSWERS.wrong(STEP, "wrong", "every micro-batch needs its `backward()`")
def cleared_at_the_end(model, images, labels, micro_batches):
    loss = step(model, images, labels, micro_batches, lambda rows, of, n: rows / of)
    model.zero_grad()
    return loss


@ANSWERS.wrong(STEP, "wrong", "Each row of the batch must go through the model once.")
def without_the_last(model, images, labels, micro_batches):
    rows = len(images) // micro_batches
    for k in range(micro_batches - 1 or 1):
        part = slice(k * rows, (k + 1) * rows)
        output = model(images[part])
        loss = F.cross_entropy(output, labels[part].to(output.device))
        loss.backward()
    return loss.item()


@ANSWERS.wrong(STEP, "wrong", "a Python number is wanted")
def a_loss_with_its_graph(model, images, labels, micro_batches):
    total = 0.0
    parts, targets = images.chunk(micro_batches), labels.chunk(micro_batches)
    for part, target in zip(parts, targets, strict=True):
        output = model(part)
        loss = F.cross_entropy(output, target.to(output.device))
        loss = loss * len(part) / len(images)
        loss.backward()
        total = total + loss
    return total


@ANSWERS.wrong(STEP, "wrong", "a Python number is wanted")
def a_loss_of_numpy(model, images, labels, micro_batches):
    return np.float32(weighted_by_rows(model, images, labels, micro_batches))


@ANSWERS.right(STEP)
def weighted_by_rows(model, images, labels, micro_batches):
    return step(model, images, labels, micro_batches, lambda rows, of, n: rows / of)


@ANSWERS.right(STEP)
def with_activations_computed_again(model, images, labels, micro_batches):
    def recomputing(part):
        return checkpoint(model, part, use_reentrant=False)

    def share(rows, of, n):
        return rows / of

    return step(recomputing, images, labels, micro_batches, share)


@ANSWERS.right(STEP)
def sums_divided_by_all_rows(model, images, labels, micro_batches):
    total = torch.zeros(())
    for part, target in zip(
        images.chunk(micro_batches), labels.chunk(micro_batches), strict=True
    ):
        output = model(part)
        loss = F.cross_entropy(output, target.to("cuda:1"), reduction="sum")
        loss /= len(labels)
        loss.backward()
        total += loss.detach().cpu()
    return total.item()


@ANSWERS.right(STEP)
def added_up_by_hand(model, images, labels, micro_batches):
    """As `backward()`, but the sum of the gradients is in a list of its own."""
    parameters, sums, total = list(model.parameters()), None, 0.0
    for part, target in zip(
        images.chunk(micro_batches), labels.chunk(micro_batches), strict=True
    ):
        output = model(part)
        loss = F.cross_entropy(output, target.to(output.device), reduction="sum")
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
    total = 0.0
    for part, target in zip(
        images.tensor_split(micro_batches),
        labels.tensor_split(micro_batches),
        strict=True,
    ):
        loss = F.cross_entropy(model(part).cpu(), target, reduction="sum")
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        parameter.grad /= len(images)
    return total / len(images)


# ------------------------------------------------------------------------ 02.balance

BALANCE = "02.balance"


@ANSWERS.wrong(BALANCE, "not attempted", "Write your code in the cell above")
def balance_stub(seconds, nbytes, devices, capacity):
    raise NotImplementedError("Write your code here.")


def in_equal_numbers(layers, devices):
    return [(layers + k) // devices for k in range(devices)]


@ANSWERS.wrong(BALANCE, "wrong", "Each device has as many layers as the others")
def as_many_layers(seconds, nbytes, devices, capacity):
    return in_equal_numbers(len(seconds), devices)


def all_cuts(layers, devices):
    for places in itertools.combinations(range(1, layers), devices - 1):
        ends = [0, *places, layers]
        yield [b - a for a, b in itertools.pairwise(ends)]


@ANSWERS.wrong(BALANCE, "wrong", "A stage does not fit")
def without_the_memory(seconds, nbytes, devices, capacity):
    return by_a_limit(seconds, [0] * len(seconds), devices, capacity)


@ANSWERS.wrong(BALANCE, "wrong", "It fits, but another cut is more than 5 % faster.")
def by_the_memory(seconds, nbytes, devices, capacity):
    return by_a_limit(nbytes, nbytes, devices, capacity)


@ANSWERS.wrong(
    BALANCE,
    "wrong",
    "It fits, but another cut is more than 5 % faster.",
    did="filled stages up to the average",
)
def up_to_the_average(seconds, nbytes, devices, capacity):
    sizes, filled, held = [0], 0, 0
    for k, (time, size) in enumerate(zip(seconds, nbytes, strict=True)):
        left = len(seconds) - k
        full = filled + time > sum(seconds) / devices or held + size > capacity
        if (
            sizes[-1]
            and len(sizes) < devices
            and (full or left == devices - len(sizes))
        ):
            sizes, filled, held = [*sizes, 0], 0, 0
        sizes[-1] += 1
        filled, held = filled + time, held + size
    return sizes


def with_the_least(combine):
    """Our recursion, with another aim than the least slowest stage."""

    def balance(seconds, nbytes, devices, capacity):
        mean = sum(seconds) / devices

        @functools.cache
        def best(start, left):
            if left == 0:
                return (math.inf if seconds[start:] else 0), ()
            cuts = [(math.inf, ())]
            for stop in range(start + 1, len(seconds) + 1):
                if sum(nbytes[start:stop]) <= capacity:
                    rest, sizes = best(stop, left - 1)
                    cost = combine(rest, sum(seconds[start:stop]), mean)
                    cuts.append((cost, (stop - start, *sizes)))
            return min(cuts)

        return list(best(0, devices)[1])

    return balance


for combine in (
    lambda rest, stage, mean: rest + stage**2,
    lambda rest, stage, mean: rest + stage**3,
    lambda rest, stage, mean: max(rest, abs(stage - mean)),
):
    ANSWERS.wrong(BALANCE, "wrong", "Only the slowest stage counts")(
        with_the_least(combine)
    )


@ANSWERS.wrong(BALANCE, "wrong", "Are these the places where you cut?")
def the_places(seconds, nbytes, devices, capacity):
    sizes = by_a_limit(seconds, nbytes, devices, capacity)
    return list(itertools.accumulate(sizes))[:-1]


@ANSWERS.wrong(BALANCE, "wrong", "Return one number for each device")
def the_end_of_the_row(seconds, nbytes, devices, capacity):
    return [len(seconds)] * (devices - 1)  # behind it nothing can be cut


def cut_below(seconds, nbytes, devices, capacity):
    """The best cut whose stages all have less than `capacity` bytes, or None."""

    @functools.cache
    def best(start, left):
        if left == 0:
            return (0, []) if start == len(seconds) else None
        found = []
        for end in range(start + 1, len(seconds) + 1):
            rest = best(end, left - 1)
            if rest and sum(nbytes[start:end]) < capacity:
                slowest = max(sum(seconds[start:end]), rest[0])
                found.append((slowest, [end - start, *rest[1]]))
        return min(found) if found else None

    return best(0, devices)


@ANSWERS.wrong(BALANCE, "crashed", "A stage may hold exactly `capacity` bytes")
def finds_none(seconds, nbytes, devices, capacity):
    return cut_below(seconds, nbytes, devices, capacity)[1]


@ANSWERS.wrong(BALANCE, "crashed", "A stage may hold exactly `capacity` bytes")
def least_of_none(seconds, nbytes, devices, capacity):
    found = cut_below(seconds, nbytes, devices, capacity)
    return min([found] if found else [])[1]


@ANSWERS.wrong(BALANCE, "wrong", "A stage may hold exactly `capacity` bytes")
def must_be_below_the_capacity(seconds, nbytes, devices, capacity):
    return by_recursion(seconds, nbytes, devices, capacity - 1)


@ANSWERS.wrong(BALANCE, "wrong", "Return one number for each device")
def one_too_many(seconds, nbytes, devices, capacity):
    return [*by_a_limit(seconds, nbytes, devices, capacity), 0]


@ANSWERS.wrong(BALANCE, "wrong", "did you forget `return`?")
def returns_nothing(seconds, nbytes, devices, capacity):
    by_a_limit(seconds, nbytes, devices, capacity)


@ANSWERS.wrong(BALANCE, "wrong", "Each device must get at least one layer.")
def all_on_the_first(seconds, nbytes, devices, capacity):
    return [len(seconds)] + [0] * (devices - 1)


@ANSWERS.wrong(BALANCE, "wrong", "the numbers must add up to the number of layers")
def one_layer_each(seconds, nbytes, devices, capacity):
    return [1] * devices


@ANSWERS.wrong(BALANCE, "wrong", "A stage does not fit")
def without_the_memory_in_an_array(seconds, nbytes, devices, capacity):
    return np.array(without_the_memory(seconds, nbytes, devices, capacity))


@ANSWERS.wrong(BALANCE, "wrong", "That is a dictionary.")
def as_a_dict(seconds, nbytes, devices, capacity):
    return dict(enumerate(by_a_limit(seconds, nbytes, devices, capacity)))


@ANSWERS.wrong(BALANCE, "wrong", "There are fewer numbers than devices.")
def as_few_as_fit(seconds, nbytes, devices, capacity):
    return by_a_limit(seconds, nbytes, devices - 1 or 1, 2 * capacity)


@ANSWERS.wrong(BALANCE, "wrong", "nothing can be counted or indexed with one")
def in_an_array_of_floats(seconds, nbytes, devices, capacity):
    return np.array(by_a_limit(seconds, nbytes, devices, capacity), dtype=float)


@ANSWERS.wrong(BALANCE, "wrong", "nothing can be counted or indexed with one")
def with_halves(seconds, nbytes, devices, capacity):
    return [len(seconds) / devices + 0.5] * devices


@ANSWERS.wrong(BALANCE, "too slow", "A recursion must keep its results")
def by_recursion_without_a_cache(seconds, nbytes, devices, capacity):
    def best(start, left):
        if left == 0:
            return (math.inf if seconds[start:] else 0), ()
        cuts = [(math.inf, ())]
        for stop in range(start + 1, len(seconds) + 1):
            if sum(nbytes[start:stop]) <= capacity:
                slowest, sizes = best(stop, left - 1)
                slowest = max(slowest, sum(seconds[start:stop]))
                cuts.append((slowest, (stop - start, *sizes)))
        return min(cuts)

    return list(best(0, devices)[1])


@ANSWERS.wrong(BALANCE, "too slow", "Is there a loop that never ends?")
def never_ends(seconds, nbytes, devices, capacity):
    while True:
        pass


@ANSWERS.wrong(BALANCE, "too slow", "Does it try all cuts?")
def by_trying_all_cuts(seconds, nbytes, devices, capacity):
    cuts = all_cuts(len(seconds), devices)
    good = (cut for cut in cuts if lesson.fits(cut, nbytes, capacity))
    return min(good, key=functools.partial(lesson.slowest, seconds))


@ANSWERS.right(BALANCE)
def by_a_limit(seconds, nbytes, devices, capacity):
    """Fill up to a limit; search for the least that is enough."""

    def cut(limit):
        sizes, time, held = [], math.inf, 0
        for k, (one, size) in enumerate(zip(seconds, nbytes, strict=True)):
            needed = devices - len(sizes)  # stages that still need a layer
            if (
                time + one > limit
                or held + size > capacity
                or len(seconds) - k <= needed
            ):
                sizes, time, held = [*sizes, 0], 0, 0
            sizes[-1] += 1
            time, held = time + one, held + size
        return sizes if len(sizes) == devices else None

    stages = {
        sum(seconds[a:b]) for a, b in itertools.combinations(range(len(seconds) + 1), 2)
    }
    limits = sorted(limit for limit in stages if limit >= max(seconds))
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(limits[middle]) else (middle + 1, high)
    return cut(limits[low])


@ANSWERS.wrong(BALANCE, "wrong", "nothing can be counted or indexed with one")
def as_floats(seconds, nbytes, devices, capacity):
    return [float(size) for size in by_a_limit(seconds, nbytes, devices, capacity)]


@ANSWERS.right(BALANCE)
def as_an_array(seconds, nbytes, devices, capacity):
    return np.array(by_a_limit(seconds, nbytes, devices, capacity))


@ANSWERS.right(BALANCE)
def by_recursion(seconds, nbytes, devices, capacity):
    @functools.cache
    def best(start, left):
        if left == 0:
            return (math.inf if seconds[start:] else 0), ()
        cuts = [(math.inf, ())]
        for stop in range(start + 1, len(seconds) + 1):
            if sum(nbytes[start:stop]) <= capacity:
                slowest, sizes = best(stop, left - 1)
                slowest = max(slowest, sum(seconds[start:stop]))
                cuts.append((slowest, (stop - start, *sizes)))
        return min(cuts)

    return torch.tensor(best(0, devices)[1])


@ANSWERS.right(BALANCE)
def within_five_percent(seconds, nbytes, devices, capacity):
    """Not the best cut, but the last one that is still good enough."""
    best = lesson.best_cut(seconds, nbytes, devices, capacity)
    if math.comb(len(seconds) - 1, devices - 1) > 5000:
        return by_a_limit(seconds, nbytes, devices, capacity)
    good = [
        cut
        for cut in all_cuts(len(seconds), devices)
        if lesson.fits(cut, nbytes, capacity)
        and lesson.slowest(seconds, cut) <= 1.05 * best
    ]
    return good[-1]


# ---------------------------------------------------------- 02.predict_micro_batches

for value, status, says in (
    (..., "not attempted", "Set the answer in the cell above"),
    (30, "wrong", "Asked for is a tenth of the whole time"),
    (26, "wrong", "3 of 29 parts"),
    (28, "wrong", "28 are enough, but fewer are enough"),
    (36, "wrong", "You counted 4 idle parts. The last GPU waits"),
    (40, "wrong", "divided by the work alone"),
    (9, "wrong", "3 idle parts of 12"),
    (10, "wrong", "3 of 13 parts"),
    (16, "wrong", "That is too few"),
    (64, "wrong", "That is enough, but fewer are enough, too."),
    ("27", "wrong", "That is text; a number was expected."),
):
    ANSWERS.wrong("02.predict_micro_batches", status, says)(value)

for value in (27, 27.0, torch.tensor(27)):
    ANSWERS.right("02.predict_micro_batches")(value)


test_wrong, test_right = ANSWERS.tests()


# ------------------------------------------------------------- on which GPUs it runs


def test_a_check_has_gpus_of_its_own():
    """Those of the notebook, which may be on, are not touched."""
    with virtual_gpus(1, force=True) as gpus:
        kept = torch.ones(3, device="cuda:0")
        before = gpus.memory().now
        assert run_check(SPLIT, Thirds).passed
        assert run_check(MICRO, in_order).passed
        assert run_check(STEP, weighted_by_rows).passed
        assert gpus.memory().now == before
        assert not gpus.transfers
        assert str(kept.device) == "cuda:0"


# ------------------------------------------------------------------- the tasks' cases


def cases(name):
    return find_task(name).cases


@pytest.mark.parametrize("case", cases(BALANCE), ids=str)
def test_the_best_cut_is_the_best_of_all(case):
    """Where all cuts can be tried. And every task has a cut that fits."""
    seconds, nbytes, devices, capacity = case
    best = lesson.best_cut(*case)
    assert math.isfinite(best)
    if math.comb(len(seconds) - 1, devices - 1) > 20_000:
        return
    fitting = [
        cut
        for cut in all_cuts(len(seconds), devices)
        if lesson.fits(cut, nbytes, capacity)
    ]
    tried = min(lesson.slowest(seconds, cut) for cut in fitting)
    assert best == pytest.approx(tried)


def test_the_examples_in_the_stubs_are_right():
    assert find_task(BUBBLE).expect(2, 3) == (0.25, 1 / 3)
    good = find_task(BALANCE).expect([1, 1, 1, 3], [1] * 4, 2, 4)
    assert good.test([3, 1])
    assert not good.test([2, 2])


def test_the_predicted_number_is_the_least_that_is_enough():
    shares = {m: costs.bubble_of_total(4, m) for m in range(1, 100)}
    least = min(m for m, share in shares.items() if share <= 0.1)
    assert find_task("02.predict_micro_batches").expect() == least
