"""Every lesson in a real JupyterLab: open it, run all of it, use it."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect
from thorough import thorough_after

from course_utils import ROOT
from tests.browser.conftest import READY, Notebook

TOO_SLOW = "[anywidget] Failed to initialize model."
FEEDBACK = re.compile(r"(^|\. )(Right|Not quite|Noted)\.")
ACTIVE = re.compile("jp-mod-active")
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.thorough
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_opens_and_can_be_used(open_notebook, path: Path) -> None:
    open_and_use(open_notebook, path)


def open_and_use(open_notebook, path: Path) -> None:
    """Run all of a lesson or of its exercises, then use one of each thing by mouse."""
    notebook = open_notebook(path=path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    notebook.run_all(seconds=180)
    if path.parent.name == "notebooks":
        quizzes = notebook.panel.locator(".course-quiz")
        answer_by_keyboard(notebook, quizzes.first)
        options = notebook.page.locator("[type=radio], [type=checkbox]")
        answer_by_mouse(quizzes.filter(has=options).last)
    for slider in notebook.panel.get_by_role("slider").all()[:1]:
        drag(notebook, slider)
    if any("".join(cell["source"]).startswith("check(") for cell in cells):
        press_check(notebook, cells)
    nothing_is_wrong(notebook, path)


def nothing_is_wrong(notebook: Notebook, path: Path) -> None:
    """On the page, after all of a notebook has run."""
    notebook.screenshot(f"{path.parent.name}-{path.stem}")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    expect(notebook.panel.locator("[data-mime-type$='stderr']")).to_have_count(0)
    expect(
        notebook.panel.locator(".jp-RenderedHTMLCommon img:not([alt])")
    ).to_have_count(0)
    assert notebook.panel.locator(".jp-Cell").count() == len(cells)
    assert notebook.violations() == []
    # Said of a model that was not ready after 2 s, on a machine that had much else to
    # do. The widgets of this page have just been used.
    assert [e for e in notebook.errors if TOO_SLOW not in e] == []


@pytest.mark.parametrize("path", thorough_after(1, LESSONS), ids=lambda path: path.stem)
def test_a_whole_lesson_by_keyboard(open_notebook, path: Path) -> None:
    """From top to bottom with Shift + Enter, every question answered on the way.

    Nothing on the page may be wrong at the end.
    """
    notebook = open_notebook(path=path)
    notebook.evaluate(READY)
    keyboard, cells = notebook.page.keyboard, notebook.panel.locator(".jp-Cell")
    last = cells.count() - 1
    keyboard.press("Escape")
    for index in range(last):
        expect(cells.nth(index)).to_have_class(ACTIVE)
        keyboard.press("Shift+Enter")
        expect(cells.nth(index + 1)).to_have_class(ACTIVE)
        quiz = cells.nth(index).locator(".course-quiz")
        source = cells.nth(index).locator(".cm-content").inner_text()
        if not re.search(r"\bquiz\(\"", source):
            continue
        quiz.wait_for(timeout=120_000)  # the cells before it may still run
        answer_from_the_next_cell(notebook, quiz)
        keyboard.press("Escape" if index % 2 else "Shift+Enter")
        if index % 2:
            expect(cells.nth(index)).to_have_class(ACTIVE)
            keyboard.press("j")
        expect(quiz.get_by_role("status")).to_contain_text(FEEDBACK)
    expect(cells.nth(last)).to_have_class(ACTIVE)
    expect(notebook.panel.locator(".course-quiz")).to_have_count(
        notebook.panel.get_by_role("status").filter(has_text=FEEDBACK).count()
    )
    expect(notebook.panel.get_by_text("You have not predicted this.")).to_have_count(0)
    nothing_is_wrong(notebook, path)


def answer_from_the_next_cell(notebook: Notebook, quiz: Locator) -> None:
    """Shift + Tab until an input has the focus; then the keys that lesson 00 names."""
    keyboard = notebook.page.keyboard
    for _ in range(3):
        keyboard.press("Shift+Tab")
        if quiz.locator("input:focus").count():
            break
    kind = quiz.locator("input:focus").get_attribute("type")
    keyboard.press({"text": "7", "radio": "ArrowDown", "checkbox": "Space"}[kind])
    keyboard.press("Enter")
    expect(quiz.get_by_role("status")).to_contain_text(FEEDBACK, timeout=120_000)


def answer_by_keyboard(notebook: Notebook, quiz: Locator) -> None:
    field = quiz.locator("input").first
    field.focus()
    notebook.page.keyboard.press(
        "7" if field.get_attribute("type") == "text" else "Space"
    )
    notebook.page.keyboard.press("Enter")
    expect(quiz.get_by_role("status")).to_contain_text(FEEDBACK)
    expect(field).to_be_focused()


def answer_by_mouse(quiz: Locator) -> None:
    quiz.locator("label").last.click()
    quiz.get_by_role("button").click()
    expect(quiz.get_by_role("status")).to_contain_text(FEEDBACK)


def drag(notebook: Notebook, slider: Locator) -> None:
    """From wherever its handle is to the right end."""
    slider.scroll_into_view_if_needed()
    handle, mouse = slider.bounding_box(), notebook.page.mouse
    line = notebook.panel.locator(".slider").first.bounding_box()
    middle = handle["y"] + handle["height"] / 2
    mouse.move(handle["x"] + handle["width"] / 2, middle)
    mouse.down()
    mouse.move(line["x"] + line["width"], middle, steps=5)
    mouse.up()
    expect(slider).to_have_attribute(
        "aria-valuenow", slider.get_attribute("aria-valuemax")
    )


def press_check(notebook: Notebook, cells: list[dict]) -> None:
    """Run the first check again: its cell gets a new number, and the same verdict."""
    sources = ["".join(cell["source"]) for cell in cells]
    index = next(i for i, text in enumerate(sources) if text.startswith("check("))
    cell = notebook.cell(index)
    prompt = cell.locator(".jp-InputPrompt")
    before = prompt.inner_text()
    cell.locator(".cm-content").first.click()
    notebook.page.keyboard.press("Control+Enter")
    expect(prompt).not_to_have_text(re.compile(rf"{re.escape(before)}|\[\*\]:"))
    expect(cell.locator(".jp-OutputArea-output")).to_contain_text("not attempted")
