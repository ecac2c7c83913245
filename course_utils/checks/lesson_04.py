"""Lesson 04, processes and collectives: the tasks of its exercise."""

import contextlib
import math
import multiprocessing.context
import multiprocessing.reduction
import os
import pickle
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from course_utils.checks.mistakes import first_wrong, is_wrong, says, wrong_in
from course_utils.checks.task import ANYTHING, Mistake, Such, Task
from course_utils.messages import P2P, in_steps, put_back
from course_utils.notebook.compare import difference, plain
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.messages import (
    INSTEAD,
    NO_SUCH_RANK,
    NOT_WAITED_FOR,
    OTHER_SIZE,
    POLLED,
    STILL_BUSY,
    TO_ITSELF,
    WAITED,
    all_waited_for,
    collectives_in,
    told_by_all,
    waits,
    watched,
)
from course_utils.tasks.under_way import Log

# ------------------------------------------------------------------- by messages


def came_by_messages(calls, got, own):
    """Has this rank received a message, or did it need none?

    What a rank has of others may also come through a file or a store.
    """
    received = any(call.kind == "recv" for call in calls)
    alone = dist.get_world_size() == 1
    return received or alone or difference(got, own, 0.0) is None


BY_MESSAGES = "what it returned came by messages"

NOT_BY_MESSAGES = Mistake(
    when=lambda attempt: (
        not any(is_wrong(name)(attempt) for name in attempt.got if name != BY_MESSAGES)
    ),
    says="This rank has received nothing, and yet it has what was another rank's. Use "
    "messages: send and recv, or isend and irecv.",
)


def result_of(attempt):
    """What the function returned: the first part of its report."""
    return next(iter(attempt.got.values()))


NO_TENSOR = (
    Mistake(
        when=lambda attempt: (
            "but got <class 'int'>" in attempt.message
            or type(result_of(attempt)) is int
        ),
        says="That is the number that recv returns: the rank of the sender. The "
        "message is in the tensor that recv was given: use that one.",
    ),
    Mistake(
        when=lambda attempt: result_of(attempt) is True,
        says="That is what wait() returns. The message is in the tensor that irecv was "
        "given: use that one.",
    ),
)

# --------------------------------------------------------------------- predict_messages


def pair(attempt):
    """The two numbers of the answer, or []."""
    numbers = torch.as_tensor(attempt.got).tolist()
    return numbers if len(numbers) == 2 else []


PREDICT_MESSAGES = Task(
    id="04.predict_messages",
    title="Predict the messages",
    stars=1,
    where="value",
    expect=lambda: (2 * 5, 2 * 5 * 4000),
    mistakes=(
        Mistake(
            like=lambda: (5, 5 * 4000),
            says="That is the reduce. Afterwards rank 0 must give the sum to the other "
            "five.",
        ),
        Mistake(
            like=lambda: (2 * 6, 2 * 6 * 4000),
            says="Rank 0 sends nothing to itself: five ranks send, and five receive.",
        ),
        Mistake(
            like=lambda: (10, 10 * 1000),
            says="The messages are right. But a float32 has 4 bytes: a message of "
            "1,000 of them is larger.",
        ),
        Mistake(
            like=lambda: (10, 4000),
            says="The messages are right. The bytes are those of all messages "
            "together, not of one.",
        ),
        Mistake(
            like=lambda: (10, 5 * 4000),
            says="The messages are right. The sums that rank 0 sends out count, too.",
        ),
        Mistake(
            like=lambda: (6 * 5, 6 * 5 * 4000),
            says="That is every rank sending to every other. Here all goes through "
            "rank 0.",
        ),
        Mistake(
            when=lambda attempt: pair(attempt)[::-1] == [10, 40_000],
            says="First the messages, then the bytes.",
        ),
        Mistake(
            when=lambda attempt: pair(attempt)[0] == 10,
            says="The messages are right. Each one is a whole tensor: 1,000 numbers of "
            "4 bytes.",
        ),
        Mistake(
            when=lambda attempt: pair(attempt)[1] == 40_000,
            says="The bytes are right. How many messages are they in?",
        ),
        Mistake(
            when=lambda attempt: pair(attempt) != [],
            says="Count first the messages to rank 0, then those from it. Each has all "
            "the bytes of a tensor.",
        ),
    ),
    otherwise="Two numbers: how many messages all ranks send together, and how many "
    "bytes these have together.",
    hints=(
        "Two parts: all the others send to rank 0, then rank 0 sends to all the "
        "others. How many ranks are the others?",
        "Every message is a whole tensor. A float32 has 4 bytes.",
        "With 3 ranks it goes like this:\n"
        "  to rank 0      2 messages of 4000 bytes\n"
        "  from rank 0    2 messages of 4000 bytes\n"
        "  answer = (4, 16000)",
    ),
)

# ----------------------------------------------------------------------- spot_the_tuple


CAN_FORK = "fork" in mp.get_all_start_methods()
MEETING = 3.0 if CAN_FORK else 20.0  # seconds that workers wait for each other
LATE = 0.05  # seconds that a worker takes longer than the next one


class Note:
    """A worker that leaves a file: who it was told to be, and in which process.

    It first waits for the other workers.
    """

    def __init__(self, folder, n):
        self.folder, self.n = folder, n

    def __call__(self, *given):
        if len(given) != 2:
            raise TypeError(
                f"worker(process, n) takes 2 arguments, but it got {len(given)}: "
                f"{', '.join(map(repr, given))}"
            )
        with contextlib.suppress(OSError):  # nobody has waited: the folder is gone
            handle, begun = tempfile.mkstemp(dir=self.folder)
            met = self.all_are_there()
            time.sleep(
                LATE * (self.n - given[0] - 1) if given[0] in range(self.n) else 0
            )
            with open(handle, "wb") as file:
                pickle.dump(("{!r} {!r}".format(*given), os.getpid(), met), file)
            os.rename(begun, begun + DONE)

    def all_are_there(self):
        end = time.monotonic() + MEETING
        while len(os.listdir(self.folder)) < self.n:
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True


DONE = ".done"


@contextlib.contextmanager
def quick_starts():
    """Fork where the learner's code asks for spawn, if there is a fork: seconds less.

    All ways to start processes take their context from one table.
    """
    fork = multiprocessing.context.ForkProcess

    class Process(fork):
        @staticmethod
        def _Popen(process):
            refuse_what_has_no_name(process)
            return fork._Popen(process)

    class Context(multiprocessing.context.ForkContext):
        pass

    Context.Process = Process
    contexts = multiprocessing.context._concrete_contexts
    originals = dict(contexts)
    contexts.update({name: Context() for name in originals if name != "fork"})
    try:
        yield
    finally:
        contexts.update(originals)


def refuse_what_has_no_name(process):
    """Raise as spawn does where it cannot send a function by its name."""
    for part in (process._target, *process._args):
        try:
            if callable(part):
                multiprocessing.reduction.ForkingPickler.dumps(part)
        except pickle.PicklingError as error:
            # What the learner has in a file has come to this rank as a copy of it.
            if "not the same object" not in str(error):
                raise


def try_start(answer, n):
    """Call it, and read what its workers have noted."""
    starts = quick_starts() if CAN_FORK else contextlib.nullcontext()
    # Workers that nobody waits for may still write into it.
    place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with place as folder, starts, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        try:
            answer(Note(folder, n), n)
        except mp.ProcessRaisedException as error:
            # Its first lines are a traceback; what it is about is in the last one.
            last = str(error).strip().splitlines()[-1]
            text = f"process {error.error_index} ended with {last}"
            short = mp.ProcessRaisedException(text, error.error_index, error.error_pid)
            raise short.with_traceback(error.__traceback__) from None
        notes = []
        for name in os.listdir(folder):
            if name.endswith(DONE):
                with open(os.path.join(folder, name), "rb") as file:
                    notes.append(pickle.load(file))
    pids = [pid for _, pid, _ in notes]
    return {
        "what the workers were given": sorted(given for given, _, _ in notes),
        "they ran in processes of their own": os.getpid() not in pids,
        "each ran in another process": len(set(pids)) == len(pids),
        "they ran at the same time": all(met for _, _, met in notes),
    }


def started(n):
    return {
        "what the workers were given": [f"{i} {n}" for i in range(n)],
        "they ran in processes of their own": True,
        "each ran in another process": True,
        "they ran at the same time": True,
    }


SPOT_THE_TUPLE = Task(
    id="04.spot_the_tuple",
    title="Spot the tuple",
    stars=1,
    run=try_start,
    cases=((1,), (2,), (3,)),
    expect=started,
    seconds=60.0,  # without fork, each process imports torch
    mistakes=(
        Mistake(
            when=says("must be an iterable, not int"),
            says="`(n)` is the number n, in parentheses. What makes a tuple is the "
            "comma.",
        ),
        Mistake(
            when=says("'int' object is not iterable"),
            says="n is a number, and has no elements that `tuple(...)` or a loop could "
            "go through. A tuple of one element is written with a comma.",
        ),
        Mistake(
            when=says("Can't pickle", "Can't get local object"),
            says="spawn sends a function by its name. A lambda, an inner function and "
            "one from a notebook cell have no name under which a new process finds "
            "them. Start `worker` itself, and give it n in `args`.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == "TypeError"
                and "worker(process, n) takes" in attempt.message
            ),
            says="The worker ran in the process that was to start it: with "
            "parentheses, `worker(n)` is a call. Hand over the function itself, and n "
            "in `args`.",
        ),
        Mistake(
            when=says("worker(process, n) takes 2 arguments"),
            says="Count the arguments of the worker: spawn itself puts the number of "
            "the process first. `args` holds what comes after it: n, once.",
        ),
        Mistake(
            when=says("'NoneType' object is not callable"),
            says="What was handed over is None: `worker(...)` with parentheses is a "
            "call, and that returns nothing. Hand over the function itself, and n in "
            "`args`.",
        ),
        Mistake(
            when=lambda attempt: not attempt.got["what the workers were given"],
            says="No worker has come to its end when your function returns. Were n "
            "of them started, and did an error get lost? spawn waits for them with "
            "join=True, its default.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["what the workers were given"]) == 1 != attempt.args[0]
            ),
            says="One worker has come to its end when your function returns. `nprocs` "
            "says how many processes are started. And wait for all of them.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.got["they ran in processes of their own"] is False
            ),
            says="The worker ran in the process that called it. Start processes: "
            "mp.spawn.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["each ran in another process"] is False,
            says="One process ran several workers: a pool uses its processes again. "
            "Workers that talk to each other must all run at the same time.",
        ),
        Mistake(
            when=lambda attempt: (
                len(attempt.got["what the workers were given"]) < attempt.args[0]
            ),
            says="Not every worker has come to its end when your function returns. "
            "Start n, and wait for all of them.",
        ),
        Mistake(
            when=wrong_in("they ran at the same time"),
            says="The workers ran one after the other. Here each waits a while for the "
            "others, as workers do that talk to each other. Start all, then wait for "
            "all.",
        ),
    ),
    otherwise="Each of n processes must run worker(i, n), with its own i from 0 to "
    "n - 1.",
    hints=(
        "Ask Python: `type((3))`. And `type((3,))`? (`args=(n)` and `args=n` are the "
        "same to Python, and so to the check.)",
        "spawn calls worker(i, *args). The star unpacks something with elements, and a "
        "number has none.",
        "A tuple of one element ends with a comma:\n  mp.spawn(worker, args=(...,), "
        "nprocs=...)",
    ),
)

# ------------------------------------------------------------------------ spot_the_wait


def try_hand_out(answer, rows):
    """Rank 0 is the first to call, so its sends are under way when the others come."""
    own = rows[dist.get_rank()].clone()
    with watched() as calls:
        if dist.get_rank() > 0:
            time.sleep(0.05)
        row = answer(rows)
    received = sum(call.nbytes for call in calls if call.kind == "recv")
    return {
        "row": row,
        WAITED: all_waited_for(calls),
        BY_MESSAGES: came_by_messages(calls, plain(row), own),
        ONE_ROW: received < 1.5 * own.nbytes + ENVELOPE,
    }


ONE_ROW = "each rank was sent its row alone"
ENVELOPE = 5000  # bytes, around a row that is sent as an object


def handed_out(rank, inputs, row=None):
    (rows,) = inputs[0]
    return {
        "row": rows[rank if row is None else row],
        WAITED: True,
        BY_MESSAGES: True,
        ONE_ROW: True,
    }


SPOT_THE_WAIT = Task(
    id="04.spot_the_wait",
    title="Spot the missing wait",
    stars=2,
    where="ranks",
    run=try_hand_out,
    cases=(3, 1, 100_000),  # how long a row is
    inputs=lambda size, rank, world_size: (whole_numbers((world_size, size), rank),),
    world_sizes=(1, 2, 3, 4),
    expect=handed_out,
    instead="Keep isend and irecv (or send and recv), and repair what is around them.",
    mistakes=(
        *NO_TENSOR,
        Mistake(
            when=lambda attempt: attempt.rank > 0 and attempt.got[WAITED] is False,
            says="irecv returns at once, whether the data has come or not. Its "
            "request must be waited for before the row is read or returned.",
        ),
        Mistake(
            when=lambda attempt: attempt.got[WAITED] is False,
            says="isend returns at once, and what it sends may still be read later. "
            "Wait for the request before the buffer is written again, and before the "
            "function ends.",
        ),
        NOT_BY_MESSAGES,
        Mistake(
            when=wrong_in(ONE_ROW),
            says="The row is right, but this rank was sent more than its row. Send row "
            "r to rank r, and nothing else.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.rank > 0
                and any(
                    difference(attempt.got["row"], row, 0.0) is None
                    for row in attempt.args[0]
                )
            ),
            says="That is a row of this rank's own tensor. What counts is rank 0's.",
        ),
        Mistake(
            like=lambda rank, inputs: handed_out(rank, inputs, row=0),
            says="Every rank has row 0: what was sent is what stood in the buffer at "
            "last. It is one buffer for all messages, and it must not be written while "
            "a message from it is under way: wait inside the loop, or give each "
            "message memory of its own.",
        ),
        Mistake(
            when=lambda attempt: attempt.world_size > 2 and attempt.rank > 0,
            says="A row that is not this rank's. Is a buffer written again while a "
            "message from it is under way?",
        ),
        Mistake(
            when=waits,
            says="A recv needs its send, and the other way round. If nobody keeps the "
            "request of an isend and waits for it, gloo may drop the message.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == "UnboundLocalError" and attempt.world_size == 1
            ),
            says="One rank alone has nobody to send to: the loop does not run once, "
            "and what is made in it is not there behind it. Is one request waited for "
            "behind the loop? Each needs its wait: wait inside, or keep all in a list.",
        ),
        POLLED,
        TO_ITSELF,
    ),
    otherwise="Row r of rank 0's tensor is for rank r; rank 0 keeps row 0.",
    hints=(
        "isend and irecv return at once. What do they return, and what is it for?",
        "Two waits are missing. One rank reads what may not have come yet; the other "
        "writes into a buffer from which a message may still be under way.",
        "Both return a request:\n"
        "  request = dist.isend(...)\n"
        "  request.wait()   # from here on the buffer may be written again\n"
        "or send `rows[other]` itself, and wait for all requests at the end.",
    ),
)

# ----------------------------------------------------------------------------- exchange


def try_it(answer, tensor, what):
    """The result, and a report on it, under this name: did it come by messages?"""
    own = tensor.clone()
    with watched() as calls:
        result = answer(tensor)
    return result, {
        what: result,
        WAITED: all_waited_for(calls),
        BY_MESSAGES: came_by_messages(calls, plain(result), own),
    }


NEW = "it is a new tensor"
NOT_NEW = Mistake(
    when=wrong_in(NEW),
    says="The sum is right, but it is in the tensor that was given. Whoever called the "
    "function may still need that one: return a new tensor. `clone()` makes one.",
)


def is_new(result, tensor):
    """Has it memory of its own?"""
    if not isinstance(result, torch.Tensor):
        return True
    return result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


LARGE = 10**9  # float32 has multiples of 64 only, from here on


def went_through_float32(attempt):
    """Are these whole numbers what float32 has left of the right ones?"""
    part = first_wrong(attempt)
    got, want = attempt.got[part], attempt.expected[part]
    return got.dtype == want.dtype == torch.int64 and not (got % 64).any()


def is_float32(attempt):
    """Are these floats, where whole numbers were to come out?"""
    part = first_wrong(attempt)
    got, want = attempt.got[part], attempt.expected[part]
    return got.dtype == torch.float32 and want.dtype == torch.int64


AS_FLOAT32 = Mistake(
    when=is_float32,
    says="Its dtype is float32, and the tensors that were given are int64. float32 has "
    "no room for all their digits. `torch.empty(shape)` and `torch.zeros(shape)` are "
    "float32, and a division makes floats, too. `torch.empty_like(tensor)` and "
    "`torch.zeros_like(tensor)` have the dtype of the tensor.",
)
ROUNDED = Mistake(
    when=went_through_float32,
    says="These are int64 numbers that went through float32, which has no room for all "
    "their digits. Buffers need the dtype of the tensor: `torch.empty_like(tensor)`.",
)


def try_exchange(answer, tensor):
    return try_it(answer, tensor, "received")[1]


def exchanged(rank, inputs, distance=-1):
    (tensor,) = inputs[(rank + distance) % len(inputs)]
    return {"received": tensor, WAITED: True, BY_MESSAGES: True}


def a_tensor(case, rank, world_size):
    """int64 numbers are large: on a way through float32 they are rounded."""
    shape, dtype = case
    numbers = whole_numbers(shape, rank).to(dtype)
    return (numbers + LARGE if dtype == torch.int64 else numbers,)


EXCHANGE = Task(
    id="04.exchange",
    title="A safe exchange",
    stars=2,
    where="ranks",
    run=try_exchange,
    cases=(
        ((3,), torch.float32),
        ((2, 2), torch.int64),
        ((), torch.float64),
        ((100_000,), torch.float32),
    ),
    inputs=a_tensor,
    # One rank comes last: who is stuck in a circle of two must hear of that first.
    world_sizes=(2, 3, 4, 1),
    expect=exchanged,
    instead="Use send and recv, or isend and irecv.",
    mistakes=(
        Mistake(
            when=lambda attempt: waits(attempt) and attempt.returned,
            says="Not all ranks wait, some have returned. Every rank sends to rank + 1 "
            "and receives from rank - 1, once. And is the request of each isend waited "
            "for before the function returns? gloo may drop a message that nobody "
            "waits for.",
        ),
        Mistake(
            when=waits,
            says="Everybody waits: around the circle each rank waits for the next one. "
            "In send, or in the wait() of an isend? If all send first, nobody "
            "receives. Let one part of the ranks receive first, or start an isend, "
            "receive, and wait for its request last. In recv? Then nobody sends to it. "
            "Whoever sends to rank + 1 must receive from rank - 1, and not all may "
            "receive first. (And keep the request of an isend: gloo may drop a message "
            "that nobody waits for.)",
        ),
        Mistake(
            when=lambda attempt: attempt.got["received"] is None,
            says="It returned None. recv fills the tensor that it is given: return "
            "that one.",
        ),
        *NO_TENSOR,
        NOT_WAITED_FOR,
        NOT_BY_MESSAGES,
        AS_FLOAT32,
        ROUNDED,
        Mistake(
            like=lambda rank, inputs: exchanged(rank, inputs, distance=0),
            says="That is the rank's own tensor. Receive into a new one, and return "
            "that.",
        ),
        Mistake(
            like=lambda rank, inputs: exchanged(rank, inputs, distance=1),
            says="That is the tensor of the next rank. Send to the next, and receive "
            "from the previous.",
        ),
        Mistake(
            like=lambda rank, inputs: exchanged(rank, inputs, distance=-rank),
            says="Every rank has rank 0's tensor. Each gets that of the rank before "
            "it. (Or was it received into the tensor that was still being sent?)",
        ),
        POLLED,
        TO_ITSELF,
        NO_SUCH_RANK,
        STILL_BUSY,
        OTHER_SIZE,
    ),
    otherwise="Rank r returns the tensor of rank r - 1, and rank 0 that of the last "
    "rank. Is it received into memory of its own? A tensor that is being sent must not "
    "be written before the `wait()`.",
    hints=(
        "If every rank sends first, everybody waits for somebody to receive. Who could "
        "receive first? And with one rank: what is there to send?",
        "isend starts a send and does not wait. So start it, receive, and wait for the "
        "send at the end. (Or let even ranks send first and odd ranks receive first.)",
        "Four lines, and a case for one rank:\n"
        "  received = torch.empty_like(tensor)\n"
        "  request = dist.isend(tensor, dst=...)\n"
        "  dist.recv(received, src=...)\n"
        "  request.wait()\n"
        "  return received",
    ),
)

# --------------------------------------------------------------------------- all_reduce


def try_all_reduce(answer, tensor):
    result, report = try_it(answer, tensor, "sum")
    return report | {NEW: is_new(result, tensor)}


def returned(what):
    """A reference for the task: it returns ``what(rank, tensors)``, by messages."""

    def reference(rank, inputs):
        tensors = [tensor for (tensor,) in inputs]
        result = what(rank, tensors)
        return {"sum": result, WAITED: True, BY_MESSAGES: True, NEW: True}

    return reference


def total(rank, tensors):
    return sum(tensors)


def own(rank, tensors):
    return tensors[rank]


def partner(rank, tensors):
    """The sum of two ranks: 0 and 1, 2 and 3, ..."""
    return sum(tensors[r] for r in (rank, rank ^ 1) if r < len(tensors))


def with_previous(rank, tensors):
    return tensors[rank] + tensors[rank - 1]


def with_both_neighbours(rank, tensors):
    return with_previous(rank, tensors) + tensors[(rank + 1) % len(tensors)]


def running_sums(rank, tensors):
    """Around the circle, n - 1 times: add the sum that the previous rank has by now."""
    sums = list(tensors)
    for _ in tensors[1:]:
        sums = [sums[r] + sums[r - 1] for r in range(len(sums))]
    return sums[rank]


def up_to_here(rank, tensors):
    """The sum of this rank and those before it."""
    return sum(tensors[: rank + 1])


def on_rank_0_only(rank, tensors):
    return tensors[rank] if rank else sum(tensors)


def sum_and_own_again(rank, tensors):
    """The others add their own tensor to the sum that rank 0 sends them."""
    return sum(tensors) + (tensors[rank] if rank else 0)


def by_partners(rank, tensors):
    """Each exchanges its sum with rank ^ 1, rank ^ 2, rank ^ 4, where there is one."""
    sums, distance = list(tensors), 1
    while distance < len(sums):
        partners = [r ^ distance for r in range(len(sums))]
        sums = [
            sums[r] + sums[p] if p < len(sums) else sums[r]
            for r, p in enumerate(partners)
        ]
        distance *= 2
    return sums[rank]


def ranks_of_senders(rank, tensors):
    """Rank 0 adds what recv returns, and sends the result out."""
    return tensors[0] + sum(range(len(tensors)))


ALL_REDUCE = Task(
    id="04.all_reduce",
    title="All-reduce",
    stars=2,
    where="ranks",
    run=try_all_reduce,
    cases=(
        ((3,), torch.float32),
        ((2, 3), torch.int64),
        ((), torch.float64),
        ((100_000,), torch.float32),
    ),
    inputs=a_tensor,
    # 6 is neither a power of two nor one more. On 3 ranks wrong sums differ from each
    # other; on 2 many are alike, and on 1 most are right.
    world_sizes=(3, 2, 6, 1),
    expect=returned(total),
    forbids=("all_reduce",),
    instead=INSTEAD,
    mistakes=(
        Mistake(
            when=lambda attempt: attempt.error == "" and attempt.got["sum"] is None,
            says="It returned None. Return the sum, in a tensor of its own; the "
            "argument stays as it is.",
        ),
        *NO_TENSOR,
        NOT_WAITED_FOR,
        NOT_BY_MESSAGES,
        NOT_NEW,
        AS_FLOAT32,
        ROUNDED,
        Mistake(
            like=returned(own),
            says="That is the rank's own tensor: nothing was added, or the sum was not "
            "returned.",
        ),
        Mistake(
            like=returned(lambda rank, tensors: sum(tensors) / len(tensors)),
            says="That is the mean. An all-reduce with SUM adds up and does not "
            "divide.",
        ),
        Mistake(
            like=returned(lambda rank, tensors: sum(tensors) - tensors[rank]),
            says="The rank's own tensor is missing in its sum. Begin with "
            "`tensor.clone()`.",
        ),
        Mistake(
            like=returned(lambda rank, tensors: sum(tensors[1:])),
            says="Rank 0's own tensor is missing in the sum. There, begin with "
            "`tensor.clone()`.",
        ),
        Mistake(
            like=returned(lambda rank, tensors: sum(tensors) + tensors[rank]),
            says="The rank's own tensor is in it twice.",
        ),
        Mistake(
            like=returned(sum_and_own_again),
            says="Rank 0 has the sum. The others have their own tensor in it twice: "
            "what comes back to them is the whole sum, so do not add to it.",
        ),
        Mistake(
            like=returned(ranks_of_senders),
            says="That is rank 0's tensor plus the ranks of the senders: what recv "
            "returns. The message is in the tensor that recv was given: add that one.",
        ),
        Mistake(
            like=returned(lambda rank, tensors: sum(tensors) * len(tensors)),
            says="That is the sum, times the number of ranks: sums were added up "
            "again. Add up what the ranks had at the beginning, once.",
        ),
        Mistake(
            like=returned(partner),
            says="That is the sum of two ranks. It must be the sum of all.",
        ),
        Mistake(
            like=returned(by_partners),
            says="Rank 1 has the sum of ranks 0 and 1 only. If rank 0 collects for "
            "all: it must send the sum out when it has added the last tensor, in a "
            "second loop. If partners at the distances 1, 2, 4, ... add up: that makes "
            "the sum where the number of ranks is a power of two, and with 3 ranks "
            "some have no partner.",
        ),
        Mistake(
            like=returned(running_sums),
            says="You pass on the running sum, so tensors are counted more than once. "
            "Pass on what you received last.",
        ),
        Mistake(
            like=returned(with_previous),
            says="That is the sum of this rank and the one before it. It must be the "
            "sum of all: pass on what you received, not your own again, and n - 1 "
            "times.",
        ),
        Mistake(
            like=returned(with_both_neighbours),
            says="That is the sum of this rank and its neighbours on both sides. It "
            "must be the sum of all.",
        ),
        Mistake(
            like=returned(up_to_here),
            says="That is the sum of this rank and those before it: only the last one "
            "has it all. The sum has to go back to the others.",
        ),
        Mistake(
            like=returned(on_rank_0_only),
            says="Rank 0 has the sum. It must be sent back to all the others.",
        ),
        Mistake(
            like=returned(lambda rank, tensors: tensors[0] + tensors[-1]),
            says="That is rank 0's tensor plus that of the last rank: what came before "
            "is lost. Each recv overwrites its buffer, so add each one to the sum "
            "before the next one comes: `+=`, inside the loop.",
        ),
        *(
            Mistake(
                like=returned(lambda rank, tensors, which=which: tensors[which]),
                says="That is the tensor of one rank alone. Each recv overwrites its "
                "buffer: add it to the sum before the next one comes.",
            )
            for which in (0, -1)
        ),
        Mistake(
            when=waits,
            says="Every send needs a rank that receives it, and every recv one that "
            "sends. Follow the code as rank 0, as rank 1 and as the last rank: where "
            "does each one stand? If all send first, nobody receives. And a message to "
            "a rank that does not exist has no receiver. (And keep the request of an "
            "isend: gloo may drop a message that nobody waits for.)",
        ),
        POLLED,
        TO_ITSELF,
        NO_SUCH_RANK,
        STILL_BUSY,
        OTHER_SIZE,
    ),
    otherwise="Every rank returns the sum of the tensors of all ranks, each once. Has "
    "each message that is under way a buffer of its own?",
    hints=(
        "Begin with two ranks: each sends its tensor and receives the other's. Then "
        "think of one rank that collects for all.",
        "The simplest way is a reduce and a broadcast: all send to rank 0, which adds "
        "up, and then sends the sum to each of the others.",
        "On rank 0 two loops over the other ranks, on the others two calls:\n"
        "  result = tensor.clone()\n"
        "  if rank == 0:\n"
        "      buffer = torch.empty_like(tensor)\n"
        "      for other in range(1, world_size):\n"
        "          dist.recv(buffer, src=...)\n"
        "          result += ...\n"
        "      for other in range(1, world_size):\n"
        "          dist.send(...)\n"
        "  else:\n"
        "      dist.send(...)\n"
        "      dist.recv(...)\n"
        "  return result",
    ),
)

# ---------------------------------------------------------------------------- broadcast


def try_broadcast(answer, tensor, src):
    with watched() as calls:
        answer(tensor, src)
    held = {"tensor": tensor.clone(), WAITED: all_waited_for(calls)}
    logs = told_by_all(calls)
    if logs is None:  # a rank has not come back: the check will name it
        return held | {"messages": None, "steps": None}
    try:
        messages = in_steps(logs)
    except ValueError:
        return held | {"messages": "some without a recv", "steps": None}
    steps = max((message.step for message in messages), default=0)
    return held | {"messages": len(messages), "steps": steps}


def steps_of_a_tree(n):
    return math.ceil(math.log2(n))


def broadcasted(rank, inputs):
    n, (_, src) = len(inputs), inputs[0]
    most = steps_of_a_tree(n)
    return {
        "tensor": inputs[src][0],
        WAITED: True,
        "messages": Such(f"{n - 1}", lambda number: number in (None, n - 1)),
        "steps": Such(f"at most {most}", lambda s: s is None or s <= most),
    }


BROADCAST = Task(
    id="04.broadcast",
    title="Broadcast by a tree",
    stars=3,
    where="ranks",
    run=try_broadcast,
    cases=(
        (((4,), torch.float32), 0),
        (((2, 3), torch.int64), 1),
        (((3,), torch.float32), -1),
        (((50_000,), torch.float32), 2),
    ),
    inputs=lambda case, rank, world_size: (
        *a_tensor(case[0], rank, world_size),
        case[1] % world_size,
    ),
    world_sizes=(1, 2, 3, 5, 8),
    expect=broadcasted,
    forbids=("broadcast",),
    instead=INSTEAD,
    keeps_inputs=False,
    mistakes=(
        *NO_TENSOR,
        Mistake(
            when=lambda attempt: attempt.args[1] != 0 and TO_ITSELF.when(attempt),
            says="A rank cannot send to itself. Is the number a place, or a rank? Back "
            "from a place: rank = (place + src) % world_size.",
        ),
        NOT_WAITED_FOR,
        ROUNDED,
        Mistake(
            when=lambda attempt: (
                attempt.error == ""
                and attempt.args[1] in attempt.right
                and difference(attempt.got["tensor"], attempt.args[0], 0.0) is None
                and attempt.got["messages"] == attempt.world_size - 1
                and is_wrong("tensor")(attempt)
            ),
            says="The messages were sent, but the tensor is as it was. Receive into "
            "the tensor that was given, in place, as dist.broadcast does.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == ""
                and attempt.rank == attempt.args[1]
                and is_wrong("tensor")(attempt)
            ),
            says="The tensor of rank src itself has changed: it is the one that all "
            "others are to get.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["messages"] == 0,
            says="No message was sent. Use send and recv, or isend and irecv: every "
            "rank but src must receive once.",
        ),
        Mistake(
            when=lambda attempt: attempt.args[1] != 0 and is_wrong("tensor")(attempt),
            says="src need not be rank 0. Build the tree for places, with src at place "
            "0: place = (rank - src) % world_size, and back: rank = (place + src) % "
            "world_size.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.error == ""
                and difference(attempt.got["tensor"], attempt.args[0], 0.0) is None
                and is_wrong("tensor")(attempt)
            ),
            says="Nothing has come to this rank. Every rank but src must receive once.",
        ),
        Mistake(
            when=lambda attempt: (
                not is_wrong("tensor")(attempt)
                and attempt.got["messages"] == "some without a recv"
            ),
            says="Every rank has the tensor, but some messages were sent that nobody "
            "received: look at the last step, where not every place has a partner.",
        ),
        Mistake(
            when=lambda attempt: attempt.got["messages"] < attempt.world_size - 1,
            says="Fewer messages were sent than there are ranks that need the tensor: "
            "every rank but src must receive once. Does the loop end too early?",
        ),
        Mistake(
            when=lambda attempt: (
                not is_wrong("tensor")(attempt) and is_wrong("messages")(attempt)
            ),
            says="Every rank has the tensor, but with more messages than needed: each "
            "rank except src needs one.",
        ),
        Mistake(
            when=lambda attempt: (
                is_wrong("steps")(attempt)
                and attempt.got["steps"] == attempt.world_size - 1
            ),
            says="Every rank has the tensor, but it took as many steps as there are "
            "other ranks: in most of them only one rank sends. Let every rank that has "
            "the tensor already send it on, so that their number doubles in each step.",
        ),
        Mistake(
            when=is_wrong("steps"),
            says="Every rank has the tensor, but it took too many steps. In each step, "
            "every rank that has it should send it to one that has not: 1, 2, 4, 8 "
            "ranks have it. What a rank sends leaves in the order of its calls, with "
            "isend too: first to the one that hands on to the most others.",
        ),
        Mistake(
            when=lambda attempt: waits(attempt) and attempt.args[1] != 0,
            says="With src = 0 it went through, with this src it does not. Build the "
            "tree for places, with src at place 0: place = (rank - src) % world_size, "
            "and back: rank = (place + src) % world_size. (And keep the request of an "
            "isend: gloo may drop a message that nobody waits for.)",
        ),
        Mistake(
            when=waits,
            says="Every send needs its recv. Write down for 3 and for 5 ranks who "
            "sends to whom in each step: a place may have no partner in the last one, "
            "and a rank must receive before it sends. (And keep the request of an "
            "isend: gloo may drop a message that nobody waits for.)",
        ),
        POLLED,
        TO_ITSELF,
        NO_SUCH_RANK,
        STILL_BUSY,
        OTHER_SIZE,
    ),
    otherwise="Afterwards every rank's tensor holds what rank src's did.",
    hints=(
        "On 8 ranks with src = 0: who has the tensor after the first message? How many "
        "can have it one step later, if both of them send?",
        "In step k, the places below 2^k send to the place 2^k further on, if there is "
        "one. A rank's place is (rank - src) % world_size.",
        "One loop in which the distance doubles:\n"
        "  place, distance = (rank - src) % world_size, 1\n"
        "  while distance < world_size:\n"
        "      if place < distance and place + distance < world_size:\n"
        "          dist.send(tensor, dst=(rank + distance) % world_size)\n"
        "      elif distance <= place < 2 * distance:\n"
        "          dist.recv(...)\n"
        "      distance *= 2",
    ),
)

# --------------------------------------------------------------------------- even_group

COUNTS, MADE = "groups that ranks 0, 1, ... have counted", "a group was made"
USED = "groups in which this rank communicated"
ENDED = "every all_reduce waited for"


@contextlib.contextmanager
def groups_noted():
    """Note the ranks of each group in which this rank sends, or calls a collective."""
    used = []
    names = [*collectives_in(dist.ProcessGroup), *P2P]

    def noting(original):
        def noted(group, *args, **kwargs):
            used.append(dist.get_process_group_ranks(group))
            return original(group, *args, **kwargs)

        return noted

    with put_back(dist.ProcessGroup, names) as originals:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, noting(original))
        yield used


def try_even_group(answer, tensor):
    """Call it, and ask every rank how many groups it has counted since."""
    world = dist.distributed_c10d._world
    before = world.group_count
    with groups_noted() as used, Log() as log:  # it holds back what nobody waits for
        result = answer(tensor)
    counts = told_by_all(world.group_count - before)
    made = counts is None or any(counts)
    return {
        "sum": result,
        COUNTS: counts,
        MADE: made,
        USED: used,
        NEW: is_new(result, tensor),
        ENDED: all(sent.handed_over for sent in log.sent),
    }


SAME = Such(
    "the same number on all ranks", lambda counts: counts is None or one_value(counts)
)


def one_value(counts):
    return len(set(counts)) == 1


ALIKE = Such(
    "groups of even ranks only", lambda used: not any(r % 2 for g in used for r in g)
)


def even_sum(rank, inputs):
    is_even = rank % 2 == 0
    return {
        "sum": sum(x for (x,) in inputs[::2]) if is_even else None,
        COUNTS: SAME,
        MADE: True,
        USED: ALIKE if is_even else ANYTHING,
        NEW: True,
        ENDED: True,
    }


def sum_of_all(rank, inputs):
    """On all ranks, after one group."""
    total, everybody = sum(x for (x,) in inputs), list(range(len(inputs)))
    return {
        "sum": total,
        COUNTS: [1] * len(inputs),
        MADE: True,
        USED: [everybody],
        NEW: True,
        ENDED: True,
    }


def only_the_sum_is_wrong(attempt):
    return is_wrong("sum")(attempt) and one_value(attempt.got[COUNTS])


EVEN_GROUP = Task(
    id="04.even_group",
    title="Spot the group",
    stars=2,
    where="ranks",
    run=try_even_group,
    cases=(((3,), torch.float32), ((2, 2), torch.int64)),
    inputs=a_tensor,
    world_sizes=(1, 2, 3, 4, 5),
    expect=even_sum,
    mistakes=(
        Mistake(
            when=lambda attempt: attempt.got[ENDED] is False,
            says="With async_op=True, all_reduce returns at once, and the sum is there "
            "later. Call `wait()` on what it returns before the sum is used or "
            "returned.",
        ),
        NOT_NEW,
        Mistake(
            when=lambda attempt: (
                not is_wrong("sum")(attempt) and is_wrong(COUNTS)(attempt)
            ),
            says="The sum is right, but some ranks have counted more groups than "
            "others, and the count is a group's name: the next group that all ranks "
            "make will hang. Every rank of the job must call new_group, members or "
            "not. (In PyTorch 2.14, use_local_synchronization=True does not help.)",
        ),
        Mistake(
            when=lambda attempt: (
                not is_wrong("sum")(attempt) and attempt.got[MADE] is False
            ),
            says="The sum is right, but there is no group any more. Keep it: in a "
            "group, the odd ranks need not take part in the sum.",
        ),
        Mistake(
            when=lambda attempt: (
                not is_wrong("sum")(attempt) and is_wrong(USED)(attempt)
            ),
            says="The sum is right, but odd ranks took part in it. Make a group of the "
            "even ranks alone, and give it to the collective: `group=...`. Then the "
            "odd ranks need not wait for it.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.rank % 2 == 1 and only_the_sum_is_wrong(attempt)
            ),
            says="The even ranks are right. The odd ranks must return None: a "
            "collective in a group that they are not in does nothing.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.rank % 2 == 0
                and attempt.error == ""
                and difference(attempt.got["sum"], attempt.args[0], 0.0) is None
            ),
            says="That is the rank's own tensor. all_reduce writes the sum into the "
            "tensor that it is given. Or does the list of the group's ranks lack one?",
        ),
        Mistake(
            like=sum_of_all,
            says="That is the sum over all ranks. Give the group to all_reduce: "
            "`group=...`.",
        ),
        Mistake(
            when=lambda attempt: (
                attempt.rank % 2 == 0
                and attempt.error == ""
                and attempt.got["sum"] is None
            ),
            says="It returned None on an even rank: return the sum.",
        ),
        Mistake(
            when=says("Group rank must be specified"),
            says="The list of the group's ranks is empty. Rank 0 is even, so with one "
            "rank there is one: of n ranks, (n + 1) // 2 are even.",
        ),
        Mistake(
            when=says("is not part of group"),
            says="`src` and `dst` are ranks of the whole job, also in a group. "
            "`group_src` and `group_dst` count its members: 0, 1, 2, ...",
        ),
        Mistake(
            when=says("out of range", "should be less or equal", "world size should"),
            says="The group has a rank that is not in this job. The even ranks depend "
            "on the world size: range(0, world_size, 2).",
        ),
        Mistake(
            when=waits,
            says="A collective in a group must be called by all of its members, and by "
            "nobody else. Without `group=...`, or with odd ranks in the list, it waits "
            "for odd ranks, too. And new_group must be called by every rank of the "
            "job, with the same list of ranks, and in the same order.",
        ),
    ),
    otherwise="Even ranks return the sum over the even ranks: 0, 2, 4 and so on.",
    hints=(
        "Two calls: one makes the group, one adds up in it. Which of them must every "
        "rank make, and which only the members?",
        "Every rank calls new_group with the list of the even ranks. Then only the "
        "even ranks call all_reduce with this group.",
        "Take one call out of the `if`:\n"
        "  group = dist.new_group(list(range(0, ..., 2)))   # every rank\n"
        "  if dist.get_rank() % 2 == 0:\n"
        "      result = tensor.clone()\n"
        "      dist.all_reduce(..., group=...)\n"
        "      return result",
    ),
)

TASKS = (
    PREDICT_MESSAGES,
    SPOT_THE_TUPLE,
    SPOT_THE_WAIT,
    EXCHANGE,
    ALL_REDUCE,
    BROADCAST,
    EVEN_GROUP,
)
