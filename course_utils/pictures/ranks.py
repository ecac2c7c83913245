"""Pictures of ranks: what a collective does to them, and who waits for whom."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from course_utils.pictures import draw
from course_utils.pictures.draw import (
    BLUE,
    GAP,
    GREEN,
    LARGE,
    LINE,
    MARGIN,
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

# --- a collective, before and after ------------------------------------------------

_RANK_COLORS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION, LINE)
_COMPUTED = -1


@draw.picture
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
            f"before is of {draw.count(len(before), 'rank')}, after of "
            f"{draw.count(len(after), 'rank')}: give one entry a rank to both."
        )
    old = [_held(value, rank, "before") for rank, value in enumerate(before)]
    new = [_held(value, rank, "after") for rank, value in enumerate(after)]
    sources = _sources(old, new, name)
    world_size = len(old)
    rows = draw.shown(world_size, 9)
    step = min(0.46, 2.9 / len(rows))
    height = 1.52 + step * len(rows)
    label = 0.16 + draw.width_of(f"rank {world_size - 1}", NORMAL)
    middle = 1.35
    room = WIDTH - 2 * MARGIN - label - middle
    cell = _cell_width(old, new, room)
    most = [max(_across(held, cell) for held in ranks) for ranks in (old, new)]
    sides = most if sum(most) <= room else [min(side, room / 2) for side in most]
    title = f"{name} on {draw.count(world_size, 'rank')}"
    key = _collective_key(sources)
    width = max(
        2 * MARGIN + label + sum(sides) + middle,
        2 * MARGIN + min(draw.width_of(title, LARGE, "bold"), WIDTH - 2 * MARGIN),
        MARGIN + draw.key_width(key),
    )
    picture, board = draw.board(height, title, width)
    left = MARGIN + label
    right = left + sides[0] + middle
    top = height - 0.84
    for x, word in ((left, "before"), (right, "after")):
        draw.write(board, x, top + 0.12, word, size=NORMAL, weight="bold")
    for place, rank in enumerate(rows):
        y = top - (place + 1) * step
        if rank is None:
            draw.write(board, MARGIN, y + step / 2, "…", size=LARGE)
            continue
        draw.write(board, MARGIN, y + step / 2, f"rank {rank}", size=NORMAL)
        own = [[rank] * len(part) for part in old[rank] or ()]
        spot = (y + step * 0.08, cell, step * 0.84)
        _hold(board, (left, sides[0], *spot), old[rank], own)
        _hold(board, (right, sides[1], *spot), new[rank], sources[rank])

    center = top - step * len(rows) / 2 - 0.1
    tail, tip = right - middle + 0.15, right - 0.15
    draw.arrow(board, (tail, center), (tip, center), line=2.4, head=16)
    word = draw.wrap(name, middle - 0.14, NORMAL, lines=3, weight="bold")
    looks = {"size": NORMAL, "weight": "bold", "ha": "center", "va": "bottom"}
    draw.write(board, right - middle / 2, center + 0.12, word, **looks)
    draw.key(board, 0.3, key)
    picture.summary = (
        f"{name} on {draw.count(world_size, 'rank')}. "
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
    return str(number) if isinstance(number, bool) else draw.number(number)


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
    return {"fill": draw.tint(_RANK_COLORS[source % len(_RANK_COLORS)], 0.5)}


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
    need = max([draw.width_of(text, NORMAL) + 0.16 for text in texts], default=0.0)
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
    "compute": {"fill": draw.tint(BLUE, 0.3)},
    "communicate": {"fill": draw.tint(ORANGE, 0.5), "hatch": "////"},
    "wait": {"fill": draw.tint(YELLOW, 0.2), "hatch": "....", "hatched": VERMILLION},
    "idle": {"fill": PAPER, "edge": LINE, "dashed": True},
}


@draw.picture
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
    unit, size = draw.unit_of(span)
    step = min(0.5, 2.85 / len(rows))
    height = 1.65 + step * len(rows)
    picture, board = draw.board(height, title)
    label = 0.16 + max(draw.width_of(f"rank {rank}", NORMAL) for rank in rows)
    left, width = MARGIN + label, WIDTH - 2 * MARGIN - label - 0.1
    top = height - 0.6
    bottom = top - step * len(rows)
    axis = draw.chart(picture, left, bottom - 0.06, width, top - bottom + 0.06)
    axis.set_xlim(0, span / size or 1.0)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axis.grid(axis="x", color="#E3E3E3", linewidth=0.8)
    axis.set_axisbelow(True)
    draw.write(board, left + width / 2, bottom - 0.42, f"time ({unit})", ha="center")
    inch = width / (span or 1.0)
    for place, (rank, row) in enumerate(rows.items()):
        y = top - (place + 1) * step
        draw.write(board, MARGIN, y + step / 2, f"rank {rank}", size=NORMAL)
        for lane, lanes, interval in _lanes(row):
            tall = (step - 0.1) / lanes
            start = left + (interval.start - origin) * inch
            wide = max((interval.stop - interval.start) * inch, 0.02)
            looks = {"rounded": 0.02, **_KINDS[interval.kind]}
            fits = draw.width_of(interval.label, SMALL) + 0.12 <= wide and tall >= 0.17
            text = interval.label if fits else ""
            lowest = y + 0.05 + (lanes - 1 - lane) * tall
            draw.box(board, start, lowest, wide, tall, text, **looks)
    kinds = [kind for kind in _KINDS if any(i.kind == kind for i in every)]
    draw.key(board, 0.25, [(kind, _KINDS[kind]) for kind in kinds])
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
        kinds = draw.listed(map(repr, _KINDS))
        raise ValueError(f"The kind {kind!r} of rank {rank} is unknown: use {kinds}.")
    start = draw.finite(start, f"The start of {label!r} on rank {rank}")
    stop = draw.finite(stop, f"The stop of {label!r} on rank {rank}")
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


def _timeline_in_words(
    rows: Mapping[int, Sequence[Interval]], span: float, title: str
) -> str:
    unit, size = draw.unit_of(span)
    said = []
    for rank, row in rows.items():
        times = []
        for kind in _KINDS:
            spent = [i.stop - i.start for i in row if i.kind == kind]
            if spent:
                times.append(f"{kind} {draw.number(sum(spent) / size, 3)}")
        said.append(f"rank {rank}: {', '.join(times) or 'nothing'}")
    whole = f"{draw.count(len(rows), 'rank')} over {draw.number(span / size, 3)} {unit}"
    return f"{title.rstrip('.')}. {whole}. Times in {unit}: {'; '.join(said)}."
