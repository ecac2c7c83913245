"""A network as slow as you want, on one machine: :class:`EmulatedLink`."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils.measure.taps import Tapped, tap
from course_utils.theory.arguments import Count, NotNegative, Positive, checked


class EmulatedLink:
    """Lets messages between ranks on one machine take the time of a slow network.

        with EmulatedLink(latency=2e-3, bandwidth=100e6):
            all_reduce_ring(tensor)

    Inside the block, what `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv` of
    `torch.distributed` do on this rank is the same, but takes longer, by sleeping:

    - A message of b bytes starts when it is sent, and this rank has finished sending
      the one before. It keeps the rank's way out busy for b / bandwidth: `send`, or the
      `wait()` of an `isend`, ends then.
    - It arrives at the other rank no earlier than its start + b / bandwidth + latency,
      and no earlier than b / bandwidth after the one that arrived there before: `recv`,
      or the `wait()` of an `irecv`, ends then. A rank's way in takes messages in the
      order in which it waits for them.
    - Nothing gets faster: where the machine itself takes longer, that is the time.

    A sleep ends late, by about 0.1 ms. That would add up over the steps of an
    algorithm, so a rank's next message starts as if the rank had woken in time.

    `torch.distributed.all_reduce` takes at least as long as a ring of such messages. If
    k of the ring's n links are slow, that is 2(n-1)/n · (k·latency + b/bandwidth).
    Other collectives stay as fast as they are, and so does what DDP calls in C++.

    With `gpus_per_node`, the ranks are on several nodes, and only what goes from one
    node to another is slow.

    Every rank that sends or receives is inside such a block, with the same numbers; a
    number goes ahead of each message, its time.

    Args:
        latency: Seconds that even an empty message takes.
        bandwidth: Bytes a second, of each rank's way out and way in.
        gpus_per_node: The ranks 0 to gpus_per_node - 1 are on one node, and so on.

    Raises:
        ValueError: in the block, a `recv` or `irecv` does not say whom it is from.
        RuntimeError: on entering a block inside another one.
    """

    _active = False

    @checked
    def __init__(
        self, latency: NotNegative, bandwidth: Positive, gpus_per_node: Count = 1
    ) -> None:
        self.latency, self.bandwidth = latency, bandwidth
        self.gpus_per_node = gpus_per_node

    def __enter__(self) -> "EmulatedLink":
        if EmulatedLink._active:
            raise RuntimeError("This is inside another EmulatedLink: leave it first.")
        self._out = self._in = 0.0  # when this rank's two ways are free again
        self._overslept = 0.0
        self._until_exit = ExitStack()
        self._until_exit.enter_context(tap(self._message))
        self._until_exit.enter_context(tap(self._all_reduce, ["allreduce"]))
        EmulatedLink._active = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._until_exit.close()
        EmulatedLink._active = False

    def _is_slow(self, rank: int, other: int) -> bool:
        return rank // self.gpus_per_node != other // self.gpus_per_node

    def _all_reduce(self, call: Tapped) -> "_Message | dist.Work":
        ranks = dist.get_process_group_ranks(call.group)
        slow = sum(map(self._is_slow, ranks, [*ranks[1:], ranks[0]]))
        if not slow:
            return call.go()
        share = 2 * (len(ranks) - 1) / len(ranks)
        seconds = share * (slow * self.latency + call.nbytes / self.bandwidth)
        done = self._out = max(self._now(), self._out) + seconds
        return _Message([call.go()], lambda: self._sleep(done), tuple(call.tensors))

    def _message(self, call: Tapped) -> "_Message | dist.Work":
        if call.peer is None:
            raise ValueError(
                "An EmulatedLink has to know which rank a message comes from: give "
                "`src` to recv and irecv."
            )
        if not self._is_slow(dist.get_rank(), call.global_peer):
            return call.go()
        sends = call.name == "send"
        busy = sum(tensor.nbytes for tensor in call.tensors) / self.bandwidth
        time_sent = torch.zeros(1, dtype=torch.float64)  # goes ahead of the message
        if sends:
            gone = self._out = max(self._now(), self._out) + busy
            time_sent[0] = gone

        def after() -> None:
            if sends:
                self._sleep(gone)
            else:
                there = max(time_sent.item() + self.latency, self._in + busy)
                self._in = there
                self._sleep(there)

        # gloo reads and writes these tensors until the message is done.
        kept = (time_sent, *call.tensors)
        return _Message([call.go([time_sent]), call.go()], after, kept)

    def _now(self) -> float:
        # All processes of a machine have this clock in common.
        return time.monotonic() - self._overslept

    def _sleep(self, until: float) -> None:
        if self._now() < until:
            while (left := until - time.monotonic()) > 0:
                time.sleep(left)
            self._overslept = time.monotonic() - until


@dataclass
class _Message:
    """Stands for the `Work` of a message that takes longer."""

    works: list[dist.Work]
    after: Callable[[], None]
    kept: tuple[Tensor, ...]

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Until the message has arrived, or left."""
        if self.works:
            for work in self.works:
                work.wait(*args, **kwargs)
            self.after()
            self.works = []
        return True
