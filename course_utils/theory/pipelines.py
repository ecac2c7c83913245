"""A pipeline of stages, simulated action by action: `simulator.pipeline_step`.

    >>> from course_utils import simulator
    >>> from course_utils.from_scratch.schedules import one_f_one_b
    >>> orders = [one_f_one_b(rank, 4, 8) for rank in range(4)]
    >>> simulator.pipeline_step(orders, {"F": 1, "B": 2}).seconds
    33.0

That is (m + p - 1) micro-batches of 3 seconds each: the formula of the bubble, which
holds for stages that take equally long. For others there is none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from course_utils.theory.arguments import NotNegative, Positive, checked


class PipelineAction(Protocol):
    """What a rank of a pipeline does: see `course_utils.from_scratch.schedules`."""

    kind: str
    micro_batch: int
    chunk: int


class TimedAction(NamedTuple):
    """An action of a rank, from `start` to `stop`."""

    action: PipelineAction
    start: float
    stop: float


@dataclass(frozen=True)
class PipelineStep:
    """A simulated step of a pipeline.

    Attributes:
        seconds: From its first forward to its last backward.
        done: For each rank what it did, in order.
    """

    seconds: float
    done: tuple[tuple[TimedAction, ...], ...]

    def idle(self, rank: int) -> float:
        """Seconds in which that rank computes nothing."""
        return self.seconds - sum(one.stop - one.start for one in self.done[rank])

    def most_kept(self, rank: int) -> int:
        """For how many (micro-batch, chunk) pairs it keeps activations at once.

        They are kept until "B", or until "W" where the backward is cut in two.
        """
        kinds = [one.action.kind for one in self.done[rank]]
        end = "W" if "W" in kinds else "B"
        kept = most = 0
        for kind in kinds:
            kept += {"F": 1, end: -1}.get(kind, 0)
            most = max(most, kept)
        return most


@checked
def pipeline_step(
    schedules: Sequence[Sequence[PipelineAction]],
    seconds: Mapping[str, NotNegative],
    *,
    send: NotNegative = 0.0,
    slow_ranks: Mapping[int, Positive] | None = None,
) -> PipelineStep:
    """Simulate a step of a pipeline, of which each rank carries out its schedule.

    A forward "F" needs that of the stage before; a backward "B" its own forward and the
    backward of the stage behind; "W", the gradients of the weights, its own "B". Stage
    `chunk * ranks + rank` is on that rank, which does one thing at a time.

    Args:
        schedules: for each rank what it does, in order.
        seconds: what an action takes, by its kind.
        send: until the next rank has what it needs from another one.
        slow_ranks: ranks that take so many times longer: `{1: 2.0}`.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    ranks = len(schedules)
    last = max(action.chunk for action in schedules[-1]) * ranks + ranks - 1
    ended: dict[tuple[str, int, int], float] = {}
    free: list[float] = [0.0] * ranks
    done: list[list[TimedAction]] = [[] for _ in range(ranks)]
    waiting = [list(reversed(schedule)) for schedule in schedules]

    def begins(rank: int, action: PipelineAction) -> float:
        """When it can begin; infinite if something that it needs is still to do."""
        i, stage = action.micro_batch, action.chunk * ranks + rank
        needed = {
            "F": [("F", i, stage - 1)] * (stage > 0),
            "B": [("F", i, stage), *[("B", i, stage + 1)] * (stage < last)],
            "W": [("B", i, stage)],
        }[action.kind]
        there = [
            ended.get(key, math.inf) + send * (key[2] % ranks != rank) for key in needed
        ]
        return max([free[rank], *there])

    while todo := [rank for rank in range(ranks) if waiting[rank]]:
        start, rank = min((begins(rank, waiting[rank][-1]), rank) for rank in todo)
        if start == math.inf:
            heads = ", ".join(f"rank {rank} for {waiting[rank][-1]}" for rank in todo)
            raise ValueError(f"The ranks wait for each other: {heads}.")
        action = waiting[rank].pop()
        takes = seconds[action.kind] * (slow_ranks or {}).get(rank, 1.0)
        stop = free[rank] = start + takes
        stage = action.chunk * ranks + rank
        ended[action.kind, action.micro_batch, stage] = stop
        done[rank].append(TimedAction(action, start, stop))
    return PipelineStep(max(free), tuple(map(tuple, done)))
