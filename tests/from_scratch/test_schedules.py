"""from_scratch/schedules.py: their times, and stages on ranks against one process."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from thorough import thorough_after
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch.schedules import (
    Action,
    Pipeline,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
)
from course_utils.theory import costs, simulator

SIZES = [(1, 3), (2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 8), (8, 32)]


def of_all(schedule, ranks, *args):
    return [schedule(rank, ranks, *args) for rank in range(ranks)]


# ------------------------------------------------------------------ without any ranks
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubbles_are_those_of_the_formulas(p, m):
    work = {"F": 1.0, "B": 2.0}
    for schedule in (gpipe, one_f_one_b):
        step = simulator.pipeline_step(of_all(schedule, p, m), work)
        assert step.idle(0) == pytest.approx(3 * m * costs.bubble_of_ideal(p, m))
        assert step.idle(p - 1) / step.seconds == pytest.approx(
            costs.bubble_of_total(p, m)
        )
    for chunks in (1, 2, 4):
        smaller = {kind: seconds / chunks for kind, seconds in work.items()}
        step = simulator.pipeline_step(of_all(interleaved, p, m, chunks), smaller)
        bubble = costs.bubble_of_ideal(p, m, chunks=chunks)
        assert step.idle(0) == pytest.approx(3 * m * bubble)
    # (p - 1)(F + B - W), of arXiv 2401.10241, where all three are equal.
    step = simulator.pipeline_step(of_all(zero_bubble, p, m), {"F": 1, "B": 1, "W": 1})
    assert step.seconds == 3 * m + (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_what_is_kept(p, m):
    work = {"F": 1.0, "B": 2.0}
    step = simulator.pipeline_step(of_all(gpipe, p, m), work)
    assert [step.most_kept(rank) for rank in range(p)] == [m] * p
    step = simulator.pipeline_step(of_all(one_f_one_b, p, m), work)
    assert [step.most_kept(r) for r in range(p)] == [min(p - r, m) for r in range(p)]
    step = simulator.pipeline_step(of_all(zero_bubble, p, m), {**work, "W": 1.0})
    assert [step.most_kept(rank) for rank in range(p)] == [min(p, m)] * p


def test_a_message_takes_its_time_and_a_slow_stage_is_no_formula():
    orders = of_all(one_f_one_b, 2, 1)
    step = simulator.pipeline_step(orders, {"F": 1, "B": 2}, send=0.5)
    assert step.seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2
    starts = [[(str(one.action), one.start) for one in row] for row in step.done]
    assert starts == [[("F0", 0), ("B0", 5.0)], [("F0", 1.5), ("B0", 2.5)]]


def test_ranks_that_wait_for_each_other_are_named():
    orders = [[Action("B", 0), Action("F", 0)], [Action("F", 0), Action("B", 0)]]
    with pytest.raises(ValueError, match=r"wait for each other: rank 0 for B0, rank 1"):
        simulator.pipeline_step(orders, {"F": 1, "B": 1})


@pytest.mark.parametrize(
    "call",
    [
        lambda: gpipe(2, 2, 1),
        lambda: one_f_one_b(0, 2, 0),
        lambda: interleaved(0, 2, 3, 2),
        lambda: interleaved(0, 2, 2, 0),
        lambda: zero_bubble(-1, 2, 2),
    ],
)
def test_what_makes_no_schedule_is_refused(call):
    with pytest.raises(ValueError, match="expected"):
        call()


# --------------------------------------------------------------------------- on ranks
def layers(count):
    torch.manual_seed(0)
    make = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count - 1)]
    return nn.Sequential(*make, nn.Linear(6, 3))


def trained(schedule, chunks, m, steps=3):
    """Losses and parameters of this rank's stages after some steps of Adam."""
    rank, n = dist.get_rank(), dist.get_world_size()
    cut = layers(2 * n * chunks)
    stages = [cut[2 * stage : 2 * stage + 2] for stage in range(rank, n * chunks, n)]
    parameters = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    pipeline = Pipeline(stages, shape=(2, 6), loss=F.cross_entropy)
    args = (chunks,) if schedule is interleaved else ()
    found = []
    for step in range(steps):
        inputs, targets = batch(step, m)
        optimizer.zero_grad()
        loss = pipeline.step(schedule(rank, n, m, *args), inputs, targets)
        optimizer.step()
        assert (loss is None) == (rank < n - 1)
        found.append(loss)
    return found, [p.detach() for p in parameters], pipeline


def batch(step, m):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(2 * m, 6, generator=generator)
    return inputs, torch.randint(3, (2 * m,), generator=generator)


@on_ranks(*thorough_after(1, [4, 1, 2]))
def test_every_schedule_trains_like_one_process():
    rank, n = dist.get_rank(), dist.get_world_size()
    m = 2 * n
    for schedule, chunks in ((gpipe, 1), (one_f_one_b, 1), (interleaved, 2)):
        losses, mine, pipeline = trained(schedule, chunks, m)
        whole = layers(2 * n * chunks)
        optimizer = torch.optim.Adam(whole.parameters(), lr=1e-2)
        for step, loss in enumerate(losses):
            inputs, targets = batch(step, m)
            optimizer.zero_grad()
            expected = F.cross_entropy(whole(inputs), targets)
            expected.backward()
            optimizer.step()
            if rank == n - 1:
                torch.testing.assert_close(loss, expected.detach())
        theirs = [
            p
            for stage in range(rank, n * chunks, n)
            for p in whole[2 * stage : 2 * stage + 2].parameters()
        ]
        torch.testing.assert_close(mine, [p.detach() for p in theirs])
        if chunks == 1:
            assert pipeline.most_kept == (m if schedule is gpipe else n - rank)


class Slow(nn.Module):
    """A stage that takes a known time, and no processor: two cores do for four."""

    def forward(self, x):
        time.sleep(0.02)
        return x.clone()


@on_ranks(4)
def test_recorded_times_have_the_bubble_of_the_formula():
    rank, n, m = dist.get_rank(), dist.get_world_size(), 8
    pipeline = Pipeline([Slow()], shape=(1, 4), loss=lambda y, _: y.sum())
    inputs, targets = torch.ones(m, 4, requires_grad=True), torch.ones(m, 4)
    pipeline.step(gpipe(rank, n, m), inputs, targets)  # the first one connects
    pipeline.step(gpipe(rank, n, m), inputs, targets)
    forwards = [done for done in pipeline.done if done.action.kind == "F"]
    # No rank computes faster than it sleeps; a busy machine may be slower.
    assert len(forwards) == m
    assert all(done.stop - done.start >= 0.02 for done in forwards)
    # Each rank waits for those before it. All processes have one clock.
    first = torch.tensor(forwards[0].start, dtype=torch.float64)
    dist.broadcast(first, 0)
    assert forwards[0].start - first >= 0.02 * rank


@on_ranks(2)
def test_micro_batches_of_different_sizes_are_refused():
    pipeline = Pipeline([nn.Identity()], shape=(1, 4), loss=F.mse_loss)
    actions = gpipe(dist.get_rank(), 2, 2)
    with pytest.raises(ValueError, match=r"3 samples: expected a multiple of the 2"):
        pipeline.step(actions, torch.ones(3, 4), torch.ones(3, 4))
