"""Lesson 02, Model parallel: who is idle, and what to do about it."""

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
        "02.who_first",
        "AlexNet's paper has a diagram of the network. It shows two rows of layers, "
        "one above the other. What are the two rows?",
        Wrong(
            "Two copies of it: each GPU trained one, on half of the images.",
            "That would be data parallel: the data are split, and the whole model must "
            "fit on each GPU. It did not.",
        ),
        Right(
            "Two parts of it: each GPU had one, as neither could hold both.",
            "One GTX 580 had only 3 GB of memory, too little for the whole network. "
            "Each row is one GPU. This is model parallel: the model is split.",
        ),
        Wrong(
            "Two networks: both were trained, and their answers averaged.",
            "The authors also averaged several networks. But the two rows are one "
            "network, because some layers read from both.",
        ),
        Wrong(
            "Two directions: the forward pass, and below it the backward pass.",
            "Both passes go through the same layers. Each row is the part of the "
            "network on one GPU.",
        ),
    ),
    SingleChoice(
        "02.which_splits",
        "Four GPUs train one model. You look at one of them: what it holds, which "
        "samples it works on, and what the others send to it. Which of these is model "
        "parallel?",
        Wrong(
            "It holds all layers, works on some samples, and gets gradients.",
            "That is data parallel, the subject of lesson 03: the data are split, and "
            "the gradients are averaged. It does not help where the model does not fit "
            "on one GPU.",
        ),
        Wrong(
            "It holds all layers, works on all samples, and gets nothing.",
            "Then nothing is split, and all four GPUs do the same work.",
        ),
        Right(
            "It holds some layers, works on all samples, and gets activations.",
            "Each GPU holds a part of the model, and each sample visits all of them. "
            "So the model may be larger than the memory of one GPU. The activations "
            "travel, and their gradients on the way back.",
        ),
        Wrong(
            "It holds some layers, works on some samples, and gets the missing layers.",
            "That comes close to FSDP (lesson 08). There the weights travel to the "
            "data, and each GPU computes with all layers.",
        ),
    ),
    SingleChoice(
        "02.copied_model",
        "`CopiedResNet50` gets a first batch, which is on `cuda:0`. What happens?",
        Wrong(
            "No error: PyTorch moves what is on the other GPU.",
            "It never does that: a hidden copy in every step would be slow, and hard "
            "to find. You write `.to(...)`. Only a single number on the CPU may be "
            "mixed with tensors of a GPU.",
        ),
        Right(
            "An error in `fc`: its input comes from `cuda:1`.",
            "The weights of `fc` are on `cuda:0`, its input is on `cuda:1`. PyTorch "
            "does not move tensors by itself. It says which two devices it found, and "
            "in which operation.",
        ),
        Wrong(
            "An error in `seq2`: its input comes from `cuda:0`.",
            '`forward` moves that input: `.to("cuda:1")`.',
        ),
        Wrong(
            "An error before `forward`: one model has two devices.",
            "Modules may be on any devices. PyTorch notices only when an operation "
            "gets tensors from two devices.",
        ),
        measured=True,
    ),
    Number(
        "02.parameters_share",
        "ResNet-50 has four groups of blocks. The first convolution and groups 1 and 2 "
        "(7 of 16 blocks) go to `cuda:0`. What share of the 25.6 million parameters is "
        "there, in percent?",
        answer=5.65,
        tolerance=2.5,
        unit="%",
        why="1.44 of 25.6 million: 5.65 %. From group to group the images get smaller, "
        "but the number of channels doubles. A 3 × 3 convolution in group 4 has 8 × 8 "
        "times the weights of one in group 1.",
        hint="From group to group the number of channels doubles. A convolution has a "
        "weight for each pair of an input and an output channel.",
        slips={
            50: "It is nearly half of the blocks, but the late ones have many more "
            "channels. From group to group, a block has about four times the weights.",
            43.75: "7 of 16 blocks are 44 %. But the late blocks have many more "
            "weights than the early ones.",
            94.35: "That is the share of `cuda:1`. The question is about `cuda:0`.",
            0.0565: "Right as a share. In percent that is 5.65.",
        },
        purpose="Answer before you run the next cells: they measure it, and draw your "
        "number beside it.",
        measured=True,
    ),
    Number(
        "02.naive_speed",
        "The model is split over two GPUs, and a batch goes through one half after the "
        "other. A training step then takes how many times as long as on one GPU that "
        "holds the whole model?",
        answer=1.01,
        tolerance=0.12,
        unit="times",
        why="The two never compute at the same time, because the second half needs the "
        "output of the first. The work is the same, and the copies are added. So two "
        "GPUs are a little slower than one.",
        hint="When does the second GPU begin? What does the first one do meanwhile?",
        slips={
            0.5: "For half the time, both GPUs would have to compute all the time. But "
            "the second one waits for the output of the first one.",
            2: "The work does not double: it is done once, in two places. Only the "
            "copies are added.",
            1.5: "The copies cost something, but much less than half a step: a few "
            "megabytes at some GB/s.",
        },
        purpose="Answer before you run the next cells: they measure both, and draw "
        "your number beside it.",
        measured=True,
    ),
    SingleChoice(
        "02.why_not_faster",
        "Suppose that copies from GPU to GPU took no time at all. How long would a "
        "step of this split model take then, and why?",
        Wrong(
            "Half as long as on one GPU: only the copies made a GPU wait.",
            "The copies take very little of the step. Even where they cost nothing, "
            "the second half has no input until the first half is done.",
        ),
        Wrong(
            "As long as on one GPU: Python runs one thread, so one GPU gets work.",
            "Python hands out the work in microseconds, and goes on while the GPUs "
            "compute. What the second GPU waits for is its input.",
        ),
        Right(
            "As long as on one GPU: each half waits for the other's result.",
            "In the forward pass the second half waits for the first, in the backward "
            "pass the first for the second. All the work is still done piece by piece, "
            "one after the other.",
        ),
        Wrong(
            "Longer than on one GPU: two GPUs must check each other's results.",
            "They check nothing. Each layer is computed once, on the GPU that holds "
            "it.",
        ),
    ),
    Number(
        "02.bubble_four",
        "A pipeline of 4 GPUs works on a batch in 8 micro-batches. All stages take "
        "equally long, and copies cost nothing. For what share of the whole time is "
        "each GPU idle, in percent?",
        answer=27.27,
        tolerance=0.5,
        unit="%",
        why="Take the time of one micro-batch in one stage as the unit. Each GPU works "
        "for 8 units and waits for 3. The whole time is 11, and 3 / 11 = 27 %.",
        hint="Draw four rows. Each GPU begins one unit after the one before. How long "
        "is the whole picture, and how long is each row's work?",
        slips={
            0.2727: "Right as a share. In percent that is 27.",
            72.7: "That is 8 / 11, the share of the time for which a GPU works.",
            37.5: "That is 3 / 8, the idle time as a share of the working time. The "
            "question asks for a share of the whole time.",
            75: "That is 3 / 4, the share with a single micro-batch.",
            33.3: "That is 4 / 12. A GPU waits for 3 units, because it does not wait "
            "for itself.",
            50: "That is 4 / 8. A GPU waits for 3 units, and the whole time is 11.",
        },
        measured=True,
    ),
    Number(
        "02.two_bubbles",
        "The Megatron paper would say of a pipeline that its bubble is 50 %. What "
        "would the GPipe paper say of the same pipeline, in percent?",
        answer=33.3,
        tolerance=0.5,
        unit="%",
        why="The bubble is 50 % of the *ideal* time: for 2 hours of work there is 1 "
        "hour of waiting. That is a third of the *whole* time. Before you compare two "
        "papers, ask what their 100 % is.",
        hint="One divides the idle time by the time of the work, the other by the time "
        "of both. Take 2 hours of work: how long is the idle time?",
        slips={
            50: "They divide the same idle time by different times.",
            66.7: "That is the share for which a GPU works.",
            100: "The whole time is longer than the ideal one: the share falls.",
            25: "The whole time is not twice the ideal one, but 1.5 times.",
            0.333: "Right as a share. In percent that is 33.3.",
        },
    ),
    MultipleChoice(
        "02.more_micro_batches",
        "A pipeline has neither BatchNorm nor dropout. You cut the same batch into "
        "twice as many micro-batches. What is then true?",
        Wrong(
            "The bubble gets larger, because there are more ticks.",
            "It gets smaller. The idle time is one micro-batch for each of the other "
            "stages, and the micro-batches are shorter now.",
        ),
        Right(
            "The GPUs start more operations, on smaller tensors.",
            "Starting an operation takes some microseconds, whatever its size, and "
            "small ones do not fill a GPU.",
        ),
        Wrong(
            "The gradients differ from those of the whole batch.",
            "Added up in the right proportion, they are the same. (BatchNorm would be "
            "the exception: it looks at one micro-batch at a time.)",
        ),
        Right(
            "There are more copies, and each of them takes the latency.",
            "The bytes stay the same, but they travel in more pieces.",
        ),
        Wrong(
            "The activations of the batch need twice the memory.",
            "The activations of the whole batch are kept in any case, in more or fewer "
            "pieces.",
        ),
    ),
    SingleChoice(
        "02.batchnorm",
        "In training mode, BatchNorm takes the mean and the variance of the samples "
        "that it gets: here, of one micro-batch. With which change does the model give "
        "the same outputs for the micro-batches and for the whole batch?",
        Right(
            "Use GroupNorm, which looks at each image by itself.",
            "Then no image depends on the others, so it does not matter how the batch "
            "is cut. Transformers use LayerNorm, which also looks at each sample by "
            "itself.",
        ),
        Wrong(
            "Shuffle the images, so that the micro-batches are alike.",
            "They are alike on average. Each micro-batch still has a mean and a "
            "variance of its own.",
        ),
        Wrong(
            "Take one image for each micro-batch, so that none are mixed.",
            "The mean is then that of one image. In the whole batch it is still that "
            "of all images.",
        ),
        Wrong(
            "Divide the outputs by the number of micro-batches.",
            "BatchNorm divides by the standard deviation of what it gets. That does "
            "not grow with the number of samples.",
        ),
    ),
    SingleChoice(
        "02.where_to_cut",
        "Many micro-batches go through a pipeline. All cuts fit into the memory, and "
        "copies take a small part of a step. Which cut is the fastest?",
        Wrong(
            "The one with the same number of layers in each stage.",
            "Layers differ. In this model, a block of the last group takes about four "
            "times as long as an earlier one. So 9 + 9 is not the fastest.",
        ),
        Wrong(
            "The one with the same number of parameters in each stage.",
            "Parameters are memory, not time. A convolution uses each weight once for "
            "each pixel: early layers have few weights and much work. 15 + 3 is "
            "closest to equal parameters, and the slowest.",
        ),
        Right(
            "The one whose slowest stage takes the shortest time.",
            "All stages work at the pace of the slowest one: the others finish "
            "earlier, and wait.",
        ),
        Wrong(
            "The one that sends the fewest bytes between stages.",
            "That helps where links are slow. Here copies take a small part of a step, "
            "and an uneven cut costs time in every micro-batch.",
        ),
    ),
)

# The number that is a task of the exercise.
PREDICT_MICRO_BATCHES = NumberTask(
    "02.predict_micro_batches",
    "Four GPUs form a pipeline. All stages take equally long, and copies cost nothing. "
    "Each GPU is to be idle for no more than 10 % of the whole time. How many "
    "micro-batches does that take, at least?",
    answer=27,
    title="Predict the micro-batches",
    stars=1,
    why="Each GPU waits for 3 parts and works for M. The 3 may be a tenth of the "
    "whole, so the M are the other nine tenths.",
    hint="Each GPU waits for 3 parts, one for each of the other stages, and works for "
    "M parts. What share of M + 3 are the 3?",
    slips={
        30: "That keeps the waiting to 10 % of the time for which a GPU works. The "
        "question asks for a tenth of the whole time, which includes the waiting.",
        26: "They are still idle for 3 of 29 parts: a bit more than 10 %.",
        36: "You counted 4 idle parts. The last GPU waits while the three before it "
        "work on the first micro-batch: 3 parts.",
        9: "With 9 there are 3 idle parts of 12: a quarter.",
    },
    hints=(
        "Count in parts: what one GPU needs for one micro-batch. How many parts does "
        "the last GPU wait at the beginning?",
        "Each GPU waits for 3 parts and works for M parts. Which share of the whole "
        "time may the 3 parts be?",
        "If 2 GPUs may each be idle for a quarter of the time, it goes like this:\n"
        "  1 / (M + 1) <= 1/4    so M + 1 >= 4, and M = 3",
    ),
)
