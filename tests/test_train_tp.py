"""``train_tp.py``: our slices and PyTorch's train like one process, also on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from thorough import thorough_after
from worker_runs import one_thread, ranks_for_scripts

from course_utils.measure.language import Language, Transformer, next_symbol_loss

# Whole on all ranks of tp: positions, norms, the biases of rows.
WHOLE = 32 * 64 + 5 * 2 * 64 + 2 * 64
SLICED = sum(p.numel() for p in Transformer(heads=8).parameters()) - WHOLE
SMALL = ("--batch-size", 6, "--steps", 6, "--every", 2)


@pytest.fixture(scope="module")
def on():
    with ranks_for_scripts() as run:
        yield lambda n, *words: run(n, "train_tp", *SMALL, *words)


@pytest.fixture(scope="module")
def reference() -> Callable[[int], list[float]]:
    """A function: the losses of one process, from the batch size."""
    return functools.cache(losses_of_one_process)


def losses_of_one_process(batch_size: int) -> list[float]:
    with one_thread():
        language, losses = Language(), []
        torch.manual_seed(0)
        model = Transformer(heads=8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
        for step in range(1, 7):
            batch = language.sample(batch_size, 33, torch.Generator().manual_seed(step))
            loss = next_symbol_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [sum(losses[i : i + 2]) / 2 for i in range(0, 6, 2)]


@pytest.mark.parametrize("words", [["--own"], []], ids=["ours", "PyTorch's"])
@pytest.mark.parametrize("n", thorough_after(1, [2, 4, 1]))
def test_the_curve_is_that_of_one_process(on, reference, n, words):
    run = on(n, *words)
    assert run.curve() == pytest.approx(reference(6), abs=1e-5)
    assert run.curve("step") == [2, 4, 6]
    assert set(run.curve("parameters")) == {WHOLE + SLICED // n}


@pytest.mark.parametrize("n, dp", thorough_after(1, [(8, 4), (4, 2), (8, 2), (4, 4)]))
def test_with_fsdp_the_curve_is_that_of_one_process(on, reference, n, dp):
    run = on(n, "--dp", dp, "--batch-size", 8)
    assert run.curve() == pytest.approx(reference(8), abs=1e-5)
    assert set(run.curve("parameters")) == {(WHOLE + SLICED // (n // dp)) // dp}


def test_our_slices_on_a_mesh_train_like_one_process(on, reference):
    run = on(4, "--own", "--dp", 2)
    assert run.curve() == pytest.approx(reference(6), abs=1e-5)


def test_a_run_goes_on_with_another_mesh(on, reference, tmp_path):
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
def test_bf16_rounds_and_still_learns_the_same(on, reference, words):
    curve = on(2, "--bf16", *words).curve()
    assert curve == pytest.approx(reference(6), abs=0.02)
    assert curve != pytest.approx(reference(6), abs=1e-5)
