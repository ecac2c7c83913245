"""Bytes after each step, their peaks, and what happens when none are left."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from programs.basis import (
    GPU,
    MIB,
    Meter,
    Seen,
    error_of,
    program,
)


@program
def memory_of_a_tensor() -> Seen:
    read, seen = Meter(), {}
    x = torch.zeros(8 * MIB, device=GPU)
    seen["made"] = read()
    y = x[: 4 * MIB]
    seen["view"] = read()
    z = x + 1
    seen["sum"] = read()
    del x
    seen["view left"] = read()
    del y, z
    seen["deleted"] = read()
    return seen


@program
def memory_of_small_sizes() -> Seen:
    seen = {}
    for count in (0, 1, 127, 128, 129, 1000):
        read = Meter()
        x = torch.zeros(count, device=GPU)
        seen[str(count)] = read()
        del x
    return seen


@program
def memory_of_odd_sizes() -> Seen:
    seen = {}
    for size in (10.5, 11, 12):
        read = Meter()
        x = torch.zeros(int(size * MIB), device=GPU)
        seen[str(size)] = read()
        del x
    return seen


@program
def memory_of_a_chain() -> Seen:
    read, seen = Meter(), {}
    x = torch.zeros(4 * MIB, device=GPU, requires_grad=True)
    seen["leaf"] = read()
    y = x.exp().sin()
    seen["forward"] = read()
    y.sum().backward()
    seen["backward"] = read()
    del y
    seen["without graph"] = read()
    x.grad = None
    seen["without gradient"] = read()
    return seen


@program
def memory_without_gradients() -> Seen:
    read, seen = Meter(), {}
    x = torch.zeros(4 * MIB, device=GPU, requires_grad=True)
    with torch.no_grad():
        y = x.exp().sin()
    seen["no_grad"] = read()
    y = x.detach().exp_()
    seen["in place"] = read()
    del x, y
    seen["deleted"] = read()
    return seen


@program
def memory_of_dtypes() -> Seen:
    read, seen = Meter(), {}
    x = torch.zeros(4 * MIB, device=GPU)
    for name in ("half", "bfloat16", "double", "bool"):
        y = getattr(x, name)()
        seen[name] = read()
        del y
    return seen


@program
def memory_of_optimizers() -> Seen:
    seen = {}
    for kind, how in (("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {})):
        read = Meter()
        weight = nn.Parameter(torch.zeros(4 * MIB, device=GPU))
        optimizer = getattr(torch.optim, kind)([weight], foreach=False, **how)
        for step in range(2):
            (weight * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[f"{kind}{how}, step {step}"] = read()
        del weight, optimizer
    return seen


@program
def memory_of_a_layer() -> Seen:
    read, seen = Meter(), {}
    layer = nn.Linear(1024, 1024, bias=False).to(GPU)
    seen["layer"] = read()
    x = torch.ones(1024, 1024, device=GPU)
    y = layer(x).relu()
    seen["forward"] = read()
    y.sum().backward()
    del y
    seen["backward"] = read()[0]
    layer.zero_grad()
    seen["zero_grad"] = read()[0]
    return seen


@program
def memory_of_a_move() -> Seen:
    read, seen = Meter(), {}
    layer = nn.Linear(1024, 1024, bias=False).to(GPU)
    seen["there"] = read()
    layer.half()
    seen["half"] = read()
    layer.cpu()
    seen["back"] = read()
    return seen


@program
def memory_of_checkpoints() -> Seen:
    read, seen = Meter(), {}
    x = torch.zeros(4 * MIB, device=GPU, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin().sin()

    for name, run in (
        ("kept", block),
        ("recomputed", lambda x: checkpoint(block, x, use_reentrant=False)),
    ):
        y = run(x)
        seen[f"{name}, forward"] = read()
        y.sum().backward()
        seen[f"{name}, backward"] = read()
        del y
        x.grad = None
    return seen


@program
def memory_of_an_error() -> Seen:
    read = Meter()
    x = torch.zeros(4 * MIB, device=GPU)
    wrong = error_of(lambda: (x * 2) @ torch.ones(3))
    gc.collect()
    return {"error": wrong, "bytes": read()}


@program
def statistics() -> Seen:
    read = Meter()
    x = torch.zeros(4 * MIB, device=GPU)
    stats = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.current", "allocation.all.current", "num_ooms")
    free, total = torch.cuda.mem_get_info()
    del x
    return {
        "names": [name in stats for name in names],
        "reserved": torch.cuda.memory_reserved() >= torch.cuda.memory_allocated(),
        "free": 0 < free < total,
        "summary": "Allocated memory" in torch.cuda.memory_summary(),
        "as a device": torch.cuda.memory_allocated("cuda:0") - read.before,
        "accelerator": torch.accelerator.memory_allocated() - read.before,
    }


@program
def out_of_memory() -> Seen:
    read = Meter()
    kept = torch.zeros(MIB, device=GPU)
    kind, text = error_of(lambda: torch.empty(2**40, device=GPU))
    after = [read(), (kept + 1).sum()]
    by_op = error_of(lambda x=kept: x[None].expand(2**20, MIB) + 1)
    del kept
    gc.collect()
    return {
        "class": kind,
        "is a RuntimeError": issubclass(torch.OutOfMemoryError, RuntimeError),
        "text": text.partition(" has a total capacity")[0],
        "goes on": after,
        "by an op": by_op[0],
        "afterwards": read()[0],
    }
