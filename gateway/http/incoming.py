"""One request as its client sent it, read within the limits of size or time."""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from aiohttp import HttpVersion11, web
from multidict import CIMultiDictProxy
from yarl import URL

from gateway.protocol.errors import DownstreamError, InvalidRequest, TooLarge
from gateway.protocol.request import ParsedBody, Request, check, read
from gateway.seal.peer_messages import PeerRequest
from gateway.telemetry import Span

_NO_URL: Final = URL()
_MAX_JSON_DEPTH: Final = 512
"""The upper bound of `limits.json_depth`."""


class Caller(NamedTuple):
    """The authenticated sender of a request."""

    principal: bytes
    distrusted_header: str | None
    """The header that names principals, if no trusted proxy set it: it counts for nothing and does not go upstream."""
    address: str = ""
    """The client's address as limits count it; empty if none of them is configured."""


class Incoming(msgspec.Struct, eq=False):
    """One request as its client sent it, wherever it arrived."""

    path: str
    headers: CIMultiDictProxy[str]
    remote: str | None
    body: bytes = b""
    peer_request: PeerRequest | None = None
    """The message that carried it here, if another replica forwarded it."""
    is_local: bool = False
    """Whether another process of this host forwarded it."""
    request_id: str = ""
    """The id of the HTTP request (`X-Request-Id`), given by the replica to which the client spoke."""
    method: str = "POST"
    url: URL = _NO_URL
    """The path and the query as the client wrote them; empty if another replica forwarded the request."""
    json_depth: int = _MAX_JSON_DEPTH
    """The maximum nesting of the body; a replica that forwards a request has applied its own limit."""
    span: Span | None = None
    """The span of its round; set after the checks, if requests are traced."""
    caller: Caller | None = None
    """Set once the caller is authenticated."""
    opened: ParsedBody | DownstreamError | None = None
    """The outcome of `parsed`."""
    checked: Request | None = None
    """The outcome of `request`."""

    def parsed(self) -> ParsedBody:
        """Return the body as JSON-RPC, parsed at the first call only; raises ParseError or InvalidRequest."""
        if self.opened is None:
            try:
                self.opened = read(self.body, self.json_depth)
            except DownstreamError as exc:
                self.opened = exc
        if isinstance(self.opened, DownstreamError):
            raise self.opened
        return self.opened

    def request(self) -> Request:
        """Return the modern request, checked at the first call only; raises the DownstreamError of what is wrong."""
        if self.checked is None:
            self.checked = check(self.parsed(), self.values)
        return self.checked

    @property
    def rpc_id(self) -> bytes | None:
        """JSON of the request's id; None if the body has none, or has not been received."""
        try:
            id_ = self.parsed().id
        except DownstreamError as exc:
            return exc.request_id
        return bytes(id_) if id_ is not None else None

    def values(self, name: str) -> Sequence[str]:
        """Return all values of one header."""
        return self.headers.getall(name, ())


async def read_body(http: web.BaseRequest, limit: int, seconds: float) -> bytes:
    """Read and inflate the whole body; raises TooLarge or InvalidRequest."""
    if http.content.is_eof():
        # The body came with its head, as small ones do: nothing to wait for.
        body = http.content.read_nowait()
        if len(body) > limit:
            raise _too_large(limit)
        return body
    if http.content_length is not None and http.content_length > limit:
        raise _too_large(limit)
    if http.headers.get("Expect", "").lower() == "100-continue" and http.version >= HttpVersion11:
        # aiohttp's low-level server leaves this to its handler. HTTP/1.0 has no interim replies.
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0
    received = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while chunk := await http.content.readany():
                received += chunk
                if len(received) > limit:
                    raise _too_large(limit)
    except TimeoutError as exc:
        raise InvalidRequest("The body did not arrive within limits.receive_seconds") from exc
    except web.RequestPayloadError as exc:
        raise InvalidRequest(f"The body is damaged: {exc}") from exc
    return bytes(received)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes (limits.body_bytes)")
