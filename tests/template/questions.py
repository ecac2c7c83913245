"""Lesson NN, the norm of a sharded vector: what can be added up over ranks."""

from course_utils.questions import (
    Number,
    NumberTask,
    Right,
    SingleChoice,
    Wrong,
    lesson,
)

QUESTIONS = lesson(
    Number(
        "NN.norm",
        "Four ranks hold one number each: 1, 2, 4 and 2. Together they are a vector. "
        "What is its norm?",
        answer=5,
        why="1 + 4 + 16 + 4 = 25, and the root of 25 is 5.",
        hint="Square the four numbers, add up, take the root.",
        slips={
            9: "9 is the sum of the numbers. A norm adds up their squares.",
            25: "25 is the sum of the squares: the root is missing.",
            4: "4 is the largest of the numbers, which is another norm.",
        },
        purpose="The next cells measure it.",
        measured=True,
    ),
    SingleChoice(
        "NN.what_to_send",
        "Each rank holds a million numbers of a vector. All ranks need its norm. What "
        "must an `all_reduce` add up?",
        Wrong(
            "The parts themselves: a million numbers.",
            "That adds the parts to each other, number by number: another vector, of "
            "another norm.",
        ),
        Wrong(
            "The squares of the parts: a million numbers.",
            "A rank can add up its own squares first. Then one number is sent instead "
            "of a million.",
        ),
        Right(
            "The sum of the squares of each part: one number.",
            "Sums of sums are sums: each rank adds up its own squares, `all_reduce` "
            "adds up the results, and the root comes last.",
        ),
        Wrong(
            "The norm of each part: one number.",
            "The root does not add up: parts of norm 3 and 4 make a vector of norm 5, "
            "not 3 + 4.",
        ),
    ),
)

PREDICT_NORM = NumberTask(
    "NN.predict_norm",
    "Four ranks hold the part `[3., 4.]` each. What does `global_norm` return?",
    answer=10,
    title="Predict the norm",
    stars=1,
    why="The squares add up to 4 × 25 = 100, and the root of that is 10.",
    hint="Add up eight squares, then take the root.",
    slips={
        5: "That is the norm of one part. There are four of them.",
        20: "That is the sum of four norms. Norms do not add up, squares do.",
        100: "That is the sum of all squares: the root is missing.",
    },
    hints=(
        "Write down all eight numbers of the vector.",
        "Each part has 9 + 16 as the sum of its squares.",
        "With 9 parts it would be the root of 9 times 25, which is 15.",
    ),
)
