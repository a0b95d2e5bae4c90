"""The status as an HTML page; pure."""

import re
from typing import Final
from urllib.parse import quote, urlencode

from gateway.plugins.status_page.documents import TITLES
from gateway.plugins.status_page.status_view import only, view
from gateway.plugins.status_page.templates import ENVIRONMENT
from gateway.telemetry.process_status import Status

_SECONDS: Final = re.compile(r"[0-9]{1,4}")
_LEAST_SECONDS: Final = 2


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

    return ENVIRONMENT.get_template("status.html").render(
        **view(shown)._asdict(),
        documents=TITLES,
        refresh_seconds=refresh_seconds,
        only_route=only_route,
        only_replica=only_replica,
        link=link,
    )
