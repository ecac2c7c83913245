"""``train_pipeline.py``: stages on ranks train like one process."""

from __future__ import annotations

import pytest
import torch
from thorough import thorough_after
from worker_runs import one_thread, ranks_for_scripts

from course_utils.measure.language import Language, Transformer, next_symbol_loss

SMALL = ("--batch-size", 8, "--micro-batches", 4, "--steps", 4, "--every", 2)


@pytest.fixture(scope="module")
def on():
    with ranks_for_scripts() as run:
        yield lambda n, *words: run(n, "train_pipeline", *SMALL, *words)


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """The losses of one process, without anything distributed."""
    with one_thread():
        language, losses = Language(), []
        torch.manual_seed(0)
        model = Transformer(layers=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
        for step in range(1, 5):
            batch = language.sample(8, 33, torch.Generator().manual_seed(step))
            loss = next_symbol_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [sum(losses[i : i + 2]) / 2 for i in (0, 2)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("n", thorough_after(1, [4, 2, 1]))
def test_the_curve_is_that_of_one_process(on, reference, n, schedule):
    run = on(n, "--schedule", schedule)
    assert run.curve() == pytest.approx(reference, abs=1e-5)
    assert run.curve("step") == [2, 4]
