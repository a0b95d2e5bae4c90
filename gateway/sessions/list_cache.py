"""A cache of answers to list requests, off unless a route's `cache.lists_seconds` turns it on.

Rule 1: a page is cached under the whole pool key of its request (principal, client, capabilities, forwarded headers)
and under the exact credential, because two tokens of one principal may differ in scope. Rule 2: before an answer comes
from the cache, the upstream sees the credential (`Pool.authorise`). Rule 3: a change invalidates every page that was
requested before it.
"""

import hashlib
from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from gateway import world
from gateway.exchange import results
from gateway.http.upstream_headers import AUTHORIZATION
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.request import Request
from gateway.sessions.call import PoolKey
from gateway.upstream.channel import Headers

_ARRAYS: Final = {
    mcp.TOOLS_LIST: "tools",
    mcp.PROMPTS_LIST: "prompts",
    mcp.RESOURCES_LIST: "resources",
    mcp.TEMPLATES_LIST: "resourceTemplates",
}
"""Only an answer with this array is kept."""
_MAX_BYTES: Final = 33_554_432
"""Of a route; the least recently used page is evicted first."""
_MAX_PAGE_BYTES: Final = 4_194_304
_MAX_CURSOR: Final = 4096
_PAGE_OVERHEAD: Final = 1024
_PARAMS: Final = frozenset({"cursor"})
_TRACE: Final = frozenset(mcp.TRACE_KEYS)


class CacheKey(NamedTuple):
    """Identifies equal list requests (server/utilities/caching, Cache Key), while nothing has changed."""

    generation: int
    """The generation of the group when the request came."""
    key: PoolKey
    """Includes the forwarded headers, byte for byte."""
    credential: bytes
    """Digest of the `Authorization` that goes upstream; empty without one."""
    method: str
    cursor: str | None

    @property
    def place(self) -> tuple[object, ...]:
        """Where the answer is kept; one of a later generation replaces it."""
        return self[1:]


class _Page(msgspec.Struct, frozen=True, gc=False):
    body: bytes
    generation: int
    until: float
    """Monotonic."""

    @property
    def size(self) -> int:
        return len(self.body) + _PAGE_OVERHEAD


def cache_key(key: PoolKey, request: Request, headers: Headers, generation: int) -> CacheKey | None:
    """The key of a request; None if the answer may depend on more than method and cursor."""
    is_plain = request.params.keys() <= _PARAMS and request.said.user_meta.keys() <= _TRACE
    if request.method not in _ARRAYS or not is_plain:
        return None
    authorization, cursor = headers.get(AUTHORIZATION), None
    credential = b"" if authorization is None else hashlib.sha256(authorization.encode()).digest()
    if "cursor" in request.params:
        cursor = jsonrpc.text(request.params["cursor"])
        if cursor is None or len(cursor) > _MAX_CURSOR:
            return None
    return CacheKey(generation, key, credential, request.method, cursor)


class ListCache:
    """The cached pages of one route."""

    def __init__(self) -> None:
        self._pages: OrderedDict[tuple[object, ...], _Page] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, cache_key: CacheKey) -> bytes | None:
        """The result of a request as JSON, if it is cached and nothing has changed since."""
        page = self._pages.get(cache_key.place)
        if page is None:
            return None
        if page.generation != cache_key.generation or page.until <= world.monotonic():
            self._forget(cache_key.place)
            return None
        self._pages.move_to_end(cache_key.place)
        return page.body

    def keep(self, cache_key: CacheKey, body: bytes, seconds: float) -> None:
        """Keep a result for this long."""
        self._forget(cache_key.place)
        opened = jsonrpc.fields(body)
        if seconds <= 0 or not bytes(opened.get(_ARRAYS[cache_key.method], b"")).startswith(b"["):
            return
        page = _Page(body, cache_key.generation, world.monotonic() + seconds)
        if page.size > _MAX_PAGE_BYTES:
            return
        self._pages[cache_key.place] = page
        self._bytes += page.size
        while self._bytes > _MAX_BYTES:
            self._forget(next(iter(self._pages)))

    def clear(self) -> None:
        """Forget everything, because a new configuration may word the answers differently."""
        self._pages.clear()
        self._bytes = 0

    def _forget(self, place: tuple[object, ...]) -> None:
        page = self._pages.pop(place, None)
        if page is not None:
            self._bytes -= page.size


def seconds_kept(result: Raw, seconds: float) -> float:
    """How long an answer of the upstream may be kept: never longer than its own `ttlMs`."""
    stated = results.stated_ttl_ms(jsonrpc.fields(result).get("ttlMs"))
    return seconds if stated is None else min(seconds, stated / 1000)
