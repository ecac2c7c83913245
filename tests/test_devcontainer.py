"""The container for Codespaces and VS Code, and the cells for Colab.

`set_up.sh` runs for real in a small clone, with packages of a few lines in place of
torch and uv. The cells for Colab run in a kernel that knows nothing of the course.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from course_utils.setup import environment, lab
from tests.test_setup import BASE, TORCH, Clone, make_wheel, new_clone

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".devcontainer"
SETTINGS = json.loads((FOLDER / "devcontainer.json").read_text(encoding="utf-8"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="these are Unix shell scripts")


# --------------------------------------------------------------- devcontainer.json


# As in https://containers.dev/implementors/json_reference/, for what is used here.
KINDS = {
    "name": str,
    "image": str,
    "init": bool,
    "runArgs": list,
    "hostRequirements": dict,
    "postCreateCommand": str,
    "forwardPorts": list,
    "portsAttributes": dict,
    "otherPortsAttributes": dict,
    "customizations": dict,
}


def test_every_setting_is_one_and_has_its_kind():
    for name, value in SETTINGS.items():
        assert isinstance(value, KINDS[name]), name
    assert set(SETTINGS["hostRequirements"]) == {"cpus", "memory", "storage"}
    assert isinstance(SETTINGS["hostRequirements"]["cpus"], int)
    for name in ("memory", "storage"):
        assert re.fullmatch(r"\d+[tgmk]b", SETTINGS["hostRequirements"][name])


def test_only_the_port_of_jupyterlab_is_forwarded():
    assert SETTINGS["forwardPorts"] == [lab.USUAL_PORT]
    assert list(SETTINGS["portsAttributes"]) == [str(lab.USUAL_PORT)]
    assert SETTINGS["otherPortsAttributes"] == {"onAutoForward": "ignore"}
    # Published ports would be open to the network: forwarded ones are not.
    assert "appPort" not in SETTINGS
    assert not any("-p" in option for option in SETTINGS["runArgs"])


def test_the_image_has_a_python_for_the_course():
    name, _, tag = SETTINGS["image"].partition(":")
    assert name == "mcr.microsoft.com/devcontainers/python"
    version = tuple(map(int, tag.partition("-")[0].split(".")))
    assert version >= environment.OLDEST
    pins = environment.read_requirements(ROOT, version=version).pins
    assert {"torch", "jupyterlab", "ipykernel"} <= set(pins)


def test_its_files_are_there():
    command = SETTINGS["postCreateCommand"]
    assert command == "bash .devcontainer/set_up.sh"
    code = SETTINGS["customizations"]
    for name in code["codespaces"]["openFiles"]:
        assert (ROOT / name).is_file()
    python = code["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python == "${containerWorkspaceFolder}/.venv/bin/python"
    needed = environment.read_requirements(ROOT)
    storage = int(SETTINGS["hostRequirements"]["storage"].removesuffix("gb"))
    assert storage > needed.download + needed.disk


# ---------------------------------------------------------------------- set_up.sh

# Takes the place of uv: notes what it was asked for, and lets pip do it.
UV = {
    "uv/__init__.py": "",
    "uv/__main__.py": """
import pathlib, subprocess, sys
arguments = sys.argv[1:]
pathlib.Path("uv.txt").write_text(" ".join(arguments))
pins = [f"{one}+cpu" for one in arguments if "==" in one]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", *pins]))
""",
}


@pytest.fixture
def container(tmp_path: Path) -> Clone:
    """A small clone, with a python3 that has the standard library alone."""
    clone = new_clone(tmp_path / "clone")
    shutil.copytree(FOLDER, clone.folder / ".devcontainer")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").write_text(f'#!/bin/sh\nexec "{BASE}" -S "$@"\n')
    (programs / "python3").chmod(0o755)
    return clone


def set_up(clone: Clone, code: int = 0) -> str:
    """Run the script, from another folder; what it prints."""
    programs = clone.folder.parent / "bin"
    done = subprocess.run(
        ["bash", str(clone.folder / ".devcontainer" / "set_up.sh")],
        check=False,
        cwd=clone.folder.parent,
        env=clone.env(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def without_gpu() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has NVIDIA's driver: set_up.sh takes no CPU build")


@pytest.mark.thorough
def test_it_takes_the_cpu_build_and_leaves_a_finished_set_up(container: Clone):
    without_gpu()
    make_wheel(container.wheels, "uv", "1.0", UV)
    make_wheel(container.wheels, "torch", "2.14.1+cpu", TORCH)
    # The small ordinary torchvision refuses a CPU build of torch; this one does not.
    cpu = {"torchvision/__init__.py": "import torch\n"}
    make_wheel(container.wheels, "torchvision", "0.29.2+cpu", cpu)
    set_up(container)
    asked = (container.folder / "uv.txt").read_text()
    assert asked.startswith("pip install --python .venv/bin/python --torch-backend cpu")
    assert asked.endswith("torch==2.14.1 torchvision==0.29.2")
    have = environment.installed([container.site_packages])
    assert (have["torch"], have["torchvision"]) == ("2.14.1+cpu", "0.29.2+cpu")
    assert have["jupyterlab"] == "4.6.6"
    assert environment.condition(container.folder) == "ready"
    # Once more, as after a rebuild of the container: there is nothing to do.
    assert set_up(container) == ""


@pytest.mark.thorough
def test_after_a_first_run_that_failed_it_asks_for_the_cpu_build_again(
    container: Clone,
):
    without_gpu()
    torch = list(container.wheels.glob("torch-*"))
    hidden = [file.rename(file.with_suffix(".hidden")) for file in torch]
    assert "No CPU build of PyTorch" in set_up(container, code=1)
    assert container.site_packages.is_dir()
    for file, name in zip(hidden, torch, strict=True):
        file.rename(name)
    make_wheel(container.wheels, "uv", "1.0", UV)
    make_wheel(container.wheels, "torch", "2.14.1+cpu", TORCH)
    cpu = {"torchvision/__init__.py": "import torch\n"}
    make_wheel(container.wheels, "torchvision", "0.29.2+cpu", cpu)
    said = set_up(container)
    assert said.startswith(".venv has no PyTorch: making it again.\n")
    have = environment.installed([container.site_packages])
    assert have["torch"] == "2.14.1+cpu"
    assert environment.condition(container.folder) == "ready"


@pytest.mark.thorough
def test_what_is_in_the_way_is_replaced_and_a_link_is_not_followed(container: Clone):
    without_gpu()
    elsewhere = container.folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    (container.folder / ".venv").symlink_to(elsewhere)
    set_up(container)
    assert environment.condition(container.folder) == "ready"
    assert [file.name for file in elsewhere.iterdir()] == ["mine"]


@pytest.mark.thorough
def test_without_a_cpu_build_it_takes_the_ordinary_one(container: Clone):
    without_gpu()
    said = set_up(container)
    assert "No CPU build of PyTorch to be had here: taking the ordinary one." in said
    assert environment.installed([container.site_packages])["torch"] == "2.14.1"
    assert environment.condition(container.folder) == "ready"


def test_with_an_nvidia_gpu_it_asks_for_no_cpu_build(container: Clone):
    programs = container.folder.parent / "bin"
    (programs / "nvidia-smi").symlink_to("/bin/true")
    (programs / "python3").write_text('#!/bin/sh\necho "python3 $1"\n')
    assert set_up(container) == "python3 -c\n"


def test_what_goes_wrong_is_one_line(container: Clone):
    programs = container.folder.parent / "bin"
    (programs / "nvidia-smi").symlink_to("/bin/true")  # nothing before the last step
    (container.folder / "requirements.txt").unlink()
    said = set_up(container, code=1)
    assert said.startswith("requirements.txt is not in") and said.count("\n") == 1


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
                "progress.record_attempt('00.average', 'wrong')",
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
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    identity = ["-c", "user.name=A", "-c", "user.email=a@localhost"]
    for arguments in (
        ["init", "--quiet"],
        ["add", "."],
        [*identity, "commit", "--quiet", "--message", "all"],
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
