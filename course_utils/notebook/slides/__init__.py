"""``python3 -m course_utils slides``: each lesson as slides, one HTML file a lesson.

nbconvert's exporter for reveal.js makes them. A file holds everything it needs and
loads nothing from a network: reveal.js, the pictures and the notes for the speaker
(key S; the other keys: ?). For a PDF, open it with ``?print-pdf`` and print it.

* ``outline.py`` says which cells become which slide,
* ``page.html.j2``, ``slides.css`` and ``slides.js`` are the page,
* ``reveal/`` is a copy of reveal.js 6.0.2 (https://revealjs.com, MIT licence).
"""

import argparse
from copy import deepcopy
from pathlib import Path

from course_utils.notebook.lessons import LESSONS, Lesson, lesson_of
from course_utils.notebook.written import exit_status, may_write, write

HERE = Path(__file__).parent
MARK = "<!-- Slides of the course: python3 -m course_utils slides -->"


def main(argv: list[str] | None = None) -> int:
    """``python3 -m course_utils slides``. Returns the exit status."""
    from course_utils import STATE

    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils slides",
        description="Make slides of lessons: one HTML file each, which needs no "
        "network. In the browser: arrow keys or space to move, S for the speaker's "
        "notes, ? for the other keys.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "lessons", metavar="LESSON", nargs="*", help='such as "06"; default: all'
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=_folder,
        default=STATE / "slides",
        help="where to write them (default: .course/slides)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace files that are no such slides"
    )
    options = parser.parse_args(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    lessons = [_lesson_named(name) for name in options.lessons]
    lessons = lessons or [lesson for lesson in LESSONS if lesson.exists]
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"{options.out} is no folder.")
    options.out.mkdir(parents=True, exist_ok=True)
    targets = [options.out / f"{lesson.slug}.html" for lesson in lessons]
    for target in targets:
        may_write(target, (MARK,), options.force)
    for lesson, target in zip(lessons, targets, strict=True):
        text, count = slides_of(lesson)
        write(target, text)
        print(f"{target}: {count} slides", flush=True)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is no name for a folder")
    return Path(text)


def _lesson_named(given: str) -> Lesson:
    name = Path(given).name.removesuffix(".ipynb")
    lesson = lesson_of(name.partition("_")[0])
    if name not in (lesson.number, lesson.slug):
        raise ValueError(
            f"{given!r} is no lesson. Slides of the whole lesson: {lesson.number}"
        )
    if not lesson.exists:
        raise ValueError(f"Lesson {lesson.number} has no notebook yet.")
    return lesson


def slides_of(lesson: Lesson) -> tuple[str, int]:
    """The slides of a lesson as one HTML page, and how many they are. About 1 s.

    Raises:
        OSError, ValueError: the notebook cannot be read.
    """
    from nbconvert import SlidesExporter

    from course_utils.notebook.exercises import read_notebook
    from course_utils.notebook.slides.outline import outline

    notebook = read_notebook(lesson.notebook)
    slides = outline(notebook.cells, lesson)
    notebook.cells = [cell for slide in slides for cell in _cells(slide)]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # one cell may be on two slides
    exporter = SlidesExporter(
        extra_template_basedirs=[str(HERE)],
        template_file="page.html.j2",
        extra_template_paths=[str(HERE)],
    )
    texts = {
        name: (HERE / name).read_text(encoding="utf-8")
        for name in (
            *("reveal/reveal.css", "slides.css"),
            *("reveal/reveal.js", "reveal/notes.js", "slides.js"),
        )
    }
    course = {
        "mark": MARK,
        "title": f"{lesson.number} {lesson.title}",
        "styles": [text for name, text in texts.items() if name.endswith(".css")],
        "scripts": [text for name, text in texts.items() if name.endswith(".js")],
    }
    page, _ = exporter.from_notebook_node(notebook, resources={"course": course})
    return page, len(slides)


def _cells(slide) -> list:
    """The cells of one slide, with what nbconvert's exporter wants to be told."""
    from nbformat.v4 import new_markdown_cell

    level = "#" if slide.first else "##"
    kind = "slide" if slide.begins else "subslide"
    cells = [_as(new_markdown_cell(f"{level} {slide.title}"), kind)]
    for part in slide.parts:
        cell = deepcopy(part.cell) if part.cell else new_markdown_cell(part.text)
        cell.metadata["hide_code"] = part.hide_code
        cell.metadata["hide_outputs"] = part.hide_outputs
        cells.append(_as(cell, "-"))
    if slide.notes:
        cells.append(_as(new_markdown_cell("\n\n".join(slide.notes)), "notes"))
    return cells


def _as(cell, kind: str):
    cell.metadata["slideshow"] = {"slide_type": kind}
    return cell
