"""Our solution of a task, and its near misses, packed for the ranks."""

from __future__ import annotations

import ast
import functools
import json
import re

from course_utils.exercises import MARKER, reference
from course_utils.lessons import lesson_of
from course_utils.notebook.answer import pack
from course_utils.tasks.task import Miss, Task

MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)
# What is kept of the cells before a solution: they may have much else in them.
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


@functools.cache
def packed(task: Task, miss: Miss | None = None) -> bytes:
    """Our solution, or a near miss of it.

    Raises:
        ValueError: the piece that the near miss replaces is not in the solution.
    """
    code = reference(task.id).code
    if miss is not None:
        if miss.old not in code:
            raise ValueError(f"{task.id}: our solution has no {miss.old!r}.")
        code = code.replace(miss.old, miss.new)
    names = {"__name__": "__main__"}
    for source in (*definitions_before(task.id), code):
        # By this name it is taken for a cell of the notebook's.
        exec(compile(source, "<ipython-ours>", "exec"), names)
    return pack(names[name_of(task.id)])


@functools.cache
def name_of(task_id: str) -> str:
    """What the answer is called in the exercise: what its check is given."""
    for cell in cells_of(task_id):
        if found := re.match(rf'check\("{re.escape(task_id)}", (\w+)', cell):
            return found[1]
    raise ValueError(f"No cell of the solved notebook checks {task_id}.")


def cells_of(task_id: str) -> list[str]:
    """The code cells of the lesson's solved notebook."""
    cells = json.loads(lesson_of(task_id).solution.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def definitions_before(task_id: str) -> list[str]:
    """What the solved notebook imports and defines before this task's solution.

    That is also what the solutions of earlier tasks define.
    """
    kept, code = [], reference(task_id).code
    for cell in cells_of(task_id):
        source = MARKER.sub("", cell)
        if source.strip() and source.strip() in code:
            break
        nodes = ast.parse(MAGIC.sub("", source)).body
        kept += [ast.unparse(n) for n in nodes if isinstance(n, DEFINITIONS)]
        # And constants, such as RATE = 0.1.
        kept += [
            ast.unparse(node)
            for node in nodes
            if isinstance(node, ast.Assign) and is_constant(node.value)
        ]
    return kept


def is_constant(node: ast.expr) -> bool:
    """Is it written down with literals alone?"""
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return node is not None and not (
        isinstance(node, ast.Constant) and node.value is ...
    )
