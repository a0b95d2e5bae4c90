"""One call of the dialect with the stream on which its client waits.

The paper has no way to come back to a stream, so a call ends with its stream. A question is a request on it, whose id
leads an answer here from any replica.
"""

from msgspec import Raw
from msgspec.structs import replace

from gateway import world
from gateway.exchange.input_requests import Question
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.call_rounds import Rounds
from gateway.mirror.client_requests import LegacyRequest
from gateway.mirror.server_client import ServerClient
from gateway.mirror.streamable.streamed_call import Shared, StreamedCall
from gateway.mirror.streamable.tokens import CallPlace, MirroredSession
from gateway.plugins.sep_1442.own_server import OwnServer
from gateway.plugins.sep_1442.vocabulary import Declared
from gateway.protocol import jsonrpc, mcp


class StatelessCall(StreamedCall):
    """One call of this replica."""

    is_in_session = False

    def __init__(  # noqa: PLR0913  (what one call consists of)
        self,
        shared: Shared,
        at: Arrival,
        binding: MirroredSession,
        request: LegacyRequest,
        declared: Declared,
        server: ServerClient,
        session: MirroredSession | None,
    ) -> None:
        """`binding` is what the ids of nested requests are bound to, and `session` that of the client."""
        self._bridge = server if isinstance(server, OwnServer) else None
        """Set if this gateway serves the rounds, which then need all headers of the client."""
        self.streams = declared.streams
        self._declared = declared
        self.is_reported = self._bridge is None  # the bridge reports the rounds of its calls itself
        self._is_held = False
        """Whether the server waits for answers."""
        exchange = world.token_urlsafe(9)
        key = exchange if session is None else session.key  # without a session, any client may use the same id
        rounds = Rounds(at.live, exchange, request, binding.profile, at.headers, declared.log_level)
        super().__init__(shared, at, binding, rounds, server=server, key=key)

    # -- the client's side of the call --------------------------------------------------------------------------

    def _put(self, questions: tuple[Question, ...]) -> None:
        """Ask; the roots that came with the request are not asked for."""
        self._is_held = True
        roots = self._declared.roots
        told = () if roots is None else tuple(each for each in questions if each.method == mcp.ROOTS)
        asked = tuple(each for each in questions if each not in told)
        if asked:
            super()._put(asked)
        else:
            self.report.asked()
        for question in told:
            self.respond(question.key, Raw(b'{"roots":%b}' % bytes(roots or b"")), self._rounds.headers)

    def answer(self, asked: CallPlace, message: jsonrpc.Message, at: Arrival) -> None:
        """Take a response, which goes to a bridge with all headers of the client."""
        super().answer(asked, message, at if self._bridge is None else replace(at, headers=at.incoming.headers))

    def _move(self) -> None:
        self._is_held = False
        super()._move()

    # -- the end ------------------------------------------------------------------------------------------------

    def _ended(self) -> None:
        super()._ended()
        if self._is_held and self._bridge is not None:
            self._is_held = False
            self._bridge.give_up(self._rounds.outgoing())
