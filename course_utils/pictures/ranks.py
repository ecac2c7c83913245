"""Pictures of ranks: who waits for whom."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from course_utils.pictures import draw
from course_utils.pictures.draw import (
    BLUE,
    MARGIN,
    NORMAL,
    SMALL,
    VERMILLION,
    WIDTH,
    YELLOW,
    Picture,
)

# --- who waits for whom ------------------------------------------------------------


class Interval(NamedTuple):
    """What one rank did from `start` to `stop`, in seconds on a clock all ranks share.

    In a `timeline` its `kind` is "compute", "wait" or "stuck" (a wait that did not end
    by itself).
    """

    start: float
    stop: float
    label: str
    kind: str


_KINDS: dict[str, dict[str, Any]] = {
    "compute": {"fill": draw.tint(BLUE, 0.3)},
    "wait": {"fill": draw.tint(YELLOW, 0.2), "hatch": "....", "hatched": VERMILLION},
    "stuck": {
        "fill": draw.tint(VERMILLION, 0.2),
        "hatch": "xxxx",
        "hatched": VERMILLION,
        "line": 2.0,
    },
}


@draw.picture
def timeline(
    events: Sequence[Iterable[tuple]],
    *,
    title: str = "Who waits for whom",
) -> Picture:
    """One row a rank: what it did, and when.

    A label that is too long for its bar is left out; the pattern of the bar says its
    kind.

    Args:
        events: The `Interval`s (or tuples like them) of each rank, in rank order, as
            `Ranks.run` returns them.
        title: What the picture shows.

    Raises:
        ValueError: no interval, one that ends before it starts, an unknown kind, or
            more than 16 ranks.
    """
    rows = [
        [checked(values, f"rank {rank}", _KINDS) for values in row]
        for rank, row in enumerate(events)
    ]
    every = [interval for row in rows for interval in row]
    if not every:
        raise ValueError("There is nothing to draw: no rank has an interval.")
    if len(rows) > 16:
        raise ValueError(
            f"{len(rows)} ranks are too many for one picture: pass at most 16."
        )
    origin = min(interval.start for interval in every)
    span = max(interval.stop for interval in every) - origin
    step = min(0.5, 2.85 / len(rows))
    height = 1.65 + step * len(rows)
    picture, board = draw.board(height, title)
    names = [f"rank {rank}" for rank in range(len(rows))]
    label = 0.16 + max(draw.width_of(name, NORMAL) for name in names)
    left, width = MARGIN + label, WIDTH - 2 * MARGIN - label - 0.1
    top = height - 0.6
    bottom = top - step * len(rows)
    unit = draw.time_axis(
        picture, left, bottom - 0.06, width, top - bottom + 0.06, span
    )
    draw.write(board, left + width / 2, bottom - 0.42, f"time ({unit})", ha="center")
    inch = width / (span or 1.0)
    tall = step - 0.1
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = top - (place + 1) * step
        draw.write(board, MARGIN, y + step / 2, name, size=NORMAL)
        for interval in row:
            start = left + (interval.start - origin) * inch
            wide = max((interval.stop - interval.start) * inch, 0.02)
            looks = {"rounded": 0.02, **_KINDS[interval.kind]}
            fits = draw.width_of(interval.label, SMALL) + 0.12 <= wide and tall >= 0.17
            text = interval.label if fits else ""
            draw.box(board, start, y + 0.05, wide, tall, text, **looks)
    kinds = [kind for kind in _KINDS if any(i.kind == kind for i in every)]
    draw.key(board, 0.25, [(kind, _KINDS[kind]) for kind in kinds])
    picture.summary = _timeline_in_words(rows, span, title)
    return picture


def checked(values: tuple, who: str, known: Iterable[str]) -> Interval:
    """An interval of one row, if it is one of a known kind."""
    try:
        start, stop, label, kind = values
    except (TypeError, ValueError):
        raise ValueError(
            f"An interval of {who} is {values!r}: expected (start, stop, label, kind)."
        ) from None
    if kind not in known:
        kinds = draw.listed(map(repr, known))
        raise ValueError(f"The kind {kind!r} of {who} is unknown: use {kinds}.")
    start = draw.finite(start, f"The start of {label!r} on {who}")
    stop = draw.finite(stop, f"The stop of {label!r} on {who}")
    if stop < start:
        raise ValueError(
            f"{label!r} on {who} ends at {stop}, before it starts at {start}."
        )
    return Interval(start, stop, str(label), kind)


def _timeline_in_words(
    rows: Sequence[Sequence[Interval]], span: float, title: str
) -> str:
    unit, size = draw.unit_of(span)
    said = []
    for rank, row in enumerate(rows):
        times = []
        for kind in _KINDS:
            spent = [i.stop - i.start for i in row if i.kind == kind]
            if spent:
                times.append(f"{kind} {draw.number(sum(spent) / size, 3)}")
        said.append(f"rank {rank}: {', '.join(times) or 'nothing'}")
    whole = f"{draw.count(len(rows), 'rank')} over {draw.number(span / size, 3)} {unit}"
    return f"{title.rstrip('.')}. {whole}. Times in {unit}: {'; '.join(said)}."
