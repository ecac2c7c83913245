"""What training on many GPUs costs: closed formulas, and the speeds of real links.

    >>> from course_utils import costs
    >>> f"{costs.transfer_seconds(costs.MB, latency=10e-6, bandwidth=8e9):.6f} seconds"
    '0.000135 seconds'
    >>> costs.rank_of(node=1, local_rank=1, gpus_per_node=4)
    5

Sizes are bytes, times are seconds, bandwidths are bytes a second. Whoever has another
unit converts first: `gigabits(400)` for a link of 400 Gb/s. Signatures say what an
argument may be; another one raises a `ValueError` that names it. Needs the standard
library alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from course_utils.theory.arguments import (
    Count,
    NotNegative,
    Positive,
    Whole,
    checked,
    one_of,
)
from course_utils.theory.hardware import (  # noqa: F401
    CARDS,
    GB,
    KB,
    LADDER,
    MB,
    TB,
    Card,
    GiB,
    KiB,
    Link,
    MiB,
    TiB,
    card,
    gigabits,
    link,
)
from course_utils.theory.models import (  # noqa: F401
    TRANSFORMERS,
    TransformerShape,
    transformer_parameters,
    transformer_shape,
)

# --- ranks ----------------------------------------------------------------------


@checked
def rank_of(node: Whole, local_rank: Whole, gpus_per_node: Count) -> int:
    """The rank of a process among all: `node * gpus_per_node + local_rank`.

    All counts begin at 0, and every node has as many processes, as torchrun starts
    them with one `--nproc-per-node` for all.

    Source: torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html.

    Args:
        node: The node's number, its `--node-rank`.
        local_rank: The process's number on its node.
        gpus_per_node: Processes on every node, one for each GPU.

    Raises:
        ValueError: `local_rank` is not on the node.
    """
    if local_rank >= gpus_per_node:
        raise ValueError(
            f"local_rank is {local_rank}, but a node with {gpus_per_node} GPU(s) has "
            f"local ranks 0 to {gpus_per_node - 1}."
        )
    return node * gpus_per_node + local_rank


@checked
def node_and_local_rank(rank: Whole, gpus_per_node: Count) -> tuple[int, int]:
    """Where a rank is: its node and its number there. Undoes `rank_of`.

    >>> node_and_local_rank(5, gpus_per_node=4)
    (1, 1)
    """
    return divmod(rank, gpus_per_node)


# --- the time of one message ----------------------------------------------------


@checked
def transfer_seconds(
    nbytes: NotNegative, *, latency: NotNegative, bandwidth: Positive
) -> float:
    """Seconds to move one message: `latency + nbytes / bandwidth`.

    This is the α–β model: α is the latency, the seconds that even an empty message
    takes, and β the time for one byte, which is 1 / bandwidth.

    Source: R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko
    CS-2", Parallel Computing 20 (1994) 389-398.
    """
    return latency + nbytes / bandwidth


@checked
def half_bandwidth_bytes(*, latency: NotNegative, bandwidth: Positive) -> float:
    """The size at which a message gets half the bandwidth: `latency * bandwidth`.

    A smaller message mostly waits for the latency, a larger one for the bandwidth.

    Source: it follows from `transfer_seconds`, where both parts are equal at this size.
    """
    return latency * bandwidth


@dataclass(frozen=True)
class AlphaBeta:
    """A link, or what `fit_transfer` found.

    Attributes:
        latency: In seconds.
        bandwidth: In bytes a second.
    """

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        """`transfer_seconds` of a message with these."""
        return transfer_seconds(nbytes, latency=self.latency, bandwidth=self.bandwidth)


@checked
def fit_transfer(
    sizes: Sequence[NotNegative], seconds: Sequence[Positive]
) -> AlphaBeta:
    """The latency and bandwidth that explain measured times best.

    Least squares of the *relative* errors: with sizes from bytes to megabytes the
    largest would otherwise decide alone, and the latency would be lost. A latency is
    never below 0.

    Args:
        sizes: Bytes of each message, of at least two different sizes.
        seconds: How long each took.

    Raises:
        ValueError: there are not as many sizes as times, fewer than two different
            sizes, or times that do not grow with the size.
    """
    if len(sizes) != len(seconds):
        raise ValueError(
            f"There are {len(sizes)} sizes and {len(seconds)} times: expected as many "
            "times as sizes."
        )
    if len(set(sizes)) < 2:
        raise ValueError(
            "A latency and a bandwidth need messages of at least 2 different sizes, "
            f"not {len(set(sizes))}."
        )
    # Minimise the sum of (latency/t + size*slope/t - 1)²: a line through the points
    # (a, b) = (1/t, size/t).
    a = [1 / t for t in seconds]
    b = [n / t for n, t in zip(sizes, seconds, strict=True)]
    aa, bb = math.fsum(x * x for x in a), math.fsum(x * x for x in b)
    ab = math.fsum(x * y for x, y in zip(a, b, strict=True))
    below = aa * bb - ab * ab
    latency = (math.fsum(a) * bb - math.fsum(b) * ab) / below
    slope = (math.fsum(b) * aa - math.fsum(a) * ab) / below
    if latency < 0:
        latency, slope = 0.0, math.fsum(b) / bb
    if slope <= 0:
        raise ValueError(
            "The times do not grow with the sizes, so there is no bandwidth in them. "
            "Measure larger messages, or more often."
        )
    return AlphaBeta(latency, 1 / slope)


# --- the time of a training run -------------------------------------------------


@checked
def training_seconds(
    tokens: NotNegative,
    parameters: NotNegative,
    *,
    gpus: Count,
    flops_per_gpu: Positive,
) -> float:
    """Seconds to train a language model once: `8 * tokens * parameters / (n * X)`.

    A token costs 2 operations a parameter in the forward pass, 4 in the backward
    pass, and 2 more to compute the activations once again in it. `flops_per_gpu` is
    what a GPU *reaches*, not its peak.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", SC21, arXiv 2104.04473, section 5.1, which gives 34
    days for 300e9 tokens and 175e9 parameters on 1024 GPUs at 140e12 operations/s.
    """
    return 8 * tokens * parameters / (gpus * flops_per_gpu)


# --- a model in stages, a batch in micro-batches ---------------------------------


@checked
def bubble_of_total(stages: Count, micro_batches: Count) -> float:
    """The share of the whole time in which a pipeline stage is idle.

    `(K - 1) / (M + K - 1)` for K stages that take equally long and M micro-batches.
    One micro-batch is the naive split: K stages are idle for (K - 1) / K of the time.

        >>> f"{bubble_of_total(stages=4, micro_batches=8):.1%}"
        '27.3%'

    Source: Huang et al., "GPipe", arXiv 1811.06965, section 2.3.
    """
    return (stages - 1) / (micro_batches + stages - 1)


@checked
def bubble_of_ideal(stages: Count, micro_batches: Count, *, chunks: Count = 1) -> float:
    """The idle time of a pipeline stage as a share of the time in which it works.

    `(p - 1) / m` for p stages and m micro-batches, on p GPUs; an interleaved schedule
    with v smaller stages on each GPU divides it by v, the number of `chunks`. The time
    without any idling is the "ideal" time. So this may be above 1, and it is more than
    `bubble_of_total` of the same pipeline: the same idle time, divided by less.

        >>> f"{bubble_of_ideal(stages=4, micro_batches=8):.1%}"
        '37.5%'

    Source: Narayanan et al., SC21, arXiv 2104.04473, section 2.2.
    """
    return (stages - 1) / (micro_batches * chunks)


@checked
def pipeline_seconds(
    stage_seconds: NotNegative,
    stages: Count,
    micro_batches: Count,
    *,
    overhead: NotNegative = 0.0,
) -> float:
    """Seconds for one batch: `(M + K - 1) * (stage_seconds / M + overhead)`.

    A stage computes `stage_seconds` for the whole batch, one of M micro-batches after
    the other, and the last of K stages begins K - 1 micro-batches after the first. More
    micro-batches fill the idle time, but each one costs a stage the overhead again:
    starting the kernels, and the latency of the copy.

    Source: the schedule of GPipe, arXiv 1811.06965, figure 2c, with stages that take
    equally long, plus the overhead.
    """
    return (micro_batches + stages - 1) * (stage_seconds / micro_batches + overhead)


# --- collectives ----------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveCost:
    """What one call of a collective costs; see `collective_cost`.

    Attributes:
        messages: Sent by all ranks together.
        message_nbytes: Bytes of each message.
        nbytes: Bytes sent by all ranks together.
        most_sent: Bytes sent by the rank that sends most.
        most_received: Bytes received by the rank that receives most.
        steps: How often a rank has to wait for the next message, one after the other.
    """

    messages: int
    message_nbytes: float
    nbytes: float
    most_sent: float
    most_received: float
    steps: int

    def seconds(self, *, latency: float, bandwidth: float) -> float:
        """Its time: that of a message for each step. A rank sends while it receives."""
        return self.steps * transfer_seconds(
            self.message_nbytes, latency=latency, bandwidth=bandwidth
        )


@checked
def collective_cost(
    collective: str, world_size: Count, nbytes: NotNegative
) -> CollectiveCost:
    """Messages, bytes and steps of a function in `from_scratch/collectives.py`.

        >>> naive = collective_cost("all_reduce_naive", world_size=4, nbytes=1000)
        >>> naive.messages, naive.nbytes, naive.most_sent, naive.steps
        (6, 6000, 3000, 6)
        >>> better = collective_cost("all_reduce", world_size=4, nbytes=1000)
        >>> better.messages, better.nbytes, better.most_sent, better.steps
        (24, 6000.0, 1500.0, 6)

    Source: the docstrings there; the tests count what is really sent.

    Args:
        collective: "broadcast", "broadcast_tree", "scatter", "gather", "reduce",
            "all_gather", "reduce_scatter", "all_to_all", "all_reduce_naive" or
            "all_reduce".
        world_size: n, the number of ranks.
        nbytes: S, the size: of the tensor, or of a whole list, which is meant to have
            n pieces of one size.
    """
    n, size, others = world_size, nbytes, world_size - 1
    depth = others.bit_length()  # of the tree: ceil(log2(n))
    direct = (n * others, others, size / n, others, others)
    # name: (messages, steps, size of one, most sent by a rank, most received by one)
    counts = {
        "broadcast": (others, others, size, others, 1),
        "broadcast_tree": (others, depth, size, depth, 1),
        "scatter": (others, others, size / n, others, 1),
        "gather": (others, others, size / n, 1, others),
        "reduce": (others, others, size, 1, others),
        "all_gather": direct,
        "reduce_scatter": direct,
        "all_to_all": direct,
        "all_reduce_naive": (2 * others, 2 * others, size, others, others),
        "all_reduce": (2 * n * others, 2 * others, size / n, 2 * others, 2 * others),
    }
    messages, steps, one, sent, received = counts[
        one_of(collective, "collective", counts)
    ]
    if n == 1:
        sent = received = 0
    return CollectiveCost(
        messages, one, messages * one, sent * one, received * one, steps
    )


@checked
def bus_bandwidth_factor(collective: str, world_size: Count) -> float:
    """Bytes that the busiest link must carry at least, as a part of the size.

    It is busbw / algbw. Whatever the algorithm, an all-reduce of n ranks has to move
    2(n-1)/n of the tensor through a rank's link on average, so as much or more through
    the busiest; and a broadcast all of it through the root's. The factor does not hold
    for switches that add up the data themselves.

        >>> [bus_bandwidth_factor("all_reduce", n) for n in (1, 2, 4, 8)]
        [0.0, 1.0, 1.5, 1.75]

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.

    Args:
        collective: "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
            "broadcast" or "reduce".
        world_size: n, the number of ranks.
    """
    part = (world_size - 1) / world_size
    factors = {
        "all_reduce": 2 * part,
        "reduce_scatter": part,
        "all_gather": part,
        "all_to_all": part,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    return factors[one_of(collective, "collective", factors)]


@checked
def algorithm_bandwidth(nbytes: NotNegative, seconds: Positive) -> float:
    """Bytes a second as a user sees them: `nbytes / seconds`, "algbw".

    The size is that of the whole array: of all n pieces together for an all-gather
    (its output), a reduce-scatter (its input) and an all-to-all.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    return nbytes / seconds


def bus_bandwidth(
    collective: str, world_size: int, nbytes: float, seconds: float
) -> float:
    """Bytes a second on each rank's link, "busbw": `factor * algorithm_bandwidth`.

    It can be compared with the bandwidth of the link, whatever the number of ranks.
    With one rank nothing moves, and the figure means nothing.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    factor = bus_bandwidth_factor(collective, world_size)
    return factor * algorithm_bandwidth(nbytes, seconds)


# --- all-reduce, by algorithm ---------------------------------------------------


@checked
def all_reduce_seconds(
    algorithm: str,
    world_size: Count,
    nbytes: NotNegative,
    *,
    latency: NotNegative,
    bandwidth: Positive,
) -> float:
    """Seconds of an all-reduce where every link is the same.

    With n ranks, a tensor of S bytes, latency α, and a bandwidth B at which a rank can
    send, and receive at the same time:

    - "naive", all send to rank 0, which answers all: `2((n-1)S/B + α)`. The messages
      queue up at one port, so that their latencies overlap.
    - "tree", up a binomial tree and down again: `2·ceil(log2 n)·(α + S/B)`. Where n is
      no power of two, the tree is up to 2α faster than that.
    - "halving-doubling": `2·log2(n)·α + 2(n-1)/n·S/B`.
    - "ring": `2(n-1)(α + S/(nB))`.

        >>> link = {"latency": 5e-6, "bandwidth": 10e9}
        >>> for nbytes in (1_000, 1_000_000_000):
        ...     times = {
        ...         name: all_reduce_seconds(name, 64, nbytes, **link)
        ...         for name in ("naive", "tree", "halving-doubling", "ring")
        ...     }
        ...     print(min(times, key=times.get))
        naive
        halving-doubling

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
    Communication Operations in MPICH", IJHPCA 19 (2005) 49-66, section 4.5, without its
    cost of adding up (tree, halving-doubling); P. Patarasuk, X. Yuan, JPDC 69 (2009)
    117-124 (ring). `course_utils.theory.simulator` finds the same, message by message.

    Raises:
        ValueError: halving-doubling is asked of ranks that are no power of two.
    """
    n, whole = world_size, nbytes / bandwidth
    depth = (n - 1).bit_length()
    if algorithm == "halving-doubling" and n & (n - 1):
        raise ValueError(
            f"Halving-doubling needs a power of two of ranks, not {n}: use a ring."
        )
    if n == 1:
        latency = 0  # there is nobody to send to
    seconds = {
        "naive": 2 * ((n - 1) * whole + latency),
        "tree": 2 * depth * (latency + whole),
        "halving-doubling": 2 * depth * latency + 2 * (n - 1) / n * whole,
        "ring": 2 * (n - 1) * (latency + whole / n),
    }
    return seconds[one_of(algorithm, "formula for", seconds)]


@checked
def tree_wins_below(
    world_size: Count, *, latency: NotNegative, bandwidth: Positive
) -> float:
    """Bytes at which a tree and a ring take equally long; the tree wins below.

    `(n - 1 - d)·α·B / (d - (n-1)/n)` with d = ceil(log2 n). It is 0 up to 3 ranks:
    there, a ring has no more rounds than a tree.

        >>> f"{tree_wins_below(64, latency=5e-6, bandwidth=10e9):,.0f} bytes"
        '568,224 bytes'

    Source: "tree" and "ring" of `all_reduce_seconds`, set equal.
    """
    n, depth = world_size, (world_size - 1).bit_length()
    more_rounds = n - 1 - depth
    if not more_rounds:
        return 0.0
    return latency * bandwidth * more_rounds / (depth - (n - 1) / n)


# --- DDP ------------------------------------------------------------------------

# Of torch.nn.parallel.DistributedDataParallel: its `bucket_cap_mb=25`, and
# torch.distributed's _DEFAULT_FIRST_BUCKET_BYTES.
DDP_BUCKET, DDP_FIRST_BUCKET = 25 * MiB, 1 * MiB


@checked
def ddp_buckets(
    nbytes: Sequence[NotNegative],
    *,
    cap: Positive = DDP_BUCKET,
    first_cap: Positive = DDP_FIRST_BUCKET,
) -> list[list[int]]:
    """Which gradients DDP puts into which bucket.

    A bucket takes gradients until it has reached its cap, and is then closed: it may
    hold more than its cap, by up to one gradient. The first cap is smaller, so that the
    first all-reduce can begin early.

        >>> ddp_buckets([1 * MiB] * 4, cap=2 * MiB)
        [[0], [1, 2], [3]]

    Source: torch/csrc/distributed/c10d/reducer.cpp,
    compute_bucket_assignment_by_size; the tests compare with it. (DDP keeps a separate
    list of buckets for each data type and device.)

    Args:
        nbytes: The size of each gradient, in the order in which DDP expects them: the
            last parameter's first.
        cap: Bytes at which a bucket is closed.
        first_cap: The same for the first bucket.

    Returns:
        The places in `nbytes` of each bucket's gradients.
    """
    buckets: list[list[int]] = []
    members: list[int] = []
    held, limit = 0.0, first_cap
    for place, size in enumerate(nbytes):
        members.append(place)
        held += size
        if held >= limit:
            buckets.append(members)
            members, held, limit = [], 0.0, cap
    return [*buckets, members] if members else buckets


# --- where the memory goes ------------------------------------------------------

Optimizer = Literal["sgd", "momentum", "adam"]
Precision = Literal["float32", "bfloat16", "mixed"]
Recompute = Literal["none", "selective", "full"]

# Numbers that an optimizer keeps for each parameter: none, `momentum_buffer`, and
# `exp_avg` with `exp_avg_sq`.
_BUFFERS = {"sgd": 0, "momentum": 1, "adam": 2}
# Bytes of a parameter, of its gradient, of an optimizer's number, of a master copy.
_PRECISIONS = {
    "float32": (4, 4, 4, 0),
    "bfloat16": (2, 2, 2, 0),
    "mixed": (2, 2, 4, 4),
}


@dataclass(frozen=True)
class ModelStates:
    """Bytes that training keeps for a model, whatever the batch.

    `optimizer` includes the optimizer's float32 copy of the parameters, if it has one.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


@checked
def state_bytes(
    optimizer: Optimizer = "adam", precision: Precision = "mixed"
) -> ModelStates:
    """Bytes of model states for *one* parameter.

    Optimizers are "sgd" without momentum, "momentum" for SGD with it, and "adam" for
    Adam and AdamW. Precisions:

    - "float32": everything in float32. So is training under `torch.autocast`, which
      casts for single operations only.
    - "bfloat16": everything in bfloat16 (a model after `.bfloat16()`).
    - "mixed": parameters and gradients in 16 bits; the optimizer has a float32 copy of
      the parameters, and its own numbers in float32.

        >>> state_bytes("adam", "mixed")
        ModelStates(parameters=2, gradients=2, optimizer=12)
        >>> state_bytes("momentum", "float32").total
        12

    Source: ZeRO, arXiv 1910.02054, section 3.1 (2 + 2 + K with K = 12 for mixed
    precision and Adam); the tests count the bytes of torch.optim's.
    """
    parameter, gradient, kept, master = _PRECISIONS[precision]
    return ModelStates(parameter, gradient, _BUFFERS[optimizer] * kept + master)


@checked
def zero_memory(
    parameters: NotNegative,
    *,
    gpus: Count = 1,
    stage: Literal[0, 1, 2, 3] = 0,
    optimizer: Optimizer = "adam",
    precision: Precision = "mixed",
) -> ModelStates:
    """Bytes of model states on *each* GPU, by the stage of ZeRO.

    A stage divides among N GPUs what each of them would have a copy of: 1 the optimizer
    states, 2 the gradients as well, 3 the parameters as well (as FSDP does). Stage 0
    divides nothing: that is DDP. With Ψ parameters, mixed precision and Adam: 16Ψ;
    4Ψ + 12Ψ/N; 2Ψ + 14Ψ/N; 16Ψ/N.

        >>> for stage in range(4):
        ...     states = zero_memory(7.5e9, gpus=64, stage=stage)
        ...     print(f"stage {stage}: {states.total / GB:.3f} GB")
        stage 0: 120.000 GB
        stage 1: 31.406 GB
        stage 2: 16.641 GB
        stage 3: 1.875 GB

    Whole parameters that stage 3 gathers for a moment are not in it: see `fsdp_memory`.
    Activations are not in it either: see `activation_bytes`.

    Source: ZeRO, arXiv 1910.02054, section 5 and figure 1, which count in decimal GB.
    """
    one = state_bytes(optimizer, precision)
    return ModelStates(
        one.parameters * parameters / (gpus if stage >= 3 else 1),
        one.gradients * parameters / (gpus if stage >= 2 else 1),
        one.optimizer * parameters / (gpus if stage >= 1 else 1),
    )


@checked
def shard_size(elements: Whole, world_size: Count) -> int:
    """Elements of a shard: a `world_size`-th, rounded up, so that all are equal.

    The last shards hold padding where it does not divide.

        >>> shard_size(10, 4)
        3
    """
    return -(-elements // world_size)


@checked
def shard_parts(
    sizes: Sequence[Whole], world_size: Count
) -> list[list[tuple[int, int, int]]]:
    """What of which parameter lies in which shard, if they are flat, in one row.

        >>> shard_parts([3, 4], world_size=2)
        [[(0, 0, 3), (1, 0, 1)], [(1, 1, 4)]]

    Here rank 0 has all of parameter 0 and the first element of parameter 1, and rank 1
    the other three, and one element of padding.

    Returns:
        For each rank: (place in `sizes`, first element, the element after the last).
    """
    shard = shard_size(sum(sizes), world_size)
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(world_size)]
    first = 0  # of this parameter, in the row
    for place, size in enumerate(sizes):
        for rank in range(world_size):
            start = max(rank * shard - first, 0)
            stop = min((rank + 1) * shard - first, size)
            if start < stop:
                parts[rank].append((place, start, stop))
        first += size
    return parts


@dataclass(frozen=True)
class FsdpMemory:
    """Bytes of the parameters on each rank under FSDP; see `fsdp_memory`.

    Attributes:
        shards: What it always has: its shards, padding included.
        gathered: The most that whole parameters take at a time.
    """

    shards: float
    gathered: float

    @property
    def parameter_peak(self) -> float:
        """All shards, and what is gathered."""
        return self.shards + self.gathered


@checked
def fsdp_memory(
    units: Sequence[Whole], world_size: Count, *, prefetch: Whole = 0
) -> FsdpMemory:
    """Bytes of the parameters on each rank under FSDP, unit by unit, in float32.

    Each rank has a shard of every unit. A unit's parameters are whole while it
    computes: for units of ψᵢ bytes on F ranks, parameters take at most
    Σψᵢ/F + max ψᵢ.

        >>> memory = fsdp_memory([1000] * 10, world_size=4)
        >>> memory.parameter_peak / (4 * 10_000)
        0.35

    Source: FSDP, arXiv 2304.11277, section 3.2.1.

    Args:
        units: Parameters of each unit, in the order of the forward pass. FSDP2 pads
            each parameter by itself: pass what it has after padding.
        world_size: F.
        prefetch: Units that are gathered ahead of the one that computes.

    Raises:
        ValueError: there are no units.
    """
    if not units:
        raise ValueError("There are no units: expected the size of at least one.")
    shards = [4 * shard_size(elements, world_size) for elements in units]
    most = max(sum(shards[i : i + prefetch + 1]) for i in range(len(shards)))
    return FsdpMemory(sum(shards), world_size * most)


@checked
def activation_bytes(
    batch: Count,
    sequence: Count,
    width: Count,
    heads: Count,
    *,
    layers: Count = 1,
    recompute: Recompute = "none",
    element_bytes: Positive = 2,
    vocabulary: Whole = 0,
    tensor_parallel: Count = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that transformer layers keep from the forward for the backward pass.

    With b sequences of s tokens, width h and a heads: `sbh(34 + 5as/h)` for each layer
    in 16 bits. Of the 34, two bytes are the masks of the dropouts, one byte a
    number. 5as/h are the attention weights, which "selective" recomputation drops and
    computes again in the backward pass: 34sbh. "full" recomputation keeps the layer's
    input alone: 2sbh. What is computed again for one layer at a time comes on top.

    On t GPUs with tensor parallelism, `sbh(10 + 24/t + 5as/(ht))`: norms, dropouts and
    the inputs of the slices are whole. With sequence parallelism, all of it / t.

        >>> gpt3 = {"batch": 1, "sequence": 2048, "width": 12288, "heads": 96}
        >>> f"{activation_bytes(**gpt3) / GB:.2f} GB"
        '2.87 GB'
        >>> selective = activation_bytes(**gpt3, recompute="selective")
        >>> f"saves {1 - selective / activation_bytes(**gpt3):.1%}"
        'saves 70.2%'
        >>> slices = activation_bytes(**gpt3, tensor_parallel=8)
        >>> sequence = activation_bytes(
        ...     **gpt3, tensor_parallel=8, sequence_parallel=True
        ... )
        >>> f"{slices / GB:.2f} GB, {sequence / GB:.2f} GB"
        '0.58 GB, 0.36 GB'

    Source: Korthikanti et al., arXiv 2205.05198, table 2 and section 5. Layers
    without dropout, or with FlashAttention, keep less. The tests count the tensors that
    such a layer saves.

    Args:
        batch, sequence, width, heads: b, on this GPU; s; h; a.
        layers: How many there are.
        recompute: "none", "selective" or "full".
        element_bytes: Of a number that is no mask.
        vocabulary: Size v of an output layer, which is left out if 0: its input, that
            of the norm before it, and 4sbv for the loss, which is float32.
        tensor_parallel: How many GPUs share the layers and the output layer.
        sequence_parallel: Whether they share the sequence between these as well. With
            "full" recomputation the layer's input then is a slice, too.
    """
    tokens, e, t = batch * sequence, element_bytes, tensor_parallel
    shared = tokens * width / (t if sequence_parallel else 1)
    sliced, weights = tokens * width / t, tokens * sequence * heads / t
    selective = shared * (4 * e + 2) + sliced * 12 * e
    kept = {
        "none": selective + weights * (2 * e + 1),
        "selective": selective,
        "full": shared * e,
    }
    output = 2 * shared * e + 4 * tokens * vocabulary / t if vocabulary else 0.0
    return layers * kept[recompute] + output
