"""The background stream of SEP-1442: `messages/listen`, served from `subscriptions/listen` of 2026-07-28."""

from gateway.bridge.response_queue import ChangeQueue
from gateway.http.outbox import FinalMessage
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.change_subscription import listening
from gateway.mirror.client_requests import Profile
from gateway.mirror.server_client import ModernRequest, ServerClient
from gateway.mirror.translation import legacy_notification
from gateway.plugins.sep_1442.vocabulary import LISTENING
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import GatewayError
from gateway.runtime.tasks import telling
from gateway.upstream.channel import Headers, Hearer


class Listening(Hearer):
    """One background stream (`Endable`)."""

    def __init__(self, at: Arrival, id_: bytes) -> None:
        self._at, self._id = at, id_
        self._queue = ChangeQueue(at.live.deadlines.silence)

    async def serve(self, server: ServerClient, profile: Profile, headers: Headers) -> Response:
        """Write the changes of a server until its client leaves, or the stream is ended."""
        reply, streams = self._at.reply, self._at.live.upstream.streams
        hearing = self._at.live.process.tasks.start(self._listen(server, listening(profile, headers)), "listen")
        streams[self] = None
        try:
            return await reply.finish(await reply.deliver(self._queue))
        finally:
            _ = hearing.cancel()
            _ = streams.pop(self, None)

    async def _listen(self, server: ServerClient, request: ModernRequest) -> None:
        with telling(self._fail):
            await server.send(request, self)

    def hear(self, data: bytes, /) -> bool:
        """See `Hearer`."""
        message = jsonrpc.message(data)
        if self._queue.final is not None:
            pass
        elif message.method == mcp.ACKNOWLEDGED:
            self._queue.send(sse.encode(jsonrpc.notification(LISTENING)))
        elif message.method is not None:
            notification = legacy_notification(message, data)
            if notification is not None:
                self._queue.tell((message.method, ""), sse.encode(notification))
        elif (error := message.failure) is not None:
            status = 404 if error.code == mcp.METHOD_NOT_FOUND else 200
            self._finish(FinalMessage(jsonrpc.failure(self._id, error), status))
        else:
            self.end()
        return message.method is None

    def end(self) -> None:
        """See `Endable`."""
        self._finish(FinalMessage(jsonrpc.result(self._id, b"{}")))

    def _fail(self, error: GatewayError) -> None:
        sender = self._at.live.sender(self._at.caller.principal)
        self._finish(FinalMessage.of_error(error, self._id, self._at.incoming.request_id, sender))

    def _finish(self, final: FinalMessage) -> None:
        if self._queue.final is None:
            self._queue.finish(final)
