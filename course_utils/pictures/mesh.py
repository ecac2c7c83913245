"""A mesh of ranks: who talks to whom."""

from course_utils.pictures import draw, words
from course_utils.pictures.draw import MARGIN, NORMAL, WIDTH, Picture
from course_utils.theory.arguments import one_of

MEANS = {
    "pp": "send activations to each other: the stages of one model",
    "dp": "average their gradients: the same part of the model, other sequences",
    "tp": "share each layer, and the same sequences",
}
HATCHES = ("", "////", "....", "xxxx")


@draw.picture
def mesh(
    *, pp: int = 1, dp: int = 4, tp: int = 4, axis: str = "tp", gpus_per_node: int = 8
) -> Picture:
    """The ranks of a mesh (pp, dp, tp) on their nodes, with the groups of one axis.

    Ranks of one group have one colour, hatched from the ninth group on, and one letter.
    Rank r is on node r // gpus_per_node.

    Args:
        pp, dp, tp: the sizes, from the outermost to the innermost; 64 ranks at most.
        axis: whose groups are shown, "pp", "dp" or "tp".
        gpus_per_node: how many ranks a node has.

    Raises:
        ValueError: a size is below 1, there are too many ranks, or no such axis.
    """
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    one_of(axis, "axis", sizes)
    for what, size in [*sizes.items(), ("gpus_per_node", gpus_per_node)]:
        words.whole(size, what)
    total = pp * dp * tp
    words.few(range(total), "ranks", 64)

    step = {"pp": dp * tp, "dp": tp, "tp": 1}[axis]
    members: dict[int, list[int]] = {}
    for rank in range(total):
        place = rank // step % sizes[axis]
        members.setdefault(rank - place * step, []).append(rank)
    group_of = {
        rank: number for number, ranks in enumerate(members.values()) for rank in ranks
    }
    nodes = -(-total // gpus_per_node)
    tall, wide = 0.42, min(0.8, (WIDTH - 2 * MARGIN - 0.9) / gpus_per_node)
    long = [
        f"{name} {size}" for name, size in sizes.items() if size > 1 or name == axis
    ]
    title = f"{' × '.join(long)}: the groups of {axis}"
    picture, board = draw.board(1.0 + tall * nodes, title)
    top = 0.4 + tall * nodes
    for node in range(nodes):
        y = top - (node + 1) * tall
        draw.write(board, MARGIN, y + tall / 2, f"node {node}", size=NORMAL)
        for place in range(gpus_per_node):
            rank = node * gpus_per_node + place
            if rank < total:
                group = group_of[rank]
                label = f"{rank} {_letter(group)}"
                box = (MARGIN + 0.9 + place * wide, y + 0.03, wide - 0.05, tall - 0.06)
                looks = draw.rank_looks(group) | {"hatch": _hatch(group)}
                draw.box(board, *box, label, size=NORMAL, **looks)
    said = f"{words.count(len(members), 'group')} of {sizes[axis]}"
    means = f"ranks with the same letter {MEANS[axis]}"
    if sizes[axis] == 1:
        means = "along this axis nothing is sent"
    draw.note(board, f"{said}: {means}.")
    first = "; ".join(
        f"{_letter(number)}: ranks {words.listed(ranks)}"
        for number, ranks in enumerate(list(members.values())[:4])
    )
    across = sum(
        len({rank // gpus_per_node for rank in ranks}) > 1 for ranks in members.values()
    )
    picture.summary = (
        f"{title}. {said}, {across} of them across nodes. {first}"
        f"{'; …' if len(members) > 4 else ''}."
    )
    return picture


def _hatch(group: int) -> str:
    """There are fewer colours than groups: the next ones are hatched."""
    return HATCHES[group // len(draw.RANK_COLORS) % len(HATCHES)]


def _letter(group: int) -> str:
    """A, B, ..., Z, a, b, ...: 64 groups have 52 letters, and then numbers."""
    letters = [chr(ord(first) + i) for first in "Aa" for i in range(26)]
    return letters[group] if group < len(letters) else f"#{group}"
