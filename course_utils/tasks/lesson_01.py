"""Lesson 01, GPUs, nodes and ranks: the tasks of its exercise."""

import operator

from course_utils.questions.lesson_01 import PREDICT_RANK
from course_utils.tasks.task import Miss, Task

# ---------------------------------------------------------------------------- rank_of

RANK, WHOLE = "the rank", "whole numbers"
NO_INDEX = (
    "But a float is no whole number: `items[2.0]` is a TypeError. `//` makes an int of "
    "two others, `/` a float."
)


def observe_rank(answer, node, local_rank, gpus_per_node):
    rank = answer(node, local_rank, gpus_per_node)
    return None if rank is None else {RANK: rank, WHOLE: is_index(rank)}


def is_index(number):
    """Can it count and index? Also NumPy's and torch's whole numbers can."""
    try:
        operator.index(number)
    except TypeError:
        return False
    return True


OURS = "node * gpus_per_node + local_rank"
NODES = "Nodes count from 0: before node 3 there are three others (0, 1 and 2)."
FOUR = "That is right for 4 GPUs per node. Use `gpus_per_node`."
EIGHT = "That is right for 8 GPUs per node. Use `gpus_per_node`."
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
            "ranks: which of the two numbers counts nodes?",
        ),
        Miss(OURS, "local_rank", "That is the local rank, the same on every node."),
        Miss(OURS, "node + local_rank", "A node holds `gpus_per_node` ranks, not one."),
        Miss(OURS, "node * gpus_per_node", "That is the first rank of the node."),
        Miss("node *", "(node - 1) *", f"One node is missing. {NODES}"),
        Miss("node *", "(node + 1) *", f"There is a node too many. {NODES}"),
        Miss(
            OURS,
            "(node + local_rank) * gpus_per_node",
            "Only the nodes are multiplied: no parentheses are needed.",
        ),
        Miss("* gpus_per_node", "* 4", FOUR),
        Miss("* gpus_per_node", "* 8", EIGHT),
    ),
    because={WHOLE: f"The number is right. {NO_INDEX}"},
    otherwise="A rank is the number of ranks that come before it: all those on the "
    "nodes before, and those before it on its own node. Everything counts from 0.",
    hints=(
        "How many ranks live on all the nodes before this one?",
        "Node 0 holds the first `gpus_per_node` ranks, node 1 the next ones. So a "
        "node's first rank is a multiple of `gpus_per_node`. From there, count on by "
        "the local rank.",
        "One line:\n  return ... * gpus_per_node + ...",
    ),
)

# ---------------------------------------------------------------- node_and_local_rank

PLACE = "node and local rank"


def observe_place(answer, rank, gpus_per_node):
    place = answer(rank, gpus_per_node)
    if place is None:
        return None
    is_one = not hasattr(place, "__len__") or getattr(place, "shape", None) == ()
    return {PLACE: place, WHOLE: None if is_one else list(map(is_index, place))}


QUOTIENT, REST = "rank // gpus_per_node", "rank % gpus_per_node"
NODE_AND_LOCAL_RANK = Task(
    id="01.node_and_local_rank",
    title="And back again",
    stars=1,
    where="here",
    # The first rank of a node, where no rounding does harm; then one where rounding
    # up does, and one where `round` does. Then the first, the second and the last
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
            f"{QUOTIENT}, {REST}",
            f"{REST}, {QUOTIENT}",
            "The two numbers changed places: first the node, then the local rank.",
        ),
        Miss(
            "//",
            "/",
            "`/` gives a fraction. A rank is on one whole node: `//` divides and drops "
            "the rest.",
        ),
        Miss(
            QUOTIENT,
            "round(rank / gpus_per_node)",
            "`round` goes up where more than half of the node lies before the rank. "
            "Drop the rest instead: `//`.",
        ),
        Miss(
            QUOTIENT,
            f"-(-{QUOTIENT})",
            "Rounding up counts this node among those before it. Drop the rest: `//`.",
        ),
        Miss(REST, "rank", "The node is right. The second number is still the rank."),
        Miss(
            REST,
            f"rank - {QUOTIENT}",
            "The node is right. For the local rank you subtracted the number of nodes "
            "before: subtract the number of ranks on them.",
        ),
        Miss(
            REST,
            f"int((rank / gpus_per_node - {QUOTIENT}) * gpus_per_node)",
            "The node is right. Dividing with `/` leaves a rounding error, and `int()` "
            "makes 1 of 1.9999. Work with whole numbers (`//` and `%`).",
        ),
        Miss(f"{QUOTIENT}, {REST}", "rank // 4, rank % 4", FOUR),
        Miss(f"{QUOTIENT}, {REST}", "rank // 8, rank % 8", EIGHT),
    ),
    because={WHOLE: f"The numbers are right. {NO_INDEX}"},
    otherwise="`return node, local_rank`: the node is the number of full nodes before "
    "the rank, the local rank is what is then left of it. Both count from 0.",
    hints=(
        "How many full nodes are there before this rank? How many ranks are left over "
        "then?",
        "Whole-number division gives the one, its rest the other. Python writes them "
        "`//` and `%`.",
        "Two numbers, separated by a comma:\n"
        "  return rank // ..., rank % ...\n"
        "To test it, use your rank_of: it must lead back to the same rank.",
    ),
)

# ------------------------------------------------------------------- transfer_seconds

SUM, SIZE = "latency + nbytes / bandwidth", "numel * element_size"
TRANSFER_SECONDS = Task(
    id="01.transfer_seconds",
    title="Seconds for a tensor",
    stars=2,
    where="here",
    # First nothing but bytes, then nothing but latency, then both: whoever makes two
    # mistakes at once is told of one after the other. With 3 bytes per element, "4
    # bytes" and "half the bandwidth" are not the same.
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
            "You took 1 GB as 2**30 bytes: that is a GiB, 7 % more. 1 GB is 10**9.",
        ),
        Miss(
            SIZE,
            f"8 * {SIZE}",
            "The part for the bytes is 8 times too long. The size is in bytes, and "
            "GB/s has a capital B: bits do not come in.",
        ),
        Miss(SUM, "nbytes / bandwidth", "The latency is missing. Add it."),
        Miss(
            SUM,
            "max(latency, nbytes / bandwidth)",
            "That is the longer of the two parts. First the latency passes, then the "
            "bytes flow: add them.",
        ),
        Miss(
            "nbytes /",
            "nbytes //",
            "The bytes take almost no time. Did you divide with `//`, or round?",
        ),
        Miss(SIZE, "numel", "You counted the elements as bytes."),
        Miss(SIZE, "numel * 4", "Not all elements have 4 bytes. Use `element_size`."),
        Miss(" * 1e9", "", "You divided bytes by GB/s. 1 GB is 10**9 bytes."),
        Miss("1e-6", "1", "The latency is added as seconds. A microsecond is 1e-6."),
        Miss("1e-6", "1e-3", "You took the latency for milliseconds."),
        Miss("1e-6", "1e-9", "You took the latency for nanoseconds."),
        Miss(SUM, f"round({SUM}, 6)", "It is rounded. Return all digits."),
        Miss(SUM, f"round({SUM}, 9)", "It is rounded. Return all digits."),
    ),
    errors={
        "ZeroDivisionError": "The latency or the size may be 0: only the bandwidth is "
        "divided by. Are the arguments in the order of the stub?"
    },
    otherwise="Bring every number to bytes and seconds, and print them: how many "
    "bytes, how many bytes per second, which latency in seconds? The result is in "
    "seconds, for one message, one way, and not rounded.",
    hints=(
        "Two things take time: until the first byte arrives, and until all the others "
        "have followed. Bring every number to bytes and seconds first.",
        "seconds = latency + bytes / bandwidth. Bytes: elements times bytes per "
        "element. A microsecond is 1e-6 seconds, a GB is 1e9 bytes.",
        "Three lines:\n"
        "  nbytes = numel * ...\n"
        "  bandwidth = bandwidth_gb_s * ...    # bytes per second\n"
        "  return latency_us * ... + nbytes / bandwidth",
    ),
)

# --------------------------------------------------------------------- spot_the_units

PORTS = "All ports send at the same time: multiply the speed by `ports`."
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
            "1e9  # GB, not GiB\n    gigabytes_per_second = ports * port_speed / 8",
            "2**30\n    gigabytes_per_second = ports * port_speed",
            "That is what the old plan says. One line takes a GiB for a GB, another "
            "takes Gb for GB.",
        ),
        Miss(
            " / 8",
            "",
            "The gigabytes are right now. But it is still 8 times too fast: "
            "`port_speed` is in Gb/s, with a small b. That is bits.",
        ),
        Miss(
            "1e9",
            "1024**3",
            "The bits are right now. But it is still 7 % too fast: 1024**3 bytes are a "
            "GiB. Networks count in GB, and 1 GB is 10**9 bytes.",
        ),
        Miss(
            "/ 8",
            "* 8",
            "The 8 is on the wrong side. A byte is 8 bits, so a port carries 8 times "
            "fewer bytes than bits, and sending takes longer.",
        ),
        Miss("ports * ", "", PORTS),
        Miss("ports * ", "1 / ports * ", PORTS),
        Miss("speed / 8", "speed // 8", "`//` drops everything after the point."),
        Miss(" * element_size", "", "Each number has `element_size` bytes."),
    ),
    otherwise="Two lines of the plan need another number, each by itself, and nothing "
    "else must change: add no latency, and do not round. Say the unit of each line "
    "aloud: GB, GB/s, seconds.",
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

NO_GPUS, ON_CPU = "for nodes without GPUs", "for tensors on the CPU"
SHARED, OWN = "for ranks that share GPUs", "for a GPU for each rank"
LEFT_OVER = "for more GPUs than ranks"


def observe_backend(answer, tensors_on, ranks_on_node, gpus_on_node):
    name = answer(tensors_on, ranks_on_node, gpus_on_node)
    if not isinstance(name, str) or name not in ("nccl", "gloo"):
        return name
    if gpus_on_node == 0:
        return {NO_GPUS: name}
    if tensors_on == "cpu":
        return {ON_CPU: name}
    if ranks_on_node > gpus_on_node:
        return {SHARED: name}
    return {OWN if ranks_on_node == gpus_on_node else LEFT_OVER: name}


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
        "returned": 'Return the name "nccl" or "gloo", in small letters and alone.',
        NO_GPUS: "nccl works between GPUs, and these nodes have none.",
        ON_CPU: "There are GPUs here, but the tensors are in the CPU's memory. nccl "
        "takes GPU tensors only.",
        SHARED: "There are more ranks than GPUs, so some ranks share a GPU. nccl wants "
        "a GPU for each rank: sharing ends in an error (`Duplicate GPU detected`) or a "
        "deadlock.",
        OWN: "gloo could average these GPU tensors, but slowly. There is a GPU for "
        "each rank here: nccl works, and is made for it. (Only the arguments count, "
        "not the GPUs of this machine.)",
        LEFT_OVER: "There is a GPU for each rank here, and some are left over. That is "
        "no problem for nccl: it uses the GPUs that the ranks use.",
    },
    hints=(
        "nccl is the fast one, but it has two conditions. When one of them is not "
        "met, gloo is left.",
        'The first condition is about the tensors: they are on "cuda". The second is '
        "about numbers: each rank has a GPU of its own. Both must hold.",
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
