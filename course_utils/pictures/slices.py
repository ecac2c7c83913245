"""A linear layer in slices: which rank has what of the weight, and computes what."""

from collections.abc import Sequence
from typing import Any

from course_utils.pictures import draw, words
from course_utils.pictures.draw import LARGE, MARGIN, SMALL, Picture
from course_utils.theory.arguments import one_of

_TALL, _MOST = 0.32, 8  # inches of a number's box; numbers in a row of boxes
_GAP, _NAMES = 0.5, 0.62  # for "×" and "→"; for "rank 0" beside a row
_HATCHES = (None, "///", "\\\\\\", "...")


def _looks(rank: int) -> dict[str, Any]:
    looks = {"hatch": _HATCHES[rank % len(_HATCHES)], "hatched": draw.PAPER}
    return draw.rank_looks(rank) | looks


@draw.picture
def sliced_linear(
    x: Sequence[float],
    weight: Sequence[Sequence[float]],
    parts: Sequence[Sequence[float]],
    *,
    cut: str,
) -> Picture:
    """x · A with the slices of A on their ranks, and what each rank has computed.

    Args:
        x: The inputs.
        weight: A, a row for each input: PyTorch's weight, transposed.
        parts: What each rank has computed, in rank order: some outputs if A is cut by
            columns, a part of all outputs if by rows.
        cut: "columns" or "rows". Each rank has equally many.

    Raises:
        ValueError: the ranks cannot have equally many, or there are too many numbers.
    """
    n, by_rows = len(parts), cut == "rows"
    one_of(cut, "cut", ("columns", "rows"))
    words.few(parts, "ranks", len(draw.RANK_COLORS))
    words.few(x, "inputs", _MOST)
    words.few(weight[0], "outputs", _MOST)
    size, rest = divmod(len(x) if by_rows else len(weight[0]), n)
    if rest or len(weight) != len(x):
        raise ValueError(
            f"A has {len(weight)} rows and {len(weight[0])} columns, x has {len(x)} "
            f"inputs: expected as many rows as inputs, and {cut} for {n} ranks alike."
        )

    def rows_of(values: Sequence[Sequence[float]]) -> list[list[str]]:
        return [[words.number(value) for value in row] for row in values]

    total = [[sum(column) for column in zip(*parts, strict=True)]] * by_rows
    (inputs,), matrix, results = rows_of([x]), rows_of(weight), rows_of(parts)
    whole = rows_of(total)
    texts = [text for row in [inputs, *matrix, *results, *whole] for text in row]
    wide = 0.16 + max(draw.width_of(text, SMALL) for text in texts)
    title = f"A linear layer, cut by {cut}"
    picture, board = draw.board(1.68 + _TALL * max(len(x), n + by_rows), title)
    top = picture.get_figheight() - 0.9

    def block(
        left: float, name: str, rows: list[list[str]], owners: list, shift: int = 0
    ) -> float:
        draw.write(board, left, top + 0.16, name, weight="bold")
        for line, (row, ranks) in enumerate(zip(rows, owners, strict=True)):
            places = enumerate(zip(row, ranks, strict=True), line * shift)
            for place, (text, rank) in places:
                looks = {} if rank is None else _looks(rank)
                box = left + wide * place, top - _TALL * (line + 1), wide, _TALL
                draw.box(board, *box, text, rounded=0.0, **looks)
        return left + wide * len(rows[0])

    of = [place // size for place in range(size * n)]
    left = block(MARGIN, "x", [inputs], [of if by_rows else [None] * len(x)])
    draw.write(board, left + _GAP / 2, top - _TALL / 2, "×", size=LARGE, ha="center")
    owners = [[rank] * len(weight[0]) for rank in of] if by_rows else [of] * len(x)
    left = block(left + _GAP, "A, the weight", matrix, owners)
    draw.write(board, left + _GAP / 2, top - _TALL / 2, "→", size=LARGE, ha="center")
    left += _GAP
    names = [f"rank {rank}" for rank in range(n)] + ["sum"] * by_rows
    for line, name in enumerate(names):
        draw.write(board, left, top - _TALL * (line + 0.5), name)
    owners = [[rank] * len(row) for rank, row in enumerate(results)]
    owners += [[None] * len(row) for row in whole]
    shift = 0 if by_rows else size  # each output has a place of its own
    block(left + _NAMES, "what it computes", results + whole, owners, shift)
    draw.key(board, 0.52, [(f"rank {r}", _looks(r)) for r in range(n)])
    what = "a part of every output" if by_rows else "some of the outputs"
    note = f"Each rank has {size} of {size * n} {cut} of A, and computes {what}."
    draw.note(board, note)
    said = [
        f"{name}: {', '.join(row)}"
        for name, row in zip(names, results + whole, strict=True)
    ]
    said = words.sentence("; ".join(said))
    picture.summary = f"{title}, x = {', '.join(inputs)}. {note} {said}"
    return picture
