"""The page of a cohort in a real browser: from a file, without a network."""

import json

import pytest
from axe_playwright_python.sync_playwright import Axe
from thorough import thorough_after

from course_utils.notebook.cohort import main


@pytest.fixture
def page_file(tmp_path):
    """The page of four learners, with names that are hard to show."""
    (tmp_path / "class").mkdir()
    for number, name in enumerate(("Anna <b>Kim<b>", "ben", "김다애", "x" * 70)):
        entry = {
            "status": "stuck",
            "passed": number % 2 == 1,
            "tries": number + 1,
            "hints": number,
            "saw_solution": False,
        }
        tasks = {f"00.{task}": entry for task in ("average", "who_am_i")}
        state = {"version": 1, "tasks": tasks, "questions": {}}
        folder = tmp_path / "class" / name
        folder.mkdir()
        (folder / "progress.json").write_text(json.dumps(state))
    (tmp_path / "class" / "damaged.json").write_text("{")
    assert main([str(tmp_path / "class"), "--html", str(tmp_path / "page.html")]) == 0
    return tmp_path / "page.html"


@pytest.mark.parametrize("scheme", thorough_after(1, ["light", "dark"]))
def test_the_page_is_accessible_and_asks_for_nothing(browser, page_file, scheme):
    context = browser.new_context(
        viewport={"width": 1280, "height": 720}, color_scheme=scheme, offline=True
    )
    with context:
        asked = []
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.goto(page_file.as_uri())
        found = Axe().run(page).response
        assert "color-contrast" in {rule["id"] for rule in found["passes"]}
        assert [
            f"{rule['id']}: {node['failureSummary']} {node['html']}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        lesson = page.locator("table").last
        assert "stuck after 1 try" in lesson.inner_text()
        rows = lesson.get_by_role("rowheader").all_inner_texts()
        assert rows == ["Anna <b>Kim<b>", "ben", "x" * 70, "김다애", "all"]
        assert lesson.get_by_role("columnheader").count() == 5
        assert asked == [page_file.as_uri()]
