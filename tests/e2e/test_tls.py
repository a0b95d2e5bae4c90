"""TLS on both sides of a real gateway, with real clients and a real legacy server."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.wire import ACCEPT, NAMED, SECONDS
from tests.parts.clients.drive import Kind, modern_client
from tests.parts.launch import old_server
from tests.support.authority import Authority
from tests.support.gateway_process import Gateway, gateway
from tests.support.workbench import Client

KINDS: tuple[Kind, ...] = ("py", "ts")

pytestmark = pytest.mark.real


@asynccontextmanager
async def secure_gateway(ca: Authority, *, workers: int = 1) -> AsyncIterator[tuple[Gateway, str]]:
    """Client - TLS - gateway - TLS with certificates of both - py130; the gateway, and its url for clients."""
    files = {name: str(ca.sign(name)) for name in ("server", "gateway", "front")}
    async with old_server("py130", "--tls", files["server"], "--tls-clients", str(ca.file)) as server:
        url = server.url.replace("http:", "https:")
        tls = {"ca_file": str(ca.file), "cert_file": files["gateway"]}
        sections: dict[str, Any] = {"workers": workers} if workers > 1 else {}
        route = {"upstream": {"url": url, "tls": tls}}
        async with gateway(url, route=route, tls={"cert_file": files["front"]}, **sections) as gw:
            yield gw, gw.url.replace("http:", "https:")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_real_client_speaks_tls_to_a_gateway_that_speaks_tls_to_a_real_server(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(ca.file))
    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", str(ca.file))
    async with secure_gateway(ca) as (_, url), modern_client(kind) as client:
        connected = await client.connect(url)
        assert connected.error is None, connected
        reply = await client.call_tool("echo", {"text": "over TLS"})
        assert reply.text == "over TLS"


async def test_workers_serve_a_renewed_certificate_and_drop_nothing(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with secure_gateway(ca, workers=2) as (gw, url):
        old = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(ca.file)))
        )
        async with old:
            asked = await Client(old, url, seconds=SECONDS).call("ask", {"question": "Who?"})
            renewed = Authority(tmp_path, "renewed")
            renewed.sign("front")
            said = await gw.reload()
            assert [line["changed"] for line in said] == [["tls.cert_file (content)"]] * 3
            new = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(renewed.file)), force_close=True)
            async with aiohttp.ClientSession(connector=new) as http:
                for text in "abcdef":  # whichever worker it is
                    assert (await Client(http, url, seconds=SECONDS).call("echo", {"text": text})).text == text
                assert (await Client(http, url, seconds=SECONDS).answer(asked, ACCEPT)).text == NAMED
            # The earlier connection: the client trusts only the old authority.
            assert (await Client(old, url, seconds=SECONDS).call("echo", {"text": "still"})).text == "still"
