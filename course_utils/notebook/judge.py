"""Check an answer, case by case, and say what came of it."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

from torch import nn

from course_utils.notebook import diagnosis, ours
from course_utils.notebook.answer import CannotPack, is_unchanged, pack, uses
from course_utils.notebook.beside import (
    RETURNED,
    Beside,
    Seen,
    differences,
    first_wrong,
    is_out_of_step,
    look,
    signature,
    waits,
)
from course_utils.notebook.exercises import Reference
from course_utils.notebook.outcome import Outcome, Status
from course_utils.notebook.processes import fresh_ranks
from course_utils.ranks import RankFailure, RanksError
from course_utils.ranks.report import rank_list
from course_utils.tasks.compare import (
    ADVICE,
    RETURNED_NONE,
    difference,
    kind,
    plain,
    show,
)
from course_utils.tasks.task import OUT_OF_STEP, RULE, AtMost, Miss, Task, call_it

LONG_CASE = 120  # an argument that takes more letters is not shown in full
SHOWN_PRINTS = 3  # lines that the learner's code has printed
WRITE = "Write your code in the cell above, run that cell, then this one."
REPAIR = (
    "Repair {} in its cell, run that cell, then this one. (Comments, spaces and "
    "needless parentheses change nothing.)"
)
PRINTED = "It printed something and returned None: use `return`, not print."
# What a comparison says that helps nobody on, unless there is nothing else to say.
NO_HELP = re.compile(
    r"((The (item at|value of) [^.]* is wrong\. ?)+$|\d+ of \d+ values)"
)
# Printed by others than the learner's code: what PyTorch logs, with the time of day in
# it, and the frames of an exception in a thread.
NOISE = re.compile(
    r"^(\[rank\d+\]:)?\[?[WEI]\d{4} .*\n|^Traceback \(most.*\n( .*\n)*", re.MULTILINE
)
NEED_ALL = ("all_reduce", "all_gather", "barrier")  # the last one lets all go


class Different(Exception):
    """An answer was seen to differ from our solution: `args` has the outcome."""


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
    if is_unchanged(answer, solved.given):
        is_stub = "raise NotImplementedError" in solved.given
        return not_attempted(task, WRITE if is_stub else REPAIR.format(solved.name))
    try:
        packed = pack(answer)
    except CannotPack as error:
        return Outcome(task, "crashed", (str(error), more(task)))
    with Beside(task) as beside:
        try:
            for world_size in task.sizes:
                with fresh_ranks(world_size, task) as ranks:
                    for number in range(len(task.cases)):
                        seen = look(task, ranks, packed, number, task.seconds)
                        at = world_size, number
                        if outcome := Judge(beside, answer, at, seen).outcome():
                            raise Different(outcome)
        except Different as different:
            return different.args[0]
    compare = f'Compare it with ours: solution("{task.id}")'
    return Outcome(task, "passed", (where_right(task), compare))


def not_attempted(task: Task, begin: str = WRITE) -> Outcome:
    return Outcome(task, "not attempted", (begin, more(task)))


def more(task: Task) -> str:
    return f'A hint: hint("{task.id}")'


def where_right(task: Task) -> str:
    if task.where == "here":
        n = len(task.cases)
        return "It is right." if n == 1 else f"It is right in all {n} cases."
    if len(task.sizes) == 1:
        return f"It is right on {task.sizes[0]} ranks."
    *others, most = map(str, sorted(task.sizes))
    return f"It is right on {', '.join(others)} and {most} ranks."


def not_callable(task: Task, solved: Reference, answer: Any) -> str:
    wants = "function itself, not what it returns"
    if solved.is_class:
        wants = "class itself, not an object of it"
    return (
        f"This task wants the {wants}, but it got {kind(plain(answer))}. Write "
        f'check("{task.id}", {solved.name}), without parentheses after the name.'
    )


# ------------------------------------------------------------------ what is said of it


class Judge:
    """Says what came of an answer in one case."""

    def __init__(
        self, beside: Beside, answer: Any, at: tuple[int, int], seen: Seen
    ) -> None:
        self.beside, self.task, self.answer = beside, beside.task, answer
        self.at, (self.n, number), self.seen = at, at, seen
        self.inputs = self.task.inputs_of(self.task.cases[number], self.n)

    def outcome(self) -> Outcome | None:
        """What went wrong; None where all is right."""
        if self.seen.error:
            return self._failed(self.seen.error)
        want = self.beside.seen(None, *self.at)
        if wrong := first_wrong(self.task, self.seen, want):
            return self._wrong(want, *wrong)
        if self.seen.unwaited:
            luck = "The result is right, but by luck: not every request was waited for."
            return self._outcome("wrong", luck, *self.seen.unwaited, self._call(0))
        return self._judge_inputs() if self.task.keeps_inputs else None

    def _outcome(self, status: Status, *lines: str, rank: int = 0) -> Outcome:
        """The sentence that decides comes first, then what was seen."""
        prints = self._prints_of(rank)
        return Outcome(self.task, status, (*lines, *prints, more(self.task)))

    # ------------------------------------------------------------- results came back
    def _wrong(self, want: Seen, rank: int, name: str) -> Outcome:
        got = [observed.get(name) for observed in self.seen.observed]
        right = [observed.get(name) for observed in want.observed]
        mine, because = got[rank], self._because(name)
        if name in want.observed[rank] or mine is None:
            found = difference(mine, right[rank], self.task.tolerance) or ""
        else:
            advice = ADVICE.get(getattr(mine, "kind", ""), "")
            found = f"That is {kind(mine)}, and not what was asked for. {advice}"
        if name == RETURNED and mine is None:
            says = PRINTED if self._prints_of(rank) else self._near_miss(want, name)
            says = says or RETURNED_NONE
        elif self.seen.unwaited:
            says = "\n".join(filter(None, (*self.seen.unwaited, because)))
        else:
            says = self._near_miss(want, name) or because
        lines = [self._call(rank), compared(name, mine, right[rank])]
        if not says:
            given = self.inputs[rank], self.task.tolerance
            looks = diagnosis.diagnose(got, right, rank, *given)
            decides = looks or ("" if NO_HELP.match(found) else found.rstrip())
            # Where only the dtype is wrong, how to compute it is no help.
            values = decides.startswith("The values are right, ")
            otherwise = "" if values else self.task.otherwise
            says = " ".join(filter(None, (decides, otherwise))) or found
        elif says == because:
            looks = diagnosis.factor(mine, right[rank], self.n, self.task.tolerance)
            lines += filter(None, [looks])
        if found not in says and show(mine) == show(right[rank]):
            lines.append(found)
        differ = set(differences(self.task, self.seen, want))
        wrong = [r for r in range(self.n) if (r, name) in differ]
        if fine := [r for r in range(self.n) if r not in wrong]:
            lines.append(f"Right on {rank_list(fine)}; wrong on {rank_list(wrong)}.")
        return self._outcome("wrong", says, *lines, rank=rank)

    def _near_miss(self, want: Seen, name: str) -> str:
        """What is said of the near miss that shows the same, or ""."""
        in_all, in_this = [], []  # alike in all that is observed, or in `name` alone
        for miss in self.task.misses:
            other = self.beside.seen(miss, *self.at)
            wrong = None if other.error else first_wrong(self.task, other, want)
            if wrong is None or wrong[1] != name:
                continue
            both_ways = (self.seen, other), (other, self.seen)
            others = {n for w in both_ways for _, n in differences(self.task, *w)}
            if name not in others:
                (in_this if others else in_all).append(miss)
        return self._first_to_fail_here(in_all + in_this)

    def _first_to_fail_here(self, misses: list[Miss]) -> str:
        found = (m for m in misses if self.beside.fails_first_at(m, self.at))
        return next((miss.says for miss in found), "")

    def _because(self, name: str) -> str:
        return next((s for part, s in self.task.because.items() if part in name), "")

    def _judge_inputs(self) -> Outcome | None:
        for rank, after in enumerate(self.seen.after):
            for before, changed in zip(self.inputs[rank], after, strict=True):
                found = difference(changed, plain(before), 0.0)
                if found is None:
                    continue
                nests = isinstance(before, (list, dict))
                advice = diagnosis.IN_PLACE_LIST if nests else diagnosis.IN_PLACE
                return self._outcome(
                    "wrong",
                    "The result is right, but the argument is not what it was. Whoever "
                    f"called the function may still need it. {advice}",
                    self._call(rank),
                    f"  before  {show(plain(before))}\n  after   {show(changed)}",
                    *filter(None, [found.replace("should be", "was")]),
                    rank=rank,
                )
        return None

    # -------------------------------------------------------------- nothing came back
    def _failed(self, error: RanksError) -> Outcome:
        root = error.root
        if root is None or root.kind == "stuck":
            return self._not_finished(error)
        if root.error == "StillAStub":
            line, _, other = root.message.partition(", in ")
            says = f"still raises NotImplementedError, {line}."
            if other and not ours.solved(self.task.id).defines(other):
                says = f"{other}, which it calls, {says}"
                begin = f"Solve the task of {other} first. Run its cell, then this one."
            else:
                says, begin = f"It {says}", WRITE
            return Outcome(self.task, "not attempted", (says, begin, more(self.task)))
        if root.error == "ForbiddenCall":
            return self._outcome(
                "wrong",
                f"Your code calls {root.message}. It would work: but it is what you "
                f"build here yourself. {self.task.instead}".rstrip(),
                RULE,
            )
        if root.error == "OnlyMessages":
            says = f"Your code calls {root.message}. Use no collective in this task."
            return self._outcome("wrong", f"{says} {self.task.instead}".rstrip())
        return self._crashed(error, root)

    def _crashed(self, error: RanksError, root: RankFailure) -> Outcome:
        on_ranks = self.task.where == "ranks"
        about = self._about(error) or diagnosis.about_error(root, on_ranks)
        if root.kind == "died":
            at = f", {root.where}" if root.where else ""
            lines = [f"Its process ended ({root.error}){at}."]
        else:
            message = root.message.strip().split("\n(caused by")[0]
            raised = f"It raised {root.error}: {message}".rstrip(": ")
            first, *more_lines = raised.splitlines()
            # PyTorch's last line says what the arguments were, after many that may be.
            few = more_lines[-1:] if len(more_lines) > 2 else more_lines
            raised = "\n".join(cut(line, 240) for line in (first, *few))
            lines = [raised] * bool(about) + indented(root.traceback)
            about = about or raised
        lines = about, self._call(root.rank), *lines
        return self._outcome("crashed", *lines, rank=root.rank)

    def _about(self, error: RanksError) -> str:
        """What the task says of a failure, or a near miss that fails in this way."""
        root = error.root
        text = f"{root.error}: {root.message}" if root else ""
        if is_out_of_step(error):
            text += f" {OUT_OF_STEP}"
        for part, says in self.task.errors.items():
            if part in text:
                return says
        seen = ((miss, self.beside.seen(miss, *self.at)) for miss in self.task.misses)
        mine = signature(error)
        alike = [m for m, s in seen if s.error and signature(s.error) == mine]
        return self._first_to_fail_here(alike)

    def _not_finished(self, error: RanksError) -> Outcome:
        if error.root is None:  # all ranks returned, but not all took part
            what = str(error).rpartition("\n(")[0]
            says = self._about(error) or diagnosis.SAME_CALLS
            return self._outcome("stuck", says, self._call(0), what)
        stuck = [f for f in error.failures.values() if f.kind == "stuck"]
        busy = [failure for failure in stuck if not waits(failure)]
        says = "\n".join(self.seen.unwaited)
        # In a line of the learner's own, and in no call: it goes round and round.
        goes_round = any(failure.where.startswith("line ") for failure in stuck)
        asked = any("is_completed()" in failure.where for failure in stuck)
        if asked or goes_round and uses(self.answer, "is_completed"):
            says, busy = diagnosis.POLLED, stuck
        elif busy:
            says = self._about(error) or diagnosis.ENDLESS
        elif not says and self.n > 1 and len({f.where for f in stuck}) == 1:
            if len(stuck) == self.n and stuck[0].where.startswith(NEED_ALL):
                says, busy = diagnosis.TOO_MANY, stuck  # so it is about to end
        shown = busy or stuck
        lines = [self._call(shown[0].rank)]
        for failure in shown:
            who = f"Rank {failure.rank}" if self.task.where == "ranks" else "It"
            verb = "was still at" if busy else "waits in"
            lines.append(f"{who} {verb} {failure.where or '?'}")
        if any(failure.where.startswith("wait,") for failure in shown):
            lines.append(diagnosis.ONE_WAIT)
        if error.finished and self.task.where == "ranks":
            lines.append(f"{rank_list(error.finished).capitalize()} returned.")
        if busy:
            status = "too slow"
            says = f"{says} It did not end within {self.task.seconds:g} seconds."
        else:
            status = "stuck"
            says = says or self._about(error) or diagnosis.SAME_CALLS
        return self._outcome(status, says, *lines, rank=shown[0].rank)

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
        lines = self.seen.printed.splitlines(keepends=True)
        text = "".join(line[len(begin) :] for line in lines if line.startswith(begin))
        lines = NOISE.sub("", text).splitlines()
        shown = cut_lines(lines[:SHOWN_PRINTS])
        if len(lines) > SHOWN_PRINTS:
            shown.append("  ... and more")
        return ["It printed:", *shown] if shown else []


def compared(name: str, got: Any, right: Any) -> str:
    if isinstance(right, AtMost) and isinstance(got, AtMost):
        return f"{name}: {show(got.value)}. At most {show(right.value)} expected."
    if isinstance(right, bool) and isinstance(got, bool):
        words = {True: "yes", False: "no"}
        return f"{name}: {words[got]}. Expected: {words[right]}."
    if name == RETURNED:
        expected = "" if right is None else f", expected was {show(right)}"
        return f"It returned {show(got)}{expected}."
    return f"{name}: {show(got)}. Expected: {show(right)}."


def given_as(name: str, value: Any) -> str:
    """An argument in a sentence. A number says nothing without its name."""
    if isinstance(value, str):  # it describes what the check has made
        return value
    if isinstance(value, dict) and value:
        return ", ".join(f"{key}: {show(item)}" for key, item in value.items())
    if isinstance(value, nn.Module):
        return f"{name}: {', '.join(type(layer).__name__ for layer in leaves(value))}"
    shown = show(value)
    if len(shown) > LONG_CASE:
        return f"{name}: {kind(value)} of {len(value)} items"
    return shown if "tensor" in shown else f"{name}={shown}"


def leaves(module: nn.Module) -> list[nn.Module]:
    """The layers of a model that have no layers of their own."""
    return [layer for layer in module.modules() if not [*layer.children()]]


def indented(text: str) -> list[str]:
    """The last lines; one that comes again and again (a recursion) only once."""
    return cut_lines([line for line, _ in itertools.groupby(text.splitlines())][-4:])


def cut_lines(lines: list[str]) -> list[str]:
    return [f"  {cut(line, 76)}" for line in lines]


def cut(line: str, letters: int) -> str:
    """The line; if it has more letters, then its beginning."""
    return line if len(line) <= letters else line[: letters - 4] + " ..."
