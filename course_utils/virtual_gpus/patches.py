"""Putting other behaviour in the place of PyTorch's, and taking it out again.

A Python function of a module is replaced *in place*: it stays the same object and runs
other code. So a name that somebody bound before, as `from torch.cuda import
device_count` does, follows.
What is no Python function (a class or a function of C) cannot change: its name is bound
anew, in its module and in the modules of others that have imported it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

_ABSENT = object()
_UNCHANGEABLE = (type, types.BuiltinFunctionType, types.MethodDescriptorType)


def _instead(*args: Any, __instead: Callable, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    return __instead(*args, **kwargs)


_CODE = _instead.__code__
_NAMES = ("co_name", "co_qualname")  # the second from Python 3.11 on


def copy_of(function: types.FunctionType) -> types.FunctionType:
    """The function as it is now, whatever becomes of it."""
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Patches(contextlib.ExitStack):
    """What was replaced. `close()` puts everything back, the last first."""

    def __init__(self) -> None:
        super().__init__()
        self._rebound: list[tuple[Any, Any]] = []  # what cannot change, and its place
        self.callback(self._rename_back)

    def set(self, owner: Any, **values: Any) -> None:
        """Replace (or add) attributes of a module or class."""
        is_module = isinstance(owner, types.ModuleType)
        for name, value in values.items():
            before = vars(owner).get(name, _ABSENT)
            found = getattr(owner, name, _ABSENT) if is_module else before
            if isinstance(found, (staticmethod, classmethod)):
                found = found.__func__
            if isinstance(found, types.FunctionType) and callable(value):
                self._run_instead(found, value)
                continue
            self.callback(_put_back, owner, name, before)
            setattr(owner, name, value)
            if isinstance(found, _UNCHANGEABLE):
                self._rebound.append((found, value))

    def replace(self, owners: tuple, **values: Any) -> None:
        """Replace attributes wherever they are among these modules."""
        for owner in owners:
            self.set(owner, **{n: v for n, v in values.items() if hasattr(owner, n)})

    def follow(self) -> None:
        """The names that others have for what was bound anew follow."""
        _rename(self._rebound)

    def _rename_back(self) -> None:
        _rename([(value, before) for before, value in self._rebound])

    def _run_instead(self, function: types.FunctionType, value: Callable) -> None:
        code, defaults = function.__code__, function.__kwdefaults__

        def back() -> None:
            function.__code__ = code
            function.__kwdefaults__ = defaults

        self.callback(back)
        # In this order: another thread may call it at any moment.
        function.__kwdefaults__ = {**(defaults or {}), "__instead": value}
        names = {n: getattr(code, n) for n in _NAMES if hasattr(code, n)}
        function.__code__ = _CODE.replace(co_freevars=code.co_freevars, **names)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _rename(pairs: list[tuple[Any, Any]]) -> None:
    """Names in other people's modules, as `from torch import Generator` makes them."""
    known = {id(before): value for before, value in pairs}
    ours = (__package__ + ".", "torch.")
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not f"{name}.".startswith(ours):
            _exchange(vars(module), known)


def _exchange(names: dict, known: dict[int, Any]) -> None:
    for name, found in list(names.items()):
        if id(found) in known:
            names[name] = known[id(found)]
