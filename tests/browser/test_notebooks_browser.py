"""Every notebook of the course in a real JupyterLab: run it, look at it, use it."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from course_utils.environment import ROOT
from tests.browser.conftest import Notebook

NOTEBOOKS = [
    path
    for folder in ("notebooks", "exercises")
    for path in sorted((ROOT / folder).glob("*.ipynb"))
]


FEEDBACK = re.compile(r"^(Right|Not quite|Noted)\.")


@pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_runs_and_can_be_used(open_notebook, path: Path) -> None:
    notebook = open_notebook(path=path)
    notebook.run_all(seconds=180)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    if path.parent.name == "notebooks":
        quizzes = notebook.panel.locator(".course-quiz")
        answer_by_keyboard(notebook, quizzes.first)
        options = notebook.page.locator("[type=radio], [type=checkbox]")
        answer_by_mouse(quizzes.filter(has=options).last)
    for slider in notebook.panel.get_by_role("slider").all()[:1]:
        drag(notebook, slider)
    press_check(notebook, cells)
    notebook.screenshot(f"{path.parent.name}-{path.stem}")

    expect(notebook.panel.locator("[data-mime-type$='stderr']")).to_have_count(0)
    expect(
        notebook.panel.locator(".jp-RenderedHTMLCommon img:not([alt])")
    ).to_have_count(0)
    assert notebook.panel.locator(".jp-Cell").count() == len(cells)
    assert notebook.violations() == []
    assert notebook.errors == []


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
    box, mouse = slider.bounding_box(), notebook.page.mouse
    middle = box["y"] + box["height"] / 2
    mouse.move(box["x"] + box["width"] / 2, middle)
    mouse.down()
    mouse.move(box["x"] + box["width"] - 1, middle, steps=5)
    mouse.up()
    expect(slider).to_have_value(slider.get_attribute("max"))


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


def test_a_task_is_solved_and_checked(open_notebook) -> None:
    notebook = open_notebook(path=ROOT / "exercises" / "00_start_here.ipynb")
    texts = [
        "".join(cell["source"])
        for cell in json.loads((ROOT / "exercises/00_start_here.ipynb").read_text())[
            "cells"
        ]
    ]
    stub = next(i for i, text in enumerate(texts) if "def who_am_i" in text)
    check = next(i for i, text in enumerate(texts) if text.startswith("check("))

    def run(index: int, source: str | None = None) -> None:
        cell = notebook.cell(index)
        editor = cell.locator(".cm-content").first
        editor.click()
        if source is not None:
            notebook.page.keyboard.press("Control+A")
            notebook.page.keyboard.insert_text(source)
        notebook.page.keyboard.press("Control+Enter")

    answers = {
        'def who_am_i():\n    return "rank 2 of 4"': "wrong",
        "def who_am_i():\n    while True: pass": "too slow",
        "import torch.distributed as dist\n\n\ndef who_am_i():\n"
        '    return f"rank {dist.get_rank()} of {dist.get_world_size()}"': "passed",
    }
    notebook.run_all(seconds=180)
    for answer, verdict in answers.items():
        run(stub, answer)
        run(check)
        output = notebook.cell(check).locator(".jp-OutputArea-output")
        expect(output).to_contain_text(f"00.who_am_i: {verdict}", timeout=30_000)
    assert notebook.violations() == []
    assert notebook.errors == []
