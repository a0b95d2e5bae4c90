"""What nginx and HAProxy do with the files of deploy/, seen from a replica that only records.

The real gateways behind them are in tests/e2e/test_replicas.py.
"""

import asyncio
import io
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gateway.config import parse
from tests.parts.launch import free_port
from tests.support.cluster import FILES, Balancer, BalancerName, Place, needs
from tests.support.served import Served

LIMIT = parse("routes: [{upstream: {url: 'http://127.0.0.1:9000/mcp'}}]", "defaults", {}).limits.body_bytes
WAIT_SECONDS = 10.0
NONE: Mapping[str, str] = {}
CALLER = {"Authorization": "Bearer ann", "Cookie": "session=1"}

pytestmark = needs(*FILES)

Handler = Callable[["Replica", web.BaseRequest], Awaitable[web.StreamResponse]]


class Replica(Served):
    """Takes the place of a gateway, for clients and for health checks."""

    def __init__(self, name: str, handler: Handler) -> None:
        self.name, self.handler = name, handler
        self.seen: list[web.BaseRequest] = []
        self.is_ready = True
        self.more, self.left = asyncio.Event(), asyncio.Event()

    @property
    def place(self) -> Place:
        address = self.origin.removeprefix("http://")
        return Place(self.name, address, address)

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        if http.path == "/readyz":
            return web.Response(status=200 if self.is_ready else 503)
        self.seen.append(http)
        return await self.handler(self, http)


@dataclass
class Row:
    """A balancer, the replicas behind it, and a client."""

    balancer: Balancer
    replicas: list[Replica]
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://{self.balancer.address}/mcp"

    async def post(self, body: bytes | io.BytesIO = b"{}", headers: Mapping[str, str] = NONE) -> tuple[int, str]:
        async with self.http.post(self.url, data=body, headers=headers) as response:
            return response.status, await response.text()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.balancer.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


@asynccontextmanager
async def row(name: BalancerName, handler: Handler, *, count: int = 2, dead: int = 0) -> AsyncIterator[Row]:
    """Put a balancer before so many replicas, and before some addresses without a process."""
    replicas = [Replica(f"gw-{number}", handler) for number in range(1, count + 1)]
    nobody = [Place(f"gone-{number}", *[f"127.0.0.1:{free_port()}"] * 2) for number in range(1, dead + 1)]
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        balancer = Balancer(name, Path(directory), f"127.0.0.1:{free_port()}")
        balancer.configure([*nobody, *(replica.place for replica in replicas)])
        stack.push_async_callback(balancer.kill)
        await balancer.start()
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_SECONDS)))
        try:
            yield Row(balancer, replicas, http)
        except BaseException as exc:
            exc.add_note(balancer.tail())
            raise


async def say_name(replica: Replica, request: web.BaseRequest) -> web.StreamResponse:
    await request.content.read()  # however large it is
    return web.Response(text=replica.name)


async def die(replica: Replica, request: web.BaseRequest) -> web.StreamResponse:
    await request.read()
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def stream_until_left(replica: Replica, request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    try:
        await replica.more.wait()  # the first event might be sent with the head
        await response.write(b"data: 2\n\n")
        await asyncio.Event().wait()
    finally:
        replica.left.set()
    return response


async def be_silent(replica: Replica, request: web.BaseRequest) -> web.StreamResponse:
    try:
        await asyncio.Event().wait()
    finally:
        replica.left.set()
    return web.Response()


@pytest.mark.parametrize("name", FILES)
async def test_requests_of_one_connection_go_to_different_replicas(name: BalancerName) -> None:
    async with row(name, say_name, count=3) as r:
        said = [await r.post(headers=CALLER) for _ in range(6)]
    assert [text for _, text in said] == ["gw-1", "gw-2", "gw-3"] * 2


@pytest.mark.parametrize("name", FILES)
async def test_headers_reach_the_replica(name: BalancerName) -> None:
    sent = {
        "Host": "mcp.example.com",
        "Authorization": "Bearer ann",
        "Mcp-Method": "tools/call",
        "Mcp-Param-user_id": "7",
        "Mcp-Param-a.b": "8",
        "X-Forwarded-For": "8.8.8.8",
    }
    async with row(name, say_name, count=1) as r:
        assert (await r.post(headers=sent))[0] == 200
        (got,) = r.replicas[0].seen
    expected = {**sent, "X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http"}
    assert {header: got.headers.getall(header, []) for header in expected} == {
        header: [value] for header, value in expected.items()
    }


@pytest.mark.parametrize("name", FILES)
async def test_the_log_has_the_id_under_which_the_gateway_logs_the_request(name: BalancerName) -> None:
    id_ = "0123456789abcdef" * 8  # the longest that the gateway takes from a client

    async def reply(_: Replica, __: web.BaseRequest) -> web.StreamResponse:
        return web.Response(headers={"X-Request-Id": id_})

    async with row(name, reply, count=1) as r, asyncio.timeout(WAIT_SECONDS):
        assert (await r.post())[0] == 200
        while not any("POST /mcp" in line and id_ in line for line in r.balancer.log.splitlines()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", FILES)
async def test_the_largest_body_passes_and_one_byte_more_does_not(name: BalancerName) -> None:
    async with row(name, say_name) as r, asyncio.timeout(WAIT_SECONDS):
        assert (await r.post(io.BytesIO(b"x" * LIMIT)))[0] == 200
        # Refused by its length, before a byte of the body was sent.
        reader, writer = await r.connect()
        writer.write(b"POST /mcp HTTP/1.1\r\nHost: mcp.example.com\r\nContent-Length: %d\r\n\r\n" % (LIMIT + 1))
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()
        assert sum(len(replica.seen) for replica in r.replicas) == 1


@pytest.mark.parametrize("name", FILES)
async def test_a_request_that_was_sent_is_never_sent_again(name: BalancerName) -> None:
    async with row(name, die) as r:
        assert (await r.post())[0] in {502, 504}
        assert sum(len(replica.seen) for replica in r.replicas) == 1


@pytest.mark.parametrize("name", FILES)
async def test_a_request_that_could_not_be_sent_goes_to_another_replica(name: BalancerName) -> None:
    async with row(name, say_name, count=1, dead=2) as r:
        assert [await r.post() for _ in range(6)] == [(200, "gw-1")] * 6


@pytest.mark.parametrize("name", FILES)
async def test_an_event_is_not_buffered_and_a_disconnect_reaches_the_replica(name: BalancerName) -> None:
    async with row(name, stream_until_left, count=1) as r, asyncio.timeout(WAIT_SECONDS):
        async with r.http.post(r.url, data=b"{}") as response:
            assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
            r.replicas[0].more.set()
            assert await response.content.readuntil(b"\n\n") == b"data: 2\n\n"
            response.close()
        await r.replicas[0].left.wait()


@pytest.mark.parametrize("pieces", [1, 2], ids=["in one segment", "head and body apart"])
@pytest.mark.parametrize("name", FILES)
async def test_a_disconnect_before_the_reply_reaches_the_replica(name: BalancerName, pieces: int) -> None:
    head, body = b"POST /mcp HTTP/1.1\r\nHost: mcp.example.com\r\nContent-Length: 2\r\n\r\n", b"{}"
    async with row(name, be_silent, count=1) as r, asyncio.timeout(WAIT_SECONDS):
        _, writer = await r.connect()
        for piece in [head + body] if pieces == 1 else [head, body]:
            writer.write(piece)
            await writer.drain()
        while not r.replicas[0].seen:
            await asyncio.sleep(0.01)
        writer.close()
        await r.replicas[0].left.wait()


async def test_haproxy_skips_a_draining_replica() -> None:
    async with row("haproxy", say_name) as r, asyncio.timeout(WAIT_SECONDS):
        r.replicas[0].is_ready = False
        while {(await r.post())[1] for _ in range(4)} != {"gw-2"}:
            pass
        r.replicas[0].is_ready = True
        while {(await r.post())[1] for _ in range(4)} != {"gw-1", "gw-2"}:
            pass
