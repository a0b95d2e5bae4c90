"""The metrics of sessions, tasks and subscriptions."""

from gateway.telemetry import SessionLimit, SessionState, TaskOutcome
from gateway.telemetry.metrics.registry import Metrics
from tests.support.metric_values import value_in


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return value_in(metrics.series.registry, name, route="/mcp", **labels)


def test_sessions_count_by_state() -> None:
    metrics = Metrics()
    counts = metrics.sessions_by_state("/mcp")
    counts[SessionState.IDLE].inc()
    counts[SessionState.BUSY].inc()
    counts[None].inc(-2)
    assert metrics.sessions("/mcp") == {"idle": 1, "busy": 1, "quarantined": 0}
    assert value(metrics, "sessions", state="idle") == 1
    counts[SessionState.IDLE].inc(-1)
    assert value(metrics, "sessions", state="idle") == 0


def test_a_session_counts_when_it_opens_is_refused_or_is_lost() -> None:
    metrics = Metrics()
    metrics.session_opened("/mcp")
    metrics.session_refused("/mcp", SessionLimit.RATE)
    metrics.session_refused("/mcp", "sessions.new_per_second")
    metrics.session_refused("/mcp", "a limit that has no label")
    metrics.session_lost("/mcp")
    assert value(metrics, "sessions_opened_total") == 1
    assert value(metrics, "sessions_refused_total", limit="sessions.new_per_second") == 2, "its text is the same key"
    assert value(metrics, "sessions_refused_total", limit="other") == 1
    assert value(metrics, "sessions_lost_total") == 1


def test_the_sessions_and_calls_of_legacy_clients_can_be_read_back() -> None:
    metrics = Metrics()
    for change in (1, 1, -1):
        metrics.relayed("/mcp", change)
        metrics.mirroring("/mcp", change)
    assert metrics.client_sessions("/mcp") == value(metrics, "client_sessions") == 1
    assert metrics.mirrored("/mcp") == value(metrics, "mirrored_calls") == 1


def test_a_task_counts_until_its_time_is_over_and_by_its_outcome() -> None:
    metrics = Metrics()
    metrics.tasks_changed("/mcp", 2)
    metrics.tasks_changed("/mcp", -1)
    metrics.task_ended("/mcp", TaskOutcome.LOST)
    assert value(metrics, "tasks") == 1
    assert value(metrics, "tasks_ended_total", outcome="lost") == 1


def test_a_lost_subscription_counts_by_what_became_of_it() -> None:
    metrics = Metrics()
    metrics.subscribed("/mcp", 1)
    metrics.subscription_lost("/mcp", opened_again=True)
    metrics.subscription_lost("/mcp", opened_again=False)
    assert value(metrics, "subscriptions") == 1
    assert value(metrics, "subscriptions_lost_total", outcome="reopened") == 1
    assert value(metrics, "subscriptions_lost_total", outcome="ended") == 1
