"""What from_scratch/ refuses in words: models that differ, copies, sparse gradients.

Each test goes through all wrappers and functions that send more than one tensor.
"""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from course_utils.from_scratch import ddp, fsdp, sgd


@pytest.fixture
def two(started):
    return started[2]


def zero1(module, **options):
    return fsdp.ShardedOptimizer(module, torch.optim.SGD, lr=1.0, **options)


def zero2(module, **options):
    return fsdp.ShardedGradients(module, torch.optim.SGD, lr=1.0, **options)


WRAPPERS = {
    "HookedDDP": ddp.HookedDDP,
    "DDP": ddp.DDP,
    "ShardedOptimizer": zero1,
    "ShardedGradients": zero2,
    "FSDP": fsdp.FSDP,
}
STARTS = {
    "broadcast_module": ddp.broadcast_module,
    "broadcast_parameters": sgd.broadcast_parameters,
    **WRAPPERS,
}
AVERAGES = {
    "ddp.average_gradients": ddp.average_gradients,
    "sgd.average_gradients": sgd.average_gradients,
    "sgd.average_gradients_naive": sgd.average_gradients_naive,
    "weighted": lambda module: sgd.average_gradients_weighted(module, 3),
}


# ---------------------------------------------------------------- models that differ
def made(difference):
    """A module with `a`, `b` and a buffer, and one difference on rank 1."""
    rank, module = dist.get_rank(), nn.Module()
    found = difference if rank else None
    shape = (2, 3) if found == "shape" else (3, 2)  # as many elements
    dtype = torch.float64 if found == "dtype" else torch.float32
    b = torch.ones(shape, dtype=dtype)
    parts = {"a": torch.ones(6), "b": b}
    names = {"order": ["b", "a"], "missing": ["a"]}.get(found, ["a", "b"])
    if difference == "order":  # of one shape: else it would be noticed by that
        parts["b"] = parts["b"].flatten()
    for name in names:
        module.register_parameter(name, nn.Parameter(parts[name]))
    if found == "frozen":
        module.b.requires_grad_(False)
    for parameter in module.parameters():
        parameter.grad = None if found == "no gradient" else torch.ones_like(parameter)
    module.register_buffer("mean", torch.zeros(3 if found == "buffer" else 2))
    return module


def refusal(call, *args):
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "none"


def refusals(calls, difference):
    return {name: refusal(call, made(difference)) for name, call in calls.items()}


@pytest.mark.parametrize(
    ("difference", "calls", "words"),
    [
        ("shape", {**STARTS, **AVERAGES}, "b is float32 [3, 2]"),
        ("dtype", {**STARTS, **AVERAGES}, "but float64 [3, 2]"),
        ("missing", {**STARTS, **AVERAGES}, "but missing on rank 1"),
        ("order", {**STARTS, **AVERAGES}, "b"),
        ("frozen", STARTS, "b is float32 [3, 2] (requires_grad) on rank 0, but"),
        ("buffer", STARTS, "mean is float32 [2] on rank 0, but float32 [3] on rank 1"),
        ("no gradient", {"": ddp.average_gradients}, "gradient of a is float32 [6] on"),
    ],
)
def test_every_rank_is_told_how_the_models_differ(two, difference, calls, words):
    """Else values end in other parameters, or gloo ends the process."""
    for said in two.run(refusals, calls, difference):
        for name, message in said.items():
            assert words in message and "rank 1" in message, (name, message)


def other_settings():
    rank, weight = dist.get_rank(), torch.arange(6.0).view(2, 3)
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module = nn.Module()
    module.where = nn.Parameter(weight.t().contiguous().t() if rank else weight)
    calls = {
        "bucket_bytes": lambda: ddp.DDP(nn.Linear(2, 2), bucket_bytes=5 + rank),
        "prefetch": lambda: fsdp.FSDP(nn.Linear(2, 2), prefetch=rank),
        "unit": lambda: zero2(layers, units=[*layers][: rank + 1]),
        "where": lambda: ddp.DDP(module),
    }
    return {name: refusal(call) for name, call in calls.items()}


def test_every_rank_is_told_which_setting_differs(two):
    for said in two.run(other_settings):
        for name, message in said.items():
            assert name in message and "rank 1" in message, message


def freeze_later():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in module:  # all ranks freeze, one after another
        sgd.average_gradients(module)
        layer.requires_grad_(False)
    sgd.average_gradients(module)


def test_ranks_may_change_a_model_together(two):
    two.run(freeze_later)


# ------------------------------------------------------------------------------ copies
def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved_and_loaded,
    "to another process": ForkingPickler.dumps,
}


def check_whole(name):
    wrapped = WRAPPERS[name](nn.Linear(4, 2))
    for how, copied in COPIES.items():
        with pytest.raises(TypeError, match="would average nothing.*state_dict"):
            copied(wrapped)
            raise AssertionError(how)
    if name == "FSDP":  # its module has nothing inside that could be copied
        with pytest.raises(TypeError, match="Copy a module before it is sharded"):
            copy.deepcopy(wrapped.module)


def check_inside(name):
    """Copies of the module inside are plain modules, and can be wrapped again."""
    rank, inputs = dist.get_rank(), torch.full((3, 4), 1.0 + dist.get_rank())
    for how in ("deepcopy", "pickle", "torch.save"):
        module = nn.Linear(4, 2)
        WRAPPERS[name](module)
        copied = COPIES[how](module)
        averaged = AveragedModel(module)
        if rank == 0:  # it sends nothing, so rank 0 can be alone
            copied(inputs).sum().backward()
            torch.optim.SGD(copied.parameters(), lr=0.1).step()
            averaged(inputs).sum().backward()
            averaged.update_parameters(module)
        dist.barrier()
        for build in (ddp.DDP, zero1):
            again = build(COPIES[how](copied))
            if build is ddp.DDP:
                again(inputs).sum().backward()
                assert again.module.weight.grad.eq(3 * 1.5).all(), how


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_copy_is_refused_and_one_of_the_module_inside_is_not(two, name):
    two.run(check_whole, name)
    if name != "FSDP":
        two.run(check_inside, name)


# ------------------------------------------------------------------- sparse gradients
def embedding_of_ones():
    module = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(module.weight)
    return module


def stepped(name):
    """The embedding's rows, summed, after a step with rank's own row and row 3."""
    module, rows = embedding_of_ones(), torch.tensor([dist.get_rank(), 3])
    wrapped = WRAPPERS[name](module)
    if name == "FSDP":
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
        wrapped(rows).sum().backward()
        optimizer.step()
        return wrapped.state_dict()["weight"].sum(1).tolist()
    module.zero_grad()
    module(rows).sum().backward()
    wrapped.step()
    return module.weight.sum(1).tolist()


@pytest.mark.parametrize("name", ["ShardedOptimizer", "ShardedGradients", "FSDP"])
def test_flat_gradients_take_sparse_ones(two, name):
    assert two.run(stepped, name) == [[1.0, 1.0, 2.0, 0.0]] * 2


def sparse_refused():
    def backward(module):
        module(torch.tensor([1])).sum().backward()
        return module

    def embedding():
        return nn.Sequential(embedding_of_ones(), nn.Linear(2, 1))

    calls = [
        lambda name=name: backward(WRAPPERS[name](embedding()))
        for name in ("HookedDDP", "DDP")
    ]
    calls += [lambda f=f: f(backward(embedding())) for f in AVERAGES.values()]
    for call in calls:
        with pytest.raises(TypeError, match="gradient of 0.weight is sparse.*sparse=F"):
            call()


def test_the_others_refuse_sparse_gradients(two):
    two.run(sparse_refused)
