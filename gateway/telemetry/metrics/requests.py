"""Counts the requests of clients, with what came of them."""

from typing import Final

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
    REJECTIONS,
    Ending,
    Malformation,
    NestedOutcome,
    Passed,
    TrafficEra,
)
from gateway.telemetry.metrics.series import DURATIONS, Series

_REFUSALS: Final = (NestedOutcome.REFUSED, NestedOutcome.UNDECLARED, NestedOutcome.UNSOLICITED)


class RequestMetrics(Series):
    """The metrics of rounds, nested requests, notifications, passed-through requests, rejections."""

    def __init__(self) -> None:
        super().__init__()
        self._operations = self._histogram(
            "mcp_server_operation_duration_seconds",
            "Time from a request to its final message, per round; for subscriptions/listen, to its acknowledgement.",
            ("route", "method", "protocol_version", "outcome", "error_type"),
            DURATIONS,
        )
        self._nested = self._counter(
            "nested_requests_total",
            "Nested requests that upstreams sent inside calls.",
            *("route", "method", "outcome"),
            zero=(NESTED_METHODS, _REFUSALS),
        )
        self._notifications = self._counter(
            "notifications_total", "Upstream notifications, forwarded or dropped.", "route", "kind", "outcome"
        )
        self._rejections = self._counter(
            "downstream_rejected_total",
            "Requests that the gateway refused before they reached an upstream.",
            "reason",
            zero=(REJECTIONS,),
        )
        self._malformations = self._counter(
            "malformed_requests_total",
            "Requests that were not well-formed HTTP, on any listener.",
            "reason",
            zero=(Malformation,),
        )
        self._passed = self._counter(
            "passed_through_total",
            "Passed-through requests, by outcome.",
            *("route", "era", "outcome"),
            zero=(TrafficEra, Passed),
        )
        self._passing = self._histogram(
            "mcp_gateway_passed_through_duration_seconds",
            "Time from a passed-through request to the end of its reply, except for long-lived streams.",
            ("route", "era"),
            DURATIONS,
        )

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
