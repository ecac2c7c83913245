"""``doctor --room``: the whole of it once, for real, and each step with its fault.

The course runs in a copy of the clone, so that what it writes can be seen, and its
faults are caused: a torch that breaks, hangs or crashes, data that is not there, ports
that are forbidden, a machine that lets no file be opened.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import course_utils
from course_utils.ranks import RankFailure, RanksError
from course_utils.setup import doctor, environment, room
from course_utils.setup.doctor import Finding
from course_utils.setup.environment import Torch
from course_utils.measure.machine import inspect_machine

ROOT = Path(__file__).resolve().parent.parent
STEPS = {step.topic: step for step in room.STEPS}

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="these tests use shell scripts and symbolic links of Unix"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the course, without an environment."""
    folder = tmp_path_factory.mktemp("clone") / "course"
    quiet = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "course_utils", folder / "course_utils", ignore=quiet)
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def run_room(
    clone: Path, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "course_utils", "doctor", "--room", *arguments],
        check=False,
        cwd=clone,
        env={**os.environ, "COLUMNS": "88", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stdout.splitlines()[-1]


def nothing_is_left(mark: str) -> None:
    """Every process with the mark in its environment ends, and soon."""
    deadline = time.monotonic() + 30  # each one in a chain may take ten seconds
    while running := marked_processes(mark):
        assert time.monotonic() < deadline, running
        time.sleep(0.1)


def marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values() and process.pid != os.getpid():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def module(folder: Path, name: str, text: str) -> str:
    """Put a module there that comes before the real one; the folder, for PYTHONPATH."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return str(folder)


# The whole


@pytest.fixture
def ready(clone: Path) -> Iterator[Path]:
    """The copy, with a ``.venv`` that has the packages of this Python."""
    venv = environment.venv_folder(clone)
    packages = sysconfig.get_path("purelib")
    if "torch" not in environment.installed([packages]):
        pytest.skip(f"the packages of this Python are not all in {packages}")
    library = venv / "lib" / Path(packages).parent.name
    library.mkdir(parents=True)
    (library / "site-packages").symlink_to(packages)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    home = os.path.dirname(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text(f"home = {home}\n")
    environment.write_stamp(clone)
    yield clone
    shutil.rmtree(venv)


@pytest.mark.thorough
def test_a_laptop_that_is_ready(ready: Path, tmp_path, monkeypatch, capfd) -> None:
    places = {name: tmp_path / name for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    for name, place in places.items():
        place.mkdir()
        monkeypatch.setenv(name, str(place))
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ROOM_MARK", mark)
    # The doctor's own import of torch is tested with the doctor, and takes seconds.
    torch = Torch("2.14.1", "0.29.2", gloo=True)
    monkeypatch.setattr(environment, "probe_torch", lambda *_, **__: torch)
    # How busy the machine is that runs the tests must not matter.
    patient = [replace(step, seconds=200.0) for step in room.STEPS]
    monkeypatch.setattr(room, "STEPS", patient)
    monkeypatch.setattr(room, "ALL_SECONDS", 500.0)
    monkeypatch.setattr(room, "TORCH_SECONDS", 200.0)
    code = doctor.main(["--room"], ready)
    out, err = capfd.readouterr()
    assert (code, err) == (0, ""), out
    marked = r"^ +(?:ok|note)  (\S+(?: \S+)?) "
    topics = re.findall(marked, out, re.MULTILINE)
    assert topics[:3] == ["Python", "packages", "torch"]
    assert topics[-4:] == list(STEPS)
    flowing = " ".join(out.split())  # where a line breaks depends on the seconds
    assert "1440 + 357 digits" in flowing
    assert "a stuck one is named" in flowing
    assert "a kernel ran a cell" in flowing
    here = inspect_machine()
    cores = f"{here.cores} core{'s' if here.cores > 1 else ''}"
    assert re.fullmatch(
        rf"room: ready \| {re.escape(here.release)} \| {cores} \| "
        rf"{here.memory / 1e9:.0f} GB \(\d+\.\d free\) \| 4 ranks in \d+\.\d s \| "
        r"Python 3\.\d+ \| torch 2\.\d+\.\d+\S*(?: \(tested with .*\))?",
        out.splitlines()[-1],
    )
    nothing_is_left(mark)
    assert [list(place.iterdir()) for place in places.values()] == [[], [], []]
    written = {path.name for path in ready.iterdir()}
    assert written == {
        *("course_utils", "requirements.txt", "pyproject.toml"),
        *(".venv", ".course"),
    }
    state = ready / ".course"
    assert list(state.glob("room-*")) == []
    assert list(state.glob("jupyter/*.log")) == []
    assert list(state.glob("jupyter/runtime/*server-*")) == []


def test_a_course_that_is_not_set_up(clone: Path) -> None:
    mark = uuid.uuid4().hex
    result = run_room(clone, ROOM_MARK=mark)
    assert result.returncode == 1
    # A disk without room for .venv is named behind it.
    assert last_line(result).partition(" | also: ")[0] == (
        "room: NOT ready | packages: .venv is not ready: not made yet -> "
        "python3 -m course_utils start"
    )
    assert re.search(r"PROBLEM  packages", result.stdout)
    assert "lesson data" not in result.stdout
    assert not environment.venv_folder(clone).exists()
    nothing_is_left(mark)


def test_a_torch_that_does_not_load(clone: Path, tmp_path: Path) -> None:
    broken = module(tmp_path, "torch", "raise OSError('libtorch.so: wrong ELF class')")
    result = run_room(clone, "--no-venv", PYTHONPATH=broken)
    assert result.returncode == 1
    line = last_line(result)
    assert line.startswith("room: NOT ready | torch: torch 2.")
    assert "OSError: libtorch.so: wrong ELF class -> " in line
    assert re.search(r"-m pip install .*torch===\S+ torchvision===\S+$", line)
    assert "JupyterLab" not in result.stdout


def test_too_little_memory(clone: Path, monkeypatch, capsys) -> None:
    little = replace(inspect_machine(), memory=8 * 10**9, free_memory=10**9)
    monkeypatch.setattr(doctor, "inspect_machine", lambda: little)
    torch = Torch("2.14.1", "0.29.2", gloo=True)
    monkeypatch.setattr(environment, "probe_torch", lambda *_, **__: torch)
    assert doctor.main(["--room", "--no-venv"], clone) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "room: NOT ready | memory: 8.0 GB, 1.0 GB of it free -> close other programs: "
        "lessons 00, 01, 02, 03, 04, 05, 06, 07 and 08 take up to 3.9 GB, with "
        "JupyterLab and a browser"
    )


def test_a_torch_that_loads_for_ever(clone: Path, tmp_path, monkeypatch) -> None:
    slow = module(tmp_path, "torch", "import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", slow)
    findings = doctor.examine(clone, venv=False, torch_seconds=1.0)
    line = room.last_words(findings, inspect_machine(), clone)
    assert line.startswith(
        "room: NOT ready | torch: importing torch and torchvision took more than 1 s "
        "-> run it once more: the first time reads"
    )


# The steps


def try_step(
    topic: str, clone: Path, folder: Path, *, before: str = "", seconds: float = 60.0
) -> Finding:
    """One step in this Python; ``before`` is what a shell does first."""
    python = Path(sys.executable)
    if before:
        python = folder / "python"
        real = shlex.quote(sys.executable)
        python.write_text(f'#!/bin/sh\n{before}\nexec {real} "$@"\n')
        python.chmod(0o755)
    return room.try_step(STEPS[topic], python, clone, folder, seconds, venv=False)


@pytest.mark.thorough
def test_data_that_is_not_there(clone: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", module(tmp_path, "sklearn", ""))
    finding = try_step("lesson data", clone, tmp_path)
    assert finding.problem
    assert "digits.csv.gz not found" in finding.fact
    assert finding.fix.startswith("scikit-learn is damaged: remove the folder .venv")


def test_a_virtual_gpu_that_does_not_work(clone: Path, tmp_path) -> None:
    finding = try_step("virtual GPUs", clone, tmp_path, before="ulimit -v 400000")
    assert finding.problem and finding.fact
    assert finding.fix.endswith("python3 -m course_utils start")


def test_ranks_that_cannot_start(clone: Path, tmp_path) -> None:
    finding = try_step("ranks", clone, tmp_path, before="ulimit -n 12")
    assert finding.problem
    assert "Too many open files" in finding.fact
    assert "close other programs" in finding.fix


def test_a_port_that_cannot_be_bound(clone: Path, tmp_path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n"
        "def bind(self, address):\n"
        "    raise PermissionError(13, 'Permission denied')\n"
        "socket.socket.bind = bind\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = try_step("JupyterLab", clone, tmp_path)
    assert finding.problem
    assert "Permission denied" in finding.fact
    assert "listen on 127.0.0.1" in finding.fix


def test_a_step_that_hangs_ends_with_all_that_it_has_started(
    clone: Path, tmp_path, monkeypatch
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ROOM_MARK", mark)
    hang = "import subprocess; subprocess.run(['sleep', '60'])"
    monkeypatch.setenv("PYTHONPATH", module(tmp_path, "torch", hang))
    finding = try_step("virtual GPUs", clone, tmp_path, seconds=1.0)
    assert finding.problem
    assert finding.fact == "not done within 1 s"
    assert "close other programs" in finding.fix
    nothing_is_left(mark)


@pytest.mark.thorough
def test_a_kernel_that_does_not_answer(clone: Path, tmp_path, monkeypatch) -> None:
    hang = "import time; time.sleep(300)"
    (tmp_path / "ipykernel_launcher.py").write_text(hang)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("ROOM_MARK", mark)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = try_step("JupyterLab", clone, tmp_path, seconds=3.0)
    assert finding.problem
    assert finding.fact == "not done within 3 s"
    nothing_is_left(mark)


def test_a_step_that_crashes(clone: Path, tmp_path, monkeypatch) -> None:
    crash = "import os; os.kill(os.getpid(), 11)"
    monkeypatch.setenv("PYTHONPATH", module(tmp_path, "torch", crash))
    finding = try_step("virtual GPUs", clone, tmp_path)
    assert finding.problem
    assert "ended with exit code 139" in finding.fact


def test_no_time_is_left_for_a_step(clone: Path) -> None:
    findings = list(room.try_everything(Path("none"), clone, venv=False, until=0.0))
    assert [finding.topic for finding in findings] == list(STEPS)
    assert {f.fact for f in findings} == {"not tried: 60 s were over before"}
    assert all(finding.problem for finding in findings)
    assert list((clone / ".course").glob("room-*")) == []


def test_a_folder_that_cannot_be_written_to(tmp_path) -> None:
    (tmp_path / ".course").write_text("a file is in the way")
    (finding,) = room.try_everything(Path("none"), tmp_path, venv=False, until=0.0)
    assert finding.topic == "folder" and finding.problem
    assert finding.fact.startswith(".course: ")


@pytest.fixture
def answers(monkeypatch) -> Callable:
    """Let the ranks answer this: their sum, torch's version, and who is stuck."""

    def put(total: float, version: str, stuck: dict[int, str]) -> None:
        class Ranks(contextlib.nullcontext):
            def __init__(self, n: int, **options: object) -> None:
                super().__init__(self)
                self.n = n

            def run(self, function: Callable, timeout: float | None = None) -> list:
                if timeout and stuck:
                    failures = {
                        rank: RankFailure(rank, kind, "", "", "", "", 1.0)
                        for rank, kind in stuck.items()
                    }
                    raise RanksError("", failures=failures)
                return [(total, version)] * self.n

        monkeypatch.setattr(course_utils, "Ranks", Ranks, raising=False)

    return put


@pytest.mark.parametrize(
    ("total", "stuck", "words"),
    [
        (6.0, {2: "stuck"}, r"the sum 10\.0 on every rank, got \[6\.0, 6\.0"),
        (10.0, {}, r"rank 2 was stuck, and this was reported: \{\}"),
        (10.0, {1: "stuck"}, r"this was reported: \{1: 'stuck'\}"),
        (10.0, {2: "died"}, r"this was reported: \{2: 'died'\}"),
    ],
)
def test_ranks_that_answer_wrongly(answers, total, stuck, words) -> None:
    answers(total, "2.14.1", stuck)
    with pytest.raises(RuntimeError, match=words):
        room.use_ranks()


def test_a_version_that_is_not_the_tested_one_is_told(answers) -> None:
    pin = environment.read_requirements().pins["torch"]
    for version, told in (("2.3.0", f"2.3.0 (tested with {pin})"), (f"{pin}+cpu",) * 2):
        answers(10.0, version, {2: "stuck"})
        _, brief = room.use_ranks()
        assert brief.partition(" | torch ")[2] == told


# The last line


def test_the_last_line_names_nobody(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.setattr(room.platform, "node", lambda: "annas-book.local")
    finding = Finding(
        "ranks",
        "connect to Annas-Book:4000\nfailed (/srv/course/a, /home/anna/b, by anna)",
        command="/home/anna/bin/python -m pip install",
        problem=True,
    )
    later = Finding("JupyterLab", "something else", problem=True)
    line = room.last_words([finding, later], inspect_machine(), Path("/srv/course"))
    assert line == (
        "room: NOT ready | ranks: connect to (name):4000 failed (./a, ~/b, by (name)) "
        "-> ~/bin/python -m pip install | also: JupyterLab"
    )


def test_the_limits_of_the_steps_leave_room() -> None:
    assert all(0 < step.seconds < room.ALL_SECONDS / 2 for step in room.STEPS)
