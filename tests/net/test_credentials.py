"""What the gateway answers from memory goes to nobody whom the upstream would refuse.

A principal is read from a token whose signature the gateway does not check: whoever forges one with the right claims
is the same principal, and must still get nothing.
"""

import pytest

from gateway.core import mcp
from tests.net.conftest import Start
from tests.net.fake_upstream import FakeUpstream, Turn
from tests.net.test_faults import challenge
from tests.net.workbench import Client, Reply, Stand, jwt

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


# -- forwarded credentials ------------------------------------------------------------------------------------------

BOUND = {"route": {"forward_headers": ["x-api-key", "x-request-id"]}}
STOLEN = (400, -32602, "invalid_request_state")


def keyed(stand: Stand, key: str | None = "mine") -> Client:
    """A client that says nothing of itself but its key."""
    return stand.client(headers={} if key is None else {"X-Api-Key": key})


def serve_all(upstream: FakeUpstream) -> None:
    for word in ("initialize", mcp.PING, "tools/list", "tools/call", "answer"):
        upstream._scripts.pop(word, None)
    upstream.tool(ask)


async def test_a_stolen_state_opens_with_its_own_key_only(upstream: FakeUpstream, begin: Start) -> None:
    serve_all(upstream)
    stand = await begin(**BOUND)
    asked = await keyed(stand).call()
    for key in (None, "", "another"):
        assert (await keyed(stand, key).answer(asked)).outcome == STOLEN
        assert (await keyed(stand, key).call(state=asked.state, answers={})).outcome == STOLEN, "not even the question"
    assert (await keyed(stand).answer(asked, headers={"X-Request-Id": "2"})).text == "accept"
    for key in (None, "", "another"):
        assert (await keyed(stand, key).answer(asked)).outcome == STOLEN, "nor the finished result"
    assert stand.metric("mcp_gateway_state_rejected_total", reason="other_headers") == 9


async def test_a_state_that_was_sealed_without_a_key_opens_without_one_only(
    upstream: FakeUpstream, begin: Start
) -> None:
    serve_all(upstream)
    stand = await begin(**BOUND)
    asked = await keyed(stand, None).call()
    assert (await keyed(stand, "mine").answer(asked)).outcome == STOLEN
    assert (await keyed(stand, None).answer(asked)).text == "accept"


async def test_a_token_that_a_proxy_refreshes_keeps_its_state(upstream: FakeUpstream, begin: Start) -> None:
    serve_all(upstream)
    name = "x-forwarded-access-token"
    stand = await begin(route={"forward_headers": [name], "bind_headers": [name]})
    first, second, eve = (
        jwt(iss="i", sub=sub, client_id="c", jti=jti).removeprefix("Bearer ")
        for sub, jti in (("ada", "1"), ("ada", "2"), ("eve", "3"))
    )
    asked = await stand.client(headers={name: first}).call()
    assert (await stand.client(headers={name: eve}).answer(asked)).outcome == STOLEN
    assert (await stand.client(headers={name: second}).answer(asked)).text == "accept"


async def test_a_kept_result_goes_to_no_forged_token_in_a_bound_header(upstream: FakeUpstream, begin: Start) -> None:
    """It counts by its claims, which anybody can write: so the upstream sees it first."""
    serve_all(upstream)
    name = "x-access-token"
    stand = await begin(route={"forward_headers": [name]})
    asked = await stand.client(headers={name: REAL}).call()
    assert (await stand.client(headers={name: REAL}).answer(asked)).text == "accept"

    async def only_real(turn: Turn) -> None:
        if turn.seen.headers[name] == REAL:
            await upstream._plain(turn)
        else:
            turn.reply(401)

    for word in ("initialize", mcp.PING):
        upstream.on(word, only_real)
    forged = await stand.client(headers={name: FORGED}).answer(asked)
    assert forged.outcome == REFUSED
    assert (await stand.client(headers={name: REAL}).answer(asked)).text == "accept"


async def test_headers_that_are_no_credentials_may_differ_between_rounds(upstream: FakeUpstream, begin: Start) -> None:
    serve_all(upstream)
    stand = await begin(route={"forward_headers": ["x-tenant", "x-forwarded-for"], "bind_headers": []})
    asked = await stand.client(headers={"X-Tenant": "a", "X-Forwarded-For": "1"}).call()
    other = stand.client(headers={"X-Tenant": "b", "X-Forwarded-For": "2"})
    assert (await other.answer(asked)).text == "accept"
