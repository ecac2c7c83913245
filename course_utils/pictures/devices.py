"""Pictures of devices: what fills them, who is idle, and the steps of DataParallel."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from course_utils.pictures import draw
from course_utils.pictures.draw import (
    BLUE,
    GREEN,
    INK,
    LINE,
    MARGIN,
    MIST,
    NORMAL,
    ORANGE,
    PAPER,
    PURPLE,
    QUIET,
    SMALL,
    VERMILLION,
    WIDTH,
    Picture,
)

if TYPE_CHECKING:
    from course_utils.virtual_gpus.records import Interval, Timeline, Transfer

# --- devices: what fills them, and who is idle -----------------------------------

# In the order in which they come into being during a training step.
_HOLDS: dict[str, dict[str, Any]] = {
    "parameters": {"fill": draw.tint(BLUE, 0.35)},
    "gradients": {"fill": draw.tint(GREEN, 0.3), "hatch": "////"},
    "optimizer state": {"fill": draw.tint(PURPLE, 0.4), "hatch": "xxxx"},
    "activations": {"fill": draw.tint(ORANGE, 0.4), "hatch": "\\\\\\\\"},
    "other": {"fill": MIST, "hatch": "...."},
}


@draw.picture
def device_memory(
    devices: Mapping[str, Mapping[str, float]],
    *,
    capacity: float,
    title: str = "Memory of each device",
) -> Picture:
    """What fills the memory of each device, as bars to the same scale.

    Args:
        devices: From a device's name, such as "cuda:0", to its bytes by category:
            "parameters", "gradients", "optimizer state", "activations", "other".
            A category that is left out is 0. One to eight devices.
        capacity: Bytes that each device has, drawn as a line.
        title: What the picture shows, such as "At the peak of a training step".

    Raises:
        TypeError: an amount is not a number.
        ValueError: there is no device or too many, a category is unknown, or an
            amount is negative or not finite.
    """
    if not 1 <= len(devices) <= 8:
        raise ValueError(f"There are {len(devices)} devices: expected 1 to 8.")
    rows = {str(name): _held_by(str(name), held) for name, held in devices.items()}
    totals = {name: math.fsum(held.values()) for name, held in rows.items()}
    most = max(*totals.values(), capacity)
    unit, size = draw.binary_unit(most)
    said = {
        name: f"{draw.number(total / size, 3)} {unit}" for name, total in totals.items()
    }
    step = 0.5
    low = 0.56
    picture, board = draw.board(0.52 + 0.2 + step * len(rows) + low, title)
    left = MARGIN + 0.16 + min(max(draw.width_of(name, NORMAL) for name in rows), 1.6)
    room = max(draw.width_of(text, NORMAL, "bold") for text in said.values()) + 0.2
    inch = (WIDTH - MARGIN - left - room) / most
    for place, (name, held) in enumerate(rows.items()):
        y = low + step * (len(rows) - 1 - place)
        middle = y + step / 2
        draw.write(board, MARGIN, middle, draw.cut(name, 1.6, NORMAL), size=NORMAL)
        x = left
        for category, amount in held.items():
            wide = amount * inch
            label = draw.first_that_fits(
                (
                    f"{category} {draw.number(amount / size, 3)}",
                    draw.number(amount / size, 3),
                ),
                wide - 0.14,
            )
            if amount:
                looks = {"rounded": 0.0, **_HOLDS[category]}
                draw.box(board, x, y + 0.06, wide, step - 0.12, label, **looks)
            x += wide
        looks = {"size": NORMAL, "weight": "bold"}
        looks["bbox"] = {"fc": "white", "ec": "none", "pad": 1.5}  # above the limit
        draw.write(board, x + 0.1, middle, said[name], **looks)
    x, top = left + capacity * inch, low + step * len(rows)
    board.plot([x, x], [low, top], color=VERMILLION, lw=1.6, ls=(0, (4, 2)))
    limit = f"each has {draw.number(capacity / size, 3)} {unit}"
    half = draw.width_of(limit, SMALL) / 2
    at = min(max(x, MARGIN + half), WIDTH - MARGIN - half)
    draw.write(board, at, top + 0.1, limit, ha="center", color=QUIET)
    used = [what for what in _HOLDS if any(held.get(what) for held in rows.values())]
    draw.key(board, low - 0.28, [(what, _HOLDS[what]) for what in used])
    lines = []
    for name, held in rows.items():
        parts = [
            f"{what} {draw.number(amount / size, 3)}"
            for what, amount in held.items()
            if amount
        ]
        lines.append(f"{name} holds {said[name]} ({', '.join(parts) or 'nothing'})")
    picture.summary = f"{title.rstrip('.')}. {'; '.join(lines)}. {draw.sentence(limit)}"
    return picture


def _held_by(device: str, held: Mapping[str, float]) -> dict[str, float]:
    """Bytes by category, in the order of the key."""
    for what, amount in held.items():
        if what not in _HOLDS:
            kinds = draw.listed(map(repr, _HOLDS))
            raise ValueError(f"{device} holds {what!r}: the categories are {kinds}.")
        if draw.finite(amount, f"{what} of {device}") < 0:
            raise ValueError(f"{what} of {device} is {amount}: expected 0 or more.")
    return {what: held[what] for what in _HOLDS if what in held}


_WORKS: dict[str, dict[str, Any]] = {
    "forward": {"fill": draw.tint(BLUE, 0.35)},
    "backward": {"fill": draw.tint(GREEN, 0.3), "hatch": "////"},
    "optimizer": {"fill": draw.tint(PURPLE, 0.45), "hatch": "...."},
    "transfer": {"fill": draw.tint(ORANGE, 0.75), "hatch": "xxxx"},
}
_IDLE = {"fill": PAPER, "edge": LINE, "dashed": True}


@draw.picture
def device_timeline(
    timeline: "Timeline",
    *,
    title: str = "Who is idle",
    span: float | None = None,
) -> Picture:
    """One row a device: what it did and when, and how much of the time it was idle.

    Work of the same kind and label that follows without a gap is one bar. Of a label
    that is too long for its bar the last word is drawn, or nothing. Where nothing was
    done a dashed frame stands for idle time.

    Args:
        timeline: The `gpus.timeline()` of one to eight virtual GPUs. A device without
            work was idle all the time.
        title: What the picture shows.
        span: Seconds to draw, so that two pictures have the same scale. The time
            that was needed by all, if left out.

    Raises:
        TypeError: `span` is not a number.
        ValueError: no work at all, work that overlaps other work of its device, an
            unknown kind, or too many devices.
    """
    devices = timeline.intervals
    if not 1 <= len(devices) <= 8:
        raise ValueError(f"There are {len(devices)} devices: expected 1 to 8.")
    rows = {name: _joined(name, intervals) for name, intervals in devices.items()}
    every = [work for row in rows.values() for work in row]
    if not every:
        raise ValueError("There is nothing to draw: no device did anything.")
    origin = min(work.start for work in every)
    needed = max(work.stop for work in every) - origin
    shown = needed if span is None else draw.finite(span, "span")
    if shown < needed * (1 - 1e-9) or shown <= 0:
        raise ValueError(
            f"span is {shown:g} s, but the work took {needed:g} s: expected no less."
        )
    idle = {name: _idle_share(row, needed) for name, row in rows.items()}
    unit, size = draw.unit_of(shown)
    step = 0.52
    low = 0.88
    picture, board = draw.board(0.52 + 0.22 + step * len(rows) + low, title)
    left = MARGIN + 0.16 + min(max(draw.width_of(name, NORMAL) for name in rows), 1.6)
    room = draw.width_of("100 %", NORMAL, "bold") + 0.16
    width = WIDTH - MARGIN - left - room
    inch, top = width / shown, low + step * len(rows)
    draw.time_axis(picture, left, low - 0.04, width, step * len(rows) + 0.04, shown)
    draw.write(board, left + width, low - 0.4, f"time ({unit})", ha="right")
    draw.write(board, WIDTH - MARGIN, top + 0.1, "idle", ha="right", weight="bold")
    for place, (name, row) in enumerate(rows.items()):
        y = low + step * (len(rows) - 1 - place)
        draw.write(
            board, MARGIN, y + step / 2, draw.cut(name, 1.6, NORMAL), size=NORMAL
        )
        percent = f"{100 * idle[name]:.0f} %"
        looks = {"size": NORMAL, "ha": "right", "weight": "bold"}
        draw.write(board, WIDTH - MARGIN, y + step / 2, percent, **looks)
        end = origin
        for work in [*row, _Work(origin + needed, origin + needed, "idle")]:
            gap = work.start - end
            if gap * inch > 0.03:
                x, wide = left + (end - origin) * inch + 0.015, gap * inch - 0.03
                word = draw.first_that_fits(("idle",), wide - 0.1)
                looks = {"rounded": 0.02, "color": QUIET, **_IDLE}
                draw.box(board, x, y + 0.12, wide, step - 0.24, word, **looks)
            if work.kind != "idle":
                x = left + (work.start - origin) * inch
                wide = max((work.stop - work.start) * inch, 0.015)
                # Of "micro-batch 3" the number is what matters.
                words = (work.label, work.label.rpartition(" ")[2])
                label = draw.first_that_fits(words, wide - 0.04)
                looks = {"rounded": 0.0, "line": 0.6, **_WORKS[work.kind]}
                bar = draw.box(board, x, y + 0.07, wide, step - 0.14, **looks)
                if label:  # in less room than a box leaves for its text
                    text = draw.write(
                        board, x + wide / 2, y + step / 2, label, ha="center"
                    )
                    if "hatch" in looks:
                        paper = {"facecolor": looks["fill"], "edgecolor": "none"}
                        text.set_bbox({**paper, "pad": 0.5})
                    picture.labels.append((text, bar))
            end = work.stop
    used = [kind for kind in _WORKS if any(work.kind == kind for work in every)]
    key = [(kind, _WORKS[kind]) for kind in used]
    if any(idle.values()):
        key.append(("idle", _IDLE))
    draw.key(board, 0.22, key)
    lines = []
    for name, row in rows.items():
        times = [
            f"{kind} {draw.number(spent / size, 3)}"
            for kind in _WORKS
            if (spent := math.fsum(w.stop - w.start for w in row if w.kind == kind))
        ]
        lines.append(
            f"{name} {', '.join(times) or 'nothing'}, idle {100 * idle[name]:.0f} %"
        )
    picture.summary = (
        f"{title.rstrip('.')}. {draw.number(needed / size, 3)} {unit} in all. Times in "
        f"{unit}: {'; '.join(lines)}."
    )
    return picture


class _Work(NamedTuple):
    """What a device did; `kind` is the phase of computing, or "transfer"."""

    start: float
    stop: float
    kind: str
    label: str = ""


def _joined(device: str, intervals: "Iterable[Interval]") -> list[_Work]:
    """The work of a device in order, with equal neighbours made one."""
    row: list[_Work] = []
    for work in sorted(map(_work, intervals)):
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


def _work(interval: "Interval") -> _Work:
    kind = interval.phase if interval.kind == "compute" else "transfer"
    if kind not in _WORKS:
        kinds = draw.listed(map(repr, _WORKS))
        raise ValueError(
            f"The kind {kind!r} on {interval.device} is unknown: use {kinds}."
        )
    return _Work(interval.start, interval.stop, kind, interval.label)


def _idle_share(row: Sequence[_Work], needed: float) -> float:
    if not needed:
        return 0.0
    return max(0.0, 1 - math.fsum(work.stop - work.start for work in row) / needed)


# --- how many micro-batches -------------------------------------------------------


@draw.picture
def micro_batch_times(
    measured: Mapping[int, float],
    formula: Callable[[int], float],
    *,
    best: float,
    one_device: float,
) -> Picture:
    """How long a batch takes in that many micro-batches: measured, and by a formula.

    Args:
        measured: From the number of micro-batches to the seconds of a batch. Two to
            ten numbers.
        formula: From a number of micro-batches to seconds, for the curve.
        best: The number at which the formula is least.
        one_device: Seconds of the same batch on one device, drawn as a line.

    Raises:
        TypeError: a time is not a number.
        ValueError: there are too few or too many numbers, a number of micro-batches
            is not whole or below 1, or a time is not above 0.
    """
    if not 2 <= len(measured) <= 10:
        raise ValueError(f"measured holds {len(measured)} times: expected 2 to 10.")
    for number, seconds in measured.items():
        draw.whole(number, "a number of micro-batches")
        if draw.finite(seconds, f"the time of {number}") <= 0:
            raise ValueError(f"The time of {number} is {seconds}: expected above 0.")
    numbers = sorted(measured)
    curve = {m: formula(m) for m in range(numbers[0], numbers[-1] + 1)}
    most = max(*measured.values(), *curve.values(), one_device)
    unit, size = draw.unit_of(most)
    picture, board = draw.board(4.1, "How many micro-batches?")
    left, bottom, width, tall = MARGIN + 0.62, 1.3, WIDTH - 2 * MARGIN - 0.72, 2.06
    axis = draw.chart(picture, left, bottom, width, tall)
    axis.set_xscale("log", base=2)
    axis.set_xlim(numbers[0] / 1.15, numbers[-1] * 1.15)
    axis.set_xticks(numbers, labels=[str(number) for number in numbers])
    axis.minorticks_off()
    axis.set_ylim(0, 1.12 * most / size)
    axis.yaxis.set_major_locator(draw.round_ticks(5))
    draw.grid(axis)
    by_formula = {"color": BLUE, "lw": 2.2}
    points = {
        "marker": "o",
        "ms": 8,
        "mec": INK,
        "mew": 0.8,
        "color": draw.tint(ORANGE, 1),
    }
    alone = {"color": INK, "lw": 1.2, "ls": (0, (5, 3))}
    marked = {"color": VERMILLION, "lw": 1.6, "ls": ":"}
    axis.plot(list(curve), [s / size for s in curve.values()], **by_formula)
    axis.plot(numbers, [measured[m] / size for m in numbers], ls="none", **points)
    axis.axhline(one_device / size, **alone)
    axis.axvline(best, **marked)
    samples = [
        ("measured", {"ls": "none", **points}),
        ("by the formula", by_formula),
        ("one device", alone),
        ("best by the formula", marked),
    ]
    draw.write(board, left, bottom + tall + 0.14, f"time ({unit})", weight="bold")
    draw.write(board, left + width / 2, bottom - 0.4, "micro-batches", ha="center")
    draw.line_key(board, 0.54, samples)
    fastest = min(numbers, key=measured.__getitem__)
    note = (
        f"Fastest of those measured: {fastest} micro-batches. Best by the formula: "
        f"{draw.number(float(best), 3)}."
    )
    draw.note(board, note)
    said = ", ".join(f"{m}: {draw.number(measured[m] / size, 3)}" for m in numbers)
    picture.summary = (
        f"Time in {unit} by micro-batches. {said}. One device: "
        f"{draw.number(one_device / size, 3)}. {note}"
    )
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


@draw.picture
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
    picture, board = draw.board(0.52 + 0.3 + sum(heights) + 0.5, title)
    left, right = MARGIN + 2.75, WIDTH - MARGIN - 1.55
    across = (right - left) / (len(lanes) - 1) if len(lanes) > 1 else 0
    places = {name: left + i * across for i, name in enumerate(lanes)}
    top = 0.5 + sum(heights)
    for name, x in places.items():
        draw.write(board, x, top + 0.14, "CPU" if name == "cpu" else name, ha="center")
        board.plot([x, x], [0.5, top], color="#D0D0D0", lw=1.0, zorder=0)
    said = []
    y = top
    for number, (step, height, row) in enumerate(
        zip(_DATA_PARALLEL, heights, rows, strict=True), 1
    ):
        board.plot([MARGIN, WIDTH - MARGIN], [y, y], color="#E8E8E8", lw=0.8, zorder=0)
        draw.write(
            board, MARGIN, y - height / 2, str(number), weight="bold", size=NORMAL
        )
        draw.write(board, MARGIN + 0.25, y - height / 2, step.name, size=NORMAL)
        out, busy, back = row
        at = y - pad / 2
        for sent in (out, busy, back):
            if sent is busy:
                for name in busy:
                    looks = {"rounded": 0.03, "fill": draw.tint(BLUE, 0.35)}
                    draw.box(
                        board, places[name] - 0.17, at - box + 0.03, 0.34, 0.18, **looks
                    )
                at -= box * bool(busy)
                continue
            if sent:
                text = draw.cut(_each(sent), 1.4, SMALL)
                middle = at - arrow * len(sent) / 2
                draw.write(board, right + 0.25, middle, text, color=QUIET)
            for source, destination, _ in sent:
                at -= arrow
                ends = (places[source], places[destination])
                toward = 0.03 if ends[1] > ends[0] else -0.03
                start = (ends[0] + toward, at + arrow / 2)
                draw.arrow(board, start, (ends[1] - toward, at + arrow / 2), head=8)
                board.plot([ends[0]], [at + arrow / 2], "o", ms=3, color=INK)
        y -= height
        said.append(f"{number}. {step.name}: {_step_in_words(row)}")
    board.plot([MARGIN, WIDTH - MARGIN], [y, y], color="#E8E8E8", lw=0.8, zorder=0)
    draw.key(board, 0.22, [("computes", {"fill": draw.tint(BLUE, 0.35)})])
    looks = {"color": QUIET}
    draw.arrow(board, (MARGIN + 1.4, 0.22), (MARGIN + 1.75, 0.22), head=8)
    draw.write(
        board, MARGIN + 1.83, 0.22, "sends; on the right: how many bytes", **looks
    )
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
        return f"{draw.byte_size(sum(nbytes for *_, nbytes in sent))} in all"
    size = draw.byte_size(sizes.pop())
    return f"{len(sent)} × {size}" if len(sent) > 1 else size


def _step_in_words(
    row: tuple[list[tuple[str, str, int]], list[str], list[tuple[str, str, int]]],
) -> str:
    out, busy, back = row
    parts = []
    for sent in (out, busy, back):
        if sent is busy and busy:
            parts.append(
                f"{draw.listed(busy)} {'compute' if len(busy) > 1 else 'computes'}"
            )
        elif sent:
            sources = list(dict.fromkeys(source for source, *_ in sent))
            goals = list(dict.fromkeys(goal for _, goal, _ in sent))
            verb = "send" if len(sources) > 1 else "sends"
            parts.append(
                f"{draw.listed(sources)} {verb} {_each(sent)} to {draw.listed(goals)}"
            )
    return f"{', '.join(parts) or 'nothing'}."
