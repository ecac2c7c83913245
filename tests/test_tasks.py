"""Each near miss of each task is wrong, and told in its own words; ours passes."""

import subprocess
import sys

import cloudpickle
import pytest

from course_utils.notebook import ours
from course_utils.notebook.beside import run_task
from course_utils.tasks import all_tasks
from course_utils.tasks.task import Task

each_task = pytest.mark.parametrize(
    "task",
    [task for task in all_tasks() if isinstance(task, Task)],
    ids=lambda task: task.id,
)


@each_task
def test_our_solution_passes(task):
    outcome = run_task(task, cloudpickle.loads(ours.packed(task)))
    assert outcome.passed, str(outcome)


@each_task
def test_a_near_miss_is_told_in_its_own_words(task):
    told_otherwise = []
    for miss in task.misses:
        outcome = run_task(task, cloudpickle.loads(ours.packed(task, miss)))
        assert not outcome.passed, f"right in all cases: {miss}"
        if outcome.lines[0] != miss.says:
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
