"""``from_scratch/ddp.py`` against one process and against PyTorch's own DDP.

The work is done in functions that every rank runs; an assertion that fails there ends
the test with the rank's own message.
"""

import contextlib
import copy
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks, shared_ranks
from thorough import thorough_after
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch import ddp
from course_utils.theory import costs

# The ranks get the functions below as they are, and need not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TorchDDP = nn.parallel.DistributedDataParallel


started = shared_ranks(4, timeout=60, optimizers=True)
SEVERAL = thorough_after(2, [2, 4, 1, 3])
several = on_ranks(*SEVERAL)


@pytest.fixture(params=SEVERAL)
def ranks(request, started):
    return started[request.param]


# --------------------------------------------------------------------------- the models


class Transformer(nn.Module):
    """A small language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 17, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.layers(self.embedding(tokens))).mean(dim=1)


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))


def resnet():
    from torchvision.models import resnet18

    return resnet18(num_classes=3)


def batch_of(name, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    if name == "transformer":
        inputs = torch.randint(17, (rows, 5), generator=generator)
    elif name == "resnet":
        inputs = torch.randn(rows, 3, 32, 32, generator=generator)
    else:
        inputs = torch.randn(rows, 6, generator=generator)
    return inputs, torch.randint(3, (rows,), generator=generator)


MODELS = {"mlp": mlp, "transformer": Transformer, "resnet": resnet}
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


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[k].double() - other[k].double()).abs().max().item() for k in one)


# ---------------------------------------------------------------------------- the rungs


def without_a_wrapper(module):
    ddp.broadcast_module(module)
    return module


def train_rung(rung, name, dtype):
    if rung == "average_gradients":
        return trained(
            name, without_a_wrapper, after_backward=ddp.average_gradients, dtype=dtype
        )
    if rung == "HookedDDP":
        return trained(
            name, ddp.HookedDDP, after_backward=lambda m: m.wait(), dtype=dtype
        )
    return trained(name, lambda module: ddp.DDP(module, **SMALL), dtype=dtype)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_every_rung_trains_like_one_process(ranks, name):
    options = {"dtype": torch.float64, "alone_with": ranks.n}
    expected = trained(name, lambda module: module, **options)
    for rung in ("average_gradients", "HookedDDP", "DDP"):
        for state in ranks.run(train_rung, rung, name, torch.float64):
            assert largest_difference(state, expected) < 1e-12, rung


@pytest.mark.parametrize("name", MODELS)
def test_as_pytorchs_ddp(started, name):
    def both(name):
        steps = 2 if name == "resnet" else 4
        ours = trained(name, ddp.DDP, steps)
        small = trained(name, lambda module: ddp.DDP(module, **SMALL), steps)
        torchs = trained(name, TorchDDP, steps)
        return ours, small, torchs

    for ours, small, torchs in started[2].run(both, name):
        for key, value in torchs.items():  # to the last bit
            assert torch.equal(ours[key], value), key
            assert torch.equal(small[key], value), key
    if name == "resnet":  # here for its many buckets; each rank imports it for a second
        return
    for ours, small, torchs in started[4].run(both, name):
        assert largest_difference(ours, torchs) <= 1e-5
        assert largest_difference(small, torchs) <= 1e-5


@several
def test_construction_sends_parameters_and_buffers_of_rank_0():
    rank = dist.get_rank()
    for build in (ddp.HookedDDP, ddp.DDP):
        torch.manual_seed(rank)
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
        module[1].running_mean.fill_(rank)
        module[1].num_batches_tracked.fill_(rank)
        build(module)
        torch.manual_seed(0)
        first = nn.Linear(3, 2).double()
        assert torch.equal(module[0].weight, first.weight)
        assert module[1].running_mean.eq(0).all(), "buffers, too"
        assert module[1].num_batches_tracked == 0


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


def gradients_of(module):
    return {name: p.grad for name, p in module.named_parameters()}


@several
def test_unused_frozen_and_differently_ordered_parameters():
    rank, n = dist.get_rank(), dist.get_world_size()
    for sizes in ({}, {"bucket_bytes": 1, "first_bucket_bytes": 1}):
        torch.manual_seed(0)
        module = Branches()
        model = ddp.DDP(module, **sizes)
        inputs = torch.full((1, 2), float(rank + 1))
        # Rank 0 uses a, then b; rank 1 b, then a; the others b alone. Nobody uses c.
        names = ["ab", "ba", "b", "b"]
        model(inputs, names[rank]).sum().backward()
        expected = {name: torch.zeros(p.shape) for name, p in module.named_parameters()}
        for other in range(n):
            torch.manual_seed(0)
            copy = Branches()
            copy(torch.full((1, 2), float(other + 1)), names[other]).sum().backward()
            for name, grad in gradients_of(copy).items():
                if grad is not None:
                    expected[name] += grad / n
        for name, grad in gradients_of(module).items():
            if name.split(".")[1] in ("a", "b"):
                torch.testing.assert_close(grad, expected[name], msg=name)
            else:
                assert grad is None, name


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
def test_dtypes_do_not_share_a_bucket():
    rank, n = dist.get_rank(), dist.get_world_size()
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    module = nn.ParameterList(
        [torch.ones(3, dtype=d) for d in dtypes for _ in range(2)]
    )
    model = ddp.DDP(module)
    assert all(len({p.dtype for p in b.parameters}) == 1 for b in model.buckets)
    sum((p.float() * (rank + 1)).sum() for p in module).backward()
    for parameter in module:
        assert parameter.grad.dtype == parameter.dtype
        mean = torch.full((3,), (n + 1) / 2, dtype=parameter.dtype)
        torch.testing.assert_close(parameter.grad, mean)


class Complex(nn.Module):
    """Rank 0 uses the first two parameters, the others the first, nobody the last."""

    def __init__(self):
        super().__init__()
        start = complex(dist.get_rank(), 1)
        self.weights = nn.ParameterList([torch.full((2,), start) for _ in range(3)])

    def forward(self, factor):
        first, second, _ = self.weights
        value = (first * factor).real.sum()
        return value if dist.get_rank() else value + (second * 2).imag.sum()


@several
def test_complex_parameters():
    rank, n = dist.get_rank(), dist.get_world_size()
    module = Complex()
    model = ddp.DDP(module)
    first, second, unused = module.weights
    assert all(weight.eq(1j).all() for weight in module.weights)
    model(complex(rank + 1, rank)).backward()
    # For autograd the gradient of (w·z).real is the conjugate of z.
    mean = sum(complex(r + 1, -r) for r in range(n)) / n
    torch.testing.assert_close(first.grad, torch.full((2,), mean))
    torch.testing.assert_close(second.grad, torch.full((2,), 2j / n))
    assert unused.grad is None


@several
def test_tied_weights_are_sent_once():
    rank, n = dist.get_rank(), dist.get_world_size()
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    model = ddp.DDP(module)
    assert sum(len(b.parameters) for b in model.buckets) == 1
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(3))
    model(torch.full((1, 3), float(rank + 1))).sum().backward()
    # d/dW of sum(W W x) at W = 1 is 2 for each element, times x.
    torch.testing.assert_close(
        module[0].weight.grad, torch.full((3, 3), 2 * (n + 1) / 2)
    )


@several
def test_gradients_lie_in_memory_as_their_parameters_do():
    rank, n = dist.get_rank(), dist.get_world_size()
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model = ddp.DDP(module)
    images = torch.full((2, 3, 5, 5), rank + 1.0).to(memory_format=torch.channels_last)
    model(images).sum().backward()
    # Each weight meets 2 images, 9 places: its gradient is 18 times the pixel.
    expected = torch.full((4, 3, 3, 3), 18 * (n + 1) / 2)
    torch.testing.assert_close(module.weight.grad, expected, check_stride=False)
    assert module.weight.grad.is_contiguous(memory_format=torch.channels_last)


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


def test_a_module_with_nothing_to_train_is_refused(started):
    def wrap():
        for build in (ddp.HookedDDP, ddp.DDP):
            with pytest.raises(ValueError, match="Linear requires a gradient"):
                build(nn.Linear(2, 2).requires_grad_(False))

    started[2].run(wrap)


# -------------------------------------------------------------------- one step and many


@several
def test_accumulated_gradients_are_those_of_the_big_batch():
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = mlp().double()
    model = ddp.DDP(module, **SMALL)
    calls, all_reduce = [], dist.all_reduce

    def counting(*args, **kwargs):
        calls.append(args)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    try:
        for step in range(3):
            inputs, labels = batch_of("mlp", 4 * n, seed=step)
            with model.no_sync() if step < 2 else contextlib.nullcontext():
                loss = F.cross_entropy(model(inputs[rank::n].double()), labels[rank::n])
                (loss / 3).backward()
            assert len(calls) == (0 if step < 2 else len(model.buckets))
    finally:
        dist.all_reduce = all_reduce
    whole = mlp().double()
    whole.load_state_dict(module.state_dict())
    batches = [batch_of("mlp", 4 * n, seed=step) for step in range(3)]
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.cross_entropy(whole(inputs.double()), labels).backward()
    for made, expected in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(made.grad, expected.grad)


@on_ranks(2)
def test_buckets_are_as_large_as_torchs():
    layers = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(9)])
    sizes = [bucket.flat.nbytes >> 20 for bucket in ddp.DDP(layers).buckets]
    assert sizes == [4, 28, 4]  # at least 1 MiB, at least 25 MiB, and the rest


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
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model = ddp.DDP(module, bucket_bytes=10**6, first_bucket_bytes=10**6)
    inputs = torch.full((1, 2), rank + 1.0)
    with contextlib.suppress(RuntimeError):
        module[1](Fails.apply(module[0](inputs))).sum().backward()
        raise AssertionError("it did not fail")
    module.zero_grad()
    model(inputs).sum().backward()
    copy = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    copy.load_state_dict(module.state_dict())
    copy(torch.full((1, 2), (n + 1) / 2)).sum().backward()
    for made, expected in zip(module.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(made.grad, expected.grad)


def check_overlap():
    """The order of what happens in a backward pass of four layers, a bucket each."""
    module = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    model = ddp.DDP(module, bucket_bytes=1, first_bucket_bytes=1)
    events, all_reduce = [], dist.all_reduce
    for number, layer in enumerate(module):
        layer.weight.register_hook(lambda grad, n=number: events.append(f"grad {n}"))

    def recording(*args, **kwargs):
        events.append("send")
        return all_reduce(*args, **kwargs)

    dist.all_reduce = recording
    try:
        model(torch.ones(1, 2)).sum().backward()
    finally:
        dist.all_reduce = all_reduce
    return events


def test_buckets_leave_during_the_backward_pass(started):
    for events in started[2].run(check_overlap):
        assert events == [e for n in (3, 2, 1, 0) for e in (f"grad {n}", "send")]


def test_buckets_are_filled_as_in_pytorch(started):
    def sizes():
        model = ddp.DDP(mlp(), bucket_bytes=300, first_bucket_bytes=50)
        places = {p: i for i, p in enumerate(reversed(list(model.parameters())))}
        return [[places[p] for p in bucket.parameters] for bucket in model.buckets]

    nbytes = [4 * p.numel() for p in reversed(list(mlp().parameters()))]
    expected = costs.ddp_buckets(nbytes, cap=300, first_cap=50)
    assert started[2].run(sizes)[0] == expected and len(expected) > 2


# -------------------------------------------------------------------- buffers and state


def check_buffers(broadcast_buffers):
    rank = dist.get_rank()
    model = ddp.DDP(nn.BatchNorm1d(2), broadcast_buffers=broadcast_buffers)
    for _ in range(2):
        model(torch.full((3, 2), rank + 1.0)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.zeros(3, 2))
    return model.module.running_mean[0].item()


def test_buffers_come_from_rank_0_before_each_forward(started):
    # The mean moves by a tenth of the way to what a rank sees, from what rank 0 had.
    synced = started[3].run(check_buffers, True)
    assert synced == pytest.approx([0.19, 0.09 + 0.2, 0.09 + 0.3])
    own = started[3].run(check_buffers, False)
    assert own == pytest.approx([0.19 * r for r in (1, 2, 3)])


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


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_two_forwards_before_one_backward(started, sync, mode):
    """As with the discriminator of a GAN: buffers are written in between."""
    ours = started[2].run(gradients_of_two_forwards, ddp.DDP, sync, mode)
    torchs = started[2].run(gradients_of_two_forwards, TorchDDP, sync, mode)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other)


@on_ranks(2)
def test_state_dicts_have_no_prefix():
    torch.manual_seed(dist.get_rank())
    module = mlp()
    model = ddp.DDP(module)
    assert list(model.state_dict()) == list(module.state_dict())
    other = mlp()
    other.load_state_dict(model.state_dict())
    again = ddp.DDP(mlp())
    again.load_state_dict(other.state_dict())
    assert torch.equal(again.module[0].weight, module[0].weight)
