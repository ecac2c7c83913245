"""from_scratch: mesh.py, ring_attention.py and experts.py against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch.experts import mixture
from course_utils.from_scratch.mesh import Mesh
from course_utils.from_scratch.ring_attention import ring_attention


# ----------------------------------------------------------------------------- the mesh
@on_ranks(4)
def test_the_groups_are_those_of_pytorchs_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = Mesh(dp=2, tp=2)
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for axis in ("dp", "tp"):
        ranks = dist.get_process_group_ranks(mesh.group(axis))
        assert ranks == dist.get_process_group_ranks(theirs.get_group(axis))
        assert mesh.coordinate(axis) == theirs.get_local_rank(axis)
        assert dist.get_rank(mesh.group(axis)) == mesh.coordinate(axis)


@on_ranks(4)
def test_three_axes_and_axes_of_one():
    mesh = Mesh(pp=2, dp=1, tp=2)
    rank = dist.get_rank()
    assert [mesh.coordinate(axis) for axis in mesh.axes] == [rank // 2, 0, rank % 2]
    assert dist.get_process_group_ranks(mesh.group("dp")) == [rank]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh.group("pp"))
    assert x.item() == [2.0, 4.0, 2.0, 4.0][rank]


@on_ranks(2)
def test_a_mesh_that_does_not_fit_is_told():
    for axes in ({"dp": 3}, {}, {"dp": 2, "tp": 0}):
        with pytest.raises(ValueError, match="product is the number of ranks, 2"):
            Mesh(**axes)
    with pytest.raises(ValueError, match=r"no axis 'tp': there are \['dp'\]"):
        Mesh(dp=2).group("tp")


# ------------------------------------------------------------------ context parallelism
@on_ranks(1, 3)
def test_ring_attention_is_attention():
    rank, n = dist.get_rank(), dist.get_world_size()
    for causal in (False, True):
        torch.manual_seed(0)
        whole = [torch.randn(2, 3, 4 * n, 5, requires_grad=True) for _ in range(3)]
        slices = [x.detach().chunk(n, 2)[rank].clone() for x in whole]
        for x in slices:
            x.requires_grad_()
        expected = F.scaled_dot_product_attention(*whole, is_causal=causal)
        out = ring_attention(*slices, causal=causal)
        torch.testing.assert_close(out, expected.chunk(n, 2)[rank])
        torch.manual_seed(1)
        grad = torch.randn_like(expected)
        expected.backward(grad)
        out.backward(grad.chunk(n, 2)[rank])
        for mine, theirs in zip(slices, whole, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad.chunk(n, 2)[rank])


# ------------------------------------------------------------------- expert parallelism
def perceptrons(total):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(total)]


@on_ranks(1, 4)
def test_a_mixture_is_that_of_one_process():
    rank, n, total = dist.get_rank(), dist.get_world_size(), 4
    whole, mine = perceptrons(total), perceptrons(total)
    here = range(rank * total // n, (rank + 1) * total // n)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(2 * n + 5, 3, generator=generator)
    chosen = torch.randint(
        total - 1, (len(tokens),), generator=generator
    )  # one is idle
    ends = [0, 1, *range(3, 2 * n, 2), len(tokens)][: n + 1]  # unequal shares
    ends[-1] = len(tokens)
    part = slice(ends[rank], ends[rank + 1])

    x = tokens[part].clone().requires_grad_()
    experts = {number: mine[number] for number in here}
    y = mixture(x, chosen[part], experts, total=total)
    y.square().sum().backward()

    every = tokens.clone().requires_grad_()
    rows = [whole[e](row) for row, e in zip(every, chosen.tolist(), strict=True)]
    expected = torch.stack(rows)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected[part])
    torch.testing.assert_close(x.grad, every.grad[part])
    for number in here:
        pairs = zip(mine[number].parameters(), whole[number].parameters(), strict=True)
        for ours, theirs in pairs:
            wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            torch.testing.assert_close(ours.grad, wanted)


@on_ranks(2)
def test_what_makes_no_mixture_is_told():
    rank = dist.get_rank()
    experts = {rank: nn.Identity()}
    x, chosen = torch.ones(2, 3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="3 experts: expected a multiple of the 2"):
        mixture(x, chosen, experts, total=3)
    with pytest.raises(ValueError, match=r"has the experts \[\d\]: expected"):
        mixture(x, chosen, {1 - rank: nn.Identity()}, total=2)
    with pytest.raises(ValueError, match="beyond the experts 0 to 1"):
        mixture(x, chosen + 1, experts, total=2)
