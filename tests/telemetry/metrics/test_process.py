"""The metrics of a process among its peers."""

from gateway.telemetry import PeerOutcome
from gateway.telemetry.metrics.registry import BudgetStatus, Metrics
from tests.support.metric_values import value_in


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return value_in(metrics.series.registry, name, **labels)


def test_a_budget_shows_its_bytes_and_how_often_a_holder_gave_way() -> None:
    metrics = Metrics()
    name = "limits.results_bytes"
    statuses = iter([BudgetStatus(7, 9, 2), BudgetStatus(8, 9, 3)])
    metrics.watch_budget(name, lambda: next(statuses))
    assert value(metrics, "budget_given_way_total", budget=name) == 0
    metrics.show_budgets()
    assert value(metrics, "budget_bytes", budget=name) == 7
    assert value(metrics, "budget_limit_bytes", budget=name) == 9
    assert value(metrics, "budget_given_way_total", budget=name) == 2
    metrics.show_budgets()
    assert value(metrics, "budget_given_way_total", budget=name) == 3


def test_a_reload_counts_and_is_noted_where_clients_are_served() -> None:
    metrics = Metrics()
    metrics.config_reloaded(applied=True)
    assert value(metrics, "config_last_reload_successful") is None
    saturation = metrics.watch_load(lambda _: None)
    assert saturation is metrics.saturation
    metrics.config_reloaded(applied=False)
    assert value(metrics, "config_reloads_total", outcome="applied") == 1
    assert value(metrics, "config_reloads_total", outcome="rejected") == 1
    assert value(metrics, "config_last_reload_successful") == 0


def test_requests_of_replicas_count_on_both_sides() -> None:
    metrics = Metrics()
    metrics.peer_asked(PeerOutcome.STALLED)
    metrics.peer_rejected("replayed")
    metrics.peer_rejected("a reason from outside")
    metrics.sent_on()
    assert value(metrics, "peer_requests_total", outcome="stalled") == 1
    assert value(metrics, "peer_rejected_total", reason="replayed") == 1
    assert value(metrics, "peer_rejected_total", reason="other") == 1
    assert value(metrics, "calls_sent_on_total") == 1


def test_crashes_and_bugs_count() -> None:
    metrics = Metrics()
    metrics.worker_restarted()
    metrics.task_failed()
    assert value(metrics, "worker_restarts_total") == 1
    assert value(metrics, "task_failures_total") == 1
