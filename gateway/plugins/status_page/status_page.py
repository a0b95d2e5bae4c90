"""The status as an HTML page; pure."""

import re
from typing import Final
from urllib.parse import quote, urlencode

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
from gateway.plugins.status_page.templates import environment
from gateway.telemetry.process_status import MOST_ERRORS, Status

_SECONDS: Final = re.compile(r"[0-9]{1,4}")
_LEAST_SECONDS: Final = 2
_ENVIRONMENT: Final = environment()
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

    return _ENVIRONMENT.get_template("status.html").render(
        **view(shown)._asdict(),
        refresh_seconds=refresh_seconds,
        only_route=only_route,
        only_replica=only_replica,
        link=link,
    )
