"""What the doctor sees of a machine, and what it says about it.

The machine that runs the tests is looked at for real, and its faults are caused: fewer
cores, no loopback, a driver that hangs. The GPUs of other machines are programs of the
name nvidia-smi that print what the real one printed there.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from course_utils.notebook.lessons import LESSONS
from course_utils.setup import doctor, machine
from course_utils.setup.doctor import Finding
from course_utils.setup.environment import Torch
from course_utils.measure.machine import Gpu, Link, Machine, inspect_machine

ROOT = Path(__file__).resolve().parent.parent
LINUX = sys.platform == "linux"
only_linux = pytest.mark.skipif(not LINUX, reason="a facility of Linux")

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


def said(findings: list[Finding], topic: str) -> str:
    """All that the report says about a topic."""
    about = [f for f in findings if f.topic == topic]
    return " ".join(" ".join(filter(None, dataclasses.astuple(f)[1:5])) for f in about)


def a_machine(**facts: object) -> Machine:
    usual = {
        "system": "Linux",
        "release": "Debian GNU/Linux 12 (bookworm)",
        "cpu": "A CPU",
        "cores": 4,
        "all_cores": 8,
        "physical_cores": 4,
        "memory": 16 * 10**9,
        "free_memory": 8 * 10**9,
    }
    return Machine(**{**usual, **facts})


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


def test_looking_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys, time\n"
        "from course_utils.setup.doctor import inspect_machine\n"
        "began = time.perf_counter()\n"
        "inspect_machine()\n"
        "print(time.perf_counter() - began, 'torch' in sys.modules)\n"
    )
    run = [sys.executable, "-c", code]
    path = os.pathsep.join(  # no nvidia-smi, whose own time is another matter
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not (Path(folder) / "nvidia-smi").exists()
    )
    env = {**os.environ, "PATH": path}
    result = subprocess.run(
        run, check=True, cwd=ROOT, env=env, capture_output=True, text=True
    )
    seconds, torch = result.stdout.split()
    assert float(seconds) < 0.5
    assert torch == "False"


@only_linux
def test_cores_that_this_process_may_not_use_do_not_count() -> None:
    code = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from course_utils.setup.doctor import inspect_machine\n"
        "here = inspect_machine()\n"
        "print(here.cores, here.all_cores)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == ["1", str(os.cpu_count())]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


def test_limits_of_a_container_second_version(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/docker/abc\n")
    mount = tmp_path / "mount"
    write(
        mount,
        {
            "docker/abc/cpu.max": "max 100000",
            "docker/cpu.max": "250000 100000",
            "docker/abc/memory.max": "2000000000",
            "docker/abc/memory.current": "1500000000",
            "docker/abc/memory.stat": "anon 400000000\ninactive_file 1000000000",
            "docker/memory.max": "max",
            "docker/memory.current": "1600000000",
            "docker/memory.stat": "inactive_file 0",
        },
    )
    assert machine.cpu_quota(groups, mount) == 2.5
    # A file that could be dropped from memory is no use of it.
    assert machine.memory_limit(groups, mount) == (2_000_000_000, 500_000_000)


def test_limits_of_a_container_first_version(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/x\n")
    mount = tmp_path / "mount"
    write(
        mount,
        {
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
        },
    )
    assert machine.cpu_quota(groups, mount) == 3.0
    assert machine.memory_limit(groups, mount) == (1000, 699)


def test_without_a_container_there_is_no_limit(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path / "none", tmp_path) is None
    assert machine.memory_limit(tmp_path / "none", tmp_path) is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert machine.cpu_quota(tmp_path / "cgroup", tmp_path) is None


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
    assert links[0, 1] == Link(0, 1, "NV4")
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
    findings = list(doctor._gpus(here, None))
    assert "until then the GPUs are virtual" in said(findings, "GPUs")
    assert "none usable" in said(findings, "GPUs")


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


@pytest.mark.parametrize(
    ("gpus", "torch", "words"),
    [
        (
            0,
            Torch("2", "0", gloo=True),
            ["none (no NVIDIA GPU)", "Real: the processes"],
        ),
        (0, None, ["none (no NVIDIA GPU)", "Virtual: cuda:0"]),
        (1, Torch("2", "0", gpus=1), ["1 x H100, 80 GiB", "Real: cuda:0", "use gloo"]),
        (4, Torch("2", "0", gpus=4, nccl=True), ["4 x H100", "up to 4 ranks", "nccl."]),
        (4, Torch("2", "0", gpus=4), ["up to 4 ranks", "this torch has no nccl"]),
    ],
)
def test_what_is_real_and_what_virtual(gpus: int, torch, words: list[str]) -> None:
    cards = tuple(Gpu(i, "H100", 80 * 2**30) for i in range(gpus))
    findings = list(doctor._gpus(a_machine(gpus=cards), torch))
    text = said(findings, "GPUs")
    assert all(word in text for word in words), text
    assert "irtual" in text
    assert not any(finding.fix for finding in findings)


def test_links_are_told_in_one_line() -> None:
    cards = tuple(Gpu(i, "H100", 0) for i in range(4))
    torch = Torch("2", "0", gpus=4, nccl=True)

    def links(topo: str) -> str:
        here = a_machine(gpus=cards, links=machine.parse_links(topo))
        return said(list(doctor._gpus(here, torch)), "GPU links")

    assert links(TOPO_NVSWITCH) == "every pair: NVLink (18 links)"
    assert links(TOPO_PAIRS) == (
        "0-1: NVLink (4 links); 0-2, 0-3, 1-2, 1-3: PCIe, and from one CPU to another; "
        "2-3: PCIe, through the CPU"
    )


def test_gpus_that_torch_cannot_use(monkeypatch) -> None:
    cards = tuple(Gpu(i, "H100", 0) for i in range(2))
    here = a_machine(gpus=cards, driver="470.1")

    def fix(torch: Torch) -> str:
        first, *_ = doctor._gpus(here, torch)
        assert first.mark == "note"
        return first.fix

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "driver 470.1 may be too old for CUDA 13.0" in fix(Torch(cuda="13.0"))
    assert "built without CUDA" in fix(Torch())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "CUDA_VISIBLE_DEVICES='1' hides" in fix(Torch(cuda="13.0", gpus=1))


# The rest of the report


def run_doctor(
    *arguments: str, prefix: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "course_utils", "doctor", *arguments],
        check=False,
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_report_on_this_machine() -> None:
    pytest.importorskip("torch")
    result = run_doctor("--no-venv", COLUMNS="88")
    assert result.returncode == 0, result.stdout + result.stderr
    marked = r"^ +(?:ok|note|PROBLEM)  (\w+(?: \w+)?) +"
    topics = re.findall(marked, result.stdout, re.MULTILINE)
    expected = ["Python", "packages", "torch", "processor", "memory", "disk", "GPUs"]
    assert [t for t in topics if t in expected] == expected
    assert "start method" in topics and "loopback" in topics
    assert "load together" in result.stdout
    assert result.stdout.count("Real:") >= 4
    assert result.stdout.endswith("Nothing keeps the course from running.\n")
    commands = [line for line in result.stdout.splitlines() if "-> " in line]
    assert all(
        len(line) <= 88 for line in result.stdout.splitlines() if line not in commands
    )


@pytest.mark.thorough
@only_linux
def test_no_loopback() -> None:
    flags = "-n" if os.geteuid() == 0 else "-rn"
    if (
        not shutil.which("unshare")
        or subprocess.run(
            ["unshare", flags, "true"], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("this system does not let us have a network of our own")
    result = run_doctor("--no-venv", prefix=("unshare", flags))
    assert result.returncode == 1
    assert re.search(
        r"PROBLEM  loopback +127\.0\.0\.1 does not carry messages: ", result.stdout
    ), result.stdout
    assert "-> sudo ip link set lo up\n" in result.stdout
    assert result.stdout.endswith("loopback.\n")


def test_loopback_carries_messages() -> None:
    assert 0 < doctor.loopback_round_trip() < 0.1
    finding = doctor._loopback()
    assert not finding.problem
    assert "microseconds there and back" in finding.fact


@pytest.mark.parametrize(
    ("free", "mark", "words"),
    [
        (8.0, "ok", ""),
        (3.9, "ok", ""),
        (3.8, "note", "lesson 08 takes up to 3.9 GB, with JupyterLab and a browser"),
        (3.4, "note", "lessons 06 and 08 take up to 3.9 GB"),
        (2.6, "note", "lessons 02, 04, 06 and 08 take"),
        (2.5, "PROBLEM", "lessons 00, 02, 04, 06, 07 and 08 take"),
        (0.3, "PROBLEM", "lessons 00, 01, 02, 03, 04, 05, 06, 07 and 08 take"),
    ],
)
def test_memory(free: float, mark: str, words: str, monkeypatch) -> None:
    # A lesson that is added to the course changes none of these words.
    nine = dict(list(doctor.LESSON_MEMORY.items())[:9])
    monkeypatch.setattr(doctor, "LESSON_MEMORY", nine)
    finding = doctor._free_memory(a_machine(free_memory=int(free * 1e9)))
    assert finding.mark == mark
    assert f"16.0 GB, {free} GB of it free" in finding.fact
    assert words in finding.fix
    assert bool(finding.fix) == bool(words)


def test_every_lesson_has_its_memory() -> None:
    assert list(doctor.LESSON_MEMORY) == [lesson.number for lesson in LESSONS], (
        "measure the memory at the peak of the lesson: LESSON_MEMORY in doctor.py, and "
        "the table in notebooks/instructor_guide.md"
    )


@pytest.mark.parametrize(
    ("free", "installed", "mark"),
    [
        (100.0, False, "ok"),
        (5.0, False, "PROBLEM"),
        (5.0, True, "ok"),
        (0.3, True, "note"),
        (0.0, True, "PROBLEM"),
    ],
)
def test_disk(free: float, installed: bool, mark: str, monkeypatch) -> None:
    if not LINUX:
        pytest.skip("the amounts are those of Linux")
    usage = type("Usage", (), {"free": int(free * 1e9)})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    finding = doctor._disk(ROOT, installed)
    assert finding.mark == mark
    assert f"{free} GB free" in finding.fact


@only_linux
def test_little_shared_memory(monkeypatch) -> None:
    usage = type("Usage", (), {"free": 64 * 10**6})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    finding = doctor._shared_memory()
    assert finding.mark == "note"
    assert "64 MB free in /dev/shm" in finding.fact
    assert "--shm-size" in finding.fix


def test_cores_are_told_with_their_limits() -> None:
    finding = doctor._cores(a_machine(cores=2, all_cores=8, physical_cores=4))
    assert finding.fact == (
        "A CPU: 2 cores for this process, of 8 (4 physical cores in the machine)"
    )
    assert "2 ranks can compute at the same moment" in finding.meaning
    one = doctor._cores(a_machine(cores=1, all_cores=1, physical_cores=1))
    assert one.fact == "A CPU: 1 core"
    assert "1 rank can" in one.meaning


def test_the_start_method_is_that_of_the_ranks(monkeypatch) -> None:
    from course_utils.ranks.processes import start_method

    for chosen in ("fork", "spawn", ""):
        monkeypatch.setenv("RANKS_START_METHOD", chosen)
        here = inspect_machine()
        assert here.start_method == start_method()
        assert doctor._start(here).fact.startswith(here.start_method)


def test_torch_without_gloo_is_a_problem() -> None:
    python = Path(sys.executable)
    finding = doctor._torch(Torch("2.14.1", "0.29.2"), python, ROOT)
    assert finding.problem and "without gloo" in finding.fact
    good = doctor._torch(Torch("2.14.1", "0.29.2", gloo=True), python, ROOT)
    assert good.mark == "ok"


def test_a_command_stays_on_one_line_and_text_is_wrapped() -> None:
    long = "python3 -m pip install " + " ".join(f"package{i}==1.0" for i in range(20))
    finding = Finding("thing", "word " * 40, fix="do " * 40, command=long, problem=True)
    text = doctor.report([finding], 60)
    assert f"-> {long}\n" in text
    assert all(len(line) <= 60 for line in text.splitlines() if long not in line)
    assert text.endswith("Put right first: thing.")


def test_machine_can_be_shown_as_data() -> None:
    here = a_machine(gpus=(Gpu(0, "H100", 1),), links=(Link(0, 1, "NV4"),))
    data = json.loads(json.dumps(dataclasses.asdict(here)))
    assert data["gpus"][0]["name"] == "H100"
    assert data["links"][0]["code"] == "NV4"
