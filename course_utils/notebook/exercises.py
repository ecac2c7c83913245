"""Make ``exercises/*.ipynb`` from ``solutions/*.ipynb``, and run notebooks in place.

A solved notebook is the only source of its exercise. What the exercise leaves out is
marked in it:

- lines between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` become
  ``raise NotImplementedError(...)``;
- a cell with the tag ``solution`` is left out (where the learner changes given code,
  or answers a ``quiz``, the cell before it holds what is given);
- a cell with the tag ``why`` is left out: it explains the solution.

A cell that belongs to a task also has the task's id as a tag. :func:`reference` finds
the solution of a task by these tags, so that ``solution("00.average")`` shows the
very code that the tests run.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import course_utils
from course_utils.notebook.lessons import lesson_of
from course_utils.notebook.progress import replace_file

STUB = 'raise NotImplementedError("Write your code here.")'
MARKER = re.compile(r"^[ \t]*### (BEGIN|END) SOLUTION[ \t]*\n?", re.MULTILINE)
REGION = re.compile(
    r"^([ \t]*)### BEGIN SOLUTION\n(?:(?!\s*###).*\n)*?\s*### END SOLUTION[ \t]*$",
    re.MULTILINE,
)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_SECONDS = 300  # no cell of the course takes a tenth of this
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Reference:
    """What the solved notebook says about one task.

    Attributes:
        name: what the answer is called: what the exercise gives to its check; "" where
            the task asks for a number.
        code: our answer.
        why: the explanation of it, Markdown.
        given: the code that the learner is given to repair, or "".
        above: the notebook's other cells of code, down to the check.
    """

    name: str
    code: str
    why: str = ""
    given: str = ""
    above: tuple[str, ...] = ()

    def defines(self, name: str) -> bool:
        """Does the answer consist of this function or class, among others?"""
        return bool(re.search(rf"^(class|def) {name}\b", self.code, re.MULTILINE))

    @property
    def is_class(self) -> bool:
        """Is the answer a class?"""
        return bool(re.search(rf"^class {self.name}\b", self.code, re.MULTILINE))


def reference(task_id: str) -> Reference:
    """The solution of a task, from its lesson's solved notebook.

    Raises:
        ValueError: there is no such lesson.
        LookupError: the notebook has no solution or no explanation for the task.
        OSError: the notebook cannot be read.
    """
    path = lesson_of(task_id).solution
    check = re.compile(rf'check\("{re.escape(task_id)}", (\w+)')
    name, code, why, given, above = "", [], [], [], []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        tags, source = cell["metadata"].get("tags", ()), "".join(cell["source"])
        mine = task_id in tags
        if mine and ("solution" in tags or MARKER.search(source)):
            code.append(MARKER.sub("", source).strip())
        elif mine and "why" in tags:
            why.append(source.strip())
        elif found := check.match(source):
            name = found[1]
        elif cell["cell_type"] == "code":
            if mine and "given" in tags:
                given.append(source.strip())
            if not name:
                above.append(MARKER.sub("", source))
    if not code or not why:
        raise LookupError(f"{path.name} has no solution and explanation of {task_id}.")
    texts = "\n\n\n".join(code), "\n\n".join(why), "\n\n\n".join(given)
    return Reference(name, *texts, tuple(above))


# ------------------------------------------------------------------------- building


def _read(path: Path):
    """A notebook of the course as nbformat's node.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no notebook, or two of its cells have one id.
    """
    import nbformat

    data = path.read_bytes()
    try:
        with warnings.catch_warnings():
            # Of two cells with one id, one would get a new id, each time another.
            warnings.simplefilter("error")
            notebook = nbformat.reads(data.decode(), as_version=4)
            nbformat.validate(notebook)
    except Exception as error:  # nbformat raises what it stumbles over
        why = str(error).partition("\n")[0] or type(error).__name__
        where = f"{path.parent.name}/{path.name}"
        raise ValueError(f"{where} is no notebook of the course: {why}") from None
    return notebook


def build(solution: Path) -> str:
    """The text of the exercise notebook that belongs to a solved notebook.

    The same solution gives the same text, byte for byte.

    Raises:
        OSError: the solved notebook cannot be read.
        ValueError: it is no notebook, or one of its regions has no end.
    """
    notebook = _read(solution)
    notebook.cells = [
        cell
        for cell in notebook.cells
        if not {"solution", "why"} & {*cell.metadata.get("tags", ())}
    ]
    for cell in notebook.cells:
        cell.source = REGION.sub(rf"\1{STUB}", cell.source)
        if MARKER.search(cell.source):
            raise ValueError(
                f"{solution.parent.name}/{solution.name}: in the cell {cell.id!r} a "
                "region of the solution does not end, or does not begin."
            )
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return _as_text(notebook)


def _as_text(notebook) -> str:
    """A notebook as JSON, without what differs from machine to machine."""
    import nbformat

    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


# ------------------------------------------------------------------------ executing


def execute_notebooks(paths: list[Path]) -> None:
    """Run notebooks from top to bottom and save their outputs in place.

    Each runs in its own folder, with an empty progress file, so that the outputs do
    not depend on who runs it. No times, no ids of widgets and no other metadata of
    this run are kept. A notebook that fails, or is stopped, is left as it was.

    Raises:
        RuntimeError: a cell raised that should not, or the kernel died.
        TimeoutError: a cell took more than CELL_SECONDS.
        OSError, ValueError: a notebook cannot be read.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    for path in paths:
        notebook = _read(path)
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=CELL_SECONDS,
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
            # Others cannot listen to loopback, of which it warns. After a Ctrl-C it
            # tells how its end went.
            extra_arguments=["--log-level=CRITICAL"],
            resources={"metadata": {"path": str(path.parent)}},
            on_notebook_start=_leave_ctrl_c_to_python,
        )
        with tempfile.TemporaryDirectory() as state:
            # PYTHONPATH: the kernel finds course_utils before it is installed.
            # CI: the output of ranks is grouped by rank and not drawn again and again.
            own = {
                "COURSE_STATE": state,
                "PYTHONPATH": str(course_utils.ROOT),
                "CI": "1",
            }
            ctrl_c = signal.getsignal(signal.SIGINT)
            try:
                client.execute(env=os.environ | own)
            except CellExecutionError as error:
                raise RuntimeError(f"{path.name} fails: {error}") from None
            finally:  # a kernel that does not start leaves nbclient's own handler
                signal.signal(signal.SIGINT, ctrl_c)
        for cell in notebook.cells:
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                if len(data) > 1:  # the text form stays; the id means nothing later
                    data.pop(WIDGET, None)
        replace_file(path, _as_text(notebook))


def _leave_ctrl_c_to_python(notebook) -> None:
    """Else nbclient takes the kernel from under the cell that waits for it."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # Windows, a thread
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


# ----------------------------------------------------------------- the command line


def main(argv: list[str] | None = None) -> int:
    """``python3 -m course_utils build-exercises``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils build-exercises",
        description="Write exercises/*.ipynb from solutions/*.ipynb.",
    )
    parser.add_argument(
        "--execute",
        nargs="*",
        type=Path,
        metavar="NOTEBOOK",
        help="first run these notebooks in place (default: notebooks/ and solutions/)",
    )
    options = parser.parse_args(argv)

    root = course_utils.ROOT
    try:
        if options.execute is not None:
            chosen = [path.resolve() for path in options.execute]
            for path in chosen:  # before the first of them takes minutes
                if not path.is_file():
                    raise ValueError(f"There is no notebook {path}.")
            for path in chosen or [
                *sorted(root.glob("notebooks/*.ipynb")),
                *sorted(root.glob("solutions/*.ipynb")),
            ]:
                print(f"running {path.name} in {path.parent.name}/", flush=True)
                execute_notebooks([path])
        (root / "exercises").mkdir(exist_ok=True)
        for solution in sorted(root.glob("solutions/*.ipynb")):
            exercise = root / "exercises" / f"ex_{solution.name}"
            replace_file(exercise, build(solution))
            print(f"exercises/{exercise.name}")
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
