"""Charts of what was guessed and measured, and the map of the course."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes

from course_utils.pictures import draw
from course_utils.pictures.draw import (
    BLUE,
    GREEN,
    INK,
    LARGE,
    LINE,
    MARGIN,
    MIST,
    NORMAL,
    ORANGE,
    PAPER,
    QUIET,
    SKY,
    SMALL,
    WIDTH,
    Picture,
)

if TYPE_CHECKING:
    from course_utils.notebook.lessons import Lesson

# --- the map of the course -------------------------------------------------------


class _Stage(NamedTuple):
    """Lessons that run in the same kind of place, from lesson `start` on."""

    start: str
    name: str
    place: str
    virtual: bool


_STAGES = (
    _Stage("00", "First steps", "on your machine", False),
    _Stage("02", "Virtual GPUs", "in one process", True),
    _Stage("04", "Real processes", "one for each rank", False),
)


@draw.picture
def course_map(
    lessons: "Sequence[Lesson]",
    done: Collection[str] = frozenset(),
    here: str | None = None,
) -> Picture:
    """The lessons as a path to follow, grouped by where their code runs.

    A lesson whose notebook is not in this copy of the course is marked "to come".

    Args:
        lessons: The lessons to draw, such as `course_utils.LESSONS`.
        done: Numbers of the lessons that are finished, such as {"00", "01"}.
        here: The number of the lesson in front of the learner, if any.

    Raises:
        ValueError: `done` or `here` names a lesson that is not on the map.
    """
    done = {done} if isinstance(done, str) else set(done)
    numbers = [lesson.number for lesson in lessons]
    unknown = sorted(map(repr, (done | {here}) - {*numbers, None}))
    if unknown:
        raise ValueError(
            f"There is no lesson {draw.listed(unknown)} on the map. "
            f"The lessons are {', '.join(numbers)}."
        )
    # The path turns where the last stage begins, and then after every five lessons.
    rows: list[list[Lesson]] = []
    for lesson in lessons:
        if not rows or len(rows[-1]) == 5 or lesson.number == _STAGES[-1].start:
            rows.append([])
        rows[-1].append(lesson)

    gap, pad, turn = 0.28, 0.1, 0.34
    width = (WIDTH - 2 * MARGIN - 2 * pad + gap) / 5 - gap
    tall = 0.86
    row_height = tall + 0.48
    height = 0.56 + len(rows) * (row_height + turn) - turn + 0.22
    picture, board = draw.board(
        height, f"The course: {draw.count(len(lessons), 'lesson')}"
    )
    if done:
        looks = {"size": NORMAL, "color": QUIET, "ha": "right"}
        said = f"{len(done)} of {len(lessons)} done"
        draw.write(board, WIDTH - MARGIN, height - 0.28, said, **looks)
    for index, row in enumerate(rows):
        bottom = height - 0.56 - index * (row_height + turn) - row_height
        _stage_bands(board, row, (MARGIN, bottom, width, row_height), gap, pad)
        for place, lesson in enumerate(row):
            x, y = MARGIN + pad + place * (width + gap), bottom + 0.18
            if place:
                draw.arrow(board, (x - gap, y + tall / 2), (x, y + tall / 2))
            state = {"done": lesson.number in done, "here": lesson.number == here}
            _lesson_card(board, lesson, (x, y, width, tall), **state)
        if index + 1 < len(rows):
            # From the last card down, and back to the first card of the next row.
            first = MARGIN + pad + width / 2
            last, level = x + width / 2, bottom - turn / 2
            start = y - 0.13 if lesson.number == here else y
            board.plot([last, last, first], [start, level, level], color=INK, lw=1.2)
            draw.arrow(board, (first, level), (first, bottom - turn))
    picture.summary = _map_in_words(lessons, done, here)
    return picture


def _stage_of(lesson: "Lesson") -> _Stage:
    return [stage for stage in _STAGES if stage.start <= lesson.number][-1]


def _stage_bands(
    board: Axes,
    row: "Sequence[Lesson]",
    first_card: tuple[float, float, float, float],
    gap: float,
    pad: float,
) -> None:
    """A band behind the lessons of each stage, dashed where something is virtual."""
    left, bottom, card, height = first_card
    stages = [_stage_of(lesson) for lesson in row]
    for stage in dict.fromkeys(stages):
        x = left + stages.index(stage) * (card + gap)
        width = stages.count(stage) * (card + gap) - gap + 2 * pad
        looks = {"fill": MIST, "edge": LINE}
        if stage.virtual:
            looks = {"fill": draw.tint(SKY, 0.16), "edge": BLUE, "dashed": True}
        draw.box(board, x, bottom, width, height, **looks)
        y = bottom + height - 0.17
        draw.write(board, x + pad, y, stage.name, weight="bold")
        after = x + pad + draw.width_of(stage.name, SMALL, "bold") + 0.1
        where = draw.cut(stage.place, x + width - after - 0.06, SMALL)
        draw.write(board, after, y, where, color=QUIET)


def _lesson_card(
    board: Axes,
    lesson: "Lesson",
    place: tuple[float, float, float, float],
    *,
    done: bool,
    here: bool,
) -> None:
    x, y, width, height = place
    there = getattr(lesson, "exists", True)
    color = INK if there else QUIET
    fill = draw.tint(GREEN, 0.22) if done else PAPER
    edge, line = (BLUE, 2.6) if here else (color, 0.8)
    card = draw.box(board, x, y, width, height, fill=fill, edge=edge, line=line)
    top = y + height - 0.21
    title = draw.wrap(lesson.title, width - 0.16, NORMAL, lines=2)
    looks = {"color": color, "size": LARGE, "weight": "bold"}
    texts = [draw.write(board, x + 0.1, top, lesson.number, **looks)]
    looks = {"color": color, "size": NORMAL, "va": "top"}
    texts.append(draw.write(board, x + 0.1, top - 0.16, title, **looks))
    if done or not there:
        mark = "✓ done" if done else "to come"
        looks = {"weight": "bold"} if done else {"color": QUIET}
        texts.append(draw.write(board, x + width - 0.1, top, mark, ha="right", **looks))
    board.get_figure().labels += [(text, card) for text in texts]
    if here:
        looks = {"fill": BLUE, "edge": BLUE, "weight": "bold", "color": PAPER}
        draw.box(board, x + 0.1, y - 0.13, width - 0.2, 0.23, "you are here", **looks)


def _map_in_words(
    lessons: "Sequence[Lesson]", done: Collection[str], here: str | None
) -> str:
    titles = {lesson.number: f"{lesson.number} {lesson.title}" for lesson in lessons}
    stages: dict[str, list[str]] = {}
    for lesson in lessons:
        stages.setdefault(_stage_of(lesson).name, []).append(titles[lesson.number])
    path = ". ".join(f"{name}: {', '.join(them)}" for name, them in stages.items())
    coming = [le.number for le in lessons if not getattr(le, "exists", True)]
    state = [
        f"done: {draw.listed(number for number in titles if number in done) or 'none'}"
    ]
    if here is not None:
        state.append(f"you are here: {titles[here]}")
    if coming:
        state.append(f"to come: {draw.listed(coming)}")
    return (
        f"The course: {draw.count(len(lessons), 'lesson')}. {path}. "
        + draw.sentence("; ".join(state))
    )


# --- a guess and what was measured ---------------------------------------------------


@draw.picture
def guess_and_measured(
    guess: float | None, measured: float, unit: str, title: str
) -> Picture:
    """The learner's guess as a bar, and below it the bar of what was measured.

    Args:
        guess: The guess; None if there is none yet. Below 0 it has no bar.
        measured: The measured value, 0 or more.
        unit: The unit of both, such as "s" or "MB"; "" for a plain number.
        title: What was guessed.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is not finite, or `measured` is negative.
    """
    values = {"measured": draw.finite(measured, "measured")}
    if guess is not None:
        values["guess"] = guess = draw.finite(guess, "guess")
    if measured < 0:
        raise ValueError(f"measured is {measured}: expected 0 or more.")
    said = {name: f"{draw.spoken(v, 3)} {unit}".strip() for name, v in values.items()}
    picture, board = draw.board(1.95, title)
    left = MARGIN + 1.05
    room = max(draw.width_of(text, NORMAL, "bold") for text in said.values())
    room = min(room, 2.6)
    width = WIDTH - MARGIN - left - room - 0.15
    most = max(values.values()) or 1.0
    rows = (("guess", "your guess"), ("measured", "measured"))
    for row, (what, word) in enumerate(rows):
        y = 1.02 - row * 0.44
        draw.write(board, MARGIN, y + 0.16, word, size=NORMAL)
        if what not in said:
            looks = {"edge": LINE, "dashed": True, "color": QUIET}
            draw.box(board, left, y, 1.2, 0.32, "no guess yet", **looks)
            continue
        wide = max(width * values[what] / most, 0.03)
        looks = {"fill": draw.tint(BLUE, 0.6)}
        if what == "guess":
            looks = {"fill": draw.tint(ORANGE, 0.35), "hatch": "////"}
        draw.box(board, left, y, wide, 0.32, rounded=0.01, **looks)
        text = draw.cut(said[what], room, NORMAL, "bold")
        looks = {"size": NORMAL, "weight": "bold"}
        draw.write(board, left + wide + 0.1, y + 0.16, text, **looks)
    verdict = _compared(guess, values["measured"])
    draw.write(board, MARGIN, 0.24, verdict, color=QUIET)
    numbers = f"guess {said['guess']}, " if "guess" in said else ""
    picture.summary = f"{title}: {numbers}measured {said['measured']}. {verdict}"
    return picture


def _compared(guess: float | None, measured: float) -> str:
    if guess is None:
        return "No guess yet: answer the question above, then run this cell again."
    if guess == measured:
        return "The guess is exactly the measured value."
    if guess < 0:
        return "The guess is below 0, and the measured value is not."
    if not guess or not measured:
        return "One of the two is 0, so there is no ratio."
    ratio = measured / guess
    if abs(ratio - 1) < 0.01:
        return "The guess is within 1 % of the measured value."
    if ratio > 1:
        return f"The measured value is {draw.spoken(ratio, 3)} times the guess."
    return f"The guess is {draw.spoken(1 / ratio, 3)} times the measured value."


# --- a few measured values ------------------------------------------------------


@draw.picture
def bars(values: Mapping[str, float], unit: str, title: str, note: str = "") -> Picture:
    """Measured values as bars, one below the other, to the same scale.

    Args:
        values: From a name to its value, 0 or more; one to six of them.
        unit: The unit of all, such as "s" (then ms or µs where that reads better).
        title: What was measured.
        note: What follows from it, in one line.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is negative or not finite, or there are too many or none.
    """
    if not 1 <= len(values) <= 6:
        raise ValueError(f"values holds {len(values)} values: expected 1 to 6.")
    for name, value in values.items():
        if draw.finite(value, name) < 0:
            raise ValueError(f"{name} is {value}: expected 0 or more.")
    if unit == "s":
        unit, size = draw.unit_of(max(values.values()))
        values = {name: value / size for name, value in values.items()}
    said = {name: f"{draw.spoken(v, 3)} {unit}".strip() for name, v in values.items()}
    low = 0.5 if note else 0.22
    picture, board = draw.board(0.56 + 0.44 * len(values) + low, title)
    left = MARGIN + 0.2 + min(max(draw.width_of(name, NORMAL) for name in values), 2.4)
    room = max(draw.width_of(text, NORMAL, "bold") for text in said.values()) + 0.15
    width = WIDTH - MARGIN - left - room
    most = max(values.values()) or 1.0
    for row, (name, value) in enumerate(values.items()):
        y = low + 0.44 * (len(values) - 1 - row) + 0.06
        draw.write(board, MARGIN, y + 0.16, draw.cut(name, 2.4, NORMAL), size=NORMAL)
        wide = max(width * value / most, 0.03)
        draw.box(board, left, y, wide, 0.32, rounded=0.01, fill=draw.tint(BLUE, 0.6))
        looks = {"size": NORMAL, "weight": "bold"}
        draw.write(board, left + wide + 0.1, y + 0.16, said[name], **looks)
    draw.note(board, note)
    numbers = ", ".join(f"{name} {text}" for name, text in said.items())
    picture.summary = f"{title}: {numbers}. {note}".strip()
    return picture
