"""Whole models on virtual GPUs: the numbers of the CPU, code as tutorials write it."""

import copy
import gc

import pytest
import torch
import torch.cuda.comm
import torch.nn.functional as F
import torchvision
from thorough import thorough_after
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.parallel import gather, parallel_apply, replicate, scatter
from torchvision.models.resnet import Bottleneck, ResNet

from course_utils import virtual_gpus

ONE = torch.device("cuda:1")


@pytest.fixture
def gpus():
    with virtual_gpus(4, force=True) as on:
        yield on


@pytest.fixture(autouse=True)
def reproducible():
    # With two threads, some CPUs give a backward pass other last bits each time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def train(model, batches, *, lr=0.01, devices=("cpu", "cpu"), optimizer="SGD") -> list:
    """A few steps; returns the losses."""
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=lr)
    losses = []
    for x, y in batches:
        made.zero_grad()
        loss = F.cross_entropy(model(x.to(devices[0])), y.to(devices[1]))
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses


def batches_of(*shape: int, classes: int, count: int = 2) -> list:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(shape, generator=generator),
            torch.randint(classes, shape[:1], generator=generator),
        )
        for _ in range(count)
    ]


def assert_equal_parameters(model: nn.Module, reference: nn.Module) -> None:
    here, there = reference.state_dict(), model.state_dict()
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert torch.equal(there[name].cpu(), value), name


# --- numerics -------------------------------------------------------------------------


class ModelParallelResNet(ResNet):
    """The first half of a small ResNet on one GPU, the second on another."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(Bottleneck, [1, 1, 1, 1], num_classes=10)
        self.second = second
        self.seq1 = nn.Sequential(
            self.conv1, self.bn1, self.relu, self.maxpool, self.layer1, self.layer2
        ).to(first)
        self.seq2 = nn.Sequential(self.layer3, self.layer4, self.avgpool).to(second)
        self.fc.to(second)

    def forward(self, x):
        x = self.seq2(self.seq1(x).to(self.second))
        return self.fc(x.view(x.size(0), -1))


def test_a_split_resnet_trains_as_on_the_cpu(gpus):
    reference = ModelParallelResNet("cpu", "cpu")
    torch.manual_seed(0)
    model = ModelParallelResNet("cuda:0", "cuda:1")
    batches = batches_of(2, 3, 32, 32, classes=10)
    expected = train(reference, batches)
    gpus.clear()
    losses = train(model, batches, devices=("cuda:0", "cuda:1"))
    assert losses == expected
    assert_equal_parameters(model, reference)
    between = [t for t in gpus.transfers if "cpu" not in (t.source, t.destination)]
    assert [(t.source, t.destination, t.bytes, t.phase) for t in between] == [
        ("cuda:0", "cuda:1", 2 * 512 * 4 * 4 * 4, "forward"),
        ("cuda:1", "cuda:0", 2 * 512 * 4 * 4 * 4, "backward"),
    ] * 2
    assert {t.module for t in between} == {"ModelParallelResNet"}
    assert gpus.memory()[0].now > 2**20
    del model
    gc.collect()
    assert gpus.memory().now == {f"cuda:{i}": 0 for i in range(4)}


class Translator(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.size(1), device=x.device
        )
        return self.head(self.encoder(self.embedding(x), mask).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.rnn = getattr(nn, kind)(
            16, 16, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.rnn(self.embedding(x))[0][:, -1])


# Name -> how to make the model, and its optimizer.
MODELS = {
    "transformer": (Translator, "AdamW"),
    "mobilenet_v3_small": (None, "SGD"),
    "LSTM": (Recurrent, "Adam"),
    "GRU": (Recurrent, "SGD"),
    "RNN": (Recurrent, "SGD"),
    "swin_t": (None, "SGD"),
    "densenet121": (None, "SGD"),
}


@pytest.mark.parametrize("name", thorough_after(3, MODELS))
def test_models_train_as_on_the_cpu(gpus, name):
    kind, optimizer = MODELS[name]
    if kind is None:
        reference = torchvision.models.get_model(name, num_classes=10)
        batches = batches_of(2, 3, 64, 64, classes=10)
    else:
        reference = kind(name)
        x = torch.randint(50, (3, 4, 7))
        batches = [(each, torch.tensor([0, 1, 2, 3])) for each in x]
    model = copy.deepcopy(reference).to(ONE)
    torch.manual_seed(1)
    expected = train(reference, batches, optimizer=optimizer)
    torch.manual_seed(1)
    assert train(model, batches, devices=(ONE, ONE), optimizer=optimizer) == expected
    assert_equal_parameters(model, reference)


def test_packed_sequences(gpus):
    lstm = nn.LSTM(4, 5, batch_first=True)
    twin = copy.deepcopy(lstm).to(ONE)
    x, lengths = torch.randn(3, 6, 4), torch.tensor([2, 6, 4])
    results = []
    for model, place in ((lstm, "cpu"), (twin, ONE)):
        packed = nn.utils.rnn.pack_padded_sequence(
            x.to(place), lengths, batch_first=True, enforce_sorted=False
        )
        out, kept = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        assert kept.device.type == "cpu"
        out.sum().backward()
        results.append((out.cpu(), model.weight_ih_l0.grad.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("SGD", {"lr": 0.1, "foreach": True}),
        ("Adam", {"fused": True}),
        ("AdamW", {"foreach": False, "amsgrad": True}),
        ("AdamW", {"foreach": True}),
        ("Adafactor", {"foreach": True}),
        ("NAdam", {}),
    ],
)
def test_optimizers_over_two_devices(gpus, name, options):
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = copy.deepcopy(reference)
    model[0].to(ONE)
    model[1].to("cuda:2")
    optimizers = [
        getattr(torch.optim, name)(one.parameters(), **options)
        for one in (reference, model)
    ]
    x = torch.randn(5, 4)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference(x).pow(2).sum().backward()
        model[1](model[0](x.to(ONE)).to("cuda:2")).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-6, atol=1e-6)
    made = optimizers[1]
    made.load_state_dict(copy.deepcopy(made.state_dict()))
    for p in model.parameters():
        for value in made.state[p].values():
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.device == p.device
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm.item() > 1e-3


# --- nn.DataParallel ------------------------------------------------------------------


class Counted(nn.Module):
    """Says how many rows each replica got, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
        self.register_buffer("scale", torch.ones(()))
        self.seen = []  # replicas share it

    def forward(self, x):
        self.seen.append((str(x.device), len(x)))
        assert self.scale.device == x.device
        return self.body(x) * self.scale


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_data_parallel_is_one_big_batch(gpus, n):
    reference = Counted()
    model = nn.DataParallel(copy.deepcopy(reference).cuda(), list(range(n)))
    x = torch.randn(30, 5)
    out, expected = model(x.cuda()), reference(x)
    assert out.device.index == 0
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    rows = {1: [30], 2: [15, 15], 3: [10, 10, 10], 4: [8, 8, 8, 6]}[n]
    assert sorted(model.module.seen) == [(f"cuda:{i}", r) for i, r in enumerate(rows)]
    out.pow(2).mean().backward()
    expected.pow(2).mean().backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert q.grad.device.index == 0
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-5, atol=1e-6)


def test_the_steps_of_data_parallel_are_in_the_log(gpus):
    model = nn.DataParallel(nn.Linear(256, 256).cuda(), [0, 1, 2])
    with gpus.record() as log:
        model(torch.randn(6, 256)).sum().backward()
    steps = [(t.kind, t.phase, t.source, t.destination, t.bytes) for t in log.transfers]
    weight, rows = (256 * 256 + 256) * 4, 2 * 256 * 4  # with the bias, in one piece
    assert steps == [
        *(("scatter", "forward", "cpu", f"cuda:{i}", rows) for i in range(3)),
        *(("broadcast", "forward", "cuda:0", f"cuda:{i}", weight) for i in (1, 2)),
        *(("gather", "forward", f"cuda:{i}", "cuda:0", rows) for i in (1, 2)),
        *(("scatter", "backward", "cuda:0", f"cuda:{i}", rows) for i in (1, 2)),
        *(("reduce", "backward", f"cuda:{i}", "cuda:0", weight) for i in (1, 2)),
    ]
    memory = gpus.memory()
    # Its gradients, and a copy of them in one piece, which is sent to cuda:0.
    assert memory[1].peak_by_kind["gradients"] > 1.9 * weight
    assert memory[1].now == memory[2].now == 0  # the replicas are gone


def test_the_functions_below_data_parallel(gpus):
    inputs = {"x": [torch.arange(6.0), "name"], "y": (torch.ones(6, 2),)}
    parts = scatter(inputs, [0, 1, 2])
    assert [part["x"][0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part["y"][0].device.index for part in parts] == [0, 1, 2]
    assert parts[1]["x"][1] == "name"
    model = nn.Linear(3, 2).cuda()
    chunks = scatter(torch.randn(4, 3).cuda().requires_grad_(), [0, 1])
    replicas = replicate(model, [0, 1])
    assert replicas[1].weight.device == ONE
    assert replicas[0].weight is not model.weight
    outputs = parallel_apply(replicas, [(chunk,) for chunk in chunks])
    whole = gather(outputs, 0)
    whole.sum().backward()
    assert whole.device.index == 0
    assert model.weight.grad.shape == (2, 3)
    assert gather(outputs, "cpu").device.type == "cpu"
    nested = gather([{"a": out} for out in outputs], 2)
    assert nested["a"].device.index == 2
    copies = torch.cuda.comm.broadcast(torch.ones(2).cuda(), [0, 1, 2])
    assert [x.device.index for x in copies] == [0, 1, 2]
    total = torch.cuda.comm.reduce_add([torch.ones(2, device=i) for i in range(3)])
    assert total.tolist() == [3, 3]


def test_data_parallel_elsewhere_and_its_errors(gpus):
    out = nn.DataParallel(nn.Linear(3, 3).cuda(1), [1, 2], output_device=3)(
        torch.randn(4, 3)
    )
    assert out.device.index == 3
    with pytest.raises(RuntimeError, match="must have its parameters and buffers"):
        nn.DataParallel(nn.Linear(3, 3))(torch.randn(4, 3))
    with torch.autocast("cuda"):
        half = nn.DataParallel(nn.Linear(3, 3).cuda())(torch.randn(8, 3))
    assert half.dtype == torch.float16

    norm = nn.BatchNorm1d(3).cuda()
    nn.DataParallel(norm)(torch.randn(8, 3)).sum().backward()
    assert norm.num_batches_tracked == 1  # replica 0 shares the buffers


# --- memory ---------------------------------------------------------------------------


def test_the_ledger_agrees_with_pytorchs_memory_tracker(gpus):
    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def parts(place):
        torch.manual_seed(0)
        model = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10).to(place)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x, y = torch.randn(2, 3, 32, 32).to(place), torch.tensor([1, 2]).to(place)
        return model, optimizer, x, y

    gpus.off()
    try:
        here = parts("cpu")
        tracker = MemTracker()
        tracker.track_external(*here)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                step(*here)
        found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        gpus.on()
    kinds = {str(kind.value): size for kind, size in found.items() if kind != "Total"}
    there = parts(ONE)
    for _ in range(2):
        step(*there)
    memory = gpus.memory()[1]
    blocks = 512 * 400  # every tensor is rounded up
    assert 0 <= memory.peak - found["Total"] < blocks
    assert 0 <= memory.peak_by_kind["parameters"] - kinds["Parameter"] < blocks
    assert 0 <= memory.peak_by_kind["gradients"] - kinds["Gradient"] < blocks
    parameters = memory.now_by_kind["parameters"]
    assert memory.now_by_kind["gradients"] == parameters
    assert 0 <= memory.now_by_kind["optimizer state"] - 2 * parameters < blocks
    assert memory.now == sum(memory.now_by_kind.values())
    assert memory.peak == sum(memory.peak_by_kind.values())


def test_out_of_memory_and_training_goes_on():
    def step(rows: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(rows, 256, device=ONE)).sum().backward()
        optimizer.step()

    with virtual_gpus(2, memory=["1 GiB", "4 MiB"], force=True) as gpus:
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        model.to(ONE)
        optimizer = torch.optim.Adam(model.parameters())
        step(64)
        used = gpus.memory()[1].now
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                step(4096)
            assert str(caught.value).startswith(
                "CUDA out of memory. Tried to allocate 4.00 MiB. GPU 1 has a total "
                "capacity of 4.00 MiB of which "
            )
            optimizer.zero_grad()
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 37.25 GiB"):
            torch.ones(10**10, device=ONE)  # before the host runs out, too
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.zeros(2**20).to(ONE)
        step(64)
        assert gpus.memory()[1].now == used
        assert torch.cuda.memory_stats(1)["num_ooms"] == 5
        assert gpus.memory()[1].peak <= 4 * 2**20


@pytest.mark.parametrize("used", [[1], [1, 2], [0, 2], [0, 1, 2]])
def test_replicas_that_are_not_used_have_zeros_on_their_gpus(gpus, used):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(ONE)
    replicas = replicate(model, [1, 2, 3])
    x = torch.ones(1, 2)
    outputs = [replicas[i](x.to(i + 1)).sum().to(ONE) for i in used]
    gpus.clear()
    sum(outputs).backward()
    expected = copy.deepcopy(model).cpu()
    expected.zero_grad()
    for _ in used:
        expected(x).sum().backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.grad.device == ONE
        assert torch.equal(p.grad.cpu(), q.grad)
    reduced = [t for t in gpus.transfers if t.kind == "reduce"]
    assert {t.source for t in reduced} == {"cuda:2", "cuda:3"}
