"""Lesson NN, the norm of a sharded vector: the tasks of its exercise."""

import math

from course_utils.checks.task import Mistake, Task
from course_utils.tasks.inputs import whole_numbers


def norms(inputs):
    """The norm of each rank's part by itself."""
    return [part.norm().item() for part, *_ in inputs]


def norm(inputs):
    """The norm of the vector that all parts make together."""
    return math.hypot(*norms(inputs))


GLOBAL_NORM = Task(
    id="NN.global_norm",
    title="The norm of all parts",
    stars=2,
    where="ranks",
    world_sizes=(1, 2, 3),
    cases=((3,), (1000,)),  # the length of rank 0's part; the others' are longer
    inputs=lambda shape, rank, world_size: (
        whole_numbers((shape[0] + rank,), rank) + 0.5,
    ),
    expect=lambda rank, inputs: norm(inputs),
    mistakes=(
        Mistake(
            like=lambda rank, inputs: norms(inputs)[rank],
            says="That is the norm of the rank's own part. The other ranks' parts "
            "belong to the vector, too.",
        ),
        Mistake(
            like=lambda rank, inputs: sum(norms(inputs)),
            says="You added up the norms of the parts. Add up the squares; the root "
            "comes last.",
        ),
        Mistake(
            like=lambda rank, inputs: norm(inputs) ** 2,
            says="That is the square of the norm: the root is missing.",
        ),
    ),
    otherwise="Square every element, add up over all elements and all ranks, and take "
    "the root of that.",
    hints=(
        "A norm is squares, a sum and a root. Which of the three is a matter between "
        "ranks?",
        "Each rank can add up the squares of its own part. all_reduce makes one sum "
        "of these sums.",
        "Three steps:\n"
        "  squares = ...                # a tensor with one number\n"
        "  dist.all_reduce(...)\n"
        "  return ....sqrt().item()",
    ),
)


def clipped(rank, inputs, length):
    """The part of one rank, made shorter as if the whole vector had this length."""
    part, max_norm = inputs[rank]
    return part * min(1.0, max_norm / length)


CLIP = Task(
    id="NN.clip",
    title="Spot the bug: clipped apart",
    stars=2,
    where="ranks",
    world_sizes=(1, 2, 3),
    cases=((3, 1.0), (1000, 10.0), (3, 1e6)),  # length of a part, max_norm
    inputs=lambda case, rank, world_size: (
        whole_numbers((case[0],), rank) + 0.5,
        case[1],
    ),
    expect=lambda rank, inputs: clipped(rank, inputs, norm(inputs)),
    mistakes=(
        Mistake(
            like=lambda rank, inputs: clipped(rank, inputs, norms(inputs)[rank]),
            says="Each rank divides by the norm of its own part: the parts are no "
            "longer parts of one vector.",
        ),
        Mistake(
            like=lambda rank, inputs: clipped(rank, inputs, sum(norms(inputs))),
            says="The norm of the whole vector is not the sum of the parts' norms.",
        ),
        Mistake(
            when=lambda attempt: attempt.got.norm() > attempt.args[0].norm(),
            says="A vector that is short enough must stay as it is: never multiply by "
            "more than 1.",
        ),
    ),
    otherwise="Every rank multiplies its part by the same number: max_norm divided by "
    "the norm of the whole vector, but at most 1.",
    hints=(
        "By which number does rank 0 multiply, and by which rank 1?",
        "All ranks must divide by the same norm: that of the whole vector.",
        "You have written the function already:\n"
        "  norm = global_norm(...)\n"
        "  return part * ...",
    ),
)

PREDICT_NORM = Task(
    id="NN.predict_norm",
    title="Predict the norm",
    stars=1,
    where="value",
    expect=lambda: math.isqrt(4 * (3**2 + 4**2)),
    mistakes=(
        Mistake(
            like=lambda: 5,
            says="That is the norm of one part. There are four of them.",
        ),
        Mistake(
            like=lambda: 20,
            says="That is the sum of the four norms. Norms do not add up, squares do.",
        ),
        Mistake(
            like=lambda: 100,
            says="That is the sum of all squares: the root is missing.",
        ),
    ),
    otherwise="Add up eight squares, then take the root.",
    hints=(
        "Write down all eight numbers of the vector.",
        "Each part has 9 + 16 as the sum of its squares.",
        "With 9 parts it would be the root of 9 times 25, which is 15.",
    ),
)

TASKS = (GLOBAL_NORM, CLIP, PREDICT_NORM)
