"""Virtual GPUs in ranks: gloo, DDP, and threads that wait for another rank."""

import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from ranks_support import settle
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils.ranks import Ranks
from course_utils.virtual_gpus import virtual_gpus

# The ranks get the functions below as they are, and need not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def two():
    with Ranks(2, output="grouped", quiet=True, timeout=60) as ranks:
        settle(ranks)  # DDP imports as much as an optimizer
        yield ranks


def trained(place: str) -> list:
    """The parameters after two steps, in which each rank has other rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(place)
    ids = None if place == "cpu" else [dist.get_rank()]
    parallel = DistributedDataParallel(model, device_ids=ids)
    for step in range(2):
        parallel.zero_grad()
        x = torch.full((2, 4), dist.get_rank() + step + 1.0)
        parallel(x.to(place)).pow(2).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert model[0].weight.grad.device == torch.device(place)
    return [p.tolist() for p in model.parameters()]


def sum_and_train() -> list:
    plain, rank = trained("cpu"), dist.get_rank()
    with virtual_gpus(2, force=True):
        torch.cuda.set_device(rank)
        x = torch.ones(3, device="cuda") * (rank + 1)
        dist.all_reduce(x)
        return [str(x.device), x.tolist(), trained(f"cuda:{rank}") == plain]


def test_ddp_trains_as_on_the_cpu(two):
    assert two.run(sum_and_train) == [
        ["cuda:0", [3, 3, 3], True],
        ["cuda:1", [3, 3, 3], True],
    ]


def compute_while_a_thread_waits() -> float | None:
    sign, total = torch.zeros(1), None
    if dist.get_rank() == 1:  # it comes when rank 0 has computed
        dist.recv(sign, 0)
        dist.monitored_barrier()
    else:
        with virtual_gpus(1, force=True):
            waits = threading.Thread(target=dist.monitored_barrier)
            waits.start()
            time.sleep(0.2)
            total = (torch.ones(3, device="cuda") + 1).sum().item()
            dist.send(sign, 1)
            waits.join()
    return total


def test_other_threads_go_on_while_one_waits_for_a_rank(two):
    assert two.run(compute_while_a_thread_waits) == [6.0, None]


def devices_in_callbacks() -> dict[str, list[str]]:
    seen = {}

    def note(name: str):
        def callback(future):
            y = future.value()[0]
            made = (y * 2, torch.zeros_like(y), torch.zeros(2, device=y.device))
            seen[name] = [str(x.device) for x in made]
            return y

        return callback

    with virtual_gpus(2, force=True):
        for name in ("then", "add_done_callback"):
            x = torch.ones(4, device="cuda:1")
            if dist.get_rank() == 1:
                time.sleep(0.3)
            future = dist.all_reduce(x, async_op=True).get_future()
            after = getattr(future, name)(note(name))
            (after or future).wait()
            dist.barrier()
    return seen


def test_callbacks_in_threads_of_gloo(two):
    right = ["cuda:1"] * 3
    seen = {"then": right, "add_done_callback": right}
    assert two.run(devices_in_callbacks) == [seen] * 2
