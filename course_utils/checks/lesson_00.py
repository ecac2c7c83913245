"""Lesson 00, Start here: the tasks of its exercise."""

import os

import torch.distributed as dist

from course_utils.checks.mistakes import is_rounded
from course_utils.checks.task import Mistake, PythonNumber, Task
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.under_way import REDUCING, Log


def alone_on_its_node(answer):
    """Call it as on nodes with one GPU each, where LOCAL_RANK is 0 everywhere."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return answer()


WHO_AM_I = Task(
    id="00.who_am_i",
    title="Who am I?",
    stars=1,
    where="ranks",
    run=alone_on_its_node,
    expect=lambda rank, inputs: f"rank {rank} of {len(inputs)}",
    mistakes=(
        Mistake(
            like=lambda rank, inputs: f"rank {rank + 1} of {len(inputs)}",
            says="Ranks count from 0: the first of four is rank 0, the last rank 3.",
        ),
        Mistake(
            like=lambda rank, inputs: f"rank {len(inputs)} of {rank}",
            says="The two numbers changed places: first the rank, then the world size.",
        ),
        Mistake(
            like=lambda rank, inputs: f"rank {rank} of {len(inputs) - 1}",
            says="The second number is how many ranks there are, not the last rank.",
        ),
        Mistake(
            like=lambda rank, inputs: "rank 2 of 4",
            says="That is the text of the example. Each rank must ask for its own two "
            "numbers: the same code runs on all of them.",
        ),
        Mistake(
            like=lambda rank, inputs: f"rank 0 of {len(inputs)}",
            says="Every rank says that it is rank 0. Ask for the number with "
            "dist.get_rank(), inside the function. (LOCAL_RANK begins at 0 on every "
            "node.)",
        ),
        Mistake(
            like=lambda rank, inputs: "rank 0 of 1",
            says="Each rank says that it is alone. LOCAL_RANK and LOCAL_WORLD_SIZE "
            "count on one node only: ask dist for the rank and the world size.",
        ),
        Mistake(
            when=lambda attempt: attempt.got.endswith(" of 4"),
            says="The world size is not always 4: ask for it.",
        ),
        Mistake(
            when=lambda attempt: "{" in attempt.got,
            says='The braces were not filled in: write f"...", with an f in front.',
        ),
        Mistake(
            when=lambda attempt: "<function" in attempt.got,
            says="A function stands in the text, not what it returns. It must be "
            "called, with parentheses: dist.get_rank().",
        ),
    ),
    otherwise="The text must be just that, word by word: rank, the rank's number, of, "
    "the world size.",
    hints=(
        "Every rank runs the same code. What makes the texts differ is what each rank "
        "is told when it asks for its number. Whom can it ask?",
        "`torch.distributed` (here `dist`) knows both: one function gives the number "
        "of this rank, another the number of all ranks.",
        "Put both into one text and return it:\n"
        '  return f"rank {dist.get_...()} of {dist.get_...()}"',
    ),
)


def to_average(shape, rank):
    """Whole numbers; where there are many, tiny ones, whose sums are exact too."""
    numbers = whole_numbers(shape, rank)
    if numbers.numel() < 100:
        return numbers
    return (numbers + whole_numbers(shape, 50 + rank) / 1024) / 1024


def call_twice(answer, tensor):
    """The first result, after a second call with other numbers."""
    with Log(*REDUCING):  # a sum for which nobody has waited is there by chance
        result = answer(tensor)
        answer(tensor + 100)
    # On more ranks, what is in it tells more.
    if result is tensor and dist.get_world_size() == 1:
        return "the argument itself"
    return result


WORKS_IN_PLACE = (
    "all_reduce works in place and returns None: the sum is in the tensor that it was "
    "given."
)
AVERAGE = Task(
    id="00.average",
    title="The mean over ranks",
    stars=1,
    where="ranks",
    run=call_twice,
    # With one rank there is nothing to add, and 2 * 2 is 4: here mistakes look alike.
    world_sizes=(3, 1, 2, 4),
    cases=((5,), (2, 3), (1000,), ()),  # shapes
    inputs=lambda shape, rank, world_size: (to_average(shape, rank),),
    expect=lambda rank, inputs: sum(x for (x,) in inputs) / len(inputs),
    mistakes=(
        Mistake(
            when=lambda attempt: "NoneType" in attempt.message,
            says=WORKS_IN_PLACE,
        ),
        Mistake(
            when=lambda attempt: (attempt.got, attempt.error) == (None, ""),
            says="It returned None: did you forget `return`? Or is it what all_reduce "
            f"has returned? {WORKS_IN_PLACE}",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x for (x,) in inputs),
            says="That is the sum over the ranks. all_reduce adds up; the division by "
            "the world size is yours. (Two calls of it would add up twice.)",
        ),
        Mistake(
            like=lambda rank, inputs: inputs[rank][0],
            says="That is the rank's own tensor. all_reduce returns nothing: it writes "
            "the sum into the tensor that it is given.",
        ),
        Mistake(
            like=lambda rank, inputs: inputs[rank][0] / len(inputs),
            says="That is the rank's own tensor divided by the world size. The other "
            "ranks' values are missing: the tensor given to all_reduce holds the sum. "
            "With async_op=True it holds the sum only after wait().",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x for (x,) in inputs) / len(inputs) ** 2,
            says="It is divided twice: before the all_reduce or after it, not both.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x for (x,) in inputs) // len(inputs),
            says="`//` throws the fraction away. Divide with `/`.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x.long() for (x,) in inputs) / len(inputs),
            says="The fractions of the numbers are gone: were they turned into whole "
            "numbers? Gradients are mostly smaller than 1. Add up the tensor as it is.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x for (x,) in inputs) / len(inputs) + 100,
            says="It was right, but it is no new tensor: the check has called the "
            "function again, and that changed this result. Put the sum into a new "
            "tensor (`clone()`) in each call.",
        ),
        Mistake(
            when=lambda attempt: attempt.got == "the argument itself",
            says="The numbers are right. But whoever changes the result would change "
            "the argument, too. Return a new tensor, with one rank as well.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x.mean() for (x,) in inputs) / len(inputs),
            says="`mean()` averages the elements of a tensor. Here every element is "
            "averaged over the ranks, and the shape stays.",
        ),
        Mistake(
            like=lambda rank, inputs: inputs[rank][0].mean(),
            says="`mean()` averages the elements of a tensor. Here every element is "
            "averaged over the ranks, and the shape stays.",
        ),
        Mistake(
            like=lambda rank, inputs: inputs[rank][0] * 0 + inputs[rank][0].mean(),
            says="These are means of the elements of one tensor. Here every element is "
            "averaged over the ranks.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x for (x,) in inputs) / inputs[0][0].numel(),
            says="You divided by the number of elements. Divide by the number of "
            "ranks: the world size.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x for (x,) in inputs) / 4,
            says="The world size is not always 4: ask for it.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(x for (x,) in inputs) / 2,
            says="Here the sum was divided by 2. The mean is the sum divided by the "
            "world size: as dist.get_world_size() says it, no fixed number, and "
            "nothing taken from it.",
        ),
        Mistake(
            like=lambda rank, inputs: inputs[0][0],
            says="That is the tensor of rank 0, on every rank. `broadcast` copies, "
            "`all_reduce` adds up.",
        ),
        Mistake(
            when=lambda attempt: attempt.got.tolist() == [2, 4],
            says="That is the result of the example. Compute it from the tensor.",
        ),
        Mistake(
            like=lambda rank, inputs: (
                sum(x for (x,) in inputs) / (1 if rank else len(inputs))
            ),
            says="Rank 0 has the mean, the other ranks have the sum: they have not "
            "divided. Does the division stand under an `if` about the rank?",
        ),
        Mistake(
            when=lambda attempt: attempt.right == (0,),
            says="Only rank 0 has the mean. `reduce` brings the result to one rank, "
            "`all_reduce` to every rank.",
        ),
    ),
    otherwise="Add up each element over all ranks, in float32 (ReduceOp.SUM, which is "
    "the default), then divide it once by the world size. With one rank the mean is "
    "the tensor itself. (With async_op=True the sum is there only after wait().)",
    hints=(
        "A mean is a sum and a division. Which of the two is a matter between ranks?",
        "all_reduce replaces the tensor that it is given by the sum over all ranks. "
        "Give it a copy, because the input must stay as it is.",
        "Three steps:\n"
        "  total = ...                  # a copy of the tensor\n"
        "  dist.all_reduce(...)         # now total is the sum, on every rank\n"
        "  return total / ...           # how many ranks are there?",
    ),
)


def loss_of(shape, rank, world_size):
    """A loss with more digits than one would print."""
    return (whole_numbers(shape, rank).abs() + 0.5 + (rank + 1) / 64,)


def mean_on_rank_0(rank, inputs):
    """The mean of all ranks' losses on rank 0, None elsewhere."""
    if rank > 0:
        return None
    return PythonNumber(sum(loss for (loss,) in inputs).item() / len(inputs))


SPOT_THE_HANG = Task(
    id="00.spot_the_hang",
    title="Spot the hang",
    stars=2,
    where="ranks",
    world_sizes=(2, 1, 3, 4),  # with one rank, the code as it was given is right
    cases=((),),  # a loss is a tensor without dimensions
    inputs=loss_of,
    expect=mean_on_rank_0,
    mistakes=(
        Mistake(
            when=lambda attempt: attempt.expected is not None and is_rounded(attempt),
            says="It no longer hangs, and the mean is right, but rounded. Return it as "
            "it comes out: whoever prints it can round it.",
        ),
        Mistake(
            like=lambda rank, inputs: inputs[0][0].item() if rank == 0 else None,
            says="It no longer hangs, but rank 0 returns its own loss: the losses of "
            "the other ranks are not in it.",
        ),
        Mistake(
            like=lambda rank, inputs: (
                inputs[0][0].item() / len(inputs) if rank == 0 else None
            ),
            says="It no longer hangs, but the losses of the other ranks are not in it. "
            "(With async_op=True the sum is there only after wait().)",
        ),
        Mistake(
            like=lambda rank, inputs: mean_on_rank_0(0, inputs),
            says="The collective is right now. But every rank returns the mean: only "
            "rank 0 should, the others return None.",
        ),
        Mistake(
            like=lambda rank, inputs: (
                len(inputs) * mean_on_rank_0(0, inputs) if rank == 0 else None
            ),
            says="The collective is right now. But this is the sum: divide it by the "
            "world size.",
        ),
        Mistake(
            like=lambda rank, inputs: None,
            says="It no longer hangs, but rank 0 must return the mean.",
        ),
        Mistake(
            when=lambda attempt: (
                (attempt.rank, attempt.got, attempt.error) == (0, None, "")
            ),
            says="The mean is on another rank. Rank 0 must return it.",
        ),
        Mistake(
            when=lambda attempt: attempt.rank > 0 and attempt.got is not None,
            says="Rank 0 is right. The other ranks must return None: what stands "
            "under the `if` about the rank?",
        ),
        Mistake(
            when=lambda attempt: attempt.error == "UnboundLocalError",
            says="One rank has jumped over the line that makes this variable. There is "
            "still a collective that not every rank calls: look at which lines stand "
            "under an `if` about the rank.",
        ),
        Mistake(
            when=lambda attempt: "barrier" in attempt.message,
            says="A barrier is a collective too, and does not answer an all_reduce. "
            "Every rank must call the all_reduce itself.",
        ),
        Mistake(
            when=lambda attempt: attempt.error == "waiting",
            says="There is still a collective that not every rank calls. Look at "
            "which line stands under an `if` about the rank.",
        ),
    ),
    otherwise="Rank 0 returns the sum of all ranks' losses, divided by the world size. "
    "With one rank that is its own loss.",
    hints=(
        "Follow the code once as rank 0 and once as rank 1. Where does each of them "
        "stop?",
        "all_reduce returns only when every rank has called it. Rank 1 never does: "
        "it jumps over the whole `if`. What must be under the `if`, and what not?",
        "The collective is for all, the result for one:\n"
        "  total = ...\n"
        "  dist.all_reduce(...)\n"
        "  if dist.get_rank() == 0:\n"
        "      return ...",
    ),
)


def two_sums(world_size):
    """What every rank holds after the two steps of the task, worked out by hand."""
    first = sum(range(world_size))  # every rank now holds the sum of all ranks
    return sum(first * rank for rank in range(world_size))


PREDICT_SUM = Task(
    id="00.predict_sum",
    title="Predict the sum",
    stars=1,
    where="value",
    expect=lambda: two_sums(5),
    mistakes=(
        Mistake(
            like=lambda: sum(range(5)),
            says="That is what every rank holds after the first all_reduce. There is a "
            "second one.",
        ),
        Mistake(
            like=lambda: 5 * sum(range(5)),
            says="Before the second all_reduce each rank multiplies by its own number: "
            "the ranks no longer hold the same.",
        ),
        Mistake(
            like=lambda: sum(range(1, 6)) ** 2,
            says="Ranks count from 0: five ranks are 0, 1, 2, 3 and 4. There is no "
            "rank 5.",
        ),
        Mistake(
            like=lambda: 4 * sum(range(5)),
            says="That is what rank 4 holds before the second all_reduce. After it, "
            "every rank holds the sum of all.",
        ),
        Mistake(
            like=lambda: two_sums(5) / 5,
            says="all_reduce adds up. It does not divide by the number of ranks.",
        ),
        Mistake(
            like=lambda: sum(rank * rank for rank in range(5)),
            says="That would be right without the first all_reduce: `number` is no "
            "longer the rank when it is multiplied.",
        ),
        Mistake(
            like=lambda: two_sums(4),
            says="That is right for 4 ranks. Here there are 5.",
        ),
        Mistake(
            like=lambda: sum(range(5)) * sum(range(1, 6)),
            says="Ranks count from 0: the ranks multiply by 0, 1, 2, 3 and 4.",
        ),
        Mistake(
            like=lambda: 0,
            says="Rank 0 holds 0 before the second all_reduce. After it, every rank "
            "holds the sum of all, rank 0 too.",
        ),
        Mistake(
            like=lambda: 5 * two_sums(5),
            says="That is what all five ranks hold together. What does each of them "
            "return?",
        ),
    ),
    otherwise="Write down five numbers, one for each rank, and change them line by "
    "line: sum, times the rank, sum.",
    hints=(
        "Write down five numbers, one for each rank, and change them line by line.",
        "After the first all_reduce all five ranks hold the same number. After the "
        "multiplication they hold five different ones.",
        "With 3 ranks it goes like this:\n"
        "  start          0   1   2\n"
        "  all_reduce     3   3   3\n"
        "  times rank     0   3   6\n"
        "  all_reduce     9   9   9",
    ),
)

TASKS = (WHO_AM_I, AVERAGE, SPOT_THE_HANG, PREDICT_SUM)
