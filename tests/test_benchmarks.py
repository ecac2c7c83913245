"""Each benchmark runs with its smallest setting, and prints rows in the agreed form."""

import json
import subprocess
import sys

import pytest

from course_utils import ROOT
from tests.benchmarks.__main__ import descriptions

COMMAND = [sys.executable, "-m", "tests.benchmarks"]
FIELDS = "row ratio unit aa goal better met samples note".split()


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, timeout=280
    )


def test_without_a_name_the_command_lists_them():
    done = run()
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines == descriptions() and "ring" in lines


@pytest.mark.thorough
@pytest.mark.parametrize("name", descriptions())
def test_a_benchmark_prints_rows(name: str):
    done = run("--quick", name)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows
    for row in rows:
        assert list(row)[: len(FIELDS)] == FIELDS
        assert row["ratio"] >= 0 and row["samples"] >= 1
        assert row["unit"] and row["better"] in ("lower", "higher")
        right = [value for name, value in row.items() if isinstance(value, bool)]
        assert all(right[row["met"] is not None :]), f"a result is wrong: {row}"
