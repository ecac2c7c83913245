"""A GPU for each rank: what only two or more real GPUs can show.

The tests on ranks run on two ranks without GPUs as well, as further cases.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import error_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrun import printed_under_torchrun

from course_utils import virtual_gpus
from course_utils.ranks import Ranks
from course_utils.ranks.launch import launch

MOST = 4  # ranks: more say nothing new


@pytest.fixture(
    scope="module", params=["nccl", pytest.param("gloo", marks=pytest.mark.thorough)]
)
def team(request) -> Iterator[tuple[Ranks, str]]:
    """Ranks with a GPU each, or two on the CPU; and the type of their device."""
    real = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if request.param == "nccl" and real < 2:
        pytest.skip(f"it needs two GPUs, and there are {real} here")
    n = min(real, MOST) if request.param == "nccl" else 2
    with Ranks(n, backend=request.param, quiet=True, timeout=120) as ranks:
        yield ranks, "cuda" if request.param == "nccl" else "cpu"


def summed(device: str) -> list[Any]:
    """How far our rings are from the backend's all-reduce, and where all of it is."""
    from course_utils.from_scratch import collectives, ring

    torch.manual_seed(dist.get_rank())
    x = torch.randn(1001).to(device)
    expected = x.clone()
    dist.all_reduce(expected)
    apart = []
    for function in (
        collectives.all_reduce,
        ring.all_reduce_ring,
        ring.all_reduce_pipelined,
        ring.all_reduce_tree,
    ):
        y = x.clone()
        function(y)
        apart.append((y - expected).abs().max().item())
    return [max(apart), str(x.device)]


def test_our_rings_give_what_the_backend_gives(team):
    ranks, device = team
    found = ranks.run(summed, device)
    assert max(apart for apart, _ in found) < 1e-4
    if device == "cuda":
        assert [place for _, place in found] == [f"cuda:{i}" for i in range(ranks.n)]


def trained(device: str, kind: str) -> list[list[float]]:
    """The parameters after three steps with a share of each batch."""
    from course_utils.from_scratch.ddp import DDP
    from course_utils.from_scratch.fsdp import FSDP

    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    wrappers = {
        "alone": lambda model: model,
        "torch": DistributedDataParallel,
        "ours": DDP,
        "fsdp": lambda model: FSDP(model, [model[2]]),
    }
    model = wrappers[kind](bare)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        batch = torch.randn(4 * dist.get_world_size(), 8)
        mine = (
            batch
            if kind == "alone"
            else batch[dist.get_rank() :: dist.get_world_size()]
        )
        optimizer.zero_grad()
        model(mine.to(device)).square().mean().backward()
        optimizer.step()
    state = model.state_dict() if kind == "fsdp" else bare.state_dict()
    return [x.flatten().tolist() for x in state.values()]


@pytest.mark.parametrize("kind", ["torch", "ours", "fsdp"])
def test_many_ranks_train_as_one_process(team, kind):
    ranks, device = team
    alone = ranks.run(trained, device, "alone")[0]
    for found in ranks.run(trained, device, kind):
        for one, other in zip(found, alone, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_ranks_choose_nccl_by_themselves(gpus):
    n = min(gpus, MOST)
    with Ranks(n, quiet=True) as ranks:
        assert {status.backend for status in ranks.status()} == {"nccl"}
        assert ranks.run(torch.cuda.current_device) == list(range(n))


def overlaps(kind: str) -> bool:
    """Does an all-reduce of DDP run while kernels of the backward pass do?"""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from course_utils.from_scratch.ddp import DDP

    bare = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda()
    model = DDP(bare) if kind == "ours" else DistributedDataParallel(bare)
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
    with profile(activities=[ProfilerActivity.CUDA]) as log:
        model(x).sum().backward()
        torch.cuda.synchronize()
    sent, computed = [], []
    for event in log.events():
        if event.device_type == DeviceType.CUDA:
            kernels = sent if "nccl" in event.name.lower() else computed
            kernels.append((event.time_range.start, event.time_range.end))
    assert sent and computed
    return any(a < d and c < b for a, b in sent for c, d in computed)


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_ddp_sends_while_it_computes(gpus, kind):
    with Ranks(2, quiet=True, timeout=120) as ranks:
        assert all(ranks.run(overlaps, kind))


def test_virtual_gpus_step_aside(gpus, capsys):
    with virtual_gpus(2) as there:
        assert there.real
        x = torch.ones(1000, device="cuda:1")
        assert there.memory()["cuda:1"].now >= 4000
    assert "step aside" in capsys.readouterr().out
    assert x.device.index == 1


def two_devices() -> dict[str, Any]:
    """What goes from GPU to GPU, and what may not."""
    torch.manual_seed(0)
    one, other = (torch.randn(4, 4).to(f"cuda:{i}") for i in (0, 1))
    model = nn.DataParallel(nn.Linear(4, 2).to("cuda:0"), device_ids=[0, 1])
    model(one).sum().backward()
    split = nn.Linear(4, 4).to("cuda:1")(nn.Linear(4, 4).to("cuda:0")(one).to("cuda:1"))
    return {
        "copied": (one.to("cuda:1") + other).sum().item(),
        "add": error_of(lambda: one + other),
        "mm": error_of(lambda: one @ other),
        "cat": error_of(lambda: torch.cat([one, other])),
        "linear": error_of(lambda: model.module(other)),
        "conv": error_of(lambda: nn.Conv2d(4, 1, 1).cuda(0)(other[None, ..., None])),
        "grad": error_of(lambda: setattr(model.module.weight, "grad", other[:2])),
        "bias": model.module.bias.grad.tolist(),
        "split": [str(split.device), round(split.sum().item(), 4)],
    }


def test_two_real_gpus_are_as_two_virtual_ones(gpus):
    real = two_devices()
    with virtual_gpus(gpus, force=True):
        virtual = two_devices()
    for name in ("copied", "split"):
        assert real.pop(name) == pytest.approx(virtual.pop(name), abs=1e-3)
    assert real == virtual


def test_two_virtual_gpus_answer():
    with virtual_gpus(2, force=True):
        assert two_devices()["bias"] == [4.0, 4.0]


@pytest.mark.parametrize(
    "line",
    [
        "train_ddp --epochs 1",
        "collectives",
        "train_fsdp --steps 4 --every 2",
        "train_tp --steps 4 --every 2",
        "train_pipeline --steps 4 --every 2",
    ],
)
def test_a_script_runs_under_torchrun_with_a_gpu_for_each_rank(gpus, tmp_path, line):
    worker, *more = line.split()
    given = ["--backend", "nccl", *more]
    printed = printed_under_torchrun(2, worker, *given, tmp=tmp_path)
    launched = launch(worker, *more, nproc=2, quiet=True, backend="nccl")
    assert len(launched.output.splitlines()) == len(printed)
