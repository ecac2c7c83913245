"""Run submitted notebooks again, each in a bounded process, and believe the checks.

A submission is a program of somebody else. It runs with this user's rights, so this is
a fence and no prison: use a machine or a container that holds nothing you need. The
fence: a process group of its own that is killed at the end together with all that came
from it, a time limit, a limit of memory and file size where the system has one, an
environment without this user's variables, an own empty home, temporary and progress
folder that are deleted, and no standard input. What leaves the group and empties its
environment, too, is not found, and goes on. And what runs in the process of the checks
can forge what they say.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from course_utils import ROOT
from course_utils.notebook.cohort.collect import (
    NOT,
    NOTEBOOK_BYTES,
    NOTHING,
    PASSED,
    STATUSES,
    TRIED,
    Learner,
    Result,
    Unreadable,
    clean,
    columns,
    read_json,
    result_of,
    tasks_checked,
)
from course_utils.setup.environment import Child

SECONDS = 300.0  # one exercise notebook takes 10 to 60
END_SECONDS = 10.0  # to kill what is left; it takes milliseconds
RESULT_BYTES = 1_000_000
# What a program needs to find its interpreter, its locale and its folders.
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "VIRTUAL_ENV", "SYSTEMROOT", "COMSPEC")


def rerun(learner: Learner, seconds: float) -> None:
    """Run a learner's notebooks, and replace their results by what the checks find.

    Of several notebooks the best counts. Tasks that no notebook answers keep what was
    handed in, and a note says so where that was "passed". A task whose check was not
    reached has not passed: what is printed below it may be a lie, and an endless loop
    before it keeps that secret.
    """
    found: dict[str, Result] = {}
    unreached: set[str] = set()
    for notebook in learner.notebooks:
        try:
            statuses, claims, trouble = run_notebook(notebook, seconds)
        except Unreadable as error:  # it has changed since
            statuses, claims, trouble = {}, set(), str(error)
        unreached |= claims - statuses.keys()
        for task in claims & statuses.keys():
            now = result_of(statuses[task])
            found[task] = now.better(found.get(task, now))
        if trouble:
            learner.notes.append(f"{clean(notebook.name)} {trouble}")
    unproved = []
    for task in (column.id for column in columns() if column.kind == "task"):
        before, now = learner.result(task), found.get(task, NOTHING)
        passed = before.state == PASSED
        if now.state != NOT:
            if passed and now.state != PASSED:
                learner.notes.append(f"{task} was passed, and is {now.status} when run")
            learner.results[task] = replace(before, state=now.state, status=now.status)
        elif passed and task in unreached:
            learner.notes.append(f"{task} was passed, and its check did not run")
            learner.results[task] = replace(before, state=TRIED)
        elif passed:  # a stub, or no notebook of it: nothing was disproved
            unproved.append(task)
    if unproved:
        learner.notes.append(f"not run, as handed in: {', '.join(unproved)}")


def run_notebook(
    notebook: Path, seconds: float
) -> tuple[dict[str, str], set[str], str]:
    """Run one notebook: each task's last status, all it checks, and what went wrong.

    Raises:
        Unreadable: it is no notebook any more.
        OSError: no temporary folder could be made.
    """
    # Read here, by the rules for what others hand in, and given on as a copy.
    data = read_json(notebook, NOTEBOOK_BYTES)
    cells = data.get("cells") if isinstance(data, dict) else None
    claims = tasks_checked(cells if isinstance(cells, list) else [])
    with _folder() as folder:
        copy, results = folder / "notebook.ipynb", folder / "results"
        copy.write_text(json.dumps(data), encoding="utf-8")
        results.touch()
        command = [
            sys.executable,
            "-m",
            "course_utils.notebook.cohort.worker",
            copy,
            results,
        ]
        environment = _environment(folder)
        end = time.monotonic() + seconds
        code = None
        with _everything_ended(environment["COURSE_STATE"]):
            # The group is told to end, and killed ten seconds later.
            with Child(command, env=environment, cwd=folder / "work") as child:
                while code is None and time.monotonic() < end:
                    time.sleep(0.05)
                    code = child.process.poll()
        found, finished = _read_results(results)
    if code is None:
        return found, claims, f"was stopped after {seconds:g} s"
    if not finished:
        return found, claims, f"ended early, with exit code {code}"
    return found, claims, ""


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="course-rerun-"))
    try:
        for name in ("home", "tmp", "work", "state"):
            (folder / name).mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    home = str(folder / "home")
    return {
        **kept,
        "HOME": home,
        "USERPROFILE": home,
        "IPYTHONDIR": str(folder / "home" / "ipython"),
        "MPLCONFIGDIR": str(folder / "home" / "matplotlib"),
        "TORCH_HOME": str(folder / "home" / "torch"),
        "TMPDIR": str(folder / "tmp"),
        "TEMP": str(folder / "tmp"),
        "TMP": str(folder / "tmp"),
        "COURSE_STATE": str(folder / "state"),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "CI": "1",
    }


@contextlib.contextmanager
def _everything_ended(state: str) -> Iterator[None]:
    """Afterwards, kill what has left the process group (by ``setsid``, for example).

    Such a process is known by the progress folder in its environment, which no other
    program has.
    """
    import psutil

    def ours() -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("COURSE_STATE") == state:
                    yield process

    try:
        yield
    finally:
        give_up = time.monotonic() + END_SECONDS
        # Until none is left: one may have started another meanwhile.
        while (left := list(ours())) and time.monotonic() < give_up:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1)


def _read_results(file: Path) -> tuple[dict[str, str], bool]:
    """Task -> last status, and whether the worker came to its end.

    The learner's code could have written anything here.
    """
    found: dict[str, str] = {}
    finished = False
    with open(file, "rb") as source:
        lines = source.read(RESULT_BYTES).splitlines()
    for line in lines:
        try:
            task, status = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(task, str) and status in STATUSES:
            found[task] = status
        finished = finished or task == "end"
    return found, finished
