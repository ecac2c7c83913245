"""Lesson 04: different right answers, and wrong ones that are no near miss of ours."""

import concurrent.futures
import multiprocessing
import pickle
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch.distributed import P2POp, distributed_c10d, irecv, isend, recv, send

from course_utils.notebook.check import find_task
from tests.answers import Answers

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


def through_the_store(tensor):
    """What all ranks hold, without a message."""
    rank, n = me()
    store = distributed_c10d._get_default_store()
    case = f"{tensor.dtype} {tuple(tensor.shape)}"
    store.set(f"{case} {rank}", pickle.dumps(tensor))
    return [pickle.loads(store.get(f"{case} {other}")) for other in range(n)]


# -------------------------------------------------------------- 04.predict_messages

for number, says in ((20_000, "one half"), (10_000, "4 bytes"), (7, "Count the mess")):
    ANSWERS.wrong("04.predict_messages", "wrong", says)(number)
for number in (40_000, "40 000 bytes", 2 * 5 * 4e3, torch.tensor(40_000)):
    ANSWERS.right("04.predict_messages")(number)

# ---------------------------------------------------------------- 04.spot_the_tuple


def run_all(workers):
    for process in workers:
        process.start()
    for process in workers:
        process.join()


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "spawn sends a function by its name.")
def a_lambda_that_knows_n(worker, n):
    mp.spawn(lambda i: worker(i, n), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "wait for all of them")
def joins_the_last_one(worker, n):
    started = processes(worker, n)
    for process in started:
        process.start()
    started[-1].join()


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "The workers ran one after the other")
def one_after_the_other_is_over(worker, n):
    for process in processes(worker, n):
        run_all([process])


def run_worker(i, worker, n):
    worker(i, n)


def processes(worker, n, way=None):
    context = multiprocessing.get_context(way)
    return [context.Process(target=worker, args=(i, n)) for i in range(n)]


for start in (
    lambda worker, n: mp.spawn(worker, args=(n,), nprocs=n),
    lambda worker, n: mp.spawn(worker, [n], n),
    lambda worker, n: mp.spawn(fn=worker, args=tuple([n]), nprocs=n, daemon=True),
    lambda worker, n: mp.spawn(run_worker, args=(worker, n), nprocs=n),
    lambda worker, n: mp.start_processes(worker, [n], n, start_method="spawn"),
    lambda worker, n: run_all(processes(worker, n)),
    lambda worker, n: run_all(processes(worker, n, "spawn")),
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


@ANSWERS.right("04.spot_the_tuple")
def with_futures(worker, n):
    context = mp.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(n, mp_context=context) as executor:
        for future in [executor.submit(worker, i, n) for i in range(n)]:
            future.result()


@ANSWERS.right("04.spot_the_tuple")
def with_a_pool_of_all(worker, n):
    with multiprocessing.get_context("spawn").Pool(n) as pool:
        pool.starmap(worker, [(i, n) for i in range(n)], chunksize=1)


def test_hint_1_of_the_tuple_names_the_repair_that_is_none():
    assert "`args=(n)` and `args=n`" in find_task("04.spot_the_tuple").hints[0]


# ----------------------------------------------------------------- 04.spot_the_wait


def handed_out(hand_out_rows):
    """Rank 0's part is in the function, all others receive."""

    def hand_out(rows):
        rank, n = me()
        if rank > 0:
            return received(rows[0], 0)
        hand_out_rows(rows, range(1, n))
        return rows[0].clone()

    return hand_out


@ANSWERS.wrong("04.spot_the_wait", "wrong", "Wait for every request before")
@handed_out
def kept_but_not_waited_for(rows, others):
    requests = [isend(rows[r], dst=r) for r in others]
    time.sleep(0.3)  # so that no message is dropped: that would be a deadlock
    del requests


@ANSWERS.wrong("04.spot_the_wait", "wrong", "This rank has received nothing")
def rows_through_the_store(rows):
    return through_the_store(rows)[0][dist.get_rank()]


@ANSWERS.wrong("04.spot_the_wait", "wrong", "Send row r to rank r, and nothing else.")
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
def waits_in_the_loop(rows):
    rank, world_size = me()
    row = torch.empty_like(rows[0])
    if rank == 0:
        for other in range(1, world_size):
            row.copy_(rows[other])
            request = dist.isend(row, dst=other)
            request.wait()
        row.copy_(rows[0])
    else:
        request = dist.irecv(row, src=0)
        request.wait()
    return row


for rows_sent in (
    lambda rows, others: [send(rows[r], dst=r) for r in others],
    lambda rows, others: in_a_batch(P2POp(isend, rows[r].clone(), r) for r in others),
    lambda rows, others: wait_for([isend(rows[r] + 0, r) for r in reversed(others)]),
):
    ANSWERS.right("04.spot_the_wait")(handed_out(rows_sent))


@ANSWERS.right("04.spot_the_wait")
def from_anybody(rows):
    rank, n = me()
    if rank > 0:
        rows = torch.zeros_like(rows)
        assert recv(rows[rank]) == 0
        return rows[rank]
    requests = {other: isend(rows[other], other) for other in range(1, n)}
    wait_for(requests.values())
    return rows[rank]


# ---------------------------------------------------------------------- 04.exchange


def not_alone(exchange):
    """One rank has nobody to exchange with."""

    def answer(tensor):
        (rank, n), incoming = me(), torch.empty_like(tensor)
        if n == 1:
            return tensor
        exchange(tensor, incoming, (rank + 1) % n, (rank - 1) % n)
        return incoming

    answer.__name__ = exchange.__name__
    return answer


@ANSWERS.wrong("04.exchange", "stuck", "If all send first")
@not_alone
def all_send_first(tensor, incoming, after, before):
    send(tensor, after)
    recv(incoming, before)


@ANSWERS.wrong("04.exchange", "crashed", "is_completed() stays False")
@not_alone
def polls(tensor, incoming, after, before):
    request = isend(tensor, after)
    recv(incoming, before)
    while not request.is_completed():
        pass


@ANSWERS.wrong("04.exchange", "wrong", "Is it received into memory of its own?")
@not_alone
def into_the_tensor_that_is_sent(tensor, incoming, after, before):
    incoming.copy_(tensor)
    request = isend(incoming, after)
    time.sleep(0.2 * dist.get_rank())  # so rank 0 receives before rank 1 does
    recv(incoming, before)
    request.wait()


@ANSWERS.right("04.exchange")
@not_alone
def with_isend(tensor, incoming, after, before):
    request = isend(tensor, after)
    recv(incoming, before)
    request.wait()


@ANSWERS.right("04.exchange")
@not_alone
def even_ranks_send_first(tensor, incoming, after, before):
    if dist.get_rank() % 2 == 0:
        send(tensor, after)
    recv(incoming, before)
    if dist.get_rank() % 2:
        send(tensor, after)


@ANSWERS.right("04.exchange")
@not_alone
def one_rank_receives_first(tensor, incoming, after, before):
    if after > 0:
        send(tensor, after)
    recv(incoming, before)
    if after == 0:
        send(tensor, 0)


@ANSWERS.right("04.exchange")
@not_alone
def with_a_batch(tensor, incoming, after, before):
    in_a_batch([P2POp(isend, tensor, after), P2POp(irecv, incoming, before)])


@ANSWERS.right("04.exchange")
@not_alone
def irecv_first(tensor, incoming, after, before):
    coming = irecv(incoming, src=before)
    send(tensor, dst=after)
    coming.wait()


@ANSWERS.right("04.exchange")
@not_alone
def two_requests(tensor, incoming, after, before):
    wait_for([irecv(incoming, before), isend(tensor.clone(), after)])


# -------------------------------------------------------------------- 04.all_reduce


def to_rank_0(tensor):
    """What rank 0 returns of a reduce; the others their own."""
    rank, n = me()
    total = tensor.clone()
    for other in range(1, n) if rank == 0 else ():
        total += received(tensor, other)
    if rank > 0:
        send(tensor, 0)
    return total


def from_rank_0(total):
    """A broadcast from rank 0, in place."""
    rank, n = me()
    for other in range(1, n) if rank == 0 else ():
        send(total, other)
    if rank > 0:
        recv(total, 0)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls all_reduce")
def by_functional(tensor):
    return functional.all_reduce(tensor, "sum", dist.group.WORLD) + 0


@ANSWERS.wrong("04.all_reduce", "wrong", "it is in the tensor that was given.")
def its_argument_where_there_is_one_rank(tensor):
    return tensor if me()[1] == 1 else from_rank_0(to_rank_0(tensor))


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
def through_rank_0(tensor):
    return from_rank_0(to_rank_0(tensor))


@ANSWERS.right("04.all_reduce")
def everybody_to_everybody(tensor):
    rank, n = me()
    incoming = {r: torch.empty_like(tensor) for r in range(n) if r != rank}
    requests = [isend(tensor, r) for r in incoming]
    wait_for([*requests, *(irecv(buffer, r) for r, buffer in incoming.items())])
    return tensor + sum(incoming.values())


@ANSWERS.right("04.all_reduce")
def around_the_ring(tensor):
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        passing = with_a_batch(passing)
        total += passing
    return total


@ANSWERS.right("04.all_reduce")
def a_chain_there_and_back(tensor):
    rank, n = me()
    total = tensor.clone()
    if rank > 0:
        total = total + received(tensor, rank - 1)
    if rank < n - 1:
        send(total, rank + 1)
        recv(total, rank + 1)
    if rank > 0:
        send(total, rank - 1)
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


@ANSWERS.right("04.all_reduce")
def with_object_messages(tensor):
    (rank, n), holder = me(), [tensor]
    if rank > 0:
        dist.send_object_list(holder, dst=0)
        dist.recv_object_list(holder, src=0)
        return holder[0].clone()
    for other in range(1, n):
        dist.recv_object_list(holder_of := [None], src=other)
        holder[0] = holder[0] + holder_of[0]
    for other in range(1, n):
        dist.send_object_list(holder, dst=other)
    return holder[0].clone()


@ANSWERS.right("04.all_reduce")
def all_tensors_come_by(tensor):
    tensors = [tensor]
    for _ in range(dist.get_world_size() - 1):
        tensors.append(irecv_first(tensors[-1]))
    return sum(tensors[1:], tensor.clone())


@ANSWERS.right("04.all_reduce")
def each_in_turn_tells_all(tensor):
    (rank, n), parts = me(), []
    for speaker in range(n):
        if speaker == rank:
            in_a_batch(P2POp(isend, tensor, r) for r in range(n) if r != rank)
        parts.append(tensor if speaker == rank else received(tensor, speaker))
    return torch.stack(parts).sum(dim=0)


# --------------------------------------------------------------------- 04.broadcast


def children_of(place, n):
    """Of a binomial tree: the one with the most descendants first."""
    distance = 1
    while distance < n and not place & distance:
        distance *= 2
    while distance > 1:
        distance //= 2
        if place + distance < n:
            yield place + distance


def by_children(send_all, work_on=lambda tensor: tensor):
    """The parent of a place lacks its lowest bit; `send_all(tensor, children)`."""

    def broadcast(tensor, src=0):
        rank, n = me()
        place = (rank - src) % n
        if place:
            recv(buffer := work_on(tensor), ((place & (place - 1)) + src) % n)
            tensor.copy_(buffer)
        send_all(tensor, [(child + src) % n for child in children_of(place, n)])

    return broadcast


for send_all in (
    lambda tensor, children: wait_for([isend(tensor, child) for child in children]),
    lambda tensor, children: in_a_batch(P2POp(isend, tensor, r) for r in children),
    lambda tensor, children: [send(tensor, child) for child in children],
):
    ANSWERS.right("04.broadcast")(by_children(send_all))
ANSWERS.right("04.broadcast")(by_children(send_all, torch.empty_like))
ANSWERS.wrong("04.broadcast", "wrong", "first to the one that hands on to the most")(
    by_children(lambda tensor, children: [send(tensor, r) for r in children[::-1]])
)


def doubling(send_it, recv_it=recv):
    """The places that have it send it to the place `distance` further on."""

    def broadcast(tensor, src=0):
        (rank, n), distance, requests = me(), 1, []
        place = (rank - src) % n
        while distance < n:
            if place < distance and place + distance < n:
                requests.append(send_it(tensor, (rank + distance) % n))
            elif distance <= place < 2 * distance:
                recv_it(tensor, (rank - distance) % n)
            distance *= 2
        wait_for(filter(None, requests))

    broadcast.__name__ = f"doubling_with_{send_it.__name__}"
    return broadcast


def send_and_be_thanked(tensor, rank):
    send(tensor, rank)
    recv(torch.zeros(1), rank)


def recv_and_thank(tensor, rank):
    recv(tensor, rank)
    send(torch.zeros(1), rank)


ANSWERS.wrong("04.broadcast", "wrong", "no message is needed for anything else")(
    doubling(send_and_be_thanked, recv_and_thank)
)


ANSWERS.right("04.broadcast")(doubling(send))
ANSWERS.right("04.broadcast")(doubling(isend))
ANSWERS.right("04.broadcast")(doubling(send, lambda *args: irecv(*args).wait()))


def halving(send_it):
    """The first of a range sends to the first of its second half."""

    def broadcast(tensor, src=0):
        (rank, n), requests = me(), []
        place, low, high = (rank - src) % n, 0, n
        while high - low > 1:
            middle = (low + high + 1) // 2
            if place == low:
                requests.append(send_it(tensor, (middle + src) % n))
            elif place == middle:
                irecv(tensor, (low + src) % n).wait()
            low, high = (low, middle) if place < middle else (middle, high)
        wait_for(filter(None, requests))

    broadcast.__name__ = f"halving_with_{send_it.__name__}"
    return broadcast


ANSWERS.right("04.broadcast")(halving(send))
ANSWERS.right("04.broadcast")(halving(isend))


@ANSWERS.right("04.broadcast")
def by_lists(tensor, src=0):
    """Everybody works out who has it, step by step, and who is next."""
    rank, n = me()
    have, need = [src], [r for r in range(n) if r != src]
    while need:
        pairs = list(zip(have, need, strict=False))
        for source, target in pairs:
            if rank == source:
                isend(tensor, target).wait()
            elif rank == target:
                irecv(tensor, source).wait()
        have += [target for _, target in pairs]
        need = need[len(pairs) :]


@ANSWERS.right("04.broadcast")
def by_the_highest_bit(tensor, src=0):
    rank, n = me()
    place = (rank - src) % n
    bits = place.bit_length()
    if place:
        recv(tensor, src=(place - 2 ** (bits - 1) + src) % n)
    for child in (place + 2**bit for bit in range(bits, n.bit_length())):
        if child < n:
            send(tensor, dst=(child + src) % n)


# -------------------------------------------------------------------- 04.even_group


def evens():
    return list(range(0, dist.get_world_size(), 2))


def by_members(add_up):
    """Every rank makes the group; the even ones do the rest, in place."""

    def sum_of_even_ranks(tensor):
        group, total = dist.new_group(evens()), tensor.clone()
        if dist.get_rank() % 2 == 0:
            add_up(total, group)
            return total

    return sum_of_even_ranks


@ANSWERS.wrong("04.even_group", "wrong", "odd ranks took part in it")
def a_group_for_show(tensor):
    dist.new_group(evens())
    total = tensor.clone() if dist.get_rank() % 2 == 0 else torch.zeros_like(tensor)
    dist.all_reduce(total)
    return total if dist.get_rank() % 2 == 0 else None


ANSWERS.wrong("04.even_group", "crashed", "`src` and `dst` are ranks of the whole job")(
    by_members(lambda total, group: dist.reduce(total, len(evens()) - 1, group=group))
)


def reduced_and_sent_back(total, group):
    dist.reduce(total, dst=0, group=group)
    dist.broadcast(total, group_src=0, group=group)


for add_up in (
    lambda total, group: dist.all_reduce(total, group=group),
    lambda total, group: dist.all_reduce(total, group=group, async_op=True).wait(),
    lambda total, group: group.allreduce([total]).wait(),
    reduced_and_sent_back,
):
    ANSWERS.right("04.even_group")(by_members(add_up))


@ANSWERS.right("04.even_group")
def by_enumeration(tensor):
    rank, n = me()
    lists = [r for r in (evens(), list(range(1, n, 2))) if r]
    own, _ = dist.new_subgroups_by_enumeration(lists)
    if rank % 2 == 0:
        tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(own))]
        dist.all_gather(tensors, tensor, group=own)
        return sum(tensors)


@ANSWERS.right("04.even_group")
def odd_ranks_have_one_too(tensor):
    rank, n = me()
    groups = [dist.new_group(list(range(first, n, 2))) for first in range(min(2, n))]
    total = tensor.clone()
    dist.all_reduce(total, group=groups[rank % 2])
    return total if rank % 2 == 0 else None


@ANSWERS.right("04.even_group")
def asks_the_group(tensor):
    group = dist.new_group(evens())
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


test_wrong, test_right = ANSWERS.tests()
