"""The status as an HTML page: one document without scripts, which fetches nothing; pure.

Two things keep a hostile text harmless: the template escapes every value, and the Content-Security-Policy allows the
style sheet by its hash and nothing else (https://www.w3.org/TR/CSP3/), so injected markup could neither run nor send.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, StrictUndefined, Template

from gateway.plugins.status_page.documents import TITLES
from gateway.plugins.status_page.status_view import (
    HEALTH,
    NEAR,
    ago,
    duration,
    mode,
    only,
    sessions_note,
    streams,
    view,
    waits_for,
)
from gateway.telemetry.process_status import MOST_ERRORS, Status

_FOLDER: Final = resources.files(__package__)
_STYLE: Final = _FOLDER.joinpath("status.css").read_text(encoding="utf-8")
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
"""Response headers of the page and of its JSON."""

_SECONDS: Final = re.compile(r"[0-9]{1,4}")
_LEAST_SECONDS: Final = 2
_ENVIRONMENT: Final = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters |= {
    "ago": ago,
    "duration": duration,
    "grouped": "{:,}".format,
    "mode": mode,
    "sessions_note": sessions_note,
    "streams": streams,
    "waits_for": waits_for,
    "mebibytes": lambda count: f"{count / 1_048_576:,.1f} MiB",
}
_ENVIRONMENT.globals |= {
    "style": _STYLE,
    "documents": TITLES,
    "most_errors": MOST_ERRORS,
    "near": NEAR,
    "healths": HEALTH,
    "full": 0.95,
    "usual_seconds": 10,
    "peer_levels": {"answered": "good", "dead": "bad", "silent": "warn", "stalled": "warn", "not asked": "idle"},
    "process_levels": {"ready": "good", "draining": "warn", "silent": "bad"},
    "colours": {"good": "#1f8a4c", "warn": "#b86e00", "bad": "#c4261d"},
}
_SOURCE: Final = _FOLDER.joinpath("status.html").read_text(encoding="utf-8")


def every_seconds(asked: str | None) -> int | None:
    """Return the seconds between reloads that `?refresh=` asks for; None for no reloading."""
    if asked is None or not _SECONDS.fullmatch(asked):
        return None
    return max(int(asked), _LEAST_SECONDS)


def page(
    status: Status, refresh_seconds: int | None = None, route: str | None = None, only_replica: str | None = None
) -> str:
    """Return the whole document; with a `route` of the status, only what concerns it.

    `only_replica`: the reader chose this replica, so links lead to it again.
    """
    only_route = route if any(each.path == route for each in status.routes) else None
    shown = status if only_route is None else only(status, only_route)
    asked = {"refresh": refresh_seconds, "route": only_route, "replica": only_replica}

    def link(document: str = "status", **changed: object) -> str:
        """Return the page's own address, or that of its JSON, with a part of the query changed."""
        query = {name: value for name, value in {**asked, **changed}.items() if value is not None}
        return document + (f"?{urlencode(query, quote_via=quote, safe='/')}" if query else "")

    return _template().render(
        **view(shown)._asdict(),
        refresh_seconds=refresh_seconds,
        only_route=only_route,
        only_replica=only_replica,
        link=link,
    )


@cache
def _template() -> Template:
    # Compiling takes 60 ms, so only a process that shows the page does it, once.
    return _ENVIRONMENT.from_string(_SOURCE)
