"""Pictures: that they can be read, what they say, and how a notebook shows them."""

import base64
import functools
import html
import io
import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_hex, to_rgb
from PIL import Image

from course_utils import pictures
from course_utils.notebook.difference import difference
from course_utils.pictures import Picture, draw, training, words
from course_utils.theory import costs
from tests import pictures_table as table
from tests.pictures_table import DRAWN


@functools.cache
def drawn(name) -> Picture:
    """The picture of a name, drawn once."""
    picture = DRAWN[name]()
    picture.canvas.draw()
    return picture


# ---------------------------------------------------------------- what can be read


def texts_of(picture):
    """All texts that are drawn: tick labels outside their axis are not."""
    found = []
    for axes in picture.axes:
        found += axes.texts
        if axes.axison:
            for axis, at in ((axes.xaxis, 0), (axes.yaxis, 1)):
                low, high = axis.get_view_interval()
                for label in axis.get_ticklabels():
                    if low <= label.get_position()[at] <= high:
                        found.append(label)
    return [text for text in found if text.get_text().strip()]


def words_of(picture):
    return [text.get_text() for text in texts_of(picture)]


def extent(artist):
    return artist.get_window_extent(artist.get_figure().canvas.get_renderer())


def overlap(first, second):
    """Whether two boxes share more than a pixel in both directions."""
    return first.padded(-0.5).fully_overlaps(second.padded(-0.5))


def inside(inner, outer):
    around = outer.padded(0.5)
    return around.contains(*inner.min) and around.contains(*inner.max)


def assert_texts_are_readable(picture):
    places = [(text, extent(text)) for text in texts_of(picture)]
    assert places
    for text, box in places:
        assert text.get_fontsize() >= 9, text
        assert inside(box, picture.bbox), f"{text.get_text()!r} is cut off"
    for (one, first), (two, second) in itertools.combinations(places, 2):
        assert not overlap(first, second), f"{one.get_text()!r} on {two.get_text()!r}"


def assert_labels_fit(picture):
    places = [(text, extent(text), box, extent(box)) for text, box in picture.labels]
    for text, bounds, _, around in places:
        assert inside(bounds, around), f"{text.get_text()!r} does not fit"
    for one, two in itertools.combinations(places, 2):
        (text, bounds, box, _), (*_, later, around) = one, two
        covered = later is not box and overlap(bounds, around)
        assert not covered, f"{text.get_text()!r} is covered"


def luminance(color):
    parts = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in to_rgb(color)
    ]
    return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))


def contrast(one, two):
    dark, light = sorted((luminance(one), luminance(two)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_can_be_read(name):
    """Texts, their contrast to the page or to their boxes, and size in inches."""
    picture = drawn(name)
    assert_texts_are_readable(picture)
    assert_labels_fit(picture)
    behind = {text: box.get_facecolor()[:3] for text, box in picture.labels}
    for text in texts_of(picture):
        ratio = contrast(text.get_color(), behind.get(text, draw.MIST))
        assert ratio >= 4.5, f"{text.get_text()!r}: {ratio:.1f}"
    width, height = picture.get_size_inches()
    assert width <= 8.001 and height <= (12 if name == "64 ranks" else 8.3)


@pytest.mark.parametrize("name", ["16 GPUs, every link", "30 buckets", "close"])
def test_a_file_is_small_crisp_and_described(name):
    picture = drawn(name)
    png = picture.png()
    image = Image.open(io.BytesIO(png))
    # Twice the pixels of its size on the page, so that it is crisp on dense screens.
    assert image.size == tuple(
        int(192 * inches) for inches in picture.get_size_inches()
    )
    assert image.info["Description"] == picture.summary
    assert len(png) < 100_000
    seen = np.asarray(image.convert("RGB")).astype(int)
    exact = np.asarray(picture.canvas.buffer_rgba())[..., :3].astype(int)
    assert np.abs(seen - exact).mean() < 0.2


# ---------------------------------------------------------------- colours


def test_no_meaning_is_in_a_colour_alone():
    for group in (
        ("parameters", "gradients", "optimizer state", "activations", "other"),
        ("forward", "backward", "optimizer", "transfer", "idle"),
        ("compute", "wait", "stuck"),
        ("all-gather", "reduce-scatter"),
        ("guess", "measured"),
    ):
        patterns = []
        for name in group:
            looks = draw.LOOKS[name]
            light = luminance(looks["fill"]) > 0.5
            patterns.append((looks.get("hatch"), looks.get("dashed"), light))
        assert len({*patterns}) == len(group), group
    for curves in (draw.CURVES, training._NESTED):
        assert len({looks["marker"] for looks in curves}) == len(curves)
        assert all(contrast(looks["color"], draw.PAPER) >= 3 for looks in curves)


# ---------------------------------------------------------------- what they say


@pytest.mark.parametrize("name", table.SAID)
def test_summary(name):
    assert table.SAID[name] in drawn(name).summary


@pytest.mark.parametrize("message", table.WRONG)
def test_what_cannot_be_drawn_is_refused(message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        table.WRONG[message]()


@pytest.mark.parametrize(
    ("guess", "measured", "verdict"),
    [(10, 10.05, "within 1 %"), (10, 4, "2.5 times"), (4, 0, "no ratio")],
)
def test_verdict_on_a_guess(guess, measured, verdict):
    summary = pictures.guess_and_measured(guess, measured, "s", "Time").summary
    assert verdict in summary


def test_tensors_of_torch():
    before = [torch.arange(2) + 10.0 * rank for rank in range(2)]
    after = [[tensor.clone().requires_grad_() for tensor in before]] * 2
    summary = pictures.collective(before, after, "all_gather").summary
    assert summary.endswith("After: every rank holds [[0, 1], [10, 11]].")


@pytest.mark.parametrize("one", [table.SLOW, table.MANY])
def test_a_simulated_step_shows_its_own_figures(one):
    summary = pictures.overlap(pictures.step_events(one)).summary
    assert f"computing {words.duration(one.compute + one.waiting)}" in summary
    assert f"communication {words.duration(one.communication)} in " in summary
    assert f"of which {words.duration(one.exposed)} exposed" in summary
    fsdp, summary = table.SIMULATED, drawn("FSDP").summary
    assert f"{words.duration(fsdp.seconds)} in all" in summary
    assert f"{words.duration(fsdp.exposed)} of the" in summary


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
    summary = pictures.overlap({"rank 0": row}).summary
    assert "communication 6 s in 3 all-reduces, of which 4 s exposed (44.4 %" in summary
    before = pictures.overlap({"rank 0": row[1:]})  # the forward pass was not recorded
    assert "of which 4.5 s exposed" in before.summary


# ---------------------------------------------------------------- that it is to scale


def widths(picture, look):
    """The widths in inches of the boxes of one of `draw.LOOKS`, without its sample."""
    looks = draw.LOOKS[look]
    return [
        patch.get_width()
        for patch in picture.axes[0].patches
        if patch.get_fill()
        and to_hex(patch.get_facecolor()).upper() == looks["fill"]
        and (patch.get_hatch() or None) == looks.get("hatch")
        and patch.get_height() > 0.165
    ]


def test_bars_are_as_long_as_their_values():
    picture = pictures.guess_and_measured(1.0, 4.0, "s", "Time")
    (guess,), (measured,) = widths(picture, "guess"), widths(picture, "measured")
    assert measured == pytest.approx(4 * guess)
    torn = drawn("a huge guess")  # 1,000 times as large, and drawn twice as long
    (guess,), (measured,) = widths(torn, "guess"), widths(torn, "measured")
    assert guess == pytest.approx(2 * measured)


def test_bars_that_cannot_be_compared_say_so():
    said = drawn("unfair bars").summary
    assert said == "Work: 1 thread 1.2 s. A note. Not fair."
    fair, unfair = drawn("bars").axes[0].patches, drawn("unfair bars").axes[0].patches
    assert {one.get_hatch() for one in unfair} > {one.get_hatch() for one in fair[:1]}


def test_memory_and_its_limits_are_to_one_scale():
    picture = drawn("stages")
    near, far = (line.get_xdata()[0] for line in picture.axes[0].lines)
    cards = [costs.card(name).nbytes for name in ("RTX 4090", "H100")]
    inch = (far - near) / (cards[1] - cards[0])
    states = [*table.STAGES.values()]
    for what, amounts in (
        ("parameters", [state.parameters for state in states]),
        ("gradients", [state.gradients for state in states]),
        ("optimizer state", [state.optimizer for state in states]),
    ):
        found = widths(picture, what)
        assert found == pytest.approx([amount * inch for amount in amounts])


@pytest.mark.parametrize(
    ("name", "kind", "seconds"),
    [
        ("naive", "backward", [0.1, 0.1]),
        ("naive", "idle", [0.15, 0.05, 0.1]),
        ("schedule", "forward", [1e-3] * 32),
        ("two ranks", "exposed", [0.016, 0.014]),
        ("a skipped all-reduce", "wait", [4.8]),
    ],
)
def test_times_are_to_the_scale_of_their_axis(name, kind, seconds):
    axis = drawn(name).axes[1]
    unit = {"time (ms)": 1e3, "time (s)": 1.0}  # of a time of 1 s
    size = next(unit[text] for text in words_of(drawn(name)) if text in unit)
    (start, _), (stop, _) = axis.transData.transform([(0, 0), (size, 0)])
    found = [width * draw.DPI / (stop - start) for width in widths(drawn(name), kind)]
    assert sorted(found) == pytest.approx(sorted(seconds))


def test_two_timelines_can_have_one_scale():
    steps = table.timeline(table.NAIVE)
    for picture in (
        pictures.timeline(table.SKIPPED, span=10.0),
        pictures.device_timeline(steps, span=10.0),
    ):
        assert picture.axes[1].get_xlim() == (0, 10)


def test_curves_go_through_their_points():
    rows = table.predictions(1.02, 0.97, 1.1, 1)
    times, ratios = drawn("close").axes[1:]
    for line, key in zip(times.lines, ("measured", "predicted"), strict=True):
        assert [*line.get_xdata()] == [row["nbytes"] for row in rows]
        assert [*line.get_ydata()] == [row[key] for row in rows]
    (bands,) = ratios.collections
    for row, band in zip(rows, bands.get_paths(), strict=True):
        expected = row["low"] / row["predicted"], row["high"] / row["predicted"]
        assert tuple(band.vertices[:, 1]) == pytest.approx(expected)
    lines = drawn("micro-batches").axes[1].lines
    (points,) = [line for line in lines if line.get_marker() == "o"]
    found = dict(zip(points.get_xdata(), points.get_ydata(), strict=True))
    assert found == pytest.approx({m: 1e3 * s for m, s in table.TIMES.items()})


def test_zero_and_nan_have_places_of_their_own():
    axis = drawn("0 and nan").axes[1]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    places = dict(zip(labels, axis.get_yticks(), strict=True))
    mean, total = (line.get_ydata() for line in axis.lines[1:3])
    assert {*mean} == {places["0"]} and places["0"] == min(places.values())
    assert [*total[2:]] == [places["not finite"]] * 3
    assert places["not finite"] == max(places.values())


def test_a_loss_that_explodes_gets_a_logarithmic_axis_and_one_that_is_lost_a_cross():
    loss, accuracy = drawn("diverges").axes[1:]
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    (cross,) = [x for x in drawn("becomes nan").axes[1].lines if x.get_marker() == "x"]
    assert cross.get_xydata().tolist() == [[2, 8]]


def test_curves_on_top_of_each_other_are_all_visible():
    picture = drawn("3 equal curves")
    pixels = np.asarray(picture.canvas.buffer_rgba())[..., :3]
    for chart in picture.axes[1:]:
        box = extent(chart.patch)
        top = picture.bbox.height - box.y1
        inside = pixels[
            round(top) : round(top + box.height), round(box.x0) : round(box.x1)
        ]
        for line in chart.lines:
            color = [round(255 * part) for part in to_rgb(line.get_color())]
            seen = (inside == color).all(axis=-1).sum()
            assert seen > 500, f"{line.get_color()}: {seen} pixels"


def test_messages_go_from_their_sender_to_their_receiver():
    picture = drawn("ring on 4")
    lanes = [t for t in texts_of(picture) if t.get_text().startswith("rank ")]
    arrows = [
        patch._posA_posB
        for patch in picture.axes[0].patches
        if getattr(patch, "_posA_posB", None)
    ]
    found = {
        tuple(
            min(lanes, key=lambda lane: abs(lane.get_position()[0] - x)).get_text()[5:]
            for x in (start[0], stop[0])
        )
        for start, stop in arrows
    }
    assert len(arrows) == 24
    assert found == {("0", "1"), ("1", "2"), ("2", "3"), ("3", "0")}


# ---------------------------------------------------------------- how they are shown


def test_jupyter_gets_an_image_with_alternative_text():
    title = 'The "first" <b>lesson</b> & more'
    lesson = SimpleNamespace(number="00", title=title)
    picture = pictures.course_map([lesson])
    shown, metadata = DisplayFormatter().format(picture)
    assert (set(shown), metadata) == ({"text/plain", "text/html"}, {})
    assert shown["text/plain"] == f"Picture: {picture.summary}"
    assert lesson.title in picture.summary
    image = '<img src="data:image/png;base64,(.*)" width="768" alt="([^"<>]*)">'
    source, said = re.fullmatch(image, shown["text/html"]).groups()
    assert html.unescape(said) == picture.summary
    assert base64.b64decode(source) == picture.png()


@pytest.mark.parametrize("name", ["diverges", "a skipped all-reduce"])
def test_the_same_data_give_the_same_picture_in_any_style(name):
    before = dict(matplotlib.rcParams.copy())
    plain = DRAWN[name]().png()
    assert dict(matplotlib.rcParams.copy()) == before
    odd = {"font.size": 30, "font.family": "monospace", "axes.facecolor": "red"}
    odd |= {"axes.grid": True, "hatch.linewidth": 9, "path.sketch": (5, 50, 5)}
    with matplotlib.rc_context(odd):
        assert DRAWN[name]().png() == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_dollar_signs_are_text():
    picture = pictures.guess_and_measured(1, 2, "$ / $hour$", "Cost in $")
    assert "measured 2 $ / $hour$" in picture.summary
    assert not any(text.get_parse_math() for text in texts_of(picture))


def test_import_is_light_and_leaves_the_backend_alone():
    code = """
import sys
import matplotlib
backend = dict.get(matplotlib.rcParams, "backend")
from course_utils import pictures
pictures.ranks_on_cores(4, 2).png()
assert dict.get(matplotlib.rcParams, "backend") is backend
heavy = {"torch", "matplotlib.pyplot", "IPython", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_difference_of_two_functions_has_signs_and_colours():
    def one(x):
        """A docstring."""
        y = x < 1
        return y

    def other(x):
        """Another."""
        y = x < 2
        return y

    shown = difference(one, other)
    assert repr(shown).splitlines() == [
        "-        y = x < 1",
        "+        y = x < 2",
        "         return y",
    ]
    page = shown._repr_html_()
    assert "x &lt; 1" in page and page.count("background") == 2
