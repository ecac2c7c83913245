"""The pictures of devices (lessons 02 and 03): what they say, and that it is right."""

import pytest

from course_utils import pictures
from course_utils.pictures import devices
from course_utils.theory import costs
from course_utils.virtual_gpus.records import Interval, Timeline
from tests.test_pictures import LONG, assert_suits_a_notebook, drawing, texts_of

MiB = 2**20
TWO = {
    "cuda:0": {
        "parameters": 5.5 * MiB,
        "gradients": 5.5 * MiB,
        "activations": 210 * MiB,
    },
    "cuda:1": {
        "activations": 102 * MiB,
        "parameters": 92 * MiB,
        "gradients": 92 * MiB,
        "optimizer state": 92 * MiB,
        "other": 3 * MiB,
    },
}
NAIVE = {
    "cuda:0": [
        (0.00, 0.05, "forward"),
        (0.05, 0.06, "transfer"),
        (0.21, 0.22, "transfer"),
        (0.22, 0.32, "backward"),
    ],
    "cuda:1": [
        (0.11, 0.21, "backward"),
        (0.05, 0.06, "transfer"),
        (0.06, 0.11, "forward"),
        (0.21, 0.22, "transfer"),
    ],
}


def pipeline(stages, micro_batches, forward=0.01):
    """All forwards, then all backwards, which take twice as long."""
    rows = {}
    for k in range(stages):
        rows[f"cuda:{k}"] = row = []
        for m in range(micro_batches):
            row.append(((k + m) * forward, (k + m + 1) * forward, "forward", str(m)))
            start = (stages + micro_batches - 1) * forward
            start += (stages - 1 - k + micro_batches - 1 - m) * 2 * forward
            row.append((start, start + 2 * forward, "backward", str(m)))
    return rows


def timeline(rows):
    """From device -> (start, stop, phase or "transfer", label)."""
    return Timeline(
        {
            device: tuple(
                Interval(device, start, stop, "send", "forward", *label)
                if kind == "transfer"
                else Interval(device, start, stop, "compute", kind, *label)
                for start, stop, kind, *label in row
            )
            for device, row in rows.items()
        }
    )


RECORDED = Timeline(
    {
        "cuda:0": (
            Interval("cuda:0", 0.0, 1e-3, "compute", "forward", "0"),
            Interval("cuda:0", 1e-3, 1.5e-3, "send", "forward", "0"),
            Interval("cuda:0", 3e-3, 4e-3, "compute", "optimizer"),
        ),
        "cuda:1": (Interval("cuda:1", 1e-3, 1.5e-3, "receive", "setup", "0"),),
        "cuda:2": (),
    },
    4e-3,
)


def step_seconds(micro_batches):
    return costs.pipeline_seconds(20e-3, 2, micro_batches, overhead=0.5e-3)


TIMES = {m: step_seconds(m) for m in (1, 2, 4, 8, 16, 32)}

DRAWN = {
    "two devices": lambda: pictures.device_memory(
        TWO, capacity=320 * MiB, title="At the peak"
    ),
    "a large cap": lambda: pictures.device_memory(TWO, capacity=16 * 2**30),
    "a full device": lambda: pictures.device_memory(
        {"cuda:0": {"parameters": 3 * 2**30}}, capacity=3 * 2**30
    ),
    "eight devices": lambda: pictures.device_memory(
        {
            f"cuda:{k}": {"parameters": 97 * MiB, "activations": (8 - k) * 40 * MiB}
            for k in range(8)
        },
        capacity=640 * MiB,
    ),
    "nothing held": lambda: pictures.device_memory(
        {"cuda:0": {}, "cpu": {"other": 0}}, capacity=MiB
    ),
    "long names": lambda: pictures.device_memory(
        {LONG: {"optimizer state": 12.0, "other": 700.0}}, capacity=800, title=LONG
    ),
    "naive": lambda: pictures.device_timeline(timeline(NAIVE), title="A naive split"),
    "naive, longer": lambda: pictures.device_timeline(timeline(NAIVE), span=0.5),
    "pipeline": lambda: pictures.device_timeline(timeline(pipeline(4, 8))),
    "32 micro-batches": lambda: pictures.device_timeline(timeline(pipeline(8, 32))),
    "recorded": lambda: pictures.device_timeline(RECORDED, title="As it was"),
    "always busy": lambda: pictures.device_timeline(
        timeline({"cuda:0": [(0, 2, "optimizer")]})
    ),
    "at one moment": lambda: pictures.device_timeline(
        timeline({LONG: [(1, 1, "forward", LONG)]}), title=LONG, span=1e-7
    ),
    "micro-batches": lambda: pictures.micro_batch_times(
        TIMES, step_seconds, best=6.3, one_device=0.04
    ),
    "two times": lambda: pictures.micro_batch_times(
        {3: 2.0, 5: 1.0}, lambda m: 3 / m, best=5, one_device=4.0
    ),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


drawn = drawing(DRAWN)


@every_picture
def test_texts_labels_and_size(name):
    assert_suits_a_notebook(drawn(name), 5.8)


SUMMARIES = {
    "two devices": "At the peak. cuda:0 holds 221 MiB (parameters 5.5, gradients 5.5, "
    "activations 210); cuda:1 holds 381 MiB (parameters 92, gradients 92, optimizer "
    "state 92, activations 102, other 3). Each has 320 MiB.",
    "a large cap": "Each has 16 GiB.",
    "nothing held": "cuda:0 holds 0 MiB (nothing); cpu holds 0 MiB (nothing).",
    "naive": "A naive split. 320 ms in all. Times in ms: cuda:0 forward 50, backward "
    "100, transfer 20, idle 47 %; cuda:1 forward 50, backward 100, transfer 20, idle "
    "47 %.",
    "pipeline": "cuda:0 forward 80, backward 160, idle 27 %; cuda:1 forward 80,",
    "recorded": "4 ms in all. Times in ms: cuda:0 forward 1, optimizer 1, transfer "
    "0.5, idle 38 %; cuda:1 transfer 0.5, idle 88 %; cuda:2 nothing, idle 100 %.",
    "always busy": "cuda:0 optimizer 2, idle 0 %.",
    "micro-batches": "Time in ms by micro-batches. 1: 41, 2: 31.5, 4: 27.5, 8: 27, 16: "
    "29.8, 32: 37.1. One device: 40. Fastest of those measured: 8 micro-batches. Best "
    "by the formula: 6.3.",
    "two times": "Time in s by micro-batches. 3: 2, 5: 1. One device: 4. Fastest of "
    "those measured: 5 micro-batches. Best by the formula: 5.",
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary(name):
    assert SUMMARIES[name] in drawn(name).summary


@every_picture
def test_every_picture_has_a_summary(name):
    assert drawn(name).summary.endswith((".", LONG.strip()))


def bars_of(picture, looks):
    """(x, width) in inches of what is drawn on the board in that fill and hatch."""
    found = []
    for patch in picture.axes[0].patches:
        fill = "#{:02X}{:02X}{:02X}".format(
            *(round(255 * part) for part in patch.get_facecolor()[:3])
        )
        is_filled = patch.get_fill() and fill == looks["fill"]
        if is_filled and (patch.get_hatch() or None) == looks.get("hatch"):
            found.append((patch.get_x(), patch.get_width()))
    return found


def test_bars_of_memory_are_to_scale():
    picture = drawn("two devices")
    key = 1  # the sample in the key
    inches = {}
    for category, looks in devices._HOLDS.items():
        amounts = [held[category] for held in TWO.values() if category in held]
        bars = bars_of(picture, looks)
        assert len(bars) == len(amounts) + key
        inches[category] = sorted(width for _, width in bars[:-1])
        for width, amount in zip(inches[category], sorted(amounts), strict=True):
            assert width / inches["parameters"][-1] == pytest.approx(
                amount / (92 * MiB)
            )


def test_the_cap_is_where_it_says():
    """A device that is just full ends at the line."""
    picture = drawn("a full device")
    (line,) = (line for line in picture.axes[0].lines if line.get_linestyle() != "-")
    start, width = bars_of(picture, devices._HOLDS["parameters"])[0]
    assert line.get_xdata()[0] == pytest.approx(start + width)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_bars_of_time_are_to_scale_and_in_place(kind):
    picture = drawn("pipeline")
    bars = bars_of(picture, devices._WORKS[kind])[:-1]
    works = [
        (start, stop - start)
        for row in pipeline(4, 8).values()
        for start, stop, what, _ in row
        if what == kind
    ]
    assert len(bars) == len(works) == 32
    left, inch = bars[0][0], bars[0][1] / works[0][1]
    works.sort(), bars.sort()
    for (x, wide), (start, seconds) in zip(bars, works, strict=True):
        assert wide == pytest.approx(seconds * inch)
        assert x - bars[0][0] == pytest.approx((start - works[0][0]) * inch, abs=1e-6)
    assert left > 0


def test_idle_time_is_framed_wherever_nothing_is_done():
    idle = bars_of(drawn("naive"), devices._IDLE)
    # One gap on cuda:0, one on each side of cuda:1's work, and the sample.
    gaps = [bar for bar in idle if bar[1] > 0.5]
    assert len(gaps) == 3


def test_equal_neighbours_become_one_bar():
    row = [(0.1 * k, 0.1 * (k + 1), "forward", "a") for k in range(100)]
    picture = pictures.device_timeline(timeline({"cuda:0": row}))
    assert len(bars_of(picture, devices._WORKS["forward"])) == 1 + 1
    apart = [(0, 1, "forward", "a"), (1, 2, "forward", "b")]
    picture = pictures.device_timeline(timeline({"cuda:0": apart}))
    assert len(bars_of(picture, devices._WORKS["forward"])) == 2 + 1


def test_of_a_long_label_the_number_is_drawn():
    works = [(k, k + 1, "forward", f"micro-batch {k}") for k in range(16)]
    picture = pictures.device_timeline(timeline({"gpu": works}))
    texts = {text.get_text() for text in texts_of(picture)}
    assert {str(k) for k in range(16)} <= texts
    wide = pictures.device_timeline(timeline({"gpu": works[:2]}))
    assert "micro-batch 1" in {text.get_text() for text in texts_of(wide)}


def test_two_timelines_can_have_the_same_scale():
    (short,) = (
        b for b in bars_of(drawn("always busy"), devices._WORKS["optimizer"])[:1]
    )
    work = timeline({"cuda:0": [(0, 2, "optimizer")]})
    picture = pictures.device_timeline(work, span=4)
    (half,) = bars_of(picture, devices._WORKS["optimizer"])[:1]
    assert half[1] == pytest.approx(short[1] / 2)


def test_kinds_are_told_apart_without_colour():
    for looks in (devices._HOLDS, {**devices._WORKS, "idle": devices._IDLE}):
        patterns = [
            (look.get("hatch"), look.get("dashed", False)) for look in looks.values()
        ]
        assert len(set(patterns)) == len(patterns)


def test_measured_points_and_the_best_are_drawn_where_they_are():
    axis = drawn("micro-batches").axes[1]
    (points,) = (line for line in axis.lines if line.get_marker() == "o")
    assert dict(zip(points.get_xdata(), points.get_ydata(), strict=True)) == (
        pytest.approx({m: 1e3 * seconds for m, seconds in TIMES.items()})
    )
    curve = axis.lines[0]
    assert list(curve.get_xdata()) == list(range(1, 33))
    assert curve.get_ydata()[6] == pytest.approx(1e3 * step_seconds(7))
    assert [line for line in axis.lines if list(line.get_xdata()) == [6.3, 6.3]]


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (
            lambda: pictures.device_memory({}, capacity=1),
            ValueError,
            "There are 0 devices",
        ),
        (
            lambda: pictures.device_memory({str(k): {} for k in range(9)}, capacity=1),
            ValueError,
            "There are 9 devices: expected 1 to 8",
        ),
        (
            lambda: pictures.device_memory({"cuda:0": {"weights": 1}}, capacity=1),
            ValueError,
            "cuda:0 holds 'weights': the categories are 'parameters'",
        ),
        (
            lambda: pictures.device_memory({"cuda:0": {"other": -1}}, capacity=1),
            ValueError,
            "other of cuda:0 is -1",
        ),
        (
            lambda: pictures.device_memory({"cuda:0": {"other": "1 GiB"}}, capacity=1),
            TypeError,
            "other of cuda:0 is '1 GiB'",
        ),
        (
            lambda: pictures.device_timeline(timeline({})),
            ValueError,
            "There are 0 devices",
        ),
        (
            lambda: pictures.device_timeline(timeline({"cuda:0": []})),
            ValueError,
            "no device did anything",
        ),
        (
            lambda: pictures.device_timeline(timeline({"cuda:0": [(0, 1, "sleep")]})),
            ValueError,
            "The kind 'sleep' on cuda:0 is unknown",
        ),
        (
            lambda: pictures.device_timeline(
                timeline({"cuda:0": [(0, 2, "forward"), (1, 3, "backward")]})
            ),
            ValueError,
            "cuda:0 did two things at once: forward until 2 s, and backward from 1 s",
        ),
        (
            lambda: pictures.device_timeline(
                timeline({"cuda:0": [(0, 2, "forward")]}), span=1
            ),
            ValueError,
            "span is 1 s, but the work took 2 s",
        ),
        (
            lambda: pictures.micro_batch_times({1: 1.0}, float, best=1, one_device=1),
            ValueError,
            "measured holds 1 times: expected 2 to 10",
        ),
        (
            lambda: pictures.micro_batch_times(
                {1: 1.0, 0: 2.0}, float, best=1, one_device=1
            ),
            ValueError,
            "a number of micro-batches is 0",
        ),
        (
            lambda: pictures.micro_batch_times(
                {1: 1.0, 2: 0.0}, float, best=1, one_device=1
            ),
            ValueError,
            "The time of 2 is 0.0: expected above 0",
        ),
    ],
)
def test_wrong_inputs(draw, error, message):
    with pytest.raises(error, match=message):
        draw()
