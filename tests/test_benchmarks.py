"""The benchmarks' own parts: rows, medians, the command line, a real kernel.

No timing is tested here, only that what is printed is what was measured.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import cloudpickle
import psutil
import pytest

from course_utils.notebook import processes
from course_utils.notebook.lessons import LESSONS
from course_utils.ranks import Ranks
from course_utils.tasks import tasks_of
from course_utils.tasks.task import Task
from tests import benchmarks
from tests.benchmarks import checks, ddp, memory, prediction, ranks, ring, simulator
from tests.benchmarks.__main__ import descriptions, main
from tests.benchmarks._harness import Row, compare, compared, to_itself
from tests.benchmarks._kernel import ROOT, Kernel

pytestmark = pytest.mark.thorough  # they measure the course; no learner runs them

cloudpickle.register_pickle_by_value(sys.modules[__name__])
FIELDS = "row ratio unit aa goal better met samples note".split()


def row(**changes: object) -> Row:
    settings = dict(row="a / b", ratio=1.0, unit="x", aa=1.0, goal=2.0, samples=3)
    return Row(**{**settings, **changes})


def scripted(name: str, values: list[float], calls: list[str]) -> Callable[[], float]:
    """A measurement that returns these values in turn and writes down its name."""
    remaining = iter(values)

    def measure() -> float:
        calls.append(name)
        return next(remaining)

    return measure


# --- rows ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("better", "ratio", "met"),
    [
        ("lower", 1.9, True),
        ("lower", 2.0, True),
        ("lower", 2.1, False),
        ("higher", 1.9, False),
        ("higher", 2.0, True),
        ("higher", 2.1, True),
    ],
)
def test_a_goal_is_met_on_its_good_side(better, ratio, met):
    assert row(better=better, ratio=ratio).met is met


def test_a_goal_is_met_only_if_every_condition_is_true():
    assert row(conditions={"state_kept": True}).met is True
    assert row(conditions={"state_kept": True, "equal": False}).met is False


def test_a_row_without_a_goal_is_neither_met_nor_missed():
    assert row(goal=None, conditions={"state_kept": False}).met is None


def test_a_row_has_only_two_good_sides():
    with pytest.raises(ValueError, match="'faster'"):
        row(better="faster")


def test_what_is_printed_of_a_row():
    printed = row(
        ratio=1.23456789,
        note="why",
        conditions={"state_kept": False},
        detail={"seconds": 0.000123456, "count": 123456},
    ).as_dict()
    assert list(printed) == [*FIELDS, "state_kept", "seconds", "count"]
    assert printed["ratio"] == 1.235
    assert printed["seconds"] == 0.0001235
    assert printed["count"] == 123456
    assert printed["met"] is False
    assert json.loads(json.dumps(printed)) == printed


# --- medians -------------------------------------------------------------------------
def test_compare_takes_turns_and_divides_by_the_neighbours():
    calls: list[str] = []
    measure = scripted("measure", [20.0, 30.0, 90.0], calls)
    peer = scripted("peer", [8.0, 12.0, 18.0, 2.0], calls)
    found = compare(measure, peer, 3)
    assert calls == ["peer", *("measure", "peer") * 3]
    # Rounds: 20/10, 30/15, 90/10. The peer over itself: 12/8, 18/12, 2/18.
    assert found.ratio == 2.0
    assert found.aa == 1.5
    assert (found.measured, found.peer, found.samples) == (30.0, 10.0, 3)


def test_values_that_were_measured_in_turns_are_compared_in_the_same_way():
    values, peers = [20.0, 30.0, 90.0], [8.0, 12.0, 18.0, 2.0]
    taken = compare(scripted("", values, []), scripted("", peers, []), 3)
    assert compared(values, peers) == taken


def test_compare_is_not_fooled_by_a_machine_that_slows_down():
    calls: list[str] = []
    slowing = [1.0, 3.0, 5.0, 7.0, 9.0]
    measure = scripted("measure", [2.0 * x for x in (2.0, 4.0, 6.0, 8.0)], calls)
    found = compare(measure, scripted("peer", slowing, calls), 4)
    assert found.ratio == 2.0
    assert found.aa > 1.2


def test_compare_needs_a_round():
    with pytest.raises(ValueError, match="rounds is 0"):
        compare(lambda: 1.0, lambda: 1.0, 0)


def test_a_single_run_cannot_be_compared_with_itself():
    assert to_itself([3.0]) is None
    assert to_itself([2.0, 3.0]) == 1.5


# --- the command line ----------------------------------------------------------------
@pytest.fixture
def own_benchmarks(tmp_path, monkeypatch) -> Iterator[None]:
    """Two more files in the folder of the benchmarks."""
    (tmp_path / "tiny.py").write_text(
        '"""A tiny one.\n\nMore about it."""\n'
        "from tests.benchmarks._harness import Row\n"
        "def rows():\n"
        "    yield Row('first', 1.0, 'x', None, 0.5, 1)\n"
        "    yield Row('second', 2.0, 's', 1.0, None, 1)\n"
    )
    (tmp_path / "broken.py").write_text(
        '"""A broken one."""\n'
        "from tests.benchmarks._harness import Row\n"
        "def rows():\n"
        "    yield Row('first', 1.0, 'x', None, 0.5, 1)\n"
        "    raise OSError('no such thing')\n"
    )
    (tmp_path / "_helper.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(
        benchmarks, "__path__", [*benchmarks.__path__, str(tmp_path)], raising=True
    )
    yield
    for name in ("tiny", "broken"):
        sys.modules.pop(f"tests.benchmarks.{name}", None)
        benchmarks.__dict__.pop(name, None)


def test_the_list_is_made_from_the_files(own_benchmarks):
    found = descriptions()
    assert {"ranks", "tiny", "broken"} <= found.keys()
    assert not [name for name in found if name.startswith("_")]
    assert found["tiny"] == "A tiny one."
    assert all(found.values()), "every benchmark says what it measures"


def test_without_names_the_command_lists_them():
    command = [sys.executable, "-m", "tests.benchmarks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines == descriptions()


def test_an_unknown_name_runs_nothing_and_lists_those_that_exist(
    own_benchmarks, capsys
):
    with pytest.raises(SystemExit) as exit_:
        main(["tiny", "nonsense", "harness"])
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no benchmark 'nonsense', 'harness'" in printed.err
    assert f"There are: {', '.join(descriptions())}" in printed.err


def test_a_run_prints_one_json_line_a_row(own_benchmarks, capsys):
    assert main(["tiny"]) == 0, "a missed goal is printed, it is no error"
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [list(line) for line in found] == [FIELDS, FIELDS]
    assert [line["met"] for line in found] == [False, None]
    assert "tiny: 2 rows, 0 of 1 goals met" in printed.err


@pytest.mark.parametrize("load", [0.1, 50.0])
def test_a_busy_machine_is_said_to_be_busy(load, own_benchmarks, capsys, monkeypatch):
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    main(["tiny"])
    assert ("load 50.0 on 2 cores" in capsys.readouterr().err) is (load > 1)


def test_a_benchmark_that_fails_is_an_error_after_its_rows(own_benchmarks, capsys):
    with pytest.raises(OSError, match="no such thing"):
        main(["broken"])
    assert json.loads(capsys.readouterr().out)["row"] == "first"


# --- a real kernel -------------------------------------------------------------------
@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """With four ranks; at its end no process may be left."""
    before = psutil.Process().children(recursive=True)
    with Kernel() as kernel:
        ranks.prepare(kernel)
        folder = kernel.value("__import__('os').environ['IPYTHONDIR']")
        yield kernel
    after = psutil.Process().children(recursive=True)
    assert set(after) <= set(before)
    assert not os.path.exists(folder)


def test_warm_rows_are_measured_on_real_ranks(kernel):
    found = list(ranks.warm_rows(kernel, 3))
    assert [r.goal for r in found] == [2.0, None, None]
    for measured in found:
        assert measured.unit == "x"
        assert measured.samples == 3
        assert measured.ratio > 0
        assert measured.aa > 0
        assert measured.detail["seconds"] > 0


def test_memory_is_that_of_the_ranks(kernel):
    found = ranks.memory_row(kernel)
    assert (found.unit, found.goal, found.samples) == ("MiB", None, 4)
    whole = [
        psutil.Process(pid).memory_info().rss / 2**20
        for pid in kernel.value("[s.pid for s in ranks.status()]")
    ]
    assert 0 < found.ratio < max(whole)


def test_a_mistake_is_timed_and_the_variables_are_looked_at(kernel):
    raises = ranks.FAULTS[0]
    [found] = ranks.fault_rows(kernel, (raises,))
    assert found.samples == raises.rounds == 5
    assert found.conditions == {"state_kept": True}
    assert found.detail["low"] <= found.ratio <= found.detail["high"]
    assert found.ratio < found.detail["usable_seconds"]


def test_lost_variables_are_seen(kernel):
    kernel.run_well("%%ranks\nif rank == 3:\n    del mark")
    assert not ranks.cause_fault(kernel, ranks.FAULTS[0]).kept
    assert ranks.cause_fault(kernel, ranks.FAULTS[0]).kept, "marked anew"


def test_a_fault_that_did_not_happen_is_an_error(kernel):
    harmless = ranks.Fault("harmless", "pass", "raised", "")
    with pytest.raises(RuntimeError, match="expected the cause 'raised', got None"):
        ranks.cause_fault(kernel, harmless)


def test_a_cell_that_fails_shows_why(kernel):
    with pytest.raises(RuntimeError, match="division by zero"):
        kernel.run_well("1 / 0")
    with pytest.raises(RuntimeError, match="NameError"):
        kernel.value("no_such_name")
    assert kernel.value("1 + 1") == 2


def test_a_process_left_behind_is_an_error_and_is_killed(monkeypatch):
    monkeypatch.setattr("tests.benchmarks._kernel.END_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="left behind"), Kernel() as kernel:
        sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
        kernel.run_well(
            "import subprocess, sys\n"
            f"left = subprocess.Popen({sleep}, start_new_session=True).pid"
        )
        left = psutil.Process(kernel.value("left"))
    psutil.wait_procs([left], timeout=3)
    assert not left.is_running()


def test_a_kernel_that_dies_is_an_error_at_once():
    with Kernel() as kernel, pytest.raises(RuntimeError, match="the kernel died"):
        kernel.run("import os\nos._exit(3)")


# --- checks --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "lesson", [one for one in LESSONS if one.tasks], ids=lambda one: one.slug
)
def test_every_task_of_a_solved_exercise_has_a_check_cell_to_time(lesson):
    cells = [
        cell for cell in checks.code_cells(lesson.solution) if cell.startswith("check(")
    ]
    tasks = [task.id for task in tasks_of(lesson.number) if isinstance(task, Task)]
    assert len(cells) == len(tasks)
    for cell, task in zip(cells, tasks, strict=True):
        assert cell.startswith(f'check("{task}", ')


def test_checks_are_timed_in_the_kernel(kernel):
    set_up = "from course_utils import check\nanswer = 0.6"
    cell = 'check("05.predict_rate", answer)'
    first, timed = checks.time_checks(kernel, [set_up, cell], 2)
    assert [*timed] == [cell]
    assert len(timed[cell]) == 2
    assert 0 < min(timed[cell]) < first
    with pytest.raises(RuntimeError, match=r"(?s)did not pass.*How many times 256"):
        checks.time_checks(kernel, [set_up, "answer = 22", cell], 1)


def test_wrong_answers_are_timed(monkeypatch):
    task = next(t for t in tasks_of("05") if isinstance(t, Task))
    monkeypatch.setattr(checks, "all_tasks", lambda: (task,))
    first, later = checks.wrong_answers()
    processes.close_all()  # else the helper that forks ranks lives on
    assert first.samples == later.samples == len(task.misses)
    assert 0 < later.ratio


def test_the_summary_is_over_all_runs_of_all_tasks():
    timed = {"check(a)": [0.1, 0.2, 0.3], "check(b)": [0.4, 0.5, 9.0]}
    median, p95 = checks.summary([2.0, 3.0], timed)
    assert median.ratio == pytest.approx(0.35)
    assert p95.ratio > 5
    assert (median.met, p95.met) == (True, False)
    assert median.samples == 6
    assert median.detail["slowest"] == "check(b)"
    assert median.detail["first_check_seconds"] == 2.5


# --- ring, ddp, prediction: what ranks measure on themselves --------------------------
@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2, quiet=True, timeout=60) as started:
        yield started


def take_turns() -> tuple[list[str], object]:
    from tests.benchmarks._turns import in_turns

    calls: list[str] = []
    turns = in_turns(lambda: calls.append("work"), lambda: calls.append("peer"), 2)
    return calls, turns


def test_ranks_take_turns_and_all_know_the_slowest(pair):
    (calls, turns), (_, others) = pair.run(take_turns)
    assert calls == ["peer", "work"] * 2 + ["peer", "work"] * 2 + ["peer"]
    assert turns == others
    for measured, peers in (
        (turns.seconds, turns.peer_seconds),
        (turns.cpu, turns.peer_cpu),
    ):
        assert (len(measured), len(peers)) == (2, 3)
    assert min(turns.seconds + turns.peer_seconds) > 0


@pytest.mark.parametrize("race", ring.RACES, ids=lambda race: race.row)
def test_races_of_rings(pair, race):
    here = dataclasses.replace(race, goal={2: 1.5})
    row = ring.race_row(pair, here, 1 << 16, 3)
    assert row.row.startswith(f"speed of {race.row} / ")
    assert "0.0625 MiB, 2 ranks" in row.row
    assert (row.unit, row.better, row.goal, row.samples) == ("x", "higher", 1.5, 3)
    assert row.conditions == {"same_result": True}
    assert row.ratio > 0 and row.aa > 0 and row.detail["seconds"] > 0
    assert ("memcpy_seconds" in row.detail) is (race.way == "shared")


def test_the_goals_of_the_races():
    goals = {race.row: race.goal for race in ring.RACES}
    assert goals == {
        "all_reduce_pipelined": {2: 0.90, 4: 0.95},
        "all_reduce_ring": {4: 1.3},
        "SharedMemoryRing": {2: 6.0, 4: 4.0},
    }


def race_with_a_ring_that_does_nothing() -> bool:
    from course_utils.from_scratch import ring as module

    real, module.all_reduce_ring = module.all_reduce_ring, lambda tensor: None
    try:
        return ring.run_race("ring", "gloo", 4000, 1)[1]
    finally:
        module.all_reduce_ring = real


def test_a_ring_with_another_result_is_seen(pair):
    assert pair.run(race_with_a_ring_that_does_nothing) == [False, False]


def test_steps_of_ddp(pair):
    cpu, wall = ddp.ddp_rows(pair, 2)
    assert (cpu.goal, wall.goal) == (1.0, 1.08)
    for row in (cpu, wall):
        assert row.conditions == {"parameters_equal": True}
        assert row.samples == 2 and row.ratio > 0 and row.aa > 0
    naive = ddp.naive_row(pair, 1)
    assert naive.goal == 1.3 and naive.better == "higher"
    assert naive.conditions == {"parameters_within_1e-5": True}


def train_without_averages() -> float:
    from course_utils.from_scratch import ddp as module

    real, module.DDP = module.DDP, lambda model: model
    try:
        return ddp.train_in_turns("own", "torch", 1)[1]
    finally:
        module.DDP = real


def test_parameters_that_differ_are_seen(pair):
    assert min(pair.run(train_without_averages)) > 1e-5


SLOW = {"latency": 1e-3, "bandwidth": 20e6}
MESSAGES = (1 << 12, 1 << 20)


@pytest.mark.parametrize("link", [None, SLOW])
def test_times_for_predictions(pair, link):
    for shifts, pings, rings in pair.run(prediction.measure, MESSAGES, 2, link):
        for times in (shifts, pings, rings):
            assert [len(of) for of in times] == [2, 2]
            assert min(map(min, times)) > 0
            if link:
                assert min(times[1]) > (1 << 20) / 20e6


@pytest.mark.parametrize("link", [None, SLOW])
@pytest.mark.parametrize("off", [1.0, 1.25])
def test_predictions(link, off):
    class TwoRanks:
        n = 2

        def run(self, function, messages, rounds, given):
            assert (function, messages, rounds, given) == (
                prediction.measure,
                MESSAGES,
                3,
                link,
            )
            shifts = [[1e-4 + size / 1e9] * 3 for size in messages]
            pings = [[1e-5 + size / 1e9] * 3 for size in messages]
            rings = [[2 * off * t for t in times] for times in shifts]
            return [(shifts, pings, rings)] * 2

    rows = list(prediction.prediction_rows(TwoRanks(), MESSAGES, 3, link, 0.05))
    assert len(rows) == 2
    for row, message in zip(rows, MESSAGES, strict=True):
        assert f" {2 * message / 2**20:g} MiB, 2 ranks" in row.row
        assert ("emulated" in row.row) is bool(link)
        assert (row.goal, row.aa, row.samples) == (0.05, 1.0, 3)
        assert row.ratio == pytest.approx(abs(1 / off - 1))
        assert row.met is (off == 1.0)
        seconds = 2 * (1e-4 + message / 1e9)
        assert row.detail["predicted_seconds"] == pytest.approx(seconds)
        assert row.detail["seconds"] == pytest.approx(off * seconds)
        assert row.detail["noise"] == 0
        assert row.detail["latency"] == pytest.approx(1e-4)
        assert row.detail["bandwidth"] == pytest.approx(1e9)
        misled = 2 * (1e-5 + message / 1e9) / (off * seconds)
        assert row.detail["ping_pong_error"] == pytest.approx(abs(misled - 1))


# --- memory --------------------------------------------------------------------------
HELD = """import subprocess, sys, time
hold = "import time; b = bytearray({} << 20); time.sleep(0.5)"
child = subprocess.Popen([sys.executable, "-c", hold.format(300)])
exec(hold.format(200)); del b
child.wait()"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_a_lesson_counts_the_kernel_and_its_children():
    row = memory.row_of("00", ["1 / 0", HELD, "1"])
    assert (row.unit, row.goal) == ("GB", memory.LESSON_MEMORY["00"])
    assert row.detail == {"cells": 3, "processes": 2}
    # 500 MiB are 0.52 GB; the kernel itself takes less than 0.2.
    assert 0.5 <= row.ratio <= 0.8


# --- simulator -----------------------------------------------------------------------
@pytest.mark.parametrize("every_gpu", [True, False])
def test_a_simulated_ring_must_equal_the_formula(every_gpu, monkeypatch):
    row = simulator.ring_row(300, 2, every_gpu=every_gpu)
    assert (row.unit, row.goal, row.samples) == ("s", 1.0, 2)
    assert row.conditions == {"equal_to_formula": True}
    assert row.detail["messages"] == 2 * 299 * 300
    formula = simulator.costs.all_reduce_seconds

    def another(*args: object, **link: float) -> float:
        return 1.000001 * formula(*args, **link)

    monkeypatch.setattr(simulator.costs, "all_reduce_seconds", another)
    row = simulator.ring_row(300, 1, every_gpu=every_gpu)
    assert row.conditions == {"equal_to_formula": False} and row.met is False
