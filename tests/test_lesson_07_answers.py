"""Lesson 07: different right answers, and wrong ones that no near miss tells of."""

import torch
import torch.distributed as dist

from course_utils.theory import costs
from tests.answers import Answers

ANSWERS = Answers()


def me():
    return dist.get_rank(), dist.get_world_size()


def in_a_batch(outgoing, incoming):
    rank, n = me()
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % n)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % n)
    [work.wait() for work in dist.batch_isend_irecv([send, receive])]


# ---------------------------------------------------------------- 07.reduce_scatter

MINE = "chunks[(rank - step - 1) % n]"
OUT = "chunks[(rank - step) % n]"
RETURN = "return (rank + 1) % n"
IN_FLOAT32 = (
    *("torch.empty_like(mine)", "torch.empty_like(mine, dtype=torch.float32)"),
    *(OUT, f"{OUT}.float()"),
    *("mine += incoming", "mine += incoming.to(mine.dtype)"),
)

# A right sum on each rank, but `all_gather` cannot go on from there.
BACKWARDS = "chunks[(", "chunks[-(", RETURN, "return -(rank + 1) % n"
ONE_FURTHER = (
    *(OUT, MINE, f"mine = {MINE}", "mine = chunks[(rank - step - 2) % n]"),
    *(RETURN, "return torch.tensor(rank)"),
)
OTHER_WAY_ROUND = (
    *(MINE, "chunks[(rank + step + 1) % n]"),
    *(f"{OUT}, (rank + 1)", "chunks[(rank + step) % n], (rank - 1)"),
    *("recv(incoming, (rank - 1)", "recv(incoming, (rank + 1)"),
    *(RETURN, "return (rank - 1) % n"),
)
ANSWERS.edited(
    "07.reduce_scatter",
    right=[ONE_FURTHER, OTHER_WAY_ROUND],
    wrong=[
        ("an int, not the chunk itself", RETURN, "return chunks[(rank + 1) % n]"),
        ("Digits were lost", *IN_FLOAT32),
        ("the last of the n - 1", "range(n - 1)", "range(n)", RETURN, "return rank"),
        ("rank r + 1 must finish chunk k + 1", *BACKWARDS),
    ],
)


@ANSWERS.right("07.reduce_scatter")
def carries_the_sum(chunks):
    """Writes into the chunk that is finished, and into no other."""
    number, n = me()
    total = chunks[number].clone()
    for _ in range(n - 1):
        number = (number - 1) % n
        incoming = torch.empty_like(chunks[number])
        in_a_batch(total, incoming)
        total = incoming + chunks[number]
    chunks[number].copy_(total)
    return number


@ANSWERS.wrong("07.reduce_scatter", "wrong", "the ranks do not send what a ring sends")
def by_the_backend(chunks):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for chunk in chunks:
        backend.allreduce([chunk]).wait()
    return dist.get_rank()


# -------------------------------------------------------------------- 07.all_gather

SEND = "dist.isend(chunks[(mine - step) % n], (rank + 1) % n)"
INTO = "chunks[(mine - step - 1) % n]"
RECV = f"dist.recv({INTO}, (rank - 1) % n)"
WAIT = "request.wait()"

ANSWERS.edited(
    "07.all_gather",
    right=[
        (SEND, "dist.isend(chunks[(mine + step) % n], (rank - 1) % n)")
        + (RECV, "dist.recv(chunks[(mine + step + 1) % n], (rank + 1) % n)"),
        (f"request = {SEND}", f"arriving = {RECV.replace('recv', 'irecv')}")
        + (RECV, f"request = {SEND}")
        + (WAIT, f"{WAIT}\n        arriving.wait()"),
        (RECV, f"incoming = {INTO}.clone()\n        {RECV.replace(INTO, 'incoming')}")
        + (WAIT, f"{WAIT}\n        {INTO}.copy_(incoming)"),
    ],
)


@ANSWERS.wrong("07.all_gather", "wrong", "but this is not a ring")
def to_everybody(chunks, mine):
    rank, n = me()
    for step in range(1, n):
        request = dist.isend(chunks[mine], (rank + step) % n)
        dist.recv(chunks[(mine - step) % n], (rank - step) % n)
        request.wait()


# -------------------------------------------------------------------- 07.all_reduce

FLAT = "flat = tensor.contiguous().view(-1)  # a copy, if it must be"
CUT = "chunks = flat.tensor_split(dist.get_world_size())"
COPY = "tensor.copy_(flat.view(tensor.shape))"
REST_IN_THE_LAST = """n = dist.get_world_size()
    size = len(flat) // n
    ends = [*range(size, n * size, size)] if size else [0] * (n - 1)
    chunks = flat.tensor_split(ends)"""
SMALL_ONES_FIRST = """n = dist.get_world_size()
    chunks = flat.split([(len(flat) + i) // n for i in range(n)])"""
EMPTY_ONES_LAST = """n = dist.get_world_size()
    chunks = flat.chunk(n)
    chunks += (flat[:0],) * (n - len(chunks))"""
PADDED = """n = dist.get_world_size()
    whole = torch.cat([flat, flat.new_zeros(-len(flat) % n)])
    chunks = whole.view(n, -1)"""


def widened(dtype, wide):
    condition = f"if flat.dtype == torch.{dtype}:"
    return FLAT, f"{FLAT}\n    {condition}\n        flat = flat.to(torch.{wide})"


ANSWERS.edited(
    "07.all_reduce",
    right=[
        (CUT, REST_IN_THE_LAST),
        (CUT, SMALL_ONES_FIRST),
        (CUT, PADDED) + (COPY, "tensor.copy_(whole[: len(flat)].view(tensor.shape))"),
        (CUT, f"{CUT}\n    chunks = [chunk.clone() for chunk in chunks]")
        + (COPY, "tensor.copy_(torch.cat(chunks).view(tensor.shape))"),
    ],
    wrong=[
        ("in the tensor's own dtype", *widened("bfloat16", "float32")),
        ("float32 has all whole numbers only up", *widened("int32", "float32")),
        ("float64 up to 2^53", *widened("int64", "float64")),
    ],
    crashed=[
        ("`tensor.copy_(flat.view(tensor.shape))`", COPY, "tensor.copy_(flat)"),
        ("Send a copy that is: `.contiguous()`", "contiguous().view", "reshape"),
    ],
)


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


# ----------------------------------------------------------------- 07.spot_the_ring

SPLIT = "chunks = tensor.tensor_split(n)  # always n of them"
SECOND = "request = dist.isend(chunks[(rank + 1 - step) % n], right)  # does not wait"
THEN = "dist.recv(chunks[(rank - step) % n], left)\n        request.wait()"
ALL_SEND = "dist.send(chunks[(rank + 1 - step) % n], right)"
ALL_RECEIVE = "dist.recv(chunks[(rank - step) % n], left)"
# Ends the hang, too: it takes more steps, which the task does not count.
RANK_0_RECEIVES_FIRST = f"""if rank == 0:
            {ALL_RECEIVE}
        {ALL_SEND}
        if rank > 0:
            {ALL_RECEIVE}"""

SAME_CHUNK = "chunk = chunks[(rank - step - 1)", "chunk = chunks[(rank - step)"
ALL_FIRST = SECOND, ALL_SEND, THEN, ALL_RECEIVE
ANSWERS.edited(
    "07.spot_the_ring",
    right=[
        (SPLIT, EMPTY_ONES_LAST.replace("flat", "tensor")),
        ("buffer = torch.empty_like(chunk)", "buffer = buffers[: len(chunk)]")
        + (SPLIT, f"{SPLIT}\n    buffers = torch.empty_like(chunks[0])"),
        # Repairs the first loop at its other end, and begins the second one there.
        ("rank - step - 1", "rank - step + 1")
        + ("isend(chunks[(rank - step)", "isend(chunks[(rank - step + 2)")
        + ("rank + 1 - step", "rank + 3 - step")
        + (THEN, THEN.replace("rank", "rank + 2")),
        (SECOND, RANK_0_RECEIVES_FIRST, THEN, ""),
    ],
    wrong=[("to what goes on next", *SAME_CHUNK)],
    stuck=[("If all `send` first, nobody receives", *ALL_FIRST)],
)

# --------------------------------------------------------------------- 07.tree_wins

INVERTED = "* steps_saved / more_bytes", "/ more_bytes / (1 / steps_saved)"
ZERO = "if world_size {}:\n        return 0\n    depth = "
ANSWERS.edited(
    "07.tree_wins",
    right=[
        ("math.ceil(math.log2(world_size))", "(world_size - 1).bit_length()"),
        ("depth = ", ZERO.format("< 4")),
    ],
    wrong=[("Only 2 and 3 ranks give 0", "depth = ", ZERO.format("<= 4"))],
    crashed=[("a tree saves no step", *INVERTED)],
)
ANSWERS.wrong("07.tree_wins", "wrong", "It would work: but it is what you build")(
    lambda n, a, b: costs.tree_wins_below(n, latency=a, bandwidth=b)
)


test_wrong, test_right = ANSWERS.tests()
