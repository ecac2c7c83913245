"""Lesson 02, Model parallel: the tasks of its exercise."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from course_utils.checks.mistakes import (
    is_rounded,
    is_wrong,
    right_but,
    says,
    wrong_in,
)
from course_utils.checks.task import Mistake, PythonNumber, Such, Task
from course_utils.notebook.compare import NO_INDEX, Strange
from course_utils.tasks.devices import at_the_same_time, copies, on_gpus

# ------------------------------------------------------------------- models to split


def a_layer(inputs: int, outputs: int, normalized: bool = False) -> nn.Module:
    """A layer with parameters of its own; `normalized`: and with buffers."""
    if not normalized:
        return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())
    # BatchNorm takes away the mean, so a bias before it would have no gradient.
    linear = nn.Linear(inputs, outputs, bias=False)
    return nn.Sequential(linear, nn.BatchNorm1d(outputs), nn.Tanh())


def a_row_of_layers(number: int, seed: int = 0) -> nn.Sequential:
    """That many layers, from 6 numbers a row to 4; always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = [6, *(8 + k for k in range(number - 1)), 4]
        return nn.Sequential(
            *(a_layer(widths[k], widths[k + 1], k == 1) for k in range(number))
        )


def a_row_to_split(number: int) -> nn.Sequential:
    """From four layers on, the third one has no parameters."""
    if number == 3:
        return a_row_of_layers(3)
    layers = list(a_row_of_layers(number - 1))
    return nn.Sequential(*layers[:2], nn.Tanh(), *layers[2:])


def a_batch(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=generator)


def joined(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | str:
    """All gradients in one row of numbers; or in words, where some are missing."""
    found = list(gradients)
    missing = sum(one is None for one in found)
    if missing:
        return f"none for {missing} of {len(found)} parameters"
    return torch.cat([one.cpu().flatten() for one in found])


def gradients_of(model: nn.Module) -> torch.Tensor | str:
    return joined(p.grad for p in model.parameters())


def expected_run(layers: nn.Sequential, batch: torch.Tensor) -> dict[str, Any]:
    """The output and the gradients of the plain model on the CPU."""
    output = layers(batch)
    output.square().mean().backward()
    return {"output": output.detach(), "gradients": gradients_of(layers)}


def same_device(attempt: Any) -> bool:
    """Did PyTorch find tensors on different devices?"""
    return "on the same device" in attempt.message


def layer_on_the_cpu(attempt: Any) -> bool:
    """Did a tensor on a GPU meet a linear layer on the CPU?

    With a bias PyTorch names the input, mat1; without one it names the weight, mat2.
    """
    error = attempt.message
    by_input = "mat1 is on cuda" in error and "other tensors on cpu" in error
    return by_input or "mat2 is on cpu" in error


def on_the_cpu(attempt: Any) -> bool:
    """Did a tensor on the CPU meet a linear layer, or a BatchNorm, on a GPU?"""
    error = attempt.message
    return "cuda" in error and ("mat1 is on cpu" in error or "input is on cpu" in error)


A_NEW_TENSOR = (
    "(`x.to(device)` leaves `x` where it is and returns a new tensor: "
    "`x = x.to(device)`.)"
)
FORGOT_RETURN = Mistake(
    when=lambda attempt: attempt.got["output"] is None,
    says="It returned None: did you forget `return`?",
)
NO_TENSOR = Mistake(
    when=lambda attempt: not isinstance(attempt.got["output"], torch.Tensor),
    says="The output must be one tensor.",
)
FEWER_PIECES = Mistake(
    when=lambda attempt: attempt.error == "IndexError" and has_fewer_pieces(attempt),
    says="There are fewer pieces than `micro_batches` says. `chunk(4)` cuts 9 rows "
    "into 3 + 3 + 3: a fourth piece would be empty. Loop over the pieces themselves.",
)


def recomputes() -> bool:
    """Does a backward run this forward again, as activation checkpointing does?"""
    return torch._C._current_autograd_node() is not None


def has_fewer_pieces(attempt: Any) -> bool:
    """Does `chunk` cut this batch into fewer pieces than asked for?"""
    case = attempt.args[0]
    rows, micro_batches = case["rows of the batch"], case["micro_batches"]
    return most_rows(rows, most_rows(rows, micro_batches)) < micro_batches


# -------------------------------------------------------------- 02.split_over_three


@on_gpus(3)
def run_split(answer: Any, gpus: Any, case: dict[str, int]) -> dict[str, Any]:
    """Make the model and train it for one step; tell where everything was."""
    layers, rows = case.values()
    given = a_row_to_split(layers)
    ran_on: dict[int, str] = {}  # layers without parameters: nothing else tells
    for k, layer in enumerate(given):
        if not list(layer.parameters()):
            layer.register_forward_hook(
                lambda module, args, output, k=k: ran_on.update({k: str(output.device)})
            )
    names = {name: parameter.clone() for name, parameter in given.named_parameters()}
    model = answer(given)
    held = list(model.parameters())
    found = {
        name: next(
            (p for p in held if p.shape == was.shape and torch.equal(p.cpu(), was)),
            None,
        )
        for name, was in names.items()
    }
    places = {
        int(name.split(".")[0]): "nowhere" if p is None else str(p.device)
        for name, p in found.items()
        if name.endswith(".0.weight")
    }
    brought = [
        sum(copy.bytes for copy in gpus.transfers if copy.destination == name)
        for name in THREE
    ]
    own = [
        sum(x.nbytes for x in (*held, *model.buffers()) if str(x.device) == name)
        for name in THREE
    ]
    gpus.clear()
    output = model(a_batch(rows))
    if not isinstance(output, torch.Tensor):
        return {"output": output}
    sent = copies(gpus)
    output.square().mean().backward()
    places |= ran_on
    return {
        "GPU of each layer": [places[k] for k in sorted(places)],
        "bytes that other layers took": [
            max(0, all_of_it - its) for all_of_it, its in zip(brought, own, strict=True)
        ],
        "copies": sent,
        "GPU of the output": str(output.device),
        "output": output,
        "gradients": joined(None if p is None else p.grad for p in found.values()),
        "output for a second batch": model(a_batch(rows + 1)),
    }


def split_case(layers: int, rows: int) -> tuple[dict[str, int]]:
    return ({"number of layers": layers, "rows of the batch": rows},)


THREE = ["cuda:0", "cuda:1", "cuda:2"]


def is_in_order(places: list[str]) -> bool:
    """Neighbours stay together, and each of the three GPUs has at least one layer."""
    return places == sorted(places) and sorted(set(places)) == THREE


def is_in_other_order(places: list[str]) -> bool:
    """Do neighbours stay together on the three GPUs, but in another order of them?"""
    row = [place for place, _ in groupby(places)]
    return row != THREE and sorted(row) == THREE


def expect_split(case: dict[str, int]) -> dict[str, Any]:
    """What the model must do, whatever cut the learner has chosen."""
    layers, rows = case.values()
    plain_model = a_row_to_split(layers)
    return {
        "GPU of each layer": Such(
            "first some layers on cuda:0, then some on cuda:1, then some on cuda:2",
            is_in_order,
        ),
        "bytes that other layers took": [0, 0, 0],
        "copies": ["cpu -> cuda:0", "cuda:0 -> cuda:1", "cuda:1 -> cuda:2"],
        "GPU of the output": "cuda:2",
        **expected_run(plain_model, a_batch(rows)),
        "output for a second batch": plain_model(a_batch(rows + 1)).detach(),
    }


SPLIT_OVER_THREE = Task(
    id="02.split_over_three",
    title="Split over three GPUs",
    stars=2,
    cases=tuple(map(split_case, (3, 4, 7), (4, 5, 2))),
    expect=expect_split,
    run=run_split,
    keeps_inputs=False,
    mistakes=(
        FORGOT_RETURN,
        NO_TENSOR,
        Mistake(
            when=lambda attempt: (
                "nowhere" in attempt.got["GPU of each layer"]
                and is_wrong("output")(attempt)
            ),
            says="Some layers are in no part: they are left out. There may be more "
            "than three, and their number need not be divisible by three. The last "
            "part takes all that are left: `layers[2 * third :]`.",
        ),
        Mistake(
            when=lambda attempt: "nowhere" in attempt.got["GPU of each layer"],
            says="The output is right, but `model.parameters()` does not find all "
            "layers, so no optimizer would train them. A plain list hides modules from "
            "PyTorch: keep the parts as attributes (`self.first = ...`), in an "
            "nn.ModuleList, or leave them in `layers` and keep that.",
        ),
        Mistake(
            when=lambda attempt: "cpu" in attempt.got["GPU of each layer"],
            says="Some layers are still on the CPU when the model is made. Moving a "
            'module is `module.to("cuda:0")`: do it once, in `__init__`.',
        ),
        Mistake(
            when=lambda attempt: len(set(attempt.got["GPU of each layer"])) < 3,
            says="Not every GPU has a layer. There are at least three layers: each GPU "
            "gets one or more, whatever their number is.",
        ),
        Mistake(
            when=lambda attempt: is_in_other_order(attempt.got["GPU of each layer"]),
            says="The layers are on the wrong GPUs. The first ones belong on cuda:0, "
            "the next ones on cuda:1, the last ones on cuda:2.",
        ),
        Mistake(
            when=lambda attempt: not is_in_order(attempt.got["GPU of each layer"]),
            says="Neighbours should stay together: each time the next layer is on "
            "another GPU, the activations must be copied. With one cut between two "
            "GPUs there are two copies.",
        ),
        Mistake(
            when=lambda attempt: any(attempt.got["bytes that other layers took"]),
            says="A GPU was given layers that are not its own: the whole model on one "
            "GPU first, or a copy of it on each. A model that is split because no GPU "
            "has room for it could not even be made. Cut first, then move each part "
            "straight to its GPU.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["GPU of the output"] != "cuda:2",
            says="The output should stay where it was computed, on cuda:2. The loss is "
            "computed there.",
        ),
        Mistake(
            when=lambda attempt: (
                "cpu" in "".join(attempt.got["copies"][1:])
                and is_in_order(attempt.got["GPU of each layer"])
            ),
            says='The activations take a detour over the CPU. `x.to("cuda:1")` goes '
            "from GPU to GPU.",
        ),
        Mistake(
            when=lambda attempt: len(attempt.got["copies"]) > 3,
            says="There are more copies than needed: one of the input to cuda:0, then "
            "one for each cut.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["copies"]) < 3
                and not is_wrong("output")(attempt)
                and is_in_order(attempt.got["GPU of each layer"])
            ),
            says="The output is right, but the activations did not go from GPU to GPU. "
            "Did layers move to them in `forward`? Layers move once, in `__init__`.",
        ),
        Mistake(
            when=lambda attempt: isinstance(attempt.got["gradients"], str),
            says="Some parameters got no gradient. Has a tensor been detached on its "
            "way, or a layer been left out?",
        ),
        Mistake(
            when=lambda attempt: "does not require grad" in attempt.message,
            says="The output has no graph, so nothing can be trained. `.to()` keeps "
            "the graph; `.detach()`, `.data` and `torch.no_grad()` cut it.",
        ),
        Mistake(
            when=layer_on_the_cpu,
            says="The tensor is on a GPU, but the layer is on the CPU. Move each part "
            'to its GPU in `__init__`: `part.to("cuda:0")`.',
        ),
        Mistake(
            when=lambda attempt: same_device(attempt) and on_the_cpu(attempt),
            says="A tensor is still on the CPU, and the layer that it met is on a GPU. "
            "The batch comes from the CPU: move it before the first part. "
            f"{A_NEW_TENSOR}",
        ),
        Mistake(
            when=lambda attempt: same_device(attempt) and "cpu" not in attempt.message,
            says="A tensor met a layer on another GPU. Move the tensor to a part's GPU "
            f"before that part. {A_NEW_TENSOR} Or is a layer in two parts? Then it is "
            "on the GPU to which it was moved last.",
        ),
        Mistake(
            when=same_device,
            says="A tensor met a layer on another GPU. Move the tensor to a part's GPU "
            "before that part: the input, too, which may come from the CPU. "
            f"{A_NEW_TENSOR}",
        ),
        Mistake(
            when=says("shapes cannot be multiplied"),
            says="A layer got rows of another width than it takes. Has each layer "
            "before it run once, in its order? None may be left out, and none may be "
            "in two parts.",
        ),
        Mistake(
            when=says("more than 1 value per channel"),
            says="A BatchNorm got a single row. Was the batch cut? Here the model is "
            "cut: every layer gets all rows.",
        ),
        Mistake(
            when=lambda attempt: "invalid device ordinal" in attempt.message,
            says="There are three GPUs: cuda:0, cuda:1 and cuda:2. Is there one part "
            "too many?",
        ),
        Mistake(
            when=says("'NoneType' object has no attribute 'parameters'"),
            says="The call made no model, it returned None: did you forget `return`?",
        ),
        Mistake(
            when=lambda attempt: attempt.error == "StopIteration",
            says="Did you ask a layer for its parameters? Some layers have none, such "
            "as nn.Tanh(): they cannot tell their GPU. Remember where you cut.",
        ),
        Mistake(
            when=right_but("output for a second batch"),
            says="The first batch was right, the next one was not. `forward` is called "
            "for each batch: it must compute anew, and leave the model as it was.",
        ),
        Mistake(
            when=lambda attempt: "has no attribute 'parameters'" in attempt.message,
            says="The class must be an nn.Module: `class ThreeGPUs(nn.Module)`.",
        ),
        Mistake(
            when=lambda attempt: "before Module.__init__()" in attempt.message,
            says="`super().__init__()` comes first in the __init__ of a module.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["output"].shape != attempt.expected["output"].shape
            ),
            says="Not all layers have run, or not in their order.",
        ),
    ),
    otherwise="The output must be what `layers(x)` gives on the CPU: every layer once, "
    "in its order, and in training mode, as it came.",
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

# ------------------------------------------------------------------ 02.micro_batches


def most_rows(rows: int, micro_batches: int) -> int:
    return -(-rows // micro_batches)


def stages_of_two_layers(number: int) -> list[nn.Sequential]:
    layers = a_row_of_layers(2 * number)
    # BatchNorm would see another batch: the results could not be equal.
    del layers[1][1]
    return [layers[2 * k : 2 * k + 2] for k in range(number)]


LISTS_KEPT = "the lists are as before"


@on_gpus(3)
def run_micro_batches(answer: Any, gpus: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Run the pipeline, and write down which stage got how many rows."""
    devices, rows, micro_batches = case.values()
    parts = stages_of_two_layers(len(devices))
    seen: list[list[int]] = [[] for _ in parts]
    for k, (part, device) in enumerate(zip(parts, devices, strict=True)):
        part.to(device)
        part.register_forward_pre_hook(
            lambda module, args, k=k: (
                None if recomputes() else seen[k].append(len(args[0]))
            )
        )
    batch = a_batch(rows).to(devices[0])
    gpus.clear()
    lists = list(parts), list(devices)
    output = answer(*lists, batch, micro_batches)
    if not isinstance(output, torch.Tensor):
        return {"output": output}
    together = all(at_the_same_time(gpus, *pair) for pair in pairwise(devices))
    # A number that Python reads (`.item()`) is no detour. It only makes Python wait.
    over_the_cpu = any(
        "cpu" in (copy.source, copy.destination) and copy.kind != "item"
        for copy in gpus.transfers
        if copy.phase == "forward"
    )
    output.square().mean().backward()
    return {
        "rows of each micro-batch": seen,
        "GPU of the output": str(output.device),
        "output": output,
        "gradients": gradients_of(nn.ModuleList(parts)),
        "GPU of each stage": [str(next(part.parameters()).device) for part in parts],
        "over the CPU": over_the_cpu,
        "GPUs at the same time": together,
        LISTS_KEPT: lists == (parts, devices),
    }


def expect_micro_batches(case: dict[str, Any]) -> dict[str, Any]:
    """As the plain model, but in parts, and with neighbours at work at once."""
    devices, rows, micro_batches = case.values()
    parts = stages_of_two_layers(len(devices))
    most = most_rows(rows, micro_batches)

    def is_cut(seen: list[list[int]]) -> bool:
        return all(
            sum(one) == rows and max(one) <= most and len(one) <= micro_batches
            for one in seen
        )

    number = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    return {
        "rows of each micro-batch": Such(
            f"for each stage at most {number}, of at most {most} rows", is_cut
        ),
        "GPU of the output": devices[-1],
        **expected_run(nn.Sequential(*parts), a_batch(rows)),
        "GPU of each stage": devices,
        "over the CPU": False,
        "GPUs at the same time": micro_batches > 1,
        LISTS_KEPT: True,
    }


def pipeline_case(gpus: str, rows: int, number: int) -> tuple[dict[str, Any]]:
    devices = [f"cuda:{k}" for k in gpus]
    return ({"devices": devices, "rows of the batch": rows, "micro_batches": number},)


MICRO_BATCHES = Task(
    id="02.micro_batches",
    title="In micro-batches",
    stars=2,
    cases=tuple(
        pipeline_case(*numbers)
        for numbers in (
            *(("01", 8, 4), ("012", 12, 3), ("012", 7, 3), ("012", 11, 4)),
            # One stage. Then fewer pieces than asked for: 3 + 3 + 3.
            *(("01", 5, 1), ("1", 3, 3), ("012", 9, 4), ("120", 12, 6)),
        )
    ),
    expect=expect_micro_batches,
    run=run_micro_batches,
    keeps_inputs=False,
    mistakes=(
        FORGOT_RETURN,
        Mistake(
            when=lambda attempt: isinstance(attempt.got["output"], (list, tuple)),
            says="Return one tensor: `torch.cat` puts the micro-batches together.",
        ),
        NO_TENSOR,
        FEWER_PIECES,
        Mistake(
            when=lambda attempt: (
                attempt.args[0]["micro_batches"] > 1
                and attempt.got["rows of each micro-batch"][0]
                == [attempt.args[0]["rows of the batch"]]
            ),
            says="The whole batch went through at once. Cut it along its rows first: "
            "`batch.chunk(micro_batches)`.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0]["micro_batches"] > 1
                and [attempt.args[0]["rows of the batch"]]
                in attempt.got["rows of each micro-batch"]
            ),
            says="The first stage got micro-batches, but a later one got the whole "
            "batch at once. Put nothing together between two stages: each micro-batch "
            "goes through all of them, and `torch.cat` comes last.",
        ),
        Mistake(
            when=lambda attempt: (
                max(attempt.got["rows of each micro-batch"][0])
                == attempt.args[0]["micro_batches"]
                and len(attempt.got["rows of each micro-batch"][0])
                != attempt.args[0]["micro_batches"]
            ),
            says="`micro_batches` became the size of a micro-batch, not their number. "
            "`batch.split(n)` wants the size, `batch.chunk(n)` the number.",
        ),
        Mistake(
            when=lambda attempt: (
                sum(attempt.got["rows of each micro-batch"][0])
                < attempt.args[0]["rows of the batch"]
            ),
            says="Some rows were never computed. The rows need not be divisible by the "
            "number of micro-batches.",
        ),
        Mistake(
            when=lambda attempt: (
                sum(attempt.got["rows of each micro-batch"][-1])
                < attempt.args[0]["rows of the batch"]
            ),
            says="Some micro-batches did not reach the last stage. Were they still "
            "under way when the loop ended?",
        ),
        Mistake(
            when=lambda attempt: (
                min(sum(one) for one in attempt.got["rows of each micro-batch"])
                < attempt.args[0]["rows of the batch"]
                or max(sum(one) for one in attempt.got["rows of each micro-batch"])
                > attempt.args[0]["rows of the batch"]
            ),
            says="Each stage must compute each row once.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["rows of each micro-batch"][0])
                > attempt.args[0]["micro_batches"]
            ),
            says="There are more micro-batches than asked for. The rows of each must "
            "be rounded up: 7 rows in 3 micro-batches are 3 + 3 + 1, and with 7 // 3 "
            "in each they would be four. `batch.chunk(micro_batches)` rounds up.",
        ),
        Mistake(
            when=lambda attempt: (
                max(attempt.got["rows of each micro-batch"][0])
                > most_rows(
                    attempt.args[0]["rows of the batch"],
                    attempt.args[0]["micro_batches"],
                )
            ),
            says="One micro-batch got more rows than it may, such as all the rest of a "
            "division: while a GPU works on that one, the others wait. "
            "`batch.chunk(micro_batches)` cuts evenly.",
        ),
        Mistake(
            when=wrong_in("rows of each micro-batch"),
            says="The first stage got its micro-batches as they should be, but a later "
            "one got other pieces. Put nothing together between two stages: each "
            "micro-batch goes through all of them.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["GPU of the output"]
                != attempt.expected["GPU of the output"]
            ),
            says="The output should stay on the GPU of the last stage.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["output"].shape != attempt.expected["output"].shape
            ),
            says="The output must have one row for each row of the batch: put the "
            "micro-batches together again with `torch.cat(outputs)`.",
        ),
        Mistake(
            when=lambda attempt: has_the_same_rows(
                attempt.got["output"], attempt.expected["output"]
            ),
            says="All rows are there, but in another order than in the batch.",
        ),
        Mistake(
            when=lambda attempt: isinstance(attempt.got["gradients"], str),
            says="Some parameters got no gradient: has a tensor been detached on its "
            "way?",
        ),
        Mistake(
            when=lambda attempt: "does not require grad" in attempt.message,
            says="The output has no graph, so nothing can be trained. Is it what the "
            "last stage returned? Did you write into a tensor that was made before, or "
            "use `.detach()` or `no_grad()`?",
        ),
        Mistake(
            when=right_but("GPU of each stage"),
            says="The result is right, but a stage has moved to the data. Each stage "
            "stays on its GPU: what travels are the activations, `x.to(device)`.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["over the CPU"],
            says="The result is right. But a tensor went over the CPU, and until it is "
            "there the CPU waits and hands out no other work. `x.to(device)` goes from "
            "GPU to GPU.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.expected["GPUs at the same time"]
                and not attempt.got["GPUs at the same time"]
            ),
            says="The result is right, but some stage never computed while the stage "
            "before it did: there nothing was won. A GPU works through its queue in "
            "order. So each stage must get its first micro-batch before the stage "
            "before it gets its last one. And Python must not wait in the loop: "
            "`synchronize()`, `.item()` and `print` of a tensor do. (With a thread for "
            "each stage it is chance who comes first. No threads are needed.)",
        ),
        Mistake(
            when=right_but(LISTS_KEPT),
            says="The result is right, but `stages` or `devices` is not the list that "
            "it was, and the next batch needs it. `pop` takes away: loop over the "
            "list, or work on a copy.",
        ),
        Mistake(
            when=same_device,
            says="A micro-batch met a stage on another GPU. Stage k wants its input on "
            f"`devices[k]`, which need not be cuda:k. {A_NEW_TENSOR}",
        ),
        Mistake(
            when=says("shapes cannot be multiplied"),
            says="A stage got rows of another width than it takes. The batch is cut "
            "along its rows, and each micro-batch goes through all stages, in their "
            "order.",
        ),
        Mistake(
            when=says("second time"),
            says="Was `backward()` called already? Only the forward is asked for. The "
            "caller computes a loss from the outputs of all rows.",
        ),
    ),
    otherwise="Try it with a single micro-batch first: that is the plain model.",
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


def has_the_same_rows(got: Any, want: Any) -> bool:
    """Are the rows right, but in another order?"""
    if got.shape != want.shape or torch.allclose(got, want, atol=1e-5):
        return False
    rows = (sorted(map(tuple, x.tolist())) for x in (got, want))
    one, other = (torch.tensor(x) for x in rows)
    return torch.allclose(one, other, atol=1e-5)


# ------------------------------------------------------------------------- 02.bubble


BUBBLE = Task(
    id="02.bubble",
    title="The bubble, twice",
    stars=1,
    cases=((3, 11), (4, 16), (8, 64), (1, 5), (4, 1), (2, 1), (16, 3), (64, 512)),
    expect=lambda k, m: ((k - 1) / (m + k - 1), (k - 1) / m),
    instead="Each of the two is one division.",
    mistakes=(
        Mistake(
            like=lambda k, m: ((k - 1) / m, (k - 1) / (m + k - 1)),
            says="The two changed places. The whole time is longer than the ideal one, "
            "so the share of it is smaller.",
        ),
        Mistake(
            like=lambda k, m: (k / (m + k), k / m),
            says="A stage is not idle for K micro-batches, but for K - 1: when the "
            "last stage begins, K - 1 micro-batches have been started before it.",
        ),
        Mistake(
            like=lambda k, m: ((k - 1) / (m + k), (k - 1) / m),
            says="The ideal share is right. The whole time is M + K - 1 micro-batches "
            "long: M of work and K - 1 of waiting.",
        ),
        Mistake(
            like=lambda k, m: ((k - 1) / m, (k - 1) / m),
            says="Both are shares of the ideal time. The whole time is M + K - 1 "
            "micro-batches long: the waiting belongs to it.",
        ),
        Mistake(
            like=lambda k, m: ((k - 1) / (m + k - 1), (k - 1) / (m + k - 1)),
            says="Both are shares of the whole time. The ideal time is what a stage "
            "works: M micro-batches.",
        ),
        Mistake(
            like=lambda k, m: (m / (m + k - 1), m / m),
            says="That is the share of the time in which a stage works. Asked for is "
            "the time in which it waits.",
        ),
        Mistake(
            like=lambda k, m: ((m - 1) / (m + k - 1), (m - 1) / k),
            says="Stages and micro-batches changed places. With one stage nobody "
            "waits.",
        ),
        *(
            Mistake(
                like=like,
                says="Parentheses are missing: `/` comes before `+` and `-`. The share "
                "of the whole time is (K - 1) / (M + K - 1), with both of them.",
            )
            for like in (
                lambda k, m: (k - 1 / (m + k - 1), k - 1 / m),
                lambda k, m: (k - 1 / (m + k - 1), (k - 1) / m),
                lambda k, m: (k - 1 / m + k - 1, k - 1 / m),
                lambda k, m: ((k - 1) / m + k - 1, (k - 1) / m),
                lambda k, m: ((k - 1) / (m + k - 1), k - 1 / m),
            )
        ),
        Mistake(
            like=lambda k, m: (100 * (k - 1) / (m + k - 1), 100 * (k - 1) / m),
            says="These are percentages. Return shares: 0.25, not 25.",
        ),
        Mistake(
            like=lambda k, m: ((k - 1) // (m + k - 1), (k - 1) // m),
            says="`//` drops everything after the point. Use `/`.",
        ),
        Mistake(
            like=lambda k, m: ((k - 1) / (k * (m + k - 1)), (k - 1) / (k * m)),
            says="Each stage waits for K - 1 micro-batches, not all of them together.",
        ),
        Mistake(
            like=lambda k, m: ((k - 1) / k, k - 1),
            says="That is so with a single micro-batch. With M of them each stage "
            "works M times as long as it takes for one.",
        ),
        Mistake(
            like=lambda k, m: (2 * (k - 1) / (m + 2 * (k - 1)), 2 * (k - 1) / m),
            says="The waiting is counted twice. A stage that waits long at the "
            "beginning waits less at the end: together K - 1 micro-batches. (The "
            "backward has a bubble, too, but also M micro-batches of work.)",
        ),
        Mistake(
            like=lambda k, m: ((k - 1) / (2 * m + k - 1), (k - 1) / (2 * m)),
            says="The work is counted twice. The backward has work, but also a bubble: "
            "both shares are the same with and without it.",
        ),
        Mistake(
            like=lambda k, m: (k - 1) / (m + k - 1),
            says="That is the share of the whole time. Return both: "
            "`return of_total, of_ideal`.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got) == 2
                and math.isclose(attempt.got[0], attempt.expected[0], rel_tol=1e-5)
            ),
            says="The share of the whole time is right. The ideal time is what a stage "
            "works: M micro-batches.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got) == 2
                and math.isclose(attempt.got[1], attempt.expected[1], rel_tol=1e-5)
            ),
            says="The share of the ideal time is right. The whole time is longer: the "
            "waiting belongs to it.",
        ),
        Mistake(
            when=lambda attempt: attempt.error == "ZeroDivisionError",
            says="There may be one stage, and one micro-batch. There is always "
            "something to divide by: the time in which a stage works.",
        ),
        Mistake(
            when=is_rounded,
            says="They are rounded. Return all digits.",
        ),
        Mistake(
            when=lambda attempt: (
                isinstance(attempt.got, (list, tuple)) and len(attempt.got) == 2
            ),
            says="Draw it for 3 stages and 2 micro-batches, with boxes of the same "
            "width. How many boxes long is the whole picture? How many boxes does each "
            "stage have?",
        ),
    ),
    hints=(
        "Take the time of one micro-batch in one stage as the unit. How many units "
        "does a stage work? How many does it wait?",
        "A stage works for M units. It waits for K - 1: the first one at the end, the "
        "last one at the beginning, the others some of both. Together that is the "
        "whole time.",
        "Two lines:\n  waits = stages - 1\n  return waits / (... + waits), waits / ...",
    ),
)

# ------------------------------------------------------------- 02.spot_the_gradient


def a_split_model() -> nn.Module:
    """Two stages on two GPUs; the input may come from anywhere."""

    class TwoGPUs(nn.Module):
        def __init__(self, layers: nn.Sequential) -> None:
            super().__init__()
            self.first = layers[:2].to("cuda:0")
            self.second = layers[2:].to("cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x.to("cuda:0")).to("cuda:1"))

    layers = a_row_of_layers(4, seed=1)
    del layers[1][1]
    return TwoGPUs(layers)


def labels_of(rows: int) -> torch.Tensor:
    return torch.arange(rows) * 7 % 4


@on_gpus(2)
def run_step(answer: Any, gpus: Any, case: dict[str, int]) -> dict[str, Any]:
    """Run the step; tell the loss, the gradients, and the size of the micro-batches."""
    rows, micro_batches = case.values()
    model = a_split_model()
    before = joined(model.parameters())
    seen: list[int] = []
    modes: list[bool] = []
    left: list[int] = []  # bytes of activations when a micro-batch begins

    def begin(module: nn.Module, args: tuple) -> None:
        if recomputes():
            return
        seen.append(len(args[0]))
        modes.append(module.training)
        left.append(gpus.memory()["cuda:0"].now_by_kind["activations"])

    model.register_forward_pre_hook(begin)
    loss = answer(model, a_batch(rows), labels_of(rows), micro_batches)
    return {
        "rows of each micro-batch": seen,
        # Gradients that are added up by hand look like activations, until the third.
        "activations pile up in memory": any(a < b for a, b in pairwise(left[2:])),
        "gradients": gradients_of(model),
        "loss": loss,
        "all in training mode": all(modes),
        "parameters are the same": torch.equal(joined(model.parameters()), before),
    }


def expect_step(case: dict[str, int]) -> dict[str, Any]:
    """Loss and gradients of the whole batch."""
    rows, micro_batches = case.values()
    layers = a_row_of_layers(4, seed=1)
    del layers[1][1]
    loss = F.cross_entropy(layers(a_batch(rows)), labels_of(rows))
    loss.backward()
    most = most_rows(rows, micro_batches)
    number = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    return {
        "rows of each micro-batch": Such(
            f"at most {number}, of at most {most} rows",
            lambda seen: (
                sum(seen) == rows and max(seen) <= most and len(seen) <= micro_batches
            ),
        ),
        "activations pile up in memory": False,
        "gradients": gradients_of(layers),
        "loss": PythonNumber(loss.item()),
        "all in training mode": True,
        "parameters are the same": True,
    }


def scaled(attempt: Any, factor: float) -> bool:
    """Are all gradients right, but for one and the same factor?"""
    got, want = attempt.got["gradients"], attempt.expected["gradients"]
    return torch.allclose(got, factor * want, rtol=1e-4, atol=1e-7)


def is_of_the_last(attempt: Any) -> bool:
    """Are the gradients those of the last micro-batch, with any factor?"""
    got, seen = attempt.got["gradients"], attempt.got["rows of each micro-batch"]
    layers = a_row_of_layers(4, seed=1)
    del layers[1][1]
    rows, last = attempt.args[0]["rows of the batch"], seen[-1]
    F.cross_entropy(layers(a_batch(rows)[-last:]), labels_of(rows)[-last:]).backward()
    return F.cosine_similarity(got, gradients_of(layers), dim=0).item() > 1 - 1e-4


def step_case(rows: int, micro_batches: int) -> tuple[dict[str, int]]:
    return ({"rows of the batch": rows, "micro_batches": micro_batches},)


SPOT_THE_GRADIENT = Task(
    id="02.spot_the_gradient",
    title="Spot the gradient",
    stars=2,
    cases=tuple(map(step_case, (8, 10, 7, 9, 5, 6), (4, 4, 2, 4, 1, 6))),
    expect=expect_step,
    run=run_step,
    keeps_inputs=False,
    mistakes=(
        Mistake(
            when=lambda attempt: attempt.got["loss"] is None,
            says="It returned None: did you forget `return`?",
        ),
        Mistake(
            when=lambda attempt: same_device(attempt) and "nll_loss" in attempt.message,
            says="A loss needs its two tensors on the same GPU. The model's output is "
            f"where its last stage is. `output.device` says where. {A_NEW_TENSOR}",
        ),
        Mistake(
            when=same_device,
            says="Two tensors that met are on different devices. The lines above say "
            "which. Leave the model where it is: it moves its input from stage to "
            "stage.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["rows of each micro-batch"]) == 1
                and attempt.args[0]["micro_batches"] > 1
            ),
            says="Now the whole batch goes through at once. Keep the micro-batches: "
            "their activations are freed one after the other.",
        ),
        Mistake(
            when=lambda attempt: (
                sum(attempt.got["rows of each micro-batch"])
                != attempt.args[0]["rows of the batch"]
            ),
            says="Each row of the batch must go through the model once.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["rows of each micro-batch"])
                > attempt.args[0]["micro_batches"]
            ),
            says="There are more micro-batches than asked for. The rows of each must "
            "be rounded up: 10 rows in 4 are 3 + 3 + 3 + 1, and with 10 // 4 in each "
            "they would be five. `chunk(micro_batches)` rounds up.",
        ),
        FEWER_PIECES,
        Mistake(
            when=is_wrong("parameters are the same"),
            says="The parameters have changed. The optimizer's step comes later: this "
            "function leaves gradients only.",
        ),
        Mistake(
            when=lambda attempt: isinstance(attempt.got["gradients"], str),
            says="There are no gradients: every micro-batch needs its `backward()`, "
            "and the gradients must still be there at the end.",
        ),
        Mistake(
            when=wrong_in("activations pile up"),
            says="With each micro-batch more activations are in memory: at the end as "
            "many as of one large batch. Call `backward()` inside the loop, for each "
            "micro-batch. It frees them, without `retain_graph=True`.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0]["micro_batches"] > 1
                and scaled(attempt, attempt.args[0]["micro_batches"])
            ),
            says="The gradients are `micro_batches` times too large. Each `backward()` "
            "adds the gradient of a mean, so together they add up to many means. The "
            "loss that is returned hides it: it is divided.",
        ),
        Mistake(
            when=lambda attempt: scaled(attempt, 1 / attempt.args[0]["micro_batches"]),
            says="The gradients are divided twice.",
        ),
        Mistake(
            when=lambda attempt: (
                len(set(rows := attempt.got["rows of each micro-batch"])) == 1
                and rows[0] > 1
                and scaled(attempt, 1 / rows[0])
            ),
            says="The gradients are too small: by the number of rows in a micro-batch. "
            "`cross_entropy` has divided by these rows already. Multiply by them "
            "before you divide by the rows of the whole batch.",
        ),
        Mistake(
            when=lambda attempt: (
                len(set(rows := attempt.got["rows of each micro-batch"])) == 1
                and 1 < rows[0] < attempt.args[0]["rows of the batch"]
                and scaled(attempt, rows[0])
            ),
            says="The gradients are too large: by the number of rows in a micro-batch. "
            "What was multiplied by these rows must be divided by the rows of the "
            "whole batch.",
        ),
        Mistake(
            when=lambda attempt: scaled(attempt, attempt.args[0]["rows of the batch"]),
            says="These are the gradients of a sum over the rows. The loss is their "
            "mean: divide by the rows of the whole batch.",
        ),
        Mistake(
            when=right_but("all in training mode"),
            says="The model was in eval mode: that is for tests. In a training step "
            "layers such as dropout must do their work.",
        ),
        Mistake(
            when=lambda attempt: (
                scaled(attempt, 1.0)
                and math.isclose(attempt.got["loss"], attempt.expected["loss"])
            ),
            says="The gradients are right, and so is the loss. But it is a tensor, or "
            "a number of NumPy's, and a Python number is wanted. A tensor from "
            "`cross_entropy` holds on to its graph, and so to activations, as long as "
            "somebody keeps it: add up `loss.detach()`, and return `total.item()`.",
        ),
        Mistake(
            when=lambda attempt: (
                scaled(attempt, 1.0)
                and math.isclose(
                    attempt.got["loss"] * attempt.args[0]["micro_batches"],
                    attempt.expected["loss"],
                    rel_tol=1e-4,
                )
            ),
            says="The gradients are right. But the loss that is returned is "
            "`micro_batches` times too small: is it divided once more at the end?",
        ),
        Mistake(
            when=lambda attempt: scaled(attempt, 1.0),
            says="The gradients are right. But the loss that is returned is not the "
            "mean over all rows of the batch.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.args[0]["rows of the batch"] % attempt.args[0]["micro_batches"]
                > 0
                and not scaled(attempt, 1.0)
            ),
            says="It is right where all micro-batches have the same number of rows. "
            "Here the last one is smaller, and the mean of their means is not the mean "
            "of all rows. Each micro-batch counts by its rows.",
        ),
        Mistake(
            when=lambda attempt: is_of_the_last(attempt),
            says="Only the gradient of the last micro-batch is left: is something set "
            "to zero inside the loop?",
        ),
        Mistake(
            when=lambda attempt: "second time" in attempt.message,
            says="A graph was used twice: each micro-batch has a loss of its own.",
        ),
    ),
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

# ------------------------------------------------------------------------ 02.balance

WITHIN = 1.05  # of the best


def whole(sizes: Any) -> list[int]:
    """The sizes as a list of int, from any row of whole numbers.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(sizes, Strange):
        sizes = sizes.array
    if isinstance(sizes, dict):
        raise TypeError("a dict is no row of sizes")
    given = sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
    return [operator.index(size) for size in given]


def has_floats(sizes: Any) -> bool:
    """Is it a row of numbers with floats among them, as many as they may be?"""
    if isinstance(sizes, Strange):
        sizes = sizes.array
    given = sizes.tolist() if isinstance(sizes, torch.Tensor) else list(sizes)
    return any(isinstance(size, float) for size in given)


def slowest(seconds: list[float], sizes: list[int]) -> float:
    """What the slowest stage takes."""
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return max(
        math.fsum(seconds[end - size : end])
        for end, size in zip(ends, sizes, strict=True)
    )


def best_cut(
    seconds: list[float], nbytes: list[int], devices: int, capacity: int
) -> float:
    """The least time of a slowest stage, of all cuts that fit."""
    layers = len(seconds)
    best = [0.0] + [math.inf] * layers  # of the first n layers, on the devices so far
    for _ in range(devices):
        following = [math.inf] * (layers + 1)
        for end in range(1, layers + 1):
            time, held = 0.0, 0
            for start in range(end - 1, -1, -1):
                time, held = time + seconds[start], held + nbytes[start]
                if held > capacity:
                    break
                following[end] = min(following[end], max(best[start], time))
        best = following
    return best[layers]


def is_a_cut(sizes: list[int], layers: int, devices: int) -> bool:
    """Numbers from 1 up, one for each device, that add up to the layers."""
    return len(sizes) == devices and min(sizes) >= 1 and sum(sizes) == layers


def are_places(numbers: list[int], layers: int, devices: int) -> bool:
    """May these be the layers before which it cuts?"""
    return (
        len(numbers) == devices - 1
        and 0 < min(numbers) <= max(numbers) < layers
        and numbers == sorted(numbers)
    )


def is_even(sizes: list[int]) -> bool:
    """As many layers on each of several devices, as far as they can be divided?"""
    return max(sizes) - min(sizes) <= 1 and len(sizes) > 1


def fits(sizes: list[int], nbytes: list[int], capacity: int) -> bool:
    return slowest(nbytes, sizes) <= capacity


def expect_balance(
    seconds: list[float], nbytes: list[int], devices: int, capacity: int
) -> Such:
    """Any cut that fits, and is within 5 % of the best."""
    limit = WITHIN * best_cut(seconds, nbytes, devices, capacity)

    def is_good(returned: Any) -> bool:
        sizes = whole(returned)
        return (
            is_a_cut(sizes, len(seconds), devices)
            and fits(sizes, nbytes, capacity)
            and slowest(seconds, sizes) <= limit * (1 + 1e-9)
        )

    return Such(
        f"{devices} sizes that add up to {len(seconds)}, no stage above {capacity} "
        f"bytes, the slowest in at most {limit:.4g} seconds",
        is_good,
    )


# The 18 layers of the lesson's ResNet-50, for 16 images of 64 × 64: how long each takes
# on its virtual GPU, and its parameters, gradients and activations in MiB.
RESNET_SECONDS = [
    *(0.0038, 0.0075, 0.0071, 0.0071),
    *(0.0119, 0.0070, 0.0070, 0.0070),
    *(0.0119, 0.0070, 0.0070, 0.0070, 0.0070, 0.0070),
    *(0.0118, 0.0070, 0.0070, 0.0008),
]
RESNET_BYTES = [
    mib * 2**20
    for mib in (11, 17, 13, 13, 14, 8, 8, 8, 17, 12, 12, 12, 12, 12, 49, 36, 36, 16)
]


def scattered(number: int, seed: int, low: int, high: int) -> list[int]:
    """Whole numbers that look random; the same ones on every machine."""
    numbers = []
    for _ in range(number):
        seed = (seed * 1_103_515_245 + 12_345) % 2**31
        numbers.append(low + (seed >> 8) % (high - low + 1))
    return numbers


NO_CUT = (
    "Did it find no cut? There is one. A stage may hold exactly `capacity` bytes, and "
    "the last stage ends with the last layer."
)
BALANCE = Task(
    id="02.balance",
    title="Balance under a cap",
    stars=3,
    cases=(
        # First time alone, then memory alone, then both.
        ([1, 1, 1, 3, 3, 3], [1, 1, 1, 1, 1, 9], 2, 100),
        ([1, 1, 1, 1, 1, 10], [1] * 6, 3, 100),
        ([6, 1, 1, 1, 1, 1, 6, 6], [1] * 8, 3, 100),
        ([1] * 6, [1, 1, 1, 4, 4, 4], 2, 8),
        (RESNET_SECONDS, RESNET_BYTES, 2, 190 * 2**20),
        (RESNET_SECONDS, RESNET_BYTES, 4, 100 * 2**20),
        ([2, 2, 2], [3, 3, 3], 3, 3),
        ([4, 2], [1, 1], 1, 2),
        # Here the least sum of squares or cubes, or the stages that are nearest to
        # their average, are not the least slowest stage.
        ([4, 3, 1, 2, 1, 5, 2], [1] * 7, 4, 100),
        ([2, 6, 1, 1, 3, 3, 5], [1] * 7, 4, 100),
        ([2, 5, 7, 2, 5, 2], [1] * 6, 4, 100),
        (scattered(24, 5, 1, 30), scattered(24, 9, 1, 30), 5, 110),
        (scattered(60, 3, 1, 99), scattered(60, 4, 1, 99), 8, 520),
    ),
    expect=expect_balance,
    mistakes=(
        Mistake(
            when=lambda attempt: attempt.got is None and not attempt.error,
            says="It returned None: did you forget `return`?",
        ),
        Mistake(
            when=lambda attempt: isinstance(attempt.got, dict),
            says="That is a dictionary. Return a list: one number for each device, in "
            "the order of the devices.",
        ),
        Mistake(
            when=lambda attempt: has_floats(attempt.got),
            says=f"There is a number of layers for each device. {NO_INDEX}",
        ),
        Mistake(
            when=lambda attempt: whole(attempt.got) == [],
            says=f"No numbers came out. {NO_CUT}",
        ),
        Mistake(
            # A search that looks at what it has not found.
            when=says("'NoneType' object", "min() "),
            says=NO_CUT,
        ),
        Mistake(
            when=lambda attempt: are_places(
                whole(attempt.got), len(attempt.args[0]), attempt.args[2]
            ),
            says="Are these the places where you cut? Return how many layers each "
            "device gets, one number for each device.",
        ),
        Mistake(
            when=lambda attempt: len(whole(attempt.got)) < attempt.args[2],
            says="There are fewer numbers than devices. Return one number for each "
            "device, how many layers it gets: every device gets one or more.",
        ),
        Mistake(
            when=lambda attempt: len(whole(attempt.got)) > attempt.args[2],
            says="There are more numbers than devices. Return one number for each "
            "device: how many layers it gets.",
        ),
        Mistake(
            when=lambda attempt: min(whole(attempt.got)) < 1,
            says="Each device must get at least one layer.",
        ),
        Mistake(
            when=lambda attempt: sum(whole(attempt.got)) != len(attempt.args[0]),
            says="Each layer must be on one device: the numbers must add up to the "
            "number of layers.",
        ),
        Mistake(
            when=lambda attempt: (
                not fits(whole(attempt.got), attempt.args[1], attempt.args[3])
            ),
            says="A stage does not fit: its layers hold more bytes than `capacity`. "
            "Only cuts that fit count, however fast they are.",
        ),
        Mistake(
            when=lambda attempt: is_even(whole(attempt.got)),
            says="Each device has as many layers as the others, but layers differ. A "
            "pipeline is as fast as its slowest stage: what counts are the seconds.",
        ),
        Mistake(
            when=lambda attempt: is_a_cut(
                whole(attempt.got), len(attempt.args[0]), attempt.args[2]
            ),
            says="It fits, but another cut is more than 5 % faster. Only the slowest "
            "stage counts, not how even the others are. To fill one stage after the "
            "other up to the average goes wrong where a layer is large, and so does "
            "moving one border at a time. Try all cuts of the part that is "
            "left, or try a limit for the slowest stage and see whether the row fits "
            "into it.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == "running" and len(attempt.args[0]) > 50
            ),
            says="Does it try all cuts? Here there are too many. A recursion must keep "
            "its results (`@functools.cache`): the same part of the row comes up again "
            "and again. Or is there a loop that never ends?",
        ),
    ),
    otherwise="Return a list of whole numbers, one for each device.",
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

# ------------------------------------------------------------ 02.predict_micro_batches


PREDICT_MICRO_BATCHES = Task(
    id="02.predict_micro_batches",
    title="Predict the micro-batches",
    stars=1,
    where="value",
    expect=lambda: 27,
    mistakes=(
        Mistake(
            like=lambda: 30,
            says="That keeps the waiting to 10 % of the time in which a GPU works. "
            "Asked for is a tenth of the whole time, to which the waiting belongs.",
        ),
        Mistake(
            like=lambda: 26,
            says="With 26 they are still idle for 3 of 29 parts: a bit more than 10 %.",
        ),
        Mistake(
            like=lambda: 28,
            says="28 are enough, but fewer are enough, too.",
        ),
        Mistake(
            like=lambda: 36,
            says="You counted 4 idle parts. The last GPU waits while the three before "
            "it work on the first micro-batch: 3 parts.",
        ),
        Mistake(
            like=lambda: 40,
            says="You counted 4 idle parts, and divided by the work alone. A GPU waits "
            "for 3 parts, and the whole time counts.",
        ),
        Mistake(
            like=lambda: 9,
            says="With 9 there are 3 idle parts of 12: a quarter. Each GPU waits for "
            "three parts, not for one.",
        ),
        Mistake(
            like=lambda: 10,
            says="Each GPU waits for 3 parts, not for one: with 10 micro-batches that "
            "is 3 of 13 parts.",
        ),
        Mistake(
            when=lambda attempt: attempt.got < 27,
            says="That is too few: they would be idle for more than a tenth of the "
            "time.",
        ),
        Mistake(
            when=lambda attempt: attempt.got > 27,
            says="That is enough, but fewer are enough, too.",
        ),
    ),
    hints=(
        "Count in parts: what one GPU needs for one micro-batch. How many parts does "
        "the last GPU wait at the beginning?",
        "Each GPU waits for 3 parts and works for M parts. The 3 may be a tenth of "
        "the whole, so the M are the other nine tenths.",
        "For 2 GPUs and a quarter it goes like this:\n"
        "  1 / (M + 1) <= 1/4    so M + 1 >= 4, and M = 3",
    ),
)

TASKS = (
    SPLIT_OVER_THREE,
    MICRO_BATCHES,
    BUBBLE,
    SPOT_THE_GRADIENT,
    BALANCE,
    PREDICT_MICRO_BATCHES,
)
