"""What all listeners of a process share."""

import pytest

from gateway.config import InForce, Limits, Timeouts
from gateway.http.server.traffic import Traffic
from gateway.telemetry import Malformation, Metrics
from tests.support.logs import Lines


def traffic(**limits: int) -> Traffic:
    return Traffic(InForce(Limits(**limits)), InForce(Timeouts()), Metrics("1"))


def test_malformed_requests_all_count_and_a_line_counts_those_without_one(
    log_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, now = traffic(), 1000.0
    monkeypatch.setattr("gateway.world.monotonic", lambda: now)
    for _ in range(21):
        shared.malformed(Malformation.METHOD, "192.0.2.1")
    now += 0.999
    shared.malformed(Malformation.BODY, "192.0.2.3")
    now += 0.001
    shared.malformed(Malformation.HEADER, "192.0.2.4")
    said = [(line["reason"], line["remote"], line["suppressed"]) for line in log_lines("request.malformed")]
    assert said == [*[("method", "192.0.2.1", 0)] * 20, ("header", "192.0.2.4", 2)]
    counted = shared.metrics.series.registry
    name = "mcp_gateway_malformed_requests_total"
    assert [counted.get_sample_value(name, {"reason": kind}) for kind in ("method", "body")] == [21, 1]


def test_the_budget_for_replies_has_room_for_the_largest_one() -> None:
    assert traffic(sending_bytes=10, event_bytes=20).sending.limit == 20
    assert traffic(sending_bytes=30, event_bytes=20).sending.limit == 30


def test_the_budgets_tell_what_the_metrics_show() -> None:
    shared = traffic(sending_bytes=30, event_bytes=20)
    shared.sending.share(lambda: None).hold(7)
    assert {each.name for each in (shared.receiving, shared.sending)} == {
        "limits.receiving_bytes",
        "limits.sending_bytes",
    }
    assert (shared.sending.status().used, shared.sending.status().limit) == (7, 30)
