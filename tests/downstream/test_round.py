"""The headers of a round: which of them go upstream, and which tell who is calling."""

import json
from typing import Any

import pytest
from multidict import CIMultiDict

from tests.support.fake_upstream import FakeUpstream, ask_action
from tests.support.raw_connection import raw_connection, request_head
from tests.support.stand import Start
from tests.support.workbench import Client


async def test_only_named_headers_go_upstream(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(route={"forward_headers": ["x-tenant"]})
    sent = {
        "X-Tenant": "t1",
        "Cookie": "a=b",
        "X-Forwarded-For": "1.2.3.4",
        "X-Forwarded-Host": "evil",
        "Forwarded": "for=1.2.3.4",
        "X-Other": "x",
        "Connection": "keep-alive, X-Tenant2",
        "X-Tenant2": "hop",
        "TE": "trailers",
        "Proxy-Authorization": "Basic eA==",
        "Mcp-Session-Id": "guessed",
        "Last-Event-ID": "guessed",
        "Origin": "http://localhost",
        "Accept-Language": "de",
        "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    }
    reply = await stand.client("Bearer t").call(headers=sent)
    assert reply.text == "done"
    expected = {
        "host", "accept", "accept-encoding", "content-type", "content-length", "user-agent", "authorization",
        "x-tenant", "traceparent", "mcp-session-id", "mcp-protocol-version",
    }  # fmt: skip
    for seen in upstream.seen:
        assert {name.lower() for name in seen.headers} <= expected, seen.word
        assert seen.headers["Host"] == upstream.url.split("/")[2]
        assert seen.headers.get("Mcp-Session-Id") in (None, "s1")
        assert seen.headers["Authorization"] == "Bearer t"
        assert seen.headers["X-Tenant"] == "t1"
        assert seen.headers["Accept-Encoding"] == "identity"


async def test_trace_context_of_the_body_wins_and_cannot_inject(upstream: FakeUpstream, client: Client) -> None:
    await client.call(meta={"traceparent": "00-body", "tracestate": "a=b\r\nX-Evil: 1", "baggage": 5})
    sent = upstream.of("tools/call")[0].headers
    assert sent["traceparent"] == "00-body"
    assert not {"tracestate", "baggage", "x-evil"} & {name.lower() for name in sent}


async def test_a_header_that_the_route_sets_is_not_the_clients_to_choose(upstream: FakeUpstream, begin: Start) -> None:
    """Not by a header, not by `_meta`: neither of the handshake nor of the call."""
    stand = await begin(route={"set_headers": {"Traceparent": "00-ours", "Baggage": "b=ours"}})
    client = stand.client()
    await client.call(meta={"traceparent": "00-body", "tracestate": "a=body"}, headers={"Baggage": "b=header"})
    for seen in upstream.seen:
        assert seen.headers.getall("traceparent") == ["00-ours"], seen.word
        assert seen.headers.getall("baggage") == ["b=ours"], seen.word
    assert upstream.of("tools/call")[0].headers["tracestate"] == "a=body"


@pytest.mark.parametrize("name", ["Authorization", "X-Tenant"])
async def test_a_header_that_is_not_utf_8_is_refused(upstream: FakeUpstream, begin: Start, name: str) -> None:
    stand = await begin(route={"forward_headers": ["x-tenant"]})
    headers, body = stand.client().build("tools/call", {"name": "tool"})
    async with raw_connection(stand) as raw:
        data = request_head(stand, headers | {name: "Bearer @@"}, body).replace(b"@@", b"\xff\xfe")
        await raw.send(data)
        assert b" 400 " in (await raw.rest()).splitlines()[0]
    assert upstream.seen == []


async def test_a_name_from_a_trusted_proxy_is_the_principal(upstream: FakeUpstream, begin: Start) -> None:
    section = {"source": "header", "header": "x-user", "trusted_proxies": ["127.0.0.0/8"]}
    stand = await begin(principal=section)
    upstream.tool(ask_action)
    asked = await stand.client(headers={"X-User": "ada"}).call()
    assert (await stand.client(headers={"X-User": "eve"}).answer(asked)).outcome[1] == -32602
    assert (await stand.client(headers={"X-User": "ada"}).answer(asked)).text == "accept"


REPEATED = [
    (("Authorization", "Bearer mine"), ("Authorization", "Bearer yours")),
    (("X-User", "eve"), ("X-User", "ada")),
    (("X-User", "ada"), ("X-User", "ada")),
    (("X-Api-Key", ""), ("X-Api-Key", "s3cret")),
]
PROXIED = {"source": "header", "header": "x-user", "trusted_proxies": ["127.0.0.0/8"]}


@pytest.mark.parametrize("repeated", REPEATED)
@pytest.mark.parametrize("way", ["bridged", "unknown era", "retry", "passed through", "old stream", "modern upstream"])
async def test_a_header_that_identifies_the_caller_must_come_once(
    upstream: FakeUpstream, begin: Start, way: str, repeated: tuple[tuple[str, str], ...]
) -> None:
    stand = await begin(principal=PROXIED, route={"forward_headers": ["x-api-key"]})
    upstream.tool(ask_action)
    client = stand.client()
    state: dict[str, Any] = {}
    if way == "bridged":
        await client.post("server/discover")
    if way == "retry":
        asked = await client.call()
        state = {"requestState": asked.state, "inputResponses": {"q": {"action": "decline"}}}
    if way == "modern upstream":
        stand.gateway.routes.live["/mcp"].upstream.era.known = True  # type: ignore[union-attr]
    before = len(upstream.seen) + len(upstream.probes)
    headers, body = client.build("tools/call", {"name": "tool", "arguments": {}, **state})
    method = "POST"
    if way in {"passed through", "old stream"}:
        headers = {"Accept": "text/event-stream, application/json", "Content-Type": "application/json"}
        body = b'{"jsonrpc":"2.0","id":"c1","method":"tools/list"}'
    if way == "old stream":
        method, body = "GET", b""
    both = CIMultiDict(headers)
    both.extend(repeated)
    async with stand.http.request(method, stand.url, headers=both, data=body or None) as response:
        message = await response.json()
    error = message["error"]
    assert (response.status, error["code"]) == (400, -32600)
    assert message.get("id") == (None if way == "old stream" else json.loads(body)["id"])
    assert f"The header {repeated[0][0].lower()} came 2 times" in error["message"].replace(
        "Authorization", "authorization"
    )
    assert not any(value and value in error["message"] for _, value in repeated)
    assert len(upstream.seen) + len(upstream.probes) == before, "nothing went upstream"
    if way == "retry":
        assert (await client.answer(asked)).text == "accept", "and the call is unharmed"


async def test_other_headers_go_upstream_in_their_order_however_often_they_come(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(route={"forward_headers": ["x-forwarded-for", "x-tags"], "bind_headers": []})
    headers, body = stand.client().build("tools/call", {"name": "tool", "arguments": {}})
    many = CIMultiDict(headers)
    came = [("X-Forwarded-For", "1.1.1.1"), ("X-Tags", "a"), ("X-Forwarded-For", "2.2.2.2"), ("X-Tags", "b, c")]
    many.extend([*came, ("tracestate", "x=1"), ("tracestate", "y=2")])
    async with stand.http.post(stand.url, headers=many, data=body) as response:
        assert response.status == 200
    for seen in upstream.seen:
        assert seen.headers.getall("X-Forwarded-For") == ["1.1.1.1, 2.2.2.2"]
        assert seen.headers.getall("X-Tags") == ["a, b, c"]
        assert seen.headers.getall("tracestate") == ["x=1, y=2"]
    assert [probe.headers.getall("X-Tags") for probe in upstream.probes] == [["a, b, c"]]


async def test_a_name_from_anybody_else_is_not_believed(upstream: FakeUpstream, begin: Start) -> None:
    section = {"source": "header", "header": "x-user", "trusted_proxies": ["10.0.0.0/8"]}
    stand = await begin(principal=section, route={"forward_headers": ["x-user"]})
    upstream.tool(ask_action)
    asked = await stand.client(headers={"X-User": "ada"}).call()
    assert (await stand.client(headers={"X-User": "eve"}).answer(asked)).text == "accept", "both are anonymous"
    assert len(upstream.of("initialize")) == 1
    assert not any("X-User" in seen.headers for seen in upstream.seen), "nor does the upstream hear it"
