"""What this learner has done, in one small JSON file inside the clone.

The file is ``progress.json`` in ``course_utils.STATE``. Every change reads it, changes
it and writes it whole, under a lock that holds between processes and threads, so
notebooks that are open at once lose nothing. The new content goes to a second file
which then takes the place of the first in one step: a process killed at any moment
leaves the old file or the new one, never half of it.

Standard library only, so that ``python3 -m course_utils progress`` works anywhere.
"""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from course_utils import STATE
from course_utils.notebook.lessons import LESSONS, Lesson, lesson_of

VERSION = 1
# What an entry of each part has at least. A task that asks for a number also has an
# "answer". None: a prediction, which nobody marks.
FIELDS = {
    "tasks": dict(status=str, passed=bool, tries=int, hints=int, saw_solution=bool),
    "questions": dict(
        answer=object, correct=bool | None, tries=int, first_try_correct=bool | None
    ),
}
LOCK_SECONDS = 10.0  # a change takes milliseconds; a holder this slow is not alive

# Changes that could not be written yet, and what was already said about them. They
# are applied on top of the file at every read, and written as soon as that works.
_pending: list[Callable[[dict], None]] = []
_warned: set[str] = set()
_here = threading.RLock()


# ---------------------------------------------------------------- what is recorded


def record_attempt(task_id: str, status: str, answer: float | None = None) -> None:
    """Note the outcome of one check: "passed", "wrong", "crashed", "stuck", ...

    "not attempted" is no attempt and is not noted. A task once passed stays passed.

    Args:
        task_id: such as "00.average".
        status: what the check said.
        answer: the number, where the task asks for one in a form.
    """
    if status == "not attempted":
        return

    def change(task: dict) -> None:
        task["status"] = status
        task["tries"] += 1
        task["passed"] = task["passed"] or status == "passed"
        if answer is not None:
            task["answer"] = answer

    _update_task(task_id, change)


def record_hint(task_id: str, number: int) -> None:
    """Note that hint ``number`` (1, 2, 3) of a task was shown."""
    _update_task(task_id, lambda task: task.update(hints=max(task["hints"], number)))


def record_solution(task_id: str) -> None:
    """Note that the solution of a task was shown."""
    _update_task(task_id, lambda task: task.update(saw_solution=True))


def record_answer(question_id: str, answer: object, correct: bool | None) -> None:
    """Note one answer to a quiz question. A right one stays, whatever is tried later.

    Args:
        question_id: such as "00.ranks".
        answer: anything that can be written as JSON.
        correct: whether it is right; None for a prediction, which is neither.
    """
    json.dumps(answer)

    def change(state: dict) -> None:
        old = state["questions"].get(question_id, {})
        stays = old.get("correct") and correct is False
        state["questions"][question_id] = {
            "answer": old["answer"] if stays else answer,
            "correct": True if stays else correct,
            "tries": old.get("tries", 0) + 1,
            "first_try_correct": old.get("first_try_correct", correct),
        }

    _update(change)


def attempts() -> dict[str, dict]:
    """Task id -> status (of the last try), passed, tries, hints, saw_solution.

    ``status`` is "" for a task of which only hints were read. A task that asks for a
    number has the last ``answer``, too.
    """
    return _read()["tasks"]


def answers() -> dict[str, dict]:
    """Question id -> answer (the last right one, or the last), correct, tries, ..."""
    return _read()["questions"]


def _update_task(task_id: str, change: Callable[[dict], None]) -> None:
    def change_one(state: dict) -> None:
        new = {name: type_() for name, type_ in FIELDS["tasks"].items()}
        change(state["tasks"].setdefault(task_id, new))

    _update(change_one)


# ------------------------------------------------------------------------ the file


def progress_file() -> Path:
    """Where the progress is kept. The environment variable COURSE_STATE moves it."""
    # Read at each call: a test or a notebook may set it after the import.
    return Path(os.environ.get("COURSE_STATE") or STATE) / "progress.json"


class Damaged(Exception):
    """The file is there and can't be used: its args say why, and how it is named."""


def load(file: Path) -> dict:
    """A progress file's version, tasks and questions; empty ones if there is none.

    Raises:
        Damaged: it is no such file, or of another version.
        OSError: it cannot be read.
    """
    try:
        state = json.loads(file.read_bytes())
    except FileNotFoundError:
        return _empty()
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise Damaged("was damaged", "damaged") from error
    version = state.get("version") if isinstance(state, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise Damaged("is of another version of the course", f"version-{version}")
    if version != VERSION or not all(
        isinstance(state.get(part), dict)
        and all(_has(entry, types) for entry in state[part].values())
        for part, types in FIELDS.items()
    ):
        raise Damaged("was damaged", "damaged")
    return state


def _has(entry: object, types: dict[str, type]) -> bool:
    return isinstance(entry, dict) and all(
        name in entry and isinstance(entry[name], type_)
        for name, type_ in types.items()
    )


def _empty() -> dict:
    return {"version": VERSION, "tasks": {}, "questions": {}}


def _read() -> dict:
    """The progress: what the file holds and the changes that are not in it yet."""
    with _here:
        file = progress_file()
        try:
            try:
                state = load(file)
            except Damaged:
                with _locked(file):
                    state = _load_or_begin(file)
        except OSError as error:  # what is there stays there
            _warn_unsaved(error)
            state = _empty()
        for change in _pending:
            change(state)
        return state


def _update(change: Callable[[dict], None]) -> None:
    """Apply ``change`` to the progress and save it; never raises for a bad disk."""
    with _here:
        _pending.append(change)
        file = progress_file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with _locked(file):
                state = _load_or_begin(file)
                for waiting in _pending:
                    waiting(state)
                _save(file, state)
        except OSError as error:
            _warn_unsaved(error)
        else:
            _pending.clear()


def _load_or_begin(file: Path) -> dict:
    """What the file holds. One that can't be used is kept under another name.

    The caller has the lock.
    """
    try:
        return load(file)
    except Damaged as error:
        why, word = error.args
        kept = _unused(file, word)
        os.replace(file, kept)
        _say(f"The progress file {why}. It is kept as {kept}; a new one begins.")
        return _empty()


def _save(file: Path, state: dict) -> None:
    replace_file(file, json.dumps(state, indent=1, sort_keys=True) + "\n")


def replace_file(file: Path, text: str) -> None:
    """Write a file, or replace it, in one step: never is half of it there.

    Raises:
        OSError: it cannot be written.
    """
    # The name of the second file is fixed: whoever holds the lock is its only writer,
    # and what a killed process left of it is overwritten.
    new = file.with_name(f"{file.name}.new")
    with open(new, "w", encoding="utf-8", newline="\n") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    # On Windows a reader that has the file open makes the replacement fail. Readers
    # are done in well under a millisecond.
    for _ in range(50):
        try:
            os.replace(new, file)
            return
        except PermissionError:
            if os.name != "nt":
                raise
            time.sleep(0.01)
    os.replace(new, file)


def _unused(file: Path, word: str) -> Path:
    """The first of progress.WORD-1.json, progress.WORD-2.json, ... that is free."""
    number = 1
    while (name := file.with_name(f"{file.stem}.{word}-{number}.json")).exists():
        number += 1
    return name


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock of the progress file; it is free again when the holder dies.

    Raises:
        OSError: the folder cannot be written, or the lock was not free in time.
    """
    with open(file.with_suffix(".lock"), "a+b") as lock:
        give_up = time.monotonic() + LOCK_SECONDS
        while not _try_lock(lock.fileno()):
            if time.monotonic() > give_up:
                raise TimeoutError(f"another process has {lock.name} locked")
            time.sleep(0.005)
        yield  # closing the file gives the lock back


if os.name == "nt":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _warn_unsaved(error: OSError) -> None:
    file = progress_file()
    if str(file) not in _warned:
        _warned.add(str(file))
        _say(
            f"Your progress cannot be saved in {file} ({error.strerror or error}). "
            "The course goes on; what you do now is forgotten when this kernel ends."
        )


def _say(text: str) -> None:
    print(f"Note: {text}", file=sys.stderr)


# ------------------------------------------------------------------------- the map


def progress() -> None:
    """Print the map of the course: what is done, what was tried, what comes next."""
    print(course_map())


def course_map() -> str:
    """The map of the course with this learner's progress, as text."""
    state = _read()
    width = max(len(lesson.title) for lesson in LESSONS)
    lines = ["The course, and where you are:", ""]
    for lesson in LESSONS:
        mark, facts = _row(lesson, state)
        line = f"  {mark}  {lesson.number}  {lesson.title:<{width}}  {facts}"
        lines.append(line.rstrip())
    return "\n".join([*lines, "", f"Next: {_next_step(state)}"])


def _row(lesson: Lesson, state: dict) -> tuple[str, str]:
    """A lesson's mark and its facts in words."""
    tasks = [state["tasks"].get(task, {}) for task in lesson.tasks]
    passed = sum(task.get("passed", False) for task in tasks)
    tried = sum(task.get("tries", 0) > 0 for task in tasks) - passed
    quiz = _answered(lesson.number, state)
    facts = [f"{passed} of {len(tasks)} tasks done"]
    facts += [f"{tried} tried"] if tried else []
    if tasks and passed == len(tasks):
        mark = "✓"
    else:
        mark = "…" if passed or tried or quiz else "·"
    return mark, ", ".join(facts + quiz)


def answered(lesson: str) -> list[str]:
    """What was answered of a lesson ("00"), in words; [] before the first answer."""
    return _answered(lesson, _read())


def _answered(lesson: str, state: dict) -> list[str]:
    entries = _of(lesson, state["questions"]).values()
    judged = [one for one in entries if one["correct"] is not None]
    facts = []
    if judged:
        right = sum(one["correct"] for one in judged)
        first = sum(one["first_try_correct"] or False for one in judged)
        facts.append(f"{right} of {len(judged)} answers right")
        facts.append(f"{first} at the first try")
    if predicted := len(entries) - len(judged):  # nobody marks them
        facts.append(f"{predicted} prediction{'s' if predicted > 1 else ''} made")
    return facts


def _of(lesson: str, entries: dict[str, dict]) -> dict[str, dict]:
    """Those entries of tasks or of questions that belong to a lesson."""
    return {
        name: entry for name, entry in entries.items() if name.startswith(f"{lesson}.")
    }


def _next_step(state: dict) -> str:
    for lesson in LESSONS:
        for task in lesson.tasks:
            if not state["tasks"].get(task, {}).get("passed"):
                exercise = f"exercises/{lesson.exercise.name}"
                if any(_of(lesson.number, state[part]) for part in FIELDS):
                    return f"task {task} in {exercise}"
                return f"read notebooks/{lesson.slug}.ipynb, then solve {exercise}"
    return "nothing is left to do. Well done."


# ---------------------------------------------------------------- the command line


def main(argv: list[str] | None = None) -> int:
    """``python3 -m course_utils progress``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils progress",
        description="Show what you have done in the course, and what comes next.",
        allow_abbrev=False,
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--reset",
        metavar="LESSON",
        choices=[lesson.number for lesson in LESSONS],
        help='forget one lesson, such as "03"; a copy of everything is kept',
    )
    action.add_argument(
        "--export", metavar="FILE", help="write all of it to FILE, as JSON"
    )
    action.add_argument(
        "--file", action="store_true", help="print where the progress is kept"
    )
    parser.add_argument(
        "--force", action="store_true", help="let --export replace an existing file"
    )
    options = parser.parse_args(argv)
    return exit_status(lambda: _run(options))


def exit_status(command: Callable[[], object]) -> int:
    """Run a command; 1 where that fails, which is told in one line, and 0 else."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without a letter shows a ?
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        command()
    except BrokenPipeError:  # nobody reads it any more
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{where}{error.strerror or error}", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
    else:
        return 0
    return 1


def _run(options: argparse.Namespace) -> None:
    if options.reset is not None:
        _reset(lesson_of(options.reset))
    elif options.export is not None:
        _export(Path(options.export), options.force)
    elif options.file:
        print(progress_file())
    else:
        progress()


def _reset(lesson: Lesson) -> None:
    """Forget one lesson's tasks and questions, after a copy of the file was made."""
    before = _read()
    mine = {part: _of(lesson.number, before[part]) for part in FIELDS}
    if not any(mine.values()):
        print(f"Nothing is recorded for lesson {lesson.number}.")
        return
    file = progress_file()
    with _here, _locked(file):
        state = _load_or_begin(file)
        kept = _unused(file, f"before-reset-{lesson.number}")
        _save(kept, state)
        for part in FIELDS:
            for name in _of(lesson.number, state[part]):
                del state[part][name]
        _save(file, state)
    print(f"Lesson {lesson.number} ({lesson.title}) starts afresh.")
    print(f"What was there before is kept in {kept}")


def _export(target: Path, force: bool) -> None:
    state = _read()
    if not (state["tasks"] or state["questions"]):
        raise ValueError(
            f"Nothing is recorded in {progress_file()}, and nothing was written. Have "
            "you worked in another copy of the course? Then run this there."
        )
    if target.exists() and not (force and target.is_file()):
        raise ValueError(
            f"{target} exists. Choose another name, or add --force to replace it."
        )
    _save(target, state)
    print(f"Written to {target}")
