"""The map of the course: its lessons as a path to follow."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes

from course_utils.pictures import draw, words
from course_utils.pictures.draw import (
    BLUE,
    GREEN,
    INK,
    LARGE,
    LINE,
    MARGIN,
    MIST,
    NORMAL,
    PAPER,
    QUIET,
    SKY,
    SMALL,
    WIDTH,
    Picture,
)

if TYPE_CHECKING:
    from course_utils.notebook.lessons import Lesson


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
    lessons: Sequence["Lesson"],
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
            f"There is no lesson {words.listed(unknown)} on the map. "
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
        height, f"The course: {words.count(len(lessons), 'lesson')}"
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
    row: Sequence["Lesson"],
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
    lessons: Sequence["Lesson"], done: Collection[str], here: str | None
) -> str:
    titles = {lesson.number: f"{lesson.number} {lesson.title}" for lesson in lessons}
    stages: dict[str, list[str]] = {}
    for lesson in lessons:
        stages.setdefault(_stage_of(lesson).name, []).append(titles[lesson.number])
    path = ". ".join(f"{name}: {', '.join(them)}" for name, them in stages.items())
    coming = [le.number for le in lessons if not getattr(le, "exists", True)]
    state = [
        f"done: {words.listed(number for number in titles if number in done) or 'none'}"
    ]
    if here is not None:
        state.append(f"you are here: {titles[here]}")
    if coming:
        state.append(f"to come: {words.listed(coming)}")
    return (
        f"The course: {words.count(len(lessons), 'lesson')}. {path}. "
        + words.sentence("; ".join(state))
    )
