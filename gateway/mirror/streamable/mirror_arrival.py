"""One request of a client whose sessions or calls any replica may serve."""

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.legacy_front.arrival import Arrival
from gateway.mirror.streamable.tokens import NoSession, Session, Tokens
from gateway.mirror.tool_catalog import CallerKey
from gateway.protocol.errors import InvalidState
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
            self.live.process.metrics.state_rejections[exc.reason,].inc()
            raise

    def session(self, token: str, tokens: Tokens) -> Session:
        """The session whose id the request brings; raises NoSession."""
        with self.counted():
            seconds = self.live.config.state.session_ttl_seconds
            return tokens.session(token, self.bearer, seconds)
