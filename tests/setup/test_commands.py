"""The command line, what those type who have an environment, and the files for CI."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from thorough import thorough_after

from course_utils import ROOT
from course_utils import __main__ as command_line
from course_utils.setup import environment, installer
from course_utils.setup.testing import PLACES, pytest_arguments
from tests.setup.conftest import NOTEBOOK, Clone, error_of

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="these tests use signals and symbolic links of Unix"
)


# The command line


def test_help_and_mistakes(clone: Clone) -> None:
    assert "python3 -m course_utils start" in clone.run().stdout
    mistaken = clone.run("strat")
    assert mistaken.returncode == 2
    assert "Did you mean 'start'?" in mistaken.stderr
    (clone.folder / "requirements.txt").unlink()
    assert "clone it again" in error_of(clone.run("start"))


def test_a_command_that_needs_the_packages_runs_in_the_venv(ready: Clone) -> None:
    code = "import sys; main = lambda argv: print(argv, sys.prefix)"
    (ready.folder / "course_utils" / "notebook" / "exercises.py").write_text(code)
    message = error_of(ready.run("build-exercises"))
    assert message.endswith("Run first: python3 -m course_utils test")
    for name in ("torchvision", "sklearn", "anywidget", "nbval", "xdist"):
        (ready.site / f"{name}.py").touch()
    for name in ("pytest_timeout", "playwright", "nbgrader"):
        (ready.site / f"{name}.py").touch()
    done = ready.run("build-exercises", "a.ipynb")
    assert done.stdout == f"['a.ipynb'] {ready.folder / '.venv'}\n", done.stderr


@pytest.mark.parametrize(
    ("command", "said"), [("start", "; run the same command again"), ("progress", "")]
)
def test_ctrl_c_says_go_on_only_where_something_goes_on(
    monkeypatch, capsys, command: str, said: str
) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{command_line.COMMANDS[command]}.main", interrupted)
    assert command_line.main([command]) == 130
    assert capsys.readouterr().err.startswith(f"stopped{said}")


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        ([], ["-m", "not thorough", *PLACES]),
        (["-k", "quiz.py"], ["-m", "not thorough", *PLACES, "-k", "quiz.py"]),
        (["--all", "-x"], [*PLACES, "-x"]),
        (["tests/test_a.py::test_b"], ["tests/test_a.py::test_b"]),
        (["solutions"], ["solutions"]),
    ],
)
def test_named_places_replace_all_places_and_have_all_their_tests(
    tmp_path: Path, arguments: list[str], others: list[str]
) -> None:
    for name in PLACES:
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    made = pytest_arguments(arguments, tmp_path)
    assert [argument for argument in made if not argument.startswith("--")] == others
    assert {"--nbval", "--doctest-modules"} <= set(made)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for asked in ("test_quiz.py::test_a", "zzz.ipynb"):
        with pytest.raises(environment.SetupError, match=r"There is no (test_q|zzz)"):
            pytest_arguments(["-q", asked], tmp_path)


# What those type who have an environment of their own


@pytest.mark.parametrize(
    ("folder", "place"),
    thorough_after(1, [("notebooks", "00_start_here.ipynb"), ("", "notebooks")]),
)
def test_plain_nbval_needs_no_more_than_the_learners_packages(
    clone: Clone, folder: str, place: str
) -> None:
    (clone.folder / "tests").mkdir()
    for name in ("pyproject.toml", "conftest.py", "tests/nbval.cfg"):
        shutil.copy(ROOT / name, clone.folder / name)
    source = (
        "from course_utils.notebook.progress import record_hint\n"
        "record_hint('00.average', 1)\n"
        "object()"
    )
    result = {
        "data": {"text/plain": ["<object at 0x7f0123456789>"]},
        "execution_count": 1,
        "metadata": {},
        "output_type": "execute_result",
    }
    cell = {"cell_type": "code", "execution_count": 1, "id": "a", "metadata": {}}
    cell.update(outputs=[result], source=[source])
    path = clone.folder / "notebooks" / "00_start_here.ipynb"
    path.write_text(json.dumps({**NOTEBOOK, "cells": [cell]}))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", place],
        check=False,
        cwd=clone.folder / folder,
        env=clone.env(
            PYTHONPATH=str(ROOT),
            # As if nothing but these had been installed.
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            PYTEST_PLUGINS="nbval.plugin",
            COURSE_STATE=str(clone.folder.parent / "learner"),
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "= 1 passed in " in done.stdout, done.stdout + done.stderr
    assert not (clone.folder.parent / "learner").exists()  # nobody learned anything
    for left in clone.folder.parent.glob("home/*"):
        shutil.rmtree(left)  # it is IPython's


# The files of this repository


def test_the_requirements_are_pins_for_every_python() -> None:
    lines = installer.requirements(ROOT).splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted.pop() == "-e ."
    pin = re.compile(r"[\w-]+==[\d.]+(; python_version (<|>=) \"3\.\d+\")?")
    assert all(map(pin.fullmatch, wanted)), wanted


def test_ci_installs_a_browser_then_calls_the_test_command(
    clone: Clone, tmp_path: Path
) -> None:
    (clone.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", clone.folder / ".ci" / "run")
    calls, programs = tmp_path / "calls", tmp_path / "bin"
    for name in ("dirname", "env", "bash", "ln"):
        (programs / name).symlink_to(shutil.which(name))
    clone.program("python3", f'echo "$*" >> {calls}; exit 4')
    clone.program("id", "echo 0")

    def run() -> str:
        command = [clone.folder / ".ci" / "run", "-x"]
        env = {"PATH": str(programs)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 4  # pytest's own
        assert calls.read_text().endswith("-m course_utils test -x\n")
        return done.stderr

    clone.program("apt-get", "echo broken mirror >&2; exit 100")
    errors = run()
    assert "broken mirror" in errors and "WARNING: no Chromium" in errors
    clone.program("apt-get", f"ln -sf /bin/true {programs}/chromium")
    assert run() == ""
    clone.program("apt-get", "echo never >&2")
    assert run() == ""  # now the browser is there
