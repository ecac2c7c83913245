"""The quizzes without a browser: questions, judging, texts, saving, stable outputs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import nbformat
import numpy
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

import course_utils.notebook.quiz as quizzes
from course_utils.notebook.progress import answers, course_map, record_answer
from course_utils.notebook.quiz import Quiz, quiz, why
from course_utils.notebook.quiz_widget import QuizWidget
from course_utils.questions import (
    AnswerError,
    Choice,
    MultipleChoice,
    Number,
    Question,
    QuestionError,
    SingleChoice,
    Slip,
    find,
    format_number,
    lesson,
    lessons,
    load,
)
from course_utils.questions.markup import to_html, to_text

ROOT = Path(__file__).parents[1]
EVERY_QUESTION = [question for one in lessons() for question in load(one).values()]

TRUE = Choice("a process", why="It has a number.", right=True)
FALSE = Choice("a GPU", why="That is a device.")
ALSO_TRUE = Choice("numbered from 0", why="As in Python.", right=True)
NUMBER = Number(
    "99.size",
    "How large?",
    10,
    why="2 · 5.",
    hint="Multiply.",
    unit="GB",
    slips=[Slip(7, "You added.")],
)


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A learner's session: answers are saved, in a folder of this test."""
    monkeypatch.setenv("COURSE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(quizzes, "_in_test_run", lambda: False)
    monkeypatch.setattr(quizzes, "_quizzes", {})
    return tmp_path / "state"


@pytest.fixture
def unsaveable(learner: Path) -> None:
    """Progress can be read, not written: a folder stands where the lock should be."""
    (learner / "progress.lock").mkdir(parents=True)


def new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a restart of the kernel forgets."""
    monkeypatch.setattr(quizzes, "_quizzes", {})


def right_answer(question: Question) -> object:
    if isinstance(question, Number):
        return question.answer
    return [n for n, choice in enumerate(question.choices, 1) if choice.right]


def explanations(question: Question) -> list[str]:
    if isinstance(question, Number):
        return [question.why, question.hint, *(slip.why for slip in question.slips)]
    return [choice.why for choice in question.choices]


# ------------------------------------------------------------- every lesson's questions


@pytest.mark.parametrize("question", EVERY_QUESTION, ids=lambda one: one.id)
def test_the_right_answer_and_only_it_is_accepted(question: Question) -> None:
    assert question.grade(question.read(right_answer(question))).right
    if isinstance(question, Number):
        wrong = [slip.value for slip in question.slips] + [question.answer * 3 + 1e6]
    elif isinstance(question, SingleChoice):
        wrong = [n for n, choice in enumerate(question.choices, 1) if not choice.right]
    else:
        numbers = range(1, len(question.choices) + 1)
        subsets = [
            [n for n in numbers if bits >> n & 1]
            for bits in range(2, 2 << len(question.choices), 2)
        ]
        wrong = [one for one in subsets if one != right_answer(question)]
    for given in wrong:
        feedback = question.grade(question.read(given))
        assert not feedback.right, given
        assert feedback.text


@pytest.mark.parametrize("question", EVERY_QUESTION, ids=lambda one: one.id)
def test_every_option_is_explained_and_none_by_the_same_words(
    question: Question,
) -> None:
    words = explanations(question)
    assert len(set(words)) == len(words)
    feedback = question.grade(question.read(right_answer(question)))
    said = " ".join([feedback.text, *(note.text for note in feedback.notes)])
    if not isinstance(question, Number):
        assert all(why in said for why in words)


@pytest.mark.parametrize("lesson", lessons())
def test_the_place_of_the_right_option_is_no_giveaway(lesson: str) -> None:
    places = [
        [choice.right for choice in question.choices].index(True)
        for question in load(lesson).values()
        if isinstance(question, SingleChoice)
    ]
    assert max(map(places.count, places)) <= max(1, 0.5 * len(places))


def test_the_longest_option_is_no_giveaway() -> None:
    longer = {
        question.id: max(len(one.text) for one in question.choices if one.right)
        / max(len(one.text) for one in question.choices if not one.right)
        for question in EVERY_QUESTION
        if isinstance(question, SingleChoice)
    }
    assert {id: times for id, times in longer.items() if times > 1.2} == {}
    # By chance, it is so in a quarter of them.
    assert sum(times > 1 for times in longer.values()) <= 0.4 * len(longer)


@pytest.mark.parametrize("question", EVERY_QUESTION, ids=lambda one: one.id)
def test_no_question_shows_raw_markup(
    learner: Path, capsys, question: Question
) -> None:
    item = Quiz(question)
    item._form()
    pages = [item.html(), *item._widget.question["options"]]
    texts = [item.text()]
    for _ in range(2):
        item.submit(right_answer(question))
        feedback = item._widget.feedback
        pages += [feedback["text"], *(note["text"] for note in feedback["notes"])]
        texts.append(item.feedback_text())
        item.explain()
    texts.append(capsys.readouterr().out)
    for page in pages:
        assert not re.search(r"[*`]", re.sub(r"<code>.*?</code>", "", page, flags=re.S))
    for text in texts:
        text = text.replace(textwrap.indent(question.code, "    "), "")
        assert "*" not in re.sub(r"`[^`]*`", "", text)


# --------------------------------------------------------------------- bad definitions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SingleChoice("ranks", "What?", [TRUE, FALSE]), "an id is"),
        (lambda: SingleChoice("00.Ranks", "What?", [TRUE, FALSE]), "an id is"),
        (lambda: SingleChoice("00.x", " ", [TRUE, FALSE]), "has no prompt"),
        (lambda: SingleChoice("00.x", "What?", [TRUE]), "1 option"),
        (lambda: SingleChoice("00.x", "What?", [FALSE, FALSE]), "the same text"),
        (lambda: SingleChoice("00.x", "What is `x?", [TRUE, FALSE]), "backtick"),
        *(
            (lambda bad=bad: SingleChoice("00.x", bad, [TRUE, FALSE]), message)
            for bad, message in {
                "Is it *true?": "a * is not closed",
                "Is it **true*?": "a * is not closed",
                "2 * 3?": "marks no emphasis: write ×",
                "2*3?": "a * is not closed",
                "Is it * true*?": "marks no emphasis",
                "Is it ***true***?": "a *** in",
                "See [this](page).": "']('",
                "Is it <b>true</b>?": "'<b'",
                "Is it _true_?": "'_true_'",
                "Is it $2(n - 1)/n$?": "would not be rendered",
                "What is\n- it?": "would not be rendered",
            }.items()
        ),
        (
            lambda: SingleChoice("00.x", "?", [TRUE, Choice("no", "Not *so.")]),
            "a * is not closed in 'Not *so.'",
        ),
        (
            lambda: SingleChoice("00.x", "What?", [FALSE, Choice("b", "no")]),
            "no option is right",
        ),
        (
            lambda: SingleChoice("00.x", "What?", [TRUE, ALSO_TRUE]),
            "2 options are right; use MultipleChoice",
        ),
        (
            lambda: MultipleChoice("00.x", "What?", [FALSE, Choice("b", "no")]),
            "no option is right",
        ),
        (
            lambda: MultipleChoice("00.x", "What?", [TRUE, Choice("b", why=" ")]),
            "option 'b' has no explanation",
        ),
        (
            lambda: MultipleChoice("00.x", "What?", [TRUE, Choice("", why="no")]),
            "an option has no text",
        ),
        (lambda: Number("00.x", "What?", 6, why="", hint="Add."), "an explanation"),
        (lambda: Number("00.x", "What?", 6, why="Sum.", hint=""), "a hint"),
        (
            lambda: Number("00.x", "What?", float("nan"), why="Sum.", hint="Add."),
            "its answer is nan",
        ),
        (
            lambda: Number("00.x", "?", 6, why="Sum.", hint="Add.", tolerance=-1),
            "negative",
        ),
        (
            lambda: Number(
                "00.x",
                "?",
                6,
                why="Sum.",
                hint="Add.",
                relative_tolerance=0.5,
                slips=[Slip(4, "no")],
            ),
            "slip 4 is within the tolerance",
        ),
        (
            lambda: Number(
                "00.x", "?", 6, why="Sum.", hint="Add.", slips=[Slip(4, "")]
            ),
            "slip 4 has no explanation",
        ),
    ],
)
def test_a_bad_definition_is_refused(
    make: Callable[[], Question], message: str
) -> None:
    with pytest.raises(QuestionError, match="badly defined") as caught:
        make()
    assert message in str(caught.value)


def test_a_lesson_refuses_a_double_or_foreign_id() -> None:
    one = SingleChoice("01.x", "What?", [TRUE, FALSE])
    with pytest.raises(QuestionError, match=r"Two questions have the id '01\.x'"):
        lesson("01", one, one)
    with pytest.raises(QuestionError, match="stands in lesson 02: its id must begin"):
        lesson("02", one)


@pytest.mark.parametrize(
    ("unknown", "message"),
    [
        ("00.rank", "'00.rank'. Did you mean '00.ranks'"),
        ("all_reduce", "Did you mean '00.all_reduce'"),
        ("00.zzz", "Lesson 00 has: 00.ranks, 00.all_reduce"),
        ("77.ranks", "The course has: 00.ranks"),
        (7, "no question '7'"),
        (["00.ranks"], "The course has: 00.ranks"),
    ],
)
def test_an_unknown_id_lists_near_names(unknown: object, message: str) -> None:
    with pytest.raises(QuestionError) as caught:
        quiz(unknown)
    assert message in str(caught.value)


# --------------------------------------------------------------------------- judging


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (6, 6.0),
        ("6", 6.0),
        (" 1.5 ", 1.5),
        ("1,5", 1.5),
        ("0,125", 0.125),
        (".5", 0.5),
        ("-3", -3.0),
        ("−3", -3.0),
        ("–3", -3.0),
        ("1e9", 1e9),
        ("2.5E-3", 0.0025),
        ("1.5 GB", 1.5),
        ("1.5GB", 1.5),
        ("1 500", 1500.0),
        ("1_500_000", 1.5e6),
        ("1,500,000", 1.5e6),
        ("1,500.5", 1500.5),
        ("3/8", 0.375),
        ("3 / 8 GB", 0.375),
    ],
)
def test_a_number_is_read_as_people_write_it(typed: object, value: float) -> None:
    assert NUMBER.read(typed) == value


@pytest.mark.parametrize(
    ("unit", "typed", "value"),
    [
        ("GPUs", "3 GPUs", 3.0),
        ("GPUs", "1 GPU", 1.0),
        ("times", "1.5x", 1.5),
        ("times", "1.5 ×", 1.5),
        ("times", "one time", None),
        ("ms", "3 ms", 3.0),
        ("ms", "3 m", None),
        ("s", "3 s", 3.0),
        ("%", "37.5", 37.5),
        ("%", "37.5 %", 37.5),
        ("%", "3/8", 37.5),
        ("%", "3/8 %", 0.375),
    ],
)
def test_units_and_shares(unit: str, typed: str, value: float | None) -> None:
    question = dataclasses.replace(NUMBER, unit=unit)
    if value is None:
        with pytest.raises(AnswerError):
            question.read(typed)
    else:
        assert question.read(typed) == value


@pytest.mark.parametrize("given", [2, "2", " 2 ", numpy.int64(2), "a lie"])
def test_an_option_by_its_number_or_text(given: object) -> None:
    options = [TRUE, Choice("a lie", "no")]
    assert SingleChoice("00.x", "What?", options).read(given) == "a lie"


def test_an_option_that_is_a_number_goes_before_its_place() -> None:
    options = [Choice("2", "yes", right=True), Choice("1", "no")]
    question = SingleChoice("00.x", "What?", options)
    assert (question.read("2"), question.read(2)) == ("2", "1")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("", "Type a number first."),
        (None, "Type a number first."),
        ("six", '"six" is not a number. Type digits: 1.5, 3/8 or 1e9.'),
        ("1500 MB", '"1500 MB": the unit here is GB. Type the number of GB.'),
        ("15 MB/s", '"15 MB/s": the unit here is GB. Type the number of GB.'),
        ("9" * 5000, '"999999999999999999999999999999999999 ..." is not a number'),
        ("1 e9", "is not a number"),
        ("<b>6</b>", "is not a number"),
        ("~6", "is not a number"),
        ("1.5.2", "is not a number"),
        ("-", "is not a number"),
        ("6 gb", "the unit here is GB"),
        ("six GB", "The unit GB may follow, no other."),
        ("GB", "is not a number"),
        ("1,500", 'Is "1,500" 1500 or 1.500? Type it without the comma.'),
        ("1 50", "is not a number"),
        ("1/0", "is not a number"),
        ("1/2/3", "is not a number"),
        ("nan", "is not a number"),
        ("inf", "is not a number"),
        ("1e999", "is not a number"),
        ("0x10", "is not a number"),
        (True, "is not a number"),
        ([6], "is not a number"),
    ],
)
def test_what_is_no_number_is_refused_with_a_reason(
    typed: object, message: str
) -> None:
    with pytest.raises(AnswerError) as caught:
        NUMBER.read(typed)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tolerances", "accepted", "refused"),
    [
        ({}, [10, 10.000000001], [10.01, 9.99, -10]),
        ({"tolerance": 0.5}, [9.5, 10.5], [9.4, 10.6]),
        ({"relative_tolerance": 0.1}, [9, 11], [8.9, 11.1]),
        ({"tolerance": 0.5, "relative_tolerance": 0.1}, [9, 11], [8.9, 11.1]),
    ],
)
def test_tolerances(tolerances: dict, accepted: list, refused: list) -> None:
    question = Number("00.x", "?", 10, why="2 · 5.", hint="Multiply.", **tolerances)
    assert all(question.grade(float(value)).right for value in accepted)
    assert not any(question.grade(float(value)).right for value in refused)


def test_what_a_number_is_answered_with() -> None:
    assert NUMBER.grade(10.0).text == "2 · 5."
    assert NUMBER.grade(7.0).text == "Too low. You added."
    assert NUMBER.grade(12.0).text == "Too high. Multiply."
    near = Number("00.x", "?", 10, why="2 · 5.", hint="Multiply.", tolerance=1)
    assert near.grade(9.5).text == "The answer is 10. 2 · 5."
    exact = Number("00.x", "?", 0.3, why="Sum.", hint="Add.")
    assert exact.grade(0.1 + 0.2).right


def test_a_slip_is_known_without_all_its_digits() -> None:
    slips = [Slip(0.2727, "A share."), Slip(24.023, "One more."), Slip(24, "Round.")]
    question = Number("00.x", "?", 27, why="A.", hint="Think.", slips=slips)
    for answer, says in ((0.27, "A share."), (3 / 11, "A share."), (0.28, "Think.")):
        assert question.grade(answer).text == f"Too low. {says}"
    assert question.grade(24.0).text == "Too low. Round."
    assert question.grade(24.1).text == "Too low. One more."
    assert question.grade(24.3).text == "Too low. Think."


@pytest.mark.parametrize(
    ("name", "typed", "says"),
    [
        ("01.memory", "112", "GiB"),
        ("02.bubble_four", "0.27", "Right as a share."),
        ("02.bubble_four", "0.273", "Right as a share."),
        ("02.parameters_share", "43.75", "7 of 16 blocks"),
        ("02.parameters_share", "44", "7 of 16 blocks"),
        ("02.parameters_share", "0.0565", "Right as a share."),
        ("02.parameters_share", "0.06", "Is that a share? In percent, please."),
    ],
)
def test_slips_as_people_type_them(name: str, typed: str, says: str) -> None:
    question = find(name)
    feedback = question.grade(question.read(typed))
    assert not feedback.right
    assert says in feedback.text


def test_a_single_choice_tells_the_other_whys_only_once_it_is_right() -> None:
    question = SingleChoice("00.x", "What?", [FALSE, TRUE])
    wrong = question.grade(question.read(1))
    assert (wrong.right, wrong.word, wrong.text) == (False, "Not quite.", FALSE.why)
    assert wrong.notes == ()
    right = question.grade(question.read(2))
    assert (right.right, right.word, right.text) == (True, "Right.", TRUE.why)
    assert [(note.option, note.text) for note in right.notes] == [(0, FALSE.why)]


def test_a_multiple_choice_has_a_word_for_every_option() -> None:
    other = Choice("a thread", why="Ranks are processes.")
    question = MultipleChoice("00.x", "What?", [TRUE, FALSE, ALSO_TRUE, other])
    feedback = question.grade(question.read([1, 2]))
    assert not feedback.right
    assert feedback.text == "You judged 2 of the 4 statements correctly."
    assert [(note.good, note.word) for note in feedback.notes] == [
        (True, "Right, this is true:"),
        (False, "Ticked, but not true:"),
        (False, "Not ticked, but true:"),
        (True, "Right, this is not true:"),
    ]
    assert question.grade(question.read({3, 1})).right


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "Choose an option first."),
        ([], "Choose an option first."),
        ([1, 2], "Choose one option, not 2."),
        (0, "There is no option 0. Give a number from 1 to 2."),
        (3, "There is no option 3."),
        (True, "There is no option True."),
        (1.0, "There is no option 1.0."),
        ("3", "There is no option '3'. Give a number from 1 to 2."),
        ("1,2", "There is no option '1,2'."),
        ("a thread", "There is no option 'a thread'."),
        ("a" * 5000, f"There is no option '{'a' * 35} .... Give a number"),
    ],
)
def test_what_is_no_option_is_refused(given: object, message: str) -> None:
    with pytest.raises(AnswerError) as caught:
        SingleChoice("00.x", "What?", [TRUE, FALSE]).read(given)
    assert message in str(caught.value)
    if given not in (None, [], [1, 2]):
        with pytest.raises(AnswerError, match="There is no option"):
            MultipleChoice("00.x", "What?", [TRUE, FALSE]).read([1, given])


def test_format_number() -> None:
    values = (6.0, -2.0, 1.5, 1e9, 0.1, 1e22)
    written = ["6", "-2", "1.5", "1000000000", "0.1", "1e+22"]
    assert [format_number(value) for value in values] == written
    assert [float(text) for text in written] == list(values)


# --------------------------------------------------------------------------- text form


def test_the_text_form_in_a_terminal(learner: Path, capsys) -> None:
    shown = quiz("00.ranks")
    printed = capsys.readouterr().out
    assert printed.startswith("Quiz 00.ranks. Choose one.\n\nWhat is a rank?\n")
    assert "  3. One of the program's processes" in printed
    assert 'To answer: quiz("00.ranks", answer=1)' in printed
    assert max(map(len, printed.splitlines())) <= 79
    assert repr(shown) == "Quiz('00.ranks')"
    assert shown.value is None
    assert shown.feedback is None
    assert shown.feedback_text() == ""

    quiz("00.ranks", answer=2)
    printed = capsys.readouterr().out
    assert printed.startswith("Not quite. Threads share one process")
    assert "Lesson 00: 0 of 2 right, 0 at the first try." in printed

    quiz("00.ranks", answer=3)
    printed = capsys.readouterr().out
    assert printed.startswith("Right. Every process runs the same code.")
    notes = printed.split("Why not: Threads share one process")
    assert len(notes) == 2 and notes[0].splitlines()[-2].startswith("  2. ")
    assert "Lesson 00: 1 of 2 right, 0 at the first try." in printed

    quiz("00.ranks")
    printed = capsys.readouterr().out
    assert "Your last answer: 3\nRight. Every process" in printed


def test_a_bad_answer_in_a_terminal_is_not_saved(learner: Path) -> None:
    with pytest.raises(AnswerError, match="from 1 to 4"):
        quiz("00.ranks", answer=9)
    with pytest.raises(AnswerError, match="not a number"):
        quiz("00.all_reduce", answer="six")
    assert answers() == {}


def test_a_plain_python_prints_and_needs_no_widgets(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from course_utils import quiz\n"
        "quiz('00.variables', answer=[1, 4])\n"
        "assert 'ipywidgets' not in sys.modules and 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "COURSE_STATE": str(tmp_path)}
    environment.pop("PYTEST_CURRENT_TEST")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("Right. You judged all 4 statements correctly.")
    saved = json.loads((tmp_path / "progress.json").read_text())["questions"]
    assert saved["00.variables"]["correct"] is True


@pytest.mark.parametrize("question", EVERY_QUESTION, ids=lambda one: one.id)
def test_the_stored_text_holds_no_key(question: Question) -> None:
    item = Quiz(question)
    item.submit(right_answer(question))  # an answer changes nothing in it
    text = " ".join(item.text().split())
    html = item.html()
    assert Quiz(question).text() == item.text()
    assert Quiz(question).html() == html
    assert to_text(question.prompt) in text
    assert " ".join(question.code.split()) in text
    for number, option in enumerate(question.options, 1):
        assert f" {number}. {to_text(option)}" in text
    items = "".join(f"<li>{to_html(option)}</li>" for option in question.options)
    assert (f"<ol>{items}</ol>" in html) == bool(question.options)
    for reason in explanations(question):
        assert to_text(reason) not in text
        assert to_html(reason) not in html
    key = "\n".join(question.key())
    shown = [question.why] if isinstance(question, Number) else explanations(question)
    assert all(reason in key for reason in shown)


def test_markup_is_rendered_and_html_is_escaped() -> None:
    question = SingleChoice(
        "99.x",
        "Is 1 < 2 & `a<b>*`, *never*, **al `x` ways *so* it is**",
        [TRUE, FALSE],
        code="<script>",
    )
    html, text = Quiz(question).html(), Quiz(question).text()
    assert (
        "Is 1 &lt; 2 &amp; <code>a&lt;b&gt;*</code>, <em>never</em>, "
        "<strong>al <code>x</code> ways <em>so</em> it is</strong>"
    ) in html
    assert "<script>" not in html
    assert "Is 1 < 2 & `a<b>*`, never, al `x` ways so it is" in text


def test_the_module_stands_in_for_the_function(learner: Path, capsys) -> None:
    assert quizzes("00.ranks").question is find("00.ranks")
    assert "What is a rank?" in capsys.readouterr().out


# ------------------------------------------------------------------- saved and restored


@pytest.mark.parametrize(
    ("id", "given", "value"),
    [
        ("00.ranks", 2, "A thread inside the notebook's own Python process."),
        (
            "00.variables",
            [4, 1],
            [
                "There are four variables `x`, one in each process.",
                "The next `%%ranks` cell still finds `x` on every rank.",
            ],
        ),
        ("01.memory", "30", 30.0),
    ],
)
def test_an_answer_outlives_the_kernel(
    learner: Path, monkeypatch, id: str, given: object, value: object
) -> None:
    feedback = quiz(id, answer=given).feedback
    assert answers()[id]["answer"] == value
    new_kernel(monkeypatch)
    again = quiz(id)
    assert again.value == value
    assert again.feedback == feedback


def test_a_saved_answer_that_no_longer_fits_is_not_shown(learner: Path) -> None:
    record_answer("00.ranks", "An option of an older edition.", True)
    assert quiz("00.ranks").value is None


def test_a_reset_of_the_progress_is_seen_at_the_next_run(learner: Path) -> None:
    quiz("00.all_reduce", answer=6)
    (learner / "progress.json").unlink()
    assert quiz("00.all_reduce").value is None


def test_a_question_answered_in_another_notebook(learner: Path) -> None:
    shown = quiz("00.all_reduce")
    record_answer("00.all_reduce", 6.0, True)
    assert quiz("00.all_reduce") is shown
    assert shown.value == 6.0


def test_what_cannot_be_saved_is_said_and_still_judged(unsaveable, capsys) -> None:
    quiz("01.nvlink_one_way", answer=450)
    printed = capsys.readouterr().out
    assert printed.startswith("Right. Half of the figure")
    assert "Your progress cannot be saved in" in printed


def test_a_test_run_neither_reads_nor_writes_answers(
    learner: Path, monkeypatch
) -> None:
    quiz("00.all_reduce", answer=6)
    before = (learner / "progress.json").read_bytes()
    monkeypatch.undo()
    monkeypatch.setenv("COURSE_STATE", str(learner))
    assert quizzes._in_test_run()
    new_kernel(monkeypatch)
    assert quiz("00.all_reduce").value is None
    quiz("00.ranks", answer=3)
    assert (learner / "progress.json").read_bytes() == before
    assert quizzes.score("00") == ""


# ----------------------------------------------------------------------------- the form


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The messages that a form sends to the page."""
    messages: list[dict] = []
    monkeypatch.setattr(
        QuizWidget, "send", lambda self, content, buffers=None: messages.append(content)
    )
    return messages


def form(id: str) -> tuple[Quiz, QuizWidget]:
    item = quiz(id)
    item._form()
    return item, item._widget


def from_the_page(widget: QuizWidget, answer: object) -> None:
    """What ipywidgets does with a message from the page."""
    widget._handle_custom_msg({"answer": answer}, [])


@pytest.mark.parametrize("question", EVERY_QUESTION, ids=lambda one: one.id)
def test_the_form_gets_no_key_before_an_answer(
    learner: Path, question: Question
) -> None:
    _, widget = form(question.id)
    state = json.dumps(
        {k: v for k, v in widget.get_state().items() if k not in ("_esm", "_css")},
        ensure_ascii=False,
    )
    assert json.dumps(to_html(question.prompt), ensure_ascii=False) in state
    for reason in explanations(question):
        assert json.dumps(to_html(reason), ensure_ascii=False)[1:-1] not in state
    assert widget.feedback == {}
    assert set(widget.question) == {
        *("id", "kind", "task", "prompt", "code", "options", "unit", "purpose"),
        "button",
    }


def test_an_answer_from_the_page(learner: Path, sent: list) -> None:
    item, widget = form("00.ranks")
    from_the_page(widget, [])
    assert sent == [{"trouble": "Choose an option first."}]
    assert widget.feedback == {}
    assert answers() == {}

    from_the_page(widget, [2])
    wrong = widget.feedback
    assert (wrong["word"], wrong["given"], wrong["notes"]) == ("Not quite.", [2], [])
    assert (wrong["state"], wrong["button"]) == ("wrong", "Check again")
    assert widget.score == "Lesson 00: 0 of 2 right, 0 at the first try."

    from_the_page(widget, [2])  # once more the same: the page must hear of it
    assert widget.feedback != wrong
    from_the_page(widget, [3])
    assert widget.feedback["state"] == "right"
    assert [note["option"] for note in widget.feedback["notes"]] == [0, 1, 3]
    assert answers()["00.ranks"]["tries"] == 3
    assert item.feedback.right


def test_a_typed_number_from_the_page(learner: Path, sent: list) -> None:
    item, widget = form("00.all_reduce")
    from_the_page(widget, "1,500")
    assert sent == [{"trouble": 'Is "1,500" 1500 or 1.500? Type it without the comma.'}]
    from_the_page(widget, "6,0")
    assert widget.feedback["given"] == ["6"]
    assert item.value == 6.0
    assert isinstance(item.value, float)


def test_a_prediction_is_noted_and_explained_below_the_measurement(
    learner: Path, monkeypatch, capsys
) -> None:
    why("00.all_reduce")
    assert capsys.readouterr().out.startswith(
        "You have not predicted this. Expected: 6. 0 + 1 + 2 + 3 = 6."
    )
    item, widget = form("00.all_reduce")
    for _ in range(2):  # the same once more asks for nothing else
        from_the_page(widget, "4")
        noted = widget.feedback
        assert (noted["state"], noted["button"]) == ("noted", "Note it")
        assert noted["word"] == "Your prediction: 4. Noted."
    assert "4 is the number of ranks" not in str(widget.get_state())
    assert item.value == 4.0
    # It counts, as neither right nor wrong.
    assert answers()["00.all_reduce"]["correct"] is None
    assert widget.score == "Lesson 00: 1 of 2 predictions made; they are not marked."
    quiz("00.ranks", answer=3)
    assert widget.score.startswith("Lesson 00: 1 of 2 right, 1 at the first try. 1 of")
    assert "1 of 1 answers right, 1 prediction made" in course_map()
    new_kernel(monkeypatch)
    assert (
        quiz("00.all_reduce").feedback_text().startswith("Your prediction: 4. Noted.")
    )
    capsys.readouterr()
    why("00.all_reduce", 6.0, "The sum")
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("The sum: guess 4, measured 6.")
    assert "Your prediction: 4. Not quite. Too low. 4 is the number of ranks" in said
    assert "Expected: 6. 0 + 1 + 2 + 3 = 6." in said


@pytest.mark.parametrize(
    ("id", "answer", "begins"),
    [
        ("00.skipped", 2, "Your prediction: 2. Not quite."),
        ("00.skipped", 1, "Your prediction: 1. Right."),
        ("00.skipped", None, "You have not predicted this."),
        (
            "06.dp_and_ddp",
            [1, 3],
            "Your prediction: 1 and 3. Not quite. You judged 3 of the 6 statements",
        ),
    ],
)
def test_a_predicted_option_is_explained_with_all_others(
    learner: Path, capsys, id: str, answer: object, begins: str
) -> None:
    if answer is not None:
        item = quiz(id, answer=answer)
        assert item.feedback.noted
        assert item.feedback.notes == ()
        capsys.readouterr()
    why(id)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(begins)
    question = find(id)
    for choice in question.choices:
        told = f"{choice.text} {question.verdicts[choice.right]} {choice.why}"
        assert to_text(told) in said


def test_a_wrong_tick_tells_only_how_many_are_right_at_first(
    learner: Path, monkeypatch, capsys
) -> None:
    _, widget = form("00.variables")

    def shown() -> tuple:
        feedback = widget.feedback
        return feedback["state"], feedback["button"], len(feedback["notes"])

    from_the_page(widget, [1, 2])
    assert shown() == ("wrong", "Show which ones", 0)
    assert widget.feedback["text"].startswith("You judged 2 of the 4 statements")
    new_kernel(monkeypatch)  # and after a restart
    _, widget = form("00.variables")
    assert shown() == ("wrong", "Show which ones", 0)
    from_the_page(widget, [1])
    assert shown() == ("wrong", "Check again", 4)
    new_kernel(monkeypatch)
    _, widget = form("00.variables")
    assert shown() == ("wrong", "Check again", 4)
    from_the_page(widget, [1, 4])
    assert shown() == ("right", "Check again", 4)
    saved = answers()["00.variables"]
    assert (saved["tries"], saved["correct"]) == (3, True)
    assert saved["first_try_correct"] is False


def test_the_score_is_the_same_in_all_forms_of_a_lesson(learner: Path) -> None:
    _, ranks = form("00.ranks")
    _, variables = form("00.variables")
    assert (ranks.score, variables.score) == ("", "")
    from_the_page(variables, [1, 4])
    assert ranks.score == "Lesson 00: 1 of 2 right, 1 at the first try."
    from_the_page(ranks, [1])
    assert variables.score == "Lesson 00: 1 of 2 right, 1 at the first try."


def test_one_form_a_question_and_kernel(learner: Path, monkeypatch) -> None:
    _, widget = form("00.ranks")
    from_the_page(widget, [1])
    assert form("00.ranks")[1] is widget
    new_kernel(monkeypatch)
    _, fresh = form("00.ranks")
    assert fresh is not widget
    assert fresh.feedback["given"] == [1]


def test_a_closed_form_is_made_anew(learner: Path) -> None:
    _, widget = form("00.ranks")
    from_the_page(widget, [1])
    widget.close()
    item, fresh = form("00.ranks")
    assert fresh is not widget
    assert fresh.feedback["given"] == [1]
    assert item._form()["application/vnd.jupyter.widget-view+json"]["model_id"]


def test_a_form_says_that_an_answer_cannot_be_saved(unsaveable) -> None:
    _, widget = form("00.ranks")
    from_the_page(widget, [3])
    assert widget.feedback["state"] == "right"
    assert "Your progress cannot be saved in" in widget.feedback["trouble"]


# ----------------------------------------------------------------- stored in a notebook

CELLS = (
    'from course_utils import quiz\nquiz("00.ranks")',
    'guess = quiz("00.all_reduce")',
    "print(guess.value)\nguess",
    'quiz("00.variables")\nquiz("00.skipped")',
)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook with quizzes, as its author runs and commits it."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in CELLS]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("COURSE_STATE", str(folder / "state"))
        client = NotebookClient(notebook, timeout=60, store_widget_state=False)
        client.execute(cwd=str(folder))
    path = folder / "quizzes.ipynb"
    nbformat.write(notebook, path)
    return path


def test_what_a_notebook_stores(executed: Path) -> None:
    cells = nbformat.read(executed, as_version=4).cells
    kinds = [[set(output.get("data", ())) for output in cell.outputs] for cell in cells]
    text = {"text/plain", "text/html"}
    view = {"application/vnd.jupyter.widget-view+json", "text/html"}
    shown = [text, view]
    # Shown once where it is the last expression of its cell, and again in another.
    assert kinds == [shown, shown, [set(), *shown], shown * 2]
    stored = json.dumps(cells)
    for question in load("00").values():
        assert not any(
            json.dumps(why)[1:-1] in stored for why in explanations(question)
        )


@pytest.mark.thorough
def test_strict_nbval_three_times_also_with_answers(executed: Path) -> None:
    command = [
        *(sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q"),
        *("-p", "no:cacheprovider", "--nbval-cell-timeout=60", str(executed)),
    ]
    state = executed.parent / "answers"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COURSE_STATE": str(state),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_STATE", str(state))
        for run in range(3):
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment
            )
            assert done.returncode == 0, done.stdout
            assert f"{len(CELLS)} passed" in done.stdout
            record_answer("00.ranks", find("00.ranks").options[run], run == 2)
            record_answer("00.all_reduce", 10.0 + run, False)
        assert answers()["00.all_reduce"]["tries"] == 3


def test_nbconvert_shows_the_text_form(executed: Path, recwarn) -> None:
    page, _ = HTMLExporter().from_filename(str(executed))
    body = page[page.index("<body") :]
    assert body.count('class="course-quiz-text"') == 5
    assert "application/vnd.jupyter.widget-view+json" not in body
    assert not [one for one in recwarn if "not able to be represented" in str(one)]


def test_the_example_of_a_number_is_the_answer_of_no_question():
    example = float(quizzes._EXAMPLES["number"][0].removeprefix("answer="))
    numbers = [one for one in EVERY_QUESTION if isinstance(one, Number)]
    assert len(numbers) > 30
    for question in numbers:
        assert not question.grade(example).right, question.id
