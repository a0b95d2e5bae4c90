"""TLS on both sides, with an authority of the test: who is trusted, who is let in, and what an operator is told."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from gateway.config import ConfigError, parse
from gateway.server import process
from tests.support.authority import Authority, server_context
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, configuration, eventually

Serve = Callable[..., Any]


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts upstreams; to be asked for before `begin`."""
    fakes: list[FakeUpstream] = []

    async def start(tls: ssl.SSLContext | None) -> FakeUpstream:
        fake = FakeUpstream()
        fakes.append(fake)
        await fake.start(tls=tls)
        fake.tool(lambda turn: turn.result(text("done")))
        return fake

    yield start
    for fake in fakes:
        await fake.close()


# -- towards upstreams ----------------------------------------------------------------------------------------------

CAUSES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # (what is wrong, the server's certificate, upstream.tls, what the operator reads)
    ("unknown authority", {}, {}, "unknown authority; give that authority's in upstream.tls.ca_file"),
    ("another authority", {}, {"ca_file": "other.pem"}, "unknown authority"),
    ("expired", {"days": -1}, {"ca_file": "ca.pem"}, "its certificate has expired; renew it"),
    ("another address", {"host": "127.0.0.9"}, {"ca_file": "ca.pem"}, "is for another address"),
    ("another name", {}, {"ca_file": "ca.pem", "server_name": "else.example"}, "is for another name"),
]


@pytest.mark.parametrize(("what", "certificate", "tls", "said"), CAUSES, ids=[cause[0] for cause in CAUSES])
async def test_a_server_that_is_not_to_be_trusted_is_not_and_the_error_says_why(
    what: str, certificate: Any, tls: Any, said: str, tmp_path: Path, ca: Authority, serve: Serve, begin: Start
) -> None:
    Authority(tmp_path, "other")
    fake = await serve(server_context(ca.sign("server", **certificate)))
    files = {key: str(tmp_path / value) if key == "ca_file" else value for key, value in tls.items()}
    stand = await begin(url=fake.url, route={"upstream": {"url": fake.url, "tls": files}})
    reply = await stand.client("Bearer secret").call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert said in reply.error["message"]
    assert fake.url in reply.error["message"]
    assert not fake.seen, "nothing was sent"


@pytest.mark.parametrize(
    ("host", "tls"),
    [
        ("127.0.0.1", {"ca_file": "ca.pem"}),
        ("mcp.internal.example", {"ca_file": "ca.pem", "server_name": "mcp.internal.example"}),
        ("127.0.0.9", {"verify": False}),
    ],
)
async def test_a_server_that_is_trusted_is_served(
    host: str, tls: dict[str, Any], tmp_path: Path, ca: Authority, serve: Serve, begin: Start, monkeypatch: Any
) -> None:
    log = Mock()
    monkeypatch.setattr(process, "log", log)
    fake = await serve(server_context(ca.sign("server", host)))
    files = {key: str(tmp_path / value) if key == "ca_file" else value for key, value in tls.items()}
    stand = await begin(url=fake.url, route={"upstream": {"url": fake.url, "tls": files}})
    assert (await stand.client().call()).text == "done"
    told = [call.kwargs["note"] for call in log.warning.call_args_list]
    assert ["upstream.tls.verify is false" in note for note in told] == ([True] if "verify" in tls else [])


async def test_a_server_that_asks_for_a_certificate_gets_it(
    tmp_path: Path, ca: Authority, serve: Serve, begin: Start
) -> None:
    fake = await serve(server_context(ca.sign("server"), clients=ca.file))
    route = {"upstream": {"url": fake.url, "tls": {"ca_file": str(ca.file), "cert_file": str(ca.sign("gateway"))}}}
    stand = await begin(url=fake.url, route=route)
    assert (await stand.client().call()).text == "done"
    del route["upstream"]["tls"]["cert_file"]  # type: ignore[attr-defined]
    without = await begin(url=fake.url, route=route)
    refused = await without.client().call()
    assert refused.outcome == (200, -32603, "upstream_unreachable")
    assert "upstream.tls.cert_file" in refused.error["message"]


async def test_a_port_without_tls_is_named_as_that(ca: Authority, serve: Serve, begin: Start) -> None:
    fake = await serve(None)
    url = fake.url.replace("http:", "https:")
    stand = await begin(url=url, route={"upstream": {"url": url, "tls": {"ca_file": str(ca.file)}}})
    assert "does not speak TLS there" in (await stand.client().call()).error["message"]


@pytest.mark.parametrize("stalls", [True, False])
async def test_a_handshake_that_stalls_or_breaks_makes_no_connection(
    ca: Authority, begin: Start, *, stalls: bool
) -> None:
    transports: list[asyncio.Transport] = []

    class Deaf(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transports.append(transport)
            if not stalls:
                transport.abort()

    server = await asyncio.get_running_loop().create_server(Deaf, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    route = {"upstream": {"url": url, "tls": {"ca_file": str(ca.file)}}}
    stand = await begin(url=url, route=route, timeouts={"connect_seconds": 0.2})
    assert (await stand.client().call()).outcome == (200, -32603, "upstream_unreachable")
    assert transports
    server.close()
    for transport in transports:
        transport.abort()


async def test_two_routes_to_one_server_do_not_share_their_trust(
    ca: Authority, tmp_path: Path, serve: Serve, begin: Start
) -> None:
    """A connection that one route's authority vouched for is not there for the other's requests."""
    fake = await serve(server_context(ca.sign("server")))
    Authority(tmp_path, "other")
    routes = [
        {"path": "/mcp", "upstream": {"url": fake.url, "tls": {"ca_file": str(ca.file)}}},
        {"path": "/strict", "upstream": {"url": fake.url, "tls": {"ca_file": str(tmp_path / "other.pem")}}},
    ]
    stand = await begin(url=fake.url, routes=routes)
    assert (await stand.client().call()).text == "done"
    strict = Client(stand.http, f"http://{stand.gateway.listen}/strict")
    assert (await strict.call()).outcome == (200, -32603, "upstream_unreachable")


# -- on the listener ------------------------------------------------------------------------------------------------


def secure(stand: Stand, ca: Authority, certificate: Path | None = None) -> tuple[aiohttp.ClientSession, Client]:
    """A client that trusts this authority; it has connections of its own."""
    context = ssl.create_default_context(cafile=str(ca.file))
    if certificate is not None:
        context.load_cert_chain(certificate)
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))
    return http, Client(http, f"https://{stand.gateway.listen}/mcp")


async def test_clients_are_served_over_tls_and_not_without(
    upstream: FakeUpstream, ca: Authority, begin: Start
) -> None:
    upstream.tool(lambda turn: turn.result(text("done")))
    stand = await begin(tls={"cert_file": str(ca.sign("gateway"))})
    http, client = secure(stand, ca)
    async with http:
        assert (await client.call()).text == "done"
    with pytest.raises(aiohttp.ClientError):
        await stand.client().call()
    async with stand.http.get(f"http://{stand.gateway.admin}/readyz") as ready:
        assert ready.status == 200, "the admin listener has no TLS"


async def test_a_renewed_certificate_is_served_and_no_connection_is_dropped(
    upstream: FakeUpstream, tmp_path: Path, ca: Authority, begin: Start
) -> None:
    go = asyncio.Event()

    async def wait(turn: Turn) -> None:
        await turn.progress(1)
        await go.wait()
        await turn.result(text("done"))

    upstream.tool(wait)
    sections = {"tls": {"cert_file": str(ca.sign("gateway"))}}
    stand = await begin(**sections)
    http, client = secure(stand, ca)
    async with http, client.open("tools/call", {"name": "tool"}, meta={"progressToken": 1}) as reply:
        await reply.content.readany()
        renewed = Authority(tmp_path, "renewed")
        renewed.sign("gateway")  # under the old path
        stand.gateway.apply(parse(configuration(upstream.url, **sections), "test", {}))
        await eventually(lambda: "change the certificate" not in stand.tasks(), "the certificate is changed")
        new_http, new_client = secure(stand, renewed)
        go.set()
        async with new_http:
            assert (await new_client.call()).text == "done"
        old_http, old_client = secure(stand, ca)
        async with old_http:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await old_client.call()
        assert b"done" in await reply.content.read(), "on the connection that was there"


async def test_tls_is_switched_on_and_off(upstream: FakeUpstream, ca: Authority, begin: Start) -> None:
    upstream.tool(lambda turn: turn.result(text("done")))
    stand = await begin()
    assert (await stand.client().call()).text == "done"
    for sections, is_on in (({"tls": {"cert_file": str(ca.sign("gateway"))}}, True), ({}, False)):
        stand.gateway.apply(parse(configuration(upstream.url, **sections), "test", {}))
        await eventually(lambda: "change the certificate" not in stand.tasks(), "it is switched")
        http, client = secure(stand, ca)
        async with http, aiohttp.ClientSession() as plain:
            good, bad = (client, Client(plain, stand.url)) if is_on else (Client(plain, stand.url), client)
            assert (await good.call()).text == "done"
            with pytest.raises(aiohttp.ClientError):
                await bad.call()


async def test_only_clients_with_a_certificate_are_let_in(
    upstream: FakeUpstream, tmp_path: Path, ca: Authority, begin: Start
) -> None:
    upstream.tool(lambda turn: turn.result(text("done")))
    certificate = ca.sign("gateway")
    stand = await begin(tls={"cert_file": str(certificate), "client_ca_file": str(ca.file)})
    stranger = Authority(tmp_path, "strangers").sign("stranger")
    for shown, is_let_in in ((ca.sign("ada"), True), (stranger, False), (None, False)):
        http, client = secure(stand, ca, shown)
        async with http:
            if is_let_in:
                assert (await client.call()).text == "done"
            else:
                with pytest.raises(aiohttp.ClientError):
                    await client.call()
    assert len(upstream.of("tools/call")) == 1


# -- files ----------------------------------------------------------------------------------------------------------


async def test_a_reload_whose_files_are_gone_changes_nothing(
    upstream: FakeUpstream, ca: Authority, begin: Start
) -> None:
    stand = await begin()
    certificate = ca.sign("gateway")
    new = parse(configuration(upstream.url, tls={"cert_file": str(certificate)}, limits={"body_bytes": 1}), "test", {})
    certificate.unlink()
    with pytest.raises(ConfigError, match=r"tls\.cert_file: cannot be read"):
        stand.gateway.apply(new)
    assert (await stand.client().call()).text
