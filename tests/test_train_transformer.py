"""``train_fsdp.py``, ``train_tp.py``, ``train_pipeline.py``: transformers on ranks.

The curve is that of one process, however the model is split; and checkpoints hold.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from thorough import thorough_after
from worker_runs import Run, one_thread, ranks_for_scripts

from course_utils.measure.language import Language, Transformer, next_symbol_loss
from course_utils.ranks import RanksError

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "fsdp2")
PARAMETERS = 102_656

approx = functools.partial(pytest.approx, abs=1e-5)  # after some steps in float32


@functools.cache
def losses_of_one_process(
    batch_size: int, steps: int, clip: float = math.inf, **shape: int
) -> list[float]:
    """A transformer's losses without anything distributed: the mean of every two steps.

    `shape` is what the `Transformer` is made with.
    """
    with one_thread():
        language, losses = Language(), []
        torch.manual_seed(0)
        model = Transformer(**shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
        for step in range(1, steps + 1):
            batch = language.sample(batch_size, 33, torch.Generator().manual_seed(step))
            loss = next_symbol_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    return [sum(losses[i : i + 2]) / 2 for i in range(0, steps, 2)]


@pytest.fixture(scope="module")
def run():
    with ranks_for_scripts() as run:
        yield run


# ----------------------------------------------------------------- tensor parallelism
# Whole on all ranks of tp: positions, norms, the biases of rows.
WHOLE = 32 * 64 + 5 * 2 * 64 + 2 * 64
SLICED = sum(p.numel() for p in Transformer(heads=8).parameters()) - WHOLE
TP = ("train_tp", "--batch-size", 8, "--steps", 6, "--every", 2)
OWN, THEIRS = ["--own"], []


@pytest.fixture(scope="module")
def sliced() -> list[float]:
    """The losses of `TP` without anything distributed."""
    return losses_of_one_process(8, steps=6, heads=8)


@pytest.mark.parametrize(
    ("n", "dp", "words"),
    thorough_after(
        4,
        [
            (2, 1, OWN),
            (2, 1, THEIRS),
            (4, 2, OWN),
            (4, 2, THEIRS),
            (1, 1, OWN),
            (1, 1, THEIRS),
            (4, 1, OWN),
            (4, 1, THEIRS),
            (4, 4, THEIRS),
            (8, 2, THEIRS),
            (8, 4, THEIRS),
        ],
    ),
)
def test_slices_on_a_mesh_train_like_one_process(run, sliced, n, dp, words):
    found = run(n, *TP, "--dp", dp, *words)
    assert found.curve() == approx(sliced)
    assert found.curve("step") == [2, 4, 6]
    whole_slices = WHOLE + SLICED // (n // dp)
    parameters = whole_slices if words == OWN else whole_slices // dp  # FSDP's part
    assert set(found.curve("parameters")) == {parameters}


def test_a_run_goes_on_with_another_mesh(run, sliced, tmp_path):
    saved = (*TP, "--checkpoint", tmp_path / "run")
    first = run(4, *saved, "--dp", 2, "--steps", 2, "--async-save").curve()
    then = run(4, *saved, "--dp", 4, "--steps", 4, "--resume").curve()
    last = run(2, *saved, "--resume").curve()
    assert first + then + last == approx(sliced)
    assert run(1, *saved, "--resume").metrics == []
    changed = run(1, *saved, "--width", 32, "--resume").mistake
    assert "but this run is {'width': 32" in changed


@pytest.mark.parametrize("words", thorough_after(1, [OWN, THEIRS]))
def test_slices_in_bf16_round_and_still_learn_the_same(run, sliced, words):
    curve = run(2, *TP, "--bf16", *words).curve()
    assert curve == pytest.approx(sliced, abs=0.02)
    assert curve != approx(sliced)


# --------------------------------------------------------------------------- pipelines
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("n", thorough_after(1, [4, 2, 1]))
def test_stages_train_like_one_process(run, n, schedule):
    words = ("--batch-size", 8, "--micro-batches", 4, "--steps", 4, "--every", 2)
    found = run(n, "train_pipeline", *words, "--schedule", schedule)
    assert found.curve() == approx(losses_of_one_process(8, steps=4, layers=4))
    assert found.curve("step") == [2, 4]


# ------------------------------------------- FSDP: one curve, any ranks, any strategy
@pytest.fixture(scope="module")
def on(run):
    """A function: run train_fsdp on n ranks, with small batches."""
    small = ("train_fsdp", "--batch-size", 12, "--every", 2, "--strategy")
    return lambda n, *words, before=None: run(n, *small, *words, before=before)


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """The losses without anything distributed, 10 steps, one line every 2."""
    return losses_of_one_process(12, steps=10, clip=1.0)


@pytest.fixture(scope="module")
def unbroken(on) -> Callable[[int, str], Run]:
    """A function: 10 steps on so many ranks with a strategy."""
    return functools.cache(lambda n, strategy: on(n, strategy, "--steps", 10))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n", thorough_after(1, [2, 4, 1]))
def test_the_curve_is_that_of_one_process_with_the_whole_batch(
    unbroken, reference, n, strategy
):
    run = unbroken(n, strategy)
    assert run.curve() == approx(reference)
    assert run.curve("step") == [2, 4, 6, 8, 10]
    norms = unbroken(2, "ddp").curve("grad_norm")
    assert run.curve("grad_norm") == pytest.approx(norms, abs=1e-4)
    assert max(norms) > 1.0  # else nothing would have been clipped
    assert min(run.curve("seconds") + run.curve("symbols_per_second")) > 0
    assert run.curve("best_loss") == [Language().best_loss(32)] * 5


def test_a_rank_holds_what_the_stage_says(unbroken):
    """float32: 4 bytes of a parameter, 4 of its gradient, 8 of Adam's state."""
    whole, part = PARAMETERS, PARAMETERS / 2
    expected = {
        "ddp": 16 * whole,
        "zero1": 8 * whole + 8 * part,
        "zero2": 4 * whole + 12 * part,
        "fsdp": 16 * part,
        "fsdp2": 16 * part,
    }
    for strategy in STRATEGIES:
        held = set(unbroken(2, strategy).curve("held_bytes"))
        # Adam counts its steps for each tensor; shards are padded to equal sizes.
        assert 0 < held.pop() - expected[strategy] < 400 and not held, strategy


@pytest.mark.thorough
def test_the_model_comes_close_to_the_best_loss_and_not_below(on):
    best = Language().best_loss(32)
    losses = on(1, "ddp", "--batch-size", 32, "--every", 20).curve()
    assert losses[0] > 1.9
    assert best - 0.01 < losses[-1] < best + 0.06


@pytest.mark.parametrize("strategy", thorough_after(1, STRATEGIES[::-1]))
def test_bf16_rounds_and_still_learns_the_same(on, reference, strategy):
    run = on(2, strategy, "--bf16", "--steps", 10)
    assert run.curve() == pytest.approx(reference, abs=0.02)
    assert run.curve() != approx(reference)
    if strategy.startswith("fsdp"):  # shards stay float32
        held = run.curve("held_bytes")[0]
        assert held == pytest.approx(8 * PARAMETERS, abs=400)


def test_a_seed_is_a_start_and_an_order(on, unbroken):
    first = unbroken(2, "ddp").curve()[:1]
    assert on(2, "ddp", "--steps", 2).curve() == first
    assert on(2, "ddp", "--steps", 2, "--seed", 1).curve() != approx(first)


# ----------------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def saved(on, tmp_path_factory) -> Callable[[str], Path]:
    """A function: the folder of what 2 ranks have saved after 2 and 4 steps."""

    @functools.cache
    def save(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp("saved") / "new" / strategy
        run = on(2, strategy, "--steps", 4, "--checkpoint", folder, "--resume")
        assert run.curve("step") == [2, 4]
        said = f"--resume: there is no checkpoint in {folder} yet, so it begins anew\n"
        assert run.err == [said, ""]
        return folder

    return save


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("strategy", thorough_after(1, STRATEGIES[::-1]))
def test_saved_on_2_ranks_resumed_on_others_and_with_other_strategies(
    on, saved, reference, tmp_path, strategy
):
    folder = shutil.copytree(saved(strategy), tmp_path / "run")
    files = {".metadata", *(f"__{rank}_0.distcp" for rank in range(2))}
    assert names(folder / "step_000004") == files
    place = STRATEGIES.index(strategy)
    others = strategy, STRATEGIES[place - 1], STRATEGIES[place - 2]
    for turn, (n, other) in enumerate(zip((3, 2, 1), others, strict=True), start=2):
        words = ("--steps", 2 * turn + 2, "--checkpoint", folder, "--resume")
        run = on(n, other, *words)
        assert run.curve("step") == [2 * turn + 2]
        assert run.curve() == approx(reference[turn : turn + 1]), (n, other)
    assert names(folder) == {"settings.json", "step_000008", "step_000010"}
    run = on(1, other, *words)
    assert run.metrics == [] and "nothing is left of --steps 10" in run.err[0]


def killed_in_a_file(replace):
    """Rank 1 is killed in the save of step 4, when it has written half of its file."""
    fsync, files = os.fsync, []

    def torn_fsync(descriptor):
        files.append(descriptor)
        if os.environ["RANK"] == "1" and len(files) == 2:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    replace(os, "fsync", torn_fsync)


def killed_in_removal(replace):
    """Rank 0 is killed when the oldest checkpoint is to be removed."""
    rename = os.rename

    def torn_rename(old, new):
        rename(old, new)
        if str(new).endswith("step_000002.partial"):
            os.kill(os.getpid(), signal.SIGKILL)

    replace(os, "rename", torn_rename)


@pytest.mark.parametrize(
    ("killed", "options", "left", "complete"),
    thorough_after(
        1,
        [
            (killed_in_a_file, (), "step_000004.partial", 2),
            (killed_in_a_file, ("--async-save",), "step_000004.partial", 2),
            (killed_in_removal, (), "step_000002.partial", 6),
        ],
    ),
)
def test_a_kill_in_the_middle_of_a_save_loses_nothing_but_that_save(
    on, unbroken, tmp_path, killed, options, left, complete
):
    folder = tmp_path / "run"
    words = ("fsdp2", "--steps", 10, "--checkpoint", folder, "--resume")
    with pytest.raises(RanksError, match="SIGKILL"):
        on(2, *words, *options, before=killed)
    assert any((folder / left).iterdir())
    whole = {name for name in names(folder) if name.startswith("step_")} - {left}
    assert max(whole) == f"step_{complete:06d}"
    resumed = on(2, *words)
    assert resumed.curve("step") == list(range(complete + 2, 11, 2))
    assert resumed.curve() == unbroken(2, "fsdp2").curve()[complete // 2 :]
    assert names(folder) == {"settings.json", "step_000008", "step_000010"}


def full_disk(replace):
    """Rank 1 cannot write its second file."""
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    replace(os, "fsync", full)


def own_disk(replace):
    """Rank 0 does not see the file of rank 1."""
    fsync = os.fsync

    def elsewhere(descriptor):
        fsync(descriptor)
        if dist.get_rank() == 1:
            os.unlink(os.readlink(f"/proc/self/fd/{descriptor}"))

    replace(os, "fsync", elsewhere)


@pytest.mark.parametrize(
    ("disk", "words", "complete", "message"),
    thorough_after(
        2,
        [
            (full_disk, (), 1, "(rank 1: OSError: [Errno 28] No space left on device)"),
            (own_disk, (), 0, "Save to a disk that all machines share)"),
            (full_disk, ("--async-save",), 1, "No space left on device)"),
        ],
    ),
)
def test_a_disk_that_does_not_do_ends_the_run_and_spares_what_is_there(
    on, tmp_path, disk, words, complete, message
):
    folder = tmp_path / "run"
    run = on(2, "fsdp2", "--steps", 6, "--checkpoint", folder, *words, before=disk)
    said = f"train_fsdp: {folder} could not be written to "
    assert run.end[0].startswith(said) and message in run.end[0]
    assert run.end[1] != "" == run.out[1]
    assert len([name for name in names(folder) if name[-1] == "2"]) == complete
    assert "step_000004" not in names(folder)


def test_a_folder_that_is_not_ours_is_left_as_it_is(on, saved, tmp_path):
    strange, file, damaged = tmp_path / "strange", tmp_path / "file", tmp_path / "torn"
    (strange / "step_000002").mkdir(parents=True)
    (strange / "notes.txt").write_text("mine")
    file.write_text("mine")
    damaged.mkdir()
    (damaged / "settings.json").write_text("{")
    ours = saved("fsdp2")
    before = sorted((str(f), f.stat().st_mtime_ns) for f in ours.rglob("*"))
    for folder, words, message in (
        (strange, ["--resume"], "is no folder of checkpoints"),
        (file, [], "is a file"),
        (damaged, [], "settings.json is damaged"),
        (ours, [], "has a checkpoint of step 4: add --resume"),
        (ours, ["--resume", "--width", 32], "'width': 64"),
    ):
        said = on(2, "fsdp2", "--checkpoint", folder, *words).mistake
        assert said.startswith(f"train_fsdp: {folder}") and message in said
    assert "but this run is {'width': 32" in said
    assert names(strange) == {"step_000002", "notes.txt"}
    assert sorted((str(f), f.stat().st_mtime_ns) for f in ours.rglob("*")) == before


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_can_be_used(
    on, saved, reference, tmp_path
):
    folder = shutil.copytree(saved("fsdp2"), tmp_path / "run")
    words = ("fsdp2", "--steps", 6, "--checkpoint", folder, "--resume")
    (folder / "step_000004" / "__1_0.distcp").unlink()
    said = on(2, *words).mistake
    assert said.startswith(f"train_fsdp: {folder / 'step_000004'} is damaged (rank ")
    assert said.endswith("Remove it, to go on from the checkpoint before it.")
    shutil.rmtree(folder / "step_000004")
    run = on(2, *words)
    assert run.curve("step") == [4, 6]
    assert run.curve() == approx(reference[1:3])
