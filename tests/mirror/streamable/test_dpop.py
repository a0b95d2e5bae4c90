"""Tokens that need a proof with each request (RFC 9449), before a modern server that demands it."""

from collections.abc import AsyncIterator

import pytest

from gateway.protocol import mcp
from tests.mirror.conftest import Begin
from tests.support.fake_dpop import CHALLENGE, FakeDpopModern, proven
from tests.support.fake_modern import FORM
from tests.support.legacy_client import LegacyClient

ACCEPT = {"action": "accept", "content": {"name": "Ann"}}


@pytest.fixture
async def server() -> AsyncIterator[FakeDpopModern]:
    async with FakeDpopModern() as fake:
        fake.tools["ask"] = lambda call: call.text(call.answers) if call.answers else call.ask(name=FORM)
        yield fake


@pytest.mark.parametrize("route", [{}, {"forward_headers": ["DPoP"]}])
async def test_each_round_has_the_proof_of_the_request_that_caused_it(
    begin: Begin, server: FakeDpopModern, route: dict[str, list[str]]
) -> None:
    stand = await begin(route=route)
    server.public_url = stand.url
    client = await LegacyClient(stand, headers=proven(stand.url, "initialize")).initialize()
    client.headers.update(proven(stand.url, "call"))
    async with client.call("ask") as stream:
        question = await stream.message()
        client.headers.update(proven(stand.url, "answer"))
        assert await client.answer(question, ACCEPT) == 202
        assert "Ann" in (await stream.message())["result"]["content"][0]["text"]
    assert server.legs(mcp.DISCOVER) == ["initialize"]
    assert server.legs(mcp.TOOLS_CALL) == ["call", "answer"]


async def test_a_legacy_client_learns_the_nonce_that_its_proof_must_have(begin: Begin, server: FakeDpopModern) -> None:
    stand = await begin()
    server.public_url, server.nonce = stand.url, "n1"
    client = LegacyClient(stand, headers=proven(stand.url, "1"))
    async with client.request("initialize", {"protocolVersion": mcp.LEGACY, "capabilities": {}}) as stream:
        assert (stream.response.status, stream.response.headers["DPoP-Nonce"]) == (401, "n1")
        assert stream.response.headers["WWW-Authenticate"] == CHALLENGE
    client.headers.update(proven(stand.url, "2", "n1"))
    _ = await client.initialize()
    server.nonce = "n2"
    async with client.call("ask") as stream:
        assert (stream.response.status, stream.response.headers["DPoP-Nonce"]) == (401, "n2")
