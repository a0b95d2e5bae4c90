"""Rewrites the `endpoint` event of an HTTP+SSE server, so that its legacy clients send messages to the gateway.

The event names the URL for messages. Instead of the server's URL the client gets the route's own path, with the
server's URL sealed in the query. So nothing is remembered, any replica can open it, and no client can forge one.

Source: specification 2024-11-05 basic/transports (HTTP with SSE).
"""

from typing import Final

from yarl import URL

from gateway.http.incoming import Incoming
from gateway.http.upstream_url import Endpoint
from gateway.protocol import mcp, sse
from gateway.protocol.errors import InvalidRequest, InvalidState
from gateway.seal.keyring import Keyring

PURPOSE: Final = "endpoint"
PARAMETER: Final = "mrtr-endpoint"
_FIRST_EVENT_BYTES: Final = 16_384
"""A larger first event is not an `endpoint` event."""


def target(keyring: Keyring, incoming: Incoming, endpoint: Endpoint) -> URL | None:
    """Return the server's URL for a message to a sealed address, else None; raises InvalidRequest."""
    token = incoming.url.query.get(PARAMETER)
    if token is None:
        return None
    try:
        path, _, address = keyring.open(token).decode().partition("\n")
    except InvalidState:
        path = address = ""
    found = endpoint.within(address) if path == incoming.path else None
    if found is None:
        raise InvalidRequest(
            "This address does not belong to a session of the server: open the event stream again", status=404
        )
    return found


def may_begin(incoming: Incoming) -> bool:
    """Whether the reply to a request may begin with such an event."""
    headers = incoming.headers
    return incoming.method == "GET" and mcp.SESSION_ID not in headers and mcp.LAST_EVENT_ID not in headers


class FirstEventRewriter:
    """Rewrites an event stream up to its first event, and passes the rest unchanged."""

    def __init__(self, keyring: Keyring, incoming: Incoming, endpoint: Endpoint) -> None:
        self._keyring, self._endpoint = keyring, endpoint
        self._path, self._raw_path = incoming.path, incoming.url.raw_path
        self._parser = sse.Parser(_FIRST_EVENT_BYTES)
        self._held = bytearray()
        """The lines since the last empty one, which may become an event."""
        self.is_done = False
        """Whether the first event is over, so that the rest passes as it comes."""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes of the stream that may be sent on after this chunk."""
        passed: list[bytes] = []
        for line in chunk.splitlines(keepends=True):
            self._held += line
            if not self.is_done:
                try:
                    events = self._parser.feed(line)
                except sse.EventTooLarge:
                    self.is_done = True
                    continue
                if events:
                    self.is_done = True
                    passed.append(self._rewritten(events[0]))
                elif not self._parser.unfinished_bytes:  # comments
                    passed.append(self.rest())
        if self.is_done:
            passed.append(self.rest())
        return b"".join(passed)

    def rest(self) -> bytes:
        """The bytes that are still held when the stream ends."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def _rewritten(self, event: sse.Event) -> bytes:
        held = self.rest()
        target = self._endpoint.within(event.data.decode(errors="replace")) if event.event == "endpoint" else None
        if target is None:
            return held  # another origin: the client goes there directly, as it would without a gateway
        sealed = self._keyring.seal(f"{self._path}\n{target}".encode())
        return f"event: endpoint\ndata: {self._raw_path}?{PARAMETER}={sealed}\n\n".encode()
