"""The explorer of collectives: what ranks hold before and after one, and its cost."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

import traitlets

from course_utils.pictures.explorers.base import (
    Explorer,
    check_choice,
    check_whole,
    choice,
    in_columns,
    slider,
    table,
)
from course_utils.theory import costs

MOST_RANKS = 8

_OPERATIONS = {
    "SUM": "the sum",
    "PRODUCT": "the product",
    "MIN": "the smallest",
    "MAX": "the largest",
    "AVG": "the average",
}
# What one rank has: a tensor, a list of tensors, None for neither.
_Held = list[float] | list[list[float]] | None


class _Kind(NamedTuple):
    """A collective: what it takes, what it gives, and what it costs.

    Attributes:
        lines: The call, after the line that makes room for the result.
        result: What happens, in words.
        takes: The variable that is given, "" for none.
        gives: The variable with the result, "" for none.
        costs: Functions of `from_scratch/collectives.py` that do the same.
        factor: The bus-bandwidth factor as a formula, or "" where there is none.
        rooted: Whether one rank has a part of its own, `src` or `dst`.
        reduces: Whether it takes an `op`.
    """

    lines: tuple[str, ...]
    result: str
    takes: str = "tensor"
    gives: str = "tensor"
    costs: tuple[str, ...] = ()
    factor: str = ""
    rooted: bool = False
    reduces: bool = False


_ROOM = "[torch.empty({size}) for _ in range({n})]"
_KINDS = {
    "broadcast": _Kind(
        ("dist.broadcast(tensor, src={root})",),
        "every rank gets the tensor of rank {root}: {one}",
        costs=("broadcast", "broadcast_tree"),
        factor="1",
        rooted=True,
    ),
    "scatter": _Kind(
        (
            "tensor = torch.empty({size})",
            "dist.scatter(tensor, pieces if rank == {root} else None, src={root})",
        ),
        "rank r gets piece r of the list of rank {root}",
        takes="pieces",
        costs=("scatter",),
        rooted=True,
    ),
    "gather": _Kind(
        (
            f"pieces = {_ROOM} if rank == {{root}} else None",
            "dist.gather(tensor, pieces, dst={root})",
        ),
        "rank {root} gets the list of all tensors",
        gives="pieces",
        costs=("gather",),
        rooted=True,
    ),
    "reduce": _Kind(
        ("dist.reduce(tensor, dst={root}, op=dist.ReduceOp.{op})",),
        "rank {root} gets {what} of each element: {one}",
        costs=("reduce",),
        factor="1",
        rooted=True,
        reduces=True,
    ),
    "all_reduce": _Kind(
        ("dist.all_reduce(tensor, op=dist.ReduceOp.{op})",),
        "every rank gets {what} of each element: {one}",
        costs=("all_reduce_naive", "all_reduce"),
        factor="2(n−1)/n",
        reduces=True,
    ),
    "all_gather": _Kind(
        (f"pieces = {_ROOM}", "dist.all_gather(pieces, tensor)"),
        "every rank gets the list of all tensors",
        gives="pieces",
        costs=("all_gather",),
        factor="(n−1)/n",
    ),
    "reduce_scatter": _Kind(
        (
            "tensor = torch.empty({size})",
            "dist.reduce_scatter(tensor, pieces, op=dist.ReduceOp.{op})",
        ),
        "rank r gets {what} of the pieces r of all ranks",
        takes="pieces",
        costs=("reduce_scatter",),
        factor="(n−1)/n",
        reduces=True,
    ),
    "all_to_all": _Kind(
        (f"received = {_ROOM}", "dist.all_to_all(received, pieces)"),
        "rank r gets piece r of every rank",
        takes="pieces",
        gives="received",
        costs=("all_to_all",),
        factor="(n−1)/n",
    ),
    "barrier": _Kind(
        ("dist.barrier()",),
        "every rank waits until all have called it; no data",
        takes="",
        gives="",
        costs=("barrier",),
    ),
}


class CollectiveExplorer(Explorer):
    """Choose a collective: what each rank holds before and after it, and its cost.

    The last expression of a cell shows it. Its settings can also be set in Python. The
    values shown follow from the definition of the collective; nothing is sent.

        >>> explorer = CollectiveExplorer("reduce", world_size=3, op="MAX", root=2)
        >>> print(explorer.summary)
        reduce MAX on 3 ranks: rank 2 gets the largest of each element: [3, 4, 5].
        >>> explorer.lines()
        ['dist.reduce(tensor, dst=2, op=dist.ReduceOp.MAX)']

    Attributes:
        collective: Its name in `torch.distributed`.
        world_size: How many ranks there are, 1 to 8.
        op: What is computed where the collective reduces: SUM, PRODUCT, MIN, MAX, AVG.
        root: The rank that sends to all or receives from all, where there is one.
            With fewer ranks it becomes the last one.

    Raises:
        ValueError: there is no such collective, operation or rank, or a number is not
            whole or outside these limits.
    """

    _invitation = "change its settings"

    collective = traitlets.Enum([*_KINDS], "all_reduce").tag(sync=True)
    world_size = traitlets.Int(4).tag(sync=True)
    op = traitlets.Enum([*_OPERATIONS], "SUM").tag(sync=True)
    root = traitlets.Int(0).tag(sync=True)

    def __init__(
        self,
        collective: str = "all_reduce",
        world_size: int = 4,
        op: str = "SUM",
        root: int = 0,
    ) -> None:
        check_choice(collective, "collective", _KINDS)
        check_choice(op, "op", _OPERATIONS)
        check_whole(world_size, "world_size", 1, MOST_RANKS)
        because = f", because the world size is {world_size}"
        check_whole(root, "root", 0, world_size - 1, because)
        settings = {"collective": collective, "op": op, "root": root}
        super().__init__(world_size=world_size, **settings)
        self.set_trait("region", "Table of what the ranks hold, and of the cost")
        self._refresh()

    @traitlets.validate("world_size")
    def _within(self, proposal: dict) -> int:
        return min(max(proposal["value"], 1), MOST_RANKS)

    @traitlets.observe("collective", "world_size", "op", "root")
    def _refresh(self, _: object = None) -> None:
        last = self.world_size - 1
        if not 0 <= self.root <= last:
            self.root = min(max(self.root, 0), last)  # which calls this again
            return
        kind = _KINDS[self.collective]
        controls = [
            choice("collective", "Collective", _KINDS),
            slider("world_size", "World size", 1, MOST_RANKS),
            choice("op", "Operation (op)", _OPERATIONS, disabled=not kind.reduces),
            slider("root", "Root", 0, last, disabled=not kind.rooted),
        ]
        self.set_trait("controls", controls)
        self.set_trait("summary", self._in_one_line())
        self.set_trait("body", self._as_html())

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
        if _KINDS[self.collective].reduces:
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

        None where there is no result: on ranks to which nothing is promised.
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
                return [total if here else None for here in only_root]
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
        return [self._filled(line) for line in _KINDS[self.collective].lines]

    def cost(self) -> dict[str, costs.CollectiveCost]:
        """What it costs, from a function of `from_scratch/collectives.py` to that."""
        n = self.world_size
        found = {}
        for name in _KINDS[self.collective].costs:
            if name == "barrier":  # all-reduces one byte
                found[name] = costs.collective_cost("all_reduce_naive", n, 1)
            else:
                found[name] = costs.collective_cost(name, n, self.nbytes)
        return found

    @property
    def nbytes(self) -> int:
        """The size S in bytes: of the tensor, or of the whole list of pieces."""
        held = [*self.before(), *self.after()]
        numbers = [
            sum(map(len, value)) if isinstance(value[0], list) else len(value)
            for value in held
            if value
        ]
        return 4 * max(numbers, default=0)

    def text(self) -> str:
        """What is shown, as plain text."""
        rows = [("rank", *self._heads()), *self._rows()]
        lines = [self.summary, *self._promise(), "", *in_columns(rows)]
        lines += ["", "On every rank:", *(f"    {line}" for line in self.lines()), ""]
        lines += [self._cost_in_words(name, cost) for name, cost in self.cost().items()]
        return "\n".join([*lines, self._factor_in_words()])

    def _filled(self, words: str) -> str:
        """The words with the settings in them."""
        one = self.after()[self.root]
        first = one[0] if one and isinstance(one[0], list) else one
        size = len(first) if first else 0
        return words.format(
            n=self.world_size,
            root=self.root,
            op=self.op,
            what=_OPERATIONS[self.op],
            one=shown(one),
            size=size,
        )

    def _in_one_line(self) -> str:
        kind = _KINDS[self.collective]
        op = f" {self.op}" if kind.reduces else ""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{self.collective}{op} on {ranks}: {self._filled(kind.result)}."

    def _heads(self) -> tuple[str, str]:
        kind = _KINDS[self.collective]
        return (
            f"before: {kind.takes}" if kind.takes else "before",
            f"after: {kind.gives}" if kind.gives else "after",
        )

    def _rows(self) -> list[tuple[str, str, str]]:
        """(rank, before, after), each in words."""
        kind = _KINDS[self.collective]
        rows = []
        for rank, (old, new) in enumerate(
            zip(self.before(), self.after(), strict=True)
        ):
            root = " (root)" if kind.rooted and rank == self.root else ""
            result = shown(new)
            if new is None and self.collective == "reduce":
                result = "undefined"
            rows.append((f"rank {rank}{root}", shown(old), result))
        return rows

    def _promise(self) -> list[str]:
        if self.collective != "reduce" or self.world_size == 1:
            return []
        return ["PyTorch promises a result to the root alone."]

    def _cost_in_words(self, name: str, cost: costs.CollectiveCost) -> str:
        return (
            f"{name}: messages {cost.messages}, steps {cost.steps}, most bytes that a "
            f"rank sends {cost.most_sent:g}, receives {cost.most_received:g}"
        )

    def _factor_in_words(self) -> str:
        formula = _KINDS[self.collective].factor
        if not formula:
            return (
                "Bus bandwidth: the documentation of nccl-tests has no factor for it."
            )
        if formula == "1":
            return "Bus bandwidth = size / time."
        factor = costs.bus_bandwidth_factor(self.collective, self.world_size)
        return f"Bus bandwidth = {formula} · size / time = {factor:.4g} · size / time."

    def _as_html(self) -> str:
        rooted = _KINDS[self.collective].rooted
        rows = []
        for rank, (name, *cells) in enumerate(self._rows()):
            here = (
                ' class="course-explorer-here"' if rooted and rank == self.root else ""
            )
            body = "".join(f"<td{here}>{html.escape(cell)}</td>" for cell in cells)
            rows.append(f'<tr><th scope="row"{here}>{name}</th>{body}</tr>')
        lines = "".join(
            f"<li><code>{html.escape(line)}</code></li>" for line in self.lines()
        )
        numbers = "".join(
            f'<tr><th scope="row">{name}</th><td>{cost.messages}</td>'
            f"<td>{cost.steps}</td><td>{cost.most_sent:g}</td>"
            f"<td>{cost.most_received:g}</td></tr>"
            for name, cost in self.cost().items()
        )
        size = ""
        if self.nbytes:
            size = (
                f" The size is {self.nbytes} bytes (float32). Messages are those of "
                "all ranks together, bytes those of the busiest rank."
            )
        return (
            f"{table(('', *self._heads()), rows)}"
            f"{''.join(f'<p>{words}</p>' for words in self._promise())}"
            f'<p>On every rank:</p><ul class="course-explorer-lines">{lines}</ul>'
            f"<p>What it costs with send and recv.{size}</p>"
            f"{table(('', *_COST_HEADS), [numbers])}"
            f"<p>{html.escape(self._factor_in_words())}</p>"
        )

    def __repr__(self) -> str:
        return (
            f"CollectiveExplorer(collective={self.collective!r}, "
            f"world_size={self.world_size}, op={self.op!r}, root={self.root})"
        )


_COST_HEADS = ("messages", "steps", "most sent (bytes)", "most received (bytes)")


def shown(held: _Held) -> str:
    """A tensor, or a list of them, as Python prints it; whole numbers without .0."""
    if held is None:
        return "nothing"
    texts = [shown(part) if isinstance(part, list) else f"{part:.10g}" for part in held]
    return f"[{', '.join(texts)}]"
