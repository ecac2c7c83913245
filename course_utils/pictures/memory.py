"""Memory: what fills each GPU, against what cards have, and over time."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from course_utils.pictures import charts, draw, words
from course_utils.pictures.charts import Axis, Curve, Panel
from course_utils.pictures.draw import Picture
from course_utils.theory import costs

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
        if what not in _CATEGORIES:
            kinds = words.listed(map(repr, _CATEGORIES))
            raise ValueError(f"{name} holds {what!r}: the categories are {kinds}.")
        words.not_negative(amount, f"{what} of {name}")
    return {what: held[what] for what in _CATEGORIES if what in held}


def _divided(held: Mapping[str, float], size: float) -> dict[str, float]:
    return {what: amount / size for what, amount in held.items()}


def _parts(held: Mapping[str, float], say: Any) -> str:
    parts = [f"{what} {say(amount, 3)}" for what, amount in held.items() if amount]
    return ", ".join(parts) or "nothing"


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
        ValueError: there are no curves or too many, or nothing was recorded.
    """
    words.few(curves, "curves", 4)
    for name, curve in curves.items():
        if not curve.nbytes:
            raise ValueError(f"{name} has no points: expected at least one.")
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
