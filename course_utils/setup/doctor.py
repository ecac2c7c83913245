"""``python3 -m course_utils doctor``: what this machine has, and what is wrong.

It says what of the course will be real here, what virtual, and what to do about each
problem. With ``--room``, a small notebook then does for real what the lessons do.
"""

import argparse
import importlib.metadata
import platform
import re
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from course_utils import ROOT
from course_utils.measure.machine import Machine, inspect_machine
from course_utils.notebook.lessons import LESSONS
from course_utils.setup import environment
from course_utils.setup.environment import START, SetupError, say
from course_utils.setup.installer import condition

BESIDES = 0.7  # GB, beside a lesson's: JupyterLab 0.2, a browser 0.5


class Finding(NamedTuple):
    """One line of the report: a fact, what it means, what to do about it."""

    topic: str
    fact: str
    meaning: str = ""
    fix: str = ""
    problem: bool = False  # it keeps the course from running


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Look, and report. Returns 1 if the course cannot run."""
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils doctor",
        description="Look at this machine: what of the course will be real on it, what "
        "virtual, and what to do about each problem. Installs nothing.",
    )
    parser.add_argument(
        "--room",
        action="store_true",
        help="then try what the lessons do, within a minute; the last line can be "
        "pasted into a chat",
    )
    options = parser.parse_args(argv)
    if condition(root) == "ready":
        environment.enter(["doctor", *argv], root)
    machine, problems = inspect_machine(), []

    def report(findings: Iterable[Finding]) -> None:
        for finding in findings:
            say(_in_lines(finding))
            if finding.problem:
                problems.append(finding)

    report(examine(machine, root))
    if options.room:
        report(try_room(root) if not problems else ())
        say(f"\nroom: {in_a_line(machine, problems)}")
    elif problems:
        say(f"\nPut right first: {', '.join(found.topic for found in problems)}.")
    else:
        say("\nNothing keeps the course from running.")
    return int(bool(problems))


def _in_lines(finding: Finding) -> str:
    mark = "PROBLEM" if finding.problem else "note" if finding.fix else "ok"
    margin = " " * 24
    lines = [f"{mark:>8}  {finding.topic:<14}{finding.fact}"]
    lines += [margin + finding.meaning] if finding.meaning else []
    lines += [f"{margin}-> {finding.fix}"] if finding.fix else []
    width = max(60, shutil.get_terminal_size((88, 24)).columns)
    folds = textwrap.TextWrapper(width, subsequent_indent=margin)
    folds.break_long_words = False
    return "\n".join(map(folds.fill, lines))


def examine(machine: Machine, root: Path = ROOT) -> Iterator[Finding]:
    """Everything the doctor looks at, in order. About 5 s, most of it ``import torch``.

    What is installed is looked up in the Python that runs this.
    """
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    torch = {"gpus": len(machine.gpus), "nccl": True}
    if environment.has_all():
        try:
            torch = environment.probe_torch(Path(sys.executable), root)
            what = f"torch {torch['torch']} and torchvision load together"
            yield Finding("packages", what, problem=not torch["gloo"])
        except SetupError as error:
            yield Finding("packages", str(error), problem=True)
    else:
        why = f".venv: {condition(root)}"
        yield Finding("packages", why, fix=START, problem=True)
    yield _processor(machine)
    yield room_in_memory(machine)
    shared = Path("/dev/shm")
    if shared.exists() and shutil.disk_usage(shared).free < 0.25e9:
        fix = "in Docker, start the container with --shm-size=1g; or use num_workers=0"
        what = "DataLoader workers hand their batches over through it."
        yield Finding("shared memory", "/dev/shm is almost full", what, fix)
    free = shutil.disk_usage(root).free / 1e9
    fact = f"{free:.1f} GB free where the course is ({root})"
    fix = "free some space: data, checkpoints and notebooks need 0.5 GB"
    yield Finding("disk", fact, fix=fix * (free < 0.5), problem=free < 0.02)
    yield _gpus(machine, torch)
    if kinds := sorted({link.description for link in machine.links}):
        yield Finding("GPU links", "; ".join(kinds))
    how = machine.start_method
    takes = "a fraction of a second" if how == "fork" else "several seconds"
    how, what = f"started by {how}", f"Real: processes. The first ones take {takes}."
    yield Finding("ranks", how, what)
    yield _loopback()


def _processor(machine: Machine) -> Finding:
    cores = f"{machine.cores} core{'s' * (machine.cores != 1)}"
    if machine.cores < machine.all_cores:
        cores += f" for this process, of {machine.all_cores}"
    meaning = (
        "Real: the same number of ranks can compute at once. More ranks take turns: "
        "their results are the same, their times are longer."
    )
    return Finding("processor", f"{machine.cpu}: {cores}", meaning)


def room_in_memory(machine: Machine) -> Finding:
    free = machine.free_memory / 1e9
    tight = [lesson for lesson in LESSONS if free < lesson.memory + BESIDES]
    which = ", ".join(f"lesson {lesson.number}" for lesson in tight)
    most = max([lesson.memory for lesson in tight], default=0) + BESIDES
    fix = "close other programs: with JupyterLab and a browser, the course needs up to "
    fix += f"{most:.1f} GB for {which}"
    return Finding(
        "memory",
        f"{machine.memory / 1e9:.1f} GB, {free:.1f} GB of it free",
        "Real: each rank has its own memory, 0.1 GB and what it computes with.",
        fix if tight else "",
        problem=2 * len(tight) > len(LESSONS),
    )


def _gpus(machine: Machine, torch: dict) -> Finding:
    there, usable = len(machine.gpus), torch["gpus"]
    names = [f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB" for gpu in machine.gpus]
    fact, fix = ", ".join(names) or "none (no NVIDIA GPU)", ""
    if machine.gpu_problem:
        fact, fix = machine.gpu_problem, "reinstall the NVIDIA driver"
    elif usable < there and not torch["cuda"]:
        fix = f"this PyTorch is the CPU build: {START} --torch cuda"
    elif usable < there:
        fix = f"torch can use {usable} of them: look at CUDA_VISIBLE_DEVICES, and "
        fix += f"whether the driver {machine.driver} knows CUDA {torch['cuda']}"
    meaning = (
        "Virtual: cuda:0, cuda:1, ... of the lessons. Their numbers are true, computed "
        "in main memory; their speed is not a GPU's."
    )
    if usable == 1:
        meaning = "Real: cuda:0. Several ranks use gloo: nccl needs a GPU for each."
    elif usable > 1:
        backend = "nccl" if torch["nccl"] else "gloo, as this torch has no nccl"
        meaning = f"Real: up to {usable} ranks have a GPU each, and use {backend}."
    return Finding("GPUs", fact, meaning, fix)


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        fact = f"127.0.0.1 does not carry messages: {error.strerror or error}"
        fix = "let the firewall or VPN allow local connections; on Linux, the "
        fix += "interface may be down: sudo ip link set lo up"
        return Finding("loopback", fact, fix=fix, problem=True)
    meaning = "Real: what ranks send each other goes through it, and stays in here."
    return Finding("loopback", "127.0.0.1 carries messages", meaning)


def try_room(root: Path = ROOT) -> Iterator[Finding]:
    """Run the cells of room.ipynb as JupyterLab would, up to the first that fails."""
    import nbclient
    import nbformat

    notebook = nbformat.read(Path(__file__).with_name("room.ipynb"), as_version=4)
    quiet = ["--log-level=ERROR"]
    client = nbclient.NotebookClient(notebook, timeout=25, extra_arguments=quiet)
    client.resources["metadata"] = {"path": str(root)}
    env = environment.course_environment(Path(sys.executable), root)
    with client.setup_kernel(env=env):
        for number, cell in enumerate(notebook.cells):
            topic = cell.source.partition("\n")[0].strip("# ")
            if cell.cell_type != "code":
                continue
            try:
                client.execute_cell(cell, number)
            except Exception as error:
                fact = environment.last_line(re.sub(r"\x1b\[[\d;]*m", "", str(error)))
                fix = "close other programs, let the firewall or virus scanner allow "
                fix += "local connections, and run it again"
                yield Finding(topic, fact, fix=fix, problem=True)
                return
            yield Finding(topic, "works")


def in_a_line(machine: Machine, problems: Sequence[Finding]) -> str:
    """One line for a chat, without the name of a person, a folder or a computer."""
    if problems:
        return f"NOT ready | {problems[0].topic} -> {problems[0].fix or 'see above'}"
    facts = [
        machine.release,
        f"{machine.cores} cores",
        f"{machine.memory / 1e9:.0f} GB ({machine.free_memory / 1e9:.1f} free)",
        f"Python {platform.python_version()}",
        f"torch {importlib.metadata.version('torch')}",
    ]
    return " | ".join(["ready", *facts])
