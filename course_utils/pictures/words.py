"""Numbers and lists in words, as pictures and their summaries say them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from course_utils.theory import costs


def listed(words: Iterable[object]) -> str:
    """Words as a list in a sentence: a, b and c."""
    *most, last = [str(word) for word in words] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: 1 rank, 2 ranks, 1,024 ranks."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def sentence(words: str) -> str:
    """The words with a capital letter and a full stop."""
    return f"{words[0].upper()}{words[1:]}."


def number(value: float, digits: int = 4) -> str:
    """A value with few significant digits: 3, 0.25, 1.235, 2e-05, 1.2e+09."""
    if isinstance(value, int) and abs(value) < 10**7:
        return str(value)
    text = f"{value + 0.0:.{digits}g}"  # + 0.0 turns -0.0 into 0
    return f"{value:.0f}" if "e" in text and 1 <= abs(value) < 1e7 else text


def spoken(value: float, digits: int = 4) -> str:
    """A value for a sentence: from a thousand on, whole and with commas."""
    if 1e3 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return number(value, digits)


def shown(count: int, limit: int) -> list[int | None]:
    """Which of `count` things to draw in `limit` places; None stands for "…"."""
    if count <= limit:
        return list(range(count))
    return [*range(limit - 2), None, count - 1]


_TIMES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
_BYTES = {"GB": costs.GB, "MB": costs.MB, "kB": costs.KB, "B": 1}
_MEMORY = {"TiB": costs.TiB, "GiB": costs.GiB, "MiB": costs.MiB, "KiB": costs.KiB}


def _largest(amount: float, units: Mapping[str, float]) -> tuple[str, float]:
    """The first unit of which there is at least one, or the last unit; and its size."""
    reached = ((unit, size) for unit, size in units.items() if amount >= size)
    return next(reached, [*units.items()][-1])


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit in which a time is easy to read, and its length in seconds."""
    return _largest(seconds or 1.0, _TIMES)


def binary_unit(nbytes: float) -> tuple[str, float]:
    """The unit in which an amount of memory is easy to read, and its bytes."""
    return _largest(nbytes, _MEMORY | {"B": 1})


def decimal_unit(nbytes: float) -> tuple[str, float]:
    """The decimal unit in which an amount of memory is easy to read, and its bytes."""
    return _largest(nbytes, _BYTES)


def speed(value: float) -> str:
    """A bandwidth: 3.35 TB/s, 0.117 GB/s."""
    unit, size = ("TB/s", 1e12) if value >= 1e12 else ("GB/s", 1e9)
    return f"{number(value / size, 3)} {unit}"


def byte_size(nbytes: float) -> str:
    """A size in decimal units: 4 B, 64 kB, 1.05 MB, 14 GB."""
    unit, size = _largest(nbytes, {"TB": costs.TB} | _BYTES)
    return f"{number(nbytes / size, 3)} {unit}"


def duration(seconds: float) -> str:
    """A time with three digits at most: 5 µs, 31.1 ms, 1.12 s, 0 s."""
    if not seconds:
        return "0 s"
    rounded_up = seconds / 0.9995  # 999.6 µs are "1 ms"
    unit, size = _largest(rounded_up, _TIMES | {"ns": 1e-9})
    return f"{number(seconds / size, 3)} {unit}"


# --- what came, and whether it can be drawn -------------------------------------


def whole(value: object, what: str, least: int = 1, most: float = math.inf) -> int:
    """`value` as a Python number, if it is a whole one from `least` to `most`."""
    number = value.item() if hasattr(value, "item") else value
    if type(number) is not int or not least <= number <= most:
        end = "up" if most == math.inf else f"to {most:,}"
        raise ValueError(
            f"{what} is {number!r}: expected a whole number from {least} {end}."
        )
    return number


def finite(value: object, what: str, *, above: float | None = None) -> float:
    """`value` as a Python number, if it can be drawn; with `above`, one above that."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{what} is {value!r}: expected a number.")
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}: only a finite number can be drawn.")
    if above is not None and number <= above:
        raise ValueError(f"{what} is {number}: expected more than {above:g}.")
    return number


def not_negative(value: object, what: str) -> float:
    """`value` as a Python number, if it is 0 or more."""
    number = finite(value, what)
    if number < 0:
        raise ValueError(f"{what} is {number}: expected 0 or more.")
    return number


def few(things: Sequence[Any] | Mapping[Any, Any], what: str, most: int) -> None:
    """Refuse no thing, and more things than one picture can show."""
    if not 1 <= len(things) <= most:
        raise ValueError(f"There are {len(things)} {what}: expected 1 to {most}.")
