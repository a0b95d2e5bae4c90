"""Connections: slow heads, too many of them, and requests that are not well-formed HTTP."""

import asyncio
import gc
import socket
import ssl
import weakref
from contextlib import suppress
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from gateway.config import InForce, Limits, Timeouts
from gateway.http.server import listener as listener_file
from gateway.http.server.connection import Connection, Service
from gateway.http.server.known_heads import KnownHeads
from gateway.http.server.listener import Listener
from gateway.http.server.traffic import Traffic
from gateway.telemetry import Metrics
from tests.parts.launch import free_port
from tests.support.authority import Authority, server_context
from tests.support.fake_upstream import FakeUpstream
from tests.support.raw_connection import raw_connection
from tests.support.stand import Start
from tests.support.workbench import DEADLINE, Stand, eventually, later


@pytest.mark.parametrize("part", [b"", b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_half_a_request_head_is_closed_by_the_deadline(begin: Start, part: bytes) -> None:
    stand = await begin(limits={"receive_seconds": 0.1})
    async with raw_connection(stand) as raw:
        await raw.send(part)
        assert await raw.rest() == b""


async def test_a_second_head_on_a_kept_connection_has_the_same_deadline(begin: Start) -> None:
    stand = await begin(limits={"receive_seconds": 0.1})
    async with raw_connection(stand) as raw:
        await raw.send(b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nMCP-Protocol-Version: 2026-07-28\r\n\r\n")
        assert b" 405 " in await raw.line()
        await raw.send(b"GET /mcp HT")
        assert b" 405 " not in await raw.rest()


async def test_a_long_call_is_not_closed_by_the_heads_deadline(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(limits={"receive_seconds": 0.05})
    go = upstream.waiting_tool("ok")
    call = later(stand.client().call())
    await upstream.saw("tools/call")
    asyncio.get_running_loop().call_later(0.2, go.set)  # the time under test
    assert (await call).text == "ok"


async def test_connections_over_the_cap_are_closed_and_the_others_stay(begin: Start) -> None:
    stand = await begin(limits={"connections": 2})
    async with raw_connection(stand) as one, raw_connection(stand) as two:
        request = b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nMCP-Protocol-Version: 2026-07-28\r\n\r\n"
        await one.send(request)
        assert b"405" in await one.line()
        await two.send(request)
        assert b"405" in await two.line()
        async with raw_connection(stand) as three:
            assert await three.rest() == b""
        await one.send(request)
        assert await one.line()


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_refused_connection_is_closed_on_uvloop_too(*, is_closed: bool) -> None:
    """Its transports are no asyncio.Transport, and it is what the command line runs on."""

    class Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    transport = Transport()
    traffic = Traffic(InForce(Limits(connections=int(is_closed))), InForce(Timeouts()), Metrics("0"))
    service = Service(AsyncMock(), traffic)
    service.is_closed = is_closed
    connection = Connection(service)
    connection.connection_made(transport)  # type: ignore[arg-type]
    assert transport.aborted
    connection.connection_lost(None)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"BREW /other HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n",
    ],
)
@pytest.mark.parametrize("listener", ["clients", "admin", "peers"])
async def test_a_listener_does_not_name_its_software(begin: Start, listener: str, request_: bytes) -> None:
    peers = f"127.0.0.1:{free_port()}"
    stand = await begin(replica={"id": "gw-1", "listen": peers, "peers": {"gw-1": peers}})
    address = {"clients": stand.gateway.listen, "admin": stand.gateway.admin, "peers": peers}[listener]
    async with raw_connection(stand, address) as raw:
        await raw.send(request_)
        reply = (await raw.rest()).lower()
    assert reply.startswith(b"http/1.")
    for word in (b"server:", b"python", b"aiohttp", b"llhttp", b"x-powered-by"):
        assert word not in reply


async def test_the_heads_of_requests_are_forgotten_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_file, "FORGET_SECONDS", 0.01)
    forget = Mock()
    monkeypatch.setattr(KnownHeads, "forget", forget)
    listener = Listener(AsyncMock(), "127.0.0.1:0", Mock())
    _ = await listener.start()
    await eventually(lambda: forget.call_count > 2)
    monkeypatch.setattr(listener_file, "FORGET_SECONDS", 300.0)
    before = forget.call_count
    await eventually(lambda: forget.call_count > before)
    await listener.close()
    closed = weakref.ref(listener)
    del listener
    await eventually(lambda: gc.collect() >= 0 and closed() is None, "no timer waits for it")


async def listening(stand: Stand) -> tuple[Listener, str, int]:
    """One more listener of a gateway, with its address."""
    listener = Listener(stand.gateway.downstream.handle, "127.0.0.1:0", stand.gateway.routes.process.traffic)
    host, port = (await listener.start()).split(":")
    return listener, host, int(port)


@pytest.mark.parametrize("is_secure", [False, True])
async def test_a_connection_that_only_the_kernel_has_accepted_is_served_though_the_listener_stops(
    begin: Start,
    tmp_path: Path,
    is_secure: bool,  # noqa: FBT001
) -> None:
    listener, host, port = await listening(await begin())
    client = None
    if is_secure:
        authority = Authority(tmp_path)
        await listener.secure(server_context(authority.sign("server")))
        client = ssl.create_default_context(cafile=str(authority.file))
    connected = socket.create_connection((host, port))  # the event loop does not run meanwhile
    stopping = asyncio.ensure_future(listener.stop_accepting())
    connected.setblocking(False)
    reader, writer = await asyncio.open_connection(
        sock=connected, ssl=client, server_hostname=host if is_secure else None
    )
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 ")
    await stopping
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        _ = await asyncio.open_connection(host, port)


async def test_a_client_that_begins_no_handshake_does_not_hold_up_the_end_of_a_listener(
    begin: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_file, "_CLOSE_SECONDS", 0.05)
    listener, _, port = await listening(await begin())
    await listener.secure(server_context(Authority(tmp_path).sign("server")))
    with socket.create_connection(("127.0.0.1", port)) as silent:  # the event loop does not run meanwhile
        async with asyncio.timeout(DEADLINE):
            await listener.stop_accepting()
        assert silent.recv(1) == b""


async def test_a_listener_that_stops_takes_no_more_connections_than_its_queue_holds(
    begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may connect for as long as it takes those that wait."""
    listener, _, port = await listening(await begin())
    monkeypatch.setattr(listener_file, "_BACKLOG", 1)
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        await listener.stop_accepting()
        assert len(listener.connections) == 1


async def test_a_listener_that_has_closed_has_nothing_left_to_stop_or_to_secure(begin: Start) -> None:
    """A drain or a change of the certificate may still run when a second signal closes everything."""
    listener, _, _ = await listening(await begin())
    await listener.close()
    await listener.stop_accepting()
    await listener.secure(None)
    assert not listener.connections
