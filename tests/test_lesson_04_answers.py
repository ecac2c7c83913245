"""Lesson 04: different right answers, and wrong ones that are no near miss of ours."""

import concurrent.futures
import multiprocessing

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch.distributed import P2POp, irecv, isend, recv, send

from tests.answers import Answers, Edited

ANSWERS = Answers()


def me():
    """This rank, and how many there are."""
    return dist.get_rank(), dist.get_world_size()


def wait_for(requests):
    for request in list(requests):
        request.wait()


def in_a_batch(ops):
    ops = list(ops)
    wait_for(dist.batch_isend_irecv(ops) if ops else ())


def received(tensor, source):
    buffer = torch.empty_like(tensor)
    recv(buffer, source)
    return buffer


# ---------------------------------------------------------------- 04.spot_the_tuple


def processes(worker, n, way=None):
    context = multiprocessing.get_context(way)
    return [context.Process(target=worker, args=(i, n)) for i in range(n)]


def run_all(workers):
    for process in workers:
        process.start()
    for process in workers:
        process.join()


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "spawn sends a function by its name")
def a_lambda_that_knows_n(worker, n):
    mp.spawn(lambda i: worker(i, n), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "wait for all")
def joins_the_last_one(worker, n):
    started = processes(worker, n)
    for process in started:
        process.start()
    started[-1].join()


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "The workers ran one after the other")
def one_after_the_other_is_over(worker, n):
    for process in processes(worker, n):
        run_all([process])


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "Each of n new processes must run")
def without_processes(worker, n):
    with concurrent.futures.ThreadPoolExecutor(n) as executor:
        list(executor.map(worker, range(n), [n] * n))


def run_worker(i, worker, n):
    worker(i, n)


for start in (
    lambda worker, n: mp.spawn(fn=worker, args=tuple([n]), nprocs=n, daemon=True),
    lambda worker, n: mp.spawn(run_worker, args=(worker, n), nprocs=n),
    lambda worker, n: run_all(processes(worker, n)),
    # What a fork is to run need not be sent at all.
    lambda worker, n: run_all(processes(lambda i, _: worker(i, n), n, "fork")),
):
    ANSWERS.right("04.spot_the_tuple")(start)


@ANSWERS.right("04.spot_the_tuple")
def joined_later(worker, n):
    context = mp.spawn(worker, args=(n,), nprocs=n, join=False)
    while not context.join():
        pass


@ANSWERS.right("04.spot_the_tuple")
def with_an_executor(worker, n):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(n, mp_context=context) as executor:
        list(executor.map(worker, range(n), [n] * n))


# ----------------------------------------------------------------- 04.spot_the_wait

OUR_WAITS = """for request in requests:
            request.wait()"""
OUR_SENDS = f"""requests = [
            dist.isend(rows[other], dst=other) for other in range(1, world_size)
        ]
        {OUR_WAITS}"""
IN_A_LOOP = "for other in range(1, world_size):\n            "
FROM_ONE_BUFFER = f"""{IN_A_LOOP}row.copy_(rows[other])
            dist.isend(row, other).wait()
        row.copy_(rows[0])"""
FROM_COPIES = f"""requests = [dist.isend(r + 0, i) for i, r in enumerate(rows) if i]
        {OUR_WAITS}"""

ANSWERS.edited(
    "04.spot_the_wait",
    right=[
        (OUR_SENDS, f"{IN_A_LOOP}dist.send(rows[other], dst=other)"),
        (OUR_SENDS, FROM_ONE_BUFFER),
        (OUR_SENDS, FROM_COPIES),
    ],
    wrong=[
        # Without the sleep a message is dropped, and that is a deadlock.
        ("Rank 0 never waited for isend", OUR_WAITS, "import time; time.sleep(0.3)"),
    ],
)


@ANSWERS.wrong("04.spot_the_wait", "wrong", "must be sent its row as a message")
def all_rows_to_all(rows):
    rank, n = me()
    for other in range(1, n) if rank == 0 else ():
        send(rows, other)
    return (received(rows, 0) if rank else rows)[rank].clone()


@ANSWERS.right("04.spot_the_wait")
def rows_as_objects(rows):
    rank, n = me()
    holder = [rows[0].clone()]
    if rank > 0:
        dist.recv_object_list(holder, src=0)
    for other in range(1, n) if rank == 0 else ():
        dist.send_object_list([rows[other].clone()], dst=other)
    return holder[0]


@ANSWERS.right("04.spot_the_wait")
def in_a_batch_and_from_anybody(rows):
    rank, n = me()
    if rank > 0:
        rows = torch.zeros_like(rows)
        assert recv(rows[rank]) == 0
    else:
        in_a_batch(P2POp(isend, rows[other], other) for other in range(1, n))
    return rows[rank]


# ---------------------------------------------------------------------- 04.exchange

OUR_EXCHANGE = """request = dist.isend(tensor, dst=(rank + 1) % world_size)
    dist.recv(received, src=(rank - 1) % world_size)
    request.wait()"""


def exchanged(*lines):
    neighbours = "after, before = (rank + 1) % world_size, (rank - 1) % world_size"
    return Edited(OUR_EXCHANGE, "\n    ".join([neighbours, *lines]))


SEND, RECV = "dist.send(tensor, after)", "dist.recv(received, before)"
ISEND, WAIT = "request = dist.isend(tensor, after)", "request.wait()"
RECV_READY = "dist.recv(torch.ones(1), after)"
READY = ISEND.replace("tensor, after", "torch.ones(1), before"), RECV_READY, WAIT
ENDLESS = "while not request.is_completed(): pass"
PAUSE = "__import__('time').sleep(0.01)"
OTHER_WAY = "after, before = before, after"
SLEEP = "__import__('time').sleep(0.2 * rank)"  # rank 0 receives before rank 1 does
ONE_BUFFER = ("received = tensor = tensor.clone()", ISEND, SLEEP)

for status, says, lines in (
    ("stuck", "If all send first", (SEND, RECV)),
    ("stuck", "nobody receives", (ISEND, "dist.isend(received, before).wait()", WAIT)),
    ("wrong", "nothing from the rank before", (OTHER_WAY, ISEND, RECV, WAIT)),
    ("wrong", "into a new tensor", (*ONE_BUFFER, RECV, WAIT)),
):
    ANSWERS.wrong("04.exchange", status, says)(exchanged(*lines))


for lines in ((ENDLESS,), (ENDLESS.replace("pass", ""), f"    {PAUSE}")):
    ANSWERS.wrong("04.exchange", "too slow", "With gloo, is_completed() stays False")(
        exchanged(ISEND, RECV, *lines)
    )


@ANSWERS.wrong("04.exchange", "wrong", "and not through another rank")
def all_through_rank_0(tensor):
    rank, n = me()
    if rank > 0:
        send(tensor, 0)
        return received(tensor, 0)
    tensors = [tensor.clone(), *(received(tensor, other) for other in range(1, n))]
    for other in range(1, n):
        send(tensors[other - 1], other)
    return tensors[-1]


for lines in (
    ("if rank % 2 == 0:", f"    {SEND}", RECV, "if rank % 2:", f"    {SEND}"),
    ("if after:", f"    {SEND}", RECV, "if not after:", f"    {SEND}"),
    ("coming = dist.irecv(received, before)", SEND, "coming.wait()"),
    (
        "there = dist.P2POp(dist.isend, tensor, after)",
        "here = dist.P2POp(dist.irecv, received, before)",
        "for request in dist.batch_isend_irecv([there, here]):",
        "    request.wait()",
    ),
    (*READY, ISEND, RECV, WAIT),
):
    ANSWERS.right("04.exchange")(exchanged(*lines))
ANSWERS.right("04.exchange")(Edited("return tensor.clone()", "return tensor"))

# -------------------------------------------------------------------- 04.all_reduce


TENSOR_IF_ALONE = "return total if world_size > 1 else tensor"
ANSWERS.edited(
    "04.all_reduce",
    wrong=[
        ("is the tensor that was given.", "return total", TENSOR_IF_ALONE),
        ("divided once too often?", "return total", "return total / world_size"),
    ],
)


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls all_reduce")
def by_functional(tensor):
    return functional.all_reduce(tensor, "sum", dist.group.WORLD) + 0


@ANSWERS.wrong("04.all_reduce", "crashed", "There is no such rank")
def for_powers_of_two_only(tensor):
    """gloo would read past the end of its list of ranks; the check looks."""
    (rank, n), total, distance = me(), tensor.clone(), 1
    while distance < n:
        request = isend(total, rank ^ distance)
        incoming = received(total, rank ^ distance)
        request.wait()
        total, distance = total + incoming, 2 * distance
    return total


@ANSWERS.right("04.all_reduce")
def everybody_to_everybody(tensor):
    rank, n = me()
    incoming = {r: torch.empty_like(tensor) for r in range(n) if r != rank}
    requests = [isend(tensor, r) for r in incoming]
    wait_for([*requests, *(irecv(buffer, r) for r, buffer in incoming.items())])
    return tensor + sum(incoming.values())


@ANSWERS.right("04.all_reduce")
def around_the_ring(tensor):
    (rank, n), total, passing = me(), tensor.clone(), tensor
    for _ in range(n - 1):
        request = isend(passing, (rank + 1) % n)
        incoming = received(tensor, (rank - 1) % n)
        request.wait()
        passing, total = incoming, total + incoming
    return total


@ANSWERS.right("04.all_reduce")
def as_they_come(tensor):
    (rank, n), total = me(), tensor.clone()
    if rank == 0:
        for _ in range(n - 1):
            total += received(tensor, None)  # from anybody
        wait_for([isend(total, other) for other in range(1, n)])
    else:
        dist.send(tensor, group=dist.group.WORLD, group_dst=0)
        dist.irecv(total, 0).wait()
    dist.barrier()
    return total


# --------------------------------------------------------------------- 04.broadcast


def by_children(send_all):
    """The parent of a place lacks its lowest bit; `send_all(tensor, children)`."""

    def broadcast(tensor, src=0):
        rank, n = me()
        place, distance, children = (rank - src) % n, 1, []
        if place:
            tensor.copy_(received(tensor, ((place & (place - 1)) + src) % n))
        while distance < n and not place & distance:
            if place + distance < n:
                children.insert(0, (rank + distance) % n)
            distance *= 2
        send_all(tensor, children)

    return broadcast


for send_all in (
    lambda tensor, children: wait_for([isend(tensor, child) for child in children]),
    lambda tensor, children: in_a_batch(P2POp(isend, tensor, r) for r in children),
):
    ANSWERS.right("04.broadcast")(by_children(send_all))
ANSWERS.wrong("04.broadcast", "wrong", "send first to the rank that passes it on")(
    by_children(lambda tensor, children: [send(tensor, r) for r in children[::-1]])
)

SENT = "dist.send(tensor, dst=(rank + distance) % world_size)"
CAME = "dist.recv(tensor, src=(rank - distance) % world_size)"
THANKED = "; dist.recv(torch.ones(1), (rank + distance) % world_size)"
THANKS = "; dist.send(torch.ones(1), (rank - distance) % world_size)"

BOTH = SENT, SENT + THANKED, CAME, CAME + THANKS
ANSWERS.edited(
    "04.broadcast",
    right=[
        (SENT, SENT.replace("send", "isend") + ".wait()"),
        (CAME, CAME.replace("recv", "irecv") + ".wait()"),
    ],
    wrong=[
        ("the tensor once, and nothing else", *BOTH),
        ("never waited for isend", "dist.send", "dist.isend"),
    ],
)


@ANSWERS.right("04.broadcast")
def halving(tensor, src=0):
    """The first of a range sends to the first of its second half."""
    (rank, n), requests = me(), []
    place, low, high = (rank - src) % n, 0, n
    while high - low > 1:
        middle = (low + high + 1) // 2
        if place == low:
            requests.append(isend(tensor, (middle + src) % n))
        elif place == middle:
            irecv(tensor, (low + src) % n).wait()
        low, high = (low, middle) if place < middle else (middle, high)
    wait_for(requests)


# -------------------------------------------------------------------- 04.even_group

IF_EVEN, BY_GROUP = "if rank % 2 == 0:", "dist.all_reduce(total, group=group)"
EVENS, ALONE = "range(0, world_size, 2)", "return tensor.clone()"
REDUCE_AND_BROADCAST = """dist.reduce(total, dst=0, group=group)
        dist.broadcast(total, group_src=0, group=group)"""

ANSWERS.edited(
    "04.even_group",
    right=[
        (BY_GROUP, "dist.all_reduce(total, group=group, async_op=True).wait()"),
        (BY_GROUP, "group.allreduce([total]).wait()"),
        (BY_GROUP, REDUCE_AND_BROADCAST),
        (IF_EVEN, "if group != dist.GroupMember.NON_GROUP_MEMBER:"),
        (
            "group = ",
            "if world_size == 1:\n        return tensor.clone()\n    group = ",
        ),
    ],
    wrong=[
        ("never waited for all_reduce", "=group)", "=group, async_op=True)"),
        ("odd ranks return None", IF_EVEN, "if True:"),
        ("the argument is not what it was", "tensor.clone()", "tensor"),
    ],
    crashed=[("Rank 4 is out of range", EVENS, "[0, 2, 4]")],
    stuck=[("with odd ranks in the list", EVENS, "range(world_size)")],
)


@ANSWERS.wrong("04.even_group", "wrong", "not made in a group of the even ranks alone")
def a_group_for_show(tensor):
    (rank, n), total = me(), tensor.clone()
    dist.new_group(list(range(0, n, 2)))
    dist.all_reduce(total.mul_(rank % 2 == 0))
    return total if rank % 2 == 0 else None


def evens_and_odds():
    n = dist.get_world_size()
    return [list(range(first, n, 2)) for first in range(min(2, n))]


@ANSWERS.right("04.even_group")
def by_enumeration(tensor):
    own, _ = dist.new_subgroups_by_enumeration(evens_and_odds())
    if dist.get_rank() % 2 == 0:
        tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(own))]
        dist.all_gather(tensors, tensor, group=own)
        return sum(tensors)


@ANSWERS.right("04.even_group")
def odd_ranks_have_one_too(tensor):
    rank, total = dist.get_rank(), tensor.clone()
    groups = [dist.new_group(ranks) for ranks in evens_and_odds()]
    dist.all_reduce(total, group=groups[rank % 2])
    return total if rank % 2 == 0 else None


test_wrong, test_right = ANSWERS.tests()
