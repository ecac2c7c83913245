"""The pictures of lesson 06: what they say, and that what they draw is right."""

import dataclasses

import pytest

from course_utils import pictures
from course_utils.pictures import draw
from course_utils.theory import simulator
from tests.test_pictures import LONG, assert_suits_a_notebook, drawing, words_of

MIB = 2**20


def step(origin, *buckets, late=0.0):
    """Recorded times of a rank, in seconds: forward, backward, buckets, optimizer."""
    end = max([0.045, *(stop for _, stop in buckets)])
    return [
        (origin, origin + 0.012 + late, "forward", "forward"),
        (origin + 0.012 + late, origin + 0.045 + late, "backward", "backward"),
        *(
            (origin + start, origin + stop, f"bucket {number}", "communicate")
            for number, (start, stop) in enumerate(buckets)
        ),
        (origin + end, origin + end + 0.003, "step", "optimizer"),
    ]


RECORDED = ((0.018, 0.024), (0.026, 0.038), (0.033, 0.049), (0.045, 0.061))
POD = simulator.CLUSTERS["H100, InfiniBand"].with_nodes(16)


def simulated(model, samples, **more):
    return simulator.ddp_step(POD, simulator.MODELS[model], samples, **more)


SLOW = simulated("ResNet-50", 128, slow_gpus={3: 1.2})
MANY = simulated("GPT-2 XL", 4096)
SMALL_BUCKETS = [
    [("fc.bias", 4000), ("fc.weight", 2048000)],
    [("layer4.1.bn2.bias", 2048), ("layer4.1.conv2.weight", 9 * MIB)],
]
DRAWN = {
    "two ranks": lambda: pictures.overlap(
        [step(100.0, *RECORDED), step(100.0, *RECORDED, late=0.002)]
    ),
    "four ranks": lambda: pictures.overlap(
        {7 * rank: step(3.0, *RECORDED) for rank in range(4)}, title=LONG
    ),
    "one after the other": lambda: pictures.overlap([step(0.0, (0.045, 0.06))]),
    "hidden": lambda: pictures.overlap([step(0.0, (0.02, 0.03))], title="Hidden"),
    "alone": lambda: pictures.overlap([step(0.0)]),
    "many at once": lambda: pictures.overlap(
        {LONG: step(0.0, *((0.01 + k / 1000, 0.06) for k in range(9)))}
    ),
    "a moment": lambda: pictures.overlap([[(1, 1, LONG, "forward")]]),
    "simulated, slow": lambda: pictures.overlap(pictures.step_events(SLOW)),
    "simulated, many": lambda: pictures.overlap(pictures.step_events(MANY)),
    "two buckets": lambda: pictures.ddp_buckets(SMALL_BUCKETS, title="Two"),
    "a long name": lambda: pictures.ddp_buckets([[(LONG, 1), ("b", 0)]], title=LONG),
    "many buckets": lambda: pictures.ddp_buckets(
        [
            [(f"blocks.{k}.layer.{i}.weight", (i + 1) * 4096) for i in range(40)]
            for k in range(30)
        ]
    ),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


drawn = drawing(DRAWN)


@every_picture
def test_texts_labels_and_size(name):
    assert_suits_a_notebook(
        drawn(name), {"four ranks": 7.2, "many buckets": 6.3}.get(name, 4.85)
    )


SUMMARIES = {
    "two ranks": "A training step: computing and communication. 64 ms in all. Rank 0: "
    "computing 48 ms, communication 41 ms in 4 all-reduces, of which 16 ms exposed "
    "(25 % of its 64 ms); rank 1: computing 50 ms, communication 41 ms in 4 "
    "all-reduces, of which 14 ms exposed (21.9 % of its 64 ms).",
    "one after the other": "communication 15 ms in 1 all-reduce, of which 15 ms "
    "exposed (23.8 % of its 63 ms).",
    "hidden": "Hidden. 48 ms in all. Rank 0: computing 48 ms, communication 10 ms in 1 "
    "all-reduce, of which 0 s exposed (0 % of its 48 ms).",
    "alone": "communication 0 s in 0 all-reduces",
    "two buckets": "Two. 4 parameters in 2 buckets, 11.0 MiB in all. Bucket 0 is sent "
    "first. Bucket 0: 2.0 MiB, 2 parameters (fc.bias to fc.weight); bucket 1: 9.0 MiB, "
    "2 parameters (layer4.1.bn2.bias to layer4.1.conv2.weight).",
    "many buckets": "bucket 7: 3.2 MiB, 40 parameters (blocks.7.layer.0.weight to "
    "blocks.7.layer.39.weight); …; bucket 29: 3.2 MiB",
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary(name):
    assert SUMMARIES[name] in drawn(name).summary
    assert drawn(name).summary.endswith(".")


def test_each_share_is_of_the_ranks_own_step():
    def step(computing, sending):
        stop = computing + sending
        return [(0, computing, "", "backward"), (computing, stop, "", "communicate")]

    said = pictures.overlap({"long": step(0.06, 0.04), "short": step(0.06, 0.02)})
    assert "40 ms exposed (40 % of its 100 ms)" in said.summary
    assert "20 ms exposed (25 % of its 80 ms)" in said.summary


def bars(picture, label):
    """(left, right) of each bar with this label, in inches."""
    found = [box for text, box in picture.labels if text.get_text() == label]
    return [(box.get_x(), box.get_x() + box.get_width()) for box in found]


def test_bars_are_where_the_axis_says():
    picture = drawn("one after the other")
    axis = picture.axes[1]

    def inches(milliseconds):
        return axis.transData.transform((milliseconds, 0))[0] / draw.DPI

    for label, start, stop in (
        ("forward", 0, 12),
        ("backward", 12, 45),
        ("bucket 0", 45, 60),
        ("exposed", 45, 60),
    ):
        (place,) = bars(picture, label)
        assert place == pytest.approx((inches(start), inches(stop)))


def test_exposed_is_what_no_computing_hides():
    """Between forward and backward, too; two all-reduces at once count once."""
    row = [
        (0.0, 1.0, "forward", "forward"),
        (2.0, 4.0, "backward", "backward"),
        (0.5, 3.0, "bucket 0", "communicate"),
        (3.5, 6.0, "bucket 1", "communicate"),
        (5.0, 7.0, "bucket 2", "communicate"),
        (8.0, 9.0, "step", "optimizer"),
    ]
    picture = pictures.overlap([row])
    assert (
        "computing 4 s, communication 6 s in 3 all-reduces, of which 4 s exposed "
        "(44.4 %" in picture.summary
    )
    hatches = [patch.get_hatch() for patch in picture.axes[0].patches]
    assert hatches.count("xxxx") == 2 + 1  # and in the key
    before = pictures.overlap([row[1:]])  # the forward pass was not recorded
    assert "of which 4.5 s exposed" in before.summary


@pytest.mark.parametrize("one", [SLOW, MANY])
def test_a_simulated_step_shows_its_own_figures(one):
    events = pictures.step_events(one)
    (name,) = events
    assert name == ("slowest GPU" if one.waiting else "every GPU")
    summary = pictures.overlap(events).summary
    assert f"{draw.duration(one.seconds)} in all" in summary
    assert f"computing {draw.duration(one.compute + one.waiting)}" in summary
    assert f"communication {draw.duration(one.communication)} in " in summary
    assert f"{len(one.buckets)} all-reduces" in summary
    assert f"of which {draw.duration(one.exposed)} exposed" in summary


def test_a_single_gpu_sends_nothing():
    alone = dataclasses.replace(POD, nodes=1, gpus_per_node=1)
    (events,) = pictures.step_events(
        simulator.ddp_step(alone, simulator.MODELS["ResNet-50"], 1)
    ).values()
    assert {kind for *_, kind in events} == {"forward", "backward"}


def test_kinds_differ_by_more_than_colour():
    picture = drawn("two ranks")
    hatches = {
        label: {
            box.get_hatch() for text, box in picture.labels if text.get_text() == label
        }
        for label in ("forward", "backward", "1", "exposed")
    }
    assert hatches == {
        "forward": {None},
        "backward": {"\\\\\\\\"},
        "1": {None},  # in a line of its own, which is named
        "exposed": {"xxxx"},
    }
    words = words_of(picture)
    for word in ("computing", "communication", "optimizer", "all-reduce"):
        assert word in words
    assert words.count("exposed") == 2 + 2 + 1  # the bars, their lines, the key
    assert "exposed" not in [text.get_text() for text, _ in drawn("hidden").labels]


def test_parts_of_a_kind_are_all_named_or_none_is():
    def labels(*buckets):
        picture = pictures.overlap([step(0.0, *buckets)])
        return [text.get_text() for text, _ in picture.labels if text.get_text()]

    wide, narrow, thin = (0.015, 0.025), (0.03, 0.034), (0.04, 0.0405)
    assert {"bucket 0", "bucket 1"} <= {*labels(wide, (0.026, 0.036))}
    assert {"0", "1"} <= {*labels(wide, narrow)}
    assert not {"0", "1", "bucket 0"} & {*labels(wide, thin)}


def test_names_are_shortened_for_all_parameters_or_for_none():
    def labels(*sizes):
        buckets = [[(f"{k}.weight", size)] for k, size in enumerate(sizes, 9)]
        return [text.get_text() for text, _ in pictures.ddp_buckets(buckets).labels]

    assert labels(10, 10) == ["9.weight", "10.weight"]
    assert labels(10, 1) == ["9.w", "10.w"]
    assert labels(10, 0.01) == ["9.weight"]  # no name at all fits in the other


def test_buckets_have_one_scale_and_the_order_given():
    picture = drawn("two buckets")
    boxes = [p for p in picture.axes[0].patches if not p.get_fill()]  # the outlines
    widths = [box.get_width() for box in boxes]
    sizes = [nbytes for bucket in SMALL_BUCKETS for _, nbytes in bucket]
    assert widths == pytest.approx([widths[-1] / sizes[-1] * size for size in sizes])
    heights = [box.get_y() for box in boxes]
    assert heights[0] == heights[1] > heights[2] == heights[3]
    words = words_of(picture)
    assert "fc.bias to fc.weight" in words
    assert "2.0 MiB, 2 parameters" in words
    assert [text.get_text() for text, _ in picture.labels] == [
        "fc.weight",
        "layer4.1.conv2.weight",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: pictures.overlap([]), "events is of 0 ranks: expected 1 to 4"),
        (lambda: pictures.overlap([[]] * 5), "events is of 5 ranks: expected 1 to 4"),
        (lambda: pictures.overlap([[]]), "There is no computing of rank 0"),
        (
            lambda: pictures.overlap({"a": [(0, 1, "b", "communicate")]}),
            "There is no computing of a: nothing hides anything.",
        ),
        (lambda: pictures.overlap([[(0, 1)]]), "An interval of rank 0 is (0, 1): exp"),
        (
            lambda: pictures.overlap([[(0, 1, "a", "wait")]]),
            "The kind 'wait' of rank 0 is unknown: use 'forward', 'backward', 'opt",
        ),
        (
            lambda: pictures.overlap([[(2, 1, "a", "forward")]]),
            "'a' on rank 0 ends at 1, before it starts at 2.",
        ),
        (
            lambda: pictures.overlap([[(0, float("nan"), "a", "forward")]]),
            "The stop of 'a' on rank 0 is nan",
        ),
        (lambda: pictures.ddp_buckets([]), "There is no bucket"),
        (lambda: pictures.ddp_buckets([[("a", 1)], []]), "Bucket 1 is empty"),
        (lambda: pictures.ddp_buckets([[("a", -1)]]), "The size of 'a' is -1"),
    ],
)
def test_wrong_inputs(wrong, message):
    with pytest.raises(ValueError) as caught:
        wrong()
    assert str(caught.value).startswith(message)
