"""Helpers of the course: real ranks in a notebook, checks, quizzes, pictures.

In a notebook::

    %load_ext course_utils
    from course_utils import Ranks, check, hint, quiz, solution

Everything is imported on first use: this file itself needs the standard library
alone, because ``python3 -m course_utils start`` runs before anything is installed.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the clone
STATE = ROOT / ".course"  # what the course writes

# What notebooks import, and where it is.
_NAMES = {
    "LESSONS": "course_utils.notebook.lessons",
    "Ranks": "course_utils.ranks",
    "RankFailure": "course_utils.ranks",
    "RanksError": "course_utils.ranks",
    "check": "course_utils.notebook.check",
    "hint": "course_utils.notebook.check",
    "inspect_machine": "course_utils.measure.machine",
    "launch": "course_utils.ranks.launch",
    "progress": "course_utils.notebook.progress",
    "quiz": "course_utils.notebook.quiz",
    "solution": "course_utils.notebook.check",
    "why": "course_utils.notebook.quiz",
}
_MODULES = {
    "costs": "course_utils.theory.costs",
    "pictures": "course_utils.pictures",
    "simulator": "course_utils.theory.simulator",
    "virtual_gpus": "course_utils.virtual_gpus",  # can be called like its function
}
__all__ = sorted([*_NAMES, *_MODULES])

# Packages that the course imports, and that a learner might name a file after.
_PACKAGES = ("torch", "torchvision", "numpy", "sklearn", "matplotlib", "tqdm", "psutil")


def __getattr__(name):
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    else:
        raise AttributeError("module 'course_utils' has no attribute " + repr(name))
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


def shown(path, root=ROOT):
    """A path as one would type it in the clone."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def refuse_namesakes():
    """Raise ImportError if ``import torch`` would take a file beside the notebook."""
    here = os.getcwd()
    if not {"", here}.intersection(sys.path):
        return
    for name in _PACKAGES:
        for inside in ([name + ".py"], [name, "__init__.py"]):
            file = os.path.join(here, *inside)
            if os.path.isfile(file):
                says = "{} takes the place of the package {}. Rename it, then restart "
                raise ImportError((says + "the kernel.").format(file, name))


def load_ipython_extension(shell):
    """``%load_ext course_utils``: add the magics, and begin to import torch.

    Raises:
        ImportError: a file beside the notebook has the name of a package.
    """
    refuse_namesakes()
    # Threads that wait for each other inside an operation sleep. To spin, as they do
    # by default, makes it many times slower where all cores are busy already.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # What the rest of this cell imports stays. To look through it for garbage again and
    # again takes a fifth of that time.
    gc.disable()

    def look_again(*_):
        gc.enable()
        shell.events.unregister("post_run_cell", look_again)

    shell.events.register("post_run_cell", look_again)
    from course_utils.ranks import magic
    from course_utils.ranks.processes import ZygoteProcess, start_method

    magic.register(shell)
    if start_method() == "fork":
        ZygoteProcess.prepare()
