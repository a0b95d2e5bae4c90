"""One request to another replica, whose reply is relayed to the client frame by frame, or answers a question."""

import asyncio
from typing import Final

from gateway import world
from gateway.cluster.peer_errors import PeerReplaced, PeerStuck, ReplyBroken
from gateway.cluster.worker import host_of
from gateway.config import Timeouts
from gateway.http.outbox import FinalMessage
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.connection import PendingRequest
from gateway.http_client.errors import RequestFailed
from gateway.protocol import reply_messages
from gateway.protocol.errors import InvalidState, OwnerSilent
from gateway.runtime.pieces import Turn, cut
from gateway.seal import peer_messages as messages
from gateway.seal.peer_messages import End, Frames, PeerRequest, Whole
from gateway.telemetry import COMPLETE, Ending, Outcome

_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
_LATE_SECONDS: Final = 0.5
"""How much later than it was asked to a member may end its leg; the drain leaves time to say that it did not."""


class PeerExchange:
    """The request, its reply as it arrives, and what has been relayed of that."""

    def __init__(self, peer_request: PeerRequest, frames: Frames, timeouts: Timeouts) -> None:
        """`frames` decodes the reply."""
        self.peer_request = peer_request
        self.frames = frames
        self.reply = AwaitedReply()
        self._timeouts = timeouts
        self._is_late = False
        self.is_connected = True
        """False if there was no connection until the deadline."""
        self._head: messages.Head | None = None
        self._body = bytearray()
        """What has come of a body, or of a stream's event that is not complete."""
        self._is_answered = False
        """Whether the client has got the response in a stream, so that nothing may follow it."""

    @property
    def is_sent(self) -> bool:
        """Whether the peer may have received the request: it has reacted to its head."""
        return not self.reply.pending.awaits_continue

    async def accepted(self, pending: PendingRequest) -> None:
        """Wait until the peer accepts the request, not too long; raises TimeoutError or RequestFailed."""
        seconds = self._timeouts.peer_connect_seconds + self._timeouts.peer_accept_seconds
        # Not by asyncio.timeout: it would cancel the wait, and the request would forget how far it had come.
        timer = asyncio.get_running_loop().call_later(seconds, self._expire)
        try:
            _ = await self.reply.begun(pending)
        except RequestFailed as exc:
            if self._is_late:
                raise TimeoutError from exc
            raise
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._is_late, self.is_connected = True, not self.reply.pending.is_connecting
        self.reply.cut()

    async def relay(self, reply: ReplyWriter, ends_at: float | None) -> Response:
        """Relay the whole reply; raises PeerReplaced, ReplyBroken, PeerStuck, or OwnerSilent.

        `ends_at`: the monotonic time by which the peer was asked to end its leg, because this process ends.
        """
        try:
            while True:
                chunk = self.reply.taken() or await self._next(ends_at)
                turn = Turn()
                # Each frame has to be decrypted: many at once would hold the event loop.
                for piece in cut(chunk):
                    for frame in self.frames.feed(piece):
                        replied = await self._take(frame, reply)
                        if replied is not None:
                            return replied
                    await turn.give_way()
        except (InvalidState, ReplyBroken, PeerStuck) as exc:
            if self._is_answered:  # only the end is missing; the peer, asked again, would send the response again
                return await reply.end(COMPLETE)
            if isinstance(exc, InvalidState):
                raise ReplyBroken(f"{self.peer_request.to}: {exc.reason}") from exc
            raise

    async def _next(self, ends_at: float | None) -> bytes:
        # The peer sends the keep-alives of the client's stream, so it is never silent for longer than this.
        silence_seconds = 2 * self._timeouts.keepalive_seconds + self._timeouts.peer_accept_seconds
        if ends_at is not None:
            silence_seconds = min(silence_seconds, max(0.0, ends_at + _LATE_SECONDS - world.monotonic()))
        try:
            async with asyncio.timeout(silence_seconds):
                return await anext(self.reply)
        except TimeoutError as exc:
            if (came := self.reply.taken()) == b"":
                raise PeerStuck(self.peer_request.to) from exc
            return came  # this process stood still itself, and finds what came meanwhile
        except StopAsyncIteration as exc:
            raise ReplyBroken(f"{self.peer_request.to} ended its reply half-way") from exc
        except RequestFailed as exc:
            raise ReplyBroken(f"{self.peer_request.to}: {type(exc).__name__}") from exc

    async def _take(self, frame: messages.Frame, reply: ReplyWriter) -> Response | None:
        """Relay one frame; return the reply if it was the last frame."""
        head, member = self._head, self.peer_request.to
        match frame:
            case messages.Gone(id=host) if host == host_of(member):
                raise PeerReplaced(member)
            case messages.Gone(id=host):
                why = f"cannot be reached (the replica {host} answers at its address; correct replica.peers)"
                raise OwnerSilent(member, why, is_local=True)
            case Whole() if head is None:
                return await reply.whole(FinalMessage(frame.data, frame.status, dict(frame.headers), ending(frame)))
            case messages.Head():
                self._head = frame
                if frame.streamed and not reply.started:  # a replica that died may have begun the stream
                    await reply.start()
            case messages.Data(data=data):
                self._body += data
                # A part of an event would spoil what another try, or another replica, sends behind it.
                if head is not None and head.streamed and self._body.endswith(b"\n\n"):
                    events, self._body = bytes(self._body), bytearray()
                    await reply.write(events)
                    said = reply_messages.messages(reply_messages.EVENT_STREAM, events)
                    self._is_answered |= any(map(reply_messages.is_response, said))
            case End() if head is not None:
                if head.streamed:
                    return await reply.end(ending(frame))
                whole = FinalMessage(bytes(self._body), head.status, dict(head.headers), ending(frame))
                return await reply.whole(whole)
            case _:
                raise ReplyBroken(f"{member} sent a frame that does not belong in a reply")
        return None


def ending(end: End | Whole) -> Ending:
    """Labels for the metrics; an outcome that only a newer replica knows counts as an error, its reply is complete."""
    return Ending(_OUTCOMES.get(end.outcome, Outcome.ERROR), end.error_type)
