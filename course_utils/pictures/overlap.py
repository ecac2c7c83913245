"""Pictures of DDP: what is sent when, and what of it the computing hides."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from course_utils.pictures import draw
from course_utils.pictures.draw import (
    BLUE,
    GREEN,
    LINE,
    MARGIN,
    NORMAL,
    ORANGE,
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
    from course_utils.theory.simulator import Step

# --- computing and communication at the same time -----------------------------------


_COMPUTING: dict[str, dict[str, Any]] = {
    "forward": {"fill": draw.tint(BLUE, 0.35)},
    "backward": {"fill": draw.tint(SKY, 0.3), "hatch": "\\\\\\\\", "hatched": BLUE},
    "optimizer": {"fill": draw.tint(GREEN, 0.3), "hatch": "..."},
}
_KINDS = {**_COMPUTING, "communicate": {"fill": draw.tint(ORANGE, 0.5)}}
_EXPOSED = {"fill": draw.tint(VERMILLION, 0.35), "hatch": "xxxx", "hatched": VERMILLION}
_MOST_ROWS = 4
_LANE, _PAUSE = 0.27, 0.22  # inches
_SIDES = 0.12  # inches of a box beside its label


@draw.picture
def overlap(
    events: "Sequence[Iterable[tuple]] | Mapping[int | str, Iterable[tuple]]",
    *,
    title: str = "A training step: computing and communication",
) -> Picture:
    """One step: when each rank computes, when it communicates, what is exposed.

    Exposed is communication during which the rank does not compute: only this makes
    the step longer. Intervals that overlap are counted once.

    Args:
        events: For each rank, in rank order, tuples (start, stop, label, kind) in
            seconds on one clock; or a dict from rank (or name) to these, as
            `step_events` makes it. Kinds: "forward", "backward" and "optimizer", which
            is computing; "communicate" from the start of a bucket's all-reduce to its
            end. One to four ranks.
        title: What the picture shows.

    Raises:
        ValueError: there is no interval, or none of computing; one ends before it
            starts or has another kind; or there are too many ranks.
    """
    ranks = dict(events if isinstance(events, Mapping) else enumerate(events))
    if not 1 <= len(ranks) <= _MOST_ROWS:
        raise ValueError(
            f"events is of {draw.count(len(ranks), 'rank')}: expected 1 to "
            f"{_MOST_ROWS}, for example as a dict of the ranks that matter."
        )
    rows = {
        name if isinstance(name, str) else f"rank {name}": _parts(parts, name)
        for name, parts in ranks.items()
    }
    every = [part for row in rows.values() for part in row]
    origin = min(part.start for part in every)
    span = max(part.stop for part in every) - origin
    shares = {name: _shares(row) for name, row in rows.items()}
    lanes = {
        name: _in_lanes([p for p in row if p.kind == "communicate"], 8 // len(rows))
        for name, row in rows.items()
    }
    tall = {
        name: (2 + max(1, len(found))) * _LANE + _PAUSE for name, found in lanes.items()
    }
    height = 1.68 + sum(tall.values())
    picture, board = draw.board(height, title)
    names = (*rows, "communication")
    label = 0.16 + min(max(draw.width_of(name, SMALL, "bold") for name in names), 1.6)
    totals = [duration(part) for share in shares.values() for part in share[1:]]
    room = 0.1 + max(draw.width_of(text, SMALL, "bold") for text in (*totals, "in all"))
    left = MARGIN + label
    width = WIDTH - MARGIN - room - left
    top, bottom = height - 0.72, height - 0.72 - sum(tall.values())
    unit = draw.time_axis(picture, left, bottom, width, top - bottom, span)
    draw.write(board, left + width / 2, bottom - 0.38, f"time ({unit})", ha="center")
    looks = {"ha": "right", "weight": "bold"}
    draw.write(board, WIDTH - MARGIN, top + 0.12, "in all", **looks)
    inch = width / (span or 1.0)

    def place(part: Interval) -> tuple[float, float]:
        return (
            left + (part.start - origin) * inch,
            max((part.stop - part.start) * inch, 0.02),
        )

    y = top
    for name, row in rows.items():
        y -= _PAUSE
        looks = {"weight": "bold"}
        draw.write(board, MARGIN, y + 0.1, draw.cut(name, 1.6, SMALL, "bold"), **looks)
        computing = [part for part in row if part.kind in _COMPUTING]
        groups = [
            ("computing", [computing], shares[name].computing),
            ("communication", lanes[name] or [[]], shares[name].communication),
            ("exposed", [_exposed(row)], shares[name].exposed),
        ]
        for word, lines, seconds in groups:
            middle = y - len(lines) * _LANE / 2
            draw.write(board, MARGIN, middle, word, color=QUIET)
            draw.write(board, WIDTH - MARGIN, middle, duration(seconds), ha="right")
            written = _labels([part for line in lines for part in line], inch)
            for line in lines:
                y -= _LANE
                for part in line:
                    looks = {"rounded": 0.02, **_KINDS.get(part.kind, _EXPOSED)}
                    x, wide = place(part)
                    label = written[part]
                    draw.box(board, x, y + 0.03, wide, _LANE - 0.05, label, **looks)
        board.plot([MARGIN, WIDTH - MARGIN], [y, y], color=LINE, lw=0.6, zorder=0)
    used = [kind for kind in _KINDS if any(part.kind == kind for part in every)]
    samples = [(_WORDS.get(kind, kind), _KINDS[kind]) for kind in used]
    if any(share.exposed for share in shares.values()):
        samples.append(("exposed", _EXPOSED))
    draw.key(board, 0.25, samples)
    said = "; ".join(
        f"{name}: computing {duration(share.computing)}, communication "
        f"{duration(share.communication)} in "
        f"{draw.count(sum(p.kind == 'communicate' for p in rows[name]), 'all-reduce')}"
        f", of "
        f"which {duration(share.exposed)} exposed "
        f"({_percent(share.exposed, share.step)} of its {duration(share.step)})"
        for name, share in shares.items()
    )
    picture.summary = (
        f"{title.rstrip('.')}. {duration(span)} in all. {draw.sentence(said)}"
    )
    return picture


_WORDS = {"communicate": "all-reduce"}


def step_events(step: "Step") -> dict[str, list[tuple[float, float, str, str]]]:
    """A simulated step (`simulator.ddp_step`) as events for `overlap`.

    All GPUs do the same. If one is slow, these are its own times: all wait for it.
    """
    backward_ends = step.compute + step.waiting
    events = [
        (0.0, step.forward, "forward", "forward"),
        (step.forward, backward_ends, "backward", "backward"),
    ]
    for number, bucket in enumerate(step.buckets):
        # A GPU alone has nobody to send to.
        if bucket.stop > bucket.start:
            events.append(
                (bucket.start, bucket.stop, f"bucket {number}", "communicate")
            )
    return {"slowest GPU" if step.waiting else "every GPU": events}


class _Shares(NamedTuple):
    """Seconds of a rank; `step` is from the first start to the last stop."""

    step: float
    computing: float
    communication: float
    exposed: float


def _parts(values: Iterable[tuple], name: int | str) -> list[Interval]:
    """The intervals of a rank in order of time, checked."""
    who = name if isinstance(name, str) else f"rank {name}"
    parts = [checked(value, who, _KINDS) for value in values]
    if not any(part.kind in _COMPUTING for part in parts):
        raise ValueError(f"There is no computing of {who}: nothing hides anything.")
    return sorted(parts)


def _merged(parts: Iterable[Interval]) -> list[tuple[float, float]]:
    """The times in which at least one of the parts goes on."""
    merged: list[tuple[float, float]] = []
    for part in sorted(parts):
        if merged and part.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], part.stop)
        else:
            merged.append((part.start, part.stop))
    return merged


def _exposed(row: Sequence[Interval]) -> list[Interval]:
    """The times in which a rank communicates and does not compute."""
    computing = _merged(part for part in row if part.kind in _COMPUTING)
    exposed = []
    for start, stop in _merged(part for part in row if part.kind == "communicate"):
        for busy, free in computing:
            if start < busy < stop:
                exposed.append((start, busy))
            if busy < stop:
                start = max(start, free)
        if start < stop:
            exposed.append((start, stop))
    return [Interval(start, stop, "exposed", "exposed") for start, stop in exposed]


def _shares(row: Sequence[Interval]) -> _Shares:
    def total(intervals: Iterable[tuple[float, float]]) -> float:
        return sum(stop - start for start, stop in intervals)

    return _Shares(
        max(part.stop for part in row) - row[0].start,
        total(_merged(part for part in row if part.kind in _COMPUTING)),
        total(_merged(part for part in row if part.kind == "communicate")),
        total((part.start, part.stop) for part in _exposed(row)),
    )


def _in_lanes(
    parts: Iterable[Interval], most: float = math.inf
) -> list[list[Interval]]:
    """What goes on at the same time in lanes of its own; parts are in order of time.

    Where there are more lanes than that, those of the last one are drawn as one.
    """
    lanes: list[list[Interval]] = []
    for part in parts:
        free = [lane for lane in lanes if lane[-1].stop <= part.start]
        if free:
            free[0].append(part)
        elif len(lanes) < most:
            lanes.append([part])
        else:
            last = lanes[-1][-1]
            stop = max(last.stop, part.stop)
            lanes[-1][-1] = last._replace(stop=stop, label="several buckets")
    return lanes


def _labels(parts: Sequence[Interval], inch: float) -> dict[Interval, str]:
    """What is written on each part. Those of a kind all have a label, or none has one.

    `inch` is the width of a second.
    """
    written = {}
    for kind in {part.kind for part in parts}:
        alike = [part for part in parts if part.kind == kind]
        if kind == "exposed":  # one word for all, so it may be missing on some
            for part in alike:
                room = (part.stop - part.start) * inch - _SIDES
                written[part] = draw.first_that_fits((part.label,), room)
            continue
        whole = [part.label for part in alike]
        last = [label.rpartition(" ")[2] for label in whole]
        for labels in (whole, last, [""] * len(alike)):
            if all(
                draw.width_of(label, SMALL) <= (part.stop - part.start) * inch - _SIDES
                for label, part in zip(labels, alike, strict=True)
                if label
            ):
                written |= dict(zip(alike, labels, strict=True))
                break
    return written


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


# --- which gradients travel together -------------------------------------------------

_MOST_BUCKETS = 10
_BUCKET_COLORS = (draw.tint(SKY, 0.55), draw.tint(ORANGE, 0.35))


@draw.picture
def ddp_buckets(
    buckets: Sequence[Sequence[tuple[str, float]]],
    *,
    title: str = "The buckets of DDP, in the order of sending",
) -> Picture:
    """Each bucket as a bar: which parameters are in it, and how large it is.

    All bars have one scale. A parameter is a part of the bar, as wide as its gradient
    is large; its name is left out where there is no room.

    Args:
        buckets: In the order in which they are sent; each holds (name, bytes) of its
            parameters, in the order in which they lie in it.
        title: What the picture shows.

    Raises:
        ValueError: there is no bucket, an empty one, or a size that is negative.
    """
    if not buckets:
        raise ValueError("There is no bucket: pass at least one.")
    for number, bucket in enumerate(buckets):
        if not bucket:
            raise ValueError(f"Bucket {number} is empty: it would not be sent.")
        for name, nbytes in bucket:
            if draw.finite(nbytes, f"The size of {name!r}") < 0:
                raise ValueError(f"The size of {name!r} is {nbytes}: expected bytes.")
    sizes = [sum(nbytes for _, nbytes in bucket) for bucket in buckets]
    places = draw.shown(len(buckets), _MOST_BUCKETS)
    step = 0.52
    height = 1.0 + step * len(places)
    picture, board = draw.board(height, title)
    label = 0.14 + draw.width_of(f"bucket {len(buckets) - 1}", NORMAL)
    said = [
        f"{_mib(size)}, {draw.count(len(bucket), 'parameter')}"
        for size, bucket in zip(sizes, buckets, strict=True)
    ]
    room = 0.12 + max(draw.width_of(words, SMALL) for words in said)
    left = MARGIN + label
    width = WIDTH - MARGIN - room - left
    inch = width / (max(sizes) or 1.0)
    written = _names([part for bucket in buckets for part in bucket], inch)
    for row, number in enumerate(places):
        y = height - 0.56 - (row + 1) * step
        if number is None:
            draw.write(board, MARGIN, y + step / 2, "…", size=NORMAL)
            continue
        draw.write(board, MARGIN, y + 0.36, f"bucket {number}", size=NORMAL)
        x = left
        for place, (name, nbytes) in enumerate(buckets[number]):
            wide = nbytes * inch
            looks = {"fill": _BUCKET_COLORS[place % 2], "rounded": 0.0, "line": 0.6}
            text = draw.first_that_fits((written[name],), wide - _SIDES)
            draw.box(board, x, y + 0.24, wide, 0.24, text, **looks)
            x += wide
        draw.write(board, x + 0.1, y + 0.36, said[number])
        ends = draw.cut(_from_to(buckets[number]), WIDTH - MARGIN - left, SMALL)
        draw.write(board, left, y + 0.11, ends, color=QUIET)
    parameters = sum(map(len, buckets))
    note = (
        f"{draw.count(parameters, 'parameter')} in "
        f"{draw.count(len(buckets), 'bucket')}, {_mib(sum(sizes))} in all. Bucket 0 is "
        "sent first."
    )
    draw.note(board, note, 0.24)
    told = "; ".join(
        "…"
        if number is None
        else f"bucket {number}: {said[number]} ({_from_to(buckets[number])})"
        for number in places
    )
    picture.summary = f"{title.rstrip('.')}. {note} {draw.sentence(told)}"
    return picture


def _names(parts: Sequence[tuple[str, float]], inch: float) -> dict[str, str]:
    """What to write for each parameter: its name, or for all of them "layer.w".

    `inch` is the width of a byte. The short form is for all, if it gives one of them a
    name that has none otherwise.
    """

    def fitting(names: Mapping[str, str]) -> int:
        return sum(
            draw.width_of(names[name], SMALL) <= nbytes * inch - _SIDES
            for name, nbytes in parts
        )

    whole = {name: name for name, _ in parts}
    short = {name: _short_name(name) for name, _ in parts}
    return short if fitting(short) > fitting(whole) else whole


def _short_name(name: str) -> str:
    layer, dot, last = name.rpartition(".")
    return f"{layer}{dot}{last[:1]}" if layer else name


def _from_to(bucket: Sequence[tuple[str, float]]) -> str:
    first, last = bucket[0][0], bucket[-1][0]
    return first if len(bucket) == 1 else f"{first} to {last}"


def _mib(nbytes: float) -> str:
    mib = nbytes / costs.MiB
    return f"{mib:,.1f} MiB" if mib >= 0.1 else f"{draw.number(mib, 2)} MiB"
