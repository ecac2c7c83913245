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
import os
import textwrap
from html import escape

from course_utils.notebook.outcome import notebook_shell
from course_utils.questions import (
    AnswerError,
    Feedback,
    NumberTask,
    Question,
    QuestionError,
    find,
    format_number,
    load,
)
from course_utils.questions.markup import to_html, to_text
from course_utils.tasks import tasks_of

__all__ = ["Quiz", "quiz", "why"]

_WIDTH = 79  # columns of the text form
_EXAMPLES = {
    "single": ("answer=1", "with the number of your option"),
    "multiple": ("answer=[1, 2]", "with the numbers of all options that are true"),
    "number": ("answer=1234", "with your number"),
}
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
    if answer is not None:
        item.submit(answer)
        print(item.feedback_text())
        return item
    item.restore()
    item.show()
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
    item.explain(measured, title)


def _find(question_id: str) -> Question:
    """A question of a lesson, or a number that its exercise asks for."""
    try:
        return find(question_id)
    except QuestionError:
        for task in tasks_of(str(question_id).partition(".")[0]):
            if isinstance(task, NumberTask) and task.id == question_id:
                return task
        raise


def _quiz_of(question_id: str) -> Quiz:
    question = _find(question_id)
    # One object a question and kernel: every cell that shows it shows the same state.
    item = _quizzes.get(question_id)
    if item is None or item.question != question:
        item = _quizzes[question_id] = Quiz(question)
    return item


class Quiz:
    """One question, and what this learner answered. Made by `quiz`.

    Attributes:
        question: the `Question`.
        feedback: the `Feedback` to the last answer, or None.
        trouble: what there was to say about saving the last answer, or "".
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.feedback: Feedback | None = None
        self.trouble = ""
        self._answer = None
        self._tries = 0
        self._widget = None
        self._shown_by = ""  # the request to run a cell that showed it last

    @property
    def value(self) -> float | str | list[str] | None:
        """The learner's answer: a number, or the text of what was chosen, or None."""
        return self._answer

    def submit(self, given: object) -> Feedback:
        """Judge an answer, save it, and show the feedback where the quiz is shown.

        Args:
            given: as in `quiz(…, answer=given)`.

        Raises:
            AnswerError: it cannot be judged. Nothing is saved then.
        """
        answer = self.question.read(given)
        self._answer, self._tries = answer, self._tries + 1
        self.feedback = self.question.respond(answer, self._tries)
        right = None if self.question.measured else self.feedback.right
        self.trouble = _save(self.question, answer, right)
        self._push()
        for other in _quizzes.values():
            if other._widget and other.question.lesson == self.question.lesson:
                other._widget.score = score(self.question.lesson)
        return self.feedback

    def restore(self) -> None:
        """Take over the saved answer; forget the one in memory if none is saved."""
        self._answer = self.feedback = None
        self._tries, self.trouble = 0, ""
        saved = _saved().get(self.question.id)
        if saved is not None:
            try:
                self._answer = self.question.read(saved["answer"])
            except AnswerError:
                pass  # the question was reworded since: ask it afresh
            else:
                self._tries = saved["tries"]
                self.feedback = self.question.respond(self._answer, self._tries)
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
        # long as the kernel.
        text = {"text/plain": self.text(), "text/html": self.html() + _STYLE}
        display(text, raw=True)
        display(self._form(), raw=True)
        self._shown_by = _request(shell)

    def explain(self, measured: float | None = None, title: str = "") -> None:
        """What `why` shows."""
        feedback = self.question.explain(self._answer)
        shown = []
        if measured is not None:
            from course_utils import pictures

            unit = getattr(self.question, "unit", "")
            drawn = (self._answer, measured, unit, title)
            shown.append(pictures.guess_and_measured(*drawn))
        text = "\n".join(self._told(feedback))
        if notebook_shell() is None:
            print(*shown, text, sep="\n")
            return
        from IPython.display import display

        parts = [f"<p><strong>{feedback.word}</strong> {to_html(feedback.text)}</p>"]
        notes = "".join(
            f"<li>{to_html(self.question.options[note.option])}<br>"
            f"<strong>{note.word}</strong> {to_html(note.text)}</li>"
            for note in feedback.notes
        )
        parts += [f"<ol>{notes}</ol>"] if notes else []
        for picture in shown:
            display(picture)
        display({"text/plain": text, "text/html": "".join(parts)}, raw=True)

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
        lines = [
            f"Quiz {question.id}. {question.task}.",
            "",
            *_wrap(to_text(question.prompt)),
        ]
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
        lines = self._told(self.feedback)
        for line in (self.trouble, score(self.question.lesson)):
            lines += _wrap(line)
        return "\n".join(lines)

    def _told(self, feedback: Feedback) -> list[str]:
        """A feedback as lines of plain text."""
        lines = _wrap(f"{feedback.word} {to_text(feedback.text)}")
        for note in feedback.notes:
            option = to_text(self.question.options[note.option])
            lines += _wrap(option, first=f"  {note.option + 1}. ", rest="     ")
            said = f"{note.word} {to_text(note.text)}"
            lines += _wrap(said, first="     ", rest="     ")
        return lines

    def _how_to_answer(self) -> tuple[str, str]:
        argument, advice = _EXAMPLES[self.question.kind]
        return f'quiz("{self.question.id}", {argument})', advice

    def _given(self) -> list[int] | list[str]:
        """The answer as the form takes it: option numbers from 1, or a typed number."""
        if self.question.kind == "number":
            return [format_number(self._answer)]
        chosen = self._answer if isinstance(self._answer, list) else [self._answer]
        return [self.question.options.index(text) + 1 for text in chosen]

    def _form(self) -> dict[str, object]:
        """What displays the form. There is one, with a view wherever it is shown."""
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
                    "purpose": to_html(getattr(question, "purpose", "")),
                    "button": question.button,
                }
            )
            self._widget.on_msg(self._receive)
            self._push()
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self._widget.model_id,
            },
            "text/html": "",  # for a viewer without widgets: nothing, and no warning
        }

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
        if self.feedback is None:
            self._widget.feedback = {}
        else:
            feedback = self.feedback
            verdict = "right" if feedback.right else "wrong"
            self._widget.feedback = {
                # The same answer twice must reach the page twice.
                "serial": self._widget.feedback.get("serial", 0) + 1,
                "given": self._given(),
                "state": "noted" if feedback.noted else verdict,
                "word": feedback.word,
                "text": to_html(feedback.text),
                "notes": [
                    vars(note) | {"text": to_html(note.text)} for note in feedback.notes
                ],
                "button": feedback.button,
                "trouble": self.trouble,
            }
        self._widget.score = score(self.question.lesson)


_quizzes: dict[str, Quiz] = {}  # those of this Python process, by id


def score(lesson: str) -> str:
    """How many of a lesson's questions are answered rightly, as one line.

    Predictions count as made: nobody marks them.

    Args:
        lesson: its number, such as "00". "" is returned before its first answer.
    """
    saved = _saved()
    asked = load(lesson).values()
    judged = [question.id for question in asked if not question.measured]
    predicted = [question.id for question in asked if question.measured]
    answers = [saved[id] for id in judged if id in saved]
    facts = []
    if answers:
        right = sum(bool(answer["correct"]) for answer in answers)
        first = sum(bool(answer["first_try_correct"]) for answer in answers)
        facts.append(f"{right} of {len(judged)} right, {first} at the first try.")
    if made := sum(id in saved for id in predicted):
        facts.append(
            f"{made} of {len(predicted)} predictions made; they are not marked."
        )
    return f"Lesson {lesson}: {' '.join(facts)}" if facts else ""


def _saved() -> dict[str, dict]:
    """The saved answers by question id; none in a test run."""
    if _in_test_run():
        return {}
    from course_utils.notebook.progress import answers

    return answers()


def _save(question: Question, answer: object, right: bool | None) -> str:
    """Save an answer. Returns what a learner must know about that: "" if all is well.

    `progress` says it on stderr, which no cell shows while a form's answer is handled.
    """
    if _in_test_run():
        return ""
    from course_utils.notebook.progress import record_answer, record_attempt

    with contextlib.redirect_stderr(io.StringIO()) as said:
        record_answer(question.id, answer, right)
        if isinstance(question, NumberTask):
            record_attempt(question.id, "passed" if right else "wrong")
    return said.getvalue().strip()


def _in_test_run() -> bool:
    """Whether this is a test, or a kernel that a test started (nbval).

    A notebook must give the same outputs whatever the learner has answered, and a test
    of it must not touch the learner's answers.
    """
    return "PYTEST_CURRENT_TEST" in os.environ


def _request(shell) -> str:
    """The id of the message that runs the current cell.

    Not its number: nbval, for one, runs every cell under the same number.
    """
    return shell.get_parent().get("header", {}).get("msg_id", "")


def _wrap(text: str, first: str = "", rest: str = "") -> list[str]:
    """The lines of a paragraph, indented by `first` and then by `rest`."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,  # micro-batch is one word, and easier to find
    )
