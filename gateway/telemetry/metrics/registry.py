"""The metrics of one process, each of which is declared once, in their own registry.

No label value is chosen by a client or an upstream: methods, versions and reasons are in a closed list, or become
`other`. `route` is always a configured path.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway import world
from gateway.telemetry.metrics.labels import (
    ERROR_TYPES,
    METHODS,
    NESTED_METHODS,
    NOTIFICATIONS,
    PEER_REASONS,
    REJECTIONS,
    STATE_REASONS,
    UPSTREAM_FAILURES,
    VERSIONS,
    ColdEnding,
    Malformation,
    NestedOutcome,
    Outcome,
    Passed,
    PeerOutcome,
    SessionLimit,
    SessionState,
    Step,
    TaskOutcome,
    TrafficEra,
    UpstreamEra,
)
from gateway.telemetry.metrics.series import ANY, DURATIONS, Series

_REFUSALS: Final = (NestedOutcome.REFUSED, NestedOutcome.UNDECLARED, NestedOutcome.UNSOLICITED)
_HOLDS: Final = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_ROUNDS: Final = (1, 2, 3, 4, 5, 6, 8, 10)
METRICS_TYPE: Final = CONTENT_TYPE_LATEST
"""The content type of /metrics."""


class BudgetStatus(Struct, frozen=True):
    """A budget of bytes that many holders share."""

    used: int
    limit: int
    given_way: int
    """How many holders gave their bytes up because the budget was full."""


class Metrics:
    """All metrics: series in which events count, with a method where that takes more than one step."""

    def __init__(self, version: str = "", routes: Iterable[str] = ()) -> None:  # noqa: PLR0915  (a list)
        self.series = series = Series()
        self.operations = series.histogram(
            "mcp_server_operation_duration_seconds",
            "Time from a request to its final message, per round; for subscriptions/listen, to its acknowledgement.",
            DURATIONS,
            route=ANY,
            method=METHODS,
            protocol_version=VERSIONS,
            outcome=Outcome,
            error_type=ERROR_TYPES,
        )
        """With the method and the version as the client sent them."""
        self.nested_requests = series.counter(
            "nested_requests_total",
            "Nested requests that upstreams sent inside calls.",
            zero=(NESTED_METHODS, _REFUSALS),
            route=ANY,
            method=NESTED_METHODS,
            outcome=NestedOutcome,
        )
        self.notifications = series.counter(
            "notifications_total",
            "Upstream notifications, forwarded or dropped.",
            route=ANY,
            kind=NOTIFICATIONS,
            outcome=("forwarded", "dropped"),
        )
        self.rejections = series.counter(
            "downstream_rejected_total",
            "Requests that the gateway refused, nearly all before they reached an upstream.",
            zero=True,
            reason=REJECTIONS,
        )
        self.malformations = series.counter(
            "malformed_requests_total",
            "Requests that were not well-formed HTTP, on any listener.",
            zero=True,
            reason=Malformation,
        )
        self.passed = series.counter(
            "passed_through_total",
            "Passed-through requests, by outcome.",
            zero=True,
            route=ANY,
            era=TrafficEra,
            outcome=Passed,
        )
        self.passing = series.histogram(
            "mcp_gateway_passed_through_duration_seconds",
            "Time from a passed-through request to the end of its reply, except for long-lived streams.",
            DURATIONS,
            route=ANY,
            era=TrafficEra,
        )
        self.held_calls = series.gauge("held_calls", "Calls parked between two rounds.", zero=True, route=ANY)
        self.held_calls_limit = series.gauge("held_calls_limit", "Maximum number of parked calls.")[()]
        self.held_of_one_caller = series.gauge("held_calls_of_one_caller", "The most parked calls that a caller has.")
        self.held_of_one_caller_limit = series.gauge("held_calls_of_one_caller_limit", "The most that it may have.")
        self.cold_calls = series.gauge(
            "cold_calls", "Parked calls that were let go of, to be resumed.", zero=True, route=ANY
        )
        self.calls_cooled = series.counter(
            "calls_cooled_total", "Parked calls that were let go of.", zero=True, route=ANY
        )
        self.cold_calls_ended = series.counter(
            "cold_calls_ended_total",
            "Cold calls that ended, by how they ended.",
            zero=True,
            route=ANY,
            ending=ColdEnding,
        )
        self.hold_times = series.histogram(
            "mcp_gateway_hold_duration_seconds", "Time that a call was parked.", _HOLDS, route=ANY
        )
        self.rounds_per_exchange = series.histogram(
            "mcp_gateway_rounds_per_exchange", "Number of rounds of an exchange.", _ROUNDS, route=ANY
        )
        self.continuations = series.counter(
            "continuations_total", "Retries, by the step that served them.", zero=True, route=ANY, step=Step
        )
        self.seals = series.counter("seals_total", "requestState values that this process sealed.")[()]
        self.state_rejections = series.counter(
            "state_rejected_total", "requestState values that were rejected.", zero=True, reason=STATE_REASONS
        )
        self.sessions = series.gauge("sessions", "Upstream sessions.", zero=True, route=ANY, state=SessionState)
        self.sessions_refused = series.counter(
            "sessions_refused_total",
            "Requests for a new session that were refused, by the limit.",
            zero=True,
            route=ANY,
            limit=SessionLimit,
        )
        self.sessions_opened = series.counter(
            "sessions_opened_total", "Upstream sessions opened.", zero=True, route=ANY
        )
        self.sessions_lost = series.counter(
            "sessions_lost_total", "Upstream sessions that the upstream forgot.", zero=True, route=ANY
        )
        self.client_sessions = series.gauge(
            "client_sessions",
            "Sessions of legacy clients that end at the gateway, because it changes the transport.",
            zero=True,
            route=ANY,
        )
        self.mirrored_calls = series.gauge(
            "mirrored_calls", "Calls of legacy clients at a modern server.", zero=True, route=ANY
        )
        self.tasks = series.gauge("tasks", "Tasks of clients, until their time is over.", zero=True, route=ANY)
        self.tasks_ended = series.counter(
            "tasks_ended_total", "Tasks of clients that ended.", zero=True, route=ANY, outcome=TaskOutcome
        )
        self.subscriptions = series.gauge("subscriptions", "Open subscriptions/listen streams.", route=ANY)
        self.subscriptions_lost = series.counter(
            "subscriptions_lost_total",
            "Subscriptions that lost their session, by outcome.",
            route=ANY,
            outcome=("reopened", "ended"),
        )
        self.calls = series.histogram(
            "mcp_client_operation_duration_seconds",
            "Time that an upstream took for a call, without the time that people thought.",
            DURATIONS,
            route=ANY,
            method=METHODS,
            error_type=ERROR_TYPES,
        )
        self.upstream_failures = series.counter(
            "upstream_errors_total", "Failures of upstreams, by kind.", zero=True, route=ANY, kind=UPSTREAM_FAILURES
        )
        self.era_probes = series.counter(
            "era_probes_total", "Probes of upstreams, by the era found.", zero=True, route=ANY, era=UpstreamEra
        )
        self.tools_left_out = series.counter(
            "tools_left_out_total",
            "Tools left out of a list because clients would refuse the whole list.",
            zero=True,
            route=ANY,
        )
        self.children = series.gauge("children", "Child processes: warm, idle, in use or ending.", route=ANY)
        self.children_ended = series.counter(
            "children_ended_total",
            "Child processes that ended, by whether the gateway asked them to.",
            zero=True,
            route=ANY,
            why=("asked", "unasked"),
        )
        self._reloads = series.counter(
            "config_reloads_total", "Configuration reloads.", zero=True, outcome=("applied", "rejected")
        )
        self._budgets: dict[str, Callable[[], BudgetStatus]] = {}
        self._budget_bytes = series.gauge("budget_bytes", "Bytes that are counted against a limit.", budget=ANY)
        self._budget_limits = series.gauge(
            "budget_limit_bytes", "The limits of `mcp_gateway_budget_bytes`.", budget=ANY
        )
        self._given_way = series.counter(
            "budget_given_way_total",
            "Holders of bytes that gave way because their budget was full.",
            budget=ANY,
        )
        self.peer_requests = series.counter(
            "peer_requests_total",
            "Requests forwarded to another replica, by outcome.",
            zero=True,
            outcome=PeerOutcome,
        )
        self.peer_rejections = series.counter(
            "peer_rejected_total",
            "Requests on the peer listener that no replica sealed, or that arrived twice.",
            zero=True,
            reason=PEER_REASONS,
        )
        self.calls_sent_on = series.counter(
            "calls_sent_on_total", "New calls that this replica sent to another one while it drained."
        )[()]
        self.worker_restarts = series.counter(
            "worker_restarts_total", "Workers that ended unexpectedly and were restarted."
        )[()]
        self.task_failures = series.counter("task_failures_total", "Unexpected exceptions: each is a bug.")[()]
        series.gauge("build_info", "The running version.", version=ANY)[version,].set(1)
        # The load of a process that serves clients: its admin listener sets it before the metrics are read.
        self.ready = series.gauge("ready", "1 while /readyz says 200, else 0.")
        self.connections = series.gauge("connections", "Open connections of clients.")
        self.connections_limit = series.gauge("connections_limit", "Maximum of `mcp_gateway_connections`.")
        self.in_flight = series.gauge("requests_in_flight", "Requests whose final message has not been written.")
        self.sessions_limit = series.gauge("sessions_limit", "Maximum number of upstream sessions.", route=ANY)
        self.sessions_of_one_caller = series.gauge(
            "sessions_of_one_caller", "The most sessions in use that a caller has.", route=ANY
        )
        self.sessions_of_one_caller_limit = series.gauge(
            "sessions_of_one_caller_limit", "The most that it may have.", route=ANY
        )
        self.children_limit = series.gauge("children_limit", "Maximum of `mcp_gateway_children`.", route=ANY)
        self.upstream_reactions = series.gauge(
            "upstream_reaction_timestamp_seconds", "When the upstream last answered or failed.", route=ANY
        )
        self.upstream_up = series.gauge(
            "upstream_up", "1 if the last reaction of the upstream was an answer, 0 if it was a failure.", route=ANY
        )
        """After the one above, which says for the merge of several workers whose value is the newest."""
        self._certificates = series.gauge(
            "certificate_expiry_timestamp_seconds", "When a configured certificate expires, by its key.", key=ANY
        )
        self._load_ok = series.gauge("config_last_reload_successful", "Whether the last reload was applied: 1 or 0.")
        self.load_time = series.gauge(
            "config_last_reload_success_timestamp_seconds", "When the configuration in force was loaded."
        )
        for route in routes:
            series.show_zeroes(route)

    def render(self) -> bytes:
        """Return the text of /metrics."""
        for budget, status in self.budgets().items():
            self._budget_bytes[budget,].set(status.used)
            self._budget_limits[budget,].set(status.limit)
            self._given_way[budget,].set(status.given_way)
        return generate_latest(self.series.registry)

    def notification(self, route: str, method: str, *, forwarded: bool) -> None:
        """Count an upstream notification, by its method."""
        self.notifications[route, method.removeprefix("notifications/"), "forwarded" if forwarded else "dropped"].inc()

    def config_loaded(self, *, applied: bool = True) -> None:
        """Show the load of the configuration, and its time, where clients are served."""
        self._load_ok[()].set(applied)
        if applied:
            self.load_time[()].set(world.wall())

    def config_reloaded(self, *, applied: bool) -> None:
        """Count a reload; a rejected one left the old configuration in place."""
        self._reloads["applied" if applied else "rejected",].inc()
        if self._load_ok:
            self.config_loaded(applied=applied)

    def show_certificates(self, expiries: Mapping[str, float]) -> None:
        """Show the certificates of a configuration in place of those before."""
        self._certificates.clear()
        for key, moment in expiries.items():
            self._certificates[key,].set(moment)

    def watch_budget(self, budget: str, status: Callable[[], BudgetStatus]) -> None:
        """Show a budget, by the key in the configuration that sets its limit."""
        self._budgets[budget] = status
        _ = self._given_way[budget,]  # shown from zero on, or an alert would miss the first step

    def budgets(self) -> dict[str, BudgetStatus]:
        """Return the present status of every budget."""
        return {budget: status() for budget, status in self._budgets.items()}
