"""nbgrader gives points for exercises, as the instructor guide says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from test_instructor_guide import block_after

from course_utils import ROOT
from course_utils.notebook.exercises import reference
from course_utils.notebook.lessons import LESSONS


@pytest.mark.thorough
def test_a_task_that_its_check_passes_gives_its_points(tmp_path, monkeypatch):
    """Of two tasks one is solved. The lines and commands are those of the guide."""
    title = "Marks, with nbgrader"
    lines = block_after("raises an error", title)
    generate, *grade = block_after("Then:", title).splitlines()
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)

    def run(command: str) -> None:
        words = [programs / "nbgrader", *command.split()[1:]]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)

    name = LESSONS[0].exercise.stem
    for folder in ("source", "submitted/anna"):
        (tmp_path / folder / name).mkdir(parents=True)
    notebook = nbformat.read(LESSONS[0].exercise, as_version=4)
    for cell in notebook.cells:
        if match := re.fullmatch(r'check\("00.(average|who_am_i)", \w+\)', cell.source):
            cell.source += f"\n{lines}".replace("average", match[1])
            # What the sidebar writes for "Autograded tests".
            marks = {"grade": True, "solution": False, "task": False, "locked": True}
            marks |= {"grade_id": match[1], "points": 1, "schema_version": 3}
            cell.metadata["nbgrader"] = {**marks, "cell_type": "code"}
    nbformat.write(notebook, tmp_path / "source" / name / f"{name}.ipynb")

    run(generate)
    released = tmp_path / "release" / name / f"{name}.ipynb"
    notebook = nbformat.read(released, as_version=4)
    for cell in notebook.cells:
        if cell.id == "average":
            cell.source = reference("00.average").code
    nbformat.write(notebook, tmp_path / "submitted" / "anna" / name / released.name)
    for command in grade:
        run(command)
    table = (tmp_path / "grades.csv").read_text()
    assert re.search(r",anna,.*,1.0,2.0$", table, re.MULTILINE), table
