"""The inline Markdown of questions: `code`, *emphasis* and **bold**, nothing else.

Whatever shows a question's text (a page, a terminal) has it from here.
"""

import html
import re

_TAGS = {"*": "em", "**": "strong"}
_TOKEN = re.compile(r"(`[^`]*`|\*\*|\*)")
_CODE = re.compile(r"`[^`]*`")
# Other Markdown, HTML and LaTeX would be shown as they are typed.
_FOREIGN = re.compile(
    r"\]\(|</?[A-Za-z]|\$[^$]+\$|(?<!\w)_+\w[^_]*_+(?!\w)|~~|^\s*([#>+-]|\d+\.)\s",
    re.MULTILINE,
)


def problem(text: str) -> str:
    """What is wrong with the markup of a text; "" if nothing is."""
    prose = _CODE.sub("x", text)
    if "`" in prose:
        return f"a backtick is not closed in {text!r}"
    if found := _FOREIGN.search(prose):
        return (
            f"{found[0]!r} in {text!r} would not be rendered: use `code`, *emphasis* "
            "or **bold**"
        )
    opened: list[str] = []
    for star in re.finditer(r"\*+", prose):
        before, after = prose[: star.start()][-1:], prose[star.end() :][:1]
        closes = opened[-1:] == [star[0]]
        inside = before if closes else after
        if star[0] not in _TAGS or not inside.strip():
            return (
                f"a {star[0]} in {text!r} marks no emphasis: write ×, or put it "
                "between backticks"
            )
        opened.pop() if closes else opened.append(star[0])
    return f"a {opened[-1]} is not closed in {text!r}" if opened else ""


def to_html(text: str) -> str:
    """Escaped HTML."""
    opened: list[str] = []
    parts = []
    for token in _TOKEN.split(text):
        if token not in _TAGS:
            code = len(token) > 1 and token[0] == token[-1] == "`"
            escaped = html.escape(token[1:-1] if code else token)
            parts.append(f"<code>{escaped}</code>" if code else escaped)
        elif opened[-1:] == [token]:
            parts.append(f"</{_TAGS[opened.pop()]}>")
        else:
            opened.append(token)
            parts.append(f"<{_TAGS[token]}>")
    return "".join(parts)


def to_text(text: str) -> str:
    """For a terminal: code keeps its backticks, which tell where it ends."""
    return "".join(token for token in _TOKEN.split(text) if token not in _TAGS)
