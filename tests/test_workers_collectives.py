"""``collectives.py`` and ``bench_all_reduce.py``: what they print is true.

Most runs are on ranks that are there already: each runs the script as torchrun would.
"""

import contextlib
import io
import json
import runpy
import sys
import time
import warnings

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from thorough import thorough_after

from course_utils import ROOT
from course_utils.measure.tensor_bytes import record_tensor_bytes
from course_utils.ranks import Ranks
from course_utils.theory import costs
from course_utils.workers import bench_all_reduce

# The ranks get the functions below as they are, and need not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

FOLDER = ROOT / "course_utils" / "workers"


@pytest.fixture(scope="module")
def started():
    """Ranks by their number; the scripts make the process group."""
    with contextlib.ExitStack() as stack:
        yield {
            n: stack.enter_context(
                Ranks(n, init=False, output="grouped", quiet=True, timeout=30)
            )
            for n in (1, 2, 3, 4)
        }


def run_on_rank(folder, name, arguments, broken):
    """Run a worker as the main program. Returns what it prints, and how it ends."""
    # `record` wants to write into the file behind stderr, and here there is none.
    warnings.filterwarnings("ignore", "Unable to enable fault handler")
    sys.argv[:] = [name, *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = {function: getattr(dist, function) for function in broken}
    sleep, time.sleep = time.sleep, lambda seconds: None
    try:
        for function in broken:
            setattr(dist, function, lambda *args, **kwargs: None)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        time.sleep = sleep
        for function, original in before.items():
            setattr(dist, function, original)
        if dist.is_initialized():
            dist.destroy_process_group()
    return out.getvalue(), err.getvalue(), code


def run(ranks, name, *arguments, broken=()):
    """The lines that rank 0 prints. The others print nothing, and nobody fails."""
    words = [str(word) for word in arguments]
    results = ranks.run(run_on_rank, str(FOLDER), name, words, broken)
    assert [code for _, _, code in results] == [0] * ranks.n
    assert [err for _, err, _ in results] == [""] * ranks.n
    assert all(out == "" for out, _, _ in results[1:])
    return results[0][0].splitlines()


def mistake(ranks, name, *arguments):
    """What the script says about wrong arguments: (its last line, its exit code)."""
    words = [str(word) for word in arguments]
    results = ranks.run(run_on_rank, str(FOLDER), name, words, ())
    out, err, code = results[0]
    assert out == ""
    return (err.splitlines()[-1], code) if code == 2 else (code, 1)


# -------------------------------------------------------------------------- collectives

THREE = """\
The collectives of torch.distributed: 3 ranks, gloo
                    rank  before    after
broadcast from 0       0  0         0
                       1  1         0
                       2  2         0
scatter from 0         0  10 11 12  10
                       1  -         11
                       2  -         12
gather to 0            0  0         0 1 2
                       1  1         -
                       2  2         -
reduce SUM to 0        0  1         6
                       1  2         -
                       2  3         -
all_reduce SUM         0  1         6
                       1  2         6
                       2  3         6
all_reduce PRODUCT     0  1         6
                       1  2         6
                       2  3         6
all_reduce MIN         0  1         1
                       1  2         1
                       2  3         1
all_reduce MAX         0  1         3
                       1  2         3
                       2  3         3
all_reduce AVG         0  1         2
                       1  2         2
                       2  3         2
all_gather             0  0         0 1 2
                       1  1         0 1 2
                       2  2         0 1 2
reduce_scatter SUM     0  0 1 2     30
                       1  10 11 12  33
                       2  20 21 22  36
all_to_all             0  0 1 2     0 10 20
                       1  10 11 12  1 11 21
                       2  20 21 22  2 12 22
barrier                0  -         -
                       1  -         -
                       2  -         -
13 calls, each with the right result on every rank.
""".splitlines()


def test_the_table_of_three_ranks(started):
    assert run(started[3], "collectives") == THREE


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_by_hand_the_table_is_the_same_and_has_the_costs(started, n):
    title, *rows = run(started[n], "collectives")
    ranks = f"{n} rank{'s' if n > 1 else ''}"
    assert title == f"The collectives of torch.distributed: {ranks}, gloo"
    own_title, *own_rows = run(started[n], "collectives", "--by-hand")
    assert own_title == f"The collectives made of send and recv: {ranks}, gloo"
    stated = [row.strip() for row in own_rows if "messages" in row]
    assert [row for row in own_rows if "messages" not in row] == rows
    names = [row.split()[0] for row in rows[1:-1:n]]
    assert len(names) == len(stated) == 13
    for name, words in zip(names, stated, strict=True):
        size = 8 if name in ("broadcast", "reduce", "all_reduce") else 8 * n
        if name == "barrier":
            name, size = "all_reduce_naive", 1
        cost = costs.collective_cost(name, n, size)
        expected = f"{cost.messages} messages, {cost.nbytes:g} bytes"
        assert words == f"{expected}, {cost.steps} steps"


def test_a_wrong_result_is_named(started):
    results = started[2].run(
        run_on_rank, str(FOLDER), "collectives", [], ("all_reduce",)
    )
    assert [code for _, _, code in results] == [
        "collectives: all_reduce SUM: rank 0 has 1, expected 3",
        "collectives: all_reduce SUM: rank 1 has 2, expected 3",
    ]


def test_by_hand_is_for_the_cpu(started):
    assert mistake(started[2], "collectives", "--by-hand", "--backend", "nccl") == (
        "collectives: --by-hand is for CPU tensors: use --backend gloo with it",
        1,
    )


# ---------------------------------------------------------------------------- the bench

COLLECTIVES = {
    "all_reduce": "sum",
    "broadcast": "none",
    "reduce": "sum",
    "reduce_scatter": "sum",
    "all_gather": "none",
    "all_to_all": "none",
}
QUICK = ("--iters", 2, "--warmup", 1)
SCHEMA = {
    **{"collective": str, "size": int, "count": int, "type": str, "redop": str},
    **{"time_us": float, "algbw": float, "busbw": float, "wrong": int},
    **{"iters": int, "world_size": int, "backend": str},
}


def check_row(row, collective, n):
    assert {name: type(value) for name, value in row.items()} == SCHEMA
    assert row["wrong"] == 0
    assert row["time_us"] > 0
    assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3)
    factor = costs.bus_bandwidth_factor(collective, n)
    assert row["busbw"] == pytest.approx(factor * row["algbw"])
    assert (row["collective"], row["world_size"]) == (collective, n)
    assert (row["type"], row["backend"]) == ("float", "gloo")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_collective_is_right_and_its_line_is_complete(started, n, collective):
    sizes = ("-b", 4, "-e", 4096, "-f", 32)
    arguments = ("--collective", collective, "--json", *sizes, *QUICK)
    rows = [
        json.loads(line) for line in run(started[n], "bench_all_reduce", *arguments)
    ]
    for row in rows:
        check_row(row, collective, n)
        assert row["iters"] == 2
        assert row["redop"] == COLLECTIVES[collective]
    in_pieces = collective in ("reduce_scatter", "all_gather", "all_to_all")
    pieces = n if in_pieces else 1
    expected = [max(1, size // (4 * pieces)) for size in (4, 128, 4096)]
    assert [row["count"] for row in rows] == expected
    assert [row["size"] for row in rows] == [4 * pieces * count for count in expected]


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_every_op(started, collective, op):
    arguments = ("--collective", collective, "--op", op, "--json", "-e", "1K", *QUICK)
    (line,) = run(started[3], "bench_all_reduce", *arguments)
    row = json.loads(line)
    assert (row["redop"], row["wrong"]) == (op, 0)


@pytest.mark.parametrize("collective", thorough_after(1, COLLECTIVES))
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
    said = " ".join(bench_all_reduce.__doc__.split())
    assert "three times the largest size, and for four times with all_to_all" in said


def test_a_size_is_not_measured_twice(started):
    """8 and 16 bytes are both rounded to one element for each of 4 ranks."""
    sizes = ("-b", 8, "-e", 32, "-f", 2)
    arguments = ("--collective", "all_gather", "--json", *sizes, *QUICK)
    lines = run(started[4], "bench_all_reduce", *arguments)
    assert [json.loads(line)["size"] for line in lines] == [16, 32]


def test_the_table_has_the_columns_of_nccl_tests(started, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("of another run")
    arguments = ("-b", "1K", "-e", "64K", "-f", 8, *QUICK, "--json", file)
    lines = run(started[2], "bench_all_reduce", *arguments)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["size"] for row in rows] == [1024, 8192, 65536]
    assert lines[0] == "# all_reduce, ranks: 2, backend: gloo"
    assert lines[1] == "# calls to warm up: 1, timed calls: 2"
    names = "# size count type redop time algbw busbw #wrong"
    assert lines[2].split() == names.split()
    assert lines[3].split() == "# (B) (elements) (us) (GB/s) (GB/s)".split()
    for row, line in zip(rows, lines[4:-1], strict=True):
        check_row(row, "all_reduce", 2)
        assert line.split() == [
            *(str(row["size"]), str(row["count"]), "float", "sum"),
            f"{row['time_us']:.2f}",
            f"{row['algbw']:.3f}",
            f"{row['busbw']:.3f}",
            "0",
        ]
    mean = sum(row["busbw"] for row in rows) / 3
    assert lines[-1] == f"# Avg bus bandwidth: {mean:.3f} GB/s"


def test_wrong_elements_are_counted(started):
    """With a broadcast that does nothing, rank 1 keeps its own numbers."""
    arguments = ["--collective", "broadcast", "--json", "-e", "1K"]
    results = started[2].run(
        run_on_rank, str(FOLDER), "bench_all_reduce", arguments, ("broadcast",)
    )
    assert json.loads(results[0][0])["wrong"] == 256
    message = "bench_all_reduce: 256 elements are wrong"
    assert [code for _, _, code in results] == [message, message]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("-b", "1M", "-e", "1K"),
            "--minbytes 1048576 is more than --maxbytes 1024: there is no size to "
            "measure",
        ),
        (("-b", 2), "--minbytes is 2: expected 4 or more"),
        (("-f", 1), "--factor is 1: expected 2 or more"),
        (("--iters", 0), "--iters is 0: expected 1 or more"),
        (("--warmup", -1), "--warmup is -1: expected 0 or more"),
        (
            ("--collective", "broadcast", "--op", "max"),
            "--op is for all_reduce, reduce, reduce_scatter: broadcast reduces nothing",
        ),
        (("--json", "no/such/folder/x"), "--json no/such/folder/x: No such file or"),
        pytest.param(
            ("--backend", "nccl"),
            "nccl needs a GPU for each rank: this machine has 0, for 1 ranks. Use "
            "--backend gloo.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
)
def test_wrong_arguments_of_the_bench(started, arguments, message):
    line, _ = mistake(started[1], "bench_all_reduce", *arguments)
    assert line.startswith(f"bench_all_reduce: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-b", "1kB"), "'1kB' is no size: expected bytes as in 8, 64K, 4M or 1G"),
        (("-e", "-8"), "'-8' is no size: expected bytes as in 8, 64K, 4M or 1G"),
        (("--collective", "scan"), "invalid choice: 'scan'"),
        (("--op", "mean"), "invalid choice: 'mean'"),
        (("--size", "8"), "unrecognized arguments: --size 8"),
    ],
)
def test_wrong_words_are_shown_with_the_right_ones(started, arguments, message):
    line, code = mistake(started[1], "bench_all_reduce", *arguments)
    assert code == 2
    assert message in line


# ----------------------------------------------------------------------- with torchrun
