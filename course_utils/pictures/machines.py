"""Machines: cores, GPUs, nodes, ranks on them, and how fast the ways between are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes

from course_utils.pictures import draw, words
from course_utils.pictures.draw import LARGE, MARGIN, NORMAL, SMALL, WIDTH, Picture
from course_utils.theory import costs

if TYPE_CHECKING:
    from course_utils.measure.machine import Gpu, GpuPair, Machine


def _boxes(
    count: int, limit: int, left: float, right: float, widest: float, *, middle: bool
) -> Iterable[tuple[int | None, float, float]]:
    """(number, x, width) of boxes in the middle or at the left; number None is "…"."""
    numbers = words.shown(count, limit)
    gap = 0.12 if widest > 0.5 else 0.04
    width = min(widest, (right - left + gap) / len(numbers) - gap)
    x = left
    if middle:
        x = (left + right - len(numbers) * (width + gap) + gap) / 2
    for place, number in enumerate(numbers):
        yield number, x + place * (width + gap), width


# --- the machine in front of the learner ----------------------------------------------


# Ways between two GPUs, the best first.
_WAYS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
_LESSON_GPUS = 4
_PAD = 0.14


@draw.picture
def machine(machine: "Machine") -> Picture:
    """What this machine has, and beside it, dashed, what the course adds as virtual.

    The lessons use up to four GPUs; those that are not there are virtual.

    Args:
        machine: From `course_utils.measure.machine.inspect_machine()`.
    """
    wide, gap = 4.85, 0.3
    levels = _link_levels(machine.links)
    columns = math.ceil(machine.cores / math.ceil(machine.cores / 16))
    lines = math.ceil(machine.cores / columns)
    side = min(0.36, (wide - 2 * _PAD) / columns - 0.05, 0.86 / lines)
    missing = range(len(machine.gpus), _LESSON_GPUS)
    virtual = 1.1 + 0.74 * math.ceil(len(missing) / 2) if missing else 0.84
    gpus = 0.96 + 0.34 * len(levels) if machine.gpus else 0.46
    tall = max(1.5 + lines * (side + 0.05) + gpus, virtual)
    picture, board = draw.board(tall + 0.78, "Your machine")
    top, left = tall + 0.22, MARGIN + _PAD
    draw.box(board, MARGIN, 0.22, wide, tall, fill=draw.MIST)
    draw.write(board, left, top - 0.19, "REAL", weight="bold")
    draw.write(board, left + 0.5, top - 0.19, "what this machine has", color=draw.QUIET)
    looks = {"size": NORMAL, "weight": "bold"}
    draw.write(board, left, top - 0.55, _cores_in_words(machine), **looks)
    model = draw.cut(machine.cpu, wide - 2 * _PAD, SMALL)
    draw.write(board, left, top - 0.75, model, color=draw.QUIET)
    y = top - 0.9
    for core in range(machine.cores):
        row, column = divmod(core, columns)
        x, low = left + column * (side + 0.05), y - row * (side + 0.05) - side
        looks = {"fill": draw.tint(draw.YELLOW, 0.45), "line": 0.8}
        label = str(core) if side >= 0.3 else ""
        draw.box(board, x, low, side, side, label, rounded=side / 10, **looks)
    y -= lines * (side + 0.05) + 0.12
    memory = f"{words.byte_size(machine.memory)} of memory, shared by all cores"
    looks = {"fill": draw.tint(draw.GREEN, 0.22)}
    draw.box(board, left, y - 0.3, wide - 2 * _PAD, 0.3, memory, **looks)
    _real_gpus(board, machine, levels, (left, y - 0.55, wide - 2 * _PAD))

    x = MARGIN + wide + gap
    if tall - virtual < 0.6:
        virtual = tall  # two panels that end almost level look like a mistake
    _virtual_gpus(board, missing, (x, top - virtual, WIDTH - MARGIN - x, virtual))
    picture.summary = _machine_in_words(machine, levels)
    return picture


def _real_gpus(
    board: Axes,
    machine: "Machine",
    levels: Sequence[tuple[str, list[set[int]]]],
    place: tuple[float, float, float],
) -> None:
    """The GPUs of the machine in a row from the top left corner, and their links."""
    left, y, width = place
    heading = words.sentence(_gpus_in_words(machine)).rstrip(".")
    draw.write(board, left, y, heading, size=NORMAL, weight="bold")
    what = _gpu_kinds(machine.gpus) if machine.gpus else machine.gpu_problem
    what = draw.cut(what or "The course does not need one.", width, SMALL)
    draw.write(board, left, y - 0.2, what, color=draw.QUIET)
    if not machine.gpus:
        return
    y -= 0.72
    centers: dict[int, float] = {}
    row = _boxes(len(machine.gpus), 8, left, left + width, 1.0, middle=False)
    for index, x, wide in row:
        if index is None:
            draw.write(board, x + wide / 2, y + 0.19, "…", size=LARGE, ha="center")
            continue
        number = machine.gpus[index].index
        label = f"GPU {number}" if wide > 0.5 else str(number)
        draw.box(board, x, y, wide, 0.38, label, fill=draw.tint(draw.GREEN, 0.45))
        centers[number] = x + wide / 2
    looks = ({"lw": 3.2}, {"lw": 1.2}, {"lw": 1.2, "ls": "--"})
    for row, (way, groups) in enumerate(levels):
        style = {"color": draw.INK, "solid_capstyle": "butt", **looks[row]}
        low = y - 0.14 * (row + 1)
        for group in groups:
            # A little to the right of the row above, so that no line hides another.
            xs = [centers[gpu] + 0.06 * row for gpu in sorted(group) if gpu in centers]
            board.plot(xs, [low] * len(xs), **style)
            for x in xs if len(xs) > 1 else ():
                board.plot([x, x], [y, low], **style)
        low = y - 0.14 * len(levels) - 0.2 * (row + 1)
        board.plot([left, left + 0.3], [low, low], **style)
        text = draw.cut(way, width - 0.4, SMALL)
        draw.write(board, left + 0.4, low, text, color=draw.QUIET)


def _link_levels(links: Sequence["GpuPair"]) -> list[tuple[str, list[set[int]]]]:
    """What connects the GPUs: the best two levels and the last one.

    Each is its name and the groups of GPUs that are connected so or better.
    """
    levels = []
    for way in _WAYS:
        names = {link.description for link in links if _way(link) == way}
        if not names:
            continue
        name = " or ".join(sorted(names))
        if way == "NV":
            counts = {link.nvlinks for link in links if link.nvlinks}
            least, most = min(counts), max(counts)
            number = f"{least} to {most}" if least < most else f"{most}"
            name = f"NVLink ({number} links)"
        good = _WAYS[: _WAYS.index(way) + 1]
        pairs = [{k.first, k.second} for k in links if _way(k) in good]
        groups: list[set[int]] = []
        for pair in pairs:
            touched = [group for group in groups if group & pair]
            groups = [group for group in groups if not group & pair]
            groups.append(pair.union(*touched))
        if sum(math.comb(len(group), 2) for group in groups) > len(pairs):
            name += ", not every pair"
        levels.append((name, groups))
    return levels if len(levels) <= 3 else [*levels[:2], levels[-1]]


def _way(link: "GpuPair") -> str:
    way = "NV" if link.nvlinks else link.code
    return way if way in _WAYS else _WAYS[-1]


def _virtual_gpus(
    board: Axes, missing: range, place: tuple[float, float, float, float]
) -> None:
    x, y, width, height = place
    draw.box(board, x, y, width, height, line=1.4, **draw.LOOKS["virtual"])
    top = y + height
    draw.write(board, x + _PAD, top - 0.19, "VIRTUAL", weight="bold")
    draw.write(board, x + _PAD + 0.72, top - 0.19, "by the course", color=draw.QUIET)
    box = (width - 2 * _PAD - 0.12) / 2
    for place, gpu in enumerate(missing):
        row, column = divmod(place, 2)
        at = x + _PAD + column * (box + 0.12), top - 1.02 - row * 0.74
        looks = {"edge": draw.BLUE, "dashed": True}
        draw.box(board, *at, box, 0.62, f"cuda:{gpu}\nvirtual", **looks)
    note = (
        "Same code as on real GPUs, same numbers up to rounding. The CPU computes "
        "them, so the speed is not a GPU's."
    )
    if not missing:
        note = f"Nothing: the lessons use {_LESSON_GPUS} GPUs at most."
    note = draw.wrap(note, width - 2 * _PAD, SMALL, lines=5)
    below = top - 0.4 - 0.74 * math.ceil(len(missing) / 2)
    draw.write(board, x + _PAD, below, note, color=draw.QUIET, va="top")


def _cores_in_words(machine: "Machine") -> str:
    said = words.count(machine.cores, "CPU core")
    if machine.cores < machine.all_cores:
        return f"{said}, of {machine.all_cores} in the machine"
    physical = machine.physical_cores or machine.cores
    return said + (f" ({physical} physical)" if physical < machine.cores else "")


def _gpus_in_words(machine: "Machine") -> str:
    if machine.gpus:
        return words.count(len(machine.gpus), "GPU")
    return "no GPU that works" if machine.gpu_problem else "no GPU"


def _gpu_kinds(gpus: Sequence["Gpu"]) -> str:
    kinds: dict[str, int] = {}
    for gpu in gpus:
        size = f", {gpu.memory / 2**30:.0f} GiB" if gpu.memory else ""
        kinds[gpu.name + size] = kinds.get(gpu.name + size, 0) + 1
    if len(kinds) == 1:
        return next(iter(kinds)) + (" each" if len(gpus) > 1 else "")
    return "; ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _machine_in_words(machine: "Machine", levels: Sequence[tuple[str, list]]) -> str:
    gpus = _gpus_in_words(machine)
    if machine.gpus:
        gpus += f" ({_gpu_kinds(machine.gpus)})"
    said = (
        f"Your machine: {_cores_in_words(machine)}, {machine.cpu}, "
        f"{words.byte_size(machine.memory)} of memory, {gpus}."
    )
    if levels:
        said += f" GPUs are connected by {'; '.join(name for name, _ in levels)}."
    virtual = [f"cuda:{gpu}" for gpu in range(len(machine.gpus), _LESSON_GPUS)]
    return f"{said} Virtual: {words.listed(virtual) if virtual else 'nothing'}."


# --- ranks on cores -------------------------------------------------------------------


@draw.picture
def ranks_on_cores(world_size: int, cores: int) -> Picture:
    """The notebook kernel, its rank processes, their messages, and the CPU cores.

    Args:
        world_size: How many rank processes there are.
        cores: How many CPU cores the machine has.

    Raises:
        ValueError: a number is not a whole number from 1 up.
    """
    words.whole(world_size, "world_size")
    words.whole(cores, "cores")
    processes = words.count(world_size, "process", "processes")
    title = f"One cell, {processes}, {words.count(cores, 'CPU core')}"
    picture, board = draw.board(4.1, title)
    left, right, top = 2.0, WIDTH - MARGIN, 3.3
    row, bus, base = top - 1.0, top - 1.82, top - 2.64
    middle = (left + right) / 2
    alone, one_core = world_size == 1, cores == 1
    ranks = words.count(world_size, "rank")
    for y, name, what in (
        (top, "Notebook kernel", "where you type"),
        (row, ranks, "is a process" if alone else "each is a process"),
        (bus, "Messages", "none" if alone else "between the ranks"),
        (base, words.count(cores, "CPU core"), f"do{'es' * one_core} the work"),
    ):
        draw.write(board, MARGIN, y + 0.1, name, size=NORMAL, weight="bold")
        draw.write(board, MARGIN, y - 0.1, what, color=draw.QUIET)
    looks = {"fill": draw.tint(draw.YELLOW, 0.45), "size": NORMAL, "weight": "bold"}
    draw.box(board, middle - 0.9, top - 0.22, 1.8, 0.44, "your cell", **looks)
    sent = "is sent to the rank" if alone else "is sent to every rank"
    draw.write(board, middle + 1.05, top, sent, color=draw.QUIET)
    limit = 8 if world_size <= 8 else 7
    for rank, x, width in _boxes(world_size, limit, left, right, 1.35, middle=True):
        center = x + width / 2
        if rank is None:
            draw.write(board, center, row, "…", size=LARGE, ha="center")
            continue
        start = middle + (center - middle) * 0.8 / (right - middle)
        draw.arrow(board, (start, top - 0.22), (center, row + 0.28))
        looks = {"fill": draw.tint(draw.SKY), "size": NORMAL}
        draw.box(board, x, row - 0.28, width, 0.56, f"rank {rank}", **looks)
        if not alone:
            draw.arrow(board, (center, row - 0.28), (center, bus + 0.17), both=True)
    way = "gloo over loopback"
    if alone:
        said = "A single rank has nobody to talk to."
        draw.write(board, middle, bus, said, color=draw.QUIET, ha="center")
    else:
        box = (left, bus - 0.17, right - left, 0.34)
        looks = {"fill": draw.tint(draw.ORANGE, 0.3)}
        draw.box(board, *box, f"{way}: nothing leaves this machine", **looks)
    for core, x, width in _boxes(cores, 12, left, right, 0.42, middle=True):
        if core is None:
            draw.write(board, x + width / 2, base + 0.1, "…", size=LARGE, ha="center")
            continue
        looks = {"fill": draw.MIST, "rounded": 0.02}
        draw.box(board, x, base - 0.05, width, 0.34, str(core), **looks)
    on = words.count(cores, "core")
    note = f"{on} for {ranks}: all ranks can run at once."
    if world_size > cores:
        note = f"{ranks} take turns on {on}: slower, but with the same results."
    elif alone:
        note = "One core is enough for one rank."
    draw.write(board, middle, base - 0.24, note, color=draw.QUIET, ha="center")
    who = "ranks 0 and 1" if world_size == 2 else f"ranks 0 to {world_size - 1}"
    who += f", which talk to each other by {way}"
    if alone:
        who = "rank 0, which has nobody to talk to"
    picture.summary = (
        f"The notebook kernel sends your cell to {processes}: {who}. {note}"
    )
    return picture


# --- where training runs --------------------------------------------------------------


@draw.picture
def four_ways() -> Picture:
    """One GPU or several, on one node or several: what is sent, and over what."""
    wide, tall, gap = (WIDTH - 2 * MARGIN - 0.3) / 2, 1.62, 0.3
    picture, board = draw.board(0.56 + 2 * tall + gap + 0.22, "Four ways to train")
    panels = (
        (1, 1, "1 node, 1 GPU", "Nothing is sent."),
        (1, 2, "1 node, several GPUs", "Inside the node: NVLink or PCIe."),
        (2, 1, "Several nodes, 1 GPU each", "Between nodes: the network."),
        (
            2,
            2,
            "Several nodes, several GPUs each",
            "Both kinds of links. NVLink is faster.",
        ),
    )
    for place, (nodes, gpus, name, sent) in enumerate(panels):
        row, column = divmod(place, 2)
        x = MARGIN + column * (wide + 0.3)
        y = 0.22 + (1 - row) * (tall + gap)
        draw.write(board, x, y + tall - 0.08, name, size=NORMAL, weight="bold")
        draw.write(board, x, y + 0.06, sent, color=draw.QUIET)
        across = (wide - 0.5) / 2
        for node in range(nodes):
            left = x + node * (across + 0.5)
            draw.box(board, left, y + 0.25, across, 1.06, fill=draw.MIST)
            draw.write(board, left + 0.1, y + 1.17, f"node {node}")
            side = (across - 0.2 - 0.32) / 2
            for gpu in range(gpus):
                start = left + 0.1 + gpu * (side + 0.32)
                looks = {"fill": draw.tint(draw.SKY, 0.45)}
                draw.box(board, start, y + 0.37, side, 0.6, f"GPU {gpu}", **looks)
            if gpus > 1:
                ends = [(left + 0.1 + side + d, y + 0.67) for d in (0.02, 0.3)]
                draw.arrow(board, *ends, both=True, line=2.2, head=12)
        if nodes > 1:
            ends = [(x + across + d, y + 0.78) for d in (0.02, 0.48)]
            draw.arrow(board, *ends, both=True)
    picture.summary = "Four ways to train. " + " ".join(
        f"{name}: {sent[0].lower()}{sent[1:]}" for *_, name, sent in panels
    )
    return picture


@draw.picture
def ranks_on_nodes(
    nodes: int,
    gpus_per_node: int,
    *,
    asked: tuple[int, int] | None = None,
    guess: float | None = None,
) -> Picture:
    """Which rank drives which GPU, node by node.

    Args:
        nodes: 1 to 8.
        gpus_per_node: 1 to 8. One process drives each GPU.
        asked: The (node, local rank) of a GPU to point out, if any.
        guess: The rank that a learner expects there, if any.

    Raises:
        ValueError: there are too few or too many of something, or `asked` is not there.
    """
    words.whole(nodes, "nodes", 1, 8)
    words.whole(gpus_per_node, "gpus_per_node", 1, 8)
    right = None if asked is None else costs.rank_of(*asked, gpus_per_node)
    if asked is not None and asked[0] >= nodes:
        raise ValueError(f"There is no node {asked[0]}: nodes are 0 to {nodes - 1}.")
    world = nodes * gpus_per_node
    tall = 1.06
    title = (
        f"{words.count(nodes, 'node')}, {words.count(gpus_per_node, 'GPU')} each: "
        f"{words.count(world, 'rank')}"
    )
    note = "" if right is None else _rank_verdict(guess, right, world)
    low = 0.72 if right is not None else 0.22
    picture, board = draw.board(0.42 + nodes * (tall + 0.14) + low, title)
    side = (WIDTH - 2 * MARGIN - 0.92) / gpus_per_node - 0.1
    for node in range(nodes):
        y = low + (nodes - 1 - node) * (tall + 0.14)
        draw.box(board, MARGIN, y, WIDTH - 2 * MARGIN, tall, fill=draw.MIST)
        draw.write(board, MARGIN + 0.12, y + tall / 2, f"node {node}", weight="bold")
        for local in range(gpus_per_node):
            rank = costs.rank_of(node, local, gpus_per_node)
            looks = {"fill": draw.tint(draw.SKY, 0.3)}
            if rank == guess:
                looks = draw.LOOKS["guess"]
            line = 3.0 if rank == right else 1.0
            long = "local rank" if side >= 0.85 else "local"
            text = f"rank {rank}\n{long} {local}"
            x = MARGIN + 0.9 + local * (side + 0.1)
            draw.box(board, x, y + 0.12, side, tall - 0.24, text, line=line, **looks)
    if note:
        entries = [("the GPU in question", {"fill": draw.PAPER, "line": 3.0})]
        entries += [] if guess is None else [("your answer", draw.LOOKS["guess"])]
        draw.key(board, 0.5, entries)
        draw.note(board, note)
    lines = []
    for node in range(nodes):
        first, last = node * gpus_per_node, (node + 1) * gpus_per_node - 1
        has = f"rank {first}" if first == last else f"ranks {first} to {last}"
        lines.append(f"node {node} has {has}")
    asked_for = "" if asked is None else f"Local rank {asked[1]} on node {asked[0]}: "
    picture.summary = f"{title}: {'; '.join(lines)}. {asked_for}{note}".strip()
    return picture


def _rank_verdict(guess: float | None, right: int, world: int) -> str:
    if guess is None:
        return f"It is rank {right}. No answer yet: answer the question above."
    if guess == right:
        return f"It is rank {right}, as you said."
    said = f"It is rank {right}. You said {words.number(guess)}"
    if guess != int(guess) or not 0 <= guess < world:
        return f"{said}: there is no such rank here."
    return f"{said}, which is another GPU."


# --- the bandwidth ladder -------------------------------------------------------------

_PLACE_LOOKS = {
    "in a GPU": {"marker": "o", "color": draw.GREEN},
    "in a node": {"marker": "s", "color": draw.BLUE},
    "between nodes": {"marker": "D", "color": draw.VERMILLION},
}


class _Dot(NamedTuple):
    """A link: what is drawn of it on a logarithmic axis, and said beside it."""

    link: costs.Link
    value: float
    text: str


def _ladder(
    title: str,
    rows: Sequence[_Dot],
    ticks: Mapping[float, str],
    label: str,
    note: str,
    guess: tuple[str, float] | None = None,
) -> Picture:
    """Dots on a logarithmic axis, grouped by place, each with its value in words."""
    step, left, room, bottom = 0.27, 1.95, 2.5, 0.86
    tall = step * (len(rows) + len(_PLACE_LOOKS)) + 0.1
    picture, board = draw.board(0.56 + tall + bottom, title)
    width = WIDTH - MARGIN - left - room
    low, high = (math.log10(edge) for edge in (min(ticks), max(ticks)))

    def across(value: float) -> float:
        return left + width * (math.log10(value) - low) / (high - low)

    for value, text in ticks.items():
        x = across(value)
        board.plot([x, x], [bottom, bottom + tall], color="#E3E3E3", lw=0.8)
        draw.write(board, x, bottom - 0.14, text, ha="center")
    looks = {"ha": "center", "color": draw.QUIET}
    draw.write(board, left + width / 2, bottom - 0.36, label, **looks)
    y = bottom + tall - step / 2
    for place, looks in _PLACE_LOOKS.items():
        draw.write(board, MARGIN, y, place, weight="bold")
        for link, value, text in (row for row in rows if row.link.place == place):
            y -= step
            x = across(value)
            draw.write(board, MARGIN + 0.1, y, draw.cut(link.name, left - 0.5, SMALL))
            board.plot([left, x], [y, y], color=draw.LINE, lw=0.8)
            board.plot([x], [y], ms=7, mec=draw.INK, mew=0.8, **looks)
            if guess and guess[0] == link.name and guess[1] > 0:
                # Above the row, so that a right guess does not hide the dot.
                at = across(min(max(guess[1], min(ticks)), max(ticks)))
                mark = {"marker": "v", "ms": 8, "mec": draw.INK, "mew": 0.8}
                board.plot([at], [y + 0.12], color=draw.YELLOW, zorder=4, **mark)
            text = draw.cut(text, room - 0.15, SMALL)
            draw.write(board, left + width + 0.15, y, text)
        y -= step
    draw.note(board, note)
    return picture


@draw.picture
def bandwidth_ladder(measured: Sequence[costs.Link] = ()) -> Picture:
    """How many bytes a second go one way over each link, on a logarithmic axis.

    Args:
        measured: What a real machine reaches, from `measured_links`: it follows the
            figures of data sheets.
    """
    rows = []
    for link in [*costs.LADDER, *measured]:
        text = words.speed(link.one_way)
        if link.direction == "both ways together":
            text += f"  ({link.stated} both ways)"
        elif "Gb/s" in link.stated or link in measured:
            text += f"  ({link.stated})"
        elif link.direction == "shared":
            text += "  (reads and writes share it)"
        rows.append(_Dot(link, link.one_way, text))
    ticks = {1e9: "1 GB/s", 1e10: "10 GB/s", 1e11: "100 GB/s", 1e12: "1 TB/s"}
    ticks |= {1e13: "10 TB/s"}
    fastest, *_, slowest = sorted(costs.LADDER, key=lambda link: -link.one_way)
    ratio = words.spoken(fastest.one_way / slowest.one_way, 2)
    note = (
        f"{fastest.name} moves {ratio} times as many bytes a second as {slowest.name}."
    )
    label = "bytes a second, one way: each line is ten times the one before"
    picture = _ladder("The bandwidth ladder", rows, ticks, label, note)
    said = "; ".join(f"{row.link.name} {words.speed(row.value)}" for row in rows)
    picture.summary = f"Bandwidth one way: {said}. {note}"
    if measured:
        source = f"Measured: {measured[0].source}."
        draw.below(picture, [source])
        picture.summary += f" {source}"
    return picture


@draw.picture
def transfer_ladder(
    nbytes: float, *, guess: float | None = None, guess_for: str = ""
) -> Picture:
    """How long that many bytes take over each link, by its bandwidth alone.

    Args:
        nbytes: How many bytes go one way.
        guess: Seconds that a learner expects for the link named `guess_for`.
        guess_for: The name of that link.
    """
    size = words.byte_size(words.finite(nbytes, "nbytes", above=0))
    rows = []
    for link in costs.LADDER:
        seconds = nbytes / link.one_way
        shared = "  (to read it once)" if link.direction == "shared" else ""
        rows.append(_Dot(link, seconds, words.duration(seconds) + shared))
    first = math.floor(math.log10(min(row.value for row in rows)))
    last = math.ceil(math.log10(max(row.value for row in rows)))
    ticks = {10.0**p: words.duration(10.0**p) for p in range(first, last + 1)}
    note = f"Time = {size} / bandwidth one way, without latency."
    if guess_for in [link.name for link in costs.LADDER]:
        if guess is None:
            note += " No guess yet: answer the question above, then run this again."
        else:
            said = f"{guess:g} s" if guess <= 0 else words.duration(guess)
            note += f" The triangle is your guess for {guess_for}: {said}."
    mark = None if guess is None else (guess_for, guess)
    title = f"{size}, over one link"
    picture = _ladder(title, rows, ticks, "time, one way", note, mark)
    said = "; ".join(f"{row.link.name} {row.text}" for row in rows)
    picture.summary = f"{title}: {said}. {note}"
    return picture


# --- one of many ranks ----------------------------------------------------------

_PORT = 29500  # torchrun's own default


@draw.picture
def torchrun_ranks(nodes: int = 2, gpus_per_node: int = 4, rank: int = 5) -> Picture:
    """Where a rank runs, what torchrun tells it, and what one types on its node.

    Args:
        nodes: 1 to 8.
        gpus_per_node: 1 to 8. One process drives each GPU.
        rank: The rank to point out, from 0. With fewer ranks it is the last one, and
            the picture says so.

    Raises:
        ValueError: there are too few or too many of something.
    """
    picture = ranks_on_nodes(nodes, gpus_per_node)
    last = nodes * gpus_per_node - 1
    words.whole(rank, "rank", 0)
    here = min(rank, last)
    node, local = costs.node_and_local_rank(here, gpus_per_node)
    _, place = picture.labels[here]
    corner = place.get_x(), place.get_y(), place.get_width(), place.get_height()
    draw.box(picture.axes[0], *corner, fill=draw.tint(draw.ORANGE, 0.5), line=3.0)
    told = {"RANK": here, "LOCAL_RANK": local, "WORLD_SIZE": last + 1}
    told |= {"LOCAL_WORLD_SIZE": gpus_per_node, "GROUP_RANK": node}
    variables = " ".join(f"{name}={value}" for name, value in told.items())
    where = f"Rank {here} is local rank {local} on node {node}"
    if rank > last:
        where = f"There is no rank {rank} here: the last one is {last}. {where}"
    command = [f"torchrun --nproc-per-node {gpus_per_node} train.py"]
    if nodes > 1:
        command = [
            f"torchrun --nnodes {nodes} --nproc-per-node {gpus_per_node} "
            f"--node-rank {node} \\",
            f"    --master-addr node0 --master-port {_PORT} train.py",
        ]
    place = f"Type this on node {node}:"
    if nodes > 1:
        place = f"{place[:-1]}. On every other node, give that node's own --node-rank:"
    draw.below(
        picture,
        [
            f"{where}. torchrun tells it:",
            f"    {variables}",
            place,
            *(f"    {line}" for line in command),
        ],
    )
    typed = " ".join(command).replace("\\     ", "")
    picture.summary += f" {where}: {variables}. Type on node {node}: {typed}"
    return picture
