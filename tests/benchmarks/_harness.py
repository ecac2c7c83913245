"""Measure two things in turn, and say what came out as a row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of a benchmark.

    Attributes:
        row: what was measured.
        ratio: the value that is compared with the goal: a plain ratio, or a number of
            ``unit``.
        unit: ``"x"`` for a ratio, else ``"s"``, ``"MiB"``, ...
        aa: the same thing over itself in the same run; None if it ran only once.
        goal: what ``ratio`` should reach; None where a row only informs.
        samples: how many runs ``ratio`` is the median of.
        note: what one has to know to read the number.
        better: ``"lower"`` or ``"higher"``, which side of the goal is the good one.
        conditions: what must be true as well for the goal to be met, by name.
        detail: more numbers, by name.
    """

    row: str
    ratio: float
    unit: str
    aa: float | None
    goal: float | None
    samples: int
    note: str = ""
    better: str = "lower"
    conditions: dict[str, bool] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Is the goal reached, and every condition true? None without a goal."""
        if self.goal is None:
            return None
        lower = self.better == "lower"
        reached = self.ratio <= self.goal if lower else self.ratio >= self.goal
        return reached and all(self.conditions.values())

    def as_dict(self) -> dict[str, Any]:
        """What is printed, in this order; conditions and details come last."""
        names = "row ratio unit aa goal better met samples note".split()
        values = {name: getattr(self, name) for name in names}
        values |= self.conditions | self.detail
        return {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` or :func:`compared` found: medians over the rounds.

    Attributes:
        ratio: measured over peer, round by round.
        aa: each run of the peer over the run of it before.
        measured, peer: the values themselves.
        samples: the number of rounds.
    """

    ratio: float
    aa: float | None
    measured: float
    peer: float
    samples: int

    def row(self, row: str, goal: float | None, note: str = "", **more: Any) -> Row:
        """A row of this ratio and both times; ``more`` are other fields of a row."""
        seconds = {"seconds": self.measured, "peer_seconds": self.peer}
        more["detail"] = seconds | more.get("detail", {})
        return Row(row, self.ratio, "x", self.aa, goal, self.samples, note, **more)


def compare(
    measure: Callable[[], float], peer: Callable[[], float], rounds: int
) -> Comparison:
    """Run peer, measure, peer, measure, ..., peer and compare neighbours.

    Every run of ``measure`` stands between two of ``peer`` and is divided by their
    mean, so that a slow drift of the machine cancels.

    Args:
        measure, peer: each does its work once and returns the value, mostly seconds.
        rounds: how often ``measure`` runs; ``peer`` runs once more.
    """
    peers, measured = [peer()], []
    for _ in range(rounds):
        measured.append(measure())
        peers.append(peer())
    return compared(measured, peers)


def compared(measured: Sequence[float], peers: Sequence[float]) -> Comparison:
    """The same, for values that were measured in that order already."""
    between = [(before + after) / 2 for before, after in pairwise(peers)]
    return Comparison(
        ratio=statistics.median(m / p for m, p in zip(measured, between, strict=True)),
        aa=to_itself(peers),
        measured=statistics.median(measured),
        peer=statistics.median(peers),
        samples=len(measured),
    )


def to_itself(values: Sequence[float]) -> float | None:
    """Each run over the one before it, the median; None for a single run."""
    if len(values) < 2:
        return None
    return statistics.median(after / before for before, after in pairwise(values))


def median_row(
    row: str,
    values: Sequence[float],
    unit: str,
    goal: float | None,
    note: str = "",
    **more: Any,
) -> Row:
    """A row of one thing that was measured several times; ``more`` as for a row."""
    median = statistics.median(values)
    return Row(row, median, unit, to_itself(values), goal, len(values), note, **more)
