"""`debug.bodies`: what is shown of messages, what never is, and that nothing is while it is off."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config.model.config import Debug
from gateway.protocol import mcp
from gateway.telemetry.body_log import SHOWN_CHARACTERS, shown
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.logs import Lines
from tests.support.stand import Start
from tests.support.workbench import Client

CANARY = "c4nary-7f3a9"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjNG5hcnkifQ.c2lnbmF0dXJl"


def bodies(lines: Lines, direction: str) -> list[Any]:
    return [json.loads(line["text"]) for line in lines("debug.body") if line["direction"] == direction]


async def asking(turn: Turn) -> None:
    await turn.notify("notifications/message", {"level": "info", "data": "working"})
    answer = await turn.elicit("q")
    await turn.result(text(json.dumps(answer)))


async def test_every_direction_is_shown_with_the_request_that_it_belongs_to(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    upstream.tool(asking)
    client = (await begin(debug={"bodies": True})).client()
    meta = {mcp.META_LOG_LEVEL: "info"}
    asked = await client.call("weather", {"city": "Rome"}, meta=meta, headers={"X-Request-Id": "r1"})
    _ = await client.call(
        "weather",
        {"city": "Rome"},
        state=asked.state,
        answers={"q": {"action": "accept", "content": {"name": "Ada"}}},
        headers={"X-Request-Id": "r2"},
    )
    first, second = bodies(log_lines, "from_client")
    assert first["params"]["arguments"] == {"city": "Rome"}
    assert second["params"]["inputResponses"]["q"]["content"] == {"name": "Ada"}
    assert second["params"]["requestState"] == "[hidden]"
    sent = bodies(log_lines, "to_upstream")
    own = {"logging/setLevel", "tools/list"}
    methods = [each.get("method", "answer") for each in sent if each.get("method") not in own]
    assert methods == ["initialize", "notifications/initialized", "tools/call", "answer"]
    heard = [each.get("method") for each in bodies(log_lines, "from_upstream")]
    assert heard[-3:] == ["notifications/message", "elicitation/create", None]
    told = bodies(log_lines, "to_client")
    assert [each.get("method") for each in told] == ["notifications/message", None, None]
    assert told[1]["result"]["requestState"] == "[hidden]"
    by_request = {
        (line["direction"], line["request_id"])
        for line in log_lines("debug.body")
        if line["direction"] != "from_upstream" and "initialize" not in line["text"]
    }
    assert by_request >= {(side, name) for side in ("from_client", "to_client") for name in ("r1", "r2")}
    assert all(line["route"] == "/mcp" and line["bytes"] > 0 for line in log_lines("debug.body"))
    assert "debug.bodies is true" in log_lines("config.caution")[0]["note"]


async def test_nothing_is_shown_while_it_is_off(log_lines: Lines, upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(lambda turn: turn.result(text(CANARY)))
    _ = await client.call("weather", {"city": CANARY})
    assert log_lines() or log_lines.stream.getvalue() == ""
    assert log_lines("debug.body") == []
    assert CANARY not in log_lines.stream.getvalue()


async def test_a_reload_switches_it_on_and_off(log_lines: Lines, begin: Start) -> None:
    stand = await begin()
    off = stand.gateway.config
    for config, shown_ in ((replace(off, debug=Debug(bodies=True)), True), (off, False)):
        before = len(log_lines("debug.body"))
        stand.gateway.apply(config)
        _ = await stand.client().call()
        assert (len(log_lines("debug.body")) > before) is shown_


async def test_a_request_that_is_passed_through_is_shown_and_headers_never(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(debug={"bodies": True})
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "tool", "arguments": {"a": "b"}}}
    headers = {"Authorization": f"Bearer {CANARY}", "Cookie": CANARY}
    async with stand.http.post(stand.url, json=call, headers=headers) as response:
        _ = await response.read()
    assert bodies(log_lines, "from_client") == [call]
    assert CANARY not in log_lines.stream.getvalue()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"apiKey": "abc", "x_token": "t", "n": 1}', '{"apiKey":"[hidden]","x_token":"[hidden]","n":1}'),
        (b'{"password": {"deep": ["s"]}, "city": "Rome"}', '{"password":"[hidden]","city":"Rome"}'),
        (b'[{"client-secret": 5}, null, true]', '[{"client-secret":"[hidden]"},null,true]'),
        (b'{"note": "use Bearer abcdefgh"}', '{"note":"use Bearer [hidden]"}'),
        (f'{{"note": "{JWT}"}}'.encode(), '{"note":"[hidden]"}'),
        ('{"name": "Zo\u00eb"}'.encode(), '{"name":"Zo\u00eb"}'),
        (b'{"password": "abc", broken', '{"password": "[hidden]", broken'),
        (b'broken {"password": "never closed', 'broken {"password": "[hidden]"'),
        (b"<html>Bearer abcdefgh</html>", "<html>Bearer [hidden]</html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
    ],
)
def test_secrets_are_masked_by_key_and_by_look(body: bytes, expected: str) -> None:
    assert shown(body) == expected


def test_a_long_message_is_cut_and_says_how_long_it_was() -> None:
    body = json.dumps({"x": "word " * 4000}).encode()
    text_ = shown(body)
    assert len(text_) < SHOWN_CHARACTERS + 40
    assert text_.endswith(f"({len(body)} bytes)")


@pytest.mark.parametrize("size", [5_000, 400_000], ids=["parsed", "too long to be parsed"])
@pytest.mark.parametrize("sign", ['","password": "', "Bearer "])
def test_nothing_is_cut_before_it_was_recognised(sign: str, size: int) -> None:
    """Wherever in the secret the cut is."""
    secret, rest = "S3cr" + "x1" * 40, '", "rest": "' + "c " * (size // 2) + '"}'
    for before in range(SHOWN_CHARACTERS - 120, SHOWN_CHARACTERS):
        body = '{"a": "' + "b " * (before // 2) + "-" * (before % 2) + sign + secret + rest
        assert "S3" not in shown(body.encode()), before


def test_what_is_nested_too_deeply_to_be_parsed_is_shown_as_text() -> None:
    assert shown(b"[" * 200_000).startswith("[[[")
