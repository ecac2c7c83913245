"""A collective by its definition: what ranks hold before and after, what to type."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_utils.pictures import draw, words
from course_utils.pictures.collectives import OPERATIONS
from course_utils.pictures.collectives import collective as drawn
from course_utils.pictures.draw import Picture
from course_utils.theory import costs
from course_utils.theory.arguments import one_of

_MOST_RANKS = 8
_OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
# What one rank has: a tensor, a list of tensors, None for neither.
_Held = list[float] | list[list[float]] | None


class Kind(NamedTuple):
    """A collective: how it is called, and what it does.

    Attributes:
        lines: The call, after the line that makes room for the result.
        result: What happens, in words.
        rooted: Whether one rank has a part of its own, `src` or `dst`.
        reduces: Whether it takes an `op`.
    """

    lines: tuple[str, ...]
    result: str
    rooted: bool = False
    reduces: bool = False


# The functions of `from_scratch/collectives.py` that do the same, and how; where there
# is no entry, it is the one of that name. A barrier all-reduces one byte.
_MADE_OF = {
    "broadcast": {
        "broadcast": ", one after the other",
        "broadcast_tree": ", as a tree",
    },
    "all_reduce": {
        "all_reduce_naive": ", all through rank 0",
        "all_reduce": ", in two halves, an n-th of the tensor in a message",
    },
    "barrier": {"all_reduce_naive": ""},
}
_ROOM = "[torch.empty({size}) for _ in range({n})]"
COLLECTIVES = {
    "broadcast": Kind(
        ("dist.broadcast(tensor, src={root})",),
        "every rank gets the tensor of rank {root}",
        rooted=True,
    ),
    "scatter": Kind(
        (
            "tensor = torch.empty({size})",
            "dist.scatter(tensor, pieces if rank == {root} else None, src={root})",
        ),
        "rank r gets piece r of the list of rank {root}",
        rooted=True,
    ),
    "gather": Kind(
        (
            f"pieces = {_ROOM} if rank == {{root}} else None",
            "dist.gather(tensor, pieces, dst={root})",
        ),
        "rank {root} gets the list of all tensors",
        rooted=True,
    ),
    "reduce": Kind(
        ("dist.reduce(tensor, dst={root}, op=dist.ReduceOp.{op})",),
        "rank {root} gets {what} of each element",
        rooted=True,
        reduces=True,
    ),
    "all_reduce": Kind(
        ("dist.all_reduce(tensor, op=dist.ReduceOp.{op})",),
        "every rank gets {what} of each element",
        reduces=True,
    ),
    "all_gather": Kind(
        (f"pieces = {_ROOM}", "dist.all_gather(pieces, tensor)"),
        "every rank gets the list of all tensors",
    ),
    "reduce_scatter": Kind(
        (
            "tensor = torch.empty({size})",
            "dist.reduce_scatter(tensor, pieces, op=dist.ReduceOp.{op})",
        ),
        "rank r gets {what} of the pieces r of all ranks",
        reduces=True,
    ),
    "all_to_all": Kind(
        (f"received = {_ROOM}", "dist.all_to_all(received, pieces)"),
        "rank r gets piece r of every rank",
    ),
    "barrier": Kind(
        ("dist.barrier()",),
        "every rank waits until all have called it; no data",
    ),
}


@dataclass(frozen=True)
class CollectiveCall:
    """One collective with small numbers, by its definition: nothing is sent.

        >>> call = CollectiveCall("reduce", 3, op="MAX", root=2)
        >>> call.after()
        [[1.0, 4.0, 3.0], [2.0, 3.0, 4.0], [3.0, 4.0, 5.0]]
        >>> call.lines()
        ['dist.reduce(tensor, dst=2, op=dist.ReduceOp.MAX)']

    Attributes:
        collective: Its name in `torch.distributed`.
        world_size: How many ranks there are, 1 to 8.
        op: What is computed where it reduces: SUM, PRODUCT, MIN, MAX or AVG.
        root: The rank that sends to all or receives from all, where there is one.

    Raises:
        ValueError: there is no such collective, operation or rank, or too many ranks.
    """

    collective: str
    world_size: int = 4
    op: str = "SUM"
    root: int = 0

    def __post_init__(self) -> None:
        one_of(self.collective, "collective", COLLECTIVES)
        one_of(self.op, "op", _OPERATIONS)
        words.whole(self.world_size, "world_size", 1, _MOST_RANKS)
        words.whole(self.root, "root", 0, self.world_size - 1)

    @property
    def kind(self) -> Kind:
        """How the collective is called, and what it does."""
        return COLLECTIVES[self.collective]

    def before(self) -> list[_Held]:
        """What each rank holds before the call, in rank order."""
        n = self.world_size
        if self.collective == "barrier":
            return [None] * n
        if self.collective == "scatter":
            pieces = [[10.0 * self.root + piece] for piece in range(n)]
            return [pieces if rank == self.root else None for rank in range(n)]
        if self.collective == "all_to_all":
            return [[[10.0 * rank + piece] for piece in range(n)] for rank in range(n)]
        if self.kind.reduces:
            # Small, and with the largest on rank 0 or on the last one, by turns.
            numbers = [
                [(n - rank if i % 2 else rank + 1) + float(i) for i in range(n)]
                for rank in range(n)
            ]
            if self.collective == "reduce_scatter":
                return [[[number] for number in row] for row in numbers]
            return numbers
        return [[10.0 * rank, 10.0 * rank + 1] for rank in range(n)]

    def after(self) -> list[_Held]:
        """What each rank holds in the variable of the result, in rank order.

        None where there is no result. After a `reduce` the other ranks hold what they
        held, but that is not promised.
        """
        n, old = self.world_size, self.before()
        only_root = [rank == self.root for rank in range(n)]
        match self.collective:
            case "barrier":
                return [None] * n
            case "broadcast":
                return [old[self.root]] * n
            case "scatter":
                return [old[self.root][rank] for rank in range(n)]
            case "gather":
                return [old if here else None for here in only_root]
            case "all_gather":
                return [old] * n
            case "reduce":
                total = self._reduced(old)
                return [total if r == self.root else old[r] for r in range(n)]
            case "all_reduce":
                return [self._reduced(old)] * n
            case "reduce_scatter":
                return [
                    self._reduced([list_[rank] for list_ in old]) for rank in range(n)
                ]
            case "all_to_all":
                return [[list_[rank] for list_ in old] for rank in range(n)]

    def _reduced(self, tensors: Sequence[Sequence[float]]) -> list[float]:
        """All tensors combined, element by element."""
        combine = {
            "SUM": sum,
            "PRODUCT": math.prod,
            "MIN": min,
            "MAX": max,
            "AVG": lambda values: sum(values) / len(values),
        }[self.op]
        return [combine(values) for values in zip(*tensors, strict=True)]

    def lines(self) -> list[str]:
        """The line of `torch.distributed` that does it, after the one for its room.

        Every rank runs the same lines. They use `torch`, `dist` and `rank`, and the
        variable that the rank holds: `tensor`, or the list `pieces`.
        """
        return [self._filled(line) for line in self.kind.lines]

    def says(self) -> str:
        """What happens, in words."""
        return self._filled(self.kind.result)

    def _filled(self, words: str) -> str:
        """The words with the settings in them."""
        one = self.after()[self.root]
        first = one[0] if one and isinstance(one[0], list) else one
        return words.format(
            n=self.world_size,
            root=self.root,
            op=self.op,
            what=OPERATIONS[self.op],
            size=len(first or ()),
        )


@draw.picture
def collective_call(
    collective: str = "broadcast",
    world_size: int = 4,
    op: str = "SUM",
    root: int = 0,
) -> Picture:
    """What ranks hold before and after a collective, the lines, and the messages.

    The arguments are those of `CollectiveCall`. With too few ranks for the `root` it is
    the last one, and the picture says so.

    Raises:
        ValueError: there is no such collective or operation, or too many ranks.
    """
    words.whole(root, "root", 0)
    last = world_size - 1
    call = CollectiveCall(collective, world_size, op, min(root, last))
    kind = call.kind
    picture = drawn(
        call.before(),
        call.after(),
        collective,
        op=op if kind.reduces else None,
        root=call.root if kind.rooted else None,
    )
    unused = [
        what
        for what, has in (("an op", kind.reduces), ("a root", kind.rooted))
        if not has
    ]
    lines = [words.sentence(call.says())]
    if root > last and kind.rooted:
        lines += [f"There is no rank {root} here: the root is the last one, {last}."]
    if unused:
        lines += [f"{collective} does not have {' or '.join(unused)}."]
    lines += ["On every rank:", *(f"    {line}" for line in call.lines())]
    for name, how in _MADE_OF.get(collective, {collective: ""}).items():
        cost = costs.collective_cost(name, world_size, nbytes=1)
        lines += [
            f"Made of send and recv{how}: {words.count(cost.messages, 'message')}, "
            f"{words.count(cost.steps, 'step')}."
        ]
    draw.below(picture, lines)
    picture.summary += " " + " ".join(line.strip() for line in lines)
    return picture
