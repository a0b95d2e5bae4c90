"""All metrics of a process: what counts in which series, their names, their help, a bounded number of series."""

import re
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry import (
    COMPLETE,
    METRICS_TYPE,
    Ending,
    Metrics,
    NestedOutcome,
    Outcome,
    Passed,
    SessionState,
    TrafficEra,
)
from gateway.telemetry.metrics.registry import BudgetStatus

CANARY = "c4nary-7f3a9"
ODD = Ending(Outcome.REJECTED, "odd")
COUNTED: list[tuple[Callable[[Metrics], object], dict[str, float]]] = [
    # (what happens twice, the samples that it adds each time, without their prefix mcp_gateway_)
    (
        lambda metrics: metrics.operations["/mcp", "tools/call", "2026-07-28", *COMPLETE].observe(0.03),
        {
            'mcp_server_operation_duration_seconds{error_type="",method="tools/call",outcome="complete",'
            'protocol_version="2026-07-28",route="/mcp"}': 0.03
        },
    ),
    (
        lambda metrics: metrics.operations["/mcp", "odd", "odd", *ODD].observe(0.03),
        {
            'mcp_server_operation_duration_seconds{error_type="_OTHER",method="other",outcome="rejected",'
            'protocol_version="other",route="/mcp"}': 0.03
        },
    ),
    (
        lambda metrics: metrics.calls["/mcp", "tools/call", COMPLETE.error_type].observe(0.03),
        {'mcp_client_operation_duration_seconds{error_type="",method="tools/call",route="/mcp"}': 0.03},
    ),
    (
        lambda metrics: metrics.calls["/mcp", "odd", ODD.error_type].observe(0.03),
        {'mcp_client_operation_duration_seconds{error_type="_OTHER",method="other",route="/mcp"}': 0.03},
    ),
    (
        lambda metrics: metrics.passed["/mcp", TrafficEra.LEGACY, Passed.LEFT].inc(),
        {'passed_through_total{era="legacy",outcome="left",route="/mcp"}': 1},
    ),
    (
        lambda metrics: metrics.passing["/mcp", TrafficEra.LEGACY].observe(0.2),
        {'passed_through_duration_seconds{era="legacy",route="/mcp"}': 0.2},
    ),
    (
        lambda metrics: metrics.notification("/mcp", "notifications/progress", forwarded=True),
        {'notifications_total{kind="progress",outcome="forwarded",route="/mcp"}': 1},
    ),
    (
        lambda metrics: metrics.notification("/mcp", "notifications/odd", forwarded=False),
        {'notifications_total{kind="other",outcome="dropped",route="/mcp"}': 1},
    ),
    (
        lambda metrics: metrics.hold_times["/mcp",].observe(20),
        {'hold_duration_seconds{route="/mcp"}': 20},
    ),
    (
        lambda metrics: metrics.sessions["/mcp", SessionState.IDLE].inc(),
        {'sessions{route="/mcp",state="idle"}': 1},
    ),
    (lambda metrics: metrics.config_reloaded(applied=True), {'config_reloads_total{outcome="applied"}': 1}),
    (lambda metrics: metrics.config_reloaded(applied=False), {'config_reloads_total{outcome="rejected"}': 1}),
]


def exercised() -> Metrics:
    """Return metrics in which everything has happened once."""
    metrics = Metrics("1.2.3", ["/mcp"])
    metrics.held_calls_limit.set(10_000)
    metrics.watch_budget("limits.results_bytes", lambda: BudgetStatus(7, 9, 2))
    metrics.rounds_per_exchange["/mcp",].observe(3)
    metrics.seals.inc()
    for happens, _ in COUNTED:
        happens(metrics)
    return metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample as `/metrics` names it."""
    lines = [line.rpartition(" ") for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    _ = metrics.render()
    return metrics.series.registry.get_sample_value(name, labels)


def counted(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The samples that differ, with the difference; of a histogram the sum stands for all of them."""
    return {
        name.removeprefix("mcp_gateway_").replace("_sum", ""): pytest.approx(found - before.get(name, 0))
        for name, found in after.items()
        if found != before.get(name, 0) and re.match(r"mcp_\w+(?<!_bucket)(?<!_count)(?=$|{)", name)
    }


@pytest.mark.parametrize(("happens", "adds"), COUNTED, ids=[" ".join(adds) or "nothing" for _, adds in COUNTED])
def test_what_happens_counts_in_its_own_series_alone(
    happens: Callable[[Metrics], object], adds: dict[str, float]
) -> None:
    metrics = Metrics()
    for _ in range(2):
        before = samples(metrics)
        happens(metrics)
        assert counted(before, samples(metrics)) == adds


def test_reading_shows_what_is_set_only_then() -> None:
    metrics = exercised()
    assert value(metrics, "mcp_gateway_build_info", version="1.2.3") == 1
    assert value(metrics, "mcp_gateway_sessions", route="/mcp", state="idle") == 1
    assert value(metrics, "mcp_gateway_budget_bytes", budget="limits.results_bytes") == 7


def test_each_histogram_has_bounds_that_fit_what_it_measures() -> None:
    metrics = exercised()
    for name, below, above in (
        ("mcp_gateway_hold_duration_seconds", "10.0", "30.0"),
        ("mcp_gateway_passed_through_duration_seconds", "0.1", "0.2"),
        ("mcp_gateway_rounds_per_exchange", "2.0", "3.0"),
    ):
        labels = {"route": "/mcp"} | ({"era": "legacy"} if "passed" in name else {})
        found = [value(metrics, f"{name}_bucket", **labels, le=bound) for bound in (below, above)]
        assert found == [0, 1], name


def test_calls_of_legacy_clients_can_be_read_back() -> None:
    metrics = Metrics()
    for change in (1, 1, -1):
        metrics.client_sessions["/mcp",].inc(change)
        metrics.mirrored_calls["/mcp",].inc(change)
    assert (metrics.client_sessions["/mcp",].value, metrics.mirrored_calls["/mcp",].value) == (1, 1)


def test_a_budget_shows_its_bytes_and_how_often_a_holder_gave_way() -> None:
    metrics, name = Metrics(), "limits.results_bytes"
    statuses = iter([BudgetStatus(7, 9, 2), BudgetStatus(8, 9, 3)])
    metrics.watch_budget(name, lambda: next(statuses))
    series = [f"mcp_gateway_budget_{each}" for each in ("bytes", "limit_bytes", "given_way_total")]
    shown = (metrics.series.registry.get_sample_value(each, {"budget": name}) for each in series * 3)
    assert [next(shown) for _ in series] == [None, None, 0]
    for expected in ([7, 9, 2], [8, 9, 3]):
        _ = metrics.render()
        assert [next(shown) for _ in series] == expected


def test_a_reload_is_noted_where_clients_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, name = Metrics(), "mcp_gateway_config_last_reload_success"
    metrics.config_reloaded(applied=True)
    assert value(metrics, f"{name}ful") is None
    seconds = iter((1.0, 3.0))
    monkeypatch.setattr("gateway.telemetry.metrics.registry.world.wall", lambda: next(seconds))
    metrics.config_loaded()
    found = [(value(metrics, f"{name}ful"), value(metrics, f"{name}_timestamp_seconds"))]
    for applied in (False, True):
        metrics.config_reloaded(applied=applied)
        found.append((value(metrics, f"{name}ful"), value(metrics, f"{name}_timestamp_seconds")))
    assert found == [(1, 1), (0, 1), (1, 3)]


def test_a_reload_takes_the_certificates_of_before_away() -> None:
    metrics, name = Metrics(), "mcp_gateway_certificate_expiry_timestamp_seconds"
    metrics.show_certificates({"tls.cert_file": 5.0})
    assert value(metrics, name, key="tls.cert_file") == 5
    metrics.show_certificates({})
    assert value(metrics, name, key="tls.cert_file") is None


def test_a_label_has_a_closed_list_unless_the_configuration_chooses_its_values() -> None:
    for series in Metrics().series.declared:
        labels = series.collected()._labelnames
        _ = series[("odd",) * len(labels)]
        found = dict(zip(labels, list(series)[-1], strict=True))
        assert {label for label, value in found.items() if value == "odd"} <= {"route", "budget", "key", "version"}


def test_ten_thousand_odd_names_from_outside_make_a_bounded_number_of_series() -> None:
    metrics = exercised()
    before = len(samples(metrics))
    for odd in (f"{CANARY}/{number}" for number in range(10_000)):
        metrics.operations["/mcp", odd, odd, *Ending(Outcome.REJECTED, odd)].observe(0)
        metrics.nested_requests["/mcp", odd, NestedOutcome.UNSOLICITED].inc()
        metrics.notification("/mcp", odd, forwarded=False)
        metrics.state_rejections[odd,].inc()
        metrics.peer_rejections[odd,].inc()
        metrics.rejections[odd,].inc()
        metrics.upstream_failures["/mcp", odd].inc()
    assert len(samples(metrics)) - before <= 24
    assert CANARY not in metrics.render().decode()


def test_every_metric_has_a_help_text_and_a_name_by_the_rules() -> None:
    text = exercised().render()
    assert METRICS_TYPE.startswith("text/plain")
    families = [
        family for family in text_string_to_metric_families(text.decode()) if not family.name.startswith("process_")
    ]
    assert len(families) == 58
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
    text = Metrics("1", ["/mcp"]).render()
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
    found = text.decode().splitlines()
    assert [line for line in zeroes if f"mcp_gateway_{line} 0.0" not in found] == []
