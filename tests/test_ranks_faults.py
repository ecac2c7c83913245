"""Faults, caused for real: what the learner reads, how soon, and what is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import pytest
from ranks_support import (
    eventually,
    failure_of,
    four,  # noqa: F401 - a fixture
    marked_processes,
    watch,  # noqa: F401 - a fixture
    within,
    works,
)

from course_utils.ranks import Ranks, RanksError

KEPT = "(All ranks keep their variables. The next cell gets a new process group.)"
DEADLOCK = "Deadlock: nothing moves, and nothing will."


@pytest.fixture
def ranks(four, watch):  # noqa: F811
    """Four usable ranks with a variable; after the test they are usable still."""
    four.run_cell("kept = rank * 10; x = torch.ones(4)")
    yield four
    works(four)
    watch.assert_no_strays()


def all_kept(ranks: Ranks) -> bool:
    return ranks.pull("kept") == [0, 10, 20, 30]


# name: (cell, options, seconds, cause, a part of the message)
FREED = {
    "one rank raises, the others wait in a collective": (
        "if rank == 1:\n    raise ValueError('bad')\ndist.all_reduce(x)",
        {},
        1.0,
        "raised",
        "Rank 1 raised ValueError: bad\n  line 2 of the cell: raise ValueError('bad')",
    ),
    "one rank raises, the others wait in recv": (
        "if rank == 1:\n    1 / 0\ndist.recv(x, 1)",
        {},
        1.0,
        "raised",
        "ZeroDivisionError",
    ),
    "a skipped collective": (
        "y = 1\nif rank != 1:\n    dist.all_reduce(x)",
        {},
        3.0,
        "timeout",
        "anks 0, 2 and 3 were stuck in all_reduce, line 3 of the cell: "
        "dist.all_reduce(x)",
    ),
    "a skipped barrier": (
        "if rank:\n    dist.barrier()",
        {},
        3.0,
        "timeout",
        "anks 1, 2 and 3 were stuck in barrier, line 2 of the cell",
    ),
    "every rank receives first": (
        "dist.recv(x, (rank + 1) % 4)\ndist.send(x, (rank - 1) % 4)",
        {},
        3.0,
        "timeout",
        "anks 0 to 3 were stuck in recv, line 1 of the cell",
    ),
    "every rank sends a large tensor first": (
        "big = torch.ones(1 << 22)\n"
        "dist.send(big, (rank + 1) % 4)\ndist.recv(big, (rank - 1) % 4)",
        {},
        6.0,
        "timeout",
        "stuck in send, line 2 of the cell",
    ),
    "wait() for a message that nobody sends": (
        "if rank == 0:\n    work = dist.irecv(x, 1)\n    work.wait()",
        {},
        3.0,
        "timeout",
        "line 3 of the cell: work.wait()",
    ),
    "different collectives": (
        "if rank % 2:\n    dist.all_reduce(x)\nelse:\n    dist.broadcast(x, 0)",
        {},
        1.0,
        "mismatch",
        "Every rank of a group must call the same collectives",
    ),
    "all_reduce against all_gather": (
        "if rank:\n    dist.all_reduce(x)\nelse:\n"
        "    dist.all_gather([torch.zeros(4) for _ in range(4)], x)",
        {},
        1.0,
        "mismatch",
        "all_gather(float32[4])",
    ),
    "different sizes": (
        "y = torch.ones(100_000 * (rank + 1))\ndist.all_reduce(y)",
        {},
        1.0,
        "mismatch",
        "all_reduce(float32[",
    ),
    "different dtypes": (
        "y = x.long() if rank else x\ndist.all_reduce(y)",
        {},
        1.0,
        "mismatch",
        "int64[4]",
    ),
    "send and recv of different sizes": (
        "if rank == 0:\n    dist.send(torch.ones(9), 1)\n"
        "elif rank == 1:\n    dist.recv(torch.ones(3), 0)",
        {},
        3.0,
        "mismatch",
        "What one rank sends, the other must receive",
    ),
    "an endless loop": (
        "while rank == 2:\n    pass",
        {"timeout": 1},
        1 + 1.5,
        "timeout",
        "ank 2 was still running: line",
    ),
    "a sleep": (
        "import time\ntime.sleep(1000 * (rank == 3))",
        {"timeout": 1},
        1 + 1.5,
        "timeout",
        "line 2 of the cell: time.sleep(1000 * (rank == 3))",
    ),
    "sys.exit": (
        "import sys\nsys.exit(2)",
        {},
        1.0,
        "raised",
        "A rank goes on living",
    ),
    "endless recursion": (
        "def f():\n    return f()\nf()",
        {},
        3.0,
        "raised",
        "RecursionError",
    ),
    "more memory than there is": (
        "torch.empty(1 << 50)",
        {},
        1.0,
        "raised",
        "RuntimeError",
    ),
    "an exception that cannot be printed": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        {},
        1.0,
        "raised",
        "raised E",
    ),
    "the backward pass of DDP, skipped by one rank": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(torch.nn.Linear(2, 2))\nloss = model(torch.ones(1, 2)).sum()\n"
        "if rank:\n    loss.backward()",
        {"timeout": 20},
        8.0,
        "timeout",
        "anks 1, 2 and 3 were stuck in backward, line 5 of the cell: loss.backward()",
    ),
}


@pytest.mark.parametrize("fault", FREED)
def test_the_ranks_are_freed_and_keep_their_variables(ranks, fault):
    cell, options, seconds, cause, says = FREED[fault]
    with within(seconds):
        error = failure_of(ranks, cell, **options)
    assert says in str(error)
    assert error.cause == cause
    assert str(error).endswith(KEPT)
    assert all_kept(ranks)


# name: (what rank 2 runs, options, seconds, cause, a part of the message)
LOST = {
    "os._exit": (
        "import os; os._exit(3)",
        {},
        1.0,
        "died",
        "Rank 2 died (exit code 3)",
    ),
    "os._exit(0)": ("import os; os._exit(0)", {}, 1.0, "died", "exit code 0"),
    "kill -9": (
        "import os; os.kill(os.getpid(), 9)",
        {},
        1.0,
        "died",
        "Rank 2 died (SIGKILL)",
    ),
    "a crash in C": (
        "import ctypes; ctypes.string_at(0)",
        {},
        2.0,
        "died",
        "Rank 2 died (SIGSEGV) at",
    ),
    "a loop that catches everything": (
        "while True:\n        try:\n            pass\n"
        "            while True: pass\n        except: pass",
        {"timeout": 1},
        1 + 4.0,
        "timeout",
        "ank 2 was still running",
    ),
    "an endless loop in C": (
        "sum(range(10 ** 14))",
        {"timeout": 1},
        1 + 4.0,
        "timeout",
        "ank 2 was still running: line",
    ),
    "SIGSTOP": (
        "import os; os.kill(os.getpid(), 19)",
        {"timeout": 1},
        1 + 4.0,
        "timeout",
        "ank 2 was still running",
    ),
}


@pytest.mark.parametrize("fault", LOST)
def test_one_rank_is_lost_and_the_others_keep_their_variables(ranks, fault):
    code, options, seconds, cause, says = LOST[fault]
    with within(seconds):
        error = failure_of(
            ranks, f"if rank == 2:\n    {code}\ndist.all_reduce(x)", **options
        )
    assert says in str(error)
    assert error.cause == cause
    assert "(Rank 2 was started afresh, without variables; the other" in str(error)
    with within(1.0):
        works(ranks)
    with pytest.raises(RanksError, match="there is no variable 'kept'"):
        ranks.pull("kept")
    assert [ranks.pull("kept", rank=r) for r in (0, 1, 3)] == [0, 10, 30]


def test_kill_from_outside_between_two_cells(ranks):
    os.kill(ranks.status()[1].pid, signal.SIGKILL)
    with within(2.0), contextlib.suppress(RanksError):
        ranks.run_cell("1")
    works(ranks)


def test_new_group_on_one_rank_only(ranks):
    error = failure_of(ranks, "if rank == 0:\n    g = dist.new_group([0, 1])")
    assert "stuck in new_group, line 2 of the cell" in str(error)
    assert error.finished == [1, 2, 3]
    assert [ranks.pull("kept", rank=r) for r in (1, 2, 3)] == [10, 20, 30]


def test_what_a_rank_has_started_ends_with_it(watch):  # noqa: F811
    with Ranks(2, quiet=True) as ranks:
        ranks.run_cell(
            "import subprocess, sys\n"
            "subprocess.Popen(['sleep', '1000'])\n"
            "subprocess.Popen(['sleep', '1000'], start_new_session=True);"
        )
        assert len([t for t in marked_processes().values() if "sleep" in t]) == 4
    eventually(
        lambda: not [t for t in marked_processes().values() if "sleep" in t], 2.0
    )


def test_a_fork_inside_a_rank(ranks):
    ranks.run_cell(
        "import os\npid = os.fork()\nif pid == 0:\n    y = 1\nelse:\n    os.wait()"
    )
    assert all_kept(ranks)


def test_worker_processes_of_a_data_loader(ranks):
    ranks.run_cell(
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(list(range(8)), batch_size=2, num_workers=2)\n"
        "total = sum(int(batch.sum()) for batch in loader)"
    )
    assert ranks.pull("total") == [28] * 4
    error = failure_of(
        ranks,
        "import os\nfor batch in loader:\n    if rank == 1: os._exit(1)\n"
        "dist.all_reduce(x)",
    )
    assert "Rank 1 died (exit code 1)" in str(error)


def test_parallel_work_in_the_kernel_before_the_first_ranks(watch):  # noqa: F811
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.mm(torch.ones(800, 800), torch.ones(800, 800))  # OpenMP threads live now
    torch.set_num_threads(threads)
    with Ranks(2, quiet=True) as ranks:
        assert ranks.run(
            lambda: float((torch.ones(9, 9) @ torch.ones(9, 9))[0, 0])
        ) == [
            9.0,
            9.0,
        ]


def test_eight_ranks(watch):  # noqa: F811
    with Ranks(8, quiet=True) as ranks:
        works(ranks)
        error = failure_of(ranks, "if rank == 5: raise KeyError('k')\ndist.barrier()")
        assert error.root.rank == 5
        works(ranks)


def test_ranks_that_are_made_twice(watch):  # noqa: F811
    ranks = Ranks(2, quiet=True)
    first = {status.pid for status in ranks.status()}
    ranks = Ranks(2, quiet=True)
    eventually(lambda: not any(map(psutil.pid_exists, first)), 2.0)
    works(ranks)
    ranks.close()
    watch.assert_no_strays()


def test_fifty_failures_in_a_row(ranks):
    slowest = 0.0
    for _ in range(50):
        started = time.monotonic()
        failure_of(ranks, "if rank == 1:\n    raise ValueError\ndist.all_reduce(x)")
        slowest = max(slowest, time.monotonic() - started)
        works(ranks)
    assert slowest < 2.0
    assert all_kept(ranks)


def test_the_helper_process_is_killed(watch):  # noqa: F811
    ranks = Ranks(2, quiet=True)
    ranks._team.zygote.process.kill()
    with contextlib.suppress(RanksError):
        ranks.run_cell("1")
    works(ranks)
    ranks.close()
