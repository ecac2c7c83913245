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
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from course_utils.notebook.lessons import lesson_of

STUB = 'raise NotImplementedError("Write your code here.")'
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_SECONDS = 300  # no cell of the course takes a tenth of this
WIDGET = "application/vnd.jupyter.widget-view+json"
MARKER = re.compile(r"^[ \t]*### (BEGIN|END) SOLUTION[ \t]*\n?", re.MULTILINE)


@dataclass(frozen=True)
class Reference:
    """What the solved notebook says about one task.

    Attributes:
        code: our answer.
        why: the explanation of it, Markdown.
        given: the code that the learner is given to repair, or "".
    """

    code: str
    why: str
    given: str


def reference(task_id: str) -> Reference:
    """The solution of a task, from its lesson's solved notebook.

    Raises:
        ValueError: there is no such lesson.
        LookupError: the notebook has no solution or no explanation for the task.
        OSError: the notebook cannot be read.
    """
    path = lesson_of(task_id).solution
    code, why, given = [], [], []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        tags = cell["metadata"].get("tags", ())
        if task_id not in tags:
            continue
        source = "".join(cell["source"])
        if "solution" in tags or MARKER.search(source):
            code.append(MARKER.sub("", source).strip())
        elif "why" in tags:
            why.append(source.strip())
        elif "given" in tags:
            given.append(source.strip())
    if not code or not why:
        raise LookupError(f"{path.name} has no solution and explanation of {task_id}.")
    return Reference("\n\n\n".join(code), "\n\n".join(why), "\n\n\n".join(given))


# ------------------------------------------------------------------------- building


def read_notebook(path: Path):
    """A notebook of the course as nbformat's node.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no notebook, or two of its cells have one id.
    """
    import nbformat

    data = path.read_bytes()
    where = f"{path.parent.name}/{path.name}"
    try:
        ids = [cell.get("id") for cell in json.loads(data)["cells"]]
        # Of two cells with one id nbformat would give one a new id, each time another.
        twice = sorted({one for one in filter(None, ids) if ids.count(one) > 1})
        if not twice:
            notebook = nbformat.reads(data.decode(), as_version=4)
            nbformat.validate(notebook)
    except Exception as error:  # nbformat raises what it stumbles over
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{where} is no notebook: {why}") from None
    if twice:
        raise ValueError(
            f"{where}: several cells have the id {twice[0]!r}. Each needs its own."
        )
    return notebook


def build(solution: Path) -> str:
    """The text of the exercise notebook that belongs to a solved notebook.

    The same solution gives the same text, byte for byte.

    Raises:
        OSError, ValueError: the solved notebook cannot be read.
    """
    from nbconvert.preprocessors import TagRemovePreprocessor
    from nbgrader.preprocessors import ClearSolutions

    notebook = read_notebook(solution)
    for step in (
        TagRemovePreprocessor(enabled=True, remove_cell_tags={"solution", "why"}),
        ClearSolutions(enforce_metadata=False, code_stub={"python": STUB}),
    ):
        notebook, _ = step.preprocess(notebook, {})
    for cell in notebook.cells:
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


def _notebooks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ipynb"))


# ------------------------------------------------------------------------ executing


def execute_notebooks(paths: list[Path]) -> None:
    """Run notebooks from top to bottom and save their outputs in place.

    Each runs in its own folder, with an empty progress file, so that the outputs do
    not depend on who runs it. No times, no ids of widgets and no other metadata of
    this run are kept. A notebook that fails is left as it was.

    Raises:
        RuntimeError: a cell raised that should not, or the kernel died.
        TimeoutError: a cell took more than CELL_SECONDS.
        OSError, ValueError: a notebook cannot be read.
        KeyboardInterrupt: Ctrl-C. The kernel has ended.
    """
    import asyncio

    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    from course_utils import ROOT

    class Client(NotebookClient):
        stopped = False

        async def async_start_new_kernel(self, **kwargs):
            # nbclient's own Ctrl-C ends the kernel under the cell that waits for it.
            task = asyncio.current_task()

            def stop() -> None:
                if not self.stopped:  # a second one would leave the kernel behind
                    self.stopped = True
                    self.shutdown_kernel = "immediate"  # or it prints its troubles
                    task.cancel()

            with contextlib.suppress(RuntimeError):  # Windows; not the main thread
                asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
            await super().async_start_new_kernel(**kwargs)

    for path in paths:
        notebook = read_notebook(path)
        with tempfile.TemporaryDirectory() as state:
            # PYTHONPATH: the kernel finds course_utils before it is installed.
            environment = {
                **os.environ,
                "COURSE_STATE": state,
                "PYTHONPATH": str(ROOT),
                "CI": "1",  # output of ranks: grouped by rank, no live redrawing
            }
            client = Client(
                notebook,
                kernel_name="python3",
                timeout=CELL_SECONDS,
                record_timing=False,
                store_widget_state=False,
                coalesce_streams=True,
                # Its warning that others might listen is not about loopback.
                extra_arguments=["--log-level=ERROR"],
                resources={"metadata": {"path": str(path.parent)}},
            )
            try:
                client.execute(env=environment)
            except CellExecutionError as error:
                raise RuntimeError(f"{path.name} fails: {error}") from None
            except (asyncio.CancelledError, RuntimeError):
                if client.stopped:
                    raise KeyboardInterrupt from None
                raise
        for cell in notebook.cells:
            for output in cell.get("outputs", ()):
                data = output.get("data", {})
                if len(data) > 1:  # the text form stays; the id means nothing later
                    data.pop(WIDGET, None)
        _write(path, _as_text(notebook))


def _write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8", newline="\n")
    os.replace(new, path)


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

    from course_utils import ROOT

    try:
        if options.execute is not None:
            chosen = [path.resolve() for path in options.execute]
            for path in chosen:  # before the first of them takes minutes
                if not path.is_file():
                    raise ValueError(f"There is no notebook {path}.")
            for path in chosen or [
                *_notebooks(ROOT / "notebooks"),
                *_notebooks(ROOT / "solutions"),
            ]:
                print(f"running {path.name} in {path.parent.name}/", flush=True)
                execute_notebooks([path])
        (ROOT / "exercises").mkdir(exist_ok=True)
        for solution in _notebooks(ROOT / "solutions"):
            _write(ROOT / "exercises" / solution.name, build(solution))
            print(f"exercises/{solution.name}")
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
