"""``from_scratch/fsdp``: what units may return, and what is refused in words."""

import types

import pytest
import torch
from shared_ranks import on_ranks
from torch import nn

from course_utils.from_scratch import fsdp

from .fsdp_jobs import batch_of, new


@on_ranks(2)
def test_misuse_is_named():
    module = new("perceptron")
    early = torch.optim.AdamW(module.parameters())
    model = fsdp.FSDP(module, module.layers)
    inputs, _ = batch_of("perceptron", 0)
    model(inputs).sum().backward()
    with pytest.raises(RuntimeError, match=r"AdamW holds 'scale' .*AdamW\(mod"):
        early.step()
    with pytest.raises(ValueError, match="sharded already"):
        fsdp.FSDP(module)
    with pytest.raises(ValueError, match="prefetch is -1"):
        fsdp.FSDP(new("perceptron"), prefetch=-1)
    with pytest.raises(RuntimeError, match=r"'out.weight' is called .* unit \(root\)"):
        module.out(torch.ones(1, 8))
    with pytest.raises(RuntimeError, match="before FSDP"):
        model.to(torch.float64)
    with pytest.raises(RuntimeError, match="freeze or unfreeze .* before FSDP"):
        model.requires_grad_(False)
    module.layers[0](inputs)  # a unit may be called by itself
    weight = module.layers[0].weight
    assert weight.shape == (8, 6) and weight.isnan().all(), "nothing to crash on"
    for rung in (fsdp.ShardedOptimizer, fsdp.ShardedGradients):
        module = new("perceptron")
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        rung(module, torch.optim.SGD, lr=0.1)
        with pytest.raises(RuntimeError, match="SGD holds"):
            early.step()
    module = new("perceptron")
    with pytest.raises(
        ValueError, match=r"units\[1\], a ReLU, is no submodule of the P"
    ):
        fsdp.FSDP(module, [module.out, nn.ReLU()])
    module.layers[0].bias.data = module.layers[0].bias.data.double()
    with pytest.raises(ValueError, match=r"float32 \(layers.0.weight\), torch.float64"):
        fsdp.FSDP(module, module.layers)
    module = new("perceptron")
    module.layers[0].double()  # a unit of its own may differ
    fsdp.FSDP(module, module.layers)


class Hiding(nn.Linear):
    """Returns its result in an object that no hook can look into."""

    def forward(self, rows):
        return types.SimpleNamespace(rows=super().forward(rows))


class Unpacking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = Hiding(2, 2), nn.Linear(2, 2)

    def forward(self, rows):
        return self.out(self.layer(rows).rows)


@on_ranks(2)
def test_an_output_that_hides_its_tensors_is_refused():
    module = Unpacking()
    model = fsdp.FSDP(module, [module.layer])
    with pytest.raises(TypeError, match="unit 'layer' returns a SimpleNamespace"):
        model(torch.ones(1, 2))
    with torch.no_grad():  # no backward will come
        assert model(torch.ones(1, 2)).shape == (1, 2)


class Turned(nn.Linear):
    """Returns a view of its result."""

    def forward(self, rows):
        return super().forward(rows).transpose(0, 1)


class Adding(nn.Linear):
    """Changes its input, and returns that: a view of what the unit before returned."""

    def forward(self, rows):
        rows += super().forward(rows)
        return rows


class InPlace(nn.Module):
    """Changes what its units return. With three dimensions those are all views."""

    def __init__(self):
        super().__init__()
        kinds = (nn.Linear, Turned, Adding, Turned)
        self.layers = nn.ModuleList(kind(8, 8) for kind in kinds)
        self.out = nn.Linear(8, 3)

    def forward(self, rows):
        first, second, third, fourth = self.layers
        rows = second(first(rows).relu_()).tanh_()
        rows = third(rows * 1.0)
        rows += 1.0
        rows = fourth(rows)
        rows[:2] *= 2.0
        return self.out(rows)


@on_ranks(2)
def test_a_view_that_a_unit_returns_may_be_changed_in_place():
    torch.manual_seed(0)
    plain = InPlace()
    torch.manual_seed(1)
    rows = torch.randn(4, 5, 8)
    plain(rows).pow(2).mean().backward()
    for options in (
        {"prefetch": 0},
        {"prefetch": 1},
        {"prefetch": 5, "reshard_after_forward": True},
    ):
        torch.manual_seed(0)
        module = InPlace()
        model = fsdp.FSDP(module, [*module.layers, module.out], **options)
        for _ in range(2):  # in the second step the order is known
            model.zero_grad()
            model(rows).pow(2).mean().backward()
            assert not any(flat.gathered for flat in model.flats)
        for flat in model.flats:
            parts = flat.parts(fsdp.all_gather(flat.shard.grad))
            for name, part in zip(flat.names, parts, strict=True):
                expected = plain.get_parameter(name).grad
                torch.testing.assert_close(part, expected, msg=f"{name}, {options}")


class Positions(nn.Module):
    """Returns a part of its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 2))

    def forward(self, rows):
        return self.weight[: len(rows)]


@on_ranks(2)
def test_a_unit_that_returns_a_view_of_its_parameter_is_refused():
    for trained in (True, False):
        module = nn.Sequential(nn.Linear(2, 2), Positions().requires_grad_(trained))
        model = fsdp.FSDP(module, [module[1]])
        for recording in (True, False):
            with torch.set_grad_enabled(recording):
                with pytest.raises(
                    RuntimeError, match="'1' returns one of its .*clone"
                ):
                    model(torch.ones(3, 2))
