"""Lesson 09, tensor parallel: slices of layers, what is summed, what is sent."""

from course_utils.questions import (
    Choice,
    MultipleChoice,
    Number,
    NumberTask,
    SingleChoice,
    Slip,
    lesson,
)

QUESTIONS = lesson(
    "09",
)

# The number that is a task of the exercise.
PREDICT_BYTES = NumberTask(
    "09.predict_bytes",
    "A model of 32 blocks on 8 GPUs, with tensor parallelism. The input x of a block "
    "has 10 MB. How many MB does *each GPU* send for the blocks in one step, forward "
    "and backward, by ring all-reduces?",
    answer=2240,
    tolerance=1,
    unit="MB",
    title="Predict the bytes",
    stars=1,
    why="4 all-reduces a block, 128 in all, and each sends 2 · 7/8 · 10 = 17.5 MB.",
    hint="How many all-reduces does a block make, and how much does a ring send in one?",
    slips=[
        Slip(1120, "That is the forward pass alone, or one of a block's two halves."),
        Slip(1280, "128 all-reduces of 10 MB: but a GPU sends 2(n - 1)/n of that."),
        Slip(2560, "That would be 2 times the tensor. A ring sends 2(n - 1)/n of it."),
        Slip(70, "That is one block. There are 32."),
        Slip(17.5, "That is one all-reduce. How many are there in a step?"),
        Slip(560, "That is one all-reduce a block. There are four."),
    ],
    hints=(
        "Two pairs of f and g in each block. Which of them send, and when?",
        "4 all-reduces a block, 32 blocks. A ring all-reduce of S sends 2(n - 1)/n · S.",
        "For 2 blocks, 4 GPUs and 1 MB it goes like this:\n"
        "  all-reduces   4 * 2            = 8\n"
        "  each sends    2 * 3 / 4 * 1    = 1.5 MB\n"
        "  answer        8 * 1.5          = 12 MB",
    ),
)
