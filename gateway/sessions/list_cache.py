"""Answers to list requests, kept for a while: off unless a route's `cache.lists_seconds` says so.

Rule 1: a page is found under the whole pool key that it was asked with (principal, client, capabilities, forwarded
headers) and under the very credential, never under another: two tokens of one principal may differ in scope. Rule 2:
whoever answers from here has the upstream see the credential first (`Pool.authorise`). Rule 3: a page that was asked
for before a change is not kept after it.
"""

import hashlib
import time
from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from gateway.exchange import results
from gateway.http.forwarded_headers import AUTHORIZATION
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.request import Request
from gateway.sessions.call import PoolKey
from gateway.upstream.channel import Headers

_MEMBERS: Final = {
    mcp.TOOLS_LIST: "tools",
    mcp.PROMPTS_LIST: "prompts",
    mcp.RESOURCES_LIST: "resources",
    mcp.TEMPLATES_LIST: "resourceTemplates",
}
"""What is kept: an answer with this array."""
_MAX_BYTES: Final = 33_554_432
"""Of a route; the page that was not asked for longest goes first."""
_MAX_PAGE_BYTES: Final = 4_194_304
_MAX_CURSOR: Final = 4096
_PAGE_OVERHEAD: Final = 1024
_PARAMS: Final = frozenset({"cursor"})
_TRACE: Final = frozenset(mcp.TRACE_KEYS)


class Place(NamedTuple):
    """What makes two list requests the same (server/utilities/caching, Cache Key)."""

    key: PoolKey
    """With the forwarded headers, byte for byte."""
    credential: bytes
    """Digest of the `Authorization` that goes upstream; empty where none does."""
    method: str
    cursor: str | None


class CacheKey(NamedTuple):
    """A request whose answer may be kept, if nothing changed since it was made."""

    place: Place
    generation: int
    """That of the group when the request came."""


class _Page(msgspec.Struct, frozen=True, gc=False):
    body: bytes
    generation: int
    until: float
    """Monotonic."""

    @property
    def size(self) -> int:
        return len(self.body) + _PAGE_OVERHEAD


def place(key: PoolKey, request: Request, headers: Headers) -> Place | None:
    """Where the answer of a request stands; None for one whose answer may depend on more than method and cursor."""
    if request.method not in _MEMBERS or not (request.params.keys() <= _PARAMS and request.user_meta.keys() <= _TRACE):
        return None
    authorization = headers.get(AUTHORIZATION)
    credential = b"" if authorization is None else hashlib.sha256(authorization.encode()).digest()
    if "cursor" not in request.params:
        return Place(key, credential, request.method, None)
    cursor = jsonrpc.text(request.params["cursor"])
    return (
        Place(key, credential, request.method, cursor) if cursor is not None and len(cursor) <= _MAX_CURSOR else None
    )


class ListCache:
    """The pages of one route."""

    def __init__(self) -> None:
        self._pages: OrderedDict[Place, _Page] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, ticket: CacheKey) -> bytes | None:
        """The result of a request, if it is kept and nothing changed since; JSON."""
        page = self._pages.get(ticket.place)
        if page is None:
            return None
        if page.generation != ticket.generation or page.until <= time.monotonic():
            self._forget(ticket.place)
            return None
        self._pages.move_to_end(ticket.place)
        return page.body

    def keep(self, ticket: CacheKey, body: bytes, seconds: float) -> None:
        """Keep a result for this long."""
        self._forget(ticket.place)
        opened = jsonrpc.fields(body)
        if seconds <= 0 or not bytes(opened.get(_MEMBERS[ticket.place.method], b"")).startswith(b"["):
            return
        page = _Page(body, ticket.generation, time.monotonic() + seconds)
        if page.size > _MAX_PAGE_BYTES:
            return
        self._pages[ticket.place] = page
        self._bytes += page.size
        while self._bytes > _MAX_BYTES:
            self._forget(next(iter(self._pages)))

    def clear(self) -> None:
        """Forget everything: other words may stand in new answers."""
        self._pages.clear()
        self._bytes = 0

    def _forget(self, place: Place) -> None:
        page = self._pages.pop(place, None)
        if page is not None:
            self._bytes -= page.size


def seconds_kept(result: Raw, seconds: float) -> float:
    """How long an upstream's answer may be kept: no longer than it says itself."""
    stated = results.stated_ttl_ms(jsonrpc.fields(result).get("ttlMs"))
    return seconds if stated is None else min(seconds, stated / 1000)
