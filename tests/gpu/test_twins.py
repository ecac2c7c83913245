"""Each program sees on a virtual GPU what it sees on a real one."""

import json

import pytest
from programs import PROGRAMS
from twins import differences, is_refused, on_real, on_virtual

ONE_GENERATOR = "one random generator for the CPU and all GPUs; its state is the CPU's"
STREAMS = "all streams of a GPU are one queue"

# (program, observation) -> why it may differ: what stands in the limits of
# course_utils/virtual_gpus/__init__.py. What virtual GPUs refuse in words need not.
DIFFERENCES = {
    ("memory_of_odd_sizes", "11"): "memory is that of tensors, in pieces of 512",
    ("random_states", "length"): ONE_GENERATOR,
    ("two_generators", "the cpu's is its own"): ONE_GENERATOR,
    ("streams_differ", "same"): STREAMS,
    ("streams_differ", "default"): STREAMS,
    ("whole_numbers_in_products", "mm"): "the CPU can multiply whole numbers",
    ("autocast_in_volumes", "avg_pool3d"): "the CPU's avg_pool3d stays in float32",
}


def test_the_table_of_differences_names_programs():
    assert {name for name, _ in DIFFERENCES} <= PROGRAMS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_the_same_again_on_virtual_gpus(name):
    first, again = on_virtual(PROGRAMS[name]), on_virtual(PROGRAMS[name])
    assert first and first == again
    named = {observation for program, observation in DIFFERENCES if program == name}
    assert named <= first.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_the_same_on_a_real_gpu(name, gpu, found):
    real, virtual = on_real(PROGRAMS[name]), on_virtual(PROGRAMS[name])
    unexplained = {}
    for observation in differences(real, virtual):
        both = {"real": real.get(observation), "virtual": virtual.get(observation)}
        reason = DIFFERENCES.get((name, observation))
        if reason is None and is_refused(both["virtual"]):
            reason = "virtual GPUs do not have it, and say so"
        if reason is None:
            unexplained[observation] = both
        brief = {who: json.dumps(value)[:500] for who, value in both.items()}
        found.setdefault(name, {})[observation] = {**brief, "reason": reason}
    assert not unexplained
