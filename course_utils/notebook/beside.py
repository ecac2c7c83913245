"""Run an answer, our solution and its near misses, and compare what they show."""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from course_utils.notebook import ours
from course_utils.notebook.on_rank import call_on_rank, forbidden_names
from course_utils.notebook.processes import fresh_ranks
from course_utils.ranks import RankFailure, Ranks, RanksError, RequestWarning
from course_utils.ranks.report import request_lines, sentences
from course_utils.tasks.compare import difference
from course_utils.tasks.task import OUT_OF_STEP, Miss, Task, call_it

RETURNED = "It returned"
OUR_SECONDS = 60.0
# A rank that is found in one of these runs in a loop around it.
INQUIRIES = ("get_rank", "get_world_size")
_cases = itertools.count()  # that have been run: each has other keys in the store


@dataclass(frozen=True)
class Seen:
    """What the ranks have shown in one case.

    Attributes:
        observed: of each rank, by name; empty where not all came to their end.
        after: the arguments of each rank, as they are afterwards.
        error: why not all came to their end.
        unwaited: which requests nobody has waited for, in sentences.
        printed: what was printed, with a "[rank 0] " before each line.
    """

    observed: tuple[dict[str, Any], ...] = ()
    after: tuple = ()
    error: RanksError | None = None
    unwaited: tuple[str, ...] = ()
    printed: str = ""


def look(task: Task, ranks: Ranks, packed: bytes, number: int, seconds: float) -> Seen:
    """Run one case of a task on ranks, with an answer that is packed for them."""
    inputs = task.inputs_of(task.cases[number], ranks.n)
    error, results, output = None, [], io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore", RequestWarning)  # an outcome says it
        try:
            results = ranks.run(
                call_on_rank,
                packed,
                list(map(pickle.dumps, inputs)),
                task.observe,
                forbidden_names(task),
                1000 * (number + 1),  # the seed
                f"case {next(_cases)}",
                timeout=seconds,
            )
        except RanksError as raised:
            error = raised
    if error and error.cause == "interrupt":
        raise KeyboardInterrupt from None
    return Seen(
        tuple(named(task, value) for value, _ in results),
        tuple(after for _, after in results),
        error,
        tuple(sentences(request_lines(ranks.unwaited)).splitlines()),
        output.getvalue(),
    )


def named(task: Task, value: Any) -> dict[str, Any]:
    """Observations by name. What an answer itself returns may be a dict, too."""
    has_names = isinstance(value, dict) and {*map(type, value)} == {str}
    return value if has_names and task.observe is not call_it else {RETURNED: value}


# What our solutions and near misses have shown, by task, near miss, world size, case.
seen_before: dict[tuple[Task, Miss | None, int, int], Seen] = {}


class Beside(contextlib.ExitStack):
    """Runs our solution and its near misses, on ranks that the answer never sees.

    What they show is remembered, so it costs its time once.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self._ranks: dict[int, Ranks] = {}

    def seen(self, miss: Miss | None, world_size: int, number: int) -> Seen:
        """What our solution shows in a case, or what a near miss of it does."""
        key = self.task, miss, world_size, number
        if key not in seen_before:
            if world_size not in self._ranks:
                ranks = self.enter_context(fresh_ranks(world_size, self.task))
                self._ranks[world_size] = ranks
            # Ours is right: on a busy machine it gets the time that it needs.
            seconds = self.task.seconds if miss else OUR_SECONDS
            packed = ours.packed(self.task, *filter(None, [miss]))
            seen = look(self.task, self._ranks[world_size], packed, number, seconds)
            if miss is None and seen.error:
                raise seen.error
            seen_before[key] = seen
        return seen_before[key]

    def fails_first_at(self, miss: Miss, at: tuple[int, int]) -> bool:
        """Is a near miss, which is wrong here, right in all cases before?"""
        order = itertools.product(self.task.sizes, range(len(self.task.cases)))
        for before in itertools.takewhile(lambda other: other != at, order):
            seen = self.seen(miss, *before)
            if seen.error or first_wrong(self.task, seen, self.seen(None, *before)):
                return False
        return True


def differences(task: Task, seen: Seen, want: Seen) -> Iterator[tuple[int, str]]:
    """Each rank and observation that are not as wanted, in the order of the names.

    What was returned comes first: there was nothing that could be looked at.
    """
    both = itertools.chain(*want.observed, *seen.observed)
    for name in dict.fromkeys([RETURNED, *both]):
        for rank, right in enumerate(want.observed):
            mine = seen.observed[rank]
            if (name in mine) != (name in right):
                yield rank, name
            elif name in mine:
                if difference(mine[name], right[name], task.tolerance) is not None:
                    yield rank, name


def first_wrong(task: Task, seen: Seen, want: Seen) -> tuple[int, str] | None:
    """The first rank and observation that are not as with our solution."""
    return next(differences(task, seen, want), None)


def signature(error: RanksError) -> tuple:
    """What a failure has in common with that of the same mistake, made elsewhere."""
    root = error.root
    if is_out_of_step(error):
        return (OUT_OF_STEP,)
    return root.error, re.sub(r"\d+|'[^']*'|\[.*?\]", "#", root.message)[:60]


def is_out_of_step(error: RanksError) -> bool:
    """Do ranks wait for others, or make other calls than they?"""
    root = error.root
    if root is None or root.error == "CollectiveMismatch":
        return True
    return root.kind == "stuck" and any(map(waits, error.failures.values()))


def waits(failure: RankFailure) -> bool:
    """Does a rank that has not finished wait for another one?"""
    return failure.error == "waiting" and not failure.where.startswith(INQUIRIES)
