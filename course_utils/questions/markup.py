"""The inline Markdown of questions: `code`, *emphasis* and **bold**, nothing else.

Whatever shows a question's text (a page, a terminal) has it from here.
"""

import html
import re

_CODE = re.compile(r"`([^`]*)`")
# A star of emphasis stands at a word, and not beside another star.
_EMPHASIS = re.compile(r"(?<!\*)\*(?![*\s])([^*]+)(?<!\s)\*(?!\*)")
_BOLD = re.compile(r"\*\*(?!\s)([^*]+)(?<!\s)\*\*")
# Other Markdown, HTML and LaTeX would be shown as they are typed.
_FOREIGN = re.compile(
    r"\]\(|</?[A-Za-z]|\$[^$]+\$|(?<!\w)_+\w[^_]*_+(?!\w)|~~|^\s*([#>+-]|\d+\.)\s",
    re.MULTILINE,
)


def problem(text: str) -> str:
    """What is wrong with the markup of a text; "" if nothing is."""
    left = re.sub(r"<code>.*?</code>", "", to_html(text), flags=re.DOTALL)
    if found := re.search(r"\*+|`", left) or _FOREIGN.search(_CODE.sub("x", text)):
        return (
            f"{found[0]!r} in {text!r} would be shown as it is: use `code`, "
            "*emphasis* or **bold**, and × for a product"
        )
    return ""


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
