"""The words in which a lesson's tasks are written down. Imports no torch.

    AVERAGE = Task(
        id="00.average",
        title="The average over all ranks",
        stars=2,
        cases=((5,), (2, 3)),                          # shapes
        inputs=lambda shape, rank, world_size: (whole_numbers(shape, rank),),
        misses=(
            Miss(
                "total / dist.get_world_size()",       # a piece of our solution,
                "total",                               # what people write instead,
                "That is the sum over the ranks.",     # and what to tell them
            ),
        ),
        otherwise="Add up each element over all ranks, then divide once.",
        hints=("...", "...", "..."),
    )

What is right is not written down again: it is the solution in ``solutions/``. A check
runs the answer and the solution on the same ranks with the same inputs, and compares
what is observed. A mistake is the solution with a piece of it replaced.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# One rule for all tasks. It stands at the head of each exercise, too.
RULE = (
    "The rule for all tasks: an answer may call anything in Python and PyTorch, except "
    "a ready-made version of what it is asked to build. It may call nothing in "
    "`course_utils`."
)
# For `Task.imports`: PyTorch imports them late, and they take seconds. The first is for
# an optimizer, the second for `y.backward(gradient)`.
OPTIMIZER_IMPORTS = ("torch._dynamo",)
GRADIENT_IMPORTS = ("torch.fx.experimental.symbolic_shapes",)
FOLDER = os.path.join("course_utils", "tasks", "")  # what observes an answer
# A key of `Task.errors`: ranks that make different calls, or wait for nobody.
OUT_OF_STEP = "out of step"


class ForbiddenCall(Exception):
    """The learner's code called what it is to rebuild."""


class OnlyMessages(Exception):
    """The learner's code called a collective, in a task about messages."""


@dataclass(frozen=True)
class Miss:
    """A near miss: our solution with one piece of it replaced.

    Args:
        old: the piece. It may have several lines; every place where it stands changes.
        new: what stands there instead.
        says: one to three sentences that name the mistake and point to the repair.
    """

    old: str
    new: str
    says: str


@dataclass(frozen=True)
class AtMost:
    """Observed: a number that may be smaller than that of our solution, not larger."""

    value: float


def core_of(answer: Any) -> Any:
    """What is called in the end: without ``functools.partial`` around it."""
    while isinstance(answer, functools.partial):
        answer = answer.func
    return answer


def call_it(answer: Callable[..., Any], *args: Any) -> Any:
    """What is observed unless the task says otherwise: the result of a call."""
    return answer(*args)


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One task: where it runs, with which inputs, what is observed, what goes wrong.

    Args:
        id: "LESSON.name", such as "02.split_resnet".
        title: a few words.
        stars: 1 (warm-up) to 3 (hard).
        hints: three: a nudge, the idea, the shape of the code.
        where: "ranks" (real processes in one group), or "here" (one process).
        ranks: how many, in the order in which they are tried. It begins with 3: with
            2, divided by the world size twice looks like divided by 4.
        cases: inputs that the stub does not show. A case is the tuple of arguments,
            or whatever `inputs` makes arguments from.
        inputs: ``inputs(case, rank, world_size)``: the arguments of one rank.
        observe: what a rank does with an answer, ``observe(answer, *args)``. It returns
            what the answer returned; or a dictionary of observations by name, where
            more than the result counts. The first that differs is told, so put first
            what explains the others. An observation that is the same for every right
            answer ("each item is in one share": True) lets all of them pass.
        misses: what people write instead, where it takes more than the observation that
            is wrong to name the mistake. What decides is that an answer first differs
            from our solution in the same case as the near miss, and there in the same
            way. None of them may wait for ever.
        because: what to say where an observation is wrong and no near miss fits, by a
            part of its name.
        errors: what to say of an exception, by a part of its class and text
            ("KeyError: 'bias'"), or by ``OUT_OF_STEP``.
        otherwise: what to say of all other wrong results.
        forbids: calls that the learner is to rebuild: "all_reduce" for
            ``torch.distributed.all_reduce``, or a full name such as
            "torch.nn.parallel.replicate". What the course has built is forbidden in
            all tasks.
        instead: one sentence, what to use instead of them.
        keeps_inputs: the arguments must be unchanged afterwards.
        tolerance: relative to the largest expected value, for floating point.
        seconds: time limit of one call.
        imports: modules that the answer needs and that take seconds to import. They
            are there before the time begins.
    """

    id: str
    title: str
    stars: int
    hints: tuple[str, str, str]
    where: Literal["ranks", "here"] = "ranks"
    ranks: tuple[int, ...] = (3, 1, 2, 4)
    cases: tuple = ((),)
    inputs: Callable[[Any, int, int], tuple] | None = None
    observe: Callable[..., Any] = call_it
    misses: tuple[Miss, ...] = ()
    because: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    forbids: tuple[str, ...] = ()
    instead: str = ""
    keeps_inputs: bool = True
    tolerance: float = 1e-5
    seconds: float = 5.0
    imports: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The world sizes to try; 1 for a task without ranks."""
        return self.ranks if self.where == "ranks" else (1,)

    def inputs_of(self, case: Any, world_size: int) -> list[tuple]:
        """The arguments of every rank in one case, made afresh at each call."""
        if self.inputs is None:
            return [case] * world_size
        return [self.inputs(case, rank, world_size) for rank in range(world_size)]
