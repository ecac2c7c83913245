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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from course_utils.theory import costs
from course_utils.theory.costs import Transfer

Algorithm = str
_LARGEST = 20_000  # GPUs that are simulated one by one, unless told


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
    inside: Transfer
    between: Transfer
    cards: int
    flops: float
    source: str = ""

    def __post_init__(self) -> None:
        for what in ("nodes", "gpus_per_node", "cards"):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{what} is {value!r}: expected a whole number from 1 up."
                )

    @property
    def gpus(self) -> int:
        """The world size."""
        return self.nodes * self.gpus_per_node

    def with_nodes(self, nodes: int) -> "Cluster":
        """The same with another number of nodes."""
        return replace(self, nodes=nodes)

    def between_nodes(self, senders: int) -> Transfer:
        """A message to another node while `senders` GPUs of its node send one each.

        One GPU alone can use all cards of its node: libraries split its message (NCCL
        makes a ring for every card).
        """
        share = self.between.bandwidth * self.cards / senders
        return Transfer(self.between.latency, share)


# Latencies: NCCL's own model, one step of a ring with the protocol "Simple".
_NCCL = "latencies: NCCL 2.10, src/graph/tuning.cc, hwLat: Ring, Simple"
_NVLINK, _PCI, _NET = 3.4e-6, 5.7e-6, 9.6e-6


def _pod(name, *, inside, between, cards, flops, gpus=8, source) -> Cluster:
    return Cluster(
        name=name,
        nodes=1,
        gpus_per_node=gpus,
        inside=inside,
        between=between,
        cards=cards,
        flops=flops,
        source=f"{source}; {_NCCL}",
    )


_IN_A100 = Transfer(_NVLINK, costs.link("NVLink 3 (A100)").one_way)
_IN_H100 = Transfer(_NVLINK, costs.link("NVLink 4 (H100, H200)").one_way)
_A100_FLOPS, _H100_FLOPS = 312e12, 989e12  # bfloat16, dense: the data sheets
_A100 = "8 GPUs: NVIDIA A100 80GB SXM data sheet (NVLink, 312 TFLOP/s in bfloat16)"
_H100 = "8 GPUs: NVIDIA H100 SXM data sheet (NVLink, 989 TFLOP/s in bfloat16, dense)"

CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {
        pod.name: pod
        for pod in (
            _pod(
                "A100, InfiniBand",
                inside=_IN_A100,
                between=Transfer(_NET, costs.link("InfiniBand HDR").one_way),
                cards=8,
                flops=_A100_FLOPS,
                source=f"{_A100}; 8 cards: NVIDIA DGX A100 data sheet (HDR, 200 Gb/s)",
            ),
            _pod(
                "H100, InfiniBand",
                inside=_IN_H100,
                between=Transfer(_NET, costs.link("InfiniBand NDR").one_way),
                cards=8,
                flops=_H100_FLOPS,
                source=f"{_H100}; 8 cards: NVIDIA DGX H100 data sheet (NDR, 400 Gb/s)",
            ),
            _pod(
                "A100, Ethernet",
                inside=_IN_A100,
                between=Transfer(_NET, costs.link("100 Gigabit Ethernet").one_way),
                cards=1,
                flops=_A100_FLOPS,
                source=f"{_A100}; 1 card of 100 Gb/s: chosen, for a small cluster",
            ),
            _pod(
                "A100 on PCIe, Ethernet",
                inside=Transfer(_PCI, costs.link("PCIe Gen4 x16").one_way),
                between=Transfer(_NET, costs.link("10 Gigabit Ethernet").one_way),
                cards=1,
                flops=_A100_FLOPS,
                gpus=4,
                source="4 GPUs: NVIDIA A100 80GB PCIe data sheet (PCIe Gen4, 312 "
                "TFLOP/s in bfloat16); 1 card of 10 Gb/s: chosen, for a workstation",
            ),
        )
    }
)


# --- one all-reduce -------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a simulated collective did.

    Attributes:
        seconds: When the last GPU had its result.
        finished: When each GPU had it. One entry stands for all GPUs that behave alike
            where they were not simulated one by one.
        messages: How many messages there were, on all GPUs together.
        sent: Bytes that each GPU sent (entries as in `finished`).
        rounds: How many messages the busiest GPU sent one after the other.
    """

    seconds: float
    finished: np.ndarray = field(repr=False)
    messages: int
    sent: np.ndarray = field(repr=False)
    rounds: int


def all_reduce(
    cluster: Cluster,
    nbytes: float,
    algorithm: Algorithm = "ring",
    *,
    ready: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None,
    every_gpu: bool | None = None,
) -> Run:
    """Simulate one all-reduce.

    Args:
        cluster: On which GPUs.
        nbytes: Of the tensor on each.
        algorithm: "naive", "tree", "halving-doubling", "ring" or "hierarchical": see
            the function of that name in this module.
        ready: Seconds at which GPUs join that are late: `{rank: seconds}`. The others
            are ready at 0.
        slow_links: How many times slower than others a link is, by the two ranks:
            `{(3, 4): 10}` for what rank 3 sends to rank 4.
        every_gpu: Simulate GPUs that behave alike one by one, too. By default, up to
            20,000 GPUs, and always where something is late or slow.

    Raises:
        ValueError: there is no such algorithm or rank, a number is out of range, or
            the algorithm cannot run on that many GPUs.

    Cost: an algorithm of k rounds on n GPUs takes k operations on arrays of n numbers:
    about 0.5 s for a ring of 10,000.
    """
    if algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ValueError(
            f"There is no algorithm {algorithm!r}. The simulator has: {known}."
        )
    uniform = not ready and not slow_links
    if every_gpu is None:
        every_gpu = cluster.gpus <= _LARGEST or not uniform
    if not every_gpu and not uniform:
        raise ValueError(
            "every_gpu=False, but some GPUs are late or some links are slow: these do "
            "not behave like the others. Leave every_gpu out."
        )
    network = _Network(cluster, ready or {}, slow_links or {}, every_gpu)
    return ALGORITHMS[algorithm](network, costs.not_negative(nbytes, "nbytes"))


def all_gather(
    cluster: Cluster, nbytes: float, *, every_gpu: bool | None = None
) -> Run:
    """Simulate one all-gather in a ring: n-1 rounds, half of a ring all-reduce.

    A reduce-scatter sends the same messages, and adding up costs no time: it takes as
    long.

    Args:
        cluster: On which GPUs.
        nbytes: Of what each GPU has in the end (a reduce-scatter: in the beginning).
        every_gpu: As for `all_reduce`.

    Raises:
        ValueError: the size is negative.
    """
    if every_gpu is None:
        every_gpu = cluster.gpus <= _LARGEST
    network = _Network(cluster, {}, {}, every_gpu)
    chunk = costs.not_negative(nbytes, "nbytes") / cluster.gpus
    network.ring(cluster.gpus - 1, chunk)
    return network.result()


class _Network:
    """The state of all GPUs, and what a round of messages does to it.

    Attributes:
        now: When each GPU has what it sends next, by node and local rank.
        sent: Bytes that each GPU has sent.
    """

    def __init__(
        self,
        cluster: Cluster,
        ready: Mapping[int, float],
        slow_links: Mapping[tuple[int, int], float],
        every_gpu: bool,
    ) -> None:
        self.cluster = cluster
        self.every_gpu = every_gpu
        self.now = np.zeros(cluster.gpus)
        for rank, seconds in ready.items():
            self._check(rank, "ready")
            self.now[rank] = costs.not_negative(seconds, f"ready of rank {rank}")
        for pair, factor in slow_links.items():
            for rank in pair:
                self._check(rank, "slow_links")
            costs.positive(factor, f"the factor of the link {pair}")
        self.slow_links = slow_links
        self.sent = np.zeros(cluster.gpus)
        self.messages = 0
        self.rounds = 0
        # When each port is free again: out of a GPU, and into it.
        self._out, self._into = np.zeros(cluster.gpus), np.zeros(cluster.gpus)

    def _check(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.cluster.gpus:
            raise ValueError(
                f"{what} names rank {rank}, but the ranks are 0 to "
                f"{self.cluster.gpus - 1}."
            )

    def result(self) -> Run:
        return Run(
            float(self.now.max()), self.now, self.messages, self.sent, self.rounds
        )

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
        share = cluster.between.bandwidth * cluster.cards / senders
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
        self.messages += len(source)
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
        if self.every_gpu:
            now = self.now[ranks]
            _ring_rounds(now, np.zeros_like(now), latency, nbytes * per_byte, rounds)
            self.now[ranks] = now
        else:
            # What all nodes do alike, one node does; the same for GPUs of a node.
            one_by_one = cluster.gpus_per_node if cluster.nodes > 1 else 1
            alike = np.s_[:one_by_one] if way == "all" else np.s_[:1, :1]
            now = np.full_like(latency[alike], self.now[0])
            _steady_rounds(now, latency[alike], nbytes * per_byte[alike], rounds)
            self.now[:] = now.max()
        self.sent += rounds * nbytes
        self.messages += rounds * cluster.gpus
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


ALGORITHMS: Mapping[Algorithm, Callable[[_Network, float], Run]] = MappingProxyType(
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
class Layer:
    """A part of a model: what computes, and which parameters it has.

    Attributes:
        parameters: How many it has.
        flops: Of its forward pass, for one sample. Its backward pass has twice as many:
            gradients of its input and of its parameters.
        tensors: How many numbers each of its parameter tensors has, in their order. By
            default they are one tensor.

    Raises:
        ValueError: the tensors do not have that many parameters together.
    """

    parameters: int
    flops: float
    tensors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tensors and self.parameters:
            object.__setattr__(self, "tensors", (self.parameters,))
        if sum(self.tensors) != self.parameters:
            raise ValueError(
                f"The tensors have {sum(self.tensors):,} parameters together, but the "
                f"layer has {self.parameters:,}."
            )


@dataclass(frozen=True)
class Model:
    """What a training step of a model computes and exchanges.

    Attributes:
        name: For a reader.
        layers: In the order of the forward pass.
        sample: What a sample is: "image", or "token".
        source: Where the figures are from.
    """

    name: str
    layers: tuple[Layer, ...]
    sample: str
    source: str = ""

    @property
    def parameters(self) -> int:
        """How many parameters it has."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Of one training step with one sample: forward and backward."""
        return 3 * math.fsum(layer.flops for layer in self.layers)


def transformer(
    name: str, *, layers: int, width: int, vocabulary: int, tied: bool = True
) -> Model:
    """A decoder-only transformer, with 12·width² parameters a layer.

    These are in four matrices, as in GPT-2: for queries, keys and values together, for
    the output of attention, and two for the network behind it, of 4·width hidden units.

    A token takes 2 floating point operations a parameter forward. Attention itself,
    biases and normalisation are left out, as in J. Kaplan et al., "Scaling Laws for
    Neural Language Models", arXiv 2001.08361, section 2.1.

    Args:
        name: For a reader.
        layers, width: Of the transformer.
        vocabulary: How many tokens it knows.
        tied: Whether the output layer shares its weights with the embedding, as in a
            GPT-2: their gradient is ready last. Else it has weights of its own.
    """
    matrices = (3 * width**2, width**2, 4 * width**2, 4 * width**2)
    block = Layer(sum(matrices), 2 * sum(matrices), matrices)
    embedding = vocabulary * width
    output = Layer(0 if tied else embedding, 2 * embedding)
    return Model(
        name,
        (Layer(embedding, 0.0), *[block] * layers, output),
        "token",
        f"{layers} layers of width {width}, {vocabulary:,} tokens",
    )


def _bottleneck(inputs: int, width: int) -> tuple[int, ...]:
    """The tensors of a block of a ResNet-50: convolutions, each with its BatchNorm."""
    outputs = 4 * width
    convolutions = [(inputs * width, width), (9 * width**2, width)]
    convolutions.append((width * outputs, outputs))
    if inputs != outputs:  # the first block of a stage: also on the way around
        convolutions.append((inputs * outputs, outputs))
    return tuple(n for weights, out in convolutions for n in (weights, out, out))


# The tensors, and millions of multiply-adds for an image of 224 x 224 pixels: the stem,
# 16 blocks, the classifier.
_RESNET_50 = (
    ((9_408, 64, 64), 118.013952),
    (_bottleneck(64, 64), 231.211008),
    *[(_bottleneck(256, 64), 218.365952)] * 2,
    (_bottleneck(256, 128), 372.506624),
    *[(_bottleneck(512, 128), 218.365952)] * 3,
    (_bottleneck(512, 256), 372.506624),
    *[(_bottleneck(1024, 256), 218.365952)] * 5,
    (_bottleneck(1024, 512), 372.506624),
    *[(_bottleneck(2048, 512), 218.365952)] * 2,
    ((2_048_000, 1_000), 2.048),
)

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            Model(
                "ResNet-50",
                tuple(Layer(sum(t), 2e6 * madds, t) for t, madds in _RESNET_50),
                "image",
                "torchvision.models.resnet50, counted with torch.utils.flop_counter",
            ),
            transformer("GPT-2 small", layers=12, width=768, vocabulary=50257),
            transformer("GPT-2 XL", layers=48, width=1600, vocabulary=50257),
        )
    }
)


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


@dataclass(frozen=True)
class Step:
    """A simulated training step, from its first forward to its last gradient.

    Attributes:
        seconds: Until all gradients are averaged.
        compute: Of these, what a GPU that is not slow computes.
        waiting: What the slowest GPU computes longer than that.
        exposed: What remains: communication that no computing hides.
        communication: Seconds of all all-reduces together, hidden or not.
        forward: When the slowest GPU had finished its forward pass.
        buckets: The all-reduces, in their order.
    """

    seconds: float
    compute: float
    waiting: float
    exposed: float
    communication: float
    forward: float
    buckets: tuple[Bucket, ...]

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: 1 if n GPUs do n times the work of one."""
        return self.compute / self.seconds if self.seconds else 1.0


def _check_computing(samples: float, utilization: float) -> None:
    costs.positive(samples, "samples")
    if not 0 < costs.positive(utilization, "utilization") <= 1:
        raise ValueError(f"utilization is {utilization}: expected a share up to 1.")


def ddp_step(
    cluster: Cluster,
    model: Model,
    samples: float,
    *,
    utilization: float = 0.5,
    algorithm: Algorithm = "ring",
    overlap: bool = True,
    bucket_bytes: float = costs.DDP_BUCKET,
    first_bucket_bytes: float = costs.DDP_FIRST_BUCKET,
    gradient_bytes: float = 4,
    slow_gpus: Mapping[int, float] | None = None,
) -> Step:
    """Simulate one training step of DDP.

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
        gradient_bytes: Of one gradient: 4 in float32, 2 in bfloat16.
        slow_gpus: GPUs that compute so many times slower: `{rank: 1.2}`.

    Raises:
        ValueError: a number is out of range, or there is no such rank.
    """
    _check_computing(samples, utilization)
    slowest = 1.0
    for rank, factor in (slow_gpus or {}).items():
        if not 0 <= rank < cluster.gpus:
            raise ValueError(
                f"slow_gpus names rank {rank}, but the ranks are 0 to "
                f"{cluster.gpus - 1}."
            )
        slowest = max(slowest, costs.positive(factor, f"the factor of rank {rank}"))
        if factor < 1:
            raise ValueError(
                f"slow_gpus has {factor} for rank {rank}: expected 1 or more. A GPU "
                "that is faster than all others does not shorten a step."
            )
    if cluster.gpus == len(slow_gpus or {}):
        raise ValueError("All GPUs are slow: lower utilization instead.")

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
            sizes.append(numbers * gradient_bytes)
        done += seconds
    backward_ends = done

    durations: dict[float, float] = {}
    buckets: list[Bucket] = []
    free = 0.0 if overlap else backward_ends
    for members in costs.ddp_buckets(
        sizes, cap=bucket_bytes, first_cap=first_bucket_bytes
    ):
        nbytes = math.fsum(sizes[i] for i in members)
        if nbytes not in durations:
            run = all_reduce(cluster, nbytes, algorithm, every_gpu=False)
            durations[nbytes] = run.seconds
        start = max(free, ready[members[-1]])
        free = start + durations[nbytes]
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


@dataclass(frozen=True)
class FsdpStep:
    """A simulated training step of FSDP, from its first all-gather on.

    Attributes:
        seconds: Until all gradients are in their shards.
        compute: Of these, what a GPU computes.
        exposed: What remains: communication that no computing hides.
        communication: Seconds of all collectives together, hidden or not.
        sent: Bytes that each GPU sends.
        whole: The most bytes of whole parameters that a GPU has at a time.
        events: What happened, in the order in which it began.
    """

    seconds: float
    compute: float
    exposed: float
    communication: float
    sent: float
    whole: float
    events: tuple[UnitEvent, ...] = field(repr=False)

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: 1 if n GPUs do n times the work of one."""
        return self.compute / self.seconds if self.seconds else 1.0


def fsdp_step(
    cluster: Cluster,
    model: Model,
    samples: float,
    *,
    prefetch: int = 1,
    utilization: float = 0.5,
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

    Raises:
        ValueError: a number is out of range.
    """
    _check_computing(samples, utilization)
    ahead = costs.count(prefetch, "prefetch")
    layers = model.layers
    tied = any(layer.flops and not layer.parameters for layer in layers)
    names = [f"layer {place}" for place in range(len(layers))]
    sizes = [4 * layer.parameters for layer in layers]
    speed = cluster.flops * utilization
    line = _Line(cluster)
    now, computed = 0.0, 0.0
    whole: dict[int, float] = {}  # the units that are whole, and since when

    def gather(wanted: Sequence[int]) -> None:
        for place in wanted:
            if place not in whole and sizes[place]:
                done = line.send(now, sizes[place], names[place], "all-gather")
                whole[place] = done

    def compute(place: int, kind: str, seconds: float) -> None:
        nonlocal now, computed
        # Nobody waits for a unit that is whole, or that has no parameters.
        start = max(now, whole.get(place, now))
        now = start
        gather(upcoming(place, kind)[1:])
        now = start + seconds
        computed += seconds
        line.events.append(UnitEvent(start, now, names[place], kind))

    def upcoming(place: int, kind: str) -> Sequence[int]:
        if kind == "forward":
            return range(place, min(place + ahead + 1, len(layers)))
        return range(place, max(place - ahead - 1, -1), -1)

    def free(place: int) -> None:
        if whole.pop(place, None) is not None:
            line.events.append(UnitEvent(now, now, names[place], "free"))

    for place, layer in enumerate(layers):
        gather([place])
        compute(place, "forward", layer.flops * samples / speed)
        if place or not tied:
            free(place)
    for place, layer in reversed([*enumerate(layers)]):
        gather([place])
        compute(place, "backward", 2 * layer.flops * samples / speed)
        free(place)
        if sizes[place]:
            line.send(now, sizes[place], names[place], "reduce-scatter")
    seconds = max(now, line.free)
    return FsdpStep(
        seconds=seconds,
        compute=computed,
        exposed=seconds - computed,
        communication=line.seconds,
        sent=line.sent,
        whole=_most_whole(line.events, dict(zip(names, sizes, strict=True))),
        events=tuple(sorted(line.events, key=lambda event: (event.start, event.stop))),
    )


class _Line:
    """The network as one GPU sees it: one collective after the other.

    Attributes:
        free: When the last collective that was issued is done.
        seconds: Of all collectives together.
        sent: Bytes that this GPU has sent.
        events: What was sent when; more can be added.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free = self.seconds = self.sent = 0.0
        self.events: list[UnitEvent] = []
        self._runs: dict[float, Run] = {}

    def send(self, issued: float, nbytes: float, unit: str, kind: str) -> float:
        """Issue a collective; returns when it is done."""
        if self.cluster.gpus == 1:
            return issued  # there is nobody to send to
        if nbytes not in self._runs:
            self._runs[nbytes] = all_gather(self.cluster, nbytes, every_gpu=False)
        run = self._runs[nbytes]
        start = max(issued, self.free)
        self.free = start + run.seconds
        self.seconds += run.seconds
        self.sent += float(run.sent.max())
        self.events.append(UnitEvent(start, self.free, unit, kind))
        return self.free


def _most_whole(events: Sequence[UnitEvent], sizes: Mapping[str, float]) -> float:
    """The most bytes of units that are whole at a time."""
    since: set[str] = set()
    held = most = 0.0
    # What is freed at a moment makes room for what is gathered from then on.
    order = sorted(events, key=lambda event: (event.start, event.kind != "free"))
    for event in order:
        if event.kind == "all-gather" and event.unit not in since:
            since.add(event.unit)
            held += sizes[event.unit]
            most = max(most, held)
        elif event.kind == "free" and event.unit in since:
            since.remove(event.unit)
            held -= sizes[event.unit]
    return most
