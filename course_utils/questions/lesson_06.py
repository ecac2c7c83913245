"""Lesson 06, DistributedDataParallel: what it sends, when, and what may go wrong."""

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
    MultipleChoice(
        "06.dp_and_ddp",
        "What is true of `DistributedDataParallel` (DDP), and not of "
        "`nn.DataParallel`?",
        Right(
            "It runs in several processes, usually one for each GPU.",
            "`torchrun` starts them. `DataParallel` is one process with a thread for "
            "each GPU.",
        ),
        Right(
            "Each GPU has its own optimizer, and all of them take every step.",
            "On all ranks it makes the same step, from the same gradients. With "
            "`DataParallel` one optimizer changes the weights on GPU 0.",
        ),
        Wrong(
            "Its rank 0 hands out the work, and collects the results.",
            "No rank of DDP coordinates the others: all make the same calls. In "
            "`DataParallel`, the main thread hands out the work.",
        ),
        Wrong(
            "It copies the weights to all GPUs before every forward.",
            "That is `DataParallel`. DDP broadcasts them once, when it is made, and "
            "then all ranks make the same steps.",
        ),
        Right(
            "It can run on several machines at the same time.",
            "Processes can be anywhere, as long as messages get through. Threads share "
            "one machine.",
        ),
        Wrong(
            "It cuts the batch into one piece for each GPU.",
            "`DataParallel` cuts. In DDP each rank loads a batch of its own, for which "
            "a `DistributedSampler` picks the items.",
        ),
        measured=True,
    ),
    SingleChoice(
        "06.who_syncs",
        "Which line of a training loop with DDP exchanges the gradients?",
        Wrong(
            "`output = model(inputs)`",
            "The forward broadcasts buffers, but no gradients.",
        ),
        Right(
            "`loss.backward()`",
            "Hooks in the backward start the all-reduces, and `backward()` ends with "
            "waiting for all of them. So the next line sees the mean in `.grad`. (With "
            "NCCL, it is the GPU's queue that waits, not Python.)",
        ),
        Wrong(
            "`optimizer.step()`",
            "Often said, and you have just seen that it sends nothing. The optimizer "
            "knows nothing of other ranks. It changes this rank's weights by this "
            "rank's `.grad`, which is the same on all ranks.",
        ),
        Wrong(
            "`optimizer.zero_grad()`",
            "It clears this rank's gradients, and sends nothing.",
        ),
        measured=True,
    ),
    Number(
        "06.two_ranks",
        "Two ranks, each with a core of its own. In the forward of each, Python "
        "computes for 10 ms, and then the GPU for 10 ms. How long does it take until "
        "both are done?",
        answer=20,
        unit="ms",
        tolerance=4,
        why="Each process has a GIL of its own, so both run at the same time: 10 + 10 "
        "ms.",
        hint="What did the two threads of `DataParallel` have to share? Do two "
        "processes share it?",
        slips={
            30: "That is the time of two threads, whose Python takes turns.",
            40: "That would be one after the other.",
            10: "The GPU part comes after the Python part of the same rank.",
        },
        purpose="The next cells measure it, and DataParallel beside it.",
        measured=True,
    ),
    SingleChoice(
        "06.buffers",
        "Two ranks draw different weights and different random features (a buffer). "
        "Only the parameters are broadcast from rank 0. Then they train, with averaged "
        "gradients. What happens?",
        Wrong(
            "An error in the first step: the models do not match.",
            "All shapes match, and no code compares the values.",
        ),
        Wrong(
            "All is well: buffers are not trained, so they change no gradients.",
            "They are not trained, but they are part of the function that the model "
            "computes.",
        ),
        Right(
            "The parameters stay equal, but are fitted to two models at once.",
            "Each rank's gradient belongs to its own features. The mean of the two is "
            "the same step on both, and right for neither.",
        ),
        Wrong(
            "The parameters of the ranks drift apart from step to step.",
            "They begin alike, and make the same step: they stay equal. That is what "
            "makes the mistake hard to see.",
        ),
        measured=True,
    ),
    SingleChoice(
        "06.when_sent",
        "When does DDP send a bucket?",
        Wrong(
            "When `backward()` has ended, and all gradients are complete.",
            "None leaves so late. The last one leaves when the last gradient is ready, "
            "still inside `backward()`, which then waits for all.",
        ),
        Right(
            "When its last gradient is ready, and all buckets before it have left.",
            "All ranks must call their all-reduces in the same order. So a full bucket "
            "also waits for those before it.",
        ),
        Wrong(
            "When one of its gradients is ready: that part of it is sent at once.",
            "A bucket is one tensor and one all-reduce. It waits for all of its "
            "gradients.",
        ),
        Wrong(
            "When the optimizer needs the first of the gradients that are in it.",
            "The optimizer asks for nothing: all means are there before it begins.",
        ),
    ),
    Number(
        "06.small_model",
        "20 linear layers with a weight and a bias each, all together 333 kB. How many "
        "all-reduces does DDP (with its usual bucket sizes) need in a step?",
        answer=1,
        unit="all-reduces",
        why="333 kB is less than the first bucket's 1 MiB. So there is one bucket, and "
        "it is sent at the end of the backward.",
        hint="Gradients share a bucket until it has reached its size. How large is the "
        "first bucket?",
        slips={
            40: "One for each parameter: that is rung 3, without buckets.",
            20: "A bucket is not a layer. It is filled until it reaches a size.",
            2: "All gradients together do not even fill the first bucket.",
            0: "Some message must carry the gradients.",
        },
        purpose="The next cell counts them.",
        measured=True,
    ),
    Number(
        "06.second_bucket",
        "12 layers of 4.004 MiB each (a weight of 4 MiB, and a small bias). Buckets: 1 "
        "MiB for the first, 25 MiB for the others. After the first step, how many MiB "
        "are in the second bucket?",
        answer=28.027,
        unit="MiB",
        tolerance=0.05,
        why="The first bucket has one layer. The second takes layer after layer until "
        "it has reached 25 MiB: six are 24.02 MiB, so a seventh goes in, too.",
        hint="A bucket is closed when it has reached its cap. How many layers of 4.004 "
        "MiB does that take?",
        slips={
            25: "Gradients are not cut: a bucket holds whole ones.",
            24.023: "Six layers are still below 25 MiB, so one more goes in.",
            24: "6 × 4 MiB, and the biases: still below 25. So one more goes in.",
            4.004: "That is the first bucket.",
            16.016: "That is what is left for the third.",
            44.043: "The second one has a cap, too.",
            48.047: "That is all of them.",
        },
        purpose="The next cells look into the buckets.",
        measured=True,
    ),
    Number(
        "06.divide_by_k",
        "A batch is cut into 4 micro-batches, whose gradients add up. Each loss is a "
        "mean over its rows, and is not divided by 4. How many times as large as the "
        "gradient of the whole batch is the accumulated one?",
        answer=4,
        unit="times",
        tolerance=0.05,
        why="Each loss is the mean over a quarter of the rows. The sum of four means "
        "is four times the mean of all.",
        hint="What is the sum of four means, compared with the mean of all rows?",
        slips={
            1: "Each loss is divided by the number of its own rows only.",
            0.25: "The other way round: without a division it is larger.",
            2: "DDP averages over the ranks. That leaves the four parts.",
            8: "DDP averages over the two ranks. That leaves four parts.",
        },
        purpose="The next cells accumulate it, with and without the division.",
        measured=True,
    ),
    SingleChoice(
        "06.no_sync_forward",
        "To accumulate, somebody writes `output = model(x)` before the `with "
        "model.no_sync():`, and only `loss.backward()` inside. What is the effect?",
        Right(
            "Each micro-batch is averaged: nothing is saved.",
            "The forward has already decided that the next backward sends. (The mean "
            "is right: what earlier micro-batches left in .grad is the same on all "
            "ranks, and averaging it again changes nothing.)",
        ),
        Wrong(
            "The gradients are never averaged.",
            "That happens if, in the last micro-batch, the forward is inside and the "
            "backward outside.",
        ),
        Wrong(
            "An error: forward and backward do not match.",
            "There is no error, and no warning.",
        ),
        Wrong(
            "It works as meant: only the backward counts.",
            "It is the backward that sends, but the forward that decides: the cell "
            "above shows the mean, 0.5.",
        ),
        measured=True,
    ),
    SingleChoice(
        "06.unused",
        "In each step rank 0 uses head a only, and rank 1 head b only. Where does "
        "plain DDP complain?",
        Wrong(
            "When it is made: it looks at the model.",
            "Both heads are in the model. Which one a step uses shows in the forward.",
        ),
        Wrong(
            "In the first backward.",
            "That one ends here, with a bucket that never got full. (A rank that *has* "
            "all gradients would wait in it for the others.)",
        ),
        Right(
            "In the second forward.",
            "There DDP prepares for the next backward, and finds the reduction of the "
            "last one unfinished.",
        ),
        Wrong(
            "Never: a gradient that is missing counts as zero.",
            "Only with `find_unused_parameters=True`. Otherwise DDP waits for it.",
        ),
        measured=True,
    ),
    MultipleChoice(
        "06.batch_norm",
        "A model with BatchNorm is trained with DDP, 8 rows on each of 16 GPUs. What "
        "is true?",
        Right(
            "Each rank normalizes with the statistics of its own 8 rows.",
            "DDP changes nothing about the forward of a layer.",
        ),
        Right(
            "The running means that rank 0 saves are of its own rows alone.",
            "In training, rank 0's buffers are broadcast before a forward (the lesson "
            "says which). What the other ranks' rows have added is overwritten.",
        ),
        Right(
            "`SyncBatchNorm` makes it the same as one process with 128 rows.",
            "Sums over all ranks give mean and variance of all 128 rows. It costs an "
            "exchange for each such layer, forward and backward.",
        ),
        Wrong(
            "The averaged gradients make it the same as one process with 128 rows.",
            "The outputs were different already: each row was normalized with other "
            "rows.",
        ),
        Wrong(
            "`convert_sync_batchnorm` is called after DDP has been made.",
            "Before: DDP must see the parameters and hooks of the final model.",
        ),
    ),
    MultipleChoice(
        "06.saving",
        "A DDP job on 8 GPUs saves a checkpoint in each epoch. What is true?",
        Right(
            "It is enough that rank 0 saves.",
            "All ranks have the same parameters, and rank 0's buffers are what the "
            "others get. Eight writers of one file spoil it.",
        ),
        Wrong(
            "All ranks must call `torch.save`, because it is a collective.",
            "It writes a file, and sends nothing. (FSDP, lesson 08, is different: "
            "there each rank has only a part of the model.)",
        ),
        Right(
            "Another rank must wait for rank 0 before it loads the file.",
            "`dist.barrier()` after the saving; or rank 0 reads the file and "
            "broadcasts it.",
        ),
        Wrong(
            'With `map_location="cpu"`, the model is on the CPU afterwards.',
            "Only the loaded tensors are. `load_state_dict` copies their values into "
            "the parameters, wherever these are.",
        ),
        Right(
            "`model.module.state_dict()` can be loaded without DDP.",
            "Its names have no `module.` in front.",
        ),
    ),
    SingleChoice(
        "06.overflow",
        "Two ranks train with DDP in float16, and each has a `GradScaler`. In this "
        "step, the batch of rank 1 overflows. That of rank 0 does not. Which ranks "
        "skip the step?",
        Wrong(
            "Both: the two scalers agree on it before the step.",
            "A scaler sends nothing: you have seen 0 messages. It looks at the "
            "gradients of its own rank.",
        ),
        Wrong(
            "Only rank 1: nothing has overflowed on rank 0.",
            "Not in its own batch. But after `backward()`, its gradients are no longer "
            "its own.",
        ),
        Right(
            "Both: after the backward, neither has finite gradients.",
            "DDP averages the scaled gradients. A mean with an infinity or a NaN is "
            "not finite, so each "
            "scaler finds them by itself.",
        ),
        Wrong(
            "Neither: the mean of both ranks' gradients is still finite.",
            "A mean of an infinity and a number is infinite.",
        ),
        measured=True,
    ),
    SingleChoice(
        "06.scaling",
        "With one plain ring through all GPUs, the simulated efficiency of DDP falls "
        "from 99 % on 16 GPUs to 12 % on 1,024, with the same tokens on each GPU and "
        "the same network. Why?",
        Wrong(
            "64 times as many gradients are added up, so each GPU sends 64 times the "
            "bytes.",
            "In a ring, each GPU sends 2 (n - 1) / n times the model: never more than "
            "twice, however many there are.",
        ),
        Right(
            "A ring of n GPUs takes 2 (n - 1) steps for each bucket, each with a "
            "latency.",
            "2,046 steps for each of 145 buckets: latencies alone take 1.2 seconds, "
            "and the backward a tenth of a second. Fewer and larger buckets help.",
        ),
        Wrong(
            "Among more GPUs some are slower, and all others wait for the slowest.",
            "That is so in real clusters, and comes on top. Here all simulated GPUs "
            "are alike.",
        ),
        Wrong(
            "More nodes are farther apart, so each message has a higher latency.",
            "A message goes to the next GPU in the ring, as it does with 16 GPUs, and "
            "takes as long. There are many more of them.",
        ),
    ),
)

# The number that is a task of the exercise.
PREDICT_BUCKET = NumberTask(
    "06.predict_bucket",
    "A model has ten linear layers without bias. Each has **6 MiB** of gradients "
    "(float32). It is wrapped by torch's DDP, with nothing but defaults: 1 MiB for the "
    "first bucket, 25 MiB for the others. Two steps have been made, so the buckets "
    "have been rebuilt. How many MiB are in the **second** bucket that is sent?",
    answer=30,
    unit="MiB",
    title="Predict a bucket",
    stars=1,
    why="The first gradient closes the first bucket. The second bucket has 24 MiB "
    "after four layers, below the cap of 25; with the fifth it is reached.",
    hint="How many layers go into the first bucket? Then add layers of 6 MiB until 25 "
    "MiB are reached.",
    slips={
        24: "24 MiB are below the cap of 25: one more gradient goes in.",
        25: "Gradients are not cut. A bucket holds whole ones.",
        6: "That is the first bucket: one gradient already reaches its cap.",
        60: "That is the one bucket of the first step. Then they are rebuilt.",
        54: "The second bucket has a cap, too.",
        5: "The question is for MiB, not for a number of layers.",
    },
    hints=(
        "The first bucket is closed at 1 MiB. How many layers are in it?",
        "A bucket takes whole gradients, and is closed as soon as it has *reached* its "
        "cap, not before it would pass it.",
        "For layers of 10 MiB it goes like this:\n"
        "  first    10 MiB            (1 MiB is reached)\n"
        "  second   10 + 10 + 10 MiB  (20 is below 25, 30 is not)",
    ),
)
