"""Makes ``.venv`` in the clone, or repairs it: ``ensure()``.

Standard library only, and nothing is written outside the clone. A set-up may be stopped
at any moment, by Ctrl-C or kill -9, and goes on from there the next time; two at once
wait for each other.
"""

import contextlib
import errno
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from course_utils import ROOT
from course_utils.setup.environment import (
    FOREIGN,
    OLDEST,
    WINDOWS,
    Child,
    Requirements,
    SetupError,
    condition,
    dotted,
    last_line,
    probe_torch,
    read_requirements,
    say,
    site_packages,
    stamp_file,
    venv_folder,
    venv_python,
    version_of,
    write_stamp,
)

AGAIN = "then run the same command again"


def ensure(root: Path = ROOT, *, dev: bool = False) -> Path:
    """Return the Python of ``.venv``, ready to use; make or repair it if need be.

    ``dev`` adds what the tests need. A second caller waits until the first is done. A
    ready environment costs about 30 ms and no network. Raises SetupError with the
    reason in one line.
    """
    if condition(root, dev=dev) != "ready":
        with _plain_errors(root), _lock(root) as lock:
            why = condition(root, dev=dev)  # another set-up may just have ended
            if why != "ready":
                _set_up(root, dev, why, lock)
    return venv_python(root)


def _set_up(root: Path, dev: bool, why: str, lock: IO) -> None:
    venv, python = venv_folder(root), venv_python(root)
    size = read_requirements(root)
    scratch = root / ".course" / "tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    tools = _Tools(root, scratch, lock)
    try:
        if os.path.lexists(venv):
            broken = _mend(root, tools)
            if broken:
                say(f".venv is of no use ({broken}): making it again.")
                # Out of the way at once: half a removed environment may look like one.
                os.replace(venv, scratch / "venv")
                _remove(scratch / "venv")
            else:
                say(f"Putting .venv right ({why}).")
        fresh = not venv.exists()
        if fresh:
            check_python()
            _check_disk(root, size)
            say(f"Setting up the course in {root}. All of it stays in this folder.\n")
            say(f"[1/3] Making .venv with Python {dotted(sys.version_info[:3])}.")
            _make_venv(root, tools)
        # From here on it is unfinished, whatever it was before.
        stamp_file(root).unlink(missing_ok=True)
        say(f"{'[2/3]' if fresh else '[1/2]'} {_forecast(size, fresh)}")
        _install(root, dev, tools)
        step = "[3/3]" if fresh else "[2/2]"
        say(f"{step} Checking that torch and torchvision load together.")
        probe_torch(python, root).demand(python, root)
        write_stamp(root, dev=dev)
        say("The course is set up.\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _forecast(size: Requirements, fresh: bool) -> str:
    what = "Installing PyTorch, JupyterLab and the rest"
    if not fresh:
        return f"{what}: only what is missing."
    if not size.download:
        return f"{what}."

    def minutes(megabits: int) -> str:
        # After the download, the installation itself takes about two minutes.
        return f"{2 + round(size.download * 8000 / megabits / 60)} minutes"

    return (
        f"{what}: {size.download:g} GB to download, {size.disk:g} GB on disk.\n"
        f"      About {minutes(100)} at 100 Mbit/s, {minutes(20)} at 20 Mbit/s.\n"
        "      Near the end, while it unpacks, pip may be silent for some minutes."
    )


@dataclass(frozen=True)
class _Tools:
    """Runs the programs of the set-up. All that they write stays in the clone."""

    root: Path
    scratch: Path
    lock: IO

    def run(self, *command: str | Path, show: bool = False) -> tuple[int, str]:
        """Return the exit code and, unless it is shown, what the program printed."""
        env = {k: v for k, v in os.environ.items() if k not in FOREIGN}
        env.update(
            TMPDIR=str(self.scratch),
            TEMP=str(self.scratch),
            TMP=str(self.scratch),
            PIP_NO_CACHE_DIR="1",
            PIP_DISABLE_PIP_VERSION_CHECK="1",
            PIP_NO_INPUT="1",
            PIP_USER="0",
            # pip asks rustc for its version, which may make a folder at home.
            RUSTUP_HOME=str(self.scratch / "rustup"),
        )
        kept = {} if show else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with Child(
            command,
            keep=[self.lock.fileno()],
            cwd=self.root,
            env=env,
            text=True,
            errors="replace",
            **kept,
        ) as child:
            output = child.process.stdout.read() if child.process.stdout else ""
            return child.process.wait(), output


def check_python() -> None:
    """Raise SetupError unless this Python can make an environment with pip in it."""
    lacking = []
    for name in ("venv", "ensurepip"):
        try:
            # Some systems leave an empty folder of that name: a module without a file.
            there = importlib.import_module(name).__file__
        except ImportError:
            there = None
        if there is None:
            lacking.append(name)
    if lacking:
        version = dotted(sys.version_info[:2])
        raise SetupError(
            f"This Python {version} has no module {' and '.join(lacking)}, which it "
            f"takes to make .venv. {_venv_package(version)}, {AGAIN}"
        )


def _venv_package(version: str) -> str:
    family = ""
    with contextlib.suppress(OSError):
        family = Path("/etc/os-release").read_text(errors="replace").lower()
    if re.search(r"^id(_like)?=.*(debian|ubuntu)", family, re.MULTILINE):
        sudo = "" if os.geteuid() == 0 else "sudo "
        return f"Run: {sudo}apt install python{version}-venv"
    return "Install your system's package for it, or a Python that has it"


def _check_disk(root: Path, size: Requirements) -> None:
    free = shutil.disk_usage(root).free / 1e9
    needed = size.download + size.disk
    if free < needed:
        raise SetupError(
            f"The disk is too full: {free:.1f} GB free in {root}, {needed:.1f} GB "
            f"needed for the set-up, {size.disk:g} GB of it for good. Free some space, "
            f"{AGAIN}"
        )


def _mend(root: Path, tools: _Tools) -> str:
    """Make the best of an old ``.venv``; return why it is of no use, or ''."""
    venv, python = venv_folder(root), venv_python(root)
    if venv.is_symlink() or not venv.is_dir():
        return "it is not a folder"
    if (venv / "unfinished").exists():
        return "it was left half-made"
    version = version_of(python)
    if version is None:
        return "its Python does not run"
    if version < OLDEST:
        return f"its Python is {dotted(version)}, and {dotted(OLDEST)} is needed"
    folder = site_packages(root)
    if folder is None:
        return "it has no folder for packages"
    # pip takes a package whose copying was cut short for an installed one. It writes
    # INSTALLER after the last file; "~" marks an old version during an update.
    for info in folder.glob("*.dist-info"):
        if not (info / "INSTALLER").exists():
            _remove(info)
    for old in folder.glob("~*"):
        _remove(old)
    if tools.run(python, "-m", "pip", "--version")[0]:
        tools.run(python, "-I", "-m", "ensurepip", "--upgrade", "--default-pip")
        if tools.run(python, "-m", "pip", "--version")[0]:
            return "it has no pip"
    return ""


def _make_venv(root: Path, tools: _Tools) -> None:
    venv = venv_folder(root)
    venv.mkdir()
    unfinished = venv / "unfinished"
    unfinished.touch()
    # An environment cannot be built upon another, only upon the Python of both.
    base = getattr(sys, "_base_executable", "") or sys.executable
    # Two steps, because venv does not show what goes wrong when it puts pip in.
    for command in (
        (base, "-m", "venv", "--without-pip", venv),
        (venv_python(root), "-I", "-m", "ensurepip", "--upgrade", "--default-pip"),
    ):
        code, output = tools.run(*command)
        if code:
            reason = explain(output, root)
            raise SetupError(reason or f"Cannot make .venv: {last_line(output)}")
    unfinished.unlink()


def _install(root: Path, dev: bool, tools: _Tools) -> None:
    log = root / ".course" / "pip.log"
    log.unlink(missing_ok=True)
    what = ["-r", "requirements.txt"] + (["-e", ".[dev]"] if dev else [])
    pip = [venv_python(root), "-m", "pip", "--log", log]
    code, _ = tools.run(*pip, "install", "--no-compile", *what, show=True)
    if code:
        text = log.read_text(errors="replace") if log.exists() else ""
        raise SetupError(
            explain(text, root)
            or f"pip stopped with exit code {code}. The reason is above, and all that "
            f"it did is in {log.relative_to(root)}. Put it right, {AGAIN}"
        )
    # pip itself compiles on one core. What cannot be compiled says so when imported.
    say("      Compiling them and the course, on all cores.")
    compile_all = ["-m", "compileall", "-qq", "-j", "0", "-x", r"[/\\]tests[/\\]"]
    ours = root / "course_utils"
    tools.run(venv_python(root), *compile_all, site_packages(root), ours)


_NETWORK = (
    r"connection error:|connection failed|Connection broken|Max retries exceeded"
    r"|NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|IncompleteRead"
    r"|IncompleteDownload|incomplete-download|ProtocolError|RemoteDisconnected"
    r"|ConnectionResetError|name resolution|Network is unreachable"
    r"|DO NOT MATCH THE HASHES"
)


def explain(output: str, root: Path = ROOT) -> str:
    """Turn what pip or venv wrote into one line that says what to do, or ''."""
    version = dotted(sys.version_info[:2])

    def said(pattern: str) -> re.Match | None:
        return re.search(pattern, output, re.IGNORECASE)

    if said(r"No space left on device|quota exceeded|WinError 112"):
        return _disk_full(root)
    if said(r"ensurepip is not available"):
        return (
            f"This Python {version} cannot put pip into .venv. "
            f"{_venv_package(version)}, {AGAIN}"
        )
    if said(r"ssl module in Python is not available"):
        return (
            f"This Python {version} was built without ssl and cannot download "
            "anything: use another Python"
        )
    if said(r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
        return (
            "pip does not trust the certificate of the server that answered, often a "
            f"proxy's. Name the file with the right one in PIP_CERT, {AGAIN}"
        )
    if said(_NETWORK):
        return (
            "The network failed: pip could not download the packages. Check the "
            f"connection and the proxy, {AGAIN}"
        )
    if said(r"Ignoring indexes:"):
        return (
            "pip is told to look for packages on this computer only (no-index, in "
            f"PIP_NO_INDEX or in its settings). Take that away, {AGAIN}"
        )
    if missing := said(r"No matching distribution found for (.+)"):
        bits = "" if sys.maxsize > 2**32 else ", 32 bit"
        return (
            f"{missing[1].strip()} does not exist for Python {version} on "
            f"{platform.system()} ({platform.machine()}{bits}). The course needs a "
            "64-bit Python 3.10 to 3.14 on Linux, Windows or a Mac with Apple silicon"
        )
    if said(r"Permission denied|WinError 5\b"):
        return f"Cannot write in {root}: its files must belong to you"
    return ""


def _disk_full(root: Path) -> str:
    free = shutil.disk_usage(root).free / 1e9
    size = read_requirements(root)
    needed = f"{size.download + size.disk:.1f} GB are" if size.disk else "more is"
    return (
        f"The disk is full: {free:.1f} GB free in {root}, {needed} needed for the "
        f"whole set-up. Free some space, {AGAIN}"
    )


@contextlib.contextmanager
def _plain_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SetupError(_disk_full(root)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise SetupError(
                f"Cannot write {error.filename or root}: the course's folder must be "
                "yours and writable"
            ) from error
        raise


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[IO]:
    """Hold the clone's set-up lock. The system frees it when its holder has gone."""
    path = root / ".course" / "setup.lock"
    path.parent.mkdir(exist_ok=True)
    with open(path, "w") as file:
        if not _try_lock(file):
            say("Another set-up is at work in this folder. Waiting for its end ...")
            while not _try_lock(file):
                time.sleep(0.2)
        yield file


def _try_lock(file: IO) -> bool:
    try:
        if WINDOWS:
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network disks know no locks: better without one than not at all.
        return error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
