"""The table of a cohort, from the progress files that people hand in."""

import csv
import io
import json
import os

import pytest

from course_utils.notebook.cohort import as_csv, as_html, as_text, collect, main
from course_utils.notebook.lessons import LESSONS

TASKS = [task for lesson in LESSONS for task in lesson.tasks]


def progress(questions=None, **tasks):
    """The text of a progress file; tasks of lesson 00 are (status, tries, hints)."""
    state = {"version": 1, "tasks": {}, "questions": {}}
    for name, (status, tries, hints) in tasks.items():
        entry = {"status": status, "tries": tries, "hints": hints}
        entry |= {"passed": status == "passed", "saw_solution": hints == 3}
        state["tasks"][f"00.{name}"] = entry
    for name, correct in (questions or {}).items():
        entry = {"answer": "a", "correct": correct, "first_try_correct": correct}
        state["questions"][name] = {**entry, "tries": 1}
    return json.dumps(state)


PASSED = progress(average=("passed", 1, 0))


@pytest.fixture
def write(tmp_path):
    """A function that writes a file below the folder of submissions."""

    def write(path, text):
        target = write.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())

    write.folder = tmp_path / "class"
    write.folder.mkdir()
    return write


@pytest.fixture
def three(write):
    """Anna is stuck, Ben has passed, and 김다애 has seen the solution of the same."""
    write("anna/progress.json", progress(spot_the_hang=("stuck", 4, 2)))
    done = {"average": ("passed", 2, 0), "spot_the_hang": ("passed", 1, 0)}
    # 07.tree_wins is a question, and a task has the same name.
    quiz = {"00.ranks": True, "00.skipped": False, "07.tree_wins": True}
    write("ben_progress.json", progress({**quiz, "00.all_reduce": None}, **done))
    tried = {"average": ("", 0, 1), "spot_the_hang": ("wrong", 7, 3)}
    write("김다애.json", progress(**tried))
    return write.folder


# ------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("anna/progress.json", "anna"),
        ("anna/anna_progress.json", "anna"),
        ("anna/.course/progress.json", "anna"),
        ("anna.json", "anna"),
        ("progress.json", "class"),  # one learner's own folder
        ("zoe\u0308.json", "zo\u00eb"),  # as macOS writes it
    ],
)
def test_where_a_progress_file_may_be(write, path, name):
    write(path, PASSED)
    write("README.txt", "not a learner")
    (learner,), left_out = collect(write.folder)
    assert (learner.name, left_out) == (name, [])
    assert learner.words("00.average") == "passed after 1 try"


DAMAGED = "bad.json: the file was damaged, or is another program's"
LEFT_OUT = {
    "half": ("bad.json", PASSED[:-9], DAMAGED),
    "another program's": ("bad.json", '{"name": "x"}', DAMAGED),
    "version": ("bad.json", '{"version": 2}', "of another version of the course"),
    "none": ("bad/notes.txt", "", "bad: no progress file is there"),
    "two": ("good/progress.json", PASSED, "Expected is one file for each learner"),
}


@pytest.mark.parametrize(("path", "data", "said"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_file_that_gives_nothing_is_left_out_in_one_line(
    write, capsys, path, data, said
):
    """The rest is not lost. What to do is said, too."""
    write("good.json", PASSED)
    write("other.json", PASSED)
    write(path, data)
    assert main([str(write.folder)]) == 0
    output = capsys.readouterr()
    assert "other " in output.out and "bad" not in output.out
    assert said in output.err and output.err.count("\n") == 1
    assert "Ask for " in output.err or "keep the newer one" in output.err


# ------------------------------------------------------------------------ the tables


def test_the_terminal_shows_who_has_what_and_the_highest_hurdle_first(three):
    lines = as_text(collect(three)[0]).splitlines()
    # A letter of the Korean script takes two cells of a terminal.
    begins = ("learner  00  ", "anna     0/4 ", "ben      2/4 ", "김다애   0/4 ")
    assert all(map(str.startswith, lines[2:6], begins)), lines
    # A prediction is neither right nor wrong.
    assert lines[4].endswith("  2 of 3")
    assert lines[7:] == [
        "Where most are stuck:",
        "  00.spot_the_hang: 1 of 3 passed, 2 not yet, 12 tries, 5 hints",
        "      김다애: wrong after 7 tries, 3 hints, saw the solution",
        "      anna: stuck after 4 tries, 2 hints",
        "  00.average: 1 of 3 passed, 1 not yet, 2 tries, 1 hint",
        "      김다애: 1 hint",
    ]


def test_the_terminal_is_short_for_a_large_class(write):
    for number in range(10):
        write(f"{number}.json", progress(average=("wrong", 2, 0)))
    assert "      and 6 more" in as_text(collect(write.folder)[0])


def test_the_csv_has_a_row_a_learner_a_column_a_task_and_totals(three):
    rows = list(csv.DictReader(io.StringIO(as_csv(collect(three)[0]))))
    assert list(rows[0])[5:] == TASKS
    anna, ben, _, everybody = rows
    assert [row["learner"] for row in rows] == ["anna", "ben", "김다애", "all"]
    assert (ben["tasks passed"], ben["tasks"]) == ("2", str(len(TASKS)))
    assert (ben["answers right"], ben["answers"]) == ("2", "3")
    assert anna["00.spot_the_hang"] == "stuck after 4 tries, 2 hints"
    assert everybody["00.average"] == "1 of 3 passed, 1 not yet, 2 tries, 1 hint"


def test_the_page_says_all_of_it_in_words_and_needs_nothing_else(three):
    page = as_html(collect(three)[0], ["bad.json: the file was damaged"])
    for words in ("stuck after 4 tries, 2 hints", "1 of 3 passed", "bad.json: the"):
        assert words in page
    # Who is stuck, the overview, and a table of the one lesson that somebody began.
    assert page.count("<caption>") == page.count("<table>") == 3
    for outside in ("http:", "https:", "src=", "<script", "@import", "url("):
        assert outside not in page


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_what_learners_write_stays_text(write):
    """Names of files, and the status in them, in a page, a table and a terminal."""
    text = progress(average=("<b>\x1b[31m", 2, 0))
    for name in ("<script>alert(1)", "=HYPERLINK(1)", "a\x1b[31m\u202egro"):
        write(f"{name}/progress.json", text)
    os.makedirs(os.fsencode(write.folder) + b"/half\xff")
    write("<script>.json", "damaged")
    (write.folder / "link.json").symlink_to("nowhere")
    learners, left_out = collect(write.folder)
    assert len(learners) == len(left_out) == 3
    page = as_html(learners, left_out)
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page and "<b>" not in page
    assert "\n'=HYPERLINK(1)," in as_csv(learners)
    shown = as_text(learners) + "".join(left_out)
    assert "\x1b" not in shown and "\u202e" not in shown
    assert (page + shown).encode()  # no half letters


# ----------------------------------------------------------------- the command line


def test_the_command_writes_both_files_and_replaces_only_its_own(write, capsys):
    write("anna.json", PASSED)
    table, page = write.folder / "t.csv", write.folder / "t.html"
    arguments = [str(write.folder), "--csv", str(table), "--html", str(page)]
    assert main(arguments) == 0
    assert f"Written to {page}" in capsys.readouterr().out
    first = table.read_bytes(), page.read_bytes()
    assert first[0].startswith(b"\xef\xbb\xbflearner,")  # spreadsheets want the mark
    assert main(arguments) == 0  # its own files
    assert (table.read_bytes(), page.read_bytes()) == first
    assert len(list(write.folder.iterdir())) == 3

    for target in (table, page):
        own = target.read_bytes()
        target.write_text("my notes")
        capsys.readouterr()
        assert main(arguments) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"{target} exists and was not written by this command.")
        assert target.read_text() == "my notes"
        assert main([*arguments, "--force"]) == 0
        assert target.read_bytes() == own
    if os.name != "nt":
        table.rename(write.folder / "elsewhere")
        table.symlink_to("elsewhere")
        assert main(arguments) == 1 and table.is_symlink()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none"], "none is no folder. Give the one with"),
        (["."], "no progress file to read. Expected is NAME_progress.json"),
        ([".", "--csv", "."], "is no name for a file"),
        ([".", "--csv", "no/t.csv"], "is no name for a file"),
        ([".", "--csv", "a", "--html", "a"], "name the same file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert said in output.err and output.err.count("\n") == 1
    assert output.out == ""
