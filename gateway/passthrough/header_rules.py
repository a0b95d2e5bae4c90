"""Decides which headers pass through in both directions.

Headers that belong to one connection, or that only a proxy may set, are dropped; all others pass unchanged.
"""

import ipaddress
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from gateway.config import Config, InForce
from gateway.http import request_id
from gateway.http.forwarded_headers import for_passing, joined, passed_back
from gateway.http.reply import REQUEST_ID, Challenge
from gateway.identity import principal as principals
from gateway.passthrough.rejections import forwarding_loop
from gateway.routes.live_route import LiveRoute
from gateway.upstream.channel import Headers

_DROPPED: Final = frozenset({"origin", "proxy-connection"})
"""The gateway has checked Origin, and it names a page that the upstream does not know."""
_DECODED: Final = frozenset({"gzip", "deflate", "br", "zstd"})
"""The content encodings that aiohttp decodes as it reads a request's body."""
_SET_BY_PROXIES: Final = ("forwarded", "x-real-ip", "x-forwarded-")


class HeaderRules:
    """The headers of one listener's requests and replies that pass through."""

    def __init__(self, in_force: InForce[Config], challenge: Challenge, epoch: str) -> None:
        """`epoch` names this process in the Via header that RFC 9110 (7.6.3) requires of proxies."""
        self._challenge = challenge
        self._via = f"1.1 mrtr-{epoch}"
        self._use(in_force.value)
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        """Use this configuration for new requests."""
        self._principal_header = (config.principal.header or "").lower()
        self._networks = [ipaddress.ip_network(network) for network in config.principal.trusted_proxies]

    def upstream(self, http: web.BaseRequest, live: LiveRoute) -> CIMultiDict[str]:
        """The headers of a request as they go upstream; raises InvalidRequest, also if it has been here before."""
        if any(self._via in line for line in http.headers.getall("Via", ())):
            raise forwarding_loop(http.path)
        dropped = set(_DROPPED)
        if http.headers.get("Content-Encoding", "").lower() in _DECODED:
            dropped.add("content-encoding")
        if not principals.is_trusted(http.remote, self._networks):
            dropped |= {name for name in map(str.lower, http.headers) if name.startswith(_SET_BY_PROXIES)}
            dropped.add(self._principal_header)
        kept = for_passing(live.route, http.headers, dropped)
        kept.add("Via", self._via)
        return kept

    def downstream(self, http: web.BaseRequest, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
        """The headers of a reply as they go to the client; challenges point it to the gateway for its sign-in."""
        headers = passed_back(response.headers)
        headers[request_id.HEADER] = http[REQUEST_ID]  # the upstream's own id for the request stays in its log
        challenges = headers.popall("WWW-Authenticate", ())
        headers.extend([("WWW-Authenticate", self._challenge(http, value)) for value in challenges])
        return headers


def probe_headers(headers: CIMultiDict[str]) -> Headers:
    """The headers of a request upstream that do not describe its message, for a probe with the same credentials."""
    own = {"accept", "content-type", "last-event-id"}
    return {
        name: joined(headers, name) or ""
        for name in headers
        if name.lower() not in own and not name.lower().startswith("mcp-")
    }
