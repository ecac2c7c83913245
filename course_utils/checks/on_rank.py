"""What a check runs on a rank: the learner's code, with nothing else in its way."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import os
import pickle
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch

from course_utils.checks.compare import plain
from course_utils.ranks.report import is_learners, place


class StillAStub(Exception):
    """The learner's code came to its ``raise NotImplementedError``."""


class ForbiddenCall(Exception):
    """The learner's code called what it is to rebuild."""


def call_on_rank(
    packed_answer: bytes,
    packed_inputs: bytes,
    run: Callable[..., Any],
    forbids: tuple[str, ...],
    seed: int,
) -> tuple[Any, tuple]:
    """Run one case on this rank; return its result and its arguments afterwards.

    Both are plain data (:func:`~course_utils.checks.compare.plain`), so that nothing
    which happens on the rank later, or in the notebook, changes them.

    Args:
        packed_answer: the learner's function, class or value, pickled.
        packed_inputs: the arguments of every rank, pickled; a rank takes its own.
        run: ``run(answer, *args)``.
        forbids: full names of what the learner's code must not call.
        seed: ranks draw different random numbers, the same ones at every check.

    Raises:
        StillAStub, ForbiddenCall: see there.
        Exception: whatever the learner's code raises.
    """
    rank = int(os.environ["RANK"])
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed + rank)
    with guarded(forbids) as caught:
        answer = cloudpickle.loads(packed_answer)
        args = pickle.loads(packed_inputs)[rank]
        try:
            result = run(answer, *args)
        except NotImplementedError as error:
            line = raised_by_learner(error)
            if line is None:
                raise
            raise StillAStub(line) from None
    if caught:  # the learner's code has caught the exception
        raise ForbiddenCall(caught[0])
    return plain(result), tuple(plain(arg) for arg in args)


def raised_by_learner(error: BaseException) -> str | None:
    """The place of the learner's own ``raise`` statement, or None.

    PyTorch raises NotImplementedError too, where an operation does not exist.
    """
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    is_raise = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    if is_raise and is_learners(code.co_filename):
        return place(code.co_filename, last.tb_lineno)
    return None


# ------------------------------------------------------------------- forbidden calls


def full_name(name: str) -> str:
    """``torch.distributed.all_reduce`` for ``all_reduce``; full names as they are."""
    return name if "." in name else f"torch.distributed.{name}"


def find(name: str) -> Any:
    """The object of a full name, such as ``torch.nn.parallel.replicate``."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def homes_of(name: str) -> list[types.ModuleType]:
    """The modules in which a forbidden name may be found."""
    if not name.startswith("torch."):
        return [importlib.import_module(name.rpartition(".")[0])]
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType)
    ]


@contextlib.contextmanager
def guarded(forbids: tuple[str, ...]) -> Iterator[list[str]]:
    """While this is open, learner's code that calls a forbidden name is stopped.

    A name of torch is replaced in every module of torch that has it, so another
    spelling, or a detour through a function of torch that uses it, is noticed as
    well. Any other name is replaced in its own module. Calls by the checks themselves
    go through. Yields the list of what was caught.
    """
    caught: list[str] = []
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for name in forbids:
            original = find(name)
            if isinstance(original, type):
                _replace(original, "__init__", name, caught, replaced)
                continue
            for module in homes_of(name):
                for attribute, value in list(vars(module).items()):
                    if value is original:
                        _replace(module, attribute, name, caught, replaced)
        yield caught
    finally:
        for owner, attribute, original in replaced:
            setattr(owner, attribute, original)


def _replace(
    owner: Any, attribute: str, name: str, caught: list[str], replaced: list
) -> None:
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def guard(*args: Any, **kwargs: Any) -> Any:
        line = calling_learner()
        if line is None:
            return original(*args, **kwargs)
        caught.append(f"{name.rpartition('.')[2]}, {line}")
        raise ForbiddenCall(caught[-1])

    replaced.append((owner, attribute, original))
    setattr(owner, attribute, guard)


def calling_learner() -> str | None:
    """Where the learner's code makes the current call; None if a check makes it."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if is_learners(file):
            return place(file, line)
        if f"course_utils{os.sep}checks{os.sep}" in file:
            return None
    return None
