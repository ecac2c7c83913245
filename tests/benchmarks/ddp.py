"""DDP from scratch: a training step over PyTorch's own, and over the naive one.

Every rank has the same transformer twice, trains both on the same batches, in turns,
and compares the parameters afterwards. Time is that of the slowest rank; CPU time, of
all ranks together, is the steadier of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from course_utils.ranks import Ranks
from tests.benchmarks._harness import Row, compared

ROUNDS = 25
LAYERS, WIDTH, TOKENS = 4, 256, 64


def rows() -> Iterator[Row]:
    """All rows, about 40 seconds of work on two cores."""
    for n in (2, 4):
        with Ranks(n, quiet=True, timeout=300) as ranks:
            yield from ddp_rows(ranks, ROUNDS)
            if n == 4:
                yield naive_row(ranks, ROUNDS)


def ddp_rows(ranks: Ranks, rounds: int) -> Iterator[Row]:
    """A step of our DDP over one of PyTorch's: CPU time, and time."""
    turns, apart = ranks.run(train_in_turns, "own", "torch", rounds)[0]
    condition = (
        {"parameters_equal": apart == 0.0}
        if ranks.n == 2
        else {"parameters_within_1e-5": apart <= 1e-5}
    )
    for what, values, peers, goal in (
        ("CPU time", turns.cpu, turns.peer_cpu, 1.0),
        ("time", turns.seconds, turns.peer_seconds, 1.08),
    ):
        found = compared(values, peers)
        yield Row(
            f"own DDP / torch DDP, transformer step, {what}, {ranks.n} ranks",
            found.ratio,
            "x",
            found.aa,
            goal,
            found.samples,
            "torch's, with its defaults, copies the means back from its buckets; ours "
            "leaves them there, as with gradient_as_bucket_view=True",
            conditions=condition,
            detail={
                "seconds": found.measured,
                "peer_seconds": found.peer,
                "largest_difference": apart,
            },
        )


def naive_row(ranks: Ranks, rounds: int) -> Row:
    """A step that all-reduces each gradient after backward, over one of our DDP."""
    turns, apart = ranks.run(train_in_turns, "naive", "own", rounds)[0]
    found = compared(turns.seconds, turns.peer_seconds)
    return Row(
        f"one all-reduce a parameter / own DDP, transformer step, {ranks.n} ranks",
        found.ratio,
        "x",
        found.aa,
        1.3,
        found.samples,
        "what buckets and overlap save",
        better="higher",
        conditions={"parameters_within_1e-5": apart <= 1e-5},
        detail={"seconds": found.measured, "peer_seconds": found.peer},
    )


# ---------------------------------------------------------------------- on the ranks
def transformer() -> Any:
    """A small encoder with two classes of output, always with the same weights."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True
    )
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Linear(WIDTH, 2))


def stepper(kind: str) -> tuple[Any, Any]:
    """A model, and the function that does one step with it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from course_utils.from_scratch import ddp

    bare = transformer()
    if kind == "own":
        model = ddp.DDP(bare)
    elif kind == "torch":
        model = DistributedDataParallel(bare)
    else:
        ddp.broadcast_module(bare)
        model = bare
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        inputs = torch.randn(2, TOKENS, WIDTH, generator=batches)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if kind == "naive":
            ddp.average_gradients(bare)
        optimizer.step()

    return bare, step


def train_in_turns(kind: str, peer: str, rounds: int) -> tuple[Any, float]:
    """The turns, and how far the parameters are apart after as many steps of each."""
    import torch
    import torch.distributed as dist

    from tests.benchmarks._turns import in_turns

    model, step = stepper(kind)
    other, peer_step = stepper(peer)
    turns = in_turns(step, peer_step, rounds, warm_up=3)
    step()  # the peer's turn came once more
    apart = torch.stack(
        [
            (a - b).abs().max().double()
            for a, b in zip(model.parameters(), other.parameters(), strict=True)
        ]
    ).max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return turns, apart.item()
