"""``python3 -m course_utils cohort FOLDER``: who has passed what, and who is stuck.

The folder has one progress file for each learner, in any of these places::

    anna.json              anna/progress.json
    anna_progress.json     anna/anna_progress.json     anna/.course/progress.json

Nothing of the learners' is run. Standard library only.
"""

import argparse
import csv
import html
import io
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from course_utils.notebook.lessons import LESSONS
from course_utils.notebook.progress import Damaged, exit_status, load, replace_file

MARK = "<!-- Written by: python3 -m course_utils cohort -->"  # in each of our pages
HEAD = ("learner", "tasks passed", "tasks", "answers right", "answers")
HURDLES, NAMES = 5, 4  # shown in the terminal: tasks, and names at each of them
ASK = "python3 -m course_utils progress --export NAME_progress.json"
FORMULA = tuple("=+-@＝＋－＠")  # a spreadsheet may run a cell that begins so
STYLE = """
:root { color-scheme: light dark; font: 1rem/1.4 system-ui, sans-serif; }
body { margin: 1rem 2rem; }
table { border-collapse: collapse; margin: 2rem 0; }
caption { text-align: left; font-weight: bold; font-size: 1.2rem; }
th, td { border: 1px solid GrayText; padding: .2rem .5rem; text-align: left; }
th, td { vertical-align: top; }
[scope=row], td { overflow-wrap: anywhere; }
[scope=row] { min-width: 6rem; }
.passed { background: color-mix(in srgb, green 20%, Canvas); }
"""


@dataclass(frozen=True)
class Learner:
    """One row of the table.

    Attributes:
        name: as the file or its folder is called.
        tasks: task -> status, passed, tries, hints, saw_solution.
        right, judged: how many answers to questions are right, and of how many.
    """

    name: str
    tasks: dict[str, dict]
    right: int
    judged: int

    def passed(self, tasks: Iterable[str]) -> int:
        """How many of these tasks are done."""
        return sum(task in self.tasks and self.tasks[task]["passed"] for task in tasks)

    def words(self, task: str) -> str:
        """Such as "stuck after 4 tries, 2 hints"; "" where nothing was done."""
        facts = []
        if entry := self.tasks.get(task):
            state = "passed" if entry["passed"] else _clean(entry["status"])
            if entry["tries"]:
                facts.append(f"{state} after {_many(entry['tries'], 'try', 'tries')}")
            if entry["hints"]:
                facts.append(_many(entry["hints"], "hint", "hints"))
            if entry["saw_solution"]:
                facts.append("saw the solution")
        return ", ".join(facts)


def total(task: str, learners: Sequence[Learner]) -> str:
    """Of all learners: such as "12 of 30 passed, 2 not yet, 61 tries, 9 hints"."""
    begun = [one for one in learners if task in one.tasks]
    passed = sum(one.passed([task]) for one in begun)
    facts = [f"{passed} of {len(learners)} passed"]
    if len(begun) > passed:
        facts.append(f"{len(begun) - passed} not yet")
    if tries := sum(one.tasks[task]["tries"] for one in begun):
        facts.append(_many(tries, "try", "tries"))
    if hints := sum(one.tasks[task]["hints"] for one in begun):
        facts.append(_many(hints, "hint", "hints"))
    return ", ".join(facts)


def hurdles(learners: Sequence[Learner]) -> dict[str, list[Learner]]:
    """Task -> who has begun it and not passed; first where most are."""
    found = {}
    for task in _all_tasks():
        begun = [one for one in learners if task in one.tasks]
        stuck = [one for one in begun if not one.passed([task])]
        found[task] = sorted(stuck, key=lambda one: -one.tasks[task]["tries"])
    ordered = sorted(found, key=lambda task: -len(found[task]))
    return {task: found[task] for task in ordered if found[task]}


def _many(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _all_tasks() -> list[str]:
    return [task for lesson in LESSONS for task in lesson.tasks]


# ------------------------------------------------------------------------- reading


def collect(folder: Path) -> tuple[list[Learner], list[str]]:
    """The learners by name, and a line for each file or folder that is left out.

    Raises:
        ValueError: it is no folder.
        OSError: it cannot be listed.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder. Give the one with a file or folder for each "
            "learner."
        )
    files: dict[str, list[Path]] = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith((".", "__")):
            name = entry.name
            own = [*entry.glob("*progress.json"), *entry.glob(".course/progress.json")]
        elif entry.suffix.lower() == ".json":
            name = entry.stem.removesuffix("progress").rstrip("_- ")
            name = name or folder.resolve().name  # it is one learner's own folder
            own = [entry]
        else:
            continue
        files.setdefault(_clean(name), []).extend(filter(Path.is_file, own))

    learners, left_out = [], []
    for name in sorted(files, key=str.casefold):
        shown = [_clean(str(file.relative_to(folder))) for file in files[name]]
        if len(shown) > 1:
            left_out.append(
                f"{name}: there are {' and '.join(shown)}. Expected is one file for "
                "each learner: keep the newer one, or rename that of another person."
            )
        elif not shown:
            left_out.append(f"{name}: no progress file is there. Ask for it: {ASK}")
        else:
            try:
                learners.append(_learner(name, load(files[name][0])))
            except Damaged as error:
                why = f"{error.args[0]}, or is another program's"
                left_out.append(f"{shown[0]}: the file {why}. Ask for a new one: {ASK}")
            except OSError as error:
                left_out.append(f"{shown[0]} cannot be read: {error.strerror}")
    return learners, left_out


def _learner(name: str, state: dict) -> Learner:
    """A row. Predictions are not judged."""
    correct = [entry["correct"] for entry in state["questions"].values()]
    judged = [right for right in correct if right is not None]
    return Learner(name, state["tasks"], sum(judged), len(judged))


def _clean(text: str) -> str:
    """A text for one line of a terminal, in whole letters: macOS makes pieces."""
    text = unicodedata.normalize("NFC", text)
    return "".join(letter if letter.isprintable() else "�" for letter in text)


# ------------------------------------------------------------------------- writing


def overview(learners: Sequence[Learner]) -> list[list[str]]:
    """Of each learner how many tasks of each lesson are done; the first row is heads.

    "-" stands for a lesson that the learner has not begun.
    """
    rows = [["learner", *(one.number for one in LESSONS), "all", "answers right"]]
    every = _all_tasks()
    for one in learners:
        row = [one.name]
        for lesson in LESSONS:
            done = f"{one.passed(lesson.tasks)}/{len(lesson.tasks)}"
            row.append(done if one.tasks.keys() & lesson.tasks else "-")
        row += [f"{one.passed(every)}/{len(every)}", f"{one.right} of {one.judged}"]
        rows.append(row)
    return rows


def as_text(learners: Sequence[Learner]) -> str:
    """The overview and the highest hurdles, for a terminal."""

    def cells(text: str) -> int:  # of the terminal: a Korean letter takes two
        return sum(1 + (unicodedata.east_asian_width(one) in "WF") for one in text)

    lines = [_many(len(learners), "learner", "learners"), ""]
    rows = overview(learners)
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = zip(row, widths, strict=True)
        padded = (text + " " * (width - cells(text)) for text, width in pairs)
        lines.append("  ".join(padded).rstrip())
    found = hurdles(learners)
    lines += ["", "Where most are stuck:" if found else "Nobody is stuck."]
    for task in list(found)[:HURDLES]:
        lines.append(f"  {task}: {total(task, learners)}")
        shown = found[task][:NAMES]
        lines += [f"      {one.name}: {one.words(task)}" for one in shown]
        if more := len(found[task]) - len(shown):
            lines.append(f"      and {more} more")
    return "\n".join(lines)


def as_csv(learners: Sequence[Learner]) -> str:
    """A row a learner, a column a task; the last row has the totals."""
    every = _all_tasks()
    rows = [[*HEAD, *every]]
    for one in learners:
        numbers = [one.passed(every), len(every), one.right, one.judged]
        rows.append([one.name, *numbers, *map(one.words, every)])
    totals = [total(task, learners) for task in every]
    rows.append(["all", *[""] * len(HEAD[1:]), *totals])
    out = io.StringIO()
    for row in rows:
        safe = [f"'{cell}" if str(cell).startswith(FORMULA) else cell for cell in row]
        csv.writer(out, lineterminator="\n").writerow(safe)
    return out.getvalue()


def as_html(learners: Sequence[Learner], left_out: Sequence[str]) -> str:
    """A page that needs no network: who is stuck, an overview, a table a lesson."""
    stuck = [["task", "who", "all learners"]]
    for task, who in hurdles(learners).items():
        names = "; ".join(f"{one.name}: {one.words(task)}" for one in who)
        stuck.append([task, names, total(task, learners)])
    tables = [_table("Who is stuck where", stuck)]
    tables.append(_table("Tasks passed", overview(learners)))
    for lesson in LESSONS:
        if any(one.tasks.keys() & lesson.tasks for one in learners):
            rows = [["learner", *lesson.tasks]]
            rows += [[one.name, *map(one.words, lesson.tasks)] for one in learners]
            rows.append(["all", *(total(task, learners) for task in lesson.tasks)])
            tables.append(_table(f"{lesson.number} {lesson.title}", rows))
    notes = [f"<p>Left out: {html.escape(line)}</p>" for line in left_out]
    title = f"The course: {_many(len(learners), 'learner', 'learners')}"
    begin = f"""<!DOCTYPE html>
<html lang="en">
{MARK}
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{STYLE}</style>
<main>
<h1>{title}</h1>"""
    return "\n".join([begin, *notes, *tables, "</main>\n</html>\n"])


def _table(caption: str, rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row and first column are heads."""
    lines = [f"<table>\n<caption>{html.escape(caption)}</caption>\n<tr>"]
    for head in rows[0]:
        lines.append(f'<th scope="col">{html.escape(head).replace("_", "_<wbr>")}')
    for first, *cells in rows[1:]:
        lines.append(f'<tr><th scope="row">{html.escape(first)}')
        for cell in cells:
            mark = ' class="passed"' if cell.startswith("passed") else ""
            lines.append(f"<td{mark}>{html.escape(cell) or '–'}")
    return "\n".join([*lines, "</table>"])


# ---------------------------------------------------------------- the command line


def main(argv: list[str] | None = None) -> int:
    """``python3 -m course_utils cohort``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils cohort",
        description="Show who has passed what, and who is stuck where, from a folder "
        "with NAME_progress.json or NAME/progress.json for each learner.",
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
    options = parser.parse_args(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    # A refusal comes before the work.
    if options.csv and options.csv == options.html:
        raise ValueError(f"--csv and --html name the same file, {options.csv}.")
    for target, mark in ((options.csv, ",".join(HEAD)), (options.html, MARK)):
        if target:
            _may_write(target, mark, options.force)
    learners, left_out = collect(options.folder)
    for line in left_out:
        print(f"Left out: {line}", file=sys.stderr)
    if not learners:
        raise ValueError(
            f"{options.folder} has no progress file to read. Expected is "
            f"NAME_progress.json or NAME/progress.json for each learner, from: {ASK}"
        )
    # The files first: a closed pipe, as by head, ends the printing. The mark at the
    # beginning of the CSV tells spreadsheets which encoding it is.
    if options.csv:
        replace_file(options.csv, "\ufeff" + as_csv(learners))
    if options.html:
        replace_file(options.html, as_html(learners, left_out))
    print(as_text(learners))
    for file in filter(None, (options.csv, options.html)):
        print(f"Written to {file}")


def _may_write(target: Path, mark: str, force: bool) -> None:
    """Say no where a file would be lost that is not ours."""
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"{target} is no name for a file in a folder that exists.")
    if force or not os.path.lexists(target):
        return
    if target.is_symlink() or mark.encode() not in target.read_bytes()[:500]:
        raise ValueError(
            f"{target} exists and was not written by this command. Choose another "
            "name, or add --force to replace it."
        )
