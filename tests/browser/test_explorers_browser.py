"""The explorers in a real JupyterLab: by keyboard, by mouse, for screen readers."""

import pytest
from playwright.sync_api import Locator, Page, expect

SHOW = (
    "from course_utils.pictures.explorers import RankExplorer\n"
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


@pytest.mark.thorough
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
    "from course_utils.pictures.explorers import CollectiveExplorer\n"
    'CollectiveExplorer("reduce", world_size=3, op="MAX", root=2)'
)


@pytest.mark.thorough
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


RING = (
    "from course_utils.pictures.explorers import RingStepper, WhatIfExplorer\n"
    "RingStepper([  # what two ranks have noted\n"
    "    [([1.0, 5.0], 0, 1, 1), ([1.0, 11.0], 1, 2, 1), ([3.0, 11.0],)],\n"
    "    [([2.0, 6.0], 1, 2, 0), ([3.0, 6.0], 0, 1, 0), ([3.0, 11.0],)],\n"
    "])"
)
WHAT_IF = 'WhatIfExplorer("H100, InfiniBand", "GPT-2 XL", nodes=8, straggler=1.2)'


@pytest.mark.thorough
def test_a_ring_and_a_cluster_by_keyboard(open_notebook) -> None:
    notebook = open_notebook(RING, WHAT_IF, "pass")
    notebook.run_all()
    page = notebook.page
    check_ring(page, notebook.cell(0))
    check_what_if(page, notebook.cell(1))
    assert notebook.violations() == []
    notebook.screenshot("ring-and-what-if")


def check_ring(page: Page, cell: Locator) -> None:
    status, step = cell.get_by_role("status"), slider(cell, "Step")
    expect(status).to_contain_text("Step 0 (of 0 to 1), reduce-scatter: rank 0 sends")
    expect(cell.get_by_role("cell", name="[1] rank 0 ↑ sends")).to_be_visible()
    step.focus()
    page.keyboard.press("ArrowRight")
    expect(status).to_contain_text("Step 1 (of 0 to 1), all-gather")
    expect(cell.get_by_role("cell", name="[3] ✓ all ranks ↓ added")).to_be_visible()
    expect(step).to_be_focused()
    page.keyboard.press("Home")
    expect(status).to_contain_text("Step 0")

    page.keyboard.press("Tab")
    play = cell.get_by_role("button", name="Play")
    expect(play).to_be_focused()
    page.keyboard.press("Space")  # plays to the end, and stops there
    expect(cell.get_by_role("button", name="Pause")).to_be_focused()
    expect(status).to_contain_text("Step 1")
    expect(status).to_have_text("End, after 2 steps. Complete: 4 of 4 chunks.")
    again = cell.get_by_role("button", name="From the start")
    expect(again).to_be_focused()
    page.keyboard.press("Space")
    page.keyboard.press("Space")  # pauses at once
    expect(play).to_be_focused()
    expect(step).to_have_value("0")

    # Who has asked for less motion moves on by one step at a time.
    page.emulate_media(reduced_motion="reduce")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    next_step = cell.get_by_role("button", name="Next step")
    expect(next_step).to_be_focused()
    page.keyboard.press("Space")
    expect(status).to_contain_text("Step 1")
    expect(next_step).to_be_focused()


def check_what_if(page: Page, cell: Locator) -> None:
    status, nodes = cell.get_by_role("status"), slider(cell, "Nodes")
    expect(status).to_contain_text("Simulated, GPT-2 XL on 64 GPUs (8 nodes; H100")
    expect(nodes).to_have_attribute("aria-valuetext", "8")
    nodes.focus()
    page.keyboard.press("ArrowRight")
    expect(status).to_contain_text("GPT-2 XL on 128 GPUs (16 nodes")
    expect(nodes).to_have_attribute("aria-valuetext", "16")
    page.keyboard.press("End")
    expect(status).to_contain_text("GPT-2 XL on 10,000 GPUs (1,250 nodes")
    overlap = cell.get_by_role("checkbox", name="Overlap")
    expect(overlap).to_be_checked()
    before = status.text_content()
    overlap.focus()
    page.keyboard.press("Space")
    expect(overlap).not_to_be_checked()
    expect(status).not_to_have_text(before)
    algorithm = cell.get_by_role("combobox", name="All-reduce")
    algorithm.focus()
    page.keyboard.type("halv")
    expect(status).to_contain_text("not simulated. Halving-doubling needs a power of")
    expect(cell.get_by_role("table")).to_have_count(0)
    algorithm.select_option("hierarchical")
    expect(status).to_contain_text("Simulated, GPT-2 XL on 10,000 GPUs")
    cell.get_by_role("combobox", name="Model").focus()
    page.keyboard.type("Res")
    expect(slider(cell, "Images for each GPU")).to_have_attribute(
        "aria-valuetext", "4096"
    )
    row = cell.get_by_role("row", name="waiting for the slowest GPU")
    expect(row).to_contain_text("%")


MEMORY = (
    "from course_utils.pictures.explorers import MemoryExplorer\n"
    'MemoryExplorer("7.5 billion", gpus=64, stage=0, recompute="full")'
)


@pytest.mark.thorough
def test_memory_by_keyboard(open_notebook) -> None:
    notebook = open_notebook(MEMORY, "pass")
    notebook.run_all()
    cell, page = notebook.cell(0), notebook.page
    status, stage = cell.get_by_role("status"), slider(cell, "ZeRO stage")
    expect(status).to_contain_text("7.5 billion on 64 GPUs, ZeRO stage 0: ")
    expect(status).to_contain_text("It fits on H200.")
    stage.focus()
    page.keyboard.press("End")
    expect(status).to_contain_text("ZeRO stage 3: ")
    expect(status).to_contain_text("It fits on T4, RTX 4090, A100 40GB, H100")
    expect(stage).to_be_focused()
    expect(cell.get_by_role("row", name="▶ stage 3")).to_be_visible()
    page.keyboard.press("Shift+Tab")
    gpus = slider(cell, "GPUs")
    expect(gpus).to_be_focused()
    expect(gpus).to_have_attribute("aria-valuetext", "64")
    page.keyboard.press("Home")  # one GPU has nobody to share with
    expect(gpus).to_have_attribute("aria-valuetext", "1")
    expect(status).to_contain_text("on 1 GPU, ZeRO stage 3: ")
    expect(status).to_contain_text("It fits on H200.")
    cell.get_by_role("combobox", name="Model").focus()
    page.keyboard.type("GPT-2 s")
    expect(status).to_contain_text("GPT-2 small on 1 GPU")
    expect(cell.get_by_role("row", name="T4")).to_contain_text("GB left")
    expect(cell.get_by_role("table")).to_have_count(3)

    # What is drawn is as long as what is said: frames in the ratio of the cards.
    widths = widths_of(cell.locator(".course-explorer .course-explorer-card b"))
    assert widths == sorted(widths) and len(widths) == 6
    assert abs(widths[0] / widths[-1] - 15_360 / 143_771) < 0.01
    cell.get_by_role("combobox", name="Model").select_option("7.5 billion")
    expect(status).to_contain_text("7.5 billion on 1 GPU")
    t4 = cell.get_by_role("row", name="T4")
    expect(t4).to_contain_text("GB too much")
    (filled,) = widths_of(t4.locator(".course-explorer-card > div"))
    assert filled > 5 * widths[0]  # far more than the card has
    assert notebook.violations() == []
    notebook.screenshot("memory-explorer")


def widths_of(elements: Locator) -> list[float]:
    """All at one moment: what is shown may be written anew between two questions."""
    return elements.evaluate_all(
        "found => found.map((one) => one.getBoundingClientRect().width)"
    )
