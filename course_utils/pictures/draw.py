"""The drawing board: colours, texts that fit, boxes, arrows, keys, axes."""

import base64
import functools
import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
INK = "#1B1B1B"
QUIET = "#595959"
LINE = "#8A8A8A"
MIST = "#F2F4F5"
PAPER = "#FFFFFF"

WIDTH = 8.0
MARGIN = 0.3
GAP = 0.07
_NARROW = 0.07
SMALL, NORMAL, LARGE = 9.0, 10.0, 13.0
# Browsers take 96 pixels for an inch; twice as many stay crisp on dense screens.
CSS_DPI = 96
DPI = 2 * CSS_DPI

# The library's defaults first: a learner's own style must not change our pictures.
_STYLE = [
    "default",
    {
        "font.family": "DejaVu Sans",
        "font.size": NORMAL,
        "text.color": INK,
        "text.parse_math": False,
        "axes.edgecolor": LINE,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.unicode_minus": False,
        "xtick.color": LINE,
        "ytick.color": LINE,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "hatch.linewidth": 0.7,
    },
]


def tint(color: str, share: float = 0.35) -> str:
    """`color` thinned with white: a fill on which dark text is easy to read."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02X}" for part in parts)


# Many pictures show the same things: one look for each, in all lessons.
_COMPUTING = {
    "forward": {"fill": tint(BLUE, 0.35)},
    "forward (second stage)": {"fill": tint(BLUE, 0.65)},
    "backward": {"fill": tint(GREEN, 0.3), "hatch": "////"},
    "backward (second stage)": {"fill": tint(GREEN, 0.7), "hatch": "////"},
    "optimizer": {"fill": tint(PURPLE, 0.45), "hatch": "...."},
    # The two halves of a backward.
    "gradient of the input": {"fill": tint(GREEN, 0.3), "hatch": "////"},
    "gradient of the weights": {"fill": tint(PURPLE, 0.45), "hatch": "...."},
}
LOOKS: dict[str, dict[str, Any]] = {
    # What fills memory, in the order in which it comes into being.
    "parameters": {"fill": tint(BLUE, 0.35)},
    "gradients": {"fill": tint(GREEN, 0.3), "hatch": "////"},
    "optimizer state": {"fill": tint(PURPLE, 0.4), "hatch": "xxxx"},
    "activations": {"fill": tint(ORANGE, 0.4), "hatch": "\\\\\\\\"},
    "other": {"fill": MIST, "hatch": "...."},
    # What goes on. Computing is as in memory, communication orange.
    **_COMPUTING,
    "transfer": {"fill": tint(ORANGE, 0.8)},
    "communicate": {"fill": tint(ORANGE, 0.5)},
    "all-gather": {"fill": tint(ORANGE, 0.5)},
    "reduce-scatter": {"fill": tint(ORANGE, 0.45), "hatch": "xxxx"},
    "exposed": {"fill": tint(VERMILLION, 0.35), "hatch": "xxxx", "hatched": VERMILLION},
    "compute": {"fill": tint(BLUE, 0.35)},
    "wait": {"fill": tint(VERMILLION, 0.1), "hatch": "....", "hatched": VERMILLION},
    "stuck": {
        **{"fill": tint(VERMILLION, 0.2), "hatch": "xxxx", "hatched": VERMILLION},
        "line": 2.0,
    },
    "idle": {"fill": PAPER, "edge": LINE, "dashed": True, "color": QUIET},
    "whole": {"fill": tint(SKY, 0.4), "hatch": "----"},
    # What is not there in hardware.
    "virtual": {"fill": tint(SKY, 0.16), "edge": BLUE, "dashed": True},
    # A number that a learner has guessed, and what is compared with it.
    "guess": {"fill": tint(YELLOW, 0.6), "hatch": "////"},
    "measured": {"fill": tint(BLUE, 0.6)},
}
COMPUTING = tuple(_COMPUTING)
# The limit that something should stay below.
LIMIT = {"color": VERMILLION, "lw": 1.6, "ls": (0, (4, 2))}
# One curve after the other.
CURVES: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "marker": "o", "ls": "-"},
    {"color": VERMILLION, "marker": "s", "ls": (0, (5, 2))},
    {"color": GREEN, "marker": "^", "ls": (0, (1, 1.5))},
    {"color": PURPLE, "marker": "D", "ls": (0, (5, 1.5, 1, 1.5))},
    {"color": INK, "marker": "v", "ls": (0, (8, 3))},
    {"color": QUIET, "marker": "P", "ls": (0, (3, 1, 1, 1, 1, 1))},
)
RANK_COLORS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION, LINE)


def rank_looks(rank: int) -> dict[str, Any]:
    """The looks of a box that belongs to a rank."""
    return {"fill": tint(RANK_COLORS[rank % len(RANK_COLORS)], 0.5)}


class Picture(Figure):
    """A matplotlib Figure that describes itself in words.

    `str(picture)` is the summary. Jupyter shows the image with the summary as its
    alternative text, and keeps the summary as the plain text of the output.

    Attributes:
        summary: One to three sentences with the numbers drawn.
        labels: Each text that belongs in a box, with its box.
    """

    summary: str
    labels: list[tuple[Text, FancyBboxPatch]]

    def __init__(self, height: float, width: float = WIDTH) -> None:
        super().__init__(figsize=(width, height), dpi=DPI, facecolor=PAPER)
        FigureCanvasAgg(self)
        self.summary = ""
        self.labels = []

    def draw(self, renderer: Any) -> None:
        """Draw in the course's style: some settings are read only at this moment."""
        with matplotlib.style.context(_STYLE):
            super().draw(renderer)

    def png(self) -> bytes:
        """The picture as a PNG file, with the summary as its description."""
        self.canvas.draw()
        image = Image.fromarray(np.asarray(self.canvas.buffer_rgba())).convert("RGB")
        # 256 colours are all that a drawing needs, for a third of the bytes.
        image = image.quantize(256, dither=Image.Dither.NONE)
        description = PngInfo()
        description.add_itxt("Description", self.summary)
        buffer = io.BytesIO()
        image.save(buffer, "PNG", optimize=True, dpi=(DPI, DPI), pnginfo=description)
        return buffer.getvalue()

    def __str__(self) -> str:
        return self.summary

    def __repr__(self) -> str:
        return f"Picture: {self.summary}"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        # JupyterLab gives an image/png no alternative text, whatever its metadata
        # say. HTML is the form in which a screen reader gets it.
        source = base64.b64encode(self.png()).decode("ascii")
        width = round(self.get_figwidth() * CSS_DPI)
        image = (
            f'<img src="data:image/png;base64,{source}" width="{width}" '
            f'alt="{html.escape(self.summary)}">'
        )
        return {"text/html": image, "text/plain": repr(self)}


def picture(drawing: Callable[..., Picture]) -> Callable[..., Picture]:
    """Make a drawing function draw in the course's style, whatever is set outside."""

    @functools.wraps(drawing)
    def drawn(*args: Any, **kwargs: Any) -> Picture:
        with matplotlib.style.context(_STYLE):
            return drawing(*args, **kwargs)

    return drawn


# --- texts that fit ------------------------------------------------------------


@functools.cache
def width_of(text: str, size: float, weight: str = "normal") -> float:
    """The width of a text, in inches."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return _ruler().get_text_width_height_descent(text, font, False)[0] / DPI


@functools.cache
def _ruler() -> RendererAgg:
    return RendererAgg(1, 1, DPI)


def cut(text: str, width: float, size: float, weight: str = "normal") -> str:
    """`text`, shortened with "…" to at most `width`."""
    text = " ".join(text.split())
    if width_of(text, size, weight) <= width:
        return text
    while text and width_of(text.rstrip() + "…", size, weight) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(
    text: str, width: float, size: float, lines: int, weight: str = "normal"
) -> str:
    """`text` in at most `lines` lines of `width`, broken after a space or a "_"."""
    done: list[str] = []
    line = ""
    for word in re.findall(r"[^\s_]*(?:\s+|_|$)", text):
        full = width_of((line + word).rstrip(), size, weight) > width
        if line and full and len(done) < lines - 1:
            done.append(line)
            line = word
        else:
            line += word
    return "\n".join(cut(part.rstrip(), width, size, weight) for part in [*done, line])


def first_that_fits(texts: Sequence[str], width: float) -> str:
    """The first text that is not wider than that, or ""."""
    return next((text for text in texts if width_of(text, SMALL) <= width), "")


# --- the drawing board: one inch is one unit -------------------------------------


def board(height: float, title: str, width: float = WIDTH) -> tuple[Picture, Axes]:
    """A picture with its title, and axes over all of it."""
    picture = Picture(height, width)
    board = picture.add_axes((0, 0, 1, 1))
    board.set_xlim(0, width)
    board.set_ylim(0, height)
    board.set_axis_off()
    title = cut(title, width - 2 * MARGIN, LARGE, "bold")
    write(board, MARGIN, height - 0.28, title, size=LARGE, weight="bold")
    return picture, board


def write(board: Axes, x: float, y: float, text: str, **looks: Any) -> Text:
    """A text at (x, y); `looks` are matplotlib's."""
    looks = {"size": SMALL, "va": "center", "linespacing": 1.25, **looks}
    return board.text(x, y, text, **looks)


def on_paper(pad: float = 1.0) -> dict[str, Any]:
    """Looks of a text that hides the lines behind it; `pad` is in points."""
    return {"bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": pad}}


def note(board: Axes, text: str, y: float = 0.22) -> None:
    """What follows from the picture, in one line at its bottom."""
    write(board, MARGIN, y, cut(text, WIDTH - 2 * MARGIN, SMALL), color=QUIET)


def box(
    board: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    label: str = "",
    *,
    fill: str = PAPER,
    edge: str = INK,
    line: float = 1.0,
    dashed: bool = False,
    hatch: str | None = None,
    hatched: str = LINE,
    rounded: float = 0.06,
    size: float = SMALL,
    weight: str = "normal",
    color: str = INK,
    pad: float = 0.04,
) -> FancyBboxPatch:
    """A box with its lower left corner at (x, y), and a label made to fit in it.

    A box that is too narrow for an outline has none: many of them would be one black
    block.
    """
    if width < _NARROW:
        line, rounded = 0.0, 0.0
    shape = {
        "xy": (x, y),
        "width": width,
        "height": height,
        "boxstyle": f"round,pad=0,rounding_size={rounded}",
    }
    inside = FancyBboxPatch(**shape, facecolor=fill, edgecolor=hatched, linewidth=0)
    if hatch:
        inside.set_hatch(hatch)
    outline = FancyBboxPatch(**shape, fill=False, edgecolor=edge, linewidth=line)
    if dashed:
        outline.set_linestyle((0, (4, 2.5)))
    board.add_patch(inside)
    board.add_patch(outline)
    if label:
        lines = max(1, int(height / (size * 1.45 / 72)))
        label = "\n".join(
            wrap(part, width - 2 * pad, size, 1 if "\n" in label else lines, weight)
            for part in label.split("\n")
        )
        looks = {"size": size, "weight": weight, "color": color}
        name(board, inside, x + width / 2, y + height / 2, label, **looks)
    return inside


def name(
    board: Axes, inside: FancyBboxPatch, x: float, y: float, text: str, **looks: Any
) -> None:
    """Write a text, with its middle at (x, y), that belongs in a box."""
    written = write(board, x, y, text, ha="center", **looks)
    if inside.get_hatch():
        # Letters on top of a hatch are hard to read.
        paper = {"facecolor": inside.get_facecolor(), "edgecolor": "none", "pad": 0.9}
        written.set_bbox(paper)
    board.get_figure().labels.append((written, inside))


def arrow(
    board: Axes,
    start: tuple[float, float],
    stop: tuple[float, float],
    *,
    both: bool = False,
    line: float = 1.2,
    head: float = 9,
) -> None:
    """An arrow from one point to another."""
    style = "<|-|>" if both else "-|>"
    looks = {"color": INK, "linewidth": line, "mutation_scale": head}
    arrow = FancyArrowPatch(
        start, stop, arrowstyle=style, shrinkA=0, shrinkB=0, **looks
    )
    board.add_patch(arrow)


Entry = tuple[str, dict[str, Any]]  # what a sample means, and its looks
_SAMPLE, _AFTER = 0.38, 0.3  # inches of a sample, and after its words


def key(board: Axes, y: float, entries: Sequence[tuple]) -> None:
    """Samples, each with what it means; the first line of them at `y`.

    An entry is (words, looks, ...). Looks are those of `box`, or matplotlib's for a
    line where they have a "color". Several looks in an entry share one sample.
    """
    for line in key_lines(entries):
        x = MARGIN
        for text, *samples in line:
            wide = 0.3 / len(samples)
            for place, looks in enumerate(samples):
                if "lw" in looks or "marker" in looks:
                    xs = [x, x + 0.15, x + 0.3]
                    looks = {"solid_capstyle": "butt", **looks}
                    board.plot(xs, [y] * 3, markevery=[1], **looks)
                    continue
                at = (x + place * wide, y - 0.08, wide, 0.16)
                box(board, *at, **{**looks, "rounded": 0.02})
            text = cut(text, 3.0, SMALL)
            write(board, x + _SAMPLE, y, text, color=QUIET)
            x += _SAMPLE + width_of(text, SMALL) + _AFTER
        y -= KEY_LINE


KEY_LINE = 0.22  # inches from one line of a key to the next


def key_lines(entries: Sequence[tuple]) -> list[list[tuple]]:
    """The entries of a key, broken into lines that fit into a page."""
    lines: list[list[tuple]] = [[]]
    for entry in entries:
        room = WIDTH - 2 * MARGIN + _AFTER
        if lines[-1] and key_width([*lines[-1], entry]) > room:
            lines.append([])
        lines[-1].append(entry)
    return lines


def key_width(entries: Sequence[tuple]) -> float:
    """The width of these entries in one line, in inches."""
    texts = [text for text, *_ in entries]
    return sum(_SAMPLE + _AFTER + min(width_of(t, SMALL), 3.0) for t in texts)


def chart(
    picture: Picture, left: float, bottom: float, width: float, height: float
) -> Axes:
    """Axes for a diagram, placed in inches."""
    across, up = picture.get_size_inches()
    chart = picture.add_axes((left / across, bottom / up, width / across, height / up))
    # The board is drawn over it, so that names and lines may reach into the diagram.
    chart.patch.set_visible(False)
    chart.set_zorder(-1)
    return chart


def grid(axis: Axes, which: str = "both") -> None:
    """Pale lines behind what is drawn, at the ticks of "x", "y" or "both"."""
    axis.grid(axis=which, color="#E3E3E3", linewidth=0.8)
    axis.set_axisbelow(True)


NO_TICKS = NullLocator()


def round_ticks(most: int, *, whole: bool = False) -> MaxNLocator:
    """Ticks at round numbers, or at whole ones."""
    steps = [1, 2, 5, 10] if whole else [1, 2, 2.5, 5, 10]
    return MaxNLocator(nbins=most, steps=steps, integer=whole)


def log_ticks(
    set_ticks: Callable, edges: tuple[float, float], say: Callable, most: int
) -> None:
    """Ticks at powers of ten; where these are few, also between them."""
    low, high = edges
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**p for p in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    ticks = ticks[:: math.ceil(len(ticks) / most)]
    set_ticks(ticks, labels=[say(tick) for tick in ticks])


# --- more words than a picture has room for --------------------------------------


def below(picture: Picture, lines: Sequence[str]) -> None:
    """Put lines of text under a picture; one that starts with four spaces is code."""
    step, edge = 0.2, 0.12
    letter = 0.602 * SMALL / 72  # of DejaVu Sans Mono, in inches
    shown: list[tuple[str, bool]] = []
    for line in lines:
        is_code = line.startswith("    ")
        broken = line if is_code else wrap(line, WIDTH - 2 * MARGIN, SMALL, 4)
        shown += [(part, is_code) for part in broken.split("\n")]
    widest = max(
        letter * len(text) if is_code else width_of(text, SMALL)
        for text, is_code in shown
    )
    wide, tall = picture.get_size_inches()
    more = step * len(shown) + edge
    new_wide, new_tall = min(max(wide, widest + 2 * MARGIN), WIDTH), tall + more
    for axes in picture.axes:
        x, y, w, h = axes.get_position().bounds
        x, w = x * wide / new_wide, w * wide / new_wide
        y, h = (y * tall + more) / new_tall, h * tall / new_tall
        axes.set_position((x, y, w, h))
    picture.set_size_inches(new_wide, new_tall)
    board = picture.add_axes((0, 0, 1, more / new_tall))
    board.set(xlim=(0, new_wide), ylim=(0, more))
    board.set_axis_off()
    for place, (text, is_code) in enumerate(shown):
        looks = {"family": "DejaVu Sans Mono"} if is_code else {}
        write(board, MARGIN, more - step * (place + 0.5), text, **looks)
