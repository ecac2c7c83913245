"""The table of a cohort as text, as CSV and as one HTML page.

All texts of learners pass ``collect.clean`` on their way here, and are escaped here.
The page needs no script and no network, and forbids itself both.
"""

import csv
import html
import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from course_utils.notebook.cohort.collect import (
    NOT,
    PASSED,
    TRIED,
    WRONG,
    Column,
    Learner,
    Result,
)

MARK = "<!-- A cohort of the course: python3 -m course_utils cohort -->"
HEAD = ("learner", "tasks passed", "tasks", "answers right", "questions", "tries")
SYMBOLS = {PASSED: "✓", WRONG: "✗", TRIED: "…", NOT: "·"}
NAMES_SHOWN = 4  # of those who are stuck at one task, on the terminal
# A spreadsheet takes a cell that begins so for a formula, and may run it.
FORMULA = tuple("=+-@\t\r＝＋－＠")


@dataclass(frozen=True)
class Hurdle:
    """One task or question that somebody tried and has not passed.

    Attributes:
        stuck: those learners, the most tries first, with what they have of it.
        passed: how many passed it.
        tries: of all learners together.
    """

    column: Column
    stuck: tuple[tuple[Learner, Result], ...]
    passed: int
    tries: int


def hurdles(learners: Sequence[Learner], columns: Sequence[Column]) -> list[Hurdle]:
    """Where learners are stuck: first where most are, with the most tries."""
    found = []
    for column in columns:
        results = [(learner, learner.result(column.key)) for learner in learners]
        stuck = [pair for pair in results if pair[1].state in (WRONG, TRIED)]
        if column.kind == "question":
            # A prediction is not judged: nobody is stuck there.
            stuck = [pair for pair in stuck if pair[1].state == WRONG]
        stuck.sort(key=lambda pair: -pair[1].tries)
        passed = sum(result.state == PASSED for _, result in results)
        tries = sum(result.tries for _, result in results)
        if stuck:
            found.append(Hurdle(column, tuple(stuck), passed, tries))
    return sorted(found, key=_weight)


def _weight(one: Hurdle) -> tuple:
    """Sorts tasks before questions, and the highest hurdle first."""
    kind = one.column.kind == "question"
    return kind, -len(one.stuck), -one.tries, one.passed


def counts(learner: Learner, columns: Sequence[Column]) -> tuple[int, int, int, int]:
    """Tasks passed, tasks, answers right, questions that are judged."""
    numbers = []
    for kind in ("task", "question"):
        chosen = [one for one in columns if one.kind == kind and one.judged]
        passed = sum(learner.result(one.key).state == PASSED for one in chosen)
        numbers += [passed, len(chosen)]
    return tuple(numbers)


# ---------------------------------------------------------------------------- text


def as_text(learners: Sequence[Learner], columns: Sequence[Column]) -> str:
    """A short summary for a terminal."""
    number = len(learners)
    lines = [f"{number} learner{'s' * (number != 1)}", ""]
    width = max((_cells(learner.label) for learner in learners), default=0)
    for learner in learners:
        passed, tasks, right, questions = counts(learner, columns)
        name = learner.label + " " * (width - _cells(learner.label))
        lines.append(
            f"  {name}  {passed:>3} of {tasks} tasks  "
            f"{right:>3} of {questions} answers right"
        )
    tasks = [one for one in hurdles(learners, columns) if one.column.kind == "task"]
    if tasks:
        lines += ["", "Tasks where most are stuck:"]
    for one in tasks[:5]:
        names = [
            f"{learner.label} ({result.words()})"
            for learner, result in one.stuck[:NAMES_SHOWN]
        ]
        more = len(one.stuck) - NAMES_SHOWN
        if more > 0:
            names.append(f"{more} more")
        lines.append(f"  {one.column.id}: {one.passed} passed, {one.tries} tries")
        lines += [f"      {name}" for name in names]
    noted = [(learner, note) for learner in learners for note in learner.notes]
    if noted:
        lines += ["", "Notes:"]
    lines += [f"  {learner.label}: {note}" for learner, note in noted]
    return "\n".join(lines)


def _cells(text: str) -> int:
    """How many cells of a terminal a text takes: a Korean letter takes two."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    marks = sum(unicodedata.combining(letter) > 0 for letter in text)
    return len(text) + wide - marks


# ----------------------------------------------------------------------------- CSV


def as_csv(learners: Sequence[Learner], columns: Sequence[Column]) -> str:
    """A row a learner, a column a task or question, and notes in the last column."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow([*HEAD, *(column.key for column in columns), "notes"])
    for learner in learners:
        results = [learner.result(column.key) for column in columns]
        row = [
            learner.label,
            *counts(learner, columns),
            sum(result.tries for result in results),
            *(result.state for result in results),
            "; ".join(learner.notes),
        ]
        table.writerow([_harmless(cell) for cell in row])
    return out.getvalue()


def _harmless(cell: object) -> object:
    if isinstance(cell, str) and cell.startswith(FORMULA):
        return f"'{cell}"
    return cell


# ---------------------------------------------------------------------------- HTML


def as_html(
    learners: Sequence[Learner],
    columns: Sequence[Column],
    how: str,
    folder: str,
) -> str:
    """One page that needs nothing else.

    Args:
        how: one sentence that says where the results come from.
        folder: the name of the folder that was read.
    """
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = html.escape(f"Cohort: {folder}")
    number = f"{len(learners)} learner{'s' * (len(learners) != 1)}"
    legend = "".join(
        f'<li><span class="{_class(state)}">{SYMBOLS[state]}</span> {state}: {means}'
        for state, means in (
            (PASSED, "the check passed, the answer is right"),
            (WRONG, "the last check or answer was not right"),
            (TRIED, "worked on or predicted, but nothing has judged it"),
            (NOT, "no trace of it"),
        )
    )
    legend += "<li>A small number: so many tries."
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{MARK}',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>",
        f"<h1>{title}</h1>\n<p>{number}. {html.escape(how)}</p>",
        f'<ul class="legend">{legend}</ul>',
        _hurdles_table(learners, columns),
        _notes(learners),
        _overview_table(learners, columns),
        *_lesson_tables(learners, columns),
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(filter(None, parts))


def _class(state: str) -> str:
    return f"state {state.replace(' ', '-')}"


def _scrolling(table: str, label: str) -> str:
    # A region that scrolls must be reachable by keyboard, and have a name.
    return (
        f'<div class="wide" role="region" tabindex="0" '
        f'aria-label="{html.escape(label)}">\n{table}</div>'
    )


def _hurdles_table(learners: Sequence[Learner], columns: Sequence[Column]) -> str:
    rows = []
    for one in hurdles(learners, columns):
        who = "".join(
            f"<li><strong>{html.escape(learner.label)}</strong>: {result.words()}"
            for learner, result in one.stuck
        )
        rows.append(
            f'<tr><th scope="row">{one.column.id}<td><ul>{who}</ul>'
            f"<td>{len(one.stuck)}<td>{one.passed}<td>{one.tries}"
            f"<td>{one.column.kind}\n"
        )
    if not rows:
        return "<h2>Who is stuck where</h2>\n<p>Nobody is stuck.</p>"
    heads = ("where", "who", "stuck", "passed", "tries", "what")
    table = (
        "<table><caption>Tasks and questions that somebody tried and has not passed"
        "</caption>\n<thead><tr>"
        + "".join(f'<th scope="col">{head}' for head in heads)
        + f"</thead>\n<tbody>\n{''.join(rows)}</tbody></table>\n"
    )
    return f"<h2>Who is stuck where</h2>\n{_scrolling(table, 'Who is stuck where')}"


def _overview_table(learners: Sequence[Learner], columns: Sequence[Column]) -> str:
    lessons = [lesson for lesson, _ in groupby(columns, key=lambda one: one.lesson)]
    head = "".join(
        f'<th scope="col"><abbr title="{html.escape(lesson.title)}">{lesson.number}'
        "</abbr>"
        for lesson in lessons
    )
    rows = []
    for learner in learners:
        own = ([one for one in columns if one.lesson is lesson] for lesson in lessons)
        rows.append(_row(learner, "".join(_summary(learner, group) for group in own)))
    table = (
        "<table><caption>Of each lesson: tasks passed, and below them questions "
        "answered right, of those that are judged</caption>\n"
        f'<thead><tr><th scope="col">learner{head}</thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table>\n"
    )
    untouched = [
        html.escape(f"{lesson.number} {lesson.title}")
        for lesson, group in groupby(columns, key=lambda one: one.lesson)
        if not _trace(learners, list(group))
    ]
    none = f"<p>No trace of anybody: {', '.join(untouched)}.</p>" if untouched else ""
    return f"<h2>All lessons</h2>\n{_scrolling(table, 'All lessons')}\n{none}"


def _trace(learners: Sequence[Learner], columns: Sequence[Column]) -> bool:
    return any(
        learner.result(one.key).state != NOT for learner in learners for one in columns
    )


def _summary(learner: Learner, columns: Sequence[Column]) -> str:
    """What a learner has of one lesson. ✗ where a task is wrong, ✓ where all passed."""
    if not _trace([learner], columns):
        words = f'<span class="words">{NOT}</span>'
        return f'<td><span aria-hidden="true">{SYMBOLS[NOT]}</span>{words}'
    passed, tasks, right, questions = counts(learner, columns)
    states = {learner.result(one.key).state for one in columns if one.kind == "task"}
    mark = WRONG if WRONG in states else PASSED if states == {PASSED} else ""
    symbol = f" {SYMBOLS[mark]}" if mark else ""
    return (
        f'<td class="{mark}">{passed} of {tasks}{symbol}'
        f"<br><small>{right} of {questions}</small>"
    )


def _lesson_tables(learners: Sequence[Learner], columns: Sequence[Column]):
    for lesson, group in groupby(columns, key=lambda one: one.lesson):
        own = list(group)
        if not _trace(learners, own):
            continue
        kinds = [(kind, list(g)) for kind, g in groupby(own, key=lambda one: one.kind)]
        groups = "".join(
            f'<th scope="colgroup" colspan="{len(g)}">{kind}s' for kind, g in kinds
        )
        heads = "".join(
            f'<th scope="col"><span>{one.id.partition(".")[2].replace("_", " ")}</span>'
            for one in own
        )
        rows = []
        for learner in learners:
            cells = "".join(_cell(learner.result(one.key)) for one in own)
            rows.append(_row(learner, cells))
        title = f"{lesson.number} {lesson.title}"
        table = (
            f'<table class="grid"><caption>{html.escape(title)}: every task and '
            f'question</caption>\n<thead><tr><td>{groups}<tr><th scope="col">learner'
            f"{heads}</thead>\n<tbody>\n{''.join(rows)}</tbody></table>\n"
        )
        yield f"<h2>{html.escape(title)}</h2>\n{_scrolling(table, title)}"


def _row(learner: Learner, cells: str) -> str:
    return f'<tr><th scope="row">{html.escape(learner.label)}{cells}\n'


def _cell(result: Result) -> str:
    words = result.words()
    tries = f"<small>{result.tries}</small>" if result.tries > 1 else ""
    return (
        f'<td class="{_class(result.state)}" title="{words}">'
        f'<span aria-hidden="true">{SYMBOLS[result.state]}{tries}</span>'
        f'<span class="words">{words}</span>'
    )


def _notes(learners: Sequence[Learner]) -> str:
    items = "".join(
        f"<li>{html.escape(learner.label)}: {html.escape(note)}\n"
        for learner in learners
        for note in learner.notes
    )
    return f"<h2>Notes</h2>\n<ul>\n{items}</ul>" if items else ""
