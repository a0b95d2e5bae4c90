"""The metrics: names, labels, a bounded number of series; what they count of real requests."""

import json
import re
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.protocol import mcp
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
from gateway.telemetry.metrics.process import BudgetStatus
from tests.parts.launch import free_port
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, eventually

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
    metrics.show_newcomers("/mcp", 3, 4)
    metrics.session_lost("/mcp")
    metrics.subscribed("/mcp", 1)
    metrics.tool_left_out("/mcp")
    metrics.list_answered("/mcp", from_memory=True)
    metrics.subscription_lost("/mcp", opened_again=True)
    metrics.session_moved("/mcp", None, SessionState.BUSY)
    metrics.session_moved("/mcp", SessionState.BUSY, SessionState.IDLE)
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


def test_every_method_counts_under_its_name_and_labels() -> None:
    metrics = exercised()
    operation = {
        "route": "/mcp",
        "method": "tools/call",
        "protocol_version": "2026-07-28",
        "outcome": "complete",
        "error_type": "",
    }
    expected = [
        ("mcp_gateway_passed_through_total", {"route": "/mcp", "era": "legacy", "outcome": "cut"}, 1),
        ("mcp_gateway_passed_through_duration_seconds_count", {"route": "/mcp", "era": "legacy"}, 1),
        ("mcp_gateway_passed_through_total", {"route": "/mcp", "era": "legacy", "outcome": "left"}, 1),
        ("mcp_gateway_era_probes_total", {"route": "/mcp", "era": "modern"}, 1),
        ("mcp_server_operation_duration_seconds_count", operation, 1),
        ("mcp_server_operation_duration_seconds_bucket", {**operation, "le": "0.02"}, 0),
        ("mcp_server_operation_duration_seconds_bucket", {**operation, "le": "0.05"}, 1),
        ("mcp_gateway_downstream_rejected_total", {"reason": "header_mismatch"}, 1),
        (
            "mcp_gateway_nested_requests_total",
            {"route": "/mcp", "method": "elicitation/create", "outcome": "asked"},
            1,
        ),
        ("mcp_gateway_notifications_total", {"route": "/mcp", "kind": "progress", "outcome": "forwarded"}, 1),
        ("mcp_gateway_notifications_total", {"route": "/mcp", "kind": "other", "outcome": "dropped"}, 3),
        ("mcp_gateway_held_calls", {"route": "/mcp"}, 1),
        ("mcp_gateway_held_calls_limit", {}, 10_000),
        ("mcp_gateway_budget_bytes", {"budget": "limits.results_bytes"}, 7),
        ("mcp_gateway_budget_limit_bytes", {"budget": "limits.results_bytes"}, 9),
        ("mcp_gateway_budget_given_way_total", {"budget": "limits.results_bytes"}, 2),
        ("mcp_gateway_hold_duration_seconds_sum", {"route": "/mcp"}, 20),
        ("mcp_gateway_rounds_per_exchange_sum", {"route": "/mcp"}, 3),
        ("mcp_gateway_continuations_total", {"route": "/mcp", "step": "held"}, 1),
        ("mcp_gateway_continuations_total", {"route": "/mcp", "step": "lost"}, 0),
        ("mcp_gateway_state_rejected_total", {"reason": "expired"}, 1),
        ("mcp_gateway_seals_total", {}, 1),
        ("mcp_gateway_sessions_opened_total", {"route": "/mcp"}, 1),
        ("mcp_gateway_sessions_refused_total", {"route": "/mcp", "limit": "sessions.new_per_second"}, 1),
        ("mcp_gateway_newcomer_sessions", {"route": "/mcp"}, 3),
        ("mcp_gateway_newcomer_sessions_limit", {"route": "/mcp"}, 4),
        ("mcp_gateway_sessions_lost_total", {"route": "/mcp"}, 1),
        ("mcp_gateway_sessions", {"route": "/mcp", "state": "busy"}, 0),
        ("mcp_gateway_sessions", {"route": "/mcp", "state": "idle"}, 1),
        ("mcp_gateway_sessions", {"route": "/mcp", "state": "quarantined"}, 0),
        ("mcp_gateway_upstream_errors_total", {"route": "/mcp", "kind": "call_lost"}, 1),
        ("mcp_gateway_config_reloads_total", {"outcome": "rejected"}, 1),
        ("mcp_gateway_peer_requests_total", {"outcome": "stalled"}, 1),
        ("mcp_gateway_peer_rejected_total", {"reason": "replayed"}, 1),
        ("mcp_gateway_worker_restarts_total", {}, 1),
        ("mcp_gateway_task_failures_total", {}, 1),
        ("mcp_gateway_build_info", {"version": "1.2.3"}, 1),
    ]
    for name, labels, expected_value in expected:
        assert value(metrics, name, **labels) == expected_value, name


def test_the_duration_buckets_are_those_of_the_semantic_conventions() -> None:
    text = exercised().render()[0].decode()
    found = re.findall(r'mcp_server_operation_duration_seconds_bucket\{error_type="",le="([^"]+)"', text)
    assert [float(bound) for bound in found] == [
        *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300),
        float("inf"),
    ]


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
    assert len(families) == 46
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


def test_a_child_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = exercised()
    monkeypatch.setattr(prometheus_client.Counter, "labels", None)
    monkeypatch.setattr(prometheus_client.Histogram, "labels", None)
    metrics.continued("/mcp", Step.HELD)
    metrics.operation_finished("/mcp", "tools/call", "2026-07-28", COMPLETE, 0.03)
    assert value(metrics, "mcp_gateway_continuations_total", route="/mcp", step="held") == 2


COUNT = "mcp_server_operation_duration_seconds_count"


OLD = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


FAILED: dict[str, Any] = {**text("no such city"), "isError": True}


def operations(stand: Stand) -> dict[tuple[str, str, str], int]:
    """By method, outcome and error type: rounds that were counted."""
    found = {
        (each.labels["method"], each.labels["outcome"], each.labels["error_type"]): int(each.value)
        for family in stand.gateway.metrics._registry.collect()
        for each in family.samples
        if each.name == COUNT
    }
    return {labels: count for labels, count in found.items() if count}


async def fail(turn: Turn) -> None:
    await turn.result(FAILED)


@pytest.mark.parametrize(
    ("code", "error_type"),
    [(-32602, "-32602"), (0, "0"), (-32000, "-32000"), (17, "_OTHER"), (-32050, "-32603")],
)
async def test_an_error_is_counted_by_its_code_or_as_other(
    upstream: FakeUpstream, stand: Stand, client: Client, code: int, error_type: str
) -> None:
    upstream.tool(lambda turn: turn.error(code, "no"))
    assert "error" in (await client.call()).final
    assert operations(stand) == {("tools/call", "error", error_type): 1}


async def test_a_tool_that_says_that_it_failed_is_complete_and_a_tool_error(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    said = iter([text("fine"), FAILED, {**text('"isError": true'), "isError": False}])

    async def tool(turn: Turn) -> None:
        await turn.result(next(said))

    upstream.tool(tool)
    for _ in range(3):
        _ = await client.call()
    assert operations(stand) == {("tools/call", "complete", ""): 2, ("tools/call", "complete", "tool_error"): 1}


async def test_a_tool_error_of_the_last_round_is_that_rounds(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        await turn.result(FAILED)

    upstream.tool(tool)
    asked = await client.call()
    _ = await client.answer(asked)
    assert operations(stand) == {("tools/call", "input_required", ""): 1, ("tools/call", "complete", "tool_error"): 1}


async def test_a_round_is_counted_with_its_error_type_by_the_replica_that_its_client_spoke_to(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        await turn.result(FAILED)

    upstream.tool(tool)
    peers = {name: f"127.0.0.1:{free_port()}" for name in ("gw-1", "gw-2")}
    owner, other = [await begin(replica={"id": name, "listen": peers[name], "peers": peers}) for name in peers]
    asked = await owner.client().call()
    _ = await other.client().answer(asked)
    assert operations(owner) == {("tools/call", "input_required", ""): 1}
    assert operations(other) == {("tools/call", "complete", "tool_error"): 1}


async def test_what_the_gateway_refuses_and_what_the_upstream_breaks_are_told_apart(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    assert (await client.call(state="mrtr1.no")).status == 400
    await upstream.close()
    assert (await client.call()).error["code"] == mcp.INTERNAL_ERROR
    assert operations(stand) == {("tools/call", "rejected", "-32602"): 1, ("tools/call", "error", "-32603"): 1}


async def test_a_subscription_is_counted_when_it_is_open_and_not_when_it_ends(stand: Stand, client: Client) -> None:
    async with client.open(mcp.LISTEN, {"notifications": {}}) as response:
        assert b"acknowledged" in await response.content.readany()
        assert operations(stand) == {("subscriptions/listen", "complete", ""): 1}
    await eventually(lambda: stand.gateway.downstream.in_flight == 0)
    assert operations(stand) == {("subscriptions/listen", "complete", ""): 1}


async def test_what_is_passed_through_is_timed_but_for_streams_that_are_no_reply(stand: Stand) -> None:
    shake = {"protocolVersion": mcp.LEGACY, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": shake})
    async with stand.http.post(stand.url, data=body, headers=OLD) as response:
        session = response.headers[mcp.SESSION_ID]
        _ = await response.read()
    async with stand.http.get(stand.url, headers={**OLD, mcp.SESSION_ID: session}) as response:
        assert response.status == 200
    passed = "mcp_gateway_passed_through_total"
    await eventually(lambda: stand.metric(passed, era="legacy", outcome="left") == 1)
    assert stand.metric(passed, era="legacy", outcome="answered") == 1
    assert stand.metric("mcp_gateway_passed_through_duration_seconds_count", era="legacy") == 1
    assert operations(stand) == {}


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


def test_the_sessions_of_a_route_are_counted_by_state() -> None:
    assert exercised().sessions("/mcp") == {"idle": 1, "busy": 0, "quarantined": 0}
