"""Lesson 01: different right answers, and wrong ones that no near miss covers."""

import functools
import itertools
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist

from course_utils.theory import costs
from tests.answers import Answers

ANSWERS = Answers()

# ----------------------------------------------------------------------- 01.rank_of

OUR_RANK = "node * gpus_per_node + local_rank"


@ANSWERS.wrong("01.rank_of", "not attempted", "It still raises NotImplementedError")
def stub(node, local_rank, gpus_per_node):
    raise NotImplementedError("Write your code here.")


ANSWERS.edited(
    "01.rank_of",
    wrong=[
        ("not every number is an int", OUR_RANK, f"float({OUR_RANK})"),
        ("A rank is the number of ranks before it", "+ local", "| local"),
    ],
)
ANSWERS.wrong("01.rank_of", "wrong", "Your code calls rank_of of course_utils")(
    functools.partial(costs.rank_of)
)
ANSWERS.right("01.rank_of")(
    lambda node, gpu, n: np.ravel_multi_index((node, gpu), (node + 1, n))
)


@ANSWERS.right("01.rank_of")
@functools.cache
def called_again_for_each_node(node, local_rank, gpus_per_node):
    if node == 0:
        return local_rank
    before = called_again_for_each_node(node - 1, local_rank, gpus_per_node)
    return before + gpus_per_node


# ----------------------------------------------------------- 01.node_and_local_rank

TASK_2 = "01.node_and_local_rank"
OUR_PLACE = "rank // gpus_per_node, rank % gpus_per_node"

ROUNDED_UP = f"-(-{OUR_PLACE.replace(',', '),')}"
ANSWERS.edited(
    TASK_2,
    wrong=[
        ("It has 3 items; 2 were expected.", OUR_PLACE, f"rank, {OUR_PLACE}"),
        ("not every number is an int", OUR_PLACE, OUR_PLACE.replace("//", "/")),
        ("the node is the number of full nodes", OUR_PLACE, ROUNDED_UP),
    ],
)


@ANSWERS.wrong(TASK_2, "wrong", "(9, 7)")
def loses_the_first_of_each_node(rank, gpus_per_node):
    node, place = 0, rank
    while place > gpus_per_node:  # must be >=
        node, place = node + 1, place - gpus_per_node
    return node, place


@ANSWERS.wrong(TASK_2, "wrong", "rank=999")
def on_the_first_nodes_only(rank, gpus_per_node):
    for node, local_rank in itertools.product(range(16), range(gpus_per_node)):
        if node * gpus_per_node + local_rank == rank:
            return node, local_rank


ANSWERS.right(TASK_2)(lambda rank, gpus: divmod(rank, gpus))
ANSWERS.right(TASK_2)(lambda rank, gpus: torch.tensor([rank // gpus, rank % gpus]))


@ANSWERS.right(TASK_2)
def subtracts_node_by_node(rank, gpus_per_node):
    node = 0
    while rank >= gpus_per_node:
        node, rank = node + 1, rank - gpus_per_node
    return [node, rank]


# -------------------------------------------------------------- 01.transfer_seconds

TASK_3, LAST_STEP = "01.transfer_seconds", "nbytes / bandwidth"

ANSWERS.edited(
    TASK_3,
    wrong=[
        ("It is 1000 times too large. Convert every", "1e-6", "1e-3"),
        ("Convert every number", LAST_STEP, f"({LAST_STEP} if nbytes > 4096 else 0)"),
    ],
)


@ANSWERS.wrong(TASK_3, "wrong", "nothing in `course_utils`")
def converted_for_the_library(numel, element_size, latency_us, bandwidth_gb_s):
    bandwidth = bandwidth_gb_s * costs.GB
    nbytes = numel * element_size
    return costs.transfer_seconds(nbytes, latency=latency_us / 1e6, bandwidth=bandwidth)


@ANSWERS.right(TASK_3)
def exactly(numel, element_size, latency_us, bandwidth_gb_s):
    bandwidth = Fraction(bandwidth_gb_s) * 10**9
    return Fraction(latency_us) / 10**6 + numel * element_size / bandwidth


@ANSWERS.right(TASK_3)
def in_microseconds_first(numel, element_size, latency_us, bandwidth_gb_s):
    # 1 GB/s is 1,000 bytes per microsecond.
    return (latency_us + numel * element_size / (bandwidth_gb_s * 1000)) / 1e6


# --------------------------------------------------------------- 01.spot_the_units


@ANSWERS.wrong(
    "01.spot_the_units", "not attempted", "Repair sending_seconds in its cell"
)
def sending_seconds(parameters, element_size, ports, port_speed):
    """As it was given, but for this docstring."""
    gigabytes = parameters * element_size / 1024**3
    gigabytes_per_second = ports * port_speed  # and this comment
    return gigabytes / gigabytes_per_second


ANSWERS.wrong("01.spot_the_units", "wrong", "Two lines of the plan have a wrong")(
    lambda parameters, size, ports, speed: (
        parameters * size / 1024**3 / (ports * speed) * 8.59  # one factor for both
    )
)
ANSWERS.right("01.spot_the_units")(
    # In float32.
    lambda n, size, ports, speed: torch.tensor(n * size / 1e9) / (ports * speed / 8)
)
ANSWERS.edited(
    "01.spot_the_units",
    right=[("1e9", "1024**3", "/ 8", "* 1e9 / 8 / 1024**3")],
)

# --------------------------------------------------------------- 01.which_backend

TASK_5, FITS = "01.which_backend", "ranks_on_node <= gpus_on_node"

ANSWERS.edited(
    TASK_5,
    wrong=[
        ("some GPUs are left over", FITS, "gpus_on_node % ranks_on_node == 0"),
        ("more ranks than GPUs", FITS, "ranks_on_node < 9 and gpus_on_node > 0"),
        ("in the CPU's memory", 'tensors_on == "cuda"', "gpus_on_node"),
        ("in small letters", '"nccl"', '"NCCL"'),
    ],
)


@ANSWERS.right(TASK_5)
def gloo_first(tensors_on, ranks_on_node, gpus_on_node):
    if tensors_on == "cpu" or gpus_on_node == 0:
        return "gloo"
    if ranks_on_node > gpus_on_node:
        return "gloo"
    return "nccl"


@ANSWERS.right(TASK_5)
def names_from_torch(tensors_on, ranks_on_node, gpus_on_node):
    alone = gpus_on_node // ranks_on_node >= 1
    usable = {"cuda": alone, "cpu": False}[tensors_on]
    return dist.Backend.NCCL if usable else dist.Backend.GLOO


test_wrong, test_right = ANSWERS.tests()
