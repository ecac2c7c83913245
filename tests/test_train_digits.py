"""``train_ddp.py`` and ``train_sgd.py``: the curve of one process, on any ranks."""

import argparse
import functools
import inspect
import io
import itertools
import os
import re
import signal

import nbformat
import pytest
import torch
import torch.distributed as dist
from thorough import thorough_after
from torch import nn
from worker_runs import one_thread, ranks_for_scripts

from course_utils import ROOT
from course_utils.measure.data import load_data
from course_utils.ranks import RanksError
from course_utils.workers import train_ddp

approx = functools.partial(pytest.approx, abs=1e-4)
FEW = 0.006  # two test images: rounding may turn one that is on the border


@pytest.fixture(scope="module")
def on():
    with ranks_for_scripts() as run:
        yield run


@functools.cache
def alone(batch_size: int, epochs: int, drop_last: bool) -> dict[str, list[float]]:
    """The same training without anything distributed: the reference."""
    images, labels, test_images, test_labels = load_data()
    torch.manual_seed(0)
    model = train_ddp.make_model(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    curves = {"loss": [], "train_accuracy": [], "test_accuracy": []}
    for epoch in range(1, epochs + 1):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(images), generator=generator)
        if drop_last:
            order = order[: len(order) // batch_size * batch_size]
        loss_sum = correct = 0
        for rows in order.split(batch_size):
            logits = model(images[rows])
            loss = nn.functional.cross_entropy(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(rows)
            correct += (logits.argmax(1) == labels[rows]).sum().item()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).sum().item()
        curves["loss"].append(loss_sum / len(order))
        curves["train_accuracy"].append(correct / len(order))
        curves["test_accuracy"].append(right / len(test_labels))
    return curves


def reference(batch_size: int, epochs: int, drop_last: bool) -> dict[str, list[float]]:
    with one_thread():
        return alone(batch_size, epochs, drop_last)


# -------------------------------------------------------------- one curve, any ranks
@pytest.mark.parametrize(
    ("script", "n", "batch_size"),
    thorough_after(
        2,
        [
            ("train_ddp", 2, 64),
            ("train_sgd", 3, 64),  # shares of 22, 21 and 21 images
            ("train_ddp", 3, 63),
            ("train_ddp", 4, 64),
            ("train_sgd", 2, 64),
            ("train_sgd", 4, 64),
        ],
    ),
)
def test_the_curve_is_that_of_one_process_with_the_whole_batch(
    on, script, n, batch_size
):
    run = on(n, script, "--batch-size", batch_size, "--epochs", 3)
    expected = reference(batch_size, 3, drop_last=script == "train_ddp")
    assert run.curve() == approx(expected["loss"])
    for name in ("train_accuracy", "test_accuracy"):
        assert run.curve(name) == pytest.approx(expected[name], abs=FEW)
    assert expected["loss"][-1] < 0.15  # it has learned: the comparison means much
    assert run.curve("world_size") == [n] * 3
    assert min(run.curve("seconds") + run.curve("images_per_second")) > 0


def test_ddps_loader_repeats_no_image_to_fill_a_batch(monkeypatch):
    """1,440 images are 7 x 206 less 2, and 2 x 721 less 2: padding makes one batch."""
    monkeypatch.setattr(train_ddp, "WORLD_SIZE", 7)
    monkeypatch.setattr(dist, "get_world_size", lambda: 7)
    args, seen = argparse.Namespace(seed=0, batch_size=721), []
    for rank in range(7):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        loader = train_ddp.make_loader(torch.arange(1440), torch.zeros(1440), args)
        seen += [image for images, _ in loader for image in images.tolist()]
    assert len(seen) == len(set(seen)) == 721


def test_the_first_lesson_shows_lines_of_the_script():
    notebook = nbformat.read(ROOT / "notebooks/00_start_here.ipynb", as_version=4)
    (shown,) = [cell.source for cell in notebook.cells if cell.id == "train-md"]
    lines = re.findall(r"^ {4}(.*?)  # \d$", shown, re.MULTILINE)
    script = inspect.getsource(train_ddp).splitlines()
    script = [line.partition("  # ")[0].strip() for line in script]
    assert len(lines) == 8 and {*lines} <= {*script}


@pytest.mark.parametrize("script", ["train_ddp", "train_sgd"])
def test_a_seed_is_a_start_and_an_order(on, script):
    first, again, other = (
        on(2, script, "--epochs", 1, "--seed", seed).curve() for seed in (0, 0, 1)
    )
    assert first == again != approx(other)


def test_one_message_a_parameter_gives_the_same_numbers(on):
    def count(replace):
        sizes, all_reduce = [], dist.all_reduce
        replace(dist, "all_reduce", lambda t: (sizes.append(t.numel()), all_reduce(t)))
        return sizes

    words = ("train_sgd", "--epochs", 1)
    flat, naive = on(2, *words, before=count), on(2, *words, "--naive", before=count)
    assert naive.curve() == approx(flat.curve())
    # 23 batches: the rows and the gradients. Then the results of training and test.
    assert [len(sizes) for sizes in flat.noted] == [23 * (1 + 1) + 2] * 2
    assert [len(sizes) for sizes in naive.noted] == [23 * (1 + 6) + 2] * 2


def test_the_sum_is_a_larger_learning_rate(on):
    summed = on(2, "train_sgd", "--epochs", 2, "--sum").curve()
    assert summed == approx(on(2, "train_sgd", "--epochs", 2, "--lr", 0.1).curve())


def test_the_rate_is_scaled_and_warmed_up(on):
    """1,440 images are 12 batches of 120, the warm-up 18 of them."""
    words = ("train_sgd", "--batch-size", 120, "--lr", 0.01, "--epochs", 3)
    plain, scaled = on(2, *words), on(2, *words, "--scale-lr")
    warmed = on(2, *words, "--scale-lr", 30, "--warmup", 1.5)
    assert plain.curve("lr") == [0.01] * 3
    assert scaled.curve("lr") == pytest.approx([0.01 * 120 / 64] * 3)
    assert warmed.curve("lr") == pytest.approx([0.01 + 0.03 * 11 / 18, 0.04, 0.04])
    assert warmed.curve()[-1] < scaled.curve()[-1] < plain.curve()[-1]


# ------------------------------------------------------------------ DDP's checkpoints
WORDS = ("train_ddp", "--batch-size", 63, "--epochs")


@pytest.fixture(scope="module")
def unbroken(on) -> list[float]:
    return on(3, *WORDS, 4).curve()


@pytest.fixture(scope="module")
def saved(on, unbroken, tmp_path_factory) -> bytes:
    """What 3 ranks have saved after 2 of 4 epochs."""
    path = tmp_path_factory.mktemp("checkpoints") / "new" / "ddp.pt"
    first = on(3, *WORDS, 2, "--checkpoint", path, "--resume")
    assert f"there is no {path} yet, so it begins anew" in first.err[0]
    assert first.curve() == unbroken[:2]
    assert list(path.parent.iterdir()) == [path]
    return path.read_bytes()


def test_a_resumed_run_has_the_numbers_of_an_unbroken_one(
    on, unbroken, saved, tmp_path
):
    for n in (1, 3):
        (path := tmp_path / "ddp.pt").write_bytes(saved)
        again = (*WORDS, 4, "--checkpoint", path, "--resume")
        second, third = on(n, *again), on(n, *again)
        assert second.curve("epoch") == [3, 4]
        assert second.curve() == approx(unbroken[2:])
        assert third.metrics == [] and "nothing to do" in third.err[0]
    assert second.curve() == unbroken[2:]  # with as many ranks to the last bit
    whole = torch.load(path, weights_only=True)
    train_ddp.make_model(8, 8).load_state_dict(whole["model"])  # the plain model


@pytest.mark.parametrize("half", [True, False], ids=["half written", "not renamed"])
def test_a_kill_while_saving_leaves_the_checkpoint_before_it(
    on, unbroken, tmp_path, half
):
    """Rank 0 is killed in the second save: in the middle, or just before its end."""
    path = tmp_path / "ddp.pt"

    def torn(replace):
        save, saves = torch.save, itertools.count(1)

        def torn_save(checkpoint, file):
            save(checkpoint, whole := io.BytesIO())
            content = whole.getvalue()
            if (number := next(saves)) == 2 and half:
                file.write(content[: len(content) // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            file.write(content)
            if number == 2:
                replace(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))

        replace(torch, "save", torn_save)

    words = (*WORDS, 3, "--checkpoint", path, "--resume")
    with pytest.raises(RanksError, match=r"Rank 0 died \(SIGKILL\)"):
        on(3, *words, before=torn)
    assert torch.load(path, weights_only=True)["epoch"] == 1
    assert on(3, *words).curve() == unbroken[1:3]
    assert list(tmp_path.iterdir()) == [path]  # what was torn has been replaced


def test_a_file_that_is_not_to_be_used_stays_as_it_is(on, saved, tmp_path):
    (checkpoint := tmp_path / "ddp.pt").write_bytes(saved)
    words = ("train_ddp", "--resume", "--checkpoint")
    said = on(1, "train_ddp", "--checkpoint", checkpoint).mistake
    assert f"{checkpoint} exists: add --resume" in said
    said = on(2, *words, checkpoint, "--lr", 0.1).mistake
    assert "'batch_size': 63, 'lr': 0.05" in said.partition("but this run")[0]
    assert "'batch_size': 64, 'lr': 0.1" in said.partition("but this run")[2]
    assert checkpoint.read_bytes() == saved
    torch.save({"epoch": 1}, tmp_path / "of another program")
    (tmp_path / "torn").write_bytes(saved[:1000])
    for path in (tmp_path / "of another program", tmp_path / "torn"):
        said = on(2, *words, path).mistake
        assert said.startswith(f"train_ddp: {path} is not a checkpoint of this script")
