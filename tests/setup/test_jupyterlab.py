"""The real JupyterLab, as ``start`` opens it."""

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from tests.setup.conftest import Clone, until

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="these tests use signals and symbolic links of Unix"
)


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
