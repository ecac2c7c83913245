"""Pictures of training: who gets which data, and what the runs did."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from course_utils.pictures import draw
from course_utils.pictures.collectives import RANK_COLORS
from course_utils.pictures.draw import (
    BLUE,
    DPI,
    GREEN,
    INK,
    LARGE,
    LINE,
    MARGIN,
    MIST,
    NORMAL,
    PAPER,
    PURPLE,
    SMALL,
    VERMILLION,
    WIDTH,
    Picture,
)

# --- who gets which item ----------------------------------------------------------

_MOST_ITEMS = 24
_ORDER = "in this order"
_AGAIN = {"hatch": "////"}
_DROPPED = {"fill": PAPER, "edge": LINE, "dashed": True}


@draw.picture
def partition(
    indices_by_rank: Sequence[Iterable[int]],
    total: int,
    *,
    title: str = "Which rank gets which item",
) -> Picture:
    """The items of a data set in a row, each in the line of the rank that gets it.

    An item that an earlier rank has already got is hatched: a sampler repeats items to
    make the shares equal. An item that no rank gets has a line of its own.

    Args:
        indices_by_rank: For each rank, in rank order, the indices that it gets, in
            its order: `list(DistributedSampler(...))` or `Partition.indices`. At most
            eight ranks.
        total: How many items the data set has, 1 to 24.
        title: What the picture shows.

    Raises:
        ValueError: there are too many ranks or items, or an index is not in the data.
    """
    draw.whole(total, "total")
    if total > _MOST_ITEMS:
        raise ValueError(f"total is {total}: at most {_MOST_ITEMS} items can be drawn.")
    shares = [
        [_index(item, total, rank) for item in items]
        for rank, items in _by_rank(indices_by_rank)
    ]
    again = _again(shares)
    dropped = sorted(set(range(total)) - {i for share in shares for i in share})
    names = [f"rank {rank}" for rank in range(len(shares))]
    if dropped:
        names.append("no rank")
    label = 0.16 + max(draw.width_of(name, NORMAL) for name in names)
    cell = min(0.36, (WIDTH - 2 * MARGIN - label - 2.05) / total)
    step = 0.4
    left, low = MARGIN + label, 0.9
    heading = "items of the data set"
    aside = left + max(total * cell, draw.width_of(heading, SMALL, "bold")) + 0.2
    aside_words = [", ".join(map(str, share)) or "nothing" for share in shares]
    samples = [("the rank gets it", {"fill": draw.tint(RANK_COLORS[0], 0.5)})]
    if any(any(counts.values()) for counts in again):
        looks = {"fill": draw.tint(RANK_COLORS[0], 0.5), **_AGAIN}
        samples.append(("it is repeated: another rank has it, too", looks))
    if dropped:
        samples.append(("dropped: no rank gets it", _DROPPED))
    note = _partition_note(shares, again, dropped, total)
    wide = max(
        aside + max(draw.width_of(words, SMALL) for words in aside_words),
        aside + draw.width_of(_ORDER, SMALL, "bold"),
        draw.key_width(samples),
        MARGIN + draw.width_of(note, SMALL),
        MARGIN + draw.width_of(title, LARGE, "bold"),
    )
    width = min(wide + MARGIN, WIDTH)
    picture, board = draw.board(1.74 + step * len(names), title, width)
    top = low + step * len(names)
    draw.write(board, left, top + 0.14, heading, weight="bold")
    draw.write(board, aside, top + 0.14, _ORDER, weight="bold")
    for place, name in enumerate(names):
        y = top - (place + 1) * step
        draw.write(board, MARGIN, y + step / 2, name, size=NORMAL)
        board.plot(
            [left, left + total * cell], [y, y], color="#E3E3E3", lw=0.8, zorder=0
        )
        if place == len(shares):
            for item in dropped:
                _item(board, left + item * cell, y, cell, step, item, _DROPPED)
            continue
        color = draw.tint(RANK_COLORS[place], 0.5)
        for item in dict.fromkeys(shares[place]):
            looks = {"fill": color, **(_AGAIN if again[place][item] else {})}
            _item(board, left + item * cell, y, cell, step, item, looks)
        room = width - MARGIN - aside + 0.02
        text = draw.wrap(aside_words[place], room, SMALL, lines=2)
        draw.write(board, aside, y + step / 2, text, linespacing=1.05)
    draw.key(board, 0.55, samples)
    draw.note(board, note)
    said = "; ".join(
        f"rank {rank} gets {', '.join(map(str, share)) or 'nothing'}"
        for rank, share in enumerate(shares)
    )
    picture.summary = f"{title.rstrip('.')}. {draw.sentence(said)} {note}"
    return picture


def _by_rank(
    indices_by_rank: Sequence[Iterable[int]],
) -> Iterable[tuple[int, Iterable]]:
    if not 1 <= len(indices_by_rank) <= len(RANK_COLORS):
        raise ValueError(
            f"indices_by_rank is of {draw.count(len(indices_by_rank), 'rank')}: "
            f"expected 1 to {len(RANK_COLORS)}."
        )
    return enumerate(indices_by_rank)


def _index(value: Any, total: int, rank: int) -> int:
    index = value.item() if hasattr(value, "item") else value
    if type(index) is not int or not 0 <= index < total:
        raise ValueError(
            f"Rank {rank} gets the index {index!r}: expected 0 to {total - 1}."
        )
    return index


def _again(shares: Sequence[Sequence[int]]) -> list[Counter]:
    """For each rank, how often it gets an item that was given out before.

    Items are given out in turns: the first of each rank, then the second, ...
    """
    seen: set[int] = set()
    again = [Counter() for _ in shares]
    for turn in range(max(map(len, shares))):
        for rank, share in enumerate(shares):
            if turn < len(share):
                again[rank][share[turn]] += share[turn] in seen
                seen.add(share[turn])
    return again


def _item(
    board: Axes,
    x: float,
    y: float,
    cell: float,
    step: float,
    item: int,
    looks: dict[str, Any],
) -> None:
    looks = {"rounded": 0.02, "line": 0.8, **looks}
    inside = draw.box(board, x + 0.01, y + 0.06, cell - 0.02, step - 0.12, **looks)
    # In less room than a box leaves for its text.
    text = draw.write(board, x + cell / 2, y + step / 2, str(item), ha="center")
    if "hatch" in looks:
        text.set_bbox({"facecolor": looks["fill"], "edgecolor": "none", "pad": 0.6})
    board.get_figure().labels.append((text, inside))


def _partition_note(
    shares: Sequence[Sequence[int]],
    again: Sequence[Counter],
    dropped: Sequence[int],
    total: int,
) -> str:
    sizes = [len(share) for share in shares]
    each = f"{sizes[0]} a rank" if len(set(sizes)) == 1 else draw.listed(sizes)
    words = f"{draw.count(total, 'item')}, {draw.count(len(shares), 'rank')}: {each}."
    repeated = sum((counts for counts in again), Counter())
    if repeated.total():
        items = sorted(item for item, times in repeated.items() if times)
        words += f" Repeated: {draw.listed(items)}."
    if dropped:
        words += f" Dropped: {draw.listed(dropped)}."
    return words


# --- lines that may lie on top of each other ----------------------------------------

# From thick and pale to thin and dark, so that curves which lie on top of each other
# all stay visible.
_CURVES = (
    {"color": PURPLE, "linewidth": 7.0, "marker": "o", "markersize": 11},
    {"color": GREEN, "linewidth": 4.6, "marker": "s", "markersize": 7.5},
    {"color": BLUE, "linewidth": 2.6, "marker": "D", "markersize": 5},
    {"color": INK, "linewidth": 1.1, "marker": ".", "markersize": 4, "linestyle": "--"},
)


class _Line(NamedTuple):
    """A run in one panel; a value that is not finite is not drawn."""

    xs: Sequence[float]
    ys: Sequence[float]

    def finite(self) -> "_Line":
        """The points that can be drawn."""
        points = [p for p in zip(*self, strict=True) if math.isfinite(p[1])]
        return _Line([x for x, _ in points], [y for _, y in points])


def _named(runs: Mapping[str, Any]) -> None:
    if not 1 <= len(runs) <= len(_CURVES):
        raise ValueError(f"runs holds {len(runs)} runs: expected 1 to {len(_CURVES)}.")


def _looks(number: int) -> Sequence[dict[str, Any]]:
    """The looks of one to four curves, as far apart as the number allows."""
    thick, middle, thin, _ = _CURVES
    return {1: [thin], 2: [thick, thin], 3: [thick, middle, thin]}.get(number, _CURVES)


def _gutter(names: Iterable[str], most: float) -> float:
    return min(max(draw.width_of(name, SMALL) for name in names), most) + 0.6


def _panel(axis: Axes, lines: Mapping[str, _Line], *, log: bool = False) -> None:
    """Draw the lines, thick ones first, and set the limits to hold them."""
    for looks, line in zip(_looks(len(lines)), lines.values(), strict=True):
        xs, ys = line.finite()
        last = len(xs) - 1
        every = math.ceil((last + 1) / 10) or 1
        axis.plot(
            xs,
            ys,
            markevery=list(range(last % every, last + 1, every)),
            clip_on=False,
            **looks,
        )
    values = [y for line in lines.values() for y in line.finite().ys] or [0.0, 1.0]
    low, high = min(values), max(values)
    draw.grid(axis, "y")
    if log:
        room = (high / low) ** 0.08
        axis.set_yscale("log")
        axis.set_ylim(low / room, high * room)
        axis.yaxis.set_major_locator(LogLocator(numticks=6))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.5g}")
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        room = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
        axis.set_ylim(low - room, high + room)
        axis.yaxis.set_major_locator(draw.round_ticks(6))
    xs = [x for line in lines.values() for x in line.xs]
    room = 0.06 * (max(xs) - min(xs)) or 0.5
    axis.set_xlim(min(xs) - room, max(xs) + room)
    axis.xaxis.set_major_locator(
        MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10])
    )


def _name_lines(
    board: Axes,
    axis: Axes,
    lines: Mapping[str, _Line],
    place: tuple[float, float, float, float],
    gutter: float,
) -> None:
    """Each run's name beside the end of its line, apart even where lines meet.

    A line that ends early, at a value that is not finite, ends in a cross.
    """
    left, bottom, width, height = place
    ends = []
    for looks, (name, line) in zip(_looks(len(lines)), lines.items(), strict=True):
        xs, ys = line.finite()
        x, y = left + width, bottom + height  # for a run that never was finite
        if xs:
            x, y = axis.transData.transform((xs[-1], ys[-1])) / DPI
        lost = not math.isfinite(line.ys[-1])
        if lost and xs:
            board.plot([x], [y], "x", ms=9, mew=2.0, color=VERMILLION)
        name = f"{name}: {line.ys[-1]}" if lost else name
        ends.append((y, len(ends), x, name, looks, bool(xs)))
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
    for level, (y, _, x, name, looks, drawn) in zip(levels, ends, strict=True):
        start = left + width + 0.16
        if drawn:
            board.plot([x + 0.1, start], [y, level], color=LINE, lw=0.7)
        xs = [start, start + 0.14, start + 0.28]
        board.plot(xs, [level] * 3, markevery=[1], **looks)
        draw.write(board, start + 0.38, level, draw.cut(name, gutter - 0.58, SMALL))


# --- training curves ---------------------------------------------------------------

_PANELS = (("loss", "loss"), ("test_accuracy", "test accuracy (%)"))


@draw.picture
def training_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Picture:
    """Loss and test accuracy by epoch, one curve a run.

    Where the loss of a run grows far beyond that of the others, its axis is
    logarithmic. A loss may be nan or infinite: the curve ends before it, with a cross.

    Args:
        runs: From a run's name, such as "2 ranks", to its metrics, one dict an epoch
            with "epoch", "loss" and "test_accuracy" (0 to 1). At most four runs.

    Raises:
        ValueError: no run, more than four, a run without metrics, a metric that is
            missing, one that is not finite and no loss, or an accuracy outside 0 to 1.
    """
    _named(runs)
    curves = {str(name): _curve(str(name), metrics) for name, metrics in runs.items()}
    picture, board = draw.board(3.7, "Training, epoch by epoch")
    lost = any(not math.isfinite(curve["loss"][-1]) for curve in curves.values())
    names = [f"{name}: nan" for name in curves] if lost else curves
    gutter = _gutter(names, 1.2)
    width = (WIDTH - 2 * MARGIN - 2 * 0.42 - 2 * gutter) / 2
    bottom, tall = 0.92, 2.05
    for panel, (what, heading) in enumerate(_PANELS):
        lines = {
            name: _Line(curve["epoch"], _scaled(curve, what))
            for name, curve in curves.items()
        }
        log = what == "loss" and _diverges(lines.values())
        left = MARGIN + 0.42 + panel * (width + gutter + 0.42)
        axis = draw.chart(picture, left, bottom, width, tall)
        _panel(axis, lines, log=log)
        heading = f"{heading} (logarithmic axis)" if log else heading
        draw.write(board, left, bottom + tall + 0.13, heading, weight="bold")
        draw.write(board, left + width / 2, bottom - 0.4, "epoch", ha="center")
        _name_lines(board, axis, lines, (left, bottom, width, tall), gutter)
    note = _differences(curves)
    draw.note(board, note)
    ends = "; ".join(
        f"{name}: loss from {draw.number(curve['loss'][0], 3)} to "
        f"{draw.number(curve['loss'][-1], 3)}, test accuracy "
        f"{100 * curve['test_accuracy'][-1]:.1f} % after "
        f"{draw.count(len(curve['epoch']), 'epoch')}"
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
                    f"{draw.listed(map(repr, values)) if values else 'nothing'}."
                )
            read = _real if key == "loss" else draw.finite
            column.append(read(values[key], f"{key} in row {row} of {name!r}"))
        accuracy = columns["test_accuracy"][-1]
        if not 0 <= accuracy <= 1:
            raise ValueError(
                f"test_accuracy in row {row} of {name!r} is {accuracy}: expected a "
                "share from 0 to 1."
            )
    return columns


def _real(value: object, what: str) -> float:
    """`value` as a Python number, which may be nan or infinite."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float) and not math.isfinite(number):
        return number
    return draw.finite(number, what)


def _scaled(curve: Mapping[str, list[float]], what: str) -> list[float]:
    return [100 * v for v in curve[what]] if what == "test_accuracy" else curve[what]


def _diverges(lines: Iterable[_Line]) -> bool:
    """Whether a value is so far above where the best run began that it hides all."""
    finite = [line.finite().ys for line in lines]
    values = [y for ys in finite for y in ys]
    starts = [ys[0] for ys in finite if ys]
    return bool(values) and min(values) > 0 and max(values) > 10 * min(starts)


def _differences(curves: Mapping[str, Mapping]) -> str:
    """How far apart the runs are at most, in words; "" for a single run."""
    lost = [
        f"The loss of {name} is not finite from epoch {epoch} on."
        for name, curve in curves.items()
        if (epoch := _lost_at(curve)) is not None
    ]
    if lost:
        return " ".join(lost)
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
        f"{draw.number(worst['loss'], 2)}, test accuracy "
        f"{draw.number(worst['test_accuracy'], 2)} percentage points."
    )


def _lost_at(curve: Mapping[str, list[float]]) -> float | None:
    """The first epoch whose loss is not finite."""
    for epoch, loss in zip(curve["epoch"], curve["loss"], strict=True):
        if not math.isfinite(loss):
            return epoch
    return None


# --- one panel: differences, learning rates ------------------------------------------

_LIMIT = 1e-6  # with which differences are compared


@draw.picture
def difference_by_step(
    runs: Mapping[str, Sequence[float]],
    *,
    title: str = "Difference to one big batch, step by step",
) -> Picture:
    """How far a run's parameters are from a reference after each step.

    The axis is logarithmic, with a dashed line at 1e-6. A difference of exactly 0 has
    no place on it and gets a line of its own, below; so does one that is not finite,
    above.

    Args:
        runs: From a run's name to the largest absolute difference after step 1, 2, ...
            At most four runs.
        title: What the picture shows.

    Raises:
        TypeError: a difference is not a number.
        ValueError: no run, more than four, a run without a step, a difference below 0.
    """
    _named(runs)
    columns = {
        str(name): [_difference(v, str(name)) for v in values]
        for name, values in runs.items()
    }
    if not all(columns.values()):
        raise ValueError("A run has no step: give one difference a step.")
    places = _Places.of([v for column in columns.values() for v in column])
    lines = {
        name: _Line(range(1, len(column) + 1), [places.level(v) for v in column])
        for name, column in columns.items()
    }
    limit = draw.number(_LIMIT, 2)
    heading = f"largest absolute difference (dashed line: {limit})"
    picture, board, axis, place, gutter = _one_panel(lines, title, heading, 0.92)
    axis.set_ylim(places.bottom, places.top)
    axis.set_yticks([*places.ticks], labels=[*places.ticks.values()])
    for edge, band in ((places.low, places.bottom), (places.high, places.top)):
        if abs(edge - band) > 0.2 * places.unit:
            axis.axhspan(edge, band, color=MIST, lw=0, zorder=0)
            axis.axhline(edge, color=LINE, lw=0.8)
    looks = {"color": VERMILLION, "lw": 1.4, "ls": (0, (5, 3))}
    axis.axhline(math.log10(_LIMIT), zorder=1, **looks)
    _name_lines(board, axis, lines, place, gutter)
    note = _against(columns)
    draw.note(board, note)
    said = "; ".join(
        f"{name}: {draw.number(column[0], 2)} after step 1, "
        f"{draw.number(column[-1], 2)} after step {len(column)}"
        for name, column in columns.items()
    )
    picture.summary = f"{title.rstrip('.')}. {said}. {note}".strip()
    return picture


class _Places(NamedTuple):
    """Where differences are on the axis: by their logarithm, with 0 and nan apart."""

    low: float
    high: float
    bottom: float
    top: float
    unit: float
    ticks: dict[float, str]

    @classmethod
    def of(cls, values: Sequence[float]) -> "_Places":
        """Places for all these values, and the limit."""
        inner = [math.log10(v) for v in [*values, _LIMIT] if 0 < v < math.inf]
        low = math.floor(min(inner) - 0.1)
        high = max(math.ceil(max(inner) + 0.1), low + 2)
        unit = (high - low) / 10
        every = math.ceil((high - low) / 5)
        ticks = {float(p): f"1e{p:+03d}" for p in range(low, high + 1, every)}
        bottom, top = low - 0.1 * unit, high + 0.1 * unit
        if 0.0 in values:
            bottom = low - 2 * unit
            ticks[low - unit] = "0"
        if not all(map(math.isfinite, values)):
            top = high + 2 * unit
            ticks[high + unit] = "not finite"
        return cls(low, high, bottom, top, unit, ticks)

    def level(self, value: float) -> float:
        """The place of one value."""
        if value == 0:
            return self.low - self.unit
        return math.log10(value) if math.isfinite(value) else self.high + self.unit


def _one_panel(
    lines: Mapping[str, _Line], title: str, heading: str, bottom: float
) -> tuple[Picture, Axes, Axes, tuple[float, float, float, float], float]:
    """A picture with one diagram of lines: its axes, its place, room for names."""
    picture, board = draw.board(bottom + 2.78, title)
    gutter = _gutter(lines, 2.6)
    left, tall = MARGIN + 0.75, 2.05
    width = WIDTH - MARGIN - left - gutter
    axis = draw.chart(picture, left, bottom, width, tall)
    _panel(axis, lines)
    draw.write(board, left, bottom + tall + 0.15, heading, weight="bold")
    draw.write(board, left + width / 2, bottom - 0.4, "step", ha="center")
    return picture, board, axis, (left, bottom, width, tall), gutter


def _against(columns: Mapping[str, Sequence[float]]) -> str:
    """Which runs stay within the limit, and from which step on others do not."""
    same = [name for name, column in columns.items() if not any(column)]
    parts = [f"Always 0: {draw.listed(same)}."] if same else []
    above = {
        name: next((i for i, v in enumerate(column, 1) if not v <= _LIMIT), None)
        for name, column in columns.items()
        if name not in same
    }
    said = draw.number(_LIMIT, 2)
    below = [name for name, step in above.items() if step is None]
    if below:
        parts.append(f"Never above {said}: {draw.listed(below)}.")
    first = sorted({step for step in above.values() if step})
    late = [
        f"at step {step}: {draw.listed(name for name in above if above[name] == step)}"
        for step in first
    ]
    if late:
        parts.append(f"First above {said} {'; '.join(late)}.")
    return " ".join(parts)


def _difference(value: object, name: str) -> float:
    number = _real(value, f"a difference of {name!r}")
    if number < 0:
        raise ValueError(f"A difference of {name!r} is {number}: expected 0 or more.")
    return float(number)


@draw.picture
def learning_rates(
    runs: Mapping[str, Sequence[float]],
    *,
    title: str = "Learning rate",
) -> Picture:
    """Schedules of the learning rate, such as a warm-up to a scaled rate.

    Args:
        runs: From a run's name to its learning rate in step 0, 1, 2, ... At most four.
        title: What the picture shows.

    Raises:
        TypeError: a learning rate is not a number.
        ValueError: no run, more than four, a run without a step, a learning rate that
            is not finite.
    """
    _named(runs)
    lines = {
        str(name): _Line(
            range(len(rates)),
            [draw.finite(rate, f"a learning rate of {name!r}") for rate in rates],
        )
        for name, rates in runs.items()
    }
    if not all(line.ys for line in lines.values()):
        raise ValueError("A run has no step: give one learning rate a step.")
    picture, board, axis, place, gutter = _one_panel(lines, title, "learning rate", 0.6)
    axis.set_ylim(0 if axis.get_ylim()[0] > 0 else None, None)
    _name_lines(board, axis, lines, place, gutter)
    said = "; ".join(_schedule(name, line.ys) for name, line in lines.items())
    picture.summary = f"{title.rstrip('.')}. {said}."
    return picture


def _schedule(name: str, rates: Sequence[float]) -> str:
    if len(set(rates)) == 1:
        return f"{name}: {draw.number(rates[0])} in every step"
    peak = max(rates)
    words = f"{name}: {draw.number(rates[0])} in step 0"
    at = rates.index(peak)
    if at not in (0, len(rates) - 1):
        words += f", {draw.number(peak)} from step {at}"
    return f"{words}, {draw.number(rates[-1])} in step {len(rates) - 1}"
