"""Lesson NN, the norm of a sharded vector: the tasks of its exercise."""

from course_utils.questions.lesson_NN import PREDICT_NORM

from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.task import Miss, Task


def part_of(length, rank):
    """A rank's part of the vector: on each rank longer than on the one before."""
    return whole_numbers((length + rank,), rank) + 0.5


GLOBAL_NORM = Task(
    id="NN.global_norm",
    title="The norm of all parts",
    stars=2,
    cases=(3, 1000),  # the length of rank 0's part
    inputs=lambda length, rank, world_size: (part_of(length, rank),),
    misses=(
        Miss(
            "dist.all_reduce(squares)",
            "pass",
            "That is the norm of the rank's own part. The other ranks' parts belong to "
            "the vector, too.",
        ),
        Miss(
            "part.pow(2).sum()",
            "part.norm()",
            "You added up the norms of the parts. Add up the squares; the root comes "
            "last.",
        ),
        Miss("squares.sqrt()", "squares", "It is squared: the root is missing."),
    ),
    otherwise="Add up the squares over all elements and ranks, and take the root.",
    hints=(
        "A norm is squares, a sum and a root. Which of the three is a matter between "
        "ranks?",
        "Each rank adds up the squares of its own part. all_reduce adds up the sums.",
        "Three steps:\n"
        "  squares = ...                # a tensor with one number\n"
        "  dist.all_reduce(...)\n"
        "  return ....sqrt().item()",
    ),
)

CLIP = Task(
    id="NN.clip",
    title="Spot the bug: clipped apart",
    stars=2,
    cases=((3, 1.0), (1000, 10.0), (3, 1e6)),  # length of a part, max_norm
    inputs=lambda case, rank, world_size: (part_of(case[0], rank), case[1]),
    misses=(
        Miss(
            "dist.all_reduce(squares)",
            "pass",
            "Each rank divides by the norm of its own part: the parts are no longer "
            "parts of one vector.",
        ),
        Miss(
            "part.pow(2).sum()",
            "part.norm()",
            "The norm of the whole vector is not the sum of the parts' norms.",
        ),
        Miss(
            "min(1.0, max_norm / norm)",
            "max_norm / norm",
            "A vector that is short enough must stay as it is: never multiply by more "
            "than 1.",
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

TASKS = (GLOBAL_NORM, CLIP, PREDICT_NORM)
