"""Forwards the requests of a session to the process that has it.

A request is sent there once. If that process has ended, its sessions have ended too, and clients begin new ones.
"""

from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Raw
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.cluster.membership import Membership
from gateway.cluster.peer_client import PeerClient
from gateway.cluster.peer_errors import PeerDead, PeerReplaced, ReplyBroken
from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply, ReplyWriter, WrappedReply
from gateway.http.server.response import Response
from gateway.legacy_front.session import session_gone
from gateway.legacy_front.session_ids import SessionId
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import CallLost, OwnerStalled, Stopping
from gateway.protocol.jsonrpc import request_id
from gateway.telemetry import COMPLETE

_EVENT_BYTES: Final = 1 << 30
"""The owner has applied the limit of the configuration."""


class Forwarding:
    """The way from this process to the sessions of others."""

    def __init__(self, membership: Membership, peers: PeerClient) -> None:
        self._membership = membership
        self._peers = peers

    async def forward(self, session: SessionId, given: str, incoming: Incoming, reply: ReplyWriter) -> Response:
        """Have the owner serve a request; raises GatewayError, or PeerFailed for a request of another replica."""
        self._check_hop(session, incoming)
        watched = _WatchedReply(reply, incoming.rpc_id)
        is_hop = incoming.peer_request is not None
        try:
            response, _ = await self._peers.forward_once("session", session.owner, _named(incoming, given), watched)
        except (PeerDead, PeerReplaced) as exc:
            raise PeerReplaced(session.owner) if is_hop else session_gone() from exc
        except ReplyBroken as exc:
            if is_hop:
                raise
            return await self._broken(watched, reply, incoming, exc)
        except OwnerStalled as exc:
            raise _stalled(session.owner) from exc
        return response

    def _check_hop(self, session: SessionId, incoming: Incoming) -> None:
        """Raise PeerReplaced or `session_gone` if no other process can have the session: its own one has ended."""
        own, peer_request = self._membership.own, incoming.peer_request
        if peer_request is None:
            if session.owner == own:
                raise session_gone()
            return
        if peer_request.to == own:
            raise PeerReplaced(own)  # one hop always suffices, but for that to another worker of this host

    async def _broken(
        self, watched: "_WatchedReply", reply: ReplyWriter, incoming: Incoming, cause: ReplyBroken
    ) -> Response:
        """End a reply that the owner did not complete: a request gets its one response."""
        if watched.is_answered:
            return await reply.end(COMPLETE)
        if incoming.rpc_id is None and reply.started:
            assert isinstance(reply, HttpReply), "a request of another replica is not served like this"
            reply.cut_short()  # the client opens its stream again
            raise ConnectionResetError("the replica that has the session broke off its stream") from cause
        error = CallLost("The replica that has this session broke off its reply; the request may have had effects")
        error.status = 502
        raise error from cause


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


class _WatchedReply(WrappedReply):
    """A reply on its way through; it notes whether the response to the request has gone by."""

    def __init__(self, reply: ReplyWriter, request: bytes | None) -> None:
        super().__init__(reply)
        self._request = None if request is None else request_id(Raw(request))
        self._parser = sse.Parser(_EVENT_BYTES)
        self.is_answered = False

    async def start(self) -> None:
        await super().start()
        self.started = True

    async def write(self, data: bytes) -> None:
        await super().write(data)
        if self._request is not None:
            for event in self._parser.feed(data):
                self._note(event.data)

    def _note(self, data: bytes) -> None:
        with suppress(ValueError):
            opened = jsonrpc.message(data)
            is_own = isinstance(opened.id, Raw) and request_id(opened.id) == self._request
            self.is_answered = self.is_answered or (opened.method is None and is_own)
