"""Run one exercise notebook, and write down what its checks find.

    python -m course_utils.notebook.cohort.worker NOTEBOOK RESULTS

This is the process that ``rerun.py`` bounds and ends. The cells run here, in IPython's
shell without a kernel: a kernel would have a session of its own, which outlives this
one. Each call of ``check`` adds a line to the file RESULTS, such as ``["00.average",
"passed"]``; the last line is ``["end", ""]``. What a cell prints is dropped. A cell
that fails does not end the notebook: a stub that is not filled in is no reason to
leave out the tasks after it.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

MEMORY = 8 << 30  # bytes of data a process; torch and a lesson need about 1 GB
FILE = 1 << 30  # bytes of the largest file


def limit_resources() -> None:
    """Bound memory and the size of files, here and in all processes from here."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limits = {"RLIMIT_DATA": MEMORY, "RLIMIT_FSIZE": FILE, "RLIMIT_CORE": 0}
    for name, most in limits.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):
            continue  # macOS refuses some


def main(notebook: Path, results: Path) -> None:
    """Run the cells of a notebook in order."""
    limit_resources()
    cells = json.loads(notebook.read_bytes())["cells"]
    with open(results, "a", encoding="utf-8") as out:

        def write(*line: str) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        run(cells, write)
        write("end", "")


def run(cells: list, write: Callable[[str, str], None]) -> None:
    """Run code cells; ``write(task, status)`` is called at each check."""
    from IPython.core.interactiveshell import InteractiveShell

    from course_utils.notebook import check as checks
    from course_utils.notebook.cohort.collect import source_of

    def check(task_id: str, answer: object = ...) -> None:
        outcome = checks.run_check(task_id, answer)
        write(task_id, outcome.status)

    # What the learner's `from course_utils import check` gives.
    checks.check = check
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    for cell in cells:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            try:
                shell.run_cell(source_of(cell), store_history=False)
            except SystemExit:
                continue


if __name__ == "__main__":
    # What the learner's code prints must not fill a disk or a terminal.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    paths = map(Path, sys.argv[1:])
    del sys.argv[1:]  # the cells need not know where the results go
    main(*paths)
