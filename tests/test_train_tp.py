"""``train_tp.py``: our slices and PyTorch's train like one process, also on a mesh."""

from __future__ import annotations

import functools

import pytest
from thorough import thorough_after
from worker_runs import losses_of_one_process, ranks_for_scripts

from course_utils.measure.language import Transformer

# Whole on all ranks of tp: positions, norms, the biases of rows.
WHOLE = 32 * 64 + 5 * 2 * 64 + 2 * 64
SLICED = sum(p.numel() for p in Transformer(heads=8).parameters()) - WHOLE
SMALL = ("--batch-size", 6, "--steps", 6, "--every", 2)


@pytest.fixture(scope="module")
def on():
    with ranks_for_scripts() as run:
        yield lambda n, *words: run(n, "train_tp", *SMALL, *words)


@functools.cache
def reference(batch_size: int) -> list[float]:
    return losses_of_one_process(batch_size, steps=6, heads=8)


@pytest.mark.parametrize("words", [["--own"], []], ids=["ours", "PyTorch's"])
@pytest.mark.parametrize("n", thorough_after(1, [2, 4, 1]))
def test_the_curve_is_that_of_one_process(on, n, words):
    run = on(n, *words)
    assert run.curve() == pytest.approx(reference(6), abs=1e-5)
    assert run.curve("step") == [2, 4, 6]
    assert set(run.curve("parameters")) == {WHOLE + SLICED // n}


@pytest.mark.parametrize("n, dp", thorough_after(1, [(8, 4), (4, 2), (8, 2), (4, 4)]))
def test_with_fsdp_the_curve_is_that_of_one_process(on, n, dp):
    run = on(n, "--dp", dp, "--batch-size", 8)
    assert run.curve() == pytest.approx(reference(8), abs=1e-5)
    assert set(run.curve("parameters")) == {(WHOLE + SLICED // (n // dp)) // dp}


def test_our_slices_on_a_mesh_train_like_one_process(on):
    run = on(4, "--own", "--dp", 2)
    assert run.curve() == pytest.approx(reference(6), abs=1e-5)


def test_a_run_goes_on_with_another_mesh(on, tmp_path):
    keep = ("--batch-size", 8, "--checkpoint", tmp_path / "run")
    first = on(4, "--dp", 2, *keep, "--steps", 2).curve()
    then = on(4, "--dp", 4, *keep, "--steps", 4, "--resume").curve()
    last = on(2, *keep, "--steps", 6, "--resume").curve()
    assert first + then + last == pytest.approx(reference(8), abs=1e-5)
    assert "add --resume" in on(2, *keep).mistake
    assert on(1, *keep, "--steps", 6, "--resume").metrics == []
    changed = on(1, *keep, "--width", 32, "--resume").mistake
    assert "but this run is {'width': 32" in changed


@pytest.mark.parametrize("words", thorough_after(1, [["--own"], []]))
def test_bf16_rounds_and_still_learns_the_same(on, words):
    curve = on(2, "--bf16", *words).curve()
    assert curve == pytest.approx(reference(6), abs=0.02)
    assert curve != pytest.approx(reference(6), abs=1e-5)
