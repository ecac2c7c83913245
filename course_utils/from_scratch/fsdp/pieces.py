"""Rung 0: tensors in equal parts, one for each rank, and the collectives for them."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def padded(flat: Tensor, world_size: int) -> Tensor:
    """A copy with zeros behind it, so that `world_size` divides its length."""
    return F.pad(flat, (0, -flat.numel() % world_size))


@torch.no_grad()
def shard(
    tensor: Tensor, rank: int | None = None, world_size: int | None = None
) -> Tensor:
    """A copy of the part of `tensor` that a rank owns. Nothing is sent.

    Args:
        tensor: of any shape, the same on every rank. It is flattened and padded.
        rank, world_size: whose part; by default this rank's.

    Returns:
        ceil(tensor.numel() / world_size) elements, 1-D.
    """
    rank = dist.get_rank() if rank is None else rank
    n = dist.get_world_size() if world_size is None else world_size
    if not 0 <= rank < n:
        raise ValueError(f"rank is {rank}; of {n} ranks the last is rank {n - 1}")
    return padded(tensor.reshape(-1), n).view(n, -1)[rank].clone()


def all_gather(shard: Tensor) -> Tensor:
    """The shards of all ranks one behind another, (k,) -> (n·k,). Every rank calls.

    Cost for a result of S bytes: each rank sends (n-1)/n·S.
    """
    return AllGather(shard, shard.new_empty(dist.get_world_size() * len(shard))).wait()


def unshard(shard: Tensor, shape: Sequence[int]) -> Tensor:
    """The whole tensor again: gather, cut the padding off. Every rank calls."""
    return all_gather(shard)[: math.prod(shape)].view(tuple(shape))


def reduce_scatter(flat: Tensor) -> Tensor:
    """This rank's part of the sum over the ranks, (n·k,) -> (k,). Every rank calls.

    One rank alone gets `flat` itself.

    Cost for S bytes: each rank sends (n-1)/n·S. Memory while it runs: `flat` and the
    result; with gloo also (n-1)/n·S for what arrives.

    Raises:
        ValueError: the ranks cannot share `flat` equally.
    """
    n = dist.get_world_size()
    if flat.dim() != 1 or flat.numel() % n:
        raise ValueError(
            f"flat has the shape {tuple(flat.shape)}; {n} ranks can share a tensor of "
            f"one dimension whose length is a multiple of {n}. Flatten it, and use "
            f"padded(flat, {n})"
        )
    return ReduceScatter(flat).wait()


class AllGather:
    """A gathering on its way into `flat`, which is whole after `wait()`.

    NCCL does it in place. gloo gathers into a copy of the whole tensor, and copies it
    once more: so with gloo each rank sends its part to each other rank directly.
    """

    @torch.no_grad()
    def __init__(self, shard: Tensor, flat: Tensor) -> None:
        self.shard, self.flat = shard, flat
        if dist.get_backend() == "gloo":
            chunks = flat.view(dist.get_world_size(), -1)
            chunks[dist.get_rank()] = shard
            self.requests = _to_each(lambda rank: shard, lambda rank: chunks[rank])
        else:
            # Newer versions of torch have another name for it.
            native = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            self.requests = [native(flat, shard, async_op=True)]

    def wait(self) -> Tensor:
        """`flat`."""
        for request in self.requests:
            request.wait()
        return self.flat


class ReduceScatter:
    """A reduce-scatter of `flat` on its way. Until `wait()`, nobody may write to it.

    NCCL can do it. gloo cannot: there `dist.reduce_scatter_single` is an all-reduce of
    a copy, of which each rank takes its part. That sends twice the bytes, so with gloo
    each rank sends each part to its owner directly. The owner adds them up in the order
    of the ranks, and the sum is the same in every run.
    """

    @torch.no_grad()
    def __init__(self, flat: Tensor) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        chunks = flat.view(n, -1)
        if dist.get_backend() == "gloo":
            self.parts = [
                chunk if number == rank else torch.empty_like(chunk)
                for number, chunk in enumerate(chunks)
            ]
            self.requests = _to_each(chunks.__getitem__, self.parts.__getitem__)
        else:
            self.parts = [torch.empty_like(chunks[0])]
            native = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            self.requests = [native(self.parts[0], flat, async_op=True)]
        self.flat = flat

    @torch.no_grad()
    def wait(self) -> Tensor:
        """This rank's part of the sum; of one rank, `flat` itself. It is let go of."""
        for request in self.requests:
            request.wait()
        total, *others = self.parts
        for number, part in enumerate(others):
            # The first sum is a new tensor: a part of `flat` would keep all of it.
            total = total + part if number == 0 else total.add_(part)
        del self.flat, self.parts, self.requests
        return total


def _to_each(
    sent: Callable[[int], Tensor], received: Callable[[int], Tensor]
) -> list[dist.Work]:
    """Begin to exchange a message with each other rank, the next one first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    requests = []
    for distance in range(1, n):
        after, before = (rank + distance) % n, (rank - distance) % n
        requests.append(dist.irecv(received(before), before))
        requests.append(dist.isend(sent(after), after))
    return requests
