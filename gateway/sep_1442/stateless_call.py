"""One call of the dialect with the stream on which its client waits.

The paper has no way to come back to a stream, so a call ends with its stream. A question is a request on it, whose id
leads an answer here from any replica.
"""

from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from gateway import world
from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response
from gateway.mirror.call_rounds import MirroredCall, Question, Request
from gateway.mirror.call_runner import Runner
from gateway.mirror.modern_server import Outgoing
from gateway.mirror.streamable import reply_stream
from gateway.mirror.streamable.call_report import CallReport
from gateway.mirror.streamable.mirror_arrival import MirrorArrival
from gateway.mirror.streamable.tokens import Nested, Session, Tokens
from gateway.mirror.upstream import Upstream
from gateway.protocol import jsonrpc, mcp, sse
from gateway.protocol.errors import GatewayError
from gateway.runtime.call_bytes import Weight
from gateway.runtime.own_ids import new_id
from gateway.sep_1442.own_server import OwnServer
from gateway.sep_1442.vocabulary import Declared
from gateway.telemetry import Ending, Outcome
from gateway.upstream.channel import NO_HEADERS, Headers

_NOT_FOUND: Final = 404
_NO_RESPONSE: Final = FinalMessage(b"", ending=Ending(Outcome.CANCELLED))
"""Ends the stream of a call that its client has cancelled."""


class StatelessCall:
    """One call of this replica (`Hears`, `Parked`)."""

    kept_bytes = 0

    def __init__(  # noqa: PLR0913  (what one call consists of)
        self,
        at: MirrorArrival,
        session: Session,
        request: Request,
        declared: Declared,
        upstream: Upstream,
        tokens: Tokens,
        weight: Weight,
    ) -> None:
        """`session` is what the ids of nested requests are bound to. `weight` is released when the call is served."""
        self._weight = weight
        self.id = exchange = world.token_urlsafe(9)
        self.principal = at.caller.principal
        self.bridge = bridge = upstream.server if isinstance(upstream.server, OwnServer) else None
        """Set if this gateway serves the rounds, which then need all headers of the client."""
        self._place = at.new_place(session.key, exchange)
        self._request = request
        self._declared = declared
        self._tokens = tokens
        self._request_id = request_id = at.incoming.request_id
        self._call = MirroredCall(request, declared.profile, exchange, drives_tasks=upstream.drives_tasks)
        live = at.live
        # The bridge reports the rounds of its calls itself.
        self._report = CallReport(live, session, self._call) if bridge is None else None
        self._runner = Runner(self._call, upstream, self, lambda: declared.log_level)
        behind_bytes = live.config.limits.behind_bytes
        self._queue = ResponseQueue(Raw(request.id), live.deadlines.silence, behind_bytes, request_id)
        self._headers: Headers = NO_HEADERS
        self._is_held = False
        """Whether the server waits for answers."""

    # -- the client's side of the call (`Hears`) ----------------------------------------------------------------

    def notify(self, message: bytes) -> None:
        """See `Hears`."""
        if self._declared.streams:
            self._queue.send(sse.encode(message))

    def ask(self, questions: tuple[Question, ...]) -> None:
        """See `Hears`."""
        self._is_held = True
        self._weigh()
        if self._report is not None:
            self._report.asked(questions)
        for question in questions:
            if question.method == mcp.ROOTS and self._declared.roots is not None:
                told = Raw(b'{"roots":%b}' % bytes(self._declared.roots))
                self._runner.answer(question.key, jsonrpc.Message("2.0", result=told), self._headers)
            else:
                place = replace(self._place, issued=world.wall())
                id_ = self._tokens.nested_id(Nested(place, self._call.progress.round, question.key))
                self._queue.ask(sse.encode(question.asked(id_)))

    def sending(self) -> Headers:
        """See `Hears`."""
        self._is_held = False
        self._weigh()
        return NO_HEADERS if self._report is None else self._report.sending()

    def end(self, message: bytes) -> None:
        """See `Hears`."""
        error = jsonrpc.message(message).error
        is_unknown = isinstance(error, Raw) and jsonrpc.error(error).code == mcp.METHOD_NOT_FOUND
        self._queue.finish(FinalMessage(message, _NOT_FOUND if is_unknown else 200))
        if self._report is not None:
            self._report.finished()

    def fail(self, error: GatewayError) -> None:
        """See `Hears`."""
        self._queue.finish(FinalMessage.of_error(error, self._request.id, self._request_id))
        if self._report is not None:
            self._report.failed(error)

    # -- from the client ----------------------------------------------------------------------------------------

    async def serve(self, headers: Headers, reply: ReplyWriter) -> Response:
        """Run the call, and write its messages until its response."""
        self._headers = headers
        try:
            self._runner.run(headers)
            last = await reply_stream.write(self._queue, reply, keeps_alive=self._declared.streams)
            return (await reply_stream.finish(reply, last))[0]
        finally:
            self._left()

    def _left(self) -> None:
        """The stream is over, so nobody can answer any more."""
        self._runner.cancel()
        if self._report is not None:
            self._report.abandoned()
        if self._is_held and self.bridge is not None:
            request = self._request
            id_ = new_id()
            body = self._call.sent(id_, None)
            self.bridge.give_up(Outgoing(id_, body, request.method, request.target, self._headers))

    def answer(self, nested: Nested, message: jsonrpc.Message, headers: Headers) -> None:
        """Take a response to a nested request; one to a question that is not open any more is dropped."""
        question = self._call.open.get(nested.key)
        if nested.round == self._call.progress.round and question is not None:
            if self._report is not None:
                self._report.answered(question)
            self._headers = headers
            self._runner.answer(nested.key, message, headers)
            self._weigh()

    def _weigh(self) -> None:
        """Weigh what the call keeps now; while a round is upstream, it keeps the request that went there too."""
        self._weight.change(self._call.kept_bytes * (2 if self._runner.is_running else 1))

    def cancel(self) -> None:
        """End the call without a response, unless it has one."""
        self._end(_NO_RESPONSE)

    def stop(self, error: GatewayError) -> None:
        """End the call with an error, unless it has its response."""
        self._end(FinalMessage.of_error(error, self._request.id, self._request_id))

    def _end(self, final: FinalMessage) -> None:
        if not self._runner.is_over:
            self._runner.cancel()
            self._queue.finish(final)

    def forget(self) -> None:
        """See `Parked`; nothing is kept."""
