"""from_scratch/tensor_parallel.py: slices on n ranks against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from thorough import thorough_after
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch import tensor_parallel as ours
from course_utils.from_scratch.tensor_parallel import (
    ColumnParallel,
    RowParallel,
    SequenceNorm,
    SequencePositions,
    VocabularyParallel,
)
from course_utils.measure.language import Transformer
from course_utils.measure.traffic import Sent

PLAN = {
    "embedding": VocabularyParallel,
    "blocks.*.queries_keys_values": ColumnParallel,
    "blocks.*.mix": RowParallel,
    "blocks.*.perceptron.0": ColumnParallel,
    "blocks.*.perceptron.2": RowParallel,
    "head": ColumnParallel,
}
SEQUENCE_PLAN = {
    **{name: partial(make, sequence=True) for name, make in PLAN.items()},
    "position": SequencePositions,
    "*norm*": SequenceNorm,
}
CUT = {"embedding": 0, "queries_keys_values": 0, "mix": 1, "perceptron.0": 0, "head": 0}


def model_and_batch():
    torch.manual_seed(0)
    model = Transformer(vocabulary=16, width=32, layers=2, heads=4, context=8)
    for norm in model.modules():  # as after some training
        if isinstance(norm, nn.LayerNorm):
            nn.init.normal_(norm.weight, mean=1.0, std=0.1)
            nn.init.normal_(norm.bias, std=0.1)
    return model, torch.randint(16, (3, 9))


def losses(model, batch, loss_of, steps):
    """The loss of each step of AdamW; the gradients of the last one are still there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        scores = model(batch[:, :-1]).flatten(0, 1)
        loss = loss_of(scores, batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def slice_like(name: str, whole: torch.Tensor, n: int, rank: int) -> torch.Tensor:
    """What this rank has of a parameter or gradient of the whole model."""
    if "perceptron.2.weight" in name:
        return whole.chunk(n, 1)[rank]
    for part, dim in CUT.items():
        if part in name:
            return whole.chunk(n, dim)[rank]
    return whole


@on_ranks(*thorough_after(1, [2, 1, 4]))
def test_slices_train_like_the_whole_model():
    for plan in (PLAN, SEQUENCE_PLAN):
        trains_like_the_whole_model(plan)


def trains_like_the_whole_model(plan):
    n, rank = dist.get_world_size(), dist.get_rank()
    whole, batch = model_and_batch()
    sliced, _ = model_and_batch()
    ours.parallelize(sliced, plan)
    for steps in (1, 4):
        expected = losses(whole, batch, F.cross_entropy, steps)
        found = losses(sliced, batch, ours.cross_entropy, steps)
        assert found == pytest.approx(expected, abs=1e-5)
        parameters = dict(whole.named_parameters())
        for name, mine in sliced.named_parameters():
            theirs = parameters.pop(name)
            for a, b in ((mine, theirs), (mine.grad, theirs.grad)):
                torch.testing.assert_close(
                    a, slice_like(name, b, n, rank), rtol=1e-4, atol=1e-5, msg=name
                )
        assert not parameters


@on_ranks(1, 3)
def test_f_and_g_are_each_others_backward():
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = ours.copy_to_ranks(x)
    assert torch.equal(y, x)
    y.backward(torch.full((2,), rank + 1.0))
    assert x.grad.tolist() == [n * (n + 1) / 2] * 2
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    y = ours.sum_over_ranks(x)
    assert y.tolist() == [n * (n + 1) / 2] * 2
    y.backward(torch.tensor([3.0, 4.0]))
    assert x.grad.tolist() == [3.0, 4.0]
    assert x.tolist() == [rank + 1.0] * 2, "it was overwritten"

    x = torch.arange(2.0 * n).view(1, n, 2).add(rank).requires_grad_()
    mine = ours.scatter_sequence(x)
    assert mine.shape == (1, 1, 2)
    total = n * torch.arange(2.0 * n).view(1, n, 2) + sum(range(n))
    assert torch.equal(mine, total[:, rank : rank + 1])
    whole = ours.gather_sequence(mine)
    assert torch.equal(whole, total)
    # Every rank uses the whole sequence: the gradients come together from all of them.
    whole.backward(torch.full((1, n, 2), rank + 1.0))
    assert x.grad.eq(n * (n + 1) / 2).all()


@on_ranks(4)
def test_with_slices_of_the_sequence_a_bias_costs_a_small_all_reduce():
    """Each rank finds a part of the gradient of the bias: the parts are added up."""
    n = dist.get_world_size()
    layer = RowParallel(nn.Linear(32, 16), sequence=True)
    with Sent() as counted:
        layer(torch.randn(3, 8, 32 // n)).sum().backward()
    half = (n - 1) / n * 3 * 8 * 16 * 4
    bias = ("all-reduce", 2 * (n - 1) / n * 16 * 4)
    pair = [("all-gather", half), ("reduce-scatter", half)]
    assert sorted(counted.calls) == sorted([*pair, bias])


@on_ranks(2)
def test_a_group_of_some_ranks_and_frozen_parameters():
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    linear = nn.Linear(4, 6).requires_grad_(False)
    alone = ColumnParallel(linear, groups[rank])
    assert torch.equal(alone.weight, linear.weight)
    assert not alone.weight.requires_grad and not alone.bias.requires_grad
    x = torch.randn(2, 4)
    assert torch.equal(RowParallel(linear, groups[rank])(x), linear(x))


@on_ranks(2)
def test_what_does_not_fit_is_told():
    with pytest.raises(ValueError, match=r"has 3 elements: expected a multiple of"):
        ColumnParallel(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"The sequence has 3 symbols"):
        ours.scatter_sequence(torch.ones(1, 3, 2))
    with pytest.raises(ValueError, match=r"No layer is called 'blocks\.0'.*: 0, 1"):
        layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        ours.parallelize(layers, {"blocks.0": ColumnParallel})


@on_ranks(2)
def test_scores_far_apart_have_a_finite_loss():
    rank = dist.get_rank()
    scores = torch.tensor([[-1e4, 2e4, 0.0, 1.0]]).chunk(2, 1)[rank]
    loss = ours.cross_entropy(scores, torch.tensor([0]))
    assert loss.item() == 3e4
