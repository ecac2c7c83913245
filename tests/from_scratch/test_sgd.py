"""from_scratch/sgd.py: n ranks against one process that has the whole batch."""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import product

import numpy
import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from thorough import thorough_after
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from worker_runs import one_thread

from course_utils.from_scratch import sgd as ours

several = pytest.mark.parametrize("n", thorough_after(1, [3, 2, 4]))


@pytest.fixture(autouse=True)
def as_the_ranks_compute():
    with one_thread():
        yield


# --------------------------------------------------------------------- share the data
def test_a_partition_is_a_data_set():
    part = ours.Partition("abcdef", [4, 0, 4])
    assert (len(part), list(part), part[-1]) == (3, ["e", "a", "e"], "e")
    data = TensorDataset(torch.arange(6.0), torch.arange(6) * 10)
    (batch,) = DataLoader(ours.Partition(data, [5, 1]), batch_size=2)
    assert [x.tolist() for x in batch] == [[5, 1], [50, 10]]
    with pytest.raises(IndexError):
        part[3]


def parts(*sizes):
    return ours.DataPartitioner(range(10), sizes)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: parts(0.33, 0.33, 0.33), "sum to 0.99"),
        (lambda: parts(3, 7), "sum to 10, not to 1"),
        (lambda: parts(), "one or more"),
        (lambda: parts(1.5, -0.5), "from 0 on"),
        (lambda: parts(float("nan")), "nan"),
        (lambda: parts(0.5, 0.5).use(2), "for rank 2"),
        (lambda: parts(0.5, 0.5).use(-1), "rank -1"),
        (lambda: ours.rank_batch_size(8, 4, 4), "no rank 4 among 4"),
        (lambda: ours.rank_batch_size(8, 4, -1), "no rank -1 among 4"),
        (lambda: list(ours.rank_batches(8, 4, 4, 4)), "no rank 4 among 4"),
        (lambda: ours.rank_batch_size(3, 4, 0), "from 4 on"),
        (lambda: ours.rank_batch_size(128 / 4, 4, 0), "from 4 on"),
        (lambda: list(ours.rank_batches(10, 3, 4, 0)), "from 4 on"),
        (lambda: ours.linear_scaled_lr(0.1, 0, 256), "above 0"),
        (lambda: ours.linear_scaled_lr(0.1, 256, -1), "above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises((ValueError, IndexError), match=says):
        call()


@on_ranks(2)
def test_rows_of_no_rank_are_refused():
    for call, says in (
        (lambda: ours.average_gradients_weighted(nn.Linear(1, 1), 0), "No rank"),
        (lambda: ours.average_gradients_weighted(nn.Linear(1, 1), -1), "0 or more"),
        (lambda: ours.evaluate(nn.Linear(1, 1), []), "No rank has a row"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


@pytest.mark.parametrize(
    ("items", "sizes", "counts"),
    [
        (10, [0.7, 0.2, 0.1], [7, 2, 1]),
        (100, [0.29, 0.71], [29, 71]),  # 0.29 * 100 is 28.999...
        (3, [0.0, 0.5, 0.5], [0, 2, 1]),  # a part of 0 does not get what is left
        (11, [0.5, 0.3, 0.2], [6, 3, 2]),  # 5.5, 3.3, 2.2
        *((n, [1 / 7] * 7, [n // 7 + (r < n % 7) for r in range(7)]) for n in (2, 97)),
        (0, [0.5, 0.5], [0, 0]),
        (10, numpy.array([0.6, 0.4]), [6, 4]),
    ],
)
def test_sizes_are_fractions(items, sizes, counts):
    parts = ours.DataPartitioner(range(items), sizes)
    used = [list(parts.use(rank)) for rank in range(len(counts))]
    assert [len(part) for part in used] == counts
    assert sorted(sum(used, [])) == list(range(items))


def test_the_seed_alone_decides_the_parts():
    def parts(seed):
        return ours.DataPartitioner(range(50), [0.5, 0.5], seed).partitions

    torch.manual_seed(5)
    before, here = torch.get_rng_state(), parts(1)
    assert here[0] != sorted(here[0])  # shuffled
    list(ours.rank_batches(9, 4, 2, 0, seed=1))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert parts(1) == here != parts(2)


def test_the_ranks_batches_add_up_to_the_batch():
    for n, batch in product(range(1, 10), range(9, 40)):
        sizes = [ours.rank_batch_size(batch, n, rank) for rank in range(n)]
        assert all(type(size) is int for size in sizes)
        assert sizes == [len(range(batch)[rank::n]) for rank in range(n)]


def test_the_batches_of_all_ranks_are_those_of_one_process():
    for items, batch, n in product((0, 1, 10, 23), (4, 5, 9), (1, 2, 3, 4)):
        whole = list(ours.rank_batches(items, batch, 1, 0, seed=1, epoch=2))
        shares = [
            list(ours.rank_batches(items, batch, n, rank, seed=1, epoch=2))
            for rank in range(n)
        ]
        assert sorted(torch.cat([torch.empty(0), *whole]).tolist()) == [*range(items)]
        assert all(len(share) == len(whole) for share in shares)
        for k, rows in enumerate(whole):
            together = torch.cat([share[k] for share in shares])
            assert sorted(together.tolist()) == sorted(rows.tolist())


def test_rank_batches_are_those_of_a_loader_with_the_sampler():
    """But for the last batch, where the sampler leaves out or pads."""
    sampler = DistributedSampler(range(20), 3, 1, seed=5, drop_last=True)
    sampler.set_epoch(2)
    loader = DataLoader(range(20), batch_size=2, sampler=sampler)
    batches = ours.rank_batches(20, 6, 3, 1, seed=5, epoch=2)
    pairs = [*zip(batches, loader, strict=False)][:3]
    assert all(torch.equal(one, other) for one, other in pairs)


# ------------------------------------------------------------------------ start alike
def test_all_ranks_get_the_parameters_and_buffers_of_one(started):
    def start(src):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            nn.BatchNorm2d(4),
            nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False),
        )
        model.register_buffer("mask", torch.rand(5) > 0.5)
        model.register_buffer("row", torch.rand(4, 2).t()[1])
        for tensor in (model[1].running_mean, model[1].num_batches_tracked):
            tensor.add_(dist.get_rank())
        before = {name: t.clone() for name, t in model.state_dict().items()}
        ours.broadcast_parameters(model, *src)
        layout = model[0].weight.is_contiguous(memory_format=torch.channels_last)
        return before, model.state_dict(), layout

    for src in ((), (2,)):
        results = started[3].run(start, src)
        wanted = results[src[0] if src else 0][0]
        for _, after, layout in results:
            assert all(torch.equal(after[name], wanted[name]) for name in wanted)
            assert layout
        assert not torch.equal(results[0][0]["0.weight"], results[1][0]["0.weight"])


# ------------------------------------------- n ranks are one process with the big batch
def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 5))


def rows_of(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), torch.randint(5, (count,), generator=generator)


STEPS, BATCH = 5, 24  # 24 rows are 12, 8 or 6 on each of 2, 3, 4 ranks


def steps(model, share, average, count=STEPS) -> torch.Tensor:
    """Train for a few steps on `share(rows of the batch)`. Returns the parameters."""
    dtype = next(model.parameters()).dtype
    inputs, labels = rows_of(BATCH * count, dtype)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01
    )
    for rows in torch.arange(len(inputs)).split(BATCH):
        rows = share(rows)
        optimizer.zero_grad()
        logits = model(inputs[rows])
        F.cross_entropy(logits, labels[rows]).backward()
        average(model, len(rows))
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def strided(rows: torch.Tensor) -> torch.Tensor:
    return rows[dist.get_rank() :: dist.get_world_size()]


def uneven(rows: torch.Tensor) -> torch.Tensor:
    """5 rows for rank 0, 1 for rank 1 (and so on), the rest for the last one."""
    ends = [0, 5, 6, 13][: dist.get_world_size()] + [len(rows)]
    return rows[ends[dist.get_rank()] : ends[dist.get_rank() + 1]]


def averaged(model, rows):
    ours.average_gradients(model)


def averaged_naively(model, rows):
    ours.average_gradients_naive(model)


def weighted_naively(model, rows):
    ours.average_gradients_weighted(model, rows, ours.average_gradients_naive)


def alone(dtype=torch.float64, **options) -> torch.Tensor:
    """What one process gets with the whole batch."""
    torch.manual_seed(0)
    model = mlp().to(dtype)
    return steps(model, lambda rows: rows, lambda *_: None, **options)


def on_rank(share, average, dtype=torch.float64):
    """The same on a rank. Only rank 0 has the seed of the start."""
    torch.manual_seed(dist.get_rank())
    model = mlp().to(dtype)
    ours.broadcast_parameters(model)
    return steps(model, share, average)


def distance(results: list[torch.Tensor], expected: torch.Tensor) -> float:
    """How far the parameters are from those expected. All ranks must be equal."""
    assert all(torch.equal(result, results[0]) for result in results)
    return (results[0] - expected).abs().max().item()


# What may differ after all steps. Rounding makes 6e-17 and 5e-8 of it here.
EXACT = {torch.float64: 1e-14, torch.float32: 1e-6}
DIFFERENT = 1e-3


@several
def test_n_ranks_are_one_process_with_the_big_batch(started, n):
    start = alone(count=0)
    for dtype in EXACT:
        expected = alone(dtype)
        assert (expected - start).abs().max() > 0.05  # it has moved: that means much
        for average in (averaged, averaged_naively, ours.average_gradients_weighted):
            results = started[n].run(on_rank, strided, average, dtype)
            assert distance(results, expected) <= EXACT[dtype]


@several
def test_uneven_shares_need_weights(started, n):
    """Else a row of a small share counts more than a row of a large one."""
    expected = alone()
    for average in (ours.average_gradients_weighted, weighted_naively):
        results = started[n].run(on_rank, uneven, average)
        assert distance(results, expected) <= EXACT[torch.float64]
    for average in (averaged, averaged_naively):
        assert distance(started[n].run(on_rank, uneven, average), expected) > DIFFERENT


@several
def test_a_rank_without_rows_takes_part(started, n):
    """It need not call backward, and if it does, with nan, that reaches nobody."""

    def first_ranks_only(rows):
        return rows[dist.get_rank() :: n - 1] if dist.get_rank() < n - 1 else rows[:0]

    weighted = ours.average_gradients_weighted
    results = started[n].run(on_rank, first_ranks_only, weighted)
    assert distance(results, alone()) <= EXACT[torch.float64]

    def given_or_nan(given):
        model = nn.Linear(1, 1, bias=False)
        rank = dist.get_rank()
        if rank > 0 or given is not None:
            model.weight.grad = torch.full((1, 1), float(rank or given))
        ours.average_gradients_weighted(model, rank)
        return model.weight.grad.item()

    mean = sum(rank * rank for rank in range(n)) / sum(range(n))
    for given in (None, float("nan")):
        results = started[n].run(given_or_nan, given)
        assert results == [results[0]] * n
        assert results[0] == pytest.approx(mean)


# -------------------------------------------------------------- average the gradients
class Odd(nn.Module):
    """Everything that a gradient can be, and some that it can't."""

    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(3, 3)
        self.tie = nn.Linear(3, 3)
        self.tie.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.stale = nn.Parameter(torch.ones(2))  # frozen after a step
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.on_rank_1 = nn.Parameter(torch.ones(3))
        self.not_on_rank_0 = nn.Parameter(torch.ones(2, 3))
        self.number = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.brain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.imaginary = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.image = nn.Parameter(
            torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
        )
        self.turned = nn.Parameter(torch.ones(3, 5).t())

    def forward(self, x):
        rank = dist.get_rank()
        y = self.tie(torch.tanh(self.tied(x))).sum() * self.number
        y = y + (self.brain * (rank + 1)).sum() + self.empty.sum() + self.stale.sum()
        y = y + (self.imaginary * torch.tensor(rank + 2j)).sum().real
        y = y + (self.image * torch.arange(96.0).view(2, 3, 4, 4)).sum() * (rank + 1)
        y = y + (self.turned * torch.arange(15.0).view(5, 3)).sum() * (rank + 3)
        if rank == 1:
            y = y + (self.on_rank_1**2).sum()
        if rank != 0:
            y = y + (self.not_on_rank_0 * rank).sum()
        return y


def odd_gradients(name):
    """Each parameter's gradient before and after, and the messages that it took."""
    torch.manual_seed(dist.get_rank())
    model = Odd()
    model(torch.randn(4, 3)).backward()
    model.stale.requires_grad_(False)

    def gradients():
        parameters = model.named_parameters()
        return {k: p.grad if p.grad is None else p.grad.clone() for k, p in parameters}

    before, sent, all_reduce = gradients(), [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append((tensor.dtype, tensor.numel()))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        getattr(ours, name)(model)
    finally:
        dist.all_reduce = all_reduce
    after = gradients()
    layout = model.image.grad.stride() == model.image.stride()
    grads = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
    apart = len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads)
    return before, after, sent, layout and apart


@several
def test_every_kind_of_gradient_is_averaged(started, n):
    """In one message a parameter, or in one a dtype, with one number for each."""
    sent = []
    for name in ("average_gradients", "average_gradients_naive"):
        results = started[n].run(odd_gradients, name)
        for key in results[0][0]:  # the other name of a tied one is not there
            befores = [before[key] for before, *_ in results]
            given = [grad for grad in befores if grad is not None]
            mean = sum(given) / n if given else None
            if key == "unused" and name == "average_gradients_naive":
                mean = torch.zeros(2, 2)
            for before, after, *_ in results:
                if mean is None:
                    assert after[key] is None, key
                elif key == "stale":  # frozen: left alone
                    assert torch.equal(after[key], before[key])
                else:
                    torch.testing.assert_close(after[key], mean, msg=key)
                    assert torch.equal(after[key], results[0][1][key])
        assert all(tidy for *_, tidy in results)
        sizes = Counter()
        for dtype, numel in results[0][2]:
            sizes[dtype] += numel + ("naive" in name)
        sent.append((len(results[0][2]), sizes))
    assert [messages for messages, _ in sent] == [3, 12]
    assert sent[0][1] == sent[1][1]


@on_ranks(4)
def test_no_gradients_and_large_ones():
    """Nothing stays nothing, and float16 does not overflow in the sum."""
    model, large = mlp(), nn.Linear(1, 1, bias=False, dtype=torch.float16)
    ours.average_gradients(model)
    ours.average_gradients(nn.Flatten())
    assert all(parameter.grad is None for parameter in model.parameters())
    for average in (ours.average_gradients, ours.average_gradients_naive):
        large.weight.grad = torch.full((1, 1), 60_000.0, dtype=torch.float16)
        average(large)
        assert large.weight.grad.item() == 60_000.0


@on_ranks(2)
def test_what_counts_is_the_values_and_not_how_they_lie_in_memory():
    """gloo adds up what lies at the same place: without a word, the wrong numbers."""
    for average in (ours.average_gradients, ours.average_gradients_naive):
        values = torch.arange(6.0).view(2, 3) + dist.get_rank()
        if dist.get_rank() == 1:
            values = values.t().contiguous().t()
        model = nn.Linear(3, 2, bias=False)
        model.weight.grad, model.weight.data = values.clone(), values
        average(model)
        assert model.weight.grad.flatten().tolist() == [k + 0.5 for k in range(6)]
    ours.broadcast_parameters(model)
    assert model.weight.flatten().tolist() == [*range(6)]


# --------------------------------------------------------------- count over all ranks
@on_ranks(2)
def test_numbers_are_summed_exactly():
    sums = ours.sum_over_ranks(2**51 + dist.get_rank(), 0.5)
    assert sums == [2.0**52 + 1, 1.0]


SHARES = [[7, 3], [1], [], [20, 0, 9]]  # sizes of the batches of each of 4 ranks


@several
def test_evaluate_counts_each_row_once(started, n):
    rows = sum(sum(batches) for batches in SHARES[:n])
    inputs, labels = rows_of(rows, torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5)).double()
    logits = model(inputs).detach()
    labels[:9] = logits[:9].argmax(1)  # rank 0 has 9 of 10 right, or all 10
    loss = F.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(1) == labels).double().mean().item()

    def share():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 5)).double()
        before, mine = (sum(map(sum, SHARES[: dist.get_rank() + k])) for k in (0, 1))
        sizes = SHARES[dist.get_rank()]
        parts = (t[before:mine].split(sizes) if sizes else [] for t in (inputs, labels))
        return ours.evaluate(model, zip(*parts, strict=True))

    results = started[n].run(share)
    assert results == [results[0]] * n
    # A mean of the ranks' means would count the one row of rank 1 as much as ten.
    assert results[0] == pytest.approx((loss, accuracy), rel=1e-12)


@on_ranks(2)
def test_evaluate_leaves_each_module_in_its_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()  # frozen on purpose
    for label in (1, 2):
        with contextlib.suppress(IndexError):  # there is no class 2
            ours.evaluate(model, [(torch.ones(3, 2), torch.tensor([0, 1, label]))])
        modes = [module.training for module in model.modules()]
        assert modes == [True, True, False, True]


# --------------------------------------------------------------------- a larger batch
def test_the_warm_up_is_a_straight_line():
    assert ours.warmup_lr(0, 0, 0.1, 0.8) == 0.8  # no warm-up
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.8)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 8, total_iters=10)
    for step in range(15):
        rate = ours.warmup_lr(step, 10, 0.1, 0.8)
        assert schedule.get_last_lr() == pytest.approx([rate])
        optimizer.step()
        schedule.step()
