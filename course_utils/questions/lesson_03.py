"""Lesson 03, data-parallel primitives: one model, a batch in pieces, and GPU 0."""

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
        "03.thirty_rows",
        "`nn.DataParallel` gets a batch of 30 rows. How many rows does each GPU "
        "process, on 1, 2 and 3 GPUs?",
        Wrong(
            "30, 30, 30",
            "Then all GPUs would do the same work. The batch that you pass is for all "
            "GPUs together. (With DDP, lesson 06, each process loads its own batch: "
            "there, 30 rows on each of 3 GPUs are 90 in all.)",
        ),
        Wrong("30, 60, 90", "The batch does not grow by itself: 30 rows stay 30 rows."),
        Right(
            "30, 15, 10",
            "The batch is cut along its first dimension into one piece for each GPU.",
        ),
        Wrong(
            "30, then more rows for the faster GPUs",
            "PyTorch does not measure which GPU is faster. The pieces are fixed before "
            "the GPUs begin, and all wait for the slowest.",
        ),
        measured=True,
    ),
    Number(
        "03.nine_rows",
        "`nn.DataParallel` has 4 GPUs and gets a batch of 9 rows. How many of the GPUs "
        "have work to do?",
        answer=3,
        unit="GPUs",
        why="Each piece has ceil(9 / 4) = 3 rows, so three pieces use up all rows. The "
        "fourth GPU gets nothing.",
        hint="A piece has ceil(rows / GPUs) rows, until there are no more rows.",
        slips={
            4: "That would be 3 + 2 + 2 + 2. PyTorch rounds up and cuts 3 + 3 + 3, so "
            "no row is left for the fourth.",
            9: "One row for each GPU? There are 4 GPUs.",
            2: "Each piece has ceil(9 / 4) rows. How many pieces is that?",
        },
        purpose="In the next cell the GPUs note how many rows they get.",
        measured=True,
    ),
    SingleChoice(
        "03.different_models",
        "The next cell makes 10 training steps with `nn.DataParallel`, on 1, 2 and 4 "
        "GPUs, from the same start and with the same batches. A colleague says: “Each "
        "GPU trains its own model on other rows, so the models drift apart.” Do the "
        "three runs end with the same parameters?",
        Wrong(
            "No: each GPU has trained on rows of its own.",
            "The GPUs compute on different rows, but no GPU has a model of its own to "
            "train. All the gradients go into one model.",
        ),
        Wrong(
            "No: with four GPUs there are four updates a step.",
            "There is one update in each step, on the default GPU. The copies are "
            "never updated.",
        ),
        Wrong(
            "Yes: after each step, the models are averaged.",
            "There is only one model after the step, so there is nothing to average. "
            "What is added up are the gradients of its copies.",
        ),
        Right(
            "Yes: the GPUs train one model, with temporary copies.",
            "The gradients of the copies are added up in the one model. So a step "
            "computes what one GPU would compute with the whole batch. Layers that "
            "look at other rows, such as BatchNorm, are an exception.",
        ),
        measured=True,
    ),
    SingleChoice(
        "03.gil",
        "The replicas run in threads of one process. What does the GIL, Python's "
        "global interpreter lock, allow to run at one moment?",
        Right(
            "The Python code of one of the threads.",
            "The lock belongs to the process. A thread that waits, or computes outside "
            "the interpreter, releases it. So GPUs compute at the same time once they "
            "have been told what to do.",
        ),
        Wrong(
            "The computations of one of the GPUs.",
            "The lock concerns Python code on the CPU. GPUs compute on their own once "
            "they have been told what to do.",
        ),
        Wrong(
            "One of the threads: until it ends, the others do nothing.",
            "A thread that waits for a GPU, or computes in C++, does not need the lock "
            "and can release it.",
        ),
        Wrong(
            "One Python process of the whole machine.",
            "Each process has its own interpreter and its own lock. That is why DDP "
            "has a process for each GPU.",
        ),
    ),
    Number(
        "03.shared_gil",
        "Four replicas run in four threads. In each forward, the Python code takes 10 "
        "ms, and then the thread waits 10 ms for its GPU. How long does it take, at "
        "best, until all four are done?",
        answer=50,
        unit="ms",
        tolerance=5,
        why="The Python parts take turns: 4 × 10 ms. The GPUs compute at the same "
        "time, so only the last one's 10 ms come after the last Python part.",
        hint="The GIL lets one thread run Python code at a time. Which parts can run "
        "at the same time, and which take turns?",
        slips={
            20: "It would be 20 ms if everything ran at the same time. But the GIL "
            "lets one thread at a time run Python.",
            80: "It would be 80 ms if nothing ran at the same time. But a thread that "
            "waits for its GPU releases the GIL.",
            40: "The last thread's GPU still has to compute.",
        },
        purpose="Answer before you run the next cells: they measure it, and draw your "
        "number beside it.",
        measured=True,
    ),
    Number(
        "03.imbalance",
        "Four equal GPUs train with `nn.DataParallel` and Adam, in float32: 1,024 "
        "rows, a quarter for each. For each row the model computes 2,000 numbers, and "
        "it has 1 MiB of parameters. The loss needs one more tensor of the size of the "
        "outputs, and their gradient is another. Estimate: the peak of the fullest "
        "GPU is how many times as high as that of another GPU?",
        answer=6.4,
        tolerance=1.5,
        why="The first GPU needs 28 MiB, the others 4.4 MiB each. It gathers the "
        "outputs of all rows, 7.8 MiB. It needs another 7.8 MiB for the loss, and "
        "7.8 MiB for the gradient of the outputs. The optimizer's state is there, too. "
        "This imbalance limits the batch of all.",
        hint="Which GPU gets the outputs of all rows? Where is the loss computed, and "
        "what does its backward make?",
        slips={
            1: "The pieces and the replicas are equal. But the outputs of all rows "
            "come together on the first GPU.",
            4: "The outputs of all rows are four times those of one piece. What the "
            "loss needs and the gradient of the outputs come on top.",
            2: "The optimizer's state alone would give less than that. But the outputs "
            "of all rows are much larger.",
        },
        purpose="The next cells measure it.",
        measured=True,
    ),
    Number(
        "03.rows_counted",
        "A model has a buffer `rows` and does `self.rows += len(x)` in its forward. It "
        "runs under `nn.DataParallel` on 4 GPUs, on one batch of 32 rows. Which number "
        "is in `model.rows` afterwards?",
        answer=8,
        why="Each replica counts its 8 rows in its own buffer. The first GPU's buffer "
        "shares its memory with the model's. The other three are thrown away.",
        hint="Who adds how much, and to whose buffer? Three of the four are copies.",
        slips={
            32: "The four buffers are not added up. Only gradients are.",
            0: "Nearly: three of four are lost. But the replica on the first GPU "
            "shares its buffers with the model.",
            24: "It is the other way round: the first GPU's rows are kept.",
            4: "It counts rows, not GPUs.",
        },
        purpose="The next cell runs it.",
        measured=True,
    ),
    SingleChoice(
        "03.loss_mean",
        "The forward of `model` returns the mean loss of its rows. On 4 GPUs you "
        "compute `loss = nn.DataParallel(model)(x, y)`. What does `loss.backward()` "
        "do?",
        Wrong(
            "It works: `loss` is the mean loss over all rows of the batch.",
            "Each replica returns the mean of its own rows, and gather only joins "
            "them. It does not compute anything.",
        ),
        Wrong(
            "It works, but only the first GPU's rows have a gradient.",
            "gather joins what all replicas return, not only the first.",
        ),
        Right(
            "It fails: `loss` is a vector with one number for each GPU.",
            "gather joins the four losses, and `backward` needs a single number. Call "
            "`loss.mean()` first.",
        ),
        Wrong(
            "It fails: gather and replicate do not have a backward.",
            "They have one. The gradients go back through them to the model.",
        ),
        measured=True,
    ),
    MultipleChoice(
        "03.breaks",
        "`model` is trained as `wrapped = nn.DataParallel(model)` on 4 GPUs. Which of "
        "these statements are true?",
        Right(
            "`torch.save(wrapped.module.state_dict(), path)` saves weights that "
            "`model` can load on one GPU.",
            "These names have no `module.` in front.",
        ),
        Wrong(
            "With an int, `self.steps += 1` in the forward counts the steps.",
            "Each replica sets its own attribute, and is thrown away. The model's "
            "counter stays at 0.",
        ),
        Wrong(
            "`nn.BatchNorm1d(64)` normalizes with the statistics of the whole batch.",
            "Each replica sees only its own rows, a quarter of the batch.",
        ),
        Right(
            "`self.seen.append(len(x))`, with a list, notes the size of each piece.",
            "All replicas share the list, and `append` loses nothing. The order may be "
            "any.",
        ),
        Wrong(
            "`wrapped.generate(x)` calls the method `generate` of the model.",
            "The wrapper has only `forward`. `wrapped.module.generate(x)` is there, "
            "and runs on one GPU.",
        ),
    ),
    MultipleChoice(
        "03.why_ddp",
        "A job runs with `nn.DataParallel` on 8 GPUs of one node. It changes to "
        "`DistributedDataParallel` (DDP). Which of these statements are then true?",
        Right(
            "The Python code of eight forwards runs at the same time.",
            "With DDP each GPU has its own process, with its own interpreter and its "
            "own GIL.",
        ),
        Right(
            "No GPU has to wait for the weights in each step.",
            "Each process keeps its model and makes the same update. DDP sends "
            "gradients, not weights.",
        ),
        Right(
            "Four more GPUs on another node can join.",
            "Processes can run on different nodes; threads of one process cannot.",
        ),
        Wrong(
            "BatchNorm normalizes over the rows of all GPUs.",
            "Each process sees only its own rows, as each replica does here. "
            "`nn.SyncBatchNorm` cures it.",
        ),
        Wrong(
            "A model that is too large for one GPU now fits.",
            "With DDP each process holds the whole model, as each replica does here. "
            "For larger models see lessons 02 and 08.",
        ),
    ),
)

# The number that is a task of the exercise.
PREDICT_TRAFFIC = NumberTask(
    "03.predict_traffic",
    "A model has 100 MB of parameters and no buffers. It trains with `nn.DataParallel` "
    "on 8 GPUs, with the loss inside `forward`. How many MB of parameters and "
    "gradients are sent from GPU to GPU in **one** training step, all copies together? "
    "Batches and losses do not count.",
    answer=1400,
    unit="MB",
    title="Predict the traffic",
    stars=1,
    why="Seven GPUs get a copy of the parameters, 700 MB in all, and each sends "
    "gradients of the same size back: 700 MB more.",
    hint="How many GPUs get a copy of the parameters in each step, and how many send "
    "gradients back? Each copy has 100 MB.",
    slips={
        700: "That is the forward. In the backward, the gradients come back.",
        1600: "GPU 0 sends nothing to itself: seven GPUs get a copy.",
        800: "GPU 0 sends nothing to itself, so seven GPUs get a copy. And the "
        "gradients come back.",
        200: "That is the traffic with one other GPU. There are seven.",
        100: "That is one copy. Seven GPUs get one, and send gradients back.",
        2100: "The update sends nothing: the next forward sends the parameters.",
        175: "That is what each GPU sends in a ring all-reduce, as in DDP.",
        1.4: "In MB, please.",
    },
    hints=(
        "How many of the eight GPUs get a copy from GPU 0?",
        "In the forward the parameters go out, and in the backward gradients of the "
        "same size come back. GPU 0 itself needs no copy.",
        "With 4 GPUs it would be:\n"
        "  out    3 * 100 MB\n"
        "  back   3 * 100 MB\n"
        "  sum    600 MB",
    ),
)
