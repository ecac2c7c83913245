"""``Ranks`` as a learner uses it: results, variables, output, agreement, the magic."""

from __future__ import annotations

import os
import re
import socket
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks_support import (
    GROUP_STAYS,
    Screen,
    failure_of,
    four,  # noqa: F401 - a fixture
    ranks,  # noqa: F401 - a fixture
    watch,  # noqa: F401 - a fixture
    within,
    works,
)

from course_utils.ranks import RankFailure, Ranks, RanksError, RequestWarning, agreement
from course_utils.ranks.deadlock import QUIET_SAMPLES
from course_utils.ranks.magic import run_on_ranks
from course_utils.ranks.output import HEAD_LINES, choose_output
from course_utils.ranks.round import Round

pytestmark = pytest.mark.usefixtures("watch")


@pytest.fixture
def shown(ranks, capsys):  # noqa: F811
    """A function: run a cell, return what it printed."""

    def show(source: str, **options) -> str:
        capsys.readouterr()
        ranks.run_cell(textwrap.dedent(source).strip(), **options)
        return capsys.readouterr().out

    return show


# --------------------------------------------------------------- functions, variables
def test_one_result_a_rank_in_rank_order(ranks):  # noqa: F811
    def last_rank_first(base, *, step):

        base += 1  # its own copy
        token = torch.zeros(1)
        if dist.get_rank() < 3:
            dist.recv(token, dist.get_rank() + 1)
        if dist.get_rank() > 0:
            dist.send(token, dist.get_rank() - 1)
        return int(base) + step * dist.get_rank(), dist.get_world_size()

    nine = torch.tensor(9)
    found = ranks.run(last_rank_first, nine, step=2)
    assert found == [(10, 4), (12, 4), (14, 4), (16, 4)] and nine == 9
    assert ranks.run(lambda: int(os.environ["RANK"]), only=[2, 0, 2]) == [0, 2]
    assert ranks.run(lambda: int(os.environ["RANK"]), only=3) == [3]


def test_ranks_have_other_random_numbers_and_one_thread_each(ranks):  # noqa: F811
    def draw():
        import random

        import numpy

        return float(torch.rand(1)), random.random(), float(numpy.random.rand())

    for numbers in zip(*ranks.run(draw), strict=True):
        assert len(set(numbers)) == 4
    assert ranks.run(torch.get_num_threads) == [1] * 4


def test_variables_live_from_cell_to_cell(ranks):  # noqa: F811
    ranks.run_cell("class Box:\n    def __init__(self): self.r = rank\nbox = Box()")
    ranks.push(values=[1, 2], name="all", first=ranks.pull("box")[1])
    ranks.run_cell("values.append(rank)")
    ranks.run_cell("values.append(first.r)", only=[2])
    assert ranks.pull("values") == [[1, 2, 0], [1, 2, 1], [1, 2, 2, 1], [1, 2, 3]]
    assert ranks.pull("name", rank=3) == "all"


def test_a_pull_that_fails_leaves_the_process_group(ranks):  # noqa: F811
    ranks.run_cell("group = dist.new_group([0, 1, 2, 3])")
    ranks.run_cell("half = 1\nlock = __import__('threading').Lock()", only=[0, 1])
    with pytest.raises(RanksError, match="Ranks 2 and 3 raised NameError: there is no"):
        ranks.pull("half")
    with pytest.raises(RanksError, match="'lock' is a lock, which can't be sent"):
        ranks.pull("lock", rank=1)
    ranks.run_cell("dist.all_reduce(torch.ones(1), group=group)")


def test_each_cell_has_its_names(ranks, shown):  # noqa: F811
    ranks.run_cell("rank, world_size, dist, torch, mine = 99, 0, None, None, 5")
    cell = "torch.tensor(rank + dist.get_world_size() + mine), __name__"
    assert shown(cell, only=[2]) == "[rank 2] => (tensor(11), '__main__')\n"


def test_status_restart_and_close(watch):  # noqa: F811
    with Ranks(2, quiet=True) as two:
        two.run_cell("import math\n_private = 1\nalpha = 1\nbeta = 2", only=[1])
        nothing, some = two.status()
        assert (nothing.variables, some.variables) == ([], ["alpha", "beta"])
        assert nothing.backend == some.backend == "gloo"
        assert 1e6 < some.memory < 1e9
        pids = two.run(os.getpid)
        assert [nothing.pid, some.pid] == pids
        line = r"rank 1: process \d+, \d+ MiB, gloo; alpha, beta"
        assert re.fullmatch(line, repr(two.status()).splitlines()[1])
        with within(1):
            two.restart()
        assert set(two.run(os.getpid)).isdisjoint(pids)
        assert [status.variables for status in two.status()] == [[], []]
        works(two)
    assert repr(two) == "Ranks(2, backend='gloo', closed)"
    two.close()
    for use in (two.status, two.restart, lambda: two.run(os.getpid)):
        with pytest.raises(RanksError, match="these ranks are closed. Make new ones"):
            use()


# --------------------------------------------------------------------------- arguments
def test_wrong_arguments(ranks):  # noqa: F811
    for name, *values in (
        ("n", -1, 257, 2.0, "4", True),
        ("timeout", "60", float("nan"), True),
        ("backend", "mpi"),
        ("output", "loud"),
    ):
        for value in values:
            with pytest.raises(ValueError, match=f"{name} is .*; it must be"):
                Ranks(**{name: value})
    for only in (4, -1, "0", "0,2", True, 1.5):
        says = re.escape(f"there is no rank {only!r}: these are ranks 0 to 3")
        with pytest.raises(ValueError, match=says):
            ranks.run_cell("1", only=only)
    with pytest.raises(ValueError, match="empty list"):
        ranks.run_cell("1", only=[])
    with pytest.raises(ValueError, match="there is no rank 9"):
        ranks.pull("rank", rank=9)


def test_what_cannot_travel_is_named(ranks):  # noqa: F811
    lock = threading.Lock()
    for call, says in (
        (lambda: ranks.run(lambda: lock), "the function <lambda> can't be sent"),
        (lambda: ranks.push(fine=1, bad=lock), "bad (lock) can't be sent"),
    ):
        with pytest.raises(TypeError, match=re.escape(says)):
            call()

    class Odd:
        def __reduce__(self):
            return (int, ("not a number",))

    with pytest.raises(TypeError, match="the result of rank 2 can't be read in the"):
        ranks.run(lambda: Odd(), only=[2])
    assert failure_of(ranks, print, Odd()).root.error == "ValueError"


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="nccl works here")
def test_nccl_without_gpus_says_how_many_there_are():
    with pytest.raises(RanksError, match="needs a GPU for each of the 2 ranks, but"):
        Ranks(2, backend="nccl", quiet=True)


# ------------------------------------------------------------------------------ output
def test_lines_and_values_are_grouped_by_rank(shown):
    out = shown("print('a', rank)\nprint('b', rank, end='')\nrank * 2")
    assert out == "".join(
        f"[rank {r}] a {r}\n[rank {r}] b {r}\n[rank {r}] => {r * 2}\n" for r in range(4)
    )
    for silent in ("rank;", "None", "y = 5", "", "# only a remark"):
        assert shown(silent) == ""
    assert shown("torch.ones(2, 2)", only=[0]) == (
        "[rank 0] => tensor([[1., 1.],\n[rank 0]            [1., 1.]])\n"
    )
    assert shown("_ = 7\n_ + 1", only=[0]) + shown("_ + 1", only=[0]) == (
        "[rank 0] => 8\n[rank 0] => 9\n"
    )


def test_of_an_error_that_torch_logs_the_c_calls_are_left_out(shown):
    log = "[W1122 18:54:28.330164397 TCPStore.cpp:106] [c10d] sendBytes failed"
    calls = (
        "Exception raised from sendBytes at Utils.hpp:761 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fb1 in libc10.so)\n"
        "<omitting python frames>\n"
        "frame #47: <unknown function> + 0x2724a (0x7fb1 in /lib/libc.so.6)\n"
        "\n"
    )
    lines = shown(f"print({log!r})\nprint({calls!r} + 'mine')\nprint()", only=[0])
    assert lines == f"[rank 0] {log}\n[rank 0] mine\n[rank 0] \n"


def test_output_of_every_kind(shown):
    out = shown(
        """
        import os, subprocess, sys, time
        os.write(1, b"from C\\n")
        print("from stderr", file=sys.stderr)
        done = subprocess.run(["echo", "from a child"])
        for byte in "✓ in pieces\\n".encode(): os.write(1, bytes([byte])); time.sleep(0.01)
        os.write(1, b"a\\xff\\xfe\\x00b\\n\\xe2\\x9c")
        print("\\n\\ud800 ✓")
        """,
        only=[1],
    )
    expected = "from C|from stderr|from a child|✓ in pieces|a\ufffd\ufffd\x00b|\ufffd"
    lines = [*expected.split("|"), "\\ud800 ✓"]
    assert out == "".join(f"[rank 1] {line}\n" for line in lines)


@pytest.mark.parametrize("more", [0, 1])
def test_no_line_is_left_out_in_silence(shown, more):
    number = HEAD_LINES + 100 + more
    lines = shown(f"for i in range({number}): print(i)", only=[0]).splitlines()
    assert len(lines) == number
    assert ("[rank 0] ... 1 lines left out ..." in lines) == bool(more)
    if more:
        value = "class L:\n  def __repr__(s): return '\\n' * 9999\nL()"
        assert len(shown(value, only=[0]).splitlines()) == HEAD_LINES + 101


WAIT = "import os, time\nwhile not os.path.exists({0!r}): time.sleep(0.01)\n"


def test_a_line_and_a_bar_come_before_the_cell_ends(ranks, tmp_path, monkeypatch):  # noqa: F811
    seen = tmp_path / "seen"
    screen = Screen("[rank 0] first\n", seen)
    monkeypatch.setattr(ranks, "output", "stream")
    monkeypatch.setattr(sys, "stdout", screen)
    wait = WAIT.format(str(seen))
    ranks.run_cell(f"print('first')\n{wait}print('second')\nrank", only=[0])
    assert screen.all == "[rank 0] first\n[rank 0] second\n[rank 0] => 0\n"
    seen.unlink()
    screen.all, screen.text = "", "50% of a bar"
    bar = "print('\\r{0}% of a bar', end='', flush=True)\n".format
    ranks.run_cell(f"{bar(1)}{bar(50)}{wait}{bar(100)}print()\nrank", only=[1, 2])
    lines = screen.all.split("\n")
    assert len(lines) == 5 and "\r" in lines[0]
    ends = [line.rpartition("\r")[2].rstrip() for line in lines[:2]]
    assert sorted(ends) == [f"[rank {rank}] 100% of a bar" for rank in (1, 2)]


def test_progress_bars_are_left_out_where_outputs_are_compared(shown):
    cell = "from tqdm import tqdm\nfor i in tqdm(range(5)): pass\nprint('done')"
    assert shown(cell, only=[0]) == "[rank 0] done\n"


def test_where_outputs_are_compared_they_are_grouped(monkeypatch):
    for name in ("CI", "PYTEST_CURRENT_TEST", "RANKS_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    assert choose_output("auto") == "stream"
    monkeypatch.setenv("CI", "true")
    assert choose_output("auto") == "grouped"
    assert choose_output("stream") == "stream"
    monkeypatch.setenv("RANKS_OUTPUT", "stream")
    assert choose_output("auto") == "stream"


# --------------------------------------------------------------------- cells that fail
def test_a_failure_is_an_object_and_a_text(ranks, capsys):  # noqa: F811
    error = failure_of(ranks, "print('x')\ndef half(x):\n    return x / 0\n\nhalf(3)")
    assert capsys.readouterr().out == "".join(f"[rank {r}] x\n" for r in range(4))
    lines = "line 5 of the cell: half(3)\nline 3 of the cell, in half: return x / 0"
    assert str(error) == (
        "Ranks 0 to 3 raised ZeroDivisionError: division by zero\n"
        f"{textwrap.indent(lines, '  ')}\n{GROUP_STAYS}"
    )
    where = "line 3 of the cell: return x / 0"
    what = ("raised", "ZeroDivisionError", "division by zero", lines, where)
    assert error.root == RankFailure(error.root.rank, *what)
    assert error.cause == "raised" and error.finished == []
    error = failure_of(ranks, "if rank == 2: 1 / 0\ndist.barrier()")
    assert [error.failures[r].kind for r in range(4)] == "peer peer raised peer".split()


def test_a_function_of_a_file_shows_its_own_line(ranks, tmp_path):  # noqa: F811
    file = tmp_path / "my_code.py"
    file.write_text("def fail():\n    raise OSError('disk')\n")
    space = {"__name__": "__main__"}
    exec(compile(file.read_text(), str(file), "exec"), space)
    text = str(failure_of(ranks, space["fail"]))
    assert "  line 2 of my_code.py, in fail: raise OSError('disk')\n" in text


def test_an_error_that_comes_from_a_thread_shows_the_learners_lines_alone(ranks):  # noqa: F811
    error = failure_of(
        ranks,
        """
class Broken(torch.nn.Module):
    def forward(self, x):
        return 1 / x
try:
    Broken()(0)
except ZeroDivisionError:  # as DataParallel and DataLoader hand it on
    torch._utils.ExceptionWrapper(where="in replica 0").reraise()
""",
    )
    assert error.root.message.startswith("Caught ZeroDivisionError in replica 0.\n")
    assert "line 4, in forward\n    return 1 / x\n" in error.root.message
    assert "site-packages" not in str(error)


# --------------------------------------------------------------------------- agreement
@pytest.mark.parametrize(
    "first, second",
    [
        ("all_reduce({0})", "all_reduce({0}.long())"),
        ("all_reduce({0})", "all_reduce({0}, op=dist.ReduceOp.PRODUCT)"),
        ("broadcast({0}, 0)", "broadcast({0}, 1)"),
        ("all_gather([{0}, {0}], {0})", "all_gather_object([0, 0], 'x')"),
        ("send({0}, 1)", "recv(torch.ones(3), 0)"),
        ("send({0}, 1)", "recv({0}.long(), 0)"),
    ],
)
def test_calls_that_differ_are_named(first, second):
    with Ranks(2, output="grouped", quiet=True, timeout=20) as two:
        two.run_cell("kept = rank")
        calls = [call.format("torch.ones(2)") for call in (first, second)]
        cell = "if rank == 0:\n    dist.{}\nelse:\n    dist.{}".format(*calls)
        with within(1):
            error = failure_of(two, cell)
        assert error.cause == "mismatch"
        for call in (first, second):  # with its sizes
            assert re.search(rf"{call.partition('(')[0]}\(.*\)", error.root.message)
        assert two.pull("kept") == [0, 1]
        works(two)


def test_groups_pairs_and_roots_are_told_apart(ranks):  # noqa: F811
    ranks.run_cell(
        """
pair = dist.new_group([0, 1]) if rank < 2 else dist.new_group([0, 1])
rest = dist.new_group([2, 3])
x = torch.tensor([float(rank)])
for _ in range(1 + rank // 2): dist.all_reduce(x, group=pair if rank < 2 else rest)
assert x == (1 if rank < 2 else 10)
odd = dist.new_group([1, 3])
x, y = torch.full((2,), float(rank)), torch.ones(2)
if rank == 1: dist.broadcast(x, src=3, group=odd); dist.reduce(y, dst=3, group=odd)
if rank == 3:  # it is number 1 there
    dist.broadcast(x, group_src=1, group=odd); dist.reduce(y, group_dst=1, group=odd)
assert rank % 2 == 0 or x[0] == 3 and (rank == 1 or y[0] == 2)
dist.barrier()
"""
    )
    cell = "if rank == 1: dist.broadcast(torch.ones(2), src=1, group=odd)\n"
    cell += "if rank == 3: dist.broadcast(torch.ones(2), group_src=1, group=odd)"
    message = failure_of(ranks, cell).root.message
    assert "float32[2], src=1)" in message and "float32[2], src=3)" in message


def test_calls_that_name_no_root_and_those_of_objects_are_compared_as_well(ranks):  # noqa: F811
    ranks.run_cell(
        """
x, out = torch.full((4,), float(rank)), [torch.empty(4) for _ in range(4)]
if rank == 0: dist.gather(x, out, dst=0)
else: dist.gather(x)  # dst is 0 for who names none
assert rank > 0 or [float(o[0]) for o in out] == [0, 1, 2, 3]
names = [None] * 4; dist.all_gather_object(names, {"r": rank}); assert names[3]["r"] == 3
box = [rank]; dist.broadcast_object_list(box, src=1); assert box == [1]
dist.reduce_scatter_tensor(y := torch.empty(1), torch.arange(4.)); assert y == 4 * rank
dist.all_to_all_single(y := torch.empty(4), torch.arange(4.)); assert y[0] == rank
for w in dist.batch_isend_irecv([
    dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.irecv, y, (rank - 1) % 4)
]):
    w.wait()
assert y[0] == (rank - 1) % 4
if rank == 0: dist.send(x, 1)
if rank == 1: assert dist.recv(y) == 0 and y[0] == 0
"""
    )


def test_what_means_the_same_on_all_ranks_is_no_mismatch(ranks):  # noqa: F811
    """Other shapes of one size, an op as an object, numbers of NumPy's, WORLD."""
    ranks.run_cell(
        """
import numpy
even = rank % 2 == 0
SUM = dist.ReduceOp.SUM
dist.all_reduce(torch.ones(2, 3) if even else torch.ones(6))
x = torch.ones(2); dist.all_reduce(x, op=dist.ReduceOp(SUM)); assert x[0] == 4
x = torch.ones(2); dist.all_reduce(x, op=SUM if even else dist.ReduceOp(SUM))
dist.reduce(x, torch.tensor(0) if even else 0, op=dist.ReduceOp(dist.ReduceOp.MAX))
x = torch.full((2,), float(rank))
dist.broadcast(x, numpy.int64(1) if even else 1); assert x[0] == 1
dist.broadcast(x, 2, group=dist.group.WORLD if even else None)
if even: dist.send(x, numpy.int64(rank + 1), tag=numpy.int64(3))
else: dist.recv(x.view(2, 1), rank - 1, tag=3)
"""
    )
    cell = "op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM\n"
    cell += "dist.all_reduce(torch.ones(2), op=dist.ReduceOp(op))"
    assert failure_of(ranks, cell).cause == "mismatch"


def test_an_error_while_calls_are_collected_puts_off_no_later_call(ranks):  # noqa: F811
    cell = "with dist.distributed_c10d._coalescing_manager():\n"
    cell += "    dist.all_reduce(torch.ones(2))\n    1 / 0"
    assert str(failure_of(ranks, cell)).endswith(GROUP_STAYS)
    ranks.run_cell("x = torch.ones(1); dist.all_reduce(x); assert x == 4")


def test_a_view_with_gaps_is_refused_and_one_in_one_piece_is_sent(ranks):  # noqa: F811
    """gloo would give wrong numbers without a word, and NCCL refuses it."""
    ranks.run_cell(
        """
x = torch.zeros(4, 4)
for view in (x[1], x.t(), x[:0, 1]): dist.all_reduce(view)
for view in (x[::2, ::2], x[0, 0].expand(4)):
    parts = [torch.ones(view.shape)] * 4 if rank == 0 else None
    for call, *others in (
        (dist.all_reduce,),
        (dist.broadcast, 0),
        (dist.reduce, 0),
        (dist.scatter, parts, 0),
        (dist.all_to_all_single, torch.ones(view.shape)),
    ):
        try: call(view, *others)
        except ValueError as error: assert "is a view with gaps" in str(error)
        else: assert False, call
"""
    )


def test_pieces_that_do_not_fit_are_refused(ranks):  # noqa: F811
    for call, says in (
        ("reduce_scatter_single(torch.ones(3), torch.ones(13))", "4 x 3 = 12 numbers"),
        ("all_gather_single(torch.ones(2, 3), torch.ones(3))", "4 x 3 = 12 numbers"),
        ("all_gather_single([torch.ones(3)], torch.ones(3))", "Expected parameter"),
    ):
        assert says in str(failure_of(ranks, f"dist.{call}"))


def test_a_call_that_is_replaced_while_it_is_read_is_no_mismatch(monkeypatch):
    board = bytearray(2 * agreement.RECORD.size)
    mine, other = (agreement.Agreement(board, rank, 2) for rank in (0, 1))
    assert other.exchange(("first",), "3 numbers", "send", (0,)) == []
    differs = [(1, "send")]
    assert mine.exchange(("first",), "2 numbers", "recv", (1,)) == differs

    # The other rank goes on to its next call while this one looks.
    def next_call(seconds):
        other.exchange(("second",), "3 numbers", "send", ())

    monkeypatch.setattr(agreement.time, "sleep", next_call)
    assert mine.exchange(("first",), "2 numbers", "recv", (1,)) == []


# ---------------------------------------------------------------------------- requests
RECEIVE = "x = torch.zeros(2)\nif rank == 0: dist.send(torch.ones(2), 1)\n"
TAKE = "if rank == 1: request = dist.irecv(x, 0)\n"
TO_ALL = "dist.all_reduce(torch.ones(2), async_op=True)"
GIVEN_UP = {
    "a batch": (
        "x = [dist.P2POp(dist.isend, torch.ones(2), rank ^ 1)]\n"
        "x += [dist.P2POp(dist.irecv, torch.ones(2), rank ^ 1)]\n"
        "dist.batch_isend_irecv(x)",
        "Ranks 0 to 3 never waited for batch_isend_irecv, line 3 of the cell: ",
    ),
    "the last line, which is shown": (
        "dist.barrier(async_op=True)",
        "Ranks 0 to 3 never waited for barrier, line 1 of the cell: ",
    ),
    "in a circle": (
        "def f():\n    f.work = dist.broadcast(torch.ones(2), 0, async_op=True)\n"
        "    f.me = f\nf(); del f",
        "Ranks 0 to 3 never waited for broadcast, line 2 of the cell: ",
    ),
    "in a group": (
        "g = dist.new_group([1, 2])\n"
        "if rank == 1: dist.irecv(torch.ones(2), 2, group=g)\n"
        "if rank == 2: dist.send(torch.ones(2), 1, group=g)",
        "Rank 1 never waited for irecv, line 2 of the cell: ",
    ),
    "nobody receives": (
        "if rank == 2: dist.isend(torch.ones(2), 3)",
        "Rank 2 never waited for isend, line 1 of the cell: ",
    ),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_request_that_nobody_waited_for_is_told_of(ranks, name):  # noqa: F811
    cell, says = GIVEN_UP[name]
    with pytest.warns(RequestWarning) as caught, within(1):
        ranks.run_cell(cell)
    assert [str(one.message).startswith(says) for one in caught] == [True]
    assert len(ranks.unwaited) >= 1
    with within(1):  # the next message is not lost
        ranks.run_cell(f"{RECEIVE}if rank == 1: dist.recv(x, 0)")


WAITED_FOR = {
    "in the next cell": [
        RECEIVE + TAKE,
        "dist.barrier()",
        "if rank == 1: request.wait()",
    ],
    "in a thread": [
        f"import threading\nrequest = {TO_ALL}\n"
        "thread = threading.Thread(target=request.wait)\n"
        "thread.start(); thread.join(); del request"
    ],
    "through its future": [
        f"f = {TO_ALL}.get_future()\nf.then(lambda f: f.value()[0] / 4).wait()"
    ],
    "by asking": [
        f"request = {TO_ALL}\nwhile not request.is_completed(): pass\ndel request"
    ],
    "in vain": [
        "import datetime\n"
        "if rank == 0:\n"
        "    request = dist.irecv(torch.ones(2), 1)\n"
        "    try: request.wait(datetime.timedelta(seconds=0.05))\n"
        "    except RuntimeError: del request"
    ],
    "by torch": [
        "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "with m.join():\n"
        "    for _ in range(1 + rank): m(torch.ones(2)).sum().backward()"
    ],
}


@pytest.mark.parametrize("name", WAITED_FOR)
@pytest.mark.filterwarnings("error::course_utils.ranks.RequestWarning")
def test_nobody_is_accused_who_waits(ranks, name):  # noqa: F811
    for cell in WAITED_FOR[name]:
        ranks.run_cell(cell, timeout=60)
    if name in ("in vain", "by torch"):
        ranks.restart()


def test_a_request_is_named_beside_what_it_leads_to(ranks):  # noqa: F811
    ranks.run_cell("x = torch.zeros(2)\n" + TAKE)
    error = failure_of(ranks, RECEIVE + "if rank == 1: dist.recv(x, 0)")
    assert str(error).splitlines()[1] == (
        "Rank 1 has not yet waited for irecv, line 2 of the cell: "
        "if rank == 1: request = dist.irecv(x, 0), in an earlier cell. It takes the "
        "next message that fits: call its wait() first."
    )
    cell = f"{RECEIVE}if rank == 1:\n    dist.irecv(x, 0)\n    assert x[0] == 7"
    error = failure_of(ranks, cell)
    assert error.root.error == "AssertionError"
    assert "Rank 1 never waited for irecv, line 4 of the cell" in str(error)


# ----------------------------------------------------------- the learner's own hand
JOIN = "dist.init_process_group('gloo'{})"
NUMBERED = ", rank=rank, world_size=world_size, init_method="


@pytest.fixture
def by_hand(watch):  # noqa: F811
    """Two ranks that join no process group by themselves."""
    with Ranks(2, init=False, output="grouped", quiet=True, timeout=30) as two:
        yield two
    watch.assert_no_strays()


@pytest.mark.parametrize("where", ["", f"{NUMBERED}'file://' + path"])
def test_the_group_is_the_learners_with_init_false(by_hand, tmp_path, where):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()
    found = by_hand.run(lambda: [os.environ[name] for name in names])
    assert found == [[str(r), str(r), "2", "2", "127.0.0.1"] for r in range(2)]
    assert [status.backend for status in by_hand.status()] == [None, None]
    for attempt in ("first", "second"):
        by_hand.push(path=str(tmp_path / attempt))
        by_hand.run_cell(JOIN.format(where))
        works(by_hand)
        error = failure_of(by_hand, "if rank: 1 / 0\ndist.barrier()")
        assert str(error).endswith(
            "(All ranks keep their variables. The process group is closed: "
            "call init_process_group again.)"
        )


def test_no_rank_leaves_init_before_all_are_through_it(by_hand):
    # Else a rank that leaves the group at once breaks the init of the others.
    by_hand.run_cell(
        """
import time
from torch.distributed import distributed_c10d as c10d
make = c10d._new_process_group_helper
def make_slowly(*args, **kwargs):  # when a rank has its connections
    global through
    made = make(*args, **kwargs)
    time.sleep(0.5 * rank)
    through = time.monotonic()
    return made
c10d._new_process_group_helper = make_slowly
dist.init_process_group('gloo')
init = through, time.monotonic()
dist.new_group([0])
group = through, time.monotonic()
"""
    )
    init, group = by_hand.pull("init"), by_hand.pull("group")
    for _, left in init:
        assert left >= init[1][0] > init[0][0]
    assert group[0][1] < group[1][0]  # new_group is PyTorch's own, which waits for none


@pytest.mark.thorough
def test_a_host_that_does_not_exist(by_hand, capsys):
    cell = "import os\nif rank == 1: os.environ['MASTER_ADDR'] = 'nowhere.invalid'\n"
    with within(15):
        error = failure_of(by_hand, cell + JOIN.format(""))
    assert "Ranks 0 and 1 were stuck in init_process_group" in str(error)
    # What rank 1 prints again and again while it tries is no progress.
    assert "addresses of (nowhere.invalid, " in capsys.readouterr().out


PAUSE = """
import ctypes
from course_utils.ranks import loopback
def pause(seconds):  # in C++, in the constructor of its store
    code = f"ctypes.CDLL(None).sleep({seconds})"
    exec(compile(code, loopback.__file__, "exec"), {"ctypes": ctypes})
"""


def test_a_pause_between_two_tries_to_connect_is_no_deadlock(by_hand):
    by_hand.run_cell(f"{PAUSE}if rank: pause(3)\n{JOIN.format('')}")
    works(by_hand)


def test_a_rank_that_finishes_while_all_are_asked_is_progress(by_hand, monkeypatch):
    ask = Round.ask_where

    def ask_until_one_finishes(self, seconds):
        ask(self, seconds)
        pending, end = set(self.pending), time.monotonic() + 10
        while len(self.watch.looks) == QUIET_SAMPLES and self.pending == pending:
            assert time.monotonic() < end
            self.step(0.02)

    monkeypatch.setattr(Round, "ask_where", ask_until_one_finishes)
    by_hand.run_cell(f"{PAUSE}pause(5 - rank)")


@pytest.mark.skipif(sys.platform != "linux", reason="a port can't be held there")
def test_nobody_else_gets_the_port_while_the_ranks_live(watch):  # noqa: F811
    with Ranks(2, init=False, quiet=True) as two:
        (port, _) = two.run(lambda: int(os.environ["MASTER_PORT"]))
        for attempt in range(2):  # a server of a rank may come and go
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            if attempt == 0:
                address = f"'tcp://127.0.0.1:{port}'"
                two.run_cell(JOIN.format(NUMBERED + address))
                works(two)
                two.run_cell("dist.destroy_process_group()")
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_interface_of_a_cluster_is_not_used(monkeypatch):
    """GLOO_SOCKET_IFNAME is often set there; ranks of a notebook stay on loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with Ranks(2, quiet=True) as two:
        works(two)


# ------------------------------------------------------------------------- several
def test_several_ranks_at_once_and_twice_under_one_name(watch):  # noqa: F811
    two = Ranks(2, quiet=True)
    with Ranks(3, quiet=True) as three:
        two.run_cell("name = 'a'")
        three.run_cell("name = 'b'")
        assert (two.pull("name"), three.pull("name")) == (["a"] * 2, ["b"] * 3)
        assert Ranks.latest() is three
        assert Ranks.latest(2) is two
        assert Ranks.latest(5) is None
    two = Ranks(2, quiet=True)  # as when a cell is run again
    watch.assert_no_strays()
    results = []
    thread = threading.Thread(target=lambda: results.append(two.run(int)))
    thread.start()
    thread.join()
    assert results == [[0, 0]]
    two.close()


# --------------------------------------------------------------------------- the magic
@pytest.fixture
def magic(four, capsys):  # noqa: F811
    """Run a cell with the options behind ``%%ranks``; what it printed."""

    def run(line: str, cell: str) -> str:
        capsys.readouterr()
        run_on_ranks(line, cell)
        return capsys.readouterr().out

    return run


def test_the_magic_uses_the_newest_ranks_or_those_with_n(magic):
    with Ranks(3, output="grouped", quiet=True):
        lines = [f"[rank {r}] => 3\n" for r in range(3)]
        assert magic("", "world_size") == "".join(lines)
        out = magic("-n 4 --only 1,3", "world_size")
        assert out == "[rank 1] => 4\n[rank 3] => 4\n"


def test_the_magic_expects_an_error(magic):
    out = magic("-n 4 --expect-error ZeroDivisionError", "1 / 0")
    assert out.startswith("As expected: Ranks 0 to 3 raised ZeroDivisionError")
    with pytest.raises(RanksError, match="raised ZeroDivisionError"):
        magic("-n 4 --expect-error ValueError", "1 / 0")
    with pytest.raises(RanksError, match="expected to fail .ValueError., but every"):
        magic("-n 4 --expect-error ValueError", "1")
    for name, cell in (
        ("died", "import os\nif rank == 1: os._exit(3)"),
        ("stuck", "if rank != 1: dist.barrier()"),
        ("mismatch", "dist.all_reduce(torch.ones(rank + 1))"),
    ):
        magic(f"-n 4 --expect-error {name}", cell)


def test_the_magic_shows_an_error_that_may_come_and_goes_on(magic):
    out = magic("-n 4 --may-fail", "1 / 0")
    assert out.startswith("It failed. Ranks 0 to 3 raised ZeroDivisionError")
    out = magic("-n 4 --may-fail", "if rank != 1: dist.barrier()")
    assert out.startswith("It failed. Deadlock")
    assert "failed" not in magic("-n 4 --may-fail", "rank")
    with pytest.raises(RanksError, match="SyntaxError"):  # nothing ran
        magic("-n 4 --may-fail", "1 +")


def test_the_magic_has_a_limit(magic):
    with within(2), pytest.raises(RanksError, match="after 0.3 s, the limit for this"):
        magic("-n 4 --timeout 0.3", "while True: pass")


@pytest.mark.parametrize(
    "line, says",
    [
        ("-n four", "%%ranks: argument -n: invalid int value: 'four'"),
        ("--only zero", "%%ranks --only: 'zero' is not a list of ranks"),
        ("--only 'x", "%%ranks: No closing quotation"),
        ("--fast", "%%ranks: unrecognized arguments: --fast"),
        ("--may-fail --expect-error died", "--expect-error: not allowed with"),
    ],
)
def test_wrong_options_of_the_magic(magic, line, says):
    with pytest.raises(ValueError, match=says):
        magic(line, "1")


def test_the_magic_shows_what_is_not_python_and_no_more(magic, ranks):  # noqa: F811
    ranks.run_cell("x = 0")
    with pytest.raises(RanksError) as caught:
        magic("-n 4", "x = 1\n!ls")
    text = str(caught.value)
    assert text.startswith("SyntaxError: invalid syntax, line 3 of the cell\n    !ls")
    assert "Lines with ! and % work in ordinary cells only." in text
    assert caught.value.cause == "usage" and ranks.pull("x") == [0] * 4
