"""Pictures of cost models: more and more GPUs, and predictions beside measurements."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from course_utils.pictures import draw
from course_utils.pictures.draw import (
    BLUE,
    GREEN,
    INK,
    LINE,
    MARGIN,
    PURPLE,
    QUIET,
    SMALL,
    VERMILLION,
    WIDTH,
    Picture,
)

_CURVES: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "marker": "o", "ls": "-"},
    {"color": VERMILLION, "marker": "s", "ls": (0, (5, 2))},
    {"color": GREEN, "marker": "^", "ls": (0, (1, 1.5))},
    {"color": PURPLE, "marker": "D", "ls": (0, (5, 1.5, 1, 1.5))},
    {"color": INK, "marker": "v", "ls": (0, (8, 3))},
    {"color": QUIET, "marker": "P", "ls": (0, (3, 1, 1, 1, 1, 1))},
)

# --- more and more GPUs -------------------------------------------------------------


@draw.picture
def scaling(
    rows: Iterable[Mapping[str, Any]], *, title: str = "More and more GPUs"
) -> Picture:
    """Time against the number of GPUs, both on logarithmic axes.

    Args:
        rows: One dict for each point: "name", whose points make one curve; "gpus"; and
            "seconds". At most six curves.
        title: What the picture shows.

    Raises:
        ValueError: a key is missing, a value is not above 0, or there are no curves or
            too many.
    """
    rows = [dict(row) for row in rows]
    for row in rows:
        missing = {"name", "gpus", "seconds"} - set(row)
        if missing:
            raise ValueError(f"The row {row!r} has no {draw.listed(sorted(missing))}.")
        for key in ("gpus", "seconds"):
            if draw.finite(row[key], key) <= 0:
                raise ValueError(f"{key} is {row[key]}: expected more than 0.")
    curves = _curves(rows, "gpus")
    lines = draw.key_lines([*curves])
    below = 0.24 + 0.22 * (len(lines) - 1)
    bottom, tall = below + 0.72, 1.75
    picture, board = draw.board(bottom + tall + 0.75, title)
    left, width = MARGIN + 0.78, WIDTH - 2 * MARGIN - 0.95
    gpus = sorted({row["gpus"] for row in rows})
    axis = draw.chart(picture, left, bottom, width, tall)
    axis.set_xscale("log")
    axis.set_xlim(gpus[0] / 1.25, gpus[-1] * 1.25)
    times = [row["seconds"] for row in rows]
    axis.set_yscale("log")
    axis.set_ylim(min(times) / 1.4, max(times) * 1.4)
    draw.log_ticks(axis.set_yticks, axis.get_ylim(), draw.duration, 5)
    for looks, points in zip(_CURVES, curves.values(), strict=False):
        axis.plot(
            [point["gpus"] for point in points],
            [point["seconds"] for point in points],
            **{"ms": 6, "mec": INK, "mew": 0.5, "lw": 1.6, **looks},
        )
    _gpu_ticks(axis, gpus, width)
    draw.grid(axis)
    draw.write(board, left, bottom + tall + 0.14, "time", weight="bold")
    draw.write(board, left + width, below + 0.3, "GPUs", ha="right")
    _key(board, lines, [*curves], below)
    said = [f"{name}: {_ends_in_words(points)}" for name, points in curves.items()]
    picture.summary = f"{title.rstrip('.')}. {'. '.join(said)}."
    return picture


def _ends_in_words(points: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last time of a curve."""
    first, last = points[0], points[-1]
    words = f"time {draw.duration(first['seconds'])} on "
    words += draw.count(first["gpus"], "GPU")
    if len(points) == 1:
        return words
    return f"{words}, {draw.duration(last['seconds'])} on {last['gpus']:,}"


def _gpu_ticks(axis: Axes, gpus: Sequence[int], width: float) -> None:
    """A tick for each number of GPUs, as far as there is room; always for the last."""
    low, high = np.log(axis.get_xlim())
    ticks: list[int] = []
    taken = width + 1.0
    for number in reversed(gpus):
        middle = width * (np.log(number) - low) / (high - low)
        half = draw.width_of(f"{number:,}", SMALL) / 2
        if middle + half < taken - 0.1:
            ticks.append(number)
            taken = middle - half
    axis.set_xticks(ticks, labels=[f"{number:,}" for number in ticks])
    axis.minorticks_off()


# --- predictions beside measurements -------------------------------------------------


@draw.picture
def predicted_and_measured(
    rows: Iterable[Mapping[str, Any]], *, title: str = "Predicted and measured"
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
        ValueError: a key is missing, a value is not above 0, the measured time is not
            within its own band, or there are no series or too many.
    """
    rows = [dict(row) for row in rows]
    for row in rows:
        missing = {"name", "nbytes", "predicted", "measured", "low", "high"} - set(row)
        if missing:
            raise ValueError(f"The row {row!r} has no {draw.listed(sorted(missing))}.")
        for key in ("nbytes", "predicted", "measured", "low", "high"):
            if draw.finite(row[key], key) <= 0:
                raise ValueError(f"{key} is {row[key]}: expected more than 0.")
        if not row["low"] <= row["measured"] <= row["high"]:
            raise ValueError(
                f"Measured were {row['measured']} s, outside of the band from "
                f"{row['low']} to {row['high']} s."
            )
    curves = _curves(rows, "nbytes", most=3)
    tall, below = 1.75, 0.24 + 0.22 * len(curves)
    low, high = below + 0.72, below + 0.72 + tall + 0.55
    picture, board = draw.board(high + tall + 0.72, title)
    left, width = MARGIN + 0.72, WIDTH - 2 * MARGIN - 0.82
    sizes = sorted({row["nbytes"] for row in rows})
    edges = sizes[0] / 1.6, sizes[-1] * 1.6
    times = _chart(
        picture,
        (left, high, width, tall),
        edges,
        [row[key] for row in rows for key in ("predicted", "low", "high")],
        draw.duration,
    )
    ratios = _chart(
        picture,
        (left, low, width, tall),
        edges,
        [
            1.0,
            *(row[key] / row["predicted"] for row in rows for key in ("low", "high")),
        ],
        lambda ratio: f"{draw.number(ratio, 3)}×",
    )
    _ratio_ticks(ratios)
    ratios.axhline(1, color=LINE, lw=1.2, ls=(0, (4, 3)), zorder=1)
    filled = {"mec": INK, "mew": 0.5, "ms": 6}
    one = {"color": INK, "ls": "-", "lw": 1.6, "marker": "D", **filled}
    first, *_ = curves.values()
    once = [[point[key] for point in first] for key in ("nbytes", "measured")]
    times.plot(*once, **one, zorder=2.5)
    _sample(board, below - 0.22 * len(curves), "measured", one)
    for place, (looks, (name, points)) in enumerate(
        zip(_CURVES, curves.items(), strict=False)
    ):
        xs = np.array([point["nbytes"] for point in points])
        # Side by side where two series have the same sizes.
        beside = xs * 1.06 ** (place - (len(curves) - 1) / 2)
        ys = {
            key: np.array([point[key] for point in points])
            for key in ("predicted", "measured", "low", "high")
        }
        color, marker = looks["color"], looks["marker"]
        hollow = {"marker": marker, "mfc": draw.PAPER, "mec": color, "mew": 1.2}
        dashed = {"color": color, "ls": (0, (5, 2)), "lw": 1.4, "ms": 8, **hollow}
        times.plot(xs, ys["predicted"], **dashed, zorder=3)
        _sample(board, below - 0.22 * place, f"{name}, predicted", dashed)
        middle, ends = ys["measured"] / ys["predicted"], []
        for key, sign in (("low", -1), ("high", 1)):
            ends.append(sign * (ys[key] / ys["predicted"] - middle))
        dots = {"color": color, "marker": marker, "ls": "none", **filled}
        band = {"ecolor": color, "elinewidth": 2.2, "capsize": 5, "capthick": 2.2}
        ratios.errorbar(beside, middle, yerr=ends, **dots, **band)
    draw.write(board, left, high + tall + 0.14, "time", weight="bold")
    heading = "measured / predicted, with the A/A band of measuring"
    draw.write(board, left, low + tall + 0.14, heading, weight="bold")
    draw.write(board, left + width, low - 0.42, "size of the tensor", ha="right")
    said = " ".join(_prediction_in_words(*curve) for curve in curves.items())
    picture.summary = f"{title.rstrip('.')}. {said}"
    return picture


def _ratio_ticks(axis: Axes) -> None:
    """Ticks for ratios that are close to each other: few powers of ten among them."""
    low, high = axis.get_ylim()
    if high < 6 * low:
        axis.set_yscale("linear")
        axis.set_ylim(low, high)
        axis.yaxis.set_major_locator(draw.round_ticks(5))
        axis.yaxis.set_major_formatter(lambda ratio, _: f"{draw.number(ratio, 3)}×")


def _sample(board: Axes, y: float, words: str, looks: dict[str, Any]) -> None:
    """One line of the key: how a line looks, and the words for it."""
    board.plot([MARGIN, MARGIN + 0.2, MARGIN + 0.4], [y] * 3, markevery=[1], **looks)
    draw.write(board, MARGIN + 0.5, y, draw.cut(words, 2.8, SMALL), color=QUIET)


def _prediction_in_words(name: str, points: Sequence[Mapping[str, Any]]) -> str:
    def off(point: Mapping[str, Any]) -> float:
        return abs(np.log(point["measured"] / point["predicted"]))

    ratios = [point["measured"] / point["predicted"] for point in points]
    inside = sum(
        point["low"] <= point["predicted"] <= point["high"] for point in points
    )
    worst = max(points, key=off)
    return (
        f"{name}: measured / predicted from {draw.number(min(ratios), 3)} to "
        f"{draw.number(max(ratios), 3)}; the prediction is within the A/A band at "
        f"{inside} of {draw.count(len(points), 'size')}. Farthest off at "
        f"{draw.byte_size(worst['nbytes'])}: predicted "
        f"{draw.duration(worst['predicted'])}, measured "
        f"{draw.duration(worst['measured'])} (A/A {draw.duration(worst['low'])} to "
        f"{draw.duration(worst['high'])})."
    )


# --- what both take -------------------------------------------------------------------


def _curves(
    rows: Sequence[Mapping[str, Any]], x: str, most: int = len(_CURVES)
) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each name, in the order of x."""
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        curves.setdefault(str(row["name"]), []).append(row)
    if not 1 <= len(curves) <= most:
        raise ValueError(
            f"rows are of {draw.count(len(curves), 'name')}: expected 1 to {most}."
        )
    return {name: sorted(points, key=lambda p: p[x]) for name, points in curves.items()}


def _chart(
    picture: Picture,
    place: tuple[float, float, float, float],
    edges: tuple[float, float],
    values: Sequence[float],
    say: Callable[[float], str],
) -> Axes:
    """Axes for values by size, both logarithmic."""
    axis = draw.chart(picture, *place)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(*edges)
    axis.set_ylim(min(values) / 1.25, max(values) * 1.25)
    draw.log_ticks(axis.set_xticks, edges, draw.byte_size, 8)
    draw.log_ticks(axis.set_yticks, axis.get_ylim(), say, 6)
    axis.minorticks_off()
    draw.grid(axis)
    return axis


def _key(
    board: Axes, lines: Sequence[Sequence[str]], names: Sequence[str], top: float
) -> None:
    """Marker and word of each curve."""
    for place, line in enumerate(lines):
        x, y = MARGIN, top - 0.22 * place
        for name in line:
            looks = _CURVES[names.index(name)]
            sample = {"ms": 6, "mec": INK, "mew": 0.5, "lw": 1.6, **looks}
            board.plot([x, x + 0.1, x + 0.2], [y] * 3, markevery=[1], **sample)
            draw.write(board, x + 0.28, y, draw.cut(name, 3.0, SMALL), color=QUIET)
            x += draw.key_entry(name)
