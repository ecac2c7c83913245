"""The collectives of `torch.distributed`, from `send` and `recv` alone.

    one to all     broadcast, broadcast_tree, scatter
    all to one     gather, reduce
    all to all     exchange, all_gather, reduce_scatter, all_to_all
    made of these  all_reduce_naive, all_reduce, barrier

Names and arguments are those of `torch.distributed`, so one can stand in for the other:
`src` and `dst` are ranks of the whole job. Every rank of the group must make the call,
and no other. Results are written into the tensors that were given, past autograd, as in
torch. Tensors need not be contiguous (a transposed one, say): what is sent and received
is a contiguous copy.

Each docstring states the cost for n ranks:

    messages   sent by all ranks together
    bytes      sent by all ranks together; S is one tensor, or one whole list of them
    busiest    what the busiest rank sends, or receives, whichever is more
    steps      one after the other; in each a rank can send one message and receive one

What a rank can see to be wrong, such as a root outside the group, is a ValueError
there, before it sends anything. A tensor that does not fit what another rank sends is
an error of the backend.

For CPU tensors and gloo. NCCL's send may wait on the GPU for a recv that is queued
behind it: there `exchange` needs `dist.batch_isend_irecv`, which starts both at once.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19 (2005) 49-66. Names: the MPI standard.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from .tensors import combine_of, in_memory, refuse_unsendable, write

# ---------------------------------------------------------------------- one to all


@torch.no_grad()
def broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """Copy the tensor of rank `src` to all ranks: the root sends it to each in turn.

    Args:
        tensor: what is sent on `src`; written on the others. One shape on all ranks.

    Cost: n-1 messages; (n-1)·S bytes; busiest (n-1)·S, the root; n-1 steps.
    """
    rank, root, n = _places(group, src)
    refuse_unsendable(tensor, written=True)
    if rank == root:
        for other in range(n):
            if other != root:
                _send(tensor, other, group)
    else:
        _receive(tensor, root, group)


@torch.no_grad()
def broadcast_tree(
    tensor: Tensor, src: int = 0, group: ProcessGroup | None = None
) -> None:
    """The same with a tree: every rank that has the tensor already helps to send it.

    The root's place in the tree is 0. In step k = 0, 1, 2, ... each place p below 2^k
    sends to place p + 2^k: twice as many have it then. This is a *binomial* tree.

    Cost: n-1 messages; (n-1)·S bytes; busiest ceil(log2 n)·S, the root;
    ceil(log2 n) steps. For 1024 ranks that is 10 steps instead of 1023.
    """
    rank, root, n = _places(group, src)
    refuse_unsendable(tensor, written=True)
    place = (rank - root) % n
    distance = 1
    while distance < n:
        if place < distance and place + distance < n:
            _send(tensor, (rank + distance) % n, group)
        elif distance <= place < 2 * distance:
            _receive(tensor, (rank - distance) % n, group)
        distance *= 2


@torch.no_grad()
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
) -> None:
    """Give each rank one tensor of the list that rank `src` has.

    Args:
        tensor: written on every rank.
        scatter_list: on `src` one tensor for each rank, in the group's order; None on
            the others. Shapes may differ from rank to rank; torch's gloo refuses that.

    Raises:
        ValueError: the list is where it should not be, or does not fit.

    Cost, for a list of S: n-1 messages; (n-1)/n·S bytes; busiest (n-1)/n·S, the root;
    n-1 steps.
    """
    rank, root, n = _places(group, src)
    refuse_unsendable(tensor, written=True)
    if rank != root:
        _must_be_none("scatter_list", scatter_list, f"src={src}")
        _receive(tensor, root, group)
        return
    _check("scatter_list", scatter_list, n, tensor, rank)
    for other in range(n):
        if other != root:
            _send(scatter_list[other], other, group)
    write(tensor, scatter_list[rank])


# ---------------------------------------------------------------------- all to one


@torch.no_grad()
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
) -> None:
    """Collect the tensors of all ranks in a list on rank `dst`: `scatter` reversed.

    Args:
        tensor: what this rank gives.
        gather_list: on `dst` one tensor for each rank, to be written; None on the
            others. Shapes may differ from rank to rank; torch's gloo refuses that.

    Raises:
        ValueError: the list is where it should not be, or does not fit.

    Cost, for a list of S: n-1 messages; (n-1)/n·S bytes; busiest (n-1)/n·S, the root;
    n-1 steps.
    """
    rank, root, n = _places(group, dst)
    if rank != root:
        _must_be_none("gather_list", gather_list, f"dst={dst}")
        _send(tensor, root, group)
        return
    _check("gather_list", gather_list, n, tensor, rank, written=True)
    for other in range(n):
        if other != root:
            _receive(gather_list[other], other, group)
    write(gather_list[rank], tensor)


@torch.no_grad()
def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Combine the tensors of all ranks, element by element, into that of rank `dst`.

    Args:
        tensor: of one shape on all ranks; replaced by the result on `dst`. The other
            ranks keep theirs; torch's gloo leaves partial results in them.
        op: SUM, PRODUCT, MIN, MAX or AVG, the sum divided by n.

    Raises:
        ValueError: there is no such `op` for this dtype.

    Cost: n-1 messages; (n-1)·S bytes; busiest (n-1)·S, the root; n-1 steps.
    """
    rank, root, n = _places(group, dst)
    combine = combine_of(op, tensor)
    refuse_unsendable(tensor, written=True)
    if rank != root:
        _send(tensor, root, group)
        return
    total, incoming = _copy(tensor), _copy(tensor)
    for other in range(n):
        if other != root:
            _receive(incoming, other, group)
            total = combine(total, incoming)
    write(tensor, total / n if op == ReduceOp.AVG else total)


# ---------------------------------------------------------------------- all to all


@torch.no_grad()
def exchange(
    outgoing: Tensor,
    group_dst: int,
    incoming: Tensor,
    group_src: int,
    group: ProcessGroup | None = None,
) -> None:
    """Send one tensor and receive another at the same time. MPI calls it Sendrecv.

    With `send` before `recv` on every rank, each would wait for another one to
    receive, for ever. `isend` does not wait.

    Args:
        outgoing: what `group_dst` gets.
        incoming: written with what `group_src` sends. It must not share memory with
            `outgoing`.
        group_dst, group_src: other ranks, as numbered in the group; may be the same.

    Raises:
        ValueError: one of them is this rank, or not in the group.

    Cost: 1 message a rank, 1 step.
    """
    rank, _, n = _places(group)
    for other in (group_dst, group_src):
        if other == rank or not 0 <= other < n:
            raise ValueError(
                f"Rank {rank} of {n} cannot exchange with rank {other}: expected "
                f"another rank, from 0 to {n - 1}."
            )
    refuse_unsendable(incoming, "incoming", written=True)
    outgoing = in_memory(outgoing)
    request = dist.isend(outgoing, group=group, group_dst=group_dst)
    _receive(incoming, group_src, group)
    request.wait()  # until then `outgoing` must not change


@torch.no_grad()
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None
) -> None:
    """Collect the tensors of all ranks in a list on every rank.

    In step k rank r sends to rank r + k and receives from rank r - k, counted in a
    circle: nobody has to send or receive two at a time.

    Args:
        tensor_list: one tensor for each rank, to be written. Shapes may differ from
            rank to rank; torch's gloo refuses that.
        tensor: what this rank gives.

    Raises:
        ValueError: the list does not fit.

    Cost, for a list of S: n(n-1) messages; (n-1)·S bytes; busiest (n-1)/n·S, as all
    are; n-1 steps.
    """
    rank, _, n = _places(group)
    _check("tensor_list", tensor_list, n, tensor, rank, written=True)
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        exchange(tensor, to, tensor_list[source], source, group)
    write(tensor_list[rank], tensor)


@torch.no_grad()
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Combine the lists of all ranks; rank r gets the r-th tensor of the result.

    Args:
        output: written with this rank's part of the result.
        input_list: one tensor for each rank. The r-th has one shape on all ranks, but
            the shapes of a list may differ.
        op: as in `reduce`.

    Raises:
        ValueError: the list does not fit, or there is no such `op` for this dtype.

    Cost, for a list of S: n(n-1) messages; (n-1)·S bytes; busiest (n-1)/n·S, as all
    are; n-1 steps. (torch's gloo does an all-reduce of each tensor instead.)
    """
    rank, _, n = _places(group)
    _check("input_list", input_list, n, output, rank)
    refuse_unsendable(output, "output", written=True)
    combine = combine_of(op, output)
    total, incoming = _copy(input_list[rank]), _copy(input_list[rank])
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        exchange(input_list[to], to, incoming, source, group)
        total = combine(total, incoming)
    write(output, total / n if op == ReduceOp.AVG else total)


@torch.no_grad()
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
) -> None:
    """The j-th tensor of rank i's input becomes the i-th of rank j's output.

    Args:
        output_tensor_list: one tensor for each rank, to be written.
        input_tensor_list: one tensor for each rank; must not share memory with the
            output. Shapes may differ from rank to rank; torch's gloo refuses that.

    Raises:
        ValueError: a list does not fit.

    Cost, for lists of S: n(n-1) messages; (n-1)·S bytes; busiest (n-1)/n·S, as all
    are; n-1 steps.
    """
    rank, _, n = _places(group)
    _check("input_tensor_list", input_tensor_list, n)
    mine = input_tensor_list[rank]
    _check("output_tensor_list", output_tensor_list, n, mine, rank, written=True)
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        outgoing, incoming = input_tensor_list[to], output_tensor_list[source]
        exchange(outgoing, to, incoming, source, group)
    write(output_tensor_list[rank], mine)


# ------------------------------------------------------------------- made of these


def all_reduce_naive(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """`reduce` to one rank, then `broadcast` from it. Everything goes through it.

    Args:
        tensor: of one shape on all ranks; replaced by the result.
        op: as in `reduce`.

    Raises:
        ValueError: there is no such `op` for this dtype.

    Cost: 2(n-1) messages; 2(n-1)·S bytes; busiest (n-1)·S, the group's first rank, in
    and then the same out; 2(n-1) steps.
    """
    _places(group)  # who is not in the group is told so
    root = dist.get_process_group_ranks(group)[0]
    reduce(tensor, root, op, group)
    broadcast(tensor, root, group)


@torch.no_grad()
def all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """`reduce_scatter`, then `all_gather`: each rank reduces one n-th of the tensor.

    As many steps as the naive one, but a message is one n-th as long. Sizes that n
    does not divide are fine: some pieces then have one element less, or none.

    Args, Raises: as in `all_reduce_naive`.

    Cost: 2n(n-1) messages; 2(n-1)·S bytes; busiest 2(n-1)/n·S, as all are;
    2(n-1) steps.
    """
    rank, _, n = _places(group)
    refuse_unsendable(tensor, written=True)
    flat = in_memory(tensor).view(-1)  # the tensor's own memory, if contiguous
    pieces = flat.tensor_split(n)
    mine = _copy(pieces[rank])
    reduce_scatter(mine, pieces, op, group)
    all_gather(pieces, mine, group)
    write(tensor, flat.view(tensor.shape))


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait until every rank has come here.

    Nobody gets the sum before the first rank has it, and that needs all of them.

    Cost: 2(n-1) messages of 1 byte; 2(n-1) steps.
    """
    all_reduce_naive(torch.zeros(1, dtype=torch.uint8), group=group)


# ----------------------------------------------------------------------- what it takes


def _places(
    group: ProcessGroup | None, root: int | None = None
) -> tuple[int, int, int]:
    """This rank and the root as numbered in the group, and the group's size."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"Rank {dist.get_rank()} is not in the group: only its members call this."
        )
    members = dist.get_process_group_ranks(group)
    if root is not None and root not in members:
        raise ValueError(f"src or dst is {root}: expected one of the ranks {members}.")
    place = 0 if root is None else members.index(root)
    return dist.get_rank(group), place, len(members)


def _send(tensor: Tensor, dst: int, group: ProcessGroup | None) -> None:
    dist.send(in_memory(tensor), group=group, group_dst=dst)


def _receive(tensor: Tensor, src: int, group: ProcessGroup | None) -> None:
    incoming = in_memory(tensor)  # the tensor itself, if contiguous
    dist.recv(incoming, group=group, group_src=src)
    write(tensor, incoming)


def _copy(tensor: Tensor) -> Tensor:
    """With memory of its own, contiguous."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _must_be_none(name: str, value: object, root: str) -> None:
    if value is not None:
        raise ValueError(f"{name} must be None on this rank: only {root} gives one.")


def _check(
    name: str,
    tensors: Sequence[Tensor] | None,
    n: int,
    mine: Tensor | None = None,
    rank: int = 0,
    *,
    written: bool = False,
) -> None:
    """One tensor for each of n ranks, of one dtype; that of this rank fits `mine`."""
    given = "None" if tensors is None else f"{len(tensors)} tensors"
    if tensors is None or len(tensors) != n:
        raise ValueError(f"{name} has {given}: expected {n}, one for each rank.")
    dtype = tensors[0].dtype if mine is None else mine.dtype
    if mine is not None:
        refuse_unsendable(mine)
    for i, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise ValueError(f"{name}[{i}] is of {tensor.dtype}: expected {dtype}.")
        refuse_unsendable(tensor, f"{name}[{i}]", written=written)
    if mine is not None and tensors[rank].shape != mine.shape:
        raise ValueError(
            f"{name}[{rank}], this rank's own, is of shape "
            f"{list(tensors[rank].shape)}: expected {list(mine.shape)}, that of the "
            "tensor it goes with."
        )
