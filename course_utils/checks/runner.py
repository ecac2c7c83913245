"""Run the learner's code on real ranks, and tell in words what came of it."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import io
import itertools
import pickle
import re
import warnings
from typing import Any

from torch import nn

from course_utils.checks.task import Attempt, Mistake, Task, call_it
from course_utils.exercises import reference
from course_utils.notebook.answer import (
    CannotPack,
    core_of,
    forbidden_call,
    is_unchanged,
    pack,
)
from course_utils.notebook.compare import (
    RETURNED_NONE,
    difference,
    kind,
    plain,
    show,
)
from course_utils.notebook.on_rank import (
    call_on_rank,
    courses_own,
    full_name,
    places_of,
)
from course_utils.notebook.outcome import Outcome, cut_off
from course_utils.ranks import RankFailure, Ranks, RanksError, RequestWarning
from course_utils.ranks.processes import Zygote, start_method
from course_utils.ranks.report import rank_list, request_lines, sentences
from course_utils.tasks.task import RULE

SHOWN_PRINTS = 3  # lines that the learner's code has printed
IN_PLACE = (
    "recv, collectives and operations such as `x /= 2` work in place: take a `clone()` "
    "first."
)
IN_PLACE_LIST = (
    "`pop`, `append`, `sort` and `x[i] = ...` change the list itself: work on a copy, "
    "`list(x)`."
)
_KEYBOARD = (
    "Nobody can type anything while a check runs. Take what you need from the "
    "arguments."
)
_NO_GPU = (
    "It runs on processes without GPUs. Take the device from what you are given: "
    "`tensor.device`."
)
# An exception's class, a part of its message, and what to say about it.
SAYINGS = (
    ("RuntimeError", "Found no NVIDIA driver", _NO_GPU),
    ("RuntimeError", "No CUDA GPUs are available", _NO_GPU),
    ("AssertionError", "Torch not compiled with CUDA", _NO_GPU),
    ("EOFError", "", _KEYBOARD),
    ("BdbQuit", "", f"There is a breakpoint in it. {_KEYBOARD}"),
    ("RecursionError", "", "It calls itself again and again. When should it stop?"),
    (
        "TypeError",
        "unsupported operand type(s) for ^",
        "In Python, `^` does not raise to a power (it works on the bits of whole "
        "numbers). Write `10**9`, or 1e9.",
    ),
    (
        "RuntimeError",
        "has to be contiguous",
        "A column, or a tensor that was transposed, is no single piece of memory. "
        "Send a copy that is: `.contiguous()`.",
    ),
    *(
        (
            error,
            part,
            "An all-gather brings one piece from each rank, so the output needs room "
            "for dist.get_world_size() pieces, each as large as the one that is sent. "
            "The check tries several world sizes: no fixed number fits all of them.",
        )
        for error, part in (
            ("RuntimeError", "invalid output tensor list at index"),
            ("ValueError", "The output holds one piece for each of the"),
        )
    ),
    (
        "NameError",
        "name 'rank' is",
        "`rank` is ready-made in %%ranks cells only. In a function: dist.get_rank().",
    ),
    (
        "NameError",
        "name 'world_size' is",
        "`world_size` is ready-made in %%ranks cells only. In a function: "
        "dist.get_world_size().",
    ),
    (
        "ValueError",
        "initialize the default process group twice",
        "The process group is ready when your function is called: leave out "
        "init_process_group.",
    ),
)
_GROUP_STAYS = (
    "The process group belongs to the check, which still needs it when your function "
    "has returned: leave out destroy_process_group."
)
_NO_RANKS = (
    "There are no ranks in this task: the check calls the function in one process. "
    "Take what you need from the arguments."
)
# What Python says of a call that does not fit, and not of another TypeError.
WRONG_ARGUMENTS = re.compile(r"(takes|missing|unexpected|multiple values) .*argument")
# What PyTorch itself writes to stderr, with the time of day in it.
LOG_LINE = re.compile(r"^\[rank \d+\] (\[rank\d+\]:)?\[?[WEI]\d{4} ")
# A warning begins with the file that it comes from, which is long and mostly PyTorch's.
WARNING = re.compile(r"^\S.*:\d+: (?=\w*Warning: )")


def run_task(task: Task, answer: Any) -> Outcome:
    """Check an answer. Changes nothing and prints nothing.

    Raises:
        KeyboardInterrupt: the learner stopped it.
        RanksError: no processes could be started on this machine.
    """
    if answer is None or answer is ...:
        return Outcome(task, "not attempted", _begin(task))
    if task.where == "value":
        return _check_value(task, answer)
    # A module is callable: it would be called with what is meant for the class.
    name = _class_of(task)
    if not callable(answer) or name and isinstance(answer, nn.Module):
        return Outcome(task, "wrong", (_not_callable(task, answer, name),))
    given = _given(task)
    if is_unchanged(answer, given):
        is_stub = "raise NotImplementedError" in given
        what = "Write your code" if is_stub else "Repair the code"
        return Outcome(task, "not attempted", _begin(task, what))
    called = forbidden_call(answer, (*_forbidden_names(task), *courses_own()))
    if called:
        return _forbidden(task, called)
    try:
        packed = pack(answer)
    except CannotPack as error:
        return Outcome(task, "crashed", (str(error), _more(task)))
    return _check_on_ranks(task, answer, packed)


def _begin(task: Task, what: str = "Write your code") -> tuple[str, str]:
    """What to do first."""
    if task.where == "value":
        what = "Set the answer"
    return (f"{what} in the cell above, run that cell, then this one.", _more(task))


def _more(task: Task) -> str:
    return f'A hint: hint("{task.id}")'


def _compare(task: Task) -> str:
    return f'Compare it with ours: solution("{task.id}")'


def _given(task: Task) -> str:
    try:
        return reference(task.id).given
    except (OSError, LookupError, ValueError):
        return ""  # the notebook with the solutions is not there


def _class_of(task: Task) -> str:
    """The name of the class that the task wants; "" if it wants a function."""
    try:
        found = re.match(r"class (\w+)", reference(task.id).code)
    except (OSError, LookupError, ValueError):
        return ""  # the notebook with the solutions is not there
    return found[1] if found else ""


def _not_callable(task: Task, answer: Any, name: str) -> str:
    wants = "class itself, not an object of it" if name else ""
    wants = wants or "function itself, not what it returns"
    return (
        f"This task wants the {wants}, but it got {kind(plain(answer))}. Write "
        f'check("{task.id}", {name or "my_function"}), without parentheses after the '
        "name."
    )


def _forbidden_names(task: Task) -> tuple[str, ...]:
    return tuple(map(full_name, task.forbids))


def _forbidden(task: Task, called: str) -> Outcome:
    lines = (
        f"Your code calls {called}.",
        f"It would work: but it is what you build here yourself. {task.instead}",
        RULE,
        _more(task),
    )
    return Outcome(task, "wrong", tuple(line.rstrip() for line in lines))


# ----------------------------------------------------------------------------- values


def _check_value(task: Task, answer: Any) -> Outcome:
    got, want = plain(answer), task.reference(task.expect, (), 1)[0]
    found = difference(got, want, task.tolerance)
    if found is None:
        yes = f"Yes: {show(want, task.unit)}."
        return Outcome(task, "passed", (yes, _compare(task)))
    # The right value is not told: it would end the task.
    said = _mistake(task, (), [got], [want], 0)
    digits = f"{got!r} {task.unit}".rstrip()  # 20.9999999 must not look like 21
    yours = digits if isinstance(got, float) else show(got, task.unit)
    lines = [f"You answered {yours}. That is not it."]
    found = found.replace(RETURNED_NONE, "It is None.")  # no function was called
    lines.append(said or _found(task, found, got) or task.otherwise)
    return Outcome(task, "wrong", (*filter(None, lines), _more(task)))


def _found(task: Task, found: str, got: Any) -> str:
    """What the comparison says, and after it, where it helps, the task's own words.

    Of a list or dict the comparison tells where it is wrong, not what to do about it.
    """
    if found and isinstance(got, (list, tuple, dict)):
        return f"{found} {task.otherwise}".rstrip()
    return found


# ------------------------------------------------------------------------- on the ranks


def _check_on_ranks(task: Task, answer: Any, packed: bytes) -> Outcome:
    on_ranks = task.where == "ranks"
    sizes = task.world_sizes if on_ranks else (1,)
    for world_size in sizes:
        outcome = _check_world_size(task, answer, packed, world_size)
        if outcome is not None:
            return outcome
    if not on_ranks:
        cases = len(task.cases)
        text = "It is right." if cases == 1 else f"It is right in all {cases} cases."
    elif len(sizes) == 1:
        text = f"It is right on {sizes[0]} ranks."
    else:
        *others, most = map(str, sorted(sizes))
        text = f"It is right on {', '.join(others)} and {most} ranks."
    return Outcome(task, "passed", (text, _compare(task)))


def _check_world_size(
    task: Task, answer: Any, packed: bytes, world_size: int
) -> Outcome | None:
    """The outcome of the first case that is not right; None if all are."""
    ranks = _take(world_size, task)
    clean = False
    try:
        for number, case in enumerate(task.cases):
            look = _Look(task, answer, case, world_size)
            outcome = look.at(ranks, packed, seed=1000 * (number + 1))
            if outcome is not None:
                return outcome
        clean = True
        return None
    finally:
        _give_back(ranks, clean)


class _Look:
    """One case on some ranks: run it, and judge what came back."""

    def __init__(self, task: Task, answer: Any, case: Any, world_size: int) -> None:
        self.task, self.case, self.world_size = task, case, world_size
        self.name = getattr(answer, "__name__", type(answer).__name__)
        self.is_class = isinstance(answer, type)
        self.lazy = _lazy(answer)
        self.inputs = task.inputs_of(case, world_size)
        self.printed: list[str] = []
        self.unwaited: list[str] = []

    def at(self, ranks: Ranks, packed: bytes, seed: int) -> Outcome | None:
        """The outcome, or None if all is right."""
        task = self.task
        # What the learner's code prints belongs to the outcome, and is shown with it.
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), warnings.catch_warnings():
                warnings.simplefilter("ignore", RequestWarning)  # it is said below
                results = ranks.run(
                    call_on_rank,
                    packed,
                    list(map(pickle.dumps, self.inputs)),
                    task.run,
                    _forbidden_names(task),
                    seed,
                    timeout=task.seconds,
                )
        except RanksError as error:
            if error.cause == "interrupt":
                raise KeyboardInterrupt from None
            self._keep(output, ranks)
            return self._failed(error)
        self._keep(output, ranks)
        outcome = self._judge(results)
        return self._with_requests(outcome) if self.unwaited else outcome

    def _keep(self, output: io.StringIO, ranks: Ranks) -> None:
        unwaited = request_lines(ranks.unwaited)
        self.unwaited = sentences(unwaited).splitlines()
        lines = output.getvalue().splitlines()
        self.printed = [line for line in lines if not LOG_LINE.match(line)]

    # ------------------------------------------------------------------------ texts
    def _call(self, rank: int) -> str:
        """Who called what."""
        inputs, run = self.inputs[rank], self.task.run
        case = ""
        if run is call_it:
            did = f"called {self.name}({', '.join(map(show, inputs))})"
        else:
            # The check calls it in its own way: these need not be its arguments.
            names = [n for n in inspect.signature(run).parameters if n != "gpus"][1:]
            given = ", ".join(map(_given_as, names, inputs))
            did, case = f"tried {self.name}", f" The case: {given}." * bool(given)
        if self.task.where != "ranks":
            return f"The check {did}.{case}"
        number = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        return f"With {number}, rank {rank} {did}.{case}"

    def _prints_of(self, rank: int) -> list[str]:
        """The first lines that the learner's code has printed on a rank."""
        begin = f"[rank {rank}] "
        lines = [line[len(begin) :] for line in self.printed if line.startswith(begin)]
        lines = _without_places(_without_frames(lines))
        if not lines:
            return []
        shown = [f"  {line[:70]}" for line in lines[:SHOWN_PRINTS]]
        if len(lines) > SHOWN_PRINTS:
            shown.append("  ... and more")
        return ["It printed:", *shown]

    # --------------------------------------------------------------- results came back
    def _judge(self, results: list[tuple[Any, tuple]]) -> Outcome | None:
        task = self.task
        # It was made plain on its rank. But there the learner's code could get at it.
        got = [plain(result) for result, _ in results]
        want = task.reference(task.expect, self.case, self.world_size)
        found = [
            difference(one, other, task.tolerance)
            for one, other in zip(got, want, strict=True)
        ]
        wrong = [rank for rank, text in enumerate(found) if text is not None]
        if wrong:
            rank = wrong[0]
            said = _mistake(task, self.case, got, want, rank, self.inputs)
            if task.run is not call_it:  # else it is seen from what came back
                said = self.lazy or said
            lines = [
                self._call(rank),
                *self._compared(got[rank], want[rank], in_words=bool(said)),
                *self._where_wrong(wrong),
                said or self._guess(got, want, rank, found[rank]),
                *self._prints_of(rank),
                _more(task),
            ]
            return Outcome(task, "wrong", tuple(filter(None, lines)))
        if task.keeps_inputs:
            return self._judge_inputs([plain(after) for _, after in results])
        return None

    def _compared(self, got: Any, want: Any, in_words: bool) -> list[str]:
        """What came back and what was expected.

        Where the task's `run` reports on several things, of the first that is wrong.

        Args:
            in_words: say what differs, if it is not in what is shown.
        """
        task = self.task
        both = isinstance(got, dict) and isinstance(want, dict)
        names = [n for n in want if n in got] if both else []
        lines, is_ = [], "It returned  "
        for name in names if task.run is not call_it else ():
            if difference(got[name], want[name], task.tolerance) is not None:
                lines, is_ = [f"The first difference: {name}"], "It is        "
                got, want = got[name], want[name]
                break
        if lines and isinstance(want, bool) and isinstance(got, bool):
            yes_or_no = {True: "yes", False: "no"}
            return [*lines, f"{is_}{yes_or_no[got]}", f"Expected     {yes_or_no[want]}"]
        unit = "" if lines else task.unit
        lines += [f"{is_}{show(got, unit)}", f"Expected     {show(want, unit)}"]
        if in_words and show(got) == show(want):
            lines.append(difference(got, want, task.tolerance) or "")
        return lines

    def _where_wrong(self, wrong: list[int]) -> list[str]:
        right = [rank for rank in range(self.world_size) if rank not in wrong]
        if self.world_size == 1:
            return []
        if not right:
            return ["Wrong on all ranks."]
        return [f"Right on {rank_list(right)}; wrong on {rank_list(wrong)}."]

    def _guess(self, got: list, want: list, rank: int, found: str) -> str:
        """What may have gone wrong, where no mistake of the task's own fits."""
        if got[rank] is None and self._prints_of(rank):
            return "It printed something and returned None: use `return`, not print."
        if found:
            return _found(self.task, found, got[rank])
        for other in range(self.world_size):
            same = difference(got[rank], want[other], self.task.tolerance) is None
            if other != rank and same:
                return f"That is what rank {other} should return."
        if all(difference(one, got[0], 0.0) is None for one in got[1:]) and got[1:]:
            return f"All ranks returned the same. {self.task.otherwise}".rstrip()
        return self.task.otherwise

    def _judge_inputs(self, after: list[tuple]) -> Outcome | None:
        for rank, (args, now) in enumerate(zip(self.inputs, after, strict=True)):
            for before, changed in zip(args, now, strict=True):
                if difference(changed, plain(before), 0.0) is not None:
                    advice = IN_PLACE_LIST if isinstance(before, list) else IN_PLACE
                    lines = (
                        self._call(rank),
                        "The result is right, but the argument is not what it was:",
                        f"  before  {show(plain(before))}",
                        f"  after   {show(changed)}",
                        f"Whoever called the function may still need it. {advice}",
                        _more(self.task),
                    )
                    return Outcome(self.task, "wrong", lines)
        return None

    def _with_requests(self, outcome: Outcome | None) -> Outcome:
        """Nobody waited for a request: a right result is luck, a wrong one is not."""
        if outcome is None:
            said = "The result is right, but by luck: not every request was waited for."
            lines = (self._call(0), said, *self.unwaited, _more(self.task))
        else:
            lines = (*outcome.lines[:-1], *self.unwaited, outcome.lines[-1])
        return Outcome(self.task, "wrong", lines)

    # -------------------------------------------------------------- nothing came back
    def _failed(self, error: RanksError) -> Outcome:
        root = error.root
        if root is None:  # all ranks returned, but not all took part
            what = str(error).rpartition("\n(")[0]
            lines = (self._call(0), what, _more(self.task))
            return Outcome(self.task, "stuck", lines)
        if root.error == "StillAStub":
            line, _, other = root.message.partition(", in ")
            if other:
                lines = (
                    f"{other}, which it calls, still raises NotImplementedError, "
                    f"{line}.",
                    f"Solve the task of {other} first, and run its cell: then this "
                    "check can tell.",
                )
                return Outcome(self.task, "not attempted", lines)
            stub = f"It still raises NotImplementedError, {line}."
            return Outcome(self.task, "not attempted", (stub, *_begin(self.task)))
        if root.error == "ForbiddenCall":
            return _forbidden(self.task, root.message)
        if root.kind == "stuck":
            return self._not_finished(error)
        return self._crashed(error)

    def _crashed(self, error: RanksError) -> Outcome:
        root = error.root
        lines = [self._call(root.rank)]
        if root.kind == "died":
            at = f", {root.where}" if root.where else ""
            lines.append(f"Its process ended ({root.error}){at}.")
            lines.append(
                "Something ended it before the function could return: a call such as "
                "os._exit, a signal, a crash in C code, or too little memory."
            )
        elif root.error == "SystemExit":
            lines.append("It called exit(). A function ends with `return`.")
            lines += _indented(root.traceback)
        else:
            message = root.message.strip().split("\n(caused by")[0]
            text = f"It raised {root.error}: {message}".rstrip(": ")
            lines += [_shortened(text), *_indented(root.traceback)]
        attempt = self._attempt(root.rank, error)
        said = _first_that_fits(self.task.mistakes, attempt)
        said = said or self._about(root)
        if said:
            lines.append(said)
        lines += [*self._prints_of(root.rank), _more(self.task)]
        return Outcome(self.task, "crashed", tuple(lines))

    def _about(self, root: RankFailure) -> str:
        """What an exception means that has little to do with the task."""
        if root.error == "TypeError" and not root.traceback:  # at the call itself
            if self.is_class and self.task.run is call_it:
                return "This is a class. The check wants a function, or an object."
            if WRONG_ARGUMENTS.search(root.message):
                how = " as the first line shows" * (self.task.run is call_it)
                return (
                    f"The check calls it{how}: it must take the arguments of the stub, "
                    "in the same order."
                )
        if "process group has not" in root.message:
            return _NO_RANKS if self.task.where == "here" else _GROUP_STAYS
        for error, part, saying in SAYINGS:
            if root.error == error and part in root.message:
                return saying
        return ""

    def _not_finished(self, error: RanksError) -> Outcome:
        stuck = [f for f in error.failures.values() if f.kind == "stuck"]
        busy = [failure for failure in stuck if not _waits(failure)]
        # All in one collective that needs all of them: so it is about to end.
        together = not (busy or self.unwaited) and self._are_in_one_collective(stuck)
        status = "too slow" if busy or together else "stuck"
        verb = "was still at" if busy else "waits in"
        first = (busy or stuck)[0]
        lines = [self._call(first.rank)]
        if status == "too slow":
            lines.append(f"It did not end within {self.task.seconds:g} seconds.")
        if self.task.where == "ranks":
            for failure in busy or stuck:
                lines.append(f"Rank {failure.rank} {verb} {failure.where or '?'}")
            if error.finished:
                lines.append(f"{rank_list(error.finished).capitalize()} returned.")
        else:
            lines.append(f"It {verb} {first.where}")
        said = _first_that_fits(self.task.mistakes, self._attempt(first.rank, error))
        if together:
            lines.append(
                "All ranks are in the same collective, so none is missing. How many "
                "collectives does it call? A few large ones take less time than many "
                "small ones."
            )
        elif said:
            lines.append(said)
        elif self.unwaited:
            lines += self.unwaited
        elif busy:
            lines.append("Is there a loop that never ends?")
        else:
            lines.append(
                "Every rank of the group must call a collective, and a recv needs its "
                "send."
            )
        lines += [*self._prints_of(first.rank), _more(self.task)]
        return Outcome(self.task, status, tuple(lines))

    def _are_in_one_collective(self, stuck: list[RankFailure]) -> bool:
        places = {failure.where for failure in stuck}
        call = stuck[0].where.partition(",")[0]
        everybody = len(stuck) == self.world_size > 1
        return everybody and len(places) == 1 and call in NEED_ALL

    def _attempt(self, rank: int, error: RanksError) -> Attempt:
        failure = error.failures[rank]
        return Attempt(
            rank,
            self.world_size,
            self.inputs[rank],
            error=failure.error,
            message=failure.message,
            returned=tuple(error.finished),
        )


# Collectives that no rank leaves before the last one has come.
NEED_ALL = ("all_reduce", "all_gather", "all_gather_into_tensor", "barrier")
# They return at once: a rank that is found in one of them runs in a loop around it.
INQUIRIES = ("get_rank", "get_world_size", "get_backend", "is_initialized")


def _waits(failure: RankFailure) -> bool:
    """Does a rank that has not finished wait for another one?"""
    return failure.error == "waiting" and not failure.where.startswith(INQUIRIES)


def _mistake(
    task: Task, case: Any, got: list, want: list, rank: int, inputs: list | None = None
) -> str:
    """What the task says about this wrong result, or ""."""
    right = tuple(
        r
        for r, (one, other) in enumerate(zip(got, want, strict=True))
        if difference(one, other, task.tolerance) is None
    )
    args = inputs[rank] if inputs else ()
    attempt = Attempt(rank, len(got), args, got[rank], want[rank], right)
    for mistake in task.mistakes:
        if mistake.like is not None:
            like = list(map(plain, task.reference(mistake.like, case, len(got))))
            # Where the mistake makes no difference, it is not what is wrong here.
            fits = _are_alike(got, like, task.tolerance) and not _are_alike(
                like, want, task.tolerance
            )
        else:
            fits = _fits(mistake, attempt)
        if fits:
            return mistake.says
    return ""


def _are_alike(got: list, want: list, tolerance: float) -> bool:
    """Has every rank what it should have?"""
    pairs = zip(got, want, strict=True)
    return all(difference(one, other, tolerance) is None for one, other in pairs)


def _lazy(answer: Any) -> str:
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


def _first_that_fits(mistakes: tuple[Mistake, ...], attempt: Attempt) -> str:
    fitting = (m.says for m in mistakes if m.like is None and _fits(m, attempt))
    return next(fitting, "")


def _fits(mistake: Mistake, attempt: Attempt) -> bool:
    # A test of a mistake is written for the value that the mistake gives, and may
    # stumble over any other.
    try:
        return bool(mistake.when(attempt))
    except Exception:
        return False


def _given_as(name: str, value: Any) -> str:
    """An argument in a sentence. A number says nothing without its name."""
    if isinstance(value, str):  # it describes what the check has made
        return value
    if isinstance(value, dict):
        return ", ".join(f"{key}: {show(item)}" for key, item in value.items())
    shown = show(value)
    return shown if "tensor" in shown else f"{name}={shown}"


def _indented(text: str) -> list[str]:
    """The last lines; one that comes again and again (a recursion) only once."""
    lines = [line for line, _ in itertools.groupby(text.splitlines())]
    return [f"  {cut_off(line, 76)}" for line in lines[-4:]]


def _without_frames(lines: list[str]) -> list[str]:
    """Of a traceback only the exception: a thread of the learner's prints the whole."""
    kept, inside = [], False
    for line in lines:
        inside = line.startswith("Traceback (most") or inside and line.startswith(" ")
        if not inside:
            kept.append(line)
    return kept


def _without_places(lines: list[str]) -> list[str]:
    """Of a warning only its words: not the file before them and the line after them."""
    kept, after_warning = [], False
    for line in lines:
        if not (after_warning and line.startswith("  ")):
            kept.append(WARNING.sub("", line))
        after_warning = bool(WARNING.match(line))
    return kept


def _shortened(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(line[:240] for line in lines[:3])


# ------------------------------------------------------------------- the processes

_zygote: Zygote | None = None
_kept: dict[tuple[int, bool], Ranks] = {}


def _take(world_size: int, task: Task) -> Ranks:
    """Ranks on which no learner's code has left anything behind.

    Where a rank is a fork (Linux) new ones take a tenth of a second, given a zygote
    that stays. Elsewhere a rank costs an ``import torch``: there they are kept, as
    long as nothing fails on them.
    """
    if start_method() == "fork":
        _keep_zygote()
        ours = (call_on_rank.__module__, task.run.__module__)
        ours = [name for name in ours if name.startswith("course_utils.")]
        for name in (*ours, *task.imports):
            _zygote.import_first(name)
        _zygote.call_first(courses_own)
        for names in (_forbidden_names(task), courses_own()):
            _zygote.call_first(places_of, names)
    init = task.where == "ranks"
    kept = _kept.pop((world_size, init), None)
    return kept or Ranks(
        world_size, backend="gloo", output="grouped", init=init, quiet=True
    )


def _give_back(ranks: Ranks, clean: bool) -> None:
    if clean and start_method() != "fork":
        _kept[ranks.n, ranks.init] = ranks
    else:
        ranks.close()


def _keep_zygote() -> None:
    """One user more, for the life of this process, so that it does not end."""
    global _zygote
    if _zygote is None or not _zygote.usable():
        _zygote = Zygote.acquire()


@atexit.register
def _close() -> None:
    for ranks in _kept.values():
        ranks.close()
    if _zygote is not None and _zygote.usable():
        _zygote.release()
