"""Training on more GPUs than you have, simulated message by message.

    >>> from course_utils import simulator
    >>> pod = simulator.CLUSTERS["H100, InfiniBand"].with_nodes(2)
    >>> run = simulator.all_reduce(pod, 1e9, "ring")
    >>> print(f"{pod.gpus} GPUs, {1e3 * run.seconds:.2f} ms")
    16 GPUs, 4.70 ms

The model, which is the α–β model of lesson 01 with ports:

- A GPU sends one message at a time and receives one at a time; it may do both at once.
- A message of b bytes keeps both ports busy for b / bandwidth seconds, and arrives a
  latency later. The sender may send its next message in the meantime.
- A GPU sends when it has what it sends. Adding up what came in costs no time.
- Bytes between nodes go through the node's network cards. GPUs that use them at the
  same time have an equal share each.

Not modelled: switches that are too small for all nodes at once, protocols, the time to
start a kernel. Real collectives are slower, at small sizes much slower: compare with
`costs.bus_bandwidth` of a measurement. For uniform clusters the results are those of
the closed formulas in `course_utils.theory.costs`; with a slow GPU or link there is no
formula, and that is what a simulator is for.

Sizes are bytes, times are seconds, bandwidths are bytes a second. Needs NumPy.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

import numpy as np

from course_utils.theory import costs
from course_utils.theory.arguments import (
    Count,
    NotNegative,
    Positive,
    Share,
    Whole,
    checked,
    fitting,
    one_of,
)
from course_utils.theory.costs import AlphaBeta, link
from course_utils.theory.models import MODELS, Model, ModelLayer, transformer  # noqa: F401
from course_utils.theory.pipelines import pipeline_step  # noqa: F401

# --- the cluster ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs, the links between them, and how fast they compute.

    Attributes:
        name: For a reader.
        nodes, gpus_per_node: How many there are. Rank r is on node
            `r // gpus_per_node`.
        inside: A message between two GPUs of a node: its latency, and the bandwidth of
            a GPU, one way.
        between: A message between two nodes: its latency, and the bandwidth of *one*
            network card, one way.
        cards: Network cards of a node.
        flops: Floating point operations a second of one GPU, at the most.
        source: Where these figures are from.
    """

    name: str
    nodes: int
    gpus_per_node: int
    inside: AlphaBeta
    between: AlphaBeta
    cards: int
    flops: float
    source: str = ""

    def __post_init__(self) -> None:
        for what in ("nodes", "gpus_per_node", "cards"):
            fitting(getattr(self, what), what, Count)

    @property
    def gpus(self) -> int:
        """The world size."""
        return self.nodes * self.gpus_per_node

    def with_nodes(self, nodes: int) -> "Cluster":
        """The same with another number of nodes."""
        return replace(self, nodes=nodes)

    def between_nodes(self, senders: int | np.ndarray) -> AlphaBeta:
        """A message to another node while `senders` GPUs of its node send one each.

        One GPU alone can use all cards of its node: libraries split its message (NCCL
        makes a ring for every card).
        """
        share = self.between.bandwidth * self.cards / senders
        return AlphaBeta(self.between.latency, share)

    def check_ranks(self, ranks: Iterable[int], what: str) -> None:
        """Raise a `ValueError` if one of these ranks is not in the cluster."""
        for rank in ranks:
            if not 0 <= rank < self.gpus:
                raise ValueError(
                    f"{what} names rank {rank}, but the ranks are 0 to {self.gpus - 1}."
                )


# Latencies: NCCL's own model, one step of a ring with the protocol "Simple".
_NCCL = "latencies: NCCL 2.10, src/graph/tuning.cc"
_NVLINK, _PCI, _NET = 3.4e-6, 5.7e-6, 9.6e-6


def _pod(name: str, node: dict, between: str, cards: int, source: str) -> Cluster:
    source = f"{node['source']}; {source}; {_NCCL}"
    network = AlphaBeta(_NET, link(between).one_way)
    own = {"name": name, "nodes": 1, "between": network, "cards": cards}
    return Cluster(**{**node, **own, "source": source})


_A100 = {
    "gpus_per_node": 8,
    "inside": AlphaBeta(_NVLINK, link("NVLink 3 (A100)").one_way),
    "flops": 312e12,
    "source": "8 GPUs: NVIDIA A100 80GB SXM data sheet (NVLink, 312 TFLOP/s in "
    "bfloat16)",
}
_H100 = {
    "gpus_per_node": 8,
    "inside": AlphaBeta(_NVLINK, link("NVLink 4 (H100, H200)").one_way),
    "flops": 989e12,
    "source": "8 GPUs: NVIDIA H100 SXM data sheet (NVLink, 989 TFLOP/s in bfloat16, "
    "dense)",
}
_A100_PCIE = {
    "gpus_per_node": 4,
    "inside": AlphaBeta(_PCI, link("PCIe Gen4 x16").one_way),
    "flops": 312e12,
    "source": "4 GPUs: NVIDIA A100 80GB PCIe data sheet (PCIe Gen4, 312 TFLOP/s in "
    "bfloat16)",
}
_HDR = "8 cards: NVIDIA DGX A100 data sheet (HDR, 200 Gb/s)"
_NDR = "8 cards: NVIDIA DGX H100 data sheet (NDR, 400 Gb/s)"
_SMALL = "1 card of 100 Gb/s: chosen, for a small cluster"
_DESK = "1 card of 10 Gb/s: chosen, for a workstation"

_PODS = (
    _pod("A100, InfiniBand", _A100, "InfiniBand HDR", 8, _HDR),
    _pod("H100, InfiniBand", _H100, "InfiniBand NDR", 8, _NDR),
    _pod("A100, Ethernet", _A100, "100 Gigabit Ethernet", 1, _SMALL),
    _pod("A100 on PCIe, Ethernet", _A100_PCIE, "10 Gigabit Ethernet", 1, _DESK),
)
CLUSTERS: Mapping[str, Cluster] = MappingProxyType({pod.name: pod for pod in _PODS})


# --- one all-reduce -------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a simulated collective did.

    Attributes:
        seconds: When the last GPU had its result.
        finished: When each GPU had it. Where GPUs behave alike, and were not simulated
            one by one, it is the time of the last one.
        sent: Bytes that each GPU sent.
        rounds: How many messages the busiest GPU sent one after the other.
    """

    seconds: float
    finished: np.ndarray = field(repr=False)
    sent: np.ndarray = field(repr=False)
    rounds: int


@checked
def all_reduce(
    cluster: Cluster,
    nbytes: NotNegative,
    algorithm: str = "ring",
    *,
    ready: Mapping[int, NotNegative] | None = None,
    slow_links: Mapping[tuple[int, int], Positive] | None = None,
) -> Run:
    """Simulate one all-reduce.

    Where nothing is late or slow, GPUs that behave alike in a ring are simulated once.

    Args:
        cluster, nbytes: On which GPUs, and of the tensor on each.
        algorithm: "naive", "tree", "halving-doubling", "ring" or "hierarchical": see
            the function of that name in this module.
        ready: Seconds at which GPUs join that are late: `{rank: seconds}`. The others
            are ready at 0.
        slow_links: How many times slower than others a link is, by the two ranks:
            `{(3, 4): 10}` for what rank 3 sends to rank 4.

    Raises:
        ValueError: there is no such algorithm or rank, or the algorithm cannot run on
            that many GPUs.

    Cost: an algorithm of k rounds on n GPUs takes k operations on arrays of n numbers:
    about 0.5 s for a ring of 10,000 in which something is late or slow.
    """
    algorithm = one_of(algorithm, "algorithm", ALGORITHMS)
    network = _Network(cluster, ready or {}, slow_links or {})
    return ALGORITHMS[algorithm](network, nbytes)


@checked
def all_gather(cluster: Cluster, nbytes: NotNegative) -> Run:
    """Simulate one all-gather in a ring: n-1 rounds, half of a ring all-reduce.

    A reduce-scatter sends the same messages, and adding up costs no time: it takes as
    long. `nbytes` is what each GPU has in the end (a reduce-scatter: in the beginning).
    """
    network = _Network(cluster, {}, {})
    network.ring(cluster.gpus - 1, nbytes / cluster.gpus)
    return network.result()


class _Network:
    """When each GPU has what it sends next, and what a round of messages does to it."""

    def __init__(
        self,
        cluster: Cluster,
        ready: Mapping[int, float],
        slow_links: Mapping[tuple[int, int], float],
    ) -> None:
        cluster.check_ranks(ready, "ready")
        cluster.check_ranks([r for pair in slow_links for r in pair], "slow_links")
        self.cluster, self.slow_links = cluster, slow_links
        self.uniform = not ready and not slow_links
        self.now = np.zeros(cluster.gpus)
        self.now[list(ready)] = list(ready.values())
        self.sent = np.zeros(cluster.gpus)
        self.rounds = 0
        # When each port is free again: out of a GPU, and into it.
        self._out, self._into = np.zeros(cluster.gpus), np.zeros(cluster.gpus)

    def result(self) -> Run:
        return Run(float(self.now.max()), self.now, self.sent, self.rounds)

    def paths(
        self, source: np.ndarray, target: np.ndarray, together: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Latency, and seconds a byte, of messages that are sent at the same time.

        `together`: how many GPUs of a node send to other nodes; counted if left out.
        """
        cluster = self.cluster
        home = source // cluster.gpus_per_node
        leaves = home != target // cluster.gpus_per_node
        if together is None:
            leaving = np.bincount(home[leaves], minlength=cluster.nodes)
            senders = np.maximum(leaving[home], 1)
        else:
            senders = together
        latency = np.where(leaves, cluster.between.latency, cluster.inside.latency)
        latency = latency.astype(float)  # a latency of 0 may be a whole number
        share = cluster.between_nodes(senders).bandwidth
        per_byte = 1 / np.where(leaves, share, cluster.inside.bandwidth)
        for (one, other), factor in self.slow_links.items():
            per_byte = np.where(
                (source == one) & (target == other), per_byte * factor, per_byte
            )
        return latency, per_byte

    def round(
        self,
        source: np.ndarray,
        target: np.ndarray,
        nbytes: float,
        together: int | None = None,
    ) -> None:
        """One message of each source. No GPU is twice among sources or targets."""
        latency, per_byte = self.paths(source, target, together)
        start = np.maximum(self.now[source], self._out[source])
        start = np.maximum(start, self._into[target] - latency)
        self._out[source] = start + nbytes * per_byte
        self._into[target] = self._out[source] + latency
        self.now[target] = np.maximum(self.now[target], self._into[target])
        self.sent[source] += nbytes
        self.rounds += 1

    def ring(self, rounds: int, nbytes: float, way: str = "all") -> None:
        """So many rounds in which everybody sends to the next one.

        `way`: "all" for one ring of all GPUs, "inside" for a ring in every node,
        "between" for a ring of the GPUs with the same local rank.
        """
        cluster = self.cluster
        ranks = np.arange(cluster.gpus).reshape(cluster.nodes, cluster.gpus_per_node)
        if way == "inside":
            ranks, together = ranks.T, 1
        elif way == "between":
            together = cluster.gpus_per_node
        else:
            ranks, together = ranks.reshape(-1, 1), 1
        latency, per_byte = self.paths(ranks, np.roll(ranks, -1, 0), together)
        if self.uniform:
            # What all nodes do alike, one node does; the same for GPUs of a node.
            one_by_one = cluster.gpus_per_node if cluster.nodes > 1 else 1
            alike = np.s_[:one_by_one] if way == "all" else np.s_[:1, :1]
            now = np.full_like(latency[alike], self.now[0])
            _steady_rounds(now, latency[alike], nbytes * per_byte[alike], rounds)
            self.now[:] = now.max()
        else:
            now = self.now[ranks]
            _ring_rounds(now, np.zeros_like(now), latency, nbytes * per_byte, rounds)
            self.now[ranks] = now
        self.sent += rounds * nbytes
        self.rounds += rounds


def _ring_rounds(
    now: np.ndarray,
    out: np.ndarray,
    latency: np.ndarray,
    busy: np.ndarray,
    rounds: int,
) -> None:
    """Rounds in which all send to the next one along axis 0; `now` and `out` change."""
    start, arrival = np.empty_like(now), np.empty_like(now)
    for _ in range(rounds):
        np.maximum(now, out, out=start)
        np.add(start, busy, out=out)
        np.add(out, latency, out=arrival)
        np.maximum(now[1:], arrival[:-1], out=now[1:])
        np.maximum(now[:1], arrival[-1:], out=now[:1])


def _steady_rounds(
    now: np.ndarray, latency: np.ndarray, busy: np.ndarray, rounds: int
) -> None:
    """The same. Once each time around the ring takes as long as the last, it is added.

    Every operation is a maximum or a sum: if all times have grown by the same amount,
    they will do so again.
    """
    out, lap = np.zeros_like(now), len(now)
    while rounds > lap:
        before, before_out = now.copy(), out.copy()
        _ring_rounds(now, out, latency, busy, lap)
        rounds -= lap
        grown = np.stack([now - before, out - before_out])
        if np.ptp(grown) <= 1e-12 * now.max():
            laps, rounds = divmod(rounds, lap)
            now += laps * grown.mean()
            out += laps * grown.mean()
            break
    _ring_rounds(now, out, latency, busy, rounds)


# --- the algorithms -------------------------------------------------------------


def naive(network: _Network, nbytes: float) -> Run:
    """Everybody sends all to rank 0, which adds up and sends the sum to everybody.

    2(n-1) messages of all bytes go through the ports of one GPU: 2((n-1)S/B + latency).
    """
    root = np.zeros(1, dtype=int)
    others = range(1, network.cluster.gpus)
    for rank in others:
        network.round(np.array([rank]), root, nbytes, together=1)
    for rank in others:
        network.round(root, np.array([rank]), nbytes, together=1)
    return network.result()


def tree(network: _Network, nbytes: float) -> Run:
    """A binomial tree: sums go up to rank 0, and the total comes down again.

    For n = 2^k: 2k(latency + S/B). In each round all bytes go over a link.
    """
    ranks = np.arange(network.cluster.gpus)
    distances = [2**k for k in range((network.cluster.gpus - 1).bit_length())]
    for distance in distances:
        children = ranks[ranks % (2 * distance) == distance]
        network.round(children, children - distance, nbytes)
    for distance in reversed(distances):
        children = ranks[ranks % (2 * distance) == distance]
        network.round(children - distance, children, nbytes)
    return network.result()


def halving_doubling(network: _Network, nbytes: float) -> Run:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    2 log2(n) latency + 2(n-1)/n S/B: few rounds, and each byte is sent as often as in a
    ring. For n = 2^k only. Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization
    of Collective Communication Operations in MPICH", IJHPCA 19 (2005), section 4.5.
    """
    gpus = network.cluster.gpus
    if gpus & (gpus - 1):
        raise ValueError(
            f"Halving-doubling needs a power of two of GPUs, not {gpus}. Libraries "
            "fold the surplus into the others first; here, use another algorithm."
        )
    ranks = np.arange(gpus)
    distances = [2**k for k in reversed(range(gpus.bit_length() - 1))]
    for step, distance in enumerate(distances, 1):
        network.round(ranks, ranks ^ distance, nbytes / 2**step)
    for step, distance in reversed(list(enumerate(distances, 1))):
        network.round(ranks, ranks ^ distance, nbytes / 2**step)
    return network.result()


def ring(network: _Network, nbytes: float) -> Run:
    """Reduce-scatter, then all-gather, in n chunks around one ring of all GPUs.

    2(n-1)(latency + S/(n B)). Source: P. Patarasuk, X. Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
    """
    gpus = network.cluster.gpus
    network.ring(2 * (gpus - 1), nbytes / gpus)
    return network.result()


def hierarchical(network: _Network, nbytes: float) -> Run:
    """Reduce-scatter in each node, ring all-reduce between nodes, all-gather in each.

    2(g-1) rounds in the nodes and 2(N-1) between them, instead of 2(gN-1).
    """
    cluster = network.cluster
    part = nbytes / cluster.gpus_per_node
    network.ring(cluster.gpus_per_node - 1, part, "inside")
    network.ring(2 * (cluster.nodes - 1), part / cluster.nodes, "between")
    network.ring(cluster.gpus_per_node - 1, part, "inside")
    return network.result()


ALGORITHMS: Mapping[str, Callable[[_Network, float], Run]] = MappingProxyType(
    {
        "naive": naive,
        "tree": tree,
        "halving-doubling": halving_doubling,
        "ring": ring,
        "hierarchical": hierarchical,
    }
)


# --- one step of DistributedDataParallel ----------------------------------------


@dataclass(frozen=True)
class Bucket:
    """One all-reduce of a step.

    Attributes:
        nbytes: Of its gradients.
        ready: When the last GPU had computed them.
        start, stop: When its all-reduce began and ended.
    """

    nbytes: float
    ready: float
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a simulated training step took.

    Attributes:
        seconds: Until all gradients are where they belong.
        compute: Of these, what a GPU that is not slow computes.
        exposed: Communication that no computing hides.
        communication: Seconds of all collectives together, hidden or not.
    """

    seconds: float
    compute: float
    exposed: float
    communication: float

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: 1 if n GPUs do n times the work of one."""
        return self.compute / self.seconds if self.seconds else 1.0


@dataclass(frozen=True, kw_only=True)
class Step(Timed):
    """A simulated step of DDP, from its first forward to its last averaged gradient.

    Attributes:
        waiting: What the slowest GPU computes longer than one that is not slow; this,
            `compute` and `exposed` are all `seconds`.
        forward: When the slowest GPU had finished its forward pass.
        buckets: The all-reduces, in their order.
    """

    waiting: float
    forward: float
    buckets: tuple[Bucket, ...]


@checked
def ddp_step(
    cluster: Cluster,
    model: Model,
    samples: Positive,
    *,
    utilization: Share = 0.5,
    algorithm: str = "ring",
    overlap: bool = True,
    bucket_bytes: Positive = costs.DDP_BUCKET,
    first_bucket_bytes: Positive = costs.DDP_FIRST_BUCKET,
    slow_gpus: Mapping[int, Positive] | None = None,
) -> Step:
    """Simulate one training step of DDP, with gradients in float32.

    The backward pass goes through the layers from the last to the first, and in a
    layer through its tensors, each with a share of the time as large as itself. A
    bucket that is full is all-reduced, one bucket after the other, while the backward
    pass goes on. Not modelled: the optimizer's step (the same on any number of GPUs),
    and that communication takes some of a GPU's cores.

    Args:
        samples: How many each GPU has in its batch.
        utilization: The share of the GPUs' FLOP/s that computing reaches. Megatron-LM
            reached 0.52 (arXiv 2104.04473); most jobs have less.
        algorithm: Of the all-reduce, as for `all_reduce`.
        overlap: Whether all-reduces go on during the backward pass; else they begin
            after it.
        bucket_bytes, first_bucket_bytes: As in DDP, whose defaults they have.
        slow_gpus: GPUs that compute so many times slower: `{rank: 1.2}`.

    Raises:
        ValueError: a GPU of `slow_gpus` is not there or is not slow, or all are slow.
    """
    slow_gpus = slow_gpus or {}
    cluster.check_ranks(slow_gpus, "slow_gpus")
    for rank, factor in slow_gpus.items():
        if factor < 1:
            raise ValueError(
                f"slow_gpus has {factor} for rank {rank}: expected 1 or more. A GPU "
                "that is faster than all others does not shorten a step."
            )
    if cluster.gpus == len(slow_gpus):
        raise ValueError("All GPUs are slow: lower utilization instead.")
    slowest = max(slow_gpus.values(), default=1.0)

    # A slow GPU delays every bucket: the slowest decides when a bucket is ready.
    speed = cluster.flops * utilization / slowest
    forward = samples * math.fsum(layer.flops for layer in model.layers) / speed
    ready, sizes, done = [], [], forward
    for layer in reversed(model.layers):
        seconds = 2 * samples * layer.flops / speed
        left = layer.parameters
        for numbers in reversed(layer.tensors):
            left -= numbers
            ready.append(done + seconds * (1 - left / layer.parameters))
            sizes.append(4 * numbers)
        done += seconds
    backward_ends = done

    seconds_of = cache(lambda nbytes: all_reduce(cluster, nbytes, algorithm).seconds)
    buckets: list[Bucket] = []
    free = 0.0 if overlap else backward_ends
    for members in costs.ddp_buckets(
        sizes, cap=bucket_bytes, first_cap=first_bucket_bytes
    ):
        nbytes = math.fsum(sizes[i] for i in members)
        start = max(free, ready[members[-1]])
        free = start + seconds_of(nbytes)
        buckets.append(Bucket(nbytes, ready[members[-1]], start, free))

    seconds = max(backward_ends, free)
    compute = backward_ends / slowest
    return Step(
        seconds=seconds,
        compute=compute,
        waiting=backward_ends - compute,
        exposed=seconds - backward_ends,
        communication=math.fsum(b.stop - b.start for b in buckets),
        forward=forward,
        buckets=tuple(buckets),
    )


# --- one step of FSDP -----------------------------------------------------------


@dataclass(frozen=True)
class UnitEvent:
    """What happened to a unit in a step of FSDP, in seconds.

    Attributes:
        start, stop: When it began and ended.
        unit: The unit's name.
        kind: "all-gather", "forward", "backward", "reduce-scatter", or "free" for the
            moment from which on its whole parameters are gone (start = stop).
    """

    start: float
    stop: float
    unit: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class FsdpStep(Timed):
    """A simulated step of FSDP, from its first all-gather to its last reduce-scatter.

    Attributes:
        sent: Bytes that each GPU sends.
        whole: The most bytes of whole parameters that a GPU has at a time.
        events: What happened, in the order in which it began.
    """

    sent: float
    whole: float
    events: tuple[UnitEvent, ...] = field(repr=False)


@checked
def fsdp_step(
    cluster: Cluster,
    model: Model,
    samples: Positive,
    *,
    prefetch: Whole = 1,
    utilization: Share = 0.5,
) -> FsdpStep:
    """Simulate one training step of FSDP in float32, sharded over all GPUs.

    A unit is a layer. It is all-gathered, computes forward, and is freed; before its
    backward pass it is all-gathered again, and after it freed, and its gradient is
    reduce-scattered. Collectives are rings, and go on one after the other, in the order
    in which they were issued, while a unit computes. All-gathers of the next units are
    issued when a unit begins to compute, a reduce-scatter when its backward pass is
    done.

    With `prefetch=0`, each collective waits for the computing before it, and keeps the
    next waiting: `seconds = compute + 2·all-gathers + reduce-scatters`. The same holds
    if there is one unit only.

    A layer without parameters computes with those of the first layer, as the output
    layer of a GPT-2 does: the first unit then stays whole during the step, like the
    root unit of PyTorch's `fully_shard`.

    Not modelled: see `ddp_step`. Source of the order: FSDP, arXiv 2304.11277, sections
    3.2 and 3.3; torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.

    Args:
        samples: How many each GPU has in its batch.
        prefetch: How many units are gathered ahead of the one that computes.
        utilization: As for `ddp_step`.
    """
    layers = model.layers
    tied = any(layer.flops and not layer.parameters for layer in layers)
    names = [f"layer {place}" for place in range(len(layers))]
    sizes = [4 * layer.parameters for layer in layers]
    in_a_ring = cache(lambda nbytes: all_gather(cluster, nbytes))
    runs: list[Run] = []
    events: list[UnitEvent] = []
    # Of the units that are whole: when their all-gather began and ended.
    whole: dict[int, UnitEvent] = {}
    lives: list[tuple[float, float, int]] = []  # of whole units, with their bytes
    now = line_free = compute = 0.0

    def send(place: int, kind: str) -> UnitEvent:
        """Issue a collective: it begins when those before it are done."""
        nonlocal line_free
        runs.append(in_a_ring(sizes[place]))
        start = max(now, line_free)
        line_free = start + runs[-1].seconds
        events.append(UnitEvent(start, line_free, names[place], kind))
        return events[-1]

    def gather(places: Iterable[int]) -> None:
        for place in places:
            if place not in whole and sizes[place] and cluster.gpus > 1:
                whole[place] = send(place, "all-gather")

    forward = range(len(layers))
    for kind, order in (("forward", forward), ("backward", forward[::-1])):
        for number, place in enumerate(order):
            gather([place])
            # Nobody waits for a unit that is whole, or that has no parameters.
            start = max(now, whole[place].stop) if place in whole else now
            now = start
            gather(order[number + 1 : number + 1 + prefetch])
            flops = layers[place].flops * (1 if kind == "forward" else 2)
            seconds = flops * samples / (cluster.flops * utilization)
            now, compute = start + seconds, compute + seconds
            events.append(UnitEvent(start, now, names[place], kind))
            stays = kind == "forward" and tied and place == 0
            if place in whole and not stays:
                lives.append((whole.pop(place).start, now, sizes[place]))
                events.append(UnitEvent(now, now, names[place], "free"))
            if kind == "backward" and sizes[place] and cluster.gpus > 1:
                send(place, "reduce-scatter")
    seconds = max(now, line_free)
    return FsdpStep(
        seconds=seconds,
        compute=compute,
        exposed=seconds - compute,
        communication=math.fsum(run.seconds for run in runs),
        sent=math.fsum(float(run.sent.max()) for run in runs),
        # What is freed at a moment makes room for what is gathered from then on.
        whole=max(
            (
                sum(nbytes for begin, end, nbytes in lives if begin <= moment < end)
                for moment, _, _ in lives
            ),
            default=0,
        ),
        events=tuple(sorted(events, key=lambda event: (event.start, event.stop))),
    )
