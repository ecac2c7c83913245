"""A tap on what a rank sends: see each call of ``torch.distributed``, or change it.

    def around(call):
        print(call.name, call.nbytes)
        return call.go()

    with tap(around):
        collectives.broadcast_tree(x)

All functions of ``torch.distributed`` end in a method of a ``ProcessGroup``, under
whatever name they are called: `send`, `recv` and `recv_anysource` for messages,
`allreduce` and its like for collectives. A tap takes the place of these methods. What
goes past them is not seen: DDP's own reducer and PyTorch's collectives send in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Where all of torch's functions end that send or receive a message.
P2P = ("send", "recv", "recv_anysource")


@dataclass
class Tapped:
    """A call that a tap has caught.

    Attributes:
        name: the method of the process group, such as "send" or "allreduce".
        group: the process group, or the work where those are tapped.
        args, kwargs: its arguments, as they were given.
        original: the method itself.
    """

    name: str
    group: dist.ProcessGroup
    args: tuple
    kwargs: dict[str, Any]
    original: Callable[..., dist.Work]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is sent, received or reduced."""
        given = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return [given] if isinstance(given, torch.Tensor) else list(given)

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def peer(self) -> int | None:
        """The rank in the group that a message goes to or comes from, if it is said."""
        for name in ("dstRank", "srcRank"):
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[1] if self.name in ("send", "recv") else None

    @property
    def global_peer(self) -> int | None:
        """The same rank, as numbered in the whole job."""
        if self.peer is None:
            return None
        return dist.get_global_rank(self.group, self.peer)

    def go(self, tensors: list[torch.Tensor] | None = None) -> dist.Work:
        """Do what was called, perhaps with other tensors."""
        if tensors is None:
            return self.original(self.group, *self.args, **self.kwargs)
        if self.args:
            return self.original(self.group, tensors, *self.args[1:], **self.kwargs)
        name, *_ = self.kwargs
        return self.original(self.group, **(self.kwargs | {name: tensors}))


@contextmanager
def tap(
    around: Callable[[Tapped], Any],
    names: Iterable[str] = P2P,
    owner: type = dist.ProcessGroup,
) -> Iterator[None]:
    """Until the block ends, `around` takes the place of these methods.

    Args:
        around: called with each call of this rank. It returns what the call returns:
            the work that `call.go()` gives, or what stands for it.
        names: the methods, those for messages by default.
        owner: the class that has them.
    """

    def tapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            return around(Tapped(name, group, args, kwargs, original))

        # Who waits in it is told to wait in `send`, not in `method`.
        method.__code__ = method.__code__.replace(co_name=name)
        return method

    with put_back(owner, names) as originals:
        for name, original in originals.items():
            setattr(owner, name, tapped(name, original))
        yield


@contextmanager
def put_back(owner: Any, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields these attributes of a class or module; afterwards they are as before.

    They are taken as they lie in it. What getattr() makes of a method of
    `ProcessGroup` would no longer bind, once it is put back.
    """
    originals = {name: vars(owner)[name] for name in names}
    try:
        yield originals
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
