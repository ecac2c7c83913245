"""Speeds: measured times, cost models, and how both grow with sizes and GPUs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from course_utils.pictures import charts, draw, words
from course_utils.pictures.charts import Axis, Curve, Panel
from course_utils.pictures.draw import Picture
from course_utils.pictures.words import byte_size, duration
from course_utils.theory import costs

_MEASURED = {"marker": "o", "ls": "none", "ms": 7, "mew": 0.8, "color": draw.ORANGE}
_MODEL = {"color": draw.BLUE, "lw": 2.2}
_ALONE = {"color": draw.INK, "lw": 1.2, "ls": (0, (5, 3))}
_DOTTED = {"color": draw.VERMILLION, "lw": 1.5, "ls": ":"}


def _times(ratio: float) -> str:
    return f"{words.number(ratio, 3)}×"


def _by_name(
    rows: Sequence[Mapping[str, Any]], x: str, most: int
) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each name, in the order of x."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row["name"]), []).append(row)
    words.few(groups, "curves", most)
    return {name: sorted(points, key=lambda p: p[x]) for name, points in groups.items()}


@draw.picture
def transfer_times(
    sizes: Sequence[float], seconds: Sequence[float], fit: costs.AlphaBeta
) -> Picture:
    """Measured times of messages, with the latency and bandwidth that fit them.

    Args:
        sizes: Bytes of each message.
        seconds: How long each took, one way.
        fit: From `costs.fit_transfer`.
    """
    low, high = min(sizes) / 2, max(sizes) * 2
    ns = [float(n) for n in np.geomspace(low, high, 200)]
    floor = min(*seconds, fit.latency or min(seconds)) / 4
    lines = [
        Curve("latency + size / bandwidth", ns, [fit.seconds(n) for n in ns], _MODEL),
        Curve("size / bandwidth alone", ns, [n / fit.bandwidth for n in ns], _DOTTED),
        Curve("measured", sizes, seconds, {**_MEASURED, "zorder": 5}),
    ]
    if fit.latency > 0:
        lines.insert(1, Curve("latency alone", [low, high], [fit.latency] * 2, _ALONE))
    top = max(*seconds, fit.seconds(high)) * 2
    # The dotted line begins below the panel.
    lines = [
        Curve(c.name, c.xs, [y if y >= floor else math.nan for y in c.ys], c.looks)
        for c in lines
    ]
    x = Axis("size of the message", byte_size, log=True, edges=(low, high))
    y = Axis("", duration, log=True, edges=(floor, top))
    errors = [abs(fit.seconds(n) / t - 1) for n, t in zip(sizes, seconds, strict=True)]
    note = (
        f"Fitted: latency {duration(fit.latency)}, bandwidth "
        f"{words.speed(fit.bandwidth)}. The largest error of the fit is "
        f"{100 * max(errors):.0f} %."
    )
    title = "The time of one message, by its size"
    picture = charts.curves(
        title, [Panel("time, one way", lines, x, y)], note=note, tall=2.4
    )
    measured = "; ".join(
        f"{byte_size(n)} {duration(t)}" for n, t in zip(sizes, seconds, strict=True)
    )
    picture.summary = f"Measured, one way: {measured}. {note}"
    return picture


@draw.picture
def micro_batch_times(
    measured: Mapping[int, float],
    formula: Callable[[float], float],
    *,
    best: float,
    one_device: float,
) -> Picture:
    """How long a batch takes in that many micro-batches: measured, and by a formula.

    Args:
        measured: From the number of micro-batches to the seconds of a batch. Two to
            ten numbers.
        formula: From a number of micro-batches to seconds, for the curve: it is asked
            for fractions as well.
        best: The number at which the formula is least.
        one_device: Seconds of the same batch on one device, drawn as a line.
    """
    numbers = sorted(measured)
    ratio = numbers[-1] / numbers[0]
    by_formula = {
        m: formula(m) for m in (numbers[0] * ratio ** (k / 99) for k in range(100))
    }
    most = max(*measured.values(), *by_formula.values(), one_device)
    unit, size = words.unit_of(most)
    lines = [
        Curve(
            "by the formula",
            [*by_formula],
            [seconds / size for seconds in by_formula.values()],
            _MODEL,
        ),
        Curve("measured", numbers, [measured[m] / size for m in numbers], _MEASURED),
    ]
    ticks = {number: str(number) for number in numbers}
    edges = numbers[0] / 1.15, numbers[-1] * 1.15
    panel = Panel(
        f"time ({unit})",
        lines,
        Axis("micro-batches", log=True, edges=edges, ticks=ticks),
        Axis(edges=(0, 1.12 * most / size)),
        [("y", one_device / size, _ALONE), ("x", best, _DOTTED)],
    )
    fastest = min(numbers, key=measured.__getitem__)
    note = (
        f"Fastest of those measured: {fastest} micro-batches. Best by the formula: "
        f"{words.number(float(best), 3)}."
    )
    picture = charts.curves(
        "How many micro-batches?",
        [panel],
        note=note,
        more=[("one device", _ALONE), ("best by the formula", _DOTTED)],
    )
    said = ", ".join(f"{m}: {words.number(measured[m] / size, 3)}" for m in numbers)
    picture.summary = (
        f"Time in {unit} by micro-batches. {said}. One device: "
        f"{words.number(one_device / size, 3)}. {note}"
    )
    return picture


@draw.picture
def scaling(
    rows: Sequence[Mapping[str, Any]], *, title: str = "More and more GPUs"
) -> Picture:
    """Time against the number of GPUs, both on logarithmic axes.

    Args:
        rows: One dict for each point: "name", whose points make one curve; "gpus"; and
            "seconds". At most six curves.
        title: What the picture shows.

    Raises:
        ValueError: there are no curves, or too many.
    """
    curves = _by_name(rows, "gpus", len(draw.CURVES))
    looks = charts.by_name([*curves], draw.CURVES)
    lines, said = [], []
    for name, points in curves.items():
        gpus, seconds = ([p[key] for p in points] for key in ("gpus", "seconds"))
        lines.append(Curve(name, gpus, seconds, looks[name]))
        words_of_it = f"time {duration(seconds[0])} on {words.count(gpus[0], 'GPU')}"
        if len(points) > 1:
            words_of_it += f", {duration(seconds[-1])} on {gpus[-1]:,}"
        said.append(f"{name}: {words_of_it}")
    ticks = {row["gpus"]: f"{row['gpus']:,}" for row in rows}
    x = Axis("GPUs", log=True, ticks=ticks)
    panel = Panel("time", lines, x, Axis("", duration, log=True))
    picture = charts.curves(title, [panel])
    picture.summary = f"{title}. {'. '.join(said)}."
    return picture


@draw.picture
def predicted_and_measured(
    rows: Sequence[Mapping[str, Any]], *, title: str = "Predicted and measured"
) -> Picture:
    """Predicted and measured times by message size, with the noise of measuring.

    Above, the times: all series predict the same measurement, which is one line.
    Below, what was measured over what was predicted: the bar at each point goes from
    the lowest to the highest of the A/A measurements, which differ although nothing was
    changed. Where it meets the line at 1, no error of the prediction can be seen.

    Args:
        rows: One dict for each size of each series: the "name" of the series, one of
            up to three; "nbytes"; "predicted" and "measured" seconds; "low" and "high",
            the ends of the A/A band around the measured.
        title: What the picture shows.

    Raises:
        ValueError: there are no series, or too many.
    """
    curves = _by_name(rows, "nbytes", 3)
    first = [*curves.values()][0]
    sizes, once = ([point[key] for point in first] for key in ("nbytes", "measured"))
    black = {"color": draw.INK, "ls": "-", "marker": "D"}
    times, ratios, said = [Curve("measured", sizes, once, black)], [], []
    for place, (name, points) in enumerate(curves.items()):
        looks = draw.CURVES[place]
        xs, predicted = ([p[key] for p in points] for key in ("nbytes", "predicted"))
        hollow = {"mfc": draw.PAPER, "mec": looks["color"], "mew": 1.2, "ms": 8}
        dashed = {**looks, "ls": (0, (5, 2)), "lw": 1.4, **hollow}
        times.append(Curve(f"{name}, predicted", xs, predicted, dashed))
        middle, *ends = (
            [p[key] / p["predicted"] for p in points]
            for key in ("measured", "low", "high")
        )
        # Side by side where two series have the same sizes.
        beside = [x * 1.06 ** (place - (len(curves) - 1) / 2) for x in xs]
        ratios.append(Curve("", beside, middle, {**looks, "ls": "none"}, tuple(ends)))
        said.append(_prediction_in_words(name, points))
    edges = min(sizes) / 1.6, max(sizes) * 1.6
    x = Axis("", byte_size, log=True, edges=edges)
    heading = "measured / predicted, with the A/A band of measuring"
    one = [("y", 1, {"color": draw.LINE, "lw": 1.2, "ls": (0, (4, 3))})]
    panels = [
        Panel("time", times, x, Axis("", duration, log=True)),
        Panel(
            heading,
            ratios,
            x._replace(label="size of the tensor"),
            Axis("", _times, log=True),
            one,
        ),
    ]
    picture = charts.curves(title, panels, tall=1.75)
    picture.summary = f"{title}. {' '.join(said)}"
    return picture


def _prediction_in_words(name: str, points: Sequence[Mapping[str, Any]]) -> str:
    ratios = [point["measured"] / point["predicted"] for point in points]
    inside = sum(p["low"] <= p["predicted"] <= p["high"] for p in points)
    worst = max(points, key=lambda p: abs(math.log(p["measured"] / p["predicted"])))
    return (
        f"{name}: measured / predicted from {words.number(min(ratios), 3)} to "
        f"{words.number(max(ratios), 3)}; the prediction is within the A/A band at "
        f"{inside} of {words.count(len(points), 'size')}. Farthest off at "
        f"{byte_size(worst['nbytes'])}: predicted {duration(worst['predicted'])}, "
        f"measured {duration(worst['measured'])} (A/A {duration(worst['low'])} to "
        f"{duration(worst['high'])})."
    )


@draw.picture
def collective_bandwidth(rows: Sequence[Mapping[str, Any]]) -> Picture:
    """Measured time and bus bandwidth of collectives, against the size.

    A line through the times is latency + size / bandwidth, from `costs.fit_transfer`.
    Sizes at which latency takes more than half of the time are latency-bound.

    Args:
        rows: One dict a measurement, as `workers/bench_all_reduce.py --json` writes
            them: "collective", "world_size", "size" (bytes, as nccl-tests counts) and
            "time_us". Other keys are ignored. At most six collectives.

    Raises:
        ValueError: there is no measurement or one of a single rank, there are too many
            collectives, or one that has no bus bandwidth.
    """
    same = len({row["world_size"] for row in rows}) == 1
    named = []
    for row in rows:
        words.whole(row["world_size"], "world_size", 2)
        ranks = "" if same else f", {words.count(row['world_size'], 'rank')}"
        named.append({**row, "name": f"{row['collective']}{ranks}"})
    curves = _by_name(named, "size", len(draw.CURVES))
    looks = charts.by_name([*curves], draw.CURVES)
    all_sizes = [row["size"] for row in rows]
    edges = min(all_sizes) / 1.6, max(all_sizes) * 1.6
    fine = [float(n) for n in np.geomspace(*edges, 200)]
    times, rates, halves, unfitted, said = [], [], [], [], []
    for name, points in curves.items():
        factor = costs.bus_bandwidth_factor(
            points[0]["collective"], points[0]["world_size"]
        )
        sizes = [point["size"] for point in points]
        seconds = [point["time_us"] / 1e6 for point in points]
        speeds = [factor * n / t for n, t in zip(sizes, seconds, strict=True)]
        dots = {**looks[name], "ls": "none", "zorder": 5}
        times.append(Curve(name, sizes, seconds, dots))
        rates.append(Curve(name, sizes, speeds, dots))
        best = max(range(len(speeds)), key=speeds.__getitem__)
        words_of_it = (
            f"{name}: {duration(seconds[0])} for {byte_size(sizes[0])}, "
            f"{duration(seconds[-1])} for {byte_size(sizes[-1])}; highest bus "
            f"bandwidth {byte_size(speeds[best])}/s at {byte_size(sizes[best])}"
        )
        try:
            fit = costs.fit_transfer(sizes, seconds)
        except ValueError:  # one size alone, or times that do not grow
            unfitted.append(name)
            said.append(f"{words_of_it}; no latency and bandwidth fit.")
            continue
        line = {"color": looks[name]["color"], "lw": 1.3}
        by_fit = [fit.seconds(n) for n in fine]
        times.append(Curve("", fine, by_fit, line))
        bus = [factor * n / t for n, t in zip(fine, by_fit, strict=True)]
        rates.append(Curve("", fine, bus, line))
        half = costs.half_bandwidth_bytes(latency=fit.latency, bandwidth=fit.bandwidth)
        halves.append(half)
        said.append(
            f"{words_of_it}; fitted latency {duration(fit.latency)}, latency-bound "
            f"below {byte_size(half)}."
        )
    marks, regions = [], []
    if halves:
        low, high = (min(max(edge(halves), edges[0]), edges[1]) for edge in (min, max))
        marks = [
            ("x", half, {**draw.LIMIT, "color": draw.LINE, "lw": 1.0})
            for half in (low, high)
        ]
        regions = [
            (edges[0], low, ("latency",), True),
            (high, edges[1], ("bandwidth",), False),
        ]
    x = Axis("", byte_size, log=True, edges=edges)
    rate = Axis("", lambda rate: f"{byte_size(rate)}/s", log=True)
    unnamed = [(start, stop, (), shaded) for start, stop, _, shaded in regions]
    panels = [
        Panel("time", times, x, Axis("", duration, log=True), marks, regions),
        Panel("bus bandwidth", rates, x._replace(label="size"), rate, marks, unnamed),
    ]
    note = "Lines: latency + size / bandwidth, fitted to the times."
    if len(halves) > 1:
        note += " Each collective's half-way point lies between the dashed lines."
    elif halves:
        note += " Dashed: here latency is half of the time."
    if unfitted:
        note = f"No latency and bandwidth fit the times of {words.listed(unfitted)}."
    title = "Time and bus bandwidth of collectives, by size"
    picture = charts.curves(title, panels, note=note, tall=1.68)
    picture.summary = f"{title}. {' '.join(said)}"
    return picture
