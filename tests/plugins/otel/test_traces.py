"""Traces: OpenTelemetry's own SDK says what a collector would get, and a FAKE receiver what is sent to one."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from gateway.auth.authenticator import Authenticator
from gateway.plugins.otel.traces import Traces
from gateway.protocol import mcp
from gateway.telemetry import open_traces
from tests.parts.launch import free_port
from tests.support.fake_otlp import FakeOtlp
from tests.support.fake_upstream import FakeUpstream, ask, asks, text
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, eventually, later

CANARY = "c4nary-7f3a9"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
OTHER = "00-1234567890abcdef1234567890abcdef-1111111111111111-01"


class Spans:
    """What one process, or several, recorded."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def traces(self) -> Traces:
        return Traces(self.provider)

    def all(self, kind: SpanKind) -> list[ReadableSpan]:
        """Those that ended, as they began."""
        found = [span for span in self._exporter.get_finished_spans() if span.kind is kind]
        return sorted(found, key=lambda span: span.start_time or 0)

    @property
    def rounds(self) -> list[ReadableSpan]:
        return self.all(SpanKind.SERVER)

    @property
    def calls(self) -> list[ReadableSpan]:
        return self.all(SpanKind.CLIENT)


@pytest.fixture
def spans() -> Spans:
    return Spans()


def ids(span: ReadableSpan) -> tuple[str, str]:
    return format_trace_id(span.context.trace_id), format_span_id(span.context.span_id)


def parent(span: ReadableSpan) -> str | None:
    return format_span_id(span.parent.span_id) if span.parent is not None else None


def traceparent(span: ReadableSpan) -> str:
    return "00-{}-{}-{:02x}".format(*ids(span), span.context.trace_flags)


def links(span: ReadableSpan) -> list[str]:
    return [format_span_id(link.context.span_id) for link in span.links]


def sent(upstream: FakeUpstream) -> tuple[dict[str, Any], dict[str, str]]:
    """`_meta` and the headers of the last tools/call that the upstream saw."""
    seen = upstream.of("tools/call")[-1]
    return seen.body["params"].get("_meta", {}), {name.lower(): value for name, value in seen.headers.items()}


async def test_a_call_is_a_servers_span_and_a_clients_below_it(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    upstream.tool(lambda turn: turn.result(text(CANARY)))
    client = (await begin(traces=spans.traces())).client(f"Bearer {CANARY}")
    _ = await client.call("weather", {"city": CANARY}, headers={"X-Request-Id": "r1"})
    (served,), (called,) = spans.rounds, spans.calls
    assert served.name == called.name == "tools/call weather"
    attributes = dict(served.attributes or {})
    assert re.fullmatch(r"c\d+", str(attributes.pop("jsonrpc.request.id")))
    assert attributes == {
        "mcp.method.name": "tools/call",
        "mcp.protocol.version": "2026-07-28",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "weather",
        "network.transport": "tcp",
        "network.protocol.name": "http",
        "client.address": "127.0.0.1",
        "mcp_gateway.route": "/mcp",
        "mcp_gateway.request.id": "r1",
        "mcp_gateway.outcome": "complete",
    }
    assert served.parent is None
    assert parent(called) == ids(served)[1]
    port = int(upstream.url.split(":")[2].split("/")[0])
    assert dict(called.attributes or {}) == {
        "mcp.method.name": "tools/call",
        "mcp.protocol.version": "2025-11-25",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "weather",
        "network.transport": "tcp",
        "network.protocol.name": "http",
        "server.address": "127.0.0.1",
        "server.port": port,
        "mcp_gateway.route": "/mcp",
        "mcp_gateway.outcome": "complete",
    }
    assert CANARY not in served.to_json() + called.to_json()
    meta, headers = sent(upstream)
    assert meta["traceparent"] == headers["traceparent"] == traceparent(called)


async def test_the_parent_is_the_one_in_meta_and_that_of_the_header_is_linked(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    client = (await begin(traces=spans.traces())).client()
    meta = {"traceparent": PARENT, "tracestate": "rojo=1", "baggage": "user=ada"}
    _ = await client.call(meta=meta, headers={"traceparent": OTHER, "tracestate": "congo=2"})
    (served,), (called,) = spans.rounds, spans.calls
    assert (ids(served)[0], parent(served)) == (TRACE, "b7ad6b7169203331")
    assert links(served) == ["1" * 16]
    passed, headers = sent(upstream)
    for carrier in (passed, headers):
        found = {name: carrier[name] for name in mcp.TRACE_KEYS}
        assert found == {"traceparent": traceparent(called), "tracestate": "rojo=1", "baggage": "user=ada"}


async def test_without_one_in_meta_the_parent_is_that_of_the_header(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    client = (await begin(traces=spans.traces())).client()
    _ = await client.call(headers={"traceparent": PARENT})
    (served,) = spans.rounds
    assert (ids(served)[0], parent(served), links(served)) == (TRACE, "b7ad6b7169203331", [])


@pytest.mark.parametrize("odd", ["", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 9000, 5, "00-\r\n"])
async def test_what_is_no_context_begins_a_trace_of_its_own(
    upstream: FakeUpstream, begin: Start, spans: Spans, odd: Any
) -> None:
    client = (await begin(traces=spans.traces())).client()
    _ = await client.call(meta={"traceparent": odd, "tracestate": "rojo=1"})
    (served,), (called,) = spans.rounds, spans.calls
    assert served.parent is None
    meta, headers = sent(upstream)
    assert meta["traceparent"] == headers["traceparent"] == traceparent(called)
    assert "tracestate" not in {**meta, **headers}, "it belongs to a trace that nobody could read"


async def test_the_rounds_of_an_exchange_are_linked_and_its_call_is_one_span(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    upstream.tool(asks("done", "one", "two"))
    client = (await begin(traces=spans.traces())).client()
    second = await client.answer(await client.call())
    assert (await client.answer(second)).text == "done"
    rounds, (called,) = spans.rounds, spans.calls
    assert [links(each) for each in rounds] == [[], [ids(rounds[0])[1]], [ids(rounds[1])[1]]]
    assert [(each.attributes or {}).get("mcp_gateway.round") for each in rounds] == [None, 2, 3]
    assert [(each.attributes or {}).get("mcp_gateway.step") for each in rounds] == [None, "held", "held"]
    outcomes = [(each.attributes or {})["mcp_gateway.outcome"] for each in rounds]
    assert outcomes == ["input_required", "input_required", "complete"]
    assert len({ids(each)[0] for each in rounds}) == 3, "each round is of the trace of its client"
    assert parent(called) == ids(rounds[0])[1]
    assert [event.name for event in called.events] == ["mcp_gateway.parked", "mcp_gateway.unparked"] * 2
    assert (called.end_time or 0) > (rounds[1].end_time or 0), "it lasts until the tool has answered"


async def test_the_answers_go_upstream_in_the_trace_of_the_round_that_brought_them(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    upstream.tool(ask)
    client = (await begin(traces=spans.traces())).client()
    _ = await client.answer(await client.call())
    (answer,) = upstream.of("answer")
    assert answer.headers["traceparent"] == traceparent(spans.rounds[1])


async def test_a_round_that_another_replica_served_is_linked_and_counted_once(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    upstream.tool(asks("done", "one", "two"))
    peers = {name: f"127.0.0.1:{free_port()}" for name in ("gw-1", "gw-2")}
    owner, other = [
        await begin(replica={"id": name, "listen": peers[name], "peers": peers}, traces=spans.traces())
        for name in peers
    ]
    second = await other.client().answer(await owner.client().call())
    assert (await owner.client().answer(second)).text == "done"
    rounds = spans.rounds
    assert [(each.attributes or {}).get("mcp_gateway.step") for each in rounds] == [None, "forwarded", "held"]
    assert [links(each) for each in rounds] == [[], [ids(rounds[0])[1]], [ids(rounds[1])[1]]]


async def test_a_call_that_is_run_again_is_a_span_of_the_round_that_ran_it(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    upstream.tool(ask)
    client = (await begin(traces=spans.traces(), route={"continuation": "replay"})).client()
    assert (await client.answer(await client.call())).text == json.dumps(ACCEPT)
    rounds = spans.rounds
    assert links(rounds[1]) == [ids(rounds[0])[1]]
    await eventually(lambda: len(spans.calls) == 2)
    assert [parent(each) for each in spans.calls] == [ids(each)[1] for each in rounds]
    assert [(each.attributes or {})["mcp_gateway.outcome"] for each in spans.calls] == ["cancelled", "complete"]


@pytest.mark.parametrize(
    ("said", "error_type", "status_code"),
    [
        ({"error": {"code": -32602, "message": CANARY}}, "-32602", "-32602"),
        ({"result": {**text(CANARY), "isError": True}}, "tool_error", None),
    ],
)
async def test_errors_are_told_without_their_words(
    upstream: FakeUpstream, begin: Start, spans: Spans, said: Any, error_type: str, status_code: str | None
) -> None:
    upstream.tool(lambda turn: turn.reply(body={"jsonrpc": "2.0", "id": turn.id, **said}))
    client = (await begin(traces=spans.traces())).client()
    _ = await client.call()
    for span in (*spans.rounds, *spans.calls):
        attributes = span.attributes or {}
        assert attributes["error.type"] == error_type
        assert attributes.get("rpc.response.status_code") == status_code
        assert span.status.status_code is StatusCode.ERROR
        assert CANARY not in span.to_json()


async def test_a_refused_request_and_a_broken_call_end_their_spans(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    upstream.tool(lambda turn: turn.reset())
    client = (await begin(traces=spans.traces())).client()
    _ = await client.call(state="mrtr1.no")
    _ = await client.call()
    assert [(each.attributes or {})["error.type"] for each in spans.rounds] == ["-32602", "-32603"]
    assert [(each.attributes or {})["error.type"] for each in spans.calls] == ["-32603"]


async def test_a_client_that_leaves_ends_its_span_too(
    upstream: FakeUpstream, begin: Start, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds while the caller is authenticated too, before there is anything to cancel."""
    stand = await begin(traces=spans.traces())
    _ = await stand.client().call()
    asked = asyncio.Event()

    async def caller(*_: Any, **__: Any) -> None:
        asked.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Authenticator, "caller", caller)
    leaving = later(stand.client("Bearer ada").call())
    await asked.wait()
    _ = leaving.cancel()
    await eventually(lambda: len(spans.rounds) == 2)
    assert (spans.rounds[1].attributes or {})["mcp_gateway.outcome"] == "cancelled"


async def test_a_uri_is_no_name_of_a_span_and_loses_its_query(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    upstream.on("resources/read", lambda turn: turn.result({"contents": []}))
    client = (await begin(traces=spans.traces())).client()
    _ = await client.post("resources/read", {"uri": f"file:///a?q={CANARY}"})
    (served,) = spans.rounds
    assert served.name == "resources/read"
    assert (served.attributes or {})["mcp.resource.uri"] == "file:///a"
    assert CANARY not in served.to_json()


async def test_a_trace_that_is_not_sampled_is_carried_on_as_such(upstream: FakeUpstream, begin: Start) -> None:
    spans = Spans()
    client = (await begin(traces=spans.traces())).client()
    upstream.tool(ask)
    asked = await client.call(meta={"traceparent": PARENT[:-2] + "00"})
    assert sent(upstream)[0]["traceparent"].split("-")[1::2] == [TRACE, "00"]
    _ = await client.answer(asked)
    assert [ids(each)[0] for each in spans.rounds] != [TRACE], "only the second round was sampled"
    assert len(spans.rounds) == 1


async def test_without_traces_the_clients_own_context_goes_on_as_it_came(upstream: FakeUpstream, begin: Start) -> None:
    client = (await begin()).client()
    _ = await client.call(meta={"traceparent": PARENT, "tracestate": "rojo=1"})
    meta, headers = sent(upstream)
    assert (meta["traceparent"], headers["traceparent"], meta["tracestate"]) == (PARENT, PARENT, "rojo=1")


async def test_a_trace_does_not_replace_a_header_that_the_route_sets(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    client = (await begin(traces=spans.traces(), route={"set_headers": {"traceparent": "00-ours"}})).client()
    upstream.tool(ask)
    asked = await client.call(meta={"traceparent": PARENT})
    _ = await client.answer(asked)
    assert {seen.headers["traceparent"] for seen in upstream.seen if seen.http_method != "DELETE"} == {"00-ours"}


# -- what is sent, and what is not ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "front"])
async def test_spans_arrive_at_a_receiver_when_the_gateway_stops(
    upstream: FakeUpstream, begin: Start, environment: pytest.MonkeyPatch, name: str | None
) -> None:
    """What the environment says of the service wins."""
    if name is not None:
        environment.setenv("OTEL_SERVICE_NAME", name)
    environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    async with FakeOtlp() as receiver:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
        stand = await begin(traces=open_traces("1.2.3", "gw-1"))
        _ = await stand.client().call("weather")
        assert not receiver.spans
        await stand.gateway.close()
        assert sorted(span.name for span in receiver.spans) == ["tools/call weather"] * 2
        assert receiver.keys == ["abc"]
        resource = receiver.resource
        wanted = {
            "service.name": name or "mrtr-gateway",
            "service.version": "1.2.3",
            "service.instance.id": "gw-1",
            "deployment.environment.name": "test",
        }
        assert {name: resource[name] for name in wanted} == wanted


async def test_a_receiver_that_hangs_does_not_keep_the_gateway_from_ending(
    upstream: FakeUpstream, begin: Start, environment: pytest.MonkeyPatch
) -> None:
    environment.setattr("gateway.server.process._FLUSH_SECONDS", 0.1)
    async with FakeOtlp(hangs=True) as receiver:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        stand = await begin(traces=open_traces("1", "gw-1"))
        _ = await stand.client().call()
        await stand.gateway.close()
        assert receiver.waiting, "it was asked, and has not answered yet"
        left = [thread.name for thread in threading.enumerate()]
        assert "close traces" in left, "who waits for it does so without the gateway"
