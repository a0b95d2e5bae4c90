"""One call: its handshake, its rounds, what is forwarded, and the form of its reply."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import Raw
from multidict import CIMultiDict

from gateway.bridge.driver import Driver
from gateway.bridge.response_queue import ResponseQueue
from gateway.exchange import commands as do
from gateway.mirror.mirrored_call import MirroredCall
from gateway.protocol import mcp, request
from gateway.tasks.live_task import LiveTask
from tests.support.fake_upstream import URL, FakeUpstream, Turn, ask, asks, event, text
from tests.support.garbage import cycles
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Client, Stand, eventually, later


@pytest.mark.parametrize("id_", [0, 7, "0", "a-b"])
async def test_an_answer_has_the_id_of_its_question_in_its_own_json_type(
    upstream: FakeUpstream, client: Client, id_: Any
) -> None:
    upstream.ids = itertools.repeat(id_)
    upstream.tool(asks("ok"))
    await client.answer(await client.call())
    sent = upstream.of("answer")[0].body["id"]
    assert (sent, type(sent)) == (id_, type(id_))


async def test_pings_and_refusals_carry_the_credential_of_the_session(upstream: FakeUpstream, stand: Stand) -> None:
    await stand.client("Bearer one").call()
    upstream.side("s1").put_nowait(event({"jsonrpc": "2.0", "id": 1, "method": mcp.PING}))
    assert (await upstream.saw("answer"))[0].headers["Authorization"] == "Bearer one"
    await stand.gateway.close()
    assert upstream.of("DELETE")[0].headers["Authorization"] == "Bearer one"


async def test_a_client_that_did_not_declare_is_never_asked(upstream: FakeUpstream, stand: Stand) -> None:
    upstream.tool(ask)
    reply = await stand.client(capabilities={"elicitation": {"url": {}}}).call()
    assert reply.outcome == (400, -32021, None)
    assert reply.error["data"]["requiredCapabilities"] == {"elicitation": {"form": {}}}
    assert (await upstream.saw("answer"))[0].body["error"]["code"] == -32602
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: not stand.sessions("quarantined"))


async def test_undeclared_refuse_lets_the_tool_fall_back(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(route={"undeclared": "refuse"})
    upstream.tool(ask)
    assert (await stand.client(capabilities={}).call()).text == "null"


async def test_answers_given_in_advance_are_taken(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(ask)
    assert json.loads((await client.call(answers={"q": ACCEPT})).text) == ACCEPT


async def test_an_answer_of_the_wrong_kind_leaves_the_call_parked(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(ask)
    asked = await client.call()
    wrong: list[dict[str, Any]] = [{"roots": []}, {"action": "maybe"}, {}]
    for bad in wrong:
        assert (await client.answer(asked, bad)).refusal == (400, -32602)
    assert stand.held == 1
    assert "answer" not in upstream.words
    assert len(stand.gateway.routes.live["/mcp"].deadlines.silence) == 0, "nobody waits for a keep-alive"
    assert json.loads((await client.answer(asked)).text) == ACCEPT


async def test_silence_is_filled_with_comments(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 0.02})
    go = upstream.waiting_tool("at last")
    async with stand.client().open("tools/call", {"name": "tool"}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        seen = b""
        while seen.count(b":\n\n") < 3:
            seen += await response.content.readany()
        go.set()
        rest = await response.content.read()
    assert b"at last" in rest
    assert not [line for line in (seen + rest).split(b"\n") if line.startswith(b"id")]


async def test_only_what_this_request_asked_for_is_forwarded(upstream: FakeUpstream, client: Client) -> None:
    upstream.capabilities["logging"] = {}

    async def tool(turn: Turn) -> None:
        token = turn.body["params"].get("_meta", {}).get("progressToken")
        for progress in (1, 2):
            await turn.notify(mcp.PROGRESS, {"progressToken": token or "x", "progress": progress})
        await turn.notify(mcp.PROGRESS, {"progressToken": "foreign", "progress": 3})
        await turn.notify(mcp.LOG, {"level": "debug", "data": "low"})
        await turn.notify(mcp.LOG, {"level": "error", "data": "high"})
        await turn.result(text("ok"))

    upstream.tool(tool)
    quiet = await client.call()
    assert not quiet.is_stream
    assert quiet.notifications == []
    loud = await client.call(meta={"progressToken": "mine", mcp.META_LOG_LEVEL: "warning"})
    assert loud.is_stream
    assert [n["params"].get("progress", n["params"].get("data")) for n in loud.notifications] == [1, 2, "high"]
    assert loud.notifications[0]["params"]["progressToken"] == "mine"
    assert loud.headers["X-Accel-Buffering"] == "no"
    assert b"id:" not in loud.data.replace(b'"id":', b"")


async def _fails(turn: Turn) -> None:
    await turn.say({"id": turn.id, "error": {"code": -7, "message": "no"}})


@pytest.mark.parametrize(
    ("ends", "code"), [(lambda turn: turn.result(text("done")), None), (_fails, -7), (Turn.reset, -32603)]
)
async def test_two_parallel_retries_share_one_answer_and_each_gets_the_end_under_its_own_ids(
    upstream: FakeUpstream, stand: Stand, client: Client, ends: Any, code: int | None
) -> None:
    answered, go = asyncio.Event(), asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        answered.set()
        await go.wait()
        await turn.progress(1)
        await ends(turn)

    upstream.tool(tool)
    asked = await client.call(meta={"progressToken": 0})
    first = later(client.answer(asked, meta={"progressToken": 1}))
    await answered.wait()
    second = later(client.answer(asked, meta={"progressToken": 2}))
    await eventually(lambda: stand.metric("mcp_gateway_continuations_total", step="held") == 2)
    go.set()
    replies = [await first, await second]
    told = [[note["params"]["progressToken"] for note in reply.notifications] for reply in replies]
    assert told == [[], [2]], "progress goes to the newest leg"
    assert len({reply.final["id"] for reply in replies}) == 2
    assert len(upstream.of("answer")) == 1
    for reply in replies:
        if code is None:
            assert reply.text == "done"
        else:
            assert reply.error["code"] == code
        if ends is Turn.reset:
            assert reply.error["data"]["requestId"] == reply.headers["X-Request-Id"]


async def test_notifications_that_a_slow_client_lost_are_counted_when_its_leg_ends(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.outbox.BEHIND_BYTES", 10)
    upstream.tool(ask)
    asked = await client.call()
    (driver,) = stand.gateway.lot
    leg = ResponseQueue(Raw(b"2"), driver.live.deadlines.silence)
    for _ in range(3):
        leg.send(b"x" * 10)
    headers, body = client.build("tools/call", {"name": "tool"})
    driver.answer(leg, request.check(request.read(body), CIMultiDict(headers)), 1, {})
    assert stand.metric("mcp_gateway_notifications_total", kind="other", outcome="dropped") == 2
    assert json.loads((await client.answer(asked)).text) == ACCEPT


@contextmanager
def leaving_no_cycle() -> Iterator[None]:
    """Fail if the collector has to free any of the gateway: cycles cost a fifth of the CPU under load, and pauses."""
    with cycles() as found:
        yield
    assert not [kind for kind in found if kind.startswith("gateway.")]


async def test_a_plain_call_leaves_nothing_to_the_collector(client: Client) -> None:
    await client.call()
    with leaving_no_cycle():
        for _ in range(5):
            assert (await client.call()).text == "done"


async def test_an_answered_call_whose_result_is_forgotten_leaves_nothing_to_the_collector(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(ask)

    async def ask_and_answer() -> None:
        await client.answer(await client.call())
        for driver in stand.gateway.lot:
            driver.forget()
            stand.gateway.lot.remove(driver)

    await ask_and_answer()
    with leaving_no_cycle():
        for _ in range(5):
            await ask_and_answer()


async def test_an_error_32042_is_a_round_of_urls_and_the_call_runs_again(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.once("tools/call", lambda turn: turn.error(-32042, "visit", {"elicitations": [URL]}))
    asked = await client.call()
    assert next(iter(asked.questions.values()))["params"]["mode"] == "url"
    assert stand.sessions("busy") == 1, "the session stays reserved"
    assert (await client.answer(asked, {"action": "accept"})).text == "done"
    assert len({seen.session for seen in upstream.of("tools/call")}) == 1


def test_every_command_is_obeyed() -> None:
    assert set(LiveTask.OBEY) | set(MirroredCall.OBEY) == set(do.Command.__subclasses__())
    assert set(MirroredCall.OBEY) - set(LiveTask.OBEY) == {do.Put, do.Close}, "only of a stream"
    assert set(LiveTask.OBEY) - set(Driver.OBEY) == {do.Give, do.Keep}, "only of a task there is a handle"


ASKED: tuple[type[do.Command], ...] = (
    do.SendCall,
    do.Arm,
    do.Count,
    do.Ask,
    do.SendAnswers,
    do.Reply,
    do.ReleaseSession,
)
"""The commands of a call that asks and is answered."""


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("command", ASKED)
async def test_a_bug_ends_a_call_with_one_error_and_gives_back_what_it_held(
    upstream: FakeUpstream,
    stand: Stand,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    command: Any,
    warm: bool,  # noqa: FBT001
) -> None:
    if warm:
        assert (await client.call()).text == "done"
    upstream.tool(asks("ok", "name"))
    planted: list[object] = []

    def broken(driver: Driver, it: Any) -> None:
        if not planted:
            planted.append(it)
            raise ZeroDivisionError
        obey(driver, it)

    obey = Driver.OBEY[command]
    monkeypatch.setitem(Driver.OBEY, command, broken)
    async with asyncio.timeout(5):
        reply = await client.call()
        if "result" in reply.final:
            reply = await client.answer(reply)
    assert planted
    if command is do.ReleaseSession:
        assert reply.text == "ok", "the bug came when the client had its result"
    else:
        assert (reply.error["code"], "ZeroDivision" in str(reply.error)) == (-32603, False)
    await eventually(lambda: not stand.sessions("busy"), "its session is not its own any more")
    await eventually(lambda: not stand.sessions("quarantined"), "its session is free, or has ended")
    assert (stand.held, len(stand.gateway.lot), len(list(stand.gateway.lot))) == (0, 0, 0)
    upstream.tool(ask)
    assert json.loads((await client.answer(await client.call())).text) == ACCEPT
    stand.planted_bugs = int(stand.metric("mcp_gateway_task_failures_total"))
    assert stand.planted_bugs == 1
