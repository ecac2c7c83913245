"""Read the learner's code before it runs, and pack it for the ranks."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import sys
import textwrap
import types
from typing import Any

import cloudpickle

from course_utils.ranks.report import is_learners
from course_utils.tasks.task import core_of


class CannotPack(Exception):
    """The answer, or something it uses, can't be copied to another process."""


def pack(answer: Any) -> bytes:
    """The answer with all the learner's code that it uses, as bytes.

    Raises:
        CannotPack: says which of the names it uses is at fault.
    """
    # Code of a notebook goes by value by itself. So must a module of the learner's:
    # what counts is the version in this kernel, not the file as it is now.
    module = sys.modules.get(getattr(answer, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    by_value = file is not None and is_learners(file) and module.__name__ != "__main__"
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return _dumps(answer)
    except Exception as error:
        for name, value in used_names(answer).items():
            try:
                _dumps(value)
            except Exception as reason:
                raise CannotPack(
                    OF_THE_NOTEBOOK.get(name)
                    or OF_THE_COURSE.get(type(value).__name__, "").format(name)
                    or f"It uses `{name}` ({type(value).__name__}), which can't be "
                    f"copied to another process: {reason}. Create it inside the "
                    "function."
                ) from None
        raise CannotPack(f"It can't be copied to another process: {error}.") from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


MAGIC = (
    "It uses a magic (a line that begins with % or !) or get_ipython(). These belong "
    "to the notebook: take it out of the function."
)
EXIT = "It calls exit() or quit(). A function ends with `return`."
# The notebook's own, by class: to make them inside the function would be wrong, too.
OF_THE_COURSE = {
    "Ranks": "It uses `{}`, the notebook's ranks. Your function runs in a process of "
    "its own. There `dist` knows the rank and the world size.",
    "VirtualGPUs": "It uses `{}`, the notebook's virtual GPUs. The check has others: "
    "leave it out.",
}
OF_THE_NOTEBOOK = {"get_ipython": MAGIC, "exit": EXIT, "quit": EXIT}

_Cached = type(functools.cache(len))


class _Pickler(cloudpickle.Pickler):
    """Takes the learner's functions by value also where they are cached."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Cached):
            module = sys.modules.get(obj.__module__)
            is_there = getattr(module, obj.__qualname__, None) is obj
            if not is_there or is_learners(getattr(module, "__file__", "<ipython>")):
                return functools.cache, (obj.__wrapped__,)
        return super().reducer_override(obj)


def _dumps(value: Any) -> bytes:
    packed = io.BytesIO()
    _Pickler(packed).dump(value)
    return packed.getvalue()


def functions_of(answer: Any) -> list[types.FunctionType]:
    """The function itself, or the methods of a class or of an object's class."""
    core = core_of(answer)
    with contextlib.suppress(ValueError):  # it wraps itself
        core = inspect.unwrap(core)
    if isinstance(core, types.MethodType):
        core = core.__func__
    if isinstance(core, types.FunctionType):
        return [core]
    owner = core if isinstance(core, type) else type(core)
    return [v for v in vars(owner).values() if isinstance(v, types.FunctionType)]


def used_names(answer: Any) -> dict[str, Any]:
    """The global and enclosing variables that the learner's code uses."""
    found: dict[str, Any] = {}
    for function in functions_of(answer):
        code = function.__code__
        for name, cell in zip(
            code.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # not assigned yet
                found[name] = cell.cell_contents
        for name in _names_in(code) & function.__globals__.keys():
            found[name] = function.__globals__[name]
    return found


def _names_in(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def uses(answer: Any, name: str) -> bool:
    """Does the learner's code ask for something of this name?"""
    return any(name in _names_in(f.__code__) for f in functions_of(answer))


def is_unchanged(answer: Any, given: str) -> bool:
    """Is every function of the answer still as given, but for comments and docs?"""
    known = {_code_of(n) for n in ast.walk(ast.parse(given)) if isinstance(n, _DEFS)}
    functions = functions_of(answer) if given else []
    try:
        sources = [textwrap.dedent(inspect.getsource(f)) for f in functions]
        codes = {_code_of(ast.parse(source).body[0]) for source in sources}
    except (OSError, TypeError, SyntaxError):  # the source is not known
        return False
    return bool(codes) and codes <= known


_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _code_of(node: ast.AST) -> str:
    """A function's statements as text, without its docstring."""
    if not isinstance(node, _DEFS):
        return ast.dump(node)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return ast.dump(node.args) + "".join(map(ast.dump, body))
