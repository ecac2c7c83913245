"""The explorer of clusters: how long a training step takes there, and on what."""

import functools
import html

import traitlets

from course_utils.pictures.explorers.base import (
    Explorer,
    check_choice,
    check_whole,
    choice,
    counted,
    digits,
    duration,
    millions,
    stops,
    table,
)
from course_utils.theory import costs, simulator

# Where the sliders stop; in Python each number in between can be set, too.
_WHAT_IF: dict[str, tuple[float, ...]] = {
    "nodes": (*(2**k for k in range(11)), 1250),
    "samples": tuple(2**k for k in range(17)),
    "bucket_mib": (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 10_000),
    "straggler": (1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0),
}
_SETTINGS = (
    *("cluster", "model", "nodes", "samples", "bucket_mib", "overlap"),
    *("algorithm", "straggler"),
)
_SLOWEST = _WHAT_IF["straggler"][-1]
_MOST_NAIVE = 128  # GPUs: more take too long to simulate between two moves of a slider


class WhatIfExplorer(Explorer):
    """Train on another cluster: how long a step takes there, and on what.

    The last expression of a cell shows it. Its settings can also be set in Python.
    Everything shown is simulated, by `simulator.ddp_step`.

        >>> explorer = WhatIfExplorer("H100, InfiniBand", "GPT-2 XL", nodes=2)
        >>> print(explorer.summary)
        Simulated, GPT-2 XL on 16 GPUs (2 nodes; H100, InfiniBand): 79.1 ms a step, \
scaling efficiency 97.7 %.

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
        check_choice(cluster, "cluster", simulator.CLUSTERS)
        check_choice(model, "model", simulator.MODELS)
        check_choice(algorithm, "algorithm", simulator.ALGORITHMS)
        check_whole(nodes, "nodes", 1, _WHAT_IF["nodes"][-1])
        check_whole(samples, "samples", 1, _WHAT_IF["samples"][-1])
        check_whole(bucket_mib, "bucket_mib", 1, _WHAT_IF["bucket_mib"][-1])
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

    @traitlets.observe(*_SETTINGS)
    def _refresh(self, _: object = None) -> None:
        sample = simulator.MODELS[self.model].sample
        controls = [
            choice("cluster", "Cluster", simulator.CLUSTERS),
            choice("model", "Model", simulator.MODELS),
            stops("nodes", "Nodes", _WHAT_IF["nodes"]),
            stops(
                "samples", f"{sample.capitalize()}s for each GPU", _WHAT_IF["samples"]
            ),
            stops("bucket_mib", "Bucket cap (MiB)", _WHAT_IF["bucket_mib"]),
            {"name": "overlap", "label": "Overlap", "check": True},
            choice("algorithm", "All-reduce", simulator.ALGORITHMS),
            stops("straggler", "Slowdown of one GPU", _WHAT_IF["straggler"]),
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
        return _simulate(*(getattr(self, name) for name in _SETTINGS))

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
            f"{self.model} on {counted(self._pod.gpus, 'GPU')} "
            f"({counted(self.nodes, 'node')}; {self.cluster})"
        )
        if result is None:
            return f"{where}: not simulated. {problem}"
        return (
            f"Simulated, {where}: {duration(result.seconds)} a step, scaling "
            f"efficiency {100 * result.efficiency:.3g} %."
        )

    def _times(self) -> list[tuple[str, str, str]]:
        """(what, time, share of the step), in words."""
        result = self.result
        if result is None:
            return []
        return [
            (name, duration(seconds), f"{100 * seconds / result.seconds:.3g} %")
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
            ("batch of all GPUs", counted(batch, model.sample)),
            ("speed", f"{digits(batch / result.seconds)} {model.sample}s a second"),
            (
                "gradients, 4 bytes each",
                f"{digits(sum(sizes))} MiB in {counted(len(sizes), 'bucket')}",
            ),
            ("largest bucket", f"{digits(max(sizes))} MiB"),
            (
                "all communication, hidden or not",
                duration(result.communication),
            ),
        ]

    def _sources(self) -> list[str]:
        pod, model = self._pod, simulator.MODELS[self.model]
        return [
            "All of this is simulated: messages with latency and bandwidth, and GPUs "
            "that compute at half of their peak. Real clusters are slower.",
            f"Cluster: {pod.source}.",
            f"Model: {millions(model.parameters)} parameters; {model.source}.",
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
            f"{table(('', 'simulated time', 'share of the step'), rows)}"
            f"<p>In numbers:</p>{table(('', 'simulated'), numbers)}{sources}"
        )

    def __repr__(self) -> str:
        return (
            f"WhatIfExplorer({self.cluster!r}, {self.model!r}, nodes={self.nodes}, "
            f"samples={self.samples}, bucket_mib={self.bucket_mib}, "
            f"overlap={self.overlap}, algorithm={self.algorithm!r}, "
            f"straggler={self.straggler:g})"
        )


_PARTS = ("compute", "waiting", "exposed")  # of a step; fields of `simulator.Step`


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
