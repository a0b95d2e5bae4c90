"""Decides which headers of a request pass through.

Headers that belong to one connection, or that only a proxy may set, are dropped; all others pass unchanged.
"""

import ipaddress
import re
from collections.abc import Mapping
from itertools import compress
from typing import Final, NamedTuple

from multidict import CIMultiDict

from gateway.config import Config, InForce, Route
from gateway.http.incoming import Incoming
from gateway.http.upstream_headers import disguised, for_passing, joined, own_headers
from gateway.http_client.request_head import HeaderLines
from gateway.identity import principal as principals
from gateway.passthrough.rejections import forwarding_loop
from gateway.runtime.newest import Newest
from gateway.upstream.channel import Headers

_DROPPED: Final = frozenset({"origin", "proxy-connection"})
"""The gateway has checked Origin, and it names a page that the upstream does not know."""
_DECODED: Final = frozenset({"gzip", "deflate", "br", "zstd"})
"""The content encodings that may have been decoded as the request's body was read."""
_SET_BY_PROXIES: Final = ("forwarded", "x-real-ip", "x-forwarded-")
_PLAIN: Final = re.compile(r"[\t\x20-\x7e]*")
_PLANS: Final = 256
_PLAN_CHARACTERS: Final = 2048
"""Clients choose the names of headers, so unusual lists are not kept."""


class _Plan(NamedTuple):
    """What becomes of a list of headers."""

    route: Route
    kept: tuple[bool, ...]
    """Which of them go upstream."""
    template: str
    """The lines that go upstream, with a place for each value."""
    names: frozenset[str]


class HeaderRules:
    """The headers of one listener's requests that pass through."""

    def __init__(self, in_force: InForce[Config], epoch: str) -> None:
        """`epoch` names this process in the Via header that RFC 9110 (7.6.3) requires of proxies."""
        self._via = f"1.1 mrtr-{epoch}"
        self._plans: Newest[object, _Plan] = Newest(_PLANS)
        self._use(in_force.value)
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        self._principal_header = (config.principal.header or "").lower()
        self._plans.clear()
        self._networks = [ipaddress.ip_network(network) for network in config.principal.trusted_proxies]

    def lines(self, incoming: Incoming, route: Route) -> HeaderLines:
        """Return the headers that go upstream; raises InvalidRequest, also for a request that has been here before."""
        known = incoming.known
        if known is None or self._networks:  # else they depend on nothing but the head and the route
            return self._lines(incoming, route)
        passing: tuple[Route, HeaderLines] | None = known.passing
        if passing is None or passing[0] is not route:
            passing = known.passing = route, self._lines(incoming, route)
        return passing[1]

    def _lines(self, incoming: Incoming, route: Route) -> HeaderLines:
        """Find out which headers go upstream.

        That depends on names, for the most part, and clients send the same ones again and again.
        """
        headers = incoming.headers
        key = (
            tuple(headers),
            tuple(headers.getall("Connection", ())),
            headers.get("Content-Encoding"),
            self._is_trusted(incoming),
        )
        plan = self._plans.get(key)
        if plan is not None and plan.route is route and "Via" not in headers:
            values = tuple(compress(headers.values(), plan.kept))
            if _PLAIN.fullmatch("".join(values)) is not None:
                return HeaderLines(plan.names, (plan.template % values).encode())
        passed = self.upstream(incoming, route)
        if sum(map(len, (*key[0], *key[1], key[2] or ""))) <= _PLAN_CHARACTERS:
            _ = self._plans.keep(key, _plan(route, headers, passed))
        return HeaderLines.of(passed.items())

    def upstream(self, incoming: Incoming, route: Route) -> CIMultiDict[str]:
        """Return the same headers as `lines`, one by one: those of the client first."""
        headers = incoming.headers
        if any(self._via in line for line in incoming.values("Via")):
            raise forwarding_loop(incoming.path)
        dropped = set(_DROPPED)
        if headers.get("Content-Encoding", "").lower() in _DECODED:
            dropped.add("content-encoding")
        if not self._is_trusted(incoming):
            dropped |= {name for name in map(str.lower, headers) if name.startswith(_SET_BY_PROXIES)}
            dropped.add(self._principal_header)
        dropped |= disguised(headers, {self._principal_header})
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

    def _is_trusted(self, incoming: Incoming) -> bool:
        return bool(self._networks) and principals.is_trusted(incoming.remote, self._networks)


def _plan(route: Route, headers: Mapping[str, str], passed: CIMultiDict[str]) -> _Plan:
    pairs = list(passed.items())
    own = pairs[len(pairs) - len(own_headers(route)) - 1 :]  # those of the route, and Via
    of_client = {name.lower() for name, _ in pairs[: len(pairs) - len(own)]}
    kept = tuple(name.lower() in of_client for name in headers)
    lines = [f"{_escaped(name)}: %s\r\n" for name in compress(headers, kept)]
    lines += [f"{_escaped(name)}: {_escaped(value)}\r\n" for name, value in own]
    return _Plan(route, kept, "".join(lines), frozenset(name.lower() for name, _ in pairs))


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
