"""Lesson 07, ring all-reduce: the tasks of its exercise."""

import math
import operator
from dataclasses import replace

import torch

from course_utils import costs
from course_utils.checks.mistakes import is_rounded, is_wrong, right_but, says
from course_utils.checks.task import ANYTHING, Mistake, Such, Task
from course_utils.messages import in_steps
from course_utils.notebook.compare import difference, plain
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.messages import (
    INSTEAD,
    NO_SUCH_RANK,
    OTHER_SIZE,
    POLLED,
    TO_ITSELF,
    WAITED,
    all_waited_for,
    told_by_all,
    waits,
    watched,
)

# ------------------------------------------------------------ what a ring has to send

OF_ALL = "bytes sent by all ranks together"
MOST = "bytes sent by this rank"
RECEIVED = "messages received"
SAME = "the tensors in the list are the same ones"
SAME_MEMORY = "the tensor has the memory that it was given with"


def traffic(calls, logs):
    """What this rank has sent, and how many steps all ranks took together.

    `logs` are the calls of all ranks; None if a rank has not come back: then the check
    will name it.
    """
    sends = [call for call in calls if call.kind == "send"]
    steps = of_all = None
    if logs is not None:
        of_all = sum(call.nbytes for log in logs for call in log if call.kind == "send")
        try:
            steps = max((message.step for message in in_steps(logs)), default=0)
        except ValueError:
            steps = "a send without a recv, or a recv without a send"
    return {
        WAITED: all_waited_for(calls),
        "ranks that it sends to": sorted({call.peer for call in sends}),
        OF_ALL: of_all,
        MOST: sum(call.nbytes for call in sends),
        "messages sent": len(sends),
        RECEIVED: sum(call.kind == "recv" for call in calls),
        "steps": steps,
    }


def allowed(rank, n, least_of_all, most_bytes, most_steps=math.inf):
    """The traffic that the check expects.

    The least is that of all ranks together. What one of them must send depends on how
    the tensor was cut: chunks may differ in size, and each rank leaves one of them out.
    """
    neighbours = {(rank + 1) % n, (rank - 1) % n} - {rank}
    return {
        WAITED: True,
        "ranks that it sends to": Such(
            "one neighbour in the ring, always the same",
            lambda peers: len(peers) <= 1 and set(peers) <= neighbours,
        ),
        OF_ALL: Such(
            f"at least {least_of_all:,}", lambda b: b is None or b >= least_of_all
        ),
        MOST: Such(f"at most {most_bytes:,}", lambda b: b <= most_bytes),
        "messages sent": ANYTHING,
        RECEIVED: ANYTHING,
        "steps": Such(
            f"at most {most_steps}", lambda steps: steps is None or steps <= most_steps
        ),
    }


SOME_HAVE_RETURNED = Mistake(
    when=lambda attempt: waits(attempt) and attempt.returned != (),
    says="This rank still waits, and another one has returned already. Is every isend "
    "waited for, by wait()? gloo may drop a message whose request nobody keeps. Or do "
    "the ranks not make the same number of steps?",
)
ALL_SEND_FIRST = Mistake(
    when=waits,
    says="Everybody waits. If all ranks `send` first, nobody receives; if all `recv` "
    "first, nobody has sent. So: isend to one neighbour, recv from the *other* one, "
    "then wait for the send. And every rank must make the same number of steps, also "
    "where a chunk is empty.",
)
NOTHING_SENT = Mistake(
    when=lambda attempt: right_but(OF_ALL)(attempt) and attempt.got[MOST] == 0,
    says="The result is right, but this rank has sent no message. Build it from isend "
    "and recv.",
)
TOO_LITTLE_SENT = Mistake(
    when=right_but(OF_ALL),
    says="The result is right here, but fewer bytes were sent than a ring has to send. "
    "Were the numbers sent in a smaller dtype, or in another way than by messages?",
)
TOO_MUCH_SENT = Mistake(
    when=right_but(MOST),
    says="The result is right, but too much is sent. A ring sends one chunk in each "
    "step, an n-th of the tensor: n - 1 steps in each half. And in its own dtype: "
    "float64 has twice the bytes of float32.",
)
CHUNKS_TOO_LARGE = Mistake(
    when=lambda attempt: (
        right_but(MOST)(attempt)
        and attempt.got["messages sent"] == 2 * (attempt.world_size - 1)
    ),
    says="The number of messages is right, but they have too many bytes. Is the dtype "
    "on the way larger than the tensor's own? And a chunk is an n-th of the tensor.",
)
NOT_WAITED = Mistake(
    when=right_but(WAITED),
    says="isend and irecv return at once. Wait for every request: until then, what is "
    "sent may still be read, and what is received may be incomplete. That it came out "
    "right was luck.",
)
TWO_WAYS = Mistake(
    when=right_but("ranks that it sends to"),
    says="The result is right, but this is no ring: each rank sends to the next rank "
    "only (or always to the one before).",
)
NO_PARTNER = Mistake(
    when=lambda attempt: (
        right_but("steps")(attempt) and isinstance(attempt.got["steps"], str)
    ),
    says="The result is right, but a message was sent that nobody received, or the "
    "other way round. It would be taken for one of the next call.",
)
IN_PIECES = Mistake(
    when=lambda attempt: (
        right_but("steps")(attempt)
        and not attempt.expected["steps"].test(attempt.got["messages sent"])
    ),
    says="The result is right, but there are more messages than steps. Smaller pieces "
    "may be faster. Here a chunk is to go in one message: one in each step.",
)
ONE_AFTER_THE_OTHER = Mistake(
    when=right_but("steps"),
    says="The result is right, but it takes more steps than needed: one message "
    "follows another where both could be on their way. In each step all ranks send "
    "and receive at the same time: isend, recv, wait. (A send in a thread counts as "
    "one after the other.)",
)
STILL_BUSY = Mistake(
    when=lambda attempt: attempt.error == "running",
    says="Is every isend and irecv waited for, by wait()? gloo may drop a message "
    "whose request nobody keeps, and then the receiver waits for ever. Or is there a "
    "loop that never ends, or a message to a rank that does not exist?",
)
NO_SOURCE = Mistake(
    when=says("unbound_buffer", "this->size"),
    says="gloo cannot receive an empty message from just any rank: name the source, "
    "`dist.recv(buffer, src)`.",
)
IN_PLACE = (
    "Write into the chunks, in place. `chunks[i] = ...` puts another tensor into the "
    "list, and `chunks[i].data = ...` another memory behind the tensor: the old one, "
    "where the result is wanted, stays as it was. `chunks[i].add_(incoming)` adds in "
    "place, `chunks[i].copy_(incoming)` copies."
)
A_TUPLE = Mistake(
    when=says("does not support item assignment"),
    says="`tensor_split` returns a tuple, which has no `chunks[i] = ...`. Write into "
    "the chunks, in place: `chunks[i] += incoming`, or `chunks[i].copy_(incoming)`.",
)
NOT_CAST = Mistake(
    when=says("can't be cast to the desired output type"),
    says="These numbers are whole, and a tensor of whole numbers cannot hold a "
    "fraction. Was it divided in place? The sum is wanted, not the mean. Or was a "
    "tensor of another dtype added to it?",
)
OF_TRAFFIC = (
    *(NOTHING_SENT, TOO_LITTLE_SENT, TOO_MUCH_SENT),
    *(NOT_WAITED, TWO_WAYS, NO_PARTNER, IN_PIECES, ONE_AFTER_THE_OTHER),
)
ALONE = replace(
    TO_ITSELF, says=f"{TO_ITSELF.says} (A loop of n - 1 steps has none on one rank.)"
)
IN_A_CIRCLE = Mistake(
    when=says("index out of range"),
    says="There are n chunks, 0 to n - 1. Count in a circle: `% world_size`.",
)
ANOTHER_CHUNKS_SIZE = replace(
    OTHER_SIZE,
    says="What one rank sends must fit what the other receives, in size and dtype. "
    "Chunks may differ in size: make the buffer like the chunk that *arrives*, not "
    "like the one that is sent. Or does one rank leave out a message, an empty one for "
    "example, that the other one expects?",
)
OF_MESSAGES = (
    *(SOME_HAVE_RETURNED, ALL_SEND_FIRST, ALONE, NO_SUCH_RANK, POLLED, STILL_BUSY),
    *(NO_SOURCE, A_TUPLE, ANOTHER_CHUNKS_SIZE, IN_A_CIRCLE, NOT_CAST),
)


def nothing_came(part):
    """Where this is wrong, and ranks send: has this rank received no message?"""
    return Mistake(
        when=lambda attempt: (
            is_wrong(part)(attempt)
            and attempt.got[RECEIVED] == 0 != (attempt.got[OF_ALL] or 0)
        ),
        says="Messages were sent, but this rank has received none. A ring is closed: "
        "the last rank and rank 0 are neighbours, too. `(rank + 1) % n` and "
        "`(rank - 1) % n` are right for all ranks.",
    )


# ----------------------------------------------------------------------- predict_bytes

PREDICT_BYTES = Task(
    id="07.predict_bytes",
    title="Predict the steps and the bytes",
    stars=1,
    where="value",
    expect=lambda: (2 * 15, 2 * 15 * 4_000_000 // 16),
    mistakes=(
        Mistake(
            like=lambda: (15, 15 * 4_000_000 // 16),
            says="That is the reduce-scatter. The all-gather takes as many steps and "
            "bytes again.",
        ),
        Mistake(
            like=lambda: (30, 30 * 1_000_000 // 16),
            says="The steps are right. But a float32 has 4 bytes.",
        ),
        Mistake(
            like=lambda: (32, 8_000_000),
            says="Each half has n - 1 steps: a rank's own chunk need not travel to "
            "itself.",
        ),
        Mistake(
            like=lambda: (30, 30 * 4_000_000),
            says="The steps are right. In each of them a rank sends one chunk, not the "
            "whole tensor.",
        ),
        Mistake(
            like=lambda: (30, 16 * 30 * 4_000_000 // 16),
            says="The steps are right. These are the bytes of all ranks together; how "
            "many does each one send?",
        ),
        Mistake(
            like=lambda: (30, 4_000_000 // 16),
            says="The steps are right. These are the bytes of one step.",
        ),
        Mistake(
            like=lambda: (30, 15 * 4_000_000 // 16),
            says="The steps are right. These are the bytes of one half, which is 15 of "
            "the 30 steps.",
        ),
        Mistake(
            like=lambda: (30, 8_000_000),
            says="The steps are right. 8,000,000 bytes would be 32 chunks. How many "
            "are sent in 30 steps?",
        ),
        Mistake(
            when=lambda attempt: _two(attempt) in ([30, 7.5], [30, 7500]),
            says="The steps are right. In bytes, please: not in MB or kB.",
        ),
        Mistake(
            when=lambda attempt: _two(attempt)[::-1] == [30, 7_500_000],
            says="First the steps, then the bytes.",
        ),
        Mistake(
            when=lambda attempt: _two(attempt)[0] == 30,
            says="The steps are right. In each step a rank sends one chunk: how many "
            "bytes does it have?",
        ),
        Mistake(
            when=lambda attempt: _two(attempt)[1] == 7_500_000,
            says="The bytes are right. In how many steps are they sent?",
        ),
        Mistake(
            when=lambda attempt: _two(attempt) != [],
            says="Two halves with n - 1 steps each; in each step one chunk, which is "
            "one n-th of the tensor.",
        ),
    ),
    otherwise="Two numbers: the steps, and the bytes that each rank sends in all.",
    hints=(
        "Two halves. How many steps does each have on 16 ranks?",
        "A rank sends one chunk in each step. How many bytes are all chunks together, "
        "and how many is one?",
        "For 4 ranks and 1,200 bytes it goes like this:\n"
        "  steps    2 * 3            = 6\n"
        "  chunk    1200 / 4         = 300 bytes\n"
        "  answer = (6, 1800)",
    ),
)


def _two(attempt):
    """The two numbers of the answer, or []."""
    numbers = torch.as_tensor(attempt.got).tolist()
    return numbers if isinstance(numbers, list) and len(numbers) == 2 else []


# ---------------------------------------------------------------------- reduce_scatter


def in_chunks(size, rank, world_size):
    """Chunks of a tensor of that size, which share its memory; 7 are int32."""
    numbers = whole_numbers((size,), rank)
    if size == 7:
        # They nearly cancel in a sum, and float32 has not enough digits for them.
        numbers = numbers.to(torch.int32) + nearly_nothing(rank, world_size) * 2**29
    return (list(numbers.tensor_split(world_size)),)


def nearly_nothing(rank, world_size):
    """1, -1, or 0: over all ranks it adds up to 0."""
    return 1 - 2 * rank if rank < 2 <= world_size else 0


def number_of(value):
    """The number of a chunk, if a list can be asked for it; or None."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # as `chunks[1.0]` is
        return None


def try_reduce_scatter(answer, chunks):
    given, memory = list(chunks), views_of(chunks)
    with watched(answer) as calls:
        returned = answer(chunks)
    report = {"the number that it returned": plain(returned)}
    number = number_of(returned)
    if number is not None and 0 <= number < len(given):
        report[FINISHED] = (number, memory[number].clone())
    told = told_by_all((number, list(calls)))
    if told is not None:
        report["the chunks that the ranks finish"] = [one for one, _ in told]
    report["all chunks"] = [chunk.clone() for chunk in memory]
    report[SAME] = are_same(chunks, given, memory)
    return report | traffic(calls, told and [calls for _, calls in told])


def views_of(chunks):
    """The same memory in other tensors: they keep it, whatever becomes of `.data`."""
    return [chunk.detach() for chunk in chunks]


def are_same(chunks, given, memory):
    """Does the list still hold the tensors that it was given with, and these theirs?"""
    return len(chunks) == len(given) and all(
        one is other and one.data_ptr() == view.data_ptr()
        for one, other, view in zip(chunks, given, memory, strict=True)
    )


FINISHED = "the chunk of that number"


def reduce_scattered(rank, inputs):
    n = len(inputs)
    totals = [sum(chunks[i] for (chunks,) in inputs) for i in range(n)]
    sizes = [4 * len(total) for total in totals]

    def is_finished(got):
        number, chunk = got
        return difference(chunk, totals[number], 1e-5) is None

    return {
        "the number that it returned": Such(
            f"a number from 0 to {n - 1}" if n > 1 else "0, the only chunk",
            lambda value: number_of(value) in range(n),
        ),
        FINISHED: Such("its sum over all ranks", is_finished),
        "the chunks that the ranks finish": Such(
            "(r + shift) mod n on rank r, with one shift for all",
            lambda numbers: numbers == [(numbers[0] + r) % n for r in range(n)],
        ),
        "all chunks": ANYTHING,
        SAME: ANYTHING,
        **allowed(rank, n, (n - 1) * sum(sizes), sum(sizes) - min(sizes), n - 1),
    }


def sums_of_fewer(attempt):
    """Is no chunk of this rank finished?"""
    return not any(map(_finished(attempt), range(attempt.world_size)))


def another_is_finished(attempt):
    """Is a chunk finished here, but not the one whose number was returned?"""
    number = attempt.got[FINISHED][0]
    others = [i for i in range(attempt.world_size) if i != number]
    return any(map(_finished(attempt), others))


def is_mean(attempt):
    """Is that chunk the sum, divided by the world size?"""
    number, chunk = attempt.got[FINISHED]
    return attempt.expected[FINISHED].test((number, chunk * attempt.world_size))


def _finished(attempt):
    test = attempt.expected[FINISHED].test
    return lambda i: test((i, attempt.got["all chunks"][i]))


def untouched(attempt):
    """Is that chunk as it was at the beginning?"""
    return attempt.got[FINISHED][0] not in changed(attempt)


def changed(attempt):
    """The numbers of the chunks that are not as they were at the beginning."""
    pairs = zip(attempt.got["all chunks"], attempt.args[0], strict=True)
    return [
        i for i, (got, was) in enumerate(pairs) if difference(got, was, 0) is not None
    ]


DIGITS_LOST = (
    "The numbers are large here, and digits were lost: float32 has all whole numbers "
    "to 2^24 only, float64 to 2^53. Leave the dtype as it is, also on the way."
)


def nearly_right(attempt):
    """Does it differ from the sum by less than float32 loses of a large number?"""
    number, chunk = attempt.got[FINISHED]
    if chunk.dtype != torch.int32:
        return False
    chunks = [in_chunks(7, r, attempt.world_size)[0] for r in range(attempt.world_size)]
    lost = chunk - sum(of_rank[number] for of_rank in chunks)
    return bool((lost.abs() < 2**9).all())


REDUCE_SCATTER = Task(
    id="07.reduce_scatter",
    title="The first half: reduce-scatter",
    stars=2,
    where="ranks",
    run=try_reduce_scatter,
    cases=(30, 7, 2),
    inputs=in_chunks,
    world_sizes=(1, 2, 3, 5),
    expect=reduce_scattered,
    instead=INSTEAD,
    keeps_inputs=False,
    mistakes=(
        Mistake(
            when=lambda attempt: (
                attempt.error == ""
                and attempt.got["the number that it returned"] is None
            ),
            says="It returned None. Return the number of the chunk that is finished on "
            "this rank, below the loop: one rank alone makes no step of it.",
        ),
        Mistake(
            when=lambda attempt: (
                FINISHED not in attempt.got
                and not isinstance(
                    attempt.got["the number that it returned"], (int, float)
                )
            ),
            says="Return the number of the chunk that is finished here, and nothing "
            "else: a whole number, not the chunk itself, and no pair of both.",
        ),
        Mistake(
            when=lambda attempt: (
                FINISHED not in attempt.got
                and isinstance(attempt.got["the number that it returned"], float)
            ),
            says="That is a float, and `chunks[1.0]` is a TypeError. Return a whole "
            "number, an int.",
        ),
        Mistake(
            when=lambda attempt: FINISHED not in attempt.got,
            says="That is not the number of a chunk. Count in a circle: `% world_size` "
            "makes a number from 0 to world_size - 1, also of a negative one.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong(FINISHED)(attempt) and attempt.got[SAME] is False
            ),
            says=IN_PLACE,
        ),
        nothing_came(FINISHED),
        Mistake(
            when=lambda attempt: is_wrong(FINISHED)(attempt) and is_mean(attempt),
            says="That is the mean over the ranks. This reduce-scatter adds up, and "
            "does not divide.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong(FINISHED)(attempt) and another_is_finished(attempt)
            ),
            says="Another chunk is finished on this rank, not the one whose number was "
            "returned. What arrives in the last step is the one.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong(FINISHED)(attempt)
                and untouched(attempt)
                and changed(attempt) != []
                and attempt.got["messages sent"] == attempt.world_size - 1
            ),
            says="That chunk is as it was, but another one has changed: what arrived "
            "went to a chunk of another number. If rank r sends chunk r - k in step k, "
            "then chunk r - k - 1 arrives, and belongs to the own chunk of that "
            "number.",
        ),
        Mistake(
            when=lambda attempt: is_wrong(FINISHED)(attempt) and untouched(attempt),
            says="That chunk is as it was: nothing was added to it in place (`mine = "
            "mine + incoming` makes another tensor), or a buffer into which nothing "
            "had come yet (after an irecv, first wait, then add). A finished chunk "
            "has met every rank, and arrives here in the last of n - 1 steps: does the "
            "loop have as many?",
        ),
        Mistake(
            when=lambda attempt: is_wrong(FINISHED)(attempt) and nearly_right(attempt),
            says=DIGITS_LOST,
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong(FINISHED)(attempt)
                and attempt.world_size > 2
                and sums_of_fewer(attempt)
            ),
            says="The sum does not have the parts of all ranks, or some twice. What is "
            "sent in a step must be what came in the step before, with the own part "
            "added: rank r sends chunk r - k in step k, and receives chunk r - k - 1. "
            "(With two ranks other numbers come out right as well: modulo 2, +1 and "
            "-1 are the same.)",
        ),
        Mistake(
            when=is_wrong(FINISHED),
            says="Add what arrives to the own chunk of the same number: if rank r "
            "sends chunk r - k in step k, then chunk r - k - 1 arrives. A recv into "
            "the chunk itself would overwrite it: receive into a buffer of that size. "
            "And after an irecv, first wait, then add.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong("the chunks that the ranks finish")(attempt)
                and sorted(attempt.got["the chunks that the ranks finish"])
                == list(range(attempt.world_size))
            ),
            says="Each rank has finished another chunk, but they do not follow each "
            "other around the ring. If rank r finishes chunk k, rank r + 1 must finish "
            "chunk k + 1 (mod n): the all-gather of the next task counts on it.",
        ),
        Mistake(
            when=is_wrong("the chunks that the ranks finish"),
            says="Some chunk is finished on two ranks, and another one on none. Each "
            "rank must finish another chunk.",
        ),
        *OF_TRAFFIC,
        *OF_MESSAGES,
    ),
    otherwise="In step k rank r sends chunk (r - k) mod n to the next rank. It "
    "receives chunk (r - k - 1) mod n, and adds its own.",
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
    (chunks,) = in_chunks(size, rank, world_size)
    return chunks, (rank + shift) % world_size


def try_all_gather(answer, chunks, mine):
    given, memory = list(chunks), views_of(chunks)
    with watched(answer) as calls:
        answer(chunks, mine)
    report = {"the chunks": [chunk.clone() for chunk in memory]}
    report[SAME] = are_same(chunks, given, memory)
    return report | traffic(calls, told_by_all(list(calls)))


def all_gathered(rank, inputs):
    n = len(inputs)
    done = [None] * n
    for chunks, mine in inputs:
        done[mine] = chunks[mine]
    sizes = [4 * len(chunk) for chunk in done]
    least, most = (n - 1) * sum(sizes), sum(sizes) - min(sizes)
    return {"the chunks": done, SAME: ANYTHING, **allowed(rank, n, least, most, n - 1)}


def right_chunks(attempt):
    """The numbers of the chunks that are right."""
    pairs = zip(attempt.got["the chunks"], attempt.expected["the chunks"], strict=True)
    return [
        i for i, (got, want) in enumerate(pairs) if difference(got, want, 0) is None
    ]


def passed_on(attempt, sends, receives):
    """Is it what comes out if chunk `mine` + these are sent and received in step k?"""
    n, (given, mine) = attempt.world_size, attempt.args
    shift, size = mine - attempt.rank, sum(map(len, given))
    ranks = [in_chunks(size, r, n)[0] for r in range(n)]
    for k in range(n - 1):
        sent = [ranks[r][(r + shift + sends(k)) % n] for r in range(n)]
        for r in range(n):
            ranks[r][(r + shift + receives(k)) % n] = sent[r - 1]
    return difference(attempt.got["the chunks"], ranks[attempt.rank], 0) is None


def counts_up(attempt):
    """Do the numbers of the chunks grow, while these go to the next rank?"""
    return is_wrong("the chunks")(attempt) and any(
        passed_on(attempt, lambda k: k, receives)
        for receives in (lambda k: k + 1, lambda k: k - 1)
    )


def is_rotated(attempt):
    """Is there every finished chunk, but in other places?"""
    got, want = attempt.got["the chunks"], attempt.expected["the chunks"]
    n = attempt.world_size
    return any(
        all(difference(got[(i + k) % n], want[i], 0) is None for i in range(n))
        for k in range(1, n)
    )


def unchanged(attempt):
    pairs = zip(attempt.got["the chunks"], attempt.args[0], strict=True)
    return all(difference(got, was, 0) is None for got, was in pairs)


ALL_GATHER = Task(
    id="07.all_gather",
    title="The second half: all-gather",
    stars=2,
    where="ranks",
    run=try_all_gather,
    cases=((30, 1), (7, 0), (2, 2)),
    inputs=half_done,
    world_sizes=(1, 2, 3, 5),
    expect=all_gathered,
    instead=INSTEAD,
    keeps_inputs=False,
    mistakes=(
        Mistake(
            when=lambda attempt: (
                is_wrong("the chunks")(attempt) and attempt.got[SAME] is False
            ),
            says=IN_PLACE,
        ),
        nothing_came("the chunks"),
        Mistake(
            when=lambda attempt: (
                is_wrong("the chunks")(attempt)
                and unchanged(attempt)
                and attempt.got["messages sent"] == 0
            ),
            says="The chunks are as they were, and this rank has sent no message. Does "
            "the loop have n - 1 steps? With two ranks that is one.",
        ),
        Mistake(
            when=counts_up,
            says="The numbers are counted up, and they go down: if chunks go to the "
            "next rank, chunk mine - k is sent in step k, and chunk mine - 1 - k "
            "arrives. (With two ranks, up and down are the same.)",
        ),
        Mistake(
            when=lambda attempt: is_wrong("the chunks")(attempt) and unchanged(attempt),
            says="The chunks are as they were. Receive into them, or copy into them "
            "what has arrived: `chunks[i].copy_(incoming)`. Not into the chunk that "
            "was sent, but into the one before it.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong("the chunks")(attempt)
                and attempt.args[1] not in right_chunks(attempt)
            ),
            says="The chunk that was finished here, number `mine`, is no longer right. "
            "It is only sent: nothing is received into it, and nothing is added. "
            "(`mine` need not be rank + 1.)",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong("the chunks")(attempt)
                and attempt.world_size > 2
                and (attempt.args[1] - 1) % attempt.world_size in right_chunks(attempt)
            ),
            says="The first chunk that arrives is right, a later one is not. In each "
            "step send what has arrived in the step before, not the own chunk again.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong("the chunks")(attempt) and is_rotated(attempt)
            ),
            says="All finished chunks are there, but in the wrong places. Chunk i of "
            "one rank is chunk i of all ranks.",
        ),
        Mistake(
            when=is_wrong("the chunks"),
            says="The rank before has finished chunk mine - 1 (mod n), so this is what "
            "arrives in step 0. In step k it is mine - 1 - k. Copy it, don't add. "
            "`mine` need not be rank + 1: use `mine`.",
        ),
        *OF_TRAFFIC,
        *OF_MESSAGES,
    ),
    otherwise="In step k send chunk (mine - k) mod n, and receive chunk "
    "(mine - 1 - k) mod n into its place.",
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


LARGE = {torch.int32: 30, torch.int64: 60, torch.float64: 40}  # powers of 2


def any_tensor(case, rank, world_size):
    """A tensor, contiguous or not; or a part of another."""
    shape, dtype, how = case
    tensor = whole_numbers(shape, rank).to(dtype)
    # They nearly cancel: what is lost, can be seen.
    if how == "large":
        tensor += nearly_nothing(rank, world_size) * 2 ** LARGE[dtype]
    if how == "transposed":
        tensor = tensor.t()
    elif how == "a column":
        tensor = tensor[:, 1]
    elif how == "a row":  # contiguous, in a larger memory
        tensor = tensor[1]
    return (tensor,)


def try_all_reduce(answer, tensor):
    (memory,) = views_of([tensor])
    with watched(answer) as calls:
        answer(tensor)
    report = {"the tensor": memory.clone()}
    report[SAME_MEMORY] = tensor.data_ptr() == memory.data_ptr()
    return report | traffic(calls, told_by_all(list(calls)))


def all_reduced(rank, inputs):
    n, (tensor,) = len(inputs), inputs[0]
    total = sum(t for (t,) in inputs)
    steps = 2 * (n - 1)
    chunk = math.ceil(tensor.numel() / n) * tensor.element_size()
    least = steps * tensor.nbytes  # in the lesson: "The least that is possible"
    expected = {"the tensor": total.clone(), SAME_MEMORY: ANYTHING}
    return expected | allowed(rank, n, least, steps * chunk, steps)


def all_reduced_in_any_steps(rank, inputs):
    return all_reduced(rank, inputs) | {"steps": ANY_STEPS}


# Only what one rank has sent and none has received is an error here.
ANY_STEPS = Such(
    "a recv for each send", lambda steps: steps is None or isinstance(steps, int)
)


def tensor_is_own(attempt):
    return difference(attempt.got["the tensor"], attempt.args[0], 0.0) is None


def is_partly_right(attempt):
    """Is at least one element right, but not all?"""
    got, want = attempt.got["the tensor"], attempt.expected["the tensor"]
    return got.shape == want.shape and bool((got == want).any())


def rest_is_own(attempt):
    """Is it right but for a chunk or more that has not changed?"""
    got, want = attempt.got["the tensor"], attempt.expected["the tensor"]
    if not is_partly_right(attempt):
        return False
    wrong = got != want
    # Fewer than n may be what `size // n` leaves out.
    many = int(wrong.sum()) >= attempt.world_size
    return many and torch.equal(got[wrong], attempt.args[0][wrong])


def one_half_sent(attempt):
    """Were there messages, but no more of them than a reduce-scatter has?"""
    return 0 < attempt.got["messages sent"] < attempt.world_size


ONE_HALF = Mistake(
    when=lambda attempt: is_wrong("the tensor")(attempt) and one_half_sent(attempt),
    says="There were n - 1 messages or fewer from this rank: that is one half. A "
    "reduce-scatter leaves each rank with one finished chunk; the all-gather, as many "
    "messages again, brings it to all. And does each loop have n - 1 steps?",
)
ANOTHER_MEMORY = Mistake(
    when=lambda attempt: (
        is_wrong("the tensor")(attempt) and attempt.got[SAME_MEMORY] is False
    ),
    says="`tensor.data = ...` and `set_` put another memory behind the tensor. The old "
    "one, which may be a part of a larger tensor, stays as it was, and there the sum "
    "is wanted. Write into it: `tensor.copy_(...)`.",
)
AS_THEY_WERE = Mistake(
    when=lambda attempt: is_wrong("the tensor")(attempt) and rest_is_own(attempt),
    says="Some elements are right, the others are as they were: nothing was written "
    "there. Is every chunk reduced, and gathered again? And in place? `chunks[i] = "
    "...` puts another tensor into a list; `chunks[i].add_(...)` and "
    "`chunks[i].copy_(...)` write into the chunk.",
)
PARTLY_RIGHT = Mistake(
    when=lambda attempt: is_wrong("the tensor")(attempt) and is_partly_right(attempt),
    says="Some elements are right, others are not. Is every chunk reduced, and "
    "gathered again? The second half begins with the chunk that is finished here, and "
    "in each step sends what has arrived in the one before. (If only the last elements "
    "are wrong: `size // n` elements in each chunk leave them out. `tensor_split(n)` "
    "makes n chunks of nearly one size.)",
)

ALL_REDUCE = Task(
    id="07.all_reduce",
    title="A ring for any size",
    stars=3,
    where="ranks",
    run=try_all_reduce,
    cases=(
        ((7,), torch.float32, ""),
        ((2, 3), torch.int64, ""),
        ((), torch.bfloat16, ""),
        ((0,), torch.float32, ""),
        ((4, 5), torch.int16, "transposed"),
        ((9, 3), torch.bfloat16, "a column"),
        ((2, 100_003), torch.float32, "a row"),
        ((6,), torch.int32, "large"),
        ((6,), torch.int64, "large"),
        ((6,), torch.float64, "large"),
    ),
    inputs=any_tensor,
    world_sizes=(1, 2, 3, 4, 5),
    expect=all_reduced,
    instead=INSTEAD,
    keeps_inputs=False,
    mistakes=(
        ANOTHER_MEMORY,
        Mistake(
            when=lambda attempt: (
                is_wrong("the tensor")(attempt) and attempt.world_size == 1
            ),
            says="One rank alone has nothing to add: its tensor must stay as it is. If "
            "you work on a flat copy, each element must go back to its own place: "
            "`tensor.copy_(flat.view(tensor.shape))`.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == ""
                and is_wrong("the tensor")(attempt)
                and tensor_is_own(attempt)
                and attempt.got[MOST] > 0
            ),
            says="Messages were sent, but the tensor is as it was. The work was done "
            "on a copy (of a tensor that is not contiguous, `contiguous()` makes one; "
            "`reshape` and `flatten` where they must, `+` always): write the result "
            "back, `tensor.copy_(...)`.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong("the tensor")(attempt) and tensor_is_own(attempt)
            ),
            says="The tensor is as it was, and nothing was sent.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong("the tensor")(attempt)
                and difference(
                    attempt.got["the tensor"],
                    attempt.expected["the tensor"] / attempt.world_size,
                    1e-5,
                )
                is None
            ),
            says="That is the mean. This all-reduce adds up and does not divide.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong("the tensor")(attempt)
                and bool((attempt.args[0].double().abs() > 2**24).any())
            ),
            says=DIGITS_LOST,
        ),
        ONE_HALF,
        Mistake(
            when=lambda attempt: (
                is_wrong("the tensor")(attempt) and not attempt.args[0].is_contiguous()
            ),
            says="This tensor is not contiguous; contiguous ones came out right. Work "
            "on `tensor.contiguous()`, which is a copy here, and copy the result back "
            "when both halves are done.",
        ),
        AS_THEY_WERE,
        PARTLY_RIGHT,
        Mistake(
            when=is_wrong("the tensor"),
            says="Run it with 3 ranks and a tensor of 3 numbers, and print the chunks "
            "after each step. After the first half each rank must have one finished "
            "chunk, (r + 1) mod n for example, and the second half begins with that "
            "one: is it given the number that the first half returns?",
        ),
        CHUNKS_TOO_LARGE,
        *OF_TRAFFIC,
        Mistake(
            when=says("view size is not compatible", "Use .reshape"),
            says="The tensor is not contiguous: `view(-1)` cannot make one row of it. "
            "Work on `tensor.contiguous().view(-1)`, and copy the result back.",
        ),
        Mistake(
            when=says("be contiguous", "non-contiguous", "overlapping and dense"),
            says="A message must be contiguous. Work on `tensor.contiguous()`, and "
            "copy the result back. (`reshape(-1)` of a column is a view of it, with "
            "all its gaps, if it has some.)",
        ),
        Mistake(
            when=says("refer to a single memory location"),
            says="Is one row, as `flat`, copied into a tensor of another shape? Give "
            "it that shape first: `tensor.copy_(flat.view(tensor.shape))`.",
        ),
        Mistake(
            when=says("index out of range", "zero-dimensional", "at least a 1-d"),
            says="A tensor may have any size and shape. `chunk(n)` may make fewer than "
            "n pieces, and a tensor without a dimension has none to cut: `view(-1)` "
            "makes one, and `tensor_split(n)` always makes n pieces.",
        ),
        *OF_MESSAGES,
    ),
    otherwise="Make it flat, cut it with tensor_split, run both halves, and write the "
    "result back if you worked on a copy.",
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

# --------------------------------------------------------------------------- tree_wins


def sizes_equal(steps_of_tree, steps_of_ring, chunks, n, latency, bandwidth):
    """Where steps_of_tree(α + S/B) = steps_of_ring(α + S/(chunks·B)); 0 if nowhere."""
    per_byte = (steps_of_tree - steps_of_ring / chunks) / bandwidth
    if per_byte == 0:
        return math.inf
    return (steps_of_ring - steps_of_tree) * latency / per_byte


TREE_WINS = Task(
    id="07.tree_wins",
    title="When does a tree win?",
    stars=2,
    cases=(
        (8, 1e-5, 1e10),
        (4, 5e-6, 4.5e11),
        (64, 9.6e-6, 5e10),
        (2, 1e-5, 1e10),
        (3, 1e-3, 1e9),
        (6, 2e-3, 1e8),
        (1000, 1e-5, 2.5e10),
        (10_000, 1e-6, 1e11),
        (8, 1e-6, 1e6),  # less than 2 bytes
    ),
    expect=lambda n, latency, bandwidth: costs.tree_wins_below(
        n, latency=latency, bandwidth=bandwidth
    ),
    instead="Set the two formulas equal, and solve for S.",
    tolerance=1e-3,
    unit="bytes",
    mistakes=(
        Mistake(
            like=lambda n, a, b: sizes_equal(2 * math.log2(n), 2 * (n - 1), n, n, a, b),
            says="The tree's steps are log2(n), rounded up: 1,000 ranks need a tree as "
            "deep as 1,024 do.",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(
                2 * math.floor(math.log2(n)), 2 * (n - 1), n, n, a, b
            ),
            says="The tree's steps are log2(n), rounded *up*, not down.",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(
                math.ceil(math.log2(n)), 2 * (n - 1), n, n, a, b
            ),
            says="A tree has two ways, up and down: 2 · log2(n) steps, rounded up.",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(
                2 * math.ceil(math.log2(n)), n - 1, n, n, a, b
            ),
            says="A ring has two halves: 2(n - 1) steps.",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(
                2 * math.ceil(math.log2(n)), 2 * n, n, n, a, b
            ),
            says="A ring has n - 1 steps in each half, not n.",
        ),
        Mistake(
            when=lambda attempt: attempt.got == 0 and attempt.args[0] == 4,
            says="With 4 ranks a tree has 4 steps, and a ring has 6: there the tree "
            "wins for small tensors. Only 2 and 3 ranks give 0.",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(
                2 * n.bit_length(), 2 * (n - 1), n, n, a, b
            ),
            says="8 ranks need 3 steps up, and (8).bit_length() is 4. It is "
            "math.ceil(math.log2(n)), or (n - 1).bit_length().",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(2 * math.log(n), 2 * (n - 1), n, n, a, b),
            says="math.log is the natural logarithm. In each step up the ranks are "
            "halved, so it is math.log2, rounded up.",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(
                2 * math.ceil(math.log(n)), 2 * (n - 1), n, n, a, b
            ),
            says="math.log is the natural logarithm. In each step up the ranks are "
            "halved, so it is math.log2, rounded up.",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(
                2 * math.ceil(math.log2(n)), 2 * (n - 1), 1, n, a, b
            ),
            says="In a ring a message has S/n bytes, not S: a rank sends one chunk in "
            "each step.",
        ),
        Mistake(
            like=lambda n, a, b: 8 * costs.tree_wins_below(n, latency=a, bandwidth=b),
            says="Are those bits? The bandwidth is in bytes a second, so α·B is in "
            "bytes already. Or is it n times the size, with n = 8?",
        ),
        Mistake(
            like=lambda n, a, b: costs.tree_wins_below(n, latency=a, bandwidth=b) / 4,
            says="That is a quarter. Are those numbers of float32? The size in bytes "
            "was asked for. Or is n - 1 - d missing, the steps that a tree saves? With "
            "8 ranks it is 4.",
        ),
        Mistake(
            like=lambda n, a, b: (
                costs.tree_wins_below(n, latency=a, bandwidth=b) / (a * b)
            ),
            says="A limit in bytes is proportional to α·B: these are missing.",
        ),
        Mistake(
            like=lambda n, a, b: costs.tree_wins_below(n, latency=a, bandwidth=b) / b,
            says="Those are seconds. Multiplied by the bandwidth, they are bytes.",
        ),
        Mistake(
            like=lambda n, a, b: -costs.tree_wins_below(n, latency=a, bandwidth=b),
            says="The size is right, but its sign is not.",
        ),
        Mistake(
            when=lambda attempt: (
                is_rounded(attempt) or attempt.got == int(attempt.expected) != 0
            ),
            says="The size is right, but rounded. Return it as it comes out.",
        ),
        Mistake(
            like=lambda n, a, b: sizes_equal(
                2 * math.ceil(math.log2(n)), 2 * (n - 1), n - 1, n, a, b
            ),
            says="A ring's n - 1 steps of S/n bytes make (n - 1)/n · S in each half. "
            "That is less than S, also if not by much: 7/8 with 8 ranks.",
        ),
        Mistake(
            when=lambda attempt: attempt.error == "ZeroDivisionError",
            says="With two or three ranks a tree has as many steps as a ring. The "
            "result is 0 then: nothing may be divided by the difference of the steps.",
        ),
        Mistake(
            when=lambda attempt: attempt.expected == 0 and attempt.got < 0,
            says="The tree never wins here, so the result is 0.",
        ),
    ),
    otherwise="Tree: 2d(α + S/B) with d = ceil(log2 n). Ring: 2(n - 1)(α + S/(nB)). "
    "For which S are they equal?",
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

# ----------------------------------------------------------------------- spot_the_ring


def a_half_is_right(attempt):
    """On two ranks: is one chunk right?"""
    got, want = attempt.got["the tensor"], attempt.expected["the tensor"]
    pairs = zip(got.tensor_split(2), want.tensor_split(2), strict=True)
    return any(difference(one, other, 1e-5) is None for one, other in pairs)


def nothing_is_added(attempt):
    """On two ranks: has each chunk the numbers of one of them?"""
    got, own = attempt.got["the tensor"], attempt.args[0]
    other = attempt.expected["the tensor"] - own
    triples = zip(*(one.tensor_split(2) for one in (got, own, other)), strict=True)
    return all(torch.equal(g, a) or torch.equal(g, b) for g, a, b in triples)


def wrong_if_even(attempt):
    """Is it wrong though all chunks have one size?"""
    is_even = attempt.args[0].numel() % attempt.world_size == 0
    return is_even and is_wrong("the tensor")(attempt)


SPOT_THE_RING = Task(
    id="07.spot_the_ring",
    title="Spot the bugs of a ring",
    stars=2,
    where="ranks",
    run=try_all_reduce,
    cases=(
        ((12,), torch.float32, ""),
        ((5,), torch.float32, ""),
        ((100_003,), torch.float32, ""),
        ((1,), torch.float32, ""),
    ),
    inputs=any_tensor,
    world_sizes=(1, 2, 3, 4),
    expect=all_reduced_in_any_steps,
    instead="Keep isend and recv, and repair what is around them.",
    keeps_inputs=False,
    mistakes=(
        SOME_HAVE_RETURNED,
        Mistake(
            when=waits,
            says="Everybody waits: look for a `send` that all ranks make before they "
            "receive, or a `recv` before anybody has sent. isend to the right, recv "
            "from the left, wait.",
        ),
        ANOTHER_MEMORY,
        ONE_HALF,
        Mistake(
            when=lambda attempt: (
                is_wrong("the tensor")(attempt)
                and tensor_is_own(attempt)
                and attempt.got[MOST] > 0
            ),
            says="Messages were sent, but the tensor is as it was. The work was done "
            "on a copy: `F.pad`, `torch.cat` and `clone()` make one. Write the result "
            "back, `tensor.copy_(...)`.",
        ),
        Mistake(
            when=lambda attempt: wrong_if_even(attempt) and attempt.world_size > 2,
            says="It is right on two ranks, and wrong on more. Write down for 3 ranks "
            "and both loops which chunk each one sends in step 0 and step 1, and to "
            "which chunk goes what arrives. Modulo 2, +1 and -1 are the same; modulo "
            "3 they are not.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_if_even(attempt)
                and attempt.world_size == 2
                and nothing_is_added(attempt)
            ),
            says="It is wrong on two ranks already: in the end each chunk has the "
            "numbers of one rank, and none is a sum. Is what arrives added in place? "
            "(`chunk = chunk + buffer` makes another tensor.) Or was the index changed "
            "by one in place of two? What arrives belongs to the chunk before the one "
            "that is sent.",
        ),
        Mistake(
            when=lambda attempt: (
                wrong_if_even(attempt)
                and attempt.world_size == 2
                and not tensor_is_own(attempt)
                and not a_half_is_right(attempt)
            ),
            says="It is wrong on two ranks already. There the index that was given is "
            "right (modulo 2, +1 and -1 are the same). Was it changed by one in place "
            "of two, or the one in the other loop? In each step a rank sends one "
            "chunk, and what arrives belongs to the chunk before that one.",
        ),
        AS_THEY_WERE,
        PARTLY_RIGHT,
        Mistake(
            when=lambda attempt: (
                IN_A_CIRCLE.when(attempt)
                and len(attempt.args[0].chunk(attempt.world_size)) < attempt.world_size
            ),
            says="There are fewer chunks than ranks. `chunk(n)` makes pieces of "
            "ceil(size / n), and that may be fewer than n of them.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == "CollectiveMismatch"
                or "must match" in attempt.message
                or "doesn't match" in attempt.message
            ),
            says="Chunks may differ in size: the buffer must have the size of the "
            "chunk that arrives, `buffer[: len(chunk)]` for example.",
        ),
        CHUNKS_TOO_LARGE,
        *OF_TRAFFIC,
        *OF_MESSAGES,
    ),
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

TASKS = (
    PREDICT_BYTES,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_REDUCE,
    SPOT_THE_RING,
    TREE_WINS,
)
