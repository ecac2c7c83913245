"""Lesson 04, processes and collectives: the tasks of its exercise."""

import time

import torch
import torch.distributed as dist

from course_utils.measure.messages import in_steps
from course_utils.measure.under_way import Log
from course_utils.questions.lesson_04 import PREDICT_MESSAGES
from course_utils.tasks import starts
from course_utils.tasks.compare import is_new
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.messages import (
    BECAUSE,
    ERRORS,
    FROM_RECV,
    INSTEAD,
    NEW,
    RESULT,
    ROUNDED,
    WAITED,
    all_waited_for,
    groups_noted,
    looked_at,
    told_by_all,
    watched,
)
from course_utils.tasks.task import OUT_OF_STEP, AtMost, Miss, Task

# ----------------------------------------------------------------------- spot_the_tuple

BY_ITS_NAME = (
    "spawn sends a function by its name. A lambda, an inner function and one from a "
    "notebook cell have no name under which a new process finds them. Start `worker` "
    "itself, and give it n in `args`."
)
THE_COMMA = (
    "n is a number, also in parentheses, and a number has no elements. What makes a "
    "tuple of one element is the comma."
)
A_CALL = (
    "With parentheses, `worker(...)` is a call: it runs here, and returns nothing. "
    "Hand over the function itself, and n in `args`."
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
        Miss("(n,)", "int(n)", THE_COMMA),
        Miss("(n,)", "tuple(n)", THE_COMMA),
        Miss(
            "(n,)",
            "(0, n)",
            "Count the arguments of the worker: spawn itself puts the number of the "
            "process first. `args` holds what comes after it: n, once.",
        ),
        Miss("spawn(worker,", "spawn(worker(n),", A_CALL),
        Miss("spawn(worker,", "spawn(worker(0, n),", A_CALL),
    ),
    because={
        starts.OWN_PROCESSES: "A worker ran in the process that called it. Start "
        "processes: mp.spawn.",
        starts.EACH_ANOTHER: "One process ran several workers: a pool uses its "
        "processes again. Workers that talk to each other must run at the same time.",
        starts.ENDED: "Not every worker has come to its end when your function "
        "returns. Start n (`nprocs` says how many), let no error get lost, and wait "
        "for all of them (spawn does so with join=True, its default).",
        starts.TOGETHER: "The workers ran one after the other, but workers may have to "
        "talk to each other. Start all, then wait for all.",
    },
    errors={"Can't pickle": BY_ITS_NAME, "Can't get local object": BY_ITS_NAME},
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

ONE_ROW = "each rank was sent its row alone"
ENVELOPE = 5000  # bytes, around a row that is sent as an object


def observe_hand_out(answer, rows):
    """Rank 0 is the first to call, so its sends are under way when the others come."""
    own = rows[dist.get_rank()]
    told_by_all(None)  # all ranks are here
    if dist.get_rank() > 0:
        time.sleep(0.05)
    seen, calls = looked_at(answer, rows, own)
    if isinstance(seen, dict):
        received = sum(call.nbytes for call in calls if call.kind == "recv")
        seen[ONE_ROW] = received < 1.5 * own.nbytes + ENVELOPE
    return seen


SPOT_THE_WAIT = Task(
    id="04.spot_the_wait",
    title="Spot the missing wait",
    stars=2,
    observe=observe_hand_out,
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
    because={
        **BECAUSE,
        ONE_ROW: "The row is right, but this rank was sent more than its row. Send row "
        "r to rank r, and nothing else.",
    },
    errors=ERRORS,
    otherwise="Rank r returns row r of rank 0's tensor. If it is another row: a buffer "
    "must not be written while a message from it is under way. Wait inside the loop, "
    "or give each message memory of its own.",
    instead="Keep isend and irecv (or send and recv), and repair what is around them.",
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


SEND_AND_RECV = "dst=(rank + 1) % world_size)\n    dist.recv(received, src=(rank - 1)"
OTHER_WAY = SEND_AND_RECV.translate(str.maketrans("+-", "-+"))

EXCHANGE = Task(
    id="04.exchange",
    title="A safe exchange",
    stars=2,
    ranks=(3, 2, 4, 1),  # one comes last: who is stuck in a circle hears of that first
    observe=lambda answer, tensor: looked_at(answer, tensor, tensor)[0],
    cases=TENSORS,
    inputs=a_tensor,
    misses=(
        Miss(
            SEND_AND_RECV,
            OTHER_WAY,
            "That is the tensor of the next rank. Send to the next, and receive from "
            "the previous.",
        ),
        Miss("dist.recv(received", "received = dist.recv(received", FROM_RECV),
        Miss("return received", "return received.float()", ROUNDED),
        Miss("return received", "return received.float().to(tensor.dtype)", ROUNDED),
    ),
    because=BECAUSE,
    errors={
        **ERRORS,
        OUT_OF_STEP: "If all send first, or wait for their isend first, nobody "
        "receives; if all receive first, nobody sends. Let one part receive first; or "
        "start an isend, receive, and wait for its request last. Whoever sends to rank "
        "+ 1 must receive from rank - 1.",
    },
    otherwise="Rank r returns the tensor of rank r - 1, and rank 0 that of the last "
    "rank. Is it received into memory of its own? A tensor that is being sent must not "
    "be written before the `wait()`.",
    instead="Use send and recv, or isend and irecv.",
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


def observe_sum(answer, tensor):
    seen, _ = looked_at(answer, tensor, tensor)
    if isinstance(seen, dict):
        seen[NEW] = is_new(seen[RESULT], tensor)
    return seen


BEGIN = "total, world_size = tensor.clone()"
IN = "dist.recv(incoming, src=other)\n            total += incoming"
NEXT_LOOP = "\n        for other in range(1, world_size):"
BACK = "dist.recv(total, src=0)"
OVERWRITTEN = (
    "Each recv overwrites its buffer, and what came before is lost. Add each one to "
    "the sum before the next one comes: `+=`, inside the loop."
)
LACKS_ONE = "A rank's own tensor is missing in the sum. Begin with `tensor.clone()`."
TWICE = "The rank's own tensor is in it twice: what comes back is the whole sum."

ALL_REDUCE = Task(
    id="04.all_reduce",
    title="All-reduce",
    stars=2,
    # 6 is neither a power of two nor one more. On 3 ranks wrong sums differ from each
    # other; on 2 many are alike, and on 1 most are right.
    ranks=(3, 2, 6, 1),
    observe=observe_sum,
    cases=TENSORS,
    inputs=a_tensor,
    misses=(
        Miss(
            BACK,
            "dist.recv(tensor.clone(), src=0)",
            "Rank 0 has the sum. It must be sent back to all the others.",
        ),
        Miss(IN, "dist.recv(total, src=other)", OVERWRITTEN),
        Miss(
            f"total += incoming{NEXT_LOOP}",
            "total += incoming",
            "Rank 1 has the sum of ranks 0 and 1 only. If rank 0 collects, it must "
            "send the sum in a second loop, when the last tensor has been added.",
        ),
        Miss(BEGIN, "total, world_size = torch.zeros_like(tensor)", LACKS_ONE),
        Miss("return total", "return total - tensor", LACKS_ONE),
        Miss(BACK, f"{BACK}\n        total += tensor", TWICE),
        Miss("return total", "return total + tensor", TWICE),
        Miss(
            "return total",
            "return total / world_size",
            "That is the mean. An all-reduce with SUM adds up and does not divide.",
        ),
        Miss(IN, "total += dist.recv(incoming, src=other)", FROM_RECV),
        Miss(BACK, f"total = {BACK}", FROM_RECV),
        Miss("return total", "return total.float()", ROUNDED),
        Miss(BEGIN, f"tensor = tensor.float().to(tensor.dtype)\n    {BEGIN}", ROUNDED),
    ),
    because=BECAUSE,
    errors={
        **ERRORS,
        OUT_OF_STEP: "Every send needs a rank that receives it, and every recv one "
        "that sends. Follow the code as rank 0, as rank 1 and as the last rank: where "
        "does each one stand? If all send first, nobody receives.",
    },
    otherwise="Every rank returns the sum of the tensors of all ranks, each once. A "
    "sum that is passed on and added up again counts some twice, and a recv overwrites "
    "what was in its buffer.",
    forbids=("all_reduce",),
    instead=INSTEAD,
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

HELD = "the tensor afterwards"
MESSAGES = "messages of all ranks together"
STEPS = "steps"


def observe_broadcast(answer, tensor, src):
    with watched(answer) as calls:
        answer(tensor, src)
    seen = {WAITED: all_waited_for(calls), MESSAGES: None, HELD: tensor.clone()}
    logs = told_by_all(calls)
    if logs is None:  # a rank has not come back: the check will name it
        return seen
    try:
        messages = in_steps(logs)
    except ValueError:
        return seen | {MESSAGES: "some that nobody received"}
    steps = max((message.step for message in messages), default=0)
    return seen | {MESSAGES: len(messages), STEPS: AtMost(steps)}


PLACE = "place = (rank - src) % world_size"
BY_PLACES = (
    "Build the tree for places, with src at place 0: place = (rank - src) % "
    "world_size, and back: rank = (place + src) % world_size."
)
A_PLACE = f"A rank cannot send to itself. Is the number a place, or a rank? {BY_PLACES}"

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
        Miss(PLACE, f"tensor.copy_(tensor.float())\n    {PLACE}", ROUNDED),
    ),
    because={
        **BECAUSE,
        MESSAGES: "Every rank but src must receive the tensor once, and no message is "
        "needed for anything else: that is n - 1 messages. Does the loop end too "
        "early? In the last step, not every place may have a partner.",
        STEPS: "Every rank has the tensor, but it took too many steps. In each step, "
        "every rank that has it should send it to one that has not, so that their "
        "number doubles. What a rank sends leaves in the order of its calls, with "
        "isend too: first to the one that hands on to the most others.",
    },
    errors={
        **ERRORS,
        "but got <class 'int'>": FROM_RECV,
        "is this rank itself": A_PLACE,
        "should not be the same as the rank": A_PLACE,
        OUT_OF_STEP: "Every send needs its recv. Write down for 3 and for 5 ranks, and "
        "for src = 0 and 1, who sends to whom in each step: a place may have no "
        "partner in the last one, and a rank must receive before it sends. "
        f"{BY_PLACES}",
    },
    otherwise="Afterwards every rank's tensor holds what rank src's did.",
    forbids=("broadcast",),
    instead=INSTEAD,
    keeps_inputs=False,
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

SUM_ENDED = "every all_reduce waited for"
COUNTED = "all ranks have counted as many groups"
EVEN_ONLY = "a group was made, and even ranks used groups of even ranks only"


def observe_even_group(answer, tensor):
    """Call it, and ask every rank how many groups it has counted since."""
    world = dist.distributed_c10d._world
    before, is_odd = world.group_count, dist.get_rank() % 2 == 1
    with groups_noted() as used, Log() as log:  # it holds back what nobody waits for
        result = answer(tensor)
    counts = told_by_all(world.group_count - before) or [1]
    return {
        SUM_ENDED: all(sent.handed_over for sent in log.sent),
        RESULT: result,
        NEW: not isinstance(result, torch.Tensor) or is_new(result, tensor),
        COUNTED: len(set(counts)) == 1,
        EVEN_ONLY: any(counts) and (is_odd or not any(rank % 2 for rank in used)),
    }


IF_EVEN = "if rank % 2 == 0:\n        total = tensor.clone()\n        "
ADDED_UP = "dist.all_reduce(total, group=group)"
OF_THE_JOB = "A rank of the group is not in this job. Take range(0, world_size, 2)."

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
            "if rank % 2 == 0:",
            "if True:",
            "The even ranks are right. The odd ranks must return None: a collective in "
            "a group that they are not in does nothing.",
        ),
        Miss(
            f"{IF_EVEN}{ADDED_UP}",
            f"{IF_EVEN.replace('rank % 2 == 0', 'True')}dist.all_reduce(total)",
            "That is the sum over all ranks. Give all_reduce the group: `group=...`.",
        ),
    ),
    because={
        **BECAUSE,
        SUM_ENDED: "With async_op=True, all_reduce returns at once, and the sum is "
        "there later. Call `wait()` on what it returns before the sum is used.",
        COUNTED: "The sum is right, but some ranks have counted more groups than "
        "others, and the count is a group's name: the next group that all ranks make "
        "will hang. Every rank of the job must call new_group, members or not. (In "
        "PyTorch 2.14, use_local_synchronization=True does not help.)",
        EVEN_ONLY: "The sum is right, but odd ranks took part in it, or there is no "
        "group any more. Make a group of the even ranks alone, and give it to the "
        "collective: `group=...`. Then the odd ranks need not wait for it.",
    },
    errors={
        "is not part of group": "`src` and `dst` are ranks of the whole job, also in a "
        "group. `group_src` and `group_dst` count its members: 0, 1, 2, ...",
        "Group rank must be specified": "The list of the group's ranks is empty. Rank "
        "0 is even, so with one rank there is one.",
        "out of range": OF_THE_JOB,
        "should be less or equal": OF_THE_JOB,
        "world size should": OF_THE_JOB,
        OUT_OF_STEP: "A collective in a group must be called by all of its members, "
        "and by nobody else. Without `group=...`, or with odd ranks in the list, it "
        "waits for odd ranks, too. And new_group must be called by every rank of the "
        "job, with the same list of ranks, and in the same order.",
    },
    otherwise="Even ranks return the sum over the even ranks: 0, 2, 4 and so on. "
    "all_reduce writes it into the tensor that it is given, on the group's ranks only.",
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
