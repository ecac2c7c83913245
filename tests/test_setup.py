"""The set-up, from a bare Python to JupyterLab: start, test, and all that can go wrong.

Each test works on a small clone of its own, with the course's real command line and
packages of a few lines in place of torch and JupyterLab, so that a whole installation
takes seconds and no network. The last tests run the real JupyterLab. Every fault is
caused for real: processes are killed, downloads are cut, disks are full.
"""

import ast
import contextlib
import functools
import hashlib
import http.server
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
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from thorough import thorough_after

from course_utils import __main__ as command_line
from course_utils.setup import environment, installer, lab
from course_utils.setup import testing as test_command
from course_utils.setup.testing import PLACES, WITHOUT_THOROUGH

ROOT = Path(__file__).resolve().parent.parent
BASE = getattr(sys, "_base_executable", sys.executable)
# What a clone needs before anything is installed.
FIRST_FILES = (
    *("__init__", "__main__", "setup/__init__", "setup/environment"),
    *("setup/installer", "setup/lab", "setup/testing", "setup/doctor", "setup/machine"),
)
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="these tests use signals and symbolic links of Unix"
)

TORCH = {
    "torch/__init__.py": "from types import SimpleNamespace\n"
    "version = SimpleNamespace(cuda=None)\n"
    "cuda = SimpleNamespace(device_count=lambda: 0)\n",
    "torch/distributed.py": "is_available = is_gloo_available = lambda: True\n"
    "is_nccl_available = lambda: False\n",
}
TORCHVISION = {
    "torchvision/__init__.py": "import torch, importlib.metadata\n"
    "if '+cpu' in importlib.metadata.version('torch'):\n"
    "    raise RuntimeError('operator torchvision::nms does not exist')\n",
    "torchvision/of_2008.py": "print 'some packages have files that nobody imports'\n",
}
LAB = {
    "jupyterlab/__init__.py": "",
    "jupyterlab/__main__.py": """
import http.server, json, os, pathlib, sys

options = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
root = pathlib.Path(options["--ServerApp.root_dir"])
if (root / "lab-fails").exists():
    sys.exit("OSError: the port is mined.")
record = {"argv": sys.argv[1:], "env": dict(os.environ), "python": sys.executable}
(root / "lab.json").write_text(json.dumps(record))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = f"token {os.environ['JUPYTER_TOKEN']}"
        self.send_response(200 if self.headers["Authorization"] == allowed else 403)
        self.end_headers()

address = options["--ServerApp.ip"], int(options["--ServerApp.port"])
http.server.HTTPServer(address, Handler).serve_forever()
""",
}
NOTEBOOK = {
    "cells": [],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """Write a package that pip can install, without building anything."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    # METADATA comes first: then a copy that was cut short looks installed to pip.
    everything = {
        f"{info}/METADATA": "Metadata-Version: 2.1\n"
        f"Name: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        **files,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name_inside, text in everything.items():
            archive.writestr(name_inside, text)
        record = "".join(f"{name_inside},,\n" for name_inside in everything)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path


@dataclass
class Clone:
    """A small clone, with an empty home folder and temporary folder beside it."""

    folder: Path
    first_output: str = ""  # of the start that set it up

    @property
    def wheels(self) -> Path:
        return self.folder.parent / "wheels"

    @property
    def site_packages(self) -> Path:
        found = environment.site_packages(self.folder)
        assert found is not None
        return found

    def env(self, **changes: str | None) -> dict[str, str]:
        """A learner's environment; pip finds packages in ``wheels`` only."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "PYTHON", "JUPYTER", "XDG_", "COURSE_"))
        }
        for name in ("home", "tmp"):
            (self.folder.parent / name).mkdir(exist_ok=True)
        kept.update(
            HOME=str(self.folder.parent / "home"),
            TMPDIR=str(self.folder.parent / "tmp"),
            PIP_CONFIG_FILE=os.devnull,
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS=str(self.wheels),
            PIP_RETRIES="0",
        )
        kept.update({k: v for k, v in changes.items() if v is not None})
        for name in (name for name, value in changes.items() if value is None):
            kept.pop(name, None)
        return kept

    def command(self, *arguments: str) -> list[str]:
        # -S leaves out every installed package: only the standard library is there.
        return [BASE, "-S", "-m", "course_utils", *arguments]

    def run(
        self, *arguments: str, prefix: tuple[str, ...] = (), **changes: str | None
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
    def running(self, *arguments: str, **changes: str | None) -> Iterator["Running"]:
        with Running(self, arguments, changes) as process:
            yield process

    def untouched_outside(self) -> bool:
        """Whether home and the temporary folder are still empty."""
        beside = self.folder.parent
        return not any((*beside.glob("home/*"), *beside.glob("tmp/*")))

    def processes(self) -> list[psutil.Process]:
        """Running processes that have to do with this clone."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "cwd"])
            if str(self.folder) in " ".join(process.info["cmdline"] or [])
            or (process.info["cwd"] or "").startswith(str(self.folder))
        ]

    def all_ended(self) -> bool:
        return until(lambda: not self.processes(), 5)


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
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def address(self) -> str:
        """Wait until JupyterLab is up; return its address with the token."""
        assert until(lambda: "token=" in self.output or self.ended, 60), self.output
        found = re.search(r"http://\S+", self.output)
        assert found, self.output
        return found[0]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.reader.join(30)
        return code

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(30)
        self.process.stdout.close()


def until(condition: Callable[[], object], seconds: float = 30) -> bool:
    """Wait for something; return whether it came."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def new_clone(folder: Path) -> Clone:
    clone = Clone(folder)
    package = folder / "course_utils"
    (package / "setup").mkdir(parents=True)
    for name in FIRST_FILES:
        shutil.copy(ROOT / "course_utils" / f"{name}.py", package / f"{name}.py")
    (folder / "notebooks").mkdir()
    (folder / "notebooks" / "00_start_here.ipynb").write_text(json.dumps(NOTEBOOK))
    (folder / "requirements.txt").write_text(
        "torch==2.14.1\ntorchvision==0.29.2\njupyterlab==4.6.6\n"
    )
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "small"\nversion = "1"\n'
        "[project.optional-dependencies]\ndev = [\n]\n"
    )
    make_wheel(clone.wheels, "torch", "2.14.1", TORCH)
    make_wheel(clone.wheels, "torchvision", "0.29.2", TORCHVISION)
    make_wheel(clone.wheels, "jupyterlab", "4.6.6", LAB)
    return clone


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A clone in which nothing was ever started."""
    return new_clone(tmp_path / "clone")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone after its first start. Not to be changed: see ``ready``."""
    clone = new_clone(tmp_path_factory.mktemp("made") / "clone")
    with clone.running("start", "--no-browser", "--port", "0") as process:
        process.address()
        assert process.stop() == 0
    clone.first_output = process.output
    return clone


@pytest.fixture
def ready(made: Clone, tmp_path: Path) -> Clone:
    """A copy of ``made`` whose set-up is finished."""
    return copy_of(made, tmp_path)


def copy_of(made: Clone, folder: Path) -> Clone:
    def copy(source: str, target: str) -> None:
        # pip is most of it, and nobody writes into its files.
        (os.link if "/site-packages/pip/" in source else shutil.copy2)(source, target)

    shutil.copytree(
        made.folder.parent,
        folder,
        symlinks=True,
        dirs_exist_ok=True,
        copy_function=copy,
    )
    clone = Clone(folder / "clone")
    environment.write_stamp(clone.folder)
    return clone


@pytest.fixture
def unfinished(ready: Clone) -> Clone:
    """A clone whose packages are there, but whose set-up has not come to its end."""
    environment.stamp_file(ready.folder).unlink()
    return ready


class Index:
    """A package index on this computer that can be slow, or cut a download short."""

    def __init__(self, wheels: Path) -> None:
        self.wheels = wheels
        self.hold: set[str] = set()  # beginnings of the names of files it holds back
        self.cut: set[str] = set()  # and of those of which it sends only the beginning
        self.asked: list[str] = []
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        name = request.path.strip("/").rpartition("/")[2]
        self.asked.append(name)
        if name.endswith(".whl"):
            content = (self.wheels / name).read_bytes()
        else:
            found = self.wheels.glob(f"{name}-*.whl")
            links = "".join(map(self.link, found))
            content = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        with contextlib.suppress(OSError):
            request.send_response(200)
            kind = "text/html" if name[-4:] != ".whl" else "application/octet-stream"
            request.send_header("Content-Type", kind)
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            while name.startswith(tuple(self.hold)):
                time.sleep(0.01)
            short = name.startswith(tuple(self.cut))
            request.wfile.write(content[: len(content) // 2] if short else content)

    def link(self, path: Path) -> str:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return f'<a href="/{path.name}#sha256={digest}">{path.name}</a>'

    def env(self) -> dict[str, str | None]:
        url = f"http://127.0.0.1:{self.server.server_port}/simple"
        return {"PIP_INDEX_URL": url, "PIP_NO_INDEX": None, "PIP_FIND_LINKS": None}

    def close(self) -> None:
        self.hold.clear()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path / "wheels")
    yield index
    index.close()


def one_line(result: subprocess.CompletedProcess) -> str:
    """The message of a command that failed: exactly one line, and no traceback."""
    assert result.returncode == 1, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    pips = ("ERROR: ", "WARNING: ", "    ")
    lines = [line for line in lines if not line.startswith(pips)]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# The first start, and the next


def test_the_first_start_installs_and_opens_the_first_notebook(made: Clone) -> None:
    output = made.first_output
    steps = re.findall(r"^\[\d/\d\].*", output, re.MULTILINE)
    assert len(steps) == 3
    assert f"Making .venv with Python {VERSION}." in steps[0]
    assert "Installing PyTorch" in steps[1]
    assert "Successfully installed jupyterlab-4.6.6 torch-2.14.1" in output
    assert "torch and torchvision" in steps[2]
    assert re.search(
        r"http://127\.0\.0\.1:\d+/lab/tree/notebooks/00_start_here\.ipynb\?token=\w{48}",
        output,
    )
    assert output.rstrip().endswith("What you saved is in this folder.")
    assert environment.condition(made.folder) == "ready"
    compiled = made.site_packages.glob("torch*/__pycache__/*.pyc")
    assert {p.name.partition(".")[0] for p in compiled} == {"__init__", "distributed"}
    assert made.untouched_outside()
    assert made.all_ended()
    assert not (made.folder / ".course" / "tmp").exists()


def test_the_forecast_says_size_and_time() -> None:
    size = environment.Requirements(download=3.0, disk=6.5)
    text = installer._forecast(size, fresh=True)
    assert "3 GB to download, 6.5 GB on disk" in text
    assert "6 minutes at 100 Mbit/s, 22 minutes at 20 Mbit/s" in text
    assert "missing" in installer._forecast(size, fresh=False)


def test_the_next_start_neither_runs_pip_nor_needs_the_network(ready: Clone) -> None:
    shutil.rmtree(ready.site_packages / "pip")
    dead = f"http://127.0.0.1:{free_port()}"
    offline = dict.fromkeys(("http_proxy", "https_proxy", "PIP_INDEX_URL"), dead)
    began = time.monotonic()
    with ready.running("start", "--no-browser", "--port", "0", **offline) as process:
        process.address()
        seconds = time.monotonic() - began
        assert process.stop() == 0
    assert seconds < 20
    assert process.output.startswith("JupyterLab is up after")
    assert ready.untouched_outside()


def test_jupyterlab_runs_in_the_venv_and_writes_into_the_clone(ready: Clone) -> None:
    foreign = {
        "PYTHONPATH": "/nowhere",
        "JUPYTER_PATH": "/nowhere",
        "JUPYTER_CONFIG_DIR": "/nowhere",
        "MPLCONFIGDIR": "/nowhere",
        "IPYTHONDIR": "/nowhere",
    }
    with ready.running("start", "--no-browser", "--port", "0", **foreign) as process:
        address = process.address()
        process.stop()
    record = json.loads((ready.folder / "lab.json").read_text())
    assert record["python"] == str(environment.venv_python(ready.folder))
    assert "--ServerApp.ip=127.0.0.1" in record["argv"]
    assert "--no-browser" in record["argv"]
    env = record["env"]
    assert "/nowhere" not in env.values()
    places = [name for name in env if name.startswith(("JUPYTER", "IPYTHON", "MPL"))]
    places = [name for name in places if name.endswith(("DIR", "_HOME"))]
    assert len(places) == 7
    for name in places:
        assert Path(env[name]).is_relative_to(ready.folder / ".course"), name
    assert env["PATH"].startswith(str(ready.folder / ".venv" / "bin"))
    # Commands are seen by every user of the machine: the token is not in them.
    token = address.partition("token=")[2]
    assert env["JUPYTER_TOKEN"] == token
    assert not any(token in argument for argument in record["argv"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_stops_jupyterlab(ready: Clone, number: int) -> None:
    with ready.running("start", "--no-browser", "--port", "0") as process:
        process.address()
        assert len(ready.processes()) > 1
        assert process.stop(number) == 0
    assert "JupyterLab has stopped" in process.output
    assert ready.all_ended()


def test_kill_9_of_start_leaves_no_jupyterlab(ready: Clone) -> None:
    with ready.running("start", "--no-browser", "--port", "0") as process:
        process.address()
        process.stop(signal.SIGKILL)
        assert ready.all_ended()


def test_jupyterlab_that_fails_says_why(ready: Clone) -> None:
    (ready.folder / "lab-fails").touch()
    message = one_line(ready.run("start", "--no-browser", "--port", "0"))
    assert "JupyterLab did not start: OSError: the port is mined" in message
    assert ".course/jupyter/lab-" in message
    assert ready.all_ended()


def test_the_browser_gets_the_address(ready: Clone, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1 $MPLCONFIGDIR" > {seen}\n')
    program.chmod(0o755)
    own = {"BROWSER": str(program), "MPLCONFIGDIR": None}
    with ready.running("start", "--port", "0", **own) as process:
        address = process.address()
        assert "opens in your browser" in process.output
        assert until(lambda: seen.exists() and seen.read_text())
    # The browser keeps the learner's own environment.
    assert seen.read_text().strip() == address


def test_without_a_screen_no_browser_is_tried(ready: Clone) -> None:
    screen = dict.fromkeys(("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if sys.platform != "linux":
        pytest.skip("macOS always has a screen")
    with ready.running("start", "--port", "0", **screen) as process:
        process.address()
    assert "opens in" not in process.output


# What to open, and where


def test_here_opens_what_lies_in_the_course(tmp_path: Path, monkeypatch) -> None:
    course = tmp_path / "course"
    (course / "notebooks").mkdir(parents=True)
    (course / "notebooks" / "01 a.ipynb").touch()
    outside = tmp_path / "mine.ipynb"
    outside.touch()
    find = functools.partial(lab.find_target, root=course)
    monkeypatch.chdir(tmp_path)
    assert find(None) == ""  # no first notebook yet: the folder
    (course / lab.FIRST_NOTEBOOK).touch()
    assert find(None) == lab.FIRST_NOTEBOOK
    assert find("notebooks/01 a.ipynb") == "notebooks/01 a.ipynb"
    assert find(str(course / "notebooks")) == "notebooks"
    assert find("course/notebooks") == "notebooks"
    assert find(str(course)) == ""
    monkeypatch.chdir(course / "notebooks")
    assert find("01 a.ipynb") == "notebooks/01 a.ipynb"
    with pytest.raises(environment.SetupError, match="no such notebook"):
        find("notebooks/99.ipynb")
    with pytest.raises(environment.SetupError, match="must lie in the course's folder"):
        find(str(outside))
    (course / "link").symlink_to(outside)
    with pytest.raises(environment.SetupError, match="must lie in the course's folder"):
        find(str(course / "link"))
    (course / ".course").mkdir()
    with pytest.raises(environment.SetupError, match="hidden"):
        find(str(course / ".course"))
    command = lab.lab_command(
        Path("python"), course, target="notebooks/01 a.ipynb", port=1
    )
    assert "--LabApp.default_url=/lab/tree/notebooks/01%20a.ipynb" in command


def test_mistakes_in_options_are_found_before_anything_is_installed(
    clone: Clone,
) -> None:
    assert "no such notebook" in one_line(clone.run("start", "--here", "nowhere"))
    assert "0 (any free one) to 65535" in one_line(
        clone.run("start", "--port", "99999")
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = one_line(clone.run("start", "--port", str(port)))
    assert message.startswith(f"--port {port}: another program uses it")
    assert clone.run("start", "--port", "many").returncode == 2
    assert not (clone.folder / ".venv").exists()


def test_a_used_port_is_passed_over() -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # already in use: just as good
            usual = ("127.0.0.1", lab.USUAL_PORT)
            stack.enter_context(socket.create_server(usual, reuse_port=False))
        assert lab.choose_port(None) != lab.USUAL_PORT
    port = free_port()
    assert lab.choose_port(port) == port


# Set-ups that were stopped, at any moment


def test_ctrl_c_while_installing_is_one_line_and_the_next_start_goes_on(
    unfinished: Clone, index: Index
) -> None:
    make_wheel(unfinished.wheels, "extra", "1", {"extra.py": ""})
    add_requirement(unfinished, "extra==1")
    index.hold.add("extra-1")
    arguments = ("start", "--no-browser", "--port", "0")
    with unfinished.running(*arguments, **index.env()) as process:
        assert until(lambda: any(name.startswith("extra-1") for name in index.asked))
        assert process.stop() == 130
    last = process.output.splitlines()[-1]
    assert last == "stopped; run the same command again to go on"
    assert "Traceback" not in process.output
    assert unfinished.all_ended()
    assert unfinished.untouched_outside()
    assert not (unfinished.folder / ".course" / "tmp").exists()
    index.hold.clear()
    with unfinished.running(*arguments, **index.env()) as process:
        process.address()
    assert "Making .venv" not in process.output
    assert (unfinished.site_packages / "extra.py").exists()


def add_requirement(clone: Clone, line: str) -> None:
    with open(clone.folder / "requirements.txt", "a") as file:
        file.write(line + "\n")


def test_kill_9_while_the_venv_is_made(clone: Clone) -> None:
    venv = clone.folder / ".venv"
    with clone.running("start", "--no-browser", "--port", "0") as process:
        # pip's files are being copied: a Python is there and would even run.
        assert until(lambda: any(venv.glob("lib/python*/site-packages/pip/*")))
        process.stop(signal.SIGKILL)
    assert environment.version_of(environment.venv_python(clone.folder))
    assert clone.all_ended()  # ensurepip, which is two processes further down, too
    with clone.running("start", "--no-browser", "--port", "0") as process:
        process.address()
        process.stop()
    assert "(it was left half-made): making it again" in process.output
    assert environment.condition(clone.folder) == "ready"
    assert not (venv / "unfinished").exists()
    assert clone.untouched_outside()


@pytest.mark.thorough
def test_kill_9_while_a_package_is_copied(unfinished: Clone) -> None:
    number = 3000
    many = {f"many/m{i}.txt": "x" for i in range(number)}
    make_wheel(unfinished.wheels, "many", "1", many)
    add_requirement(unfinished, "many==1")
    folder = unfinished.site_packages / "many"
    with unfinished.running("start", "--no-browser", "--port", "0") as process:
        assert until(lambda: (folder / "m50.txt").exists())
        process.stop(signal.SIGKILL)
    assert unfinished.all_ended()
    copied = len(list(folder.iterdir()))
    assert copied < number, "the copy was too quick to be interrupted"
    # The trap: pip itself takes what is there for the whole package.
    listed = environment.installed([unfinished.site_packages])
    assert listed["many"] == "1"
    with unfinished.running("start", "--no-browser", "--port", "0") as process:
        process.address()
    assert "Making .venv" not in process.output
    assert len(list(folder.iterdir())) == number


@pytest.mark.thorough
def test_two_starts_at_once_install_once(clone: Clone) -> None:
    arguments = ("start", "--no-browser", "--port", "0")
    with clone.running(*arguments) as one, clone.running(*arguments) as two:
        assert one.address() != two.address()
        outputs = sorted([one.output, two.output], key=len)
        assert one.stop() == two.stop() == 0
    assert "Another set-up is at work in this folder" in outputs[0]
    assert "Installing" not in outputs[0]
    assert "Successfully installed" in outputs[1]
    assert environment.condition(clone.folder) == "ready"


# An environment that is there, but not as it should be


def test_other_requirements_are_installed_and_comments_do_not_count(
    ready: Clone,
) -> None:
    add_requirement(ready, "# a comment")
    assert environment.condition(ready.folder) == "ready"
    make_wheel(ready.wheels, "extra", "1", {"extra.py": ""})
    add_requirement(ready, "extra==1")
    with ready.running("start", "--no-browser", "--port", "0") as process:
        process.address()
    assert "the requirements, the Python or the folder have changed" in process.output
    assert "Making .venv" not in process.output
    assert (ready.site_packages / "extra.py").exists()
    assert environment.condition(ready.folder) == "ready"


def test_only_what_concerns_the_installation_makes_a_new_one_due(ready: Clone) -> None:
    pyproject = ready.folder / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(text + "[tool.ruff]\nline-length = 100\n")
    assert environment.condition(ready.folder) == "ready"
    pyproject.write_text(text.replace('version = "1"', 'version = "2"'))
    assert environment.condition(ready.folder) != "ready"


@pytest.mark.thorough
def test_a_removed_package_comes_back(ready: Clone) -> None:
    shutil.rmtree(ready.site_packages / "torch")
    shutil.rmtree(ready.site_packages / "torch-2.14.1.dist-info")
    with ready.running("start", "--no-browser", "--port", "0") as process:
        process.address()
    assert "packages were removed or changed: torch-2.14.1" in process.output
    assert (ready.site_packages / "torch" / "__init__.py").exists()


@pytest.mark.thorough
def test_a_moved_clone_is_put_right(ready: Clone) -> None:
    moved = Clone(ready.folder.with_name("moved"))
    ready.folder.rename(moved.folder)
    with moved.running("start", "--no-browser", "--port", "0") as process:
        process.address()
    assert "the folder have changed" in process.output
    assert environment.condition(moved.folder) == "ready"


@pytest.mark.thorough
def test_a_lost_python_makes_the_venv_anew(ready: Clone) -> None:
    # As after an update of the system's Python.
    for name in ("python", "python3", f"python{VERSION}"):
        link = ready.folder / ".venv" / "bin" / name
        link.unlink()
        link.symlink_to("/nowhere/python")
    with ready.running("start", "--no-browser", "--port", "0") as process:
        process.address()
    assert "(its Python does not run): making it again" in process.output
    assert environment.condition(ready.folder) == "ready"


@pytest.mark.thorough
def test_a_venv_without_pip_gets_it(ready: Clone) -> None:
    for path in ready.site_packages.glob("pip*"):
        shutil.rmtree(path)
    environment.stamp_file(ready.folder).unlink()
    with ready.running("start", "--no-browser", "--port", "0") as process:
        process.address()
    assert "Making .venv" not in process.output
    assert (ready.site_packages / "pip").exists()


def old_pythons() -> list[str]:
    """Pythons of this machine that are too old for the course but can read it."""
    names = [f"python3.{minor}" for minor in range(6, 10)]
    found = [shutil.which(name) for name in names]
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found += [str(path) for path in sorted(folder.glob("3.[6-9].*/bin/python"))]

    kinds = {}
    for program in filter(None, found):
        said = subprocess.run([program, "-V"], check=False, capture_output=True)
        if not said.returncode:  # a version manager's stand-in may refuse to run
            kinds[said.stdout] = program
    return list(kinds.values())


def test_a_venv_of_an_old_python_is_made_anew(clone: Clone) -> None:
    old = old_pythons()
    if not old:
        pytest.skip("no Python older than 3.10 on this machine")
    venv = clone.folder / ".venv"
    subprocess.run([old[-1], "-m", "venv", "--without-pip", venv], check=True)
    with clone.running("start", "--no-browser", "--port", "0") as process:
        assert until(lambda: "[1/3] Making" in process.output)
        process.stop()
    assert "and 3.10 is needed): making it again" in process.output


# What can be wrong with the machine


@pytest.mark.thorough
def test_an_old_python_is_told_so_in_one_line(clone: Clone) -> None:
    old = old_pythons()
    if not old:
        pytest.skip("no Python older than 3.10 on this machine")
    commands = [[python, "start"] for python in old]
    commands += [[old[0], command] for command in ("test", "doctor", "progress")]
    for python, *arguments in [*commands, [old[0]]]:
        result = subprocess.run(
            [python, "-m", "course_utils", *arguments],
            check=False,
            cwd=clone.folder,
            env=clone.env(),
            capture_output=True,
            text=True,
        )
        message = one_line(result)
        assert re.match(r"Python 3\.10 or newer is needed, this is 3\.[6-9]\.", message)
        assert result.stdout == ""
    assert not (clone.folder / ".course").exists()


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py"])
def test_python_3_6_can_read_the_first_files(name: str) -> None:
    source = (ROOT / "course_utils" / name).read_text()
    ast.parse(source, feature_version=(3, 6))
    assert "annotations" not in source  # `from __future__` would be an error there


def test_the_first_files_import_the_standard_library_alone(clone: Clone) -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {FIRST_FILES!r}:\n"
        "    name = name.replace('/', '.').removesuffix('__init__').strip('.')\n"
        "    importlib.import_module('course_utils' + '.' * bool(name) + name)\n"
        "heads = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(heads - sys.stdlib_module_names - {'__main__'}))\n"
    )
    # Python adds a few modules of its own to those that it lists.
    command = [BASE, "-S", "-c", code]
    run = functools.partial(subprocess.run, cwd=clone.folder, check=True, text=True)
    result = run(command, env=clone.env(), capture_output=True)
    ours = [name for name in result.stdout.split() if not name.startswith("_")]
    assert ours == ["course_utils"]


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_no_venv_module(clone: Clone, tmp_path: Path, module: str) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    result = subprocess.run(
        [BASE, "-m", "course_utils", "start"],
        check=False,
        cwd=clone.folder,
        env=clone.env(PYTHONPATH=str(hidden)),
        capture_output=True,
        text=True,
    )
    message = one_line(result)
    assert f"This Python {VERSION} has no module {module}" in message
    if Path("/etc/debian_version").exists():
        assert f"apt install python{VERSION}-venv, then run the same" in message
    assert not (clone.folder / ".venv").exists()


def test_no_network(ready: Clone) -> None:
    requirements = ready.folder / "requirements.txt"
    before = requirements.read_text()
    add_requirement(ready, "extra==1")
    url = f"http://127.0.0.1:{free_port()}/simple"
    result = ready.run("start", PIP_INDEX_URL=url, PIP_NO_INDEX=None)
    assert one_line(result).startswith("The network failed: pip could not download")
    # Who knows how far it came: the old stamp is worth nothing now.
    requirements.write_text(before)
    assert environment.condition(ready.folder) != "ready"


@pytest.mark.thorough
def test_a_download_that_breaks_off(unfinished: Clone, index: Index) -> None:
    make_wheel(unfinished.wheels, "extra", "1", {"extra.py": "x = 1\n" * 100_000})
    add_requirement(unfinished, "extra==1")
    index.cut.add("extra-1")
    message = one_line(unfinished.run("start", **index.env()))
    assert message.startswith("The network failed")
    index.cut.clear()
    with unfinished.running("start", "--no-browser", **index.env()) as process:
        process.address()


@pytest.mark.thorough
def test_pip_is_told_not_to_use_the_network(unfinished: Clone) -> None:
    add_requirement(unfinished, "extra==1")
    assert "PIP_NO_INDEX" in one_line(unfinished.run("start"))


@pytest.mark.thorough
def test_a_version_that_does_not_exist_here(unfinished: Clone, index: Index) -> None:
    make_wheel(unfinished.wheels, "extra", "1", {"extra.py": ""})
    add_requirement(unfinished, "extra==2")
    message = one_line(unfinished.run("start", **index.env()))
    assert message.startswith(f"extra==2 does not exist for Python {VERSION} on ")


@pytest.mark.thorough
def test_any_other_trouble_of_pip_is_not_hidden(unfinished: Clone) -> None:
    (unfinished.wheels / "extra-1-py3-none-any.whl").write_text("this is no wheel")
    add_requirement(unfinished, "extra==1")
    message = one_line(unfinished.run("start"))
    assert "pip" in message
    assert (unfinished.folder / ".course" / "pip.log").stat().st_size


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "The virtual environment was not created successfully because ensurepip is "
            "not available.  On Debian/Ubuntu systems, you need to install the "
            "python3-venv package",
            "cannot put pip into .venv",
        ),
        ("WARNING: the ssl module in Python is not available.", "without ssl"),
        (
            "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]",
            "PIP",
        ),
        ("OSError: [Errno 122] Disk quota exceeded", "The disk is full"),
        ("[WinError 112] There is not enough space on the disk", "The disk is full"),
        ("gaierror: Temporary failure in name resolution", "The network failed"),
        ("OSError: [Errno 13] Permission denied: '/x'", "must belong to you"),
        ("ERROR: something that nobody has seen yet", ""),
    ],
)
def test_what_pip_and_venv_write_is_put_plainly(output: str, message: str) -> None:
    said = installer.explain(output)
    assert message in said if message else said == ""
    assert "\n" not in said


def own_mounts() -> tuple[str, ...]:
    """A command that gives another its own mounts; skips if there is none."""
    flags = "-m" if os.geteuid() == 0 else "-rm"
    if (
        not shutil.which("unshare")
        or subprocess.run(
            ["unshare", flags, "true"], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("this system does not let us mount a disk of our own")
    return ("unshare", flags)


def on_small_disk(clone: Clone, options: str) -> subprocess.CompletedProcess:
    """Start the clone from a disk of its own; the mount ends with the command."""
    disk = clone.folder.parent / "disk"
    disk.mkdir()
    listing = clone.folder.parent / "listing"
    script = (
        f"mount -t tmpfs -o {options} tmpfs {disk} && cp -a {clone.folder} {disk}/ "
        f'&& cd {disk}/clone && rm -f .venv/course-stamp.json && "$@"\n'
        f"code=$?; ls -A .course > {listing}; exit $code"
    )
    prefix = (*own_mounts(), "sh", "-c", script, "sh")
    result = clone.run("start", "--no-browser", prefix=prefix)
    result.left = listing.read_text().split()
    return result


def test_a_disk_that_is_too_small_is_seen_before_the_download(clone: Clone) -> None:
    requirements = clone.folder / "requirements.txt"
    sizes = "0.2 GB to download, 0.5 GB on disk"
    requirements.write_text(
        f"# On Linux: {sizes}\n# On macOS and Windows: {sizes}\n"
        + requirements.read_text()
    )
    result = on_small_disk(clone, "size=300m")
    message = one_line(result)
    assert re.match(
        r"The disk is too full: 0\.3 GB free in \S+, 0\.7 GB needed", message
    )
    assert "Making .venv" not in result.stdout


@pytest.mark.thorough
def test_the_disk_fills_while_the_venv_is_made(clone: Clone) -> None:
    result = on_small_disk(clone, "size=4m")
    assert one_line(result).startswith("The disk is full: 0.0 GB free")
    assert "tmp" not in result.left


def test_the_disk_fills_while_pip_downloads_or_copies(unfinished: Clone) -> None:
    many = {f"many/m{i}.txt": "x" for i in range(3000)}
    make_wheel(unfinished.wheels, "many", "1", many)
    add_requirement(unfinished, "many==1")
    files = sum(
        len(names) + len(folders) for _, folders, names in os.walk(unfinished.folder)
    )
    result = on_small_disk(unfinished, f"size=2g,nr_inodes={files + 1500}")
    assert "Installing collected packages: many" in result.stdout
    assert one_line(result).startswith("The disk is full")
    assert "tmp" not in result.left


def test_a_folder_that_cannot_be_written(clone: Clone) -> None:
    folder = clone.folder
    script = f'mount --bind -o ro {folder} {folder} && cd {folder} && exec "$@"'
    prefix = (*own_mounts(), "sh", "-c", script, "sh")
    message = one_line(clone.run("start", prefix=prefix))
    assert message.startswith("Cannot write ")
    assert "writable" in message


# torch and torchvision


@pytest.mark.thorough
def test_the_cpu_build_of_torch_beside_the_ordinary_torchvision(ready: Clone) -> None:
    make_wheel(ready.wheels, "torch", "2.14.1+cpu", TORCH)  # pip prefers it
    for path in ready.site_packages.glob("torch*"):
        shutil.rmtree(path)
    message = one_line(ready.run("start", "--no-browser"))
    problem, _, fix = message.partition(". Put it right with: ")
    assert problem == (
        "torch 2.14.1+cpu cannot load torchvision 0.29.2: they come from different "
        "builds, as when the CPU build of torch meets the ordinary torchvision"
    )
    pair = "torch===2.14.1 torchvision===0.29.2"
    assert fix == f".venv/bin/python -m pip install {pair}"
    assert not environment.stamp_file(ready.folder).exists()
    report = ready.run("doctor")
    assert report.returncode == 1
    assert re.search(r"PROBLEM +torch +torch 2\.14\.1\+cpu cannot load", report.stdout)
    # The command keeps its promise: it takes the other build of the same version.
    subprocess.run(fix.split(), check=True, cwd=ready.folder, env=ready.env())
    with ready.running("start", "--no-browser", "--port", "0") as process:
        process.address()


@pytest.mark.parametrize(
    ("torch", "message"),
    thorough_after(
        1,
        [
            ("import os; os.kill(os.getpid(), 11)\n", "ended Python with SIGSEGV"),
            ("raise OSError('libcudart.so.13: no such file')\n", "libcudart.so.13"),
            ("import sys; sys.exit(3)\n", "SystemExit: 3"),
        ],
    ),
)
def test_a_torch_that_does_not_load(ready: Clone, torch: str, message: str) -> None:
    (ready.site_packages / "torch" / "__init__.py").write_text(torch)
    environment.stamp_file(ready.folder).unlink()
    line = one_line(ready.run("start", "--no-browser"))
    assert message in line
    assert "-m pip install --force-reinstall torch===2.14.1" in line or "?" in line


# Environments of one's own


def test_no_venv_needs_the_packages_in_the_current_environment(clone: Clone) -> None:
    message = one_line(clone.run("start", "--no-venv", "--no-browser"))
    assert f"This Python ({BASE}) lacks torch, torchvision, jupyterlab" in message
    assert "-m pip install -r requirements.txt" in message
    assert not (clone.folder / ".venv").exists()


def test_no_venv_uses_the_current_environment(ready: Clone) -> None:
    own = ready.folder.parent / "own"
    (ready.folder / ".venv").rename(own)
    with subprocess.Popen(
        [own / "bin" / "python", "-m", "course_utils", "start", "--no-venv"]
        + ["--no-browser", "--port", "0"],
        cwd=ready.folder,
        env=ready.env(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().startswith("JupyterLab is up")
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0
    record = json.loads((ready.folder / "lab.json").read_text())
    assert record["python"] == str(own / "bin" / "python")
    assert record["env"]["PYTHONPATH"] == str(ready.folder)
    assert not (ready.folder / ".venv").exists()


def test_other_versions_are_said_and_used(tmp_path: Path, capsys, monkeypatch) -> None:
    clone = new_clone(tmp_path / "clone")
    pins = {"psutil": "0.1", "pytest": "9.2.0", "torch": "2.14.1", "torchvision": "0"}
    have = {**pins, "psutil": "7.2.2", "torch": "2.14.1+cpu", "other": "1"}
    wanted = environment.Requirements(pins)
    monkeypatch.setattr(environment, "read_requirements", lambda root: wanted)
    monkeypatch.setattr(environment, "installed", lambda folders: have)
    right = environment.Torch("2", "0")
    monkeypatch.setattr(environment, "probe_torch", lambda *_, **__: right)
    environment.current_environment(clone.folder)
    said = capsys.readouterr().out
    assert said.endswith("(in brackets): psutil 7.2.2 (0.1).\n")


# The other commands


def test_help_and_mistakes(clone: Clone) -> None:
    for arguments in ([], ["--help"], ["help"]):
        result = clone.run(*arguments)
        assert result.returncode == 0
        assert "start " in result.stdout and "doctor " in result.stdout
    result = clone.run("strat")
    assert result.returncode == 2
    assert result.stderr == "no command 'strat'. Did you mean 'start'?\n"
    result = clone.run("qqq")
    assert result.returncode == 2
    assert "Try: start, test, doctor" in result.stderr
    for command in ("start", "test", "doctor"):
        result = clone.run(command, "--help")
        assert result.returncode == 0
        assert f"course_utils {command}" in result.stdout


def test_a_command_that_needs_the_packages_runs_in_the_venv(ready: Clone) -> None:
    command = "build-exercises"
    (ready.folder / "course_utils" / "notebook").mkdir()
    (ready.folder / "course_utils" / "notebook" / "exercises.py").write_text(
        "import sys, torch\n"
        "def main(argv):\n"
        "    print(sys.executable, argv)\n"
        "    return 7\n"
    )
    result = ready.run(command, "--reset", "03")
    assert result.returncode == 7, result.stderr
    python = environment.venv_python(ready.folder)
    assert result.stdout == f"{python} ['--reset', '03']\n"
    # In the environment itself there is nothing to change to.
    inside = subprocess.run(
        [python, "-m", "course_utils", command],
        check=False,
        cwd=ready.folder,
        env=ready.env(),
        capture_output=True,
        text=True,
    )
    assert inside.returncode == 7
    # The set-up was stopped, and another environment has all that it takes.
    stopped = environment.site_packages(ready.folder)
    own = shutil.copytree(stopped, ready.folder.parent / "own")
    shutil.rmtree(stopped / "torch-2.14.1.dist-info")
    result = ready.run(command, PYTHONPATH=str(own))
    assert result.returncode == 7, result.stderr
    assert not result.stdout.startswith(str(python))
    shutil.rmtree(ready.folder / ".venv")
    message = one_line(ready.run(command))
    assert message.endswith(
        "not set up: torch is missing. Run first: python3 -m course_utils test"
    )


def test_ctrl_c_says_go_on_only_where_something_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def stopped(argv: list[str]) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    for command in command_line.COMMANDS:
        monkeypatch.setitem(command_line.COMMANDS, command, stopped)
        assert command_line.main([command]) == 130
        said = capsys.readouterr().err
        goes_on = command in ("start", "test")
        assert said == f"stopped{GOES_ON if goes_on else ''}\n"
    signal.signal(signal.SIGINT, before)


GOES_ON = "; run the same command again to go on"


def test_progress_and_cohort_need_no_environment(clone: Clone) -> None:
    room = clone.folder / "course_utils" / "notebook"
    room.mkdir()
    for name in ("__init__.py", "progress.py", "lessons.py", "cohort.py"):
        shutil.copy(ROOT / "course_utils" / "notebook" / name, room)
    result = clone.run("progress", "--file")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("progress.json\n")
    empty = '{"version": 1, "tasks": {}, "questions": {}}'
    (clone.folder / "anna.json").write_text(empty)
    result = clone.run("cohort", ".")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("1 learner\n")


def test_a_command_that_needs_more_than_the_course_says_what_installs_it(
    ready: Clone,
) -> None:
    settings = ready.folder / "pyproject.toml"
    settings.write_text(
        settings.read_text().replace("[\n]", '[\n"nbgrader==0.9.6",\n]')
    )
    message = one_line(ready.run("build-exercises"))
    assert message.endswith(
        "not set up: nbgrader is missing. Run first: python3 -m course_utils test"
    )


def test_the_folder_must_be_the_course(clone: Clone) -> None:
    (clone.folder / "requirements.txt").unlink()
    assert "requirements.txt is not in" in one_line(clone.run("start"))


def test_output_that_nobody_reads_is_no_error(clone: Clone) -> None:
    script = '"$@" | true; exit ${PIPESTATUS[0]}'
    result = clone.run("doctor", prefix=("bash", "-c", script, "bash"))
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


BACKEND = """
import pathlib, zipfile
INFO = "small-1.dist-info"
METADATA = (
    "Metadata-Version: 2.1\\nName: small\\nVersion: 1\\n"
    "Provides-Extra: dev\\nRequires-Dist: pytest==9.2.0; extra == 'dev'\\n"
)
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "small-1-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr("small.pth", str(pathlib.Path.cwd()))
        wheel.writestr(INFO + "/METADATA", METADATA)
        wheel.writestr(INFO + "/WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\n"
                       "Root-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(INFO + "/RECORD", "")
    return name
"""


def test_test_adds_the_dev_extra_and_becomes_pytest(ready: Clone) -> None:
    (ready.folder / "backend.py").write_text(BACKEND)
    (ready.folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\n'
        'backend-path = ["."]\n[project]\nname = "small"\nversion = "1"\n'
        '[project.optional-dependencies]\ndev = [\n    "pytest==9.2.0",\n]\n'
    )
    add_requirement(ready, "-e .")
    program = "import os, sys\nprint(sys.argv[1:], os.getcwd(), os.environ['CI'])\n"
    fake = {"pytest/__init__.py": "", "pytest/__main__.py": program + "sys.exit(5)\n"}
    make_wheel(ready.wheels, "pytest", "9.2.0", fake)
    (ready.folder / "tests").mkdir()
    environment.write_stamp(ready.folder)
    result = ready.run("test", "-x", CI=None)
    assert result.returncode == 5, result.stdout + result.stderr
    assert "(what the tests need is not in it yet)" in result.stdout
    last = result.stdout.splitlines()[-1]
    expected = test_command.pytest_arguments(ready.folder, ["-x"])
    assert last == f"{expected} {ready.folder} true"
    assert expected[-4:] == ["course_utils", "tests", "notebooks", "-x"]
    # The tests' packages include the learner's: start has nothing left to do.
    assert environment.condition(ready.folder, dev=True) == "ready"
    assert environment.condition(ready.folder) == "ready"
    again = ready.run("test", CI=None, PIP_NO_INDEX=None, PIP_FIND_LINKS=None)
    assert again.returncode == 5
    assert len(again.stdout.splitlines()) == 1
    assert ready.untouched_outside()


@pytest.mark.thorough
def test_test_runs_notebooks_strictly_and_returns_pytests_exit_code(
    clone: Clone,
) -> None:
    (clone.folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "nbval.cfg", clone.folder / "tests")
    (clone.folder / "tests" / "test_one.py").write_text("def test_one():\n    pass\n")
    (clone.folder / "requirements.txt").write_text(f"pytest=={pytest.__version__}\n")
    write_notebook(clone, "1 + 1", "2")

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "course_utils", "test", *arguments],
            check=False,
            cwd=clone.folder,
            env=clone.env(PYTHONDONTWRITEBYTECODE="1"),
            capture_output=True,
            text=True,
            timeout=120,
        )

    result = run("--no-venv")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^\d workers \[2 items\]", result.stdout, re.MULTILINE)
    assert re.search(r"^=+ 2 passed in .*=+$", result.stdout.splitlines()[-1])
    write_notebook(clone, "1 + 1", "3")
    result = run("--no-venv", "-n", "0")
    assert result.returncode == 1
    assert "workers" not in result.stdout
    assert "1 failed, 1 passed" in result.stdout.splitlines()[-1]
    result = run("tests/test_one.py", "--no-venv", "-q")  # only what is named
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1].startswith("1 passed")
    assert not list(clone.folder.parent.glob("home/*"))


@pytest.mark.parametrize(
    ("folder", "place"), [("", "notebooks"), ("notebooks", "00_start_here.ipynb")]
)
def test_plain_nbval_needs_no_more_than_the_learners_packages(
    clone: Clone, folder: str, place: str
) -> None:
    (clone.folder / "tests").mkdir()
    for name in ("pyproject.toml", "conftest.py", "tests/nbval.cfg"):
        shutil.copy(ROOT / name, clone.folder / name)
    hint = (
        "from course_utils.notebook.progress import record_hint\n"
        "record_hint('00.average', 1)\n"
    )
    write_notebook(clone, hint + "object()", "<object at 0x7f0123456789>")
    result = subprocess.run(
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
    assert result.returncode == 0, result.stdout + result.stderr
    assert "= 1 passed in " in result.stdout
    assert not (clone.folder.parent / "learner").exists()  # nobody learned anything
    assert not list(clone.folder.parent.glob("tmp/course-*"))


def write_notebook(clone: Clone, source: str, output: str) -> None:
    cell = {
        "cell_type": "code",
        "execution_count": 1,
        "id": "a",
        "metadata": {},
        "outputs": [
            {
                "data": {"text/plain": [output]},
                "execution_count": 1,
                "metadata": {},
                "output_type": "execute_result",
            }
        ],
        "source": [source],
    }
    path = clone.folder / "notebooks" / "00_start_here.ipynb"
    path.write_text(json.dumps({**NOTEBOOK, "cells": [cell]}))


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        ([], [*WITHOUT_THOROUGH, *PLACES]),
        (["-k", "quiz.py"], [*WITHOUT_THOROUGH, *PLACES, "-k", "quiz.py"]),
        (["--all", "-x"], [*PLACES, "-x"]),
        (["tests/test_a.py::test_b"], ["tests/test_a.py::test_b"]),
        (["solutions"], ["solutions"]),
    ],
)
def test_named_places_replace_all_places_and_have_all_their_tests(
    tmp_path: Path, arguments: list[str], others: list[str]
) -> None:
    for name in ("course_utils", "tests", "notebooks", "solutions"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    test_command._must_exist(tmp_path, arguments)  # of these nothing is missing
    made = test_command.pytest_arguments(tmp_path, arguments)
    assert [argument for argument in made if not argument.startswith("--")] == others
    assert {"--nbval", "--doctest-modules"} <= set(made)


def test_a_file_that_is_not_there_is_named(clone: Clone) -> None:
    (clone.folder / "tests").mkdir()
    (clone.folder / "tests" / "test_quiz.py").touch()
    for asked in ("test_quiz.py::test_a", "tests/test_qiuz.py"):
        message = one_line(clone.run("test", "--no-venv", "-q", asked))
        assert message == (
            f"There is no {asked.partition('::')[0]} in {clone.folder}. "
            "Did you mean tests/test_quiz.py?"
        )
    message = one_line(clone.run("test", "zzz.ipynb"))
    assert message == f"There is no zzz.ipynb in {clone.folder}"


# The files of this repository


def test_every_requirement_is_a_pin_that_is_understood() -> None:
    text = (ROOT / "requirements.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[-1] == "-e ."
    for minor in range(10, 15):
        pins = environment.read_requirements(ROOT, version=(3, minor)).pins
        names = {re.split("[=;]", line)[0] for line in lines[:-1]}
        assert set(pins) == names, f"Python 3.{minor}"
        assert pins["torch"] == "2.14.1" and pins["torchvision"] == "0.29.2"
    for system in ("Linux", "macOS and Windows"):
        assert re.search(
            rf"^# On {system}: [\d.]+ GB to download, [\d.]+ GB", text, re.M
        )


def test_the_dev_extra_is_read_as_it_is_written() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = project["optional-dependencies"]["dev"]
    assert environment._dev_pins(ROOT) == dev
    assert project["license"] == "MIT"
    assert project["requires-python"] == ">=3.10"
    names = {re.split("[=;]", pin)[0] for pin in dev}
    both = environment.read_requirements(ROOT, dev=True).pins
    assert names <= set(both)


def test_a_line_that_is_no_pin_is_refused(clone: Clone) -> None:
    add_requirement(clone, "numpy>=1")
    with pytest.raises(environment.SetupError, match="'numpy>=1' is no pin"):
        environment.read_requirements(clone.folder)


def test_ci_installs_a_browser_then_calls_the_test_command(
    clone: Clone, tmp_path: Path
) -> None:
    (clone.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", clone.folder / ".ci" / "run")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("dirname", "env", "bash"):
        (programs / name).symlink_to(shutil.which(name))
    calls = tmp_path / "calls"

    def program(name: str, code: str) -> None:
        path = programs / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{code}\n')
        path.chmod(0o755)

    def run() -> tuple[int, str, list[str]]:
        calls.write_text("")
        result = subprocess.run(
            [clone.folder / ".ci" / "run", "-x"],
            check=False,
            env={"PATH": str(programs)},
            capture_output=True,
            text=True,
        )
        return result.returncode, result.stderr, calls.read_text().splitlines()

    tested = "python3 -m course_utils test -x"
    program("python3", "exit 4")
    program("id", "echo 0")
    program("apt-get", "echo broken mirror >&2; exit 100")
    code, errors, called = run()
    assert code == 4  # pytest's own
    assert "broken mirror" in errors and "WARNING: no Chromium" in errors
    assert called[-1] == tested
    assert any(call.startswith("apt-get") for call in called)
    program("apt-get", f"ln -sf /bin/true {programs}/chromium")
    (programs / "ln").symlink_to(shutil.which("ln"))
    code, errors, called = run()
    assert code == 4 and errors == "" and called[-1] == tested
    assert "python3 -m course_utils test --version" in called[:-1]  # beside apt-get
    code, errors, called = run()  # now the browser is there
    assert code == 4 and errors == "" and called == [tested]


# The real JupyterLab


@pytest.fixture(scope="module")
def real_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """JupyterLab of this environment, on a clone; (clone, running, address)."""
    pytest.importorskip("jupyterlab")
    clone = new_clone(tmp_path_factory.mktemp("real") / "clone")
    clone.command = lambda *arguments: [
        *(sys.executable, "-m", "course_utils"),
        *arguments,
    ]
    # This environment is judged by its own requirements.
    shutil.copy(ROOT / "requirements.txt", clone.folder)
    arguments = ("start", "--no-venv", "--no-browser", "--port", "0")
    with clone.running(*arguments) as process:
        yield clone, process, process.address()
        assert process.stop() == 0
    assert clone.all_ended()
    # The whole time nothing was written outside the clone.
    assert clone.untouched_outside()


def ask(address: str, path: str, *, token: bool = True, data: bytes | None = None):
    base, _, secret = address.partition("/lab")[0], *address.partition("token=")[1:]
    headers = {"Authorization": f"token {secret}"} if token else {}
    request = urllib.request.Request(base + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return answer.read().decode()


def test_jupyterlab_shows_the_notebook_to_those_with_the_token(real_lab) -> None:
    _, _, address = real_lab
    page = "/lab/tree/notebooks/00_start_here.ipynb"
    assert "jupyter-config-data" in ask(address, page)
    contents = ask(address, "/api/contents/notebooks/00_start_here.ipynb")
    assert json.loads(contents)["content"]["nbformat"] == 4
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address, "/api/contents", token=False)
    assert refused.value.code == 403


def settings_of(address: str, plugin: str) -> dict:
    found = json.loads(ask(address, f"/lab/api/settings/@jupyterlab/{plugin}"))
    return found["schema"]["properties"]


def test_jupyterlab_shows_the_glossary_as_a_page(real_lab) -> None:
    _, _, address = real_lab
    viewers = settings_of(address, "docmanager-extension:plugin")["defaultViewers"]
    assert viewers["default"] == {"markdown": "Markdown Preview"}


def test_jupyterlab_asks_the_network_for_no_news(real_lab) -> None:
    _, _, address = real_lab
    properties = settings_of(address, "apputils-extension:notification")
    assert properties["fetchNews"]["default"] == "false"
    assert properties["checkForUpdates"]["default"] is False


def test_jupyterlab_breaks_long_lines_of_output_between_words(real_lab) -> None:
    _, _, address = real_lab
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
    history = clone.folder / ".course" / "ipython" / "profile_default"
    assert until(lambda: (history / "history.sqlite").exists(), 30)

    def listening() -> list[str]:
        found = []
        for one in (tree, *tree.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in one.net_connections(kind="inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.append(connection.laddr.ip)
        return found

    assert until(
        lambda: len(listening()) >= 6, 30
    )  # the server, and five of the kernel
    assert set(listening()) == {"127.0.0.1"}
