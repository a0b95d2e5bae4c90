"""Tokens that need a proof with each request (RFC 9449), before a legacy server that demands it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.protocol import mcp
from tests.cluster.conftest import cluster
from tests.support.fake_dpop import CHALLENGE, TOKEN, FakeDpopUpstream, proven
from tests.support.fake_upstream import Turn, text
from tests.support.host import initialize
from tests.support.replicas import Cluster
from tests.support.stand import Start
from tests.support.workbench import Reply, Stand

__all__ = ["cluster"]

ANSWER = '{"action": "accept", "content": {"name": "Ada"}}'
CONFIGURED = [{}, {"forward_headers": ["DPoP"]}, {"forward_headers": ["DPoP", "X-Tenant"], "bind_headers": ["DPoP"]}]


@pytest.fixture
async def upstream() -> AsyncIterator[FakeDpopUpstream]:
    async with FakeDpopUpstream() as fake:
        yield fake


@pytest.fixture
def twice(upstream: FakeDpopUpstream) -> FakeDpopUpstream:
    """A server whose tool asks twice."""

    async def tool(turn: Turn) -> None:
        _ = await turn.elicit("name")
        await turn.result(text(json.dumps(await turn.elicit("name"))))

    upstream.tool(tool)
    return upstream


async def served(begin: Start, upstream: FakeDpopUpstream, **route: Any) -> Stand:
    stand = await begin(route=route)
    upstream.public_url = stand.url
    return stand


def demanded(refused: Reply) -> tuple[int, str, str]:
    return refused.status, refused.headers["DPoP-Nonce"], refused.headers["WWW-Authenticate"]


@pytest.mark.parametrize("route", CONFIGURED)
async def test_each_leg_has_its_own_proof_upstream(
    twice: FakeDpopUpstream, begin: Start, route: dict[str, Any]
) -> None:
    stand = await served(begin, twice, **route)
    client = stand.client()
    first = await client.call(headers=proven(stand.url, "1"))
    second = await client.answer(first, headers=proven(stand.url, "2"))
    assert (await client.answer(second, headers=proven(stand.url, "3"))).text == ANSWER
    assert dict.fromkeys(leg for _, leg in twice.legs()).keys() == {"1", "2", "3"}, "no request without a proof"
    assert [leg for word, leg in twice.legs() if word == "answer"] == ["2", "3"]
    assert {leg for word, leg in twice.legs() if word not in ("answer", "ping")} == {"1"}
    assert stand.metric("mcp_gateway_sessions_opened_total") == 1


async def test_calls_with_different_proofs_share_a_session(upstream: FakeDpopUpstream, begin: Start) -> None:
    stand = await served(begin, upstream, forward_headers=["DPoP"])
    for leg in ("1", "2"):
        assert (await stand.client().call(headers=proven(stand.url, leg))).text == "done"
    assert [leg for word, leg in upstream.legs() if word == "tools/call"] == ["1", "2"]
    assert upstream.words.count("initialize") == 1


async def test_a_call_that_is_given_up_is_cancelled_with_the_newest_proof(
    twice: FakeDpopUpstream, begin: Start
) -> None:
    stand = await begin(hold={"ttl_seconds": 1})
    twice.public_url = stand.url
    client = stand.client()
    _ = await client.answer(await client.call(headers=proven(stand.url, "1")), headers=proven(stand.url, "2"))
    _ = await twice.saw(mcp.CANCELLED)
    assert [leg for word, leg in twice.legs() if word == mcp.CANCELLED] == ["2"]


@pytest.mark.parametrize("route", CONFIGURED)
async def test_a_client_learns_the_nonce_that_its_proof_must_have(
    twice: FakeDpopUpstream, begin: Start, route: dict[str, Any]
) -> None:
    stand = await served(begin, twice, **route)
    client, twice.nonce = stand.client(), "n1"
    refused = await client.call(headers=proven(stand.url, "1"))
    assert demanded(refused) == (401, "n1", CHALLENGE)
    first = await client.call(headers=proven(stand.url, "1", "n1"))
    twice.nonce = "n2"
    refused = await client.answer(first, headers=proven(stand.url, "2", "n1"))
    assert demanded(refused) == (401, "n2", CHALLENGE)
    second = await client.answer(first, headers=proven(stand.url, "2", "n2"))
    assert (await client.answer(second, headers=proven(stand.url, "3", "n2"))).text == ANSWER


async def test_a_token_without_its_proof_collects_nothing(twice: FakeDpopUpstream, begin: Start) -> None:
    """The server accepted the token a moment ago, but only with a proof."""
    stand = await served(begin, twice)
    client = stand.client()
    first = await client.call(headers=proven(stand.url, "1"))
    for stolen in ({"Authorization": TOKEN}, proven("https://elsewhere/mcp", "stolen")):
        assert (await client.answer(first, headers=stolen)).status == 401
        assert (await client.call(state=first.state, headers=stolen)).status == 401
    assert "answer" not in twice.words
    second = await client.answer(first, headers=proven(stand.url, "2"))
    assert (await client.answer(second, headers=proven(stand.url, "3"))).text == ANSWER


async def test_a_retry_takes_its_proof_to_the_replica_that_holds_its_call(
    twice: FakeDpopUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    url = twice.public_url = "https://mcp.example.com/mcp"
    first = await one.client().call(headers=proven(url, "1"))
    twice.nonce = "n1"
    refused = await two.client().answer(first, headers=proven(url, "2"))
    assert demanded(refused) == (401, "n1", CHALLENGE)
    second = await two.client().answer(first, headers=proven(url, "2", "n1"))
    assert (await one.client().answer(second, headers=proven(url, "3", "n1"))).text == ANSWER
    assert [leg for word, leg in twice.legs() if word == "answer"] == ["2", "3"]


async def test_proofs_and_nonces_pass_through_for_legacy_clients(upstream: FakeDpopUpstream, begin: Start) -> None:
    stand = await served(begin, upstream)
    upstream.nonce = "n1"
    async with stand.http.post(stand.url, json=initialize(), headers=proven(stand.url, "1")) as response:
        assert (response.status, response.headers["DPoP-Nonce"]) == (401, "n1")
        assert response.headers["WWW-Authenticate"] == CHALLENGE
    async with stand.http.post(stand.url, json=initialize(), headers=proven(stand.url, "2", "n1")) as response:
        assert response.status == 200
    assert upstream.legs() == [("initialize", "2")]
