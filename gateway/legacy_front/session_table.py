"""The client sessions of one process, with their caps, with their idle time."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from gateway.config import Config, InForce
from gateway.http.incoming import Caller
from gateway.identity.principal import ANONYMOUS
from gateway.legacy_front.backend import Connect
from gateway.legacy_front.session import FrontSession
from gateway.legacy_front.session_ids import Front, SessionId
from gateway.protocol.errors import Busy, GatewayError
from gateway.routes.live_route import LiveRoute
from gateway.runtime.budget import Budget
from gateway.seal.claims import Claims
from gateway.telemetry import Metrics, SessionLimit

_UNPROVEN_PART: Final = 10
"""One in so many sessions may be uninitialized."""
_LEAST_UNPROVEN: Final = 8

REPLAY_BYTES: Final = 33_554_432
"""What all messages together may take that wait for clients, or that they may ask for again. Only the caller that has
the most notices the limit."""


class SessionTable:
    """Sessions by their sealed ids."""

    def __init__(self, ids: Claims[SessionId], in_force: InForce[Config], metrics: Metrics) -> None:
        self.ids = ids
        self.budget = Budget(
            "limits.replay_bytes", in_force.part(lambda config: max(REPLAY_BYTES, config.limits.event_bytes))
        )
        self._metrics = metrics
        self._sessions: dict[str, FrontSession] = {}
        self._counts: Counter[tuple[str] | tuple[str, bytes]] = Counter()
        """By the path of a route, alone or with a principal."""

    def find(self, id_: str) -> FrontSession | None:
        """Return a session that lives here."""
        return self._sessions.get(id_)

    @property
    def open_requests(self) -> int:
        """Requests of all clients that are not answered yet."""
        return sum(session.open_requests for session in self._sessions.values())

    @property
    def in_use(self) -> Iterator[tuple[str, bytes, int]]:
        """The number of sessions by the path of a route and the principal."""
        return ((key[0], key[1], count) for key, count in self._counts.items() if len(key) > 1)

    def open(self, live: LiveRoute, front: Front, id_: str, caller: Caller, connect: Connect) -> FrontSession:
        """Begin a session; raises Busy if a cap is reached."""
        pool, sessions = live.upstream.pool, live.config.sessions
        path, count = live.route.path, self._counts[live.route.path,]
        if self._counts[path, caller.principal] >= sessions.max_per_principal:
            self._metrics.sessions_refused[path, SessionLimit.OF_CALLER].inc()
            raise Busy(
                f"You have as many sessions on route {path} as one caller may have (sessions.max_per_principal); end "
                "one with DELETE, or by closing its stream",
                status=429,
                is_shared=caller.principal == ANONYMOUS,
                reached={"sessions.max_per_principal": sessions.max_per_principal},
            )
        if count >= pool.most:
            limit = pool.limit[0]
            self._metrics.sessions_refused[path, limit].inc()
            said = f"Legacy clients have as many sessions on route {path} as there may be ({limit})"
            raise Busy(said, reached={limit: pool.most})
        # Opening an uninitialized session costs nothing, so there may be few of them.
        most = max(pool.most // _UNPROVEN_PART, _LEAST_UNPROVEN)
        if count >= most:
            others = [session for session in self._sessions.values() if session.live.route.path == path]
            if sum(session.is_unproven for session in others) >= most:
                raise Busy(
                    "Streams whose clients have sent no `initialize` have a tenth of the places for sessions on route "
                    f"{path}; call later",
                )
        pool.take_opening()  # last: a session that is refused takes nothing of the rate
        session = FrontSession(live, front, id_, caller, self.budget, connect, self._ended)
        self._sessions[id_] = session
        self._count(session, 1)
        return session

    def _count(self, session: FrontSession, change: int) -> None:
        path, caller = session.live.route.path, session.caller
        for key in ((path,), (path, caller.principal)):
            self._counts[key] += change
            if not self._counts[key]:
                del self._counts[key]
        self._metrics.client_sessions[path,].inc(change)

    def _ended(self, session: FrontSession) -> None:
        del self._sessions[session.id]
        self._count(session, -1)

    def keep_only(self, paths: Iterable[str], error: GatewayError) -> None:
        """End the sessions of all other paths, which a reload has removed."""
        kept = set(paths)
        for session in tuple(self._sessions.values()):
            if session.live.route.path not in kept:
                session.end(error)

    def end_all(self, error: GatewayError) -> None:
        """End every session."""
        self.keep_only((), error)
