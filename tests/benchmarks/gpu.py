"""A real GPU: its memory, PCIe, kernel launches, DDP and FSDP, and the model of time.

Without a GPU there is nothing to measure. `--quick` then runs the same code with tiny
sizes on the CPU, which only shows that it works.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from course_utils.measure.recorded import copies, repeated, timed
from course_utils.theory import costs
from tests.benchmarks._harness import Comparison, Row, compare, median_row, to_itself

ROUNDS = 15
MIB = 2**20

# Dense FLOP/s of float32 and bytes a second of the memory, by a part of the card's
# name. Source: NVIDIA's data sheets, H100 and H200 SXM, A100 80GB SXM, L4, T4.
SHEETS = {
    "H200": (67e12, 4.8e12),
    "H100": (67e12, 3.35e12),
    "A100": (19.5e12, 2.039e12),
    "L4": (30.3e12, 300e9),
    "T4": (8.1e12, 320e9),
}


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows, less than two minutes on a GPU; none without one, but with `quick`."""
    import torch

    there = torch.cuda.is_available()
    if not there and not quick:
        print("There is no GPU here: nothing was measured.", file=sys.stderr)
        return
    device = "cuda" if there else "cpu"
    rounds, size = (1, MIB) if quick else (ROUNDS, 256 * MIB)
    yield from copy_rows(device, size, rounds)
    yield launch_row(device, rounds)
    yield from wrapper_rows(device, rounds)
    if importlib.util.find_spec("torchvision") is None:
        return  # a Python of one's own may lack it: then there is one row less
    name = torch.cuda.get_device_name() if there else "H100"
    for sheet in [key for key in SHEETS if key in name][:1]:
        yield resnet_row(device, sheet, quick, rounds)


def copy_rows(device: str, size: int, rounds: int) -> Iterator[Row]:
    """Gigabytes a second of copies in the GPU, and between it and the host."""
    for name, (nbytes, copy) in copies(device, size).items():
        rates = [nbytes / one / costs.GB for one in repeated(device, copy, rounds)]
        note = f"{size // MIB} MiB, until they are there"
        if name.startswith("memory"):
            note = "read and written bytes together, as data sheets count"
        yield median_row(name, rates, "GB/s", None, note, better="higher")


def launch_row(device: str, rounds: int) -> Row:
    """Microseconds in which the host gives the GPU one small kernel."""
    import torch

    x, count = torch.ones(4, device=device), 1000

    def work() -> None:
        for _ in range(count):
            x.add_(1.0)

    seconds = repeated(device, work, rounds)
    micros = [one / count * 1e6 for one in seconds]
    return median_row("one kernel after the other, each", micros, "us", None)


# ---------------------------------------------------------------------- one rank
def wrapper_rows(device: str, rounds: int) -> Iterator[Row]:
    """A step with our DDP and FSDP over one with torch's, on one rank."""
    from course_utils.ranks import Ranks

    backend = "nccl" if device == "cuda" else "gloo"
    with Ranks(1, backend=backend, quiet=True, timeout=300) as ranks:
        for own, peer in (
            ("own DDP", "torch DDP"),
            ("own FSDP", "FSDP2"),
            ("torch DDP", "plain model"),
        ):
            yield ranks.run(in_turns, device, own, peer, rounds)[0].row(
                f"{own} / {peer}, transformer step, one rank, {backend}",
                None,
                "a rank alone sends nothing: this is what the wrapper costs",
            )


def in_turns(device: str, own: str, peer: str, rounds: int) -> Comparison:
    """Steps with one wrapper over steps with the other."""
    step, peer_step = stepper(device, own), stepper(device, peer)
    for _ in range(3):
        step(), peer_step()
    return compare(
        partial(timed, device, step), partial(timed, device, peer_step), rounds
    )


def stepper(device: str, kind: str) -> Callable[[], None]:
    """A transformer in a wrapper, and a training step with it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from tests.benchmarks._turns import transformer, wrapped

    layers, width, tokens = (12, 768, 512) if device == "cuda" else (1, 32, 8)
    options = {"mesh": init_device_mesh(device, (1,))} if kind == "FSDP2" else {}
    model = wrapped(kind, transformer(layers, width).to(device), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8, tokens, width).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


# ---------------------------------------------------------------- the model of time
def resnet_row(device: str, sheet: str, quick: bool, rounds: int) -> Row:
    """A real step over what virtual GPUs say, with the numbers of the data sheet."""
    import torch
    from torchvision.models import resnet50

    batch, side = (2, 32) if quick else (32, 224)
    torch.manual_seed(0)
    model = resnet50()
    predicted = virtual_seconds(model, batch, side, *SHEETS[sheet])
    torch.backends.cudnn.allow_tf32 = False  # float32, as on the data sheet
    torch.backends.cudnn.benchmark = True
    step = training_step(model.to(device), batch, side, device)
    seconds = repeated(device, step, rounds)
    return Row(
        f"ResNet-50 step, {batch} images of {side} pixels, real / virtual GPU's model",
        statistics.median(seconds) / predicted,
        "x",
        to_itself(seconds),
        None,
        len(seconds),
        f"float32 without TF32; the model has the rates of the data sheet of {sheet}",
        detail={"seconds": statistics.median(seconds), "model_seconds": predicted},
    )


def training_step(model: Any, batch: int, side: int, device: str) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(batch, 3, side, side).to(device)
    labels = torch.zeros(batch, dtype=torch.long).to(device)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def virtual_seconds(
    model: Any, batch: int, side: int, flops: float, bandwidth: float
) -> float:
    """What a step takes on a virtual GPU with these rates."""
    import copy

    from course_utils import virtual_gpus

    rates = {"compute": flops, "memory_bandwidth": bandwidth}
    with virtual_gpus(1, memory="80 GiB", force=True, **rates) as gpus:
        step = training_step(copy.deepcopy(model).to("cuda"), batch, side, "cuda")
        step()
        with gpus.record() as log:
            step()
        return log.timeline().seconds
