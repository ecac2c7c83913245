"""The instructor guide is true: its plans, answers, quotes, links and commands."""

import contextlib
import io
import json
import re
import shlex
from collections import namedtuple
from dataclasses import replace
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from test_lessons import cells_of, further_minutes, stated_minutes

from course_utils import ROOT, questions
from course_utils import __main__ as command_line
from course_utils.measure.machine import inspect_machine
from course_utils.notebook import cohort, progress
from course_utils.notebook.lessons import LESSONS, Lesson
from course_utils.ranks import Ranks
from course_utils.ranks.magic import make_parser
from course_utils.setup import doctor, installer
from course_utils.tasks import tasks_of
from course_utils.tasks.task import Task

GUIDE = ROOT / "notebooks" / "instructor_guide.md"
TEXT = GUIDE.read_text(encoding="utf-8")
FLOWING = " ".join(TEXT.split())
# Code blocks hold no headings and no links.
PROSE = re.sub(r"^    .*$", "", TEXT, flags=re.MULTILINE)

HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
ID = re.compile(r"`(\d\d\.[a-z0-9_]+)`|\b(?:hint|solution)\(\"(\d\d\.[a-z0-9_]+)\"\)")

each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.number)


def section(title: str) -> str:
    """What stands below a heading, up to the next one of its level or a higher one."""
    found = re.search(rf"^(#+) {re.escape(title)}$", TEXT, re.MULTILINE)
    assert found, f"the guide has no heading {title!r}"
    rest = TEXT[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows_of(text: str) -> list[list[str]]:
    """The rows of all tables in a text, without their heads."""
    tables = re.findall(r"^\|[-|]+\|\n((?:\|.*\n?)+)", text, re.MULTILINE)
    lines = [line for table in tables for line in table.strip().split("\n")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def block_after(words: str, title: str) -> str:
    """The first indented block below a line of a section."""
    text = section(title)
    found = re.search(r"\n\n((?:    .*\n|\n)+)", text[text.index(words) :])
    return re.sub(r"^    ", "", found[1], flags=re.MULTILINE).strip("\n")


def ids_in(text: str) -> list[str]:
    return [a or b for a, b in ID.findall(text)]


@cache
def title_of(notebook: Path) -> str:
    return re.match(r"# (.+)", "".join(cells_of(notebook)[0]["source"]))[1]


@cache
def asked_in(notebook: Path) -> dict[str, list[str]]:
    """The sections of a lesson by their headings, with the questions they ask."""
    parts, here = {}, []
    for cell in cells_of(notebook):
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            here += re.findall(r"\bquiz\(\"([^\"]+)\"", text)
            continue
        for heading in re.findall(r"^#{2,4} (.+)$", text, re.MULTILINE):
            here = parts.setdefault(LINK.sub(r"\1", heading), [])
    return parts


# ------------------------------------------------------------------------- the plans


# The lesson is None for a break.
Row = namedtuple("Row", "minutes lesson sections demonstrated done")


def titles() -> list[str]:
    """The headings of the plans and their days: they say how many minutes are below."""
    return re.findall(r"^#+ (.+: \d+ minutes)$", TEXT, re.MULTILINE)


def rows_of_plan(title: str) -> list[Row]:
    """Those of a day; or of all days, where the plan has several."""
    rows = []
    for minutes, what, demonstrated, done in rows_of(section(title)):
        lesson, sections = None, ()
        if what not in ("Break", "Lunch"):
            (_, first), *others = LINK.findall(what)
            (lesson,) = (one for one in LESSONS if one.notebook.name == first)
            sections = tuple(text for text, _ in others)
            files = {target.partition("#")[0] for _, target in others}
            assert files <= {first, lesson.in_depth.name}, what
        rows.append(Row(int(minutes), lesson, sections, demonstrated, done))
    return rows


@pytest.mark.parametrize("title", titles())
def test_the_numbers_of_a_plan_are_those_of_its_rows(title):
    rows = rows_of_plan(title)
    assert sum(row.minutes for row in rows) == int(re.search(r"\d+", title)[0])
    for row in filter(lambda row: row.lesson, rows):
        sections = dict(asked_in(row.lesson.notebook))
        if row.lesson.in_depth.exists():
            sections |= asked_in(row.lesson.in_depth)
        asked = {question for one in row.sections for question in sections[one]}
        assert row.sections and set(ids_in(row.demonstrated)) <= asked, row
        assert set(ids_in(row.done)) <= set(row.lesson.tasks), row
    if title.startswith("The "):  # one of two days: the sentences stand above both
        return

    text = " ".join(section(title).split())
    work = sum(row.minutes for row in rows if row.lesson)
    breaks = sum(row.minutes for row in rows if not row.lesson)
    assert f"{work} minutes of work and {breaks} of breaks" in text
    tasks = [task for row in rows for task in ids_in(row.done)]
    assert f"They solve {len(tasks)} tasks" in text and len(set(tasks)) == len(tasks)


def test_the_times_are_those_that_lessons_and_exercises_state():
    *rows, total = rows_of(section("The times of the lessons"))
    numbers = [[int(re.search(r"\d+", cell)[0]) for cell in row[1:]] for row in rows]
    assert numbers == [
        [
            stated_minutes(lesson.notebook),
            further_minutes(lesson),
            stated_minutes(lesson.solution),
            len(lesson.tasks),
            len(questions.load(lesson.number)),
        ]
        for lesson in LESSONS
    ]
    assert [int(n) for n in total[1:]] == [sum(n) for n in zip(*numbers, strict=True)]


# ----------------------------------------------------------------------- the lessons


def piece(lesson: Lesson, name: str) -> str:
    """What a lesson's part says under one of its bold words, up to the next."""
    text = section(f"[{title_of(lesson.notebook)}]({lesson.notebook.name})")
    return re.search(rf"^\*\*{name}.*?(?=^\*\*|\Z)", text, re.M | re.S)[0]


@each_lesson
def test_every_task_has_its_reason_and_the_vote_is_a_question(lesson):
    reasons = piece(lesson, "Why the answers are so")
    assert tuple(re.findall(r"^- `([^`]+)`: ", reasons, re.MULTILINE)) == lesson.tasks
    votes = set(ids_in(piece(lesson, "Vote:")))
    assert votes and votes <= set(questions.load(lesson.number))


@each_lesson
def test_the_key_has_every_question_and_the_right_answer(lesson):
    rows = rows_of(piece(lesson, "All questions"))
    asked = questions.load(lesson.number)
    assert [row[0].strip("`") for row in rows] == list(asked)
    for (_, answer, _), question in zip(rows, asked.values(), strict=True):
        if isinstance(question, questions.Number):
            assert float(answer.split()[0]) == question.answer, question.id
        else:
            right = [n for n, one in enumerate(question.choices, 1) if one.right]
            assert [int(n) for n in re.findall(r"\d+", answer)] == right, question.id


@each_lesson
def test_what_the_check_says_is_what_it_says(lesson):
    says = []
    for task in tasks_of(lesson.number):
        if isinstance(task, Task):
            says += [miss.says for miss in task.misses]
            says += [*task.because.values(), *task.errors.values(), task.otherwise]
        else:
            says += [task.hint, *task.slips.values()]
    rows = rows_of(piece(lesson, "Where they get stuck"))
    quotes = [quote for row in rows for quote in re.findall(r'"([^"]+)"', row[1])]
    assert quotes
    assert [quote for quote in quotes if quote not in "\n".join(says)] == []


def test_every_id_is_one_of_the_course():
    known = {task for lesson in LESSONS for task in lesson.tasks}
    known |= {name for lesson in LESSONS for name in questions.load(lesson.number)}
    assert set(ids_in(TEXT)) - known == set()


def test_links_lead_to_what_they_say():
    found = [link for link in LINK.findall(PROSE) if "://" not in link[1]]
    assert len(found) > 200
    assert [link for link in found if not is_right(*link)] == []


def is_right(text: str, target: str) -> bool:
    """Whether the file is there, and the heading, which a lesson's link repeats."""
    path, _, fragment = target.partition("#")
    file = (GUIDE.parent / unquote(path)).resolve() if path else GUIDE
    headings = {text for _, text in HEADING.findall(PROSE)}
    if file.suffix == ".ipynb" and file.parent == GUIDE.parent and file.is_file():
        headings = {text} & (set(asked_in(file)) if fragment else {title_of(file)})
    # JupyterLab makes an anchor of a heading: its text, with - for each space.
    anchors = {heading.replace("`", "").replace(" ", "-") for heading in headings}
    return file.is_file() and bool(headings) and unquote(fragment) in {*anchors, ""}


# ---------------------------------------------------------------------- the commands


def test_the_commands_exist_with_their_options():
    """Those of CONTRIBUTING, too."""
    text = TEXT + (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?:^    |`)python3? -m course_utils ([^`\n]+)", text, re.M)
    assert len(lines) > 10
    for command, *words in map(shlex.split, lines):
        assert command in command_line.COMMANDS
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            command_line.main([command, "--help"])
        options = {word for word in words if word.startswith("--")}
        # What `test` does not know goes to pytest, as its help says.
        assert options <= {*re.findall(r"--[a-z-]+", out.getvalue()), "--version"}


def test_what_the_guide_names_is_there():
    for options in re.findall(r"`%%ranks (-[^`]+)`", TEXT):
        make_parser().parse_args(shlex.split(options))
    methods = set(re.findall(r"\branks\.([a-z_]+)\b(?:\(|`)", TEXT))
    assert methods and all(hasattr(Ranks, name) for name in methods)
    files = re.findall(r"`(\w+\.py)`", TEXT)
    files = [f"course_utils/workers/{name}" for name in files]
    for name in [*files, *re.findall(r"bash (\S+\.sh)", TEXT)]:
        assert (ROOT / name).is_file(), name


def test_the_example_of_a_class_is_what_the_command_prints(tmp_path, monkeypatch):
    names = block_after("Put the files into one folder", "What learners send").split()
    monkeypatch.setenv("COURSE_STATE", str(tmp_path / "state"))
    empty = json.dumps({"version": progress.VERSION, "tasks": {}, "questions": {}})
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(empty)
    found, left_out = cohort.collect(tmp_path / "class")
    assert [one.name for one in found] == ["anna", "ben", "carl", "dana"]
    assert left_out == []

    progress.record_attempt("00.who_am_i", "passed")
    for _ in range(4):
        progress.record_attempt("00.spot_the_hang", "stuck")
    progress.record_hint("00.spot_the_hang", 2)
    progress.record_answer("00.ranks", "this", True)
    progress.progress_file().replace(tmp_path / names[0])
    for task in ("00.who_am_i", "00.average", "01.rank_of"):
        progress.record_attempt(task, "passed")
    progress.record_attempt("00.spot_the_hang", "wrong")
    progress.progress_file().replace(tmp_path / "class" / "ben.json")
    shown = cohort.as_text(cohort.collect(tmp_path / "class")[0])
    assert block_after("On the terminal", "The table of a class") == shown


# ---------------------------------------------------------------- the doctor, the room


def test_the_line_of_the_room_is_that_of_the_command():
    bad = re.search(r"^    (room: NOT ready .+)\.\.\.$", TEXT, re.MULTILINE)[1]
    machine = replace(inspect_machine(), memory=8 * 10**9, free_memory=21 * 10**8)
    found = [doctor.room_in_memory(machine)]
    assert f"room: {doctor.in_a_line(machine, found)}".startswith(bad)


def test_the_memory_of_the_lessons_is_the_doctors():
    said = re.search(r"^\| (00 .*) \|\n.*\n\| (.*) \|$", TEXT, re.MULTILINE)
    numbers, peaks = (line.split(" | ") for line in said.groups())
    memory = {lesson.number: lesson.memory for lesson in LESSONS}
    assert dict(zip(numbers, map(float, peaks), strict=True)) == memory
    most = max(memory, key=memory.get)
    words = rf"note below ([\d.]+) GB, which {most} .* below ([\d.]+) GB"
    least = re.search(words, TEXT)
    seen = []
    for limit in map(float, least.groups()):
        for gigabytes in (limit - 0.01, limit + 0.01):
            machine = replace(inspect_machine(), free_memory=int(gigabytes * 1e9))
            found = doctor.room_in_memory(machine)
            seen.append((bool(found.fix), found.problem))
    assert seen == [(True, False), (False, False), (True, True), (True, False)]
    needs = {number: peak + doctor.BESIDES for number, peak in memory.items()}
    first = needs.pop(most)
    rest = max(needs.values())
    said = f"{first:.1f} GB for lesson {most}, {rest:.1f} GB for the others"
    assert said in FLOWING


def test_sizes_are_those_of_the_set_up():
    for build, (download, disk) in installer.SIZES.items():
        assert re.search(rf"{download:g} GB (to download|on one)", FLOWING), build
        assert f"{download + disk:.1f} GB" in FLOWING, build
