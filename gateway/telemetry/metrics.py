"""The metrics, each declared once.

No label value is chosen by a client or an upstream: methods, versions and reasons must be in a closed list.
"""

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.protocol import mcp
from gateway.telemetry.labels import (
    OTHER_ERROR,
    TOOL_ERROR,
    ColdEnding,
    Ending,
    Malformation,
    NestedOutcome,
    Passed,
    PeerOutcome,
    PeerReason,
    Rejection,
    SessionLimit,
    SessionState,
    StateReason,
    Step,
    TaskOutcome,
    TrafficEra,
    UpstreamEra,
    UpstreamFailure,
)
from gateway.telemetry.process_status import BudgetStatus
from gateway.telemetry.saturation import Load, Saturation

OTHER = "other"
_NESTED_METHODS = frozenset({mcp.ELICIT, mcp.SAMPLE, mcp.ROOTS})
_METHODS = frozenset(
    {
        *mcp.METHODS,
        *mcp.FIRST_FORM_METHODS,
        *_NESTED_METHODS,
        mcp.INITIALIZE,
        mcp.PING,
        mcp.SET_LEVEL,
        mcp.SUBSCRIBE,
        mcp.UNSUBSCRIBE,
    }
)
_ODD_CODES = (0, -32000, -32001)
"""Codes outside the specification that legacy SDKs answer with: any exception, a lost connection, a timeout."""
_VERSIONS = frozenset({*mcp.SUPPORTED_VERSIONS, *mcp.LEGACY_VERSIONS})
_NOTIFICATIONS = frozenset(
    {
        mcp.CANCELLED,
        mcp.PROGRESS,
        mcp.LOG,
        mcp.TOOLS_CHANGED,
        mcp.PROMPTS_CHANGED,
        mcp.RESOURCES_CHANGED,
        mcp.RESOURCE_UPDATED,
    }
)
_CODES = (
    mcp.PARSE_ERROR,
    mcp.INVALID_REQUEST,
    mcp.METHOD_NOT_FOUND,
    mcp.INVALID_PARAMS,
    mcp.INTERNAL_ERROR,
    mcp.HEADER_MISMATCH,
    mcp.MISSING_CAPABILITY,
    mcp.UNSUPPORTED_VERSION,
)
ERROR_TYPES = frozenset({"", TOOL_ERROR, *map(str, _CODES + _ODD_CODES)})
"""The values of `error_type` besides OTHER_ERROR: for MCP, OpenTelemetry's `error.type` is the JSON-RPC code."""
_DURATIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_HOLDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10)
_REFUSALS = (NestedOutcome.REFUSED, NestedOutcome.UNDECLARED, NestedOutcome.UNSOLICITED)


def bounded_method(method: str) -> str:
    """Return a method of the specification unchanged, any other as `other`."""
    return method if method in _METHODS else OTHER


def bounded_version(version: str) -> str:
    """Return a published protocol version unchanged, any other as `other`."""
    return version if version in _VERSIONS else OTHER


def bounded_kind(method: str) -> str:
    """Return the kind of a notification (`progress`, `message`, ...), or `other`."""
    return method.removeprefix("notifications/") if method in _NOTIFICATIONS else OTHER


def _bounded(reason: str, known: type[StrEnum]) -> str:
    return reason if reason in known._value2member_map_ else OTHER


M = TypeVar("M", bound=MetricWrapperBase)


class _Children(dict[tuple[str, ...], M], Generic[M]):
    """Caches a metric's children by label values: `.labels()` locks and converts on every call."""

    def __init__(self, metric: M) -> None:
        super().__init__()
        self._metric = metric
        self.name: str = metric._name  # noqa: SLF001

    def __missing__(self, values: tuple[str, ...]) -> M:
        child = self[values] = self._metric.labels(*values) if values else self._metric
        return child


class _Times:
    """What one series observed since the metrics were read last, counted without the locks of the library.

    The library offers no public way to add many observations at once.
    """

    __slots__ = ("_bounds", "_counts", "_histogram", "_sum")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds: Sequence[float] = histogram._upper_bounds  # noqa: SLF001
        self._counts = [0] * len(histogram._buckets)  # noqa: SLF001
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def show(self) -> None:
        """Move the counts to the histogram."""
        self._histogram._sum.inc(self._sum)  # noqa: SLF001
        self._sum = 0.0
        for number, count in enumerate(self._counts):
            if count:
                self._histogram._buckets[number].inc(count)  # noqa: SLF001
                self._counts[number] = 0


class _Count:
    """A counter, which learns of its increments when the metrics are read: the library takes a lock for each."""

    __slots__ = ("_metric", "_more")

    def __init__(self, metric: Counter) -> None:
        self._metric = metric
        self._more = 0

    def inc(self, number: int = 1) -> None:
        self._more += number

    def show(self) -> None:
        """Move the increments to the counter."""
        if self._more:
            self._metric.inc(self._more)
            self._more = 0


class _Counters(dict[tuple[str, ...], _Count]):
    """The series of a counter by their label values."""

    def __init__(self, metric: Counter) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, values: tuple[str, ...]) -> _Count:
        count = self[values] = _Count(self._metric.labels(*values) if values else self._metric)
        return count


class _Pending(Collector):
    """What all series counted and observed, which it moves to the library's whenever the metrics are read."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, ...], _Times] = {}
        self.counters: list[_Counters] = []

    def observe(self, histograms: _Children[Histogram], route: str, number: float) -> None:
        """Observe a number in the series of a route."""
        key = (histograms.name, route)
        times = self.of.get(key)
        if times is None:
            times = self.of[key] = _Times(histograms[route,])
        times.observe(number)

    def collect(self) -> Iterable[Metric]:
        for times in self.of.values():
            times.show()
        for counters in self.counters:
            for count in counters.values():
                count.show()
        return ()


class Metrics:
    """The metrics of one process, in their own registry.

    `route` is always a configured path. Reasons are values of the enums above; any other text counts as `other`.
    """

    def __init__(self, version: str, routes: Iterable[str] = ()) -> None:
        # `_created` would double the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.saturation: Saturation | None = None
        self._declare_traffic()
        self._declare_holds()
        self._declare_upstreams()
        self._declare_process(version)
        self._show_own_zeroes()
        for route in routes:
            self.show_zeroes(route)

    def watch_load(self, read: Callable[[], Load]) -> Saturation:
        """Show how much of its limits a process that serves clients uses."""
        self.saturation = Saturation(self._registry, read)
        return self.saturation

    def _counter(self, name: str, text: str, *labels: str) -> _Counters:
        counters = _Counters(Counter(f"mcp_gateway_{name}", text, labels, registry=self._registry))
        self._pending.counters.append(counters)
        return counters

    def _gauge(self, name: str, text: str, *labels: str) -> _Children[Gauge]:
        return _Children(Gauge(f"mcp_gateway_{name}", text, labels, registry=self._registry))

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: Iterable[float]
    ) -> _Children[Histogram]:
        return _Children(Histogram(name, text, labels, registry=self._registry, buckets=tuple(buckets)))

    def _declare_traffic(self) -> None:
        self._pending = _Pending()
        self._operation_times = self._pending.of
        self._registry.register(self._pending)  # before the histograms, as metrics are collected in this order
        self._operations = self._histogram(
            "mcp_server_operation_duration_seconds",
            "Time from a request to its final message, per round; for subscriptions/listen, to its acknowledgement.",
            ("route", "method", "protocol_version", "outcome", "error_type"),
            _DURATIONS,
        )
        self._nested = self._counter(
            "nested_requests_total", "Nested requests that upstreams sent inside calls.", "route", "method", "outcome"
        )
        self._notifications = self._counter(
            "notifications_total", "Upstream notifications, forwarded or dropped.", "route", "kind", "outcome"
        )
        self._rejections = self._counter(
            "downstream_rejected_total", "Requests that the gateway refused before they reached an upstream.", "reason"
        )
        self._malformations = self._counter(
            "malformed_requests_total", "Requests that were not well-formed HTTP, on any listener.", "reason"
        )
        self._passed = self._counter(
            "passed_through_total", "Passed-through requests, by outcome.", "route", "era", "outcome"
        )
        self._passing = self._histogram(
            "mcp_gateway_passed_through_duration_seconds",
            "Time from a passed-through request to the end of its reply, except for long-lived streams.",
            ("route", "era"),
            _DURATIONS,
        )

    def _declare_holds(self) -> None:
        self._held = self._gauge("held_calls", "Calls parked between two rounds.", "route")
        self._cold = self._gauge("cold_calls", "Parked calls that were let go of, to be resumed.", "route")
        self._cooled = self._counter("calls_cooled_total", "Parked calls that were let go of.", "route")
        self._cold_endings = self._counter(
            "cold_calls_ended_total", "Cold calls that ended, by how they ended.", "route", "ending"
        )
        self._hold_times = self._histogram(
            "mcp_gateway_hold_duration_seconds", "Time that a call was parked.", ("route",), _HOLDS
        )
        self._rounds = self._histogram(
            "mcp_gateway_rounds_per_exchange", "Number of rounds of an exchange.", ("route",), _ROUNDS
        )
        self._continuations = self._counter(
            "continuations_total", "Retries, by the step that served them.", "route", "step"
        )
        self._state_rejections = self._counter(
            "state_rejected_total", "requestState values that were rejected.", "reason"
        )
        self._peer_requests = self._counter(
            "peer_requests_total", "Requests forwarded to another replica, by outcome.", "outcome"
        )
        self._sent_on = self._counter(
            "calls_sent_on_total", "New calls that this replica sent to another one while it drained."
        )[()]
        self._peer_rejections = self._counter(
            "peer_rejected_total",
            "Requests on the peer listener that no replica sealed, or that arrived twice.",
            "reason",
        )

    def _declare_upstreams(self) -> None:
        self._sessions = self._gauge("sessions", "Upstream sessions.", "route", "state")
        self._session_counts: Counts[tuple[str, ...]] = Counts()
        self._refused = self._counter(
            "sessions_refused_total", "Requests for a new session that were refused, by the limit.", "route", "limit"
        )
        self._newcomers = self._gauge(
            "newcomer_sessions", "Sessions of principals whose calls the upstream has never answered.", "route"
        )
        self._newcomers_limit = self._gauge(
            "newcomer_sessions_limit", "Maximum of `mcp_gateway_newcomer_sessions`.", "route"
        )
        self._client_sessions: Counts[str] = Counts()
        self._relayed = self._gauge(
            "client_sessions",
            "Sessions of legacy clients that end at the gateway, because it changes the transport.",
            "route",
        )
        self._opened = self._counter("sessions_opened_total", "Upstream sessions opened.", "route")
        self._lost = self._counter("sessions_lost_total", "Upstream sessions that the upstream forgot.", "route")
        self._lists = self._counter(
            "lists_answered_total", "Lists on routes with cache.lists_seconds, by source.", "route", "source"
        )
        self._left_out = self._counter(
            "tools_left_out_total", "Tools left out of a list because clients would refuse the whole list.", "route"
        )
        self._tasks = self._gauge("tasks", "Tasks of clients, until their time is over.", "route")
        self._tasks_ended = self._counter("tasks_ended_total", "Tasks of clients that ended.", "route", "outcome")
        self._subscriptions = self._gauge("subscriptions", "Open subscriptions/listen streams.", "route")
        self._mirrored_counts: Counts[str] = Counts()
        self._mirrored = self._gauge("mirrored_calls", "Calls of legacy clients at a modern server.", "route")
        self._subscriptions_lost = self._counter(
            "subscriptions_lost_total", "Subscriptions that lost their session, by outcome.", "route", "outcome"
        )
        self._children = self._gauge("children", "Child processes: warm, idle, in use or ending.", "route")
        self._children_ended = self._counter(
            "children_ended_total", "Child processes that ended, by whether the gateway asked them to.", "route", "why"
        )
        self._calls = self._histogram(
            "mcp_client_operation_duration_seconds",
            "Time that an upstream took for a call, without the time that people thought.",
            ("route", "method", "error_type"),
            _DURATIONS,
        )
        self._failures = self._counter("upstream_errors_total", "Failures of upstreams, by kind.", "route", "kind")
        self._probes = self._counter("era_probes_total", "Probes of upstreams, by the era found.", "route", "era")

    def _declare_process(self, version: str) -> None:
        self._build = self._gauge("build_info", "The running version.", "version")
        self._build[version,].set(1)
        self._reloads = self._counter("config_reloads_total", "Configuration reloads.", "outcome")
        self._limit = self._gauge("held_calls_limit", "Maximum number of parked calls.")[()]
        self._budgets: dict[str, Callable[[], BudgetStatus]] = {}
        self._shown_given_way: dict[str, int] = {}
        self._budget_bytes = self._gauge("budget_bytes", "Bytes that are counted against a limit.", "budget")
        self._budget_limits = self._gauge("budget_limit_bytes", "The limits of `mcp_gateway_budget_bytes`.", "budget")
        self._given_way = self._counter(
            "budget_given_way_total", "Holders of bytes that gave way because their budget was full.", "budget"
        )
        self._seals = self._counter("seals_total", "requestState values that this process sealed.")[()]
        self._worker_restarts = self._counter(
            "worker_restarts_total", "Workers that ended unexpectedly and were restarted."
        )[()]
        self._task_failures = self._counter("task_failures_total", "Unexpected exceptions: each is a bug.")[()]

    def _show_own_zeroes(self) -> None:
        """As `show_zeroes`, for the metrics without a route."""
        _ = [self._state_rejections[reason,] for reason in StateReason]
        _ = [self._rejections[reason,] for reason in Rejection]
        _ = [self._malformations[reason,] for reason in Malformation]
        _ = [self._peer_requests[outcome,] for outcome in PeerOutcome]
        _ = [self._peer_rejections[reason,] for reason in PeerReason]
        _ = self._reloads["applied",], self._reloads["rejected",]

    def show_zeroes(self, route: str) -> None:
        """Create the series at zero: otherwise an alert misses a counter's first step."""
        _ = self._held[route,], self._opened[route,], self._lost[route,], self._left_out[route,]
        _ = self._relayed[route,]
        _ = self._tasks[route,], [self._tasks_ended[route, outcome] for outcome in TaskOutcome]
        _ = self._cold[route,], self._cooled[route,]
        _ = [self._cold_endings[route, ending] for ending in ColdEnding]
        _ = [self._continuations[route, step] for step in Step]
        _ = [self._children_ended[route, why] for why in ("asked", "unasked")]
        _ = [self._failures[route, kind] for kind in UpstreamFailure]
        _ = [self._nested[route, method, outcome] for method in _NESTED_METHODS for outcome in _REFUSALS]
        _ = [self._passed[route, era, outcome] for era in TrafficEra for outcome in Passed]
        _ = [self._probes[route, era] for era in UpstreamEra]
        _ = [self._sessions[route, state] for state in SessionState]
        _ = [self._refused[route, limit] for limit in SessionLimit]

    def operation_finished(self, route: str, method: str, version: str, ending: Ending, seconds: float) -> None:
        """Count one round and its duration; `method` and `version` as the client sent them."""
        outcome, error = ending
        error = error if error in ERROR_TYPES else OTHER_ERROR
        labels = route, method, version, outcome, error
        times = self._operation_times.get(labels)
        if times is None:
            bounded = route, bounded_method(method), bounded_version(version), outcome, error
            times = self._operation_times.get(bounded)
            if times is None:
                times = self._operation_times[bounded] = _Times(self._operations[bounded])
        times.observe(seconds)

    def call_answered(self, route: str, method: str, ending: Ending, seconds: float) -> None:
        """Count an upstream call that has its answer, with the time that the upstream took for it."""
        error = ending.error_type if ending.error_type in ERROR_TYPES else OTHER_ERROR
        times = self._operation_times.get((route, method, error))
        if times is None:
            bounded = route, bounded_method(method), error
            times = self._operation_times.get(bounded)
            if times is None:
                times = self._operation_times[bounded] = _Times(self._calls[bounded])
        times.observe(seconds)

    def downstream_rejected(self, reason: str) -> None:
        """Count a refused request, by a `Rejection`."""
        self._rejections[_bounded(reason, Rejection),].inc()

    def malformed(self, reason: Malformation) -> None:
        """Count a request that was not well-formed HTTP."""
        self._malformations[reason,].inc()

    def passed(self, route: str, era: TrafficEra, outcome: Passed, seconds: float | None) -> None:
        """Count a request that was passed through, at its end; `seconds` is None for a stream that is not a reply."""
        self._passed[route, era, outcome].inc()
        if seconds is not None:
            self._passing[route, era].observe(seconds)

    def era_probed(self, route: str, era: UpstreamEra) -> None:
        """Count a probe."""
        self._probes[route, era].inc()

    def nested_request(self, route: str, method: str, outcome: NestedOutcome) -> None:
        """Count a step in the life of a nested request."""
        self._nested[route, method if method in _NESTED_METHODS else OTHER, outcome].inc()

    def notification(self, route: str, method: str, *, forwarded: bool) -> None:
        """Count an upstream notification, by its method."""
        self._notifications[route, bounded_kind(method), "forwarded" if forwarded else "dropped"].inc()

    def notifications_dropped(self, route: str, number: int) -> None:
        """Count notifications that were dropped because the client read too slowly."""
        self._notifications[route, OTHER, "dropped"].inc(number)

    def relayed(self, route: str, change: int) -> None:
        """Add (1) or remove (-1) a session of a legacy client that ends at the gateway."""
        self._client_sessions[route] += change
        self._relayed[route,].set(self._client_sessions[route])

    def client_sessions(self, route: str) -> int:
        """Return how many such sessions a route has."""
        return self._client_sessions[route]

    def call_parked(self, route: str) -> None:
        """Add a parked call; `call_released` must follow."""
        self._held[route,].inc()

    def call_released(self, route: str, seconds: float) -> None:
        """Remove a parked call, which was resumed or expired after `seconds`."""
        self._held[route,].dec()
        self._pending.observe(self._hold_times, route, seconds)

    def show_cold_call(self, route: str, change: int) -> None:
        """Add or remove a cold call."""
        self._cold[route,].inc(change)

    def call_cooled(self, route: str) -> None:
        """Count a call that was let go of."""
        self._cooled[route,].inc()

    def cold_call_ended(self, route: str, ending: ColdEnding) -> None:
        """Count how a cold call ended."""
        self._cold_endings[route, ending].inc()

    def set_held_limit(self, calls: int) -> None:
        """Show `hold.max_calls`."""
        self._limit.set(calls)

    def watch_budget(self, budget: str, status: Callable[[], BudgetStatus]) -> None:
        """Show a budget, by the key in the configuration that sets its limit."""
        self._budgets[budget] = status
        _ = self._given_way[budget,]

    def budgets(self) -> dict[str, BudgetStatus]:
        """Return the present status of every budget."""
        return {budget: status() for budget, status in self._budgets.items()}

    def exchange_finished(self, route: str, rounds: int) -> None:
        """Count an exchange's rounds at its end."""
        self._pending.observe(self._rounds, route, rounds)

    def continued(self, route: str, step: Step) -> None:
        """Count a retry by how it was served."""
        self._continuations[route, step].inc()

    def state_rejected(self, reason: str) -> None:
        """Count a requestState that was not accepted, by a `StateReason`."""
        self._state_rejections[_bounded(reason, StateReason),].inc()

    def peer_asked(self, outcome: PeerOutcome) -> None:
        """Count a request to another replica."""
        self._peer_requests[outcome,].inc()

    def sent_on(self) -> None:
        """Count a new call that another replica served during the drain of this one."""
        self._sent_on.inc()

    def peer_rejected(self, reason: str) -> None:
        """Count a request on the peer listener that was refused, by a `PeerReason`."""
        self._peer_rejections[_bounded(reason, PeerReason),].inc()

    def sealed(self) -> None:
        """Count one nonce used."""
        self._seals.inc()

    def session_opened(self, route: str) -> None:
        """Count a finished handshake."""
        self._opened[route,].inc()

    def session_refused(self, route: str, limit: str) -> None:
        """Count a request that got no session, by a `SessionLimit`."""
        self._refused[route, _bounded(limit, SessionLimit)].inc()

    def show_newcomers(self, route: str, sessions: int, limit: int) -> None:
        """Show the sessions of principals whose calls the upstream has never answered."""
        self._newcomers[route,].set(sessions)
        self._newcomers_limit[route,].set(limit)

    def session_lost(self, route: str) -> None:
        """Count a session that its upstream no longer knows."""
        self._lost[route,].inc()

    def list_answered(self, route: str, *, from_memory: bool) -> None:
        """Count a list on a route with a list cache."""
        self._lists[route, "memory" if from_memory else "upstream"].inc()

    def tool_left_out(self, route: str) -> None:
        """Count a tool that was left out of one list."""
        self._left_out[route,].inc()

    def tasks_changed(self, route: str, change: int) -> None:
        """Add (1) or remove (-1) a task of a client."""
        self._tasks[route,].inc(change)

    def task_ended(self, route: str, outcome: TaskOutcome) -> None:
        """Count the end of a task of a client."""
        self._tasks_ended[route, outcome].inc()

    def subscribed(self, route: str, change: int) -> None:
        """Add (1) or remove (-1) a subscription."""
        self._subscriptions[route,].inc(change)

    def mirroring(self, route: str, change: int) -> None:
        """Add (1) or remove (-1) a call of a legacy client at a modern server."""
        self._mirrored_counts[route] += change
        self._mirrored[route,].set(self._mirrored_counts[route])

    def mirrored(self, route: str) -> int:
        """Return a route's calls of legacy clients at its modern server."""
        return self._mirrored_counts[route]

    def subscription_lost(self, route: str, *, opened_again: bool) -> None:
        """Count a subscription that lost its session, and was opened again or ended."""
        self._subscriptions_lost[route, "reopened" if opened_again else "ended"].inc()

    def session_moved(self, route: str, old: SessionState | None, new: SessionState | None) -> None:
        """Move a session between states; None stands for before its opening and after its end."""
        # Every call moves its session twice, so these are plain numbers; `render` sets the gauges.
        if old is not None:
            self._session_counts[route, old] -= 1
        if new is not None:
            self._session_counts[route, new] += 1

    def child_started(self, route: str) -> None:
        """Add a child; `child_ended` must follow."""
        self._children[route,].inc()

    def child_ended(self, route: str, *, asked: bool) -> None:
        """Remove a child whose processes have all ended; a child that was not asked to end has failed."""
        self._children[route,].dec()
        self._children_ended[route, "asked" if asked else "unasked"].inc()

    def upstream_failed(self, route: str, kind: str) -> None:
        """Count a failure, by an `UpstreamFailure`."""
        self._failures[route, _bounded(kind, UpstreamFailure)].inc()

    def config_reloaded(self, *, applied: bool) -> None:
        """Count a reload; a rejected one left the old configuration in place."""
        self._reloads["applied" if applied else "rejected",].inc()
        if self.saturation is not None:
            self.saturation.reloaded(applied=applied)

    def worker_restarted(self) -> None:
        """Count a worker that replaces one that ended unexpectedly."""
        self._worker_restarts.inc()

    def task_failed(self) -> None:
        """Count an exception that a task did not handle."""
        self._task_failures.inc()

    def sessions(self, route: str) -> dict[str, int]:
        """Return a route's sessions by state."""
        return {state.value: self._session_counts[route, state] for state in SessionState}

    def render(self) -> tuple[bytes, str]:
        """Return (body, content type) of /metrics."""
        if self.saturation is not None:
            self.saturation.refresh()
        for labels, count in self._session_counts.items():
            self._sessions[labels].set(count)
        for budget, status in self.budgets().items():
            self._budget_bytes[budget,].set(status.used)
            self._budget_limits[budget,].set(status.limit)
            self._given_way[budget,].inc(status.given_way - self._shown_given_way.get(budget, 0))
            self._shown_given_way[budget] = status.given_way
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
