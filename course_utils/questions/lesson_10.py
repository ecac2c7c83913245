"""Lesson 10, pipeline schedules: orders, bubbles, memory, sends that cross."""

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
        "10.what_comes_back",
        "Two ranks, a stage on each. Rank 1 has computed the loss of a batch and "
        "called `backward()`. What does rank 0 need from it to go on?",
        Wrong(
            "The gradient of the loss with respect to rank 1's weights",
            "These stay on rank 1, whose optimizer uses them.",
        ),
        Right(
            "The gradient of the loss with respect to rank 1's input",
            "That input is rank 0's output. Its gradient is where rank 0's own "
            "backward begins.",
        ),
        Wrong(
            "The loss itself, from which rank 0 computes its own gradients",
            "Rank 0 cannot: the layers between its output and the loss are on rank 1.",
        ),
        Wrong(
            "The output of rank 1, so that autograd sees the whole chain",
            "Autograd ends where a tensor leaves the process. A gradient has to be "
            "sent back.",
        ),
    ),
    Number(
        "10.gpipe_kept",
        "Four ranks, eight micro-batches, all forwards before the first backward. For "
        "how many micro-batches does rank 0 keep activations at once?",
        answer=8,
        why="Its first backward comes after its last forward, so it has to keep all "
        "eight until then. So does every other rank.",
        hint="When does rank 0 let go of the activations of micro-batch 0?",
        slips={
            4: "That is the number of ranks. It has no part in this schedule.",
            1: "The next micro-batch comes long before the first one's backward.",
            7: "The last micro-batch counts as well.",
        },
        purpose="The next cell counts.",
        measured=True,
    ),
    Number(
        "10.rank_0_keeps",
        "The same four ranks and eight micro-batches with 1F1B. For how many "
        "micro-batches does rank 0 keep activations at once?",
        answer=4,
        why="Rank 0 does three forwards before its turns begin, and each turn begins "
        "with a forward: four are kept, however many micro-batches there are.",
        hint="Three ranks come after rank 0. What does it do until the first gradient "
        "comes back?",
        slips={
            8: "It would be, if rank 0 ran ahead while it waits for the first "
            "gradient. 1F1B does not let it.",
            3: "Three come before the turns. A turn begins with one more forward.",
            1: "That is the last rank: a backward follows each of its forwards.",
            5: "The first backward lets go of micro-batch 0 before the fifth.",
        },
        purpose="The next cell counts.",
        measured=True,
    ),
    SingleChoice(
        "10.time_of_a_step",
        "All stages take equally long. How does the time of a step with 1F1B compare "
        "with that of GPipe, for the same number of micro-batches?",
        Wrong(
            "It is shorter, because backwards begin before all forwards are done",
            "They begin earlier. But the last rank is busy as long as before, and then "
            "the last gradient travels back through all the others.",
        ),
        Wrong(
            "It is longer, because a rank has to switch between forward and backward",
            "Switching costs nothing: each rank does the same work as before.",
        ),
        Right(
            "It is the same, because the first and the last stage wait as before",
            "The last rank still begins after p - 1 forwards, and the first one still "
            "ends p - 1 backwards after it. 1F1B saves memory, not time.",
        ),
        measured=True,
    ),
    SingleChoice(
        "10.crossing",
        "With gloo, rank 0 calls `send` with an activation for rank 1. At the same "
        "moment rank 1 calls `send` with a gradient for rank 0. What happens?",
        Wrong(
            "Both messages pass each other, and both ranks go on",
            "With gloo, `send` returns only when the other side receives, and neither "
            "does.",
        ),
        Right(
            "Each waits for the other to receive, and neither goes on",
            "Neither comes to its `recv`. The order of the schedule is right, and "
            "still it hangs: one of the two must not block.",
        ),
        Wrong(
            "What rank 0 sends overwrites the tensor that rank 1 is sending",
            "Nothing is received here. Both still wait in `send`.",
        ),
        measured=True,
    ),
    SingleChoice(
        "10.slow_stage",
        "One of four stages takes twice as long as the others. There are many "
        "micro-batches. What happens to the time of a step?",
        Wrong(
            "It grows by a quarter, as one stage in four takes twice as long",
            "The stages do not take turns. All work at the same time, and all wait for "
            "the slowest.",
        ),
        Wrong(
            "It hardly changes, as the slow stage's work hides in the bubble",
            "The bubble does not grow with the micro-batches. The slow stage delays "
            "every one of them.",
        ),
        Right(
            "It nearly doubles, as every micro-batch passes the slow stage",
            "The slow stage works without a break, and the others wait for it. So "
            "layers are shared out by time, not by number.",
        ),
        measured=True,
    ),
    Number(
        "10.interleaved_bubble",
        "Four ranks and eight micro-batches. The bubble of 1F1B is 3/8 of the ideal "
        "time. Now each rank has two smaller stages. How large is the bubble, as a "
        "share of the ideal time?",
        answer=18.75,
        unit="%",
        tolerance=0.3,
        why="(p - 1) / (m v) = 3 / (8 · 2) = 18.75 %, with v = 2 stages on each rank: "
        "the next rank begins after a stage that is half as long.",
        hint="A rank still waits for p - 1 others, but each of them takes less time.",
        slips={
            37.5: "That is without interleaving: with v stages, divide by v.",
            27.3: "That is the share of the *whole* time, without interleaving.",
            9.4: "Divided by 4. There are two stages on each rank.",
            15.8: "That is the share of the whole time. The ideal time has none.",
        },
        purpose="The next cell simulates it.",
        measured=True,
    ),
    MultipleChoice(
        "10.price",
        "What does interleaving with v stages on each rank cost, compared with 1F1B?",
        Right(
            "about v times as many messages between the ranks",
            "There are pv - 1 boundaries instead of p - 1.",
        ),
        Wrong(
            "v times as many parameters on each rank",
            "The layers are the same ones, cut in another way.",
        ),
        Right(
            "more activations that are kept at once",
            "A rank begins with more than v times as many forwards, each through a "
            "v-th of its layers.",
        ),
        Wrong(
            "a different result, as the layers run in another order",
            "Each micro-batch still passes all layers in their order.",
        ),
    ),
    SingleChoice(
        "10.who_waits",
        "A backward computes the gradient of a stage's input, and those of its "
        "weights. For which of the two does another rank wait?",
        Right(
            "For that of the input: the rank before starts from it",
            "So it is computed first and sent, and the weights' gradients fill a gap "
            "later.",
        ),
        Wrong(
            "For those of the weights: the optimizer needs them all",
            "The optimizer runs on this rank, at the end of the step. They are needed, "
            "but not soon.",
        ),
        Wrong(
            "For both: autograd computes and hands them over together",
            "It usually does, but the two are separate products of matrices.",
        ),
    ),
)

PREDICT_KEPT = NumberTask(
    "10.predict_kept",
    "Eight ranks train with 1F1B and 32 micro-batches. For how many micro-batches does "
    "rank 2 keep activations at once, at most?",
    answer=6,
    title="Predict what is kept",
    stars=1,
    why="Five ranks come after rank 2: five forwards come first, and each turn begins "
    "with one more.",
    hint="How many ranks come after rank 2? It does a forward for each of them first.",
    slips={
        32: "That is GPipe, where all forwards come first.",
        8: "That is rank 0, with seven ranks after it.",
        5: "Five come before the turns. A turn begins with one more forward.",
        3: "Count the ranks after it, not those before.",
        2: "Count the ranks after it, not those before.",
    },
    hints=(
        "What does a rank do while the first gradient is on its way back?",
        "Rank r of p has p - r - 1 ranks after it. For each it does a forward first.",
        "  after = p - r - 1\n  kept = after + ...",
    ),
)
