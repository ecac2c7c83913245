"""Collectives: what each rank held before and after."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from course_utils.pictures import draw, words
from course_utils.pictures.draw import GAP, LARGE, LOOKS, MARGIN, NORMAL, WIDTH, Picture

_COMPUTED, _UNDEFINED = -1, -2
_MIDDLE = 1.2  # inches between before and after
_MOST_RANKS = 9
_NOTHING = 0.8  # inches of a frame around no cells
OPERATIONS = {
    "SUM": "the sum",
    "PRODUCT": "the product",
    "MIN": "the smallest",
    "MAX": "the largest",
    "AVG": "the average",
    "BAND": "bitwise and",
    "BOR": "bitwise or",
    "BXOR": "bitwise exclusive or",
}
_Held = list[list[str]] | None  # the texts of a rank's tensors; None for nothing


class _Call(NamedTuple):
    """A collective as it was called; `op` is "" where nothing is computed."""

    name: str
    op: str
    root: int | None


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
        name: The collective, such as "all_reduce", or "send / recv": then the arrow
            is the message.
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
    rows = words.shown(world_size, _MOST_RANKS)
    step = min(0.46, 2.9 / len(rows))
    height = 1.52 + step * len(rows)
    names = [f"rank {rank}" + " (root)" * (rank == root) for rank in range(world_size)]
    label = 0.16 + max(draw.width_of(word, NORMAL, "bold") for word in names)
    room = WIDTH - 2 * MARGIN - label - _MIDDLE
    cell = _cell_width(old, new, room)
    wide = [max(_across(held, cell) for held in ranks) for ranks in (old, new)]
    # Where both do not fit, each may have half, and what the other leaves of its half.
    sides = [min(own, max(room / 2, room - other)) for own, other in (wide, wide[::-1])]
    title = _title(call, world_size)
    key = _key(sources, call)
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
    middles = {}
    for place, rank in enumerate(rows):
        y = top - (place + 1) * step
        if rank is None:
            draw.write(board, MARGIN, y + step / 2, "…", size=LARGE)
            continue
        middles[rank] = y + step / 2
        looks = {"size": NORMAL, "weight": "bold" if rank == root else "normal"}
        draw.write(board, MARGIN, middles[rank], names[rank], **looks)
        own = [[rank] * len(part) for part in old[rank] or ()]
        spot = (y + step * 0.08, cell, step * 0.84)
        _hold(board, (left, sides[0], *spot), old[rank], own)
        _hold(board, (right, sides[1], *spot), new[rank], sources[rank])

    ends = right - _MIDDLE + 0.12, right - 0.12
    center = top - step * len(rows) / 2 - 0.1
    sent = {
        (source, rank)
        for rank, held in enumerate(sources)
        for source in (s for part in held for s in part)
        if source in middles and source != rank and rank in middles
    }
    if "send" in name and sent:  # from rank to rank, and not only from left to right
        for source, rank in sent:
            tail = left + min(_across(old[source], cell), sides[0]) + 0.08
            both = (tail, middles[source]), (right - 0.08, middles[rank])
            draw.arrow(board, *both, line=2.4, head=16)
        center = top + 0.02
    else:
        draw.arrow(board, (ends[0], center), (ends[1], center), line=2.4, head=16)
    word = draw.wrap(name, _MIDDLE - 0.14, NORMAL, lines=3, weight="bold")
    looks = {"size": NORMAL, "weight": "bold", "ha": "center"}
    draw.write(board, right - _MIDDLE / 2, center + 0.12, word, va="bottom", **looks)
    draw.write(board, right - _MIDDLE / 2, center - 0.12, call.op, va="top", **looks)
    draw.key(board, 0.3, key)
    picture.summary = (
        f"{title}. Before: {_all_held(old)}. After: {_all_held(new)}."
        + _undefined_in_words(sources)
    )
    return picture


def _title(call: _Call, world_size: int) -> str:
    named = not call.op or call.name.endswith(call.op)
    words_of_it = call.name if named else f"{call.name} {call.op}"
    where = "" if call.root is None else f", root: rank {call.root}"
    return f"{words_of_it} on {words.count(world_size, 'rank')}{where}"


def _checked(
    before: Sequence[object],
    after: Sequence[object],
    name: str,
    op: object,
    root: int | None,
) -> tuple[list[_Held], list[_Held], _Call]:
    """What the ranks held, as texts, and the call."""
    if len(before) != len(after) or not len(before):
        raise ValueError(
            f"before is of {words.count(len(before), 'rank')}, after of "
            f"{words.count(len(after), 'rank')}: give one entry a rank to both."
        )
    ranks = range(len(before))
    if root is not None and root not in ranks:
        raise ValueError(f"root is {root!r}: expected one of {list(ranks)}.")
    # ReduceOp.MAX prints itself as RedOpType.MAX or as ReduceOp.MAX.
    operation = "" if op is None else str(op).rpartition(".")[2]
    if operation and operation not in OPERATIONS:
        raise ValueError(
            f"op is {op!r}: expected one of {words.listed(OPERATIONS)}, or None."
        )
    old = [_held(value, rank, "before") for rank, value in enumerate(before)]
    new = [_held(value, rank, "after") for rank, value in enumerate(after)]
    return old, new, _Call(name, operation, root)


def _held(value: object, rank: int, when: str) -> _Held:
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
    return str(number) if isinstance(number, bool) else words.number(number)


def _sources(
    old: Sequence[_Held], new: Sequence[_Held], call: _Call
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

    def whose(text: str) -> int | None:
        ranks = owners.get(text, ())
        return next(iter(ranks)) if len(ranks) == 1 else None if ranks else _COMPUTED

    sources = []
    for rank, held in enumerate(new):
        result_here = on_every_rank or rank == call.root
        if reduces and not result_here and call.root is not None:
            source = _UNDEFINED
        elif held == old[rank] and not (reduces and result_here):
            source = rank
        elif reduces:
            source = _COMPUTED
        else:
            sources.append([[whose(text) for text in part] for part in held or ()])
            continue
        sources.append([[source] * len(part) for part in held or ()])
    return sources


def _looks_of(source: int | None) -> dict[str, Any]:
    if source is None:
        return {"fill": draw.PAPER}
    if source == _COMPUTED:
        return {"fill": draw.PAPER, "hatch": "////"}
    if source == _UNDEFINED:
        return {"fill": draw.PAPER, "hatch": "....", "edge": draw.LINE, "dashed": True}
    return draw.rank_looks(source)


def _hold(
    board: Axes,
    spot: tuple[float, float, float, float, float],
    held: _Held,
    sources: list[list[int | None]],
) -> None:
    """The cells of one rank: one after the other, a gap between two tensors."""
    left, side, y, width, height = spot
    if not held or not any(held):
        word = "nothing" if held is None else "empty"
        looks = {"rounded": 0.02, **LOOKS["idle"]}
        draw.box(board, left, y, _NOTHING, height, word, **looks)
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
    for index in words.shown(len(cells), room):
        if index is None:
            looks = {"size": NORMAL, "ha": "center"}
            draw.write(board, x + width / 2, y + height / 2, "…", **looks)
        else:
            text, source, first = cells[index]
            x += GAP if first and index else 0
            looks = {"size": NORMAL, "rounded": 0.02, **_looks_of(source)}
            draw.box(board, x, y, width, height, text, **looks)
        x += width


def _across(held: _Held, cell: float) -> float:
    """How wide the cells of one rank are."""
    if not held or not any(held):
        return _NOTHING
    return sum(map(len, held)) * cell + (len(held) - 1) * GAP


def _cell_width(old: Sequence[_Held], new: Sequence[_Held], room: float) -> float:
    """Wide enough for every text; more, up to half an inch, where there is room."""
    texts = [text for held in [*old, *new] for part in held or () for text in part]
    need = max([draw.width_of(text, NORMAL) for text in texts], default=0.0)
    # What is left for each cell when all of them are drawn, at the busiest ranks.
    gaps = sum(max(len(held or ()) for held in side) for side in (old, new))
    cells = sum(max(sum(map(len, held or ())) for held in side) for side in (old, new))
    fit = (room - GAP * gaps) / (cells or 1)
    wanted = max(need + 0.16, 0.3, min(0.5, fit))
    if wanted > fit:
        wanted = max(need + 0.09, fit)  # as narrow as a box's label may be
    return min(wanted, room / 6 - GAP)


def _key(sources: Sequence[list], call: _Call) -> list[tuple]:
    used = {source for held in sources for part in held for source in part}
    if not used:
        return [("no rank holds anything", LOOKS["idle"])]
    ranks = map(_looks_of, range(min(3, len(sources))))
    key: list[tuple] = [("colour: the rank it came from", *ranks)]
    if _COMPUTED in used:
        what = "computed from several ranks"
        if call.op and (call.root is not None or call.name != "reduce"):
            what = f"{OPERATIONS[call.op]} over the ranks"
        key.append((what, _looks_of(_COMPUTED)))
    if _UNDEFINED in used:
        key.append(("undefined: not the root", _looks_of(_UNDEFINED)))
    if None in used:
        key.append(("held by several ranks before", _looks_of(None)))
    return key


def _undefined_in_words(sources: Sequence[list]) -> str:
    ranks = [
        str(rank)
        for rank, held in enumerate(sources)
        if any(_UNDEFINED in part for part in held)
    ]
    if not ranks:
        return ""
    who = f"rank{'s' if len(ranks) > 1 else ''} {words.listed(ranks)}"
    return f" Only the root is promised the result: undefined on {who}."


def _all_held(ranks: Sequence[_Held]) -> str:
    """What all ranks hold, in words; equal neighbours are said once."""
    texts = [_in_words(held) for held in ranks]
    if len(set(texts)) == 1 and len(texts) > 1:
        return f"every rank holds {texts[0]}"
    shown = [
        f"rank {rank} holds {texts[rank]}"
        for rank in words.shown(len(texts), _MOST_RANKS)
        if rank is not None
    ]
    return ", ".join(shown) + " (some ranks left out)" * (len(shown) < len(texts))


def _in_words(held: _Held) -> str:
    if held is None:
        return "nothing"
    parts = [f"[{', '.join(_few(part))}]" for part in held]
    return ", ".join(parts) if len(parts) == 1 else f"[{', '.join(_few(parts))}]"


def _few(texts: Sequence[str]) -> list[str]:
    return ["…" if i is None else texts[i] for i in words.shown(len(texts), 9)]
