"""``python3 -m course_utils cohort FOLDER``: who has passed what, and who is stuck.

* ``collect.py`` reads the learners' progress files and notebooks, and runs nothing,
* ``report.py`` makes text, CSV and one HTML page of it,
* ``rerun.py`` runs the notebooks again, with ``--rerun`` only; ``worker.py`` is the
  process in which it does.
"""

import argparse
import math
import sys
from pathlib import Path

from course_utils.notebook.cohort.collect import Learner, clean, collect, columns
from course_utils.notebook.cohort.report import HEAD, MARK, as_csv, as_html, as_text
from course_utils.notebook.written import exit_status, may_write, write

HOW_READ = (
    "As handed in: progress files, and the outputs of the checks in notebooks. "
    "Nothing was run, and both can be edited."
)
HOW_RUN = "Every notebook was run again. Answers to questions are as handed in."


def main(argv: list[str] | None = None) -> int:
    """``python3 -m course_utils cohort``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils cohort",
        description="Show who has passed what, and who is stuck where: from a folder "
        "with a folder or a file for each learner, which hold progress.json, exercise "
        "notebooks, or both. Nothing that was handed in is run without --rerun.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write a table")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page for a browser"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace files that are no such table"
    )
    parser.add_argument(
        "--rerun",
        action="store_true",
        help="run every notebook with your rights, in a process with limits, and take "
        "what the checks find; use a machine that holds nothing you need",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        help="time limit of one notebook with --rerun (default: 300)",
    )
    options = parser.parse_args(argv)
    if options.seconds is not None and not options.rerun:
        parser.error("--seconds goes with --rerun")
    if options.force and not (options.csv or options.html):
        parser.error("--force goes with --csv or --html")
    if options.csv and options.html and options.csv.resolve() == options.html.resolve():
        parser.error("--csv and --html name the same file")
    return exit_status(lambda: _run(options))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 second or more")
    return value


def _run(options: argparse.Namespace) -> None:
    if not options.folder.is_dir():
        raise ValueError(
            f"{options.folder} is no folder. Give the folder that holds one folder or "
            "file for each learner."
        )
    # Before the work, not after it.
    if options.csv:
        may_write(options.csv, (",".join(HEAD),), options.force)
    if options.html:
        may_write(options.html, (MARK,), options.force)

    learners = collect(options.folder)
    if not learners:
        raise ValueError(
            f"{options.folder} holds nothing to read. Expected is a folder or a .json "
            "or .ipynb file for each learner."
        )
    if options.rerun:
        _rerun(learners, options.seconds)
    asked = columns()
    how = HOW_RUN if options.rerun else HOW_READ
    # The files first: a pipe that is closed, as by head, ends the printing.
    if options.csv:
        # The mark at the beginning tells spreadsheets which encoding it is.
        write(options.csv, "\ufeff" + as_csv(learners, asked))
    if options.html:
        folder = clean(options.folder.resolve().name)
        write(options.html, as_html(learners, asked, how, folder))
    print(as_text(learners, asked))
    for file in filter(None, (options.csv, options.html)):
        print(f"Written to {file}")


def _rerun(learners: list[Learner], seconds: float | None) -> None:
    from course_utils.notebook.cohort.rerun import SECONDS, rerun

    for number, learner in enumerate(learners, 1):
        if count := len(learner.notebooks):
            print(
                f"running {count} notebook{'s' * (count != 1)} of {learner.label} "
                f"({number} of {len(learners)})",
                file=sys.stderr,
                flush=True,
            )
        rerun(learner, seconds or SECONDS)
