"""What ranks print, as whole lines with the rank in front.

Two ways. *stream*: lines appear while the cell runs. *grouped*: all lines of rank 0,
then all of rank 1, and so on, after the cell; the same text on every run, which is
what notebook tests compare. A progress bar (a line that is written over with
carriage returns) is one line that moves in *stream*, and is left out in *grouped*,
because it holds times.
"""

from __future__ import annotations

import codecs
import functools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable

HEAD_LINES, TAIL_LINES = 1000, 100  # of one rank in one cell; the middle is left out
LINE_CHARS = 10_000  # of one line; the rest is left out
# torch logs a network error with some thirty lines about the C++ code it came from.
C10D_LOG = re.compile(
    r"(\[rank\d+\]:)?\[[IWEF]\d{4} [\d:.]+ \w+\.[ch]pp:\d+\] \[c10d\]"
    r"|\[\S+/gloo/\S+:\d+\] "
)
C10D_STACK = re.compile(
    r"Exception raised from .* \(most recent call first\):$|frame #\d+: "
    r"|<omitting python frames>$|$"
)
TIDY_SECONDS = 0.25  # a short cell is over before that: then its lines are in order


def output_mark(request: int) -> bytes:
    """What a spawned rank prints before it answers a request.

    Its output and its answer reach the kernel in two ways: with this mark, all that
    belongs to the request has arrived.
    """
    return b"\0\0ranks %012d\x01" % request


MARK = re.compile(rb"\0\0ranks (\d{12})\x01")
MARK_BYTES = len(output_mark(0))


def choose_output(output: str) -> str:
    """Turn ``"auto"`` into ``"stream"`` or ``"grouped"``.

    Grouped where outputs are compared: under CI, in pytest, or when the environment
    variable ``RANKS_OUTPUT`` says so.
    """
    if output != "auto":
        return output
    told = os.environ.get("RANKS_OUTPUT")
    if told in ("stream", "grouped"):
        return told
    compared = os.environ.get("CI") or os.environ.get("PYTEST_CURRENT_TEST")
    return "grouped" if compared else "stream"


def is_c10d_log(data: bytes) -> bool:
    """Is this only what torch logs while it tries to connect, again and again?"""
    lines = data.decode("utf-8", "replace").splitlines()
    return all(C10D_LOG.match(line) or C10D_STACK.match(line) for line in lines)


class LogFilter:
    """Leaves out what torch writes about C++ code below a line of its log."""

    def __init__(self) -> None:
        self.in_log = False  # the line before was one of the log, or left out

    def leaves_out(self, line: str) -> bool:
        """Asked of each line in turn: is it such a one?"""
        if self.in_log and C10D_STACK.match(line):
            return True
        self.in_log = bool(C10D_LOG.match(line))
        return False


class RankOutput:
    """The bytes of one rank, cut into lines.

    Args:
        shown: what is shown of a finished line.
    """

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        self.shown = shown
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.partial = ""
        self.head: deque[str] = deque()  # finished lines that are not yet printed
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.count = 0
        self.left_out = 0  # characters of the partial line
        self.log = LogFilter()

    def feed(self, data: bytes) -> None:
        """Take in what the rank has printed."""
        *lines, self.partial = (self.partial + self.decoder.decode(data)).split("\n")
        for line in lines:
            self._finish(line)
        if "\r" in self.partial:
            # Only the last state of a bar counts; keep one "\r" as its mark.
            self.partial = "\r" + last_state(self.partial)
        self.partial = self._cut(self.partial)

    def end(self) -> None:
        """The cell is over: a line without a newline is a line too."""
        self.partial += self.decoder.decode(b"", final=True)  # half a character
        if self.partial:
            self._finish(self.partial)
            self.partial = ""

    def _cut(self, line: str) -> str:
        """The beginning of a very long line; what goes is counted."""
        self.left_out += max(0, len(line) - LINE_CHARS)
        return line[:LINE_CHARS]

    def _finish(self, line: str) -> None:
        line = self._cut(line.removesuffix("\r"))  # a Windows line end
        is_bar = "\r" in line
        text = last_state(line) if is_bar else line
        left_out, self.left_out = self.left_out, 0
        if is_bar and not text:
            return
        if self.log.leaves_out(text):
            return
        if left_out:
            text += f" ... {left_out:,} characters left out ..."
        text = self.shown(text)
        self.count += 1
        if self.count <= HEAD_LINES:
            self.head.append("\r" + text if is_bar else text)
        else:
            self.tail.append(text)

    def take(self) -> list[str]:
        """The finished lines that were not taken before."""
        lines = list(self.head)
        self.head.clear()
        return lines

    def take_rest(self) -> list[str]:
        """After :meth:`end`: the last lines, and how many were left out."""
        left_out = self.count - HEAD_LINES - len(self.tail)
        rest = list(self.tail)
        if left_out > 0:
            rest.insert(0, f"... {left_out:,} lines left out ...")
        self.tail.clear()
        return rest


def last_state(line: str) -> str:
    """What a terminal shows of a line that was written over with carriage returns."""
    return next((part for part in reversed(line.split("\r")) if part), "")


class Printer:
    """Prints the output of several ranks in one of the two ways.

    Args:
        ranks: the ranks that take part in this cell.
        mode: ``"stream"``, ``"grouped"``, or ``"none"``: nothing is printed.
    """

    def __init__(self, ranks: list[int], mode: str) -> None:
        self.outputs = {
            rank: RankOutput(functools.partial(self.shown, rank)) for rank in ranks
        }
        self.mode = mode
        self.started = time.monotonic()
        self.bar = ""  # the progress bar that stands in the last line just now

    def shown(self, rank: int, line: str) -> str:
        """What is shown of a line that this rank has finished."""
        return line

    def feed(self, rank: int, data: bytes) -> None:
        self.outputs[rank].feed(data)

    def show(self) -> None:
        """Print what is ready, if it is time to."""
        if self.mode == "stream" and time.monotonic() - self.started > TIDY_SECONDS:
            self._print([(r, o.take()) for r, o in self.outputs.items()])

    def finish(self, values: dict[int, str | None]) -> None:
        """Print the rest and the value of the last line of the cell, rank by rank."""
        for output in self.outputs.values():
            output.end()
        texts = []
        for rank, output in self.outputs.items():
            lines = output.take() + output.take_rest()
            value = values.get(rank)
            if value is not None and self.mode == "grouped":
                lines.extend(value_lines(value))
            texts.append((rank, lines))
        if self.mode == "stream":
            texts += [(r, value_lines(v)) for r, v in values.items() if v is not None]
        self._print(texts, final=True)

    def _print(self, texts: list[tuple[int, list[str]]], final: bool = False) -> None:
        if self.mode == "none":
            return
        written = []
        for rank, lines in texts:
            for line in lines:
                is_bar = line.startswith("\r")
                if is_bar and self.mode == "grouped":
                    continue
                written.append(f"[rank {rank}] {line.removeprefix(chr(13))}\n")
        bar = "" if final or self.mode == "grouped" else self._moving_bar()
        if not written and bar == self.bar:
            return
        text = "".join(written)
        if self.bar:  # write over it
            first, newline, rest = text.partition("\n")
            text = "\r" + first.ljust(len(self.bar)) + newline + rest
        if bar:
            text += bar if not self.bar or written else ""
            if not written:
                text = "\r" + bar.ljust(len(self.bar))
        self.bar = bar
        sys.stdout.write(text)
        sys.stdout.flush()

    def _moving_bar(self) -> str:
        """The bar of the lowest rank that has one."""
        for rank, output in self.outputs.items():
            if output.partial.startswith("\r"):
                return f"[rank {rank}] {output.partial[1:]}"
        return ""


def value_lines(value: str) -> list[str]:
    """The value of a cell's last line, as lines to print."""
    output = RankOutput()
    output.feed(value.encode("utf-8", "backslashreplace"))
    output.end()
    first, *others = output.take() + output.take_rest() or [""]
    return [f"=> {first}", *(f"   {line}" for line in others)]
