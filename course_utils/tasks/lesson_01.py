"""Lesson 01, GPUs, nodes and ranks: the tasks of its exercise."""

import numpy as np

from course_utils.questions.lesson_01 import PREDICT_RANK
from course_utils.tasks.task import Miss, Task

RESULT, WHOLE = "what it returned", "whole numbers"


def looked_at(result):
    """Is it made of ints? Those of NumPy and PyTorch count."""
    if result is None:
        return None
    return {RESULT: result, WHOLE: np.asarray(result).dtype.kind in "iu"}


NOT_WHOLE = (
    "The value is right here, but not every number is an int, and `items[2.0]` is a "
    "TypeError. `/` makes a float of two ints, `//` makes an int."
)
FOUR = "That is right for 4 GPUs per node. Use `gpus_per_node`."

# ---------------------------------------------------------------------------- rank_of

OURS = "node * gpus_per_node + local_rank"


def observe_rank(answer, node, local_rank, gpus_per_node):
    return looked_at(answer(node, local_rank, gpus_per_node))


RANK_OF = Task(
    id="01.rank_of",
    title="From GPU to rank",
    stars=1,
    where="here",
    # In the first one, each near miss is another number.
    cases=((13, 7, 17), (0, 0, 1), (5, 0, 1), (0, 3, 4), (1, 0, 4), (124, 7, 8)),
    observe=observe_rank,
    misses=(
        Miss(
            OURS,
            "local_rank * gpus_per_node + node",
            "Node and local rank changed places. Each node holds `gpus_per_node` "
            "ranks, so multiply the number of the node.",
        ),
        Miss(OURS, "local_rank", "That is the local rank, the same on every node."),
        Miss(OURS, "node + local_rank", "A node holds `gpus_per_node` ranks, not one."),
        Miss(OURS, "node * gpus_per_node", "That is the first rank of the node."),
        Miss(
            "node *",
            "(node - 1) *",
            "One node is missing. Nodes count from 0: before node 3 there are three "
            "others, 0, 1 and 2.",
        ),
        Miss("* gpus_per_node", "* 4", FOUR),
    ),
    because={WHOLE: NOT_WHOLE},
    otherwise="A rank is the number of ranks before it: all those on the nodes before, "
    "and those before it on its own node. Everything counts from 0.",
    hints=(
        "How many ranks are there on all the nodes before this one?",
        "The first rank of a node is a multiple of `gpus_per_node`. From there, count "
        "on by the local rank.",
        "One line:\n  return ... * gpus_per_node + ...",
    ),
)

# ---------------------------------------------------------------- node_and_local_rank

QUOTIENT, REST = "rank // gpus_per_node", "rank % gpus_per_node"


def observe_place(answer, rank, gpus_per_node):
    return looked_at(answer(rank, gpus_per_node))


NODE_AND_LOCAL_RANK = Task(
    id="01.node_and_local_rank",
    title="And back again",
    stars=1,
    where="here",
    # First a rank where `/` shows nothing but its float. Then one where `round` drops
    # the rest, too, and one where it does not. Then the first, the second and the last
    # rank of a node, on nodes with 1 to 16 GPUs.
    cases=(
        *((70, 7), (23, 7), (26, 7), (999, 8), (4, 4)),
        *(
            (node * gpus + local_rank, gpus)
            for gpus in range(1, 17)
            for node, local_rank in ((0, 0), (2, min(1, gpus - 1)), (5, gpus - 1))
        ),
    ),
    observe=observe_place,
    misses=(
        Miss(
            QUOTIENT,
            "round(rank / gpus_per_node)",
            "`round` goes up where more than half of the node lies before the rank. "
            "Drop the remainder instead: `//`.",
        ),
        Miss(REST, "rank", "The node is right. The second number is still the rank."),
        Miss(
            REST,
            f"rank - {QUOTIENT}",
            "The node is right. For the local rank, subtract the number of ranks on "
            "the nodes before, not the number of nodes.",
        ),
        Miss(
            REST,
            f"int((rank / gpus_per_node - {QUOTIENT}) * gpus_per_node)",
            "The node is right. Dividing with `/` leaves a rounding error, and `int()` "
            "makes 1 of 1.9999. Work with whole numbers (`//` and `%`).",
        ),
        Miss(f"{QUOTIENT}, {REST}", "rank // 4, rank % 4", FOUR),
    ),
    because={WHOLE: NOT_WHOLE},
    otherwise="`return node, local_rank`: the node is the number of full nodes before "
    "the rank, and the local rank is what is left over. Both count from 0.",
    hints=(
        "How many full nodes are there before this rank? How many ranks are left over?",
        "Whole-number division gives the one, its remainder the other. Python writes "
        "them `//` and `%`.",
        "Two numbers, separated by a comma:\n  return rank // ..., rank % ...",
    ),
)

# ------------------------------------------------------------------- transfer_seconds

SUM, SIZE = "latency + nbytes / bandwidth", "numel * element_size"

TRANSFER_SECONDS = Task(
    id="01.transfer_seconds",
    title="Seconds for a tensor",
    stars=2,
    where="here",
    # First almost nothing but bytes, then almost nothing but latency, then both:
    # whoever makes two mistakes at once is told of one after the other.
    cases=(
        (7_000_000_000, 3, 0.0, 45.0),
        (1, 1, 20.0, 25.0),
        (2_500_000, 2, 60.0, 125.0),
        (3_000_000, 4, 2.5, 450.0),
        (25_557_032, 4, 10.0, 1.25),
        (0, 4, 8.0, 25.0),
        (37, 4, 0.1234, 25.0),  # less than anyone may drop or round away
    ),
    misses=(
        Miss(
            "1e9",
            "2**30",
            "You took 1 GB to be 2**30 bytes. That is a GiB, 7 % more: 1 GB is 10**9.",
        ),
        Miss(
            SIZE,
            f"8 * {SIZE}",
            "The part for the bytes is 8 times too long. The capital B in GB/s means "
            "bytes: do not convert to bits.",
        ),
        Miss(SUM, "nbytes / bandwidth", "The latency is missing. Add it."),
        Miss(
            SUM,
            "max(latency, nbytes / bandwidth)",
            "That is the longer of the two parts. They come one after the other: add "
            "them.",
        ),
        Miss(
            "nbytes /",
            "nbytes //",
            "The bytes take almost no time. Did you divide with `//`, or round?",
        ),
        Miss(SIZE, "numel", "You counted the elements as bytes."),
        Miss(SIZE, "numel * 4", "Not all elements have 4 bytes. Use `element_size`."),
    ),
    otherwise="Convert every number to bytes and seconds, and print it: how many "
    "bytes, how many bytes per second, how many seconds of latency? The result is in "
    "seconds, and not rounded.",
    hints=(
        "Two things take time: until the first byte arrives, and until all the others "
        "have followed. Convert every number to bytes and seconds first.",
        "seconds = latency + bytes / bandwidth. Bytes: elements times bytes per "
        "element. A microsecond is 1e-6 seconds, a GB is 1e9 bytes.",
        "Three lines:\n"
        "  nbytes = numel * ...\n"
        "  bandwidth = bandwidth_gb_s * ...    # bytes per second\n"
        "  return latency_us * ... + nbytes / bandwidth",
    ),
)

# --------------------------------------------------------------------- spot_the_units

SPOT_THE_UNITS = Task(
    id="01.spot_the_units",
    title="Spot the units",
    stars=2,
    where="here",
    cases=(
        (7_000_000_000, 2, 3, 400),  # here each near miss is another number
        (70_000_000_000, 2, 8, 400),
        (1_000_000, 4, 1, 25),
        (405_000_000_000, 1, 4, 200),
    ),
    tolerance=1e-6,  # less than a factor such as 8.59 for both mistakes is wrong by
    misses=(
        Miss(
            " / 8",
            "",
            "The gigabytes are right now, but it is still 8 times too fast. "
            "`port_speed` is in Gb/s, and a small b means bits.",
        ),
        Miss(
            "1e9",
            "1024**3",
            "The bits are right now, but it is still 7 % too fast. 1024**3 bytes are a "
            "GiB, and networks count in GB: 10**9 bytes.",
        ),
        Miss(
            "/ 8",
            "* 8",
            "The 8 is on the wrong side. A byte is 8 bits, so a port carries 8 times "
            "fewer bytes than bits.",
        ),
        Miss("ports * ", "", "All ports send at the same time: multiply by `ports`."),
        Miss(" * element_size", "", "Each number has `element_size` bytes."),
    ),
    otherwise="Two lines of the plan have a wrong number, and the rest stays as it is: "
    "add no latency, and do not round. Say the unit of each line aloud: GB, GB/s, "
    "seconds.",
    hints=(
        "Say the unit of every number aloud, line by line. Does the name on the left "
        "promise the same unit?",
        "`b` is a bit, `B` is a byte, and a byte is 8 bits. GB is 10**9 bytes, GiB is "
        "2**30. Which of these does each line use, and which does its name say?",
        "The three lines stay, with other numbers:\n"
        "  gigabytes = parameters * element_size / ...\n"
        "  gigabytes_per_second = ports * port_speed / ...\n"
        "  return gigabytes / gigabytes_per_second",
    ),
)

# ---------------------------------------------------------------------- which_backend

ON_CPU = "for tensors on the CPU"
SHARED, OWN = "for ranks that share GPUs", "for a GPU for each rank"


def observe_backend(answer, tensors_on, ranks_on_node, gpus_on_node):
    name = answer(tensors_on, ranks_on_node, gpus_on_node)
    if name not in ("nccl", "gloo"):
        return name
    if tensors_on == "cpu":
        return {ON_CPU: name}
    return {SHARED if ranks_on_node > gpus_on_node else OWN: name}


WHICH_BACKEND = Task(
    id="01.which_backend",
    title="Which backend?",
    stars=1,
    where="here",
    cases=tuple(
        [("cpu", *n) for n in ((4, 0), (8, 8), (1, 1), (2, 8), (16, 8))]
        + [("cuda", *n) for n in ((8, 8), (4, 8), (16, 8), (1, 1), (2, 1), (7, 8))]
        + [("cuda", *n) for n in ((9, 8), (3, 4), (5, 4), (16, 16))]
    ),
    observe=observe_backend,
    because={
        ON_CPU: "nccl takes GPU tensors only, and these are in the CPU's memory, "
        "whether there are GPUs or not.",
        SHARED: "There are more ranks than GPUs, and nccl wants a GPU for each rank. "
        "Sharing one ends in an error (`Duplicate GPU detected`) or a deadlock.",
        OWN: "There is a GPU for each rank here, so nccl works, and it is faster than "
        "gloo. It does not matter if some GPUs are left over. (Only the arguments "
        'count, not the GPUs of this machine. `tensors_on` is "cpu" or "cuda".)',
    },
    otherwise='Return the name "nccl" or "gloo", in small letters and alone.',
    hints=(
        "nccl is the fast one, but it has two conditions. If one of them is not met, "
        "only gloo is left.",
        'The tensors must be on "cuda", and each rank must have a GPU of its own. Both '
        "must hold.",
        "One condition with `and`:\n"
        "  if tensors_on == ... and ranks_on_node ... gpus_on_node:\n"
        '      return "nccl"\n'
        '  return "gloo"',
    ),
)

TASKS = (
    RANK_OF,
    NODE_AND_LOCAL_RANK,
    TRANSFER_SECONDS,
    SPOT_THE_UNITS,
    WHICH_BACKEND,
    PREDICT_RANK,
)
