"""The instructor guide is true: its plans, answers, quotes, links and commands."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from test_lessons import stated_minutes, stated_optional_minutes

from course_utils import ROOT, questions
from course_utils.__main__ import COMMANDS
from course_utils.notebook import cohort, exercises, progress
from course_utils.notebook.exercises import reference
from course_utils.notebook.lessons import LESSONS, Lesson
from course_utils.questions import NumberTask
from course_utils.ranks import Ranks
from course_utils.ranks.magic import make_parser
from course_utils.setup import doctor, lab, room, testing
from course_utils.setup.machine import inspect_machine
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
PIECES = ("Vote:", "Where they get stuck", "Why the answers are so", "A good question.")
PIECES += ("All questions",)

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
def cells_of(notebook: Path) -> list[tuple[str, str]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


@cache
def title_of(notebook: Path) -> str:
    return re.match(r"# (.+)", cells_of(notebook)[0][1])[1]


@cache
def asked_in(notebook: Path) -> dict[str, list[str]]:
    """The sections of a lesson by their headings, with the questions they ask."""
    parts, here = {}, []
    for kind, text in cells_of(notebook):
        if kind == "code":
            here += re.findall(r"\bquiz\(\"([^\"]+)\"", text)
            continue
        for heading in re.findall(r"^#{2,4} (.+)$", text, re.MULTILINE):
            here = parts.setdefault(LINK.sub(r"\1", heading), [])
    return parts


# ------------------------------------------------------------------------- the plans


@dataclass(frozen=True)
class Row:
    """A row of a plan. ``lesson`` is None for a break."""

    minutes: int
    lesson: Lesson | None
    sections: tuple[str, ...]
    demonstrated: str
    done: str


def titles() -> list[str]:
    """The headings of the plans and their days: they say how many minutes are below."""
    return re.findall(r"^#+ (.+: \d+ minutes)$", TEXT, re.MULTILINE)


def days_of(title: str) -> list[list[Row]]:
    own = [one for _, one in HEADING.findall(section(title)) if one in titles()]
    return [day(one) for one in own or [title]]


def day(title: str) -> list[Row]:
    rows = []
    for minutes, what, demonstrated, done in rows_of(section(title)):
        lesson, sections = None, ()
        if what not in ("Break", "Lunch"):
            (_, first), *others = LINK.findall(what)
            (lesson,) = (one for one in LESSONS if one.notebook.name == first)
            sections = tuple(text for text, _ in others)
            assert {target.partition("#")[0] for _, target in others} == {first}, what
        rows.append(Row(int(minutes), lesson, sections, demonstrated, done))
    return rows


each_plan = pytest.mark.parametrize(
    "title", [one for one in titles() if not one.startswith("The ")]
)


@each_plan
def test_the_numbers_of_a_plan_are_those_of_its_rows(title):
    days = days_of(title)
    rows = [row for one in days for row in one]
    assert int(re.search(r"\d+", title)[0]) == sum(row.minutes for row in rows)
    text = " ".join(section(title).split())
    work = sum(row.minutes for row in rows if row.lesson)
    breaks = sum(row.minutes for row in rows if not row.lesson)
    assert f"{work} minutes of work and {breaks} of breaks" in text
    tasks = [task for row in rows for task in ids_in(row.done)]
    assert f"They solve {len(set(tasks))} tasks" in text and len(set(tasks)) == len(
        tasks
    )

    pauses, lunches_and_ends = set(), set()
    for one in days:
        now = 9 * 60
        for row in one:
            if row.lesson is None:
                (lunches_and_ends if row.minutes == 60 else pauses).add(now)
            now += row.minutes
        lunches_and_ends.add(now)
    said = re.findall(r"(\d+):(\d\d)", text[text.index("**From 9:00:**") + 12 :])
    times = {60 * int(hour) + int(minute) for hour, minute in said}
    # Of two days the breaks would be too many for a sentence.
    assert times == lunches_and_ends | (pauses if len(days) == 1 else set())


@pytest.mark.parametrize("title", titles())
def test_a_day_adds_up_and_its_votes_and_tasks_are_in_their_lesson(title):
    rows = [row for one in days_of(title) for row in one]
    assert sum(row.minutes for row in rows) == int(re.search(r"\d+", title)[0])
    for row in filter(lambda row: row.lesson, rows):
        parts = asked_in(row.lesson.notebook)
        asked = {name for one in row.sections for name in parts[one]}
        assert row.sections and set(ids_in(row.demonstrated)) <= asked, row
        assert set(ids_in(row.done)) <= set(row.lesson.tasks), row


def test_what_to_leave_out_when_late_is_in_the_plans_and_has_no_tasks():
    late = FLOWING.partition("**Late?**")[2].partition("**Early?**")[0]
    parts = re.split(r"\*(Half a day|One day|Two days):\*", late)[1:]
    assert len(parts) == 6
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        (title,) = (one for one in titles() if one.startswith(name))
        named = {link for link, _ in LINK.findall(text)}
        rows = [row for one in days_of(title) for row in one]
        rows = [row for row in rows if set(row.sections) & named]
        assert len(named) == len(rows) and not any(ids_in(row.done) for row in rows)
        if said := re.search(r"(\d+) minutes together", text):
            assert sum(row.minutes for row in rows) == int(said[1])


def test_the_times_are_those_that_lessons_and_exercises_state():
    *rows, total = rows_of(section("The times of the lessons"))
    numbers = [[int(re.search(r"\d+", cell)[0]) for cell in row[1:]] for row in rows]
    assert numbers == [
        [
            stated_minutes(lesson.notebook),
            stated_optional_minutes(lesson.notebook),
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
    begin = text.index(f"**{name}")
    ends = [text.find(f"**{other}", begin + 1) for other in PIECES]
    return text[begin : min((end for end in ends if end > 0), default=len(text))]


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
            says += task.sentences()
        elif isinstance(task, NumberTask):
            says += [task.hint, *(slip.why for slip in task.slips)]
        else:
            says += [task.otherwise, *(mistake.says for mistake in task.mistakes)]
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
    assert {link: fault for link in found if (fault := fault_of_link(*link))} == {}


def fault_of_link(text: str, target: str) -> str:
    """What is wrong with a link; "" if it is right."""
    path, _, fragment = target.partition("#")
    file = (GUIDE.parent / unquote(path)).resolve() if path else GUIDE
    if not file.is_file():
        return "no such file"
    headings = {text for _, text in HEADING.findall(PROSE)}
    if file.suffix == ".ipynb" and file.parent == GUIDE.parent:
        headings = set(asked_in(file))
        if text not in (headings if fragment else [title_of(file)]):
            return "no such heading there"
    # JupyterLab makes an anchor of a heading: its text, with - for each space.
    anchors = {heading.replace("`", "").replace(" ", "-") for heading in headings}
    return "" if not fragment or unquote(fragment) in anchors else "no such heading"


# ---------------------------------------------------------------------- the commands

MAINS = {
    "start": lab.main,
    "doctor": doctor.main,
    "test": testing.main,
    "progress": progress.main,
    "cohort": cohort.main,
    "build-exercises": exercises.main,
}


def test_the_commands_exist_with_their_options():
    lines = re.findall(r"(?:^    |`)python3? -m course_utils ([^`\n]+)", TEXT, re.M)
    assert len(lines) > 10
    for command, *words in map(shlex.split, lines):
        assert command in COMMANDS
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            MAINS[command](["--help"])
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
    (tmp_path / "class" / "dana" / "dana_progress.json").unlink()
    shown = cohort.as_text(cohort.collect(tmp_path / "class")[0])
    assert block_after("On the terminal", "The table of a class") == shown


@pytest.mark.thorough
def test_nbgrader_gives_points_for_what_a_check_passes(tmp_path, monkeypatch):
    """Anna has solved the task and Ben has not, and both run what the guide says."""
    title = "Marks, with nbgrader"
    commands = block_after("Then:", title).splitlines()
    lines = block_after("raises an error", title)
    name = LESSONS[0].exercise.stem
    source = tmp_path / "source" / name / f"{name}.ipynb"
    source.parent.mkdir(parents=True)
    notebook = nbformat.read(LESSONS[0].exercise, as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.id == "average-check")
    cell.source += f"\n{lines}"
    # What the sidebar writes for "Autograded tests".
    marks = {"grade": True, "solution": False, "task": False, "locked": True}
    marks |= {"grade_id": "average", "points": 1, "schema_version": 3}
    cell.metadata["nbgrader"] = {**marks, "cell_type": "code"}
    nbformat.write(notebook, source)

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(programs), prepend=":")

    def run(command: str) -> None:
        words = [programs / "nbgrader", *command.split()[1:]]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)

    run(commands[0])
    released = tmp_path / "release" / name / source.name
    for who in ("anna", "ben"):
        notebook = nbformat.read(released, as_version=4)
        (cell,) = (cell for cell in notebook.cells if cell.id == "average")
        if who == "anna":
            cell.source = reference("00.average").code
        folder = tmp_path / "submitted" / who / name
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / source.name)
    for command in commands[1:]:
        run(command)
    table = (tmp_path / "grades.csv").read_text()
    assert re.findall(r",(anna|ben),.*,([\d.]+),1.0$", table, re.MULTILINE) == [
        ("anna", "1.0"),
        ("ben", "0.0"),
    ]


# ---------------------------------------------------------------- the doctor, the room


def test_the_tables_of_the_doctor_and_the_room_have_their_lines():
    looked, tried = section("Check each laptop").split("**Room checks.**")
    written = Path(doctor.__file__).read_text(encoding="utf-8")
    topics = set(re.findall(r"Finding\(\s*\"([^\"]+)\"", written))
    named = [row[0] for row in rows_of(looked)]
    # The others appear in special cases only.
    assert topics - {"folder", "venv", "GPU links"} == set(", ".join(named).split(", "))
    assert [row[0] for row in rows_of(tried)] == [step.topic for step in room.STEPS]


def test_the_lines_of_the_room_are_those_of_the_command():
    good, bad = re.findall(r"^    (room: .+)$", TEXT, re.MULTILINE)
    facts = {"release": "macOS 15.1", "cores": 8}
    machine = replace(
        inspect_machine(), **facts, memory=16 * 10**9, free_memory=91 * 10**8
    )
    tried = room.Tried("ranks", "", brief=good.split(" | ", 4)[4])
    assert room.last_words([tried], machine) == good
    machine = replace(machine, memory=8 * 10**9, free_memory=21 * 10**8)
    line = room.last_words([doctor._free_memory(machine)], machine)
    assert line.startswith(bad.removesuffix("..."))


def test_the_memory_of_the_lessons_is_the_doctors():
    said = re.search(r"^\| (00 .*) \|\n.*\n\| (.*) \|$", TEXT, re.MULTILINE)
    numbers, peaks = (line.split(" | ") for line in said.groups())
    assert dict(zip(numbers, map(float, peaks), strict=True)) == doctor.LESSON_MEMORY
    least = re.search(r"note below ([\d.]+) GB, which 08 .* below ([\d.]+) GB", TEXT)
    marks = []
    for limit in map(float, least.groups()):
        for gigabytes in (limit - 0.01, limit + 0.01):
            machine = replace(inspect_machine(), free_memory=int(gigabytes * 1e9))
            marks.append(doctor._free_memory(machine).mark)
    assert marks == ["note", "ok", "PROBLEM", "note"]
    needs = {n: peak + doctor.BESIDES for n, peak in doctor.LESSON_MEMORY.items()}
    first = needs.pop("08")
    said = f"{first:.0f} GB for lesson 08, {max(needs.values()):.1f} GB for the others"
    assert said in FLOWING


def test_sizes_are_those_of_the_requirements():
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    sizes = re.findall(r"([\d.]+) GB to download, ([\d.]+) GB on disk", text)
    linux, others = ([float(n) for n in pair] for pair in sizes)
    for said in (
        f"Linux {sum(linux):.1f} GB, macOS and Windows {sum(others):.1f} GB",
        f"on Linux {linux[0]:g} GB to download, on macOS and Windows {others[0]:g} GB",
        f"Linux {linux[1]:g} GB, with the CPU build",
    ):
        assert said in FLOWING
