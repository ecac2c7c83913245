"""Sliders over a drawing: move one, and the picture is drawn anew."""

import inspect
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython.display import display

from course_utils.pictures.draw import CSS_DPI, Picture

_WORDS = {"gpu": "GPU", "gpus": "GPUs", "mib": "MiB"}
_STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
_SAVED = '<div class="course-explore-saved">{}</div><style>\n{}</style>'


class _Spoken(anywidget.AnyWidget):
    """For a screen reader: what is shown, in words; its script names the sliders."""

    _esm = Path(__file__).with_suffix(".js")
    text = traitlets.Unicode().tag(sync=True)


def explore(draw: Callable[..., Picture], *data: Any, **controls: Any) -> None:
    """Show `draw(*data, ...)` below a slider or a list for each of the `controls`.

    They start at the defaults of `draw`, and the notebook keeps the picture for these.

    Args:
        draw: A function that returns a `Picture`. A `ValueError` is shown as its words.
        data: Its first arguments, which stay as they are.
        controls: By the name of an argument, as for `ipywidgets.interact`: a slider for
            (least, most) or a list of numbers, a list for words, a box for a bool.
    """
    arguments = inspect.signature(draw).parameters
    inputs = {name: _input(arguments[name], given) for name, given in controls.items()}
    shown, spoken = ipywidgets.HTML(), _Spoken()

    def show(_: object = None) -> dict[str, str]:
        try:
            picture = draw(*data, **{name: one.value for name, one in inputs.items()})
        except ValueError as error:
            spoken.text, shown.value = str(error), f"<p>{escape(str(error))}</p>"
            return {"text/plain": spoken.text, "text/html": shown.value}
        bundle = picture._repr_mimebundle_()
        spoken.text, shown.value = picture.summary, bundle["text/html"]
        # The place of the picture never shrinks, so that what is below does not jump.
        least = float((shown.layout.min_height or "0px").removesuffix("px"))
        tall = max(least, CSS_DPI * picture.get_figheight())
        shown.layout.min_height = f"{tall:.0f}px"
        return bundle

    first = show()
    for one in inputs.values():
        one.observe(show, "value")
    box = ipywidgets.VBox([*inputs.values(), shown, spoken])
    box.add_class("course-explore")
    # Two outputs: the first one stays in the notebook, and hides beside sliders.
    saved = _SAVED.format(first["text/html"], _STYLE)
    display({**first, "text/html": saved}, raw=True)
    view = {**box._repr_mimebundle_(), "text/html": ""}
    del view["text/plain"]
    display(view, raw=True)


def _input(argument: inspect.Parameter, given: Any) -> ipywidgets.DOMWidget:
    """A slider or a list that has the name of the argument, in words."""
    if isinstance(given, list) and not isinstance(given[0], str):
        made = ipywidgets.SelectionSlider(options=given, value=argument.default)
    else:
        made = ipywidgets.interactive.widget_from_abbrev(given, argument.default)
    if made.has_trait("continuous_update"):  # only where it is let go, or they queue up
        made.continuous_update = False
    words = (_WORDS.get(word, word) for word in argument.name.split("_"))
    made.description = " ".join(words)
    return made
