"""Charts: bars, stacked bars, curves. And what was guessed beside what was measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from course_utils.pictures import draw, words
from course_utils.pictures.draw import LOOKS, MARGIN, NORMAL, SMALL, WIDTH, Picture

# --- bars -----------------------------------------------------------------------------

_GUESS = "your guess"  # with which the name of a guess begins
_FAR = 2.0  # a guess that is this many times as long as all else is drawn torn off


@draw.picture
def bars(
    values: Mapping[str, float],
    unit: str,
    title: str,
    note: str = "",
    *,
    fair: bool = True,
) -> Picture:
    """Measured values as bars, one below the other, to the same scale.

    A value whose name begins with "your guess" is hatched yellow. A guess that is far
    too large is drawn torn off, so that the others stay visible.

    Args:
        values: From a name to its value, 0 or more; one to six of them.
        unit: The unit of all, such as "s" (then ms or µs where that reads better).
        title: What was measured.
        note: What follows from it, in one line or in several.
        fair: Whether the values can be compared. If not, the bars are hatched: say in
            the note why.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is negative or not finite, or there are too many or none.
    """
    words.few(values, "values", 6)
    for name, value in values.items():
        words.not_negative(value, name)
    if unit == "s":
        unit, size = words.unit_of(max(values.values()))
        values = {name: value / size for name, value in values.items()}
    said = {name: _with_unit(value, unit) for name, value in values.items()}
    picture = _bars(values, said, title, note, fair=fair)
    numbers = ", ".join(f"{name} {text}" for name, text in said.items())
    picture.summary = f"{title}: {numbers}. {' '.join(note.split())}".strip()
    return picture


@draw.picture
def guess_and_measured(
    guess: float | None, measured: float, unit: str, title: str
) -> Picture:
    """The learner's guess as a bar, and below it the bar of what was measured.

    Args:
        guess: The guess; None if there is none yet. Below 0 it has no bar.
        measured: The measured value, 0 or more.
        unit: The unit of both, such as "s" or "MB"; "" for a plain number.
        title: What was guessed.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is not finite, or `measured` is negative.
    """
    measured = words.not_negative(measured, "measured")
    said = {"measured": _with_unit(measured, unit)}
    if guess is not None:
        guess = words.finite(guess, "guess")
        said[_GUESS] = _with_unit(guess, unit)
    note = _compared(guess, measured)
    picture = _bars({_GUESS: guess, "measured": measured}, said, title, note)
    numbers = f"guess {said[_GUESS]}, " if _GUESS in said else ""
    picture.summary = f"{title}: {numbers}measured {said['measured']}. {note}"
    return picture


def _with_unit(value: float, unit: str) -> str:
    number = words.spoken(value, 3)
    if unit in ("×", "times"):
        return f"{number}×"
    if value == 1 and len(unit) > 2:
        unit = unit.removesuffix("s")  # 1 byte; but 1 ms
    return f"{number} {unit}".strip()


def _bars(
    values: Mapping[str, float | None],
    said: Mapping[str, str],
    title: str,
    note: str,
    *,
    fair: bool = True,
) -> Picture:
    notes = note.splitlines()
    low, step = 0.22 + 0.28 * len(notes), 0.44
    picture, board = draw.board(0.56 + step * len(values) + low, title)
    left = MARGIN + 0.2 + min(max(draw.width_of(name, NORMAL) for name in values), 2.4)
    measured = [v for name, v in values.items() if not name.startswith(_GUESS)]
    most = max((v for v in values.values() if v is not None), default=0.0)
    if measured and max(measured):
        most = min(most, _FAR * max(measured))
    far = {name for name, value in values.items() if value is not None and value > most}
    said = {name: text + " (bar cut)" * (name in far) for name, text in said.items()}
    room = max(draw.width_of(text, NORMAL, "bold") for text in said.values())
    room = min(room, 2.6)
    width = WIDTH - MARGIN - left - room - 0.15
    for row, (name, value) in enumerate(values.items()):
        y = low + step * (len(values) - 1 - row) + 0.06
        draw.write(board, MARGIN, y + 0.16, draw.cut(name, 2.4, NORMAL), size=NORMAL)
        if value is None:
            draw.box(board, left, y, 1.2, 0.32, "no guess yet", **LOOKS["idle"])
            continue
        wide = max(width * min(value / (most or 1.0), 1.0), 0.03)
        looks = LOOKS["guess" if name.startswith(_GUESS) else "measured"]
        if not fair:
            looks = {**looks, "fill": draw.MIST, "hatch": "////"}
        draw.box(board, left, y, wide, 0.32, **{**looks, "rounded": 0.01})
        if name in far:
            for x in (left + wide - 0.28, left + wide - 0.16):
                board.plot(
                    [x - 0.06, x + 0.06], [y - 0.02, y + 0.34], color=draw.PAPER, lw=4
                )
        text = draw.cut(said[name], room, NORMAL, "bold")
        looks = {"size": NORMAL, "weight": "bold"}
        draw.write(board, left + wide + 0.1, y + 0.16, text, **looks)
    for row, line in enumerate(reversed(notes)):
        draw.note(board, line, 0.22 + 0.28 * row)
    return picture


def _compared(guess: float | None, measured: float) -> str:
    if guess is None:
        return "No guess yet: answer the question above, then run this cell again."
    if guess == measured:
        return "The guess is exactly the measured value."
    if guess < 0:
        return "The guess is below 0, and the measured value is not."
    if not guess or not measured:
        return "One of the two is 0, so there is no ratio."
    ratio = measured / guess
    if abs(ratio - 1) < 0.01:
        return "The guess is within 1 % of the measured value."
    if ratio > 1:
        return f"The measured value is {words.spoken(ratio, 3)} times the guess."
    return f"The guess is {words.spoken(1 / ratio, 3)} times the measured value."


# --- stacked bars against limits ------------------------------------------------------


def stacked(
    rows: Mapping[str, Mapping[str, float]],
    limits: Mapping[str, float],
    title: str,
    said: Mapping[str, Sequence[str]],
    *,
    room_left: bool = False,
    aside: str = "",
) -> Picture:
    """Bars of parts to the same scale, with limits as lines; no summary yet.

    Args:
        rows: From a name to its parts: from a name in `draw.LOOKS` to an amount.
        limits: From a name to an amount, rising.
        title: What the picture shows.
        said: One or two lines for each row, at its right.
        room_left: Whether to frame what is free below the last limit.
        aside: A few words above what is said.
    """
    step, low = 0.54, 0.58
    most = max(*(sum(parts.values()) for parts in rows.values()), *limits.values())
    left = MARGIN + 0.16 + min(max(draw.width_of(name, NORMAL) for name in rows), 1.7)
    room = 0.16 + max(
        draw.width_of(text, NORMAL, "bold") for lines in said.values() for text in lines
    )
    inch = (WIDTH - MARGIN - left - room) / most
    lines = [left + amount * inch for amount in limits.values()]
    stop = WIDTH - MARGIN - (draw.width_of(aside, SMALL) + 0.1) * bool(aside)
    levels = _levels([*limits], lines, stop)
    head = 0.19 * (1 + max(level for level, _ in levels))
    bars = {name: _parts_of_a_bar(of, left, inch, lines) for name, of in rows.items()}
    ends = {name: left + sum(of.values()) * inch for name, of in rows.items()}
    free_until = lines[-1] if room_left else WIDTH - MARGIN - room
    # What has no name in its part is said beside the bar; with no room there, below it.
    notes = {
        name: ", ".join(f"{part.what} {part.number}" for part in bar if not part.text)
        for name, bar in bars.items()
    }
    below = dict.fromkeys(rows, 0.0)  # its height
    for name, note in notes.items():
        wide = draw.width_of(note, SMALL) > free_until - ends[name] - 0.14
        if note and (room_left or wide):
            below[name] = 0.2
    top = low + step * len(rows) + sum(below.values())
    picture, board = draw.board(0.54 + head + top, title)
    for name, x, (level, middle) in zip(limits, lines, levels, strict=True):
        y = top + 0.1 + 0.19 * level
        board.plot([x, x], [low, y - 0.08], zorder=2, **draw.LIMIT)
        draw.write(board, middle, y, name, ha="center", **draw.on_paper())
    y = top
    for name, bar in bars.items():
        y -= step + below[name]
        middle = y + below[name] + step / 2
        bottom, tall = middle - step / 2 + 0.07, step - 0.14  # of the bar
        draw.write(board, MARGIN, middle, draw.cut(name, 1.7, NORMAL), size=NORMAL)
        for part in bar:
            looks = {"rounded": 0.0, **LOOKS[part.what]}
            box = draw.box(board, part.left, bottom, part.width, tall, **looks)
            if part.text:
                draw.name(board, box, part.middle, middle, part.text)
        end, note = ends[name], notes[name]
        quiet = {"color": draw.QUIET, **draw.on_paper(1.5)}
        free = free_until - end
        if room_left and free > 0.02:
            looks = {"rounded": 0.0, **LOOKS["idle"]}
            draw.box(board, end, bottom, free, tall, **looks)
            text = draw.first_that_fits(["room left", "room"], free - 0.14)
            draw.write(board, end + free / 2, middle, text, ha="center", **quiet)
        if below[name]:
            draw.write(board, left, y + 0.13, note, **quiet)
        else:
            draw.write(board, end + 0.08, middle, note, **quiet)
        for place, text in enumerate(said[name]):
            looks = (
                {"weight": "normal"} if place else {"size": NORMAL, "weight": "bold"}
            )
            at = middle + (0.1 - 0.2 * place) * (len(said[name]) > 1)
            draw.write(board, WIDTH - MARGIN - room + 0.16, at, text, **looks)
    used = [what for what in LOOKS if any(parts.get(what) for parts in rows.values())]
    draw.key(board, low - 0.28, [(what, LOOKS[what]) for what in used])
    draw.write(board, WIDTH - MARGIN, top + 0.1, aside, ha="right", color=draw.QUIET)
    return picture


class _Part(NamedTuple):
    """A part of a bar: its place, and what is written in it if there is room."""

    what: str
    left: float
    width: float
    middle: float  # of the text
    text: str
    number: str


def _parts_of_a_bar(
    parts: Mapping[str, float], left: float, inch: float, lines: Sequence[float]
) -> list[_Part]:
    """The parts that are not empty, from left to right; no line crosses a text."""
    found = []
    for what, amount in parts.items():
        width, number = amount * inch, words.spoken(amount, 3)
        if amount:
            middle, free = free_part(left, left + width, lines)
            text = draw.first_that_fits((f"{what} {number}", number), free - 0.14)
            found.append(_Part(what, left, width, middle, text, number))
        left += width
    return found


def free_part(start: float, stop: float, lines: Sequence[float]) -> tuple[float, float]:
    """The middle and the width of the widest part that no line crosses."""
    edges = [start, *(x for x in lines if start < x < stop), stop]
    width, left = max((b - a, a) for a, b in zip(edges, edges[1:], strict=False))
    return left + width / 2, width


def _levels(
    names: Sequence[str], places: Sequence[float], stop: float
) -> list[tuple[int, float]]:
    """For names above lines, left of `stop`: a level with room, and the middle."""
    ends: list[float] = []
    found = []
    for name, x in zip(names, places, strict=True):
        half = draw.width_of(name, SMALL) / 2
        middle = min(max(x, MARGIN + half), stop - half)
        free = [k for k, end in enumerate(ends) if end + 0.12 < middle - half]
        level = free[0] if free else len(ends)
        if level == len(ends):
            ends.append(0.0)
        ends[level] = middle + half
        found.append((level, middle))
    return found


# --- curves ---------------------------------------------------------------------------


class Curve(NamedTuple):
    """Points, or a line through them; `looks` are matplotlib's.

    A value that is not finite is not drawn; where it is the last one, the line ends in
    a cross. `ends` are the lower and upper ends of the bar at each point, if any.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    looks: Mapping[str, Any]
    ends: tuple[Sequence[float], Sequence[float]] | None = None


class Axis(NamedTuple):
    """One axis of a panel; without edges or ticks they follow from the values.

    `whole` is for whole numbers. Of ticks that are too close the last is kept.
    """

    label: str = ""
    say: Callable[[float], str] = words.number
    log: bool = False
    edges: tuple[float, float] | None = None
    ticks: Mapping[float, str] | None = None
    whole: bool = False


class Panel(NamedTuple):
    """One diagram.

    `marks` are lines across it: ("x" or "y", place, looks). `regions` are parts of the
    x axis, (start, stop, names, whether it is shaded): the first name that fits is
    written above. `bands` are shaded parts of the y axis. `aside` stands at the right
    above it, `fill` shades the area below the first curve.
    """

    heading: str
    curves: Sequence[Curve]
    x: Axis = Axis()
    y: Axis = Axis()
    marks: Sequence[tuple[str, float, Mapping[str, Any]]] = ()
    regions: Sequence[tuple[float, float, Sequence[str], bool]] = ()
    bands: Sequence[tuple[float, float]] = ()
    aside: str = ""
    fill: bool = False


_POINT = {"ms": 6, "mec": draw.INK, "mew": 0.5, "lw": 1.6}  # unless looks say otherwise
_MOST_MARKERS = 12


def curves(
    title: str,
    panels: Sequence[Panel],
    *,
    note: str = "",
    more: Sequence[draw.Entry] = (),
    beside: bool = False,
    tall: float = 1.9,
) -> Picture:
    """Panels with curves, one key for all of them, and a note; no summary yet.

    Args:
        title: What the picture shows.
        panels: From top to bottom, or from left to right.
        note: What follows from it, in one line.
        more: Entries of the key besides the curves, such as marks.
        beside: Whether the panels lie beside each other.
        tall: Inches of a panel.
    """
    named = {c.name: c.looks for panel in panels for c in panel.curves if c.name}
    entries = [(name, {**_POINT, **looks}) for name, looks in named.items()]
    entries += [(name, {**_POINT, **looks}) for name, looks in more]
    lines = len(draw.key_lines(entries)) if entries else 0
    below = (0.28 if note else 0.0) + draw.KEY_LINE * lines
    rows = 1 if beside else len(panels)
    named_x = [bool(panel.x.label) for panel in panels]
    gap = 0.5 + 0.2 * any(panel.regions and panel.heading for panel in panels)
    bottom = 0.3 + below + (0.46 if named_x[-1] else 0.26)
    height = bottom + rows * tall + (rows - 1) * (gap + 0.1) + gap + 0.34
    picture, board = draw.board(height, title)
    left, side = MARGIN + 0.75, 0.75
    columns = len(panels) if beside else 1
    width = (WIDTH - MARGIN - 0.1 - left - side * (columns - 1)) / columns
    for number, panel in enumerate(panels):
        column = number if beside else 0
        above = 0 if beside else len(panels) - 1 - number
        place = (
            left + column * (width + side),
            bottom + above * (tall + gap + 0.1),
            width,
            tall,
        )
        _panel(picture, board, panel, place)
    draw.key(board, 0.02 + below, entries)
    draw.note(board, note)
    return picture


def _panel(
    picture: Picture,
    board: Axes,
    panel: Panel,
    place: tuple[float, float, float, float],
) -> None:
    left, bottom, width, tall = place
    axis = draw.chart(picture, *place)
    finite = [
        (c, [(x, y) for x, y in zip(c.xs, c.ys, strict=True) if math.isfinite(y)])
        for c in panel.curves
    ]
    xs = [x for c in panel.curves for x in c.xs]
    ys = [y for _, points in finite for _, y in points]
    ys += [v for c in panel.curves for values in c.ends or () for v in values]
    ys += [at for which, at, _ in panel.marks if which == "y"]
    _scale(axis.set_xscale, axis.set_xlim, panel.x, xs, 0.03)
    _scale(axis.set_yscale, axis.set_ylim, panel.y, ys or [0.0, 1.0], 0.08)
    for start, stop, names, shaded in panel.regions:
        if shaded:
            axis.axvspan(start, stop, color=draw.MIST, lw=0, zorder=-1)
        ends = axis.transData.transform([(start, 0.5), (stop, 0.5)])[:, 0] / draw.DPI
        low, high = max(ends[0], left), min(ends[1], left + width)
        if not panel.heading or panel.aside:
            y = bottom + tall + 0.1
        else:  # beside the heading
            low = max(low, left + draw.width_of(panel.heading, SMALL, "bold") + 0.1)
            y = bottom + tall + 0.13
        text = draw.first_that_fits(names, high - low - 0.06)
        draw.write(board, (low + high) / 2, y, text, ha="center", color=draw.QUIET)
    for low, high in panel.bands:
        axis.axhspan(low, high, color=draw.MIST, lw=0, zorder=0)
    for which, at, looks in panel.marks:
        (axis.axvline if which == "x" else axis.axhline)(at, **{"zorder": 1, **looks})
    for number, (curve, points) in enumerate(finite):
        _plot(axis, curve, points)
        if panel.fill and not number:
            shade = draw.tint(curve.looks["color"], 0.3)
            axis.fill_between(curve.xs, curve.ys, step="post", color=shade, lw=0)
    for which, one in (("x", panel.x), ("y", panel.y)):
        _ticks(axis, which, one, width / 0.75 if which == "x" else 5)
    draw.grid(axis)
    y = bottom + tall + 0.13 + 0.2 * bool(panel.aside and panel.regions)
    room = width - draw.width_of(panel.aside, SMALL) - 0.2
    heading = draw.cut(panel.heading, room, SMALL, "bold")
    draw.write(board, left, y, heading, weight="bold")
    looks = {"ha": "right", "color": draw.QUIET}
    draw.write(board, left + width, y, panel.aside, **looks)
    draw.write(board, left + width / 2, bottom - 0.4, panel.x.label, ha="center")


def _scale(
    set_scale: Callable, set_edges: Callable, axis: Axis, values: list, room: float
) -> None:
    low, high = axis.edges or (min(values), max(values))
    if axis.log:
        set_scale("log")
        factor = 1.0 if axis.edges else max((high / low) ** room, 1.25)
        set_edges(low / factor, high * factor)
    else:
        more = 0.0 if axis.edges else room * (high - low) or 0.08 * abs(high) or 1.0
        set_edges(low - more, high + more)


def _ticks(axes: Axes, which: str, axis: Axis, most: float) -> None:
    one = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    if axis.ticks is not None:
        ticks = _apart(axes, axis.ticks) if which == "x" else axis.ticks
        one.set_ticks([*ticks], labels=[*ticks.values()])
    elif axis.log and high < 6 * low:  # few powers of ten, or none, in between
        rounded = draw.round_ticks(5).tick_values(low, high)
        inside = [tick for tick in rounded if low <= tick <= high]
        one.set_ticks(inside, labels=[axis.say(tick) for tick in inside])
    elif axis.log:
        draw.log_ticks(one.set_ticks, (low, high), axis.say, int(most))
    else:
        one.set_major_locator(draw.round_ticks(int(most), whole=axis.whole))
        one.set_major_formatter(lambda value, _: axis.say(value))
    if axis.log:
        one.set_minor_locator(draw.NO_TICKS)


def _apart(axes: Axes, ticks: Mapping[float, str]) -> dict[float, str]:
    """The ticks of the x axis for which there is room, the last ones first."""
    kept, taken = {}, math.inf
    for place in sorted(ticks, reverse=True):
        x = axes.transData.transform((place, 1.0))[0] / draw.DPI
        half = draw.width_of(ticks[place], SMALL) / 2
        if x + half < taken - 0.1:
            kept[place], taken = ticks[place], x - half
    return kept


def _plot(axes: Axes, curve: Curve, points: Sequence[tuple[float, float]]) -> None:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    looks = {**_POINT, **curve.looks}
    last = len(points) - 1
    every = 1 if looks.get("ls") == "none" else math.ceil(len(points) / _MOST_MARKERS)
    if points:
        looks["markevery"] = [*range(last % every, last + 1, every)]
    axes.plot(xs, ys, clip_on=False, **{"zorder": 3, **looks})
    if curve.ends:
        errors = [
            [abs(end - y) for end, y in zip(ends, ys, strict=True)]
            for ends in curve.ends
        ]
        bar = {"elinewidth": 2.2, "capsize": 5, "capthick": 2.2, "fmt": "none"}
        axes.errorbar(xs, ys, yerr=errors, ecolor=looks["color"], **bar)
    if points and not math.isfinite(curve.ys[-1]):
        axes.plot(
            xs[-1:], ys[-1:], "x", ms=9, mew=2, color=draw.VERMILLION, clip_on=False
        )


def by_name(
    names: Sequence[str], looks: Sequence[Mapping[str, Any]], like: Sequence[str] = ()
) -> dict[str, Mapping[str, Any]]:
    """Looks for each name. A name in `like` has the looks that it has there."""
    order = [*like, *(name for name in names if name not in like)]
    return {name: looks[order.index(name) % len(looks)] for name in names}
