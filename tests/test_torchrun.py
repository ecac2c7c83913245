"""The course's scripts under the real ``torchrun``, as in a terminal."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranks_support import helper  # noqa: F401 - a fixture

from course_utils import ROOT, launch
from course_utils.ranks.launch import workers

WORKERS = ROOT / "course_utils" / "workers"
# What torchrun starts here: each rank runs all scripts, one after the other, in a fork
# of itself. So torch is imported once. A group finds those of before in the agent's
# store, if nobody removes them.
ALL_SCRIPTS = """
import json, os, pathlib, runpy, sys
import torch, torch._dynamo
from torch.distributed import TCPStore

rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*address, is_master=False)
agents = set(store.list_keys())
for number, words in enumerate(json.loads(sys.argv[2])):
    if rank == "0":
        if number > 0:
            store.wait([f"done {number - 1}"])
        for key in set(store.list_keys()) - agents:
            store.delete_key(key)
        store.set(f"go {number}", "")
    store.wait([f"go {number}"])
    if os.fork() == 0:
        for stream in (1, 2):
            file = open(folder / f"{number} {rank} {stream}", "w")
            os.dup2(file.fileno(), stream)
        sys.argv[:], sys.path[0] = words, os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
        break  # and end as Python does
    _, status = os.wait()
    (folder / f"{number} {rank} end").write_text(str(status))
    if rank == "1":
        store.set(f"done {number}", "")
"""
FSDP = {"every": 2, "batch_size": 8, "width": 16, "layers": 1, "heads": 2}
RUNS = {  # the second time, a script goes on from the checkpoint of the first
    "train_sgd": [{"epochs": 1}],
    "train_ddp": [{"epochs": 1}, {"epochs": 2}],
    "train_fsdp": [{**FSDP, "steps": 2}, {**FSDP, "steps": 4}],
    "train_tp": [{**FSDP, "dp": 2, "steps": 2}, {**FSDP, "dp": 2, "steps": 4}],
    "train_pipeline": [{"steps": 2, "every": 1}],
    "collectives": [{}],
    "bench_all_reduce": [{"minbytes": 64, "maxbytes": 256}],
    "spawn_hello": [],  # starts its processes itself
}


def words_of(options: dict[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def torchrun(script: Path, *words: object, options: tuple = (), **variables) -> str:
    """What a script has printed on 2 ranks, which must all end well."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run(
        [*command, *map(str, options or ("--nproc-per-node", 2)), script, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all scripts have run under torchrun, and what each rank has printed."""
    folder = tmp_path_factory.mktemp("torchrun")
    commands = []
    for name, runs in RUNS.items():
        for number, options in enumerate(runs):
            words = [str(WORKERS / f"{name}.py"), *words_of(options)]
            if len(runs) > 1:
                words += [f"--checkpoint={folder / name}", *["--resume"][:number]]
            commands.append(words)
    (folder / "all_scripts.py").write_text(ALL_SCRIPTS)
    torchrun(
        folder / "all_scripts.py", folder, json.dumps(commands), TMPDIR=str(folder)
    )
    return folder


def losses(output: str) -> list[float]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line["loss"] for line in lines]


def test_there_is_a_run_of_every_script():
    assert sorted(RUNS) == workers()


@pytest.mark.parametrize("name", [name for name, runs in RUNS.items() if runs])
def test_a_script_prints_what_it_prints_when_launched(folder, helper, name):  # noqa: F811
    before = sum(len(runs) for runs in list(RUNS.values())[: list(RUNS).index(name)])
    printed = ""
    for number in range(before, before + len(RUNS[name])):
        for rank in (0, 1):
            ended = (folder / f"{number} {rank} end").read_text()
            assert ended == "0", (folder / f"{number} {rank} 2").read_text()
            printed += (folder / f"{number} {rank} 1").read_text()
    launched = launch(name, *words_of(RUNS[name][-1]), quiet=True)
    assert printed
    if name.startswith("train"):
        expected = [line["loss"] for line in launched.metrics]
        assert losses(printed) == pytest.approx(expected, abs=1e-5)
    elif name == "collectives":
        assert printed == launched.output.replace("[rank 0] ", "")
    else:
        assert len(printed.splitlines()) == len(launched.output.splitlines())


def test_two_nodes_find_each_other(tmp_path, helper):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    meet = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", address)

    def node(_: int) -> str:  # gloo would look up the machine's own name
        variables = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)}
        return torchrun(WORKERS / "collectives.py", options=meet, **variables)

    with ThreadPoolExecutor(2) as nodes:
        printed = "".join(nodes.map(node, range(2)))
    launched = launch("collectives", quiet=True)
    assert printed == launched.output.replace("[rank 0] ", "")
