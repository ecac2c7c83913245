"""What a check runs on a rank: the learner's code, with nothing else in its way."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import importlib
import os
import pickle
import pkgutil
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import cloudpickle
import torch.distributed as dist

from course_utils.ranks.rank import seed_here
from course_utils.ranks.report import is_learners, place
from course_utils.tasks.compare import plain
from course_utils.tasks.task import FOLDER, ForbiddenCall, core_of

COURSE = os.path.join("course_utils", "")


class StillAStub(Exception):
    """The learner's code came to its ``raise NotImplementedError``."""


def call_on_rank(
    packed_answer: bytes,
    packed_inputs: list[bytes],
    observe: Callable[..., Any],
    forbids: tuple[str, ...],
    seed: int,
    keys: str,
) -> tuple[Any, tuple]:
    """Run one case on this rank; return its result and its arguments afterwards.

    Both are plain data (:func:`~course_utils.tasks.compare.plain`), so that nothing
    which happens on the rank later, or in the notebook, changes them.

    Args:
        packed_answer: the learner's function, class or value, pickled.
        packed_inputs: the pickled arguments of every rank; a rank takes its own.
        observe: ``observe(answer, *args)``.
        forbids: full names of what the learner's code must not call.
        seed: ranks draw different random numbers, the same ones at every check.
        keys: where the answer's keys are in the ranks' store; for each case another.
    """
    rank = int(os.environ["RANK"])
    seed_here(seed + rank)
    # In a notebook it is there without an import, and shows what print shows.
    vars(builtins).setdefault("display", print)
    # What PyTorch will change in future helps nobody here. Of another warning its words
    # are shown: the file is long and mostly PyTorch's.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.formatwarning = lambda message, kind, *_: f"{kind.__name__}: {message}\n"
    args = pickle.loads(packed_inputs[rank])
    with own_keys(keys), Guards(forbids) as guards:
        answer = cloudpickle.loads(packed_answer)
        guards.refuse(answer)
        try:
            result = observe(answer, *args)
        except NotImplementedError as error:
            stub = raised_by_learner(error)
            if stub is None:
                raise
            line, name = stub
            its_name = getattr(answer, "__name__", type(answer).__name__)
            other = f", in {name}" if name not in ("", its_name) else ""
            raise StillAStub(line + other) from None
    if guards.caught:  # the learner's code has caught the exception
        raise ForbiddenCall(guards.caught[0])
    return plain(result), tuple(plain(arg) for arg in args)


@contextlib.contextmanager
def own_keys(keys: str) -> Iterator[None]:
    """Let the ranks' store be as new: the answer is, and counts its calls anew."""
    stores, group = dist.distributed_c10d._world.pg_map, dist.group.WORLD
    backend, store = stores.get(group, (None, None))
    if store:
        stores[group] = backend, dist.PrefixStore(keys, store)
    try:
        yield
    finally:
        if group in stores:  # the answer may have ended it
            stores[group] = backend, store


def raised_by_learner(error: BaseException) -> tuple[str, str] | None:
    """The place of the learner's own ``raise`` statement, or None.

    PyTorch raises NotImplementedError too, where an operation does not exist.

    Returns:
        The line, and the function or class of a cell that it is in.
    """
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    is_raise = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    if is_raise and is_learners(code.co_filename):
        if sys.version_info >= (3, 11):
            name = code.co_qualname.partition(".")[0]
        else:
            owner = last.tb_frame.f_locals.get("self")
            name = code.co_name if owner is None else type(owner).__name__
        return place(code.co_filename, last.tb_lineno), name
    return None


# ------------------------------------------------------------------- forbidden calls


def full_name(name: str) -> str:
    """``torch.distributed.all_reduce`` for ``all_reduce``; full names as they are."""
    return name if "." in name else f"torch.distributed.{name}"


def forbidden_names(task: Any) -> tuple[str, ...]:
    """What the learner is to rebuild in this task, by full names."""
    return tuple(map(full_name, task.forbids))


def find(name: str) -> Any:
    """The object of a full name, such as ``torch.nn.parallel.replicate``."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@functools.cache
def courses_own() -> tuple[str, ...]:
    """Full names of what the course has built, or computes: no answer may call it."""
    folders = map(
        importlib.import_module, ("course_utils.theory", "course_utils.from_scratch")
    )
    return tuple(
        f"{name}.{attribute}"
        for folder in folders
        for _, name, _ in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")
        for attribute, value in vars(importlib.import_module(name)).items()
        if isinstance(value, types.FunctionType | type)
        if value.__module__ == name and not attribute.startswith("__")
    )


@functools.cache
def places_of(names: tuple[str, ...]) -> dict[str, list[tuple[types.ModuleType, str]]]:
    """Where the objects of these full names stand, under whatever name.

    One of torch is looked for in all modules of torch, one of the course in all of the
    course. That takes a fork some 30 ms, because it copies much of the memory. So the
    zygote looks, and all forks know.
    """
    wanted = {id(find(name)): name for name in names}
    packages = {name.partition(".")[0] for name in names}
    places: dict[str, list] = {name: [] for name in names}
    for full, module in list(sys.modules.items()):
        if full.partition(".")[0] in packages and isinstance(module, types.ModuleType):
            for attribute, value in vars(module).items():
                name = wanted.get(id(value), "")
                if name.partition(".")[0] == full.partition(".")[0]:
                    places[name].append((module, attribute))
    return places


class Guards:
    """While this is open, learner's code that calls a forbidden name is stopped.

    Forbidden are the names of the task, and :func:`courses_own`. A name is replaced in
    every module of its package (torch, or the course) that has it, so another spelling
    is noticed, and a detour through a function of torch that uses it. The checks
    themselves may call it. So may the course what it has built: virtual GPUs do.

    Attributes:
        caught: what was stopped, as "all_reduce, line 3 of the cell".
    """

    def __init__(self, forbids: tuple[str, ...]) -> None:
        self.forbids = forbids
        self.caught: list[str] = []
        self._names: dict[Any, str] = {}  # of what now stands where they stood
        self._replaced: list[tuple[Any, str, Any]] = []  # where, and by what it was

    def __enter__(self) -> Guards:
        found = places_of(self.forbids) | places_of(courses_own())
        for name, places in found.items():
            original = find(name)
            if isinstance(original, type):
                guard, make = original, vars(original).get("__init__")
                if make and not issubclass(original, Exception):
                    self._replace(original, "__init__", self._guard(name, make))
            else:
                guard = self._guard(name, original)
                for module, attribute in places:
                    self._replace(module, attribute, guard)
            self._names[guard] = name
        return self

    def __exit__(self, *exception: object) -> None:
        for owner, attribute, original in self._replaced:
            setattr(owner, attribute, original)

    def refuse(self, answer: Any) -> None:
        """Stop a forbidden function or class that was itself handed in."""
        core = core_of(answer)
        for one in core.__mro__ if isinstance(core, type) else (core,):
            if isinstance(one, Hashable) and one in self._names:
                self._catch(self._names[one], None)

    def _replace(self, owner: Any, attribute: str, guard: Callable[..., Any]) -> None:
        self._replaced.append((owner, attribute, vars(owner)[attribute]))
        setattr(owner, attribute, guard)

    def _guard(self, name: str, original: Any) -> Callable[..., Any]:
        passes = COURSE if name.startswith("course_utils.") else FOLDER

        def guard(*args: Any, **kwargs: Any) -> Any:
            if line := calling_learner(passes):
                self._catch(name, line)
            return original(*args, **kwargs)

        functools.update_wrapper(guard, original)
        del guard.__wrapped__  # it would lead around the guard
        return guard

    def _catch(self, name: str, line: str | None) -> None:
        module, _, attribute = name.rpartition(".")
        where = f", {line}" if line else f" of {module}"
        self.caught.append(attribute + where)
        raise ForbiddenCall(self.caught[-1])


def calling_learner(passes: str) -> str | None:
    """Where the learner's code makes the current call; None in a folder that passes."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if is_learners(file):
            return place(file, line)
        if passes in file:
            return None
    return "in a thread"  # that the learner's code has started: a check starts none
