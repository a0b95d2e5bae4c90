"""The metrics of calls between their rounds."""

from gateway.telemetry import ColdEnding, Step
from gateway.telemetry.metrics.registry import Metrics
from tests.support.metric_values import value_in


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return value_in(metrics.series.registry, name, **labels)


def test_a_parked_call_is_held_until_its_release_and_its_time_counts() -> None:
    metrics = Metrics()
    metrics.set_held_limit(10_000)
    metrics.call_parked("/mcp")
    metrics.call_parked("/mcp")
    metrics.call_released("/mcp", 20)
    assert value(metrics, "held_calls", route="/mcp") == 1
    assert value(metrics, "held_calls_limit") == 10_000
    assert value(metrics, "hold_duration_seconds_sum", route="/mcp") == 20
    assert value(metrics, "hold_duration_seconds_bucket", route="/mcp", le="10.0") == 0
    assert value(metrics, "hold_duration_seconds_bucket", route="/mcp", le="30.0") == 1


def test_a_cold_call_is_counted_when_it_is_let_go_of_and_when_it_ends() -> None:
    metrics = Metrics()
    metrics.show_cold_call("/mcp", 1)
    metrics.call_cooled("/mcp")
    assert value(metrics, "cold_calls", route="/mcp") == 1
    metrics.show_cold_call("/mcp", -1)
    metrics.cold_call_ended("/mcp", ColdEnding.EXPIRED)
    assert value(metrics, "cold_calls", route="/mcp") == 0
    assert value(metrics, "calls_cooled_total", route="/mcp") == 1
    assert value(metrics, "cold_calls_ended_total", route="/mcp", ending="expired") == 1


def test_a_retry_counts_by_its_step_and_an_exchange_by_its_rounds() -> None:
    metrics = Metrics()
    metrics.continued("/mcp", Step.HELD)
    metrics.exchange_finished("/mcp", 3)
    assert value(metrics, "continuations_total", route="/mcp", step="held") == 1
    assert value(metrics, "rounds_per_exchange_sum", route="/mcp") == 3


def test_states_count_when_they_are_sealed_and_when_they_are_rejected() -> None:
    metrics = Metrics()
    metrics.sealed()
    metrics.state_rejected("expired")
    metrics.state_rejected("a reason from outside")
    assert value(metrics, "seals_total") == 1
    assert value(metrics, "state_rejected_total", reason="expired") == 1
    assert value(metrics, "state_rejected_total", reason="other") == 1
