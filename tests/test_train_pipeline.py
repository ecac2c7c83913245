"""``train_pipeline.py``: stages on ranks train like one process."""

from __future__ import annotations

import pytest
from thorough import thorough_after
from worker_runs import losses_of_one_process, ranks_for_scripts

SMALL = ("--batch-size", 8, "--micro-batches", 4, "--steps", 4, "--every", 2)


@pytest.fixture(scope="module")
def on():
    with ranks_for_scripts() as run:
        yield lambda n, *words: run(n, "train_pipeline", *SMALL, *words)


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return losses_of_one_process(batch_size=8, steps=4, layers=4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("n", thorough_after(1, [4, 2, 1]))
def test_the_curve_is_that_of_one_process(on, reference, n, schedule):
    run = on(n, "--schedule", schedule)
    assert run.curve() == pytest.approx(reference, abs=1e-5)
    assert run.curve("step") == [2, 4]
