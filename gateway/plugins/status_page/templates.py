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

from gateway.plugins.status_page import status_view
from gateway.telemetry.process_status import LONG_SECONDS, MOST_ERRORS

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
ENVIRONMENT: Final = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    auto_reload=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""The templates of this folder, each of which is compiled at its first use: that takes up to 60 ms."""
ENVIRONMENT.filters |= {
    "ago": status_view.ago,
    "duration": status_view.duration,
    "grouped": "{:,}".format,
    "mode": status_view.mode,
    "running_calls": status_view.running_calls,
    "sessions_note": status_view.sessions_note,
    "since": status_view.since,
    "streams": status_view.streams,
    "mebibytes": lambda count: f"{count / 1_048_576:,.1f} MiB",
}
ENVIRONMENT.globals |= {
    "style": _STYLE,
    "long_seconds": LONG_SECONDS,
    "most_errors": MOST_ERRORS,
    "near": status_view.NEAR,
    "healths": status_view.HEALTH,
    "full": 0.95,
    "usual_seconds": 10,
    "peer_levels": {
        "answered": "good",
        "dead": "bad",
        "silent": "warn",
        "refused": "warn",
        "stalled": "warn",
        "not asked": "idle",
    },
    "process_levels": {"ready": "good", "draining": "warn"},
    "colours": {"good": "#1f8a4c", "warn": "#b86e00", "bad": "#c4261d"},
}
