"""Quizzes in a notebook, and the same as text anywhere else.

    from course_utils import quiz

    quiz("00.ranks")                      # shows the question under the cell
    guess = quiz("00.all_reduce")         # a number to predict …
    guess.value                           # … for a later cell; None until answered
    quiz("00.ranks", answer=2)            # answers in text: in a terminal, or anywhere
    why("00.all_reduce")                  # below the measurement: what was predicted,
                                          # what is right, and why

What goes where:

- In JupyterLab a question is a small form (`quiz_widget.py`, `.js`, `.css`). The page
  gets the question's text only. An answer travels to Python, is judged here, and only
  then do the verdict and the explanations travel to the page.
- Answers are saved through `progress.py`. Running the cell again after a kernel restart
  shows the saved answer with its feedback.
- What the notebook file stores is the question as text, without the key and without
  the learner's answer. It is the same on every run, so tests can compare it. It is
  what nbviewer, nbconvert and a notebook that was opened but not yet run show.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import textwrap
from html import escape

from course_utils.notebook import progress
from course_utils.notebook.outcome import notebook_shell
from course_utils.questions import (
    AnswerError,
    Feedback,
    NumberTask,
    Question,
    find,
    format_number,
)
from course_utils.questions.markup import to_html, to_text

__all__ = ["Quiz", "quiz", "why"]

_WIDTH = 79  # columns of the text form
_EXAMPLES = {
    "single": ("answer=1", "with the number of your option"),
    "multiple": ("answer=[1, 2]", "with the numbers of all options that apply"),
    "number": ("answer=1234", "with your number"),
}
_VIEW = "application/vnd.jupyter.widget-view+json"
# JupyterLab shows the text of a question and then its form: hide the text while the
# form is there. In a notebook that was saved and opened again the form is gone until
# the cell runs: hide JupyterLab's "Error displaying widget" instead.
_STYLE = """
<style>
.jp-OutputArea-child:has(.course-quiz-text):has(+ .jp-OutputArea-child .course-quiz),
.jp-OutputArea-child:has(.course-quiz-text)
  + .jp-OutputArea-child:has(> .jupyter-widgets):not(:has(.course-quiz))
{ display: none; }
</style>"""


def quiz(question_id: str, *, answer: object = None) -> Quiz:
    """Show one question, or answer it in text.

    Args:
        question_id: "<lesson>.<name>", such as "00.ranks".
        answer: an option's number from 1; several in a list; or the predicted number.
            Prints the feedback instead of showing the question.

    Returns:
        The `Quiz`. Its `value` is the learner's answer, or None.

    Raises:
        QuestionError: there is no such question. Near names are listed.
        AnswerError: `answer` is no option of the question, or no number.
    """
    item = _quiz_of(question_id)
    if answer is None:
        item.restore()
        item.show()
    else:
        item.submit(answer)
        print(item.feedback_text())
    return item


def why(question_id: str, measured: float | None = None, title: str = "") -> None:
    """Show what was predicted, what is right and why: below what measures it.

    Args:
        question_id: "<lesson>.<name>", such as "00.all_reduce".
        measured: the number that came out. It is drawn beside the predicted one.
        title: of that picture.

    Raises:
        QuestionError: there is no such question. Near names are listed.
    """
    item = _quiz_of(question_id)
    item.restore()
    question, feedback = item.question, item.question.explain(item.value)
    if measured is not None:
        from IPython.display import display

        from course_utils import pictures

        unit = getattr(question, "unit", "")
        display(pictures.guess_and_measured(item.value, measured, unit, title))
    word = to_html(feedback.word)
    page = f"<p><strong>{word}</strong> {to_html(feedback.text)}</p>"
    if feedback.notes:
        notes = (
            f'<li value="{note.option + 1}">'
            f"{to_html(question.options[note.option])}<br>"
            f"<strong>{note.word}</strong> {to_html(note.text)}</li>"
            for note in feedback.notes
        )
        page += f"<ol>{''.join(notes)}</ol>"
    _display("\n".join(_told(question, feedback)), page)


def _quiz_of(question_id: str) -> Quiz:
    # One object a question and kernel: every cell that shows it shows the same state.
    question = find(question_id)
    if question_id not in _quizzes or _quizzes[question_id].question != question:
        _quizzes[question_id] = Quiz(question)
    return _quizzes[question_id]


class Quiz:
    """One question, and what this learner answered. Made by `quiz`.

    Attributes:
        question: the `Question`.
        value: the answer: a number, or the text of what was chosen, or None.
        feedback: the `Feedback` to it, or None.
        trouble: what there was to say about saving it, or "".
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.value: float | str | list[str] | None = None
        self.feedback: Feedback | None = None
        self.trouble = ""
        self._widget = None
        self._shown_by = ""  # the request to run a cell that showed it last

    def submit(self, given: object) -> Feedback:
        """Judge an answer, save it, and show the feedback where the quiz is shown.

        Args:
            given: as in `quiz(…, answer=given)`.

        Raises:
            AnswerError: it cannot be judged. Nothing is saved then.
        """
        self.value = self.question.read(given)
        tries = _saved(self.question).get("tries", 0) + 1
        self.feedback = self.question.respond(self.value, tries)
        self.trouble = _save(self.question, self.value, self.feedback.right)
        self._push()
        for other in _quizzes.values():
            if other._widget and other.question.lesson == self.question.lesson:
                other._widget.score = _score(self.question.lesson)
        return self.feedback

    def restore(self) -> None:
        """Take over the saved answer; forget the one in memory if none is saved."""
        self.value = self.feedback = None
        self.trouble = ""
        saved = _saved(self.question)
        if "answer" in saved:
            # An AnswerError: the question was reworded since. Ask it afresh.
            with contextlib.suppress(AnswerError):
                self.value = self.question.read(saved["answer"])
                self.feedback = self.question.respond(self.value, saved["tries"])
        self._push()

    def show(self) -> None:
        """Show the form in a notebook, print the text form anywhere else."""
        shell = notebook_shell()
        if shell is None:
            print(self.text())
            if self.feedback:
                given = ", ".join(map(str, self._given()))
                print(f"\nYour last answer: {given}\n{self.feedback_text()}")
            return
        from IPython.display import display

        # Two outputs: the text, which the notebook keeps, and the form, which lives as
        # long as the kernel. A viewer without widgets shows nothing for it.
        _display(self.text(), self.html() + _STYLE)
        view = {"version_major": 2, "version_minor": 0, "model_id": self._form()}
        display({_VIEW: view, "text/html": ""}, raw=True)
        self._shown_by = _request(shell)

    def _ipython_display_(self) -> None:
        # `quiz(…)` as the last line of a cell has shown itself already; a variable
        # that holds the quiz shows it again in another cell.
        shell = notebook_shell()
        if shell is None:
            print(repr(self))
        elif self._shown_by != _request(shell):
            self.show()

    def __repr__(self) -> str:
        return f"Quiz({self.question.id!r})"

    def text(self) -> str:
        """The question as plain text: no key, and nothing of the learner's."""
        question = self.question
        lines = [f"Quiz {question.id}. {question.task}.", ""]
        lines += _wrap(to_text(question.prompt))
        if question.code:
            lines += ["", textwrap.indent(question.code, "    ")]
        if question.options:
            lines.append("")
        for number, option in enumerate(question.options, 1):
            lines += _wrap(to_text(option), first=f"  {number}. ", rest="     ")
        call, advice = self._how_to_answer()
        return "\n".join([*lines, "", f"To answer: {call}, {advice}."])

    def html(self) -> str:
        """The question as static HTML. Nothing in it tells which answer is right."""
        question = self.question
        call, advice = self._how_to_answer()
        parts = [
            '<details open class="course-quiz-text">',
            f"<summary>Quiz {question.id}. {question.task}.</summary>",
            f"<p><strong>{to_html(question.prompt)}</strong></p>",
        ]
        if question.code:
            parts.append(f"<pre><code>{escape(question.code)}</code></pre>")
        if question.options:
            items = (f"<li>{to_html(option)}</li>" for option in question.options)
            parts.append(f"<ol>{''.join(items)}</ol>")
        parts.append(
            "<p>To answer, or to see your last answer, run this cell in JupyterLab. Or "
            f"answer in any Python: <code>{escape(call)}</code>, {advice}.</p>"
        )
        return "\n".join([*parts, "</details>"])

    def feedback_text(self) -> str:
        """The feedback to the last answer as plain text; "" if there is none."""
        if self.feedback is None:
            return ""
        said = _wrap(self.trouble) + _wrap(_score(self.question.lesson))
        return "\n".join(_told(self.question, self.feedback) + said)

    def _how_to_answer(self) -> tuple[str, str]:
        argument, advice = _EXAMPLES[self.question.kind]
        return f'quiz("{self.question.id}", {argument})', advice

    def _given(self) -> list[int] | list[str]:
        """The answer as the form takes it: option numbers from 1, or a typed number."""
        if self.question.kind == "number":
            return [format_number(self.value)]
        chosen = self.value if isinstance(self.value, list) else [self.value]
        return [self.question.options.index(text) + 1 for text in chosen]

    def _form(self) -> str:
        """The id of the form. There is one, with a view wherever it is shown."""
        if self._widget is None or self._widget.comm is None:  # None: it was closed
            from course_utils.notebook.quiz_widget import QuizWidget

            question = self.question
            self._widget = QuizWidget(
                question={
                    "id": question.id,
                    "kind": question.kind,
                    "task": question.task,
                    "prompt": to_html(question.prompt),
                    "code": question.code,
                    "options": [to_html(option) for option in question.options],
                    "unit": getattr(question, "unit", ""),
                    "label": "Your prediction" if question.measured else "Your answer",
                    "purpose": to_html(getattr(question, "purpose", "")),
                    "button": question.button,
                }
            )
            self._widget.on_msg(self._receive)
            self._push()
        return self._widget.model_id

    def _receive(self, widget, content, buffers) -> None:
        """Take an answer from the page."""
        try:
            self.submit(content.get("answer"))
        except AnswerError as error:
            widget.send({"trouble": str(error)})

    def _push(self) -> None:
        """Bring the form, if there is one, up to date."""
        if self._widget is None:
            return
        shown = {}
        if feedback := self.feedback:
            shown = {
                "serial": next(_serial),  # the same answer twice must be seen twice
                "given": self._given(),
                "state": {True: "right", False: "wrong", None: "noted"}[feedback.right],
                "word": feedback.word,
                "text": to_html(feedback.text),
                "notes": [
                    vars(note) | {"text": to_html(note.text)} for note in feedback.notes
                ],
                "trouble": self.trouble,
            }
        self._widget.feedback = shown
        self._widget.score = _score(self.question.lesson)


_quizzes: dict[str, Quiz] = {}  # those of this Python process, by id
_serial = itertools.count()


def _display(text: str, page: str) -> None:
    """Show a text, and in a notebook the same as HTML."""
    if notebook_shell() is None:
        print(text)
        return
    from IPython.display import display

    display({"text/plain": text, "text/html": page}, raw=True)


def _score(lesson: str) -> str:
    """A lesson's answers so far, as one line; "" before the first."""
    facts = progress.answered(lesson)
    return f"Lesson {lesson}: {', '.join(facts)}." if facts else ""


def _saved(question: Question) -> dict:
    """What is saved of a question: answer and tries; {} if nothing is."""
    is_task = isinstance(question, NumberTask)
    saved = progress.attempts() if is_task else progress.answers()
    return saved.get(question.id, {})


def _save(question: Question, answer: object, right: bool | None) -> str:
    """Save an answer. Returns what a learner must know about that: "" if all is well.

    `progress` says it on stderr, which no cell shows while a form's answer is handled.
    """
    with contextlib.redirect_stderr(io.StringIO()) as said:
        if isinstance(question, NumberTask):
            status = "passed" if right else "wrong"
            progress.record_attempt(question.id, status, answer)
        else:
            progress.record_answer(question.id, answer, right)
    return said.getvalue().strip()


def _request(shell) -> str:
    """The id of the message that runs the current cell.

    Not its number: nbval, for one, runs every cell under the same number.
    """
    return shell.get_parent().get("header", {}).get("msg_id", "")


def _told(question: Question, feedback: Feedback) -> list[str]:
    """A feedback as lines of plain text."""
    lines = _wrap(f"{feedback.word} {to_text(feedback.text)}")
    for note in feedback.notes:
        option = to_text(question.options[note.option])
        lines += _wrap(option, first=f"  {note.option + 1}. ", rest="     ")
        lines += _wrap(f"{note.word} {to_text(note.text)}", "     ", "     ")
    return lines


def _wrap(text: str, first: str = "", rest: str = "") -> list[str]:
    """The lines of a paragraph, indented by `first` and then by `rest`."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,  # micro-batch is one word, and easier to find
    )
