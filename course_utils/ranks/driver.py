"""The kernel's side of the ranks: send, print, wait, and see to it that it ends."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import math
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import cloudpickle
import psutil

from course_utils.ranks.output import Printer, choose_output, is_c10d_log
from course_utils.ranks.processes import (
    ForkedRank,
    RankProcess,
    SharedFolder,
    SpawnedRank,
    Zygote,
    seconds_of_work,
    start_method,
)
from course_utils.ranks.report import (
    HELPER_ENDED,
    NOT_TOLD,
    RankFailure,
    RanksError,
    Unwaited,
    choose_root,
    describe_failures,
    exit_text,
    find_where,
    frames_of_dump,
    is_meeting,
    is_waiting,
    learner_lines,
    patience,
    rank_list,
    warn_of_requests,
    what_now,
)

# Windows waits for 63 things at most: two for each rank.
MAX_RANKS = 30 if sys.platform == "win32" else 256
BOARD_BYTES = 1 << 14  # a rank's part of the memory in which calls are compared
GROUP_SECONDS = 60.0  # to form a process group
GROUP_TIMEOUT = 1800.0  # of a collective; the driver sees a deadlock long before
# After one rank has failed, how long may a rank that still computes go on?
PEER_SECONDS = 2.0
STATUS_SECONDS = 5.0  # to learn how a rank ended whose connection has closed
SEVER_AFTER = 0.1  # when a dead rank's closed connections should have done it
# After a rank has failed: look so often whether others wait for it. Who waits at two
# looks is freed; gloo can miss a connection that closes while it starts to send.
LOOK_SECONDS = 0.03
# Steps of the ladder that ends a stuck rank: ask where it is, close its connections,
# interrupt it (twice), kill it.
ASK_SECONDS, SEVER_SECONDS, INTERRUPT_SECONDS = 0.4, 0.6, 0.7
DUMP_SECONDS = 1.0  # for what a rank says to a signal if it cannot answer
HEAD_START = 0.05  # of an interrupt before the connections are closed
# Nothing printed, answered or computed for this long, and every rank that has not
# finished waits for another one: a deadlock.
QUIET_SECONDS, QUIET_SAMPLES, QUIET_CPU = 0.6, 2, 0.02
# Ranks that make a group look again and again who has come, which takes some CPU time.
MEETING_CPU = 0.15
# A rank that has finished may still send. But a thread of its own may also compute for
# ever.
AFTER_THE_END_SECONDS = 4.0
OUTPUT_SECONDS = 1.0  # for output to arrive; a rank may also print without end


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
        timeout: seconds that one cell may take. A deadlock is noticed earlier, in
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
    _live: weakref.WeakSet[Ranks] = weakref.WeakSet()
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
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_RANKS:
            raise ValueError(
                f"n is {n!r}; it must be a whole number from 1 to {MAX_RANKS}"
            )
        if backend not in ("auto", "gloo", "nccl"):
            raise ValueError(
                f"backend is {backend!r}; it must be 'auto', 'gloo' or 'nccl'"
            )
        if output not in ("auto", "stream", "grouped"):
            raise ValueError(
                f"output is {output!r}; it must be 'auto', 'stream' or 'grouped'"
            )
        self.n = n
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
        self._team = Team(n)
        self._closer = weakref.finalize(self, self._team.close)
        try:
            self._team.start(range(n))
            self.backend = self._choose_backend(quiet)
            self._new_group()
        except BaseException:
            self.close()
            raise
        self._birth = Ranks.made = Ranks.made + 1
        Ranks._live.add(self)

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
            for ranks in cls._live
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
            pid = self._team.processes[rank].pid
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
                self._check_same_collectives(result.replies)
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
        round_ = Round(self._team, next(self._ids), chosen, printer)
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

    def _check_same_collectives(self, replies: dict[int, dict[str, Any]]) -> None:
        """All ranks finished. Did one of them leave out a collective?

        A call with ``async_op=True`` that nobody waits for returns at once.
        """
        for group, counts in calls_by_group(replies, self.n).items():
            fewest = min(counts.values())
            if fewest == max(counts.values()):
                continue
            more = [rank for rank, count in counts.items() if count > fewest]
            fewer = [rank for rank, count in counts.items() if count == fewest]
            self._group_ready = False
            asked = self._round({"op": "calls", "group": group}, more, 5, None)
            lists = asked.replies
            text = lists[more[0]]["texts"][fewest] if more[0] in lists else "one"
            # The call that nobody has waited for still waits, in C++, and nobody can
            # leave a group before: close the connections, as after a failure.
            time.sleep(SEVER_AFTER)
            asked.sever_all()
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
                now += (
                    "\nDDP models and groups that were made before this cell work no "
                )
                now += "longer: make them anew."
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
                "meeting_file": self._team.meeting_file(self._generation),
                "environment": {
                    "WORLD_SIZE": str(self.n),
                    "LOCAL_WORLD_SIZE": str(self.n),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self._team.new_port()),
                },
            }
            result = self._round(request, everybody, GROUP_SECONDS, None)
            if not result.failed:
                self._group_ready = True
                if attempt == "after a restart" and self in Ranks._live:
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
                self._team.processes[rank].kill()
            self._team.start(which)


class Team:
    """The processes of one ``Ranks``, with what they share."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.owner = os.getpid()
        self.processes: dict[int, RankProcess] = {}
        self.zygote: Zygote | None = None
        self.shared: list[int] = []  # files in memory: the board, the meeting file
        self.folder: SharedFolder | None = None  # the same for spawned ranks
        self.port = contextlib.ExitStack()  # holds MASTER_PORT
        self.forks = start_method() == "fork"

    def start(self, which: Any) -> None:
        """Start these ranks and wait until they listen."""
        if self.forks and (self.zygote is None or not self.zygote.usable()):
            if self.zygote is not None:  # somebody killed it, and with it all ranks
                self.zygote.release()
                which = range(self.n)
            self.zygote = Zygote.acquire()
        if self.forks and not self.shared:
            board = os.memfd_create("ranks-board")
            os.ftruncate(board, self.n * BOARD_BYTES)
            self.shared = [board, os.memfd_create("ranks-meeting")]
        if not self.forks and self.folder is None:
            self.folder = SharedFolder(self.n * BOARD_BYTES)
        started = []
        for rank in which:
            if self.forks:
                process = ForkedRank(
                    self.zygote, rank, self.n, self._environment(rank), self.shared
                )
            else:
                process = SpawnedRank(
                    rank, self.n, self._environment(rank), self.folder
                )
            self.processes[rank] = process
            started.append(process)
        for process in started:
            process.wait_started()

    def _environment(self, rank: int) -> dict[str, str]:
        environment = dict(os.environ)
        loopback = loopback_interface()
        environment.update(
            # Whatever a cluster or container has set: all ranks are on this machine.
            GLOO_SOCKET_IFNAME=loopback,
            NCCL_SOCKET_IFNAME=loopback,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        )
        return environment

    def meeting_file(self, generation: int) -> str | None:
        """Where spawned ranks find each other; None: they have another way."""
        return self.folder.meeting_file(generation) if self.folder else None

    def new_port(self) -> int:
        """For ``MASTER_PORT``: a learner's ``init_process_group`` may take it later."""
        self.port.close()
        return hold_port(self.port)

    def close(self) -> None:
        """End everything; safe to call in a forked child of the kernel (no effect)."""
        if os.getpid() != self.owner:
            return
        for process in self.processes.values():
            with contextlib.suppress(AttributeError, OSError):
                process.kill()
        self.processes.clear()
        for descriptor in self.shared:
            os.close(descriptor)
        self.shared = []
        self.port.close()
        if self.zygote is not None:
            self.zygote.release()
            self.zygote = None
        if self.folder is not None:
            self.folder.close()
            self.folder = None


@dataclass
class Round:
    """One request to some ranks, and all that came of it."""

    team: Team
    id: int
    chosen: list[int]
    printer: Printer | None
    replies: dict[int, dict[str, Any]] = field(default_factory=dict)
    died: dict[int, int | None] = field(default_factory=dict)
    untold: dict[int, str] = field(default_factory=dict)  # why it is unknown how
    frames: dict[int, list] = field(default_factory=dict)  # innermost first
    calls_begun: dict[int, int] = field(default_factory=dict)  # when last asked where
    stopped: set[int] = field(default_factory=set)  # had not finished by themselves
    killed: set[int] = field(default_factory=set)
    cause: str = "raised"
    quiet: bool = False
    ask_id: int = 0

    def __post_init__(self) -> None:
        self.pending = set(self.chosen)
        self.begun: set[int] = set()  # to send to
        self.started = time.monotonic()
        self.last_event = self.started
        self.failed_at: float | None = None
        self.severed = False
        self.last_look = self.started
        self.waited: dict[int, list] = {}  # where ranks waited at the last look
        self.samples: list[tuple[float, dict[int, float]]] = []
        self.silent_outputs: set[int] = set()

    # -------------------------------------------------------------------- send and wait
    def send(self, request: dict[str, Any]) -> None:
        for rank in self.chosen:
            self.begun.add(rank)
            self._send_to(rank, {"id": self.id, **request})

    def leave_out_the_rest(self) -> None:
        """Interrupted while this was sent: some ranks know nothing of it."""
        self.stopped = self.pending - self.begun
        self.pending &= self.begun

    def _send_to(self, rank: int, message: dict[str, Any]) -> None:
        process = self.team.processes[rank]
        try:
            process.channel.send(message)
        except (OSError, ValueError):  # closed, or nobody at the other end
            self._died(rank)

    def wait(self, limit: float) -> None:
        """Until all have answered; at most ``limit`` seconds."""
        deadline = self.started + limit
        while self.pending:
            now = time.monotonic()
            if self.failed_at is not None and now > self.failed_at + PEER_SECONDS:
                return
            if now > deadline:
                self.cause = "timeout"
                return
            pause = 0.1 if self.failed_at is None else LOOK_SECONDS
            self._step(min(pause, max(0.0, deadline - now)))
            if self.failed_at is not None and not self.severed:
                self._free_those_that_wait()
            if self._is_quiet():
                self.cause, self.quiet = "timeout", True
                return

    def _step(self, seconds: float) -> None:
        """Handle what the ranks say within ``seconds``."""
        channels = {self.team.processes[r].channel: r for r in self.pending}
        outputs = {
            self.team.processes[r].output: r
            for r in self.chosen
            if r not in self.died and r not in self.silent_outputs
        }
        waitables: list[Any] = [*channels, *outputs]
        if self.team.zygote is not None:
            waitables.append(self.team.zygote.socket)
        for ready in connection.wait(waitables, seconds):
            if ready in channels:
                self._receive(channels[ready])
            elif ready in outputs:
                if not self._drain(outputs[ready]):
                    self.silent_outputs.add(outputs[ready])
        for rank in sorted(self.pending):
            status = self.team.processes[rank].exit_status()
            if status is not None:
                self._died(rank, status)
        if self.printer is not None:
            self.printer.show()

    def _receive(self, rank: int) -> None:
        try:
            with interrupts_held(raise_after=True):  # half a message is useless
                reply = self.team.processes[rank].channel.recv()
        except (EOFError, OSError):
            self._died(rank)
            return
        if reply["id"] == self.ask_id and "frames" in reply:
            self.frames[rank] = reply["frames"]
            begun = reply["begun"]
            if begun != self.calls_begun.setdefault(rank, begun):
                self.calls_begun[rank] = begun
                self.last_event = time.monotonic()  # it has gone on since it was asked
        elif reply["id"] == self.id:
            self.last_event = time.monotonic()
            self.replies[rank] = reply
            self.pending.discard(rank)
            self._drain(rank, reply.get("mark", 0))
            if reply["status"] == "error":
                self._one_failed()

    def _drain(self, rank: int, mark: float | None = None) -> bool:
        """Take what a rank has printed; False if there was nothing.

        Args:
            mark: take all that came before; None takes one piece and does not wait.
        """
        process = self.team.processes[rank]
        deadline = time.monotonic() + OUTPUT_SECONDS
        found = False
        while True:
            if data := process.read_output():
                found = True
                if not is_c10d_log(data):
                    self.last_event = time.monotonic()
                if self.printer is not None:
                    self.printer.feed(rank, data)
            elif mark is not None and not process.output_is_complete(mark):
                time.sleep(0.001)  # it comes through a thread
            else:
                return found
            if mark is None or time.monotonic() > deadline:
                return found

    def _died(self, rank: int, status: int | None = None) -> None:
        if rank in self.died:
            return
        process = self.team.processes[rank]
        if status is None:
            # Once, even if nothing is told of many ranks.
            status = process.exit_status(wait=0.0 if self.untold else STATUS_SECONDS)
            if status is None:
                ended = process.helper_ended()
                self.untold[rank] = HELPER_ENDED if ended else NOT_TOLD
        self.last_event = time.monotonic()
        self._drain(rank, math.inf)
        self.died[rank] = status
        self.pending.discard(rank)
        if rank not in self.killed:
            self.frames[rank] = frames_of_dump(process.last_dump())
        self._one_failed()

    def _one_failed(self) -> None:
        """The others may wait for it. Mostly its closed connections free them."""
        if self.failed_at is None:
            self.failed_at = time.monotonic()

    def _free_those_that_wait(self) -> None:
        """Let calls fail that wait for a rank which has failed.

        Where nobody waits, all may come to the same error: then the group goes on.
        """
        now = time.monotonic()
        if self.died:
            if now > self.failed_at + SEVER_AFTER:  # they wait for others than the dead
                self._sever(self.pending)
        elif self.pending and now > max(self.failed_at, self.last_look) + LOOK_SECONDS:
            self._ask_where(ASK_SECONDS)
            self.last_look = time.monotonic()
            before = self.waited
            self.waited = {
                rank: self.frames[rank]
                for rank in self.pending
                if is_waiting(self.frames.get(rank, []))
            }
            if any(before.get(rank) == where for rank, where in self.waited.items()):
                self._sever(self.chosen)

    def _sever(self, ranks: Iterable[int]) -> None:
        self.severed = True
        self._tell(ranks, "sever")

    # ------------------------------------------------------------------------- deadlock
    def _is_quiet(self) -> bool:
        """Does every rank that has not finished wait for another one, for good?"""
        now = time.monotonic()
        if not self.pending or now - self.last_event < QUIET_SECONDS:
            self.samples.clear()
            return False
        if self.samples and now - self.samples[-1][0] < QUIET_SECONDS:
            return False
        pids = {rank: one.pid for rank, one in self.team.processes.items()}
        used = seconds_of_work(pids)
        before = self.samples[-1][1] if self.samples else {}
        spent = {rank: s - before.get(rank, 0.0) for rank, s in used.items()}
        if any(spent.get(rank, 0.0) > MEETING_CPU for rank in self.pending):
            self.samples = [(now, used)]
            return False
        self._ask_where(0.2)
        if time.monotonic() - self.last_event < QUIET_SECONDS:
            self.samples.clear()  # one has answered: others may go on now
            return False
        used = seconds_of_work(pids)
        computing = {r for r in self.pending if spent.get(r, 0.0) > QUIET_CPU}
        asked = self.pending & self.frames.keys()
        if not all(is_waiting(self.frames[rank]) for rank in asked) or any(
            not is_meeting(self.frames.get(rank, [])) for rank in computing
        ):
            self.samples = [(now, used)]
            return False
        if asked != self.pending:  # too busy a machine to answer in time: ask again
            self.samples[-1:] = [(now, used)]
            return False
        self.samples.append((now, used))
        if len(self.samples) <= QUIET_SAMPLES:
            return False
        frames = [self.frames[rank] for rank in self.pending]
        still_since, used_then = self.samples[0]
        needed = patience(frames, still_since - self.started)
        if any(
            used[rank] - used_then.get(rank, 0.0) > QUIET_CPU
            for rank in used.keys() - self.pending
        ):
            needed = max(needed, AFTER_THE_END_SECONDS)
        return now - still_since >= needed

    def _ask_where(self, seconds: float) -> None:
        """Fill ``frames`` of the pending ranks, as far as they answer in time."""
        for rank in self.pending:
            self.frames.pop(rank, None)
        self.ask_id -= 1  # negative: never the id of a request
        for rank in sorted(self.pending):
            with contextlib.suppress(OSError, ValueError):
                message = {"op": "where", "id": self.ask_id}
                self.team.processes[rank].channel.send(message)
        deadline = time.monotonic() + seconds
        while self.pending - self.frames.keys() and time.monotonic() < deadline:
            self._step(0.02)

    # ---------------------------------------------------------- the ladder that ends it
    def free(self) -> None:
        """End what has not ended: kindly first, in bounded time."""
        self.stopped |= self.pending
        self._ask_where(ASK_SECONDS)
        # These hold the GIL in C code, or are stopped: only a signal gets through.
        silent = [self.team.processes[r] for r in self.pending - self.frames.keys()]
        for process in silent:
            process.ask_for_dump()
        deadline = time.monotonic() + DUMP_SECONDS
        for process in silent:
            self.frames[process.rank] = frames_of_dump(process.wait_for_dump(deadline))
        running = {r for r in self.pending if not is_waiting(self.frames.get(r, []))}
        if running:
            # Before they begin a collective: see the delay in Rank.serve.
            self._tell(running, "interrupt")
            self._wait_pending(HEAD_START)
        self.sever_all()
        if self.pending - running:
            self._wait_pending(SEVER_SECONDS)
        for _ in range(2):
            self._tell(self.pending, "interrupt")
            self._wait_pending(INTERRUPT_SECONDS)
        for rank in sorted(self.pending):
            self.killed.add(rank)
            self._drain(rank, 0)
            self.team.processes[rank].kill()
        self.pending.clear()

    def sever_all(self) -> None:
        """Close the connections between all ranks: what waits in C++ then fails."""
        self._sever(self.team.processes)

    def sever_failed(self) -> None:
        """Close those of the failed ranks: nobody can leave a group before."""
        if not self.severed:
            self._sever(set(self.chosen) - set(self.finished()) - self.lost)

    def _tell(self, ranks: Iterable[int], op: str) -> None:
        """Have the control threads of these ranks do something."""
        for rank in sorted(ranks):
            with contextlib.suppress(OSError, ValueError):
                self.team.processes[rank].channel.send({"op": op, "id": self.id})

    def _wait_pending(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.pending and time.monotonic() < deadline:
            self._step(0.02)

    # ----------------------------------------------------------------------- the result
    @property
    def failed(self) -> bool:
        return len(self.finished()) < len(self.chosen)

    @property
    def lost(self) -> set[int]:
        """Ranks whose process is gone."""
        return set(self.died) | self.killed

    def finished(self) -> list[int]:
        return sorted(filter(self._is_finished, self.replies))

    def _is_finished(self, rank: int) -> bool:
        """Has it come to its end by itself? It may have caught what has freed it."""
        freed = self.cause == "timeout" and rank in self.stopped
        return self.replies[rank]["status"] == "ok" and not freed

    def in_step(self) -> bool:
        """Have all ranks made the same calls, so that their group can go on?

        Then nothing is under way that one of them does not know of.
        """
        replies = self.replies.values()
        known = self.replies.keys() == set(self.chosen) and not self.severed
        if not known or not all(r["facts"] and r["facts"]["certain"] for r in replies):
            return False
        if any(reply.get("peer") for reply in replies):
            return False
        if any(one.is_p2p and one.earlier and not one.kept for one in self.unwaited()):
            return False  # nobody knows of its message any more
        alike = {(r["facts"]["refused"], r["facts"]["groups"]) for r in replies}
        if len(self.chosen) < self.team.n:
            alike.add((0, 0))  # the others have done nothing
        counts = [
            *calls_by_group(self.replies, self.team.n).values(),
            *self._calls_by_message().values(),
        ]
        return len(alike) == 1 and all(len(set(c.values())) == 1 for c in counts)

    def _calls_by_message(self) -> dict[tuple, dict[int, int]]:
        """How often its two ranks have called send or recv for each (from, to, ...)."""
        called = {
            rank: reply["facts"]["messages"]
            for rank, reply in self.replies.items()
            if reply.get("facts")
        }
        return {
            message: {
                rank: called.get(rank, {}).get(message, 0) for rank in message[:2]
            }
            for message in {m for of_rank in called.values() for m in of_rank}
        }

    def unwaited(self) -> list[Unwaited]:
        """The requests that nobody has waited for, on all ranks that have answered."""
        return [
            Unwaited(rank, **request)
            for rank, reply in sorted(self.replies.items())
            for request in reply.get("requests", ())
        ]

    def failures(self) -> dict[int, RankFailure]:
        """What happened on each rank that did not finish."""
        found = {}
        others_failed = self.failed_at is not None and any(
            rank not in self.stopped for rank in (*self.died, *self._raised())
        )
        for rank in self.chosen:
            if rank in self.replies and self._is_finished(rank):
                continue
            frames = self.frames.get(rank, [])
            seconds = time.monotonic() - self.started
            if rank in self.died and rank not in self.killed:
                found[rank] = RankFailure(
                    rank,
                    "died",
                    exit_text(self.died[rank]),
                    self.untold.get(rank, ""),
                    where=find_where(frames),
                    seconds=seconds,
                )
            elif rank in self.stopped or rank in self.killed:
                kind = "peer" if others_failed and is_waiting(frames) else "stuck"
                error = "waiting" if is_waiting(frames) else "running"
                where = find_where(frames)
                found[rank] = RankFailure(
                    rank, kind, error, where=where, seconds=seconds
                )
            else:
                found[rank] = self._from_reply(rank, self.replies[rank])
        return found

    def _raised(self) -> list[int]:
        return [
            rank
            for rank, reply in self.replies.items()
            if reply["status"] == "error" and not reply["peer"]
        ]

    def _from_reply(self, rank: int, reply: dict[str, Any]) -> RankFailure:
        cause = f"\n(caused by {reply['cause']})" if reply["cause"] else ""
        return RankFailure(
            rank,
            "peer" if reply["peer"] else "raised",
            reply["error"],
            reply["message"] + (cause if not reply["peer"] else ""),
            learner_lines(reply["frames"]),
            find_where(reply["frames"][::-1]),
            reply["seconds"],
        )


# ------------------------------------------------------------------------------ helpers
def calls_by_group(
    replies: dict[int, dict[str, Any]], n: int
) -> dict[tuple[int, ...], dict[int, int]]:
    """For each group (its ranks) how many collectives each rank of it has called."""
    calls = {rank: reply["facts"]["calls"] for rank, reply in replies.items()}
    groups = sorted({group for of_rank in calls.values() for group in of_rank})
    return {
        group: {rank: calls.get(rank, {}).get(group, 0) for rank in group if rank < n}
        for group in groups
    }


def positive_seconds(timeout: float) -> float:
    """Check a timeout: a number of seconds above zero."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; it must be seconds, more than 0")
    return float(timeout)


def loopback_interface() -> str:
    """The name of the network interface that only this machine can reach."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"


def hold_port(until: contextlib.ExitStack) -> int:
    """A TCP port on loopback that nobody else gets until this stack is closed.

    On Linux a bound socket that does not listen holds it: a server may listen beside
    that if it has SO_REUSEADDR, as PyTorch's has. Elsewhere the port is only free now.
    """
    holder = until.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    if sys.platform != "linux":
        holder.close()
    return port


def pickled(value: Any, what: str) -> bytes:
    """The value as bytes, or a TypeError that names it."""
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{what} can't be sent to the ranks: {error}. "
            "Build it on the ranks instead, inside the function or cell."
        ) from None


def unpickled(rank: int, reply: dict[str, Any], what: str) -> Any:
    """The value that a rank has sent, or a TypeError that says whose it is."""
    try:
        return cloudpickle.loads(reply["payload"])
    except Exception as error:
        raise TypeError(
            f"{what} of rank {rank} can't be read in the notebook "
            f"({type(error).__name__}: {error}). "
            "Return tensors, numbers, text, lists or dictionaries."
        ) from error


def pickled_call(fn: Callable[..., Any], args: tuple, kwargs: dict) -> bytes:
    """A call as bytes, or a TypeError that names the part that can't be pickled."""
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception:
        for position, value in enumerate(args, 1):
            pickled(value, f"argument {position} (a {type(value).__name__})")
        for name, value in kwargs.items():
            pickled(value, f"argument {name} (a {type(value).__name__})")
        pickled(fn, f"the function {getattr(fn, '__name__', fn)}")
        raise


def remember_source(name: str, source: str) -> None:
    """Let messages show the lines of a cell that runs on the ranks."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)


@contextlib.contextmanager
def interrupts_held(raise_after: bool = False) -> Iterator[None]:
    """What is inside must not be broken off by Ctrl-C; it takes a few seconds at most.

    Args:
        raise_after: raise KeyboardInterrupt at the end if one came; else forget it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came.is_set() and raise_after:  # rather than what went wrong inside
            raise KeyboardInterrupt
