"""The explorer of ranks: nodes × GPUs, and which rank is where."""

import html

import traitlets

from course_utils.pictures.explorers.base import Explorer, check_whole, slider
from course_utils.theory import costs

_MOST = 8
_PORT = 29500  # torchrun's own default


class RankExplorer(Explorer):
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
            check_whole(value, what, 1, _MOST)
        n = nodes * gpus_per_node
        check_whole(rank, "rank", 0, n - 1, f", because the world size is {n}")
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
            slider("nodes", "Nodes", 1, _MOST),
            slider("gpus_per_node", "GPUs on each node", 1, _MOST),
            slider("rank", "Rank to point out", 0, last),
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
