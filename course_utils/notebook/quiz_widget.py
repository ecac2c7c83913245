"""The form under a notebook cell that shows one question.

What is synced to the page: the question's text at once, the feedback after an answer.
The key never is. See `quiz_widget.js` for the form itself.
"""

from pathlib import Path

import anywidget
import traitlets

_HERE = Path(__file__)


class QuizWidget(anywidget.AnyWidget):
    """A question in the page. It sends `{"answer": …}` and shows `feedback`."""

    _esm = _HERE.with_suffix(".js")
    _css = _HERE.with_suffix(".css")

    question = traitlets.Dict().tag(sync=True)
    feedback = traitlets.Dict().tag(sync=True)  # {} until there is an answer
    score = traitlets.Unicode().tag(sync=True)
