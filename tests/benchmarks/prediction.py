"""How well α and β, measured on this machine, predict the time of a ring all-reduce.

A row's ratio is the error: 0.1 where the prediction is 10 % above or below what was
measured. The ring, the exchange that predicts it and the ping-pong that misleads take
turns, so that all see the same machine. With a machine's own noise no prediction can be
better than that, so a goal is never below twice what the ring's own runs differ by.

No message has 32 MiB or more. glibc returns a buffer of that size to the system after
each all-reduce, and to get it again takes as long as to fill it from the network: that
is no part of α and β.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from course_utils.ranks import Ranks
from course_utils.theory import costs
from tests.benchmarks._harness import Row, to_itself

ROUNDS = 9
MESSAGES = (1 << 19, 1 << 21, 1 << 23, 1 << 24)  # chunks: the tensor has n of them
SLOW_MESSAGES = (1 << 19, 1 << 21)
SLOW_LINK = {"latency": 2e-3, "bandwidth": 100e6}


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows, about 60 seconds of work on two cores."""
    rounds = 2 if quick else ROUNDS
    for n in (2, 4):
        with Ranks(n, quiet=True, timeout=300) as ranks:
            yield from prediction_rows(ranks, MESSAGES, rounds, None, 0.12)
            yield from prediction_rows(ranks, SLOW_MESSAGES, rounds, SLOW_LINK, 0.05)


def prediction_rows(
    ranks: Ranks,
    messages: tuple[int, ...],
    rounds: int,
    link: dict[str, float] | None,
    goal: float,
) -> Iterator[Row]:
    """Measure on these ranks, on an emulated link or on the real one; a row a size."""
    n = ranks.n
    shifts, pings, rings = ranks.run(measure, messages, rounds, link)[0]
    fits = {
        name: costs.fit_transfer(messages, [statistics.median(t) for t in times])
        for name, times in (("shift", shifts), ("ping_pong", pings))
    }
    where = "emulated link, 2 ms, 100 MB/s" if link else "this machine"
    for message, times in zip(messages, rings, strict=True):
        size = n * message
        measured, aa = statistics.median(times), to_itself(times)
        predicted = {
            name: costs.all_reduce_seconds("ring", n, size, **asdict(fit))
            for name, fit in fits.items()
        }
        noise = statistics.median(
            abs(after / before - 1)
            for before, after in zip(times, times[1:], strict=False)
        )
        yield Row(
            f"ring all-reduce predicted, {where}, {size / 2**20:g} MiB, {n} ranks",
            abs(predicted["shift"] / measured - 1),
            "x",
            aa,
            goal if link else max(goal, 2 * noise),
            len(times),
            "relative error; noise: what one run differs from the next",
            detail={
                "predicted_seconds": predicted["shift"],
                "seconds": measured,
                "noise": noise,
                "latency": fits["shift"].latency,
                "bandwidth": fits["shift"].bandwidth,
                "ping_pong_error": abs(predicted["ping_pong"] / measured - 1),
            },
        )


# ---------------------------------------------------------------------- on the ranks
def measure(
    messages: tuple[int, ...], rounds: int, link: dict[str, float] | None
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """Seconds of exchanges, of ping-pongs, and of rings: for each size, of each round.

    The first round warms up, and is dropped.
    """
    import contextlib

    import torch
    import torch.distributed as dist

    from course_utils.from_scratch import ring
    from course_utils.measure.calibration import (
        ping_pong_seconds,
        ring_shift_seconds,
        slowest_seconds,
    )
    from course_utils.measure.emulated_link import EmulatedLink

    n = dist.get_world_size()
    tensors = [torch.zeros(n * message // 4) for message in messages]

    def rings() -> list[float]:
        return [
            slowest_seconds(lambda t=tensor: ring.all_reduce_ring(t), 1)[0]
            for tensor in tensors
        ]

    kinds: tuple[Any, ...] = (
        lambda: ring_shift_seconds(messages, 1),
        lambda: ping_pong_seconds(messages, 1),
        rings,
    )
    found: tuple[list[list[float]], ...] = ([], [], [])
    with EmulatedLink(**link) if link else contextlib.nullcontext():
        for turn in range(rounds + 1):
            for kind, values in zip(kinds, found, strict=True):
                measured = kind()
                if turn:
                    values.append(measured)
    return tuple([list(of) for of in zip(*values, strict=True)] for values in found)
