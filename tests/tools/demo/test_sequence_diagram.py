"""The demo's picture of what both sides said."""

from typing import Any

import pytest

from gateway.tools.demo.message_reader import Side, WireMessage
from gateway.tools.demo.sequence_diagram import Row, draw, rows


def message(
    side: Side, body: dict[str, Any] | None, *, to_server: bool = True, start: str = "", **more: Any
) -> WireMessage:
    return WireMessage(side, to_server, start, more.pop("headers", {}), body, **more)


def request(method: str, **params: Any) -> WireMessage:
    return message("new", {"id": 1, "method": method, "params": params})


def reply(result: Any, to: WireMessage | None = None) -> list[Row]:
    told = [to] if to is not None else []
    return rows([*told, message("new", {"id": 1, "result": result}, to_server=False)])[len(told) :]


@pytest.mark.parametrize(
    ("said", "title", "details"),
    [
        (request("initialize", protocolVersion="2025-11-25"), "initialize 2025-11-25", []),
        (request("tools/list"), "tools/list", []),
        (request("tools/call", name="ask", arguments={"a": 1}), "tools/call ask", ['{"a": 1}']),
        (
            request(
                "tools/call",
                name="ask",
                inputResponses={"q": {"action": "accept", "content": {"city": "Rome"}}},
                requestState="mrtr1.abc",
            ),
            "tools/call ask, again",
            ["inputResponses q: accept city = Rome", "requestState mrtr1.…(9 bytes)"],
        ),
        (
            message("old", {"id": 0, "method": "elicitation/create", "params": {"message": "Who?"}}, streamed=True),
            "elicitation/create, nested on the SSE stream",
            ['"Who?"'],
        ),
        (message("old", {"id": 0, "method": "elicitation/create"}), "elicitation/create", ['""']),
        (message("old", None, start="GET /mcp HTTP/1.1"), "GET, opens a stream", []),
        (message("old", None, start="DELETE /mcp HTTP/1.1"), "DELETE, ends the session", []),
        (message("old", None, start="PUT /mcp HTTP/1.1"), "PUT", []),
        (message("old", None, to_server=False, start="HTTP/1.1 404 Not Found"), "HTTP 404 Not Found", []),
        (message("new", {"id": 1, "error": {"code": -32602, "message": "no"}}), "error -32602", ["no"]),
    ],
)
def test_a_message_is_told_in_a_line(said: WireMessage, title: str, details: list[str]) -> None:
    (row,) = rows([said])
    assert (row.title, row.details) == (title, details)


def test_a_result_is_named_after_its_request() -> None:
    (row,) = reply({"content": [{"type": "text", "text": "done"}, {"type": "image"}]}, request("tools/call"))
    assert (row.title, row.details) == ("result", ["done image"])
    (row,) = reply({"resultType": "complete"}, request("tools/list"))
    assert row.title == "tools/list: complete"
    (row,) = reply({})
    assert row.title == "a request: result"
    asks = {"q": {"params": {"message": "Who?"}}}
    (row,) = reply({"resultType": "input_required", "inputRequests": asks, "requestState": "s" * 1500})
    assert row.details == ['q: "Who?"', "requestState ssssss…(1.5 kB)"]
    (row,) = reply({"action": "decline"})
    assert (row.title, row.details) == ("the answer, in a separate POST", ["decline"])


def test_the_session_id_of_a_handshake_is_cut() -> None:
    shaken = message("old", {"id": 0, "method": "initialize"})
    for headers, details in (({"mcp-session-id": "0123456789"}, ["Mcp-Session-Id: 01234567…"]), ({}, [])):
        answer = message("old", {"id": 0, "result": {}}, to_server=False, headers=headers)
        assert rows([shaken, answer])[1].details == details


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


def test_one_column_names_the_party_on_a_narrow_terminal() -> None:
    told = [
        Row("old", True, "one", ["detail"]),
        Row("old", False, "two"),
        Row("new", True, "three"),
        Row("new", False, "four"),
    ]
    assert draw(told, width=60, color=False) == [
        "to the server   │ one",
        "                │   detail",
        "from the server │ two",
        "from the client │ three",
        "to the client   │ four",
    ]


def test_colours_are_added_only_if_they_are_asked_for() -> None:
    told = [Row("old", True, "one"), Row("new", True, "two")]
    for width in (60, 100):
        assert "\033[33m" in "".join(draw(told, width=width, color=True))
        assert "\033" not in "".join(draw(told, width=width, color=False))
