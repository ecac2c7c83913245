"""Which layout of a large model fits on a cluster, and which is the fastest of them.

    >>> from course_utils.theory.models import transformer_shape
    >>> from course_utils.theory.simulator import CLUSTERS
    >>> selene = CLUSTERS["A100, InfiniBand"].with_nodes(384)
    >>> best = plans(transformer_shape("1 trillion"), selene, batch=3072)[0]
    >>> best.layout, f"{best.flops / 1e12:.0f} TFLOP/s on each GPU"
    (Layout(pp=64, dp=6, tp=8), '158 TFLOP/s on each GPU')

Megatron-LM's authors chose that layout, and measured 163.

A model of a step, from the formulas of `costs`:

- Each GPU computes its share of the operations, at one utilization for all layouts. The
  activations are computed twice (full recomputation).
- Tensor parallel: six all-reduces of an activation for each layer and micro-batch, four
  of the step and two of recomputing. Nothing hides them.
- Pipeline: a bubble of (p - 1)/m, and a message each way at each boundary.
- Data parallel: one all-reduce of the gradients, which nothing hides.
- Memory: 18 bytes for each parameter on the GPU (2 for it, 4 for its gradient, 12 for
  Adam), the inputs of the layers of all micro-batches that are kept, and one layer.

Not modelled: interleaving, the embedding's stage having more to do, ZeRO, and that
smaller matrices reach less of a GPU's peak. `tests/test_planner.py` compares the choice
with published layouts.

Source: Narayanan et al., SC21, arXiv 2104.04473, sections 2 and 3, and its equation 3
for the operations of a step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from course_utils.theory import costs
from course_utils.theory.arguments import (
    Count,
    NotNegative,
    Positive,
    Share,
    checked,
)
from course_utils.theory.models import TransformerShape
from course_utils.theory.simulator import Cluster

BYTES = 18  # for a parameter: see above


@dataclass(frozen=True)
class Layout:
    """How many GPUs each kind of parallelism has: pipeline, data, tensor."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Plan:
    """A layout that fits, and what a step of it takes.

    Attributes:
        layout: The GPUs.
        memory: Bytes on the fullest GPU.
        seconds: Of a step: the sum of those that follow.
        compute, tensor, bubble, boundary, data: Its parts.
        flops: Operations a second that each GPU reaches.
    """

    layout: Layout
    memory: float
    seconds: float
    compute: float
    tensor: float
    bubble: float
    boundary: float
    data: float
    flops: float


def step_operations(shape: TransformerShape, batch: int) -> float:
    """Floating point operations of a step, with full recomputation.

    `96 B s l h² (1 + s/(6h) + V/(16 l h))` for B sequences of s tokens.

    Source: Narayanan et al., SC21, arXiv 2104.04473, equation 3.
    """
    s, layers, h = shape.positions, shape.layers, shape.width
    more = 1 + s / (6 * h) + shape.vocabulary / (16 * layers * h)
    return 96 * batch * s * layers * h**2 * more


@checked
def plans(
    shape: TransformerShape,
    cluster: Cluster,
    batch: Count,
    *,
    memory: Positive = 80 * costs.GB,
    utilization: Share = 0.6,
) -> list[Plan]:
    """All layouts that fit, from the fastest to the slowest.

    A micro-batch is one sequence. Tensor parallel stays inside a node, where its ranks
    are neighbours; the pipeline is the outermost.

    Args:
        batch: Sequences of a step, on all GPUs together.
        memory: Bytes of a GPU, of which a tenth stays free.
        utilization: The share of the GPUs' FLOP/s that computing reaches.

    Raises:
        ValueError: no layout fits.
    """
    found = []
    for tp in _divisors(cluster.gpus_per_node):
        for pp in _divisors(shape.layers):
            dp = cluster.gpus // (tp * pp)
            whole = dp * tp * pp == cluster.gpus
            if not whole or batch % dp or shape.heads % tp or shape.width % tp:
                continue
            plan = _plan(shape, cluster, batch, Layout(pp, dp, tp), utilization)
            if plan.memory <= 0.9 * memory:
                found.append(plan)
    if not found:
        raise ValueError(
            f"No layout of {shape.name} fits on {cluster.gpus} GPUs of "
            f"{memory / costs.GB:g} GB with a batch of {batch}."
        )
    return sorted(found, key=lambda plan: plan.seconds)


def _plan(
    shape: TransformerShape,
    cluster: Cluster,
    batch: int,
    layout: Layout,
    utilization: float,
) -> Plan:
    pp, dp, tp = layout.pp, layout.dp, layout.tp
    micro_batches, layers = batch // dp, shape.layers // pp
    operations = step_operations(shape, batch)
    compute = operations / (cluster.gpus * cluster.flops * utilization)

    activation = 2 * shape.positions * shape.width  # bytes, in 16 bits
    once = costs.all_reduce_seconds("ring", tp, activation, **asdict(cluster.inside))
    tensor = 6 * layers * micro_batches * once

    between = cluster.between_nodes(cluster.gpus_per_node)  # all GPUs send at once
    message = between.seconds(activation / tp)
    boundary = 2 * micro_batches * message if pp > 1 else 0.0
    bubble = (compute + tensor) * costs.bubble_of_ideal(pp, micro_batches)

    parameters = shape.parameters / (pp * tp)
    data = costs.all_reduce_seconds("ring", dp, 4 * parameters, **asdict(between))
    kept = layers * min(pp, micro_batches) * activation
    layer = costs.activation_bytes(1, shape.positions, shape.width, shape.heads) / tp
    seconds = compute + tensor + bubble + boundary + data
    return Plan(
        layout,
        BYTES * parameters + kept + layer,
        seconds,
        compute,
        tensor,
        bubble,
        boundary,
        data,
        operations / (cluster.gpus * seconds),
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class SlicedLayer:
    """Seconds of a layer with tensor parallelism; see `tensor_parallel_layer`."""

    computing: float
    sending: float

    @property
    def share(self) -> float:
        """Of all its time, that in which it sends, and nothing is computed."""
        return self.sending / (self.computing + self.sending)


@checked
def tensor_parallel_layer(
    gpus: Count,
    batch: Count,
    sequence: Count,
    width: Count,
    *,
    flops_per_gpu: Positive,
    latency: NotNegative,
    bandwidth: Positive,
    element_bytes: Positive = 2,
) -> SlicedLayer:
    """Seconds of a transformer layer on t GPUs, forward and backward.

    With b sequences of s tokens and width h, `72bsh²(1 + s/(6h))/t` operations on each
    GPU, and four ring all-reduces of 2bsh bytes, in 16 bits, which nothing hides.

        >>> link = {"flops_per_gpu": 400e12, "latency": 3.4e-6, "bandwidth": 450e9}
        >>> f"{tensor_parallel_layer(8, 1, 4096, 8192, **link).share:.0%}"
        '16%'

    `flops_per_gpu` is what a GPU *reaches*, not its peak. Slices that are small reach
    less, which is not counted here. Every link is the same: between nodes, give that
    of the slowest.

    Source: Narayanan et al., SC21, arXiv 2104.04473, sections 2.3 and 5.1 (without
    recomputing, so 72 and not 96); Shoeybi et al., arXiv 1909.08053, section 3.
    """
    h, tokens = width, batch * sequence
    operations = 72 * tokens * h**2 * (1 + sequence / (6 * h))
    link = {"latency": latency, "bandwidth": bandwidth}
    once = costs.all_reduce_seconds("ring", gpus, tokens * h * element_bytes, **link)
    return SlicedLayer(operations / (gpus * flops_per_gpu), 4 * once)
