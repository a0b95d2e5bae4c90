"""The spans of a real legacy server's calls through traced workers, as they arrive at a FAKE collector."""

import re

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.parts.launch import old_server
from tests.support.fake_otlp import FakeOtlp
from tests.support.gateway_process import gateway
from tests.support.workbench import Client

pytestmark = pytest.mark.real

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_the_rounds_of_workers_arrive_linked_and_a_real_server_gets_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeOtlp() as receiver, old_server("py130") as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
        async with gateway(server.url, traces=True, workers=2) as gw:
            client = Client(gw.http, gw.url)
            meta = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            told = (await client.call("whoami", meta=meta)).text
            asked = await client.call("ask")
            done = await client.answer(asked)
            assert done.result["resultType"] == "complete"
            request_id = done.headers["X-Request-Id"]
        spans = receiver.spans
        assert receiver.resource["service.name"] == "front"
    calls = {span.name: span for span in spans if span.kind == Span.SPAN_KIND_CLIENT}
    whoami = calls["tools/call whoami"]
    assert whoami.trace_id.hex() == TRACE
    assert re.search(rf"00-{TRACE}-{whoami.span_id.hex()}-0\d", told), "the server was given the call's own span"
    rounds = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER and span.name == "tools/call ask"]
    first, second = sorted(rounds, key=lambda span: span.start_time_unix_nano)
    assert [link.span_id for link in second.links] == [first.span_id]
    assert calls["tools/call ask"].parent_span_id == first.span_id
    noted = {pair.key: pair.value.string_value for pair in second.attributes}
    assert noted["mcp_gateway.request.id"] == request_id
    assert noted["mcp_gateway.step"] in {"held", "forwarded"}
