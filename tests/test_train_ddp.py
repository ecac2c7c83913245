"""``train_ddp.py``: the same curve on 1, 2, 3 and 4 ranks, and checkpoints that hold.

Most runs here are forks of one process that has imported torch already: each rank
gets the environment that torchrun would give it, and starts at once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from worker_forks import Run, forks_of

from course_utils import ROOT, launch
from course_utils.measure.data import load_data

WORKER = "course_utils/workers/train_ddp.py"
pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="these tests fork ranks"
)


@pytest.fixture(scope="module")
def forks():
    with forks_of(WORKER) as forks:
        yield forks


@pytest.fixture(scope="module")
def two_ranks(forks) -> Run:
    """8 epochs on 2 ranks, unbroken."""
    return forks(2)


@pytest.fixture(scope="module")
def three_ranks(forks) -> Run:
    """4 epochs on 3 ranks, unbroken, with a batch that leaves some images over."""
    return forks(3, "--batch-size", 63, "--epochs", 4)


@pytest.fixture
def one_thread():
    """As the ranks have: more threads add up in another order, and slowly."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_in_one_process(batch_size: int, epochs: int) -> tuple[list, list, list]:
    """The same training without anything distributed: the reference."""
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
    for epoch in range(1, epochs + 1):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(images), generator=generator)
        loss_sum = correct = count = 0
        for batch in order.split(batch_size):
            if len(batch) < batch_size:
                continue
            logits = model(images[batch])
            loss = nn.functional.cross_entropy(logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(batch)
            correct += (logits.argmax(1) == labels[batch]).sum().item()
            count += len(batch)
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).sum().item()
        losses.append(loss_sum / count)
        train_accuracies.append(correct / count)
        test_accuracies.append(right / len(test_labels))
    return losses, train_accuracies, test_accuracies


# -------------------------------------------------------------- one curve, any ranks
FEW = 0.006  # two test images: rounding may turn one that is on the border


def test_the_curve_is_that_of_one_process_with_the_whole_batch(two_ranks, one_thread):
    assert two_ranks.codes == [0, 0]
    losses, train_accuracies, test_accuracies = train_in_one_process(64, 8)
    assert two_ranks.curve() == pytest.approx(losses, abs=1e-4)
    approx = pytest.approx
    assert two_ranks.curve("train_accuracy") == approx(train_accuracies, abs=FEW)
    assert two_ranks.curve("test_accuracy") == approx(test_accuracies, abs=FEW)
    assert min(losses) < 0.02  # it has learned something: the comparison means much


@pytest.mark.thorough
def test_three_ranks_leave_the_same_images_out(three_ranks, one_thread):
    losses, _, _ = train_in_one_process(63, 4)
    assert three_ranks.curve() == pytest.approx(losses, abs=1e-4)


def test_no_image_is_repeated_to_fill_a_batch(forks, one_thread):
    """1,440 images are 7 x 206 less 2, and 2 x 721 less 2: padding makes one batch."""
    run = forks(7, "--batch-size", 721, "--epochs", 2)
    losses, _, _ = train_in_one_process(721, 2)
    assert run.curve() == pytest.approx(losses, abs=1e-4)


@pytest.mark.thorough
def test_one_rank_without_torchrun_gives_the_same_curve(two_ranks):
    code = f"""
import os, pathlib, runpy, sys
sys.argv[:] = [{WORKER!r}, "--epochs", "4"]
runpy.run_path({WORKER!r}, run_name="__main__")
threads = pathlib.Path("/proc/self/task").glob("*/comm")
print([name for name in map(pathlib.Path.read_text, threads) if "gloo" in name])
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
    *lines, threads = done.stdout.splitlines()
    alone = [json.loads(line) for line in lines]
    losses = [metrics["loss"] for metrics in alone]
    assert losses == pytest.approx(two_ranks.curve()[:4], abs=1e-4)
    assert alone[0]["world_size"] == 1
    # gloo's threads crash a Python that ends before them, about once in five runs.
    assert threads == "[]"


@pytest.mark.thorough
def test_four_ranks_launched_from_a_notebook_reach_97_percent(two_ranks):
    result = launch("train_ddp", nproc=4, quiet=True)
    losses = [metrics["loss"] for metrics in result.metrics]
    assert losses == pytest.approx(two_ranks.curve(), abs=1e-4)
    last = result.metrics[-1]
    assert last["test_accuracy"] >= 0.97
    expected = two_ranks.metrics[-1]["test_accuracy"]
    assert last["test_accuracy"] == pytest.approx(expected, abs=FEW)
    assert (last["epoch"], last["world_size"], last["backend"]) == (8, 4, "gloo")
    assert last["seconds"] > 0
    assert last["images_per_second"] > 0


def test_the_same_command_gives_the_same_numbers_and_another_seed_others(
    forks, two_ranks
):
    again, other = forks(2, "--epochs", 1), forks(2, "--epochs", 1, "--seed", 1)
    assert again.curve() == two_ranks.curve()[:1]
    assert other.curve() != again.curve()


def test_only_rank_0_prints(two_ranks):
    assert two_ranks.out[1] == ""
    assert two_ranks.err == ["", ""]
    assert len(two_ranks.metrics) == 8
    assert set(two_ranks.metrics[0]) == {
        *("epoch", "loss", "train_accuracy", "test_accuracy"),
        *("seconds", "images_per_second", "world_size", "backend"),
    }


# ----------------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def checkpoint(forks, three_ranks, tmp_path_factory) -> Path:
    """What 3 ranks have saved after 2 of 4 epochs."""
    path = tmp_path_factory.mktemp("checkpoints") / "new" / "ddp.pt"
    settings = ("--batch-size", 63, "--epochs", 2, "--checkpoint", path, "--resume")
    first = forks(3, *settings)  # --resume without a file: from the start
    assert first.codes == [0, 0, 0]
    said = f"--resume: there is no {path} yet, so it begins anew\n"
    assert first.err == [said, "", ""]
    assert first.curve() == three_ranks.curve()[:2]
    assert list(path.parent.iterdir()) == [path]
    return path


def copy(checkpoint: Path, folder: Path) -> Path:
    path = folder / "ddp.pt"
    path.write_bytes(checkpoint.read_bytes())
    return path


def test_a_resumed_run_has_the_numbers_of_an_unbroken_one(
    forks, three_ranks, checkpoint, tmp_path
):
    path = copy(checkpoint, tmp_path)
    settings = ("--batch-size", 63, "--epochs", 4, "--checkpoint", path, "--resume")
    second = forks(3, *settings)
    assert [metrics["epoch"] for metrics in second.metrics] == [3, 4]
    assert second.err == [""] * 3
    assert second.curve() == three_ranks.curve()[2:]  # to the last bit
    assert second.curve("test_accuracy") == three_ranks.curve("test_accuracy")[2:]
    third = forks(3, *settings)
    assert (third.codes, third.out) == ([0, 0, 0], [""] * 3)
    assert third.err == [f"nothing to do: {path} has 4 epochs (--epochs 4)\n", "", ""]


def test_a_run_can_go_on_with_another_number_of_ranks(
    forks, three_ranks, checkpoint, tmp_path
):
    path = copy(checkpoint, tmp_path)
    alone = forks(
        *(1, "--batch-size", 63, "--epochs", 4, "--checkpoint", path, "--resume")
    )
    assert alone.curve() == pytest.approx(three_ranks.curve()[2:], abs=1e-4)


def test_a_checkpoint_holds_the_plain_model(checkpoint):
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["epoch"] == 2
    assert set(saved) == {"epoch", "settings", "model", "optimizer"}
    assert not any(name.startswith("module.") for name in saved["model"])


@pytest.mark.parametrize("half", [True, False], ids=["half written", "not renamed"])
def test_a_kill_while_saving_leaves_the_checkpoint_before_it(
    forks, two_ranks, tmp_path, half
):
    """Rank 0 is killed in the second save: in the middle, or just before its end."""
    path = tmp_path / "ddp.pt"
    torn = """
import io, os, signal, torch
save, replace, saves = torch.save, os.replace, []

def torn_save(checkpoint, file):
    saves.append(1)
    whole = io.BytesIO()
    save(checkpoint, whole)
    content = whole.getvalue()
    if len(saves) == 2 and HALF:
        file.write(content[: len(content) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    file.write(content)

def torn_replace(*names):
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)

torch.save, os.replace = torn_save, torn_replace
""".replace("HALF", str(half))
    settings = ("--epochs", 3, "--checkpoint", path, "--resume")
    broken = forks(2, *settings, code=torn)
    assert broken.codes[0] == -9
    assert broken.codes[1] != 0
    assert torch.load(path, weights_only=True)["epoch"] == 1
    resumed = forks(2, *settings)
    assert resumed.codes == [0, 0]
    assert resumed.curve() == two_ranks.curve()[1:3]
    assert list(tmp_path.iterdir()) == [path]  # what was torn has been replaced


# ------------------------------------------------------------------------- mistakes
def mistake(run: Run) -> str:
    """What rank 0 says about a mistake: one line, and only rank 0 says it."""
    assert run.codes[0] == 1
    assert all(code != 0 for code in run.codes)
    assert run.err[1:] == [""] * (len(run.codes) - 1)
    assert "".join(run.out) == ""
    (line,) = run.err[0].splitlines()
    return line


def test_a_batch_that_cannot_be_shared_is_refused(forks):
    assert mistake(forks(2, "--batch-size", 63)) == (
        "train_ddp: --batch-size 63 cannot be shared equally by 2 ranks. "
        "Use a multiple of 2."
    )
    assert "--batch-size 0 cannot be shared" in mistake(forks(1, "--batch-size", 0))
    assert mistake(forks(1, "--batch-size", 1441)) == (
        "train_ddp: --batch-size 1441: there are only 1440 images"
    )


def test_a_run_without_epochs_is_refused(forks):
    assert mistake(forks(1, "--epochs", 0)) == "train_ddp: --epochs 0: it is 1 or more"


def test_an_existing_file_is_never_overwritten_unasked(forks, checkpoint, tmp_path):
    path = copy(checkpoint, tmp_path)
    before = path.read_bytes()
    assert mistake(forks(2, "--checkpoint", path)) == (
        f"train_ddp: {path} exists: add --resume to go on from it, or move it"
    )
    assert path.read_bytes() == before


def test_resuming_with_other_settings_is_refused(forks, checkpoint, tmp_path):
    path = copy(checkpoint, tmp_path)
    line = mistake(forks(2, "--checkpoint", path, "--resume", "--lr", 0.1))
    assert "'batch_size': 63, 'lr': 0.05" in line
    assert "but this run {" in line
    assert "'batch_size': 64, 'lr': 0.1" in line


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_file_that_is_no_checkpoint_is_named(forks, tmp_path, content):
    path = tmp_path / "ddp.pt"
    if content is None:
        torch.save({"epoch": 1}, path)  # another program's
    else:
        path.write_bytes(content)
    line = mistake(forks(2, "--checkpoint", path, "--resume"))
    assert line.startswith(f"train_ddp: {path} is not a checkpoint of this script (")


def test_resume_needs_a_file_name(forks):
    assert "--resume needs --checkpoint FILE" in mistake(forks(1, "--resume"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_gpus_says_what_to_do(forks):
    assert mistake(forks(2, "--backend", "nccl")) == (
        "train_ddp: nccl needs a GPU for each rank: this machine has 0, for 2 ranks. "
        "Use --backend gloo."
    )


def test_without_network_mnist_is_a_short_error(forks, tmp_path):
    no_network = f"""
from pathlib import Path
from torchvision import datasets
from course_utils.measure import data
data.STATE = Path({str(tmp_path)!r})
datasets.MNIST.mirrors = ["http://127.0.0.1:9/"]
"""
    run = forks(2, "--data", "mnist", code=no_network)
    assert run.codes[0] == 1
    assert "train_ddp: mnist could not be downloaded. Tried:\n" in run.err[0]
    assert "--data digits" in run.err[0]
    assert "Traceback" not in "".join(run.err)


def test_a_wrong_option_shows_those_there_are(forks):
    run = forks(1, "--bach-size", 3)
    assert run.codes == [2], run.err
    assert "unrecognized arguments: --bach-size 3" in run.err[0]
    half = forks(1, "--epoch", 3)  # argparse would take it for --epochs
    assert "unrecognized arguments: --epoch 3" in half.err[0]
