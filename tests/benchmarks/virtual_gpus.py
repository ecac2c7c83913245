"""Virtual GPUs: what they cost over the same work on the plain CPU.

Each row is a training step, virtual over plain, in turns in one process. The results of
both must be equal to the last bit, or the row's goal is missed.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from tests.benchmarks._harness import Row, compare, median_row

ROUNDS = 15
FRESH_ROUNDS = 3

ENTER = """
import sys, time, torch
torch.ones(2).sum()
started = time.perf_counter()
from course_utils import virtual_gpus
gpus = virtual_gpus(4, force=True).on()
entered = time.perf_counter()
x = torch.ones(8, device="cuda:1") + 1
print(entered - started, time.perf_counter() - entered, "torch._dynamo" in sys.modules)
"""


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows, about 40 seconds of work on two cores."""
    rounds = 1 if quick else ROUNDS
    yield enter_row(1 if quick else FRESH_ROUNDS)
    yield step_row("ResNet-18, 8 images of 64 pixels", resnet, 1.5, rounds)
    yield step_row("MLP of 8 layers, 512 wide, 128 rows", wide, 1.8, rounds)
    yield step_row("MLP of 8 layers, 32 wide, 8 rows", narrow, 10.0, rounds)
    yield op_row(rounds)


def enter_row(rounds: int) -> Row:
    """Seconds to import and switch on, in a process that has torch."""
    times, firsts, compilers = [], [], []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", ENTER], check=True, capture_output=True, text=True
        )
        entered, first, compiler = done.stdout.split()
        times.append(float(entered))
        firsts.append(float(first))
        compilers.append(compiler == "True")
    return median_row(
        "import and switch on 4 virtual GPUs",
        times,
        "s",
        0.1,
        "PyTorch is imported already",
        conditions={"first_op_needs_no_compiler": not any(compilers)},
        detail={"first_op_s": statistics.median(firsts)},
    )


def resnet():
    """A small image model, and a batch for it."""
    import torch
    from torchvision.models import resnet18

    return resnet18(num_classes=10), torch.randn(8, 3, 64, 64)


def _mlp(width: int, rows: int):
    import torch
    from torch import nn

    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(rows, width)


def wide():
    """Layers whose kernels take longer than the bookkeeping."""
    return _mlp(512, 128)


def narrow():
    """Layers so small that almost only the bookkeeping is seen."""
    return _mlp(32, 8)


def step_row(name: str, make: Callable, goal: float, rounds: int) -> Row:
    """A step of SGD on a virtual GPU over the same step on the CPU."""
    import torch

    from course_utils import virtual_gpus

    torch.manual_seed(0)
    plain, x = make()
    virtual = copy.deepcopy(plain)
    gpus = virtual_gpus(2, force=True)

    def stepper(model, x) -> Callable[[], float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step() -> float:
            started = time.perf_counter()
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
            return time.perf_counter() - started

        return step

    on_cpu = stepper(plain, x)
    with gpus:
        on_gpu = stepper(virtual.to("cuda:1"), x.to("cuda:1"))

    def measure() -> float:
        with gpus:
            return on_gpu()

    for _ in range(3):
        on_cpu(), measure()
    found = compare(measure, on_cpu, rounds)
    # `compare` ran the peer once more than the other.
    measure()
    equal = all(
        torch.equal(p, q)
        for p, q in zip(plain.parameters(), virtual.parameters(), strict=True)
    )
    return found.row(
        f"{name}: training step / plain CPU",
        goal,
        conditions={"parameters_equal": equal},
    )


def op_row(rounds: int, ops: int = 2000) -> Row:
    """Microseconds that one small op takes longer."""
    import torch

    from course_utils import virtual_gpus

    gpus = virtual_gpus(1, force=True)
    with gpus:
        there = torch.ones(4, device="cuda:0")
    here = torch.ones(4)

    def seconds(x) -> float:
        started = time.perf_counter()
        for _ in range(ops):
            x + x
        return (time.perf_counter() - started) / ops

    def measure() -> float:
        with gpus:
            return seconds(there)

    measure()
    found = compare(measure, lambda: seconds(here), rounds)
    return Row(
        "one addition of 4 numbers, beyond the plain CPU's",
        (found.measured - found.peer) * 1e6,
        "us",
        found.aa,
        25.0,
        found.samples,
        detail={"plain_us": found.peer * 1e6},
    )
