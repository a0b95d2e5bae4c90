"""Sends OAuth requests to the upstream of a route; caches the metadata that the upstream publishes."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from typing import Final, NamedTuple

from multidict import CIMultiDict
from yarl import URL

from gateway import world
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import RequestFailed
from gateway.plugins.oauth import oauth_metadata
from gateway.plugins.oauth.oauth_metadata import Document, Place
from gateway.protocol import jsonrpc
from gateway.protocol.errors import Unreachable
from gateway.routes.live_route import LiveRoute
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

    def __init__(self) -> None:
        self._cache: Newest[tuple[str, str], tuple[Document | None, float]] = Newest(_CACHED_DOCUMENTS)
        """The documents, or their absence, with the time until which that holds: by route and path."""

    async def published(self, live: LiveRoute, place: Place) -> Published:
        """The metadata that the upstream publishes; raises UpstreamError if its answer is inconclusive."""
        path = URL(live.route.upstream.url or "").raw_path.rstrip("/")
        resource = await self._document(live, (oauth_metadata.RESOURCE + path, oauth_metadata.RESOURCE))
        issuer = oauth_metadata.own_server(resource, place)
        # In the order in which a client has to ask (basic/authorization).
        server = await self._document(
            live, (oauth_metadata.SERVER + issuer, oauth_metadata.OPENID + issuer, issuer + oauth_metadata.OPENID)
        )
        return Published(resource, server)

    async def _document(self, live: LiveRoute, paths: tuple[str, ...]) -> Document | None:
        """The first of these documents that exists, from the cache or from the upstream."""
        key = live.route.path, paths[0]
        document, until = self._cache.get(key, (None, 0.0))
        if until >= world.monotonic():
            return document
        document = None
        for path in dict.fromkeys(paths):
            async with request("GET", live, path, {"Accept": "application/json"}, b"") as reply:
                if reply.status == 200:
                    document = _parsed(await body_of(reply, live), f"{where(live)} ({path})")
                    break
                if reply.status >= 500 or reply.status == 429:
                    # A 404 would make the client sign in another way.
                    raise Unreachable(f"{where(live)} answered {path} with HTTP {reply.status}")
        _ = self._cache.keep(key, (document, world.monotonic() + _CACHED_SECONDS))
        return document


@asynccontextmanager
async def request(
    method: str, live: LiveRoute, target: str, headers: Mapping[str, str], body: bytes
) -> AsyncIterator[AwaitedReply]:
    """Send a request to the upstream's origin, with the headers that the route sets; raises UpstreamError.

    Redirects are not followed. `credentials` do not apply: a client signs in as itself.
    """
    sent = CIMultiDict(headers)
    sent.update(live.route.set_headers)
    url = URL(f"{oauth_metadata.origin(live.route.upstream.url)}{target}", encoded=True)
    try:
        # Lenient: sign-in pages often fold a long Content-Security-Policy onto several lines.
        with closing(await live.upstream.client.send(method, url, sent, body)) as reply:
            yield reply
    except RequestFailed as exc:
        raise exc.mapped(where(live)) from exc


async def body_of(reply: AwaitedReply, live: LiveRoute) -> bytes:
    """The body of a reply; raises Unreachable if it is too large."""
    body = await reply.read_at_most(ANSWER_BYTES)
    if body is None:
        raise Unreachable(f"{where(live)} answered an OAuth request with more than {ANSWER_BYTES} bytes")
    return body


def _parsed(body: bytes, source: str) -> Document:
    try:
        found = jsonrpc.value(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreachable(f"{source} answered with something that is not a JSON object")
    return found


def where(live: LiveRoute) -> str:
    """The upstream of a route, as errors name it."""
    return f"The upstream {oauth_metadata.origin(live.route.upstream.url)} of route {live.route.path}"
