"""``train_fsdp.py``: one curve for all strategies and ranks, and checkpoints that hold.

The runs are forks of one process that has imported torch already. Where several runs
can share their ranks they do: most of the time would go into starting them.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from thorough import thorough_after
from worker_forks import Forks, Run, forks_of

from course_utils import ROOT
from course_utils.measure.language import Language, Transformer, next_symbol_loss

WORKER = "course_utils/workers/train_fsdp.py"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "fsdp2")
SMALL = ("--batch-size", 12, "--every", 2)
ROUNDING = 1e-5  # of a loss in float32, after some steps
PARAMETERS = 102_656
SETTINGS = {
    **{"width": 64, "layers": 2, "heads": 4, "batch_size": 12},
    **{"lr": 0.005, "clip": 1.0, "seed": 0, "bf16": False},
}

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="these tests fork ranks"
)


@pytest.fixture(scope="module")
def forks():
    with forks_of(WORKER) as process:
        yield process


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """The losses without anything distributed, 10 steps, one line every 2."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    language = Language()
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    losses = []
    for step in range(1, 11):
        batch = language.sample(12, 33, torch.Generator().manual_seed(step))
        loss = next_symbol_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    torch.set_num_threads(threads)
    return [sum(losses[i : i + 2]) / 2 for i in range(0, 10, 2)]


def the_same(losses: list[float], others: list[float]) -> bool:
    return losses == pytest.approx(others, abs=ROUNDING)


def with_each(strategies: tuple, *words: object, folder: Path | None = None) -> list:
    """The arguments of one run for each strategy, each with a folder of its own."""
    runs = []
    for strategy in strategies:
        run = ["--strategy", strategy, *SMALL, *words]
        if folder:
            run += ["--checkpoint", folder / strategy, "--resume"]
        runs.append(run)
    return runs


# ------------------------------------------------- one curve, any ranks, any strategy
@pytest.fixture(scope="module")
def unbroken(forks) -> Callable[[int], Run]:
    """A function: 10 steps with each strategy on so many ranks."""
    runs = with_each(STRATEGIES, "--steps", 10)
    return functools.cache(lambda n: forks.several(n, runs))


@pytest.mark.parametrize("n", thorough_after(2, [2, 4, 1]))
def test_the_curve_is_that_of_one_process_with_the_whole_batch(unbroken, reference, n):
    run = unbroken(n)
    assert run.codes == [0] * n, run.err
    assert run.err == [""] * n
    assert run.out[1:] == [""] * (n - 1)
    for strategy in STRATEGIES:
        assert the_same(run.curve(strategy=strategy), reference), strategy


@pytest.mark.parametrize("n", thorough_after(2, [2, 4, 1]))
def test_all_strategies_see_the_same_norm_of_the_gradients(unbroken, n):
    norms = unbroken(2).curve("grad_norm", strategy="ddp")
    assert max(norms) > 1.0  # else nothing would have been clipped
    for strategy in STRATEGIES:
        found = unbroken(n).curve("grad_norm", strategy=strategy)
        assert found == pytest.approx(norms, abs=1e-4), strategy


def test_a_line_says_what_it_has_measured(unbroken):
    for line in unbroken(2).metrics:
        assert set(line) == {
            *("step", "loss", "best_loss", "grad_norm", "held_bytes", "seconds"),
            *("symbols_per_second", "strategy", "world_size", "backend"),
        }
        assert (line["world_size"], line["backend"]) == (2, "gloo")
        assert line["best_loss"] == Language().best_loss(32)
        assert line["seconds"] > 0
        assert line["symbols_per_second"] > 0
    assert unbroken(2).curve("step", strategy="ddp") == [2, 4, 6, 8, 10]


def test_a_rank_holds_what_the_stage_says(unbroken):
    """float32: 4 bytes of a parameter, 4 of its gradient, 8 of Adam's state."""
    whole, part = PARAMETERS, PARAMETERS / 4
    expected = {
        "ddp": 16 * whole,
        "zero1": 8 * whole + 8 * part,
        "zero2": 4 * whole + 12 * part,
        "fsdp": 16 * part,
        "fsdp2": 16 * part,
    }
    for strategy in STRATEGIES:
        held = unbroken(4).curve("held_bytes", strategy=strategy)
        assert len(set(held)) == 1
        # Adam counts its steps for each tensor; shards are padded to equal sizes.
        assert 0 < held[0] - expected[strategy] < 400, strategy


@pytest.mark.thorough
def test_the_model_comes_close_to_the_best_loss_and_not_below(forks):
    run = forks(1, "--strategy", "ddp")
    assert run.curve("step")[-1] == 200
    best = Language().best_loss(32)
    losses = run.curve()
    assert losses[0] > 1.9
    assert best - 0.01 < losses[-1] < best + 0.06
    other = forks(1, "--strategy", "ddp", "--seed", 1, "--steps", 20)
    assert other.curve() != losses[:1]


@pytest.mark.thorough
def test_bf16_rounds_and_still_learns_the_same(forks, reference):
    run = forks.several(2, with_each(STRATEGIES, "--bf16", "--steps", 10))
    assert run.codes == [0, 0], run.err
    for strategy in STRATEGIES:
        losses = run.curve(strategy=strategy)
        assert not the_same(losses, reference), strategy
        assert losses == pytest.approx(reference, abs=0.02), strategy
    by_hand, by_torch = (run.curve("held_bytes", strategy=s) for s in STRATEGIES[-2:])
    assert by_hand[0] == pytest.approx(8 * PARAMETERS, abs=400)  # shards stay float32
    assert by_torch[0] == pytest.approx(8 * PARAMETERS, abs=400)


# ----------------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def saved(forks, tmp_path_factory) -> Path:
    """A folder for each strategy with what 4 ranks have saved after 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("saved")
    runs = with_each(STRATEGIES, "--steps", 4, folder=folder / "new")
    run = forks.several(4, runs)  # --resume without a checkpoint: from the start
    assert run.codes == [0] * 4, run.err
    places = [folder / "new" / strategy for strategy in STRATEGIES]
    assert run.err[0].splitlines() == [
        f"--resume: there is no checkpoint in {place} yet, so it begins anew"
        for place in places
    ]
    return folder / "new"


def test_a_checkpoint_has_a_file_for_each_rank_and_one_that_says_what_is_where(saved):
    for strategy in STRATEGIES:
        names = {entry.name for entry in (saved / strategy).iterdir()}
        assert names == {"settings.json", "step_000002", "step_000004"}
        files = {entry.name for entry in (saved / strategy / "step_000004").iterdir()}
        assert files == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
        assert json.loads((saved / strategy / "settings.json").read_text()) == SETTINGS


@pytest.mark.thorough
def test_saved_on_4_ranks_resumed_on_2_then_3_then_1(forks, saved, reference, tmp_path):
    shutil.copytree(saved, tmp_path / "of")
    for turn, n in enumerate((2, 3, 1), start=2):
        steps = 2 * turn + 2
        runs = with_each(STRATEGIES, "--steps", steps, folder=tmp_path / "of")
        run = forks.several(n, runs)
        assert run.codes == [0] * n, run.err
        for strategy in STRATEGIES:
            assert run.curve("step", strategy=strategy) == [steps]
            losses = run.curve(strategy=strategy)
            assert the_same(losses, reference[turn : turn + 1]), (strategy, n)
    for strategy in STRATEGIES:  # the last two are kept
        names = {entry.name for entry in (tmp_path / "of" / strategy).iterdir()}
        assert names == {"settings.json", "step_000008", "step_000010"}


@pytest.mark.thorough
def test_a_run_can_go_on_with_another_strategy(forks, saved, reference, tmp_path):
    runs = []
    for before, after in zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True):
        shutil.copytree(saved / before, tmp_path / before)
        runs.append(["--strategy", after, *SMALL, "--steps", 6, "--resume"])
        runs[-1] += ["--checkpoint", tmp_path / before]
    run = forks.several(2, runs)
    assert run.codes == [0, 0], run.err
    for strategy in STRATEGIES:
        assert the_same(run.curve(strategy=strategy), reference[2:3]), strategy


# The save of step 2 writes nothing until training has come to step 3.
SLOW = """
import threading
import torch
import torch.distributed.checkpoint as dcp

step, write_data = torch.optim.AdamW.step, dcp.FileSystemWriter.write_data
moved_on = threading.Event()

def counted_step(self, *args, **kwargs):
    step(self, *args, **kwargs)
    self.count = getattr(self, "count", 0) + 1
    if self.count == 1:  # another run
        moved_on.clear()
    if self.count == 3:
        moved_on.set()

def slow_write_data(self, *args, **kwargs):
    if self.path.name == "step_000002.partial":
        moved_on.wait()
    return write_data(self, *args, **kwargs)

torch.optim.AdamW.step, dcp.FileSystemWriter.write_data = counted_step, slow_write_data
"""


@pytest.mark.thorough
def test_with_as_many_ranks_a_resumed_run_is_the_same_to_the_last_bit(
    forks, unbroken, tmp_path
):
    """What was saved in the background is the state of then, not that of later."""
    sharded = STRATEGIES[1:]  # DDP sorts its buckets anew after the first step
    first = with_each(sharded, "--steps", 4, "--async-save", folder=tmp_path)
    run = forks.several(2, first, code=SLOW)
    assert run.codes == [0, 0], run.err
    for strategy in sharded:
        shutil.rmtree(tmp_path / strategy / "step_000004")
    second = with_each(sharded, "--steps", 10, folder=tmp_path)
    run = forks.several(2, second + second)  # the second time nothing is left to do
    assert run.codes == [0, 0], run.err
    done = "step 10 is done: nothing is left of --steps 10"
    assert run.err[0].count(done) == len(sharded) and done not in run.err[1]
    for strategy in sharded:
        losses = run.curve(strategy=strategy)
        assert losses == unbroken(2).curve(strategy=strategy)[1:], strategy


# Where a rank is killed. Rank 1 calls `os.fsync` once in a save, for its file, so the
# second call is in the save of step 4. `os.rename` gives a checkpoint its name, and
# takes that of the oldest.
KILL = """
import os, signal, threading
import torch

fsync, rename, step = os.fsync, os.rename, torch.optim.AdamW.step
training, under_way = threading.get_ident(), threading.Event()
steps, files = [], []

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def torn_fsync(descriptor):
    files.append(descriptor)
    if rank == 1 and len(files) == 2:
        if WHERE == "file":
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            kill()
        if WHERE == "background":
            assert threading.get_ident() != training
            under_way.set()
            threading.Event().wait()
    fsync(descriptor)

def watched_step(self, *args, **kwargs):
    steps.append(step(self, *args, **kwargs))
    if WHERE == "background" and rank == 1 and len(steps) == 6:
        under_way.wait()  # the save of step 4: training went on, and it did not
        kill()

def torn_rename(before, after):
    if WHERE == "name" and str(after).endswith("step_000004"):
        kill()
    rename(before, after)
    if WHERE == "removal" and str(after).endswith("step_000002.partial"):
        kill()

os.fsync, os.rename, torch.optim.AdamW.step = torn_fsync, torn_rename, watched_step
"""


@pytest.mark.parametrize(
    ("where", "left", "complete"),
    thorough_after(
        1,
        [
            ("file", "step_000004.partial", 2),
            ("name", "step_000004.partial", 2),
            ("background", "step_000004.partial", 2),
            ("removal", "step_000002.partial", 6),
        ],
    ),
)
def test_a_kill_in_the_middle_of_a_save_loses_nothing_but_that_save(
    forks, unbroken, tmp_path, where, left, complete
):
    folder = tmp_path / "run"
    words = (*SMALL, "--steps", 10, "--checkpoint", folder, "--resume")
    in_background = ("--async-save",) * (where == "background")
    torn = KILL.replace("WHERE", repr(where))
    broken = forks(2, *words, *in_background, code=torn)
    assert -signal.SIGKILL in broken.codes
    assert all(code != 0 for code in broken.codes)
    assert any((folder / left).iterdir())
    names = {entry.name for entry in folder.glob("step_*") if entry.suffix == ""}
    assert max(names) == f"step_{complete:06d}"
    resumed = forks(2, *words)
    assert resumed.codes == [0, 0]
    assert resumed.curve("step") == list(range(complete + 2, 11, 2))
    expected = unbroken(2).curve(strategy="fsdp2")
    assert resumed.curve() == expected[complete // 2 :]
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"settings.json", "step_000008", "step_000010"}


@pytest.mark.thorough
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_ends_the_run_with_a_message_and_spares_what_is_there(
    forks, tmp_path, in_background
):
    full = """
import os
fsync, calls = os.fsync, []
def full(descriptor):
    calls.append(1)
    if rank == 1 and len(calls) == 2:
        raise OSError(28, "No space left on device")
    fsync(descriptor)
os.fsync = full
"""
    words = [*SMALL, "--steps", 6, "--checkpoint", tmp_path / "run"]
    run = forks(2, *words, *(["--async-save"] * in_background), code=full)
    assert all(code != 0 for code in run.codes)
    assert run.err == [
        f"train_fsdp: {tmp_path / 'run'} could not be written to (rank 1: OSError: "
        "[Errno 28] No space left on device)\n",
        "",
    ]
    assert (tmp_path / "run" / "step_000002").is_dir()
    assert not (tmp_path / "run" / "step_000004").exists()


def test_a_disk_that_is_not_shared_is_noticed_when_saving(forks, tmp_path):
    elsewhere = """
import os
fsync = os.fsync
def elsewhere(descriptor):
    fsync(descriptor)
    if rank == 1:  # as seen from rank 0
        os.unlink(os.readlink(f"/proc/self/fd/{descriptor}"))
os.fsync = elsewhere
"""
    words = [*SMALL, "--steps", 2, "--checkpoint", tmp_path / "run"]
    run = forks(2, *words, code=elsewhere)
    assert all(code != 0 for code in run.codes)
    assert run.err[0] == (
        f"train_fsdp: {tmp_path / 'run'} could not be written to (rank 0: "
        "RuntimeError: rank 0 does not see __1_0.distcp of other ranks. Save to a disk "
        "that all machines share)\n"
    )
    assert not (tmp_path / "run" / "step_000002").exists()


# ------------------------------------------------------------------------- mistakes
def mistake(run: Run) -> str:
    """What rank 0 says about a mistake: one line, and only rank 0 says it."""
    assert run.codes[0] == 1
    assert all(code != 0 for code in run.codes)
    assert run.err[1:] == [""] * (len(run.codes) - 1)
    assert "".join(run.out) == ""
    (line,) = run.err[0].splitlines()
    return line.removeprefix("train_fsdp: ")


def mistakes(forks: Forks, *runs: list) -> list[str]:
    """What one rank says about several, one line each."""
    run = forks.several(1, runs)
    assert run.out == [""]
    assert len(run.err[0].splitlines()) == len(runs)
    return [line.removeprefix("train_fsdp: ") for line in run.err[0].splitlines()]


def test_numbers_that_make_no_sense_are_refused(forks):
    assert mistake(forks(2, "--batch-size", 63)) == (
        "--batch-size 63 cannot be shared equally by 2 ranks. Use a multiple of 2."
    )
    assert mistakes(
        forks,
        ["--batch-size", 0],
        ["--steps", 0],
        ["--every", -1],
        ["--clip", 0],
        ["--lr", -1],
        ["--lr", "nan"],
        ["--width", 30],
        ["--resume"],
        ["--async-save"],
    ) == [
        "--batch-size 0 cannot be shared equally by 1 ranks. Use a multiple of 1.",
        "--steps 0: it is 1 or more",
        "--every -1: it is 1 or more",
        "--clip 0: the longest gradient is above 0",
        "--lr -1: the learning rate is 0 or more",
        "--lr nan: the learning rate is 0 or more",
        "--width 30 cannot be shared equally by 4 heads. Use a multiple of 4.",
        "--resume needs --checkpoint DIR",
        "--async-save needs --checkpoint DIR",
    ]


def test_a_folder_that_is_not_ours_is_left_as_it_is(forks, saved, tmp_path):
    strange, file, damaged = tmp_path / "strange", tmp_path / "file", tmp_path / "torn"
    (strange / "step_000002").mkdir(parents=True)
    (strange / "notes.txt").write_text("mine")
    file.write_text("mine")
    damaged.mkdir()
    (damaged / "settings.json").write_text("{")
    ours = saved / "fsdp2"
    before = sorted((str(f), f.stat().st_mtime_ns) for f in saved.rglob("*"))
    lines = mistakes(
        forks,
        [*SMALL, "--checkpoint", strange, "--resume"],
        [*SMALL, "--checkpoint", file],
        [*SMALL, "--checkpoint", damaged],
        [*SMALL, "--checkpoint", ours],
        [*SMALL, "--checkpoint", ours, "--resume", "--width", 32],
    )
    other = SETTINGS | {"width": 32}
    assert lines[0] == (
        f"{strange} is no folder of checkpoints: it has notes.txt but no "
        "settings.json. Name another one, which need not exist"
    )
    assert (
        lines[1] == f"{file} is a file. --checkpoint takes a folder: name another one"
    )
    assert lines[2].startswith(f"{damaged / 'settings.json'} is damaged (")
    assert lines[3] == (
        f"{ours} has a checkpoint of step 4: add --resume to go on from it, or name "
        "another folder"
    )
    assert lines[4] == (
        f"{ours} has checkpoints of {SETTINGS}, but this run is {other}. "
        "Use the same settings, or name another folder"
    )
    assert {entry.name for entry in strange.iterdir()} == {"step_000002", "notes.txt"}
    assert sorted((str(f), f.stat().st_mtime_ns) for f in saved.rglob("*")) == before


@pytest.mark.thorough
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_can_be_used(
    forks, saved, reference, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(saved / "fsdp2", folder)
    words = [*SMALL, "--steps", 6, "--checkpoint", folder, "--resume"]
    (folder / "step_000004" / "__3_0.distcp").unlink()
    line = mistake(forks(2, *words))
    assert line.startswith(f"{folder / 'step_000004'} is damaged (rank ")
    assert "FileNotFoundError: [Errno 2] No such file" in line
    assert line.endswith("Remove it, to go on from the checkpoint before it.")
    shutil.rmtree(folder / "step_000004")
    run = forks(2, *words)
    assert run.curve("step") == [4, 6]
    assert the_same(run.curve(), reference[1:3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_gpus_says_what_to_do(forks):
    assert mistake(forks(2, "--backend", "nccl")) == (
        "nccl needs a GPU for each rank: this machine has 0, for 2 ranks. "
        "Use --backend gloo."
    )


# --------------------------------------------------------------- as a learner starts it


@pytest.mark.thorough
def test_a_single_process_without_torchrun_ends_before_gloo_can_crash_it(reference):
    code = f"""
import atexit, runpy, sys
atexit.register(print, "the end of Python")
sys.argv[:] = {[WORKER, *map(str, SMALL), "--steps", "4"]}
runpy.run_path({WORKER!r}, run_name="__main__")
"""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines()]
    assert the_same(losses, reference[:2])
