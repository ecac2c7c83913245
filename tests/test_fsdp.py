"""``from_scratch/fsdp`` against PyTorch's DDP and FSDP2, and against one process.

The work is done in functions that every rank runs; an assertion that fails there ends
the test with the rank's own message.
"""

import contextlib
import sys
import types

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from ranks_support import ranks_up_to
from thorough import thorough_after
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils.from_scratch import fsdp
from course_utils.measure.tensor_bytes import record_tensor_bytes

# The ranks get the functions below as they are, and need not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TorchDDP = nn.parallel.DistributedDataParallel


@pytest.fixture(scope="module")
def started():
    """Ranks by their number: all tests share them."""
    with ranks_up_to(4, timeout=60, optimizers=True) as ranks:
        yield ranks


@pytest.fixture(params=thorough_after(2, [2, 4, 1, 3]))
def ranks(request, started):
    return started[request.param]


# ------------------------------------------------------------------ models and training


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


# ----------------------------------------------------------------------- the pieces


def check_pieces():
    rank, n = dist.get_rank(), dist.get_world_size()
    for shape in ((1,), (5,), (3, 4), (2, 2, 5), ()):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        mine = fsdp.shard(whole)
        assert len(mine) == -(-whole.numel() // n)
        assert mine.untyped_storage().nbytes() == 4 * len(mine), "a copy"
        everybodys = torch.cat([fsdp.shard(whole, r, n) for r in range(n)])
        assert torch.equal(everybodys[: whole.numel()], whole.flatten())
        assert everybodys[whole.numel() :].eq(0).all()
        assert torch.equal(fsdp.all_gather(mine), everybodys)
        assert torch.equal(fsdp.unshard(mine, shape), whole)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat = torch.arange(3 * n, dtype=dtype) * (rank + 1)
        before = flat.clone()
        part = fsdp.reduce_scatter(flat)
        total = torch.arange(3 * n, dtype=dtype) * sum(range(1, n + 1))
        assert torch.equal(part, total.view(n, 3)[rank])
        assert torch.equal(flat, before)
    assert fsdp.shard(nn.Parameter(torch.ones(3))).is_leaf, "autograd knows nothing"
    assert fsdp.padded(torch.ones(5), 4).tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*Flatten it"):
        fsdp.reduce_scatter(torch.ones(2, 3))
    with pytest.raises(ValueError, match="the last is rank 1"):
        fsdp.shard(torch.ones(3), 2, 2)
    if n > 1:
        with pytest.raises(ValueError, match=rf"padded\(flat, {n}\)"):
            fsdp.reduce_scatter(torch.ones(n + 1))


def test_the_pieces(ranks):
    ranks.run(check_pieces)


# --------------------------------------------------------------- equal to PyTorch's DDP

EVERY = {
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero2, one unit": ("zero2", {"units": ()}),
    "fsdp": ("fsdp", {}),
    "fsdp, one unit": ("fsdp", {"units": ()}),
    "fsdp, kept": ("fsdp", {"reshard_after_forward": False}),
    "fsdp, frugal": (
        "fsdp",
        {"reshard_after_forward": True, "prefetch": 0, "max_reduces": 0},
    ),
    "fsdp, piling up": ("fsdp", {"prefetch": 5, "max_reduces": None}),
}


def compare_with_ddp(name, optimizer, dtype, steps):
    expected = Job("ddp", name, optimizer, dtype).train(range(steps)).state()
    found = {}
    for what, (kind, options) in EVERY.items():
        state = Job(kind, name, optimizer, dtype, **options).train(range(steps)).state()
        found[what] = largest_difference(
            *(
                {k: v for k, v in s.items() if "running" not in k}
                for s in (state, expected)
            )
        )
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_rung_is_ddp_to_the_last_bit_on_2_ranks(started, name):
    for optimizer in (SGD, ADAM):
        options = (name, optimizer, torch.float32, 4)
        for found in started[2].run(compare_with_ddp, *options):
            assert found == dict.fromkeys(EVERY, 0.0)


@pytest.mark.parametrize("n", thorough_after(1, [4, 1, 3]))
def test_every_rung_is_ddp_on_other_numbers_of_ranks(started, n):
    # Adam divides a gradient by its size: one that is zero but for rounding becomes
    # plus or minus 1, in any order of adding up. With float64 that noise is below eps.
    # The second step is the first with a state of the optimizer and a known order.
    for name in MODELS:
        for found in started[n].run(compare_with_ddp, name, SGD, torch.float32, 2):
            assert max(found.values()) <= 1e-5, (name, found)
    options = ("transformer", ADAM, torch.float64, 2)
    for found in started[n].run(compare_with_ddp, *options):
        assert max(found.values()) <= 1e-5, found


def check_start():
    for kind in ("zero1", "zero2", "fsdp"):
        torch.manual_seed(dist.get_rank())
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        module[2].requires_grad_(False)
        module[1].running_mean.fill_(dist.get_rank())
        module.register_buffer("mask", torch.tensor([dist.get_rank() == 0]))
        # Columns, with gaps in memory: gloo does not send them as they are.
        table = torch.full((2, 3), float(dist.get_rank()))
        module.register_buffer("column", table[:, 1])
        module.frozen = nn.Parameter(torch.randn(4, 3)[:, 0], requires_grad=False)
        if kind == "fsdp":
            state = fsdp.FSDP(module, [module[0]]).state_dict()
        else:
            rung = fsdp.ShardedOptimizer if kind == "zero1" else fsdp.ShardedGradients
            rung(module, torch.optim.SGD, lr=0.1)
            state = module.state_dict()
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        for key, value in first.state_dict().items():
            assert torch.equal(state[key], value), (kind, key)
        assert state["mask"].all()
        assert state["column"].eq(0).all()
        assert torch.equal(state["frozen"], torch.randn(4, 3)[:, 0])


def test_all_start_from_rank_0(started):
    started[3].run(check_start)


# ------------------------------------------------------------- parameters of all kinds


class AdaptedLayer(nn.Module):
    """A frozen layer, used before and after a trained one, as in LoRA."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8)

    def forward(self, rows):
        return self.base(self.adapter(self.base(rows)).tanh()) + rows


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            [AdaptedLayer(), nn.Linear(8, 8).requires_grad_(False), AdaptedLayer()]
        )
        self.out = nn.Linear(8, 3)

    def forward(self, rows):
        rows = self.first(rows)
        for layer in self.layers:
            rows = layer(rows)
        return self.out(rows)


def check_frozen():
    MODELS["adapted"] = Adapted
    start = Job("ddp", "adapted", ADAM).state()
    expected = Job("ddp", "adapted", ADAM).train(range(3)).state()
    for kind in ("zero1", "zero2", "fsdp"):
        job = Job(kind, "adapted", ADAM).train(range(3))
        assert largest_difference(job.state(), expected) == 0, kind
        changed = {k for k, v in job.state().items() if not torch.equal(v, start[k])}
        assert changed == {
            f"{name}.{what}"
            for name in ("first", "layers.0.adapter", "layers.2.adapter", "out")
            for what in ("weight", "bias")
        }
    shards = dict(job.model.named_parameters())
    assert {k for k, v in shards.items() if v.requires_grad} == {
        "root",
        "layers.0",
        "layers.2",
    }
    assert {k for k, v in shards.items() if not v.requires_grad} == {
        "layers.0.frozen",
        "layers.1.frozen",
        "layers.2.frozen",
    }
    # While backward() is in the first layer, those behind it are gone, frozen or not.
    gathered = []
    job.module.layers[0].adapter.weight.register_hook(
        lambda _: gathered.append([f.name for f in job.model.flats if f.gathered])
    )
    job.backward(3)
    assert gathered == [["root", "layers.0", "layers.0.frozen"]]


def test_frozen_parameters_and_units_without_others(started):
    started[2].run(check_frozen)


class Choosy(nn.Module):
    """Uses the layers that it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for name in "abc"}
        )

    def forward(self, rows, names, halves=()):
        for name in names:
            rows = self.layers[name](rows)
        for name in halves:
            rows = F.linear(rows, self.layers[name][0].weight)
        return rows


class Half(nn.Module):
    """One of its two layers is not used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows):
        return self.used(rows)


def check_unused_with_zero1():
    """A gradient of zeros, also in a unit of which nothing was used."""
    torch.manual_seed(0)
    module = Choosy()
    before = {name: module.layers[name][0].weight.detach().clone() for name in "ab"}
    units = module.layers.values()
    rung = fsdp.ShardedOptimizer(
        module, torch.optim.AdamW, units=units, lr=0.1, weight_decay=0.5
    )
    module(torch.ones(1, 2), "a").sum().backward()
    rung.step()
    decayed = before["b"] * (1 - 0.1 * 0.5)
    torch.testing.assert_close(module.layers["b"][0].weight.detach(), decayed)
    assert not torch.equal(module.layers["a"][0].weight, before["a"])


def check_unused():
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = Choosy()
    torch.manual_seed(0)
    model = fsdp.FSDP(Choosy(), [], prefetch=2)  # all in one
    torch.manual_seed(0)
    module = Choosy()
    units = fsdp.FSDP(module, module.layers.values(), prefetch=2)
    for names in ("ac", "abc", "cb", "a", "aba"):  # also in another order, and twice
        for each in (whole, model, units):
            each.zero_grad()
        whole(torch.full((1, 2), (n + 1) / 2), names).sum().backward()
        for each in (model, units):
            each(torch.full((1, 2), rank + 1.0), names).sum().backward()
            assert not any(flat.gathered for flat in each.flats)
        grads = {name: p.grad for name, p in whole.named_parameters()}
        for flat in (*model.flats, *units.flats):
            expected = [grads[name] for name in flat.names]
            if all(grad is None for grad in expected):
                assert flat.shard.grad is None, flat.name
                continue
            made = flat.parts(fsdp.all_gather(flat.shard.grad))
            for grad, part in zip(expected, made, strict=True):
                zeros = torch.zeros(part.shape)
                torch.testing.assert_close(part, zeros if grad is None else grad)
    half = Half()
    model = fsdp.FSDP(half)
    model(torch.ones(1, 2)).sum().backward()
    (flat,) = model.flats
    parts = dict(
        zip(flat.names, flat.parts(fsdp.all_gather(flat.shard.grad)), strict=True)
    )
    assert parts["unused.weight"].eq(0).all() and parts["used.weight"].eq(1).all()
    assert not flat.gathered


def test_units_and_parameters_that_are_not_used(ranks):
    ranks.run(check_unused)


def test_with_zero1_what_is_not_used_has_a_gradient_of_zeros(started):
    started[2].run(check_unused_with_zero1)


def check_tied():
    module = Transformer()
    with pytest.raises(
        ValueError, match=r"embedding.weight of unit 'embedding' and .*"
    ):
        fsdp.FSDP(module, [module.embedding])
    with pytest.raises(ValueError, match="out.weight of unit 'out' are one parameter"):
        fsdp.FSDP(module, [module.embedding, module.out])
    fsdp.FSDP(module)  # now under both of its names
    with pytest.raises(RuntimeError, match="'embedding.weight' is called while"):
        module.embedding(torch.tensor([0]))
    with pytest.raises(RuntimeError, match="'out.weight' is called while"):
        module.out(torch.ones(1, module.out.in_features))
    # One layer, called twice in a forward, is no tied parameter.
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    twice = nn.Sequential(layer, nn.ReLU(), layer)
    model = fsdp.FSDP(twice, [layer], reshard_after_forward=True)
    model(torch.ones(1, 2)).sum().backward()
    assert fsdp.unshard(model.flats[0].shard.grad, (2, 2)).eq(2).all()
    assert list(model.state_dict()) == ["0.weight", "2.weight"]


def test_tied_parameters_need_one_unit(started):
    started[2].run(check_tied)


# ------------------------------------------------------------- what is where, and when


class Events:
    """What the units do, in order."""

    def __init__(self, model):
        self.seen, self.model = [], model
        for flat in model.flats:
            for what in ("start_gather", "free"):
                self._watch(flat, what)
        for unit in model.units:
            name = unit.name or "root"
            unit.module.register_forward_hook(
                lambda *_, name=name: self.seen.append(f"forward {name}"), prepend=True
            )

    def _watch(self, flat, what):
        do = getattr(flat, what)

        def watched():
            before = flat.gathered or flat.gathering is not None
            do()
            if before != (flat.gathered or flat.gathering is not None):
                short = {"start_gather": "gather", "free": "free"}[what]
                self.seen.append(f"{short} {flat.name.removeprefix('layers.')}")

        setattr(flat, what, watched)


def order_of_events(**options):
    module = new("perceptron")
    model = fsdp.FSDP(module, [*module.layers, module.out], **options)
    events = Events(model)
    for _ in range(2):
        events.seen.clear()
        loss = F.cross_entropy(
            model(batch_of("perceptron", 0)[0]), torch.tensor([0] * 4)
        )
        events.seen.append("backward")
        loss.backward()
    return [e.replace("layers.", "") for e in events.seen]


def test_units_are_gathered_and_freed_in_time(started):
    together = (
        "gather root, gather 0, forward 0, free 0, gather 1, forward 1, free 1, "
        "gather out, forward out, free out, forward root, backward, free root, "
        "gather out, free out, gather 1, free 1, gather 0, free 0"
    )
    for events in started[2].run(order_of_events, prefetch=0):
        assert ", ".join(events) == together
    ahead = (
        "gather root, gather 0, gather 1, forward 0, free 0, gather out, forward 1, "
        "free 1, forward out, free out, forward root, backward, gather out, free root, "
        "gather 1, free out, gather 0, free 1, free 0"
    )
    for events in started[2].run(order_of_events, prefetch=1):
        assert ", ".join(events) == ahead
    kept = (
        "gather root, gather 0, forward 0, gather 1, forward 1, gather out, "
        "forward out, forward root, backward, free root, free out, free 1, free 0"
    )
    for events in started[2].run(
        order_of_events, prefetch=0, reshard_after_forward=False
    ):
        assert ", ".join(events) == kept


def reduces_at_a_time(max_reduces):
    module = new("transformer")
    model = fsdp.FSDP(module, module.layers, max_reduces=max_reduces)
    most, under_way = [0], model.reducer.under_way

    class Counting(type(under_way)):
        def append(self, item):
            super().append(item)
            most[0] = max(most[0], len(self))

    model.reducer.under_way = Counting()
    model(batch_of("transformer", 0)[0]).sum().backward()
    assert not model.reducer.under_way
    return most[0]


def test_reduce_scatters_are_bounded(started):
    for bound, most in ((0, 1), (1, 1), (2, 2), (None, 4)):
        assert started[2].run(reduces_at_a_time, bound) == [most, most]


LAYERS, WIDTH = 4, 24


def bytes_of(kind, adam=False, **options):
    """The bytes a rank holds between steps and at most, and each unit's size."""
    with record_tensor_bytes() as record:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        module = nn.Sequential(*layers)
        if kind == "fsdp":
            model = fsdp.FSDP(module, layers, **options)
            optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(
                model.parameters(), lr=0.1, **({} if adam else {"momentum": 0.9})
            )
        else:
            rung = fsdp.ShardedOptimizer if kind == "zero1" else fsdp.ShardedGradients
            model, optimizer = (
                module,
                rung(module, torch.optim.SGD, units=layers, lr=0.1, momentum=0.9),
            )
        after = {}
        for _ in range(2):
            with record.label("step"):
                optimizer.zero_grad()
                model(torch.ones(1, WIDTH)).sum().backward()
                after["backward"] = record.end
                optimizer.step()
        after["step"] = record.end
        optimizer.zero_grad()
        after["zero_grad"] = record.end
    return after, record.peak_of("step")


def test_persistent_bytes_are_those_of_the_formula(ranks):
    n = ranks.n
    psi = WIDTH * WIDTH + WIDTH
    share = -(-psi // n)
    whole, own = 4 * LAYERS * share * n, 4 * LAYERS * share
    for after, _ in ranks.run(bytes_of, "zero1"):
        assert after["zero_grad"] == whole + whole + own  # W, G, momentum
    for after, _ in ranks.run(bytes_of, "zero2"):
        assert after["step"] == whole + own + own
        assert after["zero_grad"] == whole + own
    for after, _ in ranks.run(bytes_of, "fsdp"):
        assert after["step"] == own + own + own
        assert after["zero_grad"] == own + own
    for after, _ in ranks.run(bytes_of, "fsdp", adam=True):
        counters = 4 * LAYERS  # Adam's number of steps, for each shard
        assert after["backward"] == after["step"] == own + own + 2 * own + counters


def bytes_when_made():
    with record_tensor_bytes() as record:
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        model = fsdp.FSDP(module, [*module])
        made = record.nbytes[-1]  # at this moment: `end` waits first
    return made, sum(shard.nbytes for shard in model.parameters())


def test_only_shards_are_there_as_soon_as_it_is_made(started):
    # gloo's threads may still hold what was broadcast, for some milliseconds.
    for _ in range(20):
        for made, shards in started[4].run(bytes_when_made):
            assert made == shards


def test_a_bound_keeps_the_peak_down_and_a_pile_does_not(started):
    psi = 4 * (WIDTH * WIDTH + WIDTH)
    rest = 40 * 4 * WIDTH  # activations, and gradients of a bias
    peaks = {}
    for bound in (0, 1, None):
        options = {"prefetch": 0, "max_reduces": bound}
        (_, peaks[bound]), (_, other) = started[2].run(bytes_of, "fsdp", **options)
        assert other == peaks[bound]
    states = 2 * LAYERS * psi / 2
    grads = (LAYERS - 1) * psi / 2
    # One unit whole, its gradients, and those of one parameter in the making.
    assert states + grads + 2 * psi < peaks[0] < states + grads + 3 * psi + rest
    assert peaks[0] < peaks[1] < peaks[None]
    # Whole gradients of all units, and as much received as others own.
    assert peaks[None] > states + LAYERS * 1.5 * psi


def check_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    bf16 = torch.bfloat16
    for reduce_dtype in (None, torch.float32):
        job = Job(
            "fsdp", "transformer", ADAM, param_dtype=bf16, reduce_dtype=reduce_dtype
        )
        theirs = new("transformer")
        for tensor in theirs.parameters():
            dist.broadcast(tensor.data, 0)
        policy = MixedPrecisionPolicy(bf16, reduce_dtype)
        for layer in theirs.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(theirs, mp_policy=policy)
        optimizer = torch.optim.AdamW(theirs.parameters(), **ADAM[1])
        seen = []
        job.module.layers[1].linear1.register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(
                (inputs[0].dtype, module.weight.dtype, output.dtype)
            )
        )
        for step in range(3):
            inputs, labels = batch_of("transformer", step)
            job.optimizer.zero_grad(), optimizer.zero_grad()
            ours = F.cross_entropy(job.model(inputs), labels)
            ours.backward()
            loss = F.cross_entropy(theirs(inputs), labels)
            loss.backward()
            assert torch.equal(ours, loss)
            job.optimizer.step(), optimizer.step()
        assert seen == [(bf16, bf16, bf16)] * 3
        for shard in job.model.parameters():
            assert shard.dtype == shard.grad.dtype == torch.float32
        state = {k: v.full_tensor() for k, v in theirs.state_dict().items()}
        assert all(value.dtype == torch.float32 for value in job.state().values())
        assert largest_difference(job.state(), state) == 0


def test_mixed_precision_is_that_of_fsdp2(started):
    started[2].run(check_precision)


# -------------------------------------------------------------------- one step and many


def check_accumulated():
    for kind in ("zero2", "fsdp"):
        expected = Job("ddp", "transformer", dtype=torch.float64)
        job = Job(kind, "transformer", dtype=torch.float64)
        again = Job(kind, "transformer", dtype=torch.float64)
        reducer = (job.model if kind == "fsdp" else job.optimizer).reducer
        no_sync = (job.model if kind == "fsdp" else job.optimizer).no_sync
        for first in (0, 3):
            for each in (expected, job, again):
                each.optimizer.zero_grad()
            for step in range(first, first + 3):
                expected.backward(step)
                again.backward(step)  # gradients add up in the shards
                with no_sync() if step < first + 2 else contextlib.nullcontext():
                    job.backward(step)
                whole = [flat.gradient is not None for flat in reducer.flats]
                assert whole == [step < first + 2] * len(whole)
            for each in (expected, job, again):
                each.optimizer.step()
        assert largest_difference(job.state(), expected.state()) < 1e-12
        assert largest_difference(again.state(), expected.state()) < 1e-12
        with no_sync():
            job.backward(0)
        (job.model if kind == "fsdp" else job.optimizer).zero_grad()
        assert all(flat.gradient is None for flat in reducer.flats)


def test_accumulated_gradients(ranks):
    ranks.run(check_accumulated)


def check_clipped():
    for max_norm in (0.05, 1e9):
        expected = Job("ddp", "transformer", dtype=torch.float64)
        jobs = {
            kind: Job(kind, "transformer", dtype=torch.float64)
            for kind in ("zero1", "zero2", "fsdp")
        }
        for step in range(3):
            expected.optimizer.zero_grad()
            expected.backward(step)
            norm = nn.utils.clip_grad_norm_(expected.model.parameters(), max_norm)
            expected.optimizer.step()
            for kind, job in jobs.items():
                job.optimizer.zero_grad()
                job.backward(step)
                if kind == "fsdp":
                    found = job.model.clip_grad_norm_(max_norm)
                    job.optimizer.step()
                else:
                    found = job.optimizer.step(max_norm=max_norm)
                torch.testing.assert_close(found, norm, msg=kind)
        for job in jobs.values():
            assert largest_difference(job.state(), expected.state()) < 1e-12
    job.optimizer.zero_grad()
    assert job.model.clip_grad_norm_(1.0) == 0
    shard = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    shard.grad = torch.full_like(shard, 1 / 64)  # exact, but not the sum of squares
    norm = fsdp.clip_grad_norm_([shard], 1e9)
    expected = (1000 * dist.get_world_size()) ** 0.5 / 64
    assert norm.dtype == torch.float32 and abs(norm - expected) < 1e-5


def test_gradients_are_clipped_by_the_norm_of_all(ranks):
    ranks.run(check_clipped)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("on purpose")


class Recomputed(Perceptron):
    """Keeps no activations of its layers."""

    def forward(self, rows):
        for layer in self.layers:
            rows = checkpoint(layer, rows, use_reentrant=False).tanh()
        return self.out(rows) * self.scale


def check_repeated():
    job, expected = Job("fsdp", "perceptron"), Job("ddp", "perceptron")
    model, module = job.model, job.module
    flats = model.flats

    def compare():
        grads = {name: p.grad for name, p in expected.module.named_parameters()}
        for flat in flats:
            parts = flat.parts(fsdp.all_gather(flat.shard.grad))
            for name, part in zip(flat.names, parts, strict=True):
                torch.testing.assert_close(part, grads[name])
            assert not flat.gathered and flat.gathering is None
        # What waits for one more call of a unit is reduced at the end only.
        assert all(unit.calls <= 0 for unit in model.units)
        job.optimizer.zero_grad(), expected.optimizer.zero_grad()

    inputs, others = (batch_of("perceptron", step)[0] for step in (0, 1))
    model(inputs)  # a forward that has no backward leaves nothing behind
    for each in (model, expected.model):  # two forwards, one backward
        (each(inputs).sum() + 2 * each(others).sum()).backward()
    compare()
    loss = model(inputs).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * expected.model(inputs).sum()).backward()
    compare()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    with contextlib.suppress(RuntimeError):  # a backward that fails in the middle
        hidden = model.module.layers[0](inputs)
        hidden = Fails.apply(hidden)
        module.layers[1](hidden).sum().backward()
        raise AssertionError("it did not fail")
    with torch.no_grad():  # an evaluation leaves nothing behind
        model(inputs)
        assert not any(flat.gathered for flat in flats)
    model(inputs)  # nor does a forward that has no backward
    job.optimizer.zero_grad()
    model(inputs.requires_grad_()).sum().backward()
    mine = inputs.grad.clone()
    inputs.grad = None
    expected.model(inputs).sum().backward()
    torch.testing.assert_close(mine, inputs.grad)
    compare()
    model.eval()
    assert not module.training and model.train().module.training


def test_backward_again_and_again(ranks):
    ranks.run(check_repeated)


class FailsOnce(torch.autograd.Function):
    """Its first backward fails."""

    failed = False

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        if not FailsOnce.failed:
            FailsOnce.failed = True
            raise RuntimeError("on purpose")
        return grad


def check_failed_with_zero2():
    """What was sent by the backward() that failed counts, as without sharding."""
    states = []
    for sharded in (True, False):
        FailsOnce.failed = False
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
        optimizer = (
            fsdp.ShardedGradients(module, torch.optim.SGD, units=module, lr=0.1)
            if sharded
            else torch.optim.SGD(module.parameters(), lr=0.1)
        )
        for _ in range(2):
            hidden = FailsOnce.apply(module[:2](torch.ones(2, 4)))
            with contextlib.suppress(RuntimeError):
                module[2](hidden).sum().backward()
        optimizer.step()
        states.append(module.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)


def test_a_backward_that_failed_does_not_stop_the_next_one(started):
    started[2].run(check_failed_with_zero2)


def check_recomputed():
    MODELS["recomputed"] = Recomputed
    for options in ({}, {"reshard_after_forward": True, "prefetch": 0}):
        job = Job("fsdp", "recomputed", **options).train(range(3))
        expected = Job("ddp", "perceptron").train(range(3))
        assert largest_difference(job.state(), expected.state()) == 0


def test_activations_may_be_recomputed(started):
    started[2].run(check_recomputed)


# ------------------------------------------------------------------------- checkpoints


def saved(kind, folder):
    """Train 2 steps and save everything whole; rank 0 writes the file."""
    job = Job(kind, "transformer", ADAM, torch.float64).train(range(2))
    if kind == "fsdp":
        whole = job.model.state_dict(rank0_only=True)
        optimizer = job.model.optimizer_state_dict(job.optimizer, rank0_only=True)
    else:
        whole = job.module.state_dict()
        optimizer = fsdp.optimizer_state_dict(
            job.optimizer.flats, job.optimizer.optimizer, rank0_only=True
        )
    if dist.get_rank() == 0:
        assert list(whole) == list(Transformer().state_dict())
        plain = Transformer().double()
        plain.load_state_dict(whole)
        torch.save({"model": whole, "optimizer": optimizer}, f"{folder}/{kind}.pt")
    elif kind == "fsdp":
        assert whole == {} == optimizer


def resumed(kind, saved_kind, folder):
    """Load it, and return what one more step makes of it."""
    state = torch.load(f"{folder}/{saved_kind}.pt", mmap=True)
    job = Job(kind, "transformer", (torch.optim.AdamW, {"lr": 7.0}), torch.float64)
    if kind == "fsdp":
        job.model.load_state_dict(state["model"])
        job.model.load_optimizer_state_dict(job.optimizer, state["optimizer"])
        again = job.model.optimizer_state_dict(job.optimizer)
    else:
        job.module.load_state_dict(state["model"])
        shards = job.optimizer.flats, job.optimizer.optimizer
        fsdp.load_optimizer_state_dict(*shards, state["optimizer"])
        again = fsdp.optimizer_state_dict(*shards)
    assert again["param_groups"] == state["optimizer"]["param_groups"]
    assert again["param_groups"][0]["lr"] == ADAM[1]["lr"]
    for name, entries in state["optimizer"]["state"].items():
        for key, value in entries.items():
            assert torch.equal(again["state"][name][key], value), (name, key)
    # Every rank has the same batch, so that their number does not matter.
    torch.manual_seed(0)
    inputs, labels = torch.randint(17, (4, 5)), torch.randint(3, (4,))
    job.optimizer.zero_grad()
    F.cross_entropy(job.model(inputs), labels).backward()
    job.optimizer.step()
    return job.state()


def test_a_whole_checkpoint_fits_any_number_of_ranks_and_any_rung(started, tmp_path):
    for kind in ("fsdp", "zero2"):
        started[4].run(saved, kind, str(tmp_path))
    results = [
        state
        for n, kind in ((4, "fsdp"), (2, "fsdp"), (3, "zero1"), (1, "zero2"))
        for saved_kind in ("fsdp", "zero2")
        for state in started[n].run(resumed, kind, saved_kind, str(tmp_path))
    ]
    for state in results:
        assert largest_difference(state, results[0]) < 1e-12


class Scalar(nn.Module):
    """Its root unit has one parameter, without a dimension."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows):
        return self.layer(rows) * self.scale


def check_optimizers():
    """What each optimizer keeps: for elements, and once for all of them."""
    torch.manual_seed(0)
    for name in ("NAdam", "ASGD", "RAdam", "Adamax", "Rprop", "Adagrad", "AdamW"):
        make = getattr(torch.optim, name)
        module = Scalar()
        model = fsdp.FSDP(module, units=(one for one in [module.layer]))
        assert len(model.flats) == 2
        optimizer = make(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        whole = model.optimizer_state_dict(optimizer)
        again = make(model.parameters(), lr=0.2)
        model.load_optimizer_state_dict(again, whole)
        assert again.param_groups[0]["lr"] == 0.1
        for flat in model.flats:
            expected, found = optimizer.state[flat.shard], again.state[flat.shard]
            shapes = [{k: v.shape for k, v in s.items()} for s in (expected, found)]
            assert shapes[0] == shapes[1], (name, flat.name)
        # Whole: in the padding of the shards there may be other numbers.
        found = model.optimizer_state_dict(again)["state"]
        for parameter, entries in whole["state"].items():
            for key, value in entries.items():
                assert torch.equal(value, found[parameter][key]), (name, key)
        again.step()  # its gradients are there
    whole["state"]["layer.bias"]["step"] = torch.tensor(7.0)
    with pytest.raises(ValueError, match=r"'step' of unit 'layer' .*layer.bias: 7.0"):
        model.load_optimizer_state_dict(again, whole)
    whole["state"]["layer.bias"] |= {
        "step": torch.tensor(2.0),
        "exp_avg": torch.ones(4),
    }
    with pytest.raises(ValueError, match=r"layer.bias: of shape \(4,\)"):
        model.load_optimizer_state_dict(again, whole)
    whole["state"]["bias"] = whole["state"].pop("layer.bias")
    with pytest.raises(ValueError, match=r"\['bias'\], which this model does not"):
        model.load_optimizer_state_dict(again, whole)
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(5))], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD has a parameter of the shape \(5,\)"):
        model.optimizer_state_dict(other)


def test_the_state_of_each_optimizer_can_be_saved_and_loaded(started):
    started[2].run(check_optimizers)


def save_shards(folder):
    job = Job("fsdp", "conv", ADAM).train(range(2))
    state = {
        "model": job.model.sharded_state_dict(),
        "optim": job.optimizer.state_dict(),
    }
    torch.save(state, f"{folder}/{dist.get_rank()}.pt")
    whole = job.model.state_dict()  # stays what it is, buffers as well
    mean = whole["layers.0.1.running_mean"].clone()
    after = job.train(range(2, 4)).state()
    assert torch.equal(whole["layers.0.1.running_mean"], mean)
    return after


def load_shards(folder):
    state = torch.load(f"{folder}/{dist.get_rank()}.pt")
    job = Job("fsdp", "conv", ADAM)
    job.model.load_sharded_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optim"])
    return job.train(range(2, 4)).state()


def load_wrongly(folder):
    state = torch.load(f"{folder}/{dist.get_rank()}.pt")["model"]
    rank, n = dist.get_rank(), dist.get_world_size()
    job = Job("fsdp", "conv")
    with pytest.raises(ValueError, match=rf"rank {rank} of 2.*rank {rank} of {n}"):
        job.model.load_sharded_state_dict(state)
    state |= {"world_size": n}
    with pytest.raises(ValueError, match=r"layers.0 is \(\d+,\) and not \(\d+,\)"):
        job.model.load_sharded_state_dict(state)
    one = Job("fsdp", "conv", units=())
    with pytest.raises(ValueError, match=r"unknown: \['layers.0', 'layers.1'\]"):
        one.model.load_sharded_state_dict(state)
    whole = job.model.state_dict()
    whole["more"] = whole.pop("out.bias")
    whole["out.weight"] = torch.ones(2)
    with pytest.raises(
        ValueError,
        match=r"Missing: \['out.bias'\]; unknown: \['more'\]; .*"
        r"out.weight is \(2,\) and not \(3, 5\)",
    ):
        job.model.load_state_dict(whole)
    entries = job.model.optimizer_state_dict(job.optimizer)
    entries["state"]["out.bias"] = {"momentum_buffer": torch.ones(3)}
    with pytest.raises(ValueError, match="unit 'root' have different kinds of state"):
        job.model.load_optimizer_state_dict(job.optimizer, entries)


def test_a_sharded_checkpoint_fits_as_many_ranks(started, tmp_path):
    expected = started[2].run(save_shards, str(tmp_path))
    for state, other in zip(
        started[2].run(load_shards, str(tmp_path)), expected, strict=True
    ):
        assert largest_difference(state, other) == 0
    started[1].run(load_wrongly, str(tmp_path))


# ------------------------------------------------------------------------------ misuse


def check_misuse():
    module = new("perceptron")
    early = torch.optim.AdamW(module.parameters())
    model = fsdp.FSDP(module, module.layers)
    inputs, _ = batch_of("perceptron", 0)
    model(inputs).sum().backward()
    with pytest.raises(RuntimeError, match=r"AdamW holds 'scale' .*AdamW\(mod"):
        early.step()
    with pytest.raises(ValueError, match="sharded already"):
        fsdp.FSDP(module)
    with pytest.raises(ValueError, match="prefetch is -1"):
        fsdp.FSDP(new("perceptron"), prefetch=-1)
    with pytest.raises(RuntimeError, match=r"'out.weight' is called .* unit \(root\)"):
        module.out(torch.ones(1, 8))
    with pytest.raises(RuntimeError, match="before FSDP"):
        model.to(torch.float64)
    with pytest.raises(RuntimeError, match="freeze or unfreeze .* before FSDP"):
        model.requires_grad_(False)
    module.layers[0](inputs)  # a unit may be called by itself
    weight = module.layers[0].weight
    assert weight.shape == (8, 6) and weight.isnan().all(), "nothing to crash on"
    for rung in (fsdp.ShardedOptimizer, fsdp.ShardedGradients):
        module = new("perceptron")
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        rung(module, torch.optim.SGD, lr=0.1)
        with pytest.raises(RuntimeError, match="SGD holds"):
            early.step()
    module = new("perceptron")
    with pytest.raises(
        ValueError, match=r"units\[1\], a ReLU, is no submodule of the P"
    ):
        fsdp.FSDP(module, [module.out, nn.ReLU()])
    module.layers[0].bias.data = module.layers[0].bias.data.double()
    with pytest.raises(ValueError, match=r"float32 \(layers.0.weight\), torch.float64"):
        fsdp.FSDP(module, module.layers)
    module = new("perceptron")
    module.layers[0].double()  # a unit of its own may differ
    fsdp.FSDP(module, module.layers)


class Hiding(nn.Linear):
    """Returns its result in an object that no hook can look into."""

    def forward(self, rows):
        return types.SimpleNamespace(rows=super().forward(rows))


class Unpacking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = Hiding(2, 2), nn.Linear(2, 2)

    def forward(self, rows):
        return self.out(self.layer(rows).rows)


def check_hidden():
    module = Unpacking()
    model = fsdp.FSDP(module, [module.layer])
    with pytest.raises(TypeError, match="unit 'layer' returns a SimpleNamespace"):
        model(torch.ones(1, 2))
    with torch.no_grad():  # no backward will come
        assert model(torch.ones(1, 2)).shape == (1, 2)


def test_an_output_that_hides_its_tensors_is_refused(started):
    started[2].run(check_hidden)


class Turned(nn.Linear):
    """Returns a view of its result."""

    def forward(self, rows):
        return super().forward(rows).transpose(0, 1)


class Adding(nn.Linear):
    """Changes its input, and returns that: a view of what the unit before returned."""

    def forward(self, rows):
        rows += super().forward(rows)
        return rows


class InPlace(nn.Module):
    """Changes what its units return. With three dimensions those are all views."""

    def __init__(self):
        super().__init__()
        kinds = (nn.Linear, Turned, Adding, Turned)
        self.layers = nn.ModuleList(kind(8, 8) for kind in kinds)
        self.out = nn.Linear(8, 3)

    def forward(self, rows):
        first, second, third, fourth = self.layers
        rows = second(first(rows).relu_()).tanh_()
        rows = third(rows * 1.0)
        rows += 1.0
        rows = fourth(rows)
        rows[:2] *= 2.0
        return self.out(rows)


def check_views():
    torch.manual_seed(0)
    plain = InPlace()
    torch.manual_seed(1)
    rows = torch.randn(4, 5, 8)
    plain(rows).pow(2).mean().backward()
    for options in (
        {"prefetch": 0},
        {"prefetch": 1},
        {"prefetch": 5, "reshard_after_forward": True},
    ):
        torch.manual_seed(0)
        module = InPlace()
        model = fsdp.FSDP(module, [*module.layers, module.out], **options)
        for _ in range(2):  # in the second step the order is known
            model.zero_grad()
            model(rows).pow(2).mean().backward()
            assert not any(flat.gathered for flat in model.flats)
        for flat in model.flats:
            parts = flat.parts(fsdp.all_gather(flat.shard.grad))
            for name, part in zip(flat.names, parts, strict=True):
                expected = plain.get_parameter(name).grad
                torch.testing.assert_close(part, expected, msg=f"{name}, {options}")


def test_a_view_that_a_unit_returns_may_be_changed_in_place(started):
    started[2].run(check_views)


class Positions(nn.Module):
    """Returns a part of its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 2))

    def forward(self, rows):
        return self.weight[: len(rows)]


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions, self.out = Positions(), nn.Linear(2, 2)

    def forward(self, rows):
        return self.out(rows + self.positions(rows))


def check_own_parameters():
    for trained in (True, False):
        module = Placed()
        module.positions.requires_grad_(trained)
        model = fsdp.FSDP(module, [module.positions])
        for recording in (True, False):
            with torch.set_grad_enabled(recording):
                with pytest.raises(
                    RuntimeError, match=r"'positions' returns one of its own.*clone"
                ):
                    model(torch.ones(3, 2))


def test_a_unit_that_returns_a_view_of_its_parameter_is_refused(started):
    started[2].run(check_own_parameters)


class Noted(nn.Linear):
    def get_extra_state(self):
        return {"version": 1}


def check_extra_state():
    model = fsdp.FSDP(nn.Sequential(Noted(2, 3), nn.Linear(3, 2)))
    for rank0_only in (False, True):
        state = model.state_dict(rank0_only=rank0_only)
        assert [*state] in ([], ["0.weight", "0.bias", "1.weight", "1.bias"])
    model.load_state_dict(model.state_dict())
    model.load_state_dict(nn.Sequential(Noted(2, 3), nn.Linear(3, 2)).state_dict())
    model.load_sharded_state_dict(model.sharded_state_dict())


def test_extra_state_is_left_out_of_checkpoints(started):
    started[2].run(check_extra_state)


def test_misuse_is_named(started):
    started[2].run(check_misuse)


# --------------------------------------------------------------------------- benchmark


@pytest.mark.thorough
def test_rows_of_the_benchmark(started):
    from tests.benchmarks import fsdp as benchmark

    wall, cpu = benchmark.time_rows(started[2], "fsdp2", 0.75, "a note", rounds=1)
    assert wall.goal == 0.75 and cpu.goal is None
    for row in (wall, cpu):
        assert row.conditions == {"parameters_equal": True}
        assert row.note == "a note" and row.ratio > 0
    frugal, ahead, under_way, piling, between = benchmark.byte_rows(started[2])
    assert frugal.met and ahead.met and between.met
    assert frugal.ratio < ahead.ratio < under_way.ratio < piling.ratio
    assert between.ratio == 1 and between.conditions == {"equal": True}
