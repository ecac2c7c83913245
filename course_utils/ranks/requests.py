"""Requests that nobody waited for: which call made them, and on which line.

A call such as ``irecv``, or ``all_reduce(..., async_op=True)``, returns at once with a
request (PyTorch's ``Work``). Until its ``wait()`` has returned, nobody knows what is in
the tensor. A request for a message has to be kept, too: if nobody holds it, gloo loses
the message, and the connection that it came through is of no use any more. What hangs
then is a later call, which has nothing to do with it.

So every request is noted here when it is made, and crossed out as soon as somebody
waits for it, in one of the ways that PyTorch has. Of those that are given up before, a
cell or a script is told. The cost is a few microseconds a call.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from course_utils.ranks.report import Frame, is_learners, is_of_library

WAIT, BOXED = dist.Work.wait, dist.Work.boxed
HELD = 1000  # requests that are held for those who did not; older ones may be lost
P2P = ("send", "recv", "recv_anysource")
# Who calls one of these takes care of the end of the request, or hands that on ...
ENDS = (
    "synchronize",
    "block_current_stream",
    "get_future",
    "get_future_result",
    "result",
    "boxed",
)
ASKS = ("is_completed", "is_success")  # ... and so does who asks until it is True.


class Request(weakref.ref):
    """A reference to a ``Work``, with what is to be said if nobody waits for it.

    Attributes:
        key: the id of the ``Work``.
        frames: the calls that made it, innermost first, up to the learner's line.
        is_p2p: whether it is one for a message between two ranks.
        cell: in which cell it was made.
        waited: whether somebody waits or has waited for it.
        inside: what a ``Work`` of Python is made around. It may live on without that.
    """

    __slots__ = ("key", "frames", "is_p2p", "cell", "waited", "inside")

    def __new__(cls, work: dist.Work, freed: Callable[[Request], None], *_: Any):
        return super().__new__(cls, work, freed)

    def __init__(
        self, work: dist.Work, freed: Callable[[Request], None], name: str, cell: int
    ) -> None:
        super().__init__(work, freed)
        self.key, self.frames = id(work), frames_to_learner()
        self.is_p2p, self.cell, self.waited = name in P2P, cell, False
        self.inside: Any = None

    def facts(self) -> tuple[tuple[Frame, ...], bool, int]:
        """What is the same for all that one line makes in one cell."""
        return self.frames, self.is_p2p, self.cell


class Requests:
    """The requests of this process, from the calls in Python that make them.

    It holds the messages of requests that nobody keeps, so that they are not lost, and
    the connections stay as they are.
    """

    def __init__(self) -> None:
        self.cell = 0
        self.forget()

    def forget(self) -> None:
        """The process groups of before are gone, and with them all requests."""
        self.alive: dict[int, Request] = {}  # by the id of the Work
        self.dropped: Counter[tuple] = Counter()  # a loop may drop thousands
        self.held: deque[Any] = deque(maxlen=HELD)
        self.held_before = self.held

    def start_cell(self) -> None:
        """Another cell begins. What an earlier one has sent has had its time."""
        self.cell += 1
        self.held_before, self.held = self.held, deque(maxlen=HELD)

    def watch(self) -> None:
        """From now on the requests of this process are noted here."""
        global _of_this_process
        _of_this_process = self

    def note(self, work: dist.Work, name: str) -> None:
        """``work`` was made by the method of this name of a group with gloo."""
        known = self.alive.get(id(work))
        if known is None or known() is not work:
            request = Request(work, self._freed, name, self.cell)
            if request.is_p2p:
                request.inside = BOXED(work)
            self.alive[id(work)] = request

    def _freed(self, request: Request) -> None:
        if _of_this_process is not self or self.alive.get(request.key) is not request:
            return  # in a fork, or forgotten
        del self.alive[request.key]
        if request.inside is not None:
            self.held.append(request.inside)
        if not request.waited and not is_of_library(request.frames):
            self.dropped[request.facts()] += 1

    def wait_begins(self, work: dist.Work) -> Request | None:
        """Somebody takes care of it; what is known of it, if anything is."""
        request = self.alive.get(id(work))
        if request is not None:
            request.waited, request.inside = True, None
        return request

    def kept(self) -> Iterator[Request]:
        """Those that nobody has waited for so far, and that somebody holds."""
        for request in list(self.alive.values()):
            if not request.waited and not is_of_library(request.frames):
                yield request

    def take(self) -> list[dict[str, Any]]:
        """What nobody has waited for, as plain data. The dropped ones come only once.

        Returns:
            For each place: "frames" and "is_p2p" as in :class:`Request`, "kept",
            whether somebody still holds them, "earlier", whether another cell has made
            them, and "count", how many there are.
        """
        dropped, self.dropped = self.dropped, Counter()
        kept = Counter(request.facts() for request in self.kept())
        return [
            {
                "frames": frames,
                "is_p2p": is_p2p,
                "kept": found is kept,
                "earlier": cell != self.cell,
                "count": count,
            }
            for found in (dropped, kept)
            for (frames, is_p2p, cell), count in found.items()
        ]


_of_this_process: Requests | None = None


def _forget_in_fork() -> None:
    """A fork that the learner's code makes has copies of its parent's requests."""
    global _of_this_process
    _of_this_process = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)


def stand_in_front() -> None:
    """Have the methods of PyTorch that make requests, and end them, tell of it.

    Not ``Work.wait``: that is the agreement's. Until :meth:`Requests.watch` nothing is
    noted.
    """
    for owner in (dist.ProcessGroup, c10d.Backend):
        for name, method in list(vars(owner).items()):
            if "-> c10d::Work" in (getattr(method, "__doc__", None) or ""):
                setattr(owner, name, _making(name, method))
    for name in (*ENDS, *ASKS):
        if name in vars(dist.Work):
            setattr(dist.Work, name, _ending(name, vars(dist.Work)[name]))


def _making(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def making(group, *args, **kwargs):
        work = method(group, *args, **kwargs)
        if _of_this_process is not None and work is not None and is_of_gloo(group):
            _of_this_process.note(work, name)
        return work

    return making


def is_of_gloo(group: Any) -> bool:
    """With nccl there are other ways to wait, such as torch.cuda.synchronize()."""
    try:
        return group.name() == "gloo"
    except Exception:  # a backend that somebody has written need not have one
        return False


def _ending(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def ending(work, *args, **kwargs):
        if _of_this_process is not None and name in ENDS:
            _of_this_process.wait_begins(work)
        result = method(work, *args, **kwargs)
        if _of_this_process is not None and result is True:
            _of_this_process.wait_begins(work)
        return result

    return ending


def frames_to_learner() -> tuple[Frame, ...]:
    """(file, line, function) of the calls that led here, up to the learner's line."""
    found, frame = [], sys._getframe(4)  # without the four of this file
    while frame is not None:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        if is_learners(code.co_filename, code.co_name):
            break
        frame = frame.f_back
    return tuple(found)
