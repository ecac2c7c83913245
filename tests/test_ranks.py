"""``Ranks`` as a learner uses it: results, arguments, output, agreement, messages."""

from __future__ import annotations

import os
import pickle
import re
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks_support import (
    GROUP_STAYS,
    KEPT,
    LINUX,
    failure_of,
    four,  # noqa: F401 - a fixture
    listening_beyond_loopback,
    own_descriptors,
    settle,
    watch,  # noqa: F401 - a fixture
    within,
    works,
)

from course_utils.ranks import (
    RankFailure,
    Ranks,
    RanksError,
    RequestWarning,
    agreement,
)
from course_utils.ranks.magic import run_on_ranks
from course_utils.ranks.output import HEAD_LINES, LINE_CHARS, Printer, choose_output
from course_utils.ranks.processes import Zygote
from course_utils.ranks.round import QUIET_SAMPLES, Round


@pytest.fixture
def ranks(four, watch):  # noqa: F811
    """Four usable ranks; after the test they are usable still."""
    yield four
    works(four)
    watch.assert_no_strays()


@pytest.fixture
def shown(ranks, capsys):
    """A function: run a cell, return what it printed."""

    def show(source: str, **options) -> str:
        capsys.readouterr()
        ranks.run_cell(textwrap.dedent(source).strip(), **options)
        return capsys.readouterr().out

    return show


# --------------------------------------------------------------------------- functions
def test_one_result_a_rank_in_rank_order(ranks):
    def who(base, *, step):
        import torch.distributed as dist

        return base + step * dist.get_rank(), dist.get_world_size()

    assert ranks.run(who, 10, step=2) == [(10, 4), (12, 4), (14, 4), (16, 4)]


def test_results_come_in_rank_order_even_when_rank_0_is_last(ranks):
    def last_rank_first():
        import torch.distributed as dist

        token = torch.zeros(1)
        if dist.get_rank() < 3:
            dist.recv(token, dist.get_rank() + 1)
        if dist.get_rank() > 0:
            dist.send(token, dist.get_rank() - 1)
        return dist.get_rank()

    assert ranks.run(last_rank_first) == [0, 1, 2, 3]


def test_only_the_chosen_ranks_run(ranks):
    assert ranks.run(lambda: int(os.environ["RANK"]), only=[2, 0, 2]) == [0, 2]
    assert ranks.run(lambda: int(os.environ["RANK"]), only=3) == [3]


def test_arguments_are_copies(ranks):
    tensor = torch.zeros(2)

    def change(tensor):
        tensor += 1
        return tensor

    results = ranks.run(change, tensor)
    assert [result.tolist() for result in results] == [[1, 1]] * 4
    assert tensor.tolist() == [0, 0]


def test_a_class_of_the_notebook_comes_back_as_that_class(ranks):
    notebook = {"__name__": "__main__"}
    exec(
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def double(self): return Point(self.x * 2)\n"
        "def make(x): return Point(x).double()\n",
        notebook,
    )
    points = ranks.run(notebook["make"], 4)
    assert [point.x for point in points] == [8] * 4
    assert all(isinstance(point, notebook["Point"]) for point in points)


def test_a_large_argument_and_result(ranks):
    tensor = torch.arange(5_000_000)
    results = ranks.run(lambda t: t + int(os.environ["RANK"]), tensor)
    assert [int(result[-1]) for result in results] == [4_999_999 + r for r in range(4)]


def test_ranks_start_without_each_others_random_numbers(ranks):
    def draw():
        import random

        import numpy

        return float(torch.rand(1)), random.random(), float(numpy.random.rand())

    for numbers in zip(*ranks.run(draw), strict=True):
        assert len(set(numbers)) == 4


def test_ranks_have_one_thread_each_and_may_take_more(ranks):
    assert ranks.run(torch.get_num_threads) == [1] * 4
    ranks.run_cell("torch.set_num_threads(2)\nassert torch.get_num_threads() == 2")
    ranks.run(torch.set_num_threads, 1)


def test_loss_falls_on_all_ranks_alike_under_ddp(ranks):
    def train(steps):
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
        losses = []
        for _ in range(steps):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            dist.all_reduce(loss := loss.detach())
            losses.append(float(loss))
        return losses, [p.detach() for p in model.parameters()]

    (losses, weights), *others = ranks.run(train, 20)
    assert losses[-1] < losses[0] / 10
    for other_losses, other_weights in others:
        assert other_losses == losses
        assert all(
            torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True)
        )


# --------------------------------------------------------------------------- variables
def test_variables_live_from_cell_to_cell(ranks):
    ranks.run_cell("mine = rank * 10")
    ranks.run_cell("mine += 1", only=[2])
    assert ranks.pull("mine") == [0, 10, 21, 30]
    assert ranks.pull("mine", rank=2) == 21


def test_push_gives_each_rank_its_own_copy(ranks):
    ranks.push(values=[1, 2], name="all")
    ranks.run_cell("values.append(rank)")
    assert ranks.pull("values") == [[1, 2, r] for r in range(4)]
    assert ranks.pull("name") == ["all"] * 4


def test_classes_of_a_cell_can_be_pulled_and_pushed(ranks):
    ranks.run_cell("class Box:\n    def __init__(self): self.r = rank\nbox = Box()")
    boxes = ranks.pull("box")
    assert [box.r for box in boxes] == [0, 1, 2, 3]
    ranks.push(first=boxes[0])
    ranks.run_cell("assert first.r == 0")


def test_pull_of_a_name_that_is_not_there(ranks):
    ranks.run_cell("half = 1", only=[0, 1])
    with pytest.raises(RanksError) as caught:
        ranks.pull("half")
    assert caught.value.cause == "raised"
    assert "Ranks 2 and 3 raised NameError: there is no variable 'half'" in str(
        caught.value
    )
    assert ranks.pull("half", rank=1) == 1


def test_pull_of_something_that_cannot_travel(ranks):
    ranks.run_cell("lock = __import__('threading').Lock()")
    with pytest.raises(RanksError) as caught:
        ranks.pull("lock", rank=1)
    assert "'lock' is a lock, which can't be sent to the notebook" in str(caught.value)


def test_a_failed_pull_leaves_the_process_group(ranks):
    generation = ranks._generation
    works(ranks)
    before = ranks._generation
    with pytest.raises(RanksError):
        ranks.pull("there is no such name")
    works(ranks)
    assert ranks._generation == before >= generation


def test_status_tells_process_memory_backend_and_variables(four, watch):  # noqa: F811
    with Ranks(2, quiet=True) as ranks:
        ranks.run_cell("import math\n_private = 1\nalpha = 1\nbeta = 2", only=[1])
        nothing, some = ranks.status()
        assert (nothing.rank, some.rank) == (0, 1)
        assert nothing.variables == []
        assert some.variables == ["alpha", "beta"]
        assert nothing.backend == some.backend == "gloo"
        assert 1e6 < some.memory < 1e9
        assert some.pid == ranks.run(os.getpid)[1]
        assert re.fullmatch(
            r"rank 0: process \d+, \d+ MiB, gloo; no variables\n"
            r"rank 1: process \d+, \d+ MiB, gloo; alpha, beta",
            repr(ranks.status()),
        )


def test_restart_gives_fresh_ranks(watch):  # noqa: F811
    with Ranks(2, quiet=True) as ranks:
        ranks.run_cell("kept = 1")
        pids = ranks.run(os.getpid)
        with within(1):
            ranks.restart()
        assert set(ranks.run(os.getpid)).isdisjoint(pids)
        assert [status.variables for status in ranks.status()] == [[], []]
        works(ranks)
    watch.assert_no_strays()


def test_closed_ranks_say_so(watch):  # noqa: F811
    ranks = Ranks(1, quiet=True)
    assert repr(ranks) == "Ranks(1, backend='gloo')"
    ranks.close()
    ranks.close()
    assert repr(ranks) == "Ranks(1, backend='gloo', closed)"
    for use in (ranks.status, ranks.restart, lambda: ranks.run(os.getpid)):
        with pytest.raises(RanksError, match="these ranks are closed. Make new ones"):
            use()


# --------------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"n": 0}, "n is 0; it must be a whole number from 1 to 256"),
        ({"n": -1}, "n is -1;"),
        ({"n": 257}, "n is 257;"),
        ({"n": 2.0}, "n is 2.0;"),
        ({"n": "4"}, "n is '4';"),
        ({"n": True}, "n is True;"),
        (
            {"backend": "mpi"},
            "backend is 'mpi'; it must be 'auto', 'gloo' or 'nccl'",
        ),
        (
            {"output": "loud"},
            "output is 'loud'; it must be 'auto', 'stream' or 'grouped'",
        ),
        ({"timeout": 0}, "timeout is 0; it must be seconds, more than 0"),
        ({"timeout": "60"}, "timeout is '60';"),
        ({"timeout": float("nan")}, "timeout is nan;"),
        ({"timeout": True}, "timeout is True;"),
    ],
)
def test_wrong_arguments_of_ranks(wrong, says):
    with pytest.raises(ValueError) as caught:
        Ranks(**wrong)
    assert says in str(caught.value)


def test_wrong_arguments_of_calls(ranks):
    with pytest.raises(TypeError) as caught:
        ranks.run(42)
    assert str(caught.value) == (
        "run() needs a function, but got int: "
        "write ranks.run(step, x), not ranks.run(step(x))"
    )
    for only, named in (
        ([4], "4"),
        ([-1], "-1"),
        (["0"], "'0'"),
        ("0", "'0'"),
        ("0,2", "'0,2'"),
        ([True], "True"),
        (True, "True"),
        (1.5, "1.5"),
    ):
        with pytest.raises(ValueError) as caught:
            ranks.run_cell("1", only=only)
        assert str(caught.value) == f"there is no rank {named}: these are ranks 0 to 3"
    with pytest.raises(ValueError, match="empty list"):
        ranks.run_cell("1", only=[])
    with pytest.raises(ValueError, match="there is no rank 9: these are ranks 0 to 3"):
        ranks.pull("rank", rank=9)
    with pytest.raises(ValueError, match="timeout is -1; it must be seconds"):
        ranks.run(os.getpid, timeout=-1)


def test_an_argument_that_cannot_travel_is_named(ranks):
    lock = threading.Lock()
    advice = "Build it on the ranks instead, inside the function or cell."
    for call, says in (
        (lambda: ranks.run(print, 1, lock), "argument 2 (a lock) can't be sent"),
        (lambda: ranks.run(print, end=lock), "argument end (a lock) can't be sent"),
        (lambda: ranks.run(lambda: lock), "the function <lambda> can't be sent"),
        (lambda: ranks.push(fine=1, bad=lock), "bad (lock) can't be sent"),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).startswith(says)
        assert str(caught.value).endswith(advice)


def test_a_result_that_cannot_travel_is_named(ranks):
    def make_lock():
        return threading.Lock()

    error = failure_of(ranks, make_lock)
    assert error.root.error == "TypeError"
    assert "the result of make_lock is a lock, which can't be sent" in str(error)
    assert "Return tensors, numbers, text, lists or dictionaries." in str(error)


def test_a_result_that_cannot_be_read_here(ranks):
    class Odd:
        def __reduce__(self):
            return (int, ("not a number",))

    with pytest.raises(TypeError) as caught:
        ranks.run(lambda: Odd(), only=[2])
    assert str(caught.value) == (
        "the result of rank 2 can't be read in the notebook (ValueError: invalid "
        "literal for int() with base 10: 'not a number'). "
        "Return tensors, numbers, text, lists or dictionaries."
    )


def test_an_argument_that_cannot_be_read_there(ranks):
    class Odd:
        def __reduce__(self):
            return (int, ("not a number",))

    error = failure_of(ranks, print, Odd())
    assert error.cause == "raised" and error.root.error == "ValueError"


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="nccl works here")
def test_nccl_without_gpus_says_how_many_there_are(watch):  # noqa: F811
    with pytest.raises(RanksError) as caught:
        Ranks(2, backend="nccl", quiet=True)
    assert str(caught.value) == (
        "backend='nccl' needs a GPU for each of the 2 ranks, but this machine has "
        f"{torch.cuda.device_count()}. Use backend='gloo', or fewer ranks."
    )


def test_the_backend_is_said_once(watch, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Ranks, "_said", set())
    with Ranks(1), Ranks(1):
        pass
    words = capsys.readouterr().out.splitlines()
    assert len(words) == 1
    assert words[0].startswith("Ranks are real processes. ")
    assert "gloo" in words[0] or "nccl" in words[0]


# ------------------------------------------------------------------------------ output
def test_lines_are_grouped_by_rank(shown):
    assert shown("print('a', rank)\nprint('b', rank)") == "".join(
        f"[rank {r}] {letter} {r}\n" for r in range(4) for letter in "ab"
    )


def test_the_value_of_the_last_line(shown):
    assert shown("rank * 2") == "".join(f"[rank {r}] => {r * 2}\n" for r in range(4))
    assert shown("print('x')\nrank", only=[1]) == "[rank 1] x\n[rank 1] => 1\n"
    assert shown("rank;") == ""
    assert shown("None") == ""
    assert shown("y = 5") == ""
    assert shown("torch.ones(2, 2)", only=[0]) == (
        "[rank 0] => tensor([[1., 1.],\n[rank 0]            [1., 1.]])\n"
    )
    assert shown("_ = 7\n_ + 1", only=[0]) == "[rank 0] => 8\n"
    assert shown("_ + 1", only=[0]) == "[rank 0] => 9\n"


def test_empty_cells(shown):
    for source in ("", "\n\n", "# only a remark"):
        assert shown(source) == ""


def test_output_without_a_newline_is_a_line(shown):
    assert shown("print('no end', rank, end='')") == "".join(
        f"[rank {r}] no end {r}\n" for r in range(4)
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
    for text in (log, f"[rank0]:{log}"):  # before and after it knows its rank
        lines = shown(f"print({text!r})\nprint({calls!r} + 'mine')\nprint()", only=[0])
        assert lines == f"[rank 0] {text}\n[rank 0] mine\n[rank 0] \n"
    # Where no such error stands before them, they are somebody's own lines.
    assert shown(f"print({calls!r})", only=[0]).count("\n") == 6


def test_output_from_c_and_stderr_and_subprocesses_too(shown):
    out = shown(
        """
        import os, subprocess, sys
        os.write(1, b"from a descriptor\\n")
        print("from stderr", file=sys.stderr)
        done = subprocess.run(["echo", "from a child"])
        """,
        only=[1],
    )
    assert out == (
        "[rank 1] from a descriptor\n[rank 1] from stderr\n[rank 1] from a child\n"
    )


def test_bytes_that_are_not_text(shown):
    out = shown("import os\nos.write(1, b'a\\xff\\xfe\\x00b\\n\\xe2\\x9c');", only=[0])
    assert out == "[rank 0] a\ufffd\ufffd\x00b\n[rank 0] \ufffd\n"


def test_text_that_utf_8_cannot_hold(shown):
    assert shown("print('\\ud800 ✓')", only=[0]) == "[rank 0] \\ud800 ✓\n"


def test_a_character_cut_in_two_is_one_character():
    printer = Printer([0], "grouped")
    for byte in "✓ done\n".encode():
        printer.feed(0, bytes([byte]))
    assert list(printer.outputs[0].head) == ["✓ done"]


def test_a_hundred_thousand_lines(shown):
    with within(5):
        out = shown("for i in range(100_000): print('line', i)", only=[0, 1])
    lines = out.splitlines()
    assert lines[0] == "[rank 0] line 0"
    assert lines[HEAD_LINES] == "[rank 0] ... 98,900 lines left out ..."
    assert lines[HEAD_LINES + 100] == "[rank 0] line 99999"
    assert lines[HEAD_LINES + 101] == "[rank 1] line 0"
    assert len(lines) == 2 * (HEAD_LINES + 101)


@pytest.mark.parametrize("more", [0, 1])
def test_no_line_is_left_out_in_silence(shown, more):
    number = HEAD_LINES + 100 + more
    lines = shown(f"for i in range({number}): print(i)", only=[0]).splitlines()
    assert len(lines) == number
    assert ("[rank 0] ... 1 lines left out ..." in lines) == bool(more)


def test_one_line_of_50_megabytes(shown):
    with within(10):
        out = shown("print('x' * 50_000_000)", only=[0])
    left_out = 50_000_000 - LINE_CHARS
    assert out == (
        f"[rank 0] {'x' * LINE_CHARS} ... {left_out:,} characters left out ...\n"
    )


def test_a_value_of_50_megabytes(shown):
    out = shown("'x' * 50_000_000", only=[0])
    assert out.startswith("[rank 0] => 'xxx")
    assert out.endswith("xxx ... 49,990,002 characters left out ...\n")
    lines = shown(
        "print(type(torch))\nclass L:\n  def __repr__(s): return '\\n' * 9999\nL()",
        only=[0],
    )
    assert len(lines.splitlines()) == HEAD_LINES + 102


def test_a_line_that_grows_in_pieces(shown):
    assert shown("for i in range(50): print(i, end=' ', flush=True)", only=[0]) == (
        "[rank 0] " + " ".join(map(str, range(50))) + " \n"
    )


def test_progress_bars_are_left_out_where_outputs_are_compared(shown):
    out = shown(
        """
        from tqdm import tqdm
        for i in tqdm(range(5)):
            pass
        print("done")
        """,
        only=[0],
    )
    assert out == "[rank 0] done\n"


def test_a_streamed_line_comes_before_the_cell_ends(watch, capsys, tmp_path):  # noqa: F811
    # The cell ends only when this test has seen the line that it prints first.
    seen = tmp_path / "seen"
    text: list[str] = []

    class Screen:
        def write(self, part):
            text.append(part)
            if "[rank 0] first\n" in "".join(text):
                seen.touch()

        def flush(self):
            pass

    with Ranks(2, output="stream", quiet=True) as ranks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", Screen())
            ranks.run_cell(
                "import os, time\n"
                "if rank == 0:\n"
                "    print('first')\n"
                f"    while not os.path.exists({str(seen)!r}):\n"
                "        time.sleep(0.01)\n"
                "    print('second')\n"
                "rank",
                timeout=20,
            )
    assert "".join(text) == (
        "[rank 0] first\n[rank 0] second\n[rank 0] => 0\n[rank 1] => 1\n"
    )


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_a_progress_bar_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("course_utils.ranks.output.TIDY_SECONDS", -1.0)
    printer = Printer([0, 1], "stream")
    for percent in (0, 50, 100):
        for rank in (0, 1):
            printer.feed(rank, f"\r{percent}% of a bar".encode())
            printer.show()
    printer.feed(0, b"\nafter\n")
    printer.feed(1, b"\n")
    printer.finish({})
    out = capsys.readouterr().out
    assert out.count("\n") == 3
    assert sorted(screen(out)) == [
        "",
        "[rank 0] 100% of a bar",
        "[rank 0] after",
        "[rank 1] 100% of a bar",
    ]


def test_where_outputs_are_compared_they_are_grouped(monkeypatch):
    for name in ("CI", "PYTEST_CURRENT_TEST", "RANKS_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    assert choose_output("auto") == "stream"
    assert choose_output("grouped") == "grouped"
    monkeypatch.setenv("CI", "true")
    assert choose_output("auto") == "grouped"
    assert choose_output("stream") == "stream"
    monkeypatch.setenv("RANKS_OUTPUT", "stream")
    assert choose_output("auto") == "stream"


def test_what_was_printed_before_a_failure_is_shown(ranks, capsys):
    failure_of(ranks, "print('before', rank)\nif rank == 1: 1 / 0\ndist.barrier()")
    assert capsys.readouterr().out == "".join(
        f"[rank {r}] before {r}\n" for r in range(4)
    )


# --------------------------------------------------------------------- cells that fail
def test_a_cell_that_is_not_python_runs_nowhere(ranks):
    ranks.run_cell("count = 0")
    with pytest.raises(SyntaxError) as caught:
        ranks.run_cell("count = 1\ncount = = 2")
    assert caught.value.lineno == 2
    assert ranks.pull("count") == [0] * 4


def test_all_ranks_raise_the_same(ranks):
    error = failure_of(ranks, "def half(x):\n    return x / 0\n\nhalf(3)")
    assert str(error) == (
        "Ranks 0 to 3 raised ZeroDivisionError: division by zero\n"
        "  line 4 of the cell: half(3)\n"
        "  line 2 of the cell, in half: return x / 0\n" + GROUP_STAYS
    )
    assert error.cause == "raised" and error.finished == []
    assert error.root == error.failures[error.root.rank]
    assert error.root == RankFailure(
        error.root.rank,
        "raised",
        "ZeroDivisionError",
        "division by zero",
        "line 4 of the cell: half(3)\nline 2 of the cell, in half: return x / 0",
        "line 2 of the cell: return x / 0",
    )


def test_one_rank_raises_and_the_rest_waits(ranks):
    error = failure_of(ranks, "if rank == 2: int('x')\ndist.all_reduce(torch.ones(2))")
    assert str(error) == (
        "Rank 2 raised ValueError: invalid literal for int() with base 10: 'x'\n"
        "  line 1 of the cell: if rank == 2: int('x')\n"
        "Ranks 0, 1 and 3 were waiting in all_reduce, line 2 of the cell: "
        "dist.all_reduce(torch.ones(2))\n" + KEPT
    )
    assert {r: f.kind for r, f in error.failures.items()} == {
        0: "peer",
        1: "peer",
        2: "raised",
        3: "peer",
    }


def test_the_line_numbers_of_a_cell_with_a_magic_are_those_on_the_screen(ranks):
    error = failure_of(ranks, "x = 1\nint('x')", first_line=2)
    assert "line 3 of the cell: int('x')" in str(error)


def test_the_cause_of_an_exception_is_told(ranks):
    error = failure_of(
        ranks,
        "try:\n    {}['key']\nexcept KeyError as e:\n"
        "    raise ValueError('no such setting') from e",
        only=[0],
    )
    assert str(error).startswith(
        "Rank 0 raised ValueError: no such setting\n(caused by KeyError: 'key')\n"
    )


def test_a_failing_function_shows_its_own_line(ranks, tmp_path):
    file = tmp_path / "my_code.py"
    file.write_text("def fail():\n    raise OSError('disk')\n")
    space = {"__name__": "__main__"}
    exec(compile(file.read_text(), str(file), "exec"), space)
    error = failure_of(ranks, space["fail"])
    assert str(error) == (
        "Ranks 0 to 3 raised OSError: disk\n"
        "  line 2 of my_code.py, in fail: raise OSError('disk')\n" + GROUP_STAYS
    )


def test_code_under_main_is_a_script(shown):
    assert shown("print(__name__)", only=[0]) == "[rank 0] __main__\n"


def test_an_error_that_comes_from_a_thread_shows_the_learners_lines_alone(ranks):
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
CALL = {
    "all_reduce": ("dist.all_reduce(torch.ones(2))", "all_reduce(float32[2], SUM)"),
    "product": (
        "dist.all_reduce(torch.ones(2), op=dist.ReduceOp.PRODUCT)",
        "all_reduce(float32[2], PRODUCT)",
    ),
    "longer": ("dist.all_reduce(torch.ones(3))", "all_reduce(float32[3], SUM)"),
    "integers": (
        "dist.all_reduce(torch.ones(2, dtype=torch.long))",
        "all_reduce(int64[2], SUM)",
    ),
    "broadcast": ("dist.broadcast(torch.ones(2), 0)", "broadcast(float32[2], src=0)"),
    "from 1": ("dist.broadcast(torch.ones(2), 1)", "broadcast(float32[2], src=1)"),
    "all_gather": (
        "dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))",
        "all_gather(float32[2])",
    ),
    "barrier": ("dist.barrier()", "barrier()"),
    "object": ("dist.all_gather_object([0, 0], 'x')", "all_gather_object()"),
    "reduce": ("dist.reduce(torch.ones(2), 0)", "reduce(float32[2], SUM, dst=0)"),
}


@pytest.fixture(scope="module")
def two(watch):  # noqa: F811
    with Ranks(2, output="grouped", quiet=True, timeout=20) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "first, second",
    [
        ("all_reduce", "longer"),
        ("all_reduce", "integers"),
        ("all_reduce", "product"),
        ("all_reduce", "broadcast"),
        ("all_reduce", "all_gather"),
        ("all_reduce", "reduce"),
        ("all_reduce", "barrier"),
        ("broadcast", "from 1"),
        ("all_gather", "object"),
    ],
)
def test_different_collectives_are_named(two, watch, first, second):  # noqa: F811
    two.run_cell("kept = rank")
    with within(1):
        error = failure_of(
            two, f"if rank == 0:\n    {CALL[first][0]}\nelse:\n    {CALL[second][0]}"
        )
    assert error.cause == "mismatch"
    # Which of the two comes later, and so finds out, is a matter of chance.
    mine = [CALL[first][1] + " on line 2", CALL[second][1] + " on line 4"]
    one = error.root.rank
    assert error.root.message == (
        f"rank {one} calls {mine[one].rpartition(' on ')[0]} where rank {1 - one} "
        f"called {mine[1 - one].rpartition(' on ')[0]}. "
        "Every rank of a group must call the same collectives, in the same order, "
        "with the same sizes."
    )
    assert two.pull("kept") == [0, 1]
    works(two)
    watch.assert_no_strays()


@pytest.mark.parametrize(
    "sent, received",
    [("2", "3"), ("2", "2, dtype=torch.long")],
    ids=["size", "dtype"],
)
def test_send_and_recv_must_fit(two, sent, received):
    error = failure_of(
        two,
        f"if rank == 0:\n    dist.send(torch.ones({sent}), 1)\n"
        f"else:\n    dist.recv(torch.ones({received}), 0)",
    )
    assert error.cause == "mismatch"
    assert "What one rank sends, the other must receive" in error.root.message
    assert "send(float32[2], dst=1)" in error.root.message
    works(two)


def test_shapes_may_differ_where_sizes_agree(two):
    two.run_cell("dist.all_reduce(torch.ones(2, 3) if rank else torch.ones(6))")
    two.run_cell(
        "if rank: dist.send(torch.ones(6), 0)\nelse: dist.recv(torch.ones(2, 3), 1)"
    )


def test_a_collective_that_nobody_waits_for_is_missed_too(two):
    error = failure_of(
        two, "if rank == 0:\n    dist.broadcast(torch.ones(2), 0, async_op=True)"
    )
    assert str(error) == (
        "Rank 0 called broadcast(float32[2], src=0) on line 2, but rank 1 did not.\n"
        "The cell ended all the same, because it did not wait for the result. "
        "The result never comes.\n"
        "Every rank of a group must call the same collectives.\n" + KEPT
    )
    assert error.cause == "mismatch" and error.finished == [0, 1]
    works(two)


def test_a_collective_with_only_some_ranks(two):
    error = failure_of(two, "dist.all_reduce(torch.ones(2), async_op=True);", only=[0])
    assert "but rank 1 did not (left out of this cell)." in str(error)
    error = failure_of(two, "dist.all_reduce(torch.ones(2))", only=[0])
    assert str(error) == (
        "Deadlock: nothing moves, and nothing will.\n"
        "Rank 0 was stuck in all_reduce, line 1 of the cell: "
        "dist.all_reduce(torch.ones(2))\n"
        "Rank 1 was left out of this cell.\n"
        "Every rank of a group must call its collectives; a recv needs its send.\n"
        + KEPT
    )
    works(two)


def test_agreement_knows_groups_and_pairs(ranks):
    ranks.run_cell(
        "pair = dist.new_group([0, 1]) if rank < 2 else dist.new_group([0, 1])\n"
        "rest = dist.new_group([2, 3])\n"
        "mine = pair if rank < 2 else rest\n"
        "x = torch.tensor([float(rank)])\n"
        "for _ in range(1 + rank // 2):\n"
        "    dist.all_reduce(x, group=mine)\n"
        "dist.barrier()"
    )
    assert [float(x) for x in ranks.pull("x")] == [1, 1, 10, 10]


def test_a_root_may_be_named_by_its_rank_in_the_group(ranks):
    ranks.run_cell(
        """
group = dist.new_group([1, 3])
if rank == 1:
    x = torch.ones(2); dist.broadcast(x, src=3, group=group)
    y = torch.ones(2); dist.reduce(y, dst=3, group=group)
elif rank == 3:
    x = torch.full((2,), 3.0); dist.broadcast(x, group_src=1, group=group)
    y = torch.ones(2); dist.reduce(y, group_dst=1, group=group)
else:
    x = y = torch.zeros(2)
"""
    )
    assert [float(x[0]) for x in ranks.pull("x")] == [0, 3, 0, 3]
    assert float(ranks.pull("y")[3][0]) == 2
    error = failure_of(
        ranks,
        """
group = dist.new_group([1, 3])
if rank == 1: dist.broadcast(torch.ones(2), src=1, group=group)
if rank == 3: dist.broadcast(torch.ones(2), group_src=1, group=group)
""",
    )
    assert error.cause == "mismatch"
    assert "broadcast(float32[2], src=1)" in error.root.message
    assert "broadcast(float32[2], src=3)" in error.root.message
    error = failure_of(
        ranks,
        "group = dist.new_group([0, 1, 2, 3])\n"
        "dist.broadcast(torch.ones(2), group_src=9, group=group)",
    )
    assert error.cause == "raised" and "invalid root" in error.root.message  # gloo's
    works(ranks)


def test_every_collective_of_gloo_works_under_agreement(ranks):
    ranks.run_cell(
        """
t = lambda: torch.full((4,), float(rank))
x = t(); dist.all_reduce(x); assert x[0] == 6
x = t(); dist.all_reduce(x, op=dist.ReduceOp.MAX); assert x[0] == 3
x = t(); dist.broadcast(x, src=2); assert x[0] == 2
x = t(); dist.reduce(x, dst=1); assert rank != 1 or x[0] == 6
out = [torch.empty(4) for _ in range(4)]
dist.all_gather(out, t()); assert [float(o[0]) for o in out] == [0, 1, 2, 3]
flat = torch.empty(16); dist.all_gather_into_tensor(flat, t()); assert flat[-1] == 3
dist.gather(t(), out if rank == 3 else None, dst=3)
if rank == 0: dist.gather(t(), out, dst=0)
else: dist.gather(t())  # dst is 0 for who names none
x = t(); dist.scatter(x, [t() + i for i in range(4)] if rank == 0 else None, src=0)
assert x[0] == rank
x = torch.empty(1); dist.reduce_scatter_tensor(x, torch.arange(4.)); assert x == 4 * rank
x = torch.empty(4); dist.all_to_all_single(x, torch.arange(4.)); assert x[0] == rank
names = [None] * 4; dist.all_gather_object(names, {"r": rank}); assert names[3]["r"] == 3
box = [rank]; dist.broadcast_object_list(box, src=1); assert box == [1]
dist.barrier()
work = dist.all_reduce(x := t(), async_op=True); work.wait(); assert x[0] == 6
a, b = torch.empty(4), t()
for w in dist.batch_isend_irecv([
    dist.P2POp(dist.isend, b, (rank + 1) % 4), dist.P2POp(dist.irecv, a, (rank - 1) % 4)
]):
    w.wait()
assert a[0] == (rank - 1) % 4
if rank == 0: dist.send(t(), 1)
if rank == 1:
    assert dist.recv(x) == 0 and x[0] == 0
"""
    )


def test_what_means_the_same_on_all_ranks_is_no_mismatch(ranks):
    """An op as an object, ranks and tags as NumPy's numbers, a group by its object."""
    ranks.run_cell(
        """
import numpy
even = rank % 2 == 0
SUM = dist.ReduceOp.SUM
x = torch.ones(2); dist.all_reduce(x, op=dist.ReduceOp(SUM)); assert x[0] == 4
x = torch.ones(2); dist.all_reduce(x, op=SUM if even else dist.ReduceOp(SUM))
dist.reduce(x, torch.tensor(0) if even else 0, op=dist.ReduceOp(dist.ReduceOp.MAX))
x = torch.full((2,), float(rank))
dist.broadcast(x, numpy.int64(1) if even else 1); assert x[0] == 1
dist.broadcast(x, 2, group=dist.group.WORLD if even else None)
if even: dist.send(x, numpy.int64(rank + 1), tag=numpy.int64(3))
else: dist.recv(x, rank - 1, tag=3)
"""
    )
    cell = "op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM\n"
    cell += "dist.all_reduce(torch.ones(2), op=dist.ReduceOp(op))"
    assert failure_of(ranks, cell).cause == "mismatch"


@pytest.mark.parametrize(
    "group",
    [
        # as torch.distributed.rpc makes its own
        "dist.ProcessGroupGloo(store, rank, 4, soon)",
        "dist.distributed_c10d._new_process_group_helper(4, rank, list(range(4)), "
        "'gloo', store, 'by hand', timeout=soon)[0]",
        "dist.new_group([0, 1, 2, 3])\ndist.destroy_process_group(group)",
    ],
)
def test_a_group_that_torch_does_not_list_works_uncompared(ranks, group):
    ranks.run_cell(
        "import datetime\n"
        "soon = datetime.timedelta(seconds=20)\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "store = dist.PrefixStore('by hand', store)\n"
        f"group = {group}\n"
        "x = torch.ones(2)\n"
        "group.allreduce([x]).wait()\n"
        "dist.all_reduce(x, group=group)\n"
        "assert x[0] == 16, x\n"
        "dist.all_gather_object([None] * 4, rank, group=group)"
    )
    ranks.restart()


def test_an_error_while_calls_are_collected_puts_off_no_later_call(ranks):
    ranks.run_cell("other = dist.new_group([0, 1, 2, 3])")
    cell = "with dist.distributed_c10d._coalescing_manager({0}):\n"
    cell += "    dist.all_reduce(torch.ones(2), group={0})\n    1 / 0"
    for group in ("None", "other"):
        assert str(failure_of(ranks, cell.format(group))).endswith(GROUP_STAYS)
        ranks.run_cell(
            f"x = torch.ones(1); dist.all_reduce(x, group={group}); assert x == 4"
        )


# ---------------------------------------------------------------------------- requests
RECEIVE = "x = torch.zeros(2)\nif rank == 0: dist.send(torch.ones(2), 1)\n"
TAKE = "if rank == 1: request = dist.irecv(x, 0)\n"
PASS_ON = (
    "y = dist.isend(torch.ones(2), (rank + 1) % 4)\ndist.recv(x, (rank - 1) % 4)\n"
)
GIVEN_UP = {
    "a receive": (RECEIVE + "if rank == 1: dist.irecv(x, 0)", "rank 1", "irecv", 3),
    "a send": (
        PASS_ON.replace("y =", "x = torch.zeros(2);"),
        "ranks 0 to 3",
        "isend",
        1,
    ),
    "a request that is written over": (
        PASS_ON.replace("y", "x = torch.zeros(2); y", 1) + "y = 3",
        "ranks 0 to 3",
        "isend",
        1,
    ),
    "a batch": (
        "x = [dist.P2POp(dist.isend, torch.ones(2), rank ^ 1)]\n"
        "x += [dist.P2POp(dist.irecv, torch.ones(2), rank ^ 1)]\n"
        "dist.batch_isend_irecv(x)",
        "ranks 0 to 3",
        "batch_isend_irecv",
        3,
    ),
    "a collective": (
        "dist.all_reduce(torch.ones(2), async_op=True);",
        "ranks 0 to 3",
        "all_reduce",
        1,
    ),
    "the last line, which is shown": (
        "dist.barrier(async_op=True)",
        "ranks 0 to 3",
        "barrier",
        1,
    ),
    "in a circle": (
        "def f():\n"
        "    f.work = dist.broadcast(torch.ones(2), 0, async_op=True)\n"
        "    f.me = f\n"
        "f(); del f",
        "ranks 0 to 3",
        "broadcast",
        2,
    ),
    "in a group": (
        "g = dist.new_group([1, 2])\n"
        "if rank == 1: dist.irecv(torch.ones(2), 2, group=g)\n"
        "if rank == 2: dist.send(torch.ones(2), 1, group=g)",
        "rank 1",
        "irecv",
        2,
    ),
    "nobody sends": (
        "if rank == 2: dist.irecv(torch.ones(2), 3)",
        "rank 2",
        "irecv",
        1,
    ),
    "nobody receives": (
        "if rank == 2: dist.isend(torch.ones(2), 3)",
        "rank 2",
        "isend",
        1,
    ),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_request_that_nobody_waited_for_is_told_of(ranks, name):
    cell, who, call, line = GIVEN_UP[name]
    with pytest.warns(RequestWarning) as caught, within(1):
        ranks.run_cell(cell)
    text = str(caught[0].message)
    assert len(caught) == 1 and text.startswith(
        f"{who.capitalize()} never waited for {call}, line {line} of the cell: "
    )
    assert caught[0].lineno == line and len(ranks.unwaited) >= 1
    with within(1):
        ranks.run_cell(PASS_ON.replace("y", "x = torch.ones(2); y", 1) + "y.wait()")


WAITED_FOR = {
    "in the next cell": [
        RECEIVE + TAKE,
        "dist.barrier()",
        "if rank == 1: request.wait()",
    ],
    "in a thread": [
        "import threading\n"
        "request = dist.all_reduce(torch.ones(2), async_op=True)\n"
        "thread = threading.Thread(target=request.wait)\n"
        "thread.start(); thread.join(); del request"
    ],
    "through its future": [
        "f = dist.all_reduce(torch.ones(2), async_op=True).get_future()\n"
        "f.then(lambda f: f.value()[0] / 4).wait()"
    ],
    "by asking": [
        "request = dist.all_reduce(torch.ones(2), async_op=True)\n"
        "while not request.is_completed(): pass\n"
        "del request"
    ],
    "deep in an object": [
        "class Box: pass\n"
        "box = Box(); box.all = [{'send': dist.isend(torch.ones(2), rank ^ 1)}]\n"
        "box.all.append(dist.irecv(torch.ones(2), rank ^ 1))",
        "box.all[0]['send'].wait(); box.all[1].wait()",
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
def test_nobody_is_accused_who_waits(ranks, name):
    for cell in WAITED_FOR[name]:
        ranks.run_cell(cell, timeout=60)
    if name in ("in vain", "by torch"):
        ranks.restart()


def test_a_request_that_is_still_open_is_named_when_a_later_cell_hangs(ranks):
    ranks.run_cell("x = torch.zeros(2)\n" + TAKE)
    error = failure_of(ranks, RECEIVE + "if rank == 1: dist.recv(x, 0)")
    assert str(error).splitlines()[1] == (
        "Rank 1 has not yet waited for irecv, line 2 of the cell: "
        "if rank == 1: request = dist.irecv(x, 0), in an earlier cell. It takes the "
        "next message that fits: call its wait() first."
    )


def test_a_request_given_up_is_named_beside_what_it_led_to(ranks):
    cell = f"{RECEIVE}if rank == 1:\n    dist.irecv(x, 0)\n    assert x[0] == 7"
    error = failure_of(ranks, cell)
    assert error.root.error == "AssertionError"
    assert "Rank 1 never waited for irecv, line 4 of the cell" in str(error)


# ----------------------------------------------------------- the learner's own hand
BY_HAND = {
    "env": "dist.init_process_group('gloo')",
    "tcp": (
        "import os\n"
        "dist.init_process_group('gloo', rank=rank, world_size=world_size, "
        "init_method='tcp://127.0.0.1:' + os.environ['MASTER_PORT'])"
    ),
    "file": (
        "dist.init_process_group('gloo', rank=rank, world_size=world_size, "
        "init_method='file://' + path)"
    ),
}


@pytest.mark.parametrize("way", BY_HAND)
def test_the_group_is_the_learners_with_init_false(watch, tmp_path, way):  # noqa: F811
    with Ranks(2, init=False, output="grouped", quiet=True) as ranks:
        assert [status.backend for status in ranks.status()] == [None, None]
        ranks.push(path=str(tmp_path / "meeting"))
        ranks.run_cell(BY_HAND[way])
        works(ranks)
        with within(1):
            error = failure_of(ranks, "if rank: 1 / 0\ndist.barrier()")
        assert str(error).endswith(
            "(All ranks keep their variables. The process group is closed: "
            "call init_process_group again.)"
        )
        assert ranks.pull("rank") == [0, 1]
        ranks.push(path=str(tmp_path / "another"))
        ranks.run_cell(BY_HAND[way])
        works(ranks)
        ranks.run_cell("dist.destroy_process_group()")
        ranks.push(path=str(tmp_path / "a third"))
        if way == "file":
            ranks.run_cell(BY_HAND[way])
            works(ranks)
    watch.assert_no_strays()


ONE_IS_SLOW = """
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
"""


def test_no_rank_leaves_init_before_all_are_through_it(watch):  # noqa: F811
    # Else a rank that leaves the group at once breaks the init of the others.
    with Ranks(2, init=False, quiet=True) as ranks:
        ranks.run_cell(
            f"{ONE_IS_SLOW}\n"
            "dist.init_process_group('gloo')\n"
            "init = through, time.monotonic()\n"
            "dist.new_group([0])\n"
            "group = through, time.monotonic()"
        )
        init, group = ranks.pull("init"), ranks.pull("group")
        for _, left in init:
            assert left >= init[1][0] > init[0][0]
        # new_group is PyTorch's own, which waits for none.
        assert group[0][1] < group[1][0]


@pytest.mark.parametrize("who", [0, 1])
def test_only_one_rank_joins(watch, capsys, who):  # noqa: F811
    with Ranks(2, init=False, output="grouped", quiet=True) as ranks:
        ranks.status()
        with within(6):
            error = failure_of(
                ranks, f"if rank == {who}:\n    dist.init_process_group('gloo')"
            )
        first, stuck, finished, why, _ = str(error).splitlines()
        assert first == "Deadlock: nothing moves, and nothing will."
        assert stuck.startswith(
            f"Rank {who} was stuck in init_process_group, line 2 of"
        )
        assert finished == f"Rank {1 - who} finished the cell."
        assert why.startswith("A process group is ready when all ranks have called")
        # What torch logs when its connection is closed: without the C++ calls.
        printed = capsys.readouterr().out
        assert printed.count("\n") == 1 and "[c10d]" in printed, printed
        # One rank more has tried to join: they find each other all the same.
        ranks.run_cell("dist.init_process_group('gloo')")
        works(ranks)


@pytest.mark.thorough
def test_all_wait_for_a_rank_that_does_not_exist(watch):  # noqa: F811
    with Ranks(2, init=False, output="grouped", quiet=True) as ranks:
        ranks.status()
        with within(8):
            error = failure_of(
                ranks, "dist.init_process_group('gloo', rank=rank, world_size=3)"
            )
        assert "Ranks 0 and 1 were stuck in init_process_group" in str(error)
        assert "with the same address and the same world_size." in str(error)


@pytest.mark.thorough
def test_a_host_that_does_not_exist(watch, capsys):  # noqa: F811
    with Ranks(2, init=False, output="grouped", quiet=True) as ranks:
        ranks.status()
        with within(15):
            error = failure_of(
                ranks,
                "import os\n"
                "if rank == 1: os.environ['MASTER_ADDR'] = 'nowhere.invalid'\n"
                "dist.init_process_group('gloo')",
            )
        assert "Ranks 0 and 1 were stuck in init_process_group" in str(error)
        # What rank 1 prints again and again while it tries is no progress.
        assert "addresses of (nowhere.invalid, " in capsys.readouterr().out


def test_a_pause_between_two_tries_to_connect_is_no_deadlock(watch):  # noqa: F811
    with Ranks(2, init=False, output="grouped", quiet=True) as ranks:
        ranks.run_cell(
            """
import ctypes
from course_utils.ranks import loopback
if rank == 1:  # it pauses in C++, in the constructor of its store
    exec(compile("ctypes.CDLL(None).sleep(3)", loopback.__file__, "exec"))
dist.init_process_group("gloo")
"""
        )
        works(ranks)


def test_a_rank_that_finishes_while_all_are_asked_is_progress(monkeypatch):
    ask = Round._ask_where

    def ask_until_one_finishes(self, seconds):
        ask(self, seconds)
        pending, end = set(self.pending), time.monotonic() + 10
        while len(self.samples) == QUIET_SAMPLES and self.pending == pending:
            assert time.monotonic() < end
            self._step(0.02)

    monkeypatch.setattr(Round, "_ask_where", ask_until_one_finishes)
    with Ranks(2, init=False, output="grouped", quiet=True) as ranks:
        ranks.run_cell(
            """
import ctypes
from course_utils.ranks import loopback
pause = f"ctypes.CDLL(None).sleep({5 - rank})"  # as in a store's constructor
exec(compile(pause, loopback.__file__, "exec"))
"""
        )


def test_an_interface_of_a_cluster_is_not_used(watch, monkeypatch):  # noqa: F811
    """GLOO_SOCKET_IFNAME is often set there; ranks of a notebook stay on loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with Ranks(2, quiet=True) as ranks:
        works(ranks)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "no_such_interface"


@pytest.mark.skipif(not LINUX, reason="the watch looks at sockets on Linux only")
def test_the_watch_sees_who_listens():
    # The machine's own address would be seen by others: this one stands for it.
    for family, address, seen in (
        (socket.AF_INET, "127.0.0.2", "127.0.0.2"),
        (socket.AF_INET6, "::ffff:127.0.0.2", "127.0.0.2"),
        (socket.AF_INET, "127.0.0.1", None),
        (socket.AF_INET6, "::ffff:127.0.0.1", None),
        (socket.AF_INET6, "::1", None),
    ):
        with socket.socket(family) as one:
            try:
                one.bind((address, 0))
            except OSError:  # no IPv6 here
                continue
            inode = str(os.fstat(one.fileno()).st_ino)
            assert inode not in listening_beyond_loopback()
            one.listen()
            found = listening_beyond_loopback().get(inode)
            assert found == (seen and f"{seen} port {one.getsockname()[1]}"), address


def test_the_environment_is_torchruns(watch):  # noqa: F811
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()
    with Ranks(2, init=False, quiet=True) as ranks:
        found = ranks.run(lambda: [os.environ[name] for name in names])
        assert found == [[str(r), str(r), "2", "2", "127.0.0.1"] for r in range(2)]
        ports = ranks.run(lambda: int(os.environ["MASTER_PORT"]))
        assert ports[0] == ports[1] > 1024


@pytest.mark.skipif(sys.platform != "linux", reason="a port can't be held there")
def test_nobody_else_gets_the_port_while_the_ranks_live(watch):  # noqa: F811
    with Ranks(2, init=False, quiet=True) as ranks:
        (port, _) = ranks.run(lambda: int(os.environ["MASTER_PORT"]))
        for attempt in range(2):  # a server of a rank may come and go
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with pytest.raises(OSError, match="refused"):  # nobody listens there
                socket.create_connection(("127.0.0.1", port))
            if attempt == 0:
                ranks.run_cell(BY_HAND["tcp"])
                works(ranks)
                ranks.run_cell("dist.destroy_process_group()")
    with socket.create_server(("127.0.0.1", port)):
        pass
    watch.assert_no_strays()


# ------------------------------------------------------------------------- several
def test_two_groups_of_ranks_at_once(watch):  # noqa: F811
    with Ranks(2, quiet=True) as a, Ranks(3, quiet=True) as b:
        a.run_cell("name = 'a'")
        b.run_cell("name = 'b'")
        assert a.pull("name") == ["a"] * 2
        assert b.pull("name") == ["b"] * 3
        works(a)
        works(b)
        assert Ranks.latest() is b
        assert Ranks.latest(2) is a
        assert Ranks.latest(5) is None
    watch.assert_no_strays()


def test_ranks_made_twice_under_one_name_leave_one(watch):  # noqa: F811
    ranks = Ranks(2, quiet=True)
    first = [status.pid for status in ranks.status()]
    ranks = Ranks(2, quiet=True)
    watch.assert_no_strays()
    assert set(first).isdisjoint(status.pid for status in ranks.status())
    works(ranks)
    ranks.close()


def test_busy_ranks_say_so(watch, tmp_path):  # noqa: F811
    # The cell of the first thread ends when the second has been turned away.
    started, go_on = tmp_path / "started", tmp_path / "go on"
    with Ranks(2, quiet=True, timeout=20) as ranks:
        cell = (
            "import os, time\n"
            f"open({str(started)!r}, 'w').close()\n"
            f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
            "done = True"
        )
        thread = threading.Thread(target=ranks.run_cell, args=(cell,))
        thread.start()
        while not started.exists():
            assert thread.is_alive()
        for use in (lambda: ranks.run_cell("1"), ranks.status, ranks.restart):
            with pytest.raises(RanksError, match="busy with another cell"):
                use()
        go_on.touch()
        thread.join()
        assert ranks.pull("done") == [True, True]


def test_a_thread_can_use_the_ranks(watch):  # noqa: F811
    results = []
    with Ranks(2, quiet=True) as ranks:
        thread = threading.Thread(
            target=lambda: results.append(ranks.run(lambda: os.environ["RANK"]))
        )
        thread.start()
        thread.join()
    assert results == [["0", "1"]]


def test_eight_ranks(watch):  # noqa: F811
    with Ranks(8, output="grouped", quiet=True) as ranks:
        works(ranks)
        with within(1):
            error = failure_of(ranks, "if rank == 5: 1 / 0\ndist.barrier()")
        assert error.root.rank == 5
        works(ranks)
    watch.assert_no_strays()


def test_one_rank_alone(watch, capsys):  # noqa: F811
    with Ranks(1, output="grouped", quiet=True) as ranks:
        ranks.run_cell("x = torch.ones(1); dist.all_reduce(x); dist.barrier(); x")
        assert capsys.readouterr().out == "[rank 0] => tensor([1.])\n"


@pytest.mark.skipif(not LINUX, reason="descriptors are counted in /proc")
def test_ranks_that_fail_and_restart_use_up_no_descriptors(ranks):
    failure_of(ranks, "import os\nif rank == 1: os._exit(1)\ndist.barrier()")
    works(ranks)
    before = len(own_descriptors())
    for _ in range(4):
        failure_of(ranks, "import os\nif rank == 1: os._exit(1)\ndist.barrier()")
    works(ranks)
    # Not one for each failure. One or two may still be about to be closed.
    assert len(own_descriptors()) < before + 4


def test_many_cells_use_up_no_descriptors_on_the_ranks(ranks):
    def count():
        return len(os.listdir("/dev/fd"))

    failure_of(ranks, "if rank: 1 / 0\ndist.barrier()")
    works(ranks)
    before = ranks.run(count)
    for _ in range(4):
        failure_of(ranks, "if rank: 1 / 0\ndist.barrier()")
    works(ranks)
    # Not one for each failure. gloo closes those of an old group in its own time.
    after = ranks.run(count)
    assert all(new < old + 4 for new, old in zip(after, before, strict=True))


# --------------------------------------------------------------------------- the magic
@pytest.fixture
def magic(four, watch, capsys):  # noqa: F811
    """Run a cell with the options behind ``%%ranks``; what it printed."""

    def run(line: str, cell: str) -> str:
        capsys.readouterr()
        run_on_ranks(line, cell)
        return capsys.readouterr().out

    return run


def test_the_magic_uses_the_newest_ranks_or_those_with_n(magic):
    with Ranks(3, output="grouped", quiet=True):
        assert magic("", "world_size") == "".join(
            f"[rank {r}] => 3\n" for r in range(3)
        )
        assert magic("-n 4 --only 1,3", "world_size") == (
            "[rank 1] => 4\n[rank 3] => 4\n"
        )


def test_the_magic_expects_an_error(magic):
    assert magic("-n 4 --expect-error ZeroDivisionError", "1 / 0") == (
        "As expected: Ranks 0 to 3 raised ZeroDivisionError: division by zero\n"
        "  line 2 of the cell: 1 / 0\n" + GROUP_STAYS + "\n"
    )
    with pytest.raises(RanksError, match="raised ZeroDivisionError"):
        magic("-n 4 --expect-error ValueError", "1 / 0")
    with pytest.raises(RanksError) as caught:
        magic("-n 4 --expect-error ValueError", "1")
    assert str(caught.value) == (
        "this cell was expected to fail (ValueError), but every rank finished it."
    )
    assert "Rank 1 died (exit code 3)." in magic(
        "-n 4 --expect-error died", "import os\nif rank == 1: os._exit(3)"
    )
    assert "were stuck in barrier, line 2 of the cell" in magic(
        "-n 4 --expect-error stuck", "if rank != 1: dist.barrier()"
    )
    assert "calls all_reduce(float32[" in magic(
        "-n 4 --expect-error mismatch", "dist.all_reduce(torch.ones(rank + 1))"
    )


def test_the_magic_has_a_limit(magic):
    with within(2), pytest.raises(RanksError) as caught:
        magic("-n 4 --timeout 0.3", "while True: pass")
    assert str(caught.value) == (
        "Not finished after 0.3 s, the limit for this cell.\n"
        "Ranks 0 to 3 were still running: line 2 of the cell: while True: pass\n" + KEPT
    )


@pytest.mark.parametrize(
    "line, says",
    [
        ("--onyl 1", "%%ranks: unrecognized arguments: --onyl 1"),
        ("-n four", "%%ranks: argument -n: invalid int value: 'four'"),
        ("--only zero", "%%ranks --only: 'zero' is not a list of ranks"),
        ("-n 4 --only 7", "there is no rank 7: these are ranks 0 to 3"),
        ("--timeout soon", "%%ranks: argument --timeout: invalid float value: 'soon'"),
        ("-n 0", "n is 0; it must be a whole number from 1 to 256"),
        ("--only 'x", "%%ranks: No closing quotation"),
    ],
)
def test_wrong_options_of_the_magic(magic, line, says):
    with pytest.raises(ValueError) as caught:
        magic(line, "1")
    assert str(caught.value).startswith(says)


def into_a_view(view: str) -> dict[str, str]:
    """What each collective says that writes into a view of this kind."""
    views = {
        "a row": lambda x: x[1],
        "transposed": lambda x: x.t(),
        "empty": lambda x: x[:0, 1],
        "a column": lambda x: x[:, 1],
        "every second": lambda x: x[::2, ::2],
        "expanded": lambda x: x[0, 0].expand(4),
    }
    shape = views[view](torch.zeros(4, 4)).shape
    parts = [torch.ones(shape)] * 4 if dist.get_rank() == 0 else None
    says = {}
    for name, *others in (
        ("all_reduce",),
        ("broadcast", 0),
        ("reduce", 0),
        ("scatter", parts, 0),
        ("all_to_all_single", torch.ones(shape)),
    ):
        try:
            getattr(dist, name)(views[view](torch.zeros(4, 4)), *others)
        except ValueError as error:
            says[name] = str(error)
    return says


@pytest.mark.parametrize("view", ["a row", "transposed", "empty"])
def test_a_view_in_one_piece_is_sent(ranks, view):
    assert ranks.run(into_a_view, view) == [{}] * 4


@pytest.mark.parametrize("view", ["a column", "every second", "expanded"])
def test_a_view_with_gaps_is_refused(ranks, view):
    """gloo would give wrong numbers without a word, and NCCL refuses it."""
    for says in ranks.run(into_a_view, view):
        assert len(says) == 5
        for name, text in says.items():
            shape = "2, 2" if view == "every second" else "4"
            assert text.startswith(f"{name}: this float32[{shape}] is a view with gaps")


@pytest.mark.parametrize(
    "call, says",
    [
        (
            "dist.reduce_scatter_single(torch.ones(3), torch.ones(13))",
            "reduce_scatter_single: the input is float32[13] and the output "
            "float32[3]. The input holds one piece for each of the 4 ranks: it must "
            "have 4 x 3 = 12 numbers, not 13.",
        ),
        (
            "dist.all_gather_single(torch.ones(2, 3), torch.ones(3))",
            "all_gather_single: the output is float32[2, 3] and the input float32[3]. "
            "The output holds one piece for each of the 4 ranks: it must have 4 x 3 = "
            "12 numbers, not 6.",
        ),
        (
            "dist.all_gather_single([torch.ones(3)], torch.ones(3))",
            "TypeError: Invalid function argument. Expected parameter `output_tensor`",
        ),
    ],
)
def test_pieces_that_do_not_fit_are_refused(ranks, call, says):
    with pytest.raises(RanksError) as caught:
        ranks.run_cell(call)
    assert says in str(caught.value)


def test_a_call_that_is_replaced_while_it_is_read_is_no_mismatch(monkeypatch):
    board = bytearray(2 * agreement.RECORD.size)
    mine, other = (agreement.Agreement(board, rank, 2) for rank in (0, 1))
    assert other._exchange(("first",), "3 numbers", "send", (0,)) == []
    differs = [(1, "send")]
    assert mine._exchange(("first",), "2 numbers", "recv", (1,)) == differs

    # The other rank goes on to its next call while this one looks.
    def next_call(seconds):
        other._exchange(("second",), "3 numbers", "send", ())

    monkeypatch.setattr(agreement.time, "sleep", next_call)
    assert mine._exchange(("first",), "2 numbers", "recv", (1,)) == []


def test_what_the_helper_imports_first_its_ranks_have(watch):  # noqa: F811
    def there() -> bool:
        import sys

        return "wsgiref.validate" in sys.modules

    with Ranks(1, quiet=True) as before:
        assert before.run(there) == [False]
        zygote = before.team.zygote
        zygote.import_first(
            "there_is_no_such_module"
        )  # the next ranks live all the same
        zygote.import_first("wsgiref.validate")
        with Ranks(1, quiet=True) as after:
            assert after.run(there) == [True]
            works(after)
        assert before.run(there) == [False]


def test_a_number_that_an_earlier_process_had_is_that_of_a_living_rank():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    zygote = Zygote.__new__(Zygote)
    zygote.socket, zygote.lock, zygote.failure = ours, threading.RLock(), None
    zygote.forked, zygote.ended = {}, {}
    with ours, theirs:
        theirs.sendall(pickle.dumps({"ended": 4321, "status": 9}))
        zygote.pump()
        assert zygote.ended == {4321: -9}
        theirs.sendall(pickle.dumps({"forked": "a rank", "pid": 4321}))
        zygote.pump()
    assert (zygote.forked, zygote.ended) == ({"a rank": 4321}, {})


BIG_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not BIG_PAGES.exists()
    or "[never]" in BIG_PAGES.read_text()
    or tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1),
    reason="this system can't join pages",
)
def test_the_helper_ends_up_in_big_pages_which_makes_forks_cheap(watch):  # noqa: F811
    with Ranks(1, quiet=True) as ranks:
        settle(ranks)
        process = ranks.team.zygote.process.pid
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE))
        # Mostly nine tenths; less where the system's memory is in small pieces just now.
        assert int(sizes["AnonHugePages"]) > int(sizes["Anonymous"]) / 8


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (
            "for i in range(3)",
            "SyntaxError: expected ':', line 2 of the cell\n    for i in range(3)\n"
            "                     ^\nNothing ran.",
        ),
        (
            "x = 1\n!ls",
            "SyntaxError: invalid syntax, line 3 of the cell\n    !ls\n    ^\n"
            "Lines with ! and % work in ordinary cells only.\nNothing ran.",
        ),
        (
            "x = 1\n  y = 2",
            "IndentationError: unexpected indent, line 3 of the cell\n    y = 2\n"
            "Nothing ran.",
        ),
    ],
)
def test_the_magic_shows_what_is_not_python_and_no_more(magic, cell, says):
    with pytest.raises(RanksError) as caught:
        magic("-n 4", cell)
    assert str(caught.value) == says and caught.value.cause == "usage"


def test_each_cell_has_its_names(ranks, shown):
    ranks.run_cell("rank, world_size, dist, torch, mine = 99, 0, None, None, 5")
    assert shown("torch.tensor(rank + dist.get_world_size() + mine)", only=[2]) == (
        "[rank 2] => tensor(11)\n"
    )
