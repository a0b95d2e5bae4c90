"""Pages of another origin are clients, in a real Chromium: the MCP Inspector's, and one that only fetches.

The Inspector's page of version 1.x has the connection type "Direct"; that of 2.x sends everything to its own server.
"""

import json
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlencode

import pytest
import pytest_asyncio
from aiohttp import web

from gateway.protocol import mcp
from tests.parts.launch import PARTS, old_server
from tests.support.browser import PROGRAM, Browser, BrowserError, Tab, chromium
from tests.support.gateway_process import gateway
from tests.support.served import Served

FILES: Final = PARTS / "inspector" / "node_modules" / "@modelcontextprotocol" / "inspector-client" / "dist"
HTTP: Final = "streamable-http"
META: Final = {mcp.META_VERSION: mcp.MODERN, mcp.META_CLIENT_INFO: {"name": "page", "version": "1"}}

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(PROGRAM is None, reason="apt install chromium"),
]


class Inspector(Served):
    """Serves the Inspector's page; the proxy beside it does not run."""

    path = "/"

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        file = FILES / (http.path.lstrip("/") or "index.html")
        return web.FileResponse(file) if file.is_file() else web.Response(status=404)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page() -> AsyncIterator[Inspector]:
    async with Inspector() as found:
        yield found


async def click(tab: Tab, label: str) -> None:
    """Click on what has this text, as a mouse does."""
    place = (
        "(() => { const found = [...document.querySelectorAll('button, span')]"
        f".find(each => each.innerText.trim() === {label!r} && !each.disabled); "
        "if (!found) return null; found.scrollIntoView({block: 'center'}); "
        "const box = found.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    await tab.until(f"{place} !== null")
    x, y = await tab.run(place)
    for kind in ("mousePressed", "mouseReleased"):
        await tab.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@pytest.mark.parametrize(
    ("name", "transport"),
    [("py130", HTTP), ("py130-sse", "sse"), ("py130-sse", HTTP), ("modern-py", HTTP)],
    ids=["passed", "passed over HTTP+SSE", "relayed", "mirrored"],
)
async def test_the_inspectors_page_lists_and_calls_tools_without_its_proxy(
    browser: Browser, page: Inspector, name: str, transport: str
) -> None:
    async with old_server(name) as server, gateway(server.url, security={"allowed_origins": [page.origin]}) as gw:
        tab = await browser.tab()
        await tab.go(page.url)
        await tab.run("localStorage.setItem('lastConnectionType', 'direct')")
        await tab.go(f"{page.url}?{urlencode({'transport': transport, 'serverUrl': gw.url})}")
        for label in ("Connect", "Tools", "List Tools", "echo"):
            await click(tab, label)
        await tab.until("document.querySelector('#text') !== null")
        await tab.run("document.querySelector('#text').focus()")
        await tab.send("Input.insertText", text="Ada, from a page")
        await click(tab, "Run Tool")
        for shown in ("Tool Result: Success", "Ada, from a page"):
            await tab.until(f"document.body.innerText.includes({shown!r})")
        assert len(server.ledger("run", "echo")) == 1
        await click(tab, "Disconnect")
        assert not [each for each in tab.complaints if "CORS" in each]
        await tab.go("about:blank")


async def fetched(tab: Tab, url: str, **options: Any) -> dict[str, Any]:
    """What a page may read of the reply to its request; raises BrowserError."""
    headers = "{id: r.headers.get('x-request-id'), challenge: r.headers.get('www-authenticate')}"
    found: dict[str, Any] = await tab.run(
        f"fetch({url!r}, {json.dumps(options)})"
        f".then(async r => ({{status: r.status, ...{headers}, body: JSON.parse(await r.text())}}))"
    )
    return found


async def test_a_page_reads_a_modern_reply_and_why_it_must_sign_in(browser: Browser, page: Inspector) -> None:
    params = {"name": "echo", "arguments": {"text": "Ada"}, "_meta": {**META, mcp.META_CAPABILITIES: {}}}
    asked = {
        "method": "POST",
        "headers": {
            "Accept": "application/json, text/event-stream",
            "Authorization": "Bearer none",
            "Content-Type": "application/json",
            mcp.PROTOCOL_VERSION: mcp.MODERN,
            mcp.METHOD_HEADER: mcp.TOOLS_CALL,
            mcp.NAME_HEADER: "echo",
        },
        "body": json.dumps({"jsonrpc": "2.0", "id": 1, "method": mcp.TOOLS_CALL, "params": params}),
    }
    async with old_server("py130") as server, old_server("py130-auth") as closed:
        routes = [{"path": path, "upstream": {"url": each.url}} for path, each in (("/mcp", server), ("/in", closed))]
        async with gateway("unused", routes=routes, security={"allowed_origins": [page.origin]}) as gw:
            tab = await browser.tab()
            await tab.go(page.url)
            called = await fetched(tab, gw.url, **asked)
            assert called["body"]["result"]["content"][0]["text"] == "Ada"
            assert called["id"]
            refused = await fetched(tab, f"{gw.base}/in", **asked)
            assert refused["status"] == 401
            metadata = refused["challenge"].partition('resource_metadata="')[2].partition('"')[0]
            assert (await fetched(tab, metadata))["body"]["resource"] == f"{gw.base}/in"
            missing = await fetched(tab, f"{gw.base}/nowhere", **asked)
            assert (missing["status"], missing["body"]["error"]["code"]) == (404, -32601)
            await gw.reload(gw.config | {"security": {"allowed_origins": ["https://app.example"]}})
            for _ in range(2):
                with pytest.raises(BrowserError, match="Failed to fetch"):
                    _ = await fetched(tab, gw.url, **asked)
            assert any("CORS" in each for each in tab.complaints)
            assert len(server.ledger("run", "echo")) == 1
