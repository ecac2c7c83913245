"""Every lesson is on the map, complete, and built like the others."""

import json
import re
from pathlib import Path

import pytest

from course_utils import ROOT, pictures
from course_utils.notebook.lessons import LESSONS, Lesson
from course_utils.questions import NumberTask, load
from course_utils.tasks import tasks_of

LAST_HEADINGS = ["Recap", "What goes wrong", "On real GPUs", "Sources"]

DEEPER = [lesson.in_depth for lesson in LESSONS if lesson.in_depth.exists()]

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.slug)


def cells_of(path: Path, kind: str | None = None) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if kind in (None, cell["cell_type"])]


def sources(path: Path, kind: str) -> str:
    if not path.exists():
        return ""
    return "\n\n".join("".join(cell["source"]) for cell in cells_of(path, kind))


def test_lessons_are_numbered_without_a_gap():
    assert [lesson.number for lesson in LESSONS] == [
        f"{number:02}" for number in range(len(LESSONS))
    ]


@pytest.mark.parametrize("folder", ["notebooks", "solutions", "exercises"])
def test_every_notebook_of_a_lesson_is_on_the_map(folder):
    found = {path.stem for path in (ROOT / folder).glob("*.ipynb")}
    deeper = {path.stem for path in DEEPER} if folder == "notebooks" else set()
    prefix = "ex_" if folder == "exercises" else ""
    assert found == {prefix + lesson.slug for lesson in LESSONS} | deeper


def test_the_readme_lists_every_lesson():
    row = re.compile(r"^\| (\d\d) \| \[(.+?)\]\((.+?)\) \| \S.* \|$", re.MULTILINE)
    found = row.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found == [
        (lesson.number, lesson.title, f"notebooks/{lesson.slug}.ipynb")
        for lesson in LESSONS
    ]


def test_the_map_in_the_first_lesson_has_every_lesson():
    shown = [
        "".join(output["data"]["text/plain"])
        for cell in cells_of(LESSONS[0].notebook, "code")
        for output in cell["outputs"]
        if "course_map" in "".join(cell["source"])
    ]
    assert shown == [repr(pictures.course_map(LESSONS, here="00"))], (
        "run: python3 -m course_utils build-exercises --execute "
        "notebooks/00_start_here.ipynb"
    )


@each_lesson
def test_every_question_is_asked_in_its_lesson(lesson: Lesson):
    code = sources(lesson.notebook, "code") + sources(lesson.in_depth, "code")
    asked = re.findall(r"\bquiz\(\s*\"([^\"]+)\"", code)
    assert sorted(asked) == sorted(load(lesson.number)) != []


@each_lesson
def test_every_prediction_is_explained_after_it_was_made(lesson: Lesson):
    code = sources(lesson.notebook, "code") + sources(lesson.in_depth, "code")
    uses = re.findall(r"\b(quiz|why)\(\s*\"([^\"]+)\"", code)
    explained = [name for what, name in uses if what == "why"]
    asked = load(lesson.number)
    assert sorted(explained) == sorted(id for id in asked if asked[id].measured)
    for name in explained:
        assert uses.index(("quiz", name)) < uses.index(("why", name))


@each_lesson
def test_a_lesson_opens_and_closes_like_the_others(lesson: Lesson):
    first = "".join(cells_of(lesson.notebook)[0]["source"])
    assert first.splitlines()[0] == f"# {lesson.number} · {lesson.title}"
    assert re.search(r"\*\*Time:\*\* (about )?\d+ minutes", first)
    assert "**It needs:**" in first
    prose = sources(lesson.notebook, "markdown")
    headings = re.findall(r"^## (.+)$", prose, re.MULTILINE)
    assert [one for one in headings if one in LAST_HEADINGS] == LAST_HEADINGS
    assert f"exercises/{lesson.exercise.name}" in prose

    first = "".join(cells_of(lesson.solution)[0]["source"])
    assert first.splitlines()[0] == f"# Exercise {lesson.number}: {lesson.title}"
    assert f"notebooks/{lesson.slug}.ipynb" in first


@pytest.mark.parametrize("notebook", DEEPER, ids=lambda one: one.stem)
def test_a_notebook_in_depth_belongs_to_its_lesson(notebook: Path):
    lesson = next(lesson for lesson in LESSONS if lesson.in_depth == notebook)
    first = "".join(cells_of(notebook)[0]["source"])
    assert first.splitlines()[0] == f"# {lesson.number} · {lesson.title}, in depth"
    assert f"]({lesson.notebook.name})" in first
    assert f"]({notebook.name})" in sources(lesson.notebook, "markdown")


def stated_minutes(notebook: Path) -> int:
    """The time that a lesson or an exercise states."""
    first = "".join(cells_of(notebook)[0]["source"])
    return int(re.search(r"\*\*Time:\*\* (?:about )?(\d+) minutes", first)[1])


def further_minutes(lesson: Lesson) -> int:
    """The time that its notebook in depth states."""
    return stated_minutes(lesson.in_depth) if lesson.in_depth.exists() else 0


def minutes_of(notebook: Path) -> float:
    """What a notebook takes.

    A minute for 180 words, for 100 words of code and for a picture; a minute and a half
    for a question, 12 for a task. And one, in all, to wait for the machine.
    """
    minutes = 1.0
    for cell in cells_of(notebook):
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            minutes += len(text.split()) / 100 + 1.5 * text.count('quiz("')
            minutes += 12 * ("raise NotImplementedError" in text)
            minutes += "pictures." in text
        else:
            minutes += len(re.sub(r"\]\(.*?\)", "]", text).split()) / 180
    return minutes


@pytest.mark.parametrize(
    "notebook",
    [*(lesson.notebook for lesson in LESSONS), *DEEPER],
    ids=lambda one: one.stem,
)
def test_the_stated_times_are_what_reading_and_running_takes(notebook: Path):
    takes, said = minutes_of(notebook), stated_minutes(notebook)
    assert abs(said - takes) <= max(0.1 * takes, 2.5), takes


STARS = {1: 10, 2: 15, 3: 20}  # minutes for a task; a number to predict takes 3


@each_lesson
def test_the_stated_time_of_an_exercise_is_that_of_its_tasks(lesson: Lesson):
    tasks = tasks_of(lesson.number)
    predicted = [isinstance(task, NumberTask) for task in tasks]
    takes = 3 * sum(predicted) + sum(
        STARS[task.stars]
        for task, is_number in zip(tasks, predicted, strict=True)
        if not is_number
    )
    assert abs(stated_minutes(lesson.solution) - takes) <= 2.5, takes


@each_lesson
def test_a_lesson_is_one_hour_and_one_idea(lesson: Lesson):
    code = sources(lesson.notebook, "code").splitlines()
    assert len(cells_of(lesson.notebook)) <= 90
    assert len([line for line in code if line.strip()]) <= 300
    assert stated_minutes(lesson.notebook) <= 60


def test_the_readme_says_how_long_all_takes():
    said = re.search(
        r"lessons together take about (\d+) hours, the notebooks `\.\.\._in_depth` of "
        r"five lessons (\d+) more, and the exercises (\d+);",
        " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()),
    )
    minutes = [
        sum(stated_minutes(lesson.notebook) for lesson in LESSONS),
        sum(map(further_minutes, LESSONS)),
        sum(stated_minutes(lesson.solution) for lesson in LESSONS),
    ]
    hours = [round(each / 60) for each in minutes]
    assert [int(n) for n in said.groups()] == hours, "below the table in README.md"


@each_lesson
def test_cells_and_paragraphs_fit_a_screen(lesson: Lesson):
    read = [lesson.notebook, lesson.solution]
    read += [lesson.in_depth] if lesson.in_depth.exists() else []
    for path in read:
        if path != lesson.solution:
            for cell in cells_of(path, "code"):
                lines = "".join(cell["source"]).splitlines()
                assert len(lines) <= 25 and max(map(len, lines)) <= 88, cell["id"]
        for paragraph in re.split(r"\n\s*\n", sources(path, "markdown")):
            if not paragraph.lstrip().startswith(("|", "- ", "1. ", "    ")):
                assert len(paragraph.split()) <= 120, paragraph
