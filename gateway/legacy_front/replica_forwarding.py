"""Forwards the requests of a session to the process that has it.

A request is sent there once. If that process has ended, its sessions have ended too, and clients begin new ones.
"""

from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.cluster.peer_errors import ReplyBroken
from gateway.cluster.router import Router
from gateway.http.incoming import Incoming
from gateway.http.reply import OneStream, ReplyWriter
from gateway.http.server.response import Response
from gateway.legacy_front.session import session_gone
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallLost, OwnerStalled, Stopping
from gateway.protocol.jsonrpc import request_id
from gateway.telemetry import COMPLETE

_EVENT_BYTES: Final = 1 << 30
"""The owner has applied the limit of the configuration."""


async def forward(router: Router, owner: str, given: str, incoming: Incoming, reply: ReplyWriter) -> Response:
    """Have the owner of a session serve a request; raises GatewayError, or PeerFailed for one of another replica.

    `given` is the id of the session.
    """
    watched = _WatchedReply(reply, incoming.rpc_id)
    try:
        replied = await router.to_holder(owner, _named(incoming, given), watched)
    except ReplyBroken as exc:
        if incoming.peer_request is not None:
            raise
        if watched.is_answered:
            return await reply.end(COMPLETE)
        error = CallLost("The replica that has this session broke off its reply; the request may have had effects")
        error.status = 502
        raise error from exc
    except OwnerStalled as exc:
        raise _stalled(owner) from exc
    if replied is None:
        raise session_gone()
    return replied


def _stalled(owner: str) -> Stopping:
    error = Stopping(f"The replica {owner} that has this session does not react; send the request again")
    error.data = {"reason": "owner_stalled"}
    error.headers = {"Retry-After": "1"}
    return error


def _named(incoming: Incoming, given: str) -> Incoming:
    """The request with the id of its session in its headers, also if the client of HTTP+SSE has it in its address."""
    headers = CIMultiDict(incoming.headers)
    headers[mcp.SESSION_ID] = given
    return msgspec.structs.replace(incoming, headers=CIMultiDictProxy(headers), known=None)


class _WatchedReply(OneStream):
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
                self._note(event.data)

    def orphaned(self) -> None:
        """See `ReplyWriter`: a stream can be opened again, but a request gets its one response."""
        if self._request is None:
            super().orphaned()

    def _note(self, data: bytes) -> None:
        with suppress(ValueError):
            opened = jsonrpc.message(data)
            is_own = isinstance(opened.id, Raw) and request_id(opened.id) == self._request
            self.is_answered = self.is_answered or (opened.method is None and is_own)
