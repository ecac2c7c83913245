"""The map of the course: its lessons as a path to follow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes

from course_utils.pictures import draw, words
from course_utils.pictures.draw import LARGE, MARGIN, NORMAL, SMALL, WIDTH, Picture
from course_utils.theory.arguments import one_of

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
def course_map(lessons: Sequence["Lesson"], *, here: str | None = None) -> Picture:
    """The lessons as a path to follow, grouped by where their code runs.

    Args:
        lessons: The lessons to draw, such as `course_utils.LESSONS`.
        here: The number of the lesson in front of the learner, if any.

    Raises:
        ValueError: `here` is a lesson that is not on the map.
    """
    if here is not None:
        one_of(here, "lesson", [lesson.number for lesson in lessons])
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
    for index, row in enumerate(rows):
        bottom = height - 0.56 - index * (row_height + turn) - row_height
        _stage_bands(board, row, (MARGIN, bottom, width, row_height), gap, pad)
        for place, lesson in enumerate(row):
            x, y = MARGIN + pad + place * (width + gap), bottom + 0.18
            if place:
                draw.arrow(board, (x - gap, y + tall / 2), (x, y + tall / 2))
            card = x, y, width, tall
            _lesson_card(board, lesson, card, here=lesson.number == here)
        if index + 1 < len(rows):
            # From the last card down, and back to the first card of the next row.
            first = MARGIN + pad + width / 2
            last, level = x + width / 2, bottom - turn / 2
            start = y - 0.13 if lesson.number == here else y
            looks = {"color": draw.INK, "lw": 1.2}
            board.plot([last, last, first], [start, level, level], **looks)
            draw.arrow(board, (first, level), (first, bottom - turn))
    picture.summary = _map_in_words(lessons, here)
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
        looks = {"fill": draw.MIST, "edge": draw.LINE}
        if stage.virtual:
            looks = draw.LOOKS["virtual"]
        draw.box(board, x, bottom, width, height, **looks)
        y = bottom + height - 0.17
        draw.write(board, x + pad, y, stage.name, weight="bold")
        after = x + pad + draw.width_of(stage.name, SMALL, "bold") + 0.1
        where = draw.cut(stage.place, x + width - after - 0.06, SMALL)
        draw.write(board, after, y, where, color=draw.QUIET)


def _lesson_card(
    board: Axes,
    lesson: "Lesson",
    place: tuple[float, float, float, float],
    *,
    here: bool,
) -> None:
    x, y, width, height = place
    edge, line = (draw.BLUE, 2.6) if here else (draw.INK, 0.8)
    card = draw.box(board, x, y, width, height, edge=edge, line=line)
    top = y + height - 0.21
    title = draw.wrap(lesson.title, width - 0.16, NORMAL, lines=2)
    looks = {"size": LARGE, "weight": "bold"}
    texts = [draw.write(board, x + 0.1, top, lesson.number, **looks)]
    looks = {"size": NORMAL, "va": "top"}
    texts.append(draw.write(board, x + 0.1, top - 0.16, title, **looks))
    board.get_figure().labels += [(text, card) for text in texts]
    if here:
        looks = {"fill": draw.BLUE, "edge": draw.BLUE, "color": draw.PAPER}
        sign = x + 0.1, y - 0.13, width - 0.2, 0.23
        draw.box(board, *sign, "you are here", weight="bold", **looks)


def _map_in_words(lessons: Sequence["Lesson"], here: str | None) -> str:
    titles = {lesson.number: f"{lesson.number} {lesson.title}" for lesson in lessons}
    stages: dict[str, list[str]] = {}
    for lesson in lessons:
        stages.setdefault(_stage_of(lesson).name, []).append(titles[lesson.number])
    path = ". ".join(f"{name}: {', '.join(them)}" for name, them in stages.items())
    said = f"The course: {words.count(len(lessons), 'lesson')}. {path}."
    if here is not None:
        said += f" You are here: {titles[here]}."
    return said
