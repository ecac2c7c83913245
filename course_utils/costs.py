"""What training on many GPUs costs: closed formulas, and the speeds of real links.

    >>> from course_utils import costs
    >>> f"{costs.transfer_seconds(costs.MB, latency=10e-6, bandwidth=8e9):.6f} seconds"
    '0.000135 seconds'
    >>> costs.rank_of(node=1, local_rank=1, gpus_per_node=4)
    5

Sizes are bytes, times are seconds, bandwidths are bytes a second. Whoever has another
unit converts first: `gigabits(400)` for a link of 400 Gb/s. Arguments that make no
sense raise a `ValueError` that names them. Needs the standard library alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

# Decimal units count in thousands, binary units in 1024s (IEC 80000-13). Bandwidths
# and disks are given in decimal units, `nvidia-smi` and PyTorch's memory in binary.
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

BITS_PER_BYTE = 8

Direction = Literal["one way", "both ways together", "shared"]
Place = Literal["in a GPU", "in a node", "between nodes"]


# --- arguments ------------------------------------------------------------------


def number(value: object, what: str) -> float:
    """`value`, if it is a finite number; else a `ValueError` that names `what`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} is {value!r}: expected a number.")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}: expected a finite number.")
    return value


def not_negative(value: object, what: str) -> float:
    """`value`, if it is a number from 0 up; else a `ValueError` that names `what`."""
    if number(value, what) < 0:
        raise ValueError(f"{what} is {value}: expected 0 or more.")
    return value


def positive(value: object, what: str) -> float:
    """`value`, if it is a number above 0; else a `ValueError` that names `what`."""
    if number(value, what) <= 0:
        raise ValueError(f"{what} is {value}: expected more than 0.")
    return value


def count(value: object, what: str, *, least: int = 0) -> int:
    """`value`, if it is a whole number from `least` up; else a `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(
            f"{what} is {value!r}: expected a whole number from {least} up."
        )
    return int(value)


def gigabits(number: float) -> float:
    """Bytes in that many gigabits: `gigabits(400)` is 50e9.

    Networks are sold in bits (Gb/s, small b), memory and buses in bytes (GB/s).

    Raises:
        ValueError: `number` is negative, or no number.
    """
    return not_negative(number, "number") * 10**9 / BITS_PER_BYTE


# --- ranks ----------------------------------------------------------------------


def rank_of(node: int, local_rank: int, gpus_per_node: int) -> int:
    """The rank of a process among all: `node * gpus_per_node + local_rank`.

    All counts begin at 0, and every node has as many processes, as torchrun starts
    them with one `--nproc-per-node` for all.

    Source: torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html.

    Args:
        node: The node's number, its `--node-rank`.
        local_rank: The process's number on its node.
        gpus_per_node: Processes on every node, one for each GPU.

    Raises:
        ValueError: a number is not whole or negative, there is no GPU on a node, or
            `local_rank` is not on it.
    """
    node = count(node, "node")
    local_rank = count(local_rank, "local_rank")
    gpus_per_node = count(gpus_per_node, "gpus_per_node", least=1)
    if local_rank >= gpus_per_node:
        raise ValueError(
            f"local_rank is {local_rank}, but a node with {gpus_per_node} GPU(s) has "
            f"local ranks 0 to {gpus_per_node - 1}."
        )
    return node * gpus_per_node + local_rank


def node_and_local_rank(rank: int, gpus_per_node: int) -> tuple[int, int]:
    """Where a rank is: its node and its number there. Undoes `rank_of`.

        >>> node_and_local_rank(5, gpus_per_node=4)
        (1, 1)

    Raises:
        ValueError: a number is not whole or negative, or there is no GPU on a node.
    """
    rank = count(rank, "rank")
    return divmod(rank, count(gpus_per_node, "gpus_per_node", least=1))


# --- the time of one message ----------------------------------------------------


def transfer_seconds(nbytes: float, *, latency: float, bandwidth: float) -> float:
    """Seconds to move one message: `latency + nbytes / bandwidth`.

    This is the α–β model: α is the latency, and β the time for one byte, which is
    1 / bandwidth.

    Source: R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko
    CS-2", Parallel Computing 20 (1994) 389-398.

    Args:
        nbytes: The size of the message, in bytes.
        latency: Seconds that even an empty message takes.
        bandwidth: Bytes a second, in the direction of the message.

    Raises:
        ValueError: a number is negative, or the bandwidth is 0.
    """
    nbytes = not_negative(nbytes, "nbytes")
    latency = not_negative(latency, "latency")
    return latency + nbytes / positive(bandwidth, "bandwidth")


def half_bandwidth_bytes(*, latency: float, bandwidth: float) -> float:
    """The size at which a message gets half the bandwidth: `latency * bandwidth`.

    A smaller message mostly waits for the latency, a larger one for the bandwidth.

    Source: it follows from `transfer_seconds`, where both parts are equal at this size.

    Raises:
        ValueError: a number is negative, or the bandwidth is 0.
    """
    return not_negative(latency, "latency") * positive(bandwidth, "bandwidth")


def fit_transfer(sizes: Sequence[float], seconds: Sequence[float]) -> "Transfer":
    """The latency and bandwidth that explain measured times best.

    Least squares of the *relative* errors: with sizes from bytes to megabytes the
    largest would otherwise decide alone, and the latency would be lost. A latency is
    never below 0.

    Args:
        sizes: Bytes of each message, of at least two different sizes.
        seconds: How long each took.

    Raises:
        ValueError: there are not as many sizes as times, fewer than two different
            sizes, a time that is not above 0, or times that do not grow with the size.
    """
    if len(sizes) != len(seconds):
        raise ValueError(
            f"There are {len(sizes)} sizes and {len(seconds)} times: expected as many "
            "times as sizes."
        )
    sizes = [not_negative(size, "a size") for size in sizes]
    seconds = [positive(time, "a time") for time in seconds]
    if len(set(sizes)) < 2:
        raise ValueError(
            "A latency and a bandwidth need messages of at least 2 different sizes, "
            f"not {len(set(sizes))}."
        )
    # Minimise the sum of (latency/t + size*slope/t - 1)²: a line through the points
    # (a, b) = (1/t, size/t).
    aa = math.fsum(1 / t**2 for t in seconds)
    ab = math.fsum(n / t**2 for n, t in zip(sizes, seconds, strict=True))
    bb = math.fsum((n / t) ** 2 for n, t in zip(sizes, seconds, strict=True))
    a = math.fsum(1 / t for t in seconds)
    b = math.fsum(n / t for n, t in zip(sizes, seconds, strict=True))
    below = aa * bb - ab * ab
    latency = (a * bb - b * ab) / below
    slope = (b * aa - a * ab) / below
    if latency < 0:
        latency, slope = 0.0, b / bb
    if slope <= 0:
        raise ValueError(
            "The times do not grow with the sizes, so there is no bandwidth in them. "
            "Measure larger messages, or more often."
        )
    return Transfer(latency, 1 / slope)


@dataclass(frozen=True)
class Transfer:
    """What `fit_transfer` found.

    Attributes:
        latency: In seconds.
        bandwidth: In bytes a second.
    """

    latency: float
    bandwidth: float

    def seconds(self, nbytes: float) -> float:
        """`transfer_seconds` of a message with these."""
        return transfer_seconds(nbytes, latency=self.latency, bandwidth=self.bandwidth)


# --- the time of a training run -------------------------------------------------


def training_seconds(
    tokens: float, parameters: float, *, gpus: int, flops_per_gpu: float
) -> float:
    """Seconds to train a language model once: `8 * tokens * parameters / (n * X)`.

    A token costs 2 operations a parameter in the forward pass, 4 in the backward
    pass, and 2 more to compute the activations once again in it.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", SC21, arXiv 2104.04473, section 5.1, which gives 34
    days for 300e9 tokens and 175e9 parameters on 1024 GPUs at 140e12 operations/s.

    Args:
        tokens: How many the model sees in training.
        parameters: Of the model.
        gpus: How many work on it.
        flops_per_gpu: Operations a second that one GPU *reaches*, not its peak.

    Raises:
        ValueError: a number is negative, or there is no GPU, or it does nothing.
    """
    work = 8 * not_negative(tokens, "tokens") * not_negative(parameters, "parameters")
    speed = count(gpus, "gpus", least=1) * positive(flops_per_gpu, "flops_per_gpu")
    return work / speed


# --- a model in stages, a batch in micro-batches ---------------------------------


def bubble_of_total(stages: int, micro_batches: int) -> float:
    """The share of the whole time in which a pipeline stage is idle.

    `(K - 1) / (M + K - 1)` for K stages that take equally long and M micro-batches.
    One micro-batch is the naive split: K stages are idle for (K - 1) / K of the time.

        >>> f"{bubble_of_total(stages=4, micro_batches=8):.1%}"
        '27.3%'

    Source: Huang et al., "GPipe", arXiv 1811.06965, section 2.3.

    Raises:
        ValueError: a number is not whole or below 1.
    """
    stages = count(stages, "stages", least=1)
    micro_batches = count(micro_batches, "micro_batches", least=1)
    return (stages - 1) / (micro_batches + stages - 1)


def bubble_of_ideal(stages: int, micro_batches: int, *, chunks: int = 1) -> float:
    """The idle time of a pipeline stage as a share of the time in which it works.

    `(p - 1) / m` for p stages and m micro-batches. The time without any idling is the
    "ideal" time. So this may be above 1, and it is more than `bubble_of_total` of the
    same pipeline: the same idle time, divided by less.

        >>> f"{bubble_of_ideal(stages=4, micro_batches=8):.1%}"
        '37.5%'

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", SC21, arXiv 2104.04473, section 2.2.

    Args:
        stages: Devices, one after the other.
        micro_batches: Parts of a batch.
        chunks: Pieces of the model on each device, in the interleaved schedule of
            section 2.2.2: the idle time is divided by it.

    Raises:
        ValueError: a number is not whole or below 1.
    """
    stages = count(stages, "stages", least=1)
    micro_batches = count(micro_batches, "micro_batches", least=1)
    return (stages - 1) / micro_batches / count(chunks, "chunks", least=1)


def pipeline_seconds(
    stage_seconds: float, stages: int, micro_batches: int, *, overhead: float = 0.0
) -> float:
    """Seconds for one batch: `(M + K - 1) * (stage_seconds / M + overhead)`.

    A stage works on one micro-batch after the other, and the last stage begins K - 1
    micro-batches after the first. More micro-batches fill the idle time, but each one
    costs the overhead again.

    Source: the schedule of GPipe, arXiv 1811.06965, figure 2c, with stages that take
    equally long, plus the overhead.

    Args:
        stage_seconds: What one stage computes for the whole batch.
        stages: K.
        micro_batches: M.
        overhead: Seconds that a micro-batch costs a stage whatever its size: starting
            the kernels, and the latency of the copy.

    Raises:
        ValueError: a number is negative, or a count is below 1.
    """
    stage_seconds = not_negative(stage_seconds, "stage_seconds")
    overhead = not_negative(overhead, "overhead")
    stages = count(stages, "stages", least=1)
    micro_batches = count(micro_batches, "micro_batches", least=1)
    return (micro_batches + stages - 1) * (stage_seconds / micro_batches + overhead)


def best_micro_batches(stage_seconds: float, stages: int, *, overhead: float) -> float:
    """Where `pipeline_seconds` is least: `sqrt((K - 1) * stage_seconds / overhead)`.

    Not rounded. The curve is flat around it, so any number nearby that divides the
    batch will do.

        >>> best_micro_batches(stage_seconds=0.1, stages=3, overhead=0.002)
        10.0

    Source: the derivative of `pipeline_seconds` by M, set to 0.

    Raises:
        ValueError: a number is negative, there is no stage, or no overhead: then more
            micro-batches are always better.
    """
    stage_seconds = not_negative(stage_seconds, "stage_seconds")
    stages = count(stages, "stages", least=1)
    return math.sqrt((stages - 1) * stage_seconds / positive(overhead, "overhead"))


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
        """Its time in the α–β model: every step takes one message's time.

        Args:
            latency: Seconds that even an empty message takes.
            bandwidth: Bytes a second that a rank can send, and receive at the same
                time.

        Raises:
            ValueError: a number is negative, or the bandwidth is 0.
        """
        return self.steps * transfer_seconds(
            self.message_nbytes, latency=latency, bandwidth=bandwidth
        )


def collective_cost(name: str, world_size: int, nbytes: float) -> CollectiveCost:
    """Messages, bytes and steps of a function in `from_scratch/collectives.py`.

        >>> naive = collective_cost("all_reduce_naive", world_size=4, nbytes=1000)
        >>> naive.messages, naive.nbytes, naive.most_sent, naive.steps
        (6, 6000, 3000, 6)
        >>> better = collective_cost("all_reduce", world_size=4, nbytes=1000)
        >>> better.messages, better.nbytes, better.most_sent, better.steps
        (24, 6000.0, 1500.0, 6)

    Source: the docstrings there; the tests count what is really sent.

    Args:
        name: "broadcast", "broadcast_tree", "scatter", "gather", "reduce",
            "all_gather", "reduce_scatter", "all_to_all", "all_reduce_naive" or
            "all_reduce".
        world_size: n, the number of ranks.
        nbytes: S, the size: of the tensor, or of a whole list, which is meant to have
            n pieces of one size.

    Raises:
        ValueError: there is no such function, no rank, or a negative size.
    """
    n = count(world_size, "world_size", least=1)
    size = not_negative(nbytes, "nbytes")
    others = n - 1
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
    if name not in counts:
        raise ValueError(
            f"There is no collective {name!r}. There are: {', '.join(counts)}."
        )
    messages, steps, one, sent, received = counts[name]
    if n == 1:
        sent = received = 0
    return CollectiveCost(
        messages, one, messages * one, sent * one, received * one, steps
    )


def bus_bandwidth_factor(collective: str, world_size: int) -> float:
    """Bytes that each link must carry at least, as a part of the size: busbw / algbw.

    Whatever the algorithm, an all-reduce of n ranks has to move 2(n-1)/n of the
    tensor through each rank's link, and a broadcast all of it through the root's. The
    factor does not hold for switches that add up the data themselves.

        >>> [bus_bandwidth_factor("all_reduce", n) for n in (1, 2, 4, 8)]
        [0.0, 1.0, 1.5, 1.75]

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.

    Args:
        collective: "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
            "broadcast" or "reduce".
        world_size: n, the number of ranks.

    Raises:
        ValueError: there is no such collective, or no rank.
    """
    n = count(world_size, "world_size", least=1)
    part = (n - 1) / n
    factors = {
        "all_reduce": 2 * part,
        "reduce_scatter": part,
        "all_gather": part,
        "all_to_all": part,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    if collective not in factors:
        raise ValueError(
            f"There is no collective {collective!r}. There are: {', '.join(factors)}."
        )
    return factors[collective]


def algorithm_bandwidth(nbytes: float, seconds: float) -> float:
    """Bytes a second as a user sees them: `nbytes / seconds`, "algbw".

    The size is that of the whole array: of all n pieces together for an all-gather
    (its output), a reduce-scatter (its input) and an all-to-all.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.

    Args:
        nbytes: The size S.
        seconds: What one call took.

    Raises:
        ValueError: a number is negative, or the time is 0.
    """
    return not_negative(nbytes, "nbytes") / positive(seconds, "seconds")


def bus_bandwidth(
    collective: str, world_size: int, nbytes: float, seconds: float
) -> float:
    """Bytes a second on each rank's link, "busbw": `factor * algorithm_bandwidth`.

    It can be compared with the bandwidth of the link, whatever the number of ranks.
    With one rank nothing moves, and the figure means nothing.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.

    Args:
        collective: As in `bus_bandwidth_factor`.
        world_size: The number of ranks.
        nbytes, seconds: As in `algorithm_bandwidth`.

    Raises:
        ValueError: there is no such collective, no rank, or a number makes no sense.
    """
    factor = bus_bandwidth_factor(collective, world_size)
    return factor * algorithm_bandwidth(nbytes, seconds)


# --- all-reduce, by algorithm ---------------------------------------------------


def all_reduce_seconds(
    algorithm: str,
    world_size: int,
    nbytes: float,
    *,
    latency: float,
    bandwidth: float,
) -> float:
    """Seconds of an all-reduce where every link is the same.

    With n ranks, a tensor of S bytes, latency α and bandwidth B:

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
    117-124 (ring). `course_utils.simulator` finds the same, message by message.

    Args:
        algorithm: One of these names.
        world_size: n, the number of ranks.
        nbytes: S, the size of the tensor.
        latency: α, seconds that even an empty message takes.
        bandwidth: B, bytes a second that a rank can send, and receive at the same time.

    Raises:
        ValueError: there is no such algorithm, a number makes no sense, or
            halving-doubling is asked of ranks that are no power of two.
    """
    n = count(world_size, "world_size", least=1)
    whole = transfer_seconds(nbytes, latency=0, bandwidth=bandwidth)
    latency = not_negative(latency, "latency")
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
    if algorithm not in seconds:
        raise ValueError(
            f"There is no formula for {algorithm!r}. There are: {', '.join(seconds)}; "
            "and hierarchical_seconds()."
        )
    return seconds[algorithm]


def hierarchical_seconds(
    nodes: int,
    gpus_per_node: int,
    nbytes: float,
    *,
    inside: "Transfer",
    between: "Transfer",
) -> float:
    """Seconds of an all-reduce in two levels, where all nodes and links are alike.

    Three parts, one after the other: a reduce-scatter in each node, a ring all-reduce
    between GPUs with the same local rank, and an all-gather in each node. With g GPUs
    on each of N nodes: `2(g-1)(α + S/(gB)) + 2(N-1)(α' + S/(gNB'))`.

    Source: the three parts are those of Horovod's hierarchical all-reduce
    (NCCLReduceScatter, MPIAllreduce, NCCLAllgather: github.com/horovod/horovod, pull
    request 411); the cost of each ring is that of `all_reduce_seconds`.

    Args:
        nodes: N.
        gpus_per_node: g.
        nbytes: S, the size of the tensor.
        inside: α and B of a message between GPUs of a node.
        between: α' and B' of a message to another node, while all g GPUs of a node send
            one. Where they share one network card, each has a g-th of it:
            `Cluster.between_nodes(g)` of the simulator.

    Raises:
        ValueError: a number makes no sense.
    """
    nodes = count(nodes, "nodes", least=1)
    gpus_per_node = count(gpus_per_node, "gpus_per_node", least=1)
    part = not_negative(nbytes, "nbytes") / gpus_per_node
    in_nodes = 2 * (gpus_per_node - 1) * inside.seconds(part)
    return in_nodes + 2 * (nodes - 1) * between.seconds(part / nodes)


def tree_wins_below(world_size: int, *, latency: float, bandwidth: float) -> float:
    """Bytes at which a tree and a ring take equally long; the tree wins below.

    `(n - 1 - d)·α·B / (d - (n-1)/n)` with d = ceil(log2 n). It is 0 up to 3 ranks:
    there, a ring has no more rounds than a tree.

        >>> f"{tree_wins_below(64, latency=5e-6, bandwidth=10e9):,.0f} bytes"
        '568,224 bytes'

    Source: "tree" and "ring" of `all_reduce_seconds`, set equal.

    Raises:
        ValueError: there is no rank, a number is negative, or the bandwidth is 0.
    """
    n = count(world_size, "world_size", least=1)
    half = half_bandwidth_bytes(latency=latency, bandwidth=bandwidth)
    depth = (n - 1).bit_length()
    more_rounds = n - 1 - depth
    return half * more_rounds / (depth - (n - 1) / n) if more_rounds else 0.0


# --- DDP ------------------------------------------------------------------------

# Of torch.nn.parallel.DistributedDataParallel: its `bucket_cap_mb=25`, and
# torch.distributed's _DEFAULT_FIRST_BUCKET_BYTES.
DDP_BUCKET, DDP_FIRST_BUCKET = 25 * MiB, 1 * MiB


def ddp_buckets(
    nbytes: Sequence[float],
    *,
    cap: float = DDP_BUCKET,
    first_cap: float = DDP_FIRST_BUCKET,
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

    Raises:
        ValueError: a size is negative, or a cap is not above 0.
    """
    limit = positive(first_cap, "first_cap")
    positive(cap, "cap")
    buckets: list[list[int]] = []
    members: list[int] = []
    held = 0.0
    for place, size in enumerate(nbytes):
        members.append(place)
        held += not_negative(size, f"nbytes[{place}]")
        if held >= limit:
            buckets.append(members)
            members, held, limit = [], 0.0, cap
    return [*buckets, members] if members else buckets


# --- the bandwidth ladder -------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One way for bytes to move, and how fast it is at most.

    Attributes:
        name: For a reader, such as "NVLink 4 (H100)".
        place: Where it is: inside a GPU, inside a node, or between nodes.
        stated: The speed in the words of those who sell it, with their unit.
        bytes_per_second: The same in bytes a second.
        direction: What that figure counts. "one way": each direction has as much.
            "both ways together": a direction has half of it. "shared": reads and
            writes share it, and either may take all of it.
        source: Where the figure is from.
        latency_seconds: Of an empty message, where the source states one.
    """

    name: str
    place: Place
    stated: str
    bytes_per_second: float
    direction: Direction
    source: str
    latency_seconds: float | None = None

    @property
    def one_way(self) -> float:
        """Bytes a second from here to there: the bandwidth for `transfer_seconds`."""
        both = self.direction == "both ways together"
        return self.bytes_per_second / (2 if both else 1)


def _pcie(generation: int, transfers: float) -> Link:
    """A slot of 16 lanes. Of 130 bits on a lane, 128 are data."""
    return Link(
        f"PCIe Gen{generation} x16",
        "in a node",
        f"{transfers / 1e9:g} GT/s a lane, 16 lanes",
        16 * transfers * 128 / 130 / BITS_PER_BYTE,
        "one way",
        f"PCI Express Base Specification {generation}.0: {transfers / 1e9:g} GT/s a "
        "lane and direction, 128b/130b encoding",
    )


_A100 = "NVIDIA A100 datasheet, A100 80GB SXM"
_H100 = "NVIDIA H100 datasheet, H100 SXM"
_H200 = "NVIDIA H200 datasheet, H200 SXM"
_ETHERNET = "IEEE 802.3: the rate is the name; full duplex"
_NDR = "NVIDIA DGX SuperPOD cabling guide, NDR overview: 4 lanes of "

# From the fastest to the slowest in each place.
LADDER: tuple[Link, ...] = (
    Link("HBM3e (H200)", "in a GPU", "4.8 TB/s", 4.8 * TB, "shared", _H200),
    Link("HBM3 (H100)", "in a GPU", "3.35 TB/s", 3.35 * TB, "shared", _H100),
    Link("HBM2e (A100 80GB)", "in a GPU", "2,039 GB/s", 2039 * GB, "shared", _A100),
    Link(
        "NVLink 4 (H100, H200)",
        "in a node",
        "900 GB/s",
        900 * GB,
        "both ways together",
        _H100 + "; that both ways count: NVIDIA H100 Tensor Core GPU Architecture "
        "white paper",
    ),
    Link(
        "NVLink 3 (A100)",
        "in a node",
        "600 GB/s",
        600 * GB,
        "both ways together",
        _A100 + "; that both ways count: NVIDIA A100 Tensor Core GPU Architecture "
        "white paper",
    ),
    _pcie(5, 32e9),
    _pcie(4, 16e9),
    Link(
        "InfiniBand NDR",
        "between nodes",
        "400 Gb/s",
        gigabits(400),
        "one way",
        _NDR + "100 Gb/s",
    ),
    Link(
        "InfiniBand HDR",
        "between nodes",
        "200 Gb/s",
        gigabits(200),
        "one way",
        _NDR + "50 Gb/s; latency: NVIDIA ConnectX-6 user manual, below 600 ns",
        latency_seconds=600e-9,
    ),
    Link(
        "400 Gigabit Ethernet",
        "between nodes",
        "400 Gb/s",
        gigabits(400),
        "one way",
        _ETHERNET,
    ),
    Link(
        "100 Gigabit Ethernet",
        "between nodes",
        "100 Gb/s",
        gigabits(100),
        "one way",
        _ETHERNET,
    ),
    Link(
        "10 Gigabit Ethernet",
        "between nodes",
        "10 Gb/s",
        gigabits(10),
        "one way",
        _ETHERNET,
    ),
)


def link(name: str) -> Link:
    """The rung of the `LADDER` with that name.

    Raises:
        ValueError: there is none. The names are listed.
    """
    for rung in LADDER:
        if rung.name == name:
            return rung
    names = ", ".join(rung.name for rung in LADDER)
    raise ValueError(f"There is no link {name!r} on the ladder. It has: {names}.")
