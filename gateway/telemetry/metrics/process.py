"""Counts the events of a process: reloads, full budgets, crashes, requests of other replicas."""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from gateway.telemetry.metrics.label_values import bounded
from gateway.telemetry.metrics.labels import PEER_REASONS, PeerOutcome
from gateway.telemetry.metrics.saturation import Saturation
from gateway.telemetry.metrics.series import Series

_RELOADS: Final = ("applied", "rejected")


class BudgetStatus(Struct, frozen=True):
    """A budget of bytes that many holders share."""

    used: int
    limit: int
    given_way: int
    """How many holders gave their bytes up because the budget was full."""


class ProcessMetrics(Series):
    """The metrics of a process among its peers."""

    def __init__(self) -> None:
        super().__init__()
        self.saturation: Saturation | None = None
        self._reloads = self._counter("config_reloads_total", "Configuration reloads.", "outcome", zero=(_RELOADS,))
        self._budgets: dict[str, Callable[[], BudgetStatus]] = {}
        self._budget_bytes = self._gauge("budget_bytes", "Bytes that are counted against a limit.", "budget")
        self._budget_limits = self._gauge("budget_limit_bytes", "The limits of `mcp_gateway_budget_bytes`.", "budget")
        self._given_way = self._counter(
            "budget_given_way_total", "Holders of bytes that gave way because their budget was full.", "budget"
        )
        self._peer_requests = self._counter(
            "peer_requests_total", "Requests forwarded to another replica, by outcome.", "outcome", zero=(PeerOutcome,)
        )
        self._peer_rejections = self._counter(
            "peer_rejected_total",
            "Requests on the peer listener that no replica sealed, or that arrived twice.",
            "reason",
            zero=(PEER_REASONS,),
        )
        self._sent_on = self._counter(
            "calls_sent_on_total", "New calls that this replica sent to another one while it drained."
        )[()]
        self._worker_restarts = self._counter(
            "worker_restarts_total", "Workers that ended unexpectedly and were restarted."
        )[()]
        self._task_failures = self._counter("task_failures_total", "Unexpected exceptions: each is a bug.")[()]

    def watch_load(self, fill: Callable[[Saturation], None]) -> Saturation:
        """Show how much of its limits a process that serves clients uses; `fill` sets the gauges."""
        self.saturation = Saturation(self._gauge, fill)
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
