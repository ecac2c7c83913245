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

# name -> module that holds it (same name inside), or None: the name is a submodule.
# Submodules quiz, progress and virtual_gpus can be called like the function in them.
_EXPORTS = {
    "Ranks": "course_utils.ranks",
    "RankFailure": "course_utils.ranks",
    "RanksError": "course_utils.ranks",
    "check": "course_utils.notebook.check",
    "hint": "course_utils.notebook.check",
    "solution": "course_utils.notebook.check",
    "inspect_machine": "course_utils.doctor",
    "launch": "course_utils.workers",
    "pictures": None,
    "progress": None,
    "quiz": None,
    "virtual_gpus": None,
    "why": "course_utils.quiz",
}
__all__ = sorted(_EXPORTS)

# Packages that the course imports, and that a learner might name a file after.
_PACKAGES = ("torch", "torchvision", "numpy", "sklearn", "matplotlib", "tqdm", "psutil")


def __getattr__(name):
    if name not in _EXPORTS:
        raise AttributeError("module 'course_utils' has no attribute " + repr(name))
    module = importlib.import_module(_EXPORTS[name] or "course_utils." + name)
    value = getattr(module, name) if _EXPORTS[name] else module
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(_EXPORTS))


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
    from course_utils import virtual_gpus
    from course_utils.ranks import magic
    from course_utils.ranks.processes import Zygote, start_method

    magic.register(shell)
    virtual_gpus.register(shell)
    if start_method() == "fork":
        Zygote.prepare()
