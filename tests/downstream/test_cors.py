"""Pages of allowed origins: their preflight, and what a browser lets them read of each reply (CORS)."""

from collections.abc import Mapping
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.protocol import mcp
from tests.support.fake_modern import FakeModern
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import FakeUpstream, Turn, asks, text
from tests.support.known_calls import Gate, reply, request
from tests.support.legacy_client import LegacyClient
from tests.support.raw_connection import raw_connection
from tests.support.stand import Start
from tests.support.workbench import Client, Stand

PAGE = "https://app.example"
SECURITY = {"allowed_origins": [PAGE, "http://other.example:5173"]}
OLD_CALL = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "tool"}}
VERIFIED = {"source": "jwt", "issuer": "https://issuer.example", "jwks_url": "http://127.0.0.1:1/keys"}
GRANT = f"\r\nAccess-Control-Allow-Origin: {PAGE}\r\n".encode()
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


@pytest.fixture
async def stand(begin: Start) -> Stand:
    return await begin(security=SECURITY)


@pytest.fixture
def client(stand: Stand) -> Client:
    return stand.client(headers={"Origin": PAGE})


def granted(headers: Mapping[str, str]) -> set[str]:
    return {name.lower() for name in headers if name.lower().startswith("access-control-")}


def readable(headers: CIMultiDict[str] | Any, page: str = PAGE) -> bool:
    """Whether a page may read a reply, and this one alone; a reply that is not for pages says nothing of them."""
    if not granted(headers):
        return False
    assert granted(headers) == {"access-control-allow-origin", "access-control-expose-headers"}
    assert headers.getall("Access-Control-Allow-Origin") == [page]
    (exposed,) = headers.getall("Access-Control-Expose-Headers")
    assert {"Mcp-Session-Id", "WWW-Authenticate", "X-Request-Id", "Retry-After"} == set(exposed.split(", "))
    assert "Origin" in headers.getall("Vary")
    return True


# -- preflight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/mcp", "/nowhere", "/token/mcp", "/.well-known/oauth-protected-resource/mcp"])
async def test_a_browser_that_asks_for_an_allowed_page_hears_that_it_may_send(
    upstream: FakeUpstream, begin: Start, path: str
) -> None:
    """Before anybody is authenticated: a browser asks without credentials."""
    stand = await begin(security=SECURITY, principal=VERIFIED)
    wanted = "authorization,content-type,mcp-param-x,mcp-protocol-version,x-api-key"
    asked = CIMultiDict(ASKS)
    for part in wanted.split(",", 1):
        asked.add("Access-Control-Request-Headers", part)
    async with stand.http.options(f"http://{stand.gateway.listen}{path}", headers=asked) as response:
        assert (response.status, await response.read()) == (204, b"")
        headers = CIMultiDict(response.headers)
    assert headers.pop("Access-Control-Allow-Headers").replace(", ", ",") == wanted
    assert headers.pop("Access-Control-Allow-Methods") == "DELETE, GET, POST"
    assert headers.pop("Access-Control-Max-Age") == "600"
    assert readable(headers)
    assert upstream.seen == []


async def test_a_browser_need_not_ask_for_headers(stand: Stand) -> None:
    async with stand.http.options(stand.url, headers=ASKS) as response:
        assert response.status == 204
        assert "Access-Control-Allow-Headers" not in response.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://app.example.evil.example", ""])
@pytest.mark.parametrize("method", ["OPTIONS", "GET", "POST"])
async def test_a_page_of_another_origin_learns_nothing(
    upstream: FakeUpstream, stand: Stand, origin: str, method: str
) -> None:
    asked = ASKS | {"Origin": origin}
    async with stand.http.request(method, stand.url, headers=asked) as response:
        assert response.status == 403
        assert not granted(response.headers)
    assert upstream.seen == []


async def test_other_options_requests_are_the_upstreams(upstream: FakeUpstream, stand: Stand) -> None:
    upstream.on("OPTIONS", lambda turn: turn.reply(405, b"no", {"Allow": "POST", "Vary": "Accept"}))
    for sent in ({"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}):
        async with stand.http.options(stand.url, headers=sent) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert readable(response.headers) is ("Origin" in sent)
            assert response.headers.getall("Vary") == ["Accept", *(["Origin"] if "Origin" in sent else [])]
    assert upstream.words == ["OPTIONS"] * 2


async def test_without_a_list_the_pages_that_may_send_may_read(begin: Start) -> None:
    stand = await begin()
    for origin, status in (("http://localhost:6274", 204), ("http://[::1]", 204), ("https://app.example", 403)):
        async with stand.http.options(stand.url, headers=ASKS | {"Origin": origin}) as response:
            assert response.status == status
            assert response.headers.get("Access-Control-Allow-Origin") == (origin if status == 204 else None)


async def test_a_reload_allows_other_pages(upstream: FakeUpstream, stand: Stand) -> None:
    sent = request(stand, f"Origin: {PAGE}")
    async with raw_connection(stand) as raw:
        for _ in range(3):
            await raw.send(sent)
            assert GRANT in (await reply(raw))[0]
        stand.reload(upstream.url, security={"allowed_origins": ["https://new.example"]})
        await raw.send(sent)
        refused, _ = await reply(raw)
    assert refused.startswith(b"HTTP/1.1 403 ")
    assert b"Access-Control" not in refused
    async with stand.http.options(stand.url, headers=ASKS | {"Origin": "https://new.example"}) as response:
        assert response.status == 204


# -- replies ----------------------------------------------------------------------------------------------------------


async def test_a_page_reads_what_a_modern_client_is_sent(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(asks("done", "Who?"))
    asked = await client.call()
    assert readable((await client.answer(asked)).headers)

    async def logs(turn: Turn) -> None:
        await turn.notify("notifications/message", {"level": "info", "data": 1})
        await turn.result(text("x"))

    upstream.tool(logs)
    streamed = await client.call(meta={mcp.META_LOG_LEVEL: "info"})
    assert streamed.is_stream
    assert all(readable(reply.headers) for reply in (asked, streamed, await client.post(mcp.DISCOVER)))


async def test_a_page_reads_each_reply_to_the_same_call(stand: Stand, gate: Gate) -> None:
    """Also the reply to a head that came before, which is sent without looking at it again."""
    plain, sent = request(stand), request(stand, f"Origin: {PAGE}")
    async with raw_connection(stand) as raw:
        for _ in range(5):
            await raw.send(sent)
            assert GRANT in (await reply(raw))[0]
            await raw.send(plain)
            assert b"Access-Control" not in (await reply(raw))[0]


@pytest.mark.parametrize("origin", [PAGE, "http://other.example:5173", None])
async def test_what_the_upstream_says_of_pages_does_not_count(
    upstream: FakeUpstream, stand: Stand, origin: str | None
) -> None:
    own = {
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Allow-Credentials": "true",
        "Access-Control-Expose-Headers": "X-Secret",
        "Mcp-Session-Id": "s1",
    }
    upstream.tool(lambda turn: turn.reply(body={"jsonrpc": "2.0", "id": 3, "result": {}}, headers=own))
    for _ in range(4):  # the same head of a reply is familiar from the third time on
        sent = {} if origin is None else {"Origin": origin}
        async with stand.http.post(stand.url, json=OLD_CALL, headers=sent) as response:
            assert (response.status, response.headers["Mcp-Session-Id"]) == (200, "s1")
            assert readable(response.headers, origin or PAGE) is (origin is not None)


async def test_a_page_reads_streams_that_pass_through(upstream: FakeUpstream, stand: Stand) -> None:
    async def tool(turn: Turn) -> None:
        await turn.raw(b"data: 1\n\n")

    upstream.tool(tool)
    async with stand.http.post(stand.url, json=OLD_CALL, headers=ASKS) as response:
        assert response.content_type == "text/event-stream"
        assert readable(response.headers)
        assert await response.read() == b"data: 1\n\n"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/mcp", b"{", 400),
        ("POST", "/nowhere", b"{}", 404),
        ("GET", "/nowhere", None, 404),
        ("DELETE", "/token/mcp", None, 405),
        ("OPTIONS", "/token/mcp", None, 204),
        ("GET", "/.well-known/oauth-protected-resource/nowhere", None, 404),
        ("POST", "/mcp", b"x" * 2000, 413),
    ],
)
async def test_a_page_reads_what_is_wrong(
    begin: Start, method: str, path: str, body: bytes | None, status: int
) -> None:
    stand = await begin(security=SECURITY, limits={"body_bytes": 1024})
    headers = {"Origin": PAGE, mcp.PROTOCOL_VERSION: mcp.MODERN}
    async with stand.http.request(
        method, f"http://{stand.gateway.listen}{path}", data=body, headers=headers
    ) as response:
        assert response.status == status
        assert readable(response.headers)


@pytest.mark.parametrize("status", [401, 403, 429, 503])
async def test_a_page_reads_why_the_upstream_refuses(upstream: FakeUpstream, client: Client, status: int) -> None:
    upstream.on("initialize", lambda turn: turn.reply(status, b"", {"WWW-Authenticate": "Bearer", "Retry-After": "1"}))
    refused = await client.call()
    assert readable(refused.headers)
    assert ("WWW-Authenticate" in refused.headers) is (status in {401, 403})
    begun = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    async with client.http.post(client.url, json=begun, headers={"Origin": PAGE}) as response:
        assert (response.status, response.headers["Retry-After"]) == (status, "1")
        assert readable(response.headers)


async def test_a_page_reads_that_there_is_no_room(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(asks("done", "Who?"))
    client = (await begin(security=SECURITY, hold={"max_calls": 1})).client(headers={"Origin": PAGE})
    asked = await client.call()
    refused = await client.call()
    assert (refused.status, readable(refused.headers)) == (503, True)
    assert (await client.answer(asked)).text == "done"


async def test_a_page_reads_that_its_caller_is_not_verified(begin: Start) -> None:
    stand = await begin(security=SECURITY, principal=VERIFIED)
    refused = await stand.client(headers={"Origin": PAGE}).call()
    assert (refused.status, readable(refused.headers)) == (401, True)
    assert "resource_metadata" in refused.headers["WWW-Authenticate"]


async def test_a_page_reads_that_the_gateway_has_a_bug(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("gateway.downstream.handler.reject", broken)
    stand.planted_bugs = 1
    async with stand.http.get(f"http://{stand.gateway.listen}/nowhere", headers={"Origin": PAGE}) as response:
        assert (response.status, await response.text()) == (500, "500 Internal Server Error\n")
        assert readable(response.headers)


async def test_a_page_is_a_legacy_client_of_a_modern_server(begin: Start) -> None:
    async with FakeModern() as server:
        server.tools["echo"] = lambda call: call.text("x")
        stand = await begin(url=server.url, route={"era": "mirror"}, security=SECURITY)
        client = LegacyClient(stand)
        client.headers["Origin"] = PAGE
        opened = await client.open({"id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}})
        assert "Mcp-Session-Id" in opened.response.headers
        assert readable(opened.response.headers)
        client = await client.initialize()
        async with client.listen() as stream:
            assert (stream.status, readable(stream.response.headers)) == (200, True)
        assert await client.end() == 200


async def test_a_page_is_a_client_of_http_and_sse(begin: Start, old: FakeSse) -> None:
    stand = await begin(url=old.url, security=SECURITY)
    async with stand.http.get(stand.url, headers={"Origin": PAGE, "Accept": "text/event-stream"}) as stream:
        assert readable(stream.headers)
        place = (await stream.content.readuntil(b"\n\n")).partition(b"data: ")[2].strip().decode()
        posted = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        url = f"http://{stand.gateway.listen}{place}"
        async with stand.http.post(url, json=posted, headers={"Origin": PAGE}) as response:
            assert (response.status, readable(response.headers)) == (202, True)


async def test_the_operators_pages_are_for_no_other_page(stand: Stand) -> None:
    for path in ("/status", "/metrics", "/readyz"):
        async with stand.http.get(f"http://{stand.gateway.admin}{path}", headers=ASKS) as response:
            assert (response.status, granted(response.headers)) == (200, set())
        async with stand.http.options(f"http://{stand.gateway.admin}{path}", headers=ASKS) as response:
            assert (response.status, granted(response.headers)) == (405, set())
