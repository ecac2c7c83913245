"""Our solution of a task, and its near misses, packed for the ranks."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
from dataclasses import dataclass

from course_utils.notebook.answer import pack
from course_utils.notebook.exercises import MARKER, reference
from course_utils.notebook.lessons import lesson_of
from course_utils.tasks.task import Miss, Task

MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign)


@dataclass(frozen=True)
class Solved:
    """What the solved notebook has for one task.

    Attributes:
        name: what the answer is called: what the exercise gives to its check.
        code: our answer.
        given: the code that the learner is given to repair, or "".
        before: what the notebook imports and defines above it, the solutions of
            earlier tasks among it.
    """

    name: str
    code: str
    given: str = ""
    before: tuple[str, ...] = ()

    def defines(self, name: str) -> bool:
        """Does the answer consist of this function or class, among others?"""
        return bool(re.search(rf"^(class|def) {name}\b", self.code, re.MULTILINE))

    @property
    def is_class(self) -> bool:
        """Is the answer a class?"""
        return bool(re.search(rf"^class {self.name}\b", self.code, re.MULTILINE))


@functools.cache
def solved(task_id: str) -> Solved:
    """What the solved notebook has for a task.

    Raises:
        LookupError: it has no solution, or no cell that checks it.
        OSError: it cannot be read.
    """
    ours = reference(task_id)
    notebook = json.loads(lesson_of(task_id).solution.read_text(encoding="utf-8"))
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    before: list[str] = []
    for source in ("".join(cell["source"]) for cell in cells):
        if found := re.match(rf'check\("{re.escape(task_id)}", (\w+)', source):
            return Solved(found[1], ours.code, ours.given, tuple(before))
        if (cell := MARKER.sub("", source)).strip() not in ours.code:
            before += kept_of(MAGIC.sub("", cell))
    raise LookupError(f"No cell of the solved notebook checks {task_id}.")


def kept_of(source: str) -> list[str]:
    """Of a cell: imports, definitions, and constants such as ``RATE = 0.1``."""
    kept = []
    for node in ast.parse(source).body:
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
    for source in (*ours.before, code):
        # By this name it is taken for a cell of the notebook's.
        exec(compile(source, "<ipython-ours>", "exec"), names)
    return pack(names[ours.name])
