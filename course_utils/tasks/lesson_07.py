"""Lesson 07, ring all-reduce: the tasks of its exercise."""

import math
import operator

import torch
import torch.distributed as dist

from course_utils.messages import in_steps
from course_utils.questions import NumberTask, Slip
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.messages import ERRORS, INSTEAD, told_by_all, watched
from course_utils.tasks.task import OUT_OF_STEP, AtMost, Miss, Task

PREDICT_BYTES = NumberTask(
    "07.predict_bytes",
    "16 ranks all-reduce a tensor of 1,000,000 numbers in float32 in a ring, cut into "
    "16 chunks. How many bytes does *each rank* send in all?",
    answer=7_500_000,
    unit="bytes",
    title="Predict the bytes",
    stars=1,
    why="There are 2 × 15 = 30 steps, and in each of them a rank sends one chunk of "
    "4,000,000 / 16 = 250,000 bytes.",
    hint="There are two halves with n - 1 steps each, and in each step a rank sends "
    "one chunk, which is one n-th of the tensor.",
    slips=[
        Slip(
            3_750_000,
            "That is the reduce-scatter. The all-gather sends as much again.",
        ),
        Slip(1_875_000, "Those are the numbers that it sends. A float32 has 4 bytes."),
        Slip(
            8_000_000,
            "That would be 32 chunks. Each half has n - 1 steps: a rank's own chunk "
            "need not travel to itself.",
        ),
        Slip(4_000_000, "That is the whole tensor. A rank sends chunks of it."),
        Slip(
            120_000_000,
            "Did you send the whole tensor in each step? It is one chunk. Or are those "
            "the bytes of all ranks together?",
        ),
        Slip(250_000, "Those are the bytes of one step. How many steps are there?"),
        Slip(30, "Those are the steps. How many bytes does a rank send in each?"),
        Slip(7.5, "In bytes, please: not in MB."),
        Slip(7500, "In bytes, please: not in kB."),
    ],
    hints=(
        "Two halves. How many steps does each have on 16 ranks?",
        "A rank sends one chunk in each step. How many bytes are all chunks together, "
        "and how many is one?",
        "For 4 ranks and 1,200 bytes it goes like this:\n"
        "  steps    2 * 3            = 6\n"
        "  chunk    1200 / 4         = 300 bytes\n"
        "  answer   6 * 300          = 1800 bytes",
    ),
)

# ------------------------------------------------------------- what all rings must do

PAIRED = "each message that was sent was received"
ONE_WAY = "it sends to one neighbour in the ring, always the same"
BYTES = "bytes sent by all ranks together"
ENOUGH = "all ranks send what a ring has to send, or more"
NOT_TOO_MUCH = "it sends at most 2(n - 1) chunks"
MESSAGES = "messages that it sent"
STEPS = "steps, one after the other"


def traffic(logs, rank, tensor=None):
    """What a rank has sent, by the calls of all ranks; nothing if one is missing.

    Args:
        tensor: what was all-reduced. A half has to send the same bytes, however it is
            cut; of both halves it depends on that how many they are.
    """
    if logs is None:  # the check will name it
        return {}
    n, (*sent,) = len(logs), map(sent_by, logs)
    of_all = sum(call.nbytes for calls in sent for call in calls)
    amounts = {BYTES: of_all}
    if tensor is not None:
        chunk = math.ceil(tensor.numel() / n) * tensor.element_size()
        own = sum(call.nbytes for call in sent[rank])
        amounts = {ENOUGH: of_all >= 2 * (n - 1) * tensor.nbytes}
        amounts |= {NOT_TOO_MUCH: own <= 2 * (n - 1) * chunk}
    peers = {call.peer for call in sent[rank]}
    try:
        steps = max((message.step for message in in_steps(logs)), default=0)
    except ValueError:
        steps = None
    return {
        PAIRED: steps is not None,
        ONE_WAY: len(peers) <= 1 and peers <= {(rank + 1) % n, (rank - 1) % n},
        **amounts,
        MESSAGES: AtMost(len(sent[rank])),  # empty ones may be left out
        STEPS: AtMost(steps or 0),
    }


def sent_by(log):
    return [call for call in log if call.kind == "send"]


TOO_LITTLE = (
    "The result is right, but fewer bytes were sent than a ring has to send. Build it "
    "from isend and recv, and send the numbers in their own dtype."
)
TOO_MUCH = (
    "The result is right, but too much is sent. In each step a rank sends one chunk, "
    "an n-th of the tensor, in its own dtype: float64 has twice the bytes of float32."
)
BECAUSE = {
    PAIRED: "The result is right, but a message was sent that nobody received. It "
    "would be taken for one of the next call.",
    ONE_WAY: "The result is right, but this is no ring: each rank sends to the next "
    "rank only (or always to the one before).",
    ENOUGH: TOO_LITTLE,
    NOT_TOO_MUCH: TOO_MUCH,
    BYTES: "The result is right, but the ranks do not send what a ring sends: one "
    "chunk in each of n - 1 steps, by isend and recv, in the tensor's own dtype.",
    MESSAGES: "The result is right, but there are more messages than steps. Smaller "
    "pieces may be faster. Here a chunk goes in one message, one in each step.",
    STEPS: "The result is right, but it takes more steps than needed: one message "
    "follows another where both could be on their way. In each step all ranks send "
    "and receive at the same time: isend, recv, wait.",
}
IN_A_RING = {
    **ERRORS,
    "CollectiveMismatch: ": "What one rank sends must fit what the other receives, in "
    "size and dtype. Chunks may differ in size: make the buffer like the chunk that "
    "*arrives*, not like the one that is sent. Or does one rank leave out a message, "
    "an empty one for example, that the other one expects?",
    "does not support item assignment": "`tensor_split` returns a tuple, which has no "
    "`chunks[i] = ...`. Write into the chunks, in place: `chunks[i] += incoming`, or "
    "`chunks[i].copy_(incoming)`.",
    "unbound_buffer": "gloo cannot receive an empty message from just any rank: name "
    "the source, `dist.recv(buffer, src)`.",
    "index out of range": "There are n chunks, 0 to n - 1: count in a circle, `% n`. "
    "And `chunk(n)` may make fewer than n pieces; `tensor_split(n)` always makes n.",
    "can't be cast": "These numbers are whole, and a tensor of whole numbers cannot "
    "hold a fraction. Was it divided in place? The sum is wanted, not the mean. Or was "
    "a tensor of another dtype added to it?",
    OUT_OF_STEP: "Ranks wait for each other. If all `send` first, nobody receives; if "
    "all `recv` first, nobody has sent. So: isend to one neighbour, recv from the "
    "*other* one, then wait for the send. Every rank must make the same steps, also "
    "where a chunk is empty.",
}
DIGITS_LOST = (
    "The numbers are large here, and digits were lost: float32 has all whole numbers "
    "to 2^24 only, float64 to 2^53. Leave the dtype as it is, also on the way."
)
LARGE = {torch.int32: 30, torch.int64: 60, torch.float64: 40}  # powers of 2


def numbers(shape, dtype, is_large, rank, world_size):
    """Large ones nearly cancel in the sum, so what is lost can be seen."""
    tensor = whole_numbers(shape, rank).to(dtype)
    if is_large and rank < 2 <= world_size:
        tensor += (1 - 2 * rank) * 2 ** LARGE[dtype]
    return tensor


def views_of(tensors):
    """The same memory in other tensors: they keep it, whatever becomes of `.data`."""
    return [tensor.detach() for tensor in tensors]


# ---------------------------------------------------------------------- reduce_scatter

IN_RANGE = "it is the number of a chunk"
BEST = "how far its best chunk is from the sum over all ranks"
THAT = "how far the chunk of that number is from it"
IN_LINE = "the next rank finishes the next chunk"
OF_LARGE = "of large whole numbers"


def in_chunks(size, rank, world_size):
    """Chunks of a tensor of that size, which share its memory; 6 are large."""
    dtype = torch.int32 if size == 6 else torch.float32
    tensor = numbers((size,), dtype, size == 6, rank, world_size)
    return list(tensor.tensor_split(world_size))


def observe_reduce_scatter(answer, chunks):
    total, memory = torch.cat(chunks), views_of(chunks)
    dist.all_reduce(total)
    n = len(chunks)
    with watched(answer) as calls:
        returned = answer(chunks)
    number = as_index(returned)
    told = told_by_all((number, list(calls)))
    if number is None:
        return returned
    if number not in range(n):
        return {IN_RANGE: False}
    # One number for each chunk: which chunk is finished where is the learner's choice.
    far = [
        (chunk.double() - whole).abs().max().item() if len(chunk) else 0.0
        for chunk, whole in zip(memory, total.tensor_split(n), strict=True)
    ]
    kind = "" if total.is_floating_point() else f", {OF_LARGE}"
    seen = {IN_RANGE: True, BEST + kind: min(far), THAT + kind: far[number]}
    if told is None:
        return seen
    all_numbers = [one for one, _ in told]
    in_line = all_numbers == [(all_numbers[0] + rank) % n for rank in range(n)]
    return (
        seen | {IN_LINE: in_line} | traffic([log for _, log in told], dist.get_rank())
    )


def as_index(value):
    """As a whole number, if a list can be asked for it; or None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # as `chunks[1.0]` is
        return None


MIX_UP = (
    "What arrives went to a chunk of another number. If rank r sends chunk r - k in "
    "step k, then chunk r - k - 1 arrives. (Modulo 2, +1 and -1 are the same: test "
    "with three ranks.)"
)

REDUCE_SCATTER = Task(
    id="07.reduce_scatter",
    title="The first half: reduce-scatter",
    stars=2,
    ranks=(3, 1, 2, 5),
    cases=(30, 7, 2, 6),
    inputs=lambda size, rank, world_size: (in_chunks(size, rank, world_size),),
    observe=observe_reduce_scatter,
    keeps_inputs=False,
    instead=INSTEAD,
    misses=(
        Miss(
            "mine += incoming",
            "mine = mine + incoming",
            "Nothing was added to the chunks in place. `mine = mine + incoming` makes "
            "another tensor, `chunks[i] = ...` puts another one into the list, and "
            "`.data = ...` puts other memory behind it: what was given stays as it "
            "was. `mine += incoming` writes into it. (After an irecv, first wait, then "
            "add.)",
        ),
        Miss(
            "range(n - 1)",
            "range(n - 2)",
            "A finished chunk has met every rank, and that takes n - 1 steps. Does the "
            "loop have as many?",
        ),
        Miss(
            "mine += incoming",
            "mine.copy_(incoming)",
            "A recv into the chunk itself overwrites this rank's part. Receive into a "
            "buffer of that size, and add it to the chunk.",
        ),
        Miss(
            "chunks[(rank - step) % n]",
            "chunks[rank]",
            "What is sent in a step must be what came in the step before, with the own "
            "part added: rank r sends chunk r - k in step k. You send the same chunk "
            "again.",
        ),
        Miss("rank - step - 1", "rank - step + 1", MIX_UP),
        Miss("rank - step - 1", "rank - step", MIX_UP),
        Miss(
            "return",
            "mine /= n\n    return",
            "That is the mean over the ranks. This reduce-scatter adds up, and does "
            "not divide.",
        ),
    ),
    because={
        "It returned": "Return the number of the chunk that is finished here, and "
        "nothing else: a whole number of type int, not the chunk itself, and no pair "
        "of both.",
        IN_RANGE: "That is not the number of a chunk. Count in a circle: `% n` makes a "
        "number from 0 to n - 1, also of a negative one.",
        OF_LARGE: DIGITS_LOST,
        BEST: "No chunk on this rank has the parts of all ranks, once each. Rank r "
        "sends chunk r - k in step k, and adds what arrives to its own chunk "
        "r - k - 1. And the ring is closed: rank 0 follows the last rank.",
        THAT: "Another chunk is finished on this rank, not the one whose number was "
        "returned. What arrives in the last step is the one.",
        IN_LINE: "Each rank must finish another chunk, and they must follow each other "
        "around the ring: if rank r finishes chunk k, rank r + 1 finishes chunk k + 1 "
        "(mod n). The all-gather of the next task counts on it.",
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


def half_done(case, rank, world_size):
    """Chunks of which one is finished; the others are of no use."""
    size, shift = case
    return in_chunks(size, rank, world_size), (rank + shift) % world_size


def observe_all_gather(answer, chunks, mine):
    memory = views_of(chunks)
    with watched(answer) as calls:
        answer(chunks, mine)
    kind = "" if memory[0].is_floating_point() else f", {OF_LARGE}"
    seen = {f"the chunks{kind}": [chunk.clone() for chunk in memory]}
    return seen | traffic(told_by_all(list(calls)), dist.get_rank())


COUNTED_UP = (
    "The numbers go down, and yours are counted up: if chunks go to the next rank, "
    "chunk mine - k is sent in step k, and chunk mine - 1 - k arrives. (With two "
    "ranks, up and down are the same.)"
)
RECV = "dist.recv(chunks[(mine - step - 1) % n], (rank - 1) % n)\n"
BY_A_BUFFER = RECV.replace("chunks[(mine - step - 1) % n]", "incoming")
BY_A_BUFFER = f"incoming = torch.empty_like(chunks[mine - step - 1]); {BY_A_BUFFER}"
WAIT = "        request.wait()"

ALL_GATHER = Task(
    id="07.all_gather",
    title="The second half: all-gather",
    stars=2,
    ranks=(3, 1, 2, 5),
    cases=((30, 1), (7, 0), (2, 2), (6, 1)),
    inputs=half_done,
    observe=observe_all_gather,
    keeps_inputs=False,
    instead=INSTEAD,
    misses=(
        Miss("mine - step", "mine + step", COUNTED_UP),
        Miss(
            f"isend(chunks[(mine - step) % n], (rank + 1) % n)\n        {RECV}",
            "isend(chunks[(mine + step) % n], (rank + 1) % n)\n"
            f"        {RECV.replace('- step - 1', '+ step + 1')}",
            COUNTED_UP,
        ),
        Miss(
            RECV + WAIT,
            f"{BY_A_BUFFER}{WAIT}\n        chunks[mine - step - 1] = incoming",
            "The chunks are as they were. Receive into them, or copy into them what "
            "has arrived: `chunks[i].copy_(incoming)`. `chunks[i] = incoming` only "
            "puts another tensor into the list, and `.data = ...` other memory behind "
            "a tensor.",
        ),
        Miss(
            "chunks[(mine - step) % n]",
            "chunks[mine]",
            "The first chunk that arrives is right, a later one is not. In each step "
            "send what has arrived in the step before, not the own chunk again.",
        ),
        Miss(
            "mine - step",
            "rank + 1 - step",
            "`mine` need not be rank + 1: use `mine`. Only the chunk of that number is "
            "finished here.",
        ),
        Miss(
            RECV + WAIT,
            f"{BY_A_BUFFER}{WAIT}\n        chunks[mine - step - 1] += incoming",
            "Copy what arrives, don't add: it is finished, and what stands in your own "
            "chunk of that number is of no use.",
        ),
        Miss(
            "range(n - 1)",
            "range(n - 2)",
            "A chunk is missing on each rank. Does the loop have n - 1 steps? With two "
            "ranks that is one.",
        ),
    ),
    because={OF_LARGE: DIGITS_LOST, **BECAUSE},
    errors=IN_A_RING,
    otherwise="In step k send chunk (mine - k) mod n, and receive chunk "
    "(mine - 1 - k) mod n into its place. The ring is closed: rank 0 follows the last.",
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


def any_tensor(case, rank, world_size):
    """A tensor, contiguous or not; or a part of another."""
    shape, dtype, how = case
    tensor = numbers(shape, dtype, how == "large", rank, world_size)
    if how == "transposed":
        tensor = tensor.t()
    elif how == "a column":
        tensor = tensor[:, 1]
    elif how == "a row":  # contiguous, in a larger memory
        tensor = tensor[1]
    return (tensor,)


def observe_all_reduce(answer, tensor):
    (memory,) = views_of([tensor])
    is_large = bool((memory.double().abs() > 2**24).any())
    kind = "" if memory.is_contiguous() else f", {WITH_GAPS}"
    with watched(answer) as calls:
        answer(tensor)
    seen = {f"the tensor{kind}{f', {OF_LARGE}' * is_large}": memory.clone()}
    return seen | traffic(told_by_all(list(calls)), dist.get_rank(), memory)


WITH_GAPS = "which is not contiguous"
SPLIT = "flat.tensor_split(dist.get_world_size())"
PLAIN_FLOAT = (torch.float32, "")
ON_A_COPY = (
    "The tensor is as it was: the work was done on a copy. (Of a tensor that is not "
    "contiguous, `contiguous()` makes one; `clone`, `torch.cat` and `+` always do. And "
    "`tensor.data = ...` puts other memory behind it.) Write the result into it: "
    "`tensor.copy_(...)`."
)
SECOND_HALF = (
    "After the first half each rank has one finished chunk, and the second half begins "
    "with that one: is it given the number that the first half returns?"
)

ALL_REDUCE = Task(
    id="07.all_reduce",
    title="A ring for any size",
    stars=3,
    ranks=(3, 1, 2, 5),
    cases=(
        ((7,), *PLAIN_FLOAT),
        ((2, 3), torch.int64, ""),
        ((), torch.bfloat16, ""),
        ((0,), *PLAIN_FLOAT),
        ((4, 5), torch.int16, "transposed"),
        ((9, 3), torch.bfloat16, "a column"),
        ((2, 100_003), torch.float32, "a row"),
        ((6,), torch.int32, "large"),
        ((6,), torch.int64, "large"),
        ((6,), torch.float64, "large"),
    ),
    inputs=any_tensor,
    observe=observe_all_reduce,
    keeps_inputs=False,
    instead=INSTEAD,
    misses=(
        Miss("tensor.copy_(flat.view(tensor.shape))", "pass", ON_A_COPY),
        Miss("flat = ", "tensor = tensor.clone()\n    flat = ", ON_A_COPY),
        Miss(
            "all_gather(chunks, mine)",
            "pass",
            "That is one half. A reduce-scatter leaves each rank with one finished "
            "chunk; the all-gather, as many messages again, brings it to all.",
        ),
        Miss(
            SPLIT,
            "[flat[i : i + len(flat) // n] for n in [dist.get_world_size()]\n"
            "        for i in range(0, len(flat) // n * n, len(flat) // n)]",
            "The last elements are as they were: n chunks of `size // n` elements "
            "leave them out. `tensor_split(n)` makes n chunks of nearly one size.",
        ),
        Miss(
            "flat.view(tensor.shape)",
            "flat.view(tensor.shape) / dist.get_world_size()",
            "That is the mean. This all-reduce adds up and does not divide.",
        ),
        Miss("chunks, mine", "chunks, dist.get_rank()", SECOND_HALF),
        Miss("chunks, mine", "chunks, (mine - 1) % len(chunks)", SECOND_HALF),
    ),
    because={
        OF_LARGE: DIGITS_LOST,
        WITH_GAPS: "This tensor is not contiguous; contiguous ones came out right. "
        "Work on `tensor.contiguous()`, which is a copy here, and copy the result back "
        "when both halves are done, each element to its own place.",
        **BECAUSE,
    },
    errors={
        "view size is not": "The tensor is not contiguous: `view(-1)` cannot make one "
        "row of it. Work on `tensor.contiguous().view(-1)`, and copy the result back.",
        "contiguous": "A message must be contiguous. Work on `tensor.contiguous()`, "
        "and copy the result back. (`reshape(-1)` of a column is a view of it, with "
        "all its gaps.)",
        "refer to a single memory location": "Is one row, as `flat`, copied into a "
        "tensor of another shape? Give it that shape first: "
        "`tensor.copy_(flat.view(tensor.shape))`.",
        "index out of range": "A tensor may have any size, and `chunk(n)` may make "
        "fewer than n pieces. `tensor_split(n)` always makes n.",
        "imension": "A tensor may have no dimension, and then it cannot be cut. "
        "`view(-1)` makes one.",
        **IN_A_RING,
    },
    otherwise="Make it flat, cut it with tensor_split, run both halves, and write the "
    "result back if you worked on a copy. To find it, print the chunks of 3 ranks and "
    "3 numbers after each step.",
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


def observe_repaired(answer, tensor):
    seen = observe_all_reduce(answer, tensor)
    return {name: seen[name] for name in seen if name not in (MESSAGES, STEPS)}


ON_PAPER = (
    "Write down for 3 ranks and both loops which chunk each one sends in step 0 and "
    "step 1, and to which chunk goes what arrives. "
)
FIRST_LOOP = ON_PAPER + "What arrives belongs to the chunk before the one that is sent."
SECOND_LOOP = ON_PAPER + "In the second loop each rank sends what has arrived before."
WHOLE_SIZE = (
    "Chunks may differ in size: the buffer must have the size of the chunk that "
    "arrives, `torch.empty_like(chunk)` for example."
)

SPOT_THE_RING = Task(
    id="07.spot_the_ring",
    title="Spot the bugs of a ring",
    stars=2,
    ranks=(3, 1, 2, 4),
    cases=tuple(((size,), *PLAIN_FLOAT) for size in (12, 5, 1, 100_003)),
    inputs=any_tensor,
    observe=observe_repaired,
    keeps_inputs=False,
    instead="Keep isend and recv, and repair what is around them.",
    misses=(
        Miss(
            "rank - step - 1",
            "rank - step + 1",
            f"{FIRST_LOOP} Modulo 2, +1 and -1 are the same; modulo 3 they are not.",
        ),
        Miss(
            "rank - step - 1",
            "rank - step",
            f"{FIRST_LOOP} Was the index changed by one in place of two?",
        ),
        Miss(
            "chunk += buffer",
            "chunk = chunk + buffer",
            "Nothing is added: `chunk = chunk + buffer` makes another tensor, and "
            "`chunks[i] = ...` puts another one into a list. Add in place, `+=`.",
        ),
        Miss("rank + 1 - step", "rank + 1", SECOND_LOOP),
        Miss("rank + 1 - step", "rank - step", SECOND_LOOP),
        Miss("(rank - step) % n], left", "(rank - step - 1) % n], left", SECOND_LOOP),
        Miss("    chunks =", "    tensor = tensor.clone()\n    chunks =", ON_A_COPY),
    ),
    because=BECAUSE,
    errors={
        "index out of range": "There are n chunks, 0 to n - 1, but `chunk(n)` makes "
        "pieces of ceil(size / n), and that may be fewer than n of them.",
        "CollectiveMismatch": WHOLE_SIZE,
        "match": WHOLE_SIZE,
        **IN_A_RING,
        OUT_OF_STEP: "Ranks wait for each other: look for a `send` that all ranks make "
        "before they receive, or a `recv` before anybody has sent. isend to the right, "
        "recv from the left, wait; and on all ranks the same number of steps.",
    },
    otherwise="There are three bugs: one makes it hang, one makes it wrong on more "
    "than two ranks, and one depends on the size.",
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

DEPTH = "math.ceil(math.log2(world_size))"
LOG = (
    "math.log is the natural logarithm. In each step up the ranks are halved, so it is "
    "math.log2, rounded up."
)

TREE_WINS = Task(
    id="07.tree_wins",
    title="When does a tree win?",
    stars=2,
    where="here",
    # 2 and 3 ranks come last: many give them 0 by an `if`, and some do not.
    cases=(
        (64, 9.6e-6, 5e10),
        (8, 1e-5, 1e10),
        (4, 5e-6, 4.5e11),
        (6, 2e-3, 1e8),
        (1000, 1e-5, 2.5e10),
        (10_000, 1e-6, 1e11),
        (8, 1e-6, 6.5e5),  # 1.2 bytes
        (2, 1e-5, 1e10),
        (3, 1e-3, 1e9),
    ),
    instead="Set the two formulas equal, and solve for S.",
    tolerance=1e-3,
    misses=(
        Miss(
            DEPTH,
            "math.log2(world_size)",
            "The tree's steps are log2(n), rounded up: 1,000 ranks need a tree as deep "
            "as 1,024 do.",
        ),
        Miss(
            "math.ceil",
            "math.floor",
            "The tree's steps are log2(n), rounded *up*, not down.",
        ),
        Miss(
            DEPTH,
            "world_size.bit_length()",
            "8 ranks need 3 steps up, and (8).bit_length() is 4. It is "
            "math.ceil(math.log2(n)), or (n - 1).bit_length().",
        ),
        Miss("math.log2", "math.log", LOG),
        Miss(DEPTH, "math.log(world_size)", LOG),
        Miss(
            DEPTH,
            f"{DEPTH} / 2",
            "A tree has two ways, up and down: 2 · log2(n) steps, rounded up. (A ring "
            "has two halves.)",
        ),
        Miss(
            "world_size - 1",
            "(world_size - 1) / 2",
            "A ring has two halves: 2(n - 1) steps. (A tree has two ways.)",
        ),
        Miss(
            "(world_size - 1) / world_size",
            "(world_size - 1)",
            "In a ring a message has S/n bytes, not S: a rank sends one chunk in each "
            "step.",
        ),
        Miss(
            "(world_size - 1) / world_size",
            "1",
            "A ring's n - 1 steps of S/n bytes make (n - 1)/n · S in each half. That "
            "is less than S, also if not by much: 7/8 with 8 ranks.",
        ),
        Miss(
            " * steps_saved",
            "",
            "n - 1 - d is missing, the steps that a tree saves.",
        ),
        Miss(
            " * bandwidth",
            "",
            "Those are seconds. Multiplied by the bandwidth, they are bytes.",
        ),
        Miss(
            "return latency * bandwidth * steps_saved / more_bytes",
            "return round(latency * bandwidth * steps_saved / more_bytes)",
            "The size is right, but rounded. Return it as it comes out.",
        ),
    ),
    errors={
        "ZeroDivisionError": "With two or three ranks a tree has as many steps as a "
        "ring. The result is 0 then: nothing may be divided by the difference of the "
        "steps.",
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

TASKS = (
    PREDICT_BYTES,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_REDUCE,
    SPOT_THE_RING,
    TREE_WINS,
)
