"""Lesson 00: typical wrong answers, and different right ones."""

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


@ANSWERS.wrong("00.who_am_i", "wrong", "Ranks count from 0")
def counts_from_one():
    return f"rank {dist.get_rank() + 1} of {dist.get_world_size()}"


@ANSWERS.wrong("00.who_am_i", "crashed", "`rank` is ready-made in %%ranks cells only")
def names_of_the_cells():
    return f"rank {rank} of {world_size}"  # noqa: F821


@ANSWERS.wrong("00.who_am_i", "wrong", "The two numbers changed places")
def changed_places():
    return f"rank {dist.get_world_size()} of {dist.get_rank()}"


@ANSWERS.wrong("00.who_am_i", "wrong", "not the last rank")
def last_rank():
    return f"rank {dist.get_rank()} of {dist.get_world_size() - 1}"


@ANSWERS.wrong("00.who_am_i", "wrong", "That is the text of the example.")
def copied_the_example():
    return "rank 2 of 4"


@ANSWERS.wrong("00.who_am_i", "wrong", "Every rank says that it is rank 0.")
def always_rank_0():
    return f"rank 0 of {dist.get_world_size()}"


rank_of_the_notebook = 0


@ANSWERS.wrong("00.who_am_i", "wrong", "Every rank says that it is rank 0.")
def asked_outside():
    return f"rank {rank_of_the_notebook} of {dist.get_world_size()}"


@ANSWERS.wrong("00.who_am_i", "wrong", "The world size is not always 4")
def always_of_4():
    return f"rank {dist.get_rank()} of 4"


@ANSWERS.wrong("00.who_am_i", "wrong", "The braces were not filled in")
def forgot_the_f():
    return "rank {dist.get_rank()} of {dist.get_world_size()}"


@ANSWERS.wrong("00.who_am_i", "wrong", "use `return`, not print")
def printed_it():
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}")


@ANSWERS.wrong("00.who_am_i", "wrong", "Only capital and small letters are different.")
def capital_letter():
    return f"Rank {dist.get_rank()} of {dist.get_world_size()}"


@ANSWERS.wrong("00.who_am_i", "wrong", "That is a tuple; text was expected.")
def two_numbers():
    return dist.get_rank(), dist.get_world_size()


@ANSWERS.wrong("00.who_am_i", "crashed", "It raised KeyError: 'NODE_RANK'")
def wrong_variable():
    return f"rank {os.environ['NODE_RANK']} of {os.environ['WORLD_SIZE']}"


@ANSWERS.wrong("00.who_am_i", "wrong", "LOCAL_RANK begins at 0 on every node.")
def local_rank():
    return f"rank {os.environ['LOCAL_RANK']} of {dist.get_world_size()}"


@ANSWERS.wrong("00.who_am_i", "wrong", "It must be called, with parentheses")
def forgot_the_parentheses():
    return f"rank {dist.get_rank} of {dist.get_world_size}"


@ANSWERS.wrong("00.who_am_i", "wrong", "The text must be just that, word by word")
def another_text():
    return f"rank {dist.get_rank()} of {dist.get_world_size()} ranks"


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


# ---------------------------------------------------------------------- 00.average


@ANSWERS.wrong(
    "00.average", "wrong", "That is the sum over the ranks.", did="returned the sum"
)
def forgot_to_divide(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


@ANSWERS.wrong("00.average", "wrong", "That is the rank's own tensor.")
def reduced_a_copy(tensor):
    dist.all_reduce(tensor.clone())
    return tensor


@ANSWERS.wrong("00.average", "wrong", "other ranks' values are missing")
def forgot_the_collective(tensor):
    return tensor / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "It is divided twice")
def divided_twice(tensor):
    total = tensor / dist.get_world_size()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@ANSWERS.wrong(
    "00.average",
    "crashed",
    "all_reduce works in place and returns None",
    did="`x = dist.all_reduce(x)`",
)
def takes_what_it_returns(tensor):
    total = dist.all_reduce(tensor.clone())
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "The fractions of the numbers are gone")
def as_whole_numbers(tensor):
    total = tensor.to(torch.int64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(tensor.dtype)


@ANSWERS.wrong("00.average", "wrong", "over all ranks, in float32")
def in_bfloat16(tensor):
    total = tensor.bfloat16()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(tensor.dtype)


@ANSWERS.wrong("00.average", "wrong", "divided by 2. The mean is the sum divided by")
def always_two(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / 2


@ANSWERS.wrong("00.average", "wrong", "no fixed number, and nothing taken from it")
def by_one_less_than_the_world_size(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / (dist.get_world_size() - 1)


@ANSWERS.wrong("00.average", "crashed", "leave out init_process_group")
def a_second_group(tensor):
    dist.init_process_group("gloo")
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "`//` throws the fraction away.")
def floor_division(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total // dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "`mean()` averages the elements of a tensor.")
def mean_of_elements(tensor):
    return tensor.mean()


@ANSWERS.wrong("00.average", "wrong", "`mean()` averages the elements of a tensor.")
def mean_of_everything(tensor):
    total = tensor.mean()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "Only rank 0 has the mean.")
def reduce_to_rank_0(tensor):
    total = tensor.clone()
    dist.reduce(total, dst=0)
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "Only rank 0 has the mean.")
def gathered_on_rank_0(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(tensor) for _ in range(world_size)] if rank == 0 else None
    dist.gather(tensor, parts, dst=0)
    return sum(parts) / world_size if rank == 0 else tensor


@ANSWERS.wrong("00.average", "wrong", "the argument is not what it was")
def in_place(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "the argument is not what it was")
def into_the_input(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    tensor[:] = total / dist.get_world_size()
    return tensor


@ANSWERS.wrong("00.average", "wrong", "It returned None: did you forget `return`?")
def forgot_to_return(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    total /= dist.get_world_size()


@ANSWERS.wrong("00.average", "crashed", "'NoneType' and 'int'")
def all_reduce_returns_nothing(tensor):
    return dist.all_reduce(tensor.clone()) / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "`wait()` for it")
def asynchronous(tensor):
    return dist.all_reduce(tensor.clone(), async_op=True)


@ANSWERS.wrong("00.average", "wrong", "That is a list; a tensor was expected.")
def as_a_list(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


@ANSWERS.wrong("00.average", "wrong", "its dtype is float64; float32 was expected")
def in_double_precision(tensor):
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "Its shape is (1, 5); (5,) was expected.")
def one_dimension_more(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return (total / dist.get_world_size())[None]


@ANSWERS.wrong("00.average", "stuck", "Rank 0 waits in all_reduce, line")
def only_rank_0(tensor):
    total = tensor.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "Right on ranks 0 and 1; wrong on rank 2")
def never_more_than_two(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    if dist.get_rank() > 1:
        return total
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "You divided by the number of elements.")
def divided_by_elements(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / total.numel()


@ANSWERS.wrong("00.average", "wrong", "The world size is not always 4")
def always_by_4(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total / 4


@ANSWERS.wrong("00.average", "wrong", "That is the tensor of rank 0, on every rank.")
def broadcast_of_rank_0(tensor):
    total = tensor.clone()
    dist.broadcast(total, src=0)
    return total


@ANSWERS.wrong("00.average", "wrong", "ReduceOp.SUM, which is the default")
def largest(tensor):
    total = tensor.clone()
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "That is the result of the example.")
def copied_the_mean(tensor):
    return torch.tensor([2.0, 4.0])


@ANSWERS.wrong("00.average", "wrong", "With one rank the mean is the tensor itself.")
def doubled(tensor):
    return 2 * tensor


@ANSWERS.wrong("00.average", "wrong", "Return a new tensor, with one rank as well.")
def itself_where_it_is_alone(tensor):
    return tensor if dist.get_world_size() == 1 else add_then_divide(tensor)


buffers = {}


@ANSWERS.wrong("00.average", "wrong", "Put the sum into a new tensor (`clone()`) in")
def always_in_the_same_tensor(tensor):
    total = buffers.setdefault(tensor.shape, torch.empty_like(tensor))
    total.copy_(tensor)
    dist.all_reduce(total)
    return total.div_(dist.get_world_size())


@ANSWERS.wrong(
    "00.average", "crashed", "It raised IndexError: tuple index out of range"
)
def needs_a_dimension(tensor):
    n = dist.get_world_size()
    total = torch.empty(n * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_into_tensor(total, tensor)
    return total.view(n, *tensor.shape).mean(0)


@ANSWERS.wrong("00.average", "wrong", "1000 values differ")
def rounded(tensor):
    return add_then_divide(tensor).round(decimals=4)


@ANSWERS.wrong("00.average", "wrong", "With async_op=True it holds the sum only after")
def did_not_wait(tensor):
    total = tensor.clone()
    mean = total / dist.get_world_size()  # as when the sum comes later
    dist.all_reduce(total, async_op=True).wait()
    return mean


@ANSWERS.wrong("00.average", "wrong", "the sum is there only after wait()")
def half_of_the_sum_was_there(tensor):
    mean = add_then_divide(tensor)
    if mean.dim() and dist.get_world_size() > 1:
        mean[0] = tensor[0] / dist.get_world_size()
    return mean


@ANSWERS.wrong("00.average", "wrong", "These are means of the elements of one tensor.")
def mean_of_the_elements_in_the_old_shape(tensor):
    return torch.full_like(tensor, tensor.mean())


@ANSWERS.wrong("00.average", "wrong", "all_reduce works in place and returns None")
def returned_what_it_returned(tensor):
    total = tensor.clone()
    total = dist.all_reduce(total)
    return total


@ANSWERS.wrong("00.average", "wrong", "With async_op=True it holds the sum only after")
def sleeps_and_does_not_wait(tensor):
    total = tensor.clone()
    dist.all_reduce(total, async_op=True)
    time.sleep(0.05)  # by now it is there, by chance
    return total / dist.get_world_size()


@ANSWERS.wrong("00.average", "wrong", "With async_op=True it holds the sum only after")
def keeps_the_request_and_does_not_wait(tensor):
    part = tensor / dist.get_world_size()
    request = dist.all_reduce(part, async_op=True)  # noqa: F841
    dist.barrier()
    return part


@ANSWERS.wrong("00.average", "wrong", "they have not divided.")
def only_rank_0_divides(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        total /= dist.get_world_size()
    return total


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


# ---------------------------------------------------------------- 00.spot_the_hang


@ANSWERS.wrong("00.spot_the_hang", "not attempted", "Repair the code in the cell above")
def log_loss(loss):
    """As it was given, but for this docstring."""
    if dist.get_rank() == 0:
        total = loss.clone()  # and this comment
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "stuck", "a collective that not every rank calls")
def still_under_the_if(loss):
    total = loss.clone()
    if dist.get_rank() == 0:
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()
    return None


@ANSWERS.wrong("00.spot_the_hang", "stuck", "a collective that not every rank calls")
def as_given_but_for_the_return(loss):
    if dist.get_rank() == 0:
        total = loss.clone()
        dist.all_reduce(total)
        mean = total.item() / dist.get_world_size()  # noqa: F841


@ANSWERS.wrong(
    "00.spot_the_hang",
    "crashed",
    "a collective that not every rank calls",
    did="moved the `return` out of the `if`, not the collective",
)
def only_the_return_outside(loss):
    if dist.get_rank() == 0:
        total = loss.clone()
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "stuck", "a collective that not every rank calls")
def a_barrier_for_all(loss):
    dist.barrier()
    if dist.get_rank() == 0:
        total = loss.clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "stuck", "Rank 1 waits in all_reduce")
def under_the_other_if(loss):
    total = loss.clone()
    if dist.get_rank() != 0:
        dist.all_reduce(total)
        return None
    return total.item() / dist.get_world_size()


@ANSWERS.wrong(
    "00.spot_the_hang",
    "crashed",
    "A barrier is a collective too",
    did="put a barrier into an `else`",
)
def a_barrier_for_the_others(loss):
    if dist.get_rank() == 0:
        total = loss.clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()
    dist.barrier()


@ANSWERS.wrong("00.spot_the_hang", "wrong", "rank 0 returns its own loss")
def no_collective(loss):
    if dist.get_rank() == 0:
        return loss.item()


@ANSWERS.wrong("00.spot_the_hang", "wrong", "the losses of the other ranks are not in")
def no_collective_but_a_division(loss):
    if dist.get_rank() == 0:
        return loss.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "wrong", "every rank returns the mean")
def on_every_rank(loss):
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "wrong", "But this is the sum")
def no_division(loss):
    total = loss.clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        return total.item()


@ANSWERS.wrong("00.spot_the_hang", "wrong", "rank 0 must return the mean")
def no_result(loss):
    total = loss.clone()
    dist.all_reduce(total)


@ANSWERS.wrong("00.spot_the_hang", "wrong", "the argument is not what it was")
def changes_the_loss(loss):
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        return loss.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "wrong", "Rank 0 must return it.")
def on_the_last_rank(loss):
    total = loss.clone()
    dist.all_reduce(total)
    if dist.get_rank() == dist.get_world_size() - 1:
        return total.item() / dist.get_world_size()


@ANSWERS.wrong("00.spot_the_hang", "wrong", "The other ranks must return None")
def zero_elsewhere(loss):
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size() if dist.get_rank() == 0 else 0.0


@ANSWERS.wrong("00.spot_the_hang", "wrong", "With one rank that is its own loss.")
def always_one(loss):
    return 1.0 if dist.get_rank() == 0 else None


@ANSWERS.wrong("00.spot_the_hang", "wrong", "the mean is right, but rounded")
def rounded_for_the_report(loss):
    mean = collective_before_the_if(loss)
    return None if mean is None else round(mean, 2)


@ANSWERS.wrong("00.spot_the_hang", "wrong", "losses of the other ranks are not in it")
def does_not_wait_for_the_sum(loss):
    total = loss.clone()
    dist.all_reduce(total, async_op=True)
    time.sleep(0.05)
    return total.item() / dist.get_world_size() if dist.get_rank() == 0 else None


@ANSWERS.wrong("00.spot_the_hang", "wrong", "it is a tensor, and a Python number is")
def as_a_tensor(loss):
    mean = collective_before_the_if(loss)
    return None if mean is None else torch.tensor(mean)


@ANSWERS.wrong("00.spot_the_hang", "wrong", "it is one of NumPy's, and a Python number")
def as_a_number_of_numpy(loss):
    total = loss.clone()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).numpy()[()] if dist.get_rank() == 0 else None


@ANSWERS.wrong("00.spot_the_hang", "wrong", "But this is the sum")
def the_sum_as_a_tensor(loss):
    total = loss.clone()
    dist.all_reduce(total)
    return total if dist.get_rank() == 0 else None


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


# ------------------------------------------------------------------ 00.predict_sum

for value, status, says in (
    (..., "not attempted", "Set the answer in the cell above"),
    (None, "not attempted", "Set the answer in the cell above"),
    (10, "wrong", "after the first all_reduce. There is a second one."),
    (50, "wrong", "each rank multiplies by its own number"),
    (225, "wrong", "There is no rank 5."),
    (40, "wrong", "what rank 4 holds before the second all_reduce"),
    (20, "wrong", "It does not divide"),
    (30, "wrong", "right without the first all_reduce"),
    (36, "wrong", "That is right for 4 ranks."),
    (0, "wrong", "rank 0 too"),
    (150, "wrong", "the ranks multiply by 0, 1, 2, 3 and 4"),
    (500, "wrong", "What does each of them return?"),
    (100.0000001, "wrong", "You answered 100.0000001. That is not it."),
    (True, "wrong", "That is True or False; a number was expected."),
    (7, "wrong", "You answered 7. That is not it. Write down five numbers"),
    ("100", "wrong", "That is text; a number was expected."),
    ([100] * 5, "wrong", "That is a list; a number was expected."),
    (sum, "wrong", "a number was expected"),
):
    ANSWERS.wrong("00.predict_sum", status, says)(value)

for value in (100, 100.0, torch.tensor(100)):
    ANSWERS.right("00.predict_sum")(value)


test_wrong, test_right = ANSWERS.tests()
