"""Look at a tensor between the messages of a ring.

On every rank, around a ring that sends parts of `x`::

    with snapshots(x) as moments:
        ring.all_reduce_ring(x)

In the notebook::

    history = History(ranks.pull("moments"))
    explore(pictures.ring_step, history, step=(0, history.steps))

Seen are `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv`. A collective of
PyTorch's own sends its messages in C++: these are not seen.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from course_utils.measure.taps import Tapped
    from course_utils.ranks import Ranks

# What is noted travels to the notebook, whose process needs no torch: hence the imports
# inside functions.


class Moment(NamedTuple):
    """A rank before a step of a ring; the last one is after all steps.

    Attributes:
        values: what its tensor holds.
        first, stop: the elements that it sends in this step, as in `x[first:stop]`.
        to: the rank that it sends them to; all three are None after the last step.
    """

    values: list[float]
    first: int | None = None
    stop: int | None = None
    to: int | None = None


@contextmanager
def snapshots(tensor: "Tensor") -> "Iterator[list[Moment]]":
    """Note what this rank's `tensor` holds before each step, until the block ends.

    A step is one message sent and one received, in any order. The list is complete
    when the block has ended. Ranks are numbered as in the whole job.

    Args:
        tensor: contiguous. What is sent must be a part of it, such as `tensor[2:4]` or
            one of `tensor.tensor_split(n)`, not a copy.

    Raises:
        ValueError: the tensor is not contiguous; something else than a part of it is
            sent; or a step has two messages in one direction.

    Cost: a copy of the tensor for each step, as a list: for small ones.
    """
    from course_utils.measure.taps import tap

    if not tensor.is_contiguous():
        raise ValueError(
            "The tensor is not contiguous, so a ring sends parts of a copy of it: "
            "pass tensor.contiguous() to both."
        )
    flat = tensor.detach().view(-1)
    moments: list[Moment] = []
    called = {"send": 0, "recv": 0}

    def note(kind: str, other: str) -> None:
        if called[kind] > called[other]:
            raise ValueError(
                f"A second {kind} in step {called[other]}: in a ring each step is one "
                "send and one recv on every rank."
            )
        # Before the step's first call: a receive may change the tensor at once.
        if called[kind] == called[other]:
            moments.append(Moment(flat.tolist()))
        called[kind] += 1

    def around(call: "Tapped") -> Any:
        if call.name == "send":
            (sent,) = call.tensors
            first = _place(sent, flat)
            note("send", "recv")
            stop = first + sent.numel()
            moments[-1] = Moment(moments[-1].values, first, stop, call.global_peer)
        else:
            note("recv", "send")
        return call.go()

    with tap(around):
        yield moments
    moments.append(Moment(flat.tolist()))


def _place(part: "Tensor", flat: "Tensor") -> int:
    """At which element of `flat` the part starts."""
    first = part.storage_offset() - flat.storage_offset()
    same = part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    if not same or not 0 <= first <= first + part.numel() <= flat.numel():
        raise ValueError(
            f"A tensor of {part.numel()} elements is sent that is no part of the "
            "recorded one: send parts of that, such as x.tensor_split(n)[k]; or record "
            "the tensor whose parts are sent."
        )
    return first


def record_ring(ranks: "Ranks", elements: int) -> list[list[Moment]]:
    """Run a ring all-reduce on the ranks, and note what they hold between its messages.

    Rank r starts with 10(r + 1), 10(r + 1) + 1, ...: all numbers differ.

    Args:
        ranks: On which to run it.
        elements: How many each rank's tensor has; not necessarily as many as chunks.

    Returns:
        For each rank its moments, for `History`.
    """

    def run() -> Sequence[Moment]:
        import torch
        import torch.distributed as dist

        from course_utils.from_scratch.ring import all_reduce_ring

        tensor = 10.0 * (dist.get_rank() + 1) + torch.arange(elements)
        with snapshots(tensor) as moments:
            all_reduce_ring(tensor)
        return moments

    return ranks.run(run)


# --- what the moments of all ranks say together -----------------------------------


class Taken(NamedTuple):
    """What a rank did with the message that it received in a step.

    Attributes:
        source: the rank that it is from.
        first, stop: the elements, which are the same on both ranks.
        how: "added" to what was there, "copied" over it, or "" where the new values
            are neither (or there are none).
    """

    source: int
    first: int
    stop: int
    how: str


class History:
    """The steps of all ranks together: who sent what, and which sums that made.

    Args:
        moments_by_rank: for each rank, in rank order, what `snapshots` noted there.

    Attributes:
        world_size: how many ranks there are.
        steps: how many steps there were; 2(n-1) in a ring all-reduce on n ranks.
        moments: as given.
        chunks: (first, stop) of the parts in which the tensor travelled, in order;
            without empty ones.
        taken: for each step, for each rank, what it did with what it received.

    Raises:
        ValueError: the ranks do not fit together.
    """

    def __init__(self, moments_by_rank: Sequence[Sequence[Moment]]) -> None:
        self.moments = [[Moment(*moment) for moment in one] for one in moments_by_rank]
        self.world_size = len(self.moments)
        self._check()
        self.steps = len(self.moments[0]) - 1
        size = len(self.moments[0][0].values)
        cuts = {0, size}
        for one in self.moments:
            for moment in one[:-1]:
                cuts |= {moment.first, moment.stop}
        edges = sorted(cuts)
        self.chunks = [*zip(edges, edges[1:], strict=False)]
        # For each rank and element: how often each rank's own value is in it.
        n = self.world_size
        own = [[int(rank == other) for other in range(n)] for rank in range(n)]
        self._shares = [[[own[rank]] * size for rank in range(n)]]
        self.taken: list[list[Taken]] = []
        for step in range(self.steps):
            self._follow(step)

    def shares(self, step: int, rank: int, chunk: int) -> list[int] | None:
        """How often the chunk holds each rank's own value, at the start of a step.

        All 1: it is the sum over all ranks. None where no sum of messages explains
        what the tensor holds.
        """
        first, stop = self.chunks[chunk]
        found = self._shares[step][rank][first:stop]
        return found[0] if found and all(one == found[0] for one in found) else None

    def values(self, step: int, rank: int, chunk: int) -> list[float]:
        """What the chunk holds at the start of a step."""
        first, stop = self.chunks[chunk]
        return self.moments[rank][step].values[first:stop]

    def is_complete(self, step: int, rank: int, chunk: int) -> bool:
        """Whether the chunk is the sum over all ranks at the start of a step."""
        return self.shares(step, rank, chunk) == [1] * self.world_size

    def _check(self) -> None:
        if not self.moments:
            raise ValueError(
                "There are no ranks: pass a list with the moments of each."
            )
        steps = [len(one) - 1 for one in self.moments]
        sizes = [len(moment.values) for one in self.moments for moment in one]
        if min(steps) < 0 or len(set(steps)) > 1 or len(set(sizes)) > 1:
            raise ValueError(
                f"The ranks noted {steps} steps, of tensors of {sorted(set(sizes))} "
                "elements: expected as many on every rank, and one size."
            )
        if not sizes[0]:
            raise ValueError("The tensors have no elements: there is nothing to see.")
        for step in range(steps[0]):
            targets = [one[step].to for one in self.moments]
            if sorted(targets, key=str) != sorted(range(len(targets)), key=str):
                raise ValueError(
                    f"In step {step} the ranks send to {targets}: expected that each "
                    "rank receives one message."
                )

    def _follow(self, step: int) -> None:
        """Find out what every rank did with its message."""
        before, after = [], []
        for one in self.moments:
            before.append(one[step])
            after.append(one[step + 1].values)
        shares = [list(of_rank) for of_rank in self._shares[-1]]
        taken: list[Taken | None] = [None] * self.world_size
        for source, message in enumerate(before):
            rank, how = message.to, set()
            for i in range(message.first, message.stop):
                old, new = before[rank].values[i], after[rank][i]
                sent = message.values[i]
                mine, theirs = self._shares[-1][rank][i], self._shares[-1][source][i]
                added, copied = _same(new, old + sent), _same(new, sent)
                if added and copied:  # there was a 0: a sum has nothing twice
                    added = not any(map(min, mine or [], theirs or []))
                    copied = not added
                how.add("added" if added else "copied" if copied else "")
                shares[rank][i] = _combined(mine, theirs) if added else None
                if copied:
                    shares[rank][i] = theirs
            word = how.pop() if len(how) == 1 else ""
            taken[rank] = Taken(source, message.first, message.stop, word)
        for rank, one in enumerate(taken):
            for i, (old, new) in enumerate(
                zip(before[rank].values, after[rank], strict=True)
            ):
                if not one.first <= i < one.stop and not _same(old, new):
                    shares[rank][i] = None
        self.taken.append(taken)
        self._shares.append(shares)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-9)


def _combined(mine: list[int] | None, theirs: list[int] | None) -> list[int] | None:
    if mine is None or theirs is None:
        return None
    return [a + b for a, b in zip(mine, theirs, strict=True)]
