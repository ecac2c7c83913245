"""Shares: which rank gets which item, which shard has what, what is in which bucket."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from course_utils.pictures import charts, draw, words
from course_utils.pictures.draw import LARGE, MARGIN, NORMAL, SMALL, WIDTH, Picture
from course_utils.theory import costs

# --- who gets which item --------------------------------------------------------------

_MOST_ITEMS = 24
_TITLE, _ORDER = "Which rank gets which item", "in this order"


@draw.picture
def partition(indices_by_rank: Sequence[Iterable[int]], total: int) -> Picture:
    """The items of a data set in a row, each in the line of the rank that gets it.

    An item that an earlier rank has already got is hatched: a sampler repeats items to
    make the shares equal. An item that no rank gets has a line of its own.

    Args:
        indices_by_rank: For each rank, in rank order, the indices that it gets, in
            its order: `list(DistributedSampler(...))` or `Partition.indices`. At most
            eight ranks.
        total: How many items the data set has, 1 to 24.

    Raises:
        ValueError: there are too many ranks or items, or an index is not in the data.
    """
    words.whole(total, "total", 1, _MOST_ITEMS)
    words.few(indices_by_rank, "ranks", len(draw.RANK_COLORS))
    shares = [
        [words.whole(i, f"An index of rank {rank}", 0, total - 1) for i in items]
        for rank, items in enumerate(indices_by_rank)
    ]
    again = _again(shares)
    dropped = sorted(set(range(total)) - {i for share in shares for i in share})
    names = [f"rank {rank}" for rank in range(len(shares))] + ["no rank"] * bool(
        dropped
    )
    label = 0.16 + max(draw.width_of(name, NORMAL) for name in names)
    cell = min(0.36, (WIDTH - 2 * MARGIN - label - 2.05) / total)
    left, step = MARGIN + label, 0.4
    heading = "items of the data set"
    aside = left + max(total * cell, draw.width_of(heading, SMALL, "bold")) + 0.2
    orders = [", ".join(map(str, share)) or "nothing" for share in shares]
    samples = []
    repeated = {**draw.rank_looks(0), "hatch": "////"}
    if any(any(counts.values()) for counts in again):
        samples.append(("it is repeated: another rank has it, too", repeated))
    if dropped:
        samples.append(("dropped: no rank gets it", draw.LOOKS["idle"]))
    low = 0.9 if samples else 0.55
    note = _partition_note(shares, again, dropped, total)
    wide = max(
        aside + max(draw.width_of(text, SMALL) for text in orders),
        aside + draw.width_of(_ORDER, SMALL, "bold"),
        draw.key_width(samples),
        MARGIN + draw.width_of(note, SMALL),
        MARGIN + draw.width_of(_TITLE, LARGE, "bold"),
    )
    width = min(wide + MARGIN, WIDTH)
    picture, board = draw.board(low + 0.84 + step * len(names), _TITLE, width)
    top = low + step * len(names)
    draw.write(board, left, top + 0.14, heading, weight="bold")
    draw.write(board, aside, top + 0.14, _ORDER, weight="bold")
    for place, name in enumerate(names):
        y = top - (place + 1) * step
        draw.write(board, MARGIN, y + step / 2, name, size=NORMAL)
        ends = [left, left + total * cell]
        board.plot(ends, [y, y], color="#E3E3E3", lw=0.8, zorder=0)
        items = shares[place] if place < len(shares) else dropped
        for item in dict.fromkeys(items):
            looks = {"rounded": 0.02, "line": 0.8, "pad": 0.0}
            if place == len(shares):
                looks |= draw.LOOKS["idle"]
            else:
                hatch = "////" if again[place][item] else None
                looks |= {**draw.rank_looks(place), "hatch": hatch}
            box = (left + item * cell + 0.01, y + 0.06, cell - 0.02, step - 0.12)
            draw.box(board, *box, str(item), **looks)
        if place < len(shares):
            text = draw.wrap(orders[place], width - MARGIN - aside + 0.02, SMALL, 2)
            draw.write(board, aside, y + step / 2, text, linespacing=1.05)
    draw.key(board, 0.55, samples)
    draw.note(board, note)
    said = "; ".join(f"rank {rank} gets {order}" for rank, order in enumerate(orders))
    picture.summary = f"{_TITLE}. {words.sentence(said)} {note}"
    return picture


def _again(shares: Sequence[Sequence[int]]) -> list[Counter]:
    """For each rank, how often it gets an item that was given out before.

    Items are given out in turns: the first of each rank, then the second, ...
    """
    seen: set[int] = set()
    again = [Counter() for _ in shares]
    for turn in range(max(map(len, shares))):
        for rank, share in enumerate(shares):
            if turn < len(share):
                again[rank][share[turn]] += share[turn] in seen
                seen.add(share[turn])
    return again


def _partition_note(
    shares: Sequence[Sequence[int]],
    again: Sequence[Counter],
    dropped: Sequence[int],
    total: int,
) -> str:
    sizes = [len(share) for share in shares]
    each = f"{sizes[0]} a rank" if len(set(sizes)) == 1 else words.listed(sizes)
    note = f"{words.count(total, 'item')}, {words.count(len(shares), 'rank')}: {each}."
    repeated = sum((counts for counts in again), Counter())
    if repeated.total():
        items = sorted(item for item, times in repeated.items() if times)
        note += f" Repeated: {words.listed(items)}."
    if dropped:
        note += f" Dropped: {words.listed(dropped)}."
    return note


# --- a unit, flat and cut -------------------------------------------------------------

_FILLS: tuple[dict[str, Any], ...] = (
    {"fill": draw.tint(draw.BLUE, 0.4)},
    {"fill": draw.tint(draw.ORANGE, 0.4), "hatch": "////"},
    {"fill": draw.tint(draw.GREEN, 0.35), "hatch": "\\\\\\\\"},
    {"fill": draw.tint(draw.PURPLE, 0.45), "hatch": "...."},
)
_PADDING = {"fill": draw.PAPER, "hatch": "xxxx", "hatched": draw.QUIET}


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
        ValueError: a number is not whole, or there are too many ranks.
    """
    named = [(str(name), size) for name, size in parameters]
    shards = costs.shard_parts([size for _, size in named], world_size)
    words.whole(world_size, "world_size", 1, 8)
    elements = sum(size for _, size in named)
    shard = costs.shard_size(elements, world_size)
    padding = world_size * shard - elements
    step = 0.42
    picture, board = draw.board(2.42 + step * world_size, title)
    left = MARGIN + 0.86
    inch = (WIDTH - MARGIN - left) / (world_size * shard)
    cuts = [left + rank * shard * inch for rank in range(1, world_size)]
    first = list(itertools.accumulate((size for _, size in named), initial=0))

    def row(y: float, parts: Iterable[tuple[int, int, int]], gap: float = 0.0) -> None:
        for number, start, stop in parts:
            name, wide = named[number][0], (stop - start) * inch
            texts = (name, name.rpartition(".")[2])
            if gap:
                texts = [f"{text} ({stop:,})" for text in texts] + [*texts]
            inset = min(gap, wide / 4)
            x = left + (first[number] + start) * inch + inset
            if wide:
                looks = {"rounded": 2 * gap, **_FILLS[number % len(_FILLS)]}
                box = draw.box(board, x, y, wide - 2 * inset, 0.3, **looks)
                at, free = charts.free_part(x, x + wide, [] if gap else cuts)
                text = draw.first_that_fits(texts, free - 0.2)
                draw.name(board, box, at, y + 0.15, text)

    def pad(y: float, start: int, stop: int, *texts: str) -> None:
        wide = (stop - start) * inch
        if wide:
            text = draw.first_that_fits(texts, wide - 0.14)
            looks = {"rounded": 0.0, **_PADDING}
            draw.box(board, left + start * inch, y, wide, 0.3, text, **looks)

    whole = [(number, 0, size) for number, (_, size) in enumerate(named)]
    top = picture.get_figheight() - 1.02
    flat = top - 0.66
    draw.write(board, MARGIN, top + 0.15, "parameters")
    row(top, whole, gap=0.03)  # apart: they are tensors of their own
    draw.write(board, MARGIN, flat + 0.15, "flat")
    row(flat, whole)
    pad(flat, elements, elements + padding, f"padding ({padding:,})", "padding")
    said = []
    for rank, parts in enumerate(shards):
        y = flat - 0.24 - step * (rank + 1)
        begin, end = rank * shard, (rank + 1) * shard
        filled = begin + sum(stop - start for _, start, stop in parts)
        if rank:  # a cut, down to the shard that begins here
            x = left + begin * inch
            board.plot([x, x], [y - 0.02, flat + 0.38], zorder=2, **draw.LIMIT)
        draw.write(board, MARGIN, y + 0.15, f"rank {rank}", weight="bold")
        row(y, parts)
        pad(y, filled, end)
        holds = [f"{named[p][0]}[{start}:{stop}]" for p, start, stop in parts]
        holds += (
            [f"{words.count(end - filled, 'element')} of padding"]
            if filled < end
            else []
        )
        said.append(f"rank {rank}: {', '.join(holds)}")
        before, after = begin * inch, WIDTH - MARGIN - left - end * inch
        x = left + (begin * inch - 0.1 if before > after else end * inch + 0.1)
        looks = {"ha": "right" if before > after else "left", "zorder": 4}
        looks |= draw.on_paper()
        room = max(before, after) - 0.14
        if room > 0:  # one rank has the whole row
            text = draw.cut(", ".join(holds), room, SMALL)
            draw.write(board, x, y + 0.15, text, **looks)
    note = (
        f"{words.count(elements, 'element')} in "
        f"{words.count(len(named), 'parameter')}, "
        f"{words.count(padding, 'element')} of padding, "
        f"{words.count(world_size, 'shard')} of {shard:,}."
    )
    draw.note(board, note, 0.24)
    picture.summary = f"{title}. {note} {words.sentence('; '.join(said))}"
    return picture


# --- which gradients travel together --------------------------------------------------

_MOST_BUCKETS = 10
_BUCKET_COLORS = (draw.tint(draw.SKY, 0.55), draw.tint(draw.ORANGE, 0.35))
_SIDES = 0.12  # inches of a box beside its label


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
        ValueError: a size is negative.
    """
    for name, nbytes in itertools.chain(*buckets):
        words.not_negative(nbytes, f"The size of {name!r}")
    sizes = [sum(nbytes for _, nbytes in bucket) for bucket in buckets]
    places = words.shown(len(buckets), _MOST_BUCKETS)
    step = 0.52
    height = 1.0 + step * len(places)
    picture, board = draw.board(height, title)
    label = 0.14 + draw.width_of(f"bucket {len(buckets) - 1}", NORMAL)
    said = [
        f"{_mib(size)}, {words.count(len(bucket), 'parameter')}"
        for size, bucket in zip(sizes, buckets, strict=True)
    ]
    room = 0.12 + max(draw.width_of(text, SMALL) for text in said)
    left = MARGIN + label
    inch = (WIDTH - MARGIN - room - left) / (max(sizes) or 1.0)
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
            text = draw.first_that_fits(_texts(name), wide - _SIDES)
            draw.box(board, x, y + 0.24, wide, 0.24, text, **looks)
            x += wide
        draw.write(board, x + 0.1, y + 0.36, said[number])
        ends = draw.cut(_from_to(buckets[number]), WIDTH - MARGIN - left, SMALL)
        draw.write(board, left, y + 0.11, ends, color=draw.QUIET)
    note = (
        f"{words.count(sum(map(len, buckets)), 'parameter')} in "
        f"{words.count(len(buckets), 'bucket')}, {_mib(sum(sizes))} in all. Bucket 0 "
        "is sent first."
    )
    draw.note(board, note, 0.24)
    told = "; ".join(
        "…"
        if number is None
        else f"bucket {number}: {said[number]} ({_from_to(buckets[number])})"
        for number in places
    )
    picture.summary = f"{title}. {note} {words.sentence(told)}"
    return picture


def _texts(name: str) -> tuple[str, str]:
    """What to write for a parameter: "layer.weight", or "layer.w" in little room."""
    layer, _, last = name.rpartition(".")
    return name, f"{layer}.{last[:1]}" if layer else name


def _from_to(bucket: Sequence[tuple[str, float]]) -> str:
    first, last = bucket[0][0], bucket[-1][0]
    return first if len(bucket) == 1 else f"{first} to {last}"


def _mib(nbytes: float) -> str:
    mib = nbytes / costs.MiB
    return f"{mib:,.1f} MiB" if mib >= 0.1 else f"{words.number(mib, 2)} MiB"
