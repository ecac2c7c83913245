"""Does the course run on this laptop? ``python3 -m course_utils doctor --room``.

After the doctor has looked, each step here does for real what the lessons do. A step is
a process of its own: ``python -m course_utils.setup.room TOPIC``. It ends at
its limit at the latest, and all that it has started ends with it. It listens on
127.0.0.1 alone and writes below ``.course`` alone. The standard library is enough here
until a step has begun.
"""

import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from course_utils import ROOT
from course_utils.setup.doctor import Finding, Machine
from course_utils.setup.environment import (
    Child,
    SetupError,
    course_environment,
    last_line,
    read_requirements,
)

ALL_SECONDS = 60.0  # for everything, the doctor's own look included
TORCH_SECONDS = 25.0  # of it, for the doctor's import of torch


@dataclass(frozen=True)
class Tried(Finding):
    """What a step has shown; ``brief`` is its part of the last line."""

    brief: str = ""


def try_everything(
    python: Path, root: Path, *, venv: bool, until: float
) -> Iterator[Finding]:
    """Perform the steps one after the other, up to the moment ``until`` (monotonic)."""
    try:
        (root / ".course").mkdir(exist_ok=True)
        folder = tempfile.mkdtemp(prefix="room-", dir=root / ".course")
    except OSError as error:
        fix = "make the course's folder yours, or clone it into a folder of your own"
        yield Finding("folder", f".course: {error.strerror}", fix=fix, problem=True)
        return
    try:
        for step in STEPS:
            seconds = min(step.seconds, until - time.monotonic())
            yield try_step(step, python, root, Path(folder), seconds, venv=venv)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_step(
    step: "Step", python: Path, root: Path, folder: Path, seconds: float, *, venv: bool
) -> Finding:
    """Perform one step in a process of ``python``, with temporary files in ``folder``.

    Whatever goes wrong there, a crash or a hang too, comes back as a problem.
    """

    def wrong(fact: str, fix: str = step.fix) -> Finding:
        return Finding(step.topic, fact, fix=fix, problem=True)

    slow = "close other programs and run it again: the second time is quicker"
    if seconds <= 0:
        return wrong(f"not tried: {ALL_SECONDS:.0f} s were over before", slow)
    env = course_environment(root, venv=venv)
    env.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)))
    command = [python, "-m", "course_utils.setup.room", step.topic]
    with Child(
        [*command, *([] if venv else ["--no-venv"])],
        cwd=root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        try:
            said, _ = child.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return wrong(f"not done within {seconds:.0f} s", slow)
    try:
        result = json.loads(said.splitlines()[-1])
        fact, brief, failed = (result[key] for key in ("fact", "brief", "failed"))
    except (ValueError, IndexError, TypeError, KeyError):
        code = child.process.returncode
        return wrong(f"ended with exit code {code}: {last_line(said)}")
    return wrong(fact) if failed else Tried(step.topic, fact, brief=brief)


def last_words(findings: Sequence[Finding], machine: Machine, root: Path = ROOT) -> str:
    """One line to be pasted into a chat: is this laptop ready, and if not, why.

    It holds no name of a person or a computer, and no path to the home folder.
    """
    problem, *others = [finding for finding in findings if finding.problem] or [None]
    if problem:
        do = "; ".join(filter(None, [problem.fix, problem.command]))
        # A name in a path would hide it: first the folders, then the names.
        fact = _without_names(_without_folders(problem.fact, root))
        text = f"{problem.topic}: {fact}"
        text += f" -> {_without_folders(do, root)}" if do else ""
        if others:  # what to do first may need them: .venv wants space on the disk
            text += f" | also: {', '.join(other.topic for other in others)}"
        return f"room: NOT ready | {' '.join(text.split())}"
    parts = [
        machine.release,
        f"{machine.cores} core{'s' * (machine.cores != 1)}",
        f"{machine.memory / 1e9:.0f} GB ({machine.free_memory / 1e9:.1f} free)",
        *(f.brief for f in findings if isinstance(f, Tried) and f.brief),
    ]
    return " | ".join(["room: ready", *parts])


def must_be_set_up(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, where an environment that is not ready is a problem, too."""
    return [
        replace(finding, problem=True)
        if finding.topic == "packages" and finding.command
        else finding
        for finding in findings
    ]


def _without_folders(text: str, root: Path) -> str:
    for path, short in ((str(root), "."), (os.path.expanduser("~"), "~")):
        if len(path) > 1:
            text = text.replace(path, short)
    return text


def _without_names(text: str) -> str:
    """No name of the computer; none of the person, whose home folder has it."""
    node = platform.node()
    person = os.path.basename(os.path.expanduser("~"))
    for name in (node, node.partition(".")[0], person):
        if name and name != "localhost":
            word = rf"(?<!\w){re.escape(name)}(?!\w)"
            text = re.sub(word, "(name)", text, flags=re.IGNORECASE)
    return text


# What the steps do, in a process of the course's environment. Each returns what was
# seen and its part of the last line, or raises what went wrong.


def read_digits() -> tuple[str, str]:
    """The data that every lesson uses is there; nothing is downloaded."""
    from course_utils.measure.data import load_data

    images, _, test_images, _ = load_data("digits")
    return f"{len(images)} + {len(test_images)} digits, without a network", ""


def use_virtual_gpu() -> tuple[str, str]:
    """A tensor is made and doubled on ``cuda:1``."""
    import torch

    from course_utils import virtual_gpus

    with virtual_gpus(2, force=True):
        doubled = torch.ones(3, device="cuda:1") * 2
        place, total = str(doubled.device), doubled.sum().item()
    if (place, total) != ("cuda:1", 6.0):
        raise RuntimeError(f"expected 6.0 on cuda:1, got {total} on {place}")
    return "a tensor was computed on cuda:1", ""


def use_ranks() -> tuple[str, str]:
    """Four ranks add up their numbers; then one of them is stuck, and is named."""
    from course_utils import Ranks, RanksError

    began = time.perf_counter()
    with Ranks(4, backend="gloo", timeout=15.0) as ranks:
        answers = ranks.run(_add_up)
        seconds = time.perf_counter() - began
        totals = [total for total, _ in answers]
        if totals != [10.0] * 4:
            raise RuntimeError(f"expected the sum 10.0 on every rank, got {totals}")
        try:
            ranks.run(_wait_for_nobody, timeout=4.0)
        except RanksError as error:
            named = {rank: failure.kind for rank, failure in error.failures.items()}
        else:
            named = {}
        if named != {2: "stuck"}:
            raise RuntimeError(f"rank 2 was stuck, and this was reported: {named}")
    torch, pin = answers[0][1], read_requirements().pins["torch"]
    tested = "" if torch.partition("+")[0] == pin else f" (tested with {pin})"
    python = "Python {}.{}".format(*sys.version_info)
    fact = f"4 ranks added up their numbers after {seconds:.1f} s; a stuck one is named"
    return fact, f"4 ranks in {seconds:.1f} s | {python} | torch {torch}{tested}"


def _add_up() -> tuple[float, str]:
    import torch
    import torch.distributed as dist

    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.item(), torch.__version__


def _wait_for_nobody() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 2:
        dist.recv(torch.zeros(1), src=3)  # which sends nothing


def use_jupyter() -> tuple[str, str]:
    """JupyterLab starts as ``start`` starts it, and a kernel of it runs one cell."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "course_utils.setup.room", "serve", *sys.argv[2:]]
    with Child(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        said = ""
        for line in server.process.stdout:
            said += line
            if found := re.search(r"(http://127\.0\.0\.1:\d+)/\S*token=(\w+)", line):
                break
        else:
            raise RuntimeError(last_line(said))
        seconds = time.perf_counter() - began
        answer = asyncio.run(_run_a_cell(found[1], found[2]))
    port = found[1].rpartition(":")[2]
    (ROOT / ".course" / "jupyter" / f"lab-{port}.log").unlink()
    if answer != "42":
        raise RuntimeError(f"expected 42 from the cell, got {answer}")
    return f"it answers after {seconds:.1f} s, and a kernel ran a cell", ""


def serve() -> None:
    """JupyterLab until it is stopped; its address is printed."""
    from course_utils.setup.lab import choose_port, run_lab

    try:
        run_lab(
            Path(sys.executable),
            ROOT,
            target="",
            port=choose_port(0),
            browser=False,
            venv="--no-venv" not in sys.argv,
        )
    except (SetupError, OSError) as error:
        sys.exit(str(error))


async def _run_a_cell(address: str, token: str) -> str:
    """What a browser does: open the page, start a kernel, send it a cell."""
    from tornado.httpclient import AsyncHTTPClient, HTTPRequest
    from tornado.websocket import websocket_connect

    headers = {"Authorization": f"token {token}"}
    client = AsyncHTTPClient()
    await client.fetch(f"{address}/lab", headers=headers)
    kernels = f"{address}/api/kernels"
    made = await client.fetch(kernels, method="POST", body="{}", headers=headers)
    one = f"{kernels}/{json.loads(made.body)['id']}"
    channels = one.replace("http", "ws", 1) + "/channels"
    wire = await websocket_connect(HTTPRequest(channels, headers=headers))
    await wire.write_message(json.dumps(_execute("import course_utils\n6 * 7")))
    answer = None
    while answer is None:
        text = await wire.read_message()
        if text is None:
            raise RuntimeError("JupyterLab cut the connection to the kernel")
        message = json.loads(text)
        content = message["content"]
        if message["msg_type"] == "error":
            answer = f"{content['ename']}: {content['evalue']}"
        elif message["msg_type"] == "execute_result":
            answer = content["data"]["text/plain"]
    wire.close()
    await client.fetch(one, method="DELETE", headers=headers)
    return answer


def _execute(source: str) -> dict:
    """An execute_request (jupyter-client's manual, "Messaging in Jupyter")."""
    kind = {"msg_id": "1", "msg_type": "execute_request", "version": "5.3"}
    return {
        "channel": "shell",
        "header": {**kind, "session": "room", "username": "", "date": ""},
        "parent_header": {},
        "metadata": {},
        "content": {"code": source, "silent": False, "store_history": False},
        "buffers": [],
    }


@dataclass(frozen=True)
class Step:
    """Something that the lessons need, tried for real."""

    topic: str
    seconds: float  # its limit
    does: Callable[[], tuple[str, str]]
    fix: str  # what to do if it fails


_ANEW = "remove the folder .venv, then: python3 -m course_utils start"
STEPS = (
    Step("lesson data", 15.0, read_digits, f"scikit-learn is damaged: {_ANEW}"),
    Step("virtual GPUs", 15.0, use_virtual_gpu, _ANEW),
    Step(
        "ranks",
        25.0,
        use_ranks,
        "close other programs, let the firewall, VPN or virus scanner allow local "
        "connections, and run it again",
    ),
    Step(
        "JupyterLab",
        25.0,
        use_jupyter,
        "let the firewall, VPN or virus scanner allow programs to listen on 127.0.0.1, "
        "and run it again",
    ),
)


def main(topic: str) -> None:
    """Perform a step here; the last line of the output is its result, as JSON."""
    (step,) = (step for step in STEPS if step.topic == topic)
    try:
        fact, brief = step.does()
        failed = False
    except Exception as error:
        # A RanksError has many lines, of which the first says what happened.
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        fact, brief, failed = words, "", True
    print(f"\n{json.dumps({'fact': fact, 'brief': brief, 'failed': failed})}")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        main(sys.argv[1])
