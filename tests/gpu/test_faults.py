"""A rank on a GPU that dies or hangs: it is named, and its memory is free again."""

import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from course_utils.ranks import Ranks, RanksError
from course_utils.ranks.launch import LaunchError, launch

HELD = 512 * 2**20  # bytes that each rank takes
SLACK = 64 * 2**20  # the driver's own, which comes and goes
GONE_SECONDS = 20.0
FILL = f"x = torch.zeros({HELD // 4}, device={{!r}}); dist.all_reduce(x)\n"

# What happens on the rank -> the cause that the error names.
FAULTS = {
    "is killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "died"),
    "exits": ("import os; os._exit(3)", "died"),
    "spins": ("while True: pass", "timeout"),
    "waits for ever": ("import threading; threading.Event().wait()", "timeout"),
    "waits for its GPU": (
        "[torch.cuda._sleep(2**31 - 1) for _ in range(100)]\ntorch.cuda.synchronize()",
        "timeout",
    ),
}


def processes_on_gpus() -> set[int]:
    """Their ids, as nvidia-smi knows them; in a container often none."""
    done = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return {int(line) for line in done.stdout.split() if line.isdigit()}


@pytest.fixture
def nothing_left(place) -> Iterator[None]:
    """After the test no process of ours holds memory of the GPU."""
    if place[1] != "cuda":
        yield
        return
    torch.zeros(1, device="cuda")  # our own context is there before and after
    before, others = torch.cuda.mem_get_info()[0], processes_on_gpus()
    yield
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        taken = before - torch.cuda.mem_get_info()[0]
        new = processes_on_gpus() - others - {psutil.Process().pid}
        if (taken <= SLACK and not new) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert not new
    assert taken <= SLACK


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_is_named_and_frees_its_gpu(place, nothing_left, fault):
    backend, device = place
    body, cause = FAULTS[fault]
    if "cuda" in body and device != "cuda":
        pytest.skip("it needs a GPU")
    with Ranks(1, backend=backend, quiet=True, timeout=60) as ranks:
        ranks.run_cell(FILL.format(device))
        with pytest.raises(RanksError) as caught:
            ranks.run_cell(body, timeout=3)
        assert caught.value.cause == cause
        assert "Rank 0 " in str(caught.value)
        ranks.run_cell(FILL.format(device) + "assert x.sum() == 0")
        with pytest.raises(RanksError, match="ZeroDivisionError"):
            ranks.run_cell("1 / 0")


def test_a_script_that_crashes_frees_its_gpu(place, nothing_left, tmp_path):
    backend, device = place
    script = tmp_path / "crash.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        f"dist.init_process_group({backend!r})\n"
        + FILL.format(device)
        + "raise ValueError('on purpose')\n"
    )
    with pytest.raises(LaunchError, match="on purpose"):
        launch(script, nproc=1, quiet=True)


def test_out_of_memory_on_a_rank_is_said_in_words(gpu):
    with Ranks(1, quiet=True, timeout=60) as ranks:
        with pytest.raises(RanksError, match="CUDA out of memory"):
            ranks.run_cell("torch.empty(2**44, device='cuda')")
        ranks.run_cell("assert torch.ones(2, device='cuda').sum() == 2")


def test_an_index_out_of_range_ends_that_rank_alone(gpu):
    with Ranks(1, quiet=True, timeout=60) as ranks:
        with pytest.raises(RanksError, match="device-side assert|CUDA error"):
            ranks.run_cell(
                "torch.zeros(3, device='cuda')[torch.tensor([7], device='cuda')]\n"
                "torch.cuda.synchronize()"
            )
    torch.zeros(3, device="cuda").sum().item()  # this process can go on
    with Ranks(1, quiet=True, timeout=60) as ranks:
        ranks.run_cell("assert torch.ones(2, device='cuda').sum() == 2")
