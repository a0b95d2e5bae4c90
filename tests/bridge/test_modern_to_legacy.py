"""What the client gets of a legacy result or error, and what of its request the legacy server gets."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import Raw

from gateway.bridge.modern_to_legacy import modern_notification
from gateway.bridge.response_queue import ResponseQueue
from gateway.exchange import events as on
from gateway.protocol import mcp
from tests.support.fake_upstream import FORM, FakeUpstream, Turn, asks, gives_up, text
from tests.support.playbook import raw
from tests.support.schema import assert_modern_message
from tests.support.stand import Start
from tests.support.workbench import ALL, Client, Stand, eventually

HALF, WHOLE = "cut \ud83d", "cut \ufffd"
LISTS = {
    mcp.TOOLS_LIST: "tools",
    mcp.PROMPTS_LIST: "prompts",
    mcp.RESOURCES_LIST: "resources",
    mcp.TEMPLATES_LIST: "resourceTemplates",
}


async def test_lists_are_as_fresh_as_the_route_says_and_resources_stale_at_once(
    upstream: FakeUpstream, begin: Start
) -> None:
    for method, section in LISTS.items():

        async def listed(turn: Turn, section: str = section) -> None:
            await turn.result({section: []})

        upstream.on(method, listed)
    upstream.capabilities = {"tools": {}, "prompts": {}, "resources": {}}
    upstream.on(mcp.RESOURCES_READ, lambda turn: turn.result({"contents": [{"uri": "a:b", "text": "x"}]}))
    stand = await begin(route={"cache": {"ttl_ms": 5, "scope": "public"}})
    client = stand.client()
    found = {}
    for method in (*LISTS, mcp.DISCOVER, mcp.RESOURCES_READ):
        result = (await client.post(method, {"uri": "a:b"} if method == mcp.RESOURCES_READ else {})).result
        found[method] = result["ttlMs"], result["cacheScope"]
    assert found.pop(mcp.RESOURCES_READ) == (0, "private")
    assert found == dict.fromkeys((*LISTS, mcp.DISCOVER), (5, "public"))


async def test_half_an_emoji_is_a_replacement_character_in_a_whole_call(upstream: FakeUpstream, stand: Stand) -> None:
    # JavaScript's JSON.stringify writes "\\ud83d" for text that was cut within an emoji; so does Python's json.
    async def tool(turn: Turn) -> None:
        answer = await turn.ask(mcp.ELICIT, {**FORM, "message": HALF})
        await turn.result({"content": [{"type": "text", "text": HALF}], "structuredContent": {HALF: answer["result"]}})

    upstream.tool(tool)
    client = stand.client(info={"name": HALF, "version": "1"}, capabilities={**ALL, HALF: {}})
    arguments = {HALF: [HALF, "\ude00"]}
    asked = await client.call(arguments=arguments)
    (question,) = asked.questions.values()
    assert question["params"]["message"] == WHOLE
    accepted = {"action": "accept", "content": {HALF: HALF}}
    done = await client.answer(asked, accepted)
    assert done.text == WHOLE
    assert done.result["structuredContent"] == {WHOLE: {"action": "accept", "content": {WHOLE: WHOLE}}}
    assert upstream.of("tools/call")[0].body["params"]["arguments"] == {WHOLE: [WHOLE, "\ufffd"]}
    assert upstream.of("initialize")[0].body["params"]["clientInfo"]["name"] == WHOLE


async def test_a_call_has_no_meta_unless_something_is_in_it_and_a_progress_token_only_if_its_client_sent_one(
    upstream: FakeUpstream, client: Client
) -> None:
    for meta in ({}, {"own": 1}, {"progressToken": "mine"}):
        await client.call(meta=meta)
    bare, own, wanted = (seen.body for seen in upstream.of("tools/call"))
    assert bare["params"].keys() == {"name", "arguments"}
    assert own["params"]["_meta"] == {"own": 1}
    assert wanted["params"]["_meta"] == {"progressToken": wanted["id"]}


@pytest.mark.parametrize(
    ("wanted", "level", "sent"),
    [
        (None, "emergency", False),
        ("debug", "debug", True),
        ("warning", "notice", False),
        ("warning", "warning", True),
        ("warning", "error", True),
        ("emergency", "alert", False),
        ("debug", "trace", False),
    ],
)
def test_logs_are_sent_at_or_above_the_level_asked_for(wanted: str | None, level: str, *, sent: bool) -> None:
    event = on.Logged(level, raw({"level": level, "data": "x"}))
    message = modern_notification(event, ResponseQueue(Raw(b"1"), Mock(), log_level=wanted))
    assert (message is not None) == sent
    if message is not None:
        assert assert_modern_message(message)["params"] == {"level": level, "data": "x"}


@pytest.mark.parametrize(("route", "said"), [({"ephemeral": ["tool"]}, "fine"), ({}, "too late")])
async def test_an_answer_to_a_withdrawn_question_runs_the_call_again_only_if_it_may_run_twice(
    upstream: FakeUpstream, begin: Start, route: dict[str, Any], said: str
) -> None:
    stand, go = await begin(route=route), asyncio.Event()

    async def withdraws(turn: Turn) -> None:
        await turn.notify(mcp.CANCELLED, {"requestId": 0})
        await turn.result({**text("too late"), "isError": True})

    upstream.each("tools/call", gives_up(go, withdraws), asks("fine", "q"))
    asked = await stand.client().call()
    (driver,) = stand.gateway.lot.waiting()
    go.set()
    await eventually(lambda: driver.is_finished, "the tool has given up")
    assert (await stand.client().answer(asked)).text == said
