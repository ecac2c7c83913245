"""DDP from scratch: a training step over PyTorch's own, and over the naive one.

Every rank has the same transformer twice, trains both on the same batches, in turns,
and compares the parameters afterwards. Time is that of the slowest rank; CPU time, of
all ranks together, is the steadier of the two.
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

ROUNDS = 25
LAYERS, WIDTH, TOKENS = 4, 256, 64


def rows(quick: bool = False) -> Iterator[Row]:
    """All rows, about 40 seconds of work on two cores."""
    rounds = 1 if quick else ROUNDS
    for n in (2, 4):
        with Ranks(n, quiet=True, timeout=300) as ranks:
            yield from ddp_rows(ranks, rounds)
            if n == 4:
                yield naive_row(ranks, rounds)


def ddp_rows(ranks: Ranks, rounds: int) -> Iterator[Row]:
    """A step of our DDP over one of PyTorch's: CPU time, and time."""
    turns, apart = ranks.run(train_in_turns, "own DDP", "torch DDP", rounds)[0]
    for what, goal in (("CPU time", 1.0), ("time", 1.08)):
        yield compared(*turns[what]).row(
            f"own DDP / torch DDP, transformer step, {what}, {ranks.n} ranks",
            goal,
            "torch's, with its defaults, copies the means back from its buckets; ours "
            "leaves them there, as with gradient_as_bucket_view=True",
            conditions=agreement(apart, ranks.n),
            detail={"largest_difference": apart},
        )


def naive_row(ranks: Ranks, rounds: int) -> Row:
    """A step that all-reduces each gradient after backward, over one of our DDP."""
    turns, apart = ranks.run(train_in_turns, "naive", "own DDP", rounds)[0]
    return compared(*turns["time"]).row(
        f"one all-reduce a parameter / own DDP, transformer step, {ranks.n} ranks",
        1.3,
        "what buckets and overlap save",
        better="higher",
        conditions={"parameters_within_1e-5": apart <= 1e-5},
    )


# ---------------------------------------------------------------------- on the ranks
def job(kind: str) -> tuple[Any, Callable[[], None]]:
    """A model, and the function that does one step with it."""
    import torch

    from course_utils.from_scratch import ddp

    bare = transformer(LAYERS, WIDTH)
    model, average = wrapped(kind, bare), {}
    if kind == "naive":
        ddp.broadcast_module(bare)
        average = {"after_backward": lambda: ddp.average_gradients(bare)}
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.01)
    return bare, stepper(model, optimizer, (2, TOKENS, WIDTH), **average)


def train_in_turns(kind: str, peer: str, rounds: int) -> tuple[Any, float]:
    """The turns, and how far the parameters are apart after as many steps of each."""
    model, step = job(kind)
    other, peer_step = job(peer)
    turns = in_turns(step, peer_step, rounds, warm_up=3)
    step()  # the peer's turn came once more
    return turns, largest_difference(model.parameters(), other.parameters())
