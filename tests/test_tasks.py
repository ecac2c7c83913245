"""Each near miss of each task is wrong, and told in its own words; ours passes."""

import cloudpickle
import pytest

from course_utils.notebook import ours
from course_utils.notebook.beside import Beside, run_task
from course_utils.tasks import all_tasks
from course_utils.tasks.task import Task

TASKS = [task for task in all_tasks() if isinstance(task, Task)]
MISSES = [
    pytest.param(task, miss, id=f"{task.id}-{number}")
    for task in TASKS
    for number, miss in enumerate(task.misses)
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_our_solution_passes(task):
    outcome = run_task(task, cloudpickle.loads(ours.packed(task)))
    assert outcome.passed, str(outcome)


@pytest.mark.parametrize(("task", "miss"), MISSES)
def test_a_near_miss_is_told_in_its_own_words(task, miss):
    with Beside(task) as beside:
        assert beside.first_to_fail(miss), "it is right in all cases"
    outcome = run_task(task, cloudpickle.loads(ours.packed(task, miss)))
    assert outcome.lines[0] == miss.says, str(outcome)
