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


@ANSWERS.wrong("00.who_am_i", "wrong", "It must be called, with parentheses")
def forgot_the_parentheses():
    return f"rank {dist.get_rank()} of {dist.get_world_size}"


@ANSWERS.wrong("00.who_am_i", "wrong", "The text must be just that, word by word")
def two_numbers():
    return dist.get_rank(), dist.get_world_size()


@ANSWERS.right("00.who_am_i")
def asks_the_group():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


@ANSWERS.right("00.who_am_i")
def asks_the_environment():
    return "rank " + os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"]


@ANSWERS.right("00.who_am_i")
def counts_the_others():
    ones = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(ones)
    return "rank {} of {}".format(dist.get_rank(), ones.item())  # noqa: UP032


@ANSWERS.right("00.who_am_i")
def asks_the_group_object():
    group = dist.group.WORLD
    return f"rank {group.rank()} of {group.size()}"


@ANSWERS.right("00.who_am_i")
def puts_words_together():
    words = ["rank", dist.get_rank(), "of", dist.get_world_size()]
    return " ".join(map(str, words))


# ---------------------------------------------------------------------- 00.average


@ANSWERS.wrong("00.average", "wrong", "never waited for all_reduce")
def sleeps_and_does_not_wait(tensor):
    total = tensor.clone()
    dist.all_reduce(total, async_op=True)
    time.sleep(0.05)  # by now it is there, by chance
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "Return a new tensor, with one rank as well.")
def itself_where_it_is_alone(tensor):
    return tensor if dist.get_world_size() == 1 else add_then_divide(tensor)


buffers = {}


@ANSWERS.wrong("00.average", "wrong", "another call of the function has changed this")
def always_in_the_same_tensor(tensor):
    total = buffers.setdefault(tensor.shape, torch.empty_like(tensor))
    total.copy_(tensor)
    dist.all_reduce(total)
    return total.div_(dist.get_world_size())


@ANSWERS.wrong("00.average", "wrong", "its dtype is float64; float32 was expected")
def in_double_precision(tensor):
    return add_then_divide(tensor.double())


@ANSWERS.right("00.average")
def add_then_divide(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@ANSWERS.right("00.average")
def divide_then_add(tensor):
    part = tensor / dist.get_world_size()
    dist.all_reduce(part, op=dist.ReduceOp.SUM)
    return part


@ANSWERS.right("00.average")
def mean_of_all_gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts).mean(dim=0)


@ANSWERS.right("00.average")
def asynchronous_and_waited(tensor):
    total = tensor.clone()
    dist.all_reduce(total, async_op=True).wait()
    return total.div_(dist.get_world_size())


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


# ---------------------------------------------------------------- 00.spot_the_hang

NOT_ALL = "a collective that not every rank calls"


@ANSWERS.wrong("00.spot_the_hang", "not attempted", "Repair the code in the cell above")
def log_loss(loss):
    """As it was given, but for this docstring."""
    if dist.get_rank() == 0:
        total = loss.clone()  # and this comment
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "stuck", NOT_ALL)
def a_barrier_for_all(loss):
    dist.barrier()
    return log_loss(loss)


@ANSWERS.wrong("00.spot_the_hang", "crashed", NOT_ALL)
def only_the_return_outside(loss):
    if dist.get_rank() == 0:
        total = loss.clone()
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "crashed", "A barrier is a collective too")
def a_barrier_for_the_others(loss):
    if dist.get_rank() == 0:
        return collective_before_the_if(loss)
    dist.barrier()


@ANSWERS.wrong("00.spot_the_hang", "wrong", "but no Python number")
def as_a_tensor(loss):
    mean = collective_before_the_if(loss)
    return None if mean is None else torch.tensor(mean)


@ANSWERS.wrong("00.spot_the_hang", "wrong", "The other ranks must return None")
def zero_elsewhere(loss):
    return collective_before_the_if(loss) or 0.0


@ANSWERS.right("00.spot_the_hang")
def collective_before_the_if(loss):
    total = loss.clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        return total.item() / dist.get_world_size()


@ANSWERS.right("00.spot_the_hang")
def reduce_to_one(loss):
    total = loss.clone()
    dist.reduce(total, dst=0)
    return (total / dist.get_world_size()).item() if dist.get_rank() == 0 else None


@ANSWERS.right("00.spot_the_hang")
def the_others_call_it_too(loss):
    total = loss.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()
    else:
        dist.all_reduce(total)


@ANSWERS.right("00.spot_the_hang")
def gathered_where_it_is_reported(loss):
    rank, n = dist.get_rank(), dist.get_world_size()
    losses = [torch.zeros(()) for _ in range(n)] if rank == 0 else None
    dist.gather(loss, losses)
    return float(sum(losses)) / n if losses else None


@ANSWERS.right("00.spot_the_hang")
def numbers_of_all(loss):
    losses = [None] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    return None if dist.get_rank() else sum(losses) / len(losses)


# ------------------------------------------------------------------ 00.predict_sum

ANSWERS.wrong("00.predict_sum", "not attempted", 'Answer quiz("00.predict_sum").')(...)
ANSWERS.wrong("00.predict_sum", "wrong", "each rank multiplies by its own number")(50)
ANSWERS.wrong("00.predict_sum", "wrong", "Write down five numbers")(7)
for value in (100, 100.0, torch.tensor(100), "100", 1e2):
    ANSWERS.right("00.predict_sum")(value)

test_wrong, test_right = ANSWERS.tests()
