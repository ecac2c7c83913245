"""Training curves: loss and accuracy, differences between runs, learning rates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from course_utils.pictures import charts, draw, words
from course_utils.pictures.charts import Axis, Curve, Panel
from course_utils.pictures.draw import Picture

# From thick and pale to thin and dark, so that curves which lie on top of each other
# all stay visible.
_NESTED: tuple[dict[str, Any], ...] = (
    {"color": draw.PURPLE, "lw": 7.0, "marker": "o", "ms": 11, "mew": 0},
    {"color": draw.GREEN, "lw": 4.6, "marker": "s", "ms": 7.5, "mew": 0},
    {"color": draw.BLUE, "lw": 2.6, "marker": "D", "ms": 5, "mew": 0},
    {"color": draw.INK, "lw": 1.1, "marker": ".", "ms": 4, "ls": "--"},
    {"color": draw.LINE, "lw": 1.4, "marker": "x", "ms": 4},
)
_PANELS = {"loss": "loss", "test_accuracy": "test accuracy (%)"}


def _looks(runs: Mapping[str, Any], like: Sequence[str] = ()) -> Mapping[str, Mapping]:
    """The looks of each run, as far apart as their number allows."""
    words.few(runs, "runs", len(_NESTED))
    names = [str(name) for name in runs]
    several = len({*names, *like})
    thick, middle, thin, *_ = _NESTED
    looks = {1: [thin], 2: [thick, thin], 3: [thick, middle, thin]}
    return charts.by_name(names, looks.get(several, _NESTED), [*map(str, like)])


@draw.picture
def training_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Picture:
    """Loss and test accuracy by epoch, one curve a run.

    Where the loss of a run grows far beyond that of the others, its axis is
    logarithmic. A loss may be nan or infinite: the curve ends before it, with a cross.

    Args:
        runs: From a run's name, such as "2 ranks", to its metrics, one dict an epoch
            with "epoch", "loss" and "test_accuracy" (0 to 1). At most five runs.

    Raises:
        ValueError: no run, or more than five.
    """
    looks = _looks(runs)
    columns = {str(name): _columns(rows) for name, rows in runs.items()}
    epochs = sorted({epoch for c in columns.values() for epoch in c["epoch"]})
    few = {epoch: words.number(epoch) for epoch in epochs}
    x = Axis("epoch", ticks=few if len(few) <= 8 else None, whole=True)
    panels = []
    for what, heading in _PANELS.items():
        log = what == "loss" and _diverges([c["loss"] for c in columns.values()])
        lines = [
            Curve(name, column["epoch"], column[what], looks[name])
            for name, column in columns.items()
        ]
        heading += " (logarithmic axis)" * log
        panels.append(Panel(heading, lines, x, Axis(log=log)))
    note = _differences(columns)
    picture = charts.curves(
        "Training, epoch by epoch", panels, note=note, beside=True, tall=2.05
    )
    ends = "; ".join(
        f"{name}: loss from {words.number(column['loss'][0], 3)} to "
        f"{words.number(column['loss'][-1], 3)}, test accuracy "
        f"{column['test_accuracy'][-1]:.1f} % after "
        f"{words.count(len(column['epoch']), 'epoch')}"
        for name, column in columns.items()
    )
    picture.summary = f"{ends}. {note}".strip()
    return picture


def _columns(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    """The metrics of one run as columns, accuracy in percent."""
    return {
        "epoch": [row["epoch"] for row in metrics],
        "loss": [float(row["loss"]) for row in metrics],
        "test_accuracy": [100 * row["test_accuracy"] for row in metrics],
    }


def _diverges(losses: Sequence[Sequence[float]]) -> bool:
    """Whether a value is so far above where the best run began that it hides all."""
    finite = [[loss for loss in run if math.isfinite(loss)] for run in losses]
    values = [loss for run in finite for loss in run]
    starts = [run[0] for run in finite if run]
    return bool(values) and min(values) > 0 and max(values) > 10 * min(starts)


def _differences(columns: Mapping[str, Mapping[str, list]]) -> str:
    """How far apart two runs are at most, or more runs from the first; "" for one."""
    lost = []
    for name, column in columns.items():
        pairs = zip(column["epoch"], column["loss"], strict=True)
        epoch = next((epoch for epoch, loss in pairs if not math.isfinite(loss)), None)
        if epoch is not None:
            lost.append(f"The loss of {name} is not finite from epoch {epoch} on.")
    if lost:
        return " ".join(lost)
    first, *others = columns.values()
    if not others:
        return ""
    if any(other["epoch"] != first["epoch"] for other in others):
        return "The runs are not of the same epochs."
    if all(other == first for other in others):
        return "The runs are equal in every epoch."
    gaps = {
        name: [
            max(abs(a - b) for a, b in zip(first[what], column[what], strict=True))
            for what in _PANELS
        ]
        for name, column in list(columns.items())[1:]
    }
    if len(gaps) > 1:
        each = [f"{name}: {words.number(loss, 2)}" for name, (loss, _) in gaps.items()]
        start = next(iter(columns))
        return (
            f"Largest difference in loss from {start} in an epoch: {'; '.join(each)}."
        )
    ((loss, accuracy),) = gaps.values()
    return (
        "Largest difference between the runs in one epoch: loss "
        f"{words.number(loss, 2)}, test accuracy "
        f"{words.number(accuracy, 2)} percentage points."
    )


# --- differences ----------------------------------------------------------------------

_SMALL = 1e-6  # with which differences are compared


@draw.picture
def difference_by_step(runs: Mapping[str, Sequence[float]]) -> Picture:
    """How far a run's parameters are from a reference after each step.

    The axis is logarithmic, with a dashed line at 1e-6. A difference of exactly 0 has
    no place on it and gets a line of its own, below; so does one that is not finite,
    above.

    Args:
        runs: From a run's name to the largest absolute difference after step 1, 2, ...
            At most five runs.

    Raises:
        ValueError: no run, or more than five.
    """
    looks = _looks(runs)
    columns = {str(name): [*map(float, gaps)] for name, gaps in runs.items()}
    values = [v for column in columns.values() for v in column]
    powers = [math.log10(v) for v in [*values, _SMALL] if 0 < v < math.inf]
    low = math.floor(min(powers) - 0.1)
    high = max(math.ceil(max(powers) + 0.1), low + 2)
    unit = (high - low) / 10
    every = math.ceil((high - low) / 5)
    ticks = {float(p): f"1e{p:+03d}" for p in range(low, high + 1, every)}
    edges, bands = [low - unit / 10, high + unit / 10], []
    if 0.0 in values:
        edges[0] = low - 2 * unit
        bands.append((edges[0], low))
        ticks[low - unit] = "0"
    if not all(map(math.isfinite, values)):
        edges[1] = high + 2 * unit
        bands.append((high, edges[1]))
        ticks[high + unit] = "not finite"

    def place(value: float) -> float:
        if value == 0:
            return low - unit
        return math.log10(value) if math.isfinite(value) else high + unit

    lines = [
        Curve(name, range(1, len(column) + 1), [*map(place, column)], looks[name])
        for name, column in columns.items()
    ]
    heading = f"largest absolute difference (line across: {words.number(_SMALL, 2)})"
    y = Axis(edges=tuple(edges), ticks=ticks)
    marks = [("y", math.log10(_SMALL), draw.LIMIT)]
    panel = Panel(heading, lines, Axis("step", whole=True), y, marks, bands=bands)
    note = _against(columns)
    title = "Difference from one process, step by step"
    picture = charts.curves(title, [panel], note=note)
    said = "; ".join(
        f"{name}: {words.number(column[0], 2)} after step 1, "
        f"{words.number(column[-1], 2)} after step {len(column)}"
        for name, column in columns.items()
    )
    picture.summary = f"{title}. {said}. {note}".strip()
    return picture


def _against(columns: Mapping[str, Sequence[float]]) -> str:
    """Which runs stay within the limit, and from which step on others do not."""
    same = [name for name, column in columns.items() if not any(column)]
    parts = [f"Always 0: {words.listed(same)}."] if same else []
    above = {
        name: next((i for i, v in enumerate(column, 1) if not v <= _SMALL), None)
        for name, column in columns.items()
        if name not in same
    }
    said = words.number(_SMALL, 2)
    below = [name for name, step in above.items() if step is None]
    if below:
        parts.append(f"Never above {said}: {words.listed(below)}.")
    late = [
        f"at step {step}: {words.listed(name for name in above if above[name] == step)}"
        for step in sorted({step for step in above.values() if step})
    ]
    if late:
        limit = "it" if below else said
        parts.append(f"First above {limit} {'; '.join(late)}.")
    return " ".join(parts)


# --- learning rates -------------------------------------------------------------------


@draw.picture
def learning_rates(
    runs: Mapping[str, Sequence[float]],
    *,
    title: str = "Learning rate",
    like: Sequence[str] = (),
) -> Picture:
    """Schedules of the learning rate, such as a warm-up to a scaled rate.

    Args:
        runs: From a run's name to its learning rate in step 0, 1, 2, ... At most five.
        title: What the picture shows.
        like: The runs of another picture, whose looks these have here, too.

    Raises:
        ValueError: no run, or more than five.
    """
    looks = _looks(runs, like)
    lines, said = [], []
    for name, rates in runs.items():
        lines.append(Curve(str(name), range(len(rates)), rates, looks[str(name)]))
        said.append(_schedule(str(name), rates))
    low, high = (
        edge([0, *(y for line in lines for y in line.ys)]) for edge in (min, max)
    )
    y = Axis(edges=(1.08 * low, 1.08 * high or 1.0))
    panel = Panel("learning rate", lines, Axis("step", whole=True), y)
    picture = charts.curves(title, [panel])
    picture.summary = f"{title}. {'; '.join(said)}."
    return picture


def _schedule(name: str, rates: Sequence[float]) -> str:
    if len(set(rates)) == 1:
        return f"{name}: {words.number(rates[0])} in every step"
    peak = max(rates)
    said = f"{name}: {words.number(rates[0])} in step 0"
    at = rates.index(peak)
    if at not in (0, len(rates) - 1):
        said += f", {words.number(peak)} from step {at}"
    return f"{said}, {words.number(rates[-1])} in step {len(rates) - 1}"
