"""The metrics of upstreams."""

import pytest

from gateway.telemetry import COMPLETE, Ending, Outcome, UpstreamEra
from gateway.telemetry.metrics.registry import Metrics
from tests.support.metric_values import value_in


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return value_in(metrics.series.registry, name, **labels)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("method", "ending", "labels"),
    [
        ("tools/call", COMPLETE, {"method": "tools/call", "error_type": ""}),
        ("tools/call", Ending(Outcome.ERROR, "-32602"), {"method": "tools/call", "error_type": "-32602"}),
        ("tools/call", Ending(Outcome.ERROR, "17"), {"method": "tools/call", "error_type": "_OTHER"}),
        ("odd/method", COMPLETE, {"method": "other", "error_type": ""}),
    ],
)
def test_an_answered_call_counts_with_its_time(
    method: str, ending: Ending, labels: dict[str, str], times: int
) -> None:
    metrics = Metrics()
    for _ in range(times):
        metrics.call_answered("/mcp", method, ending, 0.03)
    name = "mcp_client_operation_duration_seconds"
    labels = {"route": "/mcp", **labels}
    assert metrics.series.registry.get_sample_value(f"{name}_count", labels) == times
    assert metrics.series.registry.get_sample_value(f"{name}_bucket", {**labels, "le": "0.02"}) == 0
    assert metrics.series.registry.get_sample_value(f"{name}_bucket", {**labels, "le": "0.05"}) == times


def test_failures_and_probes_count_by_kind() -> None:
    metrics = Metrics()
    metrics.upstream_failed("/mcp", "call_lost")
    metrics.upstream_failed("/mcp", "a kind from outside")
    metrics.era_probed("/mcp", UpstreamEra.MODERN)
    assert value(metrics, "upstream_errors_total", route="/mcp", kind="call_lost") == 1
    assert value(metrics, "upstream_errors_total", route="/mcp", kind="other") == 1
    assert value(metrics, "era_probes_total", route="/mcp", era="modern") == 1


def test_lists_count_by_source_and_the_tools_left_out_of_them() -> None:
    metrics = Metrics()
    metrics.list_answered("/mcp", from_memory=True)
    metrics.list_answered("/mcp", from_memory=False)
    metrics.tool_left_out("/mcp")
    assert value(metrics, "lists_answered_total", route="/mcp", source="memory") == 1
    assert value(metrics, "lists_answered_total", route="/mcp", source="upstream") == 1
    assert value(metrics, "tools_left_out_total", route="/mcp") == 1


def test_a_child_counts_while_it_runs_and_by_why_it_ended() -> None:
    metrics = Metrics()
    for asked in (True, False):
        metrics.child_started("/mcp")
        assert value(metrics, "children", route="/mcp") == 1
        metrics.child_ended("/mcp", asked=asked)
    assert value(metrics, "children", route="/mcp") == 0
    assert value(metrics, "children_ended_total", route="/mcp", why="asked") == 1
    assert value(metrics, "children_ended_total", route="/mcp", why="unasked") == 1
