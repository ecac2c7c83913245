"""Models, and what trains them with each rung of ``from_scratch/fsdp``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_utils.from_scratch import fsdp

TorchDDP = nn.parallel.DistributedDataParallel


class Transformer(nn.Module):
    """A small language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
            for _ in range(3)
        )
        self.out = nn.Linear(8, 17, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden).mean(dim=1)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True))
            for c in (3, 5)
        )
        self.out = nn.Linear(5, 3)

    def forward(self, images):
        for layer in self.layers:
            images = layer(images)
        return self.out(images.mean(dim=(2, 3)))


class Perceptron(nn.Module):
    """Its layers have 56, 72 and 9 parameters: 3 and 4 ranks must pad."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.out = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows).tanh()
        return self.out(rows) * self.scale


MODELS = {"perceptron": Perceptron, "transformer": Transformer, "conv": Convolutions}


def batch_of(name, step, dtype=torch.float32):
    """This rank's batch."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    if name == "transformer":
        inputs = torch.randint(17, (4, 5), generator=generator)
    else:
        shape = (4, 3, 9, 9) if name == "conv" else (4, 6)
        inputs = torch.randn(shape, generator=generator).to(dtype)
    return inputs, torch.randint(3, (4,), generator=generator)


def new(name, dtype=torch.float32):
    """A model that starts elsewhere on every rank."""
    torch.manual_seed(dist.get_rank())
    return MODELS[name]().to(dtype)


SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAM = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})


class Job:
    """A model and an optimizer that train, whatever shards them."""

    def __init__(self, kind, name, optimizer=SGD, dtype=torch.float32, **options):
        self.kind, self.name, self.dtype = kind, name, dtype
        self.module = self.model = new(name, dtype)
        build, settings = optimizer
        if kind == "ddp":
            self.model = TorchDDP(self.module)
        elif kind == "fsdp":
            options = {"units": self.module.layers, **options}
            self.model = fsdp.FSDP(self.module, **options)
        if kind in ("ddp", "fsdp"):
            self.optimizer = build(self.model.parameters(), **settings)
        elif kind == "zero1":
            self.optimizer = fsdp.ShardedOptimizer(self.module, build, **settings)
        else:
            options = {"units": self.module.layers, **options, **settings}
            self.optimizer = fsdp.ShardedGradients(self.module, build, **options)

    def backward(self, step):
        inputs, labels = batch_of(self.name, step, self.dtype)
        F.cross_entropy(self.model(inputs), labels).backward()

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()
        return self

    def state(self):
        state = (self.model if self.kind == "fsdp" else self.module).state_dict()
        return {name: value.detach().clone() for name, value in state.items()}


def largest_difference(one, other):
    assert list(one) == list(other)
    return max((one[k].double() - other[k].double()).abs().max().item() for k in one)
