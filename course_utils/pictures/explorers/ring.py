"""The explorer of a ring: what ranks have run, step by step."""

import itertools
from collections.abc import Sequence

import traitlets

from course_utils.measure.snapshots import History, Moment
from course_utils.pictures.explorers.base import (
    Explorer,
    counted,
    in_columns,
    slider,
    table,
)
from course_utils.pictures.explorers.collectives import MOST_RANKS, shown

_MOST_ELEMENTS = 32
_MARKS = (
    "↑ goes out in this step, ↓ came in with the step before, ✓ complete: the sum over "
    "all ranks."
)


class RingStepper(Explorer):
    """Go through a ring all-reduce that real ranks have run, one step after the other.

    The last expression of a cell shows it: a slider, a button that plays the steps, and
    a table of what every rank held at the start of the step. Each number in it was in
    a rank's tensor. `step` can also be set in Python.

        >>> recorded = [  # of two ranks; this is what `snapshots` gives
        ...     [([1.0, 5.0], 0, 1, 1), ([1.0, 11.0], 1, 2, 1), ([3.0, 11.0],)],
        ...     [([2.0, 6.0], 1, 2, 0), ([3.0, 6.0], 0, 1, 0), ([3.0, 11.0],)],
        ... ]
        >>> stepper = RingStepper(recorded)
        >>> print(stepper.summary)
        Step 0 (of 0 to 1), reduce-scatter: rank 0 sends chunk 0 to rank 1, \
rank 1 chunk 1 to rank 0. Complete: 0 of 4 chunks.

    Args:
        recorded: For each rank, in rank order, what `snapshots.snapshots` noted there.
            At most 8 ranks and 32 elements.

    Attributes:
        step: Which step is shown, 0 up to `steps`, the end.

    Raises:
        ValueError: there are too many ranks or elements, or they do not fit together.
    """

    _invitation = "go through its steps"

    step = traitlets.Int(0).tag(sync=True)

    def __init__(self, recorded: Sequence[Sequence[Moment]]) -> None:
        self._history = History(recorded)
        elements = self._history.chunks[-1][1]
        if self._history.world_size > MOST_RANKS or elements > _MOST_ELEMENTS:
            raise ValueError(
                f"recorded is of {self._history.world_size} ranks with {elements} "
                f"elements: expected at most {MOST_RANKS} ranks and {_MOST_ELEMENTS} "
                "elements."
            )
        super().__init__()
        step = slider("step", "Step", 0, self.steps, play=True)
        self.set_trait("controls", [step])
        ranks = counted(self._history.world_size, "rank")
        self.set_trait("region", f"Table of the chunks on {ranks}")
        self._refresh()

    @property
    def steps(self) -> int:
        """How many steps the ranks made; 2(n-1) in a ring all-reduce on n ranks."""
        return self._history.steps

    @traitlets.validate("step")
    def _within(self, proposal: dict) -> int:
        return min(max(proposal["value"], 0), self.steps)

    @traitlets.observe("step")
    def _refresh(self, _: object = None) -> None:
        self.set_trait("summary", self._in_one_line())
        self.set_trait("body", self._as_html())

    def text(self) -> str:
        """What is shown, as plain text."""
        rows = [("", *self._heads())]
        for rank in range(self._history.world_size):
            cells = []
            for chunk in range(len(self._history.chunks)):
                values, _, arrived, leaves = self._cell(rank, chunk)
                complete = self._history.is_complete(self.step, rank, chunk)
                marks = (complete, "✓"), (arrived, "↓"), (leaves, "↑")
                signs = (sign for true, sign in marks if true)
                cells.append(" ".join([values, *signs]))
            rows.append((f"rank {rank}", *cells))
        lines = [self.summary, "", *in_columns(rows)]
        return "\n".join([*lines, "", _MARKS, self._sent_so_far()])

    def _in_one_line(self) -> str:
        history, step = self._history, self.step
        cells = [
            history.is_complete(step, rank, chunk)
            for rank in range(history.world_size)
            for chunk in range(len(history.chunks))
        ]
        complete = f"Complete: {sum(cells)} of {counted(len(cells), 'chunk')}."
        if step == self.steps:
            return f"End, after {counted(step, 'step')}. {complete}"
        sent = ", ".join(
            f"rank {rank} {'' if rank else 'sends '}"
            f"{self._named(one[step].first, one[step].stop)} to rank {one[step].to}"
            for rank, one in enumerate(history.moments)
        )
        last = self.steps - 1
        which = f"Step {step} (of 0 to {last})" if last else f"Step {step}"
        return f"{which}{self._half()}: {sent}. {complete}"

    def _half(self) -> str:
        """Which half of an all-reduce this step belongs to, if it is clear."""
        done = {
            taken.how
            for taken in self._history.taken[self.step]
            if taken.first < taken.stop
        }
        halves = {"added": ", reduce-scatter", "copied": ", all-gather"}
        return halves.get(done.pop(), "") if len(done) == 1 else ""

    def _named(self, first: int, stop: int) -> str:
        """The chunks of these elements, in words."""
        numbers = [
            str(number)
            for number, (start, end) in enumerate(self._history.chunks)
            if first <= start and end <= stop
        ]
        if not numbers:
            return "an empty chunk"
        *most, last = numbers
        return f"chunks {', '.join(most)} and {last}" if most else f"chunk {last}"

    def _heads(self) -> list[str]:
        return [
            f"chunk {number} x[{first}:{stop}]"
            for number, (first, stop) in enumerate(self._history.chunks)
        ]

    def _cell(self, rank: int, chunk: int) -> tuple[str, str, str, str]:
        """The numbers, whose sum they are, what came in before, what goes out now."""
        history, step = self._history, self.step
        first, stop = history.chunks[chunk]
        values = shown(history.values(step, rank, chunk))
        arrived = leaves = ""
        if step:
            taken = history.taken[step - 1][rank]
            if taken.first <= first and stop <= taken.stop:
                arrived = taken.how or "received"
        if step < self.steps:
            moment = history.moments[rank][step]
            if moment.first <= first and stop <= moment.stop:
                leaves = "sends"
        return values, self._whose(rank, chunk), arrived, leaves

    def _whose(self, rank: int, chunk: int) -> str:
        """Of which ranks the chunk is the sum, in words."""
        shares = self._history.shares(self.step, rank, chunk)
        if shares is None:
            return "no sum of what was sent"
        if self._history.is_complete(self.step, rank, chunk):
            return "✓ all ranks"
        said = []
        for share, run in itertools.groupby(range(len(shares)), shares.__getitem__):
            first, *more = run
            ranks = (
                f"{first}–{more[-1]}"
                if len(more) > 1
                else ", ".join(map(str, [first, *more]))
            )
            if share:
                said.append(ranks if share == 1 else f"{ranks} ({share} times)")
        return f"rank{'s' if sum(map(bool, shares)) > 1 else ''} {', '.join(said)}"

    def _sent_so_far(self) -> str:
        elements = self._history.chunks[-1][1]
        sent = [
            sum(moment.stop - moment.first for moment in one[: self.step])
            for one in self._history.moments
        ]
        few, many = min(sent), max(sent)
        numbers = str(many) if few == many else f"{few} to {many}"
        return (
            f"Sent so far by each rank: {counted(self.step, 'message')}; elements in "
            f"them: {numbers}. Its tensor has {elements}."
        )

    def _as_html(self) -> str:
        rows = []
        for rank in range(self._history.world_size):
            cells = []
            for chunk in range(len(self._history.chunks)):
                values, whose, arrived, leaves = self._cell(rank, chunk)
                kinds = ["course-explorer-chunk"]
                if self._history.is_complete(self.step, rank, chunk):
                    kinds.append("course-explorer-complete")
                if leaves:
                    kinds.append("course-explorer-leaves")
                if arrived:
                    kinds.append("course-explorer-arrived")
                marks = [f"<strong>{values}</strong>", f"<span>{whose}</span>"]
                if arrived:
                    marks.append(f"<span>↓ {arrived}</span>")
                if leaves:
                    marks.append(f"<span>↑ {leaves}</span>")
                # With spaces: a page without the course's styles has them in one line.
                cells.append(f'<td class="{" ".join(kinds)}">{" ".join(marks)}</td>')
            rows.append(f'<tr><th scope="row">rank {rank}</th>{"".join(cells)}</tr>')
        heads = (head.replace(" x", "<br>x") for head in self._heads())
        return f"{table(('', *heads), rows)}<p>{_MARKS}</p><p>{self._sent_so_far()}</p>"

    def __repr__(self) -> str:
        ranks = counted(self._history.world_size, "rank")
        return f"RingStepper({ranks}, step {self.step} of {self.steps})"
