"""``python -m tests.benchmarks [name ...]``: run benchmarks, one JSON line a row."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests import benchmarks


def descriptions() -> dict[str, str]:
    """Name -> first line of the docstring, for every benchmark there is.

    Nothing is imported for it.
    """
    found = {}
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if not module.name.startswith("_"):
            path = Path(module.module_finder.path, f"{module.name}.py")
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            found[module.name] = text.partition("\n")[0]
    return found


def run(name: str) -> None:
    """Print the rows of one benchmark as they come, and a summary on stderr."""
    module = importlib.import_module(f"{benchmarks.__name__}.{name}")
    started = time.monotonic()
    met = []
    for row in module.rows():
        print(json.dumps(row.as_dict(), ensure_ascii=False), flush=True)
        met.append(row.met)
    with_goal = [m for m in met if m is not None]
    print(
        f"{name}: {len(met)} rows, {sum(with_goal)} of {len(with_goal)} goals met, "
        f"{time.monotonic() - started:.0f} s",
        file=sys.stderr,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 also where a goal was missed: it is printed.

    Timings of a busy machine say little, so they never break a build; an error in a
    benchmark does.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Run benchmarks. Each row is one JSON line.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help="what to run; without one: the list"
    )
    names = parser.parse_args(arguments).names
    known = descriptions()
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(
            f"there is no benchmark {', '.join(map(repr, unknown))}. "
            f"There are: {', '.join(known)}"
        )
    if not names:
        width = max(map(len, known), default=0)
        for name, description in known.items():
            print(f"{name:<{width}}  {description}")
    load, cores = psutil.getloadavg()[0], psutil.cpu_count()
    if names and load > cores / 2:
        print(
            f"This machine is busy (load {load:.1f} on {cores} cores): times will be "
            "too long, and ratios noisy.",
            file=sys.stderr,
        )
    for name in names:
        run(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
