"""``from_scratch/collectives.py`` against ``torch.distributed``, on 1 to 5 real ranks.

The numbers in the tensors are small and whole: their sums are the same in any order.
The work is done in functions that every rank runs; an assertion that fails there ends
the test with the rank's own message.
"""

import inspect
import math
import re
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from ranks_support import ranks_up_to
from thorough import thorough_after
from torch.distributed import ReduceOp

from course_utils.from_scratch import collectives
from course_utils.ranks import RanksError
from course_utils.theory import costs

# The ranks get the functions below as they are, and need not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

OPS = {
    op.name: op
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
}
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
SHAPES = ((), (0,), (1,), (5,), (2, 3), (2, 0, 3))


@pytest.fixture(scope="module")
def started():
    """Ranks by their number: all tests share them."""
    with ranks_up_to(5, timeout=30) as ranks:
        yield ranks


@pytest.fixture(params=thorough_after(3, [1, 3, 4, 2, 5]))
def ranks(request, started):
    return started[request.param]


def numbers(seed, shape, dtype=torch.float32):
    """Small whole numbers that depend on the seed; 1 or 2, or true and false."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(1, 3, shape, generator=generator)
    if dtype == torch.bool:
        return tensor == 2
    if dtype.is_complex:
        return torch.complex(tensor.double(), tensor.double() - 3).to(dtype)
    return tensor.to(dtype)


def with_gaps(tensor):
    """The same numbers with other numbers in memory between them."""
    wide = torch.stack([tensor, torch.full_like(tensor, 7)], dim=-1)
    return wide[..., 0]


def same(made, expected, *what):
    assert made.dtype == expected.dtype, what
    assert torch.equal(made, expected), (*what, made, expected)


# ------------------------------------------------------------------------- with a root


def check_roots(shapes, dtypes, roots=()):
    rank, n = dist.get_rank(), dist.get_world_size()
    for number, (shape, dtype) in enumerate((s, d) for s in shapes for d in dtypes):
        for root in roots or [number % n]:
            seed, what = 1000 * number + 10 * root, (shape, dtype, root)
            mine = numbers(seed + rank, shape, dtype)
            everybody = [numbers(seed + r, shape, dtype) for r in range(n)]
            nothing = [torch.zeros_like(mine) for _ in range(n)]

            expected = mine.clone()
            dist.broadcast(expected, root)
            for function in (collectives.broadcast, collectives.broadcast_tree):
                made = mine.clone()
                assert function(made, root) is None
                same(made, expected, function.__name__, *what)

            made, expected = torch.zeros_like(mine), torch.zeros_like(mine)
            given = everybody if rank == root else None
            dist.scatter(expected, given, root)
            collectives.scatter(made, given, root)
            same(made, expected, "scatter", *what)

            expected = [t.clone() for t in nothing] if rank == root else None
            made = [t.clone() for t in nothing] if rank == root else None
            if not dtype.is_complex:  # gloo can't do this one
                dist.gather(mine, expected, root)
            collectives.gather(mine, made, root)
            for i in range(n if rank == root else 0):
                same(made[i], everybody[i], "gather", i, *what)
                assert dtype.is_complex or torch.equal(made[i], expected[i])
            same(mine, numbers(seed + rank, shape, dtype), "the input of gather")


def test_with_every_root(ranks):
    ranks.run(check_roots, ((3,),), DTYPES[:1], range(ranks.n))
    ranks.run(check_roots, SHAPES, DTYPES[:1])
    if ranks.n == 3:  # a dtype does not care how many ranks there are
        ranks.run(check_roots, ((3,),), DTYPES[1:])


def check_reductions(ops, dtypes, shapes):
    rank, n = dist.get_rank(), dist.get_world_size()
    for number, (dtype, shape) in enumerate((d, s) for d in dtypes for s in shapes):
        for name, op in ops.items():
            whole = not (dtype.is_floating_point or dtype.is_complex)
            if dtype.is_complex and name != "SUM" and name != "AVG":
                continue  # torch refuses these
            if name == "AVG" and whole:
                continue
            seed, what = 100 * number, (name, dtype, shape)
            mine = numbers(seed + rank, shape, dtype)
            expected = mine.clone()
            dist.all_reduce(expected, op)
            if name == "AVG" and n % 2:  # a third is rounded, in one way or another
                expected = mine.clone()
                dist.all_reduce(expected, ReduceOp.SUM)
                expected = expected / n
            for function in (collectives.all_reduce_naive, collectives.all_reduce):
                made = mine.clone()
                assert function(made, op) is None
                same(made, expected, function.__name__, *what)
            root = number % n
            made = mine.clone()
            collectives.reduce(made, root, op)
            same(made, expected if rank == root else mine, "reduce", root, *what)

            given = [numbers(seed + 10 * r + rank, shape, dtype) for r in range(n)]
            made, expected = torch.zeros_like(mine), torch.zeros_like(mine)
            plain = ReduceOp.SUM if name == "AVG" else op
            dist.reduce_scatter(expected, [t.clone() for t in given], plain)
            expected = expected / n if name == "AVG" else expected
            collectives.reduce_scatter(made, given, op)
            same(made, expected, "reduce_scatter", *what)
            for r in range(n):
                same(given[r], numbers(seed + 10 * r + rank, shape, dtype), "input")


def test_reductions(ranks):
    ranks.run(check_reductions, OPS, DTYPES if ranks.n == 3 else DTYPES[:1], ((3,),))
    ranks.run(check_reductions, {"SUM": ReduceOp.SUM}, DTYPES[:1], SHAPES)


def check_complex_product():
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([1j, 2.0 + rank])
    collectives.all_reduce(mine, ReduceOp.PRODUCT)
    product = math.prod(2.0 + r for r in range(n))
    same(mine, torch.tensor([1j**n, product]), "complex product")


def test_a_product_of_complex_numbers_which_torch_refuses(ranks):
    ranks.run(check_complex_product)


# ----------------------------------------------------------------------- without a root


def check_lists(shapes, dtypes):
    rank, n = dist.get_rank(), dist.get_world_size()
    for number, (shape, dtype) in enumerate((s, d) for s in shapes for d in dtypes):
        seed, what = 1000 * number, (shape, dtype)
        mine = numbers(seed + rank, shape, dtype)
        made = [torch.zeros_like(mine) for _ in range(n)]
        expected = [torch.zeros_like(mine) for _ in range(n)]
        dist.all_gather(expected, mine)
        collectives.all_gather(made, mine)
        for i in range(n):
            same(made[i], expected[i], "all_gather", i, *what)

        given = [numbers(seed + 10 * rank + r, shape, dtype) for r in range(n)]
        made = [torch.zeros_like(mine) for _ in range(n)]
        expected = [torch.zeros_like(mine) for _ in range(n)]
        dist.all_to_all(expected, given)
        collectives.all_to_all(made, given)
        for i in range(n):
            same(made[i], expected[i], "all_to_all", i, *what)
            same(given[i], numbers(seed + 10 * rank + i, shape, dtype), "input")


def test_lists_for_all(ranks):
    ranks.run(check_lists, SHAPES, (torch.float32,))
    if ranks.n == 3:
        ranks.run(check_lists, ((3,),), DTYPES[1:])


def check_uneven(sizes):
    """Rank r has sizes[r] elements. torch's gloo can do only reduce_scatter."""
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = [torch.arange(float(sizes[r])) + 10 * r for r in range(n)]
    mine = parts[rank]

    for root in range(n):
        made = torch.full_like(mine, -1)
        collectives.scatter(made, parts if rank == root else None, root)
        same(made, mine, "scatter", root)
        made = [torch.full_like(part, -1) for part in parts]
        collectives.gather(mine, made if rank == root else None, root)
        for i in range(n if rank == root else 0):
            same(made[i], parts[i], "gather", root, i)

    made = [torch.full_like(part, -1) for part in parts]
    collectives.all_gather(made, mine)
    for i in range(n):
        same(made[i], parts[i], "all_gather", i)

    made, expected = torch.full_like(mine, -1), torch.full_like(mine, -1)
    collectives.reduce_scatter(made, [part + rank for part in parts])
    dist.reduce_scatter(expected, [part + rank for part in parts])
    same(made, expected, "reduce_scatter")

    def piece(sender, receiver):
        length = sizes[sender] * (receiver + 1) % 4
        return torch.full((length,), 10.0 * sender + receiver)

    made = [torch.full_like(piece(i, rank), -1) for i in range(n)]
    collectives.all_to_all(made, [piece(rank, i) for i in range(n)])
    for i in range(n):
        same(made[i], piece(i, rank), "all_to_all", i)

    for length in range(2 * n + 2):  # what n does not divide, and less than n
        made = torch.arange(float(length)) + rank
        expected = made.clone()
        collectives.all_reduce(made)
        dist.all_reduce(expected)
        same(made, expected, "all_reduce", length)


def test_sizes_that_differ_from_rank_to_rank(ranks):
    ranks.run(check_uneven, [3, 0, 1, 7, 2])
    ranks.run(check_uneven, [0, 5, 5, 1, 0])


def check_gaps():
    """Tensors with gaps are read and written as the others, and nothing beside them."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def made_from(tensor):
        return with_gaps(tensor)

    def fresh():
        return made_from(torch.zeros(2, 3)).t()

    def value(seed):
        return made_from(numbers(seed, (2, 3))).t()

    everybody = [value(r) for r in range(n)]
    total = torch.stack(everybody).sum(0)
    written = []

    for function in (collectives.broadcast, collectives.broadcast_tree):
        tensor = value(rank)
        function(tensor, n - 1)
        same(tensor, everybody[n - 1], function.__name__)
        written.append(tensor)
    tensor = fresh()
    collectives.scatter(tensor, everybody if rank == 0 else None)
    same(tensor, everybody[rank], "scatter")
    written.append(tensor)
    tensors = [fresh() for _ in range(n)]
    collectives.gather(everybody[rank], tensors if rank == 0 else None)
    if rank == 0:
        same(torch.stack(tensors), torch.stack(everybody), "gather")
    written += tensors
    tensor = value(rank)
    collectives.reduce(tensor)
    same(tensor, total if rank == 0 else everybody[rank], "reduce")
    written.append(tensor)
    for function in (collectives.all_reduce_naive, collectives.all_reduce):
        tensor = value(rank)
        function(tensor)
        same(tensor, total, function.__name__)
        written.append(tensor)
    tensors = [fresh() for _ in range(n)]
    collectives.all_gather(tensors, everybody[rank])
    same(torch.stack(tensors), torch.stack(everybody), "all_gather")
    written += tensors
    tensor = fresh()
    collectives.reduce_scatter(tensor, [value(rank + r) for r in range(n)])
    same(tensor, torch.stack([value(r + rank) for r in range(n)]).sum(0), "r_s")
    written.append(tensor)
    tensors = [fresh() for _ in range(n)]
    collectives.all_to_all(tensors, [value(10 * rank + r) for r in range(n)])
    expected = [value(10 * r + rank) for r in range(n)]
    same(torch.stack(tensors), torch.stack(expected), "all_to_all")
    written += tensors

    for tensor in written:
        assert not tensor.is_contiguous()
        beside = tensor.as_strided(tensor.shape, tensor.stride(), 1)
        assert (beside == 7).all()


def test_tensors_with_gaps(ranks):
    ranks.run(check_gaps)


def check_same_memory():
    """What is given lies in what is to be written, with strides that differ."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def pixels(seed):
        return numbers(seed, (4, 3, 1, 1)).to(memory_format=torch.channels_last)

    everybody = [pixels(r) for r in range(n)]
    for function in (collectives.all_reduce, collectives.all_reduce_naive):
        tensor = pixels(rank)
        function(tensor)
        same(tensor, sum(everybody), function.__name__)
    for turned in (False, True):
        made = [torch.zeros(4, 3, 1, 1) for _ in range(n)]
        made[rank] = pixels(rank)
        mine = made[rank].view(4, 3, 1, 1)
        if turned:
            made[rank] = mine.view(3, 4, 1, 1).transpose(0, 1)
        expected = [mine.clone() if i == rank else everybody[i] for i in range(n)]
        collectives.all_gather(made, mine)
        same(torch.stack(made), torch.stack(expected), "all_gather", turned)


def test_what_is_given_may_be_what_is_written(ranks):
    ranks.run(check_same_memory)


def check_refused():
    n, bad = dist.get_world_size(), torch.ones(1).expand(4)
    good = [torch.zeros(4) for _ in range(n)]
    calls = {
        "broadcast": lambda: collectives.broadcast(bad),
        "broadcast_tree": lambda: collectives.broadcast_tree(bad),
        "scatter": lambda: collectives.scatter(bad, good),
        "reduce": lambda: collectives.reduce(bad),
        "all_gather": lambda: collectives.all_gather([bad] * n, good[0]),
        "reduce_scatter": lambda: collectives.reduce_scatter(bad, good),
        "all_to_all": lambda: collectives.all_to_all([bad] * n, good),
        "all_reduce": lambda: collectives.all_reduce(bad),
        "all_reduce_naive": lambda: collectives.all_reduce_naive(bad),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="elements that share memory"):
            call()
            raise AssertionError(name)
    for odd in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        with pytest.raises(TypeError, match="only dense tensors can be sent"):
            collectives.all_reduce(odd)
        with pytest.raises(TypeError, match="only dense tensors can be sent"):
            collectives.all_gather([odd] * n, odd)


def test_what_cannot_be_written_to_is_refused_before_a_message(ranks):
    ranks.run(check_refused)


def check_parameters():
    """As lesson 05 does it with a model: parameters, and their gradients."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for function in (collectives.broadcast, collectives.broadcast_tree):
        parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
        function(parameter, n - 1)
        same(parameter.detach(), torch.full((2, 2), n - 1.0), function.__name__)
        assert parameter.requires_grad
        assert parameter.is_leaf
    for function in (collectives.all_reduce_naive, collectives.all_reduce):
        parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
        function(parameter)
        same(parameter.detach(), torch.full((2, 2), sum(range(n)) * 1.0), "all_reduce")
        parameter.sum().backward()
        assert (parameter.grad == 1).all()
        function(parameter.grad)
        assert (parameter.grad == n).all()
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    tensors = [torch.zeros(2) for _ in range(n)]
    collectives.all_gather(tensors, parameter)
    assert [t[0].item() for t in tensors] == [float(r) for r in range(n)]
    assert not any(t.requires_grad for t in tensors)


def test_parameters_of_a_model(ranks):
    ranks.run(check_parameters)


# --------------------------------------------------------------- at the same time


def check_exchange(size):
    """Every rank sends first. It is more than the connection can hold by itself."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        incoming = torch.empty(size)
        collectives.exchange(torch.full((size,), float(rank)), to, incoming, source)
        assert (incoming == source).all()


def test_an_exchange_never_waits_for_itself(ranks):
    ranks.run(check_exchange, 4 * 2**20)


def check_many_calls():
    """Ranks of different speed, and no message is taken for that of another call."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for call in range(30):
        if call % n == rank:
            time.sleep(0.002)  # another one is late each time
        root, mine = call % n, torch.tensor([100.0 * call + rank])
        tensor = mine.clone()
        (collectives.broadcast, collectives.broadcast_tree)[call % 2](tensor, root)
        assert tensor.item() == 100 * call + root
        tensor = mine.clone()
        (collectives.all_reduce, collectives.all_reduce_naive)[call % 2](tensor)
        assert tensor.item() == 100 * call * n + sum(range(n))
        tensors = [torch.zeros(1) for _ in range(n)]
        collectives.all_gather(tensors, mine)
        assert torch.cat(tensors).tolist() == [100 * call + r for r in range(n)]
        tensor = mine.clone()
        collectives.reduce(tensor, root, ReduceOp.MAX)
        assert tensor.item() == 100 * call + (n - 1 if rank == root else rank)
        collectives.all_to_all(tensors, [mine + 10 * r for r in range(n)])
        expected = [100.0 * call + r + 10 * rank for r in range(n)]
        assert torch.cat(tensors).tolist() == expected


def test_many_calls_in_a_row(ranks):
    ranks.run(check_many_calls)


def late_barrier(late):
    rank = dist.get_rank()
    dist.barrier()
    if rank == late:
        time.sleep(0.2)
    arrived = time.monotonic()
    collectives.barrier()
    return arrived, time.monotonic()


def test_nobody_leaves_a_barrier_before_all_have_come(ranks):
    for late in {0, ranks.n - 1}:
        times = ranks.run(late_barrier, late)
        assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


# ------------------------------------------------------------------------------ groups


def check_group(members):
    """A group of its own: ranks are those of the job, and only its members call."""
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank not in members:
        for call in (
            lambda: collectives.broadcast(torch.zeros(1), members[0], group),
            lambda: collectives.all_reduce(torch.zeros(1), group=group),
            lambda: collectives.all_reduce_naive(torch.zeros(1), group=group),
            lambda: collectives.all_gather([torch.zeros(1)], torch.zeros(1), group),
            lambda: collectives.barrier(group),
        ):
            try:
                call()
            except ValueError as error:
                text = f"Rank {rank} is not in the group: only its members call this."
                assert str(error) == text
            else:
                raise AssertionError("a stranger was let in")
        dist.barrier()
        return None
    n = len(members)
    mine = torch.tensor([1.0 + rank, 2.0])
    for root in members:
        expected = mine.clone()
        dist.broadcast(expected, root, group)
        for function in (collectives.broadcast, collectives.broadcast_tree):
            made = mine.clone()
            function(made, root, group)
            same(made, expected, function.__name__, root)
        given = [mine * r for r in range(n)] if rank == root else None
        made, expected = torch.zeros(2), torch.zeros(2)
        collectives.scatter(made, given, root, group)
        dist.scatter(expected, given, root, group)
        same(made, expected, "scatter", root)
        made = [torch.zeros(2) for _ in range(n)] if rank == root else None
        collectives.gather(mine, made, root, group)
        if rank == root:
            assert [t[0].item() for t in made] == [1.0 + r for r in members]
        made = mine.clone()
        collectives.reduce(made, root, ReduceOp.PRODUCT, group)
        if rank == root:
            assert made.tolist() == [math.prod(1.0 + r for r in members), 2.0**n]
    for function in (collectives.all_reduce_naive, collectives.all_reduce):
        made = mine.clone()
        function(made, group=group)
        assert made.tolist() == [sum(1.0 + r for r in members), 2.0 * n]
    made = [torch.zeros(2) for _ in range(n)]
    collectives.all_gather(made, mine, group)
    assert [t[0].item() for t in made] == [1.0 + r for r in members]
    made, expected = torch.zeros(2), torch.zeros(2)
    collectives.reduce_scatter(made, [mine * r for r in range(n)], group=group)
    dist.reduce_scatter(expected, [mine * r for r in range(n)], group=group)
    same(made, expected, "reduce_scatter")
    made = [torch.zeros(2) for _ in range(n)]
    expected = [torch.zeros(2) for _ in range(n)]
    collectives.all_to_all(made, [mine * r for r in range(n)], group)
    dist.all_to_all(expected, [mine * r for r in range(n)], group)
    same(torch.stack(made), torch.stack(expected), "all_to_all")
    if rank == members[-1]:
        time.sleep(0.05)
    arrived = time.monotonic()
    collectives.barrier(group)
    left = time.monotonic()
    dist.barrier()
    return arrived, left


@pytest.mark.parametrize("members", [[1, 3, 4], [0, 2], [2]], ids=str)
def test_groups(started, members):
    times = [pair for pair in started[5].run(check_group, members) if pair]
    assert len(times) == len(members)
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


# ------------------------------------------------------------------------------- costs


def calls(name, size):
    """Make one call of `name` with `size` float32 in all. Returns what this rank did.

    Events in order: ("send" or "isend" or "recv", the other rank, bytes).
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    events = []
    before = {kind: getattr(dist, kind) for kind in ("send", "isend", "recv")}

    def counted(kind):
        def call(tensor, group=None, group_dst=None, group_src=None):
            other = group_src if kind == "recv" else group_dst
            events.append((kind, other, tensor.numel() * tensor.element_size()))
            place = {"group_src" if kind == "recv" else "group_dst": other}
            return before[kind](tensor, group=group, **place)

        return call

    whole = torch.ones(size)
    pieces = [torch.ones(size // n) for _ in range(n)]
    piece, others = torch.ones(size // n), [torch.ones(size // n) for _ in range(n)]
    arguments = {
        "broadcast": (whole, n - 1),
        "broadcast_tree": (whole, n - 1),
        "scatter": (piece, pieces if rank == n - 1 else None, n - 1),
        "gather": (piece, pieces if rank == n - 1 else None, n - 1),
        "reduce": (whole, n - 1),
        "all_gather": (pieces, piece),
        "reduce_scatter": (piece, pieces),
        "all_to_all": (others, pieces),
        "all_reduce_naive": (whole,),
        "all_reduce": (whole,),
        "barrier": (),
    }[name]
    try:
        for kind in before:
            setattr(dist, kind, counted(kind))
        getattr(collectives, name)(*arguments)
    finally:
        for kind, function in before.items():
            setattr(dist, kind, function)
    return events


def steps_of(events):
    """How long it takes if each send and each recv takes one step of its rank.

    A rank can send one message and receive one in a step; `isend` lets it go on.
    """
    n = len(events)
    now, out, place = [0] * n, [0] * n, [0] * n
    arrivals = {}  # (from, to) -> when each message has arrived
    taken = {}
    progress = True
    while progress:
        progress = False
        for rank in range(n):
            while place[rank] < len(events[rank]):
                kind, other, _ = events[rank][place[rank]]
                if kind == "recv":
                    pair = (other, rank)
                    index = taken.get(pair, 0)
                    if index >= len(arrivals.get(pair, [])):
                        break
                    now[rank] = max(now[rank] + 1, arrivals[pair][index])
                    taken[pair] = index + 1
                else:
                    out[rank] = max(now[rank], out[rank]) + 1
                    arrivals.setdefault((rank, other), []).append(out[rank])
                    now[rank] = out[rank] if kind == "send" else now[rank]
                place[rank] += 1
                progress = True
    assert place == [len(rank_events) for rank_events in events], "nobody sends that"
    assert {pair: len(times) for pair, times in arrivals.items()} == taken
    return max(now + out)


def formula(text, n):
    """A formula as the docstrings write it: `2n(n-1)`, `(n-1)/n`, `ceil(log2 n)`."""
    text = text.replace("log2 n", "log2(n)")
    text = re.sub(r"(?<=\d)(?=[n(])(?<!log2)", "*", text)
    text = re.sub(r"(?<![a-z2])n\(", "n*(", text)
    return eval(text, {"n": n, "ceil": math.ceil, "log2": math.log2})


@pytest.mark.parametrize(
    ("text", "value"),
    [("2n(n-1)", 24), ("2(n-1)/n", 1.5), ("ceil(log2 n)", 2), ("n(n-1)", 12)],
)
def test_formulas_are_read_right(text, value):
    assert formula(text, 4) == value


NAMES = (
    *("broadcast", "broadcast_tree", "scatter", "gather", "reduce", "all_gather"),
    *("reduce_scatter", "all_to_all", "all_reduce_naive", "all_reduce"),
)


@pytest.mark.parametrize("name", NAMES)
def test_the_costs_are_what_is_counted(ranks, name):
    n, size = ranks.n, 60  # 60 elements: 1 to 5 ranks divide it
    events = ranks.run(calls, name, size)
    sent = [[b for kind, _, b in mine if kind != "recv"] for mine in events]
    received = [[b for kind, _, b in mine if kind == "recv"] for mine in events]
    messages, nbytes = sum(map(len, sent)), sum(map(sum, sent))
    most_sent, most_received = max(map(sum, sent)), max(map(sum, received))
    steps = steps_of(events)

    cost = costs.collective_cost(name, n, 4 * size)
    assert (cost.messages, cost.nbytes, cost.steps) == (messages, nbytes, steps)
    assert (cost.most_sent, cost.most_received) == (most_sent, most_received)
    assert {b for some in sent for b in some} <= {cost.message_nbytes}

    text = " ".join(inspect.getdoc(getattr(collectives, name)).split())
    stated = re.search(
        r"Cost(?:, for lists? of S|, for a list of S)?: (?P<messages>.+) messages; "
        r"(?P<bytes>.+)·S bytes; busiest (?P<busiest>.+)·S, .+; (?P<steps>.+) steps\.",
        text,
    )
    assert formula(stated["messages"], n) == messages
    assert formula(stated["bytes"], n) * 4 * size == pytest.approx(nbytes)
    busiest = max(most_sent, most_received)
    assert formula(stated["busiest"], n) * 4 * size == pytest.approx(busiest)
    assert formula(stated["steps"], n) == steps


def test_the_cost_of_a_barrier(ranks):
    events = ranks.run(calls, "barrier", 0)
    sent = [b for mine in events for kind, _, b in mine if kind != "recv"]
    assert sent == [1] * (2 * (ranks.n - 1))
    assert steps_of(events) == 2 * (ranks.n - 1)


# ---------------------------------------------------------------------------- mistakes

ONE = torch.zeros(1)
PIECES = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]
MISTAKES = {
    "no such root": (
        lambda rank: collectives.broadcast(torch.zeros(1), 3),
        "src or dst is 3: expected one of the ranks [0, 1, 2].",
    ),
    "a negative root": (
        lambda rank: collectives.broadcast_tree(torch.zeros(1), -1),
        "src or dst is -1: expected one of the ranks [0, 1, 2].",
    ),
    "no such root of a reduce": (
        lambda rank: collectives.reduce(torch.zeros(1), 7),
        "src or dst is 7: expected one of the ranks [0, 1, 2].",
    ),
    "a bitwise op": (
        lambda rank: collectives.all_reduce(torch.zeros(1), ReduceOp.BAND),
        "op is RedOpType.BAND: expected SUM, PRODUCT, MIN, MAX or AVG.",
    ),
    "a name for an op": (
        lambda rank: collectives.reduce(torch.zeros(1), 0, "sum"),
        "op is sum: expected SUM, PRODUCT, MIN, MAX or AVG.",
    ),
    "an average of whole numbers": (
        lambda rank: collectives.all_reduce_naive(torch.tensor([1]), ReduceOp.AVG),
        "AVG needs a dtype with fractions, not torch.int64: use SUM and divide.",
    ),
    "the largest complex number": (
        lambda rank: collectives.reduce_scatter(
            torch.zeros(1, dtype=torch.complex64),
            [torch.zeros(1, dtype=torch.complex64)] * 3,
            ReduceOp.MAX,
        ),
        "RedOpType.MAX needs numbers that have an order, not torch.complex64.",
    ),
    "a list that is too short": (
        lambda rank: collectives.all_gather(PIECES[:2], torch.zeros(1)),
        "tensor_list has 2 tensors: expected 3, one for each rank.",
    ),
    "a list of another dtype": (
        lambda rank: collectives.all_gather(PIECES, torch.zeros(1, dtype=torch.int64)),
        "tensor_list[0] is of torch.float32: expected torch.int64.",
    ),
    "an output that does not fit": (
        lambda rank: collectives.reduce_scatter(torch.zeros(2), PIECES),
        "this rank's own, is of shape [1]: expected [2], that of the tensor it goes",
    ),
    "inputs of two dtypes": (
        lambda rank: collectives.all_to_all(PIECES, [*PIECES[:2], torch.tensor([1])]),
        "input_tensor_list[2] is of torch.int64: expected torch.float32.",
    ),
    "an output list that is too long": (
        lambda rank: collectives.all_to_all(PIECES * 2, PIECES),
        "output_tensor_list has 6 tensors: expected 3, one for each rank.",
    ),
    "an exchange with oneself": (
        lambda rank: collectives.exchange(ONE, rank, torch.zeros(1), (rank + 1) % 3),
        "cannot exchange with rank",
    ),
    "an exchange with nobody": (
        lambda rank: collectives.exchange(ONE, (rank + 1) % 3, torch.zeros(1), 3),
        "cannot exchange with rank 3: expected another rank, from 0 to 2.",
    ),
}


def check_mistakes(mistakes):
    """Every rank makes the same mistake: each is told so, and nothing was sent."""

    def no_message(*args, **kwargs):
        raise AssertionError("a message was sent")

    before = {kind: getattr(dist, kind) for kind in ("send", "isend", "recv")}
    for kind in before:
        setattr(dist, kind, no_message)
    try:
        for name, (call, message) in mistakes.items():
            try:
                call(dist.get_rank())
            except ValueError as error:
                assert message in str(error), (name, str(error))
            else:
                raise AssertionError(f"{name}: no error")
    finally:
        for kind, function in before.items():
            setattr(dist, kind, function)
    total = torch.ones(1)
    collectives.all_reduce(total)  # all is as before
    assert total.item() == dist.get_world_size()


def test_mistakes_are_told_before_anything_is_sent(started):
    started[3].run(check_mistakes, MISTAKES)


@pytest.mark.parametrize("name", ["scatter", "gather"])
def test_a_list_where_it_should_not_be(started, name):
    def call(everywhere):
        pieces = [torch.zeros(1) for _ in range(3)]
        given = pieces if everywhere else None
        getattr(collectives, name)(torch.zeros(1), given, 1)

    root = "src" if name == "scatter" else "dst"
    for everywhere, rank, message in (
        (True, 0, f"{name}_list must be None on this rank: only {root}=1 gives one."),
        (False, 1, f"{name}_list has None: expected 3, one for each rank."),
    ):
        with pytest.raises(RanksError) as caught:
            started[3].run(call, everywhere)
        failure = caught.value.failures[rank]
        assert (failure.error, failure.message) == ("ValueError", message)


def test_they_take_what_torch_takes():
    """The same names of arguments, in the same order, as far as they go."""
    for name in (*NAMES, "barrier"):
        torchs = {"broadcast_tree": "broadcast", "all_reduce_naive": "all_reduce"}
        theirs = getattr(dist, torchs.get(name, name))
        own = list(inspect.signature(getattr(collectives, name)).parameters)
        assert list(inspect.signature(theirs).parameters)[: len(own)] == own
