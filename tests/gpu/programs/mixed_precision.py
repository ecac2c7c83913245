"""Data types under autocast, and scaled gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from programs.basis import (
    GPU,
    Seen,
    error_of,
    on_gpu,
    program,
    small_model,
    what_it_says,
)


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
