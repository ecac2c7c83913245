"""Pinned data, several devices, threads, and all names of `torch.cuda`."""

from __future__ import annotations

import contextlib
import inspect
import io
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from programs.basis import (
    GPU,
    Seen,
    error_of,
    on_gpu,
    program,
    small_model,
    trained,
    what_it_says,
)


@program
def pinned_memory() -> Seen:
    x = torch.arange(4.0)
    pinned = x.pin_memory()
    return {
        "pinned": [x.is_pinned(), pinned.is_pinned(), pinned.to(GPU).is_pinned()],
        "copy": pinned.to(GPU, non_blocking=True) + 1,
        "again": pinned.pin_memory() is pinned,
        "factory": torch.zeros(2, pin_memory=True).is_pinned(),
        "view": pinned[1:].is_pinned(),
        "clone": pinned.clone().is_pinned(),
        "device": pinned.device,
    }


@program
def data_loaders() -> Seen:
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    seen = []
    for x, y in DataLoader(data, batch_size=4, pin_memory=True):
        seen.append([x.is_pinned(), y.is_pinned(), x.to(GPU, non_blocking=True), y])
    return {"batches": seen}


@program
def data_parallel() -> Seen:
    model = nn.DataParallel(small_model(), device_ids=[0])
    seen = trained(model, torch.optim.SGD(model.parameters(), 0.1), on_gpu(5, 8))
    here = torch.randn(5, 8)
    return seen | {
        "from the cpu": model(here).detach(),
        "names": list(model.state_dict()),
        "output": model.output_device,
        "elsewhere": error_of(
            lambda: nn.DataParallel(nn.Linear(8, 1), device_ids=[0])(here.to(GPU))
        ),
    }


@program
def below_data_parallel() -> Seen:
    from torch.nn.parallel import comm, gather, parallel_apply, replicate, scatter

    model, x = small_model(), torch.randn(4, 8)
    parts = scatter(x, [0])
    replicas = replicate(model, [0])
    outputs = parallel_apply(replicas, [(part,) for part in parts], devices=[0])
    return {
        "parts": list(parts),
        "out": gather(outputs, 0).detach(),
        "to the cpu": gather(outputs, "cpu").device,
        "broadcast": comm.broadcast(x.to(GPU), [0])[0],
        "too far": error_of(lambda: nn.DataParallel(model, device_ids=[0, 99])),
    }


@program
def our_data_parallel() -> Seen:
    from course_utils.from_scratch.data_parallel import data_parallel

    model = small_model()
    out = data_parallel(model, torch.randn(4, 8), device_ids=[0])
    out.sum().backward()
    return {"out": out.detach(), "grad": model[0].weight.grad}


@program
def a_split_model() -> Seen:
    front, back = nn.Linear(4, 4).to(GPU), nn.Linear(4, 2)
    out = back(front(on_gpu(3, 4)).relu().cpu())
    out.sum().backward()
    return {
        "out": out.detach(),
        "gradients": [front.weight.grad, back.weight.grad],
        "wrong": error_of(lambda: back(front(on_gpu(3, 4)))),
    }


@program
def threads() -> Seen:
    from concurrent.futures import ThreadPoolExecutor

    x = on_gpu(4, 4)

    def work(i: int) -> list[Any]:
        return [(x * i).sum(), torch.zeros(1, device=GPU).device, x.requires_grad]

    with ThreadPoolExecutor(2) as pool:
        return {"seen": list(pool.map(work, range(3)))}


@program
def settings() -> Seen:
    matmul = torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):
        benchmark = torch.backends.cudnn.benchmark
    return {
        "built": torch.backends.cuda.is_built(),
        "tf32": matmul,
        "benchmark": benchmark,
        "precision": torch.get_float32_matmul_precision(),
        "graph": torch.cuda.is_current_stream_capturing(),
    }


def needs_nothing(name: str) -> bool:
    """Is this a function of torch.cuda that can be called without arguments?"""
    function = getattr(torch.cuda, name, None)
    if not inspect.isfunction(function) or name in ("cudart", "seed", "seed_all"):
        return False
    return all(
        parameter.default is not parameter.empty
        or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(function).parameters.values()
    )


CALLED = [name for name in torch.cuda.__all__ if needs_nothing(name)]
PLAIN = (bool, int, float, str, tuple, list, dict, type(None))


@program
def all_names() -> Seen:
    """Does what can be called without arguments answer?"""
    seen: Seen = {}
    for name in CALLED:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                value = getattr(torch.cuda, name)()
                seen[name] = type(value) if isinstance(value, PLAIN) else "an object"
            except Exception as error:
                seen[name] = what_it_says(error)
    return seen
