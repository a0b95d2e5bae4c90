"""Bodies: their size, their time, their encodings, and how often they are parsed."""

import gzip
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.http import incoming
from gateway.protocol import request as modern
from gateway.seal.cipher import PREFIX
from tests.support.fake_upstream import FakeUpstream
from tests.support.raw_connection import raw_connection, request_head
from tests.support.stand import Start
from tests.support.workbench import Client, Stand


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
    async with raw_connection(stand) as raw:
        await raw.send(request_head(stand, headers, None))
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
    async with raw_connection(stand) as raw:
        sent = request_head(stand, headers | {"Content-Length": str(len(body))}, None)
        await raw.send(sent + body[:-5])
        assert b" 400 " in await raw.line()
    assert upstream.seen == []


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(stand: Stand, client: Client) -> None:
    headers, body = client.build("tools/call", {"name": "tool"})
    async with raw_connection(stand) as raw:
        sent = headers | {"Content-Length": str(len(body)), "Expect": "100-continue"}
        await raw.send(request_head(stand, sent, None))
        assert await raw.line() == b"HTTP/1.1 100 Continue\r\n"
        assert await raw.line() == b"\r\n"
        await raw.send(body)
        assert b" 200 " in await raw.line()


async def test_a_body_is_opened_once_however_many_ask(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []

    def counting(body: bytes, max_depth: int) -> modern.ParsedBody:
        opened.append(body)
        return modern.read(body, max_depth)

    monkeypatch.setattr(incoming, "read", counting)
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
