"""What ``launch`` starts: torchrun's agent, and a thin shell around each rank.

    notebook ── launch() ──► agent: torch.distributed.run ──► rank 0, rank 1, ...

``python _runner.py agent ...`` is torchrun with three differences. Its store listens on
loopback only. Each rank writes into its own two pipes, whose other ends the notebook
holds, so nothing is written to disk. And it ends, with everything below it, when the
notebook's kernel does.

``python _runner.py rank AGENT SCRIPT ...`` runs the script as ``python SCRIPT ...``
would, except that ranks leave ``init_process_group`` together, and says how it ended.
Such a message is one line of JSON behind a control character on the rank's stderr;
``launch`` takes it out of what it shows.

torchrun starts each rank as a fresh process, which imports torch again. On Linux
without a GPU the agent forks itself instead: torch is imported once, not once a rank.
(With RANKS_START_METHOD=spawn in the environment it does as torchrun does.)
"""

import ast
import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

MARK = b"\x1e"  # "record separator": begins a message from a rank to launch()
SECONDS_TO_SPEAK = 0.5  # for other ranks that fail at about the same time
LONGEST_TEXT = 20_000

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def kill_tree(pid: int, *, spare_root: bool = False) -> None:
    """Kill a process and all that it has started, directly or not; at once.

    With ``spare_root`` only what it has started.
    """
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        if not spare_root:
            root.suspend()  # what stands still starts nothing new
        for _ in range(100):  # a process may have forked while we were looking
            alive = [child for child in root.children(True) if not is_dead(child.pid)]
            if not alive:
                break
            for child in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            time.sleep(0.01)
        if not spare_root:
            root.kill()


def is_dead(pid: int) -> bool:
    """Whether no process of this number runs any more."""
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_agent(plan_text: str) -> int:
    """torchrun, on loopback. Prints the exit codes of ranks that failed, as JSON.

    ``plan_text`` is JSON: ``script``, ``arguments``, and ``pipes``, a pair of
    descriptors (stdout, stderr) for each rank.
    """
    plan = json.loads(plan_text)
    has_begun = _die_with_the_kernel()
    gc.disable()  # until all is imported, which takes a fifth less time then
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from course_utils.ranks.driver import hold_port
    from course_utils.ranks.loopback import bind_stores_to_loopback

    class Pipes(LogsSpecs):
        """Sends what each rank prints into its pipes."""

        root_log_dir = os.devnull

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            names = [[f"/dev/fd/{end}" for end in pair] for pair in plan["pipes"]]
            return LogsDest(
                stdouts={rank: names[rank][0] for rank in envs},
                stderrs={rank: names[rank][1] for rank in envs},
                error_files={rank: "" for rank in envs},
            )

    bind_stores_to_loopback()
    if _may_fork():
        _fork_ranks(plan["script"], len(plan["pipes"]))
    gc.enable()
    port_is_ours = contextlib.ExitStack()
    options = {
        "--nproc-per-node": len(plan["pipes"]),
        "--master-addr": "127.0.0.1",
        "--master-port": hold_port(port_is_ours),
        "--local-addr": "127.0.0.1",
        "--log-dir": os.devnull,  # without one torchrun leaves a folder in /tmp
    }
    words = [str(word) for pair in options.items() for word in pair]
    words += [__file__, "rank", str(os.getpid()), plan["script"], *plan["arguments"]]
    config, command, command_words = run.config_from_args(run.parse_args(words))
    config.logs_specs = Pipes()
    has_begun.set()
    try:
        with port_is_ours:
            elastic_launch(config, command)(*command_words)
    except ChildFailedError as error:
        codes = [(rank, failure.exitcode) for rank, failure in error.failures.items()]
        print(json.dumps(codes), flush=True)
        return 1
    finally:
        kill_tree(os.getpid(), spare_root=True)  # what a rank has left running
    return 0


def _may_fork() -> bool:
    """Whether ranks can be forks: not where a driver of GPUs may be loaded before."""
    from course_utils.ranks.processes import start_method

    drivers = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, Windows's
    return start_method() == "fork" and not any(map(os.path.exists, drivers))


def _fork_ranks(script: str, n: int) -> None:
    """From now on torchrun's agent forks its ranks, with torch and what they need."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (
        subprocess_handler,
    )

    from course_utils.ranks.zygote import import_all

    with contextlib.suppress(Exception):  # the rank that imports it says so
        import_all(["torch.distributed.nn.functional", *_torch_modules(script)])
    gate = _Gate(n)
    subprocess_handler.SubprocessHandler._popen = lambda handler, words, environment: (
        _Fork(words, environment, handler._stdout, handler._stderr, gate)
    )


def _torch_modules(script: str) -> list[str]:
    """The modules of torch that this script imports, or that it is going to need."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []  # the ranks say so
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Attribute) and node.attr == "optim":
            names.add("torch._dynamo")  # the first optimizer imports it, in 1.5 s
    return sorted(name for name in names if name.split(".")[0] == "torch")


class _Gate:
    """Holds forks back until all `n` are there.

    A fork that has begun connects to the agent's store. If the agent's thread that
    serves the store were just looking up who that is when the next rank is forked,
    the lock of the C library that it holds would stay locked in that rank for ever.
    """

    def __init__(self, n: int) -> None:
        self.missing = n
        self.entrance, self.bolt = os.pipe()

    def one_more(self) -> None:
        """The agent has made a fork; after the last one the gate opens."""
        self.missing -= 1
        if not self.missing:
            os.close(self.bolt)
            os.close(self.entrance)

    def wait(self) -> None:
        """In a fork: go on when the gate is open."""
        os.close(self.bolt)
        os.read(self.entrance, 1)
        os.close(self.entrance)


class _Fork:
    """A rank that is a fork of the agent: what torchrun uses of a ``Popen``.

    Args:
        words: the command that it stands for: ``python -u _runner.py rank ...``.
        environment: its whole environment.
        stdout: the open file for what it prints.
        stderr: the same for its errors.
        gate: where it waits for the other forks.
    """

    def __init__(self, words, environment, stdout, stderr, gate) -> None:
        self.words, self.returncode = words, None
        with warnings.catch_warnings():  # the agent's other threads only wait
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid:
            gate.one_more()
        else:
            try:
                gate.wait()
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                self._run(environment)
                code = 0
            except BaseException:
                traceback.print_exc()
                code = 1
            finally:
                os._exit(code)

    def _run(self, environment: dict[str, str]) -> None:
        """Be what a fresh process would be, and end as it would."""
        from course_utils.ranks.zygote import own_random_numbers

        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        atexit._clear()
        own_random_numbers()
        run_rank(*self.words[self.words.index("rank") + 1 :])
        threading._shutdown()  # waits for threads of the script
        atexit._run_exitfuncs()

    def poll(self) -> int | None:
        """Its exit code, or minus its signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.words, timeout)
            time.sleep(0.01)
        return self.returncode


def run_rank(agent: str, script: str, *arguments: str) -> None:
    """Run the script as the main program of this process.

    ``agent`` is the number of the process that has started this one.
    """
    _set_option(_PR_SET_PDEATHSIG, signal.SIGKILL)  # when the agent is killed
    if os.getppid() != int(agent):
        os._exit(1)  # it was killed before we could ask for that
    tell = _Messenger()
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)  # "where are you?"
    tell(pid=os.getpid())
    path = os.path.abspath(script)
    sys.argv[:] = [script, *arguments]
    sys.path[0] = os.path.dirname(path)
    try:
        # First, because a typing error should not have to wait for torch.
        compile(Path(path).read_bytes(), path, "exec")
        requests = _prepare_torch(tell)
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            code = end.code & 0xFF if isinstance(end.code, int) else 1
            text = "" if isinstance(end.code, int) else str(end.code)
            tell(kind="exited", code=code, message=text[:LONGEST_TEXT])
            _end(code)
    except BaseException as error:
        tell(
            kind="raised",
            code=1,
            error=type(error).__name__,
            message=str(error)[:LONGEST_TEXT],
            peer=_is_about_a_peer(error),
            traceback=_own_lines(error)[:LONGEST_TEXT],
        )
        _end(1)
    tell(kind="finished")
    # gloo's threads can crash a Python that is shutting down. They end with their
    # process group, and that with the last object of the script that refers to it.
    gc.collect()
    for request in requests.kept():
        _tell_of_request(tell, request)
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class _Messenger:
    """Sends messages to ``launch``, also if the script redirects its stderr."""

    def __init__(self) -> None:
        self.descriptor = os.dup(2)

    def __call__(self, **message: object) -> None:
        message["time"] = time.time()
        text = MARK + json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):  # nobody listens any more
            while text:
                text = text[os.write(self.descriptor, text) :]


def _prepare_torch(tell: _Messenger):
    """What is different in a rank; returns where its requests are noted."""
    import torch.distributed

    # Its default arguments hold the process group that exists when it is imported,
    # which DDP does: import it while there is none.
    import torch.distributed.nn.functional  # noqa: F401

    from course_utils.ranks import loopback, report, requests

    threading.excepthook = report.tell_of_thread
    loopback.bind_stores_to_loopback()
    loopback.end_init_together()
    requests.stand_in_front()
    noted = requests.Requests(on_drop=functools.partial(_tell_of_request, tell))
    noted.watch()
    return noted


_told: set[tuple] = set()  # a loop may drop thousands


def _tell_of_request(tell: _Messenger, request) -> None:
    """Nobody has waited for this one. Lines that do it again and again say so once."""
    place = request.frames[-1]
    if place not in _told:
        _told.add(place)
        tell(request={"frames": request.frames, "is_p2p": request.is_p2p})


def _end(code: int) -> NoReturn:
    """End this rank, without Python's own shutdown: peers may be waiting for it."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    time.sleep(SECONDS_TO_SPEAK)
    os._exit(code)


def _own_lines(error: BaseException) -> str:
    """The traceback without the lines of Python, torch and the course."""
    from course_utils import ROOT
    from course_utils.ranks.report import own_traceback

    return own_traceback(error).replace(f'File "{ROOT}{os.sep}', 'File "')


def _is_about_a_peer(error: BaseException) -> bool:
    """Whether it says only that another rank is gone."""
    if "torch" not in sys.modules or not isinstance(error, (RuntimeError, OSError)):
        return False
    from course_utils.ranks.rank import PEER_GONE

    return bool(PEER_GONE.search(str(error)))


def _die_with_the_kernel() -> threading.Event:
    """End this process and all below it when the kernel closes our stdin, or dies.

    To be set before ranks are started: until then only a helper of ``import torch``
    can be below it, which ends by itself and should clean up behind it.
    """
    # Ranks whose parent dies become ours, so that kill_tree finds them.
    _set_option(_PR_SET_CHILD_SUBREAPER, 1)
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what the ranks inherit: input() finds nothing there
    os.close(nothing)

    def watch() -> None:
        os.read(lifeline, 1)  # nobody writes: it returns at the end of the file
        if has_begun.is_set():
            kill_tree(os.getpid(), spare_root=True)
        os._exit(1)

    has_begun = threading.Event()
    threading.Thread(target=watch, daemon=True).start()
    return has_begun


def _set_option(option: int, value: int) -> None:
    """Linux's prctl(); elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    sys.exit({"agent": run_agent, "rank": run_rank}[role](*words))
