"""``from_scratch/ring.py`` against ``torch.distributed``, on 1 to 5 real ranks.

The numbers in the tensors are small and whole: their sums are the same in any order.
The work is done in functions that every rank runs; an assertion that fails there ends
the test with the rank's own message.
"""

import glob
import math
import os

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, several
from thorough import thorough_after
from torch.distributed import ReduceOp

from course_utils.from_scratch import ring
from course_utils.measure.messages import recorded
from course_utils.theory import costs

from .reductions import OPS, numbers, reduced

SIZES = (0, 1, 2, 3, 4, 5, 7, 12, 101)
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.complex64),
)


# Halving and doubling needs 4, and a tree has gaps with 3.
odd_and_even = pytest.mark.parametrize(
    "ranks", thorough_after(2, [3, 4, 1, 2]), indirect=True
)


def in_small_pieces(tensor, op=ReduceOp.SUM, group=None):
    ring.all_reduce_pipelined(tensor, op, group, piece_bytes=8)


def in_shared_memory(tensor, op=ReduceOp.SUM, group=None):
    shared = ring.SharedMemoryRing(tensor.numel(), tensor.dtype, group)
    shared.all_reduce(tensor, op)


def functions(n):
    some = [
        ring.all_reduce_ring,
        ring.all_reduce_pipelined,
        in_small_pieces,
        ring.all_reduce_tree,
        in_shared_memory,
    ]
    if n & (n - 1) == 0:
        some.append(ring.all_reduce_halving_doubling)
    return some


def expected_of(seed, shape, dtype, op):
    """From all ranks' numbers, in this process alone."""
    everybody = [numbers(seed + r, shape, dtype) for r in range(dist.get_world_size())]
    return reduced(op, everybody)


def check(shapes, dtypes, ops):
    rank, n = dist.get_rank(), dist.get_world_size()
    seed = 0
    for shape in shapes:
        for dtype in dtypes:
            for name in ops:
                op, seed = OPS[name], seed + 100
                whole = not (dtype.is_floating_point or dtype.is_complex)
                if name == "AVG" and whole:
                    continue
                if dtype.is_complex and name in ("MIN", "MAX"):
                    continue
                expected = expected_of(seed, shape, dtype, op)
                for function in functions(n):
                    made = numbers(seed + rank, shape, dtype)
                    where = made.data_ptr()
                    function(made, op)
                    what = (function.__name__, shape, dtype, name, made, expected)
                    assert made.dtype == dtype and torch.equal(made, expected), what
                    assert made.data_ptr() == where, "not in place"


@odd_and_even
def test_every_size(ranks):
    ranks.run(check, [(size,) for size in SIZES], [torch.float32], ["SUM"])
    ranks.run(check, [(), (2, 3), (3, 0), (4, 5, 3)], [torch.float32], ["SUM"])


@odd_and_even
def test_every_dtype_and_op(ranks):
    ranks.run(check, [(11,)], DTYPES, list(OPS))


def layouts(seed):
    """Tensors whose strides, or whose memory, say something else than their values."""
    pixels = numbers(seed, (4, 3, 1, 1)).to(memory_format=torch.channels_last)
    complexes = numbers(seed, (5,), torch.complex64)
    return {
        "transposed": numbers(seed, (5, 7)).t(),
        "every second": numbers(seed, (9, 2))[:, 0],
        "the gradient of a 1x1 convolution in channels_last": pixels,
        "strides of size 1": numbers(seed, (3,)).as_strided((1, 3, 1), (7, 1, 9)),
        "one element, expanded": numbers(seed, (1,)).expand(1, 1),
        "nothing, expanded": torch.ones(1).expand(0),
        "conjugated on some ranks": complexes.conj() if seed % 2 else complexes,
        "negated, lazily": complexes.clone().conj().imag,
    }


@several
def test_values_count_and_not_how_they_lie_in_memory():
    rank, n = dist.get_rank(), dist.get_world_size()
    totals = {name: 0 for name in layouts(rank)}
    for other in range(n):
        for name, tensor in layouts(other).items():
            totals[name] = totals[name] + tensor
    for function in functions(n):
        for name, tensor in layouts(rank).items():
            function(tensor)
            assert torch.equal(tensor, totals[name]), (function.__name__, name)
            if name == "every second":  # the others are what they were
                assert torch.equal(tensor._base[:, 1], numbers(rank, (9, 2))[:, 1])


def refusals(n):
    """What is refused in words, before anything is sent."""
    ones = torch.ones
    for function in functions(n):
        yield TypeError, lambda f=function: f(ones(4).to_sparse()), "sparse_coo, and"
        yield ValueError, lambda f=function: f(ones(4, device="meta")), "no values"
        yield ValueError, lambda f=function: f(ones(1).expand(4)), "memory.*clone"
        yield ValueError, lambda f=function: f(ones(6).unfold(0, 3, 2)), "share memory"
    for half in (ring.reduce_scatter_ring, ring.all_gather_ring):
        yield ValueError, lambda h=half: h([ones(1)] * (n + 1)), f"expected {n}"
        columns = [*ones(4, n).t()]
        yield ValueError, lambda h=half, c=columns: h(c), "expected contiguous"
    whole, complex_ = ones(3).int(), ones(2).cfloat()
    yield from (
        (
            ValueError,
            lambda: ring.all_reduce_ring(ones(3), "sum"),
            "expected SUM, PROD",
        ),
        (ValueError, lambda: ring.all_reduce_ring(whole, ReduceOp.AVG), "AVG needs a"),
        (ValueError, lambda: ring.all_reduce_tree(complex_, ReduceOp.MAX), "an order"),
        (
            ValueError,
            lambda: ring.SharedMemoryRing(4).all_reduce(ones(3)),
            "has 3 elements.*expected 4",
        ),
        (ValueError, lambda: ring.SharedMemoryRing(2 + dist.get_rank()), "3 on rank 1"),
    )
    if n == 3:
        yield ValueError, lambda: ring.all_reduce_halving_doubling(ones(3)), "not 3"


@on_ranks(2, 3)
def test_bad_input_is_named_before_anything_is_sent():
    for error, call, message in refusals(dist.get_world_size()):
        with recorded() as sent, pytest.raises(error, match=message):
            call()
        assert sent == []


@on_ranks(3)
def test_past_autograd():
    model = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1)
    ring.all_reduce_ring(model.weight)
    assert model.weight.eq(dist.get_world_size()).all()
    assert model.weight.requires_grad and model.weight.grad_fn is None


@several
def test_the_halves_hold_what_they_say():
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = numbers(rank, (2 * n + 1,))
    total = expected_of(0, (2 * n + 1,), tensor.dtype, ReduceOp.SUM)
    chunks, mine = tensor.tensor_split(n), (rank + 1) % n
    ring.reduce_scatter_ring(chunks)
    assert torch.equal(chunks[mine], total.tensor_split(n)[mine])
    # The docstring: chunk c has gone from rank c on, and all it met are in it.
    for c, chunk in enumerate(chunks):
        met = [numbers((c + k) % n, (2 * n + 1,)) for k in range((rank - c) % n + 1)]
        assert torch.equal(chunk, sum(met).tensor_split(n)[c]), (rank, c)
    ring.all_gather_ring(chunks)
    assert torch.equal(tensor, total)
    chunks = numbers(rank, (2 * n + 1,)).tensor_split(n)
    ring.reduce_scatter_ring(chunks, ReduceOp.AVG)
    torch.testing.assert_close(chunks[mine], total.tensor_split(n)[mine] / n)


def count(nbytes):
    """Bytes that this rank sends, by function, and how many messages."""
    counts = {}
    for function in functions(dist.get_world_size()):
        if function is in_shared_memory:  # to make it takes messages, to use it none
            function = ring.SharedMemoryRing(nbytes // 4).all_reduce
        with recorded() as calls:
            function(torch.zeros(nbytes // 4))
        sent = [call.nbytes for call in calls if call.kind == "send"]
        counts[function.__name__] = (sum(sent), len(sent))
    return counts


@odd_and_even
def test_messages_and_bytes_are_those_of_the_docstrings(ranks):
    n, size = ranks.n, 240
    by_rank = ranks.run(count, size)
    least = 2 * (n - 1) * size // n
    cost = costs.collective_cost("all_reduce", n, size)
    for counts in by_rank:
        assert counts["all_reduce_ring"] == (least, 2 * (n - 1))
        assert counts["all_reduce_ring"][0] == pytest.approx(cost.most_sent)
        assert counts["all_reduce_pipelined"] == (least, 2 * (n - 1))
        assert counts["in_small_pieces"][0] == least
        assert counts["in_small_pieces"][1] == math.ceil(size // n / 8) * 2 * (n - 1)
        assert counts["all_reduce"] == (0, 0)  # in shared memory
        if n & (n - 1) == 0:
            log = n.bit_length() - 1
            assert counts["all_reduce_halving_doubling"] == (least, 2 * log)
    tree = [counts["all_reduce_tree"][0] for counts in by_rank]
    assert sum(tree) == 2 * (n - 1) * size
    assert max(tree) <= (n - 1).bit_length() * size


@on_ranks(5)
def test_in_a_group_of_some_ranks():
    rank = dist.get_rank()
    group = dist.new_group([4, 1, 2])
    if rank in (1, 2, 4):
        for function in functions(3):
            made = numbers(rank, (10,))
            function(made, ReduceOp.SUM, group)
            total = sum(numbers(r, (10,)) for r in (1, 2, 4))
            assert torch.equal(made, total), function.__name__
    dist.barrier()


@several
def test_many_in_a_row():
    """No message of one call is taken for one of the next."""
    rank, n = dist.get_rank(), dist.get_world_size()
    shared = ring.SharedMemoryRing(50)
    made = numbers(rank, (50,))
    expected = torch.stack([numbers(r, (50,)) for r in range(n)]).sum(0)
    for number in range(12):
        for function in [*functions(n)[:4], lambda t: shared.all_reduce(t)]:
            made = numbers(rank, (50,)) + number
            function(made)
            assert torch.equal(made, expected + n * number), number
        # A tensor in the shared memory itself, whose next user comes at once.
        shared.buffer.copy_(numbers(rank, (50,)))
        shared.all_reduce(shared.buffer)
        assert torch.equal(shared.buffer, expected)


@on_ranks(3, 4)
def test_large_tensors():
    rank, n = dist.get_rank(), dist.get_world_size()
    expected = torch.arange(1_000_001, dtype=torch.float64) * (n * (n + 1) / 2)
    for function in functions(n):
        if function is not in_small_pieces:  # that would be a million messages
            tensor = torch.arange(1_000_001, dtype=torch.float64) * (rank + 1)
            function(tensor)
            assert torch.equal(tensor, expected), function.__name__


def test_shared_memory_leaves_nothing_behind(started):
    def files():
        return {f for f in glob.glob("/dev/shm/*") if os.path.isfile(f)}

    def make():
        return ring.SharedMemoryRing(10**6).buffer.sum().item()

    before = files()
    started[4].run(make)
    assert {f for f in files() - before if os.path.getsize(f) >= 16_000_000} == set()
