"""Each near miss of each task is wrong, and told in its own words; ours passes."""

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
