"""The quiz questions: what they ask, what is right, and why.

One readable file a lesson (`lesson_00.py`, `lesson_01.py`, …). Each holds::

    QUESTIONS = lesson("00", SingleChoice("00.ranks", "What is a rank?", […]), …)

The key and the explanations stay in these files. A notebook, and the page that
shows it, get a question's text and nothing else until the learner has answered.

Text may hold `code`, *emphasis* and **bold** (see `markup.py`), nothing else.
A badly defined question raises `QuestionError` when its lesson is imported.

Most questions are judged as soon as they are answered. With `measured=True` the next
cells of the lesson show what is right: then an answer is a prediction. It is noted and
not marked, and the cell `why("00.all_reduce")` below the measurement explains it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import operator
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from course_utils.questions.markup import problem


class QuestionError(ValueError):
    """A question is badly defined, or there is no question of that name."""


class AnswerError(ValueError):
    """An answer that cannot be judged: nothing chosen, or not a number."""


@dataclass(frozen=True)
class Choice:
    """One option: its `text`, and `why` it is right or wrong."""

    text: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Slip:
    """A typical wrong number, and `why` a learner may have got it."""

    value: float
    why: str

    def is_near(self, answer: float) -> bool:
        """Is it this number? Digits behind the point may be left out."""
        whole = self.value == round(self.value)
        return math.isclose(answer, self.value, rel_tol=1e-3 if whole else 1e-2)


@dataclass(frozen=True)
class Note:
    """The part of a feedback that stands beside one option."""

    option: int  # counted from 0
    good: bool | None  # was the learner right about it? None: it was not asked
    word: str  # the verdict in words: colour alone would not reach everyone
    text: str


@dataclass(frozen=True)
class Feedback:
    """What the learner reads after an answer.

    Attributes:
        right: the verdict; None if nothing was answered.
        text: the explanation.
        notes: what stands beside single options.
        noted: a prediction, not judged yet: the notebook measures first.
        before: what is said before the verdict.
        button: what the form's button does now.
    """

    right: bool | None
    text: str
    notes: tuple[Note, ...] = ()
    noted: bool = False
    before: str = ""
    button: str = "Check again"

    @property
    def word(self) -> str:
        """The verdict in words."""
        verdicts = {True: "Right.", False: "Not quite.", None: ""}
        verdict = "Noted." if self.noted else verdicts[self.right]
        return f"{self.before} {verdict}".strip()


@dataclass(frozen=True)
class Question(ABC):
    """What every kind has.

    Args:
        id: "<lesson>.<name>".
        prompt: the question.
        code: a block of code below the prompt.
        measured: the next cells measure it, so an answer is a prediction.
    """

    id: str
    prompt: str
    code: str = field(default="", kw_only=True)
    measured: bool = field(default=False, kw_only=True)

    kind: ClassVar[str]  # which inputs the page shows: "single", "multiple", "number"
    task: ClassVar[str]  # what to do, in a few words

    @property
    def lesson(self) -> str:
        """The number of the lesson, such as "00"."""
        return self.id.partition(".")[0]

    @property
    def options(self) -> list[str]:
        """The texts to choose from; none where the answer is a number."""
        return []

    @abstractmethod
    def read(self, given: object) -> object:
        """Turn what came from a page, a cell or a file into a JSON-able answer.

        Raises `AnswerError`, with a text for the learner, if it cannot be judged.
        """

    @abstractmethod
    def grade(self, answer: object) -> Feedback:
        """Judge an answer that `read` returned, with all that there is to say."""

    def respond(self, answer: object, tries: int) -> Feedback:
        """What the learner is told at once. `tries` counts this one."""
        if not self.measured:
            return self.grade(answer)
        return Feedback(
            self.grade(answer).right,
            "Run the next cells: they show what is right, and why.",
            noted=True,
            # A form shows the chosen options. A number may have been read wrongly.
            before="" if self.options else self._predicted(answer),
            button=self.button,
        )

    def explain(self, answer: object | None) -> Feedback:
        """What is right and why, once it was measured; None: nothing was predicted."""
        if answer is None:
            return self._reason(None, before="You have not predicted this.")
        return self._reason(self.grade(answer), before=self._predicted(answer))

    @abstractmethod
    def _predicted(self, answer: object) -> str:
        """An answer, repeated in a sentence."""

    @abstractmethod
    def _reason(self, judged: Feedback | None, before: str) -> Feedback:
        """What is right and why, after a prediction that was judged."""

    @property
    def button(self) -> str:
        """What the form's button does before there is an answer."""
        return "Note it" if self.measured else "Check"

    @abstractmethod
    def key(self) -> list[str]:
        """What is right and why, a line an option: for a speaker's notes."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d\d\.[a-z0-9_]+", self.id):
            self._reject('an id is "<lesson>.<name>" in small letters: "00.ranks"')
        if not self.prompt.strip():
            self._reject("it has no prompt")
        for text in self._texts():
            if wrong := problem(text):
                self._reject(wrong)

    def _texts(self) -> Iterable[str]:
        yield self.prompt

    def _reject(self, why: str) -> None:
        raise QuestionError(f"Question {self.id!r} is badly defined: {why}.")


@dataclass(frozen=True)
class _ChoiceQuestion(Question):
    """A question with options. Its answers are option texts, not numbers.

    So a saved answer still means the same after the options were put in another
    order, and is seen to be out of date once its option was reworded.
    """

    choices: list[Choice]

    verdicts: ClassVar[tuple[str, str]] = ("Not right:", "Right:")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.choices) < 2:
            self._reject(f"it has {len(self.choices)} option(s); give at least 2")
        if len(set(self.options)) < len(self.choices):
            self._reject("two options have the same text")
        if not any(choice.right for choice in self.choices):
            self._reject("no option is right; mark one with right=True")
        for choice in self.choices:
            if not choice.text.strip():
                self._reject("an option has no text")
            if not choice.why.strip():
                self._reject(f"the option {choice.text!r} has no explanation (why=…)")

    @property
    def options(self) -> list[str]:
        return [choice.text for choice in self.choices]

    def key(self) -> list[str]:
        return [
            f"{note.option + 1}. {note.word} {note.text}"
            for note in self.explain(None).notes
        ]

    def _predicted(self, answer: str | list[str]) -> str:
        chosen = answer if isinstance(answer, list) else [answer]
        numbers = " and ".join(str(self.options.index(text) + 1) for text in chosen)
        return f"Your prediction: {numbers}."

    def _reason(self, judged: Feedback | None, before: str) -> Feedback:
        notes = tuple(
            Note(number, choice.right, self.verdicts[choice.right], choice.why)
            for number, choice in enumerate(self.choices)
        )
        return Feedback(judged and judged.right, "", notes, before=before)

    def _texts(self) -> Iterable[str]:
        yield self.prompt
        for choice in self.choices:
            yield from (choice.text, choice.why)

    def _option(self, given: object) -> str:
        """The text of one option, given by that text or by its number from 1."""
        if isinstance(given, str) and given in self.options:
            return given
        number = 0
        if isinstance(given, str) and given.strip().isdecimal():
            number = int(given)
        elif not isinstance(given, bool):
            with contextlib.suppress(TypeError):
                number = operator.index(given)  # of NumPy, too
        if 1 <= number <= len(self.choices):
            return self.options[number - 1]
        raise AnswerError(
            f"There is no option {_shortened(repr(given))}. Give a number from 1 to "
            f"{len(self.choices)}."
        )


@dataclass(frozen=True)
class SingleChoice(_ChoiceQuestion):
    """Exactly one option is right."""

    kind: ClassVar[str] = "single"
    task: ClassVar[str] = "Choose one"

    def __post_init__(self) -> None:
        super().__post_init__()
        right = [choice.text for choice in self.choices if choice.right]
        if len(right) > 1:
            self._reject(f"{len(right)} options are right; use MultipleChoice")

    def read(self, given: object) -> str:
        given = _as_list(given)
        if not given:
            raise AnswerError("Choose an option first.")
        if len(given) > 1:
            raise AnswerError(f"Choose one option, not {len(given)}.")
        return self._option(given[0])

    def grade(self, answer: str) -> Feedback:
        """The chosen option's explanation; the others' too once the answer is right."""
        chosen = self.choices[self.options.index(answer)]
        notes = [
            Note(number, good=None, word="Why not:", text=choice.why)
            for number, choice in enumerate(self.choices)
            if chosen.right and not choice.right
        ]
        return Feedback(chosen.right, chosen.why, tuple(notes))


@dataclass(frozen=True)
class MultipleChoice(_ChoiceQuestion):
    """Each option is true or false by itself; tick all that are true."""

    kind: ClassVar[str] = "multiple"
    task: ClassVar[str] = "Tick all that are true"
    verdicts: ClassVar[tuple[str, str]] = ("Not true:", "True:")

    WORDS: ClassVar[dict[tuple[bool, bool], str]] = {  # (ticked, true)
        (True, True): "Right, this is true:",
        (True, False): "Ticked, but not true:",
        (False, True): "Not ticked, but true:",
        (False, False): "Right, this is not true:",
    }

    def read(self, given: object) -> list[str]:
        ticked = {self._option(one) for one in _as_list(given)}
        if not ticked:
            raise AnswerError("Tick at least one box first.")
        return [text for text in self.options if text in ticked]

    def grade(self, answer: list[str]) -> Feedback:
        """A word and an explanation for every option, ticked or not."""
        notes = []
        for number, choice in enumerate(self.choices):
            ticked = choice.text in answer
            word = self.WORDS[ticked, choice.right]
            notes.append(Note(number, ticked == choice.right, word, choice.why))
        good, total = [note.good for note in notes].count(True), len(notes)
        if good == total:
            text = f"You judged all {total} statements correctly."
            return Feedback(True, text, tuple(notes))
        text = f"You judged {good} of the {total} statements correctly."
        return Feedback(False, text, tuple(notes))

    def respond(self, answer: list[str], tries: int) -> Feedback:
        """After the first wrong try only how many are right: there is a second one."""
        feedback = super().respond(answer, tries)
        if feedback.noted or feedback.right or tries > 1:
            return feedback
        text = f"{feedback.text} Change your ticks. The next try shows which ones."
        return Feedback(False, text, button="Show which ones")

    def _reason(self, judged: Feedback | None, before: str) -> Feedback:
        text = judged.text if judged else ""
        return replace(super()._reason(judged, before), text=text)


@dataclass(frozen=True)
class Number(Question):
    """Predict a number, in `unit` if there is one.

    Args:
        answer: the right number.
        why: why it is right.
        hint: what to think about, for a wrong number that no slip explains.
        slips: typical wrong numbers, each with what went wrong.
        tolerance: accepted distance from `answer`, in the same unit.
        relative_tolerance: the same as a share of `answer`: 0.1 accepts ±10 %.
        purpose: what the notebook does with the number, shown under the input.
    """

    answer: float
    why: str = field(kw_only=True)
    hint: str = field(kw_only=True)
    slips: list[Slip] = field(default_factory=list, kw_only=True)
    unit: str = field(default="", kw_only=True)
    tolerance: float = field(default=0.0, kw_only=True)
    relative_tolerance: float = field(default=0.0, kw_only=True)
    purpose: str = field(default="", kw_only=True)

    kind: ClassVar[str] = "number"
    task: ClassVar[str] = "Predict the number"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.answer):
            self._reject(f"its answer is {self.answer}")
        if not self.why.strip() or not self.hint.strip():
            self._reject("it needs an explanation (why=…) and a hint (hint=…)")
        if min(self.tolerance, self.relative_tolerance) < 0:
            self._reject("a tolerance is negative")
        for slip in self.slips:
            if self._accepts(slip.value):
                self._reject(f"the slip {slip.value:g} is within the tolerance")
            if not slip.why.strip():
                self._reject(f"the slip {slip.value:g} has no explanation (why=…)")

    def _texts(self) -> Iterable[str]:
        yield from (self.prompt, self.why, self.hint, self.purpose)
        yield from (slip.why for slip in self.slips)

    def read(self, given: object) -> float:
        """A number from `6`, `"1.5"`, `"1,5"`, `"1.5 GB"`, `"1 500"`, `"3/8"`, `"1e9"`.

        Where the unit is %, a fraction such as `"3/8"` is a share: 37.5. One comma
        before three digits is refused: it may be a thousand or a decimal.
        """
        text = str("" if given is None else given).strip()
        text = text.replace("−", "-").replace("–", "-")  # a minus sign, an en dash
        if not text:
            raise AnswerError("Type a number first.")
        number = self._without_unit(text)
        if re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", number):
            big, small = number.replace(",", ""), number.replace(",", ".")
            raise AnswerError(
                f'Is "{number}" {big} or {small}? Type it without the comma.'
            )
        top, slash, bottom = number.partition("/")
        try:
            value = _float(top) / (_float(bottom) if slash else 1.0)
        except (ValueError, ZeroDivisionError, OverflowError):
            value = math.nan
        if slash and self.unit == "%" and number == text:
            value *= 100
        if isinstance(given, bool) or not math.isfinite(value):
            if self.unit and re.fullmatch(r"[-+]?\d[\d.,]*\s*[^\W\d]+(/s)?", text):
                raise AnswerError(
                    f'"{_shortened(text)}": the unit here is {self.unit}. Type the '
                    f"number of {self.unit}."
                )
            unit = f" The unit {self.unit} may follow, no other." if self.unit else ""
            raise AnswerError(
                f'"{_shortened(text)}" is not a number. Type digits: 1.5, 3/8 or '
                f"1e9.{unit}"
            )
        return value

    def _without_unit(self, text: str) -> str:
        """The text without its unit: "3 GPUs", "1 GPU", or for times "1.5x"."""
        units = [self.unit]
        if len(self.unit) > 2:
            units.append(self.unit.removesuffix("s"))
        if self.unit == "times":
            units += ["x", "×"]
        for unit in filter(None, units):
            if text.endswith(unit):
                return text.removesuffix(unit).rstrip()
        return text

    def grade(self, answer: float) -> Feedback:
        """Right within the tolerance; else too high or too low, and a way on."""
        if self._accepts(answer):
            # Not "the exact value": where a cell measures it, another digit may come.
            value = f"The answer is {self._with_unit(self.answer)}. "
            near = "" if answer == self.answer else value
            return Feedback(True, near + self.why)
        side = "Too high." if answer > self.answer else "Too low."
        near = [slip for slip in self.slips if slip.is_near(answer)]
        if not near and self.unit == "%" and self._accepts(100 * answer):
            return Feedback(False, f"{side} Is that a share? In percent, please.")
        if not near:
            return Feedback(False, f"{side} {self.hint}")
        nearest = min(near, key=lambda slip: abs(answer - slip.value))
        return Feedback(False, f"{side} {nearest.why}")

    def _predicted(self, answer: float) -> str:
        return f"Your prediction: {self._with_unit(answer)}."

    def _reason(self, judged: Feedback | None, before: str) -> Feedback:
        expected = f"Expected: {self.key()[0]}"
        if judged is None or judged.right:
            return Feedback(judged and True, expected, before=before)
        slip = judged.text.removesuffix(self.hint).rstrip()  # the hint comes too late
        return Feedback(False, f"{slip} {expected}", before=before)

    def key(self) -> list[str]:
        return [f"{self._with_unit(self.answer)}. {self.why}"]

    def _with_unit(self, value: float) -> str:
        number = format_number(value)
        if self.unit == "times":
            return f"{number}×"
        one = value == 1 and len(self.unit) > 2  # "1 step", but "1 ms"
        return f"{number} {self.unit.removesuffix('s') if one else self.unit}".rstrip()

    def _accepts(self, value: float) -> bool:
        # One part in a billion forgives what floating point does to 0.1 + 0.2.
        relative = max(self.relative_tolerance, 1e-9) * abs(self.answer)
        return abs(value - self.answer) <= max(self.tolerance, relative)


@dataclass(frozen=True, kw_only=True)
class NumberTask(Number):
    """A number that an exercise asks for: a task of it, with hints and a solution.

    Args:
        title: a few words.
        stars: 1 (warm-up) to 3 (hard).
        hints: three, which ``hint`` shows one by one.
    """

    title: str
    stars: int
    hints: tuple[str, str, str]
    relative_tolerance: float = 1e-5  # float32 has no more digits


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _as_list(given: object) -> list:
    """What was chosen, as a list: nothing, one or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple, set)) else [given]


def _float(text: str) -> float:
    """`float(text)`, with a comma for the decimal point and grouped thousands."""
    text = text.strip()
    if re.fullmatch(r"[-+]?\d{1,3}([ _\u00a0\u202f]\d{3})+([.,]\d+)?", text):
        text = re.sub(r"[ _\u00a0\u202f]", "", text)
    elif re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+\.\d+|[-+]?\d{1,3}(,\d{3}){2,}", text):
        text = text.replace(",", "")
    if not re.fullmatch(
        r"[-+]?(\d+([.,]\d*)?|[.,]\d+)(e[-+]?\d+)?", text, re.IGNORECASE
    ):
        raise ValueError(text)
    return float(text.replace(",", "."))


def format_number(value: float) -> str:
    """A number as a person writes it: `6`, not `6.0`."""
    whole = float(value).is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else repr(float(value))


def lesson(number: str, *questions: Question) -> dict[str, Question]:
    """The questions of one lesson by id, in order.

    Raises `QuestionError` for an id used twice or of another lesson.
    """
    by_id: dict[str, Question] = {}
    for question in questions:
        if question.lesson != number:
            raise QuestionError(
                f"Question {question.id!r} stands in lesson {number}: "
                f'its id must begin with "{number}.".'
            )
        if question.id in by_id:
            raise QuestionError(f"Two questions have the id {question.id!r}.")
        by_id[question.id] = question
    return by_id


def lessons() -> list[str]:
    """The numbers of the lessons that have questions, in order."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(
        name.removeprefix("lesson_") for name in names if name.startswith("lesson_")
    )


def load(number: str) -> dict[str, Question]:
    """The questions of one lesson by id; `number` is one of `lessons()`."""
    return importlib.import_module(f"{__name__}.lesson_{number}").QUESTIONS


def find(question_id: str) -> Question:
    """The question of that id. Imports its lesson only.

    Raises `QuestionError`, with near names, if there is none.
    """
    question_id = str(question_id)
    number = question_id.partition(".")[0]
    questions = load(number) if number in lessons() else {}
    if question_id in questions:
        return questions[question_id]
    known = list(questions) or [id for one in lessons() for id in load(one)]
    near = difflib.get_close_matches(question_id, known)
    where = f"Lesson {number}" if questions else "The course"
    message = f"There is no question {question_id!r}."
    if near:
        message += f" Did you mean {' or '.join(map(repr, near))}?"
    raise QuestionError(f"{message} {where} has: {', '.join(known)}.")
