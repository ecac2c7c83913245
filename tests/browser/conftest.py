"""A real browser on a real JupyterLab, for the tests in this folder.

One server and one browser serve all of them. The server keeps its configuration, its
kernels' files and the learner's progress in a temporary folder, and listens on
127.0.0.1 only. The browser is the Chromium or Chrome of this machine
(COURSE_BROWSER names another); nothing is downloaded. Screenshots are for people: they
go to the folder that COURSE_SCREENSHOTS names, if it names one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import nbformat
import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Locator,
    Page,
    expect,
    sync_playwright,
)

from course_utils import ROOT
from course_utils.ranks.zygote import PR_SET_PDEATHSIG, prctl

START_SECONDS = 60
WAIT_SECONDS = 30  # for anything in a page; the machine may be busy with other tests
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
FLAGS = (
    "--no-sandbox",  # Chromium refuses to run as root, as in most containers, with one
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
)
NO_BROWSER = (
    "NO BROWSER: the tests in tests/browser did not run. Install Chromium or Chrome "
    "(Debian: apt install chromium), or set COURSE_BROWSER to its program."
)
# A notebook is ready when its kernel answers. The "idle" sign of a fresh kernel comes
# too early: a Run All clicked then is lost now and then.
READY = """async () => {
  const app = window.jupyterapp;
  await app.restored;
  let panel;
  for (let i = 0; i < 600 && !(panel = app.shell.currentWidget)?.sessionContext; i++)
    await new Promise((done) => setTimeout(done, 50));
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
}"""
# A new page would load all of JupyterLab again: five seconds of a processor.
SHOW = """async (path) => {
  const app = window.jupyterapp;
  [...app.shell.widgets("main")].forEach((widget) => widget.dispose());
  await app.commands.execute("docmanager:open", {path});
}"""
# What JupyterLab says of itself while a kernel restarts.
JUPYTERLAB_SAYS = ("Could not restore the debugger state", "Canceled future for")
# Playwright waits for a promise for ever; this gives up.
WITH_LIMIT = """([seconds, source, argument]) => Promise.race([
  eval(source)(argument).then(() => null),
  new Promise((_, fail) => setTimeout(
    () => fail(new Error(`not done after ${seconds} s: ${source}`)), 1000 * seconds)),
])"""


def _find_browser() -> str | None:
    named = os.environ.get("COURSE_BROWSER")
    if named:
        return named
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (MACOS if Path(MACOS).exists() else None)


def pytest_terminal_summary(terminalreporter) -> None:
    if _find_browser() is None:
        terminalreporter.section("skipped", red=True)
        terminalreporter.line(NO_BROWSER)


def _others(node: dict) -> list[str]:
    """The elements that axe-core names beside the one that is wrong."""
    return [
        related["html"]
        for check in (*node["any"], *node["all"], *node["none"])
        for related in check["relatedNodes"]
    ]


class Lab:
    """A running JupyterLab: its address, its token and the folder it serves."""

    def __init__(self, url: str, token: str, folder: Path, state: Path) -> None:
        self.url, self.token, self.folder, self.state = url, token, folder, state

    def end_kernels(self) -> None:
        """End the kernels of all notebooks: they outlive their pages."""
        for session in json.loads(self._ask("GET", "api/sessions")):
            self._ask("DELETE", f"api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        header = {"Authorization": f"token {self.token}"}
        asked = Request(self.url + path, headers=header, method=method)
        with urlopen(asked, timeout=30) as reply:
            return reply.read()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The server that all browser tests share."""
    if _find_browser() is None:
        pytest.skip(NO_BROWSER)
    home = tmp_path_factory.mktemp("lab")
    folder, state, runtime = home / "work", home / "state", home / "runtime"
    settings = home / "settings"
    for one in (folder, runtime, settings):
        one.mkdir()
    overrides = {
        # Every cell stays in the page, also those out of sight.
        "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
        "@jupyterlab/apputils-extension:notification": {
            "fetchNews": "false",
            "checkForUpdates": False,
        },
    }
    (settings / "overrides.json").write_text(json.dumps(overrides))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COURSE_STATE": str(state),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "user-settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_PREFER_ENV_PATH": "1",
    }
    # The kernels are a learner's here: they save answers.
    for name in ("PYTEST_CURRENT_TEST", "CI"):
        environment.pop(name, None)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--expose-app-in-browser", "--ServerApp.ip=127.0.0.1"),
        *(f"--ServerApp.root_dir={folder}", f"--LabApp.app_settings_dir={settings}"),
    ]
    log = home / "server.log"
    with open(log, "wb") as out:
        server = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=out,
            stderr=out,
            # With several test processes Ctrl-C kills them. Linux then ends it, too.
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    try:
        info = _wait_for_server(server, runtime, log)
        yield Lab(info["url"], info["token"], folder, state)
    finally:
        _stop(server)


def _wait_for_server(server: subprocess.Popen, runtime: Path, log: Path) -> dict:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        for file in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError):  # it is being written
                return json.loads(file.read_text())
        time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


def _stop(server: subprocess.Popen) -> None:
    """End the server and its kernels; SIGTERM lets it end them itself."""
    if server.poll() is not None:
        return
    family = psutil.Process(server.pid).children(recursive=True)
    server.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(15)
    for process in [*psutil.wait_procs(family, timeout=2)[1], server]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait()


@pytest.fixture(scope="package")
def browser(lab: Lab) -> Iterator[Browser]:
    """The browser that all browser tests share.

    Not of the whole session: while Playwright runs, this thread has a running event
    loop, and other tests (nbval) need one of their own.
    """
    expect.set_options(timeout=1000 * WAIT_SECONDS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=_find_browser(), args=list(FLAGS)
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def window(browser: Browser) -> Iterator[BrowserContext]:
    """What the pages of all tests share: a cache, so that each opens sooner."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    yield context
    context.close()


@pytest.fixture
def open_notebook(
    lab: Lab, window: BrowserContext, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Notebook]]:
    """A function that opens a notebook, once in a test.

    It takes the sources of the cells, or the path of a notebook, which is copied. The
    learner's progress is empty at the start of each test. When the test is over, no
    page may have sent a request beyond the server. The next test goes on in the same
    page, unless this one leaves a question of JupyterLab unanswered.
    """
    shutil.rmtree(lab.state, ignore_errors=True)
    opened: list[Notebook] = []
    outside: list[str] = []

    def note_outside(sent) -> None:
        if urlsplit(sent.url).hostname not in (None, "127.0.0.1", "localhost"):
            outside.append(sent.url)

    def open_(*cells: str, path: Path | None = None) -> Notebook:
        name = re.sub(r"\W+", "-", request.node.name).strip("-")
        target = lab.folder / f"{name}.ipynb"
        if path is None:
            notebook = nbformat.v4.new_notebook(
                cells=[nbformat.v4.new_code_cell(source) for source in cells],
                # Without a kernel's name JupyterLab asks for one and waits.
                metadata={"kernelspec": {"name": "python3", "display_name": "Python"}},
            )
            nbformat.write(notebook, target)
        else:
            shutil.copy(path, target)
        page = window.pages[0] if window.pages else window.new_page()
        opened.append(Notebook(page, lab, target))
        return opened[-1]

    window.on("request", note_outside)
    yield open_
    window.remove_listener("request", note_outside)
    for notebook in opened:
        notebook.leave()
    lab.end_kernels()
    assert not outside, f"requests beyond the server: {outside}"


class Notebook:
    """One notebook, open in JupyterLab.

    Attributes:
        page: the browser's page.
        panel: the notebook in it.
        errors: what the page wrote to its console as an error, and uncaught errors;
            without what JupyterLab is known to say of itself.
    """

    def __init__(self, page: Page, lab: Lab, path: Path) -> None:
        self.page, self.lab, self.path = page, lab, path
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.errors: list[str] = []
        page.set_default_timeout(1000 * WAIT_SECONDS)
        self.listeners = {"console": self._note_console, "pageerror": self._note_error}
        for event, listener in self.listeners.items():
            page.on(event, listener)
        if page.url.startswith(lab.url):
            self.evaluate(SHOW, path.name)
            self.wait()
        else:
            self.load()

    def load(self) -> None:
        """Load the whole page, with this notebook and nothing from before."""
        self.page.goto(
            f"{self.lab.url}lab/workspaces/tests/tree/{self.path.name}"
            f"?reset&token={self.lab.token}"
        )
        self.wait()

    def leave(self) -> None:
        """The page is for the next notebook; it is closed if a dialog is open."""
        for event, listener in self.listeners.items():
            self.page.remove_listener(event, listener)
        self.page.emulate_media(reduced_motion="null")
        if self.page.locator(".jp-Dialog").count():
            self.page.close()

    def _note_console(self, message) -> None:
        if message.type == "error":
            self._note_error(f"{message.text} ({message.location['url']})")

    def _note_error(self, error: object) -> None:
        if not any(known in str(error) for known in JUPYTERLAB_SAYS):
            self.errors.append(str(error))

    def wait(self) -> None:
        """Wait until the notebook's cells are in the page."""
        self.panel.locator(".jp-Cell").first.wait_for(timeout=START_SECONDS * 1000)

    def run_all(self, *, wait: bool = True, seconds: float = 60) -> None:
        """Run all cells; `wait` for the last one to end, for so many seconds."""
        self.evaluate(READY)
        self.command("notebook:run-all-cells", wait=wait, seconds=seconds)

    def command(
        self, name: str, *, wait: bool = True, seconds: float = 60, **arguments: object
    ) -> None:
        """Run one of JupyterLab's commands, and `wait` for its end."""
        run = "([name, given]) => window.jupyterapp.commands.execute(name, given)"
        go_on = "async (given) => { (%s)(given) }"
        self.evaluate(run if wait else go_on % run, [name, arguments], seconds)

    def restart_kernel(self) -> None:
        """Restart the kernel without the question whether that is meant."""
        self.evaluate(
            "() => window.jupyterapp.shell.currentWidget.sessionContext"
            ".session.kernel.restart()"
        )

    def evaluate(
        self, source: str, argument: object = None, seconds: float = 60
    ) -> None:
        """Run a JavaScript function that returns a promise, and wait for its end."""
        self.page.evaluate(WITH_LIMIT, [seconds, source, argument])

    def save_and_reload(self) -> None:
        """Save the notebook and load the page anew. The kernel goes on."""
        self.command("docmanager:save")
        self.load()

    def cell(self, index: int) -> Locator:
        """A cell by its position, from 0."""
        return self.panel.locator(".jp-Cell").nth(index)

    def violations(self, selector: str = ".jp-OutputArea-output") -> list[str]:
        """What axe-core finds wrong in the outputs (not in JupyterLab's own page)."""
        # JupyterLab's body has no height and hides what overflows. axe-core takes its
        # whole content for invisible then, and looks at next to nothing.
        height = self.page.add_style_tag(content="body { height: 100vh; }")
        self.page.mouse.move(0, 0)  # what it hovers over may show a toolbar
        with self._whole():  # out of sight, a text has no background to compare with
            found = Axe().run(self.page, context={"include": [[selector]]}).response
            if found["incomplete"]:  # what still moves hides others for a moment
                self.page.wait_for_timeout(1000)
                found = Axe().run(self.page, context={"include": [[selector]]}).response
        height.evaluate("element => element.remove()")
        checked = {
            rule["id"] for part in ("violations", "passes") for rule in found[part]
        }
        assert "color-contrast" in checked, f"axe-core saw no text in {selector}"
        return [
            f"{rule['id']}: {node['failureSummary']} {node['html']} {_others(node)}"
            for rule in (*found["violations"], *found["incomplete"])
            for node in rule["nodes"]
        ]

    def screenshot(self, name: str) -> None:
        """Keep a picture of the whole notebook if a person wants to look at it."""
        if folder := os.environ.get("COURSE_SCREENSHOTS"):
            with self._whole():
                self.page.screenshot(path=Path(folder, f"{name}.png"))

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """A window so high that every cell is in sight."""
        size = self.page.viewport_size
        cells = self.panel.locator(".jp-WindowedPanel-inner").bounding_box()
        height = max(size["height"], int(cells["height"]) + 250)
        self.page.set_viewport_size({"width": size["width"], "height": height})
        scroller = self.panel.locator(".jp-WindowedPanel-outer")
        scroller.evaluate("element => element.scrollTo(0, 0)")
        # JupyterLab lays the cells out anew some frames later.
        scroller.evaluate(
            "async element => {"
            "  const frame = () => new Promise(requestAnimationFrame);"
            "  for (let i = 0; i < 120; i++) {"
            "    await frame();"
            "    if (i > 3 && element.scrollHeight <= element.clientHeight) break;"
            "  }"
            "}"
        )
        yield
        self.page.set_viewport_size(size)
