"""Cold calls: parked calls whose streams are closed until their clients come back."""

import asyncio
import json
from typing import Any

import pytest

from gateway.exchange.commands import Timer
from gateway.protocol import mcp
from gateway.server.drain import drain
from gateway.telemetry import SessionState
from tests.support.fake_store import SOON, FakeStore, cold, cool, ended
from tests.support.fake_upstream import FORM, FakeUpstream, Turn, text
from tests.support.logs import Lines
from tests.support.replicas import opened, steps
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import ACCEPT, KEY, Client, Reply, Stand, eventually, jwt, later

USER_1, USER_2 = (jwt(iss="https://issuer.example", sub="user", client_id="app", number=number) for number in (1, 2))
"""Two tokens of one principal."""


@pytest.fixture
async def stand(begin: Start) -> Stand:
    """A gateway whose parked calls go cold."""
    return await begin(hold=SOON)


@pytest.fixture
def store(upstream: FakeUpstream) -> FakeStore:
    return FakeStore(upstream)


@pytest.fixture
async def asked(stand: Stand, upstream: FakeUpstream, store: FakeStore) -> Reply:
    """What a call got that is cold now."""
    return await cool(stand, upstream)


async def test_a_cold_call_has_no_streams_and_its_retry_gets_the_result(
    upstream: FakeUpstream, store: FakeStore, stand: Stand, client: Client, asked: Reply
) -> None:
    assert (stand.held, len(stand.gateway.lot)) == (0, 0)
    assert [stand.sessions(state) for state in SessionState] == [0, 0, 0]
    await eventually(upstream.of("GET")[0].cut.is_set, "the standalone stream is closed, too")
    assert json.loads((await client.answer(asked)).text) == [ACCEPT]
    assert steps(stand) == {"resumed": 1}
    assert (cold(stand), ended(stand)) == (0, {"resumed": 1})
    assert (store.resumed, len(upstream.of("tools/call"))) == (1, 1)
    await upstream.saw("DELETE")
    assert mcp.CANCELLED not in upstream.words


@pytest.mark.parametrize("keys", [[KEY], []])
async def test_a_cold_call_is_lost_with_its_process_if_no_other_one_has_the_keys(
    upstream: FakeUpstream, store: FakeStore, begin: Start, keys: list[str]
) -> None:
    stand = await begin(hold=SOON, state={"keys": keys})
    asked = await cool(stand, upstream)
    assert (await told(stand)).processes[0].lost_at_end == (not keys)
    assert json.loads((await stand.client().answer(asked)).text) == [ACCEPT]
    assert store.resumed == 1


async def test_a_call_may_be_cold_in_each_of_its_rounds(
    upstream: FakeUpstream, store: FakeStore, stand: Stand, client: Client, asked: Reply
) -> None:
    store.rounds = 3
    for rounds in (1, 2):
        asked = await client.answer(asked)
        assert list(asked.questions) == [f"q{rounds}"]
        await eventually(lambda: cold(stand) == 1, "the call is cold")
        await eventually(upstream.of("resume")[-1].cut.is_set, "its stream is closed")
        record = stand.gateway.lot.cold.find(opened(asked.state).exchange)
        assert record is not None
        assert not record.is_taken_over, "no other replica sent it"
    assert json.loads((await client.answer(asked)).text) == [ACCEPT] * 3
    assert store.resumed == 3
    assert ended(stand) == {"resumed": 3}
    assert stand.metric("mcp_gateway_calls_cooled_total") == 3


async def test_two_retries_of_a_cold_call_at_once_get_one_result_and_send_its_answers_once(
    upstream: FakeUpstream, store: FakeStore, stand: Stand, client: Client, asked: Reply
) -> None:
    store.hold.clear()
    retries = [later(client.answer(asked)) for _ in range(5)]
    await upstream.saw("answer")
    await eventually(lambda: stand.gateway.downstream.in_flight == 5)
    (driver,) = stand.gateway.downstream.legs.running
    assert driver.live.deadlines.shared[Timer.COLD].deadline(driver) is None, (
        "a call whose client waits does not go cold"
    )
    store.hold.set()
    for retry in retries:
        assert json.loads((await retry).text) == [ACCEPT]
    assert len(upstream.of("answer")) == 1
    assert steps(stand)["resumed"] == 1


async def test_two_retries_whose_credential_is_being_checked_resume_a_cold_call_once(
    upstream: FakeUpstream, store: FakeStore, stand: Stand
) -> None:
    asked = await cool(stand, upstream, authorization=USER_1)
    accepted = upstream.holding("ping")
    retries = [later(stand.client(USER_2).answer(asked)) for _ in range(2)]
    _ = await upstream.saw("ping", 2)
    accepted.set()
    for retry in retries:
        assert json.loads((await retry).text) == [ACCEPT]
    assert (store.resumed, len(upstream.of("answer"))) == (1, 1)


async def test_a_retry_that_comes_while_its_cold_call_expires_sends_no_answer(
    begin: Start, upstream: FakeUpstream, store: FakeStore
) -> None:
    stand = await begin(hold={**SOON, "ttl_seconds": 0.3})
    asked = await cool(stand, upstream, authorization=USER_1)
    accepted = upstream.holding("ping")
    retry = later(stand.client(USER_2).answer(asked))
    _ = await upstream.saw("ping")
    _ = await upstream.saw("DELETE")
    accepted.set()
    assert (await retry).outcome == (400, -32602, "invalid_request_state")
    assert store.calls.popitem()[1].answers == [{"action": "cancel"}]


async def test_a_retry_with_other_answers_does_not_change_those_of_a_cold_call(
    upstream: FakeUpstream, store: FakeStore, client: Client, asked: Reply
) -> None:
    store.hold.clear()
    first = later(client.answer(asked))
    await upstream.saw("answer")
    other = await client.answer(asked, {"action": "decline"})
    assert other.outcome == (400, -32602, "invalid_request_state")
    store.hold.set()
    assert json.loads((await first).text) == [ACCEPT]


async def test_a_repeat_of_an_earlier_round_sends_nothing_to_a_cold_call(
    upstream: FakeUpstream, store: FakeStore, stand: Stand, client: Client, asked: Reply
) -> None:
    store.rounds = 2
    second = await client.answer(asked)
    await eventually(lambda: cold(stand) == 1, "the call is cold again")
    assert (await client.answer(asked)).outcome == (400, -32602, "invalid_request_state")
    assert (cold(stand), len(upstream.of("answer"))) == (1, 1)
    assert json.loads((await client.answer(second)).text) == [ACCEPT] * 2


async def test_a_malformed_answer_leaves_a_cold_call_as_it_was(
    store: FakeStore, stand: Stand, client: Client, asked: Reply
) -> None:
    assert (await client.answer(asked, {"action": 1})).refusal == (400, -32602)
    assert (cold(stand), ended(stand), store.resumed) == (1, {}, 0)
    assert json.loads((await client.answer(asked)).text) == [ACCEPT]


async def test_a_retry_without_answers_is_asked_again_and_the_call_continues(
    upstream: FakeUpstream, store: FakeStore, client: Client, asked: Reply
) -> None:
    again = await client.call(state=asked.state, answers={})
    assert again.questions == asked.questions
    assert store.resumed == 0
    assert json.loads((await client.answer(again)).text) == [ACCEPT]
    assert len(upstream.of("answer")) == 1


async def test_a_cold_call_whose_client_does_not_come_back_is_cancelled_and_its_session_ends(
    begin: Start, upstream: FakeUpstream, store: FakeStore
) -> None:
    stand = await begin(hold={**SOON, "ttl_seconds": 0.3})
    asked = await cool(stand, upstream)
    await upstream.saw("DELETE")
    (call,) = store.calls.values()
    assert call.answers[0] == {"action": "cancel"}
    (cancelled,) = upstream.of(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == call.id
    assert upstream.words[-4:] == ["answer", mcp.CANCELLED, "resume", "DELETE"]
    assert (cold(stand), ended(stand)) == (0, {"expired": 1})
    late = await stand.client().answer(asked)
    assert late.outcome == (400, -32602, "invalid_request_state")


async def test_the_session_of_a_cancelled_cold_call_is_not_ended_while_the_call_may_run(
    begin: Start, upstream: FakeUpstream, store: FakeStore
) -> None:
    store.rounds = 9
    store.ends_when_cancelled = False
    stand = await begin(hold={**SOON, "ttl_seconds": 0.3}, timeouts={"cancel_seconds": 0.2})
    _ = await cool(stand, upstream)
    await upstream.saw("resume")
    await eventually(upstream.of("resume")[0].cut.is_set, "the gateway has stopped waiting")
    await eventually(lambda: not stand.busy_tasks())
    assert "DELETE" not in upstream.words


async def test_a_call_without_an_answer_that_came_back_from_the_cold_is_cancelled_too(
    begin: Start, upstream: FakeUpstream, store: FakeStore
) -> None:
    stand = await begin(hold={**SOON, "ttl_seconds": 0.6})
    asked = await cool(stand, upstream)
    _ = await stand.client().call(state=asked.state, answers={})
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == next(iter(store.calls.values())).id


async def looked_at(stand: Stand) -> None:
    """Wait until it was decided again whether the one held call may go cold."""
    (driver,) = stand.gateway.lot.waiting()
    timer = driver.live.deadlines.shared[Timer.COLD]
    first = timer.deadline(driver)
    assert first is not None
    await eventually(lambda: timer.deadline(driver) not in (first, None), "its time began anew")


STAYS: dict[str, dict[str, Any]] = {
    "too many bytes": {},
    "all calls share a session": {"route": {"sessions": {"affinity": "principal"}}},
    "its state was shortened": {"limits": {"state_bytes": 1024}},
}


@pytest.mark.parametrize("why", STAYS)
async def test_a_call_that_its_state_cannot_continue_stays_held(
    begin: Start, upstream: FakeUpstream, store: FakeStore, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why.startswith("too many"):
        monkeypatch.setattr("gateway.parking.lot.COLD_BYTES", 1024)
    stand = await begin(**{"hold": SOON, **STAYS[why]})
    store.question = "?" * 1000
    asked = [await cool(stand, upstream)] if why.startswith("too many") else []
    asked.append(await stand.client().call())
    await looked_at(stand)
    assert (stand.held, cold(stand)) == (1, len(asked) - 1)
    assert bool(stand.gateway.lot.cold.refused) == why.startswith("too many")
    for each in asked:
        assert json.loads((await stand.client().answer(each)).text) == [ACCEPT]


@pytest.mark.parametrize("side", [False, True])
async def test_a_call_whose_questions_would_be_lost_stays_held(
    upstream: FakeUpstream, stand: Stand, client: Client, *, side: bool
) -> None:
    """Without event ids on its own stream, or with questions on the standalone stream, which is never resumed."""

    async def asks(turn: Turn) -> None:
        if side:
            await turn.say({"method": mcp.PROGRESS, "params": {}}, "e1")
        await turn.result(text(json.dumps(await turn.elicit("name", side=side))))

    upstream.tool(asks)
    asked = await client.call()
    await looked_at(stand)
    assert (stand.held, cold(stand)) == (1, 0)
    assert json.loads((await client.answer(asked)).text) == ACCEPT


async def test_a_call_stays_held_if_its_client_may_have_read_only_the_first_of_two_states_of_a_round(
    begin: Start, upstream: FakeUpstream
) -> None:
    """The first one is older than the first event id, and the second one has a question that came meanwhile."""
    goes_on = asyncio.Event()

    async def asks(turn: Turn) -> None:
        _ = await goes_on.wait()
        asked = upstream.expect(turn.session, 0)
        await turn.say({"id": 0, "method": mcp.ELICIT, "params": FORM}, "e1")
        await turn.result(text(json.dumps((await asked)["result"])))

    upstream.tool(asks)
    stand = await begin(
        hold={"quiet_seconds": 0.02, "grace_seconds": 60, "cold_seconds": 90},
        legs={"limit_seconds": 0.03, "rounds": 2},
    )
    first = await stand.client().call()
    (driver,) = stand.gateway.lot.waiting()
    goes_on.set()
    await eventually(lambda: driver.glance(0.0).asked, "the question is here")
    second = await stand.client().call(state=first.state, answers={})
    driver.fire(Timer.COLD)
    assert (stand.held, cold(stand), driver.glance(0.0).round) == (1, 0, 1)
    assert (await stand.client().call(state=first.state, answers={})).questions == second.questions
    assert json.loads((await stand.client().answer(second)).text) == ACCEPT


async def test_no_call_goes_cold_unless_the_configuration_says_so(begin: Start, store: FakeStore) -> None:
    stand = await begin()
    asked = await stand.client().call()
    (driver,) = stand.gateway.lot.waiting()
    assert Timer.COLD not in driver.live.deadlines.shared
    assert json.loads((await stand.client().answer(asked)).text) == [ACCEPT]


async def test_cold_calls_count_for_their_caller(begin: Start, upstream: FakeUpstream, store: FakeStore) -> None:
    stand = await begin(hold={**SOON, "max_calls_per_principal": 1})
    asked = await cool(stand, upstream)
    assert (await stand.client().call()).status == 429
    assert json.loads((await stand.client().answer(asked)).text) == [ACCEPT]
    assert (await stand.client().call()).questions


# A call that found no session was resumed, and went cold again.
@pytest.mark.parametrize(
    ("sections", "resumed"),
    [
        ({"hold": {**SOON, "max_calls": 1}}, 1),
        ({"sessions": {"max": 1}, "timeouts": {"session_wait_seconds": 0.05}}, 2),
    ],
    ids=["no place", "no session"],
)
async def test_a_cold_call_for_which_there_is_no_room_stays_cold_and_can_be_continued_later(
    log_lines: Lines, begin: Start, upstream: FakeUpstream, store: FakeStore, sections: dict[str, Any], resumed: int
) -> None:
    stand = await begin(**{"hold": SOON, **sections})
    asked = await cool(stand, upstream)
    store.hold.clear()
    other = await cool(stand, upstream)
    working = later(stand.client().answer(other))
    await upstream.saw("answer")
    assert (await stand.client().answer(asked)).status == 503
    assert (cold(stand), mcp.CANCELLED in upstream.words) == (1, False)
    assert ended(stand) == {"resumed": resumed}
    store.hold.set()
    assert json.loads((await working).text) == [ACCEPT]
    await eventually(lambda: not stand.sessions("busy"), "the session is free")
    assert json.loads((await stand.client().answer(asked)).text) == [ACCEPT]
    assert [line["outcome"] for line in log_lines("exchange.finished")] == ["complete", "complete"]


async def test_a_record_has_no_header_that_no_other_call_has(begin: Start, upstream: FakeUpstream) -> None:
    sent = {"url": upstream.url, "request_id_header": "x-request-id"}
    stand, _ = await begin(hold=SOON, route={"upstream": sent, "forward_headers": ["x-team"]}), FakeStore(upstream)
    client = stand.client(headers={"X-Team": "a", "traceparent": "00-1-2-01"})
    asked = await client.call()
    await eventually(lambda: cold(stand) == 1, "the call is cold")
    record = stand.gateway.lot.cold.find(opened(asked.state).exchange)
    assert record is not None
    assert record.unpacked()[1] == {"x-team": "a"}
    assert json.loads((await client.answer(asked)).text) == [ACCEPT]


async def test_the_log_says_that_a_call_is_cold(log_lines: Lines, client: Client, asked: Reply) -> None:
    (line,) = log_lines("call.cooled")
    assert (line["route"], line["round"]) == ("/mcp", 1)
    assert not log_lines("exchange.finished")
    _ = await client.answer(asked)
    await eventually(lambda: log_lines("exchange.finished"))
    assert not log_lines("call.taken_over")


# -- the process around them ------------------------------------------------------------------------------------------


async def test_a_drain_neither_waits_for_cold_calls_nor_cancels_them(
    begin: Start, upstream: FakeUpstream, store: FakeStore
) -> None:
    stand = await begin(hold={**SOON, "drain_seconds": 60})
    asked = await cool(stand, upstream)
    await drain(stand.gateway, delay_seconds=0)
    assert json.loads((await stand.client().answer(asked)).text) == [ACCEPT]
    assert mcp.CANCELLED not in upstream.words


async def test_a_drain_cancels_cold_calls_that_no_process_can_continue(
    begin: Start, upstream: FakeUpstream, store: FakeStore
) -> None:
    stand = await begin(hold={**SOON, "drain_seconds": 0.2}, state={"keys": []})
    _ = await cool(stand, upstream)
    await drain(stand.gateway, delay_seconds=0)
    _ = await upstream.saw(mcp.CANCELLED)
    await stand.gateway.close()
    assert upstream.words[-1] == "DELETE"


@pytest.mark.parametrize("change", ["another upstream", "no route"])
async def test_a_cold_call_outlives_its_route(
    upstream: FakeUpstream, stand: Stand, client: Client, asked: Reply, change: str
) -> None:
    route = {"path": "/other"} if change == "no route" else {}
    url = upstream.url.replace("/mcp", "/elsewhere")
    stand.reload(url, hold=SOON, route=route)
    assert json.loads((await client.answer(asked)).text) == [ACCEPT]
    assert {seen.path for seen in upstream.seen} == {"/mcp"}


async def test_a_caller_whose_credential_the_upstream_refuses_learns_nothing_of_a_cold_call(
    upstream: FakeUpstream, store: FakeStore, stand: Stand
) -> None:
    asked = await cool(stand, upstream, authorization=USER_1)

    upstream.on("ping", lambda turn: turn.reply(401))
    assert (await stand.client(USER_2).answer(asked)).status == 401
    assert (cold(stand), "answer" in upstream.words) == (1, False)
    assert json.loads((await stand.client(USER_1).answer(asked)).text) == [ACCEPT]


async def test_a_task_does_not_go_cold(begin: Start, upstream: FakeUpstream) -> None:
    upstream.capabilities = {"tools": {}, "tasks": {"requests": {"tools": {"call": {}}}}}
    upstream.tools = [
        {"name": "tool", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}},
    ]
    task = {"taskId": "t", "status": "working", "ttl": 60_000, "createdAt": "", "lastUpdatedAt": ""}
    upstream.tool(lambda turn: turn.result({"task": task}))

    async def wait(turn: Turn) -> None:
        asked = upstream.expect(turn.session, 0)
        await turn.say({"id": 0, "method": mcp.ELICIT, "params": FORM}, "e1")
        await turn.result(text((await asked)["result"]["action"]))

    upstream.on(mcp.TASKS_RESULT, wait)
    stand = await begin(hold={**SOON, "cold_seconds": 600})
    asked = await stand.client().call()
    (driver,) = stand.gateway.lot.waiting()
    driver.fire(Timer.COLD)
    assert (cold(stand), stand.held) == (0, 1)
    assert (await stand.client().answer(asked)).text == "accept"
