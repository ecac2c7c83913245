"""The house style, as far as a program can check it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_is_content(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_learners_rebuild_imports_torch_alone():
    code = (
        "import pkgutil, sys, torch\n"
        "from course_utils import from_scratch\n"
        "before = {n for n in sys.modules if n.startswith('course_utils')}\n"
        "begin = from_scratch.__name__ + '.'\n"
        "names = [m.name for m in pkgutil.walk_packages(from_scratch.__path__, begin)]\n"
        "for name in names:\n"
        "    __import__(name)\n"
        "now = {n for n in sys.modules if n.startswith('course_utils')}\n"
        "print(len(names), sorted(now - before - {*names}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    number, others = done.stdout.split(maxsplit=1)
    assert int(number) >= 14 and others.strip() == "[]"
