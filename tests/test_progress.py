"""The progress file: nothing is lost, whatever happens to whoever writes it."""

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from course_utils import ROOT
from course_utils.notebook import progress
from course_utils.notebook.lessons import LESSONS
from course_utils.notebook.progress import (
    answers,
    attempts,
    course_map,
    main,
    progress_file,
    record_answer,
    record_attempt,
    record_hint,
    record_solution,
)

pytestmark = pytest.mark.usefixtures("own_state")


def python(code, *args):
    """Start a Python process that uses the same progress."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ------------------------------------------------------------------------- recording


def test_attempts_count_and_a_passed_task_stays_passed(own_state):
    record_attempt("00.average", "not attempted")
    assert not own_state.exists()
    for status in ("wrong", "passed", "stuck"):
        record_attempt("00.average", status)
    for number in (1, 2, 1):
        record_hint("00.average", number)
    record_solution("00.who_am_i")
    nothing = {"status": "", "passed": False, "tries": 0, "hints": 0}
    assert attempts() == {
        "00.average": {
            **{"status": "stuck", "passed": True, "tries": 3, "hints": 2},
            "saw_solution": False,
        },
        "00.who_am_i": {**nothing, "saw_solution": True},
    }


def test_answers_keep_the_right_answer_and_the_first_verdict():
    record_answer("00.ranks", ["b"], False)
    record_answer("00.ranks", ["a", "c"], True)
    record_answer("00.ranks", ["b"], False)  # out of curiosity
    assert answers() == {
        "00.ranks": {
            **{"answer": ["a", "c"], "correct": True, "tries": 3},
            "first_try_correct": False,
        },
    }
    with pytest.raises(TypeError):
        record_answer("00.ranks", {1, 2}, False)
    assert answers()["00.ranks"]["tries"] == 3


# --------------------------------------------------------------- several at one time


def test_two_processes_at_once_lose_nothing():
    code = """
from course_utils.notebook.progress import record_attempt
for _ in range(20):
    record_attempt("00.shared", "wrong")
"""
    both = [python(code), python(code)]
    assert [one.communicate(timeout=60) for one in both] == [("", "")] * 2
    assert attempts()["00.shared"]["tries"] == 40


def test_threads_at_once_lose_nothing():
    def write(name):
        for number in range(25):
            record_answer(f"00.{name}_{number}", number, True)
            record_attempt("00.shared", "wrong")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (attempts()["00.shared"]["tries"], len(answers())) == (100, 100)


HOLD = """
import time
from course_utils.notebook.progress import _locked, progress_file
progress_file().parent.mkdir(exist_ok=True)
with _locked(progress_file()):
    print('locked', flush=True)
    time.sleep(100)
"""


def test_a_killed_holder_of_the_lock_stops_nobody():
    holder = python(HOLD)
    assert holder.stdout.readline() == "locked\n"
    late = threading.Timer(0.3, holder.kill)
    late.start()
    before = time.monotonic()
    record_attempt("00.average", "wrong")
    waited = time.monotonic() - before
    holder.communicate()
    assert json.loads(progress_file().read_text())["tasks"]["00.average"]["tries"] == 1
    assert 0.2 < waited < 5  # it did wait for the lock, and no longer than needed


def test_a_lock_that_is_never_given_back_is_told_and_waits(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOCK_SECONDS", 0.2)
    holder = python(HOLD)
    assert holder.stdout.readline() == "locked\n"
    record_attempt("00.average", "wrong")
    assert "another process has" in capsys.readouterr().err
    assert attempts()["00.average"]["tries"] == 1
    assert not progress_file().exists()
    holder.kill()
    holder.communicate()
    record_attempt("00.average", "passed")
    assert json.loads(progress_file().read_text())["tasks"]["00.average"]["tries"] == 2


# ------------------------------------------------------------- bad files and bad disks


def test_a_save_that_is_stopped_halfway_leaves_the_old_file(monkeypatch):
    """As by kill -9, at the worst moment."""
    record_attempt("00.average", "wrong")
    before = progress_file().read_bytes()

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", stop)
        record_attempt("00.average", "passed")
    assert progress_file().read_bytes() == before
    record_attempt("00.average", "wrong")
    assert attempts()["00.average"]["tries"] == 3


DAMAGED = [
    b"",
    b'{"version": 1, "tasks": {"00.aver',
    b"\x00\xff\xfe" * 100,
    b"[]",
    b'{"version": "2", "tasks": {}, "questions": {}}',
    b'{"version": 1, "tasks": {"00.average": {}}, "questions": {}}',
    b"[" * 100_000,
]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        *((content, "damaged") for content in DAMAGED),
        (b'{"version": 99, "tasks": {}, "questions": {}}', "version-99"),
    ],
)
@pytest.mark.parametrize("first", ["read", "write"])
def test_a_damaged_file_is_set_aside_with_a_message(
    content, name, first, own_state, capsys
):
    own_state.mkdir()
    progress_file().write_bytes(content)
    (before := own_state / f"progress.{name}-1.json").write_bytes(b"of an earlier time")
    if first == "read":
        assert attempts() == {}
    record_attempt("00.average", "passed")
    assert attempts()["00.average"]["passed"]
    kept = own_state / f"progress.{name}-2.json"
    assert kept.read_bytes() == content
    assert before.read_bytes() == b"of an earlier time"
    assert capsys.readouterr().err.count(f"It is kept as {kept};") == 1


def test_what_could_not_be_saved_is_saved_as_soon_as_that_works(own_state, capsys):
    own_state.write_text("a file where the folder should be")
    record_attempt("00.average", "wrong")
    record_answer("00.ranks", "a", True)
    assert attempts()["00.average"]["tries"] == 1
    assert capsys.readouterr().err.count("cannot be saved") == 1
    own_state.unlink()
    record_attempt("00.average", "passed")
    saved = json.loads(progress_file().read_text())
    assert saved["tasks"]["00.average"]["tries"] == 2
    assert saved["questions"].keys() == {"00.ranks"}
    record_attempt("00.average", "wrong")
    assert attempts()["00.average"]["tries"] == 3  # nothing was counted twice


CANNOT_WRITE = {  # why -> the mode of the folder, and what the process does first
    "the folder is read-only": (0o555, "if os.geteuid() == 0: os.setuid(65534)"),
    "the disk is full": (
        0o755,
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))",  # no file gets longer
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Unix users and limits")
@pytest.mark.parametrize("why", CANNOT_WRITE)
def test_who_cannot_save_is_told_and_goes_on(monkeypatch, why):
    mode, first = CANNOT_WRITE[why]
    # A place that everybody may enter, because root has to become somebody else: the
    # mode of a folder does not stop root.
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        monkeypatch.setenv("COURSE_STATE", f"{place}/state")
        record_attempt("00.average", "passed")
        before = progress_file().read_bytes()
        progress_file().parent.chmod(mode)
        out, err = python(
            "import os, resource, signal\n"
            "from course_utils.notebook.progress import *\n"
            f"progress_file()\n{first}\n"
            "record_attempt('00.average', 'wrong')\n"
            "record_attempt('00.average', 'passed')\n"
            "print(attempts()['00.average']['tries'])"
        ).communicate(timeout=60)
        assert out == "3\n", err
        assert "Note: Your progress cannot be saved in " in err
        assert "The course goes on; what you do now is forgotten" in err
        assert progress_file().read_bytes() == before


# ---------------------------------------------------------------- the map, the command


@pytest.fixture
def small_course(tmp_path, monkeypatch):
    """A course of three tasks: two in the first lesson, one in the second."""
    (tmp_path / "solutions").mkdir()
    for lesson, tasks in zip(LESSONS, [("00.a", "00.b"), ("01.c",)], strict=False):
        cells = [
            {"cell_type": "code", "source": [], "metadata": {"tags": [task, "why"]}}
            for task in (*tasks, *tasks)
        ]
        text = json.dumps({"cells": [{"metadata": {}, "source": []}, *cells]})
        (tmp_path / "solutions" / f"{lesson.slug}.ipynb").write_text(text)
    monkeypatch.setattr("course_utils.ROOT", tmp_path)
    for lesson in LESSONS:
        lesson.__dict__.pop("tasks", None)
    yield
    for lesson in LESSONS:
        lesson.__dict__.pop("tasks", None)


def rows():
    """Lesson number -> its row of the map, without title."""
    lines = course_map().splitlines()
    found = {}
    for lesson in LESSONS:
        row = next(line for line in lines if f"  {lesson.number}  " in line)
        found[lesson.number] = " ".join(row.replace(lesson.title, "").split())
    return found


def test_the_map_shows_what_is_done_and_what_comes_next(small_course, capsys):
    assert rows()["00"] == "· 00 0 of 2 tasks done"
    lesson = "00_start_here.ipynb"
    assert f"Next: read notebooks/{lesson}, then solve" in course_map()
    record_answer("00.p", 3, None)
    assert rows()["00"] == "… 00 0 of 2 tasks done, 1 prediction made"
    assert course_map().endswith(f"Next: task 00.a in exercises/ex_{lesson}")

    record_attempt("00.a", "passed")
    record_attempt("00.b", "stuck")
    record_answer("00.q", "a", False)
    record_answer("00.r", "\ud800", True)  # half a character is no obstacle
    said = "1 of 2 answers right, 1 at the first try, 1 prediction made"
    assert rows()["00"] == f"… 00 1 of 2 tasks done, 1 tried, {said}"
    record_attempt("00.b", "passed")
    assert rows()["00"] == f"✓ 00 2 of 2 tasks done, {said}"
    assert "read notebooks/01_gpus_nodes_and_ranks.ipynb" in course_map()
    record_attempt("01.c", "passed")
    assert course_map().endswith("Next: nothing is left to do. Well done.")
    assert main([]) == 0
    assert capsys.readouterr().out == course_map() + "\n"


def test_the_command_needs_the_standard_library_alone(own_state):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from course_utils.notebook.progress import main\n"
        "main([])\n"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)],
        env={**os.environ, "COURSE_STATE": str(own_state), "PYTHONUTF8": "0"},
        capture_output=True,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert b"Next:" in run.stdout


def test_reset_forgets_one_lesson_and_keeps_a_copy(own_state, capsys):
    for lesson in ("00", "03"):
        record_attempt(f"{lesson}.task", "passed")
        record_answer(f"{lesson}.question", "a", True)
    before = progress_file().read_bytes()
    assert main(["--reset", "05"]) == 0  # there is nothing to forget
    for mistaken in (
        ["--res", "03"],
        ["--reset", "03.task"],
        ["--reset", "03", "--export", "x"],
    ):
        with pytest.raises(SystemExit):
            main(mistaken)
    assert progress_file().read_bytes() == before
    assert main(["--reset", "03"]) == 0
    assert (attempts().keys(), answers().keys()) == ({"00.task"}, {"00.question"})
    kept = own_state / "progress.before-reset-03-1.json"
    assert str(kept) in capsys.readouterr().out
    record_attempt("03.task", "wrong")
    assert main(["--reset", "03"]) == 0
    assert kept.read_bytes() == before


def test_export_writes_json_and_replaces_nothing_unasked(own_state, tmp_path, capsys):
    target = tmp_path / "mine.json"
    assert main(["--export", str(target)]) == 1  # there is nothing
    assert not target.exists()
    record_attempt("00.task", "passed")
    target.write_text("precious")
    assert main(["--export", str(target)]) == 1
    assert target.read_text() == "precious"
    assert "add --force to replace it" in capsys.readouterr().err
    assert main(["--export", str(target), "--force"]) == 0
    assert json.loads(target.read_text())["tasks"]["00.task"]["passed"]
    for bad in ("", str(tmp_path), str(tmp_path / "no" / "folder.json")):
        capsys.readouterr()
        assert main(["--export", bad, "--force"]) == 1
        error = capsys.readouterr().err
        assert error and "Traceback" not in error


def test_file_prints_the_place(capsys, monkeypatch):
    assert main(["--file"]) == 0
    assert capsys.readouterr().out == f"{progress_file()}\n"
    monkeypatch.delenv("COURSE_STATE")
    assert progress_file() == ROOT / ".course" / "progress.json"


def test_a_terminal_without_the_marks_shows_the_map(small_course, monkeypatch):
    record_attempt("00.a", "passed")
    record_attempt("00.b", "passed")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main([]) == 0
    terminal.flush()
    assert b"  ?  00  Start here" in terminal.buffer.getvalue()
