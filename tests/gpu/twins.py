"""Run a program on a virtual or a real GPU, and compare what it has seen."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from course_utils import virtual_gpus

REAL = torch.cuda.device_count() if torch.cuda.is_available() else 0
REFUSED = "not on virtual GPUs: "

# Of a dtype: how far apart two values may be, relative and absolute.
ROUNDING = {
    "torch.float16": (1e-2, 1e-3),
    "torch.bfloat16": (3e-2, 1e-2),
    "torch.float64": (1e-6, 1e-8),
}
OF_FLOATS = (1e-3, 1e-5)  # float32; after three steps of training, too


def on_virtual(program: Callable[[], dict]) -> dict[str, Any]:
    """What a program sees on fresh virtual GPUs, whose time is that of a model.

    They are as many as there are real ones: some errors say the number.
    """
    with virtual_gpus(REAL or 1, compute="10 GFLOP/s", force=True):
        return _run(program)


def on_real(program: Callable[[], dict]) -> dict[str, Any]:
    """The same on the first real GPU."""
    torch.backends.cudnn.allow_tf32 = False  # it rounds to 10 bits
    _warm_up()
    return _run(program)


def _warm_up() -> None:
    """Let cuBLAS have its workspaces, in the thread of the backward pass as well."""
    layer = torch.nn.Linear(64, 64, bias=False).cuda()
    layer(torch.ones(64, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()


def _run(program: Callable[[], dict]) -> dict[str, Any]:
    torch.manual_seed(0)
    gc.collect()  # no tensor of an earlier program is freed while this one counts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return seen(program())


def seen(value: Any) -> Any:
    """What is compared, and can be written as JSON."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu()
        if numbers.dtype in (torch.float16, torch.bfloat16):
            numbers = numbers.float()
        return {
            "device": str(value.device),
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "values": numbers.flatten().tolist(),
        }
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {str(name): seen(inner) for name, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(seen, value))
    if isinstance(value, (list, tuple)):
        return [seen(inner) for inner in value]
    if isinstance(value, type):
        return value.__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """The observations, by name, in which two runs differ."""
    for name in one | other:
        both = name in one and name in other
        if not both or not alike(one[name], other[name]):
            yield name


def alike(one: Any, other: Any, rounding: tuple[float, float] = OF_FLOATS) -> bool:
    """Equal, but for the rounding of numbers that are not whole."""
    if isinstance(one, dict) and isinstance(other, dict):
        rounding = ROUNDING.get(str(one.get("dtype")), OF_FLOATS)
        return one.keys() == other.keys() and all(
            alike(one[name], other[name], rounding) for name in one
        )
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(alike(a, b, rounding) for a, b in pairs)
    if isinstance(one, float) and isinstance(other, float):
        relative, absolute = rounding
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=relative, abs_tol=absolute)
    return type(one) is type(other) and one == other


def is_refused(value: Any) -> bool:
    """Has a virtual GPU said that it does not have this?"""
    return isinstance(value, list) and REFUSED in str(value[-1:])
