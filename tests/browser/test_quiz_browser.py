"""The quizzes in a real JupyterLab: by keyboard, by mouse, after reload and restart."""

import re

import pytest
from playwright.sync_api import Locator, expect
from thorough import thorough_after

RANKS = 'from course_utils import quiz\nquiz("00.ranks")'
VARIABLES = 'from course_utils import quiz\nquiz("00.variables")'
NUMBER = 'from course_utils import quiz\nguess = quiz("00.all_reduce")'
RIGHT = "The number of a process"
WRONG = "A thread inside"
FORM = ".course-quiz"
ACTIVE = re.compile("jp-mod-active")


def status(cell: Locator) -> Locator:
    """The live region that a screen reader reads out."""
    return cell.get_by_role("status")


def button(cell: Locator) -> Locator:
    """The quiz's button; the cell's own toolbar has others."""
    return cell.get_by_role("button", name=re.compile("^(Check|Note it)$"))


def check(cell: Locator) -> None:
    button(cell).click()


def test_by_keyboard_only(open_notebook) -> None:
    notebook = open_notebook(RANKS, NUMBER)
    notebook.run_all()
    cell, page = notebook.cell(0), notebook.page
    options = cell.get_by_role("radio")
    expect(options).to_have_count(4)

    # From the notebook in command mode: Tab leads into the quiz of the active cell.
    notebook.command("notebook:move-cursor-up")
    for _ in range(5):
        page.keyboard.press("Tab")
        if options.nth(0).evaluate("input => input === document.activeElement"):
            break
    expect(options.nth(0)).to_be_focused()

    page.keyboard.press("ArrowDown")
    expect(options.nth(1)).to_be_checked()
    expect(options.nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(status(cell)).to_contain_text("Not quite. Threads share one process")
    expect(options.nth(1)).to_be_focused()

    page.keyboard.press("ArrowDown")
    expect(status(cell)).to_be_empty()  # it was about the other option
    page.keyboard.press("Tab")
    expect(button(cell)).to_be_focused()
    page.keyboard.press("Space")
    expect(status(cell)).to_contain_text("Right. Every process runs the same code.")
    expect(button(cell)).to_be_focused()
    expect(cell).to_contain_text("Lesson 00: 1 of 1 answers right, 0 at the first try.")

    # Keys that would delete, add and select cells, had JupyterLab got them.
    for key in ("d", "d", "a", "b", "x", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    number = notebook.cell(1).get_by_label("Your prediction")
    number.focus()
    page.keyboard.type("ddabx6")
    expect(number).to_have_value("ddabx6")
    page.keyboard.press("Enter")
    expect(status(notebook.cell(1))).to_have_text(
        '"ddabx6" is not a number. Type digits: 1.5, 2/3 or 1e9.'
    )
    page.keyboard.press("Control+a")
    page.keyboard.type("6")
    page.keyboard.press("Enter")
    expect(status(notebook.cell(1))).to_contain_text("Your prediction: 6. Noted.")
    expect(button(notebook.cell(1))).to_have_text("Note it")

    expect(notebook.panel.locator(".jp-Cell")).to_have_count(2)
    assert not notebook.errors


def test_the_keys_of_the_notebook_lead_out_of_a_form(open_notebook) -> None:
    inside = {  # the role of an element, and a question whose form has it
        "radio": 'quiz("00.ranks")',
        "textbox": 'quiz("00.all_reduce")',
        "checkbox": 'quiz("00.variables")',
        "button": 'quiz("00.skipped")',
    }
    imports = "from course_utils import quiz"
    notebook = open_notebook(imports, *inside.values(), "x = 1", "x = 2")
    notebook.run_all()
    keyboard = notebook.page.keyboard
    for here, role in enumerate(inside, 1):
        cell = notebook.cell(here)
        element = cell.locator(FORM).get_by_role(role).last
        for key, active, runs in (
            ("Escape", here, False),
            ("Shift+Enter", here + 1, True),
            ("Control+Enter", here, True),
        ):
            prompt = cell.locator(".jp-InputPrompt")
            before = prompt.inner_text()
            element.focus()
            keyboard.press("ArrowDown")  # the form's own: it leads to no other cell
            keyboard.press(key)
            expect(notebook.cell(active)).to_have_class(ACTIVE)
            if runs:
                running = rf"{re.escape(before)}|\[\*\]:"
                expect(prompt).not_to_have_text(re.compile(running))
            keyboard.press("j")
            expect(notebook.cell(active + 1)).to_have_class(ACTIVE)
            keyboard.press("ArrowUp")
            expect(notebook.cell(active)).to_have_class(ACTIVE)
    expect(notebook.panel.locator(".jp-Cell")).to_have_count(7)
    assert not notebook.errors


def test_by_mouse_with_a_retry(open_notebook) -> None:
    notebook = open_notebook(VARIABLES)
    notebook.run_all()
    cell = notebook.cell(0)
    check(cell)
    expect(status(cell)).to_have_text("Tick at least one box first.")

    cell.get_by_text("There are four variables").last.click()  # a label is clickable
    cell.get_by_text("An ordinary cell").last.click()
    check(cell)
    expect(status(cell)).to_contain_text("You judged 2 of the 4 options correctly.")
    boxes = cell.get_by_role("checkbox")
    expect(boxes.nth(1)).to_have_accessible_description("")  # not which ones, yet
    check(cell)
    for number, words in enumerate(
        (
            "Right, it applies: Each rank has its own memory",
            "Ticked, but it does not apply: Ordinary cells run in the",
            "Right, it does not apply: Processes do not share variables",
            "Not ticked, but it applies: The ranks stay alive",
        )
    ):
        expect(boxes.nth(number)).to_have_accessible_description(re.compile(words))

    cell.get_by_text("An ordinary cell").last.click()
    cell.get_by_text("The next %%ranks cell").last.click()
    expect(boxes.nth(0)).to_have_accessible_description("")
    check(cell)
    expect(status(cell)).to_contain_text("Right. You judged all 4")
    assert not notebook.errors


def test_answers_outlive_a_reload_and_a_restart(open_notebook) -> None:
    notebook = open_notebook(RANKS, NUMBER, "print('predicted', guess.value)")
    notebook.run_all()
    expect(notebook.cell(2)).to_contain_text("predicted None")
    notebook.cell(0).get_by_label(WRONG).check()
    check(notebook.cell(0))
    expect(status(notebook.cell(0))).to_contain_text("Not quite.")
    notebook.cell(1).get_by_label("Your prediction").fill("10")
    check(notebook.cell(1))
    expect(status(notebook.cell(1))).to_contain_text("Your prediction: 10. Noted.")

    def assert_restored() -> None:
        expect(notebook.cell(0).get_by_label(WRONG)).to_be_checked()
        expect(status(notebook.cell(0))).to_contain_text("Not quite. Threads share")
        expect(notebook.cell(1).get_by_label("Your prediction")).to_have_value("10")
        expect(status(notebook.cell(1))).to_contain_text("Your prediction: 10. Noted.")

    notebook.save_and_reload()
    assert_restored()

    notebook.restart_kernel()
    notebook.cell(0).get_by_label(RIGHT).check()
    check(notebook.cell(0))  # the form of the old kernel says what to do
    expect(status(notebook.cell(0))).to_contain_text("Run this cell again")
    notebook.run_all()
    assert_restored()
    expect(notebook.cell(2)).to_contain_text("predicted 10.0")
    assert not notebook.errors


@pytest.mark.thorough
def test_a_form_whose_kernel_is_gone_leaves_the_question(open_notebook) -> None:
    notebook = open_notebook(RANKS)
    notebook.run_all()
    expect(notebook.cell(0).get_by_role("radio")).to_have_count(4)
    expect(notebook.cell(0).get_by_text("To answer")).to_be_hidden()

    notebook.restart_kernel()
    notebook.save_and_reload()
    output = notebook.cell(0).locator(".jp-OutputArea")
    expect(output.get_by_text("To answer")).to_be_visible()
    expect(output.get_by_text(RIGHT)).to_be_visible()
    # JupyterLab has put its complaint there, and it is hidden.
    expect(output.get_by_text("Error displaying widget")).to_have_count(1)
    expect(output.get_by_text("Error displaying widget")).to_be_hidden()
    assert notebook.violations() == []

    notebook.run_all()
    expect(notebook.cell(0).get_by_role("radio")).to_have_count(4)
    expect(output.get_by_text("To answer")).to_be_hidden()


@pytest.mark.thorough
def test_an_answer_waits_for_a_busy_kernel(open_notebook) -> None:
    notebook = open_notebook(RANKS, "import time; time.sleep(5)")
    notebook.run_all(wait=False)
    notebook.cell(0).get_by_label(RIGHT).check()
    check(notebook.cell(0))
    expect(status(notebook.cell(0))).to_contain_text("Python has not replied yet.")
    expect(status(notebook.cell(0))).to_contain_text("Right.", timeout=15_000)
    assert not notebook.errors


@pytest.mark.parametrize(
    "theme", thorough_after(1, ["JupyterLab Light", "JupyterLab Dark"])
)
def test_readable_in_light_and_dark(open_notebook, theme: str) -> None:
    notebook = open_notebook(
        RANKS, 'quiz("00.variables")', 'quiz("00.all_reduce")', 'quiz("00.skipped")'
    )
    notebook.command("apputils:change-theme", theme=theme)
    notebook.run_all()
    expect(notebook.cell(3).get_by_role("radio")).to_have_count(4)
    assert notebook.violations() == []  # all four unanswered

    notebook.cell(0).get_by_label(RIGHT).check()
    notebook.cell(1).get_by_label("There are four").check()
    notebook.cell(2).get_by_label("Your prediction").fill("10")
    for index, word in enumerate(("Right.", "You judged", "Noted.", "Choose an")):
        check(notebook.cell(index))
        expect(status(notebook.cell(index))).to_contain_text(word)
    check(notebook.cell(1))
    assert notebook.violations() == []  # right, partly right, noted, nothing chosen
    # Native inputs of normal size: some quizzes hide them in one pixel.
    for kind in ("radio", "checkbox"):
        box = notebook.panel.get_by_role(kind).first.bounding_box()
        assert box["width"] >= 13
        assert box["height"] >= 13
    notebook.screenshot("quiz-" + theme.rpartition(" ")[2].lower())
    assert not notebook.errors
