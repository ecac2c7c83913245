"""The picture of a ring: what every rank holds, and what it sends to the next one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from course_utils.pictures import draw, words
from course_utils.pictures.draw import MARGIN, SMALL, WIDTH, Picture

if TYPE_CHECKING:
    from course_utils.measure.snapshots import History

_MOST_RANKS, _MOST_ELEMENTS = 8, 32
_ROW, _HEAD, _SIDE = 0.27, 0.32, 0.1  # inches of a rank's card
_GAP = 0.42  # between two cards
_BEND = 0.25  # of an arrow: how far aside it goes, as a share of its length, twice
_CHUNK, _SHARE = 0.62, 0.5  # inches for "chunk 0" and for "3 of 4"
# Where ranks are, clockwise: columns 0 to 2 from the left, rows from the top.
_PLACES: dict[int, tuple[tuple[float, float], ...]] = {
    1: ((1, 0),),
    2: ((0, 0), (2, 0)),
    3: ((1, 0), (2, 1), (0, 1)),
    4: ((1, 0), (2, 1), (1, 2), (0, 1)),
    5: ((1, 0), (2, 0.7), (1.6, 1.7), (0.4, 1.7), (0, 0.7)),
    6: ((1, 0), (2, 0.3), (2, 1.3), (1, 1.6), (0, 1.3), (0, 0.3)),
    7: ((1, 0), (2, 0.3), (2, 1.3), (1.6, 2.3), (0.4, 2.3), (0, 1.3), (0, 0.3)),
    8: ((1, 0), (2, 0.3), (2, 1.3), (2, 2.3), (1, 2.6), (0, 2.3), (0, 1.3), (0, 0.3)),
}
_LOOKS: dict[str, dict[str, Any]] = {
    "": {"fill": draw.PAPER},
    "✓": {"fill": draw.tint(draw.GREEN, 0.35)},
    "↓": {"fill": draw.tint(draw.ORANGE, 0.4)},
    "↑": {"fill": draw.PAPER, "line": 2.6},
}


@draw.picture
def ring_step(history: "History", step: int = 0) -> Picture:
    """What ranks in a ring hold before a step, and which chunk each of them sends.

    All numbers were in a rank's tensor. Beside each chunk is how many ranks' own values
    are in it. Where ranks send to others than the next one, so do the arrows.

    Args:
        history: `measure.snapshots.History` of at most 8 ranks and 32 elements.
        step: 0 up to `history.steps`, which is after the last one.

    Raises:
        ValueError: there is no such step, or there are too many ranks or elements.
    """
    n, chunks = history.world_size, len(history.chunks)
    elements = history.chunks[-1][1]
    if n > _MOST_RANKS or elements > _MOST_ELEMENTS:
        raise ValueError(
            f"The history is of {words.count(n, 'rank')} with "
            f"{words.count(elements, 'element')}: expected at most {_MOST_RANKS} ranks "
            f"and {_MOST_ELEMENTS} elements."
        )
    words.whole(step, "step", 0, history.steps)
    texts = [[_text(history, step, r, c) for c in range(chunks)] for r in range(n)]
    # Three cards fit side by side, with room for an arrow between them.
    room = (WIDTH - 2 * MARGIN - 2 * _GAP) / 3 - 2 * _SIDE - _CHUNK - _SHARE
    # As wide in every step, so that nothing moves from one to the next.
    longest = max(
        draw.width_of(_text(history, at, rank, chunk), SMALL)
        for at in range(history.steps + 1)
        for rank in range(n)
        for chunk in range(chunks)
    )
    cell = min(longest + 0.2, room + (0.6 if n < 5 else 0))
    wide = 2 * _SIDE + _CHUNK + cell + _SHARE
    tall = _HEAD + _ROW * chunks + _SIDE
    across, down = (WIDTH - 2 * MARGIN - wide) / 2, tall + _GAP
    # Of two or three ranks, an arrow between neighbours reaches out below their cards.
    low = max(0.0, _BEND * across + 0.15 - tall / 2) if n < 4 else 0.0
    top = 0.86 + low + tall + down * max(row for _, row in _PLACES[n])
    title = _title(history, step)
    picture, board = draw.board(top + 0.62 + (low if n == 2 else 0), title)
    cards = []
    for rank, (column, row) in enumerate(_PLACES[n]):
        corner = MARGIN + column * across, top - row * down - tall
        looks = {"fill": draw.MIST, "edge": draw.LINE}
        cards.append(draw.box(board, *corner, wide, tall, **looks))
        _card(board, corner, cell, history, step, rank, texts[rank])
    if step < history.steps:
        for rank, one in enumerate(history.moments):
            chunk = _named(history, one[step].first, one[step].stop)
            _arrow(board, cards, (rank, one[step].to), chunk)
    draw.key(
        board,
        0.52,
        [
            ("↑ goes out in this step", _LOOKS["↑"]),
            ("↓ came in with the step before", _LOOKS["↓"]),
            ("✓ complete: all ranks are in it", _LOOKS["✓"]),
        ],
    )
    sent = _sent_so_far(history, step)
    draw.note(board, sent)
    held = "; ".join(f"rank {rank}: {', '.join(row)}" for rank, row in enumerate(texts))
    picture.summary = f"{title}: {_messages(history, step)}. {held}. {sent}"
    return picture


def _text(history: "History", step: int, rank: int, chunk: int) -> str:
    """The signs of what happens to a chunk, and its numbers."""
    values = map(words.number, history.values(step, rank, chunk))
    return " ".join([*_signs(history, step, rank, chunk), *values])


def _signs(history: "History", step: int, rank: int, chunk: int) -> list[str]:
    first, stop = history.chunks[chunk]
    signs = []
    if history.is_complete(step, rank, chunk):
        signs.append("✓")
    if step:
        taken = history.taken[step - 1][rank]
        if taken.first <= first and stop <= taken.stop:
            signs.append("↓")
    if step < history.steps:
        sent = history.moments[rank][step]
        if sent.first <= first and stop <= sent.stop:
            signs.append("↑")
    return signs


def _card(
    board: Axes,
    corner: tuple[float, float],
    cell: float,
    history: "History",
    step: int,
    rank: int,
    texts: list[str],
) -> None:
    """What one rank holds, one line a chunk."""
    x, y = corner[0] + _SIDE, corner[1] + _SIDE + _ROW * len(texts)
    draw.write(board, x, y + 0.12, f"rank {rank}", weight="bold")
    for chunk, text in enumerate(texts):
        y -= _ROW
        draw.write(board, x, y + _ROW / 2, f"chunk {chunk}")
        signs = _signs(history, step, rank, chunk)
        looks = dict(_LOOKS[next(iter(s for s in signs if s != "↑"), "")])
        if "↑" in signs:
            looks["line"] = _LOOKS["↑"]["line"]
        place = x + _CHUNK, y + 0.025, cell, _ROW - 0.05
        draw.box(board, *place, text, rounded=0.02, **looks)
        shares = history.shares(step, rank, chunk)
        said = "no sum" if shares is None else f"{sum(map(bool, shares))} of "
        said += "" if shares is None else str(len(shares))
        looks = {"color": draw.QUIET, "ha": "right"}
        draw.write(board, x + _CHUNK + cell + _SHARE, y + _ROW / 2, said, **looks)


def _arrow(
    board: Axes, cards: Sequence[FancyBboxPatch], ends: tuple[int, int], name: str
) -> None:
    """A bent arrow from one card to another, and its name where there is room."""
    start, stop = (cards[rank] for rank in ends)
    if start is stop:
        return
    first, last = (
        np.array([card.get_x() + card.get_width() / 2, card.get_y()])
        + (0, card.get_height() / 2)
        for card in (start, stop)
    )
    # A quadratic curve; matplotlib lets its middle point lie that far aside.
    along = last - first
    aside = (first + last) / 2 - _BEND * np.array([along[1], -along[0]])
    looks = {"arrowstyle": "-|>", "mutation_scale": 14, "lw": 1.8, "color": draw.INK}
    looks |= {"patchA": start, "patchB": stop, "shrinkA": 1, "shrinkB": 1}
    curve = f"arc3,rad=-{_BEND}"
    board.add_patch(FancyArrowPatch(first, last, connectionstyle=curve, **looks))
    ways = np.linspace(0, 1, 101)[:, None]
    points = (1 - ways) ** 2 * first + 2 * ways * (1 - ways) * aside + ways**2 * last
    free = [point for point in points if not any(_covers(c, point) for c in cards)]
    x, y = free[len(free) // 2]
    for text in (name, name.removeprefix("chunk ")):
        half = draw.width_of(text, SMALL) / 2 + 0.1
        if not any(_covers(card, (x, y), half, 0.09) for card in cards):
            draw.write(board, x, y, text, ha="center", **draw.on_paper())
            return


def _covers(
    card: FancyBboxPatch, point: Sequence[float], wide: float = 0, tall: float = 0
) -> bool:
    """Whether a card reaches into a box of that half width and height."""
    x, y = point[0] - card.get_x(), point[1] - card.get_y()
    in_width = -wide < x < card.get_width() + wide
    return in_width and -tall < y < card.get_height() + tall


def _title(history: "History", step: int) -> str:
    if step == history.steps:
        return f"After {words.count(step, 'step')}"
    done = {taken.how for taken in history.taken[step] if taken.first < taken.stop}
    halves = {"added": ", reduce-scatter", "copied": ", all-gather"}
    half = halves.get(done.pop(), "") if len(done) == 1 else ""
    return f"Step {step} (of 0 to {history.steps - 1}){half}"


def _named(history: "History", first: int, stop: int) -> str:
    """The chunks of these elements, in words."""
    numbers = [
        number
        for number, (start, end) in enumerate(history.chunks)
        if first <= start and end <= stop
    ]
    if not numbers:
        return "nothing"
    return f"chunk{'s' if len(numbers) > 1 else ''} {words.listed(numbers)}"


def _messages(history: "History", step: int) -> str:
    cells = [
        history.is_complete(step, rank, chunk)
        for rank in range(history.world_size)
        for chunk in range(len(history.chunks))
    ]
    complete = f"{sum(cells)} of {words.count(len(cells), 'chunk')} complete"
    if step == history.steps:
        return complete
    sent = ", ".join(
        f"rank {rank} sends {_named(history, one[step].first, one[step].stop)} to rank "
        f"{one[step].to}"
        for rank, one in enumerate(history.moments)
    )
    return f"{sent}; {complete}"


def _sent_so_far(history: "History", step: int) -> str:
    sent = [sum(m.stop - m.first for m in one[:step]) for one in history.moments]
    few, many = min(sent), max(sent)
    numbers = words.count(many, "element")
    if few != many:
        numbers = f"{few} to {numbers}"
    return (
        f"Sent so far by each rank: {words.count(step, 'message')} with {numbers} "
        f"in all. Its tensor has {history.chunks[-1][1]}."
    )
