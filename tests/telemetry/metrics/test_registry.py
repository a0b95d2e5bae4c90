"""All metrics of a process: their names, their help, a bounded number of series."""

import re

from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry import (
    COMPLETE,
    ColdEnding,
    Ending,
    Metrics,
    NestedOutcome,
    Outcome,
    Passed,
    PeerOutcome,
    SessionLimit,
    SessionState,
    Step,
    TrafficEra,
    UpstreamEra,
)
from gateway.telemetry.metrics.registry import BudgetStatus

CANARY = "c4nary-7f3a9"


def exercised() -> Metrics:
    """Return metrics on which every method was called."""
    metrics = Metrics("1.2.3", ["/mcp"])
    metrics.operation_finished("/mcp", "tools/call", "2026-07-28", COMPLETE, 0.03)
    metrics.downstream_rejected("header_mismatch")
    metrics.passed("/mcp", TrafficEra.LEGACY, Passed.CUT, 0.2)
    metrics.passed("/mcp", TrafficEra.LEGACY, Passed.LEFT, None)
    metrics.era_probed("/mcp", UpstreamEra.MODERN)
    metrics.nested_request("/mcp", "elicitation/create", NestedOutcome.ASKED)
    metrics.notification("/mcp", "notifications/progress", forwarded=True)
    metrics.notification("/mcp", "notifications/odd", forwarded=False)
    metrics.notifications_dropped("/mcp", 2)
    metrics.show_cold_call("/mcp", 1)
    metrics.call_cooled("/mcp")
    metrics.cold_call_ended("/mcp", ColdEnding.EXPIRED)
    metrics.call_parked("/mcp")
    metrics.call_parked("/mcp")
    metrics.call_released("/mcp", 20)
    metrics.set_held_limit(10_000)
    metrics.watch_budget("limits.results_bytes", lambda: BudgetStatus(7, 9, 2))
    metrics.exchange_finished("/mcp", 3)
    metrics.continued("/mcp", Step.HELD)
    metrics.state_rejected("expired")
    metrics.sealed()
    metrics.session_opened("/mcp")
    metrics.session_refused("/mcp", SessionLimit.RATE)
    metrics.session_lost("/mcp")
    metrics.subscribed("/mcp", 1)
    metrics.tool_left_out("/mcp")
    metrics.list_answered("/mcp", from_memory=True)
    metrics.subscription_lost("/mcp", opened_again=True)
    metrics.sessions_by_state("/mcp")[SessionState.IDLE].inc()
    metrics.child_started("/mcp")
    metrics.child_ended("/mcp", asked=False)
    metrics.upstream_failed("/mcp", "call_lost")
    metrics.config_reloaded(applied=False)
    metrics.peer_asked(PeerOutcome.STALLED)
    metrics.peer_rejected("replayed")
    metrics.worker_restarted()
    metrics.task_failed()
    return metrics


def samples(metrics: Metrics) -> dict[str, float]:
    text, _ = metrics.render()
    return {
        f"{sample.name}{sorted(sample.labels.items())}" if sample.labels else sample.name: sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[f"{name}{sorted(labels.items())}" if labels else name]


def test_reading_shows_what_is_set_only_then() -> None:
    metrics = exercised()
    assert value(metrics, "mcp_gateway_build_info", version="1.2.3") == 1
    assert value(metrics, "mcp_gateway_sessions", route="/mcp", state="idle") == 1
    assert value(metrics, "mcp_gateway_budget_bytes", budget="limits.results_bytes") == 7
    _ = metrics.watch_load(lambda gauges: gauges.in_flight.set(5))
    assert value(metrics, "mcp_gateway_requests_in_flight") == 5


def test_ten_thousand_odd_names_from_outside_make_a_bounded_number_of_series() -> None:
    metrics = exercised()
    before = len(samples(metrics))
    for odd in (f"{CANARY}/{number}" for number in range(10_000)):
        metrics.operation_finished("/mcp", odd, odd, Ending(Outcome.REJECTED, odd), 0)
        metrics.nested_request("/mcp", odd, NestedOutcome.UNSOLICITED)
        metrics.notification("/mcp", odd, forwarded=False)
        metrics.state_rejected(odd)
        metrics.peer_rejected(odd)
        metrics.downstream_rejected(odd)
        metrics.upstream_failed("/mcp", odd)
    assert len(samples(metrics)) - before <= 24
    assert CANARY not in metrics.render()[0].decode()


def test_every_metric_has_a_help_text_and_a_name_by_the_rules() -> None:
    text, kind = exercised().render()
    assert kind.startswith("text/plain")
    families = [
        family for family in text_string_to_metric_families(text.decode()) if not family.name.startswith("process_")
    ]
    assert len(families) == 44
    for family in families:
        assert re.fullmatch(r"mcp_(gateway|server|client)(_[a-z]+)+", family.name)
        assert family.documentation.endswith(".")
        assert not family.name.endswith("_created")
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        if "duration" in family.name:
            assert family.name.endswith("_seconds")
        assert not re.search(r"_(ms|millis|kb|mb|msec|count)$", family.name)
        assert family.type in {"counter", "gauge", "histogram"}
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", label) for label in sample.labels)
            assert family.type == "histogram" or not {"le", "quantile"} & sample.labels.keys()
            # A gauge that ends as a counter does is summed up by whoever goes by names.
            assert sample.name.endswith("_total") == (family.type == "counter")


def test_two_registries_know_nothing_of_each_other_and_the_process_is_watched() -> None:
    one, other = exercised(), Metrics("1.2.3")
    assert value(other, "mcp_gateway_seals_total") == 0
    assert value(one, "mcp_gateway_seals_total") == 1
    assert "process_open_fds" in samples(one)


def test_what_an_alert_watches_begins_at_zero() -> None:
    """A rate cannot see the first step of a series that comes into being with it."""
    text_, _ = Metrics("1", ["/mcp"]).render()
    zeroes = [
        'continuations_total{route="/mcp",step="lost"}',
        'state_rejected_total{reason="unknown_key"}',
        'upstream_errors_total{kind="upstream_unreachable",route="/mcp"}',
        'nested_requests_total{method="elicitation/create",outcome="refused_unsolicited",route="/mcp"}',
        'peer_requests_total{outcome="dead"}',
        'peer_rejected_total{reason="forged"}',
        'downstream_rejected_total{reason="busy"}',
        'config_reloads_total{outcome="rejected"}',
        'held_calls{route="/mcp"}',
    ]
    found = text_.decode().splitlines()
    assert [line for line in zeroes if f"mcp_gateway_{line} 0.0" not in found] == []
