"""What the traces say of mirrored calls."""

from typing import Any

import pytest

from gateway.protocol import mcp
from tests.mirror.conftest import Begin
from tests.mirror.streamable.test_front import ACCEPT, text
from tests.plugins.otel.test_traces import OTHER, PARENT, TRACE, Spans, ids, links, parent, spans, traceparent
from tests.support.fake_modern import FakeModern
from tests.support.legacy_client import LegacyClient

__all__ = ["spans"]


async def traced(begin: Begin, spans: Spans, headers: dict[str, str], **sections: Any) -> LegacyClient:
    return await LegacyClient(await begin(traces=spans.traces(), **sections), headers=headers).initialize()


async def test_a_call_is_a_servers_span_with_a_clients_span_for_each_round_below_it(
    begin: Begin, server: FakeModern, spans: Spans
) -> None:
    client = await traced(begin, spans, {"Traceparent": OTHER, "X-Request-Id": "r1"})
    meta = {"traceparent": PARENT, "tracestate": "rojo=1", "x/y": 1}
    async with client.request("tools/call", {"name": "ask", "arguments": {}, "_meta": meta}, id_=7) as stream:
        _ = await client.answer(await stream.message(), ACCEPT)
        assert text(await stream.message()) == {"name": ACCEPT}
    (served,) = spans.rounds
    first, second = spans.calls
    assert served.name == first.name == second.name == "tools/call ask"
    said = dict(served.attributes or {})
    assert (said["mcp.protocol.version"], said["jsonrpc.request.id"]) == (mcp.LEGACY, "7")
    assert said["mcp_gateway.request.id"] == "r1"
    assert (ids(served)[0], parent(served), links(served)) == (TRACE, "b7ad6b7169203331", ["1" * 16])
    assert [parent(each) for each in (first, second)] == [ids(served)[1]] * 2
    ended = [(each.attributes or {})["mcp_gateway.outcome"] for each in (first, second, served)]
    assert ended == ["input_required", "complete", "complete"]
    assert [(each.attributes or {})["mcp.protocol.version"] for each in (first, second)] == [mcp.MODERN] * 2
    for body, sent, span in zip(server.of("tools/call"), server.headers[-2:], (first, second), strict=True):
        assert body["params"]["_meta"]["traceparent"] == traceparent(span)
        assert sent.getall("traceparent") == [traceparent(span)]
        assert sent.getall("tracestate") == ["rojo=1"] == [body["params"]["_meta"]["tracestate"]]
        assert body["params"]["_meta"]["x/y"] == 1


async def test_the_context_of_a_trace_that_nobody_can_read_goes_no_further(
    begin: Begin, server: FakeModern, spans: Spans
) -> None:
    server.tools["echo"] = lambda call: call.text("x")
    client = await traced(begin, spans, {"Traceparent": "odd", "Tracestate": "congo=2"})
    async with client.call("echo") as stream:
        assert text(await stream.message()) == "x"
    (called,) = spans.calls
    assert server.headers[-1].getall("traceparent") == [traceparent(called)]
    assert "tracestate" not in server.headers[-1]


async def test_an_error_ends_both_spans_with_its_code(begin: Begin, server: FakeModern, spans: Spans) -> None:
    client = await traced(begin, spans, {"Authorization": "Bearer good"})
    server.credential = "Bearer other"
    async with client.request("prompts/get", {"name": "p"}) as stream:
        assert stream.response.status == 401
    (served,), (called,) = spans.rounds, spans.calls
    for span in (served, called):
        assert (span.attributes or {})["mcp_gateway.outcome"] == "error"
        assert not span.status.is_ok


async def test_a_call_that_the_client_cancels_ends_its_spans(begin: Begin, server: FakeModern, spans: Spans) -> None:
    client = await traced(begin, spans, {})
    async with client.request("tools/call", {"name": "ask", "arguments": {}}, id_="c") as stream:
        _ = await stream.message()
        assert await client.notify(mcp.CANCELLED, {"requestId": "c"}) == 202
    (served,) = spans.rounds
    assert (served.attributes or {})["mcp_gateway.outcome"] == "cancelled"


async def test_a_trace_header_of_the_route_goes_upstream_in_place_of_the_gateways(
    begin: Begin, server: FakeModern, spans: Spans
) -> None:
    server.tools["echo"] = lambda call: call.text("x")
    client = await traced(begin, spans, {}, route={"set_headers": {"Traceparent": OTHER}})
    async with client.call("echo") as stream:
        assert text(await stream.message()) == "x"
    assert server.headers[-1].getall("traceparent") == [OTHER]


@pytest.mark.parametrize("meta", [5, []])
async def test_a_meta_that_is_no_object_is_refused_with_traces_too(begin: Begin, spans: Spans, meta: object) -> None:
    client = await traced(begin, spans, {})
    params = {"name": "echo", "arguments": {}, "_meta": meta}
    assert (await client.ask("tools/call", params))["error"]["code"] == mcp.INVALID_PARAMS
