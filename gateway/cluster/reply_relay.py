"""Relays the reply of another replica to the client, frame by frame."""

import asyncio
from typing import Final

from gateway import world
from gateway.cluster.peer_connections import PeerConnections
from gateway.cluster.peer_errors import PeerReplaced, PeerStuck, ReplyBroken
from gateway.cluster.peer_exchange import PeerExchange, ending
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.http_client.errors import RequestFailed
from gateway.protocol.errors import InvalidState, OwnerSilent
from gateway.runtime.pieces import Turn, cut
from gateway.seal import peer_messages as messages
from gateway.telemetry import Ending

_WHOLE_BYTES: Final = 1 << 20
"""More is never here at once."""
_LATE_SECONDS: Final = 0.5
"""How much later than it was asked to a member may end its leg; the drain leaves time to say that it did not."""
Replied = tuple[Response, Ending]


class ReplyRelay:
    """One reply of the replica `member`, on its way to the client."""

    def __init__(
        self, reply: ReplyWriter, member: str, connections: PeerConnections, ends_at: float | None = None
    ) -> None:
        """`ends_at`: the monotonic time by which the member was asked to end its leg, because this process ends."""
        self._ends_at = ends_at
        self._reply = reply
        self._member = member
        self._connections = connections
        self._head: messages.Head | None = None
        self._body = bytearray()

    async def run(self, arriving: PeerExchange) -> Replied:
        """Relay the whole reply; raises PeerReplaced, ReplyBroken, PeerStuck, or OwnerSilent."""
        frames = arriving.frames()
        try:
            while True:
                chunk = arriving.whole_at_most(_WHOLE_BYTES)
                if chunk is None:
                    chunk = await self._next(arriving)
                elif not chunk:
                    raise ReplyBroken(f"{self._member} ended its reply half-way")
                turn = Turn()
                for piece in cut(chunk):
                    for frame in frames.feed(piece):
                        replied = await self._take(frame)
                        if replied is not None:
                            return replied
                    await turn.give_way()
        except InvalidState as exc:
            raise ReplyBroken(f"{self._member}: {exc.reason}") from exc

    async def _next(self, arriving: PeerExchange) -> bytes:
        timeouts = self._connections.timeouts
        # The peer sends the keep-alives of the client's stream, so it is never silent for longer than this.
        silence_seconds = 2 * timeouts.keepalive_seconds + timeouts.peer_accept_seconds
        if self._ends_at is not None:
            left = self._ends_at + _LATE_SECONDS - world.monotonic()
            silence_seconds = min(silence_seconds, max(0.0, left))
        try:
            async with asyncio.timeout(silence_seconds):
                return await anext(arriving)
        except TimeoutError as exc:
            raise PeerStuck(self._member) from exc
        except StopAsyncIteration:
            return b""
        except RequestFailed as exc:
            raise ReplyBroken(f"{self._member}: {type(exc).__name__}") from exc

    async def _take(self, frame: messages.Frame) -> Replied | None:
        """Relay one frame; return the reply if it was the last frame."""
        reply, head = self._reply, self._head
        match frame:
            case messages.Gone(id=id_):
                raise self._replaced_by(id_)
            case messages.Whole() if head is None:
                ended = ending(frame)
                return await reply.whole(frame.data, frame.status, dict(frame.headers), ended), ended
            case messages.Head():
                self._head = frame
                if frame.streamed and not reply.started:
                    await reply.start()
            case messages.Data(data=data) if head is not None and head.streamed:
                await reply.write(data)
            case messages.Data(data=data):
                self._body += data
            case messages.End() if head is not None:
                ended = ending(frame)
                if head.streamed:
                    return await reply.end(ended), ended
                return await reply.whole(bytes(self._body), head.status, dict(head.headers), ended), ended
            case _:
                raise ReplyBroken(f"{self._member} sent a frame that does not belong in a reply")
        return None

    def _replaced_by(self, host: str) -> PeerReplaced | OwnerSilent:
        """The error for a reply from another process than the one asked."""
        if not host or host == self._member.partition("#")[0]:
            return PeerReplaced(self._member)
        why = f"cannot be reached (the replica {host} answers at its address; correct replica.peers)"
        return OwnerSilent(self._member, why, is_local=True)
