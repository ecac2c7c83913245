"""Run a script on several ranks from a notebook, as ``torchrun`` would.

    from course_utils import launch

    result = launch("train_ddp", nproc=2, epochs=3)
    result.metrics[-1]["test_accuracy"]

A worker is a script for ``torchrun``: a file in ``course_utils/workers``, or the
learner's own. :func:`launch` runs it as ``__main__`` on ranks of its own, with the
environment variables that torchrun sets, and prints the command that does the same in a
terminal. What goes wrong is told as in a cell: which rank, on which line, and why.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_utils import ROOT, STATE, shown
from course_utils.ranks.driver import (
    Ranks,
    number_of_ranks,
    one_of,
    positive_seconds,
)
from course_utils.ranks.output import Printer, choose_output
from course_utils.ranks.report import RanksError

WORKERS = ROOT / "course_utils" / "workers"
KEPT_LINES = 100_000  # of each rank, in LaunchResult.output
LAST_LINES = 12  # of the rank that failed, in the message of a quiet launch
# What torchrun sets beside what every rank has, and what is a notebook's own.
SET = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(STATE / "torch/inductor")}
UNSET = ("MPLBACKEND", "FORCE_COLOR", "CLICOLOR_FORCE")


@dataclass(frozen=True, repr=False)
class LaunchResult:
    """A launch that succeeded.

    Attributes:
        command: What does the same in a terminal, in the clone's folder.
        metrics: The JSON objects among the lines that the ranks printed, as
            dictionaries; rank by rank, each rank's in order.
        output: All lines that the ranks printed, rank by rank (of an endless output the
            last 100,000 of each).
        seconds: From the start of the ranks to their end.
    """

    command: str
    metrics: list[dict]
    output: str
    seconds: float

    def __repr__(self) -> str:
        # The same on every run, so that notebooks can show it.
        return f"<LaunchResult of {self.command!r}: {len(self.metrics)} metrics lines>"


class LaunchError(RanksError):
    """A launch that did not succeed. Its text says what happened on which rank.

    It has the attributes of :class:`RanksError`, and:

    Attributes:
        output: What the ranks printed until then, as in :class:`LaunchResult`.
        metrics: Their JSON lines until then.
    """

    output = ""
    metrics: list[dict] = []


def launch(
    worker: str | Path,
    *args: object,
    nproc: int = 2,
    timeout: float = 300.0,
    show: str = "all",
    quiet: bool = False,
    **options: object,
) -> LaunchResult:
    """Run a worker script on ``nproc`` ranks of this machine and wait for its end.

    The command that does the same in a terminal is printed first. Like it, the ranks
    run in the clone's folder: relative paths in their arguments begin there. They have
    no input, and one OpenMP thread each unless OMP_NUM_THREADS says otherwise.

    Args:
        worker: The name of a file in ``course_utils/workers`` ("train_ddp"), or the
            path of a script, looked up in the current folder and then in the clone.
        *args: Arguments of the script, as they are.
        nproc: The number of ranks: torchrun's ``--nproc-per-node``.
        timeout: Seconds after which the launch is stopped.
        show: Which of the ranks' lines are printed: "all"; "epochs", where a line of
            metrics becomes a short line without the times, which is the same on every
            run; or "none".
        quiet: Print nothing at all, not even the command.
        **options: More arguments: ``epochs=3`` becomes ``--epochs 3``, ``resume=True``
            ``--resume``, ``sizes=[8, 16]`` ``--sizes 8 16``; None and False are left
            out. What collides with a name above goes in ``*args``.

    Raises:
        LaunchError: There is no such worker, a rank failed, or the time was up.
        ValueError: An argument makes no sense.
        KeyboardInterrupt: The cell was interrupted.

    However it ends, no process is left and no file of its own. Calls such as ``irecv``
    that nobody waited for are named in the error, or in a ``RequestWarning``.

    Cost: that of ``Ranks(nproc)``, half a second once torch is imported.
    """
    number_of_ranks("nproc", nproc)
    positive_seconds(timeout)
    one_of("show", show, "all", "epochs", "none")
    path = _find(worker)
    words = _arguments(args, options)
    command = ["torchrun", "--nproc-per-node", str(nproc), shown(path), *words]
    if not quiet:
        print(shlex.join(command), flush=True)
    started = time.monotonic()
    lines = _Lines(nproc, "none" if quiet else show)
    try:
        with _ScriptRanks(nproc, timeout=timeout, init=False, quiet=True) as ranks:
            ranks.lines = lines
            ranks.run(run_script, str(path), shown(path), words)
    except RanksError as error:
        if error.cause == "interrupt":
            raise KeyboardInterrupt("the launch was interrupted") from None
        raise _launch_error(error, lines, quiet) from None
    seconds = time.monotonic() - started
    return LaunchResult(shlex.join(command), lines.metrics(), lines.text(), seconds)


def run_script(path: str, name: str, words: list[str]) -> None:
    """On a rank: run the script as the main program, and end it as Python would.

    Args:
        path: where it is.
        name: what it is called by, ``sys.argv[0]``.
        words: its arguments.
    """
    from torch.distributed import set_debug_level_from_env

    set_debug_level_from_env()  # torch was imported before the variable was set
    os.chdir(ROOT)
    for variable in UNSET:
        os.environ.pop(variable, None)
    for variable, value in SET.items():
        os.environ.setdefault(variable, value)
    sys.argv[:] = [name, *words]
    sys.path.insert(0, os.path.dirname(path))
    atexit._clear()
    with own_exit() as ended:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        wait_for_threads()
        ended.set()
        atexit._run_exitfuncs()
    gc.collect()


@contextlib.contextmanager
def own_exit() -> Iterator[threading.Event]:
    """``os._exit`` ends the script and not the rank, which has to say so.

    Yields:
        To be set when the script has ended: an exit function may call it, too.
    """
    pid, exit_process, ended = os.getpid(), os._exit, threading.Event()

    def exit_script(code: int) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if os.getpid() != pid or not in_main_thread:
            exit_process(code)
        if not ended.is_set():
            raise SystemExit(code)

    os._exit = exit_script
    try:
        yield ended
    finally:
        os._exit = exit_process


def wait_for_threads() -> None:
    """Wait for the threads of the script, as Python does at its end."""
    threading._shutdown()


class _ScriptRanks(Ranks):
    """Ranks that live for one script."""

    work = "script"
    lines: _Lines

    def _printer(self, chosen: list[int]) -> Printer:
        return self.lines

    def _what_now(self, restarted: list[int]) -> str:
        return ""

    def _restart(self, which: list[int]) -> None:
        """Nothing runs after the script."""


class _Lines(Printer):
    """Prints the lines of a script's ranks, and keeps them."""

    def __init__(self, n: int, show: str) -> None:
        super().__init__(
            list(range(n)), "none" if show == "none" else choose_output("auto")
        )
        self.show_epochs = show == "epochs"
        self.kept = {rank: deque(maxlen=KEPT_LINES) for rank in range(n)}
        self.objects: dict[int, list[dict]] = {rank: [] for rank in range(n)}

    def shown(self, rank: int, line: str) -> str:
        self.kept[rank].append(line)
        metrics = _json_object(line)
        if metrics is None:
            return line
        self.objects[rank].append(metrics)
        return _without_times(metrics) if self.show_epochs else line

    def metrics(self) -> list[dict]:
        return [metrics for of_rank in self.objects.values() for metrics in of_rank]

    def text(self) -> str:
        return "".join(
            f"[rank {rank}] {line}\n"
            for rank, lines in self.kept.items()
            for line in lines
        )


def _launch_error(error: RanksError, lines: _Lines, quiet: bool) -> LaunchError:
    text = str(error)
    if quiet and error.root is not None:
        last = list(lines.kept[error.root.rank])[-LAST_LINES:]
        text += "".join(f"\n  {line}" for line in ["Its last lines:", *last] if last)
    launch_error = LaunchError(
        text,
        cause=error.cause,
        failures=error.failures,
        root=error.root,
        finished=error.finished,
    )
    launch_error.output, launch_error.metrics = lines.text(), lines.metrics()
    return launch_error


# ------------------------------------------------------------------ what is asked for
def _find(worker: str | Path) -> Path:
    """The script that is meant, or a :class:`LaunchError` with those there are."""
    if not isinstance(worker, (str, Path)):
        raise TypeError(
            f'launch() needs a name or a path, such as "train_ddp", not {worker!r}'
        )
    if str(worker).endswith(".ipynb"):
        raise LaunchError(
            f"{worker} is a notebook, and every rank runs a Python script. Put the "
            "code into a file, such as my_script.py, and launch that."
        )
    if str(worker) in workers():
        return WORKERS / f"{worker}.py"
    for folder in (Path.cwd(), ROOT):
        if (folder / worker).is_file():
            return (folder / worker).resolve()
    raise LaunchError(
        f"there is no worker or script {str(worker)!r}. The course's workers: "
        f"{', '.join(workers())}. A script of your own is named by its path, such as "
        '"my_script.py".'
    )


def workers() -> list[str]:
    """The names of the course's scripts; the other files there are what they share."""
    is_script = '\nif __name__ == "__main__":'
    files = (f for f in sorted(WORKERS.glob("*.py")) if is_script in f.read_text())
    return [file.stem for file in files]


def _arguments(args: tuple, options: dict) -> list[str]:
    """Python values as words of a command line."""
    words = [_word(value) for value in args]
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, (list, tuple)):
            words += [_word(item) for item in value]
        elif value is not True:
            words.append(_word(value))
    return words


def _word(value: object) -> str:
    return shown(value) if isinstance(value, Path) else str(value)


# ----------------------------------------------------------------- lines with metrics
def _json_object(line: str) -> dict | None:
    """The line as a dictionary, if it is a JSON object."""
    if line.startswith("{"):
        try:
            return json.loads(line)
        except ValueError:
            pass
    return None


def _without_times(metrics: dict) -> str:
    """``epoch 1   loss 1.575   test_accuracy 0.843``: the same on every run."""
    words = []
    for name, value in metrics.items():
        if name in ("epoch", "step"):
            words.append(f"{name} {value}")
        elif isinstance(value, float) and "second" not in name and "time" not in name:
            words.append(f"{name} {value:.3f}")
    return "   ".join(words)
