"""The container for Codespaces and VS Code, and the cells for Colab.

The cells run in a kernel that knows nothing of the course.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from test_contributing import copy_course

from course_utils import ROOT
from course_utils.__main__ import OLDEST
from course_utils.setup import environment, installer

FOLDER = ROOT / ".devcontainer"
SETTINGS = json.loads((FOLDER / "devcontainer.json").read_text(encoding="utf-8"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="these are Unix shell scripts")


# --------------------------------------------------------------- devcontainer.json


def test_the_image_has_a_python_for_the_course():
    name, _, tag = SETTINGS["image"].partition(":")
    assert name == "mcr.microsoft.com/devcontainers/python"
    version = tag.partition("-")[0].split(".")
    assert int(version[1]) >= OLDEST[1]


def test_its_command_and_files_are_there():
    command = shlex.split(SETTINGS["postCreateCommand"])
    assert command[:2] == ["python3", "-c"]
    # Here all is ready, so it has nothing to do.
    subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True)
    code = SETTINGS["customizations"]
    for name in code["codespaces"]["openFiles"]:
        assert (ROOT / name).is_file()
    python = code["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python == "${containerWorkspaceFolder}/.venv/bin/python"
    # Forwarded ports are open to this computer alone; published ones to the network.
    assert SETTINGS["forwardPorts"] == [8888] and "appPort" not in SETTINGS
    storage = int(SETTINGS["hostRequirements"]["storage"].removesuffix("gb"))
    assert storage > sum(installer.SIZES["cuda"])


# --------------------------------------------------------------------------- Colab


COURSE = ("multi_gpu_training", "__editable__", "__pycache__")


def plain_python(folder: Path) -> Path:
    """An environment with all packages that this Python has, but not the course.

    pip can install into it; what is there stays where it is.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for place in filter(os.path.isdir, sys.path):
        if Path(place).name != "site-packages":
            continue
        for entry in Path(place).iterdir():
            # A .pth file may lead to the course, and pip writes into __pycache__.
            ours = entry.suffix == ".pth" or entry.name.startswith(COURSE)
            if not ours and not os.path.lexists(packages / entry.name):
                (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def colab_cells() -> list[str]:
    section = README[README.index("## Google Colab") :]
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


@pytest.mark.thorough
def test_the_cells_for_colab_work_in_a_kernel_without_the_course(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    origin, work = tmp_path / "origin", tmp_path / "content"
    work.mkdir()
    copy_as_repository(origin)
    python = plain_python(tmp_path / "python")
    for name in [*environment.FOREIGN, "COURSE_STATE", "PYTEST_CURRENT_TEST"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("VIRTUAL_ENV", str(python.parent.parent))
    # No network: what pip needs is there, setuptools too.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    cells = [cell.replace("URL", f"file://{origin}") for cell in colab_cells()]
    assert len(cells) == 3
    first = (ROOT / "notebooks" / "00_start_here.ipynb").read_text(encoding="utf-8")
    set_up_cell, *_ = (
        "".join(cell["source"])
        for cell in json.loads(first)["cells"]
        if cell["cell_type"] == "code"
    )
    notebook = new_notebook(
        cells=[
            new_code_cell(source)
            for source in [
                "import importlib.util\n"
                "print(importlib.util.find_spec('course_utils'))",
                *cells,
                set_up_cell,
                "import course_utils, sys\nprint(course_utils.__file__, sys.prefix)",
                "with Ranks(2) as ranks:\n"
                "    print(ranks.run(lambda: __import__('course_utils').__file__))",
                "from course_utils.notebook.progress import record_attempt\n"
                "record_attempt('00.average', 'wrong')",
            ]
        ],
        metadata={"kernelspec": {"name": "plain", "display_name": "Plain"}},
    )
    kernels = tmp_path / "jupyter" / "kernels" / "plain"
    kernels.mkdir(parents=True)
    spec = {
        "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Plain",
        "language": "python",
    }
    (kernels / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="plain",
        resources={"metadata": {"path": str(work)}},
    )
    client.execute()
    texts = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
    ]
    assert not any("ERROR" in text for text in texts), texts
    there = work / "course" / "course_utils" / "__init__.py"
    assert texts[0] == "None\n"
    assert texts[5] == f"{there} {python.parent.parent}\n"
    assert texts[6].endswith(f"{[str(there)] * 2}\n")
    assert (work / "course" / ".course" / "progress.json").is_file()
    # Installed, too: a kernel that starts in another folder finds it.
    code = "import course_utils; print(course_utils.__file__)"
    done = subprocess.run(
        [python, "-c", code], cwd=work, check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{there}\n"


def copy_as_repository(folder: Path) -> None:
    """A git repository with the files of this one."""
    copy_course(folder)
    identity = ["-c", "user.name=A", "-c", "user.email=a@localhost"]
    for arguments in (
        ["init", "--quiet"],
        ["add", "."],
        [*identity, "commit", "--quiet", "--message", "all"],
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
