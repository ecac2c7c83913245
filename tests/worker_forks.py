"""Run a worker script on n ranks, in forks of one process that has imported torch.

Each rank gets the environment that torchrun would give it, and starts at once. A rank
that fails has the others ended, as by torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from course_utils import ROOT

LIMIT = 300  # seconds: then a run has failed

# A job is a JSON line on stdin: [ranks, arguments of each run, code to run first].
# The answer: [exit codes, stdout of each rank, stderr of each rank].
FORKS = """
import contextlib, json, os, runpy, signal, sys, tempfile, traceback
import torch, torch._dynamo, torch.distributed as dist
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import torch.distributed.nn.functional
from course_utils.measure import data
from course_utils.ranks.loopback import bind_stores_to_loopback
from course_utils.ranks.team import hold_port

bind_stores_to_loopback()
torch.set_num_threads(1)
with torch.device("meta"):  # what is imported for it takes a second
    torch.nn.init.normal_(torch.nn.Linear(2, 2).weight)

def run_rank(rank, ranks, ports, runs, code, files):
    for number, file in enumerate(files, 1):
        os.dup2(file.fileno(), number)
    if ranks > 1:  # one rank runs as plain `python script.py` does
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    status = 0
    for number, (port, arguments) in enumerate(zip(ports, runs, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        sys.argv[:] = [WORKER, *arguments]
        try:
            if number == 0:
                exec(code, {"rank": rank})
            runpy.run_path(WORKER, run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        if status and ranks > 1:
            break
        if dist.is_initialized():
            dist.destroy_process_group()
    os._exit(status)

WORKER, LIMIT = sys.argv[1], int(sys.argv[2])
for line in sys.stdin:
    ranks, runs, code = json.loads(line)
    held = contextlib.ExitStack()
    ports = [hold_port(held) for _ in runs]
    files = [[tempfile.TemporaryFile("w+") for _ in range(2)] for _ in range(ranks)]
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            run_rank(rank, ranks, ports, runs, code, files[rank])
    codes, left = {}, set(pids)

    def give_up(*_):
        for pid in left:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in left:
                os.kill(other, signal.SIGTERM)
    signal.alarm(0)
    held.close()
    texts = []
    for kind in range(2):
        for pair in files:
            pair[kind].seek(0)
        texts.append([pair[kind].read() for pair in files])
    print(json.dumps([[codes[pid] for pid in pids], *texts]), flush=True)
"""


@dataclass
class Run:
    """What came of it, rank by rank."""

    codes: list[int]
    out: list[str]
    err: list[str]

    @property
    def metrics(self) -> list[dict]:
        """The JSON lines of rank 0."""
        return [json.loads(line) for line in self.out[0].splitlines()]

    def curve(self, name: str = "loss", **where: Any) -> list:
        """One value of each JSON line, or of those that have these values."""
        return [m[name] for m in self.metrics if where.items() <= m.items()]


class Forks:
    """A process that runs one worker script in its forks."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def __call__(self, ranks: int, *arguments: object, code: str = "") -> Run:
        """Run the script on n ranks; `code` runs first, on each, with its `rank`."""
        return self.several(ranks, [arguments], code=code)

    def several(self, ranks: int, runs: list, code: str = "") -> Run:
        """Run the script with some arguments after the other, on the same ranks."""
        words = [[str(word) for word in arguments] for arguments in runs]
        self._process.stdin.write(json.dumps([ranks, words, code]) + "\n")
        self._process.stdin.flush()
        return Run(*json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def forks_of(worker: str) -> Iterator[Forks]:
    """Import all that is needed, once, for any number of runs of a worker."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, worker, str(LIMIT)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forks(process)
        process.stdin.close()
