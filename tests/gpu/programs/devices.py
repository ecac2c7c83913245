"""Where tensors are: factories, moves, views, modules, files."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import torch
from torch import nn

from programs.basis import (
    GPU,
    Seen,
    error_of,
    on_gpu,
    program,
    small_model,
    trained,
)


@program
def what_is_there() -> Seen:
    cuda = torch.cuda
    return {
        "available": cuda.is_available(),
        "initialized": cuda.is_initialized(),
        "current": cuda.current_device(),
        "name": type(cuda.get_device_name()),
        "capability": [type(n) for n in cuda.get_device_capability()],
        "memory": type(cuda.get_device_properties(0).total_memory),
        "free and all": [type(n) for n in cuda.mem_get_info()],
        "accelerator": torch.accelerator.current_accelerator(),
        "its index": torch.accelerator.current_device_index(),
        "bf16": cuda.is_bf16_supported(),
    }


@program
def factories() -> Seen:
    return {
        "zeros": torch.zeros(2, 3, device=GPU),
        "ones": torch.ones(2, device="cuda:0", dtype=torch.float64),
        "full": torch.full((2,), 7, device=torch.device(GPU)),
        "arange": torch.arange(5, device=GPU),
        "linspace": torch.linspace(0, 1, 5, device=torch.device("cuda", 0)),
        "eye": torch.eye(2, device=GPU, dtype=torch.bfloat16),
        "tensor": torch.tensor([[1, 2], [3, 4]], device=GPU),
        "empty": torch.empty(3, 4, device=GPU).shape,
        "by number": torch.zeros(1, device=0),
        "from an array": torch.as_tensor(np.arange(3.0), device=GPU),
        "triangle": torch.tril_indices(3, 3, device=GPU),
    }


@program
def factories_like_others() -> Seen:
    x = on_gpu(2, 3)
    return {
        "zeros_like": torch.zeros_like(x),
        "elsewhere": torch.ones_like(x, device="cpu"),
        "new_zeros": x.new_zeros(2),
        "new_full": x.new_full((2,), 3.0, dtype=torch.int64),
        "new_tensor": x.new_tensor([1.0, 2.0]),
        "full_like": torch.full_like(x, 2, dtype=torch.float16),
        "empty_like": torch.empty_like(x.t()).stride(),
    }


@program
def default_device() -> Seen:
    with torch.device(GPU):
        inside = [torch.zeros(2), nn.Linear(2, 2).weight.device, torch.arange(2)]
    torch.set_default_device(GPU)
    try:
        always = [torch.ones(2), torch.tensor(1.0), torch.get_default_device()]
    finally:
        torch.set_default_device(None)
    return {"inside": inside[0::2], "layer": inside[1], "set": always}


@program
def contexts() -> Seen:
    with torch.cuda.device(0):
        inside = torch.zeros(1, device=GPU).device
    with torch.cuda.device_of(on_gpu(1)):
        of = torch.cuda.current_device()
    torch.cuda.set_device("cuda:0")
    return {"device": inside, "device_of": of, "set": torch.cuda.current_device()}


@program
def spellings_of_a_move() -> Seen:
    x = torch.arange(4.0)
    there = x.to(GPU)
    return {
        "to": there,
        "cuda": x.cuda(),
        "cuda(0)": x.cuda(0),
        "to number": x.to(0),
        "with dtype": x.to(GPU, torch.float16),
        "like": x.to(there),
        "dtype stays": x.half().to(there.device).dtype,
        "back": [there.cpu(), there.to("cpu"), there.to(device="cpu", copy=True)],
        "same": [there.to(GPU) is there, there.cuda() is there, there.cpu() is there],
        "type": there.type(torch.float64),
    }


@program
def what_a_tensor_says() -> Seen:
    x = on_gpu(2, 2)
    return {
        "device": x.device,
        "is_cuda": [x.is_cuda, x.cpu().is_cuda, x.is_cpu],
        "get_device": [x.get_device(), x.cpu().get_device()],
        "type": x.type(),
        "storage": [x.untyped_storage().device, x.untyped_storage().nbytes()],
        "pinned": x.is_pinned(),
        "grad": x.requires_grad_().sum().grad_fn.name(),
    }


@program
def texts() -> Seen:
    x = torch.tensor([1.0, 2.5], device=GPU)
    layer = nn.Parameter(x)
    return {
        "tensor": repr(x),
        "parameter": repr(layer),
        "number": f"{x[1]:.2f}",
        "result": repr(layer * 2),
        "device": repr(x.device),
        "half": str(x.half()),
    }


@program
def to_python() -> Seen:
    x = torch.tensor([[1.5, 2.0], [3.0, 4.0]], device=GPU)
    return {
        "item": x[0, 0].item(),
        "list": x.tolist(),
        "float": [float(x[0, 1]), int(x[1, 0]), bool(x[1, 1] > 3)],
        "rows": [row.sum() for row in x],
        "numpy": x.cpu().numpy(),
        "forced": x.numpy(force=True),
        "in": 3.0 in x,
        "len": len(x),
    }


@program
def views() -> Seen:
    x = torch.zeros(4, 4, device=GPU)
    x.t()[0].fill_(2)
    x.view(-1)[5:7] = 1
    half = x[:, 2:]
    half += 1
    shared = half.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return {"whole": x, "part": half, "shared": shared, "copy": x.clone()}


@program
def indices() -> Seen:
    x = torch.arange(12.0).view(3, 4).to(GPU)
    y = x.clone()
    y[y > 6] = 0
    y[torch.tensor([0, 2])] += 1  # an index may be on the CPU
    y[0, torch.tensor([1], device=GPU)] = 9
    return {
        "mask": x[x > 5],
        "rows": x[torch.tensor([2, 0], device=GPU)],
        "cpu rows": x[torch.tensor([2, 0])],
        "list": x[[0, 1], [1, 2]],
        "written": y,
        "cpu by cpu": torch.arange(3)[torch.tensor([1])],
    }


@program
def assignments() -> Seen:
    x, here = torch.zeros(3, device=GPU), torch.arange(3.0)
    x.copy_(here)
    x[0] = torch.tensor(5.0)
    here[1:] = x[1:] * 2
    x.data = torch.ones(2, device=GPU)
    return {"gpu": x, "cpu": here, "shrunk": x.resize_(1).shape}


@program
def modules_move() -> Seen:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    weight = model[0].weight
    moved = model.to(GPU)
    return {
        "same module": moved is model,
        "same parameter": model[0].weight is weight,
        "devices": {str(x.device) for x in model.state_dict().values()},
        "half": {str(p.dtype) for p in model.half().parameters()},
        "back": {str(p.device) for p in model.cpu().parameters()},
        "cuda": next(nn.Linear(1, 1).cuda().parameters()).device,
        "empty": next(nn.Linear(1, 1, device="meta").to_empty(device=GPU).parameters())
        .device,
    }  # fmt: skip


@program
def tied_weights() -> Seen:
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    b.weight = a.weight
    model = nn.Sequential(a, b).to(GPU)
    model(torch.ones(1, 2, device=GPU)).sum().backward()
    return {
        "tied": a.weight is b.weight,
        "count": len(list(model.parameters())),
        "grad": a.weight.grad,
    }


@program
def copies() -> Seen:
    model = small_model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    same = torch.equal(model[2].weight, twin[2].weight)
    return {
        "device": twin[0].weight.device,
        "own": bool(model[0].weight.any()),
        "same": same,
    }


@program
def files() -> Seen:
    file = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device=GPU), "y": torch.ones(1)}, file)

    def load(**how: Any) -> Seen:
        file.seek(0)
        return torch.load(file, weights_only=True, **how)

    return {
        "as it was": load(),
        "on the cpu": load(map_location="cpu"),
        "by a map": load(map_location={"cuda:0": "cpu"}),
        "to the gpu": load(map_location=GPU),
        "too far": error_of(lambda: load(map_location="cuda:99")),
    }


@program
def state_of_an_optimizer() -> Seen:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = parts()
    trained(model, optimizer, on_gpu(2, 8))
    other, restored = parts()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].cpu()
    restored.load_state_dict(saved)
    return {
        name: [str(x.device), x.dtype]
        for name, x in restored.state[next(other.parameters())].items()
    }
