"""``from_scratch/fsdp`` against PyTorch's DDP and FSDP2, and against one process.

The work is done in functions that every rank runs; an assertion that fails there ends
the test with the rank's own message.
"""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, several
from thorough import thorough_after
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils.from_scratch import fsdp
from course_utils.measure.taps import tap
from course_utils.measure.tensor_bytes import record_tensor_bytes
from course_utils.theory import costs

from .fsdp_jobs import (
    ADAM,
    MODELS,
    SGD,
    Job,
    Perceptron,
    Transformer,
    batch_of,
    largest_difference,
    new,
)

# ----------------------------------------------------------------------- the pieces


@several
def test_the_pieces():
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
    flat = torch.arange(3.0 * n) * (rank + 1)
    part = fsdp.reduce_scatter(flat)
    total = torch.arange(3.0 * n) * sum(range(1, n + 1))
    assert torch.equal(part, total.view(n, 3)[rank])
    assert torch.equal(flat, torch.arange(3.0 * n) * (rank + 1)), "it has changed"
    assert fsdp.shard(nn.Parameter(torch.ones(3))).is_leaf, "autograd knows nothing"
    assert fsdp.padded(torch.ones(5), 4).tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*Flatten it"):
        fsdp.reduce_scatter(torch.ones(2, 3))
    with pytest.raises(ValueError, match="the last is rank 1"):
        fsdp.shard(torch.ones(3), 2, 2)
    if n > 1:
        with pytest.raises(ValueError, match=rf"padded\(flat, {n}\)"):
            fsdp.reduce_scatter(torch.ones(n + 1))


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
        for name_of_buffer in [name for name in state if "running" in name]:
            state[name_of_buffer] = expected[name_of_buffer]
        found[what] = largest_difference(state, expected)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_rung_is_ddp_to_the_last_bit_on_2_ranks(started, name):
    for optimizer in (SGD, ADAM):
        options = (name, optimizer, torch.float32, 4)
        for found in started[2].run(compare_with_ddp, *options):
            assert found == dict.fromkeys(EVERY, 0.0)


@pytest.mark.parametrize("n", thorough_after(1, [3, 1, 4]))
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


@on_ranks(3)
def test_all_start_from_rank_0():
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


@on_ranks(2)
def test_frozen_parameters_and_units_without_others():
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
    # While backward() is in the first layer, those behind it are gone, frozen or not.
    gathered = []
    job.module.layers[0].adapter.weight.register_hook(
        lambda _: gathered.append([f.name for f in job.model.flats if f.gathered])
    )
    job.backward(3)
    assert gathered == [["root", "layers.0", "layers.0.frozen"]]


class Pair(nn.Sequential):
    """Two layers, of which the second need not be used."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, rows, half):
        return self[0](rows) if half else super().forward(rows)


class Choosy(nn.Module):
    """Uses the layers that it is told to: "a" one, "A" only a half of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: Pair() for name in "abc"})

    def forward(self, rows, names):
        for name in names:
            rows = self.layers[name.lower()](rows, half=name.isupper())
        return rows


@on_ranks(2)
def test_with_zero1_what_is_not_used_has_a_gradient_of_zeros():
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


@several
def test_units_and_parameters_that_are_not_used():
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = Choosy()
    torch.manual_seed(0)
    model = fsdp.FSDP(Choosy(), [], prefetch=2)  # all in one
    torch.manual_seed(0)
    module = Choosy()
    units = fsdp.FSDP(module, module.layers.values(), prefetch=2)
    # In another order, a half, and one twice.
    for names in ("ac", "abc", "cB", "a", "A", "aba"):
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


@on_ranks(2)
def test_tied_parameters_need_one_unit():
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


# ------------------------------------------------------------- what is where, and when


def order_of_messages(**options):
    """Whose shards a rank sends in the second step, between the forward passes."""
    module, seen = new("perceptron"), []
    model = fsdp.FSDP(module, [*module.layers, module.out], **options)
    names = {28: "0", 36: "1", 14: "out", 1: "root"}  # by the size of a shard
    for name, unit in zip("01", module.layers, strict=True):
        unit.register_forward_hook(
            lambda *_, name=name: seen.append(f"forward {name}"), prepend=True
        )

    def note(call):
        seen.append(names[call.tensors[0].numel()])
        return call.go()

    with tap(note, ["send"]):
        for _ in range(2):
            seen.clear()
            output = model(batch_of("perceptron", 0)[0])
            seen.append("backward")
            output.sum().backward()
    return ", ".join(seen)


FORWARD = "root, 0, forward 0, 1, forward 1, out, "
AHEAD = "root, 0, 1, forward 0, out, forward 1, "


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prefetch": 0}, FORWARD + "backward, root, out, out, 1, 1, 0, 0"),
        ({"prefetch": 1}, AHEAD + "backward, out, root, 1, out, 0, 1, 0"),
        (
            {"prefetch": 0, "reshard_after_forward": False},
            FORWARD + "backward, root, out, 1, 0",
        ),
    ],
    ids=["together", "ahead", "kept"],
)
def test_units_are_gathered_in_time(started, options, expected):
    """In backward each unit's parameters, or its gradients, or both are sent."""
    assert started[2].run(order_of_messages, **options) == [expected] * 2


LAYERS, WIDTH = 4, 24


def bytes_of(kind, adam=False, **options):
    """The bytes a rank holds between steps and at most, and each unit's size."""
    with record_tensor_bytes() as record:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        module = nn.Sequential(*layers)
        if kind == "fsdp":
            model = fsdp.FSDP(module, layers, **options)
            build, settings = ADAM if adam else SGD
            optimizer = build(model.parameters(), **settings)
        else:
            rung = fsdp.ShardedOptimizer if kind == "zero1" else fsdp.ShardedGradients
            model, optimizer = module, rung(module, SGD[0], units=layers, **SGD[1])
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
    for _ in range(8):
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
    # One reduce-scatter under way, and not two, keeps whole gradients of a unit.
    assert peaks[0] < peaks[1] < min(peaks[0] + 1.5 * psi, peaks[None])
    # Whole gradients of all units, and as much received as others own.
    assert peaks[None] > states + LAYERS * 1.5 * psi


@on_ranks(4)
def test_whole_parameters_are_those_of_the_formula():
    """To 2 %: the rest are activations of one row."""
    widths = [128, 128, 640, 128, 384]
    units = [a * b for a, b in itertools.pairwise(widths)]
    for prefetch in (0, 1):
        expected = costs.fsdp_memory(units, 4, prefetch=prefetch)
        with record_tensor_bytes() as record:
            pairs = itertools.pairwise(widths)
            module = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairs))
            model = fsdp.FSDP(module, units=[*module], prefetch=prefetch)
            with torch.no_grad():
                model(torch.ones(1, 128))  # tells the order of the units
                assert record.end == expected.shards
                with record.label("forward"):
                    model(torch.ones(1, 128))
        peak = record.peak_of("forward")
        assert peak == pytest.approx(expected.parameter_peak, rel=0.02)


@on_ranks(2)
def test_mixed_precision_is_that_of_fsdp2():
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
        for step in range(3):
            inputs, labels = batch_of("transformer", step)
            job.optimizer.zero_grad(), optimizer.zero_grad()
            ours = F.cross_entropy(job.model(inputs), labels)
            ours.backward()
            loss = F.cross_entropy(theirs(inputs), labels)
            loss.backward()
            assert torch.equal(ours, loss)
            job.optimizer.step(), optimizer.step()
        for shard in job.model.parameters():
            assert shard.dtype == shard.grad.dtype == torch.float32
        state = {k: v.full_tensor() for k, v in theirs.state_dict().items()}
        assert all(value.dtype == torch.float32 for value in job.state().values())
        assert largest_difference(job.state(), state) == 0


# -------------------------------------------------------------------- one step and many


@several
def test_accumulated_gradients():
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


@several
def test_gradients_are_clipped_by_the_norm_of_all():
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


class Recomputed(Perceptron):
    """Keeps no activations of its layers."""

    def forward(self, rows):
        for layer in self.layers:
            rows = checkpoint(layer, rows, use_reentrant=False).tanh()
        return self.out(rows) * self.scale


@several
def test_backward_again_and_again():
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
        FailsOnce.failed = False
        hidden = FailsOnce.apply(hidden)
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


@on_ranks(2)
def test_a_backward_that_failed_does_not_stop_the_next_one():
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


@on_ranks(2)
def test_activations_may_be_recomputed():
    MODELS["recomputed"] = Recomputed
    for options in ({}, {"reshard_after_forward": True, "prefetch": 0}):
        job = Job("fsdp", "recomputed", **options).train(range(3))
        expected = Job("ddp", "perceptron").train(range(3))
        assert largest_difference(job.state(), expected.state()) == 0
