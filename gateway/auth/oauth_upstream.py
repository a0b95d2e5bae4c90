"""Sends OAuth requests to the upstream of a route; caches the metadata that the upstream publishes."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from multidict import CIMultiDict
from yarl import URL

from gateway import world
from gateway.config import Route
from gateway.http.upstream_client import Client
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import RequestFailed
from gateway.identity import oauth_metadata
from gateway.identity.oauth_metadata import Document, Place
from gateway.protocol import jsonrpc
from gateway.protocol.errors import Unreachable
from gateway.runtime.newest import Newest

ANSWER_BYTES: Final = 1_048_576
_CACHED_SECONDS: Final = 10.0
_CACHED_DOCUMENTS: Final = 1024


class Published(NamedTuple):
    """The metadata that an upstream publishes."""

    resource: Document | None
    server: Document | None


class OAuthUpstream:
    """The upstreams of all routes of one configuration, as OAuth resources and authorization servers."""

    def __init__(self, client_for: Callable[[str], Client]) -> None:
        """`client_for` returns the client of the route at a path; raises MethodNotFound if the route was removed."""
        self._client_for = client_for
        self._cache: Newest[tuple[str, str], tuple[Document | None, float]] = Newest(_CACHED_DOCUMENTS)
        """The documents, or their absence, with the time until which that holds: by route and path."""

    async def published(self, route: Route, place: Place) -> Published:
        """The metadata that the upstream publishes; raises UpstreamError if its answer is inconclusive."""
        path = URL(route.upstream.url or "").raw_path.rstrip("/")
        resource = await self._document(route, (oauth_metadata.RESOURCE + path, oauth_metadata.RESOURCE))
        issuer = oauth_metadata.own_server(resource, place)
        server = await self._document(
            route, (oauth_metadata.SERVER + issuer, oauth_metadata.OPENID + issuer, issuer + oauth_metadata.OPENID)
        )
        return Published(resource, server)

    async def _document(self, route: Route, paths: tuple[str, ...]) -> Document | None:
        """The first of these documents that exists, from the cache or from the upstream."""
        key = route.path, paths[0]
        document, until = self._cache.get(key, (None, 0.0))
        if until < world.monotonic():
            document = await self._fetch(route, paths)
            _ = self._cache.keep(key, (document, world.monotonic() + _CACHED_SECONDS))
        return document

    async def _fetch(self, route: Route, paths: tuple[str, ...]) -> Document | None:
        for path in dict.fromkeys(paths):
            async with self.request("GET", route, path, {"Accept": "application/json"}, b"") as reply:
                if reply.status == 200:
                    return _parsed(await body_of(reply, route), f"{where(route)} ({path})")
                if reply.status >= 500 or reply.status == 429:
                    # A 404 would make the client sign in another way.
                    raise Unreachable(f"{where(route)} answered {path} with HTTP {reply.status}")
        return None

    @asynccontextmanager
    async def request(
        self, method: str, route: Route, target: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[AwaitedReply]:
        """Send a request to the upstream's origin, with the headers that the route sets; raises UpstreamError.

        Redirects are not followed. `credentials` do not apply: a client signs in as itself.
        """
        sent = CIMultiDict(headers)
        sent.update(route.set_headers)
        url = URL(f"{oauth_metadata.origin(route.upstream.url)}{target}", encoded=True)
        try:
            reply = await self._client_for(route.path).send(method, url, sent, body, is_lenient=True)
            try:
                yield reply
            finally:
                reply.close()
        except RequestFailed as exc:
            raise exc.mapped(where(route)) from exc


async def body_of(reply: AwaitedReply, route: Route) -> bytes:
    """The body of a reply; raises Unreachable if it is too large."""
    body = await reply.read_at_most(ANSWER_BYTES)
    if body is None:
        raise Unreachable(f"{where(route)} answered an OAuth request with more than {ANSWER_BYTES} bytes")
    return body


def _parsed(body: bytes, source: str) -> Document:
    try:
        found = jsonrpc.value(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreachable(f"{source} answered with something that is not a JSON object")
    return found


def where(route: Route) -> str:
    """The upstream of a route, as errors name it."""
    return f"The upstream {oauth_metadata.origin(route.upstream.url)} of route {route.path}"
