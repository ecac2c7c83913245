"""Times, measured: of a link between ranks, of their work, and of free cores.

    ring_shift_seconds      a message between neighbours, while all ranks send
    ping_pong_seconds       the same between two ranks, while nobody else does anything
    measured_link           the latency and the bandwidth that follow from one of these
    slowest_seconds         any work of all ranks
    seconds_in_turns        several works of all ranks, which take turns
    free_medians            work in the notebook itself, while no other program runs
    speeds_of_two           two threads and two processes, compared with one thread

All but the last two run on the ranks, and every rank calls them:

    SIZES = [2**19, 2**20, 2**21, 2**22]
    link = ranks.run(measured_link, ring_shift_seconds, SIZES)[0]
    print(link.latency, link.bandwidth)

Where ranks share cores, no measurement is exact: the same one again may differ by a
factor of two. For CPU tensors and gloo. Sizes are bytes, times are seconds, bandwidths
are bytes a second.
"""

import operator
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_utils.measure.machine import inspect_machine
from course_utils.ranks import Ranks
from course_utils.theory import costs
from course_utils.theory.arguments import Count, checked

# ------------------------------------------------------------------------ measuring


@checked
def slowest_seconds(work: Callable[[], object], rounds: Count = 5) -> list[float]:
    """The seconds of each round of what all ranks do together; on all ranks the same.

    Every rank calls it. It is `seconds_in_turns` with one way.
    """
    return seconds_in_turns({"work": work}, rounds)["work"]


@checked
def seconds_in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: Count = 5
) -> dict[str, list[float]]:
    """The seconds of each way in each round; they take turns, on the same machine.

    Every rank calls it, with the same ways in the same order. A machine is now busier,
    now less: where ways take turns, each meets both.

    A barrier lets all ranks begin at the same time. What counts is the slowest rank:
    the others' time says how long they were idle as well. One round before these is not
    counted: memory is touched and connections are made in it.
    """
    seconds = torch.zeros(rounds + 1, len(ways), dtype=torch.float64)
    for number in range(rounds + 1):
        for place, way in enumerate(ways.values()):
            dist.barrier()
            start = time.perf_counter()
            way()
            seconds[number, place] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(ways, seconds[1:].T.tolist(), strict=True))


@checked
def ring_shift_seconds(sizes: Sequence[Count], rounds: Count = 20) -> list[float]:
    """Seconds of one step of a ring: all send to the next rank at the same time.

    Every rank calls it. On one machine all of them share its cores and its memory, and
    a ring all-reduce has to live with that: its steps are these.

    Args:
        sizes: Bytes of a message, each of them 1 or more.
        rounds: How often all sizes take turns. In a round, each size has 2(n - 1)
            exchanges that follow each other at once, as many as a ring all-reduce has.

    Returns:
        For each size the seconds of one exchange, the same on all ranks. In a round the
        slowest rank counts; of all rounds it is the median.

    Cost: 2(n - 1) messages of each size sent by each rank in each of `rounds` + 1
        rounds: the first one, which warms up, is not counted.
    """
    rank, n = dist.get_rank(), dist.get_world_size()

    def exchanges(outgoing: Tensor, incoming: Tensor) -> None:
        for _ in range(2 * (n - 1)):
            request = dist.isend(outgoing, (rank + 1) % n)
            dist.recv(incoming, (rank - 1) % n)
            request.wait()

    return _of_rounds(exchanges, sizes, rounds, max(1, 2 * (n - 1)))


@checked
def ping_pong_seconds(
    sizes: Sequence[Count],
    rounds: Count = 20,
    of_rounds: Callable[[list[float]], float] = statistics.median,
) -> list[float]:
    """Seconds of a message between ranks 0 and 1, one way, with nobody else sending.

    Rank 0 sends a message, rank 1 sends it back: half of that time. This is how a link
    is measured in most tools. Other ranks call it too, and wait.

    Args:
        sizes: As in `ring_shift_seconds`.
        rounds: As there; in a round, each size goes n - 1 times there and back.
        of_rounds: Which time counts; `min` on a machine that is busy now and then.

    Returns:
        For each size the seconds of one message, the same on all ranks.

    Raises:
        ValueError: there is only one rank.

    Cost: n - 1 messages of each size, there and back, in each of `rounds` + 1 rounds.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    if n < 2:
        raise ValueError("A ping-pong needs 2 ranks: there is 1.")

    def there_and_back(outgoing: Tensor, incoming: Tensor) -> None:
        for _ in range(n - 1):
            if rank == 0:
                dist.send(outgoing, 1)
                dist.recv(incoming, 1)
            elif rank == 1:
                dist.recv(incoming, 0)
                dist.send(incoming, 0)

    return _of_rounds(there_and_back, sizes, rounds, 2 * (n - 1), of_rounds)


def _of_rounds(
    messages: Callable[[Tensor, Tensor], None],
    sizes: Sequence[int],
    rounds: int,
    how_many: int,
    of_rounds: Callable[[list[float]], float] = statistics.median,
) -> list[float]:
    """For each size the seconds of one of so many messages. The sizes take turns."""
    buffers = [torch.ones(2, size, dtype=torch.uint8) for size in sizes]
    ways = {str(place): partial(messages, *two) for place, two in enumerate(buffers)}
    times = seconds_in_turns(ways, rounds)
    return [of_rounds(of_size) / how_many for of_size in times.values()]


def measured_link(
    measure: Callable[..., Sequence[float]],
    sizes: Sequence[int],
    rounds: int = 20,
) -> costs.AlphaBeta:
    """The latency and bandwidth of a link, also where the machine is busy meanwhile.

    Every rank calls it. What one gets is checked against what the memory can do: a
    message is copied at least once on its way, so no link is faster than copying. Where
    the times say otherwise, or do not grow with the sizes at all, they are mostly the
    waking of processes, and are measured again. The third try is taken as it is, but
    with a bandwidth that is possible.

    Args:
        measure: `ring_shift_seconds` or `ping_pong_seconds`.
        sizes: Bytes of a message, of at least two different sizes.
        rounds: For `measure`.

    Returns:
        The same on all ranks.

    Raises:
        ValueError: the sizes are all the same.
    """
    limit = _copied_a_second()
    for _ in range(3):
        link = _fit(sizes, measure(sizes, rounds), limit)
        if link.bandwidth < limit:
            break
    return link


def _fit(
    sizes: Sequence[int], seconds: Sequence[float], limit: float
) -> costs.AlphaBeta:
    """`costs.fit_transfer`, or the best fit with that bandwidth, if it is beyond it."""
    try:
        link = costs.fit_transfer(sizes, seconds)
    except ValueError:
        if len(set(sizes)) < 2:
            raise
        link = None  # the times do not grow with the sizes
    if link and link.bandwidth < limit:
        return link
    weights = [1 / time for time in seconds]
    rests = [1 - n / limit / t for n, t in zip(sizes, seconds, strict=True)]
    latency = sum(map(operator.mul, weights, rests)) / sum(w * w for w in weights)
    return costs.AlphaBeta(max(0.0, latency), limit)


def _copied_a_second() -> float:
    """Bytes a second that the fastest rank copies, in its own memory."""
    source, target = torch.ones(2, 2**25, dtype=torch.uint8)  # more than caches hold
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    fastest = torch.tensor([min(seconds)], dtype=torch.float64)
    dist.all_reduce(fastest, dist.ReduceOp.MIN)
    return len(source) / fastest.item()


# ----------------------------------------------------------------- free cores


def free_medians(
    ways: Mapping[str, Callable[[], float]],
    cores: Mapping[str, float],
    *,
    runs: int = 20,
    seconds: float = 10.0,
) -> dict[str, float]:
    """The time of the same work in several ways, while the cores are free.

    The ways take turns. Other programs may take the CPU away from a run: it counts only
    if its CPU time, divided by its time, is at least the cores that it needs.

    Args:
        ways: For each name a function that does the work and returns the CPU time, in
            seconds, that it took.
        cores: For each name how many cores a run must have had.
        runs: So many must count, of each way.
        seconds: No new turn begins after this time.

    Returns:
        For each name the median of the seconds of the runs that count. A way with less
        than three of them is missing: the CPU was not free for it.
    """
    free: dict[str, list[float]] = {way: [] for way in ways}
    began = time.perf_counter()
    while min(map(len, free.values())) < runs and time.perf_counter() - began < seconds:
        for way, work in ways.items():
            start = time.perf_counter()
            cpu_seconds = work()
            taken = time.perf_counter() - start
            if cpu_seconds / taken >= cores[way]:
                free[way].append(taken)
    return {way: statistics.median(t) for way, t in free.items() if len(t) > 2}


def speeds_of_two(
    work: Callable[[int], object], units: int, ranks: Ranks, *, seconds: float = 10.0
) -> tuple[dict[str, float], str, bool]:
    """How many times as fast two threads, and two processes, are as one thread.

    All do the same number of units: one thread does all of them, or each of two does
    half. Runs count only while the cores are free, as in `free_medians`: one core for
    the threads, and one and a half for the processes.

    Args:
        work: Does as many units as its argument says.
        units: An even number of them, enough for about 50 ms.
        ranks: The two processes.
        seconds: So long it waits for free cores, and then takes any.

    Returns:
        The speeds, 1.0 for one thread; a note on what they depend on: the cores, the
        GIL, and whether other programs were using the cores; and whether the speeds
        can be compared, because none were.
    """

    def on_threads(number: int) -> float:
        each = {"target": work, "args": (units // number,)}
        threads = [threading.Thread(**each) for _ in range(number)]
        start = time.process_time()  # of all threads
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.process_time() - start

    ways: dict[str, Callable[[], float]] = {
        "1 thread": lambda: on_threads(1),
        "2 threads": lambda: on_threads(2),
        "2 processes": lambda: sum(ranks.run(_cpu_seconds, work, units // 2)),
    }
    cores = {"1 thread": 0.9, "2 threads": 0.9, "2 processes": 1.5}
    times = free_medians(ways, cores, seconds=seconds)
    gil = "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"
    note = f"CPU cores: {inspect_machine().cores}. Python's global lock (GIL): {gil}."
    if busy := {way: ways[way] for way in ways if way not in times}:
        times |= free_medians(busy, dict.fromkeys(busy, 0.0), runs=3)
        note += "\nNot a fair measurement: other programs used the CPU. "
        note += "Run this cell again."
    return {way: times["1 thread"] / times[way] for way in ways}, note, not busy


def _cpu_seconds(work: Callable[[int], object], units: int) -> float:
    start = time.process_time()
    work(units)
    return time.process_time() - start
