"""Lesson 07, ring all-reduce: the tasks of its exercise."""

import math
import operator

import torch
import torch.distributed as dist

from course_utils.measure.messages import in_steps
from course_utils.questions.lesson_07 import PREDICT_BYTES
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.send_recv import ERRORS, INSTEAD, told_by_all, watched
from course_utils.tasks.task import OUT_OF_STEP, AtMost, Miss, Task

# ------------------------------------------------------------- what all rings must do

PAIRED = "each message that was sent was received"
ONE_WAY = "it sends to one neighbour in the ring, always the same"
AMOUNT = "the bytes that are sent are those of a ring"
STEPS = "steps, one after the other"


def traffic(logs, tensor, halves=1):
    """What this rank has sent, by the calls of all ranks; nothing if one is missing."""
    if logs is None:  # the check will name it
        return {}
    n, rank = len(logs), dist.get_rank()
    sends = [[call for call in log if call.kind == "send"] for log in logs]
    amounts = [sum(call.nbytes for call in calls) for calls in sends]
    peers = {call.peer for call in sends[rank]}
    chunk = math.ceil(tensor.numel() / n) * tensor.element_size()
    # Each rank leaves one chunk out in a half: what is least holds for all together.
    is_enough = sum(amounts) >= halves * (n - 1) * tensor.nbytes
    try:
        steps = max((message.step for message in in_steps(logs)), default=0)
    except ValueError:
        return {PAIRED: False}
    return {
        PAIRED: True,
        ONE_WAY: len(peers) <= 1 and peers <= {(rank + 1) % n, (rank - 1) % n},
        AMOUNT: is_enough and amounts[rank] <= halves * (n - 1) * chunk,
        STEPS: AtMost(steps),
    }


BECAUSE = {
    PAIRED: "A message was sent that nobody received. The next call would take it for "
    "one of its own.",
    ONE_WAY: "The result is right, but this is not a ring: each rank sends only to the "
    "next rank, or always to the previous one.",
    AMOUNT: "The result is right, but the ranks do not send what a ring sends: in each "
    "of a half's n - 1 steps one chunk, by isend and recv, in the tensor's own dtype.",
    STEPS: "The result is right, but it takes too many steps. In each, all ranks send "
    "one whole chunk and receive one, at the same time: isend, recv, wait.",
}
IN_A_RING = {
    **ERRORS,
    "CollectiveMismatch: ": "Make the buffer like the chunk that *arrives*: chunks may "
    "differ in size, and empty ones are sent, too.",
    "item assignment": "`tensor_split` returns a tuple. Write into its chunks, in "
    "place: `chunks[i].add_(incoming)`, or `chunks[i].copy_(incoming)`.",
    "index out of range": "There are n chunks, 0 to n - 1: count in a circle, `% n`. "
    "And `chunk(n)` may make fewer than n pieces: take `tensor_split(n)`.",
    OUT_OF_STEP: "Ranks wait for each other. If all `send` first, nobody receives. In "
    "each step isend to one neighbour, recv from the *other* one, then wait. All ranks "
    "make the same number of steps.",
}
DIGITS_LOST = (
    "Digits were lost: float32 has all whole numbers only up to 2^24, and float64 up "
    "to 2^53. Keep the dtype as it is, also in the messages."
)
LARGE = {torch.int32: 30, torch.int64: 60, torch.float64: 40}  # powers of 2
OF_LARGE, WITH_GAPS = ", of large numbers", ", which is not contiguous"


def numbers(shape, dtype, rank, world_size):
    """Large ones nearly cancel in the sum, so what is lost can be seen."""
    tensor = whole_numbers(shape, rank).to(dtype)
    if dtype in LARGE and rank < 2 <= world_size:
        tensor += (1 - 2 * rank) * 2 ** LARGE[dtype]
    return tensor


def in_chunks(size, rank, world_size):
    """Chunks of a tensor of that size, which share its memory; 6 are large."""
    dtype = torch.int32 if size == 6 else torch.float32
    return (list(numbers((size,), dtype, rank, world_size).tensor_split(world_size)),)


def kind(tensor):
    return OF_LARGE * (tensor.dtype in LARGE) + WITH_GAPS * (not tensor.is_contiguous())


# ---------------------------------------------------------------------- reduce_scatter

BEST = "the error of the chunk that is nearest to the sum over all ranks"
THAT = "the largest error of the chunk whose number was returned"
IN_LINE = "the next rank finishes the next chunk"


def observe_reduce_scatter(answer, chunks):
    total, memory = torch.cat(chunks), [chunk.detach() for chunk in chunks]
    dist.all_reduce(total)
    n = len(chunks)
    with watched(answer) as calls:
        returned = answer(chunks)
    try:
        number = operator.index(returned)
    except TypeError:  # a chunk or a float
        number = None
    told = told_by_all((number, list(calls)))
    if number not in range(n) or told is None:
        return returned
    # One figure for a chunk: the learner chooses which one is finished where.
    far = [
        float(abs(chunk.double() - whole).max()) if len(chunk) else 0.0
        for chunk, whole in zip(memory, total.tensor_split(n), strict=True)
    ]
    in_line = all(one == (told[0][0] + rank) % n for rank, (one, _) in enumerate(told))
    seen = {BEST + kind(total): min(far), THAT + kind(total): far[number]}
    return seen | {IN_LINE: in_line} | traffic([calls for _, calls in told], total)


REDUCE_SCATTER = Task(
    id="07.reduce_scatter",
    title="The first half: reduce-scatter",
    stars=2,
    ranks=(3, 1, 2, 5),
    cases=(12, 7, 2, 6),
    inputs=in_chunks,
    observe=observe_reduce_scatter,
    keeps_inputs=False,
    instead=INSTEAD,
    misses=(
        Miss("mine +=", "mine = mine +", "No chunk is a sum. Add in place, with `+=`."),
        Miss(
            "mine +=",
            "mine[:] =",
            "Your part is overwritten. Receive into a buffer, and add that to the "
            "chunk.",
        ),
        Miss(
            "rank - step)", "rank)", "You send the same chunk again, not the last sum."
        ),
        Miss("range(n - 1)", "range(n - 2)", "Does the loop have n - 1 steps?"),
        Miss(
            "rank - step - 1", "rank - step + 1", "In step k, chunk r - k - 1 arrives."
        ),
    ),
    because={
        "It returned": "Return the number of the chunk that is finished here, 0 to "
        "n - 1 (`% n`): an int, not the chunk itself, and not a pair.",
        OF_LARGE: DIGITS_LOST,
        BEST: "No chunk on this rank is the sum over all ranks. On 3 ranks, print "
        "which chunk each rank sends in each step, and what it adds.",
        THAT: "The chunk whose number was returned is not the one that is finished "
        "here: that is the last of the n - 1 chunks to arrive.",
        IN_LINE: "If rank r finishes chunk k, rank r + 1 must finish chunk k + 1 (mod "
        "n): the all-gather of the next task counts on it.",
        **BECAUSE,
    },
    errors=IN_A_RING,
    hints=(
        "In step 0 each rank sends the chunk with its own number. Which chunk arrives?",
        "Rank r sends chunk (r - step) % n. What does rank r - 1 send in that step? "
        "That chunk arrives on rank r, which receives it into a buffer.",
        "The shape of it:\n"
        "  for step in range(n - 1):\n"
        "      request = dist.isend(..., (rank + 1) % n)\n"
        "      dist.recv(..., (rank - 1) % n)      # into a buffer\n"
        "      ...                                 # wait, then add in place\n"
        "  return ...                              # what arrived last",
    ),
)

# -------------------------------------------------------------------------- all_gather


def observe_all_gather(answer, chunks, mine):
    memory = [chunk.detach() for chunk in chunks]
    with watched(answer) as calls:
        answer(chunks, mine)
    seen = {f"the chunks{kind(memory[0])}": [chunk.clone() for chunk in memory]}
    return seen | traffic(told_by_all(list(calls)), torch.cat(memory))


ALL_GATHER = Task(
    id="07.all_gather",
    title="The second half: all-gather",
    stars=1,
    ranks=(3, 1, 2, 5),
    cases=((12, 1), (7, 0), (2, 2), (6, 1)),
    # One chunk counts as finished; the others are of no use.
    inputs=lambda case, rank, n: (*in_chunks(case[0], rank, n), (rank + case[1]) % n),
    observe=observe_all_gather,
    keeps_inputs=False,
    instead=INSTEAD,
    misses=(
        Miss("mine - step", "mine + step", "Count down: step k sends chunk mine - k."),
        Miss(
            "recv(chunks[(mine - step - 1) % n]",
            "recv(chunks[mine - step - 1].clone()",
            "The chunks are as they were. Receive into them, or copy into them.",
        ),
        Miss("(mine - step) %", "mine %", "Send what has arrived, not your own chunk."),
        Miss("mine - step", "rank + 1 - step", "`mine` need not be rank + 1: use it."),
    ),
    because={OF_LARGE: DIGITS_LOST, **BECAUSE},
    errors=IN_A_RING,
    otherwise="In each of n - 1 steps k send chunk (mine - k) mod n, and receive chunk "
    "(mine - 1 - k) mod n into its place: copy it, don't add.",
    hints=(
        "In step 0 each rank sends its finished chunk. Which number arrives?",
        "Chunk mine - 1 arrives in step 0, straight into its place. It goes on in step "
        "1, when mine - 2 arrives.",
        "The shape of it:\n"
        "  for step in range(n - 1):\n"
        "      request = dist.isend(chunks[...], (rank + 1) % n)\n"
        "      ...            # recv into a chunk, wait",
    ),
)

# -------------------------------------------------------------------------- all_reduce


def observe_all_reduce(answer, tensor):
    memory = tensor.detach()  # whatever becomes of `.data`
    with watched(answer) as calls:
        answer(tensor)
    seen = {f"the tensor{kind(memory)}": memory.clone()}
    return seen | traffic(told_by_all(list(calls)), memory, halves=2)


ON_A_COPY = (
    "The tensor is as it was: the work was done on a copy. `clone` makes one, and so "
    "may `contiguous()`. Write the result into the tensor: `tensor.copy_(...)`."
)
NO_GAPS = (
    "This tensor is not contiguous, so `view(-1)` cannot flatten it. Work on "
    "`tensor.contiguous().view(-1)`, and copy the result back."
)

ALL_REDUCE = Task(
    id="07.all_reduce",
    title="A ring for any size",
    stars=3,
    ranks=(3, 1, 2, 5),
    cases=(
        ((5,), torch.float32, torch.detach),
        ((2, 3), torch.int16, torch.detach),
        ((), torch.bfloat16, torch.detach),
        ((0,), torch.float32, torch.detach),
        ((4, 5), torch.int16, torch.t),
        ((9, 3), torch.bfloat16, lambda tensor: tensor[:, 1]),
        ((2, 100_003), torch.float32, lambda tensor: tensor[1]),  # of a larger memory
        *(((6,), dtype, torch.detach) for dtype in LARGE),
    ),
    inputs=lambda case, rank, n: (case[2](numbers(*case[:2], rank, n)),),
    observe=observe_all_reduce,
    keeps_inputs=False,
    instead=INSTEAD,
    misses=(
        Miss("tensor.copy_(flat.view(tensor.shape))", "pass", ON_A_COPY),
        Miss("flat = ", "tensor = tensor.clone()\n    flat = ", ON_A_COPY),
        Miss(
            "all_gather(chunks, mine)", "pass", "One half is done. Gather the chunks."
        ),
        Miss(
            "flat.tensor_split",
            "flat[: len(flat) // 3 * 3].tensor_split",  # of 3 ranks
            "The last elements are as they were. `tensor_split(n)` leaves none out.",
        ),
        Miss("shape)", "shape) / len(chunks)", "That is the mean, not the sum."),
    ),
    because={OF_LARGE: DIGITS_LOST, WITH_GAPS: NO_GAPS, **BECAUSE},
    errors={
        "view size": NO_GAPS,
        "single memory location": "Give the flat result the tensor's shape: "
        "`tensor.copy_(flat.view(tensor.shape))`.",
        **IN_A_RING,
    },
    otherwise="Print the chunks of a small tensor after each half. Does the second "
    "begin with the chunk that the first has finished? Is all written in place?",
    hints=(
        "You have both halves already. Which tensors cannot be sent as they are?",
        "`tensor.contiguous().view(-1)` is the tensor's own memory if possible, and "
        "otherwise a copy. Cut it with tensor_split(n), run both halves, and copy_ it "
        "back.",
        "The shape of it:\n"
        "  flat = ...                         # contiguous, one dimension\n"
        "  chunks = flat.tensor_split(...)\n"
        "  ...                                # both halves\n"
        "  tensor.copy_(flat.view(...))",
    ),
)

# ----------------------------------------------------------------------- spot_the_ring

ON_PAPER = (
    "Write down for 3 ranks which chunk each one sends in each step of both loops, and "
    "to which chunk it is added, or copied."
)

SPOT_RING = Task(
    id="07.spot_the_ring",
    title="Spot the bugs in a ring",
    stars=2,
    cases=(6, 5, 1, 100_003),
    inputs=lambda size, rank, n: (whole_numbers((size,), rank),),
    # In how many steps does not count.
    observe=lambda answer, tensor: {**observe_all_reduce(answer, tensor), STEPS: 0},
    keeps_inputs=False,
    instead="Keep isend and recv, and repair what is around them.",
    misses=(
        Miss("rank - step - 1", "rank - step + 1", ON_PAPER),
        Miss("chunk +=", "chunk = chunk +", "Add in place, to what goes on next."),
        Miss("rank + 1 - step", "rank + 1", f"{ON_PAPER} Pass on what arrives."),
        Miss("    chunks =", "    tensor = tensor.clone()\n    chunks =", ON_A_COPY),
    ),
    because=BECAUSE,
    errors=IN_A_RING,
    otherwise=f"{ON_PAPER} Is all written in place?",
    hints=(
        "Run it in your head on two ranks, on three, and with five numbers on four.",
        "The second loop sends before anybody receives. The first one adds what "
        "arrives to the wrong chunk. And `chunk(n)` may make fewer than n pieces.",
        "The three places:\n"
        "  chunks = ...                           # always n of them\n"
        "  chunk = chunks[(rank - step ...) % n]  # and a buffer of its size\n"
        "  ...                                    # in the second loop: do not block",
    ),
)

# --------------------------------------------------------------------------- tree_wins

TREE_WINS = Task(
    id="07.tree_wins",
    title="When does a tree win?",
    stars=1,
    where="here",
    cases=(
        (64, 9.6e-6, 5e10),
        (6, 2e-3, 1e8),
        (1000, 1e-5, 2.5e10),
        (4, 1e-6, 1.5e6),  # 1.2 bytes
        (2, 1e-5, 1e10),  # 2 and 3 ranks come last: many treat them apart
        (3, 1e-3, 1e9),
    ),
    instead="Set the two formulas equal, and solve for S.",
    tolerance=1e-3,
    misses=(
        Miss("math.ceil", "", "The tree's steps are log2(n), rounded up."),
        Miss("math.ceil", "math.floor", "The tree's steps are log2(n), rounded *up*."),
        Miss("math.log2", "math.log", "math.log is the natural logarithm."),
        Miss("depth = ", "depth = 0.5 * ", "A tree has two ways: up and down."),
        Miss("1) / world_size", "1)", "In a ring a message has S/n bytes, not S."),
        Miss(
            "    return ",
            "    if world_size < 4: return None\n    return ",
            "With 2 or 3 ranks, return 0: there is no size below which a tree wins.",
        ),
        Miss("/ more_bytes", "// more_bytes", "The size is right, but rounded."),
    ),
    errors={"ZeroDivisionError": "With 2 or 3 ranks a tree saves no step: return 0."},
    otherwise="Tree: 2d(α + S/B) with d = ceil(log2 n). Ring: 2(n - 1)(α + S/(nB)). "
    "For which S in bytes are they equal? Only 2 and 3 ranks give 0.",
    hints=(
        "Each time is steps × (α + bytes of a message / B). Set the two equal.",
        "d·α + d·S/B = (n - 1)·α + (n - 1)/n · S/B. Collect S on one side.",
        "The shape of it:\n"
        "  d = ...                        # the depth of the tree\n"
        "  return latency * bandwidth * (latencies saved) / (tensors sent more)",
    ),
)

TASKS = (PREDICT_BYTES, REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE, SPOT_RING, TREE_WINS)
