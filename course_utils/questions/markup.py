"""The inline Markdown of questions: `code`, *emphasis* and **bold**, nothing else.

Whatever shows a question's text (a page, a terminal) has it from here.
"""

import html
import re

_CODE = re.compile(r"`([^`]*)`")
# A star of emphasis stands at a word, and not beside another star.
_EMPHASIS = re.compile(r"(?<!\*)\*(?![*\s])([^*]+)(?<!\s)\*(?!\*)")
_BOLD = re.compile(r"\*\*(?!\s)([^*]+)(?<!\s)\*\*")


def to_html(text: str) -> str:
    """Escaped HTML."""

    def code(found: re.Match) -> str:
        return f"<code>{found[1].replace('*', _STAR)}</code>"

    page = _CODE.sub(code, html.escape(text))
    page = _EMPHASIS.sub(r"<em>\1</em>", page)
    return _BOLD.sub(r"<strong>\1</strong>", page).replace(_STAR, "*")


_STAR = "\0"  # stands for a star that is code


def to_text(text: str) -> str:
    """For a terminal: code keeps its backticks, which tell where it ends."""
    return re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or "", text)
