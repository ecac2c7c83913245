"""``python3 -m course_utils start``: JupyterLab, on this computer only.

Standard library only: JupyterLab itself runs in the course's environment.
"""

import argparse
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from course_utils import ROOT
from course_utils.setup.environment import (
    WINDOWS,
    Child,
    SetupError,
    course_environment,
    current_environment,
    last_line,
    say,
)
from course_utils.setup.installer import ensure

FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"
USUAL_PORT = 8888
HOST = "127.0.0.1"
PATIENCE = 90.0  # seconds until JupyterLab must answer; 3 are usual

# What would reach out of the clone: JupyterLab asks the network for news of itself, and
# its server runs npm, rustup and others, which write to the home folder, to see which
# language servers there are. And the glossary is to be read, not its source. (Texts are
# written as they are.) JupyterLab breaks long lines of output inside of words.
_SETTINGS = {
    "labconfig/default_setting_overrides.json": {
        "@jupyterlab/apputils-extension:notification": {
            "fetchNews": "false",
            "checkForUpdates": False,
        },
        "@jupyterlab/docmanager-extension:plugin": {
            "defaultViewers": {"markdown": "Markdown Preview"}
        },
    },
    "jupyter_server_config.json": {"LanguageServerManager": {"autodetect": False}},
    "custom/custom.css": "body .jp-OutputArea-output pre { word-break: normal; }\n",
}


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Set the course up if need be, then run JupyterLab until it is stopped."""
    options = _parser().parse_args(argv)
    target = find_target(options.here, root)
    # Before anything takes minutes: a port that cannot be had is found at once.
    port = choose_port(options.port)
    python = current_environment(root) if options.no_venv else ensure(root)
    return run_lab(
        python,
        root,
        target=target,
        port=port if _is_free(port) else choose_port(options.port),
        browser=not options.no_browser,
        venv=not options.no_venv,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils start",
        description="Open the course in JupyterLab. The first time, this makes .venv "
        "in the course's folder and installs there what the course needs.",
    )
    parser.add_argument(
        "--no-browser",
        action="store_true",
        help="only print the address; open it yourself",
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help=f"the port to listen on (default: {USUAL_PORT} or the next free one)",
    )
    parser.add_argument(
        "--no-venv",
        action="store_true",
        help="use the current environment, as it is, after checking it",
    )
    parser.add_argument(
        "--here",
        metavar="PATH",
        help="open this notebook or folder of the course instead of the first notebook",
    )
    return parser


def find_target(here: str | None, root: Path) -> str:
    """Return what to open, as a path from ``root``; "" is the course's folder itself.

    ``here`` is looked up from the current folder, then from ``root``. Raises SetupError
    if it does not exist or lies outside the course.
    """
    if here is None:
        return FIRST_NOTEBOOK if (root / FIRST_NOTEBOOK).exists() else ""
    asked = Path(here).expanduser()
    found = next((p for p in (Path.cwd() / asked, root / asked) if p.exists()), None)
    if found is None:
        raise SetupError(f"--here {here}: there is no such notebook or folder")
    path = found.resolve()
    if not path.is_relative_to(root.resolve()):
        raise SetupError(
            f"--here {here}: it must lie in the course's folder, {root.resolve()}"
        )
    inside = path.relative_to(root.resolve())
    if any(part.startswith(".") for part in inside.parts):
        raise SetupError(f"--here {here}: JupyterLab does not open hidden folders")
    return "" if inside == Path() else inside.as_posix()


def choose_port(asked: int | None) -> int:
    """Return the port asked for, or a free one. Raises SetupError if it is not free."""
    if asked is None:
        usual = range(USUAL_PORT, USUAL_PORT + 50)
        return next((port for port in usual if _is_free(port)), 0) or _any_port()
    if not 0 <= asked <= 65535:
        raise SetupError(f"--port {asked}: ports are 0 (any free one) to 65535")
    if asked == 0:
        return _any_port()
    try:
        _bind(asked)
    except OSError as error:
        if error.errno == errno.EACCES:
            raise SetupError(
                f"--port {asked}: only an administrator may use it; take 1024 or more"
            ) from None
        raise SetupError(
            f"--port {asked}: another program uses it; take another or leave --port out"
        ) from None
    return asked


def _bind(port: int) -> int:
    with socket.socket() as listener:
        if not WINDOWS:
            # Jupyter does so too: a port that was just given back is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        return listener.getsockname()[1]


def _is_free(port: int) -> bool:
    try:
        return bool(_bind(port))
    except OSError:
        return False


def _any_port() -> int:
    return _bind(0)


def lab_command(python: Path, root: Path, *, target: str, port: int) -> list[str]:
    """The command that runs JupyterLab.

    The token is not in it but in JUPYTER_TOKEN: all users of a machine see commands.
    """
    command = [
        str(python),
        *("-m", "jupyterlab", "--no-browser", "--custom-css", "--log-level=WARN"),
        f"--ServerApp.ip={HOST}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url={_page(target)}",
    ]
    if not WINDOWS and os.geteuid() == 0:
        command.append("--allow-root")  # as in a container
    return command


def _page(target: str) -> str:
    return f"/lab/tree/{quote(target)}" if target else "/lab"


def run_lab(
    python: Path,
    root: Path,
    *,
    target: str,
    port: int,
    browser: bool = True,
    venv: bool = True,
) -> int:
    """Run JupyterLab until Ctrl-C, a signal or its own menu stops it.

    Returns the exit code: 0 after a stop that was asked for. What JupyterLab says is in
    ``.course/jupyter/lab-PORT.log``. Raises SetupError if it does not come up.
    """
    began = time.monotonic()
    token = secrets.token_hex(24)
    env = course_environment(root, venv=venv)
    env["JUPYTER_TOKEN"] = token
    _settle(Path(env["JUPYTER_CONFIG_DIR"]))
    log = root / ".course" / "jupyter" / f"lab-{port}.log"
    with (
        open(log, "w") as output,
        _signals_stop_us(),
        Child(
            lab_command(python, root, target=target, port=port),
            cwd=root,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as server,
    ):
        try:
            _wait_until_up(server, port, token, log, root)
            address = f"http://{HOST}:{port}{_page(target)}?token={token}"
            opened = browser and _open(address)
            say(
                f"JupyterLab is up after {time.monotonic() - began:.1f} s"
                f"{' and opens in your browser' if opened else ''}:\n\n"
                f"    {address}\n\n"
                "Only this computer can reach it. Press Ctrl-C here to stop it."
            )
            code = server.process.wait()
        except KeyboardInterrupt:
            code = 0
    if code:
        raise SetupError(f"JupyterLab ended with exit code {code}: {_said(log, root)}")
    say("JupyterLab has stopped. What you saved is in this folder.")
    return 0


def _settle(config: Path) -> None:
    """Write the settings that keep JupyterLab in the clone and off the network."""
    for name, settings in _SETTINGS.items():
        path = config / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_text = isinstance(settings, str)
        path.write_text(settings if is_text else json.dumps(settings, indent=2) + "\n")


@contextlib.contextmanager
def _signals_stop_us() -> Iterator[None]:
    """A signal to end, or a closed terminal, does the same as Ctrl-C."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    names = ("SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_until_up(server: Child, port: int, token: str, log: Path, root: Path) -> None:
    # Asking with the token makes sure that it is this server which answers. A proxy
    # that the environment names must not see it.
    ask = urllib.request.Request(
        f"http://{HOST}:{port}/api/status", headers={"Authorization": f"token {token}"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise SetupError(f"JupyterLab did not start: {_said(log, root)}")
        with contextlib.suppress(OSError):
            direct.open(ask, timeout=5).close()
            return
        time.sleep(0.1)
    raise SetupError(
        f"JupyterLab did not answer within {PATIENCE:.0f} s: {_said(log, root)}"
    )


def _said(log: Path, root: Path) -> str:
    last = last_line(log.read_text(errors="replace"))
    return f"{last} (all it said: {log.relative_to(root)})"


def _open(address: str) -> bool:
    """Open the address in a browser window; never a text browser in this terminal."""
    if sys.platform == "linux" and not any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    ):
        return False
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
