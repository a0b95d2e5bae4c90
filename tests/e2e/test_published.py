"""A modern client lists and calls well-known published servers, which run as children of the gateway."""

from pathlib import Path

import pytest

from tests.e2e.published import CHROMIUM, PUBLISHED, Published
from tests.parts.clients.drive import modern_client, roots
from tests.support.gateway_process import gateway

pytestmark = pytest.mark.real


@pytest.mark.parametrize("server", PUBLISHED, ids=lambda server: server.package.rpartition("/")[2])
async def test_a_modern_client_lists_and_calls_a_published_server(server: Published, tmp_path: Path) -> None:
    if CHROMIUM is None and server.package == "@playwright/mcp":
        pytest.skip("apt install chromium")
    async with gateway(server.upstream(tmp_path)) as gw, modern_client("py") as client:
        connected = await client.connect(gw.url)
        assert connected.value["protocolVersion"] == "2026-07-28"
        listed = (await client.list_all("tools")).value["tools"]
        page = f"{gw.admin}/readyz"
        called = await client.call_tool(server.tool, server.filled(page), answers=[roots()])
        assert not called.value.get("isError"), called
        assert server.says.format(page=page) in called.text
        assert len(listed) == server.tools
        assert server.tool in {tool["name"] for tool in listed}
        assert [line["era"] for line in gw.log("era.found")] == ["legacy"]
        await gw.settled()
