"""What the client gets of a legacy result or error, and what of its request the legacy server gets."""

import json
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import Raw

from gateway.bridge.call_context import Context
from gateway.bridge.modern_to_legacy import legacy_call, modern_event, modern_notification
from gateway.exchange import events as on
from gateway.protocol import mcp
from gateway.sessions.known_tools import KnownTools
from tests.support.fake_upstream import FORM, FakeUpstream, Turn
from tests.support.playbook import leg, raw
from tests.support.schema import assert_modern_message
from tests.support.stand import Start
from tests.support.workbench import ALL, Stand

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


def _fake_context(meta: dict[str, Raw] | None = None, **route: Any) -> Mock:
    fake_context = Mock()
    request = fake_context.request
    request.method, request.params, request.said.user_meta, request.said.progress_token = (
        mcp.TOOLS_CALL,
        {},
        meta or {},
        None,
    )
    fake_context.live.route.configure_mock(**route)
    return fake_context


def test_the_trace_of_the_call_replaces_that_of_its_client() -> None:
    context = _fake_context({"traceparent": Raw(b'"old"'), "tracestate": Raw(b'"old"'), "own": Raw(b"1")})
    fake_span = Mock()
    fake_span.headers.return_value = {"traceparent": "new"}
    call = legacy_call(context.request, b'"id"', Mock(), fake_span)
    assert json.loads(call.message)["params"]["_meta"] == {"traceparent": "new", "own": 1}
    call = legacy_call(context.request, b'"id"', Mock())
    assert json.loads(call.message)["params"]["_meta"] == {"traceparent": "old", "tracestate": "old", "own": 1}


def test_a_call_has_no_meta_unless_something_is_in_it_and_a_progress_token_only_if_its_client_sent_one() -> None:
    context = _fake_context()
    assert json.loads(legacy_call(context.request, b'"id"', Mock()).message)["params"] == {}
    context.request.said.progress_token = Raw(b'"mine"')
    call = legacy_call(context.request, b'"id"', Mock())
    assert json.loads(call.message)["params"] == {"_meta": {"progressToken": "id"}}
    assert call.progress_token == b'"id"'


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
    message = modern_notification(event, leg(1, level=wanted))
    assert (message is not None) == sent
    if message is not None:
        assert assert_modern_message(message)["params"] == {"level": level, "data": "x"}


@pytest.mark.parametrize(("continuation", "replayable"), [("replay", True), ("hold", False)])
def test_a_withdrawn_question_says_whether_the_call_may_be_run_again(continuation: str, *, replayable: bool) -> None:
    fake = _fake_context(continuation=continuation, ephemeral=())
    fake.live.upstream.pool.group.return_value = Mock(tools=KnownTools())
    context = Context(fake.live, fake.request, Mock(), {}, exchange=Mock())
    event = modern_event(context, on.Withdrawn(Raw(b"1")))
    assert isinstance(event, on.Withdrawn)
    assert event.replayable is replayable
