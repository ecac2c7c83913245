"""Pictures of collectives: what ranks held, who sends to whom, how fast it is."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from course_utils.pictures import draw
from course_utils.pictures.draw import (
    BLUE,
    GAP,
    GREEN,
    INK,
    LARGE,
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
    YELLOW,
    Picture,
)
from course_utils.theory import costs

if TYPE_CHECKING:
    from course_utils.measure.messages import Message

# --- a collective, before and after ------------------------------------------------

RANK_COLORS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION, LINE)
_COMPUTED, _UNDEFINED = -1, -2
_MIDDLE = 1.2
_OPERATIONS = {
    "SUM": "the sum",
    "PRODUCT": "the product",
    "MIN": "the smallest",
    "MAX": "the largest",
    "AVG": "the average",
    "BAND": "bitwise and",
    "BOR": "bitwise or",
    "BXOR": "bitwise exclusive or",
}


@draw.picture
def collective(
    before: Sequence[object],
    after: Sequence[object],
    name: str,
    *,
    op: object = None,
    root: int | None = None,
) -> Picture:
    """What each rank held before and after a collective, one row a rank.

    It draws every collective, and a message from one rank to another. A cell has the
    colour of the rank that its value came from. A value that was computed from
    several ranks is hatched. One that `reduce` left on a rank that is not its `root`
    is dotted, because PyTorch promises the result to the root alone.

    Args:
        before: For each rank, in rank order: a 1-D tensor (or a number, or a list of
            numbers), a list of such tensors, or None for a rank that holds nothing.
        after: The same, afterwards.
        name: The collective, such as "all_reduce" or "send / recv".
        op: What a reduction computes: "MAX", or `dist.ReduceOp.MAX`.
        root: The rank that sends to all (`src`) or receives from all (`dst`).

    Raises:
        ValueError: `before` and `after` are not of the same number of ranks, or hold
            something that is not a number, a 1-D tensor or a list of them; there is
            no such operation or no such root.
    """
    old, new, call = _checked(before, after, name, op, root)
    sources = _sources(old, new, call)
    world_size = len(old)
    rows = draw.shown(world_size, 9)
    step = min(0.46, 2.9 / len(rows))
    height = 1.52 + step * len(rows)
    names = [call.name_of(rank) for rank in range(world_size)]
    label = 0.16 + max(draw.width_of(word, NORMAL, "bold") for word in names)
    room = WIDTH - 2 * MARGIN - label - _MIDDLE
    cell = _cell_width(old, new, room)
    most = [max(_across(held, cell) for held in ranks) for ranks in (old, new)]
    # Where both do not fit, each may have half, and what the other leaves of its half.
    sides = [
        min(own, max(room / 2, room - other)) for own, other in (most, reversed(most))
    ]
    title = call.title(world_size)
    key = _collective_key(sources, call)
    width = max(
        2 * MARGIN + label + sum(sides) + _MIDDLE,
        2 * MARGIN + min(draw.width_of(title, LARGE, "bold"), WIDTH - 2 * MARGIN),
        MARGIN + draw.key_width(key),
    )
    picture, board = draw.board(height, title, width)
    left = MARGIN + label
    right = left + sides[0] + _MIDDLE
    top = height - 0.84
    for x, word in ((left, "before"), (right, "after")):
        draw.write(board, x, top + 0.12, word, size=NORMAL, weight="bold")
    for place, rank in enumerate(rows):
        y = top - (place + 1) * step
        if rank is None:
            draw.write(board, MARGIN, y + step / 2, "…", size=LARGE)
            continue
        looks = {"size": NORMAL, "weight": "bold" if rank == root else "normal"}
        draw.write(board, MARGIN, y + step / 2, names[rank], **looks)
        own = [[rank] * len(part) for part in old[rank] or ()]
        spot = (y + step * 0.08, cell, step * 0.84)
        _hold(board, (left, sides[0], *spot), old[rank], own)
        _hold(board, (right, sides[1], *spot), new[rank], sources[rank])

    center = top - step * len(rows) / 2 - 0.1
    tail, tip = right - _MIDDLE + 0.12, right - 0.12
    draw.arrow(board, (tail, center), (tip, center), line=2.4, head=16)
    word = draw.wrap(name, _MIDDLE - 0.14, NORMAL, lines=3, weight="bold")
    looks = {"size": NORMAL, "weight": "bold", "ha": "center", "va": "bottom"}
    draw.write(board, right - _MIDDLE / 2, center + 0.12, word, **looks)
    if call.op:
        looks["va"] = "top"
        draw.write(board, right - _MIDDLE / 2, center - 0.12, call.op, **looks)
    draw.key(board, 0.3, key)
    picture.summary = (
        f"{title}. Before: {_all_held(old)}. After: {_all_held(new)}."
        + _undefined_in_words(sources)
    )
    return picture


class _Call(NamedTuple):
    """A collective as it was called; `op` is "" where nothing is computed."""

    name: str
    op: str
    root: int | None

    def name_of(self, rank: int) -> str:
        """The rank with its part in this."""
        return f"rank {rank} (root)" if rank == self.root else f"rank {rank}"

    def title(self, world_size: int) -> str:
        """What was called, on how many ranks."""
        named = not self.op or self.name.endswith(self.op)
        words = self.name if named else f"{self.name} {self.op}"
        where = "" if self.root is None else f", root: rank {self.root}"
        return f"{words} on {draw.count(world_size, 'rank')}{where}"


def _checked(
    before: Sequence[object],
    after: Sequence[object],
    name: str,
    op: object,
    root: int | None,
) -> tuple[list[list | None], list[list | None], _Call]:
    """What the ranks held, as texts, and the call."""
    if len(before) != len(after) or not len(before):
        raise ValueError(
            f"before is of {draw.count(len(before), 'rank')}, after of "
            f"{draw.count(len(after), 'rank')}: give one entry a rank to both."
        )
    ranks = range(len(before))
    if root is not None and root not in ranks:
        raise ValueError(f"root is {root!r}: expected one of {list(ranks)}.")
    # ReduceOp.MAX prints itself as RedOpType.MAX or as ReduceOp.MAX.
    operation = "" if op is None else str(op).rpartition(".")[2]
    if operation and operation not in _OPERATIONS:
        raise ValueError(
            f"op is {op!r}: expected one of {draw.listed(_OPERATIONS)}, or None."
        )
    old = [_held(value, rank, "before") for rank, value in enumerate(before)]
    new = [_held(value, rank, "after") for rank, value in enumerate(after)]
    return old, new, _Call(name, operation, root)


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
    return str(number) if isinstance(number, bool) else draw.number(number)


def _sources(
    old: Sequence[list | None], new: Sequence[list | None], call: _Call
) -> list[list[list[int | None]]]:
    """Where each value in `new` came from.

    The rank that held it, or _COMPUTED, or _UNDEFINED, or None where several ranks
    held it.
    """
    owners: dict[str, set[int]] = {}
    for rank, held in enumerate(old):
        for text in (text for part in held or () for text in part):
            owners.setdefault(text, set()).add(rank)
    operation = call.name.lower().replace("-", "_")
    reduces = "reduce" in operation and len(old) > 1
    on_every_rank = "all_reduce" in operation or "reduce_scatter" in operation
    sources = []
    for rank, held in enumerate(new):
        result_here = on_every_rank or rank == call.root
        if reduces and not result_here and call.root is not None:
            sources.append([[_UNDEFINED] * len(part) for part in held or ()])
        elif held == old[rank] and not (reduces and result_here):
            sources.append([[rank] * len(part) for part in held or ()])
        elif reduces:
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
    if source == _UNDEFINED:
        return {"fill": PAPER, "hatch": "....", "edge": LINE, "dashed": True}
    return {"fill": draw.tint(RANK_COLORS[source % len(RANK_COLORS)], 0.5)}


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
        draw.box(board, left, y, 0.8, height, word, **looks)
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
    for index in draw.shown(len(cells), room):
        if index is None:
            looks = {"size": NORMAL, "ha": "center"}
            draw.write(board, x + width / 2, y + height / 2, "…", **looks)
        else:
            text, source, first = cells[index]
            x += GAP if first and index else 0
            looks = {"size": NORMAL, "rounded": 0.02, **_fill_of(source)}
            draw.box(board, x, y, width, height, text, **looks)
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
    need = max([draw.width_of(text, NORMAL) for text in texts], default=0.0)
    # What is left for each cell when all of them are drawn, at the busiest ranks.
    gaps = cells = 0
    for side in (old, new):
        gaps += max(len(held or ()) for held in side)
        cells += max(sum(map(len, held or ())) for held in side)
    fit = (room - GAP * gaps) / (cells or 1)
    wanted = max(need + 0.16, 0.3, min(0.5, fit))
    if wanted > fit:
        wanted = max(need + 0.09, fit)  # as narrow as a box's label may be
    return min(wanted, room / 6 - GAP)


def _collective_key(sources: Sequence[list], call: _Call) -> list[tuple]:
    used = {source for held in sources for part in held for source in part}
    if not used:
        return [("no rank holds anything", {"edge": LINE, "dashed": True})]
    key = [("colour: the rank it came from", *map(_fill_of, range(3)))]
    if _COMPUTED in used:
        what = "computed from several ranks"
        if call.op and (call.root is not None or call.name != "reduce"):
            what = f"{_OPERATIONS[call.op]} over the ranks"
        key.append((what, _fill_of(_COMPUTED)))
    if _UNDEFINED in used:
        key.append(("undefined: not the root", _fill_of(_UNDEFINED)))
    if None in used:
        key.append(("held by several ranks before", _fill_of(None)))
    return key


def _undefined_in_words(sources: Sequence[list]) -> str:
    ranks = [
        str(rank)
        for rank, held in enumerate(sources)
        if any(_UNDEFINED in part for part in held)
    ]
    if not ranks:
        return ""
    who = f"rank{'s' if len(ranks) > 1 else ''} {draw.listed(ranks)}"
    return f" Only the root is promised the result: undefined on {who}."


def _all_held(ranks: Sequence[list[list[str]] | None]) -> str:
    """What all ranks hold, in words; equal neighbours are said once."""
    texts = [_in_words(held) for held in ranks]
    if len(set(texts)) == 1 and len(texts) > 1:
        return f"every rank holds {texts[0]}"
    shown = [
        (rank, texts[rank]) for rank in draw.shown(len(texts), 9) if rank is not None
    ]
    said = ", ".join(f"rank {rank} holds {text}" for rank, text in shown)
    return said + (" (some ranks left out)" if len(shown) < len(texts) else "")


def _in_words(held: list[list[str]] | None) -> str:
    if held is None:
        return "nothing"
    parts = []
    for part in held:
        numbers = ["…" if i is None else part[i] for i in draw.shown(len(part), 9)]
        parts.append(f"[{', '.join(numbers)}]")
    shown = ["…" if i is None else parts[i] for i in draw.shown(len(parts), 9)]
    return ", ".join(shown) if len(parts) == 1 else f"[{', '.join(shown)}]"


# --- who sends to whom -----------------------------------------------------------

_MOST_RANKS = 8
_MOST_LINES = 36


@draw.picture
def message_steps(
    messages: "Sequence[Message]",
    world_size: int,
    title: str = "Who sends to whom",
) -> Picture:
    """Messages as arrows between ranks, one band a step.

    Below, for each rank, how many messages it sends and receives.

    Args:
        messages: What `course_utils.measure.messages.in_steps` returns.
        world_size: How many ranks there are, 2 to 8.
        title: What the picture shows, such as "Broadcast by a tree".

    Raises:
        ValueError: there is no message, or too many for one picture; or `world_size`
            is not 2 to 8.
    """
    if type(world_size) is not int or not 2 <= world_size <= _MOST_RANKS:
        raise ValueError(
            f"world_size is {world_size!r}: expected a whole number from 2 to "
            f"{_MOST_RANKS}."
        )
    if not messages:
        raise ValueError("There is nothing to draw: there is no message.")
    last_rank = max(max(m.source, m.destination) for m in messages)
    if last_rank >= world_size:
        raise ValueError(
            f"world_size is {world_size}, but rank {last_rank} sends or receives: "
            f"expected at least {last_rank + 1}."
        )
    steps = {
        step: _lines_of([m for m in messages if m.step == step])
        for step in sorted({message.step for message in messages})
    }
    count = sum(map(len, steps.values()))
    if count > _MOST_LINES:
        raise ValueError(
            f"{count} lines of arrows are too many for one picture: draw fewer steps "
            f"or fewer ranks (at most {_MOST_LINES} lines)."
        )
    pad = 0.1 if count <= 16 else 0.05
    line = min(0.3, max(0.2, 4.4 / count))
    tall = line * count + pad * len(steps)
    label = 0.2 + max(draw.width_of(f"step {step}", NORMAL) for step in steps)
    first, last = MARGIN + label + 0.4, WIDTH - MARGIN - 0.4
    # Two ranks at the two edges would be far apart for no reason.
    across = min((last - first) / (world_size - 1), 1.9)
    lanes = [first + rank * across for rank in range(world_size)]
    right = lanes[-1] + 0.4
    top = 0.98 + tall
    note = _traffic_in_words(messages, len(steps), world_size)
    words = max(draw.width_of(note, SMALL), draw.width_of(title, LARGE, "bold"))
    width = min(max(right, MARGIN + words) + MARGIN, WIDTH)
    picture, board = draw.board(top + 0.82, title, width)
    for rank, x in enumerate(lanes):
        looks = {"ha": "center", "size": NORMAL}
        draw.write(board, x, top + 0.15, f"rank {rank}", **looks)
        board.plot([x, x], [0.98, top], color="#C8C8C8", lw=1.0, zorder=0)
    y = top
    for step, lines in steps.items():
        height = line * len(lines) + pad
        board.plot([MARGIN, right], [y, y], color="#E3E3E3", lw=0.8, zorder=0)
        draw.write(board, MARGIN, y - height / 2, f"step {step}", size=NORMAL)
        for place, row in enumerate(lines):
            at = y - pad / 2 - (place + 0.5) * line
            for message in row:
                _draw_message(board, message, lanes, at)
        y -= height
    board.plot([MARGIN, right], [y, y], color=LINE, lw=0.8, zorder=0)
    sent = [sum(m.source == rank for m in messages) for rank in range(world_size)]
    received = [
        sum(m.destination == rank for m in messages) for rank in range(world_size)
    ]
    for low, word, numbers in ((0.83, "sends", sent), (0.63, "receives", received)):
        draw.write(board, MARGIN, low, word, color=QUIET)
        for x, number in zip(lanes, numbers, strict=True):
            draw.write(board, x, low, str(number), ha="center")
    draw.note(board, note, 0.24)
    picture.summary = (
        f"{title.rstrip('.')}, {draw.count(world_size, 'rank')}. {note} "
        f"{_steps_in_words(messages)}"
    )
    return picture


def _steps_in_words(messages: "Sequence[Message]") -> str:
    """What is sent in each step; in the first one alone where there is much."""
    steps = sorted({message.step for message in messages})
    told = steps if len(messages) <= 16 else steps[:1]
    said = []
    for step in told:
        pairs = [
            f"{m.source} to {m.destination} ({draw.byte_size(m.nbytes)})"
            for m in messages
            if m.step == step
        ]
        said.append(f"step {step}: {', '.join(pairs)}")
    more = len(steps) - len(told)
    rest = f"; then {draw.count(more, 'step')} more" if more else ""
    return draw.sentence("; ".join(said) + rest)


def _lines_of(messages: "Sequence[Message]") -> "list[list[Message]]":
    """Messages of a step, in as many lines as they need to lie side by side."""
    lines: list[list[Message]] = []
    for message in messages:
        low, high = sorted((message.source, message.destination))
        for line in lines:
            ends = [sorted((m.source, m.destination)) for m in line]
            if all(high <= start or stop <= low for start, stop in ends):
                line.append(message)
                break
        else:
            lines.append([message])
    return lines


def _draw_message(
    board: Axes, message: "Message", lanes: Sequence[float], y: float
) -> None:
    start, stop = lanes[message.source], lanes[message.destination]
    toward = 0.05 if stop > start else -0.05
    draw.arrow(board, (start + toward, y), (stop - toward, y), head=8)
    board.plot([start + toward], [y], "o", ms=3, color=INK)
    label = draw.cut(draw.byte_size(message.nbytes), abs(stop - start) - 0.3, SMALL)
    if label:
        paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}
        # Off the middle, where the line of a rank often is, by the arrow's head.
        middle = (start + stop) / 2 - toward / 2
        draw.write(board, middle, y, label, ha="center", bbox=paper)


def _traffic_in_words(
    messages: "Sequence[Message]", steps: int, world_size: int
) -> str:
    """How many messages, and which rank has the most of them."""
    load = [
        sum(rank in (m.source, m.destination) for m in messages)
        for rank in range(world_size)
    ]
    busiest = [rank for rank, number in enumerate(load) if number == max(load)]
    most = max(
        sum(m.nbytes for m in messages if rank in (m.source, m.destination))
        for rank in busiest
    )
    total = draw.byte_size(sum(message.nbytes for message in messages))
    whole = f"{draw.count(len(messages), 'message')} in {draw.count(steps, 'step')}"
    whole += f", {total} in all"
    through = f"{draw.count(max(load), 'message')} ({draw.byte_size(most)})"
    if len(busiest) == world_size:
        return f"{whole}. Every rank: {through} sent or received."
    who = f"rank{'s' if len(busiest) > 1 else ''} {draw.listed(busiest)}"
    each = "each " if len(busiest) > 1 else ""
    return f"{whole}. Busiest: {who}, {each}with {through} sent or received."


# --- how fast collectives are ----------------------------------------------------

_CURVES: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "marker": "o"},
    {"color": VERMILLION, "marker": "s"},
    {"color": GREEN, "marker": "^"},
    {"color": PURPLE, "marker": "D"},
    {"color": INK, "marker": "v"},
    {"color": QUIET, "marker": "P"},
)


class _Speeds(NamedTuple):
    """What was measured of one collective, by size."""

    sizes: list[float]
    seconds: list[float]
    rates: list[float]
    fit: costs.Transfer | None


@draw.picture
def collective_bandwidth(
    rows: Iterable[Mapping[str, Any]],
    *,
    title: str = "Time and bus bandwidth of collectives, by size",
) -> Picture:
    """Measured time and bus bandwidth of collectives, against the size.

    A line through the times is latency + size / bandwidth, from `costs.fit_transfer`.
    Sizes at which latency takes more than half of the time are latency-bound.

    Args:
        rows: One dict a measurement, as `workers/bench_all_reduce.py --json` writes
            them: "collective", "world_size", "size" (bytes, as nccl-tests counts) and
            "time_us". Other keys are ignored. At most six collectives.
        title: What the picture shows.

    Raises:
        ValueError: a key is missing, a number is not above 0, there is no measurement,
            there are too many collectives, or one that has no bus bandwidth.
    """
    curves = _speeds(rows)
    lines = draw.key_lines(list(curves))
    below = 0.42 + 0.22 * len(lines)
    low, high = below + 0.62, below + 2.76
    picture, board = draw.board(high + 2.38, title)
    left, width, tall = MARGIN + 0.72, WIDTH - 2 * MARGIN - 0.82, 1.68
    sizes = [size for curve in curves.values() for size in curve.sizes]
    edges = min(sizes) / 1.6, max(sizes) * 1.6
    halves = [
        costs.half_bandwidth_bytes(
            latency=curve.fit.latency, bandwidth=curve.fit.bandwidth
        )
        for curve in curves.values()
        if curve.fit
    ]
    panels = (
        (high, "time", draw.duration, "seconds"),
        (low, "bus bandwidth", lambda rate: f"{draw.byte_size(rate)}/s", "rates"),
    )
    for bottom, heading, say, what in panels:
        axis = draw.chart(picture, left, bottom, width, tall)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(*edges)
        values = [v for curve in curves.values() for v in getattr(curve, what)]
        axis.set_ylim(min(values) / 1.6, max(values) * 1.6)
        if halves:
            axis.axvspan(edges[0], min(halves), color=MIST, lw=0, zorder=0)
            for half in {min(halves), max(halves)}:
                looks = {"color": LINE, "lw": 1.0, "ls": (0, (3, 3))}
                axis.axvline(half, zorder=1, **looks)
        for looks, curve in zip(_CURVES, curves.values(), strict=False):
            axis.plot(
                *(curve.sizes, getattr(curve, what)),
                **{"ls": "none", "ms": 6, "mec": INK, "mew": 0.5, **looks},
                zorder=5,
            )
            if curve.fit:
                _plot_fit(axis, curve, what, edges, looks["color"])
        draw.log_ticks(axis.set_xticks, edges, draw.byte_size, 8)
        draw.log_ticks(axis.set_yticks, axis.get_ylim(), say, 5)
        axis.minorticks_off()
        draw.grid(axis)
        draw.write(board, left, bottom + tall + 0.12, heading, weight="bold")
    draw.write(board, left + width, low - 0.38, "size", ha="right")
    _name_regions(board, left, width, high + tall + 0.12, edges, halves)
    for place, line in enumerate(lines):
        x, y = MARGIN, below - 0.22 * place
        for name in line:
            looks = _CURVES[list(curves).index(name)]
            board.plot([x + 0.1], [y], **{"ls": "none", "ms": 6, "mec": INK, **looks})
            draw.write(board, x + 0.26, y, draw.cut(name, 3.0, SMALL), color=QUIET)
            x += draw.key_entry(name)
    note = "Lines: latency + size / bandwidth, fitted to the times."
    if len(halves) > 1:
        note += " Each collective's half-way point lies between the dashed lines."
    elif halves:
        note += " Dashed: here latency is half of the time."
    unfitted = [name for name, curve in curves.items() if not curve.fit]
    if unfitted:
        note = f"No latency and bandwidth fit the times of {draw.listed(unfitted)}."
    draw.note(board, note)
    said = [_speeds_in_words(name, curve) for name, curve in curves.items()]
    picture.summary = f"{title.rstrip('.')}. {' '.join(said)}"
    return picture


def _speeds(rows: Iterable[Mapping[str, Any]]) -> dict[str, _Speeds]:
    """The measurements of each collective, by the name that the key gives it."""
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        missing = {"collective", "world_size", "size", "time_us"} - set(row)
        if missing:
            raise ValueError(
                f"The row {dict(row)!r} has no {draw.listed(sorted(missing))}."
            )
        for what in ("size", "time_us"):
            if draw.finite(row[what], what) <= 0:
                raise ValueError(f"{what} is {row[what]}: expected more than 0.")
        if draw.finite(row["world_size"], "world_size") < 2:
            raise ValueError(
                f"world_size is {row['world_size']}: a single rank has no bandwidth."
            )
        which = (str(row["collective"]), row["world_size"])
        points.setdefault(which, []).append((row["size"], row["time_us"] / 1e6))
    if not 1 <= len(points) <= len(_CURVES):
        raise ValueError(
            f"There are measurements of {draw.count(len(points), 'collective')}: "
            f"expected 1 to {len(_CURVES)}."
        )
    same = len({world_size for _, world_size in points}) == 1
    curves = {}
    for (collective, world_size), measured in points.items():
        sizes, seconds = zip(*sorted(measured), strict=True)
        factor = costs.bus_bandwidth_factor(collective, world_size)
        rates = [factor * n / t for n, t in zip(sizes, seconds, strict=True)]
        try:
            fit = costs.fit_transfer(sizes, seconds)
        except ValueError:
            fit = None  # one size alone, or times that do not grow: nothing to mark
        ranks = "" if same else f", {draw.count(world_size, 'rank')}"
        curves[f"{collective}{ranks}"] = _Speeds([*sizes], [*seconds], rates, fit)
    return curves


def _plot_fit(
    axis: Axes, curve: _Speeds, what: str, edges: tuple[float, float], color: str
) -> None:
    sizes = np.geomspace(*edges, 200)
    values = np.array([curve.fit.seconds(float(size)) for size in sizes])
    if what == "rates":
        factor = curve.rates[0] * curve.seconds[0] / curve.sizes[0]
        values = factor * sizes / values
    axis.plot(sizes, values, color=color, lw=1.3, zorder=3)


def _name_regions(
    board: Axes,
    left: float,
    width: float,
    y: float,
    edges: tuple[float, float],
    halves: Sequence[float],
) -> None:
    """The words above the parts in which all are latency-bound or bandwidth-bound."""
    if not halves:
        return
    whole = math.log(edges[1] / edges[0])
    places = [
        left + width * min(max(math.log(half / edges[0]) / whole, 0.0), 1.0)
        for half in (min(halves), max(halves))
    ]
    start = left + 0.5  # the heading of the panel is there
    for low, high, words in (
        (start, places[0], ("latency-bound", "latency")),
        (places[1], left + width, ("bandwidth-bound", "bandwidth")),
    ):
        text = draw.first_that_fits(words, high - low - 0.06)
        draw.write(board, (low + high) / 2, y, text, ha="center", color=QUIET)


def _speeds_in_words(name: str, curve: _Speeds) -> str:
    best = max(range(len(curve.rates)), key=curve.rates.__getitem__)
    words = (
        f"{name}: {draw.duration(curve.seconds[0])} for "
        f"{draw.byte_size(curve.sizes[0])}, {draw.duration(curve.seconds[-1])} for "
        f"{draw.byte_size(curve.sizes[-1])}; highest bus bandwidth "
        f"{draw.byte_size(curve.rates[best])}/s at {draw.byte_size(curve.sizes[best])}"
    )
    if not curve.fit:
        return f"{words}; no latency and bandwidth fit."
    half = costs.half_bandwidth_bytes(
        latency=curve.fit.latency, bandwidth=curve.fit.bandwidth
    )
    return (
        f"{words}; fitted latency {draw.duration(curve.fit.latency)}, latency-bound "
        f"below {draw.byte_size(half)}."
    )
