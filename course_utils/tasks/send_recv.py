"""For tasks that are built from messages: what is noted, what stops, what goes wrong.

    def observe(answer, tensor):
        with watched(answer) as calls:
            result = answer(tensor)
        return {"sum": result, "messages": len(calls)}

    Task(..., observe=observe, errors=ERRORS, instead=INSTEAD)

Inside `watched(answer)` no collective can be called, under whatever name, and each
send, recv and wait is noted.
"""

import contextlib
import itertools
import pickle
import re
import sys
import time
import traceback

import torch
import torch.distributed as dist

from course_utils.measure.messages import recorded
from course_utils.measure.taps import tap
from course_utils.measure.traffic import Watch
from course_utils.ranks.report import find_where
from course_utils.tasks.task import ForbiddenCall, OnlyMessages, core_of

INSTEAD = "Build it from send and recv, or isend and irecv."


class MessagesOnly(Watch):
    """Stops the learner's code where it calls a collective, under whatever name."""

    def note(self, name, nbytes, size):
        if name != "send":
            frames = [(torch.__file__, 0, name)]
            for frame, line in traceback.walk_stack(sys._getframe(2)):
                frames.append((frame.f_code.co_filename, line, frame.f_code.co_name))
            raise OnlyMessages(find_where(frames).partition(": ")[0] or name)


@contextlib.contextmanager
def watched(answer=None):
    """Let the learner's code send messages, and nothing else; yields its calls.

    Args:
        answer: If it is a function of torch.distributed, it is stopped before it can
            complain of its arguments.
    """
    core = core_of(answer)
    if str(getattr(core, "__module__", "")).startswith("torch.distributed"):
        raise ForbiddenCall(f"{core.__name__}, which is what was handed in")
    with MessagesOnly(), recorded() as calls:
        yield calls


# How the methods of a process group begin that send, receive, or are collectives.
CALLS = re.compile("_?(all|broadcast|gather|recv|reduce|scatter|send)")


@contextlib.contextmanager
def groups_noted():
    """Note the ranks of each group in which this rank sends, or calls a collective."""
    used = []

    def around(call):
        used.extend(dist.get_process_group_ranks(call.group))
        return call.go()

    with tap(around, [name for name in vars(dist.ProcessGroup) if CALLS.match(name)]):
        yield used


_cases = itertools.count()


def told_by_all(value, seconds=3.0):
    """What every rank tells here; None where a rank does not come.

    It is no collective: a rank that never returns from the learner's code is found by
    the check, and the others must not be found waiting for it in here.
    """
    store = dist.distributed_c10d._get_default_store()
    case, ranks = next(_cases), range(dist.get_world_size())
    store.set(f"told {case} {dist.get_rank()}", pickle.dumps(value))
    keys = [f"told {case} {rank}" for rank in ranks]
    end = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > end:
            return None
        time.sleep(0.005)
    return [pickle.loads(store.get(key)) for key in keys]


RESULT = "what it returned"
APART = 0.03  # seconds between the calls of two ranks


def looked_at(answer, tensor, name, look):
    """What came back; before it, under `name`, ``look(tensor, result, received)``.

    `received` are the calls of recv and irecv. The ranks begin one after the other, so
    what they send is under way for a while. Whoever leaves out a wait need not be found
    here: the check itself does that.
    """
    told_by_all(None)  # all ranks are here
    time.sleep(APART * dist.get_rank())
    with watched(answer) as calls:
        result = answer(tensor)
    if not isinstance(result, torch.Tensor):
        return result
    received = [call for call in calls if call.kind == "recv"]
    return {name: look(tensor, result, received), RESULT: result}


# For near misses.
FROM_RECV = (
    "What recv returns is the rank of the sender, and wait() returns True. The message "
    "is in the tensor that recv or irecv was given: use that one."
)
ROUNDED = (
    "These numbers went through float32, which has no room for all digits of an int64. "
    "Buffers need the dtype of the tensor: `torch.empty_like(tensor)`. "
    "`torch.zeros(shape)` is float32, and a division makes floats, too."
)
ANOTHER_ONE = (
    "A rank cannot send to itself. With several ranks, it has taken its own number for "
    "another one's. With one rank, there is nothing to send."
)
# For a task's `errors`, before OUT_OF_STEP: a part of the error's class and text, and
# what to say of it.
ERRORS = {
    "should not be the same as the rank": ANOTHER_ONE,
    "is this rank itself": ANOTHER_ONE,
    "there is no rank": "There is no such rank: they go from 0 to world size - 1. Ask "
    "dist.get_world_size(); for neighbours in a circle compute `% world_size`.",
    "CollectiveMismatch: ": "What one rank sends must fit what the other receives, in "
    "size and dtype. `torch.empty_like(tensor)` makes a buffer that fits. Or does one "
    "rank leave out a message, an empty one for example, that the other one expects?",
}
