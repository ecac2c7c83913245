"""Every notebook of the course in a real JupyterLab: run it, look at it, use it."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from course_utils.environment import ROOT

NOTEBOOKS = [
    path
    for folder in ("notebooks", "exercises")
    for path in sorted((ROOT / folder).glob("*.ipynb"))
]


@pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_runs_from_top_to_bottom(open_notebook, path: Path) -> None:
    notebook = open_notebook(path=path)
    notebook.run_all(seconds=180)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    notebook.screenshot(f"{path.parent.name}-{path.stem}")

    expect(notebook.panel.locator("[data-mime-type$='stderr']")).to_have_count(0)
    expect(
        notebook.panel.locator(".jp-RenderedHTMLCommon img:not([alt])")
    ).to_have_count(0)
    assert notebook.panel.locator(".jp-Cell").count() == len(cells)
    assert notebook.violations() == []
    assert notebook.errors == []


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
