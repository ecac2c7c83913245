"""What goes to the ranks and comes back, as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle


def pickled(value: Any, what: str) -> bytes:
    """The value as bytes, or a TypeError that names it."""
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{what} can't be sent to the ranks: {error}. "
            "Build it on the ranks instead, inside the function or cell."
        ) from None


def unpickled(rank: int, reply: dict[str, Any], what: str) -> Any:
    """The value that a rank has sent, or a TypeError that says whose it is."""
    try:
        return cloudpickle.loads(reply["payload"])
    except Exception as error:
        raise TypeError(
            f"{what} of rank {rank} can't be read in the notebook "
            f"({type(error).__name__}: {error}). "
            "Return tensors, numbers, text, lists or dictionaries."
        ) from error


def pickled_call(fn: Callable[..., Any], args: tuple, kwargs: dict) -> bytes:
    """A call as bytes, or a TypeError that names the part that can't be pickled."""
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception:
        for position, value in enumerate(args, 1):
            pickled(value, f"argument {position} (a {type(value).__name__})")
        for name, value in kwargs.items():
            pickled(value, f"argument {name} (a {type(value).__name__})")
        pickled(fn, f"the function {getattr(fn, '__name__', fn)}")
        raise
