"""Costs: the formulas against published numbers, and the ladder against its words."""

import doctest
import math
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from course_utils import costs
from course_utils.costs import LADDER, Link, Transfer


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


def test_two_levels_are_faster_than_one_ring_over_all_nodes():
    inside, between = Transfer(2e-6, 400e9), Transfer(10e-6, 50e9)
    for nbytes in (1e6, 1e9):
        two = costs.hierarchical_seconds(16, 8, nbytes, inside=inside, between=between)
        one = costs.all_reduce_seconds(
            "ring", 128, nbytes, latency=between.latency, bandwidth=between.bandwidth
        )
        assert two < one / 4
    # With one GPU a node, or with one node, a single ring is left.
    ring = costs.all_reduce_seconds("ring", 8, 1e6, latency=2e-6, bandwidth=400e9)
    both = {"inside": inside, "between": inside}
    assert costs.hierarchical_seconds(8, 1, 1e6, **both) == pytest.approx(ring)
    assert costs.hierarchical_seconds(1, 8, 1e6, **both) == pytest.approx(ring)


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


# ---------------------------------------------------------------- wrong arguments

ONE = {"latency": 0, "bandwidth": 1}
BOTH = {"inside": Transfer(0, 1), "between": Transfer(0, 1)}


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
        (lambda: costs.bubble_of_total(4, 0), "micro_batches is 0: expected a whole"),
        (lambda: costs.bubble_of_ideal(4, 1.5), "micro_batches is 1.5: expected"),
        (lambda: costs.bubble_of_ideal(4, 8, chunks=0), "chunks is 0: expected a"),
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
            "ring; and hierarchical_seconds().",
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
        (lambda: costs.hierarchical_seconds(0, 8, 8, **BOTH), "nodes is 0: expected"),
        (lambda: costs.hierarchical_seconds(2, 0, 8, **BOTH), "gpus_per_node is 0"),
        (lambda: costs.hierarchical_seconds(2, 2, -8, **BOTH), "nbytes is -8"),
        (lambda: costs.tree_wins_below(0, **ONE), "world_size is 0: expected a whole"),
        (
            lambda: costs.tree_wins_below(4, latency=1, bandwidth=0),
            "bandwidth is 0: expected more than 0.",
        ),
        (lambda: costs.link("NVLink"), "There is no link 'NVLink' on the ladder."),
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
