"""Lesson 04: typical wrong answers, and different right ones."""

import concurrent.futures
import multiprocessing
import pickle
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d, isend, recv, send

from course_utils.from_scratch import collectives, ring, sgd
from course_utils.notebook.check import find_task, run_check
from tests.answers import Answers

ANSWERS = Answers()


def me():
    """This rank, and how many there are."""
    return dist.get_rank(), dist.get_world_size()


# -------------------------------------------------------------- 04.predict_messages

for pair, says in (
    ((5, 20_000), "That is the reduce."),
    ((12, 48_000), "Rank 0 sends nothing to itself"),
    ((10, 10_000), "a float32 has 4 bytes"),
    ((10, 4000), "those of all messages together"),
    ((10, 20_000), "The sums that rank 0 sends out count, too."),
    ((30, 120_000), "every rank sending to every other"),
    ((40_000, 10), "First the messages, then the bytes."),
    ((10, 123), "Each one is a whole tensor"),
    ((6, 40_000), "How many messages are they in?"),
    ((7, 7), "Count first the messages to rank 0"),
    (10, "a tuple was expected"),
    ((10,), "2 were expected"),
):
    ANSWERS.wrong("04.predict_messages", "wrong", says)(pair)
ANSWERS.wrong("04.predict_messages", "not attempted", "Set the answer")(...)
for pair in ((10, 40_000), [10, 40_000], torch.tensor([10, 40_000]), (10.0, 4e4)):
    ANSWERS.right("04.predict_messages")(pair)

# ---------------------------------------------------------------- 04.spot_the_tuple


@ANSWERS.wrong("04.spot_the_tuple", "not attempted", "Repair the code")
def start(worker, n):
    mp.spawn(worker, args=(n), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "not attempted", "Repair the code")
def the_same_to_python(worker, n):
    mp.spawn(worker, args=n, nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "What makes a tuple is the comma.")
def without_parentheses(worker, n):
    return mp.spawn(worker, args=n, nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "no elements that `tuple(...)`")
def a_tuple_of_a_number(worker, n):
    mp.spawn(worker, args=tuple(n), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "spawn sends a function by its name.")
def a_lambda_that_knows_n(worker, n):
    mp.spawn(lambda i: worker(i, n), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "have no name under which a new process")
def an_inner_function_in_a_process(worker, n):
    def run(i):
        worker(i, n)

    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run, args=(i,)) for i in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


@ANSWERS.wrong(
    "04.spot_the_tuple", "crashed", "spawn itself puts the number", did="`args=(0, n)`"
)
def with_the_rank(worker, n):
    mp.spawn(worker, args=(0, n), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "with parentheses, `worker(n)` is a")
def called_instead_of_handed_over(worker, n):
    mp.spawn(worker(n), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "takes 2 arguments, but it got 3")
def twice_the_number(worker, n):
    mp.spawn(worker, args=(n, n), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "a pool uses its processes again")
def one_process_for_all(worker, n):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.starmap(worker, [(i, n) for i in range(n)])


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "spawn itself puts the number")
def without_arguments(worker, n):
    mp.spawn(worker, nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "`nprocs` says how many processes are")
def one_process(worker, n):
    mp.spawn(worker, args=(n,))


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "And wait for all of them.")
def waits_for_the_first_end(worker, n):
    mp.spawn(worker, args=(n,), nprocs=n, join=False).join()


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "wait for all of them.")
def joins_the_last_one(worker, n):
    processes = [mp.Process(target=worker, args=(i, n)) for i in range(n)]
    for process in processes:
        process.start()
    processes[-1].join()


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "Were n of them started")
def one_process_too_few(worker, n):
    mp.spawn(worker, args=(n,), nprocs=n - 1)


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "did an error get lost?")
def loses_the_error(worker, n):
    try:
        mp.spawn(worker, args=(n), nprocs=n)
    except Exception:
        pass


@ANSWERS.wrong("04.spot_the_tuple", "crashed", "What was handed over is None")
def calls_the_worker_with_both(worker, n):
    mp.spawn(worker(0, n), args=(n,), nprocs=n)


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "No worker has come to its end")
def joins_nothing(worker, n):
    for i in range(n):
        mp.Process(target=worker, args=(i, n)).start()


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "The workers ran one after the other.")
def one_after_the_other_is_over(worker, n):
    for i in range(n):
        process = mp.Process(target=worker, args=(i, n))
        process.start()
        process.join()


@ANSWERS.wrong("04.spot_the_tuple", "wrong", "The worker ran in the process that")
def called_here(worker, n):
    for i in range(n):
        worker(i, n)


@ANSWERS.right("04.spot_the_tuple")
def with_a_tuple(worker, n):
    mp.spawn(worker, args=(n,), nprocs=n)


def run_worker(i, worker, n):
    worker(i, n)


@ANSWERS.right("04.spot_the_tuple")
def by_a_function_of_a_file(worker, n):
    mp.spawn(run_worker, args=(worker, n), nprocs=n)


@ANSWERS.right("04.spot_the_tuple")
def a_lambda_that_is_forked(worker, n):
    """What a fork is to run need not be sent at all."""
    context = multiprocessing.get_context("fork")
    run = lambda i: worker(i, n)  # noqa: E731
    processes = [context.Process(target=run, args=(i,)) for i in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


@ANSWERS.right("04.spot_the_tuple")
def with_an_executor(worker, n):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(n, mp_context=context) as executor:
        list(executor.map(worker, range(n), [n] * n))


@ANSWERS.right("04.spot_the_tuple")
def with_a_list(worker, n):
    torch.multiprocessing.spawn(worker, [n], n)


@ANSWERS.right("04.spot_the_tuple")
def joined_later(worker, n):
    context = mp.spawn(worker, args=(n,), nprocs=n, join=False)
    while not context.join():
        pass


@ANSWERS.right("04.spot_the_tuple")
def with_processes(worker, n):
    processes = [mp.Process(target=worker, args=(i, n)) for i in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


@ANSWERS.right("04.spot_the_tuple")
def with_start_processes(worker, n):
    mp.start_processes(worker, args=[n], nprocs=n, start_method="spawn")


@ANSWERS.right("04.spot_the_tuple")
def with_a_context(worker, n):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=worker, args=(i, n)) for i in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


@ANSWERS.right("04.spot_the_tuple")
def with_a_pool_of_all(worker, n):
    with multiprocessing.get_context("spawn").Pool(n) as pool:
        pool.starmap(worker, [(i, n) for i in range(n)], chunksize=1)


# ----------------------------------------------------------------- 04.spot_the_wait


@ANSWERS.wrong("04.spot_the_wait", "not attempted", "Repair the code")
def hand_out(rows):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    row = torch.empty_like(rows[0])
    if rank == 0:
        for other in range(1, world_size):
            row.copy_(rows[other])
            dist.isend(row, dst=other)
        row.copy_(rows[0])
    else:
        dist.irecv(row, src=0)
    return row


@ANSWERS.wrong("04.spot_the_wait", "stuck", "gloo may drop the message", wrong="wait")
def only_receivers_wait(rows):
    rank, world_size = me()
    row = torch.empty_like(rows[0])
    if rank == 0:
        for other in range(1, world_size):
            row.copy_(rows[other])
            dist.isend(row, dst=other)
        row.copy_(rows[0])
    else:
        dist.irecv(row, src=0).wait()
    return row


@ANSWERS.wrong(
    "04.spot_the_wait",
    "wrong",
    "before the row is read or returned",
    did="returned before the irecv was waited for",
)
def only_the_sender_waits(rows):
    rank, world_size = me()
    row = torch.empty_like(rows[0])
    if rank == 0:
        for other in range(1, world_size):
            row.copy_(rows[other])
            dist.isend(row, dst=other).wait()
        row.copy_(rows[0])
    else:
        dist.irecv(row, src=0)
    return row


@ANSWERS.wrong("04.spot_the_wait", "crashed", "what is made in it is not there")
def only_the_last_is_waited_for(rows):
    rank, world_size = me()
    row = torch.empty_like(rows[0])
    if rank == 0:
        for other in range(1, world_size):
            request = dist.isend(rows[other], dst=other)
        request.wait()
        row.copy_(rows[0])
    else:
        dist.irecv(row, src=0).wait()
    return row


@ANSWERS.wrong("04.spot_the_wait", "wrong", "before the buffer is written again")
def kept_but_not_waited_for(rows):
    rank, world_size = me()
    row = rows[0].clone()
    if rank == 0:
        requests = [dist.isend(rows[r], dst=r) for r in range(1, world_size)]
        dist.barrier()
        del requests
    else:
        dist.recv(row, src=0)
        dist.barrier()
    return row


@ANSWERS.wrong("04.spot_the_wait", "crashed", "is_completed() stays False")
def asks_again_and_again(rows):
    rank, world_size = me()
    row = rows[0].clone()
    if rank == 0:
        for other in range(1, world_size):
            request = dist.isend(rows[other], dst=other)
            while not request.is_completed():
                time.sleep(0.001)
    else:
        dist.recv(row, src=0)
    return row


@ANSWERS.wrong(
    "04.spot_the_wait",
    "wrong",
    "one buffer for all messages",
    did="one buffer for all messages",
)
def waits_at_the_end(rows):
    rank, world_size = me()
    row = torch.empty_like(rows[0])
    if rank == 0:
        requests = []
        for other in range(1, world_size):
            row.copy_(rows[other])
            requests.append(dist.isend(row, dst=other))
        row.copy_(rows[0])
        for request in requests:
            request.wait()
    else:
        dist.recv(row, src=0)
    return row


@ANSWERS.wrong("04.spot_the_wait", "wrong", "number that recv returns: the rank")
def row_from_recv(rows):
    rank, world_size = me()
    row = rows[0]
    if rank == 0:
        for other in range(1, world_size):
            dist.send(rows[other], other)
    else:
        row = dist.recv(torch.empty_like(row), src=0)
    return row


@ANSWERS.wrong("04.spot_the_wait", "wrong", "That is what wait() returns.")
def row_from_wait(rows):
    rank, world_size = me()
    row = rows[0]
    if rank == 0:
        for other in range(1, world_size):
            dist.send(rows[other], other)
    else:
        row = dist.irecv(torch.empty_like(row), src=0).wait()
    return row


@ANSWERS.wrong("04.spot_the_wait", "wrong", "What counts is rank 0's.")
def its_own_row(rows):
    return rows[dist.get_rank()].clone()


@ANSWERS.wrong("04.spot_the_wait", "wrong", "Your code calls scatter")
def with_a_collective(rows):
    row = torch.empty_like(rows[0])
    dist.scatter(row, list(rows) if dist.get_rank() == 0 else None)
    return row


@ANSWERS.wrong("04.spot_the_wait", "wrong", "Your code calls broadcast")
def with_another_collective(rows):
    rows = rows.clone()
    dist.broadcast(rows, 0)
    return rows[dist.get_rank()]


@ANSWERS.wrong("04.spot_the_wait", "wrong", "This rank has received nothing")
def rows_through_the_store(rows):
    store, key = distributed_c10d._get_default_store(), f"rows {tuple(rows.shape)}"
    if dist.get_rank() == 0:
        store.set(key, pickle.dumps(rows))
    return pickle.loads(store.get(key))[dist.get_rank()]


@ANSWERS.wrong("04.spot_the_wait", "wrong", "Send row r to rank r, and nothing else.")
def all_rows_to_all(rows):
    rank, world_size = me()
    if rank == 0:
        for other in range(1, world_size):
            dist.send(rows, other)
        return rows[0]
    received = torch.empty_like(rows)
    dist.recv(received, 0)
    return received[rank]


@ANSWERS.right("04.spot_the_wait")
def rows_as_objects(rows):
    rank, world_size = me()
    holder = [rows[0].clone()]
    if rank == 0:
        for other in range(1, world_size):
            dist.send_object_list([rows[other].clone()], dst=other)
    else:
        dist.recv_object_list(holder, src=0)
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


@ANSWERS.right("04.spot_the_wait")
def blocking(rows):
    rank, world_size = me()
    row = rows[0].clone()
    if rank == 0:
        for other in range(1, world_size):
            dist.send(rows[other], dst=other)
    else:
        dist.recv(row, src=0)
    return row


@ANSWERS.right("04.spot_the_wait")
def copies_and_a_batch(rows):
    rank, world_size = me()
    row = rows[0].clone()
    if rank == 0:
        ops = [dist.P2POp(dist.isend, rows[r].clone(), r) for r in range(1, world_size)]
    else:
        ops = [dist.P2POp(dist.irecv, row, 0)]
    for request in dist.batch_isend_irecv(ops) if ops else ():
        request.wait()
    return row


# ---------------------------------------------------------------------- 04.exchange


@ANSWERS.wrong("04.exchange", "not attempted", "It still raises NotImplementedError")
def exchange_stub(tensor):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong(
    "04.exchange", "stuck", "If all send first, nobody receives.", did="all send first"
)
def all_send_first(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    dist.send(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    return received


@ANSWERS.wrong("04.exchange", "stuck", "If all send first, nobody receives.")
def all_send_first_without_a_case_for_one(tensor):
    rank, n = me()
    received = torch.empty_like(tensor)
    dist.send(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    return received


@ANSWERS.wrong("04.exchange", "stuck", "must receive from rank - 1")
def receives_from_the_next(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % n)
    dist.recv(received, (rank + 1) % n)
    request.wait()
    return received


@ANSWERS.wrong("04.exchange", "stuck", "not all may receive first")
def all_receive_first(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    dist.recv(received, (rank - 1) % n)
    dist.send(tensor, (rank + 1) % n)
    return received


@ANSWERS.wrong("04.exchange", "stuck", "in the wait() of an isend?")
def waits_for_its_isend_first(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    dist.isend(tensor, (rank + 1) % n).wait()
    dist.recv(received, (rank - 1) % n)
    return received


@ANSWERS.wrong("04.exchange", "stuck", "Not all ranks wait, some have returned.")
def rank_0_sends_nothing(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    if rank > 0:
        request = dist.isend(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    if rank > 0:
        request.wait()
    return received


@ANSWERS.wrong(
    "04.exchange",
    "crashed",
    "A rank cannot send to itself.",
    did="a ring that is right for two ranks and more",
)
def not_for_one_rank(tensor):
    rank, n = me()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    request.wait()
    return received


@ANSWERS.wrong("04.exchange", "wrong", "That is the tensor of the next rank.")
def wrong_direction(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank - 1) % n)
    dist.recv(received, (rank + 1) % n)
    request.wait()
    return received


@ANSWERS.wrong("04.exchange", "wrong", "Wait for every request")
def send_not_waited_for(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    dist.barrier()  # so that no message is dropped: that would be a deadlock
    del request
    return received


@ANSWERS.wrong("04.exchange", "wrong", "That is the rank's own tensor.")
def returns_its_own(tensor):
    rank, n = me()
    if n > 1:
        received = torch.empty_like(tensor)
        request = dist.isend(tensor, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        request.wait()
    return tensor.clone()


@ANSWERS.wrong("04.exchange", "wrong", "It returned None.")
def returns_nothing(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    request.wait()


@ANSWERS.wrong(
    "04.exchange", "wrong", "the rank of the sender", did="`y = dist.recv(...)`"
)
def returns_what_recv_returns(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % n)
    received = dist.recv(received, (rank - 1) % n)
    request.wait()
    return received


@ANSWERS.wrong("04.exchange", "crashed", "is_completed() stays False")
def polls(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    while not request.is_completed():
        pass
    return received


def through_the_store(tensor):
    """What all ranks hold, without a message."""
    rank, n = me()
    store = distributed_c10d._get_default_store()
    case = f"{tensor.dtype} {tuple(tensor.shape)}"
    store.set(f"{case} {rank}", pickle.dumps(tensor))
    return [pickle.loads(store.get(f"{case} {other}")) for other in range(n)]


@ANSWERS.wrong("04.exchange", "wrong", "This rank has received nothing")
def through_the_store_around(tensor):
    return through_the_store(tensor)[dist.get_rank() - 1]


@ANSWERS.wrong("04.exchange", "wrong", "recv, collectives and operations such as")
def into_its_own(tensor):
    rank, n = me()
    if n == 1:
        return tensor
    request = dist.isend(tensor.clone(), (rank + 1) % n)
    dist.recv(tensor, (rank - 1) % n)
    request.wait()
    return tensor


@ANSWERS.wrong("04.exchange", "crashed", "must fit what the other receives")
def always_float32(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty(tensor.shape)
    request = dist.isend(tensor, (rank + 1) % n)
    dist.recv(received, (rank - 1) % n)
    request.wait()
    return received


@ANSWERS.wrong("04.exchange", "wrong", "Your code calls all_gather")
def by_all_gather(tensor):
    rank, n = me()
    tensors = [torch.empty_like(tensor) for _ in range(n)]
    dist.all_gather(tensors, tensor)
    return tensors[(rank - 1) % n]


@ANSWERS.wrong("04.exchange", "wrong", "int64 numbers that went through float32")
def exchanged_as_float32(tensor):
    return with_isend(tensor.float()).to(tensor.dtype)


@ANSWERS.wrong("04.exchange", "wrong", "Its dtype is float32, and the tensors that")
def exchanged_and_left_as_float32(tensor):
    return with_isend(tensor.float())


@ANSWERS.wrong("04.exchange", "wrong", "Is it received into memory of its own?")
def into_the_tensor_that_is_sent(tensor):
    rank, n = me()
    both = tensor.clone()
    request = isend(both, (rank + 1) % n)
    time.sleep(0.2 * rank)  # so rank 0 receives before rank 1 does
    recv(both, (rank - 1) % n)
    request.wait()
    return both


@ANSWERS.wrong("04.exchange", "wrong", "Rank r returns the tensor of rank r - 1")
def in_pairs_if_even(tensor):
    rank, n = me()
    if n % 2:
        return with_isend(tensor)
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, rank ^ 1)
    dist.recv(received, rank ^ 1)
    request.wait()
    return received


@ANSWERS.right("04.exchange")
def with_isend(tensor):
    rank, n = me()
    if n == 1:
        return tensor
    received = torch.empty_like(tensor)
    request = isend(tensor, (rank + 1) % n)
    recv(received, (rank - 1) % n)
    request.wait()
    return received


@ANSWERS.right("04.exchange")
def even_ranks_send_first(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    if rank % 2 == 0:
        dist.send(tensor, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
    else:
        dist.recv(received, (rank - 1) % n)
        dist.send(tensor, (rank + 1) % n)
    return received


@ANSWERS.right("04.exchange")
def one_rank_receives_first(tensor):
    rank, n = me()
    received = tensor.clone()
    if n > 1 and rank == n - 1:
        recv(received, rank - 1)
        send(tensor, 0)
    elif n > 1:
        send(tensor, rank + 1)
        recv(received, (rank - 1) % n)
    return received


@ANSWERS.right("04.exchange")
def with_a_batch(tensor):
    rank, n = me()
    if n == 1:
        return tensor.clone()
    received = torch.zeros_like(tensor)
    ops = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % n),
        dist.P2POp(dist.irecv, received, (rank - 1) % n),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    return received


@ANSWERS.wrong("04.exchange", "wrong", "Your code calls exchange")
def with_ours(tensor):
    rank, n = me()
    received = tensor.clone()
    if n > 1:
        collectives.exchange(tensor, (rank + 1) % n, received, (rank - 1) % n)
    return received


# -------------------------------------------------------------------- 04.all_reduce


@ANSWERS.wrong("04.all_reduce", "not attempted", "It still raises NotImplementedError")
def all_reduce_stub(tensor):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls all_reduce")
def by_dist(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls all_reduce")
def by_its_own_module(tensor):
    total = tensor.clone()
    distributed_c10d.all_reduce(total)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls allreduce")
def by_the_group(tensor):
    total = tensor.clone()
    dist.group.WORLD.allreduce([total]).wait()
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls all_reduce")
def by_functional(tensor):
    return functional.all_reduce(tensor, "sum", dist.group.WORLD) + 0


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls all_gather_object")
def by_objects(tensor):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, tensor)
    return sum(everything)


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls all_reduce_naive")
def by_ours(tensor):
    total = tensor.clone()
    collectives.all_reduce_naive(total)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls all_reduce_ring")
def by_our_ring(tensor):
    total = tensor.clone()
    ring.all_reduce_ring(total)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "Your code calls sum_over_ranks")
def by_our_sum(tensor):
    total = sgd.sum_over_ranks(*tensor.flatten().tolist())
    return torch.tensor(total, dtype=tensor.dtype).reshape(tensor.shape)


@ANSWERS.wrong("04.all_reduce", "wrong", "This rank has received nothing")
def by_the_store(tensor):
    return sum(through_the_store(tensor))


@ANSWERS.wrong("04.all_reduce", "wrong", "Wait for every request before")
def adds_before_it_has_come(tensor):
    rank, n = me()
    others = [r for r in range(n) if r != rank]
    incoming = [torch.zeros_like(tensor) for _ in others]
    requests = [dist.isend(tensor, r) for r in others]
    late = [dist.irecv(x, r) for x, r in zip(incoming, others, strict=True)]
    for request in requests:
        request.wait()
    total = sum(incoming, tensor.clone())
    dist.barrier()
    del late
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "a buffer of its own")
def one_buffer_for_all(tensor):
    rank, n = me()
    others = [r for r in range(n) if r != rank]
    incoming = torch.empty_like(tensor)
    requests = [dist.isend(tensor, r) for r in others]
    late = [dist.irecv(incoming, r) for r in others]
    for request in (*requests, *late):
        request.wait()
    return tensor + len(others) * incoming


@ANSWERS.wrong(
    "04.all_reduce",
    "stuck",
    "keep the request of an isend",
    wrong="Wait for every request",
)
def drops_its_requests(tensor):
    rank, n = me()
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    for other in range(n):
        if other != rank:
            dist.isend(tensor, other)
    time.sleep(0.2)
    for other in range(n):
        if other != rank:
            dist.recv(incoming, other)
            total += incoming
    return total


@ANSWERS.wrong("04.all_reduce", "stuck", "If all send first, nobody receives.")
def everybody_sends_first(tensor):
    rank, n = me()
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    for other in range(n):
        if other != rank:
            dist.send(tensor, other)
    for other in range(n):
        if other != rank:
            dist.recv(incoming, other)
            total += incoming
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "That is the sum of two ranks.")
def for_two_ranks_only(tensor):
    rank, n = me()
    other = rank ^ 1
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    if other < n:
        request = dist.isend(tensor, other)
        dist.recv(incoming, other)
        request.wait()
        total += incoming
    return total


def for_powers_of_two_only(tensor):
    rank, n = me()
    total, distance = tensor.clone(), 1
    while distance < n:
        other, incoming = rank ^ distance, torch.empty_like(tensor)
        request = dist.isend(total, other)
        dist.recv(incoming, other)
        request.wait()
        total = total + incoming
        distance *= 2
    return total


def to_rank_0(tensor):
    """What rank 0 returns of a reduce; the others their own."""
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.recv(incoming, other)
            total += incoming
    else:
        dist.send(tensor, 0)
    return total


def from_rank_0(total):
    """A broadcast from rank 0, in place."""
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(total, other)
    else:
        dist.recv(total, 0)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "You pass on the running sum")
def passes_on_the_running_sum(tensor):
    rank, n = me()
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(n - 1):
        request = dist.isend(total, (rank + 1) % n)
        dist.recv(incoming, (rank - 1) % n)
        request.wait()
        total += incoming
    return total


@ANSWERS.wrong(
    "04.all_reduce",
    "wrong",
    "It must be sent back to all the others.",
    did="only the sum on rank 0",
)
def only_rank_0_has_it(tensor):
    return to_rank_0(tensor)


@ANSWERS.wrong("04.all_reduce", "wrong", "That is the mean.")
def divided(tensor):
    return from_rank_0(to_rank_0(tensor)) / dist.get_world_size()


@ANSWERS.wrong("04.all_reduce", "wrong", "Its dtype is float32, and the tensors that")
def begins_with_float32_zeros(tensor):
    total = torch.zeros(tensor.shape)
    total += to_rank_0(tensor)
    return from_rank_0(total)


@ANSWERS.wrong("04.all_reduce", "wrong", "number that recv returns: the rank")
def sum_from_recv(tensor):
    rank, n = me()
    total = to_rank_0(tensor)
    if rank > 0:
        return dist.recv(total, 0)
    return from_rank_0(total)


@ANSWERS.wrong("04.all_reduce", "wrong", "plus the ranks of the senders")
def adds_what_recv_returns(tensor):
    rank, n = me()
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    if rank == 0:
        for other in range(1, n):
            total += dist.recv(incoming, other)
    else:
        dist.send(tensor, 0)
    return from_rank_0(total)


@ANSWERS.wrong("04.all_reduce", "wrong", "so do not add to it")
def adds_to_the_sum(tensor):
    total = to_rank_0(tensor)
    if dist.get_rank() == 0:
        return from_rank_0(total)
    return tensor + from_rank_0(total)


@ANSWERS.wrong("04.all_reduce", "crashed", "taken its own number for another one's")
def sends_to_all_and_itself(tensor):
    rank, n = me()
    requests = [dist.isend(tensor, other) for other in range(n)]
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    for other in range(n):
        dist.recv(incoming, other)
        total += incoming
    for request in requests:
        request.wait()
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "It returned None.")
def in_place(tensor):
    tensor.copy_(from_rank_0(to_rank_0(tensor)))


@ANSWERS.wrong("04.all_reduce", "wrong", "it is in the tensor that was given.")
def its_argument_where_there_is_one_rank(tensor):
    if dist.get_world_size() == 1:
        return tensor
    return from_rank_0(to_rank_0(tensor))


@ANSWERS.wrong("04.all_reduce", "wrong", "int64 numbers that went through float32")
def added_as_float32(tensor):
    return from_rank_0(to_rank_0(tensor.float())).to(tensor.dtype)


@ANSWERS.wrong("04.all_reduce", "crashed", "There is no such rank")
def by_doubling_where_it_is_even(tensor):
    """The last of an odd number of ranks gives its tensor to rank 0, and waits."""
    rank, n = me()
    if n == 1:
        return tensor.clone()
    total, incoming, even = tensor.clone(), torch.empty_like(tensor), n - n % 2
    if rank == even:
        dist.send(total, 0)
    elif rank == 0 and even < n:
        dist.recv(incoming, even)
        total += incoming
    distance = 1
    while rank < even and distance < even:
        request = dist.isend(total.clone(), rank ^ distance)
        dist.recv(incoming, rank ^ distance)
        request.wait()
        total += incoming
        distance *= 2
    if rank == even:
        dist.recv(total, 0)
    elif rank == 0 and even < n:
        dist.send(total, even)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "it is in the tensor that was given.")
def in_place_and_returned(tensor):
    tensor.copy_(from_rank_0(to_rank_0(tensor)))
    return tensor


@ANSWERS.wrong("04.all_reduce", "wrong", "That is the rank's own tensor")
def nothing_done(tensor):
    return tensor.clone()


@ANSWERS.wrong(
    "04.all_reduce",
    "wrong",
    "Each recv overwrites its buffer",
    did="received all into one buffer, and added at the end",
)
def overwritten(tensor):
    total = tensor.clone()
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.recv(total, other)
    else:
        dist.send(tensor, 0)
    return from_rank_0(total)


@ANSWERS.wrong("04.all_reduce", "wrong", "plus that of the last rank")
def adds_after_the_loop(tensor):
    rank, n = me()
    total, incoming = tensor.clone(), torch.zeros_like(tensor)
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(total, 0)
        return total
    for other in range(1, n):
        dist.recv(incoming, other)
    total += incoming
    for other in range(1, n):
        dist.send(total, other)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "it must send the sum out when it has added")
def sends_the_sum_too_early(tensor):
    rank, n = me()
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    if rank > 0:
        dist.send(total, 0)
        dist.recv(total, 0)
        return total
    for other in range(1, n):
        dist.recv(incoming, other)
        total += incoming
        dist.send(total, other)
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "the number of ranks is a power of two")
def with_partners_only(tensor):
    rank, n = me()
    total, distance = tensor.clone(), 1
    while distance < n:
        partner = rank ^ distance
        if partner < n:
            incoming = torch.empty_like(total)
            request = dist.isend(total, partner)
            dist.recv(incoming, partner)
            request.wait()
            total = total + incoming
        distance *= 2
    return total


@ANSWERS.wrong("04.all_reduce", "wrong", "own tensor is missing in its sum")
def without_its_own(tensor):
    return from_rank_0(to_rank_0(tensor)) - tensor


@ANSWERS.wrong("04.all_reduce", "wrong", "Rank 0's own tensor is missing")
def begins_with_zeros(tensor):
    total = tensor if dist.get_rank() else torch.zeros_like(tensor)
    return from_rank_0(to_rank_0(total))


@ANSWERS.wrong("04.all_reduce", "wrong", "own tensor is in it twice")
def with_its_own_twice(tensor):
    return from_rank_0(to_rank_0(tensor)) + tensor


@ANSWERS.wrong("04.all_reduce", "wrong", "only the last one has it all")
def a_chain_one_way(tensor):
    rank, n = me()
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    if rank > 0:
        dist.recv(incoming, rank - 1)
        total += incoming
    if rank < n - 1:
        dist.send(total, rank + 1)
    return total


@ANSWERS.wrong("04.all_reduce", "crashed", "must fit what the other receives")
def float32_buffers(tensor):
    total, incoming = tensor.clone(), torch.empty(tensor.shape)
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.recv(incoming, other)
            total += incoming
    else:
        dist.send(tensor, 0)
    return from_rank_0(total)


@ANSWERS.right("04.all_reduce")
def through_rank_0(tensor):
    return from_rank_0(to_rank_0(tensor))


@ANSWERS.right("04.all_reduce")
def everybody_to_everybody(tensor):
    rank, n = me()
    others = [r for r in range(n) if r != rank]
    incoming = [torch.empty_like(tensor) for _ in others]
    requests = [dist.isend(tensor, r) for r in others]
    requests += [
        dist.irecv(buffer, r) for buffer, r in zip(incoming, others, strict=True)
    ]
    for request in requests:
        request.wait()
    return tensor + sum(incoming)


@ANSWERS.right("04.all_reduce")
def around_the_ring(tensor):
    rank, n = me()
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(n - 1):
        incoming = torch.empty_like(tensor)
        ops = [
            dist.P2POp(dist.isend, passing, (rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % n),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        total += incoming
        passing = incoming
    return total


@ANSWERS.right("04.all_reduce")
def a_chain_there_and_back(tensor):
    rank, n = me()
    total = tensor.clone()
    if rank > 0:
        incoming = torch.zeros_like(tensor)
        recv(incoming, rank - 1)
        total = total + incoming
    if rank < n - 1:
        send(total, rank + 1)
        recv(total, rank + 1)
    if rank > 0:
        send(total, rank - 1)
    return total


@ANSWERS.right("04.all_reduce")
def as_they_come(tensor):
    total, incoming = tensor.clone(), torch.empty_like(tensor)
    rank, n = me()
    if rank == 0:
        for _ in range(n - 1):
            dist.recv(incoming)  # from anybody
            total += incoming
        for request in [dist.isend(total, other) for other in range(1, n)]:
            request.wait()
    else:
        dist.send(tensor, group=dist.group.WORLD, group_dst=0)
        dist.irecv(total, 0).wait()
    dist.barrier()
    return total


@ANSWERS.right("04.all_reduce")
def with_object_messages(tensor):
    rank, n = me()
    holder = [tensor]
    if rank == 0:
        for other in range(1, n):
            dist.recv_object_list(holder_of := [None], src=other)
            holder[0] = holder[0] + holder_of[0]
        for other in range(1, n):
            dist.send_object_list(holder, dst=other)
    else:
        dist.send_object_list(holder, dst=0)
        dist.recv_object_list(holder, src=0)
    return holder[0].clone()


# --------------------------------------------------------------------- 04.broadcast


@ANSWERS.wrong("04.broadcast", "not attempted", "It still raises NotImplementedError")
def broadcast_stub(tensor, src=0):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("04.broadcast", "wrong", "as many steps as there are other ranks")
def one_after_the_other(tensor, src=0):
    rank, n = me()
    if rank == src:
        for other in range(n):
            if other != src:
                dist.send(tensor, other)
    else:
        dist.recv(tensor, src)


@ANSWERS.wrong("04.broadcast", "wrong", "as many steps as there are other ranks")
def all_at_once(tensor, src=0):
    """isend starts many messages, but a rank still sends them one by one."""
    rank, n = me()
    if rank == src:
        works = [dist.isend(tensor, other) for other in range(n) if other != src]
        for work in works:
            work.wait()
    else:
        dist.recv(tensor, src)


@ANSWERS.wrong("04.broadcast", "wrong", "as many steps as there are other ranks")
def a_chain(tensor, src=0):
    rank, n = me()
    place = (rank - src) % n
    if place > 0:
        dist.recv(tensor, (rank - 1) % n)
    if place < n - 1:
        dist.send(tensor, (rank + 1) % n)


@ANSWERS.wrong("04.broadcast", "wrong", "it took too many steps")
def a_tree_of_two_children(tensor, src=0):
    rank, n = me()
    place = (rank - src) % n
    if place > 0:
        dist.recv(tensor, ((place - 1) // 2 + src) % n)
    for child in (2 * place + 1, 2 * place + 2):
        if child < n:
            dist.send(tensor, (child + src) % n)


@ANSWERS.wrong(
    "04.broadcast", "wrong", "src need not be rank 0", did="a tree for `src=0` only"
)
def always_from_rank_0(tensor, src=0):
    rank, n = me()
    distance = 1
    while distance < n:
        if rank < distance and rank + distance < n:
            dist.send(tensor, rank + distance)
        elif distance <= rank < 2 * distance:
            dist.recv(tensor, rank - distance)
        distance *= 2


@ANSWERS.wrong("04.broadcast", "stuck", "a place may have no partner in the last one")
def partners_in_a_circle(tensor, src=0):
    rank, n = me()
    place, distance = (rank - src) % n, 1
    while distance < n:
        if place < distance:
            dist.send(tensor, (rank + distance) % n)
        elif place < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@ANSWERS.wrong("04.broadcast", "stuck", "With src = 0 it went through")
def places_below_zero(tensor, src=0):
    rank, n = me()
    place, distance = rank - src, 1
    while distance < n:
        if place < distance and place + distance < n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= place < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@ANSWERS.wrong("04.broadcast", "wrong", "Does the loop end too early?")
def a_step_too_few(tensor, src=0):
    rank, n = me()
    place, distance = (rank - src) % n, 1
    for _ in range(n.bit_length() - 1):
        if place < distance and place + distance < n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= place < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@ANSWERS.wrong("04.broadcast", "crashed", "Is the number a place, or a rank?")
def sends_to_places(tensor, src=0):
    rank, n = me()
    place, distance = (rank - src) % n, 1
    while distance < n:
        if place < distance and place + distance < n:
            dist.send(tensor, place + distance)
        elif distance <= place < 2 * distance:
            dist.recv(tensor, place - distance)
        distance *= 2


@ANSWERS.wrong("04.broadcast", "crashed", "number that recv returns: the rank")
def keeps_what_recv_returns(tensor, src=0):
    rank, n = me()
    place, distance = (rank - src) % n, 1
    while distance < n:
        if place < distance and place + distance < n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= place < 2 * distance:
            tensor = dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@ANSWERS.wrong("04.broadcast", "wrong", "Receive into the tensor that was given")
def returns_it(tensor, src=0):
    rank, n = me()
    tensor = tensor.clone()
    collectives_tree(tensor, src)
    return tensor


def collectives_tree(tensor, src):
    rank, n = me()
    place, distance = (rank - src) % n, 1
    while distance < n:
        if place < distance and place + distance < n:
            dist.send(tensor, (rank + distance) % n)
        elif distance <= place < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2


@ANSWERS.wrong("04.broadcast", "wrong", "Wait for every request before")
def never_waits_for_its_sends(tensor, src=0):
    rank, n = me()
    place, distance, requests = (rank - src) % n, 1, []
    while distance < n:
        if place < distance and place + distance < n:
            requests.append(dist.isend(tensor, (rank + distance) % n))
        elif distance <= place < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2
    dist.barrier()  # so that no message is dropped: that would be a deadlock


@ANSWERS.wrong("04.broadcast", "wrong", "No message was sent.")
def no_messages(tensor, src=0):
    return tensor


@ANSWERS.wrong("04.broadcast", "wrong", "more messages than needed")
def with_thanks(tensor, src=0):
    """Each receiver thanks its sender."""
    rank, n = me()
    place, distance, thanks = (rank - src) % n, 1, torch.zeros(1)
    while distance < n:
        if place < distance and place + distance < n:
            dist.send(tensor, (rank + distance) % n)
            dist.recv(thanks, (rank + distance) % n)
        elif distance <= place < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
            dist.send(thanks, (rank - distance) % n)
        distance *= 2


@ANSWERS.wrong("04.broadcast", "wrong", "Your code calls broadcast")
def by_the_real_one(tensor, src=0):
    dist.broadcast(tensor, src)


@ANSWERS.wrong("04.broadcast", "wrong", "Your code calls broadcast")
def by_an_object(tensor, src=0):
    holder = [tensor]
    dist.broadcast_object_list(holder, src)
    tensor.copy_(holder[0])


@ANSWERS.wrong("04.broadcast", "wrong", "Your code calls broadcast_tree")
def by_our_tree(tensor, src=0):
    collectives.broadcast_tree(tensor, src)


@ANSWERS.wrong("04.broadcast", "wrong", "int64 numbers that went through float32")
def through_a_float32_buffer(tensor, src=0):
    buffer = tensor.float()
    collectives_tree(buffer, src)
    tensor.copy_(buffer)


def children_of(place, n):
    """Of a binomial tree: the one with the most descendants first."""
    distance = 1
    while distance < n and not place & distance:
        distance *= 2
    while distance > 1:
        distance //= 2
        if place + distance < n:
            yield place + distance


def received_from_parent(tensor, src):
    """Its place, after it has the tensor. The parent lacks the lowest bit of it."""
    rank, n = me()
    place = (rank - src) % n
    if place:
        dist.recv(tensor, ((place & (place - 1)) + src) % n)
    return place


@ANSWERS.right("04.broadcast")
def isends_waited_for_at_the_end(tensor, src=0):
    _, n = me()
    place = received_from_parent(tensor, src)
    requests = [dist.isend(tensor, (p + src) % n) for p in children_of(place, n)]
    for request in requests:
        request.wait()


@ANSWERS.right("04.broadcast")
def one_batch_for_the_children(tensor, src=0):
    _, n = me()
    place = received_from_parent(tensor, src)
    sends = [
        dist.P2POp(dist.isend, tensor, (p + src) % n) for p in children_of(place, n)
    ]
    for request in dist.batch_isend_irecv(sends) if sends else ():
        request.wait()


@ANSWERS.right("04.broadcast")
def halves_with_isends(tensor, src=0):
    rank, n = me()
    place, low, high, requests = (rank - src) % n, 0, n, []
    while high - low > 1:
        middle = (low + high + 1) // 2
        if place == low:
            requests.append(dist.isend(tensor, (middle + src) % n))
        elif place == middle:
            dist.irecv(tensor, (low + src) % n).wait()
        low, high = (low, middle) if place < middle else (middle, high)
    for request in requests:
        request.wait()


@ANSWERS.right("04.broadcast")
def doubling_with_isends(tensor, src=0):
    rank, n = me()
    place, distance, requests = (rank - src) % n, 1, []
    while distance < n:
        if place < distance and place + distance < n:
            requests.append(dist.isend(tensor, (rank + distance) % n))
        elif distance <= place < 2 * distance:
            dist.recv(tensor, (rank - distance) % n)
        distance *= 2
    for request in requests:
        request.wait()


@ANSWERS.wrong("04.broadcast", "wrong", "first to the one that hands on to the most")
def smallest_branch_first(tensor, src=0):
    _, n = me()
    place = received_from_parent(tensor, src)
    children = reversed(list(children_of(place, n)))
    for request in [dist.isend(tensor, (p + src) % n) for p in children]:
        request.wait()


@ANSWERS.right("04.broadcast")
def doubling(tensor, src=0):
    collectives_tree(tensor, src)


@ANSWERS.right("04.broadcast")
def by_halves(tensor, src=0):
    """The first of a range sends to the first of its second half."""
    rank, n = me()
    place, low, high = (rank - src) % n, 0, n
    while high - low > 1:
        middle = (low + high + 1) // 2
        if place == low:
            dist.send(tensor, (middle + src) % n)
        elif place == middle:
            dist.recv(tensor, (low + src) % n)
        low, high = (low, middle) if place < middle else (middle, high)


@ANSWERS.right("04.broadcast")
def by_lists(tensor, src=0):
    """Everybody works out who has it, step by step, and who is next."""
    rank, n = me()
    have, need = [src], [r for r in range(n) if r != src]
    while need:
        pairs = list(zip(have, need, strict=False))
        for source, target in pairs:
            if rank == source:
                dist.isend(tensor, target).wait()
            elif rank == target:
                dist.irecv(tensor, source).wait()
        have += [target for _, target in pairs]
        need = need[len(pairs) :]


@ANSWERS.right("04.broadcast")
def largest_distance_first(tensor, src=0):
    """As MPICH does: receive from the parent, then send to ever nearer children."""
    rank, n = me()
    place, mask = (rank - src) % n, 1
    while mask < n:
        if place & mask:
            buffer = torch.empty_like(tensor)
            dist.recv(buffer, (rank - mask) % n)
            tensor.copy_(buffer)
            break
        mask *= 2
    mask //= 2
    while mask:
        if place + mask < n:
            dist.send(tensor, (rank + mask) % n)
        mask //= 2


# -------------------------------------------------------------------- 04.even_group


@ANSWERS.wrong("04.even_group", "not attempted", "Repair the code")
def sum_of_even_ranks(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank % 2 == 0:
        group = dist.new_group(list(range(0, world_size, 2)))
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total


@ANSWERS.wrong("04.even_group", "wrong", "the next group that all ranks make will hang")
def members_only(tensor):
    evens = [r for r in range(dist.get_world_size()) if r % 2 == 0]
    if dist.get_rank() not in evens:
        return None
    total = tensor.clone()
    dist.all_reduce(total, group=dist.new_group(evens))
    return total


@ANSWERS.wrong(
    "04.even_group",
    "wrong",
    "use_local_synchronization=True does not help",
    did="`use_local_synchronization=True`",
)
def synchronized_by_members(tensor):
    rank, n = me()
    if rank % 2 == 0:
        evens = list(range(0, n, 2))
        group = dist.new_group(evens, use_local_synchronization=True)
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total


@ANSWERS.wrong("04.even_group", "wrong", "The odd ranks must return None")
def odd_ranks_return_theirs(tensor):
    rank, n = me()
    group = dist.new_group(list(range(0, n, 2)))
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


@ANSWERS.wrong("04.even_group", "wrong", "That is the sum over all ranks.")
def in_the_world(tensor):
    rank, n = me()
    dist.new_group(list(range(0, n, 2)))
    total = tensor.clone()
    dist.all_reduce(total)
    return total


@ANSWERS.wrong("04.even_group", "wrong", "there is no group any more")
def with_zeros(tensor):
    rank = dist.get_rank()
    total = tensor.clone() if rank % 2 == 0 else torch.zeros_like(tensor)
    dist.all_reduce(total)
    return total if rank % 2 == 0 else None


@ANSWERS.wrong("04.even_group", "wrong", "odd ranks took part in it")
def a_group_of_all_with_zeros(tensor):
    group = dist.new_group()
    total = tensor.clone() if dist.get_rank() % 2 == 0 else torch.zeros_like(tensor)
    dist.all_reduce(total, group=group)
    return total if dist.get_rank() % 2 == 0 else None


@ANSWERS.wrong("04.even_group", "wrong", "odd ranks took part in it")
def a_group_for_show(tensor):
    rank, n = me()
    dist.new_group(list(range(0, n, 2)))
    total = tensor.clone() if rank % 2 == 0 else torch.zeros_like(tensor)
    dist.all_reduce(total)
    return total if rank % 2 == 0 else None


@ANSWERS.wrong("04.even_group", "crashed", "`src` and `dst` are ranks of the whole job")
def counts_in_the_group(tensor):
    rank, n = me()
    evens = list(range(0, n, 2))
    group = dist.new_group(evens)
    if rank % 2:
        return None
    total, last = tensor.clone(), len(evens) - 1
    dist.reduce(total, dst=last, group=group)
    dist.broadcast(total, src=last, group=group)
    return total


@ANSWERS.wrong("04.even_group", "crashed", "The even ranks depend on the world size")
def always_four_ranks(tensor):
    group = dist.new_group([0, 2])
    if dist.get_rank() % 2 == 0:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total


@ANSWERS.wrong("04.even_group", "stuck", "Without `group=...`")
def in_the_group_of_all(tensor):
    rank, n = me()
    dist.new_group(list(range(0, n, 2)))
    if rank % 2 == 0:
        result = tensor.clone()
        dist.all_reduce(result)
        return result


@ANSWERS.wrong("04.even_group", "crashed", "of n ranks, (n + 1) // 2 are even")
def half_of_the_ranks(tensor):
    rank, n = me()
    group = dist.new_group([2 * i for i in range(n // 2)])
    if rank % 2 == 0:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total


@ANSWERS.wrong("04.even_group", "wrong", "it is in the tensor that was given.")
def alone_it_is_the_sum(tensor):
    total = everybody_makes_it(tensor)
    return tensor if dist.get_world_size() == 1 else total


@ANSWERS.wrong("04.even_group", "wrong", "does the list of the group's ranks lack one?")
def without_the_last_even_rank(tensor):
    rank, n = me()
    group = dist.new_group(list(range(0, n - 1, 2)) or [0])
    if rank % 2 == 0:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total


@ANSWERS.wrong("04.even_group", "wrong", "it is in the tensor that was given.")
def even_in_place(tensor):
    rank, n = me()
    group = dist.new_group(list(range(0, n, 2)))
    if rank % 2 == 0:
        dist.all_reduce(tensor, group=group)
        return tensor


@ANSWERS.wrong("04.even_group", "wrong", "That is the rank's own tensor.")
def even_nothing_added(tensor):
    rank, n = me()
    group = dist.new_group(list(range(0, n, 2)))
    if rank % 2 == 0:
        dist.all_reduce(tensor.clone(), group=group)
        return tensor.clone()


@ANSWERS.wrong("04.even_group", "wrong", "With async_op=True, all_reduce returns")
def even_without_a_wait(tensor):
    rank, n = me()
    group = dist.new_group(list(range(0, n, 2)))
    if rank % 2 == 0:
        total = tensor.clone()
        dist.all_reduce(total, group=group, async_op=True)
        return total


@ANSWERS.right("04.even_group")
def even_with_a_wait(tensor):
    rank, n = me()
    group = dist.new_group(list(range(0, n, 2)))
    total = tensor.clone()
    if rank % 2 == 0:
        work = dist.all_reduce(total, group=group, async_op=True)
        work.wait()
        return total


@ANSWERS.right("04.even_group")
def everybody_makes_it(tensor):
    rank, n = me()
    group = dist.new_group(ranks=list(range(0, n, 2)))
    if rank % 2:
        return None
    total = tensor.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


@ANSWERS.right("04.even_group")
def by_enumeration(tensor):
    rank, n = me()
    lists = [r for r in (list(range(0, n, 2)), list(range(1, n, 2))) if r]
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
    group = dist.new_group([r for r in range(dist.get_world_size()) if r % 2 == 0])
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


@ANSWERS.wrong("04.even_group", "wrong", "nothing in `course_utils`")
def by_the_courses_all_reduce(tensor):
    group = dist.new_group(list(range(0, dist.get_world_size(), 2)))
    if dist.get_rank() % 2 == 0:
        total = tensor.clone()
        collectives.all_reduce_naive(total, group=group)
        return total


test_wrong, test_right = ANSWERS.tests()


def test_a_message_to_a_rank_that_does_not_exist():
    """The check looks, because gloo reads past the end of its list of ranks."""
    outcome = run_check("04.all_reduce", for_powers_of_two_only)
    text = " ".join(str(outcome).split())
    assert outcome.status == "crashed"
    assert "there is no rank 3 among 3" in text and "no such rank" in text, text


def test_hint_1_of_the_tuple_names_the_repair_that_is_none():
    assert "`args=(n)` and `args=n`" in find_task("04.spot_the_tuple").hints[0]
