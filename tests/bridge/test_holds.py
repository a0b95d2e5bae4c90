"""Held calls: clients that come again, caps on held calls, restarts and drains."""

import asyncio
import json
from typing import Any

import pytest

from gateway.exchange.commands import TTL, Timer
from gateway.exchange.machine import State
from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.support.fake_upstream import FakeUpstream, Turn, ask, asks, gives_up, text, waits
from tests.support.logs import Lines
from tests.support.replicas import drop
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import ACCEPT, DECLINE, Client, Stand, eventually, later

# -- a client that comes again ----------------------------------------------------------------------------------------


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


async def test_an_old_round_is_refused_unless_it_repeats_its_own_answers(
    upstream: FakeUpstream, client: Client
) -> None:
    upstream.tool(asks("both", "one", "two"))
    one = await client.call()
    two = await client.answer(one)
    assert list(two.questions) == ["two"]
    assert list((await client.answer(one)).questions) == ["two"], "an honest repeat is told what is open"
    assert (await client.answer(one, DECLINE)).outcome[1] == -32602
    assert (await client.answer(two)).text == "both"
    assert len(upstream.of("answer")) == 2


async def test_large_results_are_forgotten_when_newer_ones_need_their_bytes(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(limits={"results_bytes": 250_000})
    client = stand.client()
    upstream.tool(asks("x" * 100_000, "q"))
    asked = [await client.call() for _ in range(4)]
    delivered = [await client.answer(each) for each in asked]
    assert all(len(reply.text) == 100_000 for reply in delivered)
    repeated = [await client.answer(each) for each in asked]
    assert [reply.outcome for reply in repeated[:2]] == [(400, -32602, "invalid_request_state")] * 2
    assert [reply.text for reply in repeated[2:]] == [reply.text for reply in delivered[2:]]
    results = (await told(stand)).processes[0].budgets["limits.results_bytes"]
    assert (results.limit, results.given_way) == (250_000, 2)
    assert 200_000 < results.used <= results.limit
    assert len(upstream.of("answer")) == 4


async def test_a_large_request_counts_with_its_kept_result(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(limits={"results_bytes": 250_000})
    client = stand.client()
    upstream.tool(ask)
    arguments = {"text": "x" * 100_000}
    asked = [await client.call(arguments=arguments) for _ in range(3)]
    for each in asked:
        assert (await client.answer(each)).status == 200
    assert stand.gateway.lot.results.given_way == 1
    assert (await client.answer(asked[0])).outcome == (400, -32602, "invalid_request_state")


# -- caps -------------------------------------------------------------------------------------------------------------


async def test_calls_beyond_the_caps_on_held_calls_are_refused_until_one_ends(
    upstream: FakeUpstream, begin: Start
) -> None:
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
    await drop(stand)


@pytest.mark.parametrize("errors", ["full", "brief"])
@pytest.mark.parametrize(
    "sections",
    [{"hold": {"max_calls_per_principal": 1}}, {"limits": {"calls_bytes_per_principal": 3_000}}],
    ids=["calls", "bytes"],
)
async def test_callers_without_a_credential_are_told_that_they_share_a_cap(
    upstream: FakeUpstream, begin: Start, sections: dict[str, Any], errors: str
) -> None:
    stand = await begin(**sections, errors=errors)
    upstream.tool(ask)
    for client, is_shared in ((stand.client(), True), (stand.client("Bearer ada-token"), False)):
        arguments = {"text": "x" * 1_000}
        assert (await client.call(arguments=arguments)).questions
        refused = await client.call(arguments=arguments)
        assert refused.outcome == (429, -32603, "busy")
        assert ("You sent no credential" in refused.error["message"]) == is_shared
        assert ("a credential of its own" in (await told(stand)).errors[0].fix) == is_shared
    await drop(stand)


@pytest.mark.parametrize("limits", [{}, {"calls_bytes_per_principal": 450_000}, {"results_bytes": 150_000}])
async def test_calls_whose_server_died_leave_their_places_to_new_ones_and_keep_their_errors(
    upstream: FakeUpstream, begin: Start, log_lines: Lines, limits: dict[str, int]
) -> None:
    stand = await begin(hold={"max_calls": 2, "max_calls_per_principal": 2}, limits=limits)
    client, dies, arguments = stand.client(), asyncio.Event(), {"text": "x" * 100_000}
    keeps_both = "results_bytes" not in limits
    for _ in range(2):  # the second time, the errors of the first time make room
        dies.clear()
        upstream.tool(gives_up(dies, Turn.reset))
        asked = [await client.call(arguments=arguments) for _ in range(2)]
        dies.set()
        await eventually(lambda: len(stand.gateway.lot) == 0)
        assert stand.gateway.calls.used == 0
        assert stand.gateway.lot.per_principal == {}
        listed = (await told(stand)).held
        assert [call.is_lost for call in listed] == [True] * (2 if keeps_both else 1)
        assert all(call.silent_seconds is None for call in listed), "what was sent upstream is not kept either"
    lost = [line for line in log_lines("exchange.finished") if line["outcome"] == "error"]
    assert len(lost) == (2 if keeps_both else 3), "an error that makes room is told of, in place of its client"
    assert all(line["reason"] == "call_lost" for line in lost)
    upstream.tool(ask)
    newer = await client.call()
    told_last = await client.answer(asked[1])
    assert (told_last.status, told_last.error["data"]["reason"]) == (200, "call_lost")
    assert (await client.answer(asked[1])).error["message"] == told_last.error["message"], "a repeat is told the same"
    if not keeps_both:
        assert (await client.answer(asked[0])).outcome == (400, -32602, "invalid_request_state")
    assert json.loads((await client.answer(newer)).text) == ACCEPT
    await drop(stand)


async def test_a_call_whose_server_died_and_that_may_run_twice_keeps_its_place(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(hold={"max_calls": 1}, route={"ephemeral": ["tool"]})
    client, dies = stand.client(), asyncio.Event()
    upstream.each("tools/call", gives_up(dies, Turn.reset), lambda turn: turn.result(text("ok")))
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    dies.set()
    await eventually(lambda: driver.glance(0.0).state == State.BROKEN)
    assert (await client.call()).status == 503
    assert (await client.answer(asked)).text == "ok"


async def test_the_end_of_a_call_that_went_on_is_not_told_by_an_earlier_error(
    upstream: FakeUpstream, begin: Start, log_lines: Lines
) -> None:
    short = {"session_wait_seconds": 0.05}
    stand = await begin(route={"ephemeral": ["tool"]}, sessions={"max": 1}, timeouts=short)
    client, dies, goes_on = stand.client(), asyncio.Event(), asyncio.Event()
    upstream.each("tools/call", gives_up(dies, Turn.reset), waits(goes_on, "other"), asks("done", "q", "r"))
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    dies.set()
    await eventually(lambda: driver.glance(0.0).state == State.BROKEN)
    other = later(client.call())
    _ = await upstream.saw("tools/call", 2)
    assert (await client.answer(asked)).status == 503, "no session is free"
    goes_on.set()
    _ = await other
    assert (await client.answer(asked)).questions, "the next run asks more"
    driver.fire(TTL)
    (line,) = log_lines("exchange.finished")
    assert (line["outcome"], line["cause"]) == ("cancelled", "the client did not answer in time")
    assert "reason" not in line


async def test_the_error_of_a_lost_call_is_dropped_when_its_time_is_over(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    client, dies = stand.client(), asyncio.Event()
    upstream.tool(gives_up(dies, Turn.reset))
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    dies.set()
    await eventually(lambda: driver.is_lost)
    assert driver in stand.gateway.lot
    driver.fire(TTL)
    assert list(stand.gateway.lot) == []
    assert stand.gateway.lot.results.used == 0
    assert (await client.answer(asked)).outcome == (400, -32602, "invalid_request_state")


async def test_a_place_that_was_taken_meanwhile_ends_the_call(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"max_calls": 1})
    go = upstream.holding("tools/call", ask)
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
    (driver,) = stand.gateway.downstream.legs.running
    driver.fire(Timer.LEG)


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
    await asyncio.wait_for(drain(stand.gateway, delay_seconds=0), 5)
    assert (await running).questions == {}
    crowd.go.set()
    for driver in list(stand.gateway.lot):
        driver.fire(TTL)


# -- drain ------------------------------------------------------------------------------------------------------------


async def test_a_draining_gateway_takes_retries_but_no_calls(upstream: FakeUpstream, stand: Stand) -> None:
    client, admin = stand.client(), f"http://{stand.gateway.admin}"
    upstream.tool(ask)
    asked = await client.call()
    async with stand.http.get(admin + "/readyz") as response:
        assert response.status == 200
    draining = later(drain(stand.gateway, delay_seconds=0))
    await eventually(lambda: stand.gateway.draining.has_begun)
    async with stand.http.get(admin + "/readyz") as response:
        assert response.status == 503
    async with stand.http.get(admin + "/healthz") as response:
        assert response.status == 200
    assert (await client.call()).status == 503
    assert not draining.done()
    assert json.loads((await client.answer(asked)).text) == ACCEPT
    await asyncio.wait_for(draining, 2)


async def test_a_drain_ends_uncollected_calls_at_its_deadline(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 0.1})
    crowd = Crowd(upstream)
    await stand.client().call("asks")
    running = later(stand.client().call("runs"))
    await upstream.saw("tools/call", 2)
    await asyncio.wait_for(drain(stand.gateway, delay_seconds=0), 2)
    assert (await running).status == 503
    calls = {seen.body["id"] for seen in upstream.of("tools/call")}
    # The cancellation of a young call is repeated.
    assert {seen.body["params"]["requestId"] for seen in await upstream.saw(mcp.CANCELLED, 2)} == calls
    assert (await upstream.saw("answer"))[0].body["result"] == {"action": "cancel"}
    crowd.go.set()
    for driver in list(stand.gateway.lot):
        driver.fire(TTL)


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
async def test_other_methods_never_ask(upstream: FakeUpstream, client: Client, method: str) -> None:
    async def script(turn: Turn) -> None:
        answer = await turn.ask(mcp.ELICIT, {"message": "?", "requestedSchema": {"type": "object", "properties": {}}})
        assert answer["error"]["code"] == -32600
        listed = {"tools/list": "tools", "prompts/list": "prompts", "resources/list": "resources"}
        await turn.result({listed[method]: []} if method in listed else {"completion": {"values": []}})

    upstream.on(method, script)
    params = {"ref": {"type": "ref/prompt", "name": "p"}, "argument": {"name": "a", "value": ""}}
    assert (await client.post(method, params if method.startswith("comp") else {})).status == 200
