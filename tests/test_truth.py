"""Every number in prose is computed, or has a source; links have a title and a date.

The rule for a number in the text of a lesson. One of these must hold:

1. A cell of the same section prints it, or has it in its code. (Any cell of the lesson
   stands behind its first and its last section, and behind whole numbers below 10. A
   cell of another lesson counts where the paragraph names that lesson.) A printed
   0.0155 stands behind "0.016" and "1.55 %", and 0.010 in code behind "10 ms".
2. The same paragraph has a link, or a source under "Sources" repeats the number.
3. It belongs to an equation whose result is known. Each equation is computed here.
4. `WORKED_OUT` computes it, or `STATED` says where it is from.

Not counted: code, names (H100, rank 3, lesson 07), numbers of lists, years, and
numbers in words. The texts of a quiz follow the same rule, and may use what their own
question says and any cell of the lesson.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from course_utils import ROOT
from course_utils.measure import steps
from course_utils.notebook.lessons import LESSONS
from course_utils.questions import Number, Question, load
from course_utils.ranks import Ranks
from course_utils.theory import costs, simulator
from course_utils.virtual_gpus import virtual_gpus

NUMBERS = [lesson.number for lesson in LESSONS]


def default(function: Callable, name: str) -> float:
    """The number that an argument of a function has if nobody gives one."""
    given = inspect.signature(function).parameters[name].default
    return float(str(given).split()[0])


POD = simulator.CLUSTERS["H100, InfiniBand"]
GPT_2_XL = simulator.MODELS["GPT-2 XL"]

# What follows from other numbers, worked out here.
# (lesson, cell or question, as printed) -> what it must be
WORKED_OUT: dict[tuple[str, str, str], float] = {
    ("00", "train-explain", "32"): 64 / 2,
    ("00", "recap", "60 s"): default(Ranks.__init__, "timeout"),
    ("01", "traps-md", "10⁹ bytes"): costs.GB,
    ("01", "traps-md", "2³⁰"): costs.GiB,
    ("01", "traps-md", "2²⁰"): costs.MiB,
    ("01", "traps-md", "7.4 %"): costs.GiB / costs.GB - 1,
    ("01", "01.network_seconds", "14 GB"): 7 * 2,
    ("01", "01.network_seconds", "6.25"): 400 / 8 / 8,
    ("02", "gpus-md", "5 microseconds"): 1e-6 * default(virtual_gpus, "overhead"),
    ("02", "gpus-md", "1 TB/s"): 1e12 * default(virtual_gpus, "memory_bandwidth"),
    ("02", "memory-explain", "3.5²"): (224 / 64) ** 2,
    ("02", "memory-explain", "12"): (224 / 64) ** 2,
    ("02", "02.parameters_share", "1.44"): 1_444_928 / 1e6,
    ("03", "setup-explain", "25 GB/s"): 1e9 * default(virtual_gpus, "bandwidth"),
    ("03", "gil-explain", "20 ms"): 10 + 10,
    ("03", "gil-explain", "30 ms"): 2 * 10 + 10,
    ("03", "gil-explain", "50"): 4 * 10 + 10,
    ("03", "traffic-explain", "14"): 2 * (8 - 1),
    ("03", "03.imbalance", "7.8 MiB"): 4 * 1024 * 2000 / costs.MiB,
    ("04", "bandwidth-md", "1 KiB"): 4**5,
    ("04", "real-table", "0.1 ms"): 1e3 * 32 * 1024 / 0.33e9,
    ("04", "real-table", "0.16 ms"): 1e3 * 1024**2 / 6.44e9,
    ("04", "04.tree_steps", "512"): 2**9,
    ("05", "batch-explain", "126"): 3 * 42,
    ("05", "unequal-explain", "3.4"): 34 / 10,
    ("05", "limit-explain", "2.3"): math.log(10),
    ("05", "05.divide_batch", "1,024"): 4 * 256,
    ("06", "rung2-md", "4 ms"): steps.FORWARD,
    ("06", "rung2-md", "8 ms"): steps.BACKWARD,
    ("06", "rung2-md", "4 MiB"): 4 * default(steps.SleepingLayer.__init__, "elements"),
    ("06", "large-md", "4 MiB"): 4 * default(steps.SleepingLayer.__init__, "elements"),
    ("06", "buckets-explain", "4 KiB"): 4 * 1024,
    ("06", "views-explain", "4 GB"): 4 * 1e9,
    ("06", "sync-norm-explain", "2.71"): 10 * (1 - 0.9**3),
    ("06", "scale-md", "1.6 billion"): GPT_2_XL.parameters,
    ("06", "06.scaling", "2,046"): 2 * (1024 - 1),
    ("06", "06.scaling", "1.2 seconds"): 145 * 0.0085,
    ("07", "whatif-explain", "2,046"): 2 * (1024 - 1),
    ("07", "slow-md", "10 ns"): 1e9 / 100e6,
    ("07", "busbw-explain", "25 GB/s"): POD.inside.bandwidth / 18 / costs.GB,
    ("07", "sim-md", "400 GB/s"): POD.between_nodes(1).bandwidth / costs.GB,
    ("07", "sim-explain", "300"): round(83.50 / 0.28, -1),
    ("07", "07.lower_bound", "1.998"): 2 * (1000 - 1) / 1000,
    ("07", "07.lower_bound", "1.98"): 2 * (100 - 1) / 100,
    ("07", "07.tree_wins", "520 µs"): 26e6 / 50e3,
    ("07", "07.tree_wins", "10.6 ms"): 20 * (9.6 + 520) / 1000,
    ("07", "07.tree_wins", "0.5 µs"): 26e6 / 1024 / 50e3,
    ("07", "07.tree_wins", "20.7 ms"): 2046 * (9.6 + 0.51) / 1000,
    ("07", "07.tree_wins", "19.5 µs"): 1e9 / 1024 / 50e3,
    ("07", "07.tree_wins", "60 ms"): 2046 * (9.6 + 19.5) / 1000,
    ("07", "07.tree_wins", "57.8 µs"): 26e6 / 450e3,
    ("07", "07.tree_wins", "367 µs"): 6 * (3.4 + 57.8),
    ("07", "07.tree_wins", "7.2 µs"): 26e6 / 8 / 450e3,
    ("07", "07.tree_wins", "149 µs"): 14 * (3.4 + 7.222),
    ("08", "figure-explain", "16 bytes"): 4 + 4 + 8,
    ("08", "meta-md", "280 GB"): 70 * 4,
    ("08", "traffic-explain", "1.6 billion"): GPT_2_XL.parameters,
    ("08", "traffic-explain", "32"): 8 * 400 / 100,
    ("08", "terminal-md", "14"): 2 + 12,
    ("08", "terminal-md", "1.2 billion"): costs.transformer_parameters(24, 2048, 8),
    ("09", "pays-explain", "1.4"): 8.0 / 5.8,
    ("09", "recap", "1.2 billion"): costs.transformer_parameters(24, 2048, 8),
    ("11", "slow-explain", "1.44 s"): 3 * 8 * 2 * 0.03,
    ("11", "recap", "1.2 billion"): costs.transformer_parameters(24, 2048, 8),
    ("09", "09.sixteen", "36"): 450 / 12.5,
}

# What somebody decided, or what only a source can know: the reason in words.
STATED: dict[tuple[str, str, str], str] = {
    ("02", "memory-explain", "224"): "torchvision's ResNet50_Weights crop to it",
    ("02", "recap", "224"): "torchvision's ResNet50_Weights crop to it",
    ("05", "alone-md", "1,440"): "measure/data.py: the split of 1,797 digits",
    ("05", "alone-md", "357"): "measure/data.py: the split of 1,797 digits",
    ("08", "meta-md", "70 billion"): "an example: no model is meant",
}

# Programs that a reader may want, linked by their home page. Nothing is quoted there.
PROGRAMS = {
    "https://github.com/NVIDIA/nccl-tests",
    "https://pytorch.org/get-started/locally/",
    "https://nbgrader.readthedocs.io",
    "https://ui.perfetto.dev",
}

# --- numbers and their units ----------------------------------------------------

UNITS = {  # what a unit measures, and how much it is in the basic unit
    "bytes": ("bytes", 1),
    "s": ("seconds", 1),
    "seconds": ("seconds", 1),
    "ms": ("seconds", 1e-3),
    "µs": ("seconds", 1e-6),
    "microseconds": ("seconds", 1e-6),
    "ns": ("seconds", 1e-9),
    "minutes": ("seconds", 60),
    "%": ("", 0.01),
    "million": ("", 1e6),
    "billion": ("", 1e9),
    "GFLOP/s": ("flops", 1e9),
    "TFLOP/s": ("flops", 1e12),
}
for _letter, _power in (("k", 1), ("M", 2), ("G", 3), ("T", 4)):
    UNITS[f"{_letter}B"] = ("bytes", 1000**_power)
    UNITS[f"{_letter.upper()}iB"] = ("bytes", 1024**_power)
    UNITS[f"{_letter}B/s"] = ("bytes a second", 1000**_power)
    UNITS[f"{_letter}b/s"] = ("bits a second", 1000**_power)

_UNIT = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True))
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
NUMBER = re.compile(
    r"(?<![\w.,^])(?<![A-Za-z][-−])[-−]?"  # not H100, not ResNet-50
    r"(?P<digits>\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?P<e>e[-+]?\d+)?"
    r"(?P<power>[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?"
    rf"(?![\w⁻])(?!\.\d)(?:[ -](?P<unit>{_UNIT})(?![\w/])|(?P<sign>%))?"
)


@dataclass(frozen=True)
class Figure:
    """A number as it is written: its value, its unit, and how exact it is."""

    text: str
    value: float  # as printed, without the unit
    unit: str
    decimals: int  # digits after the point

    @property
    def measures(self) -> str:
        return UNITS[self.unit][0] if self.unit else ""

    @property
    def factor(self) -> float:
        return UNITS[self.unit][1] if self.unit else 1.0


def figures(text: str) -> list[Figure]:
    """The numbers in a text, in order."""
    found = []
    for match in NUMBER.finditer(text):
        digits = match["digits"].replace(",", "")
        value = float(digits + (match["e"] or ""))
        if match["power"]:
            value **= int(match["power"].translate(_SUPERSCRIPTS))
        decimals = len(digits.partition(".")[2])
        unit = match["unit"] or match["sign"] or ""
        found.append(Figure(match[0].strip("-− "), value, unit, decimals))
    return found


def agrees(claim: Figure, fact: Figure) -> bool:
    """Whether `fact`, rounded as `claim` is, is the number of `claim`."""
    exact = claim.decimals == 0 and claim.value < 10  # 7 is 7, and not 7.4
    tolerance = 1e-9 * claim.value if exact else 0.5 * 10.0**-claim.decimals

    def near(one: float, other: float, tolerance: float) -> bool:
        return abs(one - other) <= tolerance * (1 + 1e-6)

    if claim.unit and fact.unit and claim.measures != fact.measures:
        return False
    # A bare 16 in code may be 16 MiB; a bare 1 is too common to be 1 TB/s.
    bare = not (claim.unit and fact.unit) and not (exact and claim.unit)
    if bare and near(claim.value, fact.value, tolerance):
        return True
    return near(
        claim.value * claim.factor, fact.value * fact.factor, tolerance * claim.factor
    )


# --- the text of a lesson -------------------------------------------------------

LINK = re.compile(
    r"\[(?P<title>[^\]]+)\]\((?P<url>https?://[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)\)"
)
_ID = r"\d+(?:\.\d+)*(?![\d.]*\d)[a-d]?"
_NAMES = re.compile(
    r"\b(?i:lesson|section|figure|table|equation|rank|GPU|node|step|chunk|rung|question"
    r"|epoch|task|tick|place|row|item|version|number|option|partner|port|column|GTX"
    rf"|PyTorch|NCCL|IEEE|Python)\s+{_ID}(?: to {_ID})?"
    r"|\b(?i:lessons|sections|figures|tables|ranks|GPUs|nodes|steps|chunks|epochs|rows"
    rf"|places|items|groups|ticks)\s+{_ID}(?:(?:, (?:and )?| to | and | or ){_ID})+"
)
YEAR = re.compile(r"\b(?:19[6-9]\d|20[0-3]\d)\b")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def without_names(text: str) -> str:
    """The text without code, titles, addresses, years, and numbers that name things."""
    text = re.sub(r"`[^`]*`", " ", text)
    text = LINK.sub(" ", text)
    text = re.sub(r"\b0\d\b", " ", text)  # lessons 00 to 08
    text = _NAMES.sub(" ", text)
    return YEAR.sub(" ", text)


def blocks(source: str) -> Iterator[str]:
    """Paragraphs, list items and whole tables of a markdown cell; no code."""
    block: list[str] = []
    for line in [*_FENCED.sub("", source).splitlines(), ""]:
        item = re.match(r"\s*(?:\d+\.|-)\s+", line)
        if not line.strip() or item or line.startswith("    "):
            if block:
                yield " ".join(block)
            block = []
        if line.strip() and not line.startswith(("    ", "#")):
            block.append(line[item.end() if item else 0 :].strip())


def code_blocks(source: str) -> str:
    """The code that stands in a markdown cell."""
    indented = [line for line in source.splitlines() if line.startswith("    ")]
    return "\n".join([*_FENCED.findall(source), *indented])


@dataclass(frozen=True)
class Claim:
    """A number in prose, and where it stands."""

    lesson: str
    cell: str
    figure: Figure
    sentence: str
    block: str
    linked: bool  # a link stands in its paragraph, or before its table

    @property
    def key(self) -> tuple[str, str, str]:
        """Its place in the tables above."""
        return self.lesson, self.cell, self.figure.text

    def __str__(self) -> str:
        where = f"{self.lesson}, cell {self.cell}"
        return f"{where}: {self.figure.text!r} in: {self.sentence}"


def claims_in(text: str, lesson: str, cell: str) -> Iterator[Claim]:
    """The numbers of one markdown cell, or of a text of a question."""
    linked = False
    for block in blocks(text):
        table = block.startswith("|")
        linked = LINK.search(block) is not None or (table and linked)
        for sentence in [block] if table else re.split(r"(?<=[.?!]) ", block):
            if "**Time:**" in sentence:
                continue
            for figure in figures(without_names(sentence)):
                yield Claim(lesson, cell, figure, sentence, block, linked)


def text_of(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


@cache
def cells_of(number: str) -> list[dict]:
    """Those of the lesson, and of its notebook in depth."""
    lesson = next(lesson for lesson in LESSONS if lesson.number == number)
    there = [one for one in (lesson.notebook, lesson.in_depth) if one.exists()]
    texts = [path.read_text(encoding="utf-8") for path in there]
    return [cell for text in texts for cell in json.loads(text)["cells"]]


@cache
def sections(number: str) -> dict[str, int]:
    """The number of each cell's section; -1 for the first and the last one."""
    found, section = {}, -1
    for cell in cells_of(number):
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^## (.*)", text_of(cell["source"]), re.MULTILINE)
            if headings:
                section = (
                    -1 if "Recap" in headings else max(found.values(), default=0) + 1
                )
        found[cell["id"]] = section
    return found


@cache
def claims(number: str) -> tuple[Claim, ...]:
    return tuple(
        claim
        for cell in cells_of(number)
        if cell["cell_type"] == "markdown"
        for claim in claims_in(text_of(cell["source"]), number, cell["id"])
    )


# --- what stands behind the numbers ---------------------------------------------


def code_figures(source: str) -> list[Figure]:
    """The numbers in code: 1_000_000, 25 << 20, and those in texts, as "5 GB/s"."""
    source = re.sub(r"(?<=\d)_(?=\d)", "", source)
    source = re.sub(r"\b(\d+) << 20\b", r"\1 MiB", source)
    return figures(re.sub(r"(?<!\de)-|[^\w.,%/ µ-]", " ", source))


def behind(cell: dict) -> list[Figure]:
    """What one cell prints, says in code, or cites."""
    source = text_of(cell["source"])
    if cell["cell_type"] == "markdown":
        cited_here = [c.figure for c in claims_in(source, "", "") if c.linked]
        return cited_here + code_figures(code_blocks(source))
    found = code_figures(source)
    if "nbval-ignore-output" in cell["metadata"].get("tags", []):
        return found  # another machine prints something else: no ground for prose
    for output in cell["outputs"]:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        found += figures(re.sub(r"[\[\](){}=:;×]", " ", text_of(text)))
    return found


@cache
def facts(number: str) -> tuple[tuple[int, Figure], ...]:
    """What stands behind the numbers of a lesson, each with its section."""
    return tuple(
        (sections(number)[cell["id"]], figure)
        for cell in cells_of(number)
        for figure in behind(cell)
    )


@cache
def cited(number: str) -> tuple[Figure, ...]:
    """The numbers that the lesson's sources repeat."""
    return tuple(
        figure
        for cell in cells_of(number)
        if cell["cell_type"] == "markdown"
        for block in blocks(text_of(cell["source"]).partition("## Sources")[2])
        if LINK.search(block)
        for figure in figures(without_names(block))
    )


def known_to(claim: Claim) -> Iterator[Figure]:
    """All numbers that may stand behind a claim of a lesson."""
    yield from cited(claim.lesson)
    here = sections(claim.lesson).get(claim.cell, -1)
    small = not claim.figure.unit and claim.figure.value in range(10)
    for section, figure in facts(claim.lesson):
        if here in (-1, section) or small:
            yield figure
    named = re.findall(r"\b0\d\b", claim.block) if "lesson" in claim.block else []
    for lesson in set(named) & set(NUMBERS) - {claim.lesson}:
        yield from (figure for _, figure in facts(lesson))


# --- equations in prose ---------------------------------------------------------

_EQUATION = re.compile(
    r"(?<![-−+×/·(] )(?<![-−+×/·(.,\w])(?P<left>\d[\d.,]*(?: [-+−×/·] \d[\d.,]*)+)"
    r" = (?P<right>\d[\d,]*(?:\.\d+)?(?: %)?)(?! ?[-+−×/·(])"
)


def computed(expression: str) -> float:
    """The value of a sum, difference, product or quotient of plain numbers."""
    for sign, python in (("−", "-"), ("×", "*"), ("·", "*"), (",", "")):
        expression = expression.replace(sign, python)
    assert re.fullmatch(r"[\d.+*/ -]+", expression)
    return float(eval(expression))


def equations(text: str) -> list[tuple[str, Figure, float]]:
    """The equations between numbers: each left side, right side and true value."""
    return [
        (match["left"], figures(match["right"])[0], computed(match["left"]))
        for match in _EQUATION.finditer(re.sub(r"[*`]", "", text))
    ]


def plain(value: float) -> Figure:
    return Figure(str(value), float(value), "", 99)


def follows(claim: Claim, known: list[Figure]) -> bool:
    """Whether one of the first three rules holds for a claim."""

    def stands(figure: Figure) -> bool:
        return any(agrees(figure, fact) for fact in known)

    if claim.linked or stands(claim.figure):
        return True
    for left, right, value in equations(claim.sentence):
        parts = figures(left)
        if agrees(right, plain(value)) and (stands(right) or all(map(stands, parts))):
            if claim.figure.value in [part.value for part in (*parts, right)]:
                return True
    return False


def explained(claim: Claim, known: list[Figure]) -> bool:
    """Whether one of the four rules holds for a claim."""
    if claim.key in WORKED_OUT and not follows(claim, known):
        return agrees(claim.figure, plain(WORKED_OUT[claim.key]))
    return claim.key in STATED or follows(claim, known)


def listed(lines: Iterable[object]) -> str:
    return "\n".join(f"  {line}" for line in lines)


# --- tests ----------------------------------------------------------------------


def question_facts(question: Question) -> list[Figure]:
    """The numbers that a question itself gives or asks for."""
    given = figures(without_names(question.prompt)) + code_figures(question.code)
    for option in question.options:
        given += figures(option)
    if isinstance(question, Number):
        values = [question.answer, *question.slips]
        given += [plain(value) for value in values]
    return given


@cache
def in_lesson(number: str) -> list[tuple[Claim, list[Figure]]]:
    """The numbers of a lesson, each with all that may stand behind it."""
    return [(claim, list(known_to(claim))) for claim in claims(number)]


@cache
def in_quizzes(number: str) -> list[tuple[Claim, list[Figure]]]:
    """The same for the explanations of its questions."""
    in_prose = [claim.figure for claim in claims(number)]
    return [
        (claim, [*known_to(claim), *in_prose, *question_facts(question)])
        for question in load(number).values()
        for text in question.explanations()
        for claim in claims_in(text, number, question.id)
    ]


@pytest.mark.parametrize("number", NUMBERS)
def test_every_number_in_a_lesson_is_computed_or_has_a_source(number):
    """In its prose: by its section; in its quizzes: by the question or any cell."""
    all_claims = (*in_lesson(number), *in_quizzes(number))
    offenders = [c for c, known in all_claims if not explained(c, known)]
    assert not offenders, (
        f"{len(offenders)} numbers that no cell computes and no source has. "
        f"Reword, compute, or name the source:\n{listed(offenders)}"
    )


def test_the_tables_above_have_no_row_too_many():
    needed = {
        claim.key
        for number in NUMBERS
        for claim, known in (*in_lesson(number), *in_quizzes(number))
        if not follows(claim, known)
    }
    rows = {*WORKED_OUT, *STATED}
    assert rows <= needed, f"Not needed any more:\n{listed(rows - needed)}"
    assert len(rows) == len(WORKED_OUT) + len(STATED)


@pytest.mark.parametrize("number", NUMBERS)
def test_equations_in_prose_are_true(number):
    texts = [
        block
        for cell in cells_of(number)
        if cell["cell_type"] == "markdown"
        for block in blocks(text_of(cell["source"]))
    ]
    texts += [t for question in load(number).values() for t in question.explanations()]
    false = [
        f"{left} = {right.text}: it is {value:g}"
        for text in texts
        for left, right, value in equations(text)
        if not agrees(right, plain(value))
    ]
    assert not false, f"Wrong sums:\n{listed(false)}"


# --- links ----------------------------------------------------------------------

PAGES = [*sorted((ROOT / "notebooks").glob("*.md")), ROOT / "README.md"]
TELLS_NOTHING = {"here", "link", "this", "this page", "page", "paper", "source", "docs"}
TELLS_NOTHING |= {"its documentation", "see", "see below", "website", "article", "url"}


def documents() -> dict[str, list[str]]:
    """The name of each text that readers see, and its paragraphs."""
    found = {path.name: list(blocks(path.read_text("utf-8"))) for path in PAGES}
    for number in NUMBERS:
        cells = [c for c in cells_of(number) if c["cell_type"] == "markdown"]
        texts = [text_of(cell["source"]) for cell in cells]
        found[f"lesson {number}"] = [b for text in texts for b in blocks(text)]
    return found


def without_title(block: str) -> list[str]:
    """The links of a paragraph whose text does not say what is behind them."""
    bad = []
    for match in LINK.finditer(block):
        title = match["title"].strip("`* ")
        words = re.search(r"[^\W\d_]{2}", title)
        if title.lower() in TELLS_NOTHING or not words or title.startswith("http"):
            bad.append(match[0])
    bare = re.sub(r"`[^`]*`", "", LINK.sub("", block))
    return [*bad, *re.findall(r"https?://[^\s|)]+", bare)]


def without_date(paragraphs: list[str]) -> list[str]:
    """The links without a year in their paragraph, or at the same link elsewhere.

    "Read in November 2026" is a date; a year in an address is none.
    """
    dated, undated = set(PROGRAMS), []
    for block in paragraphs:
        if YEAR.search(LINK.sub(lambda match: match["title"], block)):
            dated |= {match["url"] for match in LINK.finditer(block)}
    for block in paragraphs:
        for match in LINK.finditer(block):
            if match["url"] not in dated:
                undated.append(match[0])
    return undated


DOCUMENTS = documents()


@pytest.mark.parametrize("paragraphs", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_link_has_a_title_and_a_date(paragraphs):
    nameless = [link for block in paragraphs for link in without_title(block)]
    assert not nameless, f"Say what is behind the link:\n{listed(nameless)}"
    undated = without_date(paragraphs)
    assert not undated, (
        "Give the year of the source, or when it was read, in the same paragraph:\n"
        f"{listed(undated)}"
    )
