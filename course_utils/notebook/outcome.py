"""What a check found, as data and as text. Imports no torch."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["passed", "not attempted", "wrong", "crashed", "stuck", "too slow"]
WIDTH = 80
GREEN, RED, BLUE, PLAIN = "\x1b[1;32m", "\x1b[1;31m", "\x1b[1;34m", "\x1b[0m"
MARKS = {"passed": ("✓", GREEN), "not attempted": ("·", BLUE)}


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        task: which task.
        status: passed, not attempted, wrong, crashed, stuck or too slow.
        lines: what to tell: first the sentence that decides, then what was seen.
    """

    task: Any
    status: Status
    lines: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the answer is right."""
        return self.status == "passed"

    def __str__(self) -> str:
        return self.text()

    def text(self, coloured: bool = False) -> str:
        """All of it; the verdict is coloured where that can be seen."""
        mark, colour = MARKS.get(self.status, ("✗", RED))
        verdict = f"{mark} {self.task.id}: {self.status}"
        if coloured:
            verdict = f"{colour}{verdict}{PLAIN}"
        return "\n".join([verdict, *map(wrap, filter(None, self.lines))])


def notebook_shell() -> Any:
    """The shell of a notebook's kernel; None in a terminal or a script."""
    # Not imported: where IPython runs, it is loaded already.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if hasattr(shell, "kernel") else None


def colours_are_shown() -> bool:
    """Is the output that of a notebook, or of a terminal?"""
    return notebook_shell() is not None or sys.stdout.isatty()


def wrap(text: str) -> str:
    """Indent, and fold long lines of prose; code, which is indented, stays as it is."""
    folded = []
    for line in text.split("\n"):
        if line.startswith("  ") or not line:
            folded.append(f"  {line}".rstrip())
            continue
        folded += textwrap.wrap(
            line,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    " if line.startswith("- ") else "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(folded)
