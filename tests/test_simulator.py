"""The simulator: equal to the closed formulas, and right where there is none."""

import heapq
import itertools
import random
from dataclasses import asdict

import numpy as np
import pytest

from course_utils.theory import costs, simulator
from course_utils.theory.costs import AlphaBeta, MiB
from course_utils.theory.simulator import (
    Cluster,
    Model,
    ModelLayer,
    all_reduce,
    ddp_step,
    fsdp_step,
)

LINK = AlphaBeta(latency=5e-6, bandwidth=10e9)
S = 3e8


def flat(gpus, link=LINK):
    """GPUs that are all connected in the same way."""
    same = {"inside": link, "between": link, "cards": 1, "flops": 1e12}
    return Cluster(name="flat", nodes=gpus, gpus_per_node=1, **same)


def two_levels(nodes, gpus_per_node, cards=1):
    return Cluster(
        name="two levels",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        inside=AlphaBeta(2e-6, 100e9),
        between=AlphaBeta(9e-6, 10e9),
        cards=cards,
        flops=1e12,
    )


def formula(algorithm, n, nbytes, link=LINK):
    """Seconds of an all-reduce where all links are alike."""
    if algorithm == "hierarchical":
        algorithm = "ring"  # between nodes of one GPU
    return costs.all_reduce_seconds(algorithm, n, nbytes, **asdict(link))


# --- one all-reduce -------------------------------------------------------------


@pytest.mark.parametrize("algorithm", simulator.ALGORITHMS)
@pytest.mark.parametrize("nbytes", [0, 1, 1e4, S])
def test_equal_to_the_closed_formula(algorithm, nbytes):
    powers_only = algorithm in ("tree", "halving-doubling")
    for n in (1, 2, 4, 8, 64, 256) if powers_only else (1, 2, 3, 5, 8, 100):
        run = all_reduce(flat(n), nbytes, algorithm)
        expected = formula(algorithm, n, nbytes)
        assert run.seconds == pytest.approx(expected, rel=1e-9, abs=1e-18), n
        assert run.finished.shape == (n,)


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 100])
def test_a_tree_of_any_number_of_gpus(n):
    """The formula is that of a full tree: it is at most two latencies too long."""
    run, full = all_reduce(flat(n), S, "tree"), formula("tree", n, S)
    assert full - 2 * LINK.latency <= run.seconds * (1 + 1e-12)
    assert run.seconds <= full * (1 + 1e-12)


def test_many_gpus():
    run = all_reduce(flat(100_000), S)
    assert run.seconds == pytest.approx(formula("ring", 100_000, S), rel=1e-9)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "tree", "naive"])
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 4, 1), (5, 8, 8), (7, 3, 2)])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, S])
def test_gpus_that_behave_alike_need_not_be_simulated_one_by_one(
    algorithm, shape, nbytes
):
    cluster = two_levels(*shape)
    one_by_one = all_reduce(cluster, nbytes, algorithm, ready={0: 0.0})
    together = all_reduce(cluster, nbytes, algorithm)
    assert together.seconds == pytest.approx(one_by_one.seconds, rel=1e-9)
    np.testing.assert_allclose(together.sent, one_by_one.sent)


def test_bytes_are_those_of_the_formulas():
    for n in (1, 2, 5, 8):
        for algorithm, function in (("ring", ""), ("naive", "_naive")):
            run = all_reduce(flat(n), S, algorithm)
            cost = costs.collective_cost(f"all_reduce{function}", n, S)
            assert run.sent.sum() == pytest.approx(cost.nbytes)
            assert run.sent.max() == pytest.approx(cost.most_sent)
    # Patarasuk and Yuan 2009: no all-reduce sends less than 2(n-1)/n of the data.
    for algorithm in simulator.ALGORITHMS:
        run = all_reduce(flat(8), S, algorithm)
        assert run.sent.sum() >= 2 * 7 / 8 * 8 * S * (1 - 1e-12), algorithm


def test_hierarchical_is_three_rings_one_after_the_other():
    g, nodes = 4, 6
    cluster = two_levels(nodes, g, cards=2)
    run = all_reduce(cluster, S, "hierarchical")
    in_nodes = 2 * (g - 1) * cluster.inside.seconds(S / g)
    # The four GPUs of a node share its two cards of 10 GB/s.
    between = 2 * (nodes - 1) * AlphaBeta(9e-6, 5e9).seconds(S / g / nodes)
    assert run.seconds == pytest.approx(in_nodes + between, rel=1e-9)


def test_a_ring_is_as_fast_as_its_slowest_link_and_as_late_as_all_latencies():
    cluster = two_levels(4, 8, cards=2)
    large = 2 * 31 / 32 * 1e12 / (2 * cluster.between.bandwidth)
    assert all_reduce(cluster, 1e12).seconds == pytest.approx(large, rel=1e-4)
    # A chunk goes over 62 links. NCCL counts 2(N-1) of them between nodes, which is the
    # luckiest chunk; the unluckiest crosses two more.
    empty = all_reduce(cluster, 0, ready={0: 0.0})  # each GPU by itself
    inside, between = cluster.inside.latency, cluster.between.latency
    assert empty.seconds == pytest.approx(8 * between + 54 * inside)
    assert empty.finished.min() == pytest.approx(7 * between + 55 * inside)


def test_gpus_of_a_node_share_its_cards_while_they_send_at_the_same_time():
    """Halving-doubling, 2 nodes of 4: all 4 send half of S through 2 cards, twice."""
    cluster = two_levels(2, 4, cards=2)
    between = 2 * AlphaBeta(9e-6, 5e9).seconds(S / 2)
    inside = 2 * sum(cluster.inside.seconds(S / part) for part in (4, 8))
    run = all_reduce(cluster, S, "halving-doubling")
    assert run.seconds == pytest.approx(between + inside)


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


def one_message_after_the_other(n, ready, busy, latency):
    """A ring all-reduce, as plain as can be: events in the order of their times."""
    step = [0] * n  # of each rank: which message it sends next
    arrived = {(0, rank): ready[rank] for rank in range(n)}
    out, finished = [0.0] * n, list(ready)
    events = [(ready[rank], rank) for rank in range(n)]
    heapq.heapify(events)
    while events:
        now, rank = heapq.heappop(events)
        if step[rank] < 2 * (n - 1) and (step[rank], rank) in arrived:
            target = (rank + 1) % n
            out[rank] = max(arrived[step[rank], rank], out[rank]) + busy[rank]
            step[rank] += 1
            come = out[rank] + latency
            arrived[step[rank], target] = max(come, ready[target])
            finished[target] = max(finished[target], come)
            heapq.heappush(events, (come, target))
            heapq.heappush(events, (now, rank))
    assert step == [2 * (n - 1)] * n
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
    run = all_reduce(flat(n), nbytes, ready=ready, slow_links=slow)
    chunk = nbytes / n / LINK.bandwidth
    expected = one_message_after_the_other(
        n,
        [ready.get(r, 0.0) for r in range(n)],
        [chunk * slow.get((r, (r + 1) % n), 1.0) for r in range(n)],
        LINK.latency,
    )
    np.testing.assert_allclose(run.finished, expected, rtol=1e-9)


# --- a step of DDP --------------------------------------------------------------

FOUR = Model("four layers", tuple(ModelLayer(MiB // 4, 1e9) for _ in range(4)), "image")
UNTIED = simulator.transformer(
    "untied", layers=6, width=256, vocabulary=1000, tied=False
)


def test_buckets_leave_as_soon_as_they_are_full():
    step = ddp_step(flat(4), FOUR, 10, bucket_bytes=2 * MiB)
    assert [b.nbytes for b in step.buckets] == [MiB, 2 * MiB, MiB]
    layer = 2 * 10 * 1e9 / 0.5e12
    ready = [step.forward + k * layer for k in (1, 3, 4)]
    # Fast links: nobody waits for the one before, and only the last one is seen.
    assert [b.start for b in step.buckets] == pytest.approx(ready)
    assert step.exposed == pytest.approx(formula("ring", 4, MiB))
    # Slow links: they queue up behind each other.
    link = AlphaBeta(1e-3, 1e7)
    step = ddp_step(flat(4, link), FOUR, 10, bucket_bytes=2 * MiB)
    times = [formula("ring", 4, n * MiB, link) for n in (1, 2, 1)]
    assert step.seconds == pytest.approx(step.buckets[0].ready + sum(times))


def test_buckets_are_cut_by_tensors_not_by_layers():
    net = simulator.MODELS["GPT-2 XL"]
    matrices = [4 * n * 1600**2 for n in (3, 1, 4, 4)]  # bytes, in each layer
    sizes = [s for _ in range(48) for s in reversed(matrices)] + [4 * 50257 * 1600]
    step = ddp_step(simulator.CLUSTERS["H100, InfiniBand"], net, 4096)
    cut = costs.ddp_buckets(sizes)
    assert [b.nbytes for b in step.buckets] == [sum(sizes[i] for i in c) for c in cut]
    # The first bucket is the last matrix: a third of the last layer's backward pass,
    # after that of the output layer.
    flops = 2 * 2 * 4096 * (50257 * 1600 + 4 * 1600**2)
    assert step.buckets[0].ready == pytest.approx(step.forward + flops / 989e12 / 0.5)


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
        assert sum(b.nbytes for b in hidden.buckets) == 4 * model.parameters


def test_a_slow_gpu_slows_all():
    usual = ddp_step(flat(8), FOUR, 10)
    slow = ddp_step(flat(8), FOUR, 10, slow_gpus={5: 1.5})
    assert slow.compute == pytest.approx(usual.compute)
    assert slow.waiting == pytest.approx(0.5 * usual.compute)
    last = formula("ring", 8, 3 * MiB)
    assert slow.seconds == pytest.approx(1.5 * usual.compute + last)


# --- a step of FSDP -------------------------------------------------------------


def half(n, nbytes, link=LINK):
    """Seconds of an all-gather, or of a reduce-scatter."""
    return (n - 1) * (link.latency + nbytes / n / link.bandwidth)


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("model", [FOUR, UNTIED], ids=lambda model: model.name)
def test_without_overlap_a_step_is_the_sum_of_its_parts(n, model):
    alone = fsdp_step(flat(1), model, 10)
    assert alone.seconds == alone.compute and alone.sent == 0
    assert alone.seconds == pytest.approx(10 * model.flops / (0.5 * flat(n).flops))
    gathers = sum(half(n, 4 * layer.parameters) for layer in model.layers)
    step = fsdp_step(flat(n), model, 10, prefetch=0)
    assert step.seconds == pytest.approx(alone.seconds + 3 * gathers)
    one = Model("one", (ModelLayer(MiB // 4, 1e9),), "sample")
    step = fsdp_step(flat(n), one, 10)  # there is no next unit
    assert step.seconds == pytest.approx(step.compute + 3 * half(n, MiB))


def test_fast_links_show_only_what_nothing_can_hide():
    """The first all-gathers of both passes, and the last reduce-scatter."""
    step, part = fsdp_step(flat(4), FOUR, 10), half(4, MiB)
    assert step.exposed == pytest.approx(3 * part)
    assert step.communication == pytest.approx(12 * part)


@pytest.mark.parametrize("model", [FOUR, UNTIED], ids=lambda model: model.name)
def test_slow_links_make_a_step_half_as_long_again_as_that_of_ddp(model):
    slow = flat(4, AlphaBeta(0.0, 1e3))
    ddp, fsdp = ddp_step(slow, model, 1), fsdp_step(slow, model, 1)
    assert fsdp.communication / ddp.communication == pytest.approx(1.5)
    assert fsdp.seconds / ddp.seconds == pytest.approx(1.5, rel=1e-3)
    assert fsdp.sent == pytest.approx(3 * 3 / 4 * 4 * model.parameters)


def test_shared_weights_stay_whole():
    tied = simulator.transformer("tied", layers=6, width=256, vocabulary=1000)
    step = fsdp_step(flat(4), tied, 1)
    gathers = [e.unit for e in step.events if e.kind == "all-gather"]
    assert gathers.count("layer 0") == 1
    assert all(gathers.count(f"layer {k}") == 2 for k in range(1, 7))
    assert "layer 7" not in gathers  # it computes with the weights of layer 0
    embedding = 4 * tied.layers[0].parameters
    assert step.whole == embedding + 2 * 4 * tied.layers[1].parameters


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_whole_parameters_are_those_of_the_formula(prefetch):
    step = fsdp_step(flat(4, AlphaBeta(0.0, 1e9)), FOUR, 1000, prefetch=prefetch)
    memory = costs.fsdp_memory([MiB // 4] * 4, 4, prefetch=prefetch)
    assert step.whole == memory.gathered
    # With slow links, units that wait for the network come later.
    slow = fsdp_step(flat(4, AlphaBeta(0, 1e3)), FOUR, 1, prefetch=prefetch)
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
        check_order(step.events)
        assert step.seconds == max(event.stop for event in step.events)
    assert seconds == sorted(seconds)
    assert ddp_step(cluster, model, 64).compute == pytest.approx(step.compute)


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


# --- the models, and wrong arguments --------------------------------------------


def test_resnet_50_is_torchvisions():
    torch = pytest.importorskip("torch")
    torchvision = pytest.importorskip("torchvision.models")
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        net, image = torchvision.resnet50().eval(), torch.zeros(1, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        net(image)
    flops = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    ours = simulator.MODELS["ResNet-50"].layers
    assert sum(layer.flops for layer in ours) == flops["ResNet"]
    assert (ours[0].flops, ours[-1].flops) == (
        flops["ResNet.conv1"],
        flops["ResNet.fc"],
    )
    sizes = [size for layer in ours for size in layer.tensors]
    assert sorted(sizes) == sorted(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: flat(0), "nodes is 0"),
        (lambda: all_reduce(flat(8), S, "rings"), "no algorithm 'rings'"),
        (lambda: all_reduce(flat(6), S, "halving-doubling"), "power of two of GPUs"),
        (lambda: all_reduce(flat(8), S, ready={8: 1}), "ready names rank 8, but"),
        (lambda: all_reduce(flat(8), S, ready={1: -1}), r"ready\[1\] is -1: expected"),
        (lambda: all_reduce(flat(8), S, slow_links={(0, 9): 2}), "slow_links names"),
        (lambda: ddp_step(flat(4), FOUR, 1, utilization=1.5), "utilization is 1.5:"),
        (lambda: ddp_step(flat(4), FOUR, 1, slow_gpus={4: 2}), "slow_gpus names rank"),
        (lambda: ddp_step(flat(4), FOUR, 1, slow_gpus={0: 0.5}), "0.5 for rank 0: exp"),
        (lambda: ddp_step(flat(1), FOUR, 1, slow_gpus={0: 2}), "All GPUs are slow"),
        (lambda: fsdp_step(flat(4), FOUR, 1, prefetch=-1), "prefetch is -1: expected"),
    ],
)
def test_wrong_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
