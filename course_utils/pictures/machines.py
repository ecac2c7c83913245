"""Pictures of machines: cores, GPUs, nodes, and how fast the ways between them are."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
    from course_utils.setup.doctor import Link, Machine

# --- the machine in front of the learner -------------------------------------------

# Ways between two GPUs in the words of nvidia-smi, the best first.
_WAYS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
_LESSON_GPUS = 4


@draw.picture
def machine(machine: "Machine") -> Picture:
    """What this machine has, and beside it, dashed, what the course adds as virtual.

    The lessons use up to four GPUs; those that are not there are virtual.

    Args:
        machine: From `course_utils.setup.doctor.inspect_machine()`.
    """
    wide, gap, pad = 4.85, 0.3, 0.14
    levels = _link_levels(machine)
    side, columns, space = _core_grid(machine.cores, wide - 2 * pad, 0.86)
    grid = math.ceil(machine.cores / columns) * (side + space) - space
    gpus = 0.96 + 0.34 * len(levels) if machine.gpus else 0.46
    missing = range(len(machine.gpus), _LESSON_GPUS)
    virtual = 1.1 + 0.74 * math.ceil(len(missing) / 2) if missing else 0.84
    tall = max(1.5 + grid + gpus, virtual)
    picture, board = draw.board(tall + 0.56 + 0.22, "Your machine")
    top = tall + 0.22
    left = MARGIN + pad
    draw.box(board, MARGIN, 0.22, wide, tall, fill=MIST)
    draw.write(board, left, top - 0.19, "REAL", weight="bold")
    draw.write(board, left + 0.5, top - 0.19, "what this machine has", color=QUIET)

    y = top - 0.55
    heading = {"size": NORMAL, "weight": "bold"}
    draw.write(board, left, y, _cores_in_words(machine), **heading)
    model = draw.cut(machine.cpu, wide - 2 * pad, SMALL)
    draw.write(board, left, y - 0.2, model, color=QUIET)
    y -= 0.35
    for core in range(machine.cores):
        row, column = divmod(core, columns)
        x, low = left + column * (side + space), y - row * (side + space) - side
        looks = {"fill": draw.tint(YELLOW, 0.45), "rounded": side / 10, "line": 0.8}
        draw.box(board, x, low, side, side, str(core) if side >= 0.3 else "", **looks)
    y -= grid + 0.12
    memory = f"{_gigabytes(machine.memory)} of memory, shared by all cores"
    draw.box(
        board, left, y - 0.3, wide - 2 * pad, 0.3, memory, fill=draw.tint(GREEN, 0.22)
    )
    _real_gpus(board, machine, levels, (left, y - 0.55, wide - 2 * pad))

    x = MARGIN + wide + gap
    if tall - virtual < 0.6:
        virtual = tall  # two panels that end almost level look like a mistake
    _virtual_gpus(board, missing, (x, top - virtual, WIDTH - MARGIN - x, virtual))
    picture.summary = _machine_in_words(machine, levels)
    return picture


def _core_grid(cores: int, width: float, height: float) -> tuple[float, int, float]:
    """Side of a core's square, squares in a row, space between two squares."""

    def largest(columns: int) -> float:
        rows = math.ceil(cores / columns)
        # The space is 0.16 of a side.
        across, up = 1.16 * columns - 0.16, 1.16 * rows - 0.16
        return min(0.36, width / across, height / up)

    def calm(columns: int) -> tuple[float, int]:
        # Full rows look calm: somewhat smaller squares are a fair price for them.
        return largest(columns) * (0.7 if cores % columns else 1.0), columns

    columns = max(range(1, cores + 1), key=calm)
    return largest(columns), columns, 0.16 * largest(columns)


def _real_gpus(
    board: Axes,
    machine: "Machine",
    levels: Sequence[tuple[str, list[set[int]]]],
    place: tuple[float, float, float],
) -> None:
    """The GPUs of the machine in a row from the top left corner, and their links."""
    left, y, width = place
    heading = draw.sentence(_gpus_in_words(machine)).rstrip(".")
    draw.write(board, left, y, heading, size=NORMAL, weight="bold")
    if not machine.gpus:
        note = machine.gpu_problem or "The course does not need one."
        draw.write(board, left, y - 0.2, draw.cut(note, width, SMALL), color=QUIET)
        return
    kinds = draw.cut(_gpu_kinds(machine), width, SMALL)
    draw.write(board, left, y - 0.2, kinds, color=QUIET)
    y -= 0.72
    centers: dict[int, float] = {}
    shown = draw.shown(len(machine.gpus), 8)
    box = min(1.0, (width + GAP) / len(shown) - GAP)
    for place, index in enumerate(shown):
        x = left + place * (box + GAP)
        if index is None:
            draw.write(board, x + box / 2, y + 0.19, "…", size=LARGE, ha="center")
            continue
        number = machine.gpus[index].index
        label = f"GPU {number}" if box > 0.5 else str(number)
        draw.box(board, x, y, box, 0.38, label, fill=draw.tint(GREEN, 0.45))
        centers[number] = x + box / 2
    looks = ({"lw": 3.2}, {"lw": 1.2}, {"lw": 1.2, "ls": "--"})
    for row, (way, groups) in enumerate(levels):
        style = {"color": INK, "solid_capstyle": "butt", **looks[row]}
        low = y - 0.14 * (row + 1)
        for group in groups:
            # A little to the right of the row above, so that no line hides another.
            xs = [centers[gpu] + 0.06 * row for gpu in sorted(group) if gpu in centers]
            board.plot(xs, [low] * len(xs), **style)
            for x in xs if len(xs) > 1 else ():
                board.plot([x, x], [y, low], **style)
        low = y - 0.14 * len(levels) - 0.2 * (row + 1)
        board.plot([left, left + 0.3], [low, low], **style)
        draw.write(
            board, left + 0.4, low, draw.cut(way, width - 0.4, SMALL), color=QUIET
        )


def _link_levels(machine: "Machine") -> list[tuple[str, list[set[int]]]]:
    """What connects the GPUs: the best two levels and the last one.

    Each is its name and the groups of GPUs that are connected so or better.
    """
    levels = []
    for way in _WAYS:
        names = {link.description for link in machine.links if _way(link) == way}
        if not names:
            continue
        name = " or ".join(sorted(names))
        if way == "NV":
            counts = {link.nvlinks for link in machine.links if link.nvlinks}
            least, most = min(counts), max(counts)
            number = f"{least} to {most}" if least < most else f"{most}"
            name = f"NVLink ({number} links)"
        good = _WAYS[: _WAYS.index(way) + 1]
        pairs = [{k.first, k.second} for k in machine.links if _way(k) in good]
        groups: list[set[int]] = []
        for pair in pairs:
            touched = [group for group in groups if group & pair]
            groups = [group for group in groups if not group & pair]
            groups.append(pair.union(*touched))
        whole = sum(math.comb(len(group), 2) for group in groups)
        if whole > len(pairs):
            name += ", not every pair"
        levels.append((name, groups))
    return levels if len(levels) <= 3 else [*levels[:2], levels[-1]]


def _way(link: "Link") -> str:
    way = "NV" if link.nvlinks else link.code
    return way if way in _WAYS else _WAYS[-1]


def _virtual_gpus(
    board: Axes, missing: range, place: tuple[float, float, float, float]
) -> None:
    x, y, width, height = place
    pad = 0.14
    looks = {"fill": draw.tint(SKY, 0.16), "edge": BLUE, "line": 1.4, "dashed": True}
    draw.box(board, x, y, width, height, **looks)
    top = y + height
    draw.write(board, x + pad, top - 0.19, "VIRTUAL", weight="bold")
    draw.write(board, x + pad + 0.72, top - 0.19, "by the course", color=QUIET)
    box = (width - 2 * pad - 0.12) / 2
    for place, gpu in enumerate(missing):
        row, column = divmod(place, 2)
        low = top - 0.4 - 0.62 - row * 0.74
        looks = {"edge": BLUE, "dashed": True}
        at = x + pad + column * (box + 0.12)
        draw.box(board, at, low, box, 0.62, f"cuda:{gpu}\nvirtual", **looks)
    note = (
        "Same PyTorch code as on real GPUs, same numbers. The CPU computes them, so "
        "the speed is not a GPU's."
    )
    if not missing:
        note = f"Nothing: the lessons use {_LESSON_GPUS} GPUs at most."
    note = draw.wrap(note, width - 2 * pad, SMALL, lines=5)
    below = top - 0.4 - 0.74 * math.ceil(len(missing) / 2)
    draw.write(board, x + pad, below, note, color=QUIET, va="top")


def _cores_in_words(machine: "Machine") -> str:
    words = draw.count(machine.cores, "CPU core")
    if machine.cores < machine.all_cores:
        return f"{words}, of {machine.all_cores} in the machine"
    physical = machine.physical_cores or machine.cores
    return words + (f" ({physical} physical)" if physical < machine.cores else "")


def _gigabytes(amount: int) -> str:
    return f"{amount / 1e9:,.{0 if amount >= 1e11 else 1}f} GB"


def _gpus_in_words(machine: "Machine") -> str:
    if machine.gpus:
        return draw.count(len(machine.gpus), "GPU")
    return "no GPU that works" if machine.gpu_problem else "no GPU"


def _gpu_kinds(machine: "Machine") -> str:
    kinds: dict[str, int] = {}
    for gpu in machine.gpus:
        size = f", {gpu.memory / 2**30:.0f} GiB" if gpu.memory else ""
        kinds[gpu.name + size] = kinds.get(gpu.name + size, 0) + 1
    if len(kinds) == 1:
        return next(iter(kinds)) + (" each" if len(machine.gpus) > 1 else "")
    return "; ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _machine_in_words(machine: "Machine", levels: Sequence[tuple[str, list]]) -> str:
    gpus = _gpus_in_words(machine)
    if machine.gpus:
        gpus += f" ({_gpu_kinds(machine)})"
    words = (
        f"Your machine: {_cores_in_words(machine)}, {machine.cpu}, "
        f"{_gigabytes(machine.memory)} of memory, {gpus}."
    )
    if levels:
        words += f" GPUs are connected by {'; '.join(name for name, _ in levels)}."
    virtual = [f"cuda:{gpu}" for gpu in range(len(machine.gpus), _LESSON_GPUS)]
    return f"{words} Virtual: {draw.listed(virtual) if virtual else 'nothing'}."


# --- ranks on cores ----------------------------------------------------------------


@draw.picture
def ranks_on_cores(world_size: int, cores: int) -> Picture:
    """The notebook kernel, its rank processes, their messages, and the CPU cores.

    Args:
        world_size: How many rank processes there are.
        cores: How many CPU cores the machine has.

    Raises:
        ValueError: a number is not a whole number from 1 up.
    """
    draw.whole(world_size, "world_size")
    draw.whole(cores, "cores")
    processes = draw.count(world_size, "process", "processes")
    way = "gloo over loopback"
    picture, board = draw.board(
        4.1, f"One cell, {processes}, {draw.count(cores, 'CPU core')}"
    )
    left, right, top = 2.0, WIDTH - MARGIN, 3.3
    middle = (left + right) / 2

    def layer(y: float, name: str, what: str) -> None:
        draw.write(board, MARGIN, y + 0.1, name, size=NORMAL, weight="bold")
        draw.write(board, MARGIN, y - 0.1, what, color=QUIET)

    layer(top, "Notebook kernel", "where you type")
    kernel = {"fill": draw.tint(YELLOW, 0.45), "size": NORMAL, "weight": "bold"}
    draw.box(board, middle - 0.9, top - 0.22, 1.8, 0.44, "your cell", **kernel)
    note = "is sent to every rank" if world_size > 1 else "is sent to the rank"
    draw.write(board, middle + 1.05, top, note, color=QUIET)

    row = top - 1.0
    layer(
        row,
        draw.count(world_size, "rank"),
        "each is a process" if world_size > 1 else "is a process",
    )
    bus = row - 0.82
    places = _row_of_boxes(world_size, 8 if world_size <= 8 else 7, left, right, 1.35)
    for rank, x, width in places:
        if rank is None:
            draw.write(board, x + width / 2, row, "…", size=LARGE, ha="center")
            continue
        center = x + width / 2
        start = middle + (center - middle) * 0.8 / (right - middle)
        draw.arrow(board, (start, top - 0.22), (center, row + 0.28))
        looks = {"fill": draw.tint(SKY), "size": NORMAL}
        draw.box(board, x, row - 0.28, width, 0.56, f"rank {rank}", **looks)
        if world_size > 1:
            draw.arrow(board, (center, row - 0.28), (center, bus + 0.17), both=True)
    if world_size > 1:
        layer(bus, "Messages", "between the ranks")
        label = f"{way}: nothing leaves this machine"
        draw.box(
            board,
            left,
            bus - 0.17,
            right - left,
            0.34,
            label,
            fill=draw.tint(ORANGE, 0.3),
        )
    else:
        layer(bus, "Messages", "none")
        note = "A single rank has nobody to talk to."
        draw.write(board, middle, bus, note, color=QUIET, ha="center")

    base = bus - 0.82
    layer(
        base,
        draw.count(cores, "CPU core"),
        "do the work" if cores > 1 else "does the work",
    )
    for core, x, width in _row_of_boxes(cores, 12, left, right, 0.42):
        if core is None:
            draw.write(board, x + width / 2, base + 0.1, "…", size=LARGE, ha="center")
            continue
        looks = {"fill": MIST, "rounded": 0.02}
        draw.box(board, x, base - 0.05, width, 0.34, str(core), **looks)
    them = draw.count(world_size, "rank"), draw.count(cores, "core")
    if world_size > cores:
        note = f"{them[0]} take turns on {them[1]}: slower, but with the same results."
    elif world_size > 1:
        note = f"{them[1]} for {them[0]}: all ranks can run at once."
    else:
        note = "One core is enough for one rank."
    draw.write(board, middle, base - 0.24, note, color=QUIET, ha="center")

    last = world_size - 1
    who = f"ranks 0 to {last}, which talk to each other by {way}"
    who = who if last > 1 else who.replace("0 to 1", "0 and 1")
    if not last:
        who = "rank 0, which has nobody to talk to"
    picture.summary = (
        f"The notebook kernel sends your cell to {processes}: {who}. {note}"
    )
    return picture


def _row_of_boxes(
    count: int, limit: int, left: float, right: float, widest: float
) -> list[tuple[int | None, float, float]]:
    """(number, x, width) of boxes in the middle of a row; number None is "…"."""
    numbers = draw.shown(count, limit)
    gap = 0.12 if widest > 0.5 else 0.04
    width = min(widest, (right - left + gap) / len(numbers) - gap)
    x = (left + right - len(numbers) * (width + gap) + gap) / 2
    return [(n, x + i * (width + gap), width) for i, n in enumerate(numbers)]


# --- where training runs --------------------------------------------------------


@draw.picture
def four_ways() -> Picture:
    """One GPU or several, on one node or several: what is sent, and over what."""
    wide, tall, gap = (WIDTH - 2 * MARGIN - 0.3) / 2, 1.62, 0.3
    picture, board = draw.board(0.56 + 2 * tall + gap + 0.22, "Four ways to train")
    panels = (
        (1, 1, "1 node, 1 GPU", "Nothing is sent."),
        (1, 2, "1 node, several GPUs", "Inside the node: NVLink or PCIe."),
        (2, 1, "Several nodes, 1 GPU each", "Between nodes: the network."),
        (2, 2, "Several nodes, several GPUs each", "Both, and NVLink is the faster."),
    )
    for place, (nodes, gpus, name, sent) in enumerate(panels):
        row, column = divmod(place, 2)
        x = MARGIN + column * (wide + 0.3)
        y = 0.22 + (1 - row) * (tall + gap)
        draw.write(board, x, y + tall - 0.08, name, size=NORMAL, weight="bold")
        draw.write(board, x, y + 0.06, sent, color=QUIET)
        across = (wide - 0.5) / 2
        for node in range(nodes):
            left = x + node * (across + 0.5)
            draw.box(board, left, y + 0.25, across, 1.06, fill=MIST)
            draw.write(board, left + 0.1, y + 1.17, f"node {node}")
            side = (across - 0.2 - 0.32) / 2
            for gpu in range(gpus):
                start = left + 0.1 + gpu * (side + 0.32)
                looks = {"fill": draw.tint(SKY, 0.45)}
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
    for value, what in ((nodes, "nodes"), (gpus_per_node, "gpus_per_node")):
        draw.whole(value, what)
        if value > 8:
            raise ValueError(f"{what} is {value}: at most 8 can be drawn.")
    right = None if asked is None else costs.rank_of(*asked, gpus_per_node)
    if asked is not None and asked[0] >= nodes:
        raise ValueError(f"There is no node {asked[0]}: nodes are 0 to {nodes - 1}.")
    world = nodes * gpus_per_node
    tall = 1.06
    title = f"{draw.count(nodes, 'node')}, {draw.count(gpus_per_node, 'GPU')} each: "
    title += f"{world} "
    title += "rank" if world == 1 else "ranks"
    note = "" if right is None else _rank_verdict(guess, right, world)
    low = 0.72 if right is not None else 0.22
    picture, board = draw.board(0.56 + nodes * (tall + 0.14) - 0.14 + low, title)
    side = (WIDTH - 2 * MARGIN - 0.92) / gpus_per_node - 0.1
    for node in range(nodes):
        y = low + (nodes - 1 - node) * (tall + 0.14)
        draw.box(board, MARGIN, y, WIDTH - 2 * MARGIN, tall, fill=MIST)
        draw.write(board, MARGIN + 0.12, y + tall / 2, f"node {node}", weight="bold")
        for local in range(gpus_per_node):
            rank = costs.rank_of(node, local, gpus_per_node)
            x = MARGIN + 0.9 + local * (side + 0.1)
            looks = {"fill": draw.tint(SKY, 0.3)}
            if rank == guess:
                looks |= {"fill": draw.tint(ORANGE, 0.3), "hatch": "////"}
            if rank == right:
                looks |= {"line": 3.0}
            long = "local rank" if side >= 0.85 else "local"
            text = f"rank {rank}\n{long} {local}"
            draw.box(board, x, y + 0.12, side, tall - 0.24, text, **looks)
    if note:
        entries = [("the GPU in question", {"fill": PAPER, "line": 3.0})]
        if guess is not None:
            looks = {"fill": draw.tint(ORANGE, 0.3), "hatch": "////"}
            entries.append(("your answer", looks))
        draw.key(board, 0.5, entries)
        draw.note(board, note)
    lines = "; ".join(
        f"node {node} has ranks {node * gpus_per_node} to "
        f"{(node + 1) * gpus_per_node - 1}"
        if gpus_per_node > 1
        else f"node {node} has rank {node}"
        for node in range(nodes)
    )
    asked_for = "" if asked is None else f"Local rank {asked[1]} on node {asked[0]}: "
    picture.summary = f"{title}: {lines}. {asked_for}{note}".strip()
    return picture


def _rank_verdict(guess: float | None, right: int, world: int) -> str:
    if guess is None:
        return f"It is rank {right}. No answer yet: answer the question above."
    if guess == right:
        return f"It is rank {right}, as you said."
    said = f"It is rank {right}. You said {draw.number(guess)}"
    if guess != int(guess) or not 0 <= guess < world:
        return f"{said}: there is no such rank here."
    return f"{said}, which is another GPU."


# --- the bandwidth ladder -------------------------------------------------------


class _Dot(NamedTuple):
    """A row of a chart with a logarithmic axis."""

    name: str
    value: float
    text: str
    place: str


_PLACE_LOOKS = {
    "in a GPU": {"marker": "o", "color": GREEN},
    "in a node": {"marker": "s", "color": BLUE},
    "between nodes": {"marker": "D", "color": VERMILLION},
}


def _dots(
    title: str,
    rows: Sequence[_Dot],
    ticks: Mapping[float, str],
    label: str,
    note: str,
    guess: tuple[str, float] | None = None,
) -> Picture:
    """Dots on a logarithmic axis, grouped by place, each with its value in words."""
    groups = list(dict.fromkeys(row.place for row in rows))
    step, left, room = 0.27, 1.95, 2.5
    tall = step * (len(rows) + len(groups)) + 0.1
    height = 0.56 + tall + 0.86
    picture, board = draw.board(height, title)
    bottom, width = 0.86, WIDTH - MARGIN - left - room
    low, high = (math.log10(edge) for edge in (min(ticks), max(ticks)))

    def across(value: float) -> float:
        return left + width * (math.log10(value) - low) / (high - low)

    for value, text in ticks.items():
        x = across(value)
        board.plot([x, x], [bottom, bottom + tall], color="#E3E3E3", lw=0.8)
        draw.write(board, x, bottom - 0.14, text, ha="center")
    draw.write(board, left + width / 2, bottom - 0.36, label, ha="center", color=QUIET)
    y = bottom + tall - step / 2
    for group in groups:
        draw.write(board, MARGIN, y, group, weight="bold")
        for row in (row for row in rows if row.place == group):
            y -= step
            x = across(row.value)
            draw.write(board, MARGIN + 0.1, y, draw.cut(row.name, left - 0.5, SMALL))
            board.plot([left, x], [y, y], color=LINE, lw=0.8)
            board.plot([x], [y], ms=7, mec=INK, mew=0.8, **_PLACE_LOOKS[row.place])
            if guess and guess[0] == row.name and guess[1] > 0:
                at = across(min(max(guess[1], min(ticks)), max(ticks)))
                looks = {"marker": "X", "ms": 9, "mec": INK, "mew": 0.8}
                board.plot([at], [y], color=ORANGE, **looks)
            draw.write(
                board, left + width + 0.15, y, draw.cut(row.text, room - 0.15, SMALL)
            )
        y -= step
    draw.note(board, note)
    return picture


@draw.picture
def bandwidth_ladder() -> Picture:
    """How many bytes a second go one way over each link, on a logarithmic axis."""
    rows = []
    for link in costs.LADDER:
        text = draw.speed(link.one_way)
        if link.direction == "both ways together":
            text += f"  ({link.stated} both ways)"
        elif "Gb/s" in link.stated:
            text += f"  ({link.stated})"
        elif link.direction == "shared":
            text += "  (reads and writes share it)"
        rows.append(_Dot(link.name, link.one_way, text, link.place))
    ticks = {1e9: "1 GB/s", 1e10: "10 GB/s", 1e11: "100 GB/s", 1e12: "1 TB/s"}
    ticks |= {1e13: "10 TB/s"}
    most, least = max(rows, key=_value_of), min(rows, key=_value_of)
    note = (
        f"{most.name} moves {draw.spoken(most.value / least.value, 2)} times as many "
        f"bytes a second as {least.name}."
    )
    label = "bytes a second, one way: each line is ten times the one before"
    picture = _dots("The bandwidth ladder", rows, ticks, label, note)
    said = "; ".join(f"{row.name} {draw.speed(row.value)}" for row in rows)
    picture.summary = f"Bandwidth one way: {said}. {note}"
    return picture


def _value_of(row: _Dot) -> float:
    return row.value


@draw.picture
def transfer_ladder(
    nbytes: float,
    *,
    guess: float | None = None,
    guess_for: str = "",
) -> Picture:
    """How long that many bytes take over each link, by its bandwidth alone.

    Args:
        nbytes: How many bytes go one way.
        guess: Seconds that a learner expects for the link named `guess_for`.
        guess_for: The name of that link.
    """
    if draw.finite(nbytes, "nbytes") <= 0:
        raise ValueError(f"nbytes is {nbytes}: expected more than 0.")
    size = draw.byte_size(nbytes)
    rows = []
    for link in costs.LADDER:
        seconds = nbytes / link.one_way
        text = draw.duration(seconds)
        if link.direction == "shared":
            text += "  (to read it once)"
        rows.append(_Dot(link.name, seconds, text, link.place))
    first = math.floor(math.log10(min(row.value for row in rows)))
    last = math.ceil(math.log10(max(row.value for row in rows)))
    ticks = {10.0**p: draw.duration(10.0**p) for p in range(first, last + 1)}
    note = f"Time = {size} / bandwidth one way, without latency."
    for row in rows:
        if row.name == guess_for and guess is None:
            note += " No guess yet: answer the question above, then run this again."
        elif row.name == guess_for:
            said = f"{guess:g} s" if guess <= 0 else draw.duration(guess)
            note += f" The cross is your guess for {row.name}: {said}."
    mark = None if guess is None else (guess_for, guess)
    title = f"{size}, over one link"
    picture = _dots(title, rows, ticks, "time, one way", note, mark)
    said = "; ".join(f"{row.name} {row.text}" for row in rows)
    picture.summary = f"{title}: {said}. {note}"
    return picture


# --- the time of a message, measured --------------------------------------------


@draw.picture
def transfer_times(
    sizes: Sequence[float], seconds: Sequence[float], fit: costs.Transfer
) -> Picture:
    """Measured times of messages, with the latency and bandwidth that fit them.

    Args:
        sizes: Bytes of each message.
        seconds: How long each took, one way.
        fit: From `costs.fit_transfer`.
    """
    if len(sizes) != len(seconds) or not sizes:
        raise ValueError(f"There are {len(sizes)} sizes and {len(seconds)} times.")
    for value in (*sizes, *seconds):
        if draw.finite(value, "a size or time") <= 0:
            raise ValueError(f"A size or time is {value}: expected more than 0.")
    picture, board = draw.board(4.3, "The time of one message, by its size")
    left, bottom, width, tall = MARGIN + 0.72, 1.12, WIDTH - 2 * MARGIN - 0.82, 2.42
    axis = draw.chart(picture, left, bottom, width, tall)
    axis.set_xscale("log")
    axis.set_yscale("log")
    low, high = min(sizes) / 2, max(sizes) * 2
    curve = np.geomspace(low, high, 200)
    axis.plot(curve, [fit.seconds(float(n)) for n in curve], color=BLUE, lw=2.2)
    if fit.latency > 0:
        axis.plot([low, high], [fit.latency] * 2, color=INK, lw=1, ls=(0, (5, 3)))
    axis.plot(curve, curve / fit.bandwidth, color=VERMILLION, lw=1.4, ls=":")
    points = {
        "marker": "o",
        "ms": 7,
        "mec": INK,
        "mew": 0.8,
        "color": draw.tint(ORANGE, 1),
    }
    axis.plot(sizes, seconds, ls="none", zorder=5, **points)
    floor = min(*seconds, fit.latency or min(seconds)) / 4
    axis.set_xlim(low, high)
    axis.set_ylim(floor, max(*seconds, fit.seconds(high)) * 2)
    for ticks, name, say in (
        (axis.set_xticks, axis.get_xlim(), draw.byte_size),
        (axis.set_yticks, axis.get_ylim(), draw.duration),
    ):
        first, last = (math.log10(edge) for edge in name)
        powers = range(math.ceil(first), math.floor(last) + 1)
        ticks([10.0**p for p in powers], labels=[say(10.0**p) for p in powers])
    axis.minorticks_off()
    draw.grid(axis)
    draw.write(board, left, bottom + tall + 0.14, "time, one way", weight="bold")
    draw.write(
        board, left + width / 2, bottom - 0.38, "size of the message", ha="center"
    )
    samples = (
        ("measured", {"marker": "o", "ls": "none", **points}),
        ("latency + size / bandwidth", {"color": BLUE, "lw": 2.2}),
        ("latency alone", {"color": INK, "lw": 1, "ls": (0, (5, 3))}),
        ("size / bandwidth alone", {"color": VERMILLION, "lw": 1.4, "ls": ":"}),
    )
    draw.line_key(board, 0.5, samples)
    errors = [abs(fit.seconds(n) / t - 1) for n, t in zip(sizes, seconds, strict=True)]
    note = (
        f"Fitted: latency {draw.duration(fit.latency)}, "
        f"bandwidth {draw.speed(fit.bandwidth)}. "
        f"The largest error of the fit is {100 * max(errors):.0f} %."
    )
    draw.note(board, note)
    measured = "; ".join(
        f"{draw.byte_size(n)} {draw.duration(t)}"
        for n, t in zip(sizes, seconds, strict=True)
    )
    picture.summary = f"Measured, one way: {measured}. {note}"
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
    if type(rank) is not int or rank < 0:
        raise ValueError(f"rank is {rank!r}: expected a whole number from 0 up.")
    here = min(rank, last)
    node, local = costs.node_and_local_rank(here, gpus_per_node)
    _, place = picture.labels[here]
    corner = place.get_x(), place.get_y(), place.get_width(), place.get_height()
    draw.box(picture.axes[0], *corner, fill=draw.tint(ORANGE, 0.5), line=3.0)
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
    others = ", on each other node with its own --node-rank" if nodes > 1 else ""
    draw.below(
        picture,
        [
            f"{where}. torchrun tells it:",
            f"    {variables}",
            f"Type on node {node}{others}:",
            *(f"    {line}" for line in command),
        ],
    )
    typed = " ".join(command).replace("\\     ", "")
    picture.summary += f" {where}: {variables}. Type on node {node}: {typed}"
    return picture
