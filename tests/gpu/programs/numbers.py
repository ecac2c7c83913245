"""What is computed: training, layers, derivatives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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
