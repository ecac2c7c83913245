"""``python3 -m course_utils start``: JupyterLab, on this computer only.

Standard library only, up to the moment when this process becomes JupyterLab.
"""

import argparse
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from course_utils import ROOT
from course_utils.setup.environment import (
    WINDOWS,
    SetupError,
    course_environment,
    replace_process,
    say,
)
from course_utils.setup.installer import ensure

FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"
HOST = "127.0.0.1"

# Without these settings JupyterLab asks the network for news of itself, and its server
# runs npm, rustup and others, which write to the home folder, to see which language
# servers there are. The glossary would open as source, and long lines of output would
# break inside of words.
SETTINGS = Path(__file__).with_name("jupyter")


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Set the course up if need be, then become JupyterLab. Does not return."""
    began = time.time()
    options = _parser().parse_args(argv)
    # What can be wrong is found before anything takes minutes.
    check_port(options.port or 0)
    python = ensure(root, build=options.torch, wheels=options.wheels)
    env = course_environment(python, root)
    env["COURSE_STARTED"] = str(began)
    shutil.copytree(SETTINGS, env["JUPYTER_CONFIG_DIR"], dirs_exist_ok=True)
    command = [str(python), "-m", "jupyterlab", "-y", "--custom-css"]
    command += [f"--ServerApp.ip={HOST}", f"--ServerApp.root_dir={root}"]
    command += [f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK}"]
    if options.port is not None:
        command += [f"--ServerApp.port={options.port}", "--ServerApp.port_retries=0"]
    if options.no_browser or not _has_screen():
        command.append("--no-browser")
    if not WINDOWS and os.geteuid() == 0:
        command.append("--allow-root")  # as in a container
    replace_process(command, env)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils start",
        description="Open the course in JupyterLab. The first time, this makes .venv "
        "in the course's folder and installs there what the course needs.",
    )
    add = parser.add_argument
    add("--no-browser", action="store_true", help="only print the address")
    add("--port", type=int, metavar="N", help="the port (default: 8888, or a free one)")
    add(
        "--torch",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="the build of PyTorch (default: cuda if there is an NVIDIA GPU, else cpu)",
    )
    add("--wheels", metavar="FOLDER", default="", help="install from there, offline")
    return parser


def check_port(port: int) -> None:
    """Raise SetupError if nothing can listen there; 0 stands for any free one."""
    try:
        socket.create_server((HOST, port)).close()
    except OverflowError as error:
        raise SetupError(f"--port {port}: {error}") from None
    except OSError as error:
        why = os.strerror(error.errno)
        raise SetupError(f"--port {port}: {why}. Take another, or none") from None


def _has_screen() -> bool:
    """Whether a browser can show a window: a text browser would take the terminal."""
    names = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.platform != "linux" or any(os.environ.get(name) for name in names)


def _load_jupyter_server_extension(server) -> None:  # in JupyterLab's process
    """JupyterLab says its address; we say that it is up, and after how long."""

    def up() -> None:
        seconds = time.time() - float(os.environ["COURSE_STARTED"])
        say(
            f"JupyterLab is up, {seconds:.1f} s after the start. Only this computer "
            "can reach it. Press Ctrl-C here to stop it."
        )

    server.io_loop.add_callback(up)
