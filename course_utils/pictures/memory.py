"""Pictures of memory: what fills a GPU, over time, in shards, and gathered by FSDP."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from course_utils.pictures import devices, draw, overlap
from course_utils.pictures.draw import (
    BLUE,
    GREEN,
    LINE,
    MARGIN,
    MIST,
    NORMAL,
    ORANGE,
    PAPER,
    PURPLE,
    QUIET,
    SKY,
    SMALL,
    VERMILLION,
    WIDTH,
    Picture,
    duration,
)
from course_utils.pictures.ranks import Interval, checked
from course_utils.theory import costs

if TYPE_CHECKING:
    from course_utils.measure.tensor_bytes import TensorBytes
    from course_utils.theory.simulator import FsdpStep

# --- what fills each GPU, against what cards have -------------------------------------

_MOST_BARS = 8
_ROOM = {"fill": PAPER, "edge": LINE, "dashed": True, "color": QUIET}
Held = Mapping[str, float] | costs.ModelStates


@draw.picture
def memory_per_gpu(
    strategies: Mapping[str, Held],
    *,
    title: str = "Memory of each GPU",
) -> Picture:
    """What each GPU holds under several strategies, against the memory of two cards.

    All bars have one scale, in decimal GB as in the ZeRO paper. A card's line is at the
    bytes that nvidia-smi reports, so that an H100, sold with 80 GB, has 85.5 GB. What
    is left, or missing, is said for the H100.

    Args:
        strategies: From a name to bytes by category: "parameters", "gradients",
            "optimizer state", "activations", "other"; one that is left out is 0. Or to
            `costs.ModelStates`. One to eight.
        title: What the picture shows.

    Raises:
        TypeError: an amount is not a number.
        ValueError: there is no strategy or too many, a category is unknown, or an
            amount is negative or not finite.
    """
    if not 1 <= len(strategies) <= _MOST_BARS:
        raise ValueError(
            f"strategies holds {len(strategies)} bars: expected 1 to {_MOST_BARS}."
        )
    limits = [costs.card("RTX 4090"), costs.card("H100")]
    rows = {str(name): _by_category(name, held) for name, held in strategies.items()}
    totals = {name: math.fsum(held.values()) for name, held in rows.items()}
    most = max(*totals.values(), limits[-1].nbytes)
    unit, size = _decimal_unit(most)
    said = {name: f"{draw.spoken(t / size, 3)} {unit}" for name, t in totals.items()}
    verdicts = {name: _verdict(t, limits[-1], size) for name, t in totals.items()}
    step, low = 0.54, 0.58
    left = MARGIN + 0.16 + min(max(draw.width_of(name, NORMAL) for name in rows), 1.7)
    room = 0.16 + max(
        *(draw.width_of(text, NORMAL, "bold") for text in said.values()),
        *(draw.width_of(text, SMALL) for text in verdicts.values()),
    )
    width = WIDTH - MARGIN - left - room
    inch = width / most
    names = [f"{card.name}: {draw.number(card.nbytes / size, 3)}" for card in limits]
    places = [left + card.nbytes * inch for card in limits]
    levels = _levels(names, places)
    head = 0.19 * (max(levels)[0] + 1)
    picture, board = draw.board(0.54 + head + step * len(rows) + low, title)
    top = low + step * len(rows)
    for card, name, x, (level, middle) in zip(
        limits, names, places, levels, strict=True
    ):
        y = top + 0.1 + 0.19 * level
        line = {"color": VERMILLION, "lw": 1.6, "ls": (0, (4, 2))}
        board.plot([x, x], [low, y - 0.08], zorder=2, **line)
        looks = {"weight": "bold"} if card is limits[-1] else {}
        looks["bbox"] = {"fc": PAPER, "ec": "none", "pad": 1.0}
        draw.write(board, middle, y, name, ha="center", **looks)
    for row, (name, held) in enumerate(rows.items()):
        y = low + step * (len(rows) - 1 - row)
        middle = y + step / 2
        draw.write(board, MARGIN, middle, draw.cut(name, 1.7, NORMAL), size=NORMAL)
        x = left
        for category, amount in held.items():
            wide = amount * inch
            if amount:
                label = _amount_label(category, amount / size, wide - 0.14)
                place = (x, y + 0.07, wide, step - 0.14)
                _box(board, place, label, devices._HOLDS[category])
            x += wide
        free = places[-1] - x
        if free > 0.02:
            label = draw.first_that_fits(("room left", "room"), free - 0.14)
            _box(board, (x, y + 0.07, free, step - 0.14), label, _ROOM)
        end = left + width + 0.16
        looks = {"size": NORMAL, "weight": "bold"}
        draw.write(board, end, middle + 0.1, said[name], **looks)
        draw.write(board, end, middle - 0.1, verdicts[name])
    used = [what for what in devices._HOLDS if any(h.get(what) for h in rows.values())]
    draw.key(board, low - 0.28, [(what, devices._HOLDS[what]) for what in used])
    where = f"{unit} are decimal"
    draw.write(board, WIDTH - MARGIN, low - 0.28, where, ha="right", color=QUIET)
    lines = []
    for name, held in rows.items():
        parts = [
            f"{what} {draw.spoken(amount / size, 3)}"
            for what, amount in held.items()
            if amount
        ]
        parts = ", ".join(parts) or "nothing"
        lines.append(f"{name} holds {said[name]} ({parts}): {verdicts[name]}")
    have = draw.listed(
        f"{card.name} has {draw.number(card.nbytes / size, 3)} {unit} "
        f"({draw.number(card.nbytes / costs.GiB, 3)} GiB)"
        for card in limits
    )
    picture.summary = f"{title.rstrip('.')}. {'; '.join(lines)}. {have}."
    return picture


def _box(
    board: Axes,
    place: tuple[float, float, float, float],
    label: str,
    looks: dict[str, Any],
) -> None:
    """A box whose label stays readable where a line crosses it."""
    x, y, wide, tall = place
    draw.box(board, x, y, wide, tall, label, **{"rounded": 0.0, **looks})
    if label:
        text, _ = board.get_figure().labels[-1]
        text.set_bbox({"facecolor": looks["fill"], "edgecolor": "none", "pad": 1.5})


def _by_category(name: object, held: Held) -> dict[str, float]:
    if isinstance(held, costs.ModelStates):
        held = {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer state": held.optimizer,
        }
    return devices._held_by(str(name), held)


def _verdict(total: float, card: costs.Card, size: float) -> str:
    left = (card.nbytes - total) / size
    if left >= 0:
        return f"{draw.spoken(left, 3)} left on {card.name}"
    return f"{draw.spoken(-left, 3)} too much for {card.name}"


def _amount_label(category: str, amount: float, width: float) -> str:
    number = draw.spoken(amount, 3)
    return draw.first_that_fits((f"{category} {number}", number), width)


def _levels(names: Sequence[str], places: Sequence[float]) -> list[tuple[int, float]]:
    """For names above lines: the level at which there is room, and the middle."""
    ends: list[float] = []
    found = []
    for name, x in zip(names, places, strict=True):
        half = draw.width_of(name, SMALL, "bold") / 2
        middle = min(max(x, MARGIN + half), WIDTH - MARGIN - half)
        free = [k for k, end in enumerate(ends) if end + 0.12 < middle - half]
        level = free[0] if free else len(ends)
        if level == len(ends):
            ends.append(0.0)
        ends[level] = middle + half
        found.append((level, middle))
    return found


def _decimal_unit(nbytes: float) -> tuple[str, float]:
    """The decimal unit in which an amount of memory is easy to read, and its bytes."""
    for unit, size in (("GB", costs.GB), ("MB", costs.MB), ("kB", costs.KB)):
        if nbytes >= size:
            return unit, size
    return "B", 1


# --- memory over time -----------------------------------------------------------------


_MOST_CURVES = 4


@draw.picture
def memory_over_time(
    curves: "Mapping[str, TensorBytes]",
    *,
    title: str = "Tensor bytes during one step",
) -> Picture:
    """Measured bytes during a step, and how many they are at most and in the end.

    Args:
        curves: From a strategy to what `record_tensor_bytes` recorded, whose spans are
            named above the curve. One to four, each in a panel of its own, all to the
            same scale.
        title: What the picture shows.

    Raises:
        ValueError: there are no curves or too many, or nothing was recorded.
    """
    if not 1 <= len(curves) <= _MOST_CURVES:
        raise ValueError(f"There are {len(curves)} curves: expected 1 to 4.")
    for name, curve in curves.items():
        if not curve.nbytes:
            raise ValueError(f"{name} has no points: expected at least one.")
    unit, size = _decimal_unit(max(curve.peak for curve in curves.values()))
    most = max(curve.peak for curve in curves.values()) / size or 1.0
    span = 1.02 * max(c.seconds[-1] - c.seconds[0] for c in curves.values())
    time, length = draw.unit_of(span)  # somewhat longer: the last value is held, too

    above = 0.16 if any(curve.spans for curve in curves.values()) else 0.0
    tall, pitch = 1.2, 1.7 + above
    height = 1.12 + pitch * len(curves)
    picture, board = draw.board(height, title)
    ticks = draw.round_ticks(4).tick_values(0, most)
    label = max(draw.width_of(draw.number(tick), SMALL) for tick in ticks)
    left = MARGIN + label + 0.14
    width = WIDTH - MARGIN - left
    said = []
    for place, (name, curve) in enumerate(curves.items()):
        bottom = height - 0.78 - above - tall - place * pitch
        begin = curve.seconds[0]
        axis = draw.chart(picture, left, bottom, width, tall)
        axis.set_xlim(0, span / length or 1.0)
        axis.set_ylim(0, most * 1.16)
        axis.set_yticks([tick for tick in ticks if tick <= most * 1.16])
        axis.xaxis.set_major_locator(draw.round_ticks(8))
        draw.grid(axis, "y")
        for number, (what, start, stop) in enumerate(curve.spans):
            start, stop = start - begin, stop - begin
            shade = draw.tint(SKY, 0.22) if number % 2 else MIST
            axis.axvspan(start / length, stop / length, color=shade, lw=0, zorder=-1)
            wide = (stop - start) / (span or 1.0) * width
            text = draw.cut(what, wide - 0.08, SMALL) if wide > 0.4 else ""
            if text.strip("…"):
                middle = left + (start + stop) / 2 / (span or 1.0) * width
                y = bottom + tall + 0.1
                draw.write(board, middle, y, text, ha="center", color=QUIET)
        xs = [*((moment - begin) / length for moment in curve.seconds), span / length]
        ys = [nbytes / size for nbytes in (*curve.nbytes, curve.nbytes[-1])]
        axis.fill_between(xs, ys, step="post", color=draw.tint(BLUE, 0.3), lw=0)
        axis.step(xs, ys, where="post", color=BLUE, lw=1.4)
        looks = {"ha": "right", "color": QUIET}
        draw.write(board, left - 0.1, bottom + tall + 0.13, unit, **looks)
        y = bottom + tall + 0.13 + above
        draw.write(board, left, y, draw.cut(name, 2.6, SMALL, "bold"), weight="bold")
        peak, last = (draw.number(n / size, 3) for n in (curve.peak, curve.nbytes[-1]))
        words = f"measured: peak {peak} {unit}, at the end {last} {unit}"
        draw.write(board, left + width, y, words, **looks)
        said.append(
            f"{name}: measured peak {draw.byte_size(curve.peak)}, at the end "
            f"{draw.byte_size(curve.nbytes[-1])}"
        )
    draw.write(board, left + width / 2, bottom - 0.36, f"time ({time})", ha="center")
    board.plot([MARGIN, MARGIN + 0.34], [0.2, 0.2], color=BLUE, lw=1.4)
    draw.write(board, MARGIN + 0.42, 0.2, "measured", color=QUIET)
    picture.summary = f"{title.rstrip('.')}. {'. '.join(said)}."
    return picture


# --- a unit, flat and cut -------------------------------------------------------------

_FILLS: tuple[dict[str, Any], ...] = (
    {"fill": draw.tint(BLUE, 0.4)},
    {"fill": draw.tint(ORANGE, 0.4), "hatch": "////"},
    {"fill": draw.tint(GREEN, 0.35), "hatch": "\\\\\\\\"},
    {"fill": draw.tint(PURPLE, 0.45), "hatch": "...."},
)
_PADDING = {"fill": PAPER, "hatch": "xxxx", "hatched": QUIET}
_MOST_SHARDS = 8


@draw.picture
def flat_shards(
    parameters: Iterable[tuple[str, int]],
    world_size: int,
    *,
    title: str = "One unit, flat and cut into shards",
) -> Picture:
    """The parameters of a unit in one row, and what of them lies in which shard.

    Places are given as slices of each parameter when it is flat: `weight[0:6]` are its
    first six elements. The last shards hold padding where the number of elements is no
    multiple of the number of ranks.

    Args:
        parameters: (name, number of elements) of each parameter of the unit, in their
            order.
        world_size: How many ranks, and so shards, there are: 1 to 8.
        title: What the picture shows.

    Raises:
        ValueError: there are no elements, a number is not whole, or there are too many
            ranks.
    """
    named = [(str(name), size) for name, size in parameters]
    parts = costs.shard_parts([size for _, size in named], world_size)
    elements = sum(size for _, size in named)
    if not elements:
        raise ValueError("The parameters have no elements: there is nothing to cut.")
    if world_size > _MOST_SHARDS:
        raise ValueError(
            f"world_size is {world_size}: expected 1 to {_MOST_SHARDS} to draw."
        )
    shard = costs.shard_size(elements, world_size)
    length = world_size * shard
    padding = length - elements
    step = 0.42
    height = 2.42 + step * world_size
    picture, board = draw.board(height, title)
    left = MARGIN + 0.86
    width = WIDTH - MARGIN - left
    inch = width / length
    first = list(itertools.accumulate((size for _, size in named), initial=0))

    top = height - 1.02
    draw.write(board, MARGIN, top + 0.15, "parameters")
    for place, (name, size) in enumerate(named):
        wide = size * inch
        label = _fitting_name(name, f"({size:,})", wide - 0.2)
        # A gap between them: they are tensors of their own.
        inset = min(0.03, wide / 4)
        looks = _FILLS[place % len(_FILLS)]
        x = left + first[place] * inch + inset
        looks = {"rounded": 0.06 if wide > 0.2 else 0.0, **looks}
        draw.box(board, x, top, wide - 2 * inset, 0.3, label, **looks)
    flat = top - 0.66
    draw.write(board, MARGIN, flat + 0.15, "flat")
    all_of_it = [(place, 0, size) for place, (_, size) in enumerate(named)]
    _row(board, named, first, (left, flat, inch), all_of_it)
    if padding:
        wide = padding * inch
        label = draw.first_that_fits((f"padding ({padding:,})", "padding"), wide - 0.14)
        _box(board, (left + elements * inch, flat, wide, 0.3), label, _PADDING)
    for cut in range(1, world_size):
        x = left + cut * shard * inch
        low = flat - 0.3 - step * (cut + 1)  # the shard that begins here
        line = {"color": VERMILLION, "lw": 1.6, "ls": (0, (4, 2)), "zorder": 2}
        board.plot([x, x], [low + 0.04, flat + 0.38], **line)
    said = []
    for rank, held in enumerate(parts):
        y = flat - 0.3 - step * (rank + 1) + 0.06
        begin = rank * shard
        draw.write(board, MARGIN, y + 0.15, f"rank {rank}", weight="bold")
        _row(board, named, first, (left, y, inch), held)
        filled = sum(stop - start for _, start, stop in held)
        words = [f"{named[p][0]}[{start}:{stop}]" for p, start, stop in held]
        if filled < shard:
            wide = (shard - filled) * inch
            _box(board, (left + (begin + filled) * inch, y, wide, 0.3), "", _PADDING)
            words.append(f"{_elements(shard - filled)} of padding")
        said.append(f"rank {rank}: {', '.join(words)}")
        before, after = begin * inch, width - (begin + shard) * inch
        room = max(before, after) - 0.14
        text = _fitting_list(words, room)
        x = left + begin * inch - 0.1 if before > after else left + width - after + 0.1
        looks = {"ha": "right" if before > after else "left"}
        looks["bbox"] = {"fc": PAPER, "ec": "none", "pad": 1.0}
        draw.write(board, x, y + 0.15, text, zorder=4, **looks)
    note = (
        f"{_elements(elements)} in {draw.count(len(named), 'parameter')}, "
        f"{_elements(padding)} of padding, "
        f"{draw.count(world_size, 'shard')} of {shard:,}."
    )
    draw.note(board, note, 0.24)
    picture.summary = f"{title.rstrip('.')}. {note} {draw.sentence('; '.join(said))}"
    return picture


def _elements(number: int) -> str:
    return f"{number:,} element{'' if number == 1 else 's'}"


def _fitting_list(words: Sequence[str], room: float) -> str:
    """The words, or their ends after the last dot, or as much as there is room for."""
    if room < 0.6:
        return ""
    short = [word.rpartition(".")[2] for word in words]
    fitting = draw.first_that_fits((", ".join(words), ", ".join(short)), room)
    return fitting or draw.cut(", ".join(short), room, SMALL)


def _row(
    board: Axes,
    named: Sequence[tuple[str, int]],
    first: Sequence[int],
    place: tuple[float, float, float],
    parts: Iterable[tuple[int, int, int]],
) -> None:
    """Parts of parameters, where they lie in the flat row."""
    left, y, inch = place
    for number, start, stop in parts:
        if start == stop:
            continue
        x, wide = left + (first[number] + start) * inch, (stop - start) * inch
        label = _fitting_name(named[number][0], "", wide - 0.2)
        _box(board, (x, y, wide, 0.3), label, _FILLS[number % len(_FILLS)])


def _fitting_name(name: str, more: str, width: float) -> str:
    short = name.rpartition(".")[2]
    texts = (f"{name} {more}".strip(), name, f"{short} {more}".strip(), short)
    return draw.first_that_fits(texts, width)


# --- one step of FSDP -----------------------------------------------------------------


_GATHER = {"fill": draw.tint(ORANGE, 0.5)}
_REDUCE = {"fill": draw.tint(PURPLE, 0.5), "hatch": "////", "hatched": QUIET}
_LOOKS: dict[str, dict[str, Any]] = {
    "all-gather": _GATHER,
    **overlap._COMPUTING,
    "reduce-scatter": _REDUCE,
}
_LANES: dict[str, Callable[[str], bool]] = {
    "all-gather": lambda kind: kind == "all-gather",
    "computing": lambda kind: kind in overlap._COMPUTING,
    "reduce-scatter": lambda kind: kind == "reduce-scatter",
}
_WHOLE = {"fill": draw.tint(draw.YELLOW, 0.55), "hatch": "----"}
_MOST_UNITS = 13
_LANE, _THIN = 0.29, 0.2  # inches


@draw.picture
def fsdp_schedule(
    events: Iterable[tuple],
    *,
    title: str = "One step of FSDP: gather, compute, free, reduce",
) -> Picture:
    """When a rank gathers, computes and reduces, and when each unit is whole.

    Above, what goes on; exposed is communication during which the rank does not
    compute. Below, one row for each unit: its parameters are whole from the start of
    their all-gather until they are freed.

    Args:
        events: Of one rank: (start, stop, unit, kind) in seconds, where unit is its
            name. Kinds: "all-gather", "forward", "backward", "reduce-scatter",
            "optimizer", and "free" for the moment at which the whole parameters of
            the unit are gone (start = stop). `fsdp_events` makes them of a simulated
            step.
        title: What the picture shows.

    Raises:
        ValueError: there is no computing, an event has another kind, ends before it
            starts, or is no such tuple.
    """
    found = _events(events)
    origin = min(event.start for event in found)
    span = max(event.stop for event in found) - origin
    lanes = {
        name: overlap._in_lanes(event for event in found if belongs(event.kind))
        for name, belongs in _LANES.items()
    }
    lanes = {name: rows for name, rows in lanes.items() if rows}
    whole = _whole(found)
    shown = draw.shown(len(whole), _MOST_UNITS)
    rows = sum(map(len, lanes.values()))
    height = 2.08 + _LANE * rows + 0.1 * len(lanes) + _THIN * len(shown)
    picture, board = draw.board(height, title)
    totals = {name: _seconds(sum(rows, [])) for name, rows in lanes.items()}
    names = [*lanes, *whole]
    label = 0.16 + min(max(draw.width_of(name, SMALL, "bold") for name in names), 1.4)
    room = 0.12 + max(
        draw.width_of(duration(total), SMALL) for total in totals.values()
    )
    left = MARGIN + label
    width = WIDTH - MARGIN - max(room, 0.6) - left
    top = height - 0.7
    bottom = 0.94
    unit = draw.time_axis(picture, left, bottom, width, top - bottom, span)
    draw.write(board, left + width / 2, bottom - 0.38, f"time ({unit})", ha="center")
    draw.write(board, WIDTH - MARGIN, top + 0.12, "in all", ha="right", weight="bold")
    inch = width / (span or 1.0)

    def put(
        start: float, stop: float, y: float, tall: float, label: str, looks: dict
    ) -> None:
        x, wide = left + (start - origin) * inch, max((stop - start) * inch, 0.02)
        shorter = (label, *(label.rpartition(mark)[2] for mark in ". "))
        text = draw.first_that_fits(shorter, wide - 0.12)
        draw.box(board, x, y, wide, tall, text, rounded=0.02, **looks)

    y = top
    for name, its_rows in lanes.items():
        y -= 0.1
        middle = y - len(its_rows) * _LANE / 2
        draw.write(board, MARGIN, middle, name, weight="bold")
        draw.write(board, WIDTH - MARGIN, middle, duration(totals[name]), ha="right")
        for row in its_rows:
            y -= _LANE
            for event in row:
                looks = _LOOKS[event.kind]
                put(event.start, event.stop, y + 0.02, _LANE - 0.04, event.label, looks)
    y -= 0.2
    board.plot([MARGIN, WIDTH - MARGIN], [y + 0.14] * 2, color=LINE, lw=0.6)
    draw.write(board, MARGIN, y, "whole in memory", color=QUIET)
    y -= 0.1
    units = [*whole]
    for place in shown:
        y -= _THIN
        if place is None:
            draw.write(board, MARGIN, y + _THIN / 2, "…")
            continue
        name = units[place]
        draw.write(board, MARGIN, y + _THIN / 2, draw.cut(name, 1.4, SMALL))
        for start, stop in whole[name]:
            put(start, stop, y + 0.03, _THIN - 0.05, "", _WHOLE)
    used = [kind for kind in _LOOKS if any(event.kind == kind for event in found)]
    entries = [(kind, _LOOKS[kind]) for kind in used]
    entries += [("whole", _WHOLE)] if any(whole.values()) else []
    draw.key(board, 0.22, entries)
    picture.summary = _schedule_words(title, found, span, totals, whole)
    return picture


def fsdp_events(
    step: "FsdpStep", names: Mapping[str, str] | None = None
) -> list[tuple[float, float, str, str]]:
    """A simulated step (`simulator.fsdp_step`) as events for `fsdp_schedule`.

    Args:
        step: The step.
        names: Other names for some of its units.
    """
    names = names or {}
    return [
        (event.start, event.stop, names.get(event.unit, event.unit), event.kind)
        for event in step.events
    ]


def _events(values: Iterable[tuple]) -> list[Interval]:
    """The events in order of time, checked. Their labels are the names of units."""
    found = [checked(value, "the rank", (*_LOOKS, "free")) for value in values]
    if not any(event.kind in overlap._COMPUTING for event in found):
        raise ValueError("There is no computing among the events: nothing to draw.")
    return sorted(found)


def _whole(events: Sequence[Interval]) -> dict[str, list[tuple[float, float]]]:
    """When the parameters of each gathered unit are whole."""
    end = max(event.stop for event in events)
    whole: dict[str, list[tuple[float, float]]] = {}
    since: dict[str, float] = {}
    for event in events:
        if event.kind == "all-gather":
            whole.setdefault(event.label, [])
            since.setdefault(event.label, event.start)
        elif event.kind == "free" and event.label in since:
            whole[event.label].append((since.pop(event.label), event.start))
    for unit, start in since.items():
        whole[unit].append((start, end))
    return whole


def _seconds(events: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in overlap._merged(events))


def _schedule_words(
    title: str,
    events: Sequence[Interval],
    span: float,
    totals: Mapping[str, float],
    whole: Mapping[str, Sequence[tuple[float, float]]],
) -> str:
    computing = [event for event in events if event.kind in overlap._COMPUTING]
    sending = [
        event for event in events if event.kind in ("all-gather", "reduce-scatter")
    ]
    exposed = _seconds([*computing, *sending]) - _seconds(computing)
    gathers = sum(event.kind == "all-gather" for event in events)
    moments = [
        (moment, change)
        for intervals in whole.values()
        for start, stop in intervals
        for moment, change in ((start, 1), (stop, -1))
    ]
    most = max(itertools.accumulate((c for _, c in sorted(moments)), initial=0))
    share = f"{100 * exposed / span:.3g}" if span else "0"
    said = ", ".join(f"{name} {duration(total)}" for name, total in totals.items())
    words = (
        f"{title.rstrip('.')}. {duration(span)} in all: {said}; {duration(exposed)} of "
        f"the communication exposed ({share} % of the step)."
    )
    if whole:
        words += (
            f" {draw.count(gathers, 'all-gather')} of "
            f"{draw.count(len(whole), 'unit')}, of which at most {most} "
            f"{'is' if most == 1 else 'are'} whole at a time."
        )
    return words
