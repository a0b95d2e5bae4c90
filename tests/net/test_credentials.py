"""What the gateway answers from memory goes to nobody whom the upstream would refuse.

A principal is read from a token whose signature the gateway does not check: whoever forges one with the right claims
is the same principal, and must still get nothing.
"""

import pytest

from gateway.core import mcp
from tests.net.fake_upstream import FakeUpstream, Turn
from tests.net.test_faults import challenge
from tests.net.workbench import Reply, Stand, jwt

REAL, FORGED, REFRESHED = (jwt(iss="i", sub="ada", client_id="c", jti=name) for name in ("real", "forged", "new"))
REFUSED = (401, -32603, "upstream_refused")


async def ask(turn: Turn) -> None:
    answer = await turn.elicit()
    await turn.result({"content": [{"type": "text", "text": answer["action"]}]})


@pytest.fixture(autouse=True)
def _one_credential(upstream: FakeUpstream) -> None:
    upstream.tool(ask)
    plain = dict(upstream._scripts)
    for word in ("initialize", mcp.PING, "tools/list", "tools/call", "answer"):
        upstream.on(word, challenge(401, only=REAL, plain=plain.get(word)))


def refuse_all_but(upstream: FakeUpstream, credential: str) -> None:
    upstream.on(mcp.PING, challenge(401, only=credential))


async def test_a_handshake_is_told_to_nobody_whom_the_upstream_refuses(upstream: FakeUpstream, stand: Stand) -> None:
    assert (await stand.client(REAL).post(mcp.DISCOVER)).status == 200
    assert (await stand.client(FORGED).post(mcp.DISCOVER)).outcome == REFUSED
    assert (await stand.client(REAL).post(mcp.DISCOVER)).status == 200
    assert [seen.headers["Authorization"] for seen in upstream.of(mcp.PING)] == [FORGED]


async def test_changes_are_told_to_nobody_whom_the_upstream_refuses(stand: Stand) -> None:
    assert (await stand.client(REAL).post(mcp.DISCOVER)).status == 200
    forged = await stand.client(FORGED).post(mcp.LISTEN, {"notifications": {"toolsListChanged": True}})
    assert forged.outcome == REFUSED
    assert not forged.is_stream


async def answered(stand: Stand) -> tuple[Reply, Reply]:
    client = stand.client(REAL)
    asked = await client.call()
    done = await client.answer(asked)
    assert done.text == "accept"
    return asked, done


async def test_a_kept_result_goes_to_nobody_whom_the_upstream_refuses(upstream: FakeUpstream, stand: Stand) -> None:
    asked, _ = await answered(stand)
    assert (await stand.client(FORGED).answer(asked)).outcome == REFUSED
    assert (await stand.client(REAL).answer(asked)).text == "accept"
    refuse_all_but(upstream, REFRESHED)
    assert (await stand.client(REFRESHED).answer(asked)).text == "accept"
    assert len(upstream.of("tools/call")) == 1


async def test_open_questions_are_told_to_nobody_whom_the_upstream_refuses(stand: Stand) -> None:
    asked = await stand.client(REAL).call()
    nosy = await stand.client(FORGED).call(state=asked.state, answers={})
    assert nosy.outcome == REFUSED
    assert (await stand.client(REAL).answer(asked)).text == "accept"


async def test_a_credential_that_was_just_served_is_not_asked_about(upstream: FakeUpstream, stand: Stand) -> None:
    asked, _ = await answered(stand)
    assert (await stand.client(REAL).answer(asked)).text == "accept"
    assert (await stand.client(REAL).post(mcp.DISCOVER)).status == 200
    assert not upstream.of(mcp.PING)
