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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

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


def bubble_of_ideal(stages: int, micro_batches: int) -> float:
    """The idle time of a pipeline stage as a share of the time in which it works.

    `(p - 1) / m` for p stages and m micro-batches. The time without any idling is the
    "ideal" time. So this may be above 1, and it is more than `bubble_of_total` of the
    same pipeline: the same idle time, divided by less.

        >>> f"{bubble_of_ideal(stages=4, micro_batches=8):.1%}"
        '37.5%'

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", SC21, arXiv 2104.04473, section 2.2.

    Raises:
        ValueError: a number is not whole or below 1.
    """
    stages = count(stages, "stages", least=1)
    micro_batches = count(micro_batches, "micro_batches", least=1)
    return (stages - 1) / micro_batches


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
    117-124 (ring). `course_utils.theory.simulator` finds the same, message by message.

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
            f"There is no formula for {algorithm!r}. There are: {', '.join(seconds)}."
        )
    return seconds[algorithm]


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
    """

    name: str
    place: Place
    stated: str
    bytes_per_second: float
    direction: Direction
    source: str

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
        _NDR + "50 Gb/s",
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
    return _named(name, LADDER, "link")


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

    Attributes:
        parameters: Of the weights that compute.
        gradients: One for each of them.
        optimizer: What the optimizer keeps, with its float32 copy of the parameters
            where there is one.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    optimizer: Optimizer = "adam", precision: Precision = "mixed"
) -> ModelStates:
    """Bytes of model states for *one* parameter.

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

    Args:
        optimizer: "sgd" without momentum, "momentum" for SGD with it, "adam" for Adam
            and AdamW.
        precision: One of the above.

    Raises:
        ValueError: there is no such optimizer or precision.
    """
    _known(optimizer, "optimizer", _BUFFERS)
    _known(precision, "precision", _PRECISIONS)
    parameter, gradient, kept, master = _PRECISIONS[precision]
    return ModelStates(parameter, gradient, _BUFFERS[optimizer] * kept + master)


def _known(value: object, what: str, known: Collection[object]) -> None:
    if value not in known:
        listed = ", ".join(repr(one) for one in known)
        raise ValueError(f"{what} is {value!r}: expected one of {listed}.")


def zero_memory(
    parameters: float,
    *,
    gpus: int = 1,
    stage: int = 0,
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

    Args:
        parameters: Ψ, how many the model has.
        gpus: N.
        stage: 0, 1, 2 or 3.
        optimizer, precision: As in `state_bytes`.

    Raises:
        ValueError: there is no such stage, optimizer or precision, there is no GPU, or
            the number of parameters is negative.
    """
    size = not_negative(parameters, "parameters")
    n = count(gpus, "gpus", least=1)
    _known(stage, "stage", range(4))
    one = state_bytes(optimizer, precision)
    return ModelStates(
        one.parameters * size / (n if stage >= 3 else 1),
        one.gradients * size / (n if stage >= 2 else 1),
        one.optimizer * size / (n if stage >= 1 else 1),
    )


def shard_size(elements: int, world_size: int) -> int:
    """Elements of a shard: a `world_size`-th, rounded up, so that all are equal.

    The last shards hold padding where it does not divide.

        >>> shard_size(10, 4)
        3

    Raises:
        ValueError: a number is not whole or negative, or there is no rank.
    """
    elements = count(elements, "elements")
    return -(-elements // count(world_size, "world_size", least=1))


def shard_parts(
    sizes: Sequence[int], world_size: int
) -> list[list[tuple[int, int, int]]]:
    """What of which parameter lies in which shard, if they are flat, in one row.

        >>> shard_parts([3, 4], world_size=2)
        [[(0, 0, 3), (1, 0, 1)], [(1, 1, 4)]]

    Here rank 0 has all of parameter 0 and the first element of parameter 1, and rank 1
    the other three, and one element of padding.

    Args:
        sizes: Elements of each parameter.
        world_size: How many shards there are.

    Returns:
        For each rank: (place in `sizes`, first element, the element after the last).

    Raises:
        ValueError: a number is not whole or negative, or there is no rank.
    """
    sizes = [count(size, f"sizes[{place}]") for place, size in enumerate(sizes)]
    shard = shard_size(sum(sizes), world_size)
    parts: list[list[tuple[int, int, int]]] = []
    for rank in range(world_size):
        begin, end = rank * shard, (rank + 1) * shard
        parts.append([])
        first = 0  # of this parameter, in the row
        for place, size in enumerate(sizes):
            start, stop = max(begin - first, 0), min(end - first, size)
            if start < stop:
                parts[-1].append((place, start, stop))
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


def fsdp_memory(
    units: Sequence[int], world_size: int, *, prefetch: int = 0
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
        ValueError: there are no units, or a number makes no sense.
    """
    if not units:
        raise ValueError("There are no units: expected the size of at least one.")
    counts = [count(size, f"units[{place}]") for place, size in enumerate(units)]
    together = count(prefetch, "prefetch") + 1
    shards = [4 * shard_size(elements, world_size) for elements in counts]
    most = max(sum(shards[i : i + together]) for i in range(len(shards)))
    return FsdpMemory(sum(shards), world_size * most)


def activation_bytes(
    batch: int,
    sequence: int,
    width: int,
    heads: int,
    *,
    layers: int = 1,
    recompute: Recompute = "none",
    element_bytes: float = 2,
    vocabulary: int = 0,
) -> float:
    """Bytes that transformer layers keep from the forward for the backward pass.

    With s tokens, b sequences, width h and a heads: `sbh(34 + 5as/h)` for each layer
    in 16 bits. Of the 34, two bytes are the masks of the dropouts, one byte a
    number. 5as/h are the attention weights, which "selective" recomputation drops and
    computes again in the backward pass: 34sbh. "full" recomputation keeps the layer's
    input alone: 2sbh. What is computed again for one layer at a time comes on top.

        >>> gpt3 = {"batch": 1, "sequence": 2048, "width": 12288, "heads": 96}
        >>> f"{activation_bytes(**gpt3) / GB:.2f} GB"
        '2.87 GB'
        >>> selective = activation_bytes(**gpt3, recompute="selective")
        >>> f"saves {1 - selective / activation_bytes(**gpt3):.1%}"
        'saves 70.2%'

    Source: Korthikanti et al., arXiv 2205.05198, equation 1 and section 5. Layers
    without dropout, or with FlashAttention, keep less. The tests count the tensors that
    such a layer saves.

    Args:
        batch: b, on this GPU.
        sequence: s.
        width: h.
        heads: a.
        layers: How many there are.
        recompute: "none", "selective" or "full".
        element_bytes: Of a number that is no mask.
        vocabulary: Size v of an output layer, which is left out if 0: its input, that
            of the norm before it, and 4sbv for the loss, which is float32.

    Raises:
        ValueError: a number is not whole or below 1 (vocabulary: 0), or there is no
            such way to recompute.
    """
    tokens = count(batch, "batch", least=1) * count(sequence, "sequence", least=1)
    sbh = tokens * count(width, "width", least=1)
    weights = tokens * sequence * count(heads, "heads", least=1)
    e = positive(element_bytes, "element_bytes")
    kept = {
        "none": sbh * (16 * e + 2) + weights * (2 * e + 1),
        "selective": sbh * (16 * e + 2),
        "full": sbh * e,
    }
    _known(recompute, "recompute", kept)
    output = 0.0
    if count(vocabulary, "vocabulary"):
        output = 2 * sbh * e + 4 * tokens * vocabulary
    return count(layers, "layers", least=1) * kept[recompute] + output


def transformer_parameters(
    layers: int, width: int, vocabulary: int, positions: int = 0
) -> int:
    """Parameters of a GPT: `12Lh² + 13Lh + 2h + (V + positions)h`.

    A layer has 4h² weights in its attention and 8h² in its two linear layers of width
    4h, 9h biases, and two norms of 2h. One more norm follows. The output layer has
    the weights of the embedding.

        >>> f"{transformer_parameters(12, 768, 50257, 1024):,}"
        '124,439,808'

    Source: Narayanan et al., SC21, arXiv 2104.04473, equation 2, which leaves out the
    last norm. The tests count those of a real model.

    Args:
        layers: L.
        width: h.
        vocabulary: V, how many tokens there are.
        positions: Learned positions, if any.

    Raises:
        ValueError: a number is not whole, or below 1 (positions: 0).
    """
    depth, h = count(layers, "layers", least=1), count(width, "width", least=1)
    rows = count(vocabulary, "vocabulary", least=1) + count(positions, "positions")
    return 12 * depth * h**2 + 13 * depth * h + 2 * h + rows * h


@dataclass(frozen=True)
class TransformerShape:
    """A GPT of a published size.

    Attributes:
        name: For a reader.
        layers, width, heads: Of the transformer.
        vocabulary: How many tokens it knows.
        positions: How many it can see at once; each has a learned vector.
        source: Where these figures are from.
    """

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    source: str

    @property
    def parameters(self) -> int:
        """How many it has."""
        return transformer_parameters(
            self.layers, self.width, self.vocabulary, self.positions
        )


_GPT2 = "Radford et al. 2019, table 2, and the authors' code"
_MEGATRON = "Narayanan et al., SC21, arXiv 2104.04473, table 1"

# From the smallest to the largest.
TRANSFORMERS: tuple[TransformerShape, ...] = (
    TransformerShape("GPT-2 small", 12, 768, 12, 50257, 1024, _GPT2),
    TransformerShape("GPT-2 XL", 48, 1600, 25, 50257, 1024, _GPT2),
    *(
        TransformerShape(name, layers, width, heads, 51200, 2048, _MEGATRON)
        for name, layers, width, heads in (
            ("1.7 billion", 24, 2304, 24),
            ("3.6 billion", 30, 3072, 32),
            ("7.5 billion", 36, 4096, 32),
            ("18.4 billion", 40, 6144, 48),
            ("39.1 billion", 48, 8192, 64),
            ("76.1 billion", 60, 10240, 80),
            ("145.6 billion", 80, 12288, 96),
            ("310.1 billion", 96, 16384, 128),
            ("529.6 billion", 105, 20480, 128),
            ("1 trillion", 128, 25600, 160),
        )
    ),
)


def transformer_shape(name: str) -> TransformerShape:
    """The one of `TRANSFORMERS` with that name.

    Raises:
        ValueError: there is none. The names are listed.
    """
    return _named(name, TRANSFORMERS, "transformer")


@dataclass(frozen=True)
class Card:
    """A GPU, and the memory it has.

    Attributes:
        name: For a reader.
        stated: The memory in the words of those who sell it.
        nbytes: The total that nvidia-smi reports. It is more than what is stated in
            decimal GB, and the first CUDA call of a process takes some hundred MB.
        source: Where both figures are from.
    """

    name: str
    stated: str
    nbytes: int
    source: str


def _card(name: str, stated: str, mib: int, sheet: str, seen: str = "") -> Card:
    source = f"{sheet}: {stated}; nvidia-smi{seen}: {mib} MiB"
    return Card(name, stated, mib * MiB, source)


_SEEN = " (github.com/modal-labs/modal-client/pull/2797)"

# From the smallest to the largest.
CARDS: tuple[Card, ...] = (
    _card("T4", "16 GB", 15_360, "NVIDIA T4 datasheet", _SEEN),
    _card(
        "RTX 4090",
        "24 GB",
        24_564,
        "NVIDIA GeForce RTX 4090 specifications",
        " (github.com/vllm-project/vllm/issues/7553)",
    ),
    _card("A100 40GB", "40 GB", 40_960, "NVIDIA A100 datasheet, 40GB SXM", _SEEN),
    _card("H100", "80 GB", 81_559, _H100, _SEEN),
    _card("A100 80GB", "80 GB", 81_920, _A100, _SEEN),
    _card("H200", "141 GB", 143_771, _H200),
)


def card(name: str) -> Card:
    """The one of `CARDS` with that name.

    Raises:
        ValueError: there is none. The names are listed.
    """
    return _named(name, CARDS, "card")


def _named(name: str, things: Sequence[Any], what: str) -> Any:
    """The thing with that name, or a `ValueError` that lists all names."""
    for thing in things:
        if thing.name == name:
            return thing
    names = ", ".join(thing.name for thing in things)
    raise ValueError(f"There is no {what} {name!r} here. There are: {names}.")
