"""``python3 -m course_utils test``: set up what the tests need, then become pytest.

Standard library only: pytest itself runs in the course's environment.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from course_utils import ROOT
from course_utils.setup.environment import (
    SetupError,
    compare,
    course_environment,
    installed,
    read_requirements,
    replace_process,
)
from course_utils.setup.installer import ensure

HELP = """\
usage: python3 -m course_utils test [--all] [--no-venv] [arguments of pytest]

Sets the course up together with what its tests need, then runs the tests: tests/, the
examples in the docstrings, and the notebooks in notebooks/ and solutions/, which must
give the same outputs again. Several files run at once, unless places are named. The
exit code is pytest's.

  --all              also the tests marked "thorough": further cases of what another
                     test shows in one case. They take longer than all others together
  --no-venv          use the current environment, as it is
  tests/test_x.py    run only this file, folder or notebook, and all tests in it
  -n 0               one file after the other, which takes twice the time
  -k, -x, -q, ...    see: python3 -m pytest --help
"""
PLACES = ("course_utils", "tests", "notebooks", "solutions")
FILES = (".py", ".ipynb")
WITHOUT_THOROUGH = ("-m", "not thorough")


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Run the tests: this process becomes pytest. Returns only after ``--help``."""
    arguments = list(argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(HELP, end="")
        return 0
    _must_exist(root, arguments)
    ends = arguments.index("--") if "--" in arguments else len(arguments)
    own = "--no-venv" in arguments[:ends]
    if own:
        arguments.remove("--no-venv")
        python = Path(sys.executable)
        pins = read_requirements(root, dev=True).pins
        if missing := compare(pins, installed(sys.path))[0]:
            raise SetupError(
                f"This Python ({python}) lacks {', '.join(missing)}. In the course's "
                f"folder, run: {python} -m pip install -r requirements.txt -e '.[dev]'"
            )
    else:
        python = ensure(root, dev=True)
    env = course_environment(root, venv=not own)
    env["CI"] = env.get("CI") or "true"  # outputs then come in an order that is fixed
    os.chdir(root)
    command = [str(python), "-m", "pytest", *pytest_arguments(root, arguments)]
    replace_process(command, env)


def _must_exist(root: Path, arguments: Sequence[str]) -> None:
    """Raise SetupError for a file that is not there: pytest would run nothing.

    On several processes it would not even say so.
    """
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name = argument.partition("::")[0]
        is_file = name.endswith(FILES) and not name.startswith("-") and before != "-k"
        if not is_file or (root / name).exists():
            continue
        files = [
            path.relative_to(root).as_posix()
            for place in PLACES
            for path in (root / place).rglob("*")
            if path.suffix in FILES
        ]
        close = difflib.get_close_matches(name, files, n=1)
        meant = f". Did you mean {close[0]}?" if close else ""
        raise SetupError(f"There is no {name} in {root}{meant}")


def pytest_arguments(root: Path, arguments: Sequence[str]) -> list[str]:
    """What to tell pytest: notebooks strictly, and all places unless one is named.

    All places are run by several processes (pytest-xdist), and without the thorough
    tests unless ``--all`` is there.
    """

    def is_place(text: str) -> bool:
        return not text.startswith("-") and (root / text.partition("::")[0]).exists()

    named = any(map(is_place, arguments))
    every = named or "--all" in arguments
    return [
        "--doctest-modules",
        "--nbval",
        "--dist=loadfile",  # with -n, the cells of a notebook stay together
        *([] if named else ["--numprocesses=auto"]),
        *([] if every else WITHOUT_THOROUGH),
        *(place for place in PLACES if not named and (root / place).exists()),
        *(argument for argument in arguments if argument != "--all"),
    ]
