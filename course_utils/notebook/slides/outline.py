"""Which cells of a lesson become slides: a rule, so that notebooks need no editing.

- A heading begins a slide. What follows fills it, until it is full; then the next slide
  has the same heading, with a number.
- Of a long paragraph the first sentence is on the slide, and all of it in the notes for
  the speaker. The same holds for long list items. Tables and code stay whole. Links to
  other files of the course are left out.
- A cell that draws gives its picture; its code and the picture's text go to the notes.
  A guess beside what was measured is one sentence here: the room has not guessed.
- Other cells give their code and what they printed, together where there is room.
- A question is a slide of its own, with the sentence that leads to it; its answer and
  the reasons are in the notes.
- A task is a slide that says what to write, and where. Its check, its hints, imports
  before the first heading, tidying up and the learner's progress are left out, with
  the sentence that leads to them ("What you have done so far:").

Everything is counted in pixels of a slide of 1280 x 720, roughly: the page itself makes
smaller what is still too high.
"""

import base64
import math
import re
from dataclasses import dataclass, field

from course_utils.notebook.cohort.collect import CHECK, source_of
from course_utils.notebook.lessons import Lesson

WIDTH = 1280
ROOM = 560  # pixels below the heading
COLUMNS = 84  # letters of text in a line
TEXT, CODE, ROW = 38, 27, 40  # pixels: a line, a line of code, a row of a table
PICTURE = 520  # pixels; slides.css makes no picture higher
LITTLE = 130  # pixels; so little text goes with what follows, a bit smaller if need be
LONG = 28  # words; a longer paragraph is shortened to its first sentence
LINES = 22  # of an output; what is longer is cut

HEADING = re.compile(r"^(#{1,3}) +(.+)$", re.MULTILINE)
QUIZ = re.compile(r"\bquiz\(\s*[\"'](\d\d\.[a-z0-9_]+)[\"']")
HELP = re.compile(r"^(# *(Remove a #|hint\(|solution\()|(hint|solution|progress)\()")
WHY = re.compile(r"^why\(", re.MULTILINE)
NO_GUESS = re.compile(r" No guess yet:.*$", re.DOTALL)
TIDY = re.compile(r"(del [^\n]+|\w+\.(close|off)\(\))")
ITEM = re.compile(r"^ *([-*]|\d+\.) +")
FENCE = re.compile(r"^ *(```|~~~)")
# A bold word or two, maybe of an item, as in "- **Forward.** The buffers ...".
LEAD = re.compile(r"(?: *(?:[-*]|\d+\.) +)?\*\*\S+(?: \S+)?\.\*\*")
SENTENCE = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][*_)\"”])|(?<=[.!?]\*\*))\s+(?=[\"“(*_`]*[A-Z0-9`])"
)
# To another file of the course, which is not beside the page with the slides.
LINK_TO_FILE = re.compile(
    r"(?<!!)\[([^][]+)\]\((?!https?:|#)[^()\s]+(?:\([^()\s]*\)[^()\s]*)*\)"
)
# The beginning of a picture: 32 letters are its first 24 bytes.
PNG = re.compile(r"<img src=\"data:image/png;base64,([A-Za-z0-9+/]{32})")
PARAGRAPHS = re.compile(r"\n\s*\n")


@dataclass
class Part:
    """A piece of a slide: the text of a Markdown cell, or a code cell."""

    height: int
    text: str = ""
    cell: dict | None = None
    hide_code: bool = False
    hide_outputs: bool = False


@dataclass
class Slide:
    """One slide.

    Attributes:
        title: the heading, Markdown.
        begins: whether a section of the lesson begins here.
        first: whether it is the lesson's title.
        parts: what is on it, from top to bottom.
        notes: what the speaker reads, Markdown paragraphs.
    """

    title: str
    begins: bool
    first: bool = False
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def takes(self, height: int) -> bool:
        """Whether there is room for a part of so many pixels."""
        used = sum(part.height for part in self.parts)
        # The page makes it all smaller, down to four fifths.
        room = ROOM * 1.25 if used <= LITTLE else ROOM
        return not used or used + height <= room


def outline(cells: list[dict], lesson: Lesson) -> list[Slide]:
    """The slides of a lesson's notebook, in order."""
    maker = _Maker(lesson)
    for cell in cells:
        if cell["cell_type"] == "markdown":
            maker.markdown(source_of(cell))
        elif cell["cell_type"] == "code":
            maker.code(cell)
    return maker.finish()


class _Maker:
    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self.slides: list[Slide] = []
        self.asked = False  # is there a question on this slide?

    @property
    def here(self) -> Slide:
        return self.slides[-1]

    def finish(self) -> list[Slide]:
        # A section whose first slide would show nothing but its heading.
        full: list[Slide] = []
        for slide in self.slides:
            if full and not full[-1].parts and not slide.begins:
                slide.begins, slide.title = full[-1].begins, full[-1].title
                slide.notes = full.pop().notes + slide.notes
            full.append(slide)
        full[0].first = True
        seen: dict[str, int] = {}
        for slide in full:
            number = 1 if slide.begins else seen.get(slide.title, 0) + 1
            seen[slide.title] = number
            if number > 1:
                slide.title += f" ({number})"
        return full

    def add(self, part: Part) -> Slide:
        """Put a part on this slide if there is room, else on a new one."""
        if self.asked or not self.here.takes(part.height):
            self.more()
        self.here.parts.append(part)
        return self.here

    def more(self) -> None:
        """Begin another slide under the same heading."""
        self.asked = False
        self.slides.append(Slide(self.here.title, begins=False))

    # -------------------------------------------------------------------------- text
    def markdown(self, source: str) -> None:
        for heading, body in _sections(LINK_TO_FILE.sub(r"\1", source)):
            if heading:
                self.asked = False
                self.slides.append(Slide(heading, begins=True))
            elif not self.slides:
                self.slides.append(Slide(self.lesson.title, begins=True))
            if not body:
                continue
            shortened = False
            slide = self.here
            for block in _blocks(body):
                short = _shorten(block)
                shortened = shortened or short != block
                slide = self.add(Part(_height(short), text=short))
            if shortened:
                slide.notes.append(body)

    # -------------------------------------------------------------------------- code
    def code(self, cell: dict) -> None:
        source = source_of(cell).strip()
        if not source or HELP.match(source) or TIDY.fullmatch(source):
            self.drop_lead()
            return
        if len(self.slides) < 2 and not _draws(cell):
            return  # imports
        if match := QUIZ.search(source):
            self.question(match[1])
        elif match := CHECK.search(source):
            self.task(match[1])
        elif WHY.search(source):  # the reason is in the notes of the question
            for said in _texts_of_pictures(cell):
                if said.startswith("Picture: "):
                    text = f"**{NO_GUESS.sub('', said.removeprefix('Picture: '))}**"
                    self.add(Part(_height(text), text=text))
                    self.here.notes.append(_listing(source))
        elif _draws(cell):
            printed = _cut_output(cell, text_only=True)
            height = _height_of_pictures(cell) + (CODE * printed + 20) * bool(printed)
            slide = self.add(Part(height, cell=cell, hide_code=True))
            slide.notes += [_listing(source), *_texts_of_pictures(cell)]
        else:
            self.run(cell, source)

    def drop_lead(self) -> None:
        """Take away the sentence that leads to a cell which is left out."""
        parts = self.here.parts if self.slides else []
        if not parts or not parts[-1].text.endswith(":"):
            return
        text = parts.pop().text
        begins = [0, *(match.end() for match in SENTENCE.finditer(text))]
        kept = text[: begins[-1]].rstrip()
        if kept:
            parts.append(Part(_height(kept), text=kept))
        elif not parts and not self.here.begins:
            self.slides.pop()

    def run(self, cell: dict, source: str) -> None:
        """A cell and what it printed: together, or on two slides."""
        code = CODE * (source.count("\n") + 1) + 20
        printed = _cut_output(cell)
        below = CODE * min(LINES, printed) + 20 if printed else 0
        if code + below <= ROOM:
            self.add(Part(code + below, cell=cell))
            return
        self.add(Part(code, cell=cell, hide_outputs=True))
        if printed:
            self.add(Part(below, cell=cell, hide_code=True))

    def question(self, name: str) -> None:
        from course_utils import questions

        asked = questions.find(name)
        lines = [f"**{_markdown(asked.prompt, emphasis=True)}**"]
        if asked.code:
            lines.append(f"```python\n{asked.code}\n```")
        options = [
            f"{number}. {_markdown(text, emphasis=True)}"
            for number, text in enumerate(asked.options, 1)
        ]
        lines += ["\n".join(options)] if options else []
        lines.append(f"*{asked.task}.*")
        height = sum(map(_height, lines))
        # With the sentence that leads to it, and with nothing else.
        parts = self.here.parts
        if sum(part.height for part in parts) > LITTLE:
            last = parts[-1]
            leads = last.text.endswith(":") and last.height <= LITTLE and parts[1:]
            self.more()
            if leads:
                self.here.parts.append(parts.pop())
        self.add(Part(height, text="\n\n".join(lines)))
        self.asked = True
        key = "\n".join(f"- {_markdown(line, emphasis=True)}" for line in asked.key())
        self.here.notes.append(f"Question {name}. The answer:\n\n{key}")

    def task(self, name: str) -> None:
        text = f"**Your turn:** task `{name}`. Write it, then run its `check`."
        slide = self.add(Part(_height(text), text=text))
        slide.notes.append(
            f"Learners solve `{name}` in the notebook `notebooks/{self.lesson.slug}"
            f'.ipynb`; the hints are in `hint("{name}")`. More tasks of this kind: '
            f"`exercises/{self.lesson.slug}.ipynb`."
        )


def _sections(source: str) -> list[tuple[str, str]]:
    """(heading, what is below it) for each heading; "" for text before the first."""
    pieces, fenced = [["", []]], False
    for line in source.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
        match = None if fenced else HEADING.match(line)
        if match:
            pieces.append([match[2].strip(), []])
        else:
            pieces[-1][1].append(line)
    found = [(heading, "\n".join(lines).strip("\n")) for heading, lines in pieces]
    return [(heading, body) for heading, body in found if heading or body.strip()]


def _blocks(body: str) -> list[str]:
    """Paragraphs, tables, lists and code; a fenced block stays in one piece."""
    blocks: list[str] = []
    for piece in PARAGRAPHS.split(body):
        if blocks and blocks[-1].count("```") % 2:
            blocks[-1] += f"\n\n{piece}"
        elif piece.strip():
            blocks.append(piece)
    return blocks


def _is_code(block: str) -> bool:
    return bool(FENCE.match(block)) or block.startswith("    ")


def _shorten(block: str) -> str:
    if _is_code(block) or block.lstrip().startswith("|"):
        return block
    if not ITEM.match(block):
        return _first_sentence(block)
    items: list[str] = []
    for line in block.split("\n"):
        if ITEM.match(line) or not items:
            items.append(line)
        else:
            items[-1] += f"\n{line}"
    return "\n".join(map(_first_sentence, items))


def _first_sentence(text: str) -> str:
    """A text as it is if it is short, else as many sentences as are short together."""
    if len(text.split()) <= LONG:
        return text
    ends = [match.start() for match in SENTENCE.finditer(text)]
    # Half a bold lead, half a code span and half a bracket are no sentences. Nor is a
    # bold word before a sentence.
    whole = [
        end
        for end in ends
        if text.count("`", 0, end) % 2 == 0
        and text.count("**", 0, end) % 2 == 0
        and text.count("(", 0, end) == text.count(")", 0, end)
        and not LEAD.fullmatch(text[:end])
    ]
    short = [end for end in whole if len(text[:end].split()) <= LONG]
    return text[: (short[-1:] or whole[:1] or [len(text)])[0]]


def _height(text: str) -> int:
    lines = text.split("\n")
    if _is_code(text):
        return CODE * len(lines) + 20
    if text.lstrip().startswith("|"):
        return sum(ROW * math.ceil(len(line) / (COLUMNS + 20)) for line in lines)
    return TEXT * sum(math.ceil(len(line) / COLUMNS) or 1 for line in lines) + 14


def _markdown(text: str, emphasis: bool = False) -> str:
    """Text with code between backticks, such that Markdown shows just that.

    A star is plain text, or marks `emphasis` as in questions.
    """
    parts = text.split("`")
    special = re.compile(r"([\\_<>\[\]#|])" if emphasis else r"([\\*_<>\[\]#|])")
    plain = (special.sub(r"\\\1", part) for part in parts[::2])
    code = (f"`{part}`" for part in parts[1::2])
    pairs = zip(plain, [*code, ""], strict=True)
    return "".join(piece for pair in pairs for piece in pair)


def _listing(source: str) -> str:
    return f"```python\n{source}\n```"


def _draws(cell: dict) -> bool:
    return any("text/html" in output.get("data", {}) for output in cell["outputs"])


def _texts_of_pictures(cell: dict) -> list[str]:
    found = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data and "text/plain" in data:
            text = source_of({"source": data["text/plain"]})
            found.append(_markdown(" ".join(text.split())))
    return found


def _height_of_pictures(cell: dict) -> int:
    """As slides.css shows them: not wider than the slide, not higher than PICTURE."""
    pages = [
        source_of({"source": output["data"]["text/html"]})
        for output in cell["outputs"]
        if "text/html" in output.get("data", {})
    ]
    found = [match[1] for page in pages for match in PNG.finditer(page)]
    heights = []
    for data in found:
        head = base64.b64decode(data)  # the size is in bytes 16 to 23 of a PNG
        width, height = (int.from_bytes(head[at : at + 4], "big") for at in (16, 20))
        heights.append(min(PICTURE, round(height * min(1, WIDTH / max(width, 1)))))
    return sum(heights) or PICTURE


def _cut_output(cell: dict, text_only: bool = False) -> int:
    """Cut a long output, and say so in it. Returns how many lines are printed."""
    count = 0
    for output in cell["outputs"]:
        if "text" in output:
            lines = source_of({"source": output["text"]}).rstrip("\n").split("\n")
            if len(lines) > LINES:
                left = len(lines) - LINES + 1
                lines[LINES - 1 :] = [f"... {left} more lines: see the notebook"]
            output["text"] = "\n".join(lines) + "\n"
            count += len(lines)
        elif not text_only:
            count += 1
    return count
