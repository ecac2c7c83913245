"""Which collectives a rank calls, and how many bytes it has to send for them.

On a rank, around any code::

    with Sent() as sent:
        loss.backward()
    sent.calls      # [("all-reduce", 9896), ...]
    sent.nbytes     # of all of them

Seen is what passes PyTorch's dispatcher in this thread: the collectives of
`torch.distributed`, also what DDP and `fully_shard` call by themselves, and the
functional ones, which DTensor uses. Not seen is what goes past it: a method of a
process group's backend, or the store, which `everything_sent` looks at.

Calls and sizes are counted, not what goes over the wire. The bytes are those of the
best algorithm; a backend may send more. gloo's reduce-scatter is an all-reduce, which
sends twice as much as is counted here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_utils.measure.messages import Call, recorded
from course_utils.measure.taps import Tapped, tap


def _most(n: int) -> float:
    return (n - 1) / n


# By the beginning of an operation's name, without underscores: what it is called, and
# which share of its tensors a rank of n sends with the best algorithm.
_COLLECTIVES = {
    "send": ("send", lambda n: 1),
    "allreduce": ("all-reduce", lambda n: 2 * (n - 1) / n),
    "allgather": ("all-gather", lambda n: n - 1),
    "alltoall": ("all-to-all", _most),
    "reducescatter": ("reduce-scatter", _most),
    "reduce": ("reduce", _most),
    "broadcast": ("broadcast", _most),
    "scatter": ("scatter", _most),
    "gather": ("gather", _most),
}


class Watch(TorchDispatchMode):
    """Calls `note` for each collective of this rank, while it is open."""

    # Otherwise the first operation imports torch._dynamo, which takes 2 seconds.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def note(self, name: str, nbytes: float, size: int) -> None:
        """Called with a name such as "all-gather", and the bytes to send at least.

        The size is that of the tensors of the call, in bytes.
        """
        raise NotImplementedError

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation.namespace in ("c10d", "_c10d_functional"):
            spelled = operation.__name__.replace("_", "")
            begins = (known for known in _COLLECTIVES if spelled.startswith(known))
            if (known := next(begins, None)) is not None:
                name, share = _COLLECTIVES[known]
                given = zip(operation._schema.arguments, args, strict=False)
                inputs = [value for what, value in given if "input" in what.name]
                size = _nbytes(inputs[0] if inputs else args[0])
                self.note(name, size * share(dist.get_world_size()), size)
        return operation(*args, **(kwargs or {}))


class Sent(Watch):
    """Notes the collectives of this rank, and the bytes that it has to send.

    Bytes are those of the best algorithm, computed and not measured: of an all-reduce
    of S bytes 2(n - 1)/n·S. The sizes of groups are not looked at: n is that of the
    whole job.

    Attributes:
        calls: the name and the bytes of each, in order.
        tensors: the name of each, and the bytes of the tensors that it was given.
        messages: filled by `everything_sent`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, float]] = []
        self.tensors: list[tuple[str, int]] = []
        self.messages: list[Call] = []

    def note(self, name: str, nbytes: float, size: int) -> None:
        """Note one call."""
        self.calls.append((name, nbytes))
        self.tensors.append((name, size))

    @property
    def nbytes(self) -> int:
        """The bytes of all calls together."""
        return round(sum(nbytes for _, nbytes in self.calls))

    def count(self, name: str) -> int:
        """How many calls have this name."""
        return sum(called == name for called, _ in self.calls)


@contextmanager
def everything_sent() -> Iterator[Sent]:
    """Yields a `Sent` that in the end also has what this rank has set in a store.

    And the messages of all threads, which are in its `messages`, too.
    """
    stored: list[tuple[str, float]] = []

    def around(call: Tapped) -> Any:
        _, value = (*call.args, *call.kwargs.values())
        stored.append(("store", len(value)))
        return call.go()

    with tap(around, ("set",), dist.Store), recorded() as messages, Sent() as sent:
        sent.messages = messages
        yield sent
    sends = [("send", call.nbytes) for call in messages if call.kind == "send"]
    sent.calls = [call for call in sent.calls if call[0] != "send"] + sends + stored


def _nbytes(tensors: Any) -> int:
    """The bytes of a tensor, or of tensors in lists, of lists."""
    if torch.is_tensor(tensors):
        return tensors.nbytes
    return sum(map(_nbytes, tensors))
