"""The requestState of a round: what it is bound to, and what it holds."""

import json
from random import Random

from tests.support.fake_upstream import FakeUpstream, ask, asks
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Client, Stand, jwt, later


async def test_a_state_serves_its_own_request_only(upstream: FakeUpstream, stand: Stand) -> None:
    upstream.tool(ask)
    ada = stand.client("Bearer ada-token")
    asked = await ada.call("tool", {"a": 1})
    answers = {"q": ACCEPT}
    tries = [
        stand.client("Bearer eve-token").call("tool", {"a": 1}, state=asked.state, answers=answers),
        stand.client().call("tool", {"a": 1}, state=asked.state, answers=answers),
        ada.call("other", {"a": 1}, state=asked.state, answers=answers),
        ada.call("tool", {"a": 2}, state=asked.state, answers=answers),
        ada.post("prompts/get", {"name": "tool", "requestState": asked.state, "inputResponses": answers}),
        ada.call("tool", {"a": 1}, state=asked.state[:-2], answers=answers),
        ada.call("tool", {"a": 1}, state="", answers=answers),
        ada.call("tool", {"a": 1}, state="x" * 70_000, answers=answers),
        ada.call("tool", {"a": 1}, state="mrtr1.\u00e9.x", answers=answers),
    ]
    errors = set()
    for reply in [await one for one in tries]:
        assert reply.outcome == (400, -32602, "invalid_request_state")
        assert reply.error["data"].pop("requestId") == reply.headers["X-Request-Id"]
        errors.add(json.dumps(reply.error, sort_keys=True))
    assert len(errors) == 1, "one sentence for every cause"
    assert "answer" not in upstream.words
    reasons = ["other_principal", "other_target", "other_arguments", "other_method", "too_large", "malformed"]
    assert all(stand.metric("mcp_gateway_state_rejected_total", reason=reason) for reason in reasons)
    assert json.loads((await ada.call("tool", {"a": 1}, state=asked.state, answers=answers)).text)


async def test_a_refreshed_token_may_answer(upstream: FakeUpstream, stand: Stand) -> None:
    claims = {"iss": "https://as", "sub": "ada", "client_id": "app"}
    upstream.tool(ask)
    asked = await stand.client(jwt(**claims, exp=1)).call()
    fresh = jwt(**claims, exp=2)
    assert json.loads((await stand.client(fresh).answer(asked)).text) == ACCEPT
    assert upstream.of("answer")[0].headers["Authorization"] == fresh, "every leg is authorised by its own"


async def test_a_round_without_questions_brings_only_the_state(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    go = upstream.waiting_tool()
    call = later(client.call())
    _ = await upstream.saw("tools/call")
    (driver,) = stand.gateway.downstream.legs.running
    driver.hand_over()
    handed = await call
    assert "inputRequests" not in handed.result
    go.set()
    assert (await client.call(state=handed.state)).text == "done"


async def test_answers_that_fit_nowhere_end_the_call_of_a_route_that_holds_nothing(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(route={"continuation": "replay"}, limits={"state_bytes": 1024})

    upstream.tool(asks("ok", "first", "second"))
    client = stand.client()
    # The answer must not be compressible.
    long = {"action": "accept", "content": {"name": Random(1).randbytes(2000).hex()}}
    ended = await client.answer(await client.call(), long)
    assert ended.outcome == (200, -32603, "call_lost")
    assert "limits.state_bytes" in ended.error["message"]


async def test_a_round_before_the_first_session_does_not_name_the_server(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(legs={"limit_seconds": 0.03})
    go = upstream.holding("initialize")
    handed = await stand.client().post("prompts/get", {"name": "p"})
    assert handed.result.keys() == {"resultType", "requestState"}
    go.set()
    upstream.on("prompts/get", lambda turn: turn.result({"messages": []}))
    done = await stand.client().post("prompts/get", {"name": "p", "requestState": handed.state})
    assert done.result["messages"] == []
