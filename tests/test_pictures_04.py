"""The pictures of lesson 04: what they say, and that what they draw is right."""

import functools
import itertools
import math
import re

import pytest

from course_utils import pictures
from course_utils.measure.messages import Message
from course_utils.pictures import collectives
from course_utils.pictures.collective_calls import COLLECTIVES, CollectiveCall
from course_utils.ranks import Ranks
from course_utils.theory import costs
from tests.test_pictures import (
    LONG,
    assert_suits_a_notebook,
    contrast,
    drawing,
    texts_of,
    words_of,
)

MB = 10**6
NAMES = [*COLLECTIVES]


def explored(name, world_size, op="MAX", root=1):
    """A collective by its definition."""
    shown = CollectiveCall(name, world_size, op, root)
    call = {"op": op if "reduce" in name else None}
    if name in ("broadcast", "scatter", "gather", "reduce"):
        call["root"] = root
    return pictures.collective(shown.before(), shown.after(), name, **call)


# What 3 ranks really held before and after torch's own reduce on gloo.
PARTIAL = ([[1], [2], [3]], [[6], [5], [3]], "reduce")


def linear(n):
    return [Message(rank, 0, rank, 4 * MB) for rank in range(1, n)]


def tree(n):
    depth = math.ceil(math.log2(n))
    pairs = [(k, p, p + 2**k) for k in range(depth) for p in range(2**k)]
    return [Message(k + 1, p, q, 4 * MB) for k, p, q in pairs if q < n]


def ring(n):
    return [
        Message(step, rank, (rank + 1) % n, MB)
        for step in range(2 * (n - 1))
        for rank in range(n)
    ]


def measured(*collectives, world_size=4, sizes=(4, 4096, 4 * MB, 64 * MB)):
    """Times that the α–β model explains exactly; each collective is twice as slow."""
    return [
        {
            "collective": name,
            "world_size": world_size,
            "size": size,
            "time_us": 1e6 * (1e-4 + size / 1e9) * 2**place,
            "busbw": 0.0,
        }
        for place, name in enumerate(collectives)
        for size in sizes
    ]


FIVE = ("broadcast", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
DEADLOCK = [
    [(0.0, 0.1, "compute", "compute"), (0.1, 3.0, "send to rank 1", "stuck")],
    [(0.0, 0.4, "compute", "compute"), (0.4, 3.0, "send to rank 0", "stuck")],
    [(0.0, 0.2, "compute", "compute"), (0.2, 3.0, "barrier", "wait")],
]

DRAWN = {
    **{f"{name} on 8": functools.partial(explored, name, 8) for name in NAMES},
    "broadcast on 2": lambda: explored("broadcast", 2),
    "barrier on 2": lambda: explored("barrier", 2),
    "send": lambda: pictures.collective(
        [[1.5, 2], None], [[1.5, 2], [1.5, 2]], "send / recv"
    ),
    "partial": lambda: pictures.collective(*PARTIAL, op="SUM", root=0),
    "long": lambda: pictures.collective(
        [[1e6] * 9, [2]], [[3e-9], None], LONG, op="BXOR", root=0
    ),
    "linear on 8": lambda: pictures.message_steps(linear(8), 8, "Linear"),
    "tree on 8": lambda: pictures.message_steps(tree(8), 8, "Broadcast by a tree"),
    "tree on 5": lambda: pictures.message_steps(tree(5), 5, "Broadcast by a tree"),
    "ring on 3": lambda: pictures.message_steps(ring(3), 3),
    "ring on 8": lambda: pictures.message_steps(ring(8), 8, "Ring all-reduce"),
    "an exchange": lambda: pictures.message_steps(
        [Message(1, 0, 1, 0), Message(1, 1, 0, 0)], 2
    ),
    "a long title": lambda: pictures.message_steps([Message(100, 0, 6, MB)], 7, LONG),
    "five collectives": lambda: pictures.collective_bandwidth(measured(*FIVE)),
    "one collective": lambda: pictures.collective_bandwidth(measured("all_reduce")),
    "world sizes": lambda: pictures.collective_bandwidth(
        [
            row
            for n in (2, 3, 4, 8, 16, 1024)
            for row in measured("reduce_scatter", world_size=n)
        ]
    ),
    "one size": lambda: pictures.collective_bandwidth(
        measured("broadcast", sizes=(1000,)), title=LONG
    ),
    "small sizes": lambda: pictures.collective_bandwidth(
        measured("all_reduce", sizes=(8, 16, 24))
    ),
    "a deadlock": lambda: pictures.timeline(DEADLOCK, title="Both send first"),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


drawn = drawing(DRAWN)


@every_picture
def test_texts_labels_and_size(name):
    assert_suits_a_notebook(
        drawn(name), {"ring on 8": 8.2, "world sizes": 6.1}.get(name, 5.8)
    )


SUMMARIES = {
    "broadcast on 2": "broadcast on 2 ranks, root: rank 1. Before: rank 0 holds "
    "[0, 1], rank 1 holds [10, 11]. After: every rank holds [10, 11].",
    "barrier on 2": "barrier on 2 ranks. Before: every rank holds nothing. After: "
    "every rank holds nothing.",
    "partial": "reduce SUM on 3 ranks, root: rank 0. Before: rank 0 holds [1], rank 1 "
    "holds [2], rank 2 holds [3]. After: rank 0 holds [6], rank 1 holds [5], rank 2 "
    "holds [3]. Only the root is promised the result: undefined on ranks 1 and 2.",
    "linear on 8": "Linear, 8 ranks. 7 messages in 7 steps, 28 MB in all. Busiest: "
    "rank 0, with 7 messages (28 MB) sent or received. Step 1: 0 to 1 (4 MB); step 2",
    "tree on 5": "Broadcast by a tree, 5 ranks. 4 messages in 3 steps, 16 MB in all. "
    "Busiest: rank 0, with 3 messages (12 MB) sent or received. Step 1: 0 to 1 (4 MB);"
    " step 2: 0 to 2 (4 MB), 1 to 3 (4 MB); step 3: 0 to 4 (4 MB).",
    "ring on 3": "Who sends to whom, 3 ranks. 12 messages in 4 steps, 12 MB in all. "
    "Every rank: 8 messages (8 MB) sent or received. Step 0: 0 to 1 (1 MB), 1 to 2 (1 ",
    "ring on 8": "112 messages in 14 steps, 112 MB in all. Every rank: 28 messages (28 "
    "MB) sent or received. Step 0: 0 to 1 (1 MB), ",
    "an exchange": "2 messages in 1 step, 0 B in all. Every rank: 2 messages (0 B) "
    "sent or received. Step 1: 0 to 1 (0 B), 1 to 0 (0 B).",
    "one collective": "all_reduce: 100 µs for 4 B, 64.1 ms for 64 MB; highest bus "
    "bandwidth 1.5 GB/s at 64 MB; fitted latency 100 µs, latency-bound below 100 kB.",
    "one size": "broadcast: 101 µs for 1 kB, 101 µs for 1 kB; highest bus bandwidth "
    "9.9 MB/s at 1 kB; no latency and bandwidth fit.",
    "world sizes": "reduce_scatter, 1024 ranks: 100 µs for 4 B",
    "a deadlock": "Both send first. 3 ranks over 3 s. Times in s: rank 0: compute 0.1, "
    "stuck 2.9; rank 1: compute 0.4, stuck 2.6; rank 2: compute 0.2, wait 2.8.",
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary(name):
    assert SUMMARIES[name] in drawn(name).summary
    assert drawn(name).summary.endswith(".")


def test_a_long_list_of_steps_is_shortened_in_the_summary():
    assert drawn("ring on 8").summary.endswith("7 to 0 (1 MB); then 13 steps more.")


# ---------------------------------------------------------------- before and after


def cells(picture):
    """(label, hatch) of every cell, in the order of drawing: by rank, before first."""
    return [(text.get_text(), box.get_hatch()) for text, box in picture.labels]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gather"])
def test_all_values_of_eight_ranks_are_drawn(name):
    shown = CollectiveCall(name, 8, "MAX", 1)
    labels = []
    for held in itertools.chain(*zip(shown.before(), shown.after(), strict=True)):
        if held is None:
            labels.append("nothing")
        elif isinstance(held[0], list):
            labels += [f"{number:g}" for part in held for number in part]
        else:
            labels += [f"{number:g}" for number in held]
    drawn_labels = [label for label, _ in cells(drawn(f"{name} on 8"))]
    assert drawn_labels == labels


def test_what_has_no_room_is_left_out_with_a_sign():
    """A root of 8 gathers 16 numbers, beside its long name."""
    labels = [label for label, _ in cells(drawn("gather on 8"))]
    assert labels[:5] == ["0", "1", "nothing", "10", "11"]
    gathered = labels[5 : labels.index("20", 5 + 5)]  # up to what rank 2 had
    assert gathered[:2] == ["0", "1"]
    assert gathered[-1] == "71"
    assert len(gathered) < 16
    assert "…" in words_of(drawn("gather on 8"))


def test_the_root_and_the_operation_are_in_words():
    picture = drawn("reduce on 8")
    words = words_of(picture)
    (root,) = [text for text in texts_of(picture) if "(root)" in text.get_text()]
    assert (root.get_text(), root.get_weight()) == ("rank 1 (root)", "bold")
    assert "MAX" in words
    assert "the largest over the ranks" in words
    assert "rank 0" in words


def test_what_reduce_leaves_on_other_ranks_is_marked():
    after = cells(drawn("partial"))[1::2]
    assert after == [("6", "////"), ("5", "...."), ("3", "....")]
    without_root = pictures.collective(*PARTIAL, op="SUM")
    assert cells(without_root)[1::2] == [("6", "////"), ("5", "////"), ("3", None)]
    assert "computed from several ranks" in words_of(without_root)


def test_a_root_whose_value_stays_the_same_has_computed_it():
    picture = pictures.collective([[1], [3]], [[1], [3]], "reduce", op="MIN", root=0)
    assert cells(picture)[1::2] == [("1", "////"), ("3", "....")]


def test_operations_of_torch():
    import torch.distributed as dist

    for name in ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"):
        op = getattr(dist.ReduceOp, name)
        title = pictures.collective([1, 2], [3, 3], "all_reduce", op=op).summary
        assert title.startswith(f"all_reduce {name} on 2 ranks.")


# ---------------------------------------------------------------- by definition


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_real_ranks_hold_what_a_collective_shows(world_size):
    """The lines that it shows are run as they are, from what it shows before."""

    def obey(calls):
        import torch
        import torch.distributed as dist

        rank, results = dist.get_rank(), []
        for before, lines, takes, gives in calls:
            held = before[rank]
            if held is not None:
                many = isinstance(held[0], list)
                held = [*map(torch.tensor, held)] if many else torch.tensor(held)
            names = {"torch": torch, "dist": dist, "rank": rank, takes: held}
            exec("\n".join(lines), names)
            got = names[gives] if gives else None
            if isinstance(got, list):
                got = [part.tolist() for part in got]
            results.append(got.tolist() if hasattr(got, "tolist") else got)
        return results

    calls = [
        CollectiveCall(name, world_size, op, root)
        for name, kind in COLLECTIVES.items()
        for root in (range(world_size) if kind.rooted else [0])
        for op in (["SUM", "PRODUCT", "MIN", "MAX", "AVG"] if kind.reduces else ["SUM"])
    ]
    sent = [(c.before(), c.lines(), c.kind.takes, c.kind.gives) for c in calls]
    with Ranks(world_size, quiet=True, timeout=30) as ranks:
        by_rank = ranks.run(obey, sent)
    for number, call in enumerate(calls):
        for rank, expected in enumerate(call.after()):
            if call.collective != "reduce" or rank == call.root:
                assert by_rank[rank][number] == expected, (call, rank)


def test_what_a_collective_costs():
    """As `from_scratch/collectives.py` says of 4 numbers of 4 bytes."""
    said = pictures.collective_call("all_reduce").summary
    assert "all_reduce_naive: 6 messages, 6 steps; the busiest rank sends 48 b" in said
    assert "all_reduce: 24 messages, 6 steps; the busiest rank sends 24 bytes" in said
    for name, kind in COLLECTIVES.items():
        said = pictures.collective_call(name, 4).summary
        if kind.factor:
            shown = re.search(r"= ([\d.]+) · S / time\.$", said)
            factor = costs.bus_bandwidth_factor(name, 4)
            assert float(shown[1] if shown else 1) == pytest.approx(factor)
        else:
            with pytest.raises(ValueError, match="no collective"):
                costs.bus_bandwidth_factor(name, 4)


# ---------------------------------------------------------------- messages


def arrows(picture):
    """(source, destination) of every arrow, from top to bottom, by its two ends."""
    board = picture.axes[0]
    lanes = {
        int(text.get_text().split()[1]): text.get_position()[0]
        for text in board.texts
        if text.get_text().startswith("rank ")
    }
    found = []
    for patch in board.patches:
        (start, y), (stop, _) = patch._posA_posB
        ends = [min(lanes, key=lambda k, x=x: abs(lanes[k] - x)) for x in (start, stop)]
        found.append((-y, *ends))
    return [tuple(pair) for _, *pair in sorted(found)]


@pytest.mark.parametrize(
    ("name", "messages"),
    [("linear on 8", linear(8)), ("tree on 5", tree(5)), ("tree on 8", tree(8))],
)
def test_there_is_an_arrow_for_each_message(name, messages):
    assert arrows(drawn(name)) == [(source, to) for _, source, to, _ in messages]


def test_messages_that_do_not_overlap_share_a_line():
    """Of a step of a ring, all but the last one lie side by side."""
    heights = {patch._posA_posB[0][1] for patch in drawn("ring on 8").axes[0].patches}
    assert len(heights) == 14 * 2
    assert len(arrows(drawn("ring on 8"))) == 14 * 8


def test_messages_are_counted_at_each_rank():
    words = words_of(drawn("tree on 8"))
    sends = words.index("sends")
    assert words[sends + 1 : sends + 9] == ["3", "2", "1", "1", "0", "0", "0", "0"]
    receives = words.index("receives")
    assert words[receives + 1 : receives + 9] == ["0"] + ["1"] * 7


# ---------------------------------------------------------------- bandwidth


def test_points_and_regions_are_where_they_should_be():
    picture = drawn("one collective")
    times, rates = picture.axes[1:]
    for axis, expected in (
        (times, [1e-4 + n / 1e9 for n in (4, 4096, 4 * MB, 64 * MB)]),
        (
            rates,
            [
                costs.bus_bandwidth("all_reduce", 4, n, 1e-4 + n / 1e9)
                for n in (4, 4096, 4 * MB, 64 * MB)
            ],
        ),
    ):
        (points,) = [line for line in axis.lines if line.get_marker() == "o"]
        assert list(points.get_ydata()) == pytest.approx(expected)
        (half,) = [line for line in axis.lines if len(set(line.get_xdata())) == 1]
        # Latency times bandwidth: 1e-4 s · 1e9 bytes/s.
        assert half.get_xdata()[0] == pytest.approx(1e5)
        (fit,) = [line for line in axis.lines if len(line.get_xdata()) == 200]
        low, high = axis.get_ylim()
        assert low <= min(points.get_ydata()) < max(points.get_ydata()) <= high
    words = words_of(picture)
    assert {"latency-bound", "bandwidth-bound"} <= {*words}
    assert any("Dashed: here latency is half of the time." in text for text in words)
    sizes, values = fit.get_data()
    assert values[-1] == pytest.approx(1.5 * sizes[-1] / (1e-4 + sizes[-1] / 1e9))


def test_without_large_sizes_there_is_no_bandwidth_bound_part():
    words = words_of(drawn("small sizes"))
    assert "latency-bound" in words
    assert "bandwidth-bound" not in words


def test_no_line_is_drawn_where_nothing_fits():
    picture = drawn("one size")
    assert {"latency-bound", "bandwidth-bound"}.isdisjoint(words_of(picture))
    assert [len(axis.lines) for axis in picture.axes[1:]] == [1, 1]
    note = "No latency and bandwidth fit the times of broadcast."
    assert note in words_of(picture)


def test_collectives_differ_in_shape_and_name():
    looks = collectives._CURVES
    assert len({look["marker"] for look in looks}) == len(looks) == 6
    words = words_of(drawn("five collectives"))
    assert {*FIVE} <= {*words}
    between = "Each collective's half-way point lies between the dashed lines."
    assert any(text.endswith(between) for text in words)
    for look in looks:
        assert contrast(look["color"], (1, 1, 1)) >= 3
    assert "reduce_scatter, 2 ranks" in words_of(drawn("world sizes"))


# ---------------------------------------------------------------- wrong inputs

ROW = measured("all_reduce")[0]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: pictures.collective([1, 2], [3, 3], "all_reduce", op="ADD"),
            "op is 'ADD': expected one of SUM, PRODUCT, MIN, MAX, AVG, BAND, BOR and "
            "BXOR, or None.",
        ),
        (
            lambda: pictures.collective([1, 2], [3, 3], "reduce", root=2),
            "root is 2: expected one of [0, 1].",
        ),
        (
            lambda: pictures.collective([1], [3, 3], "reduce"),
            "before is of 1 rank, after of 2 ranks: give one entry a rank to both.",
        ),
        (
            lambda: pictures.message_steps([], 2),
            "There is nothing to draw: there is no message.",
        ),
        (
            lambda: pictures.message_steps(linear(3), 2),
            "world_size is 2, but rank 2 sends or receives: expected at least 3.",
        ),
        (
            lambda: pictures.message_steps(linear(3), 9),
            "world_size is 9: expected a whole number from 2 to 8.",
        ),
        (
            lambda: pictures.message_steps([Message(k, 0, 1, 1) for k in range(37)], 2),
            "37 lines of arrows are too many for one picture: draw fewer steps or "
            "fewer ranks (at most 36 lines).",
        ),
        (
            lambda: pictures.collective_bandwidth([]),
            "There are measurements of 0 collectives: expected 1 to 6.",
        ),
        (
            lambda: pictures.collective_bandwidth([{"collective": "reduce"}]),
            "The row {'collective': 'reduce'} has no size, time_us and world_size.",
        ),
        (
            lambda: pictures.collective_bandwidth([{**ROW, "time_us": 0}]),
            "time_us is 0: expected more than 0.",
        ),
        (
            lambda: pictures.collective_bandwidth([{**ROW, "world_size": 1}]),
            "world_size is 1: a single rank has no bandwidth.",
        ),
        (
            lambda: pictures.collective_bandwidth([{**ROW, "collective": "gather"}]),
            "There is no collective 'gather'. There are: all_reduce, reduce_scatter, "
            "all_gather, all_to_all, broadcast, reduce.",
        ),
    ],
)
def test_wrong_inputs(draw, message):
    with pytest.raises(ValueError) as caught:
        draw()
    assert str(caught.value) == message
