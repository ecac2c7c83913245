"""``python3 -m course_utils test``: set up what the tests need, then become pytest.

Standard library only: pytest itself runs in the course's environment.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from course_utils import ROOT
from course_utils.setup.environment import (
    SetupError,
    course_environment,
    replace_process,
)
from course_utils.setup.installer import ensure

HELP = """\
usage: python3 -m course_utils test [--all | --gpu] [arguments of pytest]

Sets the course up together with what its tests need, then runs the tests: tests/, the
examples in the docstrings, and the notebooks in notebooks/ and solutions/, which must
give the same outputs again. Several files run at once, unless places are named. The
exit code is pytest's.

  --all              also the tests marked "thorough": further cases of what another
                     test shows in one case. They take longer than all others together
  --gpu              only what needs a real GPU: tests/gpu, and figures. It takes less
                     than 8 minutes, and writes tests/gpu/record.json. A Python that has
                     PyTorch and pytest already is used as it is, without a network
  tests/test_x.py    run only this file, folder or notebook, and all tests in it
  -n 0               one file after the other, which takes twice the time
  -k, -x, -q, ...    see: python3 -m pytest --help
"""
PLACES = ("course_utils", "tests", "notebooks", "solutions")


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Run the tests: this process becomes pytest. Returns only after ``--help``."""
    arguments = list(argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        return 0
    if "--gpu" in arguments:
        needed = ("torch", "pytest", "cloudpickle")
        here = all(map(importlib.util.find_spec, needed))
        python = sys.executable if here else ensure(root, dev=True)
        os.chdir(root)
        words = [word for word in arguments if word != "--gpu"]
        replace_process([str(python), "-m", "tests.gpu", *words], dict(os.environ))
    python = ensure(root, dev=True)
    env = course_environment(python, root)
    env["CI"] = env.get("CI") or "true"  # outputs then come in an order that is fixed
    os.chdir(root)
    replace_process([str(python), "-m", "pytest", *pytest_arguments(arguments)], env)


def pytest_arguments(arguments: Sequence[str], root: Path = ROOT) -> list[str]:
    """What to tell pytest: notebooks strictly, and all places unless one is named.

    All places are run by several processes (pytest-xdist), and without the thorough
    tests unless ``--all`` is there. Raises SetupError for a file that is not there:
    pytest would run all others.
    """
    named = False
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name = argument.partition("::")[0]
        if name.startswith("-") or before == "-k":
            continue
        named = named or (root / name).exists()
        if name.endswith((".py", ".ipynb")) and not (root / name).exists():
            raise SetupError(f"There is no {name} in {root}")
    return [
        "--doctest-modules",
        "--nbval",
        "--dist=loadfile",  # with -n, the cells of a notebook stay together
        *([] if named else ["--numprocesses=auto"]),
        *([] if named or "--all" in arguments else ["-m", "not thorough"]),
        *(place for place in PLACES if not named and (root / place).exists()),
        *(word for word in arguments if word != "--all"),
    ]
