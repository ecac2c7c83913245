"""The quiz questions: what they ask, what is right, and why.

One readable file a lesson (`lesson_00.py`, `lesson_01.py`, …). Each holds::

    QUESTIONS = lesson(
        SingleChoice("00.ranks", "What is a rank?", Wrong("A GPU.", "…"), Right(…)),
        …
    )

and the number that its exercise asks for, a `NumberTask`.

The key and the explanations stay in these files. A notebook, and the page that
shows it, get a question's text and nothing else until the learner has answered.

Text may hold `code`, *emphasis* and **bold** (see `markup.py`), nothing else.
`tests/test_quiz.py` fails for a badly defined question.

Most questions are judged as soon as they are answered. With `measured=True` the next
cells of the lesson show what is right: then an answer is a prediction. It is noted and
not marked, and the cell `why("00.all_reduce")` below the measurement explains it.
"""

from __future__ import annotations

import difflib
import importlib
import math
import operator
import pkgutil
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar


class QuestionError(ValueError):
    """Two questions have one id, or there is no question of that name."""


class AnswerError(ValueError):
    """An answer that cannot be judged: nothing chosen, or not a number."""


@dataclass(frozen=True)
class Choice:
    """One option: its `text`, and `why` it is right or wrong."""

    text: str
    why: str

    right: ClassVar[bool]


class Right(Choice):
    """An option that is right."""

    right = True


class Wrong(Choice):
    """An option that is wrong."""

    right = False


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
        right: the verdict; None for a prediction, before the notebook has measured.
        word: the verdict in words.
        text: the explanation.
        notes: what stands beside single options.
    """

    right: bool | None
    word: str
    text: str
    notes: tuple[Note, ...] = ()


_WORDS = {True: "Right.", False: "Not quite.", None: "You have not predicted this."}


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

    @property
    @abstractmethod
    def task(self) -> str:
        """What to do, in a few words."""

    @property
    def lesson(self) -> str:
        """The number of the lesson, such as "00"."""
        return self.id.partition(".")[0]

    @property
    def options(self) -> list[str]:
        """The texts to choose from; none where the answer is a number."""
        return []

    @abstractmethod
    def explanations(self) -> list[str]:
        """All that the learner may be told after an answer."""

    @property
    def button(self) -> str:
        """What the form's button does before there is an answer."""
        return "Note it" if self.measured else "Check"

    @abstractmethod
    def read(self, given: object) -> object:
        """Turn what came from a page, a cell or a file into a JSON-able answer.

        Raises `AnswerError`, with a text for the learner, if it cannot be judged.
        """

    @abstractmethod
    def judge(self, answer: object | None) -> Feedback:
        """All that there is to say: the verdict, what is right, and why.

        `answer` is what `read` returned, or None: nothing was answered.
        """

    @abstractmethod
    def grade(self, answer: object) -> Feedback:
        """The verdict, and no more than helps to try again if it is not right."""

    def respond(self, answer: object, tries: int) -> Feedback:
        """What the learner is told at once. `tries` counts this one."""
        if not self.measured:
            return self.grade(answer)
        # A form shows the chosen options. A number may have been read wrongly.
        word = "Noted." if self.options else f"{self._repeated(answer)} Noted."
        text = "Run the next cells: they show what is right, and why."
        return Feedback(None, word, text)

    def explain(self, answer: object | None) -> Feedback:
        """What is right and why, once it was measured; None: nothing was predicted."""
        judged = self.judge(answer)
        if answer is None:
            return judged
        return replace(judged, word=f"{self._repeated(answer)} {judged.word}")

    @abstractmethod
    def _repeated(self, answer: object) -> str:
        """An answer, repeated in a sentence."""


@dataclass(frozen=True, init=False)
class _ChoiceQuestion(Question):
    """A question with options. Its answers are option texts, not numbers.

    So a saved answer still means the same after the options were put in another
    order, and is seen to be out of date once its option was reworded.
    """

    choices: tuple[Choice, ...]

    def __init__(
        self,
        id: str,
        prompt: str,
        *choices: Choice,
        code: str = "",
        measured: bool = False,
    ) -> None:
        object.__setattr__(self, "choices", choices)
        super().__init__(id, prompt, code=code, measured=measured)

    @property
    def options(self) -> list[str]:
        return [choice.text for choice in self.choices]

    def explanations(self) -> list[str]:
        return [choice.why for choice in self.choices]

    def _repeated(self, answer: str | list[str]) -> str:
        chosen = _as_list(answer)
        numbers = [self.options.index(text) + 1 for text in chosen]
        if len(chosen) == 1:
            return f"Your prediction: {numbers[0]}, “{chosen[0].rstrip('.')}”."
        return f"Your prediction: {' and '.join(map(str, numbers))}."

    def _option(self, given: object) -> str:
        """The text of one option, given by that text or by its number from 1."""
        if isinstance(given, str) and given in self.options:
            return given
        try:  # operator.index: of NumPy, too
            number = int(given) if isinstance(given, str) else operator.index(given)
        except (TypeError, ValueError):
            number = 0
        if isinstance(given, bool) or not 1 <= number <= len(self.choices):
            raise AnswerError(
                f"There is no option {_shortened(repr(given))}. Give a number from 1 "
                f"to {len(self.choices)}."
            )
        return self.options[number - 1]


class SingleChoice(_ChoiceQuestion):
    """Exactly one option is right."""

    kind: ClassVar[str] = "single"
    task: ClassVar[str] = "Choose one"

    def read(self, given: object) -> str:
        given = _as_list(given)
        if not given:
            raise AnswerError("Choose an option first.")
        if len(given) > 1:
            raise AnswerError(f"Choose one option, not {len(given)}.")
        return self._option(given[0])

    def judge(self, answer: str | None) -> Feedback:
        """The chosen option's explanation, and beside the others theirs."""
        notes, chosen = [], None
        for number, choice in enumerate(self.choices):
            if choice.text == answer:
                chosen = choice
            else:
                word = "Right:" if choice.right else "Not right:"
                notes.append(Note(number, None, word, choice.why))
        right, text = (chosen.right, chosen.why) if chosen else (None, "")
        return Feedback(right, _WORDS[right], text, tuple(notes))

    def grade(self, answer: str) -> Feedback:
        judged = self.judge(answer)
        return judged if judged.right else replace(judged, notes=())


class MultipleChoice(_ChoiceQuestion):
    """Each option is right or wrong by itself; tick all that are right."""

    kind: ClassVar[str] = "multiple"
    task: ClassVar[str] = "Tick all that apply"
    WORDS: ClassVar[dict[tuple[bool | None, bool], str]] = {  # (ticked, right)
        (True, True): "Right, it applies:",
        (True, False): "Ticked, but it does not apply:",
        (False, True): "Not ticked, but it applies:",
        (False, False): "Right, it does not apply:",
        (None, True): "It applies:",
        (None, False): "It does not apply:",
    }

    def read(self, given: object) -> list[str]:
        ticked = {self._option(one) for one in _as_list(given)}
        if not ticked:
            raise AnswerError("Tick at least one box first.")
        return [text for text in self.options if text in ticked]

    def judge(self, answer: list[str] | None) -> Feedback:
        """A word and an explanation for every option, ticked or not."""
        notes = []
        for number, choice in enumerate(self.choices):
            ticked = None if answer is None else choice.text in answer
            good = None if answer is None else ticked == choice.right
            notes.append(
                Note(number, good, self.WORDS[ticked, choice.right], choice.why)
            )
        if answer is None:
            return Feedback(None, _WORDS[None], "", tuple(notes))
        good, total = sum(note.good for note in notes), len(notes)
        count = f"all {total}" if good == total else f"{good} of the {total}"
        text = f"You judged {count} options correctly."
        return Feedback(good == total, _WORDS[good == total], text, tuple(notes))

    grade = judge

    def respond(self, answer: list[str], tries: int) -> Feedback:
        """After the first wrong try only how many are right: there is a second one."""
        feedback = super().respond(answer, tries)
        if feedback.right is not False or tries > 1:
            return feedback
        later = "The next try shows, for each option, if you were right."
        text = f"{feedback.text} Change your ticks. {later}"
        return replace(feedback, text=text, notes=())


@dataclass(frozen=True)
class Number(Question):
    """Predict a number, in `unit` if there is one.

    Args:
        answer: the right number.
        why: why it is right.
        hint: what to think about, for a wrong number that no slip explains.
        slips: typical wrong numbers, and why a learner may have got each.
        tolerance: accepted distance from `answer`, in the same unit.
        relative_tolerance: the same as a share of `answer`: 0.1 accepts ±10 %.
        purpose: what the notebook does with the number, shown under the input.
        is_name: it is the number of a rank, say, of which none is "too high".
    """

    answer: float
    why: str = field(kw_only=True)
    hint: str = field(kw_only=True)
    slips: dict[float, str] = field(default_factory=dict, kw_only=True)
    unit: str = field(default="", kw_only=True)
    tolerance: float = field(default=0.0, kw_only=True)
    relative_tolerance: float = field(default=0.0, kw_only=True)
    purpose: str = field(default="", kw_only=True)
    is_name: bool = field(default=False, kw_only=True)

    kind: ClassVar[str] = "number"

    @property
    def task(self) -> str:
        return "Predict the number" if self.measured else "Work it out"

    def explanations(self) -> list[str]:
        return [self.why, self.hint, *self.slips.values()]

    def read(self, given: object) -> float:
        """A number from `6`, `"1.5"`, `"1,5"`, `"1.5 GB"`, `"1 500"`, `"3/8"`, `"1e9"`.

        Where the unit is %, a fraction such as `"3/8"` is a share: 37.5. One comma
        before three digits is refused: it may be a thousand or a decimal.
        """
        if getattr(given, "ndim", None) == 0:  # a tensor or an array with one number
            given = given.item()
        text = str("" if given is None else given).strip()
        if not text:
            raise AnswerError("Type a number first.")
        number = text.replace("−", "-").replace("–", "-")  # a minus sign, an en dash
        also = ["x", "×"] if self.unit == "times" else []
        for unit in filter(None, [self.unit, _singular(self.unit), *also]):
            number = number.removesuffix(unit).rstrip()
        if re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", number):
            big, small = number.replace(",", ""), number.replace(",", ".")
            raise AnswerError(
                f'Is "{number}" {big} or {small}? Type it without the comma.'
            )
        top, slash, bottom = number.partition("/")
        try:
            value = _float(top) / (_float(bottom) if slash else 1.0)
        except (ValueError, ZeroDivisionError):
            value = math.nan
        if not math.isfinite(value):
            of_unit = f" of {self.unit}" if self.unit else ""
            raise AnswerError(
                f'"{_shortened(text)}" is not a number{of_unit}. Type digits: 1.5, 2/3 '
                "or 1e9."
            )
        share = slash and self.unit == "%" and not text.endswith("%")
        return 100 * value if share else value

    def judge(self, answer: float | None) -> Feedback:
        """A wrong number's slip, then the number that was expected, and why."""
        expected = f"Expected: {self._with_unit(self.answer)}. {self.why}"
        if answer is None or self._accepts(answer):
            right = answer is not None or None
            return Feedback(right, _WORDS[right], expected)
        graded = self.grade(answer)
        slip = graded.text.removesuffix(self.hint).rstrip()  # it comes too late
        return replace(graded, text=f"{slip} {expected}")

    def grade(self, answer: float) -> Feedback:
        """Right within the tolerance; else too high or too low, and a way on."""
        if self._accepts(answer):
            # Not "the exact value": where a cell measures it, another digit may come.
            value = f"The answer is {self._with_unit(self.answer)}. "
            why = self.why if answer == self.answer else value + self.why
            return Feedback(True, _WORDS[True], why)
        near = [value for value in self.slips if _is_near(answer, value)]
        if near:
            way_on = self.slips[min(near, key=lambda value: abs(answer - value))]
        elif self.unit == "%" and self._accepts(100 * answer):
            way_on = "Is that a share? In percent, please."
        else:
            way_on = self.hint
        side = "Too high. " if answer > self.answer else "Too low. "
        return Feedback(False, _WORDS[False], f"{'' if self.is_name else side}{way_on}")

    def _repeated(self, answer: float) -> str:
        return f"Your prediction: {self._with_unit(answer)}."

    def _with_unit(self, value: float) -> str:
        number = format_number(value)
        if self.unit == "times":
            return f"{number}×"
        return f"{number} {_singular(self.unit) if value == 1 else self.unit}".rstrip()

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


def _is_near(answer: float, slip: float) -> bool:
    """Is it this number? Digits behind the point may be left out."""
    whole = slip == round(slip)
    return math.isclose(answer, slip, rel_tol=1e-3 if whole else 1e-2)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _as_list(given: object) -> list:
    """What was chosen, as a list: nothing, one or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple, set)) else [given]


def _singular(unit: str) -> str:
    """ "step" for "steps"; "ms" stays."""
    return unit.removesuffix("s") if len(unit) > 2 else unit


def _float(text: str) -> float:
    """`float(text)`, with a comma for the decimal point and grouped thousands."""
    text = re.sub(r"(?<=\d)[ _\u00a0\u202f](?=\d{3}(?!\d))", "", text.strip())
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+\.\d+|[-+]?\d{1,3}(,\d{3}){2,}", text):
        text = text.replace(",", "")
    return float(text.replace(",", "."))


def format_number(value: float) -> str:
    """A number as a person writes it: `6`, not `6.0`."""
    return f"{value:.15g}"


def lesson(*questions: Question) -> dict[str, Question]:
    """The questions of one lesson by id, in order.

    Raises `QuestionError` for an id used twice.
    """
    by_id = {}
    for question in questions:
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
    return _module(number).QUESTIONS


def find(question_id: str) -> Question:
    """The question of that id, or the number that an exercise asks for.

    Imports its lesson only. Raises `QuestionError`, with near names, if there is none.
    """
    question_id = str(question_id)
    number = question_id.partition(".")[0]
    numbers = [number] if number in lessons() else lessons()
    known: dict[str, Question] = {}
    for one in numbers:
        tasks = [v for v in vars(_module(one)).values() if isinstance(v, NumberTask)]
        known |= load(one) | {task.id: task for task in tasks}
    if question_id in known:
        return known[question_id]
    near = difflib.get_close_matches(question_id, known)
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    where = f"Lesson {number}" if numbers == [number] else "The course"
    raise QuestionError(
        f"There is no question {question_id!r}.{meant} {where} has: {', '.join(known)}."
    )


def _module(number: str):
    return importlib.import_module(f"{__name__}.lesson_{number}")
