"""Draws the messages of both sides in order of time: the legacy server left, the modern client right."""

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tools.demo.message_reader import Side, WireMessage

WIDEST = 100
STACKED_BELOW = 80
DETAIL_LINES = 3

Paint = Callable[[str, str], str]

BOLD, DIM, YELLOW, CYAN, PLAIN = "\033[1m", "\033[2m", "\033[33m", "\033[36m", "\033[0m"


@dataclass(frozen=True)
class Row:
    """One message: a title and the interesting part of its content."""

    side: Side
    to_server: bool
    title: str
    details: Sequence[str] = ()


def rows(messages: Iterable[WireMessage]) -> list[Row]:
    """Describe the messages; a response is named after the latest request with its id."""
    asked: dict[tuple[Side, bool, str], str] = {}
    told = []
    for message in messages:
        body = message.body or {}
        request = "method" in body
        key = (message.side, message.to_server == request, str(body.get("id")))
        if request:
            asked[key] = str(body["method"])
        title, details = _request(message) if request else _reply(message, asked.get(key, "a request"))
        told.append(Row(message.side, message.to_server, title, [d for d in details if d]))
    return told


def draw(told: Iterable[Row], *, width: int, color: bool) -> list[str]:
    """Return lines for a terminal of this width: two columns, or one if it is too narrow."""
    width = min(width, WIDEST)
    paint: Paint = _paint if color else lambda _, text: text
    return _stacked(told, width, paint) if width < STACKED_BELOW else _side_by_side(told, width, paint)


def _request(message: WireMessage) -> tuple[str, list[str]]:
    assert message.body is not None
    method = str(message.body["method"])
    params = _mapping(message.body.get("params"))
    match method:
        case "initialize":
            return f"initialize {params.get('protocolVersion', '')}", []
        case "tools/call":
            answers = _mapping(params.get("inputResponses"))
            again = "inputResponses" in params or "requestState" in params
            details = [f"{key}: {_answer(_mapping(value))}" for key, value in answers.items()]
            return f"tools/call {params.get('name', '')}" + (", again" if again else ""), [
                "" if again else _json(params.get("arguments", {})),
                *(f"inputResponses {detail}" for detail in details),
                _state(params),
            ]
        case "elicitation/create":
            where = ", nested on the SSE stream" if message.streamed else ""
            return f"elicitation/create{where}", [f'"{params.get("message", "")}"']
        case _:
            return method, []


def _reply(message: WireMessage, method: str) -> tuple[str, list[str]]:
    body = message.body or {}
    if error := _mapping(body.get("error")):
        return f"error {error.get('code')}", [str(error.get("message", ""))]
    result = body.get("result")
    if not isinstance(result, dict):
        return _http(message), []
    if result.get("resultType") == "input_required":
        asks = _mapping(result.get("inputRequests")).items()
        questions = [f'{key}: "{_mapping(_mapping(ask).get("params")).get("message", "")}"' for key, ask in asks]
        return "input_required", [*questions, _state(result)]
    if method == "elicitation/create" or "action" in result:
        return "the answer, in a separate POST", [_answer(result)]
    title = str(result.get("resultType", "result"))
    if method == "tools/call":
        blocks = map(_mapping, result.get("content") or [])
        return title, [" ".join(str(block.get("text", block.get("type"))) for block in blocks)]
    session = message.headers.get("mcp-session-id", "") if method == "initialize" else ""
    return f"{method}: {title}", [f"Mcp-Session-Id: {session[:8]}…" if session else ""]


def _http(message: WireMessage) -> str:
    if message.start.startswith("HTTP/"):
        return f"HTTP {message.start.partition(' ')[2]}"
    verb = message.start.partition(" ")[0]
    return {"GET": "GET, opens a stream", "DELETE": "DELETE, ends the session"}.get(verb, verb)


def _answer(value: dict[str, Any]) -> str:
    content = ", ".join(f"{name} = {given}" for name, given in _mapping(value.get("content")).items())
    return f"{value.get('action', '')} {content}".strip()


def _state(carrier: dict[str, Any]) -> str:
    state = carrier.get("requestState")
    if not isinstance(state, str):
        return ""
    prefix, dot, _ = state[:12].partition(".")
    size = f"{len(state) / 1000:.1f} kB" if len(state) >= 1000 else f"{len(state)} bytes"
    return f"requestState {prefix if dot else state[:6]}{dot}…({size})"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _wrapped(row: Row, width: int) -> list[str]:
    lines = textwrap.wrap(row.title, width, max_lines=2, placeholder="…")
    for detail in row.details:
        lines += textwrap.wrap(
            detail, width, initial_indent="  ", subsequent_indent="  ", max_lines=DETAIL_LINES, placeholder="…"
        )
    return lines


def _side_by_side(told: Iterable[Row], width: int, paint: Paint) -> list[str]:
    left = (width - 5) // 2
    right = width - 5 - left
    lines = [
        paint(BOLD, f"{'LEGACY SERVER (2025-11-25)':<{left - 2}}gateway{'MODERN CLIENT (2026-07-28)':>{right}}"),
        f"{'─' * (left + 2)}┼{'─' * (right + 2)}",
    ]
    for row in told:
        old = row.side == "old"
        arrow = paint(_hue(row), "◀" if row.to_server else "▶")
        for number, line in enumerate(_wrapped(row, left if old else right)):
            mark = " " if number else arrow
            text = paint(DIM if number else BOLD, line)
            pad = " " * (left - len(line))
            lines.append(f"{text}{pad} {mark}│" if old else f"{' ' * (left + 2)}│{mark} {text}")
    return lines


def _stacked(told: Iterable[Row], width: int, paint: Paint) -> list[str]:
    lines = []
    for row in told:
        party = "server" if row.side == "old" else "client"
        received = row.to_server == (row.side == "old")
        direction = f"{'to' if received else 'from'} the {party}"
        mark = f"{direction:<15} │ "
        for number, line in enumerate(_wrapped(row, max(width - len(mark), 20))):
            start = f"{'':{len(mark) - 2}}│ " if number else mark
            lines.append(paint(_hue(row), start) + paint(DIM if number else BOLD, line))
    return lines


def _hue(row: Row) -> str:
    return YELLOW if row.side == "old" else CYAN


def _paint(code: str, text: str) -> str:
    return f"{code}{text}{PLAIN}"
