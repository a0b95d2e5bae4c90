"""One request of a client, with its body as it arrives."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from typing import Final

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy, MultiMapping
from yarl import URL

from gateway.http.server.wire import Wire
from gateway.protocol.header_mismatch import KnownValues

_PAUSED_BYTES: Final = 131_072
"""Of a body of which so much was not read yet, no more is read from the network."""

REQUEST_ID: Final = "X-Request-Id"
_WELL_FORMED: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+/@-]{0,127}")
"""The forms of ids that are in use: UUIDs, ULIDs, hex, base64, host and counter. An id ends in logs and headers."""

NO_HEADERS: Final = CIMultiDictProxy(CIMultiDict[str]())


class BodyBroken(Exception):
    """The rest of a body will not come: its chunks are malformed, or it took too long."""


class ReceivedHead(msgspec.Struct, eq=False):
    """The head of one request."""

    method: str
    target: str
    """As the client wrote it, which may be a whole URL."""
    headers: CIMultiDictProxy[str]
    url: URL
    """The path and the query."""
    is_1_1: bool = True
    """False: HTTP/1.0."""
    keep_alive: bool = True
    """Whether the client may send another request after this one, as none does over HTTP/1.0."""
    length: int = 0
    """The size of the body, if that is said; 0 for one in chunks."""
    values: KnownValues | None = None
    """The values of the headers, once the same head has come again."""
    path: str = ""
    """The path, decoded."""
    is_encoded: bool = False
    """Whether the body is compressed, or in another encoding."""
    request_id: str | None = None
    """What the client gave as `X-Request-Id`."""

    def __post_init__(self) -> None:
        self.path = self.url.path
        self.request_id = self.headers.get(REQUEST_ID)
        self.is_encoded = "Content-Encoding" in self.headers

    def learn(self) -> None:
        """The same head has come again."""
        self.values = KnownValues(self.headers)

    def forget(self) -> None:
        """Forget what is known of its values, though a request with it may still wait behind another one."""
        self.values = None


class RequestBody(msgspec.Struct, eq=False):
    """The body of one request; what nobody reads soon is not read from the network."""

    wire: Wire | None = None
    is_complete: bool = False
    """Whether all of it is here, read or not."""
    is_broken: bool = False
    """Whether the rest will not come."""
    parts: list[bytes] = []
    """What is here and was not read."""
    size: int = 0
    """How much of that came in parts."""
    waiter: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> None:
        """Take a part."""
        self.parts.append(data)
        before, self.size = self.size, self.size + len(data)
        if before <= _PAUSED_BYTES < self.size and self.wire is not None:
            self.wire.pause_reading()
        self._wake()

    def finish(self) -> None:
        """All of it was fed."""
        self.is_complete = True
        self._wake()

    def fail(self) -> None:
        """No more will come, or what comes is not wanted."""
        self.is_broken = True
        self._wake()

    def read_now(self) -> bytes:
        """Return what is here and was not read."""
        parts = self.parts
        if len(parts) == 1:
            data = parts.pop()
        else:
            data = b"".join(parts)
            parts.clear()
        before, self.size = self.size, 0
        if before > _PAUSED_BYTES and self.wire is not None:
            self.wire.resume_reading()
        return data

    async def read(self) -> bytes:
        """Wait for a part; empty at the end. Raises BodyBroken."""
        while not self.parts:
            if self.is_broken:
                raise BodyBroken
            if self.is_complete:
                return b""
            self.waiter = asyncio.Future()
            await self.waiter
        return self.read_now()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


ALL_READ: Final = RequestBody(is_complete=True)
"""The body of a request that has none, or whose body somebody else has."""


class HttpRequest(msgspec.Struct, eq=False):
    """One request on its connection."""

    head: ReceivedHead
    body: RequestBody
    wire: Wire
    id: str = ""
    """What its reply has as `X-Request-Id`, once that is known."""
    page: str | None = None
    """The origin of the page that sent it, once that is known to be allowed."""

    def identify(self, own: Iterator[str]) -> str:
        """Give it the id that the client or a proxy gave, if that is one short word; else one of `own`."""
        given = self.head.request_id
        self.id = next(own) if given is None or _WELL_FORMED.fullmatch(given) is None else given
        return self.id

    def show_to(self, page: str) -> None:
        """Have the browser let a page of this origin read the reply (CORS)."""
        self.page = page


def numbered(prefix: str) -> Iterator[str]:
    """Return an endless series of ids, unique if no other process has this prefix."""
    return map(f"{prefix}-%x".__mod__, itertools.count(1))


def media_type(headers: MultiMapping[str]) -> str:
    """The type in `Content-Type`, without its parameters; empty if there is none."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()
