"""Lesson 07, ring all-reduce: chunks, bytes, steps, and who wins when."""

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
    Number(
        "07.root_bytes",
        "Four ranks all-reduce a tensor of 1,200 bytes through rank 0. How many bytes "
        "does rank 0 send?",
        answer=3600,
        unit="bytes",
        why="It sends the whole sum to each of the three others. Before that it "
        "received three whole tensors.",
        hint="Who gets what from rank 0 once it has added everything up?",
        slips={
            1200: "That is what each of the others sends. Rank 0 answers three.",
            4800: "Rank 0 sends nothing to itself.",
            7200: "That is what it sends and receives, taken together.",
            300: "Each of the others gets the whole sum, not a part of it.",
        },
        purpose="The next cell counts.",
        measured=True,
    ),
    Number(
        "07.which_chunk",
        "Six ranks, six chunks. In step 0 each rank r sends chunk r to the next rank. "
        "In each later step it sends the chunk that it received in the step before, "
        "with its own chunk added. Which chunk does rank 1 send in step 2?",
        answer=5,
        is_name=True,
        why="(r - k) mod n = (1 - 2) mod 6 = 5. Chunk 5 started on rank 5 and has "
        "moved on to ranks 0 and 1.",
        hint="Which chunk travels to rank 1 in step 1? Follow it back to where it "
        "started: one rank for each step.",
        slips={
            -1: "1 - 2 is right, but the chunks are 0 to 5: count in a circle.",
            3: "Chunks move forwards, so what a rank sends falls: r - k, not r + k.",
            2: "That is the step. Which chunk has reached rank 1 by then?",
            1: "Chunk 1 leaves rank 1 in step 0.",
            0: "Chunk 0 is what rank 1 sends in step 1.",
            4: "Chunk 4 is what rank 1 sends in step 3.",
        },
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
        slips={
            900: "That is the reduce-scatter. The all-gather sends it again.",
            2400: "There are n - 1 = 3 steps in each half, not 4.",
            3600: "In each step it sends one chunk, not the whole tensor.",
            1200: "Six steps, and in each of them a quarter of the tensor.",
            7200: "That is all four ranks together. How much is it for one?",
            300: "That is one chunk. In how many steps does a rank send one?",
        },
        purpose="The next cell counts, for 2 to 5 ranks.",
        measured=True,
    ),
    MultipleChoice(
        "07.lower_bound",
        "The lower bound is 2(n - 1)/n · S bytes from each rank on average. Which of "
        "these are true?",
        Right(
            "With 1,000 ranks, each rank of a ring sends 11 % more than with 10.",
            "1.998·S and 1.8·S. What stops rings from growing is not the number of "
            "bytes but the number of steps.",
        ),
        Wrong(
            "No algorithm can be faster than a ring.",
            "The bound is about bytes, not about steps. For small tensors the time is "
            "latency, and other algorithms have fewer steps.",
        ),
        Wrong(
            "With twice the ranks, each rank of a ring sends about half the bytes.",
            "The chunks are half as large, but there are twice as many steps.",
        ),
        Right(
            "With SHARP and 100 ranks, each rank sends about half of what a ring "
            "needs.",
            "It sends its tensor once, S bytes, and not 1.98·S. The bound does not "
            "hold there, because a switch adds.",
        ),
        Right(
            "A gradient in bfloat16 needs half the bytes of one in float32.",
            "The bound counts numbers. S is how many bytes they take.",
        ),
    ),
    Number(
        "07.tutorial_ring",
        "Four ranks, a tensor of 1,200 bytes. How many bytes does each rank send in "
        "the function `allreduce` of the cell above?",
        answer=3600,
        unit="bytes",
        why="Three steps, and in each of them a whole tensor: (n - 1)·S.",
        hint="How often does the loop run, and what does each `isend` send?",
        slips={
            1800: "That is a ring with chunks. Does this code cut anything?",
            4800: "range(size - 1) has three steps, not four.",
            1200: "It sends a whole tensor in each step of the loop.",
            7200: "There is no second half here: each rank adds up everything.",
            900: "The buffers are clones of the whole tensor.",
        },
        purpose="The next cell counts.",
        measured=True,
    ),
    Number(
        "07.chunk_sizes",
        "How many pieces does `torch.arange(5).chunk(4)` make?",
        answer=3,
        unit="pieces",
        why="Each piece has ceil(5 / 4) = 2 numbers, and the last one has the rest: 2 "
        "+ 2 + 1.",
        hint="Each piece has ceil(5 / 4) numbers, until none is left.",
        slips={
            4: "That is what one expects. But each piece has ceil(5 / 4) numbers.",
            5: "There are five numbers. How many go into each piece?",
            2: "Each piece has two numbers. How many pieces is that?",
        },
        purpose="The next cell shows them.",
        measured=True,
    ),
    Number(
        "07.tree_steps",
        "A tree of 8 ranks: sums go up to rank 0, then the total comes down. In how "
        "many steps, if in each a rank can send one message and receive one?",
        answer=6,
        unit="steps",
        why="Up: 8 ranks become 4, 2, 1, so three steps. Down: three again.",
        hint="In each step up, half of the remaining ranks hand in their sum.",
        slips={
            3: "That is the way up. The total must come down again.",
            14: "That is a ring: 2(n - 1).",
            7: "That many messages go up. But several go in the same step.",
            8: "Each step up halves the number of ranks that still hold a sum.",
            4: "log2 of 8 is 3, and there are two ways.",
        },
        purpose="The next cell counts the steps of all four algorithms.",
        measured=True,
    ),
    SingleChoice(
        "07.ping_pong",
        "α and B are measured by ping-pong: two ranks send to each other, the others "
        "wait. On a machine with 2 cores, how long will a ring of 4 ranks really take, "
        "compared with what the formula predicts from these numbers?",
        Wrong(
            "As predicted: a message costs the same in both.",
            "Its cost depends on what else the machine does. During a ping-pong it "
            "does nothing else.",
        ),
        Wrong(
            "Less than predicted: in a ring the ranks share the work.",
            "They share the adding. Each sends and receives as in the ping-pong, but "
            "now all of them do so at once.",
        ),
        Right(
            "Much longer: all four ranks send at the same time.",
            "In the ping-pong each of the two ranks had a core to itself. In a ring "
            "four ranks share two cores. A ring shift, where all ranks send at once, "
            "measures what a ring needs.",
        ),
        Wrong(
            "A little longer: a ring also has to add the numbers up.",
            "The formula does leave that out. But it is not what counts here: the "
            "ranks share cores and memory.",
        ),
        measured=True,
    ),
    MultipleChoice(
        "07.tree_wins",
        "Which all-reduce is faster with a tree than with a ring? One step on "
        "InfiniBand takes 9.6 µs plus the bytes at 50 GB/s, one on NVLink 3.4 µs plus "
        "the bytes at 450 GB/s.",
        Right(
            "The loss, 4 bytes, on 1,024 GPUs, linked by InfiniBand.",
            "Only latencies count: 20 steps of a tree against 2,046 of a ring.",
        ),
        Right(
            "A bucket of 26 MB on 1,024 GPUs, linked by InfiniBand.",
            "The tree takes 20 steps of 9.6 + 520 µs, about 10.6 ms. The ring takes "
            "2,046 steps of 9.6 + 0.5 µs, about 20.7 ms.",
        ),
        Wrong(
            "A gradient of 1 GB on 1,024 GPUs, linked by InfiniBand.",
            "A tree sends the whole tensor in each step: 20 steps of 20 ms, about 400 "
            "ms. The ring takes 2,046 steps of 9.6 + 19.5 µs, about 60 ms.",
        ),
        Wrong(
            "A bucket of 26 MB on 8 GPUs, linked by NVLink.",
            "The tree takes 6 steps of 3.4 + 57.8 µs, about 367 µs. The ring takes 14 "
            "steps of 3.4 + 7.2 µs, about 149 µs.",
        ),
        Wrong(
            "The loss, 4 bytes, on 3 GPUs, linked by NVLink.",
            "With two or three ranks a ring has no more steps than a tree, and smaller "
            "messages: the tree never wins.",
        ),
    ),
    Number(
        "07.ten_thousand",
        "A flat ring of 10,000 GPUs all-reduces a tensor of a few bytes. In each step "
        "a message takes 4.175 µs on average. How many milliseconds does it take in "
        "all?",
        answer=83.49,
        tolerance=1,
        unit="ms",
        why="2(n - 1) = 19,998 steps, one after the other: 83.49 ms.",
        hint="2(n - 1) steps, as with four ranks, and each has to wait for the "
        "previous one.",
        slips={
            41.75: "That is one half.",
            0.0835: "Those are seconds.",
            83_492: "Those are microseconds.",
            0.117: "That would be a tree, with 2 · 14 steps.",
            0.111: "That would be a tree, but log2 n has to be rounded up to 14.",
            0.004175: "That is one step. How many are there?",
            0.00835: "That is one step in each half. How many are there?",
        },
        purpose="The next cell simulates it, with 3.4 µs inside a node and 9.6 µs "
        "between nodes.",
        measured=True,
    ),
    Number(
        "07.slow_link",
        "64 GPUs on 8 nodes in a flat ring, 1 GB. In 8 places the ring goes from one "
        "node to the next. In one of these the link has a tenth of the bandwidth "
        "of the others. About how many times as long does the all-reduce take?",
        answer=9.89,
        tolerance=0.9,
        unit="times",
        why="Nearly 10: every chunk passes over every link, so all of them wait for "
        "the slowest. Only the latencies stay as they were.",
        hint="How many of the chunks have to pass over that one link?",
        slips={
            1: "One of many links, but every chunk has to pass over it.",
            1.1: "Each chunk uses all of the links, not only some of them.",
            1.14: "That is the mean of 64 links. But no chunk can go around it.",
            2.125: "That is the mean of 8 links. But no chunk can go around it.",
            2: "Every chunk has to pass over it, nearly all in both halves.",
            64: "The link is ten times slower, so it cannot be worse than ten.",
        },
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
    slips={
        3_750_000: "That is the reduce-scatter. The all-gather sends the same.",
        1_875_000: "That is how many numbers are sent. A float32 has 4 bytes.",
        8_000_000: "That would be 32 chunks. Each half has n - 1 steps, not n.",
        120_000_000: "That is what all ranks send together. And each of them?",
        250_000: "Those are the bytes of one step. How many steps are there?",
        30: "Those are the steps. How many bytes does a rank send in each?",
        7.5: "That is in MB. Give it in bytes.",
    },
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
