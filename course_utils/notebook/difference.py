"""Two functions, and what differs between them, in red and green."""

import difflib
import html
import inspect
from collections.abc import Callable

_LOOKS = {
    "-": "background: #ffe3e3; color: #6b0000",
    "+": "background: #dff5e1; color: #00401a",
}


class Difference:
    """Lines that begin with "-", "+" or a space. A notebook shows them in colours."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        rows = [
            f'<span style="{_LOOKS.get(line[:1], "")}">{html.escape(line)}</span>'
            for line in self.lines
        ]
        style = "font-size: 0.85em; white-space: pre-wrap"
        return f'<pre style="{style}">{chr(10).join(rows)}</pre>'


def difference(before: Callable, after: Callable) -> Difference:
    """What differs between the bodies of two functions, and what is the same.

    Args:
        before: Its lines begin with "-" where `after` does not have them.
        after: Its lines begin with "+" where `before` does not have them. Both have a
            docstring of one line, which is left out.
    """
    bodies = [inspect.getsource(one).splitlines()[2:] for one in (before, after)]
    found = difflib.ndiff(*bodies)  # its marks have two characters; "?" says where
    return Difference([line[0] + line[2:] for line in found if line[0] != "?"])
