"""The client's side: what is refused and how, what goes upstream, and what never leaves the gateway."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.config import InForce
from gateway.http import reply as wires
from gateway.http.listener import Listener, _Refuser
from gateway.protocol import mcp
from gateway.protocol import request as modern
from gateway.seal.cipher import PREFIX
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.logs import Lines
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, eventually

CANARY = "c4nary-7f3a9-"


class Wire:
    """A raw connection: what no HTTP library would send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def line(self) -> bytes:
        async with asyncio.timeout(3):
            return await self._reader.readline()

    async def rest(self) -> bytes:
        """What comes until the gateway closes."""
        async with asyncio.timeout(3):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""


@asynccontextmanager
async def wire(stand: Stand, address: str = "") -> AsyncIterator[Wire]:
    """To the listener for clients, or to another address."""
    host, _, port = (address or stand.gateway.listen).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def head(stand: Stand, headers: dict[str, str], body: bytes | None) -> bytes:
    """A request's bytes; without a body its length is left to the caller."""
    lines = ["POST /mcp HTTP/1.1", f"Host: {stand.gateway.listen}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


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


@pytest.mark.parametrize("method", ["notifications/cancelled", "notifications/anything"])
async def test_a_notification_is_202(upstream: FakeUpstream, stand: Stand, method: str) -> None:
    body = {"jsonrpc": "2.0", "method": method, "params": {}}
    async with stand.http.post(stand.url, json=body, headers={mcp.PROTOCOL_VERSION: mcp.MODERN}) as response:
        assert (response.status, await response.read()) == (202, b"")
    assert upstream.seen == []


@pytest.mark.parametrize("method", ["ping", "logging/setLevel", "resources/subscribe", "initialize", "x/y"])
async def test_removed_and_unknown_methods_are_404(client: Client, method: str) -> None:
    assert (await client.post(method)).outcome == (404, -32601, None)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", -32700),
        (b"{", -32700),
        (b"\xff", -32700),
        (b"[]", -32600),
        (b"5", -32600),
        (b"{}", -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"x"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"id":2,"method":"x"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"result":{}}', -32600),
        (b"[" * 100_000, -32700),
    ],
)
async def test_what_is_no_request_is_400(stand: Stand, body: bytes, code: int) -> None:
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
        ("localhost", None, 200),
        ("LOCALHOST:1", None, 200),
        ("[::1]:80", None, 200),
        ("evil.example", None, 403),
        ("127.0.0.1.evil.example", None, 403),
        ("127.0.0.1@evil.example", None, 403),
        ("", None, 403),
        (None, "http://localhost:3000", 200),
        (None, "http://127.0.0.1", 200),
        (None, "https://evil.example", 403),
        (None, "null", 403),
        (None, "http://localhost.evil.example", 403),
        (None, "", 403),
        (None, "://", 403),
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


async def test_an_absolute_form_does_not_get_around_the_host_check(upstream: FakeUpstream, stand: Stand) -> None:
    async with wire(stand) as raw:
        await raw.send(b"POST http://evil.example/mcp HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n")
        await raw.send(b"Connection: close\r\n\r\n{}")
        assert b" 403 " in (await raw.rest()).splitlines()[0]


async def test_an_allowed_origin_hides_no_other_one(upstream: FakeUpstream, stand: Stand) -> None:
    both = CIMultiDict([("Origin", "http://localhost"), ("Origin", "http://evil.example")])
    async with stand.http.post(stand.url, headers=both, data=b"{}") as response:
        assert response.status == 403
    assert not upstream.seen


async def test_configured_names_replace_the_defaults(begin: Start) -> None:
    stand = await begin(
        security={"allowed_hosts": ["gw.example"], "allowed_origins": ["https://app.example"]},
    )
    client = stand.client()
    for host, origin, status in (
        ("gw.example", None, 200),
        ("gw.example:8443", "https://app.example", 200),
        ("gw.example", "https://gw.example", 403),
        ("gw.example", "http://localhost", 403),
        ("localhost", None, 403),
    ):
        headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
        assert (await client.post("server/discover", headers=headers)).status == status, (host, origin)


# -- sizes and times --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["declared", "chunked", "gzip", "deflate"])
async def test_a_body_over_the_limit_is_413(upstream: FakeUpstream, begin: Start, how: str) -> None:
    stand = await begin(limits={"body_bytes": 10_000})
    headers, body = stand.client().build("tools/call", {"name": "tool", "arguments": {"x": "y" * 50_000}})
    data: Any = body
    if how == "chunked":

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        data = chunks()
    elif how == "gzip":
        data, headers = gzip.compress(body), headers | {"Content-Encoding": "gzip"}
        assert len(data) < 10_000
    elif how == "deflate":
        data, headers = zlib.compress(body), headers | {"Content-Encoding": "deflate"}
    async with stand.http.post(stand.url, headers=headers, data=data) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == -32600
    assert upstream.seen == []


@pytest.mark.parametrize("encoding", [None, "gzip"])
async def test_a_body_that_passes_the_limit_is_refused_before_it_ends(
    upstream: FakeUpstream, begin: Start, encoding: str | None
) -> None:
    stand = await begin(limits={"body_bytes": 10_000})
    headers, _ = stand.client().build("tools/call", {"name": "tool"})
    headers |= {"Transfer-Encoding": "chunked"} | ({} if encoding is None else {"Content-Encoding": encoding})
    data = b"x" * 18_000
    if encoding == "gzip":
        packer = zlib.compressobj(wbits=31)
        data = packer.compress(b"x" * 100_000) + packer.flush(zlib.Z_SYNC_FLUSH)
    async with wire(stand) as raw:
        await raw.send(head(stand, headers, None))
        await raw.send(b"%x\r\n%b\r\n" % (len(data), data))
        assert b" 413 " in await raw.line()
    assert upstream.seen == []


async def test_a_compressed_body_within_the_limit_is_served(stand: Stand, client: Client) -> None:
    headers, body = client.build("tools/call", {"name": "tool"})
    sent = headers | {"Content-Encoding": "gzip"}
    async with stand.http.post(stand.url, headers=sent, data=gzip.compress(body)) as response:
        assert response.status == 200


async def test_a_damaged_compressed_body_is_400(stand: Stand, client: Client) -> None:
    headers, body = client.build("tools/call", {"name": "tool"})
    sent = headers | {"Content-Encoding": "gzip"}
    async with stand.http.post(stand.url, headers=sent, data=b"\x1f\x8b" + body) as response:
        assert response.status == 400


async def test_a_slow_body_is_given_up(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(limits={"receive_seconds": 0.1})
    headers, body = stand.client().build("tools/call", {"name": "tool"})
    async with wire(stand) as raw:
        sent = head(stand, headers | {"Content-Length": str(len(body))}, None)
        await raw.send(sent + body[:-5])
        assert b" 400 " in await raw.line()
    assert upstream.seen == []


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(stand: Stand, client: Client) -> None:
    headers, body = client.build("tools/call", {"name": "tool"})
    async with wire(stand) as raw:
        sent = headers | {"Content-Length": str(len(body)), "Expect": "100-continue"}
        await raw.send(head(stand, sent, None))
        assert await raw.line() == b"HTTP/1.1 100 Continue\r\n"
        assert await raw.line() == b"\r\n"
        await raw.send(body)
        assert b" 200 " in await raw.line()


@pytest.mark.parametrize("part", [b"", b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_half_a_request_head_is_closed_by_the_deadline(begin: Start, part: bytes) -> None:
    stand = await begin(limits={"receive_seconds": 0.1})
    async with wire(stand) as raw:
        await raw.send(part)
        assert await raw.rest() == b""


async def test_a_second_head_on_a_kept_connection_has_the_same_deadline(begin: Start) -> None:
    stand = await begin(limits={"receive_seconds": 0.1})
    async with wire(stand) as raw:
        await raw.send(b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nMCP-Protocol-Version: 2026-07-28\r\n\r\n")
        assert b" 405 " in await raw.line()
        await raw.send(b"GET /mcp HT")
        assert b" 405 " not in await raw.rest()


async def test_a_long_call_is_not_closed_by_the_heads_deadline(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(limits={"receive_seconds": 0.05})
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await go.wait()
        await turn.result(text("ok"))

    upstream.tool(tool)
    call = asyncio.get_running_loop().create_task(stand.client().call())
    await upstream.saw("tools/call")
    asyncio.get_running_loop().call_later(0.2, go.set)  # the time under test
    assert (await call).text == "ok"


async def test_connections_over_the_cap_are_closed_and_the_others_stay(begin: Start) -> None:
    stand = await begin(limits={"connections": 2})
    async with wire(stand) as one, wire(stand) as two:
        request = b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nMCP-Protocol-Version: 2026-07-28\r\n\r\n"
        await one.send(request)
        assert b"405" in await one._reader.readline()
        await two.send(request)
        assert b"405" in await two._reader.readline()
        async with wire(stand) as three:
            assert await three.rest() == b""
        await one.send(request)
        assert await one._reader.readline()


async def test_a_refused_connection_is_closed_on_uvloop_too() -> None:
    """Its transports are no asyncio.Transport, and it is what the command line runs on."""

    class Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    transport = Transport()
    _Refuser.connection_made(object.__new__(_Refuser), transport)  # type: ignore[arg-type]
    assert transport.aborted


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"X-Bad: a\x00b\r\nContent-Length: 2\r\n",
        b" folded: x\r\nContent-Length: 2\r\n",
        b"Content-Length: -2\r\n",
        b"Content-Length: 0x2\r\n",
        b"X: " + b"a" * 10_000 + b"\r\nContent-Length: 2\r\n",
    ],
)
async def test_smuggled_requests_are_refused(upstream: FakeUpstream, stand: Stand, lines: bytes) -> None:
    async with wire(stand) as raw:
        await raw.send(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + lines + b"\r\n{}")
        assert b" 400 " in (await raw.rest()).splitlines()[0]
    assert upstream.seen == []


MALFORMED = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: s3cret\x00\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"BREW /other HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        MALFORMED,
    ],
)
@pytest.mark.parametrize("listener", ["clients", "admin", "peers"])
async def test_no_listener_tells_its_software(stand: Stand, listener: str, request_: bytes) -> None:
    gateway = stand.gateway
    door = Listener(gateway._peer_listener.handle, "127.0.0.1:0", InForce(gateway.config.limits))
    address = {"clients": gateway.listen, "admin": gateway.admin, "peers": await door.start()}[listener]
    try:
        async with wire(stand, address) as raw:
            await raw.send(request_)
            reply = (await raw.rest()).lower()
    finally:
        await door.close()
    assert reply.startswith(b"http/1.")
    for word in (b"server:", b"python", b"aiohttp", b"llhttp", b"x-powered-by"):
        assert word not in reply


async def test_a_malformed_request_is_quoted_neither_in_its_reply_nor_in_the_log(
    log_lines: Lines, stand: Stand
) -> None:
    async with wire(stand) as raw:
        await raw.send(MALFORMED)
        reply = await raw.rest()
    assert reply.endswith(b"400 Bad Request\n")
    assert b"s3cret" not in reply
    assert "s3cret" not in log_lines.stream.getvalue()


# -- headers ----------------------------------------------------------------------------------------------------------


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
async def test_a_header_that_is_no_text_is_refused_not_a_crash(
    upstream: FakeUpstream, begin: Start, name: str
) -> None:
    stand = await begin(route={"forward_headers": ["x-tenant"]})
    headers, body = stand.client().build("tools/call", {"name": "tool"})
    async with wire(stand) as raw:
        data = head(stand, headers | {name: "Bearer @@"}, body).replace(b"@@", b"\xff\xfe")
        await raw.send(data)
        assert b" 400 " in (await raw.rest()).splitlines()[0]
    assert upstream.seen == []


async def test_a_name_from_a_trusted_proxy_is_the_principal(upstream: FakeUpstream, begin: Start) -> None:
    section = {"source": "header", "header": "x-user", "trusted_proxies": ["127.0.0.0/8"]}
    stand = await begin(principal=section)
    upstream.tool(_ask)
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
async def test_a_header_that_tells_who_is_calling_must_come_once(
    upstream: FakeUpstream, begin: Start, way: str, repeated: tuple[tuple[str, str], ...]
) -> None:
    stand = await begin(principal=PROXIED, route={"forward_headers": ["x-api-key"]})
    upstream.tool(_ask)
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
    upstream.tool(_ask)
    asked = await stand.client(headers={"X-User": "ada"}).call()
    assert (await stand.client(headers={"X-User": "eve"}).answer(asked)).text == "accept", "both are anonymous"
    assert len(upstream.of("initialize")) == 1
    assert not any("X-User" in seen.headers for seen in upstream.seen), "nor does the upstream hear it"


async def _ask(turn: Turn) -> None:
    answer = await turn.elicit("q")
    await turn.result(text(answer["action"]))


# -- Mcp-Param --------------------------------------------------------------------------------------------------------

TOOL = {
    "name": "tool",
    "inputSchema": {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}},
}


@pytest.mark.parametrize(
    ("arguments", "header", "status"),
    [
        ({"region": "eu"}, "eu", 200),
        ({"region": "eü"}, "=?base64?ZcO8?=", 200),
        ({}, None, 200),
        ({"region": "eu"}, "us", 400),
        ({"region": "eu"}, None, 400),
        ({}, "eu", 400),
    ],
)
async def test_mirrored_parameters_are_checked_with_the_tools_listed_once(
    upstream: FakeUpstream, client: Client, arguments: dict[str, str], header: str | None, status: int
) -> None:
    upstream.tools = [TOOL]
    for _ in range(2):
        reply = await client.call("tool", arguments, headers={} if header is None else {"Mcp-Param-Region": header})
        assert reply.status == status
        if status != 200:
            assert reply.error["code"] == -32020
    assert len(upstream.of("tools/list")) == 1
    assert len(upstream.of("tools/call")) == (2 if status == 200 else 0)


async def test_a_list_that_the_client_fetched_is_used_and_a_change_forgets_it(
    upstream: FakeUpstream, client: Client
) -> None:
    upstream.tools = [TOOL]
    await client.post("tools/list")
    assert (await client.call("tool", {"region": "eu"})).status == 400
    assert len(upstream.of("tools/list")) == 1
    upstream.tools = []
    upstream.side("s1").put_nowait(b'data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n')
    upstream.side("s1").put_nowait(b'data: {"jsonrpc":"2.0","id":"p","method":"ping"}\n\n')
    await upstream.saw("answer")
    assert (await client.call("tool", {"region": "eu"})).status == 200
    assert len(upstream.of("tools/list")) == 2


async def test_all_pages_of_the_tools_are_read(upstream: FakeUpstream, client: Client) -> None:
    async def pages(turn: Turn) -> None:
        if turn.body["params"].get("cursor") is None:
            await turn.result({"tools": [], "nextCursor": "2"})
        else:
            await turn.result({"tools": [TOOL]})

    upstream.on("tools/list", pages)
    assert (await client.call("tool", {"region": "eu"})).error["code"] == -32020
    await client.post("tools/list")
    assert (await client.call("tool", {"region": "eu"})).error["code"] == -32020, "one page teaches nothing new"
    assert len(upstream.of("tools/list")) == 3


@pytest.mark.parametrize("how", ["error", "malformed", "endless", "no tools"])
async def test_tools_that_cannot_be_listed_repeat_nothing(upstream: FakeUpstream, client: Client, how: str) -> None:
    async def script(turn: Turn) -> None:
        if how == "error":
            await turn.error(-32601, "no")
        elif how == "malformed":
            await turn.result({"tools": 5})
        else:
            await turn.result({"tools": [], "nextCursor": "again"})

    upstream.on("tools/list", script)
    if how == "no tools":
        upstream.capabilities = {}
    assert (await client.call("tool", {"region": "eu"})).text == "done"
    assert len(upstream.of("tools/list")) == {"no tools": 0, "endless": 50}.get(how, 1)


async def test_a_list_that_hangs_ends_the_call_before_it_was_sent(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"handshake_seconds": 0.05})
    upstream.once("tools/list", lambda turn: turn.for_ever())
    assert (await stand.client().call()).outcome == (200, -32603, "call_lost")
    assert "tools/call" not in upstream.words
    assert "DELETE" not in upstream.words
    assert (await stand.client().call()).text == "done"


async def test_a_client_that_does_not_read_is_let_go(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"send_seconds": 0.1})

    async def tool(turn: Turn) -> None:
        token = turn.body["params"]["_meta"]["progressToken"]
        await turn.notify(mcp.PROGRESS, {"progressToken": token, "progress": 1})
        await turn.result(text("x" * 15_000_000))

    upstream.tool(tool)
    headers, body = stand.client().build("tools/call", {"name": "tool"}, meta={"progressToken": 1})
    async with wire(stand) as raw:
        await raw.send(head(stand, headers, body))
        assert b" 200 " in await raw.line()
        await eventually(lambda: stand.gateway.downstream.in_flight == 0)
        assert len(await raw.rest()) < 15_000_000, "the connection was cut, not drained"
    assert (await stand.client().post("server/discover")).status == 200


# -- the operator's listener and secrets ------------------------------------------------------------------------------


async def test_the_admin_listener_answers_get_only_and_little(stand: Stand) -> None:
    admin = f"http://{stand.gateway.admin}"
    for method, path, status in (
        ("GET", "/healthz", 200),
        ("GET", "/readyz", 200),
        ("GET", "/metrics", 200),
        ("HEAD", "/metrics", 200),
        ("GET", "/", 404),
        ("GET", "/mcp", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
        ("POST", "/mcp", 405),
    ):
        async with stand.http.request(method, admin + path) as response:
            assert response.status == status, (method, path)


async def test_no_secret_reaches_logs_metrics_admin_or_errors(
    upstream: FakeUpstream, log_lines: Lines, begin: Start
) -> None:
    stand = await begin(hold={"ttl_seconds": 0.3})
    client = stand.client(f"Bearer {CANARY}credential")
    secret = {"action": "accept", "content": {"name": CANARY + "answer"}}

    async def tool(turn: Turn) -> None:
        answer = await turn.elicit("q")
        if turn.body["params"]["name"] == "breaks":
            await turn.raw(b"data: {broken " + CANARY.encode() + b"\n\n")
        await turn.result(text(str(answer)))

    upstream.tool(tool)
    shown: list[str] = []
    states: list[str] = []
    arguments = {"secret": CANARY + "argument"}
    for name in ("works", "breaks"):
        asked = await client.call(name, arguments)
        assert CANARY not in asked.state
        done = await client.call(name, arguments, state=asked.state, answers={"q": secret})
        if name == "breaks":
            shown.append(done.data.decode())
        forged = [asked.state, asked.state[:-3] + "AAA"]
        refused = [await client.call(name, {}, state=state, answers={"q": secret}) for state in forged]
        shown += [reply.data.decode() for reply in refused]
        states.append(asked.state)
    shown.append((await client.call("works", arguments, answers={"q": {"action": CANARY}}, state="x")).data.decode())
    await client.call("works", arguments)  # and nobody comes back
    await upstream.saw(mcp.CANCELLED)
    for path in ("/metrics", "/readyz", "/healthz", "/status", "/status.json", "/"):
        async with stand.http.get(f"http://{stand.gateway.admin}{path}") as response:
            shown.append(await response.text())
    shown.append(log_lines.stream.getvalue())
    assert "state.rejected" in shown[-1], "the log was really read"
    for page in shown:
        assert CANARY not in page
        assert not any(state[20:60] in page for state in states)


Fault = Callable[[FakeUpstream], None]


def _answers(word: str, status: int, body: Any = None, **headers: str) -> Fault:
    def plant(upstream: FakeUpstream) -> None:
        async def answer(turn: Turn) -> None:
            turn.reply(status, body, headers)

        upstream.on(word, answer)

    return plant


def _repeats_its_query(word: str) -> Fault:
    """The server's error quotes the URL that it was asked with, whole and in part."""

    def plant(upstream: FakeUpstream) -> None:
        async def answer(turn: Turn) -> None:
            message = f"no such page: /mcp?{turn.seen.query}; bad key {CANARY}key"
            turn.reply(400, {"jsonrpc": "2.0", "id": turn.body.get("id"), "error": {"code": -1, "message": message}})

        upstream.on(word, answer)

    return plant


def _breaks(word: str) -> Fault:
    def plant(upstream: FakeUpstream) -> None:
        upstream.on(word, lambda turn: turn.reset())

    return plant


FAULTS: dict[str, Fault] = {
    "page of an error": _answers("initialize", 500, b"<h1>broken</h1>"),
    "no JSON-RPC": _answers("initialize", 200, b"{}"),
    "handshake refused in words": _repeats_its_query("initialize"),
    "other origin": _answers("initialize", 307, None, Location=f"http://10.0.0.1/?{CANARY}key"),
    "circle": _answers("initialize", 307, None, Location=f"/mcp?api_key={CANARY}key"),
    "credential refused": _answers("initialize", 401, b"", **{"WWW-Authenticate": "Bearer"}),
    "hangs up at first": _breaks("initialize"),
    "call answered with nothing": _answers("tools/call", 200, b""),
    "call answered with a page": _answers("tools/call", 502, b"<h1>bad gateway</h1>"),
    "hangs up in a call": _breaks("tools/call"),
    "result is no object": lambda upstream: upstream.on("tools/call", lambda turn: turn.result(5)),
}


@pytest.mark.parametrize("fault", [*FAULTS, "is not there"])
async def test_a_secret_in_the_url_of_an_upstream_is_told_to_nobody(
    upstream: FakeUpstream, log_lines: Lines, begin: Start, fault: str
) -> None:
    secret = f"api_key={CANARY}key&token={CANARY}token"
    route = {"forward_headers": ["x-tenant"]}
    stand = await begin(url=f"{upstream.url}?{secret}", route=route, log={"level": "debug"})
    if fault in FAULTS:
        FAULTS[fault](upstream)
    else:
        await upstream.close()
    shown: list[str] = []
    for method, params in (("tools/call", {"name": "tool"}), (mcp.DISCOVER, None), ("tools/list", None)):
        async with stand.client().open(method, params) as response:
            shown.append(f"{response.headers}{await response.text()}")
    old = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "tool"}}
    async with stand.http.post(stand.url, json=old) as response:
        shown.append(f"{response.headers}{await response.text()}")
    async with stand.http.get(stand.url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp")) as response:
        shown.append(f"{response.headers}{await response.text()}")
    for path in ("/metrics", "/status", "/status.json"):
        async with stand.http.get(f"http://{stand.gateway.admin}{path}") as response:
            shown.append(await response.text())
    shown += [repr(stand.gateway.config), log_lines.stream.getvalue()]
    assert "server.started" in shown[-1], "the log was really read"
    for page in shown:
        assert CANARY not in page
    if fault != "is not there":
        assert upstream.seen[0].query == secret, "and it does go upstream"


async def test_no_upstream_text_becomes_a_label(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        await turn.ask(f"odd/{turn.body['params']['name']}")
        await turn.notify(f"notifications/{turn.body['params']['name']}", {})
        await turn.result(text("ok"))

    upstream.tool(tool)
    for number in range(30):
        await client.call(f"tool-{number}")
    rendered = stand.gateway.metrics.render()[0].decode()
    assert "odd/" not in rendered
    assert "tool-" not in rendered


async def test_an_error_names_the_requests_own_id(client: Client) -> None:
    reply = await client.post("x/y")
    assert reply.final["id"] == "c1"


async def test_a_body_is_opened_once_however_many_ask(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    def counting(body: bytes, max_depth: int) -> modern.Posted:
        opened.append(body)
        return modern.read(body, max_depth)

    monkeypatch.setattr(wires, "read", counting)
    asked = f"{PREFIX}.x"  # what looks like a state of ours is looked at even where requests are passed through
    bodies = [
        client.build("tools/call", {"name": "tool", "arguments": {}, "requestState": asked}),
        ({"Content-Type": "application/json"}, client.build("tools/list")[1]),
        ({"Content-Type": "application/json"}, b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}'),
        ({"Content-Type": "application/json"}, b'{"jsonrpc": "2.0", "id": 1, "id": 2}'),
    ]
    for headers, body in bodies:
        async with stand.http.post(stand.url, headers=headers, data=body) as response:
            _ = await response.read()
    assert opened == [body for _, body in bodies]
