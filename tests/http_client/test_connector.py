"""Connecting: TLS that fails, with the reason an operator reads, addresses that fail, and the deadline."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from gateway.config.model.route import UpstreamTls
from gateway.config.tls import upstream_context
from gateway.http_client.client import HttpClient
from gateway.http_client.errors import ConnectTimedOut, NoReply, NotConnected, ReplyCut, TlsRefused
from gateway.http_client.origin import Origin
from tests.support.authority import Authority, server_context
from tests.support.black_hole import black_hole
from tests.support.fake_http import OK, FakeHttp, Wire, answers, says, stays
from tests.support.reply_recorder import COMPLETE, Sender
from tests.support.workbench import eventually


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def sender(client: HttpClient, url: str, name: str | None = None, **tls: Any) -> Sender:
    """A sender with the context that the gateway makes of upstream.tls."""
    context = upstream_context(UpstreamTls(**{key: str(value) for key, value in tls.items()}), "", [])
    return Sender(client, url, Origin.of(URL(url), context, name))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_server_that_misses_the_client_certificate_is_explained(
    client: HttpClient, ca: Authority, version: ssl.TLSVersion
) -> None:
    """With TLS 1.3 the alert comes after the client's side of the handshake is complete, and the request is sent."""
    context = server_context(ca.sign("server"), clients=ca.file)
    context.maximum_version = version

    def refuse(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(accepted.dup(), server_side=True)
            with suppress(ConnectionError):
                while accepted.recv(65_536):  # a reset could overtake the alert
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = asyncio.get_running_loop().run_in_executor(None, refuse, listener)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/mcp"
        heard = await sender(client, url, ca_file=ca.file).send()
        await refusing
    assert isinstance(heard.failure, TlsRefused)
    assert "upstream.tls.cert_file" in str(heard.failure)
    assert not heard.failure.sent


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_another_alert_does_not_prove_that_nothing_ran(
    client: HttpClient, ca: Authority, version: ssl.TLSVersion
) -> None:
    """The server has read the request; then a damaged record has it send the alert bad_record_mac."""
    context = server_context(ca.sign("server"))
    context.maximum_version = version
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(coming, going, server_side=True)

    def serve(listener: socket.socket) -> bytes:
        accepted, _ = listener.accept()

        def until_done(step: Callable[[], bytes | None]) -> bytes | None:
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    accepted.sendall(going.read())
                    coming.write(accepted.recv(65_536))

        with accepted:
            _ = until_done(server.do_handshake)
            accepted.sendall(going.read())
            request = until_done(lambda: server.read(65_536))
            coming.write(b"\x17\x03\x03\x00\x40" + bytes(64))
            with pytest.raises(ssl.SSLError):
                _ = server.read(65_536)
            accepted.sendall(going.read())
            with suppress(ConnectionError):
                while accepted.recv(65_536):
                    pass
        return request or b""

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.get_running_loop().run_in_executor(None, serve, listener)
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/mcp"
        heard = await sender(client, url, ca_file=ca.file).send()
        assert (await serving).startswith(b"POST ")
    assert isinstance(heard.failure, NoReply)
    assert heard.failure.sent


async def test_an_abort_in_a_handshake_ends_it(client: HttpClient, ca: Authority) -> None:
    began = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.reader.read(1)
        began.set()
        await wire.gone()

    async with FakeHttp(script) as server:
        heard, pending = sender(client, server.url.replace("http:", "https:"), ca_file=ca.file).begin(seconds=600)
        await began.wait()
        pending.abort()
        await server.left.wait()
        assert heard.words == []


async def test_a_body_that_ends_with_the_connection_needs_the_end_of_tls_too(
    client: HttpClient, ca: Authority
) -> None:
    """Otherwise an attacker on the path could cut a reply short (RFC 9112 section 9.8)."""
    cut = False

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(b"HTTP/1.1 200 OK\r\n\r\npart")
        if cut:
            await wire.head()  # until the test cuts the connection below TLS

    async with FakeHttp(script, server_context(ca.sign("server"))) as server:
        secure = sender(client, server.url, ca_file=ca.file)
        heard = await secure.send()
        assert heard.words == COMPLETE
        cut = True
        sockets: list[int] = []
        server.script = _recording(script, sockets)
        heard, _ = secure.begin()
        await heard.until(lambda: heard.parts)
        with socket.socket(fileno=sockets.pop()) as below:
            below.shutdown(socket.SHUT_WR)
        await heard.over()
        assert heard.words == ["head", "body", "failed"]
        assert isinstance(heard.failure, ReplyCut)


def _recording(script: Any, sockets: list[int]) -> Any:
    async def recorded(wire: Wire) -> None:
        sockets.append(wire.duplicate())
        await script(wire)

    return recorded


async def test_large_bodies_pass_tls_in_both_directions(client: HttpClient, ca: Authority) -> None:
    size = 4 * 2**20

    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            body = request.partition(b"\r\n\r\n")[2]
            await wire.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with FakeHttp(script, server_context(ca.sign("server"))) as server:
        secure = sender(client, server.url, ca_file=ca.file)
        body = bytes(range(256)) * (size // 256)
        for _ in range(2):
            heard, pending = secure.begin(body=body)
            heard.react = lambda word, pending=pending: pending.pause_reading() if word == "head" else None  # type: ignore[misc]
            await heard.until(lambda heard=heard: heard.words)  # type: ignore[misc]
            pending.resume_reading()
            await heard.over()
            assert heard.body == body
        assert server.connections == 1


async def test_an_idle_tls_connection_that_the_upstream_ends_is_forgotten(client: HttpClient, ca: Authority) -> None:
    async with FakeHttp(says(OK), server_context(ca.sign("server"))) as server:
        secure = sender(client, server.url, ca_file=ca.file)
        assert (await secure.send()).words == COMPLETE
        await eventually(lambda: not client.connections)
        assert (await secure.send()).words == COMPLETE
        assert server.connections == 2


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["127.0.0.9", "127.0.0.8"], ids=["one that refuses", "one that stays silent"])
async def test_an_address_does_not_hold_up_the_next_one(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    async with FakeHttp(answers(OK)) as server:
        with black_hole(f"127.0.0.8:{server.port}"):
            _resolve(monkeypatch, [first, "127.0.0.1"], server.port)
            heard = await Sender(client, f"http://two.example:{server.port}/mcp").send()
            assert heard.words == COMPLETE


async def test_a_host_whose_addresses_all_refuse_is_not_connected(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeHttp(stays()) as server:
        pass
    _resolve(monkeypatch, ["127.0.0.8", "127.0.0.9"], server.port)
    heard = await Sender(client, f"http://two.example:{server.port}/mcp").send()
    assert heard.words == ["failed"]
    assert type(heard.failure) is NotConnected
    assert not heard.failure.sent
    assert str(heard.failure) == "Connection refused"


async def test_a_host_that_is_silent_is_given_up_at_the_deadline(client: HttpClient) -> None:
    async with FakeHttp(stays()) as server:
        pass
    with black_hole(f"127.0.0.8:{server.port}"):
        heard, _ = Sender(client, f"http://127.0.0.8:{server.port}/mcp").begin(seconds=0.05)
        await heard.over()
    assert isinstance(heard.failure, ConnectTimedOut)
    assert not heard.failure.sent


def _resolve(monkeypatch: pytest.MonkeyPatch, hosts: list[str], port: int) -> None:
    """Have the resolver of the system find these addresses."""

    async def look_up(host: Any, port: Any, **options: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr("gateway.world.resolve", look_up)
