"""What a check runs on a rank: the learner's code, with nothing else in its way."""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import importlib
import itertools
import os
import pickle
import pkgutil
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import cloudpickle

from course_utils.ranks.rank import seed_here
from course_utils.ranks.report import is_learners, place
from course_utils.tasks.compare import plain
from course_utils.tasks.task import FOLDER, ForbiddenCall

COURSE = os.path.join("course_utils", "")


class StillAStub(Exception):
    """The learner's code came to its ``raise NotImplementedError``."""


def call_on_rank(
    packed_answer: bytes,
    packed_inputs: list[bytes],
    observe: Callable[..., Any],
    forbids: tuple[str, ...],
    seed: int,
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

    Raises:
        StillAStub, ForbiddenCall: see there.
        Exception: whatever the learner's code raises.
    """
    rank = int(os.environ["RANK"])
    seed_here(seed + rank)
    # In a notebook it is there without an import, and shows what print shows.
    vars(builtins).setdefault("display", print)
    args = pickle.loads(packed_inputs[rank])
    with Guards(forbids) as guards:
        answer = cloudpickle.loads(packed_answer)
        guards.let_the_checks_pass()
        try:
            result = observe(answer, *args)
        except NotImplementedError as error:
            stub = raised_by_learner(error)
            if stub is None:
                raise
            line, names = stub
            its_name = getattr(answer, "__name__", type(answer).__name__)
            other = "" if its_name in names else f", in {names[0]}"
            raise StillAStub(line + other) from None
    if guards.caught:  # the learner's code has caught the exception
        raise ForbiddenCall(guards.caught[0])
    return plain(result), tuple(plain(arg) for arg in args)


def raised_by_learner(error: BaseException) -> tuple[str, list[str]] | None:
    """The place of the learner's own ``raise`` statement, or None.

    PyTorch raises NotImplementedError too, where an operation does not exist.

    Returns:
        The line, and the names of the functions and classes that it is in, first that
        of the outermost one.
    """
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    is_raise = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    if is_raise and is_learners(code.co_filename):
        names = [part for part in qualified(code).split(".") if part != "<locals>"]
        return place(code.co_filename, last.tb_lineno), names
    return None


def qualified(code: types.CodeType) -> str:
    """The name of a function with those of the classes and functions around it."""
    if sys.version_info >= (3, 11):
        return code.co_qualname
    users = gc.get_referrers(code)
    names = (u.__qualname__ for u in users if isinstance(u, types.FunctionType))
    return next(names, code.co_name)


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


# By names: how many modules were looked through, and what was found there.
_looked: dict[tuple[str, ...], tuple[int, dict[str, list]]] = {}


def places_of(names: tuple[str, ...]) -> dict[str, list[tuple[types.ModuleType, str]]]:
    """Where the objects of these full names stand, under whatever name.

    One of torch is looked for in all modules of torch, one of the course in all of the
    course. That takes a fork some 30 ms, because it copies much of the memory. So the
    zygote looks first, and a fork only into modules that are new: the last ones of
    `sys.modules`.
    """
    wanted: dict[str, dict[int, str]] = {}
    for name in names:
        package = name.partition(".")[0]
        wanted.setdefault(package, {})[id(find(name))] = name
    seen, places = _looked.get(names, (0, {name: [] for name in names}))
    newest = reversed(sys.modules.items())
    new = list(itertools.islice(newest, max(0, len(sys.modules) - seen)))
    for full, module in reversed(new):
        here = wanted.get(full.partition(".")[0])
        if here and isinstance(module, types.ModuleType):
            for attribute, value in list(vars(module).items()):
                if id(value) in here:
                    places[here[id(value)]].append((module, attribute))
    _looked[names] = seen + len(new), places
    return places


class Guards:
    """While this is open, learner's code that calls a forbidden name is stopped.

    Forbidden are the names of the task, and :func:`courses_own`.

    A name is replaced in every module of its package (torch, or the course) that has
    it, so another spelling is noticed as well. So is a detour through a function of
    torch that uses it. The course itself may use what it has built: virtual GPUs do.

    The checks themselves may call it, after :meth:`let_the_checks_pass`. What the
    answer brings along (a ``functools.partial`` of the forbidden function, say) was
    unpickled before that, and is stopped whoever calls it.

    Attributes:
        caught: what was stopped, as "all_reduce, line 3 of the cell".
    """

    def __init__(self, forbids: tuple[str, ...]) -> None:
        self.forbids = forbids
        self.caught: list[str] = []
        # Where something was replaced, by what it was, and by what for the checks.
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> Guards:
        try:
            places = places_of(self.forbids) | places_of(courses_own())
            for name in places:
                if isinstance(find(name), type):
                    self._replace_class(name, find(name))
                else:
                    self._replace_function(name, places[name])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for owner, attribute, original, _ in self._replaced:
            setattr(owner, attribute, original)

    def let_the_checks_pass(self) -> None:
        """From here on, calls that a check makes itself go through."""
        for owner, attribute, _, guard in self._replaced:
            setattr(owner, attribute, guard)

    def _replace_function(
        self, name: str, places: list[tuple[types.ModuleType, str]]
    ) -> None:
        original = find(name)
        passes = who_passes(name)

        def stop(*args: Any, **kwargs: Any) -> Any:
            self._catch(name, calling_learner(passes))

        def guard(*args: Any, **kwargs: Any) -> Any:
            line = calling_learner(passes)
            if line is None:
                return original(*args, **kwargs)
            self._catch(name, line)

        for one in (stop, guard):
            functools.update_wrapper(one, original)
            del one.__wrapped__  # it would lead around the guard
        for module, attribute in places:
            if vars(module).get(attribute) is original:
                self._replaced.append((module, attribute, original, guard))
                setattr(module, attribute, stop)

    def _replace_class(self, name: str, original: type) -> None:
        make = original.__init__
        if make is object.__init__ or issubclass(original, BaseException):
            return
        passes = who_passes(name)

        def guard(instance: Any, *args: Any, **kwargs: Any) -> None:
            line = calling_learner(passes)
            is_given = type(instance).__module__.startswith(("torch", "course_utils"))
            if line is not None or not is_given:
                self._catch(name, line)
            make(instance, *args, **kwargs)

        self._replaced.append((original, "__init__", make, guard))
        original.__init__ = guard

    def _catch(self, name: str, line: str | None) -> None:
        module, _, attribute = name.rpartition(".")
        where = f", {line}" if line else f" of {module}"
        self.caught.append(attribute + where)
        raise ForbiddenCall(self.caught[-1])


def who_passes(name: str) -> str:
    """The folder whose code may call a forbidden name: see :class:`Guards`."""
    return COURSE if name.startswith("course_utils.") else FOLDER


def calling_learner(passes: str) -> str | None:
    """Where the learner's code makes the current call; None in a folder that passes."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if is_learners(file):
            return place(file, line)
        if passes in file:
            return None
    return "in a thread"  # that the learner's code has started: a check starts none
