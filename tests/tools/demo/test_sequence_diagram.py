"""The demo's picture of what both sides said, from the gateway's log."""

import json
from typing import Any

import pytest

from gateway.tools.demo.sequence_diagram import Row, draw, rows

ASK = {"id": 1, "method": "tools/call", "params": {"name": "ask"}}
LIST = {"id": 1, "method": "tools/list"}


def said(direction: str, body: Any) -> str:
    return json.dumps({"event": "debug.body", "direction": direction, "text": json.dumps(body)})


def test_the_messages_are_those_that_the_gateway_logs() -> None:
    log = [
        "a traceback",
        '["nothing"]',
        json.dumps({"event": "server.started", "listen": "127.0.0.1:1"}),
        json.dumps(
            {"event": "debug.body", "direction": "from_upstream", "text": '{"id": 1, "result": {}… (5000 bytes)'}
        ),
        said("from_client", LIST),
        said("from_upstream", {"id": 2, "result": {}}),
        said("to_upstream", 7),
    ]
    assert [(row.side, row.to_server, row.title) for row in rows("\n".join(log))] == [
        ("new", True, "tools/list"),
        ("old", False, "result"),
        ("old", True, "result"),
    ]


@pytest.mark.parametrize(
    ("body", "title", "details"),
    [
        ({"method": "initialize", "params": {"protocolVersion": "2025-11-25"}}, "initialize 2025-11-25", []),
        (LIST, "tools/list", []),
        ({"method": "tools/call", "params": {"name": "ask", "arguments": {"a": 1}}}, "tools/call ask", ['{"a": 1}']),
        (
            {
                "method": "tools/call",
                "params": {
                    "name": "ask",
                    "inputResponses": {"q": {"action": "accept", "content": {"city": "Rome"}}},
                    "requestState": "[hidden]",
                },
            },
            "tools/call ask, again",
            ["inputResponses q: accept city = Rome", "requestState"],
        ),
        (
            {"id": 0, "method": "elicitation/create", "params": {"message": "Who?"}},
            "elicitation/create, nested in the call",
            ['"Who?"'],
        ),
        ({"id": 1, "error": {"code": -32602, "message": "no"}}, "error -32602", ["no"]),
    ],
)
def test_a_message_is_told_in_a_line(body: Any, title: str, details: list[str]) -> None:
    (row,) = rows(said("from_client", body))
    assert (row.title, row.details) == (title, details)


@pytest.mark.parametrize(
    ("result", "asked", "title", "details"),
    [
        ({"content": [{"type": "text", "text": "done"}, {"type": "image"}]}, [ASK], "result", ["done image"]),
        ({"resultType": "complete"}, [LIST], "tools/list: complete", []),
        ({}, [], "result", []),
        (
            {
                "resultType": "input_required",
                "inputRequests": {"q": {"params": {"message": "Who?"}}},
                "requestState": "x",
            },
            [ASK],
            "input_required",
            ['q: "Who?"', "requestState"],
        ),
        ({"action": "decline"}, [], "the answer, in a separate POST", ["decline"]),
    ],
)
def test_a_result_is_named_after_its_request(result: Any, asked: list[Any], title: str, details: list[str]) -> None:
    log = [*(said("from_client", body) for body in asked), said("to_client", {"id": 1, "result": result})]
    row = rows("\n".join(log))[-1]
    assert (row.title, row.details) == (title, details)


@pytest.mark.parametrize("width", [40, 80, 100, 250])
def test_the_picture_fits_and_takes_messages_in_any_order_and_shape(width: int) -> None:
    bodies: list[Any] = [
        {"id": 7, "method": "tools/call", "params": ["not", "an", "object"]},
        {"id": 8, "method": "tools/call", "params": {"inputResponses": {"key": "no object"}}},
        {"id": 8, "result": {"content": "not a list of blocks"}},
        {"id": 8, "result": {"resultType": "input_required", "inputRequests": {"key": None}}},
        {"id": 9, "result": {"action": "accept", "content": {"word": "x" * 300}}},
        {"id": 7, "error": {"code": -32602, "message": "Invalid or expired requestState"}},
        {"nothing": "known"},
    ]
    ways = ("from_client", "to_client", "from_upstream", "to_upstream")
    lines = draw(rows("\n".join(said(way, body) for body in bodies for way in ways)), width=width, color=False)
    assert max(map(len, lines)) <= min(max(width, 80), 100)


def test_both_sides_have_a_column_on_a_wide_terminal() -> None:
    told = [Row("old", True, "to the server", ["x" * 300]), Row("new", False, "to the client")]
    head, rule, *lines = draw(told, width=200, color=False)
    assert head.startswith("LEGACY SERVER")
    assert head.endswith("MODERN CLIENT (2026-07-28)")
    assert max(map(len, [head, rule, *lines])) <= 100
    assert lines[0].startswith("to the server")
    assert lines[0].endswith("◀│")
    assert lines[-1].endswith("│▶ to the client")
    assert any("…" in line for line in lines), "a long detail is cut"


def test_colours_are_added_only_if_they_are_asked_for() -> None:
    told = [Row("old", True, "one"), Row("new", True, "two")]
    assert "\033[33m" in "".join(draw(told, width=100, color=True))
    assert "\033" not in "".join(draw(told, width=100, color=False))
