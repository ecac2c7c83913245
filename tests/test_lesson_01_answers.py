"""Lesson 01: different right answers, and wrong ones that no near miss covers."""

import functools
import itertools
import math
from decimal import Decimal
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_utils.notebook import ours
from course_utils.notebook.check import find_task
from course_utils.theory import costs
from tests.answers import Answers

ANSWERS = Answers()

# ----------------------------------------------------------------------- 01.rank_of


@ANSWERS.wrong("01.rank_of", "not attempted", "It still raises NotImplementedError")
def stub(node, local_rank, gpus_per_node):
    raise NotImplementedError("Write your code here.")


@ANSWERS.wrong("01.rank_of", "wrong", "a float is no whole number")
def as_a_tensor_of_floats(node, local_rank, gpus_per_node):
    return torch.tensor(node) * torch.tensor(1.0 * gpus_per_node) + local_rank


ANSWERS.wrong(
    "01.rank_of", "wrong", "Your code calls rank_of of course_utils.theory.costs."
)(functools.partial(costs.rank_of))


@ANSWERS.wrong("01.rank_of", "wrong", "A rank is the number of ranks that come before")
def bit_by_bit(node, local_rank, gpus_per_node):
    return node * gpus_per_node | local_rank


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


@ANSWERS.right("01.rank_of")
def taken_from_the_ranks_of_the_node(node, local_rank, gpus_per_node):
    ranks = range(node * gpus_per_node, (node + 1) * gpus_per_node)
    return ranks[local_rank]


@ANSWERS.right("01.rank_of")
def with_numpy(node, local_rank, gpus_per_node):
    shape = node + 1, gpus_per_node
    return np.ravel_multi_index((node, local_rank), shape)


# ----------------------------------------------------------- 01.node_and_local_rank


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "It has 3 items; 2 were expected.")
def three_numbers(rank, gpus_per_node):
    return rank, rank // gpus_per_node, rank % gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "(9, 7)")
def loses_the_first_of_each_node(rank, gpus_per_node):
    node, place = 0, rank
    while place > gpus_per_node:  # must be >=
        node, place = node + 1, place - gpus_per_node
    return node, place


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "a float is no whole number")
def from_the_fraction(rank, gpus_per_node):
    fraction, node = math.modf(rank / gpus_per_node)
    return node, fraction * gpus_per_node


@ANSWERS.wrong("01.node_and_local_rank", "wrong", "rank=999")
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
def in_an_array(rank, gpus_per_node):
    return np.array(divmod(rank, gpus_per_node))


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


@ANSWERS.right("01.node_and_local_rank")
def found_in_a_table(rank, gpus_per_node):
    table = torch.arange((rank + 1) * gpus_per_node).view(-1, gpus_per_node)
    return (table == rank).nonzero()[0]


@ANSWERS.right("01.node_and_local_rank")
def unravelled(rank, gpus_per_node):
    return np.unravel_index(rank, (rank + 1, gpus_per_node))


# -------------------------------------------------------------- 01.transfer_seconds


@ANSWERS.wrong("01.transfer_seconds", "wrong", "Bring every number to bytes and")
def small_messages_are_free(numel, element_size, latency_us, bandwidth_gb_s):
    nbytes = numel * element_size if numel * element_size >= 4096 else 0
    return latency_us / 1e6 + nbytes / (bandwidth_gb_s * 1e9)


@ANSWERS.wrong("01.transfer_seconds", "wrong", "nothing in `course_utils`")
def converted_for_the_library(numel, element_size, latency_us, bandwidth_gb_s):
    bandwidth = bandwidth_gb_s * costs.GB
    nbytes = numel * element_size
    return costs.transfer_seconds(nbytes, latency=latency_us / 1e6, bandwidth=bandwidth)


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


@ANSWERS.right("01.transfer_seconds")
def in_bits_throughout(numel, element_size, latency_us, bandwidth_gb_s):
    bits, bits_per_second = numel * element_size * 8, bandwidth_gb_s * 8e9
    return torch.tensor(latency_us * 1e-6 + bits / bits_per_second)


@ANSWERS.right("01.transfer_seconds")
def in_decimals(numel, element_size, latency_us, bandwidth_gb_s):
    nanoseconds = Decimal(numel * element_size) / Decimal(bandwidth_gb_s)
    return (Decimal(latency_us) * 1000 + nanoseconds) / 10**9


@ANSWERS.right("01.transfer_seconds")
def as_a_product_of_vectors(numel, element_size, latency_us, bandwidth_gb_s):
    return np.dot([latency_us, numel * element_size], [1e-6, 1e-9 / bandwidth_gb_s])


# --------------------------------------------------------------- 01.spot_the_units


@ANSWERS.wrong("01.spot_the_units", "not attempted", "Repair the code in the cell")
def sending_seconds(parameters, element_size, ports, port_speed):
    """As it was given, but for this docstring."""
    gigabytes = parameters * element_size / 1024**3
    gigabytes_per_second = ports * port_speed  # and this comment
    return gigabytes / gigabytes_per_second


@ANSWERS.wrong("01.spot_the_units", "wrong", "Two lines of the plan need another")
def one_factor_for_both(parameters, element_size, ports, port_speed):
    gib = parameters * element_size / 1024**3
    return gib / (ports * port_speed) * 8.59


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


@ANSWERS.right("01.spot_the_units")
def gibibytes_on_both_sides(parameters, element_size, ports, port_speed):
    gib = parameters * element_size / 1024**3
    return gib / (ports * port_speed * 1e9 / 8 / 1024**3)


@ANSWERS.right("01.spot_the_units")
def a_share_for_each_port(parameters, element_size, ports, port_speed):
    bits = parameters / ports * element_size * 8
    return bits / (port_speed * 10**9)


@ANSWERS.right("01.spot_the_units")
def as_one_fraction(parameters, element_size, ports, port_speed):
    return Fraction(8 * parameters * element_size, ports * port_speed * 10**9)


# --------------------------------------------------------------- 01.which_backend


@ANSWERS.wrong("01.which_backend", "wrong", "some are left over")
def without_a_rest(tensors_on, ranks_on_node, gpus_on_node):
    fits = tensors_on == "cuda" and gpus_on_node % ranks_on_node == 0
    return "nccl" if fits else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "more ranks than GPUs")
def up_to_eight_ranks(tensors_on, ranks_on_node, gpus_on_node):
    fits = ranks_on_node < 9 and (gpus_on_node > 1 or ranks_on_node == 1)
    return "nccl" if tensors_on == "cuda" and fits else "gloo"


@ANSWERS.wrong("01.which_backend", "wrong", "in small letters")
def in_capitals(tensors_on, ranks_on_node, gpus_on_node):
    return one_condition(tensors_on, ranks_on_node, gpus_on_node).upper()


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


@ANSWERS.right("01.which_backend")
def out_of_a_list(tensors_on, ranks_on_node, gpus_on_node):
    works = tensors_on.startswith("cuda") and ranks_on_node <= gpus_on_node
    return ["gloo", "nccl"][works]


@ANSWERS.right("01.which_backend")
def where_nothing_speaks_against_it(tensors_on, ranks_on_node, gpus_on_node):
    against = [tensors_on != "cuda", gpus_on_node < ranks_on_node]
    return "gloo" if any(against) else "nccl"


# ---------------------------------------------------------------- 01.predict_rank

ANSWERS.wrong("01.predict_rank", "wrong", "That would be on a fourth node.")(29)
ANSWERS.wrong("01.predict_rank", "wrong", "A rank is the number of ranks that come")(11)
for value in (21, 21.0, torch.tensor(21), Fraction(42, 2)):
    ANSWERS.right("01.predict_rank")(value)

test_wrong, test_right = ANSWERS.tests()


@pytest.mark.parametrize(
    ("task_id", "args", "result"),
    [
        ("01.rank_of", (1, 2, 4), 6),
        ("01.node_and_local_rank", (6, 4), (1, 2)),
        ("01.transfer_seconds", (10**6, 4, 10, 8), pytest.approx(0.00051)),
        ("01.spot_the_units", (5 * 10**9, 2, 1, 400), pytest.approx(0.2)),
        ("01.which_backend", ("cuda", 8, 8), "nccl"),
    ],
)
def test_the_example_in_a_stub_is_right(task_id, args, result):
    assert cloudpickle.loads(ours.packed(find_task(task_id)))(*args) == result
