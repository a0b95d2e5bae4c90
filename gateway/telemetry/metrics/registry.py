"""The metrics of one process, each of which is declared once, in their own registry.

No label value is chosen by a client or an upstream: methods, versions and reasons must be in a closed list. `route` is
always a configured path.
"""

from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.telemetry.metrics.label_values import (
    ERROR_TYPES,
    NESTED_METHODS,
    OTHER,
    bounded,
    bounded_kind,
    bounded_method,
    bounded_version,
)
from gateway.telemetry.metrics.labels import (
    OTHER_ERROR,
    PEER_REASONS,
    REJECTIONS,
    STATE_REASONS,
    UPSTREAM_FAILURES,
    ColdEnding,
    Ending,
    Malformation,
    NestedOutcome,
    Passed,
    PeerOutcome,
    SessionLimit,
    SessionState,
    Step,
    TaskOutcome,
    TrafficEra,
    UpstreamEra,
)
from gateway.telemetry.metrics.saturation import Saturation
from gateway.telemetry.metrics.series import DURATIONS, Count, Series

_REFUSALS: Final = (NestedOutcome.REFUSED, NestedOutcome.UNDECLARED, NestedOutcome.UNSOLICITED)
_HOLDS: Final = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_ROUNDS: Final = (1, 2, 3, 4, 5, 6, 8, 10)
_LIMITS: Final = frozenset(map(str, SessionLimit))
_WHY: Final = ("asked", "unasked")
_RELOADS: Final = ("applied", "rejected")


class BudgetStatus(Struct, frozen=True):
    """A budget of bytes that many holders share."""

    used: int
    limit: int
    given_way: int
    """How many holders gave their bytes up because the budget was full."""


class Metrics:
    """All metrics, with a method for each event that they count; one object, so that counting costs one call."""

    def __init__(self, version: str = "", routes: Iterable[str] = ()) -> None:
        self.series = series = Series()
        self._operations = series.histogram(
            "mcp_server_operation_duration_seconds",
            "Time from a request to its final message, per round; for subscriptions/listen, to its acknowledgement.",
            ("route", "method", "protocol_version", "outcome", "error_type"),
            DURATIONS,
        )
        self._nested = series.counter(
            "nested_requests_total",
            "Nested requests that upstreams sent inside calls.",
            *("route", "method", "outcome"),
            zero=(NESTED_METHODS, _REFUSALS),
        )
        self._notifications = series.counter(
            "notifications_total", "Upstream notifications, forwarded or dropped.", "route", "kind", "outcome"
        )
        self._rejections = series.counter(
            "downstream_rejected_total",
            "Requests that the gateway refused before they reached an upstream.",
            "reason",
            zero=(REJECTIONS,),
        )
        self._malformations = series.counter(
            "malformed_requests_total",
            "Requests that were not well-formed HTTP, on any listener.",
            "reason",
            zero=(Malformation,),
        )
        self._passed = series.counter(
            "passed_through_total",
            "Passed-through requests, by outcome.",
            *("route", "era", "outcome"),
            zero=(TrafficEra, Passed),
        )
        self._passing = series.histogram(
            "mcp_gateway_passed_through_duration_seconds",
            "Time from a passed-through request to the end of its reply, except for long-lived streams.",
            ("route", "era"),
            DURATIONS,
        )
        self._held = series.gauge("held_calls", "Calls parked between two rounds.", "route", zero=())
        self._limit = series.gauge("held_calls_limit", "Maximum number of parked calls.")[()]
        self._cold = series.gauge("cold_calls", "Parked calls that were let go of, to be resumed.", "route", zero=())
        self._cooled = series.counter("calls_cooled_total", "Parked calls that were let go of.", "route", zero=())
        self._cold_endings = series.counter(
            "cold_calls_ended_total",
            "Cold calls that ended, by how they ended.",
            *("route", "ending"),
            zero=(ColdEnding,),
        )
        self._hold_times = series.histogram(
            "mcp_gateway_hold_duration_seconds", "Time that a call was parked.", ("route",), _HOLDS
        )
        self._rounds = series.histogram(
            "mcp_gateway_rounds_per_exchange", "Number of rounds of an exchange.", ("route",), _ROUNDS
        )
        self._continuations = series.counter(
            "continuations_total", "Retries, by the step that served them.", "route", "step", zero=(Step,)
        )
        self._seals = series.counter("seals_total", "requestState values that this process sealed.")[()]
        self._state_rejections = series.counter(
            "state_rejected_total", "requestState values that were rejected.", "reason", zero=(STATE_REASONS,)
        )
        self._sessions = series.gauge("sessions", "Upstream sessions.", "route", "state", zero=(SessionState,))
        self._refused = series.counter(
            "sessions_refused_total",
            "Requests for a new session that were refused, by the limit.",
            *("route", "limit"),
            zero=(SessionLimit,),
        )
        self._opened = series.counter("sessions_opened_total", "Upstream sessions opened.", "route", zero=())
        self._lost = series.counter(
            "sessions_lost_total", "Upstream sessions that the upstream forgot.", "route", zero=()
        )
        self._relayed = series.gauge(
            "client_sessions",
            "Sessions of legacy clients that end at the gateway, because it changes the transport.",
            "route",
            zero=(),
        )
        self._mirrored = series.gauge("mirrored_calls", "Calls of legacy clients at a modern server.", "route")
        self._tasks = series.gauge("tasks", "Tasks of clients, until their time is over.", "route", zero=())
        self._tasks_ended = series.counter(
            "tasks_ended_total", "Tasks of clients that ended.", "route", "outcome", zero=(TaskOutcome,)
        )
        self._subscriptions = series.gauge("subscriptions", "Open subscriptions/listen streams.", "route")
        self._subscriptions_lost = series.counter(
            "subscriptions_lost_total", "Subscriptions that lost their session, by outcome.", "route", "outcome"
        )
        self._calls = series.histogram(
            "mcp_client_operation_duration_seconds",
            "Time that an upstream took for a call, without the time that people thought.",
            ("route", "method", "error_type"),
            DURATIONS,
        )
        self._failures = series.counter(
            "upstream_errors_total", "Failures of upstreams, by kind.", "route", "kind", zero=(UPSTREAM_FAILURES,)
        )
        self._probes = series.counter(
            "era_probes_total", "Probes of upstreams, by the era found.", "route", "era", zero=(UpstreamEra,)
        )
        self._lists = series.counter(
            "lists_answered_total", "Lists on routes with cache.lists_seconds, by source.", "route", "source"
        )
        self._left_out = series.counter(
            "tools_left_out_total",
            "Tools left out of a list because clients would refuse the whole list.",
            "route",
            zero=(),
        )
        self._children = series.gauge("children", "Child processes: warm, idle, in use or ending.", "route")
        self._children_ended = series.counter(
            "children_ended_total",
            "Child processes that ended, by whether the gateway asked them to.",
            *("route", "why"),
            zero=(_WHY,),
        )
        self.saturation: Saturation | None = None
        self._reloads = series.counter("config_reloads_total", "Configuration reloads.", "outcome", zero=(_RELOADS,))
        self._budgets: dict[str, Callable[[], BudgetStatus]] = {}
        self._budget_bytes = series.gauge("budget_bytes", "Bytes that are counted against a limit.", "budget")
        self._budget_limits = series.gauge("budget_limit_bytes", "The limits of `mcp_gateway_budget_bytes`.", "budget")
        self._given_way = series.counter(
            "budget_given_way_total", "Holders of bytes that gave way because their budget was full.", "budget"
        )
        self._peer_requests = series.counter(
            "peer_requests_total", "Requests forwarded to another replica, by outcome.", "outcome", zero=(PeerOutcome,)
        )
        self._peer_rejections = series.counter(
            "peer_rejected_total",
            "Requests on the peer listener that no replica sealed, or that arrived twice.",
            "reason",
            zero=(PEER_REASONS,),
        )
        self._sent_on = series.counter(
            "calls_sent_on_total", "New calls that this replica sent to another one while it drained."
        )[()]
        self._worker_restarts = series.counter(
            "worker_restarts_total", "Workers that ended unexpectedly and were restarted."
        )[()]
        self._task_failures = series.counter("task_failures_total", "Unexpected exceptions: each is a bug.")[()]
        series.gauge("build_info", "The running version.", "version")[version,].set(1)
        for route in routes:
            series.show_zeroes(route)

    def render(self) -> tuple[bytes, str]:
        """Return (body, content type) of /metrics."""
        if self.saturation is not None:
            self.saturation.refresh()
        self.show_budgets()
        return generate_latest(self.series.registry), CONTENT_TYPE_LATEST

    # -- rounds, nested requests, notifications, what passes through, rejections --------------------------------------

    def operation_finished(self, route: str, method: str, version: str, ending: Ending, seconds: float) -> None:
        """Count one round and its duration; `method` and `version` as the client sent them."""
        outcome, error = ending
        times = self._operations.get((route, method, version, outcome, error))
        if times is None:
            error = error if error in ERROR_TYPES else OTHER_ERROR
            times = self._operations[route, bounded_method(method), bounded_version(version), outcome, error]
        times.observe(seconds)

    def downstream_rejected(self, reason: str) -> None:
        """Count a refused request, by one of `REJECTIONS`."""
        self._rejections[bounded(reason, REJECTIONS),].inc()

    def malformed(self, reason: Malformation) -> None:
        """Count a request that was not well-formed HTTP."""
        self._malformations[reason,].inc()

    def passed(self, route: str, era: TrafficEra, outcome: Passed, seconds: float | None) -> None:
        """Count a request that was passed through, at its end; `seconds` is None for a stream that is not a reply."""
        self._passed[route, era, outcome].inc()
        if seconds is not None:
            self._passing[route, era].observe(seconds)

    def nested_request(self, route: str, method: str, outcome: NestedOutcome) -> None:
        """Count a step in the life of a nested request."""
        self._nested[route, method if method in NESTED_METHODS else OTHER, outcome].inc()

    def notification(self, route: str, method: str, *, forwarded: bool) -> None:
        """Count an upstream notification, by its method."""
        self._notifications[route, bounded_kind(method), "forwarded" if forwarded else "dropped"].inc()

    def notifications_dropped(self, route: str, number: int) -> None:
        """Count notifications that were dropped because the client read too slowly."""
        self._notifications[route, OTHER, "dropped"].inc(number)

    # -- parked calls, their retries, their states --------------------------------------------------------------------

    def call_parked(self, route: str) -> None:
        """Add a parked call; `call_released` must follow."""
        self._held[route,].inc()

    def call_released(self, route: str, seconds: float) -> None:
        """Remove a parked call, which was resumed or expired after `seconds`."""
        self._held[route,].inc(-1)
        self._hold_times[route,].observe(seconds)

    def set_held_limit(self, calls: int) -> None:
        """Show `hold.max_calls`."""
        self._limit.set(calls)

    def show_cold_call(self, route: str, change: int) -> None:
        """Add or remove a cold call."""
        self._cold[route,].inc(change)

    def call_cooled(self, route: str) -> None:
        """Count a call that was let go of."""
        self._cooled[route,].inc()

    def cold_call_ended(self, route: str, ending: ColdEnding) -> None:
        """Count how a cold call ended."""
        self._cold_endings[route, ending].inc()

    def exchange_finished(self, route: str, rounds: int) -> None:
        """Count an exchange's rounds at its end."""
        self._rounds[route,].observe(rounds)

    def continued(self, route: str, step: Step) -> None:
        """Count a retry by how it was served."""
        self._continuations[route, step].inc()

    def sealed(self) -> None:
        """Count one nonce used."""
        self._seals.inc()

    def state_rejected(self, reason: str) -> None:
        """Count a requestState that was not accepted, by one of `STATE_REASONS`."""
        self._state_rejections[bounded(reason, STATE_REASONS),].inc()

    # -- what outlives a call -----------------------------------------------------------------------------------------

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

    # -- upstreams ----------------------------------------------------------------------------------------------------

    def call_answered(self, route: str, method: str, ending: Ending, seconds: float) -> None:
        """Count an upstream call that has its answer, with the time that the upstream took for it."""
        _, error = ending
        times = self._calls.get((route, method, error))
        if times is None:
            error = error if error in ERROR_TYPES else OTHER_ERROR
            times = self._calls[route, bounded_method(method), error]
        times.observe(seconds)

    def upstream_failed(self, route: str, kind: str) -> None:
        """Count a failure, by one of `UPSTREAM_FAILURES`."""
        self._failures[route, bounded(kind, UPSTREAM_FAILURES)].inc()

    def era_probed(self, route: str, era: UpstreamEra) -> None:
        """Count a probe."""
        self._probes[route, era].inc()

    def list_answered(self, route: str, *, from_memory: bool) -> None:
        """Count a list on a route with a list cache."""
        self._lists[route, "memory" if from_memory else "upstream"].inc()

    def tool_left_out(self, route: str) -> None:
        """Count a tool that was left out of one list."""
        self._left_out[route,].inc()

    def child_started(self, route: str) -> None:
        """Add a child; `child_ended` must follow."""
        self._children[route,].inc()

    def child_ended(self, route: str, *, asked: bool) -> None:
        """Remove a child whose processes have all ended; a child that was not asked to end has failed."""
        self._children[route,].inc(-1)
        self._children_ended[route, "asked" if asked else "unasked"].inc()

    # -- the process among its peers ----------------------------------------------------------------------------------

    def watch_load(self, fill: Callable[[Saturation], None]) -> Saturation:
        """Show how much of its limits a process that serves clients uses; `fill` sets the gauges."""
        self.saturation = Saturation(self.series, fill)
        return self.saturation

    def config_reloaded(self, *, applied: bool) -> None:
        """Count a reload; a rejected one left the old configuration in place."""
        self._reloads["applied" if applied else "rejected",].inc()
        if self.saturation is not None:
            self.saturation.reloaded(applied=applied)

    def watch_budget(self, budget: str, status: Callable[[], BudgetStatus]) -> None:
        """Show a budget, by the key in the configuration that sets its limit."""
        self._budgets[budget] = status
        _ = self._given_way[budget,]

    def budgets(self) -> dict[str, BudgetStatus]:
        """Return the present status of every budget."""
        return {budget: status() for budget, status in self._budgets.items()}

    def show_budgets(self) -> None:
        """Set the gauges of the budgets."""
        for budget, status in self.budgets().items():
            self._budget_bytes[budget,].set(status.used)
            self._budget_limits[budget,].set(status.limit)
            self._given_way[budget,].set(status.given_way)

    def peer_asked(self, outcome: PeerOutcome) -> None:
        """Count a request to another replica."""
        self._peer_requests[outcome,].inc()

    def peer_rejected(self, reason: str) -> None:
        """Count a request on the peer listener that was refused, by one of `PEER_REASONS`."""
        self._peer_rejections[bounded(reason, PEER_REASONS),].inc()

    def sent_on(self) -> None:
        """Count a new call that another replica served during the drain of this one."""
        self._sent_on.inc()

    def worker_restarted(self) -> None:
        """Count a worker that replaces one that ended unexpectedly."""
        self._worker_restarts.inc()

    def task_failed(self) -> None:
        """Count an exception that a task did not handle."""
        self._task_failures.inc()
