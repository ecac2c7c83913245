"""``launch``: workers from a notebook, and every way in which they can go wrong.

The faults are real: scripts that raise, crash, hang, are killed, or are left alone by
a kernel that dies. After each of them no process and no temporary file may remain.
"""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ranks_support import LOAD
from thorough import thorough_after

from course_utils import ROOT, workers
from course_utils.workers import LaunchError, LaunchResult, launch

pytestmark = pytest.mark.skipif(os.name == "nt", reason="launch() needs Linux or macOS")

MARK = "LAUNCH_TEST"  # an environment variable: every process of a test inherits it


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that this test has started, directly or not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(scope="module", autouse=True)
def temporary_folder(tmp_path_factory):
    """A folder for temporary files of our own: nothing may be left in it."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield folder


@pytest.fixture(autouse=True)
def mark(monkeypatch, temporary_folder):
    """Marks what the test starts, and sees to it that nothing of it is left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    descriptors = len(os.listdir("/dev/fd"))
    yield mark
    wait_until(lambda: marked(mark) == [], 1.0)
    left = marked(mark)
    for process in left:
        process.kill()
    assert left == []
    assert list(temporary_folder.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == descriptors


@pytest.fixture
def script(tmp_path):
    """Writes a worker script and returns its path."""

    def write(code: str, name: str = "worker.py") -> str:
        file = tmp_path / name
        file.write_text(textwrap.dedent(code).lstrip("\n"))
        return str(file)

    return write


# -------------------------------------------------------------- what goes well
@pytest.mark.parametrize("method", thorough_after(1, ["fork", "spawn"]))
def test_a_worker_runs_as_under_torchrun_and_on_loopback_only(
    script, tmp_path, mark, capfd, monkeypatch, method
):
    if method == "fork" and sys.platform != "linux":
        pytest.skip("ranks are forks of torchrun's agent on Linux only")
    monkeypatch.setenv("RANKS_START_METHOD", method)
    path = script(
        """
        import atexit, json, os, pathlib, random, signal, socket, subprocess, sys
        import threading, time
        import numpy, psutil, torch, torch.distributed as dist
        from torch import nn

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert __name__ == "__main__" and __file__ == os.path.abspath(sys.argv[0])
        assert sys.path[0] == os.path.dirname(__file__)
        assert sys.argv[1:] == ["one two", "--lr", "0.5", "--resume"], sys.argv
        assert os.environ["LOCAL_RANK"] == os.environ["RANK"]
        assert os.environ["LOCAL_WORLD_SIZE"] == "2"
        assert torch.get_num_threads() == 1
        assert sys.stdin.read() == ""
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert os.getsid(0) == os.getpgid(0) == os.getpid()

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
        chance = random.random(), numpy.random.random(), torch.rand(1).item()
        others = [None, None]
        dist.all_gather_object(others, chance)
        assert not set(others[0]) & set(others[1])  # without a seed each has its own
        dist.destroy_process_group()

        # A second meeting, which rank 0 serves itself.
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port[0]}",
                                rank=rank, world_size=world_size)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        folder = pathlib.Path(__file__).parent
        (folder / "ready").touch()
        while not (folder / "looked").exists():
            time.sleep(0.02)

        if rank == 0:
            print("before")
            print(json.dumps({"epoch": 1, "loss": 0.25, "seconds": time.time()}))
            print("{not JSON}")
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        else:
            print("\\n".join(str(n) for n in range(3000)))
            print("10 %\\r50 %\\r100 %", file=sys.stderr)
            atexit.register(print, "smörgås", total.item(), os.getcwd(), end="")
            last = "from a thread, after the script"
            threading.Timer(0.2, print, [last]).start()
            is_fork = "agent" in psutil.Process().cmdline()
            print("fork" if is_fork else "spawn")
        """
    )
    listening, done = set(), threading.Event()

    def look() -> None:
        while not done.is_set():
            ready = (tmp_path / "ready").exists()
            for process in marked(mark):
                try:
                    for found in process.net_connections():
                        if found.status == psutil.CONN_LISTEN:
                            listening.add((process.pid, found.laddr.ip))
                except psutil.Error:
                    continue
            if ready:
                # From here on the script starts a process, which has all that is open
                # until it becomes another program.
                (tmp_path / "looked").touch()
                return
            time.sleep(0.05)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        result = launch(path, "one two", lr=0.5, resume=True, momentum=None)
    finally:
        done.set()
        looking.join()

    assert isinstance(result, LaunchResult)
    assert result.returncode == 0
    assert 0 < result.seconds < 60
    (metrics,) = result.metrics
    assert (metrics["epoch"], metrics["loss"]) == (1, 0.25)
    assert len({pid for pid, _ in listening}) == 3  # the agent and the two ranks
    assert {address for _, address in listening} == {"127.0.0.1"}

    command = f"torchrun --nproc-per-node 2 {path} 'one two' --lr 0.5 --resume"
    assert result.command == command
    assert repr(result) == f"<LaunchResult of {command!r}: 1 metrics lines>"
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0] == command
    assert lines[1] == "[rank 0] before"
    assert lines[2].startswith('[rank 0] {"epoch": 1')
    assert lines[3] == "[rank 0] {not JSON}"
    assert lines[4:1004] == [f"[rank 1] {n}" for n in range(1000)]
    assert lines[1004] == "[rank 1] ... 1,903 lines left out ..."
    assert lines[1005:-3] == [f"[rank 1] {n}" for n in range(2903, 3000)]
    assert lines[-3] == f"[rank 1] {method}"
    assert lines[-2] == "[rank 1] from a thread, after the script"
    assert lines[-1] == f"[rank 1] smörgås 2.0 {ROOT}"
    assert err == "[rank 1] 100 %\n"
    assert "[rank 1] 2000\n" in result.output  # all lines are kept


class Clock(io.StringIO):
    """A stdout that notes when each line was written."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, float] = {}

    def write(self, text: str) -> int:
        for line in text.splitlines():
            self.times[line] = time.monotonic()
        return super().write(text)


def test_lines_appear_as_they_come_and_epochs_without_their_times(script, monkeypatch):
    path = script(
        """
        import json, os, time
        metrics = {"epoch": 1, "loss": 1 / 3, "test_accuracy": 0.97251, "seconds": 0.5,
                   "images_per_second": 12345, "world_size": 1, "backend": "gloo"}
        print(json.dumps(metrics))
        time.sleep(1.0)
        print("later")
        """
    )
    monkeypatch.setenv("RANKS_OUTPUT", "stream")
    monkeypatch.setattr(sys, "stdout", clock := Clock())
    result = launch(path, nproc=1, show="epochs")
    command, epoch, later = clock.getvalue().splitlines()
    assert command == f"torchrun --nproc-per-node 1 {path}"
    assert epoch == "[rank 0] epoch 1   loss 0.333   test_accuracy 0.973"
    assert later == "[rank 0] later"
    assert clock.times[later] - clock.times[epoch] > 0.8
    assert result.metrics[0]["images_per_second"] == 12345  # nothing is lost


def test_arguments_become_the_words_of_a_command_line():
    words = workers._arguments(
        ("--flag", 3),
        {
            "batch_size": 64,
            "lr": 1e-4,
            "resume": True,
            "seed": None,
            "fast": False,
            "sizes": [8, 16],
            "checkpoint": ROOT / ".course" / "ddp.pt",
        },
    )
    assert words == [
        *("--flag", "3", "--batch-size", "64", "--lr", "0.0001", "--resume"),
        *("--sizes", "8", "16", "--checkpoint", os.path.join(".course", "ddp.pt")),
    ]


# ---------------------------------------------------- what goes wrong in the worker
# Each script creates the file sys.argv[1] just before its fault: the time counts from
# there, because how long the start takes depends on what else this machine does.
FAULTS = {
    "raise": (
        2,
        """
        import pathlib, sys
        import torch, torch.distributed as dist
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                print('{"epoch": 1}', flush=True)
            dist.barrier()
            if dist.get_rank() == 1:
                pathlib.Path(sys.argv[1]).touch()
                try:
                    torch.nn.Linear(3, 4)(torch.ones(2, 5))
                except RuntimeError as error:
                    raise ValueError("bad shard\\nsecond line") from error
            dist.all_reduce(torch.ones(1))

        if __name__ == "__main__":
            main()
        """,
    ),
    "raise everywhere": (
        2,
        """
        import pathlib, signal, sys, time, torch.distributed as dist
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each comes to its own end
        dist.init_process_group("gloo")
        dist.barrier()
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(0 if dist.get_rank() == 1 else 0.2)
        raise KeyError("everywhere")
        """,
    ),
    "skipped collective": (
        2,
        """
        import pathlib, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        pathlib.Path(sys.argv[1]).touch()
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))
        """,
    ),
    "os._exit": (
        2,
        """
        import os, pathlib, signal, sys, time, torch.distributed as dist
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that will not go
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            print("a last word", file=sys.stderr)
            pathlib.Path(sys.argv[1]).touch()
            os._exit(3)
        time.sleep(1000)
        """,
    ),
    "sys.exit": (
        1,
        """
        import pathlib, sys
        pathlib.Path(sys.argv[1]).touch()
        sys.exit("no data here")
        """,
    ),
    "kill -9": (
        2,
        """
        import os, pathlib, signal, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            if os.fork() == 0:
                signal.pause()  # a child that would survive its parent
            pathlib.Path(sys.argv[1]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        """,
    ),
    "crash": (
        1,
        """
        import ctypes, pathlib, sys

        def read(address):
            return ctypes.string_at(address)

        pathlib.Path(sys.argv[1]).touch()
        read(0)
        """,
    ),
    "syntax": (2, "import os\nprint('never')\nif True print(1)\n"),
    "agent killed": (
        1,
        """
        import os, pathlib, signal, subprocess, sys, time
        subprocess.Popen(["sleep", "1000"])
        pathlib.Path(sys.argv[1]).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
        """,
    ),
}


@dataclass
class Outcome:
    error: LaunchError
    seconds: float | None  # from the fault to the exception in the notebook


def fault_script(folder: Path, name: str) -> Path:
    """The script of one of FAULTS, in a folder of its own."""
    file = folder / name / f"{name.replace(' ', '_')}.py"
    file.parent.mkdir()
    file.write_text(textwrap.dedent(FAULTS[name][1]).lstrip("\n"))
    return file


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    """What became of every launch in FAULTS, two at a time."""
    folder = tmp_path_factory.mktemp("faults")

    def cause(name: str) -> Outcome:
        nproc, file = FAULTS[name][0], fault_script(folder, name)
        fault = file.with_suffix(".fault")
        with pytest.raises(LaunchError) as info:
            launch(file, str(fault), nproc=nproc, timeout=100.0, quiet=True)
        end = time.time()
        seconds = end - fault.stat().st_mtime if fault.exists() else None
        return Outcome(info.value, seconds)

    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv(MARK, mark)
        patch.setattr(workers, "SECONDS_OF_GRACE", 1.0)
        outcomes = dict(zip(FAULTS, pool.map(cause, FAULTS), strict=True))
    assert wait_until(lambda: marked(mark) == [], 1.0)
    return outcomes


@pytest.mark.thorough
def test_ranks_that_are_fresh_processes_fail_with_the_same_words(
    outcomes, tmp_path, monkeypatch
):
    """As they are where fork is not safe: on macOS, and beside a driver of GPUs."""
    monkeypatch.setenv("RANKS_START_METHOD", "spawn")
    for name in ("raise", "crash"):
        nproc, file = FAULTS[name][0], fault_script(tmp_path, name)
        with pytest.raises(LaunchError) as info:
            launch(file, str(tmp_path / "fault"), nproc=nproc, quiet=True)
        forked, fresh = outcomes[name].error, info.value
        assert (fresh.cause, fresh.rank) == (forked.cause, forked.rank)
        folder = re.compile(r'"\S+/')
        assert folder.sub('"', str(fresh)) == folder.sub('"', str(forked))


@pytest.mark.parametrize("name", sorted(set(FAULTS) - {"syntax"}))
def test_a_failure_comes_back_soon(outcomes, name):
    # Alone on an idle machine each takes less than 1.5 s.
    assert outcomes[name].seconds < 2.5 * LOAD


def test_the_failing_ranks_own_traceback_is_raised(outcomes):
    error = outcomes["raise"].error
    assert (error.cause, error.rank, error.returncode) == ("raised", 1, 1)
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 raised ValueError: bad shard"
    frames = [line for line in lines if line.startswith("  File ")]
    assert [re.sub(r'".*/', '"', frame) for frame in frames] == [
        '  File "raise.py", line 14, in main',
        '  File "raise.py", line 20, in <module>',
        '  File "raise.py", line 16, in main',
    ]
    assert "mat1 and mat2 shapes cannot be multiplied" in str(error)
    assert "direct cause of the following exception" in str(error)
    assert error.traceback in str(error)
    assert len(lines) < 25
    assert error.metrics == [{"epoch": 1}]
    assert error.output == '[rank 0] {"epoch": 1}\n'


def test_in_a_notebook_only_the_message_is_shown(outcomes):
    error = outcomes["raise"].error
    assert error._render_traceback_() == [f"LaunchError: {error}"]


def test_if_all_ranks_fail_alike_the_lowest_is_named(outcomes):
    text = str(outcomes["raise everywhere"].error)
    assert text.startswith("rank 0 raised KeyError: 'everywhere'")


def test_a_skipped_collective_is_explained(outcomes):
    error = outcomes["skipped collective"].error
    assert (error.cause, error.rank) == ("raised", 1)
    assert str(error).startswith(
        "rank 1 lost the connection to another rank. Finished by then: 0. "
        "Do all ranks call the same collectives"
    )
    assert "line 5, in <module>" in error.traceback


def test_exit_codes_are_told_apart(outcomes):
    hard = outcomes["os._exit"].error
    assert (hard.cause, hard.rank, hard.returncode) == ("exited", 1, 3)
    assert str(hard) == (
        "rank 1 ended with exit code 3, without a Python exception (by os._exit, or "
        "from C code):\n  a last word"
    )
    soft = outcomes["sys.exit"].error
    assert (soft.cause, soft.rank, soft.returncode) == ("exited", 0, 1)
    assert str(soft) == "rank 0 ended with exit code 1: no data here"


def test_a_killed_rank_is_named_with_its_signal(outcomes):
    error = outcomes["kill -9"].error
    assert (error.cause, error.rank, error.returncode) == ("killed", 1, -9)
    assert str(error).startswith("rank 1 was killed by signal 9 (SIGKILL)")


def test_a_crash_in_c_is_placed(outcomes):
    error = outcomes["crash"].error
    assert (error.cause, error.returncode) == ("killed", -signal.SIGSEGV)
    assert str(error) == (
        "rank 0 was killed by signal 11 (SIGSEGV). It was in string_at, "
        "line 4 of crash.py: return ctypes.string_at(address)"
    )
    assert error.output == ""


def test_ranks_leave_init_together(script, mark):
    # One that ends at once would break the init of the others.
    path = script(
        """
        import json, os, time, torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        make, made_at = c10d._new_process_group_helper, []

        def make_slowly(*args, **kwargs):  # when this rank has its connections
            made = make(*args, **kwargs)
            time.sleep(0.5 * int(os.environ["RANK"]))
            made_at.append(time.monotonic())
            return made

        c10d._new_process_group_helper = make_slowly
        dist.init_process_group("gloo")
        print(json.dumps({"made": made_at[0], "left": time.monotonic()}))
        """
    )
    first, last = launch(path, nproc=2, quiet=True).metrics
    assert first["left"] >= last["made"] > first["made"]


def test_a_syntax_error_is_shown_where_it_is(outcomes):
    error = outcomes["syntax"].error
    assert error.cause == "raised"
    # torchrun ends the slower rank, perhaps before it has come to the error.
    assert re.match("rank [01] raised SyntaxError: ", str(error))
    assert re.search(r'syntax\.py", line 3\n +if True print\(1\)\n', str(error))


def test_a_killed_agent_is_said(outcomes):
    error = outcomes["agent killed"].error
    assert (error.cause, error.rank) == ("torchrun", None)
    assert str(error).startswith("torchrun itself failed (killed by signal 9 (SIGKILL)")


def test_after_the_time_every_rank_says_where_it_is(script, tmp_path, monkeypatch):
    path = script(
        """
        import os, pathlib, subprocess, sys, time, torch, torch.distributed as dist

        def count():
            while True: pass

        def main():
            rank = dist.get_rank()
            pathlib.Path(sys.argv[1], str(rank)).touch()
            if rank == 0:
                dist.recv(torch.ones(1), src=1)
            if rank == 1:
                subprocess.Popen(["sleep", "1000"])
                count()

        dist.init_process_group("gloo")
        main()
        """,
        "stuck.py",
    )
    ready = tmp_path / "ready"
    ready.mkdir()

    class Clock:
        """Runs 100 s fast as soon as all ranks are where they get stuck."""

        reached = None

        def monotonic(self) -> float:
            now = time.monotonic()
            if self.reached is None and len(list(ready.iterdir())) == 3:
                self.reached = now
            ahead = self.reached is not None and now > self.reached + 0.5
            return now + 100 * ahead

    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)
    with pytest.raises(LaunchError) as info:
        launch(path, str(ready), nproc=3, timeout=99.5, quiet=True)
    assert clock.reached, str(info.value)
    assert time.monotonic() - clock.reached < 4.0
    assert info.value.cause == "timeout"
    assert str(info.value) == (
        "not finished after 99.5 s (timeout=99.5): stopped.\n"
        "  rank 0 was in recv, line 10 of stuck.py: "
        "dist.recv(torch.ones(1), src=1)\n"
        "  rank 1 was in line 4 of stuck.py: while True: pass\n"
        "  rank 2 had finished"
    )


BEGUN = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
"""


def test_ranks_that_wait_for_each_other_are_stopped(script, mark, monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_STILL", 1.0)
    waiting = "dist.recv(torch.ones(1), src=1 - dist.get_rank())"
    path = script(f"{BEGUN}{waiting}", "dead.py")
    started = time.monotonic()
    with pytest.raises(LaunchError) as info:
        launch(path, quiet=True)
    assert time.monotonic() - started < 60
    assert info.value.cause == "timeout"
    call = f"recv, line 3 of dead.py: {waiting}"
    first, *where = str(info.value).splitlines()
    assert first == "deadlock: nothing moves, and nothing will. Stopped."
    assert where == [f"  rank {rank} was in {call}" for rank in (0, 1)]
    assert marked(mark) == []


@pytest.mark.thorough
def test_a_rank_that_joins_a_group_alone_is_stopped(script, mark, monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_STILL", 1.0)
    path = script(
        """
        import os, time, torch.distributed as dist
        if os.environ["RANK"] == "0":
            time.sleep(3)
            dist.init_process_group("gloo")
        """,
        "alone.py",
    )
    with pytest.raises(LaunchError) as info:
        launch(path, quiet=True)
    assert str(info.value) == (
        "deadlock: nothing moves, and nothing will. Stopped.\n"
        "  rank 0 was in init_process_group, line 4 of alone.py: "
        'dist.init_process_group("gloo")\n'
        "  rank 1 had finished"
    )
    assert marked(mark) == []


@pytest.mark.thorough
def test_ranks_that_look_for_a_host_that_there_is_not_are_stopped(script, monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_STILL", 1.0)
    call = "dist.init_process_group('gloo', 'tcp://no-such-host.invalid:1', **who)"
    path = script(
        f"""
        import os, torch.distributed as dist
        who = dict(rank=int(os.environ["RANK"]), world_size=2)
        {call}
        """,
        "lost.py",
    )
    with pytest.raises(LaunchError) as info:
        launch(path, quiet=True)
    first, *where = str(info.value).splitlines()
    assert first == "deadlock: nothing moves, and nothing will. Stopped."
    inside = f"init_process_group, line 3 of lost.py: {call}"
    assert where == [f"  rank {rank} was in {inside}" for rank in (0, 1)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "pause",
    [
        # In the script: the others wait for this rank, and it goes on.
        "if dist.get_rank() == 1: time.sleep(4)",
        # In torch, while a group is made: it tries again after a while.
        "def init_process_group(): dist.recv(torch.ones(1), src=1, tag=1)\n"
        "time.sleep(3)\n"
        "if dist.get_rank() == 0: init_process_group()\n"
        "else:\n"
        "    exec(compile('time.sleep(2)', dist.__file__, 'exec'))\n"
        "    dist.send(torch.ones(1), dst=0, tag=1)",
        # All of them, in C: nobody can say where it is.
        "import ctypes; ctypes.PyDLL(None).sleep(4)",
    ],
)
def test_ranks_that_do_nothing_for_a_while_go_on(script, monkeypatch, pause):
    monkeypatch.setattr(workers, "SECONDS_STILL", 1.0)
    path = script(f"{BEGUN}{pause}\ndist.barrier()\nprint('end')")
    result = launch(path, quiet=True)
    # What they were asked meanwhile is not in their output.
    assert result.output == "[rank 0] end\n[rank 1] end\n"


# --------------------------------------------------------- what goes wrong around it
def test_an_unknown_worker_lists_those_there_are(capsys):
    with pytest.raises(LaunchError) as info:
        launch("train_dpp")
    assert info.value.cause == "usage"
    assert "'train_dpp'" in str(info.value)
    assert "train_ddp" in str(info.value)
    assert "_runner" not in str(info.value)
    with pytest.raises(LaunchError, match="there is no worker or script 'no/such.py'"):
        launch("no/such.py")
    with pytest.raises(LaunchError, match="is a notebook, and every rank runs a Pyth"):
        launch("../notebooks/00_start_here.ipynb")
    with pytest.raises(TypeError, match=r"such as \"train_ddp\", not \['train_ddp'\]"):
        launch(["train_ddp"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nproc": 0}, "nproc is the number of ranks, 1 to 256, not 0"),
        ({"nproc": "2"}, "not '2'"),
        ({"nproc": True}, "not True"),
        ({"nproc": 1_000_000}, "not 1000000"),
        ({"timeout": 0}, "timeout is a number of seconds above 0, not 0"),
        ({"timeout": "5"}, "not '5'"),
        ({"show": "some"}, 'show is "all", "epochs" or "none", not \'some\''),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        launch("train_ddp", **arguments)


SLEEPER = """
    import os, pathlib, subprocess, sys, time
    subprocess.Popen(["sleep", "1000"])
    pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
    time.sleep(1000)
"""


def test_an_interrupt_ends_the_launch_at_once(script, tmp_path, mark):
    """What Jupyter's stop button does: SIGINT to the kernel."""
    path, ready = script(SLEEPER), tmp_path / "ready"
    ready.mkdir()
    pressed = []

    def press() -> None:
        if wait_until(lambda: len(list(ready.iterdir())) == 2, 30):
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    button = threading.Thread(target=press)
    button.start()
    with pytest.raises(KeyboardInterrupt):
        launch(path, str(ready), timeout=60, quiet=True)
    assert time.monotonic() - pressed[0] < 1.0
    assert marked(mark) == []
    button.join()


@pytest.mark.thorough
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_kernel_that_ends_just_after_an_interrupt(script, tmp_path, mark, end):
    """A second press of the stop button, or a restart: it interrupts, then kills."""
    path, ready = script(SLEEPER), tmp_path / "ready"
    ready.mkdir()
    code = f"from course_utils import launch; launch({path!r}, {str(ready)!r}, nproc=4)"
    nothing = subprocess.DEVNULL
    kernel = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=nothing, stderr=nothing
    )
    assert wait_until(lambda: len(list(ready.iterdir())) == 4, 30)
    kernel.send_signal(signal.SIGINT)
    time.sleep(0.01)
    kernel.send_signal(end)
    kernel.wait()
    assert wait_until(lambda: marked(mark) == [], 4.0)


def test_a_kernel_that_is_killed_takes_the_launch_with_it(script, tmp_path, mark):
    path, ready = script(SLEEPER), tmp_path / "ready"
    ready.mkdir()
    code = f"from course_utils import launch; launch({path!r}, {str(ready)!r})"
    kernel = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    assert wait_until(lambda: len(list(ready.iterdir())) == 2, 30)
    assert len(marked(mark)) == 6  # kernel, agent, two ranks, a child of each
    kernel.kill()
    kernel.wait()
    assert wait_until(lambda: marked(mark) == [], 2.0)


def test_a_kernel_that_is_killed_while_torchrun_starts(tmp_path, mark):
    code = "from course_utils import launch; launch('train_ddp')"
    kernel = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    assert wait_until(lambda: len(marked(mark)) == 2, 30)
    time.sleep(0.3)
    kernel.kill()
    kernel.wait()
    assert wait_until(lambda: marked(mark) == [], 3.0)


@pytest.mark.thorough
def test_a_rank_whose_agent_is_gone_before_it_begins_ends_itself(script):
    """The kernel may be killed while the agent starts the ranks."""
    path = script("raise SystemExit(77)")
    command = [sys.executable, workers._runner.__file__, "rank"]
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = subprocess.run([*command, str(gone.pid), path], timeout=30)
    assert done.returncode == 1
    done = subprocess.run(
        [*command, str(os.getpid()), path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        timeout=30,
    )
    assert done.returncode == 77


def test_the_notebooks_process_needs_no_torch():
    code = (
        "import sys; import course_utils.workers;"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_every_worker_in_the_folder_can_be_launched_by_name():
    names = {file.stem for file in Path(workers.__file__).parent.glob("*.py")}
    assert "train_ddp" in names
    for name in sorted(names):
        if name.startswith("_"):
            continue  # helpers of the scripts, not scripts
        assert workers._find(name).name == f"{name}.py"


# --------------------------------------------------------------- below virtual GPUs
GPUS = """
import ctypes, torch, torch.distributed as dist
from course_utils import virtual_gpus
dist.init_process_group("gloo")
class Model(torch.nn.Module):
    def forward(self, x):
        {line}
        return x
with virtual_gpus(2) as gpus, gpus.record():
    {call}(torch.ones(4, 2, device="cuda"))
"""


@pytest.mark.parametrize(
    "call", thorough_after(1, ["Model()", "torch.nn.DataParallel(Model())"])
)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "dist.all_reduce(x) if dist.get_rank() else dist.recv(x, 1)",
            "rank 1 was in all_reduce, line 6 of gpus.py: ",
        ),
        ("ctypes.string_at(0)", "It was in string_at, line 6 of gpus.py: "),
        ("x @ x.new_ones(7)", 'gpus.py", line 6, in forward\n    x @ x.new_ones(7)\n'),
    ],
)
def test_the_line_that_is_named_is_the_scripts(script, monkeypatch, call, line, says):
    monkeypatch.setattr(workers, "SECONDS_STILL", 1.0)
    path = script(GPUS.format(call=call, line=line), "gpus.py")
    with pytest.raises(LaunchError) as info:
        launch(path, quiet=True)
    text = str(info.value)
    assert says in text
    assert "virtual_gpus" not in text.replace("with virtual_gpus", "")
    assert "site-packages" not in text
