"""Lesson 01, GPUs, nodes and ranks: the tasks of its exercise."""

import math
from functools import partial

from course_utils.checks.mistakes import is_rounded
from course_utils.checks.task import Count, Mistake, Task


def is_one_off(attempt):
    """Is a node, a local rank or the rank itself counted from 1 instead of 0?"""
    gpus = attempt.args[2]
    return abs(attempt.got - attempt.expected) in (1, gpus - 1, gpus, gpus + 1)


def has_other_numbers(attempt, index):
    """Are there two whole numbers, and is the one at this index wrong?"""
    are_two = len(attempt.got) == len(attempt.expected)
    are_whole = are_two and all(number == int(number) for number in attempt.got)
    return are_whole and attempt.got[index] != attempt.expected[index]


RANK_OF = Task(
    id="01.rank_of",
    title="From GPU to rank",
    stars=1,
    cases=(
        (13, 7, 17),  # here every mistake below gives another number
        (2, 1, 2),
        (0, 0, 1),
        (5, 0, 1),
        (0, 3, 4),
        (1, 0, 4),
        (1, 7, 8),
        (124, 7, 8),
    ),
    expect=lambda node, local_rank, gpus: Count(node * gpus + local_rank),
    instead="The arithmetic is one line.",
    mistakes=(
        Mistake(
            like=lambda node, local_rank, gpus: local_rank * gpus + node,
            says="Node and local rank changed places. Each node holds `gpus_per_node` "
            "ranks: which of the two numbers counts nodes?",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: local_rank,
            says="That is the local rank: it starts again at 0 on every node. The "
            "ranks of the nodes before this one are not counted.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: node + local_rank,
            says="Each node before this one holds `gpus_per_node` ranks, not one.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: node * gpus,
            says="That is the first rank of the node. Add the place on the node.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: node * gpus + local_rank + 1,
            says="It is one too many: ranks, nodes and local ranks all count from 0.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: node * gpus + local_rank - 1,
            says="It is one too few: ranks, nodes and local ranks all count from 0.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: (node - 1) * gpus + local_rank,
            says="One node is missing. Nodes count from 0: before node 3 there are "
            "three others (0, 1 and 2).",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: (node + 1) * gpus + local_rank,
            says="There is a node too many. Nodes count from 0: before node 3 there "
            "are three others (0, 1 and 2), and its own GPUs are counted by the local "
            "rank.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: (node + local_rank) * gpus,
            says="Only the nodes are multiplied by `gpus_per_node`. `*` goes before "
            "`+`: no parentheses are needed.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: node * (gpus - 1) + local_rank,
            says="The last local rank is `gpus_per_node - 1`, but each node holds "
            "`gpus_per_node` ranks.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: node * 4 + local_rank,
            says="That is right for 4 GPUs per node. Use `gpus_per_node`.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: node * 8 + local_rank,
            says="That is right for 8 GPUs per node. Use `gpus_per_node`.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: 6,
            says="That is the number of the example. Compute it from the arguments.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: 0,
            says="It is rank 0 whatever the arguments are. Did you ask for the number "
            "of this process? The question is about any GPU of a cluster: compute the "
            "rank from the arguments.",
        ),
        Mistake(
            when=lambda attempt: "process group" in attempt.message,
            says="There is no process group here: the question is about any GPU of a "
            "cluster. Compute the rank from the arguments.",
        ),
        Mistake(
            when=is_one_off,
            says="Something counts from 1 here. Ranks, nodes and local ranks all count "
            "from 0.",
        ),
        Mistake(
            like=lambda node, local_rank, gpus: node * local_rank + gpus,
            says="The roles are mixed up: `gpus_per_node` says how many ranks each "
            "node holds, and the local rank is a place on the last of them.",
        ),
    ),
    otherwise="A rank is the number of ranks that come before it: all those on the "
    "nodes before, and those before it on its own node.",
    hints=(
        "How many ranks live on all the nodes before this one?",
        "Node 0 holds the first `gpus_per_node` ranks, node 1 the next ones. So a "
        "node's first rank is a multiple of `gpus_per_node`. From there, count on by "
        "the local rank.",
        "One line:\n  return ... * gpus_per_node + ...",
    ),
)

NODE_AND_LOCAL_RANK = Task(
    id="01.node_and_local_rank",
    title="And back again",
    stars=1,
    # The first rank of a node, where no rounding does harm; then one where rounding
    # up does, and one where `round` does. Then the first, the second and the last
    # rank of a node, on nodes with 1 to 16 GPUs.
    cases=(
        (70, 7),
        (23, 7),
        (26, 7),
        (999, 8),
        *(
            (node * gpus + local_rank, gpus)
            for gpus in range(1, 17)
            for node, local_rank in ((0, 0), (2, min(1, gpus - 1)), (5, gpus - 1))
        ),
    ),
    expect=lambda rank, gpus: tuple(map(Count, divmod(rank, gpus))),
    instead="The arithmetic is one line.",
    mistakes=(
        Mistake(
            like=lambda rank, gpus: (rank % gpus, rank // gpus),
            says="The two numbers changed places: first the node, then the local rank.",
        ),
        Mistake(
            when=lambda attempt: (
                type(attempt.got[1]) is int
                and attempt.got[0] == attempt.args[0] / attempt.args[1]
                and isinstance(attempt.got[0], float)
            ),
            says="`/` gives a fraction. A rank is on one whole node: `//` divides and "
            "drops the rest.",
        ),
        Mistake(
            like=lambda rank, gpus: (round(rank / gpus), rank % gpus),
            says="`round` goes up to the next node when more than half of this one "
            "lies before the rank. Drop the rest instead: `//`.",
        ),
        Mistake(
            like=lambda rank, gpus: (-(-rank // gpus), rank % gpus),
            says="Rounding up counts this node among the nodes before it. Drop the "
            "rest instead: `//`.",
        ),
        Mistake(
            like=lambda rank, gpus: (rank // gpus, rank),
            says="The node is right. The second number is still the rank: subtract "
            "the ranks of the nodes before, or take the rest of the division.",
        ),
        Mistake(
            like=lambda rank, gpus: (rank // gpus, rank - rank // gpus),
            says="The node is right. For the local rank you subtracted the number of "
            "nodes before: subtract the number of ranks on them.",
        ),
        Mistake(
            like=lambda rank, gpus: (rank // gpus + 1, rank % gpus + 1),
            says="Both are one too many: nodes and local ranks count from 0.",
        ),
        Mistake(
            like=lambda rank, gpus: (rank // gpus + 1, rank % gpus),
            says="The node is one too many: nodes count from 0.",
        ),
        Mistake(
            like=lambda rank, gpus: (rank // gpus, rank % gpus + 1),
            says="The local rank is one too many: local ranks count from 0.",
        ),
        # In the first case, rank 70, it can only be `rank - 1`: see the next one.
        Mistake(
            like=lambda rank, gpus: divmod(rank - 1, gpus) if rank % gpus else (),
            says="The node is right, the local rank is one too small. Was it computed "
            "with `/`? Dividing leaves a rounding error, and `int()` makes 1 of "
            "1.9999. Work with whole numbers (`//` and `%`).",
        ),
        Mistake(
            like=lambda rank, gpus: divmod(rank - 1, gpus),
            says="That is the place of the rank before: ranks count from 0, so "
            "nothing has to be subtracted.",
        ),
        Mistake(
            like=lambda rank, gpus: (rank // gpus, rank // gpus),
            says="Both numbers are the node. The local rank is the rest of the "
            "division: `%`.",
        ),
        Mistake(
            like=lambda rank, gpus: (rank % gpus, rank % gpus),
            says="Both numbers are the local rank. The node is the number of full "
            "nodes that come before the rank: `//`.",
        ),
        Mistake(
            like=lambda rank, gpus: divmod(rank, max(gpus - 1, 1)),
            says="The last local rank is `gpus_per_node - 1`, but each node holds "
            "`gpus_per_node` ranks.",
        ),
        Mistake(
            like=lambda rank, gpus: divmod(rank, 4),
            says="That is right for 4 GPUs per node. Use `gpus_per_node`.",
        ),
        Mistake(
            like=lambda rank, gpus: divmod(rank, 8),
            says="That is right for 8 GPUs per node. Use `gpus_per_node`.",
        ),
        Mistake(
            like=lambda rank, gpus: divmod(gpus, rank or 1),
            says="The arguments changed places: first the rank, then the GPUs per "
            "node.",
        ),
        Mistake(
            like=lambda rank, gpus: (1, 2),
            says="That is the place of the example. Compute it from the arguments.",
        ),
        Mistake(
            like=lambda rank, gpus: (rank // gpus - 1, rank % gpus),
            says="The node is one too few: nodes count from 0.",
        ),
        Mistake(
            when=lambda attempt: attempt.got in attempt.expected,
            says="Return both numbers: `return node, local_rank`.",
        ),
        Mistake(
            when=lambda attempt: attempt.got[1] == attempt.args[1],
            says="A local rank is always smaller than `gpus_per_node`: where it would "
            "get as large, the next node begins.",
        ),
        Mistake(
            when=lambda attempt: has_other_numbers(attempt, 0),
            says="The node is wrong. It is the number of full nodes that come before "
            "the rank.",
        ),
        Mistake(
            when=lambda attempt: has_other_numbers(attempt, 1),
            says="The node is right, the local rank is not. It is what is left of the "
            "rank when the ranks on the nodes before are taken away.",
        ),
    ),
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


def seconds(numel, element_size, latency_us, gb_s, micro=1e-6, giga=1e9, per_byte=1):
    """Latency plus bytes over bandwidth; a mistake changes one of the units."""
    return latency_us * micro + numel * element_size * per_byte / (gb_s * giga)


def is_off_by_a_power_of_ten(attempt):
    """Is it the right number with the decimal point at another place?"""
    steps = math.log10(attempt.got / attempt.expected)
    return round(steps) != 0 and abs(steps - round(steps)) < 1e-4


TRANSFER_SECONDS = Task(
    id="01.transfer_seconds",
    title="Seconds for a tensor",
    stars=2,
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
    expect=seconds,
    unit="seconds",
    mistakes=(
        Mistake(
            like=partial(seconds, giga=2**30),
            says="You took 1 GB as 2**30 bytes: that is a GiB, 7 % more. Bandwidths "
            "are given in GB/s, and 1 GB is 10**9 bytes.",
        ),
        Mistake(
            like=partial(seconds, per_byte=8),
            says="The part for the bytes is 8 times too long. The size is in bytes "
            "and the bandwidth in GB/s, with a capital B: bits do not come in.",
        ),
        Mistake(
            like=partial(seconds, per_byte=1 / 8),
            says="The part for the bytes is 8 times too short. The size is in bytes "
            "and the bandwidth in GB/s, with a capital B: bits do not come in.",
        ),
        Mistake(
            like=partial(seconds, per_byte=2),
            says="The part for the bytes is twice too long. The bandwidth is given for "
            "one way, and the tensor goes one way: nothing is doubled or halved.",
        ),
        Mistake(
            like=partial(seconds, giga=2**30, per_byte=8),
            says="Two units went wrong. The size is in bytes and the bandwidth in "
            "GB/s, with a capital B: bits do not come in. And 1 GB is 10**9 bytes, "
            "not 2**30.",
        ),
        Mistake(
            like=lambda n, size, us, gb: max(us * 1e-6, seconds(n, size, 0, gb)),
            says="That is the longer of the two parts. First the latency passes, then "
            "the bytes flow: add them.",
        ),
        Mistake(
            like=lambda n, size, us, gb: seconds(n, size, 0, gb),
            says="The latency is missing. Every message pays it once, however small "
            "it is.",
        ),
        Mistake(
            when=lambda attempt: attempt.got == 0,
            says="The bytes take no time at all. Did you divide with `//`, or round?",
        ),
        Mistake(
            like=lambda n, size, us, gb: seconds(n, 1, us, gb),
            says="You counted the elements as bytes. Each element has `element_size` "
            "bytes.",
        ),
        Mistake(
            like=lambda n, size, us, gb: seconds(n, 4, us, gb),
            says="You took 4 bytes for every element. That is float32: bfloat16 has "
            "2. Use `element_size`.",
        ),
        Mistake(
            like=lambda n, size, us, gb: seconds(n, 8, us, gb),
            says="You multiplied the number of elements by 8. Each element has "
            "`element_size` bytes.",
        ),
        Mistake(
            like=lambda n, size, us, gb: seconds(n, 8 * size, us, gb, per_byte=8),
            says="`element_size` is in bytes already, and so is the bandwidth: "
            "nothing has to be multiplied by 8.",
        ),
        Mistake(
            like=partial(seconds, micro=1),
            says="You added the latency as if it were in seconds. A microsecond is "
            "1e-6 seconds.",
        ),
        Mistake(
            like=partial(seconds, micro=1e-3),
            says="You took the latency for milliseconds. A microsecond is 1e-6 "
            "seconds.",
        ),
        Mistake(
            like=partial(seconds, micro=1e-9),
            says="You took the latency for nanoseconds. A microsecond is 1e-6 seconds.",
        ),
        Mistake(
            like=partial(seconds, micro=1e6),
            says="The latency is multiplied by a million. A microsecond is a millionth "
            "of a second: 1e-6.",
        ),
        Mistake(
            like=partial(seconds, micro=-1e-6),
            says="The latency is subtracted. It comes on top of the time for the "
            "bytes.",
        ),
        Mistake(
            like=lambda n, size, us, gb: seconds(n, size, n * us, gb),
            says="You paid the latency for every element. A tensor travels as one "
            "message: it pays once.",
        ),
        Mistake(
            like=partial(seconds, giga=1),
            says="You divided bytes by GB/s. A bandwidth of 1 GB/s is 10**9 bytes per "
            "second.",
        ),
        Mistake(
            like=partial(seconds, giga=1e6),
            says="You took the bandwidth for MB/s. 1 GB is 10**9 bytes. (Or is the "
            "result in milliseconds? Return seconds.)",
        ),
        Mistake(
            like=lambda n, size, us, gb: us * 1e-6 + n * size * gb * 1e9,
            says="You multiplied by the bandwidth. Twice the bandwidth must take half "
            "of the time: divide by it.",
        ),
        *(
            Mistake(
                like=lambda *args, factor=factor: factor * seconds(*args),
                says=f"That is right in {unit}. Return seconds.",
            )
            for factor, unit in ((1e6, "microseconds"), (1e3, "milliseconds"))
        ),
        Mistake(
            when=is_rounded,
            says="It is rounded. Times like these are tiny: return all digits.",
        ),
        Mistake(
            when=is_off_by_a_power_of_ten,
            says="All digits are right, but the decimal point is in the wrong place. "
            "Check each power of ten: the result must be in seconds.",
        ),
        Mistake(
            like=partial(seconds, micro=2e-6),
            says="The latency is paid twice. One message pays it once.",
        ),
        Mistake(
            like=partial(seconds, giga=1e3 * 2**20),
            says="You took 1 MB as 2**20 bytes: that is a MiB. 1 GB is 10**9 bytes.",
        ),
        Mistake(
            like=lambda n, size, us, gb: us * 1e-6 + gb * 1e9 / (n * size or 1),
            says="The division is upside down: bytes over bytes per second leaves "
            "seconds.",
        ),
        Mistake(
            like=lambda n, size, us, gb: 0.00051,
            says="That is the result of the example. Compute it from the arguments.",
        ),
        Mistake(
            when=lambda attempt: attempt.error == "ZeroDivisionError",
            says="The latency or the size may be 0: only the bandwidth is divided by. "
            "Are the arguments in the order of the stub?",
        ),
    ),
    otherwise="Bring every number to bytes and seconds, one after the other, and "
    "print them: how many bytes, how many bytes per second, which latency in "
    "seconds?",
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


def sending(n, element_size, ports, gbit_s, giga=1e9, bits_per_byte=8):
    """The repaired plan; a mistake changes one of the units."""
    return n * element_size / giga / (ports * gbit_s / bits_per_byte)


def has_a_latency(attempt):
    """Is it the right number and some microseconds?"""
    micros = (attempt.got - attempt.expected) * 1e6
    return 0.5 < micros < 20_000 and abs(micros - round(micros)) < 1e-3


SPOT_THE_UNITS = Task(
    id="01.spot_the_units",
    title="Spot the units",
    stars=2,
    cases=(
        (7_000_000_000, 2, 3, 400),  # here every mistake below gives another number
        (70_000_000_000, 2, 8, 400),
        (1_000_000, 4, 1, 25),
        (405_000_000_000, 1, 4, 200),
    ),
    expect=sending,
    unit="seconds",
    tolerance=1e-6,  # less than a factor such as 8.59 for both mistakes is wrong by
    mistakes=(
        Mistake(
            like=partial(sending, giga=2**30, bits_per_byte=1),
            says="That is what the old plan says. One line takes a GiB for a GB, "
            "another takes Gb for GB.",
        ),
        Mistake(
            like=partial(sending, bits_per_byte=1),
            says="The gigabytes are right now. But it is still 8 times too fast: "
            "`port_speed` is in Gb/s, with a small b. That is bits.",
        ),
        Mistake(
            like=partial(sending, giga=2**30),
            says="The bits are right now. But it is still 7 % too fast: 1024**3 bytes "
            "are a GiB. Networks count in GB, and 1 GB is 10**9 bytes.",
        ),
        Mistake(
            like=partial(sending, bits_per_byte=1 / 8),
            says="The 8 is on the wrong side. A byte is 8 bits, so a port carries 8 "
            "times fewer bytes than bits, and sending takes longer.",
        ),
        Mistake(
            like=partial(sending, giga=2**30, bits_per_byte=1 / 8),
            says="The 8 is on the wrong side: a port carries 8 times fewer bytes than "
            "bits. And 1024**3 bytes are a GiB; 1 GB is 10**9 bytes.",
        ),
        Mistake(
            like=partial(sending, bits_per_byte=64),
            says="The 8 comes in twice. Either turn the size into bits or the speed "
            "into bytes, not both.",
        ),
        Mistake(
            like=partial(sending, bits_per_byte=16),
            says="The speed is halved. A network port of 400 Gb/s carries 400 each "
            "way. It is figures of NVLink and PCIe that may count both directions.",
        ),
        Mistake(
            like=lambda n, size, ports, gbit: sending(n, size, 1 / ports, gbit),
            says="The speed is divided by `ports`. More ports are faster: multiply.",
        ),
        Mistake(
            like=lambda n, size, ports, gbit: n * size / 1e9 / (ports * gbit // 8),
            says="`//` drops everything after the point. Use `/`.",
        ),
        Mistake(
            like=partial(sending, bits_per_byte=10),
            says="A byte is 8 bits, not 10.",
        ),
        Mistake(
            like=partial(sending, bits_per_byte=8 * 2**30 / 1e9),
            says="Now the speed is counted in units of 1024**3. In Gb/s and in GB/s, "
            "giga is 10**9.",
        ),
        Mistake(
            like=lambda n, size, ports, gbit: sending(n, size, 1, gbit),
            says="The units are right now. But all ports send at the same time: "
            "`ports` is missing.",
        ),
        Mistake(
            like=lambda n, size, ports, gbit: sending(n, 1, ports, gbit),
            says="The units are right now. But each number has `element_size` bytes, "
            "and they are missing.",
        ),
        Mistake(
            like=lambda n, size, ports, gbit: sending(n, 8, ports, gbit),
            says="Each number has `element_size` bytes, not 8. The 8 belongs to the "
            "bits of `port_speed`.",
        ),
        Mistake(
            like=lambda n, size, ports, gbit: 0.2,
            says="That is the result of the example. Compute it from the arguments.",
        ),
        Mistake(
            when=is_rounded,
            says="It is rounded. Such a time may be tiny: return all digits.",
        ),
        Mistake(
            when=has_a_latency,
            says="A latency was added. The plan may leave it out, and so does the "
            "check: for messages of this size it is lost in the digits.",
        ),
        *(
            Mistake(
                like=lambda n, size, ports, gbit, wrong=wrong: sending(
                    n, wrong, ports, gbit
                ),
                says=f"That is right for numbers of {wrong} bytes. Use `element_size`.",
            )
            for wrong in (2, 4)
        ),
        *(
            Mistake(
                like=lambda n, size, ports, gbit, units=units: sending(
                    n, 1, ports, gbit, *units
                ),
                says="Each number has `element_size` bytes, and they are missing. The "
                "units are not right either: GB are not GiB, and Gb are not GB.",
            )
            for units in ((2**30, 1), (1e9, 1), (2**30, 8))
        ),
        Mistake(
            when=is_off_by_a_power_of_ten,
            says="All digits are right, but the decimal point is in the wrong place: "
            "giga is 10**9, and the result must be in seconds.",
        ),
        Mistake(
            when=lambda attempt: math.isclose(
                attempt.got, attempt.expected, rel_tol=1e-3
            ),
            says="Almost, but not exactly. Is it rounded, or repaired by one factor? "
            "Repair each of the two lines by itself: then all digits are right.",
        ),
    ),
    otherwise="Two lines of the plan need another number, and nothing else must "
    "change. Say the unit of each line aloud: GB, GB/s, seconds.",
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


def nccl_works(tensors_on, ranks, gpus):
    """GPU tensors, and a GPU for each rank."""
    return tensors_on == "cuda" and ranks <= gpus


def chose(name, where):
    """Did the answer choose this backend in such a situation?"""
    return lambda attempt: attempt.got == name and where(*attempt.args)


WHICH_BACKEND = Task(
    id="01.which_backend",
    title="Which backend?",
    stars=1,
    cases=(
        ("cpu", 4, 0),
        ("cuda", 8, 8),
        ("cpu", 8, 8),
        ("cuda", 4, 8),
        ("cuda", 16, 8),
        ("cuda", 1, 1),
        ("cuda", 2, 1),
        ("cpu", 1, 1),
        ("cpu", 2, 8),
        ("cpu", 16, 8),
        ("cuda", 7, 8),
        ("cuda", 9, 8),
        ("cuda", 3, 4),
        ("cuda", 5, 4),
        ("cuda", 16, 16),
    ),
    expect=lambda *situation: "nccl" if nccl_works(*situation) else "gloo",
    mistakes=(
        Mistake(
            when=chose("nccl", lambda tensors_on, ranks, gpus: gpus == 0),
            says="nccl works between GPUs, and these nodes have none.",
        ),
        Mistake(
            when=chose("nccl", lambda tensors_on, ranks, gpus: tensors_on == "cpu"),
            says="There are GPUs here, but the tensors are in the CPU's memory. nccl "
            "takes GPU tensors only.",
        ),
        Mistake(
            when=chose("nccl", lambda tensors_on, ranks, gpus: ranks > gpus),
            says="There are more ranks than GPUs, so some ranks share a GPU. nccl "
            "wants a GPU for each rank: sharing ends in an error (`Duplicate GPU "
            "detected`) or a deadlock.",
        ),
        Mistake(
            when=chose("gloo", lambda tensors_on, ranks, gpus: ranks == gpus),
            says="gloo could average these GPU tensors, but slowly. There is a GPU "
            "for each rank here: nccl works, and is made for it. (Only the arguments "
            "count, not the GPUs of this machine.)",
        ),
        Mistake(
            when=chose("gloo", lambda tensors_on, ranks, gpus: ranks < gpus),
            says="There is a GPU for each rank here, and some are left over. That is "
            "no problem for nccl: it uses the GPUs that the ranks use.",
        ),
        Mistake(
            when=lambda attempt: attempt.got == "mpi",
            says="PyTorch has mpi only where it was built from source with an MPI "
            "library. Choose between nccl and gloo.",
        ),
        Mistake(
            when=lambda attempt: "cpu:gloo" in attempt.got,
            says="PyTorch accepts that text, and then picks a backend for each tensor. "
            "Here, name the one that these tensors need.",
        ),
        Mistake(
            when=lambda attempt: isinstance(attempt.got, bool),
            says='Return the name: "nccl" or "gloo".',
        ),
        Mistake(
            when=lambda attempt: attempt.got.strip().lower() not in ("nccl", "gloo"),
            says='There are two to choose from: "nccl" and "gloo".',
        ),
    ),
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

PREDICT_RANK = Task(
    id="01.predict_rank",
    title="Predict the rank",
    stars=1,
    where="value",
    expect=lambda: 2 * 8 + 5,
    mistakes=(
        Mistake(
            like=lambda: 3 * 8 + 5,
            says="That would be on a fourth node. Three nodes are 0, 1 and 2: only two "
            "come before the last one.",
        ),
        Mistake(
            like=lambda: 2 * 8 + 5 + 1,
            says="That is one too many: ranks count from 0, and so do local ranks.",
        ),
        Mistake(
            like=lambda: 2 * 8 + 5 - 1,
            says="That is one too few: local ranks count from 0, so local rank 5 has "
            "five others before it on its node.",
        ),
        Mistake(
            like=lambda: 1 * 8 + 5,
            says="That is on the node in the middle. The last of three nodes is node "
            "2.",
        ),
        Mistake(
            like=lambda: 5,
            says="That is its local rank, and every node has a local rank 5.",
        ),
        Mistake(
            like=lambda: 3 * 5 + 2,
            says="You numbered the GPUs across the nodes. The ranks go node by node: "
            "first all of node 0, then all of node 1.",
        ),
        Mistake(
            like=lambda: 2 + 5,
            says="Each node before this one holds 8 ranks, not one.",
        ),
        Mistake(
            like=lambda: 5 * 8 + 2,
            says="Node and local rank changed places. There are only 24 ranks.",
        ),
        Mistake(
            like=lambda: 2 * 8,
            says="That is the first rank on the last node: its local rank is 0.",
        ),
        Mistake(
            like=lambda: 3 * 8 - 1,
            says="That is the last rank of all: its local rank is 7.",
        ),
        Mistake(
            like=lambda: 3 * 8,
            says="That is the world size. The ranks go from 0 to one less.",
        ),
    ),
    otherwise="A rank is the number of ranks that come before it: all those on the "
    "nodes before, and those before it on its own node.",
    hints=(
        "What is the number of the last node, when the first one is node 0?",
        "Two full nodes come before it. How many ranks are on them?",
        "For local rank 5 on the middle node it goes like this:\n"
        "  ranks before that node   1 * 8 = 8\n"
        "  its rank                 8 + 5 = 13",
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
