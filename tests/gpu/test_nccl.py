"""One rank with a GPU: nccl, gloo with CUDA tensors, torch's wrappers and ours.

A group of one sends nothing to anybody, but all of the code for GPUs runs: nccl itself,
streams, hooks, buckets, shards.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.ranks import Ranks, RanksError

# What gloo does with CUDA tensors, as the documentation of torch.distributed says.
GLOO_WITH_GPU = ("all_reduce", "broadcast", "barrier")
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(place) -> Iterator[Run]:
    """Call a function on the rank, with the type of its device; its result."""
    backend, device = place
    with Ranks(1, backend=backend, quiet=True, timeout=120) as ranks:
        yield lambda function, *args: ranks.run(function, device, *args)[0]


# --- collectives ----------------------------------------------------------------------


def collective(device: str, name: str) -> list[float]:
    """What one collective makes of 1, 2, 3."""
    x, out = torch.tensor([1.0, 2.0, 3.0], device=device), None
    if name == "barrier":
        dist.barrier()
    elif name == "asynchronous":
        dist.all_reduce(x, async_op=True).wait()
    elif name == "object":
        found = [None]
        dist.all_gather_object(found, x.tolist())
        return found[0]
    elif name == "all_gather":
        out = [torch.zeros_like(x)]
        dist.all_gather(out, x)
    elif name in (
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
    ):
        out = torch.zeros_like(x)
        getattr(dist, name)(out, x)
    elif name == "half":
        x = x.bfloat16()
        dist.all_reduce(x, dist.ReduceOp.MAX)
    else:
        getattr(dist, name)(x, *([0] if name in ("broadcast", "reduce") else []))
    result = x if out is None else out[0] if isinstance(out, list) else out
    assert result.device.type == device
    return result.tolist()


@pytest.mark.parametrize(
    "name",
    [*GLOO_WITH_GPU, "asynchronous", "reduce", "all_gather", "all_gather_into_tensor",
     "reduce_scatter_tensor", "all_to_all_single", "object", "half"],
)  # fmt: skip
def test_a_collective_of_one_rank_returns_what_it_was_given(run, place, name):
    if place == ("gloo", "cuda") and name not in GLOO_WITH_GPU:
        pytest.skip("gloo is documented for fewer collectives on GPUs")
    assert run(collective, name) == [1.0, 2.0, 3.0]


def ours(device: str) -> list[Any]:
    """Our collectives and rings, on one rank."""
    from course_utils.from_scratch import collectives, ring, sgd

    x = torch.arange(5.0, device=device)
    for call in (
        collectives.broadcast,
        collectives.all_reduce,
        collectives.all_reduce_naive,
        ring.all_reduce_ring,
        ring.all_reduce_pipelined,
        ring.all_reduce_tree,
        ring.all_reduce_halving_doubling,
    ):
        call(x)
    collectives.barrier()
    return [x.tolist(), x.device.type, sgd.sum_over_ranks(2.0, 3.0, device=device)]


def test_our_collectives_work_on_tensors_there(run, place):
    assert run(ours) == [[0, 1, 2, 3, 4], place[1], [2, 3]]


# --- wrappers -------------------------------------------------------------------------


def plain(model: nn.Module) -> nn.Module:
    return model


def torch_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def torch_fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (1,))
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def our_ddp(model: nn.Module) -> nn.Module:
    from course_utils.from_scratch.ddp import DDP

    return DDP(model, bucket_bytes=4096, first_bucket_bytes=1024)


def our_hooked_ddp(model: nn.Module) -> nn.Module:
    from course_utils.from_scratch.ddp import HookedDDP

    return HookedDDP(model)


def our_fsdp(model: nn.Module) -> nn.Module:
    from course_utils.from_scratch.fsdp import FSDP

    return FSDP(model, [model[2]])


WRAPPERS = {
    wrapper.__name__: wrapper
    for wrapper in (plain, torch_ddp, torch_fsdp2, our_ddp, our_hooked_ddp, our_fsdp)
}
SHARDING = ("torch_fsdp2", "our_fsdp")


def trained(device: str, name: str, half: bool = False) -> dict[str, Tensor]:
    """The parameters after three steps, by name."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4)
    bare = nn.Sequential(*layers).to(device)
    model = WRAPPERS[name](bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        x = torch.randn(16, 8).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = model.state_dict() if name in SHARDING else bare.state_dict()
    assert {x.device.type for x in state.values()} == {device}
    return {
        name: getattr(x, "full_tensor", lambda x=x: x)().cpu()
        for name, x in state.items()
    }


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "plain"])
def test_a_wrapped_model_trains_as_the_plain_one(run, place, name, half):
    if place == ("gloo", "cuda") and name in SHARDING:
        pytest.skip("gloo is not documented to share out CUDA tensors")
    expected, found = run(trained, "plain", half), run(trained, name, half)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-3)


def data_parallel_primitives(device: str) -> list[float]:
    """A batch whose gradients are averaged by hand; all gradients in one message."""
    from course_utils.from_scratch import sgd

    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    sgd.broadcast_parameters(model)
    model(torch.ones(3, 4, device=device)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    sgd.average_gradients(model)
    sgd.average_gradients_naive(model)
    after = [p.grad for p in model.parameters()]
    return [(a - b).abs().max().item() for a, b in zip(before, after, strict=True)]


def test_averaging_by_hand_changes_nothing_on_one_rank(run):
    assert run(data_parallel_primitives) == [0.0, 0.0]


# --- ranks ----------------------------------------------------------------------------


def test_ranks_choose_nccl_where_each_has_a_gpu(gpu):
    with Ranks(1, quiet=True) as ranks:
        assert ranks.status()[0].backend == "nccl"
        assert ranks.run(lambda: torch.cuda.current_device()) == [0]
    with Ranks(torch.cuda.device_count() + 1, quiet=True) as ranks:
        assert {status.backend for status in ranks.status()} == {"gloo"}


def test_a_rank_goes_on_after_an_error(place):
    backend, device = place
    with Ranks(1, backend=backend, quiet=True, timeout=120) as ranks:
        ranks.run_cell(f"x = torch.ones(3, device={device!r})")
        with pytest.raises(RanksError, match="mat1"):
            ranks.run_cell("torch.nn.Linear(2, 2)(torch.ones(1, 3))")
        ranks.run_cell("dist.all_reduce(x); total = x.sum().item()")
        assert ranks.run(lambda: __import__("__main__").total) == [3.0]


def test_a_rank_returns_tensors(place):
    backend, device = place
    with Ranks(1, backend=backend, quiet=True, timeout=120) as ranks:
        (x,) = ranks.run(lambda: torch.ones(2, device=device).cpu())
    assert x.tolist() == [1.0, 1.0]
