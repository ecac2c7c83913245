"""``python -m tests.benchmarks [name ...]``: run benchmarks, one JSON line a row."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil


def descriptions() -> dict[str, str]:
    """Name -> first line of the docstring, for every benchmark; imports none."""
    return {
        path.stem: ast.get_docstring(ast.parse(path.read_text("utf-8"))).split("\n")[0]
        for path in sorted(Path(__file__).parent.glob("[!_]*.py"))
    }


def run(name: str, quick: bool) -> None:
    """Print the rows of one benchmark as they come, and a summary on stderr."""
    module = importlib.import_module(f"tests.benchmarks.{name}")
    started = time.monotonic()
    met = []
    for row in module.rows(quick):
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
    known = descriptions()
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Run benchmarks. Each row is one JSON line.",
    )
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    parser.add_argument(
        "names", nargs="*", metavar="name", help="what to run; without one: the list"
    )
    given = parser.parse_args(arguments)
    for name in given.names:
        if name not in known:
            parser.error(
                f"there is no benchmark {name!r}. There are: {', '.join(known)}"
            )
    if not given.names:
        width = max(map(len, known))
        for name, description in known.items():
            print(f"{name:<{width}}  {description}")
    load, cores = psutil.getloadavg()[0], psutil.cpu_count()
    if given.names and load > cores / 2:
        print(
            f"This machine is busy (load {load:.1f} on {cores} cores): times will be "
            "too long, and ratios noisy.",
            file=sys.stderr,
        )
    for name in given.names:
        run(name, given.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
