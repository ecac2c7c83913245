"""What all explorers have: the widget, its sliders and lists, and words for numbers."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

_HERE = Path(__file__).parent
_SCRIPTS = (_HERE.parent.parent / "notebook" / "form.js", _HERE / "explorers.js")
_WIDGET = "application/vnd.jupyter.widget-view+json"

# Two outputs, as a quiz has them: the text, which the notebook keeps, and the widget,
# which lives as long as the kernel. The text hides while the widget is there; where it
# is not, JupyterLab's "Error displaying widget" hides.
_STYLE = """
<style>
.jp-OutputArea-child:has(.course-explorer-text):has(
  + .jp-OutputArea-child .course-explorer),
.jp-OutputArea-child:has(.course-explorer-text)
  + .jp-OutputArea-child:has(> .jupyter-widgets):not(:has(.course-explorer))
{ display: none; }
</style>"""


class Explorer(anywidget.AnyWidget):
    """What every explorer has.

    Attributes:
        controls: What can be set, in order: for each the `name` of its trait, its
            `label`, and a slider's `min` and `max` or a list's `options`; `disabled`
            where it means nothing at the moment.
        region: What `body` is, for a screen reader.
        summary: What is shown, in one line, for a screen reader.
        body: What is shown, as HTML.
    """

    _esm = "\n".join(script.read_text(encoding="utf-8") for script in _SCRIPTS)
    _css = _HERE / "explorers.css"

    controls = traitlets.List(read_only=True).tag(sync=True)
    region = traitlets.Unicode(read_only=True).tag(sync=True)
    summary = traitlets.Unicode(read_only=True).tag(sync=True)
    body = traitlets.Unicode(read_only=True).tag(sync=True)

    _invitation = "move its sliders"

    def text(self) -> str:
        """What is shown, as plain text."""
        raise NotImplementedError

    def _saved(self) -> str:
        """The body where there is no widget: without what only its style draws."""
        return self.body

    def _ipython_display_(self) -> None:
        from IPython.display import display

        saved = (
            f'<details open class="course-explorer-text"><summary>'
            f"{html.escape(self.summary)}</summary>{self._saved()}"
            f"<p>Run this cell in JupyterLab to {self._invitation}.</p></details>"
        )
        display({"text/plain": self.text(), "text/html": saved + _STYLE}, raw=True)
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        display({_WIDGET: view, "text/html": ""}, raw=True)


def check_choice(value: object, what: str, known: Iterable[str]) -> None:
    """Raise a `ValueError` unless the value is one of those that are known."""
    if value not in (known := [*known]):
        raise ValueError(f"{what} is {value!r}: expected one of {'; '.join(known)}.")


def check_whole(
    value: object, what: str, low: int, high: int, because: str = ""
) -> None:
    """Raise a `ValueError` unless the value is a whole number from low to high."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"{what} is {value!r}: expected a whole number from {low} to {high:,}"
            f"{because}."
        )


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of text, their columns one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def slider(name: str, label: str, low: int, high: int, **more: Any) -> dict[str, Any]:
    """A slider over whole numbers."""
    return {"name": name, "label": label, "min": low, "max": high, **more}


def table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """An HTML table: the heads of its columns, and its rows."""
    first, *others = heads
    cells = "".join(f'<th scope="col">{head}</th>' for head in others)
    return (
        f"<table><thead><tr><td>{first}</td>{cells}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def duration(seconds: float) -> str:
    """A time with three digits: 31.1 ms, 1.12 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if not seconds or seconds >= size:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds / 1e-6)} µs"


def digits(value: float) -> str:
    """Three or four digits, without an exponent: 0.125, 31.1, 112,200,000."""
    return f"{float(f'{value:.4g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def millions(number: int) -> str:
    """A number in millions: 124.4 million."""
    return f"{number / 1e6:,.4g} million"


def stops(name: str, label: str, values: Sequence[float]) -> dict[str, Any]:
    """A slider that stops at these values."""
    return {"name": name, "label": label, "values": [*values]}


def choice(
    name: str, label: str, options: Iterable[str], **more: Any
) -> dict[str, Any]:
    """A list to choose from."""
    return {"name": name, "label": label, "options": [*options], **more}
