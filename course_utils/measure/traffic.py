"""Which collectives a rank calls, and how many bytes it has to send for them.

On a rank, around any code::

    with Sent() as sent:
        loss.backward()
    sent.calls      # [("all-reduce", 9896), ...]
    sent.nbytes     # of all of them

Seen is what passes PyTorch's dispatcher in this thread: the collectives of
`torch.distributed`, also what DDP and `fully_shard` call by themselves, and the
functional ones, which DTensor uses. Not seen is what goes past it: a method of a
process group's backend, or the store.

Calls and sizes are counted, not what goes over the wire. The bytes are those of the
best algorithm; a backend may send more. gloo's reduce-scatter is an all-reduce, which
sends twice as much as is counted here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def _most(n: int) -> float:
    return (n - 1) / n


def _others(n: int) -> float:
    return n - 1


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


# What the operation is called, where its tensors are among the arguments, and which
# share of them a rank of n sends with the best algorithm.
_COLLECTIVES = {
    "c10d": {
        "send": ("send", 0, lambda n: 1),
        "allreduce": ("all-reduce", 0, _twice),
        "allreduce_coalesced": ("all-reduce", 0, _twice),
        "reduce": ("reduce", 0, _most),
        "broadcast": ("broadcast", 0, _most),
        "scatter": ("scatter", 1, _most),
        "gather": ("gather", 1, _most),
        "gather_into_tensor": ("gather", 1, _most),
        "alltoall": ("all-to-all", 1, _most),
        "alltoall_base": ("all-to-all", 1, _most),
        "allgather": ("all-gather", 1, _others),
        "allgather_base": ("all-gather", 1, _others),
        "allgather_coalesced": ("all-gather", 1, _others),
        "allgather_into_tensor_coalesced": ("all-gather", 1, _others),
        "reduce_scatter": ("reduce-scatter", 1, _most),
        "reduce_scatter_base": ("reduce-scatter", 1, _most),
        "reduce_scatter_tensor_coalesced": ("reduce-scatter", 1, _most),
    },
    "_c10d_functional": {
        "all_reduce": ("all-reduce", 0, _twice),
        "all_reduce_coalesced": ("all-reduce", 0, _twice),
        "broadcast": ("broadcast", 0, _most),
        "all_to_all_single": ("all-to-all", 0, _most),
        "all_gather_into_tensor": ("all-gather", 0, _others),
        "all_gather_into_tensor_out": ("all-gather", 0, _others),
        "all_gather_into_tensor_coalesced": ("all-gather", 0, _others),
        "reduce_scatter_tensor": ("reduce-scatter", 0, _most),
        "reduce_scatter_tensor_out": ("reduce-scatter", 0, _most),
        "reduce_scatter_tensor_coalesced": ("reduce-scatter", 0, _most),
    },
}


class Watch(TorchDispatchMode):
    """Calls `note` for each collective of this rank, while it is open."""

    # Otherwise the first operation imports torch._dynamo, which takes 2 seconds.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def note(self, name: str, nbytes: float) -> None:
        """Called with a name such as "all-gather", and the bytes to send at least."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = _COLLECTIVES.get(operation.namespace, {})
        called = known.get(operation.__name__.split(".")[0].strip("_"))
        if called is not None:
            name, place, share = called
            self.note(name, _nbytes(args[place]) * share(dist.get_world_size()))
        return operation(*args, **(kwargs or {}))


class Sent(Watch):
    """Notes the collectives of this rank, and the bytes that it has to send.

    Bytes are those of the best algorithm, computed and not measured: of an all-reduce
    of S bytes 2(n - 1)/n·S. The sizes of groups are not looked at: n is that of the
    whole job.

    Attributes:
        calls: the name and the bytes of each, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, float]] = []

    def note(self, name: str, nbytes: float) -> None:
        """Note one call."""
        self.calls.append((name, nbytes))

    @property
    def nbytes(self) -> int:
        """The bytes of all calls together."""
        return round(sum(nbytes for _, nbytes in self.calls))

    def count(self, name: str) -> int:
        """How many calls have this name."""
        return sum(called == name for called, _ in self.calls)


def _nbytes(tensors: Any) -> int:
    """The bytes of a tensor, or of tensors in lists, of lists."""
    if torch.is_tensor(tensors):
        return tensors.nbytes
    return sum(map(_nbytes, tensors))
