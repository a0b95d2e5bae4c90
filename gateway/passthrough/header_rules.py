"""Decides which headers of a request pass through.

Headers that belong to one connection, or that only a proxy may set, are dropped; all others pass unchanged.
"""

from typing import Final

from multidict import CIMultiDict

from gateway.config import Route  # noqa: TC001  (one import style; it costs nothing here)
from gateway.http.incoming import Incoming
from gateway.http.upstream_headers import disguised, for_passing, joined
from gateway.http_client.request_head import HeaderLines
from gateway.identity import principal as principals
from gateway.protocol.errors import InvalidRequest
from gateway.routes.live_route import LiveRoute
from gateway.upstream.channel import Headers

_DROPPED: Final = frozenset({"origin", "proxy-connection"})
"""The gateway has checked Origin, and it names a page that the upstream does not know."""
_SET_BY_PROXIES: Final = ("forwarded", "x-real-ip", "x-forwarded-")


def lines(incoming: Incoming, live: LiveRoute) -> HeaderLines:
    """Return the headers that go upstream; raises InvalidRequest, also for a request that has been here before."""
    known = incoming.known
    if known is None or live.config.principal.trusted_proxies or live.route.upstream.request_id_header:
        # Only without either do they depend on nothing but the head and the route.
        return HeaderLines.of(passing(incoming, live).items())
    found: tuple[Route, HeaderLines] | None = known.passing
    if found is None or found[0] is not live.route:
        found = known.passing = live.route, HeaderLines.of(passing(incoming, live).items())
    return found[1]


def passing(incoming: Incoming, live: LiveRoute) -> CIMultiDict[str]:
    """Return the same headers as `lines`, one by one: those of the client first."""
    headers, principal = incoming.headers, live.config.principal
    named = {(principal.header or "").lower()}
    via = f"1.1 mrtr-{live.process.epoch}"  # names this process, as RFC 9110 (7.6.3) requires of proxies
    if any(via in line for line in incoming.headers.getall("Via", ())):
        said = "The request returned to the gateway that had forwarded it"
        raise InvalidRequest(f"{said}: upstream.url of route {incoming.path} leads back here", status=508)
    dropped = set(_DROPPED)
    if not principals.is_trusted(incoming.remote, principal.trusted_proxies):
        dropped |= {name for name in map(str.lower, headers) if name.startswith(_SET_BY_PROXIES)}
        dropped |= named
    dropped |= disguised(headers, named)
    kept = for_passing(live.route, headers, dropped)
    kept.add("Via", via)
    if live.route.upstream.request_id_header is not None:
        kept[live.route.upstream.request_id_header] = incoming.request_id
    return kept


def on_behalf(incoming: Incoming, live: LiveRoute) -> Headers:
    """Return the headers that do not describe the client's message, for one of the gateway on its behalf."""
    headers, own = passing(incoming, live), {"accept", "content-type", "last-event-id"}
    return {
        name: joined(headers, name) or ""
        for name in headers
        if name.lower() not in own and not name.lower().startswith("mcp-")
    }
