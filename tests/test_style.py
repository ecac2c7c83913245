"""The house style, as far as a program can check it."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from course_utils import ROOT


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_is_content(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


FROM_SCRATCH = sorted((ROOT / "course_utils" / "from_scratch").rglob("*.py"))


@pytest.mark.parametrize("path", FROM_SCRATCH, ids=lambda path: path.name)
def test_what_learners_rebuild_imports_torch_alone(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module.partition(".")[0])
    assert modules - sys.stdlib_module_names <= {"torch"}
