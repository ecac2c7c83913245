"""What this machine has, and what the course does with it: the doctor's report.

``python3 -m course_utils doctor`` says what will be real here, what virtual, and what
to do about each problem. The facts come from ``machine.py``. With ``--room``,
``room.py`` then tries for real what the lessons do.
"""

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from course_utils import ROOT
from course_utils.setup import environment
from course_utils.setup.environment import START, SetupError, Torch, dotted
from course_utils.setup.installer import check_python
from course_utils.measure.machine import Gpu, Link, Machine, inspect_machine

__all__ = ["Finding", "Gpu", "Link", "Machine", "examine", "inspect_machine", "report"]

# GB at the peak of each lesson: its kernel, ranks and scripts, as measured on Linux by
# tests/benchmarks/memory.py.
LESSON_MEMORY = {
    **{"00": 1.9, "01": 1.2, "02": 2.0, "03": 1.4, "04": 2.1},
    **{"05": 1.8, "06": 2.8, "07": 1.9, "08": 3.2},
}
BESIDES = 0.7  # GB: JupyterLab 0.2, a browser 0.5


@dataclass(frozen=True)
class Finding:
    """One line of the report: a fact, what follows from it, what to do about it."""

    topic: str
    fact: str
    meaning: str = ""
    fix: str = ""  # in words
    command: str = ""  # that puts it right
    problem: bool = False  # it keeps the course from running

    @property
    def mark(self) -> str:
        """How much it matters, in a word: no colour is needed."""
        if self.problem:
            return "PROBLEM"
        return "note" if self.fix or self.command else "ok"


def examine(
    root: Path = ROOT,
    *,
    venv: bool = True,
    machine: Machine | None = None,
    torch_seconds: float = 180.0,
) -> list[Finding]:
    """Everything the doctor looks at, in order. About 5 s, most of it ``import torch``.

    ``venv`` looks into the course's environment; without, into the current one. The
    import of torch may take ``torch_seconds``.
    """
    machine = machine or inspect_machine()
    python = environment.venv_python(root) if venv else Path(sys.executable)
    findings = [_python(), *_packages(root, python, venv)]
    torch = None
    folders = [environment.site_packages(root)] if venv else sys.path
    if "torch" in environment.installed(filter(None, folders)):
        torch = environment.probe_torch(python, root, venv=venv, timeout=torch_seconds)
        findings.append(_torch(torch, python, root))
    findings += [
        _cores(machine),
        _free_memory(machine),
        _shared_memory(),
        _disk(root, installed=torch is not None),
        *_gpus(machine, torch),
        _start(machine),
        _loopback(),
    ]
    return [finding for finding in findings if finding]


def report(findings: Sequence[Finding], width: int = 88) -> str:
    """The findings as text for a terminal."""
    lines = ["This machine, and what the course does with it", ""]
    margin = " " * 24
    for finding in findings:
        start = f"{finding.mark:>8}  {finding.topic:<14}"
        lines += _wrapped(finding.fact, width, start, margin)
        lines += _wrapped(finding.meaning, width, margin, margin)
        lines += _wrapped(finding.fix, width, f"{margin}-> ", f"{margin}   ")
        if finding.command:  # on one line, to be copied
            lines.append(f"{margin}-> {finding.command}")
    problems = [finding.topic for finding in findings if finding.problem]
    lines.append("")
    if problems:
        lines.append(
            f"The course cannot run yet. Put right first: {', '.join(problems)}."
        )
    else:
        lines.append("Nothing keeps the course from running.")
    return "\n".join(lines)


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _python() -> Finding:
    return Finding("Python", f"{platform.python_version()} ({sys.executable})")


def _packages(root: Path, python: Path, venv: bool) -> Iterator[Finding]:
    if venv:
        why = environment.condition(root)
        if why == "ready":
            version = dotted(environment.version_of(python) or ())
            fact = f"as in requirements.txt, in .venv (Python {version})"
            yield Finding("packages", fact)
            return
        yield Finding("packages", f".venv is not ready: {why}", command=START)
        if not os.access(root, os.W_OK):
            yield Finding(
                "folder",
                f"{root} cannot be written to",
                fix="make it yours, or clone the course into a folder of your own",
                problem=True,
            )
        try:
            check_python()
        except SetupError as error:
            yield Finding("venv", str(error), problem=True)
        return
    wanted = environment.read_requirements(root).pins
    missing, other = environment.compare(wanted, environment.installed(sys.path))
    if missing:
        names = ", ".join(missing)
        command = f"{shlex.quote(str(python))} -m pip install -r requirements.txt"
        fact = f"missing here: {names}"
        yield Finding("packages", fact, command=command, problem=True)
    elif other:
        shown = ", ".join(f"{name} {have} ({pin})" for name, pin, have in other)
        yield Finding(
            "packages",
            f"not the versions that the course is tested with (in brackets): {shown}",
            fix="expect small differences, or use .venv",
        )
    else:
        yield Finding("packages", "as in requirements.txt, in the current environment")


def _torch(torch: Torch, python: Path, root: Path) -> Finding:
    if "took more than" in torch.error:
        return Finding(
            "torch",
            torch.error.replace("them", "torch and torchvision"),
            fix="run it once more: the first time reads all of it from the disk, and a "
            "virus scanner reads it, too",
            problem=True,
        )
    fact, command = torch.trouble(python, root)
    if fact:
        return Finding("torch", fact, command=command, problem=True)
    fact = f"torch {torch.torch} and torchvision {torch.torchvision} load together"
    if not torch.gloo:
        return Finding(
            "torch",
            f"{fact}, but without gloo, which carries the messages between ranks",
            fix="install the torch that requirements.txt names",
            problem=True,
        )
    return Finding("torch", fact)


def _cores(machine: Machine) -> Finding:
    cores, everything = machine.cores, machine.all_cores
    fact = f"{machine.cpu}: {_count(cores, 'core')}"
    if cores < everything:
        fact += f" for this process, of {everything}"
    if machine.physical_cores and machine.physical_cores < everything:
        fact += f" ({_count(machine.physical_cores, 'physical core')} in the machine)"
    return Finding(
        "processor",
        fact,
        f"Real: {_count(cores, 'rank')} can compute at the same moment. More ranks "
        "take turns: their results are the same, their times are longer.",
    )


def _free_memory(machine: Machine) -> Finding:
    fact = f"{_gigabytes(machine.memory)}, {_gigabytes(machine.free_memory)} of it free"
    meaning = "Real: each rank has its own memory, 0.1 GB and what it computes with."
    needs = {n: round(peak + BESIDES, 1) for n, peak in LESSON_MEMORY.items()}
    tight = [n for n, need in needs.items() if machine.free_memory < need * 1e9]
    if not tight:
        return Finding("memory", fact, meaning)
    most = max(needs[n] for n in tight)
    *others, last = tight
    which = f"lesson {last} takes"
    if others:
        which = f"lessons {', '.join(others)} and {last} take"
    return Finding(
        "memory",
        fact,
        meaning,
        fix=f"close other programs: {which} up to {most} GB, with JupyterLab and a "
        "browser",
        problem=2 * len(tight) > len(needs),
    )


def _shared_memory() -> Finding | None:
    if sys.platform != "linux":
        return None
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 0
    if free >= 0.25e9:
        return None
    return Finding(
        "shared memory",
        f"{free / 1e6:.0f} MB free in /dev/shm",
        "DataLoader workers hand their batches over through it.",
        fix="in Docker, start the container with --shm-size=1g; or use num_workers=0",
    )


def _disk(root: Path, installed: bool) -> Finding:
    free = shutil.disk_usage(root).free
    size = environment.read_requirements(root)
    fact = f"{_gigabytes(free)} free where the course is ({root})"
    needed = (size.download + size.disk) * 1e9
    if not installed and free < needed:
        fix = f"free some space: the installation needs {_gigabytes(needed)}"
        return Finding("disk", fact, fix=fix, problem=True)
    if free < 0.5e9:
        fix = "free some space: data, checkpoints and notebooks need about 0.5 GB"
        return Finding("disk", fact, fix=fix, problem=free < 0.02e9)
    return Finding("disk", fact)


def _gpus(machine: Machine, torch: Torch | None) -> Iterator[Finding]:
    gpus = machine.gpus
    if machine.gpu_problem:
        yield Finding(
            "GPUs",
            machine.gpu_problem,
            fix="restart the machine or reinstall the NVIDIA driver; until then the "
            "GPUs are virtual, as on a machine without any",
        )
    usable = torch.gpus if torch else len(gpus)
    if gpus and torch and usable < len(gpus):
        yield _unused(machine, torch)
    names = {(gpu.name, gpu.memory) for gpu in gpus}
    fact = "; ".join(
        f"{sum((g.name, g.memory) == kind for g in gpus)} x {kind[0]}"
        + (f", {kind[1] / 2**30:.0f} GiB" if kind[1] else "")
        for kind in sorted(names)
    )
    virtual = (
        "Virtual: cuda:0, cuda:1, ... of the lessons. Their numbers are true, computed "
        "in main memory; their speed is not a GPU's."
    )
    if usable == 0:
        yield Finding(
            "GPUs",
            fact or "none (no NVIDIA GPU)"
            if not machine.gpu_problem
            else "none usable",
            "Real: the processes, the messages between them (gloo, over 127.0.0.1) and "
            "every number. " + virtual,
        )
        return
    fact = fact or _count(usable, "GPU") + " that torch can use"
    if usable == 1:
        yield Finding(
            "GPUs",
            fact,
            "Real: cuda:0. Several ranks use gloo, since nccl needs a GPU for each. "
            "Virtual: the further GPUs of the lessons.",
        )
        return
    nccl = torch is None or torch.nccl
    yield Finding(
        "GPUs",
        fact,
        f"Real: up to {usable} ranks have a GPU each and talk through "
        f"{'nccl' if nccl else 'gloo, as this torch has no nccl'}. "
        "More ranks than that use gloo and virtual GPUs.",
    )
    if machine.links:
        yield Finding("GPU links", _links(machine.links))


def _unused(machine: Machine, torch: Torch) -> Finding:
    there = f"torch can use {torch.gpus} of {_count(len(machine.gpus), 'GPU')}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        fix = f"CUDA_VISIBLE_DEVICES={hidden!r} hides the others: unset it to use all"
    elif not torch.cuda:
        fix = "this torch was built without CUDA: install the one of requirements.txt"
    else:
        fix = (
            f"the driver {machine.driver} may be too old for CUDA {torch.cuda}, which "
            "this torch was built for: update the driver"
        )
    return Finding("GPUs", there, fix=fix)


def _links(links: Sequence[Link]) -> str:
    """All pairs in one line: the usual machine has one kind of link or two."""
    kinds: dict[str, list[str]] = {}
    for link in links:
        kinds.setdefault(link.description, []).append(f"{link.first}-{link.second}")
    if len(kinds) == 1:
        pairs = "GPU 0-1" if len(links) == 1 else "every pair"
        return f"{pairs}: {next(iter(kinds))}"
    return "; ".join(f"{', '.join(pairs)}: {kind}" for kind, pairs in kinds.items())


def _start(machine: Machine) -> Finding:
    if machine.start_method == "fork":
        return Finding(
            "start method",
            "fork, from a process that has loaded torch once",
            "Real: ranks are processes, and start in a fraction of a second.",
        )
    return Finding(
        "start method",
        "spawn: every rank loads torch for itself",
        "Real: ranks are processes. The first cell on ranks takes several seconds, the "
        "next ones do not.",
    )


def _loopback() -> Finding:
    try:
        seconds = loopback_round_trip()
    except OSError as error:
        return Finding(
            "loopback",
            f"127.0.0.1 does not carry messages: {error.strerror or error}",
            fix="let the firewall or VPN allow local connections"
            + ("; if the interface lo is down:" if sys.platform == "linux" else ""),
            command="sudo ip link set lo up" if sys.platform == "linux" else "",
            problem=True,
        )
    fact = (
        f"127.0.0.1 carries messages, {seconds * 1e6:.0f} microseconds there and back"
    )
    try:
        address = socket.gethostbyname("localhost")
    except OSError:
        address = "nothing"
    if address != "127.0.0.1":
        return Finding(
            "loopback",
            f"{fact}; but the name localhost leads to {address}",
            fix="torchrun needs the name: add the line `127.0.0.1 localhost` to the "
            "hosts file",
        )
    meaning = "Real: what ranks send each other goes through it, and stays in here."
    return Finding("loopback", fact, meaning)


def loopback_round_trip(timeout: float = 2.0) -> float:
    """Send one byte to ourselves over 127.0.0.1 and back; the median of 11, seconds.

    Raises OSError if that does not work within ``timeout`` seconds.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(timeout)

        def echo() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as there:
                there.settimeout(timeout)
                while data := there.recv(1):
                    there.sendall(data)

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        times = []
        with socket.create_connection(server.getsockname(), timeout) as here:
            for _ in range(11):
                began = time.perf_counter()
                here.sendall(b"x")
                if here.recv(1) != b"x":
                    raise ConnectionError("the connection was cut")
                times.append(time.perf_counter() - began)
        thread.join(timeout)
    return sorted(times)[len(times) // 2]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """``python3 -m course_utils doctor``. Returns 1 if the course cannot run."""
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils doctor",
        description="Look at this machine: what of the course will be real on it, what "
        "virtual, and what to do about each problem. Installs nothing.",
    )
    parser.add_argument(
        "--room",
        action="store_true",
        help="then try what the lessons do, within a minute: ranks, virtual GPUs, data "
        "and JupyterLab; the last line can be pasted into a chat",
    )
    parser.add_argument(
        "--no-venv",
        action="store_true",
        help="look at the current environment instead of the course's own",
    )
    options = parser.parse_args(argv)
    width = min(100, shutil.get_terminal_size((88, 24)).columns)
    if options.room:
        return _room(root, venv=not options.no_venv, width=width)
    findings = examine(root, venv=not options.no_venv)
    print(report(findings, width))
    return int(any(finding.problem for finding in findings))


def _room(root: Path, *, venv: bool, width: int) -> int:
    """The report, with what was tried for real, and the line for the chat."""
    from course_utils.setup import room

    until = time.monotonic() + room.ALL_SECONDS
    environment.say(f"This takes at most {room.ALL_SECONDS:.0f} s.\n")
    machine = inspect_machine()
    findings = room.must_be_set_up(
        examine(root, venv=venv, machine=machine, torch_seconds=room.TORCH_SECONDS)
    )
    # What is wrong already would make the steps wait for their limits.
    if not any(finding.problem for finding in findings):
        python = environment.venv_python(root) if venv else Path(sys.executable)
        findings += room.try_everything(python, root, venv=venv, until=until)
    print(report(findings, width))
    print(f"\n{room.last_words(findings, machine, root)}")
    return int(any(finding.problem for finding in findings))
