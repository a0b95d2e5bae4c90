"""Serves an upstream's OAuth under the gateway's own URL: its metadata, its endpoints.

Rule 1: requests go only to the origin of a configured upstream. Rule 2: well-known paths are fixed; an endpoint is
served only if the upstream's own metadata names it. Rule 3: the route is the suffix of the path (`/token/mcp` belongs
to the route `/mcp`); a path without suffix belongs to the only upstream, if there is just one.

Only the published documents are cached, for some seconds, so any replica can serve any step.
"""

import asyncio
import re
from contextlib import suppress
from typing import Final
from urllib.parse import urljoin

from multidict import MultiMapping

from gateway.config import Config, InForce
from gateway.http.server.body import read_body
from gateway.http.server.request import HttpRequest, media_type
from gateway.http.server.response import Response, WholeResponse
from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_headers import AUTHORIZATION, check_once, joined
from gateway.identity import principal as principals
from gateway.plugins.oauth import oauth_metadata
from gateway.plugins.oauth.oauth_metadata import Document, Place
from gateway.plugins.oauth.oauth_upstream import OAuthUpstream, Published, body_of, request, where
from gateway.protocol import jsonrpc
from gateway.protocol.errors import (
    Busy,
    GatewayError,
    InvalidRequest,
    MethodNotFound,
    NotAllowed,
    Unreachable,
    UpstreamError,
)
from gateway.routes.live_route import LiveRoute
from gateway.routes.route_table import RouteTable

_FORM: Final = "application/x-www-form-urlencoded"
# With `Authorization`, a client authenticates itself at the token endpoint (RFC 6749 section 2.3.1).
_PASSED_UP: Final = ("Accept", "Accept-Language", "Authorization", "Content-Type", "MCP-Protocol-Version")
_PASSED_DOWN: Final = (
    *("Cache-Control", "Content-Language", "Content-Security-Policy", "Content-Type", "Pragma", "Referrer-Policy"),
    *("Retry-After", "WWW-Authenticate", "X-Content-Type-Options", "X-Frame-Options"),
)
_METHODS: Final = {**dict.fromkeys(oauth_metadata.ENDPOINTS, ("POST",)), "/authorize": ("GET", "POST")}
_BODY_BYTES: Final = 262_144
_AT_ONCE: Final = 64
"""Concurrent OAuth requests; a sign-in takes half a dozen, one after the other."""
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")


class OAuthProxy:
    """The OAuth paths on the listener of the routes."""

    def __init__(self, in_force: InForce[Config], routes: RouteTable) -> None:
        self._routes = routes
        self._at_once = 0
        self._use(in_force.value)
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        self._config = config
        issuer = config.principal.issuer if config.principal.source == "jwt" else None
        self._issuer = issuer if oauth_metadata.origin(issuer) is not None else None
        """The issuer whose tokens the gateway itself requires, if it is a URL, as RFC 8414 requires."""
        self._upstream = OAuthUpstream()  # what was cached may be another upstream's on the same path

    def _at(self, suffix: str) -> LiveRoute | None:
        """The route of a suffix, which has no slash at its end."""
        live = self._routes.live
        return live.get(suffix) or live.get(f"{suffix}/")

    def challenge(self, http: HttpRequest, value: str) -> str:
        """Rewrite a WWW-Authenticate value so that it points the client to the gateway."""
        suffix = http.head.path.rstrip("/")
        live = self._at(suffix)
        try:
            if live is not None and live.route.upstream.url is not None:
                value = oauth_metadata.challenge(value, self._place(http, live))
            if live is not None and self._issuer is not None:
                value = oauth_metadata.with_metadata(value, self._public(http), suffix)
        except GatewayError:  # no public URL: an error about that would hide the 401
            pass
        return value

    async def handle(self, http: HttpRequest) -> Response | None:
        """Serve a request for an OAuth path, after the check of Host and Origin; None for any other path.

        Raises GatewayError.
        """
        asked = _target(http.head.path)
        if asked is None:
            return None
        kind, suffix = asked
        check_once((AUTHORIZATION, self._config.principal.header), http.head.headers)
        methods = _METHODS.get(kind, ("GET",))
        allowed = ", ".join((*methods, "OPTIONS"))
        if http.head.method == "OPTIONS":
            return WholeResponse(status=204, headers={"Allow": allowed})
        if http.head.method not in methods:
            raise NotAllowed(
                f"HTTP {http.head.method[:20]} is not served at {kind}; it takes {', '.join(methods)}", allowed=allowed
            )
        try:
            return await self._answer(http, kind, suffix)
        except UpstreamError as exc:
            exc.status = 502  # a client of OAuth reads the status, not a JSON-RPC error in HTTP 200
            raise

    async def _answer(self, http: HttpRequest, kind: str, suffix: str) -> WholeResponse:
        live = self._at(suffix)
        if live is not None and live.route.upstream.url is None:  # a stdio server has none of its own
            if kind == oauth_metadata.RESOURCE and self._issuer is not None:
                return _document(oauth_metadata.of_issuer(self._issuer, self._public(http) + (suffix or "/")))
            live = None
        if live is None:  # a path without a suffix belongs to the only upstream
            over_http = [each for each in self._routes.live.values() if each.route.upstream.url is not None]
            if suffix or len({oauth_metadata.origin(each.route.upstream.url) for each in over_http}) != 1:
                raise MethodNotFound(
                    f"{kind}{suffix[:80]} does not belong to a route; append the path of a route to {kind}"
                )
            live = over_http[0]
        place = self._place(http, live)
        body = b""
        if http.head.method == "POST":
            limit = min(_BODY_BYTES, self._config.limits.body_bytes)
            seconds, budget = self._config.limits.receive_seconds, self._routes.process.traffic.receiving
            body = await read_body(http, limit, seconds, budget)
        if self._at_once >= _AT_ONCE:  # counted after the body, so a slow sender occupies no place
            raise Busy(f"{_AT_ONCE} requests to authorization servers are under way; try again")
        self._at_once += 1
        try:
            async with asyncio.timeout(self._config.timeouts.handshake_seconds):
                if kind in oauth_metadata.ENDPOINTS:
                    return await self._forward(http, body, kind, live, place)
                return await self._metadata(kind, suffix, live, place)
        except TimeoutError as exc:
            raise Unreachable(
                f"{where(live)} did not answer an OAuth request within timeouts.handshake_seconds"
            ) from exc
        finally:
            self._at_once -= 1

    # -- the public URL -----------------------------------------------------------------------------------------

    def _place(self, http: HttpRequest, live: LiveRoute) -> Place:
        upstream = oauth_metadata.origin(live.route.upstream.url)
        assert upstream is not None, "the configuration admits http(s) URLs only"
        return Place(self._public(http), live.route.path.rstrip("/"), upstream)

    def _public(self, http: HttpRequest) -> str:
        """The origin under which the client of this request reaches the gateway; raises InvalidRequest."""
        if self._config.public_url is not None:
            return oauth_metadata.origin(self._config.public_url) or self._config.public_url
        scheme = "https" if http.wire.is_secure else "http"
        host = http.head.headers.get("Host", "")
        if principals.is_trusted(http.wire.remote, self._config.principal.trusted_proxies):
            scheme = _first(http.head.headers.get("X-Forwarded-Proto")) or scheme
            host = _first(http.head.headers.get("X-Forwarded-Host")) or host
        # `URL` alone reads `a@b` and `b/c` as the host b.
        public = oauth_metadata.origin(f"{scheme}://{host}") if _HOST.fullmatch(host) else None
        if public is None:
            raise InvalidRequest("The gateway's public URL cannot be told from the Host header; set public_url")
        return public

    # -- metadata -----------------------------------------------------------------------------------------------

    async def _metadata(self, kind: str, suffix: str, live: LiveRoute, place: Place) -> WholeResponse:
        published = await self._upstream.published(live, place)
        is_resource = kind == oauth_metadata.RESOURCE
        if is_resource and published.resource is not None:
            return _document(oauth_metadata.protected_resource(published.resource, place))
        if is_resource and self._issuer is not None:
            return _document(oauth_metadata.of_issuer(self._issuer, place.resource))
        if not is_resource and published.server is not None:
            return _document(oauth_metadata.authorization_server(published.server, place, suffix))
        raise MethodNotFound(f"The upstream of route {live.route.path} publishes no {kind.rpartition('/')[2]}")

    # -- endpoints ----------------------------------------------------------------------------------------------

    async def _forward(
        self, http: HttpRequest, body: bytes, kind: str, live: LiveRoute, place: Place
    ) -> WholeResponse:
        published = await self._upstream.published(live, place)
        name = oauth_metadata.ENDPOINTS[kind]
        target = oauth_metadata.endpoint(published.server or {}, name, place)
        if target is None:
            raise MethodNotFound(
                f"The metadata of the upstream of route {live.route.path} names no {name} on the upstream's own origin"
            )
        # A client asks for a token for the resource (RFC 8707) by the URL that it uses, the upstream knows its own.
        resource = (published.resource or {}).get("resource")
        is_private = isinstance(resource, str) and place.is_private(resource)
        named = {"resource": (place.resource, str(resource))} if is_private else {}
        query = oauth_metadata.replaced(http.head.url.raw_query_string, named)
        if query:
            target += f"{'&' if '?' in target else '?'}{query}"
        if not _is_plain(target) or " " in target:
            raise Unreachable(f"{where(live)} names a {name} that is not a URL")
        if media_type(http.head.headers) == _FORM and body.isascii():
            body = oauth_metadata.replaced(body.decode(), named).encode()
        headers = _picked(http.head.headers, _PASSED_UP)
        if kind == "/authorize":
            _ = headers.pop("Authorization", None)  # a browser's, for the gateway's origin
        async with request(http.head.method, live, target, headers, body) as reply:
            came = reply.headers
            kept = _picked(came, _PASSED_DOWN)
            if "WWW-Authenticate" in kept:
                kept["WWW-Authenticate"] = oauth_metadata.challenge(kept["WWW-Authenticate"], place)
            location = came.get("Location")
            if location is not None and reply.status in REDIRECTS and _is_plain(location):
                with suppress(ValueError):  # `//[` is not a URL
                    kept["Location"] = _location(place.upstream + target, location, published, place)
            return WholeResponse(body=await body_of(reply, live), status=reply.status, headers=kept)


def _target(path: str) -> tuple[str, str] | None:
    """The endpoint or well-known path that a path begins with, and its route's suffix; None for any other path."""
    for kind in (oauth_metadata.RESOURCE, oauth_metadata.SERVER, oauth_metadata.OPENID, *oauth_metadata.ENDPOINTS):
        if path == kind or path.startswith(f"{kind}/"):
            return kind, path[len(kind) :].rstrip("/")
    if path.endswith(oauth_metadata.OPENID):  # OpenID Connect Discovery puts it behind the issuer's path
        return oauth_metadata.OPENID, path.removesuffix(oauth_metadata.OPENID)
    return None


def _document(shown: Document) -> WholeResponse:
    return WholeResponse(
        jsonrpc.encode(shown), headers={"Content-Type": "application/json", "Cache-Control": "no-store"}
    )


def _picked(headers: MultiMapping[str], names: tuple[str, ...]) -> dict[str, str]:
    """The headers of these names; values that are not printable ASCII are dropped."""
    return {name: value for name in names if (value := joined(headers, name)) is not None and _is_plain(value)}


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _location(url: str, location: str, published: Published, place: Place) -> str:
    """The redirect target for a browser; its `iss` (RFC 9207) must be the issuer that the client knows."""
    # A native app has a scheme of its own: `app.example:/done` (RFC 8252 section 7.1).
    if not location.startswith(("http://", "https://")) and ":" not in location.partition("/")[0]:
        location = urljoin(url, location)  # a page of the upstream that the gateway does not serve
    server = published.server or {}
    name = server.get("issuer")
    before, mark, rest = location.partition("?")
    if not mark or not isinstance(name, str) or not place.is_private(name):
        return location
    servers = (published.resource or {}).get("authorization_servers")
    asked = place.suffix if isinstance(servers, list) and any(place.is_private(each) for each in servers) else ""
    query, hash_, fragment = rest.partition("#")
    issuer = oauth_metadata.issuer(server, place, asked)
    return f"{before}?{oauth_metadata.replaced(query, {'iss': (name, issuer)})}{hash_}{fragment}"


def _first(value: str | None) -> str:
    """The first value of a header that proxies append to."""
    return (value or "").partition(",")[0].strip()
