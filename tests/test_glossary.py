"""The glossary (notebooks/glossary.md), and the links to it from the lessons.

The rule of the links: in each lesson, the first use of each word of the glossary links
to its entry, and no later use does. A use is the word itself or one of its other names
("Also:"), as a plural too, with a space, a hyphen or an underscore between its parts;
small letters stand for capitals as well, capitals for themselves only. Uses count in
running text only: not in headings, tables, code, other links, the two paragraphs that
open a lesson ("After this lesson you can", "Time") and its sources. OTHERWISE lists the
lessons in which such a word means something else.

Exercises and solutions have no such links: what they need stands in their lesson.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from course_utils.notebook.lessons import LESSONS, Lesson

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "notebooks" / "glossary.md"
LINK = re.compile(r"\[([^][]+)\]\(glossary\.md#([^)\s]+)\)")
ENGLISH = "English is used"

# Word: numbers of the lessons in which it is another word.
OTHERWISE = {
    "gather": ("08",),
    "overlap": ("03",),
    "root": ("08",),
    "stage": ("08",),
    "unit": ("01", "05"),
}


@dataclass(frozen=True)
class Entry:
    """One word of the glossary."""

    term: str
    definition: str
    korean: str
    also: tuple[str, ...]
    lesson: str  # the file that its link names
    label: str  # the text of that link

    @property
    def anchor(self) -> str:
        """What JupyterLab makes of the heading. GitHub does not look at the case."""
        return self.term.replace(" ", "-")

    @property
    def names(self) -> tuple[str, ...]:
        """The term and its other names, without those that are code."""
        return (self.term, *(name for name in self.also if "`" not in name))


def entries_of(text: str) -> list[Entry]:
    """The entries of a glossary.

    Raises:
        ValueError: an entry is not a heading, a sentence, and a line with "Korean:",
            perhaps "Also:", and "Lesson:".
    """
    found = []
    for block in re.split(r"(?m)^### ", re.sub(r"(?m)^## .*$", "", text))[1:]:
        term, *paragraphs = [part.strip() for part in block.strip().split("\n\n")]
        if len(paragraphs) != 2:
            raise ValueError(f"{term}: a sentence and a line with the Korean term, not")
        line = re.fullmatch(
            r"Korean: (?P<korean>[^·]+?)(?: · Also: (?P<also>[^·]+?))?"
            r" · Lesson: \[(?P<label>[^]]+)\]\((?P<lesson>[^)]+)\)",
            paragraphs[1],
        )
        if line is None:
            raise ValueError(f"{term}: not of the form of an entry: {paragraphs[1]!r}")
        also = tuple((line["also"] or "").split(", ")) if line["also"] else ()
        found.append(
            Entry(
                term, paragraphs[0], line["korean"], also, line["lesson"], line["label"]
            )
        )
    return found


def without_links(source: str) -> str:
    """A text without its links to the glossary."""
    return LINK.sub(r"\1", source)


def pattern_of(name: str) -> str:
    """Finds a name or its plural: in any case, unless the name has capitals itself."""
    form = r"[\s_-]".join(re.escape(part) for part in re.split(r"[ _-]", name))
    return f"(?{'i' if name.islower() else ''}:{form}(?:e?s)?)"


HIDDEN = re.compile(
    r"(?ms)"
    r"^## Sources$.*?(?=^## |^\*\*Next|\Z)"
    r"|^#+ .*?$"  # headings
    r"|^\|.*?$"  # tables
    r"|^ {4}.*?$"  # indented code
    r"|^```.*?^```"
    r"|`[^`]*`"
    r"|!?\[[^][]*\]\([^)]*\)"  # links and images
    r"|</?\w[^>]*>"
    r"|Collective Communications Library"  # a name
    r"|^\*\*(?:After this lesson you can|Time:)\*\*.*?$"
)


def running_text(source: str) -> str:
    """The text with a space for each character that is no running text."""
    return HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def first_uses(
    sources: Iterable[tuple[str, str]], entries: Iterable[Entry], number: str
) -> Iterator[tuple[str, int, int, Entry]]:
    """Where a lesson uses words of the glossary for the first time.

    Args:
        sources: (id, text) of its markdown cells, without links to the glossary.
        number: of the lesson, "03".

    Yields:
        The id of the cell, where in its text the word begins and ends, and its entry.
    """
    names = {name: entry for entry in entries for name in entry.names}
    ordered = sorted(names, key=len, reverse=True)  # the longest that fits counts
    forms = "|".join(f"({pattern_of(name)})" for name in ordered)
    pattern = re.compile(rf"(?<![\w-])(?:{forms})(?![\w-])")
    seen = set()
    for cell, source in sources:
        for use in pattern.finditer(running_text(source)):
            entry = names[ordered[use.lastindex - 1]]
            if entry in seen or number in OTHERWISE.get(entry.term, ()):
                continue
            seen.add(entry)
            yield cell, *use.span(), entry


def linked(
    sources: Iterable[tuple[str, str]], entries: Iterable[Entry], number: str
) -> dict[str, str]:
    """The texts of a lesson's markdown cells with the links that the rule asks for."""
    texts = {cell: without_links(source) for cell, source in sources}
    uses = list(first_uses(texts.items(), entries, number))
    for cell, begin, end, entry in reversed(uses):
        text = texts[cell]
        link = f"[{text[begin:end]}](glossary.md#{entry.anchor})"
        texts[cell] = text[:begin] + link + text[end:]
    return texts


def differences(sources: dict[str, str], expected: dict[str, str]) -> list[str]:
    """What a lesson's author has to change, a line for each link."""
    found = []
    for cell, source in sources.items():
        there = [link[0] for link in LINK.finditer(source)]
        due = [link[0] for link in LINK.finditer(expected[cell])]
        found += [f"{cell}: link the first use, {x}" for x in due if x not in there]
        found += [f"{cell}: remove the link {x}" for x in there if x not in due]
        if set(there) == set(due) and source != expected[cell]:
            found.append(f"{cell}: only the first use has a link: {', '.join(due)}")
    return found


@functools.cache
def sources_of(notebook: Path) -> dict[str, str]:
    """The texts of a notebook's markdown cells, by the cells' ids."""
    cells = nbformat.read(notebook, as_version=4).cells
    return {cell.id: cell.source for cell in cells if cell.cell_type == "markdown"}


ENTRIES = entries_of(GLOSSARY.read_text(encoding="utf-8"))
THERE = [lesson for lesson in LESSONS if lesson.exists]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.anchor)
def test_an_entry_says_what_a_word_means(entry):
    # Letters, digits, spaces, hyphens and underscores: of these, GitHub and JupyterLab
    # make the same anchor.
    assert re.fullmatch(r"[\w -]+", entry.term, re.ASCII), entry.term
    assert re.fullmatch(r"[A-Z0-9\[].*[^.]\.", entry.definition), entry.definition
    assert not re.search(r"[.!?] ", entry.definition), "one sentence"
    assert entry.korean == ENGLISH or re.search("[가-힣]", entry.korean), entry.korean


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.anchor)
def test_an_entry_leads_to_a_lesson_that_uses_the_word(entry):
    page = ROOT / "notebooks" / entry.lesson
    lesson = next(x for x in LESSONS if page in (x.notebook, x.in_depth))
    deeper = ", in depth" if page == lesson.in_depth else ""
    assert entry.label == f"{lesson.number} · {lesson.title}{deeper}"
    text = "\n".join(sources_of(page).values())
    names = "|".join(pattern_of(x.strip("`")) for x in (entry.term, *entry.also))
    assert re.search(rf"(?<![\w-])(?:{names})(?![\w-])", without_links(text))


def test_entries_are_in_order_and_no_name_has_two():
    terms = [entry.term.casefold() for entry in ENTRIES]
    assert terms == sorted(terms)
    names = [name.strip("`") for entry in ENTRIES for name in (entry.term, *entry.also)]
    assert len(names) == len(set(names)), sorted(x for x in names if names.count(x) > 1)
    anchors = {entry.anchor.casefold() for entry in ENTRIES}
    assert len(anchors) == len(ENTRIES)


def pages() -> list[Path]:
    """What may link to the glossary: notebooks and pages of the course."""
    patterns = ["README.md", "notebooks/*.md"]
    patterns += [f"{x}/*.ipynb" for x in ("notebooks", "exercises", "solutions")]
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


@pytest.mark.parametrize("page", pages(), ids=lambda x: str(x.relative_to(ROOT)))
def test_links_to_the_glossary_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    inside = page == GLOSSARY  # there the headings of letters count, too
    used = set(re.findall(rf"{'' if inside else 'glossary.md'}#([^)\s\"]+)\)", text))
    letters = re.findall(r"(?m)^## (.+)$", text) if inside else []
    assert used <= {*letters, *(entry.anchor for entry in ENTRIES)}


@pytest.mark.parametrize("lesson", THERE, ids=lambda lesson: lesson.number)
def test_a_lesson_links_the_first_use_of_each_word(lesson: Lesson):
    sources = sources_of(lesson.notebook)
    wrong = differences(sources, linked(sources.items(), ENTRIES, lesson.number))
    assert not wrong, "\n" + "\n".join(wrong)
