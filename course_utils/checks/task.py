"""The words in which a lesson's tasks are written down. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Such:
    """Stands for any value that passes a test, where several values are right.

    Args:
        description: what is expected, in words: "a list of 4 whole numbers".
        test: gets the value that was returned. If it raises, the value is wrong.
    """

    description: str
    test: Callable[[Any], bool]


ANYTHING = Such("anything", lambda value: True)


class PythonNumber(float):
    """Expected where a tensor or a number of NumPy's will not do, although it is equal.

    For what is printed, logged or kept: a tensor may drag its graph along.
    """


class Count(int):
    """Expected where something is counted or numbered: a float cannot index a list."""


@dataclass(frozen=True)
class Attempt:
    """What one rank did in one call: what the ``when`` of a mistake looks at.

    Attributes:
        rank, world_size: where it happened; 0 and 1 for a task without ranks.
        args: the arguments, as they were before the call.
        got: what it returned; None after a failure.
        expected: what it should have returned.
        right: the ranks that returned the right value.
        error, message: the exception's class and text after a failure, else "".
        returned: the ranks that had returned when this one failed or was stuck.
    """

    rank: int
    world_size: int
    args: tuple
    got: Any = None
    expected: Any = None
    right: tuple[int, ...] = ()
    error: str = ""
    message: str = ""
    returned: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A typical wrong answer, and what to say to whoever gives it.

    Args:
        says: one or two sentences that name the mistake and point to the repair.
        like: what the mistake computes, called like the task's ``expect``. It is this
            mistake when every rank returned just that.
        when: or a test that looks at the first wrong (or failed) rank's attempt.
    """

    says: str
    like: Callable[..., Any] | None = None
    when: Callable[[Attempt], bool] | None = None


def call_it(answer: Callable[..., Any], *args: Any) -> Any:
    """What a rank does with the learner's function unless the task says otherwise."""
    return answer(*args)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task: where it runs, with which inputs, and what must come out.

    Args:
        id: "LESSON.name", such as "02.split_resnet".
        title: a few words.
        stars: 1 (warm-up) to 3 (hard).
        hints: three: a nudge, the idea, the shape of the code.
        expect: the right result. ``expect(rank, inputs)`` on ranks, where ``inputs``
            has the arguments of every rank; ``expect(*args)`` otherwise. It runs in
            the notebook's process and never sees what the learner's code did. It may
            hold :class:`Such` where more than one value is right.
        where: "ranks" (real processes in one group), "here" (a function, in a process
            of its own), or "value" (a number or text, set by the learner).
        cases: inputs that the stub does not show. A case is the tuple of arguments,
            or whatever ``inputs`` makes arguments from.
        inputs: ``inputs(case, rank, world_size)``: the arguments of one rank.
        run: what a rank does with the answer, ``run(answer, *args)``; its result is
            compared. Default: call it. A task for a class makes and uses one here.
        world_sizes: how many ranks; each size runs all cases on fresh processes.
        mistakes: typical wrong answers; the first that fits is named.
        otherwise: what to say of a wrong result that is no typical one, and has the
            right type and shape.
        forbids: calls that the learner is to rebuild: "all_reduce" for
            ``torch.distributed.all_reduce``, or a full name such as
            "torch.nn.parallel.replicate". What the course has built is forbidden in
            all tasks (``on_rank.courses_own``).
        instead: one sentence, what to use instead of them.
        keeps_inputs: the arguments must be unchanged afterwards.
        tolerance: relative to the (largest) expected value, for floating point.
        unit: of a number, for the messages: "seconds".
        seconds: time limit of one call.
        imports: modules that the answer needs and that take seconds to import. They
            are there before the time begins.
    """

    id: str
    title: str
    stars: int
    hints: tuple[str, str, str]
    expect: Callable[..., Any]
    where: Literal["ranks", "here", "value"] = "here"
    cases: tuple = ((),)
    inputs: Callable[[Any, int, int], tuple] | None = None
    run: Callable[..., Any] = call_it
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    mistakes: tuple[Mistake, ...] = ()
    otherwise: str = ""
    forbids: tuple[str, ...] = ()
    instead: str = ""
    keeps_inputs: bool = True
    tolerance: float = 1e-5
    unit: str = ""
    seconds: float = 5.0
    imports: tuple[str, ...] = ()

    def inputs_of(self, case: Any, world_size: int) -> list[tuple]:
        """The arguments of every rank in one case, made afresh at each call."""
        if self.inputs is None:
            return [case] * world_size
        return [self.inputs(case, rank, world_size) for rank in range(world_size)]

    def reference(self, function: Callable, case: Any, world_size: int) -> list:
        """``function`` (``expect``, or a mistake's ``like``) for every rank."""
        if self.where != "ranks":
            return [function(*self.inputs_of(case, 1)[0])]
        return [
            function(rank, self.inputs_of(case, world_size))
            for rank in range(world_size)
        ]
