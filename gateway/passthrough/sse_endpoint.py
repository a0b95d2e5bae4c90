"""Old clients of an HTTP+SSE server: its stream names where messages go, and that must be a place of the gateway's.

A client that reads the server's `endpoint` event through the gateway is told the route's own path instead, with the
server's address sealed in the query. So nothing is remembered, any replica opens it, and no client makes one up.

Source: specification 2024-11-05 basic/transports (HTTP with SSE).
"""

import re
from typing import Final

from aiohttp import web
from yarl import URL

from gateway.config import InForce
from gateway.http.client import Endpoint
from gateway.protocol import mcp, sse
from gateway.protocol.errors import InvalidRequest, InvalidState
from gateway.seal.cipher import Keyring

PURPOSE: Final = "endpoint"
_PARAMETER: Final = "mrtr-endpoint"
_BLOCK_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?:\r\n|\n|(?<!\n)\r|\r(?=[^\n]))")
"""Two line ends of any kind. A CR after an LF may still become a CRLF, so it waits for the byte after it."""
_BEGINNING_BYTES: Final = 16_384
"""A stream whose first event is larger does not begin with an endpoint."""


class EndpointRewriter:
    """The addresses that servers name, as clients get to see them."""

    def __init__(self, keyring: InForce[Keyring]) -> None:
        self._keyring = keyring

    def target(self, http: web.BaseRequest, endpoint: Endpoint) -> URL | None:
        """Where a message goes that a client sent to a sealed address; None for all others. Raises InvalidRequest."""
        token = http.rel_url.query.get(_PARAMETER)
        if token is None:
            return None
        try:
            path, _, address = self._keyring.value.open(token).decode().partition("\n")
        except InvalidState:
            path = address = ""
        target = endpoint.within(address) if path == http.path else None
        if target is None:
            error = InvalidRequest("No session of the server has this address: open its event stream again")
            error.status = 404
            raise error
        return target

    def beginning(self, http: web.BaseRequest, endpoint: Endpoint) -> "Beginning | None":
        """For the reply to a request that may open such a stream; None where it cannot be one."""
        if http.method != "GET" or mcp.SESSION_ID in http.headers or mcp.LAST_EVENT_ID in http.headers:
            return None
        return Beginning(self._keyring.value, http.path, http.rel_url.raw_path, endpoint)


class Beginning:
    """An event stream up to its first event."""

    def __init__(self, keyring: Keyring, path: str, raw_path: str, endpoint: Endpoint) -> None:
        self._keyring = keyring
        self._path = path
        self._raw_path = raw_path
        self._endpoint = endpoint
        self._held = bytearray()
        self._is_over = False

    def feed(self, chunk: bytes) -> bytes:
        """What of the stream may go on, now that this much more of it is here."""
        if self._is_over:
            return chunk
        self._held += chunk
        passed = b""
        while not self._is_over and (end := _BLOCK_END.search(self._held)) is not None:
            block = bytes(self._held[: end.end()])
            del self._held[: end.end()]
            events = sse.Parser(len(block) + 1).feed(block)
            self._is_over = bool(events)
            passed += self._renamed(events[0], block) if events else block
        if len(self._held) > _BEGINNING_BYTES:
            self._is_over = True
        return passed + self.rest() if self._is_over else passed

    def rest(self) -> bytes:
        """What is left when the stream ends."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def _renamed(self, event: sse.Event, block: bytes) -> bytes:
        if event.event != "endpoint":
            return block
        target = self._endpoint.within(event.data.decode(errors="replace"))
        if target is None:
            return block  # elsewhere: the client goes there by itself, as it would without a gateway
        sealed = self._keyring.seal(f"{self._path}\n{target}".encode())
        return f"event: endpoint\ndata: {self._raw_path}?{_PARAMETER}={sealed}\n\n".encode()
