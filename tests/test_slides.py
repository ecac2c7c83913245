"""The slides of a lesson: what becomes a slide, and one file that holds it all."""

import base64
import io
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course_utils.notebook import slides
from course_utils.notebook.lessons import LESSONS, lesson_of
from course_utils.notebook.slides import main, slides_of
from course_utils.notebook.slides.outline import (
    LINES,
    LONG,
    _first_sentence,
    _markdown,
    _sections,
    outline,
)

ROOT = Path(__file__).resolve().parent.parent
LESSON = lesson_of("00")
EXISTING = [lesson for lesson in LESSONS if lesson.exists]
SETUP = "import torch"


def text(source):
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code(source, *outputs):
    return {
        "cell_type": "code",
        "metadata": {},
        "execution_count": None,
        "source": source,
        "outputs": list(outputs),
    }


def printed(value):
    return {"output_type": "stream", "name": "stdout", "text": value}


def drawn(value, width=100, height=600):
    """A picture; the head of its PNG file says how large it is."""
    head = (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + bytes(9)
    )
    image = f'<img src="data:image/png;base64,{base64.b64encode(head).decode()}">'
    data = {"text/html": image, "text/plain": value}
    return {"output_type": "display_data", "metadata": {}, "data": data}


def made(*cells):
    """The slides of a lesson with a title, a set-up cell and these cells."""
    return outline([text("# 00 · Title"), code(SETUP), *cells], LESSON)[1:]


def test_a_heading_begins_a_slide_and_the_set_up_is_left_out():
    found = outline(
        [
            text("# 00 · Title\n\nHello."),
            code(SETUP),
            text("## One\n\nFirst.\n\n### Two\n\nSecond.\n\n```\n# no heading\n```"),
        ],
        LESSON,
    )
    assert [(one.title, one.begins, one.first) for one in found] == [
        ("00 · Title", True, True),
        ("One", True, False),
        ("Two", True, False),
    ]
    assert [[part.text for part in one.parts] for one in found] == [
        ["Hello."],
        ["First."],
        ["Second.", "```\n# no heading\n```"],
    ]


LONG_TEXT = "This is the point. " + "And so it goes on and on in many words. " * 5


def test_a_long_paragraph_is_its_first_sentence_and_all_of_it_a_note():
    body = f"{LONG_TEXT}\n\nShort.\n\n- **Lead.** {LONG_TEXT}\n- short item"
    (slide,) = made(text(f"## One\n\n{body}"))
    first, short, items = (part.text for part in slide.parts)
    assert first.startswith("This is the point.") and len(first.split()) <= LONG
    assert short == "Short."
    assert items.startswith("- **Lead.** This") and items.endswith("\n- short item")
    assert slide.notes == [body]


def test_links_to_other_files_of_the_course_are_left_out():
    body = (
        "A [rank](glossary.md#rank), [GPUs](01_x.ipynb#GPUs-(all)), "
        "a [page](https://a.b/c)."
    )
    (slide,) = made(text(f"## One\n\n{body}\n\n![A picture](a.png)"))
    assert [part.text for part in slide.parts] == [
        "A rank, GPUs, a [page](https://a.b/c).",
        "![A picture](a.png)",
    ]


def test_a_short_text_needs_no_note():
    (slide,) = made(text("## One\n\nShort."))
    assert slide.notes == []


@pytest.mark.parametrize(
    ("whole", "kept"),
    [
        ("A " * (LONG + 1) + "b.", "A " * (LONG + 1) + "b."),  # no end of a sentence
        ("One. " + "two " * LONG + "three.", None),  # "two" begins no sentence
        ("One `a. B` c. " + "More " * LONG, "One `a. B` c."),
        ("**One. Two.** Three. " + "More " * LONG, "**One. Two.** Three."),
        ("- **One.** A" + " b" * LONG + ". Two.", "- **One.** A" + " b" * LONG + "."),
        ("One (see it.) Two. " + "More " * LONG, "One (see it.) Two."),
        ("One. (Two. " + "two " * LONG + "three.) Four.", "One."),
        ("x" + " x" * LONG + ". Then this.", "x" + " x" * LONG + "."),
    ],
)
def test_first_sentences(whole, kept):
    assert _first_sentence(whole) == (whole if kept is None else kept)


def test_code_and_what_it_printed_are_together_where_there_is_room():
    (slide,) = made(text("## One"), code("print(1)", printed("1\n")))
    (part,) = slide.parts
    assert not part.hide_code and not part.hide_outputs

    source = "\n".join(f"x{i} = {i}" for i in range(18))
    lines = "".join(f"{i}\n" for i in range(30))
    first, second = made(text("## One"), code(source, printed(lines)))
    assert first.parts[0].hide_outputs and second.parts[0].hide_code
    assert (first.title, second.title) == ("One", "One (2)")
    shown = second.parts[0].cell["outputs"][0]["text"].splitlines()
    assert len(shown) == LINES
    assert shown[-1] == f"... {30 - LINES + 1} more lines: see the notebook"


def test_a_picture_is_shown_and_its_code_is_a_note():
    (slide,) = made(text("## One"), code("pictures.ring()", drawn("Picture: a ring.")))
    (part,) = slide.parts
    assert part.hide_code and not part.hide_outputs
    assert slide.notes == ["```python\npictures.ring()\n```", "Picture: a ring."]


def test_text_stands_below_a_picture_where_there_is_room_and_else_on_another_slide():
    below = text("What the picture says.")
    wide = drawn("Picture: wide.", 1536, 400)  # shown 1,280 pixels wide
    assert [one.title for one in made(text("## One"), code("a()", wide), below)] == [
        "One"
    ]
    printed_too = code("a()", printed("1\n" * 8), wide)
    for high in (code("a()", drawn("Picture: high.")), printed_too):
        first, second = made(text("## One"), high, below)
        assert [part.text for part in second.parts] == ["What the picture says."]


def test_a_guess_beside_what_was_measured_is_a_sentence():
    said = "Picture: The sum: measured 6. No guess yet: answer the question above."
    source = 'why("00.all_reduce", 6, "The sum")'
    reason = drawn("You have not predicted this. Expected: 6.")
    (slide,) = made(text("## One"), code(source, drawn(said), reason))
    assert [part.text for part in slide.parts] == ["**The sum: measured 6.**"]
    assert slide.notes == [f"```python\n{source}\n```"]


def test_a_question_takes_the_sentence_that_leads_to_it():
    asks = code('quiz("00.all_reduce")', drawn("Quiz 00.all_reduce."))
    before = text("## One\n\n" + "Short.\n\n" * 4 + "**Predict** this:")
    first, asked = made(before, asks)
    assert [part.text for part in first.parts] == ["Short."] * 4
    assert asked.parts[0].text == "**Predict** this:"
    first, asked = made(text("## One\n\n" + "Short.\n\n" * 4), asks)
    assert len(first.parts) == 4 and "What does" in asked.parts[0].text


def test_a_question_is_a_slide_and_its_answer_a_note():
    slides = made(
        text("## One\n\nPredict:"),
        code('guess = quiz("00.all_reduce")', drawn("Quiz 00.all_reduce.")),
        code("print(guess.value)", printed("6\n")),
    )
    asked, then = slides
    assert [part.cell for part in asked.parts] == [None, None]
    shown = asked.parts[1].text
    assert "What does each of them hold" in shown and "Predict the number" in shown
    assert "6" not in shown
    assert "The answer:" in asked.notes[0] and "6" in asked.notes[0]
    assert then.parts[0].cell["source"] == "print(guess.value)"


def test_a_task_is_announced_and_its_check_help_and_progress_are_left_out():
    (slide,) = made(
        text("## Build"),
        code("def who_am_i():\n    raise NotImplementedError"),
        code('check("00.who_am_i", who_am_i)', printed("· not attempted")),
        code('# Remove a # and run\n# hint("00.who_am_i")'),
        code("progress()", printed("the map")),
        code("ranks.close()"),
        code("del model, output"),
    )
    stub, task = slide.parts
    assert "NotImplementedError" in stub.cell["source"]
    assert task.text.startswith("**Your turn:** task `00.who_am_i`.")
    assert "exercises/00_start_here.ipynb" in slide.notes[0]


@pytest.mark.parametrize("left_out", ["progress()", "ranks.close()", "del model"])
def test_a_sentence_that_leads_to_a_cell_which_is_left_out_goes_with_it(left_out):
    first, second = made(
        text("## Sources\n\nRead them. They are long:"),
        code(left_out),
        text("## The end\n\n**Next:** lesson 04. What you have done so far:"),
        code(left_out),
    )
    assert [part.text for part in first.parts] == ["Read them."]
    assert [part.text for part in second.parts] == ["**Next:** lesson 04."]


def test_a_slide_with_nothing_but_such_a_sentence_is_not_made():
    long = text("- " + "\n- ".join(["A source."] * 20))
    (slide,) = made(text("## Sources"), long, text("So far:"), code("progress()"))
    assert len(slide.parts) == 1


def test_plain_text_of_questions_is_no_markdown():
    assert _markdown("a*b_c `x*_` <b>") == r"a\*b\_c `x*_` \<b\>"
    assert _markdown("an *x_y* `*`", emphasis=True) == r"an *x\_y* `*`"


@pytest.mark.parametrize("lesson", EXISTING, ids=lambda lesson: lesson.number)
def test_no_lesson_loses_a_heading_or_a_picture(lesson):
    cells = nbformat.read(lesson.notebook, as_version=4).cells
    headings = [
        heading
        for cell in cells
        if cell.cell_type == "markdown"
        for heading, _ in _sections(cell.source)
        if heading
    ]
    pictures = [
        id(cell)
        for cell in cells
        if "<img" in str(cell.get("outputs")) and "why(" not in cell.source
    ]
    found = outline(cells, lesson)
    assert [slide.title for slide in found if slide.begins] == headings
    shown = {id(part.cell) for slide in found for part in slide.parts}
    assert pictures and set(pictures) <= shown
    assert all(slide.parts for slide in found)


# ------------------------------------------------------------------------- the file


def test_a_page_is_the_same_each_time_and_holds_everything():
    page, count = slides_of(LESSON)
    assert slides_of(LESSON) == (page, count)
    body = page.partition("<body>")[2].partition("<script>")[0]
    # A slide is a <section>, and so is each stack of them.
    stacks = len([one for one in _outline_of(LESSON) if one.begins])
    assert body.count("<section") == count + stacks
    assert body.count('<aside class="notes">') >= 5
    # Links of the lesson may lead out. Nothing is loaded from there.
    loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=.(.{5})", body)
    assert loaded and set(loaded) == {"data:"}
    head = page.partition("<body>")[0]
    assert "<link" not in head and "<script" not in head and "@import" not in head


def _outline_of(lesson):
    return outline(nbformat.read(lesson.notebook, as_version=4).cells, lesson)


def test_reveal_is_unchanged_and_has_its_licence():
    folder = Path(slides.__file__).parent / "reveal"
    assert "MIT licensed" in (folder / "reveal.js").read_text(encoding="utf-8")[:200]
    assert "Permission is hereby granted" in (folder / "LICENSE").read_text()


# ----------------------------------------------------------------- the command line


def test_the_command_writes_and_replaces_only_its_own(tmp_path, capsys):
    out = tmp_path / "new" / "slides"
    assert main(["00", "--out", str(out)]) == 0
    target = out / "00_start_here.html"
    assert re.fullmatch(
        rf"{re.escape(str(target))}: \d+ slides\n", capsys.readouterr().out
    )
    for name in ("00_start_here", "notebooks/00_start_here.ipynb"):  # its own file
        assert main([name, "--out", str(out)]) == 0
    target.write_text("mine")
    assert main(["00", "--out", str(out)]) == 1
    assert "was not written by this command" in capsys.readouterr().err
    assert target.read_text() == "mine" and len(os.listdir(out)) == 1
    assert main(["00", "--out", str(out), "--force"]) == 0
    assert slides.MARK in target.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["00", "--out", str(target)]) == 1
    assert capsys.readouterr().err == f"{target} is no folder.\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_a_link_is_not_replaced(tmp_path):
    assert main(["00", "--out", str(tmp_path)]) == 0
    target = tmp_path / "00_start_here.html"
    target.rename(tmp_path / "elsewhere")
    target.symlink_to("elsewhere")
    assert main(["00", "--out", str(tmp_path)]) == 1 and target.is_symlink()


@pytest.mark.thorough
def test_a_terminal_without_a_letter_of_the_folder_gets_the_slides(
    tmp_path, monkeypatch
):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    out = tmp_path / "슬라이드"
    assert main(["00", "01", "--out", str(out)]) == 0
    assert len(os.listdir(out)) == 2
    terminal.flush()
    assert b"/????/01_gpus_nodes" in terminal.buffer.getvalue()


@pytest.mark.thorough
def test_output_that_nobody_reads_is_no_error(tmp_path):
    command = [sys.executable, "-m", "course_utils", "slides", "00", "--out", tmp_path]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert not done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("99", "There is no lesson '99'. The lessons are 00, "),
        ("00.average", "'00.average' is no lesson. Slides of the whole lesson: 00"),
    ],
)
def test_a_lesson_that_is_none(tmp_path, capsys, name, said):
    assert main([name, "--out", str(tmp_path)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(said) and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_has_a_name(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["00", "--out", ""])
    assert stopped.value.code == 2
    assert "argument --out: '' is no name for a folder" in capsys.readouterr().err
