"""The templates of the pages: documents without scripts, which fetch nothing.

Two things keep a hostile text harmless: a template escapes every value, and the Content-Security-Policy allows the
style sheet by its hash and nothing else (https://www.w3.org/TR/CSP3/), so injected markup could neither run nor send.
"""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_FOLDER: Final = Path(__file__).parent
_STYLE: Final = (_FOLDER / "status.css").read_text(encoding="utf-8")
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS: Final[Mapping[str, str]] = {
    # `data:` is for the icon alone.
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; "
    # `default-src` covers what is fetched; these three have no fallback (CSP3 section 6).
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",  # /status is a page or JSON
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Response headers of every page, and of the status as JSON."""


def environment() -> Environment:
    """Return the templates of this folder, each of which is compiled at its first use: that takes up to 60 ms."""
    made = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["style"] = _STYLE
    return made
