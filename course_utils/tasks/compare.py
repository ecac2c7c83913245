"""Compare what came back with what was expected, and say the difference in words."""

from __future__ import annotations

import inspect
import math
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import torch

from course_utils.tasks.task import AtMost

FEW = 6  # values of a tensor or a list that are shown one by one
RETURNED_NONE = "It returned None: did you forget `return`?"
MANY_DIGITS = 30  # of a whole number that is still shown in full


# What the learner probably forgot, by the kind of what came back.
ADVICE = {
    "coroutine": "Write `def`, not `async def`.",
    "function": "Did you forget the parentheses of a call?",
    "generator": "Use `return`, not `yield`, and `[... for ...]`, not `(... for ...)`.",
    "Work": "An asynchronous call returns at once: `wait()` for it, then return the "
    "tensor.",
}


@dataclass(frozen=True)
class Strange:
    """Stands for a returned object that is no tensor, number, text or list of these.

    Such objects stay on their rank: many can't be copied to another process. Of a
    NumPy array the numbers are kept, as a tensor.
    """

    kind: str
    array: torch.Tensor | None = field(default=None, compare=False)

    def __str__(self) -> str:
        if self.kind in ("coroutine", "function", "generator", "set", "NumPy array"):
            return f"a {self.kind}"
        return f"an object of type {self.kind}"


def plain(value: Any, depth: int = 8) -> Any:
    """A copy of a result that holds nothing but plain data, on the CPU.

    Tensors lose their graph and get memory of their own, so that what happens to the
    originals later changes nothing. Other objects become :class:`Strange`.
    """
    if value is None or isinstance(value, bool) or type(value) is Strange:
        return value
    if type(value) is AtMost:
        return AtMost(plain(value.value))
    # Past what a class of the learner's, or an Enum, makes of str() and ==.
    for base, exactly in EXACTLY.items():
        if isinstance(value, base):
            return exactly(value)
    if type(value) in (Fraction, Decimal):
        return float(value)
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            if value.is_sparse or value.is_quantized or value.is_meta:
                return Strange(f"{value.layout} tensor on {value.device}")
            copy = value.detach().to("cpu", copy=True).contiguous()
            return copy.as_subclass(torch.Tensor)
    if depth and isinstance(value, dict):
        names = [k if type(k) in (bool, int, float, str) else repr(k) for k in value]
        items = [plain(item, depth - 1) for item in value.values()]
        return dict(zip(names, items, strict=True))
    if depth and isinstance(value, (list, tuple)):
        items = [plain(item, depth - 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        if not value.ndim:
            return value.item()
        is_of_numbers = value.dtype.kind in "biufc"
        return Strange(
            "NumPy array", torch.from_numpy(value.copy()) if is_of_numbers else None
        )
    if inspect.iscoroutine(value):
        value.close()  # else Python warns that nobody has waited for it
    return Strange(type(value).__name__)


EXACTLY = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
}


# ------------------------------------------------------------------------- comparing


def difference(got: Any, want: Any, tolerance: float) -> str | None:
    """None if ``got`` is right, else a sentence about what is different.

    The sentence is "" where showing the two values says it all. A number may come as
    int, float, or tensor or array of one element; a list may come as tuple, or as
    tensor or array of one dimension.
    """
    if got is None and want is not None:
        return RETURNED_NONE
    if isinstance(got, AtMost) and isinstance(want, AtMost):
        return None if got.value <= want.value * (1 + tolerance) else ""
    is_plain = isinstance(want, (int, float, list, tuple))
    if isinstance(got, Strange) and got.array is not None and is_plain:
        got = got.array
    if isinstance(got, Strange):
        if got == want:
            return None
        advice = ADVICE.get(got.kind, "")
        return f"That is {got}; {kind(want)} was expected. {advice}".rstrip()
    if isinstance(want, torch.Tensor):
        return _tensor_difference(got, want, tolerance)
    if isinstance(want, bool) and isinstance(got, torch.Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(want, (int, float)) and not isinstance(want, bool):
        return _number_difference(got, want, tolerance)
    if isinstance(want, (list, tuple)):
        return _list_difference(got, want, tolerance)
    if isinstance(want, dict):
        return _dict_difference(got, want, tolerance)
    if type(got) is not type(want):
        return _other_kind(got, want)
    if got == want:
        return None
    if isinstance(want, str) and "".join(got.split()) == "".join(want.split()):
        return "Only the spaces are different."
    if isinstance(want, str) and got.lower() == want.lower():
        return "Only capital and small letters are different."
    return ""


def _other_kind(got: Any, want: Any) -> str:
    return f"That is {kind(got)}; {kind(want)} was expected."


def _number_difference(got: Any, want: float, tolerance: float) -> str | None:
    if isinstance(got, torch.Tensor) and got.numel() == 1 and got.dtype != torch.bool:
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return _other_kind(got, want)
    if isinstance(want, int):
        return None if got == want else _almost(got)
    try:
        got = float(got)
    except OverflowError:  # a whole number of more than 308 digits
        return ""
    close = math.isclose(
        got, want, rel_tol=tolerance, abs_tol=0.0 if want else tolerance
    ) or (math.isnan(got) and math.isnan(want))
    return None if close else ""


def _almost(got: float) -> str:
    """What to say to 2.0000000000000018 where 2 was expected."""
    has_fraction = got != got // 1 and math.isfinite(got)
    if has_fraction and math.isclose(got, round(got), rel_tol=1e-6):
        return (
            f"It is {got!r}, which is not a whole number. Dividing with `/` leaves "
            "rounding errors: work with whole numbers (`//` and `%`)."
        )
    return ""


def _tensor_difference(got: Any, want: torch.Tensor, tolerance: float) -> str | None:
    is_number = isinstance(got, (int, float)) and not isinstance(got, bool)
    if want.dim() == 0 and is_number:
        got = torch.tensor(got, dtype=want.dtype)
    if not isinstance(got, torch.Tensor):
        return _other_kind(got, want)
    if got.shape != want.shape:
        return f"Its shape is {tuple(got.shape)}; {tuple(want.shape)} was expected."
    if got.dtype == want.dtype and torch.equal(got, want):  # mostly, and much faster
        return None
    # In a dtype that loses no digit.
    is_float = got.is_floating_point() or want.is_floating_point()
    exact = got if got.is_complex() else got.to(torch.float64 if is_float else int)
    target = want.to(exact.dtype)
    relative = tolerance if want.is_floating_point() else 0.0
    # Sums of large numbers may nearly cancel: measure against the largest value.
    finite = target[torch.isfinite(target)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    absolute = relative * (largest or 1.0)
    wrong = ~torch.isclose(exact, target, relative, absolute, equal_nan=True)
    if count := int(wrong.sum()):
        if want.numel() <= FEW:
            return ""
        index = wrong.nonzero()[0].tolist()
        is_, should = exact[tuple(index)].item(), target[tuple(index)].item()
        return (
            f"{count} of {want.numel()} values differ. The first, at index {index}, "
            f"is {show(is_)} and should be {show(should)}."
        )
    if got.dtype != want.dtype:
        return (
            f"The values are right, but its dtype is {name_of(got.dtype)}; "
            f"{name_of(want.dtype)} was expected."
        )
    return None


def _list_difference(got: Any, want: list | tuple, tolerance: float) -> str | None:
    if isinstance(got, torch.Tensor) and got.dim() == 1:
        got = got.tolist()
    if not isinstance(got, (list, tuple)):
        return _other_kind(got, want)
    if len(got) != len(want):
        items = "1 item" if len(got) == 1 else f"{len(got)} items"
        verb = "was" if len(want) == 1 else "were"
        return f"It has {items}; {len(want)} {verb} expected."
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        if (found := difference(one, other, tolerance)) is not None:
            found = found.replace(RETURNED_NONE, "It is None.")
            return f"The item at index {index} is wrong. {inside(found)}".rstrip()
    return None


def _dict_difference(got: Any, want: dict, tolerance: float) -> str | None:
    if not isinstance(got, dict):
        return _other_kind(got, want)
    missing = [key for key in want if key not in got]
    surplus = [key for key in got if key not in want]
    if missing:
        return f"The key {missing[0]!r} is missing."
    if surplus:
        return f"The key {surplus[0]!r} was not expected."
    for key, value in want.items():
        if (found := difference(got[key], value, tolerance)) is not None:
            return f"The value of {key!r} is wrong. {inside(found)}".rstrip()
    return None


def inside(found: str) -> str:
    """What differs within an item: its own items have numbers, too."""
    return re.sub(r"^The (item|value|key) ", r"In it, the \1 ", found)


def are_same(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Are they equal one by one, to the last digit?"""
    return all(map(torch.equal, tensors, others))


def is_new(result: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Has the result memory of its own?"""
    return result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


# --------------------------------------------------------------------------- showing


def kind(value: Any) -> str:
    """What sort of thing a value is, with its article: "a tensor", "text"."""
    if isinstance(value, Strange):
        return str(value)
    for types, words in (
        (type(None), "None"),
        (torch.Tensor, "a tensor"),
        (bool, "True or False"),
        ((int, float), "a number"),
        (str, "text"),
        (bytes, "bytes"),
        (tuple, "a tuple"),
        (list, "a list"),
        (dict, "a dictionary"),
    ):
        if isinstance(value, types):
            return words
    return f"an object of type {type(value).__name__}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def show(value: Any) -> str:
    """A value in a few words: short, and the same on every machine."""
    if isinstance(value, torch.Tensor):
        return _show_tensor(value)
    if isinstance(value, float):
        text = f"{value:.6g}"
        return f"{value:.1f}" if text.lstrip("-").isdigit() else text
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= 10**MANY_DIGITS:
            return f"a number of more than {MANY_DIGITS} digits"
        return str(value)
    if isinstance(value, (list, tuple)):
        items = [show(item) for item in value[:FEW]]
        if len(value) > FEW:
            items.append(f"... {len(value)} items")
        inside = ", ".join(items)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, dict):
        items = [f"{key!r}: {show(item)}" for key, item in list(value.items())[:FEW]]
        if len(value) > FEW:
            items.append(f"... {len(value)} keys")
        return "{" + ", ".join(items) + "}"
    if isinstance(value, Strange):
        if value.array is not None:
            return _show_tensor(value.array).replace("tensor", "array", 1)
        return str(value)
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return short.repr(value)


def _show_tensor(tensor: torch.Tensor) -> str:
    dtype = name_of(tensor.dtype)
    if tensor.numel() <= FEW:
        note = "" if dtype in ("float32", "int64", "bool") else f", dtype={dtype}"
        return f"tensor({_nested(tensor.tolist())}{note})"
    first = ", ".join(map(_nested, tensor.flatten()[:3].tolist()))
    return f"tensor of shape {tuple(tensor.shape)}, {dtype}: {first}, ..."


def _nested(values: Any) -> str:
    """Numbers in lists; ``4.`` for a float that is whole, as PyTorch prints it."""
    if isinstance(values, list):
        return f"[{', '.join(map(_nested, values))}]"
    text = f"{values:.5g}" if isinstance(values, float) else str(values)
    is_whole = isinstance(values, float) and text.lstrip("-").isdigit()
    return f"{text}." if is_whole else text
