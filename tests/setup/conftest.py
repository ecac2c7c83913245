"""A small clone of the course and an index of packages on loopback, for its tests.

A clone has the course's real command line, uv and pip, and packages of a few lines in
place of torch and JupyterLab: a whole installation takes seconds.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import psutil
import pytest

from course_utils import ROOT
from course_utils.setup import environment, installer

BASE = getattr(sys, "_base_executable", sys.executable)
# What a clone needs before anything is installed.
FIRST_FILES = (
    *("__init__", "__main__", "setup/__init__", "setup/environment", "setup/installer"),
    *("setup/lab", "setup/testing", "setup/wheels", "setup/doctor"),
    *("measure/__init__", "measure/machine", "notebook/__init__", "notebook/lessons"),
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
    # Containers often set this one: see the test of what Python compiles.
    clone.first_output = clone.start("--no-browser", PYTHONDONTWRITEBYTECODE="1")
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


def lose_all_but_pip(clone: Clone) -> Clone:
    """Have its next start install everything, but not make ``.venv``: that takes most
    of the time.
    """
    for name in ("torch*", "jupyterlab*", "uv*"):
        for path in clone.site.glob(name):
            shutil.rmtree(path)
    return clone


@pytest.fixture
def begun(ready: Clone) -> Clone:
    """A clone whose ``.venv`` has lost all but pip."""
    return lose_all_but_pip(ready)


def error_of(result: subprocess.CompletedProcess) -> str:
    """The message of a command that failed: exactly one line, and no traceback."""
    assert result.returncode == 1, result.stdout + result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]
