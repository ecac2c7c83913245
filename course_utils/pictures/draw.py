"""The drawing board: texts that fit, boxes, arrows, numbers in words."""

import base64
import functools
import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from course_utils.theory import costs

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


# --- words and numbers ---------------------------------------------------------


def listed(words: Iterable[object]) -> str:
    """Words as a list in a sentence: a, b and c."""
    *most, last = [str(word) for word in words] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def sentence(words: str) -> str:
    """The words with a capital letter and a full stop."""
    return f"{words[0].upper()}{words[1:]}."


def number(value: float, digits: int = 4) -> str:
    """A value with few significant digits: 3, 0.25, 1.235, 2e-05, 1.2e+09."""
    if isinstance(value, int) and abs(value) < 10**7:
        return str(value)
    text = f"{value + 0.0:.{digits}g}"  # + 0.0 turns -0.0 into 0
    return f"{value:.0f}" if "e" in text and 1 <= abs(value) < 1e7 else text


def spoken(value: float, digits: int = 4) -> str:
    """A value for a sentence: from a thousand on, whole and with commas."""
    if 1e3 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return number(value, digits)


def whole(value: object, what: str) -> None:
    """Refuse what is not a whole number from 1 up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} is {value!r}: expected a whole number from 1 up.")


def finite(value: object, what: str) -> float:
    """`value` as a Python number, if it is one that can be drawn."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{what} is {value!r}: expected a number.")
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}: only a finite number can be drawn.")
    return number


def shown(count: int, limit: int) -> list[int | None]:
    """Which of `count` things to draw in `limit` places; None stands for "…"."""
    if count <= limit:
        return list(range(count))
    return [*range(limit - 2), None, count - 1]


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit in which a time is easy to read, and its length in seconds."""
    if seconds >= 1 or not seconds:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)


def speed(value: float) -> str:
    """A bandwidth: 3.35 TB/s, 0.117 GB/s."""
    unit, size = ("TB/s", 1e12) if value >= 1e12 else ("GB/s", 1e9)
    return f"{number(value / size, 3)} {unit}"


def byte_size(nbytes: float) -> str:
    """A size in decimal units: 4 B, 64 kB, 1.05 MB, 14 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{number(nbytes / size, 3)} {unit}"
    return f"{number(nbytes, 3)} B"


def duration(seconds: float) -> str:
    """A time with three digits at most: 5 µs, 31.1 ms, 1.12 s, 0 s."""
    if not seconds:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9995:
            return f"{number(seconds / size, 3)} {unit}"
    return f"{number(seconds / 1e-9, 3)} ns"


def binary_unit(nbytes: float) -> tuple[str, float]:
    """The unit in which an amount of memory is easy to read, and its bytes."""
    for unit, size in (("TiB", costs.TiB), ("GiB", costs.GiB), ("MiB", costs.MiB)):
        if nbytes >= size:
            return unit, size
    return ("KiB", costs.KiB) if nbytes >= costs.KiB else ("B", 1)


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
) -> FancyBboxPatch:
    """A box with its lower left corner at (x, y), and a label made to fit in it."""
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
            wrap(part, width - 0.08, size, 1 if "\n" in label else lines, weight)
            for part in label.split("\n")
        )
        looks = {"size": size, "weight": weight, "color": color, "ha": "center"}
        text = write(board, x + width / 2, y + height / 2, label, **looks)
        if hatch:
            # Letters on top of a hatch are hard to read.
            text.set_bbox({"facecolor": fill, "edgecolor": "none", "pad": 1.5})
        board.get_figure().labels.append((text, inside))
    return inside


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


def tint(color: str, share: float = 0.35) -> str:
    """`color` thinned with white: a fill on which dark text is easy to read."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02X}" for part in parts)


def key(board: Axes, y: float, entries: Sequence[tuple]) -> None:
    """One line of samples, each with what it means."""
    x = MARGIN
    for text, *samples in entries:
        wide = 0.3 / len(samples)
        for place, looks in enumerate(samples):
            box(board, x + place * wide, y - 0.08, wide, 0.16, rounded=0.02, **looks)
        write(board, x + 0.38, y, text, color=QUIET)
        x += key_width([(text,)])


def line_key(board: Axes, y: float, entries: Sequence[tuple[str, dict]]) -> None:
    """One line of samples of lines and markers, each with what it means."""
    x = MARGIN
    for text, looks in entries:
        xs = [x + 0.15] if "marker" in looks else [x, x + 0.32]
        board.plot(xs, [y] * len(xs), **looks)
        write(board, x + 0.42, y, text, color=QUIET)
        x += 0.42 + width_of(text, SMALL) + 0.28


def key_width(entries: Sequence[tuple]) -> float:
    """The width of the line that `key` draws, in inches."""
    return sum(0.68 + width_of(text, SMALL) for text, *_ in entries)


def key_entry(name: str) -> float:
    """The room for a short line and a name in a key, in inches."""
    return 0.48 + min(width_of(name, SMALL), 3.0)


def key_lines(names: Sequence[str]) -> list[list[str]]:
    """The names, broken into lines that fit."""
    lines: list[list[str]] = [[]]
    for name in names:
        used = sum(map(key_entry, lines[-1]))
        if lines[-1] and used + key_entry(name) > WIDTH - 2 * MARGIN + 0.2:
            lines.append([])
        lines[-1].append(name)
    return lines


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


def time_axis(
    picture: Picture,
    left: float,
    bottom: float,
    width: float,
    height: float,
    span: float,
) -> str:
    """Lines at round times over `span` seconds; returns the unit of the times."""
    unit, size = unit_of(span)
    axis = chart(picture, left, bottom, width, height)
    axis.set_xlim(0, span / size or 1.0)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(round_ticks(8))
    grid(axis, "x")
    return unit


def round_ticks(most: int) -> MaxNLocator:
    """Ticks at round numbers."""
    return MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10])


def log_ticks(
    set_ticks: Callable, edges: tuple[float, float], say: Callable, most: int
) -> None:
    """Ticks at powers of ten, or at 1, 2 and 5 of each where there are few powers."""
    low, high = edges
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1,)):
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
