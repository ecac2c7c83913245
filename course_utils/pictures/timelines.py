"""Timelines: what ranks and devices did when, who waits, and what hides what."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_utils.pictures import draw, words
from course_utils.pictures.draw import LOOKS, MARGIN, NORMAL, SMALL, WIDTH, Picture
from course_utils.pictures.words import duration
from course_utils.theory.arguments import one_of
from course_utils.theory.pipelines import PipelineAction
from course_utils.theory.simulator import FsdpStep, Step

if TYPE_CHECKING:
    from course_utils.virtual_gpus.records import Interval, Timeline

# --- rows of intervals ----------------------------------------------------------------


class _Part(NamedTuple):
    """What was done from `start` to `stop`, in seconds on a clock that all share."""

    start: float
    stop: float
    label: str
    kind: str


class _Row(NamedTuple):
    """A row of a timeline: a name, intervals, and what is said at the right.

    `heading` stands above it, with a line; `line` is whether a line is below it.
    """

    name: str
    parts: Sequence[_Part]
    said: str = ""
    heading: str = ""
    tall: float = 0.27


_PAUSE = 0.26  # inches above a row that has a heading
_SIDES = 0.1  # inches of a box beside its label
_DOT = 0.03  # inches of what takes next to no time


def _rows(
    rows: Sequence[_Row],
    span: float,
    title: str,
    *,
    column: str = "",
    sides: float = _SIDES,
) -> Picture:
    """The rows on one axis of time, and the key of their kinds; no summary yet.

    Labels are cut to their last word where not all of their kind fit. `column` is the
    heading of what is said at the right, and `sides` the inches beside a label that is
    neither a number nor "idle".
    """
    tall = sum(row.tall + _PAUSE * bool(row.heading) for row in rows)
    kinds = {part.kind for row in rows for part in row.parts}
    entries = [(_KEY.get(k, k), LOOKS[k]) for k in LOOKS if k in kinds]
    low = 0.86 + draw.KEY_LINE * (len(draw.key_lines(entries)) - 1)
    picture, board = draw.board(low + tall + 0.56 + 0.2 * bool(column), title)
    size = NORMAL if rows[0].tall > 0.4 else SMALL
    names = min(max(draw.width_of(row.name, size) for row in rows), 1.6)
    heads = max((draw.width_of(row.said, size, "bold") for row in rows), default=0.0)
    heads = max(heads, draw.width_of(column, SMALL, "bold"))
    left = MARGIN + names + 0.16
    width = WIDTH - MARGIN - left - (heads + 0.12 if heads else 0.1)
    unit, length = words.unit_of(span)
    axis = draw.chart(picture, left, low - 0.04, width, tall + 0.04)
    axis.set_xlim(0, span / length or 1.0)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_locator(draw.round_ticks(8))
    draw.grid(axis, "x")
    draw.write(board, left + width / 2, low - 0.42, f"time ({unit})", ha="center")
    draw.write(
        board, WIDTH - MARGIN, low + tall + 0.12, column, ha="right", weight="bold"
    )
    every = [part for row in rows for part in row.parts]
    origin = min((part.start for part in every), default=0.0)
    inch = width / (span or 1.0)
    short = {kind for kind in kinds if not _all_fit(every, kind, inch)}
    y = low + tall
    for row in rows:
        if row.heading:
            if y < low + tall:
                ends = [MARGIN, WIDTH - MARGIN]
                board.plot(ends, [y, y], color=draw.LINE, lw=0.6, zorder=0)
            y -= _PAUSE
            looks = {"weight": "bold", **draw.on_paper()}
            text = draw.cut(row.heading, WIDTH - 2 * MARGIN, SMALL, "bold")
            draw.write(board, MARGIN, y + 0.12, text, **looks)
        y -= row.tall
        middle = y + row.tall / 2
        draw.write(board, MARGIN, middle, draw.cut(row.name, 1.6, size), size=size)
        looks = {"ha": "right", "size": size}
        draw.write(board, WIDTH - MARGIN, middle, row.said, **looks)
        gap = min(0.05, row.tall / 12)
        for part in sorted(row.parts, key=lambda part: part.kind == "transfer"):
            x = left + (part.start - origin) * inch
            wide = max((part.stop - part.start) * inch, _DOT)
            # Of "micro-batch 3" the number is what matters.
            texts = [part.label.rpartition(mark)[2] for mark in ". "]
            if part.kind not in short:
                texts.insert(0, part.label)
            alone = texts[-1].isdigit()  # easy to read
            room = wide - (0.01 if alone else sides)
            if part.kind == "idle":  # the frame says it; the word is for long ones
                room = wide - 0.3
            text = draw.first_that_fits(texts, room) if row.tall > 0.2 else ""
            looks = {"rounded": 0.02, "line": 0.8, **LOOKS[part.kind]}
            draw.box(board, x, y + gap, wide, row.tall - 2 * gap, text, pad=0, **looks)
    draw.key(board, low - 0.64, entries)
    return picture


_KEY = {"communicate": "all-reduce"}


def _all_fit(parts: Iterable[_Part], kind: str, inch: float) -> bool:
    """Whether the labels of all parts of a kind fit into them."""
    return all(
        draw.width_of(part.label, SMALL) <= (part.stop - part.start) * inch - _SIDES
        for part in parts
        if part.kind == kind
    )


def _span(parts: Iterable[_Part]) -> float:
    """Seconds from the first start to the last stop."""
    starts, stops, *_ = zip(*parts, strict=True)
    return max(stops) - min(starts)


def _seconds(parts: Iterable[_Part], kinds: Sequence[str] | None = None) -> float:
    """Seconds in which at least one part (of these kinds) goes on."""
    return math.fsum(stop - start for start, stop in _merged(parts, kinds))


def _merged(
    parts: Iterable[_Part], kinds: Sequence[str] | None = None
) -> list[tuple[float, float]]:
    """The times in which at least one part (of these kinds) goes on."""
    merged: list[tuple[float, float]] = []
    for part in sorted(parts):
        if kinds is not None and part.kind not in kinds:
            continue
        if merged and part.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], part.stop)
        else:
            merged.append((part.start, part.stop))
    return merged


def _in_lanes(
    name: str, parts: Iterable[_Part], said: str, most: float = math.inf
) -> list[_Row]:
    """A row, and more below it for what goes on at the same time; parts are in order.

    Where there are more rows than that, the parts of the last one are drawn as one.
    """
    lanes: list[list[_Part]] = [[]]
    for part in parts:
        free = [lane for lane in lanes if not lane or lane[-1].stop <= part.start]
        if free:
            free[0].append(part)
        elif len(lanes) < most:
            lanes.append([part])
        else:
            last = lanes[-1][-1]
            stop = max(last.stop, part.stop)
            lanes[-1][-1] = last._replace(stop=stop, label="several messages")
    first, *others = lanes
    return [_Row(name, first, said), *(_Row("", lane) for lane in others)]


# --- who waits for whom ---------------------------------------------------------------

_WAITS = ("compute", "wait", "stuck")


@draw.picture
def timeline(
    events: Sequence[Iterable[tuple]],
    *,
    title: str = "Who waits for whom",
    span: float = 0.0,
) -> Picture:
    """One row a rank: what it did, and when.

    A label that is too long for its bar is left out; the pattern of the bar says its
    kind.

    Args:
        events: For each rank, in rank order, tuples (start, stop, label, kind) in
            seconds on a clock that all share. Kinds: "compute", "wait", and "stuck"
            for a wait that did not end by itself.
        title: What the picture shows.
        span: Seconds to draw at least, so that two pictures have the same scale.

    Raises:
        ValueError: no interval, an unknown kind, or more than 16 ranks.
    """
    ranks = [[_Part(*values) for values in row] for row in events]
    for part in itertools.chain(*ranks):
        one_of(part.kind, "kind", _WAITS)
    if not any(ranks):
        raise ValueError("There is nothing to draw: no rank has an interval.")
    words.few(ranks, "ranks", 16)
    needed = _span(itertools.chain(*ranks))
    tall = min(0.5, 2.85 / len(ranks))
    rows = [_Row(f"rank {n}", parts, tall=tall) for n, parts in enumerate(ranks)]
    picture = _rows(rows, max(span, needed), title)
    unit, size = words.unit_of(needed)
    said = [f"{row.name}: {_by_kind(row.parts, _WAITS, size)}" for row in rows]
    whole = f"{words.count(len(rows), 'rank')} over {words.number(needed / size, 3)}"
    picture.summary = f"{title}. {whole} {unit}. Times in {unit}: {'; '.join(said)}."
    return picture


def _by_kind(parts: Iterable[_Part], kinds: Sequence[str], size: float) -> str:
    """How long each kind went on, in a unit of that size: forward 50, backward 100."""
    spent: dict[str, float] = {}
    for part in parts:
        spent[part.kind] = spent.get(part.kind, 0.0) + part.stop - part.start
    said = [f"{k} {words.number(spent[k] / size, 3)}" for k in kinds if k in spent]
    return ", ".join(said) or "nothing"


# --- who is idle ----------------------------------------------------------------------


_WORKS = (*draw.COMPUTING, "transfer")
_GAP = 0.15  # inches of idle time below which no frame is drawn


@draw.picture
def device_timeline(
    timeline: "Timeline", *, title: str = "Who is idle", span: float = 0.0
) -> Picture:
    """One row a device: what it did and when, and how much of the time it was idle.

    Work of the same kind and label that follows without a gap is one bar. A dashed
    frame is idle time, where it is not too short to see.

    Args:
        timeline: The `gpus.timeline()` of one to eight virtual GPUs. A device without
            work was idle all the time.
        title: What the picture shows.
        span: Seconds to draw at least, so that two pictures have the same scale.

    Raises:
        ValueError: no work at all, or too many devices.
    """

    def work(one: "Interval") -> tuple:
        kind = one.phase if one.kind == "compute" else "transfer"
        return one.start, one.stop, one.label, kind

    rows = {name: map(work, row) for name, row in timeline.intervals.items()}
    return _who_is_idle(rows, title, span)


def _who_is_idle(
    work: Mapping[str, Iterable[tuple]], title: str, span: float
) -> Picture:
    """From each device or rank to its work: (start, stop, label, kind)."""
    words.few(work, "devices", 8)
    devices = {name: _joined(row) for name, row in work.items()}
    every = [part for row in devices.values() for part in row]
    if not every:
        raise ValueError("There is nothing to draw: no device did anything.")
    needed = _span(every)
    shown = max(span, needed)
    begin = min(part.start for part in every)
    short = _GAP / 6 * shown  # in seconds
    rows, lines = [], []
    unit, size = words.unit_of(shown)
    for name, row in devices.items():
        busy = math.fsum(part.stop - part.start for part in row)
        idle = max(0.0, 1 - busy / needed) if needed else 0.0
        edges = [begin, *(t for part in row for t in part[:2]), begin + needed]
        gaps = [
            _Part(start, stop, "idle", "idle")
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
            if stop - start > short
        ]
        percent = f"{100 * idle:.0f} %"
        named = [part._replace(label=part.label or part.kind) for part in row]
        rows.append(_Row(name, [*named, *gaps], percent, tall=0.5))
        lines.append(f"{name} {_by_kind(row, _WORKS, size)}, idle {percent}")
    picture = _rows(rows, shown, title, column="idle")
    picture.summary = (
        f"{title}. {words.number(needed / size, 3)} {unit} in all. Times "
        f"in {unit}: {'; '.join(lines)}."
    )
    return picture


def _joined(work: Iterable[tuple]) -> list[_Part]:
    """The work of a device in order, with equal neighbours made one."""
    row: list[_Part] = []
    for one in sorted(_Part(*values) for values in work):
        last = row[-1] if row else None
        # Times are sums of floats: a gap of a billionth is none.
        slack = 1e-9 * max(abs(one.stop), 1e-6)
        same = last and last[2:] == one[2:]
        if same and one.start <= last.stop + slack:
            row[-1] = last._replace(stop=max(last.stop, one.stop))
        else:
            row.append(one)
    return row


# --- stages and ticks -----------------------------------------------------------------


@draw.picture
def layers_on_devices(devices: Mapping[str, Sequence[str]]) -> Picture:
    """The layers of a split model in their order, in a frame for each device.

    Args:
        devices: From the name of a device to its layers, in the order in which a batch
            visits them; a second line of a name is a remark. At most 4 devices, and 12
            layers in all.

    Raises:
        ValueError: there is nothing to draw, or too much.
    """
    layers = [layer for held in devices.values() for layer in held]
    words.few(devices, "devices", 4)
    words.few(layers, "layers", 12)
    tall, gap, pad = 0.56, 0.2, 0.1
    picture, board = draw.board(1.75, "Which layer is where")
    frames = len(devices)
    room = WIDTH - 2 * MARGIN - frames * 2 * pad - (frames - 1) * 2 * gap
    wide = min(0.95, (room - (len(layers) - frames) * gap) / len(layers))
    x, low = MARGIN, 0.24
    for number, (device, held) in enumerate(devices.items()):
        across = len(held) * wide + max(0, len(held) - 1) * gap + 2 * pad
        draw.box(board, x, low, across, tall + 0.52, fill=draw.MIST)
        draw.write(board, x + pad, low + tall + 0.34, device, size=NORMAL)
        for place, layer in enumerate(held):
            left = x + pad + place * (wide + gap)
            draw.box(board, left, low + 0.12, wide, tall, layer, pad=0.02)
            if place or number:
                back = gap if place else 2 * gap + 2 * pad
                y = low + 0.12 + tall / 2
                draw.arrow(board, (left - back, y), (left, y))
        x += across + 2 * gap
    said = "; ".join(
        f"{device}: {words.listed(map(_in_one_line, held))}"
        for device, held in devices.items()
    )
    picture.summary = f"Which layer is where. {said}."
    return picture


def _in_one_line(name: str) -> str:
    first, *rest = name.split("\n")
    return f"{first} ({', '.join(rest)})" if rest else first


@draw.picture
def pipeline_ticks(
    ticks: Iterable[Sequence[tuple[int, int]]], *, title: str = "Who works on what"
) -> Picture:
    """A grid of stages and ticks: who works on which micro-batch, and the bubble.

    Args:
        ticks: For each tick the (stage, micro-batch) pairs that are worked on, as
            `from_scratch.pipeline.ticks` yields them. At most 8 stages and 24 ticks.
        title: What the picture shows.

    Raises:
        ValueError: nothing is worked on, or there is too much to draw.
    """
    table = [dict(tick) for tick in ticks]
    stages = 1 + max((stage for tick in table for stage in tick), default=-1)
    words.few(range(stages), "stages", 8)
    words.few(table, "ticks", 24)
    step = 0.4
    picture, board = draw.board(1.5 + step * stages, title)
    left, low = MARGIN + 0.8, 0.6
    wide = min(0.7, (WIDTH - MARGIN - left) / len(table))
    top = low + step * stages
    draw.write(board, MARGIN, top + 0.16, "tick")
    for number, tick in enumerate(table):
        x = left + number * wide
        draw.write(board, x + wide / 2, top + 0.16, str(number), ha="center")
        for stage in range(stages):
            y = top - (stage + 1) * step
            box = (x + 0.02, y + 0.03, wide - 0.04, step - 0.06)
            looks = {"rounded": 0.02, "size": NORMAL, "pad": 0.01}
            looks |= LOOKS["compute"] if stage in tick else LOOKS["idle"]
            draw.box(board, *box, str(tick.get(stage, "")), **looks)
    for stage in range(stages):
        y = top - (stage + 0.5) * step
        draw.write(board, MARGIN, y, f"stage {stage}", size=NORMAL)
    busy = sum(map(len, table))
    idle = stages * len(table) - busy
    entries = [("a stage works on this micro-batch", LOOKS["compute"])]
    entries += [("idle: the bubble", LOOKS["idle"])] if idle else []
    draw.key(board, 0.28, entries)
    said = "; ".join(
        f"tick {number}: "
        + words.listed(f"stage {s} on micro-batch {m}" for s, m in sorted(tick.items()))
        for number, tick in enumerate(table)
    )
    picture.summary = (
        f"{title}. {words.count(stages, 'stage')}, "
        f"{words.count(len(table), 'tick')}; idle: {idle} of {stages * len(table)}. "
        f"{words.sentence(said)}"
    )
    return picture


_WHOLE = {"F": "forward", "B": "backward"}
_CUT = {"F": "forward", "B": "gradient of the input", "W": "gradient of the weights"}


@draw.picture
def pipeline(
    done: Sequence[Iterable[tuple[PipelineAction, float, float]]],
    *,
    title: str = "Which rank works on what",
    span: float = 0.0,
) -> Picture:
    """One row a rank of a pipeline: its forwards and backwards, and when it was idle.

    A number is that of the micro-batch. What is done in the second stage of a rank is
    darker.

    Args:
        done: for each rank (action, start, stop), in seconds, as
            `simulator.pipeline_step` and `from_scratch.schedules.Pipeline` note them.
            A rank has one stage, or two.
        title, span: as of `device_timeline`.

    Raises:
        ValueError: as from `device_timeline`, or a rank has more than two stages.
    """
    ranks = [list(row) for row in done]
    is_cut = any(action.kind == "W" for row in ranks for action, _, _ in row)

    def work(action: PipelineAction, start: float, stop: float) -> tuple:
        kind = (_CUT if is_cut else _WHOLE)[action.kind]
        if action.chunk > 1:
            raise ValueError("A rank has three stages or more: this draws at most two.")
        kind += " (second stage)" * action.chunk
        return start, stop, str(action.micro_batch), kind

    rows = {f"rank {n}": [work(*one) for one in row] for n, row in enumerate(ranks)}
    return _who_is_idle(rows, title, span)


# --- computing and communication at the same time -------------------------------------


@draw.picture
def overlap(
    events: Mapping[str, Iterable[tuple]],
    *,
    title: str = "A training step: computing and communication",
) -> Picture:
    """One step: when each rank computes, when it communicates, what is exposed.

    Exposed is communication during which the rank does not compute: only this makes
    the step longer. Intervals that overlap are counted once.

    Args:
        events: From a name to tuples (start, stop, label, kind) in seconds on one
            clock, as `step_events` makes them. Kinds: "forward", "backward" and
            "optimizer", which is computing; "communicate" from the start of a bucket's
            all-reduce to its end. One to four names.
        title: What the picture shows.

    Raises:
        ValueError: there are no names, or too many.
    """
    words.few(events, "ranks", 4)
    ranks = {
        name: sorted(_Part(*values) for values in row) for name, row in events.items()
    }
    span = _span(itertools.chain(*ranks.values()))
    rows, said = [], []
    for name, parts in ranks.items():
        sends = [part for part in parts if part.kind == "communicate"]
        exposed = _exposed(parts)
        totals = [
            _seconds(parts, kinds) for kinds in (draw.COMPUTING, ("communicate",))
        ]
        totals.append(_seconds(exposed))
        computing = [part for part in parts if part.kind in draw.COMPUTING]
        most = 8 // len(ranks)
        rows += [
            _Row("computing", computing, duration(totals[0]), name),
            *_in_lanes("communication", sends, duration(totals[1]), most),
            _Row("exposed", exposed, duration(totals[2])),
        ]
        step = _span(parts)
        share = f"{100 * totals[2] / step:.3g} %" if step else "0 %"
        said.append(
            f"{name}: computing {duration(totals[0])}, communication "
            f"{duration(totals[1])} in {words.count(len(sends), 'all-reduce')}, of "
            f"which {duration(totals[2])} exposed ({share} of its {duration(step)})"
        )
    picture = _rows(rows, span, title, column="in all")
    picture.summary = (
        f"{title}. {duration(span)} in all. {words.sentence('; '.join(said))}"
    )
    return picture


def step_events(step: Step) -> dict[str, list[tuple[float, float, str, str]]]:
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
            sent = (bucket.start, bucket.stop, f"bucket {number}", "communicate")
            events.append(sent)
    return {"slowest GPU" if step.waiting else "every GPU": events}


def _exposed(parts: Sequence[_Part]) -> list[_Part]:
    """The times in which a rank communicates and does not compute."""
    exposed = []
    for start, stop in _merged(parts, ("communicate",)):
        for busy, free in _merged(parts, draw.COMPUTING):
            if start < busy < stop:
                exposed.append((start, busy))
            if busy < stop:
                start = max(start, free)
        if start < stop:
            exposed.append((start, stop))
    return [_Part(start, stop, "exposed", "exposed") for start, stop in exposed]


# --- one step of FSDP -----------------------------------------------------------------

_LANES = {
    "all-gather": ("all-gather",),
    "computing": draw.COMPUTING,
    "reduce-scatter": ("reduce-scatter",),
}
_MOST_UNITS = 13


@draw.picture
def fsdp_schedule(
    step: FsdpStep,
    *,
    title: str = "One step of FSDP: gather, compute, free, reduce",
) -> Picture:
    """When a rank gathers, computes and reduces, and when each unit is whole.

    Above, what goes on; exposed is communication during which the rank does not
    compute. Below, one row for each unit: its parameters are whole from the start of
    their all-gather until they are freed.

    Args:
        step: A simulated one, by `simulator.fsdp_step`. As in a transformer, its first
            unit is called "root", the last one "head", and what is between them
            "block 1", "block 2", ...
        title: What the picture shows.
    """
    last = max(int(event.unit.rpartition(" ")[2]) for event in step.events)
    names = {f"layer {number}": f"block {number}" for number in range(last)}
    names |= {"layer 0": "root", f"layer {last}": "head"}
    found = sorted(
        _Part(event.start, event.stop, names[event.unit], event.kind)
        for event in step.events
    )
    span = _span(found)
    rows, said = [], []
    for name, kinds in _LANES.items():
        parts = [event for event in found if event.kind in kinds]
        total = duration(_seconds(parts))
        said += [f"{name} {total}"] if parts else []
        rows += _in_lanes(name, parts, total)
    whole = _whole(found)
    for place in words.shown(len(whole), _MOST_UNITS):
        name = "…" if place is None else [*whole][place]
        parts = [_Part(*times, name, "whole") for times in whole.get(name, ())]
        heading = "whole in memory" if place == 0 else ""
        rows.append(_Row(name, parts, heading=heading, tall=0.2))
    picture = _rows(rows, span, title, column="in all", sides=0.01)
    sends = _seconds(found, ("all-gather", "reduce-scatter", *draw.COMPUTING))
    exposed = sends - _seconds(found, draw.COMPUTING)
    share = f"{100 * exposed / span:.3g}" if span else "0"
    picture.summary = (
        f"{title}. {duration(span)} in all: {', '.join(said)}; "
        f"{duration(exposed)} of the communication exposed ({share} % of the step)."
    )
    if whole:
        gathers = sum(event.kind == "all-gather" for event in found)
        most = _most_at_once(itertools.chain(*whole.values()))
        picture.summary += (
            f" {words.count(gathers, 'all-gather')} of "
            f"{words.count(len(whole), 'unit')}, of which at most {most} "
            f"{'is' if most == 1 else 'are'} whole at a time."
        )
    return picture


def _whole(events: Sequence[_Part]) -> dict[str, list[tuple[float, float]]]:
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


def _most_at_once(times: Iterable[tuple[float, float]]) -> int:
    moments = [pair for start, stop in times for pair in ((start, 1), (stop, -1))]
    return max(itertools.accumulate((c for _, c in sorted(moments)), initial=0))
