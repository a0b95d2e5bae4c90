"""Passes modern requests to a modern server where one of both speaks stdio, unchanged but for the ids of a child's.

A child sees no headers, so what they repeat of the body is compared here.
"""

from typing import Final

from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage, Outbox, ending_of
from gateway.http.server.response import Response, WholeResponse
from gateway.http.upstream_headers import own_headers, with_request_id
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.server_client import ModernRequest, RouteServer, is_modern
from gateway.passthrough.passage import Passage
from gateway.protocol import header_mismatch, jsonrpc, mcp, sse
from gateway.protocol.errors import CallLost, GatewayError, InvalidParams, UpstreamError
from gateway.protocol.request import ParsedBody
from gateway.routes.live_route import LiveRoute
from gateway.runtime.tasks import telling
from gateway.telemetry import COMPLETE, Passed, TrafficEra
from gateway.upstream.channel import NO_HEADERS, Headers, Hearer

_STATUSES: Final = {
    mcp.METHOD_NOT_FOUND: 404,
    mcp.INVALID_REQUEST: 400,
    mcp.PARSE_ERROR: 400,
    mcp.MISSING_CAPABILITY: 400,
    mcp.UNSUPPORTED_VERSION: 400,
}
"""The HTTP statuses of a modern server's errors; any other error is HTTP 200."""


async def serve(at: Arrival) -> Response | None:
    """Return the server's reply; None if the server is not modern."""
    incoming, live, era = at.incoming, at.live, at.live.upstream.era
    if era is not None and era.known is None and live.upstream.pool.served > float("-inf"):
        # No probe could tell its era, but it has served a session, as legacy servers do: a host would wait for another
        # probe at every request.
        return None
    if not await is_modern(live, _headers(incoming, live)):
        return None
    parsed = incoming.parsed()
    if parsed.id is None:
        return WholeResponse(status=202)  # closing the response is what cancels
    live.process.draining.check("call again", is_stream=parsed.method == mcp.LISTEN)
    version = jsonrpc.text((parsed.meta or {}).get(mcp.META_VERSION))
    if version is None:
        raise InvalidParams(f'"params._meta" needs {mcp.META_VERSION!r}, a string like {mcp.MODERN!r}')
    if incoming.has_headers:
        header_mismatch.check(parsed.method, parsed.target, version, incoming.headers)
    with StdioPassage(at, parsed) as passage:
        return await passage.run()


def _headers(incoming: Incoming, live: LiveRoute) -> Headers:
    return with_request_id(live.route, own_headers(live.route), incoming.request_id)


class StdioPassage(Passage, Hearer):
    """One request with its reply."""

    copies = 2  # as it came, and with another id

    def __init__(self, at: Arrival, parsed: ParsedBody) -> None:
        super().__init__(at, TrafficEra.MODERN, is_long_lived=parsed.method == mcp.LISTEN)
        assert parsed.id is not None
        self._id, self._parsed = parsed.id, parsed
        self._reply = at.reply
        self._queue = Outbox(at.live.deadlines.silence)
        self._is_over = False

    async def run(self) -> Response:
        """Send the request, and write its messages as they come."""
        sending = self.live.process.tasks.start(self._send(), "modern request")
        try:
            last = await self._reply.deliver(self._queue, encode=sse.encode)
        finally:
            self._is_over = True
            _ = sending.cancel()
        if isinstance(last.cause, UpstreamError) and not self._reply.started:
            raise last.cause
        response = await self._reply.whole(last)
        self.outcome = Passed.ANSWERED
        self.live.upstream.health.ok()
        return response

    async def _send(self) -> None:
        live, parsed, body = self.live, self._parsed, self.incoming.body
        with telling(self._fail):
            try:
                if live.upstream.stdio is not None:
                    await live.upstream.stdio.modern.request(body, self)
                else:
                    headers = _headers(self.incoming, live)
                    request = ModernRequest(bytes(self._id), body, parsed.method, parsed.target or "", headers)
                    await RouteServer(live, self.caller.principal).send(request, self)
            except ValueError as exc:
                where = f"The server of route {live.route.path}"
                raise CallLost.by(where, f"sent a malformed response: {exc}") from exc

    def hear(self, data: bytes, /) -> bool:
        """See `Hearer`."""
        message = jsonrpc.message(data)
        if message.method is not None:
            if not self._is_over:
                self._queue.send(data)
        elif (error := message.failure) is not None:
            status = _STATUSES.get(error.code, 200)
            self._finish(FinalMessage(data, status, NO_HEADERS, ending_of(GatewayError(error.message))))
        else:
            self._finish(FinalMessage(data))
        return message.method is None

    def _fail(self, error: GatewayError) -> None:
        sender = self.live.sender(self.caller.principal)
        self._finish(FinalMessage.of_error(error, self._id, self.incoming.request_id, sender))

    def _finish(self, final: FinalMessage) -> None:
        if not self._is_over:
            self._is_over = True
            self._queue.finish(final)

    def end(self) -> None:
        """End a subscription, so that the client opens another one."""
        meta = {mcp.META_SUBSCRIPTION: self._id}
        result = jsonrpc.encode({"resultType": "complete", "_meta": meta})
        self._finish(FinalMessage(jsonrpc.result(self._id, result), 200, NO_HEADERS, COMPLETE))
