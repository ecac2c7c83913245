"""Costs: the formulas against published numbers, and the ladder against its words."""

import doctest
import math
import random
import re
import subprocess
import sys

import cloudpickle
import numpy as np
import pytest

from course_utils.ranks import Ranks
from course_utils.theory import costs
from course_utils.theory.costs import LADDER, Link

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_units():
    assert (costs.GB, costs.GiB) == (10**9, 2**30)
    assert costs.GiB / costs.GB == pytest.approx(1.0737, abs=1e-4)
    assert costs.gigabits(400) == 50 * costs.GB
    assert costs.gigabits(0) == 0


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_ranks_are_numbered_node_by_node(nodes, gpus):
    places = [(node, local) for node in range(nodes) for local in range(gpus)]
    assert [costs.rank_of(*place, gpus) for place in places] == [*range(nodes * gpus)]
    assert [
        costs.node_and_local_rank(rank, gpus) for rank in range(nodes * gpus)
    ] == places


def test_numbers_of_numpy_are_numbers():
    assert costs.rank_of(np.int64(1), np.int64(1), np.int64(4)) == 5
    assert type(costs.rank_of(np.int64(1), 0, 4)) is int
    assert costs.transfer_seconds(np.float64(8), latency=1, bandwidth=4) == 3


@pytest.mark.parametrize(
    ("nbytes", "latency", "bandwidth", "seconds"),
    [
        (0, 5e-6, 1e9, 5e-6),
        (1e9, 0, 50e9, 0.02),
        (14e9, 5e-6, costs.gigabits(400), 0.280005),
        (4_000_000, 10e-6, 8e9, 0.00051),
    ],
)
def test_transfer_seconds(nbytes, latency, bandwidth, seconds):
    made = costs.transfer_seconds(nbytes, latency=latency, bandwidth=bandwidth)
    assert made == pytest.approx(seconds, rel=1e-12)


def test_at_half_bandwidth_both_parts_take_as_long():
    link = {"latency": 10e-6, "bandwidth": 50e9}
    size = costs.half_bandwidth_bytes(**link)
    assert size == pytest.approx(500_000)
    assert size / costs.transfer_seconds(size, **link) == pytest.approx(25e9)


SIZES = [4, 64, 4_096, 65_536, 1_048_576, 16_777_216]


def test_fit_finds_what_made_the_times():
    times = [costs.transfer_seconds(n, latency=6e-5, bandwidth=2e9) for n in SIZES]
    found = costs.fit_transfer(SIZES, times)
    assert found.latency == pytest.approx(6e-5)
    assert found.bandwidth == pytest.approx(2e9)
    assert [found.seconds(n) for n in SIZES] == pytest.approx(times)


def test_fit_stands_noise():
    rng = random.Random(0)
    times = [
        costs.transfer_seconds(n, latency=6e-5, bandwidth=2e9) * rng.uniform(0.9, 1.1)
        for n in SIZES
    ]
    found = costs.fit_transfer(SIZES, times)
    assert found.latency == pytest.approx(6e-5, rel=0.15)
    assert found.bandwidth == pytest.approx(2e9, rel=0.15)


def test_fit_is_the_best_there_is():
    """No other latency and bandwidth nearby has a smaller relative error."""
    times = [5e-5, 7e-5, 6e-5, 9e-5, 6e-4, 9e-3]

    def error(latency, slope):
        return sum(
            ((latency + n * slope) / t - 1) ** 2
            for n, t in zip(SIZES, times, strict=True)
        )

    found = costs.fit_transfer(SIZES, times)
    least = error(found.latency, 1 / found.bandwidth)
    for up in (0.99, 1.01):
        assert error(found.latency * up, 1 / found.bandwidth) > least
        assert error(found.latency, up / found.bandwidth) > least


def test_fit_never_finds_a_latency_below_zero():
    found = costs.fit_transfer([1e6, 2e6, 4e6], [0.5e-3, 2e-3, 5e-3])
    assert found.latency == 0
    assert found.bandwidth > 0


def test_more_gpus_train_in_less_time():
    """The days that the paper gives are in `test_published_numbers.py`."""
    run = {"tokens": 300e9, "parameters": 175e9, "flops_per_gpu": 140e12}
    one, many = (costs.training_seconds(**run, gpus=n) for n in (1, 1024))
    assert one == pytest.approx(1024 * many)
    assert many == pytest.approx(8 * 300e9 * 175e9 / (1024 * 140e12))


# ---------------------------------------------------------------- the ladder


def in_bytes_per_second(words: str) -> float:
    """The figure as a person reads it: GB with a large B, Gb with a small one."""
    number, unit = re.fullmatch(r"([\d.,]+) (TB|GB|Gb)/s", words).groups()
    factor = {"TB": 1e12, "GB": 1e9, "Gb": 1e9 / 8}[unit]
    return float(number.replace(",", "")) * factor


@pytest.mark.parametrize("link", LADDER, ids=lambda link: link.name)
def test_figures_are_what_the_sources_state(link):
    lanes = re.fullmatch(r"(\d+) GT/s a lane, 16 lanes", link.stated)
    if lanes:  # PCI Express: 130 bits on the wire carry 128 bits of data
        stated = int(lanes[1]) * 1e9 * 16 * 128 / 130 / 8
    else:
        stated = in_bytes_per_second(link.stated)
    assert link.bytes_per_second == pytest.approx(stated)
    assert link.source


@pytest.mark.parametrize(
    ("name", "one_way"),
    [
        ("HBM3e (H200)", 4.8e12),
        ("HBM3 (H100)", 3.35e12),
        ("HBM2e (A100 80GB)", 2.039e12),
        ("NVLink 4 (H100, H200)", 450e9),
        ("NVLink 3 (A100)", 300e9),
        ("PCIe Gen5 x16", 63.0e9),
        ("PCIe Gen4 x16", 31.5e9),
        ("InfiniBand NDR", 50e9),
        ("InfiniBand HDR", 25e9),
        ("400 Gigabit Ethernet", 50e9),
        ("100 Gigabit Ethernet", 12.5e9),
        ("10 Gigabit Ethernet", 1.25e9),
    ],
)
def test_one_way(name, one_way):
    assert costs.link(name).one_way == pytest.approx(one_way, rel=1e-3)


def test_every_rung_is_tested_and_named_once():
    names = [link.name for link in LADDER]
    assert len(set(names)) == len(names) == 12


def test_the_ladder_goes_down_in_each_place():
    places = [link.place for link in LADDER]
    assert list(dict.fromkeys(places)) == ["in a GPU", "in a node", "between nodes"]
    assert places == sorted(places, key=list(dict.fromkeys(places)).index)
    families = {
        "in a GPU": ("HBM",),
        "in a node": ("NVLink", "PCIe"),
        "between nodes": ("InfiniBand", "Gigabit Ethernet"),
    }
    for place, words in families.items():
        for word in words:
            speeds = [
                link.one_way
                for link in LADDER
                if link.place == place and word in link.name
            ]
            assert len(speeds) > 1
            assert speeds == sorted(speeds, reverse=True)


def test_only_two_way_figures_are_halved():
    facts = ("in a node", "8 GB/s", 8e9)
    assert Link("x", *facts, "one way", "-").one_way == 8e9
    assert Link("x", *facts, "shared", "-").one_way == 8e9
    assert Link("x", *facts, "both ways together", "-").one_way == 4e9


# ---------------------------------------------------------------------- pipelines


def schedule(stages, micro_batches, seconds):
    """Each stage's end: a micro-batch waits for its input, and for its turn."""
    ends = [0.0] * stages
    for _ in range(micro_batches):
        arrived = 0.0
        for stage in range(stages):
            arrived = ends[stage] = max(ends[stage], arrived) + seconds
    return ends


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 7, 64])
def test_bubbles_and_seconds_are_those_of_the_schedule(stages, micro_batches):
    stage_seconds, overhead = 3.0, 0.25
    one = stage_seconds / micro_batches + overhead
    total = max(schedule(stages, micro_batches, one))
    works = micro_batches * one
    assert costs.pipeline_seconds(
        stage_seconds, stages, micro_batches, overhead=overhead
    ) == pytest.approx(total)
    idle = total - works
    assert costs.bubble_of_total(stages, micro_batches) == pytest.approx(idle / total)
    assert costs.bubble_of_ideal(stages, micro_batches) == pytest.approx(idle / works)


@pytest.mark.parametrize("stages", [1, 2, 5, 16])
@pytest.mark.parametrize("overhead", [1e-4, 3e-3, 0.2])
def test_no_number_of_micro_batches_is_better_than_the_best(stages, overhead):
    def seconds(micro_batches):
        return costs.pipeline_seconds(1.0, stages, micro_batches, overhead=overhead)

    least = min(range(1, 1000), key=seconds)
    assert abs(costs.best_micro_batches(1.0, stages, overhead=overhead) - least) <= 1


# --------------------------------------------------------------------- collectives

FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
}


@pytest.mark.parametrize("collective", FACTORS)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 10_000])
def test_bus_bandwidth_is_the_algorithm_bandwidth_times_the_factor(collective, n):
    factor = costs.bus_bandwidth_factor(collective, n)
    assert factor == pytest.approx(FACTORS[collective](n))
    assert costs.algorithm_bandwidth(6e9, 2.0) == 3e9
    assert costs.bus_bandwidth(collective, n, 6e9, 2.0) == pytest.approx(factor * 3e9)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 33])
def test_no_algorithm_beats_what_the_factor_says(n):
    """A rank sends or receives at least factor * size; the direct ones no more."""
    for name in FACTORS:
        cost = costs.collective_cost(name, n, 1000)
        busiest = max(cost.most_sent, cost.most_received)
        least = 1000 * costs.bus_bandwidth_factor(name, n)
        if name in ("broadcast", "reduce"):
            assert busiest == pytest.approx((n - 1) * least)
        else:
            assert busiest == pytest.approx(least)


def test_seconds_of_a_collective():
    link = {"latency": 1e-3, "bandwidth": 1e6}
    naive = costs.collective_cost("all_reduce_naive", 4, 8000)
    assert naive.seconds(**link) == pytest.approx(6 * (1e-3 + 8e-3))
    better = costs.collective_cost("all_reduce", 4, 8000)
    assert better.seconds(**link) == pytest.approx(6 * (1e-3 + 2e-3))
    line, tree = (
        costs.collective_cost(name, 1024, 0) for name in ("broadcast", "broadcast_tree")
    )
    assert line.seconds(**link) == pytest.approx(1.023)
    assert tree.seconds(**link) == pytest.approx(0.010)
    alone = costs.collective_cost("all_reduce", 1, 8000)
    assert alone.seconds(**link) == 0


# ---------------------------------------------------------------------- all-reduce

SLOW = {"latency": 1e-3, "bandwidth": 1e6}


@pytest.mark.parametrize(
    ("algorithm", "n", "seconds"),
    [
        ("naive", 4, 2 * (3 * 8e-3 + 1e-3)),
        ("tree", 4, 4 * (1e-3 + 8e-3)),
        ("tree", 5, 6 * (1e-3 + 8e-3)),
        ("halving-doubling", 8, 6 * 1e-3 + 2 * 7e-3),
        ("ring", 4, 6 * (1e-3 + 2e-3)),
        ("ring", 5, 8 * (1e-3 + 1.6e-3)),
    ],
)
def test_seconds_of_an_all_reduce(algorithm, n, seconds):
    made = costs.all_reduce_seconds(algorithm, n, 8000, **SLOW)
    assert made == pytest.approx(seconds)
    assert costs.all_reduce_seconds(algorithm, 1, 8000, **SLOW) == 0


@pytest.mark.parametrize("n", [4, 5, 8, 9, 64, 1000])
def test_a_tree_wins_below_and_a_ring_above(n):
    def seconds(algorithm, nbytes):
        return costs.all_reduce_seconds(algorithm, n, nbytes, **SLOW)

    size = costs.tree_wins_below(n, **SLOW)
    assert seconds("tree", size) == pytest.approx(seconds("ring", size))
    assert seconds("tree", 0.9 * size) < seconds("ring", 0.9 * size)
    assert seconds("tree", 1.1 * size) > seconds("ring", 1.1 * size)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_tree_of_up_to_three_ranks_never_wins(n):
    assert costs.tree_wins_below(n, **SLOW) == 0
    for nbytes in (0, 1, 1e6):
        tree, ring = (
            costs.all_reduce_seconds(a, n, nbytes, **SLOW) for a in ("tree", "ring")
        )
        assert tree >= ring


# ---------------------------------------------------------------- memory

GB = costs.GB
# ZeRO, arXiv 1910.02054, table 1: GB on each device with P_os, P_os+g and P_os+g+p.
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


@pytest.mark.parametrize("parameters", TABLE_1)
@pytest.mark.parametrize("gpus", TABLE_1[7.5e9])
def test_the_table_of_the_zero_paper(parameters, gpus):
    """Some entries are rounded and some cut off: one in the last digit may differ."""
    for stage, printed in enumerate(TABLE_1[parameters][gpus], start=1):
        found = costs.zero_memory(parameters, gpus=gpus, stage=stage).total / GB
        digits = len(str(printed).partition(".")[2])
        assert abs(found - printed) < 10**-digits, (stage, found)


def test_figure_1_of_the_zero_paper():
    states = [costs.zero_memory(7.5e9, gpus=64, stage=stage) for stage in range(4)]
    totals = [one.total / GB for one in states]
    assert totals == pytest.approx([120, 31.40625, 16.640625, 1.875])
    assert [round(total, 1) for total in totals] == [120, 31.4, 16.6, 1.9]
    assert [one.parameters / GB for one in states] == [15, 15, 15, 15 / 64]
    assert [one.gradients / GB for one in states] == [15, 15, 15 / 64, 15 / 64]
    assert [one.optimizer / GB for one in states] == [90, 90 / 64, 90 / 64, 90 / 64]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
def test_stages_divide_one_thing_after_the_other(optimizer, precision):
    kind = {"optimizer": optimizer, "precision": precision}
    one = costs.state_bytes(**kind)
    for n in (1, 3, 8):
        for stage in range(4):
            made = costs.zero_memory(1000, gpus=n, stage=stage, **kind)
            parts = (made.optimizer, made.gradients, made.parameters)
            whole = (one.optimizer, one.gradients, one.parameters)
            for place, (part, bytes_each) in enumerate(zip(parts, whole, strict=True)):
                shared = n if stage > place else 1
                assert part == pytest.approx(1000 * bytes_each / shared)
            assert made.total == pytest.approx(sum(parts))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("sizes", [[12, 3], [1], [5, 0, 7, 100], [0], [], [16, 16]])
def test_shards_hold_all_elements_once_and_in_order(sizes, n):
    parts = costs.shard_parts(sizes, n)
    shard = costs.shard_size(sum(sizes), n)
    assert len(parts) == n
    flat = [(place, i) for place, size in enumerate(sizes) for i in range(size)]
    held = [[(p, i) for p, a, b in part for i in range(a, b)] for part in parts]
    assert [one for rank in held for one in rank] == flat
    full, rest = divmod(sum(sizes), shard) if shard else (0, 0)
    filled = [shard] * full + [rest] * (full < n) + [0] * (n - full - 1)
    assert [len(rank) for rank in held] == filled
    assert n * shard - sum(sizes) < n  # never a whole shard's worth on each rank


def step_of_fsdp(units, n, *, one, ahead, waiting=0, buffers=1, copied=(), freed=True):
    """One step, tensor by tensor: the most bytes of all, and of whole parameters."""
    shards = [math.ceil(size / n) for size in units]
    each = one.parameters
    kept = sum(shards) * (one.parameters + one.optimizer)
    whole, grads, arrived, most = {}, {}, {}, [kept + sum(shards) * one.gradients]
    most_whole = [0]

    def look(copy=0):
        held = sum(whole.values()) + sum(grads.values()) + sum(arrived.values())
        most.append(kept + held + copy)
        most_whole.append(sum(whole.values()))

    for i in range(len(units)):
        for j in range(i, min(i + ahead + 1, len(units))):
            whole[j] = n * shards[j] * each
            look()
        if freed:
            del whole[i]
    for i in reversed(range(len(units))):
        for j in range(i, max(i - ahead - 1, -1), -1):
            whole[j] = n * shards[j] * each
        grads[i] = n * shards[i] * each
        look(each * copied[i] if copied else 0)
        del whole[i]
        arrived[i] = shards[i] * each * buffers
        if len(grads) > waiting:
            done = max(grads)
            del grads[done]
            arrived[done] = shards[done] * one.gradients
    return max(most), max(most_whole)


def test_fsdp_memory_is_that_of_a_step_tensor_by_tensor():
    rng = random.Random(0)
    one = costs.state_bytes("sgd", "float32")
    for _ in range(300):
        units = [rng.randrange(0, 1000) for _ in range(rng.randrange(1, 9))]
        n, ahead = rng.randrange(1, 9), rng.randrange(4)
        found = costs.fsdp_memory(units, n, prefetch=ahead)
        _, whole = step_of_fsdp(units, n, one=one, ahead=ahead)
        assert found.gathered == whole
        shards = sum(costs.shard_size(size, n) for size in units)
        assert found.parameter_peak == shards * one.parameters + whole


def test_the_parameter_peak_of_the_fsdp_paper():
    """Σψ/F + max ψ: a tenth of the model on top of a quarter, for ten equal units."""
    psi = 4 * 10_000
    memory = costs.fsdp_memory([1000] * 10, world_size=4)
    assert memory.parameter_peak == 0.35 * psi
    # One unit for all: no less than without FSDP, and its shard on top.
    assert costs.fsdp_memory([10_000], 4).parameter_peak == 1.25 * psi
    # A prefetched unit costs as much again; unequal units, as much as the largest.
    assert costs.fsdp_memory([1000] * 10, 4, prefetch=1).parameter_peak == 0.45 * psi
    unequal = costs.fsdp_memory([400, 8000, 1600], 4)
    assert unequal.parameter_peak == (0.25 + 0.8) * psi


def test_activations_of_gpt_3():
    """Korthikanti et al., arXiv 2205.05198: 2.87 GB a layer, selective saves 70.2 %."""
    gpt3 = {"batch": 1, "sequence": 2048, "width": 12288, "heads": 96}
    sbh = 2048 * 12288
    layer = costs.activation_bytes(**gpt3)
    assert layer == sbh * (34 + 5 * 96 * 2048 / 12288) == sbh * 114
    assert layer / GB == pytest.approx(2.87, abs=5e-3)
    selective = costs.activation_bytes(**gpt3, recompute="selective")
    assert selective == 34 * sbh
    assert 1 - selective / layer == pytest.approx(0.702, abs=5e-4)
    assert costs.activation_bytes(**gpt3, recompute="full") == 2 * sbh
    assert costs.activation_bytes(**gpt3, layers=96) == 96 * layer
    # Linear in the batch; attention weights grow with the square of the sequence.
    assert costs.activation_bytes(4, 2048, 12288, 96) == 4 * layer
    longer = costs.activation_bytes(1, 4096, 12288, 96)
    assert longer == 2 * 34 * sbh + 4 * 80 * sbh
    head = costs.activation_bytes(**gpt3, vocabulary=51200) - layer
    assert head == 4 * sbh + 4 * 2048 * 51200


# ------------------------------------------------- memory, counted in real tensors


def gpt(layers=2, width=64, vocabulary=500, positions=32, dtype=None):
    """The parameters of a GPT, as modules; it does not need to compute."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    def layer():
        return nn.ModuleList(
            [
                *(nn.LayerNorm(width), nn.Linear(width, 3 * width)),
                *(nn.Linear(width, width), nn.LayerNorm(width)),
                *(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)),
            ]
        )

    model = nn.ModuleList([nn.Embedding(vocabulary, width)])
    model.append(nn.Embedding(positions, width))
    model.extend(layer() for _ in range(layers))
    model.append(nn.LayerNorm(width))
    return model.to(dtype)


@pytest.mark.parametrize(
    ("layers", "width", "vocabulary", "positions"),
    [(1, 8, 5, 0), (2, 64, 500, 32), (3, 24, 7, 11)],
)
def test_parameters_are_those_of_a_real_model(layers, width, vocabulary, positions):
    model = gpt(layers, width, vocabulary, positions)
    counted = sum(parameter.numel() for parameter in model.parameters())
    arguments = (layers, width, vocabulary, positions)
    assert costs.transformer_parameters(*arguments) == counted


def nbytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
def test_states_are_those_of_a_real_optimizer(optimizer, precision):
    """A model and torch.optim's optimizer after a step: the bytes of all tensors."""
    torch = pytest.importorskip("torch")
    makers = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda parameters: torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9
        ),
        "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    }
    low = torch.float32 if precision == "float32" else torch.bfloat16
    parameters = [*gpt(dtype=low).parameters()]
    masters = []
    if precision == "mixed":
        masters = [p.detach().float().requires_grad_() for p in parameters]
    steps = makers[optimizer](masters or parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for master, parameter in zip(masters, parameters, strict=False):
        master.grad = parameter.grad.float()
    steps.step()
    for master, parameter in zip(masters, parameters, strict=False):
        master.grad = None
        parameter.data.copy_(master)
    kept = [
        value
        for state in steps.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    found = costs.ModelStates(
        nbytes_of(parameters),
        nbytes_of(parameter.grad for parameter in parameters),
        nbytes_of([*kept, *masters]),
    )
    size = costs.transformer_parameters(2, 64, 500, 32)
    expected = costs.zero_memory(size, optimizer=optimizer, precision=precision)
    assert found.parameters == expected.parameters
    assert found.gradients == expected.gradients
    # Adam counts its steps in a number for each tensor.
    assert found.optimizer == pytest.approx(expected.optimizer, rel=0.01)


def saved_bytes(forward, modules):
    """Bytes of storages that a forward pass saves, without those of parameters."""
    torch = pytest.importorskip("torch")
    saved = {}
    own = {
        parameter.untyped_storage().data_ptr()
        for module in modules
        for parameter in module.parameters()
    }

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # kept, so that no address is used twice
    assert result.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_activations_are_those_of_a_real_layer(recompute, precision):
    """A layer as in the paper's figure 2; dropout keeps a mask of one byte a number."""
    torch = pytest.importorskip("torch")
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    s, b, h, a, v = 128, 2, 256, 4, 1000
    dtype = getattr(torch, precision)
    one = {"dtype": dtype}
    norm_1, norm_2, norm_3 = (torch.nn.LayerNorm(h, **one) for _ in range(3))
    qkv, out = torch.nn.Linear(h, 3 * h, **one), torch.nn.Linear(h, h, **one)
    up, down = torch.nn.Linear(h, 4 * h, **one), torch.nn.Linear(4 * h, h, **one)
    head = torch.nn.Linear(h, v, bias=False, **one)

    def dropout(x):
        return torch.native_dropout(x, 0.1, True)[0]

    def attention(queries, keys, values):
        scores = torch.bmm(queries, keys.transpose(1, 2)) * (h // a) ** -0.5
        return torch.bmm(dropout(scores.softmax(-1)), values)

    def layer(x):
        heads = qkv(norm_1(x)).view(s, b * a, 3 * h // a).transpose(0, 1)
        parts = heads.chunk(3, dim=-1)
        if recompute == "selective":
            mixed = checkpoint(attention, *parts, use_reentrant=True)
        else:
            mixed = attention(*parts)
        x = x + dropout(out(mixed.transpose(0, 1).reshape(s, b, h)))
        return x + dropout(down(functional.gelu(up(norm_2(x)))))

    def some_layers(x, layers):
        for _ in range(layers):
            x = checkpoint(layer, x, use_reentrant=True) if full else layer(x)
        return x

    def loss(x, layers):
        logits = head(norm_3(some_layers(x, layers))).float().view(-1, v)
        return functional.cross_entropy(logits, torch.zeros(s * b, dtype=torch.long))

    modules = (norm_1, norm_2, norm_3, qkv, out, up, down, head)
    full = recompute == "full"
    x = torch.randn(s, b, h, requires_grad=True, **one)
    sizes = {"batch": b, "sequence": s, "width": h, "heads": a}
    sizes |= {"recompute": recompute, "element_bytes": x.element_size()}
    for layers in (1, 3):
        measured = saved_bytes(lambda layers=layers: some_layers(x, layers), modules)
        formula = costs.activation_bytes(**sizes, layers=layers)
        assert measured == pytest.approx(formula, rel=0.01), layers
    measured = saved_bytes(lambda: loss(x, 3), modules)
    formula = costs.activation_bytes(**sizes, layers=3, vocabulary=v)
    assert measured == pytest.approx(formula, rel=0.01)


WIDTH = 128
# Two units of one tensor, and two of three: all their elements, and the largest tensor.
UNITS = [WIDTH**2, 7 * WIDTH**2, WIDTH**2, 7 * WIDTH**2]
LARGEST = [WIDTH**2, 3 * WIDTH**2, WIDTH**2, 3 * WIDTH**2]


def measured_fsdp(options):
    """Bytes of all tensors of a rank at the peak of a step, and after it."""
    import torch
    from torch import nn

    from course_utils.from_scratch import fsdp
    from course_utils.measure.tensor_bytes import record_tensor_bytes

    def linear(inputs, outputs):
        return nn.Linear(inputs * WIDTH, outputs * WIDTH, bias=False)

    def unit(tensors):
        if tensors == 1:
            return linear(1, 1)
        return nn.Sequential(linear(1, 1), linear(1, 3), linear(3, 1))

    with record_tensor_bytes() as record:
        module = nn.Sequential(*(unit(tensors) for tensors in (1, 3, 1, 3)))
        model = fsdp.FSDP(module, units=[*module], **options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for step in range(2):  # the first one makes the optimizer's states
            optimizer.zero_grad()
            with record.label(f"step {step}"):
                model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
    return record.peak_of("step 1"), record.end


def test_the_memory_of_real_ranks_is_that_of_a_step_tensor_by_tensor():
    """From scratch, on gloo, to 1 %: the rest are activations of one row."""
    one = costs.state_bytes("adam", "float32")
    persistent = one.total * sum(UNITS) / 4
    with Ranks(4, quiet=True) as ranks:
        for options in (
            {"prefetch": 0, "max_reduces": 1},
            {"prefetch": 1, "max_reduces": None},
            {"prefetch": 1, "max_reduces": 0, "reshard_after_forward": False},
        ):
            bound = options["max_reduces"]
            expected, _ = step_of_fsdp(
                UNITS,
                4,
                one=one,
                ahead=options["prefetch"],
                waiting=3 if bound is None else bound,
                buffers=3,  # the pieces of the other ranks arrive one by one
                copied=LARGEST,
                freed=options.get("reshard_after_forward", True),
            )
            for peak, end in ranks.run(measured_fsdp, options):
                assert peak == pytest.approx(expected, rel=0.01), options
                assert end == pytest.approx(persistent, rel=0.01), options


# ---------------------------------------------------------------- cards and shapes


def test_cards_have_what_nvidia_smi_reports():
    sizes = [card.nbytes for card in costs.CARDS]
    assert sizes == sorted(sizes)
    for card in costs.CARDS:
        number, unit = card.stated.split()
        assert unit == "GB"
        # NVIDIA states GB and builds in about as many GiB.
        assert 0.9 < card.nbytes / (float(number) * costs.GiB) < 1.001
        assert f"{card.nbytes // costs.MiB} MiB" in card.source
        assert card.stated in card.source
        assert costs.card(card.name) is card
    assert costs.card("H100").nbytes == 81_559 * costs.MiB


def test_transformers_have_the_sizes_of_their_names():
    sizes = [shape.parameters for shape in costs.TRANSFORMERS]
    assert sizes == sorted(sizes)
    for shape in costs.TRANSFORMERS:
        assert costs.transformer_shape(shape.name) is shape
        assert shape.width % shape.heads == 0
        number, _, word = shape.name.partition(" ")
        if word in ("billion", "trillion"):
            size = float(number) * {"billion": 1e9, "trillion": 1e12}[word]
            assert shape.parameters == pytest.approx(size, rel=0.03)
    # Radford et al. 2019, table 2, and the authors' code.
    assert costs.transformer_shape("GPT-2 small").parameters == 124_439_808
    assert costs.transformer_shape("GPT-2 XL").parameters == 1_557_611_200


# ---------------------------------------------------------------- wrong arguments

ONE = {"latency": 0, "bandwidth": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: costs.gigabits(-1), "number is -1: expected 0 or more."),
        (lambda: costs.gigabits("4"), "number is '4': expected a number."),
        (lambda: costs.gigabits(True), "number is True: expected a number."),
        (lambda: costs.rank_of(-1, 0, 4), "node is -1: expected a whole number from 0"),
        (lambda: costs.rank_of(0, 1.0, 4), "local_rank is 1.0: expected a whole"),
        (lambda: costs.rank_of(0, 0, 0), "gpus_per_node is 0: expected a whole number"),
        (
            lambda: costs.rank_of(0, 4, 4),
            "local_rank is 4, but a node with 4 GPU(s) has local ranks 0 to 3.",
        ),
        (lambda: costs.node_and_local_rank(-1, 4), "rank is -1"),
        (lambda: costs.node_and_local_rank(1, 0), "gpus_per_node is 0"),
        (lambda: costs.transfer_seconds(-1, **ONE), "nbytes is -1: expected 0 or more"),
        (
            lambda: costs.transfer_seconds(1, latency=0, bandwidth=0),
            "bandwidth is 0: expected more than 0.",
        ),
        (
            lambda: costs.transfer_seconds(1, latency=-1e-6, bandwidth=1),
            "latency is -1e-06: expected 0 or more.",
        ),
        (
            lambda: costs.transfer_seconds(math.nan, **ONE),
            "nbytes is nan: expected a finite number.",
        ),
        (
            lambda: costs.half_bandwidth_bytes(latency=1, bandwidth=math.inf),
            "bandwidth is inf: expected a finite number.",
        ),
        (lambda: costs.fit_transfer([1], [1, 2]), "There are 1 sizes and 2 times"),
        (
            lambda: costs.fit_transfer([8, 8], [1, 2]),
            "at least 2 different sizes, not 1.",
        ),
        (lambda: costs.fit_transfer([1, 2], [0, 1]), "a time is 0: expected more than"),
        (lambda: costs.fit_transfer([1, 2], [2, 1]), "The times do not grow"),
        (
            lambda: costs.training_seconds(1, 1, gpus=0, flops_per_gpu=1),
            "gpus is 0: expected a whole number from 1 up.",
        ),
        (lambda: costs.bubble_of_total(0, 4), "stages is 0: expected a whole number"),
        (lambda: costs.bubble_of_ideal(0, 4), "stages is 0: expected a whole number"),
        (lambda: costs.bubble_of_total(4, 0), "micro_batches is 0: expected a whole"),
        (lambda: costs.bubble_of_ideal(4, 1.5), "micro_batches is 1.5: expected"),
        (lambda: costs.pipeline_seconds(-1, 4, 8), "stage_seconds is -1: expected 0"),
        (
            lambda: costs.pipeline_seconds(1, 4, 8, overhead=-1),
            "overhead is -1: expected 0 or more.",
        ),
        (
            lambda: costs.best_micro_batches(1, 4, overhead=0),
            "overhead is 0: expected more than 0.",
        ),
        (
            lambda: costs.collective_cost("ring", 4, 8),
            "There is no collective 'ring'. There are: broadcast, broadcast_tree, ",
        ),
        (
            lambda: costs.collective_cost("reduce", 0, 8),
            "world_size is 0: expected a whole number from 1 up.",
        ),
        (lambda: costs.collective_cost("reduce", 2, -8), "nbytes is -8: expected 0"),
        (
            lambda: costs.bus_bandwidth_factor("scan", 4),
            "There is no collective 'scan'. There are: all_reduce, reduce_scatter, ",
        ),
        (lambda: costs.bus_bandwidth_factor("reduce", 2.0), "world_size is 2.0"),
        (lambda: costs.algorithm_bandwidth(8, 0), "seconds is 0: expected more than"),
        (lambda: costs.bus_bandwidth("reduce", 2, -1, 1), "nbytes is -1: expected 0"),
        (
            lambda: costs.all_reduce_seconds("star", 4, 8, **ONE),
            "There is no formula for 'star'. There are: naive, tree, halving-doubling, "
            "ring.",
        ),
        (
            lambda: costs.all_reduce_seconds("halving-doubling", 6, 8, **ONE),
            "needs a power of two of ranks, not 6",
        ),
        (lambda: costs.all_reduce_seconds("ring", 0, 8, **ONE), "world_size is 0"),
        (lambda: costs.all_reduce_seconds("ring", 2, -8, **ONE), "nbytes is -8"),
        (
            lambda: costs.all_reduce_seconds("ring", 2, 8, latency=-1, bandwidth=1),
            "latency is -1",
        ),
        (lambda: costs.tree_wins_below(0, **ONE), "world_size is 0: expected a whole"),
        (
            lambda: costs.tree_wins_below(4, latency=1, bandwidth=0),
            "bandwidth is 0: expected more than 0.",
        ),
        (lambda: costs.link("NVLink"), "There is no link 'NVLink' here. There are:"),
        (
            lambda: costs.state_bytes("adamw"),
            "optimizer is 'adamw': expected one of 'sgd', 'momentum', 'adam'.",
        ),
        (
            lambda: costs.state_bytes("adam", "float16"),
            "precision is 'float16': expected one of 'float32', 'bfloat16', 'mixed'.",
        ),
        (
            lambda: costs.zero_memory(1, stage=4),
            "stage is 4: expected one of 0, 1, 2, 3.",
        ),
        (lambda: costs.zero_memory(1, gpus=0), "gpus is 0: expected a whole number"),
        (lambda: costs.zero_memory(-1), "parameters is -1: expected 0 or more."),
        (lambda: costs.shard_size(1.5, 2), "elements is 1.5: expected a whole number"),
        (lambda: costs.shard_size(1, 0), "world_size is 0: expected a whole number"),
        (lambda: costs.shard_parts([1, -2], 2), "sizes[1] is -2: expected a whole"),
        (lambda: costs.shard_parts([1], 0), "world_size is 0"),
        (lambda: costs.fsdp_memory([], 4), "There are no units: expected the size of"),
        (lambda: costs.fsdp_memory([1, 0.5], 4), "units[1] is 0.5: expected a whole"),
        (lambda: costs.fsdp_memory([1], 0), "world_size is 0"),
        (lambda: costs.fsdp_memory([1], 4, prefetch=-1), "prefetch is -1"),
        (
            lambda: costs.activation_bytes(1, 2, 3, 4, recompute="all"),
            "recompute is 'all': expected one of 'none', 'selective', 'full'.",
        ),
        (lambda: costs.activation_bytes(0, 2, 3, 4), "batch is 0: expected a whole"),
        (lambda: costs.activation_bytes(1, 0, 3, 4), "sequence is 0"),
        (lambda: costs.activation_bytes(1, 2, 0, 4), "width is 0"),
        (lambda: costs.activation_bytes(1, 2, 3, 0), "heads is 0"),
        (lambda: costs.activation_bytes(1, 2, 3, 4, layers=0), "layers is 0"),
        (
            lambda: costs.activation_bytes(1, 2, 3, 4, element_bytes=0),
            "element_bytes is 0: expected more than 0.",
        ),
        (
            lambda: costs.activation_bytes(1, 2, 3, 4, vocabulary=-1),
            "vocabulary is -1: expected a whole number from 0 up.",
        ),
        (lambda: costs.transformer_parameters(0, 8, 5), "layers is 0"),
        (lambda: costs.transformer_parameters(1, 0, 5), "width is 0"),
        (lambda: costs.transformer_parameters(1, 8, 0), "vocabulary is 0"),
        (lambda: costs.transformer_parameters(1, 8, 5, -1), "positions is -1"),
        (
            lambda: costs.card("A100"),
            "There is no card 'A100' here. There are: T4, RTX 4090, A100 40GB, H100",
        ),
        (
            lambda: costs.transformer_shape("GPT-4"),
            "There is no transformer 'GPT-4' here. There are: GPT-2 small, GPT-2 XL",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_ddp_buckets_are_those_of_torch():
    torch = pytest.importorskip("torch")
    from torch.distributed import _compute_bucket_assignment_by_size as torchs

    assert costs.DDP_FIRST_BUCKET == torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
    rng = random.Random(0)
    for _ in range(100):
        sizes = [rng.randrange(1, 3_000_000) for _ in range(rng.randrange(1, 30))]
        caps = rng.choice([(1024, 2_000_000), (2**20, 25 * 2**20), (5, 5)])
        gradients = [torch.empty(size, device="meta") for size in sizes]
        ours = costs.ddp_buckets([4 * n for n in sizes], first_cap=caps[0], cap=caps[1])
        assert ours == torchs(gradients, list(caps))[0], (sizes, caps)
    assert costs.ddp_buckets([]) == []


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


def test_docstrings():
    failed, tried = doctest.testmod(costs)
    assert failed == 0
    assert tried >= 4
