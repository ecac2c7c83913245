"""Lesson 09, tensor parallel: slices of layers, what is summed, what is sent."""

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
    "09",
    SingleChoice(
        "09.columns",
        "Two ranks share `nn.Linear(4, 6)`, so that each computes half of the outputs. "
        "Which shape does the weight have on each rank?",
        [
            Choice(
                "`[4, 3]`: all inputs, half of the outputs",
                why="That is how the formula has it, y = xA. PyTorch keeps A "
                "transposed.",
            ),
            Choice(
                "`[3, 4]`: half of the outputs, all inputs",
                right=True,
                why="PyTorch's weight is [outputs, inputs], so half of the outputs are "
                "half of its rows.",
            ),
            Choice(
                "`[6, 2]`: all outputs, half of the inputs",
                why="With half of the inputs, a rank could finish no output.",
            ),
            Choice(
                "`[3, 2]`: half of the outputs, half of the inputs",
                why="Then half of the weight would be on no rank at all.",
            ),
        ],
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
        slips=[
            Slip(11, "That is the whole output, with the products of both ranks."),
            Slip(1, "That is rank 0's part: inputs 1 and 2."),
            Slip(7, "Those are the inputs alone. Multiply each by its weight."),
        ],
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
        slips=[
            Slip(2, "One for each layer? Rank r's outputs are rank r's next inputs."),
            Slip(0, "Each rank has a part of every output in the end."),
            Slip(3, "Each rank applies GELU to its own numbers, and needs no others."),
        ],
        purpose="The next cell counts.",
        measured=True,
    ),
    SingleChoice(
        "09.between",
        "Somebody cuts the first layer by rows and the second one by columns. What "
        "must happen to the first layer's results before GELU?",
        [
            Choice(
                "Nothing: each rank can apply GELU to what it has computed.",
                why="GELU of two parts, added, is not GELU of their sum.",
            ),
            Choice(
                "They are gathered: each rank has other outputs.",
                why="After a cut by rows each rank has a part of *every* output.",
            ),
            Choice(
                "They are added up, and then every rank has all of them.",
                right=True,
                why="GELU needs the finished outputs. And after the second layer the "
                "outputs must be gathered: two collectives instead of one.",
            ),
            Choice(
                "They are sent to the next rank, as in a pipeline.",
                why="All ranks work on the same layer at the same time.",
            ),
        ],
    ),
    SingleChoice(
        "09.without_f",
        "A layer, then a perceptron in slices, then another layer. The backward pass "
        "makes no all-reduce. Which parameters get a wrong gradient?",
        [
            Choice(
                "Those of the layer after the slices: a backward pass begins there.",
                why="Their gradient is found before the backward pass reaches the "
                "slices.",
            ),
            Choice(
                "Those of the slices, because each rank computes its own.",
                why="Each rank has all that its slice needs: its input, and the "
                "gradient of the sum.",
            ),
            Choice(
                "Those of the layer before the slices.",
                right=True,
                why="They learn from the gradient of x. Each rank knows what its own "
                "slice answers, and that is a part.",
            ),
            Choice(
                "None of them: the loss is the same on all ranks.",
                why="The loss is right. But each rank goes back through its own slice "
                "only.",
            ),
        ],
        measured=True,
    ),
    MultipleChoice(
        "09.heads",
        "GPT-2 small has 12 heads of 64 numbers each. Over how many GPUs can its "
        "attention be cut by heads, equally?",
        [
            Choice("3", right=True, why="Four heads on each."),
            Choice("5", why="12 heads cannot be shared equally by 5."),
            Choice("6", right=True, why="Two heads on each."),
            Choice("8", why="The width, 768, is a multiple of 8; 12 heads are not."),
            Choice("12", right=True, why="One head on each."),
            Choice("24", why="A head would have to be cut in two."),
        ],
    ),
    SingleChoice(
        "09.fused",
        "One weight has the rows of all queries, then of all keys, then of all values, "
        "as in GPT-2. Three ranks each take a contiguous third of it, and each "
        "splits its third into queries, keys and values. What happens?",
        [
            Choice(
                "Rank 0 takes some queries for keys and values, without an error.",
                right=True,
                why="Its third is all queries. The model trains, as another model.",
            ),
            Choice(
                "An error: the shapes of queries and keys do not fit.",
                why="Each third can be split in three again. All shapes fit.",
            ),
            Choice(
                "Nothing special: the heads come in another order.",
                why="Rank 0 has no key and no value of any head.",
            ),
            Choice(
                "An error in the backward pass: some heads have no gradient.",
                why="Every row is used and gets a gradient, in the wrong role.",
            ),
        ],
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
        slips=[
            Slip(2, "That is the forward pass. What does f do in the backward pass?"),
            Slip(8, "f sends in the backward pass only, and g in the forward only."),
            Slip(1, "That is one half of a block, in the forward pass."),
            Slip(6, "Not each linear layer: one pair around two of them."),
        ],
        purpose="The next cells count, in models of 2 and 3 blocks.",
        measured=True,
    ),
    Number(
        "09.loss_numbers",
        "64 positions, a vocabulary of 32,000, four ranks with 8,000 scores each. For "
        "the loss, each rank can tell the others a few numbers about its scores. How "
        "many numbers have to be all-reduced in all?",
        answer=192,
        why="Three for each position: the largest score, the sum of exp, and the score "
        "of the target.",
        hint="The loss of a position is log(sum of exp(scores)) - score of the target. "
        "Exp needs the largest score, so that it stays finite.",
        slips=[
            Slip(64, "One a position is not enough: there is a sum and a target."),
            Slip(128, "And the largest score, without which exp may be infinite."),
            Slip(3, "That is for one position."),
            Slip(2_048_000, "Those are all the scores. Nobody needs all of them."),
            Slip(512_000, "Those are a rank's scores. Nobody needs all of them."),
        ],
        purpose="The next cell counts.",
        measured=True,
    ),
    SingleChoice(
        "09.sequence_bytes",
        "Each all-reduce becomes a reduce-scatter and, further on, an all-gather. "
        "Between the two a rank has an n-th of the sequence. How many bytes are sent?",
        [
            Choice(
                "Half as many, because a rank has fewer positions.",
                why="The slices still need all positions, so the rest is gathered.",
            ),
            Choice(
                "As many as before.",
                right=True,
                why="An all-reduce *is* a reduce-scatter and an all-gather, with "
                "nothing in between.",
            ),
            Choice(
                "Twice as many: there are two collectives for one.",
                why="Each of the two sends half of what an all-reduce sends.",
            ),
            Choice(
                "An n-th, because each rank sends its own part only.",
                why="Its part goes to all others, which is (n - 1)/n of x for each.",
            ),
        ],
        measured=True,
    ),
    Number(
        "09.sixteen",
        "8 GPUs in a node, linked by NVLink, wait for all-reduces in 15 % of a layer's "
        "time. Now 16 GPUs on two nodes share the layer. Between nodes each GPU's "
        "message shares a network of 12.5 GB/s. About which share of the time, in "
        "percent, do they wait?",
        answer=92,
        tolerance=10,
        unit="%",
        why="12.5 GB/s are 36 times slower than NVLink's 450, and there is half as "
        "much to compute.",
        hint="NVLink has 450 GB/s. What becomes of the time for sending, and of the "
        "time for computing?",
        slips=[
            Slip(30, "That would be the same links, and half of the computing."),
            Slip(26, "As if sending took as long as before. The network is slower."),
            Slip(15, "Twice the GPUs compute half as much each, and send as much."),
            Slip(7.5, "More GPUs do not send less each."),
        ],
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
    slips=[
        Slip(1120, "That is the forward pass alone, or one of a block's two halves."),
        Slip(1280, "128 all-reduces of 10 MB: but a GPU sends 2(n - 1)/n of that."),
        Slip(2560, "That would be 2 times the tensor. A ring sends 2(n - 1)/n of it."),
        Slip(70, "That is one block. There are 32."),
        Slip(17.5, "That is one all-reduce. How many are there in a step?"),
        Slip(560, "That is one all-reduce a block. There are four."),
    ],
    hints=(
        "Two pairs of f and g in each block. Which of them send, and when?",
        "4 all-reduces a block, 32 blocks. A ring sends 2(n - 1)/n of the tensor.",
        "For 2 blocks, 4 GPUs and 1 MB it goes like this:\n"
        "  all-reduces   4 * 2            = 8\n"
        "  each sends    2 * 3 / 4 * 1    = 1.5 MB\n"
        "  answer        8 * 1.5          = 12 MB",
    ),
)
