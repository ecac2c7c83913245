"""Ring all-reduce: the readable ones over gloo's own, the naive one, shared memory.

64 MiB of float32 on every rank, 2 and 4 ranks. A ratio is a speed: how many times
faster than the peer, so that higher is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from course_utils.ranks import Ranks
from tests.benchmarks._harness import Row, compared
from tests.benchmarks._turns import in_turns

NBYTES = 64 << 20
ROUNDS = 15  # odd: the median of a ratio is then one over that of its inverse

# Its name, two of `ways`, the goals by the number of ranks, and what to know.
RACES = (
    (
        *("all_reduce_pipelined", "pipelined", "gloo", {2: 0.90, 4: 0.95}),
        "isend and irecv in Python, against gloo's all_reduce in C++",
    ),
    ("all_reduce_ring", "ring", "naive", {4: 1.3}, "against all_reduce_naive"),
    (
        *("SharedMemoryRing", "shared", "gloo", {2: 6.0, 4: 4.0}),
        "the tensor lives in the shared memory; memcpy_seconds: every rank copies a "
        "tensor of that size at the same time",
    ),
)


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows, about 40 seconds of work on two cores."""
    nbytes, rounds = (1 << 16, 1) if quick else (NBYTES, ROUNDS)
    for n in (2, 4):
        with Ranks(n, quiet=True, timeout=300) as ranks:
            for name, way, peer, goals, note in RACES:
                if n not in goals:
                    continue
                turns, equal, beside = ranks.run(run_race, way, peer, nbytes, rounds)[0]
                whose = f"{peer}'s" if peer == "gloo" else peer
                row = compared(*turns["time"]).row(
                    f"speed of {name} / {whose}, {nbytes / 2**20:g} MiB, {n} ranks",
                    goals[n],
                    note,
                    better="higher",
                    conditions={"same_result": equal},
                    detail=beside,
                )
                yield replace(row, ratio=1 / row.ratio)


# ---------------------------------------------------------------------- on the ranks
def ways(tensor: Any) -> tuple[dict[str, Callable[[], None]], Any]:
    """The ways to all-reduce the tensor; and the one in shared memory."""
    import torch.distributed as dist

    from course_utils.from_scratch import collectives, ring

    shared = ring.SharedMemoryRing(tensor.numel(), tensor.dtype)
    return {
        "gloo": lambda: dist.all_reduce(tensor),
        "ring": lambda: ring.all_reduce_ring(tensor),
        "pipelined": lambda: ring.all_reduce_pipelined(tensor),
        "naive": lambda: collectives.all_reduce_naive(tensor),
        "shared": lambda: shared.all_reduce(shared.buffer),
    }, shared.buffer


def run_race(way: str, peer: str, nbytes: int, rounds: int) -> tuple[Any, bool, dict]:
    """The turns; whether both have the same result; what else was measured."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(nbytes // 4)
    functions, buffer = ways(tensor)
    turns = in_turns(functions[way], functions[peer], rounds)

    results = []
    for name in (way, peer):
        memory = buffer if name == "shared" else tensor
        # Whole numbers: their sums are the same in any order.
        memory.copy_(torch.arange(len(tensor)) % 1000 + dist.get_rank())
        functions[name]()
        results.append(memory.clone())
    equal = torch.tensor(float(torch.equal(*results)))
    dist.all_reduce(equal, dist.ReduceOp.MIN)

    beside = {}
    if way == "shared":
        copy = torch.empty_like(tensor)
        copies = in_turns(lambda: copy.copy_(tensor), lambda: None, 5)
        beside["memcpy_seconds"] = statistics.median(copies["time"][0])
    return turns, bool(equal), beside
