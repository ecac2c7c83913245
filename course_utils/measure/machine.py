"""What this machine has, as far as the course may use it: ``inspect_machine()``.

Standard library only, and quick. ``course_utils.setup.doctor`` puts it into words.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# A healthy nvidia-smi answers within 2 s; one with a broken driver may never.
NVIDIA_SMI_SECONDS = 5.0


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its driver describes it."""

    index: int
    name: str
    memory: int  # bytes; 0 if the driver does not say


@dataclass(frozen=True)
class GpuPair:
    """How two GPUs reach each other."""

    first: int  # index of a GPU
    second: int  # index of a GPU, greater than first
    code: str  # nvidia-smi's: NV4, PIX, PXB, PHB, NODE, SYS

    @property
    def nvlinks(self) -> int:
        """Number of NVLink connections between the two; 0 if they use PCIe."""
        lanes = re.fullmatch(r"NV(\d+)", self.code)
        return int(lanes[1]) if lanes else 0

    @property
    def description(self) -> str:
        """In words."""
        if self.nvlinks:
            return f"NVLink ({self.nvlinks} links)"
        return {
            "PIX": "PCIe, through one switch",
            "PXB": "PCIe, through several switches",
            "PHB": "PCIe, through the CPU",
            "NODE": "PCIe, between two bridges of one CPU",
            "SYS": "PCIe, and from one CPU to another",
        }.get(self.code, self.code)


@dataclass(frozen=True)
class Machine:
    """The machine as this process may use it."""

    system: str  # "Linux", "macOS" or "Windows"
    release: str  # with its version: "Debian GNU/Linux 12 (bookworm)"
    cpu: str  # the model's name
    cores: int  # logical cores that this process may use at a time
    all_cores: int  # logical cores of the machine
    physical_cores: int | None  # behind ``all_cores``; None if unknown
    memory: int  # bytes that this process may use
    free_memory: int  # bytes of it that are free
    gpus: tuple[Gpu, ...] = ()
    links: tuple[GpuPair, ...] = ()  # one for each pair of GPUs
    driver: str = ""  # version of the NVIDIA driver
    gpu_problem: str = ""  # why nvidia-smi, which is there, did not answer

    @property
    def start_method(self) -> str:
        """How the course starts ranks here: ``"fork"`` or ``"spawn"``."""
        chosen = os.environ.get("RANKS_START_METHOD")
        return chosen or ("fork" if self.system == "Linux" else "spawn")


def inspect_machine() -> Machine:
    """Look at this machine: milliseconds, and what nvidia-smi takes where it is."""
    cpu, physical = _cpu()
    memory, free = _memory()
    return Machine(
        system={"Darwin": "macOS"}.get(platform.system(), platform.system()),
        release=_release(),
        cpu=cpu,
        cores=usable_cores(),
        all_cores=os.cpu_count() or 1,
        physical_cores=physical,
        memory=memory,
        free_memory=free,
        **_gpus(),
    )


# Cores and memory


def usable_cores() -> int:
    """Logical cores that this process may use: its affinity and its group's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Cores' worth of time that the control groups (a container's) allow, or None."""
    quotas = []
    for text in _group_files("cpu", "cpu.max", groups, mount):
        quota, period = ([*text.split(), "100000"])[:2]
        if quota != "max":
            quotas.append(int(quota) / int(period))
    old = "cpu.cfs_quota_us", "cpu.cfs_period_us"
    limits, periods = (list(_group_files("cpu", f, groups, mount)) for f in old)
    for limit, length in zip(limits, periods, strict=False):
        if int(limit) > 0:
            quotas.append(int(limit) / int(length))
    return min(quotas, default=None)


def memory_limit(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int] | None:
    """The tightest limit of the control groups and what is used of it, in bytes."""
    found = []
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limits, used, stats = (
            list(_group_files("memory", name, groups, mount))
            for name in (limit_file, used_file, "memory.stat")
        )
        for limit, now, stat in zip(limits, used, stats, strict=False):
            if limit != "max":
                # Files that could be dropped from memory count as used: they are not.
                cache = re.search(
                    r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE
                )
                idle = int(cache[1]) if cache else 0
                found.append((int(limit), max(0, int(now) - idle)))
    return min(found, default=None)


def _group_files(
    controller: str, name: str, groups: Path, mount: Path
) -> Iterator[str]:
    """The contents of a file in this process's control group and in those above it."""
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = mount / controllers if controllers else mount
            for folder in (base / path.lstrip("/"), *(base / path[1:]).parents):
                if folder.is_relative_to(base):
                    with contextlib.suppress(OSError):
                        yield (folder / name).read_text().strip()


def _cpu() -> tuple[str, int | None]:
    """The CPU's name and its number of physical cores."""
    name, physical = "", None
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            text = Path("/proc/cpuinfo").read_text()
            model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
            name = model[1] if model else ""
        pairs = set()
        topology = Path("/sys/devices/system/cpu")
        for folder in topology.glob("cpu[0-9]*/topology"):
            with contextlib.suppress(OSError):
                ids = ("physical_package_id", "core_id")
                pairs.add(tuple((folder / i).read_text().strip() for i in ids))
        physical = len(pairs) or None
    elif sys.platform == "darwin":
        told = output_of("sysctl", "-n", "machdep.cpu.brand_string", "hw.physicalcpu")
        name, _, cores = told.partition("\n")
        physical = int(cores) if cores.strip().isdigit() else None
    name = name or platform.processor() or platform.machine() or "unknown CPU"
    return " ".join(name.split()), physical


def _memory() -> tuple[int, int]:
    """Bytes of memory that this process may use, and that are free."""
    total = free = 0
    if sys.platform == "linux":
        text = Path("/proc/meminfo").read_text()
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
        total = int(found["MemTotal"]) * 1024
        free = int(found.get("MemAvailable", found["MemFree"])) * 1024
        if limit := memory_limit():
            total, free = min(total, limit[0]), min(free, limit[0] - limit[1])
    elif sys.platform == "darwin":
        told = output_of("sysctl", "-n", "hw.memsize")
        total = int(told) if told.strip().isdigit() else 0
        pages = dict(
            re.findall(r"^(.+):\s+(\d+)\.$", output_of("vm_stat"), re.MULTILINE)
        )
        idle = ("Pages free", "Pages inactive", "Pages speculative")
        free = sum(int(pages.get(kind, 0)) for kind in idle) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    elif sys.platform == "win32":
        total, free = _windows_memory()
    return total, max(0, free)


def _windows_memory() -> tuple[int, int]:
    import ctypes  # some Pythons of other systems are built without it

    # MEMORYSTATUSEX: its own length and a percentage in 32 bits each, then 64-bit
    # amounts, of which total and free memory come first.
    status = (ctypes.c_uint64 * 8)(64)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status[1], status[2]


def _release() -> str:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            name = platform.freedesktop_os_release().get("PRETTY_NAME")
            if name:
                return name
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.release()}"


def output_of(
    *command: str | Path, timeout: float = 5.0, env: dict[str, str] | None = None
) -> str:
    """What a program prints; "" if there is none, or if it takes too long."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=env,
        )
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# GPUs


def _gpus() -> dict:
    """What nvidia-smi says of the GPUs and of their links; nothing where it is not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    ask = partial(
        subprocess.run,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=NVIDIA_SMI_SECONDS,
    )
    query = "--query-gpu=index,name,memory.total,driver_version"
    try:
        listed = ask([program, query, "--format=csv,noheader,nounits"])
        linked = ask([program, "topo", "-m"])
    except subprocess.TimeoutExpired:
        late = f"nvidia-smi did not answer within {NVIDIA_SMI_SECONDS:.0f} s"
        return {"gpu_problem": late}
    if listed.returncode:
        said = " ".join(listed.stdout.split()) or f"exit code {listed.returncode}"
        return {"gpu_problem": f"nvidia-smi says: {said}"}
    gpus, driver = parse_gpus(listed.stdout)
    links = parse_links("" if linked.returncode else linked.stdout)
    return {"gpus": gpus, "links": links, "driver": driver}


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Read nvidia-smi's table of index, name, memory in MiB and driver's version."""
    gpus, driver = [], ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0].isdigit():
            mebibytes = int(cells[2]) if cells[2].isdigit() else 0
            gpus.append(Gpu(int(cells[0]), cells[1], mebibytes * 2**20))
            driver = cells[3]
    return tuple(gpus), driver


def parse_links(text: str) -> tuple[GpuPair, ...]:
    """Read the matrix that ``nvidia-smi topo -m`` prints; () if there is none."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # it underlines the heading
    rows = [[c.strip() for c in line.split("\t")] for line in plain.splitlines()]
    gpu = re.compile(r"GPU(\d+)")
    heading = next((row for row in rows if gpu.fullmatch([*row, "", ""][1])), [])
    links = []
    for row in rows:
        first = gpu.fullmatch(row[0]) if row else None
        for name, code in zip(heading, row, strict=False):
            second = gpu.fullmatch(name)
            if first and second and int(first[1]) < int(second[1]):
                links.append(GpuPair(int(first[1]), int(second[1]), code))
    return tuple(links)
