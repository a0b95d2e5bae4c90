"""This gateway as the modern server of the dialect's calls: their rounds are bridged like those of modern clients."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.cluster.peer_errors import PeerFailed
from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.http.reply import MessageReply, ReplyWriter
from gateway.http.server.response import Response, WholeResponse
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.server_client import ModernRequest
from gateway.protocol import jsonrpc, mcp, reply_messages
from gateway.protocol.errors import CallLost, GatewayError
from gateway.runtime.budget import Share
from gateway.upstream.channel import Hearer

_PLAIN: Final = (200, 400, 404)
"""Statuses that tell a client no more than the error in the body does."""


Serve = Callable[[Incoming, ReplyWriter], Awaitable[Response]]
"""Serves a request of 2026-07-28."""


class OwnServer(msgspec.Struct, frozen=True, eq=False):
    """A `ServerClient` for the rounds of one request."""

    serve: Serve
    end: Callable[[Incoming], None]
    """Ends the call whose next round a request would be."""
    at: Arrival

    async def send(self, request: ModernRequest, hearer: Hearer) -> None:
        """See `ServerClient`."""
        reply = _Messages(hearer, self.at.reply, self.at.live.config.limits.event_bytes)
        with suppress(ConnectionError, PeerFailed):  # then there is no response
            _ = await self.serve(self._modern(request), reply)
        if reply.error is not None:
            raise reply.error
        if not reply.is_over:
            raise CallLost("The gateway lost the call; it may have had effects")

    def give_up(self, request: ModernRequest) -> None:
        """End the call that waits for this request, which will not be sent."""
        self.end(self._modern(request))

    def _modern(self, request: ModernRequest) -> Incoming:
        """A round, with the headers of 2026-07-28 in place of those of the client."""
        came = self.at.incoming
        kept = ((name, value) for name, value in request.headers.items() if not name.lower().startswith("mcp-"))
        return Incoming(
            came.path,
            CIMultiDictProxy(CIMultiDict([*kept, *request.repeated.items()])),
            came.remote,
            body=request.body,
            request_id=came.request_id,
            exchange_id=came.exchange_id,
            caller=came.caller,
            has_headers=False,
        )


class _Messages(MessageReply):
    """A reply whose messages are handed over."""

    def __init__(self, hearer: Hearer, reply: ReplyWriter, event_bytes: int) -> None:
        super().__init__(event_bytes)
        self._hearer = hearer
        self._reply = reply
        self.is_over = False
        self.error: GatewayError | None = None
        """Why there is no response."""

    def share_unread(self) -> Share:
        return self._reply.share_unread()

    async def take(self, message: bytes) -> None:
        """Hand one message over."""
        try:
            self.is_over |= reply_messages.is_response(jsonrpc.message(message))
            _ = self._hearer.hear(message)
        except (ValueError, RecursionError) as exc:
            self.error = CallLost(f"The server's answer is malformed ({exc}); the call may have had effects")

    async def only(self, final: FinalMessage) -> Response:
        if final.status in _PLAIN:
            return await super().only(final)
        # Its status or headers tell the client what to do, such as to sign in.
        said = jsonrpc.message(final.body).failure or jsonrpc.Error(mcp.INTERNAL_ERROR, "The call failed")
        data: Any = jsonrpc.value(said.data) if isinstance(said.data, Raw) else None
        shown = data if isinstance(data, dict) else None
        self.error = error = GatewayError(said.message, data=shown, status=final.status)
        error.brief = ""  # it is one already
        error.code = said.code
        error.headers.update(final.headers)
        return WholeResponse()
