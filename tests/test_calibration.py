"""``calibration.py`` on real ranks: what is measured, and emulated slow links.

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
from course_utils.measure.calibration import (
    EmulatedLink,
    free_medians,
    measured_link,
    ping_pong_seconds,
    ring_shift_seconds,
    slowest_seconds,
)
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
    assert all(result == by_rank[0] for result in by_rank)
    seconds, calls = by_rank[0]
    assert len(seconds) == 3 and calls == 4  # one to warm up
    assert min(seconds) >= 0.02


def count_messages(measure, sizes, rounds):
    """What `measure` returns, and the bytes of each message that this rank sends."""
    sent, isend, send = [], dist.isend, dist.send

    def counting(real):
        def wrapper(tensor, *args, **kwargs):
            sent.append(tensor.numel() * tensor.element_size())
            return real(tensor, *args, **kwargs)

        return wrapper

    dist.isend, dist.send = counting(isend), counting(send)
    try:
        return measure(sizes, rounds), sent
    finally:
        dist.isend, dist.send = isend, send


@pytest.mark.parametrize("measure", [ring_shift_seconds, ping_pong_seconds])
def test_messages_of_all_sizes_are_timed_in_turns(ranks, measure):
    sizes = [1, 1000, 300_000]
    by_rank = ranks.run(count_messages, measure, sizes, 3)
    everybody = [seconds for seconds, _ in by_rank]
    assert all(seconds == everybody[0] for seconds in everybody)
    assert len(everybody[0]) == 3 and min(everybody[0]) > 0
    # As many messages follow each other as in a ring of 4, and one round warms up.
    taking_part, messages = (2, 3) if measure is ping_pong_seconds else (4, 6)
    a_round = [size for size in sizes for _ in range(messages)]
    for rank, (_, sent) in enumerate(by_rank):
        assert sent == (4 * a_round if rank < taking_part else [])


def test_the_median_of_the_rounds_and_the_slowest_rank_count(ranks):
    def run():
        """Only rank 2 is slow, and in each round but one by 10 ms more."""
        isend, calls = dist.isend, []

        def slow(*args, **kwargs):
            calls.append(1)
            if dist.get_rank() == 2 and len(calls) % 6 == 1:
                time.sleep(0.01 * (len(calls) // 6))
            return isend(*args, **kwargs)

        dist.isend = slow
        try:
            return ring_shift_seconds([8], 5)[0]
        finally:
            dist.isend = isend

    by_rank = ranks.run(run)
    assert by_rank == 4 * by_rank[:1]
    # The first round warms up. The others have 6 exchanges each.
    assert by_rank[0] >= 0.03 / 6


# --- the link that follows --------------------------------------------------------

SIZES = [2**19, 2**20, 2**21, 2**22]


def link_from(*tries):
    """What measured_link makes of these times, and how often it has measured."""
    calls = []

    def measure(sizes, rounds):
        assert (list(sizes), rounds) == (SIZES, 7)
        calls.append(1)
        return tries[min(len(calls), len(tries)) - 1]

    return measured_link(measure, SIZES, 7), len(calls)


GOOD = [1e-3 + size / 1e8 for size in SIZES]
FLAT = [1.97e-3, 1.97e-3, 1.79e-3, 1.62e-3]  # from a machine that was busy
TOO_FAST = [1e-3 + size / 1e13 for size in SIZES]  # 10 TB/s: no memory does that


@pytest.mark.parametrize(
    ("tries", "measured"),
    [((GOOD,), 1), ((FLAT, GOOD), 2), ((TOO_FAST, FLAT, GOOD), 3)],
    ids=["good", "flat", "too fast"],
)
def test_what_cannot_be_is_measured_again(ranks, tries, measured):
    for link, calls in ranks.run(link_from, *tries):
        assert calls == measured
        assert link.latency == pytest.approx(1e-3)
        assert link.bandwidth == pytest.approx(1e8)


@pytest.mark.parametrize("times", [FLAT, TOO_FAST], ids=["flat", "too fast"])
def test_the_last_try_is_taken_with_a_bandwidth_that_is_possible(ranks, times):
    found = ranks.run(link_from, times)
    assert found == 4 * found[:1]
    link, calls = found[0]
    assert calls == 3
    assert 1e8 < link.bandwidth < 1e12  # what this memory copies, by any machine
    assert 0 < link.latency < max(times)

    # The fit is the best one with this bandwidth.
    def error(latency):
        return sum(
            (latency / t + n / link.bandwidth / t - 1) ** 2
            for n, t in zip(SIZES, times, strict=True)
        )

    assert error(link.latency) < min(error(link.latency * f) for f in (0.99, 1.01))


@pytest.mark.parametrize("measure", [ring_shift_seconds, ping_pong_seconds])
def test_a_real_link_is_found(ranks, measure):
    links = ranks.run(measured_link, measure, SIZES[:2], 3)
    assert links == 4 * links[:1]
    assert links[0].latency >= 0 and 1e6 < links[0].bandwidth < 1e12


def test_one_rank_has_nobody_to_send_to():
    with Ranks(1, quiet=True) as alone:
        assert alone.run(ring_shift_seconds, [8], 2)[0][0] < 1e-3
        with pytest.raises(RanksError, match="A ping-pong needs 2 ranks: there is 1."):
            alone.run(ping_pong_seconds, [8], 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("ring_shift_seconds([0])", "a size is 0: expected a whole number from 1 up."),
        ("ping_pong_seconds([8.5])", "a size is 8.5: expected a whole number from 1"),
        ("ring_shift_seconds([8], 0)", "rounds is 0: expected a whole number from 1"),
        (
            "measured_link(ring_shift_seconds, [8, 8])",
            "need messages of at least 2 different sizes, not 1.",
        ),
        ("slowest_seconds(print, 0)", "rounds is 0: expected a whole number from 1 up"),
    ],
)
def test_bad_input_is_named(ranks, call, says):
    def run(call):
        from course_utils.measure import calibration

        eval(call, {**vars(calibration)})

    with pytest.raises(RanksError) as caught:
        ranks.run(run, call)
    assert {f.error for f in caught.value.failures.values()} == {"ValueError"}
    assert len(caught.value.failures) == 4
    assert says in str(caught.value)


# --- emulated links: the messages -----------------------------------------------


def check_messages():
    """Every way to send and receive delivers what was sent, from the right rank."""
    rank = dist.get_rank()
    after, before = (rank + 1) % 4, (rank - 1) % 4
    mine, got = torch.arange(5) + 10 * rank, torch.zeros(5, dtype=torch.int64)
    expected = torch.arange(5) + 10 * before
    with EmulatedLink(1e-4, 1e8):
        request = dist.isend(mine, after)
        assert dist.recv(got, before) == before
        assert torch.equal(got, expected) and request.wait()
        # Two on their way at once, in order.
        requests = [dist.isend(mine + k, after) for k in range(2)]
        pair = torch.zeros(2, 5, dtype=torch.int64)
        for arriving in [dist.irecv(pair[k], before) for k in range(2)]:
            assert arriving.wait() and arriving.wait()
        assert torch.equal(pair, torch.stack([expected, expected + 1]))
        for request in requests:
            request.wait()
        both = [
            dist.P2POp(dist.isend, mine, after),
            dist.P2POp(dist.irecv, got, before),
        ]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        assert torch.equal(got, expected)
        for function in (
            ring.all_reduce_ring,
            lambda tensor: ring.all_reduce_pipelined(tensor, piece_bytes=16),
            ring.all_reduce_tree,
            ring.all_reduce_halving_doubling,
            collectives.all_reduce_naive,
            dist.all_reduce,
        ):
            tensor = torch.arange(33.0) * (rank + 1)
            function(tensor)
            assert torch.equal(tensor, torch.arange(33.0) * 10)


def receive_from_anybody():
    with EmulatedLink(**LINK):
        dist.recv(torch.zeros(1))


def check_after():
    """After the block everything is as it was, also if an exception ended it."""
    rank, methods = dist.get_rank(), dict(vars(dist.ProcessGroup))
    with EmulatedLink(10.0, 1e3):
        replaced = {k for k, v in vars(dist.ProcessGroup).items() if v != methods[k]}
        assert replaced == {"send", "recv", "recv_anysource"}
        try:
            with EmulatedLink(1e-3, 1e8):
                raise AssertionError("a block inside another one")
        except RuntimeError as error:
            assert "inside another EmulatedLink" in str(error)
    try:
        with EmulatedLink(10.0, 1e3):
            raise KeyError("on purpose")
    except KeyError:
        pass
    assert dict(vars(dist.ProcessGroup)) == methods
    got = torch.zeros(1)
    request = dist.isend(torch.full((1,), float(rank)), (rank + 1) % 4)
    dist.recv(got, (rank - 1) % 4)
    request.wait()
    assert got.item() == (rank - 1) % 4


def test_messages_are_what_they_were(ranks):
    ranks.run(check_messages)


def test_links_are_as_fast_as_ever_after_the_block(ranks):
    ranks.run(check_after)


def test_who_sends_must_be_known(ranks):
    with pytest.raises(RanksError, match="has to know which rank a message comes from"):
        ranks.run(receive_from_anybody)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"latency": -1}, "latency is -1: expected 0 or more."),
        ({"bandwidth": 0}, "bandwidth is 0: expected more than 0."),
        ({"bandwidth": "100"}, "bandwidth is '100': expected a number."),
    ],
)
def test_bad_links(wrong, says):
    with pytest.raises(ValueError, match=says):
        EmulatedLink(**{**LINK, **wrong})


# --- emulated links: the time ---------------------------------------------------


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
    zero, one, two, three = ranks.run(times_of_messages, nbytes)
    for k in (1, 2, 3):  # a send ends when the message has left
        assert zero[k] - zero[0] >= k * busy
    assert one[1] - zero[0] >= busy + latency
    assert one[2] - zero[0] >= 2 * busy + latency
    assert two[1] - three[0] >= busy + latency
    assert two[2] - zero[0] >= 3 * busy + latency
    assert three[1] - three[0] < two[1] - three[0]  # sending is over before it is there
    # Four messages that follow each other would have taken longer than these.
    assert two[2] - zero[0] < TOO_SLOW * (3 * busy + latency)


def times_into_one_rank(nbytes):
    """Three ranks send to rank 0 at once: seconds until it has all."""
    rank, tensor = dist.get_rank(), torch.zeros(nbytes, dtype=torch.uint8)
    with EmulatedLink(**LINK):
        dist.barrier()
        start = time.monotonic()
        for source in range(1, 4) if rank == 0 else ():
            dist.recv(tensor, source)
        if rank:
            dist.send(tensor, 0)
        return start, time.monotonic()


def test_what_comes_into_one_rank_comes_one_after_the_other(ranks):
    nbytes = 200_000
    times = ranks.run(times_into_one_rank, nbytes)
    seconds = times[0][1] - min(start for start, _ in times[1:])
    assert seconds >= 3 * nbytes / LINK["bandwidth"] + LINK["latency"]


def emulated_times(nbytes):
    """Start and end of the all-reduce functions on a slow link; three rounds each."""
    functions = {
        "ring": ring.all_reduce_ring,
        "tree": ring.all_reduce_tree,
        "halving-doubling": ring.all_reduce_halving_doubling,
        "naive": collectives.all_reduce_naive,
    }
    tensor, times = torch.zeros(nbytes // 4), {}
    for name, function in functions.items():
        times[name] = []
        for _ in range(3):
            with EmulatedLink(**LINK):
                dist.barrier()
                start = time.monotonic()
                function(tensor)
                times[name].append((start, time.monotonic()))
    return times


def test_an_emulated_all_reduce_takes_what_the_formula_says(ranks):
    nbytes = 160_000
    by_rank = ranks.run(emulated_times, nbytes)
    for name in by_rank[0]:
        expected = costs.all_reduce_seconds(name, 4, nbytes, **LINK)
        seconds = [  # from the first rank that begins to the last that ends
            max(end for _, end in of_ranks) - min(start for start, _ in of_ranks)
            for of_ranks in zip(*(times[name] for times in by_rank), strict=True)
        ]
        assert min(seconds) >= expected * (1 - 1e-9), name
        assert min(seconds) <= TOO_SLOW * expected, name


def emulated_shift(link, sizes):
    with EmulatedLink(**link):
        return ring_shift_seconds(sizes, 5), ping_pong_seconds(sizes, 2)


def test_what_was_emulated_is_found_again(ranks):
    link, sizes = {"latency": 10e-3, "bandwidth": 10e6}, [1_000, 300_000]

    def near(value, expected):
        return expected / 2 < value < expected * 2

    found = []
    for _ in range(3):  # where the machine was busy: once more
        measured = ranks.run(emulated_shift, link, sizes)[0]
        found += [costs.fit_transfer(sizes, seconds) for seconds in measured]
        if all(
            near(fit.latency, link["latency"])
            and near(fit.bandwidth, link["bandwidth"])
            for fit in found[-2:]
        ):
            return
    raise AssertionError(f"emulated {link}, found {found}")


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
    assert free_medians(ways, {"alone": 0.9, "shared": 1.1}, seconds=50) == {
        "alone": 1.0
    }
    before = now[0]
    assert free_medians(ways, {"alone": 2, "shared": 2}, seconds=10) == {}
    assert now[0] - before < 10 + 4


def test_a_busy_core_does_not_count():
    """For real: a pause has a CPU time of nothing."""

    def pause():
        start = time.process_time()
        time.sleep(0.002)
        return time.process_time() - start

    assert free_medians({"pause": pause}, {"pause": 0.9}, seconds=0.1) == {}
