"""Faults, caused for real: each ends in bounded time, is named, and is survived."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
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
    marked_processes,
    watch,  # noqa: F401 - a fixture
    within,
    works,
)
from thorough import thorough_after

from course_utils.ranks import Ranks, RanksError, report
from course_utils.ranks.processes import Zygote, remove_folder
from course_utils.ranks.round import AFTER_THE_END_SECONDS, Round
from course_utils.ranks.team import Team

pytestmark = pytest.mark.skipif(not LINUX, reason="needs /proc and Unix signals")

FRESH_1 = (
    "(Rank 1 was started afresh, without variables; the other ranks keep theirs. "
    "The next cell gets a new process group.)"
)
DEADLOCK = "Deadlock: nothing moves, and nothing will."
NEEDS_ALL = "Every rank of a group must call its collectives; a recv needs its send."
EACH_OTHER = "All ranks wait for each other: nobody sends what the others expect."
DEADLOCK_SECONDS = 2.5  # to notice it, and to free everybody
LADDER_SECONDS = 2.7  # at most, to end what does not end by itself


@pytest.fixture
def ranks(four, watch):  # noqa: F811
    """Four ranks with a variable; after the fault the next cell works at once."""
    four.run_cell("kept = rank * 11")
    yield four
    with within(1):
        works(four)
    watch.assert_no_strays()


def kept(ranks, *fresh):
    """The ranks that still have their variable are all but these."""
    have = ranks.run(lambda: "kept" in sys.modules["__main__"].__dict__)
    assert [rank for rank in range(ranks.n) if not have[rank]] == list(fresh)


# ----------------------------------------------------------- a rank fails, others wait
@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(torch.ones(3))",
        "dist.broadcast(torch.ones(3), 1)",
        "dist.barrier()",
        "dist.all_gather_object([0] * 4, rank)",
        "dist.recv(torch.ones(3), 1)",
        "dist.send(torch.ones(1 << 22), 1)",
        "dist.irecv(torch.ones(3), 1).wait()",
        "dist.all_reduce(torch.ones(3), async_op=True).wait()",
    ],
    ids=lambda call: call.partition("(")[0].removeprefix("dist."),
)
def test_one_rank_raises_while_the_others_wait(ranks, call):
    with within(1):
        error = failure_of(ranks, f"if rank == 1: 1 / 0\n{call}")
    assert error.cause == "raised"
    assert (error.root.rank, error.root.error) == (1, "ZeroDivisionError")
    assert {rank: failure.kind for rank, failure in error.failures.items()} == {
        0: "peer",
        1: "raised",
        2: "peer",
        3: "peer",
    }
    assert str(error).startswith(
        "Rank 1 raised ZeroDivisionError: division by zero\n"
        "  line 1 of the cell: if rank == 1: 1 / 0\n"
        "Ranks 0, 2 and 3 were waiting in "
    )
    kept(ranks)


def test_one_rank_raises_while_the_others_wait_in_each_others_recv(ranks):
    # None of the three waits for rank 1, so its closed connections free nobody.
    with within(1.5):
        error = failure_of(
            ranks,
            "if rank == 1: raise ValueError('bad')\n"
            "dist.recv(torch.ones(2), {0: 2, 2: 3, 3: 0}[rank])",
        )
    assert error.root.error == "ValueError"
    assert [error.failures[rank].kind for rank in (0, 2, 3)] == ["peer"] * 3
    kept(ranks)


def test_one_rank_raises_while_another_computes(ranks):
    with within(4):
        error = failure_of(ranks, "if rank == 1: 1 / 0\nwhile True: pass")
    assert error.root.rank == 1
    assert "Ranks 0, 2 and 3 were still running: line 2 of the cell" in str(error)
    kept(ranks)


def test_one_rank_raises_in_the_backward_pass_of_ddp(ranks):
    ranks.run_cell(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = torch.nn.Linear(4, 4)\n"
        "DistributedDataParallel(model)(torch.ones(4)).sum().backward()"
    )
    with within(1.5):
        error = failure_of(
            ranks,
            "ddp = DistributedDataParallel(model)\n"
            "loss = ddp(torch.ones(4)).sum()\n"
            "if rank == 3: raise ValueError('no loss')\n"
            "loss.backward()",
        )
    assert (error.root.rank, error.root.message) == (3, "no loss")
    kept(ranks)
    with within(DEADLOCK_SECONDS):
        error = failure_of(
            ranks,
            "ddp = DistributedDataParallel(model)\n"
            "loss = ddp(torch.ones(4)).sum()\n"
            "if rank != 3:\n"
            "    loss.backward()",
        )
    assert str(error) == (
        f"{DEADLOCK}\n"
        "Ranks 0, 1 and 2 were stuck in backward, line 4 of the cell: "
        "loss.backward()\n"
        f"Rank 3 finished the cell.\n{NEEDS_ALL}\n{KEPT}"
    )
    kept(ranks)


# --------------------------------------------------------------------------- deadlocks
def test_a_skipped_collective_is_named(ranks):
    with within(DEADLOCK_SECONDS):
        error = failure_of(
            ranks, "x = torch.ones(2)\nif rank != 2:\n    dist.all_reduce(x)"
        )
    assert str(error) == (
        f"{DEADLOCK}\n"
        "Ranks 0, 1 and 3 were stuck in all_reduce, line 3 of the cell: "
        "dist.all_reduce(x)\n"
        f"Rank 2 finished the cell.\n{NEEDS_ALL}\n{KEPT}"
    )
    assert error.cause == "timeout" and error.finished == [2]
    assert {failure.kind for failure in error.failures.values()} == {"stuck"}
    assert error.failures[3].where == (
        "all_reduce, line 3 of the cell: dist.all_reduce(x)"
    )
    kept(ranks)


def test_a_skipped_collective_in_a_function_is_named(ranks):
    def step():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            return
        dist.all_reduce(torch.ones(2))

    with within(DEADLOCK_SECONDS):
        error = failure_of(ranks, step)
    line = step.__code__.co_firstlineno + 6
    assert (
        f"Ranks 1, 2 and 3 were stuck in all_reduce, line {line} of "
        "test_ranks_faults.py: dist.all_reduce(torch.ones(2))"
    ) in str(error)
    kept(ranks)


@pytest.mark.parametrize(
    "cell, stuck",
    [
        ("dist.recv(torch.ones(2), rank ^ 1)", "recv, line 1 of the cell"),
        (
            "dist.recv(torch.ones(2), (rank + 1) % 4)\n"
            "dist.send(torch.ones(2), (rank - 1) % 4)",
            "recv, line 1 of the cell",
        ),
        (
            "x = torch.ones(1 << 22)\ndist.send(x, rank ^ 1)\ndist.recv(x, rank ^ 1)",
            "send, line 2 of the cell",
        ),
        (
            "work = dist.irecv(torch.ones(2), rank ^ 1)\nwork.wait()",
            "wait, line 2 of the cell",
        ),
    ],
    ids=["pairs recv first", "a ring recvs first", "large sends first", "wait"],
)
def test_all_wait_for_each_other(ranks, cell, stuck):
    with within(DEADLOCK_SECONDS):
        error = failure_of(ranks, cell)
    line = cell.splitlines()[int(re.search(r"line (\d)", stuck)[1]) - 1]
    assert str(error) == (
        f"{DEADLOCK}\nRanks 0 to 3 were stuck in {stuck}: {line}\n{EACH_OTHER}\n{KEPT}"
    )
    kept(ranks)


def test_ranks_stuck_in_different_places(ranks):
    with within(DEADLOCK_SECONDS):
        error = failure_of(
            ranks,
            "if rank == 0:\n    dist.recv(torch.ones(1), 1)\nelse:\n    dist.barrier()",
        )
    assert "Rank 0 was stuck in recv, line 2 of the cell: " in str(error)
    assert "Ranks 1, 2 and 3 were stuck in barrier, line 4 of the cell: " in str(error)
    kept(ranks)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (
            "try:\n    dist.recv(torch.ones(1), rank ^ 1)\n"
            "except RuntimeError:\n    pass",
            f"{DEADLOCK}\nRanks 0 to 3 were stuck in recv, line 2 of the cell: "
            f"dist.recv(torch.ones(1), rank ^ 1)\n{EACH_OTHER}\n{KEPT}",
        ),
        (
            "if rank == 1:\n    try:\n        dist.barrier()\n    except Exception:\n"
            "        pass",
            f"{DEADLOCK}\nRank 1 was stuck in barrier, line 3 of the cell: "
            f"dist.barrier()\nRanks 0, 2 and 3 finished the cell.\n{NEEDS_ALL}\n{KEPT}",
        ),
        (
            "import time\ntry:\n    time.sleep(99)\n"
            "except KeyboardInterrupt:\n    pass",
            "Not finished after 1 s, the limit for this cell.\nRanks 0 to 3 were still "
            f"running: line 3 of the cell: time.sleep(99)\n{KEPT}",
        ),
    ],
    ids=["all", "one", "limit"],
)
def test_a_rank_that_catches_what_has_freed_it_has_not_finished(ranks, cell, says):
    with within(DEADLOCK_SECONDS):
        error = failure_of(ranks, cell, **({"timeout": 1} if "sleep" in cell else {}))
    assert (str(error), error.cause) == (says, "timeout")
    kept(ranks)


MODEL = (
    "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
    "pair = dist.new_group([0, 1])"
)
STEP = "model(torch.ones(1, 2)).sum().backward()\n"
PAIR = "if rank < 2: dist.all_reduce(torch.ones(2), group=pair)\n"


@pytest.mark.parametrize("cell", [STEP, PAIR])
def test_what_belongs_to_a_closed_group_is_to_be_made_anew(ranks, cell):
    anew = (
        "A cell that leaves ranks out of step closes the process group. DDP models and "
        "groups that were made before it work no longer: make them anew.\n"
    )
    ranks.run_cell(MODEL, timeout=LOAD * 30)
    first = failure_of(ranks, "if rank == 1: a_slip_of_the_pen\ndist.barrier()")
    assert anew not in str(first)
    error = failure_of(ranks, cell)
    assert "Connection closed" in str(error), str(error)
    assert str(error).endswith(anew + KEPT), str(error)
    ranks.run_cell(f"{MODEL}\n{cell}")


@pytest.mark.parametrize(
    "cell",
    thorough_after(
        6,
        [
            "a_slip_of_the_pen",
            STEP + "a_slip_of_the_pen",
            PAIR + "a_slip_of_the_pen",
            "if rank == 1: 1 / 0",
            "import time\ntime.sleep(0.3 * rank)\n1 / 0",
            "work = dist.all_reduce(torch.ones(2), async_op=True)\n1 / 0",
            "dist.send(torch.ones(2), dst=rank)",
            "x = torch.ones(2)\n"
            "if rank == 0: dist.send(x, dst=1)\n"
            "if rank == 1: dist.recv(x, src=0)\n"
            "1 / 0",
            "another = dist.new_group([0, 1])\n1 / 0",
        ],
    ),
)
def test_ranks_in_step_keep_their_group(ranks, cell):
    ranks.run_cell(MODEL, timeout=LOAD * 30)
    for _ in range(2):
        assert str(failure_of(ranks, cell)).endswith(GROUP_STAYS)
        ranks.run_cell(STEP + PAIR)
    kept(ranks)


def test_a_slip_on_some_ranks_alone_keeps_the_group(ranks):
    ranks.run_cell(MODEL, timeout=LOAD * 30)
    assert str(failure_of(ranks, "1 / 0", only=[0, 2])).endswith(GROUP_STAYS)
    ranks.run_cell(STEP + PAIR)
    some = PAIR + "1 / 0"  # all ranks of that group
    assert str(failure_of(ranks, some, only=[0, 1])).endswith(GROUP_STAYS)
    ranks.run_cell(STEP + PAIR)
    begun = "work = dist.all_reduce(torch.ones(2), async_op=True)\n1 / 0"
    assert str(failure_of(ranks, begun, only=[0, 1])).endswith(KEPT)


@pytest.mark.parametrize(
    "cell",
    thorough_after(
        5,
        [
            "if rank == 1: 1 / 0\ndist.barrier()",
            "if rank != 2: work = dist.all_reduce(torch.ones(2), async_op=True)\n1 / 0",
            "if rank == 0: work = dist.isend(torch.ones(2), dst=1)\n1 / 0",
            "if rank == 0: work = dist.irecv(torch.ones(2))\n1 / 0",
            "if rank == 3: alone = dist.new_group([3])\n1 / 0",
            "dist.destroy_process_group()\n1 / 0",
            "import datetime\n"
            "moment = datetime.timedelta(seconds=0.05)\n"
            "x = torch.ones(2)\n"
            "if rank == 0: dist.irecv(x, src=1).wait(moment)\n"
            "if rank == 1:\n"
            "    import time\n"
            "    time.sleep(0.2)\n"
            "    work = dist.isend(x, dst=0)",
            "dist.is_initialized = None\n1 / 0",
        ],
    ),
)
def test_ranks_out_of_step_get_a_new_group(ranks, cell):
    try:
        assert str(failure_of(ranks, cell)).endswith(KEPT)
    finally:
        if "is_initialized" in cell:
            ranks.restart()
            ranks.run_cell("kept = rank * 11")
    works(ranks)
    kept(ranks)


@pytest.mark.thorough
def test_a_rank_that_computes_after_its_end_is_no_help(ranks):
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


SHARD = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
shard = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
"""


def test_ranks_of_another_age_compare_the_same_calls(watch):  # noqa: F811
    # DTensor has the functions by name. Whether it was imported before a rank began
    # must make no difference to what is compared.
    with Ranks(2, quiet=True) as ranks:
        for _ in range(2):
            ranks.run_cell(SHARD)
            assert [s.tolist() for s in ranks.run(local_shard)] == [[0, 1], [2, 3]]
            ranks.run_cell(
                "from torch.distributed.tensor import _collective_utils as c"
            )
            ranks.run_cell("assert c.scatter is dist.scatter")
            failure_of(ranks, "import os\nif rank == 0: os._exit(1)")
        assert ranks.pull("rank") == [0, 1]


@pytest.mark.parametrize(
    ("cell", "where"),
    thorough_after(
        1,
        [
            ("if rank == 0: shard.full_tensor()", "full_tensor, line 1"),
            (
                "from torch.distributed.fsdp import fully_shard\n"
                "model = fully_shard(torch.nn.Linear(4, 4))\n"
                "if rank == 0: model(torch.ones(1, 4))",
                "forward, line 3",
            ),
        ],
    ),
    ids=["DTensor", "FSDP2"],
)
def test_collectives_that_nobody_sees_are_waited_for(watch, cell, where):  # noqa: F811
    with Ranks(2, quiet=True) as ranks:
        ranks.run_cell(SHARD)
        ranks.run_cell("from torch.distributed.fsdp import fully_shard")
        with within(DEADLOCK_SECONDS):
            error = failure_of(ranks, cell)
        said = f"{DEADLOCK}\nRank 0 was stuck in {where} of the cell: if rank == 0: "
        assert str(error).startswith(said)
        ranks.run_cell(SHARD)  # in the new group
        late = failure_of(ranks, cell.replace("if rank == 0: ", "if rank: 1 / 0\n"))
        assert f"Rank 0 was waiting in {where.partition(',')[0]}" in str(late)


def local_shard():
    import __main__

    return __main__.shard.to_local()


def test_stuck_in_a_module_and_in_code_that_python_has_made(ranks):
    cell = (
        "from dataclasses import dataclass, field\n"
        "class Waits(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.Identity()(Wait())\n"
        "@dataclass\n"
        "class Wait:\n"
        "    got: int = field(default_factory=dist.barrier)\n"
        "if rank == 1: Waits()(1)"
    )
    with within(DEADLOCK_SECONDS):
        error = failure_of(ranks, cell)
    assert "Rank 1 was stuck in barrier, line 4 of the cell: return torch" in str(error)
    frames = [
        ("x/torch/distributed/c10d.py", 1, "broadcast"),
        ("x/torch/nn/parallel/distributed.py", 1, "forward"),
        ("x/torch/nn/modules/module.py", 1, "_call_impl"),
        ("x/torch/nn/modules/module.py", 1, "_wrapped_call_impl"),
    ]
    site = report.LIBRARIES[0]
    frames = [(site + file[2:], line, name) for file, line, name in frames]
    assert report.find_where([*frames, ("<string>", 2, "f")]) == (
        "forward, line 2 of the cell"
    )


def test_the_course_may_lie_behind_a_link(tmp_path):
    """As in a clone that is reached by one: whose call it was is still known."""
    (tmp_path / "course_utils").symlink_to(Path(report.PACKAGE))
    inner = str(tmp_path / "course_utils" / "ranks" / "agreement.py")
    call = (str(tmp_path / "mine.py"), 3, "<module>")
    assert not report.is_of_library([(inner, 1, "checked"), call])
    assert report.is_of_library([(inner, 1, "checked"), (json.__file__, 1, "f"), call])


def test_a_traceback_without_own_frames_has_no_head():
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next  # without the line above
    assert report.own_traceback(error).startswith("json.decoder.JSONDecodeError: ")


def test_new_group_on_one_rank_only(ranks):
    # C++ waits in a file store, which nothing can end: that rank is replaced.
    with within(DEADLOCK_SECONDS + LADDER_SECONDS):
        error = failure_of(ranks, "if rank == 1: dist.new_group([0, 1])")
    assert str(error) == (
        f"{DEADLOCK}\n"
        "Rank 1 was stuck in new_group, line 1 of the cell: "
        "if rank == 1: dist.new_group([0, 1])\n"
        "Ranks 0, 2 and 3 finished the cell.\n"
        "Every rank must make every group, with the same ranks and in the same order, "
        f"also a group that it is not in.\n{FRESH_1}"
    )
    kept(ranks, 1)


@pytest.mark.thorough
def test_a_slow_rank_is_no_deadlock(ranks):
    # Ranks 1 to 3 wait much longer than a deadlock takes to be noticed.
    ranks.run_cell("import time\nif rank == 0: time.sleep(3)\ndist.barrier()")
    ranks.run_cell(
        "if rank == 0:\n"
        "    end = time.monotonic() + 3\n"
        "    while time.monotonic() < end: torch.ones(100) @ torch.ones(100)\n"
        "dist.barrier()"
    )


def test_messages_that_go_to_and_fro_are_no_deadlock(ranks):
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


@pytest.mark.thorough
def test_a_slow_link_is_no_deadlock(ranks):
    ranks.run_cell(
        """
from course_utils.measure.calibration import EmulatedLink
with EmulatedLink(latency=4, bandwidth=1e9):
    if rank == 0: dist.send(torch.ones(1), 1)
    if rank == 1: dist.recv(torch.ones(1), 0)
dist.barrier()
"""
    )


@pytest.mark.thorough
def test_eight_ranks_on_two_cores_deadlock(watch):  # noqa: F811
    with Ranks(8, output="grouped", quiet=True) as ranks:
        with within(DEADLOCK_SECONDS):
            error = failure_of(ranks, "if rank != 7: dist.all_reduce(torch.ones(1))")
        assert "Ranks 0 to 6 were stuck in all_reduce, line 1" in str(error)
        works(ranks)


# --------------------------------------------------------------- what does not end
LIMIT = 1.0


@pytest.mark.parametrize(
    "cell, seconds, fresh",
    thorough_after(
        3,
        [
            ("while True: pass", 0.5, False),
            (
                "while True:\n    try:\n        while True: pass\n    except: pass",
                2.7,
                None,
            ),
            ("import time\ntime.sleep(1000)", 0.5, False),
            ("import threading\nthreading.Event().wait()", 0.5, False),
            (
                "input_, output = __import__('os').pipe()\nopen(input_).read()",
                0.5,
                False,
            ),
            ("import subprocess\nsubprocess.run(['sleep', '1000'])", 0.5, False),
            ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", 2.7, True),
            ("sum(range(10**15))", 2.7, True),
            ("while True: print('more', rank)", 0.5, False),
            ("while True: torch.ones(1000, 1000) @ torch.ones(1000, 1000)", 0.5, False),
        ],
    ),
    ids=[
        "a loop",
        "a loop that catches all",
        "sleep",
        "a lock",
        "a pipe",
        "a child",
        "a regular expression",
        "a sum in C",
        "printing",
        "tensor work",
    ],
)
def test_what_never_ends_on_one_rank_is_ended(ranks, capsys, cell, seconds, fresh):
    body = "\n".join("    " + line for line in cell.splitlines())
    with within(LIMIT + 0.6 + seconds):
        error = failure_of(
            ranks, f"if rank == 1:\n{body}\ndist.barrier()", timeout=LIMIT
        )
    last = 2 + cell.count("\n")
    assert error.cause == "timeout"
    assert str(error).startswith(
        f"Not finished after {LIMIT:g} s, the limit for this cell.\n"
    )
    assert f"Ranks 0, 2 and 3 were stuck in barrier, line {last + 1} of" in str(error)
    assert re.search(r"Rank 1 was still running: .*line \d of the cell: ", str(error))
    assert error.failures[1].error == "running"
    if fresh is not None:  # whether an interrupt gets through is a matter of luck
        kept(ranks, *([1] if fresh else []))


@pytest.mark.thorough
def test_what_a_collective_does_on_its_way_is_not_computing(ranks):
    # Whoever waits wakes up now and then. Here that takes most of the time.
    ranks.run_cell(
        "import functools, threading\n"
        "from course_utils.ranks import agreement\n"
        "slow = functools.partial(threading.Event().wait, 0.5)\n"
        "agreement._of_this_rank.wait_gone = slow"
    )
    try:
        for cell, begins in (
            ("if rank == 1:\n    while True: pass\ndist.barrier()", "Not finished"),
            ("if rank != 1: dist.barrier()", "Deadlock"),
        ):
            error = failure_of(ranks, cell, timeout=5)
            assert str(error).startswith(begins)
            assert "Ranks 0, 2 and 3 were stuck in barrier, line" in str(error)
    finally:
        ranks.restart()


def test_learners_code_within_a_collective_computes(ranks):
    # An object is pickled there, by a method of the learner's.
    error = failure_of(
        ranks,
        "class Endless:\n"
        "    def __reduce__(self):\n"
        "        while rank == 1: pass\n"
        "        return int, ()\n"
        "dist.all_gather_object([None] * world_size, Endless())",
        timeout=LIMIT,
    )
    assert "Ranks 0, 2 and 3 were stuck in all_gather_object, line 5" in str(error)
    assert "Rank 1 was still running: line 3 of the cell: while rank" in str(error)


def test_a_stopped_process_is_ended(ranks):
    with within(LIMIT + LADDER_SECONDS):
        error = failure_of(
            ranks,
            "import os, signal\n"
            "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
            "dist.barrier()",
            timeout=LIMIT,
        )
    assert "Rank 1 was still running." in str(error)
    assert str(error).endswith(FRESH_1)
    kept(ranks, 1)


IN_A_THREAD = {
    "join": """import threading
thread = threading.Thread(target=step)
thread.start()
thread.join()""",
    "result": """from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    pool.submit(step).result()""",
}


@pytest.mark.parametrize("waits", thorough_after(1, IN_A_THREAD))
def test_a_deadlock_in_a_thread_that_the_cell_waits_for(ranks, capfd, waits):
    cell = f"def step():\n    if rank != 2: dist.barrier()\n{IN_A_THREAD[waits]}"
    with within(8):
        error = failure_of(ranks, cell)
    assert str(error).startswith(
        "Deadlock: nothing moves, and nothing will.\n"
        "Ranks 0, 1 and 3 were stuck in barrier, line 2 of the cell: "
        "if rank != 2: dist.barrier()\nRank 2 finished the cell.\n"
    )
    assert "Traceback" not in "".join(capfd.readouterr())
    works(ranks)


@pytest.mark.thorough
def test_a_rank_that_handles_interrupts_itself(ranks):
    with within(LIMIT + LADDER_SECONDS):
        error = failure_of(
            ranks,
            "import signal\n"
            "if rank == 1: signal.signal(signal.SIGINT, lambda *_: None)\n"
            "while True: pass",
            timeout=LIMIT,
        )
    assert error.cause == "timeout"
    kept(ranks, 1)


# ------------------------------------------------------------------------------- deaths
@pytest.mark.parametrize(
    "how, text",
    [
        ("os._exit(3)", "exit code 3"),
        ("os._exit(0)", "exit code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM"),
        ("os.abort()", "SIGABRT"),
        ("ctypes.string_at(0)", "SIGSEGV"),
    ],
)
@pytest.mark.parametrize("waiting", [True, False], ids=["others wait", "alone"])
def test_a_rank_dies(ranks, how, text, waiting):
    with within(1):
        error = failure_of(
            ranks,
            "import ctypes, os, signal\n"
            f"if rank == 1: {how}\n" + ("dist.all_reduce(torch.ones(2))\n" * waiting),
        )
    assert error.cause == "died"
    assert error.root == error.failures[1]
    assert (error.root.kind, error.root.error) == ("died", text)
    assert str(error).startswith(f"Rank 1 died ({text})")
    if text in ("SIGSEGV", "SIGABRT"):
        assert f"line 2 of the cell: if rank == 1: {how}.\n" in str(error)
    if waiting:
        assert (
            "\nRanks 0, 2 and 3 were waiting in all_reduce, line 3 of the cell: "
            "dist.all_reduce(torch.ones(2))\n"
        ) in str(error)
    else:
        assert error.finished == [0, 2, 3]
    assert str(error).endswith("\n" + FRESH_1)
    kept(ranks, 1)


def test_sys_exit_is_an_exception(ranks):
    with within(1):
        error = failure_of(
            ranks, "import sys\nif rank == 1: sys.exit(2)\ndist.barrier()"
        )
    assert str(error) == (
        "Rank 1 raised SystemExit: 2\n"
        "  line 2 of the cell: if rank == 1: sys.exit(2)\n"
        "  exit() ends a script. A rank goes on living: leave it out.\n"
        "Ranks 0, 2 and 3 were waiting in barrier, line 3 of the cell: dist.barrier()\n"
        + KEPT
    )
    kept(ranks)


def in_a_thread(action):
    """Run this beside the cell; join it before the test ends."""
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def pids_of(ranks):
    return [ranks.team.processes[rank].pid for rank in range(ranks.n)]


def test_a_rank_is_killed_from_outside_while_all_wait(ranks, tmp_path):
    inside = tmp_path / "inside"
    pids = pids_of(ranks)

    def kill():
        eventually(inside.exists)
        os.kill(pids[1], signal.SIGKILL)

    killer = in_a_thread(kill)
    error = failure_of(
        ranks,
        f"if rank == 0: open({str(inside)!r}, 'w').close()\n"
        "if rank == 1: __import__('time').sleep(1000)\n"
        "dist.barrier()",
        timeout=10,
    )
    killer.join()
    assert error.cause == "died" and error.root.error == "SIGKILL"
    assert error.root.seconds < 8
    kept(ranks, 1)


def test_a_rank_is_killed_between_two_cells(ranks):
    victim = psutil.Process(pids_of(ranks)[1])
    victim.kill()
    eventually(lambda: not victim.is_running() or victim.status() == "zombie")
    with within(1):
        error = failure_of(ranks, "dist.barrier()")
    assert str(error).startswith("Rank 1 died (SIGKILL).\n")
    kept(ranks, 1)


def test_all_ranks_die_at_once(ranks):
    with within(1):
        error = failure_of(ranks, "import os\nos._exit(rank + 1)")
    assert len(error.failures) == 4
    assert str(error).endswith(
        "(Ranks 0 to 3 were started afresh, without variables. "
        "The next cell gets a new process group.)"
    )
    kept(ranks, 0, 1, 2, 3)


def test_a_rank_dies_while_it_prints(ranks, capsys):
    failure_of(
        ranks,
        "import os\n"
        "print('last words of', rank)\n"
        "if rank == 1: print('no end', end='', flush=True); os._exit(1)",
    )
    assert capsys.readouterr().out == (
        "[rank 0] last words of 0\n"
        "[rank 1] last words of 1\n[rank 1] no end\n"
        "[rank 2] last words of 2\n[rank 3] last words of 3\n"
    )


@pytest.fixture
def own_helper(watch, monkeypatch):  # noqa: F811
    """New ``Ranks`` get a helper process of their own: the shared ranks live on."""
    monkeypatch.setattr(Zygote, "current", None)
    yield
    watch.assert_no_strays()


@pytest.mark.thorough
def test_the_helper_process_is_killed(own_helper, tmp_path, monkeypatch):
    # What it imports at its start is Python's own, whatever lies in this folder.
    (tmp_path / "random.py").write_text("hides = 'Python has a module of this name'\n")
    monkeypatch.chdir(tmp_path)
    with Ranks(2, output="grouped", quiet=True) as ranks:
        ranks.run_cell("x = 1")
        helper = ranks.team.zygote.process.pid
        os.kill(helper, signal.SIGKILL)
        eventually(lambda: ranks.team.zygote.process.poll() is not None)
        with within(8):
            error = failure_of(ranks, "dist.barrier()")
        assert str(error) == (
            "Ranks 0 and 1 died (unknown exit status).\n"
            "  The helper process that starts ranks was ended, and with it all ranks.\n"
            "(Ranks 0 and 1 were started afresh, without variables. "
            "The next cell gets a new process group.)"
        )
        works(ranks)
        with Ranks(2, quiet=True) as others:
            works(others)


def test_the_helper_process_is_killed_during_a_cell(own_helper, tmp_path):
    inside = tmp_path / "inside"
    with Ranks(2, output="grouped", quiet=True, timeout=20) as ranks:
        helper = ranks.team.zygote.process

        def kill():
            eventually(inside.exists)
            os.kill(helper.pid, signal.SIGKILL)

        killer = in_a_thread(kill)
        with within(8):
            error = failure_of(
                ranks,
                f"open({str(inside)!r}, 'w').close()\n__import__('time').sleep(1000)",
            )
        killer.join()
        assert error.cause == "died"
        works(ranks)


CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.thorough
@pytest.mark.parametrize("deaf", [False, True])
def test_ranks_crash_while_the_helper_imports(own_helper, tmp_path, monkeypatch, deaf):
    begun = tmp_path / "begun"
    held_back = "{signal.SIGCHLD}" if deaf else "()"
    (tmp_path / "takes_its_time.py").write_text(
        "import signal, time\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, {held_back})\n"
        f"open({str(begun)!r}, 'w').close()\n"
        "time.sleep(2.5)\n"
        "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Ranks(2, output="grouped", quiet=True) as ranks:
        ranks.team.zygote.import_first("takes_its_time")
        eventually(begun.exists)
        error = failure_of(ranks, CRASH)
        assert str(error).startswith("Ranks 0 and 1 died (SIGSEGV)")
        assert "helper" not in str(error)
        assert deaf or error.root.seconds < 1 * LOAD
        works(ranks)


@pytest.mark.thorough
def test_ranks_crash_while_the_helper_is_stopped(own_helper, monkeypatch):
    monkeypatch.setattr("course_utils.ranks.round.STATUS_SECONDS", 0.5)
    with Ranks(2, output="grouped", quiet=True) as ranks:
        helper, start = ranks.team.zygote.process.pid, ranks.team.start

        def go_on_and_start(which):
            os.kill(helper, signal.SIGCONT)
            start(which)

        monkeypatch.setattr(ranks.team, "start", go_on_and_start)
        os.kill(helper, signal.SIGSTOP)
        try:
            with within(4):
                error = failure_of(ranks, CRASH)
        finally:
            os.kill(helper, signal.SIGCONT)
        assert str(error) == (
            "Ranks 0 and 1 died (unknown exit status) at line 2 of the cell: "
            "os.kill(os.getpid(), signal.SIGSEGV).\n"
            "  The connection closed; how the process ended was not known in time.\n"
            "(Ranks 0 and 1 were started afresh, without variables. "
            "The next cell gets a new process group.)"
        )
        works(ranks)


# ------------------------------------------------------------ processes made by ranks
def test_a_fork_inside_a_rank_that_goes_on_is_harmless(ranks, capsys):
    ranks.run_cell(
        "import os, warnings\n"
        "with warnings.catch_warnings():  # of Python 3.12: a rank has threads\n"
        "    warnings.simplefilter('ignore')\n"
        "    pid = os.fork()\n"
        "if pid:\n"
        "    os.waitpid(pid, 0)\n"
        "    print('parent')\n"
    )
    assert capsys.readouterr().out == "".join(f"[rank {r}] parent\n" for r in range(4))
    kept(ranks)


def test_a_forked_child_that_raises_is_harmless(ranks):
    ranks.run_cell(
        "import os\nif os.fork() == 0: raise ValueError('child')\nelse: os.wait()"
    )
    kept(ranks)


def test_a_forked_child_that_outlives_its_cell_and_its_rank(ranks):
    ranks.run_cell("import os, time\nif os.fork() == 0: time.sleep(1000)")
    works(ranks)
    failure_of(ranks, "os._exit(1)")  # with the rank its children go


def test_multiprocessing_inside_a_rank(ranks):
    ranks.run_cell(
        "import multiprocessing\n"
        "context = multiprocessing.get_context('fork')\n"
        "queue = context.Queue()\n"
        "child = context.Process(target=lambda: queue.put(rank * 2))\n"
        "child.start()\n"
        "doubled = queue.get(timeout=10)\n"
        "child.join(10)\n"
        "assert child.exitcode == 0\n"
        "queue.close(); queue.join_thread()"
    )
    assert ranks.pull("doubled") == [0, 2, 4, 6]


def test_semaphores_with_a_name_go_with_their_rank(ranks):
    ranks.run_cell("import os\npid = os.getpid()")
    own = tuple(f"sem.mp-rank-{pid}-" for pid in ranks.pull("pid"))

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


LOADER = """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.arange(8.)), batch_size=2, num_workers=2)
seen = sum(float(x.sum()) for x, in loader)
"""


def test_data_loader_workers_inside_a_rank(ranks):
    ranks.run_cell(LOADER)
    assert ranks.pull("seen") == [28.0] * 4


def test_data_loader_workers_die_with_their_rank(ranks):
    error = failure_of(
        ranks,
        LOADER + "import os\nbatches = iter(loader); next(batches)\n"
        "if rank == 1: os._exit(1)\ndist.barrier()",
    )
    assert error.root.error == "exit code 1"
    ranks.run_cell("batches = None", only=[0, 2, 3])


def test_data_loader_workers_are_ended_with_a_stuck_rank(ranks):
    error = failure_of(
        ranks,
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n"
        "        import time; time.sleep(1000)\n"
        "if rank == 1:\n"
        "    for x in torch.utils.data.DataLoader(Slow(), num_workers=2): pass\n"
        "dist.barrier()",
        timeout=LIMIT,
    )
    assert error.failures[1].error == "running"
    kept(ranks)


def test_a_data_loader_worker_is_killed(ranks):
    with within(8):  # torch itself looks every 5 s
        error = failure_of(
            ranks,
            "import os, signal\n"
            "class Deadly(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 4\n"
            "    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGKILL)\n"
            "if rank == 1:\n"
            "    for x in torch.utils.data.DataLoader(Deadly(), num_workers=1): pass\n"
            "dist.barrier()",
        )
    assert error.root.rank == 1 and "DataLoader worker" in error.root.message
    kept(ranks)


def test_what_ranks_start_ends_with_them(watch):  # noqa: F811
    before = set(marked_processes())
    with Ranks(2, output="grouped", quiet=True) as ranks:
        ranks.run_cell(
            "import subprocess\n"
            "plain = subprocess.Popen(['sleep', '1000'])\n"
            "away = subprocess.Popen(['sleep', '1001'], start_new_session=True)\n"
            "shell = subprocess.run(\n"
            "    'setsid sleep 1002 > /dev/null 2>&1 < /dev/null &', shell=True)"
        )

        def sleeping() -> list[str]:
            return [t for t in marked_processes().values() if t.startswith("sleep 100")]

        eventually(lambda: len(sleeping()) == 6)  # a shell does not wait for its own
        # A rank that is replaced takes what it has started with it.
        failure_of(ranks, "import os\nif rank == 0: os._exit(1)")
    watch.assert_no_strays()
    assert set(marked_processes()) <= before


def test_a_thread_that_prints_between_cells(ranks, capsys, tmp_path):
    # What it prints after the end of a cell comes with the next one, and blocks nobody.
    said = tmp_path / "said"
    ranks.run_cell(
        "import threading\n"
        "def talk():\n"
        "    go.wait(); print('x' * 300_000)\n"
        f"    open({str(said)!r}, 'w').close()\n"
        "go = threading.Event()\n"
        "talker = threading.Thread(target=talk, daemon=True); talker.start()\n",
        only=[0],
    )
    ranks.run_cell("go.set()", only=[0])
    ranks.run_cell("talker.join()", only=[0], timeout=10)
    assert said.exists()
    assert "[rank 0] xxxx" in capsys.readouterr().out


# --------------------------------------------------------------------- odd things to do
def test_standard_output_is_closed(ranks, capsys):
    ranks.run_cell("import os\nif rank == 1: os.close(1)")
    works(ranks)
    ranks.run_cell("if rank != 1: print('still here')")
    assert "[rank 0] still here" in capsys.readouterr().out
    ranks.restart()


def test_both_outputs_and_every_file_are_closed(ranks):
    with within(1):
        error = failure_of(
            ranks, "import os\nif rank == 1: os.closerange(0, 200)\ndist.barrier()"
        )
    assert error.root.rank == 1
    ranks.run_cell("kept = rank * 11")


def test_output_is_replaced(ranks, capsys):
    ranks.run_cell(
        "import io, sys\n"
        "if rank == 1: sys.stdout = io.StringIO()\n"
        "if rank == 2: sys.stdout = None\n"
        "if rank == 3: del sys.stdout\n"
    )
    works(ranks)
    ranks.run_cell("sys.stdout = sys.__stdout__")
    ranks.restart()


def test_a_rank_changes_its_surroundings(ranks, tmp_path):
    ranks.run_cell(
        "import os, sys\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "os.environ.clear()\n"
        "sys.path.clear()\n"
        "sys.argv.clear()\n"
        "del os"
    )
    failure_of(ranks, "if rank == 1: 1 / 0\ndist.barrier()")
    works(ranks)
    ranks.restart()


def test_the_folder_of_the_kernel_is_gone(ranks, tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    failure_of(ranks, "import os\nif rank == 1: os._exit(1)")
    works(ranks)
    monkeypatch.undo()
    ranks.restart()


def test_names_of_ours_are_overwritten(ranks):
    ranks.run_cell("rank = world_size = torch = dist = None")
    assert ranks.run(lambda: os.environ["RANK"]) == list("0123")
    ranks.restart()


def test_deep_recursion(ranks):
    with within(2):
        error = failure_of(ranks, "def down(): down()\n\ndown()", only=[0])
    assert str(error).startswith(
        "Rank 0 raised RecursionError: maximum recursion depth exceeded\n"
        "  line 3 of the cell: down()\n"
        "  line 1 of the cell, in down: def down(): down()\n"
    )
    assert re.search(r"\n  \.\.\. 9\d\d more calls \.\.\.\n", str(error))
    assert len(str(error).splitlines()) < 14
    kept(ranks)


@pytest.mark.parametrize(
    "cell, name",
    [
        ("torch.empty(1 << 48)", "RuntimeError"),
        ("bytearray(1 << 60)", "MemoryError"),
    ],
)
def test_more_memory_than_there_is(ranks, cell, name):
    with within(1):
        error = failure_of(ranks, f"if rank == 1: {cell}\ndist.barrier()")
    assert (error.root.rank, error.root.error) == (1, name)
    kept(ranks)


STRANGE = {
    "str raises": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError('no text')\n",
        "Odd()",
        "Odd: (its message could not be read)",
    ),
    "str is no text": (
        "class Odd(Exception):\n    def __str__(self): return 5\n",
        "Odd()",
        "Odd: (its message could not be read)",
    ),
    "str exits": (
        "class Odd(Exception):\n    def __str__(self): raise SystemExit\n",
        "Odd()",
        "Odd: (its message could not be read)",
    ),
    "its cause has no text": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError('no text')\n",
        "KeyError('x') from Odd()",
        "KeyError: 'x'\n(caused by Odd: (its message could not be read))",
    ),
    "cannot be pickled": (
        "class Odd(Exception):\n    def __reduce__(self): raise TypeError('stays')\n",
        "Odd('here')",
        "Odd: here",
    ),
    "long": ("", "ValueError('m' * 1_000_000)", "ValueError: " + "m" * 300 + "\n"),
    "many lines": ("", "ValueError('m\\n' * 1000)", "ValueError: m\nm\nm\nm\nm\n...\n"),
    "a group": (
        "",
        "__import__('builtins').BaseException('base')",
        "BaseException: base\n",
    ),
    "an interrupt": ("", "KeyboardInterrupt('mine')", "KeyboardInterrupt: mine\n"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_exceptions(ranks, kind):
    before, raised, says = STRANGE[kind]
    with within(1):
        error = failure_of(
            ranks, f"{before}if rank == 1: raise {raised}\ndist.barrier()"
        )
    assert error.cause == "raised" and error.root.rank == 1
    assert str(error).startswith("Rank 1 raised " + says)
    assert len(str(error)) < 5000
    kept(ranks)


def test_a_value_that_cannot_be_shown(ranks):
    error = failure_of(
        ranks,
        "class Odd:\n    def __repr__(self): raise ValueError('no picture')\n\nOdd()",
        only=[1],
    )
    assert (error.root.error, error.root.message) == ("ValueError", "no picture")
    kept(ranks)


def test_a_failure_in_an_import_of_the_learners_own_file(ranks, tmp_path):
    (tmp_path / "broken_module.py").write_text("x = 1\ny = = 2\n")
    error = failure_of(
        ranks,
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport broken_module",
    )
    assert "SyntaxError" in str(error)
    assert "line 2 of broken_module.py" in str(error)
    kept(ranks)


@pytest.mark.thorough
def test_twenty_failures_in_a_row(ranks):
    for number in range(20):
        with within(1):
            error = failure_of(
                ranks, f"if rank == {number % 4}: 1 / 0\ndist.all_reduce(torch.ones(4))"
            )
        assert error.root.rank == number % 4
        works(ranks)
    kept(ranks)


# -------------------------------------------------------------------- Ctrl-C, and forks
def interrupted_when_inside(folder: Path, action):
    """Run ``action`` in the main thread; SIGINT comes once 4 files are in ``folder``.

    And a moment later, so that the ranks get from there to the next line.
    """

    def interrupt():
        eventually(lambda: len(list(folder.iterdir())) == 4)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = in_a_thread(interrupt)
    started = time.monotonic()
    try:
        action()
    finally:
        thread.join()
    return time.monotonic() - started


def test_an_interrupt_while_ranks_are_made(own_helper):
    # The helper process is new and imports torch: time enough for an interrupt.
    def interrupt():
        eventually(lambda: Zygote.current is not None)
        os.kill(os.getpid(), signal.SIGINT)

    thread = in_a_thread(interrupt)
    with within(1), pytest.raises(KeyboardInterrupt):
        Ranks(2, quiet=True)
    thread.join()
    assert Zygote.current is None
    with Ranks(2, quiet=True) as ranks:
        works(ranks)


def test_an_interrupt_in_a_restart_leaves_whole_ranks(watch, monkeypatch):  # noqa: F811
    """It comes when the old ranks have ended and no new one has begun."""
    start = Team.start

    def interrupted(team, which):
        os.kill(os.getpid(), signal.SIGINT)
        start(team, which)

    with Ranks(2, quiet=True) as ranks:
        monkeypatch.setattr(Team, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.restart()
        monkeypatch.undo()
        works(ranks)


@pytest.mark.parametrize("step", ["hello", "group"])
def test_an_interrupt_while_ranks_are_asked_and_meet(watch, monkeypatch, step):  # noqa: F811
    """It comes when all ranks have their request: they may well finish it."""
    interrupted_after(step, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        Ranks(2, quiet=True)
    monkeypatch.undo()
    with Ranks(2, quiet=True) as ranks:
        works(ranks)


def test_an_interrupt_of_what_is_just_done_is_not_lost(ranks, monkeypatch):
    """Cells that wait for this one must not run: only an exception keeps them."""
    interrupted_after("call", monkeypatch)
    with pytest.raises((KeyboardInterrupt, RanksError)) as info:
        ranks.run(int)
    assert getattr(info.value, "cause", "interrupt") == "interrupt"
    monkeypatch.undo()
    kept(ranks)


def interrupted_after(op, monkeypatch):
    """As if Ctrl-C came as soon as all ranks have been sent a request of this kind."""
    send = Round.send

    def send_and_interrupt(self, request):
        send(self, request)
        if request["op"] == op:
            raise KeyboardInterrupt

    monkeypatch.setattr(Round, "send", send_and_interrupt)


@pytest.mark.parametrize(
    "cell, kind",
    [
        ("dist.recv(torch.ones(1), rank ^ 1)", "stuck in recv"),
        ("__import__('time').sleep(1000)", "still running: "),
    ],
    ids=["recv", "sleep"],
)
def test_an_interrupt_ends_a_cell(ranks, tmp_path, cell, kind):
    def run():
        error = failure_of(ranks, f"open(f'{tmp_path}/{{rank}}', 'w').close()\n{cell}")
        assert error.cause == "interrupt"
        text = str(error)
        assert text.startswith("Interrupted by you.\nRanks 0 to 3 were " + kind)
        assert text.endswith(KEPT)

    with within(2):
        interrupted_when_inside(tmp_path, run)
    kept(ranks)


def test_a_fork_of_the_kernel_does_not_end_the_ranks(ranks):
    pid = os.fork()
    if pid == 0:
        try:
            ranks.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    kept(ranks)


def test_openmp_work_in_the_kernel_first(watch):  # noqa: F811
    # After it, a fork of this very process would hang in its next parallel loop.
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(500, 500) @ torch.ones(500, 500)
    torch.ones(3_000_000).exp().sum()
    with within(6), Ranks(2, quiet=True, timeout=5) as ranks:
        sums = ranks.run(lambda: float(torch.ones(3_000_000).exp().sum()) > 1)
        assert sums == [True, True]
    torch.set_num_threads(before)


def test_the_mark_reaches_the_ranks(ranks):
    """Without it none of these tests would see what is left."""
    assert ranks.run(lambda: os.environ[MARK]) == [os.environ[MARK]] * 4
    assert set(pids_of(ranks)) <= set(marked_processes())


def test_a_folder_is_removed_although_somebody_still_writes_there(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    end = time.monotonic() + 0.3

    def write():
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                (folder / "cache").mkdir(exist_ok=True)

    thread = in_a_thread(write)
    thread.join(0.05)
    remove_folder(str(folder))
    thread.join()
    assert not folder.exists()


def test_ranks_that_find_the_same_mismatch_tell_it_once():
    calls = "rank {} calls barrier() where rank 0 called all_gather_object()."
    failures = {
        rank: report.RankFailure(
            rank, "raised", "CollectiveMismatch", calls.format(rank), seconds=rank
        )
        for rank in (1, 2, 3)
    }

    def told(*ranks):
        found = {rank: failures[rank] for rank in ranks}
        return report.describe_failures(found, [0], "mismatch", "", [])

    first = f"Rank 1 raised CollectiveMismatch: {calls.format(1)}\n"
    assert told(1) == first.strip()
    assert told(1, 2) == f"{first}Rank 2 found the same."
    assert told(1, 2, 3) == f"{first}Ranks 2 and 3 found the same."


def test_of_a_long_message_the_first_lines_are_told(ranks):
    text = str(failure_of(ranks, "raise ValueError(chr(10).join('abcdef'))"))
    assert "raised ValueError: a\nb\nc\nd\ne\nf\n" in text
    text = str(failure_of(ranks, "raise ValueError(chr(10).join('abcdefg'))"))
    assert "raised ValueError: a\nb\nc\nd\ne\n...\n" in text
