"""Lesson 12, the clinic: hangs, stragglers, silent mistakes, memory that grows."""

from course_utils.questions import (
    MultipleChoice,
    NumberTask,
    Right,
    SingleChoice,
    Wrong,
    lesson,
)

QUESTIONS = lesson(
    SingleChoice(
        "12.who_waits",
        "A job has 4 steps, numbered from 0. In step 1 the loss of rank 1 is NaN, and "
        "this rank alone leaves out the all-reduce. Where does the job come to a stop?",
        Wrong(
            "In step 1: ranks 0, 2 and 3 wait for rank 1, which waits in step 2",
            "An all-reduce has no step number. Rank 1 calls its next one in step 2, "
            "and that is taken for the missing one.",
        ),
        Wrong(
            "Nowhere: in step 1, the three others average without rank 1",
            "A collective needs a call from every rank of its group. The others cannot "
            "know that rank 1 leaves one out.",
        ),
        Right(
            "In step 3: ranks 0, 2 and 3 wait, and rank 1 is already through",
            "Rank 1 is one all-reduce ahead from step 1 on. Its calls are taken for "
            "those of the step before, until it has none left.",
        ),
        measured=True,
    ),
    SingleChoice(
        "12.hang_cause",
        "Another job is stuck. All ranks are in the seventh call of one group: on "
        "ranks 0 and 1 it is an `all_reduce`, on ranks 2 and 3 a `broadcast`. Which of "
        "these can be the cause?",
        Wrong(
            "A link has failed, so some messages no longer arrive",
            "Then the seventh call would still be the same one on all ranks.",
        ),
        Right(
            "An `if` in front of a collective goes another way on some ranks",
            "Two ranks have left out a call, or made one more. The condition of an "
            "`if` around a collective must be the same on all ranks.",
        ),
        Wrong(
            "Ranks 2 and 3 are slower than the others, and need a longer timeout",
            "Slow ranks come to the same call, only later. These are in another one.",
        ),
        Wrong(
            "The tensor has another shape on ranks 2 and 3 than on the others",
            "That is a fault of its own, with an error, wrong numbers or a hang. But "
            "then all ranks would be in the same call. Here the calls differ.",
        ),
    ),
    SingleChoice(
        "12.step_times",
        "Rank 2 computes for 60 ms in each step, the others for 20 ms. Then all "
        "average their gradients. Every rank times its whole step. What do they "
        "measure?",
        Wrong(
            "60 ms on rank 2, and 20 ms on the others",
            "They have computed earlier, but in the all-reduce they wait for rank 2.",
        ),
        Wrong(
            "30 ms on all four ranks",
            "That is the mean of the four. But all of them wait for the slowest.",
        ),
        Right(
            "60 ms on all four ranks",
            "The waiting is inside the step. So the time of a step tells that there is "
            "a straggler, and not which rank it is.",
        ),
        measured=True,
    ),
    SingleChoice(
        "12.slow_cause",
        "Rank 2 computes longest in every step. You let ranks 2 and 3 exchange their "
        "data, and start again. Now rank 3 computes longest. Where is the fault?",
        Wrong(
            "In the machine of rank 2, whose GPU is slower than the others",
            "Then rank 2 would be slow with any data.",
        ),
        Right(
            "In the data: the share that rank 2 had takes more work",
            "The slowness moved with the data. Exchange one thing at a time: what it "
            "moves with is the cause.",
        ),
        Wrong(
            "In the network, which is slower between these two ranks",
            "The *computing* was timed, before anything is sent.",
        ),
    ),
    SingleChoice(
        "12.drift",
        "Each rank starts with its own parameters. In every step the gradients are "
        "averaged, and all ranks take the same step of SGD. How far apart are their "
        "parameters after 50 steps?",
        Wrong(
            "They are equal, as the averaged gradients draw them together",
            "All ranks move by the same amount. What moves in parallel does not meet.",
        ),
        Right(
            "As far apart as they were at the start of the training",
            "The same step is subtracted everywhere, so the differences stay as they "
            "are. Averaging gradients does not average parameters.",
        ),
        Wrong(
            "Far more than at first, as each rank follows its own loss",
            "Each follows the average of all, which is the same for all of them.",
        ),
        measured=True,
    ),
    SingleChoice(
        "12.start_cause",
        "Hashes of the parameters, on two ranks. At the start: a3f and a3f. After the "
        "first step: 51c and 51c. After the second: 07e and d92. Where do you look "
        "first?",
        Right(
            "What the ranks do differently in the second step",
            "They were equal after the first one, so their start is right. Did a rank "
            "skip, or use a gradient that was not averaged?",
        ),
        Wrong(
            "Whether the start is broadcast from rank 0 to the others",
            "The hashes are equal at the start, so the start was the same.",
        ),
        Wrong(
            "Whether both ranks read the same data in each of the steps",
            "They should not. Different data is what data parallelism is for.",
        ),
    ),
    SingleChoice(
        "12.grows",
        "A job keeps two lists of losses, as tensors: those of training, each after "
        "its `backward()`, and those of validation: the same code without the "
        "backward. Which list makes memory grow by megabytes?",
        Wrong(
            "The list of the training, as gradients are computed there",
            "`backward()` lets go of the activations as it uses them. The loss that "
            "stays in the list is small.",
        ),
        Wrong(
            "Both of them, as each loss carries its whole graph with it",
            "Each has its graph. But a backward has freed the activations in the graph "
            "of a training loss.",
        ),
        Right(
            "The list of the validation, as nothing frees its graphs",
            "Each of these losses keeps the activations of its batch, in case a "
            "backward still comes.",
        ),
        Wrong(
            "Neither of them, as a loss is a single number of 4 bytes",
            "The number takes 4 bytes, but `loss.grad_fn` leads to all that a backward "
            "would need.",
        ),
        measured=True,
    ),
    MultipleChoice(
        "12.silent",
        "Which of these faults let a job run to its end, without an error and without "
        "a hang?",
        Right(
            "the parameters of rank 0 are not broadcast at the start",
            "The loss goes down, but stays too high: no rank reaches the goal.",
        ),
        Wrong(
            "one rank leaves out an all-reduce of the others",
            "Sooner or later somebody waits for a call that does not come.",
        ),
        Right(
            "`set_epoch` is never called on the sampler",
            "Every epoch has the same order, and only the accuracy tells.",
        ),
        Right(
            "the loss is the mean of the ranks' means, though they have unequal shares",
            "The number looks like any other loss.",
        ),
        Wrong(
            "only rank 0 calls the `state_dict()` that gathers",
            "It waits for the others, which never come.",
        ),
    ),
)

PREDICT_LOSS = NumberTask(
    "12.predict_loss",
    "A job on 256 GPUs hangs at some moment. The timeout ends it after 10 minutes, and "
    "it takes 5 minutes to start again from the last checkpoint. There is a checkpoint "
    "every 30 minutes. How many GPU hours does such a hang cost, on average?",
    answer=128,
    unit="GPU hours",
    title="Predict what a hang costs",
    stars=1,
    why="All 256 GPUs lose 10 minutes in the timeout, 5 in the restart, and 15 on "
    "average for work that they repeat: half an hour each.",
    hint="How much work is repeated, on average? A hang comes anywhere between two "
    "checkpoints.",
    slips={
        192: "That is the worst case, right before a checkpoint. On average half of "
        "the 30 minutes are repeated.",
        64: "The work since the last checkpoint is lost, too: 15 minutes on average.",
        0.5: "That is what *one* GPU loses. All 256 wait and repeat.",
        7680: "Those are GPU minutes.",
        42.7: "That is the timeout alone. Then the job starts, and repeats what it had "
        "done since the last checkpoint.",
        85.3: "The timeout counts, too: all GPUs wait for those 10 minutes.",
        106.7: "The restart takes 5 minutes more.",
    },
    hints=(
        "How many GPUs wait, and how long is each of them of no use?",
        "Timeout, restart, and on average half an interval of work that is repeated.",
        "  minutes = 10 + 5 + ... / 2\n  hours = 256 * minutes / 60",
    ),
)
