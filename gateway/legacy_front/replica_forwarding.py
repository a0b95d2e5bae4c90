"""Forwards the requests of a session to the process that has it.

A request is sent there once. If that process has ended, its sessions have ended too, and clients begin new ones.
"""

from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.cluster.peer_errors import ReplyBroken
from gateway.http.reply import ReplyWriter, WrappedReply
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.legacy_front.session import session_gone
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallLost, OwnerStalled, Stopping
from gateway.protocol.jsonrpc import request_id
from gateway.telemetry import COMPLETE

_EVENT_BYTES: Final = 1 << 30
"""The owner has applied the limit of the configuration."""


async def forward(at: Arrival, owner: str, given: str) -> Response:
    """Have the owner of a session serve a request; raises GatewayError, or PeerFailed for one of another replica.

    `given` is the id of the session.
    """
    incoming, reply = at.incoming, at.reply
    watched = _WatchedReply(reply, incoming.rpc_id)
    headers = CIMultiDict(incoming.headers)
    headers[mcp.SESSION_ID] = given  # a client of HTTP+SSE has it in its address
    # `known` has the values of the client's own headers.
    named = msgspec.structs.replace(incoming, headers=CIMultiDictProxy(headers), known=None)
    try:
        replied = await at.live.process.router.to_holder(owner, named, watched)
    except ReplyBroken as exc:
        if incoming.peer_request is not None:
            raise
        if watched.is_answered:  # an error would be a second response
            return await reply.end(COMPLETE)
        raise CallLost(
            "The replica that has this session broke off its reply; the request may have had effects", status=502
        ) from exc
    except OwnerStalled as exc:
        stalled = Stopping(  # no 404, which would end a session that may live on
            f"The replica {owner} that has this session does not react; send the request again",
            data={"reason": "owner_stalled"},
        )
        stalled.headers = {"Retry-After": "1"}
        raise stalled from exc
    if replied is None:
        raise session_gone()
    return replied


class _WatchedReply(WrappedReply):
    """A reply on its way through; it notes whether the response to the request has gone by."""

    def __init__(self, reply: ReplyWriter, request: bytes | None) -> None:
        super().__init__(reply)
        self._request = None if request is None else request_id(Raw(request))
        self._parser = sse.Parser(_EVENT_BYTES)
        self.is_answered = False

    async def write(self, data: bytes) -> None:
        await super().write(data)
        if self._request is not None:
            for event in self._parser.feed(data):
                with suppress(ValueError):
                    opened = jsonrpc.message(event.data)
                    self.is_answered |= opened.method is None and opened.rpc_id == self._request

    def orphaned(self) -> None:
        """See `ReplyWriter`: a stream can be opened again, but a request gets its one response."""
        if self._request is None and self.started:
            self.break_off()
