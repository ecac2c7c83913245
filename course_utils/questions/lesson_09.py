"""Lesson 09, tensor parallel: slices of layers, what is summed, what is sent."""

from course_utils.questions import (
    Number,
    NumberTask,
    Right,
    SingleChoice,
    Wrong,
    lesson,
)

QUESTIONS = lesson(
    SingleChoice(
        "09.columns",
        "Two ranks share `nn.Linear(4, 6)`, so that each computes half of the outputs. "
        "Which shape does the weight have on each rank?",
        Wrong(
            "`[4, 3]`: all inputs, half of the outputs",
            "That is how the formula has it, y = xA. PyTorch keeps A transposed.",
        ),
        Right(
            "`[3, 4]`: half of the outputs, all inputs",
            "PyTorch's weight is [outputs, inputs], so half of the outputs are half of "
            "its rows.",
        ),
        Wrong(
            "`[6, 2]`: all outputs, half of the inputs",
            "With half of the inputs, a rank could not finish any output.",
        ),
        Wrong(
            "`[3, 2]`: half of the outputs, half of the inputs",
            "Then half of the weight would be on no rank at all.",
        ),
        measured=True,
    ),
    Number(
        "09.row_part",
        "Now each rank has half of the *inputs*. x is [1, 2, 3, 4], and the first "
        "column of A is [1, 0, 2, 1]. What does rank 1 compute for the first output, "
        "with its inputs 3 and 4?",
        answer=10,
        why="3 · 2 + 4 · 1 = 10. Rank 0 has the rest: 1 · 1 + 2 · 0 = 1.",
        hint="Which of the four products can rank 1 compute?",
        slips={
            11: "That is the whole output, with the products of both ranks.",
            1: "That is rank 0's part: inputs 1 and 2.",
            7: "Those are the inputs alone. Multiply each by its weight.",
        },
        purpose="The next cell computes it on both ranks.",
        measured=True,
    ),
    Number(
        "09.pair",
        "A perceptron: the first layer is cut by columns, then GELU, and the second "
        "layer is cut by rows. How many all-reduces does a forward pass need?",
        answer=1,
        why="What a rank has after the first layer is what its rows need. Only the end "
        "is a sum over the ranks.",
        hint="Which inputs does a rank's part of the second layer need? Who has them?",
        slips={
            2: "One for each layer? Rank r's outputs are rank r's next inputs.",
            0: "Each rank has a part of every output in the end.",
            3: "Each rank applies GELU to its own numbers, and needs no others.",
        },
        purpose="The next cell counts.",
        measured=True,
    ),
    SingleChoice(
        "09.between",
        "Somebody cuts the first layer by rows and the second one by columns. What "
        "must happen to the first layer's results before GELU?",
        Wrong(
            "Nothing: each rank can apply GELU to what it has computed.",
            "GELU of two parts, added, is not GELU of their sum.",
        ),
        Wrong(
            "They are gathered: each rank has different outputs.",
            "After a cut by rows each rank has a part of *every* output.",
        ),
        Right(
            "They are added up, and then every rank has all of them.",
            "GELU needs the finished outputs. And after the second layer the outputs "
            "must be gathered: two collectives instead of one.",
        ),
        Wrong(
            "They are sent to the next rank, as in a pipeline.",
            "All ranks work on the same layer at the same time.",
        ),
    ),
    SingleChoice(
        "09.without_f",
        "A layer, then a perceptron in slices, then another layer. The backward pass "
        "makes no all-reduce. Which parameters get a wrong gradient?",
        Wrong(
            "Those of the layer after the slices: a backward pass begins there.",
            "Their gradient is found before the backward pass reaches the slices.",
        ),
        Wrong(
            "Those of the slices, because each rank computes its own.",
            "Each rank has all that its slice needs: its input, and the gradient of "
            "the sum.",
        ),
        Right(
            "Those of the layer before the slices.",
            "They learn from the gradient of x. Each rank has only its own slice's "
            "contribution to it.",
        ),
        Wrong(
            "None of them: the loss is the same on all ranks.",
            "The loss is right. But each rank goes back through its own slice only.",
        ),
        measured=True,
    ),
    SingleChoice(
        "09.fused",
        "In a trained model, one weight has the rows of all queries, then of all keys, "
        "then of all values, as in GPT-2. Three ranks each take a contiguous third of "
        "it, and each splits its third into queries, keys and values. What happens?",
        Right(
            "Rank 0 uses some queries as keys and values, without an error.",
            "Its third is all queries. If training began with this cut, that would be "
            "just another order of the rows. With weights trained on one GPU, or on "
            "another number of ranks, the results are wrong.",
        ),
        Wrong(
            "An error: the shapes of queries and keys do not fit.",
            "Each third can be split in three again. All shapes fit.",
        ),
        Wrong(
            "Nothing special: the heads come in another order.",
            "Rank 0 has no key and no value of any head.",
        ),
        Wrong(
            "An error in the backward pass: some heads have no gradient.",
            "Every row is used and gets a gradient, in the wrong role.",
        ),
        measured=True,
    ),
    Number(
        "09.all_reduces",
        "A block has an attention and a perceptron, both in slices. How many "
        "all-reduces of x's size does one block make in a training step, forward and "
        "backward?",
        answer=4,
        why="g in each forward, f in each backward: two of each.",
        hint="How many pairs of f and g are in a block? What does each do, and when?",
        slips={
            2: "That is the forward pass. What does f do in the backward pass?",
            8: "f sends in the backward pass only, and g in the forward only.",
            1: "That is one half of a block, in the forward pass.",
            6: "Not each linear layer: one pair around two of them.",
        },
        purpose="The next cells count, in models of 2 and 3 blocks.",
        measured=True,
    ),
    Number(
        "09.loss_numbers",
        "64 positions, a vocabulary of 32,000, four ranks with 8,000 scores each. How "
        "many numbers does *one rank* put into all-reduces for the loss, if the "
        "largest score is subtracted first, so that exp() stays finite?",
        answer=192,
        why="Three for each position: the largest score, the sum of exp, and the score "
        "of the target.",
        hint="Which parts of the formula need the scores of all ranks? And what keeps "
        "exp() finite?",
        slips={
            64: "One a position is not enough: there is a sum and a target.",
            128: "The largest score needs all ranks, too: or else exp may be infinite.",
            3: "That is for one position.",
            768: "That is for all four ranks together. Count those of one.",
            2_048_000: "Those are all the scores. Nobody needs all of them.",
            512_000: "Those are a rank's scores. Nobody needs all of them.",
        },
        purpose="The next cell counts.",
        measured=True,
    ),
    SingleChoice(
        "09.sequence_bytes",
        "Each all-reduce becomes a reduce-scatter and, further on, an all-gather. "
        "Between the two a rank has an n-th of the sequence. How many bytes are sent?",
        Wrong(
            "Half as many, because a rank has fewer positions.",
            "The slices still need all positions, so the rest is gathered.",
        ),
        Right(
            "As many as before.",
            "An all-reduce *is* a reduce-scatter and an all-gather, with nothing in "
            "between.",
        ),
        Wrong(
            "Twice as many: there are two collectives for one.",
            "Each of the two sends half of what an all-reduce sends.",
        ),
        Wrong(
            "An n-th, because each rank sends its own part only.",
            "It sends its n-th to n - 1 others: (n - 1)/n of x.",
        ),
        measured=True,
    ),
    Number(
        "09.sixteen",
        "8 GPUs in a node wait for all-reduces for 15 % of a layer's time. NVLink, "
        "which links them, has 450 GB/s. Now 16 GPUs on two nodes share the layer, and "
        "each node has one network card of 12.5 GB/s. For about what percentage of the "
        "time do they wait?",
        answer=92,
        tolerance=10,
        unit="%",
        why="12.5 GB/s are 36 times slower than NVLink's 450, and there is half as "
        "much to compute.",
        hint="What becomes of the time for sending, and of the time for computing?",
        slips={
            30: "You doubled 15 %. Sending takes far more than twice the time, and "
            "computing takes half.",
            26: "As if sending took as long as before. The network is slower.",
            15: "Twice the GPUs compute half as much each, and send as much.",
            7.5: "More GPUs do not send less each.",
        },
        purpose="The next cell computes it.",
        measured=True,
    ),
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
    hint="How many all-reduces does a block make, and what does each send?",
    slips={
        1120: "That is the forward pass alone, or one of a block's two halves.",
        1280: "128 all-reduces of 10 MB: but a GPU sends 2(n - 1)/n of that.",
        2560: "That would be 2 times the tensor. A ring sends 2(n - 1)/n of it.",
        70: "That is one block. There are 32.",
        17.5: "That is one all-reduce. How many are there in a step?",
        17920: "That is what all 8 GPUs send together. The question is about one.",
        560: "That is one all-reduce a block. There are four.",
    },
    hints=(
        "Two pairs of f and g in each block. Which of them send, and when?",
        "4 all-reduces a block, 32 blocks. A ring sends 2(n - 1)/n of the tensor.",
        "For 2 blocks, 4 GPUs and 1 MB it goes like this:\n"
        "  all-reduces   4 * 2            = 8\n"
        "  each sends    2 * 3 / 4 * 1    = 1.5 MB\n"
        "  answer        8 * 1.5          = 12 MB",
    ),
)
