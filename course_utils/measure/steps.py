"""One training step, recorded: what a rank computes and what it sends, and when.

    events, milliseconds = ranks.run(record_step, wrap)[0]
    pictures.overlap({"ours": events})

The model is a row of layers that sleep where a GPU would compute. Their gradients are
real, and really sent. So what is measured is when messages leave and how long they
take, on a machine whose cores are free to carry them, as those of a node with GPUs are.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.measure.taps import Tapped, tap

FORWARD, BACKWARD = 0.004, 0.008  # seconds of a layer

# (begin, end, layer, kind): seconds on the clock of this rank. The kind is "forward",
# "backward" or "communicate"; a message has no layer.
Event = tuple[float, float, str, str]


class SleepingLayer(nn.Module):
    """Passes its input on, sleeps as long as a GPU might compute, and notes when.

    Args:
        number: Its number in the model.
        events: Where it notes each forward and each backward.
        elements: Of its weight; all of the gradient is really made.
        forward, backward: Seconds.
    """

    def __init__(
        self,
        number: int,
        events: list[Event],
        elements: int = 1 << 20,
        *,
        forward: float = FORWARD,
        backward: float = BACKWARD,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))
        self.number, self.events = number, events
        self.seconds = {"forward": forward, "backward": backward}

    def take(self, kind: str) -> None:
        """Sleep, and note it."""
        start = time.perf_counter()
        time.sleep(self.seconds[kind])
        self.events.append((start, time.perf_counter(), str(self.number), kind))

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x * self.weight[0], self)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.layer = layer
        layer.take("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.layer.take("backward")
        return grad, None


@contextmanager
def _noting_all_reduces(events: list[Event]) -> Iterator[None]:
    def around(call: Tapped) -> Any:
        start = time.perf_counter()
        work = call.go()
        work.get_future().add_done_callback(
            lambda _: events.append((start, time.perf_counter(), "", "communicate"))
        )
        return work

    with tap(around, ["allreduce"]):
        yield


def record_step(
    wrap: Callable[[nn.Module], tuple[nn.Module, Callable[[], object]]],
    layers: int = 8,
    repeats: int = 12,
) -> tuple[list[Event], float]:
    """Make some steps, and return the events and the milliseconds of the shortest.

    Every rank calls it. An all-reduce is noted from its call to its end.

    Args:
        wrap: Makes of a model what is trained, and what is called after the backward.
        layers: How many `SleepingLayer` the model has, with gradients of 4 MiB each.
        repeats: How many steps are made.
    """
    events: list[Event] = []
    shortest: tuple[list[Event], float] = ([], float("inf"))
    module = nn.Sequential(*[SleepingLayer(number, events) for number in range(layers)])
    with _noting_all_reduces(events):
        model, after_backward = wrap(module)
        for _ in range(repeats):
            model.zero_grad()
            dist.barrier()
            events.clear()
            start = time.perf_counter()
            model(torch.ones(1)).sum().backward()
            after_backward()
            milliseconds = 1000 * (time.perf_counter() - start)
            if milliseconds < shortest[1]:
                shifted = [(a - start, b - start, *what) for a, b, *what in events]
                shortest = sorted(shifted), milliseconds
    return shortest
