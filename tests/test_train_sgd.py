"""``train_sgd.py``: one curve on any number of ranks, that of one process and of DDP.

One run is launched as a learner does it. The others run in ranks that are there
already: each finds what torchrun would have told it, and joins the group by itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks_support import settle
from thorough import thorough_after
from torch import nn

from course_utils import ROOT, launch
from course_utils.measure.data import load_data
from course_utils.ranks import Ranks

WORKER = "course_utils/workers/train_sgd.py"
ROUNDING = 1e-5  # of a loss in float32, after some hundred steps


class Run(NamedTuple):
    """What the worker did on one rank."""

    out: str  # what it has printed
    end: str  # what it has exited with, and what argparse says
    waits: bool  # for rank 0 to speak first
    all_reduces: int  # that it called


def run_worker(script: str, arguments: list[str], before: str) -> Run:
    """Run the script on this rank, as `python script arguments` would."""
    calls = []

    def replaced(module, name, function):
        stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, function)

    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.update, dict(os.environ))
        all_reduce = dist.all_reduce
        replaced(dist, "all_reduce", lambda t: (calls.append("all"), all_reduce(t)))
        replaced(time, "sleep", calls.append)
        replaced(sys, "argv", [script, *arguments])
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        err.fileno = sys.__stderr__.fileno  # a file for `record`, or it warns once
        exec(before, {})
        end = ""
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            end = f"{error.code}{err.getvalue()}"
        return Run(out.getvalue(), end, 30 in calls, calls.count("all"))


@pytest.fixture(scope="module")
def on():
    """A function: run the worker on n ranks; what it did on each."""

    def start(n: int) -> Ranks:
        return Ranks(n, init=False, output="grouped", quiet=True, timeout=60)

    started = {1: start(1)}
    settle(started[1])  # or each rank would import for a second at its first optimizer
    started[1].restart()

    def run(n: int, *arguments: object, script=WORKER, before="") -> list[Run]:
        if n not in started:
            started[n] = start(n)
        words = [str(word) for word in arguments]
        return started[n].run(run_worker, str(ROOT / script), words, before)

    yield run
    for ranks in started.values():
        ranks.close()


def curve(results: list[Run], name: str = "loss") -> list[float]:
    """What rank 0 says about each epoch. The others must be silent."""
    assert [run.end for run in results] == [""] * len(results)
    assert all(run.out == "" for run in results[1:])
    return [json.loads(line)[name] for line in results[0].out.splitlines()]


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], list[float], list[float]]:
    """Losses, train and test accuracies without anything distributed: 3 epochs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    images, labels, test_images, test_labels = load_data()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, train_accuracies, test_accuracies = [], [], []
    for epoch in range(1, 4):
        loss_sum = correct = 0
        generator = torch.Generator().manual_seed(epoch)
        for rows in torch.randperm(len(images), generator=generator).split(64):
            logits = model(images[rows])
            loss = nn.functional.cross_entropy(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(rows)
            correct += (logits.argmax(1) == labels[rows]).sum().item()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).sum().item()
        losses.append(loss_sum / len(images))
        train_accuracies.append(correct / len(images))
        test_accuracies.append(right / len(test_labels))
    torch.set_num_threads(threads)
    return losses, train_accuracies, test_accuracies


def the_same(losses: list[float], others: list[float]) -> bool:
    return losses == pytest.approx(others, abs=ROUNDING)


# -------------------------------------------------------------- one curve, any ranks
@pytest.mark.parametrize("n", thorough_after(2, [1, 2, 3, 4]))
def test_the_curve_is_that_of_one_process_with_the_whole_batch(on, n, reference):
    """Also for 3 ranks, which share 64 images as 22, 21 and 21."""
    results = on(n, "--epochs", 3)
    losses, train_accuracies, test_accuracies = reference
    assert the_same(curve(results), losses)
    few = 0.003  # one test image: rounding may turn one that is on the border
    assert curve(results, "train_accuracy") == pytest.approx(train_accuracies, abs=few)
    assert curve(results, "test_accuracy") == pytest.approx(test_accuracies, abs=few)
    assert losses[-1] < 0.15  # it has learned something: the comparison means much
    assert curve(results, "world_size") == [n] * 3


@pytest.mark.thorough
def test_two_ranks_launched_from_a_notebook(reference):
    result = launch("train_sgd", nproc=2, quiet=True)
    assert [metrics["epoch"] for metrics in result.metrics] == [*range(1, 9)]
    assert the_same([metrics["loss"] for metrics in result.metrics[:3]], reference[0])
    last = result.metrics[-1]
    assert last["test_accuracy"] >= 0.97
    assert list(last) == [
        *("epoch", "loss", "train_accuracy", "test_accuracy", "lr"),
        *("seconds", "images_per_second", "world_size", "backend"),
    ]
    assert (last["world_size"], last["backend"], last["lr"]) == (2, "gloo", 0.05)
    assert last["seconds"] > 0
    assert last["images_per_second"] > 0
    assert result.output.count("[rank 0] {") == 8
    assert "[rank 1]" not in result.output


def test_one_rank_without_torchrun_gives_the_same_curve(on, reference):
    alone = "import os; del os.environ['RANK'], os.environ['WORLD_SIZE']"
    results = on(1, "--epochs", 2, before=alone)
    assert the_same(curve(results), reference[0][:2])


def test_it_is_what_ddp_does(on):
    """1,440 images are 24 batches of 60: train_ddp.py leaves none of them out."""
    options = ("--batch-size", 60, "--epochs", 2)
    ddp = on(2, *options, script="course_utils/workers/train_ddp.py")
    assert the_same(curve(on(2, *options)), curve(ddp))


def test_one_message_a_parameter_gives_the_same_numbers(on, reference):
    naive, flat = on(2, "--epochs", 1, "--naive"), on(2, "--epochs", 1)
    assert the_same(curve(naive), reference[0][:1])
    assert the_same(curve(flat), reference[0][:1])
    # 23 batches: the rows and the gradients. Then the results of training and test.
    assert [run.all_reduces for run in naive] == [23 * (1 + 6) + 2] * 2
    assert [run.all_reduces for run in flat] == [23 * (1 + 1) + 2] * 2


def test_the_sum_is_a_larger_learning_rate(on, reference):
    summed = curve(on(2, "--epochs", 2, "--sum"))
    assert not the_same(summed, reference[0][:2])
    assert the_same(summed, curve(on(2, "--epochs", 2, "--lr", 0.1)))
    assert the_same(curve(on(1, "--epochs", 2, "--sum")), reference[0][:2])


def test_a_seed_is_a_start_and_an_order(on, reference):
    first, again, other = (on(2, "--epochs", 1, "--seed", s) for s in (0, 0, 1))
    assert curve(first) == curve(again)
    assert not the_same(curve(other), reference[0][:1])


def test_the_rate_is_scaled_and_warmed_up(on):
    """1,440 images are 12 batches of 120, the warm-up 18 of them."""
    options = ("--batch-size", 120, "--lr", 0.01, "--epochs", 3)
    assert curve(on(1, *options), "lr") == [0.01] * 3
    scaled = curve(on(1, *options, "--scale-lr"), "lr")
    assert scaled == pytest.approx([0.01 * 120 / 64] * 3)
    rates = curve(on(1, *options, "--scale-lr", 30, "--warmup", 1.5), "lr")
    assert rates == pytest.approx([0.01 + 0.03 * 11 / 18, 0.04, 0.04])


def test_a_scaled_rate_changes_the_training(on):
    options = ("--batch-size", 120, "--epochs", 1)
    losses = [
        curve(on(2, *options, *more))[0]
        for more in ((), ("--scale-lr",), ("--scale-lr", 64, "--warmup", 1))
    ]
    assert losses[1] < losses[2] < losses[0] - 0.01  # the digits need no warm-up


# ------------------------------------------------------------------------- mistakes
def mistake(results: list[Run]) -> str:
    """What rank 0 says about a mistake, at once. The others let it speak first."""
    assert [run.waits for run in results] == [False] + [True] * (len(results) - 1)
    assert all(run.out == "" for run in results)
    return results[0].end


def test_settings_that_make_no_sense_are_refused(on):
    assert mistake(on(4, "--batch-size", 3)) == (
        "train_sgd: --batch-size 3 is too small for 4 ranks. "
        "Each works on one image or more: use 4 or more."
    )
    assert mistake(on(2, "--batch-size", 1441)) == (
        "train_sgd: --batch-size 1441: there are only 1440 images"
    )
    assert mistake(on(1, "--epochs", 0)) == "train_sgd: --epochs 0: it is 1 or more"
    assert mistake(on(1, "--scale-lr", 0)) == (
        "train_sgd: --scale-lr 0: a batch has one image or more"
    )
    assert mistake(on(1, "--scale-lr", "--warmup", -1)) == (
        "train_sgd: --warmup -1: the number of epochs is 0 or more"
    )
    assert mistake(on(1, "--warmup", 2)) == (
        "train_sgd: --warmup goes from --lr up to the scaled rate: add --scale-lr"
    )


def test_wrong_options_show_those_there_are(on):
    for words, message in (
        (("--bach-size", 3), "unrecognized arguments: --bach-size 3"),
        (("--epoch", 3), "unrecognized arguments: --epoch 3"),
    ):
        (run,) = on(1, *words)
        # The first run of a worker may warn before that.
        assert run.end.startswith("2") and "usage: " in run.end
        assert message in run.end


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_gpus_says_what_to_do(on):
    assert mistake(on(2, "--backend", "nccl")) == (
        "train_sgd: nccl needs a GPU for each rank: this machine has 0, for 2 ranks. "
        "Use --backend gloo."
    )


def test_data_that_cannot_be_had_is_a_short_error(on, tmp_path):
    no_network = f"""
from pathlib import Path
from torchvision import datasets
from course_utils.measure import data
data.STATE = Path({str(tmp_path)!r})
datasets.MNIST.mirrors = ["http://127.0.0.1:9/"]
"""
    text = mistake(on(1, "--data", "mnist", before=no_network))
    assert text.startswith("train_sgd: mnist could not be downloaded. Tried:\n")
