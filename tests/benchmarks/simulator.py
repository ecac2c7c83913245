"""The simulator: a ring all-reduce on 10,000 GPUs, message by message, and on 100,000.

Seconds that it takes; the simulated time must be that of the closed formula.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from course_utils.theory import costs, simulator
from tests.benchmarks._harness import Row, median_row

NBYTES = 1e9
LINK = costs.AlphaBeta(latency=5e-6, bandwidth=50e9)


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows, about 5 seconds of work."""
    rounds, fewer = (1, 100) if quick else (5, 1)
    yield ring_row(10_000 // fewer, rounds, every_gpu=True)
    yield ring_row(100_000 // fewer, rounds, every_gpu=False)


def ring_row(gpus: int, rounds: int, *, every_gpu: bool) -> Row:
    """Simulate a ring of so many GPUs, all alike."""
    cluster = simulator.Cluster(
        name="alike",
        nodes=gpus,
        gpus_per_node=1,
        inside=LINK,
        between=LINK,
        cards=1,
        flops=1e12,
    )
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run = simulator.all_reduce(cluster, NBYTES, "ring", every_gpu=every_gpu)
        times.append(time.perf_counter() - start)
    expected = costs.all_reduce_seconds(
        "ring", gpus, NBYTES, latency=LINK.latency, bandwidth=LINK.bandwidth
    )
    error = abs(run.seconds / expected - 1)
    how = "message by message" if every_gpu else "those that behave alike once"
    return median_row(
        f"ring all-reduce of {gpus:,} GPUs, {how}",
        times,
        "s",
        1.0,
        conditions={"equal_to_formula": error <= 1e-9},
        detail={"relative_error": error, "messages": run.messages},
    )
