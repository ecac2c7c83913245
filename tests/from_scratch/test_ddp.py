"""``from_scratch/ddp.py`` against one process and against PyTorch's own DDP.

The work is done in functions that every rank runs; an assertion that fails there ends
the test with the rank's own message.
"""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, several
from thorough import thorough_after
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch import ddp
from course_utils.measure.taps import tap
from course_utils.theory import costs

from .fsdp_jobs import Convolutions, Transformer, largest_difference

TorchDDP = nn.parallel.DistributedDataParallel


# --------------------------------------------------------------------------- the models


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))


def batch_of(name, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    if name == "transformer":
        inputs = torch.randint(17, (rows, 5), generator=generator)
    elif name == "conv":
        inputs = torch.randn(rows, 3, 9, 9, generator=generator)
    else:
        inputs = torch.randn(rows, 6, generator=generator)
    return inputs, torch.randint(3, (rows,), generator=generator)


MODELS = {"mlp": mlp, "transformer": Transformer, "conv": Convolutions}
# Buckets so small that there are several; the first is as small as DDP's can be.
SMALL = {"bucket_bytes": 2000, "first_bucket_bytes": 500}


def trained(
    name, wrap, steps=3, after_backward=None, dtype=torch.float32, alone_with=None
):
    """The parameters and buffers after some steps on this rank's share of the data.

    `alone_with`: in one process, with all rows of so many ranks.
    """
    rank, n = (0, 1) if alone_with else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(rank)  # every rank starts elsewhere
    module = MODELS[name]().to(dtype)
    model = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, labels = batch_of(name, 4 * (alone_with or n), seed=step)
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rank::n]), labels[rank::n]).backward()
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# ---------------------------------------------------------------------------- the rungs


def without_a_wrapper(module):
    ddp.broadcast_module(module)
    return module


RUNGS = {  # what a model is wrapped in, and what is called after backward()
    "average_gradients": (without_a_wrapper, ddp.average_gradients),
    "HookedDDP": (ddp.HookedDDP, ddp.HookedDDP.wait),
    "DDP": (lambda module: ddp.DDP(module, **SMALL), None),
}


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_every_rung_trains_like_one_process(ranks, name):
    options = {"dtype": torch.float64}
    expected = trained(name, lambda module: module, alone_with=ranks.n, **options)
    for rung, (wrap, after) in RUNGS.items():
        for state in ranks.run(trained, name, wrap, after_backward=after, **options):
            assert largest_difference(state, expected) < 1e-12, rung


@on_ranks(*thorough_after(2, [2, 3, 4]))
def test_as_pytorchs_ddp():
    """To the last bit: sums of two numbers are the same in any order; else nearly."""
    least = 0.0 if dist.get_world_size() == 2 else 1e-5
    for name in MODELS:
        torchs = trained(name, TorchDDP, 4)
        for options in ({}, SMALL):
            ours = trained(name, lambda module, o=options: ddp.DDP(module, **o), 4)
            assert largest_difference(ours, torchs) <= least, (name, options)


# ------------------------------------------------------------- parameters of all kinds


class Branches(nn.Module):
    """Which of its layers are used depends on what it is told."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({k: nn.Linear(2, 2) for k in ("a", "b", "c", "d")})
        self.layers["d"].requires_grad_(False)

    def forward(self, inputs, names):
        for name in names:
            inputs = self.layers[name](inputs)
        return inputs


def check_means(module, alone):
    """Its gradients are those added up in `alone`, divided by n; or None as there."""
    for (name, made), wanted in zip(
        module.named_parameters(), alone.parameters(), strict=True
    ):
        mean = None if wanted.grad is None else wanted.grad / dist.get_world_size()
        torch.testing.assert_close(made.grad, mean, msg=name)


class Odd(nn.Module):
    """Of several dtypes, tied, in channels_last; some are used on rank 0 alone."""

    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
        self.weights = nn.ParameterList(
            [torch.full((3,), 1.5, dtype=dtype) for dtype in dtypes for _ in range(3)]
        )
        self.tied = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2)))
        self.tied[1].weight = self.tied[0].weight
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, rank):
        images = torch.full((2, 3, 5, 5), rank + 1.0)
        images = images.to(memory_format=torch.channels_last)
        total = (
            self.image(images).sum() + self.tied(torch.full((1, 3), rank + 1.0)).sum()
        )
        for place, weight in enumerate(self.weights):
            if place % 3 < (2 if rank == 0 else 1):  # the third is used by nobody
                total = total + (weight.cdouble() * complex(rank + 1, rank)).real.sum()
        return total


@several
def test_parameters_of_every_kind():
    n = dist.get_world_size()
    torch.manual_seed(0)
    module = Odd()
    alone = copy.deepcopy(module)
    model = ddp.DDP(module)
    model(dist.get_rank()).backward()
    for rank in range(n):
        alone(rank).backward()
    check_means(module, alone)
    assert module.image.weight.grad.stride() == module.image.weight.stride()
    assert all(len({p.dtype for p in b.parameters}) == 1 for b in model.buckets)
    sent = sum(len(bucket.parameters) for bucket in model.buckets)
    assert sent == len([*module.parameters()])  # a tied one is sent once


@several
def test_unused_frozen_and_differently_ordered_parameters():
    rank, n = dist.get_rank(), dist.get_world_size()
    # Rank 0 uses a, then b; rank 1 b, then a; the others b alone. Nobody uses c.
    names = ["ab", "ba", "b", "b"]
    for sizes in ({}, {"bucket_bytes": 1, "first_bucket_bytes": 1}):
        torch.manual_seed(0)
        module = Branches()
        alone = copy.deepcopy(module)
        model = ddp.DDP(module, **sizes)
        model(torch.full((1, 2), rank + 1.0), names[rank]).sum().backward()
        for other in range(n):
            alone(torch.full((1, 2), other + 1.0), names[other]).sum().backward()
        check_means(module, alone)


@several
def test_frozen_parameters_with_hooks():
    """A layer that is not trained is not sent either."""
    module = Branches()
    model = ddp.HookedDDP(module)
    model(torch.ones(1, 2), "abcd").sum().backward()
    assert len(model.sent) == 6
    model.wait()
    assert module.layers["a"].weight.grad is not None
    assert module.layers["d"].weight.grad is None


@several
def test_what_no_rank_has_used_keeps_its_gradient():
    rank, n = dist.get_rank(), dist.get_world_size()
    module = nn.ParameterList([torch.ones(2) for _ in range(3)])
    model = ddp.DDP(module)
    for parameter in module:
        parameter.grad = torch.full((2,), rank + 1.0)
    used_by_one = module[1].sum() if rank == 0 else 0
    (module[0].sum() + used_by_one).backward()
    first, second, unused = (parameter.grad for parameter in model.parameters())
    before = (n + 1) / 2  # the mean of what was there
    torch.testing.assert_close(first, torch.full((2,), before + 1))
    torch.testing.assert_close(second, torch.full((2,), before + 1 / n))
    torch.testing.assert_close(unused, torch.full((2,), rank + 1.0))
    # What a backward() under no_sync has used counts for the next one outside.
    unused.zero_()
    with model.no_sync():
        (module[0].sum() + (module[2].sum() if rank == 0 else 0)).backward()
    module[0].sum().backward()
    torch.testing.assert_close(module[2].grad, torch.full((2,), 1 / n))


@on_ranks(2)
def test_a_module_with_nothing_to_train_is_refused():
    for build in (ddp.HookedDDP, ddp.DDP):
        with pytest.raises(ValueError, match="Linear requires a gradient"):
            build(nn.Linear(2, 2).requires_grad_(False))


# -------------------------------------------------------------------- one step and many


@several
def test_accumulated_gradients_are_those_of_the_big_batch():
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = mlp().double()
    model = ddp.DDP(module, **SMALL)
    whole, calls = copy.deepcopy(module), []
    batches = [batch_of("mlp", 4 * n, seed=step) for step in range(3)]
    with tap(lambda call: (calls.append(call), call.go())[1], ["allreduce"]):
        for step, (inputs, labels) in enumerate(batches):
            with model.no_sync() if step < 2 else contextlib.nullcontext():
                loss = F.cross_entropy(model(inputs[rank::n].double()), labels[rank::n])
                (loss / 3).backward()
            assert len(calls) == (0 if step < 2 else len(model.buckets))
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    (n * F.cross_entropy(whole(inputs.double()), labels)).backward()
    check_means(module, whole)


@several
def test_backward_as_often_as_one_likes():
    rank, n = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(2, 1, bias=False)
    model = ddp.DDP(module)
    ones = torch.full((1, 2), rank + 1.0)
    mean = torch.full((1, 2), (n + 1) / 2)
    for times in (1, 2, 3):  # without zero_grad, gradients add up
        model(ones).sum().backward()
        torch.testing.assert_close(module.weight.grad, times * mean)
    module.weight.grad = None
    (model(ones) + 2 * model(ones)).sum().backward()  # two forwards, one backward
    torch.testing.assert_close(module.weight.grad, 3 * mean)
    module.weight.grad = None
    first, second = model(ones).sum(), model(10 * ones).sum()
    first.backward()
    second.backward()  # with no forward in between
    torch.testing.assert_close(module.weight.grad, 11 * mean)
    with torch.no_grad():
        model(ones)  # sends nothing
    if rank == 0:
        module(ones).sum()  # nor does the bare module, forward


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("on purpose")


@on_ranks(2)
def test_gradients_are_parts_of_their_bucket_zeroed_or_dropped():
    rank, n = dist.get_rank(), dist.get_world_size()
    module = mlp()
    ours, torchs = ddp.DDP(module, **SMALL), TorchDDP(copy.deepcopy(module))
    for step in range(4):
        inputs, labels = batch_of("mlp", 2 * n, seed=step)
        for model in (ours, torchs):
            model.zero_grad(set_to_none=step % 2 == 0)
            F.cross_entropy(model(inputs[rank::n]), labels[rank::n]).backward()
        for bucket in ours.buckets:
            for parameter, mean in zip(bucket.parameters, bucket.means, strict=True):
                assert parameter.grad.data_ptr() == mean.data_ptr()
        for one, other in zip(ours.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), step


@several
def test_a_backward_that_failed_leaves_nothing_behind():
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    alone = copy.deepcopy(module)
    model = ddp.DDP(module, bucket_bytes=10**6, first_bucket_bytes=10**6)
    inputs = torch.full((1, 2), rank + 1.0)
    with pytest.raises(RuntimeError, match="on purpose"):
        module[1](Fails.apply(module[0](inputs))).sum().backward()
    module.zero_grad()
    model(inputs).sum().backward()
    alone(torch.full((1, 2), n * (n + 1) / 2)).sum().backward()
    check_means(module, alone)


@on_ranks(2)
def test_buckets_leave_during_the_backward_pass():
    """The order of what happens in a backward pass of four layers, a bucket each."""
    module = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    model = ddp.DDP(module, bucket_bytes=1, first_bucket_bytes=1)
    events = []
    for number, layer in enumerate(module):
        layer.weight.register_hook(lambda grad, n=number: events.append(f"grad {n}"))
    with tap(lambda call: (events.append("send"), call.go())[1], ["allreduce"]):
        model(torch.ones(1, 2)).sum().backward()
    assert events == [e for n in (3, 2, 1, 0) for e in (f"grad {n}", "send")]


@on_ranks(2)
def test_buckets_are_filled_as_in_pytorch():
    large = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(9)])
    for module, caps in ((large, {}), (mlp(), {"cap": 300, "first_cap": 50})):
        sizes = dict(
            zip(("bucket_bytes", "first_bucket_bytes"), caps.values(), strict=False)
        )
        buckets = ddp.DDP(module, **sizes).buckets
        last_first = [4 * p.numel() for p in reversed([*module.parameters()])]
        expected = costs.ddp_buckets(last_first, **caps)
        found = [[4 * p.numel() for p in bucket.parameters] for bucket in buckets]
        assert found == [[last_first[place] for place in some] for some in expected]
        assert len(found) > 2


# ------------------------------------------------------------------------------ buffers


@on_ranks(3)
def test_buffers_come_from_rank_0_before_each_forward():
    rank = dist.get_rank()
    # The mean moves by a tenth of the way to what a rank sees, from what rank 0 had.
    for synced, mean in ((True, 0.09 + 0.1 * (rank + 1)), (False, 0.19 * (rank + 1))):
        model = ddp.DDP(nn.BatchNorm1d(2), broadcast_buffers=synced)
        for _ in range(2):
            model(torch.full((3, 2), rank + 1.0)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.zeros(3, 2))
        assert model.module.running_mean[0].item() == pytest.approx(mean)


def gradients_of_two_forwards(wrap, sync, mode):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = wrap(module).train(mode == "train")
    torch.manual_seed(1 + dist.get_rank())
    real, fake, more = torch.randn(3, 6, 4)
    with contextlib.nullcontext() if sync else model.no_sync():
        first = model(fake)
        if mode == "train":  # the means of rank 0 arrive while `first` is waiting
            with torch.no_grad():
                model(more)
    (first.pow(2).mean() - model(real).mean()).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


@on_ranks(2)
def test_two_forwards_before_one_backward():
    """As with the discriminator of a GAN: buffers are written in between."""
    for options in itertools.product((True, False), ("train", "eval")):
        ours = gradients_of_two_forwards(ddp.DDP, *options)
        torchs = gradients_of_two_forwards(TorchDDP, *options)
        torch.testing.assert_close(ours, torchs)
