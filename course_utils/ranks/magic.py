"""The ``%%ranks`` magic: this cell runs on every rank, not in the notebook's kernel."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from typing import Any, NoReturn

from course_utils.ranks.driver import Ranks
from course_utils.ranks.report import RanksError

_kept: list[Ranks] = []  # what the magic has made: they end with the kernel


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"%%ranks: {message}\n{self.format_usage().strip()}")


def make_parser() -> argparse.ArgumentParser:
    """The options of ``%%ranks``."""
    parser = _Parser(
        prog="%%ranks",
        add_help=False,
        description="Run this cell on every rank.",
    )
    parser.add_argument(
        "-n",
        type=int,
        metavar="N",
        help="on N ranks (default: the ranks made last, or 4)",
    )
    parser.add_argument(
        "--only", metavar="R,R", help="only on these ranks, for example 0,2"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="limit for this cell"
    )
    failing = parser.add_mutually_exclusive_group()
    failing.add_argument(
        "--expect-error",
        metavar="NAME",
        help="this cell is meant to fail: with this exception, or 'stuck', 'died' or "
        "'mismatch'; the message is printed and the notebook goes on",
    )
    failing.add_argument(
        "--may-fail",
        action="store_true",
        help="this cell may fail: the message is printed and the notebook goes on. "
        "For a cell below a prediction: the option does not say what will happen",
    )
    return parser


def rank_numbers(text: str | None) -> list[int] | None:
    """``"0,2"`` -> [0, 2]."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"%%ranks --only: {text!r} is not a list of ranks; write --only 0,2"
        ) from None


def names_of(error: RanksError) -> set[str]:
    """What ``--expect-error`` may call this failure."""
    names = {error.cause}
    if error.root is not None:
        names |= {error.root.error, error.root.kind}
    return names


def run_on_ranks(line: str, cell: str) -> None:
    """Run ``cell`` on the ranks; ``line`` holds the options behind ``%%ranks``."""
    try:
        words = shlex.split(line)
    except ValueError as error:  # a quotation mark without its other half
        raise ValueError(f"%%ranks: {error}") from None
    options = make_parser().parse_args(words)
    only = rank_numbers(options.only)
    ranks = Ranks.latest(options.n)
    if ranks is None:
        number = 4 if options.n is None else options.n
        if Ranks.made and Ranks.latest() is None:
            print(f"All ranks were closed. {number} new ones start, without variables.")
        ranks = Ranks(number)
        _kept.append(ranks)
    try:
        ranks.run_cell(cell, timeout=options.timeout, only=only, first_line=2)
    except SyntaxError as error:
        raise RanksError(not_python(error)) from None
    except RanksError as error:
        expected = options.expect_error is not None
        if expected and options.expect_error in names_of(error):
            print(f"As expected: {error}")
        elif options.may_fail and error.cause not in ("usage", "interrupt"):
            print(f"It failed. {error}")
        else:
            raise
        return
    if options.expect_error is not None:
        raise RanksError(
            f"this cell was expected to fail ({options.expect_error}), but every rank "
            "finished it."
        )


def not_python(error: SyntaxError) -> str:
    """What and where: the line with a mark below it, as Python shows it."""
    *shown, what = traceback.format_exception_only(error)
    text = f"{what.strip()}, line {error.lineno} of the cell\n{''.join(shown[1:])}"
    if (error.text or "").lstrip().startswith(("!", "%")):
        text += "Lines with ! and % work in ordinary cells only.\n"
    return f"{text}Nothing ran."


NO_RANK_HERE = (
    "The notebook itself is no rank. What a function of torch.distributed needs is on "
    "ranks: Ranks(2).run(your_function), or a cell with %%ranks.\n"
    "check() wants the function itself: no parentheses after its name."
)


def explain(result: Any) -> None:
    """After a cell that has taken the notebook for a rank: say so below the error."""
    error = result.error_in_exec
    if isinstance(error, ValueError) and "group has not been initialized" in str(error):
        print(NO_RANK_HERE, file=sys.stderr)


def register(shell: Any) -> None:
    """Add ``%%ranks`` to this IPython shell."""
    shell.register_magic_function(run_on_ranks, "cell", "ranks")
    shell.events.register("post_run_cell", explain)
