"""The pictures of lesson 07: what they say, and that what they draw is right."""

import itertools

import pytest

from course_utils import pictures
from course_utils.pictures import draw
from course_utils.pictures.scaling import _CURVES
from tests.test_pictures import LONG, assert_suits_a_notebook, drawing, words_of

GPUS = (8, 16, 64, 512, 1024, 10_000)


def curve(name, gpus=GPUS, factor=1.0):
    """Times that grow with the number of GPUs."""
    return [
        {"name": name, "gpus": number, "seconds": factor * 0.1 * (number / 8) ** 0.3}
        for number in gpus
    ]


def two_curves():
    return [*curve("ring"), *curve("tree", GPUS[:3], factor=0.7)]


def predictions(*ratios, name="ring", noise=0.05, sizes=(4096, 65536, 2**20, 2**24)):
    return [
        {
            "name": name,
            "nbytes": size,
            "predicted": (measured := 2e-3 + size / 4e8) / ratio,
            "measured": measured,
            "low": measured * (1 - noise),
            "high": measured * (1 + noise),
        }
        for size, ratio in zip(sizes, ratios, strict=True)
    ]


ONE_MEASUREMENT = [
    row | {"name": name, "predicted": row["predicted"] * factor}
    for name, factor in (("ping-pong", 0.25), ("shift", 1.1))
    for row in predictions(1.02, 0.97, 1.1, 1)
]
DRAWN = {
    "time": lambda: pictures.scaling(two_curves(), title="Step time"),
    "six curves": lambda: pictures.scaling(
        [row for k in range(6) for row in curve(f"{k} {LONG}", factor=1 + k)],
        title=LONG,
    ),
    "every number": lambda: pictures.scaling(curve("hierarchical", range(8, 200, 8))),
    "one point": lambda: pictures.scaling(curve("ring", [1])),
    "close": lambda: pictures.predicted_and_measured(predictions(1.02, 0.97, 1.1, 1)),
    "far off": lambda: pictures.predicted_and_measured(
        predictions(0.2, 1, 7, 30, noise=0.4), title=LONG
    ),
    "three series": lambda: pictures.predicted_and_measured(
        [
            *predictions(1, 1.1, 1.2, 1.3, name="ring"),
            *predictions(1, 2, 1.2, 1.3, name="tree, from ping-pong"),
            *predictions(1, 0.9, 0.8, 0.7, name=LONG),
        ]
    ),
    "one size": lambda: pictures.predicted_and_measured(
        predictions(1, sizes=(8,), noise=0)
    ),
    "one measurement": lambda: pictures.predicted_and_measured(ONE_MEASUREMENT),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


drawn = drawing(DRAWN)


@every_picture
def test_texts_labels_and_size(name):
    most = {"three series": 6.4, "one measurement": 6.4}
    assert_suits_a_notebook(drawn(name), most.get(name, 6.0))


SUMMARIES = {
    "time": "Step time. ring: time 100 ms on 8 GPUs, 849 ms on 10,000. tree: time 70 "
    "ms on 8 GPUs, 131 ms on 64.",
    "one point": "ring: time 53.6 ms on 1 GPU.",
    "close": "Predicted and measured. ring: measured / predicted from 0.97 to 1.1; the "
    "prediction is within the A/A band at 3 of 4 sizes. Farthest off at 1.05 MB: "
    "predicted 4.2 ms, measured 4.62 ms (A/A 4.39 ms to 4.85 ms).",
    "three series": "tree, from ping-pong: measured / predicted from 1 to 2; the "
    "prediction is within the A/A band at 1 of 4 sizes. Farthest off at 65.5 kB: ",
    "one size": "within the A/A band at 1 of 1 size. Farthest off at 8 B: ",
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary(name):
    assert SUMMARIES[name] in drawn(name).summary
    assert drawn(name).summary.endswith(".")


def test_what_is_far_below_is_as_far_off_as_what_is_far_above():
    (worst,) = predictions(0.1, sizes=(8,))
    rows = [worst, *predictions(9, sizes=(16,))]
    assert "Farthest off at 8 B" in pictures.predicted_and_measured(rows).summary


# ---------------------------------------------------------------- scaling


def test_all_points_are_drawn_where_they_are():
    (axis,) = drawn("time").axes[1:]
    assert [(*line.get_xdata(),) for line in axis.lines] == [GPUS, GPUS[:3]]
    drawn_values = itertools.chain(*(line.get_ydata() for line in axis.lines))
    assert [*drawn_values] == [row["seconds"] for row in two_curves()]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")


def test_points_are_in_the_order_of_the_gpus():
    rows = curve("ring")
    picture = pictures.scaling([*reversed(rows)])
    assert [*picture.axes[1].lines[0].get_xdata()] == [*GPUS]


def test_curves_differ_by_marker_line_and_name():
    lines = drawn("six curves").axes[1].lines
    assert len({line.get_marker() for line in lines}) == 6
    assert len({str(looks["ls"]) for looks in _CURVES}) == 6
    for name in ("ring", "tree"):
        assert name in words_of(drawn("time"))


def test_the_last_number_of_gpus_has_a_tick():
    for name in ("time", "every number"):
        labels = [text.get_text() for text in drawn(name).axes[1].get_xticklabels()]
        assert labels[0] == {"time": "10,000", "every number": "192"}[name]


# ---------------------------------------------------------------- predictions


def test_times_and_ratios_are_drawn_where_they_are():
    rows = predictions(1.02, 0.97, 1.1, 1)
    times, ratios = drawn("close").axes[1:]
    sizes = [row["nbytes"] for row in rows]
    for line, key in zip(times.lines, ("measured", "predicted"), strict=True):
        assert [*line.get_xdata()] == sizes
        assert [*line.get_ydata()] == [row[key] for row in rows]
    (bands,) = ratios.collections
    ends = [path.vertices[:, 1] for path in bands.get_paths()]
    for row, (low, high) in zip(rows, ends, strict=True):
        expected = row["low"] / row["predicted"], row["high"] / row["predicted"]
        assert (low, high) == pytest.approx(expected)


def test_ratios_that_are_far_apart_get_a_logarithmic_axis():
    assert drawn("close").axes[2].get_yscale() == "linear"
    assert drawn("far off").axes[2].get_yscale() == "log"
    assert "1×" in words_of(drawn("close"))
    assert "1×" in words_of(drawn("far off"))


def test_predicted_and_measured_are_told_apart_without_colour():
    measured, predicted = drawn("close").axes[1].lines
    assert predicted.get_linestyle() == "--"
    assert measured.get_linestyle() == "-"
    assert predicted.get_markerfacecolor() == draw.PAPER != measured.get_color()
    assert {"ring, predicted", "measured"} <= {*words_of(drawn("close"))}
    words = words_of(drawn("three series"))
    assert {"ring, predicted", "tree, from ping-pong, predicted"} <= {*words}


def test_a_measurement_in_common_is_one_line():
    picture = drawn("one measurement")
    lines = picture.axes[1].lines
    assert [line.get_linestyle() for line in lines] == ["-", "--", "--"]
    assert [*lines[0].get_ydata()] == [row["measured"] for row in ONE_MEASUREMENT[:4]]
    colors = {line.get_color() for line in lines}
    assert len(colors) == len({line.get_marker() for line in lines}) == 3
    words = words_of(picture)
    assert words.count("measured") == 1
    assert {"ping-pong, predicted", "shift, predicted"} <= {*words}
    assert "ping-pong, measured" not in words
    # Each has its own points below: what was measured over what it predicted.
    assert len(picture.axes[2].collections) == 2


# ---------------------------------------------------------------- wrong inputs

ROW = predictions(1, sizes=(8,))[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: pictures.scaling([]), "rows are of 0 names: expected 1 to 6."),
        (
            lambda: pictures.scaling([{"name": "a", "gpus": 1}]),
            "The row {'name': 'a', 'gpus': 1} has no seconds.",
        ),
        (
            lambda: pictures.scaling([{"name": "a", "seconds": 1}]),
            "The row {'name': 'a', 'seconds': 1} has no gpus.",
        ),
        (
            lambda: pictures.scaling(curve("a", factor=0)),
            "seconds is 0.0: expected more than 0.",
        ),
        (
            lambda: pictures.scaling([row for k in range(7) for row in curve(str(k))]),
            "rows are of 7 names: expected 1 to 6.",
        ),
        (lambda: pictures.predicted_and_measured([]), "rows are of 0 names: expected"),
        (
            lambda: pictures.predicted_and_measured([{"nbytes": 1, "low": 1}]),
            "The row {'nbytes': 1, 'low': 1} has no high, measured, name and",
        ),
        (
            lambda: pictures.predicted_and_measured([{**ROW, "predicted": 0}]),
            "predicted is 0: expected more than 0.",
        ),
        (
            lambda: pictures.predicted_and_measured([{**ROW, "measured": 1}]),
            "Measured were 1 s, outside of the band from",
        ),
    ],
)
def test_wrong_inputs(wrong, message):
    with pytest.raises(ValueError) as caught:
        wrong()
    assert str(caught.value).startswith(message)
