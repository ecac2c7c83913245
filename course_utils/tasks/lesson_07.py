"""Lesson 07, ring all-reduce: the tasks of its exercise."""

import contextlib
import math
import operator

import torch
import torch.distributed as dist

from course_utils.measure.messages import in_steps
from course_utils.questions.lesson_07 import PREDICT_BYTES
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.messages import ERRORS, INSTEAD, told_by_all, watched
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
    PAIRED: "The result is right, but a message was sent that nobody received. It "
    "would be taken for one of the next call.",
    ONE_WAY: "The result is right, but this is no ring: each rank sends to the next "
    "rank only (or always to the one before).",
    AMOUNT: "The result is right, but the ranks do not send what a ring sends: in each "
    "of a half's n - 1 steps, by isend and recv, one chunk. That is an n-th of the "
    "tensor, in its own dtype.",
    STEPS: "The result is right, but it takes more steps than needed. In each, all "
    "ranks send one whole chunk and receive one, at the same time: isend, recv, wait.",
}
IN_A_RING = {
    **ERRORS,
    "CollectiveMismatch: ": "What one rank sends must fit what the other receives, in "
    "size and dtype: make the buffer like the chunk that *arrives*, not like the one "
    "that is sent. (Chunks may differ in size. Empty ones are sent, too.)",
    "item assignment": "`tensor_split` returns a tuple. Write into its chunks, in "
    "place: `chunks[i].add_(incoming)`, or `chunks[i].copy_(incoming)`.",
    "unbound_buffer": "gloo cannot receive an empty message from just any rank: name "
    "the source, `dist.recv(buffer, src)`.",
    "index out of range": "There are n chunks, 0 to n - 1: count in a circle, `% n`. "
    "And `chunk(n)` may make fewer than n pieces; `tensor_split(n)` always makes n.",
    OUT_OF_STEP: "Ranks wait for each other. If all `send` first, nobody receives; if "
    "all `recv` first, nobody has sent. So: isend to one neighbour, recv from the "
    "*other* one, then wait for the send; and on all ranks the same number of steps.",
}
DIGITS_LOST = (
    "The numbers are large here, and digits were lost: float32 has all whole numbers "
    "to 2^24 only, float64 to 2^53. Leave the dtype as it is, also on the way."
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

BEST = "how far its best chunk is from the sum over all ranks"
THAT = "how far the chunk of that number is from it"
IN_LINE = "the next rank finishes the next chunk"


def observe_reduce_scatter(answer, chunks):
    total, memory = torch.cat(chunks), [chunk.detach() for chunk in chunks]
    dist.all_reduce(total)
    n = len(chunks)
    with watched(answer) as calls:
        returned = answer(chunks)
    number = None
    with contextlib.suppress(TypeError):  # a chunk or a float is no index
        number = operator.index(returned)
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
        Miss(
            "mine += incoming",
            "mine = mine + incoming",
            "Nothing was added to the chunks in place. `mine = mine + incoming`, "
            "`chunks[i] = ...` and `.data = ...` leave what was given as it was; "
            "`mine += incoming` writes into it. (After an irecv, first wait, then "
            "add.)",
        ),
        Miss(
            "mine += incoming",
            "mine.copy_(incoming)",
            "A recv into the chunk itself overwrites this rank's part. Receive into a "
            "buffer, and add that to the chunk.",
        ),
        Miss(
            "chunks[(rank - step) % n]",
            "chunks[rank]",
            "You send the same chunk again. What is sent in a step must be what came "
            "in the step before, with the own part added.",
        ),
        Miss("range(n - 1)", "range(n - 2)", "Does the loop have n - 1 steps?"),
        Miss(
            "rank - step - 1",
            "rank - step + 1",
            "If rank r sends chunk r - k in step k, then chunk r - k - 1 arrives. "
            "(Modulo 2, +1 and -1 are the same: test with three ranks.)",
        ),
    ),
    because={
        "It returned": "Return the number of the chunk that is finished here, 0 to "
        "n - 1 (`% n`), and nothing else: an int, not the chunk itself, no pair.",
        OF_LARGE: DIGITS_LOST,
        BEST: "No chunk on this rank is the sum over all ranks. (The mean is not asked "
        "for.) In each of n - 1 steps k rank r sends chunk r - k, and adds what "
        "arrives to chunk r - k - 1. The ring is closed: rank 0 follows the last.",
        THAT: "Another chunk is finished on this rank, not the one whose number was "
        "returned. What arrives in the last step is the one.",
        IN_LINE: "If rank r finishes chunk k, rank r + 1 must finish chunk k + 1 (mod "
        "n): the all-gather of the next task counts on it.",
        **BECAUSE,
    },
    errors=IN_A_RING,
    hints=(
        "In step 0 each rank sends the chunk with its own number. Which chunk arrives "
        "then, and what has to be done with it before the next step?",
        "n - 1 times: isend chunk (rank - step) % n to the next rank, recv chunk "
        "(rank - step - 1) % n from the one before into a buffer, wait, and add the "
        "buffer to the own chunk of that number. The last chunk that arrives is "
        "finished.",
        "A loop with four calls:\n"
        "  for step in range(n - 1):\n"
        "      mine = chunks[(rank - step - 1) % n]\n"
        "      buffer = torch.empty_like(mine)\n"
        "      request = dist.isend(chunks[...], (rank + 1) % n)\n"
        "      dist.recv(buffer, ...)\n"
        "      request.wait()\n"
        "      mine += ...\n"
        "  return (rank + 1) % n",
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
    stars=2,
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
            "The chunks are as they were. `chunks[i] = incoming` only puts another "
            "tensor into the list, and `.data = ...` other memory behind one. Receive "
            "into the chunk itself, or copy into it: `chunks[i].copy_(incoming)`.",
        ),
        Miss(
            "chunks[(mine - step) % n]",
            "chunks[mine]",
            "The first chunk that arrives is right, a later one is not. In each step "
            "send what has arrived in the step before, not the own chunk again.",
        ),
        Miss("mine - step", "rank + 1 - step", "`mine` need not be rank + 1: use it."),
    ),
    because={OF_LARGE: DIGITS_LOST, **BECAUSE},
    errors=IN_A_RING,
    otherwise="In each of n - 1 steps k send chunk (mine - k) mod n, and receive chunk "
    "(mine - 1 - k) mod n into its place: copy it, don't add. The numbers go down, and "
    "the ring is closed: rank 0 follows the last.",
    hints=(
        "In step 0 each rank sends its finished chunk. Which number does the chunk "
        "have that comes from the rank before?",
        "The rank before has the finished chunk mine - 1. It arrives in step 0, and "
        "goes on to the next rank in step 1, when mine - 2 arrives. Receive straight "
        "into the chunk.",
        "A loop with three calls:\n"
        "  for step in range(n - 1):\n"
        "      request = dist.isend(chunks[(mine - step) % n], ...)\n"
        "      dist.recv(chunks[...], ...)\n"
        "      request.wait()",
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
    "The tensor is as it was: the work was done on a copy. (`clone`, `torch.cat` and "
    "`+` make one, and `contiguous()` of what is not contiguous; `.data = ...` is no "
    "better.) Write into it: `tensor.copy_(...)`."
)
IN_PLACE = (
    "Is all of it written in place? (`chunks[i] = ...` puts another tensor into a "
    "list; `chunks[i].add_(...)` and `chunks[i].copy_(...)` write into the chunk.)"
)
NO_GAPS = (
    "This tensor is not contiguous: `view(-1)` cannot make one row of it, and nobody "
    "can send a column. Work on `tensor.contiguous().view(-1)`, and copy the result "
    "back when both halves are done."
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
            "The last elements are as they were: n chunks of `size // n` elements "
            "leave them out. `tensor_split(n)` makes n chunks of nearly one size.",
        ),
        Miss("shape)", "shape) / len(chunks)", "That is the mean, not the sum."),
    ),
    because={OF_LARGE: DIGITS_LOST, WITH_GAPS: NO_GAPS, **BECAUSE},
    errors={
        "contiguous": NO_GAPS,
        "single memory location": "Is a row, as `flat`, copied into another shape? "
        "Give it that shape first: `tensor.copy_(flat.view(tensor.shape))`.",
        **IN_A_RING,
    },
    otherwise="Print the chunks of a small tensor after each half. Does the second "
    f"begin with the chunk that the first has finished? {IN_PLACE}",
    hints=(
        "You have both halves already. What is left: make chunks of any tensor, and "
        "bring the result back into it. Which tensors cannot be sent as they are?",
        "`tensor.contiguous().view(-1)` is flat and contiguous: the tensor's own "
        "memory if possible, else a copy. Cut it with tensor_split(n), run both "
        "halves on the chunks, then copy_ it into the tensor.",
        "Five lines:\n"
        "  flat = tensor.contiguous().view(-1)\n"
        "  chunks = flat.tensor_split(...)\n"
        "  mine = reduce_scatter(chunks)\n"
        "  all_gather(chunks, ...)\n"
        "  tensor.copy_(flat.view(...))",
    ),
)

# ----------------------------------------------------------------------- spot_the_ring


ON_PAPER = (
    "Write down for 3 ranks and both loops which chunk each one sends in each step, "
    "and to which chunk goes what arrives. "
)

SPOT_RING = Task(
    id="07.spot_the_ring",
    title="Spot the bugs of a ring",
    stars=2,
    cases=(6, 5, 1, 100_003),
    inputs=lambda size, rank, n: (whole_numbers((size,), rank),),
    # In how many steps does not count.
    observe=lambda answer, tensor: {**observe_all_reduce(answer, tensor), STEPS: 0},
    keeps_inputs=False,
    instead="Keep isend and recv, and repair what is around them.",
    misses=(
        Miss(
            "rank - step - 1",
            "rank - step + 1",
            f"{ON_PAPER}Modulo 2, +1 and -1 are the same; modulo 3 they are not.",
        ),
        Miss(
            "chunk += buffer",
            "chunk = chunk + buffer",
            "No chunk is a sum in the end. Is what arrives added in place, `chunk += "
            "buffer`? And to the chunk before the one that is sent, in n - 1 steps?",
        ),
        Miss("rank + 1 - step", "rank + 1", f"{ON_PAPER}Pass on what has arrived."),
        Miss("    chunks =", "    tensor = tensor.clone()\n    chunks =", ON_A_COPY),
    ),
    because=BECAUSE,
    errors=IN_A_RING,
    otherwise=f"{ON_PAPER}{IN_PLACE}",
    hints=(
        "Run it in your head on two ranks: where does each one stand? Then with three "
        "ranks, and then with five numbers on four ranks.",
        "The second loop sends before anybody receives. The first one adds what "
        "arrives to the wrong chunk. And `chunk(n)` may make fewer than n pieces.",
        "What has to change:\n"
        "  chunks = tensor.tensor_split(n)        # sizes may differ by one\n"
        "  chunk = chunks[(rank - step - ...) % n]\n"
        "  dist.recv(buffer[: len(chunk)], left)\n"
        "and in the second loop isend, recv, wait.",
    ),
)

# --------------------------------------------------------------------------- tree_wins

TREE_WINS = Task(
    id="07.tree_wins",
    title="When does a tree win?",
    stars=2,
    where="here",
    cases=(
        (64, 9.6e-6, 5e10),
        (8, 1e-5, 1e10),
        (4, 5e-6, 4.5e11),
        (6, 2e-3, 1e8),
        (1000, 1e-5, 2.5e10),
        (8, 1e-6, 6.5e5),  # 1.2 bytes
        (2, 1e-5, 1e10),  # 2 and 3 ranks come last: many treat them apart
        (3, 1e-3, 1e9),
    ),
    instead="Set the two formulas equal, and solve for S.",
    tolerance=1e-3,
    misses=(
        Miss("math.ceil", "", "The tree's steps are log2(n), rounded up."),
        Miss("math.ceil", "math.floor", "log2(n) is rounded *up*, not down."),
        Miss("math.log2", "math.log", "math.log is the natural logarithm."),
        Miss("depth = ", "depth = 0.5 * ", "A tree has two ways: up and down."),
        Miss("1) / world_size", "1)", "In a ring a message has S/n bytes, not S."),
        Miss("/ more_bytes", "// more_bytes", "The size is right, but rounded."),
    ),
    errors={
        "ZeroDivisionError": "With two or three ranks a tree has as many steps as a "
        "ring, and the result is 0: do not divide by the difference.",
    },
    otherwise="Tree: 2d(α + S/B) with d = ceil(log2 n). Ring: 2(n - 1)(α + S/(nB)). "
    "For which S in bytes are they equal? Only 2 and 3 ranks give 0.",
    hints=(
        "Write down the time of a tree and the time of a ring, each as steps × (α + "
        "bytes of a message / B). Set them equal.",
        "Both sides have 2. d·α + d·S/B = (n - 1)·α + (n - 1)/n · S/B. Collect all "
        "that has S on one side.",
        "Two lines:\n"
        "  d = math.ceil(math.log2(world_size))\n"
        "  return latency * bandwidth * (... - d) / (d - ...)",
    ),
)

TASKS = (PREDICT_BYTES, REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE, SPOT_RING, TREE_WINS)
