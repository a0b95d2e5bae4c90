"""Decides which headers of a request pass through.

Headers that belong to one connection, or that only a proxy may set, are dropped; all others pass unchanged.
"""

from typing import Final

from multidict import CIMultiDict

from gateway.config import Config, InForce, Route
from gateway.http.incoming import Incoming
from gateway.http.upstream_headers import disguised, for_passing, joined
from gateway.http_client.request_head import HeaderLines
from gateway.identity import principal as principals
from gateway.protocol.errors import InvalidRequest
from gateway.upstream.channel import Headers

_DROPPED: Final = frozenset({"origin", "proxy-connection"})
"""The gateway has checked Origin, and it names a page that the upstream does not know."""
_SET_BY_PROXIES: Final = ("forwarded", "x-real-ip", "x-forwarded-")


class HeaderRules:
    """The headers of one listener's requests that pass through."""

    def __init__(self, in_force: InForce[Config], epoch: str) -> None:
        """`epoch` names this process in the Via header that RFC 9110 (7.6.3) requires of proxies."""
        self._via = f"1.1 mrtr-{epoch}"
        self._in_force = in_force

    def lines(self, incoming: Incoming, route: Route) -> HeaderLines:
        """Return the headers that go upstream; raises InvalidRequest, also for a request that has been here before."""
        known = incoming.known
        if known is None or self._in_force.value.principal.trusted_proxies:
            # Only without trusted proxies do they depend on nothing but the head and the route.
            return HeaderLines.of(self.upstream(incoming, route).items())
        passing: tuple[Route, HeaderLines] | None = known.passing
        if passing is None or passing[0] is not route:
            passing = known.passing = route, HeaderLines.of(self.upstream(incoming, route).items())
        return passing[1]

    def upstream(self, incoming: Incoming, route: Route) -> CIMultiDict[str]:
        """Return the same headers as `lines`, one by one: those of the client first."""
        headers, principal = incoming.headers, self._in_force.value.principal
        named = {(principal.header or "").lower()}
        if any(self._via in line for line in incoming.values("Via")):
            said = "The request returned to the gateway that had forwarded it"
            raise InvalidRequest(f"{said}: upstream.url of route {incoming.path} leads back here", status=508)
        dropped = set(_DROPPED)
        if not principals.is_trusted(incoming.remote, principal.trusted_proxies):
            dropped |= {name for name in map(str.lower, headers) if name.startswith(_SET_BY_PROXIES)}
            dropped |= named
        dropped |= disguised(headers, named)
        kept = for_passing(route, headers, dropped)
        kept.add("Via", self._via)
        return kept

    def on_behalf(self, incoming: Incoming, route: Route) -> Headers:
        """Return the headers that do not describe the client's message, for one of the gateway on its behalf."""
        headers, own = self.upstream(incoming, route), {"accept", "content-type", "last-event-id"}
        return {
            name: joined(headers, name) or ""
            for name in headers
            if name.lower() not in own and not name.lower().startswith("mcp-")
        }
