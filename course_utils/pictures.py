"""Every drawing of the course: data in, a `Picture` out.

    >>> from course_utils import pictures
    >>> picture = pictures.guess_and_measured(2.0, 3.0, "s", "A first cell")
    >>> print(picture)
    A first cell: guess 2 s, measured 3 s. The measured value is 1.5 times the guess.

A `Picture` is a matplotlib `Figure` with a text `summary` that holds the numbers it
draws. As the last expression of a cell it shows itself, with the summary as its
alternative text; `print(picture)` prints the summary; `picture.savefig` writes a file.
Nothing here goes through pyplot, so no picture shows twice and the backend stays as
it is. The same data give the same picture, whatever style a learner has set.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. No meaning is
in a colour alone: it is also in a word, a hatch, a line style or a marker. Texts are
at least 9 pt. Lengths are inches, from the bottom left of the picture.
"""

import base64
import functools
import html
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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

from course_utils import costs

if TYPE_CHECKING:
    from course_utils.doctor import Link, Machine
    from course_utils.lessons import Lesson
    from course_utils.virtual_gpus.records import Timeline, Transfer

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


def _picture(draw: Callable[..., Picture]) -> Callable[..., Picture]:
    """Make a drawing function draw in the course's style, whatever is set outside."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Picture:
        with matplotlib.style.context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


# --- words and numbers ---------------------------------------------------------


def _and(words: Iterable[object]) -> str:
    *most, last = [str(word) for word in words] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _number(value: float, digits: int = 4) -> str:
    """A value with few significant digits: 3, 0.25, 1.235, 2e-05, 1.2e+09."""
    if isinstance(value, int) and abs(value) < 10**7:
        return str(value)
    text = f"{value + 0.0:.{digits}g}"  # + 0.0 turns -0.0 into 0
    return f"{value:.0f}" if "e" in text and 1 <= abs(value) < 1e7 else text


def _spoken(value: float, digits: int = 4) -> str:
    """A value for a sentence: from a thousand on, whole and with commas."""
    if 1e3 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return _number(value, digits)


def _whole(value: object, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} is {value!r}: expected a whole number from 1 up.")


def _finite(value: object, what: str) -> float:
    """`value` as a Python number, if it is one that can be drawn."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{what} is {value!r}: expected a number.")
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}: only a finite number can be drawn.")
    return number


def _shown(count: int, limit: int) -> list[int | None]:
    """Which of `count` things to draw in `limit` places; None stands for "…"."""
    if count <= limit:
        return list(range(count))
    return [*range(limit - 2), None, count - 1]


# --- texts that fit ------------------------------------------------------------


@functools.cache
def _width_of(text: str, size: float, weight: str = "normal") -> float:
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return _ruler().get_text_width_height_descent(text, font, False)[0] / DPI


@functools.cache
def _ruler() -> RendererAgg:
    return RendererAgg(1, 1, DPI)


def _cut(text: str, width: float, size: float, weight: str = "normal") -> str:
    """`text`, shortened with "…" to at most `width`."""
    text = " ".join(text.split())
    if _width_of(text, size, weight) <= width:
        return text
    while text and _width_of(text.rstrip() + "…", size, weight) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _wrap(
    text: str, width: float, size: float, lines: int, weight: str = "normal"
) -> str:
    """`text` in at most `lines` lines of `width`, broken after a space or a "_"."""
    done: list[str] = []
    line = ""
    for word in re.findall(r"[^\s_]*(?:\s+|_|$)", text):
        full = _width_of((line + word).rstrip(), size, weight) > width
        if line and full and len(done) < lines - 1:
            done.append(line)
            line = word
        else:
            line += word
    return "\n".join(_cut(part.rstrip(), width, size, weight) for part in [*done, line])


# --- the drawing board: one inch is one unit -------------------------------------


def _board(height: float, title: str, width: float = WIDTH) -> tuple[Picture, Axes]:
    """A picture with its title, and axes over all of it."""
    picture = Picture(height, width)
    board = picture.add_axes((0, 0, 1, 1))
    board.set_xlim(0, width)
    board.set_ylim(0, height)
    board.set_axis_off()
    title = _cut(title, width - 2 * MARGIN, LARGE, "bold")
    _write(board, MARGIN, height - 0.28, title, size=LARGE, weight="bold")
    return picture, board


def _write(board: Axes, x: float, y: float, text: str, **looks: Any) -> Text:
    looks = {"size": SMALL, "va": "center", "linespacing": 1.25, **looks}
    return board.text(x, y, text, **looks)


def _box(
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
            _wrap(part, width - 0.08, size, 1 if "\n" in label else lines, weight)
            for part in label.split("\n")
        )
        looks = {"size": size, "weight": weight, "color": color, "ha": "center"}
        text = _write(board, x + width / 2, y + height / 2, label, **looks)
        if hatch:
            # Letters on top of a hatch are hard to read.
            text.set_bbox({"facecolor": fill, "edgecolor": "none", "pad": 1.5})
        board.get_figure().labels.append((text, inside))
    return inside


def _arrow(
    board: Axes,
    start: tuple[float, float],
    stop: tuple[float, float],
    *,
    both: bool = False,
    line: float = 1.2,
    head: float = 9,
) -> None:
    style = "<|-|>" if both else "-|>"
    looks = {"color": INK, "linewidth": line, "mutation_scale": head}
    arrow = FancyArrowPatch(
        start, stop, arrowstyle=style, shrinkA=0, shrinkB=0, **looks
    )
    board.add_patch(arrow)


def _tint(color: str, share: float = 0.35) -> str:
    """`color` thinned with white: a fill on which dark text is easy to read."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02X}" for part in parts)


def _key(board: Axes, y: float, entries: Sequence[tuple]) -> None:
    """One line of samples, each with what it means."""
    x = MARGIN
    for text, *samples in entries:
        wide = 0.3 / len(samples)
        for place, looks in enumerate(samples):
            _box(board, x + place * wide, y - 0.08, wide, 0.16, rounded=0.02, **looks)
        _write(board, x + 0.38, y, text, color=QUIET)
        x += _key_width([(text,)])


def _key_width(entries: Sequence[tuple]) -> float:
    return sum(0.68 + _width_of(text, SMALL) for text, *_ in entries)


def _chart(
    picture: Picture, left: float, bottom: float, width: float, height: float
) -> Axes:
    """Axes for a diagram, placed in inches."""
    across, up = picture.get_size_inches()
    chart = picture.add_axes((left / across, bottom / up, width / across, height / up))
    # The board is drawn over it, so that names and lines may reach into the diagram.
    chart.patch.set_visible(False)
    chart.set_zorder(-1)
    return chart


# --- the map of the course -------------------------------------------------------


class _Stage(NamedTuple):
    """Lessons that run in the same kind of place, from lesson `start` on."""

    start: str
    name: str
    place: str
    virtual: bool


_STAGES = (
    _Stage("00", "First steps", "on your machine", False),
    _Stage("02", "Virtual GPUs", "in one process", True),
    _Stage("04", "Real processes", "one for each rank", False),
)


@_picture
def course_map(
    done: Collection[str] = frozenset(),
    here: str | None = None,
    *,
    lessons: "Sequence[Lesson] | None" = None,
) -> Picture:
    """The lessons as a path to follow, grouped by where their code runs.

    A lesson whose notebook is not in this copy of the course is marked "to come".

    Args:
        done: Numbers of the lessons that are finished, such as {"00", "01"}.
        here: The number of the lesson in front of the learner, if any.
        lessons: The lessons to draw; the whole course if left out.

    Raises:
        ValueError: `done` or `here` names a lesson that is not on the map.
    """
    if lessons is None:
        from course_utils.lessons import LESSONS as lessons
    done = {done} if isinstance(done, str) else set(done)
    numbers = [lesson.number for lesson in lessons]
    unknown = sorted(map(repr, (done | {here}) - {*numbers, None}))
    if unknown:
        raise ValueError(
            f"There is no lesson {_and(unknown)} on the map. "
            f"The lessons are {', '.join(numbers)}."
        )
    # The path turns where the last stage begins, and then after every five lessons.
    rows: list[list[Lesson]] = []
    for lesson in lessons:
        if not rows or len(rows[-1]) == 5 or lesson.number == _STAGES[-1].start:
            rows.append([])
        rows[-1].append(lesson)

    gap, pad, turn = 0.28, 0.1, 0.34
    width = (WIDTH - 2 * MARGIN - 2 * pad + gap) / 5 - gap
    tall = 0.86
    row_height = tall + 0.48
    height = 0.56 + len(rows) * (row_height + turn) - turn + 0.22
    picture, board = _board(height, f"The course: {_count(len(lessons), 'lesson')}")
    if done:
        looks = {"size": NORMAL, "color": QUIET, "ha": "right"}
        said = f"{len(done)} of {len(lessons)} done"
        _write(board, WIDTH - MARGIN, height - 0.28, said, **looks)
    for index, row in enumerate(rows):
        bottom = height - 0.56 - index * (row_height + turn) - row_height
        _stage_bands(board, row, (MARGIN, bottom, width, row_height), gap, pad)
        for place, lesson in enumerate(row):
            x, y = MARGIN + pad + place * (width + gap), bottom + 0.18
            if place:
                _arrow(board, (x - gap, y + tall / 2), (x, y + tall / 2))
            state = {"done": lesson.number in done, "here": lesson.number == here}
            _lesson_card(board, lesson, (x, y, width, tall), **state)
        if index + 1 < len(rows):
            # From the last card down, and back to the first card of the next row.
            first = MARGIN + pad + width / 2
            last, level = x + width / 2, bottom - turn / 2
            start = y - 0.13 if lesson.number == here else y
            board.plot([last, last, first], [start, level, level], color=INK, lw=1.2)
            _arrow(board, (first, level), (first, bottom - turn))
    picture.summary = _map_in_words(lessons, done, here)
    return picture


def _stage_of(lesson: "Lesson") -> _Stage:
    return [stage for stage in _STAGES if stage.start <= lesson.number][-1]


def _stage_bands(
    board: Axes,
    row: "Sequence[Lesson]",
    first_card: tuple[float, float, float, float],
    gap: float,
    pad: float,
) -> None:
    """A band behind the lessons of each stage, dashed where something is virtual."""
    left, bottom, card, height = first_card
    stages = [_stage_of(lesson) for lesson in row]
    for stage in dict.fromkeys(stages):
        x = left + stages.index(stage) * (card + gap)
        width = stages.count(stage) * (card + gap) - gap + 2 * pad
        looks = {"fill": MIST, "edge": LINE}
        if stage.virtual:
            looks = {"fill": _tint(SKY, 0.16), "edge": BLUE, "dashed": True}
        _box(board, x, bottom, width, height, **looks)
        y = bottom + height - 0.17
        _write(board, x + pad, y, stage.name, weight="bold")
        after = x + pad + _width_of(stage.name, SMALL, "bold") + 0.1
        where = _cut(stage.place, x + width - after - 0.06, SMALL)
        _write(board, after, y, where, color=QUIET)


def _lesson_card(
    board: Axes,
    lesson: "Lesson",
    place: tuple[float, float, float, float],
    *,
    done: bool,
    here: bool,
) -> None:
    x, y, width, height = place
    there = getattr(lesson, "exists", True)
    color = INK if there else QUIET
    fill = _tint(GREEN, 0.22) if done else PAPER
    edge, line = (BLUE, 2.6) if here else (color, 0.8)
    card = _box(board, x, y, width, height, fill=fill, edge=edge, line=line)
    top = y + height - 0.21
    title = _wrap(lesson.title, width - 0.16, NORMAL, lines=2)
    looks = {"color": color, "size": LARGE, "weight": "bold"}
    texts = [_write(board, x + 0.1, top, lesson.number, **looks)]
    looks = {"color": color, "size": NORMAL, "va": "top"}
    texts.append(_write(board, x + 0.1, top - 0.16, title, **looks))
    if done or not there:
        mark = "✓ done" if done else "to come"
        looks = {"weight": "bold"} if done else {"color": QUIET}
        texts.append(_write(board, x + width - 0.1, top, mark, ha="right", **looks))
    board.get_figure().labels += [(text, card) for text in texts]
    if here:
        looks = {"fill": BLUE, "edge": BLUE, "weight": "bold", "color": PAPER}
        _box(board, x + 0.1, y - 0.13, width - 0.2, 0.23, "you are here", **looks)


def _map_in_words(
    lessons: "Sequence[Lesson]", done: Collection[str], here: str | None
) -> str:
    titles = {lesson.number: f"{lesson.number} {lesson.title}" for lesson in lessons}
    stages: dict[str, list[str]] = {}
    for lesson in lessons:
        stages.setdefault(_stage_of(lesson).name, []).append(titles[lesson.number])
    path = ". ".join(f"{name}: {', '.join(them)}" for name, them in stages.items())
    coming = [le.number for le in lessons if not getattr(le, "exists", True)]
    state = [f"done: {_and(number for number in titles if number in done) or 'none'}"]
    if here is not None:
        state.append(f"you are here: {titles[here]}")
    if coming:
        state.append(f"to come: {_and(coming)}")
    return f"The course: {_count(len(lessons), 'lesson')}. {path}. " + _sentence(
        "; ".join(state)
    )


# --- the machine in front of the learner -------------------------------------------

# Ways between two GPUs in the words of nvidia-smi, the best first.
_WAYS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
_LESSON_GPUS = 4


@_picture
def machine(machine: "Machine") -> Picture:
    """What this machine has, and beside it, dashed, what the course adds as virtual.

    The lessons use up to four GPUs; those that are not there are virtual.

    Args:
        machine: From `course_utils.doctor.inspect_machine()`.
    """
    wide, gap, pad = 4.85, 0.3, 0.14
    levels = _link_levels(machine)
    side, columns, space = _core_grid(machine.cores, wide - 2 * pad, 0.86)
    grid = math.ceil(machine.cores / columns) * (side + space) - space
    gpus = 0.96 + 0.34 * len(levels) if machine.gpus else 0.46
    missing = range(len(machine.gpus), _LESSON_GPUS)
    virtual = 1.1 + 0.74 * math.ceil(len(missing) / 2) if missing else 0.84
    tall = max(1.5 + grid + gpus, virtual)
    picture, board = _board(tall + 0.56 + 0.22, "Your machine")
    top = tall + 0.22
    left = MARGIN + pad
    _box(board, MARGIN, 0.22, wide, tall, fill=MIST)
    _write(board, left, top - 0.19, "REAL", weight="bold")
    _write(board, left + 0.5, top - 0.19, "what this machine has", color=QUIET)

    y = top - 0.55
    heading = {"size": NORMAL, "weight": "bold"}
    _write(board, left, y, _cores_in_words(machine), **heading)
    model = _cut(machine.cpu, wide - 2 * pad, SMALL)
    _write(board, left, y - 0.2, model, color=QUIET)
    y -= 0.35
    for core in range(machine.cores):
        row, column = divmod(core, columns)
        x, low = left + column * (side + space), y - row * (side + space) - side
        looks = {"fill": _tint(YELLOW, 0.45), "rounded": side / 10, "line": 0.8}
        _box(board, x, low, side, side, str(core) if side >= 0.3 else "", **looks)
    y -= grid + 0.12
    memory = f"{_gigabytes(machine.memory)} of memory, shared by all cores"
    _box(board, left, y - 0.3, wide - 2 * pad, 0.3, memory, fill=_tint(GREEN, 0.22))
    _real_gpus(board, machine, levels, (left, y - 0.55, wide - 2 * pad))

    x = MARGIN + wide + gap
    if tall - virtual < 0.6:
        virtual = tall  # two panels that end almost level look like a mistake
    _virtual_gpus(board, missing, (x, top - virtual, WIDTH - MARGIN - x, virtual))
    picture.summary = _machine_in_words(machine, levels)
    return picture


def _core_grid(cores: int, width: float, height: float) -> tuple[float, int, float]:
    """Side of a core's square, squares in a row, space between two squares."""

    def largest(columns: int) -> float:
        rows = math.ceil(cores / columns)
        # The space is 0.16 of a side.
        across, up = 1.16 * columns - 0.16, 1.16 * rows - 0.16
        return min(0.36, width / across, height / up)

    def calm(columns: int) -> tuple[float, int]:
        # Full rows look calm: somewhat smaller squares are a fair price for them.
        return largest(columns) * (0.7 if cores % columns else 1.0), columns

    columns = max(range(1, cores + 1), key=calm)
    return largest(columns), columns, 0.16 * largest(columns)


def _real_gpus(
    board: Axes,
    machine: "Machine",
    levels: Sequence[tuple[str, list[set[int]]]],
    place: tuple[float, float, float],
) -> None:
    """The GPUs of the machine in a row from the top left corner, and their links."""
    left, y, width = place
    heading = _sentence(_gpus_in_words(machine)).rstrip(".")
    _write(board, left, y, heading, size=NORMAL, weight="bold")
    if not machine.gpus:
        note = machine.gpu_problem or "The course does not need one."
        _write(board, left, y - 0.2, _cut(note, width, SMALL), color=QUIET)
        return
    kinds = _cut(_gpu_kinds(machine), width, SMALL)
    _write(board, left, y - 0.2, kinds, color=QUIET)
    y -= 0.72
    centers: dict[int, float] = {}
    shown = _shown(len(machine.gpus), 8)
    box = min(1.0, (width + GAP) / len(shown) - GAP)
    for place, index in enumerate(shown):
        x = left + place * (box + GAP)
        if index is None:
            _write(board, x + box / 2, y + 0.19, "…", size=LARGE, ha="center")
            continue
        number = machine.gpus[index].index
        label = f"GPU {number}" if box > 0.5 else str(number)
        _box(board, x, y, box, 0.38, label, fill=_tint(GREEN, 0.45))
        centers[number] = x + box / 2
    looks = ({"lw": 3.2}, {"lw": 1.2}, {"lw": 1.2, "ls": "--"})
    for row, (way, groups) in enumerate(levels):
        style = {"color": INK, "solid_capstyle": "butt", **looks[row]}
        low = y - 0.14 * (row + 1)
        for group in groups:
            # A little to the right of the row above, so that no line hides another.
            xs = [centers[gpu] + 0.06 * row for gpu in sorted(group) if gpu in centers]
            board.plot(xs, [low] * len(xs), **style)
            for x in xs if len(xs) > 1 else ():
                board.plot([x, x], [y, low], **style)
        low = y - 0.14 * len(levels) - 0.2 * (row + 1)
        board.plot([left, left + 0.3], [low, low], **style)
        _write(board, left + 0.4, low, _cut(way, width - 0.4, SMALL), color=QUIET)


def _link_levels(machine: "Machine") -> list[tuple[str, list[set[int]]]]:
    """What connects the GPUs: the best two levels and the last one.

    Each is its name and the groups of GPUs that are connected so or better.
    """
    levels = []
    for way in _WAYS:
        names = {link.description for link in machine.links if _way(link) == way}
        if not names:
            continue
        name = " or ".join(sorted(names))
        if way == "NV":
            counts = {link.nvlinks for link in machine.links if link.nvlinks}
            least, most = min(counts), max(counts)
            number = f"{least} to {most}" if least < most else f"{most}"
            name = f"NVLink ({number} links)"
        good = _WAYS[: _WAYS.index(way) + 1]
        pairs = [{k.first, k.second} for k in machine.links if _way(k) in good]
        groups: list[set[int]] = []
        for pair in pairs:
            touched = [group for group in groups if group & pair]
            groups = [group for group in groups if not group & pair]
            groups.append(pair.union(*touched))
        whole = sum(math.comb(len(group), 2) for group in groups)
        if whole > len(pairs):
            name += ", not every pair"
        levels.append((name, groups))
    return levels if len(levels) <= 3 else [*levels[:2], levels[-1]]


def _way(link: "Link") -> str:
    way = "NV" if link.nvlinks else link.code
    return way if way in _WAYS else _WAYS[-1]


def _virtual_gpus(
    board: Axes, missing: range, place: tuple[float, float, float, float]
) -> None:
    x, y, width, height = place
    pad = 0.14
    looks = {"fill": _tint(SKY, 0.16), "edge": BLUE, "line": 1.4, "dashed": True}
    _box(board, x, y, width, height, **looks)
    top = y + height
    _write(board, x + pad, top - 0.19, "VIRTUAL", weight="bold")
    _write(board, x + pad + 0.72, top - 0.19, "by the course", color=QUIET)
    box = (width - 2 * pad - 0.12) / 2
    for place, gpu in enumerate(missing):
        row, column = divmod(place, 2)
        low = top - 0.4 - 0.62 - row * 0.74
        looks = {"edge": BLUE, "dashed": True}
        at = x + pad + column * (box + 0.12)
        _box(board, at, low, box, 0.62, f"cuda:{gpu}\nvirtual", **looks)
    note = (
        "Same PyTorch code as on real GPUs, same numbers. The CPU computes them, so "
        "the speed is not a GPU's."
    )
    if not missing:
        note = f"Nothing: the lessons use {_LESSON_GPUS} GPUs at most."
    note = _wrap(note, width - 2 * pad, SMALL, lines=5)
    below = top - 0.4 - 0.74 * math.ceil(len(missing) / 2)
    _write(board, x + pad, below, note, color=QUIET, va="top")


def _cores_in_words(machine: "Machine") -> str:
    words = _count(machine.cores, "CPU core")
    if machine.cores < machine.all_cores:
        return f"{words}, of {machine.all_cores} in the machine"
    physical = machine.physical_cores or machine.cores
    return words + (f" ({physical} physical)" if physical < machine.cores else "")


def _gigabytes(amount: int) -> str:
    return f"{amount / 1e9:,.{0 if amount >= 1e11 else 1}f} GB"


def _gpus_in_words(machine: "Machine") -> str:
    if machine.gpus:
        return _count(len(machine.gpus), "GPU")
    return "no GPU that works" if machine.gpu_problem else "no GPU"


def _gpu_kinds(machine: "Machine") -> str:
    kinds: dict[str, int] = {}
    for gpu in machine.gpus:
        size = f", {gpu.memory / 2**30:.0f} GiB" if gpu.memory else ""
        kinds[gpu.name + size] = kinds.get(gpu.name + size, 0) + 1
    if len(kinds) == 1:
        return next(iter(kinds)) + (" each" if len(machine.gpus) > 1 else "")
    return "; ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _machine_in_words(machine: "Machine", levels: Sequence[tuple[str, list]]) -> str:
    gpus = _gpus_in_words(machine)
    if machine.gpus:
        gpus += f" ({_gpu_kinds(machine)})"
    words = (
        f"Your machine: {_cores_in_words(machine)}, {machine.cpu}, "
        f"{_gigabytes(machine.memory)} of memory, {gpus}."
    )
    if levels:
        words += f" GPUs are connected by {'; '.join(name for name, _ in levels)}."
    virtual = [f"cuda:{gpu}" for gpu in range(len(machine.gpus), _LESSON_GPUS)]
    return f"{words} Virtual: {_and(virtual) if virtual else 'nothing'}."


# --- ranks on cores ----------------------------------------------------------------


@_picture
def ranks_on_cores(world_size: int, cores: int, *, backend: str = "gloo") -> Picture:
    """The notebook kernel, its rank processes, their messages, and the CPU cores.

    Args:
        world_size: How many rank processes there are.
        cores: How many CPU cores the machine has.
        backend: What carries the messages between the ranks.

    Raises:
        ValueError: a number is not a whole number from 1 up.
    """
    _whole(world_size, "world_size")
    _whole(cores, "cores")
    processes = _count(world_size, "process", "processes")
    way = f"{backend} over loopback" if backend == "gloo" else backend
    picture, board = _board(4.1, f"One cell, {processes}, {_count(cores, 'CPU core')}")
    left, right, top = 2.0, WIDTH - MARGIN, 3.3
    middle = (left + right) / 2

    def layer(y: float, name: str, what: str) -> None:
        _write(board, MARGIN, y + 0.1, name, size=NORMAL, weight="bold")
        _write(board, MARGIN, y - 0.1, what, color=QUIET)

    layer(top, "Notebook kernel", "where you type")
    kernel = {"fill": _tint(YELLOW, 0.45), "size": NORMAL, "weight": "bold"}
    _box(board, middle - 0.9, top - 0.22, 1.8, 0.44, "your cell", **kernel)
    note = "is sent to every rank" if world_size > 1 else "is sent to the rank"
    _write(board, middle + 1.05, top, note, color=QUIET)

    row = top - 1.0
    layer(
        row,
        _count(world_size, "rank"),
        "each is a process" if world_size > 1 else "is a process",
    )
    bus = row - 0.82
    places = _row_of_boxes(world_size, 8 if world_size <= 8 else 7, left, right, 1.35)
    for rank, x, width in places:
        if rank is None:
            _write(board, x + width / 2, row, "…", size=LARGE, ha="center")
            continue
        center = x + width / 2
        start = middle + (center - middle) * 0.8 / (right - middle)
        _arrow(board, (start, top - 0.22), (center, row + 0.28))
        looks = {"fill": _tint(SKY), "size": NORMAL}
        _box(board, x, row - 0.28, width, 0.56, f"rank {rank}", **looks)
        if world_size > 1:
            _arrow(board, (center, row - 0.28), (center, bus + 0.17), both=True)
    if world_size > 1:
        layer(bus, "Messages", "between the ranks")
        label = f"{way}: nothing leaves this machine"
        _box(
            board, left, bus - 0.17, right - left, 0.34, label, fill=_tint(ORANGE, 0.3)
        )
    else:
        layer(bus, "Messages", "none")
        note = "A single rank has nobody to talk to."
        _write(board, middle, bus, note, color=QUIET, ha="center")

    base = bus - 0.82
    layer(
        base, _count(cores, "CPU core"), "do the work" if cores > 1 else "does the work"
    )
    for core, x, width in _row_of_boxes(cores, 12, left, right, 0.42):
        if core is None:
            _write(board, x + width / 2, base + 0.1, "…", size=LARGE, ha="center")
            continue
        looks = {"fill": MIST, "rounded": 0.02}
        _box(board, x, base - 0.05, width, 0.34, str(core), **looks)
    them = _count(world_size, "rank"), _count(cores, "core")
    if world_size > cores:
        note = f"{them[0]} take turns on {them[1]}: slower, but with the same results."
    elif world_size > 1:
        note = f"{them[1]} for {them[0]}: all ranks can run at once."
    else:
        note = "One core is enough for one rank."
    _write(board, middle, base - 0.24, note, color=QUIET, ha="center")

    last = world_size - 1
    who = f"ranks 0 to {last}, which talk to each other by {way}"
    who = who if last > 1 else who.replace("0 to 1", "0 and 1")
    if not last:
        who = "rank 0, which has nobody to talk to"
    picture.summary = (
        f"The notebook kernel sends your cell to {processes}: {who}. {note}"
    )
    return picture


def _row_of_boxes(
    count: int, limit: int, left: float, right: float, widest: float
) -> list[tuple[int | None, float, float]]:
    """(number, x, width) of boxes in the middle of a row; number None is "…"."""
    numbers = _shown(count, limit)
    gap = 0.12 if widest > 0.5 else 0.04
    width = min(widest, (right - left + gap) / len(numbers) - gap)
    x = (left + right - len(numbers) * (width + gap) + gap) / 2
    return [(n, x + i * (width + gap), width) for i, n in enumerate(numbers)]


# --- a collective, before and after ------------------------------------------------

_RANK_COLORS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION, LINE)
_COMPUTED = -1


@_picture
def collective(before: Sequence[object], after: Sequence[object], name: str) -> Picture:
    """What each rank held before and after a collective, one row a rank.

    A cell has the colour of the rank that its value came from. A value that was
    computed from several ranks is hatched.

    Args:
        before: For each rank, in rank order: a 1-D tensor (or a number, or a list of
            numbers), a list of such tensors, or None for a rank that holds nothing.
        after: The same, afterwards.
        name: The collective, such as "all_reduce" or "all_reduce MAX".

    Raises:
        ValueError: `before` and `after` are not of the same number of ranks, or hold
            something that is not a number, a 1-D tensor or a list of them.
    """
    if len(before) != len(after) or not len(before):
        raise ValueError(
            f"before is of {_count(len(before), 'rank')}, after of "
            f"{_count(len(after), 'rank')}: give one entry a rank to both."
        )
    old = [_held(value, rank, "before") for rank, value in enumerate(before)]
    new = [_held(value, rank, "after") for rank, value in enumerate(after)]
    sources = _sources(old, new, name)
    world_size = len(old)
    rows = _shown(world_size, 9)
    step = min(0.46, 2.9 / len(rows))
    height = 1.52 + step * len(rows)
    label = 0.16 + _width_of(f"rank {world_size - 1}", NORMAL)
    middle = 1.35
    room = WIDTH - 2 * MARGIN - label - middle
    cell = _cell_width(old, new, room)
    most = [max(_across(held, cell) for held in ranks) for ranks in (old, new)]
    sides = most if sum(most) <= room else [min(side, room / 2) for side in most]
    title = f"{name} on {_count(world_size, 'rank')}"
    key = _collective_key(sources)
    width = max(
        2 * MARGIN + label + sum(sides) + middle,
        2 * MARGIN + min(_width_of(title, LARGE, "bold"), WIDTH - 2 * MARGIN),
        MARGIN + _key_width(key),
    )
    picture, board = _board(height, title, width)
    left = MARGIN + label
    right = left + sides[0] + middle
    top = height - 0.84
    for x, word in ((left, "before"), (right, "after")):
        _write(board, x, top + 0.12, word, size=NORMAL, weight="bold")
    for place, rank in enumerate(rows):
        y = top - (place + 1) * step
        if rank is None:
            _write(board, MARGIN, y + step / 2, "…", size=LARGE)
            continue
        _write(board, MARGIN, y + step / 2, f"rank {rank}", size=NORMAL)
        own = [[rank] * len(part) for part in old[rank] or ()]
        spot = (y + step * 0.08, cell, step * 0.84)
        _hold(board, (left, sides[0], *spot), old[rank], own)
        _hold(board, (right, sides[1], *spot), new[rank], sources[rank])

    center = top - step * len(rows) / 2 - 0.1
    tail, tip = right - middle + 0.15, right - 0.15
    _arrow(board, (tail, center), (tip, center), line=2.4, head=16)
    word = _wrap(name, middle - 0.14, NORMAL, lines=3, weight="bold")
    looks = {"size": NORMAL, "weight": "bold", "ha": "center", "va": "bottom"}
    _write(board, right - middle / 2, center + 0.12, word, **looks)
    _key(board, 0.3, key)
    picture.summary = (
        f"{name} on {_count(world_size, 'rank')}. "
        f"Before: {_all_held(old)}. After: {_all_held(new)}."
    )
    return picture


def _held(value: object, rank: int, when: str) -> list[list[str]] | None:
    """What a rank holds, as the texts of its tensors' values; None for nothing."""
    data = value.tolist() if hasattr(value, "tolist") else value
    if data is None:
        return None
    try:
        if not isinstance(data, list | tuple):
            return [[_value(data)]]
        # A list of tensors stays a list of tensors, even of tensors of one number.
        tensors = any(hasattr(part, "tolist") for part in data)
        parts = [part.tolist() if hasattr(part, "tolist") else part for part in data]
        if not tensors and not any(isinstance(part, list | tuple) for part in parts):
            parts = [parts]
        parts = [part if isinstance(part, list | tuple) else [part] for part in parts]
        return [[_value(number) for number in part] for part in parts]
    except TypeError:
        raise ValueError(
            f"{when}[{rank}] is {value!r}: expected None, a number, a 1-D tensor, or "
            "a list of 1-D tensors."
        ) from None


def _value(number: object) -> str:
    """The text of a cell. Raises TypeError for what is no number."""
    if not isinstance(number, int | float):
        raise TypeError
    return str(number) if isinstance(number, bool) else _number(number)


def _sources(
    old: Sequence[list | None], new: Sequence[list | None], name: str
) -> list[list[list[int | None]]]:
    """Where each value in `new` came from.

    The rank that held it, or _COMPUTED, or None where several ranks held it.
    """
    owners: dict[str, set[int]] = {}
    for rank, held in enumerate(old):
        for text in (text for part in held or () for text in part):
            owners.setdefault(text, set()).add(rank)
    operation = name.lower().replace("-", "_")
    on_every_rank = "all_reduce" in operation or "reduce_scatter" in operation
    sources = []
    for rank, held in enumerate(new):
        if held == old[rank] and not on_every_rank:
            sources.append([[rank] * len(part) for part in held or ()])
        elif "reduce" in operation:
            sources.append([[_COMPUTED] * len(part) for part in held or ()])
        else:
            found = [[owners.get(text, set()) for text in part] for part in held or ()]
            sources.append([[_only(who) for who in part] for part in found])
    return sources


def _only(owners: set[int]) -> int | None:
    if not owners:
        return _COMPUTED
    return min(owners) if len(owners) == 1 else None


def _fill_of(source: int | None) -> dict[str, Any]:
    if source is None:
        return {"fill": PAPER}
    if source == _COMPUTED:
        return {"fill": PAPER, "hatch": "////"}
    return {"fill": _tint(_RANK_COLORS[source % len(_RANK_COLORS)], 0.5)}


def _hold(
    board: Axes,
    spot: tuple[float, float, float, float, float],
    held: list[list[str]] | None,
    sources: list[list[int | None]],
) -> None:
    """The cells of one rank: one after the other, a gap between two tensors."""
    left, side, y, width, height = spot
    if not held or not any(held):
        word = "nothing" if held is None else "empty"
        looks = {"edge": LINE, "dashed": True, "color": QUIET, "rounded": 0.02}
        _box(board, left, y, 0.8, height, word, **looks)
        return
    cells = [
        (text, source, not place)
        for part, whose in zip(held, sources, strict=True)
        for place, (text, source) in enumerate(zip(part, whose, strict=True))
    ]
    room = len(cells)
    if _across(held, width) > side + 1e-9:
        room = max(int((side + GAP) / (width + GAP)), 3)
    x = left
    for index in _shown(len(cells), room):
        if index is None:
            looks = {"size": NORMAL, "ha": "center"}
            _write(board, x + width / 2, y + height / 2, "…", **looks)
        else:
            text, source, first = cells[index]
            x += GAP if first and index else 0
            looks = {"size": NORMAL, "rounded": 0.02, **_fill_of(source)}
            _box(board, x, y, width, height, text, **looks)
        x += width


def _across(held: list[list[str]] | None, cell: float) -> float:
    """How wide the cells of one rank are."""
    if not held or not any(held):
        return 0.8
    return sum(map(len, held)) * cell + (len(held) - 1) * GAP


def _cell_width(old: Sequence, new: Sequence, room: float) -> float:
    """Wide enough for every text; more, up to half an inch, where there is room."""
    ranks = [held for held in [*old, *new] if held and any(held)]
    texts = [text for held in ranks for part in held for text in part]
    need = max([_width_of(text, NORMAL) + 0.16 for text in texts], default=0.0)
    # What is left for each cell when all of them are drawn, at the busiest ranks.
    gaps = cells = 0
    for side in (old, new):
        gaps += max(len(held or ()) for held in side)
        cells += max(sum(map(len, held or ())) for held in side)
    fit = (room - GAP * gaps) / (cells or 1)
    return min(max(need, 0.3, min(0.5, fit)), room / 6 - GAP)


def _collective_key(sources: Sequence[list]) -> list[tuple]:
    used = {source for held in sources for part in held for source in part}
    key = [("colour: the rank it came from", *map(_fill_of, range(3)))]
    if _COMPUTED in used:
        key.append(("computed from several ranks", _fill_of(_COMPUTED)))
    if None in used:
        key.append(("held by several ranks before", _fill_of(None)))
    return key


def _all_held(ranks: Sequence[list[list[str]] | None]) -> str:
    """What all ranks hold, in words; equal neighbours are said once."""
    texts = [_in_words(held) for held in ranks]
    if len(set(texts)) == 1 and len(texts) > 1:
        return f"every rank holds {texts[0]}"
    shown = [(rank, texts[rank]) for rank in _shown(len(texts), 9) if rank is not None]
    said = ", ".join(f"rank {rank} holds {text}" for rank, text in shown)
    return said + (" (some ranks left out)" if len(shown) < len(texts) else "")


def _in_words(held: list[list[str]] | None) -> str:
    if held is None:
        return "nothing"
    parts = []
    for part in held:
        numbers = ["…" if i is None else part[i] for i in _shown(len(part), 9)]
        parts.append(f"[{', '.join(numbers)}]")
    shown = ["…" if i is None else parts[i] for i in _shown(len(parts), 9)]
    return ", ".join(shown) if len(parts) == 1 else f"[{', '.join(shown)}]"


# --- who waits for whom ------------------------------------------------------------


class Interval(NamedTuple):
    """What one rank did from `start` to `stop`, in seconds on a clock all ranks share.

    `kind` is "compute", "communicate", "wait" or "idle".
    """

    start: float
    stop: float
    label: str
    kind: str


_KINDS: dict[str, dict[str, Any]] = {
    "compute": {"fill": _tint(BLUE, 0.3)},
    "communicate": {"fill": _tint(ORANGE, 0.5), "hatch": "////"},
    "wait": {"fill": _tint(YELLOW, 0.2), "hatch": "....", "hatched": VERMILLION},
    "idle": {"fill": PAPER, "edge": LINE, "dashed": True},
}


@_picture
def timeline(
    events: "Sequence[Iterable[tuple]] | Mapping[int, Iterable[tuple]]",
    *,
    title: str = "Who waits for whom",
) -> Picture:
    """One row a rank: what it did, and when.

    Intervals of a rank that overlap are drawn one above the other. A label that is
    too long for its bar is left out; the pattern of the bar says its kind.

    Args:
        events: The `Interval`s (or tuples like them) of each rank, in rank order, as
            `Ranks.run` returns them; or a dict from rank to its intervals.
        title: What the picture shows.

    Raises:
        ValueError: no interval, one that ends before it starts, an unknown kind, or
            more than 16 ranks.
    """
    ranks = dict(events if isinstance(events, Mapping) else enumerate(events))
    rows = {rank: [_interval(i, rank) for i in ranks[rank]] for rank in ranks}
    every = [interval for row in rows.values() for interval in row]
    if not every:
        raise ValueError("There is nothing to draw: no rank has an interval.")
    if len(rows) > 16:
        raise ValueError(
            f"{len(rows)} ranks are too many for one picture: pass at most 16, for "
            "example as a dict of the ranks that matter."
        )
    origin = min(interval.start for interval in every)
    span = max(interval.stop for interval in every) - origin
    unit, size = _unit_of(span)
    step = min(0.5, 2.85 / len(rows))
    height = 1.65 + step * len(rows)
    picture, board = _board(height, title)
    label = 0.16 + max(_width_of(f"rank {rank}", NORMAL) for rank in rows)
    left, width = MARGIN + label, WIDTH - 2 * MARGIN - label - 0.1
    top = height - 0.6
    bottom = top - step * len(rows)
    axis = _chart(picture, left, bottom - 0.06, width, top - bottom + 0.06)
    axis.set_xlim(0, span / size or 1.0)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axis.grid(axis="x", color="#E3E3E3", linewidth=0.8)
    axis.set_axisbelow(True)
    _write(board, left + width / 2, bottom - 0.42, f"time ({unit})", ha="center")
    inch = width / (span or 1.0)
    for place, (rank, row) in enumerate(rows.items()):
        y = top - (place + 1) * step
        _write(board, MARGIN, y + step / 2, f"rank {rank}", size=NORMAL)
        for lane, lanes, interval in _lanes(row):
            tall = (step - 0.1) / lanes
            start = left + (interval.start - origin) * inch
            wide = max((interval.stop - interval.start) * inch, 0.02)
            looks = {"rounded": 0.02, **_KINDS[interval.kind]}
            fits = _width_of(interval.label, SMALL) + 0.12 <= wide and tall >= 0.17
            text = interval.label if fits else ""
            lowest = y + 0.05 + (lanes - 1 - lane) * tall
            _box(board, start, lowest, wide, tall, text, **looks)
    kinds = [kind for kind in _KINDS if any(i.kind == kind for i in every)]
    _key(board, 0.25, [(kind, _KINDS[kind]) for kind in kinds])
    picture.summary = _timeline_in_words(rows, span, title)
    return picture


def _interval(values: tuple, rank: int) -> Interval:
    try:
        start, stop, label, kind = values
    except (TypeError, ValueError):
        raise ValueError(
            f"An interval of rank {rank} is {values!r}: expected (start, stop, label, "
            "kind)."
        ) from None
    if kind not in _KINDS:
        kinds = _and(map(repr, _KINDS))
        raise ValueError(f"The kind {kind!r} of rank {rank} is unknown: use {kinds}.")
    start = _finite(start, f"The start of {label!r} on rank {rank}")
    stop = _finite(stop, f"The stop of {label!r} on rank {rank}")
    if stop < start:
        raise ValueError(
            f"{label!r} on rank {rank} ends at {stop}, before it starts at {start}."
        )
    return Interval(start, stop, str(label), kind)


def _lanes(row: Sequence[Interval]) -> list[tuple[int, int, Interval]]:
    """(lane, number of lanes, interval): intervals that overlap get different lanes.

    Where computing overlaps with something else, it has the upper lanes to itself.
    """
    compute = [interval for interval in row if interval.kind == "compute"]
    others = [interval for interval in row if interval.kind != "compute"]
    overlap = any(
        a.start < b.stop and b.start < a.stop for a in compute for b in others
    )
    placed = []
    lanes = 0
    for group in (compute, others) if overlap else (row,):
        ends: list[float] = []
        for interval in sorted(group):
            free = [lane for lane, end in enumerate(ends) if end <= interval.start]
            lane = free[0] if free else len(ends)
            ends[lane : lane + 1] = [interval.stop]
            placed.append((lanes + lane, interval))
        lanes += len(ends)
    return [(lane, lanes, interval) for lane, interval in placed]


def _unit_of(seconds: float) -> tuple[str, float]:
    """The unit in which a time is easy to read, and its length in seconds."""
    if seconds >= 1 or not seconds:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)


def _timeline_in_words(
    rows: Mapping[int, Sequence[Interval]], span: float, title: str
) -> str:
    unit, size = _unit_of(span)
    said = []
    for rank, row in rows.items():
        times = []
        for kind in _KINDS:
            spent = [i.stop - i.start for i in row if i.kind == kind]
            if spent:
                times.append(f"{kind} {_number(sum(spent) / size, 3)}")
        said.append(f"rank {rank}: {', '.join(times) or 'nothing'}")
    whole = f"{_count(len(rows), 'rank')} over {_number(span / size, 3)} {unit}"
    return f"{title.rstrip('.')}. {whole}. Times in {unit}: {'; '.join(said)}."


# --- training curves ---------------------------------------------------------------

# From thick and pale to thin and dark, so that curves which lie on top of each other
# all stay visible.
_CURVES = (
    {"color": PURPLE, "linewidth": 7.0, "marker": "o", "markersize": 11},
    {"color": GREEN, "linewidth": 4.6, "marker": "s", "markersize": 7.5},
    {"color": BLUE, "linewidth": 2.6, "marker": "D", "markersize": 5},
    {"color": INK, "linewidth": 1.1, "marker": ".", "markersize": 4, "linestyle": "--"},
)


@_picture
def training_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Picture:
    """Loss and test accuracy by epoch, one curve a run.

    Args:
        runs: From a run's name, such as "2 ranks", to its metrics, one dict an epoch
            with "epoch", "loss" and "test_accuracy" (0 to 1). At most four runs.

    Raises:
        ValueError: no run, more than four, a run without metrics, a metric that is
            missing, not finite, or an accuracy outside 0 to 1.
    """
    if not 1 <= len(runs) <= len(_CURVES):
        raise ValueError(f"runs holds {len(runs)} runs: expected 1 to {len(_CURVES)}.")
    curves = {str(name): _curve(str(name), metrics) for name, metrics in runs.items()}
    picture, board = _board(3.7, "Training, epoch by epoch")
    gutter = max(_width_of(name, SMALL) for name in curves)
    gutter = min(gutter, 1.2) + 0.6
    width = (WIDTH - 2 * MARGIN - 2 * 0.42 - 2 * gutter) / 2
    bottom, tall = 0.92, 2.05
    for panel, (what, heading) in enumerate(
        [("loss", "loss"), ("test_accuracy", "test accuracy (%)")]
    ):
        left = MARGIN + 0.42 + panel * (width + gutter + 0.42)
        axis = _chart(picture, left, bottom, width, tall)
        _panel(axis, curves, what)
        _write(board, left, bottom + tall + 0.13, heading, weight="bold")
        _write(board, left + width / 2, bottom - 0.4, "epoch", ha="center")
        _name_curves(board, axis, curves, what, (left, bottom, width, tall), gutter)
    note = _differences(curves)
    _write(board, MARGIN, 0.22, _cut(note, WIDTH - 2 * MARGIN, SMALL), color=QUIET)
    ends = "; ".join(
        f"{name}: loss from {_number(curve['loss'][0], 3)} to "
        f"{_number(curve['loss'][-1], 3)}, test accuracy "
        f"{100 * curve['test_accuracy'][-1]:.1f} % after "
        f"{_count(len(curve['epoch']), 'epoch')}"
        for name, curve in curves.items()
    )
    picture.summary = f"{ends}. {note}".strip()
    return picture


def _curve(name: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The metrics of one run as columns."""
    if not metrics:
        raise ValueError(f"The run {name!r} has no metrics.")
    columns: dict[str, list[float]] = {"epoch": [], "loss": [], "test_accuracy": []}
    for row, values in enumerate(metrics):
        for key, column in columns.items():
            if key not in values:
                raise ValueError(
                    f"Row {row} of the run {name!r} has no {key!r}: it has "
                    f"{_and(map(repr, values)) if values else 'nothing'}."
                )
            column.append(_finite(values[key], f"{key} in row {row} of {name!r}"))
        accuracy = columns["test_accuracy"][-1]
        if not 0 <= accuracy <= 1:
            raise ValueError(
                f"test_accuracy in row {row} of {name!r} is {accuracy}: expected a "
                "share from 0 to 1."
            )
    return columns


def _looks(curves: Mapping[str, Mapping]) -> Sequence[dict[str, Any]]:
    """The looks of one to four curves, as far apart as the number allows."""
    thick, middle, thin, _ = _CURVES
    return {1: [thin], 2: [thick, thin], 3: [thick, middle, thin]}.get(
        len(curves), _CURVES
    )


def _scaled(curve: Mapping[str, list[float]], what: str) -> list[float]:
    return [100 * v for v in curve[what]] if what == "test_accuracy" else curve[what]


def _panel(axis: Axes, curves: Mapping[str, Mapping], what: str) -> None:
    for looks, curve in zip(_looks(curves), curves.values(), strict=True):
        last = len(curve["epoch"]) - 1
        every = math.ceil((last + 1) / 10)
        axis.plot(
            curve["epoch"],
            _scaled(curve, what),
            markevery=list(range(last % every, last + 1, every)),
            clip_on=False,
            **looks,
        )
    values = [v for curve in curves.values() for v in _scaled(curve, what)]
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
    axis.set_ylim(low - room, high + room)
    axis.grid(axis="y", color="#E3E3E3", linewidth=0.8)
    axis.set_axisbelow(True)
    epochs = [epoch for curve in curves.values() for epoch in curve["epoch"]]
    room = 0.06 * (max(epochs) - min(epochs)) or 0.5
    axis.set_xlim(min(epochs) - room, max(epochs) + room)
    axis.xaxis.set_major_locator(
        MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10])
    )
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))


def _name_curves(
    board: Axes,
    axis: Axes,
    curves: Mapping[str, Mapping],
    what: str,
    place: tuple[float, float, float, float],
    gutter: float,
) -> None:
    """Each run's name beside the end of its curve, apart even where curves meet."""
    left, bottom, width, height = place
    low, high = axis.get_ylim()
    first, last = axis.get_xlim()

    def inches(x: float, y: float) -> tuple[float, float]:
        across = left + width * (x - first) / (last - first)
        return across, bottom + height * (y - low) / (high - low)

    ends = []
    for looks, (name, curve) in zip(_looks(curves), curves.items(), strict=True):
        x, y = inches(curve["epoch"][-1], _scaled(curve, what)[-1])
        ends.append((y, len(ends), x, name, looks))
    step = 0.2
    ends.sort(key=lambda end: (-round(end[0] / step), end[1]))
    # Each label wants to be level with its end; the one above pushes it down, and the
    # floor of the panel pushes all of them up again.
    levels: list[float] = []
    for y, *_ in ends:
        levels.append(min(y, levels[-1] - step) if levels else y)
    for index in range(len(levels) - 1, -1, -1):
        floor = bottom + 0.02 + (len(levels) - 1 - index) * step
        levels[index] = max(levels[index], floor)
    for level, (y, _, x, name, looks) in zip(levels, ends, strict=True):
        start = left + width + 0.16
        board.plot([x + 0.1, start], [y, level], color=LINE, lw=0.7)
        xs = [start, start + 0.14, start + 0.28]
        board.plot(xs, [level] * 3, markevery=[1], **looks)
        text = _cut(name, gutter - 0.6, SMALL)
        _write(board, start + 0.38, level, text)


def _differences(curves: Mapping[str, Mapping]) -> str:
    """How far apart the runs are at most, in words; "" for a single run."""
    first, *others = curves.values()
    if not others:
        return ""
    if any(other["epoch"] != first["epoch"] for other in others):
        return "The runs are not of the same epochs."
    worst = {}
    for what in ("loss", "test_accuracy"):
        columns = zip(*(_scaled(curve, what) for curve in curves.values()), strict=True)
        worst[what] = max(max(values) - min(values) for values in columns)
    if not any(worst.values()):
        return "The runs are equal in every epoch."
    return (
        "Largest difference between the runs in one epoch: loss "
        f"{_number(worst['loss'], 2)}, test accuracy "
        f"{_number(worst['test_accuracy'], 2)} percentage points."
    )


# --- a guess and what was measured ---------------------------------------------------


@_picture
def guess_and_measured(
    guess: float | None, measured: float, unit: str, title: str
) -> Picture:
    """The learner's guess as a bar, and below it the bar of what was measured.

    Args:
        guess: The guess, 0 or more; None if there is none yet.
        measured: The measured value, 0 or more.
        unit: The unit of both, such as "s" or "MB"; "" for a plain number.
        title: What was guessed.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is negative or not finite.
    """
    values = {"measured": _finite(measured, "measured")}
    if guess is not None:
        values["guess"] = guess = _finite(guess, "guess")
    for what, value in values.items():
        if value < 0:
            raise ValueError(f"{what} is {value}: expected 0 or more.")
    said = {name: f"{_spoken(v, 3)} {unit}".strip() for name, v in values.items()}
    picture, board = _board(1.95, title)
    left = MARGIN + 1.05
    room = max(_width_of(text, NORMAL, "bold") for text in said.values())
    room = min(room, 2.6)
    width = WIDTH - MARGIN - left - room - 0.15
    most = max(values.values()) or 1.0
    rows = (("guess", "your guess"), ("measured", "measured"))
    for row, (what, word) in enumerate(rows):
        y = 1.02 - row * 0.44
        _write(board, MARGIN, y + 0.16, word, size=NORMAL)
        if what not in said:
            looks = {"edge": LINE, "dashed": True, "color": QUIET}
            _box(board, left, y, 1.2, 0.32, "no guess yet", **looks)
            continue
        wide = max(width * values[what] / most, 0.03)
        looks = {"fill": _tint(BLUE, 0.6)}
        if what == "guess":
            looks = {"fill": _tint(ORANGE, 0.35), "hatch": "////"}
        _box(board, left, y, wide, 0.32, rounded=0.01, **looks)
        text = _cut(said[what], room, NORMAL, "bold")
        looks = {"size": NORMAL, "weight": "bold"}
        _write(board, left + wide + 0.1, y + 0.16, text, **looks)
    verdict = _compared(guess, values["measured"])
    _write(board, MARGIN, 0.24, verdict, color=QUIET)
    numbers = f"guess {said['guess']}, " if "guess" in said else ""
    picture.summary = f"{title}: {numbers}measured {said['measured']}. {verdict}"
    return picture


def _compared(guess: float | None, measured: float) -> str:
    if guess is None:
        return "No guess yet: answer the question above, then run this cell again."
    if guess == measured:
        return "The guess is exactly the measured value."
    if not guess or not measured:
        return "One of the two is 0, so there is no ratio."
    ratio = measured / guess
    if abs(ratio - 1) < 0.01:
        return "The guess is within 1 % of the measured value."
    if ratio > 1:
        return f"The measured value is {_spoken(ratio, 3)} times the guess."
    return f"The guess is {_spoken(1 / ratio, 3)} times the measured value."


# --- where training runs --------------------------------------------------------


@_picture
def four_ways() -> Picture:
    """One GPU or several, on one node or several: what is sent, and over what."""
    wide, tall, gap = (WIDTH - 2 * MARGIN - 0.3) / 2, 1.62, 0.3
    picture, board = _board(0.56 + 2 * tall + gap + 0.22, "Four ways to train")
    panels = (
        (1, 1, "1 node, 1 GPU", "Nothing is sent."),
        (1, 2, "1 node, several GPUs", "Inside the node: NVLink or PCIe."),
        (2, 1, "Several nodes, 1 GPU each", "Between nodes: the network."),
        (2, 2, "Several nodes, several GPUs each", "Both, and NVLink is the faster."),
    )
    for place, (nodes, gpus, name, sent) in enumerate(panels):
        row, column = divmod(place, 2)
        x = MARGIN + column * (wide + 0.3)
        y = 0.22 + (1 - row) * (tall + gap)
        _write(board, x, y + tall - 0.08, name, size=NORMAL, weight="bold")
        _write(board, x, y + 0.06, sent, color=QUIET)
        across = (wide - 0.5) / 2
        for node in range(nodes):
            left = x + node * (across + 0.5)
            _box(board, left, y + 0.25, across, 1.06, fill=MIST)
            _write(board, left + 0.1, y + 1.17, f"node {node}")
            side = (across - 0.2 - 0.32) / 2
            for gpu in range(gpus):
                start = left + 0.1 + gpu * (side + 0.32)
                looks = {"fill": _tint(SKY, 0.45)}
                _box(board, start, y + 0.37, side, 0.6, f"GPU {gpu}", **looks)
            if gpus > 1:
                ends = [(left + 0.1 + side + d, y + 0.67) for d in (0.02, 0.3)]
                _arrow(board, *ends, both=True, line=2.2, head=12)
        if nodes > 1:
            ends = [(x + across + d, y + 0.78) for d in (0.02, 0.48)]
            _arrow(board, *ends, both=True)
    picture.summary = "Four ways to train. " + " ".join(
        f"{name}: {sent[0].lower()}{sent[1:]}" for *_, name, sent in panels
    )
    return picture


@_picture
def ranks_on_nodes(
    nodes: int,
    gpus_per_node: int,
    *,
    asked: tuple[int, int] | None = None,
    guess: float | None = None,
) -> Picture:
    """Which rank drives which GPU, node by node.

    Args:
        nodes: 1 to 8.
        gpus_per_node: 1 to 8. One process drives each GPU.
        asked: The (node, local rank) of a GPU to point out, if any.
        guess: The rank that a learner expects there, if any.

    Raises:
        ValueError: there are too few or too many of something, or `asked` is not there.
    """
    for value, what in ((nodes, "nodes"), (gpus_per_node, "gpus_per_node")):
        _whole(value, what)
        if value > 8:
            raise ValueError(f"{what} is {value}: at most 8 can be drawn.")
    right = None if asked is None else costs.rank_of(*asked, gpus_per_node)
    if asked is not None and asked[0] >= nodes:
        raise ValueError(f"There is no node {asked[0]}: nodes are 0 to {nodes - 1}.")
    world = nodes * gpus_per_node
    tall = 1.06
    title = f"{_count(nodes, 'node')}, {_count(gpus_per_node, 'GPU')} each: {world} "
    title += "rank" if world == 1 else "ranks"
    note = "" if right is None else _rank_verdict(guess, right, world)
    low = 0.72 if right is not None else 0.22
    picture, board = _board(0.56 + nodes * (tall + 0.14) - 0.14 + low, title)
    side = (WIDTH - 2 * MARGIN - 0.92) / gpus_per_node - 0.1
    for node in range(nodes):
        y = low + (nodes - 1 - node) * (tall + 0.14)
        _box(board, MARGIN, y, WIDTH - 2 * MARGIN, tall, fill=MIST)
        _write(board, MARGIN + 0.12, y + tall / 2, f"node {node}", weight="bold")
        for local in range(gpus_per_node):
            rank = costs.rank_of(node, local, gpus_per_node)
            x = MARGIN + 0.9 + local * (side + 0.1)
            looks = {"fill": _tint(SKY, 0.3)}
            if rank == guess:
                looks |= {"fill": _tint(ORANGE, 0.3), "hatch": "////"}
            if rank == right:
                looks |= {"line": 3.0}
            long = "local rank" if side >= 0.85 else "local"
            text = f"rank {rank}\n{long} {local}"
            _box(board, x, y + 0.12, side, tall - 0.24, text, **looks)
    if note:
        entries = [("the GPU in question", {"fill": PAPER, "line": 3.0})]
        if guess is not None:
            looks = {"fill": _tint(ORANGE, 0.3), "hatch": "////"}
            entries.append(("your answer", looks))
        _key(board, 0.5, entries)
        _write(board, MARGIN, 0.22, note, color=QUIET)
    lines = "; ".join(
        f"node {node} has ranks {node * gpus_per_node} to "
        f"{(node + 1) * gpus_per_node - 1}"
        if gpus_per_node > 1
        else f"node {node} has rank {node}"
        for node in range(nodes)
    )
    asked_for = "" if asked is None else f"Local rank {asked[1]} on node {asked[0]}: "
    picture.summary = f"{title}: {lines}. {asked_for}{note}".strip()
    return picture


def _rank_verdict(guess: float | None, right: int, world: int) -> str:
    if guess is None:
        return f"It is rank {right}. No answer yet: answer the question above."
    if guess == right:
        return f"It is rank {right}, as you said."
    said = f"It is rank {right}. You said {_number(guess)}"
    if guess != int(guess) or not 0 <= guess < world:
        return f"{said}: there is no such rank here."
    return f"{said}, which is another GPU."


# --- the bandwidth ladder -------------------------------------------------------


class _Dot(NamedTuple):
    """A row of a chart with a logarithmic axis."""

    name: str
    value: float
    text: str
    place: str


_PLACE_LOOKS = {
    "in a GPU": {"marker": "o", "color": GREEN},
    "in a node": {"marker": "s", "color": BLUE},
    "between nodes": {"marker": "D", "color": VERMILLION},
}


def _dots(
    title: str,
    rows: Sequence[_Dot],
    ticks: Mapping[float, str],
    label: str,
    note: str,
    guess: tuple[str, float] | None = None,
) -> Picture:
    """Dots on a logarithmic axis, grouped by place, each with its value in words."""
    groups = list(dict.fromkeys(row.place for row in rows))
    step, left, room = 0.27, 1.95, 2.5
    tall = step * (len(rows) + len(groups)) + 0.1
    height = 0.56 + tall + 0.86
    picture, board = _board(height, title)
    bottom, width = 0.86, WIDTH - MARGIN - left - room
    low, high = (math.log10(edge) for edge in (min(ticks), max(ticks)))

    def across(value: float) -> float:
        return left + width * (math.log10(value) - low) / (high - low)

    for value, text in ticks.items():
        x = across(value)
        board.plot([x, x], [bottom, bottom + tall], color="#E3E3E3", lw=0.8)
        _write(board, x, bottom - 0.14, text, ha="center")
    _write(board, left + width / 2, bottom - 0.36, label, ha="center", color=QUIET)
    y = bottom + tall - step / 2
    for group in groups:
        _write(board, MARGIN, y, group, weight="bold")
        for row in (row for row in rows if row.place == group):
            y -= step
            x = across(row.value)
            _write(board, MARGIN + 0.1, y, _cut(row.name, left - 0.5, SMALL))
            board.plot([left, x], [y, y], color=LINE, lw=0.8)
            board.plot([x], [y], ms=7, mec=INK, mew=0.8, **_PLACE_LOOKS[row.place])
            if guess and guess[0] == row.name and guess[1] > 0:
                at = across(min(max(guess[1], min(ticks)), max(ticks)))
                looks = {"marker": "X", "ms": 9, "mec": INK, "mew": 0.8}
                board.plot([at], [y], color=ORANGE, **looks)
            _write(board, left + width + 0.15, y, _cut(row.text, room - 0.15, SMALL))
        y -= step
    _write(board, MARGIN, 0.22, _cut(note, WIDTH - 2 * MARGIN, SMALL), color=QUIET)
    return picture


def _speed(value: float) -> str:
    unit, size = ("TB/s", 1e12) if value >= 1e12 else ("GB/s", 1e9)
    return f"{_number(value / size, 3)} {unit}"


@_picture
def bandwidth_ladder(links: Sequence[costs.Link] = costs.LADDER) -> Picture:
    """How many bytes a second go one way over each link, on a logarithmic axis."""
    if not links:
        raise ValueError("links is empty: give at least one link.")
    rows = []
    for link in links:
        text = _speed(link.one_way)
        if link.direction == "both ways together":
            text += f"  ({link.stated} both ways)"
        elif "Gb/s" in link.stated:
            text += f"  ({link.stated})"
        elif link.direction == "shared":
            text += "  (reads and writes share it)"
        rows.append(_Dot(link.name, link.one_way, text, link.place))
    ticks = {1e9: "1 GB/s", 1e10: "10 GB/s", 1e11: "100 GB/s", 1e12: "1 TB/s"}
    ticks |= {1e13: "10 TB/s"}
    most, least = max(rows, key=_value_of), min(rows, key=_value_of)
    note = (
        f"{most.name} moves {_spoken(most.value / least.value, 2)} times as many bytes "
        f"a second as {least.name}."
    )
    label = "bytes a second, one way: each line is ten times the one before"
    picture = _dots("The bandwidth ladder", rows, ticks, label, note)
    said = "; ".join(f"{row.name} {_speed(row.value)}" for row in rows)
    picture.summary = f"Bandwidth one way: {said}. {note}"
    return picture


def _value_of(row: _Dot) -> float:
    return row.value


@_picture
def transfer_ladder(
    nbytes: float,
    links: Sequence[costs.Link] = costs.LADDER,
    *,
    guess: float | None = None,
    guess_for: str = "",
) -> Picture:
    """How long that many bytes take over each link, by its bandwidth alone.

    Args:
        nbytes: How many bytes go one way.
        links: The links.
        guess: Seconds that a learner expects for the link named `guess_for`.
        guess_for: The name of that link.
    """
    if not links:
        raise ValueError("links is empty: give at least one link.")
    if _finite(nbytes, "nbytes") <= 0:
        raise ValueError(f"nbytes is {nbytes}: expected more than 0.")
    size = _bytes(nbytes)
    rows = []
    for link in links:
        seconds = nbytes / link.one_way
        text = _duration(seconds)
        if link.direction == "shared":
            text += "  (to read it once)"
        rows.append(_Dot(link.name, seconds, text, link.place))
    first = math.floor(math.log10(min(row.value for row in rows)))
    last = math.ceil(math.log10(max(row.value for row in rows)))
    last += first == last
    ticks = {10.0**p: _duration(10.0**p) for p in range(first, last + 1)}
    note = f"Time = {size} / bandwidth one way, without latency."
    for row in rows:
        if row.name == guess_for and guess is None:
            note += " No guess yet: answer the question above, then run this again."
        elif row.name == guess_for:
            said = f"{guess:g} s" if guess <= 0 else _duration(guess)
            note += f" The cross is your guess for {row.name}: {said}."
    mark = None if guess is None else (guess_for, guess)
    title = f"{size}, over one link"
    picture = _dots(title, rows, ticks, "time, one way", note, mark)
    said = "; ".join(f"{row.name} {row.text}" for row in rows)
    picture.summary = f"{title}: {said}. {note}"
    return picture


def _bytes(number: float) -> str:
    """A size in decimal units: 4 B, 64 kB, 1.05 MB, 14 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{_number(number / size, 3)} {unit}"
    return f"{_number(number, 3)} B"


def _duration(seconds: float) -> str:
    """A time with three digits at most: 5 µs, 31.1 ms, 1.12 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.9995:
            return f"{_number(seconds / size, 3)} {unit}"
    return f"{_number(seconds / 1e-9, 3)} ns"


# --- the time of a message, measured --------------------------------------------


@_picture
def transfer_times(
    sizes: Sequence[float], seconds: Sequence[float], fit: costs.Transfer
) -> Picture:
    """Measured times of messages, with the latency and bandwidth that fit them.

    Args:
        sizes: Bytes of each message.
        seconds: How long each took, one way.
        fit: From `costs.fit_transfer`.
    """
    if len(sizes) != len(seconds) or not sizes:
        raise ValueError(f"There are {len(sizes)} sizes and {len(seconds)} times.")
    for value in (*sizes, *seconds):
        if _finite(value, "a size or time") <= 0:
            raise ValueError(f"A size or time is {value}: expected more than 0.")
    picture, board = _board(4.3, "The time of one message, by its size")
    left, bottom, width, tall = MARGIN + 0.72, 1.12, WIDTH - 2 * MARGIN - 0.82, 2.42
    axis = _chart(picture, left, bottom, width, tall)
    axis.set_xscale("log")
    axis.set_yscale("log")
    low, high = min(sizes) / 2, max(sizes) * 2
    curve = np.geomspace(low, high, 200)
    axis.plot(curve, [fit.seconds(float(n)) for n in curve], color=BLUE, lw=2.2)
    if fit.latency > 0:
        axis.plot([low, high], [fit.latency] * 2, color=INK, lw=1, ls=(0, (5, 3)))
    axis.plot(curve, curve / fit.bandwidth, color=VERMILLION, lw=1.4, ls=":")
    points = {"marker": "o", "ms": 7, "mec": INK, "mew": 0.8, "color": _tint(ORANGE, 1)}
    axis.plot(sizes, seconds, ls="none", zorder=5, **points)
    floor = min(*seconds, fit.latency or min(seconds)) / 4
    axis.set_xlim(low, high)
    axis.set_ylim(floor, max(*seconds, fit.seconds(high)) * 2)
    for ticks, name, say in (
        (axis.set_xticks, axis.get_xlim(), _bytes),
        (axis.set_yticks, axis.get_ylim(), _duration),
    ):
        first, last = (math.log10(edge) for edge in name)
        powers = range(math.ceil(first), math.floor(last) + 1)
        ticks([10.0**p for p in powers], labels=[say(10.0**p) for p in powers])
    axis.minorticks_off()
    axis.grid(color="#E3E3E3", linewidth=0.8)
    axis.set_axisbelow(True)
    _write(board, left, bottom + tall + 0.14, "time, one way", weight="bold")
    _write(board, left + width / 2, bottom - 0.38, "size of the message", ha="center")
    samples = (
        ("measured", {"marker": "o", "ls": "none", **points}),
        ("latency + size / bandwidth", {"color": BLUE, "lw": 2.2}),
        ("latency alone", {"color": INK, "lw": 1, "ls": (0, (5, 3))}),
        ("size / bandwidth alone", {"color": VERMILLION, "lw": 1.4, "ls": ":"}),
    )
    x = MARGIN
    for text, looks in samples:
        xs = [x + 0.15] if "marker" in looks else [x, x + 0.32]
        board.plot(xs, [0.5] * len(xs), **looks)
        _write(board, x + 0.42, 0.5, text, color=QUIET)
        x += 0.42 + _width_of(text, SMALL) + 0.28
    errors = [abs(fit.seconds(n) / t - 1) for n, t in zip(sizes, seconds, strict=True)]
    note = (
        f"Fitted: latency {_duration(fit.latency)}, bandwidth {_speed(fit.bandwidth)}. "
        f"The largest error of the fit is {100 * max(errors):.0f} %."
    )
    _write(board, MARGIN, 0.22, note, color=QUIET)
    measured = "; ".join(
        f"{_bytes(n)} {_duration(t)}" for n, t in zip(sizes, seconds, strict=True)
    )
    picture.summary = f"Measured, one way: {measured}. {note}"
    return picture


# --- a few measured values ------------------------------------------------------


@_picture
def bars(values: Mapping[str, float], unit: str, title: str, note: str = "") -> Picture:
    """Measured values as bars, one below the other, to the same scale.

    Args:
        values: From a name to its value, 0 or more; one to six of them.
        unit: The unit of all, such as "s" (then ms or µs where that reads better).
        title: What was measured.
        note: What follows from it, in one line.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is negative or not finite, or there are too many or none.
    """
    if not 1 <= len(values) <= 6:
        raise ValueError(f"values holds {len(values)} values: expected 1 to 6.")
    for name, value in values.items():
        if _finite(value, name) < 0:
            raise ValueError(f"{name} is {value}: expected 0 or more.")
    if unit == "s":
        unit, size = _unit_of(max(values.values()))
        values = {name: value / size for name, value in values.items()}
    said = {name: f"{_spoken(v, 3)} {unit}".strip() for name, v in values.items()}
    low = 0.5 if note else 0.22
    picture, board = _board(0.56 + 0.44 * len(values) + low, title)
    left = MARGIN + 0.2 + min(max(_width_of(name, NORMAL) for name in values), 2.4)
    room = max(_width_of(text, NORMAL, "bold") for text in said.values()) + 0.15
    width = WIDTH - MARGIN - left - room
    most = max(values.values()) or 1.0
    for row, (name, value) in enumerate(values.items()):
        y = low + 0.44 * (len(values) - 1 - row) + 0.06
        _write(board, MARGIN, y + 0.16, _cut(name, 2.4, NORMAL), size=NORMAL)
        wide = max(width * value / most, 0.03)
        _box(board, left, y, wide, 0.32, rounded=0.01, fill=_tint(BLUE, 0.6))
        looks = {"size": NORMAL, "weight": "bold"}
        _write(board, left + wide + 0.1, y + 0.16, said[name], **looks)
    _write(board, MARGIN, 0.22, _cut(note, WIDTH - 2 * MARGIN, SMALL), color=QUIET)
    numbers = ", ".join(f"{name} {text}" for name, text in said.items())
    picture.summary = f"{title}: {numbers}. {note}".strip()
    return picture


# --- devices: what fills them, and who is idle -----------------------------------

# In the order in which they come into being during a training step.
_HOLDS: dict[str, dict[str, Any]] = {
    "parameters": {"fill": _tint(BLUE, 0.35)},
    "gradients": {"fill": _tint(GREEN, 0.3), "hatch": "////"},
    "optimizer state": {"fill": _tint(PURPLE, 0.4), "hatch": "xxxx"},
    "activations": {"fill": _tint(ORANGE, 0.4), "hatch": "\\\\\\\\"},
    "other": {"fill": MIST, "hatch": "...."},
}


@_picture
def device_memory(
    devices: Mapping[str, Mapping[str, float]],
    *,
    capacity: float | None = None,
    title: str = "Memory of each device",
    note: str = "",
) -> Picture:
    """What fills the memory of each device, as bars to the same scale.

    Args:
        devices: From a device's name, such as "cuda:0", to its bytes by category:
            "parameters", "gradients", "optimizer state", "activations", "other".
            A category that is left out is 0. One to eight devices.
        capacity: Bytes that each device has, drawn as a line if given.
        title: What the picture shows, such as "At the peak of a training step".
        note: What follows from it, in one line.

    Raises:
        TypeError: an amount is not a number.
        ValueError: there is no device or too many, a category is unknown, or an
            amount is negative or not finite.
    """
    if not 1 <= len(devices) <= 8:
        raise ValueError(f"There are {len(devices)} devices: expected 1 to 8.")
    rows = {str(name): _held_by(str(name), held) for name, held in devices.items()}
    totals = {name: math.fsum(held.values()) for name, held in rows.items()}
    most = max([*totals.values(), capacity or 0.0]) or 1.0
    unit, size = _binary_unit(most)
    said = {
        name: f"{_number(total / size, 3)} {unit}" for name, total in totals.items()
    }
    step = 0.5
    low = 0.84 if note else 0.56
    head = 0.2 if capacity else 0.0
    picture, board = _board(0.52 + head + step * len(rows) + low, title)
    left = MARGIN + 0.16 + min(max(_width_of(name, NORMAL) for name in rows), 1.6)
    room = max(_width_of(text, NORMAL, "bold") for text in said.values()) + 0.2
    inch = (WIDTH - MARGIN - left - room) / most
    for place, (name, held) in enumerate(rows.items()):
        y = low + step * (len(rows) - 1 - place)
        middle = y + step / 2
        _write(board, MARGIN, middle, _cut(name, 1.6, NORMAL), size=NORMAL)
        x = left
        for category, amount in held.items():
            wide = amount * inch
            label = _first_that_fits(
                (f"{category} {_number(amount / size, 3)}", _number(amount / size, 3)),
                wide - 0.14,
            )
            if amount:
                looks = {"rounded": 0.0, **_HOLDS[category]}
                _box(board, x, y + 0.06, wide, step - 0.12, label, **looks)
            x += wide
        looks = {"size": NORMAL, "weight": "bold"}
        looks["bbox"] = {"fc": "white", "ec": "none", "pad": 1.5}  # above the limit
        _write(board, x + 0.1, middle, said[name], **looks)
    if capacity:
        x, top = left + capacity * inch, low + step * len(rows)
        board.plot([x, x], [low, top], color=VERMILLION, lw=1.6, ls=(0, (4, 2)))
        text = f"each has {_number(capacity / size, 3)} {unit}"
        half = _width_of(text, SMALL) / 2
        at = min(max(x, MARGIN + half), WIDTH - MARGIN - half)
        _write(board, at, top + 0.1, text, ha="center", color=QUIET)
    used = [what for what in _HOLDS if any(held.get(what) for held in rows.values())]
    _key(board, low - 0.28, [(what, _HOLDS[what]) for what in used])
    _write(board, MARGIN, 0.22, _cut(note, WIDTH - 2 * MARGIN, SMALL), color=QUIET)
    lines = []
    for name, held in rows.items():
        parts = [
            f"{what} {_number(amount / size, 3)}"
            for what, amount in held.items()
            if amount
        ]
        lines.append(f"{name} holds {said[name]} ({', '.join(parts) or 'nothing'})")
    limit = f" Each has {_number(capacity / size, 3)} {unit}." if capacity else ""
    text = f"{title.rstrip('.')}. {'; '.join(lines)}.{limit} {note}"
    picture.summary = text.strip()
    return picture


def _held_by(device: str, held: Mapping[str, float]) -> dict[str, float]:
    """Bytes by category, in the order of the key."""
    for what, amount in held.items():
        if what not in _HOLDS:
            kinds = _and(map(repr, _HOLDS))
            raise ValueError(f"{device} holds {what!r}: the categories are {kinds}.")
        if _finite(amount, f"{what} of {device}") < 0:
            raise ValueError(f"{what} of {device} is {amount}: expected 0 or more.")
    return {what: held[what] for what in _HOLDS if what in held}


def _binary_unit(nbytes: float) -> tuple[str, float]:
    """The unit in which an amount of memory is easy to read, and its bytes."""
    for unit, size in (("TiB", costs.TiB), ("GiB", costs.GiB), ("MiB", costs.MiB)):
        if nbytes >= size:
            return unit, size
    return ("KiB", costs.KiB) if nbytes >= costs.KiB else ("B", 1)


def _first_that_fits(texts: Sequence[str], width: float) -> str:
    """The first text that is not wider than that, or ""."""
    return next((text for text in texts if _width_of(text, SMALL) <= width), "")


class Work(NamedTuple):
    """What one device did from `start` to `stop`, in seconds on a clock all share.

    `kind` is "forward", "backward", "optimizer" or "transfer". `label` is for the
    bar, such as the number of a micro-batch.
    """

    start: float
    stop: float
    kind: str
    label: str = ""


_WORKS: dict[str, dict[str, Any]] = {
    "forward": {"fill": _tint(BLUE, 0.35)},
    "backward": {"fill": _tint(GREEN, 0.3), "hatch": "////"},
    "optimizer": {"fill": _tint(PURPLE, 0.45), "hatch": "...."},
    "transfer": {"fill": _tint(ORANGE, 0.75), "hatch": "xxxx"},
}
_IDLE = {"fill": PAPER, "edge": LINE, "dashed": True}


@_picture
def device_timeline(
    devices: "Mapping[str, Iterable[tuple]] | Timeline",
    *,
    title: str = "Who is idle",
    note: str = "",
    span: float | None = None,
) -> Picture:
    """One row a device: what it did and when, and how much of the time it was idle.

    Work of the same kind and label that follows without a gap is one bar. Of a label
    that is too long for its bar the last word is drawn, or nothing. Where nothing was
    done a dashed frame stands for idle time.

    Args:
        devices: The `gpus.timeline()` of virtual GPUs; or from a device's name to its
            `Work` (or tuples like it), in any order. One to eight devices. A device
            without work was idle all the time.
        title: What the picture shows.
        note: What follows from it, in one line.
        span: Seconds to draw, so that two pictures have the same scale. The time
            that was needed by all, if left out.

    Raises:
        TypeError: a time is not a number.
        ValueError: no work at all, work that ends before it starts or overlaps other
            work of its device, an unknown kind, or too many devices.
    """
    devices = getattr(devices, "intervals", devices)
    if not 1 <= len(devices) <= 8:
        raise ValueError(f"There are {len(devices)} devices: expected 1 to 8.")
    rows = {str(name): _joined(str(name), works) for name, works in devices.items()}
    every = [work for row in rows.values() for work in row]
    if not every:
        raise ValueError("There is nothing to draw: no device did anything.")
    origin = min(work.start for work in every)
    needed = max(work.stop for work in every) - origin
    shown = needed if span is None else _finite(span, "span")
    if shown < needed * (1 - 1e-9) or shown <= 0:
        raise ValueError(
            f"span is {shown:g} s, but the work took {needed:g} s: expected no less."
        )
    idle = {name: _idle_share(row, needed) for name, row in rows.items()}
    unit, size = _unit_of(shown)
    step = 0.52
    low = 1.16 if note else 0.88
    picture, board = _board(0.52 + 0.22 + step * len(rows) + low, title)
    left = MARGIN + 0.16 + min(max(_width_of(name, NORMAL) for name in rows), 1.6)
    room = _width_of("100 %", NORMAL, "bold") + 0.16
    width = WIDTH - MARGIN - left - room
    inch, top = width / shown, low + step * len(rows)
    axis = _chart(picture, left, low - 0.04, width, step * len(rows) + 0.04)
    axis.set_xlim(0, shown / size)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axis.grid(axis="x", color="#E3E3E3", linewidth=0.8)
    axis.set_axisbelow(True)
    _write(board, left + width, low - 0.4, f"time ({unit})", ha="right")
    _write(board, WIDTH - MARGIN, top + 0.1, "idle", ha="right", weight="bold")
    for place, (name, row) in enumerate(rows.items()):
        y = low + step * (len(rows) - 1 - place)
        _write(board, MARGIN, y + step / 2, _cut(name, 1.6, NORMAL), size=NORMAL)
        percent = f"{100 * idle[name]:.0f} %"
        looks = {"size": NORMAL, "ha": "right", "weight": "bold"}
        _write(board, WIDTH - MARGIN, y + step / 2, percent, **looks)
        end = origin
        for work in [*row, Work(origin + needed, origin + needed, "idle")]:
            gap = work.start - end
            if gap * inch > 0.03:
                x, wide = left + (end - origin) * inch + 0.015, gap * inch - 0.03
                word = _first_that_fits(("idle",), wide - 0.1)
                looks = {"rounded": 0.02, "color": QUIET, **_IDLE}
                _box(board, x, y + 0.12, wide, step - 0.24, word, **looks)
            if work.kind != "idle":
                x = left + (work.start - origin) * inch
                wide = max((work.stop - work.start) * inch, 0.015)
                # Of "micro-batch 3" the number is what matters.
                words = (work.label, work.label.rpartition(" ")[2])
                label = _first_that_fits(words, wide - 0.04)
                looks = {"rounded": 0.0, "line": 0.6, **_WORKS[work.kind]}
                bar = _box(board, x, y + 0.07, wide, step - 0.14, **looks)
                if label:  # in less room than a box leaves for its text
                    text = _write(board, x + wide / 2, y + step / 2, label, ha="center")
                    if "hatch" in looks:
                        paper = {"facecolor": looks["fill"], "edgecolor": "none"}
                        text.set_bbox({**paper, "pad": 0.5})
                    picture.labels.append((text, bar))
            end = work.stop
    used = [kind for kind in _WORKS if any(work.kind == kind for work in every)]
    key = [(kind, _WORKS[kind]) for kind in used]
    if any(idle.values()):
        key.append(("idle", _IDLE))
    _key(board, 0.5 if note else 0.22, key)
    _write(board, MARGIN, 0.22, _cut(note, WIDTH - 2 * MARGIN, SMALL), color=QUIET)
    lines = []
    for name, row in rows.items():
        times = [
            f"{kind} {_number(spent / size, 3)}"
            for kind in _WORKS
            if (spent := math.fsum(w.stop - w.start for w in row if w.kind == kind))
        ]
        lines.append(
            f"{name} {', '.join(times) or 'nothing'}, idle {100 * idle[name]:.0f} %"
        )
    text = (
        f"{title.rstrip('.')}. {_number(needed / size, 3)} {unit} in all. Times in "
        f"{unit}: {'; '.join(lines)}. {note}"
    )
    picture.summary = text.strip()
    return picture


def _joined(device: str, works: Iterable[tuple]) -> list[Work]:
    """The work of a device in order, with equal neighbours made one."""
    row: list[Work] = []
    for work in sorted(_work(device, values) for values in works):
        last = row[-1] if row else None
        # Times are sums of floats: a gap or an overlap of a billionth is none.
        slack = 1e-9 * max(abs(work.stop), 1e-6)
        if last and work.start < last.stop - slack:
            raise ValueError(
                f"{device} did two things at once: {last.kind} until {last.stop:g} s, "
                f"and {work.kind} from {work.start:g} s."
            )
        same = last and (last.kind, last.label) == (work.kind, work.label)
        if same and work.start <= last.stop + slack:
            row[-1] = last._replace(stop=max(last.stop, work.stop))
        else:
            row.append(work)
    return row


def _work(device: str, values: Any) -> Work:
    try:
        if hasattr(values, "phase"):  # an interval of a Timeline
            kind = values.phase if values.kind == "compute" else "transfer"
            values = (values.start, values.stop, kind, values.label)
        work = Work(*values)
    except TypeError:
        raise ValueError(
            f"Work of {device} is {values!r}: expected (start, stop, kind, label)."
        ) from None
    if work.kind not in _WORKS:
        kinds = _and(map(repr, _WORKS))
        raise ValueError(f"The kind {work.kind!r} on {device} is unknown: use {kinds}.")
    start = _finite(work.start, f"The start of {work.kind} on {device}")
    stop = _finite(work.stop, f"The stop of {work.kind} on {device}")
    if stop < start:
        raise ValueError(
            f"{work.kind} on {device} ends at {stop}, before it starts at {start}."
        )
    return Work(start, stop, work.kind, str(work.label))


def _idle_share(row: Sequence[Work], needed: float) -> float:
    if not needed:
        return 0.0
    return max(0.0, 1 - math.fsum(work.stop - work.start for work in row) / needed)


# --- how many micro-batches -------------------------------------------------------


@_picture
def micro_batch_times(
    measured: Mapping[int, float],
    formula: Callable[[int], float],
    *,
    best: float | None = None,
    one_device: float | None = None,
) -> Picture:
    """How long a batch takes in that many micro-batches: measured, and by a formula.

    Args:
        measured: From the number of micro-batches to the seconds of a batch. Two to
            ten numbers.
        formula: From a number of micro-batches to seconds, for the curve.
        best: The number at which the formula is least, if it is to be marked.
        one_device: Seconds of the same batch on one device, drawn as a line if given.

    Raises:
        TypeError: a time is not a number.
        ValueError: there are too few or too many numbers, a number of micro-batches
            is not whole or below 1, or a time is not above 0.
    """
    if not 2 <= len(measured) <= 10:
        raise ValueError(f"measured holds {len(measured)} times: expected 2 to 10.")
    for number, seconds in measured.items():
        _whole(number, "a number of micro-batches")
        if _finite(seconds, f"the time of {number}") <= 0:
            raise ValueError(f"The time of {number} is {seconds}: expected above 0.")
    numbers = sorted(measured)
    curve = {m: formula(m) for m in range(numbers[0], numbers[-1] + 1)}
    lines = [one_device] if one_device else []
    most = max([*measured.values(), *curve.values(), *lines])
    unit, size = _unit_of(most)
    picture, board = _board(4.1, "How many micro-batches?")
    left, bottom, width, tall = MARGIN + 0.62, 1.3, WIDTH - 2 * MARGIN - 0.72, 2.06
    axis = _chart(picture, left, bottom, width, tall)
    axis.set_xscale("log", base=2)
    axis.set_xlim(numbers[0] / 1.15, numbers[-1] * 1.15)
    axis.set_xticks(numbers, labels=[str(number) for number in numbers])
    axis.minorticks_off()
    axis.set_ylim(0, 1.12 * most / size)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axis.grid(color="#E3E3E3", linewidth=0.8)
    axis.set_axisbelow(True)
    by_formula = {"color": BLUE, "lw": 2.2}
    points = {"marker": "o", "ms": 8, "mec": INK, "mew": 0.8, "color": _tint(ORANGE, 1)}
    alone = {"color": INK, "lw": 1.2, "ls": (0, (5, 3))}
    axis.plot(list(curve), [s / size for s in curve.values()], **by_formula)
    axis.plot(numbers, [measured[m] / size for m in numbers], ls="none", **points)
    samples = [
        ("measured", {"ls": "none", **points}),
        ("by the formula", by_formula),
    ]
    if one_device:
        axis.axhline(one_device / size, **alone)
        samples.append(("one device", alone))
    if best is not None:
        marked = {"color": VERMILLION, "lw": 1.6, "ls": ":"}
        axis.axvline(best, **marked)
        samples.append(("best by the formula", marked))
    _write(board, left, bottom + tall + 0.14, f"time ({unit})", weight="bold")
    _write(board, left + width / 2, bottom - 0.4, "micro-batches", ha="center")
    x = MARGIN
    for text, looks in samples:
        xs = [x + 0.15] if "marker" in looks else [x, x + 0.32]
        board.plot(xs, [0.54] * len(xs), **looks)
        _write(board, x + 0.42, 0.54, text, color=QUIET)
        x += 0.42 + _width_of(text, SMALL) + 0.28
    fastest = min(numbers, key=measured.__getitem__)
    note = f"Fastest of those measured: {fastest} micro-batches."
    if best is not None:
        note += f" Best by the formula: {_number(float(best), 3)}."
    _write(board, MARGIN, 0.22, note, color=QUIET)
    said = ", ".join(f"{m}: {_number(measured[m] / size, 3)}" for m in numbers)
    line = f" One device: {_number(one_device / size, 3)}." if one_device else ""
    picture.summary = f"Time in {unit} by micro-batches. {said}.{line} {note}"
    return picture


# --- the steps of DataParallel -----------------------------------------------------


class _DataParallelStep(NamedTuple):
    """One of the eight steps: its name, and what belongs to it.

    `sends` are (kind, phase) of transfers; those before `computes` are drawn first.
    """

    name: str
    sends: tuple[tuple[str, str], ...] = ()
    computes: str = ""
    returns: tuple[tuple[str, str], ...] = ()


_DATA_PARALLEL = (
    _DataParallelStep("model to the default GPU", sends=(("to", "setup"),)),
    _DataParallelStep("scatter the batch", sends=(("scatter", "forward"),)),
    _DataParallelStep("replicate the model", sends=(("broadcast", "forward"),)),
    _DataParallelStep("parallel_apply: forward", computes="replicas"),
    _DataParallelStep("gather the outputs", sends=(("gather", "forward"),)),
    _DataParallelStep("loss", computes="loss"),
    _DataParallelStep(
        "backward, gradients reduced",
        sends=(("scatter", "backward"),),
        computes="backward",
        returns=(("reduce", "backward"),),
    ),
    _DataParallelStep("update", computes="optimizer"),
)


@_picture
def data_parallel_steps(
    transfers: "Sequence[Transfer]",
    timeline: "Timeline",
    *,
    title: str = "One training step with DataParallel",
) -> Picture:
    """The eight steps of `nn.DataParallel`: who sends what to whom, and who computes.

    Args:
        transfers: The transfers of virtual GPUs, recorded from the moment when the
            model moved to its GPU to the optimizer's step.
        timeline: The timeline of the same record.
        title: What the picture shows.

    Raises:
        ValueError: nothing was scattered, or there are more than four GPUs.
    """
    devices = [name for name in timeline.intervals if name != "cpu"]
    if len(devices) > 4:
        raise ValueError(f"There are {len(devices)} GPUs: expected 1 to 4.")
    rows = _data_parallel_rows(transfers, timeline)
    if not rows[1][0]:
        raise ValueError("Nothing was scattered: record a step with nn.DataParallel.")
    lanes = ["cpu", *devices]
    arrow, box, pad = 0.13, 0.24, 0.16
    heights = [
        pad + arrow * (len(out) + len(back)) + box * bool(busy)
        for out, busy, back in rows
    ]
    picture, board = _board(0.52 + 0.3 + sum(heights) + 0.5, title)
    left, right = MARGIN + 2.75, WIDTH - MARGIN - 1.55
    across = (right - left) / (len(lanes) - 1) if len(lanes) > 1 else 0
    places = {name: left + i * across for i, name in enumerate(lanes)}
    top = 0.5 + sum(heights)
    for name, x in places.items():
        _write(board, x, top + 0.14, "CPU" if name == "cpu" else name, ha="center")
        board.plot([x, x], [0.5, top], color="#D0D0D0", lw=1.0, zorder=0)
    said = []
    y = top
    for number, (step, height, row) in enumerate(
        zip(_DATA_PARALLEL, heights, rows, strict=True), 1
    ):
        board.plot([MARGIN, WIDTH - MARGIN], [y, y], color="#E8E8E8", lw=0.8, zorder=0)
        _write(board, MARGIN, y - height / 2, str(number), weight="bold", size=NORMAL)
        _write(board, MARGIN + 0.25, y - height / 2, step.name, size=NORMAL)
        out, busy, back = row
        at = y - pad / 2
        for sent in (out, busy, back):
            if sent is busy:
                for name in busy:
                    looks = {"rounded": 0.03, "fill": _tint(BLUE, 0.35)}
                    _box(
                        board, places[name] - 0.17, at - box + 0.03, 0.34, 0.18, **looks
                    )
                at -= box * bool(busy)
                continue
            if sent:
                text = _cut(_each(sent), 1.4, SMALL)
                middle = at - arrow * len(sent) / 2
                _write(board, right + 0.25, middle, text, color=QUIET)
            for source, destination, _ in sent:
                at -= arrow
                ends = (places[source], places[destination])
                toward = 0.03 if ends[1] > ends[0] else -0.03
                start = (ends[0] + toward, at + arrow / 2)
                _arrow(board, start, (ends[1] - toward, at + arrow / 2), head=8)
                board.plot([ends[0]], [at + arrow / 2], "o", ms=3, color=INK)
        y -= height
        said.append(f"{number}. {step.name}: {_step_in_words(row)}")
    board.plot([MARGIN, WIDTH - MARGIN], [y, y], color="#E8E8E8", lw=0.8, zorder=0)
    _key(board, 0.22, [("computes", {"fill": _tint(BLUE, 0.35)})])
    looks = {"color": QUIET}
    _arrow(board, (MARGIN + 1.4, 0.22), (MARGIN + 1.75, 0.22), head=8)
    _write(board, MARGIN + 1.83, 0.22, "sends; on the right: how many bytes", **looks)
    picture.summary = f"{title}. {' '.join(said)}"
    return picture


def _data_parallel_rows(
    transfers: "Sequence[Transfer]", timeline: "Timeline"
) -> list[tuple[list[tuple[str, str, int]], list[str], list[tuple[str, str, int]]]]:
    """For each step: what is sent first, who computes, what is sent then."""
    # Modules in which something was scattered: the wrappers. Their own work is packing.
    wrappers = {t.module for t in transfers if t.kind == "scatter"} - {""}
    busy: dict[str, list[str]] = {}
    for device, row in timeline.intervals.items():
        for work in row:
            if work.kind != "compute" or device == "cpu":
                continue
            what = work.phase
            if what == "forward":
                what = "replicas" if work.module else "loss"
                what = "packing" if work.module in wrappers else what
            if device not in busy.setdefault(what, []):
                busy[what].append(device)

    def sent(wanted: tuple[tuple[str, str], ...]) -> list[tuple[str, str, int]]:
        total: dict[tuple[str, str], int] = {}
        for t in transfers:
            if (t.kind, t.phase) in wanted:
                pair = (t.source, t.destination)
                total[pair] = total.get(pair, 0) + t.bytes
        return [(*pair, nbytes) for pair, nbytes in sorted(total.items())]

    return [
        (sent(step.sends), busy.get(step.computes, []), sent(step.returns))
        for step in _DATA_PARALLEL
    ]


def _each(sent: Sequence[tuple[str, str, int]]) -> str:
    """ "3 × 547 kB", or what is sent in all where the messages differ."""
    sizes = {nbytes for *_, nbytes in sent}
    if len(sizes) > 1:
        return f"{_bytes(sum(nbytes for *_, nbytes in sent))} in all"
    size = _bytes(sizes.pop())
    return f"{len(sent)} × {size}" if len(sent) > 1 else size


def _step_in_words(
    row: tuple[list[tuple[str, str, int]], list[str], list[tuple[str, str, int]]],
) -> str:
    out, busy, back = row
    parts = []
    for sent in (out, busy, back):
        if sent is busy and busy:
            parts.append(f"{_and(busy)} {'compute' if len(busy) > 1 else 'computes'}")
        elif sent:
            sources = list(dict.fromkeys(source for source, *_ in sent))
            goals = list(dict.fromkeys(goal for _, goal, _ in sent))
            verb = "send" if len(sources) > 1 else "sends"
            parts.append(f"{_and(sources)} {verb} {_each(sent)} to {_and(goals)}")
    return f"{', '.join(parts) or 'nothing'}."
