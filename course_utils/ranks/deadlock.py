"""A deadlock: every rank that has not finished waits for another one, for good.

:class:`DeadlockWatch` is asked again and again while a cell runs. It looks at what the
ranks' processes have computed since it looked last and, where that is nothing, at the
calls that they are in.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from course_utils.ranks.processes import seconds_of_work
from course_utils.ranks.report import STORE_PART, Frame, is_waiting

if TYPE_CHECKING:
    from course_utils.ranks.round import Round

# Nothing printed, answered or computed for this long, and every rank that has not
# finished waits for another one: a deadlock.
QUIET_SECONDS, QUIET_SAMPLES, QUIET_CPU = 0.6, 2, 0.02
# Ranks that make a group look again and again who has come, which takes some CPU time.
MEETING_CPU = 0.15
# A rank that has finished may still send. But a thread of its own may also compute for
# ever.
AFTER_THE_END_SECONDS = 4.0
MEETING_NAMES = ("init_process_group", "new_group")
MEETING_SECONDS = 4.0  # for ranks that may find each other


class DeadlockWatch:
    """Watches one round; ``samples`` are the looks at which all ranks were still."""

    def __init__(self, round: Round) -> None:
        self.round = round
        self.samples: list[tuple[float, dict[int, float]]] = []

    def is_deadlock(self) -> bool:
        """Has nothing moved for so long that nothing will? Costs little until then."""
        round, now = self.round, time.monotonic()
        if not round.pending or now - round.last_event < QUIET_SECONDS:
            self.samples.clear()
            return False
        if self.samples and now - self.samples[-1][0] < QUIET_SECONDS:
            return False
        used = seconds_of_work(round.pids())
        before = self.samples[-1][1] if self.samples else {}
        spent = {rank: s - before.get(rank, 0.0) for rank, s in used.items()}
        if any(spent.get(rank, 0.0) > MEETING_CPU for rank in round.pending):
            self.samples = [(now, used)]
            return False
        round.ask_where(0.2)
        if time.monotonic() - round.last_event < QUIET_SECONDS:
            self.samples.clear()  # one has answered: others may go on now
            return False
        used = seconds_of_work(round.pids())
        computing = {r for r in round.pending if spent.get(r, 0.0) > QUIET_CPU}
        asked = round.pending & round.frames.keys()
        if not all(is_waiting(round.frames[rank]) for rank in asked) or any(
            not is_meeting(round.frames.get(rank, [])) for rank in computing
        ):
            self.samples = [(now, used)]
            return False
        if asked != round.pending:  # too busy a machine to answer in time: ask again
            self.samples[-1:] = [(now, used)]
            return False
        self.samples.append((now, used))
        if len(self.samples) <= QUIET_SAMPLES:
            return False
        frames = [round.frames[rank] for rank in round.pending]
        still_since, used_then = self.samples[0]
        needed = patience(frames, still_since - round.started)
        if any(
            used[rank] - used_then.get(rank, 0.0) > QUIET_CPU
            for rank in used.keys() - round.pending
        ):
            needed = max(needed, AFTER_THE_END_SECONDS)
        return now - still_since >= needed


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
