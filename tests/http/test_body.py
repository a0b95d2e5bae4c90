"""Bodies: their size, their time, their encodings, and the budget of those that are not finished."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from multidict import CIMultiDict

from gateway.config import InForce
from gateway.http.server.body import read_body
from gateway.runtime.budget import Budget
from tests.support.fake_upstream import FakeUpstream
from tests.support.logs import Lines
from tests.support.raw_connection import RawConnection, raw_connection, request_head
from tests.support.stand import Start
from tests.support.turns import work_gives_way
from tests.support.workbench import Client, Stand, eventually, later


@pytest.mark.parametrize("how", ["declared", "chunked"])
async def test_a_body_over_the_limit_is_413(upstream: FakeUpstream, begin: Start, how: str) -> None:
    stand = await begin(limits={"body_bytes": 10_000})
    headers, body = stand.client().build("tools/call", {"name": "tool", "arguments": {"x": "y" * 50_000}})
    data: Any = body
    if how == "chunked":

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1000):
                yield body[start : start + 1000]

        data = chunks()
    async with stand.http.post(stand.url, headers=headers, data=data) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == -32600
    assert upstream.seen == []


LARGE = b"x" * 20_000
LEGACY = {"Mcp-Session-Id": "s", "Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "status", "id_"),
    [
        (b'{"method":"ping","params":{"x":"%b"},"jsonrpc":"2.0","id":7}' % LARGE, 200, 7),
        (b'{"method": "ping", "params": {"x": "%b"}, "jsonrpc": "2.0", "id": "a-1"}\r\n' % LARGE, 200, "a-1"),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"x":"%b"}}' % LARGE, 413, None),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"x":"%b","id":8}}' % LARGE, 413, None),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","x":"%b,\\"id\\":8}"}' % LARGE, 413, None),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","%b,\\"id":8}' % LARGE, 413, None),
        (b'{"method":"ping","params":{"x":"%b"},"jsonrpc":"2.0","id":"\\u0061"}' % LARGE, 413, None),
        (b'[{"method":"ping","params":{"x":"%b"},"jsonrpc":"2.0","id":7}]' % LARGE, 413, None),
    ],
)
async def test_a_body_over_the_limit_refuses_one_request_of_a_session_if_its_id_is_found(
    upstream: FakeUpstream, begin: Start, body: bytes, status: int, id_: Any
) -> None:
    """Without the id, the client would wait for ever."""
    stand = await begin(limits={"body_bytes": 10_000})
    async with stand.http.post(stand.url, headers=LEGACY, data=body) as response:
        error = await response.json()
        assert (response.status, error.get("id"), error["error"]["code"]) == (status, id_, -32600)
    alone = {name: value for name, value in LEGACY.items() if name != "Mcp-Session-Id"}
    for headers in (alone, LEGACY | {"MCP-Protocol-Version": "2026-07-28"}):
        async with stand.http.post(stand.url, headers=headers, data=body) as response:
            assert (response.status, "id" in await response.json()) == (413, False)
    assert upstream.seen == []


async def test_a_body_that_passes_the_limit_is_refused_before_it_ends(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(limits={"body_bytes": 10_000})
    headers, _ = stand.client().build("tools/call", {"name": "tool"})
    headers |= {"Transfer-Encoding": "chunked"}
    data = b"x" * 18_000
    async with raw_connection(stand) as raw:
        await raw.send(request_head(stand, headers, None))
        await raw.send(b"%x\r\n%b\r\n" % (len(data), data))
        assert b" 413 " in await raw.line()
    assert upstream.seen == []


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_client_that_still_sends_gets_its_refusal(stand: Stand, connection: str) -> None:
    """A connection that is closed before all of the body was read is reset, and what was written is lost with it."""
    headers, _ = stand.client().build("tools/call", {"name": "tool"})
    head = request_head(stand, headers | {"Content-Length": "12000000"}, None)
    async with raw_connection(stand) as raw:
        await raw.send(head.replace(b"Connection: close", b"Connection: " + connection.encode()))
        await raw.send(b" " * 12_000_000)
        assert b" 413 " in await raw.line()


async def test_a_body_whose_encoding_is_none_is_served(stand: Stand, client: Client) -> None:
    headers, body = client.build("tools/call", {"name": "tool"})
    async with stand.http.post(stand.url, headers=headers | {"Content-Encoding": "Identity"}, data=body) as response:
        assert response.status == 200


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(stand: Stand, client: Client) -> None:
    headers, body = client.build("tools/call", {"name": "tool"})
    async with raw_connection(stand) as raw:
        sent = headers | {"Content-Length": str(len(body)), "Expect": "100-continue"}
        await raw.send(request_head(stand, sent, None))
        assert await raw.line() == b"HTTP/1.1 100 Continue\r\n"
        assert await raw.line() == b"\r\n"
        await raw.send(body)
        assert b" 200 " in await raw.line()


@pytest.mark.parametrize(
    "encodings", [["gzip"], ["deflate"], ["identity", "gzip"], ["gzip, identity"], ["br"], ["x-gzip"]]
)
@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_body_with_an_encoding_is_415(
    upstream: FakeUpstream, stand: Stand, client: Client, encodings: list[str], *, is_whole: bool
) -> None:
    headers, body = client.build("tools/call", {"name": "tool"})
    lines = "".join(f"\r\nContent-Encoding: {each}" for each in encodings)
    sent = headers | {"Content-Length": f"{len(body)}{lines}"}
    async with raw_connection(stand) as raw:
        await raw.send(request_head(stand, sent, None) + (body if is_whole else b""))
        assert b" 415 " in await raw.line()
        reply = await raw.until(b"takes no Content-Encoding")
        assert b"Accept-Encoding: identity\r\n" in reply
    assert upstream.seen == []


async def test_a_body_that_drips_is_cut_off_at_its_deadline(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(limits={"receive_seconds": 0.1})
    headers, _ = stand.client().build("tools/call", {"name": "tool"})
    async with raw_connection(stand) as raw:
        await raw.send(request_head(stand, headers | {"Content-Length": "1000"}, None))

        async def drip() -> None:
            while True:
                await raw.send(b" ")
                await asyncio.sleep(0.02)  # the client under test is slow

        dripping = later(drip())
        reply = await raw.until(b"limits.receive_seconds")
        _ = await raw.rest()  # the end of the connection, for which it waits 3 s
        dripping.cancel()
        await asyncio.wait((dripping,))
        _ = dripping.cancelled() or dripping.exception()
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in log_lines.stream.getvalue()
    assert upstream.seen == []


async def unfinished(stand: Stand, raw: RawConnection) -> None:
    """Send 9,000 bytes of a body, and wait until the gateway counts them."""
    headers, _ = stand.client().build("tools/call", {"name": "tool"})
    sent, data = headers | {"Transfer-Encoding": "chunked"}, b" " * 9000
    budget = stand.gateway.routes.process.traffic.receiving
    before = budget.used + 9000 * budget.given_way
    await raw.send(request_head(stand, sent, None) + b"%x\r\n%b\r\n" % (len(data), data))
    await eventually(lambda: budget.used + 9000 * budget.given_way == before + 9000, "the body is counted")


async def test_the_oldest_unfinished_body_gives_way(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(limits={"body_bytes": 10_000, "receiving_bytes": 20_000})
    async with AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(raw_connection(stand)) for _ in range(3)]
        await unfinished(stand, first)
        await unfinished(stand, second)
        headers, _ = stand.client().build("tools/call", {"name": "tool"})
        await third.send(request_head(stand, headers | {"Content-Length": "9500"}, None) + b" " * 9000)
        assert b" 503 " in await first.line()
        reply = await first.until(b"limits.receiving_bytes")
        assert b"Retry-After: 1\r\n" in reply
        await third.send(b" " * 500)
        assert b" 400 " in await third.line()  # the body is whole, and is not JSON
        _ = second
    assert upstream.seen == []
    await eventually(lambda: not stand.gateway.routes.process.traffic.receiving.used, "nothing is counted any more")
    name = "limits.receiving_bytes"
    assert stand.gateway.metrics.render()
    assert stand.metric("mcp_gateway_budget_given_way_total", budget=name) == 1
    assert stand.metric("mcp_gateway_budget_limit_bytes", budget=name) == 20_000
    assert stand.metric("mcp_gateway_budget_bytes", budget=name) == 0


async def test_a_body_may_be_as_large_as_the_budget_for_all(stand: Stand, begin: Start) -> None:
    small = await begin(limits={"body_bytes": 100_000, "receiving_bytes": 1})
    headers, body = stand.client().build("tools/call", {"name": "tool", "arguments": {"x": "y" * 90_000}})
    async with raw_connection(small) as raw:
        await raw.send(request_head(small, headers | {"Content-Length": str(len(body))}, None) + body[:1])
        await eventually(lambda: small.gateway.routes.process.traffic.receiving.used > 0, "the body is being read")
        await raw.send(body[1:])
        assert b" 200 " in await raw.line()


async def test_unfinished_heads_count_too(begin: Start) -> None:
    stand = await begin(limits={"body_bytes": 1, "receiving_bytes": 20_000})
    async with raw_connection(stand) as one, raw_connection(stand) as two:
        for raw in (one, two):
            await raw.send(b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 6000)
        assert await one.rest() == b""
        await two.send(b"\r\n\r\n")
        assert b" 404 " in await two.line()
    await eventually(lambda: not stand.gateway.routes.process.traffic.receiving.used, "nothing is counted any more")


async def test_what_a_client_sends_before_its_reply_is_complete_counts(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(limits={"body_bytes": 10_000, "receiving_bytes": 20_000})
    go = upstream.waiting_tool("ok")
    headers, body = stand.client().build("tools/call", {"name": "tool"})
    head = request_head(stand, headers, body).replace(b"Connection: close\r\n", b"")
    async with raw_connection(stand) as raw:
        await raw.send(head)
        await upstream.saw("tools/call")
        await raw.send(request_head(stand, headers | {"Content-Length": "9000"}, None) + b" " * 8000)
        await eventually(
            lambda: stand.gateway.routes.process.traffic.receiving.used > 16_000, "the next request is counted"
        )
        await raw.send(b" " * 3000)
        assert await raw.rest() == b""
    go.set()
    await eventually(lambda: not stand.gateway.routes.process.traffic.receiving.used, "nothing is counted any more")


@pytest.mark.usefixtures("busy_clock")
async def test_a_body_that_grows_lets_others_run() -> None:
    whole = bytes(20 * 65_536)
    parts = [whole[start : start + 65_536] for start in range(0, len(whole), 65_536)]
    head = Mock(headers=CIMultiDict(), length=0)
    http: Any = Mock(head=head, body=Mock(read=AsyncMock(side_effect=[*parts, b""])))
    got: list[bytes] = []

    async def read() -> None:
        got.append(await read_body(http, 1 << 30, 60, Budget("x", InForce(1 << 30))))

    assert await work_gives_way(read())
    assert got == [whole]
