"""Start a worker script on several ranks from a notebook, as ``torchrun`` does.

    from course_utils import launch

    result = launch("train_ddp", nproc=2, epochs=3)
    result.metrics[-1]["test_accuracy"]

A worker is a script for ``torchrun``: the files in this folder, or the learner's own.
:func:`launch` runs it with ``torch.distributed.run``, which is what ``torchrun`` is,
and prints the command that does the same in a terminal. It differs in four things: it
listens on loopback only, ``init_process_group`` returns when all ranks are through it
(so that one that ends at once breaks no other), a failure is one exception in the
notebook that says what happened on which rank, and nothing is left behind, however it
ends.

This module does not import torch: the ranks do.
"""

import codecs
import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from course_utils import ROOT, STATE, shown
from course_utils.ranks import report
from course_utils.ranks.driver import (
    MAX_RANKS,
    interrupts_held,
    loopback_interface,
)
from course_utils.ranks.output import LogFilter, choose_output, is_c10d_log
from course_utils.ranks.processes import seconds_of_work
from course_utils.workers import _runner
from course_utils.workers._runner import MARK, is_dead, kill_tree

FOLDER = Path(__file__).resolve().parent
SHOWN_LINES, LAST_LINES = 1000, 100  # of one stream; what is between is left out
KEPT_LINES = 100_000  # of one stream, in LaunchResult.output
ERROR_LINES = 12  # of stderr, in the message of a LaunchError
SECONDS_TO_ANSWER = 1.0  # for ranks that are asked where they are
SECONDS_OF_GRACE = 5.0  # for ranks that do not go when another one has failed
SECONDS_TO_END = 2.0  # for the agent, which kills what is below it and then ends
# Ranks that have printed and computed nothing for so long are asked where they are.
# They are looked at so often; less of a processor than this is not computing.
SECONDS_STILL, SECONDS_OF_LOOK, STILL_CPU = 8.0, 1.0, 0.05

_NAMES = ("out", "err")


class LaunchError(RuntimeError):
    """A launch that did not succeed. Its text says what happened on which rank.

    Attributes:
        cause: ``"raised"`` (a Python exception), ``"exited"`` (an exit code other
            than 0), ``"killed"`` (a signal), ``"timeout"`` (the time was up, or all
            ranks waited for each other), ``"torchrun"`` (it failed before or beside
            the ranks), or ``"usage"`` (nothing was started).
        rank: The rank that failed first, where one did.
        returncode: Its exit code; minus the signal if it was killed; else None.
        traceback: The lines of the worker that led to the exception, or "".
        output: What the ranks printed until then, as in :class:`LaunchResult`.
        metrics: Their JSON lines until then.
    """

    def __init__(
        self,
        message: str,
        *,
        cause: str = "usage",
        rank: int | None = None,
        returncode: int | None = None,
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.rank = rank
        self.returncode = returncode
        self.traceback = traceback
        self.output = ""
        self.metrics: list[dict] = []

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without the way it took through launch."""
        return [f"LaunchError: {self}"]


@dataclass(frozen=True, repr=False)
class LaunchResult:
    """A launch that succeeded.

    Attributes:
        command: What does the same in a terminal, in the clone's folder.
        metrics: The JSON objects among the lines that the ranks printed, as
            dictionaries; rank by rank, each rank's in order.
        output: All lines that the ranks printed, rank by rank, stdout before stderr
            (of an endless output the last 100,000 of each).
        seconds: From the start of torchrun to its end.
        returncode: torchrun's exit code: 0.
    """

    command: str
    metrics: list[dict]
    output: str
    seconds: float
    returncode: int = 0

    def __repr__(self) -> str:
        # The same on every run, so that notebooks can show it.
        return f"<LaunchResult of {self.command!r}: {len(self.metrics)} metrics lines>"


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
        nproc: The number of ranks, 1 to 256: torchrun's ``--nproc-per-node``.
        timeout: Seconds after which the launch is stopped.
        show: Which of the ranks' lines are printed: "all"; "epochs", where a line of
            metrics becomes a short line without the times, which is the same on every
            run; or "none". Lines appear as they come, with ``[rank r]`` in front.
            Where outputs are compared (CI, nbval) all but those of rank 0 wait for
            the end, so that their order is always the same.
        quiet: Print nothing at all, not even the command.
        **options: More arguments: ``epochs=3`` becomes ``--epochs 3``, ``resume=True``
            ``--resume``, ``sizes=[8, 16]`` ``--sizes 8 16``; None and False are left
            out. What collides with a name above goes in ``*args``.

    Raises:
        LaunchError: There is no such worker, a rank failed, or the time was up.
        ValueError: An argument makes no sense.
        KeyboardInterrupt: The cell was interrupted.

    However it ends, no process is left and no file of its own. The first line of a
    worker comes after about 2 s, most of them for ``import torch``. On macOS, and
    beside a GPU, every rank imports it: 6 s for 2 ranks on 2 cores, 9 s for 4.
    Ranks that wait for each other are stopped after some ten seconds. What calls such
    as ``irecv`` were never waited for is in the error, or in a ``RequestWarning``.
    """
    _check(nproc, timeout, show)
    script = shown(_find(worker))
    arguments = _arguments(args, options)
    command = shlex.join(
        ["torchrun", "--nproc-per-node", str(nproc), script, *arguments]
    )
    if not quiet:
        print(command, flush=True)
    if os.name == "nt":
        raise LaunchError(
            "launch() needs Linux or macOS. On Windows, type the command in a "
            "terminal, in the folder of the course."
        )
    job = _Job(nproc, show="none" if quiet else show)
    try:
        job.run(script, arguments, timeout)
    except LaunchError as error:
        error.output, error.metrics = job.output(), job.metrics()
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the launch was interrupted and stopped") from None
    report.warn_of_requests(job.unwaited())
    return LaunchResult(command, job.metrics(), job.output(), job.seconds)


# ------------------------------------------------------------------ what is asked for
def _check(nproc: int, timeout: float, show: str) -> None:
    whole = isinstance(nproc, int) and not isinstance(nproc, bool)
    if not whole or not 1 <= nproc <= MAX_RANKS:
        raise ValueError(
            f"nproc is the number of ranks, 1 to {MAX_RANKS}, not {nproc!r}"
        )
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, not {timeout!r}")
    if show not in ("all", "epochs", "none"):
        raise ValueError(f'show is "all", "epochs" or "none", not {show!r}')


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
    names = sorted(file.stem for file in FOLDER.glob("[!_]*.py"))
    if str(worker) in names:
        return FOLDER / f"{worker}.py"
    for folder in (Path.cwd(), ROOT):
        if (folder / worker).is_file():
            return (folder / worker).resolve()
    raise LaunchError(
        f"there is no worker or script {str(worker)!r}. The course's workers: "
        f"{', '.join(names)}. A script of your own is named by its path, such as "
        '"my_script.py".'
    )


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


# ------------------------------------------------------------------------ a launch
@dataclass
class _Rank:
    """What is known of one rank."""

    number: int
    pid: int | None = None
    end: dict = field(default_factory=dict)  # what it said about its own end
    metrics: list[dict] = field(default_factory=list)
    unwaited: list[dict] = field(default_factory=list)  # its requests, see report
    stack: list[str] | None = None  # where it is or was, as faulthandler writes it

    def kill(self) -> None:
        """Kill it with what it has started: torchrun makes it a group's leader."""
        if self.pid:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


class _Job:
    """One run of torchrun: its processes, what they print, how they end."""

    def __init__(self, nproc: int, show: str) -> None:
        self.ranks = [_Rank(number) for number in range(nproc)]
        self.show = show
        self.stream = choose_output("auto") == "stream"
        self.seconds = 0.0
        self.outputs = {
            (rank.number, name): _Lines() for rank in self.ranks for name in _NAMES
        }
        self.agent = {name: b"" for name in _NAMES}
        self.deadlock = False

    def run(self, script: str, arguments: list[str], timeout: float) -> None:
        """Start, follow and clean up; a failure is a :class:`LaunchError`."""
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            theirs = []  # the ends of the pipes that the ranks write into
            for key in self.outputs:
                ours, end = os.pipe()
                stack.callback(os.close, ours)
                theirs.append(end)
                selector.register(ours, selectors.EVENT_READ, key)
            try:
                process = _start(script, arguments, theirs)
            finally:
                for end in theirs:
                    os.close(end)
            try:
                for name, pipe in (("out", process.stdout), ("err", process.stderr)):
                    stack.enter_context(pipe)
                    selector.register(pipe, selectors.EVENT_READ, (None, name))
                in_time = self._follow(selector, process, start + timeout)
                if not in_time and not self.deadlock:
                    self._ask_where(selector)
            finally:
                self._clean_up(process)
                self.seconds = time.monotonic() - start
            while self._read(selector, 0):
                pass
        self._finish_output()
        if not in_time:
            raise self._too_slow(timeout)
        if process.returncode != 0:
            raise self._failure(process.returncode)

    def _follow(self, selector, process: subprocess.Popen, deadline: float) -> bool:
        """Read until the agent has ended. Returns whether it has, in time."""
        failed_at = None
        still = _Stillness(self.ranks)
        while process.poll() is None:
            now = time.monotonic()
            if now > deadline:
                return False
            if still.is_long(now):
                self._ask_where(selector)
                self.deadlock = still.is_deadlock()
                if self.deadlock:
                    return False
                for rank in self.ranks:
                    rank.stack = None
            if failed_at is None and any(map(_has_failed, self.ranks)):
                failed_at = now
            # torchrun sends SIGTERM to the others, and waits 30 s for them.
            if failed_at is not None and now > failed_at + SECONDS_OF_GRACE:
                for rank in self.ranks:
                    if rank.pid and not is_dead(rank.pid):
                        rank.end = rank.end or {"kind": "ended"}
                        rank.kill()
            came = self._read(selector, min(deadline - now, 0.1))
            if not all(map(is_c10d_log, came)):
                still.begin_again()
        return True

    def _ask_where(self, selector) -> None:
        """The time is up: have each rank write down its Python stack."""
        asked = [rank for rank in self.ranks if rank.pid and not is_dead(rank.pid)]
        for rank in asked:
            rank.stack = []
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        while time.monotonic() < deadline and not all(map(_is_complete, asked)):
            self._read(selector, 0.05)

    def _clean_up(self, process: subprocess.Popen) -> None:
        """End every process of this launch. After a normal end there is none left."""
        # A second interrupt, or the kernel's end, must find nothing half done.
        with interrupts_held(raise_after=True):
            process.stdin.close()  # the agent then kills what is below it
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
            if process.wait() < 0:  # somebody killed the agent, before it could
                for rank in self.ranks:
                    rank.kill()

    # ---------------------------------------------------------------- what they print
    def _read(self, selector, seconds: float) -> list[bytes]:
        """Take in what has come, waiting at most so long for the first of it."""
        came = []
        for key, _ in selector.select(seconds):
            data = os.read(key.fd, 1 << 16)
            came.append(data)
            number, name = key.data
            if not data:
                selector.unregister(key.fileobj)
            elif number is None:
                self.agent[name] += data
            else:
                for line in self.outputs[key.data].feed(data):
                    self._line(self.ranks[number], name, line)
        return came

    def _line(self, rank: _Rank, name: str, line: str) -> None:
        """One line that a rank has written."""
        text, mark, message = line.partition(MARK.decode())
        told = _json_object(message) if mark and name == "err" else None
        if told is not None:
            rank.pid = told.get("pid", rank.pid)
            rank.end = told if "kind" in told else rank.end
            if "request" in told:
                rank.unwaited.append(told["request"])
            if not text:
                return
            line = text
        if name == "err" and line.startswith("Fatal Python error: "):
            rank.stack = []  # it crashes in C code, and faulthandler says where
        if name == "err" and rank.stack is not None:
            rank.stack.append(line)
            return
        metrics = _json_object(line) if name == "out" else None
        if metrics is not None:
            rank.metrics.append(metrics)
            if self.show == "epochs":
                line = _without_times(metrics)
        lines = self.outputs[rank.number, name]
        lines.keep(line)
        if self.stream or (rank.number == 0 and name == "out"):
            self._print(rank.number, name, lines.next_to_show())

    def _finish_output(self) -> None:
        """Print what has waited for the end, rank by rank."""
        for (number, name), lines in self.outputs.items():
            for line in lines.feed(b"\n") if lines.partial else ():
                self._line(self.ranks[number], name, line)
            self._print(number, name, lines.next_to_show())
            self._print(number, name, lines.last_to_show())

    def _print(self, number: int, name: str, lines: list[str]) -> None:
        if lines and self.show != "none":
            file = sys.stdout if name == "out" else sys.stderr
            file.write("".join(f"[rank {number}] {line}\n" for line in lines))
            file.flush()

    def output(self) -> str:
        """All that the ranks have printed, rank by rank."""
        return "".join(
            f"[rank {number}] {line}\n"
            for (number, _), lines in self.outputs.items()
            for line in lines.kept
        )

    def metrics(self) -> list[dict]:
        """All metrics that the ranks have printed, rank by rank."""
        return [metrics for rank in self.ranks for metrics in rank.metrics]

    # -------------------------------------------------------------------- how it ended
    def _failure(self, returncode: int) -> LaunchError:
        """The error for a launch whose agent ended with this exit code."""
        try:
            codes = dict(json.loads(self.agent["out"]))
        except ValueError:  # it has not come so far as to say which ranks failed
            log = self.agent["err"].decode("utf-8", "replace").splitlines()
            how = f"exit code {returncode}"
            if returncode < 0:
                how = f"killed by {_signal_name(-returncode)}"
            text = f"torchrun itself failed ({how})"
            return LaunchError(_with_lines(text, log[-ERROR_LINES:]), cause="torchrun")
        rank = self._first_to_fail(codes)
        # What it said counts: torchrun may have ended it before it came to its end.
        code = rank.end.get("code", codes.get(rank.number))
        about = {"rank": rank.number, "returncode": code}
        who, kind = f"rank {rank.number}", rank.end.get("kind")
        message = rank.end.get("message", "")
        if kind == "raised":
            text = f"{who} raised {rank.end['error']}: {message}".splitlines()[0]
            if rank.end["peer"]:
                gone = [r for r in self.ranks if r.end.get("kind") == "finished"]
                text = f"{who} lost the connection to another rank"
                if gone:
                    names = ", ".join(str(r.number) for r in gone)
                    text += f". Finished by then: {names}. Do all ranks call the same "
                    text += "collectives, equally often?"
            text += self._about_requests()
            trace = rank.end["traceback"]
            return LaunchError(
                f"{text}\n\n{trace}", cause="raised", traceback=trace, **about
            )
        if code < 0 and kind != "exited":
            text = f"{who} was killed by {_signal_name(-code)}"
            if code == -signal.SIGKILL:
                text += ". A system that runs out of memory does that"
            if rank.stack:
                text += f". It was {_where(rank.stack)}"
            if cause := report.known_cause(report.exit_text(code)):
                text += f". {cause}"
            return LaunchError(text, cause="killed", **about)
        text = f"{who} ended with exit code {code}"
        if kind != "exited":
            text += ", without a Python exception (by os._exit, or from C code)"
        elif message:
            return LaunchError(f"{text}: {message}", cause="exited", **about)
        errors = list(self.outputs[rank.number, "err"].kept)[-ERROR_LINES:]
        return LaunchError(_with_lines(text, errors), cause="exited", **about)

    def unwaited(self) -> list[report.Unwaited]:
        """The requests that the ranks have given up without a wait."""
        return [
            report.Unwaited(rank.number, **request)
            for rank in self.ranks
            for request in rank.unwaited
        ]

    def _about_requests(self) -> str:
        """They may have caused what went wrong: lines for a message, or nothing."""
        return "".join(f"\n  {line}" for line in report.request_lines(self.unwaited()))

    def _first_to_fail(self, codes: dict[int, int]) -> _Rank:
        """The rank whose failure explains those of the others."""

        def order(rank: _Rank) -> int:
            kind, code = rank.end.get("kind"), codes.get(rank.number, 0)
            if kind == "raised":
                return 5 if rank.end["peer"] else 2
            if kind == "exited":
                return 3
            if kind == "ended":
                return 6
            # A connection that breaks can abort a process, and torchrun ends with
            # SIGTERM whoever is left. Other deaths have causes of their own.
            return {0: 7, -signal.SIGTERM: 6, -signal.SIGABRT: 4}.get(code, 1)

        lowest = min(map(order, self.ranks))
        suspects = [rank for rank in self.ranks if order(rank) == lowest]
        seen = list(codes)  # in the order in which torchrun has noticed
        suspects.sort(key=lambda rank: seen.index(rank.number) if not rank.end else 0)
        first = min(suspects, key=lambda rank: rank.end.get("time", 0))
        # If all fail in the same way, which one was faster is chance: take the lowest.
        same = (first.end.get("error"), first.end.get("message"))
        return next(
            rank
            for rank in suspects
            if (rank.end.get("error"), rank.end.get("message")) == same
        )

    def _too_slow(self, timeout: float) -> LaunchError:
        """The error for a launch that has not ended in time."""
        text = f"not finished after {timeout:g} s (timeout={timeout:g}): stopped."
        if self.deadlock:
            text = "deadlock: nothing moves, and nothing will. Stopped."
        text += self._about_requests()
        for rank in self.ranks:
            if rank.pid is None:
                where = "had not started"
            elif rank.end.get("kind") == "finished":
                where = "had finished"
                if _waits_for_threads(rank.stack or []):
                    where += " its script, but a thread that it has started runs on. "
                    where += "Wait for its end, or start it with daemon=True"
            elif rank.stack is None:
                where = "had failed"
            else:
                where = f"was {_where(rank.stack)}"
            text += f"\n  rank {rank.number} {where}"
        return LaunchError(text, cause="timeout")


class _Stillness:
    """Watches over ranks that do nothing, and says whether they ever will."""

    def __init__(self, ranks: list[_Rank]) -> None:
        self.ranks = ranks
        self.started = self.looked = time.monotonic()
        self.spent: dict[int, float] = {}  # rank -> seconds of processor time, then
        self.begin_again()

    def begin_again(self) -> None:
        """They are not still, or not any more."""
        self.since = time.monotonic()

    def is_long(self, now: float) -> bool:
        """Have all that run done nothing for ``SECONDS_STILL``?"""
        if now < self.looked + SECONDS_OF_LOOK:
            return False
        pids = {rank.number: rank.pid for rank in self.ranks if rank.pid}
        spent, before = seconds_of_work(pids), self.spent
        most = STILL_CPU * (now - self.looked)
        self.looked, self.spent = now, spent
        begun = len(pids) == len(self.ranks)
        if not begun or any(
            s - before.get(rank, 0.0) > most for rank, s in spent.items()
        ):
            self.since = now
        return now > self.since + SECONDS_STILL

    def is_deadlock(self) -> bool:
        """Is each of them, where it says it is, in a call that waits for others?

        If not, it begins again. Ranks that may find each other get more time.
        """
        running = [rank for rank in self.ranks if not is_dead(rank.pid)]
        frames = [report.frames_of_dump("\n".join(r.stack or [])) for r in running]
        if not frames or not all(map(report.is_waiting, frames)):
            self.begin_again()
            return False
        patience = report.patience(frames, self.since - self.started)
        return time.monotonic() >= self.since + patience


class _Lines:
    """The bytes of one stream of one rank, cut into lines."""

    def __init__(self) -> None:
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)
        self.partial = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._log = LogFilter()
        self._waiting: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._count = 0

    def feed(self, data: bytes) -> list[str]:
        """Take in bytes; returns the lines that are complete with them."""
        *lines, self.partial = (self.partial + self._decoder.decode(data)).split("\n")
        # A progress bar writes over its line again and again. The last state counts.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        return [line for line in lines if not self._log.leaves_out(line)]

    def keep(self, line: str) -> None:
        """This line is to be shown, and is part of the output."""
        self.kept.append(line)
        self._count += 1
        (self._waiting if self._count <= SHOWN_LINES else self._last).append(line)

    def next_to_show(self) -> list[str]:
        """The lines to be shown now."""
        lines, self._waiting = self._waiting, []
        return lines

    def last_to_show(self) -> list[str]:
        """At the end: the last lines of many, and how many were left out."""
        left_out = self._count - SHOWN_LINES - len(self._last)
        lines, self._last = list(self._last), deque()
        return [f"... {left_out:,} lines left out ..."] * (left_out > 0) + lines


def _start(script: str, arguments: list[str], pipes: list[int]) -> subprocess.Popen:
    """Start the agent. ``pipes``: where each rank's stdout and stderr go."""
    loopback = loopback_interface()
    cache = str(STATE / "torch" / "inductor")  # DDP makes it, in /tmp if not here
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    environment |= os.environ | {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    for name in ("MPLBACKEND", "FORCE_COLOR", "CLICOLOR_FORCE"):  # a notebook's own
        environment.pop(name, None)
    plan = {
        "script": script,
        "arguments": arguments,
        "pipes": list(zip(pipes[::2], pipes[1::2], strict=True)),
    }
    return subprocess.Popen(
        # Unbuffered, as torchrun starts its ranks.
        [sys.executable, "-u", FOLDER / "_runner.py", "agent", json.dumps(plan)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=pipes,
        start_new_session=True,  # Jupyter interrupts a whole group: not this one
    )


def _json_object(line: str) -> dict | None:
    """The line as a dictionary, if it is a JSON object."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(line)
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


def _where(stack: list[str]) -> str:
    """Where a rank was, from what faulthandler has written."""
    frames = report.frames_of_dump("\n".join(stack))
    if where := report.find_where(frames):
        return f"in {where}"
    known = [f for f, *_ in frames if not f.startswith("<") and f != _runner.__file__]
    return "still starting" if known or not stack else "in code without Python lines"


def _waits_for_threads(stack: list[str]) -> bool:
    """Is this a Python that has come to its end, and waits for its threads?"""
    ends = ("threading.py", " in _shutdown")
    return any(all(end in line for end in ends) for line in stack)


def _has_failed(rank: _Rank) -> bool:
    """Whether it has said so, or is gone without a word."""
    if rank.end:
        return rank.end["kind"] != "finished"
    return rank.pid is not None and is_dead(rank.pid)


def _is_complete(rank: _Rank) -> bool:
    """Whether the rank has written its stack down to where it began."""
    last = rank.stack[-1] if rank.stack else ""
    return _runner.__file__ in last and last.endswith(" in <module>")


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def _with_lines(text: str, lines: list[str]) -> str:
    """The text and, if there are any, the lines below it."""
    return "\n  ".join([f"{text}:", *lines]) if lines else f"{text}."
