"""The metrics of how much of each limit a process uses."""

import json
import time
from types import SimpleNamespace

import pytest

from gateway.admin.merge_metrics import merge, parse
from gateway.protocol import mcp
from gateway.telemetry.metrics.registry import Metrics
from gateway.telemetry.metrics.saturation import Saturation
from tests.support.fake_upstream import FakeUpstream
from tests.support.metric_values import value_in
from tests.support.replicas import ask
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Stand

DURATION = "mcp_client_operation_duration_seconds"


def value(stand: Stand, name: str, **labels: str) -> float | None:
    _ = stand.gateway.metrics.render()
    found = stand.gateway.metrics.series.registry.get_sample_value(name, labels)
    assert found is not None, (name, labels)
    return found


async def test_the_use_of_each_limit_stands_beside_the_limit(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(ask)
    stand = await begin(limits={"connections": 99}, sessions={"max": 7})
    client = stand.client()
    asked = await client.call()
    route = {"route": "/mcp"}
    assert value(stand, "mcp_gateway_ready") == 1
    assert value(stand, "mcp_gateway_connections") == 1
    assert value(stand, "mcp_gateway_connections_limit") == 99
    assert value(stand, "mcp_gateway_requests_in_flight") == 0
    assert value(stand, "mcp_gateway_sessions_limit", **route) == 7
    metrics = stand.gateway.metrics.series.registry
    assert value_in(metrics, "children_limit", **route) is None, "the upstream is no command"
    assert json.loads((await client.answer(asked)).text) == ACCEPT


async def test_a_draining_process_is_not_ready(upstream: FakeUpstream, stand: Stand) -> None:
    await stand.gateway.drain(delay_seconds=0)
    assert value(stand, "mcp_gateway_ready") == 0


async def test_the_last_reload_counts_with_its_time(upstream: FakeUpstream, stand: Stand) -> None:
    began = value(stand, "mcp_gateway_config_last_reload_success_timestamp_seconds")
    assert value(stand, "mcp_gateway_config_last_reload_successful") == 1
    stand.gateway.metrics.config_reloaded(applied=False)
    assert value(stand, "mcp_gateway_config_last_reload_successful") == 0
    assert value(stand, "mcp_gateway_config_last_reload_success_timestamp_seconds") == began
    stand.gateway.metrics.config_reloaded(applied=True)
    assert value(stand, "mcp_gateway_config_last_reload_successful") == 1


async def test_the_time_that_people_think_is_not_the_upstreams(
    upstream: FakeUpstream, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.tool(ask)
    client = stand.client()
    asked = await client.call()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0)
    monkeypatch.setattr("gateway.bridge.call_report.world", later)
    assert json.loads((await client.answer(asked)).text) == ACCEPT
    labels = {"route": "/mcp", "method": mcp.TOOLS_CALL, "error_type": ""}
    assert value(stand, f"{DURATION}_count", **labels) == 1
    seconds = value(stand, f"{DURATION}_sum", **labels)
    assert seconds is not None
    assert 0 <= seconds < 100


async def test_a_plain_call_is_counted_with_the_time_of_its_upstream(upstream: FakeUpstream, stand: Stand) -> None:
    client = stand.client()
    for _ in range(3):  # from the second one on, an idle session takes the call at once
        _ = await client.call()
    labels = {"route": "/mcp", "method": mcp.TOOLS_CALL, "error_type": ""}
    assert value(stand, f"{DURATION}_count", **labels) == 3


@pytest.mark.parametrize(
    ("name", "values", "merged"),
    [
        ("mcp_gateway_ready", ("1.0", "0.0"), 0),
        ("mcp_gateway_config_last_reload_successful", ("1.0", "0.0"), 0),
        ("mcp_gateway_connections", ("4.0", "9.0"), 13),
    ],
)
def test_the_worst_worker_counts_where_a_sum_means_nothing(name: str, values: tuple[str, str], merged: float) -> None:
    scrapes = [parse(f"# HELP {name} x.\n# TYPE {name} gauge\n{name} {value}\n") for value in values]
    assert merge(scrapes)[name].samples == {name: merged}


def test_a_reload_takes_the_certificates_and_routes_of_before_away() -> None:
    metrics, routes = Metrics(), ["/child"]
    registry = metrics.series.registry

    def fill(gauges: Saturation) -> None:
        for route in routes:
            gauges.children_limit[route,].set(4)

    saturation = metrics.watch_load(fill)
    saturation.show_certificates({"tls.cert_file": 5.0})
    saturation.refresh()
    assert value_in(registry, "certificate_expiry_timestamp_seconds", key="tls.cert_file") == 5
    assert value_in(registry, "children_limit", route="/child") == 4
    saturation.show_certificates({})
    routes.clear()
    saturation.refresh()
    assert value_in(registry, "certificate_expiry_timestamp_seconds", key="tls.cert_file") is None
    assert value_in(registry, "children_limit", route="/child") is None
