"""All-reduce in a ring: the algorithm behind most data-parallel training.

    reduce_scatter_ring, all_gather_ring    its two halves, n-1 steps each
    all_reduce_ring                         both
    all_reduce_pipelined                    the same in small pieces, without pauses
    all_reduce_tree                         fewer steps, more bytes: for small tensors
    all_reduce_halving_doubling             few steps and few bytes, for n = 2^k
    SharedMemoryRing                        the ring without messages, on one machine

All are called as `torch.distributed.all_reduce`: by every rank of the group, with
tensors of one shape; the result replaces the tensor. Tensors need not be contiguous,
and n need not divide their size.

The cost is for n ranks and a tensor of S bytes: what each rank sends, and the steps, in
each of which it sends one message and receives one. Together, the ranks cannot send
less than 2(n-1)·S, so the busiest of them not less than 2(n-1)/n·S (Patarasuk and Yuan,
JPDC 69 (2009) 117-124). And no all-reduce has fewer than log2(n) steps.

For CPU tensors and gloo: NCCL has rings and trees of its own inside.
"""

import os
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .refusals import refuse_unlike
from .tensors import combine_of, in_memory, refuse_unsendable, write

# ---------------------------------------------------------------------------- the ring


@torch.no_grad()
def reduce_scatter_ring(
    chunks: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """The first half: afterwards rank r holds the sums of chunk (r + 1) mod n.

    In step k (0, 1, ...) rank r sends chunk (r - k) mod n to the next rank. From the
    rank before it receives chunk (r - k - 1) mod n, and adds its own to it: this is
    what it sends in the next step.

    Args:
        chunks: n contiguous tensors, chunk i of one size on all ranks; overwritten.
            Only chunk (r + 1) mod n is a result, the others are partial sums.
        op: SUM, PRODUCT, MIN, MAX or AVG, the sum divided by n.

    Raises:
        ValueError: there is no such `op` for this dtype, or the chunks do not fit.

    Cost: (n-1)/n·S sent by each rank; n-1 steps.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    _check_chunks(chunks, n)
    combine = combine_of(op, chunks[0])
    incoming = torch.empty_like(max(chunks, key=len))
    for step in range(n - 1):
        outgoing, mine = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = incoming[: len(mine)]
        _exchange(outgoing, (rank + 1) % n, received, (rank - 1) % n, group)
        combine(mine, received, out=mine)
    if op == ReduceOp.AVG:
        chunks[(rank + 1) % n].div_(n)


@torch.no_grad()
def all_gather_ring(
    chunks: Sequence[Tensor], group: ProcessGroup | None = None
) -> None:
    """The second half: rank r starts with the result in chunk (r + 1) mod n.

    In step k rank r sends chunk (r + 1 - k) mod n to the next rank: in step 0 its own
    result, then what it has just received.

    Args:
        chunks: n contiguous tensors, chunk i of one size on all ranks; all but one
            are overwritten.

    Raises:
        ValueError: the chunks do not fit.

    Cost: (n-1)/n·S sent by each rank; n-1 steps.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    _check_chunks(chunks, n)
    for step in range(n - 1):
        outgoing, incoming = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        _exchange(outgoing, (rank + 1) % n, incoming, (rank - 1) % n, group)


@torch.no_grad()
def all_reduce_ring(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """Reduce-scatter around the ring, then all-gather around it.

    Args:
        tensor: of one shape and dtype on all ranks; replaced by the result.
        op: SUM, PRODUCT, MIN, MAX or AVG, the sum divided by n.

    Raises:
        ValueError: there is no such `op` for this dtype.

    Cost: 2(n-1)/n·S sent by each rank; 2(n-1) steps.
    """
    combine_of(op, tensor)  # refuses what does not fit
    flat = _flat(tensor)
    chunks = flat.tensor_split(dist.get_world_size(group))  # sizes differ by 1 at most
    # Sums go around; a mean is made of them at the end.
    reduce_scatter_ring(chunks, ReduceOp.SUM if op == ReduceOp.AVG else op, group)
    all_gather_ring(chunks, group)
    _finish(tensor, flat, op, group)


@torch.no_grad()
def all_reduce_pipelined(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    piece_bytes: int = 2 << 20,
) -> None:
    """The ring in small pieces: one is added up while the next is on its way.

    A piece goes on to the next rank as soon as it is added up; nobody waits for the
    rest of its chunk. The order of the chunks is that of `all_reduce_ring`: the halves
    follow each other without a pause.

    Args, Raises: as in `all_reduce_ring`.
        piece_bytes: of one message. Smaller ones overlap more, and cost more latencies.

    Cost: 2(n-1)/n·S sent by each rank, as in the ring; more messages.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    combine = combine_of(op, tensor)
    flat = _flat(tensor)
    size = max(1, piece_bytes // flat.element_size())
    chunks = [chunk.split(size) for chunk in flat.tensor_split(n)]
    after, before = (rank + 1) % n, (rank - 1) % n

    sends = [dist.isend(p, group=group, group_dst=after) for p in chunks[rank] if n > 1]
    arriving = [
        (s, piece) for s in range(1, 2 * n - 1) for piece in chunks[(rank - s) % n]
    ]
    buffers = [torch.empty(min(size, len(flat)), dtype=flat.dtype) for _ in range(2)]

    def receive(i: int) -> tuple[Tensor, dist.Work]:
        step, piece = arriving[i]
        target = buffers[i % 2][: len(piece)] if step < n else piece
        return target, dist.irecv(target, group=group, group_src=before)

    # Two receives are open at any time: data arrive in one while the other is used.
    open_receives = [receive(i) for i in range(min(2, len(arriving)))]
    for i, (step, piece) in enumerate(arriving):
        received, request = open_receives.pop(0)
        request.wait()
        if step < n:
            combine(piece, received, out=piece)
        if step < 2 * n - 2:
            sends.append(dist.isend(piece, group=group, group_dst=after))
        if i + 2 < len(arriving):
            open_receives.append(receive(i + 2))
    for send in sends:
        send.wait()
    _finish(tensor, flat, op, group)


# ---------------------------------------------------------------------- its rivals


@torch.no_grad()
def all_reduce_tree(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """Sums go up a binomial tree to the group's first rank; the total comes down.

    With a small tensor, time is latency, and the tree needs fewer steps than the ring.
    With a large one it is slow: whole tensors travel, and half of the ranks only send
    once.

    Args, Raises: as in `all_reduce_ring`.

    Cost: up to ceil(log2 n)·S sent by a rank; 2·ceil(log2 n) steps.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    combine = combine_of(op, tensor)
    flat = _flat(tensor)
    incoming = torch.empty_like(flat)
    distances = [2**k for k in range((n - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(flat, group=group, group_dst=rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            dist.recv(incoming, group=group, group_src=rank + distance)
            combine(flat, incoming, out=flat)
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(flat, group=group, group_src=rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < n:
            dist.send(flat, group=group, group_dst=rank + distance)
    _finish(tensor, flat, op, group)


@torch.no_grad()
def all_reduce_halving_doubling(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """Reduce-scatter by halves, then all-gather by doubling: few steps and few bytes.

    In each step a rank exchanges half of what it still works on with a partner, first
    at distance n/2, then n/4, ... Then the same way back.

    Args, Raises: as in `all_reduce_ring`.

    Raises:
        ValueError: n is not a power of two: some ranks would have no partner.

    Cost: 2(n-1)/n·S sent by each rank; 2·log2(n) steps.

    Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005) 49-66, section 4.5.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if n & (n - 1):
        raise ValueError(
            f"Halving and doubling needs 2, 4, 8, ... ranks, not {n}: use a ring."
        )
    combine = combine_of(op, tensor)
    flat = _flat(tensor)
    incoming = torch.empty_like(flat)
    mine, splits = flat, []
    distance = n // 2
    while distance:
        partner, middle = rank ^ distance, len(mine) // 2
        low, high = mine[:middle], mine[middle:]
        mine, other = (low, high) if rank < partner else (high, low)
        _exchange(other, partner, incoming[: len(mine)], partner, group)
        combine(mine, incoming[: len(mine)], out=mine)
        splits.append((partner, mine, other))
        distance //= 2
    for partner, mine, other in reversed(splits):
        _exchange(mine, partner, other, partner, group)
    _finish(tensor, flat, op, group)


# -------------------------------------------------------------- without any messages


class SharedMemoryRing:
    """The ring for ranks on one machine: they read and write each other's memory.

    No chunk travels. Each rank has one chunk to add up, and goes around the ring
    itself: from memory to memory to collect the sum, and once more to leave it there.
    No data go through a socket, so this is about as fast as the memory allows, and
    shows what sockets cost.

    Every rank of the group makes one, with the same arguments, and keeps it.

    Args:
        numel: elements of the tensors to reduce.
        dtype: their dtype.
        group: its ranks must all be on one machine, with Linux or macOS.

    Raises:
        ValueError: the ranks do not give the same arguments.

    Attributes:
        buffer: this rank's part of the shared memory, of `numel` elements. A tensor
            that lives there need not be copied in and out.
    """

    BLOCK_BYTES = 1 << 19  # added up and copied at once: it stays in a core's cache

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype = torch.float32,
        group: ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.rank, n = dist.get_rank(group), dist.get_world_size(group)
        refuse_unlike({"numel": str(numel), "dtype": str(dtype)}, group)
        path = [None]
        if self.rank == 0:
            in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
            with tempfile.NamedTemporaryFile(dir=in_memory, delete=False) as file:
                file.truncate(max(1, n * numel) * dtype.itemsize)
            path = [file.name]
        dist.broadcast_object_list(path, group=group, group_src=0)
        shared = torch.from_file(path[0], shared=True, size=n * numel, dtype=dtype)
        dist.barrier(group)
        if self.rank == 0:
            os.unlink(path[0])  # the memory lives as long as somebody uses it
        self._all = shared.view(n, numel)
        self.buffer = self._all[self.rank]

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """All-reduce `tensor`, which has as many elements as the ring was made for.

        The numbers are added up in the order of `all_reduce_ring`.

        Raises:
            ValueError: its size or dtype is another one, or there is no such `op`.

        Cost: two barriers; S/n bytes read from each rank's memory, and S/n written to
        it.
        """
        n = len(self._all)
        if (tensor.numel(), tensor.dtype) != (self.buffer.numel(), self.buffer.dtype):
            raise ValueError(
                f"The tensor has {tensor.numel()} elements of {tensor.dtype}: expected "
                f"{self.buffer.numel()} of {self.buffer.dtype}, as this ring was made."
            )
        combine = combine_of(op, tensor)
        refuse_unsendable(tensor, written=True)
        self.buffer.copy_(tensor.reshape(-1))
        dist.barrier(self.group)  # all tensors are there
        mine = (self.rank + 1) % n
        chunks = [memory.tensor_split(n)[mine] for memory in self._all]
        chunks = chunks[mine:] + chunks[:mine]  # around the ring, this rank's own last
        size = max(1, self.BLOCK_BYTES // tensor.element_size())
        for total, *others in zip(*(c.split(size) for c in chunks), strict=True):
            for other in others:
                combine(total, other, out=total)
            if op == ReduceOp.AVG:
                total /= n
            for other in others:
                other.copy_(total)
        dist.barrier(self.group)  # all chunks are there
        write(tensor, self.buffer.view(tensor.shape))


# ------------------------------------------------------------------------ what it takes


def _exchange(
    outgoing: Tensor, to: int, incoming: Tensor, source: int, group: ProcessGroup | None
) -> None:
    """Send and receive at the same time, so that no rank waits for another for ever."""
    request = dist.isend(outgoing, group=group, group_dst=to)
    dist.recv(incoming, group=group, group_src=source)
    request.wait()  # until then `outgoing` must not change


def _check_chunks(chunks: Sequence[Tensor], n: int) -> None:
    if len(chunks) != n:
        raise ValueError(f"There are {len(chunks)} chunks: expected {n}, one a rank.")
    for i, chunk in enumerate(chunks):
        refuse_unsendable(chunk, f"chunks[{i}]", written=True)
        if chunk.dim() == 0 or not chunk.is_contiguous():
            raise ValueError(
                f"chunks[{i}] has the shape {list(chunk.shape)} and the strides "
                f"{list(chunk.stride())}: expected contiguous chunks, such as "
                f"tensor.contiguous().view(-1).tensor_split({n})."
            )


def _flat(tensor: Tensor) -> Tensor:
    """One-dimensional: the tensor's own memory if it is contiguous, else a copy."""
    refuse_unsendable(tensor, written=True)
    return in_memory(tensor).view(-1)


def _finish(
    tensor: Tensor, flat: Tensor, op: ReduceOp, group: ProcessGroup | None
) -> None:
    if op == ReduceOp.AVG:
        flat /= dist.get_world_size(group)
    write(tensor, flat.view(tensor.shape))
