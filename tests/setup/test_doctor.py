"""What the doctor says of a machine, and of a room.

The machine that runs the tests is looked at for real, and its faults are caused: no
loopback, a full disk, software that is not there.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from course_utils import ROOT
from course_utils.measure.machine import Gpu, GpuPair, Machine
from course_utils.setup import doctor
from tests.setup.conftest import Clone

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


@pytest.fixture
def examined(monkeypatch):
    """What the doctor finds on a machine, by topic, if torch says this of itself."""

    def found(machine: Machine, torch: dict = TORCH) -> dict[str, doctor.Finding]:
        monkeypatch.setattr(doctor.environment, "probe_torch", lambda *_: torch)
        return {finding.topic: finding for finding in doctor.examine(machine, ROOT)}

    return found


def test_a_laptop_that_is_ready_does_what_lessons_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "course_utils", "doctor", "--room"],
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "88"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *report, last = done.stdout.splitlines()
    assert all(len(line) <= 88 for line in report)
    marked = r"^ +(?:ok|note)  (\w+) +"
    topics = re.findall(marked, done.stdout.partition("lesson data")[0], re.MULTILINE)
    expected = ["Python", "packages", "processor", "memory", "disk", "GPUs", "ranks"]
    assert [topic for topic in topics if topic != "shared"] == [*expected, "loopback"]
    assert "load together" in done.stdout
    works = re.findall(r"^      ok  (.+?) +works$", done.stdout, re.MULTILINE)
    assert works == ["lesson data", "virtual GPUs", "ranks", "a stuck rank", "pictures"]
    assert re.match(r"room: ready \| .+ \| \d+ cores \| \d+ GB \(.+ free\) \|", last)


def test_what_does_not_work_in_a_room_is_named(tmp_path, monkeypatch, capsys) -> None:
    """A kernel that finds another `course_utils`, which fails."""
    monkeypatch.setattr(doctor, "examine", lambda *_: [])
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # IPython finds no folder of its own
    (tmp_path / "course_utils.py").write_text("raise RuntimeError('by magic')")
    assert doctor.main(["--room"], tmp_path) == 1
    said = capsys.readouterr().out
    last = said.splitlines()[-1]
    assert last.startswith("room: NOT ready | lesson data -> "), last
    assert "close other programs" in last and str(tmp_path) not in last
    assert "by magic" in said
    assert doctor.main([], tmp_path) == 0
    assert capsys.readouterr().out == "\nNothing keeps the course from running.\n"


def test_no_packages_and_no_loopback(clone: Clone) -> None:
    own = ("unshare", "-n" if os.geteuid() == 0 else "-rn")
    if not shutil.which("unshare") or subprocess.run([*own, "true"]).returncode:
        pytest.skip("this system does not let us have a network of our own")
    done = clone.run("doctor", prefix=own)
    assert done.returncode == 1
    assert re.search(r"PROBLEM  packages +\.venv: not made yet", done.stdout)
    assert re.search(r"PROBLEM  loopback +127\.0\.0\.1 does not carry", done.stdout)
    assert "sudo ip link set lo up" in done.stdout
    assert done.stdout.endswith("Put right first: packages, loopback.\n")


@pytest.mark.parametrize(
    ("gpus", "torch", "words"),
    [
        (0, {}, "Virtual: cuda:0, cuda:1"),
        (1, {"gpus": 1}, "Real: cuda:0. Several ranks use gloo"),
        (8, {"gpus": 8}, "Real: up to 8 ranks have a GPU each, and use nccl"),
        (8, {"gpus": 8, "nccl": False}, "use gloo, as this torch has no nccl"),
        (2, {"cuda": ""}, "the CPU build: python3 -m course_utils start --torch cuda"),
        (2, {"gpus": 1}, "torch can use 1 of them: look at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_real_and_what_virtual(examined, gpus, torch, words) -> None:
    cards = tuple(Gpu(i, "NVIDIA H100 80GB HBM3", 81559 * 2**20) for i in range(gpus))
    links = (GpuPair(0, 1, "NV18"),) if gpus > 1 else ()
    machine = replace(MACHINE, gpus=cards, links=links, driver="580.65.06")
    found = examined(machine, {**TORCH, **torch})
    assert words in f"{found['GPUs'].meaning} {found['GPUs'].fix}"
    assert ("GPU links" in found) == (gpus > 1)
    if gpus > 1:
        assert found["GPU links"].fact == "NVLink (18 links)"


def test_a_driver_that_fails_is_told_with_its_own_words(examined) -> None:
    found = examined(replace(MACHINE, gpu_problem="nvidia-smi says: no driver"))
    assert found["GPUs"].fact == "nvidia-smi says: no driver"
    assert "reinstall" in found["GPUs"].fix


@pytest.mark.parametrize(
    ("free", "problem", "words"),
    [
        (8.0, False, ""),
        (3.2, False, "up to 3.3 GB for lesson 06"),
        (3.05, False, "up to 3.3 GB for lesson 06, lesson 08"),
        (0.3, True, "lesson 00, lesson 01,"),
    ],
)
def test_memory(examined, free: float, problem: bool, words: str) -> None:
    found = examined(replace(MACHINE, free_memory=int(free * 1e9)))
    assert words in found["memory"].fix and bool(words) == bool(found["memory"].fix)
    assert found["memory"].problem == problem
    assert "4 cores for this process, of 8" in found["processor"].fact


def test_a_disk_that_is_full(monkeypatch, examined) -> None:
    usage = type("Usage", (), {"free": 10**7})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = examined(MACHINE)
    assert found["disk"].problem and "free some space" in found["disk"].fix
    if sys.platform == "linux":
        assert "--shm-size" in found["shared memory"].fix
