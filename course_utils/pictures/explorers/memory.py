"""The explorer of memory: where that of each GPU goes, and what real cards have."""

import html

import traitlets

from course_utils.pictures.explorers.base import (
    Explorer,
    check_choice,
    check_whole,
    choice,
    counted,
    digits,
    slider,
    stops,
    table,
)
from course_utils.theory import costs

# Where the sliders stop; in Python each number in between can be set, too.
_STOPS = {
    "gpus": tuple(2**k for k in range(11)),
    "batch": tuple(2**k for k in range(7)),
    "sequence": tuple(2**k for k in range(7, 16)),
}
_STAGES = {
    0: "nothing (DDP)",
    1: "optimizer states",
    2: "optimizer states and gradients",
    3: "all states (FSDP)",
}
_SHAPES = {shape.name: shape for shape in costs.TRANSFORMERS}
_CHOICES = {
    "model": tuple(_SHAPES),
    "optimizer": ("sgd", "momentum", "adam"),
    "precision": ("float32", "bfloat16", "mixed"),
    "recompute": ("none", "selective", "full"),
}
_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "unit": "one whole unit",
}


class MemoryExplorer(Explorer):
    """A transformer in training: what fills each GPU, and on which cards it fits.

    The last expression of a cell shows it. Its settings can also be set in Python.
    Everything shown is computed, by the formulas of `costs`; nothing is measured.

        >>> explorer = MemoryExplorer("7.5 billion", gpus=64, stage=2)
        >>> print(explorer.summary)
        7.5 billion on 64 GPUs, ZeRO stage 2: 51.9 GB on each GPU, of which 34.9 GB \
are activations. It fits on H100, A100 80GB, H200.

    Attributes:
        model: The name of one of `costs.TRANSFORMERS`.
        optimizer: "sgd", "momentum" (SGD with it) or "adam".
        precision: "float32", "bfloat16" or "mixed": see `costs.state_bytes`.
        gpus: How many there are, 1 to 1024.
        stage: Of ZeRO: 0 (DDP), 1, 2 or 3 (FSDP).
        batch: Sequences for each GPU, 1 to 64.
        sequence: Tokens of a sequence, 1 to 32,768.
        recompute: What is dropped after the forward pass and computed again: "none",
            "selective" or "full", see `costs.activation_bytes`.

    Raises:
        ValueError: a setting does not exist or is out of range.
    """

    _invitation = "change its settings"

    model = traitlets.Enum(_CHOICES["model"], "7.5 billion").tag(sync=True)
    optimizer = traitlets.Enum(_CHOICES["optimizer"], "adam").tag(sync=True)
    precision = traitlets.Enum(_CHOICES["precision"], "mixed").tag(sync=True)
    gpus = traitlets.Int(64).tag(sync=True)
    stage = traitlets.Int(0).tag(sync=True)
    batch = traitlets.Int(1).tag(sync=True)
    sequence = traitlets.Int(2048).tag(sync=True)
    recompute = traitlets.Enum(_CHOICES["recompute"], "none").tag(sync=True)

    def __init__(
        self,
        model: str = "7.5 billion",
        optimizer: str = "adam",
        precision: str = "mixed",
        gpus: int = 64,
        stage: int = 0,
        batch: int = 1,
        sequence: int = 2048,
        recompute: str = "none",
    ) -> None:
        settings = {
            "model": model,
            "optimizer": optimizer,
            "precision": precision,
            "gpus": gpus,
            "stage": stage,
            "batch": batch,
            "sequence": sequence,
            "recompute": recompute,
        }
        for what, known in _CHOICES.items():
            check_choice(settings[what], what, known)
        for what in ("gpus", "stage", "batch", "sequence"):
            check_whole(settings[what], what, *_limits(what))
        super().__init__(**settings)
        self.set_trait("region", "Tables of the memory of each GPU")
        controls = [
            choice("model", "Model", _CHOICES["model"]),
            choice("optimizer", "Optimizer", _CHOICES["optimizer"]),
            choice("precision", "Precision", _CHOICES["precision"]),
            stops("gpus", "GPUs", _STOPS["gpus"]),
            slider("stage", "ZeRO stage", 0, 3),
            stops("batch", "Sequences per GPU", _STOPS["batch"]),
            stops("sequence", "Tokens of a sequence", _STOPS["sequence"]),
            choice("recompute", "Recompute", _CHOICES["recompute"]),
        ]
        self.set_trait("controls", controls)
        self._refresh()

    @traitlets.validate("gpus", "stage", "batch", "sequence")
    def _within(self, proposal: dict) -> int:
        low, high = _limits(proposal["trait"].name)
        return min(max(proposal["value"], low), high)

    @traitlets.observe(
        *("model", "optimizer", "precision", "gpus", "stage"),
        *("batch", "sequence", "recompute"),
    )
    def _refresh(self, _: object = None) -> None:
        self.set_trait("summary", self._in_one_line())
        self.set_trait("body", self._as_html())

    def held(self, stage: int | None = None) -> dict[str, float]:
        """Bytes on each GPU by what they are for; of another stage if one is given.

        "unit" is what sharding needs besides its shards: the largest unit, as long as
        it computes, with its whole parameters in stage 3, and its whole gradient in
        stages 2 and 3. A unit is a layer, or the embedding.
        """
        stage = self.stage if stage is None else stage
        shape = self._shape
        states = costs.zero_memory(
            shape.parameters,
            gpus=self.gpus,
            stage=stage,
            optimizer=self.optimizer,
            precision=self.precision,
        )
        one = costs.state_bytes(self.optimizer, self.precision)
        layer = costs.transformer_parameters(1, shape.width, 1) - 3 * shape.width
        unit = max(layer, shape.parameters - shape.layers * layer)
        each = one.parameters * (stage >= 3) + one.gradients * (stage >= 2)
        return {
            "parameters": states.parameters,
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            "activations": self._activations(),
            "unit": unit * each if self.gpus > 1 else 0.0,
        }

    def _activations(self) -> float:
        """What all layers keep, and what one of them computes again."""
        shape = self._shape
        sizes = self.batch, self.sequence, shape.width, shape.heads
        each = {"element_bytes": 4 if self.precision == "float32" else 2}
        kept, whole = (
            costs.activation_bytes(*sizes, recompute=recompute, **each)
            for recompute in (self.recompute, "none")
        )
        return (
            whole
            - kept
            + costs.activation_bytes(
                *sizes,
                layers=shape.layers,
                recompute=self.recompute,
                vocabulary=shape.vocabulary,
                **each,
            )
        )

    @property
    def _shape(self) -> costs.TransformerShape:
        return _SHAPES[self.model]

    def text(self) -> str:
        """What is shown, as plain text."""
        lines = [self.summary, ""]
        for row in (*self._rows(), *self._card_rows(), *self._stage_rows()):
            lines.append(f"{row[0]}: {', '.join(row[1:])}")
        return "\n".join([*lines, "", *self._sources()])

    def _in_one_line(self) -> str:
        held = self.held()
        total = sum(held.values())
        fits = [card.name for card in costs.CARDS if card.nbytes >= total]
        verdict = f"It fits on {', '.join(fits)}." if fits else "It fits on no card."
        return (
            f"{self.model} on {counted(self.gpus, 'GPU')}, ZeRO stage {self.stage}: "
            f"{_size(total)} on each GPU, of which {_size(held['activations'])} are "
            f"activations. {verdict}"
        )

    def _rows(self) -> list[tuple[str, str, str]]:
        """(what, bytes, share), in words."""
        held = self.held()
        total = sum(held.values())
        return [
            (_PARTS[what], _size(nbytes), f"{100 * nbytes / total:.3g} %")
            for what, nbytes in held.items()
        ] + [("all of it", _size(total), "100 %")]

    def _card_rows(self) -> list[tuple[str, str, str]]:
        """(card, what it has, what is left), in words."""
        total = sum(self.held().values())
        rows = []
        for card in costs.CARDS:
            left = card.nbytes - total
            verdict = f"{_size(left)} left" if left >= 0 else f"{_size(-left)} too much"
            has = f"{_size(card.nbytes)} ({digits(card.nbytes / costs.GiB)} GiB)"
            rows.append((card.name, has, verdict))
        return rows

    def _stage_rows(self) -> list[tuple[str, str, str]]:
        """(stage, what it divides, bytes), in words."""
        return [
            (
                f"{'▶ ' if stage == self.stage else ''}stage {stage}",
                f"divides {what}",
                _size(sum(self.held(stage).values())),
            )
            for stage, what in _STAGES.items()
        ]

    def _sources(self) -> list[str]:
        shape = self._shape
        return [
            "All of this is computed. GB are decimal, GiB are 1024³ bytes. A real job "
            "needs more: CUDA itself takes some hundred MB, and memory is fragmented.",
            f"Model: {counted(shape.parameters, 'parameter')}; {shape.layers} layers "
            f"of width {shape.width:,} with {shape.heads} heads, "
            f"{shape.vocabulary:,} tokens. {shape.source}.",
            "Formulas: ZeRO, arXiv 1910.02054; activations, arXiv 2205.05198, without "
            "FlashAttention. Cards: the total that nvidia-smi reports.",
        ]

    def _saved(self) -> str:
        return self._as_html(drawn=False)

    def _as_html(self, drawn: bool = True) -> str:
        held = self.held()
        parts = [
            f'<tr><th scope="row">{_sample(kind)}{name}</th><td>{nbytes}</td>'
            f"<td>{share}</td></tr>"
            for kind, (name, nbytes, share) in zip(
                (*_PARTS, ""), self._rows(), strict=True
            )
        ]
        bars = []
        for card, (name, has, verdict) in zip(
            costs.CARDS, self._card_rows(), strict=True
        ):
            fill = f'<td class="course-explorer-fill">{_bar(held, card)}</td>'
            bars.append(
                f'<tr><th scope="row">{name}</th><td>{has}</td><td>{verdict}</td>'
                f"{fill * drawn}</tr>"
            )
        heads = ("", "has", "room", "filled") if drawn else ("", "has", "room")
        stages = []
        for stage, row in enumerate(self._stage_rows()):
            here = ' class="course-explorer-here"' if stage == self.stage else ""
            cells = "".join(f"<td>{cell}</td>" for cell in row[1:])
            stages.append(f'<tr{here}><th scope="row">{row[0]}</th>{cells}</tr>')
        sources = "".join(f"<p>{html.escape(words)}</p>" for words in self._sources())
        return (
            f"{table(('', 'on each GPU', 'share'), parts)}"
            f"<p>On real cards{', all to one scale' * drawn}:</p>{table(heads, bars)}"
            f"<p>With the other stages:</p>"
            f"{table(('', 'what it does', 'on each GPU'), stages)}{sources}"
        )

    def __repr__(self) -> str:
        return (
            f"MemoryExplorer({self.model!r}, {self.optimizer!r}, {self.precision!r}, "
            f"gpus={self.gpus}, stage={self.stage}, batch={self.batch}, "
            f"sequence={self.sequence}, recompute={self.recompute!r})"
        )


def _limits(what: str) -> tuple[int, int]:
    return (0, 3) if what == "stage" else (1, _STOPS[what][-1])


def _size(nbytes: float) -> str:
    """An amount of memory in decimal GB, or MB where it is small."""
    if 0 < nbytes < costs.GB / 10:
        return f"{digits(nbytes / costs.MB)} MB"
    return f"{digits(nbytes / costs.GB)} GB"


def _sample(kind: str) -> str:
    return f'<i class="course-explorer-{kind}"></i> ' if kind else ""


def _bar(held: dict[str, float], card: costs.Card) -> str:
    """The card as a frame, and what it would hold, which may be more than it has.

    The widest bar is that of the largest card; what is longer is cut off.
    """
    scale = 100 / costs.CARDS[-1].nbytes
    total = sum(held.values())
    parts = "".join(
        f'<i class="course-explorer-{kind}" style="width: {100 * n / total:.4g}%"></i>'
        for kind, n in held.items()
        if n
    )
    return (
        '<div class="course-explorer-card" aria-hidden="true">'
        f'<div style="width: {scale * total:.4g}%">{parts}</div>'
        f'<b style="width: {scale * card.nbytes:.4g}%"></b></div>'
    )
