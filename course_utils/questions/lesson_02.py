"""Lesson 02, Model parallel: who is idle, and what to do about it."""

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
    "02",
    SingleChoice(
        "02.who_first",
        "In 2012 a network that had been split over two GPUs won the ImageNet contest "
        "by far. Its diagram shows two rows of layers, one above the other. Why two?",
        [
            Choice(
                "Each GPU trained its own copy on half of the images.",
                why="That would be data parallel: the data are split, and the whole "
                "model must fit on each GPU. It did not.",
            ),
            Choice(
                "The network did not fit into the memory of one GPU.",
                right=True,
                why="That is AlexNet. Its paper says so: one GTX 580 has only 3 GB of "
                "memory, which limits the size of the networks that can be trained on "
                "it. Each row is one GPU. This is model parallel: the model is split.",
            ),
            Choice(
                "Two networks were trained, and their answers averaged.",
                why="The authors averaged several networks as well, but the two rows "
                "are one network: some layers read from both.",
            ),
            Choice(
                "One row is the forward pass, the other the backward pass.",
                why="Both passes go through the same layers. Each row is the part of "
                "the network on one GPU.",
            ),
        ],
    ),
    SingleChoice(
        "02.which_splits",
        "Model parallel or data parallel: which statement is right?",
        [
            Choice(
                "With model parallel each GPU holds all layers, and sees some of the "
                "samples.",
                why="That is data parallel, the subject of lesson 03. It does not help "
                "where the model does not fit on one GPU.",
            ),
            Choice(
                "With data parallel each GPU holds some layers, and fetches others.",
                why="With data parallel every GPU has all layers. What travels between "
                "the GPUs are gradients (and with `DataParallel` weights).",
            ),
            Choice(
                "With model parallel each GPU holds a part of the model. A sample "
                "needs all GPUs.",
                right=True,
                why="So the model may be larger than the memory of one GPU. Between "
                "the GPUs the activations travel, and their gradients on the way back.",
            ),
            Choice(
                "With model parallel nothing travels: a GPU has all that it needs.",
                why="Where the next layer is on another GPU, the activations must be "
                "copied there.",
            ),
        ],
    ),
    SingleChoice(
        "02.fc_error",
        "In `CopiedResNet50`, `layer3`, `layer4` and `avgpool` are on `cuda:1`, and "
        "the last layer, `fc`, is on `cuda:0`. What will happen?",
        [
            Choice(
                "An error, when the model is made.",
                why="Modules may be on any devices. Only when an operation gets "
                "tensors from two devices does PyTorch notice.",
            ),
            Choice(
                "An error, when the first batch comes to `fc`.",
                right=True,
                why="The weights of `fc` are on `cuda:0`, its input is on `cuda:1`. "
                "PyTorch does not move tensors by itself. It says which two devices "
                "it found, and in which operation.",
            ),
            Choice(
                "PyTorch copies the activations to `cuda:0` by itself.",
                why="It never does that for whole tensors: a hidden copy in every step "
                "would be slow, and nobody would know why. You write `.to(...)`.",
            ),
            Choice(
                "It works, but the results are wrong.",
                why="An operation on tensors from two devices is refused. Better an "
                "error than a wrong number.",
            ),
        ],
        measured=True,
    ),
    Number(
        "02.parameters_share",
        "ResNet-50 has four groups of blocks. The first convolution and groups 1 and 2 "
        "(7 of 16 blocks) go to `cuda:0`. Which share of the 25.6 million parameters "
        "is there, in percent?",
        answer=5.65,
        tolerance=2.5,
        unit="%",
        why="1.4 of 25.6 million: 5.7 %. The images get smaller from group to group, "
        "and the channels more. A 3 × 3 convolution in group 4 has 8 × 8 times the "
        "weights of one in group 1.",
        hint="From group to group the number of channels doubles. A convolution has a "
        "weight for each pair of an input and an output channel.",
        slips=[
            Slip(
                50,
                "Nearly half of the blocks, but the late ones have many more "
                "channels. From group to group, the weights of a block are about four "
                "times as many.",
            ),
            Slip(
                43.75,
                "7 of 16 blocks are 44 %. But the late blocks have many more weights "
                "than the early ones.",
            ),
            Slip(
                94.35,
                "That is the share of `cuda:1`. The question is about `cuda:0`.",
            ),
            Slip(0.0565, "Right as a share. In percent that is 5.65."),
        ],
        purpose="Answer before you run the next cells: they measure it, and draw your "
        "number beside it.",
        measured=True,
    ),
    Number(
        "02.naive_speed",
        "The model is split over two GPUs, and a batch goes through one half after the "
        "other. How many times as long does a training step take as on one GPU that "
        "holds the whole model?",
        answer=1.01,
        tolerance=0.12,
        unit="times",
        why="The two never compute at the same time: the second half needs the output "
        "of the first. The work is the same, and the copies come on top. So two GPUs "
        "are a little slower than one.",
        hint="When does the second GPU begin? What does the first one do meanwhile?",
        slips=[
            Slip(
                0.5,
                "Half the time would need both GPUs to compute all the time. But the "
                "second one waits for what the first one makes.",
            ),
            Slip(
                2,
                "The work does not double: it is done once, in two places. Only the "
                "copies are added.",
            ),
            Slip(
                1.5,
                "The copies cost something, but much less than half a step: a few "
                "megabytes at some GB/s.",
            ),
        ],
        purpose="Answer before you run the next cells: they measure both, and draw "
        "your number beside it.",
        measured=True,
    ),
    SingleChoice(
        "02.why_not_faster",
        "Why does splitting a model over two GPUs, without micro-batches, not make it "
        "faster?",
        [
            Choice(
                "The copies between the GPUs take half of the time.",
                why="They take a small part of it, as the timeline shows. Even with "
                "copies that cost nothing it would not be faster than one GPU.",
            ),
            Choice(
                "Python runs one thread at a time, so only one GPU gets work.",
                why="Python hands out the work in microseconds and goes on while the "
                "GPUs compute. What keeps the second GPU waiting is data that do not "
                "exist yet.",
            ),
            Choice(
                "Each half needs the other's result, so one GPU always waits.",
                right=True,
                why="In the forward pass the second half waits for the first, in the "
                "backward pass the first for the second. Each GPU is idle for about "
                "half of the time, and the copies come on top.",
            ),
            Choice(
                "Two GPUs must compute everything twice, to compare.",
                why="Each layer is computed once, on the GPU that holds it.",
            ),
        ],
    ),
    Number(
        "02.bubble_four",
        "A pipeline of 4 GPUs works on a batch in 8 micro-batches. All stages take "
        "equally long, copies cost nothing. For which share of the whole time is each "
        "GPU idle, in percent?",
        answer=27.27,
        tolerance=0.5,
        unit="%",
        why="In units of one micro-batch in one stage: each GPU works 8 units and "
        "waits 3. The whole time is 11, and 3 / 11 = 27 %.",
        hint="Draw four rows. Each GPU begins one unit after the one before. How long "
        "is the whole picture, and how long is each row's work?",
        slips=[
            Slip(0.2727, "Right as a share. In percent that is 27."),
            Slip(
                72.7,
                "That is 8 / 11, the share of the time in which a GPU works.",
            ),
            Slip(
                37.5,
                "That is 3 / 8: the idle time as a share of the working time, as in "
                "the Megatron paper. The question asks for a share of the whole time.",
            ),
            Slip(
                75,
                "That is 3 / 4, the share with a single micro-batch.",
            ),
            Slip(
                33.3,
                "4 / 12? A GPU waits for 3 units, not 4: it does not wait for itself.",
            ),
            Slip(
                50,
                "That is 4 / 8. A GPU waits for 3 units, and the whole time is 11.",
            ),
        ],
        measured=True,
    ),
    Number(
        "02.two_bubbles",
        "The Megatron paper would say of a pipeline that its bubble is 50 %. What "
        "would the GPipe paper say of the same pipeline, in percent?",
        answer=33.3,
        tolerance=0.5,
        unit="%",
        why="50 % of the *ideal* time: for each 2 hours of work there is 1 of waiting, "
        "and that is a third of the *whole* time. Before you compare two papers, ask "
        "what 100 % is.",
        hint="One divides the idle time by the time of the work, the other by the time "
        "of both. Take 2 hours of work: how long is the idle time?",
        slips=[
            Slip(50, "They divide the same idle time by different times."),
            Slip(66.7, "That is the share in which a GPU works."),
            Slip(100, "The whole time is longer than the ideal one: the share falls."),
            Slip(25, "The whole time is not twice the ideal one, but 1.5 times."),
            Slip(0.333, "Right as a share. In percent that is 33.3."),
        ],
    ),
    MultipleChoice(
        "02.more_micro_batches",
        "You double the number of micro-batches of a pipeline without BatchNorm, with "
        "the same batch. What gets worse?",
        [
            Choice(
                "The bubble gets larger.",
                why="It gets smaller: the idle time at both ends is one micro-batch "
                "for each of the other stages, and these are shorter now.",
            ),
            Choice(
                "The GPUs start more operations, on smaller tensors.",
                right=True,
                why="Starting an operation costs some microseconds whatever its size, "
                "and small ones do not fill a GPU. This is why there is a best number.",
            ),
            Choice(
                "The gradients differ from those of the whole batch.",
                why="Added up in the right proportion they are the same. (BatchNorm "
                "would be the exception: it looks at its own micro-batch alone.)",
            ),
            Choice(
                "There are more messages, and each pays the latency.",
                right=True,
                why="The bytes stay the same, but they travel in twice as many pieces.",
            ),
            Choice(
                "The activations of GPipe need twice the memory.",
                why="Here the activations of the whole batch are kept in any case, in "
                "more or fewer pieces. (The GPipe of the paper keeps only those that "
                "go from stage to stage. It computes the others again.)",
            ),
        ],
    ),
    SingleChoice(
        "02.batchnorm",
        "A ResNet-50 in training mode gives other outputs in micro-batches than with "
        "the whole batch. A transformer without dropout gives the same. Why?",
        [
            Choice(
                "The copies between the GPUs round the numbers.",
                why="A copy copies bits. Nothing is rounded.",
            ),
            Choice(
                "The samples come back in another order than they went in.",
                why="Micro-batches go through in order, and their outputs are put "
                "together in the same order.",
            ),
            Choice(
                "Convolutions compute something else when the batch is smaller.",
                why="Each image is convolved by itself. At most the last digit "
                "differs.",
            ),
            Choice(
                "BatchNorm normalizes each micro-batch by its own mean and variance.",
                right=True,
                why="It is the one layer of a ResNet that mixes the samples of a "
                "batch. Transformers use LayerNorm, which looks at each sample by "
                "itself.",
            ),
        ],
    ),
    SingleChoice(
        "02.where_to_cut",
        "You may cut a model where you like. Which cut makes a pipeline with many "
        "micro-batches fastest, if all cuts fit into the memory?",
        [
            Choice(
                "The one with the same number of layers in each stage.",
                why="Layers differ. In a ResNet most blocks take about equally "
                "long, some take longer, and the last layer hardly any time.",
            ),
            Choice(
                "The one with the same number of parameters in each stage.",
                why="Parameters are memory, not time. A convolution uses each weight "
                "once for each pixel: early layers have few weights and much work.",
            ),
            Choice(
                "The one whose slowest stage is fastest.",
                right=True,
                why="All stages work in the rhythm of the slowest one: the others "
                "finish earlier, and wait.",
            ),
            Choice(
                "The one that sends the fewest bytes.",
                why="It helps where links are slow. But a copy takes a small part of a "
                "step here, and an uneven cut costs in every micro-batch.",
            ),
        ],
    ),
)

# The number that is a task of the exercise.
PREDICT_MICRO_BATCHES = NumberTask(
    "02.predict_micro_batches",
    "Four GPUs form a pipeline. All stages take equally long, and copies cost nothing. "
    "With how many micro-batches, at least, is each GPU idle for no more than 10 % of "
    "the whole time?",
    answer=27,
    title="Predict the micro-batches",
    stars=1,
    why="Each GPU waits for 3 parts and works for M. The 3 may be a tenth of the "
    "whole, so M is the other nine tenths.",
    hint="Each GPU waits for 3 parts (one for each of the other stages) and works for "
    "M parts. What share of M + 3 are the 3?",
    slips=[
        Slip(
            30,
            "That keeps the waiting to 10 % of the time in which a GPU works. Asked "
            "for is a tenth of the whole time, to which the waiting belongs.",
        ),
        Slip(26, "They are still idle for 3 of 29 parts: a bit more than 10 %."),
        Slip(
            36,
            "You counted 4 idle parts. The last GPU waits while the three before it "
            "work on the first micro-batch: 3 parts.",
        ),
        Slip(9, "With 9 there are 3 idle parts of 12: a quarter."),
    ],
    hints=(
        "Count in parts: what one GPU needs for one micro-batch. How many parts does "
        "the last GPU wait at the beginning?",
        "Each GPU waits for 3 parts and works for M parts. The 3 may be a tenth of "
        "the whole, so the M are the other nine tenths.",
        "For 2 GPUs and a quarter it goes like this:\n"
        "  1 / (M + 1) <= 1/4    so M + 1 >= 4, and M = 3",
    ),
)
