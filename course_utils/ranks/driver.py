"""What a learner calls: ``Ranks``. It sends, prints, and tells what went wrong."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import psutil

from course_utils.ranks.copies import pickled, pickled_call, unpickled
from course_utils.ranks.output import Printer, choose_output
from course_utils.ranks.processes import interrupts_held
from course_utils.ranks.report import (
    RanksError,
    Unwaited,
    choose_root,
    describe_failures,
    rank_list,
    remember_source,
    warn_of_requests,
    what_now,
)
from course_utils.ranks.round import (
    SEVER_AFTER,
    Round,
    calls_by_group,
)
from course_utils.ranks.team import Team

# Windows waits for 63 things at most: two for each rank.
MAX_RANKS = 30 if sys.platform == "win32" else 256
GROUP_SECONDS = 60.0  # to form a process group
GROUP_TIMEOUT = 1800.0  # of a collective; the driver sees a deadlock long before


@dataclass
class RankStatus:
    """One line of :meth:`Ranks.status`.

    Attributes:
        rank: its number.
        pid: its process.
        memory: bytes that this process holds alone (shared pages not counted; on
            macOS they are).
        backend: ``"gloo"``, ``"nccl"``, or None when it is in no process group.
        variables: the names that cells have defined on it.
    """

    rank: int
    pid: int
    memory: int
    backend: str | None
    variables: list[str]

    def __str__(self) -> str:
        names = ", ".join(self.variables) or "no variables"
        return (
            f"rank {self.rank}: process {self.pid}, {self.memory / 2**20:.0f} MiB, "
            f"{self.backend or 'no process group'}; {names}"
        )


class Statuses(list):
    """A list of :class:`RankStatus` that shows itself as lines."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self))


class Ranks:
    """N processes that run what this notebook sends them and keep their variables.

    They are in one process group, as ``torchrun`` would start them: every cell under
    ``%%ranks`` and every function given to :meth:`run` runs on all of them at once.
    A failure on any rank raises :class:`RanksError` here, within ``timeout``; the
    notebook goes on, and so do the ranks.

    Args:
        n: how many ranks (1 to 256; on Windows 30). More ranks than CPU cores work,
            slowly.
        backend: ``"gloo"``, ``"nccl"``, or ``"auto"``: nccl where every rank can have
            a GPU of its own, else gloo.
        timeout: seconds that one cell may take; up to three times as many where other
            programs keep the ranks from running. A deadlock is noticed earlier, in
            about two seconds.
        output: ``"stream"`` prints lines as they come, ``"grouped"`` rank by rank
            after the cell, ``"auto"`` grouped under CI and pytest.
        init: form the process group, also a new one after a cell that has left it.
            With False only RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
            are set, and the code on the ranks calls ``init_process_group`` itself.
        quiet: do not say which backend was chosen.

    Attributes:
        unwaited: the requests that the last cell or function made, such as those of
            ``irecv``, and gave up without a ``wait()``. A :class:`RequestWarning` has
            told of them.

    Raises:
        ValueError: an argument that makes no sense.
        RanksError: the processes could not be started.

    Cost: the first ``Ranks`` of a notebook waits for one ``import torch`` (a few
    seconds), later ones take a fraction of a second. About 60 MB a rank. On macOS
    and Windows every rank imports torch for itself: seconds each time, and about
    300 MB a rank.

    Example::

        ranks = Ranks(4)
        ranks.run(lambda: torch.distributed.get_rank())   # [0, 1, 2, 3]
        ranks.close()                                      # or: with Ranks(4) as r
    """

    work = "cell"  # what the ranks run, in messages
    live: weakref.WeakSet[Ranks] = weakref.WeakSet()
    made = 0  # how many, in this process
    _said: set[str] = set()

    def __init__(
        self,
        n: int = 4,
        *,
        backend: str = "auto",
        timeout: float = 60.0,
        output: str = "auto",
        init: bool = True,
        quiet: bool = False,
    ) -> None:
        one_of("backend", backend, "auto", "gloo", "nccl")
        one_of("output", output, "auto", "stream", "grouped")
        self.n = number_of_ranks("n", n)
        self.timeout = positive_seconds(timeout)
        self.output = output
        self.init = bool(init)
        self._asked_backend = backend
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._cells = itertools.count(1)
        self._generation = 0
        self._group_ready = False
        self.unwaited: list[Unwaited] = []
        self.team = Team(n)
        self._closer = weakref.finalize(self, self.team.close)
        try:
            self.team.start(range(n))
            self.backend = self._choose_backend(quiet)
            self._new_group()
        except BaseException:
            self.close()
            raise
        self._birth = Ranks.made = Ranks.made + 1
        Ranks.live.add(self)

    def __repr__(self) -> str:
        state = "" if self._closer.alive else ", closed"
        return f"Ranks({self.n}, backend={self.backend!r}{state})"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @classmethod
    def latest(cls, n: int | None = None) -> Ranks | None:
        """The newest open ``Ranks`` of this process (with ``n`` ranks, if given)."""
        alive = [
            ranks
            for ranks in cls.live
            if ranks._closer.alive and (n is None or ranks.n == n)
        ]
        return max(alive, key=lambda ranks: ranks._birth, default=None)

    # --------------------------------------------------------------------- public calls
    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        only: list[int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; return one result a rank.

        The function and its arguments are copied to the ranks, the results back.
        Functions and classes defined in the notebook work. A tensor changed on a
        rank does not change here.

        Args:
            fn: what to call.
            timeout: seconds for this call, instead of the ``timeout`` of ``Ranks``.
            only: the ranks that call it; the others do nothing.

        Raises:
            RanksError: it failed on some rank, or did not end in time.
            TypeError: something given, or returned, cannot be copied (pickled).
        """
        if not callable(fn):
            raise TypeError(
                f"run() needs a function, but got {type(fn).__name__}: "
                "write ranks.run(step, x), not ranks.run(step(x))"
            )
        payload = pickled_call(fn, args, kwargs)
        request = {"op": "call", "payload": payload}
        replies = self._cell(request, timeout, self._chosen(only))
        return [unpickled(r, reply, "the result") for r, reply in replies.items()]

    def run_cell(
        self,
        source: str,
        *,
        timeout: float | None = None,
        only: list[int] | None = None,
        first_line: int = 1,
    ) -> None:
        """Run the text of a cell on every rank; print output and the last value.

        The names ``torch``, ``dist`` (``torch.distributed``), ``rank`` and
        ``world_size`` are there already.

        Args:
            source: Python code.
            timeout, only: as in :meth:`run`.
            first_line: the number that the first line has in its cell (2 below a
                magic), so that line numbers in messages are those on the screen.

        Raises:
            RanksError: it failed on some rank, or did not end in time.
            SyntaxError: the code is not Python; nothing ran.
        """
        source = "\n" * (first_line - 1) + source
        name = f"<ranks cell {next(self._cells)}>"
        compile(source, name, "exec")
        remember_source(name, source)
        silent = source.rstrip().endswith(";")
        request = {"op": "cell", "source": source, "name": name, "silent": silent}
        self._cell(request, timeout, self._chosen(only))

    def push(self, **variables: Any) -> None:
        """Set these variables on every rank (each gets its own copy)."""
        for name, value in variables.items():
            pickled(value, f"{name} ({type(value).__name__})")
        payload = cloudpickle.dumps(variables)
        self._simple({"op": "push", "payload": payload}, list(range(self.n)))

    def pull(self, name: str, rank: int | None = None) -> Any:
        """The variable of that name: a list with one value a rank, or one rank's.

        Raises:
            RanksError: there is no such variable, or it cannot be copied (pickled).
            TypeError: the copy cannot be read here.
        """
        chosen = self._chosen(None if rank is None else [rank])
        replies = self._simple({"op": "pull", "name": name}, chosen)
        values = [unpickled(r, reply, repr(name)) for r, reply in replies.items()]
        return values if rank is None else values[0]

    def status(self) -> list[RankStatus]:
        """Process, memory, backend and variables of every rank."""
        replies = self._simple({"op": "status"}, list(range(self.n)))
        statuses = Statuses()
        for rank, reply in replies.items():
            pid = self.team.processes[rank].pid
            process = psutil.Process(pid)
            try:
                memory = process.memory_full_info().uss
            except psutil.AccessDenied:  # macOS lets only a process itself see that
                memory = process.memory_info().rss
            statuses.append(
                RankStatus(rank, pid, memory, reply["backend"], reply["variables"])
            )
        return statuses

    def restart(self) -> None:
        """End all ranks and start fresh ones; their variables are gone."""
        with self._use():
            self._restart(list(range(self.n)))
            self._new_group()

    def close(self) -> None:
        """End all ranks. Nothing is left: no process, no file."""
        self._closer()

    # --------------------------------------------------------------- one cell at a time
    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """Only one thread may talk to the ranks."""
        if not self._closer.alive:
            raise RanksError("these ranks are closed. Make new ones: ranks = Ranks(4)")
        if not self._lock.acquire(blocking=False):
            raise RanksError("these ranks are busy with another cell")
        try:
            yield
        finally:
            self._lock.release()

    def _chosen(self, only: list[int] | None) -> list[int]:
        if only is None:
            return list(range(self.n))
        # Text stays whole: the characters of "0,2" are no ranks.
        listed = isinstance(only, Iterable) and not isinstance(only, str)
        chosen = list(only) if listed else [only]
        wrong = [r for r in chosen if type(r) is not int or not 0 <= r < self.n]
        if wrong or not chosen:
            raise ValueError(
                f"there is no rank {', '.join(map(repr, wrong)) or '(empty list)'}: "
                f"these are ranks 0 to {self.n - 1}"
            )
        return sorted(set(chosen))

    def _cell(
        self, request: dict[str, Any], timeout: float | None, chosen: list[int]
    ) -> dict[int, dict[str, Any]]:
        """Run a cell or function; replies in rank order, or :class:`RanksError`."""
        limit = self.timeout if timeout is None else positive_seconds(timeout)
        with self._use():
            if not self._group_ready:
                self._new_group()
            printer = self._printer(chosen)
            result = self._round(request, chosen, limit, printer)
            # A cell may leave its group; with init=False that is the learner's affair.
            stayed = all(reply.get("in_group") for reply in result.replies.values())
            self._group_ready = stayed or not self.init
            if result.failed and not (self.init and stayed and result.in_step()):
                self._group_ready = False
                result.sever_failed()
            values = {
                rank: reply.get("value")
                for rank, reply in sorted(result.replies.items())
                if reply["status"] == "ok"
            }
            printer.finish(values)
            self.unwaited = [one for one in result.unwaited() if not one.kept]
            if result.failed:
                raise self._error(result, limit)
            if all(reply["facts"] for reply in result.replies.values()):
                self._check_same_collectives(result)
            if self.unwaited:
                self._warn_of_requests(result)
            return dict(sorted(result.replies.items()))

    def _printer(self, chosen: list[int]) -> Printer:
        return Printer(chosen, choose_output(self.output))

    def _simple(
        self, request: dict[str, Any], chosen: list[int]
    ) -> dict[int, dict[str, Any]]:
        """A request that runs no learner's code."""
        with self._use():
            result = self._round(request, chosen, self.timeout, None)
            if result.failed:
                self._group_ready &= not result.severed
                raise self._error(result, self.timeout)
            return dict(sorted(result.replies.items()))

    # ---------------------------------------------------------------------- one request
    def _round(
        self,
        request: dict[str, Any],
        chosen: list[int],
        limit: float,
        printer: Printer | None,
    ) -> Round:
        """Send a request and wait until every rank answered, died, or was stopped.

        Raises:
            KeyboardInterrupt: it was interrupted, and all ranks finished all the same.
        """
        round_ = Round(self.team, next(self._ids), chosen, printer)
        try:
            round_.send(request)
            round_.wait(limit)
        except KeyboardInterrupt:
            round_.cause = "interrupt"
            round_.leave_out_the_rest()
        if round_.pending:
            with interrupts_held():
                round_.free()
        if round_.cause == "interrupt" and not round_.failed:
            self._group_ready = False  # its connections may be closed
            raise KeyboardInterrupt
        return round_

    def _error(self, result: Round, limit: float) -> RanksError:
        """Put the failed ranks in order, and say what happened."""
        failures = result.failures()
        restarted = sorted(result.lost)
        if restarted:
            self._restart(restarted)
        root = choose_root(failures) if failures else None
        cause = result.cause
        if root is not None and root.kind in ("raised", "died"):
            cause = root.kind
        if root is not None and root.error == "CollectiveMismatch":
            cause = "mismatch"
        waited = (
            "Deadlock: nothing moves, and nothing will."
            if result.quiet
            else f"Not finished after {limit:g} s, the limit for this {self.work}."
        )
        left_out = [rank for rank in range(self.n) if rank not in result.chosen]
        message = describe_failures(
            failures,
            result.finished(),
            cause,
            waited,
            left_out,
            unwaited=result.unwaited(),
            renewed=self._generation > 1,
            work=self.work,
        )
        what_now = self._what_now(restarted)
        return RanksError(
            "\n".join(filter(None, [message, what_now])),
            cause=cause,
            failures=failures,
            root=root,
            finished=result.finished(),
        )

    def _what_now(self, restarted: list[int]) -> str:
        """The last line of a message: what survived, what the next cell will find."""
        return what_now(restarted, self.n, self.init, self._group_ready)

    def _check_same_collectives(self, result: Round) -> None:
        """All ranks finished. Did one of them leave out a collective?

        A call with ``async_op=True`` that nobody waits for returns at once.
        """
        replies = result.replies
        for group, counts in calls_by_group(replies, self.n).items():
            fewest = min(counts.values())
            if fewest == max(counts.values()):
                continue
            more = [rank for rank, count in counts.items() if count > fewest]
            fewer = [rank for rank, count in counts.items() if count == fewest]
            self._group_ready = False
            text = replies[more[0]]["facts"]["calls"][group][fewest]
            # The call that nobody has waited for still waits, in C++, and nobody can
            # leave a group before: close the connections, as after a failure.
            time.sleep(SEVER_AFTER)
            result.sever_all()
            absent = [rank for rank in fewer if rank not in replies]
            raise RanksError(
                f"{rank_list(more).capitalize()} called {text}, but "
                f"{rank_list(fewer)} did not"
                + (" (left out of this cell)" if absent == fewer else "")
                + f".\nThe {self.work} ended all the same, because it did not wait for "
                "the result. The result never comes.\n"
                "Every rank of a group must call the same collectives."
                + "".join(f"\n{line}" for line in [self._what_now([])] if line),
                cause="mismatch",
                finished=sorted(replies),
            )

    def _warn_of_requests(self, result: Round) -> None:
        """All ranks finished, but some request was given up before it was done."""
        now = ""
        messages = any(request.is_p2p for request in self.unwaited)
        if messages and self._group_ready and not result.in_step():
            # The request of this cell would take the message of a later one.
            self._group_ready = False
            result.sever_all()
            now = self._what_now([])
            if self.init:
                now += "\nDDP models and groups that were made before this cell no "
                now += "longer work: make them again."
        warn_of_requests(self.unwaited, now)

    # -------------------------------------------------------------- processes and group
    def _choose_backend(self, quiet: bool) -> str:
        hello = self._round({"op": "hello"}, list(range(self.n)), GROUP_SECONDS, None)
        if hello.cause == "interrupt":
            raise KeyboardInterrupt
        if hello.failed:
            raise self._start_error(hello)
        gpus = min(reply["gpus"] for reply in hello.replies.values())
        has_nccl = all(reply["nccl"] for reply in hello.replies.values())
        backend = self._asked_backend
        if backend == "nccl" and gpus < self.n:
            raise RanksError(
                f"backend='nccl' needs a GPU for each of the {self.n} ranks, but this "
                f"machine has {gpus}. Use backend='gloo', or fewer ranks."
            )
        if backend == "nccl" and not has_nccl:
            raise RanksError(
                "backend='nccl' is not part of this PyTorch (it exists for Linux with "
                "CUDA). Use backend='gloo'."
            )
        if backend == "auto":
            backend = "nccl" if has_nccl and gpus >= self.n else "gloo"
        text = "Ranks are real processes. "
        if backend == "nccl":
            text += "Each has a GPU of its own; they talk through nccl."
        elif gpus and has_nccl:
            text += (
                "They run on the CPU and talk through gloo: nccl needs a GPU for each "
                f"rank, and this machine has {gpus}."
            )
        else:
            text += "They run on this machine's CPU and talk through gloo."
        if not quiet and backend not in Ranks._said:
            Ranks._said.add(backend)
            print(text)
        return backend

    def _new_group(self) -> None:
        """Have all ranks leave their group and, with ``init``, form a new one."""
        for attempt in ("first", "after a restart"):
            self._generation += 1
            everybody = list(range(self.n))
            request = {
                "op": "group",
                "generation": self._generation,
                "init": self.init,
                "backend": self.backend,
                "group_timeout": GROUP_TIMEOUT,
                "meeting_file": self.team.meeting_file(self._generation),
                "environment": {
                    "WORLD_SIZE": str(self.n),
                    "LOCAL_WORLD_SIZE": str(self.n),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.team.new_port()),
                },
            }
            result = self._round(request, everybody, GROUP_SECONDS, None)
            if not result.failed:
                self._group_ready = True
                if attempt == "after a restart" and self in Ranks.live:
                    print(
                        "The ranks could not form a new process group. All of them "
                        "were started afresh, without variables."
                    )
                return
            if result.cause == "interrupt":
                raise KeyboardInterrupt
            self._restart(everybody)
            if attempt == "after a restart":
                raise self._start_error(result)

    def _start_error(self, result: Round) -> RanksError:
        failures = result.failures()
        root = choose_root(failures) if failures else None
        why = f"{root.error}: {root.message}" if root else result.cause
        return RanksError(
            f"the ranks could not be started: {why}\n"
            "Run `python3 -m course_utils doctor` in a terminal to see what is wrong.",
            cause=result.cause,
            failures=failures,
            root=root,
        )

    def _restart(self, which: list[int]) -> None:
        self._group_ready = False
        with interrupts_held(raise_after=True):  # half of them are of no use
            for rank in which:
                self.team.processes[rank].kill()
            self.team.start(which)


def number_of_ranks(name: str, n: int) -> int:
    """Check an argument: a number of ranks that this system can start."""
    if type(n) is not int or not 1 <= n <= MAX_RANKS:
        must = f"it must be a whole number from 1 to {MAX_RANKS}"
        raise ValueError(f"{name} is {n!r}; {must}")
    return n


def one_of(name: str, word: str, *words: str) -> None:
    """Check an argument: one of these words."""
    if word not in words:
        *others, last = map(repr, words)
        raise ValueError(
            f"{name} is {word!r}; it must be {', '.join(others)} or {last}"
        )


def positive_seconds(timeout: float) -> float:
    """Check a timeout: a number of seconds above zero."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; it must be seconds, more than 0")
    return float(timeout)
