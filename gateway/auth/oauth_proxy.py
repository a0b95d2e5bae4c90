"""OAuth behind the gateway's own URL: the metadata of an upstream, and the endpoints that its metadata names.

Rule 1: nothing goes anywhere but to the origin of a configured upstream. Rule 2: a well-known path is fixed; an
endpoint is served only where the upstream's own metadata says that it has one. Rule 3: the route is the suffix of the
path (`/token/mcp` belongs to the route `/mcp`); a bare path belongs to the only upstream there is.

Nothing is remembered but what an upstream published, for some seconds, so any replica can serve any step.
"""

import asyncio
import ipaddress
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple
from urllib.parse import urljoin

from aiohttp import ClientResponse, web
from multidict import MultiMapping
from yarl import URL

from gateway.config import Config, InForce, Route
from gateway.http.client import FOREIGN, REDIRECTS, Client, mapped, read_at_most
from gateway.http.forwarded_headers import AUTHORIZATION, check_once, joined
from gateway.http.reply import read_body
from gateway.identity import oauth_metadata
from gateway.identity import principal as principals
from gateway.identity.oauth_metadata import Document, Place
from gateway.protocol import jsonrpc
from gateway.protocol.errors import Busy, GatewayError, InvalidRequest, MethodNotFound, Unreachable, UpstreamError

_FORM: Final = "application/x-www-form-urlencoded"
_PASSED_UP: Final = ("Accept", "Accept-Language", "Authorization", "Content-Type", "MCP-Protocol-Version")
_PASSED_DOWN: Final = (
    *("Cache-Control", "Content-Language", "Content-Security-Policy", "Content-Type", "Pragma", "Referrer-Policy"),
    *("Retry-After", "WWW-Authenticate", "X-Content-Type-Options", "X-Frame-Options"),
)
_METHODS: Final = {"/authorize": ("GET", "POST")}
_POST: Final = ("POST",)
_BODY_BYTES: Final = 262_144
_ANSWER_BYTES: Final = 1_048_576
_AT_ONCE: Final = 64
"""Requests of this kind that are served at one time: a sign-in takes half a dozen, one after the other."""
_KEPT_SECONDS: Final = 10.0
_KEPT: Final = 1024
_PREFLIGHT_SECONDS: Final = 600
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")


class _Asked(NamedTuple):
    """What one path asks for."""

    kind: str
    """A key of `oauth.ENDPOINTS`, or a well-known path."""
    suffix: str


class _Published(NamedTuple):
    """What an upstream says of itself."""

    resource: Document | None
    server: Document | None


class _Kept(NamedTuple):
    """One answer of an upstream, for some seconds."""

    document: Document | None
    until: float


class OAuthProxy:
    """OAuth's paths on the listener of the routes."""

    def __init__(self, in_force: InForce[Config], client_for: Callable[[str], Client | None]) -> None:
        """`client_for` returns the client of the route at a path, which trusts the authorities of that route."""
        self._client_for = client_for
        self._kept: dict[tuple[str, str], _Kept] = {}
        """By URL and path: all of them come from the configuration or from an upstream's own metadata."""
        self._at_once = 0
        self._use(in_force.value)
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        """Serve new requests by this configuration."""
        self._config = config
        self._routes = {route.path.rstrip("/"): route for route in config.routes if route.upstream.url is not None}
        self._networks = [ipaddress.ip_network(network) for network in config.principal.trusted_proxies]
        self._kept.clear()

    def challenge(self, http: web.BaseRequest, value: str) -> str:
        """A WWW-Authenticate value of an upstream, as the client of this request needs it."""
        route = self._routes.get(http.path.rstrip("/"))
        try:
            return value if route is None else oauth_metadata.challenge(value, self._place(http, route))
        except GatewayError:
            return value

    def serves(self, path: str) -> bool:
        """Whether a path that is no route is one of OAuth's."""
        return _asked(path) is not None

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """One request for such a path, its Host and Origin checked; raises GatewayError."""
        asked = _asked(http.path)
        assert asked is not None, "serves() said so"
        check_once((AUTHORIZATION, self._config.principal.header), http.headers)
        try:
            methods = _METHODS.get(asked.kind, _POST) if asked.kind in oauth_metadata.ENDPOINTS else ("GET",)
            response = await self._answer(http, asked, methods)
        except UpstreamError as exc:
            exc.status = 502
            raise
        allowed = http.headers.get("Origin")
        if allowed is not None:
            # The guard let this origin pass; a page of it may read what is public anyway.
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Vary"] = "Origin"
        return response

    async def _answer(self, http: web.BaseRequest, asked: _Asked, methods: tuple[str, ...]) -> web.Response:
        if http.method == "OPTIONS":
            return _preflight(methods)
        if http.method not in methods:
            raise _not_allowed(http.method, asked.kind, methods)
        route = self._route(asked)
        place = self._place(http, route)
        body = None
        if http.method == "POST":
            limit = min(_BODY_BYTES, self._config.limits.body_bytes)
            body = await read_body(http, limit, self._config.limits.receive_seconds)
        if self._at_once >= _AT_ONCE:  # who sends slowly takes nobody's place
            raise Busy(f"{_AT_ONCE} requests to authorization servers are under way; try again", status=503)
        self._at_once += 1
        try:
            async with asyncio.timeout(self._config.timeouts.handshake_seconds):
                if asked.kind in oauth_metadata.ENDPOINTS:
                    return await self._pass_on(http, body, asked.kind, route, place)
                return await self._describe(asked, route, place)
        except TimeoutError as exc:
            raise Unreachable(
                f"{_where(route)} did not answer an OAuth request within timeouts.handshake_seconds"
            ) from exc
        finally:
            self._at_once -= 1

    def _route(self, asked: _Asked) -> Route:
        route = self._routes.get(asked.suffix)
        if route is not None:
            return route
        routes = list(self._routes.values())
        if not asked.suffix and routes and len({oauth_metadata.origin(each.upstream.url) for each in routes}) == 1:
            return routes[0]
        raise MethodNotFound(
            f"{asked.kind}{asked.suffix[:80]} belongs to no route; write the path of a route behind {asked.kind}"
        )

    def _client(self, route: Route) -> Client:
        """Return the client of a route, which a reload may have removed since it was found."""
        client = self._client_for(route.path)
        if client is None:
            raise MethodNotFound(f"The route {route.path} is gone")
        return client

    # -- where the gateway is -----------------------------------------------------------------------------------

    def _place(self, http: web.BaseRequest, route: Route) -> Place:
        upstream = oauth_metadata.origin(route.upstream.url)
        assert upstream is not None, "the configuration admits http(s) URLs only"
        return Place(self._public(http), route.path.rstrip("/"), upstream)

    def _public(self, http: web.BaseRequest) -> str:
        """The origin at which the client of this request reaches the gateway; raises InvalidRequest."""
        if self._config.public_url is not None:
            return oauth_metadata.origin(self._config.public_url) or self._config.public_url
        scheme, host = http.scheme, http.headers.get("Host", "")
        if principals.is_trusted(http.remote, self._networks):
            scheme = _first(http.headers.get("X-Forwarded-Proto")) or scheme
            host = _first(http.headers.get("X-Forwarded-Host")) or host
        public = oauth_metadata.origin(f"{scheme}://{host}") if _HOST.fullmatch(host) else None
        if public is None:
            raise InvalidRequest("Host does not say where this gateway is; set public_url")
        return public

    # -- metadata -----------------------------------------------------------------------------------------------

    async def _describe(self, asked: _Asked, route: Route, place: Place) -> web.Response:
        published = await self._learn(route, place)
        if asked.kind == oauth_metadata.RESOURCE:
            document = published.resource
            shown = oauth_metadata.protected_resource(document, place) if document is not None else None
        else:
            document = published.server
            shown = (
                oauth_metadata.authorization_server(document, place, asked.suffix) if document is not None else None
            )
        if shown is None:
            raise MethodNotFound(f"The upstream of route {route.path} publishes no {asked.kind.rpartition('/')[2]}")
        return web.Response(
            body=jsonrpc.encode(shown), content_type="application/json", headers={"Cache-Control": "no-store"}
        )

    async def _learn(self, route: Route, place: Place) -> _Published:
        """What the upstream publishes; raises UpstreamError where it says neither yes nor no."""
        path = URL(route.upstream.url or "").raw_path.rstrip("/")
        resource = await self._ask(route, (oauth_metadata.RESOURCE + path, oauth_metadata.RESOURCE))
        issuer = oauth_metadata.own_server(resource, place)
        server = await self._ask(
            route, (oauth_metadata.SERVER + issuer, oauth_metadata.OPENID + issuer, issuer + oauth_metadata.OPENID)
        )
        return _Published(resource, server)

    async def _ask(self, route: Route, paths: tuple[str, ...]) -> Document | None:
        """The first document of these that there is."""
        key = route.upstream.url or "", paths[0]
        kept = self._kept.get(key)
        if kept is None or kept.until < time.monotonic():
            document = await self._fetch(route, paths)
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            kept = self._kept[key] = _Kept(document, time.monotonic() + _KEPT_SECONDS)
        return kept.document

    async def _fetch(self, route: Route, paths: tuple[str, ...]) -> Document | None:
        for path in dict.fromkeys(paths):
            async with self._exchange("GET", route, path, {"Accept": "application/json"}, None) as response:
                if response.status == 200:
                    return _document(await _body(response, route), f"{_where(route)} ({path})")
                if response.status >= 500 or response.status == 429:
                    # To a client, "there is none" means another way to sign in.
                    raise Unreachable(f"{_where(route)} answered {path} with HTTP {response.status}")
        return None

    # -- endpoints ----------------------------------------------------------------------------------------------

    async def _pass_on(
        self, http: web.BaseRequest, body: bytes | None, kind: str, route: Route, place: Place
    ) -> web.Response:
        published = await self._learn(route, place)
        server = published.server or {}
        target = oauth_metadata.endpoint(server, oauth_metadata.ENDPOINTS[kind], place)
        if target is None:
            raise MethodNotFound(
                f"The metadata of route {route.path}'s upstream has no {oauth_metadata.ENDPOINTS[kind]} on its own "
                "origin"
            )
        named = _renamed(published.resource, place)
        query = oauth_metadata.replaced(http.rel_url.raw_query_string, named)
        if query:
            target += f"{'&' if '?' in target else '?'}{query}"
        if not _is_plain(target) or " " in target:
            raise Unreachable(f"{_where(route)} names a {oauth_metadata.ENDPOINTS[kind]} that is no URL")
        if body is not None and http.content_type == _FORM and body.isascii():
            body = oauth_metadata.replaced(body.decode(), named).encode()
        headers = _picked(http.headers, _PASSED_UP)
        if kind == "/authorize":
            _ = headers.pop("Authorization", None)  # a browser's, for the gateway's origin
        async with self._exchange(http.method, route, target, headers, body) as response:
            kept = _picked(response.headers, _PASSED_DOWN)
            if "WWW-Authenticate" in kept:
                kept["WWW-Authenticate"] = oauth_metadata.challenge(kept["WWW-Authenticate"], place)
            location = response.headers.get("Location")
            if location is not None and response.status in REDIRECTS and _is_plain(location):
                kept["Location"] = _location(response.url, location, published, place)
            return web.Response(body=await _body(response, route), status=response.status, headers=kept)

    @asynccontextmanager
    async def _exchange(
        self, method: str, route: Route, target: str, headers: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[ClientResponse]:
        """One request to the upstream's origin, redirects not followed; raises UpstreamError."""
        url = URL(f"{oauth_metadata.origin(route.upstream.url)}{target}", encoded=True)
        try:
            response = await self._client(route).open(method, url, dict(headers), body)
            try:
                yield response
            finally:
                response.release()
        except FOREIGN as exc:
            raise mapped(exc, _where(route)) from exc


def _asked(path: str) -> _Asked | None:
    """Sort a path; None when it is none of OAuth's."""
    for kind in (oauth_metadata.RESOURCE, oauth_metadata.SERVER, oauth_metadata.OPENID, *oauth_metadata.ENDPOINTS):
        if path == kind or path.startswith(f"{kind}/"):
            return _Asked(kind, path[len(kind) :].rstrip("/"))
    if path.endswith(oauth_metadata.OPENID):  # OpenID Connect Discovery puts it behind the issuer's path
        return _Asked(oauth_metadata.OPENID, path.removesuffix(oauth_metadata.OPENID))
    return None


def _picked(headers: MultiMapping[str], names: tuple[str, ...]) -> dict[str, str]:
    """Those of the headers that go on; bytes that are no text stay here."""
    return {name: value for name in names if (value := joined(headers, name)) is not None and _is_plain(value)}


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _renamed(resource: Document | None, place: Place) -> dict[str, tuple[str, str]]:
    """How the `resource` that a client asks a token for is called by the upstream (RFC 8707)."""
    name = (resource or {}).get("resource")
    return {"resource": (place.resource, name)} if isinstance(name, str) and place.is_private(name) else {}


def _location(url: URL, location: str, published: _Published, place: Place) -> str:
    """Where a browser is sent; RFC 9207 has the issuer in it, which must be the one that the client knows."""
    if not location.startswith(("http://", "https://")) and ":" not in location.partition("/")[0]:
        location = urljoin(str(url), location)  # a page of the upstream that is not served here
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


async def _body(response: ClientResponse, route: Route) -> bytes:
    body = await read_at_most(response, _ANSWER_BYTES)
    if body is None:
        raise Unreachable(f"{_where(route)} answered an OAuth request with more than {_ANSWER_BYTES} bytes")
    return body


def _document(body: bytes, where: str) -> Document:
    try:
        found = jsonrpc.value(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreachable(f"{where} answered with what is no JSON object")
    return found


def _preflight(methods: tuple[str, ...]) -> web.Response:
    headers = {
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Allow-Headers": "Authorization, Content-Type, MCP-Protocol-Version",
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
    }
    return web.Response(status=204, headers=headers)


def _not_allowed(method: str, kind: str, methods: tuple[str, ...]) -> GatewayError:
    error = InvalidRequest(f"HTTP {method[:20]} is not served at {kind}; it takes {', '.join(methods)}")
    error.status = 405
    error.headers["Allow"] = ", ".join((*methods, "OPTIONS"))
    return error


def _first(value: str | None) -> str:
    """Of a header that proxies append to, what the first of them said."""
    return (value or "").partition(",")[0].strip()


def _where(route: Route) -> str:
    return f"The upstream {oauth_metadata.origin(route.upstream.url)} of route {route.path}"
