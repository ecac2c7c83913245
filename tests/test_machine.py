"""What the course sees of a machine.

The machine that runs the tests is looked at for real. The GPUs of other machines are
programs of the name nvidia-smi that print what the real one printed there.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from course_utils import ROOT
from course_utils.measure import machine
from course_utils.measure.machine import Gpu, GpuPair, inspect_machine

# 8 x H100 with NVSwitch; the heading is underlined, network cards are listed too.
TOPO_NVSWITCH = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    "\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-47\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\t48-95\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \t\t\t\t\n\n"
    "Legend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "NIC Legend:\n\n  NIC0: mlx5_0\n"
)
# Four cards in two pairs on two CPUs.
TOPO_PAIRS = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV4\tSYS\tSYS\t0-15\t0\n"
    "GPU1\tNV4\t X \tSYS\tSYS\t0-15\t0\n"
    "GPU2\tSYS\tSYS\t X \tPHB\t16-31\t1\n"
    "GPU3\tSYS\tSYS\tPHB\t X \t16-31\t1\n"
)
H100 = "{}, NVIDIA H100 80GB HBM3, 81559, 580.65.06\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch) -> Callable:
    """Put a program of that name first on the PATH."""

    def put(gpus: str = "", topo: str = "", *, before: str = "", code: int = 0) -> None:
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "topo").write_text(topo)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f"#!/bin/sh\n{before}\n"
            f'case "$1" in topo) cat {tmp_path}/topo;; *) cat {tmp_path}/gpus;; esac\n'
            f"exit {code}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


# This machine


def test_this_machine_is_seen_as_psutil_sees_it() -> None:
    here = inspect_machine()
    assert here.system in ("Linux", "macOS", "Windows")
    assert here.cpu and here.release
    assert here.all_cores == psutil.cpu_count()
    assert 1 <= here.cores <= here.all_cores
    if here.physical_cores is not None and psutil.cpu_count(logical=False):
        assert here.physical_cores == psutil.cpu_count(logical=False)
    assert 0 < here.memory <= psutil.virtual_memory().total
    assert 0 < here.free_memory <= here.memory
    with pytest.raises(dataclasses.FrozenInstanceError):
        here.cores = 1000


def test_looking_is_quick_and_sees_what_this_process_may_use() -> None:
    code = (
        "import os, sys, time\n"
        "from course_utils.measure.machine import inspect_machine\n"
        "if sys.platform == 'linux':\n"
        "    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "began = time.perf_counter()\n"
        "here = inspect_machine()\n"
        "print(time.perf_counter() - began, 'torch' in sys.modules)\n"
        "print(here.cores, here.all_cores)\n"
    )
    path = os.pathsep.join(  # no nvidia-smi, whose own time is another matter
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not (Path(folder) / "nvidia-smi").exists()
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    seconds, torch, *cores = result.stdout.split()
    assert float(seconds) < 0.5
    assert torch == "False"
    if sys.platform == "linux":
        assert cores == ["1", str(os.cpu_count())]


SECOND_VERSION = {
    "docker/abc/cpu.max": "max 100000",
    "docker/cpu.max": "250000 100000",
    "docker/abc/memory.max": "2000000000",
    "docker/abc/memory.current": "1500000000",
    "docker/abc/memory.stat": "anon 400000000\ninactive_file 1000000000",
    "docker/memory.max": "max",
    "docker/memory.current": "1600000000",
    "docker/memory.stat": "inactive_file 0",
}
FIRST_VERSION = {
    "cpu,cpuacct/job/cpu.cfs_quota_us": "150000",
    "cpu,cpuacct/job/cpu.cfs_period_us": "50000",
    "cpu,cpuacct/cpu.cfs_quota_us": "-1",
    "cpu,cpuacct/cpu.cfs_period_us": "100000",
    "memory/job/memory.limit_in_bytes": "1000",
    "memory/job/memory.usage_in_bytes": "700",
    "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 1",
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/memory.usage_in_bytes": "800",
    "memory/memory.stat": "total_inactive_file 100",
}


@pytest.mark.parametrize(
    ("group", "files", "cores", "memory"),
    [
        # A file that could be dropped from memory is no use of it.
        ("0::/docker/abc", SECOND_VERSION, 2.5, (2_000_000_000, 500_000_000)),
        (
            "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/x",
            FIRST_VERSION,
            3.0,
            (1000, 699),
        ),
        ("0::/", {}, None, None),
    ],
)
def test_limits_of_a_container(tmp_path: Path, group, files, cores, memory) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text(group + "\n")
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text + "\n")
    assert machine.cpu_quota(groups, mount) == cores
    assert machine.memory_limit(groups, mount) == memory


def test_without_a_container_there_is_no_limit(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path / "none", tmp_path) is None
    assert machine.memory_limit(tmp_path / "none", tmp_path) is None


# GPUs


def test_gpus_and_their_links_are_read(nvidia_smi) -> None:
    nvidia_smi("".join(map(H100.format, range(4))), TOPO_NVSWITCH)
    here = inspect_machine()
    assert here.gpus[0] == Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * 2**20)
    assert [gpu.index for gpu in here.gpus] == [0, 1, 2, 3]
    assert here.driver == "580.65.06"
    assert here.gpu_problem == ""
    pairs = [(link.first, link.second) for link in here.links]
    assert pairs == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert {link.nvlinks for link in here.links} == {18}
    assert here.links[0].description == "NVLink (18 links)"


def test_links_of_two_pairs() -> None:
    links = {(x.first, x.second): x for x in machine.parse_links(TOPO_PAIRS)}
    assert len(links) == 6
    assert links[0, 1] == GpuPair(0, 1, "NV4")
    assert links[2, 3].description == "PCIe, through the CPU"
    assert links[1, 2].description == "PCIe, and from one CPU to another"
    assert links[1, 2].nvlinks == 0
    assert machine.parse_links("") == ()
    assert machine.parse_links("nonsense\n\n\tGPU0\nGPU0\t X\n") == ()


def test_memory_that_the_driver_does_not_tell() -> None:
    gpus, driver = machine.parse_gpus("0, NVIDIA GB10, [N/A], 580.1\n")
    assert gpus == (Gpu(0, "NVIDIA GB10", 0),)
    assert driver == "580.1"


def test_a_driver_that_fails_is_told_with_its_own_words(nvidia_smi) -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the driver."
    nvidia_smi(words, code=9)
    here = inspect_machine()
    assert here.gpus == ()
    assert here.gpu_problem == f"nvidia-smi says: {words}"


def test_a_driver_that_hangs_is_not_waited_for(
    nvidia_smi, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(machine, "NVIDIA_SMI_SECONDS", 0.3)
    nvidia_smi(before=f"echo $$ >> {tmp_path}/pids; exec sleep 60")
    began = time.monotonic()
    here = inspect_machine()
    assert time.monotonic() - began < 2
    assert "did not answer within" in here.gpu_problem
    pids = (tmp_path / "pids").read_text().split()
    assert pids and not any(psutil.pid_exists(int(pid)) for pid in pids)
