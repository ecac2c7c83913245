"""Small programs for one GPU, each of which says what it has seen.

They run on a virtual GPU and, where there is one, on a real one; `test_twins.py`
compares. A program returns a dictionary: what it looked at, and what was there. Tensors
count with device, dtype, shape and values, errors with class and first line.

A program makes its numbers on the CPU, because a GPU draws others, and keeps nothing.
Its sizes are such that memory is exact: CUDA's caching allocator does not split off
what is left of a block if that is 1 MiB or less (`memory_of_odd_sizes` shows it).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

GPU = "cuda"
MIB = 2**20 // 4  # elements of float32

Seen = dict[str, Any]
PROGRAMS: dict[str, Callable[[], Seen]] = {}


def program(function: Callable[[], Seen]) -> Callable[[], Seen]:
    """One of the programs, by its name."""
    PROGRAMS[function.__name__] = function
    return function


def on_gpu(*size: int) -> torch.Tensor:
    """Numbers that are the same on every GPU."""
    return torch.randn(size).to(GPU)


def error_of(call: Callable[[], object]) -> list[str]:
    """The class of its error, and the first line of what that says."""
    try:
        call()
    except Exception as error:
        return what_it_says(error)
    return ["no error"]


def what_it_says(error: Exception) -> list[str]:
    return [type(error).__name__, str(error).partition("\n")[0]]


class Meter:
    """Calls say how many bytes are on the GPU now, and were at most since the last."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self.before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def __call__(self) -> list[int]:
        now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return [now - self.before, peak - self.before]


def busy() -> None:
    """Give the GPU a tenth of a second of work; to a virtual one, of its model."""
    try:
        torch.cuda._sleep(200_000_000)
    except RuntimeError:  # not on virtual GPUs
        x = torch.zeros(256, 256, device=GPU)
        x @ x


def waits(call: Callable[[], object]) -> bool:
    """Does the host wait in this call until the GPU has done what it had to do?"""
    call()  # memory and kernels are there afterwards: to get them may wait, too
    torch.cuda.synchronize()
    busy()
    end = torch.cuda.Event()
    end.record()
    kept = call()
    waited = end.query()
    torch.cuda.synchronize()
    del kept
    return waited


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor
) -> Seen:
    """Losses of three steps, and the parameters and the state after them."""
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        out = model(*inputs)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = next(iter(optimizer.state.values()), {})
    return {
        "losses": losses,
        "parameters": [p.detach() for p in model.parameters()],
        "gradients": {str(p.grad.device) for p in model.parameters()},
        "state": {name: str(getattr(x, "device", x)) for name, x in state.items()},
    }


def small_model() -> nn.Module:
    """Two layers on the GPU."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(GPU)


# --- devices --------------------------------------------------------------------------


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


# --- errors ---------------------------------------------------------------------------


@program
def errors_of_two_devices() -> Seen:
    x, here = on_gpu(3, 3), torch.ones(3, 3)
    return {
        "add": error_of(lambda: x + here),
        "other way": error_of(lambda: here + x),
        "in place": error_of(lambda: here.add_(x)),
        "mm": error_of(lambda: x @ here),
        "mm, other way": error_of(lambda: here @ x),
        "bmm": error_of(lambda: torch.bmm(x[None], here[None])),
        "addmm": error_of(lambda: torch.addmm(x, x, here)),
        "mv": error_of(lambda: x @ here[0]),
        "dot": error_of(lambda: torch.dot(x[0], here[0])),
        "cat": error_of(lambda: torch.cat([x, here])),
        "stack": error_of(lambda: torch.stack([here, x])),
        "where": error_of(lambda: torch.where(here > 0, x, x)),
        "out": error_of(lambda: torch.add(x, 1, out=here)),
        "equal": error_of(lambda: torch.equal(x, here)),
        "allclose": error_of(lambda: torch.allclose(x, here)),
        "maximum": error_of(lambda: torch.maximum(x, here)),
        "lerp": error_of(lambda: torch.lerp(x, here, 0.5)),
        "addcmul": error_of(lambda: torch.addcmul(x, x, here)),
    }


@program
def errors_of_indices() -> Seen:
    x, here = on_gpu(3, 3), torch.zeros(3, 3)
    on_cpu, there = torch.tensor([[0, 1]]), torch.tensor([[0, 1]], device=GPU)
    return {
        "gpu index": error_of(lambda: here[there[0]]),
        "gather": error_of(lambda: x.gather(0, on_cpu)),
        "scatter": error_of(lambda: x.scatter(0, on_cpu, 1.0)),
        "index_select": error_of(lambda: x.index_select(0, on_cpu[0])),
        "index_add": error_of(lambda: x.index_add(0, on_cpu[0], x[:2])),
        "take": error_of(lambda: x.take(on_cpu)),
        "mask": error_of(lambda: x.masked_fill(here > 0, 1.0)),
        "masked_select": error_of(lambda: x.masked_select(here == 0)),
        "values": error_of(lambda: here.index_put((on_cpu[0],), x[:2])),
    }


@program
def errors_of_layers() -> Seen:
    x, image = torch.ones(2, 4), torch.ones(1, 3, 8, 8)
    sequence = torch.ones(3, 2, 4)
    moved = {
        "linear": (nn.Linear(4, 4), x),
        "without bias": (nn.Linear(4, 4, bias=False), x),
        "conv": (nn.Conv2d(3, 2, 3), image),
        "conv1d": (nn.Conv1d(4, 2, 1), torch.ones(1, 4, 4)),
        "transposed": (nn.ConvTranspose2d(3, 2, 3), image),
        "batch norm": (nn.BatchNorm2d(3), image),
        "layer norm": (nn.LayerNorm(4), x),
        "group norm": (nn.GroupNorm(3, 3), image),
        "embedding": (nn.Embedding(4, 4), torch.tensor([1])),
        "lstm": (nn.LSTM(4, 4), sequence),
        "gru": (nn.GRU(4, 4), sequence),
        "bilinear": (nn.Bilinear(4, 4, 2), (x, x)),
        "prelu": (nn.PReLU(), x),
    }

    def call(layer: nn.Module, inputs: Any) -> object:
        return layer(*inputs) if isinstance(inputs, tuple) else layer(inputs)

    def on(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(on, value))
        return value.to(GPU)

    seen = {}
    for name, (layer, inputs) in moved.items():
        far, near = copy.deepcopy(layer).to(GPU), layer
        seen[f"{name}, input here"] = error_of(lambda f=far, i=inputs: call(f, i))
        seen[f"{name}, layer here"] = error_of(lambda f=near, i=inputs: call(f, on(i)))
    return seen


@program
def errors_of_losses() -> Seen:
    x, here = on_gpu(2, 3), torch.ones(2, 3)
    classes = torch.tensor([0, 1])
    logits = x.log_softmax(1)
    return {
        "mse": error_of(lambda: F.mse_loss(x, here)),
        "l1": error_of(lambda: F.l1_loss(x, here)),
        "cross entropy": error_of(lambda: F.cross_entropy(x, classes)),
        "nll": error_of(lambda: F.nll_loss(logits, classes)),
        "weights": error_of(
            lambda: F.cross_entropy(x, classes.to(GPU), weight=torch.ones(3))
        ),
        "bce": error_of(lambda: F.binary_cross_entropy(x.sigmoid(), here)),
        "with logits": error_of(lambda: F.binary_cross_entropy_with_logits(x, here)),
        "smooth": error_of(lambda: F.smooth_l1_loss(x, here)),
        "kl": error_of(lambda: F.kl_div(logits, here)),
    }


@program
def errors_of_attention() -> Seen:
    q, here = on_gpu(1, 2, 4, 8), torch.ones(1, 2, 4, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).to(GPU)
    product = F.scaled_dot_product_attention
    return {
        "keys": error_of(lambda: product(q, here, q)),
        "queries": error_of(lambda: product(here, q, q)),
        "mask": error_of(lambda: product(q, q, q, torch.ones(4, 4))),
        "layer": error_of(lambda: attention(here[0], here[0], here[0])),
    }


@program
def numbers_on_the_cpu() -> Seen:
    x, number, whole = on_gpu(3), torch.tensor(0.5), torch.tensor(1)
    return {
        "add": x + number,
        "where": torch.where(x > 0, x, number),
        "filled": x.masked_fill(x > 0, number),
        "index": x[whole],
        "pow": x.abs() ** whole,
        "sum": sum([number, x.sum()]),
        "stack": error_of(lambda: torch.stack([x.sum(), number])),
        "clamp": error_of(lambda: x.clamp(min=number)),
        "cross entropy": error_of(lambda: F.cross_entropy(x, whole)),
        "gather": error_of(lambda: x.gather(0, whole)),
        "in place": error_of(lambda: number.clone().add_(x.sum())),
        "lerp": torch.lerp(x, x, number),
    }


@program
def errors_of_gradients() -> Seen:
    weight = nn.Parameter(torch.ones(2, device=GPU))
    here = torch.ones(2, requires_grad=True)

    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.to("cpu")

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    return {
        "assigned": error_of(lambda: setattr(weight, "grad", torch.ones(2))),
        "to the cpu": error_of(lambda: setattr(here, "grad", torch.ones(2).to(GPU))),
        "given": error_of(lambda: (weight * 2).backward(torch.ones(2))),
        "function": error_of(lambda: Lost.apply(weight).sum().backward()),
        "a leaf": error_of(lambda: weight.add_(1)),
        "no grad": error_of(lambda: on_gpu(2).sum().backward()),
        "two times": error_of(lambda: [y := weight.exp().sum(), y.backward(),
                                       y.backward()]),
    }  # fmt: skip


@program
def errors_of_devices() -> Seen:
    x = on_gpu(2)
    return {
        "cuda(99)": error_of(lambda: x.cuda(99)),
        "factory": error_of(lambda: torch.zeros(1, device="cuda:99")),
        "from the cpu": error_of(lambda: torch.zeros(1).to("cuda:99")),
        "module": error_of(lambda: nn.Linear(2, 2).to("cuda:99")),
        "set_device": error_of(lambda: torch.cuda.set_device(99)),
        "properties": error_of(lambda: torch.cuda.get_device_properties(99)),
        "memory": error_of(lambda: torch.cuda.memory_allocated("cpu")),
        "no device": error_of(lambda: torch.zeros(1, device="gpu")),
        "numpy": error_of(x.numpy),
        "array": error_of(lambda: np.asarray(x)),
        "pin": error_of(x.pin_memory),
        "pinned factory": error_of(lambda: torch.zeros(1, device=GPU, pin_memory=True)),
        "to a list": error_of(lambda: torch.tensor([x, x])),
        "from_numpy": error_of(lambda: torch.from_numpy(x)),
    }


@program
def errors_of_generators() -> Seen:
    here, there = torch.Generator(), torch.Generator(GPU)
    return {
        "cpu's": error_of(lambda: torch.randn(2, device=GPU, generator=here)),
        "gpu's": error_of(lambda: torch.randn(2, generator=there)),
        "in place": error_of(lambda: on_gpu(2).normal_(generator=here)),
        "permutation": error_of(lambda: torch.randperm(3, generator=there)),
        "device": there.device,
    }


@program
def errors_of_shapes() -> Seen:
    x = on_gpu(2, 3)
    return {
        "mm": error_of(lambda: x @ x),
        "add": error_of(lambda: x + on_gpu(4)),
        "view": error_of(lambda: x.view(4)),
        "linear": error_of(lambda: nn.Linear(4, 1).to(GPU)(x)),
        "dtypes": error_of(lambda: x @ x.double().t()),
        "half": error_of(lambda: nn.Linear(3, 1).to(GPU)(x.half())),
        "index": error_of(lambda: x[5]),
        "item": error_of(x.item),
        "cross entropy": error_of(
            lambda: F.cross_entropy(x, torch.zeros(3, dtype=torch.long, device=GPU))
        ),
    }


@program
def errors_of_sequences() -> Seen:
    words, lengths = on_gpu(2, 3, 4), torch.tensor([3, 1])
    pack = nn.utils.rnn.pack_padded_sequence
    packed = pack(words, lengths, batch_first=True)
    lstm = nn.LSTM(4, 5, batch_first=True).to(GPU)
    out, _ = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
    state = (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5))
    return {
        "lengths": error_of(lambda: pack(words, lengths.to(GPU))),
        "state": error_of(lambda: lstm(words, state)),
        "packed": packed.data.device,
        "sizes": packed.batch_sizes.device,
        "out": out.detach(),
    }


# --- numbers --------------------------------------------------------------------------


@program
def sgd() -> Seen:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return trained(model, optimizer, on_gpu(5, 8))


@program
def adam() -> Seen:
    model = small_model()
    return trained(model, torch.optim.Adam(model.parameters(), 1e-2), on_gpu(5, 8))


@program
def adamw_in_one_kernel() -> Seen:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    return trained(model, optimizer, on_gpu(5, 8))


@program
def clipped() -> Seen:
    model = small_model()
    model(on_gpu(5, 8)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {"norm": norm, "gradients": [p.grad for p in model.parameters()]}


@program
def schedules() -> Seen:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        trained(model, optimizer, on_gpu(5, 8))
        schedule.step()
        average.update_parameters(model)
    return {"lr": schedule.get_last_lr(), "mean": list(average.module.parameters())}


@program
def images() -> Seen:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).to(GPU)
    seen = trained(model, torch.optim.SGD(model.parameters(), 0.1), on_gpu(4, 3, 8, 8))
    return seen | {"statistics": model[1].state_dict()}


@program
def channels_last() -> Seen:
    x = on_gpu(2, 3, 4, 4).to(memory_format=torch.channels_last)
    conv = nn.Conv2d(3, 4, 3).to(GPU, memory_format=torch.channels_last)
    y = conv(x).detach()
    last = torch.channels_last
    return {"out": y, "stays": [t.is_contiguous(memory_format=last) for t in (x, y)]}


@program
def transformers() -> Seen:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(GPU)
    seen = trained(layer, torch.optim.SGD(layer.parameters(), 0.1), on_gpu(2, 4, 8))
    with torch.no_grad():
        return seen | {"eval": layer.eval()(on_gpu(2, 4, 8))}


@program
def recurrent_layers() -> Seen:
    model = nn.LSTM(4, 6, num_layers=2, batch_first=True).to(GPU)
    return trained(model, torch.optim.SGD(model.parameters(), 0.1), on_gpu(2, 5, 4))


@program
def attention() -> Seen:
    q, k, v = on_gpu(3, 2, 2, 4, 8)
    product = F.scaled_dot_product_attention
    q.requires_grad_()
    product(q, k, v, is_causal=True).sum().backward()
    return {
        "plain": product(q, k, v).detach(),
        "causal": product(q, k, v, is_causal=True).detach(),
        "mask": product(q, k, v, torch.eye(4, device=GPU, dtype=torch.bool)).detach(),
        "grad": q.grad,
    }


@program
def embeddings() -> Seen:
    table = nn.Embedding(6, 3, padding_idx=0).to(GPU)
    out = table(torch.tensor([[0, 1], [1, 5]], device=GPU))
    out.sum().backward()
    return {"out": out.detach(), "grad": table.weight.grad}


@program
def losses() -> Seen:
    x, y = on_gpu(4, 3), on_gpu(4, 3)
    classes = torch.tensor([0, 2, 1, 1], device=GPU)
    return {
        "cross entropy": F.cross_entropy(x, classes),
        "smoothed": F.cross_entropy(x, classes, label_smoothing=0.1),
        "mse": F.mse_loss(x, y),
        "huber": F.huber_loss(x, y),
        "bce": F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        "kl": F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        "cosine": F.cosine_similarity(x, y),
    }


@program
def reductions() -> Seen:
    x = on_gpu(3, 4)
    return {
        "sum": [x.sum(), x.sum(0), x.bool().sum()],
        "mean": x.mean(1, keepdim=True),
        "max": list(x.max(1)),
        "argmax": x.argmax(),
        "std": x.std(),
        "norm": x.norm(),
        "cumsum": x.cumsum(1),
        "logsumexp": x.logsumexp(0),
        "any": [x.any(), (x > 9).all()],
        "median": x.median(),
    }


@program
def sorted_and_counted() -> Seen:
    x = torch.tensor([3, 1, 2, 3, 1], device=GPU)
    return {
        "sort": list(x.sort(stable=True)),
        "topk": x.float().topk(2).values,
        "unique": list(x.unique(return_counts=True)),
        "nonzero": (x > 1).nonzero(),
        "bincount": x.bincount(),
        "histogram": x.float().histc(3),
        "repeat": x.repeat_interleave(2),
        "searched": torch.searchsorted(x.sort().values, 2),
        "one hot": F.one_hot(x),
    }


@program
def scattered() -> Seen:
    index = torch.tensor([[0, 1, 0], [2, 1, 0]], device=GPU)
    zeros, source = torch.zeros(3, 3, device=GPU), on_gpu(2, 3)
    return {
        "scatter_add": zeros.scatter_add(0, index, source),
        "gather": zeros.gather(0, index),
        "index_add": zeros.index_add(0, index[0], on_gpu(3, 3)),
        "amax": zeros.scatter_reduce(0, index, source, "amax"),
        "put": zeros.index_put((index[0],), source[0], accumulate=True),
    }


@program
def linear_algebra() -> Seen:
    x = on_gpu(4, 4)
    square = x @ x.t() + 4 * torch.eye(4, device=GPU)
    return {
        "einsum": torch.einsum("ij,kj->ik", x, x),
        "inverse": torch.linalg.inv(square),
        "solve": torch.linalg.solve(square, x),
        "cholesky": torch.linalg.cholesky(square),
        "singular": torch.linalg.svdvals(square),
        "det": torch.linalg.det(square),
        "fft": torch.fft.fft(x[0]).abs(),
    }


@program
def resized() -> Seen:
    x = torch.arange(16.0).view(1, 1, 4, 4).to(GPU)
    return {
        "nearest": F.interpolate(x, scale_factor=2),
        "bilinear": F.interpolate(x, size=3, mode="bilinear"),
        "padded": F.pad(x, (1, 0, 0, 1), mode="reflect"),
        "pooled": F.avg_pool2d(x, 2),
        "unfolded": F.unfold(x, 2),
    }


@program
def dtypes_of_results() -> Seen:
    x, half = on_gpu(2), on_gpu(2).half()
    whole = torch.tensor([1, 2], device=GPU)
    seen = {
        "half + float": half + x,
        "half + number": half + 1.5,
        "whole / whole": whole / whole,
        "whole + bool": whole + (whole > 1),
        "sum of bools": (whole > 1).sum(),
        "mean of half": half.mean(),
        "bf16 x half": x.bfloat16() * half,
        "double": x.double() * 1.5,
        "complex": torch.complex(x, x),
    }
    return {name: y.dtype for name, y in seen.items()}


@program
def whole_numbers_in_products() -> Seen:
    x = torch.ones(2, 2, dtype=torch.int64, device=GPU)
    return {"mm": error_of(lambda: x @ x)}


@program
def derivatives() -> Seen:
    x = on_gpu(3).requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    across = torch.ones(3, requires_grad=True)
    (across.to(GPU) * 2).cpu().sum().backward()
    return {
        "first": first.detach(),
        "second": second,
        "across": across.grad,
        "jacobian": torch.func.jacrev(torch.sin)(on_gpu(2)),
        "vmap": torch.func.vmap(torch.dot)(on_gpu(2, 3), on_gpu(2, 3)),
    }


@program
def hooks() -> Seen:
    model, seen = small_model(), []
    model[0].register_forward_hook(lambda m, i, out: seen.append(out.device))
    model[2].register_full_backward_hook(lambda m, i, o: seen.append(o[0].device))
    model[0].weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.shape)
    )
    x = on_gpu(2, 8).requires_grad_()
    x.register_hook(lambda grad: grad * 0)
    model(x).sum().backward()
    return {"seen": seen, "grad": x.grad}


@program
def recomputed() -> Seen:
    model, x = small_model(), on_gpu(4, 8).requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        model(x).sum().backward()
    return {"input": x.grad, "parameters": [p.grad for p in model.parameters()]}


@program
def inference() -> Seen:
    model = small_model()
    with torch.inference_mode():
        y = model(on_gpu(2, 8))
    return {
        "out": y,
        "is_inference": y.is_inference(),
        "error": error_of(lambda: y * nn.Parameter(torch.ones(4, device=GPU))),
        "in place": error_of(lambda: y.add_(1)),
    }


@program
def scripts() -> Seen:
    layer = torch.jit.trace(nn.Linear(3, 2).to(GPU), on_gpu(1, 3))
    return {"out": layer(on_gpu(2, 3)).detach(), "device": layer.weight.device}


# --- memory ---------------------------------------------------------------------------


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


# --- what waits -----------------------------------------------------------------------


@program
def waiting_for_values() -> Seen:
    x = torch.arange(8.0, device=GPU)
    mask = x > 3
    calls: dict[str, Callable[[], object]] = {
        "item": lambda: x[0].item(),
        "float": lambda: float(x[0]),
        "bool": lambda: bool(mask[0]),
        "list": x.tolist,
        "cpu": x.cpu,
        "text": lambda: str(x),
        "nonzero": mask.nonzero,
        "mask": lambda: x[mask],
        "where": lambda: torch.where(mask),
        "unique": x.unique,
        "equal": lambda: torch.equal(x, x),
        "allclose": lambda: torch.allclose(x, x),
        "bincount": lambda: x.long().bincount(),
        "synchronize": torch.cuda.synchronize,
    }
    return {name: waits(call) for name, call in calls.items()}


@program
def running_ahead() -> Seen:
    x, index = torch.ones(8, 8, device=GPU), torch.arange(3, device=GPU)
    mask, layer = x > 0, nn.Linear(8, 8).to(GPU)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x).sum().backward()
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: x + 1,
        "matmul": lambda: x @ x,
        "sum": x.sum,
        "zeros": lambda: torch.zeros(8, device=GPU),
        "fill": lambda: x.fill_(1.0),
        "element": lambda: x[0, 0].fill_(1.0),
        "index": lambda: x[index],
        "masked_fill": lambda: x.masked_fill(mask, 1.0),
        "where": lambda: torch.where(mask, x, x),
        "sort": x.sort,
        "topk": lambda: x.topk(2),
        "clone": x.clone,
        "backward": lambda: layer(x).sum().backward(),
        "step": optimizer.step,
        "clip": lambda: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
        "shape": lambda: x[x.shape[0] - 1],
        "event": lambda: torch.cuda.Event().record(),
        "query": lambda: torch.cuda.current_stream().query(),
    }
    return {name: waits(call) for name, call in calls.items()}


@program
def waiting_for_copies() -> Seen:
    size = 2 * MIB
    there = torch.zeros(size, device=GPU)
    pageable, pinned = torch.zeros(size), torch.zeros(size).pin_memory()
    index, at = torch.zeros(2, dtype=torch.long), torch.zeros(2, device=GPU)
    calls: dict[str, Callable[[], object]] = {
        "pinned, non_blocking": lambda: there.copy_(pinned, non_blocking=True),
        "pinned": lambda: there.copy_(pinned),
        "pageable, non_blocking": lambda: there.copy_(pageable, non_blocking=True),
        "pageable": lambda: there.copy_(pageable),
        "to, pinned": lambda: pinned.to(GPU, non_blocking=True),
        "to pinned, non_blocking": lambda: pinned.copy_(there, non_blocking=True),
        "to pinned": lambda: pinned.copy_(there),
        "to pageable": lambda: pageable.copy_(there),
        "to the cpu, non_blocking": lambda: there.to("cpu", non_blocking=True),
        "on the gpu": lambda: there.copy_(there + 1),
        "from a list": lambda: torch.tensor([1.0, 2.0], device=GPU),
        "an index from the cpu": lambda: at[index],
        "a number from the cpu": lambda: at + torch.tensor(1.0),
        "fill from a number": lambda: at.fill_(torch.tensor(1.0)),
    }
    return {name: waits(call) for name, call in calls.items()}


# --- automatic mixed precision --------------------------------------------------------


def dtypes_under_autocast(dtype: torch.dtype) -> Seen:
    """The dtype of the result of many functions, or the error."""
    x, half = on_gpu(4, 4).abs(), on_gpu(4, 4).abs().to(dtype)
    image, sequence = on_gpu(1, 4, 8, 8), on_gpu(2, 3, 4)
    classes = torch.tensor([0, 1, 2, 3], device=GPU)
    layers = {
        "linear": nn.Linear(4, 4),
        "layer norm": nn.LayerNorm(4),
        "rms norm": nn.RMSNorm(4),
        "gelu": nn.GELU(),
        "attention": nn.MultiheadAttention(4, 2, batch_first=True),
    }
    nn.ModuleList(layers.values()).to(GPU)
    calls: dict[str, Callable[[], Any]] = {
        "mm": lambda: x @ x,
        "bmm": lambda: torch.bmm(x[None], x[None]),
        "addmm": lambda: torch.addmm(x, x, x),
        "einsum": lambda: torch.einsum("ij,jk->ik", x, x),
        "conv": lambda: F.conv2d(image, image),
        "softmax": lambda: half.softmax(1),
        "log_softmax": lambda: half.log_softmax(1),
        "exp": lambda: half.exp(),
        "log": lambda: half.log(),
        "pow": lambda: half**2,
        "sum": lambda: half.sum(),
        "prod": lambda: half.prod(),
        "cumsum": lambda: half.cumsum(0),
        "norm": lambda: half.norm(),
        "mean": lambda: half.mean(),
        "relu": lambda: half.relu(),
        "sigmoid": lambda: half.sigmoid(),
        "tanh": lambda: half.tanh(),
        "add": lambda: half + x,
        "mul": lambda: half * half,
        "cat": lambda: torch.cat([half, x]),
        "stack": lambda: torch.stack([half, x]),
        "addcmul": lambda: torch.addcmul(half, half, x),
        "dot": lambda: torch.dot(half[0], x[0]),
        "rsqrt": lambda: half.rsqrt(),
        "erfinv": lambda: half.erfinv(),
        "mse": lambda: F.mse_loss(half, x),
        "l1": lambda: F.l1_loss(half, half),
        "cross entropy": lambda: F.cross_entropy(half, classes),
        "bce": lambda: F.binary_cross_entropy(half.sigmoid(), half.sigmoid()),
        "with logits": lambda: F.binary_cross_entropy_with_logits(half, half.sigmoid()),
        "cosine": lambda: F.cosine_similarity(half, half),
        "cdist": lambda: torch.cdist(half, half),
        "interpolate": lambda: F.interpolate(image.to(dtype), scale_factor=2),
        "max_pool": lambda: F.max_pool2d(image.to(dtype), 2),
        "avg_pool": lambda: F.avg_pool2d(image.to(dtype), 2),
        "dropout": lambda: F.dropout(half, 0.5),
        "argmax": lambda: half.argmax(),
        "double": lambda: x.double() @ x.double(),
        **{name: lambda f=layer: f(x) for name, layer in layers.items()},
        "attention": lambda: layers["attention"](sequence, sequence, sequence)[0],
        "product": lambda: F.scaled_dot_product_attention(*[sequence[None]] * 3),
    }  # fmt: skip
    seen: Seen = {}
    with torch.autocast(GPU, dtype):
        for name, call in calls.items():
            try:
                seen[name] = call().dtype
            except RuntimeError as error:
                seen[name] = what_it_says(error)
    return seen


@program
def autocast_to_half() -> Seen:
    return dtypes_under_autocast(torch.float16)


@program
def autocast_to_bfloat16() -> Seen:
    return dtypes_under_autocast(torch.bfloat16)


@program
def autocast_in_volumes() -> Seen:
    x = on_gpu(1, 1, 4, 4, 4).half()
    with torch.autocast(GPU):
        return {"avg_pool3d": F.avg_pool3d(x, 2).dtype}


@program
def autocast_on_and_off() -> Seen:
    x, here = on_gpu(2, 2), torch.ones(2, 2)
    with torch.autocast(GPU):
        inside = [x @ x, here @ here]
        asked = [torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")]
        default = torch.get_autocast_dtype(GPU)
        with torch.autocast(GPU, enabled=False):
            off = x @ x
    with torch.autocast("cpu"):
        other = [(x @ x).dtype, (here @ here).dtype]
    return {
        "inside": [y.dtype for y in inside],
        "asked": asked,
        "default": default,
        "off": off.dtype,
        "cpu's": other,
        "after": (x @ x).dtype,
        "wrong": error_of(lambda: torch.autocast("gpu")),
    }


@program
def scaled_gradients() -> Seen:
    model, scaler = small_model(), torch.amp.GradScaler(GPU, init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scales = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        with torch.autocast(GPU):
            loss = model(torch.ones(2, 8, device=GPU)).sum()
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "state": scaler.state_dict(), "model": model[2].bias}


@program
def trained_in_half() -> Seen:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.autocast(GPU, torch.bfloat16):
        loss = model(on_gpu(4, 8)).float().square().mean()
    loss.backward()
    optimizer.step()
    kinds = {str(p.grad.dtype) for p in model.parameters()}
    return {"loss": loss.detach().bfloat16(), "gradients": kinds}


# --- random numbers -------------------------------------------------------------------


@program
def seeds() -> Seen:
    def draw() -> torch.Tensor:
        return torch.rand(4, device=GPU)

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.cuda.manual_seed(3)
    again = draw()
    torch.cuda.manual_seed_all(4)
    other = draw()
    return {
        "again": torch.equal(first, again),
        "goes on": not torch.equal(first, second),
        "other": not torch.equal(first, other),
        "seed": torch.cuda.initial_seed(),
        "range": bool(((first >= 0) & (first < 1)).all()),
    }


@program
def random_states() -> Seen:
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device=GPU)
    torch.cuda.set_rng_state(state)
    second = torch.rand(4, device=GPU)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(9, device=GPU)
        after = torch.cuda.get_rng_state()
    return {
        "again": torch.equal(first, second),
        "dtype": state.dtype,
        "device": state.device,
        "length": len(state),
        "all": len(torch.cuda.get_rng_state_all()) == torch.cuda.device_count(),
        "forked": torch.equal(after, torch.cuda.get_rng_state()),
    }


@program
def generators() -> Seen:
    one, other = (torch.Generator(GPU).manual_seed(5) for _ in "12")
    first = torch.randn(3, device=GPU, generator=one)
    second = torch.randn(3, device=GPU, generator=other)
    mixed = torch.randperm(5, device=GPU, generator=one)
    return {
        "same": torch.equal(first, second),
        "seed": one.initial_seed(),
        "permutation": mixed.sort().values,
        "kind": isinstance(one, torch.Generator),
    }


@program
def two_generators() -> Seen:
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    torch.rand(5, device=GPU)
    return {"the cpu's is its own": torch.equal(first, torch.rand(3))}


@program
def dropout() -> Seen:
    x = torch.ones(10_000, device=GPU)
    kept = F.dropout(x, 0.25)
    return {
        "three of four": abs((kept > 0).float().mean().item() - 0.75) < 0.05,
        "scale": kept.max(),
        "eval": torch.equal(F.dropout(x, 0.25, training=False), x),
        "normal": torch.randn(10_000, device=GPU).mean().abs().item() < 0.1,
        "ints": torch.randint(3, (99,), device=GPU).unique(),
        "multinomial": torch.multinomial(torch.tensor([0.0, 1.0], device=GPU), 1),
    }


# --- streams and events ---------------------------------------------------------------


@program
def a_side_stream() -> Seen:
    side, x = torch.cuda.Stream(), torch.ones(1000, device=GPU)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        current = torch.cuda.current_stream()
        y.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    return {
        "sum": (y + 1).sum(),
        "device": side.device,
        "inside": current == side,
        "kind": isinstance(side, torch.cuda.Stream),
        "default again": torch.cuda.current_stream() == torch.cuda.default_stream(),
        "priority": torch.cuda.Stream(priority=-1).priority,
    }


@program
def streams_differ() -> Seen:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    return {"same": one == other, "default": one == torch.cuda.default_stream()}


@program
def events() -> Seen:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
    plain = torch.cuda.Event()
    early = error_of(lambda: start.elapsed_time(end))
    fresh = plain.query()
    start.record()
    busy()
    end.record()
    running = end.query()
    end.synchronize()
    plain.record()
    plain.synchronize()
    return {
        "not recorded": early,
        "fresh": fresh,
        "running": running,
        "done": end.query(),
        "time": start.elapsed_time(end) > 0.1,
        "without timing": error_of(lambda: plain.elapsed_time(end)),
    }


@program
def events_between_streams() -> Seen:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.zeros(100, device=GPU)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        x += 1
        event.record()
    torch.cuda.current_stream().wait_event(event)
    x *= 3
    recorded = torch.cuda.current_stream().record_event()
    recorded.synchronize()
    return {"done": [recorded.query(), side.query()], "value": x.sum()}


@program
def prefetched() -> Seen:
    """As published input pipelines do it: the next batch comes on a side stream."""
    batches = [torch.full((MIB,), float(i)).pin_memory() for i in range(3)]
    side, sums, coming = torch.cuda.Stream(), [], None
    for batch in [*batches, None]:
        torch.cuda.current_stream().wait_stream(side)
        ready, coming = coming, None
        if batch is not None:
            with torch.cuda.stream(side):
                coming = batch.to(GPU, non_blocking=True)
        if ready is not None:
            ready.record_stream(torch.cuda.current_stream())
            sums.append(ready.mean())
    return {"sums": sums}


# --- data, several devices, all names -------------------------------------------------


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
