"""The framework under the checks: every way in which an answer can go, as text."""

import concurrent.futures
import contextlib
import enum
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from ranks_support import settle
from thorough import thorough_after

from course_utils import costs
from course_utils.checks import runner
from course_utils.checks.runner import _Look, run_task
from course_utils.checks.task import (
    ANYTHING,
    RULE,
    Count,
    Mistake,
    PythonNumber,
    Such,
    Task,
    wrap,
)
from course_utils.from_scratch import pipeline
from course_utils.notebook import check as checks
from course_utils.notebook.check import check, hint, solution
from course_utils.notebook.compare import Strange, difference, plain, show
from course_utils.progress import attempts, record_attempt
from course_utils.ranks import RankFailure, Ranks, RanksError, magic
from course_utils.ranks.processes import start_method
from course_utils.tasks.inputs import whole_numbers

ROOT = Path(__file__).resolve().parent.parent
HINTS = ("a", "b", "c")


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """Every test has its own, empty progress, and has seen no hints."""
    monkeypatch.setenv("COURSE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(sys.modules["course_utils.progress"], "_pending", [])
    monkeypatch.setattr(sys.modules["course_utils.progress"], "_warned", set())
    monkeypatch.setattr(checks, "_hints_shown", {})
    return tmp_path / "state"


def make_task(**changes):
    """A task on two ranks: the sum of a tensor over the ranks."""
    settings = {
        "id": "99.total",
        "title": "Total",
        "stars": 1,
        "hints": HINTS,
        "where": "ranks",
        "world_sizes": (2,),
        "cases": ((2,),),
        "inputs": lambda shape, rank, world_size: (whole_numbers(shape, rank),),
        "expect": lambda rank, inputs: sum(x for (x,) in inputs),
    }
    return Task(**{**settings, **changes})


def here(expect, *cases, **changes):
    """A task for a plain function."""
    settings = {"id": "99.here", "title": "Here", "stars": 1, "hints": HINTS}
    return Task(**{**settings, "expect": expect, "cases": cases, **changes})


def text_of(outcome):
    """The outcome in one line, so that tests need not know where lines break."""
    return " ".join(str(outcome).split())


def right_total(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


@pytest.fixture(scope="module")
def settled():
    """The helper that forks the ranks has imported what it imports while it is idle.

    Meanwhile it can't see that a rank has ended.
    """
    if start_method() == "fork":
        runner._keep_zygote()
        with Ranks(1, quiet=True) as ranks:
            settle(ranks)


@pytest.fixture
def nothing_left(settled):
    """After the test no rank is left; only the helper that forks them may live."""
    yield
    give_up = time.monotonic() + 2
    while True:
        family = psutil.Process().children(recursive=True)
        ranks = []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if process.ppid() != os.getpid():
                    ranks.append(process)
        if not ranks or time.monotonic() > give_up:
            break
        time.sleep(0.05)
    assert ranks == []


# ---------------------------------------------------------------- the text, in full


def test_passed_reads_like_this():
    assert str(run_task(make_task(world_sizes=(1, 2, 3)), right_total)) == (
        "✓ 99.total: passed\n"
        "  It is right on 1, 2 and 3 ranks.\n"
        '  Compare it with ours: solution("99.total")'
    )


def test_wrong_reads_like_this():
    def forgot_the_others(tensor):
        print("about to return")
        return tensor

    mistakes = (
        Mistake(like=lambda rank, inputs: inputs[rank][0] * 7, says="Seven times."),
        Mistake(
            like=lambda rank, inputs: inputs[rank][0],
            says="That is the rank's own tensor: the sum over the ranks is missing.",
        ),
    )
    assert str(run_task(make_task(mistakes=mistakes), forgot_the_others)) == (
        "✗ 99.total: wrong\n"
        "  With 2 ranks, rank 0 called forgot_the_others(tensor([-2., 3.])).\n"
        "  It returned  tensor([-2., 3.])\n"
        "  Expected     tensor([0., 12.])\n"
        "  Wrong on all ranks.\n"
        "  That is the rank's own tensor: the sum over the ranks is missing.\n"
        "  It printed:\n"
        "    about to return\n"
        '  A hint: hint("99.total")'
    )


def train_some(answer, kind, steps, rates, sizes):
    return answer(steps)


def test_what_a_check_has_tried_is_said_with_names():
    """A number alone says nothing. A text describes what the check has made."""
    case = ("a network", 4, [0.5, None], {"rows of a batch": 8})
    task = here(lambda *case: 16, case, run=train_some)
    outcome = run_task(task, lambda steps: steps)
    assert outcome.lines[0] == (
        "The check tried <lambda>. The case: a network, steps=4, rates=[0.5, None], "
        "rows of a batch: 8."
    )


def test_crashed_shows_the_learners_lines_only():
    def helper(tensor):
        return tensor.view(3, 5)

    def crashes_on_rank_1(tensor):
        if dist.get_rank() == 1:
            return helper(tensor)
        return right_total(tensor)

    text = str(run_task(make_task(), crashes_on_rank_1))
    assert text.startswith(
        "✗ 99.total: crashed\n"
        "  With 2 ranks, rank 1 called crashes_on_rank_1(tensor([2., 9.])).\n"
        "  It raised RuntimeError: shape '[3, 5]' is invalid for input of size 2\n"
        "    line "
    )
    assert "in crashes_on_rank_1: return helper(tensor)\n" in text
    assert "in helper: return tensor.view(3, 5)\n" in text
    assert text.endswith('\n  A hint: hint("99.total")')
    assert "course_utils" not in text
    assert "site-packages" not in text
    assert text.count("line ") == 2


def test_stuck_names_the_rank_and_the_line():
    def only_rank_1(tensor):
        if dist.get_rank() == 1:
            dist.all_reduce(tensor)
        return tensor

    outcome = run_task(make_task(), only_rank_1)
    assert outcome.status == "stuck"
    text = text_of(outcome)
    assert "With 2 ranks, rank 1 called only_rank_1(tensor([2., 9.]))." in text
    assert "Rank 1 waits in all_reduce, line " in text
    assert "dist.all_reduce(tensor)" in text
    assert "Rank 0 returned." in text
    assert "Every rank of the group must call a collective" in text


@pytest.mark.thorough
def test_ranks_that_all_are_in_one_collective_are_slow_and_not_stuck():
    def very_often(tensor):
        while True:
            dist.all_reduce(torch.ones(1))

    stuck = [
        RankFailure(rank, "stuck", "waiting", where="all_reduce, line 3 of the cell: x")
        for rank in range(2)
    ]
    missing = Mistake(when=lambda attempt: True, says="Which rank stays away?")
    task = make_task(mistakes=(missing,))
    look = _Look(task, very_often, (2,), 2)
    error = RanksError("", failures=dict(enumerate(stuck)), root=stuck[0])
    outcome = look._failed(error)
    assert outcome.status == "too slow"
    text = text_of(outcome)
    assert "It did not end within" in text and "stays away" not in text
    assert "Rank 0 waits in all_reduce, line 3 of the cell: x" in text
    assert "A few large ones take less time than many small ones." in text
    for other in ("recv, line 3 of the cell: x", "all_reduce, line 4 of the cell: x"):
        elsewhere = [replace(stuck[0], where=other), replace(stuck[1], where=other)]
        pair = elsewhere if other.startswith("recv") else [stuck[0], elsewhere[1]]
        error = RanksError("", failures=dict(enumerate(pair)), root=pair[0])
        assert look._failed(error).status == "stuck"
    outcome = run_task(make_task(seconds=1.5), very_often)
    assert outcome.status == "too slow", str(outcome)


def test_too_slow_names_the_line():
    def counts_for_ever(tensor):
        while dist.get_rank() == 1:
            pass
        return right_total(tensor)

    outcome = run_task(make_task(seconds=1.5), counts_for_ever)
    assert outcome.status == "too slow"
    text = text_of(outcome)
    assert "It did not end within 1.5 seconds." in text
    # In the loop, or in the call that the loop makes over and over.
    where = r"Rank 1 was still at (get_rank, )?line \d+ of test_checks.py"
    assert re.search(where, text)


@pytest.mark.parametrize("answer", [None, ...])
def test_nothing_is_not_attempted(answer):
    assert str(run_task(make_task(), answer)) == (
        "· 99.total: not attempted\n"
        "  Write your code in the cell above, run that cell, then this one.\n"
        '  A hint: hint("99.total")'
    )


def test_every_text_is_short_and_narrow():
    def prints_and_fails(tensor):
        for number in range(1000):
            print("x" * 300, number)
        raise ValueError("y" * 1000 + "\n" + "z\n" * 50)

    lines = str(run_task(make_task(), prints_and_fails)).splitlines()
    assert len(lines) <= 14
    assert max(map(len, lines)) <= 260  # one long word of the learner's own
    assert sum(len(line) > 80 for line in lines) <= 1


# --------------------------------------------------------------------- not attempted


def test_a_stub_left_on_one_rank_is_not_attempted():
    def half_done(tensor):
        if dist.get_rank() == 1:
            raise NotImplementedError("Write your code here.")
        return right_total(tensor)

    outcome = run_task(make_task(), half_done)
    assert outcome.status == "not attempted"
    assert "It still raises NotImplementedError, line " in text_of(outcome)


def test_a_stub_in_a_method_is_not_attempted():
    class Averager:
        def __call__(self, tensor):
            raise NotImplementedError

    task = make_task(run=lambda answer, tensor: answer()(tensor))
    assert run_task(task, Averager).status == "not attempted"


def unsolved_before(tensor):
    raise NotImplementedError("Write your code here.")


class UnsolvedBefore:
    def total(self, tensor):
        raise NotImplementedError("Write your code here.")


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (lambda tensor: unsolved_before(tensor), "unsolved_before"),
        (lambda tensor: UnsolvedBefore().total(tensor), "UnsolvedBefore"),
    ],
)
def test_the_stub_of_an_earlier_task_is_named(answer, name):
    def solved(tensor):
        return answer(tensor)

    outcome = run_task(make_task(), solved)
    assert outcome.status == "not attempted"
    text = text_of(outcome)
    assert f"{name}, which it calls, still raises NotImplementedError, line " in text
    assert f"Solve the task of {name} first, and run its cell" in text


def test_a_stub_in_an_inner_function_is_the_answers_own():
    def outer(tensor):
        def inner():
            raise NotImplementedError

        return inner()

    text = text_of(run_task(make_task(), outer))
    assert "It still raises NotImplementedError" in text


def test_what_pytorch_has_not_implemented_is_a_crash():
    def no_such_kernel(tensor):
        return torch.nonzero(tensor.to("meta"))

    outcome = run_task(make_task(), no_such_kernel)
    assert outcome.status == "crashed"
    assert "NotImplementedError" in text_of(outcome)


# -------------------------------------------------------------------- crashed, killed


def leave_by_exit(tensor):
    sys.exit(1)


def leave_by_os_exit(tensor):
    os._exit(3)


def kill_itself(tensor):
    os.kill(os.getpid(), signal.SIGKILL)


def crash_in_c(tensor):
    import ctypes

    ctypes.string_at(0)


def recurse(tensor):
    return recurse(tensor)


class Unreadable(Exception):
    def __str__(self):
        raise ValueError("no text")


def raise_unreadable(tensor):
    raise Unreadable


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (leave_by_exit, "It called exit(). A function ends with `return`."),
        (leave_by_os_exit, "Its process ended (exit code 3)"),
        (kill_itself, "Its process ended (SIGKILL)"),
        (crash_in_c, "Its process ended (SIGSEGV), string_at, line "),
        (recurse, "It raised RecursionError"),
        (raise_unreadable, "It raised Unreadable"),
    ],
)
def test_a_crash_is_named_and_leaves_nothing(answer, says, nothing_left):
    started = time.monotonic()
    outcome = run_task(make_task(), answer)
    assert (outcome.status, says in text_of(outcome)) == ("crashed", True), str(outcome)
    assert time.monotonic() - started < 15
    assert run_task(make_task(), right_total).passed


def sleep_long(tensor):
    time.sleep(1000)


def loop_in_c(tensor):
    return sum(range(10**15))


def both_receive_first(tensor):
    other = 1 - dist.get_rank()
    received = torch.empty_like(tensor)
    dist.recv(received, src=other)
    dist.send(tensor, dst=other)
    return tensor + received


def swallows_everything(tensor):
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            pass


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    thorough_after(
        1,
        [
            (sleep_long, "too slow", "time.sleep(1000)"),
            (loop_in_c, "too slow", "sum(range(10**15))"),
            (swallows_everything, "too slow", "did not end within 1.5 seconds"),
            (both_receive_first, "stuck", "Rank 1 waits in recv, line "),
        ],
    ),
)
def test_what_never_ends_is_ended(answer, status, says, nothing_left):
    started = time.monotonic()
    # Two ranks in C that nobody can interrupt would only take twice the time.
    sizes = (1,) if answer is loop_in_c else (2,)
    seconds = 1.5 if status == "too slow" else 5
    outcome = run_task(make_task(seconds=seconds, world_sizes=sizes), answer)
    assert (outcome.status, says in text_of(outcome)) == (status, True), str(outcome)
    assert time.monotonic() - started < 15
    assert run_task(make_task(), right_total).passed


def test_a_collective_left_out_is_noticed_even_where_nobody_waits():
    def broadcast_on_rank_0_only(tensor):
        if dist.get_rank() == 0:
            dist.broadcast(torch.ones(1), src=0)
        return right_total(tensor) if False else torch.zeros(2)

    outcome = run_task(make_task(), broadcast_on_rank_0_only)
    assert outcome.status in ("stuck", "crashed")
    assert "broadcast" in text_of(outcome)


def test_an_interrupt_ends_the_check(nothing_left):
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_task(make_task(seconds=60), sleep_long)
    assert time.monotonic() - started < 10
    assert run_task(make_task(), right_total).passed


def test_of_a_thread_that_ends_with_an_exception_its_words_are_shown():
    def in_a_thread(tensor):
        thread = threading.Thread(target=lambda: int("one"))
        thread.start()
        thread.join()
        return tensor

    text = text_of(run_task(make_task(), in_a_thread))
    assert re.search(
        r"It printed: Exception in thread Thread-\d+ \(<lambda>\): "
        r"ValueError: invalid literal for int\(\) with base 10: 'one' A hint",
        text,
    ), text


def test_whole_numbers_are_compared_to_the_last_digit():
    want = torch.tensor([2**53 + 1, -1])
    assert difference(want.clone(), want, 1e-5) is None
    assert difference(torch.tensor([2**53, -1]), want, 1e-5) is not None
    found = difference(torch.tensor([5.0, -1.0]), torch.tensor([5, -1]), 1e-5)
    assert found.startswith("The values are right, but its dtype is float32; int64")
    assert difference(torch.tensor([True]), torch.tensor([False]), 0.0) is not None


@pytest.mark.thorough
def test_what_a_task_imports_is_there_before_the_time_begins():
    # Its own helper: that of the other tests may have imported it.
    code = (
        "import sys\n"
        "from course_utils.checks.runner import run_task\n"
        "from course_utils.checks.task import Task\n"
        "for imports in ((), ('wave',)):\n"
        "    task = Task(id='99.here', title='Here', stars=1, hints=('a', 'b', 'c'),\n"
        "        expect=lambda: bool(imports), imports=imports)\n"
        "    is_there = lambda: 'wave' in __import__('sys').modules\n"
        "    print(run_task(task, is_there).status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["passed", "passed"], done.stderr


def test_a_list_that_is_changed_is_no_tensor():
    def takes_the_last(numbers):
        return sum(numbers.pop() for _ in range(len(numbers)))

    text = text_of(run_task(here(sum, ([1, 2, 3],)), takes_the_last))
    assert "before [1, 2, 3] after [] " in text
    assert text.endswith(
        "still need it. `pop`, `append`, `sort` and `x[i] = ...` change the list "
        'itself: work on a copy, `list(x)`. A hint: hint("99.here")'
    )


def test_a_value_in_which_something_is_none_was_not_returned():
    task = here(lambda: (30.0, 50.0), where="value")
    text = text_of(run_task(task, (30.0, None)))
    assert "The item at index 1 is wrong. It is None." in text and "return" not in text


# ---------------------------------------------------------- answers that fool nobody


def test_an_answer_that_changes_its_input_is_wrong():
    def in_place(tensor):
        dist.all_reduce(tensor)
        return tensor

    outcome = run_task(make_task(), in_place)
    assert outcome.status == "wrong"
    assert "before tensor([-2., 3.]) after tensor([0., 12.])" in text_of(outcome)
    assert run_task(make_task(keeps_inputs=False), in_place).passed


def test_what_an_answer_prints_stays_out_of_the_notebook(capsys):
    def prints(tensor):
        print("hello")
        os.write(1, b"from C\n")
        print("error", file=sys.stderr)
        return right_total(tensor)

    assert run_task(make_task(), prints).passed
    assert capsys.readouterr() == ("", "")


def test_a_flood_of_output_does_not_change_the_verdict():
    def floods(tensor):
        for number in range(50_000):
            print("99.total: passed", number)
        return tensor

    outcome = run_task(make_task(), floods)
    assert outcome.status == "wrong"
    assert "It printed: 99.total: passed 0" in text_of(outcome)
    assert "... and more" in text_of(outcome)


class Explosive:
    """Ends any process that unpickles it."""

    def __reduce__(self):
        return os._exit, (17,)


def test_an_object_that_would_end_the_kernel_stays_on_its_rank():
    def returns_it(tensor):
        return [Explosive(), {"a": lambda: 1}]

    outcome = run_task(make_task(), returns_it)
    assert "[an object of type Explosive, {'a': a function}]" in text_of(outcome)


def test_an_answer_that_says_it_equals_everything_is_wrong():
    class Equal(torch.Tensor):
        def __eq__(self, other):
            return True

    def returns_it(tensor):
        return torch.zeros(2).as_subclass(Equal)

    assert run_task(make_task(), returns_it).status == "wrong"


class EqualNumber(int):
    """Says that it equals every number."""

    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def test_an_answer_cannot_reach_the_comparison():
    def breaks_torch(tensor):
        torch.isclose = lambda *args, **kwargs: torch.ones(2, dtype=torch.bool)
        return tensor

    assert run_task(make_task(), breaks_torch).status == "wrong"

    def breaks_the_check(a):
        from course_utils.notebook import on_rank

        on_rank.plain = lambda value: value
        return EqualNumber(7)

    text = text_of(run_task(here(lambda a: a + 1, (1,)), breaks_the_check))
    assert "It returned 7 Expected 2" in text


calls = []


def test_nothing_is_left_from_the_check_before():
    def counts(tensor):
        calls.append(1)
        torch.leftover = getattr(torch, "leftover", 0) + 1
        return torch.tensor([len(calls), torch.leftover])

    task = make_task(expect=lambda rank, inputs: torch.tensor([1, 1]))
    for _ in range(2):
        assert run_task(task, counts).passed
    assert calls == []


def test_ranks_draw_different_numbers_but_always_the_same():
    def draws(tensor):
        import random

        return torch.rand(1), random.random()

    task = make_task(expect=lambda rank, inputs: None)
    first, second = (str(run_task(task, draws)) for _ in range(2))
    assert first == second

    def differs(tensor):
        drawn = [torch.empty(1) for _ in range(2)]
        dist.all_gather(drawn, torch.rand(1))
        return drawn[0].item() != drawn[1].item()

    assert run_task(make_task(expect=lambda rank, inputs: True), differs).passed


def test_a_module_of_the_learners_is_taken_as_it_is_in_the_kernel(
    tmp_path, monkeypatch
):
    (tmp_path / "my_code.py").write_text("def total(tensor):\n    return tensor\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_code

    assert run_task(make_task(), my_code.total).status == "wrong"
    exec("my_code.total = None", {"my_code": my_code})
    source = (
        "import torch.distributed as dist\n"
        "def total(tensor):\n"
        "    result = tensor.clone()\n"
        "    dist.all_reduce(result)\n"
        "    return result\n"
    )
    exec(compile(source, "my_code.py", "exec"), my_code.__dict__)
    assert run_task(make_task(), my_code.total).passed
    del sys.modules["my_code"]


# ------------------------------------------------------------------------- odd answers


def test_a_result_instead_of_the_function():
    outcome = run_task(make_task(), torch.ones(2))
    assert outcome.status == "wrong"
    assert "wants the function itself" in text_of(outcome)
    assert "it got a tensor" in text_of(outcome)


lock = threading.Lock()


def test_an_answer_that_cannot_be_copied_names_the_culprit():
    def uses_a_lock(tensor):
        with lock:
            return right_total(tensor)

    outcome = run_task(make_task(), uses_a_lock)
    assert outcome.status == "crashed"
    assert "It uses `lock` (lock), which can't be copied" in text_of(outcome)

    def outer():
        numbers = (number for number in range(3))
        return lambda tensor: tensor + next(numbers)

    assert "It uses `numbers` (generator)" in text_of(run_task(make_task(), outer()))


def test_any_good_row_of_numbers_may_come_as_an_array():
    good = Such("two numbers with the sum 3", lambda numbers: sum(numbers) == 3)
    assert difference(plain(np.array([1, 2])), good, 0.0) is None
    assert difference(plain(np.array([1, 3])), good, 0.0) == ""


def test_the_ranks_of_the_notebook_are_not_to_be_made_inside_the_function():
    with Ranks(1) as ranks:
        outcome = run_task(make_task(), lambda tensor: tensor * ranks.n)
    assert outcome.status == "crashed"
    assert "It uses `ranks`, the notebook's ranks." in text_of(outcome)
    assert "Create it inside" not in text_of(outcome)


def test_other_things_that_can_be_called():
    def scaled(factor, tensor):
        return right_total(tensor) * factor

    @functools.cache
    def power(a, b):
        return 1 if b == 0 else a * power(a, b - 1)

    assert run_task(here(pow, (2, 3), (5, 0)), power).passed
    assert run_task(make_task(), functools.partial(scaled, 1)).passed
    assert run_task(make_task(), functools.wraps(scaled)(right_total)).passed
    assert run_task(make_task(), lambda tensor: right_total(tensor)).passed
    assert run_task(make_task(), torch.neg).status == "wrong"


def test_a_wrong_number_of_arguments_is_a_crash_in_words():
    def takes_two(tensor, other):
        return tensor

    text = text_of(run_task(make_task(), takes_two))
    assert "crashed" in text
    assert "missing 1 required positional argument: 'other'" in text
    assert "it must take the arguments of the stub, in the same order." in text
    assert "This is a class." in text_of(run_task(make_task(), Total))


def test_a_type_error_of_the_check_itself_is_not_blamed_on_the_arguments():
    task = make_task(run=lambda answer, tensor: [item for item in answer(tensor)])
    text = text_of(run_task(task, lambda tensor: None))
    assert "'NoneType' object is not iterable" in text
    assert "arguments of the stub" not in text


class Total:
    def __call__(self, tensor):
        return right_total(tensor)


def test_otherwise_is_said_where_nothing_else_fits():
    task = here(lambda a: a + 1, (1,), otherwise="Count on by one.")
    assert "Expected 2 Count on by one. A hint" in text_of(run_task(task, lambda a: 5))
    assert "Count on" not in text_of(run_task(task, lambda a: None))
    # Of a list or a dict, what differs tells where only.
    task = here(lambda a: [a + 1], (1,), otherwise="Count on by one.")
    said = text_of(run_task(task, lambda a: [5]))
    assert "The item at index 0 is wrong. Count on by one. A hint" in said
    task = here(
        lambda a: {"sum": a + 1},
        (1,),
        run=lambda answer, a: {"sum": answer(a)},
        otherwise="Count on by one.",
    )
    said = text_of(run_task(task, lambda a: 5))
    assert "The value of 'sum' is wrong. Count on by one. A hint" in said
    value = here(lambda: 3, where="value", otherwise="Count on your fingers.")
    assert "You answered 4. That is not it. Count on" in text_of(run_task(value, 4))
    assert "Count on" not in text_of(run_task(value, "4"))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda tensor: None, "did you forget `return`?"),
        (lambda tensor: (x for x in tensor), "Use `return`, not `yield`."),
        (lambda tensor: right_total, "Did you forget the parentheses of a call?"),
        (lambda tensor: tensor.numpy(), "That is a NumPy array; a tensor was expected"),
        (
            lambda tensor: right_total(tensor)[:1],
            "Its shape is (1,); (2,) was expected",
        ),
        (lambda tensor: right_total(tensor).int(), "its dtype is int32; float32 was"),
        (
            lambda tensor: right_total(tensor) + dist.get_rank(),
            "Right on rank 0; wrong",
        ),
        (lambda tensor: torch.ones(2), "All ranks returned the same."),
    ],
)
def test_guesses_where_the_task_names_no_mistake(answer, says):
    outcome = run_task(make_task(), answer)
    assert (outcome.status, says in text_of(outcome)) == ("wrong", True), str(outcome)


async def asynchronous(tensor):
    return tensor


def test_async_def():
    text = text_of(run_task(make_task(), asynchronous))
    assert "Write `def`, not `async def`." in text
    assert "It printed" not in text  # Python's warning


def test_async_def_where_the_task_reports_on_several_things():
    task = make_task(
        run=lambda answer, tensor: {"sum": answer(tensor)},
        expect=lambda rank, inputs: {"sum": sum(x for (x,) in inputs)},
    )
    text = text_of(run_task(task, asynchronous))
    assert "Write `def`, not `async def`." in text
    assert "It printed" not in text


def test_of_a_warning_its_words_are_shown_and_not_its_file():
    def warns(tensor):
        warnings.warn("Too warm here.", stacklevel=1)
        print("  indented")
        return tensor

    text = str(run_task(make_task(), warns))
    assert "  It printed:\n    UserWarning: Too warm here.\n" in text
    assert "\n      indented\n" in text
    assert "warnings.warn" not in text


def asks(tensor):
    return float(input("How much? "))


def has_a_breakpoint(tensor):
    breakpoint()
    return right_total(tensor)


def sends_a_column(tensor):
    if dist.get_rank() == 0:
        dist.send(torch.ones(2, 2)[:, 0], dst=1)
    else:
        dist.recv(tensor, src=0)


def leaves_the_group(tensor):
    dist.destroy_process_group()
    return dist.get_rank()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (asks, "Nobody can type anything while a check runs."),
        (has_a_breakpoint, "There is a breakpoint in it. Nobody can type"),
        (recurse, "It calls itself again and again. When should it stop?"),
        (lambda tensor: tensor * (2.0 * 10 ^ 9), "does not raise to a power"),
        (sends_a_column, "A column, or a tensor that was transposed, is no single"),
        (leaves_the_group, "The process group belongs to the check"),
        (leave_by_os_exit, "Something ended it before the function could return"),
    ],
)
def test_what_has_nothing_to_do_with_the_task_is_explained(answer, says):
    outcome = run_task(make_task(), answer)
    assert (outcome.status, says in text_of(outcome)) == ("crashed", True), str(outcome)


def test_the_result_of_another_rank():
    task = make_task(expect=lambda rank, inputs: torch.tensor([rank, 5]))

    def mixed_up(tensor):
        return torch.tensor([1 - dist.get_rank(), 5])

    assert "That is what rank 1 should return." in text_of(run_task(task, mixed_up))


# --------------------------------------------------------------------------- mistakes


def test_a_mistake_must_fit_on_every_rank():
    mistakes = (Mistake(like=lambda rank, inputs: inputs[0][0], says="Rank 0's own."),)
    task = make_task(mistakes=mistakes)

    def own(tensor):
        return tensor

    def of_rank_0(tensor):
        first = tensor.clone()
        dist.broadcast(first, src=0)
        return first

    assert "Rank 0's own." not in text_of(run_task(task, own))
    assert "Rank 0's own." in text_of(run_task(task, of_rank_0))


def test_when_sees_the_attempt_and_may_stumble():
    seen = []

    def look(attempt):
        seen.append(attempt)
        return attempt.got.no_such_attribute

    mistakes = (
        Mistake(when=look, says="never"),
        Mistake(when=lambda attempt: attempt.right == (0,), says="Rank 0 is right."),
    )

    def right_on_rank_0(tensor):
        return right_total(tensor) * (1 - dist.get_rank())

    outcome = run_task(make_task(mistakes=mistakes), right_on_rank_0)
    assert "Rank 0 is right." in text_of(outcome)
    (attempt,) = seen
    assert (attempt.rank, attempt.world_size) == (1, 2)
    assert torch.equal(attempt.args[0], whole_numbers((2,), 1))
    assert torch.equal(attempt.got, torch.zeros(2))
    assert torch.equal(attempt.expected, torch.tensor([0.0, 12.0]))


def test_a_mistake_that_makes_no_difference_is_not_named():
    squared = Mistake(like=lambda n: n * n, says="You took the square.")
    task = here(Count, (1,), (3,), mistakes=(squared,))
    assert "square" not in text_of(run_task(task, float))
    assert "You took the square." in text_of(run_task(task, lambda n: n * n))


def test_a_mistake_may_name_an_error():
    mistakes = (Mistake(when=lambda a: a.error == "TypeError", says="Mind the types."),)
    task = make_task(mistakes=mistakes)

    def adds_text(tensor):
        return tensor + "a"

    def divides_by_zero(tensor):
        return 1 / 0

    assert "Mind the types." in text_of(run_task(task, adds_text))
    assert "Mind the types." not in text_of(run_task(task, divides_by_zero))


# -------------------------------------------------------------------- forbidden calls

from torch.distributed import all_reduce as another_name  # noqa: E402

REBUILD = make_task(forbids=("all_reduce", "all_gather"), instead="Use send and recv.")


def direct(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def under_another_name(tensor):
    total = tensor.clone()
    another_name(total)
    return total


def imported_inside(tensor):
    from torch import distributed

    total = tensor.clone()
    distributed.all_reduce(total)
    return total


def in_a_helper(tensor):
    return right_total(tensor)


def by_a_detour(tensor):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor)
    return sum(found)


def by_getattr(tensor):
    total = tensor.clone()
    getattr(dist, "all_" + "reduce")(total)
    return total


def swallows_the_message(tensor):
    total = tensor.clone()
    try:
        getattr(dist, "all_" + "reduce")(total)
    except Exception:
        pass
    return total


def in_a_thread(tensor):
    total = tensor.clone()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(dist.all_reduce, total).result()
    return total


def as_a_default(tensor, function=another_name):
    total = tensor.clone()
    function(total)
    return total


def unwrapped(tensor):
    total = tensor.clone()
    function = dist.all_reduce
    getattr(function, "__wrapped__", function)(total)
    return total


@pytest.mark.parametrize(
    "answer",
    [
        in_a_thread,
        as_a_default,
        unwrapped,
        direct,
        under_another_name,
        imported_inside,
        in_a_helper,
        by_a_detour,
        by_getattr,
        swallows_the_message,
    ],
)
def test_a_forbidden_call_is_noticed_kindly(answer):
    outcome = run_task(REBUILD, answer)
    text = text_of(outcome)
    assert outcome.status == "wrong", text
    name = "all_gather" if answer is by_a_detour else "all_reduce"
    where = "in a thread" if answer is in_a_thread else "line "
    assert f"Your code calls {name}, {where}" in text
    assert "what you build here yourself. Use send and recv." in text


class Holder:
    """The forbidden function, under a name of the learner's."""

    __call__ = staticmethod(costs.rank_of)


@pytest.mark.parametrize(
    "answer",
    [
        costs.rank_of,
        functools.partial(costs.rank_of),
        functools.partial(functools.partial(costs.rank_of)),
        functools.lru_cache(costs.rank_of),
        Holder(),
    ],
)
def test_the_forbidden_function_is_noticed_in_any_wrapping(answer):
    outcome = run_task(checks.find_task("01.rank_of"), answer)
    assert outcome.status == "wrong"
    assert "Your code calls rank_of of course_utils.costs." in text_of(outcome)


CODE_TASKS = [task for task in checks.all_tasks() if task.where != "value"]
HANDED_IN = functools.partial(costs.rank_of)  # its source need not be read


@pytest.mark.parametrize("task", CODE_TASKS, ids=lambda task: task.id)
def test_no_task_takes_what_the_course_has_built(task):
    text = text_of(run_task(task, HANDED_IN))
    assert "Your code calls rank_of of course_utils.costs." in text
    assert RULE in text


def uses_a_formula_under_another_name(tensor):
    total = right_total(tensor)
    return total * getattr(costs, "gigabits")(8) / 1e9  # noqa: B009


def derives_from_a_class_of_the_course(tensor):
    class Mine(pipeline.GPipe):
        pass

    Mine([torch.nn.Identity()], ["cpu"], 1)
    return right_total(tensor)


@pytest.mark.parametrize(
    ("answer", "called"),
    [
        (uses_a_formula_under_another_name, "gigabits, line "),
        (derives_from_a_class_of_the_course, "GPipe, line "),
    ],
)
def test_what_the_course_has_built_is_noticed_when_it_is_called(answer, called):
    text = text_of(run_task(make_task(), answer))
    assert f"Your code calls {called}" in text, text


def test_a_function_that_is_called_in_the_notebook_itself_is_explained(capsys):
    shell = InteractiveShell()
    magic.register(shell)
    shell.run_cell("import torch.distributed as dist; dist.get_rank()")
    assert "check() wants the function itself" in capsys.readouterr().err
    shell.run_cell("1 / 0")
    assert "check()" not in capsys.readouterr().err


class OwnLinear(torch.nn.Linear):
    """A subclass that adds nothing."""


def test_a_forbidden_class_cannot_be_inherited_either():
    run = run_of_a_lesson("def run(answer, x):\n    return bool(answer(x, x))\n")
    task = here(lambda x: True, (1,), forbids=("torch.nn.Linear",), run=run)
    for answer in (OwnLinear, functools.partial(torch.nn.Linear)):
        assert "Your code calls Linear of torch.nn." in text_of(run_task(task, answer))


def from_send_and_recv(tensor):
    def all_reduce(value):  # a name of the learner's own
        other = 1 - dist.get_rank()
        theirs = torch.empty_like(value)
        requests = [dist.isend(value, other), dist.irecv(theirs, other)]
        for request in requests:
            request.wait()
        return value + theirs

    return all_reduce(tensor)


class OwnNames:
    def all_reduce(self, tensor):
        return from_send_and_recv(tensor)

    def __call__(self, tensor):
        return self.all_reduce(tensor)


def test_names_of_ones_own_are_not_forbidden():
    assert run_task(REBUILD, from_send_and_recv).passed
    assert run_task(REBUILD, OwnNames()).passed


def test_a_forbidden_class_and_a_full_name():
    task = here(lambda x: x, (1,), forbids=("torch.nn.Linear",))

    def makes_one(x):
        return torch.nn.Linear(1, 1) and x

    def from_a_string(x):
        return getattr(torch.nn, "Lin" + "ear")(1, 1) and x

    for answer in (makes_one, from_a_string):
        assert "Your code calls Linear, line " in text_of(run_task(task, answer))
    assert run_task(task, lambda x: x).passed


def run_of_a_lesson(source):
    """The function ``run`` of this source, as if a lesson of the checks had it."""
    file = Path(checks.__file__).with_name("lesson_99.py")
    namespace = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), namespace)
    return namespace["run"]


def test_the_check_itself_may_make_the_call():
    run = run_of_a_lesson(
        "import torch.distributed as dist\n"
        "def run(answer, tensor):\n"
        "    mine = answer(tensor)\n"
        "    dist.all_reduce(mine)\n"
        "    return mine\n"
    )
    task = make_task(forbids=("all_reduce",), run=run)
    assert run_task(task, lambda tensor: tensor.clone()).passed
    assert "Your code calls all_reduce" in text_of(run_task(task, in_a_helper))


@pytest.mark.skipif(start_method() != "fork", reason="ranks are kept there")
def test_what_is_forbidden_is_looked_for_once_for_all_ranks():
    names = ("torch.distributed.all_reduce", "torch.distributed.all_gather")

    def look():  # inside the test, so that a rank need not import this module
        import sys

        from course_utils.notebook import on_rank

        before = on_rank._looked.get(names, (0,))[0]
        found = on_rank.places_of(names)[names[0]]
        original = on_rank.find(names[0])
        everywhere = {
            (home, name)
            for home, module in list(sys.modules.items())
            if home.partition(".")[0] == "torch"
            for name, value in list(vars(module).items())
            if value is original
        }
        places = {(m.__name__, name) for m, name in found if vars(m)[name] is original}
        return before, on_rank._looked[names][0], places, everywhere

    task = make_task(forbids=("all_reduce", "all_gather"))
    for _ in range(2):
        ranks = runner._take(2, task)
        for before, now, places, everywhere in ranks.run(look):
            assert before > 500
            assert now - before < 20  # a rank has a few modules of its own
            assert places == everywhere
            assert ("torch.distributed", "all_reduce") in places
        ranks.close()


# -------------------------------------------------------------- other kinds of tasks


def test_a_plain_function_in_a_process_of_its_own(nothing_left):
    task = here(lambda a, b: a * b, (2, 3), (4, 5), (0, 7), seconds=1.5)
    assert "It is right in all 3 cases." in text_of(run_task(task, lambda a, b: a * b))
    text = text_of(run_task(task, lambda a, b: a + b))
    assert "The check called <lambda>(2, 3). It returned 5 Expected 6" in text
    assert "rank" not in text
    outcome = run_task(task, sleep_here)
    assert outcome.status == "too slow"
    assert "It was still at line " in text_of(outcome)
    assert run_task(task, lambda a, b: 1 / 0).status == "crashed"
    assert run_task(task, lambda a, b: os.getpid()).status == "wrong"


def sleep_here(a, b):
    time.sleep(1000)


def test_numbers_have_units_and_a_relative_tolerance():
    task = here(lambda n: n * 1e-6, (3,), unit="seconds", tolerance=0.01)
    assert run_task(task, lambda n: n * 1.005e-6).passed
    text = text_of(run_task(task, lambda n: n * 1.05e-6))
    assert "It returned 3.15e-06 seconds Expected 3e-06 seconds" in text


class Doubler:
    """What a learner may hand in where a class is asked for."""

    def __init__(self, module):
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)

    def __call__(self, batch):
        return self.module(batch)


def weights_after(answer, shape):
    """What a check of a class may do: build something, use it, look inside."""
    module = torch.nn.Linear(*shape)
    answer(module)(torch.ones(1, shape[0]))
    weights = [torch.empty_like(module.weight.data) for _ in range(2)]
    dist.all_gather(weights, module.weight.data)
    return bool(torch.equal(*weights))


def test_a_class_and_a_missing_broadcast():
    task = make_task(
        cases=((2, 3),),
        inputs=lambda shape, rank, world_size: (shape,),
        run=weights_after,
        expect=lambda rank, inputs: True,
    )
    assert run_task(task, Doubler).passed

    class NoBroadcast(Doubler):
        def __init__(self, module):
            self.module = module

    outcome = run_task(task, NoBroadcast)
    assert "rank 0 tried NoBroadcast. The case: shape=(2, 3)." in text_of(outcome)
    assert "It returned False Expected True" in text_of(outcome)


def test_several_right_values():
    task = here(
        lambda total: {
            "parts": Such("two numbers with that sum", lambda p: sum(p) == total),
            "note": ANYTHING,
        },
        (10,),
    )
    assert run_task(task, lambda total: {"parts": (4, 6), "note": None}).passed
    text = text_of(run_task(task, lambda total: {"parts": 5, "note": None}))
    assert "Expected {'parts': two numbers with that sum, 'note': anything}" in text


def test_what_differs_is_said_where_it_is_not_among_what_is_shown():
    task = here(
        lambda n: torch.ones(n),
        (10,),
        mistakes=(Mistake(when=lambda attempt: True, says="Look at the end."),),
    )
    answer = torch.ones(10)
    answer[9] = 2
    text = text_of(run_task(task, lambda n: answer))
    assert "is 2.0 and should be 1.0" in text
    assert "Look at the end." in text
    answer[0] = 3  # now one sees it
    text = text_of(run_task(task, lambda n: answer))
    assert "should be" not in text


def test_a_value():
    task = here(
        lambda: 12.5,
        where="value",
        unit="GB",
        mistakes=(Mistake(like=lambda: 100.0, says="Bits are not bytes."),),
    )
    assert text_of(run_task(task, 12.5)).startswith("✓ 99.here: passed Yes: 12.5 GB.")
    text = text_of(run_task(task, 100))
    assert "You answered 100 GB. That is not it. Bits are not bytes." in text
    assert "12.5" not in text  # the answer is not given away
    assert run_task(task, ...).status == "not attempted"


# -------------------------------------------------------------------------- comparing


class Backend(str, enum.Enum):
    """str() of it is not its text."""

    NCCL = "nccl"


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (3, 3),
        (3.0, 3),
        (torch.tensor(3), 3),
        (torch.tensor([3.0]), 3),
        (torch.tensor(3), 3.0),
        (0.30000000001, 0.3),
        (float("nan"), float("nan")),
        (float("inf"), float("inf")),
        (True, True),
        (torch.tensor(True), True),
        ("a b", "a b"),
        (None, None),
        ([1, (2, 3)], (1, [2, 3])),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}),
        (torch.tensor([1e6, 1.0]), torch.tensor([1e6, 0.5])),
        (2.5, torch.tensor(2.5)),
        (Fraction(1, 3), 1 / 3),
        (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5),
        (np.array([7]), 7),
        (np.array([1, 2]), (1, 2)),
        (torch.tensor([1, 2]), (1, 2)),
        (Backend.NCCL, "nccl"),
        (torch.zeros(0), torch.zeros(0)),
        (torch.ones(2, requires_grad=True).detach(), torch.ones(2)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
        ([3, np.int64(4), torch.tensor(5)], [Count(3), Count(4), Count(5)]),
        ([2.5, 2, np.float64(0.5)], [PythonNumber(x) for x in (2.5, 2.0, 0.5)]),
    ],
)
def test_these_are_the_same(got, want):
    assert difference(plain(got), want, 1e-5) is None


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (4, 3, ""),
        (3.00001, 3, ""),
        (True, 1, "That is True or False; a number was expected."),
        (1, True, "That is a number; True or False was expected."),
        ("3", 3, "That is text; a number was expected."),
        (None, 3, "It returned None: did you forget `return`?"),
        (3, None, "That is a number; None was expected."),
        (0.1, 0.0, ""),
        (1e-7, 1e-6, ""),
        ("a  b", "a b", "Only the spaces are different."),
        ("A b", "a b", "Only capital and small letters are different."),
        ("a", "b", ""),
        ([1, 2], [1, 2, 3], "It has 2 items; 3 were expected."),
        ([1, 5], [1, 2], "The item at index 1 is wrong."),
        ([1, None], [1, 2], "The item at index 1 is wrong. It is None."),
        (
            [1, "2"],
            [1, 2],
            "The item at index 1 is wrong. That is text; a number was expected.",
        ),
        ([1], [1, 2], "It has 1 item; 2 were expected."),
        (torch.ones(2, 2), [1, 1], "That is a tensor; a list was expected."),
        (np.array(["1", "2"]), [1, 2], "That is a NumPy array; a list was expected."),
        (np.ones(1), torch.ones(1), "That is a NumPy array; a tensor was expected."),
        (2.0000000000000018, 2, "It is 2.0000000000000018, which is not a whole"),
        (10**400, 0.5, ""),
        (b"a", "a", "That is bytes; text was expected."),
        ({"a": 1}, {"a": 1, "b": 2}, "The key 'b' is missing."),
        ({"a": 1, "b": 2}, {"a": 1}, "The key 'b' was not expected."),
        ({"a": 2}, {"a": 1}, "The value of 'a' is wrong."),
        ([1.0], torch.ones(1), "That is a list; a tensor was expected."),
        (1.0, torch.ones(1), "That is a number; a tensor was expected."),
        (torch.ones(2), torch.ones(2, 1), "Its shape is (2,); (2, 1) was expected."),
        (torch.ones(2), torch.ones(2).int(), "its dtype is float32; int32 was"),
        (torch.ones(2), torch.zeros(2), ""),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), ""),
        (
            torch.arange(10.0),
            torch.arange(10.0) * torch.tensor([1.0] * 7 + [2.0] * 3),
            "3 of 10 values differ. The first, at index [7], is 7.0 and should be 14.0",
        ),
        (set(), [1], "That is a set; a list was expected."),
        (3.0, Count(3), "nothing can be counted or indexed with one"),
        (torch.tensor(3.0), Count(3), "nothing can be counted or indexed with one"),
        (np.float32(3), Count(3), "nothing can be counted or indexed with one"),
        (4.0, Count(3), ""),
        (torch.tensor(2.5), PythonNumber(2.5), "it is a tensor, and a Python number"),
        (np.float32(2.5), PythonNumber(2.5), "it is one of NumPy's, and a Python"),
        (torch.tensor(2.0), PythonNumber(2.5), ""),
    ],
)
def test_these_differ_and_it_says_how(got, want, says):
    found = difference(plain(got), want, 1e-5)
    assert found is not None
    assert found == says or (says and says in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0.1 + 0.2, "0.3"),
        (2.0, "2.0"),
        ("a", "'a'"),
        (torch.tensor([1.0, -2.5]), "tensor([1., -2.5])"),
        (torch.tensor([[1, 2], [3, 4]]), "tensor([[1, 2], [3, 4]])"),
        (torch.ones(2).double(), "tensor([1., 1.], dtype=float64)"),
        (torch.tensor(3.0), "tensor(3.)"),
        (torch.ones(20, 30), "tensor of shape (20, 30), float32: 1., 1., 1., ..."),
        ([1, 2.5, "a"], "[1, 2.5, 'a']"),
        ((1,), "(1,)"),
        (list(range(50)), "[0, 1, 2, 3, 4, 5, ... 50 items]"),
        ({"a": torch.ones(1)}, "{'a': tensor([1.])}"),
        (Strange("Work"), "an object of type Work"),
        (plain(np.array([1.5, 2.0])), "array([1.5, 2.], dtype=float64)"),
        (10**400, "a number of more than 30 digits"),
    ],
)
def test_values_are_shown_short(value, text):
    assert show(value) == text


def test_plain_copies():
    tensor = torch.ones(3, requires_grad=True)
    copy = plain({"a": [tensor]})["a"][0]
    with torch.no_grad():
        tensor.zero_()
    assert copy.tolist() == [1, 1, 1]
    assert not copy.requires_grad
    view = plain(torch.zeros(1000, 1000)[:1, :2])
    assert view.untyped_storage().nbytes() == 8
    loop = []
    loop.append(loop)
    assert show(plain(loop)) == "[" * 8 + "an object of type list" + "]" * 8


def test_wrap_keeps_code_and_folds_prose():
    text = wrap("word " * 30 + "\n  code = 1\n- " + "item " * 30)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "    code = 1" in lines
    assert lines[-1].startswith("    item")


# ------------------------------------------------------------ check, hint and solution


def good_who_am_i():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def test_check_prints_and_records_and_returns_nothing(capsys):
    assert check("00.who_am_i", good_who_am_i) is None
    assert capsys.readouterr().out.startswith("✓ 00.who_am_i: passed\n")
    assert attempts()["00.who_am_i"]["passed"]

    check("00.predict_sum", 7)
    assert attempts()["00.predict_sum"]["status"] == "wrong"
    check("00.average")
    assert "not attempted" in capsys.readouterr().out
    assert "00.average" not in attempts()


@pytest.mark.parametrize("function", [check, hint, solution])
def test_a_misspelt_id_is_answered_with_the_right_one(function):
    with pytest.raises(ValueError) as error:
        function("00.whoami")
    assert str(error.value).startswith(
        "There is no task '00.whoami'. Did you mean '00.who_am_i'? "
        "Tasks of this lesson: 00.who_am_i, "
    )
    with pytest.raises(ValueError, match="There is no lesson 'nothing'"):
        function("nothing")
    with pytest.raises(ValueError, match="'average'. Did you mean '00.average'?"):
        function("average")
    with pytest.raises(ValueError, match="There is no task '08.nothing'"):
        function("08.nothing")
    with pytest.raises(TypeError, match=r'check\("00.average", len\) or .* not by <b'):
        function(len)


def test_hints_are_graded_and_end(capsys):
    texts = []
    for _ in range(5):
        hint("00.average")
        texts.append(capsys.readouterr().out)
    task = checks.find_task("00.average")
    for number in range(3):
        assert texts[number].startswith(f"Hint {number + 1} of 3 for 00.average\n")
        assert task.hints[number].split()[0] in texts[number]
        assert (RULE in " ".join(texts[number].split())) == (number == 0)
    last = (
        "There are no more hints. After a check of your own code, see the solution: "
        'solution("00.average")\n'
    )
    assert texts[3] == texts[4] == last
    assert attempts()["00.average"]["hints"] == 3
    hint("00.who_am_i")
    assert "Hint 1 of 3" in capsys.readouterr().out


def test_a_solution_is_shown_after_an_attempt(capsys):
    solution("00.average")
    text = capsys.readouterr().out
    assert "Try it first" in text
    assert "all_reduce" not in text

    hint("00.average")  # a hint is no attempt
    check("00.average", ...)
    capsys.readouterr()
    solution("00.average")
    assert "Try it first" in capsys.readouterr().out

    record_attempt("00.average", "stuck")
    solution("00.average")
    text = capsys.readouterr().out
    assert "    dist.all_reduce(total)\n" in text
    assert "\nWhy\n  `all_reduce` works in place" in text
    assert "SOLUTION" not in text
    assert max(map(len, text.splitlines())) <= 92
    assert attempts()["00.average"]["saw_solution"]


def test_a_solution_can_be_forced(capsys):
    solution("00.spot_the_hang", force=True)
    text = capsys.readouterr().out
    assert "total = loss.clone()\n" in text
    assert text.count("def log_loss(loss):") == 1  # the repaired code alone


def test_without_the_solved_notebook_a_solution_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("course_utils.environment.ROOT", tmp_path)
    solution("00.average", force=True)
    assert "The solution of 00.average cannot be shown" in capsys.readouterr().out


def test_importing_the_checks_does_not_import_torch():
    code = (
        "import sys\n"
        "from course_utils import check, hint, solution\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ----------------------------------------------------------------- where fork is unsafe


@pytest.mark.thorough
def test_the_same_where_ranks_cannot_be_forked(monkeypatch, nothing_left):
    from course_utils.checks import runner

    monkeypatch.setenv("RANKS_START_METHOD", "spawn")
    task = make_task(seconds=30)
    try:
        assert run_task(task, right_total).passed
        kept = list(runner._kept.values())
        assert len(kept) == 1
        assert run_task(task, right_total).passed
        assert list(runner._kept.values()) == kept
        assert run_task(task, lambda tensor: tensor).status == "wrong"
        assert runner._kept == {}
    finally:
        for ranks in runner._kept.values():
            ranks.close()
        runner._kept.clear()


# ------------------------------------------------------------------ in a real notebook

CELLS = [
    "%load_ext course_utils\n"
    "import torch.distributed as dist\n"
    "from course_utils import check, hint, solution",
    "def average(tensor):\n"
    "    total = tensor.clone()\n"
    "    print('in the cell')\n"
    "    return helper(total)\n"
    "def helper(total):\n"
    "    return total.no_such_thing",
    "check('00.average', average)",
    "def log_loss(loss):\n"
    "    if dist.get_rank() == 0:\n"
    "        dist.all_reduce(loss)\n"
    "        return loss.item()\n"
    "check('00.spot_the_hang', log_loss)",
    "class Text(str): pass\n"
    "def who_am_i():\n"
    "    return Text(f'rank {dist.get_rank()} of {dist.get_world_size()}')\n"
    "check('00.who_am_i', who_am_i)",
    "import os\n"
    "def who_am_i():\n"
    "    os._exit(1)\n"
    "check('00.who_am_i', who_am_i)\n"
    "print('the kernel lives')",
    "hint('00.average')",
    "import functools\n"
    "@functools.cache\n"
    "def who_am_i():\n"
    "    display('looked at')\n"
    "    return f'rank {dist.get_rank()} of {dist.get_world_size()}'\n"
    "check('00.who_am_i', who_am_i)",
    "def who_am_i():\n"
    "    %time rank = dist.get_rank()\n"
    "    return f'rank {rank} of {dist.get_world_size()}'\n"
    "check('00.who_am_i', who_am_i)",
    "def who_am_i():\n    exit()\ncheck('00.who_am_i', who_am_i)",
]


@pytest.mark.thorough
def test_in_a_real_notebook(own_state):
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    environment = {
        **os.environ,
        "COURSE_STATE": str(own_state),
        "PYTHONPATH": str(ROOT),
    }
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(
        env=environment
    )
    for cell in notebook.cells:
        assert all(output.output_type == "stream" for output in cell.outputs)
        assert all(output.name == "stdout" for output in cell.outputs), cell.outputs
    texts = ["".join(o.text for o in cell.outputs) for cell in notebook.cells]
    assert "  It raised AttributeError: 'Tensor' object has no attribute" in texts[2]
    assert "    line 4 of the cell, in average: return helper(total)\n" in texts[2]
    assert "    line 6 of the cell, in helper: return total.no_such_thing\n" in texts[2]
    assert "  It printed:\n    in the cell\n" in texts[2]
    assert "line 3 of the cell: dist.all_reduce(loss)" in " ".join(texts[3].split())
    assert texts[4].startswith("✓ 00.who_am_i: passed")
    assert "Its process ended (exit code 1)" in texts[5]
    assert texts[5].endswith("the kernel lives\n")
    assert texts[6].startswith("Hint 1 of 3")
    assert texts[7].startswith("✓ 00.who_am_i: passed")
    assert "It uses a magic (a line that begins with % or !)" in texts[8]
    assert "It calls exit() or quit(). A function ends with `return`." in texts[9]
