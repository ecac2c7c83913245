"""The simulator: equal to the closed formulas, and right where there is none."""

import dataclasses
import heapq
import itertools
import random
import time

import numpy as np
import pytest

from course_utils.theory import costs, simulator
from course_utils.theory.costs import Transfer
from course_utils.theory.simulator import (
    Cluster,
    Layer,
    Model,
    all_reduce,
    ddp_step,
    fsdp_step,
)

LINK = Transfer(latency=5e-6, bandwidth=10e9)
S = 3e8


def flat(gpus, link=LINK):
    """GPUs that are all connected in the same way."""
    return Cluster(
        name="flat",
        nodes=gpus,
        gpus_per_node=1,
        inside=link,
        between=link,
        cards=1,
        flops=1e12,
    )


def two_levels(nodes, gpus_per_node, cards=1):
    return Cluster(
        name="two levels",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        inside=Transfer(2e-6, 100e9),
        between=Transfer(9e-6, 10e9),
        cards=cards,
        flops=1e12,
    )


def formula(algorithm, n, nbytes, link=LINK):
    """Seconds of an all-reduce where all links are alike."""
    if algorithm == "hierarchical":
        algorithm = "ring"  # between nodes of one GPU
    return costs.all_reduce_seconds(
        algorithm, n, nbytes, latency=link.latency, bandwidth=link.bandwidth
    )


POWERS_ONLY = {"tree", "halving-doubling"}


@pytest.mark.parametrize("algorithm", simulator.ALGORITHMS)
@pytest.mark.parametrize("nbytes", [0, 1, 1e4, S])
def test_equal_to_the_closed_formula(algorithm, nbytes):
    sizes = (1, 2, 4, 8, 64, 256) if algorithm in POWERS_ONLY else (1, 2, 3, 5, 8, 100)
    for n in sizes:
        run = all_reduce(flat(n), nbytes, algorithm)
        expected = formula(algorithm, n, nbytes)
        assert run.seconds == pytest.approx(expected, rel=1e-9, abs=1e-18), n
        assert run.finished.shape == (n,)


def test_ten_thousand_gpus_message_by_message():
    begin = time.perf_counter()
    run = all_reduce(flat(10_000), S, every_gpu=True)
    assert run.seconds == pytest.approx(formula("ring", 10_000, S), rel=1e-9)
    assert run.messages == 2 * 9_999 * 10_000
    # The goal is one second; this only notices a loop over GPUs in Python.
    assert time.perf_counter() - begin < 30


def test_a_hundred_thousand_gpus():
    assert all_reduce(flat(100_000), S).seconds == pytest.approx(
        formula("ring", 100_000, S), rel=1e-9
    )


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "tree", "naive"])
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 4, 1), (5, 8, 8), (7, 3, 2)])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, S])
def test_gpus_that_behave_alike_need_not_be_simulated_one_by_one(
    algorithm, shape, nbytes
):
    cluster = two_levels(*shape)
    one_by_one = all_reduce(cluster, nbytes, algorithm, every_gpu=True)
    together = all_reduce(cluster, nbytes, algorithm, every_gpu=False)
    assert together.seconds == pytest.approx(one_by_one.seconds, rel=1e-9)
    assert together.messages == one_by_one.messages
    np.testing.assert_allclose(together.sent, one_by_one.sent)


def test_bytes_and_messages_are_those_of_the_formulas():
    for n in (1, 2, 5, 8):
        ring = all_reduce(flat(n), S, "ring")
        cost = costs.collective_cost("all_reduce", n, S)
        assert ring.messages == cost.messages
        assert ring.sent.sum() == pytest.approx(cost.nbytes)
        assert ring.sent.max() == pytest.approx(cost.most_sent)
        naive = all_reduce(flat(n), S, "naive")
        cost = costs.collective_cost("all_reduce_naive", n, S)
        assert naive.messages == cost.messages
        assert naive.sent.max() == pytest.approx(cost.most_sent)
    # Patarasuk and Yuan 2009: no all-reduce sends less than 2(n-1)/n of the data.
    for algorithm in simulator.ALGORITHMS:
        run = all_reduce(flat(8), S, algorithm)
        assert run.sent.sum() >= 2 * 7 / 8 * 8 * S * (1 - 1e-12), algorithm


def test_hierarchical_is_three_rings_one_after_the_other():
    g, nodes = 4, 6
    cluster = two_levels(nodes, g, cards=2)
    run = all_reduce(cluster, S, "hierarchical")
    in_nodes = 2 * (g - 1) * cluster.inside.seconds(S / g)
    between = 2 * (nodes - 1) * cluster.between_nodes(g).seconds(S / g / nodes)
    expected = in_nodes + between
    assert run.seconds == pytest.approx(expected, rel=1e-9)
    assert run.messages == 2 * (g - 1) * g * nodes + 2 * (nodes - 1) * g * nodes


def test_a_large_ring_is_as_fast_as_its_slowest_link():
    cluster = two_levels(4, 8)
    n = cluster.gpus
    run = all_reduce(cluster, 1e12)
    assert run.seconds == pytest.approx(
        2 * (n - 1) / n * 1e12 / cluster.between.bandwidth, rel=1e-4
    )


def test_a_small_ring_costs_the_latencies_of_its_way():
    cluster = two_levels(4, 8)
    run = all_reduce(cluster, 0)
    # A chunk goes over 62 links. NCCL counts 2(N-1) of them between nodes, which is the
    # luckiest chunk; the unluckiest crosses two more.
    inside, between = cluster.inside.latency, cluster.between.latency
    assert run.seconds == pytest.approx(8 * between + 54 * inside)
    assert run.finished.min() == pytest.approx(7 * between + 55 * inside)


def test_a_tree_wins_with_small_tensors_and_loses_with_large_ones():
    cluster = flat(64)
    small = {a: all_reduce(cluster, 1e3, a).seconds for a in ("ring", "tree", "naive")}
    large = {a: all_reduce(cluster, 1e9, a).seconds for a in ("ring", "tree", "naive")}
    assert small["naive"] < small["tree"] < small["ring"]
    assert large["ring"] < large["tree"] < large["naive"]
    size = costs.tree_wins_below(64, latency=LINK.latency, bandwidth=LINK.bandwidth)
    ring, tree = (all_reduce(cluster, size, a).seconds for a in ("ring", "tree"))
    assert ring == pytest.approx(tree, rel=1e-9)


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 100])
@pytest.mark.parametrize("nbytes", [0, 1e3, S])
def test_a_tree_of_any_number_of_gpus(n, nbytes):
    """The formula is that of a full tree: it is at most two latencies too long."""
    run, full = all_reduce(flat(n), nbytes, "tree"), formula("tree", n, nbytes)
    assert full - 2 * LINK.latency <= run.seconds * (1 + 1e-12)
    assert run.seconds <= full * (1 + 1e-12)


# --- late GPUs and slow links ---------------------------------------------------


@pytest.mark.parametrize("algorithm", simulator.ALGORITHMS)
@pytest.mark.parametrize("late", [0, 3, 7])
def test_everybody_waits_for_the_last_one(algorithm, late):
    usual = all_reduce(flat(8), S, algorithm).seconds
    run = all_reduce(flat(8), S, algorithm, ready={late: 1.0})
    assert 1.0 <= run.seconds <= 1.0 + usual + 1e-12
    if algorithm in ("ring", "halving-doubling"):
        assert run.seconds == pytest.approx(1.0 + usual)
    # Nobody has a result before the last one has joined.
    others = np.delete(run.finished, late) if algorithm == "naive" else run.finished
    assert others.min() >= 1.0


def test_one_slow_link_slows_the_whole_ring():
    usual = all_reduce(flat(8), S).seconds
    slow = all_reduce(flat(8), S, slow_links={(3, 4): 10}).seconds
    chunk = S / 8 / LINK.bandwidth
    assert slow == pytest.approx(2 * 7 * 10 * chunk, rel=0.05)
    assert 9 < slow / usual < 11
    # A link that the algorithm does not use changes nothing.
    assert all_reduce(flat(8), S, slow_links={(4, 3): 10}).seconds == usual


def messages_of_a_ring(n, nbytes):
    """(step, source, target, bytes); each needs what its source got a step before."""
    return [
        (step, rank, (rank + 1) % n, nbytes / n)
        for step in range(2 * (n - 1))
        for rank in range(n)
    ]


def one_message_after_the_other(n, messages, ready, busy, latency):
    """The same model, as plain as can be: events in the order of their times."""
    waiting = {r: [m for m in messages if m[1] == r] for r in range(n)}
    arrived = {(0, r): ready[r] for r in range(n)}
    out = [0.0] * n
    finished = list(ready)
    events = [(ready[r], r) for r in range(n)]
    heapq.heapify(events)
    while events:
        now, rank = heapq.heappop(events)
        while waiting[rank] and (waiting[rank][0][0], rank) in arrived:
            step, source, target, _ = waiting[rank].pop(0)
            start = max(arrived[step, source], out[source])
            out[source] = start + busy[source]
            come = out[source] + latency[source]
            seen = max(come, arrived.get((step, target), 0.0))
            arrived[step + 1, target] = seen
            finished[target] = max(finished[target], come)
            heapq.heappush(events, (come, target))
            heapq.heappush(events, (now, target))
    assert not any(waiting.values())
    return finished


@pytest.mark.parametrize("seed", range(12))
def test_equal_to_a_simulation_of_single_events(seed):
    rng = random.Random(seed)
    n = rng.randrange(2, 7)
    nbytes = 10 ** rng.uniform(2, 9)
    ready = {r: rng.uniform(0, 1e-2) for r in range(n) if rng.random() < 0.4}
    slow = {
        (r, (r + 1) % n): rng.uniform(1, 20) for r in range(n) if rng.random() < 0.4
    }
    run = all_reduce(flat(n), nbytes, ready=ready, slow_links=slow, every_gpu=True)
    expected = one_message_after_the_other(
        n,
        messages_of_a_ring(n, nbytes),
        [ready.get(r, 0.0) for r in range(n)],
        [
            nbytes / n / LINK.bandwidth * slow.get((r, (r + 1) % n), 1.0)
            for r in range(n)
        ],
        [LINK.latency] * n,
    )
    np.testing.assert_allclose(run.finished, expected, rtol=1e-9)


def test_ports_are_used_one_message_at_a_time():
    """Two messages to one GPU take twice as long as one; to two GPUs, they do not."""
    network = simulator._Network(flat(4), {}, {}, True)
    network.round(np.array([1]), np.array([0]), S)
    one = network.now[0]
    network.round(np.array([2]), np.array([0]), S)
    assert network.now[0] == pytest.approx(one + S / LINK.bandwidth)
    network.round(np.array([1]), np.array([3]), S)
    assert network.now[3] == pytest.approx(one + S / LINK.bandwidth)


def test_cards_are_shared_by_those_who_use_them_at_the_same_time():
    cluster = two_levels(2, 4, cards=2)
    assert cluster.between_nodes(1).bandwidth == 20e9
    assert cluster.between_nodes(4).bandwidth == 5e9
    network = simulator._Network(cluster, {}, {}, True)
    network.round(np.array([0, 1]), np.array([4, 5]), S)  # two of them at once
    assert network.now[4] == pytest.approx(S / 10e9 + 9e-6)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"algorithm": "rings"}, "There is no algorithm 'rings'. The simulator has:"),
        ({"nbytes": -1}, "nbytes is -1: expected 0 or more"),
        ({"ready": {8: 1.0}}, "ready names rank 8, but the ranks are 0 to 7"),
        ({"ready": {1: -1.0}}, "ready of rank 1 is -1.0"),
        ({"slow_links": {(0, 9): 2}}, "slow_links names rank 9"),
        ({"slow_links": {(0, 1): 0}}, r"the factor of the link \(0, 1\) is 0"),
        ({"ready": {0: 1.0}, "every_gpu": False}, "Leave every_gpu out"),
    ],
)
def test_bad_input(wrong, says):
    arguments = {"nbytes": S, **wrong}
    with pytest.raises(ValueError, match=says):
        all_reduce(flat(8), **arguments)


def test_bad_clusters_and_sizes():
    with pytest.raises(ValueError, match="nodes is 0"):
        flat(8).with_nodes(0)
    with pytest.raises(ValueError, match="needs a power of two of GPUs, not 6"):
        all_reduce(flat(6), S, "halving-doubling")


def test_the_clusters_are_those_of_their_data_sheets():
    for name, pod in simulator.CLUSTERS.items():
        assert pod.name == name and "NCCL" in pod.source
    h100 = simulator.CLUSTERS["H100, InfiniBand"]
    assert h100.inside.bandwidth == 450e9  # half of 900 GB/s: one way
    assert h100.between.bandwidth * h100.cards == 400e9  # eight times 400 Gb/s
    assert simulator.CLUSTERS["A100, InfiniBand"].between.bandwidth == 25e9


# --- a step of DDP --------------------------------------------------------------

MiB = costs.MiB
FOUR = Model("four layers", tuple(Layer(MiB // 4, 1e9) for _ in range(4)), "image")


def test_a_step_without_others_is_its_computing():
    step = ddp_step(flat(1), FOUR, samples=10, utilization=0.5)
    assert step.seconds == step.compute == pytest.approx(10 * 12e9 / 0.5e12)
    assert step.efficiency == 1 and step.exposed == 0 and step.waiting == 0
    assert step.forward == pytest.approx(step.seconds / 3)


def test_buckets_leave_as_soon_as_they_are_full():
    cluster = flat(4)
    step = ddp_step(cluster, FOUR, 10, bucket_bytes=2 * MiB)
    assert [b.nbytes for b in step.buckets] == [MiB, 2 * MiB, MiB]
    layer = 2 * 10 * 1e9 / 0.5e12
    ready = [step.forward + k * layer for k in (1, 3, 4)]
    assert [b.ready for b in step.buckets] == pytest.approx(ready)
    # Fast links: nobody waits for the one before, and only the last one is seen.
    assert [b.start for b in step.buckets] == pytest.approx(ready)
    last = formula("ring", 4, MiB)
    assert step.exposed == pytest.approx(last)
    assert step.seconds == pytest.approx(step.compute + last)


def test_all_reduces_queue_up_behind_each_other():
    slow = flat(4, Transfer(1e-3, 1e7))
    step = ddp_step(slow, FOUR, 10, bucket_bytes=2 * MiB)
    times = [formula("ring", 4, n * MiB, Transfer(1e-3, 1e7)) for n in (1, 2, 1)]
    assert step.communication == pytest.approx(sum(times))
    assert step.seconds == pytest.approx(step.buckets[0].ready + sum(times))
    for before, after in itertools.pairwise(step.buckets):
        assert after.start == before.stop


@pytest.mark.parametrize("pod", simulator.CLUSTERS.values(), ids=lambda pod: pod.name)
@pytest.mark.parametrize("model", simulator.MODELS.values(), ids=lambda m: m.name)
def test_what_holds_of_every_step(pod, model):
    for nodes in (1, 4):
        cluster = pod.with_nodes(nodes)
        hidden = ddp_step(cluster, model, 64)
        seen = ddp_step(cluster, model, 64, overlap=False)
        parts = hidden.compute + hidden.waiting + hidden.exposed
        assert hidden.seconds == pytest.approx(parts)
        assert seen.seconds == pytest.approx(seen.compute + seen.communication)
        assert max(hidden.compute, hidden.communication) <= hidden.seconds
        assert hidden.seconds <= seen.seconds + 1e-12
        assert 0 < hidden.efficiency <= 1
        assert sum(b.nbytes for b in hidden.buckets) == 4 * model.parameters
        half = ddp_step(cluster, model, 64, gradient_bytes=2)
        assert half.communication <= hidden.communication


def test_a_slow_gpu_slows_all():
    usual = ddp_step(flat(8), FOUR, 10)
    slow = ddp_step(flat(8), FOUR, 10, slow_gpus={5: 1.5})
    assert slow.compute == pytest.approx(usual.compute)
    assert slow.waiting == pytest.approx(0.5 * usual.compute)
    assert slow.seconds == pytest.approx(
        1.5 * usual.compute + formula("ring", 8, 3 * MiB)
    )


def test_larger_batches_hide_more():
    pod = simulator.CLUSTERS["A100, Ethernet"].with_nodes(4)
    model = simulator.MODELS["ResNet-50"]
    efficiency = [ddp_step(pod, model, batch).efficiency for batch in (16, 64, 256)]
    assert efficiency == sorted(efficiency) and efficiency[0] < 0.3 < efficiency[-1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"samples": 0}, "samples is 0: expected more than 0"),
        ({"utilization": 1.5}, "utilization is 1.5: expected a share up to 1"),
        ({"slow_gpus": {4: 2}}, "slow_gpus names rank 4"),
        ({"slow_gpus": {0: 0.5}}, "0.5 for rank 0: expected 1 or more"),
        ({"slow_gpus": dict.fromkeys(range(4), 2)}, "All GPUs are slow"),
        ({"bucket_bytes": 0}, "cap is 0"),
        ({"algorithm": "star"}, "There is no algorithm 'star'"),
    ],
)
def test_bad_steps(wrong, says):
    with pytest.raises(ValueError, match=says):
        ddp_step(flat(4), FOUR, **{"samples": 1, **wrong})


# --- a step of FSDP -------------------------------------------------------------

UNTIED = simulator.transformer(
    "untied", layers=6, width=256, vocabulary=1000, tied=False
)
NO_LATENCY = Transfer(0.0, 1e9)
UNIT = MiB // 4  # parameters of a layer of FOUR: 1 MiB in float32


def half(n, nbytes, link=LINK):
    """Seconds of an all-gather, or of a reduce-scatter."""
    return (n - 1) * (link.latency + nbytes / n / link.bandwidth)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_an_all_gather_is_half_of_a_ring_all_reduce(n):
    run = simulator.all_gather(flat(n), S)
    assert run.seconds == pytest.approx(half(n, S))
    assert 2 * run.seconds == pytest.approx(all_reduce(flat(n), S, "ring").seconds)
    sent = costs.bus_bandwidth_factor("all_gather", n) * S
    np.testing.assert_allclose(run.sent, [sent] * n)
    assert run.messages == n * (n - 1)
    pods = two_levels(4, 2)
    one_by_one = simulator.all_gather(pods, S, every_gpu=True).seconds
    together = simulator.all_gather(pods, S, every_gpu=False).seconds
    assert together == pytest.approx(one_by_one, rel=1e-9)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("model", [FOUR, UNTIED], ids=lambda model: model.name)
def test_without_overlap_a_step_is_the_sum_of_its_parts(n, model):
    cluster = flat(n)
    alone = fsdp_step(flat(1), model, 10)
    assert alone.seconds == alone.compute and alone.sent == 0
    assert alone.seconds == pytest.approx(10 * model.flops / (0.5 * cluster.flops))
    sizes = [4 * layer.parameters for layer in model.layers]

    step = fsdp_step(cluster, model, 10, prefetch=0)
    gathers = sum(half(n, size) for size in sizes)
    assert step.seconds == pytest.approx(alone.seconds + 3 * gathers)

    one = simulator.Model("one", (simulator.Layer(MiB // 4, 1e9),), "sample")
    for prefetch in (0, 1, 3):  # there is no next unit
        step = fsdp_step(cluster, one, 10, prefetch=prefetch)
        assert step.seconds == pytest.approx(step.compute + 3 * half(n, MiB))
        assert step.whole == MiB
        assert [event.kind for event in step.events] == [
            *("all-gather", "forward", "free"),
            *("all-gather", "backward", "free", "reduce-scatter"),
        ]


def test_fast_links_show_only_what_nothing_can_hide():
    """The first all-gathers of both passes, and the last reduce-scatter."""
    step = fsdp_step(flat(4), FOUR, 10)
    part = half(4, MiB)
    assert part < 10 * 1e9 / 0.5e12  # less than the forward pass of a layer
    assert step.exposed == pytest.approx(3 * part)
    assert step.communication == pytest.approx(12 * part)
    assert step.seconds == pytest.approx(step.compute + step.exposed)


def test_slow_links_make_a_step_half_as_long_again_as_that_of_ddp():
    for model in (FOUR, UNTIED):
        slow = flat(4, Transfer(0.0, 1e3))
        ddp, fsdp = ddp_step(slow, model, 1), fsdp_step(slow, model, 1)
        assert fsdp.communication / ddp.communication == pytest.approx(1.5)
        assert fsdp.seconds / ddp.seconds == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_are_those_of_the_formula(n):
    nbytes = 4 * UNTIED.parameters
    sent = fsdp_step(flat(n), UNTIED, 1).sent
    assert sent == pytest.approx(3 * (n - 1) / n * nbytes)
    # What DDP sends, message by message.
    ddp = all_reduce(flat(n), nbytes, "ring").sent[0]
    assert sent / ddp == pytest.approx(1.5)


def test_shared_weights_stay_whole():
    tied = simulator.transformer("tied", layers=6, width=256, vocabulary=1000)
    step = fsdp_step(flat(4), tied, 1)
    gathers = [e.unit for e in step.events if e.kind == "all-gather"]
    assert gathers.count("layer 0") == 1
    assert all(gathers.count(f"layer {k}") == 2 for k in range(1, 7))
    assert "layer 7" not in gathers  # it computes with the weights of layer 0
    embedding = 4 * tied.layers[0].parameters
    everything = 3 * 3 / 4 * (4 * tied.parameters)
    assert step.sent == pytest.approx(everything - 3 / 4 * embedding)
    assert step.whole == embedding + 2 * 4 * tied.layers[1].parameters


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_whole_parameters_are_those_of_the_formula(prefetch):
    step = fsdp_step(flat(4, NO_LATENCY), FOUR, 1000, prefetch=prefetch)
    memory = costs.fsdp_memory([UNIT] * 4, 4, prefetch=prefetch)
    assert step.whole == memory.gathered
    # With slow links, units that wait for the network come later.
    slow = fsdp_step(flat(4, Transfer(0, 1e3)), FOUR, 1, prefetch=prefetch)
    assert slow.whole <= memory.gathered


@pytest.mark.parametrize("pod", simulator.CLUSTERS.values(), ids=lambda pod: pod.name)
@pytest.mark.parametrize("model", [*simulator.MODELS.values(), UNTIED])
def test_what_holds_of_every_step_of_fsdp(pod, model):
    cluster = pod.with_nodes(4)
    seconds = []
    for prefetch in (2, 1, 0):
        step = fsdp_step(cluster, model, 64, prefetch=prefetch)
        seconds.append(step.seconds)
        assert step.seconds == pytest.approx(step.compute + step.exposed)
        assert max(step.compute, step.communication) <= step.seconds * (1 + 1e-12)
        assert 0 < step.efficiency <= 1
        check_order(step.events)
        assert step.seconds == max(event.stop for event in step.events)
    assert seconds == sorted(seconds)
    ddp = ddp_step(cluster, model, 64)
    assert ddp.compute == pytest.approx(step.compute)


def check_order(events):
    """Nothing computes before it is whole; the network and the GPU do one thing."""
    whole, reduced = {}, set()
    computing = [e for e in events if e.kind in ("forward", "backward")]
    sending = [e for e in events if e.kind in ("all-gather", "reduce-scatter")]
    for together in (computing, sending):
        for before, after in itertools.pairwise(together):
            assert before.stop <= after.start * (1 + 1e-12)
    for event in events:
        if event.kind == "all-gather":
            assert event.unit not in whole
            whole[event.unit] = event.stop
        elif event.kind in ("forward", "backward"):
            assert whole.get(event.unit, 0.0) <= event.start * (1 + 1e-12)
        elif event.kind == "free":
            assert whole.pop(event.unit) <= event.start
        else:
            reduced.add(event.unit)
            backward = [e for e in computing if e.unit == event.unit][-1]
            assert backward.kind == "backward"
            assert backward.stop <= event.start * (1 + 1e-12)
    assert not whole
    assert reduced == {e.unit for e in events if e.kind == "all-gather"}


def test_fsdp_hides_in_a_node_what_it_shows_between_slow_ones():
    """7.5 billion parameters: as fast as DDP, and half as long again."""
    model = simulator.transformer(
        "7.5 billion", layers=36, width=4096, vocabulary=51200, tied=False
    )

    def ratio(cluster):
        fsdp = fsdp_step(cluster, model, 8192)
        return fsdp.seconds / ddp_step(cluster, model, 8192).seconds

    node = simulator.CLUSTERS["A100, InfiniBand"]
    assert 1 < ratio(node) < 1.01
    assert 1 < ratio(node.with_nodes(4)) < 1.01
    assert 1.2 < ratio(simulator.CLUSTERS["A100, Ethernet"].with_nodes(4)) < 1.5


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"samples": 0}, "samples is 0: expected more than 0"),
        ({"utilization": 1.5}, "utilization is 1.5: expected a share up to 1"),
        ({"prefetch": -1}, "prefetch is -1: expected a whole number from 0 up"),
    ],
)
def test_bad_steps_of_fsdp(wrong, says):
    with pytest.raises(ValueError, match=says):
        fsdp_step(flat(4), FOUR, **{"samples": 1, **wrong})


# --- the models -----------------------------------------------------------------


def test_resnet_50_is_torchvisions():
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("torchvision.models")
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        net, image = models.resnet50().eval(), torch.zeros(1, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        net(image)
    flops = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    parts = [
        ("conv1", [net.conv1, net.bn1]),
        *[
            (f"layer{stage}.{i}", [block])
            for stage in range(1, 5)
            for i, block in enumerate(getattr(net, f"layer{stage}"))
        ],
        ("fc", [net.fc]),
    ]
    expected = [
        Layer(sum(tensors), flops[f"ResNet.{name}"], tensors)
        for name, modules in parts
        for tensors in [tuple(p.numel() for m in modules for p in m.parameters())]
    ]
    assert list(simulator.MODELS["ResNet-50"].layers) == expected


def test_buckets_are_cut_by_tensors_not_by_layers():
    net = simulator.MODELS["GPT-2 XL"]
    matrices = [4 * n * 1600**2 for n in (3, 1, 4, 4)]  # bytes, in each layer
    sizes = [s for _ in range(48) for s in reversed(matrices)] + [4 * 50257 * 1600]
    cut = costs.ddp_buckets(
        sizes, cap=costs.DDP_BUCKET, first_cap=costs.DDP_FIRST_BUCKET
    )
    step = ddp_step(simulator.CLUSTERS["H100, InfiniBand"], net, 4096)
    assert [b.nbytes for b in step.buckets] == [sum(sizes[i] for i in c) for c in cut]
    # The first bucket is the last matrix: a third of the last layer's backward pass,
    # after that of the output layer.
    flops = 2 * 2 * 4096 * (50257 * 1600 + 4 * 1600**2)
    speed = simulator.CLUSTERS["H100, InfiniBand"].flops * 0.5
    assert step.buckets[0].ready == pytest.approx(step.forward + flops / speed)


def test_tensors_are_the_parameters_of_their_layer():
    assert Layer(7, 1.0).tensors == (7,) and Layer(0, 1.0).tensors == ()
    with pytest.raises(ValueError, match="have 5 parameters together, but the layer"):
        Layer(6, 1.0, (2, 3))


def test_transformers_have_the_published_sizes():
    # Radford et al. 2019, table 2, gives 1542M, and the authors' code 124M for the
    # small one (their table has 117M). Biases and positions are not counted here.
    assert round(simulator.MODELS["GPT-2 XL"].parameters, -8) == 1.6e9
    assert simulator.MODELS["GPT-2 small"].parameters == pytest.approx(124e6, rel=0.01)
    # Kaplan et al. 2020: 6 floating point operations a parameter and token, without
    # the embedding; the output layer computes with its weights.
    small = simulator.MODELS["GPT-2 small"]
    assert small.flops == pytest.approx(6 * small.parameters)


def test_records_can_be_replaced_but_not_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        simulator.CLUSTERS["H100, InfiniBand"].nodes = 3
