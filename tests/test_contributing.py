"""What CONTRIBUTING says holds: its steps make a lesson, and every name in it exists.

The steps are read out of the document, and run as they stand there in a copy of the
repository, but for the last one, which runs everything. The copy has no environment of
its own: the commands stay in this one, which has what they need.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from course_utils import ROOT
from course_utils.notebook.lessons import LESSONS

DOCUMENT = ROOT / ".github" / "CONTRIBUTING.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
NUMBER = f"{len(LESSONS):02}"  # of the lesson that the steps make
SLUG = f"{NUMBER}_sharded_norm"

Run = Callable[..., subprocess.CompletedProcess]


def blocks(heading: str) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks between a heading and the next."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert section, heading
    return re.findall(r"^```(\w+)\n(.*?)^```$", section[1], re.M | re.S)


COPY, LESSON_LINE, README_ROW, EXECUTE, TEST, FINISH = blocks("Add a lesson")


def insert_after_last(path: Path, beginning: str, line: str) -> None:
    """Put a line below the last one that begins so."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    last = max(i for i, text in enumerate(lines) if text.startswith(beginning))
    lines.insert(last + 1, line)
    path.write_text("".join(lines), encoding="utf-8")


def copy_course(folder: Path) -> Path:
    """Copy what is, or is to be, in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    test_the_steps_are_there_and_the_number_is_free()  # or they would fail, one by one
    return copy_course(tmp_path_factory.mktemp("contributor") / "course")


@pytest.fixture(scope="module")
def run(clone: Path) -> Run:
    """Run the lines of a block in the copy, in this Python's environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "PYTHONPATH"))
    }
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    kept["COURSE_STATE"] = str(clone.parent / "state")
    kept["TMPDIR"] = str(clone.parent / "tmp")
    os.mkdir(kept["TMPDIR"])

    def run(lines: str, **more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-euc", lines],
            cwd=clone,
            env={**kept, **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )

    return run


@pytest.fixture(scope="module")
def copied(clone: Path, run: Run) -> Path:
    """After the first step, and the line in `lessons.py`."""
    done = run(COPY[1])
    assert done.returncode == 0, done.stdout
    lessons = clone / "course_utils" / "notebook" / "lessons.py"
    insert_after_last(lessons, '    Lesson("', LESSON_LINE[1])
    return clone


@pytest.fixture(scope="module")
def forgotten(copied: Path, run: Run) -> str:
    """What the tests say before the other steps: to be asked for before ``made``."""
    done = run(
        f"python3 -m course_utils test -k 'lessons or {NUMBER}' -p no:cacheprovider "
        "tests/test_lessons.py tests/test_instructor_guide.py"
    )
    assert done.returncode == 1, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def made(copied: Path, run: Run) -> Path:
    """After the last step but the tests."""
    insert_after_last(copied / "README.md", f"| {LESSONS[-1].number} |", README_ROW[1])
    done = run(EXECUTE[1])
    assert done.returncode == 0, done.stdout
    return copied


# ---------------------------------------------------------------------- a new lesson


def test_the_steps_are_there_and_the_number_is_free():
    steps = [COPY, LESSON_LINE, README_ROW, EXECUTE, TEST, FINISH]
    assert [language for language, _ in steps] == [
        *("sh", "text", "markdown"),
        *("sh", "sh", "sh"),
    ]
    made = re.findall(r"> notebooks/(\d\d)_", COPY[1])
    assert made == [NUMBER], (
        f"the next lesson is {NUMBER}: write it for {made[0]} below 'Add a lesson' in "
        f"{DOCUMENT.name}"
    )


def test_every_file_of_the_template_is_copied():
    used = re.findall(rf"^sed s/NN/{NUMBER}/g tests/template/(\S+) > ", COPY[1], re.M)
    there = {path.name for path in (ROOT / "tests" / "template").iterdir()}
    assert set(used) == there - {"conftest.py", "__pycache__"}


@pytest.mark.thorough
def test_a_step_left_out_is_noticed(forgotten: str):
    failed = re.findall(r"^FAILED tests/(\w+).py::(\w+)", forgotten, re.M)
    assert {name for file, name in failed if file == "test_lessons"} >= {
        "test_the_readme_lists_every_lesson",
        "test_every_notebook_of_a_lesson_is_on_the_map",
        "test_the_map_in_the_first_lesson_has_every_lesson",
    }
    assert "test_instructor_guide" in {file for file, _ in failed}
    again, everything = FINISH[1].splitlines()
    assert again in " ".join(forgotten.split())
    assert everything == "python3 -m course_utils test --all"


def test_the_exercise_is_made_without_its_answers(made: Path):
    text = (made / "exercises" / f"ex_{SLUG}.ipynb").read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    assert sum("NotImplementedError" in "".join(cell["source"]) for cell in cells) == 1
    assert "dist.all_reduce" not in text
    assert "NN" not in text


def test_the_notebooks_are_run(made: Path):
    for folder, said in (("notebooks", "tensor([5.])"), ("solutions", "passed")):
        text = (made / folder / f"{SLUG}.ipynb").read_text(encoding="utf-8")
        outputs = [
            "".join(output.get("text", ()))
            for cell in json.loads(text)["cells"]
            for output in cell.get("outputs", ())
        ]
        assert any(said in output for output in outputs)


def test_pictures_progress_and_questions_have_it(made: Path, run: Run):
    done = run(f"""python3 -c 'from course_utils import LESSONS, pictures, quiz, why
print(pictures.course_map(LESSONS, here="{NUMBER}"))
quiz("{NUMBER}.norm", answer=9)
why("{NUMBER}.norm")
quiz("{NUMBER}.what_to_send", answer=3)'
python3 -m course_utils progress""")
    assert done.returncode == 0, done.stdout
    assert f"{NUMBER} The norm of a sharded vector." in done.stdout
    assert f"{NUMBER}  The norm of a sharded vector  0 of 3 tasks done" in done.stdout
    text = " ".join(done.stdout.split())
    assert "Not quite. Too high. 9 is the sum of the numbers." in text
    assert "Right. Sums of sums are sums" in text
    assert f"Lesson {NUMBER}: 1 of 1 answers right, 1 at the first try" in text


@pytest.mark.thorough
def test_its_tests_pass(made: Path, run: Run):
    """Step 4 passes, and each of its files has run a test of the new lesson."""
    done = run(TEST[1], PYTEST_ADDOPTS="-v -p no:cacheprovider")
    assert done.returncode == 0, done.stdout
    passed = [line for line in done.stdout.splitlines() if " PASSED" in line]
    for name in (
        f"test_exercises.py::test_an_unsolved_exercise_passes_nothing[{SLUG}]",
        f"test_exercises.py::test_a_solved_exercise_passes_everything[{SLUG}]",
        f"test_tasks.py::test_a_near_miss_is_told_in_its_own_words[{NUMBER}.global_norm]",
        f"test_lesson_{NUMBER}_answers.py::test_wrong"
        f"[{NUMBER}.global_norm-on_rank_0-wrong]",
        f"test_lesson_{NUMBER}_answers.py::test_right[{NUMBER}.global_norm-gathered]",
        f"test_truth.py::test_every_link_has_a_title_and_a_date[lesson {NUMBER}]",
        f"test_glossary.py::test_a_lesson_links_the_first_use_of_each_word[{NUMBER}]",
        f"test_lessons.py::test_every_question_is_asked_in_its_lesson[{SLUG}]",
        f"test_quiz.py::test_the_right_answer_and_only_it_is_accepted_and_all_is_explained[{NUMBER}.norm]",
    ):
        assert any(name in line for line in passed), f"{name}\n{done.stdout}"


# ------------------------------------------------------------- what the document names


def test_every_file_that_it_names_exists():
    parent = ""
    missing = []
    for name in re.findall(r"`([\w.]+/[\w./]*|[\w]+\.(?:py|md|ipynb))`", TEXT):
        if "NN" in name or "_X" in name or name.startswith(".venv/"):
            continue  # a pattern, or what the set-up makes
        # In a row of the table the later names stand in the folder of the first.
        if not (ROOT / name).exists() and not (ROOT / parent / name).exists():
            missing.append(name)
        if "/" in name:
            parent = Path(name).parent
    assert not missing


def test_the_first_line_of_every_module_says_what_it_is_for():
    first_lines = {}
    for folder in ("course_utils", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            found = re.match(r'(?:#!.*\n)?"""(\S.*[.?:])(?:"""|\n)', text)
            assert found, f"begin {path.relative_to(ROOT)} with a sentence"
            first_lines[path] = found[1]
    assert len(set(first_lines.values())) == len(first_lines), "two say the same"
