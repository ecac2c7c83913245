"""Memory: what fills each GPU, against what cards have, by stage of ZeRO, over time."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from course_utils.pictures import charts, draw, words
from course_utils.pictures.charts import Axis, Curve, Panel
from course_utils.pictures.draw import Picture
from course_utils.theory import costs
from course_utils.theory.arguments import one_of

if TYPE_CHECKING:
    from course_utils.measure.tensor_bytes import TensorBytes

_CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")
_MOST_BARS = 8
Held = Mapping[str, float] | costs.ModelStates


@draw.picture
def device_memory(
    devices: Mapping[str, Mapping[str, float]],
    *,
    capacity: float,
    title: str = "Memory of each device",
) -> Picture:
    """What fills the memory of each device, as bars to the same scale.

    Args:
        devices: From a device's name, such as "cuda:0", to its bytes by category:
            "parameters", "gradients", "optimizer state", "activations", "other".
            A category that is left out is 0. One to eight devices.
        capacity: Bytes that each device has, drawn as a line.
        title: What the picture shows, such as "At the peak of a training step".

    Raises:
        TypeError: an amount is not a number.
        ValueError: there is no device or too many, a category is unknown, or an
            amount is negative or not finite.
    """
    words.few(devices, "devices", _MOST_BARS)
    held = {str(name): _by_category(str(name), of) for name, of in devices.items()}
    most = max(capacity, *(math.fsum(of.values()) for of in held.values()))
    unit, size = words.binary_unit(most)
    rows = {name: _divided(of, size) for name, of in held.items()}
    said = {
        name: f"{words.number(math.fsum(of.values()), 3)} {unit}"
        for name, of in rows.items()
    }
    limit = f"each has {words.number(capacity / size, 3)} {unit}"
    totals = {name: [text] for name, text in said.items()}
    picture = charts.stacked(rows, {limit: capacity / size}, title, totals)
    lines = [
        f"{name} holds {said[name]} ({_parts(of, words.number)})"
        for name, of in rows.items()
    ]
    picture.summary = f"{title}. {'; '.join(lines)}. {words.sentence(limit)}"
    return picture


@draw.picture
def memory_per_gpu(
    strategies: Mapping[str, Held], *, title: str = "Memory of each GPU"
) -> Picture:
    """What each GPU holds under several strategies, against the memory of two cards.

    All bars have one scale, in decimal GB as in the ZeRO paper. A card's line is at the
    bytes that nvidia-smi reports, so that an H100, sold with 80 GB, has 85.5 GB. What
    is left, or too many, is said for the H100.

    Args:
        strategies: From a name to bytes by category: "parameters", "gradients",
            "optimizer state", "activations", "other"; one that is left out is 0. Or to
            `costs.ModelStates`. One to eight.
        title: What the picture shows.

    Raises:
        TypeError: an amount is not a number.
        ValueError: there is no strategy or too many, a category is unknown, or an
            amount is negative or not finite.
    """
    words.few(strategies, "strategies", _MOST_BARS)
    cards = [costs.card("RTX 4090"), costs.card("H100")]
    held = {str(name): _by_category(str(name), of) for name, of in strategies.items()}
    most = max(cards[-1].nbytes, *(math.fsum(of.values()) for of in held.values()))
    unit, size = words.decimal_unit(most)
    rows = {name: _divided(of, size) for name, of in held.items()}
    limits = {
        f"{card.name}: {words.number(card.nbytes / size, 3)} {unit}": card.nbytes / size
        for card in cards
    }
    said, lines, on = {}, [], f"on an {cards[-1].name}"
    for name, of in rows.items():
        total = math.fsum(of.values())
        left = cards[-1].nbytes / size - total
        number = words.spoken(abs(left), 3)
        verdict = f"{unit} {'left' if left >= 0 else 'too many'}"
        holds = f"{words.spoken(total, 3)} {unit}"
        said[name] = [holds, f"{number} {verdict}"]
        parts = _parts(of, words.spoken)
        lines.append(f"{name} holds {holds} ({parts}): {number} {verdict} {on}")
    picture = charts.stacked(rows, limits, title, said, room_left=True, aside=on)
    have = words.listed(
        f"{card.name} has {words.number(card.nbytes / size, 3)} {unit} "
        f"({words.number(card.nbytes / costs.GiB, 3)} GiB)"
        for card in cards
    )
    picture.summary = f"{title}. {'; '.join(lines)}. {have}."
    return picture


def _by_category(name: str, held: Held) -> dict[str, float]:
    """Bytes by category, in the order of the key."""
    if isinstance(held, costs.ModelStates):
        states = (held.parameters, held.gradients, held.optimizer)
        held = dict(zip(_CATEGORIES, states, strict=False))
    for what, amount in held.items():
        one_of(what, "category", _CATEGORIES)
        words.not_negative(amount, f"{what} of {name}")
    return {what: held[what] for what in _CATEGORIES if what in held}


def _divided(held: Mapping[str, float], size: float) -> dict[str, float]:
    return {what: amount / size for what, amount in held.items()}


def _parts(held: Mapping[str, float], say: Any) -> str:
    parts = [f"{what} {say(amount, 3)}" for what, amount in held.items() if amount]
    return ", ".join(parts) or "nothing"


# --- what training needs, by stage of ZeRO --------------------------------------------

_STAGES = ("stage 0 (DDP)", "stage 1", "stage 2", "stage 3 (FSDP)")


def bytes_by_stage(
    model: str = "7.5 billion",
    gpus: int = 8,
    optimizer: str = "adam",
    precision: str = "mixed",
    batch_per_gpu: int = 1,
    tokens: int = 2048,
    recompute: str = "none",
) -> dict[str, dict[str, float]]:
    """What a transformer in training holds on each GPU, in bytes, by formulas alone.

    "other" is what sharding needs besides its shards: the largest unit, as long as it
    computes, with its whole parameters in stage 3, and its whole gradient in stages 2
    and 3. A unit is a layer, or the embedding.

    Args:
        model: The name of one of `costs.TRANSFORMERS`.
        gpus: How many there are.
        optimizer: "sgd", "momentum" (SGD with it) or "adam".
        precision: "float32", "bfloat16" or "mixed": see `costs.state_bytes`.
        batch_per_gpu: Sequences for each GPU.
        tokens: Of a sequence.
        recompute: What is dropped after the forward pass and computed again: "none",
            "selective" or "full", see `costs.activation_bytes`.

    Returns:
        From a stage to bytes by category, as `pictures.memory_per_gpu` takes it.

    Raises:
        ValueError: a setting does not exist or is out of range.
    """
    shape = costs.transformer_shape(model)
    each = 4 if precision == "float32" else 2

    def activations(recompute: str, layers: int = 1, vocabulary: int = 0) -> float:
        return costs.activation_bytes(
            batch_per_gpu,
            tokens,
            shape.width,
            shape.heads,
            layers=layers,
            vocabulary=vocabulary,
            element_bytes=each,
            recompute=recompute,
        )

    # What all layers keep, and what one of them computes again.
    kept = activations(recompute, shape.layers, shape.vocabulary)
    kept += activations("none") - activations(recompute)
    one = costs.state_bytes(optimizer, precision)
    layer = costs.transformer_parameters(1, shape.width, 1) - 3 * shape.width
    unit = max(layer, shape.parameters - shape.layers * layer)
    held = {}
    for stage, name in enumerate(_STAGES):
        states = costs.zero_memory(
            shape.parameters,
            gpus=gpus,
            stage=stage,
            optimizer=optimizer,
            precision=precision,
        )
        whole = one.parameters * (stage == 3) + one.gradients * (stage >= 2)
        held[name] = {
            "parameters": states.parameters,
            "gradients": states.gradients,
            "optimizer state": states.optimizer,
            "activations": kept,
            "other": unit * whole if gpus > 1 else 0.0,
        }
    return held


@draw.picture
def memory_by_stage(
    model: str = "7.5 billion",
    gpus: int = 8,
    optimizer: str = "adam",
    precision: str = "mixed",
    batch_per_gpu: int = 1,
    tokens: int = 2048,
    recompute: str = "none",
) -> Picture:
    """What DDP and each stage of ZeRO need on each GPU, and on which cards they fit.

    The arguments and errors are those of `bytes_by_stage`.
    """
    sizes = gpus, optimizer, precision, batch_per_gpu, tokens, recompute
    held = bytes_by_stage(model, *sizes)
    size = f"{model} parameters" if model[0].isdigit() else model
    title = f"{size} on {words.count(gpus, 'GPU')}: each GPU, by stage of ZeRO"
    picture = memory_per_gpu(held, title=title)
    fits = []
    for name, by_category in held.items():
        total = sum(by_category.values())
        cards = [card.name for card in costs.CARDS if card.nbytes >= total]
        where = words.listed(cards) if cards else "no card"
        fits.append(words.sentence(f"{name} fits on {where}"))
    shape = costs.transformer_shape(model)
    lines = [
        *fits,
        "other: what is whole of one unit while it computes: gradients in stage 2, "
        "weights and gradients in stage 3.",
        f"Model: {shape.parameters:,} parameters; {shape.layers} layers of width "
        f"{shape.width:,}, {shape.heads} heads, a vocabulary of {shape.vocabulary:,}. "
        f"{shape.source}.",
        "Computed: ZeRO, arXiv 1910.02054; activations, arXiv 2205.05198, without "
        "FlashAttention.",
        "A real job needs more: CUDA takes some hundred MB, and memory is fragmented.",
    ]
    draw.below(picture, lines)
    picture.summary += " " + " ".join(fits)
    return picture


# --- memory over time -----------------------------------------------------------------


_BETWEEN = 0.2  # the width of what has no name, where that of a span is 1


@draw.picture
def memory_over_time(
    curves: Mapping[str, "TensorBytes"], *, title: str = "Tensor bytes during one step"
) -> Picture:
    """Measured bytes during a step, and how many they are at most and in the end.

    The x axis is the events of the step, each with the same width: how long each takes
    is noise on a small machine.

    Args:
        curves: From a strategy to what `record_tensor_bytes` recorded, whose spans are
            named above the curve. One to four, each in a panel of its own, all to the
            same scale.
        title: What the picture shows.

    Raises:
        ValueError: there are no curves, or too many.
    """
    words.few(curves, "curves", 4)
    highest = max(curve.peak for curve in curves.values())
    unit, size = words.decimal_unit(highest)
    panels, said = [], []
    for name, curve in curves.items():
        place, end = _by_event(curve)
        xs = [*map(place, curve.seconds), end]
        ys = [nbytes / size for nbytes in (*curve.nbytes, curve.nbytes[-1])]
        looks = {"color": draw.BLUE, "lw": 1.4, "drawstyle": "steps-post"}
        peak, last = (words.number(n / size, 3) for n in (curve.peak, curve.nbytes[-1]))
        regions = [
            (place(start), place(stop), (what, draw.cut(what, 0.9, draw.SMALL)), odd)
            for odd, (what, start, stop) in zip(
                (True, False) * len(curve.spans), curve.spans, strict=False
            )
        ]
        last_one = len(panels) == len(curves) - 1
        panels.append(
            Panel(
                f"{name} ({unit})",
                [Curve("", xs, ys, looks)],
                Axis(
                    "allocations and frees, in order" * last_one,
                    edges=(0, end),
                    ticks={},
                ),
                Axis(edges=(0, 1.16 * (highest / size or 1.0))),
                regions=regions,
                aside=f"measured: peak {peak} {unit}, at the end {last} {unit}",
                fill=True,
            )
        )
        said.append(
            f"{name}: measured peak {words.byte_size(curve.peak)}, at the end "
            f"{words.byte_size(curve.nbytes[-1])}"
        )
    picture = charts.curves(title, panels, tall=1.2)
    picture.summary = f"{title}. {'. '.join(said)}."
    return picture


def _by_event(curve: "TensorBytes") -> tuple[Any, float]:
    """From seconds to the place on an axis of events, and where that axis ends."""
    edges = {edge for _, start, stop in curve.spans for edge in (start, stop)}
    times = sorted({curve.seconds[0], curve.seconds[-1], *edges})
    places = [0.0]
    for start, stop in zip(times, times[1:], strict=False):
        named = any(a <= start and stop <= b for _, a, b in curve.spans)
        places.append(places[-1] + (1.0 if named else _BETWEEN))

    def place(seconds: float) -> float:
        after = next((k for k, time in enumerate(times) if seconds <= time), 0)
        if not after:
            return 0.0
        begin, end = times[after - 1 : after + 1]
        share = (seconds - begin) / (end - begin)
        return places[after - 1] + share * (places[after] - places[after - 1])

    return place, places[-1] + _BETWEEN
