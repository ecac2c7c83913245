"""``from_scratch/collectives.py`` against ``torch.distributed``, on 1 to 5 real ranks.

The numbers in the tensors are small and whole: their sums are the same in any order.
The work is done in functions that every rank runs; an assertion that fails there ends
the test with the rank's own message.
"""

import inspect
import time

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, several
from torch.distributed import ReduceOp

from course_utils.from_scratch import collectives
from course_utils.measure.messages import in_steps, recorded
from course_utils.theory import costs

from .reductions import OPS, numbers, reduced

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
SHAPES = ((), (0,), (1,), (5,), (2, 3), (2, 0, 3))


def with_gaps(tensor):
    """The same numbers with other numbers in memory between them."""
    wide = torch.stack([tensor, torch.full_like(tensor, 7)], dim=-1)
    return wide[..., 0]


def same(made, expected, *what):
    assert made.dtype == expected.dtype, what
    assert torch.equal(made, expected), (*what, made, expected)


# ------------------------------------------------------------------------- every one
def everything(make, members, root, ops=(ReduceOp.SUM,), group=None, use=collectives):
    """Call every function once, on the ranks that are members.

    Args:
        make: a new tensor from a seed, and the rank among the members whose part it is,
            or None: then all must have one size.

    Yields:
        The name, the tensors that the call has made, and those that it must make.
    """
    me, n = members.index(dist.get_rank()), len(members)
    at_root, source = dist.get_rank() == root, members.index(root)

    def part(r):
        return make(10 + r, r)

    def whole(r):
        return make(100 + r, None)

    def given(sender, receiver):  # for a reduction of parts
        return make(1000 + 10 * sender + receiver, receiver)

    def sent(sender, receiver):
        return make(2000 + 10 * sender + receiver, (sender + 2 * receiver) % n)

    def blanks(tensors):
        return [tensor.zero_() for tensor in tensors]

    def parts():
        return [part(r) for r in range(n)]

    for name in ("broadcast", "broadcast_tree"):
        if call := getattr(use, name, None):
            made = whole(me)
            assert call(made, root, group) is None
            yield name, [made], [whole(source)]
    (made,), tensors = blanks([part(me)]), parts()
    use.scatter(made, tensors if at_root else None, root, group)
    yield "scatter", [made, *tensors], [part(me), *parts()]
    mine, made = part(me), blanks(parts())
    use.gather(mine, made if at_root else None, root, group)
    yield (
        "gather",
        [mine, *made],
        [part(me), *(parts() if at_root else blanks(parts()))],
    )
    mine, made = part(me), blanks(parts())
    use.all_gather(made, mine, group)
    yield "all_gather", [mine, *made], [part(me), *parts()]
    mine = [sent(me, r) for r in range(n)]
    made = blanks([sent(r, me) for r in range(n)])
    use.all_to_all(made, mine, group)
    expected = [sent(me, r) for r in range(n)] + [sent(r, me) for r in range(n)]
    yield "all_to_all", [*mine, *made], expected
    for op in ops:
        total = reduced(op, [whole(r) for r in range(n)])
        for name in ("all_reduce", "all_reduce_naive"):
            if call := getattr(use, name, None):
                made = whole(me)
                assert call(made, op, group) is None
                yield f"{name} {op}", [made], [total]
        made = whole(me)
        use.reduce(made, root, op, group)
        if at_root or use is collectives:  # torch leaves partial results elsewhere
            yield f"reduce {op}", [made], [total if at_root else whole(me)]
        (made,), tensors = blanks([part(me)]), [given(me, r) for r in range(n)]
        use.reduce_scatter(made, tensors, op, group)
        expected = [given(me, r) for r in range(n)]
        total = reduced(op, [given(r, me) for r in range(n)])
        yield f"reduce_scatter {op}", [made, *tensors], [total, *expected]


def check(make, what, roots=(0,), **options):
    for root in roots:
        members = list(range(dist.get_world_size()))
        for name, made, expected in everything(make, members, root, **options):
            for one, other in zip(made, expected, strict=True):
                same(one, other, name, what, root)
                if not one.is_contiguous():  # nothing beside it has changed
                    beside = one.as_strided(one.shape, one.stride(), 1)
                    assert (beside == 7).all(), name


def check_shapes(roots):
    for shape in SHAPES:
        check(lambda seed, _, shape=shape: numbers(seed, shape), shape)
    check(lambda seed, _: numbers(seed, (3,)), "roots", roots)
    check(lambda seed, _: with_gaps(numbers(seed, (2, 3))).t(), "gaps", roots[-1:])


def test_shapes_roots_and_tensors_with_gaps(ranks):
    ranks.run(check_shapes, range(ranks.n))


@on_ranks(3)
def test_dtypes_and_ops():
    for dtype in DTYPES:
        whole = not (dtype.is_floating_point or dtype.is_complex)
        ops = [op for op in OPS.values() if op != ReduceOp.AVG or not whole]
        if dtype.is_complex:
            ops = [op for op in ops if op not in (ReduceOp.MIN, ReduceOp.MAX)]
        if dtype == torch.bool:
            ops = []
        check(lambda seed, _, d=dtype: numbers(seed, (3,), d), dtype, (1,), ops=ops)


@on_ranks(3)
def test_torch_says_the_same():
    """The sums above are those of torch."""
    ops = [op for op in OPS.values() if op != ReduceOp.AVG]
    check(lambda seed, _: numbers(seed, (3,)), "torch", (1,), ops=ops, use=dist)
    logical = torch.tensor([True, False]), torch.tensor([dist.get_rank() == 0, False])
    for mine in logical:
        for op in ops:
            made, expected = mine.clone(), mine.clone()
            collectives.all_reduce(made, op)
            dist.all_reduce(expected, op)
            same(made, expected, op)


def check_uneven(sizes):
    """Rank r has sizes[r] elements."""

    def make(seed, which):
        return numbers(seed, (6 if which is None else sizes[which],))

    check(make, sizes, range(dist.get_world_size()))
    for length in range(2 * dist.get_world_size() + 2):  # fewer than ranks, too
        made = numbers(dist.get_rank(), (length,))
        expected = made.clone()
        collectives.all_reduce(made)
        dist.all_reduce(expected)
        same(made, expected, "all_reduce", length)


def test_sizes_that_differ_from_rank_to_rank(ranks):
    ranks.run(check_uneven, [3, 0, 1, 7, 2])
    ranks.run(check_uneven, [0, 5, 5, 1, 0])


@several
def test_what_is_given_may_be_what_is_written():
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


@several
def test_what_cannot_be_written_to_is_refused_before_a_message():
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


@several
def test_parameters_of_a_model():
    """They stay parameters, and can be received and reduced like other tensors."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for send, total in (
        (lambda p: collectives.broadcast(p, n - 1), n - 1),
        (lambda p: collectives.broadcast_tree(p, n - 1), n - 1),
        (collectives.all_reduce_naive, sum(range(n))),
        (collectives.all_reduce, sum(range(n))),
    ):
        parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
        send(parameter)
        same(parameter.detach(), torch.full((2, 2), float(total)))
        parameter.sum().backward()
        assert (parameter.grad == 1).all()
    tensors = [torch.zeros(2, 2) for _ in range(n)]
    collectives.all_gather(tensors, parameter)
    assert not any(t.requires_grad for t in tensors)


# --------------------------------------------------------------- at the same time


@on_ranks(3)
def test_an_exchange_never_waits_for_itself():
    """Every rank sends first. It is more than the connection can hold by itself."""
    rank, n, size = dist.get_rank(), dist.get_world_size(), 4 * 2**20
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        incoming = torch.empty(size)
        collectives.exchange(torch.full((size,), float(rank)), to, incoming, source)
        assert (incoming == source).all()


@several
def test_many_calls_in_a_row():
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
        collectives.reduce(tensor := mine.clone(), root, ReduceOp.MAX)
        assert tensor.item() == 100 * call + (n - 1 if rank == root else rank)
        tensors = [torch.zeros(1) for _ in range(n)]
        collectives.all_to_all(tensors, [mine + 10 * r for r in range(n)])
        expected = [100.0 * call + r + 10 * rank for r in range(n)]
        assert torch.cat(tensors).tolist() == expected


def late_barrier(late):
    rank = dist.get_rank()
    dist.barrier()
    if rank == late:
        time.sleep(0.2)
    arrived = time.monotonic()
    collectives.barrier()
    return arrived, time.monotonic()


def test_nobody_leaves_a_barrier_before_all_have_come(started):
    for late in (0, 2):
        times = started[3].run(late_barrier, late)
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
            with pytest.raises(ValueError, match=f"Rank {rank} is not in the group"):
                call()
        dist.barrier()
        return
    for root in members:
        found = everything(
            lambda seed, _: numbers(seed, (2,)), members, root, OPS.values(), group
        )
        for name, made, expected in found:
            for one, other in zip(made, expected, strict=True):
                torch.testing.assert_close(one, other, msg=name)
    collectives.barrier(group)
    dist.barrier()


@pytest.mark.parametrize("members", [[1, 3, 4], [0, 2], [2]], ids=str)
def test_groups(started, members):
    started[5].run(check_group, members)


# ------------------------------------------------------------------------------- costs


def noted(name, size):
    """The messages of one call of `name` with `size` float32 in all."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole, piece = torch.ones(size), torch.ones(size // n)
    pieces, others = ([torch.ones(size // n) for _ in range(n)] for _ in range(2))
    at_root = pieces if rank == n - 1 else None
    arguments = {
        "scatter": (piece, at_root, n - 1),
        "gather": (piece, at_root, n - 1),
        "all_gather": (pieces, piece),
        "reduce_scatter": (piece, pieces),
        "all_to_all": (others, pieces),
        "all_reduce_naive": (whole,),
        "all_reduce": (whole,),
        "barrier": (),
    }.get(name, (whole, n - 1))
    with recorded() as calls:
        getattr(collectives, name)(*arguments)
    return calls


NAMES = (
    *("broadcast", "broadcast_tree", "scatter", "gather", "reduce", "all_gather"),
    *("reduce_scatter", "all_to_all", "all_reduce_naive", "all_reduce"),
)


@pytest.mark.parametrize("name", [*NAMES, "barrier"])
def test_the_costs_are_what_is_counted(ranks, name):
    n, size = ranks.n, 60  # 60 elements: 1 to 5 ranks divide it
    messages = in_steps(ranks.run(noted, name, size))
    sent, received = [0] * n, [0] * n
    for message in messages:
        sent[message.source] += message.nbytes
        received[message.destination] += message.nbytes
    if name == "barrier":  # as an all_reduce_naive of a byte
        name, size = "all_reduce_naive", 1 / 4
    cost = costs.collective_cost(name, n, 4 * size)
    assert (cost.messages, cost.nbytes) == (len(messages), sum(sent))
    assert cost.steps == max([0, *(message.step for message in messages)])
    assert (cost.most_sent, cost.most_received) == (max(sent), max(received))
    assert {message.nbytes for message in messages} <= {cost.message_nbytes}


# ---------------------------------------------------------------------------- mistakes

ONE = torch.zeros(1)
PIECES = [torch.zeros(1), torch.zeros(1), torch.zeros(1)]
C64 = torch.zeros(1, dtype=torch.complex64)
LONG = torch.tensor([1])
MISTAKES = [  # what rank r of 3 does, and what it is told
    (lambda r: collectives.broadcast(ONE, 3), "is 3: expected one of the ranks"),
    (lambda r: collectives.all_reduce(ONE, ReduceOp.BAND), "expected SUM, PRODUCT,"),
    (lambda r: collectives.all_reduce_naive(LONG, ReduceOp.AVG), "AVG needs a dtype"),
    (
        lambda r: collectives.reduce_scatter(C64, [C64] * 3, ReduceOp.MAX),
        "have an order, not torch.complex64",
    ),
    (lambda r: collectives.all_gather(PIECES[:2], ONE), "has 2 tensors: expected 3"),
    (lambda r: collectives.all_gather(PIECES, LONG), "tensor_list[0] is of torch.fl"),
    (lambda r: collectives.reduce_scatter(ONE.expand(2) * 1, PIECES), "of shape [1]: "),
    (
        lambda r: collectives.all_to_all(PIECES, [*PIECES[:2], LONG]),
        "input_tensor_list[2] is of torch.int64",
    ),
    (lambda r: collectives.exchange(ONE, r, ONE, (r + 1) % 3), "exchange with rank"),
    (lambda r: collectives.exchange(ONE, (r + 1) % 3, ONE, 3), "expected another rank"),
]


def check_mistakes(mistakes):
    """Every rank makes the same mistake: each is told so, and nothing was sent."""
    rank = dist.get_rank()
    with recorded() as sent:
        for call, message in mistakes:
            with pytest.raises(ValueError) as caught:
                call(rank)
            assert message in str(caught.value)
        for function in (collectives.scatter, collectives.gather):
            with pytest.raises(ValueError) as caught:  # only the root gives a list
                function(ONE, None if rank == 1 else PIECES, 1)
            message = "has None: expected 3" if rank == 1 else "must be None on this"
            assert message in str(caught.value)
    assert sent == []
    total = torch.ones(1)
    collectives.all_reduce(total)  # all is as before
    assert total.item() == dist.get_world_size()


def test_mistakes_are_told_before_anything_is_sent(started):
    started[3].run(check_mistakes, MISTAKES)


@pytest.mark.parametrize("name", [*NAMES, "barrier"])
def test_they_take_what_torch_takes(name):
    """The same names of arguments, in the same order, as far as they go."""
    theirs = getattr(dist, name.removesuffix("_tree").removesuffix("_naive"))
    own = list(inspect.signature(getattr(collectives, name)).parameters)
    assert list(inspect.signature(theirs).parameters)[: len(own)] == own
