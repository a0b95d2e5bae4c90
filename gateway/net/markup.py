"""HTML in which nothing is markup that was not made here: text is escaped when it is put in, wherever it is from."""

from html import escape
from typing import Final

_EMPTY: Final = frozenset({"br", "link", "meta", "rect"})


class Html(str):
    """A piece of HTML, made by `tag` or written in the code."""

    __slots__ = ()


def text(content: str) -> Html:
    """Return any text as HTML."""
    return content if isinstance(content, Html) else Html(escape(content))


def tag(name: str, /, *contents: str, **attributes: str | None) -> Html:
    """Return an element; an attribute that is None is left out, `class_` and `data_label` are written as in HTML."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(map(text, contents))
    return Html(f"<{name}{given}>" if name in _EMPTY else f"<{name}{given}>{inner}</{name}>")


def join(*contents: str) -> Html:
    """Return several pieces as one."""
    return Html("".join(map(text, contents)))
