"""The file that lesson 04 spawns, and what processes say that fail at their start."""

import os
import subprocess
import sys

import pytest
import torch.multiprocessing as mp

from course_utils import ROOT
from course_utils.ranks.child_errors import child_errors
from course_utils.workers import spawn_hello


@pytest.mark.thorough
def test_as_a_script():
    done = subprocess.run(
        [sys.executable, "course_utils/workers/spawn_hello.py", "--nproc", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "I am process 0 of 2.",
        "I am process 1 of 2.",
    ]


def test_hello_answers_through_the_queue():
    answers = mp.get_context("spawn").SimpleQueue()
    spawn_hello.hello(1, 3, answers)
    assert answers.get() == "I am process 1 of 3."


def test_errors_of_a_child_are_collected_and_not_shown(capfd):
    with child_errors() as lines:
        code = r"import sys; sys.exit('\x1b[1;35mno\x1b[0m, not today')"
        subprocess.run([sys.executable, "-c", code])
    assert lines == ["no, not today"]
    assert capfd.readouterr().err == ""
    os.write(2, b"back again")  # stderr is what it was
    assert capfd.readouterr().err == "back again"


def test_errors_are_collected_when_the_block_fails(capfd):
    with pytest.raises(ZeroDivisionError), child_errors() as lines:
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'gone')"])
        raise ZeroDivisionError
    assert lines == ["gone"]
    assert capfd.readouterr().err == ""


def test_no_descriptor_is_left_open():
    count = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with child_errors():
        pass
    if count:
        assert len(os.listdir("/proc/self/fd")) == count
