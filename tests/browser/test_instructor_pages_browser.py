"""The slides and the cohort page in a real browser: from a file, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from nbformat.v4 import new_markdown_cell, new_notebook
from thorough import thorough_after

from course_utils.notebook.cohort import main as cohort
from course_utils.notebook.lessons import lesson_of
from course_utils.notebook.slides import main as slides
from course_utils.notebook.slides import slides_of

FIRST = 5  # slides of a lesson that the arrow keys pass through
# Of the current slide: how far it reaches, in pixels of the screen, and how.
BOX = """() => {
  const slide = Reveal.getCurrentSlide(), box = slide.querySelector(".fits");
  const all = [...(box?.querySelectorAll("*") ?? []), slide.children[0]];
  const right = Math.max(...all.map((one) => one.getBoundingClientRect().right));
  return {
    number: Reveal.getSlidePastCount(), title: slide.children[0].innerText,
    bottom: box?.getBoundingClientRect().bottom ?? 0, right, zoom: +box?.style.zoom,
    scrolls: Boolean(box?.classList.contains("scrolls")), text: slide.innerText,
    below: box?.scrollHeight > box?.clientHeight,
    heading: slide.children[0].getBoundingClientRect().height,
    code: Math.min(...[...slide.querySelectorAll(".fits pre")].map((one) =>
      parseFloat(getComputedStyle(one).fontSize) * box.style.zoom)),
  };
}"""
BOXES = """() => {
  const box = %s, found = [box()];
  while (!Reveal.isLastSlide()) { Reveal.next(); found.push(box()); }
  return found;
}"""
BOXES %= BOX


@pytest.fixture
def open_file(browser):
    """A function that opens a file without a network; any request is an error."""
    contexts, errors = [], []

    def note(request):
        if not request.url.startswith(("file:", "data:", "about:", "blob:")):
            errors.append(f"request: {request.url}")

    def open_(path: Path, query: str = "", scheme: str = "light"):
        context = browser.new_context(
            viewport={"width": 1280, "height": 720}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        context.on("request", note)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda line: line.type == "error" and errors.append(line.text),
        )
        page.goto(path.as_uri() + query)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not errors


@pytest.fixture(scope="module")
def decks(tmp_path_factory):
    """The folder with the slides of two lessons: a short one, and one of pictures."""
    folder = tmp_path_factory.mktemp("slides")
    assert slides(["00", "04", "--out", str(folder)]) == 0
    return folder


def ready(page):
    page.wait_for_function("window.Reveal && Reveal.isReady()")
    return page


def go_to(page, text):
    """Move on until a slide says ``text``. (A key may be lost to another window.)"""
    page.evaluate(
        """text => {
          while (!Reveal.getCurrentSlide().innerText.includes(text)) {
            if (Reveal.isLastSlide()) throw new Error("no slide says: " + text);
            Reveal.next();
          }
        }""",
        text,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("number", ["00", "04"])
def test_every_slide_fits_and_can_be_read_from_afar(open_file, decks, number):
    page = ready(open_file(decks / f"{lesson_of(number).slug}.html"))
    assert page.evaluate("[innerWidth, innerHeight]") == [1280, 720]
    found = page.evaluate(BOXES)
    assert len(found) == page.evaluate("Reveal.getTotalSlides()") > 20
    assert [one["number"] for one in found] == list(range(len(found)))
    for one in found:
        assert one["title"].strip() and one["heading"] < 80, one
        assert one["bottom"] <= 720 and one["right"] <= 1280, one
        assert not one["scrolls"] and not one["below"], one
        assert one["code"] is None or one["code"] >= 14, one  # pixels of 720
    assert len({one["text"] for one in found}) > 0.9 * len(found)
    # Where there is room, all of it is larger than usual.
    assert sum(one["zoom"] > 1 for one in found) > len(found) / 2


@pytest.mark.thorough
def test_arrow_keys_move_on(open_file, decks):
    page = ready(open_file(decks / f"{lesson_of('00').slug}.html"))
    seen = []
    for position in range(FIRST):
        page.wait_for_function(f"Reveal.getSlidePastCount() === {position}")
        seen.append(page.evaluate(BOX)["text"])
        page.keyboard.press("ArrowRight")
    assert len(set(seen)) == FIRST
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"Reveal.getSlidePastCount() === {FIRST - 1}")
    page.keyboard.press("g")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    page.wait_for_function("Reveal.getSlidePastCount() === 2")


@pytest.mark.thorough
def test_what_is_too_high_is_made_smaller_and_in_the_end_scrolls(open_file, tmp_path):
    def table(rows):
        lines = [f"| {row} | what row {row} says |" for row in range(rows)]
        return "\n".join(["| a | b |", "|---|---|", *lines])

    cells = [
        new_markdown_cell("# T"),
        *(new_markdown_cell(f"## {rows}\n\n{table(rows)}") for rows in (3, 16, 80)),
    ]
    path = tmp_path / "notebook.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    lesson = SimpleNamespace(number="99", title="T", slug="99_t", notebook=path)
    (tmp_path / "deck.html").write_text(slides_of(lesson)[0], encoding="utf-8")
    page = ready(open_file(tmp_path / "deck.html"))
    found = []
    for position in range(1, 4):
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"Reveal.getSlidePastCount() === {position}")
        found.append(page.evaluate(BOX))
    assert found[0]["zoom"] == 1.2 and 0.5 < found[1]["zoom"] < 1
    assert [one["scrolls"] for one in found] == [False, False, True]
    assert all(one["bottom"] <= 720 for one in found)
    box = page.locator("section.present > .fits[role=region]")
    box.focus()
    page.keyboard.press("End")
    page.wait_for_function(
        "document.querySelector('.present > .fits.scrolls').scrollTop > 100"
    )


def test_the_speaker_has_notes_of_the_slide(open_file, decks):
    page = ready(open_file(decks / f"{lesson_of('00').slug}.html"))
    with page.context.expect_page() as opened:
        page.keyboard.press("s")
    notes = opened.value.locator(".speaker-controls-notes")
    page.bring_to_front()
    go_to(page, "Tick all")
    notes.get_by_text("The answer:").wait_for()
    # The room does not see them.
    own = page.locator("section.present:not(.stack) > aside.notes")
    assert own.count() == 1 and not own.is_visible()


@pytest.mark.thorough
def test_the_print_view_has_every_slide(open_file, decks):
    page = open_file(decks / f"{lesson_of('00').slug}.html", "?print-pdf")
    page.locator(".pdf-page").nth(5).wait_for()
    pages = page.locator(".pdf-page").count()
    assert pages >= page.evaluate("Reveal.getTotalSlides()")


@pytest.fixture(scope="module")
def cohort_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    for number, name in enumerate(("Anna <b>Kim<b>", "ben", "김다애", "x" * 70)):
        entry = {
            "status": "stuck",
            "passed": number % 2 == 0,
            "tries": number + 1,
            "hints": number,
            "saw_solution": False,
        }
        answer = {"answer": "a", "tries": 1, "first_try_correct": None}
        state = {
            "version": 1,
            "tasks": {f"00.{task}": entry for task in ("average", "who_am_i")},
            "questions": {
                "00.ranks": {**answer, "correct": True},
                "00.skipped": {**answer, "correct": False},
                "00.all_reduce": {**answer, "correct": None},
            },
        }
        (folder / name).mkdir()
        file = folder / name / "progress.json"
        file.write_text(json.dumps(state))
    target = folder.parent / "cohort-page.html"
    assert cohort([str(folder), "--html", str(target), "--force"]) == 0
    return target


@pytest.mark.parametrize("scheme", thorough_after(1, ["light", "dark"]))
def test_the_cohort_page_is_accessible(open_file, cohort_page, scheme):
    page = open_file(cohort_page, scheme=scheme)
    found = Axe().run(page).response
    passed = {rule["id"] for rule in found["passes"]}
    assert "color-contrast" in passed
    assert [
        f"{rule['id']}: {node['failureSummary']} {node['html']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    row = page.locator(".grid tbody tr").first
    assert "wrong: stuck, 2 tries" in page.locator(".grid").first.inner_text()
    assert row.locator("th").inner_text() == "Anna <b>Kim<b>"
    assert page.locator("main b").count() == 0


def test_slides_have_no_accessibility_errors(open_file, decks):
    page = ready(open_file(decks / f"{lesson_of('00').slug}.html"))
    # axe-core cannot see through reveal.js's layers, which are empty.
    page.add_style_tag(content=".backgrounds, .progress { display: none !important }")
    current = {"include": [["section.present:not(.stack)"]]}
    for text in ("The machine in front of you", "%%ranks", "Choose one"):
        go_to(page, text)
        found = Axe().run(page, context=current).response
        assert "color-contrast" in {rule["id"] for rule in found["passes"]}
        assert [
            f"{rule['id']}: {node['html']} {node['failureSummary']}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ] == []
