"""The set-up: the first start and the next, and all that can go wrong.

Every fault is caused for real: processes are killed, downloads are cut, disks are full.
"""

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from course_utils import ROOT
from course_utils.setup import environment, installer
from tests.setup.conftest import (
    UV,
    Clone,
    Index,
    error_of,
    lose_all_but_pip,
    make_wheel,
    until,
)

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="these tests use signals and symbolic links of Unix"
)

UNFINISHED = "its set-up has not come to its end"


# The first start, and the next


def test_the_first_start_takes_the_cpu_build_and_opens_jupyterlab(made: Clone) -> None:
    said = made.first_output
    assert "PyTorch, the cpu build: 0.4 GB" in said
    assert re.search(r"The course is set up, after \d+ s", said)
    assert {"torch-2.14.1+cpu", "torchvision-0.29.2+cpu"} <= made.packages
    lab = json.loads((made.folder / "lab.json").read_text())
    assert lab["python"] == str(environment.venv_python(made.folder))
    assert "--ServerApp.ip=127.0.0.1" in lab["argv"]
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb" in lab["argv"]
    written = [lab["env"][name] for name in environment.PLACES]
    assert all(place.startswith(str(made.folder / ".course")) for place in written)


def test_python_keeps_what_it_compiles_whatever_a_container_sets(made: Clone) -> None:
    """Or else each process compiles PyTorch, which doubles the time of its import."""
    assert list((made.site / "torch" / "__pycache__").glob("__init__.*.pyc"))


def test_the_next_start_needs_no_network(ready: Clone, index: Index) -> None:
    index.close()
    said = ready.start("--no-browser")
    assert said == "JupyterLab is up\n"
    assert index.asked == []


def test_the_other_build_on_demand(ready: Clone) -> None:
    assert "it has the cpu build" in ready.start("--no-browser", "--torch", "cuda")
    assert {"torch-2.14.1", "torchvision-0.29.2"} <= ready.packages
    assert installer.condition(ready.folder) == "ready"  # what is there stays
    assert installer.condition(ready.folder, build="cpu") == (
        "it has the cuda build of PyTorch"
    )


@pytest.mark.parametrize(
    "lacks",
    ["torchvision", "the index", pytest.param("both", marks=pytest.mark.thorough)],
)
def test_without_a_whole_cpu_build_the_ordinary_one(
    begun: Clone, index: Index, lacks: str
) -> None:
    changes = {}
    if lacks == "the index":
        changes["COURSE_TORCH_INDEX"] = "http://127.0.0.1:9"  # nobody listens there
    else:
        index.remove("cpu/torch" + "vision" * (lacks == "torchvision"))
    said = begun.start("--no-browser", **changes)
    assert "does not give it. PyPI's takes its place: 3.1 GB." in said
    assert {"torch-2.14.1", "torchvision-0.29.2"} <= begun.packages


def test_pip_where_uv_cannot_be_had(begun: Clone, index: Index) -> None:
    index.remove("pypi/uv")
    said = begun.start("--no-browser")
    assert "uv cannot be had here" in said
    assert {"torch-2.14.1+cpu", "jupyterlab-4.6.6"} <= begun.packages


# A room without a network


def test_wheels_are_gathered_and_installed_without_a_network(
    ready: Clone, index: Index, tmp_path: Path
) -> None:
    for options in ((), ("--platform", "windows", "--python", "3.12")):
        done = ready.run("wheels", str(tmp_path / "stick"), *options)
        assert done.returncode == 0, done.stdout + done.stderr
    stick = tmp_path / "stick"
    names = {path.name.partition("-py3")[0] for path in stick.glob("*.whl")}
    assert names == {
        *("torch-2.14.1+cpu", "torchvision-0.29.2+cpu"),  # for Linux
        *("torch-2.14.1", "torchvision-0.29.2"),  # for Windows, PyPI has the CPU build
        *("jupyterlab-4.6.6", f"uv-{installer.UV}", "setuptools-80"),
    }
    index.remove("cpu/torchvision")
    done = ready.run("wheels", str(tmp_path / "ordinary"))
    assert "does not give that build. PyPI's takes its place." in done.stdout
    assert (tmp_path / "ordinary" / "torch-2.14.1-py3-none-any.whl").exists()
    index.close()
    lose_all_but_pip(ready).start("--no-browser", "--wheels", str(stick))
    assert {"torch-2.14.1+cpu", "torchvision-0.29.2+cpu"} <= ready.packages


def test_a_folder_that_lacks_a_wheel(begun: Clone, tmp_path: Path) -> None:
    assert "there is no such folder" in error_of(begun.run("start", "--wheels", "no"))
    make_wheel(tmp_path / "stick", "uv", installer.UV, UV)
    said = error_of(begun.run("start", "--wheels", str(tmp_path / "stick")))
    assert re.search(r"(torch|jupyterlab)\S* cannot be found for Python 3\.", said)


# Stopped, and put right


def test_ctrl_c_while_installing_is_one_line(begun: Clone, index: Index) -> None:
    index.hold = "jupyterlab-"
    with begun.running("start", "--no-browser") as process:
        assert until(lambda: any("jupyterlab-" in name for name in index.asked))
        assert process.stop() == 130
    last = process.output.splitlines()[-1]
    assert last == "stopped; run the same command again to go on"
    assert installer.condition(begun.folder) == UNFINISHED


def test_after_kill_9_the_next_start_waits_for_uv_and_makes_all_anew(
    begun: Clone, index: Index
) -> None:
    index.hold = "jupyterlab-"
    with begun.running("start", "--no-browser") as first:
        assert until(lambda: any("jupyterlab-" in name for name in index.asked))
        first.stop(signal.SIGKILL)
    half_copied = begun.site / "half_copied.py"  # it would pass for an installed one
    half_copied.touch()
    # Now there is a GPU.
    begun.program("nvidia-smi", "echo 'GPU 0: NVIDIA H100'")
    with begun.running("start", "--no-browser") as second:
        assert until(lambda: "Another set-up is at work" in second.output)
        index.asked.clear()
        index.hold = ""
        assert until(lambda: "is up" in second.output or second.ended, 60)
    assert f"Making .venv again ({UNFINISHED})" in second.output
    assert not half_copied.exists()
    assert "PyTorch, the cuda build: 3.1 GB" in second.output
    assert {"torch-2.14.1", "torchvision-0.29.2"} <= begun.packages
    assert not any(asked.startswith("cpu/") for asked in index.asked)


def removed(clone: Clone) -> str:
    for path in clone.site.glob("jupyterlab*"):
        shutil.rmtree(path)
    return "removed or changed: jupyterlab-4.6.6"


def two_builds(clone: Clone) -> str:
    for name in ("torch", "torch-2.14.1+cpu.dist-info"):
        shutil.rmtree(clone.site / name)
    wheel = clone.folder.parent / "index" / "pypi" / "torch-2.14.1-py3-none-any.whl"
    shutil.unpack_archive(wheel, clone.site, "zip")
    with pytest.raises(environment.SetupError, match="come from different builds"):
        environment.probe_torch(environment.venv_python(clone.folder), clone.folder)
    return "removed or changed: torch-2.14.1+cpu"


def other_requirements(clone: Clone) -> str:
    make_wheel(clone.folder.parent / "index" / "pypi", "tqdm", "4", {"tqdm.py": ""})
    with open(clone.folder / "requirements.txt", "a") as file:
        file.write("tqdm==4\n")
    return "the requirements, the Python or the folder have changed"


def no_python(clone: Clone) -> str:
    for path in (clone.folder / ".venv" / "bin").glob("python*"):
        path.unlink()
    return "the requirements, the Python or the folder have changed"


def no_pip(clone: Clone) -> str:
    for path in clone.site.glob("pip*"):
        shutil.rmtree(path)
    return "removed or changed: pip-"


def made_by_an_old_python(clone: Clone) -> str:
    if not OLD_PYTHONS:
        pytest.skip("no Python older than 3.10 on this machine")
    venv = environment.venv_folder(clone.folder)
    shutil.rmtree(venv)
    command = [OLD_PYTHONS[-1], "-m", "venv", "--without-pip", venv]
    subprocess.run(command, check=True)
    return UNFINISHED


@pytest.mark.parametrize(
    "harm",
    [
        removed,
        two_builds,
        *(
            pytest.param(harm, marks=pytest.mark.thorough)
            for harm in (other_requirements, no_python, no_pip, made_by_an_old_python)
        ),
    ],
)
def test_what_was_harmed_is_put_right(ready: Clone, harm: Callable) -> None:
    why = harm(ready)
    assert f"({why}" in ready.start("--no-browser")
    pair = {"torch-2.14.1+cpu", "torchvision-0.29.2+cpu"}
    assert {*pair, "jupyterlab-4.6.6"} <= ready.packages
    assert installer.condition(ready.folder) == "ready"


def test_comments_in_the_requirements_make_no_new_set_up_due(ready: Clone) -> None:
    with open(ready.folder / "requirements.txt", "a") as file:
        file.write("# A comment.\n")
    assert installer.condition(ready.folder) == "ready"


# What can be wrong with the machine


def old_pythons() -> list[str]:
    """Pythons of this machine that are too old for the course but can read it."""
    found = [shutil.which(f"python3.{minor}") for minor in range(6, 10)]
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found += [str(path) for path in sorted(folder.glob("3.[6-9].*/bin/python"))]
    return [  # a version manager's stand-in may refuse to run
        one for one in filter(None, found) if installer.version_of(Path(one))
    ]


OLD_PYTHONS = old_pythons()


def test_an_old_python_is_told_so_in_one_line(clone: Clone) -> None:
    if not OLD_PYTHONS:
        pytest.skip("no Python older than 3.10 on this machine")
    for python in OLD_PYTHONS:
        command = [python, "-m", "course_utils", "start"]
        done = subprocess.run(
            command, cwd=clone.folder, env=clone.env(), capture_output=True, text=True
        )
        message = error_of(done)
        assert re.match(r"Python 3\.10 or newer is needed, this is 3\.[6-9]\.", message)


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py"])
def test_python_3_6_can_read_the_first_files(name: str) -> None:
    source = (ROOT / "course_utils" / name).read_text()
    ast.parse(source, feature_version=(3, 6))
    assert "annotations" not in source  # `from __future__` would be an error there


@pytest.mark.parametrize("command", ["start", "test", "wheels", "doctor"])
def test_nothing_is_needed_before_the_set_up(clone: Clone, command: str) -> None:
    done = clone.run(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: python3 -m course_utils {command}" in done.stdout


def with_mounts(script: str, *arguments: str) -> tuple[str, ...]:
    """What to put before a command, so that it has mounts of its own; or skip."""
    own = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
    if not shutil.which("unshare") or subprocess.run([*own, "true"]).returncode:
        pytest.skip("this system does not let us mount a disk of our own")
    return (*own, "sh", "-ec", f'{script}; "$@"', "sh")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_no_venv_module(clone: Clone, module: str) -> None:
    place = Path(subprocess.__file__).parent / module
    prefix = with_mounts(f"mount --bind {clone.folder.parent / 'tmp'} {place}")
    message = error_of(clone.run("start", prefix=prefix))
    assert f"has no module {module}, which it takes to make .venv" in message


def test_a_disk_that_is_too_small_is_seen_before_the_download(
    clone: Clone, index: Index
) -> None:
    disk = clone.folder.parent / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=300m tmpfs {disk}"
    go = f"cp -a {clone.folder} {disk}; cd {disk}/clone"
    message = error_of(clone.run("start", prefix=with_mounts(f"{mount}; {go}")))
    assert re.match(r"The disk is too full: 0\.3 GB free .* 2\.0 GB needed", message)
    assert index.asked == []


def test_the_disk_fills_while_packages_are_installed(ready: Clone) -> None:
    installer.stamp_file(ready.folder).unlink()
    shutil.rmtree(ready.site / "jupyterlab")
    next(ready.site.glob("jupyterlab-*/INSTALLER")).unlink()
    (ready.folder / ".course").mkdir(exist_ok=True)
    full = f"mount -t tmpfs -o size=8k tmpfs {ready.folder}/.course"
    message = error_of(ready.run("start", prefix=with_mounts(full)))
    assert message.startswith("The disk is too full: ")


def test_a_folder_that_cannot_be_written(clone: Clone) -> None:
    mount = f"mount --bind -o ro {clone.folder} {clone.folder}; cd {clone.folder}"
    message = error_of(clone.run("start", prefix=with_mounts(mount)))
    assert message.startswith("Cannot write in ")


def test_no_network(begun: Clone, index: Index) -> None:
    index.close()
    assert error_of(begun.run("start")).startswith("The network failed: ")


@pytest.mark.parametrize(
    "package", ["jupyterlab-", pytest.param("torch-", marks=pytest.mark.thorough)]
)
def test_a_network_that_is_cut_in_the_middle(
    begun: Clone, index: Index, package: str
) -> None:
    index.cut = package
    assert error_of(begun.run("start")).startswith("The network failed: ")
    assert installer.condition(begun.folder) == UNFINISHED


def test_a_package_that_does_not_exist_here(begun: Clone, index: Index) -> None:
    index.remove("pypi/jupyterlab")
    message = error_of(begun.run("start"))
    assert re.match(r"jupyterlab\S* cannot be found for Python 3\.\d+ on", message)


def test_a_port_that_is_taken_is_seen_before_anything_is_installed(
    clone: Clone,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        message = error_of(clone.run("start", "--port", port))
    assert message == f"--port {port}: Address already in use. Take another, or none"
    assert "--port 70000: " in error_of(clone.run("start", "--port", "70000"))
    assert not environment.venv_folder(clone.folder).exists()
