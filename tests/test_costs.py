"""The closed formulas: against what they describe, and against counted bytes.

Against what others have published: see `test_published_numbers.py`. Against messages:
see `test_simulator.py` and `from_scratch/`.
"""

import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from course_utils.theory import costs

# ---------------------------------------------------------------- ranks and messages


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_ranks_are_numbered_node_by_node(nodes, gpus):
    places = [(node, local) for node in range(nodes) for local in range(gpus)]
    numbers = range(nodes * gpus)
    assert [costs.rank_of(*place, gpus) for place in places] == [*numbers]
    assert [costs.node_and_local_rank(rank, gpus) for rank in numbers] == places


def test_at_half_bandwidth_both_parts_take_as_long():
    link = {"latency": 10e-6, "bandwidth": costs.gigabits(400)}
    size = costs.half_bandwidth_bytes(**link)
    assert size == pytest.approx(500_000)
    assert size / costs.transfer_seconds(size, **link) == pytest.approx(25e9)
    assert costs.transfer_seconds(0, **link) == 10e-6


SIZES = [4, 64, 4_096, 65_536, 1_048_576, 16_777_216]


def test_fit_finds_what_made_the_times():
    times = [costs.transfer_seconds(n, latency=6e-5, bandwidth=2e9) for n in SIZES]
    found = costs.fit_transfer(SIZES, times)
    assert (found.latency, found.bandwidth) == pytest.approx((6e-5, 2e9))
    assert [found.seconds(n) for n in SIZES] == pytest.approx(times)
    never_below_zero = costs.fit_transfer([1e6, 2e6, 4e6], [0.5e-3, 2e-3, 5e-3])
    assert never_below_zero.latency == 0 and never_below_zero.bandwidth > 0
    # The relative error of times that no line explains is the least.
    times = np.array([5e-5, 7e-5, 6e-5, 9e-5, 6e-4, 9e-3])
    weighted = np.stack([np.ones(6), SIZES]) / times
    latency, slope = np.linalg.lstsq(weighted.T, np.ones(6), rcond=None)[0]
    found = costs.fit_transfer(SIZES, times)
    assert (found.latency, 1 / found.bandwidth) == pytest.approx((latency, slope))


# ---------------------------------------------------------------- the data sheets


ONE_WAY = """ gigabytes a second
HBM3e (H200)            4800
HBM3 (H100)             3350
HBM2e (A100 80GB)       2039
NVLink 4 (H100, H200)   450
NVLink 3 (A100)         300
PCIe Gen5 x16           63.0
PCIe Gen4 x16           31.5
InfiniBand NDR          50
InfiniBand HDR          25
400 Gigabit Ethernet    50
100 Gigabit Ethernet    12.5
10 Gigabit Ethernet     1.25
"""


def test_the_ladder_has_the_figures_of_the_data_sheets_in_one_direction():
    rungs = [row.rsplit(None, 1) for row in ONE_WAY.splitlines()[1:]]
    for link, (name, gigabytes) in zip(costs.LADDER, rungs, strict=True):
        assert (link.name, costs.link(name)) == (name, link)
        assert link.one_way == pytest.approx(float(gigabytes) * 1e9, rel=1e-3), name
        assert link.source


def test_cards_have_what_nvidia_smi_reports():
    for card in costs.CARDS:
        # NVIDIA states GB and builds in about as many GiB.
        stated = float(card.stated.removesuffix(" GB"))
        assert 0.9 < card.nbytes / (stated * 2**30) < 1.001
        assert costs.card(card.name) is card and card.source
    assert costs.card("H100").nbytes == 81_559 * 2**20


# ---------------------------------------------------------------------- pipelines


def schedule(stages, micro_batches, seconds):
    """When the last stage ends: a micro-batch waits for its input, and for its turn."""
    ends = [0.0] * stages
    for _ in range(micro_batches):
        arrived = 0.0
        for stage in range(stages):
            arrived = ends[stage] = max(ends[stage], arrived) + seconds
    return ends[-1]


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 64])
def test_bubbles_and_seconds_are_those_of_the_schedule(stages, micro_batches):
    stage_seconds, overhead = 3.0, 0.25
    one = stage_seconds / micro_batches + overhead
    total, works = schedule(stages, micro_batches, one), micro_batches * one
    found = costs.pipeline_seconds(3.0, stages, micro_batches, overhead=overhead)
    assert found == pytest.approx(total)
    idle = total - works
    assert costs.bubble_of_total(stages, micro_batches) == pytest.approx(idle / total)
    assert costs.bubble_of_ideal(stages, micro_batches) == pytest.approx(idle / works)


# --------------------------------------------------------------------- collectives


@pytest.mark.parametrize("n", [2, 3, 8, 33])
def test_no_algorithm_beats_what_the_factor_says(n):
    """A rank sends or receives at least factor * size; the direct ones no more."""
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        cost = costs.collective_cost(name, n, 1000)
        busiest = max(cost.most_sent, cost.most_received)
        assert busiest == pytest.approx(1000 * costs.bus_bandwidth_factor(name, n))
    for name in ("broadcast", "reduce"):
        cost = costs.collective_cost(name, n, 1000)
        assert max(cost.most_sent, cost.most_received) == (n - 1) * 1000


def test_seconds_of_a_collective():
    link = {"latency": 1e-3, "bandwidth": 1e6}
    naive = costs.collective_cost("all_reduce_naive", 4, 8000)
    assert naive.seconds(**link) == pytest.approx(6 * (1e-3 + 8e-3))
    line, tree = (
        costs.collective_cost(name, 1024, 0) for name in ("broadcast", "broadcast_tree")
    )
    assert line.seconds(**link) == pytest.approx(1.023)
    assert tree.seconds(**link) == pytest.approx(0.010)
    assert costs.collective_cost("all_reduce", 1, 8000).seconds(**link) == 0


@pytest.mark.parametrize("n", [2, 3, 4, 5, 9, 64, 1000])
def test_a_tree_wins_below_and_a_ring_above(n):
    link = {"latency": 1e-3, "bandwidth": 1e6}

    def tree_to_ring(nbytes):
        tree, ring = (
            costs.all_reduce_seconds(algorithm, n, nbytes, **link)
            for algorithm in ("tree", "ring")
        )
        return tree / ring

    size = costs.tree_wins_below(n, **link)
    if n <= 3:
        assert size == 0 and tree_to_ring(1) >= 1
    else:
        assert tree_to_ring(0.9 * size) < 1 < tree_to_ring(1.1 * size)
        assert tree_to_ring(size) == pytest.approx(1)


def test_ddp_buckets_are_those_of_torch():
    from torch.distributed import _compute_bucket_assignment_by_size as torchs

    rng = random.Random(0)
    for _ in range(100):
        sizes = [rng.randrange(1, 3_000_000) for _ in range(rng.randrange(1, 30))]
        caps = rng.choice([(1024, 2_000_000), (2**20, 25 * 2**20), (5, 5)])
        gradients = [torch.empty(size, device="meta") for size in sizes]
        ours = costs.ddp_buckets([4 * n for n in sizes], first_cap=caps[0], cap=caps[1])
        assert ours == torchs(gradients, list(caps))[0], (sizes, caps)
    assert costs.ddp_buckets([]) == []


# ---------------------------------------------------------------- memory


def test_a_stage_divides_one_thing_more():
    whole = {"optimizer": 90, "gradients": 15, "parameters": 15}  # figure 1, in GB
    for stage in range(4):
        found = costs.zero_memory(7.5e9, gpus=64, stage=stage)
        for place, (what, gigabytes) in enumerate(whole.items()):
            expected = gigabytes / (64 if stage > place else 1)
            assert getattr(found, what) == pytest.approx(expected * costs.GB)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[12, 3], [1], [5, 0, 7, 100], [0], [], [16, 16]])
def test_shards_hold_all_elements_once_and_in_order(sizes, n):
    parts = costs.shard_parts(sizes, n)
    shard = costs.shard_size(sum(sizes), n)
    flat = [(place, i) for place, size in enumerate(sizes) for i in range(size)]
    held = [[(p, i) for p, a, b in part for i in range(a, b)] for part in parts]
    assert held == [flat[rank * shard : (rank + 1) * shard] for rank in range(n)]
    assert 0 <= n * shard - sum(sizes) < n  # no more padding than there must be


def gpt(layers=2, width=64, vocabulary=500, positions=32):
    """The parameters of a GPT; it does not need to compute."""
    blocks = [nn.TransformerEncoderLayer(width, 1, 4 * width) for _ in range(layers)]
    tables = [nn.Embedding(vocabulary, width), nn.Embedding(positions, width)]
    return nn.ModuleList([*tables, *blocks, nn.LayerNorm(width)])


@pytest.mark.parametrize("sizes", [(1, 8, 5, 0), (2, 64, 500, 32), (3, 24, 7, 11)])
def test_parameters_are_those_of_a_real_model(sizes):
    counted = sum(parameter.numel() for parameter in gpt(*sizes).parameters())
    assert costs.transformer_parameters(*sizes) == counted


def test_transformers_have_the_sizes_of_their_names():
    for shape in costs.TRANSFORMERS:
        assert costs.transformer_shape(shape.name) is shape
        assert shape.width % shape.heads == 0
    # Radford et al. 2019, table 2, and the authors' code. Megatron's are published
    # numbers of `transformer_parameters`.
    assert costs.transformer_shape("GPT-2 small").parameters == 124_439_808
    assert costs.transformer_shape("GPT-2 XL").parameters == 1_557_611_200
    assert round(costs.transformer_shape("76.1 billion").parameters / 1e9, 1) == 76.1


def nbytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
def test_states_are_those_of_a_real_optimizer(optimizer, precision):
    """A model and torch.optim's optimizer after a step: the bytes of all tensors."""
    makers = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        "adam": lambda parameters: torch.optim.AdamW(parameters),
    }
    low = torch.float32 if precision == "float32" else torch.bfloat16
    parameters = [*gpt().to(low).parameters()]
    masters = []
    if precision == "mixed":
        masters = [p.detach().float().requires_grad_() for p in parameters]
    steps = makers[optimizer](masters or parameters)
    for one in (*parameters, *masters):
        one.grad = torch.ones_like(one)
    steps.step()
    states = [value for state in steps.state.values() for value in state.values()]
    kept = [value for value in states if torch.is_tensor(value)]
    size = costs.transformer_parameters(2, 64, 500, 32)
    expected = costs.zero_memory(size, optimizer=optimizer, precision=precision)
    assert nbytes_of(parameters) == expected.parameters
    assert nbytes_of(parameter.grad for parameter in parameters) == expected.gradients
    # Adam counts its steps in a number for each tensor.
    assert nbytes_of([*kept, *masters]) == pytest.approx(expected.optimizer, rel=0.01)


# ---------------------------------------------------------------- wrong arguments

ONE = {"latency": 0, "bandwidth": 1}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: costs.gigabits("4"), "number is '4'"),
        (lambda: costs.rank_of(0, 1.0, 4), "local_rank is 1.0"),
        (lambda: costs.rank_of(0, 0, True), "gpus_per_node is True"),
        (lambda: costs.rank_of(0, 4, 4), "local_rank is 4, but a node with 4 GPU(s)"),
        (lambda: costs.transfer_seconds(-1, **ONE), "nbytes is -1"),
        (lambda: costs.transfer_seconds(float("nan"), **ONE), "nbytes is nan"),
        (lambda: costs.algorithm_bandwidth(8, 0), "seconds is 0"),
        (lambda: costs.bubble_of_total(0, 4), "stages is 0"),
        (lambda: costs.shard_parts([1, -2], 2), "sizes[1] is -2"),
        (lambda: costs.fit_transfer([1], [1, 2]), "1 sizes and 2 times"),
        (lambda: costs.fit_transfer([8, 8], [1, 2]), "at least 2 different sizes"),
        (lambda: costs.fit_transfer([1, 2], [2, 1]), "do not grow"),
        (lambda: costs.state_bytes("adamw"), "no optimizer 'adamw'"),
        (lambda: costs.card("A100"), "There are: T4, RTX 4090"),
        (lambda: costs.fsdp_memory([], 4), "no units"),
        (lambda: costs.all_reduce_seconds("halving-doubling", 6, 8, **ONE), "not 6"),
    ],
)
def test_wrong_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        call()


def test_needs_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); from course_utils import costs; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(new - set(sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "{'course_utils'}"
