"""Counts the answers of upstreams, their failures, their child processes."""

from typing import Final

from gateway.telemetry.metrics.label_values import ERROR_TYPES, bounded, bounded_method
from gateway.telemetry.metrics.labels import OTHER_ERROR, UPSTREAM_FAILURES, Ending, UpstreamEra
from gateway.telemetry.metrics.series import DURATIONS, Series

_WHY: Final = ("asked", "unasked")


class UpstreamMetrics(Series):
    """The metrics of upstreams."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = self._histogram(
            "mcp_client_operation_duration_seconds",
            "Time that an upstream took for a call, without the time that people thought.",
            ("route", "method", "error_type"),
            DURATIONS,
        )
        self._failures = self._counter(
            "upstream_errors_total", "Failures of upstreams, by kind.", "route", "kind", zero=(UPSTREAM_FAILURES,)
        )
        self._probes = self._counter(
            "era_probes_total", "Probes of upstreams, by the era found.", "route", "era", zero=(UpstreamEra,)
        )
        self._lists = self._counter(
            "lists_answered_total", "Lists on routes with cache.lists_seconds, by source.", "route", "source"
        )
        self._left_out = self._counter(
            "tools_left_out_total",
            "Tools left out of a list because clients would refuse the whole list.",
            "route",
            zero=(),
        )
        self._children = self._gauge("children", "Child processes: warm, idle, in use or ending.", "route")
        self._children_ended = self._counter(
            "children_ended_total",
            "Child processes that ended, by whether the gateway asked them to.",
            *("route", "why"),
            zero=(_WHY,),
        )

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
