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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from course_utils import ROOT
from course_utils.notebook.lessons import LESSONS, Lesson

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
    r"|`[^`]*`"  # code in a line, and fenced code
    r"|\[[^][]*\]\([^)]*\)"  # links
    r"|^\*\*(?:After this lesson you can|Time:)\*\*.*?$"
)


def running_text(source: str) -> str:
    """The text with a space for each character that is no running text."""
    return HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


Place = tuple[str, int, str]  # a cell, where a word begins without links, the word


def links_of(sources: dict[str, str]) -> tuple[dict[str, str], dict[Place, str]]:
    """The texts of cells without their links to the glossary, and the links."""
    texts, found = {}, {}
    for cell, source in sources.items():
        shorter = 0
        for link in LINK.finditer(source):
            found[cell, link.start() - shorter, link[1]] = link[2]
            shorter += len(link[0]) - len(link[1])
        texts[cell] = LINK.sub(r"\1", source)
    return texts, found


def first_uses(
    texts: dict[str, str], entries: Iterable[Entry], number: str
) -> dict[Place, str]:
    """Where a lesson uses words of the glossary for the first time: what they link to.

    Args:
        texts: its markdown cells by their ids, without links to the glossary.
        number: of the lesson, "03".
    """
    names = {name: entry for entry in entries for name in entry.names}
    ordered = sorted(names, key=len, reverse=True)  # the longest that fits counts
    forms = "|".join(f"({pattern_of(name)})" for name in ordered)
    pattern = re.compile(rf"(?<![\w-])(?:{forms})(?![\w-])")
    seen, found = set(), {}
    for cell, text in texts.items():
        for use in pattern.finditer(running_text(text)):
            entry = names[ordered[use.lastindex - 1]]
            if entry not in seen and number not in OTHERWISE.get(entry.term, ()):
                seen.add(entry)
                found[cell, use.start(), text[slice(*use.span())]] = entry.anchor
    return found


@functools.cache
def sources_of(notebook: Path) -> dict[str, str]:
    """The texts of a notebook's markdown cells, by the cells' ids."""
    cells = nbformat.read(notebook, as_version=4).cells
    return {cell.id: cell.source for cell in cells if cell.cell_type == "markdown"}


ENTRIES = entries_of(GLOSSARY.read_text(encoding="utf-8"))


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
    texts, _ = links_of(sources_of(page))
    names = "|".join(pattern_of(x.strip("`")) for x in (entry.term, *entry.also))
    assert re.search(rf"(?<![\w-])(?:{names})(?![\w-])", "\n".join(texts.values()))


def test_entries_are_in_order_and_no_name_has_two():
    terms = [entry.term.casefold() for entry in ENTRIES]
    assert terms == sorted(terms)
    names = [name.strip("`") for entry in ENTRIES for name in (entry.term, *entry.also)]
    assert len(names) == len(set(names)), sorted(x for x in names if names.count(x) > 1)


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


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_a_lesson_links_the_first_use_of_each_word(lesson: Lesson):
    texts, there = links_of(sources_of(lesson.notebook))
    due = first_uses(texts, ENTRIES, lesson.number)
    missing = [place for place in due.items() if place not in there.items()]
    assert missing == [], "link these first uses"
    assert [place for place in there.items() if place not in due.items()] == []
