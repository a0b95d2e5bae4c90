"""A FAKE connection of a request, which notes what its reply asks of it."""

from unittest.mock import Mock

from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.connection import Connection, PendingRequest
from gateway.http_client.errors import ReplyCut
from gateway.http_client.familiar_heads import FamiliarHeads
from gateway.http_client.origin import Origin
from gateway.http_client.reply_listener import ReplyListener


class FakeCarrier(Connection):
    """The connection."""

    def __init__(self) -> None:
        super().__init__(Origin("upstream.test", 80), Mock(), FamiliarHeads())
        self.asked: list[str] = []
        self.pending: PendingRequest

    def begin(self, listener: ReplyListener) -> PendingRequest:
        self.pending = PendingRequest(self.origin, listener)
        self.pending.carrier = self
        return self.pending

    def awaited(self) -> AwaitedReply:
        """The reply to a request on this connection."""
        reply = AwaitedReply()
        reply.pending = self.begin(reply)
        return reply

    def abort(self) -> None:
        self.asked.append("abort")

    def pause_reading(self) -> None:
        self.asked.append("pause")

    def resume_reading(self) -> None:
        self.asked.append("resume")

    def distrust(self) -> None:
        self.asked.append("distrust")

    def end(self) -> None:
        self.pending.end().on_end()

    def cut(self) -> None:
        self.pending.end().on_failed(ReplyCut())
