"""Lesson 00, start here: what a rank is, and what ranks share."""

from course_utils.questions import (
    MultipleChoice,
    Number,
    NumberTask,
    Right,
    SingleChoice,
    Wrong,
    lesson,
)

QUESTIONS = lesson(
    SingleChoice(
        "00.ranks",
        "What is a rank?",
        Wrong(
            "A GPU. Rank 0 is the first one in the machine.",
            "A rank belongs to a process, not to a device. The process often drives "
            "one GPU, but the ranks of this lesson run without any.",
        ),
        Wrong(
            "A thread inside the notebook's own Python process.",
            "Threads share one process and its variables. Ranks number separate "
            "processes: each has its own memory and its own Python.",
        ),
        Right(
            "The number of a process. Rank 0 is the first one.",
            "Every process runs the same code. Its number, from 0 to the world size "
            "minus 1, tells it which share of the work is its own. A process is also "
            "called by its number, as in “rank 2 waits”.",
        ),
        Wrong(
            "A place in a ranking. Rank 0 is the fastest.",
            "The number is only a name. Rank 0 often prints and saves, because one "
            "rank has to do it, but it is no faster than the others.",
        ),
    ),
    Number(
        "00.all_reduce",
        "Four ranks, 0 to 3, run these two lines. What does each of them hold in `x` "
        "afterwards?",
        answer=6,
        code="x = torch.tensor(float(rank))\ndist.all_reduce(x)   # SUM by default",
        why="0 + 1 + 2 + 3 = 6. Every rank holds the sum, not only rank 0: that is the "
        "“all” of all-reduce.",
        hint="Write down what each rank puts in: rank 0 puts in 0, rank 1 puts in 1, "
        "and so on. Then add them up.",
        slips={
            10: "10 is 1 + 2 + 3 + 4. Ranks are counted from 0.",
            1.5: "1.5 is the mean. `all_reduce` gives the sum. For the mean, it has to "
            "be divided by the number of ranks.",
            4: "4 is the number of ranks. Each rank puts in its own number, not 1.",
            3: "3 is the largest of the four. `all_reduce` would give that with "
            "`op=dist.ReduceOp.MAX`. Without `op` it adds up.",
            0: "0 is what rank 0 put in. `broadcast` from rank 0 would give that to "
            "every rank. `all_reduce` adds up.",
        },
        purpose="Answer before you run the cells below: one of them draws your number "
        "beside the measured one.",
        measured=True,
    ),
    SingleChoice(
        "00.skipped",
        "Ranks 0, 1 and 3 call `dist.all_reduce(x)`. Rank 2 skips the call, and does "
        "nothing else. What do the other three do?",
        Right(
            "They wait for rank 2 and do not go on.",
            "An all-reduce is complete only when every rank of the group has joined. "
            "The three wait until something stops them. Here `%%ranks` does so when "
            "nothing moves any more, and names the ranks that are stuck.",
        ),
        Wrong(
            "They add up their three tensors, and go on.",
            "A sum without rank 2 would be wrong, and nobody would notice. A "
            "collective never leaves out a rank by itself.",
        ),
        Wrong(
            "They count rank 2's tensor as zeros, and go on.",
            "Nothing stands in for a missing rank. The others have no way of knowing "
            "what it would have sent.",
        ),
        Wrong(
            "They raise an error at once, and name rank 2.",
            "They cannot know that rank 2 will never come: it may only be slow. An "
            "error comes later, from a time limit, or when the process of rank 2 ends "
            "and its connections close.",
        ),
        measured=True,
    ),
    MultipleChoice(
        "00.variables",
        "A `%%ranks` cell runs `x = rank` on four ranks. Which statements are true "
        "afterwards?",
        Right(
            "There are four variables `x`, one in each process.",
            "Each rank has its own memory, so `x` is 0 on rank 0, 1 on rank 1, and so "
            "on.",
        ),
        Wrong(
            "An ordinary cell of the notebook can `print(x)`.",
            "Ordinary cells run in the notebook's kernel, a fifth process. It has no "
            '`x`. `ranks.pull("x")` would fetch the four values.',
        ),
        Wrong(
            "If rank 1 now sets `x = 99`, the other ranks see 99.",
            "Processes do not share variables. A value reaches another rank only when "
            "it is sent, for example with `dist.broadcast`.",
        ),
        Right(
            "The next `%%ranks` cell still finds `x` on every rank.",
            "The ranks stay alive between cells and keep their variables, as the "
            "notebook's kernel does.",
        ),
    ),
)

# The number that is a task of the exercise.
PREDICT_SUM = NumberTask(
    "00.predict_sum",
    "Five ranks run `exchange()`, the function above. What does each of them return?",
    answer=100,
    title="Predict the sum",
    stars=1,
    why="The first all_reduce leaves 0 + 1 + 2 + 3 + 4 = 10 on every rank. Times the "
    "rank that is 0, 10, 20, 30 and 40. The second one adds these up.",
    hint="Write down five numbers, one for each rank. Change them line by line: the "
    "sum, then times the rank, then the sum again.",
    slips={
        10: "Every rank holds that after the first all_reduce. Two lines follow.",
        50: "Before the second all_reduce each rank multiplies by its own number: the "
        "ranks no longer hold the same.",
        225: "Ranks count from 0: there is no rank 5.",
        40: "Rank 4 holds that before the second all_reduce. It adds up.",
        20: "all_reduce adds up. It does not divide by the number of ranks.",
        30: "That would be right without the first all_reduce.",
        36: "That is right for 4 ranks. Here there are 5.",
        150: "Ranks count from 0: they multiply by 0, 1, 2, 3 and 4.",
        0: "Rank 0 holds 0 before the second all_reduce, which adds up.",
        500: "All five ranks hold that together. What does each return?",
    },
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
