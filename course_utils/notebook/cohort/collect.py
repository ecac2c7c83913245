"""Read what learners handed in: progress files and exercise notebooks.

Nothing here runs anything of a learner's. JSON is parsed; of a notebook, the text that
the checks printed is read, and whether the code differs from what the exercise gives.
Links are not followed, only ordinary files are opened, and what is too large, damaged
or unknown becomes a note in the learner's row.

The learner is the first folder below FOLDER, or a file there. These layouts work, and
may be mixed::

    anna/progress.json              anna.json               anna_progress.json
    anna/exercises/06_ddp.ipynb     anna_06_ddp.ipynb       anna/.course/progress.json
    submitted/anna/06_ddp/06_ddp.ipynb                      (nbgrader)
    Anna Kim_1234_assignsubmission_file_/06_ddp.ipynb       (Moodle)
    kimanna_1234_5678_06_ddp.ipynb                          (Canvas)
    DDP_kimanna_attempt_2026-03-01-10-00-00_06_ddp.ipynb    (Blackboard)
"""

import functools
import json
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from course_utils.notebook.exercises import MARKER, STUB
from course_utils.notebook.lessons import LESSONS, Lesson
from course_utils.notebook.outcome import Status
from course_utils.notebook.progress import FIELDS, VERSION

PASSED, WRONG, TRIED, NOT = "passed", "wrong", "tried", "not attempted"
STATES = (PASSED, WRONG, TRIED, NOT)  # the best first

PROGRESS_BYTES = 5_000_000  # a finished course has about 30 KB
NOTEBOOK_BYTES = 50_000_000  # pictures are large
FILES = 5_000  # of one learner; a whole clone has a few hundred
DEPTH = 12  # folders in folders
TRIES = 1_000_000  # a number of tries above it was not counted by the course
# Nobody's answers are in these. The course's own are those that a whole clone has.
SKIPPED = {
    *("__MACOSX", ".git", ".venv", "venv", "__pycache__", "node_modules"),
    *(".ipynb_checkpoints", "site-packages", ".ipython"),
    *("notebooks", "solutions", "tests"),
}
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")

CHECK = re.compile(r"\bcheck\(\s*(?:task_id\s*=\s*)?[\"'](\d\d\.[a-z0-9_]+)[\"']")
COMMENT = re.compile(r"^[ \t]*#.*", re.MULTILINE)
STATUSES = get_args(Status)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
VERDICT = re.compile(
    rf"^[✓·✗] (?P<id>\d\d\.[a-z0-9_]+): (?P<status>{'|'.join(STATUSES)})$",
    re.MULTILINE,
)
_SLUGS = "|".join(re.escape(lesson.slug) for lesson in LESSONS)
# How learning platforms name what they hand out.
PLATFORMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<name>.+?)_(?P<number>\d+)_assignsubmission_\w+_?",
        r".+?_(?P<name>[^_]+)(?P<number>)_attempt_\d{4}-\d\d-\d\d[-\d]*(?:_.*)?",
        # In team_3_06_ddp the second number belongs to the lesson.
        rf"(?P<name>[^_]+?)(?:_LATE)?_(?P<number>\d+)_(?!(?i:{_SLUGS}))\d+_.+",
    )
)
# What a file's name says besides the learner's.
_REST = re.compile(rf"(?:^|[-_. ]+)(?:{_SLUGS}|progress|exercises?)(?=$|[-_. (])", re.I)
_OLD_COPY = re.compile(r"progress\.(damaged|before-reset)\b.*")
_JUPYTER_COPY = re.compile(r"-Copy\d+$")  # of one's own file
_NUMBERED = re.compile(r"[-_. ]*\(\d+\)$")  # by a browser: a second file of that name


@dataclass(frozen=True)
class Column:
    """One task or question of the course.

    A question that its lesson measures is not ``judged``: nobody is right or wrong.
    """

    id: str
    kind: str  # "task" or "question"
    lesson: Lesson
    judged: bool = True

    @property
    def key(self) -> str:
        """Its name among all: a task and a question may have one id."""
        return self.id if self.kind == "task" else f"quiz {self.id}"


@dataclass(frozen=True)
class Result:
    """What a learner has of one task or question.

    Attributes:
        state: "passed" (or answered right), "wrong" (the last check or answer was not
            right), "tried" (something was done that nothing has judged), or "not
            attempted".
        status: what the check said: "stuck", "crashed", "wrong"; or "".
        tries: how often; 0 where only a notebook tells.
        hints, saw_solution: what was read on the way.
    """

    state: str = NOT
    status: str = ""
    tries: int = 0
    hints: int = 0
    saw_solution: bool = False

    def words(self) -> str:
        """The state with its circumstances: "wrong: stuck, 5 tries, 2 hints"."""
        facts = [self.status] if self.status not in ("", self.state) else []
        for number, word in ((self.tries, ("try", "tries")), (self.hints, ("hint",))):
            if number:
                plural = word[-1] if len(word) > 1 else f"{word[0]}s"
                facts.append(f"{number} {word[0] if number == 1 else plural}")
        if self.saw_solution:
            facts.append("saw the solution")
        return f"{self.state}: {', '.join(facts)}" if facts else self.state

    def better(self, other: "Result") -> "Result":
        """Both sources in one: the better state, the larger numbers."""
        best = min(self, other, key=lambda one: STATES.index(one.state))
        return replace(
            best,
            tries=max(self.tries, other.tries),
            hints=max(self.hints, other.hints),
            saw_solution=self.saw_solution or other.saw_solution,
        )


NOTHING = Result()


@dataclass
class Learner:
    """One row: what was found of a learner, and what could not be read.

    ``namesakes`` counts others of the same name that come before.
    """

    name: str
    namesakes: int = 0
    results: dict[str, Result] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    notebooks: list[Path] = field(default_factory=list)
    progress_files: int = 0

    @property
    def label(self) -> str:
        """The name, with a number where others have the same."""
        return f"{self.name} ({self.namesakes + 1})" if self.namesakes else self.name

    def result(self, key: str) -> Result:
        """What there is of one column, by its key; "not attempted" without a trace."""
        return self.results.get(key, NOTHING)

    def add(self, key: str, result: Result) -> None:
        """Take over one more source."""
        self.results[key] = self.result(key).better(result)


@functools.cache
def columns() -> tuple[Column, ...]:
    """The tasks and the questions of the course, lesson by lesson."""
    from course_utils import questions

    with_questions = questions.lessons()
    found = []
    for lesson in LESSONS:
        found += [Column(task, "task", lesson) for task in lesson.tasks]
        if lesson.number in with_questions:
            found += [
                Column(name, "question", lesson, judged=not question.measured)
                for name, question in questions.load(lesson.number).items()
            ]
    return tuple(found)


def collect(folder: Path) -> list[Learner]:
    """Read a folder of submissions; the learners in the order of their names.

    Raises:
        OSError: the folder cannot be listed. What is below it becomes a note instead.
    """
    if (folder / "submitted").is_dir() and not (folder / "submitted").is_symlink():
        folder = folder / "submitted"
    learners: dict[str, Learner] = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name in SKIPPED or entry.name.startswith("._"):
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        path = Path(entry.path)
        known = path.suffix.lower() in (".json", ".ipynb", *ARCHIVES)
        if not (is_folder or known or entry.is_symlink()):
            continue  # a list of names, a table that this command has written
        key, name = owner(path.stem if known and not is_folder else entry.name)
        if not name:  # it is one learner's own folder
            key, name = owner(folder.resolve().name)
        if key not in learners:
            taken = [one.name for one in learners.values()].count(name)
            learners[key] = Learner(name, namesakes=taken)
        for file in _files(path, learners[key]):
            _read(file, learners[key], folder, only=not is_folder)
    for learner in learners.values():
        if not (learner.results or learner.notes or learner.notebooks):
            learner.notes.append(
                "the progress file is empty: nothing was recorded where it was made"
                if learner.progress_files
                else "no progress file and no exercise notebook was found"
            )
        unnumbered = _NUMBERED.sub("", learner.name)
        other = learners.get(unnumbered.casefold(), learner)
        if not unnumbered:
            learner.notes.append("the name does not say whose it is: rename it")
        elif other is not learner:
            learner.notes.append(
                f"perhaps the same person as {other.name}: a browser numbers a second "
                "file of one name"
            )
        if learner.progress_files > 1:
            learner.notes.append(
                f"{learner.progress_files} progress files: of each task the better"
            )
    return sorted(
        learners.values(), key=lambda one: (one.name.casefold(), one.namesakes)
    )


def owner(text: str) -> tuple[str, str]:
    """Whose a folder, or a file without its ending, is: a key, and the name to show.

    Two people of one name have two keys, where the platform tells them apart. Small and
    capital letters do not.

    >>> owner("Anna_06_ddp"), owner("Anna Kim_99_assignsubmission_file_")
    (('anna', 'Anna'), ('anna kim_99', 'Anna Kim'))
    >>> owner("progress")
    ('', '')
    """
    text = unicodedata.normalize("NFC", text)  # macOS writes letters in pieces
    for pattern in PLATFORMS:
        if match := pattern.fullmatch(text):
            key = "_".join(filter(None, match.groups()))
            return key.casefold(), clean(match["name"])
    if text in (".course", "exercises"):
        return "", ""
    rest = _REST.sub("", _JUPYTER_COPY.sub("", text)).strip("-_. ")
    return rest.casefold(), clean(rest)


def clean(text: str) -> str:
    """A text for one line of a table or a terminal: no control characters.

    Neither characters that turn the direction of writing, nor half ones.
    """
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    # Cc control, Cf direction and invisible, Zl and Zp line ends.
    bad = ("Cc", "Cf", "Cs", "Zl", "Zp")
    kept = ("�" if unicodedata.category(c) in bad else c for c in text)
    text = " ".join("".join(kept).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


# --------------------------------------------------------------------------- files


def _files(path: Path, learner: Learner) -> Iterator[Path]:
    """Every ordinary file at or below a path; what is none becomes a note."""
    waiting, count = [(path, 0)], 0
    while waiting:
        here, depth = waiting.pop()
        try:
            mode = os.lstat(here).st_mode
            if stat.S_ISLNK(mode):
                learner.notes.append(f"{clean(here.name)} is a link: not followed")
            elif stat.S_ISDIR(mode):
                if depth > DEPTH:
                    learner.notes.append(f"more than {DEPTH} folders in folders")
                    continue
                inside = sorted(os.listdir(here), reverse=True)
                inside = [one for one in inside if one not in SKIPPED]
                waiting += [
                    (here / one, depth + 1)
                    for one in inside
                    if not one.startswith("._")
                ]
            elif stat.S_ISREG(mode):
                yield here
            else:
                learner.notes.append(f"{clean(here.name)} is no ordinary file")
        except OSError as error:
            learner.notes.append(f"{clean(here.name)}: {error.strerror}")
        count += 1
        if count > FILES:
            learner.notes.append(f"more than {FILES:,} files: the rest was not read")
            return


def _read(file: Path, learner: Learner, folder: Path, *, only: bool) -> None:
    """Read one file; ``only`` if it is all that this learner handed in."""
    shown = clean(str(file.relative_to(folder)))
    ending = file.suffix.lower()
    if ending in ARCHIVES:
        learner.notes.append(f"{shown} is packed: unpack it first")
    if ending not in (".json", ".ipynb") or _OLD_COPY.fullmatch(file.name):
        return
    is_notebook = ending == ".ipynb"
    # Inside a learner's folder, other programs have their JSON, too.
    expected = is_notebook or only or "progress" in file.stem.lower()
    try:
        data = read_json(file, NOTEBOOK_BYTES if is_notebook else PROGRESS_BYTES)
        if is_notebook:
            _take_notebook(file, data, learner)
        else:
            _take_progress(data, learner)
    except Unreadable as error:
        if expected:
            learner.notes.append(f"{shown} {error}")


class Unreadable(Exception):
    """Why a file gives nothing, as the end of a sentence that begins with its name."""


def read_json(file: Path, limit: int) -> object:
    """Parse a file of at most ``limit`` bytes. Raises Unreadable."""
    # A link or a pipe may have taken the file's place since it was looked at.
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    try:
        with open(os.open(file, flags), "rb") as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise Unreadable("is no ordinary file")
            data = source.read(limit + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise Unreadable(f"is larger than {limit / 1e6:g} MB: not read")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Unreadable("is damaged: it is no JSON") from None


# ------------------------------------------------------------------- progress files


def _take_progress(data: object, learner: Learner) -> None:
    """Take over the entries that are whole, and say how many are not."""
    parts = data if isinstance(data, dict) else {}
    if not any(isinstance(parts.get(part), dict) for part in FIELDS):
        raise Unreadable("is no progress file")
    if parts.get("version") != VERSION:
        raise Unreadable(f"is a progress file of another version, not {VERSION}")
    learner.progress_files += 1
    known = {column.key for column in columns()}
    damaged = unknown = 0
    for part, prefix, read in (
        ("tasks", "", _task_result),
        ("questions", "quiz ", _question_result),
    ):
        entries = parts.get(part)
        if not isinstance(entries, dict):
            learner.notes.append(f"a progress file has no {part}")
            continue
        for name, entry in entries.items():
            if not _is_entry(entry, part):
                damaged += 1
            elif prefix + name in known:
                learner.add(prefix + name, read(entry))
            elif name not in known:  # else it is the number of a task, counted there
                unknown += 1
    if damaged:
        learner.notes.append(f"damaged entries in a progress file: {damaged}")
    if unknown:
        learner.notes.append(f"tasks that this course does not have: {unknown}")


def _is_entry(entry: object, part: str) -> bool:
    if not isinstance(entry, dict):
        return False
    for name, type_ in FIELDS[part].items():
        value = entry.get(name, ...)
        if not isinstance(value, type_):
            return False
        # To Python True is the number 1.
        if type_ is int and (isinstance(value, bool) or not 0 <= value <= TRIES):
            return False
    return True


def _task_result(entry: dict) -> Result:
    if entry["passed"]:
        state, status = PASSED, ""
    elif entry["tries"]:
        state = WRONG
        status = entry["status"] if entry["status"] in STATUSES else ""
    else:
        state, status = TRIED if entry["hints"] or entry["saw_solution"] else NOT, ""
    return Result(state, status, entry["tries"], entry["hints"], entry["saw_solution"])


def _question_result(entry: dict) -> Result:
    states = {True: PASSED, False: WRONG, None: TRIED}  # None: a prediction
    return Result(states[entry["correct"]], tries=entry["tries"])


# ------------------------------------------------------------------------ notebooks


def _take_notebook(file: Path, data: object, learner: Learner) -> None:
    """Take over what the checks printed, and which answers differ from the stubs."""
    cells = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(cells, list):
        raise Unreadable("is no notebook")
    cells = [cell for cell in cells if isinstance(cell, dict)]
    if any("why" in _tags(cell) for cell in cells):
        raise Unreadable("is the course's solution: not counted")
    known = {column.key for column in columns()}
    tasks = tasks_checked(cells)
    if not tasks:
        return  # some other notebook
    learner.notebooks.append(file)
    code = [cell for cell in cells if cell.get("cell_type") == "code"]
    for cell in code:
        own = known & tasks_checked([cell])
        for match in VERDICT.finditer(COLOUR.sub("", _printed(cell))):
            if match["id"] in own:
                learner.add(match["id"], result_of(match["status"]))
    for cell in code:
        for task, begin in _answer_cells().get(str(cell.get("id")), ()):
            source = source_of(cell).strip()
            unchanged = source == begin if begin else STUB in source
            if task in tasks and source and not unchanged:
                learner.add(task, Result(TRIED))


def tasks_checked(cells: list) -> set[str]:
    """The tasks that the cells of a notebook check, or claim to check."""
    return {
        name
        for cell in cells
        if isinstance(cell, dict) and cell.get("cell_type") == "code"
        for name in CHECK.findall(COMMENT.sub("", source_of(cell)))
    }


def result_of(status: str) -> Result:
    """The result that a check's status stands for."""
    if status in (PASSED, NOT):
        return Result(status)
    return Result(WRONG, status)


def source_of(cell: dict) -> str:
    """The source of a cell, also of a damaged one."""
    return _text(cell.get("source"))


def _text(parts: object) -> str:
    """A text that a notebook stores whole or as a list of lines; else ""."""
    if isinstance(parts, list):
        return "".join(part for part in parts if isinstance(part, str))
    return parts if isinstance(parts, str) else ""


def _tags(cell: dict) -> list:
    metadata = cell.get("metadata")
    tags = metadata.get("tags") if isinstance(metadata, dict) else None
    return tags if isinstance(tags, list) else []


def _printed(cell: dict) -> str:
    outputs = cell.get("outputs")
    return "".join(
        _text(output.get("text"))
        for output in (outputs if isinstance(outputs, list) else ())
        if isinstance(output, dict) and output.get("name") == "stdout"
    )


@functools.cache
def _answer_cells() -> dict[str, list[tuple[str, str]]]:
    """Id of a cell where an answer goes -> (task, what the learner is given) of it.

    "" is given where there is a stub. Several lessons may have a cell of one id. The
    solved notebooks are read: an exercise in this clone is its owner's to change.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for lesson in LESSONS:
        try:
            cells = json.loads(lesson.solution.read_text(encoding="utf-8"))["cells"]
        except (OSError, ValueError, KeyError):
            continue
        for cell in cells:
            source = source_of(cell).strip()
            is_given = "given" in _tags(cell)
            if is_given or MARKER.search(source):
                tasks = [tag for tag in _tags(cell) if tag in lesson.tasks]
                cells_of_id = found.setdefault(cell["id"], [])
                cells_of_id += [(task, source if is_given else "") for task in tasks]
    return found
