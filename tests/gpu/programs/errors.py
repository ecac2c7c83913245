"""What is said of wrong devices, shapes and generators."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from programs.basis import (
    GPU,
    Seen,
    error_of,
    on_gpu,
    program,
)


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
