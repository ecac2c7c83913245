"""Read what a new process has to say when it fails at its start."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

COLOURS = re.compile(r"\x1b\[[\d;]*m")


@contextlib.contextmanager
def child_errors() -> Iterator[list[str]]:
    """Collect the lines that processes started inside the block write to stderr.

    A process that fails before it runs any of our code writes a traceback to its
    stderr, which it has from us. In a notebook that text may come out in the cell, in
    another cell, or in the terminal. Here it comes into a list.

        with child_errors() as lines:
            ...                  # start processes, and wait for their end
        print(lines[-1])

    Yields:
        The list. It is filled when the block ends, also by an exception. What this
        process itself writes past Python's `sys.stderr` is in it, too. Colours, which
        tracebacks have in a notebook from Python 3.13 on, are taken out.
    """
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            text = file.read().decode(errors="replace")
            lines += COLOURS.sub("", text).splitlines()
