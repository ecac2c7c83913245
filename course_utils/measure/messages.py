"""Note the messages that ranks really send, and put them in steps.

On the ranks, around any code that sends and receives::

    with recorded() as calls:
        collectives.broadcast_tree(x)

In the notebook, with what each rank noted::

    in_steps(ranks.pull("calls"))      # [(1, 0, 1, 4), (2, 0, 2, 4), (2, 1, 3, 4)]

Seen are `send`, `recv`, `isend`, `irecv`, `batch_isend_irecv` and all that is made of
them. A collective of PyTorch's own sends its messages in C++: these are not seen.

Or note when a rank waits, and draw it::

    with timed() as events:
        dist.send(x, dst=1)

    pictures.timeline(ranks.pull("events"))
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from course_utils.measure.taps import Tapped, put_back, tap


class Call(NamedTuple):
    """What one rank did, in its own order.

    Attributes:
        kind: "send", "recv", or "wait" for the end of one of these.
        number: which of this rank's sends and receives it is, or waits for.
        peer: the other rank, as numbered in the whole job; -1 until it is known.
        nbytes: the size of the message; 0 for a wait.
    """

    kind: str
    number: int
    peer: int = -1
    nbytes: int = 0


class Message(NamedTuple):
    """A message, and the step in which it is sent; steps count from 1."""

    step: int
    source: int
    destination: int
    nbytes: int


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Note this rank's sends, receives and waits, until the block ends.

    `send` is noted as a send and a wait for its end, as it is.
    """
    calls: list[Call] = []
    works: list[tuple[Any, Any]] = []  # the group and the request of each

    def around(call: Tapped) -> Any:
        work = call.go()
        peer = -1 if call.peer is None else call.global_peer
        calls.append(Call(call.name[:4], len(works), peer, call.nbytes))
        works.append((call.group, work))
        return work

    def wait(call: Tapped) -> bool:
        done, work = call.go(), call.group
        for number, (group, known) in enumerate(works):
            if known is not work:
                continue
            for place, noted in enumerate(calls):
                if noted.number == number and noted.peer < 0 and noted.kind == "recv":
                    # Any sender was welcome: now it is known who it was.
                    source = dist.get_global_rank(group, work._source_rank())
                    calls[place] = noted._replace(peer=source)
            calls.append(Call("wait", number))
        return done

    with tap(around), tap(wait, ("wait",), dist.Work):
        yield calls


# What `timed` notes: a function, and what it is on a timeline.
_TIMED = (
    (dist, "send", "wait"),
    (dist, "recv", "wait"),
    (dist, "barrier", "wait"),
    (dist.Work, "wait", "wait"),
    (time, "sleep", "compute"),  # which stands for computing
)


@contextmanager
def timed() -> Iterator[list[tuple[float, float, str, str]]]:
    """Note when this thread waits for another rank, or sleeps, until the block ends.

    Seen are `dist.send`, `dist.recv`, `dist.barrier`, `wait()` of a request, and
    `time.sleep`, which stands for computing. A wait that ends with an error was stuck.

    Yields:
        The intervals (start, stop, label, kind), as `pictures.timeline` takes them.
    """
    events: list[tuple[float, float, str, str]] = []
    here, under_way = threading.get_ident(), []

    def noting(name: str, kind: str, original: Callable[..., Any]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if under_way or threading.get_ident() != here:  # send itself waits, too
                return original(*args, **kwargs)
            under_way.append(name)
            start, how = time.perf_counter(), "stuck"
            try:
                result = original(*args, **kwargs)
                how = kind
                return result
            finally:
                under_way.pop()
                events.append((start, time.perf_counter(), _label(name, kwargs), how))

        call.__code__ = call.__code__.replace(co_name=name)
        return call

    with ExitStack() as stack:
        for owner, name, kind in _TIMED:
            original = stack.enter_context(put_back(owner, [name]))[name]
            setattr(owner, name, noting(name, kind, original))
        yield events


def _label(name: str, kwargs: dict[str, Any]) -> str:
    """What is written into the bar; its spaces hold it together."""
    for word, end in (("to", "dst"), ("from", "src")):
        if end in kwargs:
            return f"{name}\u00a0{word}\u00a0{kwargs[end]}"
    return "compute" if name == "sleep" else name


def in_steps(calls_by_rank: Sequence[Sequence[Call]]) -> list[Message]:
    """The messages of all ranks, each in the earliest step that it can be sent in.

    In one step a rank can send one message and receive one. A message needs both: its
    send must have been called, and its recv. A rank that waits goes on in the step
    after the one it waited for. Messages that a rank has under way at the same time
    (`isend`) leave in the order of its calls. So the last step says how often messages
    had to wait for other messages: that many latencies, whatever the size.

    Args:
        calls_by_rank: for each rank what `recorded` has noted there.

    Raises:
        ValueError: a message was sent that nobody received, or the other way round.
    """
    return _Timetable(calls_by_rank).messages()


class _Timetable:
    """Follow each rank's calls, as far as the messages it waits for have a step."""

    def __init__(self, calls_by_rank: Sequence[Sequence[Call]]) -> None:
        self.todo = [deque(calls) for calls in calls_by_rank]
        self.clock = [0] * len(self.todo)  # the last step that a rank has waited for
        self.step_of: dict[tuple[int, int], int] = {}  # (rank, number of the call)
        self.sends: dict[tuple[int, int], deque] = defaultdict(deque)
        self.recvs: dict[tuple[int, int], deque] = defaultdict(deque)
        self.busy: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.done: list[Message] = []

    def messages(self) -> list[Message]:
        while True:
            for rank in range(len(self.todo)):
                self._follow(rank)
            if not self._send_one():
                break
        left = any(self.todo) or any(self.sends.values()) or any(self.recvs.values())
        if left:
            raise ValueError("Some messages have no send, or no recv.")
        return sorted(self.done)

    def _follow(self, rank: int) -> None:
        """Take calls from the list until one waits for a message without a step."""
        calls = self.todo[rank]
        while calls:
            call = calls[0]
            if call.kind == "wait":
                step = self.step_of.get((rank, call.number))
                if step is None:
                    return
                self.clock[rank] = max(self.clock[rank], step)
            else:
                is_send = call.kind == "send"
                pair = (rank, call.peer) if is_send else (call.peer, rank)
                waiting = (self.sends if is_send else self.recvs)[pair]
                waiting.append((self.clock[rank], call))
            calls.popleft()

    def _send_one(self) -> bool:
        """Give a step to the message that can be sent first, if there is one."""
        can_be_sent = []
        for (source, target), sends in self.sends.items():
            recvs = self.recvs[source, target]
            if not sends or not recvs:
                continue
            (sent_after, send), (received_after, recv) = sends[0], recvs[0]
            step = max(sent_after, received_after) + 1
            while step in self.busy["out", source] or step in self.busy["in", target]:
                step += 1
            # Of several in one step, a rank's earlier call goes first.
            order = (step, send.number, recv.number, source, target)
            can_be_sent.append((order, send, recv))
        if not can_be_sent:
            return False
        (step, *_, source, target), send, recv = min(can_be_sent)
        self.sends[source, target].popleft()
        self.recvs[source, target].popleft()
        self.step_of[source, send.number] = self.step_of[target, recv.number] = step
        self.busy["out", source].add(step)
        self.busy["in", target].add(step)
        self.done.append(Message(step, source, target, send.nbytes))
        return True
