"""Counts sessions, tasks, subscriptions."""

from typing import Final

from gateway.telemetry.metrics.label_values import bounded
from gateway.telemetry.metrics.labels import SessionLimit, SessionState, TaskOutcome
from gateway.telemetry.metrics.series import Count, Series

_LIMITS: Final = frozenset(map(str, SessionLimit))


class SessionMetrics(Series):
    """The metrics of what outlives a call."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions = self._gauge("sessions", "Upstream sessions.", "route", "state", zero=(SessionState,))
        self._refused = self._counter(
            "sessions_refused_total",
            "Requests for a new session that were refused, by the limit.",
            *("route", "limit"),
            zero=(SessionLimit,),
        )
        self._opened = self._counter("sessions_opened_total", "Upstream sessions opened.", "route", zero=())
        self._lost = self._counter(
            "sessions_lost_total", "Upstream sessions that the upstream forgot.", "route", zero=()
        )
        self._relayed = self._gauge(
            "client_sessions",
            "Sessions of legacy clients that end at the gateway, because it changes the transport.",
            "route",
            zero=(),
        )
        self._mirrored = self._gauge("mirrored_calls", "Calls of legacy clients at a modern server.", "route")
        self._tasks = self._gauge("tasks", "Tasks of clients, until their time is over.", "route", zero=())
        self._tasks_ended = self._counter(
            "tasks_ended_total", "Tasks of clients that ended.", "route", "outcome", zero=(TaskOutcome,)
        )
        self._subscriptions = self._gauge("subscriptions", "Open subscriptions/listen streams.", "route")
        self._subscriptions_lost = self._counter(
            "subscriptions_lost_total", "Subscriptions that lost their session, by outcome.", "route", "outcome"
        )

    def session_opened(self, route: str) -> None:
        """Count a finished handshake."""
        self._opened[route,].inc()

    def session_refused(self, route: str, limit: str) -> None:
        """Count a request that got no session, by a `SessionLimit`."""
        self._refused[route, bounded(limit, _LIMITS)].inc()

    def session_lost(self, route: str) -> None:
        """Count a session that its upstream no longer knows."""
        self._lost[route,].inc()

    def sessions_by_state(self, route: str) -> dict[SessionState | None, Count]:
        """Return the counts that a session of a route moves between; that of None, before and after, is not shown."""
        return {None: Count()} | {state: self._sessions[route, state] for state in SessionState}

    def sessions(self, route: str) -> dict[str, int]:
        """Return a route's sessions by state."""
        return {state.value: self._sessions.value(route, state) for state in SessionState}

    def relayed(self, route: str, change: int) -> None:
        """Add (1) or remove (-1) a session of a legacy client that ends at the gateway."""
        self._relayed[route,].inc(change)

    def client_sessions(self, route: str) -> int:
        """Return how many such sessions a route has."""
        return self._relayed.value(route)

    def mirroring(self, route: str, change: int) -> None:
        """Add (1) or remove (-1) a call of a legacy client at a modern server."""
        self._mirrored[route,].inc(change)

    def mirrored(self, route: str) -> int:
        """Return a route's calls of legacy clients at its modern server."""
        return self._mirrored.value(route)

    def tasks_changed(self, route: str, change: int) -> None:
        """Add (1) or remove (-1) a task of a client."""
        self._tasks[route,].inc(change)

    def task_ended(self, route: str, outcome: TaskOutcome) -> None:
        """Count the end of a task of a client."""
        self._tasks_ended[route, outcome].inc()

    def subscribed(self, route: str, change: int) -> None:
        """Add (1) or remove (-1) a subscription."""
        self._subscriptions[route,].inc(change)

    def subscription_lost(self, route: str, *, opened_again: bool) -> None:
        """Count a subscription that lost its session, and was opened again or ended."""
        self._subscriptions_lost[route, "reopened" if opened_again else "ended"].inc()
