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

ROUNDS = 10
LAYERS, WIDTH, TOKENS = 4, 512, 8  # for time: FSDP moves more than it computes
SMALL = (4, 256, 64)  # for bytes: the model of the DDP benchmark

# What is under way is bounded by one gathering, and one reduce-scatter that is awaited.
PREFETCHING = {"prefetch": 1, "max_reduces": 0}
FRUGAL = {"prefetch": 0, "max_reduces": 0}

GLOO = (
    "gloo's reduce-scatter, which FSDP2 uses, is an all-reduce and a slice, and its "
    "all-gather copies; ours sends each part to its owner directly. With NCCL both use "
    "NCCL's, and this gain is gone"
)


def rows() -> Iterator[Row]:
    """All rows, about two minutes of work on two cores."""
    for n, goal in ((2, 0.75), (4, 0.60)):
        with Ranks(n, quiet=True, timeout=300) as ranks:
            yield from time_rows(ranks, "fsdp2", goal, GLOO)
            yield from time_rows(
                ranks,
                "ddp",
                None,
                "1.5 times the bytes of DDP, and a third of the memory",
            )
            yield from byte_rows(ranks)


def time_rows(
    ranks: Ranks, peer: str, goal: float | None, note: str, rounds: int = ROUNDS
) -> Iterator[Row]:
    """A step of our FSDP over one of a peer: time, and CPU time."""
    turns, apart = ranks.run(train_in_turns, "own", peer, PREFETCHING, rounds)[0]
    same = (
        {"parameters_equal": apart == 0.0}
        if ranks.n == 2
        else {"parameters_within_1e-5": apart <= 1e-5}
    )
    for what, values, peers, limit in (
        ("time", turns.seconds, turns.peer_seconds, goal),
        ("CPU time", turns.cpu, turns.peer_cpu, None),
    ):
        found = compared(values, peers)
        yield Row(
            f"own FSDP / {NAMES[peer]}, transformer step, {what}, {ranks.n} ranks",
            found.ratio,
            "x",
            found.aa,
            limit,
            found.samples,
            note,
            conditions=same,
            detail={
                "seconds": found.measured,
                "peer_seconds": found.peer,
                "largest_difference": apart,
            },
        )


def byte_rows(ranks: Ranks) -> Iterator[Row]:
    """Bytes of a step at most, and between steps."""
    peers = [
        bytes_of
        for bytes_of in (ranks.run(bytes_of_steps, "fsdp2", {})[0] for _ in "12")
    ]
    aa = peers[1]["peak"] / peers[0]["peak"]
    for what, options, goal in (
        ("without prefetch", FRUGAL, 0.90),
        ("with prefetch", PREFETCHING, 1.05),
        ("with prefetch, a reduce-scatter under way", {}, None),
        ("reduce-scatters piling up", {"max_reduces": None}, None),
    ):
        own = ranks.run(bytes_of_steps, "own", options)[0]
        yield Row(
            f"own FSDP / FSDP2, peak bytes of tensors, {what}, {ranks.n} ranks",
            own["peak"] / peers[0]["peak"],
            "x",
            aa,
            goal,
            1,
            "gloo's own buffers, of which FSDP2 needs more, are not counted",
            detail={"bytes": own["peak"], "peer_bytes": peers[0]["peak"]},
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
NAMES = {"fsdp2": "FSDP2", "ddp": "torch DDP"}


def transformer(layers: int, width: int, activation: str) -> Any:
    """A small encoder with two classes of output, always with the same weights.

    Parameters can be compared after some steps if the activation is smooth. Where relu
    gets zero but for rounding, the order of additions decides whether it is on.
    """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, activation=activation, batch_first=True
    )
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Linear(width, 2))


def job(
    kind: str,
    options: dict[str, Any],
    size: tuple[int, int, int],
    activation: str = "gelu",
) -> tuple[Any, Callable[[], dict], Callable[[], None], Any]:
    """A model, what gives its whole parameters, what does a step, the optimizer."""
    import warnings

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from course_utils.from_scratch import fsdp

    # FSDP2 warns of outputs that are views: nothing here changes them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    layers, width, tokens = size
    bare = transformer(layers, width, activation)
    units = bare[0].layers
    if kind == "own":
        model = fsdp.FSDP(bare, units, **options)
        state = model.state_dict
    elif kind == "fsdp2":
        for unit in units:
            fully_shard(unit, **options)
        model = fully_shard(bare, **options)

        def state() -> dict:
            return {k: v.full_tensor() for k, v in model.state_dict().items()}
    else:
        model, state = DistributedDataParallel(bare), bare.state_dict
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        inputs = torch.randn(2, tokens, width, generator=batches)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, state, step, optimizer


def train_in_turns(
    kind: str, peer: str, options: dict[str, Any], rounds: int
) -> tuple[Any, float]:
    """The turns, and how far the parameters are apart after as many steps of each."""
    import torch
    import torch.distributed as dist

    from tests.benchmarks._turns import in_turns

    size = (LAYERS, WIDTH, TOKENS)
    _, state, step, _ = job(kind, options, size)
    _, peer_state, peer_step, _ = job(peer, {}, size)
    turns = in_turns(step, peer_step, rounds, warm_up=3)
    step()  # the peer's turn came once more
    one, other = state(), peer_state()
    apart = torch.stack([(one[k] - other[k]).abs().max().double() for k in one]).max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return turns, apart.item()


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
        _model, _, step, optimizer = job(kind, options, SMALL, "relu")
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
