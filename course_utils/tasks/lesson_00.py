"""Lesson 00, Start here: the tasks of its exercise."""

import os

import torch
import torch.distributed as dist

from course_utils.questions.lesson_00 import PREDICT_SUM
from course_utils.tasks.compare import is_new
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.task import OUT_OF_STEP, Miss, Task

# --------------------------------------------------------------------------- who_am_i

FUNCTION, BRACES, TEXT = "a function in the text", "braces in the text", "the text"


def observe_text(answer):
    """Call it as on nodes with one GPU each, where LOCAL_RANK is 0 everywhere."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    text = answer()
    if not isinstance(text, str):
        return text
    return {FUNCTION: "<function" in text, BRACES: "{" in text, TEXT: text}


RANK, SIZE = "{dist.get_rank()}", "{dist.get_world_size()}"
WHO_AM_I = Task(
    id="00.who_am_i",
    title="Who am I?",
    stars=1,
    observe=observe_text,
    misses=(
        Miss(RANK, "{dist.get_rank() + 1}", "Ranks count from 0."),
        Miss(
            f"{RANK} of {SIZE}",
            f"{SIZE} of {RANK}",
            "The two numbers changed places: first the rank, then the world size.",
        ),
        Miss(
            SIZE,
            "{dist.get_world_size() - 1}",
            "The second number is how many ranks there are, not the last rank.",
        ),
        Miss(
            f"{RANK} of {SIZE}", "2 of 4", "That is the example. Ask for both numbers."
        ),
        Miss(
            RANK,
            "0",
            "Every rank says that it is rank 0. Ask with dist.get_rank(), inside the "
            "function. (LOCAL_RANK begins at 0 on every node.)",
        ),
        Miss(SIZE, "4", "The world size is not always 4: ask for it."),
    ),
    because={
        FUNCTION: "A function stands in the text, not what it returns. It must be "
        "called, with parentheses: dist.get_rank().",
        BRACES: 'The braces were not filled in: write f"...", with an f in front.',
    },
    otherwise="The text must be just that, word by word: rank, the rank's number, of, "
    "the world size. Ask dist for both.",
    hints=(
        "Every rank runs the same code. What makes the texts differ is what each rank "
        "is told when it asks for its number. Whom can it ask?",
        "`torch.distributed` (here `dist`) knows both: one function gives the number "
        "of this rank, another the number of all ranks.",
        "Put both into one text and return it:\n"
        '  return f"rank {dist.get_...()} of {dist.get_...()}"',
    ),
)

# ---------------------------------------------------------------------------- average

RESULT, OF_ITS_OWN = "the mean", "memory of its own"
KEPT = "the same after another call"


def to_average(shape, rank, world_size):
    """Whole numbers; where there are many, tiny ones, whose sums are exact too."""
    numbers = whole_numbers(shape, rank)
    if numbers.numel() < 100:
        return (numbers,)
    return ((numbers + whole_numbers(shape, 50 + rank) / 1024) / 1024,)


def observe_mean(answer, tensor):
    result = answer(tensor)
    is_tensor = getattr(result, "layout", None) == torch.strided  # and no sparse one
    first = result.clone() if is_tensor else result
    answer(tensor + 100)  # on all ranks, whatever this one has got
    if not is_tensor:
        return {RESULT: first}
    own = is_new(result, tensor)
    return {RESULT: first, OF_ITS_OWN: own, KEPT: torch.equal(first, result)}


DIVIDE = " / dist.get_world_size()"
IN_PLACE = "all_reduce works in place and returns None: its argument holds the sum."
AVERAGE = Task(
    id="00.average",
    title="The mean over ranks",
    stars=1,
    cases=((5,), (2, 3), (1000,), ()),  # shapes
    inputs=to_average,
    observe=observe_mean,
    misses=(
        Miss(DIVIDE, "", "That is the sum over the ranks. The division is yours."),
        Miss(
            f"return total{DIVIDE}",
            "return tensor",
            "That is the rank's own tensor. The sum is in the one that all_reduce got.",
        ),
        Miss(
            "return total",
            "return tensor",
            "That is the rank's own tensor divided by the world size. The other ranks' "
            "values are missing: the tensor given to all_reduce holds the sum. (With "
            "async_op=True: only after wait().)",
        ),
        Miss(
            f"return total{DIVIDE}",
            "return dist.all_reduce(total)",
            f"It returned None: did you forget `return`? Or is it this? {IN_PLACE}",
        ),
        Miss("total /", "total //", "`//` throws the fraction away. Divide with `/`."),
        Miss(
            "tensor.clone()",
            "tensor.long()",
            "The fractions are gone: were they turned into whole numbers?",
        ),
        Miss(
            f"total{DIVIDE}",
            "tensor.mean()",
            "`mean()` averages the elements of a tensor, not the tensors of the ranks.",
        ),
        Miss(DIVIDE, " / 4", "The world size is not always 4: ask for it."),
        Miss(
            DIVIDE,
            " / (1 if dist.get_rank() else dist.get_world_size())",
            "Rank 0 has the mean, the other ranks have the sum. Does the division "
            "stand under an `if` about the rank?",
        ),
    ),
    because={
        OF_ITS_OWN: "The numbers are right. But whoever changes the result would "
        "change the argument, too. Return a new tensor, with one rank as well.",
        KEPT: "It was right, but another call of the function has changed this result. "
        "Put the sum into a new tensor (`clone()`) in each call.",
    },
    errors={"NoneType": IN_PLACE},
    otherwise="Add up each element over all ranks, in float32 (ReduceOp.SUM is the "
    "default), then divide it once by dist.get_world_size(), and do not round it.",
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

# ---------------------------------------------------------------------- spot_the_hang

MEAN, NUMBER = "rank 0 returned", "a Python number"
OTHERS = "the other ranks returned"


def loss_of(case, rank, world_size):
    """A loss with more digits than one would print."""
    return (whole_numbers((), rank).abs() + 0.5 + (rank + 1) / 4096,)


def observe_report(answer, loss):
    result = answer(loss)
    if dist.get_rank() > 0:
        return {OTHERS: result}
    return {MEAN: result, NUMBER: isinstance(result, int | float)}


ALONE = "It no longer hangs, but the losses of the other ranks are not in it."
NOT_ALL = (
    "There is still a collective that not every rank calls. Look at which lines stand "
    "under an `if` about the rank."
)
SPOT_THE_HANG = Task(
    id="00.spot_the_hang",
    title="Spot the hang",
    stars=2,
    inputs=loss_of,
    observe=observe_report,
    misses=(
        Miss(f"total.item(){DIVIDE}", "loss.item()", ALONE),
        Miss("total.item()", "loss.item()", ALONE),
        Miss(DIVIDE, "", "The collective is right now. But this is the sum."),
        Miss(
            "return total",
            "total",
            "It no longer hangs, but rank 0 must return the mean, and the others None.",
        ),
    ),
    because={
        NUMBER: "The number is right, but no Python number: `.item()` makes one. (A "
        "tensor may hold on to its graph, and to all the activations in it.)",
        OTHERS: "Rank 0 is right. The other ranks must return None: what stands under "
        "the `if` about the rank?",
    },
    errors={
        "UnboundLocalError": "One rank has jumped over the line that makes this "
        f"variable. {NOT_ALL}",
        "barrier": "A barrier is a collective too, and does not answer an all_reduce. "
        "Every rank must call the all_reduce itself.",
        OUT_OF_STEP: NOT_ALL,
    },
    otherwise="Rank 0 returns the sum of all ranks' losses, divided by the world size, "
    "and not rounded. With one rank that is its own loss.",
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

TASKS = (WHO_AM_I, AVERAGE, SPOT_THE_HANG, PREDICT_SUM)
