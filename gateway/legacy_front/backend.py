"""The interface that joins a legacy client to what serves it.

A front decodes what the client sends, and hands it to a backend. The backend sends messages back by the link of its
client. There is one of each per client session, and the first message of every session is `initialize`.

Rule 1: a request of the client is answered once: by `send` with a response, or by `refuse`. One that the client has
cancelled may be passed to `forget` instead. Rule 2: after `ended`, a backend hears nothing more; what it says after
`close` is dropped.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError
from gateway.protocol.jsonrpc import Message, RequestId, request_id
from gateway.upstream.channel import NO_HEADERS, Headers


def cancelled(message: Message) -> RequestId | None:
    """The id of the request that `notifications/cancelled` names; None if it is another message, or malformed."""
    raw = jsonrpc.members(message.params).get("requestId") if message.method == mcp.CANCELLED else None
    return None if raw is None else request_id(raw)


class ClientMessage(msgspec.Struct, frozen=True, eq=False):
    """One message of a client: a request, a notification, or a response to a nested request."""

    data: bytes
    """The message as the client wrote it."""
    opened: Message
    headers: Headers = NO_HEADERS
    """The headers that may go upstream with it: credentials, `forward_headers`, and the route's own."""
    http_id: str = ""
    """The id of the HTTP request that brought it, if one did."""

    @property
    def request_id(self) -> RequestId | None:
        """The id, if this is a request."""
        return None if self.opened.method is None else self.opened.rpc_id


class ClientLink(Protocol):
    """A legacy client, whichever transport it uses. No method waits, and none raises."""

    def send(self, message: bytes, related_to: RequestId | None) -> None:
        """Send a message on the stream of a request of the client, else on the standalone stream.

        A response ends the stream of its request, whatever `related_to` says.
        """

    def refuse(self, request: RequestId, error: GatewayError) -> None:
        """Answer a request with an error; over HTTP with its status and headers, if the reply has not begun."""

    def forget(self, request: RequestId) -> None:
        """A request that the client has cancelled gets no response."""

    def ended(self) -> None:
        """The session is over: each request that is still open is answered with an error first."""


class Backend(Protocol):
    """What serves one session of a legacy client."""

    def receive(self, message: ClientMessage) -> None:
        """Take a message of the client; raises GatewayError if it cannot be taken, before it had any effect."""

    async def close(self) -> None:
        """The client has left, or its session is over: free everything."""


Connect = Callable[[ClientLink], Backend]
"""Makes the backend of a new session; it opens nothing before it receives `initialize`."""
