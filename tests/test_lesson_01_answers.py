"""Lesson 01: different right answers, and wrong ones that no near miss covers."""

import functools
import itertools
import math
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_utils.notebook import ours
from course_utils.notebook.check import find_task
from course_utils.theory import costs
from tests.answers import Answers, Edited

ANSWERS = Answers()

# ----------------------------------------------------------------------- 01.rank_of

OUR_RANK = "node * gpus_per_node + local_rank"


@ANSWERS.wrong("01.rank_of", "not attempted", "It still raises NotImplementedError")
def stub(node, local_rank, gpus_per_node):
    raise NotImplementedError("Write your code here.")


for says, answer in (
    ("not every number is an int", Edited(OUR_RANK, f"float({OUR_RANK})")),
    ("A rank is the number of ranks before it", Edited("+ local", "| local")),
    ("Your code calls rank_of of course_utils", functools.partial(costs.rank_of)),
):
    ANSWERS.wrong("01.rank_of", "wrong", says)(answer)


for rank in (
    lambda node, gpu, n: sum([n] * node, gpu),
    lambda machine, gpu, n: torch.arange((machine + 1) * n).view(-1, n)[machine, gpu],
    lambda node, gpu, n: range(node * n, (node + 1) * n)[gpu],
    lambda node, gpu, n: np.ravel_multi_index((node, gpu), (node + 1, n)),
):
    ANSWERS.right("01.rank_of")(rank)


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

for says, new in (
    ("It has 3 items; 2 were expected.", f"rank, {OUR_PLACE}"),
    ("not every number is an int", OUR_PLACE.replace("//", "/")),
    ("the node is the number of full nodes", f"-(-{OUR_PLACE.replace(',', '),')}"),
):
    ANSWERS.wrong(TASK_2, "wrong", says)(Edited(OUR_PLACE, new))


@ANSWERS.wrong(TASK_2, "wrong", "(9, 7)")
def loses_the_first_of_each_node(rank, gpus_per_node):
    node, place = 0, rank
    while place > gpus_per_node:  # must be >=
        node, place = node + 1, place - gpus_per_node
    return node, place


@ANSWERS.wrong(TASK_2, "wrong", "not every number is an int")
def from_the_fraction(rank, gpus_per_node):
    fraction, node = math.modf(rank / gpus_per_node)
    return node, fraction * gpus_per_node


@ANSWERS.wrong(TASK_2, "wrong", "rank=999")
def on_the_first_nodes_only(rank, gpus_per_node):
    for node, local_rank in itertools.product(range(16), range(gpus_per_node)):
        if node * gpus_per_node + local_rank == rank:
            return node, local_rank


for place in (
    lambda rank, gpus: divmod(rank, gpus),
    lambda rank, gpus: np.array(divmod(rank, gpus)),
    lambda rank, gpus: torch.tensor([rank // gpus, rank % gpus]),
    lambda rank, gpus: np.unravel_index(rank, (rank + 1, gpus)),
):
    ANSWERS.right(TASK_2)(place)


@ANSWERS.right(TASK_2)
def subtracts_node_by_node(rank, gpus_per_node):
    node = 0
    while rank >= gpus_per_node:
        node, rank = node + 1, rank - gpus_per_node
    return [node, rank]


@ANSWERS.right(TASK_2)
def drops_the_fraction(rank, gpus_per_node):
    node = int(rank / gpus_per_node)
    return torch.tensor(node), rank - node * gpus_per_node


# -------------------------------------------------------------- 01.transfer_seconds

TASK_3, LAST_STEP = "01.transfer_seconds", "nbytes / bandwidth"

for says, pieces in (
    ("It is 1000 times too large. Convert every", ("1e-6", "1e-3")),
    ("Convert every number", (LAST_STEP, f"({LAST_STEP} if nbytes > 4096 else 0)")),
):
    ANSWERS.wrong(TASK_3, "wrong", says)(Edited(*pieces))


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


@ANSWERS.right(TASK_3)
def in_bits_throughout(numel, element_size, latency_us, bandwidth_gb_s):
    bits, bits_per_second = numel * element_size * 8, bandwidth_gb_s * 8e9
    return torch.tensor(latency_us * 1e-6 + bits / bits_per_second)


@ANSWERS.right(TASK_3)
def as_a_product_of_vectors(numel, element_size, latency_us, bandwidth_gb_s):
    return np.dot([latency_us, numel * element_size], [1e-6, 1e-9 / bandwidth_gb_s])


# --------------------------------------------------------------- 01.spot_the_units


@ANSWERS.wrong("01.spot_the_units", "not attempted", "Repair the code in the cell")
def sending_seconds(parameters, element_size, ports, port_speed):
    """As it was given, but for this docstring."""
    gigabytes = parameters * element_size / 1024**3
    gigabytes_per_second = ports * port_speed  # and this comment
    return gigabytes / gigabytes_per_second


ANSWERS.wrong("01.spot_the_units", "wrong", "Two lines of the plan need another")(
    lambda parameters, size, ports, speed: (
        parameters * size / 1024**3 / (ports * speed) * 8.59  # one factor for both
    )
)
for seconds in (
    lambda n, size, ports, speed: 8 * n * size / 1e9 / (ports * speed),
    lambda n, size, ports, speed: torch.tensor(n * size / 1e9) / (ports * speed / 8),
    lambda n, size, ports, speed: n / ports * size * 8 / (speed * 10**9),
    lambda n, size, ports, speed: Fraction(8 * n * size, ports * speed * 10**9),
    Edited("1e9", "1024**3", "/ 8", "* 1e9 / 8 / 1024**3"),
):
    ANSWERS.right("01.spot_the_units")(seconds)

# --------------------------------------------------------------- 01.which_backend

TASK_5, FITS = "01.which_backend", "ranks_on_node <= gpus_on_node"

for says, old, new in (
    ("some GPUs are left over", FITS, "gpus_on_node % ranks_on_node == 0"),
    ("more ranks than GPUs", FITS, "ranks_on_node < 9 and gpus_on_node > 0"),
    ("in the CPU's memory", 'tensors_on == "cuda"', "gpus_on_node"),
    ("in small letters", '"nccl"', '"NCCL"'),
    ("That is text, and not what", '"gloo"', '"mpi"'),
):
    ANSWERS.wrong(TASK_5, "wrong", says)(Edited(old, new))


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


@ANSWERS.right(TASK_5)
def out_of_a_list(tensors_on, ranks_on_node, gpus_on_node):
    works = tensors_on.startswith("cuda") and ranks_on_node <= gpus_on_node
    return ["gloo", "nccl"][works]


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
