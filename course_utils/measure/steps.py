"""One training step, recorded: what a rank computes and what it sends, and when.

    events, milliseconds = ranks.run(record_step, wrap)[0]
    pictures.overlap({"ours": events})

The model is a row of layers that sleep where a GPU would compute. Their gradients are
real, and really sent. So what is measured is when messages leave and how long they
take, on a machine whose cores are free to carry them, as those of a node with GPUs are.

    time_to_average     how often some ways to average gradients send, and their times
    sent_in_a_step      how often a model of small layers sends, with some wrapper
    compiled_graphs     how many graphs `torch.compile` makes of a model with DDP
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.measure.calibration import seconds_in_turns
from course_utils.measure.taps import Tapped, tap
from course_utils.measure.traffic import Sent

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
        self.weight.register_post_accumulate_grad_hook(self.end_backward)
        self.number, self.events = number, events
        self.seconds = {"forward": forward, "backward": backward}

    def take(self, kind: str) -> None:
        """Sleep, and note it."""
        start = time.perf_counter()
        time.sleep(self.seconds[kind])
        self.events.append((start, time.perf_counter(), str(self.number), kind))

    def end_backward(self, _: nn.Parameter) -> None:
        """The backward has lasted until now: autograd has made the gradient."""
        for place in reversed(range(len(self.events))):
            start, _, *what = self.events[place]
            if what == [str(self.number), "backward"]:
                self.events[place] = start, time.perf_counter(), *what
                return

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


def _without_gaps(events: list[Event]) -> list[Event]:
    """Each layer works until the next one begins: autograd and hooks do in between.

    Not if an all-reduce has begun and ended there: then somebody waited for it.
    """
    sent = [event for event in events if event[3] == "communicate"]
    work = sorted(event for event in events if event[3] != "communicate")
    for place, (after, *_) in enumerate(work[1:]):
        start, stop, *what = work[place]
        if not any(stop <= begin and end <= after for begin, end, *_ in sent):
            work[place] = start, after, *what
    return sorted(work + sent)


def record_step(
    wrap: Callable[[nn.Module], tuple[nn.Module, Callable[[], object]]],
    layers: int = 8,
    repeats: int = 24,
) -> tuple[list[Event], float]:
    """Make some steps, and return the events and the milliseconds of the shortest.

    Every rank calls it. An all-reduce is noted from its call to its end, and a layer
    from its start to that of the next one. The last backward ends with its gradient.

    Args:
        wrap: Makes of a model what is trained, and what is called after the backward.
        layers: How many `SleepingLayer` the model has, with gradients of 4 MiB each.
        repeats: How many steps are made.
    """
    events: list[Event] = []
    shortest: tuple[list[Event], float] = ([], float("inf"))

    def note_all_reduce(call: Tapped) -> Any:
        called = time.perf_counter()
        work = call.go()
        work.get_future().add_done_callback(
            lambda _: events.append((called, time.perf_counter(), "", "communicate"))
        )
        return work

    module = nn.Sequential(*[SleepingLayer(number, events) for number in range(layers)])
    with tap(note_all_reduce, ["allreduce"]):
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
                shortest = _without_gaps(shifted), milliseconds
    return shortest


def time_to_average(
    ways: Mapping[str, Callable[[nn.Module], object]], layers: int = 20
) -> dict[str, tuple[int, float]]:
    """For each way to average gradients: its all-reduces, and its milliseconds.

    Every rank calls it. The ways take turns; the median of 9 rounds counts.

    Args:
        ways: Functions that average the gradients of a model over the ranks.
        layers: How many linear layers, 64 × 64 with a bias, the model has.
    """
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    model(torch.randn(8, 64)).sum().backward()
    messages = {}
    for name, average in ways.items():
        with Sent() as sent:
            average(model)
        messages[name] = sent.count("all-reduce")
    calls = {name: lambda way=way: way(model) for name, way in ways.items()}
    seconds = seconds_in_turns(calls, rounds=9)
    return {
        name: (count, 1000 * statistics.median(seconds[name]))
        for name, count in messages.items()
    }


def sent_in_a_step(
    wrap: Callable[[nn.Module], tuple[nn.Module, Callable[[], object]]],
    layers: int = 20,
) -> int:
    """The all-reduces of the third step of small linear layers. Every rank calls it.

    Args:
        wrap: As in `record_step`.
        layers: How many linear layers, 64 × 64 with a bias, the model has.
    """
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    model, after_backward = wrap(module)
    for _ in range(3):
        with Sent() as sent:
            model(torch.randn(8, 64)).sum().backward()
            after_backward()
    return sent.count("all-reduce")


class _Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def compiled_graphs(
    wrap: Callable[[nn.Module, Callable], nn.Module],
    layers: int = 30,
    optimize_ddp: bool = True,
) -> int:
    """How many graphs a compiler gets for the forward of a model. Every rank calls it.

    Args:
        wrap: Makes of a model and a compiler (a backend of `torch.compile`) what is
            trained. This compiler leaves each graph as it is, and counts it.
        layers: How many linear layers the model has, of 1 MiB and a small bias each.
        optimize_ddp: As the setting of this name in `torch._dynamo.config`.
    """
    graphs = []

    def compiler(graph: Callable, inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch._logging.set_logs(dynamo=logging.ERROR)  # no warnings on what it leaves out
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        wrap(_Deep(layers), compiler)(torch.randn(1, 512)).sum().backward()
    torch._logging.set_logs()
    return len(graphs)
