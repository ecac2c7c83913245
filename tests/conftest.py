"""For all tests: how many run at once, what they leave, what ran for how long."""

import gc
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from course_utils.notebook import progress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Before anybody imports torch: its threads then sleep while they wait for each other,
# as they do in a lesson (see course_utils/__init__.py), and leave the cores to ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Many tests wait for something most of their time: ranks that are stuck on
# purpose, a browser, a kernel. More at once than this, and they wait for each other.
MOST_AT_ONCE = 4
BROWSER = "tests/browser/"
# These measure times and draw conclusions from them: nothing else may run meanwhile.
ALONE = (
    "notebooks/07_ring_all_reduce.ipynb",
    "solutions/07_ring_all_reduce.ipynb",
    "tests/test_benchmarks.py",
    "tests/test_calibration.py",
)
LISTED_SECONDS = 5.0  # files that took less are one row together

# torch.multiprocessing.spawn never removes what a process wrote that failed. Lesson 04
# shows such a failure.
LEFT_BY_TORCH = "pytorch-errorfile-"

# What is imported while tests are collected stays. To look through it for garbage again
# and again takes a fifth of that time.
gc.disable()


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty progress of this test's own; its folder, which is not there yet."""
    monkeypatch.setenv("COURSE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(progress, "_pending", [])
    monkeypatch.setattr(progress, "_warned", set())
    return tmp_path / "state"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that run alone come first: later they would wait for all others to stop."""
    items.sort(key=lambda item: not item.nodeid.startswith(ALONE))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """How many thorough tests are left out: each process finds the same number."""
    if items and hasattr(config := items[0].config, "workeroutput"):
        thorough = sum(
            item.get_closest_marker("thorough") is not None for item in items
        )
        config.workeroutput["thorough"] = thorough


def pytest_configure(config: pytest.Config) -> None:
    several = hasattr(config, "workerinput")  # one of several processes with tests
    if several and fcntl is not None:
        config.pluginmanager.register(Turns(config.workerinput["turns"]), "turns")
    if not several:
        config.pluginmanager.register(Times(), "times")
    if config.getoption("numprocesses", None) and not several:
        config.turns = own_folder(config, "course-turns-")
        leftovers = Leftovers(config, own_folder(config, "course-tests-"))
        config.pluginmanager.register(leftovers, "leftovers")


def own_folder(config: pytest.Config, prefix: str) -> str:
    """A temporary folder, until pytest ends."""
    folder = tempfile.mkdtemp(prefix=prefix)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What ``-n auto`` means here: one more than there are cores, at most four."""
    return min((os.cpu_count() or 1) + 1, MOST_AT_ONCE)


class ByFile(LoadFileScheduling):
    """The tests of a file stay together; so do all that show pages in a browser.

    Two browsers at once would take the cores from everything else.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return BROWSER if file.startswith(BROWSER) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    config.option.loadscopereorder = False  # the files with the browser come first
    return ByFile(config, log)


def pytest_configure_node(node: WorkerController) -> None:
    """Give each process with tests the folder of the locks that they share."""
    node.workerinput["turns"] = node.config.turns


class Turns:
    """While one process runs a test of ``ALONE``, the others run none.

    Each test holds a lock: most share it, those of ``ALONE`` have it to themselves.
    Who waits for it stands in the doorway, so that nobody can overtake.

    Args:
        folder: the same for all processes.
    """

    def __init__(self, folder: str) -> None:
        self.doorway = open(os.path.join(folder, "doorway"), "w")
        self.room = open(os.path.join(folder, "room"), "w")
        self.kept = False  # the lock, for the next test of `ALONE`

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        alone = item.nodeid.startswith(ALONE)
        if not self.kept:
            fcntl.flock(self.doorway, fcntl.LOCK_EX)
            fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self.doorway, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # To wait for the others before each test of a file would take minutes.
            self.kept = alone and nextitem and nextitem.nodeid.startswith(ALONE)
            if not self.kept:
                fcntl.flock(self.room, fcntl.LOCK_UN)


class Leftovers:
    """An error for each thing that is left in the folder of temporary files.

    The processes with tests, and all that they start, have a folder to themselves.
    It is looked at when they have ended. Tests' own folders (``tmp_path``) stay where
    pytest puts them: it keeps those of the last three runs.
    """

    def __init__(self, config: pytest.Config, folder: str) -> None:
        self.config = config
        self.folder = folder
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield  # until xdist has ended the processes
        for name in sorted(os.listdir(self.folder)):
            if name.startswith(LEFT_BY_TORCH):
                continue
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            report = pytest.TestReport(
                nodeid=name,
                location=(name, None, name),
                keywords={},
                outcome="failed",
                longrepr=f"{name} was left in the folder of temporary files\n"
                + "\n".join(self.inside(os.path.join(self.folder, name))),
                when="teardown",
            )
            self.config.hook.pytest_runtest_logreport(report=report)

    def inside(self, path: str) -> list[str]:
        """The first files in it, and how each of them begins."""
        paths = [path] if os.path.isfile(path) else []
        for folder, _, names in os.walk(path):
            paths += [os.path.join(folder, name) for name in sorted(names)]
        lines = []
        for path in paths[:5]:
            with open(path, "rb") as file:
                lines.append(f"{os.path.relpath(path, self.folder)}: {file.read(300)}")
        return lines


class Times:
    """Adds up how long the tests of each file took, and prints it at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.tests: dict[str, set[str]] = defaultdict(set)
        self.left_out = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController) -> None:
        self.left_out = getattr(node, "workeroutput", {}).get("thorough", self.left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        self.tests[file].add(report.nodeid)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        if len(self.seconds) > 1:
            terminalreporter.section("what ran, and for how long")
            for line in self.table():
                terminalreporter.write_line(line)
            if self.left_out:
                terminalreporter.write_line(
                    f"Left out: {self.left_out} thorough tests, which --all runs, too"
                )

    def table(self) -> Iterator[str]:
        """The slowest files first, then all others, then the sum of each folder."""
        yield f"{'seconds':>9} {'tests':>6}"
        slowest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        long = [file for file in slowest if self.seconds[file] >= LISTED_SECONDS]
        for file in long:
            yield self.row([file], file)
        if short := slowest[len(long) :]:
            files = "one file" if len(short) == 1 else f"{len(short)} files"
            yield self.row(short, f"{files} of less than {LISTED_SECONDS:g} s")
        folders = defaultdict(list)
        for file in slowest:
            folders[file.partition("/")[0] + "/"].append(file)
        for folder, files in sorted(folders.items()):
            yield self.row(files, f"all of {folder}")

    def row(self, files: list[str], name: str) -> str:
        seconds = sum(self.seconds[file] for file in files)
        tests = sum(len(self.tests[file]) for file in files)
        return f"{seconds:9.1f} {tests:6} {name}"
