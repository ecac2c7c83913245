"""What virtual GPUs write down: memory, transfers, a timeline. No torch in here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real

from course_utils.theory import costs

# --- units ----------------------------------------------------------------------------

_BYTES = {
    "B": 1,
    **{f"{p}B": getattr(costs, f"{p}B") for p in ("K", "M", "G", "T")},
    "kB": costs.KB,
    **{f"{p}iB": getattr(costs, f"{p}iB") for p in ("K", "M", "G", "T")},
}
_BITS = {"Mb": costs.gigabits(1e-3), "Gb": costs.gigabits(1), "Tb": costs.gigabits(1e3)}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_FLOPS = {f"{p}FLOP": x for p, x in zip("MGTP", (1e6, 1e9, 1e12, 1e15), strict=True)}

# What an argument measures -> (units, an example).
_QUANTITIES = {
    "size": (_BYTES, "'16 GiB'"),
    "speed": ({f"{u}/s": x for u, x in {**_BYTES, **_BITS}.items()}, "'25 GB/s'"),
    "time": (_TIME, "'10 us'"),
    "compute": (
        {f"{u}{end}": x for u, x in _FLOPS.items() for end in ("/s", "S")},
        "'10 TFLOP/s'",
    ),
}


def quantity(value: object, name: str, what: str) -> float:
    """A size, speed, time or compute rate in bytes, bytes/s, seconds or FLOP/s.

        >>> quantity("16 GiB", "memory", "size")
        17179869184.0
        >>> quantity("0.5 ms", "latency", "time")
        0.0005

    Args:
        value: A text with a unit, or a number in the unit that the result has.
        name: The argument's name, for the error.
        what: `"size"`, `"speed"`, `"time"` or `"compute"`.

    Raises:
        ValueError: no such text, a number below 0, or 0 where a time may be 0 only.
    """
    units, example = _QUANTITIES[what]
    number = math.nan
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(\S+)\s*", value)
        if match and match[2] in units:
            try:
                number = float(match[1]) * units[match[2]]
            except ValueError:  # "1.2.3 GiB"
                pass
    elif isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    if not math.isfinite(number) or number < 0 or not (number or what == "time"):
        raise ValueError(
            f"{name} is {value!r}: expected a {what} such as {example} "
            f"(units: {', '.join(units)})."
        )
    return number


def size_in_words(nbytes: float) -> str:
    """`1536` -> `"1.50 KiB"`, as PyTorch writes sizes in its own messages."""
    if nbytes <= costs.KiB:
        return f"{int(nbytes)} bytes"
    for unit in ("KiB", "MiB"):
        if nbytes <= 1024 * getattr(costs, unit):
            return f"{nbytes / getattr(costs, unit):.2f} {unit}"
    return f"{nbytes / costs.GiB:.2f} GiB"


def time_in_words(seconds: float) -> str:
    """`0.00012` -> `"120 us"`."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, size = next((entry for entry in units if seconds >= entry[1]), units[-1])
    return f"{seconds / size:.4g} {unit}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Text in columns: the first to the left, all others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if not place else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


# --- memory ---------------------------------------------------------------------------

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
ACTIVATIONS, OTHER = "activations", "other"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes.

    Attributes:
        device: `"cuda:0"`, ...
        capacity: How much it has.
        now: What its tensors hold.
        peak: The most they ever held together, since `reset_peak`.
        now_by_kind: `now`, split into `KINDS`: parameters, gradients, optimizer state,
            activations (what ops computed and nothing else claims), other (inputs,
            buffers, what was made or copied there by hand).
        peak_by_kind: The same at the moment of the peak.
    """

    device: str
    capacity: int
    now: int
    peak: int
    now_by_kind: Mapping[str, int]
    peak_by_kind: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """The memory of all devices; prints as a table. Index it with a number or a name.

    `memory[0]` and `memory["cuda:0"]` are the same row.
    """

    rows: tuple[DeviceMemory, ...]

    def __iter__(self) -> Iterator[DeviceMemory]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, device: int | str) -> DeviceMemory:
        if isinstance(device, int):
            return self.rows[device]
        for row in self.rows:
            if row.device == str(device):
                return row
        names = ", ".join(row.device for row in self.rows)
        raise KeyError(f"There is no {str(device)!r} here. There are: {names}.")

    @property
    def now(self) -> dict[str, int]:
        """Device -> bytes in use."""
        return {row.device: row.now for row in self.rows}

    @property
    def peak(self) -> dict[str, int]:
        """Device -> most bytes in use at one time."""
        return {row.device: row.peak for row in self.rows}

    def __str__(self) -> str:
        most = max((row.peak for row in self.rows), default=0)
        unit = next((u for u in ("GiB", "MiB") if most >= getattr(costs, u)), "KiB")
        size = getattr(costs, unit)
        lines = []
        for row in self.rows:
            for when, total, kinds in (
                ("now", row.now, row.now_by_kind),
                ("peak", row.peak, row.peak_by_kind),
            ):
                parts = [f"{kinds[kind] / size:,.2f}" for kind in KINDS]
                name = row.device if when == "now" else ""
                lines.append([name, when, f"{total / size:,.2f}", *parts])
        return _table([unit, "", "all", *KINDS], lines)

    __repr__ = __str__


# --- transfers ------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """One copy from one device to another.

    Attributes:
        source, destination: `"cpu"`, `"cuda:0"`, ...
        bytes: How many.
        seconds: What it would take: `latency + bytes / bandwidth`.
        phase: `"forward"`, `"backward"` (while autograd runs), `"optimizer"` (in
            `optimizer.step()`) or `"setup"` (a whole module moves, a file is loaded).
        module: Name of the module whose forward caused it, for example
            `"ModelParallelResNet50.seq2"`; in a backward the module that had moved
            the tensor in its forward; `""` outside of any module.
        kind: What moved it: `"to"`, `"copy_"`, `"item"`, `"broadcast"`, `"scatter"`,
            `"gather"`, `"reduce"`, `"index"`, `"load"`.
        label: What the `gpus.label(...)` around it said, else `""`.
        start: When, in seconds on the clock of `gpus.timeline()`.
    """

    source: str
    destination: str
    bytes: int
    seconds: float
    phase: str
    module: str = ""
    kind: str = "to"
    label: str = ""
    start: float = 0.0

    def __str__(self) -> str:
        of = f" of {self.module}" if self.module else ""
        return (
            f"{self.source} -> {self.destination}: {size_in_words(self.bytes)}, "
            f"{time_in_words(self.seconds)}, `{self.kind}` in the {self.phase}{of}"
        )


# --- timeline -------------------------------------------------------------------------


@dataclass
class Interval:
    """What one device did from `start` to `stop`, in modelled seconds.

    Attributes:
        kind: `"compute"`, `"send"` or `"receive"`. A copy between two devices is one
            interval on each.
        phase, label: As in `Transfer`.
        module: The module whose forward began it (`""` in a backward).
        ops: How many ops were joined into it.
    """

    device: str
    start: float
    stop: float
    kind: str
    phase: str = "forward"
    label: str = ""
    module: str = ""
    ops: int = 1

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Timeline:
    """When each device worked; prints as a table.

    Attributes:
        intervals: Device -> its `Interval`s in order of time. Every virtual GPU has an
            entry, idle or not; `"cpu"` has one if it did something.
        seconds: From the start to the end of the last interval.
    """

    intervals: Mapping[str, tuple[Interval, ...]]
    seconds: float = field(default=0.0)

    def busy(self, device: int | str, kind: str | None = None) -> float:
        """Seconds in which a device worked, with one `kind` only if that is given."""
        name = f"cuda:{device}" if isinstance(device, int) else str(device)
        if name not in self.intervals:
            raise KeyError(
                f"There is no {name!r} here. There are: {', '.join(self.intervals)}."
            )
        return math.fsum(
            i.seconds for i in self.intervals[name] if kind in (None, i.kind)
        )

    def busy_share(self, device: int | str) -> float:
        """`busy` as a share of `seconds`, from 0 to 1."""
        return self.busy(device) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        rows = []
        for device in self.intervals:
            computed = self.busy(device, "compute")
            moved = self.busy(device) - computed
            idle = self.seconds - computed - moved
            rows.append(
                [
                    device,
                    time_in_words(computed) if computed else "0 s",
                    time_in_words(moved) if moved else "0 s",
                    time_in_words(idle) if idle > 1e-9 else "0 s",
                    f"{self.busy_share(device):.1%}",
                ]
            )
        whole = f"of {time_in_words(self.seconds) if self.seconds else '0 s'}"
        return _table([whole, "compute", "transfer", "idle", "busy"], rows)

    __repr__ = __str__
