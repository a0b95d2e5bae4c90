"""The pages of docs/ that the status page links to, as HTML: the package ships them, so that they fit its version."""

import re
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from posixpath import normpath
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

from gateway import __version__
from gateway.plugins.status_page.templates import environment

_PACKAGE: Final = Path(__file__).parents[2]
_FOLDERS: Final = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
"""In an installed package; in a clone."""
TITLES: Final = {
    "status.md": "the status page",
    "continuity.md": "what is lost when a replica dies",
    "operations.md": "operations",
    "monitoring.md": "limits, capacity, monitoring",
    "logs.md": "the log",
    "faq.md": "questions and answers",
}
"""What each page is about, by its name; pyproject.toml lists the same pages."""
_MARKDOWN: Final = MarkdownIt().enable("table")
# A table that is wider than the screen scrolls in a box of its own, by keyboard too.
_MARKDOWN.add_render_rule("table_open", lambda *_: '<div class="scrolled" tabindex="0"><table>\n')
_MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>\n")
_ENVIRONMENT: Final = environment()
_NOT_IN_ANCHORS: Final = re.compile(r"[^\w\- ]")


@cache
def document(name: str) -> str | None:
    """Return one of these pages as HTML; None if it was not installed."""
    found = [folder / name for folder in _FOLDERS if (folder / name).is_file()]
    if not found:
        return None
    content = rendered(found[0].read_text(encoding="utf-8"))
    names = {"name": name, "content": content, "documents": TITLES, "version": __version__}
    return _ENVIRONMENT.get_template("document.html").render(names)


def rendered(text: str) -> str:
    """Return Markdown as HTML, with the anchors that GitHub gives to headings."""
    tokens = _MARKDOWN.parse(text)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrs["id"] = anchor("".join(child.content for child in inline.children or ()))
    for token in tokens:
        _lead(token.children or [])
    return str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return _NOT_IN_ANCHORS.sub("", heading.lower()).replace(" ", "-")


def _lead(inline: list[Token]) -> None:
    """Turn each link that would lead to no page of the gateway, and each picture, into text that names its file."""
    is_elsewhere = False
    for token in inline:
        match token.type:
            case "image":
                token.type = "html_inline"
                token.content = f'<span title="{_file(token.attrs["src"])}">{escape(token.content)}</span>'
            case "link_open":
                target = str(token.attrs["href"])
                page, _, _ = target.partition("#")
                is_elsewhere = "://" not in target and bool(page) and page not in TITLES
                if is_elsewhere:
                    token.tag, token.attrs = "span", {"title": _file(target)}
            case "link_close" if is_elsewhere:
                token.tag = "span"


def _file(target: object) -> str:
    return normpath(f"docs/{target}")
