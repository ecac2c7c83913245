"""Lesson 01: typical wrong answers, and different right ones."""

import functools
import itertools
import math
import os
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist

from course_utils import costs
from course_utils.notebook.check import find_task
from tests.answers import Answers

ANSWERS = Answers()

# ----------------------------------------------------------------------- 01.rank_of


@ANSWERS.wrong("01.rank_of", "not attempted", "It still raises NotImplementedError")
def stub(node, local_rank, gpus_per_node):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong(
    "01.rank_of",
    "wrong",
    "Node and local rank changed places",
    did="swapped node and local rank",
)
def node_and_gpu_changed_places(node, local_rank, gpus_per_node):
    return local_rank * gpus_per_node + node


@ANSWERS.wrong("01.rank_of", "wrong", "it starts again at 0 on every node")
def only_the_local_rank(node, local_rank, gpus_per_node):
    return local_rank


@ANSWERS.wrong("01.rank_of", "wrong", "holds `gpus_per_node` ranks, not one")
def forgot_to_multiply(node, local_rank, gpus_per_node):
    return node + local_rank


@ANSWERS.wrong("01.rank_of", "wrong", "That is the first rank of the node.")
def first_of_the_node(node, local_rank, gpus_per_node):
    return node * gpus_per_node


@ANSWERS.wrong("01.rank_of", "wrong", "It is one too many: ranks, nodes")
def ranks_from_one(node, local_rank, gpus_per_node):
    return node * gpus_per_node + local_rank + 1


@ANSWERS.wrong("01.rank_of", "wrong", "It is one too few: ranks, nodes")
def local_ranks_from_one(node, local_rank, gpus_per_node):
    return node * gpus_per_node + local_rank - 1


@ANSWERS.wrong("01.rank_of", "wrong", "One node is missing. Nodes count from 0")
def nodes_from_one(node, local_rank, gpus_per_node):
    return (node - 1) * gpus_per_node + local_rank


@ANSWERS.wrong("01.rank_of", "wrong", "There is a node too many.")
def one_node_more(node, local_rank, gpus_per_node):
    return (node + 1) * gpus_per_node + local_rank


@ANSWERS.wrong("01.rank_of", "wrong", "no parentheses are needed")
def everything_multiplied(node, local_rank, gpus_per_node):
    return (node + local_rank) * gpus_per_node


@ANSWERS.wrong("01.rank_of", "wrong", "The last local rank is `gpus_per_node - 1`, but")
def one_gpu_less(node, local_rank, gpus_per_node):
    return node * (gpus_per_node - 1) + local_rank


@ANSWERS.wrong("01.rank_of", "wrong", "That is right for 4 GPUs per node.")
def always_four(node, local_rank, gpus_per_node):
    return node * 4 + local_rank


@ANSWERS.wrong("01.rank_of", "wrong", "That is right for 8 GPUs per node.")
def always_eight(node, local_rank, gpus_per_node):
    return node * 8 + local_rank


@ANSWERS.wrong("01.rank_of", "wrong", "That is the number of the example.")
def copied_the_example(node, local_rank, gpus_per_node):
    return 6


@ANSWERS.wrong("01.rank_of", "wrong", "Something counts from 1 here.")
def everything_from_one(node, local_rank, gpus_per_node):
    return (node - 1) * gpus_per_node + (local_rank - 1)


@ANSWERS.wrong("01.rank_of", "wrong", "It is rank 0 whatever the arguments are.")
def asked_the_environment(node, local_rank, gpus_per_node):
    return int(os.environ["RANK"])


@ANSWERS.wrong("01.rank_of", "crashed", "There is no process group here")
def asked_the_group(node, local_rank, gpus_per_node):
    return dist.get_rank()


@ANSWERS.wrong("01.rank_of", "wrong", "did you forget `return`?")
def forgot_to_return(node, local_rank, gpus_per_node):
    rank = node * gpus_per_node + local_rank  # noqa: F841


@ANSWERS.wrong("01.rank_of", "wrong", "use `return`, not print")
def printed_it(node, local_rank, gpus_per_node):
    print(node * gpus_per_node + local_rank)


@ANSWERS.wrong("01.rank_of", "wrong", "That is text; a number was expected.")
def as_text(node, local_rank, gpus_per_node):
    return f"rank {node * gpus_per_node + local_rank}"


@ANSWERS.wrong("01.rank_of", "wrong", "Your code calls rank_of, line")
def called_the_library(node, local_rank, gpus_per_node):
    return costs.rank_of(node, local_rank, gpus_per_node)


@ANSWERS.wrong("01.rank_of", "wrong", "what you build here yourself.")
def imported_it_inside(node, local_rank, gpus_per_node):
    from course_utils.costs import rank_of

    return rank_of(node, local_rank, gpus_per_node)


@ANSWERS.wrong("01.rank_of", "wrong", "nothing can be counted or indexed with one")
def as_a_float(node, local_rank, gpus_per_node):
    return float(node * gpus_per_node + local_rank)


@ANSWERS.wrong("01.rank_of", "wrong", "nothing can be counted or indexed with one")
def as_a_tensor_of_floats(node, local_rank, gpus_per_node):
    return torch.tensor(node) * torch.tensor(1.0 * gpus_per_node) + local_rank


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "nothing can be counted or indexed")
def both_as_floats(rank, gpus_per_node):
    return [float(number) for number in divmod(rank, gpus_per_node)]


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "nothing can be counted or indexed")
def in_an_array_of_floats(rank, gpus_per_node):
    return np.array(divmod(rank, gpus_per_node), dtype=np.float32)


@ANSWERS.right("01.node_and_local_rank")
def in_an_array(rank, gpus_per_node):
    return np.array(divmod(rank, gpus_per_node))


@ANSWERS.wrong("01.rank_of", "wrong", "The roles are mixed up")
def roles_mixed_up(node, local_rank, gpus_per_node):
    return node * local_rank + gpus_per_node


@ANSWERS.wrong("01.rank_of", "wrong", "A rank is the number of ranks that come before")
def something_else(node, local_rank, gpus_per_node):
    return (node + 1) * (local_rank + 1)


BEFORE = "A rank is the number of ranks that come before it"


@ANSWERS.wrong("01.rank_of", "wrong", BEFORE)
def last_of_the_node(node, local_rank, gpus_per_node):
    return node * gpus_per_node + gpus_per_node - 1


@ANSWERS.wrong("01.rank_of", "wrong", BEFORE)
def from_the_end_of_the_node(node, local_rank, gpus_per_node):
    return node * gpus_per_node + gpus_per_node - 1 - local_rank


@ANSWERS.wrong("01.rank_of", "wrong", BEFORE)
def nodes_times_local_rank(node, local_rank, gpus_per_node):
    return (node + 1) * local_rank


@ANSWERS.wrong("01.rank_of", "wrong", BEFORE)
def bit_by_bit(node, local_rank, gpus_per_node):
    return node * gpus_per_node | local_rank


for library in (costs.rank_of, functools.partial(costs.rank_of)):
    ANSWERS.wrong(
        "01.rank_of", "wrong", "Your code calls rank_of of course_utils.costs."
    )(library)


@ANSWERS.right("01.rank_of")
def multiplied_and_added(node, local_rank, gpus_per_node):
    return node * gpus_per_node + local_rank


@ANSWERS.right("01.rank_of")
def counted_in_a_loop(node, local_rank, gpus_per_node):
    rank = local_rank
    for _ in range(node):
        rank += gpus_per_node
    return rank


@ANSWERS.right("01.rank_of")
def looked_up_in_a_table(machine, gpu, n):
    table = torch.arange((machine + 1) * n).reshape(machine + 1, n)
    return table[machine, gpu]


@ANSWERS.right("01.rank_of")
@functools.cache
def called_again_for_each_node(node, local_rank, gpus_per_node):
    if node == 0:
        return local_rank
    before = called_again_for_each_node(node - 1, local_rank, gpus_per_node)
    return before + gpus_per_node


@ANSWERS.right("01.rank_of")
def with_a_check_of_the_arguments(node, local_rank, gpus_per_node):
    if not 0 <= local_rank < gpus_per_node:
        raise ValueError(f"local_rank is {local_rank}")
    return np.int64(node * gpus_per_node + local_rank)


# ----------------------------------------------------------- 01.node_and_local_rank


@ANSWERS.wrong("01.node_and_local_rank", "not attempted", "NotImplementedError")
def stub_of_the_way_back(rank, gpus_per_node):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "The two numbers changed places")
def local_rank_first(rank, gpus_per_node):
    return rank % gpus_per_node, rank // gpus_per_node


@ANSWERS.wrong(
    "01.node_and_local_rank",
    "wrong",
    "`/` gives a fraction.",
    did="`rank / gpus_per_node`",
)
def a_fraction_of_a_node(rank, gpus_per_node):
    return rank / gpus_per_node, rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "`round` goes up to the next node")
def rounded(rank, gpus_per_node):
    return round(rank / gpus_per_node), rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "Rounding up counts this node")
def rounded_up(rank, gpus_per_node):
    return math.ceil(rank / gpus_per_node), rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "The second number is still the rank")
def the_rank_again(rank, gpus_per_node):
    return rank // gpus_per_node, rank


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "you subtracted the number of nodes")
def subtracted_the_node(rank, gpus_per_node):
    node = rank // gpus_per_node
    return node, rank - node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "Both are one too many")
def both_from_one(rank, gpus_per_node):
    return rank // gpus_per_node + 1, rank % gpus_per_node + 1


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "The node is one too many")
def node_from_one(rank, gpus_per_node):
    return rank // gpus_per_node + 1, rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "The local rank is one too many")
def local_rank_from_one(rank, gpus_per_node):
    return rank // gpus_per_node, rank % gpus_per_node + 1


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "Both numbers are the node.")
def node_and_node(rank, gpus_per_node):
    return rank // gpus_per_node, rank // gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "Both numbers are the local rank.")
def local_rank_and_local_rank(rank, gpus_per_node):
    return rank % gpus_per_node, rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "the place of the rank before")
def rank_from_one(rank, gpus_per_node):
    return (rank - 1) // gpus_per_node, (rank - 1) % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "`int()` makes 1 of 1.9999")
def cut_from_the_fraction(rank, gpus_per_node):
    node = rank // gpus_per_node
    return node, int((rank / gpus_per_node - node) * gpus_per_node)


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "The last local rank is")
def divided_by_one_less(rank, gpus_per_node):
    return divmod(rank, gpus_per_node - 1)


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "That is right for 4 GPUs per node.")
def always_four_back(rank, gpus_per_node):
    return divmod(rank, 4)


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "That is right for 8 GPUs per node.")
def always_eight_back(rank, gpus_per_node):
    return divmod(rank, 8)


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "Return both numbers")
def only_the_node(rank, gpus_per_node):
    return rank // gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "Return both numbers")
def only_the_place(rank, gpus_per_node):
    return rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "It has 3 items; 2 were expected.")
def three_numbers(rank, gpus_per_node):
    return rank, rank // gpus_per_node, rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "a dictionary; a tuple was expected")
def a_dictionary(rank, gpus_per_node):
    return {"node": rank // gpus_per_node, "local_rank": rank % gpus_per_node}


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "the next node begins")
def loses_the_first_of_each_node(rank, gpus_per_node):
    node, place = 0, rank
    while place > gpus_per_node:  # must be >=
        node, place = node + 1, place - gpus_per_node
    return node, place


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "The arguments changed places")
def arguments_changed_places(gpus_per_node, rank):
    return divmod(rank, gpus_per_node)


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "That is the place of the example.")
def copied_the_place(rank, gpus_per_node):
    return 1, 2


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "The node is one too few")
def node_one_less(rank, gpus_per_node):
    return rank // gpus_per_node - 1, rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "The node is wrong.")
def twice_the_node(rank, gpus_per_node):
    return 2 * (rank // gpus_per_node), rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "the local rank is not.")
def counted_from_the_end(rank, gpus_per_node):
    return rank // gpus_per_node, gpus_per_node - 1 - rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "nothing can be counted or indexed")
def from_the_fraction(rank, gpus_per_node):
    fraction, node = math.modf(rank / gpus_per_node)
    return node, fraction * gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "calls node_and_local_rank, line")
def called_the_library_back(rank, gpus_per_node):
    return costs.node_and_local_rank(rank, gpus_per_node)


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "(999, 8). It returned None")
def on_the_first_nodes_only(rank, gpus_per_node):
    for node, local_rank in itertools.product(range(16), range(gpus_per_node)):
        if node * gpus_per_node + local_rank == rank:
            return node, local_rank


@ANSWERS.right("01.node_and_local_rank")
def quotient_and_rest(rank, gpus_per_node):
    return rank // gpus_per_node, rank % gpus_per_node


@ANSWERS.right("01.node_and_local_rank")
def with_divmod(rank, gpus_per_node):
    return divmod(rank, gpus_per_node)


@ANSWERS.right("01.node_and_local_rank")
def subtracts_node_by_node(rank, gpus_per_node):
    node = 0
    while rank >= gpus_per_node:
        node, rank = node + 1, rank - gpus_per_node
    return [node, rank]


@ANSWERS.right("01.node_and_local_rank")
def as_a_tensor(rank, gpus_per_node):
    return torch.tensor([rank // gpus_per_node, rank % gpus_per_node])


@ANSWERS.right("01.node_and_local_rank")
def drops_the_fraction(rank, gpus_per_node):
    node = int(rank / gpus_per_node)
    return torch.tensor(node), rank - node * gpus_per_node


# -------------------------------------------------------------- 01.transfer_seconds


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You took 1 GB as 2**30 bytes")
def gibibytes(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * element_size / (bandwidth_gb_s * 1024**3)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "8 times too long")
def size_in_bits(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * element_size * 8 / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "8 times too long")
def bandwidth_from_bits(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us / 1e6 + numel * element_size / (bandwidth_gb_s / 8 * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "8 times too short")
def size_from_bits(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * element_size / 8 / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "nothing has to be multiplied by 8")
def bits_twice(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * element_size * 8 / (bandwidth_gb_s * 1e9 / 8)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "The bandwidth is given for one way")
def half_of_the_bandwidth(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us / 1e6 + numel * element_size / (bandwidth_gb_s / 2 * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "nothing is doubled or halved")
def everything_there_and_back(numel, element_size, latency_us, bandwidth_gb_s):
    return 2 * exactly(numel, element_size, latency_us, bandwidth_gb_s)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "It is rounded.")
def rounded_to_tenths_of_nanoseconds(numel, element_size, latency_us, bandwidth_gb_s):
    return round(latency_us / 1e6 + numel * element_size / (bandwidth_gb_s * 1e9), 10)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "That is the longer of the two parts.")
def small_messages_are_free(numel, element_size, latency_us, bandwidth_gb_s):
    nbytes = numel * element_size if numel * element_size >= 4096 else 0
    return latency_us / 1e6 + nbytes / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong(
    "01.transfer_seconds",
    "wrong",
    "The latency is missing.",
    did="left out the latency",
)
def no_latency(numel, element_size, latency_us, bandwidth_gb_s):
    return numel * element_size / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "The bytes take no time at all.")
def whole_seconds(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * element_size // (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "That is the longer of the two parts.")
def larger_part(numel, element_size, latency_us, bandwidth_gb_s):
    return max(latency_us * 1e-6, numel * element_size / (bandwidth_gb_s * 1e9))


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You counted the elements as bytes.")
def elements_as_bytes(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "4 bytes for every element")
def always_float32(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * 4 / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "as if it were in seconds")
def latency_in_seconds(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us + numel * element_size / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You took the latency for milliseconds.")
def latency_in_milliseconds(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us / 1e3 + numel * element_size / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You took the latency for nanoseconds.")
def latency_in_nanoseconds(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-9 + numel * element_size / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "The latency is multiplied by a million")
def latency_upside_down(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e6 + numel * element_size / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "The latency is subtracted.")
def latency_subtracted(numel, element_size, latency_us, bandwidth_gb_s):
    return numel * element_size / (bandwidth_gb_s * 1e9) - latency_us * 1e-6


@ANSWERS.wrong("01.transfer_seconds", "wrong", "latency for every element")
def latency_for_every_element(numel, element_size, latency_us, bandwidth_gb_s):
    return numel * (latency_us * 1e-6 + element_size / (bandwidth_gb_s * 1e9))


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You divided bytes by GB/s.")
def forgot_giga(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * element_size / bandwidth_gb_s


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You took the bandwidth for MB/s.")
def mega_for_giga(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * element_size / (bandwidth_gb_s * 1e6)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You divided bytes by GB/s.")
def nothing_converted(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us + numel * element_size / bandwidth_gb_s


@ANSWERS.wrong("01.transfer_seconds", "wrong", "Bring every number to bytes")
def one_element(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + element_size / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You multiplied by the bandwidth.")
def multiplied_by_bandwidth(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * element_size * (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "It is rounded.")
def rounded_to_milliseconds(numel, element_size, latency_us, bandwidth_gb_s):
    exact = latency_us * 1e-6 + numel * element_size / (bandwidth_gb_s * 1e9)
    return round(exact, 3)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "It is rounded.")
def rounded_to_nanoseconds(numel, element_size, latency_us, bandwidth_gb_s):
    exact = latency_us * 1e-6 + numel * element_size / (bandwidth_gb_s * 1e9)
    return round(exact, 9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "It is rounded.")
def rounded_to_microseconds(numel, element_size, latency_us, bandwidth_gb_s):
    exact = latency_us * 1e-6 + numel * element_size / (bandwidth_gb_s * 1e9)
    return round(exact, 6)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "That is text; a number was expected.")
def with_its_unit(numel, element_size, latency_us, bandwidth_gb_s):
    return f"{latency_us * 1e-6 + numel * element_size / (bandwidth_gb_s * 1e9)} s"


@ANSWERS.wrong("01.transfer_seconds", "wrong", "Two units went wrong.")
def bits_and_gibibytes(numel, element_size, latency_us, bandwidth_gb_s):
    bits = numel * element_size * 8
    return latency_us * 1e-6 + bits / (bandwidth_gb_s * 1024**3)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You took 1 GB as 2**30 bytes")
def gibibytes_and_no_latency(numel, element_size, latency_us, bandwidth_gb_s):
    return numel * element_size / (bandwidth_gb_s * 2**30)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "number of elements by 8")
def eight_for_the_size(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + numel * 8 / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "The latency is paid twice.")
def there_and_back(numel, element_size, latency_us, bandwidth_gb_s):
    return 2 * latency_us * 1e-6 + numel * element_size / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "You took 1 MB as 2**20 bytes")
def mebibytes(numel, element_size, latency_us, bandwidth_gb_s):
    megabytes = numel * element_size / 2**20
    return latency_us * 1e-6 + megabytes / (bandwidth_gb_s * 1e3)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "The division is upside down")
def upside_down(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us * 1e-6 + bandwidth_gb_s * 1e9 / (numel * element_size)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "That is the result of the example.")
def copied_the_seconds(numel, element_size, latency_us, bandwidth_gb_s):
    return 0.00051


@ANSWERS.wrong("01.transfer_seconds", "crashed", "Are the arguments in the order")
def bandwidth_before_latency(numel, element_size, bandwidth_gb_s, latency_us):
    return latency_us * 1e-6 + numel * element_size / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "Bring every number to bytes and")
def no_end(numel, element_size, latency_us, bandwidth_gb_s):
    return math.inf


@ANSWERS.wrong("01.transfer_seconds", "wrong", "That is right in microseconds.")
def in_microseconds(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us + numel * element_size / (bandwidth_gb_s * 1e3)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "Or is the result in milliseconds?")
def in_milliseconds(numel, element_size, latency_us, bandwidth_gb_s):
    return latency_us / 1e3 + numel * element_size / (bandwidth_gb_s * 1e6)


@ANSWERS.right("01.transfer_seconds")
def exactly(numel, element_size, latency_us, bandwidth_gb_s):
    bandwidth = Fraction(bandwidth_gb_s) * 10**9
    return Fraction(latency_us) / 10**6 + numel * element_size / bandwidth


@ANSWERS.right("01.transfer_seconds")
def alpha_and_beta(numel, element_size, latency_us, bandwidth_gb_s):
    alpha, beta = latency_us / 1_000_000, 1 / (bandwidth_gb_s * 10**9)
    return alpha + beta * numel * element_size


@ANSWERS.right("01.transfer_seconds")
def in_microseconds_first(numel, element_size, latency_us, bandwidth_gb_s):
    # 1 GB/s is 1,000 bytes per microsecond.
    return (latency_us + numel * element_size / (bandwidth_gb_s * 1000)) / 1e6


@ANSWERS.wrong("01.transfer_seconds", "wrong", "nothing in `course_utils`")
def converted_for_the_library(numel, element_size, latency_us, bandwidth_gb_s):
    bandwidth = bandwidth_gb_s * costs.GB
    nbytes = numel * element_size
    return costs.transfer_seconds(nbytes, latency=latency_us / 1e6, bandwidth=bandwidth)


@ANSWERS.right("01.transfer_seconds")
def in_bits_throughout(numel, element_size, latency_us, bandwidth_gb_s):
    bits, bits_per_second = numel * element_size * 8, bandwidth_gb_s * 8e9
    return torch.tensor(latency_us * 1e-6 + bits / bits_per_second)


# --------------------------------------------------------------- 01.spot_the_units


@ANSWERS.wrong("01.spot_the_units", "not attempted", "Repair the code in the cell")
def sending_seconds(parameters, element_size, ports, port_speed):
    """As it was given, but for this docstring."""
    gigabytes = parameters * element_size / 1024**3
    gigabytes_per_second = ports * port_speed  # and this comment
    return gigabytes / gigabytes_per_second


@ANSWERS.wrong("01.spot_the_units", "wrong", "That is what the old plan says.")
def only_other_names(parameters, element_size, ports, port_speed):
    gib = parameters * element_size / 2**30
    return gib / (ports * port_speed)


@ANSWERS.wrong(
    "01.spot_the_units",
    "wrong",
    "But it is still 8 times too fast",
    did="repaired only the GiB",
)
def only_gigabytes(parameters, element_size, ports, port_speed):
    gigabytes = parameters * element_size / 1e9
    return gigabytes / (ports * port_speed)


@ANSWERS.wrong(
    "01.spot_the_units",
    "wrong",
    "But it is still 7 % too fast",
    did="repaired only the bits",
)
def only_bits(parameters, element_size, ports, port_speed):
    gigabytes = parameters * element_size / 1024**3
    return gigabytes / (ports * port_speed / 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "The 8 is on the wrong side. A byte")
def speed_times_eight(parameters, element_size, ports, port_speed):
    gigabytes = parameters * element_size / 1e9
    return gigabytes / (ports * port_speed * 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "And 1024**3 bytes are a GiB")
def speed_times_eight_and_gibibytes(parameters, element_size, ports, port_speed):
    return parameters * element_size / 1024**3 / (ports * port_speed * 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "The 8 comes in twice.")
def eight_twice(parameters, element_size, ports, port_speed):
    gigabits = parameters * element_size * 8 / 1e9
    return gigabits / (ports * port_speed / 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "carries 400 each way")
def one_direction(parameters, element_size, ports, port_speed):
    return parameters * element_size / 1e9 / (ports * port_speed / 8 / 2)


@ANSWERS.wrong("01.spot_the_units", "wrong", "More ports are faster")
def divided_by_ports(parameters, element_size, ports, port_speed):
    return parameters * element_size / 1e9 / (port_speed / 8 / ports)


@ANSWERS.wrong("01.spot_the_units", "wrong", "`//` drops everything")
def whole_gigabytes(parameters, element_size, ports, port_speed):
    return parameters * element_size / 1e9 / (ports * port_speed // 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "A byte is 8 bits, not 10.")
def ten_bits(parameters, element_size, ports, port_speed):
    return parameters * element_size / 1e9 / (ports * port_speed / 10)


@ANSWERS.wrong("01.spot_the_units", "wrong", "In Gb/s and in GB/s, giga is 10**9.")
def binary_speed(parameters, element_size, ports, port_speed):
    bytes_per_second = ports * port_speed * 1e9 / 8
    return parameters * element_size / 1e9 / (bytes_per_second / 1024**3)


@ANSWERS.wrong("01.spot_the_units", "wrong", "`ports` is missing")
def one_port(parameters, element_size, ports, port_speed):
    return parameters * element_size / 1e9 / (port_speed / 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "the result must be in seconds")
def milliseconds(parameters, element_size, ports, port_speed):
    return parameters * element_size / 1e6 / (ports * port_speed / 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "`element_size` bytes, and they are")
def no_element_size(parameters, element_size, ports, port_speed):
    return parameters / 1e9 / (ports * port_speed / 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "`element_size` bytes, not 8.")
def eight_bytes_each(parameters, element_size, ports, port_speed):
    return parameters * 8 / 1e9 / (ports * port_speed / 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "That is the result of the example.")
def copied_the_plan(parameters, element_size, ports, port_speed):
    return 0.2


@ANSWERS.wrong("01.spot_the_units", "wrong", "It is rounded.")
def rounded_to_hundredths(parameters, element_size, ports, port_speed):
    return round(parameters * element_size / 1e9 / (ports * port_speed / 8), 2)


@ANSWERS.wrong("01.spot_the_units", "wrong", "Two lines of the plan need another")
def nine_bits(parameters, element_size, ports, port_speed):
    return parameters * element_size / 1e9 / (ports * port_speed / 9)


@ANSWERS.wrong("01.spot_the_units", "wrong", "repaired by one factor?")
def one_factor_for_both(parameters, element_size, ports, port_speed):
    gib = parameters * element_size / 1024**3
    return gib / (ports * port_speed) * 8.59


@ANSWERS.wrong("01.spot_the_units", "wrong", "A latency was added.")
def with_a_latency(parameters, element_size, ports, port_speed):
    return 5e-6 + parameters * element_size / 1e9 / (ports * port_speed / 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "A latency was added.")
def with_a_latency_for_each_port(parameters, element_size, ports, port_speed):
    seconds = parameters * element_size / 1e9 / (ports * port_speed / 8)
    return ports * 10e-6 + seconds


@ANSWERS.wrong("01.spot_the_units", "wrong", "right for numbers of 2 bytes.")
def two_bytes_each(parameters, element_size, ports, port_speed):
    return parameters * 2 / 1e9 / (ports * port_speed / 8)


@ANSWERS.wrong("01.spot_the_units", "wrong", "The units are not right either")
def the_old_plan_without_element_size(parameters, element_size, ports, port_speed):
    return parameters / 1024**3 / (ports * port_speed)


@ANSWERS.right("01.spot_the_units")
def in_float32(parameters, element_size, ports, port_speed):
    gigabytes = torch.tensor(parameters * element_size / 1e9)
    return gigabytes / torch.tensor(ports * port_speed / 8)


@ANSWERS.right("01.spot_the_units")
def both_lines(parameters, element_size, ports, port_speed):
    gigabytes = parameters * element_size / 10**9
    gigabytes_per_second = ports * port_speed / 8
    return gigabytes / gigabytes_per_second


@ANSWERS.right("01.spot_the_units")
def gigabits(parameters, element_size, ports, port_speed):
    return 8 * parameters * element_size / 1e9 / (ports * port_speed)


@ANSWERS.wrong("01.spot_the_units", "wrong", "nothing in `course_utils`")
def with_gigabits_of_the_library(parameters, element_size, ports, port_speed):
    return parameters * element_size / (ports * costs.gigabits(port_speed))


@ANSWERS.right("01.spot_the_units")
def gibibytes_on_both_sides(parameters, element_size, ports, port_speed):
    gib = parameters * element_size / 1024**3
    return gib / (ports * port_speed * 1e9 / 8 / 1024**3)


# --------------------------------------------------------------- 01.which_backend


@ANSWERS.wrong("01.which_backend", "not attempted", "NotImplementedError")
def stub_of_backend(tensors_on, ranks_on_node, gpus_on_node):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("01.which_backend", "wrong", "these nodes have none")
def always_nccl(tensors_on, ranks_on_node, gpus_on_node):
    return "nccl"


@ANSWERS.wrong("01.which_backend", "wrong", "Only the arguments count, not the GPUs")
def always_gloo(tensors_on, ranks_on_node, gpus_on_node):
    return "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "nccl takes GPU tensors only")
def where_there_are_gpus(tensors_on, ranks_on_node, gpus_on_node):
    return "nccl" if gpus_on_node > 0 else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "nccl takes GPU tensors only")
def forgot_the_tensors(tensors_on, ranks_on_node, gpus_on_node):
    return "nccl" if ranks_on_node <= gpus_on_node else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "more ranks than GPUs")
def where_the_tensors_are(tensors_on, ranks_on_node, gpus_on_node):
    return "nccl" if tensors_on == "cuda" else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "some are left over")
def exactly_as_many(tensors_on, ranks_on_node, gpus_on_node):
    fits = ranks_on_node == gpus_on_node
    return "nccl" if tensors_on == "cuda" and fits else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "some are left over")
def without_a_rest(tensors_on, ranks_on_node, gpus_on_node):
    fits = tensors_on == "cuda" and gpus_on_node % ranks_on_node == 0
    return "nccl" if fits else "gloo"


@ANSWERS.wrong(
    "01.which_backend",
    "wrong",
    "nccl works, and is made for it",
    did="chose gloo wherever a node has several GPUs",
)
def fewer_ranks_only(tensors_on, ranks_on_node, gpus_on_node):
    fits = ranks_on_node < gpus_on_node
    return "nccl" if tensors_on == "cuda" and fits else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "some are left over")
def comparison_turned(tensors_on, ranks_on_node, gpus_on_node):
    fits = ranks_on_node >= gpus_on_node
    return "nccl" if tensors_on == "cuda" and fits else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "built from source with an MPI library")
def message_passing(tensors_on, ranks_on_node, gpus_on_node):
    return "mpi"


@ANSWERS.wrong("01.which_backend", "wrong", "picks a backend for each tensor")
def both_at_once(tensors_on, ranks_on_node, gpus_on_node):
    return "cpu:gloo,cuda:nccl"


@ANSWERS.wrong("01.which_backend", "wrong", "Return the name")
def whether_nccl_works(tensors_on, ranks_on_node, gpus_on_node):
    return tensors_on == "cuda" and ranks_on_node <= gpus_on_node


@ANSWERS.wrong("01.which_backend", "wrong", "There are two to choose from")
def another_name(tensors_on, ranks_on_node, gpus_on_node):
    return tensors_on


@ANSWERS.wrong("01.which_backend", "wrong", "Only capital and small letters")
def in_capitals(tensors_on, ranks_on_node, gpus_on_node):
    fits = tensors_on == "cuda" and ranks_on_node <= gpus_on_node
    return "NCCL" if fits else "GLOO"


@ANSWERS.wrong("01.which_backend", "wrong", "Only the spaces are different.")
def with_a_space(tensors_on, ranks_on_node, gpus_on_node):
    return " " + one_condition(tensors_on, ranks_on_node, gpus_on_node)


@ANSWERS.wrong("01.which_backend", "wrong", "some are left over")
def on_eight_gpus_only(tensors_on, ranks_on_node, gpus_on_node):
    fits = gpus_on_node == 8 and ranks_on_node <= 8 or ranks_on_node == 1
    return "nccl" if tensors_on == "cuda" and fits and gpus_on_node else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "more ranks than GPUs")
def up_to_eight_ranks(tensors_on, ranks_on_node, gpus_on_node):
    fits = ranks_on_node < 9 and (gpus_on_node > 1 or ranks_on_node == 1)
    return "nccl" if tensors_on == "cuda" and fits else "gloo"


@ANSWERS.right("01.which_backend")
def one_condition(tensors_on, ranks_on_node, gpus_on_node):
    if tensors_on == "cuda" and ranks_on_node <= gpus_on_node:
        return "nccl"
    return "gloo"


@ANSWERS.right("01.which_backend")
def gloo_first(tensors_on, ranks_on_node, gpus_on_node):
    if tensors_on == "cpu" or gpus_on_node == 0:
        return "gloo"
    if ranks_on_node > gpus_on_node:
        return "gloo"
    return "nccl"


@ANSWERS.right("01.which_backend")
def names_from_torch(tensors_on, ranks_on_node, gpus_on_node):
    alone = gpus_on_node // ranks_on_node >= 1
    usable = {"cuda": alone, "cpu": False}[tensors_on]
    return dist.Backend.NCCL if usable else dist.Backend.GLOO


# ---------------------------------------------------------------- 01.predict_rank

for value, status, says in (
    (..., "not attempted", "Set the answer in the cell above"),
    (29, "wrong", "That would be on a fourth node."),
    (22, "wrong", "That is one too many"),
    (20, "wrong", "That is one too few"),
    (13, "wrong", "on the node in the middle"),
    (5, "wrong", "That is its local rank"),
    (17, "wrong", "The ranks go node by node"),
    (7, "wrong", "Each node before this one holds 8 ranks"),
    (42, "wrong", "There are only 24 ranks."),
    (16, "wrong", "That is the first rank on the last node"),
    (23, "wrong", "That is the last rank of all"),
    (24, "wrong", "That is the world size."),
    (11, "wrong", "A rank is the number of ranks that come before it"),
    (20.9999999, "wrong", "You answered 20.9999999. That is not it."),
    (True, "wrong", "That is True or False; a number was expected."),
    ("21", "wrong", "That is text; a number was expected."),
    ((2, 5), "wrong", "That is a tuple; a number was expected."),
):
    ANSWERS.wrong("01.predict_rank", status, says)(value)

for value in (21, 21.0, torch.tensor(21), Fraction(42, 2)):
    ANSWERS.right("01.predict_rank")(value)


test_wrong, test_right = ANSWERS.tests()


# ------------------------------------------------------------------- the tasks' cases


def test_the_way_back_is_tried_on_1_to_16_gpus_per_node():
    task = find_task("01.node_and_local_rank")
    assert {gpus for _, gpus in task.cases} == set(range(1, 17))
    there = find_task("01.rank_of").expect
    for gpus, rank in itertools.product(range(1, 17), range(100)):
        assert there(*task.expect(rank, gpus), gpus) == rank


def test_the_examples_in_the_stubs_are_right():
    expect = functools.partial(lambda name, *args: find_task(name).expect(*args))
    assert expect("01.rank_of", 1, 2, 4) == 6
    assert expect("01.node_and_local_rank", 6, 4) == (1, 2)
    assert math.isclose(expect("01.transfer_seconds", 10**6, 4, 10, 8), 0.00051)
    assert math.isclose(expect("01.spot_the_units", 5 * 10**9, 2, 1, 400), 0.2)
    assert expect("01.which_backend", "cuda", 8, 8) == "nccl"
