"""One request of a client whose sessions or calls any replica may serve."""

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Raw

from gateway import world
from gateway.cluster.peer_exchange import Replied
from gateway.cluster.router import Router, TakeOver
from gateway.http.reply import OneStream
from gateway.legacy_front.arrival import Arrival
from gateway.mirror.streamable.tokens import CallPlace, NestedId, NoSession, Session, Tokens
from gateway.mirror.tool_catalog import CallerKey
from gateway.protocol import jsonrpc
from gateway.protocol.errors import InvalidRequest, InvalidState
from gateway.telemetry import Step
from gateway.upstream.channel import Headers


class MirrorArrival(Arrival, frozen=True, eq=False):
    """A request of a mirrored session, or of SEP-1442."""

    headers: Headers
    """The headers that go upstream."""

    @property
    def caller_key(self) -> CallerKey:
        """The caller, as the catalog of tools knows it."""
        return self.incoming.path, self.caller.principal

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a token that is rejected."""
        try:
            yield
        except (InvalidState, NoSession) as exc:
            self.live.process.metrics.state_rejected(exc.reason)
            raise

    def session(self, token: str, tokens: Tokens) -> Session:
        """The session whose id the request brings; raises NoSession."""
        with self.counted():
            seconds = self.live.config.state.session_ttl_seconds
            return tokens.session(token, self.bearer, seconds)

    def nested(self, message: jsonrpc.Message, tokens: Tokens, session: Session) -> NestedId:
        """The nested request that a response answers; raises InvalidRequest."""
        token = jsonrpc.text(message.id) if isinstance(message.id, Raw) else None
        try:
            with self.counted():
                return tokens.asked(token or "", session)
        except InvalidState as exc:
            raise InvalidRequest("The id of this response is not that of a request of the gateway") from exc

    def new_place(self, session: str, exchange: str) -> CallPlace:
        """The place of a call that this process holds."""
        process = self.live.process
        return CallPlace(session, exchange, process.owner, process.epoch, world.wall())

    def holds(self, place: CallPlace) -> bool:
        """Whether this process holds the call, or held it."""
        return self.live.process.is_own(place.owner, place.epoch)

    async def route(self, router: Router, place: CallPlace) -> Replied | TakeOver:
        """Have the owner of a call serve the request, or have this process take the call over, as `Router.route`."""
        found = await router.route(place, self.incoming, OneStream(self.reply))
        if not isinstance(found, TakeOver):
            self.continued(Step.FORWARDED)
        return found

    def continued(self, step: Step) -> None:
        """Count how the request found its call, but only at the replica that the client reached."""
        if step is not Step.FORWARDED or self.incoming.peer_request is None:
            self.live.process.metrics.continued(self.live.route.path, step)
