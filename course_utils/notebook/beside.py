"""Run an answer beside our solution; where they differ, beside its near misses."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from course_utils.notebook import diagnosis, ours
from course_utils.notebook.answer import CannotPack, is_unchanged, pack
from course_utils.notebook.on_rank import call_on_rank, forbidden_names
from course_utils.notebook.outcome import Outcome, Status, cut_off
from course_utils.notebook.processes import fresh_ranks
from course_utils.ranks import RankFailure, Ranks, RanksError, RequestWarning
from course_utils.ranks.report import rank_list, request_lines, sentences
from course_utils.tasks.compare import (
    RETURNED_NONE,
    difference,
    kind,
    plain,
    show,
)
from course_utils.tasks.task import (
    OUT_OF_STEP,
    RULE,
    AtMost,
    Miss,
    Task,
    call_it,
    core_of,
)

RETURNED = "It returned"
OUR_SECONDS = 60.0
SHOWN_PRINTS = 3  # lines that the learner's code has printed
# What a comparison says that helps nobody on, unless there is nothing else to say.
NO_HELP = re.compile(
    r"((The (item at|value of) [^.]* is wrong\. ?)+$|\d+ of \d+ values)"
)
# What PyTorch itself writes to stderr, with the time of day in it.
LOG_LINE = re.compile(r"^\[rank \d+\] (\[rank\d+\]:)?\[?[WEI]\d{4} ")
# A warning begins with the file that it comes from, which is long and mostly PyTorch's.
WARNING = re.compile(r"^\S.*:\d+: (?=\w*Warning: )")
# Collectives that no rank leaves before the last one has come.
NEED_ALL = ("all_reduce", "all_gather", "all_gather_into_tensor", "barrier")
# They return at once: a rank that is found in one of them runs in a loop around it.
INQUIRIES = ("get_rank", "get_world_size", "get_backend", "is_initialized")


def run_task(task: Task, answer: Any) -> Outcome:
    """Check an answer. Changes nothing and prints nothing.

    Raises:
        KeyboardInterrupt: the learner stopped it.
        RanksError: no processes could be started on this machine.
    """
    if answer is None or answer is ...:
        return not_attempted(task)
    try:
        solved = ours.solved(task.id)
    except (OSError, LookupError, ValueError) as error:
        compares = "The check runs your answer beside our solution, and that is missing"
        return Outcome(task, "not attempted", (f"{compares}: {error}",))
    # A module is callable: it would be called with what is meant for the class.
    if not callable(answer) or solved.is_class and isinstance(answer, nn.Module):
        return Outcome(task, "wrong", (not_callable(task, solved, answer), more(task)))
    given = solved.given
    if is_unchanged(answer, given):
        is_stub = "raise NotImplementedError" in given
        return not_attempted(task, "Write" if is_stub else "Repair")
    try:
        packed = pack(answer)
    except CannotPack as error:
        return Outcome(task, "crashed", (str(error), more(task)))
    with Beside(task) as beside:
        for world_size in task.sizes:
            with contextlib.suppress(Different), fresh_ranks(world_size, task) as ranks:
                for number in range(len(task.cases)):
                    look = Look(beside, answer, number, world_size)
                    look.at(ranks, packed)
                continue
            return look.outcome
    return Outcome(task, "passed", (where_right(task), compare_it(task)))


class Different(Exception):
    """An answer was seen to differ from our solution; it ends the run."""


def not_attempted(task: Task, verb: str = "Write") -> Outcome:
    what = "your code" if verb == "Write" else "the code"
    begin = f"{verb} {what} in the cell above, run that cell, then this one."
    return Outcome(task, "not attempted", (begin, more(task)))


def more(task: Task) -> str:
    return f'A hint: hint("{task.id}")'


def compare_it(task: Task) -> str:
    return f'Compare it with ours: solution("{task.id}")'


def where_right(task: Task) -> str:
    if task.where == "here":
        n = len(task.cases)
        return "It is right." if n == 1 else f"It is right in all {n} cases."
    if len(task.sizes) == 1:
        return f"It is right on {task.sizes[0]} ranks."
    *others, most = map(str, sorted(task.sizes))
    return f"It is right on {', '.join(others)} and {most} ranks."


def not_callable(task: Task, solved: ours.Solved, answer: Any) -> str:
    wants = "function itself, not what it returns"
    if solved.is_class:
        wants = "class itself, not an object of it"
    return (
        f"This task wants the {wants}, but it got {kind(plain(answer))}. Write "
        f'check("{task.id}", {solved.name}), without parentheses after the name.'
    )


# ----------------------------------------------------------- our solution, and misses


@dataclass(frozen=True)
class Seen:
    """What the ranks have shown in one case: what they observed, or an error."""

    observed: tuple = ()
    error: RanksError | None = None

    def parts(self, rank: int) -> dict[str, Any]:
        """By name, what was observed on a rank."""
        return parts(self.observed[rank])


class Report(dict):
    """Observations by name. What an answer itself returns may be a dict, too."""


def parts(value: Any) -> dict[str, Any]:
    return value if isinstance(value, Report) else {RETURNED: value}


def report(task: Task, results: list[tuple[Any, tuple]]) -> tuple:
    """What came back from all ranks, made plain where no learner's code gets at it."""
    observed = (plain(value) for value, _ in results)
    if task.observe is call_it:
        return tuple(observed)
    return tuple(Report(o) if isinstance(o, dict) else o for o in observed)


# What our solutions and near misses have shown, by task, near miss, world size, case.
_seen: dict[tuple[Task, Miss | None, int, int], Seen] = {}


def forget(task: Task) -> None:
    """Forget what our solution of a task and its near misses have shown."""
    for key in [key for key in _seen if key[0] is task]:
        del _seen[key]


class Beside:
    """Runs our solution and its near misses, on ranks that the answer never sees.

    What they show is remembered, so it costs its time once.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._stack = contextlib.ExitStack()
        self._ranks: dict[int, Ranks] = {}

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def seen(self, miss: Miss | None, world_size: int, number: int) -> Seen:
        """What our solution shows in a case, or what a near miss of it does."""
        key = self.task, miss, world_size, number
        if key not in _seen:
            # Ours is right: on a busy machine it gets the time that it needs.
            seconds = self.task.seconds if miss else OUR_SECONDS
            packed = ours.packed(self.task, *filter(None, [miss]))
            _seen[key] = self._look(packed, world_size, number, seconds)
            if miss is None and _seen[key].error:
                raise _seen.pop(key).error
        return _seen[key]

    def _look(
        self, packed: bytes, world_size: int, number: int, seconds: float
    ) -> Seen:
        if world_size not in self._ranks:
            ranks = self._stack.enter_context(fresh_ranks(world_size, self.task))
            self._ranks[world_size] = ranks
        inputs = self.task.inputs_of(self.task.cases[number], world_size)
        try:
            with quiet():
                ranks = self._ranks[world_size]
                results = call(self.task, ranks, packed, inputs, number, seconds)
        except RanksError as error:
            if error.cause == "interrupt":
                raise KeyboardInterrupt from None
            return Seen(error=error)
        return Seen(report(self.task, results))

    def is_right(self, seen: Seen, world_size: int, number: int) -> bool:
        """Does it show what our solution shows?"""
        want = self.seen(None, world_size, number)
        return not seen.error and not first_wrong(self.task, seen, want)

    def in_order(self) -> list[tuple[int, int]]:
        """All world sizes and cases in the order in which an answer meets them."""
        numbers = range(len(self.task.cases))
        return list(itertools.product(self.task.sizes, numbers))

    def fails_first_at(self, miss: Miss, at: tuple[int, int]) -> bool:
        """Is a near miss, which is wrong here, right in all cases before?"""
        before = itertools.takewhile(lambda other: other != at, self.in_order())
        return all(self.is_right(self.seen(miss, *other), *other) for other in before)


def call(
    task: Task, ranks: Ranks, packed: bytes, inputs: list, number: int, seconds: float
) -> list:
    """Run one case of a task on ranks: what `call_on_rank` returns, of every rank."""
    return ranks.run(
        call_on_rank,
        packed,
        list(map(pickle.dumps, inputs)),
        task.observe,
        forbidden_names(task),
        1000 * (number + 1),  # the seed
        timeout=seconds,
    )


@contextlib.contextmanager
def quiet():
    """Nothing is printed in the notebook; what was, can be read in what this gives."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore", RequestWarning)  # an outcome says it
        yield output


def is_wrong(mine: Any, right: Any, tolerance: float) -> bool:
    if isinstance(mine, AtMost) and isinstance(right, AtMost):
        return not mine.value <= right.value
    return is_other(mine, right, tolerance)


def is_other(mine: Any, theirs: Any, tolerance: float) -> bool:
    """Does an answer show something else than a near miss?"""
    if isinstance(mine, AtMost) and isinstance(theirs, AtMost):
        mine, theirs = mine.value, theirs.value
    return difference(mine, theirs, tolerance) is not None


def differences(
    task: Task, seen: Seen, want: Seen, differs: Callable = is_wrong
) -> Iterator[tuple[int, str]]:
    """Each rank and observation that are not as wanted, in the order of the names."""
    names = dict.fromkeys(
        name for s in (want, seen) for o in s.observed for name in parts(o)
    )
    for name in names:
        for rank in range(len(want.observed)):
            mine, right = seen.parts(rank), want.parts(rank)
            if RETURNED in mine and RETURNED not in right:
                yield rank, RETURNED  # nothing that could be looked at
            elif (name in mine) != (name in right):
                yield rank, name
            elif name in mine and differs(mine[name], right[name], task.tolerance):
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


# ------------------------------------------------------------------------- one case


class Look:
    """One case on some ranks: run the answer, and judge what came of it.

    Attributes:
        outcome: what was found, once it is known to be wrong.
    """

    def __init__(self, beside: Beside, answer: Any, number: int, n: int) -> None:
        self.beside, self.task, self.answer = beside, beside.task, answer
        self.number, self.n = number, n
        self.inputs = self.task.inputs_of(self.task.cases[number], n)
        self.printed: list[str] = []
        self.unwaited: list[str] = []
        self.outcome: Outcome | None = None

    def at(self, ranks: Ranks, packed: bytes) -> None:
        """Run it, and return where all is right.

        Raises:
            Different: it is not; `outcome` tells what was seen.
        """
        error, results = None, []
        with quiet() as output:
            try:
                given = packed, self.inputs, self.number
                results = call(self.task, ranks, *given, self.task.seconds)
            except RanksError as raised:
                error = raised
        if error and error.cause == "interrupt":
            raise KeyboardInterrupt from None
        self.unwaited = sentences(request_lines(ranks.unwaited)).splitlines()
        lines = output.getvalue().splitlines()
        self.printed = [line for line in lines if not LOG_LINE.match(line)]
        if error:
            self.outcome = self.failed(error)
        else:
            self.outcome = self._judge(results)
        if self.outcome:
            raise Different

    def _outcome(
        self, status: Status, says: str, *lines: str, rank: int = 0
    ) -> Outcome:
        """The sentence that decides comes first, then what was seen."""
        prints = self._prints_of(rank)
        return Outcome(self.task, status, (says, *lines, *prints, more(self.task)))

    # ------------------------------------------------------------- results came back
    def _judge(self, results: list[tuple[Any, tuple]]) -> Outcome | None:
        seen = Seen(report(self.task, results))
        want = self.beside.seen(None, self.n, self.number)
        wrong = first_wrong(self.task, seen, want)
        if wrong:
            return self._wrong(seen, want, *wrong)
        if self.unwaited:
            luck = "The result is right, but by luck: not every request was waited for."
            return self._outcome("wrong", luck, *self.unwaited, self._call(0))
        if self.task.keeps_inputs:
            return self._judge_inputs([plain(after) for _, after in results])
        return None

    def _wrong(self, seen: Seen, want: Seen, rank: int, name: str) -> Outcome:
        got = [seen.parts(r).get(name) for r in range(self.n)]
        right = [want.parts(r).get(name) for r in range(self.n)]
        is_strange = name not in want.parts(rank)
        found = self._difference(got[rank], right[rank], is_strange)
        says = lazy(self.answer) or self._forgot_to_return(name, got[rank], rank)
        if not says and self.unwaited:
            says = "\n".join(filter(None, (*self.unwaited, self._because(name))))
        says = says or self._near_miss(seen, want, name) or self._because(name)
        if not says:
            looks = diagnosis.diagnose(
                got, right, rank, self.inputs[rank], self.task.tolerance
            )
            decides = looks or ("" if NO_HELP.match(found) else found)
            says = " ".join(filter(None, (decides, self.task.otherwise))) or found
        lines = [self._call(rank), self._compared(name, got[rank], right[rank])]
        if found not in says and show(got[rank]) == show(right[rank]):
            lines.append(found)
        lines.append(self._where_wrong(seen, want))
        return self._outcome("wrong", says, *lines, rank=rank)

    def _difference(self, got: Any, right: Any, is_strange: bool) -> str:
        """In words, what is different; "" where the values say it all."""
        if is_strange and got is not None:
            return f"That is {kind(got)}, which is not what was asked for."
        if isinstance(right, AtMost):
            return ""
        return difference(got, right, self.task.tolerance) or ""

    def _forgot_to_return(self, name: str, got: Any, rank: int) -> str:
        if name != RETURNED or got is not None:
            return ""
        if self._prints_of(rank):
            return "It printed something and returned None: use `return`, not print."
        return RETURNED_NONE

    def _compared(self, name: str, got: Any, right: Any) -> str:
        if isinstance(right, AtMost) and isinstance(got, AtMost):
            return f"{name}: {show(got.value)}. At most {show(right.value)} expected."
        if isinstance(right, bool) and isinstance(got, bool):
            words = {True: "yes", False: "no"}
            return f"{name}: {words[got]}. Expected: {words[right]}."
        if name == RETURNED:
            expected = "" if right is None else f", expected was {show(right)}"
            return f"It returned {show(got)}{expected}."
        return f"{name}: {show(got)}. Expected: {show(right)}."

    def _near_miss(self, seen: Seen, want: Seen, name: str) -> str:
        """What is said of the near miss that shows the same, or ""."""
        here = self.n, self.number
        in_all, in_this = [], []  # alike in all that is observed, or in `name` alone
        for miss in self.task.misses:
            other = self.beside.seen(miss, *here)
            wrong = None if other.error else first_wrong(self.task, other, want)
            if wrong is None or wrong[1] != name:
                continue
            others = {n for _, n in differences(self.task, seen, other, is_other)}
            if not others:
                in_all.append(miss)
            elif name not in others:
                in_this.append(miss)
        found = (m for m in in_all + in_this if self.beside.fails_first_at(m, here))
        return next((miss.says for miss in found), "")

    def _because(self, name: str) -> str:
        return next((s for part, s in self.task.because.items() if part in name), "")

    def _where_wrong(self, seen: Seen, want: Seen) -> str:
        wrong = sorted({rank for rank, _ in differences(self.task, seen, want)})
        right = [rank for rank in range(self.n) if rank not in wrong]
        if self.n == 1:
            return ""
        if not right:
            return "Wrong on all ranks."
        return f"Right on {rank_list(right)}; wrong on {rank_list(wrong)}."

    def _judge_inputs(self, after: list[tuple]) -> Outcome | None:
        for rank, (args, now) in enumerate(zip(self.inputs, after, strict=True)):
            for before, changed in zip(args, now, strict=True):
                if difference(changed, plain(before), 0.0) is None:
                    continue
                is_list = isinstance(before, list)
                advice = diagnosis.IN_PLACE_LIST if is_list else diagnosis.IN_PLACE
                return self._outcome(
                    "wrong",
                    "The result is right, but the argument is not what it was. Whoever "
                    f"called the function may still need it. {advice}",
                    self._call(rank),
                    f"  before  {show(plain(before))}\n  after   {show(changed)}",
                    rank=rank,
                )
        return None

    # -------------------------------------------------------------- nothing came back
    def failed(self, error: RanksError) -> Outcome:
        """What to say where nothing came back."""
        root = error.root
        if root is not None and root.error == "StillAStub":
            line, _, other = root.message.partition(", in ")
            says = f"It still raises NotImplementedError, {line}."
            begin = not_attempted(self.task).lines[0]
            if other:
                says = f"{other}, which it calls, still raises NotImplementedError, "
                says += f"{line}."
                begin = f"Solve the task of {other} first, and run its cell: then this "
                begin += "check can tell."
            return Outcome(self.task, "not attempted", (says, begin, more(self.task)))
        if root is not None and root.error == "ForbiddenCall":
            return self._outcome(
                "wrong",
                f"Your code calls {root.message}. It would work: but it is what you "
                f"build here yourself. {self.task.instead}".rstrip(),
                RULE,
            )
        if root is None or root.kind == "stuck":
            return self._not_finished(error)
        return self._crashed(error, root)

    def _crashed(self, error: RanksError, root: RankFailure) -> Outcome:
        lines = [self._call(root.rank)]
        about = self._about(error) or diagnosis.about_error(
            root, self.task.where == "ranks"
        )
        if root.kind == "died":
            at = f", {root.where}" if root.where else ""
            lines.append(f"Its process ended ({root.error}){at}.")
            about = about or (
                "Something ended it before the function could return: a call such as "
                "os._exit, a signal, a crash in C code, or too little memory."
            )
        elif root.error == "SystemExit":
            lines += indented(root.traceback)
            about = about or "It called exit(). A function ends with `return`."
        else:
            message = root.message.strip().split("\n(caused by")[0]
            raised = shortened(f"It raised {root.error}: {message}".rstrip(": "))
            about = about or self._about_call(root)
            lines += [raised] * bool(about) + indented(root.traceback)
            about = about or raised
        return self._outcome("crashed", about, *lines, rank=root.rank)

    def _about(self, error: RanksError) -> str:
        """What the task says of a failure, or a near miss that fails in this way."""
        root = error.root
        text = f"{root.error}: {root.message}" if root else ""
        if is_out_of_step(error):
            text += f" {OUT_OF_STEP}"
        for part, says in self.task.errors.items():
            if part in text:
                return says
        here = self.n, self.number
        for miss in self.task.misses:
            other = self.beside.seen(miss, *here)
            if other.error and signature(other.error) == signature(error):
                if self.beside.fails_first_at(miss, here):
                    return miss.says
        return ""

    def _about_call(self, root: RankFailure) -> str:
        """A TypeError that comes from the call itself."""
        if root.error != "TypeError" or root.traceback:
            return ""
        calls = self.task.observe is call_it
        if isinstance(self.answer, type) and calls:
            return "This is a class. The check wants a function, or an object."
        if not diagnosis.WRONG_ARGUMENTS.search(root.message):
            return ""
        how = " as below" * calls
        return (
            f"The check calls it{how}: it must take the arguments of the stub, in the "
            "same order."
        )

    def _not_finished(self, error: RanksError) -> Outcome:
        root, limit = error.root, self.task.seconds
        if root is None:  # all ranks returned, but not all took part
            what = str(error).rpartition("\n(")[0]
            says = self._about(error) or diagnosis.SAME_CALLS
            return self._outcome("stuck", says, self._call(0), what)
        stuck = [f for f in error.failures.values() if f.kind == "stuck"]
        busy = [failure for failure in stuck if not waits(failure)]
        # All in one collective that needs all of them: so it is about to end.
        together = not (busy or self.unwaited) and self._are_in_one_collective(stuck)
        first = (busy or stuck)[0]
        lines = [self._call(first.rank)]
        verb = "was still at" if busy else "waits in"
        for failure in busy or stuck:
            who = f"Rank {failure.rank}" if self.task.where == "ranks" else "It"
            lines.append(f"{who} {verb} {failure.where or '?'}")
        if error.finished and self.task.where == "ranks":
            lines.append(f"{rank_list(error.finished).capitalize()} returned.")
        if busy or together:
            says = f"It did not end within {limit:g} seconds."
            about = self._about(error) if busy else ""
            if together:
                says += (
                    " All ranks are in the same collective, so none is missing. How "
                    "many collectives does it call? A few large ones take less time "
                    "than many small ones."
                )
            else:
                says = f"{about or 'Is there a loop that never ends?'} {says}"
            return self._outcome("too slow", says, *lines, rank=first.rank)
        said = "\n".join(self.unwaited) or self._about(error) or diagnosis.SAME_CALLS
        return self._outcome("stuck", said, *lines, rank=first.rank)

    def _are_in_one_collective(self, stuck: list[RankFailure]) -> bool:
        places = {failure.where for failure in stuck}
        called = stuck[0].where.partition(",")[0]
        return len(stuck) == self.n > 1 and len(places) == 1 and called in NEED_ALL

    # ------------------------------------------------------------------------ texts
    def _call(self, rank: int) -> str:
        """Who called what."""
        name = getattr(self.answer, "__name__", type(self.answer).__name__)
        inputs, observe, case = self.inputs[rank], self.task.observe, ""
        if observe is call_it:
            did = f"called {name}({', '.join(map(show, inputs))})"
        else:
            # The check calls it in its own way: these need not be its arguments.
            names = [p for p in inspect.signature(observe).parameters if p != "gpus"]
            given = ", ".join(map(given_as, names[1:], inputs))
            did, case = f"tried {name}", f" The case: {given}." * bool(given)
        if self.task.where == "here":
            return f"The check {did}.{case}"
        return f"With {self.n} rank{'s' * (self.n > 1)}, rank {rank} {did}.{case}"

    def _prints_of(self, rank: int) -> list[str]:
        """The first lines that the learner's code has printed on a rank."""
        begin = f"[rank {rank}] "
        lines = [line[len(begin) :] for line in self.printed if line.startswith(begin)]
        lines = without_places(without_frames(lines))
        if not lines:
            return []
        shown = [f"  {line[:70]}" for line in lines[:SHOWN_PRINTS]]
        if len(lines) > SHOWN_PRINTS:
            shown.append("  ... and more")
        return ["It printed:", *shown]


def lazy(answer: Any) -> str:
    """What to say of a function that a call alone does not run; "" of all others."""
    core = core_of(answer)
    if inspect.isgeneratorfunction(core):
        what, repair = "a function with `yield`", "Use `return`, not `yield`."
        made = "a generator"
    elif inspect.iscoroutinefunction(core):
        what, repair = "an `async def`", "Write `def`, not `async def`."
        made = "a coroutine"
    else:
        return ""
    return f"A call of {what} runs none of its lines: it makes {made}. {repair}"


def given_as(name: str, value: Any) -> str:
    """An argument in a sentence. A number says nothing without its name."""
    if isinstance(value, str):  # it describes what the check has made
        return value
    if isinstance(value, dict) and value:
        return ", ".join(f"{key}: {show(item)}" for key, item in value.items())
    shown = show(value)
    return shown if "tensor" in shown else f"{name}={shown}"


def indented(text: str) -> list[str]:
    """The last lines; one that comes again and again (a recursion) only once."""
    lines = [line for line, _ in itertools.groupby(text.splitlines())]
    return [f"  {cut_off(line, 76)}" for line in lines[-4:]]


def without_frames(lines: list[str]) -> list[str]:
    """Of a traceback only the exception: a thread of the learner's prints the whole."""
    kept, inside = [], False
    for line in lines:
        inside = line.startswith("Traceback (most") or inside and line.startswith(" ")
        if not inside:
            kept.append(line)
    return kept


def without_places(lines: list[str]) -> list[str]:
    """Of a warning only its words: not the file before them and the line after them."""
    kept, after_warning = [], False
    for line in lines:
        if not (after_warning and line.startswith("  ")):
            kept.append(WARNING.sub("", line))
        after_warning = bool(WARNING.match(line))
    return kept


def shortened(text: str) -> str:
    return "\n".join(line[:240] for line in text.splitlines()[:3])
