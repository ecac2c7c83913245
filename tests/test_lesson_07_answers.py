"""What learners may hand in for the tasks of lesson 07, and what they are told."""

import math

import torch
import torch.distributed as dist
from answers import Answers

from course_utils import costs
from course_utils.from_scratch import ring
from course_utils.notebook.check import find_task

ANSWERS = Answers()


def me():
    return dist.get_rank(), dist.get_world_size()


def exchange(outgoing, incoming, way=1):
    """Send to the next rank and receive from the one before; way=-1: backwards."""
    rank, n = me()
    request = dist.isend(outgoing, (rank + way) % n)
    dist.recv(incoming, (rank - way) % n)
    request.wait()


# ----------------------------------------------------------------- 07.predict_bytes

for value, words in (
    ((15, 3_750_000), "That is the reduce-scatter."),
    ((30, 1_875_000), "a float32 has 4 bytes"),
    ((32, 8_000_000), "Each half has n - 1 steps"),
    ((30, 120_000_000), "one chunk, not the whole tensor"),
    ((30, 7), "how many bytes does it have?"),
    ((30, 3_750_000), "These are the bytes of one half"),
    ((30, 8_000_000), "would be 32 chunks"),
    ((30, 7.5), "In bytes, please"),
    ((7_500_000, 30), "First the steps, then the bytes."),
    ((1, 2), "Two halves with n - 1 steps each"),
    (30, "a tuple was expected"),
):
    ANSWERS.wrong("07.predict_bytes", "wrong", words)(value)
ANSWERS.wrong("07.predict_bytes", "not attempted", "Set the answer")(...)
ANSWERS.right("07.predict_bytes")((30, 7_500_000))
ANSWERS.right("07.predict_bytes")(torch.tensor([30, 7_500_000]))

# ---------------------------------------------------------------- 07.reduce_scatter


@ANSWERS.wrong("07.reduce_scatter", "not attempted", "NotImplementedError")
def reduce_scatter_stub(chunks):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("07.reduce_scatter", "stuck", "nobody receives; if all `recv` first")
def send_first(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        dist.send(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "stuck", "if all `recv` first, nobody has sent")
def receive_first(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        dist.recv(incoming, (rank - 1) % n)
        dist.send(chunks[(rank - step) % n], (rank + 1) % n)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "stuck", "recv from the *other* one")
def to_and_from_the_next(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        request = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(incoming, (rank + 1) % n)
        request.wait()
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong(
    "07.reduce_scatter", "crashed", "is_completed() stays False until wait()"
)
def polled(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        work = dist.irecv(incoming, (rank - 1) % n)
        while not work.is_completed():
            pass
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "crashed", "fit what the other receives, in size")
def always_float32(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty(len(mine))
        exchange(chunks[(rank - step) % n], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "crashed", "name the source")
def from_anybody(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        request = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(incoming)
        request.wait()
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "crashed", "leave out a message, an empty one")
def empty_sends_left_out(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        sending = chunks[(rank - step) % n]
        request = dist.isend(sending, (rank + 1) % n) if len(sending) else None
        dist.recv(incoming, (rank - 1) % n)
        if request:
            request.wait()
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "after an irecv, first wait, then add")
def added_before_the_wait(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.zeros_like(mine)
        works = [dist.irecv(incoming, (rank - 1) % n)]
        mine += incoming  # nothing has been sent yet
        works.append(dist.isend(chunks[(rank - step) % n], (rank + 1) % n))
        for work in works:
            work.wait()
    return (rank + 1) % n


def reduced_on_the_way_as(dtype, chunks):
    """Sent as `dtype`, and added up as what the chunks are."""
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty(len(mine), dtype=dtype)
        exchange(chunks[(rank - step) % n].to(dtype), incoming)
        mine += incoming.to(mine.dtype)
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "digits were lost: float32 has all whole")
def by_a_buffer_of_float32(chunks):
    return reduced_on_the_way_as(torch.float32, chunks)


@ANSWERS.wrong("07.reduce_scatter", "wrong", "digits were lost")
def as_floats_and_back(chunks):
    floats = [chunk.float() for chunk in chunks]
    number = as_the_solution_does(floats)
    chunks[number].copy_(floats[number])
    return number


@ANSWERS.wrong("07.reduce_scatter", "wrong", "And in its own dtype")
def by_a_buffer_of_float64(chunks):
    return reduced_on_the_way_as(torch.float64, chunks)


def as_the_solution_does(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "`mine = mine + incoming` makes another")
def added_to_a_new_tensor(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine = mine + incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "of n - 1 steps: does the loop have as")
def one_step_too_few_reduced(chunks):
    rank, n = me()
    for step in range(n - 2):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "went to a chunk of another number")
def added_to_the_one_that_was_sent(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step) % n]
        incoming = torch.empty_like(chunks[(rank - step - 1) % n])
        exchange(mine, incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "then chunk r - k - 1 arrives. A recv")
def another_chunk_sent(chunks):
    """Chunk 0 in step 0 from every rank: of two, only rank 0 sends the right one."""
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[step], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "crashed", "There are n chunks, 0 to n - 1.")
def not_in_a_circle(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[rank - step + 1]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "stuck", "another one has returned already")
def rank_0_makes_no_step(chunks):
    return reduce_scatter_ours(chunks) if dist.get_rank() else 0


@ANSWERS.wrong(
    "07.reduce_scatter", "wrong", "modulo 2, +1 and -1 are the same", did="+1 for −1"
)
def off_by_one(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step + 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong(
    "07.reduce_scatter",
    "wrong",
    "must be what came in the step before",
    did="the same chunk in every step",
)
def the_same_chunk_in_every_step(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[rank], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong(
    "07.reduce_scatter",
    "wrong",
    "recv into the chunk itself",
    did="received straight into the chunk",
)
def received_over_it(chunks):
    rank, n = me()
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n])
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "Another chunk is finished")
def wrong_number(chunks):
    reduce_scatter_ours(chunks)
    return dist.get_rank()


@ANSWERS.wrong("07.reduce_scatter", "wrong", "It returned None.")
def no_number(chunks):
    reduce_scatter_ours(chunks)


@ANSWERS.wrong("07.reduce_scatter", "wrong", "below the loop: one rank alone")
def returns_in_the_loop(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine += incoming
        return (rank + 1) % n


@ANSWERS.wrong(
    "07.reduce_scatter", "wrong", "0, the only chunk That is not the number of a chunk."
)
def number_too_large(chunks):
    reduce_scatter_ours(chunks)
    return dist.get_rank() + 1


@ANSWERS.wrong("07.reduce_scatter", "wrong", "`chunks[1.0]` is a TypeError")
def number_as_a_float(chunks):
    return float(reduce_scatter_ours(chunks))


@ANSWERS.wrong("07.reduce_scatter", "wrong", "do not follow each other around the ring")
def numbered_in_reverse(chunks):
    """A right sum on each rank, but `all_gather` cannot go on from there."""
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(step + 1 - rank) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(step - rank) % n], incoming)
        mine += incoming
    return (n - 1 - rank) % n


@ANSWERS.wrong(
    "07.reduce_scatter", "wrong", "not the chunk itself, and no pair of both"
)
def the_chunk_itself(chunks):
    return chunks[reduce_scatter_ours(chunks)]


@ANSWERS.wrong(
    "07.reduce_scatter", "wrong", "not the chunk itself, and no pair of both"
)
def number_and_chunk(chunks):
    number = reduce_scatter_ours(chunks)
    return number, chunks[number]


@ANSWERS.wrong(
    "07.reduce_scatter", "wrong", "not the chunk itself, and no pair of both"
)
def a_sum_of_numbers(chunks):
    return chunks[reduce_scatter_ours(chunks)].sum() + 1000


@ANSWERS.wrong("07.reduce_scatter", "wrong", "`chunks[i].add_(incoming)` adds in place")
def into_the_list(chunks):
    rank, n = me()
    for step in range(n - 1):
        number = (rank - step - 1) % n
        incoming = torch.empty_like(chunks[number])
        exchange(chunks[(rank - step) % n], incoming)
        chunks[number] = chunks[number] + incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "there are more messages than steps")
def each_chunk_in_two_pieces(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine, sending = chunks[(rank - step - 1) % n], chunks[(rank - step) % n]
        for out, to in zip(sending.tensor_split(2), mine.tensor_split(2), strict=True):
            incoming = torch.empty_like(to)
            exchange(out, incoming)
            to += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "this rank has sent no message")
def through_the_store(chunks):
    import pickle

    store = dist.distributed_c10d._get_default_store()
    rank, n = me()
    key = f"case {len(torch.cat(list(chunks)))}"
    store.set(f"{key} {rank}", pickle.dumps(chunks[:]))
    chunks[rank].zero_()
    for other in range(n):
        chunks[rank] += pickle.loads(store.get(f"{key} {other}"))[rank]
    return rank


ANSWERS.wrong("07.reduce_scatter", "wrong", "reduce_scatter, which is what was handed")(
    dist.reduce_scatter
)


@ANSWERS.wrong("07.reduce_scatter", "wrong", "Your code calls allreduce, line")
def by_the_backend(chunks):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for chunk in chunks:
        backend.allreduce([chunk]).wait()
    return dist.get_rank()


@ANSWERS.wrong("07.reduce_scatter", "wrong", "more steps than needed")
def even_ranks_first(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        sending = chunks[(rank - step) % n]
        if rank % 2 == 0:
            dist.send(sending, (rank + 1) % n)
            dist.recv(incoming, (rank - 1) % n)
        else:
            dist.recv(incoming, (rank - 1) % n)
            dist.send(sending, (rank + 1) % n)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "but this is no ring")
def directly(chunks):
    rank, n = me()
    incoming = torch.empty_like(chunks[rank])
    for step in range(1, n):
        to, source = (rank + step) % n, (rank - step) % n
        request = dist.isend(chunks[to], to)
        dist.recv(incoming, source)
        request.wait()
        chunks[rank] += incoming
    return rank


@ANSWERS.wrong("07.reduce_scatter", "wrong", "isend and irecv return at once.")
def not_waited(chunks, kept=[]):  # noqa: B006
    """What is kept for ever is sent. Else gloo may drop it, and anything may happen."""
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        kept.append(dist.isend(chunks[(rank - step) % n], (rank + 1) % n))
        dist.recv(incoming, (rank - 1) % n)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "It would work: but it is what you build")
def the_courses_own(chunks):
    ring.reduce_scatter_ring(chunks)
    return (dist.get_rank() + 1) % dist.get_world_size()


@ANSWERS.wrong("07.reduce_scatter", "crashed", "A loop of n - 1 steps has none on one")
def n_steps(chunks):
    rank, n = me()
    for step in range(n):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine += incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "another memory behind the tensor")
def another_memory_behind_the_chunks(chunks):
    """The tensors have the sums. What they were parts of has not."""
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine.data = mine + incoming
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "wrong", "another memory behind the tensor")
def chunks_set_to_another_memory(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine = chunks[(rank - step - 1) % n]
        incoming = torch.empty_like(mine)
        exchange(chunks[(rank - step) % n], incoming)
        mine.set_(mine + incoming)
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "crashed", "not like the one that is sent")
def buffer_like_what_is_sent(chunks):
    rank, n = me()
    for step in range(n - 1):
        sending = chunks[(rank - step) % n]
        incoming = torch.empty_like(sending)
        exchange(sending, incoming)
        chunks[(rank - step - 1) % n].add_(incoming)
    return (rank + 1) % n


@ANSWERS.wrong("07.reduce_scatter", "crashed", "The sum is wanted, not the mean.")
def divided_also_where_the_numbers_are_whole(chunks):
    number = reduce_scatter_ours(chunks)
    chunks[number] /= dist.get_world_size()
    return number


@ANSWERS.wrong("07.reduce_scatter", "wrong", "That is the mean over the ranks.")
def divided_as_well(chunks):
    number = reduce_scatter_ours(chunks)
    if chunks[number].is_floating_point():
        chunks[number] /= dist.get_world_size()
    return number


@ANSWERS.wrong("07.reduce_scatter", "wrong", "this rank has received none. A ring is")
def a_chain(chunks):
    rank, n = me()
    for step in range(n - 1):
        mine, sending = chunks[(rank - step - 1) % n], chunks[(rank - step) % n]
        request = dist.isend(sending, rank + 1) if rank < n - 1 else None
        if rank:
            incoming = torch.empty_like(mine)
            dist.recv(incoming, rank - 1)
            mine += incoming
        if request:
            request.wait()
    return (rank + 1) % n


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


# -------------------------------------------------------------------- 07.all_gather


@ANSWERS.wrong("07.all_gather", "wrong", "counted up, and they go down")
def up_from_mine(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        exchange(chunks[(mine + step) % n], chunks[(mine + step + 1) % n])


@ANSWERS.wrong("07.all_gather", "wrong", "counted up, and they go down")
def sends_up_and_receives_one_below(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        exchange(chunks[(mine + step) % n], chunks[(mine + step - 1) % n])


@ANSWERS.wrong("07.all_gather", "not attempted", "NotImplementedError")
def all_gather_stub(chunks, mine):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("07.all_gather", "stuck", "nobody receives; if all `recv` first")
def gather_send_first(chunks, mine):
    rank, n = me()
    for step in range(n - 1):
        dist.send(chunks[(mine - step) % n], (rank + 1) % n)
        dist.recv(chunks[(mine - step - 1) % n], (rank - 1) % n)


@ANSWERS.wrong("07.all_gather", "wrong", "not the own chunk again")
def own_again_and_again(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        incoming = torch.zeros(max(map(len, chunks)), dtype=chunks[0].dtype)
        target = chunks[(mine - step - 1) % n]
        exchange(chunks[mine], incoming[: len(chunks[(mine - 1) % n])])
        target.copy_(incoming[: len(target)])


@ANSWERS.wrong("07.all_gather", "crashed", "fit what the other receives, in size")
def gathered_as_float32(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        target = chunks[(mine - step - 1) % n]
        incoming = torch.empty(len(target))
        exchange(chunks[(mine - step) % n], incoming)
        target.copy_(incoming)


@ANSWERS.wrong(
    "07.all_gather",
    "wrong",
    "`mine` need not be rank + 1",
    did="assumed `mine` = rank + 1",
)
def by_the_rank(chunks, mine):
    rank, n = me()
    for step in range(n - 1):
        exchange(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n])


@ANSWERS.wrong("07.all_gather", "wrong", "Copy it, don't add.")
def added_again(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        target = chunks[(mine - step - 1) % n]
        incoming = torch.empty_like(target)
        exchange(chunks[(mine - step) % n], incoming)
        target += incoming


@ANSWERS.wrong("07.all_gather", "wrong", "The chunks are as they were.")
def into_copies(chunks, mine):
    n = dist.get_world_size()
    copies = [chunk.clone() for chunk in chunks]
    for step in range(n - 1):
        exchange(copies[(mine - step) % n], copies[(mine - step - 1) % n])


@ANSWERS.wrong("07.all_gather", "wrong", "Not into the chunk that was sent")
def back_into_the_one_that_was_sent(chunks, mine):
    """By a buffer: what a recv into it would bring, is chance."""
    n = dist.get_world_size()
    for step in range(n - 1):
        sending = chunks[(mine - step) % n]
        exchange(sending.clone(), torch.empty_like(chunks[(mine - step - 1) % n]))
        chunks[(mine - step) % n].copy_(sending)


@ANSWERS.wrong("07.all_gather", "wrong", "Does the loop have n - 1 steps?")
def one_step_too_few_gathered(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 2):
        exchange(chunks[(mine - step) % n], chunks[(mine - step - 1) % n])


@ANSWERS.wrong("07.all_gather", "wrong", "but this is no ring")
def to_everybody(chunks, mine):
    rank, n = me()
    for step in range(1, n):
        request = dist.isend(chunks[mine], (rank + step) % n)
        dist.recv(chunks[(mine - step) % n], (rank - step) % n)
        request.wait()


@ANSWERS.wrong("07.all_gather", "wrong", "another memory behind the tensor")
def gathered_into_another_memory(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        arriving = chunks[(mine - step - 1) % n]
        incoming = torch.empty_like(arriving)
        exchange(chunks[(mine - step) % n], incoming)
        arriving.data = incoming


@ANSWERS.wrong("07.all_gather", "wrong", "this rank has received none. A ring is")
def gathered_along_a_chain(chunks, mine):
    rank, n = me()
    for step in range(n - 1):
        sending = chunks[(mine - step) % n]
        request = dist.isend(sending, rank + 1) if rank < n - 1 else None
        if rank:
            dist.recv(chunks[(mine - step - 1) % n], rank - 1)
        if request:
            request.wait()


@ANSWERS.wrong("07.all_gather", "wrong", "A call of a function with `yield` runs none")
def gathers_and_yields(chunks, mine):
    all_gather_ours(chunks, mine)
    yield chunks


@ANSWERS.wrong("07.all_gather", "wrong", "Write `def`, not `async def`.")
async def gathers_when_awaited(chunks, mine):
    all_gather_ours(chunks, mine)


@ANSWERS.right("07.all_gather")
def all_gather_ours(chunks, mine):
    n = dist.get_world_size()
    for step in range(n - 1):
        exchange(chunks[(mine - step) % n], chunks[(mine - step - 1) % n])


@ANSWERS.wrong("07.all_gather", "wrong", "`chunks[i].copy_(incoming)` copies")
def gathered_into_the_list(chunks, mine):
    n = dist.get_world_size()
    moving = chunks[mine]
    for step in range(1, n):
        incoming = torch.empty_like(chunks[(mine - step) % n])
        exchange(moving, incoming)
        chunks[(mine - step) % n] = moving = incoming


ANSWERS.wrong("07.all_gather", "wrong", "all_gather, which is what was handed in")(
    dist.all_gather
)


@ANSWERS.wrong("07.all_gather", "wrong", "Your code calls all_reduce_coalesced, line")
def functional_coalesced(chunks, mine):
    from torch.distributed import _functional_collectives as functional

    for number, chunk in enumerate(chunks):
        if number != mine:
            chunk.zero_()
    sums = functional.all_reduce_coalesced(chunks, "sum", dist.group.WORLD)
    for chunk, total in zip(chunks, sums, strict=True):
        chunk.copy_(total)


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


# -------------------------------------------------------------------- 07.all_reduce


@ANSWERS.wrong("07.all_reduce", "not attempted", "NotImplementedError")
def all_reduce_stub(tensor):
    raise NotImplementedError("Write your code here.")


ANSWERS.wrong("07.all_reduce", "wrong", "all_reduce, which is what was handed")(
    dist.all_reduce
)


def both_halves(chunks):
    all_gather_ours(chunks, reduce_scatter_ours(chunks))


@ANSWERS.wrong("07.all_reduce", "crashed", "`tensor_split(n)` always makes n pieces")
def with_chunk(tensor):
    flat = tensor.contiguous().view(-1)
    both_halves(flat.chunk(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "wrong", "`size // n` elements in each chunk")
def rest_left_out(tensor):
    flat, n = tensor.contiguous().view(-1), dist.get_world_size()
    size = len(flat) // n
    both_halves([flat[i * size : (i + 1) * size] for i in range(n)])
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "wrong", "must go back to its own place")
def written_back_in_another_order(tensor):
    flat = tensor.contiguous().view(-1)
    if tensor.dim() == 2:
        flat = tensor.t().flatten()
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong(
    "07.all_reduce", "wrong", "The work was done on a copy", did="worked on a copy"
)
def copy_not_written_back(tensor):
    flat = tensor.contiguous().view(-1)
    both_halves(flat.tensor_split(dist.get_world_size()))


@ANSWERS.wrong("07.all_reduce", "wrong", "This tensor is not contiguous; contiguous")
def written_back_too_early(tensor):
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(dist.get_world_size())
    mine = reduce_scatter_ours(chunks)
    tensor.copy_(flat.view(tensor.shape))
    all_gather_ours(chunks, mine)


@ANSWERS.wrong("07.all_reduce", "crashed", "`tensor.copy_(flat.view(tensor.shape))`")
def written_back_flat(tensor):
    flat = tensor.contiguous().view(-1)
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat)


@ANSWERS.wrong("07.all_reduce", "crashed", "The tensor is not contiguous")
def view_only(tensor):
    both_halves(tensor.view(-1).tensor_split(dist.get_world_size()))


@ANSWERS.wrong("07.all_reduce", "crashed", "`reshape(-1)` of a column is a view")
def reshaped(tensor):
    flat = tensor.reshape(-1)
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "wrong", "The result is right, but too much is sent.")
def without_chunks(tensor):
    n, total = dist.get_world_size(), tensor.clone()
    moving = tensor.contiguous().clone()
    for _ in range(n - 1):
        incoming = torch.empty_like(moving)
        exchange(moving, incoming)
        total += incoming
        moving = incoming
    tensor.copy_(total)


@ANSWERS.wrong("07.all_reduce", "wrong", "That is the mean.")
def averaged(tensor):
    flat = tensor.contiguous().view(-1)
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape) / dist.get_world_size())


@ANSWERS.wrong("07.all_reduce", "wrong", "It would work: but it is what you build")
def functional(tensor):
    from torch.distributed import _functional_collectives as functional

    tensor.copy_(functional.all_reduce(tensor, "sum", dist.group.WORLD))


@ANSWERS.wrong(
    "07.all_reduce", "wrong", "fewer bytes were sent than a ring has to send"
)
def sent_as_float32(tensor):
    flat = tensor.contiguous().view(-1).float()
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "wrong", "float32 has all whole numbers to 2^24 only")
def sent_as_float64(tensor):
    flat = tensor.contiguous().view(-1)
    flat = flat.double() if flat.dtype == torch.int64 else flat
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "wrong", "Is the dtype on the way larger than the")
def all_sent_as_float64(tensor):
    if tensor.dtype == torch.int64:
        return split_and_both_halves(tensor)
    flat = tensor.contiguous().view(-1).double()
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


def sent_as(dtype, of):
    """All-reduce in this dtype what has one of those dtypes, the others as they are."""

    def all_reduce(tensor):
        flat = tensor.contiguous().view(-1)
        flat = flat.to(dtype) if flat.dtype in of else flat
        both_halves(flat.tensor_split(dist.get_world_size()))
        tensor.copy_(flat.view(tensor.shape))

    return all_reduce


ANSWERS.wrong("07.all_reduce", "wrong", "Is the dtype on the way larger than the")(
    sent_as(torch.float32, of=[torch.bfloat16])
)
ANSWERS.wrong("07.all_reduce", "wrong", "Is the dtype on the way larger than the")(
    sent_as(torch.float32, of=[torch.int16, torch.int8, torch.uint8])
)
ANSWERS.wrong("07.all_reduce", "wrong", "float32 has all whole numbers to 2^24 only")(
    sent_as(torch.float32, of=[torch.int32])
)


@ANSWERS.wrong("07.all_reduce", "wrong", "they have too many bytes")
def all_of_the_memory(tensor):
    """Takes what is around a row as well."""
    if not tensor.is_contiguous():
        return split_and_both_halves(tensor)
    flat = tensor.new_empty(0).set_(tensor.untyped_storage())
    both_halves(flat.tensor_split(dist.get_world_size()))


@ANSWERS.wrong("07.all_reduce", "wrong", "Is every chunk reduced, and gathered again?")
def right_on_odd_numbers_of_ranks(tensor):
    rank, n = me()
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(n)
    for step in range(2 * n - 2):
        outgoing = chunks[2 * (rank - step) % n]
        arriving = chunks[2 * (rank - step - 1) % n]
        incoming = torch.empty_like(arriving)
        exchange(outgoing, incoming)
        arriving.copy_(incoming + arriving if step < n - 1 else incoming)
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "wrong", "There were n - 1 messages or fewer")
def only_reduce_scatter(tensor):
    flat = tensor.contiguous().view(-1)
    reduce_scatter_ours(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "wrong", "this rank has sent no message")
def gradients_of_ddp(tensor):
    """DDP averages what it finds as gradients, in C++."""
    if not tensor.numel() or not tensor.is_floating_point():
        return split_and_both_halves(tensor)
    n = dist.get_world_size()
    model = torch.nn.Linear(tensor.numel(), 1, bias=False, dtype=tensor.dtype)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(tensor.detach().reshape(-1).clone() * n).sum().backward()
    tensor.copy_(model.weight.grad.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "crashed", "`tensor_split` returns a tuple")
def into_a_tuple(tensor):
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(dist.get_world_size())
    gathered_into_the_list(chunks, reduce_scatter_ours(chunks))
    tensor.copy_(flat.view(tensor.shape))


@ANSWERS.wrong("07.all_reduce", "wrong", "put another memory behind the tensor")
def another_memory_behind_it(tensor):
    """A column of a matrix would have the sum, and the matrix would not."""
    flat = tensor.flatten().clone()
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.data = flat.view(tensor.shape)


@ANSWERS.wrong("07.all_reduce", "wrong", "`chunks[i] = ...` puts another tensor into a")
def added_into_a_list(tensor):
    flat = tensor.contiguous().view(-1)
    chunks = list(flat.tensor_split(dist.get_world_size()))
    all_gather_ours(chunks, into_the_list(chunks))
    tensor.copy_(flat.view(tensor.shape))


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


# ----------------------------------------------------------------- 07.spot_the_ring


@ANSWERS.wrong("07.spot_the_ring", "not attempted", "Repair the code")
def ring_that_hangs(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = tensor.chunk(n)
    buffer = torch.empty_like(chunks[0])
    for step in range(n - 1):
        request = dist.isend(chunks[(rank - step) % n], right)
        dist.recv(buffer, left)
        request.wait()
        chunks[(rank - step + 1) % n].add_(buffer)
    for step in range(n - 1):
        dist.send(chunks[(rank + 1 - step) % n], right)
        dist.recv(chunks[(rank - step) % n], left)


@ANSWERS.wrong("07.spot_the_ring", "stuck", "isend to the right, recv from the left")
def still_hangs(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        dist.send(chunks[(rank + 1 - step) % n], (rank + 1) % n)
        dist.recv(chunks[(rank - step) % n], (rank - 1) % n)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "Modulo 2, +1 and -1 are the same")
def right_on_two(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        chunk = chunks[(rank - step + 1) % n]
        incoming = torch.empty_like(chunk)
        exchange(chunks[(rank - step) % n], incoming)
        chunk += incoming
    all_gather_ours(chunks, (rank + 1) % n)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "and both loops which chunk each one")
def second_loop_sends_the_same_again(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        exchange(chunks[(rank + 1) % n], chunks[(rank - step) % n])


@ANSWERS.wrong("07.spot_the_ring", "wrong", "`chunk = chunk + buffer` makes another")
def adds_to_a_new_tensor(tensor):
    chunks = tensor.tensor_split(dist.get_world_size())
    all_gather_ours(chunks, added_to_a_new_tensor(chunks))


@ANSWERS.wrong("07.spot_the_ring", "wrong", "Or was the index changed by one in place")
def adds_to_what_was_sent(tensor):
    """The index changed by one, not by two."""
    rank, n = me()
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        incoming = torch.empty_like(chunks[(rank - step - 1) % n])
        exchange(chunks[(rank - step) % n], incoming)
        chunks[(rank - step) % n].add_(incoming)
    all_gather_ours(chunks, (rank + 1) % n)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "or the one in the other loop?")
def other_loop_changed(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        # On two ranks both are one chunk: without a copy it is chance what is sent.
        outgoing = chunks[(rank + 1 - step) % n].clone()
        exchange(outgoing, chunks[(rank - step - 1) % n])


@ANSWERS.wrong("07.spot_the_ring", "wrong", "begins with the chunk that is finished")
def second_loop_begins_with_another_one(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        outgoing = chunks[(rank - step) % n].clone()
        exchange(outgoing, chunks[(rank - step) % n])


@ANSWERS.wrong("07.spot_the_ring", "crashed", "There are n chunks, 0 to n - 1.")
def second_loop_not_in_a_circle(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        exchange(chunks[rank + 1 - step], chunks[(rank - step) % n])


@ANSWERS.wrong("07.spot_the_ring", "stuck", "another one has returned already")
def rank_0_gathers_nothing(tensor):
    chunks = tensor.tensor_split(dist.get_world_size())
    mine = reduce_scatter_ours(chunks)
    if dist.get_rank():
        all_gather_ours(chunks, mine)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "There were n - 1 messages or fewer")
def one_step_too_few_added(tensor):
    chunks = tensor.tensor_split(dist.get_world_size())
    all_gather_ours(chunks, one_step_too_few_reduced(chunks))


@ANSWERS.wrong(
    "07.spot_the_ring",
    "crashed",
    "There are fewer chunks than ranks.",
    did="`chunk(n)`",
)
def still_chunk(tensor):
    both_halves(tensor.chunk(dist.get_world_size()))


@ANSWERS.wrong("07.spot_the_ring", "crashed", "There are fewer chunks than ranks.")
def one_chunk_added(tensor):
    """Enough for 5 numbers on 4 ranks, but not for 1."""
    chunks = tensor.chunk(dist.get_world_size())
    if len(chunks) < dist.get_world_size():
        chunks += (tensor.new_empty(0),)
    both_halves(chunks)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "Is the dtype on the way larger than the")
def in_float64(tensor):
    flat = tensor.double()
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.copy_(flat)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "isend and irecv return at once.")
def never_waited(tensor, kept=[]):  # noqa: B006
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 1):
        kept.append(dist.isend(chunks[(rank + 1 - step) % n], (rank + 1) % n))
        dist.recv(chunks[(rank - step) % n], (rank - 1) % n)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "does each loop have n - 1 steps?")
def one_step_too_few(tensor):
    rank, n = me()
    chunks = tensor.tensor_split(n)
    reduce_scatter_ours(chunks)
    for step in range(n - 2):
        exchange(chunks[(rank + 1 - step) % n], chunks[(rank - step) % n])


@ANSWERS.wrong("07.spot_the_ring", "wrong", "put another memory behind the tensor")
def repaired_in_another_memory(tensor):
    flat = tensor.clone()
    both_halves(flat.tensor_split(dist.get_world_size()))
    tensor.set_(flat)


@ANSWERS.wrong("07.spot_the_ring", "wrong", "`F.pad`, `torch.cat` and `clone()` make")
def padded_and_not_written_back(tensor):
    n = dist.get_world_size()
    flat = torch.nn.functional.pad(tensor, (0, -len(tensor) % n))
    both_halves(flat.chunk(n))


@ANSWERS.wrong("07.spot_the_ring", "wrong", "the others are as they were: nothing was")
def repaired_with_a_list(tensor):
    chunks = list(tensor.tensor_split(dist.get_world_size()))
    all_gather_ours(chunks, into_the_list(chunks))


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


# --------------------------------------------------------------------- 07.tree_wins


@ANSWERS.wrong("07.tree_wins", "not attempted", "NotImplementedError")
def tree_wins_stub(world_size, latency, bandwidth):
    raise NotImplementedError("Write your code here.")


def limit(n, latency, bandwidth, depth):
    return latency * bandwidth * (n - 1 - depth) / (depth - (n - 1) / n)


@ANSWERS.wrong("07.tree_wins", "wrong", "rounded up: 1,000 ranks")
def not_rounded(n, latency, bandwidth):
    return 0 if n <= 3 else limit(n, latency, bandwidth, math.log2(n))


@ANSWERS.wrong(
    "07.tree_wins", "wrong", "rounded *up*, not down", did="floor of the logarithm"
)
def rounded_down(n, latency, bandwidth):
    return 0 if n <= 3 else limit(n, latency, bandwidth, int(math.log2(n)))


@ANSWERS.wrong("07.tree_wins", "wrong", "or (n - 1).bit_length()")
def by_bit_length(n, latency, bandwidth):
    return limit(n, latency, bandwidth, n.bit_length())


@ANSWERS.wrong("07.tree_wins", "wrong", "Only 2 and 3 ranks give 0.")
def nothing_for_4_ranks_either(n, latency, bandwidth):
    return 0 if n <= 4 else limit(n, latency, bandwidth, math.ceil(math.log2(n)))


@ANSWERS.wrong(
    "07.tree_wins", "wrong", "math.log is the natural logarithm", did="`math.log`"
)
def natural_logarithm(n, latency, bandwidth):
    return limit(n, latency, bandwidth, math.ceil(math.log(n)))


@ANSWERS.wrong("07.tree_wins", "wrong", "a message has S/n bytes, not S")
def whole_tensor_in_a_ring(n, latency, bandwidth):
    d = math.ceil(math.log2(n))
    return 0 if n <= 3 else latency * bandwidth * (n - 1 - d) / (d - (n - 1))


@ANSWERS.wrong("07.tree_wins", "wrong", "also if not by much: 7/8 with 8 ranks")
def nearly_all_is_all(n, latency, bandwidth):
    d = math.ceil(math.log2(n))
    return 0 if n <= 3 else latency * bandwidth * (n - 1 - d) / (d - 1)


@ANSWERS.wrong("07.tree_wins", "wrong", "Are those bits?")
def in_bits(n, latency, bandwidth):
    return 8 * solved(n, latency, bandwidth)


@ANSWERS.wrong("07.tree_wins", "wrong", "Are those numbers of float32?")
def in_numbers(n, latency, bandwidth):
    return solved(n, latency, bandwidth) / 4


@ANSWERS.wrong("07.tree_wins", "wrong", "Or is n - 1 - d missing, the steps that a")
def without_the_steps(n, latency, bandwidth):
    return latency * bandwidth / (math.ceil(math.log2(n)) - (n - 1) / n)


@ANSWERS.wrong("07.tree_wins", "wrong", "A tree has two ways, up and down")
def tree_one_way(n, latency, bandwidth):
    d, s = math.ceil(math.log2(n)), 2 * (n - 1)
    return latency * bandwidth * (s - d) / (d - s / n)


@ANSWERS.wrong("07.tree_wins", "wrong", "The size is right, but rounded.")
def rounded(n, latency, bandwidth):
    return round(solved(n, latency, bandwidth))


@ANSWERS.wrong("07.tree_wins", "wrong", "The size is right, but rounded.")
def without_its_digits(n, latency, bandwidth):
    return int(solved(n, latency, bandwidth))


@ANSWERS.wrong("07.tree_wins", "wrong", "Those are seconds.")
def in_seconds(n, latency, bandwidth):
    return limit(n, latency, 1.0, math.ceil(math.log2(n)))


@ANSWERS.wrong("07.tree_wins", "crashed", "With two or three ranks")
def divided_by_the_steps(n, latency, bandwidth):
    d = math.ceil(math.log2(n))
    return latency * bandwidth / ((d - (n - 1) / n) / (n - 1 - d))


@ANSWERS.wrong("07.tree_wins", "wrong", "It would work: but it is what you build")
def looked_up(n, latency, bandwidth):
    return costs.tree_wins_below(n, latency=latency, bandwidth=bandwidth)


@ANSWERS.right("07.tree_wins")
def solved(world_size, latency, bandwidth):
    return limit(world_size, latency, bandwidth, math.ceil(math.log2(world_size)))


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


test_wrong, test_right = ANSWERS.tests()


def test_each_task_has_wrong_and_right_answers():
    wrong, right = ANSWERS.counts()
    for task_id in wrong:
        find_task(task_id)
        assert wrong[task_id] >= 4  # three, besides the stub
        assert right[task_id] >= 2
    assert len(wrong) == 6
