"""The pages of docs/ that the status page links to: the package ships them, so that they fit its version."""

from functools import cache
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[2]
_FOLDERS: Final = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
"""In an installed package; in a clone."""
TITLES: Final = {
    "status.md": "this page",
    "continuity.md": "what is lost when a replica dies",
    "operations.md": "operations",
    "monitoring.md": "limits, capacity, monitoring",
    "logs.md": "the log",
    "faq.md": "questions and answers",
}
"""What each page is about, by its name; pyproject.toml lists the same pages."""


@cache
def document(name: str) -> str | None:
    """Return the text of a page; None if it is not one of these pages."""
    # The path of a request names the page. Only a listed name is joined, so `..` leads nowhere.
    found = [folder / name for folder in _FOLDERS if name in TITLES and (folder / name).is_file()]
    return found[0].read_text(encoding="utf-8") if found else None
