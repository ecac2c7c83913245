"""The set-up, from a bare Python to JupyterLab: start, test, and all that can go wrong.

Most tests work on a small clone of its own, with the course's real command line, uv and
pip, and packages of a few lines in place of torch and JupyterLab, which an index on
loopback serves: a whole installation takes seconds. The last ones run the real
JupyterLab. Every fault is caused for real: processes are killed, downloads are cut,
disks are full.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import psutil
import pytest

from course_utils import ROOT
from course_utils import __main__ as command_line
from course_utils.setup import environment, installer
from course_utils.setup.testing import PLACES, pytest_arguments

BASE = getattr(sys, "_base_executable", sys.executable)
# What a clone needs before anything is installed.
FIRST_FILES = (
    *("__init__", "__main__", "setup/__init__", "setup/environment", "setup/installer"),
    *("setup/lab", "setup/testing", "setup/wheels", "setup/doctor"),
    *("measure/__init__", "measure/machine", "notebook/__init__", "notebook/lessons"),
)

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="these tests use signals and symbolic links of Unix"
)

TORCH = {
    "torch/__init__.py": """
import importlib.metadata
from types import SimpleNamespace
__version__ = importlib.metadata.version("torch")
version = SimpleNamespace(cuda=None if "+cpu" in __version__ else "13.0")
cuda = SimpleNamespace(device_count=lambda: 0)
""",
    "torch/distributed.py": "is_available = is_gloo_available = lambda: True\n"
    "is_nccl_available = lambda: False\n",
}
TORCHVISION = {
    "torchvision/__init__.py": """
import torch, importlib.metadata
ours = importlib.metadata.version("torchvision")
if ours.partition("+")[2] != torch.__version__.partition("+")[2]:
    raise RuntimeError("operator torchvision::nms does not exist")
""",
    "torchvision/of_2008.py": "print 'some packages have files that nobody imports'\n",
}
LAB = {
    "jupyterlab/__init__.py": "",
    "jupyterlab/__main__.py": """
import json, os, signal, sys
record = {"argv": sys.argv[1:], "env": dict(os.environ), "python": sys.executable}
open("lab.json", "w").write(json.dumps(record))
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("JupyterLab is up", flush=True)
signal.pause()
""",
}
# uv itself is 25 MB: this wheel runs the one of the environment of these tests.
UV = {
    "uv/__init__.py": "",
    "uv/__main__.py": f"""
import os, sys
sys.path[:] = [{str(environment.site_packages() or Path())!r}]
os.execv({str(Path(sys.executable).with_name("uv"))!r}, ["uv", *sys.argv[1:]])
""",
}
NOTEBOOK = {
    "cells": [],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a package that can be installed without building anything."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    # METADATA comes first: a copy that was cut short then passes for an installed one.
    everything = {
        f"{info}/METADATA": "Metadata-Version: 2.1\n"
        f"Name: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        **files,
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name_inside, text in everything.items():
            archive.writestr(name_inside, text)
        record = "".join(f"{name_inside},,\n" for name_inside in everything)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


class Index:
    """PyPI, and PyTorch's index, on this computer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.hold = ""  # beginning of the names of files that it holds back
        self.cut = ""  # and of those of which it sends only the beginning
        for build in ("pypi", "cpu"):
            local = "+cpu" * (build == "cpu")
            make_wheel(folder / build, "torch", f"2.14.1{local}", TORCH)
            make_wheel(folder / build, "torchvision", f"0.29.2{local}", TORCHVISION)
        make_wheel(folder / "pypi", "jupyterlab", "4.6.6", LAB)
        make_wheel(folder / "pypi", "uv", installer.UV, UV)
        make_wheel(folder / "pypi", "setuptools", "80", {})
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(OSError):
                    index.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        _, build, name, *_ = f"{unquote(request.path)}//".split("/")
        self.asked.append(f"{build}/{name}")
        if name.endswith(".whl"):
            content, kind = (self.folder / build / name).read_bytes(), "binary/wheel"
        else:
            names = [path.name for path in (self.folder / build).glob(f"{name}-*.whl")]
            links = "".join(f'<a href="/{build}/{one}">{one}</a>' for one in names)
            content, kind = f"<html><body>{links}</body></html>".encode(), "text/html"
            if not names:
                request.send_error(404)
                return
        while self.hold and name.startswith(self.hold):
            time.sleep(0.01)
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command == "HEAD":
            return
        short = self.cut and name.startswith(self.cut) and kind != "text/html"
        request.wfile.write(content[: len(content) // 2] if short else content)

    def remove(self, name: str) -> None:
        for path in self.folder.glob(f"{name}*.whl"):
            path.unlink()

    def close(self) -> None:
        self.hold = ""
        self.server.shutdown()
        self.server.server_close()


class Clone:
    """A small clone, with an empty home folder and temporary folder beside it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        for name in FIRST_FILES:
            path = folder / "course_utils" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "course_utils" / f"{name}.py", path)
        jupyter = Path("course_utils", "setup", "jupyter")
        shutil.copytree(ROOT / jupyter, folder / jupyter)
        (folder / "notebooks").mkdir()
        (folder / "notebooks" / "00_start_here.ipynb").write_text(json.dumps(NOTEBOOK))
        pins = "torch==2.14.1\ntorchvision==0.29.2\njupyterlab==4.6.6\n"
        (folder / "requirements.txt").write_text(pins)
        (folder / "pyproject.toml").write_text("[project]\nname = 'small'\n")
        for name in ("home", "tmp", "bin"):
            (folder.parent / name).mkdir()

    @property
    def site(self) -> Path:
        return environment.site_packages(self.folder)

    @property
    def packages(self) -> set[str]:
        return {info.stem for info in self.site.glob("*.dist-info")}

    def env(self, **changes: str) -> dict[str, str]:
        """A learner's environment, without a GPU, that knows the index on loopback."""
        foreign = ("PIP_", "PYTHON", "JUPYTER", "XDG_", "COURSE_", "UV_", "SSL_")
        beside = self.folder.parent
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return {
            **kept,
            "HOME": str(beside / "home"),
            "TMPDIR": str(beside / "tmp"),
            "PATH": f"{beside / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{self.url}/pypi",
            "PIP_RETRIES": "1",
            "UV_HTTP_RETRIES": "0",
            "COURSE_TORCH_INDEX": self.url,
            **changes,
        }

    def program(self, name: str, code: str) -> None:
        path = self.folder.parent / "bin" / name
        path.write_text(f"#!/bin/sh\n{code}\n")
        path.chmod(0o755)

    def command(self, *arguments: str) -> list[str]:
        # -S leaves out every installed package: only the standard library is there.
        return [BASE, "-S", "-m", "course_utils", *arguments]

    def run(
        self, *arguments: str, prefix: tuple[str, ...] = (), **changes: str
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*prefix, *self.command(*arguments)],
            check=False,
            cwd=self.folder,
            env=self.env(**changes),
            capture_output=True,
            text=True,
            timeout=120,
        )

    @contextlib.contextmanager
    def running(self, *arguments: str, **changes: str) -> Iterator["Running"]:
        process = Running(self, arguments, changes)
        try:
            yield process
        finally:
            process.stop(signal.SIGKILL)

    def start(self, *arguments: str, **changes: str) -> str:
        """Start until JupyterLab is up, then stop it; return what was said."""
        with self.running("start", *arguments, **changes) as process:
            assert until(lambda: "is up" in process.output or process.ended, 60)
            assert not process.ended, process.output
            process.stop()
        assert self.left_outside() == []
        return process.output

    def left_outside(self) -> list[Path]:
        """What was written to the home folder or the temporary folder."""
        return [
            file
            for name in ("home", "tmp")
            for file in (self.folder.parent / name).rglob("*")
        ]

    def all_ended(self) -> bool:
        def ours(process: psutil.Process) -> bool:
            words = process.info["cmdline"] or []
            return str(self.folder) in " ".join([process.info["cwd"] or "", *words])

        return until(
            lambda: not any(map(ours, psutil.process_iter(["cmdline", "cwd"]))), 5
        )


class Running:
    """A command of the course that runs beside the test."""

    def __init__(self, clone: Clone, arguments: tuple, changes: dict) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            clone.command(*arguments),
            cwd=clone.folder,
            env=clone.env(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(
            target=lambda: self.lines.extend(self.process.stdout)
        )
        self.reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def address(self) -> str:
        """Wait until JupyterLab is up; return its address with the token."""
        assert until(lambda: "is up" in self.output or self.ended, 60), self.output
        return re.search(r"http://\S+token=\S+", self.output)[0]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self, number: int = signal.SIGINT) -> int:
        if not self.ended:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self.reader.join(30)
        return code


def until(condition: Callable[[], object], seconds: float = 30) -> bool:
    """Wait for something; return whether it came."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path / "index")
    yield index
    index.close()


@pytest.fixture
def clone(tmp_path: Path, index: Index) -> Iterator[Clone]:
    """A clone in which nothing was ever started."""
    clone = Clone(tmp_path / "clone", index.url)
    yield clone
    assert clone.all_ended()
    assert clone.left_outside() == []


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone after its first start. Not to be changed: see ``ready``."""
    folder = tmp_path_factory.mktemp("made")
    index = Index(folder / "index")
    clone = Clone(folder / "clone", index.url)
    clone.first_output = clone.start("--no-browser")
    index.close()
    return clone


@pytest.fixture
def ready(made: Clone, clone: Clone) -> Clone:
    """A copy of ``made``: its set-up is finished."""

    def link(source: str, target: str) -> None:
        # pip is most of it, and nobody writes into its files.
        (os.link if "/site-packages/pip/" in source else shutil.copy2)(source, target)

    venv = environment.venv_folder
    shutil.copytree(
        venv(made.folder), venv(clone.folder), symlinks=True, copy_function=link
    )
    stamp = installer.stamp_file(clone.folder)
    stamp.write_text(stamp.read_text().replace(str(made.folder), str(clone.folder)))
    assert installer.condition(clone.folder) == "ready"
    return clone


@pytest.fixture
def begun(ready: Clone) -> Clone:
    """A clone whose ``.venv`` has pip, and nothing else yet."""
    installer.stamp_file(ready.folder).unlink()
    for name in ("torch*", "jupyterlab*", "uv*"):
        for path in ready.site.glob(name):
            shutil.rmtree(path)
    return ready


def error_of(result: subprocess.CompletedProcess) -> str:
    """The message of a command that failed: exactly one line, and no traceback."""
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


# The first start, and the next


def test_the_first_start_takes_the_cpu_build_and_opens_jupyterlab(made: Clone) -> None:
    said = made.first_output
    assert "PyTorch, the cpu build: 0.4 GB" in said
    assert re.search(r"The course is set up, after \d+ s", said)
    assert {"torch-2.14.1+cpu", "torchvision-0.29.2+cpu"} <= made.packages
    lab = json.loads((made.folder / "lab.json").read_text())
    assert lab["python"] == str(environment.venv_python(made.folder))
    assert "--ServerApp.ip=127.0.0.1" in lab["argv"]
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb" in lab["argv"]
    written = [lab["env"][name] for name in environment.PLACES]
    assert all(place.startswith(str(made.folder / ".course")) for place in written)
    assert not (made.folder / ".course" / "uv").exists()  # the downloads


def test_the_next_start_needs_no_network(ready: Clone, index: Index) -> None:
    index.close()
    said = ready.start("--no-browser")
    assert said == "JupyterLab is up\n"
    assert index.asked == []


def test_the_cuda_build_where_there_is_a_gpu(begun: Clone, index: Index) -> None:
    begun.program("nvidia-smi", "echo 'GPU 0: NVIDIA H100'")
    assert "PyTorch, the cuda build: 3.1 GB" in begun.start("--no-browser")
    assert {"torch-2.14.1", "torchvision-0.29.2"} <= begun.packages
    assert not any(asked.startswith("cpu/") for asked in index.asked)


def test_the_other_build_on_demand_and_back(ready: Clone, index: Index) -> None:
    assert "it has the cpu build" in ready.start("--no-browser", "--torch", "cuda")
    assert {"torch-2.14.1", "torchvision-0.29.2"} <= ready.packages
    index.asked.clear()
    assert "Putting" not in ready.start("--no-browser")  # what is there stays
    assert index.asked == []
    ready.start("--no-browser", "--torch", "cpu")
    assert {"torch-2.14.1+cpu", "torchvision-0.29.2+cpu"} <= ready.packages


@pytest.mark.parametrize(
    "lacks",
    ["torchvision", "the index", pytest.param("both", marks=pytest.mark.thorough)],
)
def test_without_a_whole_cpu_build_the_ordinary_one(
    begun: Clone, index: Index, lacks: str
) -> None:
    changes = {}
    if lacks == "the index":
        changes["COURSE_TORCH_INDEX"] = "http://127.0.0.1:9"  # nobody listens there
    else:
        index.remove("cpu/torch" + "vision" * (lacks == "torchvision"))
    said = begun.start("--no-browser", **changes)
    assert "does not give it. PyPI's takes its place: 3.1 GB." in said
    assert {"torch-2.14.1", "torchvision-0.29.2"} <= begun.packages


def test_pip_where_uv_cannot_be_had(begun: Clone, index: Index) -> None:
    index.remove("pypi/uv")
    said = begun.start("--no-browser")
    assert "uv cannot be had here" in said
    assert {"torch-2.14.1+cpu", "jupyterlab-4.6.6"} <= begun.packages


# A room without a network


def test_wheels_are_gathered_and_installed_without_a_network(
    ready: Clone, index: Index, tmp_path: Path
) -> None:
    for options in ((), ("--platform", "windows", "--python", "3.12")):
        done = ready.run("wheels", str(tmp_path / "stick"), *options)
        assert done.returncode == 0, done.stdout + done.stderr
    stick = tmp_path / "stick"
    names = {path.name.partition("-py3")[0] for path in stick.glob("*.whl")}
    assert names == {
        *("torch-2.14.1+cpu", "torchvision-0.29.2+cpu"),  # for Linux
        *("torch-2.14.1", "torchvision-0.29.2"),  # for Windows, PyPI has the CPU build
        *("jupyterlab-4.6.6", f"uv-{installer.UV}", "setuptools-80"),
    }
    index.remove("cpu/torchvision")
    done = ready.run("wheels", str(tmp_path / "ordinary"))
    assert "does not give that build. PyPI's takes its place." in done.stdout
    assert (tmp_path / "ordinary" / "torch-2.14.1-py3-none-any.whl").exists()
    other = Clone(tmp_path / "other" / "clone", "http://127.0.0.1:9")
    other.start("--no-browser", "--wheels", str(stick))
    assert {"torch-2.14.1+cpu", "torchvision-0.29.2+cpu"} <= other.packages


def test_a_folder_that_lacks_a_wheel(begun: Clone, tmp_path: Path) -> None:
    assert "there is no such folder" in error_of(begun.run("start", "--wheels", "no"))
    make_wheel(tmp_path / "stick", "uv", installer.UV, UV)
    said = error_of(begun.run("start", "--wheels", str(tmp_path / "stick")))
    assert re.search(r"(torch|jupyterlab)\S* cannot be found for Python 3\.", said)


# Stopped, and put right


def test_ctrl_c_while_installing_is_one_line_and_the_next_start_goes_on(
    begun: Clone, index: Index
) -> None:
    index.hold = "jupyterlab-"
    with begun.running("start", "--no-browser") as process:
        assert until(lambda: any("jupyterlab-" in name for name in index.asked))
        assert process.stop() == 130
    last = process.output.splitlines()[-1]
    assert last == "stopped; run the same command again to go on"
    index.hold = ""
    assert "its set-up has not come to its end" in begun.start("--no-browser")


def test_kill_9_while_installing_and_two_starts_at_once(
    begun: Clone, index: Index
) -> None:
    index.hold = "jupyterlab-"
    with begun.running("start", "--no-browser") as first:
        assert until(lambda: any("jupyterlab-" in name for name in index.asked))
        first.stop(signal.SIGKILL)
    # uv is still at work: the next set-up waits for it.
    with begun.running("start", "--no-browser") as second:
        assert until(lambda: "Another set-up is at work" in second.output)
        index.hold = ""
        assert until(lambda: "is up" in second.output or second.ended)
        assert "its set-up has not come to its end" in second.output


def half_copied(clone: Clone) -> str:
    shutil.rmtree(clone.site / "jupyterlab")
    next(clone.site.glob("jupyterlab-*/INSTALLER")).unlink()
    installer.stamp_file(clone.folder).unlink()
    return "its set-up has not come to its end"


def removed(clone: Clone) -> str:
    for path in clone.site.glob("jupyterlab*"):
        shutil.rmtree(path)
    return "removed or changed: jupyterlab-4.6.6"


def two_builds(clone: Clone) -> str:
    make_wheel(clone.folder.parent, "torch", "2.14.1", TORCH)
    command = [environment.venv_python(clone.folder), "-m", "pip", "-q", "install"]
    wheel = clone.folder.parent / "torch-2.14.1-py3-none-any.whl"
    command += ["--force-reinstall", "--no-index", wheel]
    subprocess.run(command, env=clone.env(), check=True)
    with pytest.raises(environment.SetupError, match="come from different builds"):
        environment.probe_torch(environment.venv_python(clone.folder), clone.folder)
    return "removed or changed: torch-2.14.1+cpu"


def other_requirements(clone: Clone) -> str:
    make_wheel(clone.folder.parent / "index" / "pypi", "tqdm", "4", {"tqdm.py": ""})
    with open(clone.folder / "requirements.txt", "a") as file:
        file.write("tqdm==4\n")
    return "the requirements, the Python or the folder have changed"


def no_python(clone: Clone) -> str:
    for path in (clone.folder / ".venv" / "bin").glob("python*"):
        path.unlink()
    return "it is half-made, or its Python has gone"


def no_pip(clone: Clone) -> str:
    for path in clone.site.glob("pip*"):
        shutil.rmtree(path)
    return "removed or changed: pip-"


def made_by_an_old_python(clone: Clone) -> str:
    if not OLD_PYTHONS:
        pytest.skip("no Python older than 3.10 on this machine")
    venv = environment.venv_folder(clone.folder)
    shutil.rmtree(venv)
    command = [OLD_PYTHONS[-1], "-m", "venv", "--without-pip", venv]
    subprocess.run(command, check=True)
    return "its Python is 3."


@pytest.mark.parametrize(
    "harm",
    [
        half_copied,
        removed,
        two_builds,
        *(
            pytest.param(harm, marks=pytest.mark.thorough)
            for harm in (other_requirements, no_python, no_pip, made_by_an_old_python)
        ),
    ],
)
def test_what_was_harmed_is_put_right(ready: Clone, harm: Callable) -> None:
    why = harm(ready)
    assert f"({why}" in ready.start("--no-browser")
    pair = {"torch-2.14.1+cpu", "torchvision-0.29.2+cpu"}
    assert {*pair, "jupyterlab-4.6.6"} <= ready.packages
    environment.probe_torch(environment.venv_python(ready.folder), ready.folder)
    assert ready.start("--no-browser") == "JupyterLab is up\n"


def test_comments_in_the_requirements_make_no_new_set_up_due(ready: Clone) -> None:
    with open(ready.folder / "requirements.txt", "a") as file:
        file.write("# A comment.\n")
    assert installer.condition(ready.folder) == "ready"


# What can be wrong with the machine


def old_pythons() -> list[str]:
    """Pythons of this machine that are too old for the course but can read it."""
    found = [shutil.which(f"python3.{minor}") for minor in range(6, 10)]
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found += [str(path) for path in sorted(folder.glob("3.[6-9].*/bin/python"))]
    return [  # a version manager's stand-in may refuse to run
        one for one in filter(None, found) if installer.version_of(Path(one))
    ]


OLD_PYTHONS = old_pythons()


def test_an_old_python_is_told_so_in_one_line(clone: Clone) -> None:
    if not OLD_PYTHONS:
        pytest.skip("no Python older than 3.10 on this machine")
    for python in OLD_PYTHONS:
        command = [python, "-m", "course_utils", "start"]
        done = subprocess.run(
            command, cwd=clone.folder, env=clone.env(), capture_output=True, text=True
        )
        message = error_of(done)
        assert re.match(r"Python 3\.10 or newer is needed, this is 3\.[6-9]\.", message)


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py"])
def test_python_3_6_can_read_the_first_files(name: str) -> None:
    source = (ROOT / "course_utils" / name).read_text()
    ast.parse(source, feature_version=(3, 6))
    assert "annotations" not in source  # `from __future__` would be an error there


@pytest.mark.parametrize("command", ["start", "test", "wheels", "doctor"])
def test_nothing_is_needed_before_the_set_up(clone: Clone, command: str) -> None:
    done = clone.run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: python3 -m course_utils {command}" in done.stdout


def with_mounts(script: str, *arguments: str) -> tuple[str, ...]:
    """What to put before a command, so that it has mounts of its own; or skip."""
    own = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
    if not shutil.which("unshare") or subprocess.run([*own, "true"]).returncode:
        pytest.skip("this system does not let us mount a disk of our own")
    return (*own, "sh", "-ec", f'{script}; "$@"', "sh")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_no_venv_module(clone: Clone, module: str) -> None:
    place = Path(subprocess.__file__).parent / module
    prefix = with_mounts(f"mount --bind {clone.folder.parent / 'tmp'} {place}")
    message = error_of(clone.run("start", prefix=prefix))
    assert f"has no module {module}, which it takes to make .venv" in message
    assert clone.start("--no-browser")  # once it is there


def test_a_disk_that_is_too_small_is_seen_before_the_download(
    clone: Clone, index: Index
) -> None:
    disk = clone.folder.parent / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=300m tmpfs {disk}"
    go = f"cp -a {clone.folder} {disk}; cd {disk}/clone"
    message = error_of(clone.run("start", prefix=with_mounts(f"{mount}; {go}")))
    assert re.match(r"The disk is too full: 0\.3 GB free .* 2\.0 GB needed", message)
    assert index.asked == []


def test_the_disk_fills_while_packages_are_installed(ready: Clone) -> None:
    installer.stamp_file(ready.folder).unlink()
    shutil.rmtree(ready.site / "jupyterlab")
    next(ready.site.glob("jupyterlab-*/INSTALLER")).unlink()
    (ready.folder / ".course").mkdir(exist_ok=True)
    full = f"mount -t tmpfs -o size=8k tmpfs {ready.folder}/.course"
    message = error_of(ready.run("start", prefix=with_mounts(full)))
    assert message.startswith("The disk is too full: ")


def test_a_folder_that_cannot_be_written(clone: Clone) -> None:
    mount = f"mount --bind -o ro {clone.folder} {clone.folder}; cd {clone.folder}"
    message = error_of(clone.run("start", prefix=with_mounts(mount)))
    assert message.startswith("Cannot write in ")


def test_no_network(begun: Clone, index: Index) -> None:
    index.close()
    assert error_of(begun.run("start")).startswith("The network failed: ")


@pytest.mark.parametrize(
    "package", ["jupyterlab-", pytest.param("torch-", marks=pytest.mark.thorough)]
)
def test_a_network_that_is_cut_in_the_middle(
    begun: Clone, index: Index, package: str
) -> None:
    index.cut = package
    assert error_of(begun.run("start")).startswith("The network failed: ")
    index.cut = ""
    begun.start("--no-browser")
    assert {"torch-2.14.1+cpu", "torchvision-0.29.2+cpu"} <= begun.packages


def test_a_package_that_does_not_exist_here(begun: Clone, index: Index) -> None:
    index.remove("pypi/jupyterlab")
    message = error_of(begun.run("start"))
    assert re.match(r"jupyterlab\S* cannot be found for Python 3\.\d+ on", message)


def test_a_port_that_is_taken_is_seen_before_anything_is_installed(
    clone: Clone,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        message = error_of(clone.run("start", "--port", port))
    assert message == f"--port {port}: Address already in use. Take another, or none"
    assert "--port 70000: " in error_of(clone.run("start", "--port", "70000"))
    assert not environment.venv_folder(clone.folder).exists()


# The command line


def test_help_and_mistakes(clone: Clone) -> None:
    assert "python3 -m course_utils start" in clone.run().stdout
    mistaken = clone.run("strat")
    assert mistaken.returncode == 2
    assert "Did you mean 'start'?" in mistaken.stderr
    (clone.folder / "requirements.txt").unlink()
    assert "clone it again" in error_of(clone.run("start"))


def test_a_command_that_needs_the_packages_runs_in_the_venv(ready: Clone) -> None:
    code = "import sys; main = lambda argv: print(argv, sys.prefix)"
    (ready.folder / "course_utils" / "notebook" / "exercises.py").write_text(code)
    message = error_of(ready.run("build-exercises"))
    assert message.endswith("Run first: python3 -m course_utils test")
    for name in ("torchvision", "sklearn", "anywidget", "nbval", "xdist"):
        (ready.site / f"{name}.py").touch()
    for name in ("pytest_timeout", "playwright", "nbgrader"):
        (ready.site / f"{name}.py").touch()
    done = ready.run("build-exercises", "a.ipynb")
    assert done.stdout == f"['a.ipynb'] {ready.folder / '.venv'}\n", done.stderr


@pytest.mark.parametrize(
    ("command", "said"), [("start", "; run the same command again"), ("progress", "")]
)
def test_ctrl_c_says_go_on_only_where_something_goes_on(
    monkeypatch, capsys, command: str, said: str
) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(command_line.COMMANDS, command, interrupted)
    assert command_line.main([command]) == 130
    assert capsys.readouterr().err.startswith(f"stopped{said}")


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        ([], ["-m", "not thorough", *PLACES]),
        (["-k", "quiz.py"], ["-m", "not thorough", *PLACES, "-k", "quiz.py"]),
        (["--all", "-x"], [*PLACES, "-x"]),
        (["tests/test_a.py::test_b"], ["tests/test_a.py::test_b"]),
        (["solutions"], ["solutions"]),
    ],
)
def test_named_places_replace_all_places_and_have_all_their_tests(
    tmp_path: Path, arguments: list[str], others: list[str]
) -> None:
    for name in PLACES:
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    made = pytest_arguments(arguments, tmp_path)
    assert [argument for argument in made if not argument.startswith("--")] == others
    assert {"--nbval", "--doctest-modules"} <= set(made)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for asked in ("test_quiz.py::test_a", "zzz.ipynb"):
        with pytest.raises(environment.SetupError, match=r"There is no (test_q|zzz)"):
            pytest_arguments(["-q", asked], tmp_path)


# What those type who have an environment of their own


@pytest.mark.parametrize(
    ("folder", "place"), [("", "notebooks"), ("notebooks", "00_start_here.ipynb")]
)
def test_plain_nbval_needs_no_more_than_the_learners_packages(
    clone: Clone, folder: str, place: str
) -> None:
    (clone.folder / "tests").mkdir()
    for name in ("pyproject.toml", "conftest.py", "tests/nbval.cfg"):
        shutil.copy(ROOT / name, clone.folder / name)
    source = (
        "from course_utils.notebook.progress import record_hint\n"
        "record_hint('00.average', 1)\n"
        "object()"
    )
    result = {
        "data": {"text/plain": ["<object at 0x7f0123456789>"]},
        "execution_count": 1,
        "metadata": {},
        "output_type": "execute_result",
    }
    cell = {"cell_type": "code", "execution_count": 1, "id": "a", "metadata": {}}
    cell.update(outputs=[result], source=[source])
    path = clone.folder / "notebooks" / "00_start_here.ipynb"
    path.write_text(json.dumps({**NOTEBOOK, "cells": [cell]}))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", place],
        check=False,
        cwd=clone.folder / folder,
        env=clone.env(
            PYTHONPATH=str(ROOT),
            # As if nothing but these had been installed.
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            PYTEST_PLUGINS="nbval.plugin",
            COURSE_STATE=str(clone.folder.parent / "learner"),
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "= 1 passed in " in done.stdout, done.stdout + done.stderr
    assert not (clone.folder.parent / "learner").exists()  # nobody learned anything
    for left in clone.folder.parent.glob("home/*"):
        shutil.rmtree(left)  # it is IPython's


# The files of this repository


def test_the_requirements_are_pins_for_every_python() -> None:
    lines = installer.requirements(ROOT).splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted.pop() == "-e ."
    pin = re.compile(r"[\w-]+==[\d.]+(; python_version (<|>=) \"3\.\d+\")?")
    assert all(map(pin.fullmatch, wanted)), wanted


def test_ci_installs_a_browser_then_calls_the_test_command(
    clone: Clone, tmp_path: Path
) -> None:
    (clone.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", clone.folder / ".ci" / "run")
    calls = tmp_path / "calls"
    programs = tmp_path / "clone" / ".." / "bin"
    for name in ("dirname", "env", "bash", "ln"):
        (programs / name).symlink_to(shutil.which(name))

    def program(name: str, code: str) -> None:
        clone.program(name, f'echo "{name} $*" >> {calls}\n{code}')

    def run() -> tuple[int, str, list[str]]:
        calls.write_text("")
        done = subprocess.run(
            [clone.folder / ".ci" / "run", "-x"],
            check=False,
            env={"PATH": str(programs)},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr, calls.read_text().splitlines()

    tested = "python3 -m course_utils test -x"
    program("python3", "exit 4")
    program("id", "echo 0")
    program("apt-get", "echo broken mirror >&2; exit 100")
    code, errors, called = run()
    assert code == 4  # pytest's own
    assert "broken mirror" in errors and "WARNING: no Chromium" in errors
    assert called[-1] == tested
    program("apt-get", f"ln -sf /bin/true {programs}/chromium")
    code, errors, called = run()
    assert code == 4 and errors == "" and called[-1] == tested
    code, errors, called = run()  # now the browser is there
    assert code == 4 and errors == "" and called == [tested]


# The real JupyterLab


@pytest.fixture(scope="module")
def real_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """JupyterLab of this environment, on a clone; (clone, running, address)."""
    clone = Clone(tmp_path_factory.mktemp("real") / "clone", "http://127.0.0.1:9")
    clone.command = lambda *words: [sys.executable, "-m", "course_utils", *words]
    with clone.running("start", "--no-browser", "--port", "0") as process:
        yield clone, process, process.address()
        assert process.stop() == 0
    assert clone.all_ended()
    # The whole time nothing was written outside the clone.
    assert clone.left_outside() == []


def ask(address: str, path: str, *, token: bool = True, data: bytes | None = None):
    base, secret = address.partition("/lab")[0], address.partition("token=")[2]
    headers = {"Authorization": f"token {secret}"} if token else {}
    request = urllib.request.Request(base + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return answer.read().decode()


def test_jupyterlab_shows_the_notebook_to_those_with_the_token(real_lab) -> None:
    _, process, address = real_lab
    assert "/lab/tree/notebooks/00_start_here.ipynb?" in address
    assert "Only this computer can reach it" in process.output
    contents = ask(address, "/api/contents/notebooks/00_start_here.ipynb")
    assert json.loads(contents)["content"]["nbformat"] == 4
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address, "/api/contents", token=False)
    assert refused.value.code == 403


def test_jupyterlab_is_set_as_the_course_needs_it(real_lab) -> None:
    _, _, address = real_lab

    def default(plugin: str, name: str) -> object:
        found = json.loads(ask(address, f"/lab/api/settings/@jupyterlab/{plugin}"))
        return found["schema"]["properties"][name]["default"]

    viewers = default("docmanager-extension:plugin", "defaultViewers")
    assert viewers == {"markdown": "Markdown Preview"}  # the glossary is a page
    assert default("apputils-extension:notification", "fetchNews") == "false"
    assert default("apputils-extension:notification", "checkForUpdates") is False
    assert "word-break: normal" in ask(address, "/custom/custom.css")
    assert "/custom/custom.css" in ask(address, "/lab")


def test_kernels_run_this_python_and_all_stays_on_this_computer(real_lab) -> None:
    clone, process, address = real_lab
    ask(address, "/api/kernels", data=b'{"name": "python3"}')
    tree = psutil.Process(process.process.pid)

    def kernels() -> list[psutil.Process]:
        found = []
        for one in tree.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if "ipykernel_launcher" in " ".join(one.cmdline()):
                    found.append(one)
        return found

    assert until(kernels, 30)
    kernel = kernels()[0]
    assert kernel.cmdline()[0] == sys.executable
    assert kernel.environ()["MPLCONFIGDIR"].startswith(str(clone.folder))

    def listening() -> list[str]:
        found = []
        for one in (tree, *tree.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in one.net_connections(kind="inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.append(connection.laddr.ip)
        return found

    # The server, and five of the kernel.
    assert until(lambda: len(listening()) >= 6, 30)
    assert set(listening()) == {"127.0.0.1"}
