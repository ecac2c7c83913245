"""``train_tp.py``: our slices and PyTorch's train like one process."""

from __future__ import annotations

import pytest
import torch
from thorough import thorough_after
from worker_runs import one_thread, ranks_for_scripts

from course_utils.measure.language import Language, Transformer, next_symbol_loss

SMALL = ("--batch-size", 6, "--steps", 6, "--every", 2)


@pytest.fixture(scope="module")
def on():
    with ranks_for_scripts() as run:
        yield lambda n, *words: run(n, "train_tp", *SMALL, *words)


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """The losses of one process, without anything distributed."""
    with one_thread():
        language, losses = Language(), []
        torch.manual_seed(0)
        model = Transformer(heads=8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
        for step in range(1, 7):
            batch = language.sample(6, 33, torch.Generator().manual_seed(step))
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
    assert run.curve() == pytest.approx(reference, abs=1e-5)
    assert run.curve("step") == [2, 4, 6]
    # Whole on all ranks: positions, norms, the biases of rows.
    whole = 32 * 64 + 5 * 2 * 64 + 2 * 64
    sliced = sum(p.numel() for p in Transformer(heads=8).parameters()) - whole
    assert set(run.curve("parameters")) == {whole + sliced // n}


@pytest.mark.parametrize("words", thorough_after(1, [["--own"], []]))
def test_bf16_rounds_and_still_learns_the_same(on, reference, words):
    curve = on(2, "--bf16", *words).curve()
    assert curve == pytest.approx(reference, abs=0.02)
    assert curve != pytest.approx(reference, abs=1e-5)
