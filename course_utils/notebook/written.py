"""Commands that write files where their user says: never over somebody else's.

A file is ours if it begins with a mark that only this command writes.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

BEGINNING = 500  # bytes in which the mark is found


def exit_status(command: Callable[[], object]) -> int:
    """Run a command; 1 where that fails, which is told in one line, and 0 else."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without a letter shows a ?
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        command()
    except BrokenPipeError:  # nobody reads it any more
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{where}{error.strerror or error}", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
    else:
        return 0
    return 1


def may_write(target: Path, marks: tuple[str, ...], force: bool = False) -> None:
    """Say no before the work is done, not after it.

    Raises:
        ValueError: the target is no name for a file, its folder is not there, or it is
            there, does not have one of our ``marks``, and ``force`` is not given.
        OSError: it cannot be read.
    """
    if target.is_dir() or not target.name:
        raise ValueError(f"{str(target)!r} is no name for a file.")
    if not target.parent.is_dir():
        raise ValueError(f"There is no folder {target.parent}.")
    if force or not os.path.lexists(target):
        return
    if target.is_file() and not target.is_symlink():
        with open(target, "rb") as old:
            begin = old.read(BEGINNING)
        if any(mark.encode() in begin for mark in marks):
            return
    raise ValueError(
        f"{target} exists and was not written by this command. Choose another name, or "
        "add --force to replace it."
    )


def write(target: Path, text: str) -> None:
    """Write a file, or replace it in one step."""
    new = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8", newline="\n")
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)
