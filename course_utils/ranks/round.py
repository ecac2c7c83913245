"""One request to some ranks: send it, wait, notice a deadlock, end what is stuck."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from course_utils.ranks.deadlock import DeadlockWatch
from course_utils.ranks.output import Printer, is_c10d_log
from course_utils.ranks.processes import (
    interrupts_held,
    seconds_of_work,
    seconds_without_core,
)
from course_utils.ranks.report import (
    HELPER_ENDED,
    NOT_TOLD,
    RankFailure,
    Unwaited,
    exit_text,
    find_where,
    frames_of_dump,
    is_waiting,
    learner_lines,
)
from course_utils.ranks.team import Team

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
# A rank that runs in less than this share of the time in which it could is starved by
# what else the machine does. Then the limit is at most so many times as long.
STARVED, BUSY_MACHINE = 0.2, 3.0
WITHOUT_CORE = 0.1  # share of the time: a rank that waits for less has what it needs
OUTPUT_SECONDS = 1.0  # for output to arrive; a rank may also print without end


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
        self.watch = DeadlockWatch(self)
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
        """Until all have answered; at most ``limit`` seconds.

        Ranks that hardly get to run, on a busy machine, have up to three times that.
        """
        deadline = self.started + limit
        window = limit / 2  # at the end of the time: who was kept from running?
        before: tuple[float, dict[int, float], dict[int, float]] | None = None
        while self.pending:
            now = time.monotonic()
            if self.failed_at is not None and now > self.failed_at + PEER_SECONDS:
                return
            if before is None and now > deadline - window:
                pids = self.pids()
                before = now, seconds_of_work(pids), seconds_without_core(pids)
            if now > deadline:
                last = now > self.started + BUSY_MACHINE * limit
                if last or before is None or not self._starves(*before):
                    self.cause = "timeout"
                    return
                deadline, before = now + window, None
            pause = 0.1 if self.failed_at is None else LOOK_SECONDS
            self.step(min(pause, max(0.0, deadline - now)))
            if self.failed_at is not None and not self.severed:
                self._free_those_that_wait()
            if self.watch.is_deadlock():
                self.cause, self.quiet = "timeout", True
                return

    def pids(self) -> dict[int, int]:
        """The process of each rank, also of those that take no part."""
        return {rank: one.pid for rank, one in self.team.processes.items()}

    def _starves(
        self, since: float, worked: dict[int, float], waited: dict[int, float]
    ) -> bool:
        """Was a rank ready to run since then, and hardly ever had a core?"""
        seconds = time.monotonic() - since
        without_core = seconds_without_core(self.pids())
        for rank, now in seconds_of_work(self.pids()).items():
            ran = now - worked.get(rank, 0.0)
            ready = without_core[rank] - waited.get(rank, 0.0)
            if (
                rank in self.pending
                and ready > WITHOUT_CORE * seconds
                and ran < STARVED * (ran + ready)
            ):
                return True
        return False

    def step(self, seconds: float) -> None:
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
                if not self.drain(outputs[ready]):
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
            self.drain(rank, reply.get("mark", 0))
            if reply["status"] == "error":
                self._one_failed()

    def drain(self, rank: int, mark: float | None = None) -> bool:
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
        self.drain(rank, math.inf)
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
            self.ask_where(ASK_SECONDS)
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

    # ------------------------------------------------------------------ where they are
    def ask_where(self, seconds: float) -> None:
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
            self.step(0.02)

    # ---------------------------------------------------------- the ladder that ends it
    def free(self) -> None:
        """End what has not ended: kindly first, in bounded time."""
        self.stopped |= self.pending
        self.ask_where(ASK_SECONDS)
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
            self.drain(rank, 0)
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
            self.step(0.02)

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


def calls_by_group(
    replies: dict[int, dict[str, Any]], n: int
) -> dict[tuple[int, ...], dict[int, int]]:
    """For each group (its ranks) how many collectives each rank of it has called."""
    calls = {rank: reply["facts"]["calls"] for rank, reply in replies.items()}
    groups = sorted({group for of_rank in calls.values() for group in of_rank})
    return {
        group: {
            rank: len(calls.get(rank, {}).get(group, ())) for rank in group if rank < n
        }
        for group in groups
    }
