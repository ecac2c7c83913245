"""Every lesson is on the map, complete, and built like the others."""

import json
import re
import symtable
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from course_utils import pictures
from course_utils.notebook import exercises
from course_utils.notebook.lessons import LESSONS, Lesson
from course_utils.questions import load

ROOT = Path(__file__).resolve().parent.parent
LAST_HEADINGS = ["Recap", "What goes wrong", "On real GPUs", "Sources"]
OPTIONAL = " (optional)"  # ends the heading of a section that can be left out

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
    found = {path.stem for path in (ROOT / folder).glob("[0-9][0-9]_*.ipynb")}
    deeper = {path.stem for path in DEEPER} if folder == "notebooks" else set()
    assert found == {lesson.slug for lesson in LESSONS} | deeper


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
    assert f"exercises/{lesson.slug}.ipynb" in prose

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
    """The time that a lesson or an exercise states, without optional sections."""
    first = "".join(cells_of(notebook)[0]["source"])
    return int(re.search(r"\*\*Time:\*\* (?:about )?(\d+) minutes", first)[1])


def stated_optional_minutes(notebook: Path) -> int:
    """The time that a lesson states for its optional sections."""
    first = "".join(cells_of(notebook)[0]["source"])
    said = re.search(
        r"minutes, and (\d+) more for the sections? marked \*\(optional\)\*", first
    )
    return int(said[1]) if said else 0


def further_minutes(lesson: Lesson) -> int:
    """The time that its optional sections and its notebook in depth state."""
    deeper = stated_minutes(lesson.in_depth) if lesson.in_depth.exists() else 0
    return stated_optional_minutes(lesson.notebook) + deeper


def in_sections(notebook: Path) -> Iterator[tuple[str, str, str]]:
    """The kind and the text of each cell, after the optional section it belongs to.

    A cell of text with several headings comes in pieces. The section is "" for what is
    in none.
    """
    open_headings: dict[int, str] = {}
    for cell in cells_of(notebook):
        text = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        for piece in [text] if is_code else re.split(r"^(?=##+ )", text, flags=re.M):
            heading = None if is_code else re.match(r"(##+) (.+)", piece)
            if heading:
                level = len(heading[1])
                kept = {at: h for at, h in open_headings.items() if at < level}
                open_headings = kept | {level: heading[2]}
            optional = [h for h in open_headings.values() if h.endswith(OPTIONAL)]
            yield (optional or [""])[0], cell["cell_type"], piece


def minutes_of(notebook: Path, *, optional: bool = False) -> float:
    """What a notebook takes: its optional sections, or all others.

    A minute for 180 words, for 100 words of code and for a picture; a minute and a half
    for a question, 12 for a task. And one, in all, to wait for the machine.
    """
    minutes = 0.0 if optional else 1.0
    for section, kind, text in in_sections(notebook):
        if bool(section) != optional:
            continue
        if kind == "code":
            minutes += len(text.split()) / 100 + 1.5 * text.count('quiz("')
            minutes += ("pictures." in text) + 12 * (
                "raise NotImplementedError" in text
            )
        else:
            minutes += len(re.sub(r"\]\(.*?\)", "]", text).split()) / 180
    return minutes


@each_lesson
def test_the_stated_times_are_what_reading_and_running_takes(lesson: Lesson):
    def is_about(said: int, takes: float) -> bool:
        return abs(said - takes) <= max(0.1 * takes, 2.5)

    stated = {
        minutes_of(lesson.notebook): stated_minutes(lesson.notebook),
        minutes_of(lesson.notebook, optional=True): stated_optional_minutes(
            lesson.notebook
        ),
    }
    if lesson.in_depth.exists():
        stated[minutes_of(lesson.in_depth)] = stated_minutes(lesson.in_depth)
    assert all(is_about(said, takes) for takes, said in stated.items()), stated


def names_in(code: str) -> tuple[set[str], set[str]]:
    """The names that a cell makes, and those that it uses, functions' insides, too."""
    made, used = set(), set()
    tables = [symtable.symtable(code, "cell", "exec")]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() != "module":
                wanted = symbol.is_global()
            else:
                wanted = True
                if symbol.is_assigned() or symbol.is_imported():
                    made.add(symbol.get_name())
            if wanted and symbol.is_referenced():
                used.add(symbol.get_name())
    return made, used


def used_across(cells: list[tuple[str, str]]) -> Iterator[tuple[str, str, set[str]]]:
    """(section, name, sections that make it), where none of these has to be run.

    Args:
        cells: section and code of each cell of code, in order; "" is no optional one.
    """
    makers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for section, text in cells:
        on_ranks = text.startswith("%%ranks")
        code = "\n".join(x for x in text.splitlines() if not x.startswith("%"))
        made, used = names_in(code)
        own = {("ranks" if on_ranks else "kernel", name) for name in made}
        wanted = {("ranks" if on_ranks else "kernel", name) for name in used}
        if ".pull" in text:  # names of variables on the ranks
            wanted |= {("ranks", name) for name in re.findall(r'"(\w+)"', text)}
        own |= {("ranks", name) for name in re.findall(r"\.push\((\w+)=", text)}
        for where in sorted(wanted - own):
            if makers[where] and not makers[where] & {"", section}:
                yield section, where[1], makers[where]
        for where in own:
            makers[where].add(section)


@each_lesson
def test_no_section_needs_an_optional_one(lesson: Lesson):
    code = [
        (section, text)
        for section, kind, text in in_sections(lesson.notebook)
        if kind == "code"
    ]
    assert list(used_across(code)) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lesson",
    [one for one in LESSONS if stated_optional_minutes(one.notebook)],
    ids=lambda one: one.slug,
)
def test_a_lesson_runs_without_its_optional_sections(lesson: Lesson, tmp_path: Path):
    code = [
        (s, text) for s, kind, text in in_sections(lesson.notebook) if kind == "code"
    ]
    cells = cells_of(lesson.notebook, "code")
    notebook = nbformat.v4.new_notebook()
    for (section, text), cell in zip(code, cells, strict=True):
        if not section:
            new = nbformat.v4.new_code_cell(text, metadata=cell["metadata"])
            notebook.cells.append(new)
    assert 0 < len(notebook.cells) < len(code)
    path = tmp_path / lesson.notebook.name
    nbformat.write(notebook, path)
    exercises.execute_notebooks([path])  # raises what a cell raises


def test_the_readme_says_how_long_all_takes():
    said = re.search(
        r"lessons\s+together\s+take\s+about\s+(\d+)\s+hours, what\s+goes\s+beyond\s+"
        r"them\s+(\d+)\s+more, and\s+the\s+exercises\s+(\d+);",
        (ROOT / "README.md").read_text(encoding="utf-8"),
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
