"""The stages of a request: what each of them refuses, and how."""

import json

import pytest
from multidict import CIMultiDict

from gateway.protocol import mcp
from gateway.seal.keyring import PREFIX
from tests.support.fake_upstream import FakeUpstream
from tests.support.raw_connection import raw_connection, request_head
from tests.support.stand import Start
from tests.support.workbench import Client, Stand

# -- methods, paths, eras ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"])
async def test_a_modern_client_may_only_post(upstream: FakeUpstream, stand: Stand, method: str) -> None:
    async with stand.http.request(method, stand.url, headers={mcp.PROTOCOL_VERSION: mcp.MODERN}) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
    assert upstream.seen == []


@pytest.mark.parametrize("path", ["/", "/other", "/mcp/", "/metrics", "/readyz", "/healthz", "/mcp/../metrics"])
async def test_unknown_paths_are_404_and_the_operators_are_elsewhere(stand: Stand, path: str) -> None:
    async with stand.http.post(f"http://{stand.gateway.listen}{path}", data=b"{}") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == -32601


async def test_a_state_at_a_path_without_a_route_is_no_rejected_one(stand: Stand) -> None:
    headers, body = stand.client().build("tools/call", {"name": "tool", "requestState": "made up"})
    async with stand.http.post(f"http://{stand.gateway.listen}/other", data=body, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, -32601)
    assert stand.metric("mcp_gateway_state_rejected_total", reason="malformed") == 0


@pytest.mark.parametrize("path", ["/other", "/.well-known/oauth-protected-resource/other", "/token/other"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_path_without_a_route_does_not_tell_which_routes_there_are(
    upstream: FakeUpstream, begin: Start, method: str, path: str
) -> None:
    paths = ("/hidden-tenant", "/mcp")
    stand = await begin(routes=[{"path": each, "upstream": {"url": upstream.url}} for each in paths])
    async with stand.http.request(method, f"http://{stand.gateway.listen}{path}") as response:
        assert response.status in {404, 405}
        told = await response.text()
    assert "hidden-tenant" not in told
    assert "/mcp" not in told


# Before the era of the upstream is known, a state of ours decides whether a request is passed through.
@pytest.mark.parametrize("params", [{}, {"requestState": f"{PREFIX}.x"}], ids=["no state", "a state of ours"])
@pytest.mark.parametrize("method", ["notifications/cancelled", "notifications/anything"])
async def test_a_notification_is_202(
    upstream: FakeUpstream, stand: Stand, method: str, params: dict[str, str]
) -> None:
    body = {"jsonrpc": "2.0", "method": method, "params": params}
    async with stand.http.post(stand.url, json=body, headers={mcp.PROTOCOL_VERSION: mcp.MODERN}) as response:
        assert (response.status, await response.read()) == (202, b"")
    assert upstream.seen == []


REMOVED = ["ping", "logging/setLevel", "resources/subscribe", "initialize", "tasks/result", "tasks/list"]


@pytest.mark.parametrize("method", [*REMOVED, "x/y"])
async def test_removed_and_unknown_methods_are_404(client: Client, method: str) -> None:
    assert (await client.post(method)).outcome == (404, -32601, None)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"[]", -32600),
        (b'{"jsonrpc":"2.0","id":1,"result":{}}', -32600),
        (b"[" * 100_000, -32700),
    ],
)
async def test_a_body_that_is_not_a_request_gets_400(stand: Stand, body: bytes, code: int) -> None:
    async with stand.http.post(stand.url, data=body, headers={mcp.PROTOCOL_VERSION: mcp.MODERN}) as response:
        assert (response.status, (await response.json(content_type=None))["error"]["code"]) == (400, code)


@pytest.mark.parametrize("name", [mcp.PROTOCOL_VERSION, mcp.METHOD_HEADER, mcp.NAME_HEADER])
@pytest.mark.parametrize("how", ["twice", "other", "missing"])
async def test_mirrored_headers_must_be_there_once_and_equal(
    upstream: FakeUpstream, stand: Stand, client: Client, name: str, how: str
) -> None:
    headers, body = client.build("tools/call", {"name": "tool"})
    sent = CIMultiDict(headers)
    if how == "twice":
        sent.add(name, headers[name])
    elif how == "other":
        sent[name] = "2027-01-01" if name == mcp.PROTOCOL_VERSION else "other"
    else:
        del sent[name]
    async with stand.http.post(stand.url, headers=sent, data=body) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, -32020)
    assert upstream.seen == []


# -- Host and Origin --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        (None, None, 200),
        ("evil.example", None, 403),
        ("", None, 403),
        (None, "http://localhost:3000", 200),
        (None, "https://evil.example", 403),
    ],
)
async def test_host_and_origin_of_a_loopback_listener(
    stand: Stand, client: Client, host: str | None, origin: str | None, status: int
) -> None:
    headers = {} if host is None else {"Host": host}
    headers |= {} if origin is None else {"Origin": origin}
    reply = await client.post("server/discover", headers=headers)
    assert reply.status == status
    if status == 403:
        assert reply.error["code"] == -32600


@pytest.mark.parametrize("header", ["Host: evil.example\r\n", "Host: localhost\r\nOrigin: http://evil.example\r\n"])
@pytest.mark.parametrize("path", ["/mcp", "/none"])
async def test_a_refusal_of_host_or_origin_has_no_id_on_any_way(stand: Stand, header: str, path: str) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "initialize", "params": {}}).encode()
    sized = b"POST %b HTTP/1.1\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
    head = sized % (path.encode(), header.encode(), len(body))
    batch = sized % (path.encode(), header.encode(), len(body) + 2) + b"[%b]" % body
    chunked = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    for parts in ([head + body], [head, body], [batch], [chunked + chunks], [chunked, chunks]):
        async with raw_connection(stand) as raw:
            for _ in range(4):  # the gateway knows a head after a few requests
                for part in parts:
                    await raw.send(part)
                said = await raw.until(b"\r\n\r\n")
                assert b" 403 " in said.splitlines()[0]
                length = int(said.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                error = json.loads(await raw.exactly(length))
                assert ("id" in error, error["error"]["code"]) == (False, -32600)


async def test_an_absolute_form_does_not_get_around_the_host_check(stand: Stand) -> None:
    async with raw_connection(stand) as raw:
        await raw.send(b"POST http://evil.example/mcp HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n")
        await raw.send(b"Connection: close\r\n\r\n{}")
        assert b" 403 " in (await raw.rest()).splitlines()[0]


# -- half closes ------------------------------------------------------------------------------------------------------


async def test_a_client_that_closes_its_half_of_the_connection_cancels_its_call(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(lambda turn: turn.for_ever())
    headers, body = client.build("tools/call", {"name": "tool"})
    async with raw_connection(stand) as raw:
        await raw.send(request_head(stand, headers, body))
        _ = await upstream.saw("tools/call")
        raw.end()
        assert await raw.rest() == b"", "docs/protocol.md (Cancellation) says so"
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
