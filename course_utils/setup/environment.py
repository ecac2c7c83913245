"""The environment in which the course runs, and how to run a program there.

It is ``.venv`` in the clone, unless the Python that runs this has all of it already.
The standard library alone is used, because this runs before anything is installed.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from course_utils import ROOT

START = "python3 -m course_utils start"
TEST = "python3 -m course_utils test"  # sets up what the tests need, too
WINDOWS = os.name == "nt"

# These would lead the course's Python, installer or Jupyter out of the clone.
FOREIGN = (
    *("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "__PYVENV_LAUNCHER__"),
    # Many containers set this one. Each process would then compile PyTorch anew.
    "PYTHONDONTWRITEBYTECODE",
    *("JUPYTER_PATH", "JUPYTER_CONFIG_PATH", "JUPYTER_RUNTIME_DIR"),
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_LOG", "PIP_CACHE_DIR"),
)
# Where programs write, in .course.
PLACES = {
    "JUPYTER_CONFIG_DIR": "jupyter/config",
    "JUPYTER_DATA_DIR": "jupyter/data",
    "JUPYTERLAB_SETTINGS_DIR": "jupyter/settings",
    "JUPYTERLAB_WORKSPACES_DIR": "jupyter/workspaces",
    "IPYTHONDIR": "ipython",
    "MPLCONFIGDIR": "matplotlib",
    "SCIKIT_LEARN_DATA": "data/scikit-learn",
    "TORCH_HOME": "torch",
    "TORCHINDUCTOR_CACHE_DIR": "torch/inductor",
    "TRITON_CACHE_DIR": "torch/triton",
    "CUDA_CACHE_PATH": "torch/cuda",
}


class SetupError(Exception):
    """Why the course cannot be set up or started: one line that says what to do."""


def venv_folder(root: Path = ROOT) -> Path:
    """The folder of the course's own environment."""
    return root / ".venv"


def venv_python(root: Path = ROOT) -> Path:
    """The Python of the course's own environment, whether it is there or not."""
    return venv_folder(root) / ("Scripts/python.exe" if WINDOWS else "bin/python")


def site_packages(root: Path = ROOT) -> Path | None:
    """The folder of the packages in ``.venv``, or None if there is none."""
    where = "Lib/site-packages" if WINDOWS else "lib/python*/site-packages"
    return next(iter(sorted(venv_folder(root).glob(where))), None)


def course_environment(python: Path, root: Path = ROOT) -> dict[str, str]:
    """Environment variables for programs that ``python`` runs for the course.

    They keep every file that Jupyter, IPython, matplotlib and torch write inside
    ``.course``. Programs are looked up beside that Python first.
    """
    env = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    env.update({k: str(root / ".course" / folder) for k, folder in PLACES.items()})
    # A learner may have a kernel of the same name: the environment's own comes first.
    env["JUPYTER_PREFER_ENV_PATH"] = "1"
    env["PYTHONPATH"] = str(root)
    env["VIRTUAL_ENV"] = str(python.parent.parent)
    env["PATH"] = os.pathsep.join(filter(None, [str(python.parent), env.get("PATH")]))
    return env


def has_all(*, dev: bool = False) -> bool:
    """Whether the Python that runs this has what the course needs, in any version."""
    needed = ["torchvision", "sklearn", "jupyterlab", "anywidget", "nbval"]
    needed += ["xdist", "pytest_timeout", "playwright", "nbgrader"] if dev else []
    return all(map(importlib.util.find_spec, needed))


def enter(argv: Sequence[str], root: Path = ROOT, *, dev: bool = False) -> None:
    """Run the command ``argv`` of course_utils again in ``.venv``, unless we are there.

    With ``dev``, the command needs what the tests need. Raises SetupError, which names
    the command that sets the course up, if it is not.
    """
    if has_all(dev=dev):
        return
    python = venv_python(root)
    if not python.exists() or Path(sys.prefix).resolve() == venv_folder(root).resolve():
        raise SetupError(
            f"The course is not set up. Run first: {TEST if dev else START}"
        )
    command = [str(python), "-m", "course_utils", *argv]
    replace_process(command, course_environment(python, root))


def replace_process(command: Sequence[str], env: dict[str, str]) -> NoReturn:
    """Become another program: its output, signals and exit code are then ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not WINDOWS:
        os.execve(command[0], list(command), env)
    sys.exit(subprocess.call(command, env=env))


_PROBE = """
import json, torch, torchvision
import torch.distributed as dist
facts = {"torch": torch.__version__, "gloo": False, "nccl": False}
if dist.is_available():
    facts["gloo"], facts["nccl"] = dist.is_gloo_available(), dist.is_nccl_available()
facts["cuda"], facts["gpus"] = torch.version.cuda or "", torch.cuda.device_count()
print("\\n" + json.dumps(facts))
"""


def probe_torch(python: Path, root: Path = ROOT, *, timeout: float = 180.0) -> dict:
    """Import torch and torchvision in a process of ``python``: about 4 s.

    Returns torch's version, whether it has gloo and nccl, the version of CUDA that it
    was built for ("" for none) and the number of GPUs that it can use. Raises
    SetupError if the two do not load, whatever goes wrong there.
    """
    command = [str(python), "-W", "ignore", "-c", _PROBE]
    how = {"check": False, "capture_output": True, "text": True, "errors": "replace"}
    how |= {"cwd": root, "env": course_environment(python, root), "timeout": timeout}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, **how)
        return json.loads(last_line(done.stdout))
    except subprocess.TimeoutExpired:
        reason = f"it took more than {timeout:.0f} s"
    except ValueError:
        reason = last_line(done.stderr)
        if done.returncode < 0:
            reason = f"it ended Python with signal {-done.returncode}"
        if "torchvision::nms" in reason:
            reason = "they come from different builds, such as CPU and CUDA"
    raise SetupError(
        f"torch and torchvision cannot be imported: {reason}. Run: {START}; if that "
        "does not mend it, remove the folder .venv first"
    )


def last_line(text: str) -> str:
    """The last line that is not empty, without its full stop."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "no reason was given"


def say(text: str) -> None:
    """Print at once: the programs that follow write to the same terminal."""
    print(text, flush=True)
