"""What all scripts have in common, and what the two that do not train print."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from thorough import thorough_after
from worker_runs import Run, ranks_for_scripts

from course_utils import ROOT
from course_utils.ranks.child_errors import child_errors
from course_utils.theory import costs
from course_utils.workers import bench_all_reduce


@pytest.fixture(scope="module")
def on():
    with ranks_for_scripts() as run:
        yield run


# ------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("n", "words", "message"),
    [
        (2, "train_ddp --batch-size 63", "63 cannot be shared equally by 2 ranks"),
        (1, "train_ddp --batch-size 0", "--batch-size 0: it is 1 or more"),
        (1, "train_ddp --batch-size 1441", "there are only 1440 images"),
        (1, "train_ddp --resume", "--resume needs --checkpoint FILE"),
        (4, "train_sgd --batch-size 3", "too small for 4 ranks"),
        (2, "train_sgd --batch-size 1441", "there are only 1440 images"),
        (1, "train_sgd --scale-lr 0", "--scale-lr 0: it is 1 or more"),
        (1, "train_sgd --scale-lr --warmup -1", "the number of epochs is 0 or more"),
        (1, "train_sgd --warmup 2", "add --scale-lr"),
        (2, "train_fsdp --batch-size 63", "63 cannot be shared equally by 2 ranks"),
        (1, "train_fsdp --every -1", "--every -1: it is 1 or more"),
        (1, "train_fsdp --clip 0", "the longest gradient is above 0"),
        (1, "train_fsdp --lr nan", "the learning rate is 0 or more"),
        (1, "train_fsdp --width 30", "30 cannot be shared equally by 4 heads. Use a"),
        (1, "train_fsdp --resume", "--resume needs --checkpoint DIR"),
        (1, "train_fsdp --async-save", "--async-save needs --checkpoint DIR"),
        (1, "train_tp --width 30", "--heads 8, --width 30: use 1, 2, 4"),
        (4, "train_tp --heads 2", "4 ranks of tp, --heads 2, --width 64: use 1, 2, 4"),
        (4, "train_tp --dp 3", "--dp 3 has to divide the 4 ranks and --batch-size 32"),
        (2, "train_tp --dp 2 --batch-size 9", "the 2 ranks and --batch-size 9"),
        (1, "train_tp --own --checkpoint run", "Leave out --own"),
        (1, "train_pipeline --width 30", "it is a multiple of the 4 heads"),
        (4, "train_pipeline --layers 6", "6: it is a multiple of the 4 ranks"),
        (1, "train_pipeline --batch-size 9", "a multiple of the 8 micro-batches"),
        (4, "train_pipeline --micro-batches 2 --batch-size 8", "1F1B needs 4 or more"),
        (2, "collectives --by-hand --backend nccl", "use --backend gloo with it"),
        (1, "bench_all_reduce -b 1M -e 1K", "there is no size to measure"),
        (1, "bench_all_reduce -b 2", "--minbytes 2: it is 4 or more"),
        (1, "bench_all_reduce --warmup -1", "it is 0 or more"),
        (1, "bench_all_reduce --collective broadcast --op max", "--op is for all_red"),
        (1, "bench_all_reduce --json no/such/folder/x", "No such file or directory"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(on, n, words, message):
    said = on(n, *words.split()).mistake
    assert said.startswith(f"{words.split()[0]}: ") and message in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train_ddp --bach-size 3", "unrecognized arguments: --bach-size 3"),
        ("train_sgd --epoch 3", "unrecognized arguments: --epoch 3"),
        ("train_fsdp --strategy fsdp3", "invalid choice: 'fsdp3'"),
        ("collectives --by", "unrecognized arguments: --by"),
        ("bench_all_reduce -b 1kB", "'1kB' is no size"),
    ],
)
def test_a_wrong_option_shows_those_there_are(on, words, message):
    run = on(1, *words.split())
    assert run.mistake == "2" and run.err[0].startswith("usage: ")
    assert message in run.err[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "script",
    ["train_ddp", "train_fsdp", "train_tp", "train_pipeline", "bench_all_reduce"],
)
def test_nccl_without_gpus_says_what_to_do(on, script):
    assert on(2, script, "--backend", "nccl").mistake == (
        f"{script}: nccl needs a GPU for each rank: this machine has 0, for 2 ranks. "
        "Use --backend gloo."
    )


@pytest.mark.parametrize("script", ["train_ddp", "train_sgd"])
def test_without_network_mnist_is_a_short_error(on, tmp_path, script):
    def no_network(replace):
        from torchvision import datasets

        from course_utils.measure import data

        replace(data, "STATE", Path(tmp_path))
        replace(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])

    said = on(1, script, "--data", "mnist", before=no_network).mistake
    assert said.startswith(f"{script}: mnist could not be downloaded: ")
    assert "--data digits" in said


# ---------------------------------------------------------------- without torchrun
@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        "train_ddp --epochs 1",
        "train_sgd --epochs 1",
        "train_fsdp --batch-size 12 --every 2 --steps 2",
        "train_tp --own --every 2 --steps 2",
        "train_pipeline --every 2 --steps 2",
    ],
)
def test_one_process_without_torchrun_gives_the_same_curve(on, words):
    """And no thread of gloo is left at the end: they crash Python now and then."""
    name, *words = words.split()
    script = f"course_utils/workers/{name}.py"
    code = f"""
import atexit, pathlib, runpy, sys
def end():
    threads = pathlib.Path("/proc/self/task").glob("*/comm")
    print([name for name in map(pathlib.Path.read_text, threads) if "gloo" in name])
atexit.register(end)
sys.argv[:] = {[script, *words]}
runpy.run_path({script!r}, run_name="__main__")
"""
    variables = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    if name in ("train_fsdp", "train_tp", "train_pipeline"):  # it leaves at once
        lines.append(last)
    else:
        assert last == "[]"
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses == pytest.approx(on(2, name, *words).curve(), abs=1e-4)


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


# --------------------------------------------------------------- what lesson 04 spawns
@pytest.mark.thorough
def test_as_a_script():
    done = subprocess.run(
        [sys.executable, "course_utils/workers/spawn_hello.py", "--nproc", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [f"I am process {rank} of 2." for rank in range(2)]
    assert (done.stdout.splitlines(), done.returncode) == (said, 0), done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_errors_of_a_child_are_collected_and_not_shown(capfd, fails):
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        with child_errors() as lines:
            code = r"import sys; sys.exit('\x1b[1;35mno\x1b[0m, not today')"
            subprocess.run([sys.executable, "-c", code])
            if fails:
                raise KeyError
    assert lines == ["no, not today"]
    assert capfd.readouterr().err == ""
    os.write(2, b"back again")  # stderr is what it was
    assert capfd.readouterr().err == "back again"
