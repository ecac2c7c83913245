"""Exercises are made from solutions; unsolved none passes, solved all do."""

import ast
import contextlib
import io
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import pytest

from course_utils import ROOT
from course_utils.notebook import exercises
from course_utils.notebook.exercises import build, execute_notebooks, main, reference
from course_utils.notebook.lessons import LESSONS, lesson_of
from course_utils.notebook.on_rank import find, full_name
from course_utils.questions import NumberTask
from course_utils.tasks import all_tasks, tasks_of

SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
TASKS = all_tasks()

each_solution = pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)


pytestmark = pytest.mark.usefixtures("own_state")


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A copy of the course's notebooks, for tests that change them."""
    root = tmp_path / "course"
    for folder in ("solutions", "exercises"):
        shutil.copytree(ROOT / folder, root / folder)
    (root / "notebooks").mkdir()
    monkeypatch.setattr("course_utils.ROOT", root)
    return root


def cells_of(path, kind=None):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if kind in (None, cell.cell_type)]


def tags_of(cell):
    return cell.metadata.get("tags", [])


# ------------------------------------------------------------------ the two notebooks


@each_solution
def test_the_exercise_is_what_the_solution_gives(path):
    exercise = ROOT / "exercises" / f"ex_{path.name}"
    assert exercise.read_bytes() == build(path).encode(), (
        "run: python3 -m course_utils build-exercises"
    )


@each_solution
def test_an_exercise_gives_nothing_away(path):
    text = build(path)
    assert "BEGIN SOLUTION" not in text and "END SOLUTION" not in text
    notebook = nbformat.reads(text, as_version=4)
    kept = [c for c in cells_of(path) if not {"solution", "why"} & set(tags_of(c))]
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in kept]
    assert not any(cell.get("outputs") for cell in notebook.cells)


# -------------------------------------------------------------------------- the tasks


@each_task
def test_a_task_is_complete(task):
    assert len(set(task.hints)) == 3
    assert task.title and task.stars in (1, 2, 3)
    if not isinstance(task, NumberTask):
        assert all(find(full_name(name)) is not None for name in task.forbids)
        assert task.instead or not task.forbids
    ours = reference(task.id)
    ast.parse(ours.code)
    assert "SOLUTION" not in ours.code
    assert len(ours.why) > 80, "`why`: the reason, in more than 80 letters"


@each_task
def test_a_task_has_its_cells_in_the_notebook(task):
    cells = cells_of(lesson_of(task.id).exercise)
    title = f"{re.escape(task.title)} \\({re.escape('*' * task.stars)}\\)"
    statements = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    assert len(re.findall(rf"^## \d+\. {title}$", statements, re.MULTILINE)) == 1
    mine = [cell for cell in cells if task.id in tags_of(cell)]
    source = "\n".join(cell.source for cell in mine if cell.cell_type == "code")
    call = "quiz" if isinstance(task, NumberTask) else "check"
    assert source.count(f'{call}("{task.id}"') == 1
    assert f'# hint("{task.id}")' in source
    assert "NotImplementedError" in source or any("given" in tags_of(c) for c in mine)
    if isinstance(task, NumberTask):
        return
    documented = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(source).body if isinstance(node, documented)]
    docs = "\n".join(ast.get_docstring(node) or "" for node in nodes)
    assert "Returns:" in docs, "Returns: in the docstring"
    assert "Example" in docs or "such as" in docs, "an example in the docstring"


@each_solution
def test_notebook_checks_and_map_agree_on_the_tasks(path):
    lesson = next(lesson for lesson in LESSONS if lesson.slug == path.stem)
    ids = tuple(task.id for task in tasks_of(lesson.number))
    assert lesson.tasks == ids
    assert 3 <= len(ids) <= 7, "a lesson has three to seven tasks"


# --------------------------------------------------------------- unsolved and solved


def run_cells(path):
    """Run a notebook's code cells here, one after the other; what they print."""
    printed = io.StringIO()
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(path, "code")):
        name = f"<ipython {path.stem} {number}>"
        source = re.sub("^%.*$", "", cell.source, flags=re.MULTILINE)
        lines = source.splitlines(keepends=True)
        linecache.cache[name] = (len(source), None, lines, name)
        with contextlib.redirect_stdout(printed):
            exec(compile(source, name, "exec"), namespace)
    return printed.getvalue()


def verdicts(printed):
    """Task id -> status, from what the check cells have printed."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    return dict(re.findall(r"^. (\d\d\.\w+): ([a-z ]+)$", plain, re.MULTILINE))


def numbers_and_code(path):
    """The ids of the tasks that ask for a number, and those of all others."""
    found = [], []
    for task in tasks_of(path.stem[:2]):
        found[not isinstance(task, NumberTask)].append(task.id)
    return found


@each_solution
def test_an_unsolved_exercise_passes_nothing(path):
    numbers, code = numbers_and_code(path)
    printed = run_cells(ROOT / "exercises" / f"ex_{path.name}")
    assert verdicts(printed) == dict.fromkeys(code, "not attempted")
    for task_id in numbers:
        assert f"Quiz {task_id}. Work it out." in printed
    assert "Right." not in printed


@each_solution
def test_a_solved_exercise_passes_everything(path):
    """So say the saved outputs; that they are true is shown by nbval, which runs it."""
    numbers, code = numbers_and_code(path)
    outputs = [output for cell in cells_of(path, "code") for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert verdicts(printed) == dict.fromkeys(code, "passed")
    assert len(re.findall(r"^Right\.", printed, re.MULTILINE)) == len(numbers)


def test_the_prediction_is_what_five_real_ranks_return():
    from course_utils.ranks import Ranks
    from course_utils.tasks.lesson_00 import PREDICT_SUM

    cell = next(c for c in cells_of(SOLUTIONS[0]) if c.id == "exchange")
    namespace = {"__name__": "__main__"}
    exec(f"import torch\nimport torch.distributed as dist\n{cell.source}", namespace)
    with Ranks(5, backend="gloo", quiet=True) as ranks:
        assert ranks.run(namespace["exchange"]) == [PREDICT_SUM.answer] * 5


# -------------------------------------------------------------------------- reference


def notebook_with(*cells):
    made = [
        nbformat.v4.new_code_cell(source, id=f"c{n}", metadata={"tags": tags})
        for n, (source, *tags) in enumerate(cells)
    ]
    return nbformat.v4.new_notebook(cells=made, metadata=exercises.METADATA)


def test_reference_puts_the_cells_of_a_task_together(course):
    marked = "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION"
    notebook = notebook_with(
        (marked, "00.x"),
        ("def g():\n    return 2", "00.x", "solution"),
        ("def g():\n    return 0", "00.x", "given"),
        ("check('00.x', f)", "00.x"),
        ("Because.", "00.x", "why"),
        ("def other(): pass", "00.y", "solution"),
    )
    nbformat.write(notebook, course / "solutions" / "00_start_here.ipynb")
    found = reference("00.x")
    assert found.code == "def f():\n    return 1\n\n\ndef g():\n    return 2"
    assert (found.why, found.given) == ("Because.", "def g():\n    return 0")
    with pytest.raises(LookupError, match="no solution and explanation of 00.y"):
        reference("00.y")
    with pytest.raises(ValueError, match="no lesson"):
        reference("nonsense")


# ------------------------------------------------------------------------ the command


def changed(change):
    """What a change makes of the cells of a notebook, and of the one of `average`."""

    def make(text):
        notebook = json.loads(text)
        cell = next(cell for cell in notebook["cells"] if cell["id"] == "average")
        change(notebook["cells"], cell)
        return json.dumps(notebook).encode()

    return make


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"<<<<<<< HEAD\n{}",
        lambda _: b'{"cells": [3]}',
        lambda _: b'{"nbformat": 4, "nbformat_minor": 5, "cells": [{}]}',
        lambda _: b"\xff\xfe",
        changed(lambda cells, cell: cells.append(cell)),  # two of one id
        changed(lambda _, cell: cell["source"].remove("    ### END SOLUTION")),
    ],
)
def test_what_is_no_notebook_is_one_line_that_names_it(course, capsys, damage):
    path = course / "solutions" / "00_start_here.ipynb"
    before = (course / "exercises" / f"ex_{path.name}").read_bytes()
    path.write_bytes(damage(path.read_bytes()))
    assert main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("solutions/00_start_here.ipynb")
    assert error.count("\n") == 1
    assert (course / "exercises" / f"ex_{path.name}").read_bytes() == before


# -------------------------------------------------------------------------- executing


def test_execute_leaves_outputs_and_nothing_of_this_run(course, tmp_path, capfd):
    path = course / "notebooks" / "00_start_here.ipynb"
    notebook = notebook_with(
        ("import os, sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')",),
        ("import course_utils\nos.path.basename(os.getcwd())",),
        ("from ipywidgets import IntSlider\nIntSlider(description='n')",),
        ("from course_utils.notebook.progress import *\nattempts()",),
        ("record_attempt('00.average', 'wrong')",),
    )
    nbformat.write(notebook, path)
    execute_notebooks([path])
    first = path.read_bytes()
    execute_notebooks([path])
    assert path.read_bytes() == first
    assert capfd.readouterr() == ("", "")  # no warnings of the kernel

    done = json.loads(first)
    assert done["metadata"] == exercises.METADATA
    streams, folder, slider, attempts, _ = (cell["outputs"] for cell in done["cells"])
    assert all(cell["metadata"] == {} for cell in done["cells"])
    texts = {o["name"]: "".join(o["text"]) for o in streams}
    assert texts == {"stdout": "a\nc\n", "stderr": "b\n"}
    assert folder[0]["data"]["text/plain"] == ["'notebooks'"]
    assert set(slider[0]["data"]) == {"text/plain"}
    assert attempts[0]["data"]["text/plain"] == ["{}"]  # both times
    assert not (tmp_path / "state").exists()


def test_a_notebook_that_fails_is_left_as_it_was(course, capsys):
    path = course / "notebooks" / "00_start_here.ipynb"
    nbformat.write(notebook_with(("1 / 0",)), path)
    before = path.read_bytes()
    assert main(["--execute", str(path)]) == 1
    assert "00_start_here.ipynb fails" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


STOPPABLE = """
import sys
from pathlib import Path
from course_utils.notebook.exercises import execute_notebooks
try:
    execute_notebooks([Path(sys.argv[1])])
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_ends_the_kernel_and_leaves_the_notebook(course, tmp_path):
    path, pid = course / "notebooks" / "00_start_here.ipynb", tmp_path / "pid"
    wait = f"import os, time\nopen({str(pid)!r}, 'w').write(f'{{os.getpid()}} ')\n"
    nbformat.write(notebook_with((f"{wait}time.sleep(600)",)), path)
    before = path.read_bytes()
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPABLE, str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        give_up = time.monotonic() + 60
        while not pid.exists() or not pid.read_text().endswith(" "):
            assert child.poll() is None and time.monotonic() < give_up
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        printed, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert (printed, child.returncode) == ("stopped\n", 0)
    assert "Traceback" not in errors
    assert path.read_bytes() == before
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_execute_runs_all_notebooks_and_builds(course, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(exercises, "execute_notebooks", ran.extend)
    shutil.rmtree(course / "exercises")
    lesson = course / "notebooks" / "07_x.ipynb"
    nbformat.write(notebook_with(("6 * 7",)), lesson)
    assert main(["--execute", str(lesson), str(course / "nowhere.ipynb")]) == 1
    assert ran == []  # it is said before any runs
    assert main(["--execute"]) == 0
    assert ran == [lesson, *sorted(course.glob("solutions/*.ipynb"))]
    assert len(list(course.glob("exercises/ex_*.ipynb"))) == len(SOLUTIONS)
    assert "running 07_x.ipynb in notebooks/" in capsys.readouterr().out
