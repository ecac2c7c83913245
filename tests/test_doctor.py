"""What the doctor says of a machine, and of a room.

The machine that runs the tests is looked at for real, and its faults are caused: no
loopback, a full disk, software that is not there.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from course_utils import ROOT
from course_utils.measure.machine import Gpu, Link, Machine
from course_utils.setup import doctor

MACHINE = Machine(
    system="Linux",
    release="Debian GNU/Linux 12 (bookworm)",
    cpu="A CPU",
    cores=4,
    all_cores=8,
    physical_cores=4,
    memory=16 * 10**9,
    free_memory=8 * 10**9,
)
TORCH = {"torch": "2.14.1", "gloo": True, "nccl": True, "cuda": "13.0", "gpus": 0}


def run_doctor(*arguments: str, prefix: tuple = (), **env: str):
    return subprocess.run(
        [*prefix, sys.executable, "-m", "course_utils", "doctor", *arguments],
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "88", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def said(findings) -> str:
    return " ".join(" ".join(map(str, finding)) for finding in findings)


def test_the_report_on_this_machine() -> None:
    done = run_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    marked = r"^ +(?:ok|note)  (\w+) +"
    topics = re.findall(marked, done.stdout, re.MULTILINE)
    expected = ["Python", "packages", "processor", "memory", "disk", "GPUs", "ranks"]
    assert [topic for topic in topics if topic != "shared"] == [*expected, "loopback"]
    assert "load together" in done.stdout
    assert done.stdout.endswith("Nothing keeps the course from running.\n")
    assert all(len(line) <= 88 for line in done.stdout.splitlines())


def test_a_laptop_that_is_ready_does_what_lessons_do() -> None:
    done = run_doctor("--room")
    assert done.returncode == 0, done.stdout + done.stderr
    works = re.findall(r"^      ok  (.+?) +works$", done.stdout, re.MULTILINE)
    assert works == ["lesson data", "virtual GPUs", "ranks", "a stuck rank", "pictures"]
    last = done.stdout.splitlines()[-1]
    assert re.match(r"room: ready \| .+ \| \d+ cores \| \d+ GB \(.+ free\) \|", last)


def test_what_does_not_work_is_named() -> None:
    done = run_doctor("--room", RANKS_START_METHOD="by magic")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("room: NOT ready | ranks: "), last
    assert "by magic" in last and " -> close other programs" in last


def test_the_line_for_the_chat_has_no_names() -> None:
    node, person = platform.node(), Path.home().name
    found = doctor.Finding("disk", f"{ROOT}/x on {node} of {person}", fix="do it")
    line = doctor._brief(MACHINE, [found], ROOT)
    assert line == "NOT ready | disk: ./x on (name) of (name) -> do it"


def test_no_loopback() -> None:
    own = ["unshare", "-n" if os.geteuid() == 0 else "-rn"]
    if not shutil.which("unshare") or subprocess.run([*own, "true"]).returncode:
        pytest.skip("this system does not let us have a network of our own")
    done = run_doctor(prefix=tuple(own))
    assert done.returncode == 1
    assert re.search(r"PROBLEM  loopback +127\.0\.0\.1 does not carry", done.stdout)
    assert "sudo ip link set lo up" in done.stdout
    assert done.stdout.endswith("Put right first: loopback.\n")


@pytest.mark.parametrize(
    ("gpus", "torch", "words"),
    [
        (0, {}, "Virtual: cuda:0, cuda:1"),
        (1, {"gpus": 1}, "Real: cuda:0. Several ranks use gloo"),
        (8, {"gpus": 8}, "Real: up to 8 ranks have a GPU each and talk through nccl"),
        (8, {"gpus": 8, "nccl": False}, "through gloo, as this torch has no nccl"),
        (2, {"cuda": ""}, "the CPU build: python3 -m course_utils start --torch cuda"),
        (2, {"gpus": 1}, "torch can use 1 of them: look at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_real_and_what_virtual(gpus: int, torch: dict, words: str) -> None:
    cards = tuple(Gpu(i, "NVIDIA H100 80GB HBM3", 81559 * 2**20) for i in range(gpus))
    links = (Link(0, 1, "NV18"),) if gpus > 1 else ()
    machine = replace(MACHINE, gpus=cards, links=links, driver="580.65.06")
    text = said(doctor._gpus(machine, {**TORCH, **torch}))
    assert words in text
    assert ("NVLink (18 links)" in text) == (gpus > 1)


def test_a_driver_that_fails_is_told_with_its_own_words() -> None:
    machine = replace(MACHINE, gpu_problem="nvidia-smi says: no driver")
    text = said(doctor._gpus(machine, TORCH))
    assert "nvidia-smi says: no driver" in text and "reinstall" in text


@pytest.mark.parametrize(
    ("free", "problem", "words"),
    [
        (8.0, False, ""),
        (3.8, False, "lesson 08 takes up to 3.9 GB, with JupyterLab and a browser"),
        (3.4, False, "lessons 06 and 08 take up to 3.9 GB"),
        (0.3, True, "and 08 take"),
    ],
)
def test_memory(free: float, problem: bool, words: str) -> None:
    machine = replace(MACHINE, free_memory=int(free * 1e9))
    findings = list(doctor._cores_and_memory(machine))
    assert words in said(findings)
    assert any(finding.problem for finding in findings) == problem
    assert "4 cores for this process, of 8" in said(findings)


def test_a_disk_that_is_full(monkeypatch) -> None:
    usage = type("Usage", (), {"free": 10**7})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor.environment, "probe_torch", lambda *_: TORCH)
    found = {finding.topic: finding for finding in doctor.examine(MACHINE, ROOT)}
    assert found["disk"].problem and "free some space" in found["disk"].fix
    if sys.platform == "linux":
        assert "--shm-size" in found["shared memory"].fix
