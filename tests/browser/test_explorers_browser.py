"""The explorers in a real JupyterLab: by keyboard, by mouse, for screen readers."""

from playwright.sync_api import Locator, expect

SHOW = (
    "from course_utils.explorers import RankExplorer\n"
    "explorer = RankExplorer(nodes=2, gpus_per_node=4, rank=5)\n"
    "explorer"
)


def slider(cell: Locator, name: str) -> Locator:
    return cell.get_by_role("slider", name=name)


def test_by_keyboard(open_notebook) -> None:
    notebook = open_notebook(SHOW, "pass")
    notebook.run_all()
    cell, page = notebook.cell(0), notebook.page
    status = cell.get_by_role("status")
    expect(status).to_have_text(
        "2 nodes with 4 GPUs each: world size 8. Rank 5 is local rank 1 on node 1."
    )
    slider(cell, "Rank to point out").focus()
    page.keyboard.press("ArrowRight")
    expect(status).to_contain_text("Rank 6 is local rank 2 on node 1.")
    expect(slider(cell, "Rank to point out")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(slider(cell, "GPUs on each node")).to_be_focused()
    page.keyboard.press("Home")
    # One GPU on each of two nodes: there is no rank 6 any more.
    expect(status).to_have_text(
        "2 nodes with 1 GPU each: world size 2. Rank 1 is local rank 0 on node 1."
    )
    expect(slider(cell, "Rank to point out")).to_have_value("1")
    expect(cell.get_by_text("--nproc-per-node 1 --node-rank 1")).to_be_visible()


def test_by_mouse(open_notebook) -> None:
    notebook = open_notebook(SHOW)
    notebook.run_all()
    cell, page = notebook.cell(0), notebook.page
    nodes = slider(cell, "Nodes")
    nodes.scroll_into_view_if_needed()
    box = nodes.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * (1 / 7), middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, middle, steps=5)
    page.mouse.up()
    expect(cell.get_by_role("status")).to_contain_text("8 nodes with 4 GPUs each")
    expect(cell.get_by_role("row")).to_have_count(9)


def test_accessible_and_shown_once(open_notebook) -> None:
    notebook = open_notebook(SHOW)
    notebook.run_all()
    cell = notebook.cell(0)
    expect(cell.get_by_role("table")).to_have_count(1)  # the text form hides
    assert notebook.violations() == []
    notebook.screenshot("explorer")


COLLECTIVE = (
    "from course_utils.explorers import CollectiveExplorer\n"
    'CollectiveExplorer("reduce", world_size=3, op="MAX", root=2)'
)


def test_collectives_by_keyboard(open_notebook) -> None:
    notebook = open_notebook(COLLECTIVE, "pass")
    notebook.run_all()
    cell, page = notebook.cell(0), notebook.page
    status = cell.get_by_role("status")
    expect(status).to_have_text(
        "reduce MAX on 3 ranks: rank 2 gets the largest of each element: [3, 4, 5]."
    )
    operation = cell.get_by_role("combobox", name="Operation (op)")
    operation.focus()
    page.keyboard.press("ArrowDown")
    expect(status).to_have_text(
        "reduce AVG on 3 ranks: rank 2 gets the average of each element: [2, 3, 4]."
    )
    page.keyboard.press("Shift+Tab")
    expect(slider(cell, "World size")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    # With two ranks the root is rank 1, the last there is.
    expect(status).to_contain_text("reduce AVG on 2 ranks: rank 1 gets the average")
    expect(slider(cell, "Root")).to_have_value("1")
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("all_t")  # a list of choices jumps to what is typed
    expect(status).to_have_text(
        "all_to_all on 2 ranks: rank r gets piece r of every rank."
    )
    expect(operation).to_be_disabled()
    expect(slider(cell, "Root")).to_be_disabled()
    expect(cell.get_by_text("dist.all_to_all(received, pieces)")).to_be_visible()
    expect(cell.get_by_role("table")).to_have_count(2)
    assert notebook.violations() == []
    notebook.screenshot("collective-explorer")
