"""The course's scripts under the real ``torchrun``, as in a terminal."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from course_utils import ROOT, launch
from course_utils.ranks.launch import workers

WORKERS = ROOT / "course_utils" / "workers"


@pytest.fixture
def torchrun(tmp_path):
    """Run a script on 2 ranks; what it has printed."""

    def run(script, *words, fails=False, **variables) -> str:
        command = [sys.executable, "-m", "torch.distributed.run"]
        done = subprocess.run(
            [*command, "--nproc-per-node", "2", script, *map(str, words)],
            cwd=ROOT,
            env=os.environ
            | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            | variables,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


def losses(output: str) -> list[float]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line["loss"] for line in lines]


DDP = {"epochs": 1, "batch_size": 64}
FSDP = {"steps": 4, "every": 2, "batch_size": 8, "width": 16, "layers": 1, "heads": 2}
RUNS = {
    "train_sgd": {"epochs": 1},
    "train_ddp": {**DDP, "checkpoint": "run"},
    "train_fsdp": {**FSDP, "checkpoint": "run"},
    "train_tp": {**FSDP, "dp": 2, "checkpoint": "run"},
    "train_pipeline": {"steps": 2, "every": 1},
    "collectives": {},
    "bench_all_reduce": {"-b": 64, "-e": 256},
    "spawn_hello": None,  # starts its processes itself
}


def test_there_is_a_run_of_every_script():
    assert sorted(RUNS) == workers()


@pytest.mark.parametrize(
    "name", [name for name, how in RUNS.items() if how is not None]
)
def test_a_script_prints_what_it_prints_when_launched(torchrun, tmp_path, name):
    words = []
    for option, value in RUNS[name].items():
        option = option if option.startswith("-") else "--" + option.replace("_", "-")
        words += [option, tmp_path / value if value == "run" else value]
    printed = torchrun(WORKERS / f"{name}.py", *words)
    assert printed
    if "checkpoint" in RUNS[name]:
        folder = tmp_path / "launched"
        words = [folder if word == tmp_path / "run" else word for word in words]
    launched = launch(name, *words, quiet=True)
    if name.startswith("train"):
        assert losses(printed) == [line["loss"] for line in launched.metrics]
    elif name == "collectives":
        text = launched.output.replace("[rank 0] ", "")
        assert printed.splitlines() == text.splitlines()
    else:
        assert len(printed.splitlines()) == len(launched.output.splitlines())


@pytest.mark.parametrize(
    ("name", "more", "options"),
    [
        ("train_ddp", {"epochs": 2}, DDP),
        ("train_fsdp", {"steps": 8}, FSDP),
    ],
)
def test_what_was_launched_goes_on_under_torchrun(
    torchrun, tmp_path, name, more, options
):
    whole = launch(name, quiet=True, **(options | more))
    launch(name, quiet=True, checkpoint=tmp_path / "run", **options)
    words = [f"--{k.replace('_', '-')}={v}" for k, v in (options | more).items()]
    resumed = losses(
        torchrun(
            WORKERS / f"{name}.py", *words, f"--checkpoint={tmp_path}/run", "--resume"
        )
    )
    expected = [line["loss"] for line in whole.metrics]
    assert resumed == pytest.approx(expected[-len(resumed) :], abs=1e-5)
    assert len(resumed) == len(expected) // 2


def test_two_nodes_find_each_other_and_train_like_one(torchrun):
    words = [f"--{k.replace('_', '-')}={v}" for k, v in (FSDP | {"dp": 2}).items()]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    meet = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", address]
    script = [*meet, WORKERS / "train_tp.py", *words]

    def node(_: int) -> str:  # gloo would look up the machine's own name
        return torchrun(*script, GLOO_SOCKET_IFNAME="lo")

    with ThreadPoolExecutor(2) as nodes:
        printed = "".join(nodes.map(node, range(2)))
    launched = launch("train_tp", *words, nproc=4, quiet=True)
    expected = [line["loss"] for line in launched.metrics]
    assert losses(printed) == pytest.approx(expected, abs=1e-5)


def test_detail_compares_the_calls(torchrun, tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, torch.distributed as dist\n"
        'dist.init_process_group("gloo")\n'
        "dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(1))\n"
    )
    said = torchrun(
        tmp_path / "script.py", fails=True, TORCH_DISTRIBUTED_DEBUG="DETAIL"
    )
    assert "Detected mismatch between collectives" in said
