"""A check: every way in which an answer can go, and what is said of it.

How an answer that hangs, crashes or is killed ends stands in the table of faults.
"""

import concurrent.futures
import functools
import os
import re
import subprocess
import sys
import threading
import warnings

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from own_tasks import (
    TOTAL,
    here,
    of_the_notebook,
    own_solutions,  # noqa: F401
    total_task,
)

from course_utils import ROOT
from course_utils.from_scratch import pipeline
from course_utils.notebook import check as checks
from course_utils.notebook import ours, processes
from course_utils.notebook.check import check, hint, solution
from course_utils.notebook.judge import run_task
from course_utils.notebook.outcome import Outcome
from course_utils.notebook.progress import attempts, record_attempt
from course_utils.ranks import Ranks
from course_utils.tasks.inputs import whole_numbers
from course_utils.tasks.task import OUT_OF_STEP, RULE, AtMost, Miss
from course_utils.theory import costs

SUM = total_task(task_id="99.total")  # what our solution shows is remembered


@pytest.fixture(autouse=True)
def no_hints_seen(own_state, monkeypatch):
    monkeypatch.setattr(checks, "_hints_shown", {})


def text_of(outcome):
    """The outcome in one line, so that tests need not know where lines break."""
    return " ".join(str(outcome).split())


def right_total(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


# ---------------------------------------------------------------- the text, in full


def test_passed_reads_like_this():
    task = total_task(ranks=(3, 1, 2))
    assert str(run_task(task, right_total)) == (
        f"✓ {task.id}: passed\n"
        "  It is right on 1, 2 and 3 ranks.\n"
        f'  Compare it with ours: solution("{task.id}")'
    )


OWN = Miss(
    "dist.all_reduce(result)",
    "pass",
    "That is the rank's own tensor: the sum over the ranks is missing.",
)


def test_wrong_reads_like_this():
    def forgot_the_others(tensor):
        print("about to return")
        return tensor

    seven_times = Miss("return result", "return 7 * tensor", "Seven times.")
    task = total_task(misses=(seven_times, OWN))
    assert str(run_task(task, forgot_the_others)) == (
        f"✗ {task.id}: wrong\n"
        "  That is the rank's own tensor: the sum over the ranks is missing.\n"
        "  With 2 ranks, rank 0 called forgot_the_others(tensor([-2., 3.])).\n"
        "  It returned tensor([-2., 3.]), expected was tensor([0., 12.]).\n"
        "  It printed:\n"
        "    about to return\n"
        f'  A hint: hint("{task.id}")'
    )


def test_the_verdict_has_a_colour_where_it_can_be_seen(capsys):
    outcome = Outcome(total_task(), "passed", ("It is right.",))
    assert outcome.text(coloured=True).startswith("\x1b[1;32m✓ ")
    check("00.who_am_i")
    assert "\x1b" not in capsys.readouterr().out  # a file or a pipe


def observe_some(answer, kind, steps, rates, sizes):
    return {"steps made": answer(steps), "quiet": True}


def test_what_a_check_has_tried_is_said_with_names():
    """A number alone says nothing. A text describes what the check has made."""
    case = ("a network", 4, [0.5, None], {"rows of a batch": 8})
    task = here("def answer(n): return 16", case, observe=observe_some)
    text = text_of(run_task(task, lambda steps: steps))
    assert (
        "The check tried <lambda>. The case: a network, steps=4, rates=[0.5, None], "
        "rows of a batch: 8. steps made: 4. Expected: 16."
    ) in text


def test_crashed_shows_the_learners_lines_only():
    def helper(tensor):
        return tensor.view(3, 5)

    def crashes_on_rank_1(tensor):
        if dist.get_rank() == 1:
            return helper(tensor)
        return right_total(tensor)

    text = str(run_task(SUM, crashes_on_rank_1))
    assert "crashed\n  It raised RuntimeError: shape '[3, 5]' is invalid for" in text
    assert "rank 1 called crashes_on_rank_1(tensor([2., 9.])).\n" in text
    assert "in crashes_on_rank_1: return helper(tensor)\n" in text
    assert "in helper: return tensor.view(3, 5)\n" in text
    assert "course_utils" not in text
    assert "site-packages" not in text
    assert text.count("line ") == 2


def test_every_text_is_short_and_narrow():
    def prints_and_fails(tensor):
        for number in range(1000):
            print("x" * 300, number)
        raise ValueError("y" * 1000 + "\n" + "z\n" * 50)

    lines = str(run_task(SUM, prints_and_fails)).splitlines()
    assert len(lines) <= 14
    assert [len(line) > 80 for line in lines].count(True) <= 1  # a word of the learner


# --------------------------------------------------------------------- not attempted


def half_done(tensor):
    if dist.get_rank() == 1:
        raise NotImplementedError("Write your code here.")
    return right_total(tensor)


class UnsolvedBefore:
    def total(self, tensor):
        raise NotImplementedError("Write your code here.")


def calls_an_unsolved_one(tensor):
    return UnsolvedBefore().total(tensor)


def test_a_stub_is_not_attempted_and_that_of_an_earlier_task_is_named():
    for answer, says in (
        (half_done, "It still raises NotImplementedError, line "),
        (calls_an_unsolved_one, "UnsolvedBefore, which it calls, still raises"),
    ):
        outcome = run_task(SUM, answer)
        assert (outcome.status, says in text_of(outcome)) == ("not attempted", True)


def test_what_pytorch_has_not_implemented_is_a_crash():
    outcome = run_task(SUM, lambda tensor: torch.nn.Module()(tensor))
    assert outcome.status == "crashed"
    assert "NotImplementedError" in text_of(outcome)


# ------------------------------------------------------------------------- near misses


def test_a_near_miss_must_show_the_same_on_every_rank():
    of_rank_0 = Miss("dist.all_reduce(result)", "dist.broadcast(result, 0)", "0's own.")
    task = total_task(misses=(of_rank_0,))

    def first_ones(tensor):
        first = tensor.clone()
        dist.broadcast(first, src=0)
        return first

    assert "0's own." in text_of(run_task(task, first_ones))
    assert "0's own." not in text_of(run_task(task, lambda tensor: tensor))


def test_a_near_miss_must_fail_first_in_the_same_case():
    doubled = Miss("return n", "return n * n", "You took the square.")
    task = here("def answer(n): return n", (1,), (2,), (3,), misses=(doubled,))
    assert "square" in text_of(run_task(task, lambda n: n * n))
    # Right for 1 and 2, and then what the square is: something else went wrong.
    assert "square" not in text_of(run_task(task, lambda n: 9 if n == 3 else n))
    assert "square" not in text_of(run_task(task, lambda n: n + 1))


def observe_sum(answer, n):
    sum_, largest = answer(n)
    return {"the sum": sum_, "the largest": largest}


def test_a_near_miss_must_fail_first_in_the_same_observation():
    wrong_sum = Miss("range(n)", "range(n - 1)", "One is missing in the sum.")
    wrong_both = Miss("sum(range(n)), n - 1", "sum(range(n)), n", "One too far.")
    fields = {"observe": observe_sum, "misses": (wrong_sum, wrong_both)}
    code = "def answer(n): return sum(range(n)), n - 1"
    task = here(code, (5,), **fields, because={"the largest": "It begins at 0."})
    assert "One is missing" in text_of(run_task(task, lambda n: (6, 5)))
    assert "One too far." in text_of(run_task(task, lambda n: (10, n)))
    assert "It begins at 0." in text_of(run_task(task, lambda n: (10, 7)))


def test_a_near_miss_may_fail_with_the_same_error():
    adds_text = Miss("return result", "return result + 'a'", "Mind the types.")
    task = total_task(misses=(adds_text,))
    outcome = run_task(task, lambda tensor: tensor + "b")
    assert outcome.lines[0] == "Mind the types."
    outcome = run_task(task, lambda tensor: 1 / 0)
    assert outcome.lines[0] == "It raised ZeroDivisionError: division by zero"


def test_errors_are_named_by_a_part_of_their_text():
    def only_rank_1(tensor):
        if dist.get_rank() == 1:
            dist.all_reduce(tensor)
        return tensor

    errors = {"ZeroDivision": "By which number?", OUT_OF_STEP: "Which rank is missing?"}
    task = total_task(errors=errors)
    outcome = run_task(task, lambda tensor: 1 / 0)
    assert outcome.lines[0] == "By which number?"
    assert "It raised ZeroDivisionError: division by zero" in text_of(outcome)
    outcome = run_task(task, only_rank_1)
    assert (outcome.status, outcome.lines[0]) == ("stuck", "Which rank is missing?")


def observe_bytes(answer, n):
    value = answer(n)
    return {"bytes kept": AtMost(value)} if isinstance(value, int) else value


def test_at_most_may_be_less_and_what_cannot_be_looked_at_takes_its_place():
    observe_bytes.__module__ = "__main__"  # so that it is copied, not imported
    task = here("def answer(n): return n", (8,), observe=observe_bytes)
    assert run_task(task, lambda n: 4).passed
    text = text_of(run_task(task, lambda n: 9))
    assert "bytes kept: 9. At most 8 expected." in text
    assert "did you forget `return`?" in text_of(run_task(task, lambda n: None))
    assert "That is text, and not what" in text_of(run_task(task, str))


# -------------------------------------------------------- what is said without the task


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda tensor: (x for x in tensor), "Use `return`, not `yield`,"),
        (lambda tensor: right_total, "Did you forget the parentheses of a call?"),
        (lambda tensor: tensor + 0, "That is the argument, as it was given."),
        (lambda tensor: right_total(tensor) / 2, "It is 2 times too small"),
        (lambda tensor: right_total(tensor) * 4, "It is 4 times too large."),
        (lambda tensor: -right_total(tensor), "The sign is the other one."),
        (lambda tensor: right_total(tensor).flip(0), "numbers in another order"),
        (
            lambda tensor: right_total(tensor) * (1 - dist.get_rank()),
            "Only rank 0 has it, and every rank needs it",
        ),
        (
            lambda tensor: right_total(tensor) + dist.get_rank(),
            "Right on rank 0; wrong on rank 1.",
        ),
    ],
)
def test_what_a_difference_looks_like_is_said(answer, says):
    outcome = run_task(SUM, answer)
    assert (outcome.status, says in text_of(outcome)) == ("wrong", True), str(outcome)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (40 * 1024, "It is 1024 times too large."),
        (40 / 8, "It is 8 times too small."),
        (41, "That is one too many."),
        (120, "wrong Take it twice."),
    ],
)
def test_factors_are_recognized(given, says):
    task = here("def answer(n): return 2 * n", (20,), otherwise="Take it twice.")
    assert says in text_of(run_task(task, lambda n: given))


def test_otherwise_is_said_where_nothing_else_fits():
    task = here("def answer(a): return a + 3", (1,), otherwise="Count on by three.")
    outcome = run_task(task, lambda a: 9)
    assert outcome.lines[0] == "Count on by three."
    assert "Count on" not in text_of(run_task(task, lambda a: None))


def test_the_result_of_another_rank():
    task = total_task("def total(tensor): return tensor")
    text = text_of(run_task(task, lambda t: whole_numbers((2,), 1 - dist.get_rank())))
    assert "That is what rank 1 should have." in text


def test_what_differs_is_said_where_it_is_not_among_what_is_shown():
    code = "import torch\ndef answer(n): return torch.ones(n)"
    task = here(code, (10,), otherwise="Look at the end.")
    answer = torch.ones(10)
    answer[9] = 2
    text = text_of(run_task(task, lambda n: answer))
    assert "Look at the end." in text and "is 2.0 and should be 1.0" in text


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
        (lambda tensor: tensor * (2.0 * 10 ^ 9), "does not raise to a power"),
        (sends_a_column, "A column, or a tensor that was transposed, is no single"),
        (leaves_the_group, "The process group belongs to the check"),
    ],
)
def test_errors_that_have_nothing_to_do_with_the_task_are_explained(answer, says):
    outcome = run_task(SUM, answer)
    assert (outcome.status, says in text_of(outcome)) == ("crashed", True), str(outcome)


def polls(tensor):
    request = dist.isend(tensor, 1 - dist.get_rank())
    dist.recv(tensor.clone(), 1 - dist.get_rank())
    while not request.is_completed():
        pass


def one_by_one(tensor):
    while True:
        dist.all_reduce(tensor)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (polls, "is_completed() stays False until wait() has been called"),
        (one_by_one, "A few large ones take less time"),
    ],
)
def test_ranks_that_wait_for_nobody_are_told_why(answer, says):
    assert says in text_of(run_task(total_task(seconds=2), answer))


def test_of_threads_and_warnings_the_words_are_shown():
    def in_a_thread(tensor):
        thread = threading.Thread(target=lambda: int("one"))
        thread.start()
        thread.join()
        return tensor

    def warns(tensor):
        warnings.warn("Too warm here.", stacklevel=1)
        warnings.warn("It will be cold.", FutureWarning, stacklevel=1)
        return tensor

    assert re.search(
        r"It printed: Exception in thread Thread-\d+ \(<lambda>\): "
        r"ValueError: invalid literal for int\(\) with base 10: 'one' A hint",
        text_of(run_task(SUM, in_a_thread)),
    )
    text = str(run_task(SUM, warns))
    assert "  It printed:\n    UserWarning: Too warm here.\n" in text
    assert "warnings.warn" not in text and "It will be cold." not in text


# ---------------------------------------------------------- answers that fool nobody


def test_an_answer_that_changes_its_input_is_wrong():
    def in_place(tensor):
        dist.all_reduce(tensor)
        return tensor

    def takes_the_last(numbers):
        return sum(numbers.pop() for _ in range(len(numbers)))

    assert run_task(total_task(keeps_inputs=False), in_place).passed
    text = text_of(run_task(SUM, in_place))
    assert "before tensor([-2., 3.]) after tensor([0., 12.])" in text
    task = here("def answer(numbers): return sum(numbers)", ([1, 2, 3],))
    assert "work on a copy, `x.copy()`" in text_of(run_task(task, takes_the_last))


def test_what_an_answer_prints_stays_out_of_the_notebook(capsys):
    def prints(tensor):
        print("hello")
        os.write(1, b"from C\n")
        print("error", file=sys.stderr)
        return right_total(tensor)

    assert run_task(SUM, prints).passed
    assert capsys.readouterr() == ("", "")


class Explosive:
    """Ends any process that unpickles it."""

    def __reduce__(self):
        return os._exit, (17,)


def breaks_torch(tensor):
    torch.isclose = lambda *args, **kwargs: torch.ones(2, dtype=torch.bool)
    return tensor


def returns_what_explodes(tensor):
    return [Explosive(), {"a": lambda: 1}]


@pytest.mark.parametrize("answer", [breaks_torch, returns_what_explodes])
def test_an_answer_cannot_reach_the_comparison(answer):
    assert run_task(SUM, answer).status == "wrong"


def test_nothing_is_left_from_the_check_before():
    def leaves_something(n):
        torch.leftover = getattr(torch, "leftover", 0) + 1
        return torch.leftover

    task = here("def answer(n): return 1", (0,))
    for _ in range(2):
        assert run_task(task, leaves_something).passed


def test_ranks_draw_different_numbers_but_always_the_same():
    task = total_task("import torch\ndef total(tensor): return torch.rand(1)")

    def rank_0_draws(tensor):
        drawn = torch.rand(1)
        dist.broadcast(drawn, src=0)
        return drawn

    assert run_task(task, lambda tensor: torch.rand(1)).passed
    text = text_of(run_task(task, rank_0_draws))
    assert "Right on rank 0; wrong on rank 1." in text


def test_a_module_of_the_learners_is_taken_as_it_is_in_the_kernel(
    tmp_path, monkeypatch
):
    (tmp_path / "my_code.py").write_text("def total(tensor):\n    return tensor\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_code

    assert run_task(SUM, my_code.total).status == "wrong"
    exec("my_code.total = None", {"my_code": my_code})
    exec(compile(TOTAL, "my_code.py", "exec"), my_code.__dict__)
    assert run_task(SUM, my_code.total).passed
    del sys.modules["my_code"]


# ------------------------------------------------------------------------- odd answers


def test_ranks_of_the_notebook_cannot_be_used():
    with Ranks(1) as ranks:
        text = text_of(run_task(SUM, lambda tensor: tensor * ranks.n))
    assert "It uses `ranks`, the notebook's ranks." in text


def test_other_things_that_can_be_called():
    def scaled(factor, tensor):
        return right_total(tensor) * factor

    @functools.cache
    def power(a, b):
        return 1 if b == 0 else a * power(a, b - 1)

    task = here("def answer(a, b): return a**b", (2, 3), (5, 0))
    assert run_task(task, power).passed
    assert run_task(SUM, functools.partial(scaled, 1)).passed
    assert run_task(SUM, functools.wraps(scaled)(right_total)).passed
    assert run_task(SUM, torch.neg).status == "wrong"


def test_a_task_without_ranks_speaks_of_none():
    task = here("def answer(a, b): return a * b", (2, 3), (4, 5), (0, 7))
    assert "right in all 3 cases." in text_of(run_task(task, lambda a, b: a * b))
    text = text_of(run_task(task, lambda a, b: a + b))
    assert "The check called <lambda>(2, 3). It returned 5, expected was 6." in text
    assert "rank" not in text
    text = text_of(run_task(task, lambda a, b: dist.get_rank()))
    assert "There are no ranks in this task" in text


# -------------------------------------------------------------------- forbidden calls

from torch.distributed import all_reduce as another_name  # noqa: E402


def by_a_detour(tensor):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor)
    return sum(found)


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


REBUILT = """\
import torch
import torch.distributed as dist

def total(tensor):
    def all_reduce(value):  # a name of the learner's own
        other, theirs = 1 - dist.get_rank(), torch.empty_like(value)
        requests = [dist.isend(value, other), dist.irecv(theirs, other)]
        for request in requests:
            request.wait()
        return value + theirs

    return all_reduce(tensor)
"""


def rebuild_task():
    forbids = ("all_reduce", "all_gather")
    return total_task(REBUILT, forbids=forbids, instead="Use send and recv.")


@pytest.mark.parametrize(
    "answer",
    [
        in_a_thread,
        as_a_default,
        by_a_detour,
        swallows_the_message,
        dist.all_reduce,
        functools.partial(dist.all_reduce),
    ],
)
def test_a_forbidden_call_is_noticed_kindly(answer):
    outcome = run_task(rebuild_task(), answer)
    text = text_of(outcome)
    assert outcome.status == "wrong", text
    name = "all_gather" if answer is by_a_detour else "all_reduce"
    assert f"Your code calls {name}" in text
    assert "what you build here yourself. Use send and recv." in text
    assert RULE in text


def test_names_of_ones_own_are_not_forbidden():
    task = rebuild_task()
    assert run_task(task, cloudpickle.loads(ours.packed(task))).passed


def uses_a_formula_under_another_name(tensor):
    return right_total(tensor) * getattr(costs, "gigabits")(8) / 1e9  # noqa: B009


def derives_from_a_class_of_the_course(tensor):
    class Mine(pipeline.GPipe):
        pass

    Mine([torch.nn.Identity()], ["cpu"], 1)


@pytest.mark.parametrize(
    ("answer", "called"),
    [
        (uses_a_formula_under_another_name, "gigabits, line "),
        (derives_from_a_class_of_the_course, "GPipe, line "),
        (costs.rank_of, "rank_of of course_utils.theory.costs."),
        (functools.partial(costs.rank_of), "rank_of of course_utils.theory.costs."),
    ],
)
def test_what_the_course_has_built_is_noticed_in_any_wrapping(answer, called):
    text = text_of(run_task(SUM, answer))
    assert f"Your code calls {called}" in text, text


class OwnLinear(torch.nn.Linear):
    """A subclass that adds nothing."""


def test_a_forbidden_class_cannot_be_inherited_either():
    code = "def answer(a, b): return True"
    task = here(code, (1, 1), forbids=("torch.nn.Linear",))
    for answer in (OwnLinear, functools.partial(torch.nn.Linear)):
        assert "Your code calls Linear of torch.nn" in text_of(run_task(task, answer))


# ------------------------------------------------------------ check, hint and solution


def test_check_prints_and_records_and_returns_nothing(capsys):
    def who_am_i():
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"

    assert check("00.who_am_i", who_am_i) is None
    assert capsys.readouterr().out.startswith("✓ 00.who_am_i: passed\n")
    assert attempts()["00.who_am_i"]["passed"]
    check("00.predict_sum", 7)
    assert attempts()["00.predict_sum"]["status"] == "wrong"
    check("00.average")
    assert "Write your code in the cell above, run that" in capsys.readouterr().out
    assert "00.average" not in attempts()


def test_a_misspelt_id_is_answered_with_the_right_one():
    meant = "There is no task '00.whoami'. Did you mean '00.who_am_i'? Tasks of this"
    with pytest.raises(ValueError, match=re.escape(meant)):
        check("00.whoami")
    with pytest.raises(ValueError, match="There is no lesson 'nothing'"):
        hint("nothing")
    with pytest.raises(ValueError, match="'average'. Did you mean '00.average'?"):
        solution("average")
    with pytest.raises(TypeError, match=r'check\("00.average", len\) or .* not by <b'):
        check(len)


def test_hints_are_graded_and_end(capsys):
    texts = []
    for _ in range(4):
        hint("00.average")
        texts.append(capsys.readouterr().out)
    task = checks.find_task("00.average")
    for number in range(3):
        assert texts[number].startswith(f"Hint {number + 1} of 3 for 00.average\n")
        assert task.hints[number].split()[0] in texts[number]
    assert texts[3].startswith("There are no more hints.")
    assert attempts()["00.average"]["hints"] == 3


def test_a_solution_is_shown_after_an_attempt(capsys):
    hint("00.average")  # a hint is no attempt
    check("00.average", ...)
    capsys.readouterr()
    solution("00.average")
    text = capsys.readouterr().out
    assert "Try it first" in text
    assert "all_reduce" not in text

    record_attempt("00.average", "stuck")
    solution("00.average")
    text = capsys.readouterr().out
    assert "    dist.all_reduce(total)\n" in text
    assert "\nWhy\n  `all_reduce` works in place" in text
    assert "SOLUTION" not in text
    assert attempts()["00.average"]["saw_solution"]


def test_a_solution_can_be_forced_and_is_the_repaired_code_alone(capsys):
    solution("00.spot_the_hang", force=True)
    text = capsys.readouterr().out
    assert "total = loss.clone()\n" in text and text.count("def log_loss(loss):") == 1


def test_without_the_solved_notebook_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("course_utils.ROOT", tmp_path)
    of_the_notebook.cache_clear()  # as if nothing had been read yet
    solution("00.average", force=True)
    assert "The solution of 00.average cannot be shown" in capsys.readouterr().out
    check("05.partition", right_total)
    assert "beside our solution, and that is missing" in capsys.readouterr().out


def test_importing_the_checks_does_not_import_torch():
    code = "import sys\nfrom course_utils import check, hint, solution\n"
    code += "assert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ----------------------------------------------------------------- where fork is unsafe


@pytest.mark.thorough
def test_the_same_where_ranks_cannot_be_forked(monkeypatch):
    monkeypatch.setenv("RANKS_START_METHOD", "spawn")
    task = total_task(seconds=30)
    try:
        assert run_task(task, right_total).passed
        kept = list(processes.kept.values())
        assert len(kept) == 1
        assert run_task(task, right_total).passed
        assert run_task(task, lambda tensor: tensor).status == "wrong"
    finally:
        for ranks in processes.kept.values():
            ranks.close()
        processes.kept.clear()


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
    "class Text(str): pass\n"
    "def who_am_i():\n"
    "    return Text(f'rank {dist.get_rank()} of {dist.get_world_size()}')\n"
    "check('00.who_am_i', who_am_i)",
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
    own = {"COURSE_STATE": str(own_state), "PYTHONPATH": str(ROOT)}
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(env=os.environ | own)
    for cell in notebook.cells:
        assert all(output.output_type == "stream" for output in cell.outputs)
        assert all(output.name == "stdout" for output in cell.outputs), cell.outputs
    joined = ["".join(o.text for o in cell.outputs) for cell in notebook.cells]
    assert joined[3].startswith("\x1b[1;32m✓ ")
    texts = [re.sub(r"\x1b\[[\d;]*m", "", text) for text in joined]
    assert "  It raised AttributeError: 'Tensor' object has no attribute" in texts[2]
    assert "    line 4 of the cell, in average: return helper(total)\n" in texts[2]
    assert "    line 6 of the cell, in helper: return total.no_such_thing\n" in texts[2]
    assert texts[3].startswith("✓ 00.who_am_i: passed")
    assert texts[4].startswith("Hint 1 of 3")
    assert texts[5].startswith("✓ 00.who_am_i: passed")
    assert "It uses a magic (a line that begins with % or !)" in texts[6]
    assert "It calls exit() or quit(). A function ends with `return`." in texts[7]
