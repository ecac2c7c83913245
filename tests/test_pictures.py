"""Pictures: what they say, that their texts fit, and how a notebook shows them."""

import base64
import doctest
import functools
import html.parser
import io
import itertools
import subprocess
import sys
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_rgb
from PIL import Image

from course_utils import pictures
from course_utils.notebook.lessons import LESSONS
from course_utils.pictures import Picture, draw, ranks, training
from course_utils.setup.doctor import Gpu, Link, Machine, inspect_machine

# ---------------------------------------------------------------- data to draw

# A lesson that is added to the course changes neither their size nor their texts.
NINE = [SimpleNamespace(number=x.number, title=x.title) for x in LESSONS[:9]]
ALL = {lesson.number for lesson in NINE}


def computer(cores=2, count=0, link=None, **changes):
    facts = {
        "system": "Linux",
        "release": "Debian GNU/Linux 12 (bookworm)",
        "cpu": "AMD EPYC",
        "cores": cores,
        "all_cores": cores,
        "physical_cores": None,
        "memory": 25_300_000_000,
        "free_memory": 20_000_000_000,
        "gpus": tuple(Gpu(i, "NVIDIA H200", 141 * 2**30) for i in range(count)),
        "links": tuple(
            Link(a, b, link(a, b))
            for a, b in itertools.combinations(range(count), 2)
            if link
        ),
    }
    return Machine(**{**facts, **changes})


def two_sockets(a, b):
    return "NV4" if a // 2 == b // 2 else "PXB" if a // 4 == b // 4 else "SYS"


def run(epochs, worse=0.0):
    return [
        {
            "epoch": epoch,
            "loss": 2.3 / epoch + worse,
            "test_accuracy": 1 - 0.6 / (epoch + 1) - worse / 10,
            "seconds": 1.0,
        }
        for epoch in range(1, epochs + 1)
    ]


SKIPPED = [
    [(0.0, 0.2, "forward", "compute"), (0.2, 5.0, "all_reduce", "wait")],
    [(0.0, 0.3, "forward", "compute"), (0.3, 5.0, "all_reduce", "wait")],
    [(0.0, 0.4, "forward", "compute")],
]
LONG = "a name that is much longer than all the room there is for it in any picture "
DRAWN = {
    "map": lambda: pictures.course_map(LESSONS),
    "map of a learner": lambda: pictures.course_map(NINE, {"00"}, "01"),
    "map, all done": lambda: pictures.course_map(NINE, ALL, "08"),
    "map, 14 lessons": lambda: pictures.course_map(
        [SimpleNamespace(number=f"{n:02}", title=LONG) for n in range(14)],
        here="03",
    ),
    "this machine": lambda: pictures.machine(inspect_machine()),
    "1 core": lambda: pictures.machine(computer(1, memory=900_000_000)),
    "8 cores, 1 GPU": lambda: pictures.machine(
        computer(8, 1, physical_cores=4, cpu=LONG)
    ),
    "64 of 128 cores, 8 GPUs": lambda: pictures.machine(
        computer(64, 8, lambda a, b: "NV18", all_cores=128)
    ),
    "128 cores, 8 GPUs in islands": lambda: pictures.machine(
        computer(128, 8, two_sockets, memory=2 * 10**12)
    ),
    "2 GPUs without links": lambda: pictures.machine(computer(12, 2)),
    "16 GPUs, every kind of link": lambda: pictures.machine(
        computer(
            7,
            16,
            lambda a, b: ["NV1", "NV2", "PIX", "PXB", "PHB", "SYS", "XGMI"][
                (3 * a + b) % 7
            ],
        )
    ),
    "two kinds of GPU": lambda: pictures.machine(
        computer(4, gpus=(Gpu(0, LONG, 0), Gpu(1, "RTX 4090", 24 * 2**30)))
    ),
    "a broken driver": lambda: pictures.machine(computer(gpu_problem=LONG)),
    "1 rank": lambda: pictures.ranks_on_cores(1, 1),
    "2 ranks": lambda: pictures.ranks_on_cores(2, 8),
    "4 ranks": lambda: pictures.ranks_on_cores(4, 2),
    "8 ranks": lambda: pictures.ranks_on_cores(8, 12),
    "1024 ranks": lambda: pictures.ranks_on_cores(1024, 2048),
    "all_reduce": lambda: pictures.collective(
        [[r, 10 + r] for r in range(4)], [[6, 46]] * 4, "all_reduce"
    ),
    "all_gather on 8": lambda: pictures.collective(
        [[r] for r in range(8)], [[[r] for r in range(8)]] * 8, "all_gather"
    ),
    "scatter": lambda: pictures.collective(
        [[[10], [20], [30]], None, None], [[10], [20], [30]], "scatter"
    ),
    "all_to_all": lambda: pictures.collective(
        [[[10 * r + q] for q in range(3)] for r in range(3)],
        [[[10 * q + r] for q in range(3)] for r in range(3)],
        "all_to_all",
    ),
    "large tensors": lambda: pictures.collective(
        [[r + i / 7 for i in range(30)] for r in range(12)],
        [[-1234567.891 * i for i in range(30)]] * 12,
        "reduce_scatter_tensor",
    ),
    "empty tensors": lambda: pictures.collective([[], 5], [[[], []], None], "x" * 80),
    "large integers": lambda: pictures.collective([10**15], [-(10**18)], "broadcast"),
    "a skipped all-reduce": lambda: pictures.timeline(SKIPPED, title="Rank 2 is gone"),
    "16 rows": lambda: pictures.timeline([SKIPPED[0]] * 16),
    "one moment": lambda: pictures.timeline([[(3, 3, LONG, "wait")], []], title=LONG),
    "3 equal curves": lambda: pictures.training_curves(
        {"1 rank": run(8), "2 ranks": run(8), "4 ranks": run(8)}
    ),
    "4 curves": lambda: pictures.training_curves(
        {LONG: run(40), "b": run(40, 0.3), "c": run(30), "d": run(40, 0.31)}
    ),
    "1 epoch": lambda: pictures.training_curves({"2 ranks": run(1)}),
    "a guess": lambda: pictures.guess_and_measured(2.0, 3.0, "s", "A first cell"),
    "no guess": lambda: pictures.guess_and_measured(None, 0.0123456, "s", "A cell"),
    "a far guess": lambda: pictures.guess_and_measured(1, 123456789, LONG, LONG),
    "below 0": lambda: pictures.guess_and_measured(-5, 3.0, "s", "A first cell"),
    "nothing measured": lambda: pictures.guess_and_measured(0, 0, "", "Messages"),
}
every_picture = pytest.mark.parametrize("name", DRAWN)


def drawing(makers):
    """A function that draws the picture of a name, once."""

    @functools.cache
    def drawn(name) -> Picture:
        picture = makers[name]()
        picture.canvas.draw()
        return picture

    return drawn


drawn = drawing(DRAWN)


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


def overlap(first, second, slack=1.0):
    """Whether two boxes share more than `slack` pixels in both directions."""
    across = min(first.x1, second.x1) - max(first.x0, second.x0)
    up = min(first.y1, second.y1) - max(first.y0, second.y0)
    return across > slack and up > slack


def inside(inner, outer, slack=0.5):
    return (
        inner.x0 >= outer.x0 - slack
        and inner.x1 <= outer.x1 + slack
        and inner.y0 >= outer.y0 - slack
        and inner.y1 <= outer.y1 + slack
    )


def assert_texts_are_readable(picture):
    texts = texts_of(picture)
    assert texts
    boxes = [extent(text) for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert text.get_fontsize() >= 9, text
        assert inside(box, picture.bbox), f"{text.get_text()!r} is cut off"
    for (one, first), (two, second) in itertools.combinations(
        zip(texts, boxes, strict=True), 2
    ):
        assert not overlap(first, second), f"{one.get_text()!r} on {two.get_text()!r}"


def assert_labels_fit(picture):
    places = [(text, extent(text), box, extent(box)) for text, box in picture.labels]
    for text, words, _, around in places:
        assert inside(words, around), f"{text.get_text()!r} does not fit"
    for (text, words, box, _), (*_, later, around) in itertools.combinations(places, 2):
        covered = later is not box and overlap(words, around)
        assert not covered, f"{text.get_text()!r} is covered"


@every_picture
def test_texts_are_readable(name):
    assert_texts_are_readable(drawn(name))


@every_picture
def test_labels_fit_their_boxes(name):
    assert_labels_fit(drawn(name))


@every_picture
def test_size_suits_a_notebook(name):
    width, height = drawn(name).get_size_inches()
    assert width <= 8.001
    # The map of the course itself grows with it.
    higher = {"16 GPUs, every kind of link": 5.1, "map": 5.6, "map, 14 lessons": 5.6}
    assert height <= higher.get(name, 4.85)


@pytest.mark.parametrize("words", [LONG, "oneverylongwordwithoutspaces", "a\n" + LONG])
def test_a_label_is_made_to_fit_its_box(words):
    picture, board = draw.board(3.0, "Title")
    for step in range(1, 12):
        size = {"width": 0.35 + step / 7, "height": 0.36 + step / 30}
        draw.box(board, 0.3, 0.3, label=words, **size)
    picture.canvas.draw()
    assert len(picture.labels) == 11
    for text, box in picture.labels:
        assert inside(extent(text), extent(box)), text
        assert text.get_text().startswith(words[0])


def test_the_checks_above_notice_faults():
    picture, board = draw.board(2.0, "Title")
    texts = [draw.write(board, x, 1.0, "some words") for x in (1.0, 1.3, 7.8)]
    draw.box(board, 3, 0.2, 1.0, 0.3)
    picture.canvas.draw()
    assert [text.get_text() for text in texts_of(picture)].count("some words") == 3
    assert overlap(extent(texts[0]), extent(texts[1]))
    assert not inside(extent(texts[2]), picture.bbox)


def test_all_drawn_texts_are_checked(monkeypatch):
    lines = []
    renderer = type(drawn("4 curves").canvas.get_renderer())
    draw_text = renderer.draw_text

    def record(self, gc, x, y, words, *args, **kwargs):
        lines.append(words)
        draw_text(self, gc, x, y, words, *args, **kwargs)

    monkeypatch.setattr(renderer, "draw_text", record)
    picture = DRAWN["4 curves"]()
    picture.canvas.draw()
    checked = [text.get_text().split("\n") for text in texts_of(picture)]
    assert sorted(lines) == sorted(itertools.chain(*checked))


# ---------------------------------------------------------------- colours


def luminance(color):
    parts = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in to_rgb(color)
    ]
    return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))


def contrast(one, two):
    dark, light = sorted((luminance(one), luminance(two)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_wcag_says():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)


def assert_labels_stand_out(picture):
    for text, box in picture.labels:
        ratio = contrast(text.get_color(), box.get_facecolor()[:3])
        assert ratio >= 4.5, f"{text.get_text()!r}: {ratio:.1f}"


def assert_suits_a_notebook(picture, highest):
    """Texts, their contrast to the page and to their boxes, and size in inches."""
    assert_texts_are_readable(picture)
    assert_labels_fit(picture)
    assert_labels_stand_out(picture)
    for text in texts_of(picture):
        assert contrast(text.get_color(), (1, 1, 1)) >= 4.5
    width, height = picture.get_size_inches()
    assert width <= 8.001
    assert height <= highest


@every_picture
def test_labels_stand_out_from_their_boxes(name):
    assert_labels_stand_out(drawn(name))


def test_palette():
    okabe_ito = {
        "ORANGE": "#E69F00",
        "SKY": "#56B4E9",
        "GREEN": "#009E73",
        "YELLOW": "#F0E442",
        "BLUE": "#0072B2",
        "VERMILLION": "#D55E00",
        "PURPLE": "#CC79A7",
    }
    assert {name: getattr(draw, name) for name in okabe_ito} == okabe_ito
    for words in (draw.INK, draw.QUIET):
        for ground in (
            draw.PAPER,
            draw.MIST,
            draw.tint(draw.SKY, 0.16),
        ):
            assert contrast(words, ground) >= 4.5
    for mark in (draw.INK, draw.LINE, draw.BLUE):
        assert contrast(mark, draw.PAPER) >= 3


def test_no_meaning_is_in_a_colour_alone():
    patterns = [
        (looks.get("hatch"), looks.get("dashed")) for looks in ranks._KINDS.values()
    ]
    assert len(set(patterns)) == len(ranks._KINDS) == 3
    curves = training._CURVES
    assert len({looks["marker"] for looks in curves}) == len(curves) == 4
    widths = [looks["linewidth"] for looks in curves]
    assert widths == sorted(widths, reverse=True)
    for below, above in itertools.pairwise(curves):
        assert contrast(below["color"], draw.PAPER) >= 3
        assert luminance(above["color"]) < luminance(below["color"])


# ---------------------------------------------------------------- what they say

COURSE = (
    "The course: 9 lessons. First steps: 00 Start here, 01 GPUs, nodes and ranks. "
    "Virtual GPUs: 02 Model parallel, 03 Data-parallel primitives. "
    "Real processes: 04 Processes and collectives, 05 Distributed SGD by hand, "
    "06 DDP, 07 Ring all-reduce, 08 FSDP. "
)
NEXT_TO_EACH_OTHER = "Virtual: cuda:0, cuda:1, cuda:2 and cuda:3."
SAID = {
    "map of a learner": COURSE + "Done: 00; you are here: 01 GPUs, nodes and ranks.",
    "map, all done": COURSE
    + "Done: 00, 01, 02, 03, 04, 05, 06, 07 and 08; you are here: 08 FSDP.",
    "1 core": "Your machine: 1 CPU core, AMD EPYC, 0.9 GB of memory, no GPU. "
    + NEXT_TO_EACH_OTHER,
    "8 cores, 1 GPU": f"Your machine: 8 CPU cores (4 physical), {LONG}, 25.3 GB of "
    "memory, 1 GPU (NVIDIA H200, 141 GiB). Virtual: cuda:1, cuda:2 and cuda:3.",
    "64 of 128 cores, 8 GPUs": "Your machine: 64 CPU cores, of 128 in the machine, "
    "AMD EPYC, 25.3 GB of memory, 8 GPUs (NVIDIA H200, 141 GiB each). "
    "GPUs are connected by NVLink (18 links). Virtual: nothing.",
    "128 cores, 8 GPUs in islands": "Your machine: 128 CPU cores, AMD EPYC, 2,000 GB "
    "of memory, 8 GPUs (NVIDIA H200, 141 GiB each). GPUs are connected by NVLink (4 "
    "links); PCIe, through several switches; PCIe, and from one CPU to another. "
    "Virtual: nothing.",
    "16 GPUs, every kind of link": "Your machine: 7 CPU cores, AMD EPYC, 25.3 GB of "
    "memory, 16 GPUs (NVIDIA H200, 141 GiB each). GPUs are connected by NVLink (1 to "
    "2 links), not every pair; PCIe, through one switch, not every pair; PCIe, and "
    "from one CPU to another or XGMI. Virtual: nothing.",
    "two kinds of GPU": f"Your machine: 4 CPU cores, AMD EPYC, 25.3 GB of memory, "
    f"2 GPUs (1 x {LONG}; 1 x RTX 4090, 24 GiB). Virtual: cuda:2 and cuda:3.",
    "a broken driver": "Your machine: 2 CPU cores, AMD EPYC, 25.3 GB of memory, "
    "no GPU that works. " + NEXT_TO_EACH_OTHER,
    "1 rank": "The notebook kernel sends your cell to 1 process: rank 0, which has "
    "nobody to talk to. One core is enough for one rank.",
    "2 ranks": "The notebook kernel sends your cell to 2 processes: ranks 0 and 1, "
    "which talk to each other by gloo over loopback. "
    "8 cores for 2 ranks: all ranks can run at once.",
    "8 ranks": "The notebook kernel sends your cell to 8 processes: ranks 0 to 7, "
    "which talk to each other by gloo over loopback. "
    "12 cores for 8 ranks: all ranks can run at once.",
    "4 ranks": "The notebook kernel sends your cell to 4 processes: ranks 0 to 3, "
    "which talk to each other by gloo over loopback. "
    "4 ranks take turns on 2 cores: slower, but with the same results.",
    "all_reduce": "all_reduce on 4 ranks. Before: rank 0 holds [0, 10], "
    "rank 1 holds [1, 11], rank 2 holds [2, 12], rank 3 holds [3, 13]. "
    "After: every rank holds [6, 46].",
    "scatter": "scatter on 3 ranks. Before: rank 0 holds [[10], [20], [30]], "
    "rank 1 holds nothing, rank 2 holds nothing. "
    "After: rank 0 holds [10], rank 1 holds [20], rank 2 holds [30].",
    "large integers": "broadcast on 1 rank. Before: rank 0 holds [1e+15]. "
    "After: rank 0 holds [-1e+18].",
    "a skipped all-reduce": "Rank 2 is gone. 3 ranks over 5 s. Times in s: "
    "rank 0: compute 0.2, wait 4.8; rank 1: compute 0.3, wait 4.7; "
    "rank 2: compute 0.4.",
    "16 rows": "Who waits for whom. 16 ranks over 5 s. Times in s: "
    + "; ".join(f"rank {rank}: compute 0.2, wait 4.8" for rank in range(16))
    + ".",
    "one moment": f"{LONG}. 2 ranks over 0 s. Times in s: "
    "rank 0: wait 0; rank 1: nothing.",
    "3 equal curves": "1 rank: loss from 2.3 to 0.287, test accuracy 93.3 % after "
    "8 epochs; 2 ranks: loss from 2.3 to 0.287, test accuracy 93.3 % after 8 epochs; "
    "4 ranks: loss from 2.3 to 0.287, test accuracy 93.3 % after 8 epochs. "
    "The runs are equal in every epoch.",
    "1 epoch": "2 ranks: loss from 2.3 to 2.3, test accuracy 70.0 % after 1 epoch.",
    "a guess": "A first cell: guess 2 s, measured 3 s. "
    "The measured value is 1.5 times the guess.",
    "no guess": "A cell: measured 0.0123 s. "
    "No guess yet: answer the question above, then run this cell again.",
    "a far guess": f"{LONG}: guess 1 {LONG.strip()}, measured 123,456,789 "
    f"{LONG.strip()}. The measured value is 123,456,789 times the guess.",
    "nothing measured": "Messages: guess 0, measured 0. "
    "The guess is exactly the measured value.",
}


@pytest.mark.parametrize("name", SAID)
def test_summary(name):
    assert str(drawn(name)) == drawn(name).summary == SAID[name]


@every_picture
def test_every_picture_has_a_summary(name):
    picture = drawn(name)
    assert picture.summary.endswith(".")
    assert repr(picture) == f"Picture: {picture.summary}"


def test_lessons_without_a_notebook_are_to_come():
    there = [SimpleNamespace(number="00", title="Start here", exists=True)]
    coming = [SimpleNamespace(number="01", title="More", exists=False)]
    picture = pictures.course_map(there + coming)
    assert picture.summary.endswith("Done: none; to come: 01.")
    assert [text.get_text() for text in texts_of(picture)].count("to come") == 1


@pytest.mark.parametrize(
    ("guess", "measured", "verdict"),
    [
        (10, 10, "The guess is exactly the measured value."),
        (10, 10.05, "The guess is within 1 % of the measured value."),
        (10, 4, "The guess is 2.5 times the measured value."),
        (0, 4, "One of the two is 0, so there is no ratio."),
        (4, 0, "One of the two is 0, so there is no ratio."),
        (-5, 4, "The guess is below 0, and the measured value is not."),
        (-5, 0, "The guess is below 0, and the measured value is not."),
    ],
)
def test_verdict(guess, measured, verdict):
    summary = pictures.guess_and_measured(guess, measured, "s", "Time").summary
    assert summary.endswith(verdict)


def test_bars_are_as_long_as_the_values():
    picture = pictures.guess_and_measured(1.0, 4.0, "s", "Time")
    guess, measured = (
        box.get_width() for box in picture.axes[0].patches if not box.get_fill()
    )
    assert measured == pytest.approx(4 * guess)


def test_runs_that_differ():
    summary = pictures.training_curves({"a": run(3), "b": run(3, 0.25)}).summary
    assert summary.endswith(
        "Largest difference between the runs in one epoch: loss 0.25, test accuracy "
        "2.5 percentage points."
    )
    assert drawn("4 curves").summary.endswith("The runs are not of the same epochs.")


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


def bars(picture):
    return [box for box in picture.axes[0].patches if not box.get_fill()]


def test_timeline_is_to_scale():
    compute, wait = bars(pictures.timeline([[*SKIPPED[1]]]))[:2]
    assert wait.get_width() / compute.get_width() == pytest.approx(4.7 / 0.3)
    assert wait.get_x() == pytest.approx(compute.get_x() + compute.get_width())
    assert wait.get_y() == compute.get_y()


# ---------------------------------------------------------------- collectives


def fills(picture):
    """The labels of all cells with their colours, in the order of drawing."""
    return [
        (text.get_text(), matplotlib.colors.to_hex(box.get_facecolor(), False))
        for text, box in picture.labels
    ]


def test_values_keep_the_colour_of_the_rank_they_came_from():
    cells = fills(drawn("all_to_all"))
    assert len(cells) == 18
    colors = {}
    for text, color in cells:
        colors.setdefault(text, set()).add(color)
    assert all(len(seen) == 1 for seen in colors.values())
    assert len(set.union(*colors.values())) == 3


@pytest.mark.parametrize("name", ["all_reduce", "all-reduce", "all_reduce MAX"])
def test_computed_values_are_hatched(name):
    picture = pictures.collective([[1], [3]], [[3], [3]], name)
    hatches = [box.get_hatch() for text, box in picture.labels]
    assert hatches == [None, "////", None, "////"]
    assert "computed from several ranks" in [t.get_text() for t in texts_of(picture)]


def test_reduce_hatches_only_the_rank_that_has_the_result():
    picture = pictures.collective([[1], [3]], [[4], [3]], "reduce")
    assert [box.get_hatch() for _, box in picture.labels] == [None, "////", None, None]


def test_a_value_that_several_ranks_held_is_nobodys():
    picture = pictures.collective([[1], [1]], [[[1], [1]]] * 2, "all_gather")
    (_, own), *after = fills(picture)[:3]
    assert {color for _, color in after} == {"#ffffff"} != {own}
    words = [text.get_text() for text in texts_of(picture)]
    assert "held by several ranks before" in words


def test_tensors_of_torch():
    import torch

    before = [torch.arange(2) + 10.0 * rank for rank in range(2)]
    after = [[tensor.clone().requires_grad_() for tensor in before]] * 2
    assert pictures.collective(before, after, "all_gather").summary == (
        "all_gather on 2 ranks. Before: rank 0 holds [0, 1], rank 1 holds [10, 11]. "
        "After: every rank holds [[0, 1], [10, 11]]."
    )
    scalars = [torch.tensor(-0.0), torch.tensor(True)]
    assert pictures.collective(scalars, [[scalars[0]], None], "x").summary == (
        "x on 2 ranks. Before: rank 0 holds [0], rank 1 holds [True]. "
        "After: rank 0 holds [0], rank 1 holds nothing."
    )


# ---------------------------------------------------------------- wrong inputs


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (
            lambda: pictures.course_map(NINE, {"09", "00"}, "xx"),
            ValueError,
            "There is no lesson '09' and 'xx' on the map. The lessons are 00, 01, 02, "
            "03, 04, 05, 06, 07, 08.",
        ),
        (
            lambda: pictures.ranks_on_cores(0, 1),
            ValueError,
            "world_size is 0: expected a whole number from 1 up.",
        ),
        (
            lambda: pictures.ranks_on_cores(4, 2.0),
            ValueError,
            "cores is 2.0: expected a whole number from 1 up.",
        ),
        (
            lambda: pictures.collective([1, 2], [3], "all_reduce"),
            ValueError,
            "before is of 2 ranks, after of 1 rank: give one entry a rank to both.",
        ),
        (
            lambda: pictures.collective([], [], "all_reduce"),
            ValueError,
            "before is of 0 ranks, after of 0 ranks: give one entry a rank to both.",
        ),
        (
            lambda: pictures.collective([1, "two"], [1, 2], "all_reduce"),
            ValueError,
            "before[1] is 'two': expected None, a number, a 1-D tensor, or a list of "
            "1-D tensors.",
        ),
        (
            lambda: pictures.collective([1], [[[[1]]]], "all_reduce"),
            ValueError,
            "after[0] is [[[1]]]: expected None, a number, a 1-D tensor, or a list of "
            "1-D tensors.",
        ),
        (
            lambda: pictures.timeline([[], []]),
            ValueError,
            "There is nothing to draw: no rank has an interval.",
        ),
        (
            lambda: pictures.timeline([[(0, 1)]]),
            ValueError,
            "An interval of rank 0 is (0, 1): expected (start, stop, label, kind).",
        ),
        (
            lambda: pictures.timeline([[], [(0, 1, "x", "sleep")]]),
            ValueError,
            "The kind 'sleep' of rank 1 is unknown: use 'compute', 'wait' and 'stuck'.",
        ),
        (
            lambda: pictures.timeline([[(2, 1, "x", "wait")]]),
            ValueError,
            "'x' on rank 0 ends at 1, before it starts at 2.",
        ),
        (
            lambda: pictures.timeline([SKIPPED[0]] * 17),
            ValueError,
            "17 ranks are too many for one picture: pass at most 16.",
        ),
        (
            lambda: pictures.training_curves({}),
            ValueError,
            "runs holds 0 runs: expected 1 to 4.",
        ),
        (
            lambda: pictures.training_curves({"a": []}),
            ValueError,
            "The run 'a' has no metrics.",
        ),
        (
            lambda: pictures.training_curves({"a": [{"epoch": 1, "loss": 2}]}),
            ValueError,
            "Row 0 of the run 'a' has no 'test_accuracy': it has 'epoch' and 'loss'.",
        ),
        (
            lambda: pictures.training_curves(
                {"a": [run(1)[0] | {"test_accuracy": np.nan}]}
            ),
            ValueError,
            "test_accuracy in row 0 of 'a' is nan: only a finite number can be drawn.",
        ),
        (
            lambda: pictures.training_curves(
                {"a": [run(1)[0] | {"test_accuracy": 97}]}
            ),
            ValueError,
            "test_accuracy in row 0 of 'a' is 97: expected a share from 0 to 1.",
        ),
        (
            lambda: pictures.guess_and_measured(1, -1, "s", "Time"),
            ValueError,
            "measured is -1: expected 0 or more.",
        ),
        (
            lambda: pictures.guess_and_measured("2 s", 1, "s", "Time"),
            TypeError,
            "guess is '2 s': expected a number.",
        ),
        (
            lambda: pictures.guess_and_measured(1, float("inf"), "s", "Time"),
            ValueError,
            "measured is inf: only a finite number can be drawn.",
        ),
    ],
)
def test_wrong_inputs(draw, error, message):
    with pytest.raises(error) as caught:
        draw()
    assert str(caught.value) == message


# ---------------------------------------------------------------- how they are shown


class Images(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_jupyter_gets_an_image_with_alternative_text():
    lesson = SimpleNamespace(number="00", title='The "first" <b>lesson</b> & more')
    picture = pictures.course_map([lesson])
    shown, metadata = DisplayFormatter().format(picture)
    assert set(shown) == {"text/plain", "text/html"}
    assert metadata == {}
    assert shown["text/plain"] == f"Picture: {picture.summary}"
    assert lesson.title in picture.summary
    ((tag, image),) = Images(shown["text/html"]).found
    assert tag == "img"
    assert image["alt"] == picture.summary
    assert image["width"] == "768"
    kind, _, source = image["src"].partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(source) == picture.png()


@every_picture
def test_png(name):
    picture = drawn(name)
    png = picture.png()
    image = Image.open(io.BytesIO(png))
    width, height = picture.get_size_inches()
    # Twice the pixels of its size on the page, so that it is crisp on dense screens.
    assert image.size == (int(192 * width), int(192 * height))
    assert image.info["Description"] == picture.summary
    assert len(png) < 70_000
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    seen = np.asarray(image.convert("RGB")).astype(int)
    exact = np.asarray(picture.canvas.buffer_rgba())[..., :3].astype(int)
    assert np.abs(seen - exact).mean() < 0.2


@pytest.mark.parametrize(
    "name", ["map of a learner", "4 curves", "a skipped all-reduce"]
)
def test_the_same_data_give_the_same_picture_in_any_style(name):
    before = dict(matplotlib.rcParams.copy())
    plain = DRAWN[name]().png()
    assert dict(matplotlib.rcParams.copy()) == before
    odd = {
        "font.size": 30,
        "font.family": "monospace",
        "figure.facecolor": "black",
        "axes.facecolor": "red",
        "axes.grid": True,
        "hatch.linewidth": 9,
        "lines.linewidth": 9,
        "text.color": "white",
        "xtick.direction": "in",
        "path.sketch": (5, 50, 5),
    }
    with matplotlib.rc_context(odd):
        assert DRAWN[name]().png() == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_dollar_signs_are_text():
    picture = pictures.guess_and_measured(1, 2, "$ / $hour$", "Cost in $")
    assert "measured 2 $ / $hour$" in picture.summary
    assert not any(text.get_parse_math() for text in texts_of(picture))


def test_savefig_writes_a_file(tmp_path):
    for name in ("picture.png", "picture.svg", "picture.pdf"):
        drawn("a guess").savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert len(drawn("a guess").png()) > 1000


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


def test_docstring():
    assert doctest.testmod(pictures) == (0, 3)
