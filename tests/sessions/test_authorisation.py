"""What the gateway answers from memory goes to nobody whom the upstream would refuse.

A principal is read from a token whose signature the gateway does not check: whoever forges one with the right claims
is the same principal, and must still get nothing.
"""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from gateway.exchange.commands import TTL
from gateway.protocol import mcp
from gateway.sessions import accepted_credentials
from tests.bridge.test_holds import reach_leg_limit
from tests.support.fake_sse import FakeSse, Message
from tests.support.fake_upstream import FORM, FakeUpstream, Turn, ask_action, event, lacks_session, text
from tests.support.replicas import Gate
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import ACCEPT, Client, Reply, Stand, eventually, jwt, later
from tests.upstream.test_faults import challenge

REAL, FORGED, REFRESHED = (jwt(iss="i", sub="ada", client_id="c", jti=name) for name in ("real", "forged", "new"))
REFUSED = (401, -32603, "upstream_refused")


@pytest.fixture(autouse=True)
def _one_credential(upstream: FakeUpstream) -> None:
    for word in ("initialize", mcp.PING, "tools/list", "answer"):
        upstream.on(word, challenge(401, only=REAL))
    upstream.tool(challenge(401, only=REAL, plain=ask_action))


def serve_all(upstream: FakeUpstream) -> None:
    """Have the server take any credential."""
    upstream.scripts.clear()
    upstream.tool(ask_action)


def refuse_all_but(upstream: FakeUpstream, credential: str) -> None:
    upstream.on(mcp.PING, challenge(401, only=credential))


async def test_a_client_that_the_upstream_refuses_gets_no_handshake(upstream: FakeUpstream, stand: Stand) -> None:
    assert (await stand.client(REAL).post(mcp.DISCOVER)).status == 200
    assert (await stand.client(FORGED).post(mcp.DISCOVER)).outcome == REFUSED
    assert (await stand.client(REAL).post(mcp.DISCOVER)).status == 200
    assert [seen.headers["Authorization"] for seen in upstream.of(mcp.PING)] == [FORGED]


async def test_a_client_that_the_upstream_refuses_gets_no_changes(stand: Stand) -> None:
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


async def test_a_client_that_the_upstream_refuses_gets_no_kept_result(upstream: FakeUpstream, stand: Stand) -> None:
    asked, _ = await answered(stand)
    assert (await stand.client(FORGED).answer(asked)).outcome == REFUSED
    assert (await stand.client(REAL).answer(asked)).text == "accept"
    refuse_all_but(upstream, REFRESHED)
    assert (await stand.client(REFRESHED).answer(asked)).text == "accept"
    assert len(upstream.of("tools/call")) == 1


async def test_a_client_that_the_upstream_refuses_gets_no_open_questions(stand: Stand) -> None:
    asked = await stand.client(REAL).call()
    nosy = await stand.client(FORGED).call(state=asked.state, answers={})
    assert nosy.outcome == REFUSED
    assert (await stand.client(REAL).answer(asked)).text == "accept"


async def test_a_credential_that_was_just_served_is_not_asked_about(upstream: FakeUpstream, stand: Stand) -> None:
    asked, _ = await answered(stand)
    assert (await stand.client(REAL).answer(asked)).text == "accept"
    assert (await stand.client(REAL).post(mcp.DISCOVER)).status == 200
    assert not upstream.of(mcp.PING)


# -- each leg, in the call's own session ------------------------------------------------------------------------------


def pings(upstream: FakeUpstream) -> list[tuple[str | None, str]]:
    """Session and credential of each."""
    return [(seen.session, seen.headers["Authorization"]) for seen in upstream.of(mcp.PING)]


CAPS = [{"max": 1}, {"max_per_principal": 1}]


@pytest.mark.parametrize("cap", CAPS)
async def test_a_fresh_credential_needs_no_second_session_to_collect_a_long_call(
    upstream: FakeUpstream, begin: Start, cap: dict[str, int]
) -> None:
    stand = await begin(sessions=cap, timeouts={"session_wait_seconds": 0.05})
    go = upstream.waiting_tool()
    running = later(stand.client(REAL).call())
    await upstream.saw("tools/call")
    reach_leg_limit(stand)
    shed = await running
    refuse_all_but(upstream, REFRESHED)
    collecting = later(stand.client(REFRESHED).call(state=shed.state))
    await upstream.saw(mcp.PING)
    go.set()
    assert (await collecting).text == "done"
    assert pings(upstream) == [("s1", REFRESHED)]
    assert len(upstream.of("initialize")) == 1


async def test_a_credential_is_checked_in_the_session_of_its_call(upstream: FakeUpstream, stand: Stand) -> None:
    client = stand.client(REAL)
    first, second = await client.call(), await client.call()
    refuse_all_but(upstream, REFRESHED)
    upstream.on("answer", lambda turn: turn.upstream.plain(turn))
    again = await stand.client(REFRESHED).call(state=second.state, answers={})
    assert again.questions == second.questions
    assert pings(upstream) == [("s2", REFRESHED)]
    for asked in (first, second):
        assert (await stand.client(REFRESHED).answer(asked)).text == "accept"


async def test_no_answer_of_a_refused_credential_reaches_the_call(upstream: FakeUpstream, stand: Stand) -> None:
    asked = await stand.client(REAL).call()
    assert (await stand.client(FORGED).answer(asked)).outcome == REFUSED
    assert not upstream.of("answer")
    assert pings(upstream) == [("s1", FORGED)]
    assert (await stand.client(REAL).answer(asked)).text == "accept"


async def test_a_refused_credential_that_answers_one_question_is_not_told_the_other(
    upstream: FakeUpstream, stand: Stand
) -> None:
    async def two(turn: Turn) -> None:
        await asyncio.gather(turn.elicit("one"), turn.elicit("two"))
        await turn.result(text("done"))

    upstream.on("tools/call", two)
    asked = await stand.client(REAL).call()
    release = asyncio.Event()

    async def slow(turn: Turn) -> None:
        if turn.seen.headers["Authorization"] == FORGED:
            await release.wait()
            turn.reply(401)
        else:
            upstream.accept(turn)

    upstream.on("answer", slow)
    partly = await stand.client(FORGED).call(state=asked.state, answers={"one": ACCEPT})
    release.set()
    assert partly.outcome == REFUSED
    assert (await stand.client(REAL).answer(asked)).text == "done"


async def test_a_leg_that_joins_is_checked_before_it_gets_anything(upstream: FakeUpstream, stand: Stand) -> None:
    gate = Gate(upstream)
    asked = await stand.client(REAL).call()
    waiting = later(stand.client(REAL).answer(asked))
    await upstream.saw("answer")
    assert (await stand.client(FORGED).answer(asked)).outcome == REFUSED
    assert pings(upstream) == [("s1", FORGED)]
    gate.go.set()
    assert (await waiting).text == "done"


async def test_a_kept_result_is_given_where_its_session_is_gone(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(sessions={"idle_seconds": 0})
    asked, _ = await answered(stand)
    await upstream.saw("DELETE")
    assert (await stand.client(FORGED).answer(asked)).outcome == REFUSED
    for word in ("initialize", "notifications/initialized", mcp.PING):
        upstream.on(word, lambda turn: turn.upstream.plain(turn))
    assert (await stand.client(REFRESHED).answer(asked)).text == "accept"
    assert len(upstream.of("tools/call")) == 1
    assert [seen.headers["Authorization"] for seen in upstream.of("initialize")][-2:] == [FORGED, REFRESHED]


async def test_a_kept_result_is_checked_in_a_session_that_another_call_has(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(sessions={"max": 1})
    asked, _ = await answered(stand)
    other = await stand.client(REAL).call()
    refuse_all_but(upstream, REFRESHED)
    assert (await stand.client(REFRESHED).answer(asked)).text == "accept"
    assert pings(upstream) == [("s1", REFRESHED)]
    assert (await stand.client(REAL).answer(other)).text == "accept"


async def test_a_credential_that_is_not_let_into_the_calls_session_gets_nothing_elsewhere(
    upstream: FakeUpstream, stand: Stand
) -> None:
    asked, _ = await answered(stand)

    async def bound(turn: Turn) -> None:
        if turn.seen.headers["Authorization"] == REAL:
            await turn.result()
        else:
            lacks_session(turn)

    upstream.on(mcp.PING, bound)
    upstream.on("initialize", lambda turn: turn.upstream.plain(turn))
    reply = await stand.client(REFRESHED).answer(asked)
    assert reply.outcome == (403, -32603, "upstream_refused")
    assert len(upstream.of("initialize")) == 1


async def test_a_ping_that_is_not_answered_leaves_the_call_unharmed(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"answer_seconds": 0.1})
    asked = await stand.client(REAL).call()
    upstream.once(mcp.PING, lambda turn: turn.for_ever())
    reply = await stand.client(REFRESHED).answer(asked)
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert "accepts connections but does not answer a ping" in reply.error["message"]
    assert reply.error["message"].endswith(
        "(hung or overloaded?), so it is not known whether it accepts this credential; call again"
    )
    (error,) = (await told(stand)).errors
    assert "restart it if it hangs; if it is only slow, raise timeouts.answer_seconds" in error.fix
    assert (await stand.client(REAL).answer(asked)).text == "accept"


async def test_a_replica_that_takes_over_has_the_credential_checked_in_the_calls_session(
    upstream: FakeUpstream, begin: Start
) -> None:
    one, two = await begin(), await begin()
    asked = await one.client(REAL).call()
    assert (await two.client(FORGED).answer(asked)).outcome == REFUSED
    refuse_all_but(upstream, REFRESHED)
    upstream.on(mcp.CANCELLED, lambda turn: turn.upstream.plain(turn))
    assert (await two.client(REFRESHED).answer(asked)).outcome == (200, -32603, "owner_lost")
    assert pings(upstream) == [("s1", FORGED), ("s1", REFRESHED)]
    assert {seen.headers[mcp.PROTOCOL_VERSION] for seen in upstream.of(mcp.PING)} == {"2025-11-25"}
    assert (await one.client(REAL).answer(asked)).text == "accept"


async def test_a_forwarded_key_is_checked_as_any_credential(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_all(upstream)
    monkeypatch.setattr(accepted_credentials, "_FRESH_SECONDS", 0.0)
    client = (await begin(route={"forward_headers": ["x-api-key"]})).client(headers={"x-api-key": "one"})
    asked = await client.call()
    assert (await client.answer(asked)).text == "accept"
    assert upstream.of(mcp.PING)[0].headers["x-api-key"] == "one"

    upstream.on(mcp.PING, lambda turn: turn.reply(401))
    assert (await client.answer(asked)).outcome == REFUSED


def forget_all(stand: Stand) -> None:
    """Nobody comes for what is kept."""
    for driver in list(stand.gateway.lot):
        driver.fire(TTL)
        stand.gateway.lot.remove(driver)


# -- what proves a credential -----------------------------------------------------------------------------------------

LISTED = {"name": "tool", "inputSchema": {"type": "object"}}
"""A tool that is known, so that a call of it does not list the tools first with its own credential."""


async def test_a_question_on_the_side_stream_proves_no_credential(upstream: FakeUpstream, stand: Stand) -> None:
    upstream.tools = [LISTED]
    assert (await stand.client(REAL).post("tools/list")).status == 200
    refuse = asyncio.Event()

    async def pending(turn: Turn) -> None:
        message = {"jsonrpc": "2.0", "id": 7, "method": mcp.ELICIT, "params": FORM}
        upstream.side(turn.session).put_nowait(event(message))
        await refuse.wait()
        turn.reply(401)

    upstream.tool(pending)
    asked = await stand.client(FORGED).call()
    assert asked.questions
    assert (await stand.client(FORGED).post(mcp.DISCOVER)).outcome == REFUSED
    refuse.set()
    await eventually(lambda: not stand.held)
    assert (await stand.client(FORGED).post(mcp.DISCOVER)).outcome == REFUSED
    forget_all(stand)


async def test_over_http_sse_nothing_on_the_stream_proves_a_credential_whose_post_is_pending(
    old: FakeSse, begin: Start
) -> None:
    refuse = asyncio.Event()
    old.tools = [LISTED]

    async def checked(message: Message) -> web.Response | None:
        credential = old.posts[-1][0]["Authorization"]
        if credential == REAL:
            return None
        if message.get("method") == "tools/call":
            old.streams[0].say(id=7, method=mcp.ELICIT, params=FORM)
            await refuse.wait()
        return web.Response(status=401)

    old.post = checked
    stand = await begin(route={"upstream": {"url": old.url, "transport": "sse"}})
    assert (await stand.client(REAL).post("tools/list")).status == 200
    asked: Any = await stand.client(FORGED).call()
    assert asked.questions
    assert (await stand.client(FORGED).post(mcp.DISCOVER)).outcome == REFUSED
    refuse.set()
    await eventually(lambda: not stand.held)
    forget_all(stand)


async def test_what_the_gateway_answers_by_itself_never_carries_an_unproven_credential(
    upstream: FakeUpstream, stand: Stand
) -> None:
    upstream.tools = [LISTED]
    assert (await stand.client(REAL).post("tools/list")).status == 200
    refuse = asyncio.Event()

    async def pending(turn: Turn) -> None:
        upstream.side(turn.session).put_nowait(event({"jsonrpc": "2.0", "id": "p", "method": mcp.PING}))
        await refuse.wait()
        turn.reply(401)

    upstream.tool(pending)
    forged = later(stand.client(FORGED).call())
    (pong,) = await upstream.saw("answer")
    assert pong.headers["Authorization"] == REAL
    refuse.set()
    assert (await forged).outcome == REFUSED


# -- a server that was restarted --------------------------------------------------------------------------------------


async def test_a_kept_result_survives_the_restart_of_its_server(upstream: FakeUpstream, begin: Start) -> None:
    serve_all(upstream)
    upstream.on("GET", lacks_session)  # without a side stream, nothing tells that the sessions are gone
    stand = await begin()
    asked, other = await stand.client(REAL).call(), await stand.client(REAL).call()
    for each in (asked, other):
        assert (await stand.client(REAL).answer(each)).text == "accept"
    upstream.forget()
    assert (await stand.client(REFRESHED).answer(asked)).text == "accept"
    assert upstream.of("initialize")[-1].headers["Authorization"] == REFRESHED
    await eventually(lambda: stand.sessions("idle") == 1, "the sessions that are gone are forgotten")
    assert len(upstream.of("tools/call")) == 2


# -- forwarded credentials ------------------------------------------------------------------------------------------

BOUND = {"route": {"forward_headers": ["x-api-key", "x-request-id"]}}
STOLEN = (400, -32602, "invalid_request_state")


def keyed(stand: Stand, key: str | None = "mine") -> Client:
    """A client that says nothing of itself but its key."""
    return stand.client(headers={} if key is None else {"X-Api-Key": key})


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
            await upstream.plain(turn)
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
