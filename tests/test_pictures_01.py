"""The pictures of lesson 01: what they say, and that what they draw is right."""

import math

import numpy as np
import pytest

from course_utils import pictures
from course_utils.pictures import machines
from course_utils.theory import costs
from tests.test_pictures import LONG, assert_suits_a_notebook, drawing

SIZES = [4**k for k in range(1, 13)]
FIT = costs.Transfer(latency=60e-6, bandwidth=1.6e9)
TIMES = [FIT.seconds(size) for size in SIZES]

DRAWN = {
    "four ways": lambda: pictures.four_ways(),
    "1 × 1": lambda: pictures.ranks_on_nodes(1, 1),
    "2 × 4": lambda: pictures.ranks_on_nodes(2, 4),
    "2 × 4, asked": lambda: pictures.ranks_on_nodes(2, 4, asked=(1, 1)),
    "2 × 4, a wrong guess": lambda: pictures.ranks_on_nodes(
        2, 4, asked=(1, 1), guess=4.0
    ),
    "2 × 4, the right guess": lambda: pictures.ranks_on_nodes(
        2, 4, asked=(1, 1), guess=5.0
    ),
    "2 × 4, a guess that is no rank": lambda: pictures.ranks_on_nodes(
        2, 4, asked=(1, 1), guess=2.5
    ),
    "3 × 8": lambda: pictures.ranks_on_nodes(3, 8, asked=(2, 7), guess=1e9),
    "the ladder": lambda: pictures.bandwidth_ladder(),
    "14 GB": lambda: pictures.transfer_ladder(14e9),
    "14 GB, no guess": lambda: pictures.transfer_ladder(
        14e9, guess_for="InfiniBand NDR"
    ),
    "14 GB, a guess": lambda: pictures.transfer_ladder(
        14e9, guess=0.035, guess_for="InfiniBand NDR"
    ),
    "14 GB, a wild guess": lambda: pictures.transfer_ladder(
        14e9, guess=1e30, guess_for="InfiniBand NDR"
    ),
    "14 GB, a guess below 0": lambda: pictures.transfer_ladder(
        14e9, guess=-3, guess_for="InfiniBand NDR"
    ),
    "1 byte": lambda: pictures.transfer_ladder(1),
    "times": lambda: pictures.transfer_times(SIZES, TIMES, FIT),
    "noisy times": lambda: pictures.transfer_times(
        SIZES, [t * (1 + 0.5 * (i % 3)) for i, t in enumerate(TIMES)], FIT
    ),
    "times without latency": lambda: pictures.transfer_times(
        [1000, 10**9], [1e-6, 1.0], costs.Transfer(0.0, 1e9)
    ),
    "bars": lambda: pictures.bars(
        {"1 thread": 1.2, "2 threads": 1.3, "2 processes": 0.63}, "s", "Work", "A note."
    ),
    "long bars": lambda: pictures.bars({LONG: 1e12, "b": 0}, "operations", LONG, LONG),
    "one bar": lambda: pictures.bars({"a": 0}, "", "Nothing"),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


drawn = drawing(DRAWN)


@every_picture
def test_texts_labels_and_size(name):
    assert_suits_a_notebook(drawn(name), 5.8)


SUMMARIES = {
    "2 × 4": "2 nodes, 4 GPUs each: 8 ranks: node 0 has ranks 0 to 3; node 1 has "
    "ranks 4 to 7.",
    "2 × 4, asked": "Local rank 1 on node 1: It is rank 5. No answer yet",
    "2 × 4, a wrong guess": "It is rank 5. You said 4, which is another GPU.",
    "2 × 4, the right guess": "It is rank 5, as you said.",
    "2 × 4, a guess that is no rank": "You said 2.5: there is no such rank here.",
    "3 × 8": "It is rank 23. You said 1e+09: there is no such rank here.",
    "the ladder": "NVLink 4 (H100, H200) 450 GB/s; NVLink 3 (A100) 300 GB/s; PCIe",
    "14 GB": "InfiniBand NDR 280 ms; InfiniBand HDR 560 ms; 400 Gigabit Ethernet 280",
    "14 GB, no guess": "No guess yet",
    "14 GB, a guess": "The cross is your guess for InfiniBand NDR: 35 ms.",
    "14 GB, a guess below 0": "your guess for InfiniBand NDR: -3 s.",
    "times": "Fitted: latency 60 µs, bandwidth 1.6 GB/s. The largest error of the fit "
    "is 0 %.",
    "bars": "Work: 1 thread 1.2 s, 2 threads 1.3 s, 2 processes 0.63 s. A note.",
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary(name):
    assert SUMMARIES[name] in drawn(name).summary


@every_picture
def test_every_picture_has_a_summary(name):
    assert drawn(name).summary.endswith((".", LONG.strip()))


def lines_with(picture, marker):
    """The x positions, in inches, of what is drawn with that marker."""
    board = picture.axes[0]
    return [line.get_xdata()[0] for line in board.lines if line.get_marker() == marker]


def test_ten_times_as_much_is_one_step_on_the_ladder():
    picture = drawn("the ladder")
    hundred, ten = sorted(lines_with(picture, "D"), reverse=True)[-2:]  # Ethernet
    across = sorted(x for marker in "osD" for x in lines_with(picture, marker))
    speeds = sorted(math.log10(link.one_way) for link in costs.LADDER)
    assert len(across) == len(speeds) == 12
    for x, speed in zip(across, speeds, strict=True):
        steps = (speed - speeds[0]) * (hundred - ten)
        assert x - across[0] == pytest.approx(steps, abs=1e-6)


def test_the_guess_is_where_it_says():
    """A guess of the right time lies on the dot; one ten times as long, right of it."""
    right = 14e9 / costs.link("InfiniBand NDR").one_way
    place = {}
    for guess in (right, 10 * right):
        picture = pictures.transfer_ladder(
            14e9, guess=guess, guess_for="InfiniBand NDR"
        )
        (place[guess],) = lines_with(picture, "X")
    assert place[right] in lines_with(picture, "D")
    assert place[10 * right] > place[right]
    assert not lines_with(drawn("14 GB, no guess"), "X")
    assert not lines_with(drawn("14 GB, a guess below 0"), "X")


def test_measured_points_are_drawn_where_they_are():
    axis = drawn("noisy times").axes[1]
    (points,) = (line for line in axis.lines if line.get_marker() == "o")
    assert list(points.get_xdata()) == SIZES
    noisy = [t * (1 + 0.5 * (i % 3)) for i, t in enumerate(TIMES)]
    assert list(points.get_ydata()) == noisy
    curve = axis.lines[0]
    n = float(curve.get_xdata()[100])
    assert curve.get_ydata()[100] == pytest.approx(FIT.seconds(n))


def test_places_are_told_apart_by_shape_too():
    markers = {looks["marker"] for looks in machines._PLACE_LOOKS.values()}
    assert len(markers) == len(machines._PLACE_LOOKS) == 3


def test_the_learners_rank_is_hatched():
    hatched = [patch for patch in drawn("2 × 4").axes[0].patches if patch.get_hatch()]
    assert not hatched
    for name in ("2 × 4, a wrong guess", "2 × 4, the right guess"):
        patches = drawn(name).axes[0].patches
        # The box of the rank, and its sample in the key.
        assert len([patch for patch in patches if patch.get_hatch()]) == 2


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: pictures.ranks_on_nodes(0, 4), ValueError, "nodes is 0"),
        (lambda: pictures.ranks_on_nodes(2, 9), ValueError, "gpus_per_node is 9"),
        (
            lambda: pictures.ranks_on_nodes(2, 4, asked=(2, 0)),
            ValueError,
            "There is no node 2: nodes are 0 to 1.",
        ),
        (
            lambda: pictures.ranks_on_nodes(2, 4, asked=(1, 4)),
            ValueError,
            "local_rank is 4",
        ),
        (lambda: pictures.transfer_ladder(0), ValueError, "nbytes is 0"),
        (
            lambda: pictures.transfer_times([1, 2], [1.0], FIT),
            ValueError,
            "There are 2 sizes and 1 times",
        ),
        (
            lambda: pictures.transfer_times([1, 2], [1.0, 0.0], FIT),
            ValueError,
            "A size or time is 0.0",
        ),
        (lambda: pictures.bars({}, "s", "x"), ValueError, "holds 0 values"),
        (lambda: pictures.bars({"a": -1}, "s", "x"), ValueError, "a is -1"),
        (lambda: pictures.bars({"a": np.nan}, "s", "x"), ValueError, "a is nan"),
        (lambda: pictures.bars({"a": "1"}, "s", "x"), TypeError, "a is '1'"),
    ],
)
def test_wrong_inputs(draw, error, message):
    with pytest.raises(error, match=message):
        draw()
