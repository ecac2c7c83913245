"""Sliders over pictures: what they show is right, for the values that they can have."""

import html
import shlex

import pytest
from ipywidgets.widgets import widget
from thorough import thorough_after
from torch.distributed.run import get_args_parser

from course_utils import pictures
from course_utils.measure.snapshots import History
from course_utils.pictures.collective_calls import COLLECTIVES, CollectiveCall
from course_utils.pictures.explore import explore
from course_utils.pictures.words import duration
from course_utils.ranks import Ranks
from course_utils.theory import costs, simulator
from tests.pictures_table import RING
from tests.test_pictures import drawn, words_of


@pytest.mark.parametrize(("nodes", "gpus", "rank"), [(1, 4, 3), (2, 4, 5), (4, 8, 8)])
def test_a_rank_is_where_torchrun_puts_it(nodes, gpus, rank):
    said = pictures.torchrun_ranks(nodes, gpus, rank).summary
    node, local = costs.node_and_local_rank(rank, gpus)
    assert f"Rank {rank} is local rank {local} on node {node}: RANK={rank} " in said
    assert f"LOCAL_RANK={local} WORLD_SIZE={nodes * gpus} " in said
    _, *words = shlex.split(said.rpartition(": ")[2])
    args = get_args_parser().parse_args(words)
    assert args.nnodes.split(":")[0] == f"{nodes}"
    assert (args.nproc_per_node, args.node_rank) == (f"{gpus}", node)
    beyond = pictures.torchrun_ranks(nodes, gpus, 99)
    (note,) = [text for text in words_of(beyond) if "There is no rank 99" in text]
    assert f"Rank {nodes * gpus - 1} is local rank {gpus - 1}" in note


def test_groups_of_a_mesh_look_different():
    boxes = [box for _, box in drawn("32 groups").labels]
    looks = [(box.get_facecolor(), box.get_hatch()) for box in boxes]
    assert len(set(looks)) == 32
    assert looks[:32] == looks[32:]  # ranks r and r + 32 are a group


def test_a_ring_shows_what_is_held_sent_and_complete():
    first, second, last = (pictures.ring_step(RING, step) for step in range(3))
    assert first.summary.startswith(
        "Step 0 (of 0 to 1), reduce-scatter: rank 0 sends chunk 0 to rank 1, rank "
        "1 sends chunk 1 to rank 0; 0 of 4 chunks complete. rank 0: ↑ 1, 5; rank 1: 2,"
    )
    assert words_of(first).count("chunk 0") == 3  # on two cards and on an arrow
    assert "all-gather" in second.summary
    labels = [text.get_text() for text, _ in second.labels]
    assert labels == ["1", "✓ ↓ ↑ 11", "✓ ↓ ↑ 3", "6"]
    assert {"chunk 0", "chunk 1", "1 of 2", "2 of 2"} <= {*words_of(second)}
    assert last.summary.startswith("After 2 steps: 4 of 4 chunks complete.")
    assert "2 messages with 2 elements in all. Its tensor has 2." in last.summary

    twice = [  # what they got they added twice, in the second step
        [([1.0], 0, 1, 1), ([3.0], 0, 1, 1), ([8.0],)],
        [([2.0], 0, 1, 0), ([3.0], 0, 1, 0), ([6.0],)],
    ]
    assert "no sum" in words_of(pictures.ring_step(History(twice), 2))


def test_the_states_are_those_of_the_zero_paper():
    """7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB."""
    held = pictures.bytes_by_stage("7.5 billion", 64)
    for stage, paper in zip(held.values(), (120, 31.4, 16.6, 1.9), strict=True):
        states = stage["parameters"] + stage["gradients"] + stage["optimizer state"]
        # The paper has a round number of parameters; this model has 7.47 billion.
        assert states / costs.GB == pytest.approx(paper, rel=0.02)


def test_what_sharding_needs_besides_its_shards():
    several, alone = (pictures.bytes_by_stage("GPT-2 XL", gpus) for gpus in (8, 1))
    needed = [found["other"] > 0 for found in several.values()]
    assert needed == [False, False, True, True]
    assert not any(found["other"] for found in alone.values())


def test_a_step_is_that_of_the_simulator():
    pod = simulator.CLUSTERS["A100, InfiniBand"].with_nodes(4)
    model, how = simulator.MODELS["ResNet-50"], {"overlap": False, "algorithm": "tree"}
    step = simulator.ddp_step(
        pod, model, 64, bucket_bytes=100 * costs.MiB, slow_gpus={0: 1.5}, **how
    )
    how |= {"samples_per_gpu": 64, "bucket_mib": 100, "slowdown_of_one_gpu": 1.5}
    said = pictures.what_if(pod.name, "ResNet-50", 4, **how).summary
    for words, seconds in (
        ("step: computing", step.compute),
        ("waiting for the slowest GPU", step.waiting),
        ("exposed communication", step.exposed),
    ):
        assert f"{words} {duration(seconds)}" in said
    assert f"{duration(step.seconds)} a step" in said
    assert f"Scaling efficiency {100 * step.efficiency:.3g} %" in said


@pytest.fixture
def show(monkeypatch):
    """`explore`, which gives what it displays, and its sliders, picture and words."""
    shown = []
    to = "course_utils.pictures.explore.display"
    monkeypatch.setattr(to, lambda data, raw: shown.append(data))

    def explored(*arguments, **controls):
        explore(*arguments, **controls)
        box = widget._instances[shown[-1][VIEW]["model_id"]]
        *inputs, picture, spoken = box.children
        return shown, {one.description: one for one in inputs}, picture, spoken

    return explored


VIEW = "application/vnd.jupyter.widget-view+json"


def test_the_notebook_keeps_the_first_picture(show):
    (saved, view), _, picture, _ = show(pictures.ring_step, RING, step=(0, 2))
    assert saved["text/plain"] == repr(pictures.ring_step(RING, 0))
    assert picture.value in saved["text/html"]
    assert view[VIEW]["model_id"] not in str(saved)  # it differs from run to run
    assert {*view} == {VIEW, "text/html"}
    assert view["text/html"] == ""


def test_a_slider_draws_anew(show):
    _, inputs, picture, spoken = show(
        pictures.what_if, nodes=[1, 128], algorithm=[*simulator.ALGORITHMS]
    )
    inputs["algorithm"].value = "naive"  # says why not, in the place of the picture
    assert spoken.text.startswith("On 1,024 GPUs rank 0 would receive")
    assert picture.value == f"<p>{spoken.text}</p>"
    inputs["nodes"].value = 1
    assert spoken.text == pictures.what_if(nodes=1, algorithm="naive").summary
    assert html.escape(spoken.text) in picture.value


def test_sliders_are_named_and_the_page_does_not_jump(show):
    limits = {"nodes": (1, 4), "gpus_per_node": (1, 8), "rank": (0, 31)}
    _, inputs, picture, _ = show(pictures.torchrun_ranks, **limits)
    assert [*inputs] == ["nodes", "GPUs per node", "rank"]
    assert [one.value for one in inputs.values()] == [2, 4, 5]
    assert [(one.min, one.max) for one in inputs.values()] == [*limits.values()]
    assert not any(one.continuous_update for one in inputs.values())
    inputs["nodes"].value = 4
    tall = picture.layout.min_height
    inputs["nodes"].value = 1
    assert picture.layout.min_height == tall


# ------------------------------------------- a collective, by its definition


@pytest.mark.parametrize("world_size", thorough_after(1, [3, 1, 2, 4]))
def test_real_ranks_hold_what_a_collective_shows(world_size):
    """The lines that it shows are run as they are, from what it shows before."""

    def obey(calls):
        import torch
        import torch.distributed as dist

        rank, results = dist.get_rank(), []
        for before, lines, gives_list in calls:
            held = before[rank]
            names = {"torch": torch, "dist": dist, "rank": rank}
            if held is not None:
                many = isinstance(held[0], list)
                held = [*map(torch.tensor, held)] if many else torch.tensor(held)
                names["pieces" if many else "tensor"] = held
            exec("\n".join(lines), names)
            if gives_list:
                got = names.get("received", names["pieces"])
                results.append(got and [part.tolist() for part in got])
            else:
                results.append(names["tensor"].tolist() if "tensor" in names else None)
        return results

    calls = [
        CollectiveCall(name, world_size, op, root)
        for name, kind in COLLECTIVES.items()
        for root in (range(world_size) if kind.rooted else [0])
        for op in (["SUM", "PRODUCT", "MIN", "MAX", "AVG"] if kind.reduces else ["SUM"])
    ]
    gives_list = {"gather", "all_gather", "all_to_all"}
    sent = [(c.before(), c.lines(), c.collective in gives_list) for c in calls]
    with Ranks(world_size, quiet=True, timeout=30) as ranks:
        by_rank = ranks.run(obey, sent)
    for number, call in enumerate(calls):
        for rank, expected in enumerate(call.after()):
            if call.collective != "reduce" or rank == call.root:
                assert by_rank[rank][number] == expected, (call, rank)


def test_what_a_collective_costs():
    """As `from_scratch/collectives.py` says."""
    said = pictures.collective_call("all_reduce").summary
    made = "Made of send and recv"
    assert f"{made}, all through rank 0: 6 messages, 6 steps." in said
    halves = "in two halves, an n-th of the tensor in a message"
    assert f"{made}, {halves}: 24 messages, 6 steps." in said
    said = pictures.collective_call("broadcast", 8).summary
    assert f"{made}, as a tree: 7 messages, 3 steps." in said
    assert f"{made}: 3 messages" in pictures.collective_call("gather").summary
