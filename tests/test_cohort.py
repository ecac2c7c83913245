"""The table of a cohort, from whatever people hand in, without running any of it."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from course_utils import questions
from course_utils.notebook.cohort import main, rerun
from course_utils.notebook.cohort.collect import (
    PROGRESS_BYTES,
    Result,
    Unreadable,
    clean,
    collect,
    columns,
    owner,
    read_json,
)
from course_utils.notebook.cohort.report import (
    as_csv,
    as_html,
    as_text,
    counts,
    hurdles,
)
from course_utils.notebook.exercises import build
from course_utils.notebook.lessons import lesson_of

ROOT = Path(__file__).resolve().parent.parent
UNIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")


def progress(tasks=None, questions=None, **other):
    """The text of a progress file; a task is its status, or (status, tries)."""
    state = {"version": 1, "tasks": {}, "questions": {}, **other}
    for name, task in (tasks or {}).items():
        status, tries = task if isinstance(task, tuple) else (task, 1)
        state["tasks"][name] = {
            "status": status,
            "passed": status == "passed",
            "tries": tries,
            "hints": 0,
            "saw_solution": False,
        }
    for name, correct in (questions or {}).items():
        state["questions"][name] = {
            "answer": "a",
            "correct": correct,
            "tries": 1,
            "first_try_correct": correct,
        }
    return json.dumps(state)


def cell(source, printed="", **more):
    outputs = [{"output_type": "stream", "name": "stdout", "text": printed}]
    return {
        "cell_type": "code",
        "metadata": {},
        "execution_count": None,
        "source": source,
        "outputs": outputs if printed else [],
        **more,
    }


def notebook(*cells):
    return json.dumps(
        {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    )


@pytest.fixture
def write(tmp_path):
    """A function that writes a file below the folder of submissions."""
    folder = tmp_path / "class"

    def write(path, text):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())
        return target

    folder.mkdir()
    write.folder = folder
    return write


def names(learners):
    return [learner.label for learner in learners]


# ------------------------------------------------------------------------- layouts


PASSED_AVERAGE = progress({"00.average": "passed"})
CHECKED = notebook(
    cell('check("00.average", average)', "\x1b[1;32m✓ 00.average: passed\x1b[0m\n")
)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("anna/progress.json", "anna"),
        ("anna/.course/progress.json", "anna"),
        ("anna/exercises/00_start_here.ipynb", "anna"),
        ("anna.json", "anna"),
        ("anna_progress.json", "anna"),
        ("progress-anna.json", "anna"),
        ("anna_00_start_here.ipynb", "anna"),
        ("submitted/anna/00/00_start_here.ipynb", "anna"),
        ("Anna Kim_4711_assignsubmission_file_/00_start_here.ipynb", "Anna Kim"),
        ("kimanna_LATE_4711_99_progress.json", "kimanna"),
        ("DDP_kimanna_attempt_2026-03-01-10-00-00_00.ipynb", "kimanna"),
        ("kimanna_4711_99_00_start_here-1.ipynb", "kimanna"),
        ("team_3_00_start_here.ipynb", "team_3"),  # a number, and no platform's
        ("team_3_00_Start_here_new.ipynb", "team_3_new"),
        ("progress.json", "class"),  # one learner's own folder
        ("exercises/00_start_here.ipynb", "class"),
    ],
)
def test_what_people_collect_is_understood(write, path, name):
    write(path, CHECKED if path.endswith(".ipynb") else PASSED_AVERAGE)
    write("README.txt", "not a learner")
    (learner,) = collect(write.folder)
    assert learner.label == name
    assert learner.result("00.average").state == "passed"
    assert learner.notes == []


def test_all_files_of_one_learner_are_one_row(write):
    write("anna/progress.json", progress({"00.average": ("wrong", 4)}))
    write("anna.json", progress({"00.who_am_i": "passed"}))
    write("anna_00_start_here.ipynb", CHECKED)
    (learner,) = collect(write.folder)
    assert learner.result("00.average") == Result("passed", tries=4)
    assert learner.result("00.who_am_i").state == "passed"
    assert learner.notes == ["2 progress files: of each task the better"]


def test_two_people_of_one_name_are_two_rows(write):
    for number in (1, 2):
        folder = f"Anna Kim_{number}_assignsubmission_file_"
        write(f"{folder}/progress.json", PASSED_AVERAGE)
    assert names(collect(write.folder)) == ["Anna Kim", "Anna Kim (2)"]


def test_copies_of_one_person_are_one_row_and_perhaps_copies_have_a_note(write):
    write("Ben_progress.json", PASSED_AVERAGE)
    write("ben_00_start_here-Copy1.ipynb", notebook(cell('check("00.average", f)')))
    write("ben_progress (1).json", progress({"00.average": ("wrong", 2)}))
    write("ben_progress(2).json", PASSED_AVERAGE)  # Firefox leaves no space
    write("chloe (1).json", PASSED_AVERAGE)  # there is no other
    learners = collect(write.folder)
    assert names(learners) == ["Ben", "ben (1)", "ben(2)", "chloe (1)"]
    again = (
        "perhaps the same person as Ben: a browser numbers a second file of one name"
    )
    assert [one.notes for one in learners] == [[], [again], [again], []]
    assert len(learners[0].notebooks) == 1


def test_a_file_that_names_nobody_has_a_note(write):
    write("anna_progress.json", PASSED_AVERAGE)
    write("progress (1).json", PASSED_AVERAGE)
    write("progress(2).json", PASSED_AVERAGE)
    note = "the name does not say whose it is: rename it"
    found = {learner.label: learner.notes for learner in collect(write.folder)}
    assert found == {"(1)": [note], "(2)": [note], "anna": []}


def test_letters_in_pieces_and_whole_are_one_name(write):
    write(unicodedata.normalize("NFD", "Zoë") + "/progress.json", PASSED_AVERAGE)
    write(unicodedata.normalize("NFC", "Zoë") + ".json", PASSED_AVERAGE)
    assert names(collect(write.folder)) == ["Zoë"]


def test_a_whole_clone_does_not_count_the_solutions_and_lessons_in_it(write):
    for place in ("solutions", "notebooks", "exercises", "tests/template"):
        shutil.copytree(ROOT / place, write.folder / "anna" / place)
    source = ROOT / "solutions" / "00_start_here.ipynb"
    shutil.copy(source, write.folder / "anna" / "exercises")  # "solved"
    (learner,) = collect(write.folder)
    assert learner.results == {}
    (note,) = learner.notes
    assert "00_start_here.ipynb is the course's solution: not counted" in note


# -------------------------------------------------------------------------- states


def test_states_of_a_progress_file(write):
    state = json.loads(
        progress(
            {"00.average": ("stuck", 3), "00.who_am_i": "passed", "00.gone": "passed"},
            {"00.ranks": True, "00.skipped": False, "00.all_reduce": None},
        )
    )
    state["tasks"]["00.predict_sum"] = {
        **state["tasks"]["00.average"],
        **{"tries": 0, "status": "", "hints": 2, "saw_solution": True},
    }
    write("anna.json", json.dumps(state))
    (learner,) = collect(write.folder)
    words = {name: learner.result(name).words() for name in learner.results}
    assert words == {
        "00.average": "wrong: stuck, 3 tries",
        "00.who_am_i": "passed: 1 try",
        "00.predict_sum": "tried: 2 hints, saw the solution",
        "quiz 00.ranks": "passed: 1 try",
        "quiz 00.skipped": "wrong: 1 try",
        "quiz 00.all_reduce": "tried: 1 try",
    }
    assert learner.result("00.spot_the_hang").state == "not attempted"
    assert learner.notes == ["tasks that this course does not have: 1"]


def test_the_number_of_a_task_counts_as_a_task_and_not_as_a_question(write):
    number = "00.predict_sum"
    write("anna.json", progress({number: "passed"}, {number: True}))
    (learner,) = collect(write.folder)
    assert list(learner.results) == [number]
    assert learner.notes == []


def test_states_of_a_notebook(write):
    exercise = json.loads(build(ROOT / "solutions" / "00_start_here.ipynb"))
    cells = {one["id"]: one for one in exercise["cells"]}
    cells["who-am-i"]["source"] = "def who_am_i():\n    return 'rank 0 of 1'"
    cells["average"]["source"] = "def average(tensor):\n    return tensor"
    cells["average-check"]["outputs"] = cell("", "✗ 00.average: wrong\n  No.\n")[
        "outputs"
    ]
    write("anna/00_start_here.ipynb", json.dumps(exercise))
    (learner,) = collect(write.folder)
    assert {name: one.state for name, one in learner.results.items()} == {
        "00.who_am_i": "tried",  # changed, and never checked
        "00.average": "wrong",
    }
    assert learner.notes == []


def test_a_check_by_keyword_counts_and_one_in_a_comment_does_not(write):
    by_keyword = "check(task_id='00.average', answer=average)"
    commented = 'f\n  # check("00.who_am_i", f)'
    write(
        "anna/a.ipynb",
        notebook(
            cell(by_keyword, "✗ 00.average: wrong\n"),
            cell(commented, "✓ 00.who_am_i: passed\n"),
        ),
    )
    (learner,) = collect(write.folder)
    assert learner.results == {"00.average": Result("wrong", "wrong")}


def test_an_empty_progress_file_is_not_called_missing(write):
    write("zoe_progress.json", progress())
    write("yan/notes.txt", "")
    yan, zoe = collect(write.folder)
    assert zoe.notes == [
        "the progress file is empty: nothing was recorded where it was made"
    ]
    assert yan.notes == ["no progress file and no exercise notebook was found"]


def test_questions_that_are_never_judged_are_not_counted(write):
    """Lesson 07 has some: who answers all of it rightly has all of it right."""
    asked = questions.load("07")
    judged = [name for name, question in asked.items() if not question.measured]
    assert 0 < len(judged) < len(asked)
    write(
        "anna.json",
        progress(questions={name: True if name in judged else None for name in asked}),
    )
    learners = collect(write.folder)
    (learner,) = learners
    own = [one for one in columns() if one.lesson.number == "07"]
    assert counts(learner, own)[2:] == (len(judged), len(judged))
    (head, row) = csv.reader(io.StringIO(as_csv(learners, columns())))
    table = dict(zip(head, row, strict=True))
    total = sum(
        not question.measured
        for number in questions.lessons()
        for question in questions.load(number).values()
    )
    assert (table["answers right"], table["questions"]) == (
        str(len(judged)),
        str(total),
    )
    page = as_html(learners, columns(), "how", "class")
    assert "1 learner." in page
    assert f"<small>{len(judged)} of {len(judged)}</small>" in page


def test_only_the_cell_of_a_check_can_say_passed(write):
    text = "✓ 00.average: passed\n"
    write("anna/a.ipynb", notebook(cell("print(text)", text), cell('check("00.x")')))
    (learner,) = collect(write.folder)
    assert learner.results == {}


def test_the_columns_are_the_tasks_and_questions_of_the_course():
    ids = [column.key for column in columns()]
    assert len(set(ids)) == len(ids)
    assert [one for one in ids if one.startswith("00.")][:4] == list(
        lesson_of("00").tasks
    )
    assert {column.kind for column in columns()} == {"task", "question"}


def test_the_highest_hurdle_comes_first(write):
    hard, easy, last = "02.bubble", "00.average", "01.rank_of"
    write("a.json", progress({easy: ("wrong", 9), hard: ("stuck", 5), last: "passed"}))
    write("b.json", progress({easy: "passed", hard: ("wrong", 7)}))
    write("c.json", progress({last: ("wrong", 2)}))
    learners = collect(write.folder)
    found = hurdles(learners, columns())
    assert [one.column.id for one in found] == [hard, easy, last]
    assert [learner.name for learner, _ in found[0].stuck] == ["b", "a"]
    assert (found[1].passed, found[1].tries) == (1, 10)
    text = as_text(learners, columns())
    assert text.index(hard) < text.index(easy) < text.index(last)
    assert "b (wrong: 7 tries)" in text


def test_the_terminal_shows_five_hurdles_and_four_names_each(write):
    for number in range(10):
        tries = {name: ("wrong", 2) for name in lesson_of("01").tasks[:6]}
        write(f"{number}.json", progress(tries))
    learners = collect(write.folder)
    assert len(hurdles(learners, columns())) == 6
    text = as_text(learners, columns())
    assert text.count(": 0 passed, 20 tries\n") == 5
    assert text.count(" (wrong: 2 tries)\n") == 5 * 4
    assert text.count("      6 more") == 5
    page = as_html(learners, columns(), "how", "class")
    assert "10 learners" in page and page.count("<small>2</small>") == 6 * 10


# ------------------------------------------------------- damaged and malicious input


ENTRY = json.loads(PASSED_AVERAGE)["tasks"]["00.average"]
DAMAGED = {
    "nothing": (b"", "is damaged: it is no JSON"),
    "half": (PASSED_AVERAGE[:-9].encode(), "is damaged: it is no JSON"),
    "no text": (b"\xff\xfe\x00\x01", "is damaged: it is no JSON"),
    "deep": (b"[" * 200_000, "is damaged: it is no JSON"),
    "long number": (b"9" * 10_000, "is damaged: it is no JSON"),
    "huge": (b" " * (PROGRESS_BYTES + 1), "is larger than 5 MB: not read"),
    "a list": (b"[1, 2]", "is no progress file"),
    "other version": (progress(version=2), "of another version, not 1"),
    "no questions": (progress(questions=None) and '{"version": 1, "tasks": {}}', "has"),
    "entry": (
        progress().replace('"tasks": {}', '"tasks": {"00.average": 7}'),
        "damaged entries in a progress file: 1",
    ),
    "true as a number": (
        json.dumps({"version": 1, "tasks": {"00.average": {**ENTRY, "tries": True}}}),
        "damaged entries in a progress file: 1",
    ),
    "tries": (
        progress({"00.average": ("wrong", 10**9)}),
        "damaged entries in a progress file: 1",
    ),
    "tries below 0": (
        progress({"00.average": ("wrong", -1)}),
        "damaged entries in a progress file: 1",
    ),
}


@pytest.mark.parametrize(("data", "said"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_progress_file_is_a_row_with_a_note(write, data, said):
    write("anna/progress.json", data)
    write("ben/progress.json", PASSED_AVERAGE)
    anna, ben = collect(write.folder)
    assert anna.results == {} and said in " ".join(anna.notes)
    assert ben.result("00.average").state == "passed" and ben.notes == []


def test_one_damaged_entry_does_not_lose_the_others(write):
    state = json.loads(progress({"00.average": "passed", "00.who_am_i": "wrong"}))
    del state["tasks"]["00.who_am_i"]["hints"]
    write("anna.json", json.dumps(state))
    (learner,) = collect(write.folder)
    assert list(learner.results) == ["00.average"]
    assert learner.notes == ["damaged entries in a progress file: 1"]


NOTEBOOKS = {
    "list": ("[]", "is no notebook"),
    "cells": ('{"cells": 3}', "is no notebook"),
    "half": (CHECKED[:-5], "is damaged: it is no JSON"),
}


@pytest.mark.parametrize(("data", "said"), NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_a_damaged_notebook_is_a_note(write, data, said):
    write("anna/00_start_here.ipynb", data)
    (learner,) = collect(write.folder)
    assert learner.notes == [f"anna/00_start_here.ipynb {said}"]


def test_strange_cells_are_passed_over(write):
    strange = [
        *(7, None, {}, {"cell_type": "code"}, {"cell_type": "code", "source": 3}),
        {"cell_type": "code", "source": ["x", 4], "metadata": 5, "id": []},
        {**cell('check("00.who_am_i", f)'), "outputs": [3, {"name": "stdout"}]},
        {**cell('check("00.who_am_i", f)'), "outputs": "✓ 00.who_am_i: passed"},
        json.loads(CHECKED)["cells"][0],
    ]
    write("anna/a.ipynb", notebook(*strange))
    (learner,) = collect(write.folder)
    assert learner.results == {"00.average": Result("passed")}


@UNIX
def test_links_and_pipes_are_not_opened(write, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text(PASSED_AVERAGE)
    write("anna/notes.txt", "")
    (write.folder / "anna" / "progress.json").symlink_to(secret)
    (write.folder / "ben").symlink_to(tmp_path)
    (write.folder / "loop").symlink_to(write.folder)
    (write.folder / "chloe").mkdir()
    os.mkfifo(write.folder / "chloe" / "progress.json")
    found = {learner.name: learner for learner in collect(write.folder)}
    assert all(not learner.results for learner in found.values())
    assert {name: learner.notes for name, learner in found.items()} == {
        "anna": ["progress.json is a link: not followed"],
        "ben": ["ben is a link: not followed"],
        "loop": ["loop is a link: not followed"],
        "chloe": ["progress.json is no ordinary file"],
    }


@UNIX
def test_a_link_that_came_since_is_not_opened(tmp_path):
    (tmp_path / "secret.json").write_text(PASSED_AVERAGE)
    (tmp_path / "link.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(Unreadable, match="cannot be read: "):
        read_json(tmp_path / "link.json", PROGRESS_BYTES)


def test_deep_folders_and_packed_files_are_notes(write):
    write("anna/" + "d/" * 20 + "progress.json", PASSED_AVERAGE)
    write("ben.zip", b"PK")
    anna, ben = collect(write.folder)
    assert anna.results == {} and anna.notes == ["more than 12 folders in folders"]
    for folders, notes in ((12, []), (13, anna.notes)):
        name = f"{folders} deep"
        write(f"{name}/" + "d/" * folders + "progress.json", PASSED_AVERAGE)
        (found,) = (one for one in collect(write.folder) if one.name == name)
        assert found.notes == notes and bool(found.results) != bool(notes)
    assert ben.notes == ["ben.zip is packed: unpack it first"]


ODD = (
    "<script>alert(1)",
    "=HYPERLINK(1)",
    "@SUM(1)",
    "a\x1b[31m\u202egro",
    '" onmouseover=',
)


@UNIX
def test_odd_names_stay_text(write):
    for name in ODD:
        write(f"{name}/progress.json", progress({"00.average": ("<b>", 2)}))
    os.makedirs(os.fsencode(write.folder) + b"/half\xff")
    learners = collect(write.folder)
    assert len(learners) == len(ODD) + 1

    rows = list(csv.reader(io.StringIO(as_csv(learners, columns()))))
    assert len(rows) == len(learners) + 1
    assert {len(row) for row in rows} == {len(columns()) + 7}
    first = {row[0] for row in rows}
    assert {"'=HYPERLINK(1)", "'@SUM(1)", "a�[31m�gro", "half�"} <= first

    page = as_html(learners, columns(), "how", "<folder>")
    assert "<script" not in page and "<b>" not in page and "<folder>" not in page
    assert "&lt;script&gt;alert(1)" in page and '=""' not in page
    text = as_text(learners, columns())
    assert "\x1b" not in text and "\u202e" not in text


def test_clean_keeps_ordinary_names():
    for name in ("Anna Kim", "김다애", "O'Neill", "Łukasz-B. d'É"):
        assert clean(name) == name and owner(name) == (name.casefold(), name)
    assert clean("a\n\tb") == "a��b" and len(clean("x" * 500)) == 80


# ------------------------------------------------------------------------- the page


def test_the_page_is_one_file_without_scripts_that_names_every_state(write):
    write("anna.json", progress({"00.average": ("wrong", 3), "00.who_am_i": "passed"}))
    page = as_html(collect(write.folder), columns(), "how", "class")
    for outside in ("http:", "https:", "src=", "<script", "@import", "url("):
        assert outside not in page
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert '<span class="words">wrong: 3 tries</span>' in page
    assert '<span class="words">passed: 1 try</span>' in page
    assert page.count("<caption>") == page.count("<table") == 3
    # Of lessons that nobody has begun: a word in the overview, and no table.
    rest = {one.lesson.number for one in columns()} - {"00"}
    own = sum(one.lesson.number == "00" for one in columns())
    assert page.count('<span class="words">') == own + len(rest)
    sentence = page.partition("No trace of anybody: ")[2].partition("</p>")[0]
    assert re.findall(r"\b\d\d\b", sentence) == sorted(rest)


def test_the_overview_marks_who_is_stuck_and_who_is_done(write):
    done = {f"00.{name}": "passed" for name in ("who_am_i", "average", "predict_sum")}
    write("anna.json", progress({**done, "00.spot_the_hang": "passed"}))
    write("ben.json", progress({**done, "00.spot_the_hang": ("stuck", 3)}))
    write("chloe.json", progress(done))
    write("dan.json", "{")
    page = as_html(collect(write.folder), columns(), "how", "class")
    overview = page.partition("<h2>All lessons")[2].partition("<h2>")[0]
    cells = re.findall(r'<th scope="row">(\w+)<td([^>]*)>(.*?)<', overview)
    assert cells == [
        ("anna", ' class="passed"', "4 of 4 ✓"),
        ("ben", ' class="wrong"', "3 of 4 ✗"),
        ("chloe", ' class=""', "3 of 4"),
        ("dan", "", ""),
    ]
    # What could not be read stands before all that is only to look up.
    assert page.index("dan.json is damaged") < page.index("<h2>All lessons")


def test_names_of_wide_letters_stand_in_one_column(write):
    for name in ("anna", "김다애", "Łukasz"):
        write(f"{name}.json", PASSED_AVERAGE)
    text = as_text(collect(write.folder), columns())
    assert [line.partition("1 of")[0] for line in text.splitlines()[2:5]] == [
        "  anna      ",
        "  Łukasz    ",
        "  김다애    ",
    ]


def test_a_pipe_that_is_closed_costs_no_file(write, monkeypatch):
    write("anna.json", PASSED_AVERAGE)
    page = write.folder / "t.html"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(BrokenPipeError):  # no error for course_utils.__main__
            main([str(write.folder), "--html", str(page)])
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            closed.close()
    assert page.stat().st_size > 1000


# ----------------------------------------------------------------- the command line


def test_the_command_writes_both_files_and_replaces_only_its_own(write, capsys):
    write("anna.json", PASSED_AVERAGE)
    table, page = write.folder / "t.csv", write.folder / "t.html"
    arguments = [str(write.folder), "--csv", str(table), "--html", str(page)]
    assert main(arguments) == 0
    assert f"Written to {page}" in capsys.readouterr().out
    assert table.read_bytes().startswith(b"\xef\xbb\xbflearner,")
    first = table.read_bytes(), page.read_bytes()
    assert main(arguments) == 0  # its own files
    assert (table.read_bytes(), page.read_bytes()) == first
    assert len(list(write.folder.iterdir())) == 3

    table.write_text("my notes")
    capsys.readouterr()
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"{table} exists and was not written by this command.")
    assert table.read_text() == "my notes"
    assert main([*arguments, "--force"]) == 0
    assert table.read_bytes() == first[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{folder}/none"], "is no folder"),
        (["{folder}"], "holds nothing to read"),
        (["{folder}", "--csv", "{folder}"], "is no name for a file"),
        (["{folder}", "--csv", "{folder}/no/t.csv"], "There is no folder"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, said):
    assert main([one.format(folder=tmp_path) for one in arguments]) == 1
    output = capsys.readouterr()
    assert said in output.err and output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "9"], "--seconds goes with --rerun"),
        (["--force"], "--force goes with"),
        (["--csv", "a", "--html", "a"], "the same file"),
        (["--rerun", "--seconds", "0"], "1 second or more"),
        (["--rerun", "--seconds", "abc"], "'abc' is no number of 1 second or more"),
        (["--rerun", "--seconds", "nan"], "1 second or more"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_nothing_is_run_without_being_asked(write, tmp_path, capsys):
    trace = tmp_path / "trace"
    attack = f"open({str(trace)!r}, 'w')\ncheck('00.average', 1)"
    write("anna/a.ipynb", notebook(cell(attack)))
    write("anna/sitecustomize.py", attack)
    write("anna/conftest.py", attack)
    command = [sys.executable, "-m", "course_utils", "cohort", str(write.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 learner" in done.stdout
    assert not trace.exists()
    assert main([str(write.folder), "--rerun", "--seconds", "60"]) == 0
    assert trace.exists()  # so the file above would have been written


# ------------------------------------------------------------------------ --rerun


IMPORTS = "%load_ext course_utils\nfrom course_utils import check"
WHO = (
    "def who_am_i():\n"
    "    import torch.distributed as dist\n"
    "    return f'rank {dist.get_rank()} of {dist.get_world_size()}'"
)
CHECK_WHO = 'check("00.who_am_i", who_am_i)'


def runs(pid):
    """Whether a process is there; a dead one may wait for its parent to notice."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@UNIX
def test_rerun_believes_the_checks_and_leaves_nothing(
    write, tmp_path, capsys, monkeypatch, temporary
):
    """Two learners: one is honest, a liar and a vandal; one ends the process."""
    monkeypatch.setenv("MY_TOKEN", "secret")
    facts, escaped = tmp_path / "facts.json", tmp_path / "escaped"
    spawn = (
        "import os, json, subprocess, sys\n"
        "child = subprocess.Popen(\n"
        "    [sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "    start_new_session=True)\n"
        f"open({str(escaped)!r}, 'w').write(str(child.pid))\n"
        "open('left_here', 'w').write('x')\n"
        "facts = dict(env=dict(os.environ), cwd=os.getcwd())\n"
        f"json.dump(facts, open({str(facts)!r}, 'w'))"
    )
    refused = tmp_path / "refused"
    hog = (
        "try:\n    block = bytearray(12 << 30)\n"
        f"except MemoryError:\n    open({str(refused)!r}, 'w')\n    raise"
    )
    lie = "✓ 00.predict_sum: passed\n✓ 00.average: passed\n"
    write(
        "anna/a.ipynb",
        notebook(
            cell(IMPORTS),
            cell(spawn),
            cell(WHO),
            cell(CHECK_WHO),
            cell(hog),
            cell("input()"),
            cell("raise SystemExit"),
            cell('answer = 99\ncheck("00.predict_sum", answer)', lie),
        ),
    )
    write("anna/progress.json", progress({"01.rank_of": "passed"}))
    answer = cell('from course_utils import check\ncheck("00.predict_sum", 100)')
    last = cell("import os\nos._exit(7)")
    never = cell('check("00.average", f)', lie)  # the process has ended before
    write("chloe/c.ipynb", notebook(answer, last, never))
    assert main([str(write.folder), "--rerun"]) == 0

    output = capsys.readouterr()
    assert "running 1 notebook of chloe (2 of 2)" in output.err
    notes = output.out.partition("Notes:\n")[2].splitlines()
    assert notes == [
        "  anna: 00.predict_sum was passed, and is wrong when run",
        "  anna: not run, as handed in: 01.rank_of",
        "  chloe: c.ipynb ended early, with exit code 7",
        "  chloe: 00.average was passed, and its check did not run",
    ]
    passed = [line.split()[:2] for line in output.out.splitlines()[2:4]]
    assert passed == [["anna", "2"], ["chloe", "1"]]
    assert "00.predict_sum: 1 passed" in output.out

    seen = json.loads(facts.read_text())
    assert "MY_TOKEN" not in seen["env"]
    for name in ("HOME", "TMPDIR", "COURSE_STATE"):
        assert seen["env"][name].startswith(str(temporary))
    assert list(temporary.iterdir()) == []
    assert refused.exists() == (sys.platform == "linux")
    assert not runs(escaped.read_text())
    assert not (write.folder / "anna" / "left_here").exists()


FORGE = (
    "import json, os, sys\n"
    "place = {place}\n"
    "with open(place, 'a') as results:\n"
    "    for task in ('00.who_am_i', '08.one_unit', 'end'):\n"
    "        print(json.dumps([task, 'passed']), file=results)\n"
    "os._exit(0)"
)
BY_SYSTEM = "open('/proc/self/cmdline').read().split('\\0')[-2]"


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize(
    ("place", "claim"),
    [("sys.argv[2]", CHECK_WHO), (BY_SYSTEM, '# check("00.who_am_i", who_am_i)')],
)
def test_a_cell_that_writes_results_passes_no_task(write, capsys, place, claim):
    """The file's name is not in ``sys.argv``, and only tasks that are checked count."""
    write("a/a.ipynb", notebook(cell(FORGE.format(place=place)), cell(claim)))
    write("a/b.ipynb", notebook(cell('check("00.average", f)')))
    assert main([str(write.folder), "--rerun"]) == 0
    assert "  a    0 of " in capsys.readouterr().out


STUBBED = (
    "def average(tensor):\n"
    '    raise NotImplementedError("Write your code here.")\n'
    'check("00.average", average)'
)


@pytest.mark.thorough
@UNIX
def test_rerun_notes_speak_of_the_best_notebook_and_stubs_disprove_nothing(
    write, capsys
):
    """Three learners. Ben solved the task in the lesson and sends the empty stub."""
    right = (
        "def average(tensor):\n"
        "    import torch.distributed as dist\n"
        "    total = tensor.clone()\n"
        "    dist.all_reduce(total)\n"
        "    return total / dist.get_world_size()\n"
        'check("00.average", average)'
    )
    wrong = 'def average(tensor):\n    return tensor\ncheck("00.average", average)'
    passed = progress({"00.average": "passed"})
    for name, *sources in (("anna", wrong, right), ("ben", STUBBED), ("carl", wrong)):
        write(f"{name}/progress.json", passed)
        for number, source in enumerate(sources):
            text = notebook(cell(IMPORTS), cell(source))
            write(f"{name}/{number}.ipynb", text)
    write("dan.json", progress())
    assert main([str(write.folder), "--rerun"]) == 0
    output = capsys.readouterr()
    assert output.out.partition("Notes:\n")[2].splitlines() == [
        "  ben: not run, as handed in: 00.average",
        "  carl: 00.average was passed, and is wrong when run",
        "  dan: the progress file is empty: nothing was recorded where it was made",
    ]
    lines = output.out.splitlines()[2:6]
    assert [line.split()[:2] for line in lines] == [
        ["anna", "1"],
        ["ben", "1"],
        ["carl", "0"],
        ["dan", "0"],
    ]
    # Who sent no notebook is not waited for.
    assert re.findall(r"of (\w+) \(", output.err) == ["anna", "ben", "carl"]


@UNIX
def test_an_endless_notebook_is_stopped_with_all_that_it_started(
    write, tmp_path, capsys, monkeypatch, temporary
):
    started = tmp_path / "started"
    source = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"open({str(started)!r}, 'a').write(f'{{os.getpid()}} ')\n"
        "time.sleep(600)"
    )
    write("ben/b.ipynb", notebook(cell(source), cell('check("00.average", f)')))

    def pids():
        return started.read_text().split() if started.exists() else []

    def clock():  # the time is up as soon as both run
        return time.monotonic() + 1e6 * (len(pids()) == 2)

    fake = SimpleNamespace(sleep=time.sleep, monotonic=clock)
    monkeypatch.setattr(rerun, "time", fake)
    assert main([str(write.folder), "--rerun", "--seconds", "200"]) == 0
    assert "ben: b.ipynb was stopped after 200 s" in capsys.readouterr().out
    assert len(pids()) == 2 and not any(map(runs, pids()))
    assert list(temporary.iterdir()) == []
