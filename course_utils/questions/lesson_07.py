"""Lesson 07, ring all-reduce: chunks, bytes, steps, and who wins when."""

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
    "07",
    Number(
        "07.root_bytes",
        "Four ranks all-reduce a tensor of 1,200 bytes through rank 0. How many bytes "
        "does rank 0 send?",
        answer=3600,
        unit="bytes",
        why="The whole sum, to each of the three others. It has received as much "
        "before.",
        hint="Who gets what from rank 0, when it has added up?",
        slips=[
            Slip(1200, "That is what each of the others sends. Rank 0 answers three."),
            Slip(4800, "Rank 0 sends nothing to itself."),
            Slip(7200, "That is what it sends and receives together."),
            Slip(300, "Each of the others gets the whole sum, not a part of it."),
        ],
        purpose="The next cell counts.",
        measured=True,
    ),
    Number(
        "07.which_chunk",
        "Six ranks, six chunks. In step 0 each rank r sends chunk r to the next rank. "
        "In each later step it sends the chunk that it received in the step before, "
        "with its own added. Which chunk does rank 1 send in step 2?",
        answer=5,
        is_name=True,
        why="(r - k) mod n = (1 - 2) mod 6 = 5. Chunk 5 began on rank 5, and has moved "
        "on to ranks 0 and 1.",
        hint="Which chunk is on its way to rank 1 in step 1? Follow it back to where "
        "it began: one rank for each step.",
        slips=[
            Slip(-1, "1 - 2 is right, but the chunks are 0 to 5: count in a circle."),
            Slip(3, "The chunk moves forwards, so its number falls: r - k, not r + k."),
            Slip(2, "That is the step. Which chunk has come to rank 1 by then?"),
            Slip(1, "Chunk 1 leaves rank 1 in step 0."),
            Slip(0, "Chunk 0 is what rank 1 sends in step 1."),
            Slip(4, "Chunk 4 is what rank 1 sends in step 3."),
        ],
        purpose="The next cell records it.",
        measured=True,
    ),
    Number(
        "07.ring_bytes",
        "Four ranks all-reduce a tensor of 1,200 bytes in a ring. How many bytes does "
        "each rank send in all?",
        answer=1800,
        unit="bytes",
        why="Six chunks of 300 bytes: three in the reduce-scatter, and three in the "
        "all-gather. 2(n - 1)/n · S = 2 · 3 / 4 · 1,200.",
        hint="How large is a chunk, how many steps are there, and how many chunks does "
        "a rank send in each?",
        slips=[
            Slip(900, "That is the reduce-scatter. The all-gather sends as much."),
            Slip(2400, "There are n - 1 = 3 steps in each half, not 4."),
            Slip(3600, "In each step it sends one chunk, not the whole tensor."),
            Slip(1200, "Six steps, and in each of them a quarter of the tensor."),
            Slip(7200, "That is all four ranks together. How much is it for each?"),
            Slip(300, "That is one chunk. In how many steps does it send one?"),
        ],
        purpose="The next cell counts, for 2 to 5 ranks.",
        measured=True,
    ),
    MultipleChoice(
        "07.lower_bound",
        "The lower bound is 2(n - 1)/n · S bytes from each rank on average. Which of "
        "these are true?",
        [
            Choice(
                "With 1,000 ranks, a ring sends hardly more from each rank than with "
                "10.",
                right=True,
                why="1.998·S and 1.8·S. The number of bytes is not what stops rings "
                "from growing: the number of steps is.",
            ),
            Choice(
                "No algorithm can be faster than a ring.",
                why="The bound is about bytes, not about steps. For small tensors time "
                "is latency, and a tree has fewer steps.",
            ),
            Choice(
                "An all-reduce through rank 0 sends more bytes in all than a ring.",
                why="Both send 2(n - 1)·S in all, the least that is possible. But "
                "through rank 0, all of it goes over one link.",
            ),
            Choice(
                "It does not hold if a switch can add.",
                right=True,
                why="Then not every addition is made by a rank, and the sum can be "
                "sent to all at once.",
            ),
            Choice(
                "A gradient in bfloat16 is exchanged with half of the bytes of "
                "float32.",
                right=True,
                why="The bound counts numbers. S is how many bytes they have.",
            ),
        ],
    ),
    Number(
        "07.tutorial_ring",
        "Four ranks, a tensor of 1,200 bytes. How many bytes does each rank send in "
        "the function `allreduce` of the cell above?",
        answer=3600,
        unit="bytes",
        why="Three steps, and in each of them a whole tensor: (n - 1)·S.",
        hint="How often does the loop run, and what does each `isend` send?",
        slips=[
            Slip(1800, "That is a ring with chunks. Is anything cut here?"),
            Slip(4800, "range(size - 1) has three steps, not four."),
            Slip(1200, "It sends a whole tensor in each step of the loop."),
            Slip(
                7200, "There is no second half here: each rank adds up all by itself."
            ),
            Slip(900, "The buffers are clones of the whole tensor."),
        ],
        purpose="The next cell counts.",
        measured=True,
    ),
    Number(
        "07.chunk_sizes",
        "How many pieces does `torch.arange(5).chunk(4)` make?",
        answer=3,
        unit="pieces",
        why="Each piece has ceil(5 / 4) = 2 numbers, and the last one what is left: "
        "2 + 2 + 1.",
        hint="Each piece has ceil(5 / 4) numbers, until none is left.",
        slips=[
            Slip(4, "So one would think. But each piece has ceil(5 / 4) numbers."),
            Slip(5, "There are five numbers. How many in each piece?"),
            Slip(2, "Each piece has two numbers. How many pieces is that?"),
        ],
        purpose="The next cell shows them.",
        measured=True,
    ),
    Number(
        "07.tree_steps",
        "A tree of 8 ranks: sums go up to rank 0, then the total comes down. "
        "In how many steps, if in each a rank can send one message and receive one?",
        answer=6,
        unit="steps",
        why="Up: 8 ranks become 4, 2, 1, so three steps. Down: three again.",
        hint="In each step up, half of the ranks that are left hand in their sum.",
        slips=[
            Slip(3, "That is the way up. The total must come down again."),
            Slip(14, "That is a ring: 2(n - 1)."),
            Slip(7, "That is how many messages go up. Many of them go together."),
            Slip(8, "In each step up, the ranks with a sum to hand in are halved."),
            Slip(4, "log2 of 8 is 3, and there are two ways."),
        ],
        purpose="The next cell counts the steps of all four algorithms.",
        measured=True,
    ),
    SingleChoice(
        "07.ping_pong",
        "α and B are measured by ping-pong: two ranks send to each other, the others "
        "wait. On a machine with 2 cores, how long will a ring of 4 ranks really take, "
        "compared with what the formula makes of these numbers?",
        [
            Choice(
                "As long as predicted: a message is a message.",
                why="Its cost depends on what else the machine does. During a "
                "ping-pong it does nothing else.",
            ),
            Choice(
                "Less: in a ring the ranks share the work.",
                why="They share the adding. Each sends and receives as in the "
                "ping-pong, but now all of them at once.",
            ),
            Choice(
                "Much longer: in a ring all four send at once, and share the cores.",
                right=True,
                why="The ping-pong had a core for each of its two ranks. A ring shift, "
                "where everybody sends at once, measures what a ring needs.",
            ),
            Choice(
                "As long as predicted, plus a little for adding up the numbers.",
                why="The formula does leave that out. But it is not what counts here: "
                "the ranks share cores and memory.",
            ),
        ],
        measured=True,
    ),
    MultipleChoice(
        "07.tree_wins",
        "By this formula: which all-reduce is faster with a tree than with a ring? α·B "
        "is 0.48 MB for the InfiniBand here, and 1.53 MB for the NVLink.",
        [
            Choice(
                "The loss, 4 bytes, on 1,024 GPUs.",
                right=True,
                why="Only latencies count: 20 steps of a tree against 2,046 of a ring.",
            ),
            Choice(
                "A bucket of 26 MB on 1,024 GPUs, linked by InfiniBand.",
                right=True,
                why="It is below the limit of 54 MB. A ring's steps grow with n, a "
                "tree's with log n.",
            ),
            Choice(
                "A gradient of 1 GB on 1,024 GPUs, linked by InfiniBand.",
                why="It is above the limit: a tree sends the whole tensor in each "
                "step.",
            ),
            Choice(
                "A bucket of 26 MB on 8 GPUs, linked by NVLink.",
                why="It is above the limit of 2.9 MB. With few ranks a tree saves few "
                "latencies.",
            ),
            Choice(
                "The loss, 4 bytes, on 3 GPUs.",
                why="With two or three ranks a ring has as few steps as a tree, and "
                "smaller messages: the tree never wins.",
            ),
        ],
    ),
    Number(
        "07.ten_thousand",
        "A flat ring of 10,000 GPUs all-reduces a tensor of a few bytes. In each step "
        "a message takes 4 µs. How long does it take in all, in milliseconds?",
        answer=79.992,
        tolerance=1,
        unit="ms",
        why="2(n - 1) = 19,998 steps, one after the other: 79.99 ms.",
        hint="2(n - 1) steps, as with four ranks, and each has to wait for the one "
        "before.",
        slips=[
            Slip(40, "That is one half."),
            Slip(0.08, "Those are seconds."),
            Slip(79_992, "Those are microseconds."),
            Slip(0.112, "That would be a tree, with 2 · log2 n steps."),
            Slip(0.004, "That is one step. How many are there?"),
            Slip(0.008, "That is one step in each half. How many are there?"),
        ],
        purpose="The next cell simulates it, with 3.4 µs inside a node and 9.6 between "
        "nodes.",
        measured=True,
    ),
    Number(
        "07.slow_link",
        "64 GPUs on 8 nodes in a flat ring, 1 GB. In 8 places the ring goes from one "
        "node to the next. In one of these the link, with all its cards, is 10 times "
        "slower than in the others. About how many times as long does the all-reduce "
        "take?",
        answer=9.89,
        tolerance=0.9,
        unit="times",
        why="Nearly 10: every chunk passes over every link, so all wait for the "
        "slowest. Only the latencies stay as they were.",
        hint="How many of the chunks have to pass over that one link?",
        slips=[
            Slip(1, "One of many links, but every chunk has to pass over it."),
            Slip(1.1, "As if a chunk used some of the links only. It uses them all."),
            Slip(1.14, "That is the mean of 64 links. But nobody can go around it."),
            Slip(2.125, "That is the mean of 8 links. But nobody can go around it."),
            Slip(2, "Every chunk has to pass over it, nearly all in both halves."),
            Slip(64, "It is ten times slower, so it can't be worse than ten."),
        ],
        purpose="The next cell simulates it.",
        measured=True,
    ),
)

# The number that is a task of the exercise.
PREDICT_BYTES = NumberTask(
    "07.predict_bytes",
    "16 ranks all-reduce a tensor of 1,000,000 numbers in float32 in a ring, cut into "
    "16 chunks. How many bytes does *each rank* send in all?",
    answer=7_500_000,
    unit="bytes",
    title="Predict the bytes",
    stars=1,
    why="A rank sends 2 × 15 chunks of 4,000,000 / 16 = 250,000 bytes.",
    hint="In each of 2(n - 1) steps a rank sends one n-th of the tensor.",
    slips=[
        Slip(3_750_000, "That is the reduce-scatter. The all-gather sends the same."),
        Slip(1_875_000, "So many numbers are sent. A float32 has 4 bytes."),
        Slip(8_000_000, "That would be 32 chunks. Each half has n - 1 steps, not n."),
        Slip(120_000_000, "All ranks together send as much. How much does each?"),
        Slip(250_000, "Those are the bytes of one step. How many steps are there?"),
        Slip(30, "Those are the steps. How many bytes does a rank send in each?"),
        Slip(7.5, "In bytes, please: not in MB."),
    ],
    hints=(
        "Two halves. How many steps does each have on 16 ranks?",
        "A rank sends one chunk in each step. How many bytes are all chunks together, "
        "and how many is one?",
        "For 4 ranks and 1,200 bytes it goes like this:\n"
        "  steps    2 * 3            = 6\n"
        "  chunk    1200 / 4         = 300 bytes\n"
        "  answer   6 * 300          = 1800 bytes",
    ),
)
