"""Clients that leave, come back, come twice or never; holds that expire, fill up or are drained."""

import asyncio
import json

import pytest

from gateway.exchange.commands import Timer
from gateway.protocol import mcp
from gateway.protocol.errors import Stopping
from tests.support.fake_upstream import SAMPLE, FakeUpstream, Turn, text
from tests.support.replicas import Gate, ask, later
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, DECLINE, Client, Reply, Stand, eventually, jwt


async def leave(task: "asyncio.Task[Reply]") -> None:
    """The client closes its connection."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# -- a client that leaves ---------------------------------------------------------------------------------------------


async def test_leaving_in_the_first_round_cancels_at_once_and_once(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    ended = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b": running\n\n")
        await ended.wait()
        await turn.error(0, "cancelled") if turn.response is None else await turn.result(text("too late"))

    upstream.tool(tool)
    call = later(client.call())
    await upstream.saw("tools/call")
    await leave(call)
    cancelled = (await upstream.saw(mcp.CANCELLED))[0]
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
    assert cancelled.session == upstream.of("tools/call")[0].session
    assert stand.sessions("quarantined") == 1
    assert "DELETE" not in upstream.words, "never under a pending call"
    ended.set()
    await upstream.saw("DELETE")
    await eventually(lambda: stand.sessions("quarantined") == 0)
    assert len(upstream.of(mcp.CANCELLED)) == 1


async def test_a_cancelled_call_that_never_ends_frees_its_session_without_delete(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(lambda turn: turn.for_ever())
    call = later(client.call())
    seen = (await upstream.saw("tools/call"))[0]
    await leave(call)
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: stand.sessions("quarantined") == 0)
    async with asyncio.timeout(2):
        await seen.cut.wait()
    assert "DELETE" not in upstream.words


async def test_leaving_before_the_call_was_sent_sends_nothing_more(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    await client.call()  # the tools are known from now on
    upstream.forget()
    gate = asyncio.Event()

    async def slow(turn: Turn) -> None:
        await gate.wait()
        await upstream.initialize(turn)

    upstream.once("initialize", slow)
    call = later(client.call())
    await upstream.saw("initialize", 2)
    await leave(call)
    gate.set()
    await eventually(lambda: not stand.busy_tasks())
    assert len(upstream.of("tools/call")) == 2, "the forgotten session's refusal is the last"
    assert mcp.CANCELLED not in upstream.words


@pytest.mark.parametrize("word", ["tools/list", mcp.SET_LEVEL])
async def test_leaving_during_a_request_of_the_gateways_own_deletes_nothing_under_it(
    upstream: FakeUpstream, stand: Stand, client: Client, word: str
) -> None:
    upstream.capabilities["logging"] = {}
    upstream.on(word, lambda turn: turn.for_ever())
    call = later(client.call(meta={mcp.META_LOG_LEVEL: "info"}))
    seen = (await upstream.saw(word))[0]
    await leave(call)
    async with asyncio.timeout(2):
        await seen.cut.wait()
    await eventually(lambda: not stand.busy_tasks())
    assert "DELETE" not in upstream.words
    assert "tools/call" not in upstream.words


async def test_a_retry_that_is_repeated_within_grace_gets_the_result_and_the_answer_goes_once(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(hold={"grace_seconds": 5})
    client, gate = stand.client(), Gate(upstream)
    asked = await client.call()
    first = later(client.answer(asked))
    await gate.answered.wait()
    await leave(first)
    await eventually(lambda: stand.gateway.downstream.in_flight == 0)
    again = later(client.answer(asked))
    await eventually(lambda: stand.gateway.downstream.in_flight == 1)
    gate.go.set()
    assert (await again).text == "done"
    assert len(upstream.of("answer")) == 1
    assert mcp.CANCELLED not in upstream.words


async def test_a_retry_that_is_not_repeated_is_cancelled_after_grace(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    gate = Gate(upstream)
    asked = await client.call()
    first = later(client.answer(asked))
    await gate.answered.wait()
    await leave(first)
    await upstream.saw(mcp.CANCELLED)
    gate.go.set()
    await eventually(lambda: not stand.busy_tasks())
    reply = await client.answer(asked)
    assert reply.outcome == (400, -32602, "invalid_request_state")
    assert len(upstream.of(mcp.CANCELLED)) == 1


async def test_two_parallel_retries_share_one_answer_and_one_result(upstream: FakeUpstream, client: Client) -> None:
    gate = Gate(upstream)
    asked = await client.call()
    both = [later(client.answer(asked)) for _ in range(2)]
    await gate.answered.wait()
    gate.go.set()
    assert [(await reply).text for reply in both] == ["done", "done"]
    assert len(upstream.of("answer")) == 1


async def test_a_lost_reply_can_be_asked_for_again_but_not_with_other_answers(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(ask)
    asked = await client.call()
    first = await client.answer(asked)
    assert (await client.answer(asked)).text == first.text
    assert (await client.answer(asked, DECLINE)).outcome == (400, -32602, "invalid_request_state")
    assert stand.metric("mcp_gateway_state_rejected_total", reason="answered") == 1
    assert len(upstream.of("answer")) == 1


async def test_a_result_is_kept_for_the_linger_time_only(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"linger_seconds": 0.05})
    client = stand.client()
    upstream.tool(ask)
    asked = await client.call()
    await client.answer(asked)
    await eventually(lambda: not list(stand.gateway.lot))
    assert (await client.answer(asked)).outcome == (400, -32602, "invalid_request_state")
    assert stand.metric("mcp_gateway_state_rejected_total", reason="ended") == 1


async def test_an_old_round_is_refused_unless_it_repeats_its_own_answers(
    upstream: FakeUpstream, client: Client
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.elicit("one")
        await turn.elicit("two")
        await turn.result(text("both"))

    upstream.tool(tool)
    one = await client.call()
    two = await client.answer(one)
    assert list(two.questions) == ["two"]
    assert list((await client.answer(one)).questions) == ["two"], "an honest repeat is told what is open"
    assert (await client.answer(one, DECLINE)).outcome[1] == -32602
    assert (await client.answer(two)).text == "both"
    assert len(upstream.of("answer")) == 2


# -- a client that does not come back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["hold", "state"])
async def test_an_abandoned_call_is_settled_cancelled_and_freed(
    upstream: FakeUpstream, begin: Start, section: str
) -> None:
    stand = await begin(**{section: {"ttl_seconds": 0.2}})
    client = stand.client()
    ended = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await asyncio.gather(turn.elicit("q"), turn.ask(mcp.SAMPLE, SAMPLE), turn.ask(mcp.ROOTS))
        await ended.wait()
        await turn.result(text("nobody hears this"))

    upstream.tool(tool)
    asked = await client.call()
    assert stand.held == 1
    answers = {seen.body["id"]: seen.body for seen in await upstream.saw("answer", 3)}
    by_method = {q["method"]: answers[number] for number, q in enumerate(asked.questions.values())}
    assert by_method[mcp.ELICIT]["result"] == {"action": "cancel"}
    assert by_method[mcp.SAMPLE]["error"]["code"] == -32603
    assert by_method[mcp.ROOTS]["error"]["code"] == -32603
    assert len(await upstream.saw(mcp.CANCELLED)) == 1
    assert (stand.held, len(stand.gateway.lot)) == (0, 0)
    assert stand.sessions("quarantined") == 1
    ended.set()
    await upstream.saw("DELETE")
    reply = await client.answer(asked, ACCEPT)
    assert reply.outcome == (400, -32602, "invalid_request_state")
    assert stand.nested(mcp.ELICIT, "expired") == 1


async def test_a_finished_call_that_nobody_collects_is_forgotten(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"ttl_seconds": 0.2})
    gate = asyncio.Event()

    async def tool(turn: Turn) -> None:
        waiting = asyncio.get_running_loop().create_task(turn.elicit("q"))
        await gate.wait()
        waiting.cancel()
        await turn.result(text("done"))

    upstream.tool(tool)
    await stand.client().call()
    gate.set()
    await eventually(lambda: not list(stand.gateway.lot))
    assert mcp.CANCELLED not in upstream.words


# -- caps -------------------------------------------------------------------------------------------------------------


async def test_caps_on_held_calls_refuse_the_next_and_nobody_else(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"max_calls_per_principal": 1, "max_calls": 2})
    upstream.tool(ask)
    ada, bob, eve = (stand.client(f"Bearer {name}-token") for name in ("ada", "bob", "eve"))
    held = await ada.call()
    refused = await ada.call()
    assert refused.outcome == (429, -32603, "busy")
    assert int(refused.headers["Retry-After"]) > 0
    other = await bob.call()
    assert other.questions
    full = await eve.call()
    assert full.outcome == (503, -32603, "busy")
    assert int(full.headers["Retry-After"]) > 0
    assert len(upstream.of("tools/call")) == 2, "what is refused was not run"
    assert (await eve.post("tools/list")).status == 200, "what cannot ask is served"
    assert json.loads((await ada.answer(held)).text) == ACCEPT, "who holds a place may finish"
    assert (await eve.call()).questions
    await bob.answer(other)
    await _end_all(stand)


async def _end_all(stand: Stand) -> None:
    """End what is parked, as a drain's deadline does."""
    for driver in list(stand.gateway.lot):
        driver.stop(Stopping("the test is over"))
        stand.gateway.lot.remove(driver)


async def test_a_place_that_was_taken_meanwhile_ends_the_call(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"max_calls": 1})
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await go.wait()
        await ask(turn)

    upstream.tool(tool)
    both = [later(stand.client().call()) for _ in range(2)]
    await upstream.saw("tools/call", 2)
    go.set()
    replies = [await reply for reply in both]
    refused = next(reply for reply in replies if reply.status != 200)
    asked = next(reply for reply in replies if reply.status == 200)
    assert refused.outcome == (503, -32603, "busy")
    assert len(await upstream.saw(mcp.CANCELLED)) == 1
    assert (await upstream.saw("answer"))[0].body["result"] == {"action": "cancel"}
    assert json.loads((await stand.client().answer(asked)).text) == ACCEPT


class Crowd:
    """Two tools: one runs until the test lets it end, the other asks and so takes a place."""

    def __init__(self, upstream: FakeUpstream) -> None:
        self.go = asyncio.Event()
        upstream.tool(self.tool)

    async def tool(self, turn: Turn) -> None:
        if turn.body["params"]["name"] == "runs":
            await self.go.wait()
        else:
            await turn.elicit("q")
        await turn.result(text("done"))


def reach_leg_limit(stand: Stand) -> None:
    """Let the time of the one leg that waits pass."""
    alarm = stand.gateway.routes.live["/mcp"].deadlines.shared[Timer.LEG]
    ((driver, (_, ring)),) = alarm._waiting.items()
    alarm.disarm(driver)
    ring()


CAPS = [{"max_calls": 1}, {"max_calls_per_principal": 1}]


@pytest.mark.parametrize("cap", CAPS)
async def test_a_long_call_whose_caller_is_at_its_cap_keeps_its_leg(
    upstream: FakeUpstream, begin: Start, cap: dict[str, int]
) -> None:
    stand = await begin(hold=cap)
    client, crowd = stand.client("Bearer ada"), Crowd(upstream)
    running = later(client.call("runs"))
    await upstream.saw("tools/call")
    asked = await client.call()
    reach_leg_limit(stand)
    assert (await client.answer(asked)).text == "done"
    assert not running.done()
    reach_leg_limit(stand)
    shed = await running
    assert shed.questions == {}, "now there is a place"
    crowd.go.set()
    assert (await client.call("runs", state=shed.state)).text == "done"
    assert mcp.CANCELLED not in upstream.words


async def test_a_call_that_another_replica_can_go_on_with_is_let_go_without_a_place(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(hold={"max_calls": 1, "drain_seconds": 0.05}, route={"ephemeral": ["runs"]})
    client, crowd = stand.client("Bearer ada"), Crowd(upstream)
    running = later(client.call("runs"))
    await upstream.saw("tools/call")
    _ = await client.call()
    await asyncio.wait_for(stand.gateway.drain(delay_seconds=0), 5)
    assert (await running).questions == {}
    crowd.go.set()
    for driver in list(stand.gateway.lot):
        stand.gateway.lot.remove(driver)


# -- whose state it is ------------------------------------------------------------------------------------------------


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


async def test_the_state_of_a_restarted_or_unknown_owner_is_an_honest_error(
    upstream: FakeUpstream, begin: Start
) -> None:
    one, two = await begin(), await begin()
    upstream.tool(ask)
    asked = await one.client().call()
    reply = await two.client().answer(asked)
    assert reply.outcome == (200, -32603, "owner_lost")
    assert "gw-1 that held this call is gone" in reply.error["message"]
    assert json.loads((await one.client().answer(asked)).text) == ACCEPT


# -- drain ------------------------------------------------------------------------------------------------------------


async def test_a_draining_gateway_takes_retries_but_no_calls(upstream: FakeUpstream, stand: Stand) -> None:
    client, admin = stand.client(), f"http://{stand.gateway.admin}"
    upstream.tool(ask)
    asked = await client.call()
    async with stand.http.get(admin + "/readyz") as response:
        assert response.status == 200
    draining = asyncio.get_running_loop().create_task(stand.gateway.drain(delay_seconds=0))
    await eventually(lambda: stand.gateway.downstream.stopping)
    async with stand.http.get(admin + "/readyz") as response:
        assert response.status == 503
    async with stand.http.get(admin + "/healthz") as response:
        assert response.status == 200
    assert (await client.call()).status == 503
    assert not draining.done()
    assert json.loads((await client.answer(asked)).text) == ACCEPT
    await asyncio.wait_for(draining, 2)


async def test_a_drain_ends_what_nobody_collected_at_its_deadline(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 0.1})
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        if turn.body["params"]["name"] == "asks":
            await turn.elicit("q")
        await go.wait()
        await turn.result(text("late"))

    upstream.tool(tool)
    await stand.client().call("asks")
    running = later(stand.client().call("runs"))
    await upstream.saw("tools/call", 2)
    await asyncio.wait_for(stand.gateway.drain(delay_seconds=0), 2)
    assert (await running).status == 503
    assert len(await upstream.saw(mcp.CANCELLED, 2)) == 2
    assert (await upstream.saw("answer"))[0].body["result"] == {"action": "cancel"}
    go.set()
    for driver in list(stand.gateway.lot):
        stand.gateway.lot.remove(driver)


@pytest.mark.parametrize("method", ["tools/call", "prompts/get", "resources/read"])
async def test_each_method_that_may_ask_asks(upstream: FakeUpstream, client: Client, method: str) -> None:
    async def script(turn: Turn) -> None:
        await turn.elicit("q")
        await turn.result({"content": [], "messages": [], "contents": []})

    upstream.on(method, script)
    field = mcp.TARGET_FIELD[method]
    asked = await client.post(method, {field: "x://y"})
    done = await client.post(method, {field: "x://y", "requestState": asked.state, "inputResponses": {"q": ACCEPT}})
    assert done.result["resultType"] == "complete"


@pytest.mark.parametrize("method", ["tools/list", "prompts/list", "resources/list", "completion/complete"])
async def test_no_other_method_does(upstream: FakeUpstream, client: Client, method: str) -> None:
    async def script(turn: Turn) -> None:
        answer = await turn.ask(mcp.ELICIT, {"message": "?", "requestedSchema": {"type": "object", "properties": {}}})
        assert answer["error"]["code"] == -32600
        listed = {"tools/list": "tools", "prompts/list": "prompts", "resources/list": "resources"}
        await turn.result({listed[method]: []} if method in listed else {"completion": {"values": []}})

    upstream.on(method, script)
    params = {"ref": {"type": "ref/prompt", "name": "p"}, "argument": {"name": "a", "value": ""}}
    assert (await client.post(method, params if method.startswith("comp") else {})).status == 200
