"""Messages: who sends to whom, step by step."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from course_utils.pictures import draw, words
from course_utils.pictures.draw import LOOKS, MARGIN, NORMAL, SMALL, WIDTH, Picture
from course_utils.pictures.words import byte_size

if TYPE_CHECKING:
    from course_utils.measure.messages import Message
    from course_utils.virtual_gpus.records import Timeline, Transfer

# --- arrows between lanes -------------------------------------------------------------


class _Arrow(NamedTuple):
    """An arrow from one lane to another; from a lane to itself it is work."""

    start: int
    stop: int
    label: str = ""


class _Band(NamedTuple):
    """A step: its name, lines of arrows beside each other, and a few words.

    `heading` stands above it, where a new part begins.
    """

    name: str
    lines: Sequence[Sequence[_Arrow]]
    said: str = ""
    heading: str = ""


_HEADING = 0.24  # inches


def _bands(
    title: str,
    lanes: Sequence[str],
    bands: Sequence[_Band],
    *,
    line: float,
    across: float,
    foot: Sequence[tuple[str, Sequence[int]]] = (),
    note: str = "",
) -> Picture:
    """Lanes from top to bottom with arrows between them, one band a step; no summary.

    `line` are inches of a line of arrows, `across` at most from lane to lane. `foot`
    are rows of numbers below the lanes.
    """
    pad = 0.14 if sum(len(band.lines) for band in bands) <= 16 else 0.06
    tall = sum(
        line * len(band.lines) + pad + _HEADING * bool(band.heading) for band in bands
    )
    label = 0.2 + max(draw.width_of(band.name, NORMAL) for band in bands)
    said = max(draw.width_of(band.said, SMALL) for band in bands)
    first = MARGIN + label + 0.4
    room = WIDTH - MARGIN - 0.4 - first - (said and said + 0.1)
    # Two ranks at the two edges would be far apart for no reason.
    across = min(room / max(len(lanes) - 1, 1), across)
    places = [first + lane * across for lane in range(len(lanes))]
    right = places[-1] + 0.4 + (said and said + 0.1)
    wide = max(draw.width_of(note, SMALL), draw.width_of(title, draw.LARGE, "bold"))
    width = min(max(right, MARGIN + wide) + MARGIN, WIDTH)
    low = 0.52 + 0.2 * len(foot)
    picture, board = draw.board(low + tall + 0.86, title, width)
    y = top = low + tall
    for name, x in zip(lanes, places, strict=True):
        draw.write(board, x, top + 0.15, name, ha="center", size=NORMAL)
        board.plot([x, x], [low, top], color="#C8C8C8", lw=1.0, zorder=0)
    for band in bands:
        strong = {"color": draw.INK, "lw": 1.4} if band.heading else {}
        rule = {"color": "#E3E3E3", "lw": 0.8, "zorder": 0, **strong}
        board.plot([MARGIN, right], [y, y], **rule)
        if band.heading:
            y -= _HEADING
            looks = {"weight": "bold", **draw.on_paper()}
            draw.write(board, MARGIN, y + 0.09, band.heading, **looks)
        height = line * len(band.lines) + pad
        draw.write(board, MARGIN, y - height / 2, band.name, size=NORMAL)
        x = places[-1] + 0.5
        draw.write(board, x, y - height / 2, band.said, color=draw.QUIET)
        for number, arrows in enumerate(band.lines):
            at = y - pad / 2 - (number + 0.5) * line
            for arrow in arrows:
                _draw(board, arrow, places, at)
        y -= height
    board.plot([MARGIN, right], [y, y], color=draw.LINE, lw=0.8, zorder=0)
    for row, (word, numbers) in enumerate(foot):
        y = low - 0.15 - 0.2 * row
        draw.write(board, MARGIN, y, word, color=draw.QUIET)
        for x, number in zip(places, numbers, strict=True):
            draw.write(board, x, y, str(number), ha="center")
    draw.note(board, note, 0.24)
    return picture


def _draw(board: draw.Axes, arrow: _Arrow, lanes: Sequence[float], y: float) -> None:
    start, stop = lanes[arrow.start], lanes[arrow.stop]
    if start == stop:
        looks = {"rounded": 0.03, **LOOKS["compute"]}
        draw.box(board, start - 0.17, y - 0.065, 0.34, 0.13, **looks)
        return
    toward = 0.05 if stop > start else -0.05
    draw.arrow(board, (start + toward, y), (stop - toward, y), head=8)
    board.plot([start + toward], [y], "o", ms=3, color=draw.INK)
    label = draw.cut(arrow.label, abs(stop - start) - 0.3, SMALL) if arrow.label else ""
    # Off the middle, where the line of a rank often is, by the arrow's head.
    middle = (start + stop) / 2 - toward / 2
    draw.write(board, middle, y, label, ha="center", **draw.on_paper(1.2))


# --- a program of sends and receives --------------------------------------------------


@draw.picture
def message_steps(
    messages: Sequence["Message"],
    world_size: int,
    title: str = "Who sends to whom",
    *,
    parts: Mapping[int, str] | None = None,
) -> Picture:
    """Messages as arrows between ranks, one band a step.

    Below, for each rank, how many messages it sends and receives.

    Args:
        messages: What `course_utils.measure.messages.in_steps` returns.
        world_size: How many ranks there are, 2 to 8.
        title: What the picture shows, such as "Broadcast by a tree".
        parts: From a step to the name of what begins with it, such as
            {1: "reduce-scatter", 4: "all-gather"}.

    Raises:
        ValueError: there is no message, or `world_size` is not 2 to 8.
    """
    words.whole(world_size, "world_size", 2, 8)
    if not messages:
        raise ValueError("There is nothing to draw: there is no message.")
    last_rank = max(max(m.source, m.destination) for m in messages)
    if last_rank >= world_size:
        raise ValueError(
            f"world_size is {world_size}, but rank {last_rank} sends or receives: "
            f"expected at least {last_rank + 1}."
        )
    sizes = {message.nbytes for message in messages}
    bands = []
    for step in sorted({message.step for message in messages}):
        lines = _beside(
            [
                _Arrow(m.source, m.destination, byte_size(m.nbytes))
                for m in messages
                if m.step == step
            ]
        )
        bands.append(_Band(f"step {step}", lines, heading=(parts or {}).get(step, "")))
    count = sum(len(band.lines) for band in bands)
    ends = ("sends", "source"), ("receives", "destination")
    foot = [
        (word, [sum(getattr(m, end) == r for m in messages) for r in range(world_size)])
        for word, end in ends
    ]
    note = _traffic(messages, len(bands), world_size)
    if len(sizes) == 1 and len(messages) > 12:  # said once instead of on each arrow
        bands = [
            band._replace(lines=[[a._replace(label="") for a in x] for x in band.lines])
            for band in bands
        ]
    picture = _bands(
        title,
        [f"rank {rank}" for rank in range(world_size)],
        bands,
        line=min(0.3, max(0.19, 4.4 / count)),
        across=1.9,
        foot=foot,
        note=note,
    )
    picture.summary = (
        f"{title}, {words.count(world_size, 'rank')}. {note} {_in_words(messages)}"
    )
    return picture


def _in_words(messages: Sequence["Message"]) -> str:
    """What is sent in each step; in the first one alone where there is much."""
    steps = sorted({message.step for message in messages})
    told = steps if len(messages) <= 16 else steps[:1]
    said = []
    for step in told:
        pairs = [
            f"{m.source} to {m.destination} ({byte_size(m.nbytes)})"
            for m in messages
            if m.step == step
        ]
        said.append(f"step {step}: {', '.join(pairs)}")
    more = len(steps) - len(told)
    rest = f"; then {words.count(more, 'step')} more" if more else ""
    return words.sentence("; ".join(said) + rest)


def _beside(arrows: Sequence[_Arrow]) -> list[list[_Arrow]]:
    """Arrows of a step, in as many lines as they need to lie side by side."""
    lines: list[list[_Arrow]] = []
    for arrow in arrows:
        low, high = sorted(arrow[:2])
        for line in lines:
            ends = [sorted(other[:2]) for other in line]
            if all(high <= start or stop <= low for start, stop in ends):
                line.append(arrow)
                break
        else:
            lines.append([arrow])
    return lines


def _traffic(messages: Sequence["Message"], steps: int, world_size: int) -> str:
    """How many messages, and which rank has the most of them."""
    through = [
        [m.nbytes for m in messages if rank in (m.source, m.destination)]
        for rank in range(world_size)
    ]
    number = max(map(len, through))
    busiest = [rank for rank, sizes in enumerate(through) if len(sizes) == number]
    most = byte_size(max(sum(through[rank]) for rank in busiest))
    total = byte_size(sum(message.nbytes for message in messages))
    whole = (
        f"{words.count(len(messages), 'message')} in {words.count(steps, 'step')}, "
        f"{total} in all"
    )
    each = f"{words.count(number, 'message')} ({most}) sent or received."
    if len(busiest) == world_size:
        return f"{whole}. Every rank: {each}"
    several = len(busiest) > 1
    who = f"rank{'s' * several} {words.listed(busiest)}, {'each ' * several}with"
    return f"{whole}. Busiest: {who} {each}"


# --- the steps of DataParallel --------------------------------------------------------


# Each step: its name, and what belongs to it in order: (kind, phase) of transfers, or
# who computes.
_DATA_PARALLEL: dict[str, tuple[tuple[str, str] | str, ...]] = {
    "once: model to GPU 0": (("to", "setup"),),
    "scatter the batch": (("scatter", "forward"),),
    "replicate the model": (("broadcast", "forward"),),
    "parallel_apply: forward": ("replicas",),
    "gather the outputs": (("gather", "forward"),),
    "loss": ("loss",),
    "backward, gradients reduced": (
        ("scatter", "backward"),
        "backward",
        ("reduce", "backward"),
    ),
    "update": ("optimizer",),
}


@draw.picture
def data_parallel_steps(
    transfers: Sequence["Transfer"], timeline: "Timeline"
) -> Picture:
    """The eight steps of `nn.DataParallel`: who sends what to whom, and who computes.

    Args:
        transfers: The transfers of virtual GPUs, recorded from the moment when the
            model moved to its GPU to the optimizer's step.
        timeline: The timeline of the same record.

    Raises:
        ValueError: nothing was scattered, or there are more than four GPUs.
    """
    gpus = [name for name in timeline.intervals if name != "cpu"]
    words.few(gpus, "GPUs", 4)
    if not any((t.kind, t.phase) == ("scatter", "forward") for t in transfers):
        raise ValueError("Nothing was scattered: record a step with nn.DataParallel.")
    lanes = ["cpu", *gpus]
    busy = _who_computes(transfers, timeline)
    bands, said = [], []
    for number, (name, parts) in enumerate(_DATA_PARALLEL.items(), 1):
        lines, sizes, told = [], [], []
        for part in parts:
            if isinstance(part, str):
                who = busy.get(part, [])
                lines.append([_Arrow(*[lanes.index(gpu)] * 2) for gpu in who])
                if who:
                    verb = "compute" if len(who) > 1 else "computes"
                    told.append(f"{words.listed(who)} {verb}")
                continue
            sent: dict[tuple[str, str], int] = {}
            for t in transfers:
                if (t.kind, t.phase) == part:
                    pair = t.source, t.destination
                    sent[pair] = sent.get(pair, 0) + t.bytes
            for ends in sorted(sent):
                lines.append([_Arrow(*map(lanes.index, ends))])
            if sent:
                sizes.append(_each(sent.values()))
                sources = list(dict.fromkeys(source for source, _ in sorted(sent)))
                goals = list(dict.fromkeys(goal for _, goal in sorted(sent)))
                verb = "send" if len(sources) > 1 else "sends"
                goal = words.listed(goals)
                told.append(f"{words.listed(sources)} {verb} {sizes[-1]} to {goal}")
        bands.append(_Band(f"{number}  {name}", lines, ", then ".join(sizes)))
        said.append(f"{number}. {name}: {', '.join(told) or 'nothing'}.")
    title = "One training step with DataParallel"
    picture = _bands(title, ["CPU", *gpus], bands, line=0.145, across=1.1)
    entries = [("computes", LOOKS["compute"])]
    draw.key(
        picture.axes[0],
        0.24,
        [*entries, ("a copy; its bytes are on the right", _SENDS)],
    )
    picture.summary = f"{title}. {' '.join(said)}"
    return picture


_SENDS = {"color": draw.INK, "lw": 1.2, "marker": ">", "ms": 5}


def _who_computes(
    transfers: Sequence["Transfer"], timeline: "Timeline"
) -> dict[str, list[str]]:
    """The devices of each kind of computing: replicas, loss, backward, optimizer."""
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
    return busy


def _each(sizes: Sequence[int]) -> str:
    """ "3 × 547 kB", or what is sent in all where the messages differ."""
    if len({*sizes}) > 1:
        return f"{byte_size(sum(sizes))} in all"
    size = byte_size(next(iter(sizes)))
    return f"{len(sizes)} × {size}" if len(sizes) > 1 else size
