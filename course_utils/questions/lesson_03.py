"""Lesson 03, data-parallel primitives: one model, a batch in pieces, and GPU 0."""

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
    "03",
    SingleChoice(
        "03.thirty_rows",
        "`nn.DataParallel` gets a batch of 30 rows. How many rows does each GPU "
        "process, on 1, 2 and 3 GPUs?",
        [
            Choice(
                "30, 30, 30",
                why="Then every GPU would do the same work. The batch that you give is "
                "that of all GPUs together. (With DDP, lesson 06, each process loads "
                "its own batch: there 30 on each of 3 GPUs are 90 in all.)",
            ),
            Choice(
                "30, 60, 90",
                why="The batch does not grow by itself: 30 rows stay 30 rows.",
            ),
            Choice(
                "30, 15, 10",
                right=True,
                why="The batch is cut along its first dimension, one piece for each "
                "GPU.",
            ),
            Choice(
                "30, then more rows for the faster GPUs",
                why="Nobody measures who is faster. The pieces are fixed before the "
                "GPUs begin, and all wait for the slowest.",
            ),
        ],
        measured=True,
    ),
    Number(
        "03.nine_rows",
        "`nn.DataParallel` has 4 GPUs and gets a batch of 9 rows. How many of the GPUs "
        "have work?",
        answer=3,
        unit="GPUs",
        why="Each piece has ceil(9 / 4) = 3 rows, and after three pieces no row is "
        "left. The fourth GPU waits.",
        hint="A piece has ceil(rows / GPUs) rows, until there are no more rows.",
        slips=[
            Slip(
                4,
                "That would be 3 + 2 + 2 + 2. PyTorch rounds up and cuts 3 + 3 + 3: "
                "then no row is left for the fourth.",
            ),
            Slip(9, "One row for each GPU? There are 4 GPUs."),
            Slip(2, "Each piece has ceil(9 / 4) rows. How many pieces is that?"),
        ],
        purpose="The next cell lets the GPUs tell how many rows they got.",
        measured=True,
    ),
    SingleChoice(
        "03.different_models",
        "A colleague says: “With DataParallel each GPU trains its own model on other "
        "data. The models drift apart, and the result is worse.” What do you answer?",
        [
            Choice(
                "True at first, but the models are averaged after each epoch.",
                why="Nothing is averaged after an epoch. There are no models that "
                "could drift: the copies live for one step.",
            ),
            Choice(
                "True: that is why several GPUs need a smaller learning rate.",
                why="The gradient is that of the whole batch, however many GPUs "
                "compute it. With the same batch there is nothing to adjust.",
            ),
            Choice(
                "The models do drift apart, but gradients of other data only help.",
                why="There are no models to drift apart: the copies are made afresh in "
                "every forward, all from the same weights.",
            ),
            Choice(
                "There is one model. The others are copies, made for one step.",
                right=True,
                why="The gradients of the copies are added up in that one model. So a "
                "step computes what one GPU would compute with the whole "
                "batch, except for layers that look at other rows, such as BatchNorm.",
            ),
        ],
        measured=True,
    ),
    SingleChoice(
        "03.gil",
        "The replicas run in threads of one process. What does the GIL, Python's "
        "global interpreter lock, let run at one moment?",
        [
            Choice(
                "The Python code of one of the threads.",
                right=True,
                why="The lock belongs to the process. A thread that waits, or computes "
                "outside the interpreter, releases it: GPUs compute at the same "
                "time, once they have been told what to do.",
            ),
            Choice(
                "One of the GPUs.",
                why="The lock is about Python code on the CPU. GPUs compute by "
                "themselves once they have been told what to do.",
            ),
            Choice(
                "One thread, whatever the others want to do.",
                why="A thread that waits for a GPU, or computes in C++, does not need "
                "the lock and can release it.",
            ),
            Choice(
                "One Python process of the whole machine.",
                why="Each process has an interpreter and a lock of its own. That is "
                "why DDP has a process for each GPU.",
            ),
        ],
    ),
    Number(
        "03.shared_gil",
        "Four replicas run in four threads. In each forward the Python code takes 10 "
        "ms, and then the GPU computes for 10 ms. How long does it take until all four "
        "are done, at best?",
        answer=50,
        unit="ms",
        tolerance=5,
        why="The Python parts take turns: 4 × 10 ms. The GPUs compute at the same "
        "time, so after the last Python part only its own 10 ms of GPU follow.",
        hint="The GIL lets one thread run Python code at one moment. What goes on at "
        "the same time, and what takes turns?",
        slips=[
            Slip(
                20,
                "20 ms if all of it went on at the same time. But the GIL lets one "
                "thread at a time run Python.",
            ),
            Slip(
                80,
                "80 ms if nothing went on at the same time. But a thread that waits "
                "for its GPU releases the GIL.",
            ),
            Slip(40, "The last thread's GPU still has to compute."),
        ],
        purpose="Answer before you run the next cells: they measure it here, and draw "
        "your number beside it.",
        measured=True,
    ),
    SingleChoice(
        "03.imbalance",
        "What is the memory (or load) imbalance of `DataParallel`, and why does one "
        "overloaded GPU slow all the others?",
        [
            Choice(
                "The first GPU gets more rows than the others, and takes longer.",
                why="The pieces are equal (the last may be smaller). What makes the "
                "first one special is what comes on top of its piece.",
            ),
            Choice(
                "The first GPU alone holds gradients and optimizer, and updates.",
                right=True,
                why="The outputs of all are gathered there, too. So its memory limits "
                "the batch of all. And while it computes the loss and updates the "
                "weights, the others wait.",
            ),
            Choice(
                "GPUs of different kinds hold different amounts of memory.",
                why="That is a problem, too, and PyTorch warns of it. But the "
                "imbalance is there with equal GPUs.",
            ),
            Choice(
                "The last GPU gets the rest of the batch, and all wait for it.",
                why="The rest is smaller than the other pieces, so it is done earlier.",
            ),
        ],
    ),
    Number(
        "03.rows_counted",
        "A model has a buffer `rows` and does `self.rows += len(x)` in its forward. It "
        "runs under `nn.DataParallel` on 4 GPUs, on one batch of 32 rows. Which number "
        "is in `model.rows` afterwards?",
        answer=8,
        why="Each replica counts its 8 rows in its own buffer. That of the first GPU "
        "shares the memory of the model's. The other three are thrown away.",
        hint="Who adds how much, to whose buffer? Three of the four are copies.",
        slips=[
            Slip(
                32,
                "Nobody adds up the four buffers. Gradients are added up, buffers are "
                "not.",
            ),
            Slip(
                0,
                "Nearly: three of four are lost. But the replica on the first GPU "
                "shares its buffers with the model.",
            ),
            Slip(24, "It is the other way round: the first GPU's rows are kept."),
            Slip(4, "It counts rows, not GPUs."),
        ],
        purpose="The next cell runs it.",
        measured=True,
    ),
    SingleChoice(
        "03.loss_mean",
        "The loss is computed inside `forward`, on 4 GPUs. `loss.backward()` fails: "
        "“grad can be implicitly created only for scalar outputs”. Why?",
        [
            Choice(
                "The loss is on another GPU than the model.",
                why="gather has brought the losses to the first GPU, where the model "
                "is.",
            ),
            Choice(
                "`backward` does not work through `nn.DataParallel`.",
                why="It does: scatter, replicate and gather all have a backward.",
            ),
            Choice(
                "gather has joined four losses into a vector: it takes a `mean()`.",
                right=True,
                why="Each replica returns its own loss. For pieces of equal size their "
                "mean is the loss of the whole batch.",
            ),
            Choice(
                "Four losses need four calls of `backward`, one on each replica.",
                why="One call is enough: it runs through all replicas and adds up "
                "their gradients.",
            ),
        ],
    ),
    MultipleChoice(
        "03.breaks",
        "A model is wrapped: `model = nn.DataParallel(model)`. What is true?",
        [
            Choice(
                "Its `state_dict()` has keys that begin with `module.`.",
                right=True,
                why="The wrapper is a module with one child of that name. Save "
                "`model.module.state_dict()`.",
            ),
            Choice(
                "BatchNorm normalizes with the statistics of the whole batch.",
                why="Each replica sees its own rows only, and normalizes with these.",
            ),
            Choice(
                "A counter `self.calls += 1` in `forward` stays at its first value.",
                right=True,
                why="Replicas add to their own attribute, and are thrown away.",
            ),
            Choice(
                "A method of the model, such as `model.generate()`, can be called as "
                "before.",
                why="The wrapper only has `forward`. The model is `model.module`, and "
                "its methods run on one GPU.",
            ),
            Choice(
                "The optimizer must be made anew for each GPU.",
                why="One optimizer updates the one model. The replicas have no "
                "parameters of their own.",
            ),
        ],
    ),
    MultipleChoice(
        "03.why_ddp",
        "Why does nearly everybody use `DistributedDataParallel` (DDP) today, and not "
        "`DataParallel`?",
        [
            Choice(
                "DDP has one process for each GPU, so Python code runs on all of them "
                "at the same time.",
                right=True,
                why="Each process has an interpreter and a GIL of its own.",
            ),
            Choice(
                "In each step DDP sends gradients, not weights, and no GPU is a "
                "bottleneck.",
                right=True,
                why="Every process keeps its model and makes the same update. The "
                "gradients go around, not to one GPU.",
            ),
            Choice(
                "DDP works on several nodes.",
                right=True,
                why="Processes may be on different computers; threads of one process "
                "are not.",
            ),
            Choice(
                "DDP computes other gradients, with which training converges better.",
                why="With the same global batch the gradients are the same.",
            ),
            Choice(
                "DDP splits models that do not fit on one GPU.",
                why="Each process holds the whole model, as each replica does here. "
                "For larger models see lessons 02 and 08.",
            ),
        ],
    ),
)

# The number that is a task of the exercise.
PREDICT_TRAFFIC = NumberTask(
    "03.predict_traffic",
    "A model has 100 MB of parameters and no buffers. It trains with "
    "`nn.DataParallel` on 8 GPUs, with the loss inside `forward`. How many MB of "
    "parameters and gradients are sent from GPU to GPU in **one** training step, all "
    "copies together? Batches and losses do not count.",
    answer=1400,
    unit="MB",
    title="Predict the traffic",
    stars=1,
    why="Seven GPUs get a copy of the parameters, 700 MB, and each of them sends "
    "gradients of the same size back: 700 MB more.",
    hint="How many GPUs get a copy of the parameters in each step, and how many send "
    "gradients back? Each copy has 100 MB.",
    slips=[
        Slip(700, "That is the way out. In the backward as many gradients come back."),
        Slip(1600, "GPU 0 sends nothing to itself: seven GPUs get a copy."),
        Slip(
            800,
            "GPU 0 sends nothing to itself, so seven GPUs get a copy. And as many "
            "gradients come back.",
        ),
        Slip(200, "That is the traffic with one other GPU. There are seven."),
        Slip(100, "That is one copy. Seven GPUs get one, and send gradients back."),
        Slip(2100, "The update sends nothing: the next forward sends the parameters."),
        Slip(175, "That is what each GPU sends in a ring all-reduce, as in DDP."),
        Slip(1.4, "In MB, please."),
    ],
    hints=(
        "How many of the eight GPUs get a copy from GPU 0?",
        "In the forward the parameters go out, in the backward gradients of the same "
        "size come back. GPU 0 itself needs no copy.",
        "For 4 GPUs it goes like this:\n"
        "  out    3 * 100 MB\n"
        "  back   3 * 100 MB\n"
        "  sum    600 MB",
    ),
)
