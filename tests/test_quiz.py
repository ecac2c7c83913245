"""The quizzes without a browser: questions, judging, texts, saving, stable outputs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

import course_utils.notebook.quiz as quizzes
from course_utils import ROOT
from course_utils.notebook.progress import answers, attempts, record_answer
from course_utils.notebook.quiz import Quiz, quiz, why
from course_utils.notebook.quiz_widget import QuizWidget
from course_utils.questions import (
    AnswerError,
    MultipleChoice,
    Number,
    NumberTask,
    Question,
    QuestionError,
    Right,
    SingleChoice,
    Wrong,
    find,
    lesson,
    lessons,
    load,
)
from course_utils.questions.markup import to_html, to_text
from course_utils.tasks import all_tasks

# Other Markdown, HTML and LaTeX would be shown as they are typed.
FOREIGN = re.compile(
    r"\]\(|</?[A-Za-z]|\$[^$]+\$|(?<!\w)_+\w[^_]*_+(?!\w)|~~|^\s*([#>+-]|\d+\.)\s",
    re.MULTILINE,
)
EVERY_QUESTION = [question for one in lessons() for question in load(one).values()]
EVERY_QUESTION += [task for task in all_tasks() if isinstance(task, NumberTask)]

each_question = pytest.mark.parametrize("question", EVERY_QUESTION, ids=lambda q: q.id)

TRUE = Right("a process", "It has a number.")
FALSE = Wrong("a GPU", "That is a device.")
NUMBER = Number("99.size", "How large?", 10, why="2 · 5.", hint="Multiply.", unit="GB")


@pytest.fixture(autouse=True)
def session(own_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's, who has answered nothing."""
    new_kernel(monkeypatch)


def new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a restart of the kernel forgets."""
    monkeypatch.setattr(quizzes, "_quizzes", {})


def single(*choices) -> Question:
    return SingleChoice("00.x", "What?", *choices)


def number(**changes: object) -> Question:
    return dataclasses.replace(NUMBER, **changes)


def right_answer(question: Question) -> object:
    if isinstance(question, Number):
        return question.answer
    return [n for n, choice in enumerate(question.choices, 1) if choice.right]


def wrong_answers(question: Question) -> list:
    if isinstance(question, Number):
        example = float(re.search(r"answer=(\d+)", Quiz(question).text())[1])
        return [*question.slips, question.answer * 3 + 1e6, example]
    numbers = range(1, len(question.choices) + 1)
    if isinstance(question, SingleChoice):
        return [n for n in numbers if [n] != right_answer(question)]
    subsets = [
        [n for n in numbers if bits >> n & 1] for bits in range(2, 2 << max(numbers), 2)
    ]
    return [one for one in subsets if one != right_answer(question)]


def said(capsys: pytest.CaptureFixture) -> str:
    """What was printed, on one line."""
    return " ".join(capsys.readouterr().out.split())


# ------------------------------------------------------------- every lesson's questions


@each_question
def test_a_question_is_well_defined(question) -> None:
    assert re.fullmatch(r"\d\d\.[a-z0-9_]+", question.id)
    assert len({*question.options}) == len(question.options) != 1
    texts = [question.prompt, *question.options, *question.explanations()]
    assert all(text.strip() for text in texts)
    for text in (*texts, getattr(question, "purpose", "")):
        left = re.sub(r"<code>.*?</code>", "", to_html(text), flags=re.DOTALL)
        assert not re.search(r"[*`]", left), text
        assert not FOREIGN.search(re.sub(r"`[^`]*`", "x", text)), text


def test_a_question_stands_in_the_lesson_that_its_id_names() -> None:
    for number in lessons():
        assert {question.lesson for question in load(number).values()} == {number}


def test_a_lesson_refuses_two_questions_of_one_id() -> None:
    one = single(TRUE, FALSE)
    with pytest.raises(QuestionError, match="'00.x'"):
        lesson(one, one)


@each_question
def test_the_right_answer_and_only_it_is_accepted_and_all_is_explained(
    question,
) -> None:
    right = question.grade(question.read(right_answer(question)))
    assert right.right
    for given in wrong_answers(question):
        wrong = question.grade(question.read(given))
        assert not wrong.right, given
        assert wrong.text
    if isinstance(question, Number):
        return
    words = question.explanations()
    assert len(set(words)) == len(words)
    for told in (right, question.explain(None), question.explain(question.read(given))):
        all_said = " ".join([told.text, *(note.text for note in told.notes)])
        assert all(why in all_said for why in words)


@each_question
def test_the_stored_text_and_the_form_show_the_question_and_no_key(question) -> None:
    item, widget = form(question.id)
    state = {k: v for k, v in widget.get_state().items() if k not in ("_esm", "_css")}
    page = json.dumps(state, ensure_ascii=False)
    before = item.text(), item.html(), page
    item.submit(right_answer(question))
    assert (item.text(), item.html()) == before[:2]
    text = " ".join(before[0].split())
    for shown in (question.prompt, *question.options):
        assert to_text(shown) in text
        assert to_html(shown) in before[1]
        assert json.dumps(to_html(shown), ensure_ascii=False) in page
    assert " ".join(question.code.split()) in text
    for reason in question.explanations():
        assert to_text(reason) not in text
        assert to_html(reason) not in before[1]
        assert json.dumps(to_html(reason), ensure_ascii=False)[1:-1] not in page


def test_neither_the_place_nor_the_length_of_an_option_gives_it_away() -> None:
    single = [one for one in EVERY_QUESTION if isinstance(one, SingleChoice)]
    for number in lessons():
        mine = [one for one in single if one.lesson == number]
        places = [[one.right for one in q.choices].index(True) for q in mine]
        assert max(map(places.count, places)) <= max(1, 0.5 * len(places)), number
    longer = {
        question.id: max(len(one.text) for one in question.choices if one.right)
        / max(len(one.text) for one in question.choices if not one.right)
        for question in single
    }
    assert {id: times for id, times in longer.items() if times > 1.2} == {}
    for number in lessons():  # by chance, it is so in a quarter of them
        mine = [times > 1 for id, times in longer.items() if id[:2] == number]
        assert sum(mine) <= max(0.3 * len(mine), 1), number


# --------------------------------------------------------------------------- judging


@pytest.mark.parametrize(
    ("unit", "texts", "value"),
    [
        ("GB", (1.5, " 1.5 ", "1,5", "1.5GB", "1.5 GB", "3/2"), 1.5),
        ("GB", ("-3", "−3", "–3"), -3.0),
        ("GB", ("1 500", "1.5e3", "1.5E+3", "3000 / 2"), 1500.0),
        ("GB", ("1_500_000", "1,500,000", "1 500 000"), 1.5e6),
        ("GB", ("1,500.5",), 1500.5),
        ("GPUs", ("1 GPU", "1 GPUs"), 1.0),
        ("times", ("1.5x", "1.5 ×"), 1.5),
        ("%", ("37.5 %", 37.5, "3/8"), 37.5),
        ("%", ("3/8 %",), 0.375),
    ],
)
def test_a_number_is_read_as_people_write_it(unit, texts, value) -> None:
    for typed in texts:
        assert number(unit=unit).read(typed) == value, typed


@pytest.mark.parametrize(
    "typed",
    [
        *("1500 MB", "15 MB/s", "6 gb", "GB", "~6", "-", "1 50", "1.5.2", "1/2/3"),
        *("1e999", "0x10", True, [6], None, "", "1,500", "1 e9", "one GB", "9" * 5000),
    ],
)
def test_what_is_no_number_is_refused(typed) -> None:
    with pytest.raises(AnswerError) as caught:
        number(unit="GB").read(typed)
    assert len(str(caught.value)) < 200


def test_a_number_is_right_within_its_tolerance() -> None:
    for tolerances, accepted, refused in (
        ({}, [10, 10.000000001], [10.01, 9.99, -10]),
        ({"tolerance": 0.5}, [9.5, 10.5], [9.4, 10.6]),
        ({"tolerance": 0.5, "relative_tolerance": 0.1}, [9, 11], [8.9, 11.1]),
    ):
        question = number(**tolerances)
        assert all(question.grade(float(value)).right for value in accepted)
        assert not any(question.grade(float(value)).right for value in refused)


def test_a_slip_names_the_mistake_also_without_all_its_digits() -> None:
    slips = {0.2727: "A share.", 24.023: "One more.", 24: "Round."}
    question = number(answer=27, slips=slips)
    for answer, says in (
        *((0.27, "low. A share."), (3 / 11, "low. A share."), (0.28, "low. Multiply.")),
        *((24.0, "low. Round."), (24.1, "low. One more."), (28, "high. Multiply.")),
    ):
        assert question.grade(answer).text == f"Too {says}"
    percent = find("02.parameters_share")
    assert "In percent, please." in percent.grade(percent.read("0.06")).text


@pytest.mark.parametrize("given", [2, "2", " 2 ", numpy.int64(2), [2], "a GPU"])
def test_an_option_by_its_number_or_text(given: object) -> None:
    assert single(TRUE, FALSE).read(given) == "a GPU"
    assert MultipleChoice("00.x", "?", TRUE, FALSE).read(given) == ["a GPU"]
    question = single(Right("2", "yes"), Wrong("1", "no"))
    assert (question.read("2"), question.read(2)) == ("2", "1")  # the text goes first


@pytest.mark.parametrize("given", [None, 0, 3, True, 1.0, "3", "a" * 5000])
def test_what_is_no_option_is_refused(given: object) -> None:
    with pytest.raises(AnswerError) as caught:
        single(TRUE, FALSE).read(given)
    assert len(str(caught.value)) < 200


def test_markup_is_rendered_and_html_is_escaped() -> None:
    prompt = "1 < 2 & `a<b>*`, *never*, **al `x` ways *so* it is**"
    assert to_html(prompt) == (
        "1 &lt; 2 &amp; <code>a&lt;b&gt;*</code>, <em>never</em>, "
        "<strong>al <code>x</code> ways <em>so</em> it is</strong>"
    )
    assert to_text(prompt) == "1 < 2 & `a<b>*`, never, al `x` ways so it is"
    item = Quiz(SingleChoice("99.x", prompt, TRUE, FALSE, code="<script>"))
    assert to_html(prompt) in item.html() and "<script>" not in item.html()


# ------------------------------------------------- in text; what is saved and restored


def test_the_text_form_in_a_terminal(capsys) -> None:
    assert quiz("00.ranks").value is None
    printed = capsys.readouterr().out
    assert printed.startswith("Quiz 00.ranks. Choose one.\n\nWhat is a rank?\n")
    assert 'To answer: quiz("00.ranks", answer=1)' in printed
    assert max(map(len, printed.splitlines())) <= 79
    for answer, begins, ends in (
        (2, "Not quite. Threads share one process", "0 of 1 answers right"),
        (3, "Right. Every process runs", "1 of 1 answers right, 0 at the first try."),
    ):
        quiz("00.ranks", answer=answer)
        printed = said(capsys)
        assert printed.startswith(begins) and ends in printed
        assert "Threads share one process" in printed
    quiz("00.ranks")
    assert "Your last answer: 3 Right. Every process" in said(capsys)


def test_a_plain_python_needs_no_widgets_and_no_torch() -> None:
    code = (
        "import sys\n"
        "from course_utils import quiz\n"
        "quiz('00.predict_sum', answer=1)\n"
        "assert not {'IPython', 'ipywidgets', 'torch'} & {*sys.modules}\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.startswith("Not quite.")
    assert attempts()["00.predict_sum"]["answer"] == 1.0
    assert answers() == {}  # the number of a task counts as a task


@pytest.mark.parametrize(
    ("id", "given", "value"),
    [
        ("00.ranks", 2, "A thread inside the notebook's own Python process."),
        ("00.variables", [4, 1], [find("00.variables").options[n] for n in (0, 3)]),
        ("00.all_reduce", "4", 4.0),
        ("01.nvlink_time", "20", 20.0),
        ("00.predict_sum", "7", 7.0),
    ],
)
def test_an_answer_outlives_the_kernel(monkeypatch, id, given, value) -> None:
    feedback = quiz(id, answer=given).feedback
    assert (answers() | attempts())[id]["answer"] == value
    new_kernel(monkeypatch)
    again = quiz(id)
    assert (again.value, again.feedback) == (value, feedback)


def test_what_is_shown_is_what_the_file_says(own_state: Path) -> None:
    shown = quiz("00.all_reduce")
    record_answer("00.all_reduce", 6.0, True)  # in another notebook
    assert quiz("00.all_reduce") is shown
    assert shown.value == 6.0
    (own_state / "progress.json").unlink()
    assert quiz("00.all_reduce").value is None
    record_answer("00.ranks", "An option of an older edition.", True)
    assert quiz("00.ranks").value is None


@pytest.mark.parametrize(
    ("id", "answer", "message"),
    [
        ("00.ranks", 9, "no option 9. Give a number from"),
        ("00.ranks", [1, 3], "Choose one option, not 2."),
        ("00.ranks", {"option": 3}, "no option {'option': 3}"),
        ("00.variables", [], "Tick at least one box first."),
        ("00.all_reduce", "six", '"six" is not a number.'),
        ("00.all_reduce", float("nan"), '"nan" is not a number.'),
        ("00.all_reduce", "1,500", "without the comma."),
        ("00.predict_sun", None, "Did you mean '00.predict_sum'"),
        ("all_reduce", None, "Did you mean '00.all_reduce'"),
        (["00.ranks"], None, "The course has: 00.ranks"),
    ],
)
def test_what_cannot_be_judged_is_not_saved(id, answer, message) -> None:
    with pytest.raises((AnswerError, QuestionError), match=re.escape(message)):
        quiz(id, answer=answer)
    assert answers() == {}


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


def test_an_answer_from_the_page(sent: list) -> None:
    item, widget = form("00.ranks")
    from_the_page(widget, [])
    assert sent == [{"trouble": "Choose an option first."}]
    assert (widget.feedback, answers()) == ({}, {})

    from_the_page(widget, [2])
    wrong = widget.feedback
    assert (wrong["state"], wrong["given"], wrong["notes"]) == ("wrong", [2], [])
    from_the_page(widget, [2])  # once more the same: the page must hear of it
    assert widget.feedback != wrong
    from_the_page(widget, [3])
    assert widget.feedback["state"] == "right"
    assert [note["option"] for note in widget.feedback["notes"]] == [0, 1, 3]
    assert answers()["00.ranks"]["tries"] == 3
    assert item.feedback.right


def test_a_prediction_is_noted_and_explained_below_the_measurement(
    monkeypatch, capsys
) -> None:
    why("00.all_reduce")
    assert said(capsys).startswith("You have not predicted this. Expected: 6. 0 + 1")
    item, widget = form("00.all_reduce")
    from_the_page(widget, "4,0")
    assert widget.feedback["given"] == ["4"]
    assert widget.feedback["state"] == "noted"
    assert widget.feedback["word"] == "Your prediction: 4. Noted."
    assert "4 is the number of ranks" not in str(widget.get_state())
    assert item.value == 4.0
    # It counts, as neither right nor wrong.
    assert answers()["00.all_reduce"]["correct"] is None
    assert widget.score == "Lesson 00: 1 prediction made."
    new_kernel(monkeypatch)
    quiz("00.all_reduce")
    said(capsys)
    why("00.all_reduce", 6.0, "The sum")
    printed = said(capsys)
    assert "The sum: guess 4, measured 6." in printed
    assert "Your prediction: 4. Not quite. Too low. 4 is the number of ranks" in printed
    assert "Expected: 6. 0 + 1 + 2 + 3 = 6." in printed


@pytest.mark.parametrize(
    ("id", "answer", "begins"),
    [
        ("00.skipped", 2, "Your prediction: 2, “They add up"),
        (
            "00.skipped",
            1,
            "Your prediction: 1, “They wait for rank 2 and do not go on”. Right.",
        ),
        ("00.skipped", None, "You have not predicted this."),
        ("06.dp_and_ddp", [1, 3], "Your prediction: 1 and 3. Not quite. You judged 3"),
    ],
)
def test_a_predicted_option_is_explained_with_all_others(
    capsys, id: str, answer: object, begins: str
) -> None:
    if answer is not None:
        feedback = quiz(id, answer=answer).feedback
        assert (feedback.right, feedback.notes) == (None, ())
    said(capsys)
    why(id)
    printed = said(capsys)
    assert printed.startswith(begins)
    assert all(to_text(choice.why) in printed for choice in find(id).choices)


def test_a_wrong_tick_tells_only_how_many_are_right_at_first(monkeypatch) -> None:
    _, widget = form("00.variables")

    def shown() -> tuple:
        return widget.feedback["state"], len(widget.feedback["notes"])

    from_the_page(widget, [1, 2])
    assert shown() == ("wrong", 0)
    assert widget.feedback["text"].startswith("You judged 2 of the 4 options")
    new_kernel(monkeypatch)  # and after a restart
    _, widget = form("00.variables")
    assert shown() == ("wrong", 0)
    from_the_page(widget, [1])
    assert shown() == ("wrong", 4)
    from_the_page(widget, [1, 4])
    assert shown() == ("right", 4)
    saved = answers()["00.variables"]
    assert (saved["tries"], saved["first_try_correct"]) == (3, False)


def test_one_form_a_question_and_one_score_a_lesson(monkeypatch) -> None:
    item, ranks = form("00.ranks")
    _, variables = form("00.variables")
    assert (ranks.score, variables.score) == ("", "")
    from_the_page(variables, [1, 4])
    for widget in (ranks, variables):
        assert widget.score == "Lesson 00: 1 of 1 answers right, 1 at the first try."
    from_the_page(ranks, [1])
    assert form("00.ranks") == (item, ranks)
    ranks.close()  # as ipywidgets' close_all does
    fresh = form("00.ranks")[1]
    assert fresh is not ranks
    assert fresh.feedback["given"] == [1]


# ----------------------------------------------------------------- stored in a notebook


def test_what_a_notebook_stores_and_nbconvert_shows(tmp_path, recwarn) -> None:
    cells = (
        'from course_utils import quiz\nquiz("00.ranks")',
        'guess = quiz("00.all_reduce", answer=6)\nguess = quiz("00.all_reduce")',
        "print(guess.value)\nguess",
    )
    cells = [nbformat.v4.new_code_cell(source) for source in cells]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=60, store_widget_state=False)
    client.execute(cwd=str(tmp_path), env=os.environ | {"PYTHONPATH": str(ROOT)})

    kinds = [[set(output.get("data", ())) for output in cell.outputs] for cell in cells]
    view = {"application/vnd.jupyter.widget-view+json", "text/html"}
    shown = [{"text/plain", "text/html"}, view]
    # Shown once where it is the last expression of its cell, and again in another.
    assert kinds == [shown, [set(), *shown], [set(), *shown]]
    assert cells[2].outputs[0].text == "6.0\n"
    stored = json.dumps([cells[0].outputs, cells[2].outputs])
    for question in (find("00.ranks"), find("00.all_reduce")):
        assert not any(
            json.dumps(why)[1:-1] in stored for why in question.explanations()
        )
    body = HTMLExporter().from_notebook_node(notebook)[0].partition("<body")[2]
    assert body.count('class="course-quiz-text"') == 3
    assert "application/vnd.jupyter.widget-view+json" not in body
    assert not [one for one in recwarn if "not able to be represented" in str(one)]
