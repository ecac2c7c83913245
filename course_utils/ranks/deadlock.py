"""A deadlock: every rank that has not finished waits for another one, for good.

:class:`DeadlockWatch` is asked again and again while a cell runs. It looks at what the
ranks' processes have computed since it looked last and, where that is nothing, at the
calls that they are in.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from course_utils.ranks.processes import seconds_of_work, seconds_without_core
from course_utils.ranks.report import STORE_PART, Frame, is_waiting

if TYPE_CHECKING:
    from course_utils.ranks.round import Round

# Nothing printed, answered or computed for this long, and every rank that has not
# finished waits for another one: a deadlock.
QUIET_SECONDS, QUIET_SAMPLES, QUIET_CPU = 0.6, 2, 0.02
# Ranks that make a group look again and again who has come, which takes some CPU time.
MEETING_CPU = 0.15
# Ranks that have waited longer than that for a core, because of what else the machine
# does, are given more time: what one of them has sent may not have been read yet.
WITHOUT_CORE, BUSY_SECONDS = 0.2, 6.0
# A rank that has finished may still send. But a thread of its own may also compute for
# ever.
AFTER_THE_END_SECONDS = 4.0
MEETING_NAMES = ("init_process_group", "new_group")
MEETING_SECONDS = 4.0  # for ranks that may find each other


class Look(NamedTuple):
    """What the ranks had done by a time: seconds of work, and of waiting for a core."""

    time: float
    work: dict[int, float]
    without_core: float


class DeadlockWatch:
    """Watches one round; ``looks`` are those at which all ranks were still."""

    def __init__(self, round: Round) -> None:
        self.round = round
        self.looks: list[Look] = []

    def is_deadlock(self) -> bool:
        """Has nothing moved for so long that nothing will? Costs little until then."""
        round, now = self.round, time.monotonic()
        if not round.pending or now - round.last_event < QUIET_SECONDS:
            self.looks.clear()
            return False
        if self.looks and now - self.looks[-1].time < QUIET_SECONDS:
            return False
        look = self._look(now)
        before = self.looks[-1].work if self.looks else {}
        spent = {rank: s - before.get(rank, 0.0) for rank, s in look.work.items()}
        if any(spent.get(rank, 0.0) > MEETING_CPU for rank in round.pending):
            self.looks = [look]
            return False
        round.ask_where(0.2)
        if time.monotonic() - round.last_event < QUIET_SECONDS:
            self.looks.clear()  # one has answered: others may go on now
            return False
        look = self._look(now)
        computing = {r for r in round.pending if spent.get(r, 0.0) > QUIET_CPU}
        asked = round.pending & round.frames.keys()
        if not all(is_waiting(round.frames[rank]) for rank in asked) or any(
            not is_meeting(round.frames.get(rank, [])) for rank in computing
        ):
            self.looks = [look]
            return False
        if asked != round.pending:  # too busy a machine to answer in time: ask again
            self.looks[-1:] = [look]
            return False
        self.looks.append(look)
        if len(self.looks) <= QUIET_SAMPLES:
            return False
        frames = [round.frames[rank] for rank in round.pending]
        first = self.looks[0]
        needed = patience(frames, first.time - round.started)
        if any(
            look.work[rank] - first.work.get(rank, 0.0) > QUIET_CPU
            for rank in look.work.keys() - round.pending
        ):
            needed = max(needed, AFTER_THE_END_SECONDS)
        if look.without_core - first.without_core > WITHOUT_CORE:
            needed = max(needed, BUSY_SECONDS)
        return now - first.time >= needed

    def _look(self, now: float) -> Look:
        pids = self.round.pids()
        waited = sum(seconds_without_core(pids).values())
        return Look(now, seconds_of_work(pids), waited)


def is_at_store(frames: list[Frame]) -> bool:
    """Does it wait in the constructor of a TCPStore? There rank 0 looks again and again
    whether all have come; the others try to connect, and sleep longer each time."""
    return bool(frames) and STORE_PART in frames[0][0]


def is_meeting(frames: list[Frame]) -> bool:
    """Does it wait for the other ranks of a group that is being made?"""
    return is_at_store(frames) or any(name in MEETING_NAMES for *_, name in frames)


def patience(frames: list[list[Frame]], tried: float) -> float:
    """How many seconds waiting ranks can be still, and yet come to something.

    Two or more that make a group may find each other. A rank that came too early to a
    ``TCPStore`` tries again after longer and longer pauses: about as long as it has
    been trying.

    Args:
        frames: where each of them is, innermost first.
        tried: seconds from their start until they became still.
    """
    if len(frames) < 2 or not any(map(is_meeting, frames)):
        return 0.0
    return max(MEETING_SECONDS, tried if any(map(is_at_store, frames)) else 0.0)
