"""FSDP from scratch: a training step over PyTorch's FSDP2 and DDP, time and bytes.

Every rank has the same transformer twice, trains both on the same batches, in turns,
and compares the parameters afterwards. Time is that of the slowest rank; CPU time, of
all ranks together, is the steadier of the two. Bytes are those of tensors on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from course_utils.ranks import Ranks
from tests.benchmarks._harness import Row, compared
from tests.benchmarks._turns import (
    agreement,
    in_turns,
    largest_difference,
    stepper,
    transformer,
    wrapped,
)

ROUNDS = 10
LARGE = (4, 512, 8)  # layers, width, tokens; for time: FSDP moves more than it computes
SMALL = (4, 256, 64)  # for bytes: the model of the DDP benchmark

# What is under way is bounded by one gathering, and one reduce-scatter that is awaited.
PREFETCHING = {"prefetch": 1, "max_reduces": 0}
FRUGAL = {"prefetch": 0, "max_reduces": 0}

GLOO = (
    "gloo's reduce-scatter, which FSDP2 uses, is an all-reduce and a slice, and its "
    "all-gather copies; ours sends each part to its owner directly. With NCCL both use "
    "NCCL's, and this gain is gone"
)
DDP = "1.5 times the bytes of DDP, and a third of the memory"


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows, about two minutes of work on two cores."""
    rounds = 1 if quick else ROUNDS
    for n, goal in ((2, 0.75), (4, 0.60)):
        with Ranks(n, quiet=True, timeout=300) as ranks:
            yield from time_rows(ranks, "FSDP2", goal, GLOO, rounds)
            yield from time_rows(ranks, "torch DDP", None, DDP, rounds)
            yield from byte_rows(ranks)


def time_rows(
    ranks: Ranks, peer: str, goal: float | None, note: str, rounds: int
) -> Iterator[Row]:
    """A step of our FSDP over one of a peer: time, and CPU time."""
    turns, apart = ranks.run(train_in_turns, peer, rounds)[0]
    for what, limit in (("time", goal), ("CPU time", None)):
        yield compared(*turns[what]).row(
            f"own FSDP / {peer}, transformer step, {what}, {ranks.n} ranks",
            limit,
            note,
            conditions=agreement(apart, ranks.n),
            detail={"largest_difference": apart},
        )


def byte_rows(ranks: Ranks) -> Iterator[Row]:
    """Bytes of a step at most, and between steps."""
    peer, again = (ranks.run(bytes_of_steps, "FSDP2", {})[0]["peak"] for _ in "12")
    for what, options, goal in (
        ("without prefetch", FRUGAL, 0.90),
        ("with prefetch", PREFETCHING, 1.05),
        ("with prefetch, a reduce-scatter under way", {}, None),
        ("reduce-scatters piling up", {"max_reduces": None}, None),
    ):
        own = ranks.run(bytes_of_steps, "own FSDP", options)[0]
        yield Row(
            f"own FSDP / FSDP2, peak bytes of tensors, {what}, {ranks.n} ranks",
            own["peak"] / peer,
            "x",
            again / peer,
            goal,
            1,
            "gloo's own buffers, of which FSDP2 needs more, are not counted",
            detail={"bytes": own["peak"], "peer_bytes": peer},
        )
    yield Row(
        f"own FSDP, bytes between steps / formula, {ranks.n} ranks",
        own["between"] / own["formula"],
        "x",
        None,
        1.0,
        1,
        "shards and momentum, in fp32, with the padding",
        conditions={"equal": own["between"] == own["formula"]},
        detail={"bytes": own["between"]},
    )


# ---------------------------------------------------------------------- on the ranks
def job(
    kind: str, options: dict, size: tuple[int, int, int], activation: str
) -> tuple[Callable[[], dict], Callable[[], None], Any]:
    """What gives a model's whole parameters, what does a step, and its optimizer."""
    import torch

    layers, width, tokens = size
    bare = transformer(layers, width, activation)
    model = wrapped(kind, bare, **options)

    def state() -> dict:
        if kind == "FSDP2":
            return {k: v.full_tensor() for k, v in model.state_dict().items()}
        return (bare if kind == "torch DDP" else model).state_dict()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return state, stepper(model, optimizer, (2, tokens, width)), optimizer


def train_in_turns(peer: str, rounds: int) -> tuple[Any, float]:
    """The turns, and how far the parameters are apart after as many steps of each."""
    state, step, _ = job("own FSDP", PREFETCHING, LARGE, "gelu")
    peer_state, peer_step, _ = job(peer, {}, LARGE, "gelu")
    turns = in_turns(step, peer_step, rounds, warm_up=3)
    step()  # the peer's turn came once more
    one, other = state(), peer_state()
    return turns, largest_difference(one.values(), [other[name] for name in one])


def bytes_of_steps(kind: str, options: dict[str, Any]) -> dict[str, int]:
    """The peak in a step, the bytes between steps, and what these should be."""
    import torch.distributed as dist

    from course_utils.measure.tensor_bytes import record_tensor_bytes

    n = dist.get_world_size()
    layers, width, _ = SMALL
    layer = 12 * width**2 + 13 * width
    head = 2 * width + 2
    shares = [-(-elements // n) for elements in [layer] * layers + [head]]
    with record_tensor_bytes() as record:
        _state, step, optimizer = job(kind, options, SMALL, "relu")
        step(), step()
        with record.label("step"):
            step()
        optimizer.zero_grad()
        between = record.end
    return {
        "peak": record.peak_of("step"),
        "between": between,
        "formula": 2 * 4 * sum(shares),
    }
