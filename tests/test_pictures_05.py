"""The pictures of lesson 05: what they say, and that what they draw is right."""

import math

import pytest
from torch.utils.data import DistributedSampler

from course_utils import pictures
from course_utils.pictures import draw, training
from tests.test_pictures import LONG, assert_suits_a_notebook, drawing, run, words_of


def shares(total, ranks, **how):
    """What a DistributedSampler gives to each rank."""
    data = range(total)
    return [[*DistributedSampler(data, ranks, rank, **how)] for rank in range(ranks)]


def partition(total, ranks, **how):
    return pictures.partition(shares(total, ranks, **how), total)


def losses(*values):
    rows = run(len(values))
    return [
        {**row, "loss": loss, "test_accuracy": 0.1}
        for row, loss in zip(rows, values, strict=True)
    ]


NAN, INF = math.nan, math.inf
ALMOST = [0.0, 0.0, *(1e-9 * step**2 for step in range(1, 19))]
UNEVEN = [1e-3 * step for step in range(1, 21)]
WARM_UP = [0.1 + 0.03 * step for step in range(10)] + [0.4] * 30

DRAWN = {
    "10 items on 4 ranks": lambda: partition(10, 4, shuffle=False),
    "dropped": lambda: partition(10, 4, shuffle=False, drop_last=True),
    "shuffled": lambda: partition(24, 2, shuffle=True),
    "one rank": lambda: partition(24, 1, shuffle=True),
    "8 ranks": lambda: partition(21, 8, shuffle=False),
    "contiguous": lambda: pictures.partition(
        [range(6), range(6, 9), range(9, 12), []], 13, title=LONG
    ),
    "one item": lambda: partition(1, 4, shuffle=False),
    "diverges": lambda: pictures.training_curves(
        {"one big batch": run(4), "mean": run(4), "sum": losses(15, 180, 9e5, 4e6)}
    ),
    "becomes nan": lambda: pictures.training_curves(
        {"one big batch": run(4), "mean": run(4), "sum": losses(15, 180, NAN, NAN)}
    ),
    "always nan": lambda: pictures.training_curves(
        {"mean": run(4), "sum": losses(INF, NAN, NAN, NAN)}
    ),
    "differences": lambda: pictures.difference_by_step(
        {"equal shards": ALMOST, "uneven shards": UNEVEN, "BatchNorm": UNEVEN[::-1]}
    ),
    "0 and nan": lambda: pictures.difference_by_step(
        {"mean": [0.0] * 5, "sum": [0.1, 40.0, INF, NAN, NAN]}
    ),
    "always 0": lambda: pictures.difference_by_step({"mean": [0.0]}),
    "four": lambda: pictures.difference_by_step(
        {f"{LONG}{k}": [10.0 ** (-k)] * 3 for k in (1, 20, 300, 5)}, title=LONG
    ),
    "learning rates": lambda: pictures.learning_rates(
        {
            "1 rank": [0.1] * 40,
            "4 ranks, scaled": [0.4] * 40,
            "4 ranks, scaled, warm-up": WARM_UP,
        }
    ),
    "one rate": lambda: pictures.learning_rates({LONG: [-1]}, title=LONG),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


drawn = drawing(DRAWN)


@every_picture
def test_texts_labels_and_size(name):
    assert_suits_a_notebook(drawn(name), 5.1)


SUMMARIES = {
    "10 items on 4 ranks": "Which rank gets which item. Rank 0 gets 0, 4, 8; rank 1 "
    "gets 1, 5, 9; rank 2 gets 2, 6, 0; rank 3 gets 3, 7, 1. 10 items, 4 ranks: 3 a "
    "rank. Repeated: 0 and 1.",
    "dropped": "rank 3 gets 3, 7. 10 items, 4 ranks: 2 a rank. Dropped: 8 and 9.",
    "contiguous": "rank 3 gets nothing. 13 items, 4 ranks: 6, 3, 3 and 0. Dropped: 12.",
    "one item": "rank 3 gets 0. 1 item, 4 ranks: 1 a rank. Repeated: 0.",
    "diverges": "sum: loss from 15 to 4000000, test accuracy 10.0 % after 4 epochs. "
    "Largest difference between the runs in one epoch: loss 3999999, test accuracy 78 "
    "percentage points.",
    "becomes nan": "sum: loss from 15 to nan, test accuracy 10.0 % after 4 epochs. "
    "The loss of sum is not finite from epoch 3 on.",
    "always nan": "The loss of sum is not finite from epoch 1 on.",
    "differences": "Difference to one big batch, step by step. equal shards: 0 after "
    "step 1, 3.2e-07 after step 20; uneven shards: 0.001 after step 1, 0.02 after step "
    "20; BatchNorm: 0.02 after step 1, 0.001 after step 20. Never above 1e-06: equal "
    "shards. First above 1e-06 at step 1: uneven shards and BatchNorm.",
    "0 and nan": "mean: 0 after step 1, 0 after step 5; sum: 0.1 after step 1, nan "
    "after step 5. Always 0: mean. First above 1e-06 at step 1: sum.",
    "always 0": "mean: 0 after step 1, 0 after step 1. Always 0: mean.",
    "learning rates": "Learning rate. 1 rank: 0.1 in every step; 4 ranks, scaled: 0.4 "
    "in every step; 4 ranks, scaled, warm-up: 0.1 in step 0, 0.4 from step 10, 0.4 in "
    "step 39.",
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary(name):
    assert SUMMARIES[name] in drawn(name).summary
    assert drawn(name).summary.endswith(".")


# ---------------------------------------------------------------- items and ranks


def rows(picture):
    """The items in each row, top to bottom: {item: (hatch, place from the left)}."""
    found = {}
    for text, box in picture.labels:
        x, y = text.get_position()
        place = (box.get_hatch(), round(x, 3))
        found.setdefault(round(y, 3), {})[int(text.get_text())] = place
    return [found[y] for y in sorted(found, reverse=True)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("10 items on 4 ranks", shares(10, 4, shuffle=False)),
        ("dropped", [*shares(10, 4, shuffle=False, drop_last=True), [8, 9]]),
        ("shuffled", shares(24, 2, shuffle=True)),
        ("contiguous", [[*range(6)], [6, 7, 8], [9, 10, 11], [12]]),
    ],
)
def test_every_item_is_in_the_row_of_its_rank_and_in_its_column(name, expected):
    drawn_rows = rows(drawn(name))
    assert [sorted(row) for row in drawn_rows] == [sorted(row) for row in expected]
    columns = {}
    for row in drawn_rows:
        for item, (_, x) in row.items():
            columns.setdefault(item, set()).add(x)
    assert all(len(xs) == 1 for xs in columns.values())
    places = [min(columns[item]) for item in sorted(columns)]
    assert places == sorted(places)
    for order in expected[: 4 if name != "contiguous" else 3]:
        words = " ".join(words_of(drawn(name))).replace("\n", " ")
        assert ", ".join(map(str, order)) in words or name == "dropped"


def test_the_second_time_an_item_is_given_out_is_hatched():
    first, second, third, fourth = rows(drawn("10 items on 4 ranks"))
    again = {i: row[i][0] for row in (third, fourth) for i in row}
    assert again == {2: None, 6: None, 0: "////", 3: None, 7: None, 1: "////"}
    assert {hatch for row in (first, second) for hatch, _ in row.values()} == {None}
    assert "it is repeated: another rank has it, too" in words_of(
        drawn("10 items on 4 ranks")
    )
    assert "it is repeated: another rank has it, too" not in words_of(drawn("dropped"))


def test_items_that_nobody_gets_are_dashed_and_named():
    picture = drawn("dropped")
    assert "no rank" in words_of(picture)
    assert "dropped: no rank gets it" in words_of(picture)
    dashed = [p for p in picture.axes[0].patches if p.get_linestyle() != "solid"]
    assert len([p for p in dashed if not p.get_fill()]) == 2 + 1  # and the key's


# ---------------------------------------------------------------- curves


def test_a_loss_that_explodes_gets_a_logarithmic_axis():
    loss, accuracy = drawn("diverges").axes[1:]
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    assert "loss (logarithmic axis)" in words_of(drawn("diverges"))
    low, high = loss.get_ylim()
    assert low < 0.6 < 4e6 < high
    usual = pictures.training_curves({"a": run(40), "b": run(40, 0.3)})
    assert usual.axes[1].get_yscale() == "linear"


def crosses(picture):
    return [line for line in picture.axes[0].lines if line.get_marker() == "x"]


def test_a_curve_ends_before_nan_in_a_cross():
    picture = drawn("becomes nan")
    ends = [line.get_xdata()[-1] for line in picture.axes[1].lines]
    assert ends == [4, 4, 2]
    (cross,) = crosses(picture)
    loss = picture.axes[1]
    at = loss.transData.transform((2, 180)) / draw.DPI
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == pytest.approx(tuple(at))
    words = words_of(picture)
    assert words.count("sum: nan") == words.count("sum") == 1  # one a panel


def test_a_loss_that_never_was_finite_is_named():
    picture = drawn("always nan")
    assert crosses(picture) == []
    assert "sum: nan" in words_of(picture)
    assert [len(line.get_xdata()) for line in picture.axes[1].lines] == [4, 0]


def test_only_a_loss_may_be_infinite():
    with pytest.raises(ValueError, match="epoch in row 0 of 'a' is inf"):
        pictures.training_curves({"a": [{**run(1)[0], "epoch": INF}]})
    with pytest.raises(TypeError, match="loss in row 0 of 'a' is 'x'"):
        pictures.training_curves({"a": [{**run(1)[0], "loss": "x"}]})


def ticks(axis):
    """From the label of each tick to its place."""
    labels = [label.get_text() for label in axis.get_yticklabels()]
    return dict(zip(labels, axis.get_yticks(), strict=True))


def test_zero_and_nan_have_places_of_their_own():
    axis = drawn("0 and nan").axes[1]
    mean, total = (line.get_ydata() for line in axis.lines[:2])
    places = ticks(axis)
    assert {*mean} == {places["0"]}
    assert [*total[2:]] == [places["not finite"]] * 3
    assert [*total[:2]] == pytest.approx([-1, math.log10(40)])
    powers = {float(word): y for word, y in places.items() if "1e" in word}
    assert all(y == pytest.approx(math.log10(value)) for value, y in powers.items())
    assert places["0"] < min(powers.values())
    assert places["not finite"] > max(powers.values())
    assert axis.get_ylim()[0] < places["0"]


def test_zero_has_a_place_only_where_there_is_one():
    picture = pictures.difference_by_step({"a": [1e-8, 2e-8]})
    assert {"0", "not finite"}.isdisjoint(ticks(picture.axes[1]))


def test_the_limit_is_drawn_where_it_is():
    (axis,) = drawn("differences").axes[1:]
    dashed = [line for line in axis.lines if line.get_color() == draw.VERMILLION]
    assert [line.get_ydata()[0] for line in dashed] == pytest.approx([-6])
    assert "largest absolute difference (dashed line: 1e-06)" in words_of(
        drawn("differences")
    )


def test_a_run_that_comes_back_was_above_the_limit():
    summary = pictures.difference_by_step({"a": [0, 1, 0], "b": [NAN, 0, 0]}).summary
    assert summary.endswith("First above 1e-06 at step 1: b; at step 2: a.")


def test_learning_rates_are_drawn_as_they_are():
    (axis,) = drawn("learning rates").axes[1:]
    assert [*axis.lines[2].get_xdata()] == [*range(40)]
    assert [*axis.lines[2].get_ydata()] == WARM_UP
    assert axis.get_ylim()[0] == 0


def test_equal_lines_stay_visible():
    """Thick and pale below thin and dark, as in the training curves."""
    same = {str(k): [0.1, 0.2] for k in range(4)}
    lines = pictures.learning_rates(same).axes[1].lines
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(widths, reverse=True)
    assert len({line.get_marker() for line in lines}) == len(training._CURVES) == 4


# ---------------------------------------------------------------- wrong inputs


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: pictures.partition([[0]], 25), "total is 25: at most 24 items can be"),
        (lambda: pictures.partition([[0]], 0), "total is 0: expected a whole number"),
        (
            lambda: pictures.partition([], 3),
            "indices_by_rank is of 0 ranks: expected 1",
        ),
        (lambda: pictures.partition([[]] * 9, 3), "indices_by_rank is of 9 ranks"),
        (
            lambda: pictures.partition([[0], [3]], 3),
            "Rank 1 gets the index 3: expected 0 to 2.",
        ),
        (lambda: pictures.partition([[0.5]], 3), "Rank 0 gets the index 0.5"),
        (lambda: pictures.difference_by_step({}), "runs holds 0 runs: expected 1 to 4"),
        (lambda: pictures.difference_by_step({"a": []}), "A run has no step: give one"),
        (
            lambda: pictures.difference_by_step({"a": [-1e-9]}),
            "A difference of 'a' is -1e-09: expected 0 or more.",
        ),
        (lambda: pictures.learning_rates({"a": []}), "A run has no step: give one"),
        (
            lambda: pictures.learning_rates({str(k): [1] for k in range(5)}),
            "runs holds 5 runs: expected 1 to 4.",
        ),
        (
            lambda: pictures.learning_rates({"a": [NAN]}),
            "a learning rate of 'a' is nan",
        ),
    ],
)
def test_wrong_inputs(draw, message):
    with pytest.raises(ValueError) as caught:
        draw()
    assert str(caught.value).startswith(message)
