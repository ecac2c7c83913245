"""What `snapshots` notes of a ring, and what the moments of all ranks say together."""

import pytest

from course_utils.measure import snapshots
from course_utils.measure.snapshots import History, Moment, Taken

SHAPES = [(1, 11), (2, 32), (3, 11), (4, 11), (4, 3)]


def ring(n, size):
    """A ring all-reduce in plain Python: the moments of each rank.

    Rank r starts with 10(r + 1) + i in element i, as `record_ring` has it.
    """
    cuts = [k * (size // n) + min(k, size % n) for k in range(n + 1)]
    held = [[10.0 * (rank + 1) + i for i in range(size)] for rank in range(n)]
    moments = [[] for _ in range(n)]
    for step in range(2 * (n - 1)):
        chunks = [(rank - step + (step >= n - 1) * n) % n for rank in range(n)]
        parts = [(cuts[chunk], cuts[chunk + 1]) for chunk in chunks]
        sent = [held[rank][slice(*parts[rank])] for rank in range(n)]
        for rank, part in enumerate(parts):
            moments[rank].append(Moment([*held[rank]], *part, (rank + 1) % n))
        for rank, (first, stop) in enumerate(parts):
            target = held[(rank + 1) % n]
            for i in range(first, stop):
                value = sent[rank][i - first]
                target[i] = value if step >= n - 1 else target[i] + value
    return [[*one, Moment(last)] for one, last in zip(moments, held, strict=True)]


def test_what_real_ranks_held_is_noted(four):
    def record(shapes):
        import torch
        import torch.distributed as dist

        from course_utils.from_scratch.ring import all_reduce_ring

        groups = {n: dist.new_group(range(n)) for n in range(1, 5)}
        found, rank = [], dist.get_rank()
        for n, size in shapes:
            tensor = 10.0 * (rank + 1) + torch.arange(size)
            if rank < n:
                with snapshots.snapshots(tensor) as moments:
                    all_reduce_ring(tensor, group=groups[n])
                found.append(moments)
            else:
                found.append(None)
        return found

    by_rank = four.run(record, SHAPES)
    for place, (n, size) in enumerate(SHAPES):
        assert [found[place] for found in by_rank[:n]] == ring(n, size), (n, size)
    assert snapshots.record_ring(four, 11) == ring(4, 11)


@pytest.mark.parametrize(("n", "size"), SHAPES)
def test_each_chunk_is_the_sum_of_the_ranks_that_it_has_met(n, size):
    history = History(ring(n, size))
    assert (history.world_size, history.steps) == (n, 2 * (n - 1))
    chunks = range(len(history.chunks))
    for step in range(history.steps + 1):
        for rank in range(n):
            for chunk in chunks:
                shares = history.shares(step, rank, chunk)
                first, stop = history.chunks[chunk]
                assert history.values(step, rank, chunk) == [
                    sum(share * (10 * (r + 1) + i) for r, share in enumerate(shares))
                    for i in range(first, stop)
                ]
                assert history.is_complete(step, rank, chunk) == (shares == [1] * n)
    ends = [history.is_complete(history.steps, r, c) for r in range(n) for c in chunks]
    assert all(ends)
    halves = [
        {one.how for one in taken if one.stop > one.first} for taken in history.taken
    ]
    assert halves == [{"added"}] * (n - 1) + [{"copied"}] * (n - 1)


def test_other_code_that_sends(four):
    """Any order of the calls, other algorithms, and what no snapshot can be of."""

    def run():
        import torch
        import torch.distributed as dist

        from course_utils.from_scratch import ring as rings

        rank = dist.get_rank()
        after, before = (rank + 1) % 4, (rank - 1) % 4

        def exchange_late(out, into):
            request = dist.irecv(into, before)
            dist.send(out, after)
            request.wait()

        def exchange_batch(out, into):
            calls = [dist.P2POp(dist.irecv, into, before)]
            calls += [dist.P2POp(dist.isend, out, after)]
            for request in dist.batch_isend_irecv(calls):
                request.wait()

        def ring(tensor, exchange):
            chunks = tensor.tensor_split(4)
            for step in range(3):
                into = torch.empty_like(chunks[before - step])
                exchange(chunks[rank - step], into)
                chunks[(rank - step - 1) % 4].add_(into)
            for step in range(3):
                exchange(chunks[(rank + 1 - step) % 4], chunks[(rank - step) % 4])

        def noted(work):
            tensor = 10.0 * (rank + 1) + torch.arange(11)
            with snapshots.snapshots(tensor) as moments:
                work(tensor)
            return moments

        def send_twice(tensor):
            request = dist.isend(tensor[:1], after)
            try:
                dist.isend(tensor[:1], after)
            finally:
                dist.recv(tensor[1:2], before)
                request.wait()

        found = [
            noted(lambda x: ring(x, exchange_late)),
            noted(lambda x: ring(x, exchange_batch)),
            noted(lambda x: rings.all_reduce_halving_doubling(x)),
            noted(lambda x: rings.all_reduce_ring(x, dist.ReduceOp.AVG)),
        ]
        for wrong, says in (
            (lambda x: snapshots.snapshots(x.expand(2)).__enter__(), "not contiguous"),
            (lambda x: noted(lambda y: dist.isend(x, after)), "is no part of the"),
            (lambda x: noted(send_twice), "A second send in step 0"),
        ):
            with pytest.raises(ValueError, match=says):
                wrong(torch.zeros(1))
        return found

    late, batch, halving, mean = zip(*four.run(run), strict=True)
    assert [*late] == [*batch] == ring(4, 11)
    halving, mean = History(halving), History(mean)
    assert all(halving.is_complete(4, r, c) for r in range(4) for c in range(4))
    assert mean.shares(6, 0, 0) is None  # divided by 4: no sum any more


def test_a_zero_that_is_added_to_is_no_copy():
    history = History([[([0.0], 0, 1, 1), ([2.0],)], [([2.0], 0, 1, 0), ([2.0],)]])
    assert history.taken == [[Taken(1, 0, 1, "added"), Taken(0, 0, 1, "added")]]
    assert history.is_complete(1, 0, 0)


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        ([], "There are no ranks"),
        ([[Moment([1.0])] * 2, [Moment([1.0])]], r"The ranks noted \[1, 0\] steps"),
        ([[Moment([1.0])], [Moment([])]], r"of tensors of \[0, 1\] elements"),
        ([[Moment([])]], "The tensors have no elements"),
        ([[([1.0], 0, 1, 0), ([1.0],)]] * 2, r"In step 0 the ranks send to \[0, 0\]"),
        ([[Moment([1.0]), Moment([1.0])]], r"In step 0 the ranks send to \[None\]"),
    ],
)
def test_a_recording_that_makes_no_sense(recording, message):
    with pytest.raises(ValueError, match=message):
        History(recording)
