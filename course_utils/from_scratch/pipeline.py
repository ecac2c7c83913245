"""Pipeline parallelism: one model, its layers on several devices.

Naive first (`ModelParallel`): the batch visits one device after the other, and all but
one are idle. Then in micro-batches (`GPipe`): while one device works on a micro-batch,
the device before it works on the next.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", arXiv 1811.06965, section 2.2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.profiler import record_function


def split_layers(layers: nn.Sequential, sizes: Sequence[int]) -> list[nn.Sequential]:
    """Cut a row of layers into stages: `sizes[k]` of the very same layers for stage k.

    Raises:
        ValueError: a stage would be empty, or the sizes do not add up.
    """
    if min(sizes, default=0) < 1 or sum(sizes) != len(layers):
        raise ValueError(
            f"The sizes are {list(sizes)} and there are {len(layers)} layers: expected "
            f"sizes from 1 up that add up to {len(layers)}."
        )
    ends = accumulate(sizes)
    return [layers[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class ModelParallel(nn.Module):
    """Stages on devices of their own. One device works at a time.

    Args:
        stages: Modules with one input and one output, to be run one after the other.
        devices: One for each stage, which is moved there.

    Raises:
        ValueError: there are not as many devices as stages, or there are none.
    """

    def __init__(
        self, stages: Sequence[nn.Module], devices: Sequence[torch.device | str | int]
    ) -> None:
        super().__init__()
        if len(stages) != len(devices) or not stages:
            raise ValueError(
                f"There are {len(stages)} stages and {len(devices)} devices: expected "
                "one device for each stage, and at least one."
            )
        self.devices = list(devices)
        self.stages = nn.ModuleList(
            stage.to(device) for stage, device in zip(stages, devices, strict=True)
        )

    def run_stage(self, k: int, x: Tensor) -> Tensor:
        """Stage k of a (micro-)batch. Its input may come from any device."""
        return self.stages[k](x.to(self.devices[k]))

    def forward(self, x: Tensor) -> Tensor:
        """The output for a batch, on the last device. One copy a boundary."""
        for k in range(len(self.stages)):
            x = self.run_stage(k, x)
        return x


def ticks(stages: int, micro_batches: int) -> Iterator[list[tuple[int, int]]]:
    """Who works on what: for each tick, its (stage, micro-batch) pairs.

    The pairs of a tick can run at the same time. Stage k begins k ticks after stage 0,
    so the last one ends after `micro_batches + stages - 1` ticks. In a tick the last
    stage comes first: it takes its input away before the stage before makes a new one.

        >>> list(ticks(stages=2, micro_batches=3))
        [[(0, 0)], [(1, 0), (0, 1)], [(1, 1), (0, 2)], [(1, 2)]]
    """
    for tick in range(micro_batches + stages - 1):
        first = max(0, tick - micro_batches + 1)
        last = min(tick, stages - 1)
        yield [(k, tick - k) for k in range(last, first - 1, -1)]


class GPipe(ModelParallel):
    """The same stages, with the batch in micro-batches that follow each other.

    Output and gradients are those of `ModelParallel`, unless a layer mixes the samples
    of a batch or draws random numbers: in training, BatchNorm normalizes each
    micro-batch by itself, and dropout draws for each anew.

    A GPU computes while Python goes on, so this loop keeps all devices busy: it only
    has to hand out the work in an order in which no device waits for later work.
    `backward()` runs it in reverse, from the last micro-batch to the first.

    Cost: a boundary sends the same bytes as before, in `micro_batches` messages. The
    activations of all micro-batches stay in memory until their backward.

    Args:
        stages, devices: As in `ModelParallel`.
        micro_batches: Into how many parts a batch is cut; at most one for each sample.
        label: Called with the name of a micro-batch, such as "micro-batch 0", around
            its work in a stage. As it is, the names are in PyTorch's profiles.

    Raises:
        ValueError: `micro_batches` is below 1.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        devices: Sequence[torch.device | str | int],
        micro_batches: int,
        *,
        label: Callable[[str], AbstractContextManager] = record_function,
    ) -> None:
        super().__init__(stages, devices)
        if micro_batches < 1:
            raise ValueError(f"micro_batches is {micro_batches}: expected 1 or more.")
        self.micro_batches = micro_batches
        self.label = label

    def forward(self, x: Tensor) -> Tensor:
        """The output for a batch, on the last device, in the order of its samples."""
        parts = list(x.tensor_split(min(self.micro_batches, max(len(x), 1))))
        for tick in ticks(len(self.stages), len(parts)):
            for k, i in tick:
                with self.label(f"micro-batch {i}"):
                    parts[i] = self.run_stage(k, parts[i])
        return torch.cat(parts)
