"""Run the course's scripts on ranks that are there already, one run after the other.

Each rank finds what torchrun would have told it, and joins the group by itself. What
the scripts do under the real torchrun is in ``test_torchrun.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks_support import settle

from course_utils.ranks import Ranks, RanksError
from course_utils.ranks.launch import WORKERS
from course_utils.ranks.team import hold_port

WAITS = "waits for rank 0 to say why"


class Run(NamedTuple):
    """What came of it, rank by rank."""

    out: list[str]
    err: list[str]
    end: list[str]  # what the script has exited with
    noted: list[Any]  # what `before` has returned

    @property
    def metrics(self) -> list[dict]:
        """The JSON lines of rank 0, in a run that succeeded. The others print none."""
        assert set(self.end) == {""} and set(self.out[1:]) <= {""}, self
        return [json.loads(line) for line in self.out[0].splitlines()]

    def curve(self, name: str = "loss") -> list:
        return [line[name] for line in self.metrics]

    @property
    def mistake(self) -> str:
        """What rank 0 says about a mistake, in a run that has printed nothing."""
        assert set(self.out) == {""} and set(self.end[1:]) <= {WAITS}, self
        return self.end[0]


def run_on_rank(script: str, words: list, port: int, before: Callable | None) -> tuple:
    """Run a script as `python script words` would, and undo what it has changed."""
    out, err, end, sleep = io.StringIO(), io.StringIO(), "", time.sleep
    err.fileno = sys.__stderr__.fileno  # `record` wants a file
    with contextlib.ExitStack() as stack:

        def replace(place: Any, name: str, new: Any) -> None:
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, new)

        def sleep_or_end(seconds: float) -> None:
            sys.exit(WAITS) if seconds == 30 else sleep(seconds)

        os.environ["MASTER_PORT"] = str(port)
        replace(time, "sleep", sleep_or_end)
        replace(sys, "argv", [script, *words])
        noted = before(replace) if before else None
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            end = str(error.code)
    return out.getvalue(), err.getvalue(), end, noted


@contextlib.contextmanager
def ranks_for_scripts() -> Iterator[Callable[..., Run]]:
    """A function: run a script on n ranks, with these words as its arguments.

    `before(replace)` runs first on each rank. With `replace(module, name, value)` it
    changes what the script finds, until the run ends.
    """
    with contextlib.ExitStack() as stack:
        started: dict[int, Ranks] = {}

        def start(n: int) -> Ranks:
            ranks = Ranks(n, init=False, output="grouped", quiet=True, timeout=120)
            return stack.enter_context(ranks)

        def run(n: int, script: str, *words: object, before: Any = None) -> Run:
            if not started:  # each rank would import for a second otherwise
                settle(started.setdefault(1, start(1)))
            ranks = started.get(n) or started.setdefault(n, start(n))
            path = str(WORKERS / f"{script}.py")
            try:
                # A new one: what served the last meeting may still be there.
                port = hold_port(stack)
                words = list(map(str, words))
                results = ranks.run(run_on_rank, path, words, port, before)
            except RanksError:
                ranks.restart()
                raise
            return Run(*map(list, zip(*results, strict=True)))

        yield run


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As the ranks have: more threads add up in another order, and slowly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
