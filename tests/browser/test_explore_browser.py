"""Sliders over pictures in a real JupyterLab: by keyboard, mouse and screen reader."""

import re

from playwright.sync_api import Locator, expect

RANKS = (
    "from course_utils import pictures\n"
    "from course_utils.pictures.explore import explore\n"
    "explore(pictures.torchrun_ranks, nodes=(1, 4), gpus_per_node=(1, 8), rank=(0, 31))"
)
COLLECTIVE = (
    'explore(pictures.collective_call, collective=["all_gather", "gather", "reduce"], '
    "world_size=[2, 4, 8])"
)


def slider(cell: Locator, name: str) -> Locator:
    return cell.get_by_role("slider", name=name)


def expect_picture(cell: Locator, words: str) -> None:
    """One picture is in sight, and its alternative text has these words."""
    expect(cell.get_by_role("img")).to_have_count(1)
    expect(cell.get_by_role("img")).to_have_attribute("alt", re.compile(words))


def test_by_keyboard(open_notebook) -> None:
    notebook = open_notebook(RANKS, COLLECTIVE, "pass")
    notebook.run_all()
    cell, other, page = notebook.cell(0), notebook.cell(1), notebook.page
    expect_picture(cell, "^2 nodes, 4 GPUs each")
    slider(cell, "rank").focus()
    page.keyboard.press("ArrowRight")
    expect_picture(cell, "Rank 6 is local rank 2")
    expect(cell.get_by_role("status")).to_contain_text(
        "Rank 6 is local rank 2 on node 1"
    )
    expect(slider(cell, "rank")).to_be_focused()
    for _ in range(2):  # over the number beside the slider, which is one to type in
        page.keyboard.press("Shift+Tab")
    expect(slider(cell, "GPUs per node")).to_be_focused()
    page.keyboard.press("Home")
    # One GPU on each of two nodes: there is no rank 6 any more.
    expect_picture(cell, "There is no rank 6 here")
    expect(slider(cell, "GPUs per node")).to_have_attribute("aria-valuetext", "1")

    # In a list the keys are the list's: they lead to no other cell.
    collective = other.get_by_role("combobox", name="collective")
    collective.focus()
    page.keyboard.type("gat")
    expect_picture(other, "^gather on 4 ranks")
    page.keyboard.press("ArrowDown")
    expect_picture(other, "^reduce SUM on 4 ranks")
    expect(collective).to_be_focused()
    slider(other, "world size").focus()
    page.keyboard.press("ArrowRight")
    expect_picture(other, "^reduce SUM on 8 ranks")
    # Its third stop, which a screen reader is to call by what it stands for.
    expect(slider(other, "world size")).to_have_attribute("aria-valuetext", "8")
    expect(notebook.panel.locator(".jp-Cell")).to_have_count(3)
    assert notebook.violations() == []
    assert not notebook.errors
    notebook.screenshot("explore")


def test_by_mouse_nothing_jumps(open_notebook) -> None:
    notebook = open_notebook(RANKS, *["pass"] * 12)
    notebook.run_all()
    cell, page = notebook.cell(0), notebook.page
    nodes, below = slider(cell, "nodes"), notebook.cell(1)

    def drag_to(end: float) -> None:
        nodes.scroll_into_view_if_needed()
        line = cell.locator(".slider").first.bounding_box()
        page.mouse.move(*middle(nodes))
        page.mouse.down()
        page.mouse.move(line["x"] + line["width"] * end, middle(nodes)[1], steps=5)
        page.mouse.up()

    drag_to(1)
    expect_picture(cell, "^4 nodes, 4 GPUs each")
    before = [one.bounding_box()["y"] for one in (nodes, below)]
    drag_to(0)
    expect_picture(cell, "^1 node, 4 GPUs each")
    assert [one.bounding_box()["y"] for one in (nodes, below)] == before


def middle(element: Locator) -> tuple[float, float]:
    box = element.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
