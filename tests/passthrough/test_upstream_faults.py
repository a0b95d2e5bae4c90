"""What a client sees when the server behind it fails while its request passes through."""

import asyncio
import json
from collections.abc import Mapping
from typing import Final

import aiohttp
import pytest

from gateway.protocol import mcp
from tests.support.black_hole import black_hole
from tests.support.fake_http import OK, FakeHttp, Script, Wire, answers, says, stays
from tests.support.logs import Lines
from tests.support.raw_connection import raw_connection
from tests.support.stand import Start
from tests.support.workbench import Stand, eventually

OLD: Final = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
CALL: Final = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "tool"}}
H: Final = b"HTTP/1.1 200 OK\r\n"
CHUNKED: Final = H + b"Transfer-Encoding: chunked\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
METHODS: Final = ["GET", "POST", "DELETE"]


IN_SESSION: Final = {"Mcp-Session-Id": "s"}


async def read(
    stand: Stand, method: str = "POST", body: bytes | None = None, own: Mapping[str, str] = IN_SESSION
) -> tuple[int, bytes]:
    data = body or (json.dumps(CALL).encode() if method == "POST" else None)
    async with stand.http.request(method, stand.url, data=data, headers=OLD | own) as response:
        return response.status, await response.read()


async def drips(wire: Wire) -> None:
    """A reply of which each byte is a packet."""
    await wire.request()
    for byte in OK:
        await wire.say(bytes([byte]))


async def resets(wire: Wire) -> None:
    await wire.request()
    wire.reset()


async def ends_its_half(wire: Wire) -> None:
    """The server shuts its side down behind a whole reply, and goes on listening."""
    await wire.request()
    await wire.say(OK)
    wire.shut_down()
    await wire.gone()


UNDERSTOOD: dict[str, tuple[Script, bytes]] = {
    "a length": (answers(OK), b"ok"),
    "a slow drip": (drips, b"ok"),
    "a half-closed connection": (ends_its_half, b"ok"),
    "100 Continue that was not asked for": (says(CONTINUE + OK), b"ok"),
    "early hints": (says(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", OK), b"ok"),
    "a body that ends with the connection": (says(H + b"\r\n", b"o", b"k"), b"ok"),
    "HTTP/1.0": (says(b"HTTP/1.0 200 OK\r\n\r\nok"), b"ok"),
    "trailers": (says(CHUNKED + b"2\r\nok\r\n0\r\nX-Trailer: 1\r\n\r\n"), b"ok"),
    "an empty body": (says(H + b"Content-Length: 0\r\n\r\n"), b""),
    "two replies": (says(OK + OK), b"ok"),
}
WITHOUT_HEAD: dict[str, Script] = {
    "nothing": says(),
    "a reset": resets,
    "half a head": says(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "garbage": says(b"\x00\xff\x16\x03\x01 garbage\r\n\r\n"),
    "another protocol": says(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a head of 1 MB": stays(H + b"".join(b"X-%d: %b\r\n" % (i, b"x" * 1000) for i in range(1000)) + b"\r\n"),
    "one header of 1 MB": stays(H + b"X: " + b"x" * 1_000_000),
    "interim replies without end": stays(CONTINUE * 17),
    "a status below 100": says(b"HTTP/1.1 099 No\r\n\r\n"),
    "a line feed in a header": says(H + b"X: a\nSet-Cookie: b=c\r\nContent-Length: 2\r\n\r\nok"),
    "bare line feeds": says(b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok"),
    "HTTP/2": says(b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
    "a chunked body in HTTP/1.0": says(b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
}
CUT: dict[str, Script] = {
    "a length that is too large": says(H + b"Content-Length: 9\r\n\r\nok"),
    "no last chunk": says(CHUNKED + b"2\r\nok\r\n"),
    "half a chunk": says(CHUNKED + b"9\r\nok"),
    "a chunk size that is no number": stays(CHUNKED + b"2\r\nok\r\nz\r\n"),
    "a chunk that is longer than its size": stays(CHUNKED + b"2\r\nokay\r\n0\r\n\r\n"),
    "an endless chunk extension": stays(CHUNKED + b"2\r\nok\r\n2;" + b"x" * 200_000),
    "endless trailers": stays(CHUNKED + b"2\r\nok\r\n0\r\n" + b"X: y\r\n" * 40_000),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("script", "body"), UNDERSTOOD.values(), ids=UNDERSTOOD)
async def test_an_odd_but_whole_reply_reaches_the_client(
    begin: Start, method: str, script: Script, body: bytes
) -> None:
    async with FakeHttp(script) as server:
        assert await read(await begin(url=server.url), method) == (200, body)


@pytest.mark.parametrize("script", WITHOUT_HEAD.values(), ids=WITHOUT_HEAD)
@pytest.mark.parametrize(("own", "status"), [({}, 502), (IN_SESSION, 200)], ids=["alone", "in a session"])
async def test_a_server_without_a_valid_head_fails_one_call_and_gets_it_once(
    begin: Start, script: Script, own: Mapping[str, str], status: int
) -> None:
    async with FakeHttp(script) as server:
        found, body = await read(await begin(url=server.url), own=own)
        error = json.loads(body)
        assert (found, error["id"], error["error"]["code"]) == (status, 3, mcp.INTERNAL_ERROR)
        assert len(server.requests) == 1


@pytest.mark.parametrize("script", CUT.values(), ids=CUT)
async def test_a_damaged_body_looks_damaged_to_the_client_too_and_the_log_says_so(
    begin: Start, script: Script, log_lines: Lines
) -> None:
    async with FakeHttp(script) as server:
        stand = await begin(url=server.url)
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
            _ = await read(stand)
        assert len(server.requests) == 1
        await eventually(lambda: stand.metric("mcp_gateway_passed_through_total", era="legacy", outcome="cut") == 1)
        (line,) = log_lines("upstream.failed")
        assert (line["reason"], line["route"], bool(line["request_id"])) == ("call_lost", "/mcp", True)
        assert "did not complete its reply" in line["cause"]
        assert stand.metric("mcp_gateway_upstream_errors_total", kind="call_lost") == 1
        failure = stand.gateway.routes.live["/mcp"].upstream.health.failure
        assert failure is not None
        assert failure.cause in line["cause"]


async def test_a_silent_body_is_cut_at_the_deadline(begin: Start) -> None:
    async with FakeHttp(stays(H + b"Content-Length: 9\r\n\r\nok")) as server:
        stand = await begin(url=server.url, timeouts={"idle_seconds": 0.2})
        with pytest.raises(aiohttp.ClientPayloadError):
            _ = await read(stand)
        async with asyncio.timeout(3):
            await server.left.wait()


async def test_a_silent_event_stream_is_not_cut(begin: Start) -> None:
    done = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(H + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await done.wait()
        await wire.say(b"9\r\ndata: 1\n\n\r\n0\r\n\r\n")

    async with FakeHttp(script) as server:
        stand = await begin(url=server.url, timeouts={"idle_seconds": 0.05})
        async with stand.http.post(stand.url, json=CALL, headers=OLD) as response:
            await asyncio.sleep(0.3)  # the silence under test
            done.set()
            assert await response.read() == b"data: 1\n\n"


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_a_status_without_a_body_keeps_the_connections(begin: Start, status: bytes) -> None:
    async with FakeHttp(answers(b"HTTP/1.1 " + status + b"\r\nETag: x\r\n\r\n")) as server:
        stand = await begin(url=server.url)
        for _ in range(2):
            assert await read(stand) == (int(status[:3]), b"")
        assert server.connections == 1


async def test_a_head_request_gets_the_length_of_the_body_that_it_does_not_get(begin: Start) -> None:
    async with FakeHttp(answers(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")) as server:
        stand = await begin(url=server.url)
        for _ in range(2):
            async with stand.http.head(stand.url) as response:
                assert (response.status, response.headers["Content-Length"]) == (200, "1234")


async def test_a_server_that_is_not_there_is_502_and_in_a_session_the_error_of_one_call(begin: Start) -> None:
    async with FakeHttp(says()) as server:
        stand = await begin(url=server.url)
    assert (await read(stand, own={}))[0] == 502
    assert (await read(stand))[0] == 200
    assert (await read(stand, "GET"))[0] == 502, "it is about a stream of the session"
    assert (await read(stand, own=IN_SESSION | {"Mcp-Protocol-Version": "2025-11-25"}))[0] == 200
    posted = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {}}).encode()
    status, body = await read(stand, body=posted)
    assert (status, json.loads(body)["error"]["data"]["reason"]) == (200, "upstream_unreachable")


async def test_a_server_that_takes_no_connection_is_504(begin: Start) -> None:
    async with FakeHttp(says()) as server:
        address = f"127.0.0.8:{server.port}"
    with black_hole(address):
        stand = await begin(url=f"http://{address}/mcp", timeouts={"connect_seconds": 0.2})
        status, body = await read(stand, own={})
        assert (await read(stand))[0] == 200
    assert status == 504
    assert "did not accept a connection" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("query", ["?a=b%2Fc&d", "?x={y}|z", "?"])
async def test_a_query_goes_up_as_it_came(begin: Start, query: str) -> None:
    async with FakeHttp(answers(OK)) as server, raw_connection(await begin(url=server.url)) as raw:
        await raw.send(f"GET /mcp{query} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert (await raw.rest()).startswith(b"HTTP/1.1 200")
    sent = server.requests[0].split(b" ")[1].decode()
    assert sent == "/mcp" + query.rstrip("?")


async def test_what_a_slow_client_does_not_read_stays_at_the_server(begin: Start) -> None:
    """The server can send no more than the buffers of the kernel, and the budget for one client, hold."""
    total = 64_000_000
    sent = 0
    progress = asyncio.Event()

    async def floods(wire: Wire) -> None:
        nonlocal sent
        await wire.request()
        await wire.say(H + b"Content-Length: %d\r\n\r\n" % total)
        while sent < total:
            wire.writer.write(bytes(100_000))
            sent += 100_000
            await wire.writer.drain()
            progress.set()

    async with FakeHttp(floods) as server:
        stand = await begin(url=server.url)
        budget = stand.gateway.routes.process.traffic.sending
        host, port = stand.url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(CALL).encode()
        head = f"POST /mcp HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        while True:  # until nobody can send any more
            progress.clear()
            try:
                async with asyncio.timeout(0.3):
                    await progress.wait()
            except TimeoutError:
                break
        assert sent < total / 2
        assert 0 < budget.used < 600_000
        got = 0
        while part := await reader.read(1_000_000):
            got += len(part)
        writer.close()
        assert got > total
        await eventually(lambda: budget.used == 0)


async def test_a_client_that_leaves_in_a_large_body_closes_the_servers_connection(begin: Start) -> None:
    async def floods(wire: Wire) -> None:
        await wire.request()
        await wire.say(CHUNKED)
        try:
            while True:
                await wire.say(b"10000\r\n" + bytes(65_536) + b"\r\n")
        finally:
            server.left.set()

    async with FakeHttp(floods) as server:
        stand = await begin(url=server.url)
        async with stand.http.post(stand.url, json=CALL, headers=OLD) as response:
            assert await response.content.readexactly(100_000)
        async with asyncio.timeout(5):
            await server.left.wait()
        await eventually(lambda: stand.metric("mcp_gateway_passed_through_total", era="legacy", outcome="left") == 1)


@pytest.mark.parametrize("closes", [True, False])
async def test_the_head_of_a_reply_at_once_is_that_of_the_server_without_what_is_the_gateways(
    begin: Start, *, closes: bool
) -> None:
    said = (
        b"HTTP/1.1 299 \r\nServer: theirs\r\nX-Request-Id: theirs\r\nDate: then\r\nSet-Cookie: a\r\nset-cookie: b\r\n"
        b"Keep-Alive: timeout=9\r\nContent-Length: 2\r\n\r\nok"
    )
    async with FakeHttp(answers(said)) as server, raw_connection(await begin(url=server.url)) as raw:
        connection = b"close" if closes else b"keep-alive"
        asked = b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: mine\r\nConnection: %b\r\n\r\n"
        await raw.send(asked % connection)
        head = await raw.until(b"\r\n\r\n")
        assert await raw.exactly(2) == b"ok"
        if closes:
            assert await raw.rest() == b""
    first, *lines = head.decode().rstrip().split("\r\n")
    assert first.rstrip() == "HTTP/1.1 299"
    assert sorted(lines) == sorted(
        [
            "Date: then",
            "Set-Cookie: a",
            "set-cookie: b",
            "Content-Type: application/octet-stream",
            "Content-Length: 2",
            "X-Request-Id: mine",
            *(["Connection: close"] if closes else []),
        ]
    )
