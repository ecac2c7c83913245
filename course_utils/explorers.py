"""Small things to play with in a notebook: move a slider, and see what follows.

    >>> from course_utils import explorers
    >>> explorer = explorers.RankExplorer(nodes=2, gpus_per_node=4, rank=5)
    >>> print(explorer.summary)
    2 nodes with 4 GPUs each: world size 8. Rank 5 is local rank 1 on node 1.

An explorer is a widget (an `ipywidgets` one, made with anywidget). Its sliders and
lists are the browser's own: Tab reaches them, arrow keys move them. Everything shown is
computed in Python. A notebook that was saved keeps the first state as text.
"""

import functools
import html
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anywidget
import traitlets

from course_utils import costs, simulator
from course_utils.snapshots import History, Moment

__all__ = ["CollectiveExplorer", "RankExplorer", "RingStepper", "WhatIfExplorer"]

_HERE = Path(__file__)
_WIDGET = "application/vnd.jupyter.widget-view+json"
_MOST = 8
_PORT = 29500  # torchrun's own default

# Two outputs, as a quiz has them: the text, which the notebook keeps, and the widget,
# which lives as long as the kernel. The text hides while the widget is there; where it
# is not, JupyterLab's "Error displaying widget" hides.
_STYLE = """
<style>
.jp-OutputArea-child:has(.course-explorer-text):has(
  + .jp-OutputArea-child .course-explorer),
.jp-OutputArea-child:has(.course-explorer-text)
  + .jp-OutputArea-child:has(> .jupyter-widgets):not(:has(.course-explorer))
{ display: none; }
</style>"""


class _Explorer(anywidget.AnyWidget):
    """What every explorer has.

    Attributes:
        controls: What can be set, in order: for each the `name` of its trait, its
            `label`, and a slider's `min` and `max` or a list's `options`; `disabled`
            where it means nothing at the moment.
        region: What `body` is, for a screen reader.
        summary: What is shown, in one line, for a screen reader.
        body: What is shown, as HTML.
    """

    _esm = _HERE.with_suffix(".js")
    _css = _HERE.with_suffix(".css")

    controls = traitlets.List(read_only=True).tag(sync=True)
    region = traitlets.Unicode(read_only=True).tag(sync=True)
    summary = traitlets.Unicode(read_only=True).tag(sync=True)
    body = traitlets.Unicode(read_only=True).tag(sync=True)

    _invitation = "move its sliders"

    def text(self) -> str:
        """What is shown, as plain text."""
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        from IPython.display import display

        saved = (
            f'<details open class="course-explorer-text"><summary>'
            f"{html.escape(self.summary)}</summary>{self.body}"
            f"<p>Run this cell in JupyterLab to {self._invitation}.</p></details>"
        )
        display({"text/plain": self.text(), "text/html": saved + _STYLE}, raw=True)
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        display({_WIDGET: view, "text/html": ""}, raw=True)


def _slider(name: str, label: str, low: int, high: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "label": label, "min": low, "max": high, **more}


class RankExplorer(_Explorer):
    """Nodes × GPUs: which rank drives which GPU, and how torchrun starts them.

    The last expression of a cell shows it. Its three numbers can also be set in Python.

    Attributes:
        nodes: How many nodes the job has, 1 to 8.
        gpus_per_node: How many GPUs, and so processes, each has, 1 to 8.
        rank: The rank to point out. With fewer ranks it becomes the last one.

    Raises:
        ValueError: a number is not whole, or outside these limits.
    """

    nodes = traitlets.Int(2).tag(sync=True)
    gpus_per_node = traitlets.Int(4).tag(sync=True)
    rank = traitlets.Int(0).tag(sync=True)

    def __init__(self, nodes: int = 2, gpus_per_node: int = 4, rank: int = 0) -> None:
        for value, what in ((nodes, "nodes"), (gpus_per_node, "gpus_per_node")):
            if type(value) is not int or not 1 <= value <= _MOST:
                raise ValueError(
                    f"{what} is {value!r}: expected a whole number from 1 to {_MOST}."
                )
        if type(rank) is not int or not 0 <= rank < nodes * gpus_per_node:
            raise ValueError(
                f"rank is {rank!r}: expected a whole number from 0 to "
                f"{nodes * gpus_per_node - 1}, because the world size is "
                f"{nodes * gpus_per_node}."
            )
        super().__init__(nodes=nodes, gpus_per_node=gpus_per_node, rank=rank)
        self.set_trait("region", "Table of ranks and commands")
        self._refresh()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.gpus_per_node

    @traitlets.validate("nodes", "gpus_per_node")
    def _within(self, proposal: dict) -> int:
        return min(max(proposal["value"], 1), _MOST)

    @traitlets.observe("nodes", "gpus_per_node", "rank")
    def _refresh(self, _: object = None) -> None:
        last = self.world_size - 1
        if not 0 <= self.rank <= last:
            self.rank = min(max(self.rank, 0), last)  # which calls this again
            return
        sliders = [
            _slider("nodes", "Nodes", 1, _MOST),
            _slider("gpus_per_node", "GPUs on each node", 1, _MOST),
            _slider("rank", "Rank to point out", 0, last),
        ]
        self.set_trait("controls", sliders)
        self.set_trait("summary", self._in_one_line())
        self.set_trait("body", self._as_html())

    def commands(self) -> list[str]:
        """The line to type on each node, node 0 first."""
        if self.nodes == 1:
            return [f"torchrun --nproc-per-node {self.gpus_per_node} train.py"]
        return [
            f"torchrun --nnodes {self.nodes} --nproc-per-node {self.gpus_per_node} "
            f"--node-rank {node} --master-addr node0 --master-port {_PORT} train.py"
            for node in range(self.nodes)
        ]

    def environment(self) -> dict[str, int]:
        """What torchrun tells the process of `rank`, in its environment."""
        node, local_rank = costs.node_and_local_rank(self.rank, self.gpus_per_node)
        return {
            "RANK": self.rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.gpus_per_node,
            "GROUP_RANK": node,
        }

    def text(self) -> str:
        """What is shown, as plain text."""
        lines = [self.summary, ""]
        width = len(str(self.world_size - 1))
        for node in range(self.nodes):
            ranks = (
                costs.rank_of(node, local, self.gpus_per_node)
                for local in range(self.gpus_per_node)
            )
            cells = (
                f"[{r:{width}}]" if r == self.rank else f" {r:{width}} " for r in ranks
            )
            lines.append(f"node {node}: ranks {' '.join(cells)}".rstrip())
        told = " ".join(f"{name}={value}" for name, value in self.environment().items())
        lines += ["", f"Rank {self.rank} gets: {told}", ""]
        for node, command in enumerate(self.commands()):
            lines += [f"On node {node}:", f"    {command}"]
        return "\n".join(lines)

    def _in_one_line(self) -> str:
        node, local_rank = costs.node_and_local_rank(self.rank, self.gpus_per_node)
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        gpus = "1 GPU" if self.gpus_per_node == 1 else f"{self.gpus_per_node} GPUs"
        each = "" if self.nodes == 1 else " each"
        return (
            f"{nodes} with {gpus}{each}: world size {self.world_size}. "
            f"Rank {self.rank} is local rank {local_rank} on node {node}."
        )

    def _as_html(self) -> str:
        heads = "".join(
            f'<th scope="col">local rank {local}</th>'
            for local in range(self.gpus_per_node)
        )
        rows = []
        for node in range(self.nodes):
            cells = []
            for local in range(self.gpus_per_node):
                rank = costs.rank_of(node, local, self.gpus_per_node)
                cells.append(
                    f'<td class="course-explorer-here"><strong>▶ rank {rank}</strong>'
                    "</td>"
                    if rank == self.rank
                    else f"<td>rank {rank}</td>"
                )
            rows.append(f'<tr><th scope="row">node {node}</th>{"".join(cells)}</tr>')
        told = "".join(
            f"<li><code>{name}={value}</code></li>"
            for name, value in self.environment().items()
        )
        here = self.environment()["GROUP_RANK"]
        lines = "".join(
            f"<li>On node {node}{' (▶ here)' if node == here else ''}: "
            f"<code>{html.escape(command)}</code></li>"
            for node, command in enumerate(self.commands())
        )
        return (
            f"<table><thead><tr><td></td>{heads}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table>"
            f"<p>torchrun tells rank {self.rank}, in environment variables:</p>"
            f'<ul class="course-explorer-told">{told}</ul>'
            f"<p>Type on each node:</p><ul>{lines}</ul>"
        )

    def __repr__(self) -> str:
        return (
            f"RankExplorer(nodes={self.nodes}, gpus_per_node={self.gpus_per_node}, "
            f"rank={self.rank})"
        )


# --- collectives ------------------------------------------------------------------

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


class CollectiveExplorer(_Explorer):
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
        for value, what, known in (
            (collective, "collective", _KINDS),
            (op, "op", _OPERATIONS),
        ):
            if value not in known:
                raise ValueError(
                    f"{what} is {value!r}: expected one of {', '.join(known)}."
                )
        if type(world_size) is not int or not 1 <= world_size <= _MOST:
            raise ValueError(
                f"world_size is {world_size!r}: expected a whole number from 1 to "
                f"{_MOST}."
            )
        if type(root) is not int or not 0 <= root < world_size:
            raise ValueError(
                f"root is {root!r}: expected a whole number from 0 to "
                f"{world_size - 1}, because the world size is {world_size}."
            )
        settings = {"collective": collective, "op": op, "root": root}
        super().__init__(world_size=world_size, **settings)
        self.set_trait("region", "Table of what the ranks hold, and of the cost")
        self._refresh()

    @traitlets.validate("world_size")
    def _within(self, proposal: dict) -> int:
        return min(max(proposal["value"], 1), _MOST)

    @traitlets.observe("collective", "world_size", "op", "root")
    def _refresh(self, _: object = None) -> None:
        last = self.world_size - 1
        if not 0 <= self.root <= last:
            self.root = min(max(self.root, 0), last)  # which calls this again
            return
        kind = _KINDS[self.collective]
        controls = [
            {"name": "collective", "label": "Collective", "options": [*_KINDS]},
            _slider("world_size", "World size", 1, _MOST),
            {
                "name": "op",
                "label": "Operation (op)",
                "options": [*_OPERATIONS],
                "disabled": not kind.reduces,
            },
            _slider("root", "Root", 0, last, disabled=not kind.rooted),
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
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.summary, *self._promise(), ""]
        for row in rows:
            cells = zip(row, widths, strict=True)
            lines.append("  ".join(f"{cell:{width}}" for cell, width in cells).rstrip())
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
            one=_shown(one),
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
            result = _shown(new)
            if new is None and self.collective == "reduce":
                result = "undefined"
            rows.append((f"rank {rank}{root}", _shown(old), result))
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
            f"{_table(('', *self._heads()), rows)}"
            f"{''.join(f'<p>{words}</p>' for words in self._promise())}"
            f'<p>On every rank:</p><ul class="course-explorer-lines">{lines}</ul>'
            f"<p>What it costs with send and recv.{size}</p>"
            f"{_table(('', *_COST_HEADS), [numbers])}"
            f"<p>{html.escape(self._factor_in_words())}</p>"
        )

    def __repr__(self) -> str:
        return (
            f"CollectiveExplorer(collective={self.collective!r}, "
            f"world_size={self.world_size}, op={self.op!r}, root={self.root})"
        )


_COST_HEADS = ("messages", "steps", "most sent (bytes)", "most received (bytes)")


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    first, *others = heads
    cells = "".join(f'<th scope="col">{head}</th>' for head in others)
    return (
        f"<table><thead><tr><td>{first}</td>{cells}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _shown(held: _Held) -> str:
    """A tensor, or a list of them, as Python prints it; whole numbers without .0."""
    if held is None:
        return "nothing"
    texts = [
        _shown(part) if isinstance(part, list) else f"{part:.10g}" for part in held
    ]
    return f"[{', '.join(texts)}]"


# --- a ring, step by step ---------------------------------------------------------

_MOST_ELEMENTS = 32
_MARKS = (
    "↑ goes out in this step, ↓ came in with the step before, ✓ complete: the sum over "
    "all ranks."
)


class RingStepper(_Explorer):
    """Go through a ring all-reduce that real ranks have run, one step after the other.

    The last expression of a cell shows it: a slider, a button that plays the steps, and
    a table of what every rank held at the start of the step. Each number in it was in
    a rank's tensor. `step` can also be set in Python.

        >>> recorded = [  # of two ranks; this is what `snapshots` gives
        ...     [([1.0, 5.0], 0, 1, 1), ([1.0, 11.0], 1, 2, 1), ([3.0, 11.0],)],
        ...     [([2.0, 6.0], 1, 2, 0), ([3.0, 6.0], 0, 1, 0), ([3.0, 11.0],)],
        ... ]
        >>> stepper = RingStepper(recorded)
        >>> print(stepper.summary)
        Step 0 (of 0 to 1), reduce-scatter: rank 0 sends chunk 0 to rank 1, \
rank 1 chunk 1 to rank 0. Complete: 0 of 4 chunks.

    Args:
        recorded: For each rank, in rank order, what `snapshots.snapshots` noted there.
            At most 8 ranks and 32 elements.

    Attributes:
        step: Which step is shown, 0 up to `steps`, the end.

    Raises:
        ValueError: there are too many ranks or elements, or they do not fit together.
    """

    _invitation = "go through its steps"

    step = traitlets.Int(0).tag(sync=True)

    def __init__(self, recorded: Sequence[Sequence[Moment]]) -> None:
        self._history = History(recorded)
        elements = self._history.chunks[-1][1]
        if self._history.world_size > _MOST or elements > _MOST_ELEMENTS:
            raise ValueError(
                f"recorded is of {self._history.world_size} ranks with {elements} "
                f"elements: expected at most {_MOST} ranks and {_MOST_ELEMENTS} "
                "elements."
            )
        super().__init__()
        slider = _slider("step", "Step", 0, self.steps, play=True)
        self.set_trait("controls", [slider])
        ranks = _count(self._history.world_size, "rank")
        self.set_trait("region", f"Table of the chunks on {ranks}")
        self._refresh()

    @property
    def steps(self) -> int:
        """How many steps the ranks made; 2(n-1) in a ring all-reduce on n ranks."""
        return self._history.steps

    @traitlets.validate("step")
    def _within(self, proposal: dict) -> int:
        return min(max(proposal["value"], 0), self.steps)

    @traitlets.observe("step")
    def _refresh(self, _: object = None) -> None:
        self.set_trait("summary", self._in_one_line())
        self.set_trait("body", self._as_html())

    def text(self) -> str:
        """What is shown, as plain text."""
        rows = [("", *self._heads())]
        for rank in range(self._history.world_size):
            cells = []
            for chunk in range(len(self._history.chunks)):
                values, _, arrived, leaves = self._cell(rank, chunk)
                complete = self._history.is_complete(self.step, rank, chunk)
                marks = (complete, "✓"), (arrived, "↓"), (leaves, "↑")
                signs = (sign for true, sign in marks if true)
                cells.append(" ".join([values, *signs]))
            rows.append((f"rank {rank}", *cells))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.summary, ""]
        for row in rows:
            cells = zip(row, widths, strict=True)
            lines.append("  ".join(f"{cell:{width}}" for cell, width in cells).rstrip())
        return "\n".join([*lines, "", _MARKS, self._sent_so_far()])

    def _in_one_line(self) -> str:
        history, step = self._history, self.step
        cells = [
            history.is_complete(step, rank, chunk)
            for rank in range(history.world_size)
            for chunk in range(len(history.chunks))
        ]
        complete = f"Complete: {sum(cells)} of {_count(len(cells), 'chunk')}."
        if step == self.steps:
            return f"End, after {_count(step, 'step')}. {complete}"
        sent = ", ".join(
            f"rank {rank} {'' if rank else 'sends '}"
            f"{self._named(one[step].first, one[step].stop)} to rank {one[step].to}"
            for rank, one in enumerate(history.moments)
        )
        last = self.steps - 1
        which = f"Step {step} (of 0 to {last})" if last else f"Step {step}"
        return f"{which}{self._half()}: {sent}. {complete}"

    def _half(self) -> str:
        """Which half of an all-reduce this step belongs to, if it is clear."""
        done = {
            taken.how
            for taken in self._history.taken[self.step]
            if taken.first < taken.stop
        }
        halves = {"added": ", reduce-scatter", "copied": ", all-gather"}
        return halves.get(done.pop(), "") if len(done) == 1 else ""

    def _named(self, first: int, stop: int) -> str:
        """The chunks of these elements, in words."""
        numbers = [
            str(number)
            for number, (start, end) in enumerate(self._history.chunks)
            if first <= start and end <= stop
        ]
        if not numbers:
            return "an empty chunk"
        *most, last = numbers
        return f"chunks {', '.join(most)} and {last}" if most else f"chunk {last}"

    def _heads(self) -> list[str]:
        return [
            f"chunk {number} x[{first}:{stop}]"
            for number, (first, stop) in enumerate(self._history.chunks)
        ]

    def _cell(self, rank: int, chunk: int) -> tuple[str, str, str, str]:
        """The numbers, whose sum they are, what came in before, what goes out now."""
        history, step = self._history, self.step
        first, stop = history.chunks[chunk]
        values = _shown(history.values(step, rank, chunk))
        arrived = leaves = ""
        if step:
            taken = history.taken[step - 1][rank]
            if taken.first <= first and stop <= taken.stop:
                arrived = taken.how or "received"
        if step < self.steps:
            moment = history.moments[rank][step]
            if moment.first <= first and stop <= moment.stop:
                leaves = "sends"
        return values, self._whose(rank, chunk), arrived, leaves

    def _whose(self, rank: int, chunk: int) -> str:
        """Of which ranks the chunk is the sum, in words."""
        shares = self._history.shares(self.step, rank, chunk)
        if shares is None:
            return "no sum of what was sent"
        if self._history.is_complete(self.step, rank, chunk):
            return "✓ all ranks"
        said = []
        for share, run in itertools.groupby(range(len(shares)), shares.__getitem__):
            first, *more = run
            ranks = (
                f"{first}–{more[-1]}"
                if len(more) > 1
                else ", ".join(map(str, [first, *more]))
            )
            if share:
                said.append(ranks if share == 1 else f"{ranks} ({share} times)")
        return f"rank{'s' if sum(map(bool, shares)) > 1 else ''} {', '.join(said)}"

    def _sent_so_far(self) -> str:
        elements = self._history.chunks[-1][1]
        sent = [
            sum(moment.stop - moment.first for moment in one[: self.step])
            for one in self._history.moments
        ]
        few, many = min(sent), max(sent)
        numbers = str(many) if few == many else f"{few} to {many}"
        return (
            f"Sent so far by each rank: {_count(self.step, 'message')}; elements in "
            f"them: {numbers}. Its tensor has {elements}."
        )

    def _as_html(self) -> str:
        rows = []
        for rank in range(self._history.world_size):
            cells = []
            for chunk in range(len(self._history.chunks)):
                values, whose, arrived, leaves = self._cell(rank, chunk)
                kinds = ["course-explorer-chunk"]
                if self._history.is_complete(self.step, rank, chunk):
                    kinds.append("course-explorer-complete")
                if leaves:
                    kinds.append("course-explorer-leaves")
                if arrived:
                    kinds.append("course-explorer-arrived")
                marks = [f"<span>{whose}</span>"]
                if arrived:
                    marks.append(f"<span>↓ {arrived}</span>")
                if leaves:
                    marks.append(f"<span>↑ {leaves}</span>")
                cells.append(
                    f'<td class="{" ".join(kinds)}"><strong>{values}</strong>'
                    f"{''.join(marks)}</td>"
                )
            rows.append(f'<tr><th scope="row">rank {rank}</th>{"".join(cells)}</tr>')
        heads = (head.replace(" x", "<br>x") for head in self._heads())
        return (
            f"{_table(('', *heads), rows)}<p>{_MARKS}</p><p>{self._sent_so_far()}</p>"
        )

    def __repr__(self) -> str:
        ranks = _count(self._history.world_size, "rank")
        return f"RingStepper({ranks}, step {self.step} of {self.steps})"


def _count(number: int, noun: str) -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


# --- what if there were more GPUs -------------------------------------------------

# Where the sliders stop; in Python each number in between can be set, too.
_WHAT_IF: dict[str, tuple[float, ...]] = {
    "nodes": (*(2**k for k in range(11)), 1250),
    "samples": tuple(2**k for k in range(17)),
    "bucket_mib": (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 10_000),
    "straggler": (1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0),
}
_SLOWEST = _WHAT_IF["straggler"][-1]
_MOST_NAIVE = 128  # GPUs: more take too long to simulate between two moves of a slider


class WhatIfExplorer(_Explorer):
    """Train on another cluster: how long a step takes there, and on what.

    The last expression of a cell shows it. Its settings can also be set in Python.
    Everything shown is simulated, by `simulator.ddp_step`.

        >>> explorer = WhatIfExplorer("H100, InfiniBand", "GPT-2 XL", nodes=2)
        >>> print(explorer.summary)
        Simulated, GPT-2 XL on 16 GPUs (2 nodes; H100, InfiniBand): 79.4 ms a step, \
scaling efficiency 97.3 %.

    Attributes:
        cluster: One of `simulator.CLUSTERS`.
        model: One of `simulator.MODELS`.
        nodes: How many nodes, 1 to 1250.
        samples: In the batch of each GPU: tokens of a GPT-2, images of a ResNet-50.
        bucket_mib: The cap of DDP's buckets, in MiB.
        overlap: Whether all-reduces go on during the backward pass.
        algorithm: Of the all-reduce; one of `simulator.ALGORITHMS`.
        straggler: How many times slower than the others one GPU computes.
        result: The simulated step; None where there is none, and `summary` says why.

    Raises:
        ValueError: a setting does not exist or is out of range.
    """

    _invitation = "change its settings"

    cluster = traitlets.Enum([*simulator.CLUSTERS], "H100, InfiniBand").tag(sync=True)
    model = traitlets.Enum([*simulator.MODELS], "GPT-2 XL").tag(sync=True)
    nodes = traitlets.Int(1).tag(sync=True)
    samples = traitlets.Int(4096).tag(sync=True)
    bucket_mib = traitlets.Int(25).tag(sync=True)
    overlap = traitlets.Bool(True).tag(sync=True)
    algorithm = traitlets.Enum([*simulator.ALGORITHMS], "ring").tag(sync=True)
    straggler = traitlets.Float(1.0).tag(sync=True)

    def __init__(
        self,
        cluster: str = "H100, InfiniBand",
        model: str = "GPT-2 XL",
        nodes: int = 1,
        samples: int = 4096,
        bucket_mib: int = 25,
        overlap: bool = True,
        algorithm: str = "ring",
        straggler: float = 1.0,
    ) -> None:
        for value, what, known in (
            (cluster, "cluster", simulator.CLUSTERS),
            (model, "model", simulator.MODELS),
            (algorithm, "algorithm", simulator.ALGORITHMS),
        ):
            if value not in known:
                raise ValueError(
                    f"{what} is {value!r}: expected one of {'; '.join(known)}."
                )
        for value, what in (
            (nodes, "nodes"),
            (samples, "samples"),
            (bucket_mib, "bucket_mib"),
        ):
            most = _WHAT_IF[what][-1]
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(
                    f"{what} is {value!r}: expected a whole number from 1 to {most:,}."
                )
        if type(straggler) not in (int, float) or not 1 <= straggler <= _SLOWEST:
            raise ValueError(
                f"straggler is {straggler!r}: expected a number from 1 to {_SLOWEST}."
            )
        if type(overlap) is not bool:
            raise ValueError(f"overlap is {overlap!r}: expected True or False.")
        super().__init__(
            cluster=cluster,
            model=model,
            nodes=nodes,
            samples=samples,
            bucket_mib=bucket_mib,
            overlap=overlap,
            algorithm=algorithm,
            straggler=float(straggler),
        )
        self.set_trait("region", "Tables of the simulated step")
        self._refresh()

    @traitlets.validate("nodes", "samples", "bucket_mib", "straggler")
    def _within(self, proposal: dict) -> float:
        most = _WHAT_IF[proposal["trait"].name][-1]
        return min(max(proposal["value"], 1), most)

    @traitlets.observe(
        *("cluster", "model", "nodes", "samples", "bucket_mib", "overlap"),
        *("algorithm", "straggler"),
    )
    def _refresh(self, _: object = None) -> None:
        sample = simulator.MODELS[self.model].sample
        controls = [
            {"name": "cluster", "label": "Cluster", "options": [*simulator.CLUSTERS]},
            {"name": "model", "label": "Model", "options": [*simulator.MODELS]},
            _stops("nodes", "Nodes"),
            _stops("samples", f"{sample.capitalize()}s for each GPU"),
            _stops("bucket_mib", "Bucket cap (MiB)"),
            {"name": "overlap", "label": "Overlap", "check": True},
            {
                "name": "algorithm",
                "label": "All-reduce",
                "options": [*simulator.ALGORITHMS],
            },
            _stops("straggler", "Slowdown of one GPU"),
        ]
        self.set_trait("controls", controls)
        self.set_trait("summary", self._in_one_line())
        self.set_trait("body", self._as_html())

    @property
    def result(self) -> simulator.Step | None:
        """The simulated step; None where the settings do not allow one."""
        return self._simulated()[0]

    def _simulated(self) -> tuple[simulator.Step | None, str]:
        """The step, or None and why there is none."""
        return _simulate(
            self.cluster,
            self.model,
            self.nodes,
            self.samples,
            self.bucket_mib,
            self.overlap,
            self.algorithm,
            self.straggler,
        )

    @property
    def _pod(self) -> simulator.Cluster:
        return simulator.CLUSTERS[self.cluster].with_nodes(self.nodes)

    def text(self) -> str:
        """What is shown, as plain text."""
        lines = [self.summary, ""]
        for row in (*self._times(), *self._numbers()):
            lines.append(f"{row[0]}: {', '.join(row[1:])}")
        return "\n".join([*lines, "", *self._sources()])

    def _in_one_line(self) -> str:
        result, problem = self._simulated()
        where = (
            f"{self.model} on {_count(self._pod.gpus, 'GPU')} "
            f"({_count(self.nodes, 'node')}; {self.cluster})"
        )
        if result is None:
            return f"{where}: not simulated. {problem}"
        return (
            f"Simulated, {where}: {_duration(result.seconds)} a step, scaling "
            f"efficiency {100 * result.efficiency:.3g} %."
        )

    def _times(self) -> list[tuple[str, str, str]]:
        """(what, time, share of the step), in words."""
        result = self.result
        if result is None:
            return []
        return [
            (name, _duration(seconds), f"{100 * seconds / result.seconds:.3g} %")
            for name, seconds in (
                ("computing", result.compute),
                ("waiting for the slowest GPU", result.waiting),
                ("exposed communication", result.exposed),
                ("the whole step", result.seconds),
            )
        ]

    def _numbers(self) -> list[tuple[str, str]]:
        """(what, how much), in words."""
        result, model = self.result, simulator.MODELS[self.model]
        if result is None:
            return []
        batch = self._pod.gpus * self.samples
        sizes = [bucket.nbytes / costs.MiB for bucket in result.buckets]
        return [
            ("batch of all GPUs", _count(batch, model.sample)),
            ("speed", f"{_digits(batch / result.seconds)} {model.sample}s a second"),
            (
                "gradients, 4 bytes each",
                f"{_digits(sum(sizes))} MiB in {_count(len(sizes), 'bucket')}",
            ),
            ("largest bucket", f"{_digits(max(sizes))} MiB"),
            (
                "all communication, hidden or not",
                _duration(result.communication),
            ),
        ]

    def _sources(self) -> list[str]:
        pod, model = self._pod, simulator.MODELS[self.model]
        return [
            "All of this is simulated: messages with latency and bandwidth, and GPUs "
            "that compute at half of their peak. Real clusters are slower.",
            f"Cluster: {pod.source}.",
            f"Model: {_millions(model.parameters)} parameters; {model.source}.",
        ]

    def _as_html(self) -> str:
        sources = "".join(f"<p>{html.escape(words)}</p>" for words in self._sources())
        if self.result is None:
            return sources
        rows, parts = [], []
        for (name, seconds, share), kind in zip(
            self._times(), (*_PARTS, ""), strict=True
        ):
            sample = f'<i class="course-explorer-{kind}"></i> ' if kind else ""
            rows.append(
                f'<tr><th scope="row">{sample}{name}</th><td>{seconds}</td>'
                f"<td>{share}</td></tr>"
            )
        for kind in _PARTS:
            share = getattr(self.result, kind) / self.result.seconds
            if share:
                parts.append(
                    f'<i class="course-explorer-{kind}" '
                    f'style="width: {100 * share:.4g}%"></i>'
                )
        numbers = [
            f'<tr><th scope="row">{name}</th><td>{value}</td></tr>'
            for name, value in self._numbers()
        ]
        return (
            '<div class="course-explorer-bar" aria-hidden="true">'
            f"{''.join(parts)}</div>"
            f"{_table(('', 'simulated time', 'share of the step'), rows)}"
            f"<p>In numbers:</p>{_table(('', 'simulated'), numbers)}{sources}"
        )

    def __repr__(self) -> str:
        return (
            f"WhatIfExplorer({self.cluster!r}, {self.model!r}, nodes={self.nodes}, "
            f"samples={self.samples}, bucket_mib={self.bucket_mib}, "
            f"overlap={self.overlap}, algorithm={self.algorithm!r}, "
            f"straggler={self.straggler:g})"
        )


_PARTS = ("compute", "waiting", "exposed")  # of a step; fields of `simulator.Step`


def _stops(name: str, label: str) -> dict[str, Any]:
    return {"name": name, "label": label, "values": [*_WHAT_IF[name]]}


@functools.lru_cache(maxsize=256)
def _simulate(
    cluster: str,
    model: str,
    nodes: int,
    samples: int,
    bucket_mib: int,
    overlap: bool,
    algorithm: str,
    straggler: float,
) -> tuple[simulator.Step | None, str]:
    """The step with these settings; or None, and why it cannot be simulated."""
    pod = simulator.CLUSTERS[cluster].with_nodes(nodes)
    if algorithm == "naive" and pod.gpus > _MOST_NAIVE:
        return None, (
            f"On {pod.gpus:,} GPUs, rank 0 would receive and send {pod.gpus - 1:,} "
            f"messages for each bucket, one after the other: this takes too long, also "
            f"to simulate. Take at most {_MOST_NAIVE} GPUs."
        )
    try:
        step = simulator.ddp_step(
            pod,
            simulator.MODELS[model],
            samples,
            algorithm=algorithm,
            overlap=overlap,
            bucket_bytes=bucket_mib * costs.MiB,
            slow_gpus={0: straggler} if straggler > 1 else None,
        )
    except ValueError as error:  # not every algorithm runs on every number of GPUs
        return None, str(error)
    return step, ""


def _duration(seconds: float) -> str:
    """A time with three digits: 31.1 ms, 1.12 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if not seconds or seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def _digits(value: float) -> str:
    """Three or four digits, without an exponent: 0.125, 31.1, 112,200,000."""
    return f"{float(f'{value:.4g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _millions(number: int) -> str:
    return f"{number / 1e6:,.4g} million"
