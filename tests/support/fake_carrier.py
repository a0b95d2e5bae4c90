"""A FAKE connection of a request, which notes what its reply asks of it."""

from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import ReplyCut
from gateway.http_client.origin import Origin
from gateway.http_client.pending_request import PendingRequest, ReplyListener


class FakeCarrier:
    """The connection."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.pending: PendingRequest

    def begin(self, listener: ReplyListener) -> PendingRequest:
        self.pending = PendingRequest(Origin("upstream.test", 80), listener)
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
