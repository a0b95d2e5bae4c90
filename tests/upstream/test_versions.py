"""Every old protocol version that a server may choose, over streamable HTTP."""

import pytest

from gateway.protocol import mcp
from tests.support.fake_upstream import FakeUpstream, asks
from tests.support.workbench import Client


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
async def test_the_version_that_the_server_chose_is_spoken_from_then_on(
    upstream: FakeUpstream, client: Client, version: str
) -> None:
    upstream.version = version
    upstream.tool(asks("thanks"))
    assert (await client.answer(await client.call())).text == "thanks"
    assert upstream.of("initialize")[0].body["params"]["protocolVersion"] == "2025-11-25", "the newest is offered"
    assert {seen.headers.get(mcp.PROTOCOL_VERSION) for seen in upstream.seen[1:]} == {version}


@pytest.mark.parametrize("version", ["2024-10-07", "2026-07-28", "draft", ""])
async def test_a_version_that_the_gateway_does_not_support_is_a_clear_error(
    upstream: FakeUpstream, client: Client, version: str
) -> None:
    upstream.version = version
    reply = await client.call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert f"wants protocol version '{version}'" in reply.error["message"]
    assert "tools/call" not in upstream.words
