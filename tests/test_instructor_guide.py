"""The instructor guide names what exists, adds up, and quotes what the checks say."""

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from test_lessons import stated_minutes, stated_optional_minutes

from course_utils import ROOT, questions
from course_utils.__main__ import COMMANDS
from course_utils.notebook import exercises as exercises_module
from course_utils.notebook import progress
from course_utils.notebook.cohort import collect as read_class
from course_utils.notebook.cohort import columns
from course_utils.notebook.cohort import main as cohort_main
from course_utils.notebook.cohort.report import as_text
from course_utils.notebook.lessons import LESSONS, Lesson, lesson_of
from course_utils.notebook.slides import main as slides_main
from course_utils.questions import NumberTask
from course_utils.ranks import Ranks
from course_utils.ranks.magic import make_parser
from course_utils.setup import doctor, lab, room, testing
from course_utils.setup.machine import inspect_machine
from course_utils.tasks import tasks_of
from course_utils.tasks.task import Task

GUIDE = ROOT / "notebooks" / "instructor_guide.md"
TEXT = GUIDE.read_text(encoding="utf-8")

HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
ID = re.compile(r"`(\d\d\.[a-z0-9_]+)`|\b(?:hint|solution)\(\"(\d\d\.[a-z0-9_]+)\"\)")
CODE = re.compile(r"`([^`]+)`")
QUOTE = re.compile(r'"([^"]+)"')
PIECES = (
    "Afterwards they can",
    "Vote:",
    "Where they get stuck",
    "Why the answers are so",
    "A good question.",
    "All questions",
)


def without_code_blocks(text: str) -> str:
    """The text without its lines of code: they hold no headings and no links."""
    return "\n".join(
        "" if line.startswith("    ") else line for line in text.split("\n")
    )


def section(title: str) -> str:
    """What stands below a heading, up to the next one of its level or a higher one."""
    found = re.search(rf"^(#+) {re.escape(title)}$", TEXT, re.MULTILINE)
    assert found, f"the guide has no heading {title!r}"
    rest = TEXT[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows_of(text: str) -> list[list[str]]:
    """The rows of all tables in a text, without heads and lines."""
    rows, lines = [], text.split("\n")
    for before, line in zip(["", *lines], lines, strict=False):
        is_row = line.startswith("| ") and line.endswith(" |") or line.startswith("| |")
        follows = before.startswith("|")  # the first row of a table is its head
        if is_row and follows:
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def ids_in(text: str) -> list[str]:
    return [a or b for a, b in ID.findall(text)]


def anchor(heading: str) -> str:
    """What JupyterLab makes of a heading: its text, with - for each space."""
    return heading.replace("`", "").replace(" ", "-")


def plain(heading: str) -> str:
    """A heading without the links in it."""
    return LINK.sub(r"\1", heading)


@cache
def cells_of(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


@cache
def title_of(notebook: Path) -> str:
    return plain(re.match(r"# (.+)", source(cells_of(notebook)[0]))[1])


@dataclass
class Part:
    """A section of a lesson: its words, and the questions that it asks."""

    words: int = 0
    questions: tuple[str, ...] = ()


@cache
def parts_of(notebook: Path) -> dict[str, Part]:
    """The sections of a lesson, by their headings."""
    parts, here = {}, Part()
    for cell in cells_of(notebook):
        if cell["cell_type"] == "code":
            here.questions += tuple(re.findall(r"\bquiz\(\"([^\"]+)\"", source(cell)))
            continue
        for line in source(cell).split("\n"):
            if heading := re.match(r"#{2,4} (.+)", line):
                here = parts.setdefault(plain(heading[1]), Part())
            else:
                here.words += len(line.split())
    return parts


def lesson_at(path: str) -> Lesson:
    slug = Path(path).stem
    return next(lesson for lesson in LESSONS if lesson.slug == slug)


# ------------------------------------------------------------------------- the plans


@dataclass(frozen=True)
class Row:
    """A row of a plan. ``lesson`` is None for a break."""

    minutes: int
    lesson: Lesson | None
    sections: tuple[str, ...]
    demonstrated: str
    done: str


def plan(title: str) -> list[Row]:
    rows = []
    for minutes, what, demonstrated, done in rows_of(section(title)):
        lesson, sections = None, ()
        if what not in ("Break", "Lunch"):
            (_, first), *others = LINK.findall(what)
            lesson = lesson_at(first)
            sections = tuple(text for text, _ in others)
            files = {target.partition("#")[0] for _, target in others}
            assert files == {first}, f"one lesson a row: {what}"
        rows.append(Row(int(minutes), lesson, sections, demonstrated, done))
    return rows


def titles_of_plans() -> list[str]:
    """The headings that say how many minutes are below them."""
    return [t for _, t in HEADING.findall(TEXT) if re.search(r": \d+ minutes$", t)]


def days() -> list[str]:
    """Those of the plans that have a table of their own: one for each day."""
    return [t for t in titles_of_plans() if not t.startswith("Two days")]


def minutes_in(title: str) -> int:
    return int(re.search(r"(\d+) minutes$", title)[1])


def test_there_are_three_plans():
    lengths = {t.partition(":")[0]: minutes_in(t) for t in titles_of_plans()}
    half, one, *two = (lengths[t] for t in ("Half a day", "One day", "Two days"))
    assert 180 <= half <= 240
    assert 360 <= one <= 480
    assert two == [lengths["The first day"] + lengths["The second day"]]


@pytest.mark.parametrize("title", days())
def test_the_minutes_of_a_day_add_up(title):
    rows = plan(title)
    assert sum(row.minutes for row in rows) == minutes_in(title)


@pytest.mark.parametrize("title", ["Half a day", "One day", "Two days"])
def test_work_and_breaks_are_as_the_plan_says(title):
    (heading,) = [t for t in titles_of_plans() if t.startswith(title)]
    text = " ".join(section(heading).split())
    said = re.search(r"(\d+) minutes of work and (\d+) of breaks", text)
    rows = [row for day in days_of(heading) for row in plan(day)]
    work = sum(row.minutes for row in rows if row.lesson)
    breaks = sum(row.minutes for row in rows if not row.lesson)
    assert (int(said[1]), int(said[2])) == (work, breaks)


@pytest.mark.parametrize("title", ["Half a day", "One day", "Two days"])
def test_the_clock_of_a_plan_is_that_of_its_rows(title):
    (heading,) = [t for t in titles_of_plans() if t.startswith(title)]
    text = " ".join(section(heading).split())
    said = set(re.findall(r"\d+:\d\d", text[text.index("**From 9:00:**") + 12 :]))
    lunches, breaks, ends = set(), set(), set()
    for day in days_of(heading):
        now = 9 * 60
        for row in plan(day):
            if row.lesson is None:
                (lunches if row.minutes == 60 else breaks).add(clock(now))
            now += row.minutes
        ends.add(clock(now))
    # Of two days the breaks would be too many for a sentence.
    assert said == lunches | ends | (breaks if title != "Two days" else set())


def test_lessons_that_a_plan_goes_back_to_after_build_are_named():
    back = set()
    for day in days():
        built = set()
        for row in filter(lambda row: row.lesson, plan(day)):
            cells = cells_of(row.lesson.notebook)
            code = [source(cell) for cell in cells if cell["cell_type"] == "code"]
            names = list(parts_of(row.lesson.notebook))
            before_build = set(
                names[: names.index("Build")] if "Build" in names else ()
            )
            if row.lesson in built and before_build & set(row.sections):
                back.add(row.lesson.number)
            if "Build" in row.sections and "ranks.close()" in code:
                built.add(row.lesson)
    said = re.search(r"in (\d\d(?:, \d\d)* and \d\d) some plans go back", flowing(TEXT))
    assert re.findall(r"\d\d", said[1]) == sorted(back)


def flowing(text: str) -> str:
    return " ".join(text.split())


def clock(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02}"


def test_what_to_leave_out_when_late_is_in_the_plans():
    late = section("Who needs something else").partition("**Late?**")[2]
    late = " ".join(late.split())
    parts = re.split(r"\*(Half a day|One day|Two days):\*", late)[1:]
    assert parts[::2] == ["Half a day", "One day", "Two days"]
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        (heading,) = [t for t in titles_of_plans() if t.startswith(title)]
        rows = [row for day in days_of(heading) for row in plan(day)]
        named = [name for name, _ in LINK.findall(text)]
        left_out = [row for row in rows if set(row.sections) & set(named)]
        assert len(named) == len(left_out) > 0, title
        assert not any(ids_in(row.done) for row in left_out), "tasks are kept"
        if said := re.search(r"(\d+) minutes together", text):
            assert sum(row.minutes for row in left_out) == int(said[1])


@cache
def minutes_of_tasks() -> dict[str, int]:
    """Task -> its minutes, by the stars of its heading, as "The pace" has them."""
    pace = " ".join(section("The pace").replace("\\", "").split())
    words = {"five": 5, "eight": 8, "twelve": 12}
    said = re.findall(r"\((\*+)\) (\w+)", pace)
    minutes = {len(stars): words[word] for stars, word in said}
    assert len(minutes) == 3
    found = {}
    for lesson in LESSONS:
        for cell in cells_of(lesson.solution):
            text = source(cell)
            if heading := re.search(r"^## .*\(([*\\]+)\)$", text, re.MULTILINE):
                stars = heading[1].count("*")
            asks = r"^(?:\w+ = )?(?:check|quiz)\(\"([^\"]+)\""
            for task in re.findall(asks, text, re.MULTILINE):
                found[task] = minutes[stars]
    assert set(found) == {task for lesson in LESSONS for task in lesson.tasks}
    return found


@pytest.mark.parametrize("title", days())
def test_there_is_time_for_the_tasks_that_all_solve(title):
    for row in plan(title):
        tasks = ids_in(row.done.partition("the quick ones")[0])
        assert sum(minutes_of_tasks()[task] for task in tasks) <= row.minutes, row


def days_of(heading: str) -> list[str]:
    own = [t for _, t in HEADING.findall(section(heading)) if t in titles_of_plans()]
    return own or [heading]


@pytest.mark.parametrize("title", ["Half a day", "One day", "Two days"])
def test_the_tasks_of_a_plan_are_counted(title):
    (heading,) = [t for t in titles_of_plans() if t.startswith(title)]
    said = re.search(r"They solve (\d+) tasks", " ".join(section(heading).split()))
    rows = [row for day in days_of(heading) for row in plan(day)]
    tasks = [task for row in rows for task in ids_in(row.done)]
    assert len(tasks) == len(set(tasks)) == int(said[1])


@pytest.mark.parametrize("title", days())
def test_nobody_works_for_two_hours_without_a_break(title):
    block = 0
    for row in plan(title):
        block = block + row.minutes if row.lesson else 0
        assert block <= 110, f"{block} minutes up to {row.lesson.title}"


@pytest.mark.parametrize("title", days())
def test_a_row_of_a_plan_has_time_for_what_it_names(title):
    """Half of the reading time, half a minute for a vote, four for a task."""
    for row in filter(lambda row: row.lesson, plan(title)):
        assert row.sections, row
        parts = parts_of(row.lesson.notebook)
        least = sum(parts[name].words for name in row.sections) / 360
        least += 0.5 * len(ids_in(row.demonstrated)) + 4 * len(ids_in(row.done))
        assert row.minutes >= least, f"{row} needs {least:.0f} minutes"


@pytest.mark.parametrize("title", days())
def test_votes_are_in_the_sections_of_their_row_and_tasks_in_its_lesson(title):
    for row in filter(lambda row: row.lesson, plan(title)):
        parts = parts_of(row.lesson.notebook)
        asked = [q for name in row.sections for q in parts[name].questions]
        assert set(ids_in(row.demonstrated)) <= set(asked), row
        assert set(ids_in(row.done)) <= set(row.lesson.tasks), row


def test_two_days_have_every_lesson():
    (heading,) = [t for t in titles_of_plans() if t.startswith("Two days")]
    rows = [row for day in days_of(heading) for row in plan(day) if row.lesson]
    assert {row.lesson.number for row in rows} == {one.number for one in LESSONS}


def test_the_times_are_those_that_lessons_and_exercises_state():
    title = "The times of the lessons"
    *rows, total = rows_of(section(title))
    assert len(rows) == len(LESSONS)
    for lesson, row in zip(LESSONS, rows, strict=True):
        _, alone, optional, exercise, tasks, asked = row
        assert int(alone) == stated_minutes(lesson.notebook), lesson.title
        assert int(optional) == stated_optional_minutes(lesson.notebook), lesson.title
        assert int(LINK.match(exercise)[1]) == stated_minutes(lesson.solution)
        have = (len(lesson.tasks), len(questions.load(lesson.number)))
        said = (int(tasks), int(asked))
        assert said == have, f"in {title!r}: tasks and questions of {lesson.title}"
    numbers = [[int(re.search(r"\d+", cell)[0]) for cell in row[1:]] for row in rows]
    sums = [sum(column) for column in zip(*numbers, strict=True)]
    assert [int(n) for n in total[1:]] == sums, f"in {title!r}: the last row"


# ----------------------------------------------------------------------- the lessons


def lesson_text(lesson: Lesson) -> str:
    link = f"[{title_of(lesson.notebook)}]({lesson.notebook.name})"
    return section(link)


def piece(lesson: Lesson, name: str) -> str:
    """What a lesson's part says under one of its bold words, up to the next."""
    text = lesson_text(lesson)
    begin = text.index(f"**{name}")
    ends = [text.find(f"**{other}", begin + 1) for other in PIECES]
    return text[begin : min((end for end in ends if end > 0), default=len(text))]


def each_lesson(function: Callable) -> Callable:
    return pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: one.number)(
        function
    )


@each_lesson
def test_a_lesson_has_all_its_pieces_in_order(lesson):
    places = [lesson_text(lesson).index(f"**{name}") for name in PIECES]
    assert places == sorted(places)


@each_lesson
def test_every_task_has_its_reason(lesson):
    reasons = piece(lesson, "Why the answers are so")
    have = tuple(re.findall(r"^- `([^`]+)`: ", reasons, re.MULTILINE))
    assert have == lesson.tasks, (
        f"below 'Why the answers are so' of {lesson.title}: each task once, in order"
    )


@each_lesson
def test_the_key_has_every_question_and_the_right_answer(lesson):
    rows = rows_of(piece(lesson, "All questions"))
    asked = questions.load(lesson.number)
    assert [CODE.match(row[0])[1] for row in rows] == list(asked), (
        f"below 'All questions' of {lesson.title}: each question once, in order"
    )
    for (_, answer, why), question in zip(rows, asked.values(), strict=True):
        assert why
        if isinstance(question, questions.Number):
            said = float(answer.split()[0])
            assert said == question.answer, question.id
        else:
            right = [n for n, one in enumerate(question.choices, 1) if one.right]
            assert [int(n) for n in re.findall(r"\d+", answer)] == right, question.id


@each_lesson
def test_the_vote_is_a_question_of_the_lesson(lesson):
    votes = ids_in(piece(lesson, "Vote:"))
    assert votes
    assert set(votes) <= set(questions.load(lesson.number))


@each_lesson
def test_what_the_check_says_is_what_it_says(lesson):
    rows = rows_of(piece(lesson, "Where they get stuck"))
    assert len(rows) >= 5
    said = messages_of(lesson)
    for _, check_says, ask_back in rows:
        assert ask_back.endswith("?"), ask_back
        for quoted in QUOTE.findall(check_says):
            assert quoted in said, f"no check of lesson {lesson.number} says: {quoted}"
        if "no check" not in check_says:
            assert QUOTE.search(check_says), check_says


def messages_of(lesson: Lesson) -> str:
    """All that the checks of a lesson may say of a mistake."""
    says = []
    for task in tasks_of(lesson.number):
        if isinstance(task, Task):
            says += task.sentences()
        elif isinstance(task, NumberTask):
            says += [task.hint, *(slip.why for slip in task.slips)]
        else:
            says += [task.otherwise, *(mistake.says for mistake in task.mistakes)]
    return "\n".join(says)


# ------------------------------------------------------------------ names and commands


def test_every_id_is_one_of_the_course():
    known = {task for lesson in LESSONS for task in lesson.tasks}
    known |= {q for lesson in LESSONS for q in questions.load(lesson.number)}
    found = ids_in(TEXT)
    assert len(found) > 200
    assert set(found) - known == set()


def test_links_lead_to_what_they_say():
    found = LINK.findall(without_code_blocks(TEXT))
    assert len(found) > 200
    wrong = {link: fault for link in found if (fault := fault_of_link(*link))}
    assert wrong == {}


def fault_of_link(text: str, target: str) -> str:
    """What is wrong with a link; "" if it is right."""
    path, _, fragment = target.partition("#")
    file = (GUIDE.parent / unquote(path)).resolve() if path else GUIDE
    if not file.is_file():
        return "no such file"
    if file.suffix == ".ipynb" and file.parent == GUIDE.parent:
        if text not in (parts_of(file) if fragment else [title_of(file)]):
            return "no such heading there"
        same = not fragment or unquote(fragment) == anchor(text)
        return "" if same else f"expected #{anchor(text)}"
    if fragment:
        headings = HEADING.findall(without_code_blocks(file.read_text("utf-8")))
        if unquote(fragment) not in {anchor(heading) for _, heading in headings}:
            return "no such heading there"
    return ""


def commands() -> Iterator[str]:
    """Each ``python3 -m course_utils ...`` of the guide, in a text or as a block."""
    blocks = [line[4:] for line in TEXT.split("\n") if line.startswith("    ")]
    for code in [*CODE.findall(without_code_blocks(TEXT)), *blocks]:
        if match := re.match(r"python3? -m course_utils (.+)", code):
            yield match[1]


def help_of(command: str) -> str:
    mains = {
        "start": lab.main,
        "doctor": doctor.main,
        "test": testing.main,
        "progress": progress.main,
        "cohort": cohort_main,
        "slides": slides_main,
        "build-exercises": exercises_module.main,
    }
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        mains[command](["--help"])
    return out.getvalue()


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_a_command_exists_with_its_options(line):
    command, *words = shlex.split(line)
    assert command in COMMANDS
    text = help_of(command)
    options = dict(re.findall(r"^ +(--[a-z-]+)(?: ([A-Z]+))?", text, re.MULTILINE))
    wants = 0  # values that options still wait for
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            assert word in options, f"{command} has no option {word}"
            takes_value = bool(options[word])
            assert not takes_value or following, f"{word} without its value"
            wants += takes_value
    free = [word for word in words if not word.startswith("--")]
    positionals = "FOLDER" in text.split("options:")[0] or "LESSON ..." in text
    assert len(free) == wants or (positionals and len(free) > wants), line


def test_options_in_the_text_belong_to_the_command_of_their_section():
    for title, command in (
        ("Slides", "slides"),
        ("What learners send", "progress"),
        ("The pace", "progress"),
        ("The table of a class", "cohort"),
    ):
        text = without_code_blocks(section(title))
        named = re.findall(r"`(--[a-z-]+)", text)
        assert named
        assert set(named) <= set(re.findall(r"--[a-z-]+", help_of(command))), title


def test_what_the_guide_says_of_ranks_is_there():
    for options in re.findall(r"`%%ranks (-[^`]+)`", TEXT):
        make_parser().parse_args(shlex.split(options))
    methods = set(re.findall(r"\branks\.([a-z_]+)\b(?:\(|`)", TEXT))
    assert {"restart", "status", "run", "pull"} <= methods
    assert [name for name in methods if not hasattr(Ranks, name)] == []


def test_files_that_are_named_exist():
    workers = ROOT / "course_utils" / "workers"
    for name in re.findall(r"`(\w+\.py)`", TEXT):
        assert (workers / name).is_file(), name
    for name in re.findall(r"bash (\S+\.sh)", TEXT):
        assert (ROOT / name).is_file(), name


# --------------------------------------------------------------- the room and the class


def test_the_table_of_the_doctor_has_its_lines():
    written = Path(doctor.__file__).read_text(encoding="utf-8")
    topics = set(re.findall(r"Finding\(\s*\"([^\"]+)\"", written))
    looked, _ = section("Check each laptop").split("**Room checks.**")
    named = [row[0] for row in rows_of(looked)]
    said = {topic.strip() for cell in named for topic in cell.split(",")}
    # The others appear in special cases only.
    assert topics - {"folder", "venv", "GPU links"} == said


def test_the_table_of_the_room_has_its_steps():
    _, tried = section("Check each laptop").split("**Room checks.**")
    assert [row[0] for row in rows_of(tried)] == [step.topic for step in room.STEPS]
    longest = max(step.seconds for step in room.STEPS)
    assert f"not done within {longest:.0f} s" in tried
    assert room.ALL_SECONDS == 60 and "a minute for all" in tried


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


@pytest.mark.parametrize(
    ("gigabytes", "mark"),
    [(2.59, "PROBLEM"), (2.61, "note"), (3.89, "note"), (3.91, "ok")],
)
def test_the_limits_of_memory_are_the_doctors(gigabytes, mark):
    (row,) = [r for r in rows_of(section("Check each laptop")) if r[0] == "memory"]
    assert row[2].startswith("note below 3.9 GB, which 08 needs, problem below 2.6 GB")
    machine = replace(inspect_machine(), free_memory=int(gigabytes * 1e9))
    assert doctor._free_memory(machine).mark == mark


def test_the_memory_of_the_lessons_is_the_doctors():
    rows = [
        f"| {' | '.join(map(str, row))} |"
        for row in zip(*doctor.LESSON_MEMORY.items(), strict=True)
    ]
    head, peaks = rows
    assert f"\n{head}\n|---" in section("What a laptop needs")
    assert f"|\n{peaks}\n" in section("What a laptop needs")
    said = " ".join(section("Check each laptop").split())
    browser = round(doctor.BESIDES - 0.2, 1)
    assert f"0.2 GB for JupyterLab and {browser} GB for a browser" in said


def test_the_free_memory_of_a_laptop_is_what_the_lessons_need():
    needs = {n: peak + doctor.BESIDES for n, peak in doctor.LESSON_MEMORY.items()}
    first = needs.pop("08")
    (row,) = [r for r in rows_of(section("What a laptop needs")) if "free" in r[0]][1:]
    said = f"{first:.0f} GB for lesson 08, {max(needs.values()):.1f} GB for the others"
    assert row[:2] == ["memory, free", said]


def test_sizes_are_those_of_the_requirements():
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    sizes = re.findall(r"([\d.]+) GB to download, ([\d.]+) GB on disk", text)
    (linux, others) = ([float(n) for n in pair] for pair in sizes)
    needed = f"Linux {sum(linux):.1f} GB, macOS and Windows {sum(others):.1f} GB"
    assert needed in TEXT
    assert f"Linux {linux[1]:g} GB, with the CPU build" in TEXT
    flowing = " ".join(TEXT.split())
    assert f"on Linux {linux[0]:g} GB to download" in flowing
    assert f"on macOS and Windows {others[0]:g} GB" in flowing


def block_after(words: str, title: str) -> str:
    """The first indented block below a line of a section."""
    text = section(title)
    text = text[text.index(words) :]
    lines = text.split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith("    "))
    taken = []
    for line in lines[start:]:
        if line and not line.startswith("    "):
            break
        taken.append(line[4:])
    return "\n".join(taken).strip("\n")


def test_the_example_of_a_class_is_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_STATE", str(tmp_path / "state"))
    progress.record_attempt("00.who_am_i", "passed")
    progress.record_attempt("00.average", "wrong")
    progress.record_attempt("00.average", "passed")
    for _ in range(4):
        progress.record_attempt("00.spot_the_hang", "stuck")
    progress.record_hint("00.spot_the_hang", 2)
    progress.record_answer("00.ranks", "not this", False)
    progress.record_answer("00.ranks", "this", True)
    room = tmp_path / "class"
    for name in ("anna", "ben"):
        (room / name).mkdir(parents=True)
    progress.progress_file().rename(room / "anna" / "progress.json")
    given = LESSONS[0].exercise.read_text(encoding="utf-8")
    (room / "ben" / LESSONS[0].exercise.name).write_text(given, encoding="utf-8")
    (room / "carl.json").write_text('{"x": 1}')
    shown = as_text(read_class(room), columns())
    title = "The table of a class"
    assert block_after("On the terminal", title) == shown, f"the example in {title!r}"


def test_names_of_files_are_understood_as_the_guide_says(tmp_path):
    names = block_after("Put them into one folder", "What learners send").split()
    for name in names:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".json":
            empty = {"version": progress.VERSION, "tasks": {}, "questions": {}}
            file.write_text(json.dumps(empty))
        else:
            lesson = lesson_of(re.search(r"\d\d", file.name)[0])
            file.write_bytes(
                lesson.solution.with_name(lesson.exercise.name).read_bytes()
            )
    found = read_class(tmp_path / "class")
    assert [one.name for one in found] == ["anna", "ben"]
    assert [one.progress_files for one in found] == [1, 1]


def test_the_page_explains_its_signs_as_the_guide_does():
    from course_utils.notebook.cohort.report import SYMBOLS

    (row,) = [
        r
        for r in rows_of(section("The table of a class"))
        if r[0] == "one table for each lesson"
    ]
    for state, sign in SYMBOLS.items():
        assert sign in row[1], state


# -------------------------------------------------------------------------- the reading


def test_no_paragraph_is_a_wall():
    text = without_code_blocks(TEXT)
    paragraphs = [p for p in text.split("\n\n") if not p.startswith(("|", "#", "-"))]
    longest = max(paragraphs, key=lambda p: len(p.split()))
    assert len(longest.split()) <= 120, longest


def test_tables_are_whole():
    table: list[str] = []
    for line in [*TEXT.split("\n"), ""]:
        if line.startswith("|"):
            table.append(line)
        elif table:
            assert set(table[1]) <= set("|-"), table[0]
            assert len({row.count("|") for row in table}) == 1, table[0]
            assert all(row.endswith("|") for row in table), table[0]
            table = []


def test_headings_go_down_one_level_at_a_time():
    levels = [len(marks) for marks, _ in HEADING.findall(without_code_blocks(TEXT))]
    assert levels[0] == 1 and levels.count(1) == 1
    steps = zip(levels, levels[1:], strict=False)
    assert all(after - before <= 1 for before, after in steps)
