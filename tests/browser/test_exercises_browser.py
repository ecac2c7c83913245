"""Exercises in a real JupyterLab: each is opened and run, one is solved."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from course_utils import ROOT
from tests.browser.test_notebooks_browser import open_and_use

EXERCISES = sorted((ROOT / "exercises").glob("*.ipynb"))


@pytest.mark.thorough
@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_opens_and_can_be_used(open_notebook, path: Path) -> None:
    open_and_use(open_notebook, path)


def test_a_task_is_solved_and_checked(open_notebook) -> None:
    path = ROOT / "exercises" / "ex_00_start_here.ipynb"
    notebook = open_notebook(path=path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    stub = next(i for i, text in enumerate(texts) if "def who_am_i" in text)
    check = next(i for i, text in enumerate(texts) if text.startswith("check("))

    def run(index: int) -> None:
        notebook.cell(index).locator(".cm-content").first.click()
        notebook.page.keyboard.press("Control+Enter")

    answers = {
        'def who_am_i():\n    return "rank 2 of 4"': "wrong",
        "import time\n\n\ndef who_am_i():\n    time.sleep(1000)": "too slow",
        "import torch.distributed as dist\n\n\ndef who_am_i():\n"
        '    return f"rank {dist.get_rank()} of {dist.get_world_size()}"': "passed",
    }
    notebook.run_all(seconds=180)
    for answer, verdict in answers.items():
        notebook.cell(stub).locator(".cm-content").first.click()
        notebook.page.keyboard.press("Control+A")
        notebook.page.keyboard.insert_text(answer)
        run(stub)
        run(check)
        output = notebook.cell(check).locator(".jp-OutputArea-output")
        expect(output).to_contain_text(f"00.who_am_i: {verdict}", timeout=30_000)
    assert notebook.violations() == []
    assert notebook.errors == []
