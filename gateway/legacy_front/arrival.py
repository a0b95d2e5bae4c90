"""One request of a legacy client, on its way to what serves it."""

import msgspec
from msgspec import Raw

from gateway.http.incoming import Caller, Incoming
from gateway.http.outbox import FinalMessage
from gateway.http.reply import HttpReply, ReplyWriter
from gateway.http.server.response import Response
from gateway.http.upstream_headers import for_call, with_request_id
from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc, request
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.reply_messages import is_response
from gateway.routes.live_route import LiveRoute
from gateway.seal.claims import Bearer
from gateway.upstream.channel import NO_HEADERS, Headers


class Arrival(msgspec.Struct, frozen=True, eq=False):
    """A request with the reply to it, and what was found out about both."""

    incoming: Incoming
    reply: ReplyWriter
    live: LiveRoute
    caller: Caller
    headers: Headers = NO_HEADERS
    """The headers that go upstream, once they are chosen."""

    def http_reply(self) -> HttpReply:
        """The reply to a client of this replica."""
        assert isinstance(self.reply, HttpReply), "no other replica forwards such a request"
        return self.reply

    @property
    def bearer(self) -> Bearer:
        """Who brings the claims in the request, or gets those in the reply."""
        return self.incoming.bearer(self.caller)

    def message(self) -> ClientMessage:
        """The message in the body, with the headers that go upstream; raises ParseError or InvalidRequest."""
        incoming, route = self.incoming, self.live.route
        message = self.opened()
        headers = for_call(route, incoming.headers, self.caller.distrusted_header)
        sent = with_request_id(route, headers, incoming.request_id)
        return ClientMessage(incoming.body, message, sent, incoming.request_id)

    def opened(self) -> jsonrpc.Message:
        """The message alone; raises ParseError or InvalidRequest."""
        body = self.incoming.body
        _ = request.members(body)  # refuses a repeated key, of which two readers may take another value
        try:
            message = jsonrpc.message(body)
        except ValueError as exc:
            raise InvalidRequest(f"The body is not a JSON-RPC message: {exc}") from exc
        if message.jsonrpc != "2.0":
            raise InvalidRequest('"jsonrpc" must be "2.0"')
        if isinstance(message.id, Raw) and not jsonrpc.is_id(message.id):
            raise InvalidRequest('"id" must be a string or an integer')
        answers = is_response(message)
        if (message.method is None) is not answers or (answers and not isinstance(message.id, Raw)):
            raise InvalidRequest("The message is neither a request, nor a notification, nor a response")
        return message

    async def accept(self) -> Response:
        """Reply that a notification or a response was taken."""
        return await self.reply.only(FinalMessage(b"", 202))
