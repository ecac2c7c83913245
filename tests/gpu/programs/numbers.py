"""What is computed: training, layers, losses, derivatives."""

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
