"""Lesson 07: different right answers, and wrong ones that no near miss tells of."""

import math

import torch
import torch.distributed as dist
from answers import Answers

from course_utils.theory import costs

ANSWERS = Answers()


def me():
    return dist.get_rank(), dist.get_world_size()


def exchange(outgoing, incoming, way=1):
    """Send to the next rank and receive from the one before; way=-1: backwards."""
    rank, n = me()
    request = dist.isend(outgoing, (rank + way) % n)
    dist.recv(incoming, (rank - way) % n)
    request.wait()


def in_a_batch(outgoing, incoming):
    rank, n = me()
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % n)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % n)
    [work.wait() for work in dist.batch_isend_irecv([send, receive])]


# ----------------------------------------------------------------- 07.predict_bytes

ANSWERS.wrong("07.predict_bytes", "wrong", "That is the reduce-scatter.")(3_750_000)
ANSWERS.wrong("07.predict_bytes", "wrong", "one n-th of the tensor")(7)
for number in (7_500_000, 30 * 4_000_000 / 16, "7,500,000", torch.tensor(7_500_000)):
    ANSWERS.right("07.predict_bytes")(number)

# ---------------------------------------------------------------- 07.reduce_scatter


def reduced(begin=0, sign=1, dtype=None):
    """A first half, sent in that dtype. Rank r begins with chunk ±(r + begin)."""

    def reduce_scatter(chunks):
        rank, n = me()
        for number in range(rank + begin, rank + begin - n + 1, -1):
            outgoing, mine = chunks[sign * number % n], chunks[sign * (number - 1) % n]
            incoming = torch.empty_like(mine, dtype=dtype)
            exchange(outgoing.to(incoming.dtype), incoming)
            mine += incoming.to(mine.dtype)
        return sign * (rank + begin + 1) % n

    return reduce_scatter


reduce_scatter = ANSWERS.right("07.reduce_scatter")(reduced())
ANSWERS.right("07.reduce_scatter")(lambda chunks: torch.tensor(reduced(-1)(chunks)))
ANSWERS.wrong("07.reduce_scatter", "wrong", "an int, not the chunk itself, no pair")(
    lambda chunks: chunks[reduce_scatter(chunks)]
)
ANSWERS.wrong("07.reduce_scatter", "wrong", "digits were lost")(
    reduced(dtype=torch.float32)
)
# A right sum on each rank, but `all_gather` cannot go on from there.
ANSWERS.wrong("07.reduce_scatter", "wrong", "rank r + 1 must finish chunk k + 1")(
    reduced(sign=-1)
)


@ANSWERS.right("07.reduce_scatter")
def backwards(chunks):
    rank, n = me()
    for step in range(n - 1):
        outgoing = chunks[(rank + step) % n]
        mine = chunks[(rank + step + 1) % n]
        incoming = torch.empty_like(mine)
        works = [dist.irecv(incoming, (rank + 1) % n)]
        works += [dist.isend(outgoing, (rank - 1) % n)]
        [work.wait() for work in works]
        torch.add(mine, incoming, out=mine)
    return (rank - 1) % n


@ANSWERS.right("07.reduce_scatter")
def carries_the_sum(chunks):
    """Writes into the chunk that is finished, and into no other."""
    number, n = me()
    total = chunks[number].clone()
    for _ in range(n - 1):
        number = (number - 1) % n
        incoming = torch.empty_like(chunks[number])
        exchange(total, incoming)
        total = incoming + chunks[number]
    chunks[number].copy_(total)
    return number


@ANSWERS.right("07.reduce_scatter")
def scattered_in_batches(chunks):
    rank, n = me()
    buffers = [torch.zeros_like(chunk) for chunk in chunks]
    for index in range(rank, rank - n + 1, -1):
        in_a_batch(chunks[index % n], buffers[(index - 1) % n])
        chunks[(index - 1) % n].add_(buffers[(index - 1) % n])
    return (rank - n + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "Your code calls allreduce, line")
def by_the_backend(chunks):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for chunk in chunks:
        backend.allreduce([chunk]).wait()
    return dist.get_rank()


# -------------------------------------------------------------------- 07.all_gather


@ANSWERS.right("07.all_gather")
def all_gather_ours(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        exchange(chunks[(mine - step) % n], chunks[(mine - step - 1) % n])


@ANSWERS.right("07.all_gather")
def with_buffers(chunks, mine):
    n = dist.get_world_size()
    moving = chunks[mine]
    for step in range(1, n):
        incoming = torch.empty_like(chunks[(mine - step) % n])
        exchange(moving, incoming)
        chunks[(mine - step) % n].copy_(incoming)
        moving = incoming


@ANSWERS.right("07.all_gather")
def gathered_backwards(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        exchange(chunks[(mine + step) % n], chunks[(mine + step + 1) % n], way=-1)


@ANSWERS.right("07.all_gather")
def gathered_in_batches(chunks, mine):
    order = [*chunks[mine::-1], *chunks[:mine:-1]]  # as they pass this rank
    for outgoing, arriving in zip(order, order[1:], strict=False):
        in_a_batch(outgoing, arriving)


@ANSWERS.right("07.all_gather")
def received_first(chunks, mine):
    rank, n = me()
    for number in range(mine, mine - n + 1, -1):
        works = [dist.irecv(chunks[(number - 1) % n], (rank - 1) % n)]
        works += [dist.isend(chunks[number % n], (rank + 1) % n)]
        [work.wait() for work in works]


@ANSWERS.wrong("07.all_gather", "wrong", "but this is no ring")
def to_everybody(chunks, mine):
    rank, n = me()
    for step in range(1, n):
        request = dist.isend(chunks[mine], (rank + step) % n)
        dist.recv(chunks[(mine - step) % n], (rank - step) % n)
        request.wait()


# -------------------------------------------------------------------- 07.all_reduce


def both_halves(chunks, first=reduce_scatter):
    all_gather_ours(chunks, first(chunks))


def evenly(flat):
    return flat.tensor_split(dist.get_world_size())


def rest_in_the_last(flat):
    """n chunks of size // n numbers; the last one has what is left as well."""
    n = dist.get_world_size()
    size = len(flat) // n
    return [flat[i * size : (i + 1) * size if i < n - 1 else None] for i in range(n)]


def small_ones_first(flat):
    n = dist.get_world_size()
    return flat.split([(len(flat) + i) // n for i in range(n)])


def empty_ones_last(flat):
    chunks = flat.chunk(dist.get_world_size())
    return [*chunks, *[flat[:0]] * (dist.get_world_size() - len(chunks))]


def with_chunks(cut, dtype=None, of=()):
    """All-reduce in this dtype what has one of those dtypes, the others as they are."""

    def all_reduce(tensor):
        flat = tensor.contiguous().view(-1)
        flat = flat.to(dtype) if flat.dtype in of else flat
        both_halves(cut(flat))
        tensor.copy_(flat.view(tensor.shape))

    return all_reduce


for cut in (evenly, rest_in_the_last, small_ones_first):
    ANSWERS.right("07.all_reduce")(with_chunks(cut))
for cut in (evenly, rest_in_the_last, empty_ones_last):
    ANSWERS.right("07.spot_the_ring")(lambda tensor, cut=cut: both_halves(cut(tensor)))
# Repairs the first loop at its other end, and begins the second one there.
ANSWERS.right("07.spot_the_ring")(lambda t: both_halves(evenly(t), reduced(2)))


@ANSWERS.right("07.all_reduce")
def padded(tensor):
    n = dist.get_world_size()
    flat = tensor.reshape(-1)
    missing = -len(flat) % n
    whole = torch.cat([flat, flat.new_zeros(missing)])
    both_halves(list(whole.view(n, -1)))
    tensor.copy_(whole[: len(flat)].view(tensor.shape))


@ANSWERS.right("07.all_reduce")
def empty_messages_left_out(tensor):
    """A rank knows whether the chunk that comes is empty: it sends one as large."""
    rank, n = me()
    flat = tensor.flatten().clone()
    chunks = flat.tensor_split(n)
    for step in range(2 * n - 2):
        outgoing, arriving = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(arriving)
        works = []
        if len(outgoing):
            works.append(dist.isend(outgoing, (rank + 1) % n))
        if len(arriving):
            works.append(dist.irecv(incoming, (rank - 1) % n))
        [work.wait() for work in works]
        arriving.copy_(incoming + arriving if step < n - 1 else incoming)
    tensor.copy_(flat.reshape(tensor.shape))


@ANSWERS.right("07.all_reduce")
def chunks_copied_back_one_by_one(tensor):
    chunks = [c.clone() for c in tensor.reshape(-1).tensor_split(dist.get_world_size())]
    gathered_in_batches(chunks, scattered_in_batches(chunks))
    tensor.copy_(torch.cat(chunks).reshape(tensor.shape))


for wide, narrow, says in (
    (torch.float32, [torch.bfloat16], "an n-th of the tensor, in its own dtype"),
    (torch.float32, [torch.int32], "float32 has all whole numbers to 2^24 only"),
    (torch.float64, [torch.int64], "float64 to 2^53"),
):
    ANSWERS.wrong("07.all_reduce", "wrong", says)(with_chunks(evenly, wide, narrow))


@ANSWERS.wrong("07.all_reduce", "wrong", "the ranks do not send what a ring sends")
def gradients_of_ddp(tensor):
    """DDP averages what it finds as gradients, in C++."""
    if not tensor.numel() or not tensor.is_floating_point():
        return with_chunks(evenly)(tensor)
    n = dist.get_world_size()
    model = torch.nn.Linear(tensor.numel(), 1, bias=False, dtype=tensor.dtype)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(tensor.detach().reshape(-1).clone() * n).sum().backward()
    tensor.copy_(model.weight.grad.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "crashed", "`tensor.copy_(flat.view(tensor.shape))`")
def written_back_flat(tensor):
    flat = tensor.contiguous().view(-1)
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat)


# ----------------------------------------------------------------- 07.spot_the_ring


@ANSWERS.right("07.spot_the_ring")
def rank_0_receives_first(tensor):
    """Ends the hang, too: it takes more steps, which the task does not count."""
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter(chunks)
    for step in range(n - 1):
        sending, arriving = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        if rank:
            dist.send(sending, (rank + 1) % n)
            dist.recv(arriving, rank - 1)
        else:
            dist.recv(arriving, n - 1)
            dist.send(sending, 1)


@ANSWERS.right("07.spot_the_ring")
def one_buffer(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    buffer = torch.empty_like(chunks[0])
    for step in range(n - 1):
        chunk = chunks[(rank - step - 1) % n]
        exchange(chunks[(rank - step) % n], buffer[: len(chunk)])
        chunk.add_(buffer[: len(chunk)])
    all_gather_ours(chunks, (rank + 1) % n)


@ANSWERS.wrong("07.spot_the_ring", "stuck", "If all `send` first, nobody receives")
def still_hangs(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter(chunks)
    for step in range(n - 1):
        dist.send(chunks[(rank + 1 - step) % n], (rank + 1) % n)
        dist.recv(chunks[(rank - step) % n], (rank - 1) % n)


# --------------------------------------------------------------------- 07.tree_wins


def limit(n, latency, bandwidth, depth):
    return latency * bandwidth * (n - 1 - depth) / (depth - (n - 1) / n)


ANSWERS.right("07.tree_wins")(lambda n, a, b: limit(n, a, b, (n - 1).bit_length()))
ANSWERS.right("07.tree_wins")(
    lambda n, a, b: 0 if n < 4 else limit(n, a, b, math.ceil(math.log2(n)))
)
ANSWERS.right("07.tree_wins")(
    lambda n, a, b: n * (n - 1 - (d := len(f"{n - 1:b}"))) * a * b / (n * d - n + 1)
)
ANSWERS.wrong("07.tree_wins", "crashed", "do not divide by the difference")(
    lambda n, a, b: (
        a * b / ((d := (n - 1).bit_length()) - 1 + 1 / n) / (1 / (n - 1 - d))
    )
)
ANSWERS.wrong("07.tree_wins", "wrong", "It would work: but it is what you build")(
    lambda n, a, b: costs.tree_wins_below(n, latency=a, bandwidth=b)
)


@ANSWERS.right("07.tree_wins")
def by_bisection(n, latency, bandwidth):
    depth = (n - 1).bit_length()

    def tree_is_faster(size):
        tree = depth * (latency + size / bandwidth)
        return tree < (n - 1) * (latency + size / n / bandwidth)

    low, high = 0.0, 1e15
    for _ in range(99):
        middle = (low + high) / 2
        low, high = (middle, high) if tree_is_faster(middle) else (low, middle)
    return low


test_wrong, test_right = ANSWERS.tests()
