"""Lesson 04, processes and collectives: the tasks of its exercise."""

import torch
import torch.distributed as dist

from course_utils.measure.messages import in_steps
from course_utils.questions.lesson_04 import PREDICT_MESSAGES
from course_utils.tasks import send_recv, starts
from course_utils.tasks.compare import is_new
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.send_recv import FROM_RECV, ROUNDED, looked_at
from course_utils.tasks.task import OUT_OF_STEP, AtMost, Miss, Task

# ----------------------------------------------------------------------- spot_the_tuple

BY_ITS_NAME = (
    "spawn sends a function by its name, and a new process does not find a lambda, an "
    "inner function or one from a notebook cell. Start `worker` itself."
)
A_CALL = (
    "With parentheses, `worker(...)` is a call, and it runs here. Pass the function "
    "itself, and put n into `args`."
)

SPOT_THE_TUPLE = Task(
    id="04.spot_the_tuple",
    title="Spot the tuple",
    stars=1,
    where="here",
    observe=starts.observe_start,
    cases=((1,), (2,), (3,)),
    seconds=60.0,  # without fork, each process imports torch
    misses=(
        Miss(
            "(n,)",
            "int(n)",
            "n is a number, even in parentheses, and a number has no elements. A comma "
            "makes it a tuple of one element.",
        ),
        Miss(
            "(n,)",
            "(0, n)",
            "spawn itself puts the number of the process first. `args` holds only what "
            "comes after it: n.",
        ),
        Miss("spawn(worker,", "spawn(worker(n),", A_CALL),
        Miss("spawn(worker,", "spawn(worker(0, n),", A_CALL),
    ),
    because={
        starts.ENDED: "When your function returns, n workers must have come to their "
        "end. Start n (`nprocs`), and wait for all (spawn does, with join=True).",
        starts.TOGETHER: "The workers ran one after the other, but workers may have to "
        "talk to each other. Start all, then wait for all.",
    },
    errors={"Can't pickle": BY_ITS_NAME, "Can't get local object": BY_ITS_NAME},
    otherwise="Each of n new processes must run worker(i, n), with its own i from 0 to "
    "n - 1.",
    hints=(
        "Ask Python: `type((3))`. And what does spawn do with `args`? (If you changed "
        "`(n)` to `n`: to Python that is the same, so nothing is repaired.)",
        "spawn calls worker(i, *args). The star needs something with elements.",
        "A tuple of one element ends with a comma. This is one: (3,). And this: "
        '("text",).',
    ),
)

# ------------------------------------------------------------------------ spot_the_wait

ONE_ROW = "it was sent its row alone"
ENVELOPE = 5000  # bytes, around a row that is sent as an object


def is_one_row(rows, row, received):
    due = rows[0].nbytes if dist.get_rank() > 0 else 0
    return due <= sum(call.nbytes for call in received) < 1.5 * due + ENVELOPE


SPOT_THE_WAIT = Task(
    id="04.spot_the_wait",
    title="Spot the missing waits",
    stars=2,
    observe=lambda answer, rows: looked_at(answer, rows, ONE_ROW, is_one_row),
    cases=(3, 1, 100_000),  # how long a row is
    inputs=lambda size, rank, world_size: (whole_numbers((world_size, size), rank),),
    misses=(
        Miss(
            "return row",
            "return rows[rank]",
            "That is the rank's row of its own tensor, not of rank 0's.",
        ),
        Miss("dist.irecv(row, src=0).wait()", "row = dist.recv(row, src=0)", FROM_RECV),
        Miss("dist.irecv(row", "row = dist.irecv(row", FROM_RECV),
    ),
    because={ONE_ROW: "Each rank must be sent its row as a message, and nothing else."},
    errors={
        **send_recv.ERRORS,
        OUT_OF_STEP: "Every send needs its recv, and every recv its send.",
    },
    otherwise="Rank r returns row r of rank 0's tensor, rank 0 too. A buffer must not "
    "be read or written while a message is under way to it or from it: wait inside the "
    "loop, or give each message its own memory.",
    instead="Keep isend and irecv (or send and recv), and repair what is around them.",
    hints=(
        "isend and irecv return at once. What do they return, and what is that for?",
        "Two waits are missing. One rank reads what may not have arrived yet. Another "
        "rank writes into a buffer from which a message may still be sent.",
        "Both return a request:\n"
        "  request = ...\n"
        "  request.wait()   # from here on the buffer may be used again",
    ),
)

# ----------------------------------------------------------------------------- exchange

LARGE = 10**9  # float32 has multiples of 64 only, from here on
TENSORS = (
    ((3,), torch.float32),
    ((2, 2), torch.int64),
    ((), torch.float64),
    ((100_000,), torch.float32),
)


def a_tensor(case, rank, world_size):
    """int64 numbers are large: on a way through float32 they are rounded."""
    shape, dtype = case
    numbers = whole_numbers(shape, rank).to(dtype)
    return (numbers + LARGE if dtype == torch.int64 else numbers,)


FROM_BEFORE = "it has received from the rank before"


def from_before(tensor, result, received):
    before = (dist.get_rank() - 1) % dist.get_world_size()
    return before in [dist.get_rank(), *(call.peer for call in received)]


EXCHANGE = Task(
    id="04.exchange",
    title="A safe exchange",
    stars=2,
    ranks=(3, 2, 4, 1),  # one comes last: who is stuck in a circle hears of that first
    observe=lambda answer, tensor: looked_at(answer, tensor, FROM_BEFORE, from_before),
    cases=TENSORS,
    inputs=a_tensor,
    misses=(
        Miss("return received", "return tensor", "Return the buffer of recv instead."),
        Miss("dist.recv(received", "received = dist.recv(received", FROM_RECV),
        Miss("return received", "return received.float()", ROUNDED),
        Miss("return received", "return received.float().to(tensor.dtype)", ROUNDED),
    ),
    because={
        FROM_BEFORE: "This rank has received nothing from the rank before it. Send to "
        "rank + 1 and receive from rank - 1, and not through another rank.",
    },
    otherwise="Rank r returns the tensor of rank r - 1, and rank 0 that of the last "
    "rank. Receive it into a new tensor: one that is being sent must not be written "
    "before the `wait()`, and one that is being received must not be read.",
    errors={
        **send_recv.ERRORS,
        OUT_OF_STEP: "If all send first, nobody receives; if all receive first, nobody "
        "sends. Let some ranks receive first; or start an isend, receive, and wait for "
        "the isend last. Send to rank + 1, and receive from rank - 1.",
    },
    instead="Use send and recv, or isend and irecv.",
    hints=(
        "If every rank sends first, all wait for a receiver. Which ranks could receive "
        "first? And with one rank, what is there to send?",
        "isend starts a send and does not wait. Start it, receive, and wait for the "
        "send at the end. (Or let even ranks send first and odd ranks receive first.)",
        "Make a buffer first, and return it. One rank is a special case:\n"
        "  received = ...\n"
        "  request = ...   # to the next rank\n"
        "  ...             # from the previous rank\n"
        "  request.wait()",
    ),
)

# --------------------------------------------------------------------------- all_reduce

NEW = "it is a new tensor"


def is_new_one(tensor, total, received):
    return is_new(total, tensor)


IN = "dist.recv(incoming, src=other)\n            total += incoming"
NEXT_LOOP = "\n        for other in range(1, world_size):"
BACK = "dist.recv(total, src=0)"

ALL_REDUCE = Task(
    id="04.all_reduce",
    title="All-reduce",
    stars=2,
    # 6 is neither a power of two nor one more. On 3 ranks wrong sums differ from each
    # other; on 2 many are alike, and on 1 most are right.
    ranks=(3, 2, 6, 1),
    observe=lambda answer, tensor: looked_at(answer, tensor, NEW, is_new_one),
    cases=TENSORS,
    inputs=a_tensor,
    misses=(
        Miss(
            BACK,
            "dist.recv(tensor.clone(), src=0)",
            "Rank 0 has the sum. It must be sent back to all the others.",
        ),
        Miss(
            IN,
            "dist.recv(total, src=other)",
            "Each recv overwrites its buffer. Add what has come to the sum before the "
            "next recv: `+=`, inside the loop.",
        ),
        Miss(
            f"total += incoming{NEXT_LOOP}",
            "total += incoming",
            "Rank 1 has the sum of ranks 0 and 1 only. Send the sum in a second loop, "
            "when the last tensor has been added.",
        ),
        Miss(
            "total, world_size = tensor.clone()",
            "total, world_size = torch.zeros_like(tensor)",
            "A rank's own tensor is missing from the sum. Begin with `tensor.clone()`.",
        ),
        Miss(IN, "total += dist.recv(incoming, src=other)", FROM_RECV),
        Miss(BACK, f"total = {BACK}", FROM_RECV),
        Miss("return total", "return total.float()", ROUNDED),
        Miss("return total", "return total.float().to(total.dtype)", ROUNDED),
    ),
    because={
        NEW: "What came back is the tensor that was given. Whoever called the function "
        "may still need that one: return a new tensor, such as a `clone()`.",
    },
    errors={
        **send_recv.ERRORS,
        OUT_OF_STEP: "Every send needs a recv, and every recv a send. Follow the code "
        "as rank 0, as rank 1 and as the last rank: where does each one wait?",
    },
    otherwise="Every rank returns the sum of the tensors of all ranks, each once. A "
    "sum that is passed on and added up again counts some twice. A recv overwrites "
    "what was in its buffer, and an irecv has filled it only after its `wait()`.",
    forbids=("all_reduce",),
    instead=send_recv.INSTEAD,
    hints=(
        "Begin with two ranks: each sends its tensor and receives the other's. Then "
        "think of one rank that collects for all.",
        "All send to rank 0, which adds up and sends the sum to each of the others.",
        "The other ranks call send, then recv. On rank 0 there are two loops:\n"
        "  for other in range(1, world_size):\n"
        "      ...   # receive into a buffer, and add it up\n"
        "  for other in range(1, world_size):\n"
        "      ...   # send the sum",
    ),
)

# ---------------------------------------------------------------------------- broadcast

HELD, STEPS = "the tensor afterwards", "steps"
MESSAGES = "messages of all ranks together"


def observe_broadcast(answer, tensor, src):
    with send_recv.watched(answer) as calls:
        answer(tensor, src)
    logs = send_recv.told_by_all(calls)
    if logs is None:  # a rank has not come back: the check will name it
        return None
    try:
        steps = [message.step for message in in_steps(logs)]
    except ValueError:
        return {MESSAGES: "some that nobody received"}
    return {MESSAGES: len(steps), HELD: tensor, STEPS: AtMost(max([0, *steps]))}


PLACE = "place = (rank - src) % world_size"
BY_PLACES = (
    "Build the tree for places, with src at place 0: place = (rank - src) % "
    "world_size, and back: rank = (place + src) % world_size."
)

BROADCAST = Task(
    id="04.broadcast",
    title="Broadcast by a tree",
    stars=3,
    ranks=(3, 1, 2, 5, 8),
    observe=observe_broadcast,
    cases=(
        ((4,), torch.float32, 0),
        ((2, 3), torch.int64, 1),
        ((3,), torch.float32, -1),
        ((50_000,), torch.float32, 2),
    ),
    inputs=lambda case, rank, n: (*a_tensor(case[:2], rank, n), case[2] % n),
    misses=(
        Miss(PLACE, "place = rank", f"src need not be rank 0. {BY_PLACES}"),
        Miss(
            PLACE,
            f"tensor = tensor.clone()\n    {PLACE}",
            "The messages were sent, but the tensor is as it was. Receive into the "
            "tensor that was given, in place, as dist.broadcast does.",
        ),
    ),
    because={
        MESSAGES: "Every rank but src must receive the tensor once, and nothing else: "
        "that is n - 1 messages. In the last step, some ranks may have no partner.",
        STEPS: "Every rank has the tensor, but it took too many steps. In each step, "
        "every rank that has it sends it to one that does not. Messages leave in the "
        "order of the calls: send first to the rank that passes it on most often.",
    },
    errors={
        **send_recv.ERRORS,
        "but got <class 'int'>": FROM_RECV,
        "is this rank itself": f"A rank cannot send to itself. {BY_PLACES}",
        OUT_OF_STEP: "Every send needs its recv. Write down for 3 and 5 ranks, and for "
        "src = 0 and 1, who sends to whom in each step. In the last one, a place may "
        f"have no partner. {BY_PLACES}",
    },
    otherwise="Afterwards every rank's tensor holds what rank src's did.",
    forbids=("broadcast",),
    instead=send_recv.INSTEAD,
    keeps_inputs=False,
    hints=(
        "On 8 ranks with src = 0: who has the tensor after the first message? How many "
        "can have it one step later, if both of them send?",
        "In step k, counted from 0, the places below 2^k send to the place 2^k further "
        "on, if there is one. A rank's place is (rank - src) % world_size.",
        "One loop, in which the distance doubles from 1:\n"
        "  while distance < world_size:\n"
        "      if ...:      # this place has the tensor, and has a partner\n"
        "          dist.send(...)\n"
        "      elif ...:    # this place gets the tensor in this step\n"
        "          dist.recv(...)\n"
        "      distance *= 2",
    ),
)

# --------------------------------------------------------------------------- even_group

LISTS = "all ranks gave new_group the same lists"
COUNTED = "all ranks have counted as many groups"
EVEN_ONLY = "even ranks used groups of even ranks only"


def observe_even_group(answer, tensor):
    """Call it, and ask every rank how many groups it has counted since, and which."""
    world = dist.distributed_c10d._world
    before, is_odd = world.group_count, dist.get_rank() % 2 == 1
    known = set(world.pg_group_ranks)
    with send_recv.groups_noted() as used:
        result = answer(tensor)
    new = world.pg_group_ranks.keys() - known
    members = {tuple(sorted(world.pg_group_ranks[group])) for group in new}
    told = send_recv.told_by_all((world.group_count - before, members)) or [(0, set())]
    counts = [count for count, _ in told]
    groups = set().union(*(members for _, members in told))
    return {
        LISTS: len(groups) <= max(counts),
        send_recv.RESULT: result,
        COUNTED: len(set(counts)) == 1,
        EVEN_ONLY: is_odd or not any(rank % 2 for rank in used),
    }


SAME_LIST = "Every rank of the job must call new_group, with the same list."

EVEN_GROUP = Task(
    id="04.even_group",
    title="Spot the group",
    stars=2,
    ranks=(3, 1, 2, 4, 5),
    observe=observe_even_group,
    cases=TENSORS[:2],
    inputs=a_tensor,
    misses=(
        Miss(
            "range(0, world_size, 2)",
            "range(0, world_size - 1, 2)",
            "Nothing was added up. On a rank that is not in the group's list, "
            "all_reduce does nothing but warn. Is every even rank in the list, also "
            "the last one? And does every even rank call all_reduce?",
        ),
    ),
    because={
        COUNTED: "The sum is right, but some ranks have made more groups than others, "
        "and a group's number is its name: the next group of all ranks will hang. "
        "Every rank of the job must call new_group. (use_local_synchronization=True "
        "does not help.)",
        LISTS: SAME_LIST,
        EVEN_ONLY: "The sum is right, but it was not made in a group of the even ranks "
        "alone. Make one, and give it to the collective: `group=...`.",
    },
    errors={
        "the new group's world size": "The list has more ranks than the job. The even "
        "ranks are `range(0, dist.get_world_size(), 2)`.",
        OUT_OF_STEP: f"{SAME_LIST} "
        "Without `group=...`, or with odd ranks in the list, all_reduce waits for odd "
        "ranks, too.",
    },
    otherwise="Even ranks return the sum over the even ranks, odd ranks return None. "
    "all_reduce adds up, in place, over the ranks in the group's list.",
    hints=(
        "There are two calls: one makes the group, one adds up in it. Which of them "
        "must every rank make, and which only the members?",
        "Every rank calls new_group with the list of the even ranks. Then only the "
        "even ranks call all_reduce with this group.",
        "One call comes before the `if`, the other stays in it:\n"
        "  ...   # every rank\n"
        "  if rank % 2 == 0:\n"
        "      ...   # the members, with group=...",
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
