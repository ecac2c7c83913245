"""Each near miss of each task is wrong, and told in its own words.

That our solutions pass is shown by nbval, which runs the solved notebooks.
"""

import contextlib
import itertools
import subprocess
import sys

import cloudpickle
import pytest

from course_utils.notebook import ours
from course_utils.notebook.beside import Beside, first_wrong, look
from course_utils.notebook.judge import Judge
from course_utils.notebook.processes import fresh_ranks
from course_utils.tasks import all_tasks
from course_utils.tasks.task import Task

each_task = pytest.mark.parametrize(
    "task",
    [task for task in all_tasks() if isinstance(task, Task)],
    ids=lambda task: task.id,
)


def first_failing(beside, miss):
    """The world size and the case in which a near miss is wrong for the first time."""
    for at in itertools.product(beside.task.sizes, range(len(beside.task.cases))):
        seen = beside.seen(miss, *at)
        if seen.error or first_wrong(beside.task, seen, beside.seen(None, *at)):
            return at
    raise AssertionError(f"right in all cases: {miss}")


@each_task
def test_a_near_miss_is_told_in_its_own_words(task):
    """All of them on the same ranks, once as a near miss and once as an answer."""
    told_otherwise = []
    with Beside(task) as beside, contextlib.ExitStack() as stack:
        ranks = {}
        for miss in task.misses:
            world_size, number = at = first_failing(beside, miss)
            if world_size not in ranks:
                ranks[world_size] = stack.enter_context(fresh_ranks(world_size, task))
            packed = ours.packed(task, miss)
            seen = look(task, ranks[world_size], packed, number, task.seconds)
            outcome = Judge(beside, cloudpickle.loads(packed), at, seen).outcome()
            if outcome is None or outcome.lines[0] != miss.says:
                told_otherwise.append(f"{miss}\n{outcome}")
    assert not told_otherwise, "\n\n".join(told_otherwise)


LATE = """
import sys
from course_utils.notebook import ours
from course_utils.notebook.beside import look
from course_utils.notebook.check import find_task
from course_utils.notebook.processes import fresh_ranks
task = find_task(sys.argv[1])
def slow():
    names = "sympy", "torch._dynamo", "torch.distributed.fsdp", "torchvision", "sklearn"
    return [name for name in names if name in sys.modules]
with fresh_ranks(task.sizes[0], task) as ranks:
    before = ranks.run(slow)
    look(task, ranks, ours.packed(task), 0, 60.0)
    print(before == ranks.run(slow))
"""


@pytest.mark.thorough
@each_task
def test_what_is_slow_to_import_is_there_before_the_time_begins(task):
    command = [sys.executable, "-W", "ignore", "-c", LATE, task.id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == ["True"], done.stderr
