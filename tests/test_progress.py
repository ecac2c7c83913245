"""The progress file: nothing is lost, whatever happens to whoever writes it."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

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

ROOT = Path(__file__).resolve().parent.parent
MODULE = sys.modules[
    "course_utils.notebook.progress"
]  # the name `progress` is the function


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """Every test has its own, empty progress."""
    monkeypatch.setenv("COURSE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(MODULE, "_pending", [])
    monkeypatch.setattr(MODULE, "_warned", set())
    return tmp_path / "state"


def python(code, *args, state):
    """Start a Python process that uses the progress in ``state``."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "COURSE_STATE": str(state), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ------------------------------------------------------------------------- recording


def test_attempts_count_and_a_passed_task_stays_passed():
    for status in ("not attempted", "wrong", "passed", "stuck"):
        record_attempt("00.average", status)
    assert attempts() == {
        "00.average": {
            "status": "stuck",
            "passed": True,
            "tries": 3,
            "hints": 0,
            "saw_solution": False,
        }
    }


def test_not_attempted_leaves_no_trace(own_state):
    record_attempt("00.average", "not attempted")
    assert attempts() == {}
    assert not own_state.exists()


def test_hints_and_solutions_are_noted():
    for number in (1, 2, 1):
        record_hint("00.average", number)
    record_solution("00.average")
    task = attempts()["00.average"]
    assert (task["hints"], task["saw_solution"], task["tries"]) == (2, True, 0)


def test_answers_keep_the_last_answer_and_the_first_verdict():
    record_answer("00.ranks", ["b"], False)
    record_answer("00.ranks", ["a", "c"], True)
    record_answer("00.bytes", 12.5, True)
    assert answers() == {
        "00.ranks": {
            "answer": ["a", "c"],
            "correct": True,
            "tries": 2,
            "first_try_correct": False,
        },
        "00.bytes": {
            "answer": 12.5,
            "correct": True,
            "tries": 1,
            "first_try_correct": True,
        },
    }


def test_an_answer_that_is_no_json_is_refused_and_nothing_changes():
    with pytest.raises(TypeError):
        record_answer("00.ranks", {1, 2}, False)
    assert answers() == {}


def test_the_next_process_sees_it(own_state):
    record_attempt("00.average", "passed")
    code = (
        "from course_utils.notebook.progress import *; print(attempts()['00.average'])"
    )
    out, _ = python(code, state=own_state).communicate(timeout=30)
    assert "'passed': True" in out


# --------------------------------------------------------------- several at one time


WRITE_MANY = """
import sys
from course_utils.notebook.progress import record_answer, record_attempt
name, count = sys.argv[1], int(sys.argv[2])
for number in range(count):
    record_attempt(f"00.{name}_{number}", "wrong")
    record_attempt("00.shared", "wrong")
"""


def test_two_processes_at_once_lose_nothing(own_state):
    writers = [python(WRITE_MANY, name, 200, state=own_state) for name in "ab"]
    for writer in writers:
        _, err = writer.communicate(timeout=120)
        assert (writer.returncode, err) == (0, "")
    found = attempts()
    assert found.pop("00.shared")["tries"] == 400
    names = {f"00.{name}_{number}" for name in "ab" for number in range(200)}
    assert found.keys() == names


def test_threads_of_one_process_lose_nothing():
    def write(name):
        for number in range(25):
            record_answer(f"00.{name}_{number}", number, True)
            record_attempt("00.shared", "wrong")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers()) == 100
    assert attempts()["00.shared"]["tries"] == 100


def test_a_killed_holder_of_the_lock_stops_nobody(own_state):
    hold = (
        "from course_utils.notebook.progress import *\n"
        "from course_utils.notebook.progress import _locked\n"
        "import time\n"
        "record_attempt('00.average', 'wrong')\n"
        "with _locked(progress_file()):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(100)\n"
    )
    holder = python(hold, state=own_state)
    assert holder.stdout.readline() == "locked\n"
    late = threading.Timer(0.3, holder.kill)
    late.start()
    before = time.monotonic()
    record_attempt("00.average", "wrong")
    waited = time.monotonic() - before
    holder.communicate()
    assert attempts()["00.average"]["tries"] == 2
    assert 0.2 < waited < 5  # it did wait for the lock, and no longer than needed


# ------------------------------------------------------------------- kill -9, bad disks


WRITE_FOR_EVER = """
from course_utils.notebook.progress import attempts, record_attempt
while True:
    record_attempt("00.average", "wrong")
    print(attempts()["00.average"]["tries"], flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_kill_9_at_any_moment_loses_nothing(own_state):
    # A large file, so that most kills fall into the middle of a write.
    for number in range(3):
        record_answer(f"00.filler_{number}", "x" * 400_000, True)
    generator = random.Random(0)
    leftovers = 0
    for _ in range(25):
        writer = python(WRITE_FOR_EVER, state=own_state)
        told = writer.stdout.readline()
        time.sleep(generator.uniform(0.0, 0.02))
        writer.kill()
        rest, _ = writer.communicate()
        confirmed = int((told + rest).split("\n")[-2])
        leftovers += progress_file().with_suffix(".new").exists()
        state = json.loads(progress_file().read_text())
        tries = state["tasks"]["00.average"]["tries"]
        assert tries >= confirmed
        assert len(state["questions"]) == 3
    assert leftovers, "no kill fell into a write: this test shows nothing"
    record_attempt("00.average", "passed")
    names = {path.name for path in own_state.iterdir()}
    assert names == {"progress.json", "progress.lock"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"version": 1, "tasks": {"00.aver',
        b"\x00\xff\xfe" * 100,
        b"[]",
        b'{"version": "2", "tasks": {}, "questions": {}}',
        b'{"version": 1, "tasks": {"00.average": 3}, "questions": {}}',
        b'{"version": 1, "tasks": {"00.average": {}}, "questions": {}}',
        b'{"version": 1, "tasks": {}, "questions": {"00.a": {"answer": 1, "tries": 1,'
        b' "correct": "yes", "first_try_correct": true}}}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("first", ["read", "write"])
def test_a_damaged_file_is_set_aside_with_a_message(content, first, own_state, capsys):
    own_state.mkdir()
    progress_file().write_bytes(content)
    (own_state / "progress.damaged-1.json").write_bytes(b"of an earlier time")

    if first == "read":
        assert attempts() == {}
    record_attempt("00.average", "passed")

    assert attempts()["00.average"]["passed"]
    assert (own_state / "progress.damaged-2.json").read_bytes() == content
    assert (own_state / "progress.damaged-1.json").read_bytes() == b"of an earlier time"
    message = capsys.readouterr().err
    assert message.count("The progress file was damaged.") == 1
    assert "progress.damaged-2.json" in message


def test_a_file_of_another_version_is_kept_and_not_called_damaged(own_state, capsys):
    own_state.mkdir()
    content = b'{"version": 99, "tasks": {}, "questions": {}}'
    progress_file().write_bytes(content)
    record_attempt("00.average", "passed")
    assert attempts()["00.average"]["passed"]
    kept = own_state / "progress.version-99-1.json"
    assert kept.read_bytes() == content
    assert " ".join(capsys.readouterr().err.split()) == (
        "Note: The progress file is of another version of the course. It is kept as "
        f"{kept}; a new one begins."
    )


def test_a_file_cut_at_any_byte_is_never_lost_silently(own_state, capsys):
    record_attempt("00.average", "passed")
    record_answer("00.ranks", ["a", "\u00e9"], True)
    whole = progress_file().read_bytes()
    kept = own_state / "progress.damaged-1.json"
    for length in range(len(whole) - 1):  # the last byte is a line end
        progress_file().write_bytes(whole[:length])
        record_answer("00.ranks", "b", False)
        assert answers().keys() == {"00.ranks"}
        assert kept.read_bytes() == whole[:length]
        assert str(kept) in capsys.readouterr().err
        kept.unlink()


def test_a_damaged_file_that_cannot_be_set_aside_is_left_and_told(own_state, capsys):
    own_state.mkdir()
    progress_file().write_bytes(b"damaged")
    progress_file().with_suffix(".lock").mkdir()  # so that nothing can be locked
    assert attempts() == {}
    assert capsys.readouterr().err.count("Your progress cannot be saved") == 1
    record_attempt("00.average", "wrong")
    assert attempts().keys() == {"00.average"}
    assert progress_file().read_bytes() == b"damaged"
    assert capsys.readouterr().err == ""  # it was told once


def test_half_a_character_from_a_file_is_no_obstacle(own_state):
    record_attempt("00.average", "passed")
    state = json.loads(progress_file().read_text())
    state["note"] = "\ud800"
    progress_file().write_text(json.dumps(state))
    record_attempt("00.who_am_i", "passed")
    saved = json.loads(progress_file().read_bytes())
    assert (len(saved["tasks"]), saved["note"]) == (2, "\ud800")
    assert main(["--export", str(own_state / "mine.json")]) == 0


HOLD = (
    "from course_utils.notebook.progress import _locked, progress_file\n"
    "import time\n"
    "progress_file().parent.mkdir(exist_ok=True)\n"
    "with _locked(progress_file()):\n"
    "    print('locked', flush=True)\n"
    "    time.sleep(100)\n"
)


def test_a_lock_that_is_never_given_back_is_told_and_waits(
    own_state, capsys, monkeypatch
):
    monkeypatch.setattr(
        sys.modules["course_utils.notebook.progress"], "LOCK_SECONDS", 0.2
    )
    holder = python(HOLD, state=own_state)
    assert holder.stdout.readline() == "locked\n"
    record_attempt("00.average", "wrong")
    message = capsys.readouterr().err
    assert "another process has" in message
    assert attempts()["00.average"]["tries"] == 1
    assert not progress_file().exists()
    progress_file().write_text('{"version": 1, "tasks": {}, "questions": {}}')
    assert main(["--reset", "00"]) == 1
    assert capsys.readouterr().err.startswith("another process has ")
    progress_file().unlink()
    holder.kill()
    holder.communicate()
    record_attempt("00.average", "passed")
    assert json.loads(progress_file().read_text())["tasks"]["00.average"]["tries"] == 2


READ_ONLY = """
import os
from course_utils.notebook.progress import attempts, progress_file, record_attempt
progress_file()  # imports the rest while it may read it
if os.geteuid() == 0:  # the mode of a folder does not stop root
    os.setuid(65534)
record_attempt("00.average", "wrong")
record_attempt("00.average", "passed")
print(attempts())
"""


@pytest.mark.skipif(os.name == "nt", reason="folders have no read-only mode here")
def test_a_read_only_folder_warns_once_and_the_course_goes_on():
    # Not below tmp_path, which only its owner may enter.
    folder = Path(tempfile.mkdtemp())
    state = folder / "state"
    try:
        folder.chmod(0o755)
        state.mkdir()
        state.chmod(0o555)
        writer = python(READ_ONLY, state=state)
        out, err = writer.communicate(timeout=30)
    finally:
        state.chmod(0o755)
        left = list(state.iterdir())
        shutil.rmtree(folder)
    assert writer.returncode == 0, err
    assert "'passed': True, 'tries': 2" in out
    assert err.count("Your progress cannot be saved") == 1
    assert err.count("\n") == 1
    assert "Permission denied" in err
    assert left == []


DISK_FULL = """
import resource, signal
from course_utils.notebook.progress import attempts, record_answer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
record_answer("00.long", "x" * 5000, True)
print(len(attempts()), flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="there are no file size limits here")
def test_a_write_that_fails_half_way_leaves_the_old_file(own_state):
    record_attempt("00.average", "passed")
    before = progress_file().read_bytes()
    out, err = python(DISK_FULL, state=own_state).communicate(timeout=30)
    assert out == "1\n"
    assert err.count("Your progress cannot be saved") == 1
    assert progress_file().read_bytes() == before


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


# ---------------------------------------------------------------- the map, the command


@pytest.fixture
def small_course(tmp_path, monkeypatch):
    """A course of which two lessons exist, with two tasks and one."""
    for folder in ("notebooks", "solutions"):
        (tmp_path / folder).mkdir()
    for lesson, tasks in zip(LESSONS, [("00.a", "00.b"), ("01.c",)], strict=False):
        cells = [
            {"cell_type": "code", "source": [], "metadata": {"tags": [task, "why"]}}
            for task in (*tasks, *tasks)
        ]
        (tmp_path / "notebooks" / f"{lesson.slug}.ipynb").write_text("{}")
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


def test_the_map_of_a_new_learner(small_course):
    assert rows()["00"] == "· 00 0 of 2 tasks done"
    assert rows()["01"] == "· 01 0 of 1 tasks done"
    assert rows()["02"] == "02 (not written yet)"
    assert course_map().endswith(
        "Next: read notebooks/00_start_here.ipynb, "
        "then solve exercises/00_start_here.ipynb"
    )


def test_the_map_shows_done_tried_and_next(small_course):
    record_attempt("00.a", "passed")
    record_attempt("00.b", "stuck")
    record_answer("00.q", "a", False)
    record_answer("00.r", "a", True)
    record_answer("00.a", 3, True)  # the number that a task asks for
    assert rows()["00"] == "… 00 1 of 2 tasks done, 1 tried, 1 of 2 answers right"
    assert course_map().endswith("Next: task 00.b in exercises/00_start_here.ipynb")

    record_attempt("00.b", "passed")
    assert rows()["00"] == "✓ 00 2 of 2 tasks done, 1 of 2 answers right"
    assert "read notebooks/01_gpus_nodes_and_ranks.ipynb" in course_map()

    record_attempt("01.c", "passed")
    assert course_map().endswith("Next: nothing is left to do. Well done.")


def test_the_command_prints_the_map(small_course, capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == course_map() + "\n"


def test_progress_is_a_function_before_and_after_its_module_is_imported(own_state):
    code = (
        "from course_utils import progress\n"
        "progress()\n"
        "import course_utils.notebook.progress\n"
        "from course_utils import progress\n"
        "progress()\n"
        "try: progress('00')\n"
        "except TypeError as error: print(error)\n"
    )
    out, err = python(code, state=own_state).communicate(timeout=30)
    assert (out.count("The course, and where you are"), err) == (2, "")
    assert out.endswith("progress() takes 0 positional arguments but 1 was given\n")


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

    assert main(["--reset", "03"]) == 0

    assert attempts().keys() == {"00.task"}
    assert answers().keys() == {"00.question"}
    kept = own_state / "progress.before-reset-03-1.json"
    assert kept.read_bytes() == before
    assert str(kept) in capsys.readouterr().out

    record_attempt("03.task", "wrong")
    assert main(["--reset", "03"]) == 0
    assert kept.read_bytes() == before
    assert (own_state / "progress.before-reset-03-2.json").exists()


@pytest.mark.parametrize("number", ["00", "05"])
def test_reset_of_nothing_changes_nothing(number, own_state, capsys):
    if number == "05":
        record_attempt("00.task", "passed")
    files = {path: path.read_bytes() for path in own_state.glob("*")}
    assert main(["--reset", number]) == 0
    assert "Nothing is recorded" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in own_state.glob("*")} == files


@pytest.mark.parametrize(
    ("number", "says"),
    [
        ("3", "There is no lesson '3'"),
        ("", "There is no lesson ''"),
        ("00.task", "A whole lesson is reset: --reset 00"),
    ],
)
def test_reset_of_anything_but_a_lesson_is_an_error(number, says, own_state, capsys):
    record_attempt("00.task", "passed")
    assert main(["--reset", number]) == 1
    assert says in capsys.readouterr().err
    assert attempts()["00.task"]["passed"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--reset"],
        ["--export"],
        ["--res", "00"],
        ["--force"],
        ["--reset", "00", "--force"],
        ["--reset", "00", "--export", "x"],
        ["nonsense"],
    ],
)
def test_wrong_arguments_change_nothing(arguments, own_state, capsys):
    record_attempt("00.task", "passed")
    before = {path: path.read_bytes() for path in own_state.iterdir()}
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "python3 -m course_utils progress: error: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in own_state.iterdir()} == before


def test_export_writes_json_and_replaces_nothing_unasked(tmp_path, capsys):
    record_attempt("00.task", "passed")
    target = tmp_path / "mine.json"
    assert main(["--export", str(target)]) == 0
    assert json.loads(target.read_text())["tasks"]["00.task"]["passed"]

    target.write_text("precious")
    assert main(["--export", str(target)]) == 1
    assert target.read_text() == "precious"
    assert "--force" in capsys.readouterr().err
    assert main(["--export", str(target), "--force"]) == 0
    assert "00.task" in target.read_text()


def test_nothing_to_export_writes_no_file(own_state, tmp_path, capsys, monkeypatch):
    target = tmp_path / "mine.json"
    nothing = f"Nothing is recorded in {progress_file()}, and nothing was written."
    assert main(["--export", str(target)]) == 1
    assert capsys.readouterr().err.startswith(nothing)

    own_state.mkdir()
    progress_file().write_text('{"version": 1, "tasks": {"00.average"')
    assert main(["--export", str(target), "--force"]) == 1
    error = capsys.readouterr().err
    assert "The progress file was damaged. It is kept as" in error
    assert error.splitlines()[-1].startswith(nothing)

    monkeypatch.setenv("COURSE_STATE", __file__)  # no folder
    assert main(["--export", str(target)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{progress_file()}: ") and error.count("\n") == 1
    assert not target.exists()


def test_export_to_a_bad_place_is_one_line(tmp_path, capsys):
    record_attempt("00.task", "passed")
    file = tmp_path / "no" / "such" / "folder.json"
    assert main(["--export", str(file)]) == 1
    assert capsys.readouterr().err == f"{file}: No such file or directory\n"
    for folder in ("", str(tmp_path)):
        assert main(["--export", folder]) == 1
        assert main(["--export", folder, "--force"]) == 1
        assert f"{folder!r} is no name for a file.\n" in capsys.readouterr().err


def test_file_prints_the_place(capsys):
    assert main(["--file"]) == 0
    assert capsys.readouterr().out == f"{progress_file()}\n"


def test_without_course_state_it_is_in_the_clone(monkeypatch):
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
