"""``calibration.py`` and ``emulated_link.py`` on real ranks.

A busy machine makes everything slower, so times are only tested from below, and from
above very generously. What a test asserts on a rank ends the test with its message.
"""

import itertools
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_utils.from_scratch import collectives, ring
from course_utils.measure import calibration
from course_utils.measure.calibration import (
    free_medians,
    measured_link,
    ping_pong_seconds,
    ring_shift_seconds,
    slowest_seconds,
    speeds_of_two,
)
from course_utils.measure.emulated_link import EmulatedLink
from course_utils.measure.messages import recorded
from course_utils.ranks import Ranks, RanksError
from course_utils.theory import costs

# The ranks get the functions below as they are, and need not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LINK = {"latency": 4e-3, "bandwidth": 20e6}
TOO_SLOW = 6  # times what the formula says: only a machine that stands still is slower


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4, output="grouped", quiet=True, timeout=60) as started:
        yield started


# --- measuring ------------------------------------------------------------------


def test_the_slowest_rank_counts(ranks):
    def run():
        calls = []

        def work():
            calls.append(1)
            if dist.get_rank() == 2:
                time.sleep(0.02)

        return slowest_seconds(work, rounds=3), len(calls)

    by_rank = ranks.run(run)
    assert by_rank == 4 * by_rank[:1]
    seconds, calls = by_rank[0]
    assert len(seconds) == 3 and calls == 4  # one to warm up
    assert min(seconds) >= 0.02


def sent_while(measure, sizes, rounds):
    """What `measure` returns, and the bytes of each message that this rank sends."""
    with recorded() as calls:
        seconds = measure(sizes, rounds)
    return seconds, [call.nbytes for call in calls if call.kind == "send"]


@pytest.mark.parametrize("measure", [ring_shift_seconds, ping_pong_seconds])
def test_messages_of_all_sizes_are_timed_in_turns(ranks, measure):
    sizes = [1, 1000, 300_000]
    by_rank = ranks.run(sent_while, measure, sizes, 5)
    everybody = [seconds for seconds, _ in by_rank]
    assert everybody == 4 * everybody[:1]
    assert len(everybody[0]) == 3 and min(everybody[0]) > 0
    # As many messages follow each other as in a ring of 4, and one round warms up.
    taking_part, messages = (2, 3) if measure is ping_pong_seconds else (4, 6)
    a_round = [size for size in sizes for _ in range(messages)]
    for rank, (_, sent) in enumerate(by_rank):
        assert sent == (6 * a_round if rank < taking_part else [])


SIZES = [2**19, 2**20, 2**21, 2**22]
GOOD = [1e-3 + size / 1e8 for size in SIZES]
FLAT = [1.97e-3, 1.97e-3, 1.79e-3, 1.62e-3]  # from a machine that was busy
TOO_FAST = [1e-3 + size / 1e13 for size in SIZES]  # 10 TB/s: no memory does that


def link_from(*tries):
    """What measured_link makes of these times, and how often it has measured."""
    calls = []

    def measure(sizes, rounds):
        assert (list(sizes), rounds) == (SIZES, 7)
        calls.append(1)
        return tries[min(len(calls), len(tries)) - 1]

    return measured_link(measure, SIZES, 7), len(calls)


@pytest.mark.parametrize(
    ("tries", "calls"),
    [
        ((GOOD,), 1),
        ((FLAT, GOOD), 2),
        ((TOO_FAST, FLAT, GOOD), 3),
        ((FLAT,), 3),
        ((TOO_FAST,), 3),
    ],
)
def test_what_cannot_be_is_measured_again(ranks, tries, calls):
    """The last try is taken with a bandwidth that is possible."""
    found = ranks.run(link_from, *tries)
    assert found == 4 * found[:1]
    link, measured = found[0]
    assert measured == calls
    if tries[-1] is GOOD:
        assert (link.latency, link.bandwidth) == pytest.approx((1e-3, 1e8))
    else:
        assert 1e8 < link.bandwidth < 1e12  # what this memory copies, by any machine
        assert 0 <= link.latency < max(tries[-1])


def test_one_rank_has_nobody_to_send_to():
    with Ranks(1, quiet=True) as alone:
        assert alone.run(ring_shift_seconds, [8], 2)[0][0] < 1e-3
        with pytest.raises(RanksError, match="A ping-pong needs 2 ranks: there is 1."):
            alone.run(ping_pong_seconds, [8], 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ring_shift_seconds([0]), r"sizes\[0\] is 0: expected a whole number"),
        (lambda: slowest_seconds(print, 0), "rounds is 0: expected a whole number"),
        (lambda: EmulatedLink(-1, 8), "latency is -1: expected a finite number"),
        (lambda: EmulatedLink(1, 0), "bandwidth is 0: expected a finite number above"),
    ],
)
def test_wrong_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# --- emulated links -------------------------------------------------------------


def check_messages():
    """Every way to send and receive delivers what was sent, from the right rank."""
    rank = dist.get_rank()
    after, before = (rank + 1) % 4, (rank - 1) % 4
    mine, got = torch.arange(5) + 10 * rank, torch.zeros(5, dtype=torch.int64)
    expected = torch.arange(5) + 10 * before
    with EmulatedLink(1e-4, 1e8):
        # Two on their way at once, in order.
        requests = [dist.isend(mine + k, after) for k in range(2)]
        assert dist.recv(got, before) == before and torch.equal(got, expected)
        arriving = dist.irecv(got, before)
        assert arriving.wait() and arriving.wait() and torch.equal(got, expected + 1)
        assert all(request.wait() for request in requests)
        both = [
            dist.P2POp(dist.isend, mine, after),
            dist.P2POp(dist.irecv, got, before),
        ]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        assert torch.equal(got, expected)
        for function in (ring.all_reduce_pipelined, dist.all_reduce):
            tensor = torch.arange(33.0) * (rank + 1)
            function(tensor)
            assert torch.equal(tensor, torch.arange(33.0) * 10)


def check_after():
    """After the block everything is as it was, also if an exception ended it."""
    methods = dict(vars(dist.ProcessGroup))
    with EmulatedLink(10.0, 1e3):
        with pytest.raises(RuntimeError, match="inside another EmulatedLink"):
            EmulatedLink(1e-3, 1e8).__enter__()
    with pytest.raises(KeyError), EmulatedLink(10.0, 1e3):
        raise KeyError("on purpose")
    assert dict(vars(dist.ProcessGroup)) == methods
    with EmulatedLink(**LINK):
        dist.recv(torch.zeros(1))  # from anybody


def test_messages_are_what_they_were(ranks):
    ranks.run(check_messages)


def test_links_are_as_fast_as_ever_after_the_block_and_need_a_source_inside(ranks):
    with pytest.raises(RanksError, match="has to know which rank a message comes from"):
        ranks.run(check_after)


def times_of_messages(nbytes):
    """When each message of four was sent and had arrived; all ranks have one clock."""
    rank, tensor = dist.get_rank(), torch.zeros(nbytes, dtype=torch.uint8)
    dist.barrier()
    noted = []
    with EmulatedLink(**LINK):
        noted.append(time.monotonic())
        if rank == 0:  # two to one rank, one to another
            for target in (1, 1, 2):
                dist.send(tensor, target)
                noted.append(time.monotonic())
        elif rank == 3:
            dist.send(tensor, 2)
            noted.append(time.monotonic())
        else:
            for source in (0, 0) if rank == 1 else (3, 0):
                dist.recv(tensor, source)
                noted.append(time.monotonic())
    return noted


def test_a_message_keeps_ports_busy_and_arrives_a_latency_later(ranks):
    nbytes = 400_000
    busy, latency = nbytes / LINK["bandwidth"], LINK["latency"]
    for _ in range(5):  # where the machine was busy: once more
        zero, one, two, three = ranks.run(times_of_messages, nbytes)
        if three[1] < two[1]:  # sending is over before it is there
            break
    assert three[1] < two[1]
    for k in (1, 2, 3):  # a send ends when the message has left
        assert zero[k] - zero[0] >= k * busy
    assert one[1] - zero[0] >= busy + latency
    assert one[2] - zero[0] >= 2 * busy + latency
    assert two[1] - three[0] >= busy + latency
    assert two[2] - zero[0] >= 3 * busy + latency
    # Four messages that follow each other would have taken longer than these.
    assert two[2] - zero[0] < TOO_SLOW * (3 * busy + latency)


FUNCTIONS = {
    "ring": ring.all_reduce_ring,
    "tree": ring.all_reduce_tree,
    "halving-doubling": ring.all_reduce_halving_doubling,
    "naive": collectives.all_reduce_naive,  # three messages into one port
}


def emulated_times(nbytes):
    """Start and end of the all-reduce functions on a slow link; three rounds each."""
    rank, times = dist.get_rank(), {}
    for name, function in FUNCTIONS.items():
        times[name] = []
        for _ in range(3):
            tensor = torch.full((nbytes // 4,), rank + 1.0)
            with EmulatedLink(**LINK):
                dist.barrier()
                start = time.monotonic()
                function(tensor)
                times[name].append((start, time.monotonic()))
            assert tensor.eq(10).all()
    return times


def test_an_emulated_all_reduce_takes_what_the_formula_says(ranks):
    nbytes = 160_000
    by_rank = ranks.run(emulated_times, nbytes)
    for name in FUNCTIONS:
        expected = costs.all_reduce_seconds(name, 4, nbytes, **LINK)
        seconds = [  # from the first rank that begins to the last that ends
            max(end for _, end in of_ranks) - min(start for start, _ in of_ranks)
            for of_ranks in zip(*(times[name] for times in by_rank), strict=True)
        ]
        assert expected * (1 - 1e-9) <= min(seconds) <= TOO_SLOW * expected, name


def emulated_links(link, sizes):
    with EmulatedLink(**link):
        return [
            costs.fit_transfer(sizes, measure(sizes, 3))
            for measure in (ring_shift_seconds, ping_pong_seconds)
        ]


def test_what_was_emulated_is_found_again(ranks):
    link, found = {"latency": 10e-3, "bandwidth": 10e6}, []
    for _ in range(3):  # where the machine was busy: once more
        found += ranks.run(emulated_links, link, [1_000, 300_000])[0]
        if all(
            0.5 < fit.latency / 10e-3 < 2 and 0.5 < fit.bandwidth / 10e6 < 2
            for fit in found[-2:]
        ):
            return
    raise AssertionError(f"emulated {link}, found {found}")


def seconds_between_nodes(gpus_per_node):
    """Of an all_reduce by all four ranks, by neighbours, and of a message to each."""
    rank, seconds = dist.get_rank(), []
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    x = torch.ones(1000)
    with EmulatedLink(50e-3, 1e9, gpus_per_node=gpus_per_node):
        for work in (
            lambda: dist.all_reduce(x),
            lambda: dist.all_reduce(x, group=pairs[rank // 2]),
            lambda: dist.all_reduce(x, group=pairs[rank // 2], async_op=True).wait(),
            lambda: ring.all_reduce_ring(x),
            lambda: dist.send(x, rank ^ 1) if rank % 2 else dist.recv(x, rank ^ 1),
            lambda: dist.send(x, rank ^ 2) if rank > 1 else dist.recv(x, rank ^ 2),
        ):
            dist.barrier()
            start = time.monotonic()
            work()
            seconds.append(time.monotonic() - start)
    return seconds


def test_only_what_goes_between_nodes_is_slow(ranks):
    a_little_less = 0.9 * 50e-3  # a rank may wake late, and the next message not
    for _ in range(3):  # where the machine was busy: once more
        slowest = map(max, zip(*ranks.run(seconds_between_nodes, 2), strict=True))
        whole, pair, later, ring, near, far = slowest
        assert min(whole, ring) > 3 * a_little_less and far > a_little_less
        if max(pair, later, near) < 50e-3:
            break
    else:
        raise AssertionError((pair, later, near))
    slowest = map(max, zip(*ranks.run(seconds_between_nodes, 1), strict=True))
    least = a_little_less * torch.tensor([6, 2, 2, 6, 1, 1])
    assert (torch.tensor([*slowest]) > least).all()


# --- free cores -----------------------------------------------------------------


def test_only_runs_with_free_cores_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    shares = itertools.cycle([1.0, 0.5, 0.9])  # cores that a run of "shared" had

    def run(share):
        now[0] += 1.0 / share
        return 1.0

    ways = {"alone": lambda: run(1.0), "shared": lambda: run(next(shares))}
    cores = {"alone": 0.9, "shared": 0.8}
    found = free_medians(ways, cores, runs=4, seconds=100)
    assert found == {"alone": 1.0, "shared": pytest.approx((1 + 1 / 0.9) / 2)}
    cores["shared"] = 1.1  # more than it ever has
    assert free_medians(ways, cores, seconds=50) == {"alone": 1.0}
    before = now[0]
    assert free_medians(ways, {"alone": 2, "shared": 2}, seconds=10) == {}
    assert now[0] - before < 10 + 4


def test_two_threads_and_two_processes_are_compared_with_one_thread(monkeypatch):
    times = {"1 thread": 0.06, "2 threads": 0.08, "2 processes": 0.04}
    free = ["1 thread", "2 processes"]  # for 2 threads the cores were never free

    def medians(ways, cores, **_):
        return {way: times[way] for way in ways if way in free or not cores[way]}

    monkeypatch.setattr(calibration, "free_medians", medians)
    speeds, note, fair = speeds_of_two(lambda n: None, 2, ranks=None)
    assert speeds == {"1 thread": 1.0, "2 threads": 0.75, "2 processes": 1.5}
    assert "Run this cell again" in note and not fair
    free.append("2 threads")
    _, note, fair = speeds_of_two(lambda n: None, 2, ranks=None)
    assert "Run this cell again" not in note and fair
