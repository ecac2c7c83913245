"""The pictures of lesson 08: what they say, and that what they draw is right."""

import itertools

import pytest
from matplotlib.colors import to_rgb

from course_utils import pictures
from course_utils.measure.tensor_bytes import TensorBytes
from course_utils.pictures import memory
from course_utils.theory import costs, simulator
from course_utils.theory.costs import zero_memory
from tests.test_pictures import LONG, assert_suits_a_notebook, drawing, words_of

GB, MB = costs.GB, costs.MB
STAGES = {
    name: zero_memory(7.5e9, gpus=64, stage=stage)
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"))
}
WITH_ACTIVATIONS = {
    name: {"parameters": held.parameters, "activations": 17.2e9, "other": 5e8}
    for name, held in STAGES.items()
}
RECORD = TensorBytes(
    seconds=[0.2, 0.3, 0.4, 0.7, 1.1],
    nbytes=[100, 4000, 2000, 9000, 4000],
    spans=[("forward", 0.25, 0.6), ("backward", 0.6, 1.0), ("step", 1.0, 1.1)],
)
HILL = TensorBytes([*range(21)], [(20 + min(k, 20 - k)) * MB for k in range(21)])
UNITS = ("embedding", "blocks.0", "blocks.1", "head")


def step(prefetch=True, free=True, units=UNITS):
    """Recorded times of a rank, in seconds: all-gathers 6 ms, forward 12 ms."""
    events, now = [], 100.0
    for unit in units:
        early = 0.004 if prefetch else 0.0
        events.append((now - early, now + 0.006 - early, unit, "all-gather"))
        now += 0.006 - early
        events.append((now, now + 0.012, unit, "forward"))
        now += 0.012
        events += [(now, now, unit, "free")] * free
    for unit in reversed(units):
        events.append((now, now + 0.006, unit, "all-gather"))
        events.append((now + 0.006, now + 0.03, unit, "backward"))
        now += 0.03
        events += [(now, now, unit, "free")] * free
        events.append((now, now + 0.005, unit, "reduce-scatter"))
    return [*events, (now + 0.005, now + 0.007, "", "optimizer")]


def simulated(nodes, **more):
    cluster = simulator.CLUSTERS["A100, Ethernet"].with_nodes(nodes)
    model = simulator.transformer(
        "six layers", layers=6, width=4096, vocabulary=51200, tied=False
    )
    return simulator.fsdp_step(cluster, model, 4096, **more)


DRAWN = {
    "stages": lambda: pictures.memory_per_gpu(
        STAGES, title="7.5 billion parameters, 64 GPUs"
    ),
    "activations": lambda: pictures.memory_per_gpu(WITH_ACTIVATIONS),
    "far too much": lambda: pictures.memory_per_gpu(
        {LONG: zero_memory(1e12)}, title=LONG
    ),
    "eight bars": lambda: pictures.memory_per_gpu(
        {f"{k} {LONG}": zero_memory(k * 1e8) for k in range(8)}
    ),
    "over time": lambda: pictures.memory_over_time({"DDP": HILL, "FSDP": HILL}),
    "a record": lambda: pictures.memory_over_time({"FSDP": RECORD}),
    "four curves": lambda: pictures.memory_over_time(
        {
            f"{k} {LONG}": TensorBytes([*range(9)], [i * k * GB for i in range(9)])
            for k in range(4)
        },
        title=LONG,
    ),
    "nothing": lambda: pictures.memory_over_time({"empty": TensorBytes([0], [0])}),
    "shards": lambda: pictures.flat_shards([("fc.weight", 12), ("fc.bias", 3)], 4),
    "many shards": lambda: pictures.flat_shards(
        [(f"layer.{i}.weight", 17 * i + 1) for i in range(9)], 8, title=LONG
    ),
    "small ones": lambda: pictures.flat_shards(
        [("qkv.weight", 3072), ("qkv.bias", 96), ("norm.weight", 1), ("none", 0)], 2
    ),
    "padding": lambda: pictures.flat_shards([("scale", 1)], 4),
    "one rank": lambda: pictures.flat_shards([(LONG, 5)], 1),
    "a step": lambda: pictures.fsdp_schedule(step()),
    "one after the other": lambda: pictures.fsdp_schedule(step(prefetch=False)),
    "kept": lambda: pictures.fsdp_schedule(step(free=False), title=LONG),
    "many units": lambda: pictures.fsdp_schedule(
        step(units=[f"{k}: {LONG}" for k in range(30)])
    ),
    "simulated": lambda: pictures.fsdp_schedule(pictures.fsdp_events(simulated(1))),
    "simulated, slow": lambda: pictures.fsdp_schedule(
        pictures.fsdp_events(simulated(4))
    ),
    "alone": lambda: pictures.fsdp_schedule([(1, 1, "unit", "forward")]),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


drawn = drawing(DRAWN)


def widths_of(picture, color):
    """The widths of the boxes with that fill, in inches."""
    return [
        patch.get_width()
        for patch in picture.axes[0].patches
        if patch.get_fill() and patch.get_facecolor()[:3] == to_rgb(color)
    ]


@every_picture
def test_texts_labels_and_size(name):
    assert_suits_a_notebook(drawn(name), 7.95 if name == "four curves" else 5.9)


SUMMARIES = {
    "stages": "7.5 billion parameters, 64 GPUs. DDP holds 120 GB (parameters 15, "
    "gradients 15, optimizer state 90): 34.5 too much for H100; ZeRO-1 holds 31.4 GB "
    "(parameters 15, gradients 15, optimizer state 1.41): 54.1 left on H100; ZeRO-2 "
    "holds 16.6 GB (parameters 15, gradients 0.234, optimizer state 1.41): 68.9 left "
    "on H100; ZeRO-3 holds 1.88 GB (parameters 0.234, gradients 0.234, optimizer "
    "state 1.41): 83.6 left on H100. RTX 4090 has 25.8 GB (24 GiB) and H100 has 85.5 "
    "GB (79.6 GiB).",
    "far too much": "holds 16,000 GB (parameters 2,000, gradients 2,000, optimizer "
    "state 12,000): 15,914 too much for H100.",
    "over time": "Tensor bytes during one step. DDP: measured peak 30 MB, at the end "
    "20 MB. FSDP: measured peak 30 MB, at the end 20 MB.",
    "a record": "FSDP: measured peak 9 kB, at the end 4 kB.",
    "shards": "One unit, flat and cut into shards. 15 elements in 2 parameters, 1 "
    "element of padding, 4 shards of 4. Rank 0: fc.weight[0:4]; rank 1: "
    "fc.weight[4:8]; rank 2: fc.weight[8:12]; rank 3: fc.bias[0:3], 1 element of "
    "padding.",
    "padding": "1 element in 1 parameter, 3 elements of padding, 4 shards of 1. Rank "
    "0: scale[0:1]; rank 1: 1 element of padding; rank 2",
    "a step": "One step of FSDP: gather, compute, free, reduce. 187 ms in all: "
    "all-gather 48 ms, computing 146 ms, reduce-scatter 20 ms; 41 ms of the "
    "communication exposed (21.9 % of the step). 8 all-gathers of 4 units, of which "
    "at most 2 are whole at a time.",
    "one after the other": "8 all-gathers of 4 units, of which at most 1 is whole at a "
    "time.",
    "kept": "8 all-gathers of 4 units, of which at most 4 are whole at a time.",
    "simulated": "16 all-gathers of 8 units, of which at most 2 are whole at a time.",
    "alone": "0 s in all: computing 0 s; 0 s of the communication exposed (0 % of the "
    "step).",
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary(name):
    assert SUMMARIES[name] in drawn(name).summary
    assert drawn(name).summary.endswith(".")


# ---------------------------------------------------------------- memory of each GPU


def test_bars_and_lines_are_to_one_scale():
    picture = drawn("stages")
    lines = [line.get_xdata()[0] for line in picture.axes[0].lines]
    cards = [costs.card(name).nbytes for name in ("RTX 4090", "H100")]
    fill = memory.devices._HOLDS["parameters"]["fill"]
    parameters = widths_of(picture, fill)[0]
    inch = parameters / 15e9
    left = lines[0] - cards[0] * inch
    assert lines[1] == pytest.approx(left + cards[1] * inch)
    for kind in ("parameters", "gradients", "optimizer state"):
        fill = memory.devices._HOLDS[kind]["fill"]
        amounts = [memory._by_category(name, one)[kind] for name, one in STAGES.items()]
        found = widths_of(picture, fill)[: len(amounts)]
        assert found == pytest.approx([amount * inch for amount in amounts])


def test_what_is_left_is_drawn_up_to_the_largest_card():
    picture = drawn("stages")
    assert len(widths_of(picture, pictures.draw.PAPER)) == 3  # DDP has none left
    assert words_of(picture).count("room left") == 3
    assert {"120 GB", "31.4 GB", "16.6 GB", "1.88 GB"} <= {*words_of(picture)}


# ---------------------------------------------------------------- memory over time


def test_curves_are_steps():
    ddp, fsdp = drawn("over time").axes[1:]
    for axis in (ddp, fsdp):
        curve = axis.lines[0]
        assert curve.get_drawstyle() == "steps-post"
        # 20 seconds, and the last value once more, so that it can be seen.
        assert [*curve.get_xdata()] == pytest.approx([*range(21), 20 * 1.02])
        values = [nbytes / MB for nbytes in HILL.nbytes]
        assert [*curve.get_ydata()] == [*values, values[-1]]
        assert axis.get_ylim() == ddp.get_ylim()


def test_a_record_brings_the_names_of_its_spans():
    words = words_of(drawn("a record"))
    assert {"forward", "backward", "step"} <= {*words}
    (axis,) = drawn("a record").axes[1:]
    assert [*axis.lines[0].get_xdata()][:2] == pytest.approx([0, 100])
    # Shades begin where the spans do, seen from the first point on.
    starts = [patch.get_x() for patch in axis.patches]
    assert starts == pytest.approx([50, 400, 800])


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_every_element_is_drawn_three_times_and_padding_twice(n):
    sizes = [12, 3, 7]
    picture = pictures.flat_shards(zip("abc", sizes, strict=True), n)
    padding = n * costs.shard_size(22, n) - 22
    inch = 6.54 / (22 + padding)
    for size, looks in zip(sizes, memory._FILLS, strict=False):
        first, *others = widths_of(picture, looks["fill"])
        # The first is the tensor itself, with a gap on both sides.
        assert first == pytest.approx(size * inch - 0.06)
        assert others[0] == pytest.approx(size * inch)  # in the flat row
        assert sum(others[1:]) == pytest.approx(size * inch)  # on the ranks
    hatched = [
        patch.get_width()
        for patch in picture.axes[0].patches
        if patch.get_hatch() == memory._PADDING["hatch"]
    ]
    assert sum(hatched) == pytest.approx(2 * padding * inch)


def test_cuts_are_where_the_shards_end():
    lines = drawn("shards").axes[0].lines
    places = [line.get_xdata()[0] for line in lines]
    assert len(places) == 3
    assert [b - a for a, b in itertools.pairwise(places)] == pytest.approx(
        [4 * 6.54 / 16] * 2
    )
    assert "fc.weight[4:8]" in words_of(drawn("shards"))


# ---------------------------------------------------------------- a step of FSDP


def test_events_of_a_simulated_step_are_drawn_as_they_are():
    run = simulated(1)
    events = pictures.fsdp_events(run)
    assert len(events) == len(run.events) == 8 * 7
    picture = drawn("simulated")
    for kind in ("all-gather", "forward", "backward", "reduce-scatter"):
        fill = memory._LOOKS[kind]["fill"]
        # One of them is the sample in the key.
        assert len(widths_of(picture, fill)) == sum(e[3] == kind for e in events) + 1
    assert f"{pictures.draw.duration(run.seconds)} in all" in picture.summary
    assert f"{pictures.draw.duration(run.exposed)} of the" in picture.summary


def test_boxes_are_as_long_as_their_times():
    picture = drawn("one after the other")
    widths = widths_of(picture, memory._LOOKS["forward"]["fill"])[:-1]
    backward = widths_of(picture, memory._LOOKS["backward"]["fill"])[:-1]
    assert widths == pytest.approx([widths[0]] * 4)
    assert backward == pytest.approx([2 * widths[0]] * 4)
    whole = widths_of(picture, memory._WHOLE["fill"])[:-1]
    # From the start of an all-gather until it is freed: 18 ms, and 30 ms.
    expected = sorted([1.5 * widths[0]] * 4 + [2.5 * widths[0]] * 4)
    assert sorted(whole) == pytest.approx(expected)


def test_exposed_is_communication_without_computing():
    events = [
        (0, 4, "a", "all-gather"),
        (4, 10, "a", "forward"),
        (5, 8, "b", "all-gather"),  # hidden
        (9, 12, "c", "all-gather"),  # hidden for one second
        (11, 13, "d", "reduce-scatter"),  # one of its two seconds is counted above
    ]
    picture = pictures.fsdp_schedule(events)
    assert "7 s of the communication exposed (53.8 % of the step)" in picture.summary


def test_many_units_are_left_out_in_the_middle():
    words = words_of(drawn("many units"))
    assert "…" in words
    assert drawn("many units").summary.count("30 units") == 1


# ---------------------------------------------------------------- wrong inputs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: pictures.memory_per_gpu({}), "strategies holds 0 bars: expected 1"),
        (
            lambda: pictures.memory_per_gpu(dict.fromkeys(range(9), STAGES["DDP"])),
            "strategies holds 9 bars: expected 1 to 8.",
        ),
        (
            lambda: pictures.memory_per_gpu({"a": {"optimizer": 1}}),
            "a holds 'optimizer': the categories are 'parameters', 'gradients'",
        ),
        (
            lambda: pictures.memory_per_gpu({"a": {"gradients": -1}}),
            "gradients of a is -1: expected 0 or more.",
        ),
        (lambda: pictures.memory_over_time({}), "There are 0 curves: expected 1 to 4."),
        (
            lambda: pictures.memory_over_time({"a": TensorBytes()}),
            "a has no points: expected at least one.",
        ),
        (
            lambda: pictures.flat_shards([("a", 0)], 2),
            "The parameters have no elements: there is nothing to cut.",
        ),
        (lambda: pictures.flat_shards([("a", 1.5)], 2), "sizes[0] is 1.5: expected a"),
        (lambda: pictures.flat_shards([("a", 4)], 0), "world_size is 0: expected a"),
        (lambda: pictures.flat_shards([("a", 4)], 9), "world_size is 9: expected 1 to"),
        (
            lambda: pictures.fsdp_schedule([(0, 1, "a", "all-gather")]),
            "There is no computing among the events: nothing to draw.",
        ),
        (
            lambda: pictures.fsdp_schedule([(0, 1, "a", "gather")]),
            "The kind 'gather' of the rank is unknown: use 'all-gather', 'forward', ",
        ),
        (
            lambda: pictures.fsdp_schedule([(1, 0, "a", "forward")]),
            "'a' on the rank ends at 0, before it starts at 1.",
        ),
        (
            lambda: pictures.fsdp_schedule([(0, 1, "forward")]),
            "An interval of the rank is (0, 1, 'forward'): expected (start, stop,",
        ),
    ],
)
def test_wrong_inputs(wrong, message):
    with pytest.raises(ValueError) as caught:
        wrong()
    assert str(caught.value).startswith(message)
