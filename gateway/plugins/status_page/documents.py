"""The pages of docs/ that the status page links to, as HTML: the package ships them, so that they fit its version."""

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from posixpath import normpath
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from gateway import __version__
from gateway.plugins.status_page.templates import ENVIRONMENT

_PACKAGE: Final = Path(__file__).parents[2]
_FOLDERS: Final = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
"""In an installed package; in a clone."""
TITLES: Final = {
    "README.md": "all documents",
    "status.md": "the status page",
    "continuity.md": "what is lost when a replica dies",
    "operations.md": "operations",
    "monitoring.md": "limits, capacity, monitoring",
    "load-balancers.md": "load balancers",
    "logs.md": "the log",
    "faq.md": "questions and answers",
}
"""What each page is about, by its name; pyproject.toml lists the same pages."""
_NOT_IN_ANCHORS: Final = re.compile(r"[^\w\- ]")


class _Renderer(RendererHTML):
    """With GitHub's anchors of headings. What leads to no page of the gateway is text that names its file."""

    def heading_open(self, tokens: Sequence[Token], index: int, *_: object) -> str:
        inline = tokens[index + 1].children or ()
        heading = "".join(child.content for child in inline).lower()
        return f'<{tokens[index].tag} id="{_NOT_IN_ANCHORS.sub("", heading).replace(" ", "-")}">'

    def link_open(self, tokens: Sequence[Token], index: int, *_: object) -> str:
        target = str(tokens[index].attrs["href"])
        return f'<a href="{escape(target)}">' if _is_served(target) else f'<span title="{_file(target)}">'

    def link_close(self, tokens: Sequence[Token], index: int, *_: object) -> str:
        opening = next(token for token in reversed(tokens[:index]) if token.type == "link_open")
        return "</a>" if _is_served(str(opening.attrs["href"])) else "</span>"

    def image(self, tokens: Sequence[Token], index: int, *_: object) -> str:
        return f'<span title="{_file(str(tokens[index].attrs["src"]))}">{escape(tokens[index].content)}</span>'

    # A table that is wider than the screen scrolls in a box of its own, by keyboard too.

    def table_open(self, *_: object) -> str:
        return '<div class="scrolled" tabindex="0"><table>\n'

    def table_close(self, *_: object) -> str:
        return "</table></div>\n"


_MARKDOWN: Final = MarkdownIt(renderer_cls=_Renderer).enable("table")


@cache
def document(name: str) -> str | None:
    """Return one of these pages as HTML; None if it was not installed."""
    found = [folder / name for folder in _FOLDERS if (folder / name).is_file()]
    if not found:
        return None
    content = rendered(found[0].read_text(encoding="utf-8"))
    names = {"name": name, "content": content, "documents": TITLES, "version": __version__}
    return ENVIRONMENT.get_template("document.html").render(names)


def rendered(text: str) -> str:
    """Return Markdown as HTML."""
    return str(_MARKDOWN.render(text))


def _is_served(target: str) -> bool:
    page, _, _ = target.partition("#")
    return "://" in target or not page or page in TITLES


def _file(target: str) -> str:
    return escape(normpath(f"docs/{target}"))
