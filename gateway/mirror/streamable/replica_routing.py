"""Finds the replica that serves a request of a mirrored session.

A call is served by the replica that holds its stream; if that has died, by the first living candidate. What a session
has besides calls (its standalone stream, its subscriptions) is at its home, which every replica knows without asking:
the first living candidate of the session's key. The log level, cancellations, the end of a session go to all replicas.
"""

import asyncio
from collections.abc import Mapping

from gateway.cluster.membership import Membership
from gateway.cluster.peer_client import PeerClient
from gateway.cluster.peer_errors import PeerFailed, PeerStuck
from gateway.cluster.peer_exchange import Replied
from gateway.cluster.router import Router, TakeOver
from gateway.http.incoming import Incoming
from gateway.http.reply import NO_RESPONSE, HttpReply, ReplyWriter, WrappedReply
from gateway.http.server.response import Response
from gateway.mirror.streamable.mirror_arrival import MirrorArrival
from gateway.mirror.streamable.tokens import Place
from gateway.protocol.errors import OwnerStalled
from gateway.runtime.budget import Share
from gateway.telemetry import Ending, Step


class Replicas:
    """The other replicas, as the mirror uses them."""

    def __init__(self, membership: Membership, peers: PeerClient, routing: Router) -> None:
        self._membership = membership
        self._peers = peers
        self._routing = routing

    @property
    def own(self) -> str:
        """The id of this replica."""
        return self._membership.own

    async def route(self, at: MirrorArrival, place: Place) -> Replied | TakeOver:
        """Have the owner of a call serve a request, or have this replica take the call over.

        Raises OwnerStalled; for a request that came through another replica also PeerReplaced.
        """
        found = await self._routing.route(place, at.incoming, OneStream(at.reply))
        if isinstance(found, TakeOver):
            _check_unstarted(at.reply)
        else:
            at.continued(Step.FORWARDED)
        return found

    async def at_home(self, at: MirrorArrival, key: str) -> Replied | None:
        """Have the home of a session serve a request; None if that is this replica."""
        for member in await self._before_own(key, at.incoming):
            try:
                return await self._peers.forward("heir", member, at.incoming, OneStream(at.reply))
            except PeerStuck:
                _check_unstarted(at.reply)  # an error has no place in a standalone stream
                raise
            except (PeerFailed, OwnerStalled):
                _check_unstarted(at.reply)  # the next home must have the newest event id
        return None

    async def _before_own(self, key: str, incoming: Incoming) -> list[str]:
        """The members that come before this one as the home of a session."""
        if incoming.peer_request is None:
            candidates = await self._membership.candidates(key)
        elif incoming.peer_request.to == self.own:
            return []
        else:
            candidates = self._membership.local_candidates(key)
        return candidates[: candidates.index(self.own)]

    async def tell_all(self, incoming: Incoming) -> None:
        """Have every other replica that can be reached serve a request too."""
        if incoming.peer_request is None:
            members = list(self._membership.others())
        elif incoming.peer_request.to == self.own:
            return
        else:
            members = [member for member in self._membership.local_candidates("") if member != self.own]
        _ = await asyncio.gather(*(self._tell(member, incoming) for member in members))

    async def _tell(self, member: str, incoming: Incoming) -> None:
        try:
            _ = await self._peers.forward("heir", member, incoming, Unread())
        except (PeerFailed, OwnerStalled):
            return  # it is dead, or will not learn of this; what it serves of the session has a bound of its own


def _check_unstarted(reply: ReplyWriter) -> None:
    """Cut a reply short that has become a stream already; raises ConnectionResetError."""
    if not reply.started:
        return
    if isinstance(reply, HttpReply):
        reply.cut_short()
    raise ConnectionResetError("the replica that wrote this stream has ended")


class OneStream(WrappedReply):
    """A reply that becomes a stream only once.

    If the replica that wrote it dies, its client must come back with the newest event id that it got: another replica
    could only go on from the one in the request.
    """

    @property
    def started(self) -> bool:  # type: ignore[override]
        """Whether the reply has become a stream; raises ConnectionResetError if it is asked again after that."""
        _check_unstarted(self._reply)
        return False

    async def whole(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> Response:
        """See `ReplyWriter`."""
        return await self._reply.whole(body, status, headers, ending)


class Unread(ReplyWriter):
    """A reply that nobody reads."""

    def share_unread(self) -> Share:
        """See `ReplyWriter`; a reply of one small message needs none."""
        raise NotImplementedError

    async def start(self) -> None:
        """See `ReplyWriter`."""
        self.started = True

    async def write(self, data: bytes) -> None:
        """See `ReplyWriter`."""

    async def end(self, _: Ending) -> Response:
        """See `ReplyWriter`."""
        return NO_RESPONSE

    async def only(self, *_: object) -> Response:
        """See `ReplyWriter`."""
        return NO_RESPONSE
