"""Where the course lives, and the Python environment that it runs in.

The environment is ``.venv`` in the clone; ``installer.py`` makes it. Here is
what it should hold, whether it does, and how to go there. The standard library alone is
used, because this runs before anything is installed. Nothing is written outside the
clone.

A stamp inside ``.venv`` says that the set-up came to its end, for which requirements,
and which packages it left. It is written last, and at once.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from course_utils import ROOT, shown

START = "python3 -m course_utils start"
TEST = "python3 -m course_utils test"  # sets up what the tests need, too
OLDEST = (3, 10)
WINDOWS = os.name == "nt"

# These would lead the course's Python, pip or Jupyter out of the clone.
FOREIGN = (
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "__PYVENV_LAUNCHER__",
    "JUPYTER_PATH",
    "JUPYTER_CONFIG_PATH",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_LOG",
    "PIP_CACHE_DIR",
)


class SetupError(Exception):
    """Why the course cannot be set up or started: one line that says what to do."""


def venv_folder(root: Path = ROOT) -> Path:
    """The folder of the course's own environment."""
    return root / ".venv"


def venv_python(root: Path = ROOT) -> Path:
    """The Python of the course's own environment, whether it is there or not."""
    where = "Scripts/python.exe" if WINDOWS else "bin/python"
    return venv_folder(root) / where


def site_packages(root: Path = ROOT) -> Path | None:
    """The folder of the packages in ``.venv``, or None if there is none."""
    where = "Lib/site-packages" if WINDOWS else "lib/python*/site-packages"
    return next(iter(sorted(venv_folder(root).glob(where))), None)


def course_environment(root: Path = ROOT, *, venv: bool = True) -> dict[str, str]:
    """Environment variables for the course's processes.

    They keep every file that Jupyter, IPython, matplotlib and torch write inside
    ``.course``. With ``venv``, programs are looked up in ``.venv`` first; without,
    beside the current Python, and modules in this clone first.
    """
    env = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    state = root / ".course"
    jupyter = state / "jupyter"
    places = {
        "JUPYTER_CONFIG_DIR": jupyter / "config",
        "JUPYTER_DATA_DIR": jupyter / "data",
        "JUPYTER_RUNTIME_DIR": jupyter / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": jupyter / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": jupyter / "workspaces",
        "IPYTHONDIR": state / "ipython",
        "MPLCONFIGDIR": state / "matplotlib",
        "SCIKIT_LEARN_DATA": state / "data" / "scikit-learn",
        "TORCH_HOME": state / "torch",
        "TORCHINDUCTOR_CACHE_DIR": state / "torch" / "inductor",
        "TRITON_CACHE_DIR": state / "torch" / "triton",
        "CUDA_CACHE_PATH": state / "torch" / "cuda",
    }
    env.update({name: str(path) for name, path in places.items()})
    # A learner may have a kernel of the same name: the environment's own comes first.
    env["JUPYTER_PREFER_ENV_PATH"] = "1"
    if venv:
        env["VIRTUAL_ENV"] = str(venv_folder(root))
        programs = venv_python(root).parent
    else:
        inherited = os.environ.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), inherited]))
        programs = Path(sys.executable).parent
    env["PATH"] = os.pathsep.join(filter(None, [str(programs), env.get("PATH")]))
    return env


# What is asked for, and what is there


@dataclass(frozen=True)
class Requirements:
    """What the course asks for, on one version of Python and on this system."""

    pins: dict[str, str] = field(default_factory=dict)  # name -> version
    download: float = 0.0  # GB; 0 if not known
    disk: float = 0.0  # GB, once installed; 0 if not known


_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)\s*==\s*(?P<version>[^\s;,]+)"
    r"(?:\s*;\s*python_version\s*(?P<sign><|>=)\s*['\"]3\.(?P<minor>\d+)['\"])?\s*"
)
_SIZE = re.compile(
    r"# On (?P<system>.+): (?P<download>[\d.]+) GB to download, (?P<disk>[\d.]+) GB"
)


def read_requirements(
    root: Path = ROOT, *, dev: bool = False, version: tuple[int, int] | None = None
) -> Requirements:
    """Read the pins that hold for Python ``version`` (default: this one).

    They are those of requirements.txt, and with ``dev`` those of pyproject.toml's dev
    extra; ``-e .`` is none. Raises SetupError if a file is missing or a line cannot
    be read.
    """
    minor = (version or sys.version_info)[1]
    sizes: dict[str, tuple[float, float]] = {}
    wanted = []
    for line in _read(root / "requirements.txt").splitlines():
        if size := _SIZE.match(line):
            sizes[size["system"]] = float(size["download"]), float(size["disk"])
        bare = line.partition("#")[0].strip()
        if bare and not bare.startswith("-e"):
            wanted.append(bare)
    if dev:
        wanted += _dev_pins(root)
    pins = {}
    for line in wanted:
        pin = _PIN.fullmatch(line)
        if pin is None:
            raise SetupError(f"requirements: {line!r} is no pin like name==1.0")
        if pin["sign"] is None or (minor < int(pin["minor"])) == (pin["sign"] == "<"):
            pins[_plain_name(pin["name"])] = pin["version"]
    system = "Linux" if sys.platform == "linux" else "macOS and Windows"
    return Requirements(pins, *sizes.get(system, (0.0, 0.0)))


def _dev_pins(root: Path) -> list[str]:
    # Python 3.10 has no reader for this format, so the one list is read by its shape.
    text = _read(root / "pyproject.toml")
    extra = re.search(r"^dev = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    quoted = r"^\s*([\"'])(.*?)\1,?\s*$"
    found = re.findall(quoted, extra[1] if extra else "", re.MULTILINE)
    return [pin for _, pin in found]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SetupError(
            f"{path.name} is not in {path.parent}. The course runs from its own "
            "folder: clone it again, and start it there"
        ) from None


def installed(folders: Iterable[str | Path]) -> dict[str, str]:
    """Name and version of every package found in these folders."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions(path=[str(f) for f in folders]):
        facts = package.metadata
        if facts["Name"]:
            found.setdefault(_plain_name(facts["Name"]), facts["Version"] or "")
    return found


def compare(
    wanted: Mapping[str, str], have: Mapping[str, str]
) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Return the names that are missing, and (name, pin, version) where they differ.

    A local part of a version (``+cpu``) makes no difference.
    """
    missing = [name for name in wanted if name not in have]
    other = [
        (name, pin, have[name])
        for name, pin in wanted.items()
        if name in have and have[name].partition("+")[0] != pin
    ]
    return missing, other


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# The stamp


def stamp_file(root: Path = ROOT) -> Path:
    """The file that says what the finished set-up left."""
    return venv_folder(root) / "course-stamp.json"


def condition(root: Path = ROOT, *, dev: bool = False) -> str:
    """``"ready"``, or why ``.venv`` is not: a few words for a message. About 30 ms."""
    if not venv_folder(root).exists():
        return "not made yet"
    version = version_of(venv_python(root))
    if version is None:
        return "its Python does not run"
    try:
        stamp = json.loads(stamp_file(root).read_text())
        if dev and "dev" not in stamp:
            return "what the tests need is not in it yet"
        entry = stamp["dev" if dev else "base"]
        fingerprint, packages = entry["fingerprint"], set(entry["packages"])
    except (OSError, ValueError, KeyError, TypeError):
        return "its set-up has not come to its end"
    if fingerprint != _fingerprint(root, version, dev):
        return "the requirements, the Python or the folder have changed"
    if gone := packages - set(_packages(root)):
        names = ", ".join(sorted(name.removesuffix(".dist-info") for name in gone))
        return f"packages were removed or changed: {names}"
    return "ready"


def write_stamp(root: Path = ROOT, *, dev: bool = False) -> None:
    """Say that the set-up has come to its end."""
    version = version_of(venv_python(root))
    if version is None:
        raise SetupError(f"{venv_python(root)} does not run: {START}")
    # What the tests need includes all that the course needs.
    sets = {"base": False, "dev": True} if dev else {"base": False}
    packages = _packages(root)
    entries = {
        name: {"fingerprint": _fingerprint(root, version, extra), "packages": packages}
        for name, extra in sets.items()
    }
    stamp = stamp_file(root)
    part = stamp.with_suffix(".part")
    part.write_text(json.dumps(entries))
    os.replace(part, stamp)


def _fingerprint(root: Path, version: tuple[int, int], dev: bool) -> str:
    """Changes when an installation is due: other pins, another Python or place."""
    text = _read(root / "pyproject.toml")
    tables = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    matter = ["[build-system]", "[project]"]
    matter += ["[project.optional-dependencies]"] if dev else []
    kept = "".join(table for table in tables if table.startswith(tuple(matter)))
    lines = (_read(root / "requirements.txt") + kept).splitlines()
    bare = [line.strip() for line in lines if not line.lstrip().startswith("#")]
    facts = [version, str(root.resolve()), [line for line in bare if line]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _packages(root: Path) -> list[str]:
    folder = site_packages(root)
    return sorted(path.name for path in folder.glob("*.dist-info")) if folder else []


def version_of(python: Path) -> tuple[int, int] | None:
    """(3, 11) for a Python 3.11; None if it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", code],
            check=False,
            capture_output=True,
            timeout=60,
        )
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


# torch and torchvision

_PROBE = """
import json, importlib.metadata
facts = {"torch": "", "torchvision": "", "error": ""}
for name in ("torch", "torchvision"):
    try:
        facts[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    import torch, torchvision
except BaseException as error:
    facts["error"] = f"{type(error).__name__}: {error}"
else:
    import torch.distributed as dist
    available = dist.is_available()
    facts["gloo"] = available and dist.is_gloo_available()
    facts["nccl"] = available and dist.is_nccl_available()
    facts["cuda"] = torch.version.cuda or ""
    facts["gpus"] = torch.cuda.device_count()
print()
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Torch:
    """What importing torch and torchvision in some Python showed."""

    torch: str = ""  # version; "" if not installed
    torchvision: str = ""
    error: str = ""  # why they do not load; "" if they do
    gloo: bool = False
    nccl: bool = False
    cuda: str = ""  # the CUDA version torch was built for; "" for a CPU build
    gpus: int = 0  # that torch can use

    def trouble(self, python: Path, root: Path = ROOT) -> tuple[str, str]:
        """What is wrong, and the command that puts it right; ("", "") if nothing is."""
        pins = read_requirements(root).pins
        # "===" takes no build with a local part, such as 2.14.1+cpu. Where the right
        # versions are there already, only force makes pip install them anew.
        pair = [f"{name}==={pins[name]}" for name in ("torch", "torchvision")]
        right = (pins["torch"], pins["torchvision"]) == (self.torch, self.torchvision)
        command = [shown(python, root), "-m", "pip", "install"]
        fix = shlex.join([*command, *["--force-reinstall"] * right, *pair])
        absent = [n for n in ("torch", "torchvision") if not getattr(self, n)]
        if absent:
            where = shown(python, root)
            return f"{where} has no {' and no '.join(absent)}", fix
        have = f"torch {self.torch} cannot load torchvision {self.torchvision}"
        if "torchvision::nms" in self.error:
            return (
                f"{have}: they come from different builds, as when the CPU build of "
                "torch meets the ordinary torchvision"
            ), fix
        if self.error:
            return f"{have}: {last_line(self.error)}", fix
        return "", ""

    def demand(self, python: Path, root: Path = ROOT) -> None:
        """Raise SetupError if the pair does not load."""
        wrong, fix = self.trouble(python, root)
        if wrong:
            raise SetupError(f"{wrong}. Put it right with: {fix}")


def probe_torch(
    python: Path, root: Path = ROOT, *, venv: bool = True, timeout: float = 180.0
) -> Torch:
    """Import torch and torchvision in a process of ``python``: about 4 s.

    Whatever goes wrong there, a crash too, comes back in ``error``.
    """
    try:
        done = subprocess.run(
            [str(python), "-W", "ignore", "-c", _PROBE],
            check=False,
            cwd=root,
            env=course_environment(root, venv=venv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return Torch("?", "?", f"importing them took more than {timeout:.0f} s")
    except OSError as error:
        return Torch("?", "?", f"{python} does not run: {error}")
    try:
        return Torch(**json.loads(last_line(done.stdout)))
    except (ValueError, TypeError):
        end = done.returncode
        how = signal.Signals(-end).name if end < 0 else f"exit code {end}"
        return Torch("?", "?", f"importing them ended Python with {how}")


# Going there


def current_environment(root: Path = ROOT) -> Path:
    """Return this Python after checking that the course can run in it.

    Raises SetupError if packages are missing or torch cannot load torchvision. Another
    version than the pinned one is said, and allowed.
    """
    python = Path(sys.executable)
    missing, other = compare(read_requirements(root).pins, installed(sys.path))
    if missing:
        raise SetupError(
            f"This Python ({python}) lacks {', '.join(missing)}. Leave out --no-venv, "
            f"or run: {shlex.quote(str(python))} -m pip install -r requirements.txt"
        )
    if other:
        shown = ", ".join(f"{name} {there} ({pin})" for name, pin, there in other)
        say(f"Not the versions that the course is tested with (in brackets): {shown}.")
    probe_torch(python, root, venv=False).demand(python, root)
    return python


def enter(argv: Sequence[str], root: Path = ROOT, *, dev: bool = False) -> None:
    """Run again in ``.venv`` if it has what the course needs; else stay, if this has.

    ``argv`` is the command of course_utils to run there; with ``dev`` it needs what the
    tests need. Raises SetupError, which names the command that sets it up, if a package
    is missing in both.
    """
    pins = read_requirements(root, dev=dev).pins
    inside = Path(sys.prefix).resolve() == venv_folder(root).resolve()
    elsewhere = None if inside else site_packages(root)
    have = installed([elsewhere] if elsewhere else sys.path)
    if missing := compare(pins, have)[0]:
        # A set-up that was stopped may be there beside an environment of one's own.
        if elsewhere and not compare(pins, installed(sys.path))[0]:
            return
        raise SetupError(
            f"The course is not set up: {missing[0]} is missing. Run first: "
            + (TEST if dev else START)
        )
    if elsewhere:
        command = [str(venv_python(root)), "-m", "course_utils", *argv]
        replace_process(command, course_environment(root))


def replace_process(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Become another program: its output, signals and exit code are then ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not WINDOWS:
        os.execve(command[0], command, env)
    sys.exit(subprocess.call(command, env=env))


# On Unix a program runs under a guard, which ends the whole group when we have gone,
# even by kill -9: it then reads the end of a pipe that nobody else holds.
_GUARD = """
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(
    sys.argv[2:],
    stdin=subprocess.DEVNULL,
    preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
)
stopping = threading.Event()
def watch():
    os.read(int(sys.argv[1]), 1)
    stopping.set()
    os.killpg(0, signal.SIGTERM)
    try:
        child.wait(10)
    finally:
        os.killpg(0, signal.SIGKILL)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
code = child.wait()
if stopping.is_set():
    watcher.join()
sys.exit(code if code >= 0 else 128 - code)
"""


class Child:
    """A running program that does not outlive us, nor does anything that it starts.

    Leaving the ``with`` block stops it: SIGTERM, and SIGKILL after ten seconds. Ctrl-C
    reaches us only. ``keep`` are descriptors that stay open until all of it has ended.
    """

    def __init__(
        self, command: Sequence[str | Path], *, keep: Sequence[int] = (), **options
    ) -> None:
        command = [str(part) for part in command]
        self._pipe = None
        if WINDOWS:
            options.setdefault("stdin", subprocess.DEVNULL)
            self.process = subprocess.Popen(command, **options)
            return
        watched, self._pipe = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(watched), *command],
            stdin=subprocess.DEVNULL,
            pass_fds=[watched, *keep],
            start_new_session=True,
            **options,
        )
        os.close(watched)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pipe is None:
            self.process.terminate()
        else:
            os.close(self._pipe)
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


# Small things


def dotted(version: Sequence[int]) -> str:
    """ "3.11" for (3, 11)."""
    return ".".join(map(str, version))


def last_line(text: str) -> str:
    """The last line that is not empty, without its full stop."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "no reason was given"


def say(text: str) -> None:
    """Print at once: the programs that follow write to the same terminal."""
    print(text, flush=True)
