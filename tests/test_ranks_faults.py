"""Faults of ranks that the table in ``faults.py`` does not have, caused for real."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ranks_support import (
    GROUP_STAYS,
    KEPT,
    LINUX,
    LOAD,
    MARK,
    eventually,
    failure_of,
    four,  # noqa: F401 - a fixture
    kept,
    marked_processes,
    own_descriptors,
    ranks,  # noqa: F401 - a fixture
    watch,  # noqa: F401 - a fixture
    within,
    works,
)
from thorough import thorough_after

from course_utils.ranks import Ranks, RanksError, deadlock, report, round
from course_utils.ranks.deadlock import AFTER_THE_END_SECONDS
from course_utils.ranks.processes import ZygoteProcess
from course_utils.ranks.round import Round
from course_utils.ranks.team import Team

pytestmark = [
    pytest.mark.skipif(not LINUX, reason="needs /proc and Unix signals"),
    pytest.mark.usefixtures("watch"),
]

DEADLOCK = "Deadlock: nothing moves, and nothing will.\n"
DEADLOCK_SECONDS = 2.5  # to notice it, and to free everybody
LIMIT = 1.0


# ------------------------------------------------------------- who waits, and where
SHARD = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
shard = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
"""


def local_shard():
    import __main__

    return __main__.shard.to_local()


HIDDEN = {
    "DTensor": ("if rank == 0: shard.full_tensor()", "full_tensor, line 1"),
    "FSDP2": (
        "model = fully_shard(torch.nn.Linear(4, 4))\n"
        "if rank == 0: model(torch.ones(1, 4))",
        "forward, line 2",
    ),
}


@pytest.mark.parametrize("kind", thorough_after(1, HIDDEN))
def test_collectives_that_nobody_sees_are_waited_for(kind):
    cell, where = HIDDEN[kind]
    with Ranks(2, quiet=True) as two:
        for _ in range(2):
            # DTensor has the functions by name. Whether it was imported before a rank
            # began must make no difference to what is compared.
            two.run_cell(SHARD)
            assert [s.tolist() for s in two.run(local_shard)] == [[0, 1], [2, 3]]
            failure_of(two, "import os\nif rank == 0: os._exit(1)")
        two.run_cell(SHARD)
        with within(DEADLOCK_SECONDS):
            error = failure_of(two, cell)
        said = f"{DEADLOCK}Rank 0 was stuck in {where} of the cell: if rank == 0: "
        assert str(error).startswith(said)
        two.run_cell(SHARD)  # in the new group
        late = failure_of(two, cell.replace("if rank == 0: ", "if rank: 1 / 0\n"))
        assert f"Rank 0 was waiting in {where.partition(',')[0]}" in str(late)


def test_the_course_may_lie_behind_a_link(tmp_path):
    """As in a clone that is reached by one: whose call it was is still known."""
    (tmp_path / "course_utils").symlink_to(Path(report.PACKAGE))
    inner = str(tmp_path / "course_utils" / "ranks" / "agreement.py")
    call = (str(tmp_path / "mine.py"), 3, "<module>")
    assert not report.is_of_library([(inner, 1, "checked"), call])
    library = (contextlib.__file__, 1, "f")
    assert report.is_of_library([(inner, 1, "checked"), library, call])


def test_messages_that_go_to_and_fro_are_no_deadlock(ranks):  # noqa: F811
    # Whenever they are asked, all wait or seem to; next to no CPU time is used.
    ranks.run_cell(
        """
import ctypes, torch.autograd.graph as graph
pause = compile("ctypes.CDLL(None).usleep(150_000)", graph.__file__, "exec")
one = torch.ones(1)
for _ in range(12):
    if rank == 0:
        exec(pause)
        dist.send(one, 1)
        dist.recv(one, 1)
    elif rank == 1:
        dist.recv(one, 0)
        exec(pause)
        dist.send(one, 0)
dist.barrier()
"""
    )


@pytest.fixture
def without_core(monkeypatch):
    """As if other programs kept the ranks from a core all the time."""

    def all_the_time(pids):
        return dict.fromkeys(pids, time.monotonic())

    for module in (deadlock, round):
        monkeypatch.setattr(module, "seconds_without_core", all_the_time)


def test_ranks_without_a_core_have_more_time_before_it_is_a_deadlock(
    ranks,  # noqa: F811
    without_core,
):
    started = time.monotonic()
    with pytest.raises(RanksError, match="Deadlock: nothing moves"):
        ranks.run_cell("if rank == 0: dist.recv(torch.ones(1), 1)")
    assert deadlock.BUSY_SECONDS <= time.monotonic() - started < 15


def test_ranks_without_a_core_have_up_to_three_times_their_limit(
    ranks,  # noqa: F811
    without_core,
):
    ranks.run_cell("import time; time.sleep(1.5)", timeout=1)
    started = time.monotonic()
    with pytest.raises(RanksError, match="Not finished after 1 s"):
        ranks.run_cell("while True: time.sleep(0.01)", timeout=1)
    assert 3.0 <= time.monotonic() - started < 6


@pytest.mark.thorough
def test_a_slow_rank_and_a_slow_link_are_no_deadlock(ranks):  # noqa: F811
    ranks.run_cell(
        """
import time
from course_utils.measure.emulated_link import EmulatedLink
if rank == 0: time.sleep(3)
dist.barrier()
end = time.monotonic() + 3
while rank == 0 and time.monotonic() < end: torch.ones(100) @ torch.ones(100)
dist.barrier()
with EmulatedLink(latency=4, bandwidth=1e9):
    if rank == 0: dist.send(torch.ones(1), 1)
    if rank == 1: dist.recv(torch.ones(1), 0)
dist.barrier()
"""
    )


@pytest.mark.thorough
def test_a_rank_that_computes_after_its_end_is_no_help(ranks):  # noqa: F811
    """Threads of a rank that has finished may still send; but not for ever."""
    cell = (
        "import threading, time\n"
        "def burn():\n"
        "    while not done.is_set(): pass\n"
        "done = threading.Event()\n"
        "if rank == 0: threading.Thread(target=burn, daemon=True).start()\n"
        "else: dist.barrier()"
    )
    with within(DEADLOCK_SECONDS + AFTER_THE_END_SECONDS):
        assert str(failure_of(ranks, cell)).startswith(DEADLOCK)
    ranks.run_cell("done.set()")
    kept(ranks)


@pytest.mark.thorough
def test_a_loop_that_catches_the_interrupt_is_ended(ranks):  # noqa: F811
    cell = """
if rank == 1:
    while True:
        try:
            while True: pass
        except: pass
dist.barrier()
"""
    with within(LIMIT + 3.3):
        error = failure_of(ranks, cell, timeout=LIMIT)
    assert error.failures[1].error == "running"
    assert "line" in error.failures[1].where
    have = ranks.run(lambda: "kept" in vars(__import__("__main__")))
    # Whether an interrupt gets through is a matter of luck.
    assert [rank for rank in range(4) if not have[rank]] in ([], [1])


# ------------------------------------------------------------ whether the group goes on
MODEL = (
    "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
    "pair = dist.new_group([0, 1])"
)
STEP = "model(torch.ones(1, 2)).sum().backward()\n"
PAIR = "if rank < 2: dist.all_reduce(torch.ones(2), group=pair)\n"
BEGUN = "work = dist.all_reduce(torch.ones(2), async_op=True)\n1 / 0"


@pytest.mark.parametrize(
    "cell",
    [
        STEP + PAIR + "a_slip_of_the_pen",
        "if rank == 1: 1 / 0",
        BEGUN,
        "x = torch.ones(2)\nif rank == 0: dist.send(x, dst=1)\n"
        "if rank == 1: dist.recv(x, src=0)\n1 / 0",
        "another = dist.new_group([0, 1])\n1 / 0",
    ],
)
def test_ranks_in_step_keep_their_group(ranks, cell):  # noqa: F811
    ranks.run_cell(MODEL, timeout=LOAD * 30)
    assert str(failure_of(ranks, cell)).endswith(GROUP_STAYS)
    assert str(failure_of(ranks, "1 / 0", only=[0, 2])).endswith(GROUP_STAYS)
    some = PAIR + "1 / 0"  # all ranks of that group
    assert str(failure_of(ranks, some, only=[0, 1])).endswith(GROUP_STAYS)
    ranks.run_cell(STEP + PAIR)
    kept(ranks)


@pytest.mark.parametrize(
    "cell, only",
    [
        ("if rank != 2: " + BEGUN.replace("\n", "\nif True: "), None),
        (BEGUN, [0, 1]),
        ("if rank == 0: work = dist.isend(torch.ones(2), dst=1)\n1 / 0", None),
        ("if rank == 0: work = dist.irecv(torch.ones(2))\n1 / 0", None),
        ("if rank == 3: alone = dist.new_group([3])\n1 / 0", None),
        ("dist.destroy_process_group()\n1 / 0", None),
        (
            "import datetime, time\n"
            "moment = datetime.timedelta(seconds=0.05)\n"
            "x = torch.ones(2)\n"
            "if rank == 0: dist.irecv(x, src=1).wait(moment)\n"
            "if rank == 1:\n"
            "    time.sleep(0.2)\n"
            "    work = dist.isend(x, dst=0)",
            None,
        ),
    ],
)
def test_ranks_out_of_step_get_a_new_group(ranks, cell, only):  # noqa: F811
    assert str(failure_of(ranks, cell, only=only)).endswith(KEPT)
    works(ranks)
    kept(ranks)


# ------------------------------------------------------------------------------- deaths
def in_a_thread(action):
    """Run this beside the cell; join it before the test ends."""
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.fixture
def own_helper(watch, monkeypatch):  # noqa: F811
    """New ``Ranks`` get a helper process of their own: the shared ranks live on."""
    monkeypatch.setattr(ZygoteProcess, "current", None)
    yield
    watch.assert_no_strays()


def test_the_helper_process_is_killed(own_helper, tmp_path, monkeypatch):
    # What it imports at its start is Python's own, whatever lies in this folder.
    (tmp_path / "random.py").write_text("hides = 'Python has a module of this name'\n")
    monkeypatch.chdir(tmp_path)
    with Ranks(2, output="grouped", quiet=True, timeout=20) as two:
        helper, inside = two.team.zygote.process, tmp_path / "inside"

        def kill():
            eventually(inside.exists)
            os.kill(helper.pid, signal.SIGKILL)

        killer = in_a_thread(kill)
        with within(8):
            error = failure_of(
                two,
                f"open({str(inside)!r}, 'w').close()\n__import__('time').sleep(1000)",
            )
        killer.join()
        assert error.cause == "died"
        assert "helper process that starts ranks was ended, and with it" in str(error)
        assert "(Ranks 0 and 1 were started afresh, without" in str(error)
        works(two)
        with Ranks(2, quiet=True) as others:
            works(others)


# ------------------------------------------------------------ processes made by ranks
def test_forks_and_processes_inside_a_rank(ranks, capsys):  # noqa: F811
    ranks.run_cell(
        """
import multiprocessing, os, time, warnings
warnings.simplefilter('ignore')  # of Python 3.12: a rank has threads
if os.fork(): os.wait(); print('parent')  # the other one goes on
if os.fork() == 0: raise ValueError('child')
os.wait()
context = multiprocessing.get_context('fork')
queue = context.Queue()
child = context.Process(target=lambda: queue.put(rank * 2))
child.start()
doubled = queue.get(timeout=10)
child.join(10)
queue.close(); queue.join_thread()
""",
        only=[0, 1],
    )
    assert capsys.readouterr().out.count("parent\n") == 2
    assert [ranks.pull("doubled", rank=r) for r in (0, 1)] == [0, 2]
    kept(ranks)


def test_semaphores_with_a_name_go_with_their_rank(ranks):  # noqa: F811
    own = tuple(f"sem.mp-rank-{status.pid}-" for status in ranks.status())

    def semaphores() -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith(own)]

    ranks.run_cell(
        "import multiprocessing\nlock = multiprocessing.get_context('spawn').Lock()"
    )
    assert len(semaphores()) == 4
    failure_of(ranks, "import os\nif rank < 2: os._exit(1)")
    eventually(lambda: len(semaphores()) == 2)
    ranks.restart()
    eventually(lambda: not semaphores())


def test_data_loaders_work_and_end_with_a_rank_that_is_stuck_or_dies(ranks):  # noqa: F811
    ranks.run_cell(
        """
from torch.utils.data import DataLoader, Dataset, TensorDataset
class Slow(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        import time; time.sleep(1000)
loader = DataLoader(TensorDataset(torch.arange(8.)), batch_size=2, num_workers=2)
seen = sum(float(x.sum()) for x, in loader)
"""
    )
    assert ranks.pull("seen") == [28.0] * 4
    stuck = "if rank == 1:\n    for x in DataLoader(Slow(), num_workers=2): pass\n"
    error = failure_of(ranks, stuck + "dist.barrier()", timeout=LIMIT)
    assert error.failures[1].error == "running"
    kept(ranks)
    dies = "import os\nbatches = iter(loader); next(batches)\nif rank == 1: os._exit(1)"
    failure_of(ranks, f"{dies}\ndist.barrier()")
    ranks.run_cell("batches = None", only=[0, 2, 3])


# --------------------------------------------------------------------- odd things to do
def test_the_folder_of_the_kernel_is_gone(ranks, tmp_path, monkeypatch):  # noqa: F811
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    failure_of(ranks, "import os\nif rank == 1: os._exit(1)")
    works(ranks)
    monkeypatch.undo()
    ranks.restart()


# -------------------------------------------------------------------- Ctrl-C, and forks
def test_an_interrupt_while_ranks_are_made(own_helper):
    # The helper process is new and imports torch: time enough for an interrupt.
    def interrupt():
        eventually(lambda: ZygoteProcess.current is not None)
        os.kill(os.getpid(), signal.SIGINT)

    thread = in_a_thread(interrupt)
    with within(1), pytest.raises(KeyboardInterrupt):
        Ranks(2, quiet=True)
    thread.join()
    assert ZygoteProcess.current is None


def test_an_interrupt_in_a_restart_leaves_whole_ranks(monkeypatch):
    """It comes when the old ranks have ended and no new one has begun."""
    start = Team.start

    def interrupted(team, which):
        os.kill(os.getpid(), signal.SIGINT)
        start(team, which)

    with Ranks(2, quiet=True) as two:
        monkeypatch.setattr(Team, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.restart()
        monkeypatch.undo()
        works(two)


def interrupted_after(op, monkeypatch):
    """As if Ctrl-C came as soon as all ranks have been sent a request of this kind."""
    send = Round.send

    def send_and_interrupt(self, request):
        send(self, request)
        if request["op"] == op:
            raise KeyboardInterrupt

    monkeypatch.setattr(Round, "send", send_and_interrupt)


@pytest.mark.parametrize("step", ["hello", "group"])
def test_an_interrupt_while_ranks_are_asked_and_meet(monkeypatch, step):
    """It comes when all ranks have their request: they may well finish it."""
    interrupted_after(step, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        Ranks(2, quiet=True)
    monkeypatch.undo()
    with Ranks(2, quiet=True) as two:
        works(two)


def test_an_interrupt_of_what_is_just_done_is_not_lost(ranks, monkeypatch):  # noqa: F811
    """Cells that wait for this one must not run: only an exception keeps them."""
    interrupted_after("call", monkeypatch)
    with pytest.raises((KeyboardInterrupt, RanksError)) as info:
        ranks.run(int)
    assert getattr(info.value, "cause", "interrupt") == "interrupt"
    monkeypatch.undo()
    kept(ranks)


def test_a_fork_of_the_kernel_does_not_end_the_ranks(ranks):  # noqa: F811
    pid = os.fork()
    if pid == 0:
        try:
            ranks.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    kept(ranks)


def test_a_rank_that_other_programs_keep_from_running_gets_more_time(ranks):  # noqa: F811
    core = min(os.sched_getaffinity(0))

    def work() -> None:  # on a core of which this rank gets a seventeenth
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        begun = time.thread_time()
        while time.thread_time() < begun + 0.15:
            pass
        os.sched_setaffinity(0, before)

    sixteen_others = f"""
import os, time
end = time.time() + 2.5
for _ in range(4):
    os.fork()
os.setsid()  # a kernel may share cores by sessions
os.sched_setaffinity(0, {{{core}}})
print(flush=True)
while time.time() < end:
    pass
while os.waitpid(-1, 0):
    pass
"""
    command = [sys.executable, "-c", sixteen_others]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as others:
        others.stdout.readline()
        ranks.run(work, timeout=2.0, only=0)  # on a busy machine, three times that
    failure_of(ranks, "import time; time.sleep(60)", timeout=0.2)  # and no other one


def test_failures_use_up_no_descriptors(ranks):  # noqa: F811
    def fail(how):
        failure_of(ranks, f"import os\nif rank == 1: {how}\ndist.barrier()")
        works(ranks)

    def count():
        return len(os.listdir("/dev/fd"))

    fail("os._exit(1)")
    fail("1 / 0")
    here, there = len(own_descriptors()), ranks.run(count)
    for _ in range(4):
        fail("1 / 0")
    # Not one for each failure. gloo closes those of an old group in its own time.
    assert all(new < old + 4 for new, old in zip(ranks.run(count), there, strict=True))
    for _ in range(4):
        fail("os._exit(1)")
    assert len(own_descriptors()) < here + 4


def test_the_mark_reaches_the_ranks(ranks):  # noqa: F811
    """Without it none of these tests would see what is left."""
    assert ranks.run(lambda: os.environ[MARK]) == [os.environ[MARK]] * 4
    assert {status.pid for status in ranks.status()} <= set(marked_processes())
