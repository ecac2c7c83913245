"""Makes ``.venv`` in the clone, or puts it right: :func:`ensure`.

uv installs the packages, and pip where uv cannot be had. PyTorch comes in its CPU build
unless there is an NVIDIA GPU. Nothing is written outside the clone. A set-up may be
stopped at any moment, by Ctrl-C or kill -9, and goes on from there the next time; two
at once wait for each other. The standard library alone is used.
"""

import contextlib
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from course_utils import ROOT
from course_utils.measure.machine import output_of
from course_utils.setup.environment import (
    FOREIGN,
    WINDOWS,
    SetupError,
    has_all,
    last_line,
    probe_torch,
    say,
    site_packages,
    venv_folder,
    venv_python,
)

AGAIN = "then run the same command again"
PYTHON = ".".join(map(str, sys.version_info[:2]))
UV = "0.13.9"

# PyPI has torch with CUDA for Linux, and without for Windows and macOS. PyTorch's own
# index has the other builds (https://pytorch.org/get-started/locally/).
TORCH_INDEX = "https://download.pytorch.org/whl"  # or COURSE_TORCH_INDEX, a mirror
LOCAL = {"cpu": "cpu", "cuda": "cu130"}  # as in 2.14.1+cpu
# GB to download and GB on disk.
SIZES = {"cpu": (0.4, 1.6), "cuda": (3.1, 6.3)}


def ensure(
    root: Path = ROOT, *, dev: bool = False, build: str = "auto", wheels: str = ""
) -> Path:
    """Return a Python that has what the course needs; make or repair it if need be.

    ``dev`` adds what the tests need. ``build`` is PyTorch's: ``"cpu"``, ``"cuda"``, or
    ``"auto"``, which keeps what is there and asks for a GPU otherwise. ``wheels`` is a
    folder to install from, without the network. Where all is ready, it costs about
    30 ms. Raises SetupError with the reason in one line.
    """
    if wheels and not Path(wheels).is_dir():
        raise SetupError(f"--wheels {wheels}: there is no such folder")
    if build == "cuda" and sys.platform == "darwin":
        raise SetupError("--torch cuda: there is no CUDA for a Mac. Leave it out")
    if build == "auto" and not wheels and has_all(dev=dev):
        return Path(sys.executable)
    python = venv_python(root)
    if condition(root, dev=dev, build=build) == "ready":
        return python
    try:
        with _lock(root) as lock:
            # Another set-up may just have come to its end.
            why = condition(root, dev=dev, build=build)
            if why != "ready":
                _Setup(root, lock, wheels).run(why, dev, build)
    except OSError as error:
        if reason := explain(str(error), root):
            raise SetupError(reason) from error
        raise
    return python


def stamp_file(root: Path = ROOT) -> Path:
    """Written when a set-up has come to its end: what was asked for, and is there."""
    return venv_folder(root) / "course-stamp.json"


def condition(root: Path = ROOT, *, dev: bool = False, build: str = "auto") -> str:
    """``"ready"``, or why ``.venv`` is not: a few words for a message. About 30 ms."""
    try:
        stamp = json.loads(stamp_file(root).read_text())
    except (OSError, ValueError):
        begun = venv_folder(root).exists()
        return "its set-up has not come to its end" if begun else "not made yet"
    if dev and not stamp["dev"]:
        return "what the tests need is not in it yet"
    if stamp["asked"] != _asked(root, stamp["dev"]):
        return "the requirements, the Python or the folder have changed"
    if gone := set(stamp["packages"]) - set(_packages(root)):
        return f"removed or changed: {', '.join(sorted(gone))}"
    if build not in ("auto", stamp["build"]):
        return f"it has the {stamp['build']} build of PyTorch"
    return "ready"


def _asked(root: Path, dev: bool) -> list:
    """What an installation depends on."""
    text = requirements(root)
    if dev:
        text += (root / "pyproject.toml").read_text(encoding="utf-8")
    pins = sorted(re.findall(r"[\w-]+==.*", text))
    return [version_of(venv_python(root)), str(root.resolve()), pins]


def requirements(root: Path = ROOT) -> str:
    """The text of requirements.txt. Raises SetupError if it is not there."""
    try:
        return (root / "requirements.txt").read_text(encoding="utf-8")
    except FileNotFoundError:
        why = f"There is no requirements.txt in {root}. The course runs from its clone"
        raise SetupError(f"{why}: clone it again, and start it there") from None


def _packages(root: Path) -> list[str]:
    """Name and version of every package in ``.venv``: "torch-2.14.1+cpu"."""
    folder = site_packages(root)
    return sorted(info.stem for info in folder.glob("*.dist-info")) if folder else []


def version_of(python: Path) -> str:
    """ "3.11" for a Python 3.11; "" if it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return output_of(python, "-I", "-S", "-c", code, timeout=60)


@functools.cache
def find_build(build: str) -> str:
    """``"cpu"`` or ``"cuda"``; ``"auto"`` asks NVIDIA's driver whether it has a GPU."""
    if build != "auto":
        return build
    return "cuda" if "GPU 0:" in output_of("nvidia-smi", "-L", timeout=10) else "cpu"


def torch_index(build: str, system: str = sys.platform) -> str:
    """The index that has this build of PyTorch; "" where it is the one of PyPI."""
    if system == "darwin" or build == {"linux": "cuda"}.get(system, "cpu"):
        return ""
    return f"{os.environ.get('COURSE_TORCH_INDEX', TORCH_INDEX)}/{LOCAL[build]}"


def tool_environment(root: Path) -> dict[str, str]:
    """Environment variables for uv and pip: what they write stays in ``.course``."""
    scratch = str(root / ".course" / "tmp")
    return {
        **{k: v for k, v in os.environ.items() if k not in FOREIGN},
        **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), scratch),
        **dict.fromkeys(("UV_CREDENTIALS_DIR", "UV_PYTHON_INSTALL_DIR"), scratch),
        **{"PIP_NO_INPUT": "1", "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        # pip asks rustc for its version, which may make a folder at home.
        "RUSTUP_HOME": f"{scratch}/rustup",
        # A stopped set-up goes on from there. uv links .venv's files to it.
        "UV_CACHE_DIR": str(root / ".course" / "uv"),
        "PIP_CACHE_DIR": str(root / ".course" / "pip"),
    }


def told_to_pip(python: Path, env: dict[str, str]) -> dict[str, str]:
    """The index and the certificate that pip is told to use, in uv's words."""
    told = output_of(python, "-m", "pip", "config", "list", timeout=60, env=env)
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    values = dict(re.findall(r"\.([\w-]+)='(.*)'$", told, re.MULTILINE))
    return {names[option]: values[option] for option in names if option in values}


class _Setup:
    """One set-up of ``.venv``, with the programs that it runs."""

    def __init__(self, root: Path, lock: IO, wheels: str) -> None:
        self.root, self.lock = root, lock
        self.python = venv_python(root)
        self.tool = "uv"
        self.source: list[str] = []  # options that say where packages come from
        if wheels:
            self.source = ["--no-index", "--find-links", str(Path(wheels).absolute())]
        self.scratch = root / ".course" / "tmp"
        self.env = tool_environment(root)

    def run(self, why: str, dev: bool, build: str) -> None:
        began, received = time.monotonic(), _received()
        requirements(self.root)  # or else it is said before anything takes minutes
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        try:
            build = self.make_venv(why, build)
            self.get_uv()
            if not self.source:
                self.install_pytorch(build)
            say("JupyterLab and the rest:")
            what = ["-r", "requirements.txt", *["-e", ".[dev]"] * dev]
            self.must(*self.add(*self.source, *what), show=True)
            say("Checking that torch and torchvision load together.")
            cuda = probe_torch(self.python, self.root)["cuda"]
            stamp = {"dev": dev, "build": "cuda" if cuda else "cpu"}
            stamp["asked"] = _asked(self.root, dev)
            stamp["packages"] = _packages(self.root)
            part = self.scratch / "stamp"
            part.write_text(json.dumps(stamp))
            os.replace(part, stamp_file(self.root))
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)
        came = (_received() - received) / 1e9
        came = f", {came:.2f} GB received" if came > 0 else ""
        say(f"The course is set up, after {time.monotonic() - began:.0f} s{came}.\n")

    def make_venv(self, why: str, build: str) -> str:
        """Have a ``.venv`` with pip; return the build of PyTorch that it is to have.

        One whose set-up did not come to its end is made anew: a package that was half
        copied would pass for an installed one. All downloads are kept for that.
        """
        venv, stamp = venv_folder(self.root), stamp_file(self.root)
        if stamp.exists() and version_of(self.python):
            say(f"Putting .venv right ({why}).")
            build = json.loads(stamp.read_text())["build"] if build == "auto" else build
            stamp.unlink()
        else:
            needed = sum(SIZES[find_build(build) if sys.platform == "linux" else "cpu"])
            if shutil.disk_usage(self.root).free / 1e9 < needed:
                raise SetupError(_disk_full(self.root, needed))
            say(f"Setting up the course in {self.root}. All of it stays there.")
            if os.path.lexists(venv):
                say(f"Making .venv again ({why}).")
            if venv.is_symlink() or venv.is_file():
                venv.unlink()
            # An environment is not built upon another, but upon the Python of both.
            base = getattr(sys, "_base_executable", "") or sys.executable
            self.must(base, "-m", "venv", "--clear", "--without-pip", venv)
        if not any(name.startswith("pip-") for name in _packages(self.root)):
            # A step of its own: venv does not show what goes wrong in it.
            self.must(self.python, "-I", "-m", "ensurepip", "--upgrade")
        return find_build(build)

    def get_uv(self) -> None:
        """Have uv in ``.venv``, and tell it what pip is told."""
        if not self.has(f"uv-{UV}"):
            pip = (self.python, "-m", "pip", "install")
            code, output = self.call(*pip, *self.source, f"uv=={UV}")
            if code and re.search(_NETWORK, output):
                raise SetupError(explain(output, self.root))
            if code:
                say("uv cannot be had here. pip takes its place, and more time.")
                self.tool = "pip"
        self.env.update(told_to_pip(self.python, self.env))

    def install_pytorch(self, build: str) -> None:
        """Install torch and torchvision of one build, unless they are there."""
        pins = re.findall(r"^torch(?:vision)?==[\w.]+", requirements(self.root), re.M)
        index = torch_index(build)
        exact = [f"{pin}+{LOCAL[build]}" if index else pin for pin in pins]
        if self.has(*(pin.replace("==", "-") for pin in exact)):
            return
        # A local part is no difference for the installers: 2.14.1+cpu would stay.
        options = ["--no-deps", "--force-reinstall"]
        say(f"PyTorch, the {build} build: {SIZES[build][0]} GB with the rest.")
        if index:
            option = "--default-index" if self.tool == "uv" else "--index-url"
            try:
                urllib.request.urlopen(f"{index}/torch/", timeout=10).close()
                command = self.add(*options, option, index, *exact)
                code, output = self.call(*command, show=True)
            except OSError:
                code, output = 1, "Because torch was not found"
            if code == 0:
                return
            if not re.search(_ABSENT, output):  # a network that broke, a full disk
                raise SetupError(explain(output, self.root) or last_line(output))
            if self.has(*(pin.replace("==", "-") for pin in pins)):
                return say(f"{index} does not give it: what is here stays.")
            size = SIZES["cuda" if sys.platform == "linux" else "cpu"][0]
            say(f"{index} does not give it. PyPI's takes its place: {size} GB.")
        self.must(*self.add(*options, *pins), show=True)

    def add(self, *arguments: str) -> list[str | Path]:
        """The command that installs packages."""
        command = {
            "uv": ["uv", "pip", "install", "--python", self.python],
            "pip": ["pip", "install", "--no-compile"],
        }[self.tool]
        return [self.python, "-m", *command, *arguments]

    def has(self, *packages: str) -> bool:
        """Whether all of these are there: "uv-0.13.9"."""
        return set(packages) <= set(_packages(self.root))

    def must(self, *command: str | Path, show: bool = False) -> None:
        """Run a program that has to succeed."""
        code, output = self.call(*command, show=show)
        if code:
            if not (reason := explain(output, self.root)):
                say(output)
            raise SetupError(reason or f"It failed, as written above. Mend it, {AGAIN}")

    def call(self, *command: str | Path, show: bool = False) -> tuple[int, str]:
        """Run a program; return its exit code and output. Show what it downloads."""
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Should we be killed, the next set-up waits until this program has ended.
            pass_fds=() if WINDOWS else (self.lock.fileno(),),
        ) as process:
            output = ""
            try:
                for line in process.stdout:
                    output += line
                    if show and re.match(r"\s*(Downloading|Building)", line):
                        say(f"    {line.strip()}")
            except KeyboardInterrupt:
                process.kill()
                raise
        return process.returncode, output


def _received() -> int:
    """Bytes that came from the network since this computer was started, or 0."""
    with contextlib.suppress(OSError):
        text = Path("/proc/net/dev").read_text()
        found = re.findall(r"^\s*(?!lo:)\S+:\s*(\d+)", text, re.MULTILINE)
        return sum(map(int, found))
    return 0


_NETWORK = (
    r"(?i)connection error:|connection failed|Connection broken|Connection reset"
    r"|Connection refused|Max retries exceeded|NewConnectionError|Timeout|timed out"
    r"|IncompleteRead|incomplete-?download|ProtocolError|RemoteDisconnected"
    r"|name resolution|Network is unreachable|dns error|error sending request"
    r"|Failed to (fetch|download)|end of file before message|DO NOT MATCH THE HASHES"
)
_ABSENT = (
    r"No matching distribution found for (\S+)|no version of ([^\s,]+)"
    r"|Because (\S+) has no (?:usable )?wheels|Because (\S+) was not found"
)


# What uv, pip or venv write, and what it means.
_EXPLAINED = {
    r"No module named '?(?P<name>venv|ensurepip)\b": (
        "This Python {python} has no module {name}, which it takes to make .venv. "
        "Install the package for it ({package}), {again}"
    ),
    r"(?i)CERTIFICATE.VERIFY.FAILED|invalid peer certificate": (
        "The certificate of the server that answered is not trusted; often it is a "
        "proxy's. Name the file with the right one in PIP_CERT, {again}"
    ),
    _NETWORK: (
        "The network failed: the packages could not be downloaded. Check the "
        "connection and the proxy, {again}"
    ),
    _ABSENT: (
        "{name} cannot be found for {where}. The course needs a 64-bit Python 3.10 to "
        "3.14 on Linux, Windows or a Mac with Apple silicon"
    ),
    r"Permission denied|Read-only file system|WinError 5\b": (
        "Cannot write in {root}: the folder must be yours and writable"
    ),
}


def explain(output: str, root: Path = ROOT, where: str = "") -> str:
    """Turn what uv, pip or venv wrote into one line that says what to do, or ''."""
    if re.search(r"(?i)No space left on device|quota exceeded|WinError 112", output):
        return _disk_full(root)
    for pattern, meaning in _EXPLAINED.items():
        if found := re.search(pattern, output):
            return meaning.format(
                python=PYTHON,
                name=next(filter(None, found.groups()), ""),
                package=f"python{PYTHON}-venv" if shutil.which("apt") else "venv",
                again=AGAIN,
                where=where or f"Python {PYTHON} on {platform.platform(terse=True)}",
                root=root,
            )
    return ""


def _disk_full(root: Path, needed: float = sum(SIZES["cuda"])) -> str:
    free = shutil.disk_usage(root).free / 1e9
    return (
        f"The disk is too full: {free:.1f} GB free in {root}, up to {needed:.1f} GB "
        f"needed for the set-up. Free some space, {AGAIN}"
    )


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[IO]:
    """Hold the clone's set-up lock. The system frees it when its holder has gone."""
    path = root / ".course" / "setup.lock"
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as file:
        if not WINDOWS:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another set-up is at work in this folder. Waiting for its end ...")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass  # some network disks know no locks
        yield file
