"""Our solution of a task, and its near misses, packed for the ranks."""

from __future__ import annotations

import ast
import contextlib
import functools
import re

from course_utils.notebook.answer import pack
from course_utils.notebook.exercises import Reference, reference
from course_utils.tasks.task import Miss, Task

MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)


@functools.cache
def solved(task_id: str) -> Reference:
    """What the solved notebook has for a task.

    Raises:
        LookupError: it has no solution, or no cell that checks it.
        OSError: it cannot be read.
    """
    found = reference(task_id)
    if not found.name:
        raise LookupError(f"No cell of the solved notebook checks {task_id}.")
    return found


def defined_above(found: Reference) -> list[str]:
    """What the notebook has above a task's check, the solutions of earlier tasks too.

    Of it all: imports, definitions, and constants such as ``RATE = 0.1``.
    """
    kept = []
    for source in found.above:
        for node in ast.parse(MAGIC.sub("", source)).body:
            with contextlib.suppress(ValueError):
                if isinstance(node, ast.Assign):
                    ast.literal_eval(node.value)  # or else it is no constant
                if isinstance(node, DEFINITIONS):
                    kept.append(ast.unparse(node))
    return kept


@functools.cache
def packed(task: Task, *misses: Miss) -> bytes:
    """Our solution, or a near miss of it.

    Raises:
        ValueError: the piece that a near miss replaces is not in the solution.
    """
    ours = solved(task.id)
    code = ours.code
    for miss in misses:
        if miss.old not in code:
            raise ValueError(f"{task.id}: our solution has no {miss.old!r}.")
        code = code.replace(miss.old, miss.new)
    names = {"__name__": "__main__"}
    for source in (*defined_above(ours), code):
        # By this name it is taken for a cell of the notebook's.
        exec(compile(source, "<ipython-ours>", "exec"), names)
    return pack(names[ours.name])
