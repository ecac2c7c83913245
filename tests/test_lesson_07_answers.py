"""Lesson 07: different right answers, and wrong ones that no near miss tells of."""

import pickle

import torch
import torch.distributed as dist
from answers import Answers

from course_utils import costs
from course_utils.from_scratch import ring

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
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


# ----------------------------------------------------------------- 07.predict_bytes

for number, says in (
    (3_750_000, "That is the reduce-scatter."),
    (1_875_000, "A float32 has 4 bytes."),
    (7, "one n-th of the tensor"),
):
    ANSWERS.wrong("07.predict_bytes", "wrong", says)(number)
for number in (7_500_000, 30 * 4_000_000 / 16, "7,500,000", torch.tensor(7_500_000)):
    ANSWERS.right("07.predict_bytes")(number)

# ---------------------------------------------------------------- 07.reduce_scatter


@ANSWERS.right("07.reduce_scatter")
def reduce_scatter_ours(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.right("07.reduce_scatter")
def ends_with_its_own(chunks):
    """Begins one chunk further back, so that rank r finishes chunk r."""
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % n], incoming)
        mine.add_(incoming)
    return torch.tensor(rank)


@ANSWERS.right("07.reduce_scatter")
def backwards(chunks):
    rank, n = me()
    for step in range(n - 1):
        outgoing = chunks[(rank + step) % n]
        mine = chunks[(rank + step + 1) % n]
        incoming = torch.empty_like(mine)
        works = [
            dist.irecv(incoming, (rank + 1) % n),
            dist.isend(outgoing, (rank - 1) % n),
        ]
        for work in works:
            work.wait()
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


@ANSWERS.wrong("07.reduce_scatter", "wrong", "digits were lost")
def by_a_buffer_of_float32(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty(len(mine))
        exchange(chunks[(rank - step) % n].float(), incoming)
        mine += incoming.to(mine.dtype)
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "rank r + 1 must finish chunk k + 1")
def numbered_in_reverse(chunks):
    """A right sum on each rank, but `all_gather` cannot go on from there."""
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(step + 1 - rank) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(step - rank) % n], incoming)
        mine += incoming
    return (n - 1 - rank) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "an int, not the chunk itself, no pair")
def number_and_chunk(chunks):
    number = reduce_scatter_ours(chunks)
    return number, chunks[number]


@ANSWERS.wrong("07.reduce_scatter", "wrong", "Another chunk is finished on this rank")
def number_of_another_chunk(chunks):
    reduce_scatter_ours(chunks)
    return dist.get_rank()


@ANSWERS.wrong("07.reduce_scatter", "wrong", "by isend and recv, one chunk in each")
def through_the_store(chunks):
    store = dist.distributed_c10d._get_default_store()
    rank, n = me()
    key = f"case {len(torch.cat(list(chunks)))}"
    store.set(f"{key} {rank}", pickle.dumps(chunks[:]))
    chunks[rank].zero_()
    for other in range(n):
        chunks[rank] += pickle.loads(store.get(f"{key} {other}"))[rank]
    return rank


@ANSWERS.wrong("07.reduce_scatter", "wrong", "Your code calls allreduce, line")
def by_the_backend(chunks):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for chunk in chunks:
        backend.allreduce([chunk]).wait()
    return dist.get_rank()


@ANSWERS.wrong("07.reduce_scatter", "wrong", "It would work: but it is what you build")
def the_courses_own(chunks):
    ring.reduce_scatter_ring(chunks)
    return (dist.get_rank() + 1) % dist.get_world_size()


@ANSWERS.wrong("07.reduce_scatter", "wrong", "it takes more steps than needed")
def even_ranks_first(chunks):
    rank, n = me()
    for step in range(n - 1):
        sending, mine = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        if rank % 2 == 0:
            dist.send(sending, (rank + 1) % n)
            dist.recv(incoming, (rank - 1) % n)
        else:
            dist.recv(incoming, (rank - 1) % n)
            dist.send(sending, (rank + 1) % n)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "crashed", "like the chunk that *arrives*")
def buffer_like_what_is_sent(chunks):
    rank, n = me()
    for step in range(n - 1):
        sending = chunks[(rank - step) % n]
        incoming = torch.empty_like(sending)
        exchange(sending, incoming)
        chunks[(rank - step - 1) % n].add_(incoming)
    return (rank + 1) % n


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
def passed_on_by_recursion(chunks, mine):
    def pass_on(number, steps):
        if steps:
            exchange(chunks[number], chunks[number - 1])
            pass_on((number - 1) % len(chunks), steps - 1)

    pass_on(mine, len(chunks) - 1)


@ANSWERS.wrong("07.all_gather", "wrong", "The numbers go down")
def up_from_mine(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        exchange(chunks[(mine + step) % n], chunks[(mine + step + 1) % n])


@ANSWERS.wrong("07.all_gather", "wrong", "but this is no ring")
def to_everybody(chunks, mine):
    rank, n = me()
    for step in range(1, n):
        request = dist.isend(chunks[mine], (rank + step) % n)
        dist.recv(chunks[(mine - step) % n], (rank - step) % n)
        request.wait()


ANSWERS.wrong("07.all_gather", "wrong", "all_gather, which is what was handed in")(
    dist.all_gather
)

# -------------------------------------------------------------------- 07.all_reduce


def both_halves(chunks):
    all_gather_ours(chunks, reduce_scatter_ours(chunks))


@ANSWERS.right("07.all_reduce")
def split_and_both_halves(tensor):
    flat = tensor.contiguous().view(-1)
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


def rest_in_the_last(flat):
    """n chunks of size // n numbers; the last one has what is left as well."""
    n = dist.get_world_size()
    size = len(flat) // n
    return [flat[i * size : (i + 1) * size if i < n - 1 else None] for i in range(n)]


@ANSWERS.right("07.all_reduce")
def last_chunk_has_the_rest(tensor):
    flat = tensor.contiguous().view(-1)
    both_halves(rest_in_the_last(flat))
    tensor.copy_(flat.view(tensor.shape))


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
        for work in works:
            work.wait()
        if step < n - 1:
            arriving += incoming
        else:
            arriving.copy_(incoming)
    tensor.copy_(flat.reshape(tensor.shape))


@ANSWERS.right("07.all_reduce")
def small_chunks_first(tensor):
    n = dist.get_world_size()
    flat = tensor.flatten().clone()
    chunks = flat.split([(len(flat) + i) // n for i in range(n)])
    gathered_backwards(chunks, backwards(chunks))
    tensor[...] = flat.reshape(tensor.shape)


@ANSWERS.right("07.all_reduce")
def chunks_copied_back_one_by_one(tensor):
    chunks = [c.clone() for c in tensor.reshape(-1).tensor_split(dist.get_world_size())]
    gathered_in_batches(chunks, scattered_in_batches(chunks))
    tensor.copy_(torch.cat(chunks).reshape(tensor.shape))


def sent_as(dtype, of):
    """All-reduce in this dtype what has one of those dtypes, the others as they are."""

    def all_reduce(tensor):
        flat = tensor.contiguous().view(-1)
        flat = flat.to(dtype) if flat.dtype in of else flat
        both_halves(flat.tensor_split(dist.get_world_size()))
        tensor.copy_(flat.view(tensor.shape))

    return all_reduce


for wide, narrow, says in (
    (torch.float32, [torch.bfloat16], "an n-th of the tensor, in its own dtype"),
    (torch.float32, [torch.int32], "float32 has all whole numbers to 2^24 only"),
    (torch.float64, [torch.int64], "float64 to 2^53"),
):
    ANSWERS.wrong("07.all_reduce", "wrong", says)(sent_as(wide, of=narrow))


@ANSWERS.wrong("07.all_reduce", "wrong", "the ranks do not send what a ring sends")
def gradients_of_ddp(tensor):
    """DDP averages what it finds as gradients, in C++."""
    if not tensor.numel() or not tensor.is_floating_point():
        return split_and_both_halves(tensor)
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


@ANSWERS.wrong("07.all_reduce", "crashed", "`tensor_split(n)` always makes n")
def with_chunk(tensor):
    flat = tensor.contiguous().view(-1)
    both_halves(flat.chunk(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


# ----------------------------------------------------------------- 07.spot_the_ring


@ANSWERS.right("07.spot_the_ring")
def rank_0_receives_first(tensor):
    """Ends the hang, too: it takes more steps, which the task does not count."""
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        sending, arriving = chunks[(rank + 1 - step) % n], chunks[(rank - step) % n]
        if rank:
            dist.send(sending, (rank + 1) % n)
            dist.recv(arriving, (rank - 1) % n)
        elif n > 1:
            dist.recv(arriving, n - 1)
            dist.send(sending, 1)


@ANSWERS.right("07.spot_the_ring")
def all_three_repaired(tensor):
    both_halves(tensor.tensor_split(dist.get_world_size()))


@ANSWERS.right("07.spot_the_ring")
def repaired_with_the_rest_in_the_last_chunk(tensor):
    both_halves(rest_in_the_last(tensor))


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


@ANSWERS.right("07.spot_the_ring")
def chunk_with_empty_ones_added(tensor):
    n = dist.get_world_size()
    chunks = tensor.chunk(n)
    both_halves([*chunks, *[tensor[:0]] * (n - len(chunks))])


@ANSWERS.right("07.spot_the_ring")
def what_is_sent_was_changed(tensor):
    """Repairs the first loop at the other end, and begins the second one there."""
    rank, n = me()
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        chunk = chunks[(rank - step + 1) % n]
        buffer = torch.empty_like(chunk)
        exchange(chunks[(rank - step + 2) % n], buffer)
        chunk.add_(buffer)
    all_gather_ours(chunks, (rank + 3) % n)


@ANSWERS.wrong("07.spot_the_ring", "stuck", "If all `send` first, nobody receives")
def still_hangs(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        dist.send(chunks[(rank + 1 - step) % n], (rank + 1) % n)
        dist.recv(chunks[(rank - step) % n], (rank - 1) % n)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "not every request was waited for")
def never_waited(tensor, kept=[]):  # noqa: B006
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        kept.append(dist.isend(chunks[(rank + 1 - step) % n], (rank + 1) % n))
        dist.recv(chunks[(rank - step) % n], (rank - 1) % n)


# --------------------------------------------------------------------- 07.tree_wins


def limit(n, latency, bandwidth, depth):
    return latency * bandwidth * (n - 1 - depth) / (depth - (n - 1) / n)


@ANSWERS.right("07.tree_wins")
def solved(world_size, latency, bandwidth):
    return limit(world_size, latency, bandwidth, (world_size - 1).bit_length())


@ANSWERS.right("07.tree_wins")
def by_bisection(n, latency, bandwidth):
    depth = (n - 1).bit_length()

    def tree_is_faster(size):
        tree = depth * (latency + size / bandwidth)
        return tree < (n - 1) * (latency + size / n / bandwidth)

    low, high = 0.0, 1.0
    if not tree_is_faster(low):
        return 0
    while tree_is_faster(high):
        high *= 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tree_is_faster(middle) else (low, middle)
    return low


@ANSWERS.right("07.tree_wins")
def where_two_lines_meet(n, latency, bandwidth):
    depth = (n - 1).bit_length()

    def loss(size):
        """What the tree takes longer than the ring."""
        tree = 2 * depth * (latency + size / bandwidth)
        return tree - 2 * (n - 1) * (latency + size / (n * bandwidth))

    size = latency * bandwidth
    return -loss(0) * size / (loss(size) - loss(0))


@ANSWERS.right("07.tree_wins")
def without_a_fraction_in_it(n, latency, bandwidth):
    depth = next(d for d in range(99) if 2**d >= n)
    if n < 4:
        return 0
    return n * (n - 1 - depth) * latency * bandwidth / (n * depth - n + 1)


@ANSWERS.wrong("07.tree_wins", "crashed", "do not divide by the difference")
def divided_by_the_steps(n, latency, bandwidth):
    d = (n - 1).bit_length()
    return latency * bandwidth / ((d - (n - 1) / n) / (n - 1 - d))


@ANSWERS.wrong("07.tree_wins", "wrong", "It would work: but it is what you build")
def looked_up(n, latency, bandwidth):
    return costs.tree_wins_below(n, latency=latency, bandwidth=bandwidth)


test_wrong, test_right = ANSWERS.tests()
