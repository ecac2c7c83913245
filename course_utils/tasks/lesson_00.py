"""Lesson 00, Start here: the tasks of its exercise."""

import contextlib
import os

import torch
import torch.distributed as dist

from course_utils.measure.taps import put_back
from course_utils.questions.lesson_00 import PREDICT_SUM
from course_utils.tasks.compare import is_new, plain
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
            "The two numbers are swapped: first the rank, then the world size.",
        ),
        Miss(
            RANK,
            "0",
            "Every rank says that it is rank 0. Call dist.get_rank() inside the "
            "function. LOCAL_RANK is another number: it begins at 0 on every node.",
        ),
        Miss(
            f"{RANK} of {SIZE}",
            "2 of 4",
            "This is the same text on every rank. Ask dist for both numbers.",
        ),
        Miss(SIZE, "4", "The world size is not always 4: ask for it."),
    ),
    because={
        FUNCTION: "The text shows a function, not what it returns. It must be called, "
        "with parentheses: dist.get_rank().",
        BRACES: 'The braces were not filled in: write f"...", with an f in front.',
    },
    otherwise='The text must read exactly like "rank 2 of 4": the rank, then how many '
    "ranks there are. `dist.get_rank()` and `dist.get_world_size()` tell.",
    hints=(
        "Every rank runs the same code. The texts differ because each rank asks for "
        "its own number. Whom can it ask?",
        "`torch.distributed` (here `dist`) knows both: one function gives the number "
        "of this rank, another the number of all ranks.",
        "Put both into one text and return it:\n"
        '  return f"rank {dist.get_...()} of {dist.get_...()}"',
    ),
)

# ---------------------------------------------------------------------------- average

RESULT, OF_ITS_OWN = "the mean", "memory of its own"
AGAIN, STAYS = "the mean of twice as much", "the next call leaves it as it is"


def observe_mean(answer, tensor):
    twice = 2 * tensor
    result = answer(tensor)
    first, again = plain(result), answer(twice)
    if any(getattr(one, "layout", None) != torch.strided for one in (result, again)):
        return {RESULT: first}  # no tensor, or a sparse one
    is_own, stays = is_new(result, tensor), is_new(result, again)
    return {RESULT: first, OF_ITS_OWN: is_own, AGAIN: again, STAYS: stays}


DIVIDE = " / dist.get_world_size()"
IN_PLACE = "all_reduce works in place and returns None: its argument holds the sum."
AVERAGE = Task(
    id="00.average",
    title="The mean over ranks",
    stars=1,
    cases=(((5,), 1), ((2, 3), 1), ((1000,), 1024), ((), 1)),
    inputs=lambda case, rank, _: (whole_numbers(case[0], rank) / case[1],),
    observe=observe_mean,
    misses=(
        Miss(DIVIDE, "", "That is the sum over the ranks. Divide it."),
        Miss(
            "return total",
            "return tensor",
            "That is the rank's own tensor, divided by the world size. all_reduce puts "
            "the sum into the tensor that it gets: divide that one.",
        ),
        Miss(
            f"return total{DIVIDE}",
            "return dist.all_reduce(total)",
            f"It returned None: did you forget `return`? Or is it this? {IN_PLACE}",
        ),
        Miss("total /", "total //", "`//` drops the fraction. Divide with `/`."),
        Miss(
            f"total{DIVIDE}",
            "tensor.mean()",
            "`mean()` averages the elements of a tensor, not the tensors of the ranks.",
        ),
    ),
    because={
        OF_ITS_OWN: "The numbers are right, but the result is in the argument's "
        "memory. Return a new tensor, also where there is only one rank.",
        AGAIN: "The first call is right, and the second one is not: something is left "
        "over from the first.",
        STAYS: "The numbers are right, but the next call writes over them: all results "
        "are in one buffer. Return a new tensor.",
    },
    errors={"NoneType": IN_PLACE},
    otherwise="Add up each element over all ranks, then divide once by "
    "dist.get_world_size(). Keep float32, and do not round.",
    hints=(
        "A mean is a sum and a division. For which of the two do the ranks need each "
        "other?",
        "all_reduce writes the sum over all ranks into the tensor that it is given. "
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


@contextlib.contextmanager
def sum_for_one_rank():
    """After `reduce`, only `dst` has the sum. With gloo, rank 0 has it by chance."""

    def reduce(group, tensors, options):
        before = tensors[0].clone()
        work = originals["reduce"](group, tensors, options)
        if options.rootRank != group.rank():
            work.wait()
            tensors[0].copy_(before)
        return work

    with put_back(dist.ProcessGroup, ("reduce",)) as originals:
        dist.ProcessGroup.reduce = reduce
        yield


def observe_report(answer, loss):
    with sum_for_one_rank():
        result = answer(loss)
    if dist.get_rank() > 0:
        return {OTHERS: result}
    return {MEAN: result, NUMBER: isinstance(result, int | float)}


ALONE = "It no longer hangs, but the losses of the other ranks are missing on rank 0."
NOT_ALL = (
    "There is still a collective that not every rank calls, or not in the same way. "
    "Look at what depends on the rank."
)
SPOT_THE_HANG = Task(
    id="00.spot_the_hang",
    title="Spot the hang",
    stars=2,
    # Losses with more digits than one would print.
    inputs=lambda _, rank, n: (whole_numbers((), rank).abs() + (rank + 0.5) / 4096,),
    observe=observe_report,
    misses=(
        Miss(f"total.item(){DIVIDE}", "loss.item()", ALONE),
        Miss("total.item()", "loss.item()", ALONE),
        Miss(DIVIDE, "", "Every rank takes part now, but this is the sum."),
        Miss(
            "return total",
            "total",
            "It no longer hangs, but rank 0 must return the mean, and the others None.",
        ),
    ),
    because={
        NUMBER: "The number is right, but it is no Python number: `.item()` makes one.",
        OTHERS: "Rank 0 is right. The other ranks must return None: what is under "
        "the `if` on the rank?",
    },
    errors={
        "UnboundLocalError": "Not every rank runs the line that makes this variable: "
        "it stands under an `if` on the rank.",
        "barrier": "A barrier is a collective too, and does not answer an all_reduce. "
        "Every rank must call the all_reduce itself.",
        OUT_OF_STEP: NOT_ALL,
    },
    otherwise="Rank 0 returns the sum of all ranks' losses, divided by the world size "
    "and not rounded. With one rank, that is its own loss.",
    hints=(
        "Follow the code once as rank 0 and once as rank 1. Where does each of them "
        "stop?",
        "An all_reduce is complete only when every rank has called it. Rank 1 never "
        "does: it skips the whole `if`. What must be under the `if`, and what must "
        "not?",
        "Every rank calls the collective, one returns the result:\n"
        "  total = ...\n"
        "  dist.all_reduce(...)\n"
        "  if dist.get_rank() == 0:\n"
        "      return ...",
    ),
)

TASKS = (WHO_AM_I, AVERAGE, SPOT_THE_HANG, PREDICT_SUM)
