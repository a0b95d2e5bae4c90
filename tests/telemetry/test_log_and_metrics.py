"""Telemetry: lines that parse, secrets that stay out, and series that stay few."""

import io
import json
import logging
import re
import string
import sys
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import NoReturn, TypeVar

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.protocol.errors import DownstreamError, GatewayError, InvalidState, UpstreamError
from gateway.seal.request_state import Binding
from gateway.telemetry import (
    COMPLETE,
    Ending,
    Event,
    Metrics,
    NestedOutcome,
    Outcome,
    Passed,
    PeerOutcome,
    PeerReason,
    Rejection,
    SessionState,
    StateReason,
    Step,
    TrafficEra,
    UpstreamEra,
    UpstreamFailure,
    configure_logging,
    get_logger,
    mask,
    secret_arguments,
)

E = TypeVar("E", bound=GatewayError)
SOURCES = sorted((Path(__file__).parents[2] / "gateway").rglob("*.py"))
CANARY = "c4nary-7f3a9"
KEY = b64encode(bytes(range(100, 132))).decode()
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjNG5hcnkifQ.c2lnbmF0dXJl"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail(exc: Exception) -> NoReturn:
    raise exc


def logged(**fields: object) -> str:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    get_logger().info(Event.EXCHANGE_FINISHED, **fields)
    return stream.getvalue()


# Logging.


def test_a_line_is_json_with_event_level_utc_time_and_bound_fields() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    get_logger(route="/mcp").info(Event.EXCHANGE_FINISHED, rounds=2, seconds=0.5, ok=True, none=None)
    (line,) = lines(stream)
    stamp = datetime.fromisoformat(str(line.pop("timestamp")))
    assert stamp.utcoffset() == timedelta(0)
    assert line == {
        "event": "exchange.finished",
        "level": "info",
        "route": "/mcp",
        "rounds": 2,
        "seconds": 0.5,
        "ok": True,
        "none": None,
    }


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure_logging("warning", "json", stream)
    get_logger().info(Event.CONFIG_LOADED)
    logging.getLogger("aiohttp.server").info("hello")
    get_logger().warning(Event.SESSION_LOST)
    logging.getLogger("aiohttp.server").error("oh")
    assert [line["event"] for line in lines(stream)] == ["session.lost", "oh"]


def test_the_standard_library_speaks_the_same_form_with_its_logger_and_exception() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    try:
        fail(RuntimeError(f"Authorization: Bearer {CANARY}"))
    except RuntimeError:
        logging.getLogger("aiohttp.server").exception("failed for %s", f"Bearer {CANARY}")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("failed for Bearer [hidden]", "error", "aiohttp.server")
    assert "RuntimeError: Authorization: Bearer [hidden]" in str(line["exception"])


def test_a_warning_becomes_a_line() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    logging.getLogger("py.warnings").warning("careful")
    assert logging.getLogger("py.warnings").isEnabledFor(logging.WARNING)
    assert lines(stream)[0]["logger"] == "py.warnings"


def test_an_exception_is_one_line_with_its_traceback_and_no_variables() -> None:
    hidden_variable = CANARY
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    try:
        fail(ValueError(len(hidden_variable)))
    except ValueError:
        get_logger().exception(Event.TASK_FAILED)
    (line,) = lines(stream)
    assert "Traceback" in str(line["exception"])
    assert CANARY not in stream.getvalue()


@pytest.mark.parametrize(
    ("chosen", "stream", "is_json"),
    [
        ("auto", io.StringIO, True),
        ("auto", Terminal, False),
        ("json", Terminal, True),
        ("console", io.StringIO, False),
    ],
)
def test_auto_is_for_people_on_a_terminal_only(
    chosen: str, stream: Callable[[], io.StringIO], *, is_json: bool
) -> None:
    out = stream()
    configure_logging("info", chosen, out)
    try:
        fail(ValueError(f"Bearer {CANARY}"))
    except ValueError:
        get_logger().exception(Event.SERVER_STARTED, token=CANARY)
    assert out.getvalue().startswith("{") is is_json
    assert "server.started" in out.getvalue()
    assert CANARY not in out.getvalue()


def test_the_default_stream_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "auto")
    get_logger().info(Event.SERVER_STOPPED)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "server.stopped"
    assert sys.stderr is not None


@pytest.mark.parametrize(
    "key",
    [
        "authorization",
        "Authorization",
        "proxy-authorization",
        "cookie",
        "Set-Cookie",
        "token",
        "access_token",
        "progressToken",
        "key",
        "keys",
        "state_keys",
        "apiKey",
        "X-Api-Key",
        "secret",
        "client_secret",
        "password",
        "credentials",
        "requestState",
        "request_state",
        "body",
        "params",
        "arguments",
        "inputResponses",
        "answers",
        "content",
    ],
)
def test_the_value_of_a_secret_key_is_hidden_at_every_depth(key: str) -> None:
    for value in (CANARY, [CANARY], {"a": CANARY}, CANARY.encode()):
        for fields in ({key: value}, {"deep": [{key: value}]}, {"deep": {"er": ({key: value},)}}):
            out = logged(**fields)
            assert CANARY not in out
            assert "[hidden]" in out


@pytest.mark.parametrize("key", ["key_id", "monkey", "tokens_per_second", "method", "keyboard", "reason", "bodies"])
def test_the_value_of_a_plain_key_is_shown(key: str) -> None:
    assert CANARY in logged(**{key: CANARY})


SECRETS = [
    (f"Bearer {CANARY}", "Bearer [hidden]"),
    (f"authorization: bearer  {CANARY}, x", "authorization: bearer  [hidden], x"),
    (f"DPoP {CANARY}", "DPoP [hidden]"),
    ("Basic dXNlcjpwYXNz", "Basic [hidden]"),
    (f"state mrtr1.{CANARY}.x-_= end", "state mrtr1.[hidden] end"),
    (f"token={JWT}&a=b", "token=[hidden]&a=b"),
    (f"http://user:{CANARY}@host/x", "http://[hidden]@host/x"),
    ("at http://127.0.0.1:9000/mcp?key=a&b, x", "at http://127.0.0.1:9000/mcp?[hidden] x"),
    (f"https://u:{CANARY}@h/x?key=a", "https://[hidden]@h/x?[hidden]"),
    (f"'{KEY}'", "'[hidden]'"),
    (KEY.rstrip("=").replace("+", "-").replace("/", "_"), "[hidden]"),
    (f"key {bytes(range(32)).hex()}.", "key [hidden]."),
]


@pytest.mark.parametrize(("text", "masked"), SECRETS)
def test_what_looks_like_a_secret_is_masked_in_any_string(text: str, masked: str) -> None:
    assert mask(text) == masked
    assert json.loads(logged(note=text))["note"] == masked
    assert json.loads(logged(note={text: [text]}))["note"] == {masked: [masked]}


@pytest.mark.parametrize(
    "text",
    [
        "exchange.finished",
        "2026-11-21T07:32:00.000000Z",
        "/usr/lib/python3/site-packages/aiohttp/client_reqrep/connection/something.py",
        "a_very_long_identifier_that_somebody_wrote_without_any_capital_letter_at_all",
        "http://127.0.0.1:9000/mcp",
        "what is at http://127.0.0.1:9000/mcp? It works",
        "0123456789abcdef",
        "7b1f0c1e-9b0e-4a0e-8a57-0d6f1f2f3a4b",
        "",
    ],
)
def test_an_ordinary_text_is_left_alone(text: str) -> None:
    assert mask(text) == text


def test_arguments_of_a_command_that_look_like_secrets_are_found() -> None:
    command = (
        "token", "--api-key", "s3cret", "--auth-token=s3cret", "API_KEY=s3cret", "--header", "X-Api-Key: s3cret",
        "https://h/mcp?s3cret", "--max-tokens=500", "--token", "--verbose", "plain", "https://h/mcp", "--key=",
    )  # fmt: skip
    found = secret_arguments(command)
    assert [command[index][start:] for index, start in found.items()] == ["s3cret"] * 5


def test_random_keys_are_masked_in_both_alphabets() -> None:
    missed, dice = 0, Random(0)
    for _ in range(2_000):
        key = dice.randbytes(32)
        missed += mask(f"x {urlsafe_b64encode(key).decode()}") != "x [hidden]"
        missed += mask(f"x {b64encode(key).decode().rstrip('=')}") != "x [hidden]"
    assert missed <= 20  # a standard key that is all slashes passes for a path: under 1 in 200


@given(st.text(alphabet=string.ascii_letters + string.digits + "-_.", min_size=12, max_size=200))
def test_a_bearer_token_and_a_sealed_state_of_any_text_are_masked(text: str) -> None:
    assert mask(f"a Bearer {text} b") == "a Bearer [hidden] b"
    assert mask(f"a mrtr1.{text} b") == "a mrtr1.[hidden] b"


def test_bytes_are_counted_and_objects_are_masked_and_odd_numbers_are_text() -> None:
    class Request:
        def __str__(self) -> str:
            return f"<Request Bearer {CANARY}>"

    line = json.loads(
        logged(raw=b"x" * 7, request=Request(), wait=float("nan"), names={"b"}, event_kind=Event.TASK_FAILED)
    )
    assert (line["raw"], line["request"], line["wait"]) == ("<7 bytes>", "<Request Bearer [hidden]>", "nan")
    assert (line["names"], line["event_kind"]) == (["b"], "task.failed")


# Metrics.


def exercised() -> Metrics:
    """Return metrics on which every verb was used."""
    metrics = Metrics("1.2.3", ["/mcp"])
    metrics.operation_finished("/mcp", "tools/call", "2026-07-28", COMPLETE, 0.03)
    metrics.downstream_rejected(Rejection.HEADERS)
    metrics.passed("/mcp", TrafficEra.LEGACY, Passed.CUT, 0.2)
    metrics.passed("/mcp", TrafficEra.LEGACY, Passed.LEFT, None)
    metrics.era_probed("/mcp", UpstreamEra.MODERN)
    metrics.nested_request("/mcp", "elicitation/create", NestedOutcome.ASKED)
    metrics.notification("/mcp", "notifications/progress", forwarded=True)
    metrics.notification("/mcp", "notifications/odd", forwarded=False)
    metrics.call_parked("/mcp")
    metrics.call_parked("/mcp")
    metrics.call_released("/mcp", 20)
    metrics.set_held_limit(10_000)
    metrics.exchange_finished("/mcp", 3)
    metrics.continued("/mcp", Step.HELD)
    metrics.state_rejected(StateReason.EXPIRED)
    metrics.sealed()
    metrics.session_opened("/mcp")
    metrics.session_lost("/mcp")
    metrics.subscribed("/mcp", 1)
    metrics.tool_left_out("/mcp")
    metrics.list_answered("/mcp", from_memory=True)
    metrics.subscription_lost("/mcp", opened_again=True)
    metrics.session_moved("/mcp", None, SessionState.BUSY)
    metrics.session_moved("/mcp", SessionState.BUSY, SessionState.IDLE)
    metrics.child_started("/mcp")
    metrics.child_ended("/mcp", asked=False)
    metrics.upstream_failed("/mcp", UpstreamFailure.CALL_LOST)
    metrics.config_reloaded(applied=False)
    metrics.peer_asked(PeerOutcome.STALLED)
    metrics.peer_rejected(PeerReason.REPLAYED)
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


def test_every_verb_is_counted_under_its_name_and_labels() -> None:
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
        ("mcp_gateway_notifications_total", {"route": "/mcp", "kind": "other", "outcome": "dropped"}, 1),
        ("mcp_gateway_held_calls", {"route": "/mcp"}, 1),
        ("mcp_gateway_held_calls_limit", {}, 10_000),
        ("mcp_gateway_hold_duration_seconds_sum", {"route": "/mcp"}, 20),
        ("mcp_gateway_rounds_per_exchange_sum", {"route": "/mcp"}, 3),
        ("mcp_gateway_continuations_total", {"route": "/mcp", "step": "held"}, 1),
        ("mcp_gateway_continuations_total", {"route": "/mcp", "step": "lost"}, 0),
        ("mcp_gateway_state_rejected_total", {"reason": "expired"}, 1),
        ("mcp_gateway_seals_total", {}, 1),
        ("mcp_gateway_sessions_opened_total", {"route": "/mcp"}, 1),
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
    assert len(families) == 30
    for family in families:
        assert re.fullmatch(r"mcp_(gateway|server)(_[a-z]+)+", family.name)
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


def subclasses(kind: type[E]) -> set[type[E]]:
    """The class itself among them."""
    return {kind}.union(*(subclasses(each) for each in kind.__subclasses__()))


def in_sources(pattern: str) -> set[str]:
    found = set(re.findall(pattern, "".join(path.read_text() for path in SOURCES)))
    assert found
    return found


def test_the_upstream_failures_are_the_reasons_of_the_errors_and_those_counted_by_name() -> None:
    reasons = {kind.reason for kind in subclasses(UpstreamError) - {UpstreamError}}
    assert reasons | in_sources(r'upstream_failed\([^"()]+, "(\w+)"\)') == set(UpstreamFailure)


def test_the_rejections_are_those_of_the_errors() -> None:
    assert {kind.rejection for kind in subclasses(DownstreamError) - {InvalidState}} == set(Rejection)


def test_the_nested_outcomes_know_every_word_that_the_core_counts() -> None:
    core = "".join(path.read_text() for path in SOURCES if path.parent.name == "exchange")
    counted = set(re.findall(r'do\.Count\([\w.]+, "(\w+)"\)', core))
    assert counted
    assert {NestedOutcome(word).name.lower() for word in counted} == counted
    with pytest.raises(ValueError, match="is not a valid"):
        NestedOutcome("odd")


def test_the_state_and_peer_reasons_are_those_that_are_raised() -> None:
    compared = {*Binding.__struct_fields__} - {"names"}  # of the headers
    bound = {f"other_{name}" for name in compared}
    assert in_sources(r'InvalidState\("(\w+)"\)') | bound == {*StateReason, *PeerReason}
