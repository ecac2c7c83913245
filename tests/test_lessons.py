"""Every lesson is on the map, complete, and built like the others."""

import json
import re
from pathlib import Path

import pytest

from course_utils import pictures
from course_utils.lessons import LESSONS, Lesson
from course_utils.questions import lessons as lessons_with_questions
from course_utils.questions import load

ROOT = Path(__file__).resolve().parent.parent
LAST_HEADINGS = ["Recap", "What goes wrong", "On real GPUs", "Sources"]

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.slug)


def cells_of(path: Path, kind: str | None = None) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if kind in (None, cell["cell_type"])]


def sources(path: Path, kind: str) -> str:
    return "\n".join("".join(cell["source"]) for cell in cells_of(path, kind))


def test_lessons_are_numbered_without_a_gap():
    assert [lesson.number for lesson in LESSONS] == [
        f"{number:02}" for number in range(len(LESSONS))
    ]


@pytest.mark.parametrize("folder", ["notebooks", "solutions", "exercises"])
def test_every_notebook_of_a_lesson_is_on_the_map(folder):
    found = {path.stem for path in (ROOT / folder).glob("[0-9][0-9]_*.ipynb")}
    assert found == {lesson.slug for lesson in LESSONS}


def test_the_readme_lists_every_lesson():
    row = re.compile(r"^\| (\d\d) \| \[(.+?)\]\((.+?)\) \| \S.* \|$", re.MULTILINE)
    found = row.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found == [
        (lesson.number, lesson.title, f"notebooks/{lesson.slug}.ipynb")
        for lesson in LESSONS
    ]


def test_the_map_in_the_first_lesson_has_every_lesson():
    cell = next(
        cell
        for cell in cells_of(LESSONS[0].notebook, "code")
        if "course_map" in "".join(cell["source"])
    )
    (output,) = cell["outputs"]
    drawn = "".join(output["data"]["text/plain"])
    assert drawn == repr(pictures.course_map(here="00")), (
        "run: python3 -m course_utils build-exercises --execute "
        "notebooks/00_start_here.ipynb"
    )


def test_every_lesson_has_questions():
    assert lessons_with_questions() == [lesson.number for lesson in LESSONS]


@each_lesson
def test_every_question_is_asked_in_its_lesson(lesson: Lesson):
    asked = re.findall(r"\bquiz\(\s*\"([^\"]+)\"", sources(lesson.notebook, "code"))
    assert set(asked) == set(load(lesson.number))
    assert len(asked) == len(set(asked)), "a question is asked twice"


@each_lesson
def test_a_lesson_opens_and_closes_like_the_others(lesson: Lesson):
    first = "".join(cells_of(lesson.notebook)[0]["source"])
    assert first.splitlines()[0] == f"# {lesson.number} · {lesson.title}"
    assert re.search(r"\*\*Time:\*\* (about )?\d+ minutes", first)
    assert "**It needs:**" in first
    prose = sources(lesson.notebook, "markdown")
    headings = re.findall(r"^## (.+)$", prose, re.MULTILINE)
    assert [one for one in headings if one in LAST_HEADINGS] == LAST_HEADINGS
    assert f"exercises/{lesson.slug}.ipynb" in prose

    first = "".join(cells_of(lesson.solution)[0]["source"])
    assert first.splitlines()[0] == f"# Exercise {lesson.number}: {lesson.title}"
    assert f"notebooks/{lesson.slug}.ipynb" in first


def stated_minutes(notebook: Path) -> int:
    """The time that a lesson or an exercise states."""
    first = "".join(cells_of(notebook)[0]["source"])
    return int(re.search(r"\*\*Time:\*\* (?:about )?(\d+) minutes", first)[1])


@each_lesson
def test_the_stated_time_is_what_reading_and_running_takes(lesson: Lesson):
    """130 words and 15 lines of code a minute, 1 for a question, 0.2 for a cell."""
    code = cells_of(lesson.notebook, "code")
    words = re.sub(r"\]\(.*?\)", "]", sources(lesson.notebook, "markdown")).split()
    lines = sum(len("".join(cell["source"]).splitlines()) for cell in code)
    questions = len(load(lesson.number))
    takes = len(words) / 130 + lines / 15 + questions + 0.2 * len(code)
    assert takes / 1.25 < stated_minutes(lesson.notebook) < takes * 1.35 + 5, takes


def test_the_readme_says_how_long_all_takes():
    said = re.search(
        r"together take\s+about\s+(\d+)\s+hours, the\s+exercises\s+(\d+)\s+more",
        (ROOT / "README.md").read_text(encoding="utf-8"),
    )
    lessons = sum(stated_minutes(lesson.notebook) for lesson in LESSONS)
    exercises = sum(stated_minutes(lesson.solution) for lesson in LESSONS)
    hours = round(lessons / 60), round(exercises / 60)
    assert tuple(map(int, said.groups())) == hours, "below the table in README.md"


@each_lesson
def test_cells_of_a_lesson_fit_a_screen(lesson: Lesson):
    for cell in cells_of(lesson.notebook, "code"):
        lines = "".join(cell["source"]).splitlines()
        assert len(lines) <= 25, cell["id"]
        assert max(map(len, lines)) <= 88, cell["id"]


@each_lesson
def test_paragraphs_are_short(lesson: Lesson):
    for path in (lesson.notebook, lesson.solution):
        for cell in cells_of(path, "markdown"):
            for paragraph in re.split(r"\n\s*\n", "".join(cell["source"])):
                if not paragraph.lstrip().startswith(("|", "- ", "1. ", "    ")):
                    assert len(paragraph.split()) <= 120, (path.name, cell["id"])
