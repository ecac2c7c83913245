"""``collectives.py`` and ``bench_all_reduce.py``: what they print is true."""

import json

import pytest
import torch
import torch.distributed as dist
from thorough import thorough_after
from worker_runs import Run, ranks_for_scripts

from course_utils.measure.tensor_bytes import record_tensor_bytes
from course_utils.theory import costs
from course_utils.workers import bench_all_reduce


@pytest.fixture(scope="module")
def on():
    with ranks_for_scripts() as run:
        yield run


def lines(run: Run) -> list[str]:
    """What rank 0 prints. The others print nothing, and nobody fails."""
    assert set(run.end) == {""} and set(run.out[1:]) <= {""}, run
    return run.out[0].splitlines()


def doing_nothing(name):
    """For `before`: a function of `torch.distributed` that does nothing."""
    return lambda replace: replace(dist, name, lambda *args, **kwargs: None)


# -------------------------------------------------------------------------- collectives
@pytest.mark.parametrize("n", thorough_after(1, [3, 1, 2, 4]))
def test_by_hand_the_table_is_the_same_and_has_the_costs(on, n):
    _, *rows = lines(on(n, "collectives"))
    _, *own_rows = lines(on(n, "collectives", "--by-hand"))
    assert rows[-1] == "13 calls, each with the right result on every rank."
    stated = [row.strip() for row in own_rows if "messages" in row]
    assert [row for row in own_rows if "messages" not in row] == rows
    names = [row.split()[0] for row in rows[1:-1:n]]
    for name, words in zip(names, stated, strict=True):
        size = 8 if name in ("broadcast", "reduce", "all_reduce") else 8 * n
        if name == "barrier":
            name, size = "all_reduce_naive", 1
        cost = costs.collective_cost(name, n, size)
        expected = f"{cost.messages} messages, {cost.nbytes:g} bytes"
        assert words == f"{expected}, {cost.steps} steps"


def test_a_wrong_result_is_named(on):
    run = on(2, "collectives", before=doing_nothing("all_reduce"))
    assert run.end[1] == "collectives: all_reduce SUM: rank 1 has 2, expected 3"
    words = ("--collective", "broadcast", "--json", "-e", "1K")
    run = on(2, "bench_all_reduce", *words, before=doing_nothing("broadcast"))
    assert json.loads(run.out[0])["wrong"] == 256
    assert run.end[0] == "bench_all_reduce: 256 elements are wrong"


# ---------------------------------------------------------------------------- the bench
QUICK = ("--iters", 2, "--warmup", 1)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def check_row(row, collective, n, op="sum"):
    assert row["wrong"] == 0 and row["time_us"] > 0
    assert row["redop"] == (op if collective in REDUCING else "none")
    assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
    factor = costs.bus_bandwidth_factor(collective, n)
    assert row["busbw"] == pytest.approx(factor * row["algbw"])
    assert (row["collective"], row["world_size"]) == (collective, n)
    assert (row["type"], row["backend"], row["iters"]) == ("float", "gloo", 2)


@pytest.mark.parametrize("collective", bench_all_reduce.COLLECTIVES)
@pytest.mark.parametrize("n", thorough_after(1, [3, 1, 2, 4]))
def test_each_collective_is_right_and_its_line_is_complete(on, n, collective):
    words = ("--collective", collective, "--json", "-b", 4, "-e", 4096, "-f", 32)
    rows = on(n, "bench_all_reduce", *words, *QUICK).metrics
    for row in rows:
        check_row(row, collective, n)
    in_pieces = collective in ("reduce_scatter", "all_gather", "all_to_all")
    pieces = n if in_pieces else 1
    counts = [max(1, size // (4 * pieces)) for size in (4, 128, 4096)]
    assert [row["count"] for row in rows] == counts
    assert [row["size"] for row in rows] == [4 * pieces * count for count in counts]


@pytest.mark.parametrize("op", ["prod", "min", "max", "avg"])
def test_every_op(on, op):
    for collective in REDUCING:
        words = ("--collective", collective, "--op", op, "--json", "-e", "1K", *QUICK)
        (row,) = on(3, "bench_all_reduce", *words).metrics
        check_row(row, collective, 3, op)


@pytest.mark.parametrize(
    "collective", thorough_after(1, bench_all_reduce.COLLECTIVES[::-1])
)
def test_the_check_takes_as_much_memory_as_the_docstring_says(monkeypatch, collective):
    """On a GPU the largest size must fit as often; with more ranks not more often."""
    monkeypatch.setattr(bench_all_reduce, "WORLD_SIZE", 4)
    monkeypatch.setattr(bench_all_reduce, "PIECE", 1 << 10)
    monkeypatch.setattr(bench_all_reduce, "call", lambda *args: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    with record_tensor_bytes() as record:
        array = torch.empty(1 << 16)
        bench_all_reduce.count_wrong(collective, array, "sum")
    times = 4 if collective == "all_to_all" else 3
    assert record.peak < 1.1 * times * array.nbytes


def test_a_size_is_not_measured_twice(on):
    """8 and 16 bytes are both rounded to one element for each of 4 ranks."""
    words = ("--collective", "all_gather", "--json", "-b", 8, "-e", 32, "-f", 2)
    assert on(4, "bench_all_reduce", *words, *QUICK).curve("size") == [16, 32]


def test_the_table_has_what_the_file_has(on, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("of another run")
    words = ("-b", "1K", "-e", "64K", "-f", 8, *QUICK, "--json", file)
    *_, first, second, third, mean = lines(on(2, "bench_all_reduce", *words))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["size"] for row in rows] == [1024, 8192, 65536]
    for row, line in zip(rows, (first, second, third), strict=True):
        check_row(row, "all_reduce", 2)
        shown = [row[name] for name in ("size", "count", "type", "redop")]
        assert line.split()[:4] == [*map(str, shown)]
        assert f"{row['time_us']:.2f}" in line and f"{row['busbw']:.3f}" in line
    assert f"{sum(row['busbw'] for row in rows) / 3:.3f} GB/s" in mean
