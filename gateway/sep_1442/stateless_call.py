"""One call of the dialect with the stream on which its client waits.

The paper has no way to come back to a stream, so a call ends with its stream. A question is a request on it, whose id
leads an answer here from any replica.
"""

from typing import Any, Final

from msgspec import Raw

from gateway import world
from gateway.http.outbox import FinalMessage
from gateway.mirror.call_rounds import Question, Request
from gateway.mirror.server_client import ModernRequest, ServerClient
from gateway.mirror.streamable.call_report import CallReport
from gateway.mirror.streamable.mirror_arrival import MirrorArrival
from gateway.mirror.streamable.streamed_call import Shared, StreamedCall
from gateway.mirror.streamable.tokens import Session
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError
from gateway.runtime.own_ids import new_id
from gateway.sep_1442.own_server import OwnServer
from gateway.sep_1442.vocabulary import Declared
from gateway.upstream.channel import Headers

_NOT_FOUND: Final = 404


class StatelessCall(StreamedCall):
    """One call of this replica."""

    is_in_session = False

    def __init__(  # noqa: PLR0913  (what one call consists of)
        self,
        shared: Shared[Any],
        at: MirrorArrival,
        binding: Session,
        request: Request,
        declared: Declared,
        server: ServerClient,
        session: Session | None,
    ) -> None:
        """`binding` is what the ids of nested requests are bound to, and `session` that of the client."""
        self.bridge = server if isinstance(server, OwnServer) else None
        """Set if this gateway serves the rounds, which then need all headers of the client."""
        self.keeps_alive = declared.streams
        self._declared = declared
        self._client_session = session
        self._is_held = False
        """Whether the server waits for answers."""
        super().__init__(shared, at, binding, world.token_urlsafe(9), request, declared.log_level, server=server)

    def _new_report(self, at: MirrorArrival) -> CallReport:
        # The bridge reports the rounds of its calls itself.
        return CallReport(at.live, self.session, self.call, is_counted=self.bridge is None)

    @property
    def _key(self) -> tuple[str, bytes]:
        session = self._client_session
        return self.id if session is None else session.key, self.call.request.id

    @property
    def _resumes(self) -> bool:
        return False

    # -- the client's side of the call (`Hears`) ----------------------------------------------------------------

    def notify(self, message: bytes) -> None:
        """See `Hears`."""
        if self._declared.streams:
            super().notify(message)

    def ask(self, questions: tuple[Question, ...]) -> None:
        """See `Hears`; the roots that came with the request are not asked for."""
        self._is_held = True
        roots = self._declared.roots
        told = () if roots is None else tuple(each for each in questions if each.method == mcp.ROOTS)
        asked = tuple(each for each in questions if each not in told)
        if asked:
            super().ask(asked)
        self.report.asked(told)
        for question in told:
            result = Raw(b'{"roots":%b}' % bytes(roots or b""))
            self.runner.answer(question.key, jsonrpc.Message("2.0", result=result), self.runner.headers)

    def sending(self) -> Headers:
        """See `Hears`."""
        self._is_held = False
        return super().sending()

    def end(self, message: bytes) -> None:
        """See `Hears`."""
        error = jsonrpc.message(message).error
        is_unknown = isinstance(error, Raw) and jsonrpc.error(error).code == mcp.METHOD_NOT_FOUND
        self.report.finished()
        self._finish(FinalMessage(message, _NOT_FOUND if is_unknown else 200))

    # -- the end ------------------------------------------------------------------------------------------------

    def stop(self, error: GatewayError) -> None:
        """End the call with an error."""
        self.runner.cancel()
        self.report.abandoned()
        self._finish_with(error)

    def _left(self) -> None:
        """The stream is over, so nobody can answer any more."""
        if not self.runner.is_over:
            self.abandon()

    def _unregister(self) -> None:
        super()._unregister()
        if self._is_held and self.bridge is not None:
            self._is_held = False
            request, id_ = self.call.request, new_id()
            body = self.call.sent(id_, None)
            self.bridge.give_up(ModernRequest(id_, body, request.method, request.target, self.runner.headers))
