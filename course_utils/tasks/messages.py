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
import functools
import itertools
import pickle
import sys
import time
import traceback

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # it must be there before a guard is

from course_utils.measure.messages import recorded
from course_utils.measure.taps import P2P, put_back
from course_utils.ranks.report import INNER_NAMES, is_learners, place
from course_utils.tasks.task import FOLDER, ForbiddenCall, core_of

# ------------------------------------------------------ what may not be called here

# PyTorch's own collectives, and what is built from those, are noticed below, where all
# ways to them end.
BEGINNINGS = (
    *("_allgather", "_reduce_scatter", "all_gather", "all_reduce", "all_to_all"),
    *("allgather", "allreduce", "alltoall", "broadcast", "gather", "reduce_scatter"),
    "scatter",
)
INSTEAD = "Build it from send and recv, or isend and irecv."


BACKEND = torch._C._distributed_c10d.Backend


@functools.cache
def collectives_in(owner):
    """The names of the collectives among its attributes."""
    names = (name for name in dir(owner) if callable(getattr(owner, name)))
    return [name for name in names if name.startswith(BEGINNINGS) or name == "reduce"]


@functools.cache
def operators():
    """The functional collectives: (namespace in `torch.ops`, names of operators)."""
    spaces = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
    found = {space: set() for space in spaces}
    for full in torch._C._dispatch_get_all_op_names():  # tens of thousands
        space, _, name = full.partition("::")
        if space in found and name.startswith(BEGINNINGS):
            found[space].add(name.partition(".")[0])
    for space, names in found.items():
        for name in names:
            getattr(getattr(torch.ops, space), name)  # from now on it lies in there
    return [(getattr(torch.ops, space), names) for space, names in found.items()]


@contextlib.contextmanager
def messages_only():
    """Stop the learner's code where it calls a collective, under whatever name.

    All functions of torch.distributed end in a method of a process group. Only the
    functional collectives go another way, to operators. And a process group can be
    asked for its backend, which has the methods once more.
    """

    def guard(name, original):
        def checked(*args, **kwargs):
            called = call_of_learner(name)
            if called:
                raise ForbiddenCall(called)
            return original(*args, **kwargs)

        return checked

    def to_a_rank_that_exists(name, original):
        # gloo reads past the end of its list of ranks: a crash, a hang or a surprise.
        def checked(group, tensors, peer, *args, **kwargs):
            if not 0 <= peer < group.size():
                raise ValueError(
                    f"{name}: there is no rank {peer} among {group.size()}, which are "
                    f"0 to {group.size() - 1}."
                )
            return original(group, tensors, peer, *args, **kwargs)

        return checked

    with contextlib.ExitStack() as stack:
        for owner, names, replace in (
            (dist.ProcessGroup, collectives_in(dist.ProcessGroup), guard),
            (dist.ProcessGroup, ("send", "recv"), to_a_rank_that_exists),
            (BACKEND, collectives_in(BACKEND), guard),
            *((space, names, guard) for space, names in operators()),
        ):
            originals = stack.enter_context(put_back(owner, names))
            for name, original in originals.items():
                setattr(owner, name, replace(name, original))
        yield


def call_of_learner(name):
    """What the learner's code has called, and where: "all_gather, line 3 of ..."."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if is_learners(file):
            return f"{name}, {place(file, line)}"
        if FOLDER in file:  # they call none while this is open
            return f"{name}, which is what was handed in"
        if frame.f_code.co_name not in INNER_NAMES:
            name = frame.f_code.co_name
    return f"{name}, in a thread"


@contextlib.contextmanager
def groups_noted():
    """Note the ranks of each group in which this rank sends, or calls a collective."""
    used = []
    names = [*collectives_in(dist.ProcessGroup), *P2P]

    def noting(original):
        def noted(group, *args, **kwargs):
            used.extend(dist.get_process_group_ranks(group))
            return original(group, *args, **kwargs)

        return noted

    with put_back(dist.ProcessGroup, names) as originals:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, noting(original))
        yield used


POLLS_SECONDS = 1.0  # no message here is under way for as long


class PolledInVain(RuntimeError):
    """The learner's code asks again and again what is never answered with yes."""


@contextlib.contextmanager
def no_endless_polls():
    """Stop code that polls `is_completed()`, which gloo answers after wait() only."""
    began = {}

    def is_completed(work):
        done = originals["is_completed"](work)
        start = began.setdefault(id(work), (work, time.monotonic()))[1]
        if not done and time.monotonic() - start > POLLS_SECONDS:
            raise PolledInVain("is_completed() has returned False for a second.")
        return done

    with put_back(dist.Work, ("is_completed",)) as originals:
        dist.Work.is_completed = is_completed
        yield


@contextlib.contextmanager
def watched(answer=None):
    """Let the learner's code send messages, and nothing else; yields its calls.

    Args:
        answer: If it is a function of torch.distributed, it is stopped before it can
            complain of its arguments.
    """
    core = core_of(answer)
    if str(getattr(core, "__module__", "")).startswith("torch.distributed"):
        name = getattr(core, "__name__", type(core).__name__)
        raise ForbiddenCall(f"{name}, which is what was handed in")
    with messages_only(), no_endless_polls(), recorded() as calls:
        yield calls


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
    "another one's. One rank alone is its own neighbour, and has nothing to send at "
    "all."
)
# For a task's `errors`, before OUT_OF_STEP: a part of the error's class and text, and
# what to say of it.
ERRORS = {
    "PolledInVain": "With gloo, is_completed() stays False until wait() has been "
    "called, even when the message has long arrived. Call wait(): it returns when it "
    "has.",
    "should not be the same as the rank": ANOTHER_ONE,
    "is this rank itself": ANOTHER_ONE,
    "Pair is not connected": ANOTHER_ONE,
    "there is no rank": "There is no such rank: they go from 0 to world size - 1. (The "
    "course looks. gloo does not: it may crash, or wait for ever.) Ask "
    "dist.get_world_size(); for neighbours in a circle compute `% world_size`.",
    "running: ": "Is there a loop that never ends? If it stands in a send, a recv or "
    "an isend, there may be no such rank: they go from 0 to world size - 1.",
    "CollectiveMismatch: ": "What one rank sends must fit what the other receives, in "
    "size and dtype. `torch.empty_like(tensor)` makes a buffer that fits. Or does one "
    "rank leave out a message, an empty one for example, that the other one expects?",
}
