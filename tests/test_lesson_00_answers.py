"""Lesson 00: different right answers, and wrong ones that no near miss covers."""

import os
import time

import torch
import torch.distributed as dist

from tests.answers import Answers

ANSWERS = Answers()

# --------------------------------------------------------------------- 00.who_am_i


@ANSWERS.wrong("00.who_am_i", "not attempted", "It still raises NotImplementedError")
def stub():
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("00.who_am_i", "wrong", "The text must read exactly like")
def two_numbers():
    return dist.get_rank(), dist.get_world_size()


@ANSWERS.right("00.who_am_i")
def asks_the_environment():
    return "rank " + os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"]


RANK = "dist.get_rank()"
ANSWERS.edited(
    "00.who_am_i",
    right=[(RANK, "dist.group.WORLD.rank()")],
    wrong=[
        ("It must be called, with parentheses", "get_world_size()", "get_world_size"),
        ("with an f in front", 'f"', '"'),
    ],
    crashed=[("In a function: dist.get_rank().", RANK, "rank")],
)

# ---------------------------------------------------------------------- 00.average


@ANSWERS.wrong("00.average", "wrong", "never waited for all_reduce")
def sleeps_and_does_not_wait(tensor):
    total = tensor.clone()
    dist.all_reduce(total, async_op=True)
    time.sleep(0.05)  # by now it is there, by chance
    return total / dist.get_world_size()


BUFFER = torch.empty(0)


@ANSWERS.wrong("00.average", "wrong", "the next call writes over them")
def always_into_one_buffer(tensor):
    BUFFER.resize_(tensor.shape).copy_(tensor)
    dist.all_reduce(BUFFER)
    return BUFFER.div_(dist.get_world_size())


@ANSWERS.right("00.average")
def mean_of_all_gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts).mean(dim=0)


@ANSWERS.right("00.average")
def reduce_and_broadcast(tensor):
    total = torch.nn.Parameter(tensor.clone())
    dist.reduce(total.data, dst=0)
    mean = total / dist.get_world_size()
    dist.broadcast(mean.data, src=0)
    return mean


@ANSWERS.right("00.average")
def divided_when_it_has_come(tensor):
    future = dist.all_reduce(tensor.clone(), async_op=True).get_future()
    return future.then(lambda sum_: sum_.value()[0] / dist.get_world_size()).wait()


@ANSWERS.right("00.average")
def as_objects(tensor):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tensor)
    return sum(everywhere) / len(everywhere)


CLONE, DIVIDE = "tensor.clone()", " / dist.get_world_size()"
ALL_REDUCE = "dist.all_reduce(total)"
ALONE = "return tensor if dist.get_world_size() == 1 else total"
ANSWERS.edited(
    "00.average",
    right=[
        (CLONE, CLONE + DIVIDE, f"total{DIVIDE}", "total"),
        (ALL_REDUCE, "dist.all_reduce(total, async_op=True).wait()"),
    ],
    wrong=[
        ("the second one is not", CLONE, f"vars(average).setdefault('total', {CLONE})"),
        ("where there is only one rank", "return total", ALONE),
        ("its dtype is float64; float32 was expected", CLONE, "tensor.double()"),
    ],
)

# ---------------------------------------------------------------- 00.spot_the_hang

NOT_ALL = "a collective that not every rank calls"


@ANSWERS.wrong("00.spot_the_hang", "not attempted", "Repair log_loss in its cell")
def log_loss(loss):
    """As it was given, but for this docstring."""
    if dist.get_rank() == 0:
        total = loss.clone()  # and this comment
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "crashed", "stands under an `if` on the rank")
def only_the_return_outside(loss):
    if dist.get_rank() == 0:
        total = loss.clone()
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@ANSWERS.right("00.spot_the_hang")
def gathered_where_it_is_reported(loss):
    rank, n = dist.get_rank(), dist.get_world_size()
    losses = [torch.zeros(()) for _ in range(n)] if rank == 0 else None
    dist.gather(loss, losses)
    return float(sum(losses)) / n if losses else None


IF = "if dist.get_rank() == 0:"
ALL_BUT_0 = f"dist.barrier()\n    {IF}\n        {ALL_REDUCE}"
BARRIER_HERE = f"{IF}\n        {ALL_REDUCE}\n    else:\n        dist.barrier()"
ANSWERS.edited(
    "00.spot_the_hang",
    right=[
        (ALL_REDUCE, "dist.reduce(total, dst=0)"),
        (ALL_REDUCE, "dist.reduce(total, dst=0, async_op=True).wait()"),
        (ALL_REDUCE, f"{IF}\n        {ALL_REDUCE}\n    else:\n        {ALL_REDUCE}"),
    ],
    stuck=[(NOT_ALL, ALL_REDUCE, ALL_BUT_0)],
    crashed=[("A barrier is a collective too", ALL_REDUCE, BARRIER_HERE)],
    wrong=[
        ("but it is no Python number", "total.item()", "total"),
        ("The other ranks must return None", IF, "if True:"),
    ],
)

# ------------------------------------------------------------------ 00.predict_sum

ANSWERS.wrong("00.predict_sum", "not attempted", 'Answer quiz("00.predict_sum").')(...)
ANSWERS.wrong("00.predict_sum", "wrong", "each rank multiplies by its own number")(50)
ANSWERS.wrong("00.predict_sum", "wrong", "Write down five numbers")(7)
for value in (100, 100.0, torch.tensor(100), "100"):
    ANSWERS.right("00.predict_sum")(value)

test_wrong, test_right = ANSWERS.tests()
